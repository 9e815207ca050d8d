"""Loss and slope along a direction by the short way that trainings take, without a trace."""

import random

import numpy as np
import pytest
import torch
from torch import nn

import newton_summary as ns
from newton_summary.measuring.slope import loss_and_slope
from newton_summary.probe.probe import Probe


def loss_fn(model, batch):
    return (model(batch[0]) - batch[1]).square().mean()


def make(*middle, dtype=torch.float64):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), *middle, nn.Tanh(), nn.Linear(4, 2)).to(dtype)
    batches = [(torch.randn(n, 3, dtype=dtype), torch.randn(n, 2, dtype=dtype)) for n in (5, 8)]
    u = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    return model, batches, u


def measured(model, data, u, loss_fn=loss_fn, trusted=False):
    with Probe(model, loss_fn, data, ns.make_partition(model, "trivial")) as probe:
        probe.trusted = trusted
        return loss_and_slope(probe, u)


@pytest.mark.parametrize("trusted", [False, True])
def test_the_slope_is_that_of_a_difference(trusted):
    """Of two batches weighted by their samples; a parameter that is not used counts as zero."""
    model, batches, u = make()
    model.register_parameter("spare", nn.Parameter(torch.ones(3, dtype=torch.float64)))
    u["spare"] = torch.ones(3, dtype=torch.float64)

    def at(h):
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.add_(u[name], alpha=h)
            loss = sum(len(b[0]) * float(loss_fn(model, b)) for b in batches) / 13
            for name, p in model.named_parameters():
                p.sub_(u[name], alpha=h)
        return loss

    loss, slope = measured(model, batches, u, trusted=trusted)
    assert loss == pytest.approx(at(0.0), rel=1e-12)
    assert slope == pytest.approx((at(1e-5) - at(-1e-5)) / 2e-5, rel=1e-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_products_are_added_up_in_float64(dtype):
    """The slope is as exact as the gradients are, also in half precision."""
    model, batches, u = make(dtype=dtype)
    _, slope = measured(model, batches[0], u)
    grads = torch.autograd.grad(loss_fn(model, batches[0]), list(model.parameters()))
    exact = sum((g.double() * d.double()).sum() for g, d in zip(grads, u.values()))
    assert slope == pytest.approx(float(exact), rel=1e-6)


def test_it_leaves_no_trace():
    """Buffers, random numbers, gradients, modes and hooks are as before; hooks have not run."""
    model, batches, u = make(nn.BatchNorm1d(4), nn.Dropout(0.5))
    ran = []
    model[0].weight.register_hook(lambda grad: ran.append("tensor") or 2 * grad)
    model[0].register_full_backward_hook(lambda *_: ran.append("module"))
    plain = loss_fn(model.eval(), batches[0])
    model.train()
    plain.backward()
    ran.clear()
    hooks = [(m, m._backward_hooks, m._backward_pre_hooks) for m in model.modules()]
    grads = {name: (p.grad, p.grad.clone()) for name, p in model.named_parameters()}
    before = {name: x.clone() for name, x in model.state_dict().items()}
    random_before = torch.get_rng_state(), random.getstate(), np.random.get_state()

    def drawing(model, batch):
        return loss_fn(model, batch) * (1 + random.random() + np.random.rand())

    first, second = (measured(model, batches, u, drawing, trusted) for trusted in (False, True))
    assert first == second and not ran
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    torch.testing.assert_close(torch.get_rng_state(), random_before[0], rtol=0, atol=0)
    assert random.getstate() == random_before[1]
    assert np.array_equal(np.random.get_state()[1], random_before[2][1])
    for name, p in model.named_parameters():
        assert p.grad is grads[name][0] and torch.equal(p.grad, grads[name][1])
    for m, after, pre in hooks:
        assert m.training and m._backward_hooks is after and m._backward_pre_hooks is pre


def test_a_loss_that_is_lost_says_so():
    model, batches, u = make()
    with pytest.raises(ns.NotFiniteError, match="The loss is nan"):
        measured(model, batches, u, lambda model, batch: loss_fn(model, batch) * float("nan"))
    with pytest.raises(ValueError, match="does not depend on the parameters"):
        measured(model, batches, u, lambda model, batch: batch[0].requires_grad_().sum())


def test_a_loss_that_changes_parameters_is_found_out_at_first():
    model, batches, u = make()

    def shrinking(model, batch):
        model[0].weight.data.mul_(0.9)
        return loss_fn(model, batch)

    with pytest.raises(ValueError, match="A loss may only read parameters"):
        measured(model, batches, u, shrinking)
