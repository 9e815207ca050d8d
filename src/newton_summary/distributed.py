"""Sums over the ranks of torch.distributed: a summary is S^2 + 2S + 2 numbers for any model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from newton_summary.summary import Summary


def is_active(distributed: str | bool) -> bool:
    """Whether to average over ranks.

    Args:
        distributed: ``"auto"`` where a process group of several ranks is initialised, ``True`` (an
            error if there is none), or ``False``.
    """
    if distributed not in ("auto", True, False):
        raise ValueError(f"distributed={distributed!r}: write 'auto', True or False.")
    initialized = dist.is_available() and dist.is_initialized()
    if distributed is True and not initialized:
        raise ValueError(
            "distributed=True, and no process group is initialised. Call "
            "torch.distributed.init_process_group first, or write distributed='auto'."
        )
    return bool(distributed) and initialized and dist.get_world_size() > 1


def sum_over_ranks(tensors: Sequence[Tensor]) -> None:
    """Replace every tensor by its sum over all ranks."""
    for tensor in tensors:
        dist.all_reduce(tensor)


def mean_over_ranks(summary: Summary) -> Summary:
    """Average a summary over ranks, weighted by their numbers of samples, with one exchange.

    Exact for a loss that is a mean over samples, and the same to the last bit on all ranks.
    """
    parts = [summary.loss.reshape(1), summary.gbar, summary.Hbar, summary.D3]
    present = [part.reshape(-1) for part in parts if part is not None]
    numbers = torch.cat([part.double() for part in present]) * summary.num_samples
    message = torch.cat([numbers, numbers.new_tensor([summary.num_samples])])
    dist.all_reduce(message)
    sizes = [part.numel() for part in present]
    means = iter(torch.split(message[:-1] / message[-1], sizes))

    def take(old: Tensor | None) -> Tensor | None:
        return None if old is None else next(means).reshape(old.shape).to(old)

    loss, gbar, Hbar, D3 = (take(old) for old in (summary.loss, *parts[1:]))
    assert loss is not None and gbar is not None
    total = round(float(message[-1]))
    return replace(summary, loss=loss, gbar=gbar, Hbar=Hbar, D3=D3, num_samples=total)
