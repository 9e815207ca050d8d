"""NewtonSummary inside real loops: closures, scalers, frozen layers, bad gradients, bad input."""

from __future__ import annotations

import inspect
import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import newton_summary as ns
from test_optimizer import (
    CURVATURE,
    MODES,
    PAPER,
    TRAIN,
    _seed_and_strict_warnings,  # noqa: F401
    flat,
    loss_fn,
    make_batches,
    make_net,
    make_optimizer,
    quiet,
    train,
)

# --- closures -------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_a_curvature_closure_does_what_curvature_data_does(mode):
    """Both ways measure the same batches."""
    one, other = make_net(), make_net()
    options = {"lr": 0.1, "summary_period": 3, **MODES[mode]}
    with_data = make_optimizer(one, **options)
    with_closure = make_optimizer(other, curvature=None, **options)
    batches, returned = iter(CURVATURE * 8), []

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
    if mode == "paper":
        assert [due for due, _ in returned] == [t % 3 == 0 for t in range(12)]


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


@pytest.mark.parametrize("partition", ["trivial", "canonical"])
def test_a_batch_may_be_a_single_tensor(partition):
    """As of an autoencoder, or the tokens of a language model."""
    moved = []
    for wrap, read in ((lambda x: x, lambda x: x), (lambda x: (x,), lambda batch: batch[0])):
        model = make_net()
        opt = ns.NewtonSummary(
            ns.make_partition(model, partition),
            lambda model, batch, read=read: model(read(batch)).square().mean(),
        )
        for x, _ in TRAIN:
            opt.zero_grad()
            model(x).square().mean().backward()
            opt.step(wrap(x))
        moved.append(flat(model))
    assert torch.equal(*moved)


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


@pytest.mark.parametrize("given", [(), (loss_fn,)])
def test_a_refresh_without_anything_to_measure_is_refused(given):
    """Users of a trainer, which calls step(), are told what they can pass."""
    model = make_net()
    opt = ns.NewtonSummary(model, *given)
    loss_fn(model, TRAIN[0]).backward()
    told = r"nothing to measure it on: .*Where a trainer .*curvature=\(loss_fn, loader\)"
    with pytest.raises(ValueError, match=told):
        opt.step()


# --- what people do with gradients ----------------------------------------------------------------


def test_clipping_and_accumulation_are_what_they_are_for_sgd():
    """u is made of what is in .grad when step is called."""
    model = make_net()
    opt = make_optimizer(model, **PAPER)
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


@pytest.mark.parametrize("kind", ["paper", "steered", "given"])
def test_a_layer_can_be_added_later(kind):
    """An unfrozen layer becomes one more group, and the averages start anew."""
    model = make_net()
    model[0].requires_grad_(False)
    part = ns.make_partition(model)
    given = torch.optim.Adam(part.params.values(), lr=0.01) if kind == "given" else None
    made = PAPER if kind == "paper" else {"direction": given}
    opt = ns.NewtonSummary(part, lr=0.1, summary_period=2, curvature=(loss_fn, CURVATURE), **made)
    quiet(lambda: train(model, opt, 3))
    start = model[0].weight.detach().clone()
    buffer = opt.state[model[2].weight]["momentum_buffer"].clone() if kind == "paper" else None
    model[0].requires_grad_(True)
    opt.add_param_group({"params": model[0].parameters(), "name": "first", "lr": 0.2})
    assert opt.partition.names == ("2.weight", "2.bias", "first")
    assert opt.param_groups[-1]["name"] == "first" and opt.param_groups[-1]["lr"] == 0.2
    assert opt.eta[:2].tolist() == [group["eta"] for group in opt.param_groups[:2]]
    before = opt.refreshes
    quiet(lambda: train(model, opt, 1, start=3))
    assert opt.refreshes >= before and len(opt.eta) == 3
    if kind == "paper":
        u = opt.state[model[2].weight]["momentum_buffer"]
        torch.testing.assert_close(u, 0.9 * buffer + model[2].weight.grad)
    elif given is not None:
        assert len(given.state) == 4
    quiet(lambda: train(model, opt, 20, start=4))
    assert not torch.equal(model[0].weight.detach(), start)
    with pytest.raises(ValueError, match="already in the partition"):
        opt.add_param_group({"params": [model[0].bias], "name": "again"})
    with pytest.raises(ValueError, match="not a parameter of the model"):
        opt.add_param_group({"params": [torch.zeros(2, requires_grad=True)], "name": "other"})


