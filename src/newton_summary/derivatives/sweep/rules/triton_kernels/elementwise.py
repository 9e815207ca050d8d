"""Functions applied entry by entry."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from newton_summary.derivatives.sweep.rules.fused import Piece


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
        x1 = tl.load(x1_in + row, mask=inside, other=0.0)
        if THIRD:
            x2 = tl.load(x2_in + row, mask=inside & (i < k2), other=0.0)
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
    piece: Piece,
    curved: list[Tensor | None],
    rows: Tensor | None,
    x1: Tensor | None,
    work: Tensor | None,
    sums: Tensor | None,
    start: int,
    k: int,
    n: int,
    block: int,
) -> None:
    """Pass one piece: write y1 and y2 to ``rows``, x1, delta f'' x1 and the partial sums of D3.

    Args:
        piece: x1 and x2 of consecutive groups.
        curved: f', f'', f''' and delta, the last two None for zero.
        rows: (2 k, ...), or (k, ...) where no second derivatives are wanted.
        x1: (k, ...), where a copy of x1 is wanted.
        work: (k, ...), where there is a delta.
        sums: (k, programs), where there is a delta and the third order is wanted.
        start: Place of the piece's first group.
        k: Number of groups of all pieces.
        n: Entries in a row.
        block: Entries for one program.
    """
    f1, f2, f3, delta = curved
    assert f1 is not None
    anything: Any = f1  # in the place of what is not there, and is not touched
    third = sums is not None or (rows is not None and len(rows) == 2 * k)
    k2 = 0 if piece.x2 is None else len(piece.x2)
    with torch.cuda.device(f1.device):
        _elementwise[(triton.cdiv(n, block),)](
            piece.x1,
            anything if piece.x2 is None else piece.x2,
            f1,
            f2,
            anything if f3 is None else f3,
            anything if delta is None else delta,
            anything if rows is None else rows,
            anything if x1 is None else x1,
            anything if work is None else work,
            anything if sums is None else sums,
            start,
            k,
            n,
            len(piece.x1),
            k2,
            HAS_F3=f3 is not None,
            HAS_DELTA=delta is not None,
            WANTED=rows is not None,
            COPY=x1 is not None,
            THIRD=third,
            BLOCK=block,
        )
