"""LSTM and GRU layers as one operation: the recurrence over the steps of a sequence.

What a layer makes of its input in every step is one product, which has a rule of its own. The
recurrence takes these gates, (steps, samples, n * features), and goes through the steps with the
derivatives of all groups in arrays of one step, which stay in a cache. The adjoints inside of it
come from going back through the steps once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import handle_torch_function

from newton_summary.derivatives.sweep.rules.products import contribute
from newton_summary.derivatives.sweep.rules.recurrent_cells import (
    GruRun,
    Jets,
    LstmRun,
    Run,
    Walk,
    runs_of,
)
from newton_summary.derivatives.sweep.tape import Op, Tangent, Value, union

if TYPE_CHECKING:
    from newton_summary.derivatives.sweep.engine import Sweep


class _Recurrence(torch.autograd.Function):
    """The recurrence for autograd, from a run that is kept for the sweep."""

    @staticmethod
    def forward(ctx: Any, run: Run, *inputs: Tensor | None) -> Any:
        ctx.run = run
        ctx.set_materialize_grads(False)
        return run.results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *deltas: Tensor | None) -> Any:
        run = ctx.run
        run.go_back(deltas)
        flat, w, b = run.adjoint.flatten(0, -2), None, None
        if ctx.needs_input_grad[2]:  # not where gbar is read off later
            w = flat.T @ run.before(run.y, run.start[0]).flatten(0, -2)
        if ctx.needs_input_grad[3]:
            b = flat.sum(0)
        return None, run.gates_adjoint, w, b, *run.start_adjoints


def lstm_recurrence(
    gates: Tensor, w: Tensor, b: Tensor | None, reverse: bool, h: Tensor, c: Tensor
) -> tuple[Tensor, Tensor]:
    """Return h in all steps, and the last c; one operation on the tape."""
    return handle_torch_function(lstm_recurrence, (gates,), gates, w, b, reverse, h, c)


def gru_recurrence(
    gates: Tensor, w: Tensor, b: Tensor | None, reverse: bool, h: Tensor
) -> tuple[Tensor]:
    """Return h in all steps; one operation on the tape."""
    return handle_torch_function(gru_recurrence, (gates,), gates, w, b, reverse, h)


def prepare(kind: type[Run]) -> Callable[..., tuple[Any, Run]]:
    """Return how to run a recurrence so that the rule gets what happened in its steps."""

    def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Run]:
        gates, w, b, reverse, *start = args
        with torch.no_grad():
            steps = kind(gates, w, b, tuple(start), reverse)
        return _Recurrence.apply(steps, gates, w, b, *start), steps  # type: ignore[no-untyped-call]

    return run


def recurrence(
    sweep: Sweep, op: Op, gates: Value, w: Value, b: Any, reverse: bool, *start: Value
) -> list[Tangent | None]:
    """Pass all steps of a layer."""
    run: Run = op.saved
    third = sweep.order == 3
    x, W, B, *states = (sweep.tangent(v) for v in (gates, w, b, *start))
    first = union(*(t.first for t in (x, W, B, *states) if t is not None))
    deltas = [None if v is None else sweep.adjoint(v) for v in op.outputs]
    run.go_back(deltas)  # for the loss: there may have been other backward passes, or none
    jets = Jets(len(first), third, run.y)
    walk = Walk(run, first, third, [x, W, B])
    rows = [run.y.new_zeros((walk.rows, *run.y.shape[1:])) for _ in start]
    for state, tangent in zip(rows, states, strict=True):
        if tangent is not None:
            for target, source in runs_of(tangent, first):
                state[target] = tangent.rows[source]
    h = run.y.new_empty((walk.rows, len(run.y) + 1, *run.y.shape[1:]))
    begin = len(run.y) if reverse else 0
    h[:, begin] = rows[0]
    for t, after in zip(run.order, run.derivatives(jets, rows, walk), strict=True):
        h[:, t if reverse else t + 1] = after[0]
        rows = after
    second = first if third else ()
    sweep.add_Hbar(first, first, jets.Hbar)
    if third:
        sweep.add_D3(first, jets.D3)
    before, y = (h[:, 1:], h[:, :-1]) if reverse else (h[:, :-1], h[:, 1:])
    if W is not None and run.adjoint is not None:
        G = (run.adjoint @ W.rows[:, None]).reshape(len(W.rows), *run.y.shape)
        contribute(sweep, Tangent(first, second, before), W, G)
    results = [y, *rows[1:]]
    return [None if v is None else Tangent(first, second, r) for v, r in zip(op.outputs, results)]


RECURRENCES: dict[str, Callable[..., Any]] = {
    "lstm_recurrence": recurrence,
    "gru_recurrence": recurrence,
}
PREPARE_RECURRENCES: dict[str, Callable[..., tuple[Any, Any]]] = {
    "lstm_recurrence": prepare(LstmRun),
    "gru_recurrence": prepare(GruRun),
}
