"""Root mean square norms written out in single operations, found on a tape and made one operation.

    x * rsqrt(mean(x^2) + eps)

Most language models write them this way, with x converted to float32 before and back after it. As
one operation without conversions they take few passes over memory (``normalize.standardize``).
"""

from __future__ import annotations

from typing import Any

from newton_summary.derivatives.norms import standardize
from newton_summary.derivatives.sweep.eager_attention import Joining
from newton_summary.derivatives.sweep.rules.linear import SAME_ORDER
from newton_summary.derivatives.sweep.tape import Op, Tape, Value


class JoiningNorms(Joining):
    """What makes and uses the values of a tape, to find norms."""

    def __init__(self, tape: Tape):
        """Look at all operations."""
        super().__init__(tape)
        self.takers = {slot: op for op in tape.ops for slot in op.inputs}  # the last one of each

    def joined(self, op: Op) -> list[Op] | None:
        """Return a norm as one operation, given its last product; None if it is not one."""
        if op.name != "mul" or op.complex or not all(isinstance(x, Value) for x in op.args):
            return None
        for x, root in (op.args, op.args[::-1]):
            found = self._mean_square(x, root)
            if found is not None:
                dims, eps, between = found
                self.gone.update(between, [op])
                before, after = self._converted(x, op.out)
                return [Op("standardize", standardize, (before, dims, eps, False), {}, [after])]
        return None

    def _mean_square(self, x: Value, root: Value) -> tuple[list[int], float, list[Op]] | None:
        """Return dimensions, eps and operations of rsqrt(mean(x^2) + eps)."""
        between = []
        y: Any = root
        for name in ("rsqrt", "add", "mean", "pow"):
            op = self.maker(y)
            if op is None or op.name != name:
                return None
            between.append(op)
            y = op.args[0]
        _, add, mean, power = between
        dims = mean.kwargs.get("dim", mean.args[1] if len(mean.args) > 1 else None)
        kept = mean.kwargs.get("keepdim", mean.args[2] if len(mean.args) > 2 else False)
        plain = not add.kwargs and not power.kwargs and power.args[1] == 2 and kept
        if not plain or y.slot != x.slot or not isinstance(add.args[1], float) or dims is None:
            return None
        return [dims] if isinstance(dims, int) else list(dims), add.args[1], between

    def _converted(self, x: Value, y: Value) -> tuple[Value, Value]:
        """Return x as it was before it was converted for the norm alone, and y after it was."""
        op = self.maker(x, only_use=False)
        if op is not None and _converts(op) and self.users[x.slot or 0] == 2:
            before = op.args[0]
            if before.readable:
                self.gone.add(op)
                x = before
        op = self.takers.get(y.slot or 0)
        if op is not None and _converts(op) and self.users[y.slot or 0] == 1:
            self.gone.add(op)
            y = op.out
        return x, y


def _converts(op: Op) -> bool:
    return op.name in SAME_ORDER and bool(op.args[0].tensor.shape == op.out.tensor.shape)
