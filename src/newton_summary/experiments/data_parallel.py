"""The processes of ``torchrun`` that train one run together.

Every process has the whole data set and the same model, and takes its part of each batch; gradients
are averaged, so that a step is that of one process. The first process writes the run directory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from newton_summary.errors import OtherRankError, UserError
from newton_summary.experiments import torchrun
from newton_summary.experiments.config import ExperimentConfig
from newton_summary.experiments.datasets import Batch
from newton_summary.experiments.rundir import Run, RunWriter
from newton_summary.history import Measured
from newton_summary.run_directory import Row

T = TypeVar("T")
Params = Sequence[Tensor]


class Team:
    """All processes of a run; one alone unless ``torchrun`` has started several.

    Attributes:
        rank: The number of this process.
        size: How many there are.
        local_rank: The number of this process on its machine.
    """

    def __init__(self, rank: int = 0, size: int = 1, local_rank: int = 0):
        self.rank, self.size, self.local_rank = rank, size, local_rank

    # --- parts of the data ------------------------------------------------------------------------

    def part(self, length: int) -> slice:
        """Return which of so many samples are this process's; none if there are too few."""
        return slice(length * self.rank // self.size, length * (self.rank + 1) // self.size)

    def part_of(self, batch: Batch) -> Batch:
        """Return this process's part of a batch."""
        part = self.part(len(batch[0]))
        return batch[0][part], batch[1][part]

    def every(self, items: Iterable[T]) -> Iterator[T]:
        """Give every size-th item, from the rank-th on."""
        return (item for i, item in enumerate(items) if i % self.size == self.rank)

    # --- sums -------------------------------------------------------------------------------------

    def total(self, numbers: Tensor) -> Tensor:
        """Return the sum of numbers over all processes."""
        if self.size > 1:
            dist.all_reduce(numbers)
        return numbers

    def backward(self, loss_of: Callable[[Batch], Tensor], batch: Batch, params: Params) -> Tensor:
        """Leave the gradient of a whole batch, of which each process differentiates its part.

        Returns:
            This process's share of the loss: over all of them these add up to the mean loss.
        """
        if self.size == 1:
            loss = loss_of(batch)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss.detach()
        mine = self.part_of(batch)
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

    # --- the first process ------------------------------------------------------------------------

    def from_first(self, compute: Callable[[], T]) -> T:
        """Return what the first process computes; its mistakes are raised on all of them."""
        if self.size == 1:
            return compute()
        answer: list[Any] = [None, None]
        if self.rank == 0:
            try:
                answer[0] = compute()
            except UserError as error:
                dist.broadcast_object_list([None, str(error)])
                raise
        dist.broadcast_object_list(answer)
        if answer[1] is not None:
            raise OtherRankError(answer[1])
        return answer[0]  # type: ignore[no-any-return]

    def agreed(self, compute: Callable[[], T]) -> T:
        """Return what every process computes; a mistake on one of them is raised on all."""
        if self.size == 1:
            return compute()
        error: UserError | None = None
        try:
            result = compute()
        except UserError as mistake:
            error = mistake
        self._compare(error)
        return result

    def first_on_each_machine(self, compute: Callable[[], T]) -> T:
        """Return what every process computes, first the first of each machine, then the others.

        For what leaves files behind that the others then find.
        """
        results: list[T] = []

        def keep() -> None:
            results.append(compute())

        for first in (True, False):
            self.agreed(keep if first == (self.local_rank == 0) else lambda: None)
        return results[0]

    def _compare(self, error: UserError | None) -> None:
        """Raise on all processes if there is an error on one; the first to have one tells it."""
        told: list[str | None] = [None] * self.size
        dist.all_gather_object(told, None if error is None else str(error))
        failed = [rank for rank, text in enumerate(told) if text is not None]
        if not failed:
            return
        if error is not None and failed[0] == self.rank:
            raise error
        raise OtherRankError(f"rank {failed[0]}: {told[failed[0]]}")


@contextmanager
def assemble(device: torch.device) -> Iterator[Team]:
    """Give the team of this process; the processes of ``torchrun`` are connected in here."""
    if not torchrun.launched():
        yield Team()
        return
    own_gpus = torch.cuda.device_count() >= torchrun.local_size()
    backend = "nccl" if device.type == "cuda" and own_gpus else "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    started = not dist.is_initialized()
    if started:
        dist.init_process_group(backend)
    try:
        yield Team(dist.get_rank(), dist.get_world_size(), torchrun.local_rank())
    finally:
        if started:
            dist.destroy_process_group()


class TeamWriter:
    """Writes a run directory from the first process; the others follow.

    Has the methods of :class:`RunWriter`. What the first process cannot write is told to all.
    """

    def __init__(self, path: Path, config: ExperimentConfig, team: Team):
        self.path, self.config, self.team = path, config, team
        self._writer: RunWriter | None = None
        self.known: Run | None = team.from_first(self._open)
        self.rows: list[Row] = []

    def _open(self) -> Run | None:
        self._writer = RunWriter(self.path, self.config)
        return self._writer.known

    def start(self, session: Mapping[str, Any]) -> dict[str, Any] | None:
        """Begin or go on, from the checkpoint that is returned."""

        def begin() -> tuple[dict[str, Any] | None, list[Row]]:
            assert self._writer is not None
            checkpoint = self._writer.start({**session, "ranks": self.team.size})
            return checkpoint, list(self._writer.rows)

        checkpoint, self.rows = self.team.from_first(begin)
        return checkpoint

    def add_summary(self, measured: Measured) -> None:
        """Keep a summary; it is written with its epoch."""
        if self._writer is not None:
            self._writer.add_summary(measured)

    def add_row(self, row: Row, checkpoint: Mapping[str, Any] | None) -> None:
        """Write an epoch."""
        self._write(lambda writer: writer.add_row(row, checkpoint))
        self.rows.append(row)

    def add_environment(self, **values: Any) -> None:
        """Add facts on the whole run."""
        self._write(lambda writer: writer.add_environment(**values))

    def _write(self, write: Callable[[RunWriter], None]) -> None:
        writer = self._writer
        self.team.from_first(lambda: None if writer is None else write(writer))

    def close(self) -> Run:
        """Let others in; return the run as it is now."""
        if self._writer is not None:
            self._writer.close()
        return Run(self.path, self.config, list(self.rows))
