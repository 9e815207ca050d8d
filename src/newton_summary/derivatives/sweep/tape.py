"""The loss as a tape of operations: recorded while the user's own code runs.

A :class:`Recorder` sees every call of a torch function. Calls that a rule exists for are run and
noted on the tape; functions that torch writes in Python are gone into, so that their elementary
calls are noted instead; calls that do not touch the parameters are left alone.
"""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from newton_summary.derivatives.norms import ELEMENTARY
from newton_summary.derivatives.probe import CannotDifferentiate, Closure
from newton_summary.partition import Params


class Value:
    """A tensor that went into or came out of an operation, as it was at that moment."""

    __slots__ = ("edge", "slot", "tensor", "version")

    def __init__(self, tensor: Tensor, slot: int | None, edge: Any = None):
        """Slot: number of the value on the tape; None for what does not depend on parameters."""
        self.tensor = tensor
        self.version = tensor._version
        self.slot = slot
        self.edge = edge  # of autograd's graph, where the adjoint of the value appears

    @property
    def now(self) -> Tensor:
        """The tensor, if nobody has changed it since."""
        if self.tensor._version != self.version:
            raise CannotDifferentiate(
                f"sweep: a tensor of shape {tuple(self.tensor.shape)} is changed in place, through "
                f"a view or outside of recorded operations, after another operation has used it"
            )
        return self.tensor.detach()


@dataclass(eq=False)
class Op:
    """One operation on the tape: ``y = h(x_1, ..., x_m)``."""

    name: str
    func: Callable[..., Any]
    args: tuple[Any, ...]  # with every tensor as a Value
    kwargs: dict[str, Any]
    outputs: list[Value | None]  # None for an output that does not depend on the parameters
    saved: Any = None  # what a rule keeps from the recording, such as the indices of a maximum
    inputs: list[int] = field(default_factory=list)  # slots that the operation depends on
    wanted: bool = True  # whether a later operation needs the derivatives of the outputs
    passed: bool = True  # whether the sweep has anything to do here

    @property
    def out(self) -> Value:
        """The first output that depends on the parameters."""
        return next(value for value in self.outputs if value is not None)


@dataclass
class Tape:
    """All operations that lead from the parameters to the loss."""

    ops: list[Op]
    loss: Tensor
    leaves: dict[int, str]  # slot -> parameter name
    needed: set[int] = field(default_factory=set)  # slots whose derivatives a later operation uses


PYTHON_CHECKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")

# Calls that answer questions about a tensor, or that only move a result out of torch.
PASS = frozenset(
    "dim size numel element_size stride storage_offset is_contiguous is_floating_point is_complex "
    "get_device ndimension nelement data_ptr untyped_storage storage type _set_grad_enabled "
    "__len__ __hash__ __repr__ __format__ register_hook retain_grad is_same_size "
    "is_inference _is_view is_set_to is_pinned __dlpack__ __dlpack_device__".split()
)
READS_OUT = frozenset(["item", "tolist", "__float__", "__int__", "numpy", "__array__"])


