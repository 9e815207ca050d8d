"""What a measurement may disturb, remembered and put back."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
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


class SavedLeaf:
    """What an evaluation may change about a parameter, but for its value."""

    def __init__(self, p: Tensor):
        """Remember the present state."""
        self.p = p
        self.grad = p.grad
        self.requires_grad = p.requires_grad
        self.hooks = p._backward_hooks

    def rest_hooks(self) -> None:
        """Let the hooks rest; and the gradient, should the loss call ``backward`` itself."""
        self.p.grad = None
        if self.hooks:
            self.p._backward_hooks = None

    def restore(self) -> None:
        """Put back whether it is trained."""
        if self.p.requires_grad != self.requires_grad:
            self.p.requires_grad_(self.requires_grad)

    def restore_hooks(self) -> None:
        """Put back the hooks and the gradient."""
        self.p.grad = self.grad
        if self.hooks:
            self.p._backward_hooks = self.hooks


class SavedModule:
    """The mode, the buffers and the backward hooks of a module (not of its children)."""

    def __init__(self, module: nn.Module):
        """Remember the present state."""
        self.module = module
        self.training = module.training
        self.buffers = dict(module._buffers)
        self.values = [
            SavedBuffer(buffer) for buffer in self.buffers.values() if buffer is not None
        ]
        self.hooks = (module._backward_hooks, module._backward_pre_hooks)

    def restore(self) -> None:
        """Put back mode and buffers."""
        self.module.training = self.training
        for value in self.values:
            value.restore()
        self.module._buffers.clear()
        self.module._buffers.update(self.buffers)

    def rest_hooks(self) -> None:
        """Let the backward hooks rest."""
        if any(self.hooks):
            self.module._backward_hooks, self.module._backward_pre_hooks = {}, {}

    def restore_hooks(self) -> None:
        """Put back the backward hooks."""
        self.module._backward_hooks, self.module._backward_pre_hooks = self.hooks


class SavedBuffer:
    """A buffer, and the value it had."""

    def __init__(self, buffer: Tensor):
        """Remember the present value."""
        self.buffer = buffer
        self.value = buffer.detach().clone()
        # One made under inference_mode cannot be changed outside of it, and has no version.
        self.version = None if buffer.is_inference() else buffer._version

    def restore(self) -> None:
        """Put the value back if it was changed."""
        if self.version is not None and self.buffer._version != self.version:
            with torch.no_grad():
                self.buffer.copy_(self.value)
            self.version = self.buffer._version


class RandomState:
    """The generators that a loss or its data may draw from: torch's, Python's and numpy's."""

    State = tuple[Any, ...]

    def __init__(self, devices: Iterable[torch.device], generators: Sequence[torch.Generator] = ()):
        """Look after the CPU, the given devices, and the generators of a data loader."""
        self.devices = sorted({d for d in devices if d.type not in ("cpu", "meta")}, key=str)
        self.generators = generators

    def capture(self) -> State:
        """Return the present state of all of them."""
        return (
            torch.get_rng_state(),
            [_random_module(d).get_rng_state(*_which(d)) for d in self.devices],
            [generator.get_state() for generator in self.generators],
            random.getstate(),
            np.random.get_state(),
        )

    def restore(self, state: State) -> None:
        """Set all of them to a captured state."""
        cpu, devices, generators, python, numpy = state
        torch.set_rng_state(cpu)
        for device, value in zip(self.devices, devices, strict=True):
            _random_module(device).set_rng_state(value, *_which(device))
        for generator, value in zip(self.generators, generators, strict=True):
            generator.set_state(value)
        random.setstate(python)
        np.random.set_state(numpy)

    def jump(self) -> None:
        """Go on to a state that follows from the present one, however much is drawn in between."""
        seed = int(torch.randint(2**31, ()))
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
    batch_sampler = getattr(data, "batch_sampler", None)
    samplers = (getattr(data, "sampler", None), getattr(batch_sampler, "sampler", None))
    owners = (data, batch_sampler, *samplers)
    found = {id(g): g for g in (getattr(owner, "generator", None) for owner in owners)}
    return [g for g in found.values() if isinstance(g, torch.Generator)]
