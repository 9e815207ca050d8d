"""Cost of a summary on models whose operations are out of the ordinary, in gradients on a CPU.

    OMP_NUM_THREADS=1 python benchmarks/operations.py
    OMP_NUM_THREADS=1 python benchmarks/operations.py lstm gru --order 2

Process time on one thread, the best of some runs, of gradient and summary by turns. The floor is
(S + 4) / 3 gradients for order 3 and (S / 2 + 4) / 3 for order 2: what the arithmetic of a sweep
takes.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import newton_summary as ns

Case = tuple[nn.Module, Callable[[nn.Module, Any], Tensor], Any]


class Recurrent(nn.Module):
    def __init__(self, kind: str, layers: int = 2, features: int = 64, hidden: int = 128):
        super().__init__()
        self.layers = getattr(nn, kind)(features, hidden, layers, batch_first=True)
        self.head = nn.Linear(hidden, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x)[0])


def sequence_loss(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x)[:, -1], y)


def recurrent(kind: str) -> Case:
    batch = torch.randn(32, 40, 64), torch.randint(10, (32,))
    return Recurrent(kind), sequence_loss, batch


class Cells(nn.Module):
    def __init__(self, kind: str):
        super().__init__()
        self.cell = getattr(nn, kind)(64, 128)
        self.head = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for step in x.unbind(1):
            state = self.cell(step, state)
        hidden = state[0] if isinstance(state, tuple) else state
        return self.head(hidden)[:, None]


def cells(kind: str) -> Case:
    batch = torch.randn(64, 30, 64), torch.randint(10, (64,))
    return Cells(kind), sequence_loss, batch


def ctc() -> Case:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        logs = model(x).log_softmax(-1).transpose(0, 1)
        lengths = [torch.full((len(x),), n) for n in (len(logs), y.shape[1])]
        return F.ctc_loss(logs, y, *lengths)

    batch = torch.randn(16, 60, 64), torch.randint(1, 10, (16, 12))
    return Recurrent("GRU", 1), loss, batch


class Experts(nn.Module):
    """A mixture of experts by grouped products, as transformers' default."""

    def __init__(self, features: int = 128, hidden: int = 256, experts: int = 8):
        super().__init__()
        self.up = nn.Linear(32, features)
        self.router = nn.Linear(features, experts)
        self.w1 = nn.Parameter(0.1 * torch.randn(experts, features, hidden))
        self.w2 = nn.Parameter(0.1 * torch.randn(experts, hidden, features))
        self.head = nn.Linear(features, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.up(x))
        weights, chosen = self.router(h).softmax(-1).topk(2, -1)
        order = chosen.flatten().argsort()
        counts = torch.bincount(chosen.flatten(), minlength=len(self.w1))
        offsets = counts.cumsum(0).to(torch.int32)
        tokens = order // 2
        y = torch._grouped_mm(h[tokens], self.w1, offs=offsets)
        y = torch._grouped_mm(F.silu(y), self.w2, offs=offsets)
        y = y * weights.flatten()[order, None]
        return self.head(h + torch.zeros_like(h).index_add(0, tokens, y))


def experts() -> Case:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    return Experts(), loss, (torch.randn(1024, 32), torch.randint(10, (1024,)))


class StateSpace(nn.Module):
    """A diagonal state space layer: a long convolution from complex exponentials."""

    def __init__(self, channels: int = 64, states: int = 32):
        super().__init__()
        self.log_rate = nn.Parameter(torch.rand(channels, states).log())
        self.frequency = nn.Parameter(torch.arange(states).float().repeat(channels, 1))
        self.C = nn.Parameter(torch.randn(channels, states, 2) * 0.3)
        self.log_step = nn.Parameter(torch.full((channels,), -3.0))
        self.head = nn.Linear(channels, 10)

    def forward(self, u: Tensor) -> Tensor:  # (batch, channels, length)
        L = u.shape[-1]
        A = torch.complex(-torch.exp(self.log_rate), self.frequency)
        dtA = A * torch.exp(self.log_step)[:, None]
        K = torch.exp(dtA[..., None] * torch.arange(L))
        C = torch.view_as_complex(self.C) * (torch.exp(dtA) - 1) / A
        kernel = 2 * torch.einsum("cs,csl->cl", C, K).real
        y = torch.fft.irfft(torch.fft.rfft(u, n=2 * L) * torch.fft.rfft(kernel, n=2 * L), n=2 * L)
        return self.head(F.gelu(y[..., :L]).mean(-1))


def state_space() -> Case:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    return StateSpace(), loss, (torch.randn(16, 64, 256), torch.randint(10, (16,)))


