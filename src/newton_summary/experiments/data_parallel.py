"""Train one run on several processes, started by ``torchrun``.

Every process has the whole data set and the same model, and takes its part of each batch; gradients
are averaged, so a step is the same as with one process. The first process writes the run directory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

# Its functions have the group as a default, if there is one by then: if imported later, as by
# torch's optimizers, it keeps the group's threads after destroy_process_group, and a thread that
# still releases a tensor when the interpreter exits aborts the process.
import torch.distributed.nn
from torch import Tensor

from newton_summary.errors import SharedError, UserError
from newton_summary.experiments import torchrun
from newton_summary.experiments.datasets import Batch

T = TypeVar("T")
Params = Sequence[Tensor]


@dataclass(frozen=True)
class RankGroup:
    """All processes of a run; a single one unless ``torchrun`` has started several."""

    rank: int = 0  # number of this process
    size: int = 1  # how many there are
    local_rank: int = 0  # number of this process on its machine

    # --- parts of the data ------------------------------------------------------------------------

    def part(self, length: int) -> slice:
        """Return which of ``length`` samples this process takes; none if there are too few."""
        return slice(length * self.rank // self.size, length * (self.rank + 1) // self.size)

    def share(self, batch: Batch) -> Batch:
        """Return the samples of a batch that this process takes."""
        if self.size == 1:
            return batch
        part = self.part(len(batch[0]))
        return batch[0][part], batch[1][part]

    def every(self, items: Iterable[T]) -> Iterator[T]:
        """Return every size-th item, starting with the rank-th."""
        return (item for i, item in enumerate(items) if i % self.size == self.rank)

    # --- sums -------------------------------------------------------------------------------------

    def total(self, numbers: Tensor) -> Tensor:
        """Return the sum of numbers over all processes."""
        if self.size > 1:
            dist.all_reduce(numbers)
        return numbers

    def backward(self, loss_of: Callable[[Batch], Tensor], batch: Batch, params: Params) -> Tensor:
        """Compute the gradient of a whole batch, of which each process differentiates its part.

        Returns:
            This process's share of the loss: over all of them these add up to the mean loss.
        """
        if self.size == 1:
            loss = loss_of(batch)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss.detach()
        mine = self.share(batch)
        share = batch[0].new_zeros((), dtype=params[0].dtype)
        if len(mine[0]):
            loss = loss_of(mine) * (len(mine[0]) / len(batch[0]))
            loss.backward()  # type: ignore[no-untyped-call]
            share = loss.detach()
        for p in params:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        works = [dist.all_reduce(p.grad, async_op=True) for p in params]
        for work in works:
            work.wait()
        return share

    # --- together ---------------------------------------------------------------------------------

    def agreed(self, compute: Callable[[], T]) -> T:
        """Return what every process computes; an error on one of them is raised on all."""
        if self.size == 1:
            return compute()
        mistake = None
        try:
            result = compute()
        except UserError as error:
            mistake = str(error)
        mistakes: list[str | None] = [None] * self.size
        dist.all_gather_object(mistakes, mistake)
        for rank, text in enumerate(mistakes):
            if text is not None:
                raise SharedError(f"rank {rank}: {text}" if rank else text)
        return result

    def from_first(self, compute: Callable[[], T]) -> T:
        """Return what the first process computes."""
        box = [self.agreed(lambda: compute() if self.rank == 0 else None)]
        if self.size > 1:
            dist.broadcast_object_list(box)
        return box[0]  # type: ignore[return-value]

    def first_on_each_machine(self, compute: Callable[[], T]) -> T:
        """Return what every process computes: first the first of each machine, then the others.

        For computations that leave files behind for the others.
        """
        early = self.agreed(lambda: compute() if self.local_rank == 0 else None)
        late = self.agreed(lambda: compute() if self.local_rank != 0 else early)
        return late  # type: ignore[return-value]


@contextmanager
def assemble(device: torch.device) -> Iterator[RankGroup]:
    """Yield the group of this process, after connecting the processes of ``torchrun``."""
    if not torchrun.launched():
        yield RankGroup()
        return
    own_gpus = torch.cuda.device_count() >= torchrun.local_size()
    backend = "nccl" if device.type == "cuda" and own_gpus else "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    started = not dist.is_initialized()
    if started:
        dist.init_process_group(backend)
    try:
        yield RankGroup(dist.get_rank(), dist.get_world_size(), torchrun.local_rank())
    finally:
        if started:
            # Torch 2.6 holds Python's lock while it waits for the threads of gloo, and one
            # that has yet to drop the tensors of the last message waits for that lock.
            time.sleep(0.1)
            dist.destroy_process_group()
