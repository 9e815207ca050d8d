"""Products: operations h(a, b) that are linear in each of two arguments.

    y1_s = h(a1_s, b) + h(a, b1_s)
    y2_s = h(a2_s, b) + h(a, b2_s) + 2 h(a1_s, b1_s)
    <delta, d2h[x1_s, x1_t]> = <delta, h(a1_s, b1_t)> + <delta, h(a1_t, b1_s)>
    <delta, 3 d2h[x1_s, x2_s]> = 3 <delta, h(a1_s, b2_s)> + 3 <delta, h(a2_s, b1_s)>

In a layer b is the weight, met for the first time: b1 is U of one group, and b2 is zero. The
contribution to Hbar is then one product for the layer, <h(., U_t)^T delta, a1_s>, not one a group.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from newton_summary.derivatives.sweep.kernels import kernels
from newton_summary.derivatives.sweep.rules import fused
from newton_summary.derivatives.sweep.rules.linear import combine
from newton_summary.derivatives.sweep.tape import (
    Op,
    Sweep,
    Tangent,
    Term,
    Value,
    Writer,
    add_up,
    cast,
    dots,
    gram,
    lift,
    pick,
    plain,
)
from newton_summary.derivatives.sweep.tf32 import products_take_tf32
from newton_summary.errors import CannotDifferentiate

LARGE = 2**32  # products of two numbers, in rows times a weight
LARGE_ON_CPU = 2**21  # the same for oneDNN: with fewer, its call takes longer than what it saves
FEWEST_TERMS = 16  # in the sums of a product by oneDNN; with fewer, the memory is what takes time
AT_A_TIME = 2**21  # bytes of a product that is copied or added elsewhere: they stay in the cache
FEWEST_ROWS = 128  # of it: for fewer, a weight with many outputs would be read too often
Into = Callable[[Tensor, Tensor, bool], object] | None  # writes rows to a tensor, or adds them


@dataclass(frozen=True)
class Product:
    """A bilinear map and its adjoints, on stacks of rows."""

    left: Callable[[Tensor], Tensor]  # rows of a -> h(row, b)
    right: Callable[[Tensor], Tensor]  # rows of b -> h(a, row)
    pair: Callable[[Tensor, Tensor], Tensor]  # rows of a, rows of b -> h(row, row)
    # These take the complex conjugates of rows, which for real ones are the rows themselves.
    adjoint_left: Callable[[Tensor, Tensor], Tensor]  # delta, rows of b -> rows like a
    adjoint_right: Callable[[Tensor, Tensor], Tensor]  # delta, rows of a -> rows like b
    # The same, written to a tensor, or added to it.
    left_into: Into = None
    right_into: Into = None
    elementwise: bool = False  # then the size of the factors decides what is cheap


def product(sweep: Sweep, op: Op, h: Product, a: Value, b: Value) -> tuple[list[Term], list[Term]]:
    """Pass a bilinear operation: its contributions, and the terms of y1 and y2 of its result."""
    A, B = sweep.tangent(a), sweep.tangent(b)
    dtype = op.out.tensor.dtype
    A, B = A and A.to(dtype), B and B.to(dtype)
    if A is not None and B is not None:
        delta = sweep.adjoint(op.out)
        if delta is not None:
            delta = cast(delta, dtype)
            if _from_left(h, A, B):
                contribute(sweep, A, B, h.adjoint_left(delta, B.rows.conj()))
            else:
                contribute(sweep, B, A, h.adjoint_right(delta, A.rows.conj()))
    first: list[Term] = []
    second: list[Term] = []
    if not op.wanted:
        return first, second
    for t, moved, into in ((A, h.left, h.left_into), (B, h.right, h.right_into)):
        if t is not None:
            y1, y2 = _moved(t, moved, into)
            first.append((t.first, y1))
            second.append((t.second, y2))
    if A is not None and B is not None and sweep.order == 3:
        shared = tuple(s for s in A.first if s in B.first)
        if shared:
            cross = h.pair(pick(A.first, A.y1, shared), pick(B.first, B.y1, shared))
            second.append((shared, cross.mul_(2)))
    return first, second


def _from_left(h: Product, A: Tangent, B: Tangent) -> bool:
    """Whether it is cheaper to multiply the adjoint with the rows of b than with those of a."""
    if not h.elementwise:
        return len(B.rows) <= len(A.rows)
    # Rows times the adjoint, which is as large as the larger factor, then the inner products of
    # all pairs: these take an eighth as long for each number.
    a, b = A.shape.numel(), B.shape.numel()
    pairs, numbers = len(A.rows) * len(B.rows), 8 * max(a, b)
    return len(B.rows) * numbers + pairs * a <= len(A.rows) * numbers + pairs * b


def _moved(
    t: Tangent, move: Callable[[Tensor], Tensor], into: Into
) -> tuple[Tensor | Writer, Tensor | Writer]:
    """Return the rows of one factor times the other, of first and of second order."""
    if into is None:
        moved = t.map(move)
        return moved.y1, moved.y2

    def writer(rows: Tensor) -> Writer:
        return lambda out, which, add: into(rows[which], out, add)

    return writer(t.y1), writer(t.y2)


def contribute(sweep: Sweep, A: Tangent, B: Tangent, G: Tensor) -> None:
    """Add what a product contributes, given G: rows of h(., b_row)^T delta, in the order of B."""
    k = len(B.first)
    M = gram(G[:k], A.y1)
    sweep.add_Hbar(B.first, A.first, M)
    sweep.add_Hbar(A.first, B.first, M.T)
    for A_groups, A_rows, B_groups, B_rows in (
        (A.second, A.y2, B.first, G[:k]),
        (A.first, A.y1, B.second, G[k:]),
    ):
        shared = tuple(s for s in A_groups if s in B_groups)
        if shared:
            term = dots(pick(A_groups, A_rows, shared), pick(B_groups, B_rows, shared))
            sweep.add_D3(shared, 3 * term)


def plus_bias(
    sweep: Sweep, op: Op, terms: tuple[list[Term], list[Term]], bias: Any, channel_dim: int
) -> Tangent | None:
    """Add the derivatives of a bias, which lies along one dimension of the result."""
    first, second = terms
    t = sweep.tangent(bias)
    if t is not None and op.wanted:
        y = op.out.tensor
        along = [-1 if d == channel_dim % y.dim() else 1 for d in range(y.dim())]
        t = t.to(y.dtype).map(lambda rows: rows.reshape(len(rows), *along).expand(-1, *y.shape))
        first, second = [*first, (t.first, t.y1)], [*second, (t.second, t.y2)]
    return add_up(first, second, op.out.tensor)


# --- layers, matrix products, elementwise products -----------------------------------------------


def on_tensor_cores(rows: Tensor, weight: Tensor) -> bool:
    """Whether our own product of a layer is faster, which has the precision of float32 too.

    43,512 rows of 768 features take 2.3 ms to 3,072 where the library takes 5.9, on an H200. GPUs
    of other kinds have not been measured.
    """
    if not rows.is_cuda or rows.dtype != torch.float32 or rows.numel() * len(weight) < LARGE:
        return False
    known = torch.cuda.get_device_capability(rows.device)[0] == 9
    return known and not products_take_tf32() and kernels() is not None


# On a CPU torch.matmul calls MKL, which leaves AVX-512 unused on processors by AMD. oneDNN uses it:
# 4,096 x 128 numbers times 128 x 384 take 1.7 ms on one core of a Zen 5, and with MKL 3.7.


def times_transposed(X: Tensor, W: Tensor) -> Tensor:
    """Return ``X W^T`` for X of shape (M, K) and W of shape (N, K), or for a stack of such W."""
    if not onednn_pays(X, W):
        return X @ W.mT
    out = X.new_empty(len(X), len(W))
    write_product(out, X, W, add=False)
    return out


def times_each(X: Tensor, matrices: Tensor) -> Tensor:
    """Return X times each of some matrices, (k, *shape of X but its last dimension, columns)."""
    flat = X.reshape(-1, X.shape[-1])
    # A single one without its first dimension, for speed.
    products = times_transposed(flat, (matrices[0] if len(matrices) == 1 else matrices).mT)
    return products.reshape(len(matrices), *X.shape[:-1], matrices.shape[-1])


def write_product(out: Tensor, X: Tensor, W: Tensor, add: bool) -> None:
    """Write ``X W^T`` to a tensor, or add it.

    oneDNN compiles code for every number of rows, and keeps that for a thousand: hundreds of
    megabytes, which break the heap into more. So it gets powers of two of rows, or less than 16.
    """
    most = max(FEWEST_ROWS, AT_A_TIME // max(1, len(W) * X.element_size()))
    start = 0
    while start < len(X) and onednn_pays(X[start:], W):
        rows = min(len(X) - start, most)
        rows = rows if rows < 16 else 2 ** (rows.bit_length() - 1)
        some = slice(start, start + rows)
        y = by_onednn()(X[some], W)
        out[some].add_(y) if add else out[some].copy_(y)
        start += rows
    if start < len(X):
        torch.addmm(out[start:], X[start:], W.T, beta=int(add), out=out[start:])


def onednn_pays(X: Tensor, W: Tensor) -> bool:
    """Whether oneDNN is faster: for large products of plain matrices, on some processors.

    The rows of X have to lie one behind the other: others take it a thousand times as long.
    """
    return (
        X.dtype == W.dtype == torch.float32
        and X.is_cpu
        and W.is_cpu
        and len(X) * W.numel() >= LARGE_ON_CPU
        and X.shape[-1] >= FEWEST_TERMS
        and W.dim() == 2
        and W.layout == torch.strided
        and type(X) is Tensor
        and type(W) in (Tensor, Parameter)
        and X.is_contiguous()
        and (W.is_contiguous() or W.T.is_contiguous())
        and mkl_lacks_avx512()
        and bool(torch.backends.mkldnn.enabled)
    )


@cache
def mkl_lacks_avx512() -> bool:
    """Whether this processor has AVX-512 that oneDNN uses and MKL does not."""
    has_mkl: bool = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or not has_mkl:
        return False
    try:
        about = Path("/proc/cpuinfo").read_text()
    except OSError:
        about = platform.processor()
    if "AuthenticAMD" not in about:
        return False
    try:
        some = torch.ones(1, 2, dtype=torch.float32, device="cpu")  # whatever the defaults are
        return bool(by_onednn()(some, some) == 2)
    except (AttributeError, RuntimeError, TypeError):  # a torch without oneDNN, or with another one
        return False


@cache
def by_onednn() -> Callable[[Tensor, Tensor], Tensor]:
    """Return the function that multiplies by oneDNN; torch's compiler has it too."""
    linear = torch.ops.mkldnn._linear_pointwise
    return lambda X, W: linear(X.detach(), W.detach(), None, "none", [], "")


