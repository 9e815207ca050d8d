"""Summaries from a CUDA graph, while a training allows it."""

from __future__ import annotations

from typing import Any

from newton_summary.derivatives.sweep.cuda_graph import CannotCapture, SweepGraphs
from newton_summary.display.warn import warn_user
from newton_summary.partition import Params, Partition
from newton_summary.probe.inputs import LossFn
from newton_summary.summary import Summary

BEFORE_CAPTURE = 3  # measurements without a graph, whose errors are in their own words


class CapturedSweep:
    """Captures the sweep after the first measurements, and replays it.

    Args:
        unfit: Why nothing can be captured, if that is known.
    """

    def __init__(self, unfit: str | None):
        self.unfit, self._asked = unfit, 0
        self._graphs: SweepGraphs | None = None
        self._stopped = False

    def summarize(
        self, partition: Partition, loss_fn: LossFn, batch: Any, u: Params, order: int, ranks: int
    ) -> Summary | None:
        """Return a summary as the sweep measures it; None where that has to be done without."""
        self._asked += 1
        if self._stopped or self._asked <= BEFORE_CAPTURE:
            return None
        try:
            if self.unfit is not None or ranks > 1:
                raise CannotCapture(self.unfit or "there are several ranks")
            if self._graphs is None or self._graphs.partition is not partition:
                assert partition.model is not None
                self._graphs = SweepGraphs(partition.model, partition, order)
            return self._graphs.summarize(loss_fn, batch, u)
        except CannotCapture as error:
            self._stopped, self._graphs = True, None
            warn_user(f"NewtonSummary: cuda_graph=True has no effect, because {error}.")
            return None

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the graphs, which cannot be copied and are captured again."""
        return self.__dict__ | {"_graphs": None}
