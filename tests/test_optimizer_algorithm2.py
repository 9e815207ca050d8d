"""NewtonSummary.paper is Algorithm 2 (App. G): as published, and as the experiments ran it.

The first transcription follows the pseudo-code, the second a description of the runs. They share
derivatives and a solver with each other, and no code with the package.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.optimize import brentq
from torch import nn

import newton_summary as ns
from newton_summary.optimizer.refreshes import Schedule
from test_optimizer import CURVATURE, TRAIN, flat, loss_fn, make_net, quiet, train


def compute_Hg(model, groups, u, batch):
    """D^(1)(u), D^(2)(u) and the diagonal of D^(3)(u) from phi(eta) = L(theta + U I eta)."""
    theta = {name: p.detach() for name, p in model.named_parameters()}

    def phi(eta):
        moved = {n: theta[n] + eta[s] * u[n] for s, group in enumerate(groups) for n in group}
        return F.cross_entropy(torch.func.functional_call(model, moved, (batch[0],)), batch[1])

    zero = torch.zeros(len(groups), dtype=torch.float64)
    g, H = torch.func.grad(phi)(zero), torch.func.hessian(phi)(zero)
    D3 = torch.func.jacfwd(torch.func.hessian(phi))(zero)
    return g.numpy(), H.numpy(), np.einsum("iii->i", D3.numpy())


def compute_lr(lambda_int, g, H, d):
    """The solution of eta = (H + lambda_int/2 ||D eta|| D^2)^-1 g with the largest ||D eta||."""
    if lambda_int == 0:
        return np.linalg.solve(H, g)
    D = np.diag(d)

    def eta(r):
        return np.linalg.solve(H + lambda_int / 2 * r * D @ D, g)

    D_inverse = np.linalg.inv(D)
    lowest = np.linalg.eigvalsh(D_inverse @ H @ D_inverse)[0]
    pole = max(0.0, -2 * lowest / lambda_int)
    low, high = pole * (1 + 1e-12) + 1e-12, 2 * pole + 1
    while np.linalg.norm(D @ eta(high)) > high:
        high *= 2
    r = brentq(lambda r: np.linalg.norm(D @ eta(r)) - r, low, high, xtol=1e-15, rtol=1e-15)
    return eta(r)


def gradients(model, batch):
    names = [name for name, _ in model.named_parameters()]
    return dict(zip(names, torch.autograd.grad(loss_fn(model, batch), model.parameters())))


def momentum(mu, x, before):
    return x if before is None else mu * before + x


def heavy_ball(mu, g, before):
    return {n: momentum(mu, g[n], None if before is None else before[n]) for n in g}


def training_step(model, groups, lr, u, eta):
    """theta <- theta - lambda_t Diag(u) I_{P:S} eta."""
    with torch.no_grad():
        for s, group in enumerate(groups):
            for name in group:
                model.get_parameter(name).sub_(u[name], alpha=lr * eta[s])


# --- as published ---------------------------------------------------------------------------------


def algorithm2(model, groups, T, lr, lambda_int, mu_g, mu_eta, tau, upsilon, diagonal=False):
    """The pseudo-code of App. G, line by line; D = Diag(abs(D3)^(1/3)) is what is averaged."""
    samples = iter(CURVATURE * T)
    u, eta, computed = None, None, []
    for t in range(1, T + 1):
        u = heavy_ball(mu_g, gradients(model, TRAIN[(t - 1) % len(TRAIN)]), u)
        if t % tau == 0:
            g, H, D3 = compute_Hg(model, groups, u, next(samples))
            computed.append((g, H, np.abs(D3) ** (1 / 3)))
            g, H, d = (np.mean([c[i] for c in computed[-upsilon:]], axis=0) for i in range(3))
            H = np.diag(np.diag(H)) if diagonal else H
            eta = momentum(mu_eta, np.maximum(compute_lr(lambda_int, g, H, d), 0), eta)
        if eta is not None:  # before the first refresh there are no rates
            training_step(model, groups, lr(t), u, eta)
    return eta


CANONICAL = [["0.weight"], ["0.bias"], ["2.weight"], ["2.bias"]]
BASE = {"lambda_int": 1.0, "mu_g": 0.9, "mu_eta": 0.0, "tau": 5, "upsilon": 3}


@pytest.mark.parametrize(
    ("partition", "groups", "change"),
    [
        ("canonical", CANONICAL, {}),
        ("trivial", [[name for (name,) in CANONICAL]], {}),
        ("weights-biases", [["0.weight", "2.weight"], ["0.bias", "2.bias"]], {"lambda_int": 3.0}),
        ("canonical", CANONICAL, {"mu_g": 0.0, "tau": 1, "upsilon": 1}),
        ("canonical", CANONICAL, {"mu_eta": 0.5}),
        ("canonical", CANONICAL, {"diagonal": True, "upsilon": 2, "tau": 7}),
        ("canonical", CANONICAL, {"lambda_int": 0.0, "lr": 0.02}),
    ],
)
def test_fifty_steps_equal_algorithm_2_as_published(partition, groups, change):
    """In all of its options, start included, with a learning rate that a scheduler lowers."""
    options = BASE | {"lr": 0.1} | change
    first_lr = options.pop("lr")
    expected, actual = make_net(), make_net()
    eta = algorithm2(expected, groups, 50, lambda t: first_lr * 0.5 ** ((t - 1) // 20), **options)
    opt = ns.NewtonSummary.paper(
        ns.make_partition(actual, partition),
        lr=first_lr,
        lambda_int=options["lambda_int"],
        momentum=options["mu_g"],
        eta_momentum=options["mu_eta"],
        summary_period=options["tau"],
        summary_window=options["upsilon"],
        diagonal=options.get("diagonal", False),
        curvature=(loss_fn, CURVATURE),
        variant="as-published",
    )
    scheduler = torch.optim.lr_scheduler.StepLR(opt, 20, 0.5)

    def run():
        for t in range(50):
            train(actual, opt, 1, start=t)
            scheduler.step()

    quiet(run)
    torch.testing.assert_close(flat(actual), flat(expected), rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(opt.eta, torch.from_numpy(eta), rtol=1e-6, atol=1e-8)
    assert (flat(actual) - flat(make_net())).norm() > 0.05  # and it has moved


# --- as run ---------------------------------------------------------------------------------------


def as_run(model, groups, steps, train_batches, curvature_batches, lr, lambda_int=1.0):
    """What the experiments did, with mu_g = 0.9, tau = 10, upsilon = 3.

    Three times, at steps 0, 10 and 20, the direction advances and is measured; nothing moves before
    step 30. Every third refresh a sum of measurements starts over with the last three, and grows
    until then; the measurement of step 0 never enters it. It is divided by one more than it has
    terms, a factor that leaves eta as it is. D3 is averaged with its sign.
    """
    u, eta, measured, path = None, None, [], []
    for step in range(steps):
        refresh = step % 10 == 0
        if refresh or step >= 30:
            u = heavy_ball(0.9, gradients(model, train_batches[step % len(train_batches)]), u)
        if refresh:
            batch = curvature_batches[len(measured) % len(curvature_batches)]
            measured.append(compute_Hg(model, groups, u, batch))
        if step >= 30:
            if refresh:
                if len(measured) % 3 == 1:  # the 4th, the 7th, the 10th, ...
                    total = [np.sum([m[i] for m in measured[-3:]], axis=0) for i in range(3)]
                    terms = 3
                else:
                    total = [total[i] + measured[-1][i] for i in range(3)]
                    terms += 1
                g, H, D3 = (x / (terms + 1) for x in total)
                eta = np.maximum(compute_lr(lambda_int, g, H, np.abs(D3) ** (1 / 3)), 0)
            training_step(model, groups, lr, u, eta)
        path.append(flat(model).clone())
    return path


def toy():
    """A tanh MLP 12-16-8-4 with weights from N(0, 1/fan_in), and its batches."""
    generator = torch.Generator().manual_seed(0)
    layers = []
    for a, b in ((12, 16), (16, 8), (8, 4)):
        layer = nn.Linear(a, b).double()
        with torch.no_grad():
            weight = torch.randn(b, a, generator=generator, dtype=torch.float64) / a**0.5
            layer.weight.copy_(weight)
            layer.bias.zero_()
        layers += [layer, nn.Tanh()]

    def batches(count, size):
        xs = [torch.randn(size, 12, generator=generator, dtype=torch.float64) for _ in range(count)]
        return [(x, (x[:, :4] + x[:, 4:8] * x[:, 8:]).argmax(1)) for x in xs]

    return nn.Sequential(*layers[:-1]), batches(11, 20), batches(7, 20)


def test_three_hundred_steps_equal_what_was_run():
    """To 1e-12 of the parameters, in float64."""
    expected, batches, curvature = toy()
    actual, _, _ = toy()
    groups = [[name] for name, _ in expected.named_parameters()]
    path = as_run(expected, groups, 300, batches, curvature, lr=0.03)
    opt = ns.NewtonSummary.paper(ns.make_partition(actual), lr=0.03, curvature=(loss_fn, curvature))
    start, errors = flat(actual).clone(), []
    for step in range(300):
        opt.zero_grad()
        loss_fn(actual, batches[step % len(batches)]).backward()
        opt.step()
        errors.append(float((flat(actual) - path[step]).norm() / path[step].norm()))
    assert max(errors) < 1e-12
    assert torch.equal(path[29], start) and not torch.equal(path[30], start)
    assert (path[-1] - start).norm() > 0.1 * start.norm()


def test_the_two_variants_differ():
    """The transcriptions can tell them apart: from the start, and by the window."""
    final = {}
    for variant in ("as-run", "as-published"):
        model, batches, curvature = toy()
        opt = ns.NewtonSummary.paper(
            ns.make_partition(model), lr=0.03, curvature=(loss_fn, curvature), variant=variant
        )
        for step in range(60):
            opt.zero_grad()
            loss_fn(model, batches[step % len(batches)]).backward()
            opt.step()
        final[variant] = flat(model)
    assert not torch.allclose(final["as-run"], final["as-published"], rtol=1e-3)


@pytest.mark.parametrize(("variant", "first"), [("as-run", 0), ("as-published", 2)])
def test_steps_are_not_counted_while_the_first_measurement_waits(variant, first):
    """And a restart begins with the warm-up again: two measurements, of which none moves."""
    schedule = Schedule(variant, period=3, warmup=2)
    for _ in range(first):
        assert not schedule.due
        schedule.advance()
    for _ in range(2):  # a direction that is zero
        assert schedule.due and schedule.t == first
        schedule.advance()
    for start in (first, first + 3):
        ready = []
        for _ in range(3):
            schedule.begin()
            ready.append(schedule.ready)
        assert ready == [False, False, True]
        assert schedule.next == start + 3
        for _ in range(3):
            assert not schedule.due
            schedule.advance()
        schedule.restart()
        assert schedule.due and not schedule.ready
