"""Which lambda_int to use: the real changes are those of a copy moved by hand."""

import copy
import math

import pytest
import torch
from torch import nn

from newton_summary import (
    Summary,
    learning_rates,
    make_partition,
    suggest_lambda_int,
    summarize,
)
from newton_summary.measuring.lambda_int import Strengths, TriedStrength
from problems import PROBLEMS
from test_no_trace import Trace


def problem():
    """A net whose steps are much too long with lambda_int = 1."""
    torch.manual_seed(0)
    words, layers = nn.Embedding(10, 6), (nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 10))
    model = nn.Sequential(words, nn.Flatten(), *layers).double()
    return model, torch.randint(10, (64, 4))


def loss_fn(model, batch):
    return nn.functional.cross_entropy(model(batch), batch[:, 0])


def change(model, batch, etas):
    """The change of the loss when every tensor of a copy moves along its gradient."""
    moved = copy.deepcopy(model)
    start = loss_fn(moved, batch)
    grads = torch.autograd.grad(start, list(moved.parameters()))
    with torch.no_grad():
        for p, g, eta in zip(moved.parameters(), grads, etas.tolist(), strict=True):
            p -= eta * g
        return float(loss_fn(moved, batch) - start)


def test_the_best_strength_is_where_the_loss_falls_most():
    model, batch = problem()
    summary = summarize(model, loss_fn, batch)
    strengths = (1, 10, 100, 1000)
    trace = Trace(model)
    found = suggest_lambda_int(model, loss_fn, batch, summary, strengths=strengths)
    trace.assert_same(model)
    real = []
    for strength, one in zip(strengths, found.tried, strict=True):
        eta = learning_rates(summary, strength).eta
        torch.testing.assert_close(one.rates.eta, eta, rtol=0, atol=0)
        real.append(change(model, batch, eta))
        assert one.real == pytest.approx(real[-1], rel=1e-6)
        expected = -eta @ summary.gbar + 0.5 * eta @ summary.Hbar @ eta
        assert one.predicted == pytest.approx(float(expected))
    assert real[0] > 0 > min(real)
    assert found.lambda_int == strengths[real.index(min(real))] == found.rates.lambda_int
    best = next(line for line in str(found).splitlines() if line.endswith("best"))
    assert best.split()[0] == f"{found.lambda_int:g}" and f"{min(real):+.4g}" in best
    assert f"lambda_int = {found.lambda_int:g} lowers it most." in str(found)
    assert "<table>" in found._repr_html_() and f"{min(real):+.4g}" in found._repr_html_()


def test_no_strength_and_the_last_one_are_told():
    model, batch = problem()
    summary = summarize(model, loss_fn, batch)
    none = suggest_lambda_int(model, loss_fn, batch, summary, strengths=(1, 10))
    assert none.lambda_int == 10 and "no step lowers it" in str(none)
    last = suggest_lambda_int(model, loss_fn, batch, summary, strengths=(10, 100))
    assert last.lambda_int == 100 and "the largest one tried" in str(last)
    alone = suggest_lambda_int(model, loss_fn, batch, summary, strengths=(100,))
    assert alone.lambda_int == 100 and "the largest one tried" not in str(alone)


def test_negative_rates_are_counted():
    rates = learning_rates(Summary(torch.tensor([-1.0, 2.0, 0.0]), torch.eye(3)), lambda_int=0)
    found = Strengths((TriedStrength(rates, predicted=-2.5, real=-2.0),), loss=3.0)
    assert rates.eta.tolist() == [-1.0, 2.0, 0.0]
    assert str(found).splitlines()[1].split()[:4] == ["0", "1", "of", "3"]


def test_where_nothing_changes_the_first_one_is_as_good_as_any():
    model, batch = problem()
    summary = summarize(model, loss_fn, batch)
    still = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    zeros = Summary(*(0 * x for x in (summary.gbar, summary.Hbar, summary.D3)), summary.loss)
    found = suggest_lambda_int(
        *(model, loss_fn, batch, zeros), direction=still, partition=summary.partition
    )
    assert found.lambda_int == 1 and "no step lowers it" in str(found)


def test_rates_that_are_no_use_are_not_tried():
    """Of a saddle without cubic term there is no step; the others are as without it."""
    model, batch = problem()
    summary = summarize(model, loss_fn, batch)
    bent = Summary(summary.gbar, -summary.Hbar, summary.D3, partition=summary.partition)
    found = suggest_lambda_int(model, loss_fn, batch, bent, strengths=(0, 1e6))
    saddle, other = found.tried
    assert saddle.rates.status == "saddle" and math.isnan(saddle.real)
    assert other.real == pytest.approx(change(model, batch, other.rates.eta))
    assert found.best is other and "saddle" in str(found)
    assert "nan" not in str(found).partition("The loss is")[0]


def test_where_no_strength_can_help_no_larger_one_is_recommended():
    """ReLU and squared error: D3 is 0 in all groups."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    batch = torch.randn(32, 3), torch.randn(32, 1)

    def squared_error(model, batch):
        return (model(batch[0]) - batch[1]).square().mean()

    summary = summarize(model, squared_error, batch)
    assert not summary.D3.any()
    bent = Summary(summary.gbar, -summary.Hbar, summary.D3, partition=summary.partition)
    found = suggest_lambda_int(model, squared_error, batch, bent, strengths=(1, 10))
    assert "D3 is 0 in all groups" in str(found) and "arger" not in str(found)


def test_a_quadratic_needs_none():
    quadratic = PROBLEMS["quadratic"]()
    summary = summarize(quadratic.model, quadratic.loss_fn, quadratic.batch)
    found = suggest_lambda_int(quadratic.model, quadratic.loss_fn, quadratic.batch, summary)
    for one in found.tried:
        assert one.real == pytest.approx(one.predicted) and one.rates.status == "newton"


def test_direction_diagonal_and_groups_reach_the_steps():
    model, batch = problem()
    partition = make_partition(model, "trivial")
    ones = {name: torch.ones_like(p) for name, p in model.named_parameters()}
    summary = summarize(model, loss_fn, batch, partition=partition, direction=ones)
    bare = Summary(summary.gbar, summary.Hbar, summary.D3)
    options = {"direction": ones, "partition": partition, "strengths": (5.0,)}
    (one,) = suggest_lambda_int(model, loss_fn, batch, bare, **options).tried
    moved = copy.deepcopy(model)
    with torch.no_grad():
        for p in moved.parameters():
            p -= one.rates.eta
        expected = float(loss_fn(moved, batch) - loss_fn(model, batch))
    assert one.real == pytest.approx(expected)
    several = summarize(model, loss_fn, batch)
    (one,) = suggest_lambda_int(
        model, loss_fn, batch, several, strengths=(5.0,), diagonal=True
    ).tried
    expected = learning_rates(several, 5.0, diagonal=True).eta
    torch.testing.assert_close(one.rates.eta, expected, rtol=0, atol=0)


def test_wrong_use_is_told():
    model, batch = problem()
    with pytest.raises(TypeError, match="not NoneType: measure one with summarize"):
        suggest_lambda_int(model, loss_fn, batch, None)
    for order in (1, 2):
        lower = summarize(model, loss_fn, batch, order=order)
        with pytest.raises(ValueError, match=r"needs D3: measure the summary with order=3\.$"):
            suggest_lambda_int(model, loss_fn, batch, lower)
    third = summarize(model, loss_fn, batch)
    with pytest.raises(ValueError, match="no strengths"):
        suggest_lambda_int(model, loss_fn, batch, third, strengths=())
