"""Measurements in TensorBoard: ``pip install -e '.[tensorboard]'``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from newton_summary.history import History
from newton_summary.integrations.loggers import (
    GROUPS,
    PREFIX,
    log_figures,
    rate_scalars,
    scalars_of,
)
from newton_summary.solver import LearningRates
from newton_summary.summary import Summary

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch.utils.tensorboard import SummaryWriter


class TensorBoard:
    """A :class:`~newton_summary.integrations.loggers.Logger` that writes with a SummaryWriter.

    Args:
        writer: ``torch.utils.tensorboard.SummaryWriter``, or an object with the same methods. Its
            tab Custom Scalars gets one chart for all groups.

    >>> class Printer:
    ...     def add_custom_scalars(self, layout):
    ...         print(*layout["newton_summary"], sep="; ")
    ...     def add_scalar(self, name, value, step):
    ...         print(step, name, value)
    >>> board = TensorBoard(Printer())  # or TensorBoard(SummaryWriter("runs"))
    factor of the learning rate; rates of groups
    >>> board.scalars({"newton_summary/loss": 0.5}, step=3)
    3 newton_summary/loss 0.5
    """

    def __init__(self, writer: SummaryWriter):
        self.writer = writer
        charts = {
            "factor of the learning rate": ["Multiline", [f"{PREFIX}/factor/.*"]],
            "rates of groups": ["Multiline", [f"{GROUPS}/.*"]],
        }
        writer.add_custom_scalars({PREFIX: charts})

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Write numbers by name."""
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def figure(self, name: str, figure: Figure, step: int) -> None:
        """Write a picture."""
        self.writer.add_figure(name, figure, step)


def log_summary(
    writer: SummaryWriter,
    summary: Summary,
    rates: LearningRates,
    step: int,
    *,
    figures: bool = True,
) -> None:
    """Write a measurement to TensorBoard.

    The numbers are ``newton_summary/loss``, ``newton_summary/predicted_change`` (of a step along
    the rates, to second order) and ``newton_summary_groups/<group>``; the pictures, if matplotlib
    is installed, are ``newton_summary/Hbar``, ``newton_summary/interactions`` (scaled to a unit
    diagonal) and ``newton_summary/rates``.

    Args:
        writer: ``torch.utils.tensorboard.SummaryWriter``.
        summary: From :func:`newton_summary.summarize`.
        rates: From :func:`newton_summary.learning_rates`.
        step: The training step.
        figures: Whether to write the pictures too.

    >>> import torch
    >>> from unittest.mock import Mock
    >>> from newton_summary import learning_rates
    >>> summary = Summary(gbar=torch.tensor([1.0]), Hbar=torch.tensor([[2.0]]))
    >>> writer = Mock()  # or SummaryWriter("runs")
    >>> log_summary(writer, summary, learning_rates(summary, 0), step=7, figures=False)
    >>> [call.args[0] for call in writer.add_scalar.call_args_list]
    ['newton_summary/loss', 'newton_summary/predicted_change', 'newton_summary_groups/0']
    """
    history = History()
    history.add(0, summary, rates)
    board = TensorBoard(writer)
    board.scalars(scalars_of(history.measured[0]) | rate_scalars(history.measured[0]), step)
    if figures:
        log_figures(board, history, step)
