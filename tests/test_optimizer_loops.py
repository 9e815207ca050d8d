"""NewtonSummary inside real loops: closures, scalers, frozen layers, bad gradients, bad input."""

from __future__ import annotations

import inspect
import itertools
import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import newton_summary as ns
from newton_summary.optimizer.rates import solve
from newton_summary.summary import Summary
from test_optimizer import (
    CURVATURE,
    MODES,
    TRAIN,
    _seed_and_strict_warnings,  # noqa: F401
    flat,
    loss_fn,
    make_batches,
    make_net,
    make_optimizer,
    quadratic_loss,
    quiet,
    step_quadratic,
    train,
)

# --- closures -------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_a_curvature_closure_does_what_curvature_data_does(mode):
    """With one warm-up refresh both ways measure the same batches."""
    one, other = make_net(), make_net()
    options = {"lr": 0.1, "warmup": 1, "summary_period": 3, **MODES[mode]}
    with_data = make_optimizer(one, **options)
    with_closure = make_optimizer(other, curvature=None, **options)
    batches, returned = iter(CURVATURE * 4), []

    def run():
        train(one, with_data, 12)
        for t in range(12):
            with_closure.zero_grad()
            loss_fn(other, TRAIN[t % len(TRAIN)]).backward()
            due, closure = with_closure.refresh_due, None
            if due:
                batch = next(batches)
                closure = lambda batch=batch: loss_fn(other, batch)  # noqa: E731
            returned.append((due, with_closure.step(closure)))

    quiet(run)
    assert torch.equal(flat(one), flat(other))
    assert with_closure.last_summary.reason is None  # the checks of the closure disturb no backend
    assert all((loss is not None) == due for due, loss in returned)
    assert [due for due, _ in returned] == [t % 3 == 0 for t in range(12)]


def test_a_curvature_closure_warms_up_over_the_first_steps():
    """It brings one batch a step, so the first three steps measure and do not move."""
    model, moved = make_net(), []
    opt = make_optimizer(model, curvature=None, lr=0.1, warmup=3)
    for t in range(5):
        before = flat(model)
        opt.zero_grad()
        loss_fn(model, TRAIN[t]).backward()
        quiet(lambda t=t: opt.step(lambda: loss_fn(model, CURVATURE[t])))
        moved.append(not torch.equal(flat(model), before))
    assert moved == [False, False, True, True, True]
    assert opt.refreshes == 3


def test_with_curvature_data_a_closure_has_torchs_meaning():
    """As Lightning calls it: the closure makes the gradients and returns the training loss."""
    one, other = make_net(), make_net()
    plain, closing = make_optimizer(one), make_optimizer(other)
    train(one, plain, 4)
    for t in range(4):

        def closure(t=t):
            closing.zero_grad()
            loss = loss_fn(other, TRAIN[t])
            loss.backward()
            return loss

        loss = closing.step(closure)
        assert loss.requires_grad
    assert torch.equal(flat(one), flat(other))


@pytest.mark.parametrize(
    ("closure", "message"),
    [
        (lambda model: None, "returned NoneType"),
        (lambda model: 1.0, "returned float"),
        (lambda model: loss_fn(model, TRAIN[0]).detach(), "detached"),
        (lambda model: loss_fn(model, TRAIN[0]).backward(), "called backward"),
    ],
)
def test_closures_that_return_no_loss_are_refused(closure, message):
    model = make_net()
    opt = make_optimizer(model, curvature=None)
    loss_fn(model, TRAIN[0]).backward()
    with pytest.raises((ValueError, TypeError), match=message):
        opt.step(lambda: closure(model))


def test_a_refresh_without_anything_to_measure_is_refused():
    model = make_net()
    opt = make_optimizer(model, curvature=None)
    loss_fn(model, TRAIN[0]).backward()
    with pytest.raises(ValueError, match="nothing to measure it on"):
        opt.step()


# --- what people do with gradients ----------------------------------------------------------------


