"""NewtonSummary is Algorithm 2 of the paper, and lives in the loops that people have."""

from __future__ import annotations

import math
import warnings
from collections import defaultdict

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import newton_summary as ns
from newton_summary import NewtonSummary, make_partition
from newton_summary.data import load_mnist_subset
from newton_summary.optimizer.rates import NormalizedAverage, solve
from newton_summary.optimizer.update import Update
from newton_summary.summary import Summary

SIZE = 24  # samples in a batch


@pytest.fixture(autouse=True)
def _seed_and_strict_warnings():
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="NewtonSummary")
        yield


def make_net(dtype=torch.float64):
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    return net.to(dtype)


def loss_fn(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y)


def make_batches(count, seed, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(count):
        x = torch.randn(SIZE, 3, generator=generator, dtype=torch.float64)
        noise = torch.randn(SIZE, generator=generator, dtype=torch.float64)
        batches.append((x.to(dtype), (x[:, 0] * x[:, 1] + noise > 0).long()))
    return batches


TRAIN, CURVATURE = make_batches(7, seed=1), make_batches(5, seed=2)


def train(model, optimizer, steps, start=0):
    for t in range(start, start + steps):
        optimizer.zero_grad()
        loss_fn(model, TRAIN[t % len(TRAIN)]).backward()
        optimizer.step()


def flat(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def quiet(optimizer_steps):
    """Run something that may warn about refreshes that gave nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return optimizer_steps()


# --- limiting cases and invariance ----------------------------------------------------------------


class Quadratic(nn.Module):
    """L = 1/2 theta.H theta - b.theta, with theta in two tensors."""

    def __init__(self, seed=0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        A = torch.randn(6, 6, generator=generator, dtype=torch.float64)
        self.H = A @ A.T + 0.5 * torch.eye(6)
        self.b = torch.randn(6, generator=generator, dtype=torch.float64)
        self.first = nn.Parameter(torch.randn(2, 2, generator=generator, dtype=torch.float64))
        self.second = nn.Parameter(torch.randn(2, generator=generator, dtype=torch.float64))

    def theta(self):
        return torch.cat([self.first.reshape(-1), self.second])

    def forward(self):
        theta = self.theta()
        return 0.5 * theta @ self.H @ theta - self.b @ theta


def quadratic_loss(model, batch):
    return model()


def step_quadratic(model, opt, steps=1):
    for _ in range(steps):
        opt.zero_grad()
        model().backward()
        opt.step()


MODES = {  # both without a ridge and a longest step, which have tests of their own
    "paper": {
        "variant": "as-run",
        "summary_window": 3,
        "warmup": 0,
        "ridge": 0.0,
        "max_step": math.inf,
    },
    "smoothed": {"ridge": 0.0, "max_step": math.inf},
}


@pytest.mark.parametrize("mode", MODES)
def test_one_group_without_momentum_is_cauchys_method(mode):
    """App. C: eta = g.g / g.H g, at every step."""
    model, expected = Quadratic(), Quadratic().theta().detach()
    opt = ns.NewtonSummary(
        ns.make_partition(model, "trivial"),
        lr=1.0,
        lambda_int=0.0,
        momentum=0.0,
        summary_period=1,
        curvature=(quadratic_loss, [None]),
        **MODES[mode] | {"summary_window": 1, "warmup": 0},
    )
    for _ in range(20):
        g = model.H @ expected - model.b
        expected = expected - (g @ g) / (g @ model.H @ g) * g
        step_quadratic(model, opt)
        torch.testing.assert_close(model.theta().detach(), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("mode", "warmup"), [("paper", 0), ("smoothed", 0), ("smoothed", 3)])
@pytest.mark.parametrize("lambda_int", [0.0, 1.0])  # a quadratic has no cubic term
def test_one_group_per_number_is_newtons_method(mode, warmup, lambda_int):
    """On a convex quadratic it ends in one step (App. C)."""
    model = Quadratic()
    optimum = torch.linalg.solve(model.H, model.b)
    top = torch.linalg.eigh(model.H)[1][:, -1]
    error = top * torch.tensor([1.0, 1.1, 0.9, 1.2, 0.8, 1.0], dtype=torch.float64)
    rates = error / (model.H @ error)
    assert rates.min() > 0 and rates.max() > 1.2 * rates.min()  # none is cut, and they differ
    with torch.no_grad():
        model.first.copy_((optimum + error)[:4].view(2, 2))
        model.second.copy_((optimum + error)[4:])
    opt = ns.NewtonSummary(
        ns.make_partition(model, "discrete"),
        lr=1.0,
        lambda_int=lambda_int,
        curvature=(quadratic_loss, [None]),
        **MODES[mode] | {"warmup": warmup},
    )
    step_quadratic(model, opt)
    torch.testing.assert_close(model.theta().detach(), optimum, rtol=1e-9, atol=1e-10)
    assert len(opt.param_groups) == 1
    torch.testing.assert_close(opt.param_groups[0]["eta"], rates, rtol=1e-8, atol=0)


class Rescaled(nn.Module):
    """A network whose parameters are alpha_s times what it is given: theta = alpha theta~."""

    def __init__(self, net, alphas):
        super().__init__()
        self.net = [net]  # not a submodule: its parameters are given at each call
        self.alphas = dict(zip(dict(net.named_parameters()), alphas))
        self.own = nn.ParameterList(
            [p.detach() / a for p, a in zip(net.parameters(), self.alphas.values())]
        )

    def theta(self):
        return {n: a * p for (n, a), p in zip(self.alphas.items(), self.own)}

    def forward(self, x):
        return torch.func.functional_call(self.net[0], self.theta(), (x,))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("options", [{}, {"eta_momentum": 0.5}, {"ridge": 0.1}])
def test_trajectory_is_invariant_under_rescaling_groups(mode, options):
    """App. E: the trajectory is the same if each group is measured in its own units."""
    final = []
    for alphas in ((1.0, 1.0, 1.0, 1.0), (100.0, 0.03, 1e-3, 7.0)):
        model = Rescaled(make_net(), alphas)
        part = ns.make_partition(model, "canonical")
        opt = ns.NewtonSummary(
            part, lr=0.1, summary_period=5, curvature=(loss_fn, CURVATURE), **MODES[mode] | options
        )
        quiet(lambda model=model, opt=opt: train(model, opt, 30))
        final.append(torch.cat([p.detach().reshape(-1) for p in model.theta().values()]))
    torch.testing.assert_close(final[1], final[0], rtol=1e-7, atol=1e-9)
    assert (final[0] - flat(make_net())).norm() > 0.05


def test_the_longest_step_is_not_invariant():
    """The test above can fail: a limit that compares groups depends on their units, as it says."""
    final = []
    for alphas in ((1.0, 1.0, 1.0, 1.0), (100.0, 0.03, 1e-3, 7.0)):
        model = Rescaled(make_net(), alphas)
        opt = ns.NewtonSummary(ns.make_partition(model), curvature=(loss_fn, CURVATURE))
        quiet(lambda model=model, opt=opt: train(model, opt, 5))
        final.append(torch.cat([p.detach().reshape(-1) for p in model.theta().values()]))
    assert not torch.allclose(final[1], final[0], rtol=1e-3)


def test_smoothed_averages_are_those_of_the_definition():
    """Exponential weights, corrected for the start at zero, of derivatives by length."""
    average = NormalizedAverage(memory=10)
    generator = torch.Generator().manual_seed(0)
    draws = []
    for _ in range(4):
        g, H, D3 = (torch.randn(*size, generator=generator) for size in ((3,), (3, 3), (3,)))
        n = torch.rand(3, generator=generator) + 0.5
        average.push(Summary(gbar=g, Hbar=H + H.T, D3=D3), n)
        draws.append((g / n, (H + H.T) / n / n[:, None], D3.abs() / n**3))
    weights = torch.tensor([0.9**3, 0.9**2, 0.9, 1.0])
    mean = average.mean(n)
    scales = (n, n * n[:, None], n**3)  # back to derivatives by eta, along the last direction
    for i, value in enumerate((mean.gbar, mean.Hbar, mean.D3)):
        stacked = torch.stack([draw[i] for draw in draws])
        expected = scales[i] * torch.tensordot(weights, stacked, 1) / weights.sum()
        torch.testing.assert_close(value, expected.double(), rtol=1e-5, atol=1e-6)


def test_between_refreshes_no_step_is_longer_than_at_the_last_one():
    model = make_net()
    part = ns.make_partition(model)
    opt = ns.NewtonSummary(part, lr=0.2, summary_period=4, curvature=(loss_fn, CURVATURE))
    lengths, norms = [], []
    for t in range(4):
        before = {n: p.detach().clone() for n, p in part.params.items()}
        quiet(lambda t=t: train(model, opt, 1, start=t))
        lengths.append([float((part.params[n].detach() - before[n]).norm()) for n in part.names])
        buffers = [opt.state[part.params[n]]["momentum_buffer"] for n in part.names]
        norms.append([float(u.norm()) for u in buffers])
    assert max(lengths[0]) > 0
    shares = [[min(1.0, now / then) for now, then in zip(row, norms[0])] for row in norms]
    assert any(min(row) < 0.5 for row in shares) and any(row.count(1.0) > 1 for row in shares[1:])
    for row, share in zip(lengths, shares):
        expected = [length * x for length, x in zip(lengths[0], share)]
        assert row == pytest.approx(expected, rel=1e-9)


def test_divided_tensors_move_as_the_partition_says():
    """Rows of a weight in different groups: theta - lr U I eta, entry by entry."""
    model = make_net()
    part = ns.make_partition(
        model, {"top": [("0.weight", slice(0, 2))], "low": [("0.weight", slice(2, 5))], "rest": ...}
    )
    opt = ns.NewtonSummary(part, lr=0.5, curvature=(loss_fn, CURVATURE))
    before = {n: p.detach().clone() for n, p in part.params.items()}
    quiet(lambda: train(model, opt, 1))
    u = {n: p.grad for n, p in part.params.items()}
    step = part.scale(u, opt.eta)
    for name, p in part.params.items():
        torch.testing.assert_close(p.detach(), before[name] - 0.5 * step[name], rtol=1e-9, atol=0)
    assert opt.eta.max() > 0


# --- any optimizer as direction -------------------------------------------------------------------

DIRECTIONS = {
    "SGD": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Adam": lambda ps: torch.optim.Adam(ps, lr=0.01),
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=0.01, weight_decay=0.1),
    "RMSprop": lambda ps: torch.optim.RMSprop(ps, lr=0.01),
    "Muon": lambda ps: torch.optim.Muon([p for p in ps if p.ndim == 2], lr=0.1),
}


@pytest.mark.parametrize("kind", DIRECTIONS)
def test_the_step_of_any_optimizer_is_the_direction(kind):
    """A twin that is shown the same parameters and gradients makes the step u; the rest is ours."""
    model, shadow = make_net(torch.float32), make_net(torch.float32)
    batches = make_batches(5, seed=2, dtype=torch.float32)
    given, twin = (DIRECTIONS[kind](list(m.parameters())) for m in (model, shadow))
    part = ns.make_partition(model)
    update = Update(part, given, defaultdict(dict), skipped=0)
    eta = torch.tensor([0.5, 0.0, 2.0, 1.0], dtype=torch.float64)
    update.hold(eta, None)
    held = {id(p) for group in given.param_groups for p in group["params"]}
    for t in range(12):
        model.zero_grad()
        loss_fn(model, batches[t % 5]).backward()
        before = [p.detach().clone() for p in model.parameters()]
        for p, q in zip(shadow.parameters(), model.parameters()):
            p.data.copy_(q.data)
            p.grad = q.grad.clone()
        twin.step()
        grads = [p.grad for p in model.parameters()]
        with torch.no_grad():
            update.advance([0.9])
            update.move([0.3])
        assert all(p.grad is g for p, g in zip(model.parameters(), grads))
        u = update.direction()
        for s, ((name, p), q) in enumerate(zip(model.named_parameters(), shadow.parameters())):
            if id(p) in held:
                torch.testing.assert_close(u[name], before[s] - q.detach(), rtol=0, atol=0)
            moved = before[s] - p.detach()
            torch.testing.assert_close(moved, 0.3 * eta[s].float() * u[name], rtol=1e-3, atol=1e-6)
    for mine, other in zip(given.state.values(), twin.state.values(), strict=True):
        for key, value in other.items():
            torch.testing.assert_close(mine[key], value, rtol=0, atol=0)


@pytest.mark.parametrize("mode", MODES)
def test_adams_step_as_the_direction_trains(mode):
    model = make_net()
    adam = DIRECTIONS["Adam"](list(model.parameters()))
    opt = make_optimizer(model, lr=0.3, direction=adam, **MODES[mode])

    def loss():
        with torch.no_grad():
            return sum(float(loss_fn(model, batch)) for batch in TRAIN)

    start = loss()
    quiet(lambda: train(model, opt, 60))
    assert loss() < 0.9 * start
    saved = opt.state_dict()["newton_summary"]["direction"]
    assert saved["state"].keys() == adam.state_dict()["state"].keys()


def test_parameters_that_the_direction_does_not_hold_have_the_heavy_ball():
    """Muon takes matrices only; the biases move along mu u + g."""
    model = make_net(torch.float32)
    batches = make_batches(3, seed=2, dtype=torch.float32)
    opt = ns.NewtonSummary(
        ns.make_partition(model),
        direction=DIRECTIONS["Muon"](list(model.parameters())),
        curvature=(loss_fn, batches),
    )
    grads = []
    for batch in batches:
        opt.zero_grad()
        loss_fn(model, batch).backward()
        grads.append(model[0].bias.grad.clone())
        quiet(opt.step)
    expected = 0.81 * grads[0] + 0.9 * grads[1] + grads[2]
    torch.testing.assert_close(opt.state[model[0].bias]["momentum_buffer"], expected)


def test_a_direction_of_another_model_is_refused():
    other = torch.optim.Adam(make_net().parameters())
    with pytest.raises(ValueError, match="another model"):
        ns.NewtonSummary(ns.make_partition(make_net()), direction=other)


# --- weight decay, momentum ----------------------------------------------------------------------


def test_weight_decay_is_that_of_adamw():
    """p <- (1 - lr decay) p, then the step of the same optimizer without; each group its own."""
    model, twin = make_net(), make_net()
    decaying = make_optimizer(model, lr=0.3, weight_decay=0.1)
    plain = make_optimizer(twin, lr=0.3)
    decaying.param_groups[1]["weight_decay"] = 0.0
    decaying.param_groups[2]["lr"] = plain.param_groups[2]["lr"] = 0.2
    start = {n: p.detach().clone() for n, p in model.named_parameters()}
    quiet(lambda: train(model, decaying, 1))
    quiet(lambda: train(twin, plain, 1))
    factors = dict(zip(start, (1 - 0.3 * 0.1, 1.0, 1 - 0.2 * 0.1, 1 - 0.3 * 0.1)))
    for name, p in twin.named_parameters():
        expected = factors[name] * start[name] + (p.detach() - start[name])
        torch.testing.assert_close(model.get_parameter(name).detach(), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("partition", ["canonical", "discrete"])
def test_what_does_not_decay(partition):
    """Steps before there are rates or with a bad gradient, frozen parameters, parameters unused."""
    model = make_net()
    opt = make_optimizer(model, partition=partition, weight_decay=0.1, curvature=None, warmup=2)
    start = flat(model)
    loss_fn(model, TRAIN[0]).backward()
    quiet(lambda: opt.step(lambda: loss_fn(model, CURVATURE[0])))
    assert torch.equal(flat(model), start)
    quiet(lambda: opt.step(lambda: loss_fn(model, CURVATURE[1])))
    assert not torch.equal(flat(model), start)
    start = flat(model)
    model[0].weight.grad[0, 0] = float("nan")
    opt.step()
    assert torch.equal(flat(model), start)
    opt.zero_grad()
    model[0].weight.requires_grad_(False)
    loss_fn(model, TRAIN[0]).backward()
    weight = model[0].weight.detach().clone()
    opt.step()
    assert torch.equal(model[0].weight.detach(), weight)


def test_each_group_has_its_momentum():
    model = make_net()
    opt = make_optimizer(model, lr=0.1)
    for group, mu in zip(opt.param_groups, (0.9, 0.5, 0.0, 0.9)):
        group["momentum"] = mu
    grads = []
    for t in range(2):
        quiet(lambda t=t: train(model, opt, 1, start=t))
        grads.append([p.grad.clone() for p in model.parameters()])
    for p, g0, g1, mu in zip(model.parameters(), *grads, (0.9, 0.5, 0.0, 0.9)):
        torch.testing.assert_close(opt.state[p]["momentum_buffer"], mu * g0 + g1)


# --- schedulers, logs -----------------------------------------------------------------------------


def make_optimizer(model, **options):
    part = ns.make_partition(model, options.pop("partition", "canonical"))
    return ns.NewtonSummary(part, **{"curvature": (loss_fn, CURVATURE)} | options)


def test_reduce_on_plateau_scales_the_step():
    """The paper's scheduler acts on lambda_t."""
    model = make_net()
    opt = make_optimizer(model, lr=0.3, summary_period=100)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, patience=2, factor=0.5)
    quiet(lambda: train(model, opt, 1))
    for _ in range(4):
        plateau.step(1.0)
    assert [group["lr"] for group in opt.param_groups] == [0.15] * 4
    start = flat(model)
    quiet(lambda: train(model, opt, 1, start=1))
    half = (flat(model) - start).norm()
    again = make_net()
    other = make_optimizer(again, lr=0.3, summary_period=100)
    quiet(lambda: train(again, other, 1))
    start = flat(again)
    quiet(lambda: train(again, other, 1, start=1))
    assert half > 0
    assert (flat(again) - start).norm() == pytest.approx(2 * float(half), rel=1e-9)


@pytest.mark.parametrize(
    "make",
    [
        lambda opt: torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=0.3, total_steps=20),
        lambda opt: torch.optim.lr_scheduler.CosineAnnealingLR(opt, 20),
        lambda opt: torch.optim.lr_scheduler.LambdaLR(opt, lambda t: 1 / (1 + t)),
        lambda opt: torch.optim.lr_scheduler.SequentialLR(
            opt,
            [
                torch.optim.lr_scheduler.LinearLR(opt, 0.1, total_iters=5),
                torch.optim.lr_scheduler.ExponentialLR(opt, 0.9),
            ],
            milestones=[5],
        ),
    ],
)
def test_torch_schedulers_work(make):
    model = make_net()
    opt = make_optimizer(model, lr=0.1)
    scheduler = make(opt)

    def run():
        for t in range(15):
            train(model, opt, 1, start=t)
            scheduler.step()

    quiet(run)
    assert torch.isfinite(flat(model)).all()
    assert opt.param_groups[0]["lr"] == pytest.approx(scheduler.get_last_lr()[0])


