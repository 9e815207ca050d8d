"""The summaries of a training that are averaged, as in Algorithm 2."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from newton_summary.optimizer.checkpoint import check_finite, read_counts
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

    def push(self, summary: Summary) -> None:
        """Add a summary."""
        growth = self.count % self.size if self.as_run else 0
        self.count += 1
        self._held = [*self._held, summary.to("cpu").to(torch.float64)][-(self.size + growth) :]

    def mean(self) -> Summary:
        """Return the mean."""
        return Summary.mean(self._held)

    def state_dict(self) -> dict[str, Any]:
        """Return the window as plain values and tensors."""
        return {
            "count": self.count,
            "summaries": [plain_summary(summary) for summary in self._held],
        }

    def load_state_dict(self, state: Mapping[str, Any], partition: Partition) -> None:
        """Take over the summaries of another window of the same size."""
        held = [restored_summary(saved, partition) for saved in state["summaries"]]
        (count,) = read_counts(state, "count")
        if count < len(held):
            raise ValueError(f"The state has {len(held)} summaries, and counts {count}.")
        check_finite([(s.gbar, s.Hbar, s.D3) for s in held], "A summary of the state")
        self._held, self.count = held, count


def plain_summary(summary: Summary) -> dict[str, Any]:
    """Return a summary as plain values and tensors, without its partition."""
    return replace(summary, partition=None).state_dict()


def restored_summary(state: Mapping[str, Any], partition: Partition) -> Summary:
    """Return a summary from its plain values, with its partition."""
    return replace(Summary.from_state_dict(state), partition=partition)
