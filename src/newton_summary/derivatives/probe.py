"""A loss as a repeatable function of the live parameters that leaves no trace.

Every way to compute derivatives works on a *closure*: a function without arguments that evaluates
the loss of one batch at the present parameters. A probe makes these closures. However often one is
called, it draws the same random numbers (dropout), starts from the same buffers (batch norm), and
the model is afterwards as it was before.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, nullcontext
from types import TracebackType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from newton_summary.partition import Partition, unwrap

LossFn = Callable[[nn.Module, Any], Tensor]
Closure = Callable[[], Tensor]


class CannotDifferentiate(Exception):
    """A backend cannot handle this model; the message names the operation."""


class CoupledSamplesError(ValueError):
    """A batch was to be split although the loss depends on it as a whole."""

    def __init__(self) -> None:  # noqa: D107
        super().__init__(
            "The model has a batch norm in training mode, so its loss is a function of the whole "
            "batch, and splitting the batch would change it. Leave microbatch=None, or call "
            "model.eval() if the running statistics are meant."
        )


class WholeBatchOnly(TorchFunctionMode):  # type: ignore[misc]
    """While active, a batch norm in training mode is an error: the batch is a part of a larger one."""

    def __torch_function__(  # noqa: D105
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (F.batch_norm, torch.batch_norm) and (
            args[5] if len(args) > 5 else kwargs.get("training", False)
        ):
            raise CoupledSamplesError()
        return func(*args, **kwargs)


class Probe:
    """The loss of a model on some data, batch by batch, without a trace.

    Args:
        model: The model; wrappers of data parallelism are looked through.
        loss_fn: ``loss_fn(model, batch)`` gives the mean loss of a batch.
        data: One batch, or an iterable of batches.
        partition: The groups, and with them the parameters.
        microbatch: Split batches into parts of at most so many samples.
    """

    def __init__(  # noqa: D107
        self,
        model: nn.Module,
        loss_fn: LossFn,
        data: Any,
        partition: Partition,
        microbatch: int | None = None,
    ):
        if microbatch is not None and microbatch < 1:
            raise ValueError(f"microbatch={microbatch}: write a number of samples, 1 or more.")
        self.model = unwrap(model)
        self.loss_fn = loss_fn
        self.partition = partition
        self.microbatch = microbatch
        self.data = _as_batches(data)
        self.random = RandomState(p.device for p in partition.params.values())
        self.num_parts: int | None = None  # known after the first pass over the data

    # --- leaving no trace -------------------------------------------------------------------------

    def __enter__(self) -> Probe:
        """Remember everything that an evaluation may change."""
        self._modes = {module: module.training for module in self.model.modules()}
        self._buffers = [
            SavedBuffer(module, name, buffer)
            for module in self.model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        self._grads = [(p, p.grad) for p in self.model.parameters()]
        self._start = self.random.capture()
        generator = getattr(self.data, "generator", None)
        self._loader_generator = generator if isinstance(generator, torch.Generator) else None
        self._loader_start = generator.get_state() if self._loader_generator is not None else None
        self._contexts = ExitStack()
        self._contexts.enter_context(torch.inference_mode(False))
        self._contexts.enter_context(torch.enable_grad())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Put everything back, also after an error."""
        self._contexts.close()
        for buffer in self._buffers:
            buffer.restore()
        for module, mode in self._modes.items():
            module.training = mode
        for p, grad in self._grads:
            p.grad = grad
        self._rewind()

    def _rewind(self) -> None:
        """Return to the random state of the start, so that every pass sees the same batches."""
        self.random.restore(self._start)
        if self._loader_generator is not None:
            self._loader_generator.set_state(self._loader_start)

    # --- the data, as closures --------------------------------------------------------------------

    def closures(self) -> Iterator[tuple[Closure, int]]:
        """Give a closure and a number of samples for every (part of a) batch."""
        self._rewind()
        count = 0
        for number, batch in enumerate(self.data):
            for part in self._parts(batch):
                yield self._closure(part, number, part is not batch), count_samples(part)
                count += 1
        if count == 0:
            raise ValueError("The data is empty: it gave no batch to measure.")
        self.num_parts = count

    def _parts(self, batch: Any) -> Iterator[Any]:
        size = count_samples(batch)
        if self.microbatch is None or size <= self.microbatch:
            yield batch
            return
        for start in range(0, size, self.microbatch):
            yield take_samples(batch, size, slice(start, start + self.microbatch))

    def _closure(self, batch: Any, number: int, is_part: bool) -> Closure:
        drawn_from: Any = None

        def closure() -> Tensor:
            nonlocal drawn_from
            if drawn_from is None:
                drawn_from = self.random.capture()
            else:
                self.random.restore(drawn_from)
            for buffer in self._buffers:
                buffer.restore()
            versions = [p._version for p in self.params.values()]
            with WholeBatchOnly() if is_part else nullcontext():
                loss = self.loss_fn(self.model, batch)
            self._check(loss, number, versions)
            return loss

        return closure

    def _check(self, loss: Any, number: int, versions: list[int]) -> None:
        where = f"loss_fn(model, batch) on batch {number}"
        if not isinstance(loss, Tensor):
            raise TypeError(f"{where} returned {type(loss).__name__}: return a tensor, the loss.")
        if loss.numel() != 1:
            raise ValueError(
                f"{where} returned a tensor of shape {tuple(loss.shape)}: return one number, the "
                f"mean loss of the batch, for example with .mean()."
            )
        if not loss.dtype.is_floating_point:
            raise TypeError(f"{where} returned a loss of dtype {loss.dtype}: it has to be real.")
        for (name, p), version in zip(self.params.items(), versions, strict=True):
            if p._version != version:
                raise ValueError(
                    f"{where} changed parameter {name!r} in place. A loss only reads them; what "
                    f"changes them belongs into the training loop."
                )

    @property
    def params(self) -> dict[str, Tensor]:
        """The live parameters by name."""
        return self.partition.params


