"""Few passes over memory instead of many, on a GPU that Triton knows.

:func:`pass_elementwise` is for functions applied entry by entry. The formulas are those of
``elementwise``; written as torch operations they read and write the stack of derivatives eleven
times, which is most of a sweep's time in a convolutional network. :func:`pass_softmax` is for
softmax and its logarithm; the formulas are those of ``normalize``, as they are for norm layers in
``fused_norms``.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from newton_summary.derivatives.sweep.tape import Contributions, Tangent, Unjoined, gram

BLOCK = 1024  # entries that one program handles, for all groups


class Piece(NamedTuple):
    """Rows of consecutive groups, as they lie in memory."""

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
        triton_kernels.pass_elementwise(
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


def pass_elementwise(
    t: Tangent,
    f1: Tensor,
    f2: Tensor,
    f3: Tensor | None,
    delta: Tensor | None,
    order: int,
    wanted: bool,
) -> Passed | None:
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
    for start, piece in started(parts):
        module.pass_elementwise(
            piece, curved, rows, None if alone else x1, work, sums, start, k, n, BLOCK
        )
    return Passed(rows, x1, work, None if sums is None else sums.sum(1))


# --- softmax -------------------------------------------------------------------------------------


def pass_softmax(
    t: Tangent, p: Tensor, weight: Tensor | None, d: int, third: bool, wanted: bool, log: bool
) -> Passed | None:
    """Pass a softmax, or its logarithm; None if it cannot be done here.

    The arguments are those of ``normalize.pass_softmax``, with ``third`` for the order.
    """
    if d != -1 or not available(p):
        return None
    parts = pieces(t)
    if parts is None or any(part.x1.dtype != p.dtype for part in parts):
        return None
    k = len(t.first)
    p = p.contiguous()
    rows = p.new_empty(((2 if third else 1) * k, *p.shape)) if wanted else None
    pair = None if weight is None else p.new_empty((2, k, *p.shape))  # c1, and weighted
    sums = p.new_empty((k, p.shape[:-1].numel())) if third and weight is not None else None
    weight = None if weight is None else weight.to(p.dtype).contiguous()
    for start, part in started(parts):
        compiled().pass_softmax(part, p, weight, rows, pair, sums, start, k, third, log)
    return Passed(
        rows,
        p if pair is None else pair[0],
        None if pair is None else pair[1],
        None if sums is None else sums.sum(1),
    )


def started(parts: list[Piece]) -> Iterator[tuple[int, Piece]]:
    """Give the pieces, each with the place of its first group."""
    start = 0
    for part in parts:
        yield start, part
        start += len(part.x1)


def compiled() -> ModuleType:
    """Return the kernels, which are known to be there."""
    module = kernels()
    assert module is not None
    return module
