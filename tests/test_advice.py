"""Advice for other optimizers: the factors are right, and nothing changes until apply()."""

from __future__ import annotations

import copy
import itertools
import math
import warnings
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import newton_summary as ns
from newton_summary.integrations.console import sentence
from newton_summary.integrations.loggers import advice_scalars
from newton_summary.measuring import rehearsal
from newton_summary.measuring.advice import VERDICTS, GroupAdvice, _Trials
from newton_summary.measuring.factors import Estimate, FactorModel
from newton_summary.measuring.param_groups import multiply_rates
from newton_summary.probe.probe import Probe
from test_optimizer import DIRECTIONS, Quadratic, flat, loss_fn, make_batches, make_net

DATA = make_batches(6, seed=4)


def quadratic_loss(model, batch):
    return model()


def trained(model, optimizer, steps=5):
    """Bring an optimizer into the middle of a run."""
    for t in range(steps):
        optimizer.zero_grad()
        loss_fn(model, DATA[t % 6]).backward()
        optimizer.step()
    return optimizer


def next_step(model, optimizer, data):
    """What the optimizer would subtract given the gradient of all of the data, by name."""
    twin_model, twin = copy.deepcopy((model, optimizer))
    twin.zero_grad()
    (sum(loss_fn(twin_model, batch) for batch in data) / len(data)).backward()
    before = {n: p.detach().clone() for n, p in twin_model.named_parameters()}
    twin.step()
    return {n: before[n] - p.detach() for n, p in twin_model.named_parameters()}


def test_one_group_of_sgd_gets_cauchys_step():
    """App. C: with u = lr g the best factor is g.g / (lr g.H g)."""
    model = Quadratic()
    sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    exact = {"lambda_int": 0.0, "rehearsal": False}
    advice = ns.suggest_lrs(model, quadratic_loss, None, sgd, max_change=1e3, **exact)
    g = model.H @ model.theta().detach() - model.b
    expected = float(g @ g / (g @ model.H @ g)) / 0.01
    (group,) = advice.groups
    assert group.factor == pytest.approx(expected, rel=1e-10)
    assert group.verdict == "raise" and group.stderr is None and group.lrs == (0.01,)
    assert group.suggested == pytest.approx((0.01 * expected,), rel=1e-10)
    advice.apply()
    assert sgd.param_groups[0]["lr"] == pytest.approx(0.01 * expected, rel=1e-10)
    again = ns.suggest_lrs(model, quadratic_loss, None, sgd, **exact)
    assert again.groups[0].factor == pytest.approx(1.0) and again.groups[0].verdict == "keep"


@pytest.mark.parametrize("kind", DIRECTIONS)
def test_factors_minimise_the_model_along_the_optimizers_step(kind):
    """No factors inside the limits are better, by the derivatives along the optimizer's step."""
    model = make_net(torch.float64)
    optimizer = trained(model, DIRECTIONS[kind](list(model.parameters())))
    u = next_step(model, optimizer, DATA)
    advice = ns.suggest_lrs(model, loss_fn, DATA, optimizer, "canonical", lambda_int=2.0)
    names = [group.name for group in advice.groups]
    if kind == "Muon":  # which holds the matrices only
        assert names == ["0.weight", "2.weight"]
        u["0.bias"].zero_(), u["2.bias"].zero_()
    summary = ns.summarize(model, loss_fn, DATA, partition="canonical", direction=u)
    kept = [summary.names.index(name) for name in names]
    g, H, d = summary.gbar[kept], summary.Hbar[kept][:, kept], summary.D3[kept].abs() ** (2 / 3)

    def T(c):
        return -c @ g + 0.5 * (c @ H * c).sum(-1) + 2 / 6 * (c**2 @ d) ** 1.5

    factors = torch.tensor([group.factor for group in advice.groups], dtype=torch.float64)
    draw = torch.Generator().manual_seed(0)
    shape = (4000, len(kept))
    others = 10 ** (2 * torch.rand(shape, generator=draw, dtype=torch.float64) - 1)
    near = factors * (1 + 0.01 * torch.randn(shape, generator=draw, dtype=torch.float64))
    for points in (others, near.clamp(0.1, 10)):
        assert T(factors) <= T(points).min() + 1e-9 * T(points).abs().max()


@pytest.mark.parametrize("kind", DIRECTIONS)
def test_nothing_changes_until_apply(kind):
    model = make_net()
    model.add_module("dropout", nn.Dropout(0.5))
    optimizer = trained(model, DIRECTIONS[kind](list(model.parameters())))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict(), torch.get_rng_state()))
    grads = [(p.grad, p.grad.clone(), p.requires_grad) for p in model.parameters()]
    groups = [id(group) for group in optimizer.param_groups]
    advice = ns.suggest_lrs(model, loss_fn, DATA, optimizer, "canonical")
    str(advice)
    for p, (grad, value, requires_grad) in zip(model.parameters(), grads):
        assert p.grad is grad and torch.equal(grad, value) and p.requires_grad == requires_grad
    after = (model.state_dict(), optimizer.state_dict(), torch.get_rng_state())
    for old, new in zip(
        torch.utils._pytree.tree_leaves(before), torch.utils._pytree.tree_leaves(after)
    ):
        assert torch.equal(old, new) if isinstance(old, torch.Tensor) else old == new
    assert [id(group) for group in optimizer.param_groups] == groups
    assert scheduler.last_epoch == 0


def test_applied_factors_scale_the_next_step_of_each_tensor():
    """One Adam with one group becomes one group per tensor; state and options stay."""
    model = make_net()
    adam = trained(model, torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.8, 0.99)))
    advice = ns.suggest_lrs(model, loss_fn, DATA[0], adam, "canonical", lambda_int=0.1)
    assert any(group.change != 1 for group in advice.groups)
    state = {p: dict(values) for p, values in adam.state.items()}
    u = next_step(model, adam, DATA[:1])
    advice.apply()
    assert [group["name"] for group in adam.param_groups] == [g.name for g in advice.groups]
    assert all(group["betas"] == (0.8, 0.99) for group in adam.param_groups)
    assert all(adam.state[p][k] is v for p, values in state.items() for k, v in values.items())
    scaled = next_step(model, adam, DATA[:1])
    for group, lr in zip(advice.groups, [g["lr"] for g in adam.param_groups]):
        torch.testing.assert_close(scaled[group.name], group.change * u[group.name])
        assert lr == pytest.approx(1e-3 * group.change) == group.suggested[0]
    restored = torch.optim.Adam([{"params": g["params"]} for g in adam.param_groups])
    restored.load_state_dict(adam.state_dict())  # an ordinary optimizer of four groups
    trained(model, adam)
    with pytest.raises(RuntimeError, match="has been applied"):
        advice.apply()


def test_groups_of_the_optimizer_are_the_default():
    model = make_net()
    sgd = torch.optim.SGD(
        [
            {"params": model[0].parameters(), "name": "body", "lr": 0.1},
            {"params": model[2].parameters(), "lr": torch.tensor(0.02)},
        ],
        momentum=0.9,
    )
    torch.optim.lr_scheduler.StepLR(sgd, 10)  # writes initial_lr
    trained(model, sgd)
    advice = ns.suggest_lrs(model, loss_fn, DATA, sgd, max_change=1.5)
    assert [group.name for group in advice.groups] == ["body", "group1"]
    assert advice["body"].lrs == (0.1,) and advice["group1"].lrs == pytest.approx((0.02,))
    groups, lr = list(sgd.param_groups), sgd.param_groups[1]["lr"]
    advice.apply()
    assert all(a is b for a, b in zip(sgd.param_groups, groups, strict=True))
    assert sgd.param_groups[1]["lr"] is lr  # a tensor stays the same tensor
    assert float(lr) == pytest.approx(0.02 * advice["group1"].change)
    assert groups[0]["initial_lr"] == pytest.approx(0.1 * advice["body"].change)


