"""NewtonSummary is Algorithm 2 of the paper, and lives in the loops that people have."""

from __future__ import annotations

import warnings
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import newton_summary as ns
from newton_summary.optimizer.steered import period_within

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


PAPER = {"variant": "as-run", "warmup": 0}
MODES = {"paper": PAPER, "steered": {}}


def test_one_group_without_momentum_is_cauchys_method():
    """App. C: eta = g.g / g.H g, at every step."""
    model, expected = Quadratic(), Quadratic().theta().detach()
    opt = ns.NewtonSummary(
        ns.make_partition(model, "trivial"),
        lr=1.0,
        lambda_int=0.0,
        momentum=0.0,
        summary_period=1,
        curvature=(quadratic_loss, [None]),
        summary_window=1,
        **PAPER,
    )
    for _ in range(20):
        g = model.H @ expected - model.b
        expected = expected - (g @ g) / (g @ model.H @ g) * g
        step_quadratic(model, opt)
        torch.testing.assert_close(model.theta().detach(), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("lambda_int", [0.0, 1.0])  # a quadratic has no cubic term
def test_one_group_per_number_is_newtons_method(lambda_int):
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
        **PAPER,
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


@pytest.mark.parametrize("options", [PAPER, PAPER | {"eta_momentum": 0.5}, {}])
def test_trajectory_is_invariant_under_rescaling_groups(options):
    """App. E: the trajectory is the same if each group is measured in its own units.

    That of the defaults is not: Adam moves each number by about the same length, whatever its unit.
    """
    final = []
    for alphas in ((1.0, 1.0, 1.0, 1.0), (100.0, 0.03, 1e-3, 7.0)):
        model = Rescaled(make_net(), alphas)
        part = ns.make_partition(model, "canonical")
        opt = ns.NewtonSummary(
            part, lr=0.1, summary_period=5, curvature=(loss_fn, CURVATURE), **options
        )
        quiet(lambda model=model, opt=opt: train(model, opt, 30))
        final.append(torch.cat([p.detach().reshape(-1) for p in model.theta().values()]))
    moved = (final[0] - flat(make_net())).norm()
    assert moved > 0.05
    apart = (final[1] - final[0]).norm() / moved
    assert apart < 1e-7 if options else apart > 0.3


def test_divided_tensors_move_as_the_partition_says():
    """Rows of a weight in different groups: theta - lr U I eta, entry by entry."""
    model = make_net()
    part = ns.make_partition(
        model, {"top": [("0.weight", slice(0, 2))], "low": [("0.weight", slice(2, 5))], "rest": ...}
    )
    opt = ns.NewtonSummary(part, lr=0.5, curvature=(loss_fn, CURVATURE), **PAPER)
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
}


@pytest.mark.parametrize("kind", DIRECTIONS)
def test_steps_are_those_of_the_given_optimizer_times_lr_eta(kind):
    """A twin that is shown the same parameters and gradients makes the same step."""
    model, shadow = make_net(), make_net()
    given, twin = (DIRECTIONS[kind](list(m.parameters())) for m in (model, shadow))
    base = twin.param_groups[0]["lr"]
    opt = ns.NewtonSummary(model, loss_fn, direction=given)
    opt.param_groups[0]["lr"] = 0.5
    for t in range(12):
        batch = TRAIN[t % 7]
        opt.zero_grad()
        loss_fn(model, batch).backward()
        for p, q in zip(shadow.parameters(), model.parameters()):
            p.data.copy_(q.data)
            p.grad = q.grad.clone()
        opt.step(batch)
        twin.param_groups[0]["lr"] = base * 0.5 * opt.param_groups[0]["eta"]
        twin.step()
        torch.testing.assert_close(flat(model), flat(shadow), rtol=1e-12, atol=1e-14)
    assert given.param_groups[0]["lr"] == base * 0.5  # as it was between steps
    saved = opt.state_dict()["newton_summary"]["direction"]
    assert saved["state"].keys() == given.state_dict()["state"].keys()


