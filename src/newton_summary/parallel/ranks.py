"""Several processes of torch.distributed, none of which waits for one that failed.

Each rank does its part of the work, then all of them meet: three integers show whether a rank
failed, and whether all have reached the same place. If all is well they exchange results; if not,
they exchange what happened, and all raise. Ranks that hold shards of the parameters also meet
before each parameter is gathered.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from newton_summary.errors import NotFiniteError, RankError, RankNotFiniteError

T = TypeVar("T")
SHOWN = 8  # ranks with the same error are named
ALIKE = 1e-3  # of a tensor's norm: what replicas may drift apart on machines of different kinds
SAME = 1e-5  # of a norm: what ranks may differ by in adding up the same numbers


class Ranks:
    """The ranks that measure together, each on its own data.

    Args:
        group: The process group; None for all processes. Its timeout is how long a rank waits.
        device: Where the exchanged numbers are.
        sharded: Whether parameters are divided among the ranks.

    Attributes:
        count: How many ranks there are.
        agreed: Whether they know that they are about to do the same thing.
    """

    def __init__(self, group: Any, device: torch.device, sharded: bool = False):
        self.group, self.sharded, self.agreed = group, sharded, False
        needs_gpu = dist.get_backend(group) == "nccl" and device.type == "cpu"
        self.device = torch.device("cuda", torch.cuda.current_device()) if needs_gpu else device
        self.count = dist.get_world_size(group)
        self._numbers = dist.get_process_group_ranks(group or dist.group.WORLD)  # among all ranks
        self._over: BaseException | None = None  # why the ranks have parted

    # --- work, and whether it succeeded -----------------------------------------------------------

    @contextmanager
    def joint(self) -> Iterator[None]:
        """Do this rank's part of the work: an error on one rank is raised on all.

        An interrupt stops the other ranks too; the interrupted one raises it as it is.
        """
        self._begin()
        try:
            yield
        except BaseException as error:
            if self._over is None:
                with suppress(RankError) if not isinstance(error, Exception) else nullcontext():
                    self.meet("an error", error)
                raise  # an interrupt, or all ranks failed alike
            if error is self._over or not isinstance(error, Exception):
                raise
            # Something on the way, such as a loss, has turned the reason into another error.
        if self._over is not None:
            raise self._over
        self.meet("the end of its part")

    def _begin(self) -> None:
        self._over = None

    def meet(self, place: str, error: BaseException | None = None) -> None:
        """Wait until all ranks have reached a place, or failed.

        Raises:
            RankError: If a rank failed (unless all did, and alike) or is at another place.
        """
        if not self._differ(place, error is not None):
            return
        failure = None if error is None else (_in_words(error), isinstance(error, NotFiniteError))
        reports = self.gather((place, failure))
        failed = {i: what for i, (_, what) in enumerate(reports) if what is not None}
        if not failed:
            i = next(i for i, (other, _) in enumerate(reports) if other != reports[0][0])
            self.stop(
                f"The ranks are out of step: rank {self._numbers[0]} has reached {reports[0][0]}, "
                f"but rank {self._numbers[i]} {reports[i][0]}. All ranks must take the same path."
            )
        texts = sorted({text for text, _ in failed.values()})
        if len(failed) == self.count and len(texts) == 1:
            self._over = error
            return
        not_finite = all(flag for _, flag in failed.values())
        by_text = {text: [i for i in failed if failed[i][0] == text] for text in texts}
        words = " ".join(f"{self._name(*i)}: {text}" for text, i in by_text.items())
        self._over = (RankNotFiniteError if not_finite else RankError)(words)
        raise self._over from error

    @contextmanager
    def meeting(self, place: str) -> Iterator[None]:
        """Meet, and exchange something by means other than those of this class."""
        self.meet(place)
        with self._message():
            yield

    def meet_and_gather(self, what: str, value: T) -> list[T]:
        """Meet, and return the small object that each rank gives, in their order."""
        self.meet(what)
        return self.gather(value)

    def stop(self, why: str) -> NoReturn:
        """Raise an error that all ranks raise, because they know the same."""
        self._over = RankError(why)
        raise self._over

    # --- messages ---------------------------------------------------------------------------------

    def agree(self, facts: Mapping[str, object], values: Mapping[str, Tensor]) -> None:
        """Make sure that facts, and the values of whole tensors, are the same on all ranks.

        Messages of different lengths would crash the processes, or wait forever. Tensors that were
        drawn differently differ in their sums by as much as their norm.
        """
        known = {name: f"{x.dtype} {tuple(x.shape)}" for name, x in values.items()}
        known |= {name: str(fact) for name, fact in facts.items()}
        if self._differ(repr(known)):
            self.stop(_difference(self.gather(known), self._numbers))
        if values:
            sums = torch.stack(
                [self._send(x.detach().sum(dtype=torch.float64)) for x in values.values()]
            )
            extremes = torch.stack([sums, -sums, self._norms(values.values())])
            extremes = extremes.nan_to_num(0.0, 1e300, -1e300)
            self._reduce(extremes, largest=True)
            largest, smallest, norm = extremes.cpu()
            apart = (largest + smallest > ALIKE * norm).tolist()
            if any(apart):
                self.stop(
                    f"The ranks differ in the values of {list(values)[apart.index(True)]}: they "
                    "must measure one model along one direction. Draw these after the same "
                    "torch.manual_seed on all ranks, or wrap the model in "
                    "DistributedDataParallel; use distributed=False to measure each rank on its "
                    "own."
                )
        self.agreed = True

    def mean(
        self, parts: Mapping[str, Tensor], weight: int, same: Iterable[Tensor] = ()
    ) -> tuple[Mapping[str, Any], int]:
        """Return the weighted mean of small tensors over ranks, and the sum of the weights.

        One message. The mean is the same on all ranks to the last bit. With ``same`` the message
        has two more numbers, the norm of these tensors and its square, from which all ranks see
        whether it is the same on each.
        """
        norm = self._norms(same).norm().reshape(-1)
        numbers = [weight * self._send(x).flatten() for x in parts.values()]
        message = torch.cat([*numbers, norm.new_tensor([weight]), norm, norm.square()])
        self._reduce(message)
        sizes = [x.numel() for x in parts.values()] + [1, 1, 1]
        *sums, total, norms, squares = torch.split(message, sizes)
        self._check_weight(float(total))
        self._check_norms(float(norms) / self.count, float(squares) / self.count)
        means = {
            name: (some / total).reshape(x.shape).to(x)
            for (name, x), some in zip(parts.items(), sums, strict=True)
        }
        return means, round(float(total))

    def average_(self, tensors: Sequence[Tensor], weight: int) -> None:
        """Replace tensors, of any size, by their weighted mean over ranks; one message each."""
        total = self._send(torch.tensor([float(weight)]))
        self._reduce(total)
        self._check_weight(float(total))
        torch._foreach_mul_(list(tensors), weight / float(total))
        with self._message():
            works = [dist.all_reduce(x, group=self.group, async_op=True) for x in tensors]
            for work in works:
                work.wait()

    def gather(self, value: T) -> list[T]:
        """Return the small object that each rank gives, in their order."""
        values: list[Any] = [None] * self.count
        here = torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()
        with self._message(), here:
            dist.all_gather_object(values, value, group=self.group)
        return values

    def _differ(self, place: str, failed: bool = False) -> bool:
        """Return whether a rank is at another place, or failed."""
        code = zlib.crc32(place.encode())
        flags = torch.tensor([failed, code, -code], device=self._flag_device())
        self._reduce(flags, largest=True)
        any_failed, largest, smallest = flags.tolist()
        return bool(any_failed) or largest != -smallest

    def _check_weight(self, total: float) -> None:
        if total == 0:
            raise ValueError("The data is empty on all ranks: there is no batch to measure.")

    def _check_norms(self, norm: float, square: float) -> None:
        """Raise on all ranks if norms differ, from the means over ranks of norm and norm^2.

        Two different gradients practically never have the same norm.
        """
        spread = math.sqrt(max(square - norm**2, 0.0)) / norm if norm > 0 else 0.0
        if spread > SAME:
            self.stop(
                "The ranks measured along different directions: their norms differ by "
                f"{spread:.1e} of their mean. Gradients must be the same on all ranks when step() "
                "is called: wrap the model in DistributedDataParallel, and call the last "
                "backward() before step() outside no_sync()."
            )

    def _send(self, numbers: Tensor) -> Tensor:
        return numbers.to(self.device, torch.float64)

    def _norms(self, tensors: Iterable[Tensor]) -> Tensor:
        """Return the norm of each tensor, in float64 where messages lie."""
        wide = ((x.detach(), torch.promote_types(x.dtype, torch.float32)) for x in tensors)
        norms = [torch.linalg.vector_norm(x, dtype=dtype) for x, dtype in wide]
        return torch.stack([self._send(x) for x in norms or [torch.zeros(())]])

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
        """Communicate in this context; the other ranks do not learn of an error in it."""
        if isinstance(self._over, RankError):  # and was caught on the way, by a loss for example
            raise self._over
        try:
            yield
        except BaseException as error:
            self._over = error
            if not isinstance(error, RuntimeError) or isinstance(error, torch.OutOfMemoryError):
                raise
            # Raised by any backend when a rank has exited or the time is over.
            reason = re.sub(r"^\[[^]]*\] *", "", str(error).strip()).split(". ")[0]
            self._over = RankError(
                f"{self._name(dist.get_rank(self.group))} timed out waiting for the other ranks, "
                "or lost the connection: one has exited, has not made this call (use "
                "distributed=False on one rank alone), or is too slow for the timeout of "
                f"init_process_group(timeout=...). See the output of the other ranks. ({reason})"
            )
            raise self._over from error

    def _name(self, *indices: int) -> str:
        numbers = ", ".join(str(self._numbers[i]) for i in indices[:SHOWN])
        more = ", ..." if len(indices) > SHOWN else ""
        return f"Rank{'s' * (len(indices) > 1)} {numbers}{more} of {dist.get_world_size()}"


def find_ranks(distributed: str | bool | Any, device: torch.device, sharded: bool) -> Ranks | None:
    """Return the ranks to measure with; None if this process works alone.

    ``distributed`` is as for :func:`newton_summary.parallel.processes.find_processes`.
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
            f"distributed= is a process group that rank {dist.get_rank()} does not belong to. "
            "Call this only on the ranks of the group."
        )
    else:
        raise ValueError(
            f"distributed={distributed!r}: expected 'auto', True, False, or a process group."
        )
    if not initialized:
        raise ValueError(
            "distributed=True, but no process group is initialised. Call "
            "torch.distributed.init_process_group first, or use distributed='auto'."
        )
    if sharded and (distributed is False or group is not None):
        raise ValueError(
            f"distributed={distributed!r}, but the model is sharded, so all ranks must take part. "
            "Use distributed='auto'."
        )
    if distributed is False or (dist.get_world_size(group) < 2 and not sharded):
        return None
    return Ranks(group, device, sharded)


def _difference(known: Sequence[Mapping[str, str]], numbers: Sequence[int]) -> str:
    """Return in words the first thing in which the facts of ranks differ."""
    first = known[0]
    number, a, b, name = next(
        (number, first.get(name, "missing"), facts.get(name, "missing"), name)
        for number, facts in zip(numbers, known, strict=True)
        for name in [*first, *facts]
        if first.get(name) != facts.get(name)
    )
    return (
        f"The ranks are out of step: {name} is {a} on rank {numbers[0]} and {b} on rank {number}. "
        "All ranks must make the same call, for the same model."
    )


def _in_words(error: BaseException) -> str:
    text = " ".join(str(error).split())
    own = isinstance(error, NotFiniteError)
    return text if own else f"{type(error).__name__}: {text}" if text else type(error).__name__
