"""What the sweep cannot do, the next backend does, with the reason: nothing is silently wrong."""

from __future__ import annotations

import itertools
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm
from torch.optim import SGD

from newton_summary import CannotDifferentiate, make_partition, summarize
from newton_summary.derivatives.sweep.recorder import Recorder
from newton_summary.derivatives.sweep.rules import RULES
from newton_summary.errors import NotFiniteError
from problems import PROBLEMS, finite_differences, worst_error


def measured(model, loss_fn, batch, **how):
    """Measure without regard to warnings, and return these too."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        summary = summarize(model, loss_fn, batch, **how)
    return summary, [str(w.message) for w in said]


def check(model, loss_fn, batch, tolerance=1e-6):
    """Compare with central differences of plain gradients, and return what was measured."""
    groups = make_partition(model)
    generator = torch.Generator().manual_seed(0)
    u = {
        n: torch.randn(p.shape, generator=generator, dtype=torch.float64)
        for n, p in groups.params.items()
    }
    expected = finite_differences(model, loss_fn, batch, u, groups)
    actual, said = measured(model, loss_fn, batch, direction=u, partition=groups)
    assert max(worst_error(actual, expected)) < tolerance
    if actual.backend != "sweep":
        assert any("Falling back" in message for message in said)
        assert actual.reason is not None
        assert "\n" not in actual.reason
    return actual


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def net(*sizes: int) -> nn.Sequential:
    layers = [nn.Linear(a, b) for a, b in itertools.pairwise(sizes)]
    return nn.Sequential(*[x for layer in layers for x in (layer, nn.Tanh())][:-1]).double()


# --- losses that the recorder cannot follow -------------------------------------------------------


def hessian_in_the_loss(model: nn.Module, x: Tensor) -> Tensor:
    """As in networks that solve differential equations."""
    laplacian = torch.func.vmap(torch.func.hessian(lambda x: model(x).sum()))(x)
    return laplacian.diagonal(dim1=-2, dim2=-1).sum(-1).square().mean() + model(x).square().mean()


def dual_numbers(model: nn.Module, x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        out = model(forward_ad.make_dual(x, torch.ones_like(x)))
        value, tangent = forward_ad.unpack_dual(out)
        return value.square().mean() + tangent.square().mean()


def sparse_matrix(model: nn.Module, x: Tensor) -> Tensor:
    index = torch.tensor([[0, 1, 2], [1, 2, 0]])
    matrix = torch.sparse_coo_tensor(index, model[0].bias[:3].tanh(), (3, 3))
    return (matrix @ x.T).square().mean() + model(x).square().mean()


def segments(model: nn.Module, x: Tensor) -> Tensor:
    lengths = torch.tensor([2, 1, 2])
    return torch.segment_reduce(model(x), "mean", lengths=lengths, axis=0).square().mean()


@pytest.mark.parametrize(
    "loss_fn",
    [hessian_in_the_loss, dual_numbers, sparse_matrix, segments],
    ids=lambda f: f.__name__,
)
def test_losses_that_are_hard_to_follow(loss_fn):
    check(net(3, 4, 2), loss_fn, torch.randn(5, 3, dtype=torch.float64), tolerance=1e-5)


def test_torch_cond_runs_one_of_its_functions():
    def loss_fn(model, x):
        y = model(x)
        return torch.cond(y.sum() > 9, lambda y: y.sin().mean(), lambda y: y.exp().mean(), (y,))

    model, x = net(3, 4, 2), torch.randn(5, 3, dtype=torch.float64)
    actual, said = measured(model, loss_fn, x)
    assert actual.backend == "sweep" and said == []
    assert torch.equal(actual.Hbar, summarize(model, lambda m, x: m(x).exp().mean(), x).Hbar)


@pytest.mark.parametrize("backend", ["auto", "nested", "differences"])
def test_cached_parametrizations_are_computed_anew(backend):
    """What is cached belongs to other parameters once these move, and to a graph that is gone."""
    model = net(3, 4, 2)
    weight_norm(model[0])
    x = torch.randn(5, 3, dtype=torch.float64)
    loss_fn = lambda model, x: (model(x) + model[0](x)[:, :2]).square().mean()  # noqa: E731
    expected = summarize(model, loss_fn, x, backend="nested")
    with parametrize.cached():
        cached = model[0].weight
        actual = summarize(model, loss_fn, x, backend=backend)
        assert model[0].weight is cached
    tolerance = {"rtol": 1e-4, "atol": 1e-6} if backend == "differences" else {}
    torch.testing.assert_close(actual.Hbar, expected.Hbar, **tolerance)


def test_any_error_of_the_recorder_falls_back(monkeypatch):
    def broken(self, *args):
        raise KeyError("slot 7\nand a long story")

    monkeypatch.setattr(Recorder, "_wrap", broken)
    problem = PROBLEMS["mlp_cross_entropy"]()
    expected = summarize(*vars(problem).values(), backend="nested")
    actual, said = measured(*vars(problem).values())
    assert actual.backend == "nested"
    assert actual.reason == "sweep: it fails with KeyError: 'slot 7\\nand a long story'"
    assert torch.equal(actual.Hbar, expected.Hbar)
    fell = "Falling back from 'sweep' to 'nested' (exact, but slower), because "
    assert said == [fell + actual.reason.removeprefix("sweep: ")]
    with pytest.raises(CannotDifferentiate, match=r"KeyError.*Try backend='auto'"):
        summarize(*vars(problem).values(), backend="sweep")


@pytest.mark.parametrize("given_direction", [True, False])
@pytest.mark.parametrize("backend", ["auto", "sweep", "nested", "differences"])
def test_an_error_of_the_loss_passes_through(backend, given_direction):
    class Own(RuntimeError):
        pass

    def loss_fn(model, batch):
        model(batch[0])
        raise Own("of the user")

    problem = PROBLEMS["mlp_cross_entropy"]()
    direction = problem.direction() if given_direction else "gradient"
    with pytest.raises(Own, match="of the user"):
        summarize(problem.model, loss_fn, problem.batch, backend=backend, direction=direction)


def test_an_interrupt_that_torch_turns_into_an_error_stays_one(monkeypatch):
    """A mode of torch that is stopped half-way raises an error of its own in the end."""

    def interrupted(self, *args):
        try:
            raise KeyboardInterrupt
        finally:
            raise RuntimeError("trying to pop from empty mode stack")

    monkeypatch.setattr(Recorder, "_wrap", interrupted)
    problem = PROBLEMS["mlp_cross_entropy"]()
    with pytest.raises(KeyboardInterrupt):
        summarize(*vars(problem).values())


# --- results that are not finite ------------------------------------------------------------------


def test_a_result_that_is_not_finite_is_measured_by_the_next_backend(monkeypatch):
    rule = RULES["tanh"]

    def broken(sweep, op, *args, **kwargs):
        result = rule(sweep, op, *args, **kwargs)
        sweep.add_D3((0,), torch.tensor([torch.nan], dtype=torch.float64))
        return result

    problem = PROBLEMS["mlp_cross_entropy"]()
    expected = summarize(*vars(problem).values(), backend="nested")
    monkeypatch.setitem(RULES, "tanh", broken)
    actual, said = measured(*vars(problem).values())
    assert actual.backend == "nested"
    assert torch.equal(actual.D3, expected.D3)
    assert len(said) == 1
    assert "D3 is not finite (first for '0.weight')" in said[0]
    alone, said = measured(*vars(problem).values(), backend="sweep")
    assert bool(alone.D3.isnan().any())
    assert said == ["With backend='sweep', D3 is not finite (first for '0.weight')."]


def test_a_loss_that_is_finite_but_for_the_sweep(monkeypatch):
    def not_finite(loss):
        raise NotFiniteError("The loss is nan, so it has no derivatives.")

    monkeypatch.setattr("newton_summary.derivatives.sweep.engine.check_finite", not_finite)
    problem = PROBLEMS["mlp_cross_entropy"]()
    actual, said = measured(*vars(problem).values())
    assert actual.backend == "nested"
    assert "the loss is nan, but evaluated directly it is" in said[0]


def test_derivatives_that_no_backend_finds_are_warned_about():
    """The square root of zero has an infinite slope."""
    model = nn.Linear(2, 1, bias=False).double()
    nn.init.zeros_(model.weight)

    def loss_fn(model, x):
        return (model(x).square().sum() + 1).mean() + model(x).abs().pow(1.5).sum()

    u = {"weight": torch.ones(1, 2, dtype=torch.float64)}
    x = torch.zeros(3, 2, dtype=torch.float64)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        summary = summarize(model, loss_fn, x + 1, direction=u)
    finite = all(bool(part.isfinite().all()) for part in (summary.gbar, summary.Hbar, summary.D3))
    assert finite or any("not finite" in str(w.message) for w in said)
    assert said, "either way something is said"


# --- torch's own gradient is not that of the loss ------------------------------------------------


@pytest.mark.parametrize("by_attention", [True, False])
@pytest.mark.parametrize("left_padded", [True, False])
def test_masks_that_hide_scores_from_the_loss_alone(left_padded, by_attention):
    """Scores plus a mask of huge numbers are a constant, but autograd does not know that."""
    hidden = torch.ones(4, 4).triu(1).bool()
    hidden[0] |= left_padded
    mask = torch.zeros(4, 4, dtype=torch.float64).masked_fill(hidden, torch.finfo().min)

    def loss_fn(model, x):
        q, k = model(x).chunk(2, -1)
        if by_attention:
            return F.scaled_dot_product_attention(q, k, x, attn_mask=mask.double()).exp().mean()
        return ((q @ k.mT + mask).softmax(-1) @ x).exp().mean()

    model, x = net(3, 6), torch.randn(2, 4, 3, dtype=torch.float64)
    if not left_padded:
        assert not check(model, loss_fn, x).approximate
        return
    for backend in ("sweep", "nested"):
        summary, said = measured(model, loss_fn, x, backend=backend)
        assert summary.approximate
        assert len(said) == 1 and "torch's own gradient is not that of the loss" in said[0]


def test_masks_that_are_filled_in_are_exact():
    def loss_fn(model, x):
        hidden = torch.ones(4, 4).triu(-1).bool()
        scores = (model(x) @ x.mT).masked_fill(hidden, torch.finfo(torch.float64).min)
        return (scores.softmax(-1) @ x).exp().mean()

    actual = check(net(3, 3), loss_fn, torch.randn(2, 4, 3, dtype=torch.float64))
    assert not actual.approximate


# --- state that changes ---------------------------------------------------------------------------


class Stateful(nn.Module):
    """A recurrent network that goes on from where it was, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(3, 4), nn.Linear(4, 2)
        self.hidden, self.steps, self.seen = None, 0, []

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.hidden if self.hidden is not None else x.new_zeros(len(x), 4)
        self.hidden = self.cell(x, hidden).detach()
        self.steps += 1
        self.seen.append(self.steps)
        return self.head(self.cell(x, hidden)) * (1 + 0.1 * self.steps)