@pytest.mark.parametrize("partition", ["canonical", "trivial", "discrete"])
def test_steps_are_those_of_adamw_with_the_rates_shown(partition):
    """lr, momentum and weight decay of each group, in float64 to the last digits."""
    model, shadow = make_net(), make_net()
    opt = make_optimizer(model, partition=partition, curvature=None, loss_fn=loss_fn)
    if partition == "canonical":
        for i, group in enumerate(opt.param_groups):
            group |= {"lr": 1.0 - 0.2 * i, "momentum": 0.9 - 0.1 * i, "weight_decay": 0.1 * i}
    twins = list(shadow.parameters())
    one = [{"params": twins}]
    twin = torch.optim.AdamW([{"params": p} for p in twins] if len(opt.param_groups) > 1 else one)
    for t in range(12):
        opt.zero_grad()
        loss_fn(model, TRAIN[t % 7]).backward()
        for p, q in zip(twins, model.parameters()):
            p.data.copy_(q.data)
            p.grad = q.grad.clone()
        opt.step(TRAIN[t % 7])
        for mine, other in zip(opt.param_groups, twin.param_groups, strict=True):
            other["lr"] = mine["lr"] * float(opt.eta[0])
            other["betas"], other["weight_decay"] = (mine["momentum"], 0.999), mine["weight_decay"]
        twin.step()
        torch.testing.assert_close(flat(model), flat(shadow), rtol=1e-10, atol=1e-12)
    assert opt.refreshes > 5 and opt.last_summary.Hbar.shape == (len(opt.partition),) * 2


def test_a_direction_of_another_model_is_refused():
    other = torch.optim.Adam(make_net().parameters())
    with pytest.raises(ValueError, match="another model"):
        ns.NewtonSummary(ns.make_partition(make_net()), direction=other)
    model = make_net()
    with pytest.raises(ValueError, match="does not hold all parameters"):
        ns.NewtonSummary(model, direction=torch.optim.Adam([model[0].weight]))
    model[0].weight.requires_grad_(False)
    partition = ns.make_partition(model)
    model[0].weight.requires_grad_(True)
    shape = rf"shape \({', '.join(map(str, model[0].weight.shape))}\).* frozen when a partition"
    with pytest.raises(ValueError, match=shape):
        ns.NewtonSummary(partition, direction=torch.optim.Adam(model.parameters()))


# --- weight decay, momentum ----------------------------------------------------------------------


def test_what_does_not_decay():
    """Parameters that are frozen, and steps with a bad gradient."""
    model = make_net()
    opt = make_optimizer(model, weight_decay=0.1)
    train(model, opt, 1)
    start = flat(model)
    model[0].weight.grad[0, 0] = float("nan")
    opt.step()
    assert torch.equal(flat(model), start)
    model[0].weight.requires_grad_(False)
    weight = model[0].weight.detach().clone()
    quiet(lambda: train(model, opt, 2))
    assert torch.equal(model[0].weight.detach(), weight) and not torch.equal(flat(model), start)


def test_each_group_has_its_momentum():
    model = make_net()
    opt = make_optimizer(model, lr=0.1, **PAPER)
    for group, mu in zip(opt.param_groups, (0.9, 0.5, 0.0, 0.9)):
        group["momentum"] = mu
    grads = []
    for t in range(2):
        quiet(lambda t=t: train(model, opt, 1, start=t))
        grads.append([p.grad.clone() for p in model.parameters()])
    for p, g0, g1, mu in zip(model.parameters(), *grads, (0.9, 0.5, 0.0, 0.9)):
        torch.testing.assert_close(opt.state[p]["momentum_buffer"], mu * g0 + g1)


@pytest.mark.parametrize("momenta", [(0.9, 0.9, 0.9, 0.9), (0.9, 0.5, 0.8, 0.7)])
def test_the_momentum_of_parameters_that_are_frozen_or_have_no_gradient(momenta):
    """A gradient that is missing is zero; what is frozen does not move on."""
    model = make_net()
    opt = make_optimizer(model, lr=0.1, summary_period=100, **PAPER)
    for group, mu in zip(opt.param_groups, momenta):
        group["momentum"] = mu
    quiet(lambda: train(model, opt, 1))
    params = list(model.parameters())
    before = [opt.state[p]["momentum_buffer"].clone() for p in params]
    grads = [0.0, 0.0, 1.0, 2.0]
    params[0].requires_grad_(False)
    params[1].grad = None
    for p, grad in zip(params[2:], grads[2:]):
        p.grad = torch.full_like(p, grad)
    opt.step()
    for p, old, grad, mu in zip(params, before, grads, momenta):
        expected = torch.zeros_like(p) if p is params[0] else mu * old + grad
        torch.testing.assert_close(opt.state[p]["momentum_buffer"], expected.detach())


# --- schedulers, logs -----------------------------------------------------------------------------


def make_optimizer(model, **options):
    part = ns.make_partition(model, options.pop("partition", "canonical"))
    return ns.NewtonSummary(part, **{"curvature": (loss_fn, CURVATURE)} | options)


