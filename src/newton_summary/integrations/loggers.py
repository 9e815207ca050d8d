"""What a measurement writes to logs: one interface for all kinds."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

from newton_summary.history import History, Measured
from newton_summary.measuring.advice import Advice

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PREFIX = "newton_summary"
GROUPS = f"{PREFIX}_groups"  # its own section in TensorBoard: there may be many


class Logger(Protocol):
    """Stores numbers and pictures over the steps of training.

    >>> class Printed:
    ...     def scalars(self, values, step):
    ...         print(step, *values.items())
    ...     def figure(self, name, figure, step):
    ...         figure.savefig(f"{name}-{step}.png")
    >>> log: Logger = Printed()
    >>> log.scalars({"newton_summary/loss": 0.5}, step=3)
    3 ('newton_summary/loss', 0.5)
    """

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Write numbers by name."""

    def figure(self, name: str, figure: Figure, step: int) -> None:
        """Write a picture."""


class NumbersOnly:
    """A log that ignores pictures; ``write`` takes numbers by name, and the step."""

    def __init__(self, write: Callable[..., None]):
        self.scalars = write

    def figure(self, name: str, figure: Figure, step: int) -> None:
        """Ignore pictures."""


def advice_scalars(advice: Advice) -> dict[str, float]:
    """Return the best factor on each learning rate, its standard error, and what is suggested."""
    values = {}
    for group in advice.groups:
        values[f"{PREFIX}/factor/{group.name}"] = group.factor
        values[f"{PREFIX}/suggested/{group.name}"] = group.change
        if group.stderr and not advice.at_limit(group.factor):
            values[f"{PREFIX}/factor_error/{group.name}"] = group.stderr
    return values


def scalars_of(measured: Measured) -> dict[str, float]:
    """Return the loss, and how a step changes it: predicted to second order, and real.

    The step is the last one that was tried, or ``theta - eta_s u`` in every group s.
    """
    place = PREFIX if measured.kind == "full" else f"{PREFIX}/{measured.kind}"
    values = {f"{place}/loss": float(measured.summary.loss)}
    if not measured.trials:
        predicted = float(measured.summary.predicted_change(measured.eta))
        return {**values, f"{place}/predicted_change": predicted}
    _, predicted, real = measured.trials[-1]
    return {**values, f"{place}/predicted_change": predicted, f"{place}/real_change": real}


def rate_scalars(measured: Measured) -> dict[str, float]:
    """Return the rate of each group; nothing if a step with these rates raised the loss."""
    if measured.refuted:
        return {}
    place = GROUPS if measured.kind == "full" else f"{GROUPS}/{measured.kind}"
    rates = zip(measured.summary.names, measured.eta.tolist(), strict=True)
    return {f"{place}/{name}": rate for name, rate in rates}


def log_figures(logger: Logger, history: History, step: int) -> None:
    """Write pictures of the last measurement to a log, if matplotlib is installed.

    Heat maps of Hbar on a logarithmic scale and of the interactions (Hbar scaled to a unit
    diagonal), and one chart with the rates of all groups. One group has no such pictures.
    """
    full = [measured for measured in history.measured if measured.kind == "full"]
    if not full or len(history.names) < 2 or not importlib.util.find_spec("matplotlib"):
        return
    from newton_summary.figures import heatmap, rates

    summary = full[-1].summary
    logger.figure(f"{PREFIX}/Hbar", heatmap(summary, "Hbar", scale="symlog"), step)
    logger.figure(f"{PREFIX}/interactions", heatmap(summary, "normalized"), step)
    logger.figure(f"{PREFIX}/rates", rates(history), step)
