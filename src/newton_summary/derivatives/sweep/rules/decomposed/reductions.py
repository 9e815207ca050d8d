"""Variances, norms, and other functions of several entries."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from newton_summary.derivatives.sweep.torch_functions import dimensions


def variance_and_mean(x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """torch.var_mean: (dim, unbiased, keepdim), (unbiased), or (dim, *, correction, keepdim)."""
    if args and isinstance(args[0], bool):
        args = (None, *args)
    given = {**dict(zip(("dim", "unbiased", "keepdim"), args, strict=False)), **kwargs}
    correction = given.get("correction")
    if correction is None:
        correction = 1 if given.get("unbiased", True) else 0
    dims, keepdim = dimensions(x, given.get("dim")), given.get("keepdim", False)
    n = math.prod(x.shape[d] for d in dims) if x.dim() else 1
    mean = x.mean(dims, keepdim=True)
    centered = x - mean
    squared = (centered * centered).sum(dims, keepdim=keepdim) / max(n - correction, 0)
    return squared, mean if keepdim else mean.squeeze(tuple(dims))


def deviation_and_mean(x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """``torch.std_mean``."""
    squared, mean = variance_and_mean(x, *args, **kwargs)
    return root(squared), mean


def root(x: Tensor) -> Tensor:
    """The square root; its derivative at 0 is taken to be 0, as that of a norm is."""
    zero = x == 0
    return torch.sqrt(torch.where(zero, 1.0, x)) * (~zero).to(x.dtype)


def vector_norm(
    x: Tensor, ord: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Any:
    """The sum of the powers of absolute values, to the inverse power."""
    dims = dimensions(x, dim)
    x = x if dtype is None else x.to(dtype)
    if ord == 2:
        squares = torch.view_as_real(x).square().sum(-1) if x.is_complex() else x * x
        return root(squares.sum(dims, keepdim=keepdim))
    if ord == 1:
        return x.abs().sum(dims, keepdim=keepdim)
    if ord in (math.inf, -math.inf):
        return (torch.amax if ord > 0 else torch.amin)(x.abs(), dims, keepdim)
    if ord == 0:
        return NotImplemented
    total = torch.pow(x.abs(), ord).sum(dims, keepdim=keepdim)
    zero = total == 0
    return torch.pow(torch.where(zero, 1.0, total), 1 / ord) * (~zero).to(total.dtype)


def norm(
    x: Tensor, ord: Any = None, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Any:
    """``torch.linalg.norm``: of vectors, and Frobenius' of matrices."""
    if ord is None or ord == "fro":
        return vector_norm(x, 2, dim, keepdim, dtype=dtype)
    if isinstance(dim, int) or (dim is None and x.dim() == 1) or (dim is not None and len(dim) < 2):
        return vector_norm(x, ord, dim, keepdim, dtype=dtype)
    return NotImplemented


def pdist(x: Tensor, p: float = 2.0) -> Any:
    """The distances of all rows from all others."""
    i, j = torch.triu_indices(len(x), len(x), 1, device=x.device)
    return vector_norm(x[i] - x[j], p, -1)


