"""Functions applied entry by entry."""

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
    HAS_F3: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    WANTED: tl.constexpr,
    COPY: tl.constexpr,
    THIRD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    programs = tl.num_programs(0).to(tl.int64)
    entries = program * BLOCK + tl.arange(0, BLOCK)
    inside = entries < n
    f1 = tl.load(f1_in + entries, mask=inside, other=0.0)
    f2 = tl.load(f2_in + entries, mask=inside, other=0.0)
    if HAS_DELTA:
        delta = tl.load(delta_in + entries, mask=inside, other=0.0)
        c2 = delta * f2
        if HAS_F3:
            c3 = delta * tl.load(f3_in + entries, mask=inside, other=0.0)
    for i in range(k1):
        row = tl.cast(i, tl.int64) * n + entries
        target = tl.cast(start + i, tl.int64) * n + entries
        x1 = tl.load(x1_in + row, mask=inside, other=0.0).to(f1.dtype)
        if THIRD:
            x2 = tl.load(x2_in + row, mask=inside & (i < k2), other=0.0).to(f1.dtype)
        if WANTED:
            tl.store(rows_out + target, f1 * x1, mask=inside)
            if THIRD:
                second = tl.cast(k + start + i, tl.int64) * n + entries
                tl.store(rows_out + second, f2 * x1 * x1 + f1 * x2, mask=inside)
        if COPY:
            tl.store(x1_out + target, x1, mask=inside)
        if HAS_DELTA:
            work = c2 * x1
            tl.store(work_out + target, work, mask=inside)
            if THIRD:
                term = 3.0 * work * x2
                if HAS_F3:
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
    alone, blocks = len(parts) == 1, triton.cdiv(n, BLOCK)
    stack = parts[0].x1
    rows = stack.new_empty(((2 if third else 1) * k, *f1.shape)) if wanted else None
    copied = delta is not None and not alone
    x1 = stack.new_empty((k, *f1.shape)) if copied else stack
    work = None if delta is None else stack.new_empty((k, *f1.shape))
    sums = f1.new_empty((k, blocks)) if third and delta is not None else None
    f1, f2 = f1.contiguous(), f2.to(f1.dtype).contiguous()
    others = [f1 if x is None else x.to(f1.dtype).contiguous() for x in (f3, delta)]
    for part in parts:
        with torch.cuda.device(f1.device):
            _elementwise[(blocks,)](
                part.x1,
                f1 if part.x2 is None else part.x2,  # f1 for what is not there, nor touched
                f1,
                f2,
                *others,
                f1 if rows is None else rows,
                x1,
                f1 if work is None else work,
                f1 if sums is None else sums,
                part.start,
                k,
                n,
                len(part.x1),
                0 if part.x2 is None else len(part.x2),
                HAS_F3=f3 is not None,
                HAS_DELTA=delta is not None,
                WANTED=wanted,
                COPY=copied,
                THIRD=third,
                BLOCK=BLOCK,
            )
    return rows, x1, work, None if sums is None else sums.sum(1)
