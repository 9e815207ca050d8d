"""What a user writes for a partition: the name of a scheme, patterns, or lists of names."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import EllipsisType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from newton_summary.display.names import first_names, nearest
from newton_summary.parallel.processes import aliases_of, trainable, unwrap
from newton_summary.partition.groups import Partition
from newton_summary.partition.layers import (
    Layer,
    find_layers,
    last_layer,
    module_path,
    module_types,
    role,
)

Spec = str | Mapping[str, Any] | Iterable[Sequence[Any]]


# --- schemes: from a model to lists of parameter names --------------------------------------------


def canonical(model: nn.Module) -> dict[str, list[str]]:
    """One group for each parameter tensor."""
    return {name: [name] for name in trainable(model)}


def trivial(model: nn.Module) -> dict[str, list[str]]:
    """One group for everything."""
    return {"all": list(trainable(model))}


def weights_biases(model: nn.Module) -> dict[str, list[str]]:
    """All the weights, and all the biases."""
    names = list(trainable(model))
    groups = {
        "weights": [n for n in names if role(n) == "weight"],
        "biases": [n for n in names if role(n) == "bias"],
    }
    return {name: members for name, members in groups.items() if members}


def layers(model: nn.Module) -> dict[str, list[str]]:
    """One group for each layer: weight and bias of a module, and the norms beside it."""
    root = _root_name(model)
    return {layer.name or root: list(layer.parameters) for layer in find_layers(model)}


def modules(model: nn.Module, k: int) -> dict[str, list[str]]:
    """One group for each module at depth k, such as a block; those above it by their own module."""
    paths = {name: module_path(name) for name in trainable(model)}
    depth = max(len(path.split(".")) if path else 0 for path in paths.values())
    if not 1 <= k <= depth:
        levels = "1 level" if depth == 1 else f"{depth} levels"
        use = "'modules-1'" if depth == 1 else f"a number from 1 to {depth}"
        raise ValueError(
            f"'modules-{k}': the modules of this model that own parameters are at most {levels} "
            f"deep. Use {use}."
            if depth
            else f"'modules-{k}': the model has no modules inside. Use 'layers' or 'canonical'."
        )
    root = _root_name(model)
    groups: dict[str, list[str]] = {}
    for name, path in paths.items():
        groups.setdefault(".".join(path.split(".")[:k]) or root, []).append(name)
    return groups


def _root_name(model: nn.Module) -> str:
    """Return the name of the group with the model's own bare parameters: its type.

    Of a single one its own name, or else a transformer's ``pos`` would be called ``GPT``.
    """
    types = module_types(model)
    bare = [name for name in trainable(model) if not module_path(name)]
    if len(bare) == 1:
        return bare[0]
    return types[""] if types[""] not in types else f"{types['']}()"


def blocks(model: nn.Module, k: int) -> dict[str, list[str]]:
    """k consecutive blocks of the body, weights and biases apart; the last layer stands alone."""
    body, last = _body_and_last(model, k, f"blocks-{k}")
    chunks = [[body[i] for i in part] for part in np.array_split(range(len(body)), k)]
    return _split_by_role("block", chunks) | _alone(last)


def alternate(model: nn.Module, k: int) -> dict[str, list[str]]:
    """Layer l of the body in block l % k, weights and biases apart; the last layer stands alone."""
    body, last = _body_and_last(model, k, f"alternate-{k}")
    return _split_by_role("alternate", [body[i::k] for i in range(k)]) | _alone(last)


def chunks(model: nn.Module, k: int) -> dict[str, list[str]]:
    """k consecutive blocks of all the layers, weights and biases apart (VBigMLP, App. H)."""
    every = find_layers(model)
    _check_count(k, len(every), f"chunks-{k}", "layers")
    parts = [[every[i] for i in part] for part in np.array_split(range(len(every)), k)]
    return _split_by_role("chunk", parts)


def discrete(model: nn.Module) -> dict[str, list[tuple[str, tuple[int, ...]]]]:
    """One group for each number: S = P, Newton's method (App. C)."""
    return {
        name + (str(list(index)).replace(" ", "") if index else ""): [(name, index)]
        for name, p in trainable(model).items()
        for index in np.ndindex(*p.shape)
    }