def test_a_partition_across_the_optimizers_groups_splits_them_where_needed():
    model = make_net()
    sgd = torch.optim.SGD(
        [
            {"params": list(model[0].named_parameters()), "name": "body", "lr": 0.1},
            {"params": list(model[2].named_parameters()), "name": "head", "lr": 0.02},
        ],
        momentum=0.9,
    )
    trained(model, sgd)
    advice = ns.suggest_lrs(model, loss_fn, DATA, sgd, "weights-biases")
    assert advice["weights"].lrs == (0.1, 0.02)
    advice.apply()
    names = ["body.weights", "body.biases", "head.weights", "head.biases"]
    assert [group["name"] for group in sgd.param_groups] == names
    assert [group["param_names"] for group in sgd.param_groups] == [["weight"], ["bias"]] * 2
    expected = [lr * advice[kind].change for lr in (0.1, 0.02) for kind in ("weights", "biases")]
    assert [group["lr"] for group in sgd.param_groups] == pytest.approx(expected)
    trained(model, sgd)


def test_error_bars_tell_signal_from_noise():
    """Batches that agree have no error; where labels are drawn by lot, nothing is sure."""
    model = make_net()
    adam = trained(model, torch.optim.Adam(model.parameters(), lr=1e-5))
    same = ns.suggest_lrs(model, loss_fn, [DATA[0]] * 4, adam)
    assert same.groups[0].stderr == pytest.approx(0.0, abs=1e-6 * abs(same.groups[0].factor))
    assert same.groups[0].verdict == "raise" and same.groups[0].change == 10.0

    torch.nn.init.zeros_(model[2].weight), torch.nn.init.zeros_(model[2].bias)
    generator = torch.Generator().manual_seed(0)
    lots = [(x, torch.randint(2, (len(x),), generator=generator)) for x, _ in DATA]
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    noisy = ns.suggest_lrs(model, loss_fn, lots[1:], sgd, "canonical", direction_data=lots[0])
    assert {noisy[name].verdict for name in ("2.weight", "2.bias")} == {"noise"}
    assert all(group.change == 1.0 for group in noisy.groups) and noisy.then == noisy.now
    assert {noisy[name].verdict for name in ("0.weight", "0.bias")} == {"not yet"}
    one = ns.suggest_lrs(model, loss_fn, DATA[0], adam)
    assert one.groups[0].stderr is None


def factors_of(slopes, curvatures, **options):
    """Factors of a quadratic model, from batches with these slopes and curvatures."""
    parts = [
        ns.Summary(torch.tensor(g), torch.tensor(H), loss=1.0, num_samples=1)
        for g, H in zip(slopes, curvatures, strict=True)
    ]
    summary = ns.Summary.mean(parts).with_stderr(parts)
    return FactorModel(summary, np.full(len(summary), True), 0.0, (0.1, 10.0)).factors(**options)


def test_groups_that_are_noise_alone_share_a_factor():
    """Batches disagree on which of two groups should move more; together they are sure."""
    bent = [[[1.0, 0.999], [0.999, 1.0]]] * 8
    slopes = [[8.9 + (-1) ** b, 9.1 - (-1) ** b] for b in range(8)]
    found = factors_of(slopes, bent)
    assert found.tied.all() and found.together.verdict == "raise"
    assert found.together.factor == pytest.approx(18 / 3.998) == found.changes[0]
    assert found.together.stderr == pytest.approx(0, abs=1e-6) and found.changes[1] > 4
    beside = [[[1.0, 0.999, 0.0], [0.999, 1.0, 0.0], [0.0, 0.0, 1.0]]] * 8  # a third, which is sure
    found = factors_of([[9.0 + (-1) ** b, 9.0 - (-1) ** b, 0.25] for b in range(8)], beside)
    assert found.tied.tolist() == [True, True, False]
    assert found.changes == pytest.approx([18 / 3.998, 18 / 3.998, 0.25])
    assert found.together.factor == pytest.approx(18 / 3.998)
    alone = factors_of([[4.0, 0.2]] * 4, [[[1.0, 0.0], [0.0, 1.0]]] * 4)
    assert alone.together is None and alone.changes == pytest.approx([4.0, 0.2])
    third = factors_of([[4.0, 0.2]] * 4, [[[1.0, 0.0], [0.0, 1.0]]] * 4, fraction=0.5)
    assert third.own[0].factor == 4.0 and third.changes == pytest.approx([2.0, 0.1])


class Valley(nn.Module):
    """Two numbers that matter only by their sum, or nearly so."""

    def __init__(self):
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.zeros(1, dtype=torch.float64)) for _ in range(2))

    def loss(self, slopes):
        x = torch.cat([self.a, self.b])
        return -(slopes @ x).mean() + 0.5 * (x.sum() ** 2 - 0.002 * x.prod())