@pytest.mark.parametrize("level", [1.0, 0.1])
def test_an_added_group_leaves_the_step_of_the_direction_as_long_as_it_was(level):
    """Also below the peak of a schedule, which the direction's own rate has been multiplied by."""
    model, batch = make_net(), TRAIN[0]
    model[0].requires_grad_(False)
    sgd = torch.optim.SGD(model[2].parameters(), lr=0.1)
    opt = ns.NewtonSummary(model, loss_fn, direction=sgd)

    def length():
        opt.zero_grad()
        loss_fn(model, batch).backward()
        before = model[2].weight.detach().clone()
        opt.step(batch)
        return float((before - model[2].weight).norm() / model[2].weight.grad.norm())

    for _ in range(12):
        length()
    opt.param_groups[0]["lr"] = level
    before = length()
    model[0].requires_grad_(True)
    opt.add_param_group({"params": model[0].parameters(), "name": "first", "lr": level})
    assert length() == pytest.approx(before, rel=0.2)


def test_a_failed_refresh_is_no_steered_rate_in_the_history():
    model, batch, factor = make_net(), TRAIN[0], 1.0
    opt = ns.NewtonSummary(model, lambda model, batch: factor * loss_fn(model, batch))
    for step in range(30):
        factor = math.nan if step > 20 else 1.0
        opt.zero_grad()
        loss_fn(model, batch).backward()
        quiet(lambda: opt.step(batch))
        if step == 20:
            assert opt.to_history().measured[-1].status == "steered"
    assert opt.failed_refreshes > 0
    assert opt.to_history().measured[-1].status == "not-finite"


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
        u = p.grad if mode == "paper" else p.grad / (p.grad.abs() + 1e-8)  # Adam's first step
        expected = before[name] - 0.3 * float(opt.eta[s]) * u
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
def test_a_gradient_that_is_not_finite_never_reaches_the_parameters(mode, value):
    model = make_net()
    opt = make_optimizer(model, lr=0.1, summary_period=4, **MODES[mode])
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
    assert len(told) == (2 if mode == "steered" else 1)  # early on it measures at every step
    assert f"{3 - len(told)} step(s)" in told[0]
    if mode == "steered":
        state = opt.state[model[2].bias]
        assert torch.isfinite(state["exp_avg"]).all() and state["step"] == 3


def test_a_bad_gradient_when_a_refresh_is_due_postpones_it():
    model = make_net()
    opt = make_optimizer(model, lr=0.1, summary_period=3, **PAPER)
    measured = []
    for t in range(8):
        opt.zero_grad()
        loss_fn(model, TRAIN[t % 7]).backward()
        if t in (0, 4):
            model[0].weight.grad.fill_(float("nan"))
        quiet(opt.step)
        measured.append(opt.refreshes)
    assert measured == [0, 1, 1, 1, 1, 2, 2, 3]


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
    words = "last good ones are kept" if mode == "paper" else "the last rate is halved"
    assert len(told) == 1 and words in told[0] and "The loss is n" in told[0]
    failed = opt.failed_refreshes
    assert failed >= 2 and opt.last_rates.status == "not-finite"
    assert torch.equal(opt.eta, eta if mode == "paper" else eta / 2**failed)
    assert opt.last_summary is good
    before = flat(model)
    broken[0] = False
    assert failing(model, opt, 1, start=6) == []
    assert not torch.equal(flat(model), before)
    quiet(lambda: train(model, opt, 3))
    assert "not-finite" not in str(opt.last_rates)


def test_a_refresh_that_fails_is_told_at_the_line_of_the_step():
    model = make_net()
    given = (lambda model, batch: loss_fn(model, batch) * float("nan"), CURVATURE)
    opt = make_optimizer(model, lr=0.1, summary_period=4, curvature=given, **PAPER)
    loss_fn(model, CURVATURE[0]).backward()
    with pytest.warns(UserWarning, match="no usable rates") as told:
        opt.step()
    assert [warning.filename for warning in told] == [__file__]


