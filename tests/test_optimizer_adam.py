"""The steps of Adam inside NewtonSummary, against torch's AdamW without its fused kernel."""

import copy
import math

import pytest
import torch
from torch import nn

from newton_summary.optimizer.adam import FusedAdam

SETTINGS = ((1e-2, 0.9, 0.0), (1e-2, 0.9, 0.0), (3e-3, 0.5, 0.1))  # rate, momentum, decay


def net():
    torch.manual_seed(0)
    layers = nn.Linear(3, 4).double(), nn.Linear(4, 2).double(), nn.Linear(2, 2).float()
    return nn.ModuleList(layers)


def give_gradients(model, step):
    """Give gradients of step ``step``; some parameters have none, or are frozen, at times."""
    generator = torch.Generator().manual_seed(step)
    for i, p in enumerate(model.parameters()):
        p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p)
        p.requires_grad_(not (i == 2 and 3 <= step < 5))
        if i == 1 and step == 6:
            p.grad = None


def make(model):
    state = {p: {} for p in model.parameters()}
    adam = FusedAdam(dict(model.named_parameters()), state)
    groups = [
        {"params": list(layer.parameters()), "momentum": momentum, "weight_decay": decay}
        for layer, (_, momentum, decay) in zip(model, SETTINGS)
    ]
    return adam, groups, state


def reference(model):
    groups = [
        {"params": list(layer.parameters()), "lr": lr, "betas": (beta, 0.999), "weight_decay": wd}
        for layer, (lr, beta, wd) in zip(model, SETTINGS)
    ]
    return torch.optim.AdamW(groups, foreach=False, fused=False)


def test_steps_are_those_of_adamw():
    """Groups of their own settings, two dtypes, parameters frozen or without gradient at times."""
    ours, theirs = net(), net()
    (adam, groups, state), adamw = make(ours), reference(theirs)
    for step in range(10):
        factor = 1.0 if step < 5 else 0.3  # a schedule
        give_gradients(ours, step)
        adam.step(groups, [factor * lr for lr, _, _ in SETTINGS])
        give_gradients(theirs, step)
        for p in theirs.parameters():
            p.grad = p.grad if p.requires_grad else None
        for group, (lr, _, _) in zip(adamw.param_groups, SETTINGS):
            group["lr"] = factor * lr
        adamw.step()
    for p, q in zip(ours.parameters(), theirs.parameters()):
        tolerance = 1e-12 if p.dtype == torch.float64 else 1e-6
        torch.testing.assert_close(p, q, rtol=tolerance, atol=tolerance)
        assert int(state[p]["step"]) == int(adamw.state[q]["step"])
    assert adam.skipped == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_is_not_finite_changes_nothing(bad):
    model = net()
    adam, groups, state = make(model)
    rates = [lr for lr, _, _ in SETTINGS]
    for step in range(3):
        give_gradients(model, step)
        adam.step(groups, rates)
    before = copy.deepcopy([list(model.parameters()), [state[p] for p in model.parameters()]])
    give_gradients(model, 7)
    model[0].weight.grad[0, 0] = bad
    adam.step(groups, rates)
    after = [list(model.parameters()), [state[p] for p in model.parameters()]]
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert adam.skipped == 1 and adam.found == 1
    give_gradients(model, 8)
    model[0].weight.grad *= 1e30  # large, and finite
    adam.step(groups, rates)
    assert adam.skipped == 1 and not torch.equal(model[0].weight, before[0][0])


def test_the_kernel_is_for_real_parameters_on_one_device():
    here, there = torch.ones(2), torch.ones(2, device="meta")
    assert FusedAdam.can_move({"a": here, "b": here.double()})
    assert not FusedAdam.can_move({"a": here, "b": there})
    assert not FusedAdam.can_move({"a": here, "b": here.to(torch.complex64)})
    assert not FusedAdam.can_move({"a": there})
