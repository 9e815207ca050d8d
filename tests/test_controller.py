"""The controller of a learning rate: what it measures, what it does, and in which loops."""

import copy
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LinearLR, OneCycleLR, ReduceLROnPlateau, StepLR

import newton_summary as ns
from distributed_cases import draw, make_net, steer, steer_all
from newton_summary.integrations.console import steering
from newton_summary.optimizer.steering import Balance, EndSlopes
from ranks import run_once

OPTIMIZERS = {
    "sgd": lambda params, lr: torch.optim.SGD(params, lr=lr),
    "momentum": lambda params, lr: torch.optim.SGD(params, lr=lr, momentum=0.9, weight_decay=1e-3),
    "adam": lambda params, lr: torch.optim.Adam(params, lr=lr),
    "adamw": lambda params, lr: torch.optim.AdamW(params, lr=lr, weight_decay=0.1),
    "rmsprop": lambda params, lr: torch.optim.RMSprop(params, lr=lr),
}


def cross_entropy(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def squared(model, batch):
    return F.mse_loss(model(batch[0]), F.one_hot(batch[1], 3).double())


def relu_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3)).double()


def batches(count, size=12):
    """Batches with something to learn: the label is the largest of three numbers."""
    found = []
    for seed in range(count):
        x, _ = draw(seed, size)
        found.append((x, x[:, :3].argmax(1)))
    return found


def train(model, optimizer, controller, data, loss_fn=cross_entropy, after=lambda: None):
    for batch in data:
        optimizer.zero_grad()
        loss_fn(model, batch).backward()
        controller.step(batch)
        after()


def loss_of_all(model, loss_fn=cross_entropy):
    with torch.no_grad():
        return sum(float(loss_fn(model, batch)) for batch in batches(20)) / 20


# --- what is measured -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_slope_and_curvature_of_a_quadratic_by_double_backward(kind):
    """Along the real step, on the next batch: <g, d> and d^T H d, with H from autograd."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()
    optimizer = OPTIMIZERS[kind](model.parameters(), 1e-2)
    controller = ns.RateController(optimizer, model, squared, period=1)
    train(model, optimizer, controller, batches(3), squared)
    before = [p.detach().clone() for p in model.parameters()]
    train(model, optimizer, controller, batches(4)[3:], squared)
    d = [b - p.detach() for b, p in zip(before, model.parameters())]
    batch = draw(50)
    optimizer.zero_grad()
    squared(model, batch).backward()
    controller.before_step(batch)

    names = [name for name, _ in model.named_parameters()]

    def at(*values):
        out = torch.func.functional_call(model, dict(zip(names, values)), (batch[0],))
        return F.mse_loss(out, F.one_hot(batch[1], 3).double())

    there = [b.clone().requires_grad_() for b in before]
    grads = torch.autograd.grad(at(*there), there, create_graph=True)
    slope = sum((g * x).sum() for g, x in zip(grads, d))
    Hd = torch.autograd.grad(slope, there)
    curvature = sum((h * x).sum() for h, x in zip(Hd, d))
    record = controller.history[-1]
    assert record.slope == pytest.approx(float(slope.detach()), rel=1e-9)
    assert record.curvature == pytest.approx(float(curvature), rel=1e-6)
    assert record.loss == pytest.approx(float(at(*before)), rel=1e-12)


def test_the_curvature_of_a_network_is_that_between_both_ends_of_the_step():
    """The difference of slopes is the mean of d^T H d along the step (Simpson's rule)."""
    model = make_net()
    adam = torch.optim.Adam(model.parameters(), lr=1e-2)
    controller = ns.RateController(adam, model, cross_entropy, period=1)
    train(model, adam, controller, batches(3))
    before = copy.deepcopy(model)
    train(model, adam, controller, batches(4)[3:])
    batch = draw(50)
    controller.before_step(batch)
    d = {
        n: b.detach() - p.detach()
        for (n, b), p in zip(before.named_parameters(), model.parameters())
    }
    bends = []
    for t in (0.0, 0.25, 0.5, 0.75, 1.0):
        there = copy.deepcopy(before)
        with torch.no_grad():
            for n, p in there.named_parameters():
                p.sub_(t * d[n])
        how = {"direction": d, "partition": "trivial", "order": 2, "backend": "nested"}
        bends.append(float(ns.summarize(there, cross_entropy, batch, **how).Hbar))
    simpson = (bends[0] + 4 * bends[1] + 2 * bends[2] + 4 * bends[3] + bends[4]) / 12
    assert controller.history[-1].curvature == pytest.approx(simpson, rel=1e-3)


def test_slopes_at_the_ends_of_steps_come_from_the_gradients_of_the_training(monkeypatch):
    """Their mean, by hand, enters in the place of the one that was measured."""
    monkeypatch.setattr("newton_summary.optimizer.controller.STRIDE", 1)
    taken = []
    add = Balance.add

    def spy(self, slope, curvature, rate, memory):
        taken.append((slope, curvature, rate))
        add(self, slope, curvature, rate, memory)

    monkeypatch.setattr(Balance, "add", spy)
    model = make_net()
    adam = torch.optim.Adam(model.parameters(), lr=1e-3)
    controller = ns.RateController(adam, model, cross_entropy)
    ends, checked, before, rate, seen = [], 0, None, 0.0, 1
    for batch in batches(40):
        adam.zero_grad()
        cross_entropy(model, batch).backward()
        end = None
        if before is not None:
            d = [(b - p).detach() for b, p in zip(before.parameters(), model.parameters())]
            end = sum(float((x * p.grad).sum()) for x, p in zip(d, model.parameters())) / rate
        before = copy.deepcopy(model)
        controller.step(batch)
        rate = controller.rates[0]
        if len(controller.history) > seen:
            seen, record = len(controller.history), controller.history[-1]
            slope, curvature, at = taken[-1]
            measured = record.slope - record.curvature
            assert end * at == pytest.approx(measured, rel=1e-6)
            if ends:
                mean = (sum(ends) * at + measured) / (len(ends) + 1)
                assert slope - curvature == pytest.approx(mean, rel=1e-6)
                checked += 1
            ends = []
        elif end is not None and len(controller.history) > 1:
            ends.append(end)
    assert checked >= 4


def test_gradients_of_something_else_are_left_out(monkeypatch):
    """Clipped ones, those of another loss, and sums over batches have slopes of another size."""

    def rates(stride):
        monkeypatch.setattr("newton_summary.optimizer.controller.STRIDE", stride)
        model = make_net()
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        controller = ns.RateController(sgd, model, cross_entropy)
        for batch in batches(60):
            sgd.zero_grad()
            cross_entropy(model, batch).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            controller.step(batch)
        return [r.rate for r in controller.history]

    assert rates(1) == rates(10**9)


def test_a_measurement_leaves_no_trace():
    """Not in the parameters, gradients, buffers, or random numbers."""
    torch.manual_seed(0)
    layers = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3)
    model = nn.Sequential(*layers).double()
    adam = torch.optim.Adam(model.parameters())
    controller = ns.RateController(adam, model, cross_entropy, period=1)
    train(model, adam, controller, batches(3))
    cross_entropy(model, draw(9)).backward()
    state = copy.deepcopy(model.state_dict())
    grads = [p.grad.clone() for p in model.parameters()]
    random = torch.get_rng_state()
    measured = len(controller.history)
    controller.before_step(draw(9))
    assert len(controller.history) == measured + 1
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in state.items())
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), grads))


