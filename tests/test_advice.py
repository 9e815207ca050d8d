"""Advice for other optimizers: the factors are right, and nothing changes until apply()."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import newton_summary as ns
from newton_summary.measuring.advice import VERDICTS, _verdict
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
    advice = ns.suggest_lrs(model, quadratic_loss, None, sgd, lambda_int=0.0, max_change=1e3)
    g = model.H @ model.theta().detach() - model.b
    expected = float(g @ g / (g @ model.H @ g)) / 0.01
    (group,) = advice.groups
    assert group.factor == pytest.approx(expected, rel=1e-10)
    assert group.verdict == "raise" and group.stderr is None and group.lrs == (0.01,)
    assert group.suggested == pytest.approx((0.01 * expected,), rel=1e-10)
    advice.apply()
    assert sgd.param_groups[0]["lr"] == pytest.approx(0.01 * expected, rel=1e-10)
    again = ns.suggest_lrs(model, quadratic_loss, None, sgd, lambda_int=0.0)
    assert again.groups[0].factor == pytest.approx(1.0) and again.groups[0].verdict == "keep"


@pytest.mark.parametrize("kind", DIRECTIONS)
def test_factors_minimise_the_model_along_the_optimizers_step(kind):
    """The factors are the rates of a summary along the step that the optimizer makes next."""
    model = make_net(torch.float64)
    optimizer = trained(model, DIRECTIONS[kind](list(model.parameters())))
    u = next_step(model, optimizer, DATA)
    advice = ns.suggest_lrs(model, loss_fn, DATA, optimizer, "canonical", lambda_int=2.0)
    if kind == "Muon":  # which holds the matrices only
        assert [group.name for group in advice.groups] == ["0.weight", "2.weight"]
        u["0.bias"].zero_(), u["2.bias"].zero_()
        part = ns.make_partition(model, {"w0": r"0\.weight", "w2": r"2\.weight", "rest": ...})
    else:
        part = ns.make_partition(model, "canonical")
    summary = ns.summarize(model, loss_fn, DATA, partition=part, direction=u)
    expected = ns.learning_rates(summary, lambda_int=2.0).eta[: len(advice.groups)]
    factors = torch.tensor([group.factor for group in advice.groups], dtype=torch.float64)
    torch.testing.assert_close(factors, expected, rtol=1e-6, atol=1e-8)


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

    generator = torch.Generator().manual_seed(0)
    lots = [(x, torch.randint(2, (len(x),), generator=generator)) for x, _ in DATA]
    noisy = ns.suggest_lrs(model, loss_fn, lots, adam, "canonical", direction_data=DATA[0])
    assert any(group.verdict == "noise" and group.change == 1.0 for group in noisy.groups)
    one = ns.suggest_lrs(model, loss_fn, DATA[0], adam)
    assert one.groups[0].stderr is None


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
        (float("nan"), None, "noise"),
        (2.0, float("nan"), "noise"),
    ],
)
def test_verdicts(factor, error, verdict):
    assert _verdict(factor, error) == verdict
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
    for part in ("body", "0.001", "factor", "±", "suggested", "no step", "predicted change"):
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


def test_a_step_that_promises_too_much_is_told():
    """The whole of the loss is 1/2; along an almost straight line the model falls to -49."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_fn(model, scale):  # slope 1 and curvature 0.01
        return model.weight.sum() - 0.505 + 0.005 * model.weight.square().sum()

    advice = ns.suggest_lrs(model, loss_fn, [(torch.ones(1),)] * 2, sgd, lambda_int=0)
    assert "promises -51" in str(advice) and "suggest_lambda_int" in str(advice)
    summary = ns.summarize(model, loss_fn, torch.ones(1))
    assert "more than the whole loss of 0.5" in str(ns.learning_rates(summary))
    steep = ns.Summary(gbar=summary.gbar, Hbar=100 * summary.Hbar, D3=summary.D3, loss=0.52)
    assert "whole loss" not in str(ns.learning_rates(steep))


def test_no_minimum_suggests_nothing():
    """A loss that bends down everywhere, and no cubic term: the status is in the table."""
    model = nn.Linear(2, 1, bias=False)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)

    def bent(model, batch):
        return -model(batch).square().mean()

    advice = ns.suggest_lrs(model, bent, torch.randn(8, 2), sgd)
    assert not advice.rates.ok and advice.groups[0].change == 1.0
    assert advice.groups[0].verdict == "unknown"
    assert advice.rates.status in str(advice)


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
