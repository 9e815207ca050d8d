"""What a call of a torch function is: its name, and what it does to its arguments."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket

from newton_summary.derivatives.sweep.tape import find_tensors


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
GRADIENT_HOOKS = frozenset(["register_hook", "register_post_accumulate_grad_hook"])
# Arguments that may also be written as keywords, in the order in which they stand.
POSITIONAL = names("""
    condition input self tensors other mat1 mat2 vec vec1 vec2 batch1 batch2 tensor tensor1 tensor2
""")

_names: dict[Any, str] = {}


def canonical_name(func: Callable[..., Any]) -> str:
    """Return one name for all spellings of an operation: ``add`` for ``+`` and ``add_``."""
    try:
        return _names[func]
    except (KeyError, TypeError):
        pass
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
    with suppress(TypeError):
        _names[func] = name
    return name


def python_function(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function of torch that an operator such as ``torch.ops.aten.layer_norm`` is."""
    if isinstance(func, OpOverload | OpOverloadPacket):
        packet = func if isinstance(func, OpOverloadPacket) else func.overloadpacket
        return getattr(torch, packet.__name__, func)
    return func


def written_tensors(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> list[Tensor]:
    """Return the tensors that a call changes."""
    first = [*args, *kwargs.values()][:1] if writes_in_place(func, kwargs) else []
    return find_tensors([*first, kwargs.get("out")])


def writes_in_place(func: Callable[..., Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call changes its first argument."""
    name = str(getattr(func, "__name__", ""))
    return (
        name == "__setitem__"
        or (name.startswith("__i") and name not in ("__invert__", "__int__", "__index__"))
        or (name.endswith("_") and not name.endswith("__"))
        or kwargs.get("inplace") is True
    )


_inside: dict[Any, Callable[..., Any] | None] = {}


def without_override_check(func: types.FunctionType) -> Callable[..., Any] | None:
    """Return a function that torch writes in Python, without the check that called us.

    Its body then runs with the recorder active, and every call inside it is seen. None if the
    function is not of torch, or has no such check, so that it would call us again and again.
    """
    if func not in _inside:
        checks = [name for name in PYTHON_CHECKS if name in func.__code__.co_names]
        checks = [name for name in checks if name in func.__globals__]
        if func.__module__ and func.__module__.startswith("torch") and checks:
            names = {**func.__globals__, **dict.fromkeys(checks, lambda *args: False)}
            copy = types.FunctionType(
                func.__code__, names, func.__name__, func.__defaults__, func.__closure__
            )
            copy.__kwdefaults__ = func.__kwdefaults__
            _inside[func] = copy
        else:
            _inside[func] = None
    return _inside[func]
