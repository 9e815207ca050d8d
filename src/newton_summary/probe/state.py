"""What a measurement may disturb, remembered and put back, whatever happens in between.

An interrupt may come at any line, even inside the code that restores things. So every change is
announced in a journal *before* it is made, every undo step may run twice, and journals are nested:
what an interrupted one leaves is undone by the one around it.

Journals belong to a thread, so other threads see nothing of them.
"""

from __future__ import annotations

import contextlib
import copy
import random
import sys
import threading
import traceback
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.nn.utils import parametrize

from newton_summary.parallel.processes import local_part
from newton_summary.probe.eager import is_measuring, is_own_hook

Step = Callable[[], object]
P = ParamSpec("P")
T = TypeVar("T")


class _Open(threading.local):
    """The journals that this thread is in, the innermost last."""

    def __init__(self) -> None:
        self.journals: list[Journal] = []


_open = _Open()


class Journal:
    """A context at whose end all announced changes are undone, the last one first.

    >>> numbers = [1]
    >>> with Journal() as journal:
    ...     journal.undo_later(numbers.clear)
    ...     numbers.append(2)
    >>> numbers
    []
    """

    def __init__(self) -> None:
        self._steps: list[Step] = []
        self._tries = 0  # of the last step

    def undo_later(self, step: Step) -> None:
        """Announce a change: ``step`` puts back what is there now.

        It runs even if the change is never made, and again if it was interrupted.
        """
        self._steps.append(step)

    def undo(self) -> None:
        """Undo everything; after an interrupt, everything that is left."""
        while self._steps:
            if self._tries < 2:  # a step that fails twice must not keep back the others
                self._tries += 1
                self._steps[-1]()
            self._steps.pop()
            self._tries = 0

    def __enter__(self) -> Journal:
        """Become this thread's innermost journal."""
        _open.journals.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        """Undo everything that this journal, and interrupted ones inside it, still hold."""
        try:
            _end_contexts(sys.exc_info()[1])
            self._undo_all()
        finally:
            self._undo_all()

    def _undo_all(self) -> None:
        while self in _open.journals:
            _open.journals[-1].undo()
            _open.journals.pop()
        self.undo()  # of one that another thread has entered


def _end_contexts(error: BaseException | None) -> None:
    """End contexts whose ``__enter__`` or ``__exit__`` an interrupt has caught.

    The traceback keeps them; at its end they would put back what is undone here, such as a mode of
    torch.
    """
    while error is not None:
        for frame, _ in traceback.walk_tb(error.__traceback__):
            if frame.f_code.co_filename == contextlib.__file__:
                with contextlib.suppress(RuntimeError):  # one that still runs
                    frame.clear()
        error = error.__context__


def interrupt_behind(error: BaseException | None) -> BaseException | None:
    """Return the interrupt during whose handling an error was raised, if there was one."""
    while error is not None and isinstance(error, Exception):
        error = error.__context__
    return error


