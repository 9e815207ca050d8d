"""What a measurement may disturb, remembered and put back."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter


@contextmanager
def unmoved(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Put tensors back at the end, bit for bit, whatever happens to them in between.

    Also their version counters: a graph that somebody made before can still be differentiated.
    Gives the copies they are put back from.
    """
    tensors = list(tensors)
    copies = [tensor.detach().clone() for tensor in tensors]
    with ExitStack() as versions:
        for tensor in tensors:
            versions.enter_context(_unsafe_preserve_version_counter(tensor))
        try:
            yield copies
        finally:
            with torch.no_grad():
                for tensor, value in zip(tensors, copies, strict=True):
                    tensor.copy_(value)


class ParameterWatch:
    """Finds out whether a loss changes a parameter in place.

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
        self.copies: list[Tensor] | None = None
        if in_detail:  # with one kernel for many of them
            self.copies = [torch.empty_like(value) for value in self.values]
            torch._foreach_copy_(self.copies, self.values)

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

    Not the values of the parameters, which a loss may not change.
    """

    def __init__(self, model: nn.Module):
        """Remember modes, buffers, gradients, hooks, and what requires a gradient."""
        self.modes = [(module, module.training) for module in model.modules()]
        own = (module._buffers for module in model.modules())
        self.buffers = [(buffers, dict(buffers)) for buffers in own if isinstance(buffers, dict)]
        # One made under inference_mode cannot be changed outside of it.
        self.tensors = [
            buffer
            for _, buffers in self.buffers
            for buffer in buffers.values()
            if buffer is not None and not buffer.is_inference()
        ]
        self.values = [tensor.detach().clone() for tensor in self.tensors]
        self.versions = ExitStack()
        self.params = [(p, p.requires_grad, p.grad, p._backward_hooks) for p in model.parameters()]
        self.hooks = [(m, m._backward_hooks, m._backward_pre_hooks) for m in model.modules()]

    def rest(self) -> None:
        """Let hooks rest, and hide the gradients from a loss that calls ``backward`` itself."""
        for tensor in self.tensors:
            self.versions.enter_context(_unsafe_preserve_version_counter(tensor))
        for p, _, _, hooks in self.params:
            p.grad = None
            if hooks:
                p._backward_hooks = None
        for module, after, before in self.hooks:
            if after or before:
                module._backward_hooks = OrderedDict()
                module._backward_pre_hooks = OrderedDict()

    def restore(self) -> None:
        """Put back what an evaluation may have changed, before the next one."""
        for module, training in self.modes:
            if module.training != training:
                module.training = training
        for live, saved in self.buffers:
            live.clear()
            live.update(saved)
        if self.tensors:
            # Always: the fused batch norm changes its statistics without counting a new version.
            torch._foreach_copy_([tensor.data for tensor in self.tensors], self.values)
        for p, requires_grad, _, _ in self.params:
            if p.requires_grad != requires_grad:
                p.requires_grad_(requires_grad)

    def release(self) -> None:
        """Put back everything, at the end; also versions, so that older graphs remain valid."""
        self.restore()
        self.versions.close()
        for p, _, grad, hooks in self.params:
            p.grad = grad
            if hooks:
                p._backward_hooks = hooks
        for module, after, before in self.hooks:
            module._backward_hooks, module._backward_pre_hooks = after, before


class RandomState:
    """The generators that a loss or its data may draw from: torch's, Python's and numpy's."""

    State = tuple[Any, ...]

    def __init__(self, devices: Iterable[torch.device], generators: Sequence[torch.Generator] = ()):
        """Look after the CPU, the given devices, and the generators of a data loader."""
        self.devices = sorted({d for d in devices if d.type not in ("cpu", "meta")}, key=str)
        self.generators = generators
        self._known: RandomState.State | None = None  # the present state, if nobody has drawn since

    def capture(self) -> State:
        """Return the present state of all of them."""
        if self._known is None:
            self._known = (
                torch.get_rng_state(),
                [_random_module(d).get_rng_state(*_which(d)) for d in self.devices],
                [generator.get_state() for generator in self.generators],
                random.getstate(),
                np.random.get_state(),
            )
        return self._known

    def forget(self) -> None:
        """Say that somebody else may draw from the generators now."""
        self._known = None

    def restore(self, state: State) -> None:
        """Set all of them to a captured state."""
        if state is self._known:
            return
        self._known = state
        cpu, devices, generators, python, numpy = state
        torch.set_rng_state(cpu)
        for device, value in zip(self.devices, devices, strict=True):
            _random_module(device).set_rng_state(value, *_which(device))
        for generator, value in zip(self.generators, generators, strict=True):
            generator.set_state(value)
        random.setstate(python)
        np.random.set_state(numpy)

    def jump(self, state: State) -> None:
        """Go on from a captured state to another, which does not depend on what was drawn since."""
        self.restore(state)
        seed = int(torch.randint(2**31, ()))
        self.forget()
        torch.default_generator.manual_seed(seed)
        for device in self.devices:
            module = _random_module(device)
            with module.device(device) if _which(device) else nullcontext():
                module.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)


def _random_module(device: torch.device) -> Any:
    return torch.get_device_module(device)


def _which(device: torch.device) -> tuple[torch.device, ...]:
    """Return the arguments that name a device; there is only one of type mps."""
    return () if device.type == "mps" else (device,)


def _generators(data: Any) -> list[torch.Generator]:
    """Return the generators that a data loader and its samplers own."""
    if isinstance(data, Mapping):  # one batch, whose entries may be attributes
        return []
    batch_sampler = getattr(data, "batch_sampler", None)
    samplers = (getattr(data, "sampler", None), getattr(batch_sampler, "sampler", None))
    owners = (data, batch_sampler, *samplers)
    found = {id(g): g for g in (getattr(owner, "generator", None) for owner in owners)}
    return [g for g in found.values() if isinstance(g, torch.Generator)]
