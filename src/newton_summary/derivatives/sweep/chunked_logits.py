"""Many logits, and their log-softmax, a few rows at a time.

A language model has tens of thousands of logits per token, and their derivatives along all groups
would be by far the largest array of a sweep. But from the last layer on, tokens are independent and
their contributions add up, so a few of them can be passed at a time, by the same rules.
"""

from __future__ import annotations

import math
from collections import Counter
from copy import copy
from dataclasses import replace

import torch
from torch import Tensor

from newton_summary.derivatives.sweep.memory import WORKING_COPIES
from newton_summary.derivatives.sweep.rules.elementwise import CURVED
from newton_summary.derivatives.sweep.rules.linear import SAME_ORDER
from newton_summary.derivatives.sweep.rules.products import times_transposed
from newton_summary.derivatives.sweep.tape import (
    ChunkedLogits,
    Cut,
    Op,
    Sweep,
    Tangent,
    Tape,
    dots,
    find_values,
    gram,
    is_of_rows,
    parts_of,
    pick,
    sums,
    union,
)
from newton_summary.derivatives.sweep.token_runs import LOG_SOFTMAX, Tokens

# Bytes of the logits' derivatives that are taken at a time.
AT_A_TIME = {"cpu": 2**23}  # which stay in its cache
AT_A_TIME_ELSEWHERE = 2**29
FEWEST_ROWS = 8  # with fewer, reading the weights takes longer than the products
TOKENS = Tokens()
ENTRY_BY_ENTRY = frozenset(CURVED) | {"mul", "multiply", "div", "divide", "true_divide", "neg"}


