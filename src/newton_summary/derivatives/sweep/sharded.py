"""The sweep of a model whose parameters are divided among ranks (FSDP2).

The same driver, tape and rules as for a whole model. Parameters and directions are gathered when an
operation needs them, and the gradient of a parameter is used as soon as it is available. All ranks
do this at the same time, each with its own data.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from newton_summary.derivatives.sweep.engine import Leaves, backward, leaf_tangent
from newton_summary.derivatives.sweep.recorder import Recorder
from newton_summary.derivatives.sweep.tape import (
    Adjoints,
    Tangent,
    Tape,
    Value,
    groups_in,
    map_tree,
)
from newton_summary.derivatives.sweep.torch_functions import look_up
from newton_summary.parallel.fsdp import Shards, check_shards, rest_hooks, scattered_sum
from newton_summary.parallel.processes import is_sharded, like_sharded, local_part
from newton_summary.parallel.ranks import Ranks
from newton_summary.partition import Params, Partition
from newton_summary.probe.inputs import count_samples
from newton_summary.probe.probe import Closure, Evaluation, Probe, check_depends, check_finite
from newton_summary.probe.state import Journal


class ShardedProbe(Probe):
    """The loss of a sharded model on some data; all ranks evaluate it at the same time."""

    processes: Ranks
    params: Shards

    def __init__(self, *args: Any, **kwargs: Any):
        """Take what :class:`Probe` takes; the processes are ranks."""
        super().__init__(*args, **kwargs)
        check_shards(self.model)
        self.params = Shards(self.partition.params, self.processes.meeting)
        self.trusted = True  # a loss gets copies of them, so it cannot change them

    def _prepare(self, journal: Journal) -> None:
        """Also disable the hooks of ``fully_shard``."""
        super()._prepare(journal)
        journal.undo_later(self.params.forget)
        rest_hooks(self.model)

    def _in_step(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield batches as long as all ranks have one: they gather parameters together."""
        remaining = iter(batches)
        while True:
            batch = next(remaining, self)
            has_samples = batch is not self and count_samples(batch) != 0
            has = self.processes.meet_and_gather("the next batch", (batch is not self, has_samples))
            if not any(has_one for has_one, _ in has):
                return
            lacking = next((rank for rank, both in enumerate(has) if not all(both)), None)
            if lacking is not None:
                raise ValueError(
                    "With a sharded model every rank needs the same number of batches, but rank "
                    f"{lacking} has fewer, or one without samples."
                )
            yield batch

    def step(self, steps: Params, start: Iterable[Tensor] | None = None) -> None:
        """Move, and release whole parameters that were gathered before."""
        super().step(steps, start)
        self.params.forget()

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        with self.params.without_copies(), Gathering(self.params):
            yield

    def gradient(self, some: Iterable[tuple[Evaluation, int]] | None = None) -> Params:
        """Return this rank's shards of the gradient of the mean loss, over all data or some."""
        shards, samples = self.params, 0
        sums = {
            name: torch.zeros_like(local_part(p), dtype=torch.promote_types(p.dtype, torch.float32))
            for name, p in shards.items()
        }
        with self.processes.joint():
            for closure, size in self.closures() if some is None else some:
                loss = closure()
                check_depends(loss, {"all": shards.anchor})
                check_finite(loss, closure.place)

                def receive(name: str, grad: Tensor, size: int = size) -> None:
                    with shards.meeting(f"the sum of the gradients of {name}"):
                        sums[name] += scattered_sum(size * grad.to(sums[name].dtype), shards[name])

                with shards.receiving(receive):
                    torch.autograd.grad(loss, shards.anchor)
                samples += size
        total = sum(self.processes.gather(samples))
        return {
            name: like_sharded((part / total).to(shards[name].dtype), shards[name])
            for name, part in sums.items()
        }


class Gathering(TorchFunctionMode):
    """Gives every operation whole parameters in place of sharded ones."""

    def __init__(self, shards: Shards):
        super().__init__()
        self.shards = shards

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        call = look_up(func)
        if call.passes or call.accesses:
            return func(*args, **kwargs)
        found: dict[int, Tensor] = {}

        def gather(x: Any) -> Any:
            if is_sharded(x) and id(x) not in found:
                found[id(x)] = self.shards.leaf(x)
            return found.get(id(x), x)

        return func(*map_tree(gather, args), **map_tree(gather, kwargs))


