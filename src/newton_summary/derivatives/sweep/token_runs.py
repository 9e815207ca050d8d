"""Runs of operations that take each token on its own, passed some tokens at a time.

Between two attentions a transformer treats tokens one by one: layers, norms, activations, residual
sums. Passed for a few tokens at a time, by the same rules, the derivatives of a wide hidden layer
along all groups are never held as a whole, and on a CPU they stay in its cache. A token is all but
the last dimension of a value.
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from newton_summary.derivatives.sweep.chunked_logits import of_rows
from newton_summary.derivatives.sweep.rules.elementwise import CURVED, PIECEWISE_LINEAR, RELATIVE
from newton_summary.derivatives.sweep.rules.linear import SAME_ORDER
from newton_summary.derivatives.sweep.tape import (
    Op,
    Tangent,
    Tape,
    TokenRun,
    Value,
    find_values,
    parts_of,
)

if TYPE_CHECKING:
    from newton_summary.derivatives.sweep.engine import Place, Sweep

# Bytes of the widest derivatives that are taken at a time.
AT_A_TIME = {"cpu": 2**24}
AT_A_TIME_ELSEWHERE = 2**29
FEWEST_TOKENS = 8  # with fewer, reading the weights takes longer than the products
ONE_VALUE = {*CURVED, *RELATIVE, *PIECEWISE_LINEAR, *SAME_ORDER, "neg", "negative"}
TWO_VALUES = {*("add", "sub", "subtract", "mul", "multiply", "div", "divide", "true_divide")}


def find_token_runs(
    tape: Tape, S: int, order: int, stack_limit: int | None = None
) -> list[TokenRun]:
    """Return runs of operations whose derivatives would take much memory.

    Args:
        tape: The tape, with what is needed and what is chunked already marked.
        S: Number of groups.
        order: Highest derivative.
        stack_limit: Bytes that all stacks may take, if there is a limit.
    """
    found: list[TokenRun] = []
    run: list[int] = []
    elsewhere = {i for logits in tape.chunked for i in logits.ops}
    cut = None if tape.cut is None else tape.cut.index

    def finish() -> None:
        values = [tape.ops[i].out.tensor for i in run if tape.ops[i].passed]
        if len(values) > 1:
            most = AT_A_TIME.get(values[0].device.type, AT_A_TIME_ELSEWHERE)
            most = min(most, (stack_limit or 8 * most) // 8)  # the rest is for what is held whole
            widest = max(y.shape[-1] * y.element_size() for y in values)
            at_a_time = max(FEWEST_TOKENS, most // (widest * S * (2 if order == 3 else 1)))
            tokens = values[0].shape[:-1].numel()
            if at_a_time < tokens:
                parts = -(-tokens // at_a_time)
                found.append(TokenRun(list(run), tokens, -(-tokens // parts)))
        run.clear()

    for i, op in enumerate(tape.ops):
        takes = i not in elsewhere and takes_tokens_alone(op)
        together = run and tape.ops[run[-1]].out.tensor.shape[:-1] == (
            op.out.tensor.shape[:-1] if takes else None
        )
        if i == cut or not together:
            finish()
        if takes:
            run.append(i)
    finish()
    return found


def takes_tokens_alone(op: Op) -> bool:
    """Whether a token of the result depends on the same token of each argument alone."""
    values = [x for x in op.args if isinstance(x, Value)]
    if op.complex or len(op.outputs) != 1 or len(values) < len(find_values((op.args, op.kwargs))):
        return False
    y = op.out.tensor
    if y.dim() < 2 or y.layout != values[0].tensor.layout or not values:
        return False
    if op.name == "linear":
        return values[1].tensor.dim() == 2 and values[0].tensor.shape[:-1] == y.shape[:-1]
    if op.name == "standardize":
        return [d % y.dim() for d in op.args[1]] == [y.dim() - 1]
    if op.name in ONE_VALUE:
        return len(values) == 1 and op.args[0] is values[0] and values[0].tensor.shape == y.shape
    if op.name in TWO_VALUES:
        lengths = {x.tensor.shape[-1] for x in values if x.tensor.dim()}
        return (
            all(has_tokens(x, y) or x.tensor.dim() < 2 for x in values)
            and lengths <= {y.shape[-1], 1}
            and any(has_tokens(x, y) for x in values)
        )
    return False


def has_tokens(x: Value, y: Tensor) -> bool:
    """Whether a value has the tokens of a result."""
    return x.tensor.dim() == y.dim() and x.tensor.shape[:-1] == y.shape[:-1]


def pass_tokens(sweep: Sweep, run: TokenRun) -> None:
    """Pass the operations of a run for some tokens, then for the next ones."""
    ops = [sweep.tape.ops[i] for i in run.ops]
    ops = [op for op in ops if op.passed]
    y = ops[0].out.tensor
    tokens = {v.slot for op in ops for v in find_values(op.args) if has_tokens(v, y)}
    made = {op.out.slot: op.out for op in ops if op.out.slot is not None}
    ended = {slot for op in ops for slot in op.finishes}
    inputs = {
        slot: sweep.tangents[slot]
        for op in ops
        for slot in op.inputs
        if slot in sweep.tangents and slot not in made
    }
    flat = {s: t.rows.flatten(1, -2) for s, t in inputs.items() if s in tokens}
    results: dict[int, Tangent] = {}
    found: dict[Place, Tensor] = {}
    for part in parts_of(run.tokens, run.at_a_time):
        piece = copy(sweep)
        piece.found = []
        piece.tangents = {
            slot: Tangent(t.first, t.second, flat[slot][:, part]) if slot in flat else t
            for slot, t in inputs.items()
        }
        piece.adjoints = {
            slot: of_rows(delta, part)
            for slot in made
            if (delta := sweep.adjoints.get(slot)) is not None
        }
        for op in ops:
            if any(slot in piece.tangents for slot in op.inputs):
                piece.pass_op(some_tokens(op, part))
            for slot in op.finishes:
                piece.tangents.pop(slot, None)
        for slot, value in made.items():
            t = piece.tangents.get(slot)
            if slot not in ended and t is not None:
                if slot not in results:
                    rows = t.rows.new_empty((len(t.rows), *value.tensor.shape))
                    results[slot] = Tangent(t.first, t.second, rows)
                results[slot].rows.flatten(1, -2)[:, part] = t.rows
        for place, entries in piece.found:
            if place in found:
                found[place] += entries
            else:
                found[place] = entries.clone()
    sweep.tangents.update(results)
    sweep.found += found.items()


def some_tokens(op: Op, part: slice) -> Op:
    """Return an operation as it would have been for some of the tokens."""
    y = op.out.tensor

    def cut(x: Any) -> Any:
        if isinstance(x, Value) and has_tokens(x, y):
            return Value(of_rows(x.now, part), x.slot)
        return x

    args = tuple(cut(x) for x in op.args)
    if op.name == "standardize":
        args = (args[0], [-1], *args[2:])
    if op.name == "linear":  # a weight may have as many rows as there are tokens
        args = (args[0], *op.args[1:])
    return replace(op, args=args, outputs=[cut(op.out)])
