"""The loss as a tape of operations, each with the values that went in and came out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from newton_summary.errors import CannotDifferentiate


class Value:
    """A tensor that went into or came out of an operation, as it was at that moment."""

    __slots__ = ("edge", "part", "slot", "tensor", "version")

    def __init__(self, tensor: Tensor, slot: int | None, edge: Any = None):
        """Slot: number of the value on the tape; None for what does not depend on parameters."""
        self.tensor = tensor
        self.version = version_of(tensor)
        self.slot = slot
        self.edge = edge  # of autograd's graph, where the adjoint of the value appears
        self.part: Tensor | None = None  # if only a part of that adjoint belongs to it: which one

    @property
    def now(self) -> Tensor:
        """The tensor, unless it has changed since. It may still be part of autograd's graph."""
        if version_of(self.tensor) != self.version:
            raise changed_in_place(self.tensor)
        return self.tensor

    def own_adjoint(self, adjoint: Tensor | None) -> Tensor | None:
        """Return the adjoint of the value, given that of its edge."""
        if adjoint is None or self.part is None:
            return adjoint
        return adjoint.reshape(-1)[self.part]


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor was changed; one made under inference_mode does not count."""
    try:
        return tensor._version
    except RuntimeError:
        return 0


def changed_in_place(tensor: Tensor) -> CannotDifferentiate:
    """Return the error for a change that the recorder has not seen."""
    return CannotDifferentiate(
        f"sweep: a tensor of shape {tuple(tensor.shape)} that the loss depends on is changed in "
        f"place in a way that cannot be recorded, such as through .detach() or .data"
    )


def positions_in(owner: Tensor, view: Tensor) -> Tensor:
    """Return where each entry of a view stands among the flattened entries of the owner."""
    if view.dtype != owner.dtype:
        raise changed_in_place(owner)
    span = 1 + sum((n - 1) * step for n, step in zip(owner.shape, owner.stride(), strict=True))
    memory = torch.full((span,), -1, device=owner.device)
    numbers = torch.arange(owner.numel(), device=owner.device).reshape(owner.shape)
    memory.as_strided(owner.shape, owner.stride()).copy_(numbers)
    start = view.storage_offset() - owner.storage_offset()
    try:
        positions = memory.as_strided(view.shape, view.stride(), start).contiguous()
    except RuntimeError:
        positions = numbers - 1
    if bool((positions < 0).any()):
        raise CannotDifferentiate("sweep: as_strided reaches beyond the tensor that it is taken of")
    return positions


@dataclass(eq=False)
class Op:
    """One operation on the tape: ``y = h(x_1, ..., x_m)``."""

    name: str
    func: Callable[..., Any]
    args: tuple[Any, ...]  # with every tensor as a Value
    kwargs: dict[str, Any]
    outputs: list[Value | None]  # None for an output that does not depend on the parameters
    saved: Any = None  # what a rule keeps from the recording, such as the indices of a maximum
    inputs: list[int] = field(default_factory=list)  # slots that the operation depends on
    curved: bool = False  # whether it may contribute to Hbar and D3
    wanted: bool = True  # whether a later operation needs the derivatives of the outputs
    finishes: list[int] = field(default_factory=list)  # slots that no later operation needs
    complex: bool = False  # whether a tensor among arguments and results is complex

    @property
    def passed(self) -> bool:
        """Whether the sweep has anything to do here."""
        return self.curved or self.wanted

    @property
    def out(self) -> Value:
        """The first output that depends on the parameters."""
        return next(value for value in self.outputs if value is not None)


@dataclass
class Cut:
    """A place on the tape where the loss depends on all before it through a single value y.

    There gbar is read off: it is <adjoint, y1>.
    """

    index: int  # of the operation before which it is
    value: Value
    adjoint: Tensor | None = None  # known after the backward pass; None if it is zero

    @property
    def slot(self) -> int:
        """Of the value."""
        assert self.value.slot is not None
        return self.value.slot


@dataclass(frozen=True)
class ChunkedLogits:
    """A layer with many outputs and what follows up to a log-softmax, passed a few rows at a time.

    The derivatives of its result are not kept. Where gbar is read off behind it, its part of gbar
    is read off here instead.
    """

    ops: list[int]  # places on the tape
    rows: int  # in all
    at_a_time: int
    reads_gbar: bool = False


@dataclass
class Tape:
    """All operations that lead from the parameters to the loss."""

    ops: list[Op]
    loss: Tensor
    leaves: dict[int, str]  # slot -> parameter name
    needed: set[int] = field(default_factory=set)  # slots whose derivatives a later operation uses
    cut: Cut | None = None  # where gbar is read off; else it comes from the gradient
    small: bool = False  # whether the derivatives of all values together take little memory
    chunked: list[ChunkedLogits] = field(default_factory=list)  # what is passed in pieces


def find_tensors(tree: Any) -> list[Tensor]:
    """Return every tensor in nested tuples, lists and dicts."""
    found: list[Tensor] = []
    _collect(tree, Tensor, found)
    return found


def find_values(tree: Any) -> list[Value]:
    """Return every value in nested tuples, lists and dicts."""
    found: list[Value] = []
    _collect(tree, Value, found)
    return found


def _collect(tree: Any, kind: type, found: list[Any]) -> None:
    # Called for every operation that is recorded: most arguments are numbers, seen here and left.
    if isinstance(tree, kind):
        found.append(tree)
    elif isinstance(tree, tuple | list):
        for x in tree:
            if isinstance(x, kind):
                found.append(x)
            elif isinstance(x, tuple | list | dict):
                _collect(x, kind, found)
    elif isinstance(tree, dict):
        for x in tree.values():
            _collect(x, kind, found)


def plain(tree: Any) -> Any:
    """Replace every value by its tensor."""
    if isinstance(tree, Value):
        return tree.now
    if isinstance(tree, tuple):
        return tuple(plain(x) for x in tree)
    if isinstance(tree, list):
        return [plain(x) for x in tree]
    if isinstance(tree, dict):
        return {key: plain(x) for key, x in tree.items()}
    return tree
