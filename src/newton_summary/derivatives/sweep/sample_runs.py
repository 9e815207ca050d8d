"""Attentions, and what leads to them and away from them, passed for some samples at a time.

Tokens meet in an attention, but samples do not. Its queries, keys and values are three times as
wide as what they are made of, and what its result is added to waits meanwhile. From one narrow
place of the network to the next, such as from one sum of the residual stream to the next, some
samples are passed at a time, so that the derivatives of queries, keys and values along all groups
are never held as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from newton_summary.derivatives.sweep.rules.attention import ATTENTION
from newton_summary.derivatives.sweep.rules.linear import SAME_ORDER
from newton_summary.derivatives.sweep.tape import Op, Tape, Value, find_values, map_tree
from newton_summary.derivatives.sweep.token_runs import (
    ONE_VALUE,
    TWO_VALUES,
    TokenRun,
    Tokens,
    at_a_time,
)

REACH = 40  # operations before and behind an attention, at most
ALIGNED = {*ONE_VALUE, *TWO_VALUES, *ATTENTION} - {*SAME_ORDER}  # whose arguments are broadcast
VIEWS = {*("transpose", "permute", "unbind", "split", "chunk", "split_with_sizes", "__getitem__")}


def some_of(x: Tensor, dim: int, some: slice | Tensor) -> Tensor:
    """Return some entries along a dimension."""
    index = (slice(None),) * dim + (some,)
    return x[index]


class Samples(Tokens):
    """The samples of a run; each value has them in a dimension of its own."""

    fewest = 1

    def __init__(self, count: int):
        self.samples = count
        self.dims: dict[int, int] = {}  # slot -> where its samples are

    def part(
        self, x: Tensor, some: slice | Tensor, stacked: bool = False, slot: int | None = None
    ) -> Tensor:
        """Return some samples of the value in a slot, or of a stack of its derivatives."""
        assert slot is not None
        return some_of(x, self.dims[slot] + stacked, some)

    def cut_slots(self, ops: list[Op]) -> set[int]:
        """Return the slots of which a run takes some samples at a time."""
        return set(self.dims)

    def cut_op(self, op: Op, some: slice | Tensor) -> Op:
        """Return an operation as it would have been for some of the samples."""
        y = op.out

        def cut(x: Any) -> Any:
            if not isinstance(x, Value):
                return x
            is_mask = x.slot is None and op.name in ALIGNED
            dim = self._beside(x, y) if is_mask else self.dims.get(x.slot)  # type: ignore[arg-type]
            return x if dim is None else x.cut(lambda t: some_of(t, dim, some))

        return replace(
            op,
            args=map_tree(cut, op.args),
            kwargs=map_tree(cut, op.kwargs),
            outputs=[cut(value) for value in op.outputs],
        )

    def _beside(self, x: Value, y: Value) -> int | None:
        """Return where an argument that is broadcast with y has the samples, if it has them."""
        assert y.slot is not None
        dim = self.dims[y.slot] - y.tensor.dim() + x.tensor.dim()
        return dim if dim >= 0 and x.tensor.shape[dim] == self.samples else None

    # --- which operations take each sample on its own ---------------------------------------------

    def follow(self, op: Op) -> bool:
        """Note where the results have their samples; False if they cannot be passed on their own.

        What comes from outside of the run has its samples first.
        """
        found = find_values((op.args, op.kwargs))
        given = [x for x in found if x.slot in self.dims]
        if op.complex or not given or len(op.made) < len(op.outputs):
            return False
        for y in op.made:
            dim = self._dim_of(op, given, y)
            if dim is None or y.slot is None or y.tensor.layout is not torch.strided:
                return False
            self.dims[y.slot] = dim
        return op.name not in ALIGNED or all(
            self._beside(x, op.out) == self.dims.get(x.slot) for x in found if x.slot is not None
        )

    def _dim_of(self, op: Op, given: list[Value], y: Value) -> int | None:
        x = given[0]
        assert x.slot is not None
        dim, shape, result = self.dims[x.slot], x.tensor.shape, y.tensor.shape
        if op.name in ALIGNED:
            last = 3 if op.name in ATTENTION else 0  # dimensions in which a sample is one thing
            return dim + len(result) - len(shape) if dim < len(shape) - last else None
        if len(given) > 1:
            return None
        if op.name == "linear":
            is_input = x is op.args[0] and op.args[1].tensor.dim() == 2
            return dim if is_input and dim < len(shape) - 1 else None
        if op.name == "standardize":
            return None if dim in [d % len(shape) for d in op.args[1]] else dim
        places: Iterator[int] = iter(())
        if op.name in SAME_ORDER:
            before = math.prod(shape[:dim])
            places = (e for e in range(len(result)) if math.prod(result[:e]) == before)
        elif op.name in VIEWS and not any(value is not x for value in find_values(op.args)):
            strides = [int(d == dim) for d in range(len(shape))]
            marked = torch.empty(self.samples, device="meta").as_strided(shape, strides)
            args = map_tree(lambda v: marked if v is x else v, op.args)
            views = op.func(*args, **op.kwargs)
            view = views if isinstance(views, Tensor) else views[op.outputs.index(y)]
            if view._is_view():  # not an index of several numbers, which copies
                places = (e for e, step in enumerate(view.stride()) if step == 1)
        return next((e for e in places if result[e] == self.samples), None)


def find_sample_runs(
    tape: Tape, S: int, order: int, stack_limit: int | None = None
) -> list[TokenRun]:
    """Return a run around each attention of several samples whose derivatives take much memory."""
    elsewhere = {i for logits in tape.chunked for i in logits.ops}
    narrow = carried(tape)
    found: list[TokenRun] = []
    for i, op in enumerate(tape.ops):
        if op.name not in ATTENTION or i in elsewhere or not op.passed:
            continue
        free = [j for j in range(max(0, i - REACH), i + 1) if elsewhere.isdisjoint(range(j, i + 1))]
        for start in sorted(free, key=lambda j: (narrow[j], -j)):
            run, samples = samples_from(tape, start, i, narrow, elsewhere)
            if run:
                values = [y.tensor for j in run for y in tape.ops[j].made]
                some = at_a_time(values, samples, samples.samples, S, order, stack_limit)
                if some < samples.samples:
                    found.append(TokenRun(run, samples.samples, some, S, samples))
                    elsewhere.update(run)
                break
    return found


def carried(tape: Tape) -> list[int]:
    """Return for each operation the bytes of what is made before it and needed from it on."""
    sizes: dict[int, int] = {}
    found, alive = [], 0
    for op in tape.ops:
        found.append(alive)
        for value in op.made:
            if value.slot in tape.needed:
                sizes[value.slot] = value.tensor.numel() * value.tensor.element_size()
                alive += sizes[value.slot]
        alive -= sum(sizes.pop(slot, 0) for slot in op.finishes)
    return [*found, alive]


def samples_from(
    tape: Tape, start: int, attention: int, narrow: list[int], elsewhere: set[int]
) -> tuple[list[int], Samples]:
    """Return the run from a place, through an attention, to the next narrow place; or an empty one.

    Also the samples of its values.
    """
    count = tape.ops[attention].out.tensor.shape[0]
    samples = Samples(count)
    inside = {y.slot for op in tape.ops[start:] for y in op.made}
    for op in tape.ops[start : attention + REACH]:
        for x in find_values((op.args, op.kwargs)):
            outside = x.slot is not None and x.slot not in inside and x.slot not in tape.leaves
            if outside and x.tensor.dim() > 1 and x.tensor.shape[0] == count:
                samples.dims[x.slot] = 0  # type: ignore[index]
    end = start
    while end < min(len(tape.ops), attention + REACH) and end not in elsewhere:
        op = tape.ops[end]
        another = end > attention and op.name in ATTENTION
        if another or not samples.follow(op) or (tape.cut is not None and end == tape.cut.index):
            break
        end += 1
    if count < 2 or end <= attention:
        return [], samples
    last = min(range(attention + 1, end + 1), key=lambda j: (narrow[j], j))
    return list(range(start, last)), samples
