"""Products: operations h(a, b) that are linear in each of two arguments.

    y1_s = h(a1_s, b) + h(a, b1_s)
    y2_s = h(a2_s, b) + h(a, b2_s) + 2 h(a1_s, b1_s)
    <delta, d2h[x1_s, x1_t]> = <delta, h(a1_s, b1_t)> + <delta, h(a1_t, b1_s)>
    <delta, 3 d2h[x1_s, x2_s]> = 3 <delta, h(a1_s, b2_s)> + 3 <delta, h(a2_s, b1_s)>

In a layer b is the weight, met for the first time: b1 is U of one group, and b2 is zero. The
contribution to Hbar is then one product for the layer, <h(., U_t)^T delta, a1_s>, not one a group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from newton_summary.derivatives.sweep.tangent import (
    Groups,
    Tangent,
    Term,
    Writer,
    add_up,
    cast,
    lift,
)
from newton_summary.derivatives.sweep.tape import Op, Value
from newton_summary.errors import CannotDifferentiate

if TYPE_CHECKING:
    from newton_summary.derivatives.sweep.engine import Sweep


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
    left_into: Callable[[Tensor, Tensor, bool], object] | None = None
    right_into: Callable[[Tensor, Tensor, bool], object] | None = None
    elementwise: bool = False  # then the size of the factors decides what is cheap


def gram(X: Tensor, Y: Tensor) -> Tensor:
    """Return the inner products of all rows of X with all rows of Y; they are real."""
    if X.is_complex():
        X, Y = as_real(X), as_real(cast(Y, X.dtype))
    if X.dtype in (torch.bfloat16, torch.float16):
        X, Y = X.float(), Y.float()
    Y = cast(Y, X.dtype)
    k, m = len(X), len(Y)
    pieces = pieces_of(X.shape[1:]) if X.is_cuda else 1
    if pieces > 1:
        # A product of two long thin matrices leaves a GPU idle: many products of shorter ones.
        left = X.reshape(k, pieces, -1).transpose(0, 1)
        right = Y.reshape(m, pieces, -1).permute(1, 2, 0)
        return torch.bmm(left, right).sum(0)
    return X.reshape(k, -1) @ Y.reshape(m, -1).T


@cache
def pieces_of(shape: torch.Size, most: int = 1024, shortest: int = 256) -> int:
    """Return into how many pieces of one length an array of this shape can be cut.

    Short ones are not cut. Lengths that are multiples of eight come first: a GPU reads them faster.

    >>> [pieces_of(torch.Size(s)) for s in ((1000, 64, 8, 8), (250, 3, 7), (9, 50257))]
    [1024, 1, 261]
    """
    n = shape.numel()
    if n < 64 * shortest:
        return 1
    counts = [d for d in range(1, min(most, n // shortest) + 1) if n % d == 0]
    return max((d for d in counts if n // d % 8 == 0), default=counts[-1])


def as_real(X: Tensor) -> Tensor:
    """Return complex numbers as pairs of real ones."""
    return torch.view_as_real(X.resolve_conj()) if X.is_complex() else X


def dots(X: Tensor, Y: Tensor) -> Tensor:
    """Return the inner product of each row of X with the same row of Y."""
    return sums(X.conj() * Y)


def sums(X: Tensor) -> Tensor:
    """Return the sum of each row, its real part."""
    wide = torch.promote_types(X.dtype, torch.float32)
    return X.reshape(len(X), -1).sum(1, dtype=wide).real


def pick(groups: Groups, rows: Tensor, wanted: Groups) -> Tensor:
    """Return the rows of some of the groups, in their order."""
    if groups == wanted:
        return rows
    positions = [groups.index(s) for s in wanted]
    if positions == list(range(positions[0], positions[0] + len(positions))):
        return rows[positions[0] : positions[0] + len(positions)]
    return rows[positions]


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
    if h.elementwise:
        return len(B.rows) * A.shape.numel() <= len(A.rows) * B.shape.numel()
    return len(B.rows) <= len(A.rows)


def _moved(
    t: Tangent,
    move: Callable[[Tensor], Tensor],
    into: Callable[[Tensor, Tensor, bool], object] | None,
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
        shape = op.out.tensor.shape
        trailing = len(shape) - 1 - channel_dim % len(shape)
        rows = cast(t.rows, op.out.tensor.dtype)
        rows = rows.reshape(len(rows), *(1,) * (channel_dim % len(shape)), -1, *(1,) * trailing)
        rows = rows.expand(len(rows), *shape)
        k = len(t.first)
        first, second = [*first, (t.first, rows[:k])], [*second, (t.second, rows[k:])]
    return add_up(first, second, op.out.tensor)


# --- matrix products -----------------------------------------------------------------------------


def each_row(multiply: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    """Multiply by a stack of matrices; a single one without its first dimension, for speed."""
    return multiply(rows[0]) if len(rows) == 1 else multiply(rows)


def linear(sweep: Sweep, op: Op, x: Value, weight: Value, bias: Any = None) -> Any:
    """``x W^T + b``, the batch of x flattened to one dimension."""
    if weight.tensor.dim() == 1:
        return matmul(sweep, op, x, weight)
    dtype = op.out.tensor.dtype
    out_shape = op.out.tensor.shape
    X, W = cast(x.now, dtype), cast(weight.now, dtype)
    flat = X.reshape(-1, X.shape[-1])

    def adjoint_right(delta: Tensor, rows: Tensor) -> Tensor:
        d = delta.reshape(-1, delta.shape[-1])
        return torch.matmul(d.T, rows.reshape(rows.shape[0], -1, rows.shape[-1]))

    h = Product(
        left=lambda rows: F.linear(rows, W),
        right=lambda rows: each_row(lambda w: flat @ w.mT, rows).reshape(len(rows), *out_shape),
        pair=lambda a, b: torch.bmm(a.reshape(a.shape[0], -1, a.shape[-1]), b.mT).reshape(
            a.shape[0], *out_shape
        ),
        adjoint_left=lambda delta, rows: each_row(
            lambda w: delta.reshape(-1, delta.shape[-1]) @ w, rows
        ).reshape(len(rows), *X.shape),
        adjoint_right=adjoint_right,
        left_into=lambda rows, out, add: torch.addmm(
            flat_out := out.view(-1, len(W)),
            rows.reshape(-1, X.shape[-1]),
            W.T,
            beta=int(add),
            out=flat_out,
        ),
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
            torch.matmul(as_result(delta), as_right(rows).mT), A.shape
        ),
        adjoint_right=lambda delta, rows: unbroadcast(
            torch.matmul(as_left(rows).mT, as_result(delta)), B.shape
        ),
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
        raise CannotDifferentiate(
            "sweep: there is a rule for grouped_mm of rows times matrices only"
        )
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
    k = rows.shape[0]
    if rows.shape[1:].numel() == torch.Size(shape).numel():
        return rows.reshape(k, *shape)
    extra = rows.dim() - 1 - len(shape)
    dims = list(range(1, 1 + extra))
    dims += [1 + extra + i for i, n in enumerate(shape) if n == 1 and rows.shape[1 + extra + i] > 1]
    return rows.sum(dims, keepdim=True).reshape(k, *shape)


def multiply(sweep: Sweep, op: Op, a: Any, b: Any) -> Any:
    """``a * b`` entry by entry, with broadcasting."""
    if not isinstance(a, Value) or not isinstance(b, Value):
        value, factor = (a, b) if isinstance(a, Value) else (b, a)
        t = sweep.tangent(value)
        return None if t is None else t.map(lambda rows: rows * factor)
    dtype, ndim = op.out.tensor.dtype, op.out.tensor.dim()
    A, B = cast(a.now, dtype), cast(b.now, dtype)

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
    t = sweep.tangent(a)
    if t is None or kwargs.get("rounding_mode") is not None:
        return None
    ndim = op.out.tensor.dim()
    divisor = b.now if isinstance(b, Value) else b
    return t.map(lambda rows: lift(rows, ndim) / divisor)


# --- convolutions --------------------------------------------------------------------------------


def convolution(transposed: bool, n: int) -> Callable[..., Any]:
    """Return the rule for an n-dimensional convolution of a batch."""

    def rule(
        sweep: Sweep,
        op: Op,
        input: Value,
        weight: Value,
        bias: Any = None,
        stride: Any = 1,
        padding: Any = 0,
        *rest: Any,
        **kwargs: Any,
    ) -> Any:
        names = ("output_padding", "groups", "dilation") if transposed else ("dilation", "groups")
        given = {**dict(zip(names, rest, strict=False)), **kwargs}
        groups = given.get("groups", 1)
        dtype = op.out.tensor.dtype
        X, W = cast(input.now, dtype), cast(weight.now, dtype)
        settings = (
            per_dimension(stride, n),
            per_dimension(padding, n),
            per_dimension(given.get("dilation", 1), n),
            transposed,
            per_dimension(given.get("output_padding", 0), n),
            groups,
        )

        def conv(x: Tensor, w: Tensor) -> Tensor:
            return torch.convolution(x, w, None, *settings)

        def back(delta: Tensor, x: Tensor, w: Tensor, mask: list[bool]) -> Any:
            return torch.ops.aten.convolution_backward(delta, x, w, None, *settings, mask)

        def left(rows: Tensor) -> Tensor:
            x = rows.reshape(-1, *rows.shape[2:])
            y = conv_by_columns(x, W, settings) if columns_pay(x, settings, op) else conv(x, W)
            return y.reshape(*rows.shape[:2], *y.shape[1:])

        h = Product(
            left=left,
            right=lambda rows: stacked(conv(X, row) for row in rows),
            pair=lambda a, b: stacked(conv(x, w) for x, w in zip(a, b, strict=True)),
            adjoint_left=lambda delta, rows: stacked(
                back(delta, X, row, [True, False, False])[0] for row in rows
            ),
            adjoint_right=lambda delta, rows: stacked(
                back(delta, row, W, [False, True, False])[1] for row in rows
            ),
        )
        return plus_bias(sweep, op, product(sweep, op, h, input, weight), bias, 1)

    return rule


def columns_pay(x: Tensor, settings: Any, op: Op) -> bool:
    """Whether a convolution is faster as a matrix product of patches.

    For small images (at most 16 positions) cuDNN in float32 reaches a tenth to a third of what a
    matrix product does: 15,000 images of 512 x 4 x 4 take 91 ms against 29 on an H200. Not so with
    TF32, where they take 3.5 against 8.6.
    """
    _, _, dilation, transposed, _, groups = settings
    if not x.is_cuda or x.dtype != torch.float32 or len(x) < 1000:
        return False
    positions = op.out.tensor.shape[2:].numel()
    plain = groups == 1 and not transposed and set(dilation) == {1}
    return plain and positions <= 16 and not convolutions_take_tf32()


def convolutions_take_tf32() -> bool:
    """Whether cuDNN may round the factors of float32 products to TF32, as it does by default."""
    cudnn = torch.backends.cudnn
    if hasattr(cudnn, "conv"):  # since torch 2.9; the old flag then raises if the new one is used
        return bool(cudnn.conv.fp32_precision == "tf32")
    return bool(cudnn.allow_tf32)


def conv_by_columns(x: Tensor, w: Tensor, settings: Any, largest: int = 2**27) -> Tensor:
    """Convolve by multiplying the matrix of all patches, some images at a time."""
    stride, padding, *_ = settings
    x = F.pad(x, [p for pad in reversed(padding) for p in (pad, pad)])
    n = len(stride)
    out, patch = len(w), w[0].numel()
    sizes = [(x.shape[2 + i] - w.shape[2 + i]) // stride[i] + 1 for i in range(n)]
    results = []
    at_a_time = max(1, largest // (patch * torch.Size(sizes).numel()))
    for images in x.split(at_a_time):  # type: ignore[no-untyped-call]
        patches = images
        for i in range(n):
            patches = patches.unfold(2 + i, w.shape[2 + i], stride[i])
        # (images, channels, *positions, *offsets) -> (channels * offsets, images * positions)
        order = [1, *range(2 + n, 2 + 2 * n), 0, *range(2, 2 + n)]
        y = w.reshape(out, patch) @ patches.permute(order).reshape(patch, -1)
        results.append(y.reshape(out, len(images), *sizes).transpose(0, 1))
    return torch.cat(results)


def stacked(rows: Any) -> Tensor:
    """Stack tensors; a single one is not copied."""
    listed = list(rows)
    return listed[0][None] if len(listed) == 1 else torch.stack(listed)


def per_dimension(setting: Any, n: int) -> list[int]:
    """Write a setting of a convolution for every dimension."""
    if isinstance(setting, int):
        return [setting] * n
    return list(setting) * n if len(setting) == 1 else list(setting)


# --- einsum of two operands ----------------------------------------------------------------------


def einsum(sweep: Sweep, op: Op, equation: str, operands: Sequence[Value], *path: Any) -> Any:
    """``torch.einsum`` of one or two operands; longer ones are recorded pair by pair."""
    inputs, _, output = equation.replace(" ", "").partition("->")
    letters = inputs.split(",")
    k = next(c for c in "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz" if c not in equation)
    if len(operands) == 1:
        t = sweep.tangent(operands[0])
        stacked_equation = f"{k}{inputs}->{k}{output}"
        return None if t is None else t.map(lambda rows: torch.einsum(stacked_equation, rows))
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


BILINEAR: dict[str, Callable[..., Any]] = {
    "linear": linear,
    **dict.fromkeys(
        ["matmul", "mm", "bmm", "mv", "dot", "vdot", "linalg_matmul", "_sparse_mm"], matmul
    ),
    **dict.fromkeys(["mul", "multiply"], multiply),
    **dict.fromkeys(["div", "divide", "true_divide"], divide),
    **{f"conv{n}d": convolution(False, n) for n in (1, 2, 3)},
    **{f"conv_transpose{n}d": convolution(True, n) for n in (1, 2, 3)},
    "einsum": einsum,
    "_grouped_mm": grouped_mm,
}
