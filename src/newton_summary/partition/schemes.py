"""The partitions that have names, as functions from a model to lists of parameter names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import nn

from newton_summary.partition.layers import (
    Layer,
    find_layers,
    last_layer,
    module_path,
    module_types,
)
from newton_summary.partition.parameters import role, trainable


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
        raise ValueError(
            f"'modules-{k}': the modules of this model that own parameters are at most {depth} "
            f"levels deep. Use a number from 1 to {depth}."
            if depth
            else f"'modules-{k}': the model has no modules inside. Use 'layers' or 'canonical'."
        )
    root = _root_name(model)
    groups: dict[str, list[str]] = {}
    for name, path in paths.items():
        groups.setdefault(".".join(path.split(".")[:k]) or root, []).append(name)
    return groups


def _root_name(model: nn.Module) -> str:
    """Return the name of the group with the model's own bare parameters: its type."""
    types = module_types(model)
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
            f"{spec!r} needs {k} {what}, but the model has {available}. "
            f"Use a number from 1 to {available}."
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
