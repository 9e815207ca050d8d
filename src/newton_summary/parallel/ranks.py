"""The processes of torch.distributed that work together, and how none waits for one that failed.

Ranks exchange messages that each of them knows to be next: sums of vectors, and small objects. A
rank that fails sends its part of the next message all the same, with not-a-number in it. Then all
ranks know, tell each other what happened, and raise. Nothing more is sent for this as long as all
goes well.

With sharded parameters a rank that fails cannot know what the others wait for. There every message,
and every gathering of a parameter, is preceded by a meeting: three whole numbers that tell whether
all ranks are well and have come to the same place.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from newton_summary.errors import NotFiniteError, RankError, RankNotFiniteError
from newton_summary.parallel.agreement import Plan, find_difference, spread_too_far
from newton_summary.parallel.fsdp import is_sharded
from newton_summary.partition import Partition

OBJECTS = 0  # in the place of a length: a message that is no vector
SOME = 8  # ranks that failed alike are named


class Ranks:
    """The processes that measure together, each on data of its own.

    Args:
        group: The process group; None for all processes. Its time-out is how long a rank waits.
        device: Where the numbers lie that are exchanged.
        sharded: Whether parameters are divided among the ranks.
        agreed: The lengths of the messages to come, where ranks know already that they will do the
            same; None if they have to :meth:`agree` first.

    Attributes:
        count: How many processes there are.
    """

    def __init__(
        self,
        group: Any,
        device: torch.device,
        sharded: bool = False,
        agreed: Sequence[int] | None = None,
    ):
        self.group, self.sharded, self.agreed = group, sharded, agreed
        needs_gpu = dist.get_backend(group) == "nccl" and device.type == "cpu"
        self.device = torch.device("cuda", torch.cuda.current_device()) if needs_gpu else device
        self.count = dist.get_world_size(group)
        self._numbers = dist.get_process_group_ranks(group or dist.group.WORLD)  # among all ranks
        self._expected: list[int] = []  # lengths of the messages to come
        self._over: RankError | None = None  # why the ranks have parted
        self._sending = False  # or a message was begun and did not end: then nothing can be told

    @contextmanager
    def joint(self) -> Iterator[None]:
        """Work together: what fails here on one rank is raised on all of them.

        An interrupt is one of the things that fail; where it came it stays what it is. It can only
        be told between two messages: else the others hear of it when the process ends.
        """
        self._expected = [OBJECTS] if self.agreed is None else list(self.agreed)
        try:
            yield
        except Exception as error:
            if self._over is None:
                self._tell(error)
                raise  # nobody waits any more, or all ranks failed alike
            if error is self._over:
                raise
            # What others have made of it on its way: a rule of the sweep, a loss.
        except BaseException as error:
            if self._over is None:
                with suppress(RankError):
                    self._tell(error)
            raise
        if self._over is not None:
            raise self._over

    def agree(self, plan: Plan, lengths: Sequence[int]) -> None:
        """Make sure that all ranks are about to do the same.

        Args:
            plan: What this rank is about to do.
            lengths: How many numbers the messages have that will be exchanged, in their order.

        Raises:
            RankError: If the plans differ; the message tells in what.
        """
        if self.agreed is None:
            extremes = plan.extremes().to(self.device)
            told = self.gather(plan.digest)
            if len(set(told)) > 1:
                plans = self._exchange(plan.facts)
                self.stop(find_difference(plans, self._numbers))
            self._compare_values(plan, extremes)
            self.agreed = list(lengths)
        self._expected = list(self.agreed)

    def total(self, numbers: Tensor) -> Tensor:
        """Return the sum of a vector over all ranks, in float64; the same on all to the last bit.

        Raises:
            RankError: If a rank has failed on the way to this message.
        """
        if self.sharded:
            self.meet("a sum over ranks")
        message = numbers.to(self.device, torch.float64, copy=True)
        assert message.shape == (self._expected[0],)
        self._reduce(message)
        self._expected.pop(0)
        if not bool(torch.isfinite(message).all()):
            self._exchange(None)
        return message.to(numbers.device)

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Replace every tensor by its sum over ranks; they travel side by side."""
        with self._message():
            works = [dist.all_reduce(x, group=self.group, async_op=True) for x in tensors]
            for work in works:
                work.wait()

    def gather(self, value: Any) -> list[Any]:
        """Return what every rank gives, in their order; any small object.

        Raises:
            RankError: If a rank has failed on the way to this message.
        """
        if self._expected[0] != OBJECTS:  # between two sums: it takes a meeting
            self.meet("what ranks tell each other")
            return self._exchange(value)
        values = self._exchange(value)
        self._expected.pop(0)
        return values

    def meet(self, place: str, failed: bool = False) -> None:
        """Wait until all ranks have come to a place, or one of them has failed.

        Raises:
            RankError: If a rank has failed, or has come to another place.
        """
        code = zlib.crc32(place.encode())
        flags = torch.tensor([failed, code, -code], device=self._flag_device())
        self._reduce(flags, largest=True)
        any_failed, largest, smallest = flags.tolist()
        if failed:
            return
        if any_failed:
            self._exchange(None)
        if largest != -smallest:
            places = self._exchange(place)
            i, other = next((i, told) for i, told in enumerate(places) if told != places[0])
            self.stop(
                f"The ranks are not in step: rank {self._numbers[0]} has come to {places[0]}, and "
                f"rank {self._numbers[i]} to {other}. All ranks have to take the same path through "
                f"a sharded model."
            )

    @contextmanager
    def meeting(self, place: str) -> Iterator[None]:
        """Meet, and exchange something in here by other means than those of this class."""
        self.meet(place)
        with self._message():
            yield

    def stop(self, why: str) -> NoReturn:
        """Raise what all ranks have found out, from what they all know."""
        raise self._end(RankError(why))

    # --- failures ---------------------------------------------------------------------------------

    def _tell(self, error: BaseException) -> None:
        """Let the others know of an error; raise unless they failed alike, or wait for nothing."""
        expected, self._expected = self._expected, []
        if not expected or self._sending:
            return
        if expected[0] != OBJECTS and self.sharded:
            self.meet("a failure", failed=True)
        elif expected[0] != OBJECTS:
            unknown = torch.full((expected[0],), float("nan"), dtype=torch.float64)
            self._reduce(unknown.to(self.device))
        self._exchange(None, error)

    def _exchange(self, value: Any, error: BaseException | None = None) -> list[Any]:
        """Return what every rank gives; raise if some failed, unless all did and alike."""
        failure = None if error is None else (_in_words(error), isinstance(error, NotFiniteError))
        told: list[Any] = [None] * self.count
        here = torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()
        with self._message(), here:
            dist.all_gather_object(told, (failure, value), group=self.group)
        failed = {i: what for i, (what, _) in enumerate(told) if what is not None}
        texts = {text for text, _ in failed.values()}
        if failed and not (len(failed) == self.count and len(texts) == 1):
            hopeless = all(not_finite for _, not_finite in failed.values())
            kind = RankNotFiniteError if hopeless else RankError
            told_by = {text: [i for i in failed if failed[i][0] == text] for text in sorted(texts)}
            text = " ".join(f"{self._name(*i)}: {x}" for x, i in told_by.items())
            raise self._end(kind(text)) from error
        return [value for _, value in told]

    def _compare_values(self, plan: Plan, extremes: Tensor) -> None:
        """Raise on all ranks if the parameters of one are others than those of another."""
        if not plan.values:
            return
        self._reduce(extremes, largest=True)
        what = spread_too_far(plan, extremes.cpu())
        if what is not None:
            self.stop(
                f"The ranks differ in the values of {what}, and they have to measure one model "
                f"along one direction. Draw these after the same torch.manual_seed on all ranks, "
                f"or wrap the model in DistributedDataParallel; distributed=False measures each "
                f"rank's own."
            )

    def _end(self, error: RankError) -> RankError:
        """Remember that all ranks know of this, and that none of them waits any more."""
        self._over = error
        return error

    def _name(self, *indices: int) -> str:
        numbers = ", ".join(str(self._numbers[i]) for i in indices[:SOME])
        more = ", ..." if len(indices) > SOME else ""
        return f"Rank{'s' * (len(indices) > 1)} {numbers}{more} of {dist.get_world_size()}"

    def _flag_device(self) -> torch.device:
        """Where flags lie: on the CPU if the group sends from there, which waits for no GPU."""
        group = dist.group.WORLD if self.group is None else self.group
        kinds = {str(torch.device(kind)) for kind in getattr(group, "_device_types", ())}
        return torch.device("cpu") if "cpu" in kinds else self.device

    def _reduce(self, message: Tensor, largest: bool = False) -> None:
        """Replace numbers by their sums over ranks, or by the largest."""
        with self._message():
            how = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
            dist.all_reduce(message, how, group=self.group)

    @contextmanager
    def _message(self) -> Iterator[None]:
        """Exchange something with the other ranks in here."""
        if self._over is not None:  # and somebody has gone on all the same
            raise self._over
        self._sending = True
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # of any backend, when a rank has gone or the time is over
            reason = re.sub(r"^\[[^]]*\] *", "", str(error).strip()).split(". ")[0]
            text = (
                f"{self._name(dist.get_rank(self.group))} waited for the others in vain: one has "
                f"ended, has not made this call (distributed=False is for one rank alone), or is "
                f"too slow for the time-out of init_process_group(timeout=...). See what the other "
                f"ranks wrote. ({reason})"
            )
            raise self._end(RankError(text)) from error
        self._sending = False