class Recorder(TorchFunctionMode):
    """Record what the loss does to the parameters.

    Args:
        params: The parameters, leaves of the tape.
        known: Names of the operations that rules exist for.
        prepare: For some operations, how to run them so that the rule gets what it needs: a
            function that takes (func, args, kwargs) and returns (result, saved).
        decomposed: For some operations, a function of the same arguments that is run instead.
    """

    def __init__(  # noqa: D107
        self,
        params: Params,
        known: frozenset[str],
        prepare: Mapping[str, Callable[..., tuple[Any, Any]]],
        decomposed: Mapping[str, Callable[..., Any]],
    ):
        super().__init__()
        self.known, self.prepare, self.decomposed = known, prepare, decomposed
        self.ops: list[Op] = []
        self.values: dict[int, Value] = {}  # by the identity of the tensor
        self.leaves: dict[int, str] = {}
        for slot, (name, p) in enumerate(params.items()):
            self.values[id(p)] = Value(p, slot)
            self.leaves[slot] = name
        self.slots = len(params)
        self.entered: list[Any] = []  # Python functions of torch that are being gone through

    def record(self, closure: Closure) -> Tape:
        """Run the loss and return its tape."""
        with self:
            loss = closure()
        self.values = {}
        return Tape(self.ops, loss, self.leaves)

    def __torch_function__(  # noqa: D105
        self, func: Callable[..., Any], types_: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = canonical_name(func)
        if name in PASS:
            return func(*args, **kwargs)
        if func in ELEMENTARY:
            with self:
                return ELEMENTARY[func](*args, **kwargs)
        if isinstance(func, types.FunctionType) and name not in self.prepare:
            inside = without_override_check(func)
            if inside is not None and func not in self.entered:
                self.entered.append(func)
                try:
                    with self:
                        return inside(*args, **kwargs)
                finally:
                    self.entered.pop()
        if not self._depends(args, kwargs):
            return func(*args, **kwargs)
        if name in self.decomposed and not writes_in_place(func, kwargs):
            with self:
                result = self.decomposed[name](*args, **kwargs)
            if result is not NotImplemented:
                return result
        return self._run(name, func, args, kwargs)

    def _run(
        self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a call, and note it if its result depends on the parameters."""
        if name in READS_OUT and torch.is_grad_enabled():
            self._warn_about_reading(name, args[0])
        if name == "grad.get":
            raise CannotDifferentiate("sweep: the loss reads .grad of a tensor")
        if name == "data.get" and self._value_of(args[0]).slot in self.leaves:
            raise CannotDifferentiate("sweep: the loss takes .data of a parameter")
        in_place = writes_in_place(func, kwargs)
        wrapped_args, wrapped_kwargs = self._wrap(args), self._wrap(kwargs)
        if in_place:
            self._keep_old_value(args[0])
        saved = None
        if name in self.prepare:
            result, saved = self.prepare[name](func, args, kwargs)
        elif name in self.known:
            result = func(*args, **kwargs)
        else:
            saved = RandomSnapshot(args)
            result = func(*args, **kwargs)
        if in_place:
            result = args[0] if result is None else result
        many = isinstance(result, tuple | list)
        results = list(result) if many else [result]
        outputs = [self._note(tensor, in_place) for tensor in results]
        if any(output is not None for output in outputs):
            op = Op(name, func, wrapped_args, wrapped_kwargs, outputs, saved)
            op.inputs = [v.slot for v in find_values((op.args, op.kwargs)) if v.slot is not None]
            self.ops.append(op)
        return result

    def _note(self, tensor: Any, in_place: bool) -> Value | None:
        """Give a slot to a result that depends on the parameters."""
        if not isinstance(tensor, Tensor) or not tensor.requires_grad:
            return None
        if id(tensor) in self.values and not in_place:
            return None  # the operation returned its argument, as contiguous() may
        edge = torch.autograd.graph.get_gradient_edge(tensor)
        value = Value(tensor, self.slots, edge)
        self.slots += 1
        self.values[id(tensor)] = value
        return value

    def _keep_old_value(self, tensor: Tensor) -> None:
        """Before a tensor is overwritten, keep what it was for the operations that used it."""
        value = self.values.get(id(tensor))
        if value is not None:
            if value.slot in self.leaves:
                raise ValueError(
                    f"The loss changes parameter {self.leaves[value.slot]!r} in place. A loss "
                    f"only reads the parameters."
                )
            value.tensor = tensor.detach().clone()
            value.version = value.tensor._version
            # Its identity now belongs to the new value; this one must not be freed and reused.
            self.values[-1 - len(self.values)] = value

    def _depends(self, args: Any, kwargs: Any) -> bool:
        return any(t.requires_grad for t in find_tensors((args, kwargs)))

    def _wrap(self, tree: Any) -> Any:
        """Replace every tensor by its value."""
        if isinstance(tree, Tensor):
            return self._value_of(tree)
        if isinstance(tree, tuple) and type(tree) is tuple:
            return tuple(self._wrap(x) for x in tree)
        if isinstance(tree, list):
            return [self._wrap(x) for x in tree]
        if isinstance(tree, dict):
            return {key: self._wrap(x) for key, x in tree.items()}
        return tree

    def _value_of(self, tensor: Tensor) -> Value:
        value = self.values.get(id(tensor))
        if value is not None:
            if value.tensor is tensor and tensor._version != value.version:
                raise CannotDifferentiate(
                    f"sweep: a tensor of shape {tuple(tensor.shape)} is changed in place through a "
                    f"view of it"
                )
            return value
        if tensor.requires_grad and tensor.grad_fn is not None:
            raise CannotDifferentiate(
                f"sweep: {tensor.grad_fn.name()} made a tensor of shape {tuple(tensor.shape)} in a "
                f"way that cannot be recorded, such as a custom autograd function, a compiled "
                f"module or torch.autograd.grad"
            )
        return Value(tensor, None)

    def _warn_about_reading(self, name: str, tensor: Tensor) -> None:
        warnings.warn(
            f"loss_fn calls .{name.strip('_')}() on a tensor that depends on the parameters. If "
            f"the number goes into the loss, no derivative sees that way. Use the tensor itself, "
            f"or .detach() to say that this is meant.",
            stacklevel=4,
        )


class RandomSnapshot:
    """The state of torch's generators before an operation, so that it can be run again alike."""

    def __init__(self, args: Any):
        """Remember the state of the CPU, and of the device that the arguments are on."""
        self.cpu = torch.get_rng_state()
        self.device = next((t.device for t in find_tensors(args) if t.is_cuda), None)
        self.cuda = None if self.device is None else torch.cuda.get_rng_state(self.device)

    def restore(self) -> None:
        """Set the generators to that state."""
        torch.set_rng_state(self.cpu)
        if self.device is not None and self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, self.device)


_names: dict[Any, str] = {}


def canonical_name(func: Callable[..., Any]) -> str:
    """Return one name for all spellings of an operation: ``add`` for ``+``, ``add_`` and ``add``."""
    try:
        return _names[func]
    except (KeyError, TypeError):
        pass
    name = str(getattr(func, "__name__", func))
    if name == "__get__":  # an attribute, such as x.T or x.shape
        name = str(getattr(getattr(func, "__self__", None), "__name__", "attribute"))
        name = name if name in ("T", "mT", "H", "mH", "real", "imag") else f"{name}.get"
        if name.endswith(".get") and name not in ("grad.get", "data.get"):
            name = "dim"  # a question about the tensor: passed on
    elif name == "__set__":
        name = "__set__"
    elif not name.startswith("__") and name.endswith("_"):
        name = name[:-1]
    elif name in ("__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__"):
        name = {"itruediv": "div"}.get(name[2:-2], name[3:-2])
    try:
        _names[func] = name
    except TypeError:
        pass
    return name


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


def find_tensors(tree: Any) -> Iterator[Tensor]:
    """Give every tensor in nested tuples, lists and dicts."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, tuple | list):
        for x in tree:
            yield from find_tensors(x)
    elif isinstance(tree, dict):
        for x in tree.values():
            yield from find_tensors(x)


def find_values(tree: Any) -> Iterator[Value]:
    """Give every value in nested tuples, lists and dicts."""
    if isinstance(tree, Value):
        yield tree
    elif isinstance(tree, tuple | list):
        for x in tree:
            yield from find_values(x)
    elif isinstance(tree, dict):
        for x in tree.values():
            yield from find_values(x)


def plain(tree: Any) -> Any:
    """Replace every value by its tensor."""
    if isinstance(tree, Value):
        return tree.now
    if isinstance(tree, tuple):
        return tuple(plain(x) for x in tree)
    if isinstance(tree, list):
        return [plain(x) for x in tree]
    if isinstance(tree, dict):
        return {key: plain(x) for key, x in tree.items()}
    return tree
