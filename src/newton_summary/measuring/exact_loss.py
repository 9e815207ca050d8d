"""A loss as the function that derivatives are taken of: in float64, with its constants held fixed.

Central differences of float32 are mostly rounding, and many models compute in float32 somewhere,
whatever the dtype of their parameters: norms, softmax, routers. And whatever a loss takes out of
the graph, by ``detach``, ``no_grad`` or ``item``, is a constant to autograd, but not to somebody
who moves the parameters and evaluates the loss again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import update_wrapper
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from newton_summary.derivatives.sweep.torch_functions import look_up
from newton_summary.probe.inputs import LossFn

WIDER = {
    torch.float32: torch.float64,
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.complex64: torch.complex128,
    torch.complex32: torch.complex128,
}
CONVERSIONS = ("float", "half", "bfloat16")
REINTERPRETS = ("view",)  # its dtype says how bits are read
LEAVES_THE_GRAPH = frozenset(("detach", "data.get", "item", "tolist", "__float__", "numpy"))


def widened(tree: Any) -> Any:
    """Return tensors in float64, and float64 in place of narrower dtypes."""

    def widen(leaf: Any) -> Any:
        if isinstance(leaf, torch.dtype):
            return WIDER.get(leaf, leaf)
        if isinstance(leaf, Tensor) and leaf.dtype in WIDER:
            return leaf.to(WIDER[leaf.dtype])
        return leaf

    return pytree.tree_map(widen, tree)


class ExactLoss(TorchFunctionMode):
    """While active, torch computes in float64, and constants are those of the first evaluation.

    Args:
        loss_fn: The loss. This object is evaluated in its place.
    """

    def __init__(self, loss_fn: LossFn):
        super().__init__()
        update_wrapper(self, loss_fn, updated=())
        self.loss_fn = loss_fn
        self.constants: list[Any] = []  # of the first evaluation, in the order in which they came
        self.known = False  # whether that has ended
        self.position = 0
        self.active = False  # an interrupt may leave the mode where it was

    def __call__(self, model: Any, batch: Any) -> Tensor:
        """Evaluate the loss."""
        self.position = 0
        if not self.known:
            self.constants.clear()
        try:
            with self:
                self.active = True
                loss = self.loss_fn(model, batch)
        finally:
            self.active = False
        self.known = True
        return loss

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        call, kwargs = look_up(func), kwargs or {}
        if call.passes or not self.active:
            return func(*args, **kwargs)
        constant = not call.in_place and self._is_constant(call.name, call.accesses, args, kwargs)
        if constant and self.known and self.position < len(self.constants):
            self.position += 1
            return copied(self.constants[self.position - 1])
        if call.accesses or call.name in REINTERPRETS:
            result = func(*args, **kwargs)
        elif call.in_place:
            result = func(args[0], *widened(args[1:]), **widened(kwargs))
        elif call.name in CONVERSIONS:
            result = args[0].to(torch.float64)
        elif call.name == "_grouped_mm":
            result = grouped_mm(*widened(args), **widened(kwargs))
        else:
            result = widened(func(*widened(args), **widened(kwargs)))
        if constant and not self.known:
            self.constants.append(copied(result))
        return result

    @staticmethod
    def _is_constant(name: str, accesses: bool, args: Any, kwargs: Any) -> bool:
        """Whether a call takes a number out of the graph."""
        if torch.is_grad_enabled() and name not in LEAVES_THE_GRAPH:
            return False
        if accesses and name != "data.get":
            return False
        leaves = pytree.tree_leaves((args, kwargs))
        return any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves)


def copied(tree: Any) -> Any:
    """Copy what a loss may write to."""
    return pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, tree)


def grouped_mm(a: Tensor, b: Tensor, offs: Tensor | None = None, **kwargs: Any) -> Tensor:
    """``torch._grouped_mm``, which does not know float64."""
    if offs is None:
        return a @ b
    ends: Sequence[int] = [0, *offs.tolist()]
    if a.dim() != 2 or b.dim() != 3 or any(value is not None for value in kwargs.values()):
        raise NotImplementedError("grouped_mm in float64 supports rows times matrices only")
    parts = [a[start:end] @ w for (start, end), w in zip(pairwise(ends), b, strict=True)]
    return torch.cat([*parts, a.new_zeros(len(a) - ends[-1], b.shape[-1])])
