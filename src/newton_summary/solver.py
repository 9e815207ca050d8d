"""Learning rates from a summary: the minimum of the cubic model (paper, Section 5 and App. D).

    T(eta) = -eta.gbar + 1/2 eta.Hbar eta + lambda_int/6 ||D eta||^3,   D = Diag(|D3|^(1/3))

With M(sigma) = Hbar + sigma D^2, the global minimum is the solution of M(sigma) eta = gbar with
sigma = lambda_int/2 ||D eta|| and M(sigma) positive semi-definite: one unknown number, sigma.

The paper diagonalises D^-1 Hbar D^-1, which needs every d_s > 0, and where the d_s / sqrt(Hbar_ss)
differ by much the large entries drown the small ones. Here the origin is first moved to a sigma0
near the answer. With M(sigma0) = L L^T and the singular value decomposition L^-1 D = Q Diag(w) R^T,

    M(sigma) = L Q Diag(1 + (sigma - sigma0) w^2) Q^T L^T,

which allows d_s = 0 (then w = 0) and is as exact as Cholesky's method, whatever the groups' scales.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from newton_summary.display.names import first_names
from newton_summary.display.table import ShownAsTable
from newton_summary.summary import Summary, need_summary

Array = NDArray[np.float64]

STATUS = {
    "minimum": "The minimum of the cubic model.",
    "newton": "The minimum of the quadratic model, Newton's step: there is no cubic term.",
    "flat": "A minimum, but not the only one: groups without a cubic term can move against each "
    "other without changing the model of the loss. This is the nearest one. A coarser partition "
    "would merge such groups.",
    "hard-case": "One of two equally low minima: gbar does not say which way to go along the "
    "direction of most negative curvature. This is the one with more positive rates.",
    "saddle": "Hbar^-1 gbar, a saddle point rather than a minimum: Hbar is not positive definite, "
    "and there is no cubic term.",
    "no-minimum": "The model of the loss has no minimum: it is unbounded below along groups "
    "without a cubic term. The rates are nan.",
    "overflow": "The minimum is too far away for the floating-point type: the cubic term is close "
    "to zero where Hbar is not positive definite. The rates are nan. Use a larger lambda_int.",
    "not-finite": "The summary has non-finite entries, so the rates are nan. Check the loss, and "
    "the direction it was measured along.",
    # Only trials give these two:
    "cut": "The step raised the loss when it was tried, so all rates were scaled by one factor, to "
    "where the loss is lowest.",
    "absolute": "The model of the loss has no minimum, so these are the rates with the absolute "
    "values of Hbar's eigenvalues, scaled by one factor to where the loss is lowest.",
    # The optimizer alone gives these two; it does not use negative rates:
    "no-positive-rate": "Every rate is negative or zero: according to this measurement, the loss "
    "rises along the direction. Measure on larger batches, or average over more of them.",
    "steered": "The rate that many measurements have steered to.",
}
"""What each ``LearningRates.status`` means; :func:`explain` adds what to do about it."""

USABLE = ("minimum", "newton", "flat", "hard-case", "cut", "absolute", "steered")

_EPS = float(np.finfo(np.float64).eps)
_SMALLEST = 2.0**-899  # of the shifts


TRIED = "rates tried on the data: learning_rates(summary, model=model, loss_fn=loss_fn, data=data)"


@dataclass(frozen=True, eq=False)
class LearningRates(ShownAsTable):
    """One learning rate per group, for the step ``theta - U I_{P:S} eta``.

    Made by :func:`learning_rates`; ``print`` it for a table.

    >>> from newton_summary import Summary
    >>> g, H = torch.tensor([2.0, 1.0]), torch.tensor([[4.0, 0.0], [0.0, -1.0]])
    >>> rates = learning_rates(Summary(gbar=g, Hbar=H), lambda_int=0)
    >>> rates.ok, rates.status, rates.eta
    (False, 'saddle', tensor([ 0.5000, -1.0000]))
    """

    _right = (1, 2)

    eta: Tensor  # (S,)  dtype (float32 at least) and device of gbar
    radius: float  # ||D eta||; nan where D3 was not measured
    status: str  # a key of STATUS
    names: tuple[str, ...] = ()  # of the groups, where the summary has a partition
    lambda_int: float = 1.0
    diagonal: bool = False
    model_change: float = math.nan  # -eta.gbar + 1/2 eta.Hbar eta, with all of Hbar
    eta_stderr: Tensor | None = None  # (S,)  over batches, if the summary was measured with stderr
    escaping: tuple[int, ...] = ()  # with "no-minimum": groups along which the model falls
    loss: float = math.nan  # where the step starts, if known
    no_cubic: bool = False  # D3 is 0 in all groups, so lambda_int has no effect
    no_effect: tuple[int, ...] = ()  # groups without slope and curvature; their rate is 0
    real_change: float = math.nan  # of the loss of the data by this step; nan if it was not tried

    @property
    def ok(self) -> bool:
        """Whether ``eta`` minimises the model."""
        return self.status in USABLE

    @property
    def detail(self) -> str:
        """What the status means and what to do about it, with the groups concerned."""
        return self.detailed()

    def detailed(self, instead: str = TRIED) -> str:
        """Return the same, recommending something else in place of such rates."""
        given = (self.status, self.lambda_int, self.no_cubic, self._named(self.no_effect))
        text = explain(*given, instead)
        return f"{text} It falls along {self._named(self.escaping)}." if self.escaping else text

    def _named(self, groups: Sequence[int]) -> str:
        if self.names:
            return first_names([self.names[s] for s in groups], most=5)
        return ", ".join(f"group {s}" for s in groups)

    @property
    def refuted(self) -> bool:
        """Whether the step was tried and raised the loss."""
        return self.real_change > 0

    @property
    def doubt(self) -> str:
        """Why not to trust this step: it was refuted, or promises too much; empty if neither."""
        if self.refuted:
            return refutation(self.model_change, self.real_change)
        return "" if self.real_change < 0 else doubt_of(self.model_change, self.loss)

    def _rows(self) -> list[list[str]]:
        rates = self.eta.detach().double().cpu().tolist()
        names = self.names or tuple(str(s) for s in range(len(rates)))
        rows = [["group", "learning rate"], *([n, f"{r:+.4e}"] for n, r in zip(names, rates))]
        if self.eta_stderr is not None:
            errors = self.eta_stderr.detach().double().cpu().tolist()
            rows = [[*row, cell] for row, cell in zip(rows, ["±", *(f"{e:.1e}" for e in errors)])]
        return rows

    def _said(self) -> str:
        how = f"lambda_int = {self.lambda_int:g}" + (", diagonal of Hbar" if self.diagonal else "")
        said = (
            f"{how}, radius {self.radius:.4g}, predicted change of the loss, to second order, "
            f"{self.model_change:+.4g}"
        )
        if not math.isnan(self.real_change):
            said += f"; tried: {self.real_change:+.4g}"
        said += f"\n{self.status}: {self.detail}"
        return f"{said}\n{self.doubt}" if self.doubt else said


def learning_rates(
    summary: Summary, lambda_int: float = 1.0, *, diagonal: bool = False
) -> LearningRates:
    """Minimise the cubic model: ``newton_summary.learning_rates`` without trials.

    Takes O(S^3) operations, in float64 on the CPU. Multiplying ``u`` of a group by a divides its
    rate by a, to the last bit if a is a power of two.
    """
    need_summary(summary, "learning_rates")
    lambda_int = check_strength(lambda_int)
    g, H, D3 = _checked(summary, lambda_int)
    dtype = torch.promote_types(torch.float32, summary.gbar.dtype)
    D = np.full_like(g, math.nan) if D3 is None else np.cbrt(np.abs(D3))
    eta, status = np.full_like(g, math.nan), "not-finite"
    escaping: tuple[int, ...] = ()
    no_effect: tuple[int, ...] = ()
    with np.errstate(all="ignore"), _one_thread():
        if all(np.isfinite(x).all() for x in (g, H, D3) if x is not None):
            model_H = np.diag(np.diag(H)) if diagonal else H
            model_D = D if lambda_int > 0 else np.zeros_like(g)
            idle = (g == 0) & (model_D == 0) & ~model_H.any(axis=1)  # the model has no such group
            eta, status = _minimise(g, model_H, model_D, lambda_int, idle)
            if status == "no-minimum":
                escaping = _escaping(g, model_H, free=model_D == 0)
            no_effect = tuple(np.flatnonzero(idle).tolist())
        rates = torch.from_numpy(eta).to(dtype)
        if status not in ("no-minimum", "not-finite") and not np.isfinite(rates.numpy()).all():
            eta, status = np.full_like(g, math.nan), "overflow"
            rates = torch.full_like(rates, math.nan)
        radius, change = math.hypot(*(D * eta)), float(eta @ (0.5 * (H @ eta) - g))
    return LearningRates(
        eta=rates.to(summary.gbar.device),
        radius=radius,
        status=status,
        names=() if summary.partition is None else summary.names,
        lambda_int=lambda_int,
        diagonal=diagonal,
        model_change=change,
        eta_stderr=_jackknife(summary, lambda_int, diagonal),
        escaping=escaping,
        loss=float(summary.loss),
        no_cubic=D3 is not None and not D3.any(),
        no_effect=no_effect,
    )


def explain(
    status: str,
    lambda_int: float,
    no_cubic: bool = False,
    no_effect: str = "",
    instead: str = TRIED,
) -> str:
    """Return what a status means and what to do about it.

    ``no_cubic`` says that D3 is 0 in all groups, ``no_effect`` names groups without slope and
    curvature, ``instead`` what to use in place of such rates.
    """
    text = STATUS[status]
    if status == "flat" and no_effect:
        text = "A minimum."
    if no_effect:
        text += f" {flatness(no_effect)}"
    if status not in ("saddle", "no-minimum"):
        return text
    if no_cubic:
        like = "" if no_effect else ", as with ReLU and squared error"
        return (
            f"{text} D3 is 0 in all groups{like}, so lambda_int has no effect. Use a coarser "
            f"partition, such as 'trivial', or {instead}."
        )
    if lambda_int == 0:
        return f"{text} Use lambda_int > 0, with a summary of order 3."
    return (
        f"{text} Merge the groups with D3 = 0 into others, freeze those the loss does not depend "
        f"on, or use {instead}."
    )


def flatness(names: str) -> str:
    """Return what to say about groups without slope and curvature."""
    return (
        f"No slope or curvature here: {names} (such as a bias before a batch norm, a LoRA factor "
        "whose partner is zero, or a layer before an output layer that starts at zero)."
    )


def refutation(predicted: float, real: float) -> str:
    """Return what to say about a step that was tried and raised the loss."""
    return (
        f"Refuted: a step with these rates should change the loss by {predicted:+.3g}, but "
        f"changed it by {real:+.3g}."
    )


def doubt_of(change: float, loss: float) -> str:
    """Return what to do about a step that promises more than the whole loss; else nothing."""
    if not -change > loss > 0:
        return ""
    return (
        f"The step promises more than the whole loss of {loss:.4g}: unless this loss can be "
        "negative, the model does not hold that far. For rates tried on the data, use "
        "learning_rates(summary, model=model, loss_fn=loss_fn, data=data), with direction=... if "
        "the summary was measured along another one."
    )


def check_strength(lambda_int: float | str) -> float:
    """Return a strength of the cubic term as a number; raise if it is not one."""
    try:
        number = math.nan if isinstance(lambda_int, str) else float(lambda_int)
    except (TypeError, ValueError, RuntimeError):
        number = math.nan
    if not 0 <= number < math.inf:
        raise ValueError(f"lambda_int={lambda_int!r}: expected a finite number, 0 or more.")
    return number


def _jackknife(summary: Summary, lambda_int: float, diagonal: bool) -> Tensor | None:
    """Return the standard error of the rates, from leaving out one batch at a time, (S,)."""
    parts = summary.parts
    if len(parts) < 2:
        return None
    etas = []
    for i in range(len(parts)):
        rest = [*parts[:i], *parts[i + 1 :]]
        mean = Summary.mean(rest, [part.num_samples or 1 for part in rest])
        etas.append(learning_rates(mean, lambda_int, diagonal=diagonal).eta)
    left_out = torch.stack(etas)
    gaps = left_out - left_out.mean(0)
    return ((len(parts) - 1) / len(parts) * gaps.square().sum(0)).sqrt()


def arrays_of(summary: Summary, diagonal: bool = False) -> tuple[Array, Array, Array | None]:
    """Return gbar, the symmetric part of Hbar, or its diagonal alone, and D3 as arrays."""
    g, H = _array(summary.gbar), _array(summary.hessian())
    D3 = None if summary.D3 is None else _array(summary.D3)
    return g, np.diag(np.diag(H)) if diagonal else H / 2 + H.T / 2, D3


def _array(tensor: Tensor) -> Array:
    return tensor.detach().to("cpu", torch.float64).numpy()


def _checked(summary: Summary, lambda_int: float) -> tuple[Array, Array, Array | None]:
    """Return gbar, the symmetric part of Hbar, and D3 as arrays; raise on wrong use."""
    if summary.Hbar is None:
        raise ValueError("learning_rates needs Hbar: measure the summary with order=2 or order=3.")
    if summary.D3 is None and lambda_int > 0:
        raise ValueError(
            f"The summary has no D3, which lambda_int={lambda_int:g} needs: measure it with "
            f"order=3, or use lambda_int=0."
        )
    if not len(summary):
        raise ValueError("gbar has shape (0,): expected a vector with one entry per group.")
    return arrays_of(summary)


def _minimise(
    g: Array, H: Array, D: Array, lambda_int: float, idle: NDArray[np.bool_]
) -> tuple[Array, str]:
    """Return the minimum of the cubic model and its status; nan where there is none.

    The model does not depend on the groups that are ``idle``.
    """
    nowhere = np.full_like(g, math.nan)
    if idle.any():
        eta, rest, status = np.zeros_like(g), ~idle, "minimum"
        if rest.any():
            left = g[rest], H[np.ix_(rest, rest)], D[rest]
            eta[rest], status = _minimise(*left, lambda_int, idle[rest])
        status = "flat" if status in ("minimum", "newton") else status
        return eta if np.isfinite(eta).all() else nowhere, status
    try:
        kind, H = _without_flat(g, H, free=D == 0)
        if kind == "unbounded" or (kind == "indefinite" and D.any()):
            return nowhere, "no-minimum"
        if D.any():
            eta, status = _cubic(g, H, D, lambda_int)
            return eta, "flat" if (status, kind) == ("minimum", "flat") else status
        c = _scale(g, H)
        eta = _linalg("solve", H / c[:, None] / c, g / c)[0] / c
    except np.linalg.LinAlgError:  # inf or nan inside: entries near the ends of float64
        return nowhere, "overflow"
    return eta, {"definite": "newton", "flat": "flat", "indefinite": "saddle"}[kind]


def _scale(g: Array, H: Array) -> Array:
    """Return a scale c for every group: Hbar_st / (c_s c_t) does not depend on units (App. E)."""
    c = np.sqrt(np.abs(np.diag(H)))
    coupling = np.max(np.where(c > 0, np.abs(H) / np.where(c > 0, c, 1), 0), axis=1)
    for other in (coupling, np.abs(g), np.ones_like(g)):
        c = np.where(c > 0, c, other)
    return c


def _without_flat(g: Array, H: Array, free: NDArray[np.bool_]) -> tuple[str, Array]:
    """Classify Hbar on the groups without cubic term, and fill its null space there.

    A null vector z of that block leaves the model unbounded, unless gbar and the coupling to the
    other groups are orthogonal to it. Then z matters to nothing, and curvature added along z makes
    the block regular and the component of the solution along z zero.

    Returns:
        "definite", "flat" (positive semi-definite, filled), "indefinite" (filled where needed) or
        "unbounded", and Hbar.
    """
    if not free.any():
        return "definite", H
    H = H.copy()
    block, c, e, V, x, tolerance = _free_block(g, H, free)
    null = np.abs(e) <= tolerance
    if null.any():
        Z = V[:, null]
        rounding = 1e-10 * np.abs(Z).T @ np.abs(x) + tolerance * np.linalg.norm(x, axis=0)
        if (np.abs(Z.T @ x) > rounding).any():
            return "unbounded", H
        H[np.ix_(free, free)] += (c[:, None] * Z) @ (c[:, None] * Z).T
    if (np.diag(block) <= 0).any() or (e < -tolerance).any():
        return "indefinite", H
    return "flat" if null.any() else "definite", H


def _free_block(
    g: Array, H: Array, free: NDArray[np.bool_]
) -> tuple[Array, Array, Array, Array, Array, float]:
    """Return Hbar on the groups without cubic term, with what classifies it.

    That is their scale c, eigenvalues and eigenvectors of the scaled block, what pulls along its
    null vectors (gbar and the coupling to the other groups), and what counts as zero.
    """
    block = H[np.ix_(free, free)]
    c = _scale(g[free], block)
    e, V = _linalg("eigh", block / c[:, None] / c)
    x = np.column_stack([g[free], H[np.ix_(free, ~free)]]) / c[:, None]
    return block, c, e, V, x, 8 * len(e) * _EPS * np.abs(e).max()


def _escaping(g: Array, H: Array, free: NDArray[np.bool_]) -> tuple[int, ...]:
    """Return the groups along which a model without minimum falls.

    That is along the most negative curvature among the groups without cubic term; where there is
    none, along the part of gbar, or of the coupling to another group, that meets no curvature.
    """
    _, _, e, V, x, tolerance = _free_block(g, H, free)
    Z = V[:, np.abs(e) <= tolerance]
    direction = V[:, 0]
    if e[0] >= -tolerance and Z.size:
        pulls = Z @ (Z.T @ x)
        direction = pulls[:, np.linalg.norm(pulls, axis=0).argmax()]
    size = np.abs(direction)
    return tuple(np.flatnonzero(free)[size > 0.1 * size.max()].tolist())


def _cubic(g: Array, H: Array, D: Array, lambda_int: float) -> tuple[Array, str]:
    """Return the minimum where the groups with d_s = 0 have a positive definite block (App. D)."""
    free = len(D) - int(np.count_nonzero(D))
    if D[:free].any():  # the groups with d_s = 0 go first: L^-1 D is zero in their rows
        order = np.argsort(D != 0, kind="stable")
        eta, status = _cubic(g[order], H[np.ix_(order, order)], D[order], lambda_int)
        return eta[np.argsort(order)], status
    rounding = 8 * len(g) * _EPS
    Dg, size = np.column_stack([np.diag(D), g]), np.abs(g)
    L = _cholesky(H)
    if L is None:
        lifted = H + rounding * np.diag(np.abs(np.diag(H)))
        L = _cholesky(lifted)
        if L is not None:
            H = lifted  # semi-definite but for rounding, which is not negative curvature
    sigma0 = _definite_shift(H, D) if L is None else _shift_below(_solve(L, Dg), lambda_int)
    eta, status = np.full_like(g, math.nan), "overflow"
    for _ in range(20):
        L = _cholesky(H + np.diag(sigma0 * D * D))
        if L is None:
            sigma0 *= 2
            continue
        if not np.isfinite(L.numpy()).all():
            raise np.linalg.LinAlgError("The factor has non-finite entries.")
        x = _solve(L, Dg)
        Q, w = _singular(x[:, :-1], free)
        V = _solve(L, Q, transposed=True)  # V^T M(sigma0) V = I and V^T D^2 V = Diag(w^2)
        c = Q.T @ x[:, -1]
        unsure = np.abs(c) <= rounding * (np.abs(V).T @ size)
        side = 1.0 if float(D @ V[:, 0]) >= 0 else -1.0
        sigma, y, status = _secular(c, w, sigma0, lambda_int, unsure, side)
        eta = V @ y
        # The decomposition is as exact as Cholesky's as long as sigma is not far from sigma0.
        if (sigma - sigma0) * w[0] ** 2 <= 1 and sigma0 <= max(4 * sigma, _SMALLEST):
            break
        sigma0 = sigma
    return eta, status


def _singular(A: Array, free: int) -> tuple[Array, Array]:
    """Return the left singular vectors of L^-1 D and its singular values, in descending order.

    Its first rows and columns, of the ``free`` groups with d_s = 0, are zero. They take no part:
    rounding would mix them with the others, whose steps can be far smaller.
    """
    some_Q, some_w, _ = _linalg("svd", A[free:, free:])
    if not free:
        return some_Q, some_w
    Q, w, rest = np.zeros_like(A), np.zeros(len(A)), len(some_w)
    Q[free:, :rest], w[:rest], Q[:free, rest:] = some_Q, some_w, np.eye(free)
    return Q, w


def _shift_below(x: Array, lambda_int: float) -> float:
    """Return a sigma below the answer, and near it, for a positive definite Hbar = L L^T.

    Along sigma, 1 / ||D eta|| is concave: its tangent at 0 is above it, and gives an answer that is
    too small.

    Args:
        x: L^-1 D, and L^-1 gbar as the last column, (S, S + 1).
        lambda_int: Strength of the cubic term.
    """
    A, b = x[:, :-1], x[:, -1]
    D_eta = b @ A
    slope = A @ D_eta  # its square is -1/2 d ||D eta||^2 / d sigma
    square = float(D_eta @ D_eta)
    if not 0 < square < math.inf:
        return _SMALLEST
    a, k = float(slope @ slope) / square, lambda_int / 2 * math.sqrt(square)
    sigma = 2 * k / (1 + math.sqrt(1 + 4 * a * k))  # sigma (1 + a sigma) = k
    return sigma if _SMALLEST < sigma < math.inf else _SMALLEST


def _definite_shift(H: Array, D: Array) -> float:
    """Return twice the least power of two sigma that makes M(sigma) positive definite."""

    def is_definite(exponent: int) -> bool:
        M = H + np.diag(2.0**exponent * D * D)
        return not np.isfinite(M).all() or _cholesky(M) is not None

    low, high = -900, 900
    scaled = H / D[:, None] / D
    if np.isfinite(scaled).all():  # an estimate, which is seldom wrong
        lowest = _linalg("eigvalsh", scaled)[0][0]
        near = min(max(math.frexp(-lowest)[1], low + 1), high)
        if is_definite(near) and not is_definite(near - 1):
            return 2.0 ** (near + 1)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if is_definite(middle) else (middle + 1, high)
    return 2.0 ** (low + 1)


def _secular(
    c: Array, w: Array, sigma0: float, lambda_int: float, unsure: NDArray[np.bool_], side: float
) -> tuple[float, Array, str]:
    """Solve sigma = lambda_int/2 ||w y|| with y = c / (1 + (sigma - sigma0) w^2) beyond the pole.

    App. D has r = 2 sigma / lambda_int, and r > abs(lambda_min) where Hbar is indefinite.
    In units of 1/w_1^2, sigma = b + tau, where b is the pole, or 0 if that is larger. Near the
    hard case the root is so close to the pole that only their difference tau has any digits.

    Args:
        c: Q^T L^-1 gbar, (S,).
        w: Singular values of L^-1 D in descending order, (S,).
        sigma0: The shift they belong to.
        lambda_int: Strength of the cubic term.
        unsure: Where ``c`` is zero but for rounding, (S,).
        side: Which way to go along the first singular vector if ``c`` does not tell.

    Returns:
        sigma, y = Q^T L^T eta, and the status.
    """
    rounding = 8 * len(c) * _EPS
    ratio = w / w[0]
    omega = ratio * ratio
    pole = float(sigma0 * w[0] ** 2 - 1)
    indefinite = pole > rounding
    b = pole if indefinite else 0.0
    beta = (1 - ratio) * (1 + ratio) if indefinite else 1 - np.minimum(1, (pole + 1) * omega)
    lowest = beta <= rounding  # the first, and others that w does not tell apart from it
    c = np.where(lowest & unsure, 0, c)
    size = math.hypot(*c)  # no square overflows
    log_kappa = float(np.log(lambda_int) - np.log(2) + 3 * np.log(w[0]) + np.log(size))
    tau = _root(c / size, omega, beta, b, log_kappa, start=pole + 1 - b)
    sigma = float((b + tau) / w[0] ** 2)
    if tau > 0:
        return sigma, c / (beta + tau * omega), "minimum"
    y = np.where(lowest, 0, c / np.where(lowest, 1, beta))
    if not indefinite:
        return sigma, y, "minimum"
    # The hard case: go along the first singular vector until ||D eta|| = 2 sigma / lambda_int.
    radius, rest = 2 * sigma / lambda_int, math.hypot(*(w * y))
    side = float(np.sign(c[0])) or side
    y[0] = side * np.sqrt(max(radius - rest, 0.0)) * np.sqrt(radius + rest) / w[0]
    return sigma, y, "hard-case"


def _root(c: Array, omega: Array, beta: Array, b: float, log_kappa: float, start: float) -> float:
    """Solve kappa ||sqrt(omega) c / (beta + tau omega)|| = b + tau; 0 if no tau > 0 does.

    The left side falls and the right side rises with tau. Newton's method on the logarithms of
    both against log tau, kept inside a bracket.
    """
    sizes = np.sqrt(omega) * np.abs(c)

    def gap(tau: float) -> tuple[float, float]:
        """Return log(left / right) and its derivative by log tau."""
        f = beta + tau * omega
        u = sizes / f
        norm, right = math.hypot(*u.tolist()), b + tau  # no square overflows
        u /= norm
        value = log_kappa + _log(norm) - math.log(right)
        return value, -tau * (float((u * u) @ (omega / f)) + 1 / right)

    low, high = 1e-300, 1e300
    tau = min(max(start, low), high)
    for attempt in range(100):
        value, slope = gap(tau)
        if attempt == 0 and not value > 0 and not gap(low)[0] > 0:
            return 0.0
        low, high = (tau, high) if value > 0 else (low, tau)
        exponent = -value / slope if slope else math.nan
        step = tau * math.exp(exponent) if abs(exponent) < 600 else math.nan
        if not (low < step < high or step == tau):  # which is the root itself, but for rounding
            step = math.sqrt(low) * math.sqrt(high)
        if abs(step - tau) <= 2 * _EPS * tau:
            return step
        tau = step
    return tau


def _log(x: float) -> float:
    return math.log(x) if 0 < x < math.inf else float(np.log(x))


# --- linear algebra ------------------------------------------------------------------------------
# In torch, whose threads can be limited: for matrices of a few dozen rows several threads are up to
# a hundred times slower, because they wait for each other and for those of training. Smaller
# matrices meet no threads, and with numpy eight groups take 0.87 of the time.

SMALL = 25  # rows; with more, LAPACK divides an eigenproblem, and OpenBLAS among threads


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _linalg(name: str, *arrays: Array) -> tuple[Array, ...]:
    """Call a function of linear algebra on arrays; raise numpy's error for what it cannot do."""
    if not all(np.isfinite(array).all() for array in arrays):
        raise np.linalg.LinAlgError("The matrix has non-finite entries.")
    if len(arrays[0]) <= SMALL:
        found = getattr(np.linalg, name)(*arrays)
        return found if isinstance(found, tuple) else (found,)
    try:
        found = getattr(torch.linalg, name)(*map(torch.from_numpy, arrays))
    except RuntimeError as error:
        raise np.linalg.LinAlgError(str(error)) from error
    found = (found,) if isinstance(found, Tensor) else found
    return tuple(x.contiguous().numpy() for x in found)


def _cholesky(M: Array) -> Tensor | None:
    """Return the lower factor; None if M is not positive definite."""
    factor, info = torch.linalg.cholesky_ex(torch.from_numpy(M))
    return None if info.item() else factor


def _solve(L: Tensor, x: Array, transposed: bool = False) -> Array:
    """Return L^-1 x, or L^-T x, for a lower triangular L."""
    matrix = (L.T if transposed else L).contiguous()
    y: Tensor = torch.linalg.solve_triangular(matrix, torch.from_numpy(x), upper=transposed)
    return y.contiguous().numpy()
