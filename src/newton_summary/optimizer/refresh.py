"""A refresh: measure a summary on curvature data, average it, solve for the rates."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from newton_summary.derivatives.sweep.cuda_graph import CannotCapture, SweepGraphs
from newton_summary.errors import NotFiniteError, RankError
from newton_summary.measuring.measurement import (
    backends_for,
    find_partition,
    mean_over,
    measure,
    open_probe,
)
from newton_summary.optimizer.averaging import Average
from newton_summary.optimizer.curvature_data import OneBatch
from newton_summary.optimizer.rates import RateRules
from newton_summary.optimizer.update import Factors, Motion, as_vector
from newton_summary.parallel.processes import Processes, find_processes
from newton_summary.partition import Params, Partition
from newton_summary.probe.probe import LossFn
from newton_summary.solver import STATUS, LearningRates
from newton_summary.summary import Summary

Scale = Callable[[Tensor], Factors]
BEFORE_CAPTURE = 3  # refreshes without a graph: a run that fails early tells why in its own words


class Refresh:
    """The summaries of a training run, and the rates that follow from them.

    Args:
        model: The model.
        partition: Its groups.
        average: How summaries of different refreshes are averaged.
        rules: How rates follow from the average.
        min_decrease: The fraction of the predicted decrease that rates must achieve, if any.
        backend: As for :func:`summarize`.
        microbatch: As for :func:`summarize`.
        distributed: As for :func:`summarize`.
        cuda_graph: Whether to capture the sweep once and replay it.
        max_step: The largest fraction of its norm by which a group's weights may move in a step.

    Attributes:
        solution: Rates, or step lengths if the average is normalised, none of them negative: (S,),
            float64 on the CPU. None before the first.
        eta: The same as rates along the direction of the last refresh.
        last_summary: The last summary, as it was measured.
        last_rates: The last solution with its status, negative rates included.
        done: How many summaries were measured.
        failed: How many refreshes gave no usable rates.
    """

    def __init__(
        self,
        model: nn.Module,
        partition: Partition,
        average: Average,
        rules: RateRules,
        min_decrease: float | None,
        backend: str,
        microbatch: int | None,
        distributed: str | bool | Any = "auto",
        cuda_graph: bool = False,
        max_step: float = math.inf,
    ):
        self.model, self.partition = model, partition
        self.average, self.rules, self.min_decrease = average, rules, min_decrease
        self.backend, self.microbatch = backend, microbatch
        self.distributed = distributed
        self.cuda_graph, self.max_step = cuda_graph, max_step
        self._graphs: SweepGraphs | None = None
        self.solution: Tensor | None = None
        self.eta: Tensor = torch.zeros(len(partition), dtype=torch.float64)
        self.last_summary: Summary | None = None
        self.last_rates: LearningRates | None = None
        self.done = self.failed = 0
        self.norms: Tensor | None = None  # (S,) of the direction then, where solutions are lengths
        self._peak: Tensor | None = None  # (S,) the last solution above zero of each group
        self._told: set[str] = set()

    @property
    def order(self) -> int:
        """The highest derivative that the rules need."""
        return 3 if self.rules.lambda_int > 0 else 2

    def processes(self) -> Processes:
        """Return the processes that measure together."""
        return find_processes(self.distributed, self.partition.params)

    def measure(self, motion: Motion, loss_fn: LossFn, batch: Any) -> bool:
        """Add a summary along the present direction to the average.

        Returns:
            Whether there was one: False if the loss, or a derivative, is not finite.
        """
        reason = STATUS["not-finite"]
        try:
            with torch.enable_grad(), ExitStack() as thaw:
                for p in self.partition.params.values():
                    if not p.requires_grad:  # frozen since: its direction is zero
                        thaw.callback(p.requires_grad_, False)
                        p.requires_grad_(True)
                summary = self._measured(loss_fn, batch, motion.direction())
            finite = _is_finite(summary)
        except NotFiniteError as error:
            finite = False
            reason = str(error) if isinstance(error, RankError) else reason  # which names the rank
        if not finite:
            nan = torch.full((len(self.partition),), math.nan)
            rates = LearningRates(nan, math.nan, "not-finite", self.partition.names)
            self._fail(rates, reason=reason)
            return False
        if self.done == 0 and not bool(summary.gbar.any() or summary.hessian().any()):
            raise ValueError(
                "The loss on the curvature batch does not depend on the parameters that move. Is "
                "the partition one of the model that is trained, and does loss_fn use the model "
                "that it is given?"
            )
        self.done += 1
        self.last_summary = summary
        norms = motion.measured_norms() if self.average.lengths else None
        self.average.push(summary, norms)
        return True

    def _measured(self, loss_fn: LossFn, batch: Any, u: Params) -> Summary:
        """Measure a summary along ``u``, by a CUDA graph if that is wanted and can be done."""
        if self.cuda_graph and self.done >= BEFORE_CAPTURE:
            if self._graphs is None:
                self._graphs = SweepGraphs(self.model, self.partition, self.order)
            try:
                self._check_capture(batch, u)
                return self._graphs.summarize(loss_fn, batch, u)
            except CannotCapture as error:
                self.cuda_graph, self._graphs = False, None
                warnings.warn(
                    f"NewtonSummary: cuda_graph=True has no effect, because {error}.", stacklevel=7
                )
        processes = self.processes()
        with processes.joint():
            backends = backends_for(self.backend, self.microbatch, processes.sharded)
            partition = find_partition(self.model, self.partition)
            given = (self.model, loss_fn, OneBatch(batch), partition, self.microbatch)
            with open_probe(*given, processes) as probe:
                summary = measure(probe, u, self.order, backends)
        return mean_over(processes, summary, u)

    def _check_capture(self, batch: Any, u: Params) -> None:
        if self.processes().count > 1:
            raise CannotCapture("there are several ranks")
        if batch is None:
            raise CannotCapture(
                "the batch of a closure cannot be replaced: give curvature=(loss_fn, loader)"
            )
        if self.microbatch is not None or self.backend not in ("auto", "sweep"):
            raise CannotCapture(
                f"it measures a whole batch with the sweep, and not with "
                f"microbatch={self.microbatch} and backend={self.backend!r}"
            )

    def solve(self, motion: Motion, loss_fn: LossFn, batch: Any, scale: Scale) -> None:
        """Set the rates from the averaged summary, or keep them if there is nothing usable.

        Args:
            motion: The present direction.
            loss_fn: Of the last measurement, for the check of the decrease.
            batch: Of the last measurement.
            scale: Multiplies a solution with lr, as the next step would.
        """
        rates = self.rules.solve(self.average.mean())
        usable = self.rules.usable(rates)
        norms: Tensor | None = None
        if self.average.lengths or self.max_step < math.inf:
            norms = motion.measured_norms().cpu().double()
        if norms is not None and self.average.lengths:
            self.norms = norms
            motion.hold(norms)
        if usable:
            solution = self.rules.follow(rates, self.solution, self._peak)
            if norms is not None and self.max_step < math.inf:
                solution = self._bounded(solution, norms, motion, scale)
            if self.min_decrease is not None:
                shorter = self._shorten(solution, motion, loss_fn, batch, scale)
                usable = shorter is not None
                solution = solution if shorter is None else shorter
                rates = rates if usable else replace(rates, status="no-decrease")
        per_solution: Tensor | float = 1.0
        if norms is not None and self.average.lengths:
            per_solution = torch.where(norms > 0, 1 / norms, 0.0)
        rates = replace(rates, eta=rates.eta * per_solution)
        self.last_rates = rates
        if not rates.ok:
            self._fail(rates, used=usable)
        if usable:
            peak = solution if self._peak is None else self._peak
            self._peak = torch.where(solution > 0, solution, peak)
            self.solution, self.eta = solution, solution * per_solution

    def _bounded(self, solution: Tensor, norms: Tensor, motion: Motion, scale: Scale) -> Tensor:
        """Return the solution with the step of each group below a part of its weights' norm.

        A group without weights, or whose weights are zero as yet, moves by no more than a group
        with weights of middling norm may. Small weights count as a tenth of that at least: else
        what has started near zero would stay there.
        """
        steps = as_vector(motion.rates(scale(solution))).cpu().double() * norms
        weights = motion.weight_norms().cpu().double()
        with_weights = weights > 0
        if not bool(with_weights.any()):
            return solution
        middling = weights[with_weights].median()
        sizes = torch.where(with_weights, weights.clamp_min(middling / 10), middling)
        return solution * (self.max_step * sizes / steps).clamp_max(1)

    def _shorten(
        self, solution: Tensor, motion: Motion, loss_fn: LossFn, batch: Any, scale: Scale
    ) -> Tensor | None:
        """Halve the solution until the curvature batch agrees; None if it never does."""
        summary = self.last_summary
        assert summary is not None and self.min_decrease is not None
        given = (self.model, loss_fn, OneBatch(batch), self.partition, self.microbatch)

        def loss() -> Tensor:
            with open_probe(*given, self.processes()) as probe:
                return probe.mean_loss()

        for _ in range(6):
            step = scale(solution)
            predicted = float(summary.predicted_change(as_vector(motion.rates(step))))
            change = float(motion.try_move(step, loss) - summary.loss)
            if predicted < 0 and change <= self.min_decrease * predicted:
                return solution
            solution = solution / 2
        return None

    def _fail(self, rates: LearningRates, used: bool = False, reason: str | None = None) -> None:
        self.failed += 1
        self.last_rates = rates
        if rates.status not in self._told:
            self._told.add(rates.status)
            kept = "there are none yet" if self.solution is None else "the last good ones are kept"
            warnings.warn(
                f"NewtonSummary: a refresh gave no usable rates, and "
                f"{'they are taken as they are' if used else kept}. "
                f"{reason or rates.detail} (Told once; opt.failed_refreshes counts them.)",
                stacklevel=6,
            )

    # --- more groups, checkpoints -----------------------------------------------------------------

    def extend(self, partition: Partition) -> None:
        """Go on with a partition that has more groups at its end; the average starts anew."""
        none_yet = torch.zeros(len(partition) - len(self.partition), dtype=torch.float64)
        self.eta = torch.cat([self.eta, none_yet])
        if self.solution is not None and self._peak is not None:
            self.solution = torch.cat([self.solution, none_yet])
            self._peak = torch.cat([self._peak, none_yet])
        if self.norms is not None:
            self.norms = torch.cat([self.norms, none_yet])
        self.partition = partition
        self._graphs = None
        self.average.clear()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the graphs, which cannot be copied and are captured anew."""
        return self.__dict__ | {"_graphs": None}

    def state_dict(self) -> dict[str, Any]:
        """Return everything as plain values and tensors."""
        rates, summary = self.last_rates, self.last_summary
        return {
            "done": self.done,
            "failed": self.failed,
            "told": sorted(self._told),
            "solution": self.solution,
            "eta": self.eta,
            "norms": self.norms,
            "peak": self._peak,
            "average": self.average.state_dict(),
            "last_rates": None
            if rates is None
            else {f.name: getattr(rates, f.name) for f in fields(rates)},
            "last_summary": None
            if summary is None
            else replace(summary, partition=None).state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a saved state of the same groups."""
        state = copy.deepcopy(dict(state))
        self.done, self.failed, self._told = state["done"], state["failed"], set(state["told"])
        self.solution, self.eta, self._peak = state["solution"], state["eta"], state["peak"]
        self.norms = state["norms"]
        self.average.load_state_dict(state["average"], self.partition)
        rates, summary = state["last_rates"], state["last_summary"]
        self.last_rates = None if rates is None else LearningRates(**rates)
        self.last_summary = None
        if summary is not None:
            summary = Summary.from_state_dict(summary)
            self.last_summary = replace(summary, partition=self.partition)


def _is_finite(summary: Summary) -> bool:
    parts = (summary.gbar, summary.Hbar, summary.D3)
    return all(bool(torch.isfinite(x).all()) for x in parts if x is not None)
