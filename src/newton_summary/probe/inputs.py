"""What users pass in: a loss function, and data, which is read, counted and split as batches."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import Dataset, IterableDataset

from newton_summary.display.warn import warn_user
from newton_summary.partition import Partition

LossFn = Callable[[nn.Module, Any], Tensor]
Closure = Callable[[], Tensor]
NumSamples = int | Callable[[Any], int]

MANY = 1000  # batches of data without a length: it may never end

_WANTED = (
    "Expected loss_fn(model, batch) that calls the model and returns the mean loss of the batch, "
    "for example"
)
_EXAMPLE = "lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])"


def check_loss_fn(loss_fn: Any) -> None:
    """Raise unless ``loss_fn`` can be called with a model and a batch."""
    is_module = isinstance(loss_fn, nn.modules.loss._Loss)
    if is_module or getattr(loss_fn, "__module__", None) == "torch.nn.functional":
        name = str(loss_fn) if is_module else f"F.{loss_fn.__name__}"
        function = "criterion" if is_module else name
        raise TypeError(
            f"loss_fn is {name}, which takes outputs and targets. {_WANTED} "
            f"lambda model, batch: {function}(model(batch[0]), batch[1])"
            f"{f', with criterion = nn.{name}' if is_module else ''}."
        )
    if not callable(loss_fn):
        raise TypeError(f"loss_fn has type {type(loss_fn).__name__}. {_WANTED} {_EXAMPLE}.")
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


def as_loss_fn(closure: Closure, partition: Partition) -> LossFn:
    """Return the closure as a function of model and batch that checks its result."""
    asked = (
        "The closure of step() must return the loss of a curvature batch as a tensor, without "
        "calling backward()"
    )

    def grads() -> list[Tensor | None]:
        with torch._C.DisableTorchFunction():  # or the sweep thinks that the loss reads them
            return [p.grad for p in partition.params.values()]

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        before = grads()
        loss = closure()
        if any(new is not old for new, old in zip(grads(), before)):
            raise ValueError(f"The closure called backward() or zero_grad(). {asked}.")
        if not isinstance(loss, Tensor):
            raise TypeError(f"The closure returned {type(loss).__name__}. {asked}.")
        if not loss.requires_grad:
            raise ValueError(f"The closure returned a detached loss. {asked}.")
        return loss

    return loss_fn


def explain(error: Exception, model: nn.Module, data: Any) -> TypeError | None:
    """Return a clearer error if a loss failed because of the arguments it was given."""
    if data is None and (isinstance(error, TypeError) or "NoneType" in str(error)):
        return TypeError(
            f"data=None, and loss_fn failed with None as its batch: {error}. Pass a batch, or an "
            "iterable of batches such as a DataLoader."
        )
    if f"must be Tensor, not {type(model).__name__}" in str(error):
        return TypeError(
            f"loss_fn treats its first argument, the model, as a tensor: {error}. {_WANTED} "
            f"{_EXAMPLE}."
        )
    if "must be Tensor, not numpy.ndarray" in str(error):
        return TypeError(
            f"The batch holds numpy arrays, and loss_fn failed with them: {error}. Pass tensors, "
            "torch.as_tensor(array), or convert them in loss_fn."
        )
    if isinstance(data, list) and re.search(r"\blist\b", str(error)):
        return TypeError(
            f"A list of tensors is taken as one batch, and loss_fn failed with it: {error}. For "
            "several batches of one tensor each, pass iter(data) or a DataLoader."
        )
    return None


def check_microbatch(microbatch: Any) -> None:
    """Raise unless it is a number of samples, or None."""
    if microbatch is not None and not (type(microbatch) is int and microbatch >= 1):
        raise ValueError(f"microbatch={microbatch!r}: expected a number of samples, 1 or more.")


def as_batches(data: Any) -> Iterable[Any]:
    """Return an iterable of batches that can be read twice.

    A tensor or array, a mapping, a tuple, ``None``, a list that holds a tensor, or an object that
    holds tensors, such as a batch of graphs, is one batch; anything else that can be iterated over
    is a series of batches.
    """
    if data is None or isinstance(data, Tensor | np.ndarray | Mapping | tuple):
        return [data]
    if isinstance(data, list):
        return [data] if any(isinstance(x, Tensor | np.ndarray) for x in data) else data
    if isinstance(data, Dataset) and not isinstance(data, IterableDataset):
        raise TypeError(
            f"data is a {type(data).__name__}, a set of samples. Pass batches of them: "
            "torch.utils.data.DataLoader(dataset, batch_size=...)."
        )
    # What can be moved to a device, or has keys, is data itself, though its parts can be listed.
    is_batch = callable(getattr(data, "to", None)) or hasattr(data, "keys") or is_dataclass(data)
    if is_batch or not isinstance(data, Iterable):
        return [data]
    return read_all(data) if isinstance(data, Iterator) else data


def read_all(batches: Iterator[Any]) -> list[Any]:
    """Return all batches of an iterator, which can be read only once; raise if it may never end."""
    if has_known_length(batches):
        return list(batches)
    found = list(islice(batches, MANY + 1))
    if len(found) > MANY:
        raise ValueError(
            f"The data is an iterator without a length, and has more than {MANY:,} batches: it may "
            "never end, and all of them would be kept in memory. These have been read: make it "
            "anew, and pass some, itertools.islice(data, 16), or all, iter(list(data))."
        )
    return found


def has_known_length(batches: Iterable[Any]) -> bool:
    """Whether batches say how many they are, so that there is an end to them."""
    try:
        return operator.length_hint(batches, -1) >= 0
    except Exception:  # as in the __len__ of a dataset whose length is not known
        return False


def leaves(batch: Any) -> Iterator[Any]:
    """Yield everything in nested mappings, lists, tuples and dataclasses, in order."""
    children: Iterable[Any]
    if isinstance(batch, Mapping):
        children = batch.values()
    elif isinstance(batch, list | tuple) and not isinstance(batch, PackedSequence):
        children = batch
    elif is_dataclass(batch):
        children = (getattr(batch, field.name) for field in dataclasses.fields(batch))
    else:
        yield batch
        return
    for child in children:
        yield from leaves(child)


def is_dataclass(batch: Any) -> bool:
    """Whether a batch is an instance of a dataclass."""
    return dataclasses.is_dataclass(batch) and not isinstance(batch, type)


def has_length(leaf: Any) -> bool:
    """Whether a leaf is a tensor or an array of at least one dimension."""
    return isinstance(leaf, Tensor | np.ndarray) and leaf.ndim > 0


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
        given = [f.name for f in dataclasses.fields(batch) if f.init]
        values = {name: map_batch(change, getattr(batch, name)) for name in given}
        return dataclasses.replace(batch, **values)
    changed = change(batch)
    if changed is batch and isinstance(batch, list):
        return [map_batch(change, child) for child in batch]
    return changed


def to_device(batch: Any, device: torch.device) -> Any:
    """Return a batch with its tensors on a device."""
    return map_batch(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, batch)


def take_samples(batch: Any, size: int, samples: slice) -> Any:
    """Return a part of a batch: what has the batch's length is sliced, everything else is kept.

    Slices tensors and arrays, and lists inside the batch that hold one object per sample rather
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

    return map_batch(clone, batch)


