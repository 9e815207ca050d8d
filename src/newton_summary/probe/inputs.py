"""What users give: a loss function, and data that is read as batches."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

LossFn = Callable[[nn.Module, Any], Tensor]

_WANTED = (
    "loss_fn(model, batch) is wanted, which calls the model and returns the mean loss of the "
    "batch, for example"
)
_EXAMPLE = "lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])"


def check_loss_fn(loss_fn: Any) -> None:
    """Raise unless ``loss_fn`` can be called with a model and a batch."""
    if isinstance(loss_fn, nn.modules.loss._Loss):
        raise TypeError(
            f"loss_fn is {loss_fn}, which takes outputs and targets. {_WANTED} "
            f"lambda model, batch: criterion(model(batch[0]), batch[1]), with "
            f"criterion = nn.{loss_fn}."
        )
    if getattr(loss_fn, "__module__", None) == "torch.nn.functional":
        name = f"F.{loss_fn.__name__}"
        raise TypeError(
            f"loss_fn is {name}, which takes outputs and targets. {_WANTED} "
            f"lambda model, batch: {name}(model(batch[0]), batch[1])."
        )
    if not callable(loss_fn):
        raise TypeError(f"loss_fn is of type {type(loss_fn).__name__}. {_WANTED} {_EXAMPLE}.")
    try:
        signature = inspect.signature(loss_fn)
    except ValueError:  # of a function in C, which has none
        return
    try:
        signature.bind(None, None)
    except TypeError as error:
        raise TypeError(
            f"loss_fn has the arguments {signature} ({error}). {_WANTED} {_EXAMPLE}."
        ) from None


def explain(error: TypeError, model: nn.Module, data: Any) -> TypeError | None:
    """Return a clearer error where a loss has failed because of what it was given, if it has."""
    if data is None:
        return TypeError(
            f"The data is None, so loss_fn was given None as its batch, and failed: {error}. Give "
            f"a batch, or an iterable of batches such as a DataLoader."
        )
    if f"must be Tensor, not {type(model).__name__}" in str(error):
        return TypeError(
            f"loss_fn takes its first argument, the model, for a tensor: {error}. {_WANTED} "
            f"{_EXAMPLE}."
        )
    if isinstance(data, list) and "must be Tensor, not list" in str(error):
        return TypeError(
            f"A list of tensors is taken as one batch, and loss_fn failed with it: {error}. For "
            f"several batches of one tensor each, give iter(data) or a DataLoader."
        )
    return None


def as_batches(data: Any) -> Iterable[Any]:
    """Return an iterable of batches that can be gone through twice.

    A tensor or array, a mapping, a tuple, ``None``, or a list that holds a tensor is one batch;
    anything else that can be iterated over is a series of batches.
    """
    if data is None or isinstance(data, Tensor | np.ndarray | Mapping | tuple):
        return [data]
    if isinstance(data, list):
        return [data] if any(isinstance(x, Tensor | np.ndarray) for x in data) else data
    if isinstance(data, Dataset) and not isinstance(data, IterableDataset):
        raise TypeError(
            f"The data is a {type(data).__name__}, a set of samples. Give batches of them: "
            f"torch.utils.data.DataLoader(dataset, batch_size=...)."
        )
    if not isinstance(data, Iterable):
        return [data]
    return list(data) if isinstance(data, Iterator) else data  # it can be read only once


def count_samples(batch: Any) -> int:
    """Return the length of the first tensor or array in a batch, and 1 if there is none."""
    return next((len(x) for x in _leaves(batch) if _has_length(x)), 1)


def _has_length(leaf: Any) -> bool:
    return isinstance(leaf, Tensor | np.ndarray) and leaf.ndim > 0


def _leaves(batch: Any) -> Iterator[Any]:
    """Give everything in a nest of mappings, lists, tuples and dataclasses, in order."""
    children: Iterable[Any]
    if isinstance(batch, Mapping):
        children = batch.values()
    elif isinstance(batch, list | tuple):
        children = batch
    elif _is_dataclass(batch):
        children = (getattr(batch, field.name) for field in dataclasses.fields(batch))
    else:
        yield batch
        return
    for child in children:
        yield from _leaves(child)


def _is_dataclass(batch: Any) -> bool:
    return dataclasses.is_dataclass(batch) and not isinstance(batch, type)


def map_batch(change: Callable[[Any], Any], batch: Any) -> Any:
    """Apply a function to every leaf of a batch; containers keep their types.

    A list, and what is no container, is given to the function as a whole first: if the function
    returns something else than its argument, that is taken.
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
    if _is_dataclass(batch):
        values = {f.name: map_batch(change, getattr(batch, f.name)) for f in _fields(batch)}
        return dataclasses.replace(batch, **values)
    changed = change(batch)
    if changed is batch and isinstance(batch, list):
        return [map_batch(change, child) for child in batch]
    return changed


def _fields(batch: Any) -> list[dataclasses.Field[Any]]:
    return [field for field in dataclasses.fields(batch) if field.init]


def take_samples(batch: Any, size: int, samples: slice) -> Any:
    """Return a part of a batch: what has the batch's length is cut, everything else is kept.

    That is every tensor and array, and every list inside of the batch that holds one object for
    each sample rather than tensors of that length.
    """

    def cut(leaf: Any) -> Any:
        if _has_length(leaf):
            return leaf[samples] if len(leaf) == size else leaf
        if not isinstance(leaf, list) or leaf is batch or len(leaf) != size:
            return leaf
        holds_tensors = any(_has_length(x) and len(x) == size for x in _leaves(leaf))
        return leaf if holds_tensors else leaf[samples]

    return map_batch(cut, batch)


def outside_inference_mode(batch: Any) -> Any:
    """Return the batch with copies of the tensors made under inference_mode."""

    def clone(leaf: Any) -> Any:
        return leaf.clone() if isinstance(leaf, Tensor) and leaf.is_inference() else leaf

    has_any = any(isinstance(x, Tensor) and x.is_inference() for x in _leaves(batch))
    return map_batch(clone, batch) if has_any else batch
