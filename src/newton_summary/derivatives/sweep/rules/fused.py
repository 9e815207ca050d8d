"""Few passes over memory instead of many, on a GPU that Triton supports.

The kernel ``pass_elementwise`` is for functions applied entry by entry. The formulas are those of
``elementwise``; written as torch operations they read and write the stack of derivatives eleven
times, which is most of a sweep's time in a convolutional network. ``pass_softmax`` is for softmax
and its logarithm; the formulas are those of ``normalize``, as they are for norm layers in
``fused_norms``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from newton_summary.derivatives.sweep.kernels import Piece, kernels
from newton_summary.derivatives.sweep.tape import Contributions, Tangent, Unjoined, gram

KNOWN = (torch.float32, torch.float64, torch.bfloat16)
LOW = {torch.float32: torch.bfloat16}  # of rows beside values of a type


class Passed(NamedTuple):
    """The results of a pass."""

    rows: Tensor | None  # y1 and y2, joined
    x1: Tensor  # joined; centred, for a softmax
    work: Tensor | None  # x1 times its weight in Hbar, delta f'' in a function of one number
    third: Tensor | None  # the contribution to D3 by group, (k,)


def contributed(
    sweep: Contributions, t: Tangent, passed: Passed, symmetric: bool = True
) -> Tangent | None:
    """Add what a pass found, and return the tangent of its result.

    ``symmetric`` says that ``work`` is x1 times a weight.
    """
    if passed.work is not None:
        sweep.add_Hbar(t.first, t.first, gram(passed.work, passed.x1, symmetric))
    if passed.third is not None:
        sweep.add_D3(t.first, passed.third)
    if passed.rows is None:
        return None
    return Tangent(t.first, t.first if sweep.order == 3 else (), passed.rows)


def available(y: Tensor) -> bool:
    """Whether a pass can be fused for values like ``y``."""
    return y.is_cuda and y.dtype in KNOWN and kernels() is not None


def pieces(t: Tangent) -> list[Piece] | None:
    """Return the rows of a tangent in pieces that lie in memory one after the other, or None."""
    if not isinstance(t, Unjoined) or t.joined:
        if t.second != t.first[: len(t.second)] or not t.rows.is_contiguous():
            return None
        return [Piece(0, t.y1, t.y2)]
    found: list[Piece] = []
    start, left = 0, dict(t.second_terms)
    for groups, rows in t.first_terms:
        match = next((g for g in left if g == groups[: len(g)]), ())
        second = left.pop(match, rows[:0])
        found.append(Piece(start, rows.contiguous(), second.contiguous()))
        start += len(groups)
    return None if left else found


def pieces_like(t: Tangent, y: Tensor) -> list[Piece] | None:
    """Return pieces that a kernel can pass for values like ``y``, or None.

    Kernels compute in the type of y: rows of bfloat16 may go with values in float32.
    """
    parts = pieces(t) if available(y) else None
    if parts is None:
        return None
    dtypes = {x.dtype for part in parts for x in (part.x1, part.x2)}
    if len(dtypes) > 1 or not dtypes <= {y.dtype, LOW.get(y.dtype, y.dtype)}:
        return None
    return parts


def run_product(
    A: Tangent, B: Tangent, a: Tensor, b: Tensor, y: Tensor, *arguments: Any
) -> Passed | None:
    """Pass a product entry by entry, y = a b; None if that cannot be done here."""
    if A.first != B.first or not a.shape == b.shape == y.shape:
        return None
    parts = [pieces_like(t, y) for t in (A, B)]
    left, right = (None if part is None or len(part) > 1 else part[0] for part in parts)
    if left is None or right is None or left.x1.dtype != right.x1.dtype:
        return None
    return Passed(*kernels().pass_product(left, right, a, b, *arguments))  # type: ignore[union-attr]


def run(kernel: str, t: Tangent, y: Tensor, *arguments: Any) -> Passed | None:
    """Pass rows with a kernel, for values like ``y``; None if that cannot be done here."""
    parts = pieces_like(t, y)
    if parts is None:
        return None
    return Passed(*getattr(kernels(), kernel)(parts, y, *arguments))
