"""Functions applied entry by entry in one pass over memory, on a GPU that Triton knows.

The formulas are those of ``elementwise``; written as torch operations they read and write the stack
of derivatives eleven times, which is most of a sweep's time in a convolutional network.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from newton_summary.derivatives.sweep.tangent import Tangent, Unjoined

BLOCK = 1024  # entries that one program handles, for all groups


class Piece(NamedTuple):
    """Rows of consecutive groups, as they lie in memory."""

    x1: Tensor  # (k1, ...)
    x2: Tensor | None  # (k2, ...) of the first k2 of these groups


class Bent(NamedTuple):
    """What a pass gives."""

    rows: Tensor | None  # y1 and y2, joined
    x1: Tensor  # joined
    work: Tensor | None  # delta f'' x1
    third: Tensor | None  # <delta, f''' x1^3 + 3 f'' x1 x2> by group, (k,)


@cache
def kernels() -> ModuleType | None:
    """Return the kernels, where Triton is installed and can compile them."""
    try:
        from newton_summary.derivatives.sweep.rules import triton_kernels

        one = torch.ones(1, device="cuda")
        triton_kernels.bend(
            Piece(one[None], None), [one, one, None, None], one, None, None, None, 0, 1, 1, BLOCK
        )
    except Exception:  # no Triton, no compiler for its launcher, a GPU that it does not know
        return None
    return triton_kernels


def available(y: Tensor) -> bool:
    """Whether a pass can be fused for values like ``y``."""
    return y.is_cuda and y.dtype in (torch.float32, torch.float64) and kernels() is not None


def pieces(t: Tangent) -> list[Piece] | None:
    """Return the rows of a tangent in pieces that lie in memory one after the other, or None."""
    if not isinstance(t, Unjoined) or t.joined:
        if t.second != t.first[: len(t.second)] or not t.rows.is_contiguous():
            return None
        return [Piece(t.y1, t.y2 if t.second else None)]
    found = []
    left = dict(t.second_terms)
    for groups, rows in t.first_terms:
        match = next((g for g in left if g == groups[: len(g)]), None)
        second = None if match is None else left.pop(match)
        found.append(Piece(rows.contiguous(), None if second is None else second.contiguous()))
    return None if left else found


def bend(
    t: Tangent,
    f1: Tensor,
    f2: Tensor,
    f3: Tensor | None,
    delta: Tensor | None,
    order: int,
    wanted: bool,
) -> Bent | None:
    """Pass a curved function; None if the rows do not lie in memory as the kernel needs them."""
    parts = pieces(t)
    module = kernels()
    if parts is None or module is None:
        return None
    y = f1
    k, n = len(t.first), y.numel()
    third_order = order == 3
    alone = len(parts) == 1
    curved = [x if x is None else x.to(y.dtype).contiguous() for x in (f1, f2, f3, delta)]
    rows = y.new_empty(((2 if third_order else 1) * k, *y.shape)) if wanted else None
    x1 = parts[0].x1 if alone else y.new_empty((k, *y.shape))
    work = None if delta is None else y.new_empty((k, *y.shape))
    programs = -(-n // BLOCK)
    sums = None if delta is None or not third_order else y.new_empty((k, programs))
    start = 0
    for piece in parts:
        module.bend(piece, curved, rows, None if alone else x1, work, sums, start, k, n, BLOCK)
        start += len(piece.x1)
    return Bent(rows, x1, work, None if sums is None else sums.sum(1))
