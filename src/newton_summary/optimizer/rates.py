"""From an averaged summary to rates: the minimum of the cubic model, and safeguards."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from newton_summary.solver import LearningRates, learning_rates
from newton_summary.summary import Summary


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
