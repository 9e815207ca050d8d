"""The kernels behind ``fused``. Imported only where there is a GPU, and only if Triton is there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from newton_summary.derivatives.sweep.rules.fused import Piece


@triton.jit(do_not_specialize=["start", "k", "k1", "k2"])  # type: ignore[untyped-decorator]
def _bend(  # type: ignore[no-untyped-def]
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


def bend(
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
        _bend[(triton.cdiv(n, block),)](
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


@triton.jit(do_not_specialize=["start", "k", "k2", "size"])  # type: ignore[untyped-decorator]
def _under(  # type: ignore[no-untyped-def]
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
    WEIGHTED: tl.constexpr,
    WANTED: tl.constexpr,
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
    weight_in += cell * size
    x1_in += i * n + cell * size
    x2_in += i * n + cell * size
    zero = tl.zeros((BLOCK,), dtype=p_in.dtype.element_ty)
    mean1, mean2, variance = zero, zero, zero
    for begin in range(0, size, BLOCK):
        e = begin + tl.arange(0, BLOCK)
        inside = e < size
        p = tl.load(p_in + e, mask=inside, other=0.0)
        mean1 += p * tl.load(x1_in + e, mask=inside, other=0.0)
        if THIRD:
            mean2 += p * tl.load(x2_in + e, mask=inside & has_x2, other=0.0)
    m1 = tl.sum(mean1)
    m2 = tl.sum(mean2)
    if THIRD and (WANTED or not LOG):
        for begin in range(0, size, BLOCK):
            e = begin + tl.arange(0, BLOCK)
            inside = e < size
            p = tl.load(p_in + e, mask=inside, other=0.0)
            c1 = tl.load(x1_in + e, mask=inside, other=0.0) - m1
            variance += p * c1 * c1
    v = tl.sum(variance)
    third = zero
    out = (start + i) * n + cell * size
    for begin in range(0, size, BLOCK):
        e = begin + tl.arange(0, BLOCK)
        inside = e < size
        c1 = tl.load(x1_in + e, mask=inside, other=0.0) - m1
        if THIRD:
            c2 = tl.load(x2_in + e, mask=inside & has_x2, other=0.0) - m2
        if WANTED:
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
        if WEIGHTED:
            work = c1 * tl.load(weight_in + e, mask=inside, other=0.0)
            tl.store(pair_out + out + e, c1, mask=inside)
            tl.store(pair_out + tl.cast(k, tl.int64) * n + out + e, work, mask=inside)
            if THIRD:
                cube = c1 * c1 + 3.0 * c2
                if not LOG:
                    cube -= 3.0 * v
                third += tl.where(inside, work * cube, 0.0)
    if WEIGHTED and THIRD:
        tl.store(sums_out + (start + i) * cells + cell, tl.sum(third))


def under(
    piece: Piece,
    p: Tensor,
    weight: Tensor | None,
    rows: Tensor | None,
    pair: Tensor | None,
    sums: Tensor | None,
    start: int,
    k: int,
    third: bool,
    log: bool,
) -> None:
    """Pass one piece through a softmax, or its logarithm, along the last dimension.

    Args:
        piece: x1 and x2 of consecutive groups.
        p: The softmax.
        weight: What c1^2 counts for in Hbar, or None.
        rows: Where y1 and y2 go, (2 k, ...) or (k, ...), or None if not wanted.
        pair: Where c1 and c1 times its weight go, (2, k, ...), or None without a weight.
        sums: Where the contributions to D3 go, (k, rows of p), or None.
        start: Place of the piece's first group.
        k: Number of groups of all pieces.
        third: Whether there are second derivatives.
        log: Whether the result is the logarithm.
    """
    size = p.shape[-1]
    with torch.cuda.device(p.device):
        _under[(p.numel() // size, len(piece.x1))](
            piece.x1,
            p if piece.x2 is None else piece.x2,
            p,
            p if weight is None else weight,
            p if rows is None else rows,
            p if pair is None else pair,
            p if sums is None else sums,
            start,
            k,
            0 if piece.x2 is None else len(piece.x2),
            size,
            WEIGHTED=weight is not None,
            WANTED=rows is not None,
            THIRD=third,
            LOG=log,
            BLOCK=min(2048, triton.next_power_of_2(size)),
        )


@triton.jit(do_not_specialize=["start", "k", "k2"])  # type: ignore[untyped-decorator]
def _cell_sums(  # type: ignore[no-untyped-def]
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
    HAS_DELTA: tl.constexpr,
    THIRD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    cell = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1).to(tl.int64)
    n = tl.cast(size, tl.int64) * cells  # numbers in a row
    x1_in += i * n
    x2_in += i * n
    has_x2 = i < k2
    place = cell * together
    first1 = tl.load(x1_in + place)
    if THIRD:
        first2 = tl.load(x2_in + place, mask=has_x2, other=0.0)
    total1 = tl.zeros((BLOCK,), dtype=c_in.dtype.element_ty)
    total2 = tl.zeros((BLOCK,), dtype=c_in.dtype.element_ty)
    for begin in range(0, size, BLOCK):
        e = begin + tl.arange(0, BLOCK)
        inside = e < size
        where = (e // together).to(tl.int64) * cells * together + place + e % together
        x1 = tl.load(x1_in + where, mask=inside, other=0.0)
        total1 += tl.where(inside, x1 - first1, 0.0)
        if THIRD:
            x2 = tl.load(x2_in + where, mask=inside & has_x2, other=0.0)
            total2 += tl.where(inside, x2 - first2, 0.0)
    mean1 = first1 + tl.sum(total1) / size
    out = (start + i) * cells + cell
    step = tl.cast(k, tl.int64) * cells
    tl.store(means_out + out, mean1)
    if THIRD:
        mean2 = first2 + tl.sum(total2) / size
        tl.store(means_out + step + out, mean2)
    c_c1 = tl.zeros((BLOCK,), dtype=c_in.dtype.element_ty)
    c1_c1 = tl.zeros((BLOCK,), dtype=c_in.dtype.element_ty)
    delta_c1 = tl.zeros((BLOCK,), dtype=c_in.dtype.element_ty)
    c_c2 = tl.zeros((BLOCK,), dtype=c_in.dtype.element_ty)
    delta_c2 = tl.zeros((BLOCK,), dtype=c_in.dtype.element_ty)
    c1_c2 = tl.zeros((BLOCK,), dtype=c_in.dtype.element_ty)
    for begin in range(0, size, BLOCK):
        e = begin + tl.arange(0, BLOCK)
        inside = e < size
        where = (e // together).to(tl.int64) * cells * together + place + e % together
        c = tl.load(c_in + where, mask=inside, other=0.0)
        c1 = tl.where(inside, tl.load(x1_in + where, mask=inside, other=0.0) - mean1, 0.0)
        c_c1 += c * c1
        if HAS_DELTA:
            delta = tl.load(delta_in + where, mask=inside, other=0.0)
            delta_c1 += delta * c1
        if THIRD:
            c1_c1 += c1 * c1
            x2 = tl.load(x2_in + where, mask=inside & has_x2, other=0.0)
            c2 = tl.where(inside, x2 - mean2, 0.0)
            c_c2 += c * c2
            c1_c2 += c1 * c2
            if HAS_DELTA:
                delta_c2 += delta * c2
    tl.store(sums_out + out, tl.sum(c_c1))
    tl.store(sums_out + step + out, tl.sum(c1_c1))
    tl.store(sums_out + 2 * step + out, tl.sum(delta_c1))
    tl.store(sums_out + 3 * step + out, tl.sum(c_c2))
    tl.store(sums_out + 4 * step + out, tl.sum(delta_c2))
    tl.store(sums_out + 5 * step + out, tl.sum(c1_c2))


def cell_sums(
    piece: Piece,
    c: Tensor,
    delta: Tensor | None,
    means: Tensor,
    sums: Tensor,
    start: int,
    sizes: tuple[int, int, int],
    third: bool,
) -> None:
    """Write the means of x1 and x2 over each cell, and the sums of products, of one piece.

    Args:
        piece: x1 and x2 of consecutive groups.
        c: x less its mean, (N, cells, L) in memory.
        delta: The adjoint of the result, or None.
        means: (2, k, cells).
        sums: (6, k, cells), in the order of ``Sums``.
        start: Place of the piece's first group.
        sizes: N, cells and L.
        third: Whether there are second derivatives.
    """
    N, cells, together = sizes
    with torch.cuda.device(c.device):
        _cell_sums[(cells, len(piece.x1))](
            piece.x1,
            c if piece.x2 is None else piece.x2,
            c,
            c if delta is None else delta,
            means,
            sums,
            start,
            sums.shape[1],
            0 if piece.x2 is None else len(piece.x2),
            N * together,
            cells,
            together,
            HAS_DELTA=delta is not None,
            THIRD=third,
            BLOCK=min(1024, triton.next_power_of_2(N * together)),
        )


@triton.jit(do_not_specialize=["start", "k", "k1", "k2"])  # type: ignore[untyped-decorator]
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
    WANTED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    THIRD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    entries = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = entries < n
    cell = (entries // together) % cells
    if WANTED:
        c = tl.load(c_in + entries, mask=inside, other=0.0)
        r = tl.load(r_in + cell, mask=inside, other=0.0)
    if WEIGHTED:
        weight = tl.load(weight_in + cell, mask=inside, other=0.0)
    for i in range(k1):
        row = tl.cast(i, tl.int64) * n + entries
        target = tl.cast(start + i, tl.int64) * n + entries
        group = tl.cast(start + i, tl.int64) * cells + cell
        mean1 = tl.load(means_in + group, mask=inside, other=0.0)
        c1 = tl.load(x1_in + row, mask=inside, other=0.0) - mean1
        if WANTED:
            r1 = tl.load(r1_in + group, mask=inside, other=0.0)
            tl.store(rows_out + target, c1 * r + c * r1, mask=inside)
            if THIRD:
                r2 = tl.load(r2_in + group, mask=inside, other=0.0)
                second = tl.cast(k, tl.int64) * cells + group
                mean2 = tl.load(means_in + second, mask=inside, other=0.0)
                c2 = tl.load(x2_in + row, mask=inside & (i < k2), other=0.0) - mean2
                below = tl.cast(k + start + i, tl.int64) * n + entries
                tl.store(rows_out + below, 2.0 * c1 * r1 + c * r2 + c2 * r, mask=inside)
        if WEIGHTED:
            tl.store(pair_out + target, c1, mask=inside)
            tl.store(pair_out + tl.cast(k, tl.int64) * n + target, c1 * weight, mask=inside)


def standardized(
    piece: Piece,
    c: Tensor,
    means: Tensor,
    factors: list[Tensor | None],
    rows: Tensor | None,
    pair: Tensor | None,
    start: int,
    sizes: tuple[int, int, int],
    block: int,
) -> None:
    """Write y1 and y2, and c1 without and with its weight, of one piece.

    Args:
        piece: x1 and x2 of consecutive groups.
        c: x less its mean.
        means: As written by :func:`cell_sums`.
        factors: r, its derivatives r1 and r2, and the weight; the last two may be None.
        rows: (2 k, ...), or (k, ...) without second derivatives, or None if not wanted.
        pair: (2, k, ...), or None without a weight.
        start: Place of the piece's first group.
        sizes: N, cells and L.
        block: Entries for one program.
    """
    r, r1, r2, weight = factors
    N, cells, together = sizes
    n = N * cells * together
    k2 = 0 if piece.x2 is None else len(piece.x2)
    with torch.cuda.device(c.device):
        _standardized[(triton.cdiv(n, block),)](
            piece.x1,
            c if piece.x2 is None else piece.x2,
            c,
            means,
            r,
            r1,
            c if r2 is None else r2,
            c if weight is None else weight,
            c if rows is None else rows,
            c if pair is None else pair,
            start,
            means.shape[1],
            n,
            len(piece.x1),
            k2,
            cells,
            together,
            WANTED=rows is not None,
            WEIGHTED=pair is not None,
            THIRD=r2 is not None,
            BLOCK=block,
        )
