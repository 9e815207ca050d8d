"""One backward pass, one forward sweep: gbar, Hbar and D3 of one batch.

With y1_s, y2_s the derivatives of an operation's output along group s, and delta_y its adjoint:

    gbar_s   = <delta_x, x1_s>  at the cut
    Hbar_st  = sum over operations  <delta_y, d2h[x1_s, x1_t]>
    D3_s     = sum over operations  <delta_y, d3h[x1_s, x1_s, x1_s] + 3 d2h[x1_s, x2_s]>

The cut is a value x through which the loss depends on all that comes before it (:func:`find_cut`),
so that the gradient with respect to the parameters, a third of a backward pass, is not needed. Only
where there is none, and for first order alone, gbar comes from that gradient
(:meth:`Leaves.backward`). The direction itself may be that gradient; then the backward pass finds
both.

The other two lines are added up by the rules of the operations, with :meth:`Sweep.add_Hbar` and
:meth:`Sweep.add_D3`. An operation is passed if it is curved, so that it contributes itself, or if
the derivatives of its outputs are wanted later (:func:`mark_needed`).

One driver, :func:`sweep_batch`, serves a model that is whole and one that is sharded; a CUDA graph
captures its parts, :func:`prepared` and :func:`contributions`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from newton_summary.derivatives.sweep.chunked_logits import find_chunked_logits, pass_in_pieces
from newton_summary.derivatives.sweep.eager_attention import SOFTMAX, Joining
from newton_summary.derivatives.sweep.eager_norms import JoiningNorms
from newton_summary.derivatives.sweep.eager_rotary import JoiningRotations
from newton_summary.derivatives.sweep.memory import (
    StackTooLarge,
    default_limit,
    keep_freed_memory,
    plan_of_sweeps,
    stack_bytes,
)
from newton_summary.derivatives.sweep.recorder import Recorder, values_read
from newton_summary.derivatives.sweep.rules import BILINEAR, COMPLEX, RULES, STRAIGHT, generic
from newton_summary.derivatives.sweep.rules.linear import (
    MASKED,
    is_view_of_leaf,
    warn_of_hidden_rows,
)
from newton_summary.derivatives.sweep.sample_runs import find_sample_runs
from newton_summary.derivatives.sweep.tape import (
    Adjoints,
    Cut,
    Op,
    Place,
    Sweep,
    Tangent,
    Tape,
    groups_in,
)
from newton_summary.derivatives.sweep.token_runs import find_token_runs, pass_tokens
from newton_summary.partition import Params, Partition
from newton_summary.probe.probe import Closure, check_depends, check_finite
from newton_summary.summary import Summary

SMALL = 2**23  # bytes: stacks that take less together are not counted, divided or split
LARGE = 2**16  # bytes: smaller values are kept on the tape whoever reads them


class Leaves:
    """The parameters to differentiate a loss by, and the direction in which they move.

    Without one they move along the gradient of the loss, which the backward pass finds.
    """

    def __init__(self, params: Params, u: Params | None, partition: Partition):
        self.params, self.partition = params, partition
        self.u = u or {}  # empty as long as it is not known

    def record(self, closure: Closure) -> Tape:
        """Run the loss and return its tape."""
        tape = Recorder(self.params).record(closure)
        check_depends(tape.loss, self.params)
        return tape

    def backward(self, tape: Tape) -> tuple[Tensor, Adjoints]:
        """Return gbar, which counts only where the tape has no cut, and the adjoints."""
        is_needed = tape.cut is None or not self.u
        gradient, adjoints = backward(tape, self.params if is_needed else {})
        self.u = self.u or gradient
        return self.partition.inner(gradient if tape.cut is None else {}, self.u), adjoints

    def may_pass_in_pieces(self, tape: Tape) -> bool:
        """Return whether operations may be passed for some samples or tokens at a time."""
        return True

    def tangents(self, slots: dict[int, str], groups: set[int]) -> dict[int, Tangent]:
        """Return the derivatives of the parameters in their slots: U^s, for these groups."""
        found = {
            slot: leaf_tangent(self.u[name], self.partition.labels[name], groups)
            for slot, name in slots.items()
        }
        return {slot: tangent for slot, tangent in found.items() if tangent is not None}

    def in_parts(self, parts: int) -> int:
        """Return in how many parts to sweep the groups, given how many this process needs."""
        return parts


class WholeSweep(Sweep):
    """A sweep over all of a tape."""

    def run(self, consume: bool) -> None:
        """Pass every operation once, in order, and drop what no later one uses.

        Args:
            consume: Whether to release the tape on the way; it cannot be swept again then.
        """
        cut = self.tape.cut
        # Several at once when the first is met: what they need is there; a later one may forget it.
        passes = {some.ops[0]: partial(pass_in_pieces, self, some) for some in self.tape.chunked}
        passes |= {some.ops[0]: partial(pass_tokens, self, some) for some in self.tape.runs}
        inside = {i for some in self.tape.chunked for i in some.ops}
        inside |= {i for some in self.tape.runs for i in some.ops}
        for i, op in enumerate(self.tape.ops):
            if cut is not None and i == cut.index:
                self.read_gbar(cut)
            if i in passes:
                passes[i]()
            elif i not in inside and op.passed and any(s in self.tangents for s in op.inputs):
                self.pass_op(op)
            for slot in op.finishes:
                self.tangents.pop(slot, None)
            if consume:
                for value in op.made:
                    self.adjoints.pop(value.slot, None)  # type: ignore[arg-type]
                op.args, op.kwargs, op.outputs, op.saved = (), {}, [], None
        if cut is not None and cut.index == len(self.tape.ops):
            self.read_gbar(cut)


class Totals(NamedTuple):
    """The sums of all contributions."""

    gbar: np.ndarray  # (S,), zero where there is no cut
    Hbar: np.ndarray  # (S, S)
    D3: np.ndarray  # (S,)


def where_in_totals(places: Sequence[Place], S: int) -> np.ndarray:
    """Return where each contribution belongs in gbar, Hbar and D3 end to end."""
    first = {"gbar": 0, "Hbar": S, "D3": S + S * S}
    found = [np.zeros(0, dtype=np.int64)]
    for name, rows, columns in places:
        here = np.array(rows, dtype=np.int64)
        if name == "Hbar":
            here = (S * here[:, None] + np.array(columns, dtype=np.int64)).reshape(-1)
        found.append(first[name] + here)
    return np.concatenate(found)


def totals_at(where: np.ndarray, numbers: np.ndarray, S: int) -> Totals:
    """Return the totals, given where each contribution belongs."""
    sums = np.bincount(where, numbers, minlength=2 * S + S * S)
    Hbar = sums[S:-S].reshape(S, S)
    return Totals(sums[:S], (Hbar + Hbar.T) / 2, sums[-S:])


def joined(pieces: list[Tensor]) -> Tensor:
    """Return vectors end to end, in the widest of their types, float32 at least."""
    if not pieces:
        return torch.zeros(0)
    wide = torch.float64 if any(p.dtype == torch.float64 for p in pieces) else torch.float32
    return torch.cat([p.to(pieces[0].device, wide) for p in pieces])


def rule_for(op: Op) -> Callable[..., Any]:
    """Return the rule that an operation is passed with."""
    if op.complex and op.name not in COMPLEX:
        return generic
    return RULES.get(op.name, generic)


def is_curved(op: Op) -> bool:
    """Whether an operation can contribute to Hbar and D3."""
    if op.complex and op.name not in COMPLEX:
        return True
    if op.name in BILINEAR:
        return len(op.inputs) > 1
    return op.name not in STRAIGHT


def leaf_tangent(U: Tensor, label: int | Tensor, chosen: set[int]) -> Tangent | None:
    """Return the derivatives of a parameter: U^s along its own group or groups."""
    groups = [s for s in groups_in(label) if s in chosen]
    if not groups:
        return None
    rows = U[None] if isinstance(label, int) else torch.stack([U * (label == s) for s in groups])
    return Tangent(tuple(groups), (), rows)


def mark_needed(tape: Tape) -> None:
    """Find which results a later operation needs, and after which operation each is done with.

    The derivatives of a result are needed where a later operation is curved, or passes them on to
    one that is. The loss itself needs none: its adjoint carries all that is linear.
    """
    if tape.cut is not None:
        tape.needed.add(tape.cut.slot)
    for op in reversed(tape.ops):
        op.wanted = any(value.slot in tape.needed for value in op.made)
        if op.passed:
            op.finishes = [slot for slot in dict.fromkeys(op.inputs) if slot not in tape.needed]
            tape.needed.update(op.inputs)


def forget_unread(tape: Tape) -> None:
    """Keep only the shapes of large values that no rule reads."""
    read = {value.slot for op in tape.ops for value in values_read(op)}
    for op in tape.ops:
        for value in op.made:
            x = value.tensor
            is_large = x.dim() > 0 and x.layout == torch.strided and x.nbytes >= LARGE
            if is_large and value.slot not in read and not value.forgotten:
                value.forget()


def find_cut(tape: Tape) -> Cut | None:
    """Return the place where gbar is read off; None if it must come from the gradient.

    That is the last place, before a curved operation, where the rest of the loss is a function of
    one value, such as the logits. Where there is none, as with a penalty on the weights, it is the
    loss itself: of several values one may depend on another, and then its adjoint counts twice what
    goes through both.
    """
    curved = [i for i, op in enumerate(tape.ops) if op.curved]
    if not curved:
        return None
    made = {value.slot: value for op in tape.ops for value in op.made}
    end = next((value for value in made.values() if value.tensor is tape.loss), None)
    if end is None:
        return None
    open_slots = {end.slot}  # what the operations from here on depend on
    for index in reversed(range(len(tape.ops))):
        op = tape.ops[index]
        outputs = {value.slot for value in op.made}
        if open_slots & outputs:
            open_slots = (open_slots - outputs) | set(op.inputs)
        if index <= curved[-1] and len(open_slots) == 1:
            value = made.get(next(iter(open_slots)))
            # A parameter has no adjoint but its gradient; what no_grad has written to has no edge.
            if value is not None and value.edge is not None:
                return Cut(index, value)
    return None if end.edge is None else Cut(len(tape.ops), end)


def backward(tape: Tape, leaves: Params) -> tuple[Params, Adjoints]:
    """One ordinary backward pass: the gradient by leaves, and adjoints of all curved operations.

    Without leaves it stops before the parameters. The adjoint of the value at the cut is kept with
    it.
    """
    wanted = {value.slot: value for op in tape.ops if op.curved for value in op.made}
    if tape.cut is not None:
        wanted[tape.cut.slot] = tape.cut.value
    inputs = [*leaves.values(), *(value.edge for value in wanted.values())]
    grads = torch.autograd.grad(tape.loss, inputs, allow_unused=True)
    gradient = {
        name: torch.zeros_like(p) if grad is None else grad.detach().to_dense()
        for (name, p), grad in zip(leaves.items(), grads, strict=False)
    }
    adjoints = {
        slot: grad if grad is None or value.part is None else grad.reshape(-1)[value.part]
        for (slot, value), grad in zip(wanted.items(), grads[len(leaves) :], strict=True)
    }
    if tape.cut is not None:
        tape.cut.adjoint = adjoints[tape.cut.slot]
    for value in wanted.values():
        value.edge = None
    return gradient, adjoints  # type: ignore[return-value]


def without_autocast(device: str) -> AbstractContextManager[Any]:
    """Disable autocast around the measurement: the tape says in which dtype each step is."""
    on = torch.is_autocast_enabled(device)
    return torch.autocast(device, enabled=False) if on else nullcontext()


def summarize_sweep(
    closure: Closure,
    params: Params,
    u: Params | None,
    partition: Partition,
    order: int = 3,
    stack_limit: int | None = None,
    may_split: bool = False,
) -> Summary:
    """Compute a summary with one backward pass and one forward sweep (docs/sweep.md).

    About (S/2 + 4)/3 gradients for order 2 and (S + 4)/3 for order 3, where nested differentiation
    takes 7 to 10 gradients for each of the S groups.

    Args:
        closure: Evaluates the loss at the live parameters, batch already bound.
        params: The parameters theta, by name; leaves of the graph.
        u: Direction, one tensor per parameter; None for the gradient of this loss, which the same
            backward pass gives.
        partition: Assignment of the parameters to S groups.
        order: Highest derivative to compute, 1 to 3.
        stack_limit: Bytes that the derivatives of all groups may take at a time. Beyond it groups
            are swept in chunks. By default half of the free memory; a quarter if the caller can
            split the batch.
        may_split: Whether to raise :class:`StackTooLarge` instead, before any work is done: for a
            caller that can split the batch, which is cheaper than chunks of groups.

    Returns:
        The detached summary.

    Raises:
        CannotDifferentiate: If the tape has a gap, or an operation has no second derivative.
    """
    return sweep_batch(closure, Leaves(params, u, partition), order, stack_limit, may_split)


def sweep_batch(
    closure: Closure,
    leaves: Leaves,
    order: int,
    stack_limit: int | None = None,
    may_split: bool = False,
) -> Summary:
    """Compute a summary; arguments as for :func:`summarize_sweep`."""
    keep_freed_memory()
    tape = prepared(closure, leaves, order, stack_limit)
    loss = tape.loss.detach().reshape(())
    parts = (
        1 if order == 1 else leaves.in_parts(_parts(tape, leaves, order, stack_limit, may_split))
    )
    with without_autocast(loss.device.type):
        gbar, adjoints = leaves.backward(tape)
        totals = None if order == 1 else swept(tape, adjoints, leaves, order, parts)
    check_finite(loss)  # only now, when the GPU has been waited for anyway
    warn_of_hidden_rows(tape.hidden)
    Hbar = D3 = None
    if totals is not None:
        at_cut, Hbar, D3 = (torch.from_numpy(x).to(gbar) for x in totals)
        gbar = gbar if tape.cut is None else at_cut
    D3 = D3 if order == 3 else None
    return Summary(gbar, Hbar, D3, loss=loss, partition=leaves.partition, backend="sweep")


def prepared(closure: Closure, leaves: Leaves, order: int, stack_limit: int | None = None) -> Tape:
    """Record the loss, and determine what a sweep of the tape must carry along."""
    tape = leaves.record(closure)
    tape.hidden = [op.saved for op in tape.ops if op.name in MASKED]
    if order > 1:
        present = {op.name for op in tape.ops}
        if present & SOFTMAX:
            Joining(tape).run()
        if "rsqrt" in present:
            JoiningNorms(tape).run()
        if {"cat", "neg"} <= present:
            JoiningRotations(tape).run()
        # Views of parameters come first: between other operations they would end a run of tokens.
        tape.ops.sort(key=lambda op: not is_view_of_leaf(op, tape))
        forget_unread(tape)
        for op in tape.ops:
            op.curved, op.rule = is_curved(op), rule_for(op)
        tape.cut = find_cut(tape)
        mark_needed(tape)
        S = len(leaves.partition)
        made = (value.tensor for op in tape.ops for value in op.made)
        sizes = (x.numel() * x.element_size() for x in made)  # sparse ones have no nbytes
        tape.small = 10 * S * sum(sizes) <= min(SMALL, stack_limit or SMALL)
        if leaves.may_pass_in_pieces(tape) and not tape.small:
            tape.chunked = find_chunked_logits(tape, S, order, stack_limit)
            tape.runs = find_sample_runs(tape, S, order, stack_limit)
            tape.runs += find_token_runs(tape, S, order, stack_limit)
    return tape


def _parts(tape: Tape, leaves: Leaves, order: int, stack_limit: int | None, may_split: bool) -> int:
    """Return in how many parts to sweep the groups so that their stacks fit into memory."""
    if tape.small:
        return 1
    loss = tape.loss.detach()
    needed = stack_bytes(tape, leaves.partition, order)
    limit = stack_limit or default_limit(loss.device, needed, may_split)
    if needed <= limit:
        return 1
    check_finite(loss)
    if may_split:
        raise StackTooLarge(needed, limit)
    return min(-(-needed // limit), len(leaves.partition))


def swept(tape: Tape, adjoints: Adjoints, leaves: Leaves, order: int, parts: int) -> Totals:
    """Sweep all groups, or sets of them one after the other, and return the totals."""
    S = len(leaves.partition)
    whole = Totals(np.zeros(S), np.zeros((S, S)), np.zeros(S))
    plan = [(range(S), order)] if parts == 1 else plan_of_sweeps(S, parts, order)
    for i, (groups, highest) in enumerate(plan):
        last = i == len(plan) - 1
        places, numbers = contributions(tape, adjoints, leaves, highest, groups, consume=last)
        totals = totals_at(where_in_totals(places, S), numbers.double().cpu().numpy(), S)
        whole.gbar[list(groups)] = totals.gbar[list(groups)]
        whole.Hbar[np.ix_(groups, groups)] = totals.Hbar[np.ix_(groups, groups)]
        whole.D3[list(groups)] = totals.D3[list(groups)]
    return whole


@torch.no_grad()
def contributions(
    tape: Tape,
    adjoints: Adjoints,
    leaves: Leaves,
    order: int,
    groups: Sequence[int],
    consume: bool = True,
) -> tuple[list[Place], Tensor]:
    """Sweep once, without waiting for the device.

    Returns:
        All contributions end to end, and where they belong.
    """
    tangents = leaves.tangents(tape.leaves, set(groups))
    sweep = WholeSweep(tape, adjoints, tangents, order)
    sweep.run(consume)
    entries = joined([entries.reshape(-1) for _, entries in sweep.found])
    return [place for place, _ in sweep.found], entries
