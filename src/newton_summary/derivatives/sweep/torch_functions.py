"""What a call of a torch function is: its name, and what it does to its arguments."""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import Tensor

from newton_summary.derivatives.norms import elementary_form
from newton_summary.probe.eager import HOOKS


def names(text: str) -> list[str]:
    """Return the words of a text."""
    return text.split()


PYTHON_CHECKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")

# Calls that answer questions about a tensor, or that only move a result out of torch.
PASS = frozenset(
    names("""
    dim size numel element_size stride storage_offset is_contiguous is_floating_point is_complex
    get_device ndimension nelement data_ptr untyped_storage storage _set_grad_enabled __len__
    __hash__ __repr__ __format__ retain_grad requires_grad is_same_size is_inference _is_view
    is_set_to is_pinned __dlpack__ __dlpack_device__
""")
)
READS_OUT = frozenset(names("item tolist __float__ __int__ numpy __array__ tensor new_tensor"))
# Arguments that may also be written as keywords, in the order in which they stand.
POSITIONAL = names("""
    condition input self tensors other mat1 mat2 vec vec1 vec2 batch1 batch2 tensor tensor1 tensor2
""")
# Names that torch takes from numpy.
NUMPY_NAMES = {
    "axis": "dim",
    "keepdims": "keepdim",
    "x": "input",
    "a": "input",
    "x1": "input",
    "x2": "other",
}


@dataclass(frozen=True)
class Call:
    """What is known about a torch function, whatever its arguments."""

    name: str
    in_place: bool  # whether it changes its first argument
    passes: bool  # whether it only answers a question about a tensor
    accesses: bool  # whether it reads or writes an attribute, or registers a hook
    of_torch: bool  # whether its keywords are those of torch
    elementary: Callable[..., Any] | None  # what to run instead, for norms
    inside: Callable[..., Any] | None  # its body, where torch writes it in Python


@cache
def look_up(func: Callable[..., Any]) -> Call:
    """Return what is known about a function, determined once for each."""
    name = canonical_name(func)
    in_python = func if isinstance(func, types.FunctionType) else None
    return Call(
        name,
        writes_in_place(func),
        name in PASS,
        name.endswith((".get", ".set")) or name in HOOKS,
        name != "segment_reduce" and (in_python is None or of_torch(in_python)),
        elementary_form(func),
        None if in_python is None else without_override_check(in_python),
    )


def canonical_name(func: Callable[..., Any]) -> str:
    """Return one name for all spellings of an operation: ``add`` for ``+`` and ``add_``."""
    name = str(getattr(func, "__name__", func))
    if name == "__get__":  # an attribute, such as x.T or x.shape
        name = str(getattr(getattr(func, "__self__", None), "__name__", "attribute"))
        if name in ("grad", "data"):
            name = f"{name}.get"
        elif name not in ("T", "mT", "H", "mH", "real", "imag"):
            name = "dim"  # a question about the tensor: passed on
    elif name == "__set__":
        name = f"{getattr(getattr(func, '__self__', None), '__name__', 'attribute')}.set"
    elif not name.startswith("__") and name.endswith("_"):
        name = name[:-1]
    elif name in ("__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__"):
        name = {"itruediv": "div"}.get(name[2:-2], name[3:-2])
    return name


def in_position(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Rename keywords to those of torch, and put the tensors among them first."""
    kwargs = {NUMPY_NAMES.get(key, key): value for key, value in kwargs.items()}
    order = names("query key value") if "query" in kwargs else POSITIONAL
    moved = [kwargs.pop(key) for key in order if key in kwargs]
    return (*args, *moved), kwargs


def dimensions(x: Tensor, dim: Any) -> list[int]:
    """Return the argument ``dim`` of a call as a list: all of them if none are given."""
    if dim is None or (isinstance(dim, Sequence) and not dim):
        return list(range(x.dim()))
    return [dim] if isinstance(dim, int) else list(dim)


def writes_in_place(func: Callable[..., Any]) -> bool:
    """Whether a function changes its first argument."""
    name = str(getattr(func, "__name__", ""))
    return (
        name == "__setitem__"
        or (name.startswith("__i") and name not in ("__invert__", "__int__", "__index__"))
        or (name.endswith("_") and not name.endswith("__"))
    )


def of_torch(func: types.FunctionType) -> bool:
    """Whether a Python function belongs to torch."""
    return (func.__module__ or "").startswith("torch")


def without_override_check(func: types.FunctionType) -> Callable[..., Any] | None:
    """Return a function that torch writes in Python, without the check that called us.

    Its body then runs with the recorder active, and every call inside it is seen. None if the
    function does not belong to torch, or has no such check, so that it would call us endlessly.
    """
    checks = [name for name in PYTHON_CHECKS if name in func.__code__.co_names]
    checks = [name for name in checks if name in func.__globals__]
    if not checks or not of_torch(func):
        return None
    unchecked = {**func.__globals__, **dict.fromkeys(checks, lambda *args: False)}
    copy = types.FunctionType(
        func.__code__, unchecked, func.__name__, func.__defaults__, func.__closure__
    )
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy
