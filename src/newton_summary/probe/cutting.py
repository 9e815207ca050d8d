"""Change the tensors in a batch: cut it into parts, or copy some of them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from newton_summary.probe.inputs import has_length, is_dataclass, leaves


def map_batch(change: Callable[[Any], Any], batch: Any) -> Any:
    """Apply a function to every leaf of a batch; containers keep their types.

    Lists, and leaves, are passed to the function as a whole. A list that it returns unchanged is
    mapped item by item.
    """
    if isinstance(batch, Mapping):
        items = {key: map_batch(change, value) for key, value in batch.items()}
        if type(batch) is dict:
            return items
        changed = copy.copy(batch)  # such as the output of a tokenizer
        for key, value in items.items():
            changed[key] = value  # type: ignore[index]
        return changed
    if isinstance(batch, tuple):
        children = [map_batch(change, child) for child in batch]
        return type(batch)(*children) if hasattr(batch, "_fields") else tuple(children)
    if is_dataclass(batch):
        values = {f.name: map_batch(change, getattr(batch, f.name)) for f in _fields(batch)}
        return dataclasses.replace(batch, **values)
    changed = change(batch)
    if changed is batch and isinstance(batch, list):
        return [map_batch(change, child) for child in batch]
    return changed


def _fields(batch: Any) -> list[dataclasses.Field[Any]]:
    return [field for field in dataclasses.fields(batch) if field.init]


def to_device(batch: Any, device: torch.device) -> Any:
    """Return a batch with its tensors on a device."""
    return map_batch(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, batch)


def take_samples(batch: Any, size: int, samples: slice) -> Any:
    """Return a part of a batch: what has the batch's length is cut, everything else is kept.

    Cut are tensors and arrays, and lists inside the batch that hold one object per sample rather
    than tensors of that length.
    """

    def cut(leaf: Any) -> Any:
        if has_length(leaf):
            return leaf[samples] if len(leaf) == size else leaf
        if not isinstance(leaf, list) or leaf is batch or len(leaf) != size:
            return leaf
        holds_tensors = any(has_length(x) and len(x) == size for x in leaves(leaf))
        return leaf if holds_tensors else leaf[samples]

    return map_batch(cut, batch)


def outside_inference_mode(batch: Any) -> Any:
    """Return the batch with copies of the tensors made under inference_mode."""

    def clone(leaf: Any) -> Any:
        return leaf.clone() if isinstance(leaf, Tensor) and leaf.is_inference() else leaf

    has_any = any(isinstance(x, Tensor) and x.is_inference() for x in leaves(batch))
    return map_batch(clone, batch) if has_any else batch