def copies_of(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return copies without a history, by one kernel for many of them."""
    tensors = [tensor.detach() for tensor in tensors]
    copies = [torch.empty_like(tensor) for tensor in tensors]
    torch._foreach_copy_(list(map(local_part, copies)), list(map(local_part, tensors)))
    return copies


@contextmanager
def unmoved(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Restore tensors at the end, bit for bit, whatever happens to them in between.

    Also their version counters, so that a graph made earlier can still be differentiated. Yields
    the copies they are restored from.
    """
    tensors = list(tensors)
    copies = copies_of(tensors)
    versions = [_unsafe_preserve_version_counter(tensor) for tensor in tensors]

    def put_back() -> None:
        with torch._C.DisableTorchFunction(), torch.no_grad():
            torch._foreach_copy_(list(map(local_part, tensors)), list(map(local_part, copies)))
        for version in versions:
            version.__exit__()

    with Journal() as journal:
        journal.undo_later(put_back)
        yield copies


def without_gradients(function: Callable[P, T]) -> Callable[P, T]:
    """Like ``torch.no_grad()`` as a decorator, whose end an interrupt cannot prevent."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        before = torch.is_grad_enabled()
        try:
            try:
                torch._C._set_grad_enabled(False)
                return function(*args, **kwargs)
            finally:
                torch._C._set_grad_enabled(before)
        finally:
            torch._C._set_grad_enabled(before)

    return run


class ParameterWatch:
    """Detects whether a loss changes a parameter in place.

    Args:
        params: The parameters by name.
        in_detail: Compare with a copy of the parameters, from which they are put back. That is one
            more model in memory, so it is done for the first evaluation of a loss. Otherwise
            their version counters are compared, which a change of ``.data`` would escape.
    """

    def __init__(self, params: Mapping[str, Tensor], in_detail: bool):
        self.names = list(params)
        self.values = [p.detach() for p in params.values()]
        self.versions = [value._version for value in self.values]
        self.copies = copies_of(self.values) if in_detail else None

    def put_back(self) -> str | None:
        """Return the name of a parameter that has changed, if there is one."""
        if self.copies is None:
            versions = [value._version for value in self.values]
            changed = [new != old for new, old in zip(versions, self.versions, strict=True)]
        else:
            changed = [not same for same in _same(self.values, self.copies)]
            for value, old, has_changed in zip(self.values, self.copies, changed, strict=True):
                if has_changed:
                    value.data.copy_(old)
        return next((n for n, yes in zip(self.names, changed, strict=True) if yes), None)


def _same(tensors: list[Tensor], others: list[Tensor]) -> list[bool]:
    """Return for each pair whether it holds the same numbers; not-a-number equals itself."""
    first = tensors[0].device
    gaps = torch._foreach_norm(torch._foreach_sub(tensors, others), 1)
    no_gap = torch.stack([(gap == 0).to(first) for gap in gaps]).tolist()  # waits for a GPU once
    return [
        same or bool(((a == b) | ((a != a) & (b != b))).all())
        for same, a, b in zip(no_gap, tensors, others, strict=True)
    ]


class ModelState:
    """What evaluating and differentiating a loss may change about a model.

    Not the values of the parameters, which a loss may not change. Every method may be called again
    after it was interrupted.
    """

    def __init__(self, model: nn.Module):
        """Remember modes, buffers, attributes, gradients, hooks, and what requires a gradient."""
        modules = list(model.modules())
        self.params = [(p, p.requires_grad, p.grad) for p in model.parameters()]
        self.modes = [(module, module.training) for module in modules]
        self.attributes = PlainAttributes(modules)
        plain = list(self.attributes.tensors())
        if plain:  # a view of a parameter moves with it
            memory = {_address(p) for p, _, _ in self.params}
            plain = [x for x in plain if _address(x) not in memory]
        # One made under inference_mode cannot be changed outside it.
        self.tensors = [x for x in (*model.buffers(), *plain) if not x.is_inference()]
        self.values = [tensor.detach().clone() for tensor in self.tensors]
        self.versions = [_unsafe_preserve_version_counter(tensor) for tensor in self.tensors]
        self.resting = [
            hooks for p, _, _ in self.params if (hooks := p._backward_hooks) is not None
        ]
        self.resting += [
            hooks for m in modules for hooks in (m._backward_hooks, m._backward_pre_hooks)
        ]
        forward = [hooks for m in modules for hooks in (m._forward_pre_hooks, m._forward_hooks)]
        self.hooks = [(hooks, dict(hooks)) for hooks in (*self.resting, *forward)]
        self.cached = _cached_parametrizations(modules)

    def rest(self) -> None:
        """Disable hooks, and hide the gradients from a loss that calls ``backward`` itself."""
        for p, _, _ in self.params:
            p.grad = None
        for hooks in self.resting:
            hooks.clear()

    def restore(self) -> None:
        """Put back what an evaluation may have changed, before the next one."""
        for module, training in self.modes:
            if module.training != training:
                module.training = training
        self.attributes.restore()
        if self.tensors:
            # Always: the fused batch norm changes its statistics without counting a new version.
            torch._foreach_copy_([tensor.data for tensor in self.tensors], self.values)
        for p, requires_grad, _ in self.params:
            if p.requires_grad != requires_grad:
                p.requires_grad_(requires_grad)
            p.grad = None  # of a loss that calls backward() itself
        for key in self.cached:  # of parameters that may have moved since
            parametrize._cache.pop(key, None)

    def release(self) -> None:
        """Put back everything, at the end; also versions, so that older graphs remain valid."""
        with torch._C.DisableTorchFunction():
            self.restore()
            for p, _, grad in self.params:
                p.grad = grad
        for version in self.versions:
            version.__exit__()
        for hooks, saved in self.hooks:
            if not hooks and not saved:
                continue
            others = {k: hook for k, hook in hooks.items() if k not in saved and not is_own_hook(k)}
            set_contents(hooks, saved | others)
        parametrize._cache.update({k: v for k, v in self.cached.items() if v is not None})


class PlainAttributes:
    """What modules hold besides parameters and modules: buffers, states, counters, caches.

    References are put back, and the contents of lists, dicts, sets and deques.
    """

    def __init__(self, modules: Sequence[nn.Module]):
        self.live = [vars(module) for module in modules]
        self.saved = [{k: v for k, v in live.items() if k not in _STANDARD} for live in self.live]
        self.lengths = [len(live) for live in self.live]
        values = [value for saved in self.saved for value in saved.values()]
        values += [live.get(name) for live in self.live for name in _LISTING_BUFFERS]
        self.contents = [(x, copy.copy(x)) for x in values if type(x) in _CONTAINERS]

    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors among them that can be copied and set."""
        for saved in self.saved:
            for x in saved.values():
                if type(x) is Tensor and x.layout is torch.strided and not x.requires_grad:
                    yield x

    def restore(self) -> None:
        """Put them back."""
        for live, saved, length in zip(self.live, self.saved, self.lengths, strict=True):
            for name, value in saved.items():
                if live.get(name, self) is not value:
                    live[name] = value
            if len(live) != length:
                for name in [name for name in live if name not in saved and name not in _STANDARD]:
                    del live[name]
        for value, contents in self.contents:
            set_contents(value, contents)


_STANDARD = frozenset(vars(nn.Module()))  # what every module has; looked after in other ways
_LISTING_BUFFERS = ("_buffers", "_non_persistent_buffers_set")
_CONTAINERS = (list, dict, set, deque, OrderedDict, defaultdict)


def set_contents(container: Any, contents: Any) -> None:
    """Make a container hold the very same things as a copy of it does."""
    live, saved = (x.items() if isinstance(x, dict) else x for x in (container, contents))
    if len(live) == len(saved) and all(map(_is_same, live, saved)):
        return
    container.clear()
    (container.extend if isinstance(container, list | deque) else container.update)(contents)


def _is_same(a: Any, b: Any) -> bool:
    return a is b or (type(a) is tuple and len(a) == 2 and a[0] is b[0] and a[1] is b[1])


def _address(tensor: Tensor) -> int | None:
    """Return where the memory of a tensor begins, if it has any of its own."""
    if tensor.layout is not torch.strided or tensor.is_meta:
        return None
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # such as a tensor subclass
        return None


def _cached_parametrizations(modules: Sequence[nn.Module]) -> dict[Any, Any]:
    """Return what ``parametrize.cached()`` holds of the modules; None for what it does not yet."""
    if not parametrize._cache_enabled:
        return {}
    keys = [
        (id(module), name)
        for module in modules
        if parametrize.is_parametrized(module)
        for name in module.parametrizations  # type: ignore[union-attr]
    ]
    return {key: parametrize._cache.get(key) for key in keys}


class TorchState:
    """What this thread has set: gradients on or off, function modes, autocast."""

    def __init__(self, devices: Iterable[torch.device]):
        self.grad = torch.is_grad_enabled()
        self.modes = _function_modes()
        if not is_measuring():  # any of ours was left by an interrupt
            self.modes = [mode for mode in self.modes if not _is_ours(mode)]
        kinds = {"cpu", *(device.type for device in devices if device.type != "meta")}
        self.autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in sorted(kinds)
        ]
        self.cache = torch.is_autocast_cache_enabled()
        self.overrides = torch._C.DisableTorchFunction()  # its end puts back what was at its start
        # fmt: off
        with self.overrides: pass  # noqa: E701
        # fmt: on

    def prepare(self) -> None:
        """Switch gradients on, and leave the modes of a measurement around this one."""
        torch._C._set_grad_enabled(True)
        while (modes := _function_modes()) and _is_ours(modes[-1]):
            torch._C._pop_torch_function_stack()

    def restore(self) -> None:
        """Put it back."""
        self.overrides.__exit__(None, None, None)
        torch._C._set_grad_enabled(self.grad)
        if _function_modes() != self.modes:
            while torch._C._len_torch_function_stack():
                torch._C._pop_torch_function_stack()
            for mode in self.modes:
                torch._C._push_on_torch_function_stack(mode)
        for kind, enabled, dtype in self.autocast:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(self.cache)


