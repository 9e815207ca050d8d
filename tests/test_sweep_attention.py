"""Attention in tiles: against the rules of its single operations, and how its memory grows."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import newton_summary as ns
from newton_summary.derivatives.sweep import engine
from newton_summary.derivatives.sweep.rules import attention_tiles
from newton_summary.derivatives.sweep.rules.decomposed import layers

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
from peak_memory import peak_bytes

attend = F.scaled_dot_product_attention
L, T = 7, 9


def eager(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Attention as transformers write it out, which needs a key for each query."""
    if q.shape[:-2] != k.shape[:-2]:
        B, H, keys, size = k.shape
        n = q.shape[-3] // H
        k = k[:, :, None].expand(B, H, n, keys, size).reshape(B, H * n, keys, size)
        v = v[:, :, None].expand(B, H, n, *v.shape[2:]).reshape(B, H * n, *v.shape[2:])
    scores = torch.matmul(q, k.transpose(-1, -2)) * k.shape[-1] ** -0.5
    if mask is not None and mask.dtype == torch.bool:
        mask[..., 0, 0] = True
        scores = scores.masked_fill(~mask, -math.inf)
    elif mask is not None:
        scores = scores + mask.clamp_min(torch.finfo(mask.dtype).min)
    weights = torch.softmax(scores, -1, dtype=torch.promote_types(q.dtype, torch.float32))
    return torch.matmul(F.dropout(weights.to(q.dtype), 0.0), v)


def visible(*shape: int) -> Tensor:
    """A mask with a key for each query but the first, which has none."""
    mask = torch.rand(*shape, L, T, generator=torch.Generator().manual_seed(2)) > 0.4
    mask[..., 0] = True
    mask[..., 0, :] = False
    return mask


def window() -> Tensor:
    """A mask with the keys beside each query: tiles of later ones do not begin at the first key."""
    return (torch.arange(L)[:, None] - torch.arange(T)).abs() <= 1


def additive(*shape: int) -> Tensor:
    noise = torch.randn(*shape, L, T, generator=torch.Generator().manual_seed(3))
    return noise.masked_fill(~visible(*shape), -math.inf)


# (shape before queries, the same before keys, keys, size of a head, features of a value, a call)
CASES: dict[str, tuple[tuple[int, ...], tuple[int, ...], int, int, int, Callable[..., Tensor]]] = {
    "plain": ((2, 3), (2, 3), T, 4, 4, attend),
    "no heads": ((), (), T, 4, 3, attend),
    "one dimension before": ((5,), (5,), T, 3, 2, attend),
    "causal": ((2, 3), (2, 3), L, 4, 4, lambda *x: attend(*x, is_causal=True)),
    "causal, more keys": ((1, 2), (1, 2), T, 4, 4, lambda *x: attend(*x, is_causal=True)),
    "scale": ((2, 2), (2, 2), T, 4, 4, lambda *x: attend(*x, scale=0.7)),
    "mask": ((2, 2), (2, 2), T, 4, 4, lambda *x: attend(*x, visible())),
    "mask of each sample": ((2, 2), (2, 2), T, 4, 4, lambda *x: attend(*x, visible(2, 1))),
    "window": ((2, 2), (2, 2), T, 4, 4, lambda *x: attend(*x, window())),
    "bias": ((2, 2), (2, 2), T, 4, 5, lambda *x: attend(*x, additive(2).to(x[0].dtype))),
    "grouped": ((2, 4), (2, 2), T, 4, 4, lambda *x: attend(*x, enable_gqa=True)),
    "grouped, causal": (
        *((2, 6), (2, 2), L, 3, 3),
        lambda *x: attend(*x, is_causal=True, enable_gqa=True),
    ),
    "grouped, mask": ((1, 4), (1, 2), T, 4, 4, lambda *x: attend(*x, visible(4), enable_gqa=True)),
    "eager": ((2, 3), (2, 3), T, 4, 4, lambda *x: eager(*x)),
    "eager, no heads": ((), (), T, 4, 3, lambda *x: eager(*x)),
    "eager, bias": ((2, 2), (2, 2), T, 4, 5, lambda *x: eager(*x, additive(2).to(x[0].dtype))),
    "eager, mask": ((2, 2), (2, 2), T, 4, 4, lambda *x: eager(*x, visible(2, 1))),
    "eager, grouped": ((2, 6), (2, 2), T, 4, 4, lambda *x: eager(*x, visible())),
    "eager, keys alone": ((2, 2), (2, 2), T, 4, 4, lambda q, k, v: eager(q.detach(), k, v)),
    "keys alone": ((2, 2), (2, 2), T, 4, 4, lambda q, k, v: attend(q.detach(), k, v.detach())),
    "values alone": ((2, 2), (2, 2), T, 4, 4, lambda q, k, v: attend(q.detach(), k.detach(), v)),
}


