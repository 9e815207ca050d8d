"""Names as users read them: the nearest to a wrong one, the first of many, dotted, escaped."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any


def nearest(name: str, known: Iterable[str]) -> str:
    """Return " Did you mean ...?" with the known names closest to a wrong one, or nothing.

    >>> nearest("lenet_cifar", ["lenet_cifar10", "rosenbrock"])
    " Did you mean 'lenet_cifar10'?"
    """
    close = difflib.get_close_matches(str(name), list(known), n=3, cutoff=0.45)
    return f" Did you mean {' or '.join(map(repr, close))}?" if close else ""


def check_arguments(
    function: Callable[..., Any], given: Iterable[str], taken: Collection[str]
) -> None:
    """Raise unless a function takes all names passed to it in ``**options``."""
    for name in given:
        if name not in taken:
            others = list(inspect.signature(function).parameters)[:-1]  # the last one is **options
            raise TypeError(
                f"{function.__qualname__} has no argument {name!r}."
                f"{nearest(name, [*taken, *others])}"
            )


def first_names(names: Sequence[str], most: int = 8) -> str:
    """Return the first few names, quoted, and how many more there are.

    >>> first_names(["a", "b", "c"], most=2)
    "'a', 'b' and 1 more"
    """
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(repr, names[:most])) + more


def dotted_names(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the fields of nested mappings by their dotted names.

    >>> dict(dotted_names({"seed": 0, "data": {"name": "mnist"}}))
    {'seed': 0, 'data.name': 'mnist'}
    """
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from dotted_names(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def printable(text: str) -> str:
    r"""Return text that a terminal shows but does not interpret: control characters are escaped.

    >>> printable("conv\x1b[31m\n")
    'conv\\x1b[31m\\n'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def markdown_text(text: str) -> str:
    r"""Return text that Markdown shows as it is: no markup, no cells, no links.

    >>> print(markdown_text("a|b <img> [x](http://x)"))
    a\|b &lt;img&gt; \[x\](http:&#47;&#47;x)
    """
    text = re.sub(r"([\\`*_\[\]|~$#!])", r"\\\1", printable(text).replace("&", "&amp;"))
    for part, code in (("<", "&lt;"), (">", "&gt;"), ("://", ":&#47;&#47;"), ("@", "&#64;")):
        text = text.replace(part, code)
    return re.sub(r"(?i)(www)\.", r"\1&#46;", text)


def file_name(text: str, most: int = 100) -> str:
    """Return a name that every file system accepts.

    >>> file_name("lr=0.1, <img src=x>/..")
    'lr=0.1,_img_src=x_..'
    """
    safe = re.sub(r"[^\w=,.+-]+", "_", text, flags=re.ASCII)
    return safe.lstrip(".-")[:most] or "_"