def count_samples(batch: Any) -> int | None:
    """Return the number of samples in a batch, or None if it is unknown.

    An object such as a batch of graphs may say so itself. Otherwise it is the length of the first
    tensor or array, or of the first list if there are none. No data counts as one sample.
    """
    if batch is None:
        return 1
    lengths = (_length(leaf) for leaf in leaves(batch))
    first = next((n for n in lengths if n is not None), None)
    if first is not None or not isinstance(batch, list | tuple | Mapping):
        return first
    children = batch.values() if isinstance(batch, Mapping) else batch
    lists = (len(child) for child in children if isinstance(child, list))
    return next(lists, len(batch) if isinstance(batch, list) else None)


def _length(leaf: Any) -> int | None:
    """Return how many samples a leaf of a batch holds, if it is known."""
    if has_length(leaf):
        return len(leaf)
    if isinstance(leaf, PackedSequence):
        return int(leaf.batch_sizes[0])
    for name in ("num_graphs", "batch_size"):
        count = getattr(leaf, name, None)
        count = count[0] if isinstance(count, tuple) and count else count  # a torch.Size
        if isinstance(count, int) and not isinstance(count, bool):
            return count
    inside = (x for x in getattr(leaf, "__dict__", {}).values() if has_length(x))
    return next((len(x) for x in inside), None)


