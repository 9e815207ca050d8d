"""From the summaries of a training to its rates: averages, the cubic model, safeguards."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from newton_summary.partition import Partition
from newton_summary.solver import LearningRates, learning_rates
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


# --- rates ----------------------------------------------------------------------------------------


def solve(
    summary: Summary,
    lambda_int: float,
    *,
    diagonal: bool = False,
    ridge: float = 0.0,
    shorten: bool = False,
) -> LearningRates:
    """Return the minimum of the cubic model, with negative entries.

    Args:
        summary: The averaged summary.
        lambda_int: Strength of the cubic term.
        diagonal: Leave out the interactions between groups (App. K).
        ridge: Fraction of its own absolute value to add to each diagonal entry of Hbar.
        shorten: Whether to shorten rates that are too large without the negative ones.
    """
    summary = _with_ridge(summary, ridge)
    rates = learning_rates(summary, lambda_int, diagonal=diagonal)
    if rates.ok and not bool((rates.eta > 0).any()):
        return replace(rates, status="no-positive-rate")
    if rates.ok and shorten and bool((rates.eta < 0).any()):
        return _shortened(rates, summary)
    return rates


def solve_common(rates: LearningRates, summary: Summary, ridge: float = 0.0) -> LearningRates:
    """Return one rate for all groups, where separate ones have no minimum.

    Along the direction as a whole the model is a function of one number, bounded below once the
    curvature is taken by its absolute value.

    Args:
        rates: What :func:`solve` found.
        summary: The averaged summary.
        ridge: As for :func:`solve`.
    """
    every = torch.ones(len(summary), dtype=torch.float64)
    a, b, c = _along(every, _with_ridge(summary, ridge), rates)
    t = _lowest(a, abs(b), c)
    if not (a > 0 and math.isfinite(t)):
        return rates
    return replace(rates, eta=t * every, status="common-rate", escaping=())


def limit(eta: Tensor, lrs: Tensor, norms: Tensor, weight_norms: Tensor, max_step: float) -> Tensor:
    """Shorten rates so that no group moves by more than a fraction of the norm of its weights.

    A group without weights, or whose weights are zero as yet, moves by no more than a group with
    weights of median norm may. Small weights count as a tenth of that at least: else what has
    started near zero would stay there.

    Args:
        eta: The rates, (S,), none of them negative.
        lrs: The factors on them, (S,).
        norms: Of each group's direction, (S,).
        weight_norms: Of each group's weights, (S,).
        max_step: The fraction.
    """
    has_weights = weight_norms > 0
    if not bool(has_weights.any()):
        return eta
    median = weight_norms[has_weights].median()
    sizes = torch.where(has_weights, weight_norms.clamp_min(median / 10), median)
    return eta * (max_step * sizes / (lrs * eta * norms)).nan_to_num(1.0).clamp_max(1)


def _with_ridge(summary: Summary, ridge: float) -> Summary:
    H = summary.hessian()
    return replace(summary, Hbar=H + ridge * H.diagonal().abs().diag()) if ridge else summary


def _shortened(rates: LearningRates, summary: Summary) -> LearningRates:
    """Shorten rates that are too large without the negative ones that they came with.

    Groups that act alike come out with large rates of opposite sign. Cut to zero, the negative ones
    no longer hold the others back. Where the model rises along the others, its minimum is taken.
    """
    eta = rates.eta.double().clamp_min(0)
    a, b, c = _along(eta, summary, rates)
    if -a + b / 2 + c / 3 < 0:
        return rates
    if a <= 0 or not math.isfinite(b + c):
        return replace(rates, status="no-positive-rate")
    return replace(rates, eta=(_lowest(a, b, c) * eta).to(rates.eta), status="shortened")


def _along(eta: Tensor, summary: Summary, rates: LearningRates) -> tuple[float, float, float]:
    """Return a, b, c of the model along t eta, T(t) = -a t + b t^2 / 2 + c t^3 / 3."""
    H = summary.hessian().double()
    H = H.diagonal().diag() if rates.diagonal else H
    c = 0.0
    if summary.D3 is not None and rates.lambda_int > 0:
        D = summary.D3.double().abs() ** (1 / 3)
        c = rates.lambda_int / 2 * float((D * eta).norm()) ** 3
    return float(eta @ summary.gbar.double()), float(eta @ H @ eta), c


def _lowest(a: float, b: float, c: float) -> float:
    """Return where -a t + b t^2 / 2 + c t^3 / 3 is lowest for t > 0, if a > 0 and b or c is."""
    below = b + math.sqrt(b * b + 4 * a * c) if a * c >= 0 else math.nan
    return 2 * a / below if below else math.inf