def _is_ours(mode: Any) -> bool:
    return type(mode).__module__.partition(".")[0] == __name__.partition(".")[0]


def _function_modes() -> list[Any]:
    count = torch._C._len_torch_function_stack()
    return [torch._C._get_function_stack_at(i) for i in range(count)]


class RandomState:
    """The random generators a loss or its data may draw from: torch's, Python's and numpy's."""

    State = tuple[Any, ...]

    def __init__(self, devices: Iterable[torch.device], generators: Sequence[torch.Generator] = ()):
        """Track the CPU, the given devices, and the generators of a data loader."""
        self.devices = sorted({d for d in devices if d.type not in ("cpu", "meta")}, key=str)
        self.generators = generators
        self._known: RandomState.State | None = None  # the present state, if nobody has drawn since

    def capture(self) -> State:
        """Return the present state of all of them."""
        if self._known is None:
            self._known = (
                torch.get_rng_state(),
                [torch.get_device_module(d).get_rng_state(*_which(d)) for d in self.devices],
                [generator.get_state() for generator in self.generators],
                random.getstate(),
                np.random.get_state(),
            )
        return self._known

    def is_at(self, state: State) -> bool:
        """Return whether nothing was drawn since a state was captured."""
        self.forget()
        return all(map(_equal, self.capture(), state))

    def forget(self) -> None:
        """Note that others may draw from the generators from now on."""
        self._known = None

    def restore(self, state: State, anew: bool = False) -> None:
        """Set all of them to a captured state; ``anew`` even if it seems to be the present one."""
        if state is self._known and not anew:
            return
        self._known = None
        cpu, devices, generators, python, numpy = state
        torch.set_rng_state(cpu)
        for device, value in zip(self.devices, devices, strict=True):
            torch.get_device_module(device).set_rng_state(value, *_which(device))
        for generator, value in zip(self.generators, generators, strict=True):
            generator.set_state(value)
        random.setstate(python)
        np.random.set_state(numpy)
        self._known = state

    def jump(self, state: State) -> None:
        """Continue from a captured state to another, whatever was drawn since."""
        self.restore(state)
        seed = int(torch.randint(2**31, ()))
        self.forget()
        torch.default_generator.manual_seed(seed)
        for device in self.devices:
            module = torch.get_device_module(device)
            with module.device(device) if _which(device) else nullcontext():
                module.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)


def _which(device: torch.device) -> tuple[torch.device, ...]:
    """Return the arguments that name a device; there is only one of type mps."""
    return () if device.type == "mps" else (device,)


def _equal(a: Any, b: Any) -> bool:
    """Whether two states of generators are the same, of whatever types they are made."""
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_equal, a, b))
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    return bool(np.array_equal(a, b))


def own_generators(data: Any) -> list[torch.Generator]:
    """Return the generators that a data loader and its samplers own."""
    if isinstance(data, Mapping):  # one batch, whose entries may be attributes
        return []
    batch_sampler = getattr(data, "batch_sampler", None)
    samplers = (getattr(data, "sampler", None), getattr(batch_sampler, "sampler", None))
    owners = (data, batch_sampler, *samplers)
    found = {id(g): g for g in (getattr(owner, "generator", None) for owner in owners)}
    return [g for g in found.values() if isinstance(g, torch.Generator)]
