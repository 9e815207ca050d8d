"""Few passes over memory instead of many, on a GPU that Triton knows.

The kernel ``pass_elementwise`` is for functions applied entry by entry. The formulas are those of
``elementwise``; written as torch operations they read and write the stack of derivatives eleven
times, which is most of a sweep's time in a convolutional network. ``pass_softmax`` is for softmax
and its logarithm; the formulas are those of ``normalize``, as they are for norm layers in
``fused_norms``.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from newton_summary.derivatives.sweep.tape import Contributions, Tangent, Unjoined, gram


class Piece(NamedTuple):
    """Rows of consecutive groups, as they lie in memory."""

    start: int  # the place of the first group among all
    x1: Tensor  # (k1, ...)
    x2: Tensor | None  # (k2, ...) of the first k2 of these groups


class Passed(NamedTuple):
    """What a pass gives."""

    rows: Tensor | None  # y1 and y2, joined
    x1: Tensor  # joined; centred, for a softmax
    work: Tensor | None  # x1 times its weight in Hbar, delta f'' in a function of one number
    third: Tensor | None  # the contribution to D3 by group, (k,)


def contributed(sweep: Contributions, t: Tangent, passed: Passed) -> Tangent | None:
    """Add what a pass found, and return the tangent of its result."""
    if passed.work is not None:
        sweep.add_Hbar(t.first, t.first, gram(passed.work, passed.x1))
    if passed.third is not None:
        sweep.add_D3(t.first, passed.third)
    if passed.rows is None:
        return None
    return Tangent(t.first, t.first if sweep.order == 3 else (), passed.rows)


@cache
def kernels() -> ModuleType | None:
    """Return the kernels, where Triton is installed and can compile them."""
    try:
        from newton_summary.derivatives.sweep.rules import triton_kernels

        one = torch.ones(1, device="cuda")
        piece = Piece(0, one[None], None)
        triton_kernels.pass_elementwise([piece], one, one, None, None, False, True)
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
        return [Piece(0, t.y1, t.y2 if t.second else None)]
    found: list[Piece] = []
    start, left = 0, dict(t.second_terms)
    for groups, rows in t.first_terms:
        match = next((g for g in left if g == groups[: len(g)]), None)
        second = None if match is None else left.pop(match)
        second = None if second is None else second.contiguous()
        found.append(Piece(start, rows.contiguous(), second))
        start += len(groups)
    return None if left else found


def run(kernel: str, t: Tangent, y: Tensor, *arguments: Any) -> Passed | None:
    """Pass rows with a kernel, for values like ``y``; None if that cannot be done here."""
    parts = pieces(t) if available(y) else None
    if parts is None or any(part.x1.dtype != y.dtype for part in parts):
        return None
    return Passed(*getattr(kernels(), kernel)(parts, y, *arguments))
