"""Rotary embeddings written out in single operations, found on a tape and made one operation.

    x * cos + cat(-x[..., d/2:], x[..., :d/2]) * sin

Most language models turn their queries and keys this way, by angles that no parameter moves. As one
operation they take half as many passes over memory (``linear.rotated``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from newton_summary.derivatives.sweep.eager_attention import Joining
from newton_summary.derivatives.sweep.rules.linear import rotated
from newton_summary.derivatives.sweep.sample_runs import JOINS, VIEWS
from newton_summary.derivatives.sweep.tape import Op, Value, find_values, map_tree


class JoiningRotations(Joining):
    """What makes and uses the values of a tape, to find rotations."""

    def joined(self, op: Op) -> list[Op] | None:
        """Return a rotation as one operation, given its sum; None if it is not one."""
        if op.name != "add" or op.complex or op.kwargs or len(op.args) != 2:
            return None
        for a, b in (op.args, op.args[::-1]):
            kept, swapped = self.maker(a), self.maker(b)
            x, cos = _times_constant(kept)
            halves, sin = _times_constant(swapped)
            between = self._halves_of(x, halves)
            if between is None or not _fit(op.out, x, cos, sin):
                continue
            self.gone.update(between, [kept, swapped])  # type: ignore[list-item]
            return [Op("rotated", rotated, (x, cos, sin), {}, op.outputs)]
        return None

    def _halves_of(self, x: Value | None, halves: Value | None) -> list[Op] | None:
        """Return the operations of cat(-x[..., d/2:], x[..., :d/2]); None if it is not that.

        Joined along another dimension, they would not have the shape that :func:`_fit` asks for.
        """
        cat = self.maker(halves)
        if x is None or x.tensor.dim() == 0 or cat is None:
            return None
        if cat.name not in JOINS or len(cat.args[0]) != 2:
            return None
        negative, left = cat.args[0]
        negation, taking_left = self.maker(negative), self.maker(left)
        if negation is None or taking_left is None or negation.name not in ("neg", "negative"):
            return None
        taking_right = self.maker(negation.args[0])
        columns = _columns(taking_right, x, negation.args[0]) + _columns(taking_left, x, left)
        d = x.tensor.shape[-1]
        if taking_right is None or d % 2:
            return None
        swapped = [*range(d // 2, d), *range(d // 2)]
        return [cat, negation, taking_left, taking_right] if columns == swapped else None


def _times_constant(op: Op | None) -> tuple[Value | None, Any]:
    """Return a value and what it is multiplied by, if no parameter moves that."""
    if op is not None and op.name in ("mul", "multiply"):
        for x, factor in (op.args, op.args[::-1]):
            if isinstance(x, Value) and isinstance(factor, Value) and factor.slot is None:
                return x, factor
    return None, None


def _fit(y: Value, x: Value | None, *factors: Value) -> bool:
    """Whether only x has to be read, entry by entry, to make y."""
    if x is None or x.tensor.shape != y.tensor.shape:
        return False
    columns = x.tensor.shape[-1:]
    return all(f.tensor.shape[-1:] == columns and f.tensor.dtype == x.tensor.dtype for f in factors)


def _columns(op: Op | None, x: Value, part: Value) -> list[int]:
    """Return which columns of x an operation takes as this part; none if it does anything else."""
    if op is None or op.name not in VIEWS:
        return []
    given, shape = (op.args, op.kwargs), x.tensor.shape
    if [v.slot for v in find_values(given)] != [x.slot]:
        return []
    numbers = torch.arange(shape[-1]).expand(shape)
    args, kwargs = map_tree(lambda y: numbers if isinstance(y, Value) else y, given)
    parts = op.func(*args, **kwargs)
    taken = parts if isinstance(parts, Tensor) else parts[op.outputs.index(part)]
    if taken.shape[:-1] != shape[:-1] or 0 in shape or not taken._is_view():
        return []  # an index of several numbers is no view: it may also reorder rows
    found: list[int] = taken[(0,) * (len(shape) - 1)].tolist()
    return found
