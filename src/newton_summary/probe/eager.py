"""Run a loss as it is written, without what others have wrapped around it for training.

Checkpoints, compiled kernels and data-parallel wrappers change how a loss is computed, not what it
is; hooks on gradients change its apparent derivatives. None of them can be differentiated again.

They are bypassed in the measuring thread only. Where torch offers no other way, a torch function is
replaced by a switch, which passes everything through outside a measurement.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
import torch.utils.checkpoint as checkpoint
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils.hooks import RemovableHandle

from newton_summary.display.warn import warn_user

if TYPE_CHECKING:
    from newton_summary.probe.state import Journal


class _Here(threading.local):
    """What this thread is doing."""

    measuring = False
    approximate = False  # whether the loss that is measured has another gradient than torch says

    def __init__(self) -> None:
        self.hooks: set[int] = set()  # registered during the measurement


_here = _Here()


def is_measuring() -> bool:
    """Whether this thread is measuring."""
    return _here.measuring


def mark_approximate() -> None:
    """Record that torch's gradient is not the derivative of the loss in the current measurement."""
    _here.approximate = True


def is_approximate() -> bool:
    """Whether that has been recorded."""
    return _here.approximate


def start_measuring(journal: Journal, alone: bool) -> None:
    """Begin a measurement, which ends with the journal.

    Args:
        journal: The measurement's journal.
        alone: Whether to wait until no other thread measures: it would draw from the same random
            numbers, and on the same model each would undo the other's changes.
    """
    before = _here.measuring

    def stop() -> None:
        _here.measuring = before

    if not before:
        _here.hooks.clear()
    if alone and not before:
        journal.undo_later(_end_turn)
        _wait_for_turn()
    journal.undo_later(stop)
    _here.measuring, _here.approximate = True, False


# Which thread measures, under the key "turn". Not a lock: an interrupt could leave it locked. Each
# operation of a dict is whole to other threads.
_turns: dict[str, int] = {}


def _wait_for_turn() -> None:
    me = threading.get_ident()
    while (owner := _turns.setdefault("turn", me)) != me:
        if owner not in sys._current_frames():  # it has ended without ending its turn
            _turns.pop("turn", None)
        time.sleep(0.002)


def _end_turn() -> None:
    if _turns.get("turn") == threading.get_ident():
        _turns.pop("turn", None)


# --- as it is written -----------------------------------------------------------------------------


def install_switches() -> None:
    """Put a switch in front of whatever must know whether its thread is measuring.

    Each is one assignment and stays: no interrupt and no other thread can see half of it.
    """
    saved_tensors = getattr(checkpoint, "_checkpoint_hook", None)
    if saved_tensors is not None and not issubclass(saved_tensors, _CheckpointSwitch):
        kinds = (_CheckpointSwitch, saved_tensors)
        setattr(checkpoint, "_checkpoint_hook", type("_checkpoint_hook", kinds, {}))  # noqa: B010
    if "apply" not in vars(checkpoint.CheckpointFunction):
        setattr(checkpoint.CheckpointFunction, "apply", classmethod(_run_checkpoint))  # noqa: B010
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        wrapper: Any = nn.parallel.DistributedDataParallel
        if not getattr(wrapper.forward, "is_switch", False):
            switch = _switch(wrapper.forward, _run_inside)
            # Outside of torch.compile, as the original is.
            wrapper.forward = torch._disable_dynamo(switch, recursive=False)  # type: ignore[attr-defined]
    if not getattr(RemovableHandle.__init__, "is_switch", False):
        setattr(RemovableHandle, "__init__", _noting_own(RemovableHandle.__init__))  # noqa: B010
    if not getattr(torch.cond, "is_switch", False):
        setattr(torch, "cond", _switch(torch.cond, _run_one))  # noqa: B010
    compiler: Any = sys.modules.get("torch._dynamo.eval_frame")
    if compiler is not None and not isinstance(compiler._stance, _StanceSwitch):
        compiler._stance = _StanceSwitch(compiler._stance)


