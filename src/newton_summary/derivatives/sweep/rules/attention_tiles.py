"""Attention tile by tile, by the formulas in ``attention.py``."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from newton_summary.derivatives.sweep.rules import fused_attention
from newton_summary.derivatives.sweep.rules.linear import without_mean
from newton_summary.derivatives.sweep.rules.normalize import pass_softmax
from newton_summary.derivatives.sweep.tape import Groups, Tangent, dots, gram, parts_of, spread

# Bytes of the scores' derivatives that are taken at a time.
AT_A_TIME = {"cpu": 2**21}  # which stay in its cache with what is computed from them
AT_A_TIME_ELSEWHERE = 2**28
FEW = 16  # columns: of a result with fewer, BLAS computes the transpose several times as fast
FEWEST_QUERIES = 16  # with fewer, reading keys and values takes longer than the products


@dataclass(frozen=True)
class Heads:
    """The shape of an attention: B samples, H heads of keys, each for some heads of queries."""

    B: int
    H: int
    shared: int  # heads of queries for one of keys
    L: int  # queries
    T: int  # keys

    @classmethod
    def of(cls, q: Tensor, k: Tensor) -> Heads:
        """Read the shape off queries and keys; with two dimensions there is one head."""
        H = k.shape[-3] if k.dim() > 2 else 1
        shared = q.shape[-3] // H if q.dim() > 2 else 1
        return cls(math.prod(q.shape[:-3]), H, shared, q.shape[-2], k.shape[-2])

    def of_queries(self, rows: Tensor) -> Tensor:
        """Return rows as (rows, B, H, shared, L, features)."""
        return rows.reshape(len(rows), self.B, self.H, self.shared, self.L, rows.shape[-1])

    def of_keys(self, rows: Tensor) -> Tensor:
        """Return rows as (rows, B, H, T, features)."""
        return rows.reshape(len(rows), self.B, self.H, self.T, rows.shape[-1])

    def new_result(self, out: Tensor, rows: int) -> Tensor:
        """Return room for rows of the result, with heads next to features in memory."""
        shape = (rows, self.B, self.L, self.H, self.shared, out.shape[-1])
        return out.new_empty(shape).permute(0, 1, 3, 4, 2, 5)


class Stack:
    """The derivatives of q, k or v, brought to the same groups for some samples and heads."""

    def __init__(self, t: Tangent, groups: Groups, view: Callable[[Tensor], Tensor]):
        """View: to the shape of a stack of queries or of keys."""
        self.t, self.groups, self.rows = t, groups, view(t.rows)

    def some(self, *index: slice) -> Tensor:
        """Return the rows of all groups, those of first order before those of second, if any.

        Of second order the last groups may have none.
        """
        t, place = self.t, (slice(None), *index)
        rows = self.rows[place]
        in_order = t.second == self.groups[: len(t.second)]
        if t.first == self.groups and in_order:
            return rows
        first, second = rows[: len(t.first)], rows[len(t.first) :]
        second = second if in_order else spread(t.second, second, self.groups)
        return torch.cat([spread(t.first, first, self.groups), second])


@dataclass
class Attention:
    """An attention that is passed tile by tile, and the sums of its contributions.

    The derivatives of q, k, v are Q, K, V: rows of first order, then those of second, if any. Of a
    tile, N is the number of samples times heads of keys, R that of queries, S that of groups.
    """

    heads: Heads
    groups: Groups
    order: int
    causal: bool
    factor: float  # of the scores
    q: Tensor
    k: Tensor
    v: Tensor
    Q: Stack | None
    K: Stack | None
    V: Stack | None
    mask: Tensor | None
    delta: Tensor | None
    out: Tensor | None  # where the derivatives of the result go

    def __post_init__(self) -> None:
        """Start the sums."""
        self.wide = torch.promote_types(self.q.dtype, torch.float32)
        self.S = len(self.groups)
        self.Hbar = torch.zeros(self.S, self.S, dtype=self.wide, device=self.q.device)
        self.D3 = torch.zeros(self.S, dtype=self.wide, device=self.q.device)

    def add_Hbar(self, rows: Groups, columns: Groups, entries: Tensor) -> None:
        """Add entries for all groups, as a sweep does."""
        self.Hbar += entries

    def add_D3(self, groups: Groups, entries: Tensor) -> None:
        """Add entries for all groups, as a sweep does."""
        self.D3 += entries

    def add_pairs(self, left: Tensor, right: Tensor) -> None:
        """Add what a product of two factors contributes, given rows of one and adjoints of it."""
        S = self.S
        M = gram(left[:S], right[:S])
        self.Hbar += M + M.T
        for a, b in ((left, right[S:]), (left[S:], right)):
            n = min(S, len(a), len(b))
            if self.order == 3 and n:
                self.D3[:n] += 3 * dots(a[:n], b[:n])

    def run(self) -> None:
        """Pass all tiles, or all of it by kernels."""
        if fused_attention.usable(self):
            fused_attention.run(self)
            return
        queries, heads, samples = tile_size(self)
        for b in parts_of(self.heads.B, samples):
            for h in parts_of(self.heads.H, heads):
                keys = Keys(self, b, h)
                for rows in parts_of(self.heads.L, queries):
                    Tile(self, keys, b, h, rows).run()
                if keys.sums is not None and keys.V is not None:
                    self.add_pairs(keys.sums, keys.V)


def tile_size(a: Attention) -> tuple[int, int, int]:
    """Return how many queries, heads and samples to take at a time."""
    most = AT_A_TIME.get(a.q.device.type, AT_A_TIME_ELSEWHERE)
    rows = a.S * (2 if a.order == 3 else 1) * a.heads.shared * a.heads.T
    room = max(1, most // (rows * a.wide.itemsize))  # queries of one head
    L, H = a.heads.L, a.heads.H
    masked = a.causal or (a.mask is not None and not a.q.is_cuda)
    longest = max(4 * FEWEST_QUERIES, -(-L // 8)) if masked else L  # to skip what is masked
    queries = min(L, longest, max(room, FEWEST_QUERIES))
    heads = max(1, min(H, room // queries))
    return queries, heads, max(1, min(a.heads.B, room // (queries * H)))


def stacked(x: Tensor, rows: int) -> Tensor:
    """Return (N, ...) as (rows * N, ...), the same for every row; of one head without a copy."""
    return x.expand(rows, *x.shape[1:]) if len(x) == 1 else x.expand(rows, *x.shape).flatten(0, 1)


def add_product(out: Tensor, a: Tensor, b: Tensor, alpha: float = 1) -> None:
    """Add ``alpha a @ b`` to stacked matrices."""
    if out.is_cuda or out.shape[-1] >= FEW:
        out.baddbmm_(a, b, alpha=alpha)
    else:
        out.add_(torch.bmm(b.mT, a.mT).mT, alpha=alpha)


class Keys:
    """Keys and values of some samples and heads, and what their queries contribute to them."""

    def __init__(self, a: Attention, b: slice, h: slice):
        """Take some samples and heads: (N, T, features), and (rows, N, T, features)."""
        self.k, self.v = a.k[0, b, h].flatten(0, 1), a.v[0, b, h].flatten(0, 1)
        self.V = None if a.V is None else a.V.some(b, h).flatten(1, 2)
        # What shifts all keys alike, such as their bias, changes no weight. Without the mean it
        # has no derivatives from here on; else it would have some, made of rounding.
        self.K = None
        if a.K is not None:
            K = a.K.some(b, h)
            self.K = without_mean(K, -2).to(K.dtype).flatten(1, 2)
        self.sums: Tensor | None = None  # [P1, P2]^T delta, the adjoints of v1
        if self.V is not None and a.delta is not None:
            rows = (2 if a.order == 3 else 1) * a.S
            self.sums = self.V.new_zeros((rows, *self.V.shape[1:]))


class Tile:
    """Some queries of some heads, and the keys that they may attend to."""

    def __init__(self, a: Attention, keys: Keys, b: slice, h: slice, rows: slice):
        """Take them."""
        self.a, self.keys, self.b, self.h, self.rows = a, keys, b, h, rows
        self.take(slice(0, min(a.heads.T, rows.stop) if a.causal else a.heads.T))
        self.q = self.some(a.q)[0] * a.factor  # (N, R, d)
        self.Q = None  # (rows, N, R, d)
        if a.Q is not None:
            Q = a.Q.some(b, h, slice(None), rows)
            self.Q = Q.flatten(3, 4).flatten(1, 2) * a.factor
        self.N, self.R = self.q.shape[:2]

    def take(self, span: slice) -> None:
        """Take some of the keys."""
        keys, self.span, self.T = self.keys, span, span.stop - span.start
        self.k, self.v = keys.k[:, span], keys.v[:, span]
        self.K, self.V = (None if x is None else x[:, :, span] for x in (keys.K, keys.V))

    def some(self, x: Tensor) -> Tensor:
        """Return the queries of the tile as (rows, N, R, features)."""
        return x[:, self.b, self.h, :, self.rows].flatten(3, 4).flatten(1, 2)

    def run(self) -> None:
        """Add the contributions, and write the derivatives of the result."""
        a = self.a
        P = self.weights()
        if a.mask is not None and not P.is_cuda:  # there, asking which takes longer
            seen = P.flatten(0, 1).any(0).nonzero()
            span = slice(int(seen[0]), int(seen[-1]) + 1) if len(seen) else slice(0, 1)
            P = P[..., span]
            self.take(span)
        delta = W = None
        if a.delta is not None:
            delta = self.some(a.delta)[0]  # (N, R, features)
            Z = torch.bmm(delta, self.v.mT).to(a.wide)
            W = Z.sub_((Z * P).sum(-1, keepdim=True)).mul_(P)
            if self.Q is not None and self.K is not None:
                adjoints = stacked(W.to(self.q.dtype), len(self.K))
                WK = self.q.new_zeros((len(adjoints), *self.q.shape[1:]))
                add_product(WK, adjoints, self.K.flatten(0, 1))
                a.add_pairs(self.Q, WK.view(-1, *self.q.shape))
        scores = self.scores()
        moved = None  # P1 and P2, (rows * N, R, T)
        if scores is not None:
            wanted = a.out is not None or self.keys.sums is not None
            t = pass_softmax(a, wanted, scores, P, W, -1, log=False, overwrite=True)
            moved = None if t is None else t.rows.to(self.q.dtype).flatten(0, 1)
        if moved is not None and delta is not None and self.keys.sums is not None:
            sums = self.keys.sums[:, :, self.span].flatten(0, 1)  # a view
            add_product(sums, moved.mT, stacked(delta, len(moved) // self.N))
        if a.out is not None:
            self.write(a.out, P.to(self.q.dtype), moved)

    def weights(self) -> Tensor:
        """Return P, (N, R, T); zeros for a query that may attend to nothing."""
        a = self.a
        scores = torch.bmm(self.q, self.k.mT).to(a.wide).view(self.N, a.heads.shared, -1, self.T)
        if a.causal:
            places = torch.arange(self.rows.stop, device=scores.device)
            scores.masked_fill_(places[: self.T] > places[self.rows, None], -math.inf)
        if a.mask is not None:
            mask = self.some(a.mask)[0].view_as(scores)
            if mask.dtype == torch.bool:
                scores.masked_fill_(~mask, -math.inf)
            else:
                scores += mask
        P = torch.softmax(scores, -1)
        return (P if a.mask is None else P.nan_to_num_(0.0)).view(self.N, self.R, self.T)

    def scores(self) -> Tangent | None:
        """Return the derivatives of the scores."""
        a, N, Q, K = self.a, self.N, self.Q, self.K
        if Q is None and K is None:
            return None
        cross = a.order == 3 and Q is not None and K is not None
        most = max(len(x) for x in (Q, K) if x is not None)
        X = self.q.new_empty(((2 * a.S if cross else most) * N, self.R, self.T))
        known = 0 if Q is None else len(Q) * N
        X[known:].zero_()
        if Q is not None:
            torch.bmm(Q.flatten(0, 1), stacked(self.k.mT, len(Q)), out=X[:known])
        if K is not None:
            X[: len(K) * N].baddbmm_(stacked(self.q, len(K)), K.flatten(0, 1).mT)
        if Q is not None and K is not None and cross:
            first = slice(0, a.S)
            X[a.S * N :].baddbmm_(Q[first].flatten(0, 1), K[first].flatten(0, 1).mT, alpha=2)
        rows = X.view(-1, N, self.R, self.T).to(a.wide)
        return Tangent(a.groups, a.groups[: len(rows) - a.S], rows)

    def write(self, out: Tensor, P: Tensor, moved: Tensor | None) -> None:
        """Write O1 and O2."""
        a, k, features = self.a, self.a.S * self.N, self.v.shape[-1]
        out = out[:, self.b, self.h, :, self.rows]
        total = P.new_zeros((len(out) * self.N, self.R, features))
        if moved is not None:
            add_product(total, moved, stacked(self.v, len(out)))
            if a.order == 3 and self.V is not None:
                add_product(total[k:], moved[:k], self.V[: a.S].flatten(0, 1), alpha=2)
        if self.V is not None:
            rows = total[: len(self.V) * self.N]
            add_product(rows, stacked(P, len(self.V)), self.V.flatten(0, 1))
        out.copy_(total.view(out.shape))
