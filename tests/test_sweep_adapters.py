"""Adapters of low rank: what is frozen below them costs one forward pass, not one a group."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import newton_summary as ns
from newton_summary.derivatives.sweep.engine import Leaves
from newton_summary.experiments import models
from oracle import finite_differences

pytestmark = pytest.mark.filterwarnings("ignore:loss_fn registers a hook")  # of FlopCounterMode


class Adapted(nn.Module):
    """A frozen linear layer with a trained addition of low rank."""

    def __init__(self, layer: nn.Linear, rank: int = 2):
        super().__init__()
        self.layer = layer
        self.A = nn.Parameter(torch.randn(rank, layer.in_features) / rank)
        self.B = nn.Parameter(torch.randn(layer.out_features, rank) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + F.linear(F.linear(x, self.A), self.B)


def adapted(depth: int, adapters: int) -> nn.Module:
    """A small GPT whose last blocks have adapters on their perceptrons."""
    torch.manual_seed(0)
    model = models.GPT(11, 8, 8, depth, 2).double().requires_grad_(False)
    for block in list(model.blocks)[-adapters:]:
        block.mlp[0] = Adapted(block.mlp[0]).double()
    return model


def next_token(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def tokens() -> Tensor:
    return torch.randint(0, 11, (2, 9), generator=torch.Generator().manual_seed(1))


def products(run: object) -> int:
    with FlopCounterMode(display=False) as counter:
        run()  # type: ignore[operator]
    return counter.get_total_flops()


def test_adapters_alone_are_measured() -> None:
    model = adapted(2, 2)
    partition = ns.make_partition(model)
    assert len(partition) == 4 and all(name[-1] in "AB" for name in partition.names)
    u = {name: torch.randn_like(p) for name, p in partition.params.items()}
    actual = ns.summarize(model, next_token, tokens(), direction=u, backend="sweep")
    expected = finite_differences(model, next_token, tokens(), partition, u)
    for name, tolerance in (("gbar", 1e-8), ("Hbar", 1e-7), ("D3", 1e-5)):
        a, e = getattr(actual, name), getattr(expected, name)
        assert float((a - e).abs().max() / e.abs().max()) < tolerance


def test_what_is_frozen_below_costs_a_forward_pass() -> None:
    """Arithmetic beyond the loss is the same, however deep the frozen part is; so is the tape."""
    extra, lengths = [], []
    batch = tokens()
    for depth in (2, 6):
        model = adapted(depth, 1)
        u = {n: torch.randn_like(p) for n, p in model.named_parameters() if p.requires_grad}
        total = products(
            lambda m=model, u=u: ns.summarize(m, next_token, batch, direction=u, backend="sweep")
        )
        with torch.no_grad():
            extra.append(total - products(lambda m=model: next_token(m, batch)))
        leaves = Leaves(*[dict(ns.make_partition(model).params)] * 2, ns.make_partition(model))
        lengths.append(len(leaves.record(lambda m=model: next_token(m, batch)).ops))
    assert extra[0] == extra[1] > 0
    assert lengths[0] == lengths[1]


@pytest.mark.parametrize("order", [2, 3])
def test_no_gradient_of_frozen_weights_is_formed(order: int) -> None:
    """A summary of adapters costs far less arithmetic than one of all parameters."""
    costs = []
    for frozen in (True, False):
        model = adapted(4, 1).requires_grad_(not frozen)
        for name, p in model.named_parameters():
            p.requires_grad_(not frozen or name[-1] in "AB")
        u = {n: torch.randn_like(p) for n, p in model.named_parameters() if p.requires_grad}
        how = {"direction": u, "order": order, "backend": "sweep"}
        costs.append(
            products(lambda m=model, how=how: ns.summarize(m, next_token, tokens(), **how))
        )
    assert costs[0] < costs[1] / 10
