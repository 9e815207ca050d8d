"""Learning rates with a trial behind them: the loss falls, or the rates say that it does not."""

import copy

import pytest
import torch
from torch import nn

import newton_summary as ns
from newton_summary.history import History
from newton_summary.page.document import page
from test_no_trace import Trace
from test_strengths import change, loss_fn, problem


def relu_regression(depth, seed):
    """ReLU and squared error: D3 is 0 in all groups, and Hbar often not positive definite."""
    torch.manual_seed(seed)
    layers = [nn.Linear(4, 12), nn.ReLU()]
    for _ in range(depth - 1):
        layers += [nn.Linear(12, 12), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(12, 1)).double()
    x = torch.randn(64, 4).double()
    return model, (x, x.sin().sum(1, keepdim=True))


def squared_error(model, batch):
    return (model(batch[0]) - batch[1]).square().mean()


def test_the_strength_is_found_by_trials():
    """The same as suggest_lambda_int finds; the trial is repeated by hand."""
    model, batch = problem()
    summary = ns.summarize(model, loss_fn, batch)
    trace = Trace(model)
    rates = ns.learning_rates(summary, model=model, loss_fn=loss_fn, data=batch)
    trace.assert_same(model)
    found = ns.suggest_lambda_int(model, loss_fn, batch, summary)
    assert rates.lambda_int == found.lambda_int == 100 and rates.real_change == found.best.real
    assert rates.real_change == pytest.approx(change(model, batch, rates.eta)) and rates.ok
    assert f"tried: {rates.real_change:+.4g}" in str(rates) and not rates.doubt
    same = ns.learning_rates(summary, "auto", model=model, loss_fn=loss_fn, data=batch)
    torch.testing.assert_close(same.eta, rates.eta)


def test_a_strength_of_ones_own_is_refuted_by_its_trial():
    model, batch = problem()
    summary = ns.summarize(model, loss_fn, batch)
    rates = ns.learning_rates(summary, 1.0, model=model, loss_fn=loss_fn, data=batch)
    torch.testing.assert_close(rates.eta, ns.learning_rates(summary, 1.0).eta)
    assert rates.refuted and rates.real_change == pytest.approx(change(model, batch, rates.eta))
    assert "Refuted: a step with these rates should change the loss by -86.6" in str(rates)
    assert "Refuted" in rates._repr_html_()
    history = History("words")
    history.add(0, summary, rates)
    assert history.measured[0].refuted and "refuted" in str(history)
    assert 'role="alert">Do not use the learning rates. Refuted' in page([history])


def test_a_page_warns_of_a_saddle_and_of_a_promise_but_not_of_good_rates():
    good = ns.Summary(torch.ones(1), torch.eye(1), torch.ones(1), loss=torch.tensor(5.0))
    beyond = ns.Summary(torch.ones(1), 0.01 * torch.eye(1), torch.zeros(1), loss=torch.tensor(1.0))
    saddle = ns.Summary(torch.ones(1), -torch.eye(1), torch.zeros(1), loss=torch.tensor(1.0))
    shown = {
        name: page([History.of(s)])
        for name, s in {"good": good, "beyond": beyond, "saddle": saddle}.items()
    }
    assert 'class="banner"' not in shown["good"]
    assert "The step promises more than the whole loss" in shown["beyond"].split("<main>")[0]
    assert "D3 is 0 in all groups" in shown["saddle"].split("<main>")[0]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_relu_with_squared_error_has_rates_that_lower_the_loss(depth):
    statuses = set()
    for seed in range(4):
        model, batch = relu_regression(depth, seed)
        summary = ns.summarize(model, squared_error, batch)
        assert not summary.D3.any()
        rates = ns.learning_rates(summary, model=model, loss_fn=squared_error, data=batch)
        moved = copy.deepcopy(model)
        start = squared_error(moved, batch)
        grads = torch.autograd.grad(start, list(moved.parameters()))
        with torch.no_grad():
            for p, g, eta in zip(moved.parameters(), grads, rates.eta.tolist(), strict=True):
                p -= eta * g
            real = float(squared_error(moved, batch) - start)
        assert rates.ok and real == pytest.approx(rates.real_change) and real < 0
        assert "lambda_int >" not in rates.detail and "arger" not in str(rates)
        statuses.add(rates.status)
    assert statuses <= {"newton", "cut", "absolute", "flat"}


def test_wrong_use_is_told():
    model, batch = problem()
    summary = ns.summarize(model, loss_fn, batch)
    with pytest.raises(ValueError, match="needs the model"):
        ns.learning_rates(summary, "auto")
    with pytest.raises(ValueError, match="all three"):
        ns.learning_rates(summary, model=model)
    with pytest.raises(ValueError, match="write a finite number"):
        ns.learning_rates(summary, -1.0, model=model, loss_fn=loss_fn, data=batch)