def test_each_group_has_its_lr_its_name_and_its_eta():
    model = make_net()
    opt = make_optimizer(model, lr=0.3, max_step=math.inf)
    assert [group["name"] for group in opt.param_groups] == list(opt.partition.names)
    opt.param_groups[0]["lr"] = 0.0
    opt.param_groups[2]["lr"] = torch.tensor(0.1)
    before = {n: p.detach().clone() for n, p in opt.partition.params.items()}
    quiet(lambda: train(model, opt, 1))
    assert torch.equal(before["0.weight"], model[0].weight.detach())
    eta = [group["eta"] for group in opt.param_groups]
    assert all(isinstance(x, float) for x in eta) and eta == opt.eta.tolist()
    assert eta == pytest.approx(opt.last_rates.eta.clamp_min(0).tolist())
    for group, lr in zip(opt.param_groups[1:], (0.3, 0.1, 0.3)):
        (p,) = group["params"]
        expected = before[group["name"]] - lr * group["eta"] * p.grad
        torch.testing.assert_close(p.detach(), expected, rtol=1e-7, atol=1e-9)
    assert opt.last_summary.num_samples == SIZE and opt.last_summary.partition is opt.partition
    assert opt.refreshes == 3 and opt.failed_refreshes == 0


def test_refreshes_come_every_period_and_draw_independent_batches():
    model = make_net()
    seen = []

    def counting(model, batch):
        seen.append(batch[0])
        return loss_fn(model, batch)

    opt = make_optimizer(model, summary_period=4, warmup=2, curvature=(counting, CURVATURE))
    due = []
    for t in range(9):
        due.append(opt.refresh_due)
        quiet(lambda t=t: train(model, opt, 1, start=t))
    assert due == [t % 4 == 0 for t in range(9)]
    unique = list({id(x): x for x in seen}.values())
    assert len(unique) == 4 and all(x is c[0] for x, c in zip(unique, CURVATURE))


