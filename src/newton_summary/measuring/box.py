"""The minimum of the cubic model of the loss inside a box: factors between two limits.

    T(c) = -c.g + 1/2 c.H c + strength/6 ||D c||^3,   low <= c_s <= high

A projected Newton method: entries at a limit that the slope pushes outwards are held; the others
take a Newton step with the absolute values of the curvature's eigenvalues, cut off at the limits
and halved until T falls. Where H is not positive definite T has several minima: it starts from
several points, and from the best minimum it tries to move each entry to either limit.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from newton_summary.solver import Array


@dataclass(frozen=True)
class CubicModel:
    """The model T of the change of the loss, in S factors.

    >>> model = CubicModel(g=np.array([1.0]), H=np.array([[2.0]]), D=np.zeros(1), strength=0.0)
    >>> float(model(np.array([0.5])))
    -0.25
    """

    g: Array  # (S,)
    H: Array  # (S, S)
    D: Array  # (S,)  |D3|^(1/3)
    strength: float

    def __call__(self, c: Array) -> Array:
        """Return T for factors (..., S)."""
        cubic = self.strength / 6 * np.linalg.norm(self.D * c, axis=-1) ** 3
        return np.asarray(cubic - c @ self.g + 0.5 * ((c @ self.H) * c).sum(-1))

    def slope(self, c: Array) -> Array:
        """Return the first derivative, (S,)."""
        radius = np.linalg.norm(self.D * c)
        return np.asarray(self.H @ c - self.g + self.strength / 2 * radius * self.D**2 * c)

    def curvature(self, c: Array) -> Array:
        """Return the second derivative, (S, S)."""
        radius, v = np.linalg.norm(self.D * c), self.D**2 * c
        if self.strength == 0 or radius == 0:
            return self.H
        bend = np.diag(radius * self.D**2) + np.outer(v, v) / radius
        return np.asarray(self.H + self.strength / 2 * bend)

    def tied(self, groups: Array) -> CubicModel:
        """Return the model in fewer factors x, with c = groups @ x; each row has a single one."""
        D = np.sqrt((groups * (self.D**2)[:, None]).sum(0))
        return CubicModel(groups.T @ self.g, groups.T @ self.H @ groups, D, self.strength)


def box_minimum(model: CubicModel, low: float, high: float, near: Array | None = None) -> Array:
    """Return the factors in [low, high] with the lowest value of the model, (S,).

    Args:
        model: The model.
        low: The lower limit, positive.
        high: The upper limit.
        near: Start here alone, for a model close to one that is solved.

    >>> H = np.array([[1.0, 0.9], [0.9, 1.0]])  # the free minimum is at (10, -8)
    >>> model = CubicModel(np.array([2.8, 1.0]), H, np.zeros(2), strength=0.0)
    >>> box_minimum(model, 0.1, 5.0).round(3).tolist()
    [2.71, 0.1]
    """
    S = len(model.g)
    if near is None:
        common = np.geomspace(low, high, 33)[:, None] * np.ones(S)
        newton = -absolute_newton(model.slope(np.zeros(S)), model.H)
        starts = [common[model(common).argmin()], np.ones(S), common[0], common[-1], newton]
    else:
        starts = [near]
    best = min((_descend(model, c.clip(low, high), low, high) for c in starts), key=model)
    for _ in range(2 * S if near is None else 1):
        moved = np.concatenate([_each(best, low), _each(best, high)])
        values = model(moved)
        if not values.min() < model(best) - 1e-12 * np.abs(values).max():
            break
        best = _descend(model, moved[values.argmin()], low, high)
    return best


def _descend(model: CubicModel, c: Array, low: float, high: float) -> Array:
    def lower(step: Array, halvings: int) -> Array | None:
        """Return the first of c - step, c - step/2, ... inside the box that is lower, or None."""
        points = ((c - 0.5**k * step).clip(low, high) for k in range(halvings))
        return next((point for point in points if model(point) < value), None)

    for _ in range(100):
        slope, curvature, value = model.slope(c), model.curvature(c), model(c)
        free = ~(((c <= low) & (slope > 0)) | ((c >= high) & (slope < 0)))
        if not free.any():
            break
        size = np.abs(np.diag(curvature))
        plain = np.where(free, slope / np.where(size > 0, size, size.max() or 1.0), 0)
        newton = np.zeros_like(c)
        newton[free] = absolute_newton(slope[free], curvature[np.ix_(free, free)])
        found = lower(newton, 8)
        if found is None:
            found = lower(plain, 40)
        if found is None or np.abs(found - c).max() <= 1e-12 * high:
            break
        c = found
    return c


def absolute_newton(slope: Array, curvature: Array, floor: float = 1e-10) -> Array:
    """Return |curvature|^-1 slope, in units in which the diagonal of the curvature is one.

    Eigenvalues below ``floor`` times the largest count as that.
    """
    unit = np.sqrt(np.abs(np.diag(curvature)))
    unit = np.where(unit > 0, unit, unit.max() or 1.0)
    e, V = np.linalg.eigh(curvature / unit[:, None] / unit)
    size = np.abs(e)
    size = np.maximum(size, floor * size.max()) if size.any() else np.ones_like(e)
    return np.asarray(V @ ((V.T @ (slope / unit)) / size) / unit)


def _each(c: Array, value: float) -> Array:
    """Return copies of c with one entry replaced, (S, S)."""
    copies = np.tile(c, (len(c), 1))
    np.fill_diagonal(copies, value)
    return copies