def find_chunked_logits(
    tape: Tape, S: int, order: int, stack_limit: int | None = None
) -> list[ChunkedLogits]:
    """Return every layer with what follows up to a log-softmax, if its stack would be large.

    What lies between may scale or cap the logits, change their shape, or leave tokens out, as
    ``logits[:, :-1]`` does, as long as the row of a token stays a row. Nothing else may use them.

    Args:
        tape: The tape, with what is needed already marked.
        S: Number of groups.
        order: Highest derivative.
        stack_limit: Bytes that all stacks may take, if there is a limit.
    """
    chunked: list[ChunkedLogits] = []
    ends = [i for i, op in enumerate(tape.ops) if _is_log_softmax_of_rows(op)]
    if not ends:
        return chunked
    curving = needed_by_curved(tape)
    makers = {v.slot: i for i, op in enumerate(tape.ops) for v in op.outputs if v is not None}
    users = Counter(slot for op in tape.ops if op.passed for slot in op.inputs)
    for end in ends:
        chain = [end]
        chosen: dict[int, Tensor] = {}
        rows: Tensor | None = None
        while True:
            op = tape.ops[chain[0]]
            left = None if _keeps_rows(op) else _left_rows(op)
            if left is None and not _keeps_rows(op):
                break
            slot = op.inputs[0]
            if users[slot] > 1 or slot not in makers:
                break
            if left is not None:
                rows = left if rows is None else left[rows]
            chain.insert(0, makers[slot])
            if rows is not None:
                chosen[chain[0]] = rows
        layer, last = tape.ops[chain[0]], tape.ops[end]
        is_layer = layer.name == "linear" and layer.args[1].tensor.dim() == 2
        if not is_layer or last.out.slot in curving:
            continue
        logits = last.out.tensor
        most = AT_A_TIME.get(logits.device.type, AT_A_TIME_ELSEWHERE)
        if stack_limit is not None:
            copies = len(chain) + WORKING_COPIES
            most = min(most, stack_limit // (2 * copies))  # half is for the rest of the network
        tokens = logits.shape[:-1].numel()
        row = S * (2 if order == 3 else 1) * logits.shape[-1] * logits.element_size()
        at_a_time = max(FEWEST_ROWS, most // max(row, 1))
        if at_a_time < tokens:
            chunked.append(ChunkedLogits(chain, tokens, at_a_time, last.wanted, chosen))
            last.wanted = False  # gbar alone wanted it, and is read off among the logits
            tape.needed.discard(last.out.slot)
    return chunked


def needed_by_curved(tape: Tape) -> set[int]:
    """Return the slots whose derivatives a curved operation needs, and not only gbar."""
    needed: set[int] = set()
    for op in reversed(tape.ops):
        if op.curved or any(v is not None and v.slot in needed for v in op.outputs):
            needed.update(op.inputs)
    return needed


def _is_log_softmax_of_rows(op: Op) -> bool:
    return op.name in LOG_SOFTMAX and is_of_rows(op)


def _keeps_rows(op: Op) -> bool:
    """Whether an operation takes one value, and each row of it to the same row of the result."""
    values = find_values((op.args, op.kwargs))
    if len(values) != 1 or op.args[:1] != (values[0],) or op.complex:
        return False
    x, y = values[0].tensor, op.out.tensor
    known = op.name in ENTRY_BY_ENTRY or op.name in SAME_ORDER or _is_log_softmax_of_rows(op)
    return known and x.shape[-1:] == y.shape[-1:]


def _left_rows(op: Op) -> Tensor | None:
    """Return which rows an index between brackets leaves, if it leaves them whole; else None."""
    if op.name != "__getitem__" or len(find_values(op.args)) > 1 or op.complex:
        return None
    x, index = op.args[0].tensor, op.args[1]
    if x.dim() < 2 or x.shape[-1:] != op.out.tensor.shape[-1:]:
        return None
    *lead, width = x.shape
    places = torch.arange(math.prod(lead), device=x.device).view(*lead, 1).expand(x.shape)[index]
    columns = torch.arange(width, device=x.device).expand(x.shape)[index]
    first = (0,) * (places.dim() - 1)
    if 0 in places.shape or not bool((columns[first] == torch.arange(width).to(x.device)).all()):
        return None
    return places[..., 0].flatten()


def pass_in_pieces(sweep: Sweep, logits: ChunkedLogits) -> None:
    """Pass the operations of chunked logits for some rows, then for the next ones."""
    ops = [sweep.tape.ops[i] for i in logits.ops]
    cut = sweep.tape.cut
    x = ops[0].args[0]
    t = sweep.tangent(x)
    rows = None if t is None else t.rows.flatten(1, -2)
    by_adjoint = _by_adjoint(sweep, ops)
    if by_adjoint:
        sweep.pass_op(replace(ops[0], wanted=False))  # what the layer itself contributes
    for part in parts_of(logits.rows, logits.at_a_time):
        parts = [logits.chosen[i][part] if i in logits.chosen else part for i in logits.ops]
        piece = copy(sweep)  # with the same lists of contributions
        piece.tangents = {s: sweep.tangents[s] for s in ops[0].inputs if s in sweep.tangents}
        piece.adjoints = {}
        if t is not None and rows is not None:
            h = Tangent(t.first, t.second, rows[:, parts[0]])
            piece.tangents[x.slot] = Tangent(h.first, (), h.y1) if by_adjoint else h
        for op, mine in zip(ops, parts, strict=True):
            delta = None if by_adjoint and op is ops[0] else sweep.adjoint(op.out)
            if delta is not None and op.out.slot is not None:
                piece.adjoints[op.out.slot] = TOKENS.part(delta, mine)
            if op.name in SAME_ORDER or op.name == "__getitem__":
                if op.inputs[0] in piece.tangents and op.out.slot is not None:  # the same rows
                    piece.tangents[op.out.slot] = piece.tangents[op.inputs[0]].to(
                        op.out.tensor.dtype
                    )
            elif by_adjoint and op is ops[-1]:
                _pass_log_softmax(piece, TOKENS.cut_op(op, mine), ops[0], h)
            else:
                piece.pass_op(TOKENS.cut_op(op, mine))
            if cut is not None and op.out.slot == cut.slot and cut.adjoint is not None:
                piece.read_gbar(replace(cut, adjoint=TOKENS.part(cut.adjoint, mine)))
        delta = piece.adjoint(ops[-1].out)
        if logits.reads_gbar and delta is not None:
            p = TOKENS.part(ops[-1].out.now, part).exp()
            before = delta - p * delta.sum(-1, keepdim=True)  # the adjoint of what goes in
            piece.read_gbar(Cut(logits.ops[-1], ops[-1].args[0], before))


# --- second derivatives of logits that are never made --------------------------------------------

# Where a log-softmax follows the layer at once, second derivatives x2 = h2 W^T of the logits count
# for D3 alone, and there as <v, x2> = <v W, h2>, with v = weight c as in ``normalize``. That is one
# product too, with a result as small as h2, which also replaces the first factor in
# Hbar = <v_s, x1_t> = <v_s W, h1_t>. Only what moves by the weight itself has v and x in full.


def _by_adjoint(sweep: Sweep, ops: list[Op]) -> bool:
    """Whether the logits can be passed without their second derivatives, and are faster so."""
    t, *found = [sweep.tangent(value) for value in find_values((ops[0].args, ops[0].kwargs))]
    y = ops[-1].out.tensor
    return (
        sweep.order == 3
        and y.device.type == "cpu"
        and t is not None
        and sweep.adjoint(ops[-1].out) is not None
        and t.rows.dtype == ops[0].args[1].tensor.dtype == y.dtype
        and not any(by is not None and by.second for by in found)
        and all(op.name in SAME_ORDER or op.name == "__getitem__" for op in ops[1:-1])
    )


def _pass_log_softmax(piece: Sweep, op: Op, layer: Op, h: Tangent) -> None:
    """Pass the log-softmax after a layer, given the derivatives of what goes into the layer."""
    t, delta = piece.tangent(op.args[0]), piece.adjoint(op.out)
    assert t is not None and delta is not None
    p = op.out.now.exp()
    # In place, and the mean under p as a product for each row: this is all a matter of memory.
    c = t.y1.sub_(torch.bmm(p[:, None], t.y1.permute(1, 2, 0)).permute(2, 0, 1))
    v = c * (-p * delta.sum(-1, keepdim=True))
    G = times_transposed(v.flatten(0, 1), layer.args[1].now.T).view(*v.shape[:2], -1)
    found = [piece.tangent(value) for value in find_values((layer.args[1:], layer.kwargs))]
    own = union(*(by.first for by in found if by is not None))
    others = tuple(s for s in h.first if s not in own)
    for groups, left, right in ((own, v, (t.first, c)), (others, G, (h.first, h.y1))):
        if groups:
            piece.add_Hbar(t.first, groups, gram(left, pick(*right, groups)))
    for left, x in ((v, t), (G, h)):
        if x.second:
            piece.add_D3(x.second, 3 * dots(pick(t.first, left, x.second), x.y2))
    piece.add_D3(t.first, sums(v.mul_(c).mul_(c)))
