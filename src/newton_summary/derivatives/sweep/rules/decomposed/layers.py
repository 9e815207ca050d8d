"""Convolutions with special padding, dropout, gates, attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from newton_summary.derivatives.norms import affine
from newton_summary.derivatives.sweep.rules.attention import in_tiles
from newton_summary.derivatives.sweep.rules.convolutions import per_dimension
from newton_summary.derivatives.sweep.rules.decomposed.matrices import contract
from newton_summary.derivatives.sweep.rules.decomposed.reductions import root, vector_norm
from newton_summary.derivatives.sweep.tape import positions_in


def dropout(x: Tensor, p: float, train: bool) -> Tensor:
    """Multiply by a mask, drawn as torch draws it."""
    if not train or p == 0:
        return x
    ones = torch.ones_like(x.detach())
    mask = torch.native_dropout(ones, p, True)[0] if x.is_cuda else torch.dropout(ones, p, True)
    return x * mask


def feature_dropout(x: Tensor, p: float, train: bool) -> Tensor:
    """Drop whole channels."""
    if not train or p == 0:
        return x
    return x * torch.feature_dropout(torch.ones_like(x.detach()), p, True)


def native_layer_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """A layer norm that also gives the mean and the inverse standard deviation."""
    dims = list(range(-len(shape), 0))
    mean = x.mean(dims, keepdim=True)
    rate = ((x - mean) * (x - mean)).mean(dims, keepdim=True).add(eps).rsqrt()
    return affine((x - mean) * rate, weight, bias), mean, rate


def convolution(name: str, n: int) -> Callable[..., Any]:
    """Return how to record a convolution with padding by name, or without a batch."""

    def conv(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        *rest: Any,
        **kwargs: Any,
    ) -> Any:
        func = getattr(torch, name)
        if input.dim() == n + 1:
            return func(input[None], weight, bias, stride, padding, *rest, **kwargs)[0]
        if not isinstance(padding, str):
            return NotImplemented
        if padding == "same":
            dilation = per_dimension(kwargs.get("dilation", rest[0] if rest else 1), n)
            around = [d * (size - 1) for size, d in zip(weight.shape[2:], dilation, strict=True)]
            pads = [pad for total in reversed(around) for pad in (total // 2, -(-total // 2))]
            input = torch.constant_pad_nd(input, pads)
        return func(input, weight, bias, stride, 0, *rest, **kwargs)

    return conv


def embedding_bag(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Any:
    """Sums (mode 0), means (1) or maxima (2) of rows of a table, bag by bag."""
    if scale_grad_by_freq:
        return NotImplemented
    with torch.no_grad():
        _, _, sizes, chosen = results = torch.embedding_bag(
            weight, indices, offsets, False, mode, sparse, None, include_last_offset, padding_idx
        )
    count = len(offsets) - include_last_offset
    if mode == 2:
        return weight.gather(0, chosen).masked_fill(sizes[:, None] == 0, 0), *results[1:]
    places = torch.arange(len(indices), device=indices.device)
    bags = torch.searchsorted(offsets[:count].contiguous(), places, right=True) - 1
    counted = torch.ones(len(indices), dtype=weight.dtype, device=weight.device)
    if padding_idx is not None:
        counted = (indices != padding_idx % len(weight)).to(weight.dtype)
    scale = counted if per_sample_weights is None else per_sample_weights * counted
    rows = torch.embedding(weight, indices) * scale[:, None]
    y = rows.new_zeros(count, weight.shape[1]).index_add(0, bags, rows)
    if mode == 1:
        sizes = counted.new_zeros(count).index_add(0, bags, counted)
        y = y / sizes.clamp_min(1)[:, None]
    return y, *results[1:]


def prelu(x: Tensor, weight: Tensor) -> Tensor:
    """``max(0, x) + w min(0, x)``."""
    if weight.numel() > 1:
        weight = weight.reshape((1, -1) + (1,) * (x.dim() - 2) if x.dim() > 1 else (-1,))
    return torch.where(x > 0, x, weight * x)  # with the slope at 0 that torch takes


def glu(x: Tensor, dim: int = -1) -> Tensor:
    """``a sigmoid(b)``."""
    a, b = x.chunk(2, dim)
    return a * torch.sigmoid(b)


def bilinear(a: Tensor, b: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``a W b``."""
    y = contract("...i,oij,...j->...o", [a, weight, b])
    return y if bias is None else y + bias


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Attention with the matrix of weights written out, where the rule for tiles does not hold."""
    if in_tiles(query, key, value, attn_mask, dropout_p):
        return NotImplemented
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    # The same shift of all keys changes no weight. Without their mean, what only shifts them, such
    # as their bias, has no derivatives from here on; else it would have some, made of rounding.
    scores = torch.matmul(query * factor, centered(key, -2).transpose(-2, -1))
    if is_causal:
        L, T = scores.shape[-2:]
        attn_mask = torch.ones(L, T, dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None:
        is_bool = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, -math.inf) if is_bool else scores + attn_mask
    # A query that may attend to nothing gets zeros.
    softmax = torch.softmax if attn_mask is None or is_causal else torch._safe_softmax
    weights = softmax(scores, -1)
    return torch.matmul(dropout(weights, dropout_p, dropout_p > 0), value)


def centered(x: Tensor, dim: int) -> Tensor:
    """Subtract the mean over a dimension: one operation on the tape, with a rule of its own."""
    if has_torch_function_unary(x):
        return handle_torch_function(centered, (x,), x, dim)
    return x - x.mean(dim, keepdim=True)


def as_strided_scatter(
    x: Tensor, src: Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None
) -> Tensor:
    """Entries replaced at given places in memory (torch's own gradient is wrong)."""
    places = positions_in(x.detach(), x.detach().as_strided(size, stride, offset))
    return x.reshape(-1).index_copy(0, places.reshape(-1), src.reshape(-1)).reshape(x.shape)


def cosine_similarity(a: Tensor, b: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
    """``a.b / (|a| |b|)``, each length at least eps."""
    a, b = torch.broadcast_tensors(a, b)  # type: ignore[no-untyped-call]
    lengths = [root((x * x).sum(dim, keepdim=True)).clamp_min(eps) for x in (a, b)]
    return (a * torch.reciprocal(lengths[0]) * (b * torch.reciprocal(lengths[1]))).sum(dim)


def pairwise_distance(
    a: Tensor, b: Tensor, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False
) -> Tensor:
    """The norm of ``a - b + eps``."""
    distance: Tensor = vector_norm(a - b + eps, p, -1, keepdim)
    return distance


LAYERS: dict[str, Callable[..., Any]] = {
    "dropout": dropout,
    "feature_dropout": feature_dropout,
    "native_layer_norm": native_layer_norm,
    **{f"conv{n}d": convolution(f"conv{n}d", n) for n in (1, 2, 3)},
    **{f"conv_transpose{n}d": convolution(f"conv_transpose{n}d", n) for n in (1, 2, 3)},
    "embedding_bag": embedding_bag,
    "prelu": prelu,
    "glu": glu,
    "bilinear": bilinear,
    "scaled_dot_product_attention": scaled_dot_product_attention,
    "as_strided_scatter": as_strided_scatter,
    "cosine_similarity": cosine_similarity,
    "pairwise_distance": pairwise_distance,
}
