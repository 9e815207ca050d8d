"""The mean of the parameters over the last steps, and the model that has it while evaluated."""

import copy
import io

import pytest
import torch
from torch import nn

import newton_summary as ns


def loss_fn(model, batch):
    return (model(batch[0]) - batch[1]).square().mean()


def make_batches(count=42):
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(count, 6, 3, generator=draw, dtype=torch.float64)
    noise = torch.randn(count, 6, 1, generator=draw, dtype=torch.float64)
    return list(zip(x, x.sum(2, keepdim=True) + noise, strict=True))


def make(seed=0, **options):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    return model, ns.NewtonSummary(model, loss_fn, **options)


def flat(model):
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def train(model, opt, batches, schedule=None):
    """Train; return the parameters after each step."""
    path = []
    for batch in batches:
        opt.zero_grad()
        loss_fn(model, batch).backward()
        opt.step(batch)
        if schedule is not None:
            schedule.step()
        path.append(flat(model))
    return path


def evaluated(model, opt):
    opt.eval()
    found = flat(model)
    opt.train()
    return found


@pytest.mark.parametrize("given", [False, True])
def test_the_mean_is_the_weighted_one_of_the_docstring(given):
    """Its weights, written out: (TAIL + 1) / (k + TAIL) times what later updates leave."""
    torch.manual_seed(0)
    model, opt = make()
    if given:
        opt = ns.NewtonSummary(model, loss_fn, direction=torch.optim.SGD(model.parameters(), 0.1))
    kept = train(model, opt, make_batches())[4::5]
    weights = 31 / (torch.arange(1, len(kept) + 1, dtype=torch.float64) + 30)
    shares = [w * (1 - weights[i + 1 :]).prod() for i, w in enumerate(weights)]
    assert sum(shares) == pytest.approx(1)
    mean = sum(share * x for share, x in zip(shares, kept, strict=True))
    torch.testing.assert_close(evaluated(model, opt), mean, rtol=1e-12, atol=1e-14)


def test_evaluating_changes_nothing_in_the_training():
    batches = make_batches()
    model, opt = make()
    whole = train(model, opt, batches)[-1]
    model, opt = make()
    for start in range(0, 42, 6):
        train(model, opt, batches[start : start + 6])
        before = flat(model)
        evaluated(model, opt)
        assert torch.equal(flat(model), before)
    opt.eval()
    opt.eval()  # again is not twice
    opt.train()
    assert torch.equal(flat(model), whole)


def test_no_step_with_averaged_parameters():
    model, opt = make()
    train(model, opt, make_batches(6))
    opt.eval()
    with pytest.raises(RuntimeError, match=r"call train\(\) before step\(\)"):
        opt.step(make_batches(1)[0])


@pytest.mark.parametrize("saved_in", ["train", "eval"])
def test_resumes_bit_for_bit_from_either(saved_in):
    batches = make_batches()
    model, opt = make()
    train(model, opt, batches[:23])
    getattr(opt, saved_in)()
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, file)
    opt.train()
    train(model, opt, batches[23:])

    again, other = make(seed=1)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    again.load_state_dict(state["model"])
    other.load_state_dict(state["opt"])
    other.train()
    train(again, other, batches[23:])
    assert torch.equal(flat(again), flat(model))
    assert torch.equal(evaluated(again, other), evaluated(model, opt))


def test_at_the_end_of_a_schedule_it_is_the_last_parameters():
    model, opt = make()
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda t: max(0.0, 1 - t / 40))
    path = train(model, opt, make_batches(46), schedule)
    assert torch.equal(evaluated(model, opt), path[-1])
    assert not torch.equal(path[-1], path[20])


def test_frozen_and_halved_parameters_have_no_mean():
    model, _ = make()
    model[0].bias.requires_grad_(False)
    opt = ns.NewtonSummary(model, loss_fn)
    train(model, opt, make_batches(12))
    bias = model[0].bias.clone()
    opt.eval()
    assert torch.equal(model[0].bias, bias) and model[0].bias not in opt.state
    half = copy.deepcopy(make()[0]).bfloat16()
    opt = ns.NewtonSummary(half, loss_fn)
    train(half, opt, [tuple(t.bfloat16() for t in b) for b in make_batches(12)])
    last = flat(half)
    assert torch.equal(evaluated(half, opt), last)


def test_the_papers_algorithm_has_none():
    model, _ = make()
    opt = ns.NewtonSummary.paper(ns.make_partition(model), curvature=(loss_fn, make_batches(3)))
    for batch in make_batches(12):
        loss_fn(model, batch).backward()
        opt.step()
    last = flat(model)
    assert torch.equal(evaluated(model, opt), last)