def _body_and_last(model: nn.Module, k: int, spec: str) -> tuple[list[Layer], Layer]:
    every = find_layers(model)
    last = last_layer(model, every)
    body = [layer for layer in every if layer is not last]
    _check_count(k, len(body), spec, "layers before the last one")
    return body, last


def _check_count(k: int, available: int, spec: str, what: str) -> None:
    if not 1 <= k <= available:
        raise ValueError(
            f"{spec!r}: expected a number from 1 to {available}, how many {what} the model has."
            if available
            else f"{spec!r}: the model has only one layer. Use 'canonical'."
        )


def _split_by_role(prefix: str, parts: Sequence[Sequence[Layer]]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for i, part in enumerate(parts):
        groups[f"{prefix}{i}.weights"] = [name for layer in part for name in layer.weights]
        groups[f"{prefix}{i}.biases"] = [name for layer in part for name in layer.biases]
    return {name: members for name, members in groups.items() if members}


def _alone(layer: Layer) -> dict[str, list[str]]:
    return {name: [name] for name in layer.parameters}


PARTITIONS: dict[str, Callable[..., Mapping[str, Sequence[Any]]]] = {
    "canonical": canonical,
    "trivial": trivial,
    "weights-biases": weights_biases,
    "layers": layers,
    "modules-k": modules,
    "blocks-k": blocks,
    "alternate-k": alternate,
    "chunks-k": chunks,
    "discrete": discrete,
}


# --- from a specification to a partition ----------------------------------------------------------


def make_partition(model: nn.Module, spec: Spec = "canonical") -> Partition:
    r"""Divide the trainable parameters of a model into groups.

    Args:
        model: Any module; wrappers of data parallelism and of ``torch.compile`` are looked through.
        spec: One of

            - ``"canonical"`` (one group per tensor), ``"trivial"`` (one group),
              ``"weights-biases"`` (two groups), ``"discrete"`` (one group per number);
            - ``"layers"``: one group per layer, weight and bias together, named after the module. A
              norm counts with the layer beside it;
            - ``"modules-3"``: one group per module three levels down the tree, such as the blocks
              ``transformer.h.0``, ``transformer.h.1`` of a GPT-2; parameters above that level are
              grouped by their own module;
            - ``"chunks-5"`` (five runs of consecutive layers), ``"blocks-4"`` (four, with the last
              layer apart), ``"alternate-4"`` (every fourth layer together, with the last layer
              apart); in each of these, weights and biases are separate groups. The numbers are
              yours to choose;
            - a mapping from group names to regular expressions, searched in the parameters' names,
              to ``...`` for everything no other group takes, or to lists as below;
            - a list of lists of parameter names. In place of a name, a pair ``(name, index)`` takes
              part of a parameter: ``index`` is what you would write between brackets.

    Returns:
        The partition. Frozen parameters are not in it.

    Raises:
        ValueError: If a parameter is in two groups or in none, a group is empty, a name is
            unknown, a pattern matches nothing, or the model has too few layers or levels.

    >>> net = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    >>> print(make_partition(net, {"first": r"^0\.", "rest": ...}))
    Partition(2 groups, 23 parameters)
       group  module  role   entries  parameters
    0  first  Linear  mixed       15  0.weight (3, 4), 0.bias (3,)
    1  rest   Linear  mixed        8  2.weight (2, 3), 2.bias (2,)
    """
    model = unwrap(model)
    params = trainable(model)
    if not params:
        raise ValueError(
            "The model has no parameter that requires a gradient. "
            "Call requires_grad_(True) on the model, or on the parameters to measure."
        )
    for name, p in params.items():
        if isinstance(p, nn.UninitializedParameter):
            raise ValueError(
                f"Parameter {name!r} belongs to a lazy module and has no shape yet. Call the model "
                f"once on some data first."
            )
    if isinstance(spec, str):
        groups = named_spec(spec)(model)
    elif isinstance(spec, Mapping):
        groups = _match_patterns(spec, model)
    elif isinstance(spec, Iterable):
        groups = _name_lists(spec)
    else:
        raise TypeError(
            f"{spec!r} is not a partition: use a name such as 'canonical', a mapping, or a list "
            "of lists."
        )
    return _assemble(groups, model)


def named_spec(spec: str) -> Callable[[nn.Module], Mapping[str, Sequence[Any]]]:
    """Return what divides a model as the name of a partition says; raise if there is none."""
    if spec in PARTITIONS and not spec.endswith("-k"):
        return PARTITIONS[spec]
    kind, _, number = spec.rpartition("-")
    if f"{kind}-k" in PARTITIONS and number.isdecimal():
        make = PARTITIONS[f"{kind}-k"]
        return lambda model: make(model, int(number))
    if f"{spec}-k" in PARTITIONS or spec in PARTITIONS:
        kind = spec.removesuffix("-k")
        raise ValueError(f"{spec!r} needs a number: for example '{kind}-2'.")
    raise ValueError(
        f"Unknown partition {spec!r}.{nearest(spec, PARTITIONS)} "
        f"Use one of {', '.join(PARTITIONS)} (k is a number), a mapping, or a list of lists."
    )


def _match_patterns(spec: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """Turn patterns into lists of names."""
    names = list(trainable(model))
    groups: dict[str, Any] = {}
    for group, rule in spec.items():
        if not isinstance(group, str):
            raise TypeError(f"Group names must be strings, not {group!r}.")
        if isinstance(rule, EllipsisType):
            groups[group] = rule
        elif isinstance(rule, str | re.Pattern):
            groups[group] = _search(rule, names, group, model)
        elif isinstance(rule, list | tuple):
            groups[group] = list(rule)
        else:
            raise TypeError(
                f"Group {group!r} is {rule!r}: expected a regular expression, a list of names, or "
                "..."
            )
    rests = [group for group, rule in spec.items() if isinstance(rule, EllipsisType)]
    if len(rests) > 1:
        raise ValueError(
            f"Both {rests[0]!r} and {rests[1]!r} are `...`: only one group can take the rest."
        )
    return groups


def _search(
    pattern: str | re.Pattern[str], names: list[str], group: str, model: nn.Module
) -> list[str]:
    """Return the names in which a pattern is found."""
    try:
        found = [name for name in names if re.search(pattern, name)]
    except re.error as error:
        raise ValueError(
            f"Group {group!r}: {pattern!r} is not a valid regular expression: {error}."
        ) from None
    if found:
        return found
    text = pattern if isinstance(pattern, str) else pattern.pattern
    message = f"Group {group!r}: the pattern {text!r} matches no trainable parameter."
    for other, first in aliases_of(model).items():
        if re.search(pattern, other):
            if first not in names:
                raise ValueError(f"{message} It matches {other!r}, which is frozen.")
            raise ValueError(
                f"{message} It matches {other!r}, which is tied to {first!r}: match {first!r} "
                "instead."
            )
    raise ValueError(f"{message} The names are {first_names(names)}.")


def _name_lists(spec: Iterable[Any]) -> dict[str, list[Any]]:
    """Name the groups of a list of lists: after a single parameter, else by number."""
    groups: dict[str, list[Any]] = {}
    for s, members in enumerate(spec):
        if not isinstance(members, list | tuple):
            raise TypeError(f"Group {s} is {members!r}: expected a list of parameter names.")
        alone = len(members) == 1 and isinstance(members[0], str)
        name = members[0] if alone else f"group{s}"
        if name in groups:
            raise ValueError(f"Parameter {name!r} is listed twice, as two groups. List it once.")
        groups[name] = list(members)
    return groups


def _name_and_index(member: Any, group: str) -> tuple[str, Any]:
    """Return the parameter's name and the index into it, None for the whole parameter."""
    if isinstance(member, str):
        return member, None
    if isinstance(member, tuple) and len(member) == 2 and isinstance(member[0], str):
        return member
    held = "a tensor" if isinstance(member, Tensor) else repr(member)
    raise TypeError(
        f"Group {group!r} contains {held}: expected the name of a parameter, or a pair (name, "
        "index) for part of one."
    )


def _assemble(groups: Mapping[str, Any], model: nn.Module) -> Partition:
    """Turn lists of members into labels; raise if anything is in two groups or in none.

    ``...`` in place of a list takes what the others leave.
    """
    params, aliases = trainable(model), aliases_of(model)
    names = list(groups)
    labels: dict[str, int | Tensor] = {}
    for s, (group, members) in enumerate(groups.items()):
        for member in () if members is ... else members:
            written, index = _name_and_index(member, group)
            name = aliases.get(written, written)
            if name not in params:
                raise ValueError(_unknown_name(written, group, params, aliases))
            label = labels.get(name)
            if index is None and label is None:
                labels[name] = s
                continue
            if isinstance(label, int):
                raise ValueError(_in_two_groups(name, names[label], group, aliases))
            if label is None:
                label = torch.full(params[name].shape, -1, dtype=torch.long)
            chosen = _index_mask(label, index, written, group)
            taken = label[chosen & (label >= 0)]
            if len(taken):
                raise ValueError(_in_two_groups(name, names[int(taken[0])], group, aliases))
            label[chosen] = s
            labels[name] = label
    for s, (group, members) in enumerate(groups.items()):
        if members is ...:
            rest = [name for name in params if name not in labels]
            if not rest:
                raise ValueError(
                    f"Group {group!r} takes the rest, but nothing is left. Leave it out."
                )
            labels |= dict.fromkeys(rest, s)
    for name, p in params.items():
        label = labels.get(name)
        if label is None:
            raise ValueError(
                f"Parameter {name!r} is in no group. Add it to one, freeze it with "
                f"requires_grad_(False), or let a group take the rest: {{'rest': ...}}."
            )
        if isinstance(label, Tensor):
            if bool((label < 0).any()):
                where = tuple((label < 0).nonzero()[0].tolist())
                raise ValueError(
                    f"Entry {where} of parameter {name!r} is in no group. Add it to one."
                )
            whole = bool((label == label.flatten()[0]).all())
            labels[name] = int(label.flatten()[0]) if whole else label.to(p.device)
    return Partition(names, params, {name: labels[name] for name in params}, model)


def _index_mask(label: Tensor, index: Any, name: str, group: str) -> Tensor:
    mask = torch.zeros_like(label, dtype=torch.bool)
    if isinstance(index, Tensor):
        index = index.cpu()
    try:
        mask[... if index is None else index] = True
    except (IndexError, TypeError, RuntimeError, ValueError) as error:
        raise ValueError(
            f"Group {group!r}: {index!r} is not a valid index into parameter {name!r} "
            f"of shape {tuple(label.shape)}: {error}"
        ) from None
    if not bool(mask.any()):
        raise ValueError(
            f"Group {group!r}: {index!r} selects no entry of parameter {name!r} "
            f"of shape {tuple(label.shape)}. Leave it out."
        )
    return mask


def _unknown_name(
    name: str, group: str, params: Mapping[str, Tensor], aliases: Mapping[str, str]
) -> str:
    if name in aliases:
        return (
            f"Group {group!r} contains {name!r}, which is frozen. Leave it out, or call "
            f"requires_grad_(True) on it."
        )
    return f"Group {group!r}: the model has no parameter {name!r}.{nearest(name, params)}"


def _in_two_groups(name: str, first: str, second: str, aliases: Mapping[str, str]) -> str:
    others = [other for other, same in aliases.items() if same == name and other != name]
    tied = f" (tied to {', '.join(map(repr, others))})" if others else ""
    if first == second:
        return f"Parameter {name!r}{tied} is listed twice in group {first!r}. List it once."
    return (
        f"Parameter {name!r}{tied} is in two groups, {first!r} and {second!r}. Make the groups "
        "exclude each other."
    )
