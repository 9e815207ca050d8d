"""Choose ``lambda_int``: try the steps of several strengths to see which lowers the loss most.

With ``lambda_int = 1`` the cubic term is the third derivative of each group alone. Groups that move
together also have mixed third derivatives, which are not measured. Where these are many, as in a
transformer at its initialisation, the steps are too long, and a larger strength helps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from newton_summary.display.table import ShownAsTable
from newton_summary.measuring.trial_steps import as_floats, find_groups, try_steps
from newton_summary.parallel.processes import Distributed
from newton_summary.partition import Partition, Spec
from newton_summary.probe.directions import Direction
from newton_summary.probe.inputs import NumSamples
from newton_summary.probe.probe import LossFn
from newton_summary.solver import LearningRates, learning_rates
from newton_summary.summary import Summary, need_summary

STRENGTHS = tuple(10.0**k for k in range(9))
"""Tried by default: 1, 10, 100, ... 1e8."""


class TriedStrength(NamedTuple):
    """The learning rates of one ``lambda_int``, and the change of the loss by their full step.

    An entry of :attr:`Strengths.tried`:

    >>> from newton_summary import Summary
    >>> rates = learning_rates(Summary(gbar=torch.ones(1), Hbar=torch.eye(1)), lambda_int=0)
    >>> TriedStrength(rates, predicted=-0.5, real=-0.4).rates.eta
    tensor([1.])
    """

    rates: LearningRates
    predicted: float  # change of the loss by the second-order model; nan without usable rates
    real: float  # change of the loss of the same data; may be nan or infinite


@dataclass(frozen=True, eq=False)
class Strengths(ShownAsTable):
    """Strengths of the cubic term that were tried, made by :func:`suggest_lambda_int`.

    >>> from newton_summary import Summary
    >>> summary = Summary(gbar=torch.ones(1), Hbar=torch.eye(1), D3=torch.ones(1))
    >>> tried = [
    ...     TriedStrength(learning_rates(summary, lambda_int=1.0), predicted=-0.5, real=+0.3),
    ...     TriedStrength(learning_rates(summary, lambda_int=10.0), predicted=-0.3, real=-0.2),
    ... ]
    >>> Strengths(tuple(tried), loss=1.0).lambda_int
    10.0
    """

    _right = range(4)

    tried: tuple[TriedStrength, ...]
    loss: float  # where the steps start

    @property
    def best(self) -> TriedStrength:
        """The strength whose step lowers the loss most, or raises it least."""
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
            changes = [f"{x:+.4g}" if one.rates.ok else "-" for x in (one.predicted, one.real)]
            mark = one.rates.status if not one.rates.ok else "best" if one is self.best else ""
            rows.append([f"{one.rates.lambda_int:g}", negative, *changes, mark])
        return rows

    def _said(self) -> str:
        start = f"The loss is {self.loss:.4g}"
        if not any(one.rates.ok for one in self.tried):
            rates = self.best.rates
            return f"{start}, and no strength yields learning rates. {rates.status}: {rates.detail}"
        if not self.best.real < 0:
            return f"{start}, and no step lowers it. Try larger strengths, with strengths=..."
        said = f"{start}; lambda_int = {self.lambda_int:g} lowers it most."
        if len(self.tried) > 1 and self.best is max(self.tried, key=lambda o: o.rates.lambda_int):
            said += " That is the largest one tried: a larger one may be better still."
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
    num_samples: NumSamples | None = None,
    distributed: Distributed = "auto",
) -> Strengths:
    """Try the full step of several strengths of the cubic term, and find the best one.

    For summaries whose rates promise more than they deliver. Call it right after :func:`summarize`,
    with the same model, loss, data and direction; like :func:`step_trials` it restores the model.
    Takes one pass over the data for each strength, and two more.

    Args:
        model: The model that was measured.
        loss_fn: As for :func:`summarize`.
        data: As for :func:`summarize`.
        summary: The measurement, of order 3.
        strengths: Values of ``lambda_int`` to try.
        diagonal: As for :func:`learning_rates`.
        partition: The groups of the summary, if it has no partition.
        direction: The same as for :func:`summarize`.
        microbatch: As for :func:`summarize`.
        num_samples: As for :func:`summarize`.
        distributed: As for :func:`summarize`.

    Returns:
        The strengths with the changes of the loss; ``.lambda_int`` and ``.rates`` are the best.

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
    The loss is 2.243; lambda_int = 100 lowers it most.
    """
    need_summary(summary, "suggest_lambda_int")
    strengths = as_floats(strengths, "strengths")
    if not strengths:
        raise ValueError("There are no strengths to try: use for example strengths=(1, 10, 100).")
    if summary.D3 is None and any(strengths):
        raise ValueError("suggest_lambda_int needs D3: measure the summary with order=3.")
    groups = find_groups(model, summary, partition)
    found = [learning_rates(summary, strength, diagonal=diagonal) for strength in strengths]
    how: Any = {"direction": direction, "microbatch": microbatch}
    how |= {"num_samples": num_samples, "distributed": distributed}
    etas: list[torch.Tensor] = [rates.eta for rates in found if rates.ok]
    changes = iter(try_steps(model, loss_fn, data, summary, etas, groups, **how))
    nothing = (math.nan, math.nan)
    tried = (TriedStrength(rates, *(next(changes) if rates.ok else nothing)) for rates in found)
    return Strengths(tuple(tried), float(summary.loss))
