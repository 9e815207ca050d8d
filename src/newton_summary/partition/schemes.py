"""The named ways to group the parameters of a model: which tensors belong together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import numpy as np
from torch import nn

from newton_summary.partition.parameters import role, trainable


@dataclass(frozen=True)
class Layer:
    """Parameters that stay together: those of one module, and of the norms that follow it."""

    weights: tuple[str, ...]
    biases: tuple[str, ...]


def find_layers(model: nn.Module) -> list[Layer]:
    """Return the layers of a model in order.

    A layer is a module that owns trainable parameters directly, so the weight and the bias of a
    module stay together; of parameter lists, those at the same place. A norm layer belongs to the
    layer before it, so that convolution and batch norm count as one, as a reader would; to the one
    after it where that is nearer in the tree of modules (a transformer's block that begins with a
    norm), or where there is none before. An embedding is a layer, and so are the bare parameters of
    a module. A tied parameter belongs to the module that comes first.
    """
    modules = dict(model.named_modules())
    by_owner: dict[str, list[str]] = {}
    for name in trainable(model):
        by_owner.setdefault(_owner(name, modules), []).append(name)
    owners = list(by_owner)
    others = [i for i, owner in enumerate(owners) if not _is_norm(modules.get(owner))]
    layers: dict[int, list[str]] = {}
    for i, owner in enumerate(owners):
        layer = i
        if i not in others and others:
            before = max((j for j in others if j < i), default=None)
            after = min((j for j in others if j > i), default=None)
            layer = _nearer(owners, i, before, after)
        layers.setdefault(layer, []).extend(by_owner[owner])
    return [
        Layer(
            weights=tuple(n for n in names if role(n) == "weight"),
            biases=tuple(n for n in names if role(n) == "bias"),
        )
        for _, names in sorted(layers.items())
    ]


def _nearer(owners: Sequence[str], norm: int, before: int | None, after: int | None) -> int:
    """Return which neighbour shares more of the module path with a norm; in doubt the former."""

    def shared(layer: int) -> int:
        pairs = zip(owners[norm].split("."), owners[layer].split("."))
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    if before is None or after is None:
        return next(layer for layer in (before, after) if layer is not None)
    return after if shared(after) > shared(before) else before


def _owner(name: str, modules: Mapping[str, nn.Module]) -> str:
    """Return the module that a user would say owns a parameter.

    Parametrisations are seen through. The entries of parameter lists are told apart by their place.
    """
    owner, parametrized, _ = f".{name}".partition(".parametrizations.")
    if parametrized:
        return owner[1:]
    owner, _, own = name.rpartition(".")
    if isinstance(modules.get(owner), nn.ParameterList | nn.ParameterDict):
        return f"{owner.rpartition('.')[0]}[{own}]"
    return owner


def _is_norm(module: nn.Module | None) -> bool:
    """Return whether a module is a norm layer, also one that torch does not know."""
    if module is None or "norm" not in type(module).__name__.lower():
        return False
    shapes = (p.shape for p in module.parameters(recurse=False))
    return isinstance(module, nn.LayerNorm | nn.RMSNorm) or all(
        sum(length > 1 for length in shape) <= 1 for shape in shapes
    )


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


def blocks(model: nn.Module, k: int) -> dict[str, list[str]]:
    """k consecutive blocks of the body, weights and biases apart; the last layer stands alone."""
    *body, last = find_layers(model)
    _check_count(k, len(body), f"blocks-{k}", "layers before the last one")
    chunks = [[body[i] for i in part] for part in np.array_split(range(len(body)), k)]
    return _split_by_role("block", chunks) | _alone(last)


def alternate(model: nn.Module, k: int) -> dict[str, list[str]]:
    """Layer l of the body in block l % k, weights and biases apart; the last layer stands alone."""
    *body, last = find_layers(model)
    _check_count(k, len(body), f"alternate-{k}", "layers before the last one")
    return _split_by_role("alternate", [body[i::k] for i in range(k)]) | _alone(last)


def chunks(model: nn.Module, k: int) -> dict[str, list[str]]:
    """k consecutive blocks of all the layers, weights and biases apart (VBigMLP, App. H)."""
    layers = find_layers(model)
    _check_count(k, len(layers), f"chunks-{k}", "layers")
    parts = [[layers[i] for i in part] for part in np.array_split(range(len(layers)), k)]
    return _split_by_role("chunk", parts)


def discrete(model: nn.Module) -> dict[str, list[tuple[str, tuple[int, ...]]]]:
    """One group for each number: S = P, Newton's method (App. C)."""
    return {
        name + (str(list(index)).replace(" ", "") if index else ""): [(name, index)]
        for name, p in trainable(model).items()
        for index in np.ndindex(*p.shape)
    }


def _check_count(k: int, available: int, spec: str, what: str) -> None:
    if not 1 <= k <= available:
        raise ValueError(
            f"{spec!r} needs {k} {what}, and the model has {available}. "
            f"Write a number from 1 to {available}."
            if available
            else f"{spec!r}: the model has only one layer. Use 'canonical'."
        )


def _split_by_role(prefix: str, parts: Sequence[Sequence[Layer]]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for i, layers in enumerate(parts):
        groups[f"{prefix}{i}.weights"] = [name for layer in layers for name in layer.weights]
        groups[f"{prefix}{i}.biases"] = [name for layer in layers for name in layer.biases]
    return {name: members for name, members in groups.items() if members}


def _alone(layer: Layer) -> dict[str, list[str]]:
    return {name: [name] for name in (*layer.weights, *layer.biases)}


PARTITIONS: dict[str, Callable[..., Mapping[str, Sequence[Any]]]] = {
    "canonical": canonical,
    "trivial": trivial,
    "weights-biases": weights_biases,
    "blocks-k": blocks,
    "alternate-k": alternate,
    "chunks-k": chunks,
    "discrete": discrete,
}