class Attending(nn.Module):
    """Queries, keys and values that move along groups of their own and along a common one."""

    def __init__(self, name: str):
        super().__init__()
        lead, key_lead, keys, size, features, self.call = CASES[name]
        torch.manual_seed(0)
        self.shapes = [(*lead, L, size), (*key_lead, keys, size), (*key_lead, keys, features)]
        self.parts = nn.ParameterList([torch.randn(s) for s in self.shapes])
        self.common = nn.Parameter(torch.randn(4))
        self.gain = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        """Attend twice: the second time, queries have second derivatives along all groups."""
        wave = torch.tanh(self.common.sum() * x)
        q, k, v = (torch.sin(p * wave + i * self.gain[0]) for i, p in enumerate(self.parts))
        y = self.call(q, k, v)
        again = self.call(q * y.sum(-1, keepdim=True).tanh(), k, v * self.gain[1])
        return (y * again).sum() / y.numel()


def measure(name: str, dtype: torch.dtype, order: int = 3) -> ns.Summary:
    model, x = Attending(name).to(dtype), torch.tensor(0.8, dtype=dtype)
    u = {n: torch.cos(torch.arange(p.numel())).view_as(p) for n, p in model.named_parameters()}
    u = {n: d.to(dtype) for n, d in u.items()}
    return ns.summarize(model, lambda m, b: m(b), x, direction=u, order=order, backend="sweep")


def largest_error(actual: ns.Summary, expected: ns.Summary) -> float:
    pairs = [(getattr(actual, n), getattr(expected, n)) for n in ("gbar", "Hbar", "D3")]
    return max(float((a - e).abs().max() / e.abs().max()) for a, e in pairs if e is not None)


TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 0.1}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_tiles_agree_with_single_operations(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the tiles; those of half precision are held against the exact numbers."""
    actual = [measure(name, dtype)]
    monkeypatch.setattr(attention_tiles, "FEWEST_QUERIES", 2)
    for size in (1, 2**12):
        monkeypatch.setattr(attention_tiles, "AT_A_TIME", {"cpu": size})
        actual.append(measure(name, dtype))
    second = measure(name, dtype, order=2)
    monkeypatch.setattr(layers, "in_tiles", lambda *x: False)
    monkeypatch.setattr(engine.Joining, "joined", lambda self, op: None)
    expected = measure(name, torch.float64 if dtype == torch.bfloat16 else dtype)
    assert max(largest_error(a, expected) for a in actual) < TOLERANCE[dtype]
    assert float((second.Hbar - actual[0].Hbar).abs().max()) <= (
        TOLERANCE[dtype] * float(expected.Hbar.abs().max())
    )


@pytest.mark.parametrize(
    ("name", "joined"),
    {"eager": 2, "eager, mask": 2, "eager, grouped": 2, "eager, keys alone": 2}.items(),
)
def test_what_is_written_out_becomes_one_operation(
    name: str, joined: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = recorded(monkeypatch)
    measure(name, torch.float64)
    assert names.count("scaled_dot_product_attention") == joined
    assert "softmax" not in names and "masked_fill" not in names


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that will have the names of the operations that are swept."""
    names: list[str] = []
    prepare = engine.prepared

    def prepared(*args: Any) -> Any:
        tape = prepare(*args)
        names.extend(op.name for op in tape.ops if op.passed)
        return tape

    monkeypatch.setattr(engine, "prepared", prepared)
    return names


# What keeps the single operations, as functions of (scores, values): the weights or the scores are
# used elsewhere, scores are changed after the mask, the softmax is over queries.
KEPT: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "weights": lambda s, v: (w := s.softmax(-1)).square().sum() + (w @ v).square().sum(),
    "scores": lambda s, v: s.square().sum() + (s.softmax(-1) @ v).square().sum(),
    "capped": lambda s, v: (s.tanh().softmax(-1) @ v).square().sum(),
    "scaled after": lambda s, v: (
        (((s + additive(2).clamp(-5)) * 0.5).softmax(-1) @ v).square().sum()
    ),
    "over queries": lambda s, v: (s.softmax(-2) @ v).square().sum(),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_is_used_elsewhere_stays_as_it_is(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    names = recorded(monkeypatch)
    torch.manual_seed(0)
    model = nn.ParameterList([torch.randn(2, 2, n, 4) for n in (L, T, T)]).double()

    def loss(model: nn.ParameterList, batch: None) -> Tensor:
        q, k, v = model
        return KEPT[name](q @ k.mT, v)

    actual = ns.summarize(model, loss, None, backend="sweep")
    assert "scaled_dot_product_attention" not in names
    assert largest_error(actual, ns.summarize(model, loss, None, backend="nested")) < 1e-10


def test_memory_grows_linearly_with_the_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_tiles, "AT_A_TIME", {"cpu": 1})
    model = nn.Linear(8, 24)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        q, k, v = model(x)[None].chunk(3, -1)
        return attend(q, k, v, is_causal=True).square().mean()

    peaks = []
    for length in (256, 1024):
        x = torch.randn(1, length, 8, generator=torch.Generator().manual_seed(0))
        peaks.append(peak_bytes(lambda x=x: ns.summarize(model, loss, x, backend="sweep")))
    assert math.log(peaks[1] / peaks[0], 4) < 1.1
    assert peaks[1] < 1024**2 * 4  # of a single matrix
