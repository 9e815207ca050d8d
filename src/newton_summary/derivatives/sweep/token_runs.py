"""Runs of operations that treat tokens or channels separately, passed some of them at a time.

Between two attentions a transformer treats tokens separately: layers, norms, activations, residual
sums. Passed for a few tokens at a time, by the same rules, the derivatives of a wide hidden layer
along all groups are never held as a whole, and on a CPU they stay in its cache. A token is all but
the last dimension of a value. Likewise an image network treats channels separately between two
convolutions, including batch norms in training.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from newton_summary.derivatives.sweep.rules.elementwise import CURVED, PIECEWISE_LINEAR, RELATIVE
from newton_summary.derivatives.sweep.rules.linear import SAME_ORDER
from newton_summary.derivatives.sweep.tape import (
    Op,
    Place,
    Sweep,
    Tangent,
    Tape,
    Unjoined,
    Value,
    find_values,
    parts_of,
    union,
)

# Bytes of the widest derivatives that are taken at a time.
AT_A_TIME = {"cpu": 2**24}
AT_A_TIME_ELSEWHERE = 2**30
WITHOUT_LAYER_ELSEWHERE = 2**28  # in a run that reads no weights for each piece
ONE_VALUE = {*CURVED, *RELATIVE, *PIECEWISE_LINEAR, *SAME_ORDER, "neg", "negative"}
LOG_SOFTMAX = ("log_softmax", "special_log_softmax")
TWO_VALUES = {
    *("add", "sub", "subtract", "mul", "multiply", "div", "divide", "true_divide", "rotated")
}


class Tokens:
    """All but the last dimension: what a run is cut along."""

    fewest = 8  # at a time: with fewer, reading the weights takes longer than the products

    def takes_alone(self, op: Op) -> bool:
        """Whether a token of the result depends only on the same token of each argument."""
        values, y = op.args, op.out.tensor
        if op.name == "linear":
            return bool(values[1].tensor.dim() == 2) and self.has(values[0].tensor, y)
        if op.name == "standardize":
            return [d % y.dim() for d in op.args[1]] == [y.dim() - 1]
        if op.name in TWO_VALUES:
            found = [x.tensor for x in values if isinstance(x, Value)]
            lengths = {x.shape[-1] for x in found if x.dim()}
            beside = [x.shape[:-1] == y.shape[:-1] for x in found]
            return (
                all(b or x.dim() < 2 for b, x in zip(beside, found, strict=True))
                and lengths <= {y.shape[-1], 1}
                and any(beside)
            )
        if op.name in SAME_ORDER and isinstance(values[0], Value):  # texts joined to one, or apart
            x = values[0].tensor
            return self.has(x, y) and x.shape[-1] == y.shape[-1]
        return op.name in ONE_VALUE and one_of_its_shape(op)

    def count(self, y: Tensor) -> int:
        """Return how many of them a value has."""
        return y.shape[:-1].numel()

    def has(self, x: Tensor, y: Tensor) -> bool:
        """Whether a value has as many tokens as a result."""
        return x.dim() > 1 and x.shape[:-1].numel() == y.shape[:-1].numel()

    def part(
        self, x: Tensor, some: slice | Tensor, stacked: bool = False, slot: int | None = None
    ) -> Tensor:
        """Return some of them, of the value in a slot or of a stack of its derivatives."""
        return x.flatten(1, -2)[:, some] if stacked else x.flatten(0, -2)[some]

    def cut_slots(self, ops: list[Op]) -> set[int]:
        """Return the slots of which a run takes some tokens at a time."""
        return slots_of(ops, self)[0]

    def cut_op(self, op: Op, some: slice | Tensor) -> Op:
        """Return an operation as it would have been for some of the tokens."""
        y = op.out.tensor

        def cut(x: Any) -> Any:
            if isinstance(x, Value) and self.has(x.tensor, y):
                return x.cut(lambda tensor: self.part(tensor, some))
            return x

        args, kwargs = tuple(cut(x) for x in op.args), op.kwargs
        if op.name == "standardize" and not isinstance(self, _Channels):
            args = (args[0], [-1], *args[2:])
        if op.name in LOG_SOFTMAX:
            args, kwargs = (args[0], -1), {}  # the last of two dimensions now
        if op.name == "linear":  # a weight may have as many rows as there are tokens
            args = (args[0], *op.args[1:])
        return replace(op, args=args, kwargs=kwargs, outputs=[cut(op.out)])


class _Channels(Tokens):
    """The second dimension of images: between two convolutions each is on its own."""

    fewest = 1

    def takes_alone(self, op: Op) -> bool:
        y = op.out.tensor
        if y.dim() < 3 or y.shape[1] < 2:
            return False
        if op.name == "standardize":
            return 1 not in [d % y.dim() for d in op.args[1]]
        if op.name in TWO_VALUES:
            found = [x.tensor for x in op.args if isinstance(x, Value)]
            return any(x.shape == y.shape for x in found) and all(
                self.has(x, y) or x.dim() < y.dim() - 1 or x.shape[1 - y.dim()] == 1 for x in found
            )
        return op.name in ONE_VALUE and one_of_its_shape(op)

    def count(self, y: Tensor) -> int:
        return y.shape[1]

    def has(self, x: Tensor, y: Tensor) -> bool:
        return x.dim() == y.dim() and x.shape[1] == y.shape[1]

    def part(
        self, x: Tensor, some: slice | Tensor, stacked: bool = False, slot: int | None = None
    ) -> Tensor:
        return x[:, :, some] if stacked else x[:, some]


@dataclass(frozen=True)
class TokenRun:
    """Consecutive operations that treat tokens separately, passed some tokens at a time.

    Or channels, or samples, in place of tokens.
    """

    ops: list[int]  # places on the tape
    tokens: int  # in all
    at_a_time: int  # if all groups are met
    groups: int  # in all
    axis: Tokens


def one_of_its_shape(op: Op) -> bool:
    """Whether an operation has one value among its arguments, with the shape of its result."""
    x = op.args[0]
    others = [y for y in op.args[1:] if isinstance(y, Value)]
    return isinstance(x, Value) and not others and x.tensor.shape == op.out.tensor.shape


def find_token_runs(
    tape: Tape, S: int, order: int, stack_limit: int | None = None
) -> list[TokenRun]:
    """Return runs of operations whose derivatives would take much memory.

    What is needed, and what is passed in pieces already, is marked on the tape. All stacks may take
    ``stack_limit`` bytes, if there is a limit.
    """
    elsewhere = {i for logits in tape.chunked for i in logits.ops}
    elsewhere |= {i for run in tape.runs for i in run.ops}
    cpu = tape.loss.device.type == "cpu"  # elsewhere channels are not measured yet
    axes = (Tokens(), _Channels()) if cpu else (Tokens(),)
    both = [(run, axis) for axis in axes for run in consecutive(tape, axis, elsewhere)]
    found: list[TokenRun] = []
    for run, axis in sorted(both, key=lambda x: -len(x[0])):  # of two that overlap, the longer one
        values = [tape.ops[i].out.tensor for i in run if tape.ops[i].passed]
        alone = cpu and tape.ops[run[0]].name == "standardize"  # takes several stacks to work with
        if len(values) < (1 if alone else 2) or not elsewhere.isdisjoint(run):
            continue
        count = axis.count(values[0])
        some = at_a_time([tape.ops[i] for i in run], axis, count, S, order, stack_limit)
        cut, whole = slots_of([tape.ops[i] for i in run], axis)
        if some < count and cut.isdisjoint(whole):
            found.append(TokenRun(run, count, some, S, axis))
            elsewhere.update(run)
    return found


def at_a_time(
    ops: list[Op], axis: Tokens, count: int, S: int, order: int, stack_limit: int | None
) -> int:
    """Return how many tokens of these operations to pass at a time, once all groups are met."""
    values = [value.tensor for op in ops if op.passed for value in op.made]
    has_layer = any(op.name == "linear" for op in ops)
    most = AT_A_TIME_ELSEWHERE if has_layer else WITHOUT_LAYER_ELSEWHERE
    most = AT_A_TIME.get(values[0].device.type, most)
    most = min(most, (stack_limit or 8 * most) // 8)  # the rest is for what is held whole
    widest = max(y.nbytes for y in values) // count
    return max(axis.fewest, most // max(1, widest * S * (2 if order == 3 else 1)))


def consecutive(tape: Tape, axis: Tokens, elsewhere: set[int]) -> Iterator[list[int]]:
    """Yield runs of operations that treat tokens, or channels, separately."""
    run: list[int] = []
    for i, op in enumerate(tape.ops):
        takes = i not in elsewhere and is_simple(op) and axis.takes_alone(op)
        last = tape.ops[run[-1]].out.tensor if run else None
        together = takes and last is not None and axis.has(op.out.tensor, last)
        if run and (not together or (tape.cut is not None and i == tape.cut.index)):
            yield run
            run = []
        if takes:
            run.append(i)
    if run:
        yield run


def is_simple(op: Op) -> bool:
    """Whether an operation has one dense result, and each tensor as an argument of its own."""
    values = [x for x in op.args if isinstance(x, Value)]
    if op.complex or len(op.outputs) != 1 or len(values) < len(find_values((op.args, op.kwargs))):
        return False
    y = op.out.tensor
    return bool(values) and y.dim() > 1 and y.layout == values[0].tensor.layout


def slots_of(ops: list[Op], axis: Tokens) -> tuple[set[int], set[int]]:
    """Return what a run takes some tokens of, and the weights of its layers, which it takes whole.

    A weight may have as many rows as there are tokens.
    """
    y = ops[0].out.tensor
    weights = [op.args[1] for op in ops if op.name == "linear"]
    values = [x for op in ops for x in (op.args[:1] if op.name == "linear" else op.args)]
    found = [x for x in values if isinstance(x, Value) and axis.has(x.tensor, y)]
    found += [op.out for op in ops]  # which may be a weight, made of a parameter
    cut, whole = ({x.slot for x in some if x.slot is not None} for some in (found, weights))
    return cut, whole


def pass_tokens(sweep: Sweep, run: TokenRun) -> None:
    """Pass the operations of a run for some tokens, then for the next ones."""
    ops = [sweep.tape.ops[i] for i in run.ops]
    ops = [op for op in ops if op.passed]
    axis = run.axis
    tokens = axis.cut_slots(ops)
    made = {value.slot: value for op in ops for value in op.made if value.slot is not None}
    ended = {slot for op in ops for slot in op.finishes}
    needed = dict.fromkeys(slot for op in ops for slot in op.inputs if slot not in made)
    inputs = [slot for slot in needed if slot in sweep.tangents]
    results: dict[int, Tangent] = {}
    found: dict[Place, Tensor] = {}
    met = len(union(*(sweep.tangents[slot].first for slot in inputs)))
    parts = -(-run.tokens * met // (run.at_a_time * run.groups))
    for part in parts_of(run.tokens, -(-run.tokens // max(1, parts))):
        piece = copy(sweep)
        piece.found = []
        piece.tangents = copy(sweep.tangents)  # of sharded parameters, they are gathered on demand
        for slot in tokens.intersection(inputs):
            piece.tangents[slot] = some_rows(sweep.tangents[slot], axis, part, slot)
        piece.adjoints = {
            slot: axis.part(delta, part, slot=slot)
            for slot in made
            if (delta := sweep.adjoints.get(slot)) is not None
        }
        for op in ops:
            if any(slot in piece.tangents for slot in op.inputs):
                piece.pass_op(axis.cut_op(op, part))
            for slot in op.finishes:
                piece.tangents.pop(slot, None)
        for slot, value in made.items():
            t = piece.tangents.get(slot)
            if slot not in ended and t is not None:
                if slot not in results:
                    rows = t.rows.new_empty((len(t.rows), *value.tensor.shape))
                    results[slot] = Tangent(t.first, t.second, rows)
                axis.part(results[slot].rows, part, True, slot).copy_(t.rows)
        for place, entries in piece.found:
            if place in found:
                found[place] += entries
            else:
                found[place] = entries.clone()
    sweep.tangents.update(results)
    sweep.found += found.items()


def some_rows(t: Tangent, axis: Tokens, part: slice | Tensor, slot: int | None = None) -> Tangent:
    """Return the derivatives of some of the tokens; those in pieces are not joined for that."""
    if not isinstance(t, Unjoined) or t.joined:
        return Tangent(t.first, t.second, axis.part(t.rows, part, True, slot))
    first, second = (
        [(groups, axis.part(rows, part, True, slot)) for groups, rows in terms]
        for terms in (t.first_terms, t.second_terms)
    )
    return Unjoined(first, second, axis.part(t.y, part, slot=slot))