def test_no_rates_at_all_do_not_move_until_there_are_some():
    """A first refresh that fails is made again when the next one is due, and not at every step."""
    model, broken = make_net(), [True]

    def loss(model, batch):
        return loss_fn(model, batch) * (float("nan") if broken[0] else 1.0)

    opt = make_optimizer(model, lr=0.1, summary_period=4, curvature=(loss, CURVATURE), **PAPER)
    start = flat(model)
    told = failing(model, opt, 2)
    assert len(told) == 1 and "there are none yet" in told[0]
    assert opt.failed_refreshes == 1
    broken[0] = False
    quiet(lambda: train(model, opt, 2))
    assert torch.equal(flat(model), start) and opt.refresh_due
    quiet(lambda: train(model, opt, 1))
    assert not torch.equal(flat(model), start) and opt.refreshes == 1


def test_a_loss_that_is_not_finite_at_the_start_waits_for_the_next_batch():
    model, broken = make_net(), [True]

    def loss(model, batch):
        return loss_fn(model, batch) * (float("nan") if broken[0] else 1.0)

    opt = make_optimizer(model, curvature=(loss, CURVATURE))
    start = flat(model)
    told = failing(model, opt, 2)
    assert len(told) == 1 and "there are none yet" in told[0] and opt.failed_refreshes == 2
    assert torch.equal(flat(model), start) and opt.refresh_due
    broken[0] = False
    train(model, opt, 1)
    assert not torch.equal(flat(model), start) and opt.eta.min() > 0


def test_rates_that_are_all_negative():
    """Algorithm 2 makes a step of length zero."""
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
        summary_window=1,
        **PAPER,
    )
    train(model, opt, 2)
    eta = opt.eta.clone()
    assert eta > 0
    sign[0] = -1.0
    before = flat(model)
    told = failing(model, opt, 1, start=2)
    assert opt.last_rates.status == "no-positive-rate" and opt.last_rates.eta < 0
    assert opt.failed_refreshes == 1 and len(told) == 1
    assert torch.equal(flat(model), before)
    assert torch.equal(opt.eta, torch.zeros_like(eta))
    assert "used as they are" in told[0]


def flat_norm(model):
    """A quadratic around the present point, which makes the curvature positive."""
    return sum((p - p.detach()).square().sum() for p in model.parameters())


@pytest.mark.parametrize("variant", ["steered", "careful", "as-run", "as-published"])
def test_the_paper_s_arguments_are_taken_by_all_variants(variant):
    """Those that have no meaning for a variant have no effect there."""
    model, warmup = make_net(), 0 if variant == "as-published" else 3
    opt = ns.NewtonSummary(
        ns.make_partition(model, "canonical"),
        **{"lr": 0.3, "lambda_int": 1.0, "momentum": 0.9, "eta_momentum": 0.0},
        **{"summary_period": 10, "summary_window": 3, "warmup": warmup},
        direction=None,
        curvature=(loss_fn, TRAIN),
        variant=variant,
    )
    before = flat(model)
    train(model, opt, 32)
    assert not torch.equal(flat(model), before) and opt.last_rates is not None


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
        ({"variant": "mean"}, "variant"),
        ({"budget": 0.0}, "budget"),
        ({"direction": torch.optim.SGD([torch.zeros(1)]), "weight_decay": 0.1}, "weight_decay"),
        ({"eta_momentum": 0.5}, "only for the paper's algorithm"),
        (PAPER | {"weight_decay": 0.1}, "is only for variant='steered' or 'careful'"),
        (PAPER | {"budget": 0.5}, "is only for variant='steered' or 'careful'"),
        (PAPER | {"direction": torch.optim.SGD([torch.zeros(1)])}, "'steered' or 'careful'"),
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
    opt.step()
    with pytest.raises(ValueError, match=r"another parameter called '2\.weight'"):
        opt.step()

    model = make_net()
    opt = make_optimizer(model)
    quiet(lambda: train(model, opt, 1))
    model.zero_grad()
    model[2].weight.data = torch.zeros(4, 5, dtype=torch.float64)
    model[2].weight.grad = torch.zeros(4, 5, dtype=torch.float64)
    with pytest.raises(ValueError, match="changed shape"):
        opt.step()


def test_sparse_gradients_are_refused():
    model = nn.Sequential(nn.Embedding(5, 2, sparse=True))
    opt = make_optimizer(model, curvature=(lambda m, b: m(b).square().mean(), [torch.arange(5)]))
    model(torch.arange(3)).square().mean().backward()
    with pytest.raises(ValueError, match="sparse"):
        opt.step()