@pytest.mark.parametrize("mode", MODES)
def test_reduce_on_plateau_scales_the_step(mode):
    """The paper's scheduler acts on lambda_t."""
    model = make_net()
    opt = make_optimizer(model, lr=0.3, summary_period=100, **MODES[mode])
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, patience=2, factor=0.5)
    quiet(lambda: train(model, opt, 1))
    for _ in range(4):
        plateau.step(1.0)
    assert [group["lr"] for group in opt.param_groups] == [0.15] * 4
    start = flat(model)
    quiet(lambda: train(model, opt, 1, start=1))
    half = (flat(model) - start).norm()
    again = make_net()
    other = make_optimizer(again, lr=0.3, summary_period=100, **MODES[mode])
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
    opt = make_optimizer(model, lr=0.3, **PAPER)
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
    assert opt.refreshes == 1 and opt.failed_refreshes == 0


def test_refreshes_come_every_period_and_draw_independent_batches():
    model = make_net()
    seen = []

    def counting(model, batch):
        seen.append(batch[0])
        return loss_fn(model, batch)

    opt = make_optimizer(model, summary_period=4, curvature=(counting, CURVATURE), **PAPER)
    due = []
    for t in range(9):
        due.append(opt.refresh_due)
        quiet(lambda t=t: train(model, opt, 1, start=t))
    assert due == [t % 4 == 0 for t in range(9)]
    unique = list({id(x): x for x in seen}.values())
    assert len(unique) == 3 and all(x is c[0] for x, c in zip(unique, CURVATURE))


# --- the defaults ---------------------------------------------------------------------------------


def test_a_model_and_a_loss_are_enough_and_equal_a_controlled_adamw():
    """Also with a closure: three ways to bring the batch, one training."""
    ways = []
    for way in ("batch", "closure", "controller"):
        model = make_net()
        adam = torch.optim.AdamW(model.parameters(), lr=1.0, weight_decay=0.0)
        controller = ns.RateController(adam, model, loss_fn)
        opt = ns.NewtonSummary(model, loss_fn if way == "batch" else None)
        for t in range(40):
            batch = TRAIN[t % 7]
            model.zero_grad()
            loss_fn(model, batch).backward()
            if way == "controller":
                controller.step(batch)
            elif way == "batch":
                opt.step(batch)
            else:
                due = opt.refresh_due
                loss = opt.step((lambda m=model, b=batch: loss_fn(m, b)) if due else None)
                assert loss is None or due
        ways.append((flat(model), controller.history if way == "controller" else opt.history))
    for theta, history in ways[:2]:
        torch.testing.assert_close(theta, ways[2][0], rtol=1e-6, atol=1e-9)
        assert [r.step for r in history] == [r.step for r in ways[2][1]]


def test_the_summary_of_a_refresh_is_that_of_the_last_step():
    """Along Adam's step, at its beginning, on the next batch; by nested differentiation."""
    model = make_net()
    opt = make_optimizer(model, curvature=None, loss_fn=loss_fn, lambda_int=1.0)
    before = None
    for t in range(4):
        opt.zero_grad()
        loss_fn(model, TRAIN[t]).backward()
        if t == 3:
            last, eta, twin = flat(model), opt.eta.clone(), make_net()
            u = dict(zip(opt.partition.params, ((a - b) / eta[0] for a, b in before)))
            for q, (a, _) in zip(twin.parameters(), before):
                q.data.copy_(a)
        begin = [p.detach().clone() for p in model.parameters()]
        opt.step(TRAIN[t])
        before = list(zip(begin, [p.detach().clone() for p in model.parameters()]))
    expected = ns.summarize(twin, loss_fn, TRAIN[3], direction=u, backend="nested")
    for name in ("gbar", "Hbar", "D3"):
        actual = getattr(opt.last_summary, name)
        torch.testing.assert_close(actual, getattr(expected, name), rtol=1e-6, atol=1e-9)
    assert last.isfinite().all() and len(opt.last_rates.eta) == 4
    assert opt.last_summary.names == opt.partition.names


@pytest.mark.parametrize(
    ("groups", "order", "period"), [(1, 2, 15), (1, 3, 15), (20, 2, 21), (42, 3, 69)]
)
def test_refreshes_stay_within_the_budget(groups, order, period):
    assert period_within(0.25, groups, order) == period
    assert period_within(0.05, groups, order) > 2 * period
    model = nn.ParameterList([torch.ones(1) for _ in range(groups)])
    opt = ns.NewtonSummary(ns.make_partition(model), lambda_int=float(order > 2))
    assert opt.param_groups[0]["summary_period"] == period
    assert ns.NewtonSummary(model, summary_period=3).param_groups[0]["summary_period"] == 3


