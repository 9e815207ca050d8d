"""Saved states that were damaged, or are of something else, are refused as a whole."""

from __future__ import annotations

import copy
import math
import warnings

import pytest
import torch
from torch import nn

import newton_summary as ns

X, Y = torch.randn(16, 3), torch.randn(16, 1)
OURS = "newton_summary"


def loss_fn(model, batch):
    return (model(batch[0]) - batch[1]).square().mean()


def make(kind: str):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    groups = ns.make_partition(net)
    if kind == "paper":
        how = {"summary_period": 2, "warmup": 0, "curvature": (loss_fn, [(X, Y)])}
        trainer = ns.NewtonSummary.paper(groups, **how)
    elif kind == "along":
        adam = torch.optim.Adam(net.parameters(), lr=1e-2)
        trainer = ns.NewtonSummary(groups, loss_fn, direction=adam)
    elif kind == "steered":
        trainer = ns.NewtonSummary(groups, loss_fn)
    else:
        trainer = ns.RateController(torch.optim.Adam(net.parameters()), net, loss_fn)
    return net, trainer


def train(net, trainer, steps: int) -> None:
    for _ in range(steps):
        net.zero_grad()
        loss_fn(net, (X, Y)).backward()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer.step((X, Y))


def nan(x):
    return x * math.nan


FIRST = (OURS, "average", "summaries", 0)
DAMAGE = {
    "paper": [
        ((OURS, "eta"), nan),
        ((OURS, "eta"), lambda x: x[:2]),
        ((OURS, "eta"), lambda x: -x - 1),
        ((OURS, "eta"), lambda x: [1.0]),
        ((*FIRST, "gbar"), nan),
        ((*FIRST, "D3"), nan),
        ((*FIRST, "Hbar"), lambda x: x[:2, :2]),
        ((OURS, "average", "count"), lambda x: -1),
        ((OURS, "average", "count"), lambda x: "a"),
        ((OURS, "schedule", "next"), lambda x: -3),
        ((OURS, "data", "index"), lambda x: "x"),
        ((OURS, "data", "present"), lambda x: [1, 2]),
        ((OURS, "warned"), lambda x: 3),
        ((OURS, "counts", "refreshes"), lambda x: -1),
        (("param_groups", 0, "lr"), lambda x: math.nan),
        (("param_groups", 1, "lr"), lambda x: "a"),
        (("param_groups", 1, "eta"), lambda x: math.nan),
        (("param_groups", 1, "momentum"), lambda x: math.inf),
        (("param_groups",), lambda x: x[:-1]),
        (("state", 0, "momentum_buffer"), nan),
        (("state", 0, "momentum_buffer"), lambda x: x[:1]),
        (("state", 0, "momentum_buffer"), lambda x: 3),
        ((OURS,), lambda x: None),
    ],
    "steered": [
        (("state", 0, "exp_avg"), nan),
        (("state", 0, "exp_avg_sq"), lambda x: x[:1]),
        ((OURS, "steering"), lambda x: None),
        ((OURS, "steering", "multiplier"), lambda x: math.nan),
        ((OURS, "steering", "before"), lambda x: [torch.ones(2)]),
        ((OURS, "steering", "before", 0), nan),
        (("param_groups", 0, "lr"), lambda x: math.inf),
    ],
    "along": [
        ((OURS, "direction", "state", 0, "exp_avg"), nan),
        ((OURS, "direction", "param_groups", 0, "lr"), lambda x: math.nan),
        ((OURS, "direction"), lambda x: None),
    ],
    "controller": [
        (("multiplier",), lambda x: math.nan),
        (("multiplier",), lambda x: 0.0),
        (("multiplier",), lambda x: "a"),
        (("balance",), lambda x: {"slope": 1.0, "other": 2.0}),
        (("balance", "slope"), nan),
        (("steps",), lambda x: -1),
        (("history",), lambda x: [{"step": 1}]),
        (("history",), lambda x: 3),
        (("first_lrs",), lambda x: [math.inf]),
        (("before",), lambda x: [torch.ones(2)]),
        (("before",), lambda x: 3),
        (("before", 0), nan),
    ],
}
CASES = [(kind, *case) for kind, cases in DAMAGE.items() for case in cases]


@pytest.mark.parametrize(("kind", "path", "change"), CASES)
def test_a_damaged_state_is_refused_before_anything_changes(kind, path, change):
    net, trainer = make(kind)
    train(net, trainer, 4)
    state = copy.deepcopy(trainer.state_dict())
    place = state
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = change(place[path[-1]])
    net, trainer = make(kind)
    train(net, trainer, 2)
    before = repr((trainer.state_dict(), net.state_dict()))
    with pytest.raises(ValueError):  # the messages are many
        trainer.load_state_dict(state)
    assert repr((trainer.state_dict(), net.state_dict())) == before
    train(net, trainer, 2)
    assert all(bool(p.isfinite().all()) for p in net.parameters())


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("state", [None, [1], {}, torch.optim.SGD([torch.ones(1)]).state_dict()])
def test_what_is_not_a_state_is_refused(kind, state):
    with pytest.raises(ValueError, match=r"[Nn]ot a"):
        make(kind)[1].load_state_dict(state)


@pytest.mark.parametrize("lr", [math.nan, math.inf, torch.tensor(math.nan)])
@pytest.mark.parametrize("kind", DAMAGE)
def test_a_learning_rate_that_is_not_finite_never_reaches_the_parameters(kind, lr):
    net, trainer = make(kind)
    train(net, trainer, 3)
    before = [p.detach().clone() for p in net.parameters()]
    optimizer = getattr(trainer, "optimizer", trainer)
    good = optimizer.param_groups[-1]["lr"]
    optimizer.param_groups[-1]["lr"] = lr
    with pytest.raises(ValueError, match=r"lr=(nan|inf) of .*finite"):
        train(net, trainer, 1)
    torch.testing.assert_close(list(net.parameters()), before, rtol=0, atol=0)
    optimizer.param_groups[-1]["lr"] = good
    train(net, trainer, 2)
    assert all(bool(p.isfinite().all()) for p in net.parameters())