def test_clipping_and_accumulation_are_what_they_are_for_sgd():
    """u is made of what is in .grad when step is called."""
    model = make_net()
    opt = make_optimizer(model)
    sums = torch.zeros_like(flat(model))
    for t in range(3):
        opt.zero_grad()
        for batch in TRAIN[2 * t : 2 * t + 2]:
            (loss_fn(model, batch) / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        grad = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
        assert grad.norm() <= 0.0101
        sums = 0.9 * sums + grad
        quiet(opt.step)
    buffers = [opt.state[p]["momentum_buffer"].reshape(-1) for p in model.parameters()]
    torch.testing.assert_close(torch.cat(buffers), sums, rtol=1e-12, atol=1e-14)


def test_grad_scaler_and_autocast():
    """A scaled loss in bfloat16; a step with an overflow is left out by the scaler."""
    model = make_net(torch.float32)
    batches = make_batches(4, seed=1, dtype=torch.float32)

    def half_loss(model, batch):
        with torch.autocast("cpu", torch.bfloat16):
            return F.cross_entropy(model(batch[0]).float(), batch[1])

    opt = make_optimizer(model, lr=0.1, summary_period=1, curvature=(half_loss, batches))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    start = flat(model)
    for t, batch in enumerate(batches):
        opt.zero_grad()
        scaler.scale(half_loss(model, batch)).backward()
        if t == 2:
            model[0].weight.grad[0, 0] = float("inf")
        before = flat(model)
        quiet(lambda: scaler.step(opt))
        scaler.update()
        assert torch.equal(before, flat(model)) == (t == 2)
    assert torch.isfinite(flat(model)).all() and not torch.equal(start, flat(model))
    assert opt.skipped_steps == 0  # the scaler has seen to it


@pytest.mark.parametrize("partition", ["canonical", "trivial"])
def test_unused_and_frozen_parameters(partition):
    """An unused one decays, one that is frozen during training does not move."""
    model = make_net()
    model.unused = nn.Parameter(torch.ones(3, dtype=torch.float64))

    def with_unused(model, batch):
        return loss_fn(nn.Sequential(*list(model.children())[:3]), batch)

    opt = make_optimizer(
        model,
        lr=0.1,
        partition=partition,
        summary_period=2,
        curvature=(with_unused, CURVATURE),
    )

    def run(steps, start):
        for t in range(start, start + steps):
            opt.zero_grad()
            with_unused(model, TRAIN[t % 7]).backward()
            opt.step()

    quiet(lambda: run(5, 0))
    assert torch.equal(model.unused.detach(), torch.ones(3, dtype=torch.float64))
    model[0].weight.requires_grad_(False)
    frozen, other = model[0].weight.detach().clone(), model[2].weight.detach().clone()
    quiet(lambda: run(5, 5))
    assert torch.equal(model[0].weight.detach(), frozen)
    assert not torch.equal(model[2].weight.detach(), other)
    assert not model[0].weight.requires_grad and torch.isfinite(flat(model)).all()
    model[0].weight.requires_grad_(True)
    quiet(lambda: run(3, 10))
    assert not torch.equal(model[0].weight.detach(), frozen)


@pytest.mark.parametrize("direction", [None, torch.optim.Adam])
def test_a_layer_can_be_added_later(direction):
    """An unfrozen layer becomes one more group, and the averages start anew."""
    model = make_net()
    model[0].requires_grad_(False)
    part = ns.make_partition(model)
    given = None if direction is None else direction(part.params.values(), lr=0.01)
    opt = ns.NewtonSummary(
        part, lr=0.1, summary_period=2, curvature=(loss_fn, CURVATURE), direction=given
    )
    quiet(lambda: train(model, opt, 3))
    start = model[0].weight.detach().clone()
    buffer = None if given else opt.state[model[2].weight]["momentum_buffer"].clone()
    model[0].requires_grad_(True)
    opt.add_param_group({"params": model[0].parameters(), "name": "first", "lr": 0.2})
    assert opt.partition.names == ("2.weight", "2.bias", "first")
    assert opt.param_groups[-1]["name"] == "first" and opt.param_groups[-1]["lr"] == 0.2
    assert opt.eta[:2].tolist() == [group["eta"] for group in opt.param_groups[:2]]
    before = opt.refreshes
    quiet(lambda: train(model, opt, 1, start=3))
    assert opt.refreshes == before + 3 and len(opt.eta) == 3
    if direction is None:
        u = opt.state[model[2].weight]["momentum_buffer"]
        torch.testing.assert_close(u, 0.9 * buffer + model[2].weight.grad)
    else:
        assert len(given.state) == 4
    quiet(lambda: train(model, opt, 20, start=4))
    assert not torch.equal(model[0].weight.detach(), start)
    with pytest.raises(ValueError, match="in the partition already"):
        opt.add_param_group({"params": [model[0].bias], "name": "again"})
    with pytest.raises(ValueError, match="not a parameter of the model"):
        opt.add_param_group({"params": [torch.zeros(2, requires_grad=True)], "name": "other"})


def test_a_group_can_be_added_to_divided_tensors():
    model = make_net()
    model[0].requires_grad_(False)
    opt = make_optimizer(model, partition="discrete")
    quiet(lambda: train(model, opt, 1))
    model[0].requires_grad_(True)
    opt.add_param_group({"params": model[0].parameters(), "name": "first"})
    quiet(lambda: train(model, opt, 2, start=1))
    assert opt.param_groups[0]["eta"].shape == (len(opt.partition),) == (13,)


@pytest.mark.parametrize("mode", MODES)
def test_several_dtypes_and_memory_formats(mode):
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(16, 2))
    model[0].to(memory_format=torch.channels_last)
    model[3].double()

    def loss(model, batch):
        return F.cross_entropy(model[3](model[:3](batch[0]).double()), batch[1])

    batches = [(torch.randn(8, 2, 4, 4), torch.randint(2, (8,))) for _ in range(3)]
    opt = make_optimizer(model, lr=0.3, curvature=(loss, batches), **MODES[mode])
    before = {n: p.detach().clone() for n, p in opt.partition.params.items()}
    loss(model, batches[0]).backward()
    quiet(opt.step)
    assert opt.eta.max() > 0
    for s, (name, p) in enumerate(opt.partition.params.items()):
        expected = before[name] - 0.3 * float(opt.eta[s]) * p.grad
        torch.testing.assert_close(p.detach(), expected, rtol=1e-4, atol=1e-6)
        assert p.dtype == before[name].dtype
    assert not model[0].weight.is_contiguous()


