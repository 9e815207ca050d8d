"""The cells of LSTM and GRU layers: their steps, their adjoints, and derivatives through them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from newton_summary.derivatives.sweep.rules.elementwise import Three, sigmoid, tanh
from newton_summary.derivatives.sweep.tape import Groups, Tangent, gram

State = tuple[Tensor, ...]  # (h,), or (h, c) of an LSTM


class Jets:
    """Rows of first and second derivatives, and what operations on them contribute.

    Args:
        k: Number of groups. Rows are those of y1, and behind them those of y2 for order 3.
        third: Whether the order is 3.
        like: A tensor on the device.
    """

    def __init__(self, k: int, third: bool, like: Tensor):
        self.k, self.third = k, third
        self.Hbar = like.new_zeros((k, k), dtype=torch.float64)
        self.D3 = like.new_zeros(k, dtype=torch.float64)

    def curve(self, x: Tensor, f: Sequence[Tensor], delta: Tensor | None) -> Tensor:
        """Pass a function of one number with the derivatives f = (f', f'', f''')."""
        k, (f1, f2, f3) = self.k, f
        y, x1 = x * f1, x[:k]
        if delta is not None:
            self._contribute(x1 * (delta * f2), x)
        if self.third:
            squares = x1 * x1
            y[k:].addcmul_(squares, f2)
            if delta is not None:
                self.D3 += gram(squares, x1 * (delta * f3)).diagonal()
        return y

    def product(self, a: Tensor, A: Tensor, b: Tensor, B: Tensor, delta: Tensor | None) -> Tensor:
        """Pass ``a b``, with rows A of a and rows B of b."""
        k = self.k
        y = (A * b).addcmul_(B, a)
        if self.third:
            y[k:].addcmul_(A[:k], B[:k], value=2)
        if delta is not None:
            self._contribute(A[:k] * delta, B, 2)  # symmetric once all are added up
            if self.third:
                self.D3 += 3 * gram(B[:k] * delta, A[k:]).diagonal()
        return y

    def _contribute(self, work: Tensor, rows: Tensor, count: int = 1) -> None:
        """Add inner products of k weighted rows with those of y1, and of y2, in one product.

        Of those with y2 only the k of the same group count, but the others cost less than a pass
        over the rows.
        """
        products = gram(work, rows)
        self.Hbar += count * products[:, : self.k]
        if self.third:
            self.D3 += 3 * products[:, self.k :].diagonal()


def slopes_of(gates: Tensor, n: int) -> Three:
    """Return the derivatives of n gates side by side, of which the third is a tanh."""
    results = sigmoid(gates, gates)
    part = slice(2 * gates.shape[-1] // n, 3 * gates.shape[-1] // n)
    third = gates[..., part]
    for all_gates, one in zip(results, tanh(third, third), strict=True):
        all_gates[..., part] = one
    return results


class Walk:
    """The rows of the gates in each step."""

    def __init__(self, run: Run, first: Groups, third: bool, tangents: list[Tangent | None]):
        """Lay out what the input and the parameters add to the rows of the gates."""
        x, w, b = tangents
        self.run, self.k = run, len(first)
        self.weights = run.w if w is None else w.rows
        self.rows = len(first) * (2 if third else 1)
        self.x = None if x is None else (x.rows, runs_of(x, first))
        # Where rows are added in each step, and which: (rows, T or 1, B or 1, n H).
        self.added: list[tuple[slice, Tensor]] = []
        h = run.before(run.y, run.start[0])
        if w is not None:
            product = (h @ w.rows.mT[:, None]) if len(w.rows) > 1 else (h @ w.rows[0].mT)[None]
            self.added += [(target, product[source]) for target, source in runs_of(w, first)]
        if b is not None:
            rows = b.rows[:, None, None]
            self.added += [(target, rows[source]) for target, source in runs_of(b, first)]
        moving = w.first if w is not None and third else ()
        self.own = [(first.index(s), j) for j, s in enumerate(moving)]

    def recurrent(self, t: int, h: Tensor) -> Tensor:
        """Return the rows of ``W h + b`` in step t, given those of h."""
        w = self.run.w
        rows = torch.mm(h.reshape(-1, h.shape[-1]), w.T).reshape(*h.shape[:2], len(w))
        for target, more in self.added:
            rows[target] += more[:, t] if more.shape[1] > 1 else more[:, 0]
        for i, j in self.own:  # 2 W1 h1
            rows[self.k + i].addmm_(h[i], self.weights[j].T, alpha=2)
        return rows

    def add_input(self, rows: Tensor, t: int, part: slice = slice(None)) -> Tensor:
        """Add the rows of the input's gates in step t, or of a part of these."""
        if self.x is not None:
            x, places = self.x
            for target, source in places:
                rows[target] += x[source, t, :, part]
        return rows


