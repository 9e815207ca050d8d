"""Functions applied entry by entry, and products of two values that both move.

Such as a gate and what passes it:

    y1 = a1 b + a b1
    y2 = a2 b + a b2 + 2 a1 b1
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from newton_summary.derivatives.sweep.kernels import Piece

BLOCK = 1024  # entries that one program handles, for all groups


@triton.jit(do_not_specialize=["start", "k", "k1", "k2"])  # type: ignore[untyped-decorator]
def _elementwise(  # type: ignore[no-untyped-def]
    x1_in,
    x2_in,
    f1_in,
    f2_in,
    f3_in,
    delta_in,
    rows_out,
    x1_out,
    work_out,
    sums_out,
    start,
    k,
    n,
    k1,
    k2,
    THIRD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    programs = tl.num_programs(0).to(tl.int64)
    entries = program * BLOCK + tl.arange(0, BLOCK)
    inside = entries < n
    f1 = tl.load(f1_in + entries, mask=inside, other=0.0)
    f2 = tl.load(f2_in + entries, mask=inside, other=0.0)
    if delta_in is not None:
        delta = tl.load(delta_in + entries, mask=inside, other=0.0)
        c2 = delta * f2
        if f3_in is not None:
            c3 = delta * tl.load(f3_in + entries, mask=inside, other=0.0)
    for i in range(k1):
        row = tl.cast(i, tl.int64) * n + entries
        target = tl.cast(start + i, tl.int64) * n + entries
        x1 = tl.load(x1_in + row, mask=inside, other=0.0).to(f1.dtype)
        if THIRD:
            x2 = tl.load(x2_in + row, mask=inside & (i < k2), other=0.0).to(f1.dtype)
        if rows_out is not None:
            tl.store(rows_out + target, f1 * x1, mask=inside)
            if THIRD:
                second = tl.cast(k + start + i, tl.int64) * n + entries
                tl.store(rows_out + second, f2 * x1 * x1 + f1 * x2, mask=inside)
        if x1_out is not None:
            tl.store(x1_out + target, x1, mask=inside)
        if delta_in is not None:
            work = c2 * x1
            tl.store(work_out + target, work, mask=inside)
            if THIRD:
                term = 3.0 * work * x2
                if f3_in is not None:
                    term += c3 * x1 * x1 * x1
                place = tl.cast(start + i, tl.int64) * programs + program
                tl.store(sums_out + place, tl.sum(tl.where(inside, term, 0.0)))


def pass_elementwise(
    parts: list[Piece],
    f1: Tensor,
    f2: Tensor,
    f3: Tensor | None,
    delta: Tensor | None,
    third: bool,
    wanted: bool,
) -> tuple[Tensor | None, Tensor, Tensor | None, Tensor | None]:
    """Pass a curved function with the derivatives f1, f2 and f3; return what ``Passed`` has.

    Rows of bfloat16 go with derivatives in float32.
    """
    k, n = sum(len(part.x1) for part in parts), f1.numel()
    blocks, stack = triton.cdiv(n, BLOCK), parts[0].x1
    rows = stack.new_empty(((2 if third else 1) * k, *f1.shape)) if wanted else None
    work = None if delta is None else stack.new_empty((k, *f1.shape))
    copy = None if work is None or len(parts) == 1 else torch.empty_like(work)
    sums = f1.new_empty((k, blocks)) if third and delta is not None else None
    given = [None if x is None else x.to(f1.dtype).contiguous() for x in (f1, f2, f3, delta)]
    for part in parts:
        with torch.cuda.device(f1.device):
            _elementwise[(blocks,)](
                *(part.x1, part.x2, *given, rows, copy, work, sums),
                *(part.start, k, n, len(part.x1), len(part.x2)),
                THIRD=third,
                BLOCK=BLOCK,
            )
    return rows, stack if copy is None else copy, work, None if sums is None else sums.sum(1)


@triton.jit(do_not_specialize=["k", "ka", "kb"])  # type: ignore[untyped-decorator]
def _product(  # type: ignore[no-untyped-def]
    a_in,
    b_in,
    delta_in,
    a1_in,
    a2_in,
    b1_in,
    b2_in,
    rows_out,
    work_out,
    sums_out,
    n,
    k,
    ka,
    kb,
    THIRD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    programs = tl.num_programs(0).to(tl.int64)
    entries = program * BLOCK + tl.arange(0, BLOCK)
    inside = entries < n
    a = tl.load(a_in + entries, mask=inside, other=0.0)
    b = tl.load(b_in + entries, mask=inside, other=0.0)
    if delta_in is not None:
        delta = tl.load(delta_in + entries, mask=inside, other=0.0)
    for i in range(k):
        row = tl.cast(i, tl.int64) * n + entries
        a1 = tl.load(a1_in + row, mask=inside, other=0.0).to(a.dtype)
        b1 = tl.load(b1_in + row, mask=inside, other=0.0).to(a.dtype)
        if THIRD:
            a2 = tl.load(a2_in + row, mask=inside & (i < ka), other=0.0).to(a.dtype)
            b2 = tl.load(b2_in + row, mask=inside & (i < kb), other=0.0).to(a.dtype)
        if rows_out is not None:
            tl.store(rows_out + row, a1 * b + a * b1, mask=inside)
            if THIRD:
                below = tl.cast(k + i, tl.int64) * n + entries
                tl.store(rows_out + below, a2 * b + a * b2 + 2.0 * a1 * b1, mask=inside)
        if delta_in is not None:
            tl.store(work_out + row, 2.0 * delta * b1, mask=inside)
            if THIRD:
                term = tl.where(inside, 3.0 * delta * (a1 * b2 + a2 * b1), 0.0)
                tl.store(sums_out + tl.cast(i, tl.int64) * programs + program, tl.sum(term))


def pass_product(
    A: Piece, B: Piece, a: Tensor, b: Tensor, delta: Tensor | None, third: bool, wanted: bool
) -> tuple[Tensor | None, Tensor, Tensor | None, Tensor | None]:
    """Pass a product of two values with the same groups; return what ``Passed`` has.

    There, x1 is a1 and work is 2 delta b1: Hbar is made symmetric in the end.
    """
    k, n = len(A.x1), a.numel()
    blocks = triton.cdiv(n, BLOCK)
    wide = torch.promote_types(a.dtype, torch.float32)
    given = [None if x is None else x.to(wide).contiguous() for x in (a, b, delta)]
    rows = A.x1.new_empty(((2 if third else 1) * k, *a.shape)) if wanted else None
    work = None if delta is None else torch.empty_like(A.x1)
    sums = a.new_empty((k, blocks), dtype=wide) if third and delta is not None else None
    with torch.cuda.device(a.device):
        _product[(blocks,)](
            *(*given, A.x1, A.x2, B.x1, B.x2, rows, work, sums, n, k, len(A.x2), len(B.x2)),
            THIRD=third,
            BLOCK=BLOCK,
        )
    return rows, A.x1, work, None if sums is None else sums.sum(1)