def test_bfloat16_parameters():
    model = make_net(torch.bfloat16)
    batches = make_batches(3, seed=1, dtype=torch.bfloat16)
    opt = make_optimizer(model, lr=0.3, curvature=(loss_fn, batches))
    start = flat(model)
    for batch in batches:
        opt.zero_grad()
        loss_fn(model, batch).backward()
        quiet(opt.step)
    assert flat(model).dtype == torch.bfloat16 and not torch.equal(flat(model), start)


# --- what goes wrong ------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("direction", [None, torch.optim.Adam])
def test_a_gradient_that_is_not_finite_never_reaches_the_parameters(mode, value, direction):
    model = make_net()
    given = None if direction is None else direction(model.parameters(), lr=0.01)
    opt = make_optimizer(model, lr=0.1, summary_period=4, direction=given, **MODES[mode])
    moved = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for t in range(5):
            before = flat(model)
            opt.zero_grad()
            loss_fn(model, TRAIN[t]).backward()
            if t in (1, 2):
                model[2].bias.grad[1] = value
            opt.step()
            moved.append(not torch.equal(before, flat(model)))
            assert torch.isfinite(flat(model)).all()
    assert moved == [True, False, False, True, True]
    assert opt.skipped_steps == 2
    told = [str(w.message) for w in caught if "not finite" in str(w.message)]
    assert len(told) == 1 and "2 step(s)" in told[0]
    if given is not None:
        state = given.state[model[2].bias]
        assert torch.isfinite(state["exp_avg"]).all() and state["step"] == 5


def test_a_bad_gradient_when_a_refresh_is_due_postpones_it():
    model = make_net()
    opt = make_optimizer(model, lr=0.1, summary_period=3)
    measured = []
    for t in range(8):
        opt.zero_grad()
        loss_fn(model, TRAIN[t % 7]).backward()
        if t in (0, 4):
            model[0].weight.grad.fill_(float("nan"))
        quiet(opt.step)
        measured.append(opt.refreshes)
    assert measured == [0, 3, 3, 3, 3, 4, 4, 5]


def failing(model, opt, steps, start=0):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(model, opt, steps, start)
    return [str(w.message) for w in caught if "NewtonSummary" in str(w.message)]