@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize("backend", ["sweep", "nested", "differences"])
def test_attributes_of_modules_start_from_the_same_and_are_left_as_they_were(backend, started):
    model = Stateful().double()
    x = torch.randn(5, 3, dtype=torch.float64)
    if started:
        model(x)
    before, values = dict(vars(model)), None if not started else model.hidden.clone()
    seen = list(model.seen)
    losses = []

    def loss_fn(model, x):
        loss = model(x).square().mean()
        losses.append(float(loss.detach()))
        return loss

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        summary = summarize(
            model, loss_fn, x, backend=backend, order=2, direction=SGD(model.parameters())
        )
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    after = dict(vars(model))
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before)
    assert model.seen == seen
    assert values is None or torch.equal(model.hidden, values)
    torch.testing.assert_close(float(summary.loss), losses[0])


def test_an_attribute_that_is_written_in_place_is_put_back():
    class Memory(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.mean = nn.Linear(3, 2), torch.zeros(2, dtype=torch.float64)
            self.view = self.layer.weight.data  # moves with the parameter

        def forward(self, x):
            out = self.layer(x)
            self.mean.add_(0.1)
            return out - self.mean

    model, x = Memory().double(), torch.randn(5, 3, dtype=torch.float64)
    model.view = model.layer.weight.data
    loss_fn = lambda model, x: model(x).pow(4).mean()  # noqa: E731
    exact = summarize(model, loss_fn, x, backend="dense")
    for backend in ("sweep", "nested", "differences"):
        actual, said = measured(model, loss_fn, x, backend=backend)
        tolerance = {"rtol": 1e-3, "atol": 1e-5} if backend == "differences" else {}
        torch.testing.assert_close(actual.Hbar, exact.Hbar, **tolerance)
        assert said == []
    assert torch.equal(model.mean, torch.zeros(2, dtype=torch.float64))


@pytest.mark.parametrize("backend", ["sweep", "nested", "differences"])
def test_a_loss_that_changes_from_call_to_call_is_found_out(backend):
    problem, calls = PROBLEMS["mlp_cross_entropy"](), []

    def annealed(model, batch):
        calls.append(0)
        return problem.loss_fn(model, batch) * (1 + 0.01 * len(calls))

    step = SGD(problem.model.parameters())
    with pytest.warns(UserWarning, match=r"same batch was .* when the direction.*changes") as said:
        summarize(problem.model, annealed, problem.batch, backend=backend, order=2, direction=step)
    assert len(said) == 1


def test_half_precision_is_not_taken_for_a_loss_that_changes():
    problem = PROBLEMS["layer_norm"]()
    batch = (problem.batch[0].bfloat16(), problem.batch[1])
    _, said = measured(problem.model.bfloat16(), problem.loss_fn, batch)
    assert said == []


def test_masks_and_rows_of_zeros_are_finite():
    """First derivatives are finite, so are the others."""
    model = net(3, 4)
    mask = torch.tensor([[True, True, False, False], [False] * 4])

    def loss_fn(model, x):
        weights = model(x).masked_fill(~mask, -torch.inf).softmax(-1)
        return weights.masked_fill(~mask, 0).square().sum() + F.normalize(model(0 * x)).sum()

    summary, said = measured(model, loss_fn, torch.randn(2, 3, dtype=torch.float64))
    finite = all(bool(part.isfinite().all()) for part in (summary.gbar, summary.Hbar, summary.D3))
    assert finite or said


@pytest.mark.parametrize("make", [torch.empty, np.empty])
@pytest.mark.filterwarnings("error")
def test_where_memory_ends_nothing_slower_is_tried(make, monkeypatch):
    """As with tens of thousands of groups, whose Hbar has the square of that many entries."""

    def rule(sweep, op, *args, **kwargs):
        make(10**15)

    monkeypatch.setitem(RULES, "tanh", rule)
    model, x = net(3, 4, 2), torch.ones(5, 3, dtype=torch.float64)
    with pytest.raises((MemoryError, RuntimeError), match="allocate"):
        summarize(model, lambda model, x: model(x).square().mean(), x)