def test_two_groups_take_a_summary():
    """It costs 1.5 (2 / 2 + 4) / 3 gradients, and nine times that is 22.5."""
    assert period_within(0.1, groups=2, order=2) == 23


@pytest.mark.parametrize("activation", [nn.ReLU, nn.LeakyReLU])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_relu_networks_with_squared_error_train(depth, activation):
    """D3 is 0 in every group, and no rates follow from the cubic model: 12 networks in all."""
    ratios = []
    for seed, width in ((0, 12), (1, 24)):
        x = torch.randn(400, 8, generator=torch.Generator().manual_seed(seed))
        y = (x[:, 0] * x[:, 1] + x[:, 2].abs() - x[:, 3]).unsqueeze(1)

        def loss(model, batch):
            return F.mse_loss(model(batch[0]), batch[1])

        ends = []
        for steered in (True, False):
            torch.manual_seed(seed)
            widths = [8, *[width] * depth]
            layers = [z for a, b in pairwise(widths) for z in (nn.Linear(a, b), activation())]
            model = nn.Sequential(*layers, nn.Linear(widths[-1], 1))
            adam = torch.optim.Adam(model.parameters(), lr=1e-3)
            opt = ns.NewtonSummary(model, loss)
            start = loss(model, (x, y)).item()
            for t in range(150):
                part = slice(50 * (t % 8), 50 * (t % 8) + 50)
                model.zero_grad()
                loss(model, (x[part], y[part])).backward()
                opt.step((x[part], y[part])) if steered else adam.step()
            ends.append(loss(model, (x, y)).item())
        assert ends[0] < 0.3 * start
        ratios.append(ends[0] / ends[1])
    assert max(ratios) < 1  # three of four were asked for


@pytest.mark.parametrize("diagonal", [True, False])
def test_interactions_are_left_out_of_the_steering_on_demand(diagonal):
    """Slope and curvature are along the step, the summary along the direction: scales differ."""
    model = make_net()
    partition = ns.make_partition(model)
    opt = ns.NewtonSummary(partition, curvature=(loss_fn, CURVATURE), diagonal=diagonal)
    train(model, opt, 12)
    record, summary = opt.history[-1], opt.last_summary
    H = summary.Hbar.diagonal() if diagonal else summary.Hbar
    expected = float(H.sum() / summary.gbar.sum() ** 2)
    assert record.curvature / record.slope**2 == pytest.approx(expected, rel=1e-6)
    assert float(summary.Hbar.diagonal().sum()) != pytest.approx(
        float(summary.Hbar.sum()), rel=0.01
    )


def test_the_papers_algorithm_recommends_what_its_user_can_do():
    """ReLU with squared error: nobody can try the rates inside of an optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU())
    model = nn.Sequential(*model, nn.Linear(16, 1))
    x = torch.randn(64, 5)
    batch = x, x.sum(1, keepdim=True)

    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return (model(batch[0]) - batch[1]).square().mean()

    opt = ns.NewtonSummary.paper(ns.make_partition(model), curvature=(loss_fn, [batch]))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(60):
            opt.zero_grad()
            loss_fn(model, batch).backward()
            opt.step()
    said = [str(w.message) for w in caught if "no usable rates" in str(w.message)]
    assert len(said) == 1
    assert "D3 is 0 in all groups" in said[0]
    assert "NewtonSummary(model, loss_fn), which steers" in said[0]
    assert "learning_rates(" not in said[0]


def test_careful_steps_are_shorter():
    """Least squares with noise, which decides how long steps may be."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4000, 8, generator=generator, dtype=torch.float64)
    y = x.sum(1, keepdim=True) + torch.randn(4000, 1, generator=generator, dtype=torch.float64)

    def loss(model, batch):
        return F.mse_loss(model(batch[0]), batch[1])

    rates = {}
    for variant in ("steered", "careful"):
        model = nn.Linear(8, 1, dtype=torch.float64)
        sgd = torch.optim.SGD(model.parameters(), lr=1e-3)
        opt = ns.NewtonSummary(model, loss, direction=sgd, variant=variant)
        for batch in zip(x.split(20), y.split(20), strict=True):
            opt.zero_grad()
            loss(model, batch).backward()
            opt.step(batch)
        rates[variant] = 1e-3 * opt.eta.item()
    assert rates["careful"] < 0.7 * rates["steered"]
