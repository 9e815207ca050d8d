"""Rotary embeddings written out by their operations: found, joined, and right."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import newton_summary as ns
from newton_summary.derivatives.sweep import engine

ANGLES = torch.arange(5.0, dtype=torch.float64)[:, None] / torch.tensor([1.0, 3.0])
COS, SIN = (f(ANGLES).repeat(1, 2) for f in (torch.cos, torch.sin))
UNLIKE = torch.linspace(0.5, 1, 4)  # halves may be turned by angles of their own


def by_slices(x: Tensor) -> Tensor:
    halves = torch.cat((-x[..., 2:], x[..., :2]), dim=-1)
    return (x * COS) + (halves * SIN)


def by_chunks(x: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return torch.cat([right.neg(), left], x.dim() - 1) * (SIN * UNLIKE) + COS * x


def of_a_part(x: Tensor) -> Tensor:
    """As where only some of the features are turned."""
    turned, rest = x[..., :2], x[..., 2:]
    halves = torch.cat((-turned[..., 1:], turned[..., :1]), dim=-1)
    return torch.cat((turned * COS[:, ::2] + halves * SIN[:, ::2], rest), -1)


def by_keywords(x: Tensor) -> Tensor:
    left, right = x.chunk(chunks=2, dim=-1)
    return x * COS + torch.cat(tensors=(-right, left), dim=-1) * SIN


def wrong_half(x: Tensor) -> Tensor:
    return x * COS + torch.cat((-x[..., :2], x[..., 2:]), dim=-1) * SIN


def of_rows(x: Tensor) -> Tensor:
    return x[:, :4] * COS[:4] + torch.cat((-x[:, 2:4], x[:, :2]), dim=1) * SIN[:4]


def half_used_twice(x: Tensor) -> Tensor:
    left = x[..., :2]
    return x * COS + torch.cat((-x[..., 2:], left), dim=-1) * SIN + left.sum()


def of_another(x: Tensor) -> Tensor:
    return x.tanh() * COS + torch.cat((-x[..., 2:], x[..., :2]), dim=-1) * SIN


def by_one_sine(x: Tensor) -> Tensor:
    return x * COS + torch.cat((-x[..., 2:], x[..., :2]), dim=-1) * SIN[:, :1]


def of_other_samples(x: Tensor) -> Tensor:
    others = [1, 0, 2, 4, 5, 3]
    return x * COS + torch.cat((-x[others, :, 2:], x[others, :, :2]), dim=-1) * SIN


def of_a_number(x: Tensor) -> Tensor:
    return x.sum() * COS + torch.cat((-x[..., 2:], x[..., :2]), dim=-1) * SIN


def with_alpha(x: Tensor) -> Tensor:
    return torch.add(x * COS, torch.cat((-x[..., 2:], x[..., :2]), dim=-1) * SIN, alpha=2)


def by_several_angles(x: Tensor) -> Tensor:
    cos, sin = (torch.stack([y, y + 0.1])[:, None] for y in (COS, SIN))
    return x * cos + torch.cat((-x[..., 2:], x[..., :2]), dim=-1) * sin


def by_rounded_angles(x: Tensor) -> Tensor:
    cos, sin = COS.float(), SIN.float()
    return x * cos + torch.cat((-x[..., 2:], x[..., :2]), dim=-1) * sin


def of_odd_width(x: Tensor) -> Tensor:
    three = x[..., :3]
    other = torch.cat((-three[..., 1:], three[..., :1]), dim=-1)
    return torch.cat((three * COS[:, :3] + other * SIN[:, :3], x[..., 3:]), dim=-1)


def by_joined_tokens(x: Tensor) -> Tensor:
    two = x[:, :1, :2]
    halves = torch.cat((-two[..., 1:], two[..., :1]), dim=1)
    return torch.cat((two * COS[:1, :2] + halves * SIN[:2, :2], x[:, :2, 2:]), dim=-1)


JOINED = {by_slices: 1, by_chunks: 1, of_a_part: 1, by_keywords: 1}
OTHERS = (
    *(wrong_half, of_rows, half_used_twice, of_another, by_one_sine),
    *(of_other_samples, of_a_number, with_alpha, by_several_angles, of_odd_width),
    *(by_rounded_angles, by_joined_tokens),
)


class Model(nn.Module):
    """A rotation between two layers."""

    def __init__(self, rotation: Callable[[Tensor], Tensor]):
        super().__init__()
        self.rotation = rotation
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.rotation(self.first(x).tanh()).square())


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).tanh().square().mean()


@pytest.mark.parametrize("rotation", [*JOINED, *OTHERS])
@pytest.mark.parametrize("in_pieces", [False, True])
def test_a_rotation_that_is_written_out(rotation, in_pieces, monkeypatch):
    torch.manual_seed(0)
    model, x = Model(rotation).double(), torch.randn(6, 5, 3, dtype=torch.float64)
    names, runs = [], []
    original = engine.WholeSweep.run

    def run(self, consume):
        names.extend(op.name for op in self.tape.ops)
        runs.extend(self.tape.ops[i].name for some in self.tape.runs for i in some.ops)
        original(self, consume)

    monkeypatch.setattr(engine.WholeSweep, "run", run)
    if in_pieces:
        monkeypatch.setattr(engine, "SMALL", 0)
        monkeypatch.setattr("newton_summary.derivatives.sweep.token_runs.AT_A_TIME", {"cpu": 1})
    expected = ns.summarize(model, loss_fn, x, backend="nested")
    actual = ns.summarize(model, loss_fn, x, backend="sweep")
    assert names.count("rotated") == JOINED.get(rotation, 0)
    assert in_pieces == bool(runs)
    for field in ("gbar", "Hbar", "D3"):
        torch.testing.assert_close(getattr(actual, field), getattr(expected, field))
