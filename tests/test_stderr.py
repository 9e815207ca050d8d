"""Error bars over batches: which entries of a summary, and which rates, are signal."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import newton_summary as ns


def loss_fn(model, batch):
    return F.mse_loss(model(batch[0]).tanh(), batch[1])


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def make_batches(sizes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda n, k: torch.randn(n, k, generator=generator, dtype=torch.float64)  # noqa: E731
    return [(draw(n, 3), draw(n, 1)) for n in sizes]


def direction(model):
    loss = loss_fn(model, make_batches([64], seed=9)[0])
    grads = torch.autograd.grad(loss, model.parameters())
    return dict(zip(dict(model.named_parameters()), grads))


@pytest.mark.parametrize("backend", ["auto", "nested"])
def test_errors_are_those_of_a_mean(model, backend):
    """Equal batches: the standard deviation over batches, divided by sqrt(B)."""
    batches, u = make_batches([8] * 6), direction(model)
    s = ns.summarize(model, loss_fn, batches, direction=u, stderr=True, backend=backend)
    each = [ns.summarize(model, loss_fn, b, direction=u) for b in batches]
    for name in ("gbar", "Hbar"):
        values = torch.stack([getattr(part, name) for part in each])
        torch.testing.assert_close(getattr(s, name), values.mean(0))
        torch.testing.assert_close(getattr(s, f"{name}_stderr"), values.std(0) / 6**0.5)
    assert len(s.parts) == 6 and "±" in str(s)
    plain = ns.summarize(model, loss_fn, batches, direction=u, backend=backend)
    torch.testing.assert_close(plain.Hbar, s.Hbar, rtol=0, atol=0)
    assert plain.gbar_stderr is None and plain.parts == () and "±" not in str(plain)


def test_unequal_batches_and_micro_batches_count_by_their_samples(model):
    u = direction(model)
    whole = make_batches([20])[0]
    uneven = [tuple(x[:16] for x in whole), tuple(x[16:] for x in whole)]
    s = ns.summarize(model, loss_fn, uneven, direction=u, stderr=True)
    a, b = (ns.summarize(model, loss_fn, part, direction=u).gbar for part in uneven)
    mean = 0.8 * a + 0.2 * b
    expected = (2 * ((0.8 * (a - mean)) ** 2 + (0.2 * (b - mean)) ** 2)).sqrt()
    torch.testing.assert_close(s.gbar_stderr, expected)
    split = ns.summarize(model, loss_fn, whole, direction=u, stderr=True, microbatch=4)
    assert len(split.parts) == 5 and split.gbar_stderr is not None


def test_errors_cover_the_truth(model):
    """Over many draws the mean is within two errors of the truth about 95 times in a hundred."""
    u = direction(model)
    truth = ns.summarize(model, loss_fn, make_batches([60_000], seed=77), direction=u, order=2)
    inside = []
    for seed in range(60):
        batches = make_batches([4] * 20, seed=seed)
        s = ns.summarize(model, loss_fn, batches, direction=u, order=2, stderr=True)
        inside.append((s.gbar - truth.gbar).abs() <= 2.09 * s.gbar_stderr)  # t with 19 degrees
        inside.append((s.Hbar - truth.Hbar).abs().diagonal() <= 2.09 * s.Hbar_stderr.diagonal())
    assert 0.85 < torch.cat(inside).double().mean() < 0.99


def test_jackknife_of_a_mean_is_its_standard_error(model):
    """Where a rate is linear in the data, leaving batches out gives the textbook error."""
    batches, u = make_batches([8] * 5), direction(model)
    s = ns.summarize(model, loss_fn, batches, direction=u, stderr=True)
    flat_H = torch.eye(4, dtype=torch.float64)
    parts = tuple(ns.Summary(gbar=p.gbar, Hbar=flat_H, num_samples=8) for p in s.parts)
    fixed = ns.Summary(gbar=s.gbar, Hbar=flat_H, parts=parts)
    rates = ns.learning_rates(fixed, lambda_int=0.0)
    torch.testing.assert_close(rates.eta_stderr, s.gbar_stderr)
    real = ns.learning_rates(s)
    assert real.eta_stderr.shape == (4,) and bool((real.eta_stderr > 0).all())
    assert "±" in str(real)
    smaller = ns.summarize(model, loss_fn, make_batches([8] * 80), direction=u, stderr=True)
    assert (ns.learning_rates(smaller).eta_stderr < real.eta_stderr).double().mean() >= 0.75


def test_one_batch_tells_no_error(model):
    with pytest.warns(UserWarning, match=r"Standard errors need at least two batches.*microbatch"):
        s = ns.summarize(model, loss_fn, make_batches([8])[0], stderr=True)
    assert s.gbar_stderr is None and s.Hbar_stderr is None and len(s.parts) == 1
    assert ns.learning_rates(s).eta_stderr is None


def test_errors_travel_with_the_summary(model, tmp_path):
    s = ns.summarize(model, loss_fn, make_batches([8] * 3), stderr=True)
    s.save(tmp_path / "summary.pt")
    loaded = ns.Summary.load(tmp_path / "summary.pt")
    torch.testing.assert_close(loaded.Hbar_stderr, s.Hbar_stderr, rtol=0, atol=0)
    torch.testing.assert_close(
        ns.learning_rates(loaded).eta_stderr, ns.learning_rates(s).eta_stderr, rtol=0, atol=0
    )
    single = s.to(torch.float32)
    assert single.gbar_stderr.dtype == single.parts[0].gbar.dtype == torch.float32
    mean = ns.Summary.mean([s, s])
    assert mean.gbar_stderr is None and mean.parts == ()  # an error of what, one would ask
    first = ns.summarize(model, loss_fn, make_batches([8] * 3), stderr=True, order=1)
    assert first.gbar_stderr is not None and first.Hbar_stderr is None
