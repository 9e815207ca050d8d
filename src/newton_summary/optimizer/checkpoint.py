"""Read a saved state of NewtonSummary: everything is checked before anything is loaded."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from newton_summary.display.names import first_names
from newton_summary.optimizer.checks import check_settings
from newton_summary.parallel.processes import local_part
from newton_summary.partition import Partition

KEY = "newton_summary"
# What is shaped as its parameter.
BUFFERS = {"momentum_buffer", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "average"}
FORMAT = 2


def find_saved(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return what NewtonSummary wrote into a state, with its tensors on the CPU."""
    saved = state_dict.get(KEY) if isinstance(state_dict, Mapping) else None
    if not isinstance(saved, dict):
        raise ValueError("Not a state_dict of NewtonSummary, but of another optimizer.")
    if saved.get("format") != FORMAT:
        raise ValueError(
            "This state was saved by newton_summary 0.1.0, which did not record its settings and "
            "kept other averages. Finish that training with 0.1.0, or load the weights of its "
            "model and start a new optimizer."
        )
    # Loaders and frameworks may have moved everything to the parameters' device.
    return dict(tree_map(lambda x: x.cpu().clone() if isinstance(x, Tensor) else x, saved))


@contextmanager
def reporting_damage() -> Iterator[None]:
    """Report a missing entry, or one of another type, as a damaged state."""
    try:
        yield
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"The state is damaged or incomplete ({reason}).") from error


def check_same(
    saved: Mapping[str, Any],
    names: Sequence[str],
    settings: Mapping[str, Any],
    given: Mapping[str, bool],
) -> None:
    """Raise unless a state is that of an optimizer created in the same way.

    Args:
        saved: The state.
        names: Names of the groups.
        settings: What this optimizer was created with.
        given: Whether it has its own direction, and its own data.
    """
    if list(saved["groups"]) != list(names):
        raise ValueError(
            f"The checkpoint has the groups {first_names(saved['groups'], 5)}, but this optimizer "
            f"{first_names(names, 5)}. Use the same partition."
        )
    differing = [
        f"{name}={theirs!r} (here {settings.get(name)!r})"
        for name, theirs in saved["settings"].items()
        if theirs != settings.get(name)
    ]
    if differing:
        raise ValueError(
            f"The checkpoint was saved with other settings: {', '.join(differing)}. Create the "
            "optimizer with the same settings, load, and then change param_groups if you want "
            "others."
        )
    written = {"direction": "direction=...", "data": "curvature=(loss_fn, loader)"}
    for part, mine in given.items():
        if (saved[part] is not None) != mine:
            here, there = ("with", "without") if mine else ("without", "with")
            raise ValueError(
                f"This optimizer was made {here} {written[part]}, that of the checkpoint {there}. "
                "Create it in the same way."
            )


def check_groups(state_dict: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise unless a state has valid settings, and finite buffers of the right shapes."""
    saved = state_dict["param_groups"]
    sizes = [[len(group["params"]) for group in x] for x in (saved, groups)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"The param_groups of the checkpoint have {sizes[0]} parameters, but those of this "
            f"optimizer {sizes[1]}."
        )
    for theirs, mine in zip(saved, groups):
        check_settings(theirs)
        for index, p in zip(theirs["params"], mine["params"]):
            buffers = state_dict["state"].get(index, {})
            for name in BUFFERS & set(buffers):
                if buffers[name].shape != p.shape:
                    raise ValueError(
                        f"{name} of {mine['name']!r} has shape {tuple(buffers[name].shape)}, but "
                        f"its parameter {tuple(p.shape)}."
                    )
    check_finite(state_dict["state"], "The state of a parameter")
    check_finite([group.get("eta") for group in saved], "The rates of a group")


def check_finite(tree: Any, what: str) -> None:
    """Raise if a tensor or a number in it is not finite."""
    for x in tree_leaves(tree):
        if isinstance(x, Tensor) and not bool(local_part(x).isfinite().all()):
            raise ValueError(f"{what} has non-finite entries.")
        if isinstance(x, float) and not math.isfinite(x):
            raise ValueError(f"{what} has a number that is {x}.")


def read_rates(values: Tensor | None, partition: Partition) -> Tensor | None:
    """Return rates, (S,); raise if they are invalid."""
    if values is None:
        return None
    if values.shape != (len(partition),) or not (values.isfinite() & (values >= 0)).all():
        raise ValueError(
            f"The state has eta = {values}: expected {len(partition)} finite numbers, 0 or more."
        )
    return values.to(torch.float64)


def read_counts(saved: Mapping[str, Any], *names: str) -> list[int]:
    """Return counts of refreshes and steps; raise if they are invalid."""
    counts = {name: saved[name] for name in names}
    if not all(type(x) is int and x >= 0 for x in counts.values()):
        raise ValueError(f"The state has the counts {counts}: expected whole numbers, 0 or more.")
    return list(counts.values())
