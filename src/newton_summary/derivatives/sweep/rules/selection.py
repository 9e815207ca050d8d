"""Operations that choose some of their entries: linear once the choice is made.

The choice is made while recording, and kept for the sweep.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from operator import index
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from newton_summary.derivatives.sweep.rules.linear import Rows, on_rows
from newton_summary.derivatives.sweep.tape import Op, Value, positions_in
from newton_summary.derivatives.sweep.torch_functions import dimensions, names
from newton_summary.errors import CannotDifferentiate
from newton_summary.probe.eager import mark_approximate

# --- max-pooling ---------------------------------------------------------------------------------


def with_indices(name: str) -> Callable[..., tuple[Any, Any]]:
    """Return how to run a max-pooling so that it reports which entries it chose."""
    pool = getattr(F, f"{name}_with_indices")

    def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        if not isinstance(func, types.FunctionType) and not name.startswith("max"):
            return keep_result(func, args, kwargs)
        settings = {key: value for key, value in kwargs.items() if key != "return_indices"}
        result = pool(*args, **settings)
        return result[0], result

    return run


def pooled(n: int) -> Callable[..., Any]:
    """Return the rule of a max-pooling over the last n dimensions."""

    @on_rows
    def rule(op: Op, x: Value, *args: Any, **kwargs: Any) -> Rows:
        indices, shape = op.saved[1].flatten(-n), op.out.tensor.shape
        return lambda rows: chosen(rows.flatten(-n), -1, indices).reshape(len(rows), *shape)

    return rule


def chosen(rows: Tensor, dim: int, indices: Tensor) -> Tensor:
    """Take the same entries of all rows."""
    return rows.gather(dim, indices.expand(len(rows), *indices.shape))


# --- maxima, sorting -----------------------------------------------------------------------------


def keep_result(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Run an operation and keep its result for the rule."""
    result = func(*args, **kwargs)
    return result, result


@on_rows
def extremum(op: Op, x: Value, *args: Any, **kwargs: Any) -> Rows:
    """Max, min, median, sort, topk, ...: along a dimension, or the one of all entries."""
    if x.tensor.dim() == 0:
        return lambda rows: rows.reshape(len(rows), *op.out.tensor.shape)
    if isinstance(op.saved, Tensor):  # of all entries; equal ones share, as in autograd
        dims = kwargs.get("dim", args[0] if args else None)
        return lambda rows: share(rows, x.now, op.saved, dims)
    indices = op.saved[1]
    before = 1 if op.name in ("topk", "kthvalue") else 0  # arguments before the dimension
    dim = kwargs.get("dim", args[before] if len(args) > before else None)
    dim = -1 if dim is None or isinstance(dim, bool) else index(dim)
    along = dim % x.tensor.dim()
    kept = indices if indices.dim() == x.tensor.dim() else indices.unsqueeze(along)
    return lambda rows: chosen(rows, along + 1, kept).reshape(len(rows), *indices.shape)


def share(rows: Tensor, x: Tensor, y: Tensor, dims: Any) -> Tensor:
    """Return the rows at the extreme entries; where several are equal, their mean."""
    along = [d % x.dim() for d in dimensions(x, dims)]
    kept = [1 if d in along else n for d, n in enumerate(x.shape)]
    mask = (x == y.detach().reshape(kept)).to(rows.dtype)
    mask = mask / mask.sum(along, keepdim=True)
    return (rows * mask).sum([d + 1 for d in along]).reshape(len(rows), *y.shape)


def strided(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Tensor]:
    """Run ``as_strided`` and keep which entries it takes."""
    before = args[0].detach()  # as it is now: as_strided_ changes the tensor itself
    result = func(*args, **kwargs)
    return result, positions_in(before, result)


def unpooled(n: int) -> Callable[..., tuple[Any, None]]:
    """Return how to run a max-unpooling over n dimensions.

    Where two entries are put at one place, torch's gradient is that of both.
    """

    def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, None]:
        places = args[1].flatten(-n).sort(-1)[0]
        if bool((places[..., 1:] == places[..., :-1]).any()):
            mark_approximate()
            raise CannotDifferentiate(
                "sweep: max_unpool puts two entries in one place, so torch's own gradient is not "
                "that of the loss"
            )
        return func(*args, **kwargs), None

    return run


EXTREMA = names("max min amax amin median nanmedian sort topk kthvalue mode cummax cummin")
POOLING: dict[str, int] = {  # over how many dimensions
    **{f"max_pool{n}d": n for n in (1, 2, 3)},
    **{f"adaptive_max_pool{n}d": n for n in (1, 2, 3)},
    **{f"fractional_max_pool{n}d": n for n in (2, 3)},
}

PREPARE_SELECTION: dict[str, Callable[..., tuple[Any, Any]]] = {
    **dict.fromkeys(EXTREMA, keep_result),
    **{name: with_indices(name) for name in POOLING},
    **{f"max_pool{n}d_with_indices": keep_result for n in (1, 2, 3)},
    "as_strided": strided,
    **{f"max_unpool{n}d": unpooled(n) for n in (2, 3)},
}

SELECTION: dict[str, Callable[..., Any]] = {
    **{name: pooled(n) for name, n in POOLING.items()},
    **{f"max_pool{n}d_with_indices": pooled(n) for n in (1, 2, 3)},
    **dict.fromkeys(EXTREMA, extremum),
}