def linear(sweep: Sweep, op: Op, x: Value, weight: Value, bias: Any = None) -> Any:
    """``x W^T + b``, the batch of x flattened to one dimension."""
    if weight.tensor.dim() == 1:
        return matmul(sweep, op, x, weight)
    dtype = op.out.tensor.dtype
    out_shape = op.out.tensor.shape
    X, W = cast(x.now, dtype), cast(weight.now, dtype)

    def adjoint_right(delta: Tensor, rows: Tensor) -> Tensor:
        d = delta.reshape(-1, delta.shape[-1])
        return torch.matmul(d.T, rows.reshape(rows.shape[0], -1, rows.shape[-1]))

    def left_into(rows: Tensor, out: Tensor, add: bool) -> None:
        if on_tensor_cores(rows, W):
            kernels().multiply_rows(rows, W, out, add)  # type: ignore[union-attr]
        else:
            write_product(out.view(-1, len(W)), rows.reshape(-1, X.shape[-1]), W, add)

    h = Product(
        left=lambda rows: F.linear(rows, W),
        right=lambda rows: times_each(X, rows.mT),
        pair=lambda a, b: torch.bmm(a.reshape(a.shape[0], -1, a.shape[-1]), b.mT).reshape(
            a.shape[0], *out_shape
        ),
        adjoint_left=times_each,
        adjoint_right=adjoint_right,
        left_into=left_into,
    )
    return plus_bias(sweep, op, product(sweep, op, h, x, weight), bias, -1)


