"""Parameters that FSDP2 has divided among ranks, gathered one at a time where they are needed.

While a loss is measured the hooks of ``fully_shard`` rest, and every operation that uses a sharded
parameter is given the whole of it. Nobody holds on to that: the backward pass and the sweep gather
it again. So a rank has a few whole parameters in memory at a time, and never the whole model; and
all ranks have to come by the same operations in the same order, as in training with FSDP itself.
They meet before each gathering: a rank that has failed, or come elsewhere, keeps nobody waiting.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Meeting = Callable[[str], AbstractContextManager[Any]]
KEPT = 4  # whole parameters at a time: those of one layer, and of their directions


def is_sharded(tensor: object) -> bool:
    """Return whether a tensor is divided among ranks; does not import torch's code for it."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_part(tensor: Tensor) -> Tensor:
    """Return what this rank has of a tensor: all of it, unless it is sharded.

    Shares its memory, so what is written there is written to the tensor.
    """
    return tensor._local_tensor if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def local_rows(label: int | Tensor, p: Tensor) -> int | Tensor:
    """Return the labels of what this rank has of a parameter."""
    if isinstance(label, int) or not is_sharded(p):
        return label
    rows = -(-p.shape[0] // p.device_mesh.size())  # type: ignore[attr-defined]
    start = rows * p.device_mesh.get_local_rank()  # type: ignore[attr-defined]
    return label[start : start + rows]


def like_sharded(local: Tensor, like: Tensor) -> Tensor:
    """Return a rank's part as a tensor that is divided as another one is."""
    if not is_sharded(like):
        return local
    module = sys.modules["torch.distributed.tensor"]
    sharded: DTensor = like  # type: ignore[assignment]
    return module.DTensor.from_local(  # type: ignore[no-any-return]
        local,
        sharded.device_mesh,
        sharded.placements,
        run_check=False,
        shape=sharded.shape,
        stride=sharded.stride(),
    )


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


def whole(tensor: Tensor) -> Tensor:
    """Return the whole of a tensor, gathered from all ranks if it is sharded."""
    return tensor.detach().full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def refuse_sharded(params: Mapping[str, Tensor], what: str) -> None:
    """Raise if a parameter is sharded, for what takes whole models only."""
    name = next((name for name, p in params.items() if is_sharded(p)), None)
    if name is not None:
        raise ValueError(
            f"Parameter {name!r} is sharded, and {what} takes whole models only. Call it before "
            f"fully_shard; summarize measures sharded models."
        )


def find_shards(
    params: Mapping[str, Tensor], model: nn.Module, meeting: Meeting | None = None
) -> Shards | None:
    """Return the parameters as shards; None if they are ordinary ones.

    Args:
        params: The parameters, by name.
        model: Their model.
        meeting: As for :class:`Shards`.

    Raises:
        ValueError: If they are divided in another way than by ``fully_shard`` over one dimension.
    """
    sharded = {name: p for name, p in params.items() if is_sharded(p)}
    if not sharded:
        return None
    for name, p in model.named_parameters():
        if not is_sharded(p):
            continue
        mesh, placements = p.device_mesh, p.placements  # type: ignore[attr-defined]
        if mesh.ndim != 1 or mesh.size() != torch.distributed.get_world_size():
            raise ValueError(
                f"Parameter {name!r} is divided over a mesh of shape {tuple(mesh.shape)}: only "
                f"fully_shard over all ranks in one dimension can be measured."
            )
        if not placements[0].is_shard(0):
            raise ValueError(
                f"Parameter {name!r} is divided as {placements}: only fully_shard along the first "
                f"dimension can be measured."
            )
        if local_part(p).device.type != mesh.device_type:
            raise ValueError(
                f"The shard of parameter {name!r} lies on {local_part(p).device} and is computed "
                f"with on {mesh.device_type}: offloaded parameters cannot be measured."
            )
    return Shards(params, meeting)


class Shards(dict[str, Tensor]):
    """The parameters of a model that FSDP2 has sharded, by name.

    Args:
        params: The parameters.
        meeting: Gives a context for what is gathered, or added up, from all ranks: it is told what
            that is, and waits for them. None where there is one rank.

    Attributes:
        anchor: A leaf of autograd's graph that stands for all of them.
        gathered: Is told of every whole parameter that an operation is given, and its name.
        received: Is given the gradient of the whole parameter, for its name, in a backward pass.
    """

    def __init__(self, params: Mapping[str, Tensor], meeting: Meeting | None = None):
        super().__init__(params)
        self.meeting: Meeting = meeting or nullcontext
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

    @contextmanager
    def open(self) -> Iterator[None]:
        """Let operations in here have whole parameters, and backward passes gather them again."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack), _Gathering(self):
            yield

    def forget(self) -> None:
        """Let go of everything that was gathered."""
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


class _Gathering(TorchFunctionMode):
    """Gives every operation whole parameters in the place of sharded ones."""

    def __init__(self, shards: Shards):
        from newton_summary.derivatives.sweep.torch_functions import look_up

        super().__init__()
        self.shards, self.look_up = shards, look_up

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        call = self.look_up(func)
        if call.passes or call.accesses:
            return func(*args, **kwargs)
        found: dict[int, Tensor] = {}
        return func(*self._gather(args, found), **self._gather(kwargs, found))

    def _gather(self, tree: Any, found: dict[int, Tensor]) -> Any:
        if isinstance(tree, tuple) and type(tree) is tuple:
            return tuple(self._gather(x, found) for x in tree)
        if isinstance(tree, list):
            return [self._gather(x, found) for x in tree]
        if isinstance(tree, dict):
            return {key: self._gather(x, found) for key, x in tree.items()}
        if not is_sharded(tree):
            return tree
        if id(tree) not in found:
            found[id(tree)] = self.shards.leaf(tree)
        return found[id(tree)]


# --- the hooks of fully_shard ---------------------------------------------------------------------


def settle(model: nn.Module) -> None:
    """Put every module that FSDP2 looks after into its sharded state.

    After a forward pass without a backward pass some of them hold whole parameters.
    """
    for module in _fsdp_modules(model):
        module.reshard()


def rest_hooks(model: nn.Module) -> None:
    """Take out the hooks that gather the parameters of a whole module."""
    for module in _fsdp_modules(model):
        state = module._get_fsdp_state()
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key in [key for key, hook in hooks.items() if _is_method_of(hook, state)]:
                del hooks[key]


def _is_method_of(hook: Any, state: Any) -> bool:
    """Return whether a hook is a method of an object, or a function around one."""
    inner = getattr(hook, "__wrapped__", None)
    return any(getattr(function, "__self__", None) is state for function in (hook, inner))


def _fsdp_modules(model: nn.Module) -> list[Any]:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kind = getattr(fsdp, "FSDPModule", None)
    return (
        [] if kind is None else [module for module in model.modules() if isinstance(module, kind)]
    )