class FourierOperator(nn.Module):
    def __init__(self, width: int = 24, modes: int = 8, layers: int = 3):
        super().__init__()
        self.lift = nn.Conv2d(2, width, 1)
        self.spectral = nn.ParameterList(
            [torch.randn(width, width, modes, modes, 2) / width for _ in range(layers)]
        )
        self.local = nn.ModuleList([nn.Conv2d(width, width, 1) for _ in range(layers)])
        self.head = nn.Conv2d(width, 1, 1)
        self.modes = modes

    def forward(self, x: Tensor) -> Tensor:
        h, m = self.lift(x), self.modes
        for pairs, local in zip(self.spectral, self.local, strict=True):
            spectrum = torch.fft.rfft2(h)
            out = torch.zeros_like(spectrum)
            weight = torch.view_as_complex(pairs)
            out[:, :, :m, :m] = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, :m, :m], weight)
            h = F.gelu(torch.fft.irfft2(out, s=h.shape[-2:]) + local(h))
        return self.head(h)


def fourier_operator() -> Case:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.mse_loss(model(batch[0]), batch[1])

    return FourierOperator(), loss, (torch.randn(8, 2, 32, 32), torch.randn(8, 1, 32, 32))


class Process(nn.Module):
    """A Gaussian process with features from a small network, and its marginal likelihood."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))
        self.log_noise = nn.Parameter(torch.tensor(-1.0))
        self.log_scale = nn.Parameter(torch.tensor(0.0))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        z = self.features(x)
        gaps = (z[:, None] - z[None]).square().sum(-1)
        K = torch.exp(self.log_scale - gaps / 2) + self.log_noise.exp() * torch.eye(len(x))
        L = torch.linalg.cholesky(K)
        alpha = torch.cholesky_solve(y[:, None], L)
        return (0.5 * y @ alpha[:, 0] + L.diagonal().log().sum()) / len(x)


def gaussian_process() -> Case:
    x = torch.randn(300, 8)
    return Process(), lambda model, batch: model(*batch), (x, x[:, 0].sin())


class Solves(nn.Module):
    """Inverses, solutions and determinants of many matrices."""

    def __init__(self, n: int = 24):
        super().__init__()
        self.layer = nn.Linear(16, n * n)
        self.b = nn.Parameter(torch.randn(n))
        self.n = n

    def forward(self, x: Tensor) -> Tensor:
        A = torch.tanh(self.layer(x)).reshape(-1, self.n, self.n) / self.n + torch.eye(self.n)
        y = torch.linalg.solve(A, self.b) + torch.linalg.inv(A) @ self.b
        return y.square().mean() + torch.logdet(A @ A.mT).mean()


def solves() -> Case:
    return Solves(), lambda model, batch: model(batch), torch.randn(256, 16)


CASES: dict[str, Callable[[], Case]] = {
    "lstm": lambda: recurrent("LSTM"),
    "gru": lambda: recurrent("GRU"),
    "rnn": lambda: recurrent("RNN"),
    "lstm-cells": lambda: cells("LSTMCell"),
    "gru-cells": lambda: cells("GRUCell"),
    "ctc": ctc,
    "experts": experts,
    "state-space": state_space,
    "fourier-operator": fourier_operator,
    "gaussian-process": gaussian_process,
    "solves": solves,
}


def seconds(functions: Sequence[Callable[[], Any]], runs: int) -> list[float]:
    """Return the shortest process time of each function, run by turns, after one that warms up."""
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(1 + runs):
        for own, run in zip(times, functions, strict=True):
            start = time.process_time()
            run()
            own.append(time.process_time() - start)
    return [min(own[1:]) for own in times]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", default=list(CASES))
    parser.add_argument("--order", type=int, default=3)
    parser.add_argument("--runs", type=int, default=6)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| model | S | one gradient | order 3 | floor | times the floor |")
    print("|---|---|---|---|---|---|")
    for name in options.cases:
        torch.manual_seed(0)
        model, loss_fn, batch = CASES[name]()

        def gradient(model: Any = model, loss_fn: Any = loss_fn, batch: Any = batch) -> None:
            torch.autograd.grad(loss_fn(model, batch), list(model.parameters()))

        def summary(model: Any = model, loss_fn: Any = loss_fn, batch: Any = batch) -> ns.Summary:
            return ns.summarize(model, loss_fn, batch, order=options.order, backend="sweep")

        S = len(ns.make_partition(model, "canonical"))
        floor = ((S if options.order == 3 else S / 2) + 4) / 3
        one, two, whole = seconds([gradient, gradient, summary], options.runs)
        one = min(one, two)
        cost = whole / one
        print(
            f"| {name} | {S} | {1000 * one:.1f} ms | {cost:.1f} | {floor:.1f} | "
            f"{cost / floor:.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
