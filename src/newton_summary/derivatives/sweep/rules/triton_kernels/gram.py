"""Inner products of long rows: products of two wide matrices, of which each is read once.

A library of matrix products pads some tens of rows to a tile of a hundred and more, without tensor
cores for float32. These products take part in every curved operation.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from newton_summary.derivatives.sweep.tf32 import precision_of

PROGRAMS = 512  # that a product is divided among
PIECE = 512  # numbers that are added up before they are added to the rest
ROWS = 64  # of a tile, at most
FEW = 256  # products, of which the sums over all programs lie next to each other


@triton.jit(do_not_specialize=["k", "m", "pieces", "each"])  # type: ignore[untyped-decorator]
def _gram(  # type: ignore[no-untyped-def]
    x_in,
    y_in,
    out,
    k,
    m,
    n,
    pieces,
    each,
    length,
    x_row,
    x_piece,
    y_row,
    y_piece,
    out_part,
    out_entry,
    SYMMETRIC: tl.constexpr,
    PRECISION: tl.constexpr,
    X_ROWS: tl.constexpr,
    Y_ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Add up some pieces of some rows of x times some rows of y, n numbers in all."""
    part = tl.program_id(0)
    if SYMMETRIC and tl.program_id(1) < tl.program_id(2):
        return
    i = tl.program_id(1) * X_ROWS + tl.arange(0, X_ROWS)
    j = tl.program_id(2) * Y_ROWS + tl.arange(0, Y_ROWS)
    x_in += i.to(tl.int64)[:, None] * x_row
    y_in += j.to(tl.int64)[:, None] * y_row
    total = tl.zeros((X_ROWS, Y_ROWS), tl.float32)
    for piece in range(part * each, tl.minimum(pieces, part * each + each)):
        x_at = x_in + tl.cast(piece, tl.int64) * x_piece
        y_at = y_in + tl.cast(piece, tl.int64) * y_piece
        some = tl.zeros((X_ROWS, Y_ROWS), tl.float32)  # long sums lose digits on tensor cores
        for begin in range(0, length, DEPTH):
            e = begin + tl.arange(0, DEPTH)[None, :]
            within = (e < length) & (e < n - piece * length)
            x = tl.load(x_at + e, mask=(i[:, None] < k) & within, other=0.0)
            y = tl.load(y_at + e, mask=(j[:, None] < m) & within, other=0.0)
            some = tl.dot(x, tl.trans(y), some, input_precision=PRECISION)
        total += some
    out += tl.cast(part, tl.int64) * out_part
    inside = (i[:, None] < k) & (j[None, :] < m)
    tl.store(out + (i[:, None] * m + j[None, :]) * out_entry, total, mask=inside)
    if SYMMETRIC and tl.program_id(1) > tl.program_id(2):
        tl.store(out + (j[None, :] * m + i[:, None]) * out_entry, total, mask=inside)


def gram(X: Tensor, Y: Tensor, pieces: int, symmetric: bool) -> Tensor:
    """Return the products of all rows of X with all of Y in float32.

    Rows that do not lie in memory as a whole are read in this number of pieces, which should. Where
    the result is ``symmetric``, half of it is computed.
    """
    k, m, n = len(X), len(Y), X[0].numel()
    if X[0].is_contiguous() and Y[0].is_contiguous():
        pieces, length = triton.cdiv(n, PIECE), PIECE
        steps = [X.stride(0), PIECE, Y.stride(0), PIECE]
    else:
        X, Y = (x.reshape(len(x), pieces, -1) for x in (X, Y))
        X, Y = (x if x.stride(-1) == 1 else x.contiguous() for x in (X, Y))
        length, steps = n // pieces, [*X.stride()[:2], *Y.stride()[:2]]
    rows = [max(16, min(ROWS, triton.next_power_of_2(count))) for count in (k, m)]
    blocks = triton.cdiv(k, rows[0]), triton.cdiv(m, rows[1])
    tiles = blocks[0] * (blocks[0] + 1) // 2 if symmetric else blocks[0] * blocks[1]
    each = triton.cdiv(pieces * tiles, PROGRAMS)
    parts = triton.cdiv(pieces, each)
    if k * m > FEW:
        out = X.new_empty((parts, k * m), dtype=torch.float32)
    else:
        out = X.new_empty((k * m, parts), dtype=torch.float32).T
    depth = 64 if min(blocks) > 1 else 32  # of a tile
    if max(rows) == 16 and X.dtype == torch.bfloat16:  # in float32 that is slower
        depth = 128
    with torch.cuda.device(X.device):
        _gram[parts, blocks[0], blocks[1]](
            *(X, Y, out, k, m, n, pieces, each, length, *steps, *out.stride()),
            SYMMETRIC=symmetric,
            PRECISION=precision_of(X.dtype),
            X_ROWS=rows[0],
            Y_ROWS=rows[1],
            DEPTH=depth,
        )
    return out.sum(0).view(k, m)
