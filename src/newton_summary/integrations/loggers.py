"""What a measurement writes to logs: one interface for all kinds."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from newton_summary.history import Measured

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PREFIX = "newton_summary"


class Logger(Protocol):
    """A place that keeps numbers and pictures over the steps of a training."""

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Write numbers by name."""

    def figure(self, name: str, figure: Figure, step: int) -> None:
        """Write a picture."""


def scalars_of(measured: Measured) -> dict[str, float]:
    """Return the numbers to log: loss, predicted change, and the rate of each group.

    The predicted change is that of the step ``theta - eta_s u`` in every group s, to second order;
    it is negative if the loss should fall.
    """
    place = PREFIX if measured.kind == "full" else f"{PREFIX}/{measured.kind}"
    summary = measured.summary
    rates = zip(summary.names, measured.eta.tolist(), strict=True)
    return {
        f"{place}/loss": float(summary.loss),
        f"{place}/predicted_change": float(summary.predicted_change(measured.eta)),
        **{f"{place}/eta/{name}": rate for name, rate in rates},
    }


def log_measured(logger: Logger, measured: Measured, step: int, figures: bool = True) -> None:
    """Write a measurement to a log.

    Args:
        logger: The log.
        measured: The measurement.
        step: Step of the training.
        figures: Whether to write heat maps too, if matplotlib is installed: of Hbar on a
            logarithmic scale, and of the interactions, Hbar scaled to a unit diagonal.
    """
    logger.scalars(scalars_of(measured), step)
    if figures and measured.kind == "full" and importlib.util.find_spec("matplotlib"):
        from newton_summary.figures import heatmap

        summary = measured.summary
        logger.figure(f"{PREFIX}/Hbar", heatmap(summary, "Hbar", scale="symlog"), step)
        logger.figure(f"{PREFIX}/interactions", heatmap(summary, "normalized"), step)
