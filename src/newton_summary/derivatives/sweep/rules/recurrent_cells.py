"""The cells of LSTM and GRU layers: their steps, their adjoints, and derivatives through them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from newton_summary.derivatives.sweep.rules.elementwise import Three, sigmoid, tanh
from newton_summary.derivatives.sweep.rules.products import times_each, write_product
from newton_summary.derivatives.sweep.tape import Groups, Tangent, gram, stretches

State = tuple[Tensor, ...]  # (h,), or (h, c) of an LSTM
# Among (c, i, f, g, o, c') of an LSTM: what is multiplied, and whose square with what.
PAIRS = ((0, 2), (1, 3), (4, 5))
SQUARED = ((1, 3), (2, 0), (3, 1), (4, 5), (5, 4))
STEPS = 8  # of an LSTM, for which what does not depend on the groups is computed at a time


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
            self.add(x1 * (delta * f2), x)
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
            self.add(A[:k] * delta, B, 2)  # symmetric once all are added up
            if self.third:
                self.D3 += 3 * gram(B[:k] * delta, A[k:]).diagonal()
        return y

    def add(self, work: Tensor, rows: Tensor, count: int = 1) -> None:
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


class Gates:
    """The rows of ``W v + b`` in each step, for v the input or the state.

    Args:
        values: v in all steps, (T, B, features).
        w: The weight.
        W: Its tangent.
        b: That of the bias.
        first: All groups.
        third: Whether the order is 3.
        v: The tangent of the input; that of the state is found step by step.
    """

    def __init__(
        self,
        values: Tensor,
        w: Tensor,
        W: Tangent | None,
        b: Tangent | None,
        first: Groups,
        third: bool,
        v: Tangent | None = None,
    ):
        self.w, self.k, self.weights = w, len(first), w if W is None else W.rows
        # Where rows are added in each step, and which: (rows, T or 1, B or 1, n H).
        self.added: list[tuple[slice, Tensor]] = []
        if W is not None:
            product = times_each(values, W.rows.mT)
            self.added += [(target, product[source]) for target, source in runs_of(W, first)]
        if b is not None:
            rows = b.rows[:, None, None]
            self.added += [(target, rows[source]) for target, source in runs_of(b, first)]
        moving = W.first if W is not None and third else ()
        self.own = [(first.index(s), j) for j, s in enumerate(moving)]
        # Where the rows of the input belong, and which.
        self.moving = [] if v is None else [(to, v.rows[which]) for to, which in runs_of(v, first)]

    def add_to(self, rows: Tensor, t: int, state: Tensor | None = None) -> Tensor:
        """Add the rows in step t; of the state, given its rows, write them."""
        moving = [(target, x[:, t]) for target, x in self.moving]
        moving = moving if state is None else [(slice(0, len(rows)), state)]
        for target, v in moving:
            out = rows[target].flatten(0, 1)
            write_product(out, v.reshape(len(out), -1), self.w, add=state is None)
        for target, v in moving:
            for i, j in self.own:  # 2 W1 v1
                if target.start <= i < target.stop:
                    rows[self.k + i].addmm_(v[i - target.start], self.weights[j].T, alpha=2)
        for target, more in self.added:
            rows[target] += more[:, t] if more.shape[1] > 1 else more[:, 0]
        return rows


def runs_of(t: Tangent, first: Groups) -> list[tuple[slice, slice]]:
    """Return where the rows of a tangent belong, as pairs of slices (target, source).

    >>> runs_of(Tangent((3, 5), (5,), torch.zeros(3)), (1, 3, 5))
    [(slice(1, 3, None), slice(0, 2, None)), (slice(5, 6, None), slice(2, 3, None))]
    """
    mine, among = ((*one, *(~s for s in two)) for one, two in ((t.first, t.second), (first, first)))
    return stretches(mine, among)  # ~s: the second derivatives of group s


class Run:
    """What happened in all steps of a recurrence. Each array has the steps in its first dimension.

    Args:
        gates: Those of the input, (T, B, n H).
        w: Weight of those of the state, (n H, H).
        b: Their bias, (n H).
        start: The first state.
        reverse: Whether the last step comes first.
    """

    values: Tensor  # of the gates

    y: Tensor  # h after each step
    results: State  # copies of y and of the last c: the loss may write to them
    gates_adjoint: Tensor  # of the gates of the input
    start_adjoints: State

    def __init__(self, gates: Tensor, w: Tensor, b: Tensor | None, start: State, reverse: bool):
        self.gates, self.w, self.b, self.start, self.reverse = gates, w, b, start, reverse
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

    def derivatives(
        self, jets: Jets, rows: list[Tensor], of_input: Gates, of_state: Gates
    ) -> Iterator[list[Tensor]]:
        """Yield the rows of the state after each step."""
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
        self.c_before = self.before(self.c, self.start[1])

    def slopes(self, steps: slice) -> tuple[Three, Tensor, Tensor]:
        """Return the derivatives of the gates, what these are multiplied with, and tanh(c')."""
        i, _, g, _ = self.values[steps].chunk(4, -1)
        tau = torch.tanh(self.c[steps])
        others = torch.cat((g, self.c_before[steps], i, tau), -1)
        return slopes_of(self.values[steps], 4), others, tau

    def backward(self, *deltas: Tensor | None) -> None:
        """Go back through the steps."""
        dy, last = deltas
        _, f, _, o = self.values.chunk(4, -1)
        (slopes, _, _), others, tau = self.slopes(slice(None))
        slopes, d_tau = slopes.mul_(others), o * (1 - tau * tau)
        self.dh, self.dc = torch.empty_like(self.y), torch.empty_like(self.c)
        self.adjoint = torch.empty_like(self.values)
        h_grad = torch.zeros_like(self.start[0])
        c_grad = torch.zeros_like(self.start[1]) if last is None else last
        for t in reversed(self.order):
            dh = self.dh[t].copy_(h_grad if dy is None else dy[t] + h_grad)
            dc = torch.mul(dh, d_tau[t], out=self.dc[t]).add_(c_grad)
            da = torch.mul(torch.cat((dc, dc, dc, dh), -1), slopes[t], out=self.adjoint[t])
            h_grad, c_grad = da @ self.w, dc * f[t]
        self.start_adjoints = h_grad, c_grad
        self.gates_adjoint = self.adjoint

    def derivatives(
        self, jets: Jets, rows: list[Tensor], of_input: Gates, of_state: Gates
    ) -> Iterator[list[Tensor]]:
        """Yield the rows of (h, c) after each step.

        The rows X of (c, i, f, g, o, c') lie side by side: c'1 and h1 are linear in X1, and so are
        c'2 and h2 in X2, plus squares of X1 and products c f, i g and o c'. Weighed with the
        adjoints of c' and h, these and what is cubic in X1 are the contributions of a step.
        """
        third, k, H = jets.third, jets.k, self.c.shape[-1]
        h, c = rows
        X = h.new_empty((*h.shape[:2], 6 * H))
        x1, Q = X[:k], h.new_empty((k, *X.shape[1:]))
        Xc, Xi, Xf, Xg, Xo, after = X.chunk(6, -1)
        one = x1.chunk(6, -1)
        _, Qi, Qf, Qg, Qo, Qa = Q.chunk(6, -1)
        f = self.values.chunk(4, -1)[1]
        for n, t in enumerate(self.order):
            if n % STEPS == 0:
                last = self.order[min(n + STEPS, len(self.order)) - 1]
                begin = min(t, last)
                weights = self.weights(slice(begin, max(t, last) + 1), third)
            linear, squares, pairs, *adjoints = (w[t - begin] for w in weights)
            of_input.add_to(of_state.add_to(X[..., H : 5 * H], t, h), t)
            Xc.copy_(c)
            li, lf, lg, lo, la = linear.chunk(5, -1)
            torch.mul(Xc, f[t], out=after).addcmul_(Xi, li).addcmul_(Xf, lf).addcmul_(Xg, lg)
            h = torch.mul(Xo, lo)
            if third:
                si, sf, sg, so, sa = squares.chunk(5, -1)
                pf, pi, po = pairs.chunk(3, -1)
                torch.mul(x1[..., : 5 * H], x1[..., : 5 * H], out=Q[..., : 5 * H])
                after2 = after[k:].addcmul_(Qi, si).addcmul_(Qf, sf).addcmul_(Qg, sg)
                after2.addcmul_(Xc[:k] * Xf[:k], pf, value=2).addcmul_(Xi[:k] * Xg[:k], pi, value=2)
                torch.mul(after[:k], after[:k], out=Qa)
                h2 = h[k:].addcmul_(Qo, so).addcmul_(Qa, sa)
                h2.addcmul_(Xo[:k] * after[:k], po, value=2)
            h.addcmul_(after, la)
            if adjoints:
                D2, P2, *more = adjoints
                work = x1 * D2
                parts = work.chunk(6, -1)
                for (a, b), weight in zip(PAIRS, P2.chunk(3, -1), strict=True):
                    parts[a].addcmul_(one[b], weight)
                    parts[b].addcmul_(one[a], weight)
                jets.add(work, X)
                if third:
                    D3, P3 = more
                    torch.mul(x1[..., H:], D3, out=work[..., H:])
                    for (a, b), weight in zip(SQUARED, P3.chunk(5, -1), strict=True):
                        parts[a].addcmul_(one[b], weight, value=3)
                    jets.D3 += work[..., H:].mul_(Q[..., H:]).sum((1, 2))
            c = after
            yield [h, c]

    def weights(self, steps: slice, third: bool) -> list[Tensor]:
        """Return what the rows are multiplied with in these steps, (steps, B, some H) each.

        Rows of (i, f, g, o, c') and their squares, and pairs c f, i g, o c'. Where there are
        adjoints, squares, also of c, and pairs times these, and for order 3 cubes, and squares
        times another.
        """
        o = self.values[steps].chunk(4, -1)[3]
        (s1, s2, s3), others, tau = self.slopes(steps)
        (i1, f1, g1, o1), (i2, f2, g2, o2) = s1.chunk(4, -1), s2.chunk(4, -1)
        t1, t2, t3 = tanh(tau, tau)
        linear = torch.cat((s1 * others, o * t1), -1)
        squares = torch.cat((s2 * others, o * t2), -1)
        pairs = torch.cat((f1, i1 * g1, o1 * t1), -1)
        if self.adjoint is None:
            return [linear, squares, pairs]
        dh, dc, H = self.dh[steps], self.dc[steps], self.c.shape[-1]
        delta = torch.cat((dc, dc, dc, dh, dh), -1)
        results = [linear, squares, pairs]
        results += [F.pad(delta * squares, (H, 0)), delta[..., H : 4 * H] * pairs]
        if third:
            cubes = torch.cat((s3 * others, o * t3), -1)
            both = torch.cat((i2 * g1, f2, g2 * i1, o2 * t1, t2 * o1), -1)
            results += [cubes.mul_(delta), both.mul_(delta)]
        return results


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

    def derivatives(
        self, jets: Jets, rows: list[Tensor], of_input: Gates, of_state: Gates
    ) -> Iterator[list[Tensor]]:
        """Yield the rows of h after each step."""
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
            a = of_state.add_to(h.new_empty((*h.shape[:2], 3 * H)), t, h)
            x = of_input.add_to(torch.zeros_like(a), t)
            gates = a[..., : 2 * H] + x[..., : 2 * H]
            pr, pz = jets.curve(gates, [s[t, :, : 2 * H] for s in slopes], dr).chunk(2, -1)
            q = jets.product(r, pr, self.h_n[t], a[..., 2 * H :], dq).add_(x[..., 2 * H :])
            pn = jets.curve(q, [s[t, :, 2 * H :] for s in slopes], dn)
            h = jets.product(z, pz, h_before[t] - n, h - pn, dh).add_(pn)
            yield [h]
