"""Attention written out in single operations, found on a tape and made one operation.

    softmax(q k^T * scale + mask) v

Transformers writes it this way with ``attn_implementation="eager"``, as do many custom models. As
one operation it is passed in tiles, by the rule of ``scaled_dot_product_attention``. A loss that
uses scores or weights elsewhere keeps the single operations, and so does one with dropout, a
learned mask, or anything else between the products.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from newton_summary.derivatives.sweep.rules.attention import in_tiles
from newton_summary.derivatives.sweep.rules.linear import SAME_ORDER
from newton_summary.derivatives.sweep.tape import Op, Tape, Value, is_of_rows

PRODUCT = frozenset(("matmul", "bmm"))
SOFTMAX = frozenset(("softmax", "special_softmax", "_safe_softmax"))


@dataclass
class Scores:
    """What became of q k^T on the way to the softmax."""

    factor: float = 1.0
    mask: Tensor | None = None


class Joining:
    """Which operation made each value on a tape, and how many use it."""

    def __init__(self, tape: Tape):
        """Look at all operations."""
        self.tape = tape
        self.makers = {v.slot: op for op in tape.ops for v in op.outputs if v is not None}
        self.users = Counter(slot for op in tape.ops for slot in op.inputs)
        self.slots = 1 + max(v.slot or 0 for op in tape.ops for v in op.outputs if v is not None)
        self.gone: set[Op] = set()  # what has become part of another operation

    def run(self) -> None:
        """Replace each attention that is written out on the tape by one operation."""
        ops: list[Op] = []
        for op in self.tape.ops:
            ops += self.joined(op) or [op]
        self.tape.ops = [op for op in ops if op not in self.gone]

    def maker(self, value: Any, only_use: bool = True) -> Op | None:
        """Return the operation that made a value, if nothing else uses it."""
        if not isinstance(value, Value) or value.slot not in self.makers:
            return None
        shared = only_use and self.users[value.slot or 0] > 1
        return None if shared else self.makers[value.slot]

    def joined(self, op: Op) -> list[Op] | None:
        """Return an attention as one operation, given its last product; None if it is not one."""
        if op.name not in PRODUCT or op.complex:
            return None
        between: list[Op] = []
        weights, v = op.args
        softmax = self._before_casts(self.maker(weights), between)
        if softmax is None or softmax.name not in SOFTMAX or not is_of_rows(softmax):
            return None
        between.append(softmax)
        scores = Scores()
        product = self._before_casts(self.maker(softmax.args[0]), between)
        while product is not None and product.name not in PRODUCT:
            x = _undone(product, scores)
            between.append(product)
            product = self._before_casts(self.maker(x), between)
        if product is None:
            return None
        q, keys = product.args
        mask = None if scores.mask is None else Value(scores.mask, None)
        if not in_tiles(q.tensor, keys.tensor.mT, v.tensor, scores.mask, 0.0):
            return None
        k, transposing = self._transposed(keys)
        k_once, v_once = self._before_repeating(k), self._before_repeating(v)
        if k_once and v_once and k_once.tensor.shape[:3] == v_once.tensor.shape[:3]:
            k, v = k_once, v_once  # of fewer heads, each repeated for several of queries
        self.gone.update(between, [product])
        slots = [x.slot for x in (q, k, v) if x.slot is not None]
        args, kwargs = (q, k, v, mask), {"scale": scores.factor}
        name = "scaled_dot_product_attention"
        whole = Op(name, getattr(torch._C._nn, name), args, kwargs, op.outputs, None, slots)
        return [*transposing, whole]

    def _before_casts(self, op: Op | None, between: list[Op]) -> Op | None:
        """Return the operation before those that only convert a value."""
        while op is not None and op.name in SAME_ORDER:
            if op.out.tensor.shape != op.args[0].tensor.shape:
                return None
            between.append(op)
            op = self.maker(op.args[0])
        return op

    def _transposed(self, keys: Value) -> tuple[Value, list[Op]]:
        """Return k, given k^T, and the operation that makes it if there is none yet."""
        op = self.maker(keys, only_use=False)
        if op is not None and op.name == "transpose" and not op.args[0].forgotten:
            n = keys.tensor.dim()
            if sorted(d % n for d in op.args[1:3]) == [n - 2, n - 1]:
                return op.args[0], []
        if keys.slot is None:
            return Value(keys.now.mT, None), []
        k = Value(keys.now.mT.detach(), self.slots)
        self.slots += 1
        return k, [Op("mT", torch.transpose, (keys,), {}, [k], None, [keys.slot])]

    def _before_repeating(self, x: Value) -> Value | None:
        """Return the value before (B, H, 1, T, d) was expanded and reshaped to (B, H n, T, d)."""
        chain = []
        for name in (("reshape", "view"), ("expand",), ("__getitem__", "unsqueeze")):
            op = self.maker(x, only_use=False)
            if op is None or op.name not in name:
                return None
            chain.append(tuple(op.out.tensor.shape))
            x = op.args[0]
        if x.tensor.dim() != 4 or x.forgotten:
            return None
        B, H, T, d = x.tensor.shape
        n = chain[1][2] if len(chain[1]) == 5 else 0
        repeated = [(B, H * n, T, d), (B, H, n, T, d), (B, H, 1, T, d)]
        return x if chain == repeated else None


def _undone(op: Op, scores: Scores) -> Value | None:
    """Note what an operation does to the scores, and return what it does it to.

    None if tiles do not support it: they scale the scores first, and mask them once.
    """
    moving = [x for x in op.args if isinstance(x, Value) and x.slot is not None]
    if len(moving) != 1 or op.kwargs or op.out.tensor.shape != moving[0].tensor.shape:
        return None
    x = moving[0]
    others = [y for y in op.args if y is not x]
    if op.name in ("mul", "multiply") and (factor := _number(others[0])) is not None:
        scores.factor *= factor
    elif op.name in ("div", "divide", "true_divide") and op.args[0] is x:
        divisor = _number(others[0])
        if divisor is None:
            return None
        scores.factor /= divisor
    elif scores.mask is not None or scores.factor != 1:
        return None
    elif op.name == "add" and isinstance(others[0], Value):
        scores.mask = others[0].now
    elif op.name == "masked_fill" and _number(others[1]) == -math.inf:
        scores.mask = ~others[0].now
    else:
        return None
    return x


def _number(x: Any) -> float | None:
    """Return a factor as a number; None for one that differs from entry to entry."""
    if isinstance(x, Value):
        return float(x.now) if x.tensor.dim() == 0 and x.tensor.device.type == "cpu" else None
    return float(x)
