"""Parameters that FSDP2 has divided among ranks, gathered one at a time where they are needed.

While a loss is measured, the hooks of ``fully_shard`` are disabled, and every operation that uses a
sharded parameter is given the whole of it. It is released at once; the backward pass and the sweep
gather it again. So a rank holds a few whole parameters at a time, never the whole model, and all
ranks must run the same operations in the same order, as in training with FSDP itself. They meet
before each gathering, so that none waits for a rank that failed or took another path.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from newton_summary.parallel.processes import (
    fsdp_modules,
    is_sharded,
    like_sharded,
    local_part,
    whole,
)

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Meeting = Callable[[str], AbstractContextManager[Any]]
KEPT = 4  # whole parameters at a time: those of one layer, and of their directions


def own_memory(value: Any) -> Any:
    """Return a copy of a sharded tensor, as torch.save cannot write one that is a view."""
    return like_sharded(local_part(value).clone(), value) if is_sharded(value) else value


def scattered_sum(value: Tensor, like: Tensor) -> Tensor:
    """Return this rank's part of the sum over ranks of whole tensors, divided as another one is."""
    if not is_sharded(like):
        torch.distributed.all_reduce(value)
        return value
    module = sys.modules["torch.distributed.tensor"]
    sharded: DTensor = like  # type: ignore[assignment]
    partial = module.DTensor.from_local(
        value, sharded.device_mesh, [module.Partial()], run_check=False
    )
    return local_part(partial.redistribute(placements=sharded.placements))


def check_shards(model: nn.Module) -> None:
    """Raise unless parameters are divided by ``fully_shard`` over all ranks in one dimension."""
    for name, p in model.named_parameters():
        if not is_sharded(p):
            continue
        mesh, placements = p.device_mesh, p.placements  # type: ignore[attr-defined]
        if mesh.ndim != 1 or mesh.size() != torch.distributed.get_world_size():
            raise ValueError(
                f"Parameter {name!r} is sharded over a mesh of shape {tuple(mesh.shape)}: only "
                "fully_shard over all ranks, in one dimension, is supported."
            )
        if not placements[0].is_shard(0):
            raise ValueError(
                f"Parameter {name!r} is sharded as {placements}: only fully_shard along the first "
                "dimension is supported."
            )
        if local_part(p).device.type != mesh.device_type:
            raise ValueError(
                f"The shard of parameter {name!r} is on {local_part(p).device} but used on "
                f"{mesh.device_type}: offloaded parameters are not supported."
            )


class Shards(dict[str, Tensor]):
    """The parameters of a model that FSDP2 has sharded, by name.

    Args:
        params: The parameters.
        meeting: Gives a context for what is gathered, or added up, from all ranks: it takes the
            name of that, and waits for them.

    Attributes:
        anchor: A leaf of autograd's graph that stands for all of them.
        gathered: Called with every whole parameter that an operation is given, and its name.
        received: Called in a backward pass with a name and the gradient of the whole parameter.
    """

    def __init__(self, params: Mapping[str, Tensor], meeting: Meeting):
        super().__init__(params)
        self.meeting = meeting
        self.names = {id(p): name for name, p in params.items()}
        device = next(local_part(p).device for p in params.values())
        self.anchor = torch.zeros((), device=device, requires_grad=True)
        self.gathered: Callable[[Tensor, str], None] | None = None
        self.received: Callable[[str, Tensor], None] | None = None
        self._kept: OrderedDict[int, Tensor] = OrderedDict()  # by the identity of the sharded one
        self._memory: dict[int, Tensor] = {}  # of those kept, to the sharded ones

    def whole(self, tensor: Tensor) -> Tensor:
        """Return the whole of a tensor; the last few are kept."""
        if not is_sharded(tensor):
            return tensor
        key = id(tensor)
        if key not in self._kept:
            while len(self._kept) >= KEPT:
                _, old = self._kept.popitem(last=False)
                self._memory.pop(old.untyped_storage().data_ptr(), None)
            name = self.names.get(key, "another tensor")
            place = f"the gathering of {name}, {tuple(tensor.shape)}"
            with torch.no_grad(), torch._C.DisableTorchFunction(), self.meeting(place):
                self._kept[key] = whole(tensor)
            self._memory[self._kept[key].untyped_storage().data_ptr()] = tensor
        self._kept.move_to_end(key)
        return self._kept[key]

    def leaf(self, p: Tensor) -> Tensor:
        """Return a whole parameter for an operation of the loss."""
        name = self.names.get(id(p))
        if name is None or not torch.is_grad_enabled():  # frozen
            return self.whole(p)
        with torch._C.DisableTorchFunction():
            tensor: Tensor = _Gather.apply(self.anchor, self, p, name)  # type: ignore[no-untyped-call]
        if self.gathered is not None:
            self.gathered(tensor, name)
        return tensor

    def without_copies(self) -> AbstractContextManager[None]:
        """Let graphs that are made in here gather again what a backward pass needs."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    @contextmanager
    def receiving(self, receive: Callable[[str, Tensor], None]) -> Iterator[None]:
        """Hand on the gradients of a backward pass in here."""
        self.received = receive
        try:
            yield
        finally:
            self.received = None

    def forget(self) -> None:
        """Release everything that was gathered."""
        self._kept.clear()
        self._memory.clear()

    def _pack(self, saved: Tensor) -> Any:
        """Remember which part of which parameter a backward pass needs, and not its numbers."""
        sharded = self._memory.get(saved.untyped_storage().data_ptr())
        if sharded is None:
            return saved.detach()
        return sharded, saved.shape, saved.stride(), saved.storage_offset()

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        sharded, shape, stride, offset = packed
        return self.whole(sharded).as_strided(shape, stride, offset)


class _Gather(torch.autograd.Function):
    """A whole parameter, as a function of the anchor: its gradient is handed on at once."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, shards: Shards, p: Tensor, name: str) -> Tensor:
        ctx.shards, ctx.name = shards, name
        return shards.whole(p).detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        if ctx.shards.received is not None:
            ctx.shards.received(ctx.name, grad)
        return torch.zeros_like(ctx.shards.anchor), None, None, None


def rest_hooks(model: nn.Module) -> None:
    """Take out the hooks of ``fully_shard`` that gather the parameters of a whole module."""
    for module in fsdp_modules(model):
        state = module._get_fsdp_state()
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key in [key for key, hook in hooks.items() if _is_method_of(hook, state)]:
                del hooks[key]


def _is_method_of(hook: Any, state: Any) -> bool:
    """Return whether a hook is a method of an object, or a function around one."""
    inner = getattr(hook, "__wrapped__", None)
    return any(getattr(function, "__self__", None) is state for function in (hook, inner))