def runs_of(t: Tangent, first: Groups) -> list[tuple[slice, slice]]:
    """Return where the rows of a tangent belong, as pairs of slices (target, source).

    >>> runs_of(Tangent((3, 5), (5,), torch.zeros(3)), (1, 3, 5))
    [(slice(1, 3, None), slice(0, 2, None)), (slice(5, 6, None), slice(2, 3, None))]
    """
    k = len(first)
    places = [first.index(s) for s in t.first] + [k + first.index(s) for s in t.second]
    breaks = [j for j in range(1, len(places)) if places[j] != places[j - 1] + 1]
    pieces = pairwise([0, *breaks, len(places)])
    return [(slice(places[a], places[b - 1] + 1), slice(a, b)) for a, b in pieces]


class Run:
    """What happened in all steps of a recurrence. Each array has the steps in its first dimension.

    Args:
        gates: Gates of the input, (T, B, n H).
        w, b: Weight (n H, H) and bias (n H) of the state.
        start: The first state.
        reverse: Whether the last step comes first.
    """

    y: Tensor  # h after each step
    results: State  # copies of y and of the last c: the loss may write to them
    gates_adjoint: Tensor  # of the gates of the input
    start_adjoints: State

    def __init__(self, gates: Tensor, w: Tensor, b: Tensor | None, start: State, reverse: bool):
        self.gates, self.w, self.b = gates.contiguous(), w, b
        self.start, self.reverse = start, reverse
        self.order = range(len(gates))[::-1] if reverse else range(len(gates))
        self.adjoint: Tensor | None = None  # of n gates of the state in all steps, once known
        self.deltas: Sequence[Tensor | None] = ()  # the adjoints of the results that it is for
        self.forward()

    def before(self, states: Tensor, start: Tensor) -> Tensor:
        """Return the state that each step begins with, given those that they end with."""
        if self.reverse:
            return torch.cat([states[1:], start[None]])
        return torch.cat([start[None], states[:-1]])

    def forward(self) -> None:
        """Go through the steps."""
        raise NotImplementedError

    def go_back(self, deltas: Sequence[Tensor | None]) -> None:
        """Find the adjoints in all steps, given those of the results; nothing if they are known."""
        if all(delta is None for delta in deltas):
            self.adjoint = None
        elif len(deltas) != len(self.deltas) or not all(map(_same, deltas, self.deltas)):
            self.backward(*deltas)
        self.deltas = deltas

    def backward(self, *deltas: Tensor | None) -> None:
        """Go back through the steps."""
        raise NotImplementedError

    def derivatives(self, jets: Jets, rows: list[Tensor], walk: Walk) -> Iterator[list[Tensor]]:
        """Give the rows of the state after each step."""
        raise NotImplementedError


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether two tensors, both alive, are the same memory."""
    if a is None or b is None:
        return a is b
    return a.data_ptr() == b.data_ptr() and a.stride() == b.stride()


class LstmRun(Run):
    """Gates i, f, g, o; c' = f c + i g and h' = o tanh(c')."""

    def forward(self) -> None:
        """Go through the steps."""
        h, c = self.start
        T, B, H = *self.gates.shape[:2], h.shape[-1]
        self.values = torch.empty_like(self.gates)
        self.y, self.c = (self.gates.new_empty(T, B, H) for _ in range(2))
        for t in self.order:
            a = F.linear(h, self.w, self.b) + self.gates[t]
            v = torch.sigmoid(a, out=self.values[t])
            i, f, g, o = v.chunk(4, -1)
            torch.tanh(a[:, 2 * H : 3 * H], out=g)
            c = torch.mul(f, c, out=self.c[t]).addcmul_(i, g)
            h = torch.mul(o, torch.tanh(c), out=self.y[t])
        self.results = self.y.clone(), c.clone()

    def backward(self, *deltas: Tensor | None) -> None:
        """Go back through the steps."""
        dy, last = deltas
        i, f, g, o = self.values.chunk(4, -1)
        c_before, tau = self.before(self.c, self.start[1]), torch.tanh(self.c)
        slopes = slopes_of(self.values, 4)[0]
        d_tau = o * (1 - tau * tau)
        self.dh, self.dc = torch.empty_like(self.y), torch.empty_like(self.c)
        self.d_values, self.adjoint = torch.empty_like(self.values), torch.empty_like(self.values)
        h_grad = torch.zeros_like(self.start[0])
        c_grad = torch.zeros_like(self.start[1]) if last is None else last
        for t in reversed(self.order):
            dh = self.dh[t].copy_(h_grad if dy is None else dy[t] + h_grad)
            dc = torch.mul(dh, d_tau[t], out=self.dc[t]).add_(c_grad)
            parts = (dc * g[t], dc * c_before[t], dc * i[t], dh * tau[t])
            torch.cat(parts, -1, out=self.d_values[t])
            da = torch.mul(self.d_values[t], slopes[t], out=self.adjoint[t])
            h_grad, c_grad = da @ self.w, dc * f[t]
        self.start_adjoints = h_grad, c_grad
        self.gates_adjoint = self.adjoint

    def derivatives(self, jets: Jets, rows: list[Tensor], walk: Walk) -> Iterator[list[Tensor]]:
        """Give the rows of (h, c) after each step."""
        values = slopes_of(self.values, 4)
        tau = torch.tanh(self.c)
        tau_slopes = tanh(tau, tau)
        c_before = self.before(self.c, self.start[1])
        known = self.adjoint is not None
        d_tau = self.dh * self.values.chunk(4, -1)[3] if known else None
        h, c = rows
        for t in self.order:
            i, f, g, o = self.values[t].chunk(4, -1)
            dh, dc = (self.dh[t], self.dc[t]) if known else (None, None)
            a = walk.add_input(walk.recurrent(t, h), t)
            d_values = self.d_values[t] if known else None
            pi, pf, pg, po = jets.curve(a, [s[t] for s in values], d_values).chunk(4, -1)
            c = jets.product(f, pf, c_before[t], c, dc).add_(jets.product(i, pi, g, pg, dc))
            curved = jets.curve(c, [s[t] for s in tau_slopes], None if d_tau is None else d_tau[t])
            h = jets.product(o, po, tau[t], curved, dh)
            yield [h, c]


class GruRun(Run):
    """Gates r, z and n = tanh(x_n + r h_n); h' = n + z (h - n)."""

    def forward(self) -> None:
        """Go through the steps."""
        (h,) = self.start
        H = h.shape[-1]
        self.values = torch.empty_like(self.gates)
        self.y, self.h_n = (self.gates.new_empty(*self.gates.shape[:2], H) for _ in range(2))
        for t in self.order:
            a = F.linear(h, self.w, self.b)
            self.h_n[t] = a[:, 2 * H :]
            r, z, n = self.values[t].chunk(3, -1)
            torch.sigmoid(a[:, : 2 * H] + self.gates[t, :, : 2 * H], out=self.values[t, :, : 2 * H])
            torch.tanh(self.gates[t, :, 2 * H :] + r * self.h_n[t], out=n)
            h = torch.lerp(n, h, z, out=self.y[t])
        self.results = (self.y.clone(),)

    def backward(self, *deltas: Tensor | None) -> None:
        """Go back through the steps."""
        (dy,) = deltas
        r, z, n = self.values.chunk(3, -1)
        gap = self.before(self.y, self.start[0]) - n
        slopes = slopes_of(self.values, 3)[0]
        self.dh, self.d_values = torch.empty_like(self.y), torch.empty_like(self.values)
        self.adjoint, self.gates_adjoint = (torch.empty_like(self.values) for _ in range(2))
        H = self.y.shape[-1]
        h_grad = torch.zeros_like(self.start[0])
        for t in reversed(self.order):
            dh = self.dh[t].copy_(h_grad if dy is None else dy[t] + h_grad)
            dn = dh * (1 - z[t])
            d_gate = dn * slopes[t, :, 2 * H :]
            torch.cat((d_gate * self.h_n[t], dh * gap[t], dn), -1, out=self.d_values[t])
            da = torch.mul(self.d_values[t], slopes[t], out=self.gates_adjoint[t])
            torch.cat((da[:, : 2 * H], d_gate * r[t]), -1, out=self.adjoint[t])
            h_grad = dh * z[t] + self.adjoint[t] @ self.w
        self.start_adjoints = (h_grad,)

    def derivatives(self, jets: Jets, rows: list[Tensor], walk: Walk) -> Iterator[list[Tensor]]:
        """Give the rows of h after each step."""
        H = self.y.shape[-1]
        slopes = slopes_of(self.values, 3)
        h_before = self.before(self.y, self.start[0])
        (h,) = rows
        for t in self.order:
            r, z, n = self.values[t].chunk(3, -1)
            dh = dr = dn = dq = None
            if self.adjoint is not None:
                dh, dq = self.dh[t], self.gates_adjoint[t, :, 2 * H :]
                dr, dn = self.d_values[t, :, : 2 * H], self.d_values[t, :, 2 * H :]
            a = walk.recurrent(t, h)
            gates = walk.add_input(a[..., : 2 * H], t, slice(0, 2 * H))
            pr, pz = jets.curve(gates, [s[t, :, : 2 * H] for s in slopes], dr).chunk(2, -1)
            q = jets.product(r, pr, self.h_n[t], a[..., 2 * H :], dq)
            q = walk.add_input(q, t, slice(2 * H, 3 * H))
            pn = jets.curve(q, [s[t, :, 2 * H :] for s in slopes], dn)
            h = jets.product(z, pz, h_before[t] - n, h - pn, dh).add_(pn)
            yield [h]