def matmul(sweep: Sweep, op: Op, a: Value, b: Value) -> Any:
    """Matrix product with broadcasting over batches; vectors count as matrices."""
    if a.tensor.layout != torch.strided:
        return sparse_product(sweep, op, a, b)
    dtype = op.out.tensor.dtype
    A, B = cast(a.now, dtype), cast(b.now, dtype)
    A_vector, B_vector = A.dim() == 1, B.dim() == 1
    out_shape = op.out.tensor.shape

    def as_left(rows: Tensor) -> Tensor:
        return lift(rows[:, None, :] if A_vector else rows, max(A.dim(), B.dim(), 2))

    def as_right(rows: Tensor) -> Tensor:
        return lift(rows[..., None] if B_vector else rows, max(A.dim(), B.dim(), 2))

    def as_result(delta: Tensor) -> Tensor:
        delta = delta[..., None] if B_vector else delta
        return delta[..., None, :] if A_vector else delta

    def finish(rows: Tensor) -> Tensor:
        return rows.reshape(rows.shape[0], *out_shape)

    A1, B1 = as_left(A[None]), as_right(B[None])
    h = Product(
        left=lambda rows: finish(torch.matmul(as_left(rows), B1)),
        right=lambda rows: finish(torch.matmul(A1, as_right(rows))),
        pair=lambda x, y: finish(torch.matmul(as_left(x), as_right(y))),
        adjoint_left=lambda delta, rows: unbroadcast(
            torch.matmul(as_result(delta), as_right(rows).mT), A1.shape[1:]
        ).reshape(len(rows), *A.shape),
        adjoint_right=lambda delta, rows: unbroadcast(
            torch.matmul(as_left(rows).mT, as_result(delta)), B1.shape[1:]
        ).reshape(len(rows), *B.shape),
    )
    return add_up(*product(sweep, op, h, a, b), op.out.tensor)


