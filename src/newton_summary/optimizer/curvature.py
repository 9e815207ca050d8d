"""What summaries are measured on while training: a loss with data of its own, or a closure."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, fields
from typing import Any, TypedDict

import torch
from torch import Tensor, nn

from newton_summary.derivatives.sweep.cuda_graph import CannotCapture, SweepGraphs
from newton_summary.display.names import nearest
from newton_summary.display.warn import warn_user
from newton_summary.errors import NotFiniteError
from newton_summary.measuring.measurement import (
    backends_for,
    find_partition,
    mean_over,
    measure,
    open_probe,
)
from newton_summary.optimizer.curvature_data import CurvatureData, OneBatch
from newton_summary.parallel.processes import Processes, find_processes
from newton_summary.partition import Params, Partition
from newton_summary.probe.inputs import LossFn, check_loss_fn
from newton_summary.solver import STATUS
from newton_summary.summary import Summary

Closure = Callable[[], Tensor]
BEFORE_CAPTURE = 3  # measurements without a graph: what fails early is told in its own words


class Measuring(TypedDict, total=False):
    """Options of the measurement; see :class:`newton_summary.NewtonSummary`."""

    backend: str
    microbatch: int | None
    distributed: str | bool | Any
    cuda_graph: bool


@dataclass(frozen=True)
class HowMeasured:
    """The same with their defaults."""

    backend: str = "auto"
    microbatch: int | None = None
    distributed: str | bool | Any = "auto"
    cuda_graph: bool = False

    @staticmethod
    def checked(options: Measuring) -> HowMeasured:
        """Return the options, or say what is wrong with them."""
        known = [field.name for field in fields(HowMeasured)]
        for name in options:
            if name not in known:
                raise TypeError(f"NewtonSummary has no argument {name!r}.{nearest(name, known)}")
        how = HowMeasured(**options)
        backends_for(how.backend, how.microbatch, sharded=False)
        return how


class Curvature:
    """Measures summaries, each on a batch of its own.

    Args:
        given: ``(loss_fn, loader)``, or None if closures bring the loss.
        how: Options of the measurement.

    Attributes:
        data: The batches; None with closures.
        count: How many summaries were measured.
    """

    def __init__(self, given: Any, how: HowMeasured):
        self.loss_fn: LossFn | None = None
        self.data: CurvatureData | None = None
        self.how, self.count = how, 0
        self._graphs: SweepGraphs | None = None
        self._captures = how.cuda_graph
        if given is None:
            return
        if not (isinstance(given, tuple) and len(given) == 2 and callable(given[0])):
            raise TypeError(
                "curvature is a pair (loss_fn, loader), with loss_fn(model, batch) -> mean loss."
            )
        check_loss_fn(given[0])
        self.loss_fn, self.data = given[0], CurvatureData(given[1])

    def measure(
        self, partition: Partition, u: Params, order: int, closure: Closure | None
    ) -> Summary:
        """Return this process's summary along ``u``, on the next batch."""
        processes = find_processes(self.how.distributed, partition.params)
        with processes.joint(), torch.enable_grad(), _thawed(partition):
            loss_fn, batch = self._next(closure, partition)
            summary = self._replayed(partition, loss_fn, batch, u, order, processes)
            if summary is not None:
                return summary
            how, model = self.how, _model_of(partition)
            backends = backends_for(how.backend, how.microbatch, processes.sharded)
            given = (model, loss_fn, OneBatch(batch), find_partition(model, partition))
            with open_probe(*given, how.microbatch, processes) as probe:
                return measure(probe, u, order, backends)

    def mean(self, summary: Summary, u: Params) -> Summary:
        """Return the mean over all processes.

        Raises:
            NotFiniteError: If it is not finite.
        """
        summary = mean_over(find_processes(self.how.distributed, u), summary, u)
        parts = (x for x in (summary.gbar, summary.Hbar, summary.D3) if x is not None)
        if not all(bool(x.isfinite().all()) for x in parts):
            raise NotFiniteError(STATUS["not-finite"])
        if self.count == 0 and not bool(summary.gbar.any() or summary.hessian().any()):
            raise ValueError(
                "The loss on the curvature batch does not depend on the parameters that move. Is "
                "the partition of the model that is trained, and does loss_fn use the model that "
                "it is given?"
            )
        self.count += 1
        return summary

    def _next(self, closure: Closure | None, partition: Partition) -> tuple[LossFn, Any]:
        if self.data is not None and self.loss_fn is not None:
            return self.loss_fn, self.data.next_batch()
        if closure is None:
            raise ValueError(
                "A refresh is due, and there is nothing to measure it on. Give curvature=(loss_fn, "
                "loader) to NewtonSummary, or call step(closure) with a closure that returns the "
                "loss of a curvature batch, whenever opt.refresh_due."
            )
        return _as_loss_fn(closure, partition), None

    def _replayed(
        self,
        partition: Partition,
        loss_fn: LossFn,
        batch: Any,
        u: Params,
        order: int,
        processes: Processes,
    ) -> Summary | None:
        """Return a summary from a CUDA graph, if that is wanted and possible."""
        if not self._captures or self.count < BEFORE_CAPTURE:
            return None
        try:
            self._check_capture(batch, processes)
            if self._graphs is None:
                self._graphs = SweepGraphs(_model_of(partition), partition, order)
            return self._graphs.summarize(loss_fn, batch, u)
        except CannotCapture as error:
            self._captures, self._graphs = False, None
            warn_user(f"NewtonSummary: cuda_graph=True has no effect, because {error}.")
            return None

    def _check_capture(self, batch: Any, processes: Processes) -> None:
        if processes.count > 1:
            raise CannotCapture("there are several ranks")
        if batch is None:
            raise CannotCapture(
                "the batch of a closure cannot be replaced: give curvature=(loss_fn, loader)"
            )
        if self.how.microbatch is not None or self.how.backend not in ("auto", "sweep"):
            raise CannotCapture(
                f"it measures a whole batch with the sweep, and not with "
                f"microbatch={self.how.microbatch} and backend={self.how.backend!r}"
            )

    def forget_graphs(self) -> None:
        """Capture anew, for another partition."""
        self._graphs = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the graphs, which cannot be copied and are captured anew."""
        return self.__dict__ | {"_graphs": None}


def _model_of(partition: Partition) -> nn.Module:
    assert partition.model is not None
    return partition.model


def _thawed(partition: Partition) -> ExitStack:
    """Let parameters that were frozen since, whose direction is zero, require gradients."""
    stack = ExitStack()
    for p in partition.params.values():
        if not p.requires_grad:
            stack.callback(p.requires_grad_, False)
            p.requires_grad_(True)
    return stack


def _as_loss_fn(closure: Closure, partition: Partition) -> LossFn:
    """Return the closure as a function of model and batch that checks what comes back."""
    asked = (
        "A closure of step() returns the loss of a curvature batch as a tensor, without backward()"
    )

    def grads() -> list[Tensor | None]:
        with torch._C.DisableTorchFunction():  # or the sweep thinks that the loss reads them
            return [p.grad for p in partition.params.values()]

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        before = grads()
        loss = closure()
        if any(new is not old for new, old in zip(grads(), before)):
            raise ValueError(f"The closure called backward() or zero_grad(). {asked}.")
        if not isinstance(loss, Tensor):
            raise TypeError(f"The closure returned {type(loss).__name__}. {asked}.")
        if not loss.requires_grad:
            raise ValueError(f"The closure returned a loss that is detached. {asked}.")
        return loss

    return loss_fn
