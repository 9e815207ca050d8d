"""Operations on single tokens, passed some tokens at a time: the same numbers, in less memory."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import newton_summary as ns
from newton_summary.derivatives.sweep import engine, token_runs
from newton_summary.derivatives.sweep.rules import elementwise
from newton_summary.derivatives.sweep.tape import Tangent, Unjoined
from newton_summary.derivatives.sweep.token_runs import TokenRun
from newton_summary.experiments import models

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
from losses import next_token_loss
from peak_memory import peak_bytes


class Gated(nn.Module):
    """Tokens that are gated, divided by their length, masked, and added to what they were."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = (
            nn.Linear(6, 9),
            nn.Linear(6, 9, bias=False),
            nn.Linear(9, 6),
        )
        self.scale = nn.Parameter(torch.rand(6) + 0.5)
        self.norm = nn.LayerNorm(6)
        self.register_buffer("mask", (torch.rand(3, 5, 6) > 0.2).double())

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):  # the second time all groups have second derivatives
            h = self.norm(x) * self.scale
            h = self.down(F.silu(self.gate(h)) * self.up(h)) * self.mask
            x = (x + F.relu(h)) / 1.5
        return x


def gated() -> tuple[nn.Module, Tensor]:
    return Gated().double(), torch.randn(3, 5, 6).double()


def gpt() -> tuple[nn.Module, Tensor]:
    return models.GPT(11, 8, 8, 2, 2).double(), torch.randint(0, 11, (3, 9))


class Residual(nn.Module):
    """Images with batch norms, in training, and what they were added to them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(2, 5, 3, padding=1), nn.BatchNorm2d(5), nn.Tanh())
        self.inner = nn.Sequential(nn.Conv2d(5, 5, 3, padding=1), nn.BatchNorm2d(5))
        self.gain = nn.Parameter(torch.rand(1, 5, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(2):
            x = F.silu(x + self.inner(x) * self.gain) / 1.5
        return x


def residual() -> tuple[nn.Module, Tensor]:
    return Residual().double(), torch.randn(3, 2, 4, 4).double()


def gated_loss(model: nn.Module, x: Tensor) -> Tensor:
    y = model(x)
    return (y.sin() * y.mean(1, keepdim=True)).sum()


def square() -> tuple[nn.Module, Tensor]:
    """As many tokens as features: the weights look like tokens."""
    layers = [nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Softplus(), nn.Linear(8, 8)]
    return nn.Sequential(*layers, nn.Sigmoid()).double(), torch.randn(8, 8).double()


class Joined(nn.Module):
    """Tokens of all texts in one dimension, and apart again, as GPT-2 of Transformers has them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Parameter(torch.randn(n, m)) for n, m in ((6, 9), (9, 6)))
        self.up_bias, self.down_bias = (nn.Parameter(torch.randn(n)) for n in (9, 6))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            h = torch.addmm(self.up_bias, x.view(-1, 6), self.up).view(*x.shape[:2], 9)
            h = torch.addmm(self.down_bias, F.gelu(h).view(-1, 9), self.down)
            x = x + h.view(x.shape)
        return x


def joined() -> tuple[nn.Module, Tensor]:
    return Joined().double(), torch.randn(3, 5, 6).double()


def mean_loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).sin().mean()


@pytest.mark.parametrize(
    ("make", "loss"),
    [
        (gated, gated_loss),
        (gpt, next_token_loss),
        (residual, gated_loss),
        (square, mean_loss),
        (joined, gated_loss),
    ],
    ids=["gated", "gpt", "residual", "square", "joined"],
)
@pytest.mark.parametrize("tokens", [1, 4, 7])
def test_some_tokens_at_a_time_change_nothing(make, loss, tokens, monkeypatch) -> None:
    torch.manual_seed(0)
    model, x = make()
    u = {n: torch.randn_like(p) for n, p in model.named_parameters()}
    monkeypatch.setattr(engine, "SMALL", 1)
    runs: list[TokenRun] = []

    def measure() -> ns.Summary:
        return ns.summarize(model, loss, x, direction=u, backend="sweep")

    def noting(sweep: engine.Sweep, run: TokenRun) -> None:
        runs.append(run)
        token_runs.pass_tokens(sweep, run)

    monkeypatch.setattr(engine, "pass_tokens", noting)
    expected = measure()
    assert not runs
    monkeypatch.setattr(token_runs, "AT_A_TIME", {"cpu": 1})
    monkeypatch.setattr(token_runs.Tokens, "fewest", tokens)
    actual = measure()
    assert max(len(run.ops) for run in runs) > 5
    for name in ("gbar", "Hbar", "D3"):
        a, e = getattr(actual, name), getattr(expected, name)
        torch.testing.assert_close(a, e, rtol=1e-10, atol=1e-12 * float(e.abs().max()))