def sparse_product(sweep: Sweep, op: Op, a: Value, b: Value) -> Tangent | None:
    """A sparse matrix that does not depend on the parameters, times rows side by side."""
    t, A = sweep.tangent(b), a.now
    if sweep.tangent(a) is not None or t is None:
        raise CannotDifferentiate("sweep: a sparse matrix depends on the parameters")

    def multiply(rows: Tensor) -> Tensor:
        columns = rows.reshape(len(rows), A.shape[1], -1).transpose(0, 1)
        product = A @ columns.reshape(A.shape[1], -1)
        return product.reshape(len(A), len(rows), -1).transpose(0, 1)

    return t.map(lambda rows: multiply(rows).reshape(len(rows), *op.out.tensor.shape))


def grouped_mm(
    sweep: Sweep, op: Op, a: Value, b: Value, offs: Any = None, *rest: Any, **kwargs: Any
) -> Any:
    """``torch._grouped_mm``: rows of a, of which consecutive ones share a matrix of b."""
    if offs is None:
        return matmul(sweep, op, a, b)
    if a.tensor.dim() != 2 or b.tensor.dim() != 3:
        raise CannotDifferentiate("sweep: grouped_mm is supported for rows times matrices only")
    A, B = a.now, b.now
    ends = [0, *offs.now.tolist()]
    parts = [slice(*pair) for pair in pairwise(ends)]

    def multiply(x: Tensor, w: Tensor) -> Tensor:
        x, w = (x if x.dim() == 3 else x[None]), (w if w.dim() == 4 else w[None])
        k = max(len(x), len(w))
        y = x.new_empty((k, x.shape[-2], w.shape[-1]))
        for e, part in enumerate(parts):
            left, right = x[:, part].expand(k, -1, -1), w[:, e].expand(k, -1, -1)
            torch.bmm(left, right, out=y[:, part])
        y[:, ends[-1] :] = 0
        return y

    def adjoint_right(delta: Tensor, rows: Tensor) -> Tensor:
        return torch.stack([rows[:, part].mT @ delta[part] for part in parts], 1)

    h = Product(
        left=lambda rows: multiply(rows, B),
        right=lambda rows: multiply(A, rows),
        pair=multiply,
        adjoint_left=lambda delta, rows: multiply(delta, rows.mT),
        adjoint_right=adjoint_right,
    )
    return add_up(*product(sweep, op, h, a, b), op.out.tensor)


def unbroadcast(rows: Tensor, shape: Sequence[int]) -> Tensor:
    """Sum rows over the dimensions along which a value of ``shape`` was broadcast."""
    missing = (1,) * (rows.dim() - 1 - len(shape))
    return rows.sum_to_size(len(rows), *missing, *shape).reshape(len(rows), *shape)


