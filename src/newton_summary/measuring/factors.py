"""Factors for the steps of groups, from a summary along these steps, with their noise.

Groups are solved for jointly (``box``). Errors come from halves of the batches: the spread of the
solutions of random halves is that of the mean, and each half is judged by the other one. Groups
whose own factor is noise share one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from newton_summary.measuring.box import CubicModel, box_minimum
from newton_summary.solver import Array, arrays_of
from newton_summary.summary import Summary

Verdict = Literal["raise", "lower", "keep", "noise", "refuted", "not yet", "no effect", "no step"]

NEAR = 1.25  # a rate within this factor of the best one is right
HALVES = 24  # random halves of the batches
NO_EFFECT = 1e-6  # of the largest change of the predicted loss by one group inside the limits


@dataclass(frozen=True)
class Estimate:
    """A factor, its standard error if there are several batches, and what that means."""

    factor: float
    stderr: float | None

    @property
    def verdict(self) -> Verdict:
        """Whether to raise the rate, lower or keep it, with two standard errors on either side."""
        margin = 0.0 if self.stderr is None else 2 * self.stderr
        if not math.isfinite(self.factor + margin):
            return "noise"
        if self.factor - margin < 1 / NEAR and self.factor + margin > NEAR:
            return "noise"
        if abs(self.factor - 1) <= max(margin, NEAR - 1):
            return "keep"
        return "raise" if self.factor > 1 else "lower"


@dataclass(frozen=True)
class Factors:
    """Factors of all groups.

    Attributes:
        own: Each group's own factor.
        tied: Groups that are too noisy one by one, (S,).
        together: Their common factor; None if there is at most one such group.
        changes: The factors to take, (S,): 1 where the present rate is right.
        within_noise: Whether no change is suggested because the gain is within its error.
    """

    own: tuple[Estimate, ...]
    tied: NDArray[np.bool_]
    together: Estimate | None
    changes: Array
    within_noise: bool = False


class FactorModel:
    """The model of the loss in the factors of the groups that have an effect on it.

    Args:
        summary: Measured along the steps, so that 1 is the present rate.
        live: Which groups can be judged, (S,); the others keep their step.
        strength: Of the cubic term.
        limits: The smallest and the largest factor.
        diagonal: Leave out the interactions between groups.
    """

    def __init__(
        self,
        summary: Summary,
        live: NDArray[np.bool_],
        strength: float,
        limits: tuple[float, float],
        diagonal: bool = False,
    ):
        self.live, self.limits = live, limits
        self.mean = _model(summary, live, strength, diagonal)
        self.parts = [_model(part, live, strength, diagonal) for part in summary.parts]
        self.weights = np.array([float(part.num_samples) for part in summary.parts])

    def minimum(self) -> Array:
        """Return the factors of all groups, (S,)."""
        return self._all(box_minimum(self.mean, *self.limits))

    def change(self, factors: Array) -> float:
        """Return the predicted change of the loss by a step with these factors of all groups."""
        return float(self.mean(factors[self.live]))

    def factors(self, fraction: float = 1.0) -> Factors:
        """Return the factors with their errors, and what to take."""
        count, low, high = int(self.live.sum()), *self.limits
        if not count:
            none = np.zeros(len(self.live), dtype=bool)
            return Factors(self._everyone([]), none, None, np.ones(len(self.live)))
        limits = (low / fraction, high / fraction)  # of the best factors, before the fraction
        estimates, _ = self._solve(np.eye(count), limits)
        tied = np.array([e.verdict == "noise" for e in estimates]) & (count > 1)
        groups = _ties(tied)
        chosen, separate = self._solve(groups, limits)
        if count > 1 and len(self.parts) > 1:
            shared, common = self._solve(np.ones((count, 1)), limits)
            if separate > common + 0.01 * abs(common):
                tied[:] = True  # one factor for all is better for batches that it has not seen
                groups, chosen = _ties(tied), shared
        steps = [fraction * e.factor if e.verdict in ("raise", "lower") else 1.0 for e in chosen]
        changes = groups @ np.array(steps)
        noisy = (changes != 1).any() and not self._lowers(changes)
        return Factors(
            own=self._everyone(estimates),
            tied=self._all(tied.astype(np.float64), 0.0) > 0,
            together=chosen[-1] if tied.sum() > 1 else None,
            changes=self._all(np.ones(count) if noisy else changes),
            within_noise=bool(noisy),
        )

    def _solve(self, groups: Array, limits: tuple[float, float]) -> tuple[list[Estimate], float]:
        """Return the best factors of groups that are tied, with their standard errors.

        Also the mean change that factors of one half of the batches predict for the other half.
        """
        x = box_minimum(self.mean.tied(groups), *limits)
        count, size = len(self.parts), len(self.parts) // 2
        if count < 2:
            return [Estimate(factor, None) for factor in x.tolist()], math.nan
        draw = np.random.default_rng(0)
        found, gains = [], []
        for order in sorted({tuple(draw.permutation(count)) for _ in range(HALVES)}):
            half, rest = self._average(order[:size]), self._average(order[size:])
            found.append(box_minimum(half.tied(groups), *limits, near=x))
            gains.append(float(rest(groups @ found[-1])))
        errors = math.sqrt(size / (count - size)) * np.std(found, axis=0)
        return [Estimate(*pair) for pair in zip(x.tolist(), errors.tolist())], float(np.mean(gains))

    def _average(self, chosen: Sequence[int]) -> CubicModel:
        """Return the model of some batches: the mean of everything but D, which is that of all."""
        w = self.weights[list(chosen)] / self.weights[list(chosen)].sum()
        parts = [self.parts[i] for i in chosen]
        g = sum(a * part.g for a, part in zip(w, parts, strict=True))
        H = sum(a * part.H for a, part in zip(w, parts, strict=True))
        return replace(self.mean, g=g, H=H)

    def _lowers(self, changes: Array) -> bool:
        """Return whether the model falls by more than two standard errors, compared with now."""
        ones = np.ones_like(changes)
        gain = float(self.mean(changes) - self.mean(ones))
        if len(self.parts) < 2:
            return gain < 0
        gains = np.array([float(part(changes) - part(ones)) for part in self.parts])
        w = self.weights / self.weights.sum()
        count = len(gains)
        error = math.sqrt(count / (count - 1) * float((w**2 * (gains - w @ gains) ** 2).sum()))
        return gain < -2 * error

    def _all(self, values: Array, other: float = 1.0) -> Array:
        """Return values of the live groups as those of all groups."""
        every = np.full(len(self.live), other)
        every[self.live] = values
        return every

    def _everyone(self, estimates: Sequence[Estimate]) -> tuple[Estimate, ...]:
        found = iter(estimates)
        return tuple(next(found) if live else Estimate(1.0, None) for live in self.live)


def has_effect(summary: Summary, max_change: float) -> NDArray[np.bool_]:
    """Return the groups whose own slope or curvature matters inside the limits, (S,).

    Not those of a bias before a batch norm, or of the factor of a fresh LoRA adapter whose partner
    is zero: their factor is arbitrary, and solving for it would spoil the others.
    """
    g, H, _ = arrays_of(summary)
    size = np.abs(g) * max_change + 0.5 * np.abs(np.diag(H)) * max_change**2
    return np.asarray(size > NO_EFFECT * size.max())


def _model(
    summary: Summary, live: NDArray[np.bool_], strength: float, diagonal: bool
) -> CubicModel:
    g, H, D3 = arrays_of(summary, diagonal)
    D = np.zeros_like(g) if D3 is None else np.cbrt(np.abs(D3))
    g = g - H[:, ~live].sum(1)  # of the groups that keep their step
    return CubicModel(g[live], H[np.ix_(live, live)], D[live], strength)


def _ties(tied: NDArray[np.bool_]) -> Array:
    """Return the matrix from the factors of free groups, and a last one for the tied, to all."""
    free = np.eye(len(tied))[:, ~tied]
    return np.column_stack([free, tied.astype(float)]) if tied.any() else free