def check_finite(loss: Tensor) -> None:
    """Raise if the loss is not finite."""
    if not bool(torch.isfinite(loss.detach())):
        raise ValueError(
            f"The loss is {float(loss.detach())}, so it has no derivatives. Look for a division by "
            f"zero, a logarithm of zero, or parameters that have diverged."
        )


def check_depends(loss: Tensor) -> None:
    """Raise if the loss does not depend on any parameter."""
    if not loss.requires_grad:
        raise ValueError(
            "The loss does not depend on the parameters through operations that can be "
            "differentiated. Does loss_fn use the model it is given, without .detach(), .item() "
            "or torch.no_grad()?"
        )


class SavedBuffer:
    """A buffer of a module, and the value it had."""

    def __init__(self, module: nn.Module, name: str, buffer: Tensor):
        """Remember the present value."""
        self.module, self.name, self.buffer = module, name, buffer
        self.value = buffer.detach().clone()
        self.version = buffer._version

    def restore(self) -> None:
        """Put the value back if it was changed or replaced."""
        self.module._buffers[self.name] = self.buffer
        if self.buffer._version != self.version:
            with torch.no_grad():
                self.buffer.copy_(self.value)
            self.version = self.buffer._version


class RandomState:
    """The random generators that a loss may draw from: torch's, Python's and numpy's."""

    def __init__(self, devices: Iterable[torch.device]):
        """Look after the CPU and the given devices."""
        self.devices = sorted({d for d in devices if d.type == "cuda"}, key=str)

    def capture(self) -> tuple[Any, ...]:
        """Return the present state of all of them."""
        cuda = [torch.cuda.get_rng_state(device) for device in self.devices]
        return torch.get_rng_state(), cuda, random.getstate(), np.random.get_state()

    def restore(self, state: tuple[Any, ...]) -> None:
        """Set all of them to a captured state."""
        cpu, cuda, python, numpy = state
        torch.set_rng_state(cpu)
        for device, device_state in zip(self.devices, cuda, strict=True):
            torch.cuda.set_rng_state(device_state, device)
        random.setstate(python)
        np.random.set_state(numpy)


# --- batches -------------------------------------------------------------------------------------


def _as_batches(data: Any) -> Iterable[Any]:
    """Return an iterable of batches that can be gone through twice.

    A tensor, a mapping, a tuple, ``None``, or a list that holds a tensor is one batch; anything
    else that can be iterated over is a series of batches.
    """
    if data is None or isinstance(data, Tensor | Mapping | tuple):
        return [data]
    if isinstance(data, list):
        return [data] if any(isinstance(x, Tensor) for x in data) else data
    if not isinstance(data, Iterable):
        return [data]
    return list(data) if iter(data) is data else data  # a generator can be read only once


def count_samples(batch: Any) -> int:
    """Return the length of the first tensor in a batch, and 1 if there is none."""
    for leaf in pytree.tree_leaves(batch):
        if isinstance(leaf, Tensor) and leaf.dim() > 0:
            return len(leaf)
    if isinstance(batch, Mapping):  # a mapping that pytree does not know, as tokenizers give
        return count_samples(dict(batch)) if type(batch) is not dict else 1
    return 1


def take_samples(batch: Any, size: int, samples: slice) -> Any:
    """Return a part of a batch: every tensor of its length is cut, everything else is kept."""
    if isinstance(batch, Mapping) and type(batch) is not dict:
        batch = dict(batch)

    def cut(leaf: Any) -> Any:
        whole = not isinstance(leaf, Tensor) or leaf.dim() == 0 or len(leaf) != size
        return leaf if whole else leaf[samples]

    return pytree.tree_map(cut, batch)