class ShardedValue(Value):
    """A parameter that is divided among ranks: gathered whenever its numbers are read."""

    __slots__ = ("_gather",)

    def __init__(self, whole: Tensor, slot: int, gather: Callable[[], Tensor]):
        """Keep the shape of the whole parameter."""
        with torch._C.DisableTorchFunction():
            super().__init__(whole.detach().new_empty(()).expand(whole.shape), slot)
        self.version, self._gather = whole._version, gather

    readable = True  # it does not change during a measurement

    @property
    def now(self) -> Tensor:
        """The whole parameter."""
        return self._gather()


class ShardedRecorder(Recorder):
    """A recorder that meets the parameters one by one, when an operation is about to use them."""

    def meet(self, shards: Shards, tensor: Tensor, name: str) -> None:
        """Give a slot to a whole parameter; it is not kept, the value gathers it again."""
        value = ShardedValue(tensor, self.slots, lambda: shards.whole(shards[name]))
        self.leaves[self.slots] = name
        self.slots += 1
        self.values[id(tensor)] = value
        weakref.finalize(tensor, self.values.pop, id(tensor), None)


class ShardedLeaves(Leaves):
    """Sharded parameters: gathered, with their direction, when an operation needs them.

    The direction is sharded as the parameters are, or whole.
    """

    params: Shards

    def __init__(self, params: Shards, u: Params, partition: Partition, ranks: Ranks):
        super().__init__(params, u, partition)
        self.ranks = ranks

    def direction(self, name: str) -> Tensor:
        """Return the whole direction of a parameter."""
        return self.params.whole(self.u[name])

    def record(self, closure: Closure) -> Tape:
        """Run the loss and return its tape."""
        recorder = ShardedRecorder({})
        self.params.gathered = partial(recorder.meet, self.params)
        tape = recorder.record(closure)
        self.params.gathered = None
        check_depends(tape.loss, {"all": self.params.anchor})
        return tape

    def backward(self, tape: Tape) -> tuple[Tensor, Adjoints]:
        """Return gbar, zero where the tape has a cut, and the adjoints."""
        gbar = self.partition.inner({}, {})

        def receive(name: str, grad: Tensor) -> None:
            gbar.add_(self.partition.inner({name: grad}, {name: self.direction(name)}))

        with self.params.receiving(receive):
            _, adjoints = backward(tape, {} if tape.cut else {"all": self.params.anchor})
        return gbar, adjoints

    def may_pass_in_pieces(self, tape: Tape) -> bool:
        """Return whether all ranks have the same shapes on their tapes.

        Ranks with fewer samples would have fewer pieces, and gather the weights less often.
        """
        shapes = [(op.name, [tuple(y.tensor.shape) for y in op.made]) for op in tape.ops]
        facts = zlib.crc32(repr((tape.small, shapes)).encode())
        return len(set(self.ranks.meet_and_gather("the shapes of the tape", facts))) == 1

    def tangents(self, slots: dict[int, str], groups: set[int]) -> dict[int, Tangent]:
        """Return the derivatives of the parameters, which are made on demand."""
        return Tangents(slots, self, groups)

    def in_parts(self, parts: int) -> int:
        """Return in how many parts the rank with the least memory needs to sweep."""
        return max(self.ranks.meet_and_gather("the number of parts to sweep in", parts))


class Tangents(dict[int, Tangent]):
    """Tangents by slot; those of parameters are made from the direction on demand."""

    def __init__(self, slots: dict[int, str], leaves: ShardedLeaves, groups: set[int]):
        super().__init__()
        self.leaves, self.groups = leaves, groups
        labels = leaves.partition.labels
        self.slots = {s: n for s, n in slots.items() if not groups.isdisjoint(groups_in(labels[n]))}

    def __contains__(self, slot: object) -> bool:
        """Return whether a value has derivatives."""
        return slot in self.slots or super().__contains__(slot)

    def get(self, slot: int, default: Any = None) -> Any:
        """Return the derivatives of a value; of a parameter, some rows if these are there."""
        name = self.slots.get(slot)
        if name is None or super().__contains__(slot):
            return super().get(slot, default)
        U, label = self.leaves.direction(name), self.leaves.partition.labels[name]
        label = label if isinstance(label, int) else label.to(U.device)
        return leaf_tangent(U, label, self.groups)

    def __missing__(self, slot: int) -> Tangent:
        """Return the derivatives of a parameter."""
        found: Tangent = self.get(slot)
        return found
