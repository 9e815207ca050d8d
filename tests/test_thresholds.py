"""Numbers and signs that decide: each test fails if one of them is another."""

from __future__ import annotations

import math
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from newton_summary import Summary, learning_rates, make_partition, summarize
from newton_summary.measuring.advice import _best_strength
from newton_summary.measuring.box import absolute_newton
from newton_summary.measuring.factors import NO_EFFECT, has_effect
from newton_summary.measuring.splitting import is_mean_of_parts
from newton_summary.optimizer.steering import EndSlopes
from newton_summary.parallel.ranks import Ranks
from newton_summary.probe.probe import Probe
from newton_summary.solver import _one_thread


def summary_of(gbar, Hbar, D3) -> Summary:
    numbers = (torch.tensor(x, dtype=torch.float64) for x in (gbar, Hbar, D3))
    return Summary(*numbers)


# --- the solver -----------------------------------------------------------------------------------


@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_in_the_hard_case_the_step_goes_where_gbar_points_however_small_it_is(sign):
    rates = learning_rates(summary_of([sign * 1e-305, 1], [[-1, 0], [0, 1]], [1, 1]), 1.0)
    assert rates.status == "hard-case"
    expected = torch.tensor([sign * math.sqrt(3.75), 0.5], dtype=torch.float64)
    torch.testing.assert_close(rates.eta, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("lowest", [[1, 2], [2, 1], [1, -2]])
def test_where_gbar_does_not_tell_the_sum_of_the_step_is_positive(lowest):
    """Of two equal minima the one with the larger sum of D eta."""
    v = torch.tensor(lowest, dtype=torch.float64)
    Hbar = torch.eye(2, dtype=torch.float64) - 0.6 * torch.outer(v, v)
    rates = learning_rates(summary_of([0, 0], Hbar.tolist(), [1, 1]), 1.0)
    assert rates.status == "hard-case"
    assert rates.eta.sum() > 0


@pytest.mark.parametrize(("slope", "status"), [(1e-6, "no-minimum"), (1e-13, "flat")])
def test_a_slope_where_there_is_no_curvature_is_not_rounding(slope, status):
    flat = summary_of([1, 1 + slope], [[1, 1], [1, 1]], [0, 0])
    assert learning_rates(flat, 1.0).status == status


# --- operations -----------------------------------------------------------------------------------

AT_THE_BOUND = {
    "clamp": lambda x: x.clamp(-1, 1),
    "clip": lambda x: x.clip(-1, 1),
    "clamp_min": lambda x: x.clamp_min(-1),
    "clamp_max": lambda x: x.clamp_max(1),
    "hardtanh": F.hardtanh,
    "relu6": lambda x: F.relu6(6 * x),
    "threshold": lambda x: F.threshold(x, 1.0, 0.0),
}


@pytest.mark.parametrize("name", AT_THE_BOUND)
def test_at_a_bound_derivatives_are_those_of_torch(name):
    """-1 and 1, where each of them has a kink: the slope there is a matter of convention."""
    model = nn.ParameterDict({"x": torch.tensor([-1.0, -0.5, 0.0, 0.5, 1.0]).double()})
    u = {"x": torch.linspace(1, 2, 5).double()}

    def loss_fn(model, batch):
        return (batch * AT_THE_BOUND[name](model["x"])).sum().exp()

    batch = torch.linspace(0.3, 0.7, 5).double()
    found = [
        summarize(model, loss_fn, batch, direction=u, backend=backend, partition="discrete")
        for backend in ("sweep", "nested")
    ]
    torch.testing.assert_close(found[0].Hbar, found[1].Hbar)
    torch.testing.assert_close(found[0].gbar, found[1].gbar)


COMPLEX = {
    "sgn": lambda z: torch.sgn(z).real.sum(),
    "abs": lambda z: z.abs().sum(),
    "angle": lambda z: z.angle().sum(),
    "vdot": lambda z: torch.vdot(z, z.roll(1)).real,
    "conv": lambda z: F.conv1d(z[None, None], (z * z)[None, None, :2]).imag.sum(),
    "fft": lambda z: torch.fft.fft(z).abs().square().sum(),
    "straight, then curved": lambda z: (z.conj() * (1 + 2j)).imag.exp().sum(),
    "several values": lambda z: (z * z.roll(1)).real.sum() + z.real.exp().sum(),
    "a complex value alone": lambda z: torch.exp(z.cumsum(0)).imag.sum(),
}


@pytest.mark.parametrize("name", COMPLEX)
def test_complex_values_from_which_gbar_is_read(name):
    """Against autograd alone: gbar = <gradient, u> in each group, Hbar its derivative along u."""
    torch.manual_seed(0)
    model = nn.ParameterDict({n: torch.randn(4).double() for n in "abc"})
    u = {n: torch.randn(4).double() for n in "abc"}

    def loss_fn(model, batch):
        z = torch.complex(model["a"] * batch, model["b"].sin()) * model["c"]
        return COMPLEX[name](z)

    summary = summarize(model, loss_fn, torch.ones(4).double(), direction=u, backend="sweep")
    params = [model[n] for n in "abc"]

    def inner(grads):
        return torch.stack([(g * u[n]).sum() for n, g in zip("abc", grads, strict=True)])

    loss = loss_fn(model, torch.ones(4).double())
    gbar = inner(torch.autograd.grad(loss, params, create_graph=True))
    Hbar = [
        inner(torch.autograd.grad(x, params, retain_graph=True, materialize_grads=True))
        for x in gbar
    ]
    torch.testing.assert_close(summary.gbar, gbar.detach())
    torch.testing.assert_close(summary.Hbar, torch.stack(Hbar))


LAST_PARTS = {
    "one value": lambda x, y: (x * y).exp().sum(),
    "two values, one made of the other": lambda x, y: (x.sin() * x.sin().exp() + y).sum(),
    "curved at the very end": lambda x, y: (x + y).sum().exp(),
    "straight after curved": lambda x, y: 3 * (x.exp() + y).sum() - 1,
    "a penalty beside it": lambda x, y: (x * y).tanh().sum() + x.square().sum(),
}


@pytest.mark.parametrize("name", LAST_PARTS)
def test_gbar_is_the_gradient_along_u_wherever_it_is_read(name):
    torch.manual_seed(0)
    model = nn.ParameterDict({n: torch.randn(3).double() for n in "xy"})
    u = {n: torch.randn(3).double() for n in "xy"}

    def loss_fn(model, batch):
        return LAST_PARTS[name](model["x"] * batch, model["y"])

    batch = torch.full((3,), 1.5).double()
    summary = summarize(model, loss_fn, batch, direction=u, backend="sweep")
    grads = torch.autograd.grad(loss_fn(model, batch), list(model.values()))
    expected = torch.stack([(g * u[n]).sum() for n, g in zip(model, grads, strict=True)])
    torch.testing.assert_close(summary.gbar, expected)


@pytest.mark.parametrize(
    ("product", "x", "w"),
    [
        (F.linear, (4, 3), (2, 3)),
        (F.linear, (2, 4, 3), (2, 3)),
        (torch.matmul, (4, 3), (3, 2)),
        (torch.bmm, (2, 4, 3), (2, 3, 2)),
        (torch.mul, (4, 3), (3,)),
        (F.conv1d, (2, 3, 5), (4, 3, 2)),
        (F.conv_transpose2d, (2, 3, 2, 2), (3, 2, 2, 2)),
    ],
)
def test_products_whose_second_factor_moves_along_more_groups(product, x, w):
    torch.manual_seed(0)
    shapes = {"x": x, "w": w, "a": (), "b": (), "c": ()}
    model = nn.ParameterDict({n: torch.randn(s).double() for n, s in shapes.items()})

    def loss_fn(model, batch):
        factor = model["w"].tanh() * model["a"] * model["b"].sin() * model["c"]
        return product(model["x"].tanh(), factor).square().sum() * batch.sum()

    swept, nested = (
        summarize(model, loss_fn, torch.ones(1).double(), backend=backend)
        for backend in ("sweep", "nested")
    )
    torch.testing.assert_close(swept.Hbar, nested.Hbar)
    torch.testing.assert_close(swept.D3, nested.D3)


def test_small_systems_are_solved_by_one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with _one_thread():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


# --- ranks and parts ------------------------------------------------------------------------------


@pytest.mark.parametrize(("gap", "differ"), [(1e-3, True), (1e-4, True), (1e-7, False)])
def test_ranks_whose_directions_differ_are_stopped(gap, differ):
    norms = (0.5, 0.5 * (1 + gap))
    mean, square = sum(norms) / 2, sum(x * x for x in norms) / 2
    messages: list[str] = []
    Ranks._check_norms(SimpleNamespace(stop=messages.append), mean, square)
    assert bool(messages) == differ


def coupled(strength: float):
    def loss_fn(model, batch):
        y = model(batch).tanh()
        return y.square().mean() + strength * y.sum().square() / len(batch)

    return loss_fn


@pytest.mark.parametrize(("strength", "matters"), [(1e-11, True), (2e-13, True), (0.0, False)])
def test_parts_of_a_batch_that_hardly_depend_on_each_other(strength, matters):
    torch.manual_seed(0)
    model, batch = nn.Linear(3, 2).double(), torch.randn(16, 3).double()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        summarize(model, coupled(strength), batch, microbatch=4)
    assert any("not the mean over its parts" in str(w.message) for w in caught) == matters
    partition = make_partition(model)
    with Probe(model, coupled(strength), batch, partition) as probe:
        whole = next(iter(probe.closures()))[0]
        same = is_mean_of_parts(whole, whole.split(4), probe.gradient())
    assert same == (not matters)


# --- advice ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("share", "matters"), [(0.9, False), (1.1, True)])
def test_a_group_has_an_effect_by_its_curvature_alone(share, matters):
    """Half of it times the square of the largest change, against a slope of 1 times that."""
    curvature = share * 2 * NO_EFFECT / 10.0
    summary = Summary(torch.tensor([1.0, 0.0]), torch.diag(torch.tensor([0.0, curvature])))
    assert has_effect(summary, max_change=10.0).tolist() == [True, matters]


def test_newton_with_absolute_curvature_does_not_depend_on_units():
    slope = np.array([1.0, -2.0, 0.5])
    H = np.array([[2.0, 1.0, 0.0], [1.0, -1.0, 0.3], [0.0, 0.3, 0.5]])
    scale = np.array([1e-3, 1.0, 20.0])
    expected = absolute_newton(slope, H) / scale
    actual = absolute_newton(scale * slope, scale[:, None] * H * scale)
    np.testing.assert_allclose(actual, expected, rtol=1e-10)


def test_of_two_strengths_the_one_that_lowers_the_loss_is_taken():
    live = np.array([True])
    models = [
        SimpleNamespace(minimum=lambda c=c: np.array([c]), strength=strength, live=live)
        for strength, c in ((1.0, 2.0), (3.0, 1.5))
    ]
    changes = {2.0: 0.1, 1.5: -0.2}
    chosen = _best_strength(models, lambda tried: [changes[float(c)] for (c,) in tried])
    assert chosen.strength == 3.0


def test_slopes_that_are_not_compared_yet_are_kept_in_a_state():
    state = EndSlopes(pair=(torch.tensor(1.5), 2.5)).state_dict()
    assert state["pair"] == (1.5, 2.5)
