"""LSTM and GRU layers as one operation: the recurrence over the steps of a sequence.

It goes through the steps with the derivatives of all groups in arrays of one step, which stay in a
cache: those of the gates, several times as wide as the input, are never held for a whole sequence.
The adjoints inside it come from one pass back through the steps.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import handle_torch_function

from newton_summary.derivatives.norms import Maybe
from newton_summary.derivatives.sweep.rules.products import contribute, times_each
from newton_summary.derivatives.sweep.rules.recurrent_cells import (
    Gates,
    GruRun,
    Jets,
    LstmRun,
    Run,
    runs_of,
)
from newton_summary.derivatives.sweep.tape import Op, Sweep, Tangent, Value, union


class _Recurrence(torch.autograd.Function):
    """The recurrence for autograd, from a run that is kept for the sweep."""

    @staticmethod
    def forward(ctx: Any, run: Run, *inputs: Tensor | None) -> Any:
        ctx.run = run
        ctx.set_materialize_grads(False)
        results, run.results = run.results, ()  # else they would keep each other alive
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *deltas: Tensor | None) -> Any:
        run, (_, _, has_w, has_b, *_) = ctx.run, ctx.needs_input_grad
        run.go_back(deltas)
        flat, before = run.adjoint.flatten(0, 1), run.before(run.y, run.start[0]).flatten(0, 1)
        w, b = flat.T @ before if has_w else None, flat.sum(0) if has_b else None
        return None, run.gates_adjoint, w, b, *run.start_adjoints


def recurrence(
    x: Tensor, w_x: Tensor, b_x: Maybe, w: Tensor, b: Maybe, reverse: bool, *start: Tensor
) -> tuple[Tensor, ...]:
    """Return h in all steps, and the last c of an LSTM, which starts from (h, c): one operation."""
    return handle_torch_function(recurrence, (x,), x, w_x, b_x, w, b, reverse, *start)


def prepare(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Run]:
    """Run a recurrence so that the rule gets what happened in its steps."""
    x, w_x, b_x, w, b, reverse, *start = args
    kind = LstmRun if len(start) == 2 else GruRun
    gates = F.linear(x, w_x, b_x)
    with torch.no_grad():
        steps = kind(gates.detach(), w, b, tuple(start), reverse)
    return _Recurrence.apply(steps, gates, w, b, *start), steps  # type: ignore[no-untyped-call]


def pass_recurrence(
    sweep: Sweep,
    op: Op,
    x: Value,
    w_x: Value,
    b_x: Any,
    w: Value,
    b: Any,
    reverse: bool,
    *start: Value,
) -> list[Tangent]:
    """Pass all steps of a layer."""
    run: Run = op.saved
    third = sweep.order == 3
    X, *states = (sweep.tangent(v) for v in (x, *start))
    W_x, B_x, W, B = (sweep.tangent(v) for v in (w_x, b_x, w, b))
    first = union(*(t.first for t in (X, W_x, B_x, W, B, *states) if t is not None))
    deltas = [None if v is None else sweep.adjoint(v) for v in op.outputs]
    run.go_back(deltas)  # for the loss: there may have been other backward passes, or none
    jets = Jets(len(first), third, run.y)
    of_input = Gates(x.now, w_x.now, W_x, B_x, first, third, X)
    of_state = Gates(run.before(run.y, run.start[0]), run.w, W, B, first, third)
    n = len(first) * (2 if third else 1)
    rows = [run.y.new_zeros((n, *run.y.shape[1:])) for _ in start]
    for state, tangent in zip(rows, states, strict=True):
        if tangent is not None:
            for target, source in runs_of(tangent, first):
                state[target] = tangent.rows[source]
    h = run.y.new_empty((n, len(run.y) + 1, *run.y.shape[1:]))
    begin = len(run.y) if reverse else 0
    h[:, begin] = rows[0]
    for t, after in zip(run.order, run.derivatives(jets, rows, of_input, of_state), strict=True):
        h[:, t if reverse else t + 1] = after[0]
        rows = after
    second = first if third else ()
    sweep.add_Hbar(first, first, jets.Hbar)
    if third:
        sweep.add_D3(first, jets.D3)
    before, y = (h[:, 1:], h[:, :-1]) if reverse else (h[:, :-1], h[:, 1:])
    if run.adjoint is not None:
        if W is not None:
            contribute(sweep, Tangent(first, second, before), W, times_each(run.adjoint, W.rows))
        if W_x is not None and X is not None:
            contribute(sweep, X, W_x, times_each(run.gates_adjoint, W_x.rows))
    return [Tangent(first, second, rows) for rows in (y, *rows[1:])]


RECURRENCES = {"recurrence": pass_recurrence}
PREPARE_RECURRENCES = {"recurrence": prepare}
