"""What summaries are measured on during training: a loss with its own batches, or a closure."""

from __future__ import annotations

import itertools
import random
from collections import UserList
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from functools import partial
from typing import Any, TypedDict

import numpy as np
import torch

from newton_summary.derivatives import Backend
from newton_summary.derivatives.sweep.cuda_graph import SweepGraphs, Wanted
from newton_summary.errors import NotFiniteError
from newton_summary.measuring.measurement import (
    backends_for,
    find_partition,
    mean_over,
    measure,
    open_probe,
)
from newton_summary.optimizer.checkpoint import read_counts
from newton_summary.parallel.processes import Distributed, find_processes
from newton_summary.partition import Params, Partition
from newton_summary.probe.inputs import as_batches, as_loss_fn, check_loss_fn
from newton_summary.probe.probe import Closure, LossFn
from newton_summary.probe.state import Journal, RandomState, own_generators
from newton_summary.solver import STATUS
from newton_summary.summary import Summary, not_finite


class Measuring(TypedDict, total=False):
    """Options of the measurement; see :class:`newton_summary.NewtonSummary`."""

    backend: Backend
    microbatch: int | None
    distributed: Distributed
    cuda_graph: bool


class Curvature:
    """Measures summaries, each on its own batch.

    Args:
        given: ``(loss_fn, loader)``, or None if there is no separate data.
        loss_fn: The loss of a training batch; None if closures return the loss.
        how: Options of the measurement.

    Raises:
        TypeError: If there is no such option, or ``given`` is not a pair.

    Attributes:
        loss_fn: The loss; None with closures.
        data: The batches; None if there are none.
        count: How many summaries were measured.
    """

    def __init__(self, given: Any, loss_fn: LossFn | None, how: Measuring):
        self.backend, self.microbatch = how.get("backend", "auto"), how.get("microbatch")
        self.distributed = how.get("distributed", "auto")
        backends_for(self.backend, self.microbatch, sharded=False)  # raises if there is none
        if loss_fn is not None:
            check_loss_fn(loss_fn)
        self.loss_fn = loss_fn
        self.data: CurvatureData | None = None
        self.count = 0
        self._graphs: SweepGraphs | None = None
        if how.get("cuda_graph", False):
            self._graphs, self._unfit = SweepGraphs(), self._unfit_to_capture(given)
        if given is None:
            return
        if not (isinstance(given, tuple) and len(given) == 2 and callable(given[0])):
            raise TypeError(
                "curvature: expected a pair (loss_fn, loader), with loss_fn(model, batch) -> mean "
                "loss."
            )
        check_loss_fn(given[0])
        self.loss_fn, self.data = given[0], CurvatureData(given[1])

    @property
    def captures(self) -> bool:
        """Whether measurements are to be captured as CUDA graphs."""
        return self._graphs is not None

    def measure(
        self, partition: Partition, u: Params, order: int, get: Callable[[], tuple[LossFn, Any]]
    ) -> Summary:
        """Return this process's summary along ``u``, on what :meth:`next` gives."""
        processes = find_processes(self.distributed, partition.params)
        model = partition.model
        assert model is not None
        with processes.joint(), torch.enable_grad(), thawed(partition):
            loss_fn, data = get()
            if self._graphs is not None:
                unfit = self._unfit or ("there are several ranks" if processes.count > 1 else None)
                wanted = Wanted(model, partition, loss_fn, None if unfit else data[0], u, order)
                summary = self._graphs.summarize(wanted, unfit)
                if summary is not None:
                    return summary
            backends = backends_for(self.backend, self.microbatch, processes.sharded)
            given = (model, loss_fn, data, find_partition(model, partition))
            with open_probe(*given, self.microbatch, processes) as probe:
                return measure(probe, u, order, backends)

    def mean(self, summary: Summary, u: Params) -> Summary:
        """Return the mean over all processes.

        Raises:
            NotFiniteError: If it is not finite.
        """
        summary = mean_over(find_processes(self.distributed, u), summary, u)
        if not_finite(summary):
            raise NotFiniteError(STATUS["not-finite"])
        if self.count == 0 and not bool(summary.gbar.any() or summary.hessian().any()):
            raise ValueError(
                "The loss of the curvature batch does not depend on the parameters that move. Is "
                "the partition of the model being trained, and does loss_fn use the model it is "
                "given?"
            )
        self.count += 1
        return summary

    def next(self, partition: Partition, closure: Closure | None, batch: Any) -> tuple[LossFn, Any]:
        """Return the loss and the data of the next measurement.

        A separate batch is wrapped in a UserList: a list could count as a batch itself.

        Args:
            partition: The groups.
            closure: Returns the loss of a batch, if there is neither loss nor data.
            batch: The training batch, if there is a loss without data.
        """
        if self.data is not None and self.loss_fn is not None:
            return self.loss_fn, UserList([self.data.next_batch()])
        if self.loss_fn is not None and batch is not None:
            return self.loss_fn, batch
        if self.loss_fn is None and closure is not None:
            return as_loss_fn(closure, partition), UserList([None])
        how = "call step(batch) with the training batch"
        if self.loss_fn is None:
            how = (
                "pass a loss, NewtonSummary(model, loss_fn), and call step(batch); or call "
                "step(closure) with a closure that returns the loss of a batch"
            )
        raise ValueError(
            f"A refresh is due, but there is nothing to measure it on: {how}, whenever "
            "opt.refresh_due. Where a trainer calls step(), pass curvature=(loss_fn, loader)."
        )

    def _unfit_to_capture(self, given: Any) -> str | None:
        if given is None:
            return (
                "the batches of step(batch) and of a closure are not captured: pass "
                "curvature=(loss_fn, loader)"
            )
        if self.microbatch is not None or self.backend not in ("auto", "sweep"):
            return (
                f"it needs the sweep on whole batches, not microbatch={self.microbatch} and "
                f"backend={self.backend!r}"
            )
        return None


