"""Attention some queries at a time, without the matrix of all weights.

For a query, S = q k^T + mask are its scores, P = softmax(S) its weights, O = P v its result. Along
a group, with <a> the mean of a over the keys under P and c = S1 - <S1>:

    S1 = q1 k^T + q k1^T                       P1 = P c
    S2 = q2 k^T + q k2^T + 2 q1 k1^T           P2 = P e,  e = S2 + c^2 - <S2 + c^2>
    O1 = P1 v + P v1                           O2 = P2 v + P v2 + 2 P1 v1

With delta the adjoint of O, Z = delta v^T - <delta v^T> and W = P Z the adjoint of S:

    Hbar_st  gets  <W, c_s c_t>  and, symmetrised,  <W, q1_s k1_t^T> + <delta, P1_s v1_t>
    D3_s     gets  <W c, 3 e - 2 c^2> + 3 <W, q1 k2^T + q2 k1^T> + 3 <delta, P1 v2 + P2 v1>

Given keys and values, queries are independent, so tiles of queries and heads are passed one after
the other. A tile recomputes its weights from q and k, and has all keys that its queries may attend
to, so no statistics of the softmax are kept. Memory is linear in the number of keys. On a GPU,
kernels replace tiles where possible (``fused_attention``).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor

from newton_summary.derivatives.sweep.rules.attention_tiles import Attention, Heads, Stack
from newton_summary.derivatives.sweep.tape import Op, Sweep, Tangent, Value, cast, union


def in_tiles(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float) -> bool:
    """Whether the rule below supports a call; others are recorded as several operations."""
    if dropout > 0 or (mask is not None and mask.requires_grad):
        return False
    if 0 in (*q.shape, *k.shape, *v.shape) or not q.dim() == k.dim() == v.dim():
        return False
    if q.shape[:-3] != k.shape[:-3] or k.shape[:-1] != v.shape[:-1]:
        return False
    return q.dim() == 2 or q.shape[-3] % k.shape[-3] == 0


def attention(
    sweep: Sweep,
    op: Op,
    query: Value,
    key: Value,
    value: Value,
    attn_mask: Value | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tangent | None:
    """``scaled_dot_product_attention`` where :func:`in_tiles` holds."""
    inputs = (query, key, value)
    tangents = [sweep.tangent(x) for x in inputs]
    found = [t for t in tangents if t is not None]
    if not found:
        return None
    third = sweep.order == 3
    groups = union(*(t.first for t in found), *(t.second for t in found))
    out = op.out.tensor

    q, k, v = (cast(x.now, out.dtype) for x in inputs)
    heads = Heads.of(q, k)
    Q, K, V = (
        None if t is None else Stack(t.to(out.dtype), groups, view)
        for t, view in zip(tangents, (heads.of_queries, heads.of_keys, heads.of_keys), strict=True)
    )
    mask = None if attn_mask is None else attn_mask.now.expand(*q.shape[:-1], k.shape[-2])
    delta = sweep.adjoint(op.out)
    tiled = Attention(
        heads,
        groups,
        sweep.order,
        is_causal,
        1 / math.sqrt(q.shape[-1]) if scale is None else scale,
        q=heads.of_queries(q[None]),
        k=heads.of_keys(k[None]),
        v=heads.of_keys(v[None]),
        Q=Q,
        K=K,
        V=V,
        mask=None if mask is None else heads.of_queries(mask[None]),
        delta=None if delta is None else heads.of_queries(cast(delta, out.dtype)[None]),
        out=heads.new_result(out, (2 if third else 1) * len(groups)) if op.wanted else None,
    )
    tiled.run()
    if delta is not None:
        sweep.add_Hbar(groups, groups, tiled.Hbar)
        if third:
            sweep.add_D3(groups, tiled.D3)
    if tiled.out is None:
        return None
    return Tangent(groups, groups if third else (), tiled.out.reshape(-1, *out.shape))


ATTENTION: dict[str, Callable[..., Any]] = {"scaled_dot_product_attention": attention}
