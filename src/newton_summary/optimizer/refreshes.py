"""The refreshes of the paper's algorithm: when summaries are measured, and their average."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from newton_summary.optimizer.checkpoint import check_finite, read_counts
from newton_summary.optimizer.checks import Variant
from newton_summary.partition import Partition
from newton_summary.summary import Summary


class Schedule:
    """Counts steps and measurements of the paper's algorithm.

    ``"as-run"`` measures at steps 0, period, 2 period, ... The first ``warmup`` measurements do not
    move, and until then the direction advances only at measurements.

    ``"as-published"`` counts steps from 1 and measures at steps period, 2 period, ... The direction
    advances at every step, and the first measurement that is not of the warm-up moves.

    The count waits if the first measurement is due and the direction is zero or not finite.

    Args:
        variant: One of these.
        period: Steps from one measurement to the next.
        warmup: Measurements of the warm-up.
    """

    def __init__(self, variant: Variant, period: int, warmup: int):
        self.variant, self.period, self.warmup = variant, period, warmup
        self.first = period - 1 if variant == "as-published" else 0
        self.t = 0  # steps made
        self.next = self.first  # the step of the next measurement
        self.tried = 0  # measurements since the start, or since groups were added

    @property
    def due(self) -> bool:
        """Whether the next step measures."""
        return self.t >= self.next

    @property
    def rests(self) -> bool:
        """Whether the next step does nothing at all."""
        return self.variant == "as-run" and 0 < self.tried <= self.warmup and not self.due

    @property
    def ready(self) -> bool:
        """Whether there are enough measurements for rates."""
        return self.tried > self.warmup

    def begin(self) -> None:
        """Count a measurement, and plan the next."""
        self.tried += 1
        self.next = self.first + ((self.t - self.first) // self.period + 1) * self.period

    def advance(self) -> None:
        """Count a step."""
        if self.tried > 0 or not self.due:
            self.t += 1

    def restart(self) -> None:
        """Restart the warm-up at the next step."""
        self.tried, self.next = 0, self.t

    def state_dict(self) -> dict[str, int]:
        """Return the counts."""
        return {"t": self.t, "next": self.next, "tried": self.tried}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load saved counts."""
        self.t, self.next, self.tried = read_counts(state, "t", "next", "tried")


class WindowAverage:
    """The mean of the last few summaries (upsilon of Algorithm 2).

    As published these are the last ``size``, and what is averaged is D, that is abs(D3)^(1/3). In
    the experiments of the paper they were, from refresh to refresh, the last ``size``, ``size`` +
    1, ..., 2 ``size`` - 1, and ``size`` again, and D3 was averaged with its sign.

    Args:
        size: How many summaries are averaged.
        as_run: Whether to average as in the experiments.
    """

    def __init__(self, size: int, as_run: bool):
        self.size, self.as_run = size, as_run
        self._held: list[Summary] = []
        self.count = 0  # of all summaries, also those that are no longer held

    def push(self, summary: Summary) -> None:
        """Add a summary."""
        growth = self.count % self.size if self.as_run else 0
        self.count += 1
        self._held = [*self._held, summary.to("cpu", torch.float64)][-(self.size + growth) :]

    def mean(self) -> Summary:
        """Return the mean."""
        return Summary.mean(self._held) if self.as_run else mean_with_D(self._held)

    def state_dict(self) -> dict[str, Any]:
        """Return the window as plain values and tensors."""
        return {
            "count": self.count,
            "summaries": [plain_summary(summary) for summary in self._held],
        }

    def load_state_dict(self, state: Mapping[str, Any], partition: Partition) -> None:
        """Load the summaries of another window of the same size."""
        held = [restored_summary(saved, partition) for saved in state["summaries"]]
        (count,) = read_counts(state, "count")
        if count < len(held):
            raise ValueError(f"The state has {len(held)} summaries, but counts {count}.")
        check_finite([(s.gbar, s.Hbar, s.D3) for s in held], "A summary of the state")
        self._held, self.count = held, count


def mean_with_D(summaries: list[Summary]) -> Summary:
    """Average summaries as App. G does: D, that is abs(D3)^(1/3), whose cube is in place of D3."""
    mean, found = Summary.mean(summaries), [s.D3 for s in summaries if s.D3 is not None]
    if mean.D3 is None:
        return mean
    return replace(mean, D3=torch.stack(found).abs().pow(1 / 3).mean(0).pow(3))


def plain_summary(summary: Summary) -> dict[str, Any]:
    """Return a summary as plain values and tensors, without its partition."""
    return replace(summary, partition=None).state_dict()


def restored_summary(state: Mapping[str, Any], partition: Partition) -> Summary:
    """Return a summary from its plain values, with its partition."""
    return replace(Summary.from_state_dict(state), partition=partition)
