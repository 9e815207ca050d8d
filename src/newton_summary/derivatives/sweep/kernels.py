"""The Triton kernels, where there is a GPU that Triton supports."""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor


class Piece(NamedTuple):
    """Rows of consecutive groups, as they lie in memory."""

    start: int  # the place of the first group among all
    x1: Tensor  # (k1, ...)
    x2: Tensor  # (k2, ...) of the first k2 of these groups


@cache
def kernels() -> ModuleType | None:
    """Return the kernels, where Triton is installed and can compile them."""
    try:
        from newton_summary.derivatives.sweep.rules import triton_kernels

        one = torch.ones(1, device="cuda")
        piece = Piece(0, one[None], one[None][:0])
        triton_kernels.pass_elementwise([piece], one, one, None, None, False, True)
    except Exception:  # no Triton, no compiler for its launcher, a GPU that it does not know
        return None
    return triton_kernels