def assert_two_tokens_at_a_time_agree(
    monkeypatch: pytest.MonkeyPatch,
    model: nn.Module,
    loss: Callable[[nn.Module, Tensor], Tensor],
    x: Tensor,
) -> None:
    expected = ns.summarize(model, loss, x, backend="nested")
    monkeypatch.setattr(engine, "SMALL", 1)
    monkeypatch.setattr(token_runs, "AT_A_TIME", {"cpu": 1})
    monkeypatch.setattr(token_runs.Tokens, "fewest", 2)
    actual = ns.summarize(model, loss, x, backend="sweep")
    torch.testing.assert_close(actual.Hbar, expected.Hbar)
    torch.testing.assert_close(actual.D3, expected.D3)


def test_a_weight_that_is_also_a_token_stays_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(6, 6).double(), torch.randn(6, 6).double()

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return (model(x).tanh() * model.weight).sin().mean()

    assert_two_tokens_at_a_time_agree(monkeypatch, model, loss, x)


def test_a_weight_made_just_before_its_layer_stays_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)]).double()
    x = torch.randn(2, 3, 6).double()  # as many tokens as the weights have rows

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        first, second = model
        return F.linear(first(x).sin(), second.weight.tanh(), second.bias).cos().mean()

    assert_two_tokens_at_a_time_agree(monkeypatch, model, loss, x)


def test_some_entries_at_a_time_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of functions of one number: with a third derivative, without one, and relative ones."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 50), nn.Softplus(), nn.Linear(50, 60)).double()
    x = torch.randn(70, 3).double()

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        y = model(x)
        return (y.square() + 1).sqrt().mean() + (y.T.sigmoid().mean(1) * y.sin().mean(0)).mean()

    def measure() -> ns.Summary:
        return ns.summarize(model, loss, x, backend="sweep")

    expected = measure()
    monkeypatch.setattr(elementwise, "IN_CACHE", 1)
    actual = measure()
    for name in ("gbar", "Hbar", "D3"):
        a, e = getattr(actual, name), getattr(expected, name)
        torch.testing.assert_close(a, e, rtol=1e-10, atol=1e-12 * float(e.abs().max()))


def test_a_wide_layer_is_never_held_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 256), nn.GELU(), nn.Linear(256, 4))
    x = torch.randn(2, 1024, 4)

    def peak() -> int:
        return peak_bytes(lambda: ns.summarize(model, lambda m, b: m(b).square().mean(), x))

    monkeypatch.setattr(token_runs, "AT_A_TIME", {"cpu": 2**40})
    whole = peak()
    monkeypatch.setattr(token_runs, "AT_A_TIME", {"cpu": 2**20})
    assert peak() < whole / 3


@pytest.mark.parametrize("axis", [token_runs.Tokens(), token_runs._Channels()])
def test_pieces_of_derivatives_are_cut_without_joining_them(axis):
    y = torch.randn(2, 5, 3)
    bias = torch.randn(1, 1, 1, 3).expand(1, 2, 5, 3)
    pieces = [((4, 1), torch.randn(2, 2, 5, 3)), ((2,), bias)], [((4,), torch.randn(1, 2, 5, 3))]
    t = Unjoined(*pieces, y)
    cut = token_runs.some_rows(t, axis, slice(1, 4))
    assert not t.joined
    whole = token_runs.some_rows(Tangent(t.first, t.second, t.rows), axis, slice(1, 4))
    assert (cut.first, cut.second, cut.shape) == (whole.first, whole.second, whole.shape)
    assert torch.equal(cut.rows, whole.rows)


def test_joined_derivatives_let_go_of_their_pieces():
    rows = torch.randn(1, 4)
    kept = weakref.ref(rows)
    t = Unjoined([((0,), rows), ((1,), torch.randn(1, 4))], [], torch.randn(4))
    del rows
    assert t.rows.shape == (2, 4)
    assert kept() is None
