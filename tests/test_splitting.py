"""A batch is split only where its loss is the mean over its samples, at whatever parameters."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from newton_summary import derivative_tensor, summarize
from newton_summary.measuring.splitting import _same_gradient
from problems import PROBLEMS

LIMIT = 2**14  # bytes: nothing of the batches below fits whole


class Tokens(nn.Module):
    """A language model whose head may start from zero, so that all tokens have the same loss."""

    def __init__(self, zero_head: bool = False):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(7, 6), nn.LayerNorm(6)
        self.head = nn.Linear(6, 7)
        if zero_head:
            nn.init.zeros_(self.head.weight), nn.init.zeros_(self.head.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.norm(self.embedding(tokens))))


class Experts(nn.Module):
    """Two experts behind a router that starts from zero, with a penalty that balances the load."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.router = nn.Linear(4, 5), nn.Linear(5, 2)
        self.experts = nn.ModuleList([nn.Linear(5, 3), nn.Linear(5, 3)])
        nn.init.zeros_(self.router.weight), nn.init.zeros_(self.router.bias)


def mixture(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    h = torch.tanh(model.inside(batch[0]))
    p = model.router(h).softmax(-1)
    outputs = torch.stack([expert(h) for expert in model.experts], -1)
    loss = F.cross_entropy((outputs * p[:, None]).sum(-1), batch[1])
    return loss + 0.01 * 2 * p.mean(0).square().sum()


def language(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), ignore_index=-100)


def weighted(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    weight = torch.arange(1.0, 8.0, dtype=model.head.weight.dtype)
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), weight)


def masked(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    each = F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten().abs() % 7, None)
    mask = (batch[1] >= 0).to(model.head.weight)
    return each + (model(batch[0]).square().mean(-1) * mask).sum() / mask.sum()