@pytest.mark.parametrize("lambda_int", [0.0, 1.0])
def test_rates_that_would_raise_the_model_without_their_partners_are_shortened(lambda_int):
    """Two groups that act alike get rates of opposite sign; one of them alone would overshoot."""
    summary = Summary(
        gbar=torch.tensor([1.0, 0.5], dtype=torch.float64),
        Hbar=torch.tensor([[1.0, 0.999], [0.999, 1.0]], dtype=torch.float64),
        D3=torch.tensor([1e-3, 1e-3], dtype=torch.float64),
    )

    def model(eta):
        D = summary.D3.abs() ** (1 / 3)
        cubic = lambda_int / 6 * (D * eta).norm() ** 3
        return float(-eta @ summary.gbar + eta @ summary.Hbar @ eta / 2 + cubic)

    full = solve(summary, lambda_int)
    cut = full.eta.clamp_min(0)
    assert full.eta.min() < 0 and model(cut) > 0
    rates = solve(summary, lambda_int, shorten=True)
    assert rates.status == "shortened" and rates.ok
    factor = float(rates.eta.max() / cut.max())
    assert 0 < factor < 1 and torch.allclose(rates.eta, factor * cut)
    best = min(model(t * cut) for t in torch.linspace(0, 1, 20001))
    assert model(rates.eta) == pytest.approx(best, abs=1e-5) and model(rates.eta) <= best < 0