# --- the law --------------------------------------------------------------------------------------


def filled(slope, curvature, rate=1.0, noise=0.0):
    balance = Balance()
    for i in range(100):
        balance.add(slope + noise * (-1) ** i, curvature, rate, 0.9)
    return balance


def test_the_error_is_zero_where_the_factor_is_at_the_set_point():
    balance = filled(slope=0.3, curvature=0.2, rate=0.1)  # factor 1.5 at the rate 0.1
    assert balance.factor(0.1) == pytest.approx(1.5)
    assert balance.error(0.1, 1.5, 0.9) == pytest.approx(0, abs=1e-9)
    assert balance.error(0.15, 1.0, 0.9) == pytest.approx(0, abs=1e-9)
    assert balance.error(0.1, 1.0, 0.9) == pytest.approx(0.2)  # (0.3 - 0.2) / (0.3 + 0.2)


@pytest.mark.parametrize(
    ("slope", "curvature", "factor"),
    [(-1, 1e-6, 0), (-1, 0, 0), (-1, -1, 0), (1, 0, math.inf), (1, -1e-6, math.inf)],
)
def test_no_factor_is_negative(slope, curvature, factor):
    """Where steps lead uphill, as at the end of a schedule, none is the best."""
    assert filled(slope, curvature).factor(0.1) == factor


@pytest.mark.parametrize(("slope", "curvature", "sign"), [(1, -1, 1), (1, 0, 1), (-1, 1, -1)])
def test_the_error_is_bounded_for_all_signs(slope, curvature, sign):
    assert filled(slope, curvature).error(1.0, 1.0, 0.9) == pytest.approx(sign)


def test_an_unsure_slope_counts_less():
    sure, unsure = (filled(1.0, 3.0, noise=noise) for noise in (0.0, 10.0))
    assert sure.error(1.0, 1.0, 0.9) == pytest.approx(-0.5)
    assert -0.3 < unsure.error(1.0, 1.0, 0.9) < 0
    assert Balance(weight=1.0).error(1.0, 1.0, 0.9) == 0  # nothing depends on the parameters


def test_the_standard_error_is_that_of_independent_values():
    torch.manual_seed(0)
    means, errors = [], []
    for _ in range(300):
        balance = Balance()
        for x in torch.randn(60).tolist():
            balance.add(2 + x, 1.0, 1.0, 0.9)
        means.append(balance.slope)
        errors.append(balance.stderr(0.9))
    spread = float(torch.tensor(means).std())
    assert sum(errors) / 300 == pytest.approx(spread, rel=0.2)


@pytest.mark.parametrize(("slope", "too_long"), [(1.5, False), (2.5, True), (3.5, False)])
def test_a_step_is_too_long_for_sure_by_standard_errors(slope, too_long):
    """Of values that vary by 2, with the weights 0.4 x 0.6^k, the error is 1."""
    balance = Balance(slope=slope, square=slope**2 + 4, curvature=10.0, weight=1.0)
    assert balance.stderr(0.6) == pytest.approx(1.0)
    assert balance.surely_too_long(1.0, 0.6, 2.0) == too_long
    assert not balance.surely_too_long(1.0, 0.6, 4.0)
    balance.curvature, balance.slope, balance.square = 20.0, 5.0, 29.0
    assert balance.surely_too_long(1.0, 0.6, 4.0)


def test_a_settled_rate_is_blamed_by_more_standard_errors(monkeypatch):
    """A question that is asked thousands of times is answered wrongly now and then."""
    asked, answer = {}, Balance.surely_too_long

    def surely_too_long(self, rate, memory, errors):
        asked[controller.steps] = errors
        return answer(self, rate, memory, errors)

    monkeypatch.setattr("newton_summary.optimizer.controller.SETTLED", 20)
    monkeypatch.setattr(Balance, "surely_too_long", surely_too_long)
    model = make_net()
    adam = torch.optim.Adam(model.parameters(), lr=1e-3)
    controller = ns.RateController(adam, model, cross_entropy, period=5)
    train(model, adam, controller, batches(40))
    assert {errors for step, errors in asked.items() if step <= 20} == {2.0}
    assert {errors for step, errors in asked.items() if step > 20} == {4.0}


def test_slopes_that_agree_are_counted_anew_after_one_that_does_not():
    ends, counts = EndSlopes(), []
    for trained in (1.0, 1.0, 1.3, 1.0, 1.0):
        ends.pair = (trained, 1.0)
        ends.mean(1.0, 1.0, 0.9, None)
        counts.append(ends.agreed)
    assert counts == [1, 2, 0, 1, 2]


# --- the start ------------------------------------------------------------------------------------


@pytest.mark.parametrize("lr", [1e-8, 1e-3, 10.0])
def test_the_first_step_goes_to_the_bottom_of_its_line(lr):
    """On a quadratic loss: theta - g (g^T g) / (g^T H g), whatever the rate."""
    torch.manual_seed(0)
    model = nn.Linear(200, 3, bias=False).double()
    nn.init.normal_(model.weight)  # most of it has no part in the step, which is not far
    batch = x, _ = torch.randn(12, 200).double(), draw(1)[1]
    sgd = torch.optim.SGD(model.parameters(), lr=lr)
    controller = ns.RateController(sgd, model, squared)
    loss = squared(model, batch)
    (g,) = torch.autograd.grad(loss, model.weight)
    H_g = 2 / 36 * g @ (x.T @ x)
    best = g.square().sum() / (g * H_g).sum()
    expected = model.weight.detach() - best * g
    train(model, sgd, controller, [batch], squared)
    assert controller.rates[0] == pytest.approx(float(best), rel=1e-3)
    torch.testing.assert_close(model.weight.detach(), expected, rtol=1e-3, atol=1e-4)
    assert controller.history[0].why == "start"
    assert sgd.param_groups[0]["lr"] == lr


