"""A user's file for ``newton-summary inspect FILE.py:build``: run it, check what it returns.

``build()`` returns a model, a loss function and data. Errors in it, or in the loss, are reported in
one line with the line number in the user's file.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from newton_summary.display.names import nearest
from newton_summary.errors import CannotDifferentiate, UserError
from newton_summary.probe.inputs import LossFn, check_loss_fn

EXPECTED = {
    "model": "a torch.nn.Module",
    "loss_fn": "a function loss_fn(model, batch) that returns the mean loss of the batch",
    "data": "one batch, or an iterable of batches such as a DataLoader",
}
"""What ``build()`` returns, in order."""


class Built(NamedTuple):
    """What ``build()`` returned."""

    model: nn.Module
    loss_fn: LossFn
    data: Any


def split_target(target: str) -> tuple[Path, str]:
    """Return the file and the function in ``FILE.py:build``; by default ``build``.

    >>> split_target("net.py:make")[1], split_target("net.py")[1]
    ('make', 'build')
    """
    file, colon, function = target.rpartition(":")
    if not colon or not function.isidentifier():  # also C:\net.py
        file, function = target, "build"
    return Path(file), function


def load_build(target: str, seed: int = 0) -> Built:
    """Run the file of ``FILE.py:build``, call the function, and check what it returns.

    torch is seeded before anything runs.
    """
    file, function = split_target(target)
    if not file.is_file():
        raise UserError(
            f"There is no file {file}. Use newton-summary inspect FILE.py:build, where build() "
            "returns a model, a loss function and data."
        )
    torch.manual_seed(seed)
    with telling(file, f"{file} cannot be loaded"):
        module = _load(file)
    build = getattr(module, function, None)
    if not callable(build):
        own = [name for name, value in vars(module).items() if inspect.isfunction(value)]
        raise UserError(
            f"{file} has no function {function!r}.{nearest(function, own)} Write one that returns "
            f"a model, a loss function and data."
        )
    with telling(file, f"{function}() in {file} failed"):
        returned = build()
    return _checked(returned, f"{function}()")


def _load(file: Path) -> Any:
    """Import a file as Python runs a script: it can import modules beside it."""
    folder = str(file.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    name = file.stem if file.stem not in sys.modules else f"inspected_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise UserError(f"{file} is not a Python file: its name must end in .py.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look there
    spec.loader.exec_module(module)
    return module


def _checked(returned: Any, function: str) -> Built:
    """Return the three values, or raise a UserError for the wrong one."""
    names = list(EXPECTED)
    if not isinstance(returned, tuple | list) or len(returned) != len(names):
        what = type(returned).__name__
        if isinstance(returned, tuple | list):
            what = f"a {what} of {len(returned)}"
        raise UserError(f"{function} returned {what}: expected three values, model, loss_fn, data.")
    model, loss_fn, data = returned
    right = {
        "model": isinstance(model, nn.Module),
        "loss_fn": callable(loss_fn) and not isinstance(loss_fn, type),
        "data": data is not None and not isinstance(data, str | bytes | int | float),
    }
    for place, name, value in zip(("first", "second", "third"), names, returned, strict=True):
        if not right[name]:
            what = f"the class {value.__name__}" if isinstance(value, type) else kind_of(value)
            raise UserError(
                f"{function} returned {what} as the {place} of model, loss_fn, data: expected "
                f"{name}, {EXPECTED[name]}."
            )
    try:
        check_loss_fn(loss_fn)
    except TypeError as error:
        raise UserError(f"{function} returned a wrong loss_fn: {error}") from None
    return Built(model, loss_fn, data)


def kind_of(value: Any) -> str:
    """Return the type of a value, in a word or two."""
    return "None" if value is None else type(value).__name__


# --- errors ------------------------------------------------------------------------------


@contextlib.contextmanager
def telling(file: Path, what: str, hint: str = "") -> Iterator[None]:
    """Turn errors in the user's code into a UserError with the line number of the file."""
    try:
        yield
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        place = _place(error, file)
        ours = isinstance(error, ValueError | TypeError | CannotDifferentiate | ImportError)
        if _raised_here(error) and not ours:
            raise  # a bug of this package: show the whole traceback
        kind = "" if _raised_here(error) else f"{type(error).__name__}: "
        said = str(error).strip().split("\n")[0].rstrip(".") or "no message"
        raise UserError(f"{what}{place}: {kind}{said}.{hint if place else ''}") from error


def _place(error: BaseException, file: Path) -> str:
    if isinstance(error, SyntaxError) and error.lineno is not None:
        return f", line {error.lineno}"
    own = str(file.resolve())
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if str(Path(frame.filename).resolve()) == own
    ]
    return f", line {lines[-1]}" if lines else ""


def _raised_here(error: BaseException) -> bool:
    """Whether this package raised the error, and not the user's code or torch.

    Functions of torch leave no frame: they fail in the line that calls them.
    """
    *_, last = traceback.extract_tb(error.__traceback__) or [None]
    package = Path(__file__).resolve().parents[1]
    if last is None or package not in Path(last.filename).resolve().parents:
        return False
    return "func(*args" not in (last.line or "")  # a mode that passes a call of the user's on