class _CheckpointSwitch:
    """Checkpoints with ``use_reentrant=False`` that keep their tensors during a measurement.

    Otherwise they would run again in the backward pass, unobserved, and need not save the same
    tensors as decomposed operations.
    """

    def __enter__(self) -> Any:
        self.keeps_tensors = is_measuring()
        return None if self.keeps_tensors else super().__enter__()  # type: ignore[misc]

    def __exit__(self, *error: Any) -> Any:
        return None if self.keeps_tensors else super().__exit__(*error)  # type: ignore[misc]


def refuse_unknown_checkpoints() -> AbstractContextManager[Any]:
    """Return a context in which checkpoints are an error, if this torch is too new for them."""
    if hasattr(checkpoint, "_checkpoint_hook"):
        return nullcontext()
    return torch.autograd.graph.disable_saved_tensors_hooks(
        f"Checkpoints with use_reentrant=False cannot be measured with torch {torch.__version__}. "
        "Turn checkpointing off for the measurement."
    )


def _run_checkpoint(cls: Any, run: Callable[..., Any], preserve_rng: bool, *args: Any) -> Any:
    """Run a re-entrant checkpoint as a plain call: autograd cannot see the parameters inside."""
    if is_measuring():
        return run(*args)
    return torch.autograd.Function.apply.__func__(cls, run, preserve_rng, *args)  # type: ignore[attr-defined]


def _switch(original: Callable[..., Any], instead: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that is replaced by another one during a measurement."""

    @wraps(original)
    def switch(*args: Any, **kwargs: Any) -> Any:
        return (instead if is_measuring() else original)(*args, **kwargs)

    setattr(switch, "is_switch", True)  # noqa: B010
    return switch


def _noting_own(original: Callable[..., None]) -> Callable[..., None]:
    """Return a function that makes the handle of a hook, and notes its number in a measurement."""

    def make_and_note(handle: RemovableHandle, *args: Any, **kwargs: Any) -> None:
        original(handle, *args, **kwargs)
        _here.hooks.add(handle.id)

    return _switch(original, make_and_note)


def is_own_hook(number: int) -> bool:
    """Whether a hook was registered by this thread in its measurement, and not by another one."""
    return number in _here.hooks


def _run_inside(wrapper: Any, *inputs: Any, **kwargs: Any) -> Any:
    """Run a module wrapped for data parallelism as if it were not.

    A loss may use the wrapped module although it is given the inner one. Its forward pass would
    prepare an all-reduce of gradients that never arrive, and send buffers to the other ranks.
    """
    if wrapper.device_ids and (inputs or kwargs):
        from torch.distributed.utils import _to_kwargs

        device = torch.device(wrapper.device_type, wrapper.device_ids[0])
        (inputs,), (kwargs,) = _to_kwargs(inputs, kwargs, device, False)
    return wrapper.module(*inputs, **kwargs)


def _run_one(pred: Any, true_fn: Any, false_fn: Any, operands: Any = ()) -> Any:
    """Call only one of the functions of ``torch.cond``, which would otherwise compile both."""
    return (true_fn if pred else false_fn)(*operands)


class _StanceSwitch:
    """The stance of torch.compile, which lets functions run as written during a measurement."""

    def __init__(self, original: Any):
        self._original = original

    @property
    def stance(self) -> str:
        return "force_eager" if is_measuring() else self._original.stance

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


def is_recorded() -> bool:
    """Whether a recorder is watching, which itself sees what a loss must not do."""
    modes: list[Any] = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return any(getattr(mode, "sees_changes", False) for mode in modes)


HOOKS = ("register_hook", "register_post_accumulate_grad_hook")


class RestingHooks(TorchFunctionMode):
    """While active, hooks that a loss registers on gradients of its tensors are ignored."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", None) in HOOKS and is_measuring():
            return rest_hook(func, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def rest_hook(func: Callable[..., Any], tensor: Tensor, hook: Callable[..., Any]) -> Any:
    """Return a handle without registering the hook, and warn."""
    if not tensor.requires_grad:
        return func(tensor, hook)  # an error that says why
    mark_approximate()
    warn_user(
        "loss_fn registers a hook on the gradient of a tensor. Such hooks are disabled during a "
        "measurement, so the derivatives are those of the loss without them."
    )
    return RemovableHandle(OrderedDict())
