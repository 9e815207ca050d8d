"""Samples of the training data to measure on, drawn without disturbing training."""

from __future__ import annotations

from collections import UserList
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, Subset

from newton_summary.probe.state import Journal, RandomState


def sample_batches(loader: Any, num_batches: int, rank: int = 0, ranks: int = 1) -> UserList[Any]:
    """Return batches of random samples from the dataset of a loader, or of a wrapper of one.

    The samples are the same at each call, and differ between ranks. The loader itself is not read,
    so its workers, its sampler and all random numbers stay as they are. Batches have the loader's
    size: with batch norms the loss depends on it. There are fewer if the dataset is small.
    """
    dataset: Any = getattr(loader, "dataset", None)
    batch_size = getattr(loader, "batch_size", None)
    batch_size = batch_size or getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    sized = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    if not sized or isinstance(dataset, IterableDataset) or not batch_size:
        raise ValueError(
            f"Cannot draw samples from the training data ({type(loader).__name__} of "
            f"{type(dataset).__name__}): that needs a DataLoader with a batch size, and a dataset "
            f"with a length. Pass data=..., a batch or a list of batches."
        )
    order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(0))
    mine = order[rank::ranks].tolist()
    # Whole batches if possible: a batch norm cannot take a single sample that may be left over.
    size = min(batch_size, len(mine))
    count = min(num_batches, len(mine) // size) * size
    with Journal() as journal:
        journal.undo_later(partial(RandomState(()).restore, RandomState(()).capture()))
        subset = Subset(dataset, mine[:count])
        # Not a list: a list of tensors would count as one batch.
        return UserList(DataLoader(subset, batch_size=size, collate_fn=loader.collate_fn))
