"""What a rank is about to do, so that ranks can tell before they start whether it is the same.

Messages of different lengths end the processes, or wait for ever; different parameters or
directions give the mean of things that do not belong together. Both are mistakes that a script with
``if rank == 0`` or without a seed makes easily.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from newton_summary.parallel.fsdp import is_sharded
from newton_summary.partition import Partition

ALIKE = 1e-3  # of a tensor's norm: what replicas may drift apart on machines of different kinds


class Plan:
    """What a rank is about to do.

    Args:
        partition: The groups that it measures, and with them the parameters.
        values: Tensors whose values have to be the same on all ranks, by what they are. Sharded
            ones are left out, which are not.
        **facts: What else has to be the same, such as the order.

    Attributes:
        facts: All that has to be the same but for values, in words.
        digest: A short text that is the same if the facts are.
    """

    def __init__(self, partition: Partition, values: Mapping[str, Tensor], **facts: Any):
        self.facts = {name: str(fact) for name, fact in facts.items()}
        for name, p in partition.params.items():
            label = partition.labels[name]
            where = repr(partition.names[label]) if isinstance(label, int) else _places(label)
            kind = "sharded " if is_sharded(p) else ""
            self.facts[f"parameter {name!r}"] = f"{kind}{p.dtype} {tuple(p.shape)} in group {where}"
        self.values = {what: x.detach() for what, x in values.items() if not is_sharded(x)}
        for what, x in self.values.items():
            self.facts.setdefault(what, f"{x.dtype} {tuple(x.shape)}")
        self.digest = hashlib.sha256(repr(self.facts).encode()).hexdigest()

    def extremes(self) -> Tensor:
        """Return numbers of which the largest over ranks tell how far the values are apart.

        For every tensor its sum, the negative of that, and its norm: (3, tensors). Tensors that
        were drawn differently differ in their sums by as much as their norm.
        """
        tensors = list(self.values.values())
        if not tensors:
            return torch.zeros(3, 0, dtype=torch.float64)
        sums = _stacked([x.sum(dtype=torch.float64) for x in tensors])
        return torch.stack([sums, -sums, norms(tensors)]).nan_to_num(0.0, 1e300, -1e300)


def norms(tensors: Sequence[Tensor]) -> Tensor:
    """Return the norm of each tensor, in float64 on the device of the first."""
    wide = [torch.promote_types(x.dtype, torch.float32) for x in tensors]
    return _stacked([torch.linalg.vector_norm(x, dtype=d) for x, d in zip(tensors, wide)])


def live_values(partition: Partition, direction: Any) -> dict[str, Tensor]:
    """Return what has to be the same on all ranks that measure: parameters, a given direction."""
    values = {f"parameter {name!r}": p for name, p in partition.params.items()}
    if isinstance(direction, Mapping):
        for name, u in direction.items():
            if isinstance(u, Tensor):
                values[f"the direction of {name!r}"] = u
    return values


def spread_too_far(plan: Plan, extremes: Tensor) -> str | None:
    """Return what has different values on different ranks, from the largest over ranks; or None."""
    largest, smallest, norm = extremes
    for what, far in zip(plan.values, (largest + smallest > ALIKE * norm).tolist(), strict=True):
        if far:
            return what
    return None


def find_difference(plans: Sequence[Mapping[str, str]], numbers: Sequence[int]) -> str:
    """Return in words the first thing in which the plans of ranks differ.

    Args:
        plans: The facts of each rank, which are not all the same.
        numbers: Of the ranks.
    """
    first = plans[0]
    for number, plan in zip(numbers[1:], plans[1:], strict=True):
        for name in [*first, *plan]:
            a, b = first.get(name, "missing"), plan.get(name, "missing")
            if a != b:
                return (
                    f"The ranks are not in step: {name} is {a} on rank {numbers[0]} and {b} on "
                    f"rank {number}. All ranks have to make the same call, for the same model."
                )
    raise AssertionError("the plans are the same")


def _stacked(numbers: Sequence[Tensor]) -> Tensor:
    """Return numbers as a vector on the device of the first, without waiting for it."""
    return torch.stack([x.to(numbers[0].device, torch.float64) for x in numbers])


def _places(label: Tensor) -> str:
    groups, counts = torch.unique(label, return_counts=True)
    some = dict(zip(groups.tolist()[:3], counts.tolist()[:3]))
    return f"{some}, {len(groups)} in all"