def valley_advice(lr, apart, shared, **options):
    """Of eight batches whose slopes differ, for each of two groups or for their sum."""
    signs = [((-1) ** i * apart, (-1) ** (i // 2) * shared) for i in range(8)]
    slopes = [(torch.tensor([[9 + d + s, 9 - d + s]], dtype=torch.float64),) for d, s in signs]
    model = Valley()
    sgd = torch.optim.SGD([{"params": [model.a]}, {"params": [model.b]}], lr=lr)
    return ns.suggest_lrs(model, lambda model, batch: model.loss(*batch), slopes, sgd, **options)


def test_what_noisy_groups_are_told_is_what_is_suggested():
    """A common factor with the change by the rehearsal; nothing of it where that is noise too."""
    advice = valley_advice(lr=0.09, apart=1.0, shared=0.0)
    change = advice.groups[0].change
    assert [g.verdict for g in advice.groups] == ["noise"] * 2 and 3 < change < 4
    assert f"together: x{change:.3g} (best next step: x5.56" in str(advice)
    assert "takes the factor of all such" in str(advice) and VERDICTS["noise"] not in str(advice)
    said = "all together (too noisy one by one): lr 0.09 could be x3.2 by a rehearsal (the best"
    assert said in sentence(advice)
    plain = valley_advice(lr=0.111, apart=1.0, shared=0.0, rehearsal=False)
    assert "'group1'; together: x4.5" in str(plain)
    for lr, shared in ((0.111, 9.0), (0.01, 12.0)):  # its factor is noise, or its gain
        nothing = valley_advice(lr, 1.0, shared)
        assert [(g.verdict, g.change) for g in nothing.groups] == [("noise", 1.0)] * 2
        assert nothing.together is None and "together" not in str(nothing)
        assert sentence(nothing).count("too noisy to say") == 2


def test_a_factor_at_its_limit_has_no_error():
    """Though some halves of the batches have another one."""
    advice = valley_advice(lr=0.01, apart=0.0, shared=0.0)
    for factor, told, is_shown in ((10.0, "≥x10", False), (0.1, "≤x0.1", False), (9.0, "x9", True)):
        advice.groups = (GroupAdvice("group0", (0.01,), factor, 0.18, factor, "raise"),) * 2
        row = str(advice).splitlines()[1].split()
        assert row[5:] == [told, *["0.18"] * is_shown]
        assert ("newton_summary/factor_error/group0" in advice_scalars(advice)) == is_shown
        assert ("0.18" in sentence(advice)) == is_shown
    advice.groups = (GroupAdvice("group0", (0.01,), 0.1, 2.9, 1.0, "noise"),) * 2
    assert str(advice).splitlines()[1].split()[5:] == ["≤x0.1", "2.9"]


def test_each_of_several_groups_has_a_line_on_the_console():
    advice = valley_advice(lr=0.01, apart=0.0, shared=0.0)
    first, *lines = sentence(advice).splitlines()
    assert first == "loss 0"
    assert [line.partition(" could")[0] for line in lines] == [
        "  lr 0.01 of group0",
        "  lr 0.01 of group1",
    ]
    advice.groups = advice.groups[:1]
    assert sentence(advice).startswith("loss 0; lr 0.01 could be x10")


def test_noise_says_that_nothing_was_rehearsed():
    advice = valley_advice(lr=0.01, apart=0.0, shared=0.0)
    advice.groups = (GroupAdvice("group0", (0.01,), 1.1, 0.3, change=1.0, verdict="noise"),) * 2
    advice.together = None
    told = (
        "measure on more batches\nnothing was rehearsed: whether the present rate trains is not kno"
    )
    for advice.rehearsal, is_told in ((None, True), (rehearsal.Rehearsal(16, 2.0, 1.0, 8), False)):
        assert (told in str(advice)) == is_told


def test_a_rate_that_stays_is_not_called_noisy_as_well(monkeypatch):
    """The rehearsal keeps the rates of groups that share a factor: there are no others."""
    monkeypatch.setattr(
        "newton_summary.measuring.advice.rehearse",
        lambda *_: (rehearsal.Rehearsal(16, 1.0, 2.0, 8), None),
    )
    advice = valley_advice(lr=0.111, apart=1.0, shared=0.0)
    assert [g.verdict for g in advice.groups] == ["keep"] * 2 and advice.together is None
    assert "noisy" not in str(advice) + sentence(advice)


def test_losses_of_a_rehearsal_can_be_told_apart():
    advice = valley_advice(lr=0.111, apart=1.0, shared=0.0)
    for now, then, told in ((2.0, 1.0, "2 in 16"), (4.21734e10, 4.21731e10, "4.21734e+10 in 16")):
        advice.rehearsal = rehearsal.Rehearsal(16, now, then, 10, start=9.0)
        assert f"of held-out batches goes from 9 to {told} steps now, to" in str(advice)
        assert "says little" not in str(advice)
    advice.rehearsal = rehearsal.Rehearsal(2, 2.0, 1.0, 1)  # of one batch
    assert "says little: give sixteen batches" in str(advice)


@pytest.mark.parametrize(
    ("factor", "stderr", "tried", "told"),
    [
        (1.2, 0.01, (2.0, 2.2), "near the best one for the next step"),
        (1.5, 0.3, (2.0, 2.2), "within two standard errors of the best one for the next step"),
        (9.6, 0.11, (2.0, 2.2), "fast enough in the rehearsal, though not best for the next step"),
        (9.6, 0.11, (2.0, 1.9), "a change by less than x3 is not sure to help in the end"),
        (1.7, 0.01, None, "rates within a factor of 2 of the best one train alike"),
    ],
)
def test_keep_says_which_reason_it_has(factor, stderr, tried, told):
    """And says once what does not change."""
    advice = valley_advice(lr=0.111, apart=1.0, shared=0.0)
    advice.groups = (GroupAdvice("group0", (0.1,), factor, stderr, change=1.0, verdict="keep"),)
    advice.together, advice.now = None, advice.then
    advice.rehearsal = tried and rehearsal.Rehearsal(16, tried[0], tried[1], 10, 3.0)
    (said,) = (line for line in advice._said().splitlines() if line.startswith("keep: "))
    assert said.endswith(told)
    real, predicted = f"{advice.now.real:+.3g}", f"{advice.now.predicted:+.3g}"
    assert f") by one step: {real} (predicted: {predicted})\n" in advice._said()


@pytest.mark.parametrize("factor", [1.0, 10.0])
@pytest.mark.parametrize(("start", "decides"), [(1.0, False), (2.0, False), (2.5, True)])
def test_a_rehearsal_that_lowers_the_loss_with_no_rate_decides_nothing(factor, start, decides):
    """The rate is kept, and not called good; unless it is the best one for the next step."""
    advice = valley_advice(lr=0.111, apart=1.0, shared=0.0)
    advice.groups = (GroupAdvice("group0", (0.1,), factor, 0.0, change=1.0, verdict="keep"),) * 2
    advice.together, advice.rehearsal = None, rehearsal.Rehearsal(16, 2.0, 2.2, 10, start)
    assert advice.rehearsal.decides == decides
    is_told = factor == 10 and not decides
    told = "keep: the rehearsal decides nothing: its loss falls with neither rate"
    assert (told in str(advice)) == is_told
    assert ("fast enough in the rehearsal" in str(advice)) == (factor == 10 and decides)
    assert ("keep lr 0.1 of group0: a rehearsal decides nothing" in sentence(advice)) == is_told


def test_a_limit_at_which_the_next_step_raises_the_loss_is_not_trained_at():
    model, targets = Point(), [(torch.zeros(1, dtype=torch.float64),)] * 4
    sgd = torch.optim.SGD(model.parameters(), lr=1e-3)
    advice = ns.suggest_lrs(model, distance, targets, sgd)
    told = "at the limit (max_change): apply, and ask again after some training"
    assert told in str(advice)
    (group,) = advice.groups
    for advice.groups, is_told in (
        ((replace(group, change=3.2),), True),
        ((replace(group, change=3.2, factor=5.0),), False),
        ((replace(group, change=1.0, verdict="keep"),), False),
    ):
        assert (told in str(advice)) == is_told
        assert is_told or "apply" not in str(advice)
    advice.groups = (group,)
    advice.then, trains = advice.then._replace(real=71.3), advice.rehearsal
    assert trains.then < trains.start and told in str(advice)  # a long step, but one that trains
    advice.rehearsal = trains._replace(then=trains.start)
    assert "at the limit (max_change): apply, and ask again at once" in str(advice)
    advice.below_peak = ((1e-3, 1e-2),)
    assert "max_change" not in str(advice) and "for the peak, ask before" in str(advice)
    advice.below_peak = ()
    still = "still raises the loss (by less than now)"
    for now, told in ((80.0, still), (71.0, "raises the loss")):
        advice.now = advice.now._replace(real=now)
        assert f"as suggested, though the next step {told}\n" in str(advice)
    advice.rehearsal = None
    assert "\nthe next step raises the loss\n" in str(advice)
    advice.then = advice.then._replace(real=-1.0)
    advice.now = advice.then._replace(real=-2.0)
    assert "\nthe next step is worse\n" in str(advice)


def test_the_error_of_a_factor_is_that_of_the_mean():
    """With equal curvatures the factor is a mean over batches, whose standard error is known."""
    draw = np.random.default_rng(0)
    slopes = 3 + draw.normal(size=(24, 1))
    found = factors_of(slopes.tolist(), [[[1.0]]] * 24)
    assert found.own[0].stderr == pytest.approx(slopes.std(ddof=1) / 24**0.5, rel=0.25)


@pytest.mark.parametrize(("curvatures", "change"), [((4.0, 6.0), 1.0), ((4.4, 5.6), 2.0)])
def test_a_gain_within_two_standard_errors_is_noise(curvatures, change):
    """Twice the step changes the loss of a batch by -10 + 1.5 H: by -4 and -1, or -3.4 and -1.6."""
    found = factors_of([[10.0], [10.0]], [[[H]] for H in curvatures])
    assert found.own[0].factor == pytest.approx(2.0) and found.own[0].verdict == "raise"
    assert found.changes == pytest.approx([change]) and found.within_noise == (change == 1)
    model = Point()
    batches = [(torch.tensor([[10**0.5, H / 10]], dtype=torch.float64),) for H in curvatures]

    def loss(model, batch):
        slope, H = batch[0][0]
        return (-slope * model.x + 0.5 * H * model.x**2).sum()

    with torch.no_grad():
        model.x.zero_()
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    advice = ns.suggest_lrs(model, loss, batches, sgd, rehearsal=False)
    assert advice.groups[0].change == pytest.approx(change)
    told = "noise: the predicted gain by another rate is less than twice its standard error"
    assert (told in str(advice)) == (change == 1) and "do not agree" not in str(advice)


def test_a_rate_near_the_best_one_stays_while_others_change():
    found = factors_of([[4.0, 1.125]] * 4, [[[1.0, 0.0], [0.0, 1.0]]] * 4)
    assert [e.verdict for e in found.own] == ["raise", "keep"]
    assert found.own[1].factor == pytest.approx(1.125) and found.changes.tolist() == [4.0, 1.0]


def test_direction_data_is_what_the_step_is_made_of():
    """Along its own gradient the loss of the data seems to fall faster."""
    model = make_net()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    own = ns.suggest_lrs(model, loss_fn, DATA[:1], sgd)
    other = ns.suggest_lrs(model, loss_fn, DATA[:1], sgd, direction_data=DATA[1])
    g, h = (torch.autograd.grad(loss_fn(model, b), list(model.parameters())) for b in DATA[:2])
    along = 0.1 * sum((a * b).sum() for a, b in zip(g, h))
    assert float(other.summary.gbar) == pytest.approx(float(along), rel=1e-10)
    assert float(own.summary.gbar) > float(other.summary.gbar)


@pytest.mark.parametrize(
    ("factor", "error", "verdict"),
    [
        (5.0, None, "raise"),
        (0.2, None, "lower"),
        (-3.0, None, "lower"),
        (1.2, None, "keep"),
        (5.0, 1.0, "raise"),
        (5.0, 3.0, "noise"),
        (2.0, 0.6, "keep"),
        (-3.0, 1.0, "lower"),
        (0.9, 0.5, "noise"),
        (math.nan, None, "noise"),
        (2.0, math.nan, "noise"),
    ],
)
def test_verdicts(factor, error, verdict):
    assert Estimate(factor, error).verdict == verdict
    assert verdict in VERDICTS


def test_the_table_tells_everything():
    model = make_net()
    sgd = torch.optim.SGD(
        [
            {"params": model[0].parameters(), "lr": 1e-3, "name": "body"},
            {"params": model[2].parameters(), "lr": 0.0, "name": "head"},
        ]
    )
    advice = ns.suggest_lrs(model, loss_fn, DATA, sgd, fraction=0.5, max_change=20.0)
    assert advice["head"].verdict == "no step" and advice["head"].change == 1.0
    table = str(advice)
    words = (
        "body",
        "0.001",
        "change",
        "suggested",
        "best next step",
        "±",
        "no step",
        "predicted: ",
    )
    for part in words:
        assert part in table
    assert advice["body"].change == pytest.approx(min(20.0, 0.5 * advice["body"].factor))
    with pytest.raises(KeyError, match="There is no group"):
        advice["tail"]


def test_data_may_be_an_iterator_and_parameters_may_be_frozen():
    model = make_net()
    model[0].bias.requires_grad_(False)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    advice = ns.suggest_lrs(model, loss_fn, iter(DATA), sgd)
    assert advice.groups[0].stderr is not None
    assert ns.suggest_lrs(model, loss_fn, DATA, sgd).groups[0].factor == advice.groups[0].factor
    advice.apply()
    assert len(sgd.param_groups) == 1 and not model[0].bias.requires_grad
    with pytest.raises(ValueError, match="may never end"):
        ns.suggest_lrs(model, loss_fn, itertools.cycle(DATA), sgd)


def test_a_frozen_tensor_keeps_a_group_when_the_others_are_split():
    model = make_net()
    model[0].bias.requires_grad_(False)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    ns.suggest_lrs(model, loss_fn, DATA, sgd, "canonical").apply()
    assert [g["name"] for g in sgd.param_groups] == ["0.weight", "2.weight", "2.bias", "rest"]
    assert sgd.param_groups[-1]["params"][0] is model[0].bias


def test_divided_tensors_can_be_judged_but_not_applied():
    model = make_net()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    parts = {"top": [("0.weight", slice(0, 2))], "low": [("0.weight", slice(2, 5))], "rest": ...}
    advice = ns.suggest_lrs(model, loss_fn, DATA, sgd, parts)
    assert len(advice.groups) == 3
    with pytest.raises(ValueError, match="divided among groups"):
        advice.apply()
    assert sgd.param_groups[0]["lr"] == 0.1


def test_wrong_use_is_told():
    model, other = make_net(), make_net()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="another model"):
        ns.suggest_lrs(other, loss_fn, DATA, sgd)
    with pytest.raises(ValueError, match="fraction"):
        ns.suggest_lrs(model, loss_fn, DATA, sgd, fraction=0.0)
    with pytest.raises(ValueError, match="max_change"):
        ns.suggest_lrs(model, loss_fn, DATA, sgd, max_change=1.0)
    half = torch.optim.SGD(model[0].parameters(), lr=0.1)
    with pytest.raises(ValueError, match="does not hold parameter"):
        ns.suggest_lrs(model, loss_fn, DATA, half, ns.make_partition(model))
    assert [group.name for group in ns.suggest_lrs(model, loss_fn, DATA, half).groups] == ["group0"]
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.filterwarnings("ignore:.*not finite")
@pytest.mark.parametrize("lr", [1e110, 1e160, 1e300])
@pytest.mark.parametrize("partition", [None, "canonical"])
def test_an_absurd_rate_is_not_called_one_without_effect(lr, partition):
    """The third derivative overflows first, then the second."""
    model = make_net()
    sgd = torch.optim.SGD(model.parameters(), lr=lr)
    with pytest.raises(
        ns.NotFiniteError, match=r"D3 (is|are) not finite .*: ask with a smaller lr"
    ):
        ns.suggest_lrs(model, loss_fn, DATA, sgd, partition)


@pytest.mark.filterwarnings("ignore:.*not finite", "ignore:Standard errors")
def test_an_absurd_rate_is_not_called_a_division_by_zero():
    """A parameter without gradient has the loss evaluated after a part of the step."""
    torch.manual_seed(0)
    model, x = nn.Linear(3, 1), torch.randn(8, 3)
    model.unused = nn.Parameter(torch.ones(2))
    sgd = torch.optim.SGD(model.parameters(), lr=1e30)

    def squared_error(model, batch):
        return (model(batch) - 1).square().mean() + 0 * model.unused.sum()

    with pytest.raises(ns.NotFiniteError, match="ask with a smaller lr"):
        ns.suggest_lrs(model, squared_error, x, sgd)


def test_a_warning_names_the_callers_line():
    model = make_net()
    adam = torch.optim.Adam(model.parameters())
    with pytest.warns(UserWarning, match="Standard errors need at least two batches") as told:
        ns.suggest_lrs(model, loss_fn, DATA[:1], adam)
    assert [warning.filename for warning in told] == [__file__]


def test_a_bias_before_a_batch_norm_keeps_its_rate():
    """Its gradient is rounding, which Adam makes a step of; no factor is right for it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))
    adam = torch.optim.Adam(model.parameters(), lr=1e-3, eps=0)
    x, y = torch.randn(64, 4), torch.randint(3, (64,))

    def loss_fn(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1])

    batches = [(x[:32], y[:32]), (x[32:], y[32:])]
    advice = ns.suggest_lrs(model, loss_fn, batches, adam, "canonical")
    bias = advice["0.bias"]
    assert bias.verdict == "no effect" and bias.suggested == bias.lrs
    assert VERDICTS["no effect"] in str(advice)
    assert "no effect" not in [advice[name].verdict for name in ("0.weight", "1.bias", "3.bias")]


def test_a_model_without_minimum_goes_to_the_limit():
    """A loss that bends down everywhere, and no cubic term."""
    torch.manual_seed(0)
    model = nn.Linear(2, 1, bias=False)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)

    def bent(model, batch):
        return -model(batch).square().mean()

    x = torch.randn(8, 2)
    advice = ns.suggest_lrs(model, bent, iter([x[:4], x[4:]]), sgd)
    assert not advice.rates.ok and advice.groups[0].change == 10.0
    assert advice.then.real < advice.now.real < 0 and "≥x10" in str(advice)
    assert "D3 is 0 in all groups" in str(advice)
    assert "quadratic, and only max_change limits the best next step" in str(advice)


def test_a_model_with_a_minimum_is_limited_by_it():
    advice = valley_advice(lr=0.09, apart=0.0, shared=0.0)
    assert advice.rates.no_cubic and advice.rates.ok
    assert str(advice).count("D3 is 0 in all groups") == 1 and "only max_change" not in str(advice)


def test_where_nothing_moves_nothing_is_said_about_D3():
    adam = torch.optim.Adam((model := make_net()).parameters(), lr=0.0)
    advice = ns.suggest_lrs(model, loss_fn, DATA, adam)
    assert advice.rates.no_cubic and "D3" not in str(advice) and "no step" in str(advice)


def net_and_loss(kind):
    """Small networks at their initialisation, and a loader of batches."""
    torch.manual_seed(0)
    x, y = torch.randn(256, 6), torch.randint(3, (256,))
    norm = [nn.BatchNorm1d(16)] if kind == "batch norm" else []
    layers = [nn.Linear(6, 16), *norm, nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3)]

    def loss(model, batch):
        out = model(batch[0])
        if kind == "squared error":
            return (out[:, 0] - batch[0].prod(1)).square().mean()
        return F.cross_entropy(out, batch[1])

    return nn.Sequential(*layers), loss, [(a, b) for a, b in zip(x.split(32), y.split(32))]


@pytest.mark.parametrize("partition", [None, "canonical"])
@pytest.mark.parametrize("lr", [1e-4, 1e-2, 1.0])
@pytest.mark.parametrize("kind", ["plain", "batch norm", "squared error"])
def test_nothing_is_suggested_that_is_worse_than_now(kind, lr, partition):
    """Predicted and tried; the trial is repeated by hand on a copy."""
    model, loss, batches = net_and_loss(kind)
    adam = torch.optim.Adam(model.parameters(), lr=lr)
    advice = ns.suggest_lrs(model, loss, batches, adam, partition)
    changes = [group.change for group in advice.groups]
    assert all(0.1 <= change <= 10.0001 for change in changes)
    fails = advice.rehearsal is not None and not advice.rehearsal.now < advice.rehearsal.start
    assert advice.then.predicted <= advice.now.predicted or fails
    rounding = 1e-6 * float(advice.summary.loss)
    assert advice.then.real <= advice.now.real + rounding
    assert advice.then.real < 0 or lr == 1.0
    before = float(sum(float(loss(model, b)) for b in batches)) / 8
    twin, optimizer, told = copy.deepcopy((model, adam, changes))
    (sum(loss(twin, batch) for batch in batches) / 8).backward()
    starts = [p.detach().clone() for p in twin.parameters()]
    optimizer.step()
    scale = dict(zip((g.name for g in advice.groups), told, strict=True))
    labels = advice.summary.partition.labels
    with torch.no_grad():
        for (name, p), start in zip(twin.named_parameters(), starts, strict=True):
            factor = scale[advice.summary.names[labels[name]]]
            p.copy_(start + factor * (p - start))
        after = float(sum(loss(twin, batch) for batch in batches)) / 8
    assert after - before == pytest.approx(advice.then.real, abs=1e-5, rel=1e-4)


def test_noise_does_not_hide_a_rate_that_fails():
    """Batches of four at a wild rate agree on nothing; the step and a rehearsal tell."""

    def ask(optimizer, lr, **options):
        torch.manual_seed(0)
        layers = nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1)
        model, x = nn.Sequential(*layers), torch.randn(64, 5)
        y = 10 * x.sum(1, keepdim=True).sin()

        def loss(model, batch):
            return (model(batch[0]) - batch[1]).square().mean()

        adam = optimizer(model.parameters(), lr=lr)
        return ns.suggest_lrs(model, loss, list(zip(x.split(4), y.split(4))), adam, **options)

    advice = ask(torch.optim.Adam, 3.0)
    assert advice.now.real > 1000 and advice.then.real < 0
    assert advice.rehearsal.now > advice.rehearsal.start and advice.groups[0].change == 0.1
    trains = ask(torch.optim.RMSprop, 0.3)  # its later steps are shorter than the first
    assert trains.now.real > 1000 and trains.rehearsal.now < trains.rehearsal.start
    assert trains.groups[0].change == 1 and ": keep the present one, or measure on" in str(trains)
    unknown = ask(torch.optim.Adam, 3.0, rehearsal=False)
    assert "keep the present" not in str(unknown) and ": measure on more batches" in str(unknown)


@pytest.mark.parametrize(
    ("lr", "times", "unseen"), [(1e-4, "larger", 1), (0.5, "smaller", 1), (1e-4, "larger", 2)]
)
def test_a_rehearsal_is_a_training_that_is_undone(lr, times, unseen):
    """By hand, on a copy: steps on the first batches, in the end the loss of the last quarter."""
    data = make_batches({1: 6, 2: 8}[unseen], seed=4)
    seen, steps = len(data) - unseen, 2 * len(data)
    model = make_net(torch.float64)
    adam = trained(model, torch.optim.Adam(model.parameters(), lr=1e-4))
    adam.param_groups[0]["lr"] = lr
    advice = ns.suggest_lrs(model, loss_fn, data, adam, "canonical")
    changes = [group.change for group in advice.groups]
    u = [v.norm() for v in next_step(model, adam, data).values()]
    c = float(np.linalg.norm(np.multiply(u, changes)) / np.linalg.norm(u))
    assert (c > 1) == (times == "larger")
    steps = (steps, round(steps / c**0.5)) if c > 1 else (round(steps * c**0.25), steps)
    reached = []
    for count, factors in zip(steps, ([1.0] * 4, changes), strict=True):
        twin, optimizer = copy.deepcopy((model, adam))
        multiply_rates(optimizer, ns.make_partition(twin), factors)
        after = []
        for k in range(count):
            optimizer.zero_grad()
            loss_fn(twin, data[k % seen]).backward()
            optimizer.step()
            with torch.no_grad():
                after.append(np.mean([float(loss_fn(twin, b)) for b in data[seen:]]))
        reached.append(np.mean(after[-max(round(count / 8), 1) :]))
    now, then = (pytest.approx(loss, rel=1e-9) for loss in reached)
    assert advice.rehearsal[:4] == (steps[0], now, then, steps[1]) and reached[1] < reached[0]
    assert f"in {steps[0]} steps now" in str(advice) and f"in {steps[1]} as sugg" in str(advice)


def test_a_rate_that_does_not_train_is_lowered_though_its_next_step_is_the_best():
    """Momentum has yet to build up. By hand: the loss of the five batches that are trained on.

    The smaller rate has half of the steps.
    """
    model = make_net(torch.float64)
    sgd = torch.optim.SGD(model.parameters(), lr=3.0, momentum=0.9)
    advice = ns.suggest_lrs(model, loss_fn, DATA, sgd)
    (group,) = advice.groups
    assert group.verdict == "lower" and group.change == pytest.approx(0.1)
    assert advice.then.real > advice.now.real and group.factor > 0.5
    reached = []
    for lr, count in ((3.0, 12), (group.suggested[0], 6)):
        twin = copy.deepcopy(model)
        optimizer = torch.optim.SGD(twin.parameters(), lr=lr, momentum=0.9)
        after = []
        for k in range(count):
            optimizer.zero_grad()
            loss_fn(twin, DATA[k % 5]).backward()
            optimizer.step()
            after.append(np.mean([float(loss_fn(twin, batch).detach()) for batch in DATA[:5]]))
        reached.append(np.mean(after[-round(count / 8) :]))
    now, then = (pytest.approx(loss, rel=1e-9) for loss in reached)
    assert advice.rehearsal[:4] == (12, now, then, 6) and reached[1] < 0.5 * reached[0]
    assert "in 6 as suggested, though the next step is worse" in str(advice)
    assert "rehearsal: the loss of the batches it trains on goes from" in str(advice)
    kept = ns.suggest_lrs(model, loss_fn, DATA, sgd, rehearsal=False)
    assert kept.groups[0].change != group.change and kept.then.real <= kept.now.real


@pytest.mark.parametrize(("end", "is_lowered"), [(1.1, False), (1.3, True)])
def test_a_rate_that_trains_is_not_lowered_against_the_prediction(monkeypatch, end, is_lowered):
    """The present rate is the best for the next step; smaller ones get further from 1.2."""

    def train(probe, optimizer, batches, factors, lengths, seen):
        return {n: 1.2 if n == 0 else 0.9 if (factors < 1).any() else end for n in lengths}

    best = valley_advice(lr=0.1, apart=0.0, shared=0.0).groups[0].factor * 0.1
    monkeypatch.setattr(rehearsal, "_train", train)
    advice = valley_advice(lr=best, apart=0.0, shared=0.0)
    assert [g.factor for g in advice.groups] == pytest.approx([1.0, 1.0])
    assert {g.verdict for g in advice.groups} == {"lower" if is_lowered else "keep"}
    assert (advice.then.predicted > advice.now.predicted) == is_lowered
    assert not advice.rehearsal.asked_for and advice.rehearsal.then == 0.9
    told = "keep: a smaller rate got further in the rehearsal, but its next step is predicted to be"
    assert (told in str(advice)) != is_lowered
    assert "rehearsal: the loss of the batches it trains on goes from 1.2 to" in str(advice)


@pytest.mark.filterwarnings("ignore:Standard errors need at least two batches")
@pytest.mark.parametrize(("count", "which"), [(1, "the batches it trains on"), (2, "held-out")])
def test_a_single_batch_is_not_held_out(count, which):
    model = make_net(torch.float64)
    sgd = torch.optim.SGD(model.parameters(), lr=1e-3)
    advice = ns.suggest_lrs(model, loss_fn, iter(DATA[:count]), sgd)
    assert advice.rehearsal.then_steps < advice.rehearsal.steps
    assert f"rehearsal: the loss of {which}" in str(advice)


@pytest.mark.parametrize(("gain", "verdict"), [(1e-7, "keep"), (1e-4, "lower")])
def test_a_rate_is_not_lowered_by_rounding(monkeypatch, gain, verdict):
    """Where neither rate moves the loss, rounding decides which one is ahead."""

    def train(probe, optimizer, batches, factors, lengths, seen):
        return {n: 1.2 - gain * (seen and (factors < 1).any()) for n in lengths}

    monkeypatch.setattr(rehearsal, "_train", train)
    model = make_net(torch.float64)
    advice = ns.suggest_lrs(model, loss_fn, DATA, torch.optim.SGD(model.parameters(), lr=1e-9))
    assert advice.groups[0].verdict == verdict


def test_a_rate_that_does_well_in_the_long_run_stays():
    """The best next step is half as long, along the steep direction; the flat one needs more."""
    steepness = torch.tensor([100.0, 1.0], dtype=torch.float64)

    class Valley(nn.Module):
        def __init__(self):
            super().__init__()
            self.x = nn.Parameter(torch.tensor([1.0, 10.0], dtype=torch.float64))

    def loss(model, batch):
        return 0.5 * (steepness * model.x**2).sum()

    model = Valley()
    sgd = torch.optim.SGD(model.parameters(), lr=0.019)
    batches = [(torch.zeros(1),)] * 16
    short = ns.suggest_lrs(model, loss, batches, sgd, rehearsal=False)
    assert short.groups[0].verdict == "lower" and short.groups[0].change == pytest.approx(
        0.53, abs=0.01
    )
    advice = ns.suggest_lrs(model, loss, batches, sgd)
    assert advice.groups[0].verdict == "keep" and advice.groups[0].suggested == (0.019,)
    assert advice.groups[0].factor == short.groups[0].factor and advice.then == advice.now
    small = torch.optim.SGD(model.parameters(), lr=0.002)  # here both say more, the rehearsal most
    advice = ns.suggest_lrs(model, loss, batches, small)
    (more,) = advice.groups
    assert more.verdict == "raise" and 5.0 < more.factor < more.change < 2 / 100 / 0.002
    head, row = (line.split("  ") for line in str(advice).splitlines()[:2])
    assert "best next step" in [x.strip() for x in head]
    assert {f"x{more.change:.3g}", f"x{more.factor:.3g}"} <= {x.strip() for x in row}


class Point(nn.Module):
    def __init__(self):
        super().__init__()
        self.x = nn.Parameter(torch.tensor(5.0, dtype=torch.float64))


def distance(model, batch):
    return 0.5 * (model.x - batch[0]).square().mean()


def test_a_larger_rate_has_to_be_faster_in_spite_of_its_noise():
    """x follows noisy targets: the best next step has the rate 1, and in the end its noise."""
    draw = torch.Generator().manual_seed(0)
    targets = [(torch.randn(1, generator=draw, dtype=torch.float64),) for _ in range(16)]
    for lr, verdict, least, most in ((0.3, "keep", 1, 1), (0.003, "raise", 9, 10)):
        model = Point()
        sgd = torch.optim.SGD(model.parameters(), lr=lr)
        advice = ns.suggest_lrs(model, distance, targets, sgd)
        assert advice.groups[0].factor == pytest.approx(min(1 / lr, 10))
        assert advice.groups[0].verdict == verdict
        assert least <= advice.groups[0].change <= most
        assert "the next step is worse" not in str(advice)


@pytest.mark.parametrize("lr", [3.0, 50.0, 200.0, 1e4, 1e20, 1e60])
def test_a_rate_that_makes_the_loss_grow_is_lowered(lr):
    """Above 2 each step makes x larger, and a smaller rate too: the more so in more steps."""
    model, targets = Point(), [(torch.zeros(1, dtype=torch.float64),)] * 4
    sgd = torch.optim.SGD(model.parameters(), lr=lr)
    advice = ns.suggest_lrs(model, distance, targets, sgd)
    steps, now, then, then_steps, *_ = advice.rehearsal
    assert advice.groups[0].verdict == "lower" and advice.groups[0].change < 0.5
    assert then < now or then == now == math.inf
    assert then_steps == (8 if lr < 100 else steps)
    assert float(model.x) == 5.0 and sgd.param_groups[0]["lr"] == lr


@pytest.mark.parametrize(
    ("c", "present", "other", "is_better"),
    [
        (0.1, {0: 1.0, 4: 3.0}, {4: 5.0, 8: 9.0}, False),  # both make it grow, the other more
        (0.1, {0: 1.0, 4: 3.0}, {4: 2.0, 8: 9.0}, True),
        (0.1, {0: 1.0, 4: 3.0}, {4: 5.0, 8: 2.0}, True),
        (0.1, {0: 9.0, 4: 3.0}, {4: 2.0, 8: 4.0}, False),  # the present one is fast
        (0.1, {0: 1.0, 4: math.inf}, {4: math.inf, 8: math.inf}, True),
        (4.0, {0: 1.0, 8: math.inf}, {4: math.inf, 8: math.inf}, False),
        (4.0, {0: 1.0, 8: 3.0}, {4: 3.0, 8: 2.0}, False),
        (4.0, {0: 9.0, 8: 3.0}, {4: 2.0, 8: 9.0}, True),
        (4.0, {0: 1.0, 8: 3.0}, {4: 2.0, 8: 9.0}, False),  # it makes the loss grow as well
        (4.0, {0: 1.0, 8: math.inf}, {4: 2.0, 8: math.inf}, False),
        (4.0, {0: 1.0, 8: 1.003}, {4: 1.002, 8: 1.002}, True),  # nothing is left to learn
    ],
)
def test_when_another_rate_is_better(c, present, other, is_better, monkeypatch):
    """By the losses after so many of 8 steps, at a rate c times as large."""

    def reached(probe, optimizer, batches, factors, lengths, seen):
        losses = present if factors[0] == 1 else other
        return {n: losses[n] for n in lengths}

    monkeypatch.setattr(rehearsal, "_train", reached)
    model = Point()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [(torch.zeros(1, dtype=torch.float64),)] * 4
    probe = Probe(model, distance, batches, ns.make_partition(model))
    found, best = rehearsal.rehearse(probe, sgd, [np.array([c])], [c])
    assert best == (0 if is_better else None)
    assert found.now == present[found.steps] and found.then == other[found.then_steps]


def test_where_training_diverges_smaller_rates_are_rehearsed():
    """Not the rates with which it diverges as well, only later."""
    torch.manual_seed(0)
    x = torch.randn(256, 12)
    y = torch.sin(2 * x[:, :1]) + x[:, 1:2] * x[:, 2:3]
    model = nn.Sequential(nn.Linear(12, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU())
    model.append(nn.Linear(48, 1))
    sgd = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    batches = list(zip(x.split(16), y.split(16), strict=True))

    def loss(model, batch):
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    advice = ns.suggest_lrs(model, loss, batches, sgd, "layers")
    assert not advice.rehearsal.now <= advice.rehearsal.start  # it may be inf
    assert {g.verdict for g in advice.groups} == {"lower"}
    assert advice.rehearsal.then < advice.rehearsal.start


@pytest.mark.parametrize(
    ("c", "lengths"), [(4.0, (32, 16)), (1.5, (32, 26)), (1.0, (32, 32)), (1 / 16, (16, 32))]
)
def test_after_how_many_steps_rates_are_compared(c, lengths):
    """A larger one has sqrt(c) times as few; a smaller one c^(1/4) times as many as the present."""
    assert rehearsal._lengths(32, c) == lengths


def test_a_rate_that_would_make_the_loss_grow_is_not_taken():
    """The best next step is ten times as long; the second such step would go up a steep wall."""
    steepness = torch.tensor([100.0, 1.0], dtype=torch.float64)
    model = Point()
    model.x = nn.Parameter(torch.tensor([1e-3, 10.0], dtype=torch.float64))
    sgd = torch.optim.SGD(model.parameters(), lr=0.01)

    def loss(model, batch):
        return 0.5 * (steepness * model.x**2).sum()

    advice = ns.suggest_lrs(model, loss, [(torch.zeros(1),)] * 16, sgd)
    (group,) = advice.groups
    assert group.factor == pytest.approx(10.0) and group.change == 1 and group.verdict == "keep"
    assert advice.rehearsal.then > 1e6 > 50 > advice.rehearsal.now
    others = advice.rehearsal.change  # a user can take this rate all the same
    assert others > 1 and f" with lr x{others:.3g}\n" in str(advice)
    advice.rehearsal = advice.rehearsal._replace(change=rehearsal._common(np.array([3.0, 1.0])))
    assert " with other rates\n" in str(advice)


def test_rates_within_a_factor_of_two_are_alike():
    """The best rate is 1; 0.75 stays, unless smaller changes are asked for."""
    model, targets = Point(), [(torch.zeros(1, dtype=torch.float64),)] * 4
    sgd = torch.optim.SGD(model.parameters(), lr=0.75)
    (group,) = ns.suggest_lrs(model, distance, targets, sgd).groups
    assert group.factor == pytest.approx(4 / 3) and group.change == 1 and group.verdict == "keep"
    for asked in ({"max_change": 1.5}, {"fraction": 0.9}, {"rehearsal": False}):
        advice = ns.suggest_lrs(model, distance, targets, sgd, **asked)
        assert 1.1 < advice.groups[0].change < 1.51


def test_rates_within_a_factor_of_three_are_kept_whatever_a_rehearsal_says():
    """The best rate is 1. The limit counts where it is smaller than three."""
    model, targets = Point(), [(torch.zeros(1, dtype=torch.float64),)] * 4
    told = "keep: another rate got further in the rehearsal, but a change by less than x3"
    for lr, is_kept in ((0.36, True), (0.1, False)):
        sgd = torch.optim.SGD(model.parameters(), lr=lr)
        advice = ns.suggest_lrs(model, distance, targets, sgd)
        assert advice.rehearsal.then < advice.rehearsal.now
        assert (advice.groups[0].change == 1) == (told in str(advice)) == is_kept
        assert advice.groups[0].verdict == ("keep" if is_kept else "raise")
    sgd = torch.optim.SGD(model.parameters(), lr=0.36)
    assert ns.suggest_lrs(model, distance, targets, sgd, max_change=2.2).groups[0].change > 2


def test_an_output_layer_of_zeros_is_told_not_ReLU():
    """As in diffusion models: nothing depends on the layer before it yet."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.SiLU(), nn.Linear(8, 1))
    nn.init.zeros_(model[2].weight)
    batches = [(x := torch.randn(16, 6), x[:, :1]) for _ in range(4)]
    sgd = torch.optim.SGD(model.parameters(), lr=1e-2)

    def squared(model, batch):
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    for partition in ("layers", None):
        advice = ns.suggest_lrs(model, squared, batches, sgd, partition)
        assert advice.groups[0].verdict == "not yet" and advice.rates.no_cubic
        said = str(advice)
        assert "a layer before an output layer that starts at zero" in said
        assert "D3 is 0 in all groups: the model" in said and "ReLU" not in said
    noise = [(x, torch.randn_like(y)) for x, y in batches]
    advice = ns.suggest_lrs(model, squared, noise, sgd)
    assert advice.groups[0].verdict == "noise" and "ReLU" not in str(advice)


def test_a_fresh_lora_factor_is_left_out_by_name():
    """B = 0: nothing depends on A yet; weight decay moves it all the same."""
    torch.manual_seed(0)

    class Adapted(nn.Module):
        def __init__(self):
            super().__init__()
            self.A, self.B = nn.Parameter(torch.randn(4, 6)), nn.Parameter(torch.zeros(3, 4))
            self.base = nn.Linear(6, 3).requires_grad_(False)

        def forward(self, x):
            return self.base(x) + x @ self.A.T @ self.B.T

    _, loss, batches = net_and_loss("plain")
    model = Adapted()
    adam = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1)
    advice = ns.suggest_lrs(model, loss, batches, adam, "canonical")
    assert advice["A"].verdict == "not yet" and advice["A"].change == 1.0
    still = torch.optim.SGD(model.parameters(), lr=1e-4)
    assert ns.suggest_lrs(model, loss, batches, still, "canonical")["A"].verdict == "not yet"
    assert advice["B"].verdict == "raise" and advice.then.real < advice.now.real < 0
    assert next(row for row in advice._rows() if row[0] == "A")[5] == ""
    whole = ns.suggest_lrs(model, loss, batches, adam)  # nothing is known of A's own rate
    assert whole.groups[0].verdict == "not yet" and whole.groups[0].change == 1.0
    right = torch.optim.SGD(model.parameters(), lr=1e-3)
    alike = [batches[0]] * 2
    options = {"lambda_int": 0.0, "max_change": 1e6, "rehearsal": False}
    first = ns.suggest_lrs(model, loss, alike, right, **options)
    assert first.groups[0].verdict == "not yet" and first.groups[0].factor > 1
    right.param_groups[0]["lr"] *= first.groups[0].factor
    assert ns.suggest_lrs(model, loss, alike, right, **options).groups[0].verdict == "keep"
    loss(model, batches[0]).backward()
    adam.step()
    assert ns.suggest_lrs(model, loss, batches, adam).groups[0].change > 1
    too_large = torch.optim.AdamW(model.parameters(), lr=100.0)
    assert ns.suggest_lrs(model, loss, batches, too_large).groups[0].change < 1


def test_an_optimizer_that_does_not_move_yet():
    """As at the start of a warm-up."""
    model = make_net()
    sgd = torch.optim.SGD(model.parameters(), lr=0.0)
    advice = ns.suggest_lrs(model, loss_fn, DATA, sgd, "canonical")
    assert [(g.verdict, g.factor, g.change) for g in advice.groups] == [("no step", 1.0, 1.0)] * 4
    assert advice.now == advice.then == (0.0, 0.0) and advice.rehearsal is None
    assert VERDICTS["no step"] in str(advice) and "ask before the scheduler" in str(advice)


def test_advice_below_the_peak_of_a_schedule_says_so():
    model = make_net()
    adam = torch.optim.Adam(model.parameters(), lr=1e-3)
    plain = str(ns.suggest_lrs(model, loss_fn, DATA, adam))
    assert "at its peak" not in plain
    torch.optim.lr_scheduler.OneCycleLR(adam, max_lr=0.01, total_steps=100)
    advice = ns.suggest_lrs(model, loss_fn, DATA, adam)
    said = str(advice)
    assert "a schedule at 0.04 of its peak: too low for advice" in sentence(advice)
    adam.param_groups[0]["lr"] = 0.002  # the schedule goes on, and the advice stays what it was
    assert str(advice) == said
    assert "a schedule has lr at 0.0004, and at 0.01 at its peak: this is advice for 0.0004" in said
    assert "ask before the scheduler is made" in said
    later = ns.suggest_lrs(model, loss_fn, DATA, adam)
    assert "a schedule at 0.2 of its peak; lr 0.002" in sentence(later)


def test_apply_warns_where_rates_have_changed_since():
    model = make_net()
    adam = torch.optim.Adam(model.parameters(), lr=1e-4)
    advice = ns.suggest_lrs(model, loss_fn, DATA, adam)
    assert advice.groups[0].change > 1
    adam.param_groups[0]["lr"] = 5e-5
    with pytest.warns(UserWarning, match=r"were \[0.0001\] when .* are \[5e-05\] now"):
        advice.apply()
    assert adam.param_groups[0]["lr"] == pytest.approx(5e-5 * advice.groups[0].change)


def test_a_lower_rate_is_for_the_next_steps_once_training_has_started():
    model = make_net()
    adam = torch.optim.Adam(model.parameters(), lr=3.0)
    advice = ns.suggest_lrs(model, loss_fn, DATA, adam)
    assert advice.groups[0].verdict == "lower"
    assert "; lr 3 should be x0." in sentence(advice)
    assert "; for the next steps lr 3 could be x0." in sentence(advice, started=True)


SCHEDULERS = {
    "StepLR": lambda o: torch.optim.lr_scheduler.StepLR(o, 3),
    "MultiStepLR": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [3]),
    "ExponentialLR": lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
    "MultiplicativeLR": lambda o: torch.optim.lr_scheduler.MultiplicativeLR(o, lambda t: 0.9),
    "ConstantLR": lambda o: torch.optim.lr_scheduler.ConstantLR(o, 0.5, 3),
    "LinearLR": lambda o: torch.optim.lr_scheduler.LinearLR(o, 0.5),
    "PolynomialLR": lambda o: torch.optim.lr_scheduler.PolynomialLR(o, 9),
    "LambdaLR": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda t: 0.9**t),
    "CosineAnnealingLR": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 9),
    "CosineAnnealingWarmRestarts": lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(
        o, 9
    ),
    "OneCycleLR": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=9),
    "CyclicLR": lambda o: torch.optim.lr_scheduler.CyclicLR(o, 1e-4, 0.1, 4),
    "ReduceLROnPlateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o),
    "SequentialLR": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o, [SCHEDULERS["LinearLR"](o), SCHEDULERS["CosineAnnealingLR"](o)], [3]
    ),
}


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_apply_warns_where_a_scheduler_undoes_it(kind, recwarn):
    """The warning is there if and only if the rates differ from a twin's by another factor."""
    rates = []
    for factor in (1.0, 5.0):
        model = make_net()
        sgd = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        scheduler = SCHEDULERS[kind](sgd)
        sgd.step()
        if factor != 1:
            recwarn.clear()
            multiply_rates(sgd, ns.make_partition(model, "trivial"), [factor])
        for metric in range(4):
            scheduler.step(*([metric] if kind == "ReduceLROnPlateau" else []))
        rates.append(sgd.param_groups[0]["lr"])
    kept = rates[1] / rates[0] == pytest.approx(5.0)
    warned = [str(w.message) for w in recwarn if "scheduler" in str(w.message)]
    assert bool(warned) == (not kept), rates
    assert all(kind in text for text in warned)
    peak = "highest rate of its cycle"  # the present one is a fraction of it
    assert all((peak in text) == (kind in ("OneCycleLR", "CyclicLR")) for text in warned)


