"""How Sphinx makes the pages: ``sphinx-build -W docs build/docs``."""

import inspect
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

import newton_summary

project = "newton_summary"
author = "newton_summary contributors"
copyright = f"2026, {author}"
version = release = newton_summary.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "newton_summary"
html_static_path = ["_static"]
html_css_files = ["page.css"]
html_copy_source = False

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 88
napoleon_google_docstring = True
napoleon_numpy_docstring = False


def describe_fields(
    app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """Take the comments behind the fields of a class as their descriptions: shape and meaning."""
    if what != "class" or not _fields(obj):
        return
    source = inspect.getsource(obj)
    for field in _fields(obj):
        found = re.search(rf"^    {field}: .*?  # (.*)$", source, re.MULTILINE)
        said = re.sub(r"([|*`_\\])", r"\\\1", found[1]) if found else ""
        lines.append(f":ivar {field}: {said}")
    lines.append("")


def _fields(obj: Any) -> tuple[str, ...]:
    """Return the fields of a dataclass or a named tuple; of anything else, none."""
    return tuple(getattr(obj, "__dataclass_fields__", None) or getattr(obj, "_fields", ()))


def sign_briefly(
    app: Any, what: str, name: str, obj: Any, options: Any, signature: Any, returns: Any
) -> tuple[str, None] | None:
    """Name the fields of a dataclass or a named tuple in its signature; types are told below."""
    fields = _fields(obj)
    return (f"({', '.join(fields)})", None) if what == "class" and fields else None


def setup(app: Any) -> None:
    """Connect the above."""
    app.connect("autodoc-process-docstring", describe_fields)
    app.connect("autodoc-process-signature", sign_briefly)
