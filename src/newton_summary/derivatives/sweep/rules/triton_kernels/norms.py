"""The standardisation in norm layers: sums over a cell, then the result."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from newton_summary.derivatives.sweep.kernels import Piece

BLOCK = 1024  # entries that one program handles, for all groups


@triton.jit(do_not_specialize=["start", "k", "k2"])  # type: ignore[untyped-decorator]
def _norm_sums(  # type: ignore[no-untyped-def]
    x1_in,
    x2_in,
    c_in,
    delta_in,
    means_out,
    sums_out,
    start,
    k,
    k2,
    size,
    cells,
    together,
    THIRD: tl.constexpr,
    CENTRED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    cell = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1).to(tl.int64)
    n = tl.cast(size, tl.int64) * cells  # numbers in a row
    x1_in += i * n
    x2_in += i * n
    has_x2 = i < k2
    place = cell * together
    wide: tl.constexpr = c_in.dtype.element_ty
    zero = tl.zeros((BLOCK,), dtype=wide)
    mean1, mean2 = 0.0, 0.0
    if CENTRED:
        first1 = tl.load(x1_in + place).to(wide)
        if THIRD:
            first2 = tl.load(x2_in + place, mask=has_x2, other=0.0).to(wide)
        total1, total2 = zero, zero
        for begin in range(0, size, BLOCK):
            e = begin + tl.arange(0, BLOCK)
            inside = e < size
            where = (e // together).to(tl.int64) * cells * together + place + e % together
            x1 = tl.load(x1_in + where, mask=inside, other=0.0).to(wide)
            total1 += tl.where(inside, x1 - first1, 0.0)
            if THIRD:
                x2 = tl.load(x2_in + where, mask=inside & has_x2, other=0.0).to(wide)
                total2 += tl.where(inside, x2 - first2, 0.0)
        mean1 = first1 + tl.sum(total1) / size
        if THIRD:
            mean2 = first2 + tl.sum(total2) / size
    out = (start + i) * cells + cell
    step = tl.cast(k, tl.int64) * cells
    tl.store(means_out + out, mean1)
    if THIRD:
        tl.store(means_out + step + out, mean2)
    c_c1, c1_c1, delta_c1 = zero, zero, zero
    c_c2, delta_c2, c1_c2 = zero, zero, zero
    for begin in range(0, size, BLOCK):
        e = begin + tl.arange(0, BLOCK)
        inside = e < size
        where = (e // together).to(tl.int64) * cells * together + place + e % together
        c = tl.load(c_in + where, mask=inside, other=0.0)
        c1 = tl.where(inside, tl.load(x1_in + where, mask=inside, other=0.0).to(wide) - mean1, 0.0)
        c_c1 += c * c1
        if delta_in is not None:
            delta = tl.load(delta_in + where, mask=inside, other=0.0)
            delta_c1 += delta * c1
        if THIRD:
            c1_c1 += c1 * c1
            x2 = tl.load(x2_in + where, mask=inside & has_x2, other=0.0).to(wide)
            c2 = tl.where(inside, x2 - mean2, 0.0)
            c_c2 += c * c2
            c1_c2 += c1 * c2
            if delta_in is not None:
                delta_c2 += delta * c2
    tl.store(sums_out + out, tl.sum(c_c1))
    tl.store(sums_out + step + out, tl.sum(c1_c1))
    tl.store(sums_out + 2 * step + out, tl.sum(delta_c1))
    tl.store(sums_out + 3 * step + out, tl.sum(c_c2))
    tl.store(sums_out + 4 * step + out, tl.sum(delta_c2))
    tl.store(sums_out + 5 * step + out, tl.sum(c1_c2))


def norm_sums(
    parts: list[Piece],
    c: Tensor,
    delta: Tensor | None,
    sizes: tuple[int, int, int],
    third: bool,
    centred: bool,
) -> tuple[Tensor, Tensor]:
    """Return the means of x1 and x2 over each cell, (2, k, cells), and the sums of products.

    The means are zero if not centred; the latter are (6, k, cells), in the order of ``Sums``. Of c
    and delta, (N, cells, L) numbers in memory, ``sizes`` has N, cells and L.
    """
    N, cells, together = sizes
    k = sum(len(part.x1) for part in parts)
    means, sums = c.new_empty((2, k, cells)), c.new_empty((6, k, cells))
    for part in parts:
        with torch.cuda.device(c.device):
            _norm_sums[(cells, len(part.x1))](
                *(part.x1, part.x2, c, delta, means, sums),
                *(part.start, k, len(part.x2), N * together, cells, together),
                THIRD=third,
                CENTRED=centred,
                BLOCK=min(1024, triton.next_power_of_2(N * together)),
            )
    return means, sums


@triton.jit(do_not_specialize=["start", "k", "k1", "k2", "begin", "end"])  # type: ignore[untyped-decorator]
def _standardized(  # type: ignore[no-untyped-def]
    x1_in,
    x2_in,
    c_in,
    means_in,
    r_in,
    r1_in,
    r2_in,
    weight_in,
    rows_out,
    pair_out,
    start,
    k,
    n,
    k1,
    k2,
    cells,
    together,
    begin,
    end,
    BLOCK: tl.constexpr,
):
    entries = begin + tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = entries < end
    cell = (entries // together) % cells
    if rows_out is not None:
        c = tl.load(c_in + entries, mask=inside, other=0.0)
        r = tl.load(r_in + cell, mask=inside, other=0.0)
    if weight_in is not None:
        weight = tl.load(weight_in + cell, mask=inside, other=0.0)
    for i in range(k1):
        row = tl.cast(i, tl.int64) * n + entries
        target = tl.cast(start + i, tl.int64) * n + entries
        group = tl.cast(start + i, tl.int64) * cells + cell
        mean1 = tl.load(means_in + group, mask=inside, other=0.0)
        c1 = tl.load(x1_in + row, mask=inside, other=0.0).to(mean1.dtype) - mean1
        if rows_out is not None:
            r1 = tl.load(r1_in + group, mask=inside, other=0.0)
            tl.store(rows_out + target, c1 * r + c * r1, mask=inside)
            if r2_in is not None:
                r2 = tl.load(r2_in + group, mask=inside, other=0.0)
                second = tl.cast(k, tl.int64) * cells + group
                mean2 = tl.load(means_in + second, mask=inside, other=0.0)
                c2 = tl.load(x2_in + row, mask=inside & (i < k2), other=0.0).to(mean1.dtype) - mean2
                below = tl.cast(k + start + i, tl.int64) * n + entries
                tl.store(rows_out + below, 2.0 * c1 * r1 + c * r2 + c2 * r, mask=inside)
        if weight_in is not None:
            some = tl.cast(end - begin, tl.int64)
            pair = tl.cast(start + i, tl.int64) * some + entries - begin
            tl.store(pair_out + pair, c1, mask=inside)
            tl.store(pair_out + k * some + pair, c1 * weight, mask=inside)


def standardized(
    parts: list[Piece],
    c: Tensor,
    means: Tensor,
    factors: list[Tensor | None],
    sizes: tuple[int, int, int],
    rows: Tensor | None,
    entries: slice,
) -> Tensor | None:
    """Write y1 and y2 to the rows, where wanted; return c1 without and with its weight, (2, k, n).

    Of all entries of c, n are done. The factors are r, its derivatives r1 and r2, and the weight;
    the last two may be None.
    """
    given = [None if x is None else x.contiguous() for x in factors]
    _, cells, together = sizes
    k, n = means.shape[1], entries.stop - entries.start
    pair = None if given[-1] is None else parts[0].x1.new_empty((2, k, n))
    for part in parts:
        with torch.cuda.device(c.device):
            _standardized[(triton.cdiv(n, BLOCK),)](
                *(part.x1, part.x2, c, means, *given, rows, pair),
                *(part.start, k, c.numel(), len(part.x1), len(part.x2), cells, together),
                *(entries.start, entries.stop),
                BLOCK=BLOCK,
            )
    return pair