def variance(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Zero, with its gradient, where the head is zero."""
    return language(model, batch) + 0.1 * model(batch[0]).var(0).mean()


def mean_square(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return language(model, batch) + model(batch[0]).mean(0).square().mean()


def full() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(7, (12, 5), generator=generator)
    return tokens, tokens.roll(1, 1)


def padded() -> tuple[Tensor, Tensor]:
    tokens, labels = full()
    lengths = torch.arange(12) % 4 + 1
    return tokens, labels.masked_fill(torch.arange(5) >= lengths[:, None], -100)


def padded_at_the_end() -> tuple[Tensor, Tensor]:
    """The first two parts have as many labels as each other."""
    tokens, labels = full()
    return tokens, labels.index_fill(0, torch.tensor([9, 10]), -100)


def vectors() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(12, 4, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (12,), generator=generator)


COUPLED: dict[str, tuple[Callable[[], nn.Module], Callable[..., Tensor], Callable[[], object]]] = {
    "padding": (Tokens, language, padded),
    "padding, head of zeros": (lambda: Tokens(True), language, padded),
    "class weights": (Tokens, weighted, full),
    "mask": (Tokens, masked, padded),
    "mask, head of zeros, late": (lambda: Tokens(True), masked, padded_at_the_end),
    "variance, head of zeros": (lambda: Tokens(True), variance, full),
    "mean square, head of zeros": (lambda: Tokens(True), mean_square, full),
    "load balance, router of zeros": (Experts, mixture, vectors),
}


def as_dtype(batch, dtype):
    return tuple(x.to(dtype) if x.is_floating_point() else x for x in batch)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("case", COUPLED)
def test_coupled_batches_stay_whole(case, dtype):
    make, loss_fn, data = COUPLED[case]
    torch.manual_seed(0)
    model, batch = make().to(dtype), as_dtype(data(), dtype)
    u = {n: torch.randn_like(p) for n, p in model.named_parameters()}
    expected = summarize(model, loss_fn, batch, direction=u, backend="nested")
    actual = summarize(model, loss_fn, batch, direction=u, stack_limit=LIMIT)
    tolerance = 1e-10 if dtype == torch.float64 else 2e-4
    for name in ("loss", "gbar", "Hbar", "D3"):
        a, e = getattr(actual, name), getattr(expected, name)
        assert float((a - e).abs().max()) <= tolerance * float(e.abs().max()), name


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_mean_over_samples_is_split(dtype):
    torch.manual_seed(0)
    model, sizes = Tokens().to(dtype), []

    def loss_fn(model, batch):
        sizes.append(len(batch[0]))
        return language(model, batch)

    expected = summarize(model, language, full(), backend="nested")
    actual = summarize(model, loss_fn, full(), stack_limit=LIMIT)
    torch.testing.assert_close(actual.Hbar, expected.Hbar)
    assert sizes[-1] < 12


def test_no_batch_speaks_for_another():
    """A full batch may be split, the padded one after it may not; nor in the next measurement."""
    torch.manual_seed(0)
    model = Tokens().double()
    for data in ([full(), padded()], [padded()]):
        expected = summarize(model, language, data, backend="nested")
        actual = summarize(model, language, data, stack_limit=LIMIT)
        for name in ("loss", "gbar", "Hbar", "D3"):
            torch.testing.assert_close(getattr(actual, name), getattr(expected, name))


def test_a_loss_that_fails_on_a_part_is_not_split():
    """A contrastive loss may want an even number of samples, or all of them."""
    torch.manual_seed(0)
    model = Tokens().double()

    def loss_fn(model, batch):
        assert len(batch[0]) == 12
        return language(model, batch)

    expected = summarize(model, language, full(), backend="nested")
    actual = summarize(model, loss_fn, full(), stack_limit=LIMIT)
    torch.testing.assert_close(actual.Hbar, expected.Hbar)


def test_warnings_of_parts_that_are_only_tried_are_not_shown():
    """As of a variance over one sample."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        summarize(Tokens().double(), variance, full(), stack_limit=2**12)


def test_half_precision_is_not_split():
    """What it rounds away could be a coupling."""
    torch.manual_seed(0)
    model, sizes = Tokens().bfloat16(), []

    def loss_fn(model, batch):
        sizes.append(len(batch[0]))
        return F.cross_entropy(model(batch[0]).flatten(0, 1).float(), batch[1].flatten())

    summarize(model, loss_fn, full(), stack_limit=LIMIT)
    assert set(sizes) == {12}


# --- microbatch: as the user says, but not without a word -----------------------------------------


@pytest.mark.parametrize("case", ["padding", "class weights", "mask"])
def test_microbatches_of_a_coupled_batch_are_warned_about(case):
    make, loss_fn, data = COUPLED[case]
    torch.manual_seed(0)
    model = make().double()
    with pytest.warns(UserWarning, match=r"not the mean .* microbatch=3.*microbatch=None") as told:
        summarize(model, loss_fn, data(), microbatch=3)
    assert len(told) == 1
    with pytest.warns(UserWarning, match="not the mean"):
        derivative_tensor(model, loss_fn, data(), order=1, microbatch=3)


@pytest.mark.parametrize("name", ["mlp_cross_entropy", "layer_norm", "dropout"])
def test_microbatches_of_a_mean_are_not_warned_about(name):
    """Nor with dropout, whose draws differ from part to part."""
    problem = PROBLEMS[name if name != "dropout" else "mlp_cross_entropy"]()
    model = nn.Sequential(problem.model, nn.Dropout(0.5)) if name == "dropout" else problem.model
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        summarize(model, problem.loss_fn, problem.batch, microbatch=2)


class Known:
    """A loss <g, p> of tensors p that are all zero, so that its value is 0 and its gradient g."""

    size = 1

    def __init__(self, probe, gradient, both=None):
        self.probe, self.gradient, self.both = probe, gradient, both

    def __call__(self):
        return sum((g * p).sum() for g, p in zip(self.gradient, self.probe.params.values()))

    def split(self, samples):
        return [self.both]


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("share", [0.999, 1.001])
def test_gradients_may_differ_by_so_many_roundings(place, share):
    """By 400 of that of a tensor, and 30 of the whole: all that one without a gradient has."""
    params = {name: torch.zeros(3, dtype=torch.float64, requires_grad=True) for name in "ab"}
    probe, eps = SimpleNamespace(params=params), 1e-9
    gradient = [torch.tensor([2.0, 0, 0], dtype=torch.float64), torch.zeros(3, dtype=torch.float64)]
    allowed = eps * ((400 * 2.0 if place == 0 else 0.0) + 30 * 2.0)
    other = [g.clone() for g in gradient]
    other[place][1] += share * allowed
    whole = Known(probe, gradient, both=Known(probe, gradient))
    pair = [Known(probe, other), Known(probe, other)]
    assert _same_gradient(whole, pair, eps) == (share < 1)
