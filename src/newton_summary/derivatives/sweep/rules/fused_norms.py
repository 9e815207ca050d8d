"""The standardisation in norm layers in two passes over memory, on a GPU that Triton supports.

An array is (N, cells, L) numbers in memory. A cell, what is standardized together, are the numbers
with one second index: a channel of a batch norm, a token of a layer norm. The formulas are those of
``normalize``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from newton_summary.derivatives.sweep.kernels import Piece, kernels
from newton_summary.derivatives.sweep.rules import fused
from newton_summary.derivatives.sweep.tape import Tangent, gram, parts_of


class Sums(NamedTuple):
    """Sums over a cell of products of two arrays, for every group: (k, *shape of r).

    c is x less its mean over the cell; c1 and c2 are derivatives of c; delta is the adjoint of y.
    """

    c_c1: Tensor
    c1_c1: Tensor
    delta_c1: Tensor
    c_c2: Tensor
    delta_c2: Tensor
    c1_c2: Tensor


AT_A_TIME = 2**28  # bytes of c1, with and without its weight
EVEN = 2**16  # entries at a time are a multiple of this, which inner products are fast for
FEWEST_TOGETHER = 8  # numbers side by side in memory; with fewer, reading them is slow


def memory_layout(shape: Sequence[int], d: list[int]) -> tuple[int, int, int] | None:
    """Return (N, cells, L) such that an array of this shape is (N, cells, L) numbers in memory.

    The numbers of a cell are those with one second index.

    >>> memory_layout((250, 64, 32, 32), [-4, -2, -1])
    (250, 64, 1024)
    >>> memory_layout((4, 256, 768), [-1])
    (1, 1024, 768)
    """
    ndim = len(shape)
    chosen = sorted(i % ndim for i in d)
    samples = 1 if chosen[:1] == [0] and len(chosen) < ndim else 0
    rest = chosen[samples:]
    first = ndim - len(rest)
    if rest != list(range(first, ndim)) or first < samples:
        return None
    sizes = list(shape)
    together = math.prod(sizes[first:])
    if together < FEWEST_TOGETHER:
        return None
    return math.prod(sizes[:samples]), math.prod(sizes[samples:first]), together


@dataclass
class FusedCentredRows:
    """The rows of x inside a standardisation, in two passes over memory.

    Does what ``normalize.CentredRows`` does, with the same arguments.
    """

    parts: list[Piece]
    c: Tensor
    delta: Tensor | None
    sizes: tuple[int, int, int]
    third: bool
    centred: bool
    cells: torch.Size

    @classmethod
    def make(
        cls, t: Tangent, c: Tensor, delta: Tensor | None, d: list[int], third: bool, centred: bool
    ) -> FusedCentredRows | None:
        """Return them if the rows lie in memory as the kernels need them."""
        sizes = memory_layout(c.shape, d)
        parts = None if sizes is None else fused.pieces_like(t, c)
        if sizes is None or parts is None:
            return None
        cells = torch.Size([1 if i - c.dim() in d else n for i, n in enumerate(c.shape)])
        delta = None if delta is None else delta.contiguous()
        return cls(parts, c.contiguous(), delta, sizes, third, centred, cells)

    def sums(self) -> Sums:
        """Return the sums of products over each cell, for all groups."""
        given = (self.parts, self.c, self.delta, self.sizes, self.third, self.centred)
        self.means, sums = kernels().norm_sums(*given)  # type: ignore[union-attr]
        return Sums(*sums.reshape(*sums.shape[:2], *self.cells))

    def finish(
        self, r: Tensor, r1: Tensor, r2: Tensor | None, weight: Tensor | None, wanted: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the rows of the result, and the weighted products of c1 with itself."""
        k, n = len(r1), self.c.numel()
        stack = self.parts[0].x1
        rows = stack.new_empty(((1 if r2 is None else 2) * k, *self.c.shape)) if wanted else None
        products = None if weight is None else self.c.new_zeros((k, k))
        room = AT_A_TIME // (2 * k * stack.itemsize)
        at_a_time = n if weight is None else max(1, room // EVEN) * EVEN
        for some in parts_of(n, at_a_time):
            given = (self.parts, self.c, self.means, [r, r1, r2, weight], self.sizes, rows, some)
            pair = kernels().standardized(*given)  # type: ignore[union-attr]
            if pair is not None and products is not None:
                products += gram(pair[1], pair[0], symmetric=True)
        return rows, products
