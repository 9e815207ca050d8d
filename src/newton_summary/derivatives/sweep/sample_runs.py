"""Attentions, with the operations before and after them, passed for some samples at a time.

An attention mixes tokens, but not samples. Its queries, keys and values are three times as wide as
what they are made of, and what its result is added to has to be kept meanwhile. From one narrow
place of the network to the next, such as from one sum of the residual stream to the next, some
samples are passed at a time, so that the derivatives of queries, keys and values along all groups
are never held as a whole.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from newton_summary.derivatives.sweep.rules.attention import ATTENTION
from newton_summary.derivatives.sweep.rules.linear import SAME_ORDER, is_view_of_leaf
from newton_summary.derivatives.sweep.tape import Op, Tape, Value, find_values, map_tree
from newton_summary.derivatives.sweep.token_runs import (
    ONE_VALUE,
    TWO_VALUES,
    TokenRun,
    Tokens,
    at_a_time,
)

REACH = 60  # operations before and behind an attention, at most
ALIGNED = {*ONE_VALUE, *TWO_VALUES, *ATTENTION} - {*SAME_ORDER}  # whose arguments are broadcast
JOINS = ("cat", "concat", "concatenate")
SPLITS = ("split", "split_with_sizes", "chunk")
VIEWS = {*SPLITS, "transpose", "permute", "unbind", "expand", "__getitem__"}


class Where(NamedTuple):
    """Where a value has its samples: in one of its dimensions, each with so many entries there."""

    dim: int
    entries: int = 1  # more where samples and tokens were joined to one dimension

    def part(self, x: Tensor, some: slice, stacked: bool = False) -> Tensor:
        """Return some samples of a value, or of a stack of its derivatives."""
        some = slice(some.start * self.entries, some.stop * self.entries)
        return x[(slice(None),) * (self.dim + stacked) + (some,)]


class Samples(Tokens):
    """The samples of a run, of which each value knows where it has them."""

    fewest = 1

    def __init__(self, count: int):
        self.samples = count
        self.places: dict[int | None, Where] = {}  # by slot

    def part(  # type: ignore[override]
        self, x: Tensor, some: slice, stacked: bool = False, slot: int | None = None
    ) -> Tensor:
        """Return some samples of the value in a slot, or of a stack of its derivatives."""
        return self.places[slot].part(x, some, stacked)

    def cut_slots(self, ops: list[Op]) -> set[int]:
        """Return the slots of which a run takes some samples at a time."""
        return {slot for slot in self.places if slot is not None}

    def cut_op(self, op: Op, some: slice) -> Op:  # type: ignore[override]
        """Return an operation as it would have been for some of the samples."""
        y = op.out

        def cut(x: Any) -> Any:
            if not isinstance(x, Value):
                return x
            is_mask = x.slot is None and op.name in ALIGNED
            place = self._beside(x, y) if is_mask else self.places.get(x.slot)
            return x if place is None else x.cut(lambda tensor: place.part(tensor, some))

        return replace(
            op,
            args=map_tree(cut, op.args),
            kwargs=map_tree(cut, op.kwargs),
            outputs=[cut(value) for value in op.outputs],
        )

    def _beside(self, x: Value, y: Value) -> Where | None:
        """Return where an argument that is broadcast with y has the samples, if it has them."""
        dim, entries = self.places[y.slot]
        dim += x.tensor.dim() - y.tensor.dim()
        has_them = dim >= 0 and x.tensor.shape[dim] == self.samples * entries
        return Where(dim, entries) if has_them else None

    # --- which operations take each sample on its own ---------------------------------------------

    def follow(self, op: Op) -> bool:
        """Note where the results have their samples; False if these cannot be passed separately.

        Values from outside the run have their samples first.
        """
        found = find_values((op.args, op.kwargs))
        given = [x for x in found if x.slot in self.places]
        if op.complex or not given or len(op.made) < len(op.outputs):
            return False
        for y in op.made:
            place = self._place_of(op, given, y)
            if place is None or y.tensor.layout is not torch.strided:
                return False
            self.places[y.slot] = place
        return op.name not in ALIGNED or all(
            self._beside(x, op.out) == self.places.get(x.slot) for x in found if x.slot is not None
        )

    def _place_of(self, op: Op, given: list[Value], y: Value) -> Where | None:
        x = given[0]
        place, shape, result = self.places[x.slot], x.tensor.shape, y.tensor.shape
        dim, entries = place
        if op.name in ALIGNED:
            # The last dimensions in which a sample is one thing.
            last = 3 if op.name in ATTENTION else int(op.name == "rotated")
            moved = Where(dim + len(result) - len(shape), entries)
            return moved if dim < len(shape) - last and (entries == 1 or not last) else None
        if op.name in JOINS:
            along = (op.args[1] if len(op.args) > 1 else op.kwargs.get("dim", 0)) % len(shape)
            others = [v for v in find_values(op.args) if v.tensor.shape != (0,)]
            same = all(self.places.get(v.slot) == place for v in others)
            return place if same and along != dim else None
        if len(given) > 1 or op.args[:1] != (x,):  # not view_as(x), of what has no samples
            return None
        if op.name == "linear":
            is_layer = op.args[1].tensor.dim() == 2
            return place if is_layer and dim < len(shape) - 1 else None
        if op.name == "standardize":
            return None if dim in [d % len(shape) for d in op.args[1]] else place
        if op.name in SAME_ORDER:
            return self._same_order(place, shape, result)
        is_whole = op.name in SPLITS and len(op.outputs) == 1  # of a piece the sizes would differ
        if op.name in VIEWS and find_values(op.args) == [x] and not is_whole:
            strides = [int(d == dim) for d in range(len(shape))]
            marked = torch.empty(shape[dim], device="meta").as_strided(shape, strides)
            views = op.func(*map_tree(lambda v: marked if v is x else v, op.args), **op.kwargs)
            view = views if isinstance(views, Tensor) else views[op.outputs.index(y)]
            if view._is_view():  # not an index of several numbers, which copies
                there = (e for e, step in enumerate(view.stride()) if step == 1)
                return next((Where(e, entries) for e in there if result[e] == shape[dim]), None)
        return None

    def _same_order(self, place: Where, shape: torch.Size, result: torch.Size) -> Where | None:
        """Return where samples are after a change of shape, one behind the other as before."""
        before, size = math.prod(shape[: place.dim]), math.prod(shape[place.dim :]) // self.samples
        for dim, length in enumerate(result):
            rest = math.prod(result[dim:]) // self.samples
            if math.prod(result[:dim]) == before and rest == size and length % self.samples == 0:
                return Where(dim, length // self.samples)
        return None


def find_sample_runs(
    tape: Tape, S: int, order: int, stack_limit: int | None = None
) -> list[TokenRun]:
    """Return a run around each attention of several samples whose derivatives take much memory."""
    attentions = [i for i, op in enumerate(tape.ops) if op.name in ATTENTION and op.passed]
    attentions = [i for i in attentions if tape.ops[i].out.tensor.shape[0] > 1]
    elsewhere = {i for logits in tape.chunked for i in logits.ops}
    narrow = carried(tape) if attentions else []
    found: list[TokenRun] = []
    for i in attentions:
        starts = range(max(0, i - REACH), i + 1)
        while starts:
            start = min(starts, key=lambda j: (narrow[j], -j))
            run, end, samples = samples_from(tape, start, i, narrow, elsewhere)
            if run:
                ops = [tape.ops[j] for j in run]
                some = at_a_time(ops, samples, samples.samples, S, order, stack_limit)
                if some < samples.samples:
                    found.append(TokenRun(run, samples.samples, some, S, samples))
                    elsewhere.update(run)
                break
            starts = range(end + 1, i + 1)  # behind what cannot be passed so
    return found


def carried(tape: Tape) -> list[int]:
    """Return for each operation the bytes of what is made before it and needed from it on."""
    sizes: dict[int, int] = {}
    found, alive = [], 0
    for op in tape.ops:
        found.append(alive)
        for value in op.made:
            if value.slot in tape.needed and not is_view_of_leaf(op, tape):
                sizes[value.slot] = value.tensor.numel() * value.tensor.element_size()
                alive += sizes[value.slot]
        alive -= sum(sizes.pop(slot, 0) for slot in op.finishes)
    return [*found, alive]


def samples_from(
    tape: Tape, start: int, attention: int, narrow: list[int], elsewhere: set[int]
) -> tuple[list[int], int, Samples]:
    """Return the run from a place, through an attention, to the next narrow place; or an empty one.

    Also where it cannot continue, and the samples of its values.
    """
    count = tape.ops[attention].out.tensor.shape[0]
    samples = Samples(count)
    near = tape.ops[start : attention + REACH]
    inside = {y.slot for op in near for y in op.made}
    for op in near:
        for x in find_values((op.args, op.kwargs)):
            outside = x.slot is not None and x.slot not in inside and x.slot not in tape.leaves
            if outside and x.tensor.dim() > 1 and x.tensor.shape[0] == count:
                samples.places[x.slot] = Where(0)
    end = start
    while end < min(len(tape.ops), attention + REACH) and end not in elsewhere:
        op = tape.ops[end]
        another = end > attention and op.name in ATTENTION
        if another or not samples.follow(op) or (tape.cut is not None and end == tape.cut.index):
            break
        end += 1
    if end <= attention:
        return [], end, samples
    last = min(range(attention + 1, end + 1), key=lambda j: (narrow[j], j))
    return list(range(start, last)), end, samples