class SampleCount:
    """Counts the samples of batches, by which they are weighted.

    Args:
        given: What the user specified: a number for every batch, or a function of the batch.
        model: Its layers tell whether the first dimension may be time.
    """

    def __init__(self, given: NumSamples | None, model: nn.Module):
        if given is not None and not callable(given):
            given = _whole_number(given)
        self.given = given
        self.model = model
        self._first: list[tuple[int, ...]] = []  # shapes in the first batch
        self._warned = False

    def __call__(self, batch: Any, number: int, alone: bool = True) -> int | None:
        """Return the number of samples in a batch; None if that is unknown and does not matter.

        Args:
            batch: The batch.
            number: Its place in the data.
            alone: Whether no other process has batches that count with this one.
        """
        if callable(self.given):
            return _whole_number(self.given(batch))
        if self.given is not None:
            return self.given
        count = count_samples(batch)
        if count is None and (number > 0 or not alone):
            raise ValueError(
                "Batches are weighted by their numbers of samples, but that of a batch of type "
                f"{type(batch).__name__} is unknown. {_GIVE}"
            )
        shapes = [tuple(leaf.shape) for leaf in leaves(batch) if has_length(leaf)]
        if number == 0:
            self._first = shapes
        elif len(shapes) == len(self._first) and shapes != self._first:
            self._compare(self._first, shapes)
        return count

    def _compare(self, first: list[tuple[int, ...]], other: list[tuple[int, ...]]) -> None:
        """Raise if the tensors of two batches disagree on their relative numbers of samples."""
        before, now = [shape[0] for shape in first], [shape[0] for shape in other]
        n, m = before[0], now[0]
        pairs = zip(before, now, strict=True)
        others = [(a, b) for a, b in pairs if a != b and a * m != b * n]  # not in proportion
        alone = before.count(n) == 1 or now.count(m) == 1  # no other tensor confirms the first
        if n == m:
            by_second = first[0][1:2] != other[0][1:2]
        else:  # another has the length of the second dimension in both
            has_it = [[x[:1] == shapes[0][1:2] for x in shapes[1:]] for shapes in (first, other)]
            by_second = alone and any(map(all, zip(*has_it, strict=True)))
        time_first = (getattr(x, "batch_first", True) is False for x in self.model.modules())
        if not others and by_second and any(time_first):
            raise ValueError(
                f"Two batches begin with tensors of shapes {first[0]} and {other[0]}, and the "
                f"model has a layer with batch_first=False: samples may be counted by the first "
                f"dimension or by the second. {_GIVE}"
            )
        if not others:
            return
        what = (
            "Batches are weighted by their numbers of samples, but their tensors do not agree on "
            f"these: the first has length {n} in one batch and {m} in another, but another has "
            f"{others[0][0]} and {others[0][1]}."
        )
        if alone:
            raise ValueError(f"{what} {_GIVE}")
        if not self._warned:
            self._warned = True
            warn_user(f"{what} Using the length of the first. {_GIVE}")


_GIVE = (
    "Pass num_samples=..., a number or a function of the batch, such as num_samples=lambda batch: "
    "len(batch['labels'])."
)


def _whole_number(value: Any) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = -1
    if number < 0 or isinstance(value, bool):
        raise ValueError(
            f"num_samples={value!r}: expected a whole number, or a function of the batch that "
            "returns one."
        )
    return number