def test_rates_that_lower_the_model_are_cut_and_no_more():
    summary = Summary(
        gbar=torch.tensor([1.0, -0.1], dtype=torch.float64),
        Hbar=torch.eye(2, dtype=torch.float64),
        D3=torch.zeros(2, dtype=torch.float64),
    )
    rates = solve(summary, 1.0, shorten=True)
    assert rates.ok and rates.status != "shortened" and rates.eta.tolist() == [1.0, -0.1]


# --- the longest step ----------------------------------------------------------------------------


def relu_lenet():
    """As torch draws its weights: the first derivatives say nothing of what is far."""
    return nn.Sequential(
        *(nn.Conv2d(1, 6, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)),
    )


def train_relu_lenet(steps, **options):
    torch.manual_seed(0)
    model = relu_lenet()
    images, labels = load_mnist_subset("train")
    curvature = [(images[i : i + 500], labels[i : i + 500]) for i in (0, 500)]
    optimizer = NewtonSummary(make_partition(model), curvature=(loss_fn, curvature), **options)
    losses, moves = [], []
    for step in range(steps):
        chosen = slice(100 * (step % 10), 100 * (step % 10) + 100)
        optimizer.zero_grad()
        loss = loss_fn(model, (images[chosen], labels[chosen]))
        loss.backward()
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.step()
        losses.append(loss.item())
        moves.append(
            max(
                float((p.detach() - old).norm() / old.norm())
                for p, old in zip(model.parameters(), before)
                if p.dim() >= 2
            )
        )
    return losses, moves