def test_a_step_that_is_refused_does_not_count_as_skipped():
    model = make_net()
    opt = make_optimizer(model, **MODES["paper"])
    quiet(lambda: train(model, opt, 4))
    model[0].weight.grad = model[0].weight.grad.to_sparse()
    with pytest.raises(ValueError, match="sparse"):
        opt.step()
    assert opt.state_dict()["newton_summary"]["counts"]["skipped_since"] == 0


@pytest.mark.parametrize("mode", MODES)
def test_a_first_gradient_of_zero_changes_nothing(mode):
    """No move, no refresh; in Algorithm 2, what follows is as without that step."""
    one, other = make_net(), make_net()
    waiting, plain = (make_optimizer(model, **MODES[mode]) for model in (one, other))
    start = flat(one)
    for p in one.parameters():
        p.grad = torch.zeros_like(p)
    waiting.step()
    assert torch.equal(flat(one), start) and waiting.refreshes == 0 and waiting.refresh_due
    train(one, waiting, 5)
    train(other, plain, 5)
    assert torch.equal(flat(one), flat(other)) or mode == "steered"
    assert not torch.equal(flat(one), start)


def test_a_later_direction_of_zero_is_not_averaged():
    model = make_net()
    opt = make_optimizer(model, summary_period=2, momentum=0.0, **PAPER)
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


ADDITIONS = {
    "weight_decay": 0.1,
    "direction": torch.optim.SGD([torch.zeros(1)], lr=1.0),
    "budget": 0.1,
    "loss_fn": loss_fn,
}


@pytest.mark.parametrize("name", ADDITIONS)
def test_paper_mode_refuses_the_additions(name):
    part = ns.make_partition(make_net())
    with pytest.raises(TypeError, match=rf"NewtonSummary\.paper has no argument '{name}'"):
        ns.NewtonSummary.paper(part, **{name: ADDITIONS[name]})


def test_paper_mode_takes_nothing_else():
    """Every argument of the class is one of Algorithm 2, or refused by its name."""
    arguments = set(inspect.signature(ns.NewtonSummary).parameters)
    own = set(inspect.signature(ns.NewtonSummary.paper).parameters)
    assert arguments - own == set(ADDITIONS) and own <= arguments
    part = ns.make_partition(make_net())
    with pytest.raises(ValueError, match="'as-run' or 'as-published'"):
        ns.NewtonSummary.paper(part, variant="steered")
    with pytest.raises(ValueError, match="no warm-up"):
        ns.NewtonSummary.paper(part, variant="as-published", warmup=3)
    for name in ("averaging", "max_eta", "ridge"):
        with pytest.raises(TypeError, match=f"no argument '{name}'"):
            ns.NewtonSummary.paper(part, **{name: 1.0})


def test_paper_mode_has_the_papers_settings():
    opt = ns.NewtonSummary.paper(ns.make_partition(make_net()))
    table = {"momentum": 0.9, "summary_period": 10, "summary_window": 3, "warmup": 3}
    table |= {"lr": 0.3, "lambda_int": 1.0, "weight_decay": 0.0}
    assert table.items() <= opt.defaults.items() and opt.direction is None


def test_loss_function_and_lr_are_told_apart():
    """``NewtonSummary(model, loss_fn, lr=...)``, and a number in the place of the function."""
    net = make_net()
    assert ns.NewtonSummary(net, loss_fn, lr=0.5).param_groups[0]["lr"] == 0.5
    assert ns.NewtonSummary(ns.make_partition(net), 0.25).param_groups[0]["lr"] == 0.25
    with pytest.raises(TypeError, match=r"loss_fn=0\.25: expected a function"):
        ns.NewtonSummary(net, 0.25, lr=0.5)


def test_there_are_sixteen_arguments():
    assert len(inspect.signature(ns.NewtonSummary).parameters) <= 16


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("partition", ["canonical", "trivial", "discrete"])
def test_steps_between_refreshes_do_not_wait_for_the_gpu(mode, partition):
    model = make_net(torch.float32).cuda()
    batches = [tuple(x.cuda() for x in b) for b in make_batches(3, seed=1, dtype=torch.float32)]
    opt = make_optimizer(
        model,
        partition=partition,
        summary_period=100,
        curvature=(loss_fn, batches),
        **MODES[mode],
    )
    loss_fn(model, batches[0]).backward()
    while opt.refreshes == 0 or opt.refresh_due:  # five steps in a row without a measurement
        quiet(lambda: [opt.step() for _ in range(60)])
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