@pytest.mark.parametrize("mode", MODES)
def test_a_curvature_loss_that_is_not_finite_keeps_the_last_rates(mode):
    model, broken = make_net(), [False]

    def loss(model, batch):
        return loss_fn(model, batch) * (float("nan") if broken[0] else 1.0)

    opt = make_optimizer(
        model, lr=0.1, summary_period=2, curvature=(loss, CURVATURE), **MODES[mode]
    )
    assert failing(model, opt, 2) == []
    eta, good = opt.eta.clone(), opt.last_summary
    broken[0] = True
    told = failing(model, opt, 4, start=2)
    assert len(told) == 1 and "last good ones are kept" in told[0] and "The loss is nan" in told[0]
    assert opt.failed_refreshes == 2 and opt.last_rates.status == "not-finite"
    assert torch.equal(opt.eta, eta) and opt.last_summary is good
    before = flat(model)
    broken[0] = False
    assert failing(model, opt, 1, start=6) == []
    assert opt.last_rates.ok and not torch.equal(flat(model), before)
    assert "not-finite" not in str(opt.last_rates)


def test_no_rates_at_all_do_not_move_until_there_are_some():
    """A first refresh that fails is made again when the next one is due, and not at every step."""
    model, broken = make_net(), [True]

    def loss(model, batch):
        return loss_fn(model, batch) * (float("nan") if broken[0] else 1.0)

    opt = make_optimizer(model, lr=0.1, summary_period=4, curvature=(loss, CURVATURE))
    start = flat(model)
    told = failing(model, opt, 2)
    assert len(told) == 1 and "there are none yet" in told[0]
    assert opt.failed_refreshes == 1
    broken[0] = False
    quiet(lambda: train(model, opt, 2))
    assert torch.equal(flat(model), start) and opt.refresh_due
    quiet(lambda: train(model, opt, 1))
    assert not torch.equal(flat(model), start) and opt.refreshes == 1


class Line(nn.Module):
    """A loss that bends along x as told, and has a third derivative along y, if there is one."""

    def __init__(self, bend, with_y):
        super().__init__()
        self.x = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))
        self.y = nn.Parameter(torch.tensor(1.0, dtype=torch.float64)) if with_y else None
        self.bend = bend

    def forward(self):
        along_y = 0.0 if self.y is None else torch.exp(self.y)
        return self.x + self.bend * self.x**2 + along_y


@pytest.mark.parametrize(("with_y", "status"), [(False, "saddle"), (True, "no-minimum")])
def test_a_model_without_a_minimum_keeps_the_last_rates_twice(with_y, status):
    """Then all groups get one rate, the best for the absolute value of the curvature."""
    model = Line(0.5, with_y)
    opt = ns.NewtonSummary(
        ns.make_partition(model),
        momentum=0.0,
        summary_period=1,
        summary_window=1,
        warmup=1,
        ridge=0.0,
        max_step=math.inf,
        curvature=(quadratic_loss, [None]),
    )
    step_quadratic(model, opt)
    eta = opt.eta.clone()
    assert (eta > 0).all()
    model.bend = -1.0
    with pytest.warns(UserWarning, match="last good ones are kept.*D3") as caught:
        step_quadratic(model, opt, 2)
    assert len(caught) == 1
    assert ("It falls along 'x'." in str(caught[0].message)) == (status == "no-minimum")
    assert opt.last_rates.status == status and opt.failed_refreshes == 2
    assert torch.equal(opt.eta, eta)
    step_quadratic(model, opt)
    assert opt.last_rates.status == "common-rate" and opt.failed_refreshes == 3
    summary = opt.last_summary
    slope, curvature = float(summary.gbar.sum()), float(summary.Hbar.sum().abs())
    cubic = 0.5 * float(summary.D3.abs().pow(2 / 3).sum()) ** 1.5  # lambda_int / 2 ||D||^3
    t = opt.eta[0]
    assert (opt.eta == t).all() and t > 0
    assert -slope + curvature * t + cubic * t**2 == pytest.approx(0, abs=1e-9)
    model.bend = 0.5
    step_quadratic(model, opt)
    assert opt.last_rates.ok and opt.last_rates.status != "common-rate"