@pytest.mark.parametrize("lr", [1e-8, 10.0])
def test_the_first_step_does_not_go_far(lr):
    """Where the loss falls for long along its line, by 0.3 of the norm of the parameters."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()
    before = torch.cat([p.detach().flatten() for p in model.parameters()])
    sgd = torch.optim.SGD(model.parameters(), lr=lr)
    controller = ns.RateController(sgd, model, lambda model, batch: model(batch[0]).sum())
    train(model, sgd, controller, [draw(1)], lambda model, batch: model(batch[0]).sum())
    after = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert 0.09 < (after - before).norm() / before.norm() < 0.31


@pytest.mark.parametrize("loss_fn", [cross_entropy, squared])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_it_trains_from_any_rate(kind, loss_fn):
    """A ReLU network with either loss learns as well from 1e-5 as from 10, without divergence."""
    losses = []
    for lr in (1e-5, 10.0):
        model = relu_net()
        optimizer = OPTIMIZERS[kind](model.parameters(), lr)
        controller = ns.RateController(optimizer, model, loss_fn)
        start = loss_of_all(model, loss_fn)
        train(model, optimizer, controller, batches(150, 48), loss_fn)
        losses.append(loss_of_all(model, loss_fn) / start)
    assert max(losses) < 0.6
    assert losses[0] == pytest.approx(losses[1], rel=0.3)


def test_the_rate_falls_where_noise_takes_over(monkeypatch):
    """theta follows noisy targets: a constant rate stands still at a distance, this one does not.

    There, a step gains what it loses again: slope = curvature / 2, whatever the rate. So a set
    point above 1/2 lowers the rate, as training needs it.
    """
    monkeypatch.setattr("newton_summary.optimizer.controller.FARTHEST", math.inf)
    generator = torch.Generator().manual_seed(0)

    def follow(model, batch):
        return (model.weight - batch).square().mean() / 2

    def target():
        return torch.randn(1, 50, generator=generator, dtype=torch.float64)

    torch.manual_seed(0)
    model = nn.Linear(50, 1, bias=False).double()
    sgd = torch.optim.SGD(model.parameters(), lr=1e-3)
    controller = ns.RateController(sgd, model, follow)
    train(model, sgd, controller, [target() for _ in range(1500)], follow)
    distance = float(model.weight.detach().square().mean())
    assert distance < 0.15  # a constant rate r stays at r / (2 - r): the best first step at 1
    assert controller.rates[0] < controller.history[1].rate / 5


# --- loops ----------------------------------------------------------------------------------------


def test_rare_measurements_count_for_more(monkeypatch):
    """Half as many measurements bring a rate that is too low to its place in as many steps."""

    def along(self, batch, before, u):  # the best rate is 1
        return 1.0, self._rate, self._rate**2

    def steps_to_recover(period):
        model = nn.Linear(4, 3).double()
        sgd = torch.optim.SGD(model.parameters(), lr=1.0)
        controller = ns.RateController(sgd, model, squared, period=period)
        train(model, sgd, controller, batches(100), squared)
        controller.multiplier = 1e-3
        while controller.multiplier < 1:
            train(model, sgd, controller, batches(1), squared)
        return controller.steps - 100

    monkeypatch.setattr(ns.RateController, "_along", along)
    often, rarely = steps_to_recover(10), steps_to_recover(20)
    monkeypatch.setattr("newton_summary.optimizer.controller.PERIOD", math.inf)
    assert rarely < 1.3 * often < 0.8 * steps_to_recover(20), (often, rarely)


def test_in_a_long_training_the_rate_stays_below_one_that_falls(monkeypatch):
    """Learnt by heart, batches tell nothing about the length of a step, and rates would explode."""
    settled = 60
    monkeypatch.setattr("newton_summary.optimizer.controller.SETTLED", settled)
    data = batches(3) * 80
    for falls in (False, True):
        model = relu_net()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        controller = ns.RateController(optimizer, model, cross_entropy, period=5)
        end = len(data) if falls else math.inf
        schedule = LambdaLR(optimizer, lambda t, end=end: 1 - t / end)
        multipliers = []

        def after(controller=controller, schedule=schedule, multipliers=multipliers):
            multipliers.append(controller.multiplier)
            schedule.step()

        train(model, optimizer, controller, data, after=after)
        top = max(multipliers[: settled + 1])
        late = [r for r in controller.history if r.step > settled]
        assert len(late) > 30
        for r in late:
            most = top if falls else top * math.sqrt((settled + 5) / r.step)
            assert multipliers[r.step] <= most * (1 + 1e-9)
            assert abs(math.log(r.change)) <= 0.5 * settled / r.step + 0.5 * 5 / r.step + 1e-9
        assert any(r.why == "raise" for r in late) == falls


def test_in_a_long_training_the_floor_rises_to_that_rate(monkeypatch):
    """Where samples are forgotten no step lowers the loss of the next batch: that says little."""
    settled, rate = 100, 0.01
    monkeypatch.setattr("newton_summary.optimizer.controller.SETTLED", settled)

    def along(self, batch, before, u):
        slope = self._rate if self.steps <= settled else -self._rate
        return 1.0, slope, self._rate**2 / rate

    monkeypatch.setattr(ns.RateController, "_along", along)
    monkeypatch.setattr(EndSlopes, "take", lambda self, params: None)
    model = nn.Linear(4, 3).double()
    sgd = torch.optim.SGD(model.parameters(), lr=rate)
    controller = ns.RateController(sgd, model, squared)
    train(model, sgd, controller, batches(settled), squared)
    controller.multiplier = controller._envelope
    for steps, floor in ((200, 0.3**0.5), (500, 0.3**0.2)):
        train(model, sgd, controller, batches(steps - controller.steps), squared)
        assert controller.history[-1].slope < 0
        assert controller.multiplier == pytest.approx(floor * controller._envelope, rel=0.06)


def test_the_rate_is_not_blamed_where_short_steps_do_not_help_either():
    """A surely negative slope leaves the floor under the rate where it is."""

    def means(slope, curvature):
        balance = Balance()
        for wave in (0.9, 1.1) * 20:
            balance.add(slope * wave, curvature, rate=1.0, memory=0.9)
        return balance

    assert means(1.0, 4.0).surely_too_long(1.0, 0.9, 2.0)
    assert not means(1.0, 1.0).surely_too_long(1.0, 0.9, 2.0)
    assert not means(-1.0, 4.0).surely_too_long(1.0, 0.9, 2.0)
    unsure = Balance()
    for wave in (-1.0, 1.2) * 20:
        unsure.add(wave, 100.0, rate=1.0, memory=0.9)
    assert not unsure.surely_too_long(1.0, 0.9, 2.0)


def test_a_schedule_sees_its_own_rates_and_multiplies_what_is_found():
    model = make_net()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = LambdaLR(sgd, lambda t: 1 / (1 + t))
    controller = ns.RateController(sgd, model, cross_entropy)
    for t, batch in enumerate(batches(5)):
        sgd.zero_grad()
        cross_entropy(model, batch).backward()
        before = [p.detach().clone() for p in model.parameters()]
        controller.before_step(batch)
        rate = controller.rates[0]
        sgd.step()
        assert sgd.param_groups[0]["lr"] == pytest.approx(0.1 / (1 + t))
        schedule.step()
        if t:
            assert rate == pytest.approx(controller.multiplier * 0.1 / (1 + t))
            for b, p in zip(before, model.parameters()):
                torch.testing.assert_close(p.detach(), b - rate * p.grad)


@pytest.mark.parametrize(
    ("make", "peak"),
    [
        (lambda sgd: StepLR(sgd, 1, 0.1), 0.1),
        (lambda sgd: LinearLR(sgd, 0.01, total_iters=5), 0.1),
        (lambda sgd: OneCycleLR(sgd, 0.5, total_steps=100, cycle_momentum=False), 0.5),
        (lambda sgd: ReduceLROnPlateau(sgd, patience=0), 0.1),
    ],
)
def test_the_peak_of_a_schedule(make, peak):
    """A schedule that begins or ends below its peak does not raise what is found for the peak."""
    found = []
    for scheduled in (False, True):
        model = make_net()
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = make(sgd) if scheduled else None
        controller = ns.RateController(sgd, model, cross_entropy)
        train(model, sgd, controller, batches(1))
        found.append(controller.multiplier * (peak if scheduled else 0.1))
        if schedule is not None:
            for _ in range(3):
                schedule.step(*([1.0] if isinstance(schedule, ReduceLROnPlateau) else []))
            assert controller._peak_lr() == pytest.approx(peak)
    assert found[1] == pytest.approx(found[0], rel=1e-6)


WARM_UPS = {  # the learning rates of a schedule, and what the optimizer is made with
    "from zero": ([0.1 * min(1.0, t / 4) for t in range(16)], 0.1),
    "from the first step": ([0.1 * min(1.0, (t + 1) / 4) for t in range(16)], 0.1),
    "then a decay": ([0.1 * min(1.0, t / 4, (20 - t) / 10) for t in range(16)], 0.1),
    "to a lower peak": ([min(t + 1, (20 - t) / 2) / 100 for t in range(16)], 10.0),
    "below the peak": ([0.1] * 16, 0.4),
    "rounded": ([0.1 * min(1.0, (t + 1) / 11) for t in range(16)], 0.1),  # lr * (0.1 / lr) < 0.1
}


@pytest.mark.parametrize("kind", ["controller", "Adam inside", "SGD inside"])
@pytest.mark.parametrize("name", WARM_UPS)
def test_until_the_peak_of_a_schedule_rates_are_those_of_the_peak(name, kind):
    """The training is that with a schedule that begins at its peak."""
    lrs, made_with = WARM_UPS[name]
    peak = max(lrs)
    from_peak = [peak] * lrs.index(peak) + lrs[lrs.index(peak) :]

    def trained(lrs, made_with):
        model = make_net()
        sgd = torch.optim.SGD(model.parameters(), lr=made_with)
        if kind == "controller":
            optimizer, stepper = sgd, ns.RateController(sgd, model, cross_entropy)
        else:
            direction = torch.optim.SGD(model.parameters(), lr=0.5) if "SGD" in kind else None
            optimizer = ns.NewtonSummary(model, cross_entropy, lr=made_with, direction=direction)
            stepper = optimizer
        for lr, batch in zip(lrs, batches(16), strict=True):
            optimizer.zero_grad()
            cross_entropy(model, batch).backward()
            optimizer.param_groups[0]["lr"] = lr
            stepper.step(batch)
            assert optimizer.param_groups[0]["lr"] == lr
        rates = stepper.rates if kind == "controller" else [float(stepper.eta[0]) * lr]
        return torch.cat([p.detach().flatten() for p in model.parameters()]), rates

    (found, rate), (expected, expected_rate) = trained(lrs, made_with), trained(from_peak, peak)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    assert rate == pytest.approx(expected_rate, rel=1e-9)


@pytest.mark.parametrize("direction", [False, True])
def test_eta_is_that_of_each_step_of_a_warm_up(direction):
    """The learning rate of a step is lr * eta, also between two refreshes."""
    model = make_net()
    sgd = torch.optim.SGD(model.parameters(), lr=0.5)
    opt = ns.NewtonSummary(model, cross_entropy, direction=sgd if direction else None)
    schedule = LambdaLR(opt, lambda t: min((t + 1) / 12, (30 - t) / 30))
    for batch in batches(20):
        opt.zero_grad()
        cross_entropy(model, batch).backward()
        opt.step(batch)
        if opt.history[-1].step < opt._steered.steps:  # else it is that of the next step
            used = opt._steered._rate / (0.5 if direction else 1.0)
            assert opt.param_groups[0]["lr"] * opt.param_groups[0]["eta"] == pytest.approx(used)
        schedule.step()


def body_and_head(body_lr, steps):
    """A body that is fine-tuned at a constant rate, and a new head that warms up."""
    model = make_net()
    body, *head = model.parameters()
    sgd = torch.optim.SGD([{"params": [body], "lr": body_lr}, {"params": head, "lr": 1e-1}])
    schedule = LambdaLR(sgd, [lambda t: 1.0, lambda t: min(1.0, t / steps)])
    return sgd, schedule, ns.RateController(sgd, model, cross_entropy)


def test_a_group_without_a_warm_up_is_not_above_its_own_peak():
    sgd, schedule, controller = body_and_head(1e-3, steps=4)
    assert controller.rates == [1e-3, 0.0]
    for _ in range(6):
        schedule.step()
        assert controller.rates == pytest.approx([1e-3, 1e-1])
    sgd.param_groups[0]["lr"] = 0.0  # by hand
    assert controller.rates == pytest.approx([0.0, 1e-1])


def test_each_group_is_at_its_own_peak_during_a_warm_up():
    """Also where another group is at a constant rate above the present one."""
    _, schedule, controller = body_and_head(1e-2, steps=50)
    schedule.step()
    assert controller.rates == pytest.approx([1e-2, 1e-1])


def test_rates_are_those_of_a_schedule_that_begins_above_its_first_rate():
    model = make_net()
    sgd = torch.optim.SGD(model.parameters(), lr=1e-3)
    LambdaLR(sgd, lambda t: 5 * 0.9**t)
    controller = ns.RateController(sgd, model, cross_entropy)
    assert controller.rates == pytest.approx([5e-3])
    train(model, sgd, controller, batches(1))
    assert controller.history[0].rate == pytest.approx(5e-3)


@pytest.mark.parametrize("warm_up", [1, 12])
def test_a_rate_that_is_a_float32_tensor_is_steered_as_a_number_is(warm_up):
    """It is rounded, which is not below the peak of a schedule."""

    def trained(lr):
        model = make_net()
        adam = torch.optim.Adam(model.parameters(), lr=lr)
        controller = ns.RateController(adam, model, cross_entropy)
        schedule = LambdaLR(adam, lambda t: min(1.0, (t + 1) / warm_up))
        train(model, adam, controller, batches(30), after=schedule.step)
        return controller.rates

    assert trained(torch.tensor(1e-3)) == pytest.approx(trained(1e-3), rel=1e-5)


def test_a_parameter_group_may_be_added_during_a_warm_up():
    model = make_net()
    first, *others = model.parameters()
    sgd = torch.optim.SGD([first], lr=0.1)
    sgd.param_groups[0]["initial_lr"] = 0.2  # what a schedule rises to
    controller = ns.RateController(sgd, model, cross_entropy)
    train(model, sgd, controller, batches(2))
    found = 2 * 0.1 * controller.multiplier
    sgd.add_param_group({"params": others, "lr": 0.01})
    assert controller.rates == pytest.approx([found, 0.05 * found])
    own, *more = (twin := make_net()).parameters()
    resumed = torch.optim.SGD([{"params": [own]}, {"params": more}], lr=0.1)
    resumed.load_state_dict(sgd.state_dict())
    resumed = ns.RateController(resumed, twin, cross_entropy)
    resumed.load_state_dict(controller.state_dict())  # saved before the next step
    assert resumed.rates == controller.rates
    before = others[0].detach().clone()
    sgd.step()  # not preceded by a batch
    torch.testing.assert_close(others[0].detach(), before - 0.05 * found * others[0].grad)


def test_clipped_steps_are_measured_as_they_are():
    model = make_net()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    controller = ns.RateController(sgd, model, cross_entropy, period=1)
    for batch in batches(4):
        sgd.zero_grad()
        cross_entropy(model, batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        before = copy.deepcopy(model)
        controller.step(batch)
    rate = controller.rates[0]
    batch = draw(60)
    controller.before_step(batch)
    grads = torch.autograd.grad(cross_entropy(before, batch), list(before.parameters()))
    d = [(b - p).detach() for b, p in zip(before.parameters(), model.parameters())]
    slope = sum((g * x).sum() for g, x in zip(grads, d))
    length = math.sqrt(sum(float(x.square().sum()) for x in d))
    assert length == pytest.approx(1e-3 * rate, rel=1e-6)
    assert controller.history[-1].slope == pytest.approx(float(slope), rel=1e-9)


def test_a_grad_scaler_changes_nothing():
    """Not even a skipped step does: gradients that overflow at first, as they often do."""
    results = []
    for enabled in (False, True):
        model = make_net()
        adam = torch.optim.Adam(model.parameters(), lr=1e-4)
        controller = ns.RateController(adam, model, cross_entropy, period=2)
        scaler = torch.amp.GradScaler("cpu", enabled=enabled, init_scale=2.0**10)
        for i, batch in enumerate(batches(12)):
            adam.zero_grad()
            scaler.scale(cross_entropy(model, batch)).backward()
            if i == 5:
                if not enabled:
                    continue
                next(model.parameters()).grad.fill_(math.inf)
            controller.before_step(batch)
            scaler.step(adam)
            scaler.update()
        results.append([p.detach().clone() for p in model.parameters()])
        assert controller.steps == 11
    # The skipped batch may be the one that a step was measured on, so only nearly the same.
    for a, b in zip(*results):
        torch.testing.assert_close(a, b, rtol=0.2, atol=0.1)


def test_accumulated_batches_are_measured_together():
    results = []
    for parts in (1, 3):
        model = make_net()
        adam = torch.optim.Adam(model.parameters(), lr=1e-4)
        controller = ns.RateController(adam, model, cross_entropy, period=2)
        for batch in batches(8):
            pieces = list(zip(*(t.chunk(parts) for t in batch)))
            adam.zero_grad()
            for piece in pieces:
                (cross_entropy(model, piece) / parts).backward()
            controller.step(pieces)
        results.append(controller)
    for a, b in zip(*(controller.history for controller in results)):
        assert a.slope == pytest.approx(b.slope, rel=1e-8)
        assert a.curvature == pytest.approx(b.curvature, rel=1e-6)


def test_several_groups_share_a_multiplier_and_frozen_parameters_stay():
    model = make_net()
    weights = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    others[0].requires_grad_(False)
    left_out = others.pop()  # trained by nobody
    groups = [{"params": weights, "lr": 1e-3}, {"params": others, "lr": 1e-2}]
    adam = torch.optim.Adam(groups)
    still = [others[0].detach().clone(), left_out.detach().clone()]
    controller = ns.RateController(adam, model, cross_entropy)
    train(model, adam, controller, batches(15))
    assert controller.rates[1] == pytest.approx(10 * controller.rates[0])
    assert torch.equal(others[0], still[0]) and torch.equal(left_out, still[1])
    assert loss_of_all(model) < loss_of_all(make_net())


@pytest.mark.parametrize("at", [0, 20])
def test_parameters_can_be_frozen_and_thawed_while_it_steers(at):
    model = make_net()
    adam = torch.optim.Adam(model.parameters(), lr=1e-5)
    controller = ns.RateController(adam, model, cross_entropy)
    train(model, adam, controller, batches(at))
    model[0].requires_grad_(False)
    adam.zero_grad()
    still = model[0].weight.detach().clone()
    train(model, adam, controller, batches(20))
    assert torch.equal(model[0].weight, still) and not model[0].weight.requires_grad
    measured = len(controller.history)
    assert controller.history[-1].step > at
    model[0].requires_grad_(True)
    train(model, adam, controller, batches(20))
    assert len(controller.history) > measured and not torch.equal(model[0].weight, still)
    assert loss_of_all(model) < loss_of_all(make_net())


@pytest.mark.parametrize("at", [0, 1, 7])
@pytest.mark.parametrize("add", [False, True])
def test_parameters_that_were_frozen_at_first_are_part_of_the_step_that_is_measured(add, at):
    """Also if a new parameter group holds them; and if they are thawed before the first step."""
    model, twin = make_net(), make_net()
    model[0].requires_grad_(False)
    adam = torch.optim.Adam(model[2:].parameters() if add else model.parameters(), lr=1e-3)
    controller = ns.RateController(adam, model, cross_entropy, period=1)
    train(model, adam, controller, batches(at))
    model[0].requires_grad_(True)
    if add:
        adam.add_param_group({"params": list(model[0].parameters()), "lr": 2e-3})
    train(model, adam, controller, batches(3))
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        q.data.copy_(p.data)
    batch = batches(4)[3]
    train(model, adam, controller, [batch])  # measured on the next batch
    taken = [q.detach() - p.detach() for q, p in zip(twin.parameters(), model.parameters())]
    following = batches(5)[4]
    controller.before_step(following)
    grads = torch.autograd.grad(cross_entropy(twin, following), list(twin.parameters()))
    expected = sum(float((g * u).sum()) for g, u in zip(grads, taken, strict=True))
    assert controller.history[-1].slope == pytest.approx(expected)


def test_parameters_that_the_optimizer_did_not_hold_may_be_given_to_it():
    """They required gradients before: the new group alone tells that they move from now on."""
    model = make_net()
    adam = torch.optim.Adam(model[2:].parameters(), lr=1e-3)
    controller = ns.RateController(adam, model, cross_entropy, period=1)
    train(model, adam, controller, batches(5))
    adam.add_param_group({"params": list(model[0].parameters())})
    train(model, adam, controller, batches(3))
    before = [p.detach().clone() for p in model.parameters()]
    train(model, adam, controller, batches(1))  # measured on the next batch
    taken = [b - p.detach() for b, p in zip(before, model.parameters(), strict=True)]
    assert bool(taken[0].any())
    twin, following = make_net(), batches(5)[4]
    for q, b in zip(twin.parameters(), before, strict=True):
        q.data.copy_(b)
    controller.before_step(following)
    grads = torch.autograd.grad(cross_entropy(twin, following), list(twin.parameters()))
    expected = sum(float((g * u).sum()) for g, u in zip(grads, taken, strict=True))
    assert controller.history[-1].slope == pytest.approx(expected)


@pytest.mark.parametrize("thawed", ["before", "after"])
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("later", [1, 2, 8, 9])
def test_training_goes_on_where_parameters_were_thawed(add, thawed, later):
    """Bit for bit if they are thawed again before the state is loaded; afterwards is no error."""

    def build():
        model = make_net()
        model[0].requires_grad_(False)
        adam = torch.optim.Adam(model[2:].parameters() if add else model.parameters(), lr=1e-3)
        return model, adam, ns.RateController(adam, model, cross_entropy)

    def thaw(model, adam):
        model[0].requires_grad_(True)
        if add:
            adam.add_param_group({"params": list(model[0].parameters()), "lr": 2e-3})

    data = batches(40)
    model, adam, controller = build()
    train(model, adam, controller, data[:15])
    thaw(model, adam)
    train(model, adam, controller, data[15 : 15 + later])
    states = copy.deepcopy([x.state_dict() for x in (model, adam, controller)])
    train(model, adam, controller, data[15 + later :])

    resumed, adam, other = build()
    if add or thawed == "before":  # Adam's own state has the new group
        thaw(resumed, adam)
    for part, state in zip((resumed, adam, other), states, strict=True):
        part.load_state_dict(state)
    resumed[0].requires_grad_(True)
    train(resumed, adam, other, data[15 + later :])
    assert other.history[-1].step > 15 + later
    if (thawed == "before" or add) and later > 2:  # once they are included
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), resumed.parameters()))


def test_parameters_that_are_not_finite_are_told():
    model = make_net()
    adam = torch.optim.Adam(model.parameters())
    controller = ns.RateController(adam, model, cross_entropy, period=1)
    x, y = draw(4)
    train(model, adam, controller, [*batches(3), (x * math.nan, y)])
    with pytest.warns(UserWarning, match="are nan or infinite after the last step"):
        controller.before_step(batches(1)[0])


def test_steps_without_a_batch_are_taken_and_not_measured():
    model = make_net()
    adam = torch.optim.Adam(model.parameters())
    controller = ns.RateController(adam, model, cross_entropy, period=1)
    train(model, adam, controller, batches(3))
    measured = len(controller.history)
    with pytest.warns(UserWarning, match="the model moves twice"):
        adam.step()
    for _ in range(3):
        adam.step()
    controller.before_step(draw(3))
    assert len(controller.history) == measured and controller.steps == 7


# --- checkpoints ----------------------------------------------------------------------------------


def test_a_loss_without_a_batch_is_measured():
    """``summarize(model, loss_fn, None)`` will do; so will None here."""
    x, _ = draw(0)
    model = nn.Linear(x.shape[1], 1).double()
    sgd = torch.optim.SGD(model.parameters(), lr=1e-6)
    controller = ns.RateController(sgd, model, lambda model, _: model(x).square().mean())
    for _ in range(3):
        sgd.zero_grad()
        model(x).square().mean().backward()
        controller.step(None)
    assert [record.step for record in controller.history] == [1, 2]


@pytest.mark.parametrize("at", [1, 2, 7, 12])
def test_resumes_bit_for_bit(at, tmp_path):
    """Also between a step and its measurement on the next batch."""

    def build():
        model = make_net()
        adam = torch.optim.Adam(model.parameters(), lr=1e-4)
        schedule = StepLR(adam, 4, 0.5)
        return model, adam, schedule, ns.RateController(adam, model, cross_entropy, period=3)

    data = batches(20)
    model, adam, schedule, controller = build()
    train(model, adam, controller, data[:at], after=schedule.step)
    torch.save([x.state_dict() for x in (model, adam, schedule, controller)], tmp_path / "x.pt")
    train(model, adam, controller, data[at:], after=schedule.step)
    expected = list(model.parameters()), controller.history

    model, adam, schedule, controller = parts = build()
    for part, state in zip(parts, torch.load(tmp_path / "x.pt", weights_only=True)):
        part.load_state_dict(state)
    train(model, adam, controller, data[at:], after=schedule.step)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected[0]))
    assert repr(controller.history) == repr(expected[1])


def test_wrong_states_are_refused():
    model = make_net()
    controller = ns.RateController(torch.optim.Adam(model.parameters()), model, cross_entropy)
    with pytest.raises(ValueError, match="Not a RateController state_dict"):
        controller.load_state_dict({"multiplier": 1.0})
    other = relu_net()
    others = ns.RateController(torch.optim.Adam(other.parameters()), other, cross_entropy)
    train(other, others.optimizer, others, batches(2))
    with pytest.raises(ValueError, match="other parameters"):
        controller.load_state_dict(others.state_dict())
    two = [{"params": p} for p in other.parameters()]
    others = ns.RateController(torch.optim.Adam(two), other, cross_entropy)
    with pytest.raises(ValueError, match="4 parameter groups, but this one has 1"):
        controller.load_state_dict(others.state_dict())


# --- ranks ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("way", ["ddp", "fsdp", "callback"])
def test_two_ranks_do_what_one_process_does(way, tmp_path_factory):
    ranks = run_once(steer_all, 2, tmp_path_factory)
    one = steer(make_net(), lambda batch: batch)
    for found in (rank[way] for rank in ranks):
        assert found["rates"] == ranks[0][way]["rates"]  # to the last bit
        assert found["rates"] == pytest.approx(one["rates"], rel=1e-6)
        for a, b in zip(found["params"], one["params"]):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


# --- wrong use, and what it shows -----------------------------------------------------------------


def test_a_detached_controller_leaves_the_optimizer_alone():
    """Also after a step that was interrupted; another controller may follow."""
    net, plain = relu_net(), relu_net()
    adam = torch.optim.Adam(net.parameters(), lr=1e-3)
    controller = ns.RateController(adam, net, cross_entropy)
    train(net, adam, controller, batches(5))
    interrupt = adam.register_step_pre_hook(lambda *_: 1 / 0)
    controller.before_step(batches(1)[0])
    with pytest.raises(ZeroDivisionError):
        adam.step()
    interrupt.remove()
    assert adam.param_groups[0]["lr"] != 1e-3
    controller.detach()
    plain.load_state_dict(net.state_dict())
    other = torch.optim.Adam(plain.parameters(), lr=1e-3)
    other.load_state_dict(copy.deepcopy(adam.state_dict()))
    for model, optimizer in ((net, adam), (plain, other)):
        assert optimizer.param_groups[0]["lr"] == 1e-3
        for batch in batches(3):
            optimizer.zero_grad()
            cross_entropy(model, batch).backward()
            optimizer.step()
    assert all(map(torch.equal, net.parameters(), plain.parameters()))
    assert controller.steps == 5
    assert repr(controller).endswith(", step 5, detached)") and "learning rate was" in str(
        controller
    )
    with pytest.raises(RuntimeError, match=r"detached: call optimizer.step\(\)"):
        controller.step(batches(1)[0])
    train(net, adam, ns.RateController(adam, net, cross_entropy), batches(2))


def test_mistakes_are_explained():
    model = make_net()
    adam = torch.optim.Adam(model.parameters())
    with pytest.raises(TypeError, match="expected the torch optimizer"):
        ns.RateController(model, adam, cross_entropy)
    with pytest.raises(ValueError, match="belongs to another model"):
        ns.RateController(adam, make_net(), cross_entropy)
    with pytest.raises(TypeError, match="takes outputs and targets"):
        ns.RateController(adam, model, F.cross_entropy)
    for options in ({"period": 0}, {"set_point": 0.0}, {"gain": -1.0}, {"memory": 1.0}):
        with pytest.raises(ValueError, match=next(iter(options))):
            ns.RateController(adam, model, cross_entropy, **options)
    ns.RateController(adam, model, cross_entropy)
    with pytest.raises(ValueError, match="already has a RateController"):
        ns.RateController(adam, model, cross_entropy)


def test_a_loss_that_is_not_finite_halves_the_rate():
    model = make_net()
    adam = torch.optim.Adam(model.parameters())
    controller = ns.RateController(adam, model, cross_entropy, period=1)
    train(model, adam, controller, batches(3))
    rate = controller.rates[0]
    x, y = draw(4)
    controller.before_step((x * math.nan, y))
    assert controller.history[-1].why == "not finite"
    assert controller.rates[0] == rate / 2


def test_it_prints_its_record():
    model = make_net()
    adam = torch.optim.Adam(model.parameters())
    controller = ns.RateController(adam, model, cross_entropy)
    assert str(controller) == repr(controller)
    train(model, adam, controller, batches(4))
    header, *lines = str(controller).splitlines()
    assert header.split()[0] == "step" and len(lines) == len(controller.history) + 3
    assert lines[-3].startswith("factor: ") and "to 0.8 (0.54 below the peak" in lines[-2]
    assert lines[-1].startswith("after 4 steps the learning rate is")
    assert repr(controller).startswith("RateController(Adam, lr ")


@pytest.mark.parametrize(("factor", "told"), [(2.0, True), (math.inf, False), (math.nan, False)])
def test_the_console_tells_a_factor_that_is_a_number(factor, told):
    model = make_net()
    controller = ns.RateController(torch.optim.Adam(model.parameters()), model, cross_entropy)
    controller.history.append(ns.RateRecord(3, 1e-3, 0.9, 0.2, 0.1, factor, 1.1, "raise"))
    assert ("raise, the best step was x2)" in steering(controller)) == told
    assert "raise)" in steering(controller) or told


def test_the_console_tells_a_schedule_that_has_ended():
    model = make_net()
    adam = torch.optim.Adam(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(adam, 1.0, 0.0, total_iters=4)
    controller = ns.RateController(adam, model, cross_entropy)
    for batch in batches(4):
        adam.zero_grad()
        cross_entropy(model, batch).backward()
        assert steering(controller).startswith("steered: lr ")
        controller.step(batch)
        schedule.step()
    assert steering(controller) == "steered: the schedule is at 0"


def test_it_prints_a_rate_that_many_groups_share_once():
    """As after advice for each tensor."""
    model = make_net()
    names = dict(model.named_parameters())
    adam = torch.optim.Adam([{"params": [p]} for p in names.values()], lr=1e-3)
    adam.param_groups[0]["lr"] = 1e-4
    controller = ns.RateController(adam, model, cross_entropy)
    assert len(names) > 2 and repr(controller) == "RateController(Adam, lr 0.0001, 0.001, step 0)"
    assert steering(controller) == "steered: lr 0.0001, 0.001"
    train(model, adam, controller, batches(4))
    assert str(controller).splitlines()[-1].count(",") == 1


def test_the_page_shows_its_record(tmp_path):
    model = make_net()
    adam = torch.optim.Adam(model.parameters())
    controller = ns.RateController(adam, model, cross_entropy)
    train(model, adam, controller, batches(4))
    history = controller.to_history()
    assert history.curves["loss"] == [(r.step, r.loss) for r in controller.history]
    rates = [(r.step, r.rate * r.change) for r in controller.history]
    assert history.curves["learning rate"] == rates
    assert rates[-1][1] == pytest.approx(controller.rates[0])
    history.save(tmp_path / "steered.pt")
    assert ns.History.load(tmp_path / "steered.pt").unit == "step"
    assert "Adam, steered" in ns.report(controller, tmp_path / "page.html").read_text()

    newton = ns.NewtonSummary(ns.make_partition(model), cross_entropy)
    for batch in batches(4):
        newton.zero_grad()
        cross_entropy(model, batch).backward()
        newton.step(batch)
    history = newton.to_history()
    assert history.epochs == [newton.history[-1].step]
    assert torch.equal(history.measured[0].summary.Hbar, newton.last_summary.Hbar)
    assert "NewtonSummary, steered" in ns.report(newton, tmp_path / "page.html").read_text()


def test_a_single_group_shows_the_rate_it_is_steered_to(tmp_path):
    """Not that of the last batch alone, which may be negative."""
    newton = ns.NewtonSummary(model := make_net(), cross_entropy)
    for batch in batches(4):
        newton.zero_grad()
        cross_entropy(model, batch).backward()
        newton.step(batch)
    (measured,) = newton.to_history().measured
    assert torch.equal(measured.eta, newton.eta) and measured.status == "steered"
    rate = newton.last_rates.eta
    newton._last_rates = replace(newton.last_rates, eta=-rate, status="saddle")
    page = ns.report(newton, tmp_path / "page.html").read_text()
    assert "Do not use the learning rates" not in page


@pytest.mark.parametrize("dropout", [False, True])
def test_newton_summary_uses_the_gradient_that_is_there(dropout):
    """One evaluation of the loss a refresh, not two, where that of the training is the same."""
    torch.manual_seed(0)
    layers = [nn.Dropout(0.5)] if dropout else []
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), *layers, nn.Linear(16, 3)).double()
    calls = []

    def counted(model, batch):
        calls.append(batch)
        return cross_entropy(model, batch)

    opt = ns.NewtonSummary(model, counted)
    counts = []
    for batch in batches(160):
        opt.zero_grad()
        cross_entropy(model, batch).backward()
        before, seen = len(calls), len(opt.history)
        opt.step(batch)
        if len(opt.history) > seen:
            counts.append(len(calls) - before)
    later = counts[6:]  # after the start, and the refreshes that compare
    once = [number % 8 != 0 for number in range(6, len(counts))]
    assert later == [2 if dropout or not alone else 1 for alone in once]


# --- limits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("set_point", "below"), [(1.0, 0.74), (0.65, 0.54), (0.5, 0.5)])
def test_below_the_peak_of_a_schedule_the_set_point_is_lower(monkeypatch, set_point, below):
    """The end of the schedule makes good again what longer steps do to the noise."""
    asked, error = [], Balance.error

    def noting(self, rate, set_point, memory):
        asked.append(set_point)
        return error(self, rate, set_point, memory)

    monkeypatch.setattr(Balance, "error", noting)
    model = relu_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    controller = ns.RateController(optimizer, model, cross_entropy, period=1, set_point=set_point)
    schedule = LambdaLR(optimizer, lambda step: 1.0 if step < 4 else 0.8)
    train(model, optimizer, controller, batches(8), after=schedule.step)
    assert set(asked) == {set_point, below} and asked == sorted(asked, reverse=True)


def test_a_first_step_uphill_is_a_short_one():
    model, batch = relu_net(), batches(1)[0]
    grads = torch.autograd.grad(cross_entropy(model, batch), list(model.parameters()))
    slope, size = (nn.utils.parameters_to_vector(x).norm() for x in (grads, model.parameters()))
    optimizer = torch.optim.SGD(model.parameters(), lr=10.0)
    controller = ns.RateController(optimizer, model, cross_entropy, period=1)
    optimizer.param_groups[0]["maximize"] = True  # refused where a controller is made
    train(model, optimizer, controller, [batch, batch])
    start = controller.history[0]
    assert start.why == "start" and start.slope < 0 and start.factor == 0
    assert start.change * 10.0 * float(slope) == pytest.approx(1e-3 * float(size), rel=1e-6)


# --- SGD, whose steps are as long as its gradient -------------------------------------------------


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_sgd_does_not_kill_a_network_with_relu(seed):
    """Counted alike, steps that lead back from where the loss has gone up made the rate rise."""
    torch.manual_seed(seed)
    x = torch.randn(400, 6)
    y = x[:, :3].argmax(1)
    layers = (nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3))
    model = nn.Sequential(*layers)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    controller = ns.RateController(sgd, model, cross_entropy)
    data = [(x[i], y[i]) for i in (torch.randint(400, (64,)) for _ in range(300))]
    train(model, sgd, controller, data)
    assert float(cross_entropy(model, (x, y)).detach()) < 0.1  # a constant has 1.1


def steered_sgd(monkeypatch, losses, lr=0.1, momentum=0.0):
    """Steer SGD along a line whose slope and curvature call for longer steps, with these losses."""
    left = iter(losses)

    def along(self, batch, before, u):
        return next(left), self._rate, 1e-4 * self._rate**2

    monkeypatch.setattr(ns.RateController, "_along", along)
    monkeypatch.setattr(EndSlopes, "take", lambda self, params: None)
    model = make_net()
    sgd = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    controller = ns.RateController(sgd, model, cross_entropy, period=1)
    for batch in batches(len(losses) + 1):
        sgd.zero_grad()
        cross_entropy(model, batch).backward()
        for p in model.parameters():
            p.grad.clamp_(-1e-3, 1e-3)  # so that nothing else limits the rate
        controller.step(batch)
    return controller


def test_a_burst_of_the_loss_halves_the_rate_of_sgd(monkeypatch):
    """Beyond three times the usual loss, and above the first."""
    controller = steered_sgd(monkeypatch, [1.0, 1.2, 1.1, 9.0, 1.0, 3.0])
    changes = [record.change for record in controller.history[1:]]
    assert changes[3] == pytest.approx(0.5)
    assert all(change > 0.5 for i, change in enumerate(changes) if i != 3)
    calm = steered_sgd(monkeypatch, [0.01, 0.01, 0.02, 0.5, 0.01])  # all below the first
    assert all(record.change > 0.5 for record in calm.history[1:])


def test_the_rate_is_not_raised_before_the_velocity_has_built_up(monkeypatch):
    controller = steered_sgd(monkeypatch, [1.0] * 12, momentum=0.75)
    raised = [record.step for record in controller.history if record.why == "raise"]
    assert raised and min(raised) == 6
    plain = steered_sgd(monkeypatch, [1.0] * 12)
    assert plain.history[1].why == "raise"
