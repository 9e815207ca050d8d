"""Attention in tiles: against the rules of its single operations, and how its memory grows."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import newton_summary as ns
from newton_summary.derivatives.sweep.rules import attention_tiles
from newton_summary.derivatives.sweep.rules.decomposed import layers

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
from peak_memory import peak_bytes

attend = F.scaled_dot_product_attention
L, T = 7, 9


def visible(*shape: int) -> Tensor:
    """A mask with a key for each query but the first, which has none."""
    mask = torch.rand(*shape, L, T, generator=torch.Generator().manual_seed(2)) > 0.4
    mask[..., 0] = True
    mask[..., 0, :] = False
    return mask


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
    "bias": ((2, 2), (2, 2), T, 4, 5, lambda *x: attend(*x, additive(2).to(x[0].dtype))),
    "grouped": ((2, 4), (2, 2), T, 4, 4, lambda *x: attend(*x, enable_gqa=True)),
    "grouped, causal": (
        *((2, 6), (2, 2), L, 3, 3),
        lambda *x: attend(*x, is_causal=True, enable_gqa=True),
    ),
    "grouped, mask": ((1, 4), (1, 2), T, 4, 4, lambda *x: attend(*x, visible(4), enable_gqa=True)),
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
    expected = measure(name, torch.float64 if dtype == torch.bfloat16 else dtype)
    assert max(largest_error(a, expected) for a in actual) < TOLERANCE[dtype]
    assert float((second.Hbar - actual[0].Hbar).abs().max()) <= (
        TOLERANCE[dtype] * float(expected.Hbar.abs().max())
    )


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