def test_the_first_steps_of_a_relu_network_stay_near():
    """Without a limit the loss is 1e5 after the first step, and the network is dead for good."""
    losses, moves = train_relu_lenet(40)
    assert moves[0] == pytest.approx(0.02, rel=1e-4) and max(moves) < 0.03
    assert max(losses) < 5 and losses[-1] < 1.5
    unlimited, moves = train_relu_lenet(2, max_step=math.inf)
    assert moves[0] > 1 and unlimited[1] > 100


def test_loader_closure_and_one_batch_have_the_same_defaults():
    """And paper() has none of the safeguards."""
    part = ns.make_partition(make_net())
    given = [(loss_fn, CURVATURE), (loss_fn, CURVATURE[:1]), None]
    made = [ns.NewtonSummary(part, curvature=curvature).defaults for curvature in given]
    assert made[0] == made[1] == made[2]
    assert (made[0]["max_step"], made[0]["ridge"]) == (0.02, 0.2)
    paper = [ns.NewtonSummary.paper(part, curvature=curvature).defaults for curvature in given]
    assert paper[0] == paper[1] == paper[2]
    assert (paper[0]["max_step"], paper[0]["ridge"]) == (math.inf, 0.0)


def first_moves(model, max_step, batches):
    """Return by how much the first step moves each parameter, and the norms before it."""
    optimizer = NewtonSummary(
        make_partition(model),
        curvature=(loss_fn, batches),
        max_step=max_step,
        diagonal=True,  # along its own gradient every group has a rate above zero
    )
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    loss_fn(model, batches[0]).backward()
    quiet(optimizer.step)
    moves = {n: float((p.detach() - before[n]).norm()) for n, p in model.named_parameters()}
    return moves, {n: float(p.norm()) for n, p in before.items()}


