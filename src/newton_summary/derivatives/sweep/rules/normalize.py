"""Softmax and related functions, and the standardisation inside norm layers, in closed form.

For a row x of logits with p = softmax(x), write <a> for the mean of a under p, and c_s for
x1_s - <x1_s>. The derivatives of logsumexp are the cumulants of x under p: <x1_s>, <c_s c_t>,
<c_s c_t c_r>.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from newton_summary.derivatives.sweep.rules import fused
from newton_summary.derivatives.sweep.rules.fused_norms import FusedCentredRows, Sums
from newton_summary.derivatives.sweep.tape import (
    Contributions,
    Op,
    Sweep,
    Tangent,
    Value,
    add_up,
    cast,
    gram,
    stretches,
    sums,
)
from newton_summary.derivatives.sweep.torch_functions import dimensions


def _along(dim: int | None, y: Tensor) -> int:
    """Return ``dim`` of a value counted from the end, so that it also fits rows of it."""
    return -1 if dim is None else dim if dim < 0 else dim - y.dim()


def _known(p: Tensor) -> Tensor:
    """Return a softmax with zeros where all of a row is masked: such a row does not move."""
    return p.nan_to_num(0.0)


def softmax(log: bool) -> Callable[..., Tangent | None]:
    """Return the rule of a softmax, or of its logarithm.

    The derivatives of p are y1 = p c, and d2y[a, b] = p (c_a c_b - <c_a c_b>). The logarithm is
    x - logsumexp(x): its contribution is minus that of logsumexp.
    """

    def rule(
        sweep: Sweep, op: Op, x: Value, dim: int | None = None, dtype: Any = None, **kwargs: Any
    ) -> Tangent | None:
        t, y, delta = sweep.known(x), op.out.now, sweep.adjoint(op.out)
        if x.tensor.dim() == 0:  # of one number: constant
            return None
        p, d, weight = _known(y.exp() if log else y), _along(dim, y), None
        if delta is not None and log:
            weight = -p * delta.sum(d, keepdim=True)
        elif delta is not None:
            weight = p * (delta - (delta * p).sum(d, keepdim=True))
        return pass_softmax(sweep, op.wanted, t.to(y.dtype), p, weight, d, log)

    return rule


def pass_softmax(
    sweep: Contributions,
    wanted: bool,
    t: Tangent,
    p: Tensor,
    weight: Tensor | None,
    d: int,
    log: bool,
    overwrite: bool = False,
) -> Tangent | None:
    """Pass a softmax p of x, with derivatives t, or its logarithm.

    ``weight`` is what every entry of c_s c_t counts for in Hbar, if anything does, and d the
    dimension, counted from the end. ``overwrite``: whether t is needed no more.
    """
    third = sweep.order == 3
    how = (weight, third, wanted, log)
    passed = fused.run("pass_softmax", t, p, *how) if p.is_cuda and d == -1 else None
    if passed is not None:
        return fused.contributed(sweep, t, passed)
    if not log:
        return _pass_probabilities(sweep, wanted, t, p, weight, d, overwrite)
    c = without_mean_under(p, t.y1, d)
    if weight is not None:
        _cumulants(sweep, t, c, weight)
    if not wanted:
        return None
    if not third:
        return Tangent(t.first, (), c)
    variances = (c.square() * p).sum(d, keepdim=True)
    second = [(t.second, without_mean_under(p, t.y2, d)), (t.first, -variances.expand_as(c))]
    return add_up([(t.first, c)], second, p)


def without_mean_under(p: Tensor, rows: Tensor, d: int) -> Tensor:
    """Subtract from all rows their mean over a dimension, weighted by p."""
    work = rows * p
    return torch.sub(rows, work.sum(d, keepdim=True), out=work)


def _pass_probabilities(
    sweep: Contributions,
    wanted: bool,
    t: Tangent,
    p: Tensor,
    weight: Tensor | None,
    d: int,
    overwrite: bool,
) -> Tangent | None:
    """Pass a softmax, its derivatives replacing those of x: less memory, more of it cached.

    y1 = p c, y2 = p e and d3y[a, a, a] + 3 d2y[a, x2] = p (3 c e - 2 c^3 - ...), less its mean,
    with e = c^2 + x2 - <c^2 + x2>.
    """
    k, third = len(t.first), sweep.order == 3
    rows = t.completed().rows if third else t.y1
    rows = rows if overwrite else rows.clone()
    c, e = rows[:k], rows[k:]
    work = c * p
    c -= work.sum(d, keepdim=True)
    if third:
        e.addcmul_(c, c)
        e -= torch.mul(e, p, out=work).sum(d, keepdim=True)
    if weight is not None:
        weighted = torch.mul(c, weight, out=work)
        sweep.add_Hbar(t.first, t.first, gram(weighted, c))
        if third:
            terms = torch.addcmul(e, c, c, value=-2 / 3).mul_(weighted)
            sweep.add_D3(t.first, 3 * sums(terms))
    return Tangent(t.first, t.first if third else (), rows.mul_(p)) if wanted else None


def _cumulants(sweep: Contributions, t: Tangent, c: Tensor, weight: Tensor) -> None:
    """Add <weight, c_s c_t> to Hbar and <weight, c^3 + 3 c x2> to D3.

    The mean of x2 makes no difference: that of c under the weight is zero.
    """
    weighted = c * weight
    sweep.add_Hbar(t.first, t.first, gram(weighted, c))
    if sweep.order == 3:
        work = c * c
        for mine, theirs in stretches(t.second, t.first):
            work[mine].add_(t.y2[theirs], alpha=3)
        sweep.add_D3(t.first, sums(work.mul_(weighted)))


def logsumexp(sweep: Sweep, op: Op, x: Value, dim: Any, keepdim: bool = False) -> Tangent | None:
    """The logarithm of a sum of exponentials."""
    t, X, ndim = sweep.known(x), x.now, x.tensor.dim()
    if ndim == 0:
        return t
    d = [i % ndim - ndim for i in dimensions(X, dim)]
    y = torch.logsumexp(X, d, keepdim=True)
    p = _known(torch.exp(X - y))
    means = (t.rows * p).sum(d, keepdim=True)
    k = len(t.first)
    delta = sweep.adjoint(op.out)
    c = t.y1 - means[:k]
    if delta is not None:
        _cumulants(sweep, t, c, p * delta.reshape(y.shape))
    if not op.wanted:
        return None
    variances = (c.square() * p).sum(d, keepdim=True)
    second = [(t.second, means[k:]), (t.first, variances)] if sweep.order == 3 else []
    result = add_up([(t.first, means[:k])], second, y)
    shape = op.out.tensor.shape
    return result and result.map(lambda rows: rows.reshape(len(rows), *shape))


def standardize(
    sweep: Sweep, op: Op, x: Value, dims: Sequence[int], eps: float, centred: bool = True
) -> Tangent | None:
    """``y = c r`` with c = x - mean(x), v = mean(c^2) + eps, r = v^(-1/2), over ``dims``.

    If not centred, c is x. Of bfloat16, only x and y are; what is in between is in float32.

    A cell, what is standardized together, has few numbers besides c: v and r, whose derivatives
    along the groups follow from sums over the cell (:class:`Sums`).
    """
    t = sweep.known(x)
    X, ndim = cast(x.now, torch.promote_types(x.tensor.dtype, torch.float32)), x.tensor.dim()
    d = [i % ndim - ndim for i in dims]
    c = X - X.mean(d, keepdim=True) if centred else X
    r = ((c * c).mean(d, keepdim=True) + eps).rsqrt()
    n = c.numel() // r.numel()
    delta, third = sweep.adjoint(op.out), sweep.order == 3
    delta = None if delta is None else cast(delta, c.dtype)
    how = (c, delta, d, third, centred)
    rows = FusedCentredRows.make(t, *how) or CentredRows(t.to(c.dtype), *how)
    s = rows.sums()
    # Derivatives of v are relative, over v: of small v, high powers of r are beyond float32.
    scale = 2 / n * r**2
    v1 = scale * s.c_c1
    r1 = v1 * (-0.5 * r)
    r2 = None
    if third:
        v2 = scale * (s.c1_c1 + s.c_c2)
        r2 = (v2 * -0.5).addcmul_(v1, v1, value=0.75).mul_(r)
    weight = None
    if delta is not None:
        # <delta, c1_s r1_t + c1_t r1_s + c d2r[s, t]>, of which finish() adds what is not in v1
        beta = (delta * c).sum(d, keepdim=True)
        M = gram(s.delta_c1 - 0.75 * beta * v1, r1)
        sweep.add_Hbar(t.first, t.first, M + M.T)
        weight = beta * r * (-0.5 * scale)
        if r2 is not None:
            # <delta, 3 c1 r2 + 3 c2 r1 + c r3>, r3 from v1, v2 and v3 = 6 mean(c1 c2)
            r3 = (v2 * 2.25).addcmul_(v1, v1, value=-1.875).mul_(v1)
            r3 = r3.addcmul_(scale, s.c1_c2, value=-1.5)
            terms = (s.delta_c1 * r2).addcmul_(s.delta_c2, r1).mul_(3).addcmul_(r3, beta * r)
            sweep.add_D3(t.first, sums(terms))
    result, products = rows.finish(r, r1, r2, weight, op.wanted)
    if products is not None:
        sweep.add_Hbar(t.first, t.first, products)
    return None if result is None else Tangent(t.first, t.first if third else (), result)


class CentredRows:
    """The rows of x inside a standardisation, less their means, by torch operations.

    The mean takes out what is the same over ``dims``, such as the bias of a layer before a batch
    norm. So that rounding leaves nothing of it, the first entry is subtracted before the mean is:
    else groups on which the loss does not depend would have rates made of nothing but rounding.

    Here c is x less its mean over the dimensions d, counted from the end, and delta the adjoint of
    the result.
    """

    def __init__(
        self, t: Tangent, c: Tensor, delta: Tensor | None, d: list[int], third: bool, centred: bool
    ):
        self.c, self.delta, self.d, self.third = c, delta, d, third
        rows, k, ndim = t.rows, len(t.first), c.dim()
        if centred and -ndim in d:  # over samples, of which biases do not depend
            entry = [slice(0, 1) if i in d else slice(None) for i in range(-1 - ndim, 0)]
            rows = rows - rows[tuple(entry)]
        means = rows.mean(d, keepdim=True) if centred else rows.new_zeros((len(rows), *(1,) * ndim))
        self.rows = rows.new_empty((2 * k if third else k, *c.shape))
        self.c1, self.c2 = self.rows[:k], self.rows[k:]
        torch.sub(rows[:k], means[:k], out=self.c1)
        if third and t.second != t.first:
            self.c2.zero_()
        for mine, theirs in stretches(t.second, t.first):
            torch.sub(rows[k:][theirs], means[k:][theirs], out=self.c2[mine])

    def sums(self) -> Sums:
        """Return the sums of products over each cell, for all groups."""
        c, c1, c2, delta = self.c, self.c1, self.c2, self.delta
        c_c1 = self._total(c * c1)
        zero = torch.zeros_like(c_c1)
        return Sums(
            c_c1=c_c1,
            delta_c1=zero if delta is None else self._total(delta * c1),
            c1_c1=self._total(c1 * c1) if self.third else zero,
            c_c2=self._total(c * c2) if self.third else zero,
            delta_c2=self._total(delta * c2) if self.third and delta is not None else zero,
            c1_c2=self._total(c1 * c2) if self.third else zero,
        )

    def _total(self, a: Tensor) -> Tensor:
        return a.sum(self.d, keepdim=True)

    def finish(
        self, r: Tensor, r1: Tensor, r2: Tensor | None, weight: Tensor | None, wanted: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the rows of the result, in place of c1 and c2, and <weight c1, c1>."""
        c, c1, c2 = self.c, self.c1, self.c2
        products = None if weight is None else gram(c1 * weight, c1)
        if not wanted:
            return None, products
        if r2 is not None:
            c2.mul_(r).addcmul_(c, r2).addcmul_(c1, r1, value=2)
        c1.mul_(r).addcmul_(c, r1)
        return self.rows, products


NORMALIZE: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(["softmax", "_safe_softmax", "special_softmax"], softmax(log=False)),
    **dict.fromkeys(["log_softmax", "special_log_softmax"], softmax(log=True)),
    **dict.fromkeys(["logsumexp", "special_logsumexp"], logsumexp),
    "standardize": standardize,
}
