"""From an averaged summary to the rates that are used: Algorithm 2's rules, and safeguards."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from newton_summary.optimizer.checks import check_number
from newton_summary.solver import LearningRates, learning_rates
from newton_summary.summary import Summary


@dataclass(frozen=True)
class RateRules:
    """How rates follow from a summary and from the rates before.

    What is said of rates holds for step lengths where the summary is normalised. See
    :class:`~newton_summary.NewtonSummary` for the meaning of each field.
    """

    lambda_int: float = 1.0
    diagonal: bool = False
    negative: str = "cut"
    eta_momentum: float = 0.0
    eta_average: bool = False
    ridge: float = 0.0
    max_eta: float | None = None
    max_growth: float | None = None
    keep_last_good: bool = True
    shorten: bool = True

    def __post_init__(self) -> None:
        """Check the values."""
        check_number(
            0 <= self.lambda_int < math.inf, "lambda_int", self.lambda_int, "0 or more, finite"
        )
        check_number(
            0 <= self.eta_momentum < 1, "eta_momentum", self.eta_momentum, "0 or more, below 1"
        )
        check_number(0 <= self.ridge < math.inf, "ridge", self.ridge, "0 or more, finite")
        check_number(self.max_eta is None or self.max_eta > 0, "max_eta", self.max_eta, "above 0")
        check_number(
            self.max_growth is None or self.max_growth > 1, "max_growth", self.max_growth, "above 1"
        )
        if self.negative not in ("cut", "drop"):
            raise ValueError(f"negative={self.negative!r}: write 'cut' or 'drop'.")

    def solve(self, summary: Summary) -> LearningRates:
        """Return the minimum of the model, with negative entries unless these groups are dropped.

        A status that is not usable, or ``"no-positive-rate"``, says that there is nothing to use.
        """
        H = summary.hessian()
        if self.ridge:
            summary = replace(summary, Hbar=H + self.ridge * H.diagonal().abs().diag())
        if self.negative == "drop":
            rates = self._solve_without_negative(summary)
        else:
            rates = learning_rates(summary, self.lambda_int, diagonal=self.diagonal)
        if rates.ok and not bool((rates.eta > 0).any()):
            rates = replace(rates, status="no-positive-rate")
        if rates.ok and self.shorten and bool((rates.eta < 0).any()):
            rates = self._shortened(rates, summary)
        return rates

    def _shortened(self, rates: LearningRates, summary: Summary) -> LearningRates:
        """Shorten rates that are too large without the negative ones that they came with.

        Groups that act alike come out with large rates of opposite sign. Cut to zero, the negative
        ones no longer hold the others back. Along t eta_+ the model is
        T(t) = -a t + b t^2 / 2 + c t^3 / 3; where it rises at t = 1, its minimum is taken.
        """
        eta = rates.eta.double().clamp_min(0)
        H = summary.hessian().double()
        H = H.diagonal().diag() if self.diagonal else H
        a, b = float(eta @ summary.gbar.double()), float(eta @ H @ eta)
        c = 0.0
        if summary.D3 is not None and self.lambda_int > 0:
            D = summary.D3.double().abs() ** (1 / 3)
            c = self.lambda_int / 2 * float((D * eta).norm()) ** 3
        if -a + b / 2 + c / 3 < 0:
            return rates
        if a <= 0 or not math.isfinite(b + c):
            return replace(rates, status="no-positive-rate")
        t = 2 * a / (b + math.sqrt(b * b + 4 * a * c))  # T rises at 1, so b or c is positive
        return replace(rates, eta=(t * eta).to(rates.eta), status="shortened")

    def _solve_without_negative(self, summary: Summary) -> LearningRates:
        """Solve again without the groups whose rate is negative, until there are none."""
        every = torch.arange(len(summary))
        kept = every
        while True:
            rates = learning_rates(_part(summary, kept), self.lambda_int, diagonal=self.diagonal)
            negative = rates.eta < 0
            if not rates.ok or not bool(negative.any()) or bool(negative.all()):
                break
            kept = kept[~negative]
        eta = torch.zeros(len(summary), dtype=rates.eta.dtype)
        eta[kept] = rates.eta
        return replace(rates, eta=eta, names=summary.names)

    def usable(self, rates: LearningRates) -> bool:
        """Whether to take over these rates, or to keep the last good ones.

        Algorithm 2 itself takes any finite solution: saddle points if lambda_int = 0, and a step of
        length zero if every rate was negative.
        """
        if self.keep_last_good:
            return rates.ok
        return bool(torch.isfinite(rates.eta).all())

    def follow(self, rates: LearningRates, last: Tensor | None, peak: Tensor | None) -> Tensor:
        """Return the rates to be used, (S,): none of them negative.

        Args:
            rates: The solution, with negative entries.
            last: The rates in use until now; None at the first refresh.
            peak: For each group the last rate above zero; None at the first refresh.
        """
        eta = rates.eta.clamp_min(0)
        if last is not None:
            mu = self.eta_momentum
            eta = mu * last + ((1 - mu) * eta if self.eta_average else eta)
        if self.max_growth is not None and peak is not None:
            limit = torch.where(peak > 0, self.max_growth * peak, math.inf)
            eta = torch.minimum(eta, limit)
        return eta if self.max_eta is None else eta.clamp_max(self.max_eta)


def _part(summary: Summary, kept: Tensor) -> Summary:
    return Summary(
        gbar=summary.gbar[kept],
        Hbar=summary.hessian()[kept][:, kept],
        D3=None if summary.D3 is None else summary.D3[kept],
    )