def nansum(x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    """The sum without entries that are not a number."""
    return torch.where(x.isnan(), 0.0, x).sum(dimensions(x, dim), keepdim=keepdim, dtype=dtype)


def nanmean(x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    """The mean without entries that are not a number."""
    dims = dimensions(x, dim)
    return nansum(x, dims, keepdim, dtype=dtype) / (~x.isnan()).sum(dims, keepdim=keepdim)


def sum_to_size(x: Tensor, *size: Any) -> Tensor:
    """Sum over the dimensions that a broadcast would add."""
    shape = size[0] if isinstance(size[0], Sequence) else size
    extra = x.dim() - len(shape)
    dims = [d for d in range(x.dim()) if d < extra or (shape[d - extra] == 1 and x.shape[d] > 1)]
    return (x.sum(dims, keepdim=True) if dims else x).reshape(shape)


def aminmax(x: Tensor, *, dim: int | None = None, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """The smallest and the largest entries."""
    dims = dimensions(x, dim)
    return torch.amin(x, dims, keepdim), torch.amax(x, dims, keepdim)


def logcumsumexp(x: Tensor, dim: int) -> Tensor:
    """The logsumexp of each entry and all before it (torch's own third derivative is nan)."""
    if x.dim() == 0:
        return x
    rows = x.movedim(dim, -1)
    later = torch.ones(rows.shape[-1:] * 2, dtype=torch.bool, device=x.device).triu(1)
    masked = rows.unsqueeze(-2).masked_fill(later, -math.inf)
    return torch.logsumexp(masked, -1).movedim(-1, dim)


def scatter_reduce(
    x: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str, *, include_self: bool = True
) -> Any:
    """Sums, means or extrema of all entries that an index sends to the same place."""
    if reduce == "prod":
        return NotImplemented
    src = src[tuple(slice(n) for n in index.shape)]
    if reduce in ("amax", "amin"):
        return _scattered_extrema(x, dim, index, src, reduce, include_self)
    total = (x if include_self else x.scatter(dim, index, 0.0)).scatter_add(dim, index, src)
    if reduce == "sum":
        return total
    own = torch.ones_like(x.detach())
    own = own if include_self else own.scatter(dim, index, 0.0)
    return total / own.scatter_add(dim, index, torch.ones_like(src.detach()))


def _scattered_extrema(
    x: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str, include_self: bool
) -> Tensor:
    """The largest or smallest entries; equal ones share, as in autograd."""
    with torch.no_grad():
        y = x.scatter_reduce(dim, index, src, reduce, include_self=include_self)
        # Without itself, what nothing is sent to stays as it is.
        kept = torch.ones_like(x, dtype=torch.bool)
        own = x == y if include_self else kept.scatter(dim, index, False)
        sent = (src == y.gather(dim, index)).to(x.dtype)
        shares = own.to(x.dtype)
        counts = shares.scatter_add(dim, index, sent).clamp_min(1)
        shares, sent = shares / counts, sent / counts.gather(dim, index)
    x, src = x.masked_fill(shares == 0, 0.0), src.masked_fill(sent == 0, 0.0)  # may be infinite
    return (x * shares).scatter_add(dim, index, src * sent)


def index_reduce(
    x: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor:
    """The same of whole slices."""
    shape = [-1 if d == dim % x.dim() else 1 for d in range(x.dim())]
    places = index.to(torch.int64).reshape(shape).expand(source.shape)
    return x.scatter_reduce(dim, places, source, reduce, include_self=include_self)


SEGMENTS = {"sum": "sum", "mean": "mean", "max": "amax", "min": "amin", "prod": "prod"}


def segment_reduce(
    data: Tensor,
    reduce: str,
    *,
    lengths: Tensor | None = None,
    indices: Tensor | None = None,
    offsets: Tensor | None = None,
    axis: int = 0,
    unsafe: bool = False,
    initial: float | None = None,
) -> Any:
    """Sums, means, extrema or products of consecutive slices."""
    if lengths is None or lengths.dim() > 1 or initial is not None or bool((lengths == 0).any()):
        return NotImplemented
    places = torch.arange(len(lengths), device=data.device).repeat_interleave(lengths)
    empty = data.new_zeros((len(lengths), *data.shape[1:]))
    return empty.index_reduce(0, places, data, SEGMENTS[reduce], include_self=False)


REDUCTIONS: dict[str, Callable[..., Any]] = {
    "var": lambda *args, **kwargs: variance_and_mean(*args, **kwargs)[0],
    "std": lambda *args, **kwargs: deviation_and_mean(*args, **kwargs)[0],
    "var_mean": variance_and_mean,
    "std_mean": deviation_and_mean,
    "linalg_vector_norm": vector_norm,
    "linalg_norm": norm,
    "linalg_matrix_norm": lambda x, ord="fro", dim=(-2, -1), *args, **kwargs: norm(
        x, ord, dim, *args, **kwargs
    ),
    "dist": lambda a, b, p=2: vector_norm(a - b, p),
    "cdist": lambda a, b, p=2.0, compute_mode=None: vector_norm(
        a.unsqueeze(-2) - b.unsqueeze(-3), p, -1
    ),
    "pdist": pdist,
    "nansum": nansum,
    "nanmean": nanmean,
    "sum_to_size": sum_to_size,
    "aminmax": aminmax,
    "msort": lambda x: torch.sort(x, 0)[0],
    "logcumsumexp": logcumsumexp,
    "scatter_reduce": scatter_reduce,
    "index_reduce": index_reduce,
    "segment_reduce": segment_reduce,
}