@contextmanager
def thawed(partition: Partition) -> Iterator[None]:
    """Let parameters that were frozen since, whose direction is zero, require gradients."""
    with Journal() as journal:
        for p in partition.params.values():
            if not p.requires_grad:
                journal.undo_later(partial(p.requires_grad_, False))
                p.requires_grad_(True)
        yield


# --- batches --------------------------------------------------------------------------------------


class CurvatureData:
    """An endless stream of batches from a loader, at a position that can be saved.

    The loader starts over when it ends. It draws from its own random numbers, seeded from torch's
    seed: training sees the same random numbers as without it, and the two streams of batches are
    independent. A saved position is restored by going through the batches of the current epoch up
    to it, with the random numbers of that epoch.

    A loader that draws from a ``torch.Generator`` should not share it.

    Args:
        loader: A DataLoader or other iterable of batches, or one batch. An iterator works as long
            as it lasts.
    """

    def __init__(self, loader: Any):
        once = isinstance(loader, Iterator)
        self.loader: Iterable[Any] = loader if once else as_batches(loader)
        if isinstance(self.loader, Sized) and len(self.loader) == 0:
            raise ValueError("The curvature loader is empty: there is no batch to measure.")
        self._present = _seeded(torch.initial_seed())  # its own random numbers
        self._epoch = 0
        self._index = 0  # batches taken in this epoch
        self._start: RandomState.State | None = None  # of this epoch, with the loader's generators
        self._iterator: Iterator[Any] | None = None

    def next_batch(self) -> Any:
        """Return the next batch, starting over after the last one."""
        try:
            with self._own_random_numbers():
                if self._iterator is None:
                    self._iterator = self._open()
                try:
                    batch = next(self._iterator)
                except StopIteration:  # from the start again
                    batch = next(self._next_epoch(), self)
        except BaseException:  # an interrupted one may have ended: opened again where it was
            if not isinstance(self.loader, Iterator):
                self._iterator = None
            raise
        if batch is self:
            raise ValueError("The curvature loader yielded no batch when it was restarted.")
        self._index += 1
        return batch

    def _next_epoch(self) -> Iterator[Any]:
        if self._index == 0:
            raise ValueError("The curvature loader is empty: it yielded no batch to measure.")
        if isinstance(self.loader, Iterator):
            raise ValueError(
                f"The curvature data ended after {self._index} batches and cannot be restarted, "
                "because it is an iterator. Pass a DataLoader or a list of batches."
            )
        self._epoch, self._index, self._start = self._epoch + 1, 0, None
        self._iterator = self._open()
        return self._iterator

    def _open(self) -> Iterator[Any]:
        """Start the current epoch, and advance to the current position in it."""
        random_state = RandomState((), own_generators(self.loader))
        if self._start is None:
            self._start = random_state.capture()
        else:
            random_state.restore(self._start)
        sampler: Any = getattr(self.loader, "sampler", None)
        if hasattr(sampler, "set_epoch"):  # a DistributedSampler repeats its order otherwise
            sampler.set_epoch(self._epoch)
        iterator = iter(self.loader)
        # To the end, if a loader of fewer batches goes on: that of a run on more ranks.
        next(itertools.islice(iterator, self._index, self._index), None)
        return iterator

    @contextmanager
    def _own_random_numbers(self) -> Iterator[None]:
        if self._iterator is not None and isinstance(self.loader, list | tuple):
            yield  # which draws none
            return
        others = RandomState(()).capture()
        with Journal() as journal:
            journal.undo_later(lambda: RandomState(()).restore(others))
            RandomState(()).restore(self._present)
            try:
                yield
            finally:
                self._present = RandomState(()).capture()

    # --- the position -----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the position as plain values and tensors."""
        return {
            "epoch": self._epoch,
            "index": self._index,
            "start": None if self._start is None else _to_plain(self._start),
            "present": _to_plain(self._present),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Return to a position; the next batch skips those before it."""
        start = None if state["start"] is None else _from_plain(state["start"])
        present = _from_plain(state["present"])
        self._epoch, self._index = read_counts(state, "epoch", "index")
        self._start, self._present, self._iterator = start, present, None

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the iterator, which cannot be copied; the position is enough."""
        return self.__dict__ | {"_iterator": None}


def _seeded(seed: int) -> RandomState.State:
    """Return the state of torch's, Python's and numpy's random numbers after a seed."""
    mixed = (seed * 6364136223846793005 + 1442695040888963407) % 2**63  # not training's own stream
    torchs = torch.Generator().manual_seed(mixed).get_state()
    numpys = np.random.RandomState(mixed % 2**32).get_state()
    return torchs, [], [], random.Random(mixed).getstate(), numpys


def _to_plain(state: RandomState.State) -> list[Any]:
    """Return a state in types that ``torch.load(weights_only=True)`` reads."""
    *others, (name, keys, *rest) = state
    return [*others, (name, torch.from_numpy(keys.astype(np.int64)), *rest)]


def _from_plain(state: Sequence[Any]) -> RandomState.State:
    *others, (name, keys, *rest) = state
    return (*others, (name, keys.numpy().astype(np.uint32), *rest))
