"""The mean of what the ranks of torch.distributed measure.

For a loss that is a mean over samples everything measured is linear in the data, so ranks exchange
S^2 + 2S + 1 numbers a summary, whatever the size of the model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from newton_summary.parallel.agreement import norms
from newton_summary.parallel.ranks import Ranks
from newton_summary.partition import Params
from newton_summary.probe.probe import Probe
from newton_summary.summary import Summary

SAME = 1e-5  # of the norm: what ranks may differ by in adding up the same numbers


def message_length(S: int, order: int) -> int:
    """Return how many numbers a summary takes on its way: S^2 + 2S + 1 at order 3.

    These are gbar, Hbar, D3 and the number of samples. The loss takes the place of an entry below
    the diagonal of Hbar, which the one above it tells as well; where there is none, it is one more.
    """
    derivatives = {1: S, 2: S * S + S, 3: S * S + 2 * S}[order]
    return derivatives + 1 if order > 1 and S > 1 else derivatives + 2


def mean_over_ranks(ranks: Ranks, summary: Summary, u: Params) -> Summary:
    """Average a summary over ranks, weighted by their numbers of samples, with one message.

    Exact for a loss that is a mean over samples, and the same to the last bit on all ranks.

    Args:
        ranks: The ranks.
        summary: Of this rank's data.
        u: The direction, which has to be the same on all ranks. With three groups or more it is
            found out if it is not: two more of the entries below the diagonal of Hbar tell.
    """
    message = _pack(summary)
    S = len(summary)
    spare = slice(3 * S, 3 * S + 2)  # row 2 of Hbar, columns 0 and 1
    comparable = summary.Hbar is not None and S > 2 and not ranks.sharded
    if comparable:
        norm = norms(list(u.values())).norm().to(message)
        message[spare] = torch.stack([norm, norm.square()])
    sums = ranks.total(message)
    samples = round(float(sums[-1])) if bool(torch.isfinite(sums[-1])) else 0
    if bool(sums[-1] == 0):
        raise ValueError("The data is empty on all ranks: there is no batch to measure.")
    if comparable:
        _check_same_direction(ranks, *(sums[spare] / ranks.count).tolist())
    mean = _unpack(sums[:-1] / sums[-1], summary)
    if comparable and mean.Hbar is not None:
        mean.Hbar[2, :2] = mean.Hbar[:2, 2]
    return replace(mean, num_samples=samples)


def _check_same_direction(ranks: Ranks, norm: float, square: float) -> None:
    """Raise on all ranks if the norms of their directions differ, from the means of norm, norm^2.

    Different gradients have different norms, but for a chance that nobody needs to fear.
    """
    spread = math.sqrt(max(square - norm**2, 0.0)) / norm if norm > 0 else 0.0
    if spread > SAME:
        ranks.stop(
            f"The ranks measured along different directions: their norms differ by "
            f"{spread:.1e} of their mean. Gradients have to be the same on all ranks when step() "
            f"is called: wrap the model in DistributedDataParallel, and make the last backward() "
            f"before step() outside of no_sync()."
        )


def _pack(summary: Summary) -> Tensor:
    """Return the sums over samples, and at the end the number of samples."""
    n = summary.num_samples
    parts = [summary.gbar.double()]
    loss = summary.loss.to(summary.gbar.device).double().reshape(1)
    if summary.Hbar is not None:
        parts.append(summary.Hbar.double().flatten())
        if len(summary) > 1:
            parts[-1] = parts[-1].clone()
            parts[-1][len(summary)] = loss  # row 1, column 0
    if summary.D3 is not None:
        parts.append(summary.D3.double())
    if summary.Hbar is None or len(summary) == 1:
        parts.append(loss)
    return torch.cat([*(n * part for part in parts), loss.new_tensor([n])])


def _unpack(means: Tensor, like: Summary) -> Summary:
    """Return a summary from its numbers, in the dtypes of another one."""
    S = len(like)
    gbar, rest = means[:S], means[S:]
    Hbar, D3, loss = None, None, means[-1]
    if like.Hbar is not None:
        Hbar, rest = rest[: S * S].reshape(S, S).clone(), rest[S * S :]
        if S > 1:
            loss = Hbar[1, 0].clone()
            Hbar[1, 0] = Hbar[0, 1]
    if like.D3 is not None:
        D3 = rest[:S]
    return replace(
        like,
        loss=loss.to(like.loss),
        gbar=gbar.to(like.gbar),
        Hbar=None if Hbar is None else Hbar.to(like.gbar),
        D3=None if D3 is None else D3.to(like.gbar),
    )


def mean_loss(probe: Probe) -> Tensor:
    """Return the mean loss over the samples of all batches and ranks, in float64."""
    device = next(iter(probe.params.values())).device
    total = torch.zeros(2, dtype=torch.float64, device=device)  # sum of the losses, and samples
    for closure, size in probe.closures():
        total[0] += size * closure().detach().reshape(()).to(total)
        total[1] += size
    if probe.ranks is not None:
        total = probe.ranks.total(total)
    return (total[0] / total[1]).cpu()


def parts_of_all(ranks: Ranks, parts: Sequence[Summary], mean: Summary) -> tuple[Summary, ...]:
    """Return the summaries of the batches of all ranks, in the same order everywhere.

    Args:
        ranks: The ranks.
        parts: The summaries of this rank's batches.
        mean: The mean of all; the parts are on its device, and of its groups.
    """
    plain = [replace(part, partition=None).to("cpu").state_dict() for part in parts]
    states = [state for some in ranks.gather(plain) for state in some]
    every = (Summary.from_state_dict(state).to(mean.gbar.device) for state in states)
    return tuple(replace(part, partition=mean.partition) for part in every)