def find_ranks(
    distributed: str | bool | Any,
    params: Mapping[str, Tensor],
    agreed: Sequence[int] | None = None,
) -> Ranks | None:
    """Return the ranks to measure with; None if this process works alone.

    Args:
        distributed: ``"auto"`` for all processes where a process group is initialised, ``True``
            (an error if there is none), ``False``, a process group, or the ranks themselves.
        params: The parameters; the numbers that are exchanged lie on the device of the first.
        agreed: As for :class:`Ranks`.
    """
    if isinstance(distributed, Ranks):
        return distributed
    initialized = dist.is_available() and dist.is_initialized()
    if initialized and isinstance(distributed, dist.ProcessGroup):
        group: Any = distributed
    elif distributed in ("auto", True, False):
        group = None
    elif initialized and distributed == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            f"distributed= is a process group that this process, rank {dist.get_rank()}, does not "
            f"belong to. Call this on the ranks of the group alone."
        )
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
    device = next((p.device for p in params.values()), torch.device("cpu"))
    return Ranks(group, device, sharded, agreed)


def together(ranks: Ranks | None) -> AbstractContextManager[None]:
    """Return :meth:`Ranks.joint`, or a context that does nothing where there is one process."""
    return nullcontext() if ranks is None else ranks.joint()


def agree(
    ranks: Ranks | None,
    lengths: Sequence[int],
    partition: Partition,
    values: Mapping[str, Tensor],
    **facts: Any,
) -> None:
    """Call :meth:`Ranks.agree` with a plan, unless there is one process or they have agreed."""
    if ranks is not None and ranks.agreed is None:
        ranks.agree(Plan(partition, values, **facts), lengths)


def _in_words(error: BaseException) -> str:
    text = " ".join(str(error).split())
    own = isinstance(error, NotFiniteError)
    return text if own else f"{type(error).__name__}: {text}" if text else type(error).__name__
