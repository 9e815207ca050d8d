"""Summaries averaged over the refreshes of a training run.

Both averages take a summary and the norms n_s = ||U^s|| of the direction it was measured along, and
give a summary whose solution is what the optimizer keeps between two refreshes: a rate eta_s for
each group, or a length l_s = eta_s n_s.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from newton_summary.partition import Partition
from newton_summary.summary import Summary


class Average(Protocol):
    """What the optimizer needs of an average."""

    lengths: bool  # whether the solution is a step length for each group, or a rate

    def __len__(self) -> int:
        """Return how many summaries have gone in and still count."""

    def push(self, summary: Summary, norms: Tensor | None) -> None:
        """Add a summary that was measured along a direction with these norms, (S,).

        The norms may be left out where ``lengths`` is false.
        """

    def mean(self) -> Summary:
        """Return the average, in float64 on the CPU."""

    def clear(self) -> None:
        """Forget everything."""

    def state_dict(self) -> dict[str, Any]:
        """Return the average as plain values and tensors."""

    def load_state_dict(self, state: Mapping[str, Any], partition: Partition) -> None:
        """Take over a saved average of the same groups."""


class WindowAverage:
    """The mean of the last few summaries (upsilon of Algorithm 2), D3 with its sign.

    In the paper these are the last ``size``. In its author's runs they were, from refresh to
    refresh, the last ``size``, ``size`` + 1, ... 2 ``size`` - 1, and ``size`` again.

    Args:
        size: How many summaries are averaged.
        breathes: Whether the number grows and falls back, as in the runs.
    """

    lengths = False

    def __init__(self, size: int, breathes: bool = False):
        self.size, self.breathes = size, breathes
        self._held: list[Summary] = []
        self._count = 0  # of all summaries, also those that are no longer held

    def __len__(self) -> int:
        """Return how many summaries are averaged."""
        growth = (self._count - 1) % self.size if self.breathes else 0
        return min(self._count, self.size + growth)

    def push(self, summary: Summary, norms: Tensor | None) -> None:
        """Add a summary; the norms do not matter."""
        self._count += 1
        self._held.append(_exact(summary))
        self._held = self._held[-len(self) :]

    def mean(self) -> Summary:
        """Return the mean of the summaries that count now."""
        return Summary.mean(self._held)

    def clear(self) -> None:
        """Forget all summaries."""
        self._held, self._count = [], 0

    def state_dict(self) -> dict[str, Any]:
        """Return the window as plain values and tensors."""
        held = [replace(summary, partition=None).state_dict() for summary in self._held]
        return {"count": self._count, "summaries": held}

    def load_state_dict(self, state: Mapping[str, Any], partition: Partition) -> None:
        """Take over the summaries of another window."""
        held = [Summary.from_state_dict(saved) for saved in state["summaries"]]
        self._held = [replace(summary, partition=partition) for summary in held]
        self._count = state["count"]


class NormalizedAverage:
    """Exponential averages of gbar_s / n_s, Hbar_st / (n_s n_t) and D3_s / n_s^3.

    These are the derivatives by step length along u_s / n_s. Unlike those by eta they do not change
    their scale when u does, so summaries of different times can be averaged. Early averages are
    corrected for having started at zero. Invariant under rescaling a group, as the solution is: a
    length scales as the parameters do.

    Args:
        decay: Weight of the past at each refresh; 0 keeps the last summary only.
        absolute: Average abs(D3) instead of D3, which noise of changing sign cannot make small.
    """

    lengths = True

    def __init__(self, decay: float, absolute: bool):
        self.decay, self.absolute = decay, absolute
        self.clear()

    def clear(self) -> None:
        """Forget all summaries."""
        self._sum: Summary | None = None
        self._count = 0

    def __len__(self) -> int:
        """Return how many summaries have gone in."""
        return self._count

    def push(self, summary: Summary, norms: Tensor | None) -> None:
        """Add a summary that was measured along a direction with these norms."""
        assert norms is not None
        summary, norms = _exact(summary), norms.detach().double().cpu()
        inverse = torch.where(norms > 0, 1 / norms, 0.0)  # a group that does not move counts as 0
        D3 = summary.D3
        if D3 is not None:
            D3 = (D3.abs() if self.absolute else D3) * inverse**3
        new = replace(
            summary,
            gbar=summary.gbar * inverse,
            Hbar=summary.hessian() * inverse * inverse[:, None],
            D3=D3,
        )
        # The sum of decay^k x_k, divided by that of decay^k where it is read.
        self._sum = new if self._sum is None else _add(self._sum, new, self.decay)
        self._count += 1

    def mean(self) -> Summary:
        """Return the average, whose solution is a step length for each group."""
        if self._sum is None:
            raise ValueError("The mean of no summaries is not defined.")
        weight = (1 - self.decay**self._count) / (1 - self.decay)
        return _scaled(self._sum, 1 / weight)

    def state_dict(self) -> dict[str, Any]:
        """Return the average as plain values and tensors."""
        held = None if self._sum is None else replace(self._sum, partition=None).state_dict()
        return {"count": self._count, "sum": held}

    def load_state_dict(self, state: Mapping[str, Any], partition: Partition) -> None:
        """Take over another average."""
        self._count = state["count"]
        held = None if state["sum"] is None else Summary.from_state_dict(state["sum"])
        self._sum = None if held is None else replace(held, partition=partition)


def make_average(
    kind: str, window: int, decay: float, absolute: bool, breathes: bool = False
) -> Average:
    """Return the average called ``"window"`` or ``"normalized"``."""
    if kind == "window":
        return WindowAverage(window, breathes)
    if kind == "normalized":
        return NormalizedAverage(decay, absolute)
    raise ValueError(f"averaging={kind!r}: write 'normalized', or 'window' as in the paper.")


def _exact(summary: Summary) -> Summary:
    return summary.to("cpu").to(torch.float64)


def _scaled(summary: Summary, factor: float) -> Summary:
    return replace(
        summary,
        gbar=summary.gbar * factor,
        Hbar=summary.hessian() * factor,
        D3=None if summary.D3 is None else summary.D3 * factor,
        loss=summary.loss * factor,
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