def test_a_model_without_a_minimum_at_the_start_has_one_rate_for_all():
    model = Line(-1.0, with_y=False)
    opt = ns.NewtonSummary(ns.make_partition(model), curvature=(quadratic_loss, [None]))
    with pytest.warns(UserWarning, match="all groups get one rate.*D3 is 0 in all"):
        step_quadratic(model, opt)
    assert opt.last_rates.status == "common-rate" and opt.eta > 0


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_relu_networks_with_squared_error_train(depth, seed):
    """Their D3 is 0, so for most of them separate rates have no minimum at the start."""
    torch.manual_seed(seed)
    widths = [8, *[(8, 12, 16, 24)[seed]] * depth]
    layers = [x for a, b in itertools.pairwise(widths) for x in (nn.Linear(a, b), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(widths[-1], 1))
    x = torch.randn(400, 8)
    y = (x[:, 0] * x[:, 1] + x[:, 2].abs() - x[:, 3]).unsqueeze(1)

    def loss(model, batch):
        return F.mse_loss(model(batch[0]), batch[1])

    curvature = [(x[i : i + 100], y[i : i + 100]) for i in range(0, 400, 100)]
    opt = ns.NewtonSummary(ns.make_partition(model), curvature=(loss, curvature))
    start = loss(model, (x, y)).item()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for t in range(150):
            part = slice(50 * (t % 8), 50 * (t % 8) + 50)
            opt.zero_grad()
            loss(model, (x[part], y[part])).backward()
            opt.step()
            assert opt.last_summary.D3.abs().max() == 0
    assert loss(model, (x, y)) < 0.2 * start
    assert opt.refreshes == 3 + 14 and opt.failed_refreshes < 8
    told = [str(w.message) for w in caught if "gave no usable rates" in str(w.message)]
    assert len(told) == len(set(told)) <= 2
    assert all("one rate" in text or "last good ones" in text for text in told)


@pytest.mark.parametrize(("mode", "stays"), [("smoothed", False), ("paper", True)])
def test_rates_that_are_all_negative(mode, stays):
    """By default the last good ones are kept; Algorithm 2 itself makes a step of length zero."""
    model, sign = make_net(), [1.0]

    def loss(model, batch):  # of another sign than the training loss: eta < 0
        return sign[0] * loss_fn(model, batch)

    opt = make_optimizer(
        model,
        lr=0.1,
        lambda_int=0.0,
        partition="trivial",
        summary_period=2,
        curvature=(lambda m, b: loss(m, b) + 3 * flat_norm(m), TRAIN),
        **MODES[mode] | {"summary_window": 1},
    )
    train(model, opt, 2)
    eta = opt.eta.clone()
    assert eta > 0
    sign[0] = -1.0
    before = flat(model)
    told = failing(model, opt, 1, start=2)
    assert opt.last_rates.status == "no-positive-rate" and opt.last_rates.eta < 0
    assert opt.failed_refreshes == 1 and len(told) == 1
    assert torch.equal(flat(model), before) == stays
    assert torch.equal(opt.eta, torch.zeros_like(eta) if stays else eta)
    assert ("taken as they are" in told[0]) == stays


def flat_norm(model):
    """A quadratic around the present point, which makes the curvature positive."""
    return sum((p - p.detach()).square().sum() for p in model.parameters())


# --- safeguards -----------------------------------------------------------------------------------


def summary_of(g, H, D3):
    g, H, D3 = (torch.tensor(x, dtype=torch.float64) for x in (g, H, D3))
    return Summary(gbar=g, Hbar=H, D3=D3)


def test_ridge_adds_a_fraction_of_the_diagonal():
    summary = summary_of([1.0, -2.0], [[4.0, 1.0], [1.0, -5.0]], [1.0, 2.0])
    lifted = summary_of([1.0, -2.0], [[4.4, 1.0], [1.0, -4.5]], [1.0, 2.0])
    actual = solve(summary, 1.0, ridge=0.1)
    torch.testing.assert_close(actual.eta, ns.learning_rates(lifted).eta)


def test_groups_that_act_alike_move_together_by_default():
    """Without a ridge a difference of a tenth in gbar sends one of them backwards, and far."""
    summary = summary_of([1.0, 0.9], [[1.0, 0.99], [0.99, 1.0]], [0.0, 0.0])
    ridge = ns.NewtonSummary(ns.make_partition(make_net())).defaults["ridge"]
    newton = ns.learning_rates(summary, 0.0).eta
    assert newton.tolist() == pytest.approx([109 / 19.9, -90 / 19.9])
    rates = solve(summary, 1.0, ridge=ridge)
    torch.testing.assert_close(
        rates.eta, torch.linalg.solve(summary.Hbar + 0.2 * torch.eye(2).double(), summary.gbar)
    )
    assert rates.eta.min() > 0 and rates.eta.max() < 1


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"lr": -0.1}, "lr"),
        ({"lr": float("nan")}, "lr"),
        ({"momentum": 1.0}, "momentum"),
        ({"momentum": -0.1}, "momentum"),
        ({"eta_momentum": 1.0}, "eta_momentum"),
        ({"lambda_int": -1.0}, "lambda_int"),
        ({"lambda_int": float("inf")}, "lambda_int"),
        ({"summary_period": 0}, "summary_period"),
        ({"summary_period": 2.5}, "summary_period"),
        ({"summary_window": 0}, "summary_window"),
        ({"warmup": -1}, "warmup"),
        ({"ridge": -1.0}, "ridge"),
        ({"variant": "mean"}, "variant"),
        ({"max_step": 0.0}, "max_step"),
        ({"max_step": None}, "max_step"),
        ({"weight_decay": -1.0}, "weight_decay"),
        ({"curvature": (loss_fn, [])}, "empty"),
        ({"backend": "magic"}, "backend"),
    ],
)
def test_bad_values_are_refused_at_construction(options, name):
    with pytest.raises(ValueError, match=name):
        make_optimizer(make_net(), **options)


