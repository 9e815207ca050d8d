"""The arguments of NewtonSummary: checks with clear errors, and groups added later."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any, Literal, get_args

from torch import Tensor, nn
from torch.optim import Optimizer

from newton_summary.measuring.param_groups import held_by
from newton_summary.optimizer.steering import SET_POINT
from newton_summary.partition import Partition, make_partition

Variant = Literal["steered", "careful", "as-run", "as-published"]

SET_POINTS: dict[Variant, float] = {"steered": SET_POINT, "careful": 1.0}  # those that steer
BUDGET = 0.25  # the share of the time that refreshes may take, if nothing else is said


def check_settings(settings: Mapping[str, Any]) -> None:
    """Raise unless all settings are valid, with an error that says what is expected."""
    if settings["variant"] not in get_args(Variant):
        known = ", ".join(map(repr, get_args(Variant)))
        raise ValueError(f"variant={settings['variant']!r}: expected one of {known}.")
    for name, least in (("summary_period", 1), ("summary_window", 1), ("warmup", 0)):
        value = settings[name]
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{name}={value!r}: expected a whole number, {least} or more.")
    limits = dict.fromkeys(("lr", "lambda_int", "weight_decay"), math.inf)
    for name, limit in {**limits, "momentum": 1.0, "eta_momentum": 1.0}.items():
        if not (is_number(settings[name]) and 0 <= float(settings[name]) < limit):
            words = "finite" if limit == math.inf else "below 1"
            raise ValueError(f"{name}={settings[name]!r}: expected a number, 0 or more, {words}.")
    if not (is_number(settings["budget"]) and 0 < settings["budget"] < 1):
        raise ValueError(f"budget={settings['budget']!r}: expected a share of the time, 0 to 1.")
    others, whose = {"weight_decay": 0, "budget": BUDGET}, "variant='steered' or 'careful'"
    if settings["variant"] in SET_POINTS:
        others, whose = {"eta_momentum": 0}, "the paper's algorithm"
    for name, default in others.items():
        if settings[name] != default:
            raise ValueError(f"{name}={settings[name]!r} is only for {whose}: leave it out.")


def is_number(value: Any) -> bool:
    """Whether a value can be a rate: a number, or a tensor that holds one."""
    return isinstance(value, Real) or (isinstance(value, Tensor) and value.numel() == 1)


def as_partition(given: Any) -> Partition:
    """Return a partition with its model; for a model, all parameters as one group."""
    if isinstance(given, nn.Module):
        return make_partition(given, "trivial")
    if not isinstance(given, Partition):
        words = f"has type {type(given).__name__}"
        if isinstance(given, Iterable):
            words += ", perhaps model.parameters() as for other optimizers"
        raise TypeError(
            f"The first argument {words}: expected the model, NewtonSummary(model, loss_fn), or "
            "groups of its parameters, make_partition(model)."
        )
    if given.model is None:
        raise ValueError(
            "The partition was read from a file, so it has no model: make one with "
            "make_partition(model, ...)."
        )
    return given


def check_direction(direction: Optimizer, partition: Partition) -> None:
    """Raise unless an optimizer moves the parameters of the partition, and no others."""
    if not isinstance(direction, Optimizer):
        raise TypeError(f"direction={direction!r}: expected a torch optimizer, or None.")
    if len(held_by(direction, partition.params)) < len(partition.params):  # raises for others
        raise ValueError(
            "The optimizer given as direction does not hold all parameters of the partition. Add "
            "the others to it, or leave them out of the partition."
        )


def extended(partition: Partition, model: nn.Module, params: list[Tensor], name: str) -> Partition:
    """Return the partition with one more group."""
    names = {id(p): n for n, p in model.named_parameters()}
    for p in params:
        if id(p) not in names:
            raise ValueError(
                f"The new group {name!r} holds a tensor of shape {tuple(p.shape)} that is not a "
                "parameter of the model. Register it with the model first."
            )
        if names[id(p)] in partition.params:
            raise ValueError(f"Parameter {names[id(p)]!r} is already in the partition.")
    added = {names[id(p)]: p for p in params}
    labels = {**partition.labels, **dict.fromkeys(added, len(partition))}
    return Partition([*partition.names, name], {**partition.params, **added}, labels, model)