def test_apply_warns_where_a_scheduler_was_made_for_fewer_groups():
    model = make_net()
    adam = trained(model, torch.optim.Adam(model.parameters(), lr=1e-4))
    scheduler = torch.optim.lr_scheduler.LambdaLR(adam, lambda t: 1.0)
    with pytest.warns(UserWarning, match=r"now has 4 parameter groups.*LambdaLR"):
        ns.suggest_lrs(model, loss_fn, DATA, adam, "canonical").apply()
    del scheduler
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is left that could undo it
        ns.suggest_lrs(model, loss_fn, DATA, adam).apply()


def test_it_helps():
    """Adam with a rate a hundred times too small: three rounds of advice make up for it."""
    torch.manual_seed(0)
    x = torch.randn(400, 10)
    y = (x @ torch.randn(10) > 0).long()
    batches = [(x[i : i + 50], y[i : i + 50]) for i in range(0, 400, 50)]

    def loss(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1])

    final = []
    for advised in (False, True):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(10, 20), nn.Tanh(), nn.Linear(20, 2))
        adam = torch.optim.Adam(model.parameters(), lr=1e-5)
        for t in range(60):
            if advised and t in (1, 10, 20):
                ns.suggest_lrs(model, loss, batches, adam, fraction=0.3).apply()
            adam.zero_grad()
            loss(model, batches[t % 8]).backward()
            adam.step()
        with torch.no_grad():
            final.append(float(sum(loss(model, b) for b in batches) / 8))
    assert final[1] < 0.5 * final[0]
    assert torch.isfinite(flat(model)).all()


