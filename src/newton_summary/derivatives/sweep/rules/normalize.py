"""Softmax and its kin, and the standardisation inside norm layers, in closed form.

For a row x of logits with p = softmax(x), write <a> for the mean of a under p, and c_s for
x1_s - <x1_s>. The derivatives of logsumexp are the cumulants of x under p: <x1_s>, <c_s c_t>,
<c_s c_t c_r>.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from newton_summary.derivatives.sweep.rules.bilinear import dots, gram, pick
from newton_summary.derivatives.sweep.tangent import Groups, Tangent, add_rows, join
from newton_summary.derivatives.sweep.tape import Op, Value

if TYPE_CHECKING:
    from newton_summary.derivatives.sweep.engine import Sweep


def _along(dim: int, rows: Tensor) -> int:
    """Return ``dim`` of a value counted from the end, so that it also fits rows of it."""
    return dim if dim < 0 else dim + 1 - rows.dim()


def _second(
    t: Tangent, curvature: Tensor, moved: Tensor, wanted: bool
) -> tuple[Groups, Tensor] | None:
    """Return y2: what the second derivatives of x become, plus what the first ones bend to."""
    if not wanted:
        return None
    return add_rows([(t.second, moved), (t.first, curvature)])


def log_softmax(
    sweep: Sweep, op: Op, x: Value, dim: int | None = None, dtype: Any = None, **kwargs: Any
) -> Tangent | None:
    """``x - logsumexp(x)``: the contribution is minus that of logsumexp."""
    t = sweep.tangent(x)
    if t is None or x.tensor.dim() == 0:  # of one number: always 0
        return None
    y = op.out.now
    t = t.to(y.dtype)
    return _log_softmax_like(sweep, op, t, y.exp(), _along(dim if dim is not None else -1, t.rows))


def _log_softmax_like(sweep: Sweep, op: Op, t: Tangent, p: Tensor, d: int) -> Tangent | None:
    means = (t.rows * p).sum(d, keepdim=True)
    centered = t.rows - means
    delta = sweep.adjoint(op.out)
    if delta is not None:
        _cumulants(sweep, t, centered, p, -delta.sum(d, keepdim=True))
    if not op.wanted:
        return None
    k = len(t.first)
    variances = (centered[:k].square() * p).sum(d, keepdim=True)
    bend = -variances.expand_as(centered[:k])
    second = _second(t, bend, centered[k:], sweep.order == 3)
    return join((t.first, centered[:k]), second)


def logsumexp(sweep: Sweep, op: Op, x: Value, dim: Any, keepdim: bool = False) -> Tangent | None:
    """The logarithm of a sum of exponentials."""
    t = sweep.tangent(x)
    if t is None:
        return None
    X, ndim = x.now, x.tensor.dim()
    if ndim == 0:
        return t
    dims = [dim] if isinstance(dim, int) else list(dim) or range(ndim)
    d = [i % ndim - ndim for i in dims]
    y = torch.logsumexp(X, d, keepdim=True)
    p = torch.exp(X - y)
    means = (t.rows * p).sum(d, keepdim=True)
    k = len(t.first)
    delta = sweep.adjoint(op.out)
    centered = t.rows - means
    if delta is not None:
        _cumulants(sweep, t, centered, p, delta.reshape(y.shape))
    if not op.wanted:
        return None
    variances = (centered[:k].square() * p).sum(d, keepdim=True)
    second = _second(t, variances, means[k:], sweep.order == 3)
    result = join((t.first, means[:k]), second)
    shape = op.out.tensor.shape
    return result.map(lambda rows: rows.reshape(rows.shape[0], *shape))


def _cumulants(sweep: Sweep, t: Tangent, centered: Tensor, p: Tensor, weight: Tensor) -> None:
    """Add the second and third cumulants of x under p, weighted row by row: logsumexp's share."""
    k = len(t.first)
    c = centered[:k]
    weighted = c * (p * weight)
    sweep.add_Hbar(t.first, t.first, gram(weighted, c))
    if sweep.order == 3:
        if t.second:
            sweep.add_D3(t.second, 3 * dots(pick(t.first, weighted, t.second), centered[k:]))
        sweep.add_D3(t.first, dots(weighted.mul_(c), c))