def multiply(sweep: Sweep, op: Op, a: Any, b: Any) -> Any:
    """``a * b`` entry by entry, with broadcasting."""
    if not isinstance(a, Value) or not isinstance(b, Value):
        value, factor = (a, b) if isinstance(a, Value) else (b, a)
        return combine(sweep, op, [(value, lambda rows: rows * factor)])
    dtype, ndim = op.out.tensor.dtype, op.out.tensor.dim()
    A, B = cast(a.now, dtype), cast(b.now, dtype)
    ta, tb = sweep.tangent(a), sweep.tangent(b)
    if A.is_cuda and ta is not None and tb is not None:
        how = (sweep.adjoint(op.out), sweep.order == 3, op.wanted)
        passed = fused.run_product(ta, tb, A, B, op.out.tensor, *how)
        if passed is not None:
            return fused.contributed(sweep, ta, passed, symmetric=False)

    def into(rows: Tensor, factor: Tensor, out: Tensor, add: bool) -> None:
        rows = lift(rows, ndim)
        out.addcmul_(rows, factor) if add else torch.mul(rows, factor, out=out)

    h = Product(
        left=lambda rows: lift(rows, ndim) * B,
        right=lambda rows: lift(rows, ndim) * A,
        left_into=lambda rows, out, add: into(rows, B, out, add),
        right_into=lambda rows, out, add: into(rows, A, out, add),
        elementwise=True,
        pair=lambda x, y: lift(x, ndim) * lift(y, ndim),
        adjoint_left=lambda delta, rows: unbroadcast(lift(rows, ndim) * delta, A.shape),
        adjoint_right=lambda delta, rows: unbroadcast(lift(rows, ndim) * delta, B.shape),
    )
    return add_up(*product(sweep, op, h, a, b), op.out.tensor)


def divide(sweep: Sweep, op: Op, a: Value, b: Any, **kwargs: Any) -> Any:
    """``a / b`` where b does not depend on the parameters."""
    if kwargs.get("rounding_mode") is not None:
        return None
    return combine(sweep, op, [(a, lambda rows: rows / plain(b))])


def einsum(sweep: Sweep, op: Op, equation: str, operands: Sequence[Value], *path: Any) -> Any:
    """``torch.einsum`` of one or two operands; longer ones are recorded pair by pair."""
    inputs, _, output = equation.replace(" ", "").partition("->")
    letters = inputs.split(",")
    k = next(c for c in "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz" if c not in equation)
    if len(operands) == 1:
        alone = f"{k}{inputs}->{k}{output}"
        return sweep.known(operands[0]).map(lambda rows: torch.einsum(alone, rows))
    a, b = operands
    A, B = a.now, b.now
    la, lb = letters

    def adjoint(delta: Tensor, rows: Tensor, row_letters: str, wanted: str, like: Tensor) -> Tensor:
        # Letters that only the wanted operand has were summed over: its adjoint is constant there.
        known = "".join(c for c in wanted if c in output or c in row_letters)
        result = torch.einsum(f"{output},{k}{row_letters}->{k}{known}", delta, rows)
        for i, c in enumerate(wanted):
            if c not in known:
                result = result.unsqueeze(1 + i)
        return result.expand(rows.shape[0], *like.shape)

    h = Product(
        left=lambda rows: torch.einsum(f"{k}{la},{lb}->{k}{output}", rows, B),
        right=lambda rows: torch.einsum(f"{la},{k}{lb}->{k}{output}", A, rows),
        pair=lambda x, y: torch.einsum(f"{k}{la},{k}{lb}->{k}{output}", x, y),
        adjoint_left=lambda delta, rows: adjoint(delta, rows, lb, la, A),
        adjoint_right=lambda delta, rows: adjoint(delta, rows, la, lb, B),
    )
    return add_up(*product(sweep, op, h, a, b), op.out.tensor)


PRODUCTS: dict[str, Callable[..., Any]] = {
    "linear": linear,
    **dict.fromkeys(
        ["matmul", "mm", "bmm", "mv", "dot", "vdot", "linalg_matmul", "_sparse_mm"], matmul
    ),
    "_grouped_mm": grouped_mm,
    **dict.fromkeys(["mul", "multiply"], multiply),
    **dict.fromkeys(["div", "divide", "true_divide"], divide),
    "einsum": einsum,
}
