"""Record a loss while the user's own code runs.

A :class:`Recorder` sees every call of a torch function. Calls for which there is a rule are run and
noted on the tape; torch functions written in Python are traced into, so that their elementary calls
are noted instead; calls that do not touch the parameters are left alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from newton_summary.derivatives.sweep.rules import DECOMPOSED, PREPARE, RULES, elementwise
from newton_summary.derivatives.sweep.rules.decomposed import COMPLEX_FORMS
from newton_summary.derivatives.sweep.rules.linear import SAME_ORDER
from newton_summary.derivatives.sweep.rules.selection import POOLING
from newton_summary.derivatives.sweep.tape import (
    Op,
    Tape,
    Value,
    changed_in_place,
    find_tensors,
    find_values,
    map_tree,
    positions_in,
    version_of,
)
from newton_summary.derivatives.sweep.torch_functions import READS_OUT, in_position, look_up, names
from newton_summary.errors import CannotDifferentiate
from newton_summary.partition import Params
from newton_summary.probe.eager import HOOKS, rest_hook
from newton_summary.probe.probe import Closure

Func = Callable[..., Any]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]

# Rules that read no numbers of what moves, or those of their arguments or results alone.
READ_NOTHING = {*SAME_ORDER, *POOLING} | set(
    names("""
    add sub subtract neg negative sum mean cat concat concatenate stack transpose T mT t permute
    expand expand_as broadcast_to __getitem__ split chunk unbind read_view write_view
    embedding where masked_fill rotated
""")
)
READ_ARGUMENTS = elementwise.OF_ARGUMENT | set(
    names("""
    linear conv1d conv2d conv3d matmul bmm mm mul multiply standardize scaled_dot_product_attention