@pytest.mark.parametrize("curvature", [loss_fn, (CURVATURE, loss_fn), (loss_fn, CURVATURE, 1)])
def test_curvature_is_a_pair(curvature):
    with pytest.raises(TypeError, match="pair"):
        make_optimizer(make_net(), curvature=curvature)


def test_partitions_without_model_and_other_objects_are_refused():
    part = ns.make_partition(make_net())
    with pytest.raises(ValueError, match="read from a file"):
        ns.NewtonSummary(ns.Partition.from_state_dict(part.state_dict()))
    with pytest.raises(TypeError, match="make_partition"):
        ns.NewtonSummary(make_net().parameters())
    with pytest.raises(TypeError, match="torch optimizer"):
        ns.NewtonSummary(part, direction="adam")


def test_a_partition_of_another_model_is_told():
    model = make_net()
    opt = make_optimizer(make_net())  # a partition of a model that nobody trains
    loss_fn(model, TRAIN[0]).backward()
    with pytest.raises(ValueError, match="has a gradient"):
        opt.step()


def test_a_loss_of_another_model_is_told():
    model, other = make_net(), make_net()
    opt = make_optimizer(model, curvature=(lambda _, batch: loss_fn(other, batch), CURVATURE))
    loss_fn(model, TRAIN[0]).backward()
    with pytest.raises(ValueError, match="does not depend on the parameters"):
        opt.step()


def test_parameters_that_changed_are_told():
    model = make_net()
    opt = make_optimizer(model, summary_period=1)
    quiet(lambda: train(model, opt, 1))
    model[2] = nn.Linear(5, 2).double()
    model.zero_grad()
    loss_fn(model, TRAIN[0]).backward()
    with pytest.raises(ValueError, match=r"another parameter called '2\.weight'"):
        opt.step()

    model = make_net()
    opt = make_optimizer(model)
    quiet(lambda: train(model, opt, 1))
    model.zero_grad()
    model[2].weight.data = torch.zeros(4, 5, dtype=torch.float64)
    model[2].weight.grad = torch.zeros(4, 5, dtype=torch.float64)
    with pytest.raises(ValueError, match="changed its shape"):
        opt.step()


def test_sparse_gradients_are_refused():
    model = nn.Sequential(nn.Embedding(5, 2, sparse=True))
    opt = make_optimizer(model, curvature=(lambda m, b: m(b).square().mean(), [torch.arange(5)]))
    model(torch.arange(3)).square().mean().backward()
    with pytest.raises(ValueError, match="sparse"):
        opt.step()


@pytest.mark.parametrize("mode", MODES)
def test_a_first_gradient_of_zero_changes_nothing(mode):
    """No move, no refresh, no curvature batch spent: what follows is as without that step."""
    one, other = make_net(), make_net()
    waiting, plain = (make_optimizer(model, **MODES[mode]) for model in (one, other))
    start = flat(one)
    for p in one.parameters():
        p.grad = torch.zeros_like(p)
    waiting.step()
    assert torch.equal(flat(one), start) and waiting.refreshes == 0 and waiting.refresh_due
    train(one, waiting, 5)
    train(other, plain, 5)
    assert torch.equal(flat(one), flat(other)) and not torch.equal(flat(one), start)


