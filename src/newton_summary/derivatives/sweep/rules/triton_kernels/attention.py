"""Attention without the matrix of weights: for every query, key and group, all of it is computed.

With P the weights at the point itself and lse the logarithm of their sum before they are divided,
the weights along a group are exp(S(t) - lse) / D(t), with D(0) = 1 and

    S1 = q1 k^T + q k1^T              D1 = sum P S1
    S2 = X + 2 q1 k1^T                D2 = sum P (S1^2 + S2)           X = q2 k^T + q k2^T

so that derivatives of O = N / D follow from those of N, in one pass over the keys (Leibniz):

    N1 = P S1 v + P v1                              O1 = N1 - D1 O
    N2 = P (S1^2 + S2) v + 2 P S1 v1 + P v2         O2 = N2 - 2 D1 O1 - D2 O

Hbar takes no pairs of groups here: it is <g_s, x1_t> with x = (q, k, v), and g_s the derivative
along s of the gradient of <delta, O>, delta held. With Z = delta v^T - <delta, O>, W = P Z,
Z1 = delta v1^T, and the derivative W1 = P (c Z + Z1 - f1) of W, c = S1 - D1:

    g_s = (W1 k + W k1,  W1^T q + W^T q1,  (P c)^T delta)        f1 = sum P (S1 Z + Z1)

D3_s is 3 <g_s, x2_s>, and the third derivative f3 of <delta, O> along q + t q1, k + t k1, v + t v1:
with R = 2 q1 k1^T in place of S2, and E2 = sum P (S1^2 + R) in that of D2,

    f2 = sum P ((S1^2 + R) Z + 2 S1 Z1) - 2 D1 f1
    f3 = sum P ((S1^3 + 3 S1 R) Z + 3 (S1^2 + R) Z1) - 3 D1 f2 - 3 E2 f1

The factor of the scores is in the keys. Sums are of float32, or float64, whatever the inputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from newton_summary.derivatives.sweep.tf32 import precision_of

# Queries and keys at a time, and warps of a program, chosen so that few registers are spilled.
TILES = {torch.float32: (32, 32, 4), torch.bfloat16: (64, 32, 4)}
# What one kernel serves with all values.
VARYING = ["S", "heads", "shared", "mask_b", "mask_h", "mask_l", "mask_t"]


@triton.jit  # type: ignore[untyped-decorator]
def _rows(x_in, places, step, n, d, D: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load some of n rows of d features."""
    features = tl.arange(0, D)
    inside = (places[:, None] < n) & (features[None, :] < d)
    where = places.to(tl.int64)[:, None] * step + features[None, :]
    return tl.load(x_in + where, mask=inside, other=0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _put(x_out, x, places, step, n, d, D: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store some of n rows of d features."""
    features = tl.arange(0, D)
    inside = (places[:, None] < n) & (features[None, :] < d)
    where = places.to(tl.int64)[:, None] * step + features[None, :]
    tl.store(x_out + where, x.to(x_out.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _visible(  # type: ignore[no-untyped-def]
    scores, queries, keys, L, T, mask_in, head, mask_l, mask_t, CAUSAL: tl.constexpr
):
    """Return scores with -inf where a query may not attend to a key; ``head``: its mask's place."""
    seen = (queries < L) & (keys < T)
    if CAUSAL:
        seen = seen & (keys <= queries)
    if mask_in is not None:
        where = mask_in + head + queries.to(tl.int64) * mask_l + keys.to(tl.int64) * mask_t
        mask = tl.load(where, mask=seen, other=0)
        if mask_in.dtype.element_ty == tl.int1:
            seen = seen & (mask != 0)
        else:
            scores += mask.to(scores.dtype)
    return tl.where(seen, scores, -float("inf"))


@triton.jit(do_not_specialize=VARYING)  # type: ignore[untyped-decorator]
def _at_the_point(  # type: ignore[no-untyped-def]
    q_in,
    k_in,
    v_in,
    delta_in,
    mask_in,
    lse_out,
    mean_out,
    O_out,
    Pk_out,
    Wk_out,
    L,
    T,
    d,
    heads,
    shared,
    mask_b,
    mask_h,
    mask_l,
    mask_t,
    CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    D: tl.constexpr,
):
    """What all groups share: lse, <delta, O>, O, P k and W k of some queries of a head."""
    start = tl.program_id(0) * QUERIES
    n = tl.program_id(1).to(tl.int64)
    wide: tl.constexpr = lse_out.dtype.element_ty
    places = start + tl.arange(0, QUERIES)
    q = _rows(q_in + n * L * d, places, d, L, d, D)
    delta = _rows(delta_in + n * L * d, places, d, L, d, D)
    k_in += n // shared * T * d
    v_in += n // shared * T * d
    head = n // heads * mask_b + n % heads * mask_h
    most = tl.full((QUERIES,), -float("inf"), wide)
    total = tl.zeros((QUERIES,), wide)
    N = tl.zeros((QUERIES, D), wide)
    Pk = tl.zeros((QUERIES, D), wide)
    PZk = tl.zeros((QUERIES, D), wide)
    end = tl.minimum(T, start + QUERIES) if CAUSAL else T
    for begin in range(0, end, KEYS):
        keys = begin + tl.arange(0, KEYS)
        k = _rows(k_in, keys, d, T, d, D)
        v = _rows(v_in, keys, d, T, d, D)
        S = tl.dot(q, tl.trans(k), input_precision=PRECISION, out_dtype=wide)
        S = _visible(S, places[:, None], keys[None, :], L, T, mask_in, head, mask_l, mask_t, CAUSAL)
        Z = tl.dot(delta, tl.trans(v), input_precision=PRECISION, out_dtype=wide)
        new = tl.maximum(most, tl.max(S, 1))
        known = tl.where(new == -float("inf"), 0.0, new)  # a query may see no key
        shrink = tl.exp(most - known)
        P = tl.exp(S - known[:, None])
        total = total * shrink + tl.sum(P, 1)
        N = N * shrink[:, None]
        Pk = Pk * shrink[:, None]
        PZk = PZk * shrink[:, None]
        N += tl.dot(P.to(v.dtype), v, input_precision=PRECISION, out_dtype=wide)
        Pk += tl.dot(P.to(k.dtype), k, input_precision=PRECISION, out_dtype=wide)
        PZk += tl.dot((P * Z).to(k.dtype), k, input_precision=PRECISION, out_dtype=wide)
        most = new
    total = tl.where(total == 0.0, 1.0, total)
    inside = places < L
    N = N / total[:, None]
    Pk = Pk / total[:, None]
    mean = tl.sum(N * delta.to(wide), 1)
    lse = tl.where(most == -float("inf"), 0.0, most) + tl.log(total)
    tl.store(lse_out + n * L + places, lse, mask=inside)
    tl.store(mean_out + n * L + places, mean, mask=inside)
    _put(O_out + n * L * d, N, places, d, L, d, D)
    _put(Pk_out + n * L * d, Pk, places, d, L, d, D)
    _put(Wk_out + n * L * d, PZk / total[:, None] - mean[:, None] * Pk, places, d, L, d, D)


@triton.jit(do_not_specialize=VARYING)  # type: ignore[untyped-decorator]
def _results(  # type: ignore[no-untyped-def]
    q_in,
    k_in,
    v_in,
    mask_in,
    lse_in,
    O_in,
    Q_in,
    K_in,
    V_in,
    O_out,
    S,
    L,
    T,
    d,
    heads,
    shared,
    mask_b,
    mask_h,
    mask_l,
    mask_t,
    Q_s,
    Q_b,
    Q_h,
    Q_l,
    K_s,
    K_b,
    K_h,
    K_t,
    V_s,
    V_b,
    V_h,
    V_t,
    O_s,
    O_b,
    O_h,
    O_l,
    THIRD: tl.constexpr,
    CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    D: tl.constexpr,
):
    """O1 and O2 of some queries of a head along one group."""
    start = tl.program_id(0) * QUERIES
    n = tl.program_id(1).to(tl.int64)
    s = tl.program_id(2).to(tl.int64)
    b = n // heads
    h = n % heads
    wide: tl.constexpr = lse_in.dtype.element_ty
    places = start + tl.arange(0, QUERIES)
    Q_in += s * Q_s + b * Q_b + h * Q_h
    k_in += n // shared * T * d
    v_in += n // shared * T * d
    K_in += s * K_s + b * K_b + h // shared * K_h
    V_in += s * V_s + b * V_b + h // shared * V_h
    head = b * mask_b + h * mask_h
    q = _rows(q_in + n * L * d, places, d, L, d, D)
    q1 = _rows(Q_in, places, Q_l, L, d, D)
    lse = tl.load(lse_in + n * L + places, mask=places < L, other=0.0)
    D1 = tl.zeros((QUERIES,), wide)
    N1 = tl.zeros((QUERIES, D), wide)
    if THIRD:
        q2 = _rows(Q_in + S * Q_s, places, Q_l, L, d, D)
        D2 = tl.zeros((QUERIES,), wide)
        N2 = tl.zeros((QUERIES, D), wide)
    end = tl.minimum(T, start + QUERIES) if CAUSAL else T
    for begin in range(0, end, KEYS):
        keys = begin + tl.arange(0, KEYS)
        k = _rows(k_in, keys, d, T, d, D)
        k1 = _rows(K_in, keys, K_t, T, d, D)
        P = tl.dot(q, tl.trans(k), input_precision=PRECISION, out_dtype=wide)
        P = _visible(P, places[:, None], keys[None, :], L, T, mask_in, head, mask_l, mask_t, CAUSAL)
        P = tl.exp(P - lse[:, None])
        S1 = tl.dot(q1, tl.trans(k), input_precision=PRECISION, out_dtype=wide)
        S1 = tl.dot(q, tl.trans(k1), S1, input_precision=PRECISION, out_dtype=wide)
        PS1 = P * S1
        D1 += tl.sum(PS1, 1)
        v = _rows(v_in, keys, d, T, d, D)
        v1 = _rows(V_in, keys, V_t, T, d, D)
        N1 = tl.dot(PS1.to(v.dtype), v, N1, input_precision=PRECISION, out_dtype=wide)
        N1 = tl.dot(P.to(v.dtype), v1, N1, input_precision=PRECISION, out_dtype=wide)
        if THIRD:
            k2 = _rows(K_in + S * K_s, keys, K_t, T, d, D)
            v2 = _rows(V_in + S * V_s, keys, V_t, T, d, D)
            S2 = 2.0 * tl.dot(q1, tl.trans(k1), input_precision=PRECISION, out_dtype=wide)
            S2 = tl.dot(q2, tl.trans(k), S2, input_precision=PRECISION, out_dtype=wide)
            S2 = tl.dot(q, tl.trans(k2), S2, input_precision=PRECISION, out_dtype=wide)
            PS2 = PS1 * S1 + P * S2
            D2 += tl.sum(PS2, 1)
            N2 = tl.dot(PS2.to(v.dtype), v, N2, input_precision=PRECISION, out_dtype=wide)
            N2 = tl.dot((2.0 * PS1).to(v.dtype), v1, N2, input_precision=PRECISION, out_dtype=wide)
            N2 = tl.dot(P.to(v.dtype), v2, N2, input_precision=PRECISION, out_dtype=wide)
    result = _rows(O_in + n * L * d, places, d, L, d, D)
    O_out += s * O_s + b * O_b + h * O_h
    O1 = N1 - D1[:, None] * result
    _put(O_out, O1, places, O_l, L, d, D)
    if THIRD:
        O2 = N2 - 2.0 * D1[:, None] * O1 - D2[:, None] * result
        _put(O_out + S * O_s, O2, places, O_l, L, d, D)


@triton.jit(do_not_specialize=VARYING)  # type: ignore[untyped-decorator]
def _queries(  # type: ignore[no-untyped-def]
    q_in,
    k_in,
    v_in,
    delta_in,
    mask_in,
    lse_in,
    mean_in,
    Pk_in,
    Wk_in,
    Q_in,
    K_in,
    V_in,
    D1_out,
    f1_out,
    f3_out,
    g_out,
    L,
    T,
    d,
    heads,
    shared,
    mask_b,
    mask_h,
    mask_l,
    mask_t,
    Q_s,
    Q_b,
    Q_h,
    Q_l,
    K_s,
    K_b,
    K_h,
    K_t,
    V_s,
    V_b,
    V_h,
    V_t,
    CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    D: tl.constexpr,
):
    """D1, f1, f3 and the part of g for q, of some queries of a head along one group."""
    start = tl.program_id(0) * QUERIES
    n = tl.program_id(1).to(tl.int64)
    s = tl.program_id(2).to(tl.int64)
    b = n // heads
    h = n % heads
    wide: tl.constexpr = lse_in.dtype.element_ty
    places = start + tl.arange(0, QUERIES)
    inside = places < L
    k_in += n // shared * T * d
    v_in += n // shared * T * d
    K_in += s * K_s + b * K_b + h // shared * K_h
    V_in += s * V_s + b * V_b + h // shared * V_h
    head = b * mask_b + h * mask_h
    q = _rows(q_in + n * L * d, places, d, L, d, D)
    q1 = _rows(Q_in + s * Q_s + b * Q_b + h * Q_h, places, Q_l, L, d, D)
    delta = _rows(delta_in + n * L * d, places, d, L, d, D)
    lse = tl.load(lse_in + n * L + places, mask=inside, other=0.0)
    mean = tl.load(mean_in + n * L + places, mask=inside, other=0.0)
    D1 = tl.zeros((QUERIES,), wide)
    f1 = tl.zeros((QUERIES,), wide)
    g = tl.zeros((QUERIES, D), wide)
    if f3_out is not None:
        E2 = tl.zeros((QUERIES,), wide)
        f2 = tl.zeros((QUERIES,), wide)
        f3 = tl.zeros((QUERIES,), wide)
    end = tl.minimum(T, start + QUERIES) if CAUSAL else T
    for begin in range(0, end, KEYS):
        keys = begin + tl.arange(0, KEYS)
        k = _rows(k_in, keys, d, T, d, D)
        k1 = _rows(K_in, keys, K_t, T, d, D)
        P = tl.dot(q, tl.trans(k), input_precision=PRECISION, out_dtype=wide)
        P = _visible(P, places[:, None], keys[None, :], L, T, mask_in, head, mask_l, mask_t, CAUSAL)
        P = tl.exp(P - lse[:, None])
        S1 = tl.dot(q1, tl.trans(k), input_precision=PRECISION, out_dtype=wide)
        S1 = tl.dot(q, tl.trans(k1), S1, input_precision=PRECISION, out_dtype=wide)
        v = _rows(v_in, keys, d, T, d, D)
        v1 = _rows(V_in, keys, V_t, T, d, D)
        Z = tl.dot(delta, tl.trans(v), input_precision=PRECISION, out_dtype=wide) - mean[:, None]
        Z1 = tl.dot(delta, tl.trans(v1), input_precision=PRECISION, out_dtype=wide)
        PS1 = P * S1
        W1 = PS1 * Z + P * Z1
        D1 += tl.sum(PS1, 1)
        f1 += tl.sum(W1, 1)
        if f3_out is not None:
            R = 2.0 * tl.dot(q1, tl.trans(k1), input_precision=PRECISION, out_dtype=wide)
            PE = PS1 * S1 + P * R
            E2 += tl.sum(PE, 1)
            f2 += tl.sum(PE * Z + 2.0 * PS1 * Z1, 1)
            f3 += tl.sum((PE + 2.0 * P * R) * S1 * Z + 3.0 * PE * Z1, 1)
        g = tl.dot(W1.to(k.dtype), k, g, input_precision=PRECISION, out_dtype=wide)
        g = tl.dot((P * Z).to(k.dtype), k1, g, input_precision=PRECISION, out_dtype=wide)
    row = s * tl.num_programs(1) + n
    tl.store(D1_out + row * L + places, D1, mask=inside)
    tl.store(f1_out + row * L + places, f1, mask=inside)
    if f3_out is not None:
        f2 -= 2.0 * D1 * f1
        f3 -= 3.0 * (D1 * f2 + E2 * f1)
        place = row * tl.num_programs(0) + tl.program_id(0)
        tl.store(f3_out + place, tl.sum(tl.where(inside, f3, 0.0), 0))
    g -= D1[:, None] * _rows(Wk_in + n * L * d, places, d, L, d, D)
    g -= f1[:, None] * _rows(Pk_in + n * L * d, places, d, L, d, D)
    g_out += (s * (tl.num_programs(1) // heads) + b) * L * heads * d + h * d
    _put(g_out, g, places, heads * d, L, d, D)


@triton.jit(do_not_specialize=VARYING)  # type: ignore[untyped-decorator]
def _keys(  # type: ignore[no-untyped-def]
    q_in,
    k_in,
    v_in,
    delta_in,
    mask_in,
    lse_in,
    mean_in,
    D1_in,
    f1_in,
    Q_in,
    K_in,
    V_in,
    gk_out,
    gv_out,
    L,
    T,
    d,
    heads,
    shared,
    mask_b,
    mask_h,
    mask_l,
    mask_t,
    Q_s,
    Q_b,
    Q_h,
    Q_l,
    K_s,
    K_b,
    K_h,
    K_t,
    V_s,
    V_b,
    V_h,
    V_t,
    CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    D: tl.constexpr,
):
    """The parts of g for k and v, of some keys of a head along one group; tiles are transposed."""
    start = tl.program_id(0) * KEYS
    n = tl.program_id(1).to(tl.int64)  # of keys
    s = tl.program_id(2).to(tl.int64)
    of_keys = heads // shared
    b = n // of_keys
    h = n % of_keys
    wide: tl.constexpr = lse_in.dtype.element_ty
    keys = start + tl.arange(0, KEYS)
    k = _rows(k_in + n * T * d, keys, d, T, d, D)
    v = _rows(v_in + n * T * d, keys, d, T, d, D)
    k1 = _rows(K_in + s * K_s + b * K_b + h * K_h, keys, K_t, T, d, D)
    v1 = _rows(V_in + s * V_s + b * V_b + h * V_h, keys, V_t, T, d, D)
    gk = tl.zeros((KEYS, D), wide)
    gv = tl.zeros((KEYS, D), wide)
    first = start // QUERIES * QUERIES if CAUSAL else 0
    for i in range(shared):
        m = n * shared + i  # the head of queries
        hq = h * shared + i
        row = (s * tl.num_programs(1) * shared + m) * L
        head = b * mask_b + hq * mask_h
        for begin in range(first, L, QUERIES):
            places = begin + tl.arange(0, QUERIES)
            inside = places < L
            q = _rows(q_in + m * L * d, places, d, L, d, D)
            delta = _rows(delta_in + m * L * d, places, d, L, d, D)
            q1 = _rows(Q_in + s * Q_s + b * Q_b + hq * Q_h, places, Q_l, L, d, D)
            lse = tl.load(lse_in + m * L + places, mask=inside, other=0.0)
            mean = tl.load(mean_in + m * L + places, mask=inside, other=0.0)
            D1 = tl.load(D1_in + row + places, mask=inside, other=0.0)
            f1 = tl.load(f1_in + row + places, mask=inside, other=0.0)
            P = tl.dot(k, tl.trans(q), input_precision=PRECISION, out_dtype=wide)
            P = _visible(
                P, places[None, :], keys[:, None], L, T, mask_in, head, mask_l, mask_t, CAUSAL
            )
            P = tl.exp(P - lse[None, :])
            c = tl.dot(k, tl.trans(q1), input_precision=PRECISION, out_dtype=wide)
            c = tl.dot(k1, tl.trans(q), c, input_precision=PRECISION, out_dtype=wide)
            c -= D1[None, :]
            Z = tl.dot(v, tl.trans(delta), input_precision=PRECISION, out_dtype=wide)
            Z -= mean[None, :]
            Z1 = tl.dot(v1, tl.trans(delta), input_precision=PRECISION, out_dtype=wide)
            W1 = P * (c * Z + Z1 - f1[None, :])
            gv = tl.dot((P * c).to(v.dtype), delta, gv, input_precision=PRECISION, out_dtype=wide)
            gk = tl.dot(W1.to(k.dtype), q, gk, input_precision=PRECISION, out_dtype=wide)
            gk = tl.dot((P * Z).to(k.dtype), q1, gk, input_precision=PRECISION, out_dtype=wide)
    where = (s * (tl.num_programs(1) // of_keys) + b) * T * of_keys * d + h * d
    _put(gk_out + where, gk, keys, of_keys * d, T, d, D)
    _put(gv_out + where, gv, keys, of_keys * d, T, d, D)


def pass_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    delta: Tensor,
    mask: Tensor | None,
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    out: Tensor,
    S: int,
    causal: bool,
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor | None]:
    """Pass an attention; return g_s for q, k and v, and f3_s, if there are rows of second order.

    Queries, delta and the mask are (B, heads, L, ...), keys and values (B, heads of keys, T, d);
    their derivatives Q, K, V and those of the result have a dimension for S rows of first order,
    and for S of second, before that. The result's are written to ``out``. The parts of g are
    (S, B, L or T, heads, d).
    """
    B, heads, L, d = q.shape
    H, T = k.shape[1:3]
    third = len(out) > S
    q, k, v, delta = (x.contiguous() for x in (q, k, v, delta))
    Q, K, V = (x if x.stride(-1) == 1 else x.contiguous() for x in (Q, K, V))
    queries, keys, warps = TILES.get(q.dtype, (32, 16, 8))
    blocks = triton.cdiv(L, queries)
    lse = torch.empty_like(q[..., 0], dtype=torch.promote_types(q.dtype, torch.float32))
    mean = torch.empty_like(lse)
    result, Pk, Wk = lse.new_empty((3, *q.shape))
    D1, f1 = lse.new_empty((2, S, *lse.shape))
    f3 = lse.new_empty((S, B * heads * blocks)) if third else None
    gq = q.new_empty((S, B, L, heads, d))
    gk, gv = q.new_empty((2, S, B, T, H, d))
    sizes = (L, T, d, heads, heads // H, *((0,) * 4 if mask is None else mask.stride()))
    strides = [n for x in (Q, K, V) for n in x.stride()[:-1]]
    options = {
        "CAUSAL": causal,
        "PRECISION": precision_of(q.dtype),
        "QUERIES": queries,
        "KEYS": keys,
        "D": max(16, triton.next_power_of_2(d)),
        "num_warps": warps,
    }
    inputs = (q, k, v, delta, mask)
    with torch.cuda.device(q.device):
        _at_the_point[(blocks, B * heads)](*(*inputs, lse, mean, result, Pk, Wk, *sizes), **options)
        _results[(blocks, B * heads, S)](
            *(q, k, v, mask, lse, result, Q, K, V, out, S, *sizes, *strides, *out.stride()[:-1]),
            THIRD=third,
            **options,
        )
        _queries[(blocks, B * heads, S)](
            *(*inputs, lse, mean, Pk, Wk, Q, K, V, D1, f1, f3, gq, *sizes, *strides), **options
        )
        _keys[(triton.cdiv(T, keys), B * H, S)](
            *(*inputs, lse, mean, D1, f1, Q, K, V, gk, gv, *sizes, *strides), **options
        )
    return (gq, gk, gv), None if f3 is None else f3.sum(1)
