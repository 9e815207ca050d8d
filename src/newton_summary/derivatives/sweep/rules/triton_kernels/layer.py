"""Rows times the weight of a layer, in float32 on tensor cores.

A number of float32 is the sum of two of TF32, but for one part in four million. Of the four
products of the parts of two such numbers three matter, and three products on tensor cores take two
fifths of the time that one in float32 takes without them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, COLUMNS, DEPTH = 128, 128, 32  # of a tile
STRIP = 8  # tiles of columns that are computed together, so that their weights stay in the cache
BLOCK = 1024  # entries of a weight that one program divides


@triton.jit
def _rounded(x):  # type: ignore[no-untyped-def]
    """Round to TF32, which has 10 binary digits of 23."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + 0x1000) & -0x2000).to(tl.float32, bitcast=True)


@triton.jit
def _rest(x, high):  # type: ignore[no-untyped-def]
    """Round what is left of a number; nan stays nan, though rounding its bits may give zero."""
    low = x - high
    return tl.where(low == low, _rounded(low), low)


@triton.jit  # type: ignore[untyped-decorator]
def _divide(w_in, high_out, low_out, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write numbers as sums of two."""
    entries = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    w = tl.load(w_in + entries, mask=entries < n, other=0.0)
    high = _rounded(w)
    tl.store(high_out + entries, high, mask=entries < n)
    tl.store(low_out + entries, _rest(w, high), mask=entries < n)


@triton.jit(do_not_specialize=["M", "tokens"])  # type: ignore[untyped-decorator]
def _layer(  # type: ignore[no-untyped-def]
    x_in,
    high_in,
    low_in,
    out,
    M,
    N,
    K,
    tokens,
    x_row,
    x_token,
    ADD: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    STRIP: tl.constexpr,
):
    """One tile of the result."""
    tiles = tl.cdiv(M, ROWS)
    strip = tl.program_id(0) // (STRIP * tiles) * STRIP
    inside = tl.program_id(0) % (STRIP * tiles)
    wide = tl.minimum(tl.cdiv(N, COLUMNS) - strip, STRIP)
    m = inside // wide * ROWS + tl.arange(0, ROWS)
    n = (strip + inside % wide) * COLUMNS + tl.arange(0, COLUMNS)
    x_in += (m // tokens).to(tl.int64)[:, None] * x_row + (m % tokens).to(tl.int64)[
        :, None
    ] * x_token
    w_at = n.to(tl.int64)[:, None] * K
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for begin in range(0, K, DEPTH):
        k = begin + tl.arange(0, DEPTH)[None, :]
        x = tl.load(x_in + k, mask=(m[:, None] < M) & (k < K), other=0.0)
        w_high = tl.load(high_in + w_at + k, mask=(n[:, None] < N) & (k < K), other=0.0)
        w_low = tl.load(low_in + w_at + k, mask=(n[:, None] < N) & (k < K), other=0.0)
        high = _rounded(x)
        low = _rest(x, high)
        some = tl.dot(low, tl.trans(w_high), input_precision="tf32")
        some = tl.dot(high, tl.trans(w_low), some, input_precision="tf32")
        some = tl.dot(high, tl.trans(w_high), some, input_precision="tf32")
        total += some  # not on tensor cores, where long sums lose digits
    where = out + m.to(tl.int64)[:, None] * N + n[None, :]
    known = (m[:, None] < M) & (n[None, :] < N)
    if ADD:
        total += tl.load(where, mask=known, other=0.0)
    tl.store(where, total, mask=known)


def multiply_rows(rows: Tensor, weight: Tensor, out: Tensor | None, add: bool) -> Tensor:
    """Return ``rows @ weight.T``, written to a tensor or added to it if there is one."""
    x = rows.reshape(len(rows), -1, rows.shape[-1])
    x = x if x.stride(-1) == 1 else x.contiguous()
    weight = weight.contiguous()
    (k, tokens, K), N = x.shape, len(weight)
    if out is None:
        out = x.new_empty((*rows.shape[:-1], N))
    high, low = weight.new_empty((2, *weight.shape))
    with torch.cuda.device(x.device):
        _divide[(triton.cdiv(weight.numel(), BLOCK),)](
            weight, high, low, weight.numel(), BLOCK=BLOCK
        )
        _layer[(triton.cdiv(k * tokens, ROWS) * triton.cdiv(N, COLUMNS),)](
            *(x, high, low, out, k * tokens, N, K, tokens, x.stride(0), x.stride(1)),
            ADD=add,
            ROWS=ROWS,
            COLUMNS=COLUMNS,
            DEPTH=DEPTH,
            STRIP=STRIP,
            num_warps=8,
            num_stages=3,
        )
    return out