@pytest.mark.parametrize("mode", MODES)
def test_a_later_direction_of_zero_is_not_averaged(mode):
    model = make_net()
    opt = make_optimizer(model, summary_period=2, momentum=0.0, **MODES[mode])
    train(model, opt, 2)
    refreshes, before = opt.refreshes, flat(model)
    for p in model.parameters():
        p.grad.zero_()
    opt.step()
    assert opt.refreshes == refreshes and opt.refresh_due and torch.equal(flat(model), before)
    train(model, opt, 1)
    assert opt.refreshes == refreshes + 1


def test_curvature_of_another_model_is_an_error():
    model, other = make_net(), make_net()
    opt = make_optimizer(model, curvature=(lambda _, batch: loss_fn(other, batch), CURVATURE))
    loss_fn(model, TRAIN[0]).backward()
    with pytest.raises(ValueError, match="does not depend on the parameters"):
        opt.step()


ADDITIONS = {  # as they may be, and as the paper has them
    "ridge": (0.2, 0.0),
    "max_step": (0.02, math.inf),
    "weight_decay": (0.1, 0.0),
    "direction": (torch.optim.SGD([torch.zeros(1)], lr=1.0), None),
}


@pytest.mark.parametrize("name", ADDITIONS)
def test_paper_mode_refuses_the_additions(name):
    part = ns.make_partition(make_net())
    with pytest.raises(ValueError, match=rf"(?s){name}=.*addition to the paper's algorithm"):
        ns.NewtonSummary.paper(part, **{name: ADDITIONS[name][0]})
    ns.NewtonSummary.paper(part, **{name: ADDITIONS[name][1]})


def test_paper_mode_takes_nothing_else():
    """Every argument of the class is one of Algorithm 2, an addition, or refused by its name."""
    arguments = set(inspect.signature(ns.NewtonSummary).parameters)
    own = set(inspect.signature(ns.NewtonSummary.paper).parameters)
    assert arguments - own == set(ADDITIONS) and own <= arguments
    part = ns.make_partition(make_net())
    with pytest.raises(ValueError, match="'as-run' or 'as-published'"):
        ns.NewtonSummary.paper(part, variant="smoothed")
    with pytest.raises(ValueError, match="no warm-up"):
        ns.NewtonSummary.paper(part, variant="as-published", warmup=3)
    for name in ("averaging", "max_eta"):
        with pytest.raises(TypeError, match=f"no argument '{name}'"):
            ns.NewtonSummary.paper(part, **{name: 1.0})


def test_paper_mode_has_none_of_the_additions():
    opt = ns.NewtonSummary.paper(ns.make_partition(make_net()))
    assert {k: v for k, v in opt.defaults.items() if k in ADDITIONS} == {
        name: paper for name, (_, paper) in ADDITIONS.items() if name != "direction"
    }
    table = {"momentum": 0.9, "summary_period": 10, "summary_window": 3, "warmup": 3}
    assert table.items() <= opt.defaults.items() and opt.direction is None


def test_there_are_sixteen_arguments():
    assert len(inspect.signature(ns.NewtonSummary).parameters) <= 16


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("partition", ["canonical", "trivial", "discrete"])
@pytest.mark.parametrize("direction", [None, torch.optim.Adam])
def test_steps_between_refreshes_do_not_wait_for_the_gpu(mode, partition, direction):
    model = make_net(torch.float32).cuda()
    batches = [tuple(x.cuda() for x in b) for b in make_batches(3, seed=1, dtype=torch.float32)]
    given = None if direction is None else direction(model.parameters(), lr=0.01)
    opt = make_optimizer(
        model,
        partition=partition,
        direction=given,
        summary_period=100,
        curvature=(loss_fn, batches),
        **MODES[mode],
    )
    loss_fn(model, batches[0]).backward()
    quiet(opt.step)
    start = flat(model)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for t in range(6):
            if t == 3:
                opt.param_groups[0]["lr"] = 0.1  # as a scheduler does
            if t == 4:
                model[0].weight.grad.fill_(float("nan"))
            opt.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.isfinite(flat(model)).all() and not torch.equal(flat(model), start)
    assert opt.state_dict()["newton_summary"]["counts"]["skipped_since"] == 2
