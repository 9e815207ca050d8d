"""Steer the learning rate of any optimizer by the slope and the curvature along its own steps.

A step moves the parameters from ``before`` by ``-d``. On the next batch, which had no part in it,

    slope     = <grad L(before), d>                      what the step gains to first order
    curvature = <grad L(before) - grad L(before - d), d> what it loses again, twice

so ``slope / curvature`` is the best multiple of the step, the *factor*: 1 for a step to the bottom
of the valley, below 1/2 for one that climbs up the other side. Taking that best multiple again and
again makes the rate shrink for ever; the controller keeps the factor at a set point below 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from newton_summary.display.table import ShownAsTable
from newton_summary.errors import NotFiniteError
from newton_summary.measuring.measurement import summarize
from newton_summary.parallel.fsdp import is_sharded
from newton_summary.partition import make_partition
from newton_summary.probe.loss_function import LossFn, check_loss_fn
from newton_summary.probe.state import unmoved

Why = Literal["start", "raise", "lower", "keep", "brake", "not finite", "no step"]

LONGEST = 0.1  # of the parameters' norm: a longer step is not lengthened
SHORTEST = 1e-3  # of the same: where the start begins to search
ERROR = "bounded"
SURE = 4.0
TRIALS = 12  # evaluations that the start may take


@dataclass(frozen=True)
class RateRecord:
    """One measurement of a :class:`RateController`, and what followed from it."""

    step: int  # how many steps the optimizer had taken
    rate: float  # the largest learning rate of the step that was measured
    slope: float  # of the loss along that step
    curvature: float  # of the loss along that step
    factor: float  # slope / curvature, from the running means, at the rate of the schedule's peak
    change: float  # what the rate was multiplied with
    why: Why


class RateController(ShownAsTable):
    """Steer the learning rate of an optimizer, from wherever it starts.

    Args:
        optimizer: Any torch optimizer whose step is proportional to its learning rate: SGD, Adam,
            AdamW and most others. Its ``lr`` is where the search starts.
        model: The model that it trains.
        loss_fn: ``loss_fn(model, batch)`` returns the mean loss of a batch.
        period: Measure one step in so many. A measurement costs two gradients.
        set_point: Where to keep the factor. Lower means longer steps.
        gain: At most by ``exp(gain)`` the rate changes at a measurement.
        memory: How much of the running means of slope and curvature a measurement leaves.
        distributed: As for :func:`summarize`.
    """

    _numbers = range(0, 6)

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        loss_fn: LossFn,
        *,
        period: int = 10,
        set_point: float = 1.0,
        gain: float = 0.3,
        memory: float = 0.9,
        distributed: str | bool | Any = "auto",
    ):
        check_loss_fn(loss_fn)
        self.optimizer, self.model, self.loss_fn = optimizer, model, loss_fn
        self.period, self.set_point, self.gain, self.memory = period, set_point, gain, memory
        self.distributed = distributed
        self.multiplier = 1.0  # of the optimizer's own learning rates
        self.history: list[RateRecord] = []
        self.steps = 0
        self._lrs = [float(group["lr"]) for group in optimizer.param_groups]
        self._partition = make_partition(model, "trivial")
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        self._held = {n: p for n, p in self._partition.params.items() if id(p) in held}
        sharded = any(is_sharded(p) for p in self._held.values())
        self._backend = "sweep" if sharded else "differences"
        self._slope, self._curvature = 0.0, 0.0  # running means, for a rate of 1
        self._square = self._weight = 0.0
        self._due = 1  # the step after which to measure next
        self._before: list[Tensor] | None = None  # parameters before the step to be measured
        self._rate = 0.0  # of that step
        self._batch: Any = None
        self._unscaled: list[Any] = []
        self._hooks = [
            optimizer.register_step_pre_hook(self._pre_step),
            optimizer.register_step_post_hook(self._post_step),
        ]

    # --- what a training loop calls ---------------------------------------------------------------

    def step(self, batch: Any) -> None:
        """Measure if it is time to, and let the optimizer take its step.

        Args:
            batch: The batch that the gradients are of, or any other of this model's data.
        """
        self.before_step(batch)
        self.optimizer.step()

    def before_step(self, batch: Any) -> None:
        """Measure if it is time to; the optimizer's step has to follow."""
        if self._before is not None and self.steps > 1:
            self._measure(batch, self._before)
            self._before = None
        self._batch = batch

    # --- hooks of the optimizer -------------------------------------------------------------------

    def _pre_step(self, *_: Any) -> None:
        self._unscaled = [group["lr"] for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups:
            group["lr"] = group["lr"] * self.multiplier
        if self.steps + 1 >= self._due and self._batch is not None:
            self._before = [p.detach().clone() for p in self._held.values()]
            self._rate = max(float(group["lr"]) for group in self.optimizer.param_groups)
        else:
            self._before = None

    def _post_step(self, *_: Any) -> None:
        for group, lr in zip(self.optimizer.param_groups, self._unscaled, strict=True):
            group["lr"] = lr
        self.steps += 1
        batch, self._batch = self._batch, None
        if self.steps == 1 and self._before is not None:
            self._start(batch, self._before)
            self._before = None

    # --- measuring --------------------------------------------------------------------------------

    def _direction(self, before: list[Tensor]) -> dict[str, Tensor]:
        moved = dict(zip(self._held, torch._foreach_sub(before, list(self._held.values()))))
        return {
            n: moved[n].detach() if n in moved else torch.zeros_like(p)
            for n, p in self._partition.params.items()
        }

    def _at_present(self, batch: Any, u: Mapping[str, Tensor]) -> tuple[float, float]:
        """Return the loss and its slope along ``-u``; infinite and NaN where it is not finite."""
        try:
            summary = summarize(
                self.model,
                self.loss_fn,
                batch,
                partition=self._partition,
                direction=u,
                order=1,
                backend=self._backend,
                distributed=self.distributed,
            )
        except NotFiniteError:
            return math.inf, math.nan
        loss, slope = torch.stack([summary.loss.double(), summary.gbar[0].double()]).tolist()
        return loss, slope

    def _measure(self, batch: Any, before: list[Tensor]) -> None:
        u = self._direction(before)
        length, size = _norm(list(u.values())), _norm(before)
        loss_after, slope_after = self._at_present(batch, u)
        with self._placed(before):
            loss, slope = self._at_present(batch, u)
        curvature = slope - slope_after
        self._due = self.steps + max(1, min(self.period, self.steps // 5))
        if length == 0:
            return
        self._steer(slope, curvature, loss_after - loss, length / size)

    def _steer(self, slope: float, curvature: float, rise: float, length: float) -> None:
        rate = self._rate
        why: Why
        if not (math.isfinite(slope) and math.isfinite(curvature) and math.isfinite(rise)):
            self._change(slope, curvature, math.nan, 0.5, "not finite")
            return
        self._slope += (1 - self.memory) * (slope / rate - self._slope)
        self._curvature += (1 - self.memory) * (curvature / rate**2 - self._curvature)
        peak = self.multiplier * self._reference()
        gained, lost = self._slope * peak, self._curvature * peak**2
        self._square += (1 - self.memory) * ((slope / rate) ** 2 - self._square)
        self._weight = 1 - (1 - self._weight) * self.memory
        w = self._weight
        spread = (
            max(self._square / w - (self._slope / w) ** 2, 0)
            * (1 - self.memory)
            / (1 + self.memory)
            * w**2
        )
        error = _error(gained, self.set_point * lost, SURE * math.sqrt(spread) * peak)
        change = math.exp(self.gain * error)
        why = "raise" if change > 1 else "lower"
        if change > 1 and length > LONGEST:
            change, why = 1.0, "keep"
        self._change(slope, curvature, gained / lost if lost else math.inf, change, why)

    def _reference(self) -> float:
        """Return the largest learning rate that the optimizer's schedule knows."""
        return max(
            max(float(group.get("initial_lr", lr)), float(group.get("max_lr", 0)))
            for group, lr in zip(self.optimizer.param_groups, self._lrs, strict=True)
        )

    def _change(
        self, slope: float, curvature: float, factor: float, change: float, why: Why
    ) -> None:
        self.history.append(
            RateRecord(self.steps, self._rate, slope, curvature, factor, change, why)
        )
        self.multiplier *= change

    @contextmanager
    def _placed(self, values: list[Tensor]) -> Iterator[None]:
        """Set the parameters to other values, for a while."""
        params = list(self._held.values())
        with unmoved(params), torch.no_grad():
            torch._foreach_copy_(params, values)
            yield

    def _start(self, batch: Any, before: list[Tensor]) -> None:
        """Lengthen or shorten the first step to the best one along its line."""
        u = self._direction(before)
        parts = [u[n] for n in self._held]
        params = list(self._held.values())
        with self._placed(before):
            loss, slope = self._at_present(batch, u)
        size, length = _norm(before), _norm(parts)
        best, high, lowest, curvature = 0.0, math.inf, loss, math.nan
        # From a short step on, whatever the rate: beyond a hill there may be another valley.
        s = SHORTEST * size / length if length > 0 else 0.0
        for _ in range(TRIALS if slope > 0 else 0):
            with self._placed(torch._foreach_sub(before, torch._foreach_mul(parts, s))):
                there, slope_there = self._at_present(batch, u)
            if not there < lowest:
                high = s
                if best > 0:
                    break
                s *= 0.1
                continue
            best, lowest, curvature = s, there, (slope - slope_there) / s
            target = slope / curvature if curvature > 0 else math.inf
            if target < 1.5 * s:
                break
            s = min(target, 10 * s, LONGEST * size / length)
            if s >= high or s <= best:
                break
        best = best or 1e-3 * SHORTEST * size / length
        with torch.no_grad():
            torch._foreach_copy_(
                params, torch._foreach_sub(before, torch._foreach_mul(parts, best))
            )
        self._change(slope, curvature, slope / curvature, best, "start")


def _error(gained: float, lost: float, unsure: float = 0.0) -> float:
    """Return (gained - lost) / (|gained| + |lost|), between -1 and 1."""
    if ERROR == "linear":
        if lost <= 0:
            return 1.0 if gained > 0 else -1.0
        return min(max((gained - lost) / (lost + unsure), -1.0), 1.0)
    total = abs(gained) + abs(lost) + unsure
    return (gained - lost) / total if total > 0 else 0.0


def _norm(tensors: list[Tensor]) -> float:
    return float(torch.stack(torch._foreach_norm(tensors)).norm())