def test_a_group_at_its_limit_does_not_hold_the_others_back():
    batches = make_batches(2, seed=3)
    free, norms = first_moves(make_net(), math.inf, batches)
    weights = [name for name, move in free.items() if name.endswith("weight") and move > 0]
    assert len(weights) == 2
    shares = sorted(free[name] / norms[name] for name in weights)
    between = sum(shares) / 2
    limited, _ = first_moves(make_net(), between, batches)
    for name in weights:
        expected = min(free[name], between * norms[name])
        assert limited[name] == pytest.approx(expected, rel=1e-9)


def test_weights_near_zero_may_grow():
    """They count as a tenth of the median norm: 1e-6 of themselves would be no step at all."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
    model = model.double()
    with torch.no_grad():
        model[4].weight.mul_(1e-6)
    batches = [(torch.randn(20, 3).double(), torch.randint(2, (20,))) for _ in range(2)]
    moves, norms = first_moves(model, 1e-3, batches)
    median = min(norms["0.weight"], norms["2.weight"])  # of three, the last being the least
    assert moves["4.weight"] == pytest.approx(1e-4 * median, rel=1e-9)


@pytest.mark.parametrize("partition", ["canonical", "discrete"])
def test_the_limit_is_on_weights_that_are_not_zero(partition):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 2)).double()
    nn.init.zeros_(model[2].weight)
    batches = [(torch.randn(20, 3).double(), torch.randint(2, (20,))) for _ in range(2)]
    make = {"curvature": (loss_fn, batches), "max_step": 1e-3, "lr": 1.0}
    optimizer = NewtonSummary(make_partition(model, partition), **make)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    loss_fn(model, batches[0]).backward()
    optimizer.step()
    moved = {n: (p.detach() - before[n]).norm() for n, p in model.named_parameters()}
    assert moved["0.weight"] <= 1.001e-3 * before["0.weight"].norm()
    assert sum(moved.values()) > 0


def test_a_bias_moves_no_further_than_weights_may():
    """A bias that a softmax takes out again: its rate is made of nothing but rounding."""

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(6, 6) for _ in range(3))

        def forward(self, x):
            scores = self.q(x) @ self.k(x).transpose(1, 2) / 6**0.5
            return (scores.softmax(-1) @ self.v(x)).mean(1)

    torch.manual_seed(0)
    model = Attention()
    batches = [(torch.randn(50, 4, 6), torch.randint(6, (50,))) for _ in range(2)]
    optimizer = NewtonSummary(make_partition(model), curvature=(loss_fn, batches))

    def train():
        for step in range(60):
            optimizer.zero_grad()
            loss_fn(model, batches[step % 2]).backward()
            optimizer.step()

    quiet(train)
    assert model.k.bias.norm() < 60 * 0.02 * 10  # without the limit it is 1e4 and more
    assert loss_fn(model, batches[0]) < 1.8
