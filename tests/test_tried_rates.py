"""Learning rates with a trial behind them: the loss falls, or the rates say that it does not."""

import copy
import dataclasses
import functools

import pytest
import torch
from torch import nn

import newton_summary as ns
from newton_summary.figures import rate_bars
from newton_summary.figures import rates as drawn_rates
from newton_summary.history import History
from newton_summary.integrations.loggers import rate_scalars
from newton_summary.integrations.monitor import Monitor
from newton_summary.measuring.tried_rates import _absolute
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
    assert rate_bars(rates).axes[0].get_title(loc="left") == "Learning rates: minimum, refuted"
    drawn = drawn_rates(history).axes[0].get_title(loc="left")
    assert drawn == "Learning rates, words; refuted by trials: epoch 0"
    assert rate_scalars(history.measured[0]) == {}


def test_a_monitor_warns_of_a_strength_that_is_refuted():
    model, batch = problem()
    monitor = Monitor(loss_fn=loss_fn, data=batch, lambda_int=1.0)
    with pytest.warns(UserWarning, match=r"After epoch 0: Refuted.*Shown once"):
        measured = monitor.measure(model, 0)
    assert measured.refuted
    assert not Monitor(loss_fn=loss_fn, data=batch).measure(model, 0).refuted


def test_a_monitor_of_relu_with_squared_error_has_rates_that_lower_the_loss(recwarn):
    """And not the saddle, which it used to log."""
    model, batch = relu_regression(2, seed=0)
    summary = ns.summarize(model, squared_error, batch)
    assert ns.learning_rates(summary).status == "saddle"
    measured = Monitor(loss_fn=squared_error, data=batch).measure(model, 0)
    assert measured.status == "absolute" and measured.trial.real < 0
    expected = ns.learning_rates(summary, model=model, loss_fn=squared_error, data=batch)
    torch.testing.assert_close(measured.eta, expected.eta)
    assert not [w for w in recwarn if "unusable" in str(w.message)]


def test_a_page_warns_of_a_saddle_and_of_a_promise_but_not_of_good_rates():
    good = ns.Summary(torch.ones(1), torch.eye(1), torch.ones(1), loss=torch.tensor(5.0))
    beyond = ns.Summary(torch.ones(1), 0.01 * torch.eye(1), torch.zeros(1), loss=torch.tensor(1.0))
    saddle = ns.Summary(torch.ones(1), -torch.eye(1), torch.zeros(1), loss=torch.tensor(1.0))
    shown = {
        name: page([History.of(s)])
        for name, s in {"good": good, "beyond": beyond, "saddle": saddle}.items()
    }
    assert 'class="banner"' not in shown["good"]
    told = "The step promises more than the whole loss of 1: unless this loss can be negative, "
    assert told in shown["beyond"].split("<main>")[0]
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
    with pytest.raises(ValueError, match=": expected a finite number"):
        ns.learning_rates(summary, -1.0, model=model, loss_fn=loss_fn, data=batch)


class Point(nn.Module):
    """Two numbers, each a group of its own."""

    def __init__(self, a, b):
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.tensor(float(x)).double()) for x in (a, b))


def far(model, batch, unit=1.0):
    """Newton's step from 3 leads to -27, where the loss is higher."""
    return unit * (1 + (model.a - batch[0].mean()).square()).sqrt() + 0 * model.b


def saddle(model, batch):
    return model.a.square() - 2 * model.b.square() + 3 * model.a * model.b + batch.mean()


@pytest.mark.parametrize("unit", [1.0, 1e-3])
def test_a_step_that_is_too_long_is_cut_with_its_standard_error(unit):
    """By 4^2, so that a = 3 - 30 / 16; without D3 no strengths are tried."""
    model, loss = Point(3, 0), functools.partial(far, unit=unit)
    batches = [(torch.full((2,), x).double(),) for x in (-0.1, 0.1)]
    how = {"partition": "trivial", "order": 2}
    summary = ns.summarize(model, loss, batches, stderr=True, **how)
    whole = ns.learning_rates(summary, 0)
    rates = ns.learning_rates(summary, model=model, loss_fn=loss, data=batches)
    assert rates.status == "cut" and rates.lambda_int == 0
    torch.testing.assert_close(rates.eta, whole.eta / 16)
    assert whole.eta_stderr > 0
    torch.testing.assert_close(rates.eta_stderr, whole.eta_stderr / 16)
    assert rates.radius == pytest.approx(whole.radius / 16, nan_ok=True)
    assert rates.model_change == pytest.approx(float(summary.predicted_change(rates.eta)))


