"""The parameter groups of a torch optimizer: as a partition, and with other learning rates."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler

from newton_summary.display.warn import warn_user
from newton_summary.measuring.measurement import find_partition
from newton_summary.partition import Partition, unwrap
from newton_summary.probe.state import Journal

_MULTIPLIES = (  # the present rate; the other schedulers compute rates from those at their start
    lr_scheduler.StepLR,
    lr_scheduler.MultiStepLR,
    lr_scheduler.ExponentialLR,
    lr_scheduler.MultiplicativeLR,
    lr_scheduler.ConstantLR,
    lr_scheduler.LinearLR,
    lr_scheduler.PolynomialLR,
    lr_scheduler.CosineAnnealingLR,
    lr_scheduler.ReduceLROnPlateau,
)


def held_by(optimizer: Optimizer, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the parameters of a model that an optimizer moves, by name; raise if it has others."""
    if any(group.get("maximize") for group in optimizer.param_groups):
        raise ValueError(
            "The optimizer has maximize=True, so its steps raise the loss, but rates are chosen "
            "to lower it. Drop maximize, and let loss_fn return what is to be minimised."
        )
    owned = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    held = {name: p for name, p in params.items() if id(p) in owned}
    known = set(map(id, held.values()))
    strange = [p for i, p in owned.items() if p.requires_grad and i not in known]
    if strange or not held:
        what = "no trainable parameter of the model"
        if strange:
            what = (
                f"a parameter of shape {tuple(strange[0].shape)}, not a trainable one of the model"
            )
        raise ValueError(
            f"The optimizer holds {what}: it belongs to another model, or was frozen when a "
            f"partition was made. Use {type(optimizer).__name__}(model.parameters(), ...), or make "
            "the partition anew."
        )
    return held


def leave_out_others(model: nn.Module, optimizer: Optimizer, partition: Any, thaw: Journal) -> None:
    """Freeze the parameters that the optimizer does not hold, until the end of ``thaw``."""
    kept = partition.params.values() if isinstance(partition, Partition) else ()
    params = dict(unwrap(model).named_parameters())
    held = {id(p) for p in held_by(optimizer, params).values()}
    for p in params.values():
        if p.requires_grad and id(p) not in held and not any(p is q for q in kept):
            thaw.undo_later(partial(p.requires_grad_, True))
            p.requires_grad_(False)


def own_groups(model: nn.Module, optimizer: Optimizer) -> Partition:
    """Return the optimizer's own groups as a partition."""
    names = {id(p): name for name, p in unwrap(model).named_parameters()}
    groups: dict[str, list[str]] = {}
    for i, group in enumerate(optimizer.param_groups):
        members = [names[id(p)] for p in group["params"] if p.requires_grad]
        if members:
            name = str(group.get("name", f"group{i}"))
            groups[name if name not in groups else f"{name} ({i})"] = members
    return find_partition(model, groups)


def rates_of(optimizer: Optimizer, partition: Partition, s: int) -> tuple[float, ...]:
    """Return the learning rates of the optimizer's groups that hold parameters of group ``s``."""
    ids = {id(partition.params[member.name]) for member in partition.members[s]}
    touched = [g for g in optimizer.param_groups if any(id(p) in ids for p in g["params"])]
    return tuple(dict.fromkeys(float(group["lr"]) for group in touched))


def multiply_rates(optimizer: Optimizer, partition: Partition, factors: Sequence[float]) -> None:
    """Multiply the learning rate of each group of the partition; split the optimizer's if needed.

    Warns where a scheduler of this optimizer would undo the change or stop working.
    """
    if partition.divided:
        raise ValueError(
            f"Parameter {partition.divided[0]!r} is divided among groups, but torch's optimizers "
            "have one learning rate per parameter. Use a partition into whole tensors, such as "
            "'canonical'."
        )
    labels = {id(partition.params[name]): int(label) for name, label in partition.labels.items()}
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        found = {labels[id(p)]: None for p in group["params"] if id(p) in labels}
        if len(found) <= 1:
            groups.append(group)
            _multiply(group, factors[next(iter(found))] if found else 1.0)
            continue
        for s in (*found, None):  # at last, those of no group, such as frozen ones
            chosen = [labels.get(id(p)) == s for p in group["params"]]
            if any(chosen):
                groups.append(_part(group, chosen, "rest" if s is None else partition.names[s]))
                _multiply(groups[-1], 1.0 if s is None else factors[s])
    split = len(groups) > len(optimizer.param_groups)
    optimizer.param_groups[:] = groups
    if split or any(factor != 1 for factor in factors):
        _warn_of_schedulers(optimizer, split)


def _warn_of_schedulers(optimizer: Optimizer, split: bool) -> None:
    """Warn about schedulers of the optimizer: it does not know them, so look among all objects."""
    kinds = [
        type(found)
        for found in gc.get_objects()
        if issubclass(type(found), lr_scheduler.LRScheduler)
        and getattr(found, "optimizer", None) is optimizer
    ]
    names = ", ".join(sorted({kind.__name__ for kind in kinds}))
    if kinds and split:
        warn_user(
            f"The optimizer now has {len(optimizer.param_groups)} parameter groups, but its "
            f"scheduler ({names}) was made for fewer and will fail or ignore some. Create the "
            "scheduler after apply()."
        )
    elif undoing := [kind for kind in kinds if not issubclass(kind, _MULTIPLIES)]:
        names = ", ".join(sorted({kind.__name__ for kind in undoing}))
        own = issubclass(undoing[0], (lr_scheduler.OneCycleLR, lr_scheduler.CyclicLR))
        and_then = (  # at its start the rates are a fraction of it, and advice is about these
            ": ask with the highest rate of its cycle as lr, and use the suggested rate as max_lr"
            if own
            else ""
        )
        warn_user(
            f"The scheduler of this optimizer ({names}) computes rates from those at its start "
            f"and will undo this change. Create the scheduler after apply(){and_then}."
        )


def _part(group: dict[str, Any], chosen: Sequence[bool], own: str) -> dict[str, Any]:
    """Return a parameter group with some of the parameters, a name, and all of the options."""
    part = {**group, "name": f"{group['name']}.{own}" if "name" in group else own}
    for key in ("params", "param_names"):  # names, if torch was given some
        if key in group:
            part[key] = [value for value, keep in zip(group[key], chosen, strict=True) if keep]
    for key in ("lr", "initial_lr"):
        if isinstance(part.get(key), Tensor):
            part[key] = part[key].clone()
    return part


def _multiply(group: dict[str, Any], factor: float) -> None:
    for key in ("lr", "initial_lr"):  # the second is what a scheduler starts from
        if isinstance(group.get(key), Tensor):
            group[key].mul_(factor)
        elif key in group:
            group[key] *= factor