@pytest.mark.parametrize(
    ("real", "rehearsed", "taken"),
    [
        ({9.0: -2.0, 3.0: -2.0}, [9.0, 3.0], 3.0),
        ({9.0: 1.0, 3.0: -2.0}, [3.0], None),
        ({9.0: 1.0, 3.0: 1.0}, [2.5], 2.5),  # too small a change to be made
    ],
)
def test_two_changes_are_rehearsed(real, rehearsed, taken):
    """The longest one and its root, those of them that are better than now; or else a shorter."""
    model = SimpleNamespace(live=np.array([True]), limits=(0.1, 10.0), change=lambda factors: 0.0)
    summary = SimpleNamespace(gbar=torch.ones(1), loss=torch.tensor(1.0))
    real = {1.0: -1.0, 2.5: -2.0, **real}
    asked = []

    def try_factors(several):
        return [real.get(round(float(c[0]), 6), 1.0) for c in several]

    def rehearse_factors(several):
        asked.extend(float(c[0]) for c in several)
        return "rehearsal", None if taken is None else asked.index(taken)

    trials = _Trials(model, summary, try_factors, rehearse_factors)
    found = trials.check(np.array([2.5]), np.array([9.0]), 2.0)
    assert asked == rehearsed and found.rehearsal == "rehearsal"
    is_made = taken == 3.0
    assert found.changes.tolist() == [taken if is_made else 1.0]
    assert found.verdict == (None if is_made else "keep")
    assert found.then.real == (-2.0 if is_made else -1.0)


@pytest.mark.parametrize(("now", "expected"), [(1.0, [0.1, 1.0]), (-1e-3, [1.0, 1.0])])
def test_the_lowest_rates_are_the_last_resort(now, expected):
    """Where the present rates raise the loss, and longer and shorter changes do so even more."""
    model = SimpleNamespace(
        live=np.array([True, False]), limits=(0.1, 10.0), change=lambda factors: -float(now < 0)
    )
    summary = SimpleNamespace(gbar=torch.ones(2), loss=torch.tensor(1.0))
    changes = np.array([4.0, 1.0])

    def try_factors(several):
        return [now, *(2.0 for _ in several[1:-1]), -0.5]

    found = _Trials(model, summary, try_factors, None).check(changes, changes**2, 2.0)
    assert found.changes.tolist() == expected
    assert found.verdict == (None if now > 0 else "refuted")
    assert found.then.real == (-0.5 if now > 0 else now)