""")
)
READ_RESULT = elementwise.OF_RESULT | {"softmax", "log_softmax"}


def values_read(op: Op) -> list[Value]:
    """Return the values with a slot whose numbers the rule of an operation may read."""
    if op.name in READ_NOTHING and not op.complex:
        return []
    arguments = [] if op.name in READ_RESULT else find_values((op.args, op.kwargs))
    results = [] if op.name in READ_ARGUMENTS else op.made
    return [value for value in (*arguments, *results) if value.slot is not None]


class Recorder(TorchFunctionMode):
    """Records what the loss does to the parameters, the leaves of the tape."""

    sees_changes = True  # of the parameters, and hooks: a probe need not look for them

    def __init__(self, params: Params):
        super().__init__()
        self.ops: list[Op] = []
        self.values: dict[int, Value] = {}  # by the identity of the tensor
        self.sharing: dict[int, list[Value]] = {}  # by the identity of the owner of the memory
        self.loose: list[tuple[Tensor, int]] = []  # what .data gave, and its version
        self.entered: list[Any] = []  # Python functions of torch that are being traced into
        self.leaves: dict[int, str] = {}
        self.read: set[int | None] = set()  # slots of values whose numbers a rule may read
        self.unseen: dict[int, str] = {}  # slots of what was made out of sight, and why it was
        self.slots = 0
        self.differentiates = False  # whether the loss calls torch.autograd.grad
        self.finished = False  # an interrupt may leave it active
        self.memory = {p.untyped_storage().data_ptr(): n for n, p in params.items() if p.numel()}
        for name, p in params.items():
            self.leaves[self.slots] = name
            self._new_value(p, None)

    def record(self, closure: Closure) -> Tape:
        """Run the loss and return its tape."""
        for mode in _get_current_function_mode_stack():  # type: ignore[no-untyped-call]
            if not isinstance(mode, DeviceContext):
                raise CannotDifferentiate(
                    f"sweep: {type(mode).__name__}, which is active during the measurement, may "
                    "change what an operation does"
                )
        try:
            with self:
                loss = closure()
        finally:
            self.finished = True
        for tensor, version in self.loose:
            if tensor._version != version:
                raise changed_in_place(tensor)
        if loss.requires_grad:
            slot = self._value_of(loss).slot
            if slot is None:
                loss = loss.detach()  # it leads to other leaves than the parameters
            elif self.unseen:
                self._leave_out_unseen(slot)
        self.values, self.sharing = {}, {}
        return Tape(self.ops, loss, self.leaves)

    def _leave_out_unseen(self, loss: int) -> None:
        """Take what depends on unseen values off the tape, unless the loss is among it.

        A metric besides the loss may come from TorchScript, and leads nowhere else.
        """
        cause = dict(self.unseen)
        kept = []
        for op in self.ops:
            why = next((cause[slot] for slot in op.inputs if slot in cause), None)
            if why is None:
                kept.append(op)
                continue
            cause.update({value.slot: why for value in op.made if value.slot is not None})
        if loss in cause:
            raise CannotDifferentiate(f"sweep: {cause[loss]}")
        self.ops = kept

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        call = look_up(func)
        if call.passes or self.finished:
            return func(*args, **kwargs)
        if call.accesses:
            return self._access(call.name, func, args, kwargs)
        in_place = call.in_place or kwargs.get("inplace") is True
        if not torch.is_grad_enabled():
            return self._run_unrecorded(func, args, kwargs, in_place)
        if call.elementary is not None:
            with self:
                return call.elementary(*args, **kwargs)
        self.differentiates |= func is torch.autograd.grad
        if call.inside is not None and func not in self.entered:
            self.entered.append(func)
            try:
                with self:
                    return call.inside(*args, **kwargs)
            finally:
                self.entered.pop()
        tensors = find_tensors((args, kwargs) if kwargs else args)
        if not any(t.requires_grad for t in tensors):
            return self._run_unrecorded(func, args, kwargs, in_place)
        if kwargs and call.of_torch:
            args, kwargs = in_position(args, kwargs)
        has_complex = any(t.is_complex() for t in tensors)
        if call.name in DECOMPOSED and (not has_complex or call.name in COMPLEX_FORMS):
            with self:
                result = self._run_decomposed(call.name, args, kwargs, in_place)
            if result is not NotImplemented:
                return result
        return self._run(call.name, func, args, kwargs, in_place, has_complex)

    # --- ways to run a call -----------------------------------------------------------------------

    def _run(
        self, name: str, func: Func, args: Args, kwargs: Kwargs, in_place: bool, has_complex: bool
    ) -> Any:
        """Run a call, and note it if its result depends on the parameters."""
        if name in READS_OUT:
            call = "torch.tensor" if name == "tensor" else f".{name.strip('_')}"
            warnings.warn(
                f"loss_fn calls {call}() on a tensor that depends on the parameters. If the "
                "number enters the loss, derivatives miss that path. Use the tensor itself, or "
                ".detach() if this is intended.",
                stacklevel=3,
            )
        op = Op(name, func, map_tree(self._wrap, args), map_tree(self._wrap, kwargs), [])
        self.read.update(value.slot for value in values_read(op))
        owner = self._before_writing(args[0]) if in_place else None
        if name in PREPARE:
            result, op.saved = PREPARE[name](func, args, kwargs)
        elif name in RULES:
            result = func(*args, **kwargs)
        else:
            op.saved = Circumstances(args)
            result = apart(func(*args, **kwargs))
        if in_place:
            result = args[0] if result is None else result
        results = list(result) if isinstance(result, tuple | list) else [result]
        op.outputs = [self._note(tensor, op, in_place) for tensor in results]
        if op.inputs and op.made:
            self.read.update(value.slot for value in values_read(op))
            op.complex = has_complex or any(t.is_complex() for t in find_tensors(results))
            self.ops.append(op)
            if owner is not None:
                self._write_to_owner(owner, args[0])
        return result

    def _run_decomposed(self, name: str, args: Args, kwargs: Kwargs, in_place: bool) -> Any:
        """Run several elementary operations in place of one."""
        try:
            first = args[0].clone() if in_place else args[0]
            result = DECOMPOSED[name](first, *args[1:], **kwargs)
        except TypeError:  # a way to call it that is not foreseen
            return NotImplemented
        return args[0].copy_(result) if in_place and result is not NotImplemented else result

    def _run_unrecorded(self, func: Func, args: Args, kwargs: Kwargs, in_place: bool) -> Any:
        """Run a call whose result does not depend on the parameters.

        What it writes into a tensor that does changes the number and not its derivatives: autograd
        does not see it.
        """
        if not in_place and "out" not in kwargs:
            return func(*args, **kwargs)
        first = [*args, *kwargs.values()][:1] if in_place else []
        written = find_tensors([*first, kwargs.get("out")])
        old = {id(owner): owner for owner in map(owner_of, written) if id(owner) in self.values}
        values = [self._value_of(owner) for owner in old.values()]
        for tensor in written:
            self._before_writing(tensor)
        result = func(*args, **kwargs)
        for owner, value in zip(old.values(), values, strict=True):
            if value.slot is not None:
                self._append("clone", torch.clone, (value,), owner, None)
        return result

    def _access(self, name: str, func: Func, args: Args, kwargs: Kwargs) -> Any:
        """Pass on what is not an operation: attributes."""
        if not args[0].requires_grad:
            return func(*args, **kwargs)
        if name in HOOKS:
            return rest_hook(func, *args, **kwargs)
        if name == "data.set" and id(args[0]) in self.values:
            # The same memory is what module.to() writes where there is nothing to convert.
            a, b = ((x.dtype, x.device, x.shape, x.stride(), x.data_ptr()) for x in args)
            if a == b:
                return None
            raise changed_in_place(args[0])
        result = func(*args, **kwargs)
        if name == "data.get":
            self.loose.append((result, result._version))
        return result

    # --- tensors and their values -----------------------------------------------------------------

    def _new_value(self, tensor: Tensor, edge: Any) -> Value:
        """Give a slot to a tensor that depends on the parameters."""
        value = Value(tensor, self.slots, edge)
        self.slots += 1
        self.values[id(tensor)] = value
        self.sharing.setdefault(id(owner_of(tensor)), []).append(value)
        return value

    def _constant(self, tensor: Tensor) -> Value:
        value = Value(tensor, None)
        self.sharing.setdefault(id(owner_of(tensor)), []).append(value)
        return value

    def _note(self, tensor: Any, op: Op, in_place: bool) -> Value | None:
        """Give a slot to a result that depends on the parameters."""
        if not isinstance(tensor, Tensor) or not tensor.requires_grad:
            return None
        if id(tensor) in self.values and not in_place:
            return None  # the operation returned its argument, as contiguous() may
        if not op.inputs:
            self.values[id(tensor)] = self._constant(tensor)  # of other leaves than the parameters
            return None
        return self._new_value(tensor, get_gradient_edge(tensor))

    def _value_of(self, tensor: Tensor) -> Value:
        """Return the present value of a tensor."""
        if type(tensor) not in (Tensor, Parameter):
            check_subclass(type(tensor))
        if not tensor.requires_grad:
            return self._constant(tensor)
        value = self.values.get(id(tensor))
        if value is not None:
            if tensor._version != value.version:
                raise changed_in_place(tensor)
            return value
        if tensor.grad_fn is None:
            return self._constant(tensor)
        owner = owner_of(tensor)
        if id(owner) in self.values and tensor.grad_fn.name() == "AsStridedBackward0":
            # What a view has become after the tensor that owns the memory was written to.
            value, positions = self._value_of(owner), positions_in(owner, tensor)
            edge = get_gradient_edge(tensor)
            return self._append("read_view", positions_in, (value,), tensor, edge, positions)
        why = (
            "the loss calls torch.autograd.grad, which cannot be recorded"
            if self.differentiates
            else f"{tensor.grad_fn.name()} made a tensor of shape {tuple(tensor.shape)} in a way "
            "that cannot be recorded, such as a custom autograd function, TorchScript or "
            "torch.autograd.grad"
        )
        if torch._C._functorch.is_functorch_wrapped_tensor(tensor):  # which means nothing outside
            raise CannotDifferentiate(f"sweep: {why}")
        self.unseen[self.slots] = why
        return self._new_value(tensor, get_gradient_edge(tensor))

    def _wrap(self, x: Any) -> Any:
        """Replace a tensor by its value."""
        return self._value_of(x) if isinstance(x, Tensor) else x

    def _append(
        self, name: str, func: Func, args: Args, result: Tensor, edge: Any, saved: Any = None
    ) -> Value:
        """Note what the recorder knows to have made a tensor, and return its value."""
        new = self._new_value(result, edge)
        self.ops.append(Op(name, func, args, {}, [new], saved))
        return new

    # --- writing in place -------------------------------------------------------------------------

    def _before_writing(self, tensor: Any) -> Value | None:
        """Keep what a tensor and its views are now, for the operations that have used them.

        Returns:
            The value of the tensor that owns the memory, if it is another one.
        """
        if not isinstance(tensor, Tensor):
            raise CannotDifferentiate("sweep: an operation changes several tensors in place")
        owner = owner_of(tensor)
        parameter = self.memory.get(owner.untyped_storage().data_ptr())  # also if by way of .data
        if parameter is not None:
            raise ValueError(
                f"The loss changes parameter {parameter!r} in place. A loss may only read the "
                "parameters."
            )
        owner_value = None
        if owner is not tensor:
            owner_value = self._owner_value(owner)
            self._move_edges(owner)
        sharing = self.sharing.pop(id(owner), [])
        copy: Tensor | None = None
        for some in sharing:
            self.values.pop(id(some.tensor), None)
            if version_of(some.tensor) != some.version:
                continue
            if some.slot is not None and some.slot not in self.read:
                some.forget()
                continue
            copy = owner.detach().clone() if copy is None else copy
            some.tensor = view_like(some.tensor, owner, copy)
            some.version = some.tensor._version
        return owner_value

    def _owner_value(self, owner: Tensor) -> Value:
        """Return the value of the tensor that owns the memory of a view.

        A layer may have given out nothing but a view of all of it, in another shape.
        """
        if id(owner) not in self.values and owner.is_contiguous():
            for view in self.sharing.get(id(owner), []):
                whole = view.tensor.numel() == owner.numel() and view.tensor.is_contiguous()
                if whole and view.slot is not None:
                    args, edge = (view, owner.shape), get_gradient_edge(owner)
                    return self._append("reshape", torch.reshape, args, owner, edge)
        return self._value_of(owner)

    def _move_edges(self, owner: Tensor) -> None:
        """Look up the adjoints of views at the tensor that owns the memory.

        Autograd goes back from a view that was written to straight to the owner, and not by way of
        the view as it was before.
        """
        for value in self.sharing.get(id(owner), []):
            is_view = value.tensor is not owner and value.tensor.dtype == owner.dtype
            if is_view and value.edge is not None:
                value.edge = get_gradient_edge(owner)
                value.part = positions_in(owner, value.tensor)

    def _write_to_owner(self, old: Value, view: Tensor) -> None:
        """After a view was written to, note what this makes of the tensor that owns the memory."""
        owner, written = owner_of(view), self.values[id(view)]
        positions, edge = positions_in(owner, view), get_gradient_edge(owner)
        # Autograd sees the view as a part of the new owner: there its adjoint has to be looked for.
        written.edge, written.part = edge, positions
        self._append("write_view", positions_in, (old, written), owner, edge, positions)


def owner_of(tensor: Tensor) -> Tensor:
    """Return the tensor whose memory this one is a view of, or itself."""
    return tensor if tensor._base is None else tensor._base


def view_like(view: Tensor, owner: Tensor, copy: Tensor) -> Tensor:
    """Return the part of a copy of the owner that a view is of the owner."""
    if view is owner:
        return copy
    if view.dtype != owner.dtype or copy.stride() != owner.stride():
        raise changed_in_place(owner)
    start = view.storage_offset() - owner.storage_offset()
    return copy.as_strided(view.shape, view.stride(), start)


def apart(result: Any) -> Any:
    """Give each of several results of one operation its own edge in autograd's graph.

    One of them may have been computed from another, as the states of an LSTM are: its adjoint at
    the edge inside the operation would contain what goes through the other.
    """
    if not isinstance(result, tuple | list) or sum(is_tracked(r) for r in result) < 2:
        return result
    return type(result)([r.clone() if is_tracked(r) else r for r in result])  # no views: edges move


def is_tracked(result: Any) -> bool:
    """Whether a result is a tensor with a history."""
    return isinstance(result, Tensor) and result.grad_fn is not None


def check_subclass(kind: type) -> None:
    """Raise if a tensor class overrides torch's operations."""
    for name in ("__torch_function__", "__torch_dispatch__"):
        own, *usual = (
            getattr(getattr(k, name), "__func__", getattr(k, name))
            for k in (kind, Tensor, Parameter)
        )
        if own not in usual:
            raise CannotDifferentiate(
                f"sweep: tensors of class {kind.__name__} override torch's operations"
            )


class Circumstances:
    """What an operation depends on besides its arguments, so that it can be rerun identically."""

    def __init__(self, args: Any):
        """Remember the random state, and how autocast is set, on CPU and the arguments' device."""
        device = next((t.device for t in find_tensors(args) if t.device.type != "cpu"), None)
        self.cpu = torch.get_rng_state()
        self.device = device
        self.module = None if device is None else torch.get_device_module(device)
        self.random = None if self.module is None else self.module.get_rng_state(device)
        kinds = ["cpu"] if device is None else ["cpu", device.type]
        self.autocast = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            for kind in kinds
        ]

    @contextmanager
    def again(self) -> Iterator[None]:
        """Restore these circumstances."""
        torch.set_rng_state(self.cpu)
        if self.module is not None:
            self.module.set_rng_state(self.random, self.device)
        with ExitStack() as stack:
            for kind, dtype, enabled in self.autocast:
                stack.enter_context(torch.autocast(kind, dtype, enabled, cache_enabled=False))
            yield
