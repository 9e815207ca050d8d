"""The sweep of a model whose parameters are divided among ranks (FSDP2).

The same tape, backward pass and rules as in :func:`summarize_sweep`; parameters and directions are
gathered when an operation needs them, and the gradient of a parameter becomes its part of gbar as
soon as it is there. All ranks do this at the same time, each with data of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from newton_summary.derivatives.sweep.engine import (
    KNOWN,
    Sweep,
    backward,
    leaf_tangent,
    mark_needed,
    swept,
    with_totals,
    without_autocast,
)
from newton_summary.derivatives.sweep.memory import default_limit, stack_bytes
from newton_summary.derivatives.sweep.recorder import Recorder
from newton_summary.derivatives.sweep.rules import DECOMPOSED, PREPARE
from newton_summary.derivatives.sweep.tangent import Tangent
from newton_summary.parallel.fsdp import Shards
from newton_summary.partition import Params, Partition, result_dtype
from newton_summary.probe.probe import Closure, check_depends, check_finite
from newton_summary.summary import Summary


class Tangents(dict[int, Tangent]):
    """Tangents by slot; those of parameters are made from the direction when they are asked for."""

    def __init__(
        self,
        leaves: dict[int, str],
        shards: Shards,
        u: Params,
        partition: Partition,
        groups: set[int],
    ):
        super().__init__()
        self.shards, self.u, self.partition, self.groups = shards, u, partition, groups
        self.leaves = {slot: name for slot, name in leaves.items() if self._moves(name)}

    def _moves(self, name: str) -> bool:
        label = self.partition.labels[name]
        present = {label} if isinstance(label, int) else set(torch.unique(label).tolist())
        return not present.isdisjoint(self.groups)

    def __contains__(self, slot: object) -> bool:
        """Return whether a value has derivatives."""
        return slot in self.leaves or super().__contains__(slot)

    def get(self, slot: int, default: Any = None) -> Any:
        """Return the derivatives of a value."""
        name = self.leaves.get(slot)
        if name is None:
            return super().get(slot, default)
        U = self.shards.whole(self.u[name])
        label = self.partition.labels[name]
        label = label if isinstance(label, int) else label.to(U.device)
        return leaf_tangent(U, label, self.groups)


def summarize_sharded(
    closure: Closure,
    params: Shards,
    u: Params,
    partition: Partition,
    order: int = 3,
    stack_limit: int | None = None,
    ranks: Any = None,
) -> Summary:
    """Compute a rank's summary of a sharded model; the arguments are those of the sweep.

    Args:
        closure: Evaluates the loss of this rank's batch.
        params: The sharded parameters.
        u: Direction, sharded as the parameters are, or whole.
        partition: Assignment of the parameters to S groups.
        order: Highest derivative to compute, 1 to 3.
        stack_limit: As for :func:`summarize_sweep`. Groups are swept in as many chunks as the rank
            with the least memory needs.
        ranks: The ranks that take part; None if there is one.
    """
    tape = Recorder(params, KNOWN, PREPARE, DECOMPOSED).record(closure)
    params.gathered = None
    check_depends(tape.loss, {"all": params.anchor})
    loss = tape.loss.detach().reshape(())
    check_finite(loss)
    parts, last_uses = 1, []
    if order > 1:
        last_uses = mark_needed(tape)
        needed = stack_bytes(tape, last_uses, partition, order)
        limit = stack_limit or default_limit(loss.device, needed, may_split=False)
        parts = min(-(-needed // limit), len(partition)) if needed > limit else 1
        parts = parts if ranks is None else max(ranks.gather(parts))
    gbar = torch.zeros(len(partition), dtype=result_dtype(params), device=loss.device)

    def receive(name: str, grad: Tensor) -> None:
        gbar.add_(partition.inner({name: grad}, {name: params.whole(u[name])}).to(gbar.device))

    with without_autocast(loss.device.type):
        params.received = receive
        _, adjoints = backward(tape, {"all": params.anchor})
        params.received = None
    how = {"loss": loss, "partition": partition, "backend": "sweep"}
    if order == 1:
        return Summary(gbar, **how)  # type: ignore[arg-type]

    def start(groups: Sequence[int]) -> Sweep:
        sweep = Sweep(replace(tape, leaves={}), adjoints, {}, partition, order, groups)
        sweep.tangents = Tangents(tape.leaves, params, u, partition, set(groups))
        return sweep

    with without_autocast(loss.device.type):
        totals = swept(start, len(partition), parts, last_uses)
    return with_totals(Summary(gbar, **how), totals, order)  # type: ignore[arg-type]
