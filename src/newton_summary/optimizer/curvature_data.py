"""The batches that summaries are measured on while training: their own stream, with a position."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from newton_summary.probe.inputs import as_batches
from newton_summary.probe.state import own_generators


class OneBatch:
    """One batch as a series of batches, whatever its type: :func:`summarize` takes it as it is."""

    def __init__(self, batch: Any):
        """Hold the batch."""
        self.batch = batch

    def __iter__(self) -> Iterator[Any]:
        """Give the batch."""
        yield self.batch


class CurvatureData:
    """Batches from a loader, one at a time, without end, at a position that can be saved.

    The loader starts over when it ends. It draws from random numbers of its own, seeded from
    torch's seed: training sees the same random numbers as without it, and the two streams of
    batches are independent, as Algorithm 2 wants them. A saved position is found again by going
    through the batches of the present epoch up to it, with the random numbers of that epoch.

    A loader that draws from a ``torch.Generator`` should have one that nobody else draws from.

    Args:
        loader: A DataLoader or other iterable of batches, or one batch. An iterator works as long
            as it lasts.
    """

    def __init__(self, loader: Any):
        once = isinstance(loader, Iterator)
        self.loader: Iterable[Any] = loader if once else as_batches(loader)
        if isinstance(self.loader, Sized) and len(self.loader) == 0:
            raise ValueError("The curvature loader is empty: it has no batch to measure.")
        self._present = _seeded(torch.initial_seed())
        self._epoch = 0
        self._index = 0  # batches taken in this epoch
        self._start: dict[str, Any] | None = None  # random state at the start of this epoch
        self._iterator: Iterator[Any] | None = None

    def next_batch(self) -> Any:
        """Return the next batch, from the start again after the last one."""
        with self._own_random_numbers():
            if self._iterator is None:
                self._iterator = self._open()
            try:
                batch = next(self._iterator)
            except StopIteration:  # from the start again
                batch = next(self._next_epoch(), self)
        if batch is self:
            raise ValueError("The curvature loader gave no batch when it started over.")
        self._index += 1
        return batch

    def _next_epoch(self) -> Iterator[Any]:
        if self._index == 0:
            raise ValueError("The curvature loader is empty: it gave no batch to measure.")
        if isinstance(self.loader, Iterator):
            raise ValueError(
                f"The curvature data ended after {self._index} batches and cannot start over, "
                f"because it is an iterator. Give a DataLoader or a list of batches."
            )
        self._epoch, self._index, self._start = self._epoch + 1, 0, None
        self._iterator = self._open()
        return self._iterator

    def _open(self) -> Iterator[Any]:
        """Start the present epoch, and go on to the present position in it."""
        generators = own_generators(self.loader)
        if self._start is None:
            self._start = {
                "random": _capture(),
                "generators": [g.get_state() for g in generators],
            }
        else:
            _restore(self._start["random"])
            for generator, state in zip(generators, self._start["generators"], strict=True):
                generator.set_state(state)
        sampler: Any = getattr(self.loader, "sampler", None)
        if hasattr(sampler, "set_epoch"):  # a DistributedSampler repeats its order otherwise
            sampler.set_epoch(self._epoch)
        iterator = iter(self.loader)
        # To the end, if a loader of fewer batches goes on: that of a run on more ranks.
        next(itertools.islice(iterator, self._index, self._index), None)
        return iterator

    @contextmanager
    def _own_random_numbers(self) -> Iterator[None]:
        others = _capture()
        _restore(self._present)
        try:
            yield
        finally:
            self._present = _capture()
            _restore(others)

    # --- the position -----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the position as plain values and tensors."""
        start = self._start
        return {
            "epoch": self._epoch,
            "index": self._index,
            "start": start and {**start, "random": _to_plain(start["random"])},
            "present": _to_plain(self._present),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Return to a position; the batches before it are passed over at the next one."""
        self._epoch, self._index = state["epoch"], state["index"]
        start = state["start"]
        self._start = start and {**start, "random": _from_plain(start["random"])}
        self._present = _from_plain(state["present"])
        self._iterator = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the iterator, which cannot be copied; the position is enough."""
        return self.__dict__ | {"_iterator": None}


def _seeded(seed: int) -> dict[str, Any]:
    """Return the state of torch's, Python's and numpy's random numbers after a seed."""
    mixed = (seed * 6364136223846793005 + 1442695040888963407) % 2**63  # not training's own stream
    return {
        "torch": torch.Generator().manual_seed(mixed).get_state(),
        "python": random.Random(mixed).getstate(),
        "numpy": np.random.RandomState(mixed % 2**32).get_state(),
    }


def _capture() -> dict[str, Any]:
    return {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": np.random.get_state(),
    }


def _restore(state: Mapping[str, Any]) -> None:
    torch.set_rng_state(state["torch"].cpu())
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])


def _to_plain(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state in types that ``torch.load(weights_only=True)`` reads."""
    name, keys, *rest = state["numpy"]
    return {**state, "numpy": (name, torch.from_numpy(keys.astype(np.int64)), *rest)}


def _from_plain(state: Mapping[str, Any]) -> dict[str, Any]:
    name, keys, *rest = state["numpy"]
    return {**state, "numpy": (name, keys.cpu().numpy().astype(np.uint32), *rest)}
