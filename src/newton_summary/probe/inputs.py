"""What users give: a loss function, data that is read as batches, and their numbers of samples."""

from __future__ import annotations

import dataclasses
import inspect
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import Dataset, IterableDataset

from newton_summary.display.warn import warn_user

LossFn = Callable[[nn.Module, Any], Tensor]
NumSamples = int | Callable[[Any], int]

_WANTED = (
    "Expected loss_fn(model, batch) that calls the model and returns the mean loss of the batch, "
    "for example"
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
    """Return a clearer error if a loss failed because of the arguments it was given."""
    if data is None:
        return TypeError(
            f"The data is None, so loss_fn was given None as its batch, and failed: {error}. Give "
            f"a batch, or an iterable of batches such as a DataLoader."
        )
    if f"must be Tensor, not {type(model).__name__}" in str(error):
        return TypeError(
            f"loss_fn treats its first argument, the model, as a tensor: {error}. {_WANTED} "
            f"{_EXAMPLE}."
        )
    if "must be Tensor, not numpy.ndarray" in str(error):
        return TypeError(
            f"The batch holds numpy arrays, and loss_fn failed with them: {error}. Give tensors, "
            f"torch.as_tensor(array), or convert them in loss_fn."
        )
    if isinstance(data, list) and "must be Tensor, not list" in str(error):
        return TypeError(
            f"A list of tensors is taken as one batch, and loss_fn failed with it: {error}. For "
            f"several batches of one tensor each, give iter(data) or a DataLoader."
        )
    return None


def check_microbatch(microbatch: Any) -> None:
    """Raise unless it is a number of samples, or None."""
    if microbatch is not None and not (type(microbatch) is int and microbatch >= 1):
        raise ValueError(f"microbatch={microbatch!r}: write a number of samples, 1 or more.")


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
            f"The data is a {type(data).__name__}, a set of samples. Give batches of them: "
            f"torch.utils.data.DataLoader(dataset, batch_size=...)."
        )
    # What can be moved to a device, or has keys, is data itself, though its parts can be listed.
    is_batch = callable(getattr(data, "to", None)) or hasattr(data, "keys") or is_dataclass(data)
    if is_batch or not isinstance(data, Iterable):
        return [data]
    return list(data) if isinstance(data, Iterator) else data  # it can be read only once


def leaves(batch: Any) -> Iterator[Any]:
    """Give everything in a nest of mappings, lists, tuples and dataclasses, in order."""
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


def count_samples(batch: Any) -> int | None:
    """Return the number of samples in a batch, or None if it is unknown.

    An object may say so itself, such as a batch of graphs. Else it is the length of the first
    tensor or array, or of the first list if there are none. No data is one sample.
    """
    if batch is None:
        return 1
    return next(iter(_lengths(batch)), None)


def _lengths(batch: Any) -> list[int]:
    """Return the lengths of all tensors in a batch; of lists, if there are no tensors."""
    found = [_length(leaf) for leaf in leaves(batch)]
    lengths = [n for n in found if n is not None]
    if lengths or not isinstance(batch, list | tuple | Mapping):
        return lengths
    children = batch.values() if isinstance(batch, Mapping) else batch
    lists = [child for child in children if isinstance(child, list)]
    return [len(child) for child in lists] or ([len(batch)] if isinstance(batch, list) else [])


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
        given: What the user says: a number for every batch, or a function of the batch.
        time_first: Returns whether the first dimension may be time.
    """

    def __init__(self, given: NumSamples | None, time_first: Callable[[], bool] = lambda: False):
        if given is not None and not callable(given):
            given = _whole_number(given)
        self.given = given
        self.time_first = time_first
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
                f"Batches are weighted by their numbers of samples, and that of a batch of type "
                f"{type(batch).__name__} is unknown. {_GIVE}"
            )
        shapes = [tuple(leaf.shape) for leaf in leaves(batch) if has_length(leaf)]
        if number == 0:
            self._first = shapes
        elif len(shapes) == len(self._first) and shapes != self._first:
            self._compare(self._first, shapes)
        return count

    def _compare(self, first: list[tuple[int, ...]], other: list[tuple[int, ...]]) -> None:
        """Refuse batches whose tensors disagree on their relative numbers of samples."""
        before, now = [shape[0] for shape in first], [shape[0] for shape in other]
        n, m = before[0], now[0]
        pairs = zip(before, now, strict=True)
        others = [(a, b) for a, b in pairs if a != b and a * m != b * n]  # not in proportion
        if not others and n == m and first[0][1:2] != other[0][1:2] and self.time_first():
            raise ValueError(
                f"Two batches begin with tensors of shapes {first[0]} and {other[0]}, and the "
                f"model has a layer with batch_first=False: samples may be counted by the first "
                f"dimension or by the second. {_GIVE}"
            )
        if not others:
            return
        what = (
            f"Batches are weighted by their numbers of samples, and their tensors do not agree on "
            f"these: the first has length {n} in one batch and {m} in another, where another one "
            f"has {others[0][0]} and {others[0][1]}."
        )
        if before.count(n) == 1 or now.count(m) == 1:
            raise ValueError(f"{what} {_GIVE}")
        if not self._warned:
            self._warned = True
            warn_user(f"{what} The length of the first is taken. {_GIVE}")


_GIVE = (
    "Give num_samples=..., a number or a function of the batch, such as "
    "num_samples=lambda batch: len(batch['labels'])."
)


def _whole_number(value: Any) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = -1
    if number < 0 or isinstance(value, bool):
        raise ValueError(
            f"num_samples={value!r}: write a whole number, or a function of the batch that "
            f"returns one."
        )
    return number
