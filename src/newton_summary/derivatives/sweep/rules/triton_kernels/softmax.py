"""Softmax and its logarithm along the last dimension."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from newton_summary.derivatives.sweep.kernels import Piece


@triton.jit(do_not_specialize=["start", "k", "k2", "size"])  # type: ignore[untyped-decorator]
def _softmax(  # type: ignore[no-untyped-def]
    x1_in,
    x2_in,
    p_in,
    weight_in,
    rows_out,
    pair_out,
    sums_out,
    start,
    k,
    k2,
    size,
    THIRD: tl.constexpr,
    LOG: tl.constexpr,
    BLOCK: tl.constexpr,
):
    cell = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1).to(tl.int64)
    cells = tl.num_programs(0).to(tl.int64)
    n = cells * size  # numbers in a row of the stack
    has_x2 = i < k2
    p_in += cell * size
    x1_in += i * n + cell * size
    x2_in += i * n + cell * size
    wide: tl.constexpr = p_in.dtype.element_ty
    zero = tl.zeros((BLOCK,), dtype=wide)
    mean1, mean2, variance = zero, zero, zero
    for begin in range(0, size, BLOCK):
        e = begin + tl.arange(0, BLOCK)
        inside = e < size
        p = tl.load(p_in + e, mask=inside, other=0.0)
        mean1 += p * tl.load(x1_in + e, mask=inside, other=0.0).to(wide)
        if THIRD:
            mean2 += p * tl.load(x2_in + e, mask=inside & has_x2, other=0.0).to(wide)
    m1 = tl.sum(mean1)
    m2 = tl.sum(mean2)
    if THIRD and (rows_out is not None or not LOG):
        for begin in range(0, size, BLOCK):
            e = begin + tl.arange(0, BLOCK)
            inside = e < size
            p = tl.load(p_in + e, mask=inside, other=0.0)
            c1 = tl.load(x1_in + e, mask=inside, other=0.0).to(wide) - m1
            variance += p * c1 * c1
    v = tl.sum(variance)
    third = zero
    out = (start + i) * n + cell * size
    for begin in range(0, size, BLOCK):
        e = begin + tl.arange(0, BLOCK)
        inside = e < size
        c1 = tl.load(x1_in + e, mask=inside, other=0.0).to(wide) - m1
        if THIRD:
            c2 = tl.load(x2_in + e, mask=inside & has_x2, other=0.0).to(wide) - m2
        if rows_out is not None:
            first = c1
            if THIRD:
                second = c2 - v
            if not LOG:
                p = tl.load(p_in + e, mask=inside, other=0.0)
                first = p * c1
                if THIRD:
                    second = p * (c1 * c1 - v + c2)
            tl.store(rows_out + out + e, first, mask=inside)
            if THIRD:
                tl.store(rows_out + tl.cast(k, tl.int64) * n + out + e, second, mask=inside)
        if weight_in is not None:
            work = c1 * tl.load(weight_in + cell * size + e, mask=inside, other=0.0)
            tl.store(pair_out + out + e, c1, mask=inside)
            tl.store(pair_out + tl.cast(k, tl.int64) * n + out + e, work, mask=inside)
            if THIRD:
                cube = c1 * c1 + 3.0 * c2
                if not LOG:
                    cube -= 3.0 * v
                third += tl.where(inside, work * cube, 0.0)
    if sums_out is not None:
        tl.store(sums_out + (start + i) * cells + cell, tl.sum(third))


def pass_softmax(
    parts: list[Piece], p: Tensor, weight: Tensor | None, third: bool, wanted: bool, log: bool
) -> tuple[Tensor | None, Tensor, Tensor | None, Tensor | None]:
    """Pass a softmax p along the last dimension, or its logarithm; return what ``Passed`` has.

    There, x1 is less its mean, and work is that times its weight.
    """
    k, size = sum(len(part.x1) for part in parts), p.shape[-1]
    cells = p.numel() // size
    stack = parts[0].x1
    wide = torch.promote_types(p.dtype, torch.float32)
    given = [None if x is None else x.to(wide).contiguous() for x in (p, weight)]
    rows = stack.new_empty(((2 if third else 1) * k, *p.shape)) if wanted else None
    pair = None if weight is None else stack.new_empty((2, k, *p.shape))
    sums = p.new_empty((k, cells), dtype=wide) if third and weight is not None else None
    for part in parts:
        with torch.cuda.device(p.device):
            _softmax[(cells, len(part.x1))](
                *(part.x1, part.x2, *given, rows, pair, sums),
                *(part.start, k, len(part.x2), size),
                THIRD=third,
                LOG=log,
                BLOCK=min(2048, triton.next_power_of_2(size)),
            )
    c1, work = (p, None) if pair is None else pair
    return rows, c1, work, None if sums is None else sums.sum(1)
