"""Root mean square norms written out by their operations: found, joined, and right."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import newton_summary as ns
from newton_summary.derivatives.sweep import engine


def as_llama(x: Tensor) -> Tensor:
    """With conversions before and after, as in bfloat16."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def used_twice(x: Tensor) -> Tensor:
    """The conversion is not for the norm alone."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    root = torch.rsqrt(wide.pow(2).mean((-2, -1), keepdim=True) + 1e-6)
    return (root * wide + wide.tanh()).to(x.dtype)


def root_used_twice(x: Tensor) -> Tensor:
    """The single operations stay."""
    root = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    return x * root + root


def of_another(x: Tensor) -> Tensor:
    """The factor is that of another value."""
    return x.tanh() * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def without_keepdim(x: Tensor) -> Tensor:
    """A mean of columns, as many as rows, that stretches over rows."""
    return x[0] * torch.rsqrt(x[0].pow(2).mean(-1) + 1e-6)


NORMS = {f.__name__: f for f in (as_llama, used_twice, root_used_twice, of_another)}
JOINED = {as_llama, used_twice}


class Model(nn.Module):
    """A norm between two layers."""

    def __init__(self, norm: Callable[[Tensor], Tensor]):
        super().__init__()
        self.norm = norm
        self.first, self.last = nn.Linear(3, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the logits."""
        return self.last(self.norm(self.first(x)))


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    y = model(x)
    return y.to(torch.promote_types(y.dtype, torch.float32)).tanh().square().mean()


@pytest.mark.parametrize("norm", [*NORMS.values(), without_keepdim])
def test_a_norm_that_is_written_out(norm, monkeypatch):
    torch.manual_seed(0)
    model, x = Model(norm), torch.randn(2, 5, 3)
    names = []
    original = engine.WholeSweep.run

    def run(self, consume):
        names.extend(op.name for op in self.tape.ops)
        original(self, consume)

    monkeypatch.setattr(engine.WholeSweep, "run", run)
    expected = ns.summarize(model.double(), loss_fn, x.double(), backend="nested")
    actual = ns.summarize(model, loss_fn, x.double(), backend="sweep")
    assert names.count("standardize") == (norm in JOINED)
    for field in ("gbar", "Hbar", "D3"):
        torch.testing.assert_close(getattr(actual, field), getattr(expected, field))
    if norm not in JOINED:
        return
    u = {name: p.detach().bfloat16() for name, p in model.named_parameters()}
    low = ns.summarize(model.bfloat16(), loss_fn, x.bfloat16(), direction=u, backend="sweep")
    wide = {name: p.double() for name, p in u.items()}
    there = x.bfloat16().double()
    exact = ns.summarize(model.double(), loss_fn, there, direction=wide, backend="nested")
    for field in ("gbar", "Hbar", "D3"):
        e = getattr(exact, field)
        assert (getattr(low, field) - e).abs().max() < 0.05 * e.abs().max()