def softmax(
    sweep: Sweep, op: Op, x: Value, dim: int | None = None, dtype: Any = None, **kwargs: Any
) -> Tangent | None:
    """The derivatives of p are y1 = p c, and d2y[a, b] = p (c_a c_b - <c_a c_b>)."""
    t = sweep.tangent(x)
    if t is None or x.tensor.dim() == 0:  # of one number: always 1
        return None
    p = op.out.now
    t = t.to(p.dtype)
    d, k = _along(dim if dim is not None else -1, t.rows), len(t.first)
    centered = t.rows - (t.rows * p).sum(d, keepdim=True)
    c = centered[:k]
    delta = sweep.adjoint(op.out)
    variances = None
    if sweep.order == 3:
        variances = (c.square() * p).sum(d, keepdim=True)
    if delta is not None:
        weight = p * (delta - (delta * p).sum(d, keepdim=True))
        weighted = c * weight
        sweep.add_Hbar(t.first, t.first, gram(weighted, c))
        if variances is not None:  # d3y[a, a, a] = p (c^3 - 3 c <c^2> - <c^3>)
            sweep.add_D3(t.first, dots(weighted, c * c - 3 * variances))
            if t.second:
                sweep.add_D3(t.second, 3 * dots(pick(t.first, weighted, t.second), centered[k:]))
    if not op.wanted:
        return None
    second = None
    if variances is not None:
        second = _second(t, p * (c.square() - variances), p * centered[k:], True)
    return join((t.first, p * c), second)


def standardize(sweep: Sweep, op: Op, x: Value, dims: Sequence[int], eps: float) -> Tangent | None:
    """``y = c r`` with c = x - mean(x), v = mean(c^2) + eps, r = v^(-1/2), over ``dims``.

    A row has few numbers besides c: v and r, whose derivatives along the groups follow from means.

    The mean takes out what is the same over ``dims``, such as the bias of a layer before a batch
    norm. So that rounding leaves nothing of it, the first entry is subtracted before the mean is:
    else groups on which the loss does not depend would have rates made of nothing but rounding.
    """
    t = sweep.tangent(x)
    if t is None:
        return None
    X, ndim = x.now, x.tensor.dim()
    d = [i % ndim - ndim for i in dims]
    k = len(t.first)

    def mean(a: Tensor) -> Tensor:
        return a.mean(d, keepdim=True)

    def total(a: Tensor) -> Tensor:
        return a.sum(d, keepdim=True)

    c = X - mean(X)
    r = (mean(c * c) + eps).rsqrt()
    rows = t.rows
    if -ndim in d:  # over samples, of which biases do not depend
        entry = [slice(0, 1) if i - ndim in d else slice(None) for i in range(ndim)]
        rows = rows - rows[(slice(None), *entry)]
    rows = rows - mean(rows)
    c1, c2 = rows[:k], rows[k:]
    v1 = 2 * mean(c * c1)
    r1 = -0.5 * r**3 * v1
    third = sweep.order == 3
    if third:
        v2 = 2 * mean(c1 * c1)
        if t.second:
            v2 = add_rows([(t.first, v2), (t.second, 2 * mean(c * c2))])[1]
        r2 = 0.75 * r**5 * v1 * v1 - 0.5 * r**3 * v2
    delta = sweep.adjoint(op.out)
    if delta is not None:
        n = c.numel() // r.numel()
        alpha1, beta = total(delta * c1), total(delta * c)
        # <delta, c1_s r1_t + c1_t r1_s + c d2r[s, t]>
        M = gram(alpha1, r1)
        sweep.add_Hbar(t.first, t.first, M + M.T)
        sweep.add_Hbar(t.first, t.first, gram(v1 * (0.75 * beta * r**5), v1))
        sweep.add_Hbar(t.first, t.first, gram(c1 * (-beta * r**3 / n), c1))
        if third:
            # <delta, 3 c1 r2 + 3 c2 r1 + c r3>, r3 from v1, v2 and v3 = 6 mean(c1 c2)
            r3 = -1.875 * r**7 * v1**3 + 2.25 * r**5 * v1 * v2
            sweep.add_D3(t.first, 3 * dots(alpha1, r2) + gram(r3, beta[None]).reshape(-1))
            if t.second:
                r1_s, c1_s = pick(t.first, r1, t.second), pick(t.first, c1, t.second)
                sweep.add_D3(t.second, 3 * dots(total(delta * c2), r1_s))
                v3 = 6 * mean(c1_s * c2)
                sweep.add_D3(t.second, gram(v3, (-0.5 * r**3 * beta)[None]).reshape(-1))
    if not op.wanted:
        return None
    first = (t.first, c1 * r + c * r1)
    if not third:
        return join(first, None)
    bend = 2 * c1 * r1 + c * r2
    return join(first, add_rows([(t.first, bend), (t.second, c2 * r)]))


NORMALIZE: dict[str, Callable[..., Any]] = {
    "softmax": softmax,
    "special_softmax": softmax,
    "log_softmax": log_softmax,
    "special_log_softmax": log_softmax,
    "logsumexp": logsumexp,
    "special_logsumexp": logsumexp,
    "standardize": standardize,
}
