"""The processes that measure together. Alone there is one, and nothing is exchanged.

Code that measures is written once for any number of processes: each does its own part inside
:meth:`Alone.joint`, then :meth:`Alone.mean` combines the parts. :class:`Alone` exchanges nothing;
:class:`~newton_summary.parallel.ranks.Ranks` has the same methods for several processes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

    from newton_summary.parallel.ranks import Ranks

T = TypeVar("T")
Params = dict[str, Tensor]
Distributed: TypeAlias = "Literal['auto'] | bool | dist.ProcessGroup"


class Alone:
    """A process that measures alone: what its methods do for several processes is a no-op for one.

    Attributes:
        count: How many processes there are.
        agreed: Whether they know that they are about to do the same thing.
        sharded: Whether parameters are divided among them.
    """

    count = 1
    agreed = True
    sharded = False

    def joint(self) -> AbstractContextManager[None]:
        """Do this process's part of the work: an error on one process is raised on all."""
        return nullcontext()

    def agree(self, facts: Mapping[str, object], values: Mapping[str, Tensor]) -> None:
        """Make sure that facts, and the values of whole tensors, are the same in all processes."""

    def mean(
        self, parts: Mapping[str, Tensor], weight: int, same: Iterable[Tensor] = ()
    ) -> tuple[Mapping[str, Any], int]:
        """Return the mean of small tensors over processes, and the sum of the weights.

        Args:
            parts: This process's tensors, by name.
            weight: Of this process, such as its number of samples.
            same: Whole tensors that must be the same in all processes.
        """
        return parts, weight

    def average_(self, tensors: Sequence[Tensor], weight: int) -> None:
        """Replace tensors, of any size, by their mean over processes."""

    def gather(self, value: T) -> list[T]:
        """Return the small objects of all processes, in their order."""
        return [value]


ALONE = Alone()
Processes: TypeAlias = "Alone | Ranks"


def find_processes(distributed: str | bool | Any, params: Mapping[str, Tensor]) -> Processes:
    """Return the processes to measure with.

    Args:
        distributed: ``"auto"`` for all processes where a process group is initialised, ``True``
            (an error if there is none), ``False``, or a process group.
        params: The parameters; the numbers that are exchanged lie on the device of the first.
    """
    initialized = dist.is_available() and dist.is_initialized()
    if not initialized and (distributed is False or distributed == "auto"):
        return ALONE
    from newton_summary.parallel.ranks import find_ranks

    device = next((p.device for p in params.values()), torch.device("cpu"))
    sharded = any(is_sharded(p) for p in params.values())
    return find_ranks(distributed, device, sharded) or ALONE


# --- a model and its parameters, whatever it is wrapped in ----------------------------------------


def unwrap(model: nn.Module) -> nn.Module:
    """Return the module inside wrappers: of data parallelism, and of ``torch.compile``.

    An FSDP2 module is put into its sharded state: after a forward pass without a backward pass it
    may hold whole parameters.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model has type {type(model).__name__}: expected a torch.nn.Module, not its "
            "parameters or its class."
        )
    compiler = sys.modules.get("torch._dynamo.eval_frame")  # loaded once somebody compiles a model
    compiled = () if compiler is None else (compiler.OptimizedModule,)
    parallel = (nn.parallel.DistributedDataParallel, nn.DataParallel)
    while isinstance(model, (*parallel, *compiled)):
        model = model.module if isinstance(model, parallel) else model._orig_mod  # type: ignore[assignment]
    for module in fsdp_modules(model):
        module.reshard()
    return model


def trainable(model: nn.Module) -> Params:
    """Return the parameters that require a gradient, by name; tied ones once."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def aliases_of(model: nn.Module) -> dict[str, str]:
    """Map every name of a parameter, of tied ones too, to the one that the partition uses."""
    first = {id(p): name for name, p in model.named_parameters()}
    return {n: first[id(p)] for n, p in model.named_parameters(remove_duplicate=False)}


# --- parameters that may be divided among processes -----------------------------------------------


def is_sharded(tensor: object) -> bool:
    """Return whether a tensor is divided among processes; does not import torch's code for it."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_part(tensor: Tensor) -> Tensor:
    """Return what this process has of a tensor: all of it, unless it is sharded.

    Shares its memory, so what is written there is written to the tensor.
    """
    return tensor._local_tensor if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def local_rows(label: int | Tensor, p: Tensor) -> int | Tensor:
    """Return the labels of what this process has of a parameter."""
    if isinstance(label, int) or not is_sharded(p):
        return label
    rows = -(-p.shape[0] // p.device_mesh.size())  # type: ignore[attr-defined]
    start = rows * p.device_mesh.get_local_rank()  # type: ignore[attr-defined]
    return label[start : start + rows]


def like_sharded(local: Tensor, like: Tensor) -> Tensor:
    """Return this process's part as a tensor that is divided as another one is."""
    if not is_sharded(like):
        return local
    sharded: DTensor = like  # type: ignore[assignment]
    return sys.modules["torch.distributed.tensor"].DTensor.from_local(  # type: ignore[no-any-return]
        local,
        sharded.device_mesh,
        sharded.placements,
        run_check=False,
        shape=sharded.shape,
        stride=sharded.stride(),
    )


def whole(tensor: Tensor) -> Tensor:
    """Return the whole of a tensor, gathered from all processes if it is sharded."""
    return tensor.detach().full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def fsdp_modules(model: nn.Module) -> list[Any]:
    """Return the modules that FSDP2 manages."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    return [] if kind is None else [m for m in model.modules() if isinstance(m, kind)]


def refuse_sharded(params: Mapping[str, Tensor], what: str) -> None:
    """Raise if a parameter is sharded, for functions that take whole models only."""
    name = next((name for name, p in params.items() if is_sharded(p)), None)
    if name is not None:
        raise ValueError(
            f"Parameter {name!r} is sharded, but {what} takes whole models only. Call it before "
            "fully_shard; summarize can measure sharded models."
        )
