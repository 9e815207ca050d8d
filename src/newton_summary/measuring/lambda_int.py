"""Which ``lambda_int`` to use: try the steps of some, and see with which the loss falls most.

With ``lambda_int = 1`` the cubic term is the third derivative of each group alone. Groups that move
together have mixed third derivatives too, which are not measured. Where there are many of them, as
in a transformer at its initialisation, the steps come out too long, and a larger strength helps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from newton_summary.display.table import ShownAsTable
from newton_summary.measuring.trial_steps import as_floats, find_groups, need_summary, try_steps
from newton_summary.partition import Partition, Spec
from newton_summary.probe.directions import Direction
from newton_summary.probe.probe import LossFn
from newton_summary.solver import LearningRates, learning_rates
from newton_summary.summary import Summary

STRENGTHS = tuple(10.0**k for k in range(9))
"""What is tried if nothing else is said: 1, 10, 100, ... 1e8."""


class TriedStrength(NamedTuple):
    """The learning rates of one ``lambda_int``, and what their whole step does to the loss."""

    rates: LearningRates
    predicted: float  # change of the loss by the second-order model; nan if there are no rates
    real: float  # change of the loss of the same data; nan or infinite if the step leads there


@dataclass(frozen=True, eq=False)
class Strengths(ShownAsTable):
    """What some strengths of the cubic term do, made by :func:`suggest_lambda_int`."""

    _right = range(4)

    tried: tuple[TriedStrength, ...]
    loss: float  # where the steps start

    @property
    def best(self) -> TriedStrength:
        """The one with which the loss falls most, or rises least; the first of equal ones."""
        return min(self.tried, key=lambda one: math.inf if math.isnan(one.real) else one.real)

    @property
    def rates(self) -> LearningRates:
        """The learning rates of the best strength."""
        return self.best.rates

    @property
    def lambda_int(self) -> float:
        """The best strength."""
        return self.best.rates.lambda_int

    def _rows(self) -> list[list[str]]:
        rows = [["lambda_int", "negative rates", "predicted change", "real change", ""]]
        for one in self.tried:
            eta = one.rates.eta
            negative = f"{int((eta < 0).sum())} of {len(eta)}" if one.rates.ok else "-"
            changes = [f"{value:+.4g}" for value in (one.predicted, one.real)]
            mark = one.rates.status if not one.rates.ok else "best" if one is self.best else ""
            rows.append([f"{one.rates.lambda_int:g}", negative, *changes, mark])
        return rows

    def _said(self) -> str:
        start = f"The loss is {self.loss:.4g}"
        if not self.best.real < 0:
            return f"{start}, and it falls with none of these: try larger ones, strengths=..."
        said = f"{start}; with lambda_int = {self.lambda_int:g} it falls most."
        if len(self.tried) > 1 and self.best is max(self.tried, key=lambda o: o.rates.lambda_int):
            said += " That is the largest one tried: a still larger one may do better."
        return said


def suggest_lambda_int(
    model: nn.Module,
    loss_fn: LossFn,
    data: Any,
    summary: Summary,
    *,
    strengths: Sequence[float] = STRENGTHS,
    diagonal: bool = False,
    partition: Partition | Spec | None = None,
    direction: Direction = "gradient",
    microbatch: int | None = None,
    distributed: str | bool | Any = "auto",
) -> Strengths:
    """Try the whole step of some strengths of the cubic term, and tell which lowers the loss most.

    For a summary whose rates promise more than the loss does. Call it right after
    :func:`summarize`, with the same model, loss, data and direction; as in :func:`step_trials` the
    model is afterwards as it was. Takes one pass over the data for each strength and two more.

    Args:
        model: The model that was measured.
        loss_fn: As for :func:`summarize`.
        data: As for :func:`summarize`.
        summary: The measurement, of order 3.
        strengths: Values of ``lambda_int`` to try.
        diagonal: As for :func:`learning_rates`.
        partition: The groups of the summary, if it does not know them.
        direction: As it was given to :func:`summarize`.
        microbatch: As for :func:`summarize`.
        distributed: As for :func:`summarize`.

    Returns:
        The strengths with what they do. ``.lambda_int`` and ``.rates`` are those of the best.

    >>> import newton_summary as ns
    >>> _ = torch.manual_seed(0)
    >>> words, layers = nn.Embedding(10, 6), (nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 10))
    >>> model = nn.Sequential(words, nn.Flatten(), *layers).double()
    >>> data = torch.randint(10, (64, 4))
    >>> def loss_fn(model, batch):
    ...     return nn.functional.cross_entropy(model(batch), batch[:, 0])
    >>> summary = ns.summarize(model, loss_fn, data)
    >>> print(suggest_lambda_int(model, loss_fn, data, summary, strengths=(1, 10, 100, 1000)))
    lambda_int  negative rates  predicted change  real change
             1          1 of 5            -86.58        +2486
            10          1 of 5            -6.022       +19.09
           100          0 of 5            -1.319        -0.39  best
          1000          0 of 5           -0.4247      -0.3364
    The loss is 2.243; with lambda_int = 100 it falls most.
    """
    need_summary(summary)
    strengths = as_floats(strengths, "strengths")
    if not strengths:
        raise ValueError("There are no strengths to try: write some, strengths=(1, 10, 100).")
    groups = find_groups(model, summary, partition)
    found = [learning_rates(summary, strength, diagonal=diagonal) for strength in strengths]
    usable = [rates for rates in found if rates.ok]
    changes = iter(
        try_steps(
            model,
            loss_fn,
            data,
            summary,
            [rates.eta.detach().to("cpu", torch.float64) for rates in usable],
            groups,
            direction=direction,
            microbatch=microbatch,
            distributed=distributed,
        )
    )
    nothing = (math.nan, math.nan)
    tried = (TriedStrength(rates, *(next(changes) if rates.ok else nothing)) for rates in found)
    return Strengths(tuple(tried), float(summary.loss))
