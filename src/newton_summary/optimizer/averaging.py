"""Summaries averaged over the refreshes of a training run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from newton_summary.partition import Partition
from newton_summary.summary import Summary


class WindowAverage:
    """The mean of the last few summaries (upsilon of Algorithm 2), D3 with its sign.

    As published these are the last ``size``. In the experiments of the paper they were, from
    refresh to refresh, the last ``size``, ``size`` + 1, ..., 2 ``size`` - 1, and ``size`` again.

    Args:
        size: How many summaries are averaged.
        as_run: Whether their number grows and falls back, as in the experiments.
    """

    def __init__(self, size: int, as_run: bool = False):
        self.size, self.as_run = size, as_run
        self._held: list[Summary] = []
        self.count = 0  # of all summaries, also those that are no longer held

    def push(self, summary: Summary, norms: Tensor) -> None:
        """Add a summary; the norms do not matter."""
        growth = self.count % self.size if self.as_run else 0
        self.count += 1
        self._held = [*self._held, _exact(summary)][-(self.size + growth) :]

    def mean(self, norms: Tensor) -> Summary:
        """Return the mean; the norms do not matter."""
        return Summary.mean(self._held)

    def state_dict(self) -> dict[str, Any]:
        """Return the window as plain values and tensors."""
        return {
            "count": self.count,
            "summaries": [plain_summary(summary) for summary in self._held],
        }

    def load_state_dict(self, state: Mapping[str, Any], partition: Partition) -> None:
        """Take over the summaries of another window of the same size."""
        self._held = [restored_summary(saved, partition) for saved in state["summaries"]]
        self.count = state["count"]


class NormalizedAverage:
    """Exponential averages of gbar_s / n_s, Hbar_st / (n_s n_t) and |D3_s| / n_s^3, n_s = ||U^s||.

    These are the derivatives by step length. Unlike those by eta they do not change their scale
    when the direction does, so summaries of different times can be averaged. Of D3 the absolute
    value counts: noise then makes the cubic term larger, where with signs it makes it smaller.
    Early averages are corrected for having started at zero.

    Args:
        memory: About how many summaries count: at each refresh the past is weighted by
            1 - 1 / ``memory``. 1 keeps the last summary only.
    """

    def __init__(self, memory: int):
        self.decay = 1 - 1 / memory
        self._sum: Summary | None = None
        self.count = 0

    def push(self, summary: Summary, norms: Tensor) -> None:
        """Add a summary that was measured along a direction with these norms, (S,)."""
        inverse = torch.where(norms > 0, 1 / norms, 0.0)  # a group that does not move counts as 0
        new = _scaled(_exact(summary), inverse.double().cpu())
        if new.D3 is not None:
            new = replace(new, D3=new.D3.abs())
        # The sum of decay^k x_k, divided by that of decay^k where it is read.
        self._sum = new if self._sum is None else _add(self._sum, new, self.decay)
        self.count += 1

    def mean(self, norms: Tensor) -> Summary:
        """Return the average, as derivatives by eta along a direction with these norms."""
        if self._sum is None:
            raise ValueError("The mean of no summaries is not defined.")
        weight = (1 - self.decay**self.count) / (1 - self.decay)
        return _scaled(self._sum, norms.double().cpu(), 1 / weight)

    def state_dict(self) -> dict[str, Any]:
        """Return the average as plain values and tensors."""
        return {"count": self.count, "sum": None if self._sum is None else plain_summary(self._sum)}

    def load_state_dict(self, state: Mapping[str, Any], partition: Partition) -> None:
        """Take over another average of the same memory."""
        self._sum = None if state["sum"] is None else restored_summary(state["sum"], partition)
        self.count = state["count"]


Average = WindowAverage | NormalizedAverage


def _exact(summary: Summary) -> Summary:
    return summary.to("cpu").to(torch.float64)


def plain_summary(summary: Summary) -> dict[str, Any]:
    """Return a summary as plain values and tensors, without its partition."""
    return replace(summary, partition=None).state_dict()


def restored_summary(state: Mapping[str, Any], partition: Partition) -> Summary:
    """Return a summary from its plain values, with its partition."""
    return replace(Summary.from_state_dict(state), partition=partition)


def _scaled(summary: Summary, a: Tensor, factor: float = 1.0) -> Summary:
    """Return a summary along a u that is multiplied by a_s in each group, of a loss scaled too."""
    return replace(
        summary,
        gbar=factor * summary.gbar * a,
        Hbar=factor * summary.hessian() * a * a[:, None],
        D3=None if summary.D3 is None else factor * summary.D3 * a**3,
        loss=factor * summary.loss,
    )


def _add(old: Summary, new: Summary, decay: float) -> Summary:
    return replace(
        new,
        gbar=decay * old.gbar + new.gbar,
        Hbar=decay * old.hessian() + new.hessian(),
        D3=None if new.D3 is None or old.D3 is None else decay * old.D3 + new.D3,
        loss=decay * old.loss + new.loss,
        num_samples=old.num_samples + new.num_samples,
    )
