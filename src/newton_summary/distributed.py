"""What the ranks of torch.distributed tell each other.

For a loss that is a mean over samples everything measured is linear in the data, so ranks exchange
S^2 + 2S + 1 numbers a summary, whatever the size of the model. Each of their messages is a sum over
ranks. A rank that fails sends not-a-number in the place of the message that the others wait for:
then all of them know, tell each other what happened, and raise. Nothing more is sent for this as
long as all goes well.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from newton_summary.derivatives.probe import NotFiniteError, Probe
from newton_summary.partition import Params
from newton_summary.sharded import is_sharded
from newton_summary.summary import Summary


class RankError(RuntimeError):
    """A rank failed, and all ranks have stopped; the message names it."""


class RankNotFiniteError(NotFiniteError, RankError):
    """The loss of a rank is infinite or nan; the message names it."""


class Ranks:
    """The processes that measure together, each on data of its own.

    Args:
        group: The process group; None for all processes. Its time-out is how long a rank waits.
        device: Where the numbers lie that are exchanged.
        sharded: Whether parameters are divided among the ranks, which then gather them all the
            time: a rank that fails does not know what the others wait for.

    Attributes:
        rank: The number of this process.
        count: How many processes there are.
    """

    def __init__(self, group: Any, device: torch.device, sharded: bool = False):
        self.group, self.sharded = group, sharded
        needs_gpu = dist.get_backend(group) == "nccl" and device.type == "cpu"
        self.device = torch.device("cuda", torch.cuda.current_device()) if needs_gpu else device
        self.rank, self.count = dist.get_rank(group), dist.get_world_size(group)
        self._lengths: list[int] = []  # of the messages to come

    @contextmanager
    def joint(self, lengths: Sequence[int]) -> Iterator[None]:
        """Work together: what fails here on one rank is raised on all of them.

        Args:
            lengths: How many numbers the messages have that are exchanged in here, in their order.
        """
        self._lengths = list(lengths)
        try:
            yield
        except RankError:
            raise  # the others know it
        except Exception as error:
            if self.sharded or not self._lengths:
                raise  # they wait for something else, or for nothing
            unknown = torch.full((self._lengths[0],), float("nan"), dtype=torch.float64)
            self._sum(unknown.to(self.device))
            self._compare(error)
            raise  # all ranks failed alike

    def total(self, numbers: Tensor) -> Tensor:
        """Return the sum of a vector over all ranks, in float64; the same on all to the last bit.

        Raises:
            RankError: If a rank has failed on the way to this message.
        """
        message = numbers.to(self.device, torch.float64, copy=True)
        length = self._lengths.pop(0)
        assert message.shape == (length,)
        self._sum(message)
        if not bool(torch.isfinite(message).all()):
            self._compare(None)
        return message.to(numbers.device)

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Replace every tensor by its sum over ranks; they travel side by side."""
        with self._readable_errors():
            works = [dist.all_reduce(x, group=self.group, async_op=True) for x in tensors]
            for work in works:
                work.wait()

    def gather(self, value: Any) -> list[Any]:
        """Return what every rank gives, in their order; any small object."""
        values: list[Any] = [None] * self.count
        with self._readable_errors():
            dist.all_gather_object(values, value, group=self.group)
        return values

    def check_finite(self, loss: Tensor) -> None:
        """Raise on all ranks if the loss of one of them is not finite."""
        bad = {
            r: x for r, x in enumerate(self.gather(float(loss.detach()))) if not math.isfinite(x)
        }
        if bad:
            losses = ", ".join(f"{value} on rank {rank}" for rank, value in bad.items())
            raise RankNotFiniteError(
                f"The loss is {losses}, so it has no derivatives. Look for a division by zero, a "
                f"logarithm of zero, or parameters that have diverged."
            )

    def _sum(self, message: Tensor) -> None:
        with self._readable_errors():
            dist.all_reduce(message, group=self.group)

    def _compare(self, error: Exception | None) -> None:
        """Tell each other what happened; raise unless nothing did, or the same on all ranks."""
        mine = None if error is None else (_in_words(error), isinstance(error, NotFiniteError))
        told = self.gather(mine)
        failed = {rank: what for rank, what in enumerate(told) if what is not None}
        if not failed or (len(failed) == self.count and len({text for text, _ in told}) == 1):
            return
        kind = RankNotFiniteError if all(hopeless for _, hopeless in failed.values()) else RankError
        told_by = (f"Rank {rank} of {self.count}: {text}" for rank, (text, _) in failed.items())
        raise kind(" ".join(told_by)) from error

    @contextmanager
    def _readable_errors(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # of any backend, when a rank has gone or the time is over
            reason = re.sub(r"^\[[^]]*\] *", "", str(error).strip()).split(". ")[0]
            raise RankError(
                f"Rank {self.rank} of {self.count} waited for the others in vain: one has ended, "
                f"has not made this call (distributed=False is for one rank alone), or is too slow "
                f"for the time-out of init_process_group(timeout=...). See what the other ranks "
                f"wrote. ({reason})"
            ) from error


def find_ranks(distributed: str | bool | Any, params: Params) -> Ranks | None:
    """Return the ranks to measure with; None if this process works alone.

    Args:
        distributed: ``"auto"`` for all processes where a process group is initialised, ``True``
            (an error if there is none), ``False``, or a process group.
        params: The parameters; the numbers that are exchanged lie on the device of the first.
    """
    initialized = dist.is_available() and dist.is_initialized()
    if initialized and isinstance(distributed, dist.ProcessGroup):
        group: Any = distributed
    elif distributed in ("auto", True, False):
        group = None
    else:
        raise ValueError(
            f"distributed={distributed!r}: write 'auto', True, False, or a process group."
        )
    if distributed is True and not initialized:
        raise ValueError(
            "distributed=True, and no process group is initialised. Call "
            "torch.distributed.init_process_group first, or write distributed='auto'."
        )
    sharded = any(is_sharded(p) for p in params.values())
    if sharded and (distributed is False or group is not None):
        raise ValueError(
            f"distributed={distributed!r}, and the model is sharded: all ranks have to take part. "
            f"Write distributed='auto'."
        )
    if distributed is False or not initialized or dist.get_world_size(group) < 2:
        return None
    return Ranks(group, next(iter(params.values())).device, sharded)


def together(ranks: Ranks | None, lengths: Sequence[int]) -> AbstractContextManager[None]:
    """Return :meth:`Ranks.joint`, or a context that does nothing where there is one process."""
    return nullcontext() if ranks is None else ranks.joint(lengths)


def message_length(S: int, order: int) -> int:
    """Return how many numbers a summary takes on its way: S^2 + 2S + 1 at order 3.

    These are gbar, Hbar, D3 and the number of samples. The loss takes the place of an entry below
    the diagonal of Hbar, which the one above it tells as well; where there is none, it is one more.
    """
    derivatives = {1: S, 2: S * S + S, 3: S * S + 2 * S}[order]
    return derivatives + 1 if order > 1 and S > 1 else derivatives + 2


def mean_over_ranks(ranks: Ranks, summary: Summary) -> Summary:
    """Average a summary over ranks, weighted by their numbers of samples, with one message.

    Exact for a loss that is a mean over samples, and the same to the last bit on all ranks.
    """
    sums = ranks.total(_pack(summary))
    samples = round(float(sums[-1])) if bool(torch.isfinite(sums[-1])) else 0
    if bool(sums[-1] == 0):
        raise ValueError("The data is empty on all ranks: there is no batch to measure.")
    return replace(_unpack(sums[:-1] / sums[-1], summary), num_samples=samples)


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


def _in_words(error: Exception) -> str:
    text = " ".join(str(error).split())
    own = isinstance(error, NotFiniteError)
    return text if own else f"{type(error).__name__}: {text}" if text else type(error).__name__