def test_the_radius_of_a_step_that_is_cut_is_cut_too():
    """D3 is too small for any strength to matter."""
    model, batch = Point(3, 0), (torch.zeros(2).double(),)
    summary = ns.summarize(model, far, batch, partition="trivial", order=2)
    summary = dataclasses.replace(summary, D3=torch.tensor([1e-60]).double())
    rates = ns.learning_rates(summary, model=model, loss_fn=far, data=batch)
    whole = ns.learning_rates(summary, rates.lambda_int)
    assert rates.status == "cut" and whole.radius == pytest.approx(1e-20 * float(whole.eta))
    assert rates.radius == pytest.approx(whole.radius / 16, rel=1e-9)


def test_without_trials_the_strength_is_1():
    model, batch = problem()
    summary = ns.summarize(model, loss_fn, batch)
    rates = ns.learning_rates(summary)
    assert rates.lambda_int == 1
    torch.testing.assert_close(rates.eta, ns.learning_rates(summary, 1.0).eta, rtol=0, atol=0)


def test_absolute_curvature_is_at_least_a_thousandth_of_the_largest():
    """Hbar has the eigenvalues -2 and -1e-9, and gbar is along the latter."""
    H = -torch.tensor([[1.0, 1 - 1e-9], [1 - 1e-9, 1.0]]).double()
    summary = ns.Summary(torch.tensor([1.0, -1.0]).double(), H, torch.zeros(2).double())
    rates = _absolute(summary, ns.learning_rates(summary, 0))
    assert rates.status == "absolute" and rates.eta.tolist() == pytest.approx([500.0, -500.0])


def test_a_saddle_without_interactions_has_the_rates_of_its_diagonal():
    model, batch = Point(1, 0.2), torch.zeros(2).double()
    summary = ns.summarize(model, saddle, batch)
    tried = {"model": model, "loss_fn": saddle, "data": batch}
    alone = ns.learning_rates(summary, diagonal=True, **tried)
    assert alone.status == "absolute"
    assert alone.eta.tolist() == pytest.approx([1 / 2, 1 / 4])
    joint = ns.learning_rates(summary, **tried)  # Hbar scaled to [[1, c], [c, -1]]
    assert joint.eta.tolist() == pytest.approx((alone.eta / (1 + 9 / 8) ** 0.5).tolist())


def test_where_every_step_raises_the_loss_the_whole_one_is_told():
    """The trials are of a loss that rises where the measured one falls."""
    model, batch = Point(2, 1), torch.zeros(2).double()
    bowl = lambda model, batch: model.a.square() + model.b.square() + batch.mean()  # noqa: E731
    along = {"direction": {"a": model.a.detach() * 2, "b": model.b.detach() * 2}}
    summary = ns.summarize(model, bowl, batch, **along)
    turned = lambda model, batch: 10 - bowl(model, batch)  # noqa: E731
    rates = ns.learning_rates(summary, model=model, loss_fn=turned, data=batch, **along)
    assert rates.real_change == pytest.approx(5.0)  # the minimum of the bowl is 5 lower
    torch.testing.assert_close(rates.eta, torch.full((2,), 0.5).double())


def test_a_summary_that_is_not_finite_stays_without_rates():
    model, batch = Point(1, 1), torch.zeros(2).double()
    summary = ns.summarize(model, saddle, batch)
    summary = dataclasses.replace(summary, Hbar=summary.Hbar * float("nan"))
    rates = ns.learning_rates(summary, model=model, loss_fn=saddle, data=batch)
    assert rates.status == "not-finite" and bool(rates.eta.isnan().all())
