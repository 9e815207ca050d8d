"""What data may be: batches of any type, series of batches, parts of batches."""

import itertools
import warnings
from collections import UserDict, namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, TensorDataset

from newton_summary import derivative_tensor, summarize, taylor_terms
from newton_summary.derivatives import BACKENDS
from newton_summary.errors import CoupledSamplesError
from newton_summary.probe.inputs import count_samples, take_samples
from problems import PROBLEMS, cross_entropy

N = 7


@pytest.fixture
def problem():
    return PROBLEMS["mlp_cross_entropy"]()  # of 7 samples


def assert_same(actual, expected, rtol=1e-10):
    for name in ("gbar", "Hbar", "D3", "loss"):
        a, e = getattr(actual, name), getattr(expected, name)
        torch.testing.assert_close(a, e, rtol=rtol, atol=1e-12)
    assert actual.num_samples == expected.num_samples


# --- series of batches ---------------------------------------------------------------------------


def cut(batch, *ends):
    x, y = batch
    starts = (0, *ends[:-1])
    return [(x[i:j], y[i:j]) for i, j in zip(starts, ends, strict=True)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_batches_weighted_by_size_are_one_big_batch(problem, backend):
    whole = summarize(problem.model, problem.loss_fn, problem.batch, backend=backend)
    batches = cut(problem.batch, 1, 3, N)
    parts = summarize(problem.model, problem.loss_fn, batches, backend=backend)
    assert_same(parts, whole, rtol=2e-4 if backend == "differences" else 1e-10)
    assert parts.num_samples == N


@pytest.mark.parametrize("microbatch", [1, 2, 3, 7, 100])
@pytest.mark.parametrize("backend", ["nested", "sweep"])
def test_microbatches_are_the_whole_batch(problem, backend, microbatch):
    whole = summarize(problem.model, problem.loss_fn, problem.batch, backend=backend)
    parts = summarize(
        problem.model, problem.loss_fn, problem.batch, backend=backend, microbatch=microbatch
    )
    assert_same(parts, whole)


def test_a_sum_over_samples_is_told_where_its_batches_are_split(problem):
    def summed(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")

    with pytest.warns(UserWarning, match="not the mean over its parts.*or is a sum over samples"):
        summarize(problem.model, summed, problem.batch, microbatch=3)


def test_tensors_and_taylor_terms_take_batches_and_microbatches_too(problem):
    batches = cut(problem.batch, 1, 3, N)
    for function in (derivative_tensor, taylor_terms):
        whole = function(problem.model, problem.loss_fn, problem.batch, order=3)
        for data, microbatch in ((batches, None), (problem.batch, 2), (batches, 2)):
            parts = function(problem.model, problem.loss_fn, data, order=3, microbatch=microbatch)
            torch.testing.assert_close(parts, whole, rtol=1e-10, atol=1e-12)


def test_an_equal_mean_over_batches_would_be_another_number(problem):
    """So the weights are needed: the last batch of a loader is smaller."""
    batches = cut(problem.batch, 6, N)
    summary = summarize(problem.model, problem.loss_fn, batches, backend="nested")
    losses = [problem.loss_fn(problem.model, batch).detach() for batch in batches]
    torch.testing.assert_close(summary.loss, (6 * losses[0] + losses[1]) / 7)
    assert abs(summary.loss - (losses[0] + losses[1]) / 2) > 1e-3


def test_generator_is_read_once_and_measured_on_all_passes(problem):
    whole = summarize(problem.model, problem.loss_fn, problem.batch, backend="nested")
    generator = (batch for batch in cut(problem.batch, 3, N))
    assert_same(summarize(problem.model, problem.loss_fn, generator, backend="nested"), whole)
    iterator = iter(cut(problem.batch, 3, N))
    assert_same(summarize(problem.model, problem.loss_fn, iterator, backend="nested"), whole)


class Stream(IterableDataset):
    """Batches without a length."""

    def __init__(self, batch, count=None):
        self.batch, self.count = batch, count

    def __iter__(self):
        times = [] if self.count is None else [self.count]
        return itertools.repeat(self.batch, *times)


def squares(model, batch):
    return sum(p.square().sum() for p in model.parameters())


def test_an_iterator_that_may_never_end_is_refused():
    net, x = nn.Linear(1, 1), torch.ones(1, 1)
    loader = DataLoader(Stream(x), batch_size=None)
    for endless in (itertools.cycle([x]), iter(loader)):
        with pytest.raises(ValueError, match=r"more than 1,000.*itertools.islice\(data, 16\)"):
            summarize(net, squares, endless, order=1)
    for some in (itertools.islice(loader, 16), iter([x] * 1001)):
        assert summarize(net, squares, some, order=1).num_samples in (16, 1001)


class Unknown(Stream):
    def __len__(self):
        raise NotImplementedError


@pytest.mark.parametrize("kind", [Stream, Unknown])
def test_a_stream_that_may_never_end_is_told(kind):
    net, x = nn.Linear(1, 1), torch.ones(1, 1)
    loader = DataLoader(kind(x, 1001), batch_size=None)
    with pytest.warns(UserWarning, match=r"1,000 batches.*itertools.islice\(data, 16\)") as caught:
        assert summarize(net, squares, loader, order=1).num_samples == 1001
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        known = DataLoader(TensorDataset(torch.ones(1001, 1)), batch_size=1)
        for data in (known, DataLoader(Stream(x, 1000), batch_size=None)):
            assert summarize(net, squares, data, order=1).num_samples in (1000, 1001)


class Recorder:
    """A loss that remembers the batches it was given."""

    def __init__(self):
        self.seen = []

    def __call__(self, model, batch):
        x, y = batch
        self.seen.append(x.clone())
        return F.cross_entropy(model(x), y)


def loaders(dataset):
    generator = torch.Generator().manual_seed(5)
    sampler = RandomSampler(dataset, generator=torch.Generator().manual_seed(6))
    return {
        "shuffled": DataLoader(dataset, batch_size=3, shuffle=True),
        "shuffled, drop_last": DataLoader(dataset, batch_size=2, shuffle=True, drop_last=True),
        "own generator": DataLoader(dataset, batch_size=3, shuffle=True, generator=generator),
        "own sampler": DataLoader(dataset, batch_size=3, sampler=sampler),
        "weighted": DataLoader(
            dataset,
            batch_size=3,
            sampler=torch.utils.data.WeightedRandomSampler(torch.ones(N), 5),
        ),
    }


@pytest.mark.parametrize("name", loaders(TensorDataset(torch.zeros(N))))
@pytest.mark.parametrize("backend", ["nested", "differences"])
def test_loader_gives_the_same_data_for_the_gradient_and_for_the_measurement(
    problem, name, backend
):
    loader = loaders(TensorDataset(*problem.batch))[name]
    loss_fn = Recorder()
    summary = summarize(
        problem.model, loss_fn, loader, backend=backend, order=1, partition="trivial"
    )
    count = len(loader)
    passes = [loss_fn.seen[i : i + count] for i in range(0, len(loss_fn.seen), count)]
    assert len(passes) == 2
    for gradient_batch, measured_batch in zip(*passes, strict=True):
        assert torch.equal(gradient_batch, measured_batch)
    # The squared norm of the gradient of just these batches: 0 if they differed in the passes.
    again = Recorder()
    summarize(problem.model, again, loader, backend=backend, order=1, partition="trivial")
    for a, b in zip(loss_fn.seen, again.seen, strict=True):
        assert torch.equal(a, b), "a second measurement starts where the first one did"
    assert float(summary.gbar) > 0


def test_workers_load_the_same_data(problem):
    loader = DataLoader(TensorDataset(*problem.batch), batch_size=4, shuffle=True, num_workers=1)
    loss_fn = Recorder()
    summarize(problem.model, loss_fn, loader, backend="nested", order=1)
    assert torch.equal(loss_fn.seen[0], loss_fn.seen[2])
    assert torch.equal(loss_fn.seen[1], loss_fn.seen[3])


class Augmented(torch.utils.data.Dataset):
    """Adds noise from all three random generators whenever a sample is read."""

    def __init__(self, batch):
        self.x, self.y = batch

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        import random

        noise = torch.randn(3, dtype=torch.float64) + random.random() + np.random.rand()
        return self.x[i] + noise, self.y[i]


@pytest.mark.parametrize("drawn", [0, 3])
def test_augmented_data_and_dropout_are_the_same_in_every_pass(problem, drawn):
    """Also if the passes draw differently much: fused kernels and elementary ones may."""
    loader = DataLoader(Augmented(problem.batch), batch_size=3, shuffle=True)
    seen = []

    def loss_fn(model, batch):
        x, y = batch
        noise = torch.rand(2)
        if len(seen) < len(loader):
            torch.rand(drawn)
        seen.append((x.clone(), noise))
        return F.cross_entropy(model(x), y)

    torch.manual_seed(0)
    summarize(problem.model, loss_fn, loader, backend="nested", order=1)
    count = len(loader)
    for (x, noise), (x_again, noise_again) in zip(seen[:count], seen[count:], strict=True):
        assert torch.equal(x, x_again)
        assert torch.equal(noise, noise_again)
    noises = [tuple(noise.tolist()) for _, noise in seen[:count]]
    assert len(set(noises)) == count, "batches draw numbers of their own"


def test_a_generator_that_draws_does_not_shift_the_draws_of_the_loss(problem):
    seen = []

    def loss_fn(model, batch):
        seen.append(torch.rand(2))
        return problem.loss_fn(model, batch)

    def batches():
        for part in cut(problem.batch, 3, N):
            torch.rand(5)
            yield part

    before = torch.get_rng_state()
    summarize(problem.model, loss_fn, batches(), backend="nested", order=1)
    assert torch.equal(seen[0], seen[2])
    assert torch.equal(seen[1], seen[3])
    assert torch.equal(torch.get_rng_state(), before)


def test_one_batch_draws_the_numbers_that_the_user_would_see(problem):
    """summarize(...) after manual_seed(0) has the loss of loss_fn(...) after manual_seed(0)."""
    model = nn.Sequential(problem.model, nn.Dropout(0.5))
    torch.manual_seed(0)
    expected = cross_entropy(model, problem.batch)
    for backend in BACKENDS:
        torch.manual_seed(0)
        summary = summarize(model, cross_entropy, problem.batch, backend=backend, order=2)
        torch.testing.assert_close(summary.loss, expected.detach())


# --- types of batches ----------------------------------------------------------------------------

Pair = namedtuple("Pair", ["x", "y"])


@dataclass
class Sample:
    x: torch.Tensor
    y: torch.Tensor


class Encoding(UserDict):
    """Like the output of a tokenizer: a mapping whose entries are attributes too."""

    def __getattr__(self, name):
        if name == "data":
            raise AttributeError(name)
        return self.data[name]


BATCHES = {
    "tuple": (lambda x, y: (x, y), lambda b: b),
    "list of tensors": (lambda x, y: [x, y], lambda b: b),
    "dict": (lambda x, y: {"x": x, "y": y}, lambda b: (b["x"], b["y"])),
    "UserDict": (lambda x, y: Encoding(x=x, y=y), lambda b: (b.x, b["y"])),
    "namedtuple": (Pair, lambda b: (b.x, b.y)),
    "dataclass": (Sample, lambda b: (b.x, b.y)),
    "nested": (
        lambda x, y: {"in": [x], "out": (y, "name", 3)},
        lambda b: (b["in"][0], b["out"][0]),
    ),
    "with constants": (lambda x, y: (x, y, torch.ones(2), 0.5, None), lambda b: b[:2]),
    "numpy": (
        lambda x, y: (x.numpy(), y.numpy()),
        lambda b: (torch.from_numpy(b[0]), torch.from_numpy(b[1])),
    ),
    "one tensor": (
        lambda x, y: torch.cat([x, y[:, None].double()], 1),
        lambda b: (b[:, :-1], b[:, -1].long()),
    ),
    "list per sample": (
        lambda x, y: {"x": x, "y": [{"label": int(label)} for label in y]},
        lambda b: (b["x"], torch.tensor([sample["label"] for sample in b["y"]])),
    ),
}


@pytest.mark.parametrize("microbatch", [None, 2])
@pytest.mark.parametrize("kind", BATCHES)
def test_batch_of_any_type(problem, kind, microbatch):
    make, read = BATCHES[kind]
    seen = []

    def loss_fn(model, batch):
        x, y = read(batch)
        seen.append((type(batch), len(x), len(y)))
        return F.cross_entropy(model(x), y)

    expected = summarize(problem.model, problem.loss_fn, problem.batch, backend="nested")
    batch = make(*problem.batch)
    actual = summarize(problem.model, loss_fn, batch, backend="nested", microbatch=microbatch)
    assert_same(actual, expected)
    assert {kind for kind, _, _ in seen} == {type(batch)}, "a part is of the type of the batch"
    assert all(n == m for _, n, m in seen)
    if microbatch:
        assert {n for _, n, _ in seen} == {1, 2, 3, 4}, "parts of 2, and two parts to compare with"


@pytest.mark.parametrize("kind", [k for k in BATCHES if k not in ("tuple", "list of tensors")])
def test_series_of_batches_of_any_type(problem, kind):
    make, read = BATCHES[kind]
    if kind == "one tensor":
        pytest.skip("a list of tensors is one batch")
    batches = [make(*part) for part in cut(problem.batch, 2, N)]
    expected = summarize(problem.model, problem.loss_fn, problem.batch, backend="nested")

    def loss_fn(model, batch):
        x, y = read(batch)
        return F.cross_entropy(model(x), y)

    assert_same(summarize(problem.model, loss_fn, batches, backend="nested"), expected)


def test_a_loss_without_data_takes_none():
    problem = PROBLEMS["rosenbrock"]()
    summary = summarize(problem.model, problem.loss_fn, None, backend="nested")
    assert summary.num_samples == 1


def test_any_other_object_is_one_batch(problem):
    class Graph:
        x, y = problem.batch

    loss_fn = lambda model, graph: F.cross_entropy(model(graph.x), graph.y)  # noqa: E731
    summary = summarize(problem.model, loss_fn, Graph(), backend="nested", microbatch=2)
    expected = summarize(problem.model, problem.loss_fn, problem.batch, backend="nested")
    torch.testing.assert_close(summary.Hbar, expected.Hbar)
    assert summary.num_samples == 0, "unknown"


def test_samples_are_counted_by_the_first_tensor():
    x, y = torch.zeros(5, 2), torch.zeros(3)
    assert count_samples((x, y)) == 5
    assert count_samples({"scale": torch.tensor(2.0), "y": y}) == 3
    assert count_samples({"a": {"b": [None, (y,)]}}) == 3
    assert count_samples(UserDict(x=x)) == 5
    assert count_samples(None) == 1
    assert count_samples("text") is count_samples(3) is None
    assert count_samples({"text": ["a", "b", "c"]}) == count_samples(["a", "b", "c"]) == 3


def test_parts_keep_what_has_not_the_length_of_the_batch():
    batch = {"x": torch.arange(4), "w": torch.arange(3), "names": list("abcd"), "n": 4}
    part = take_samples(batch, 4, slice(1, 3))
    assert part["x"].tolist() == [1, 2]
    assert part["w"].tolist() == [0, 1, 2]
    assert part["names"] == ["b", "c"]
    assert part["n"] == 4
    two = [torch.arange(2), torch.arange(2)]  # as many tensors as samples
    assert [x.tolist() for x in take_samples(two, 2, slice(0, 1))] == [[0], [0]]
    nested = {"tokens": [torch.arange(2), torch.arange(2)]}
    cut_nested = take_samples(nested, 2, slice(0, 1))
    assert [x.tolist() for x in cut_nested["tokens"]] == [[0], [0]]


# --- coupled samples -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["batch_norm_1d", "batch_norm_2d", "batch_norm_no_statistics", "batch_norm_no_affine"]
)
@pytest.mark.parametrize("backend", ["auto", *BACKENDS])
def test_batch_norm_in_training_is_never_split(name, backend):
    problem = PROBLEMS[name]()
    before = {n: v.clone() for n, v in problem.model.state_dict().items()}
    with pytest.raises(CoupledSamplesError, match=r"batch norm in training.*model\.eval\(\)"):
        summarize(problem.model, problem.loss_fn, problem.batch, microbatch=2, backend=backend)
    with pytest.raises(CoupledSamplesError):
        derivative_tensor(problem.model, problem.loss_fn, problem.batch, order=2, microbatch=2)
    for n, v in problem.model.state_dict().items():
        assert torch.equal(v, before[n])


def test_batch_norm_without_statistics_is_never_split_in_evaluation_either():
    problem = PROBLEMS["batch_norm_no_statistics"]()
    problem.model.eval()  # it uses the statistics of the batch all the same
    with pytest.raises(CoupledSamplesError):
        summarize(problem.model, problem.loss_fn, problem.batch, microbatch=2)


@pytest.mark.parametrize("name", ["batch_norm_1d", "batch_norm_2d"])
def test_a_batch_that_is_not_split_may_have_batch_norm(name):
    problem = PROBLEMS[name]()
    whole = summarize(problem.model, problem.loss_fn, problem.batch, backend="nested")
    n = len(problem.batch[0])
    same = summarize(problem.model, problem.loss_fn, problem.batch, backend="nested", microbatch=n)
    assert_same(same, whole)


@pytest.mark.parametrize("name", ["batch_norm_1d_eval", "instance_norm", "layer_norm"])
def test_norms_of_single_samples_may_be_split(name):
    problem = PROBLEMS[name]()
    whole = summarize(problem.model, problem.loss_fn, problem.batch, backend="nested")
    parts = summarize(problem.model, problem.loss_fn, problem.batch, backend="nested", microbatch=4)
    assert_same(parts, whole)


def test_functional_batch_norm_is_seen_too(problem):
    def loss_fn(model, batch):
        x, y = batch
        return F.cross_entropy(F.batch_norm(model(x), None, None, training=True), y)

    with pytest.raises(CoupledSamplesError):
        summarize(problem.model, loss_fn, problem.batch, microbatch=2)


# --- progress ------------------------------------------------------------------------------------


def test_progress_is_reported_to_a_function(problem):
    calls = []
    summarize(
        problem.model,
        problem.loss_fn,
        cut(problem.batch, 2, 4, N),
        backend="nested",
        progress=lambda done, total: calls.append((done, total)),
    )
    assert calls == [(0, 3), (1, 3), (2, 3), (3, 3)]


def test_progress_without_a_known_total_ends_with_it(problem):
    """With a given direction there is no gradient pass that counts the batches."""
    calls = []
    summarize(
        problem.model,
        problem.loss_fn,
        cut(problem.batch, 2, N),
        direction=problem.direction(),
        backend="nested",
        microbatch=3,
        progress=lambda done, total: calls.append((done, total)),
    )
    assert calls[0] == (0, None)
    assert calls[-1] == (3, 3)


def test_progress_is_written_to_standard_error(problem, capsys):
    for direction in ("gradient", problem.direction()):
        summarize(
            problem.model,
            problem.loss_fn,
            cut(problem.batch, 2, N),
            direction=direction,
            backend="nested",
            progress=True,
        )
        captured = capsys.readouterr()
        assert captured.out == ""
        assert "2 of 2 batches\n" in captured.err
    summarize(problem.model, problem.loss_fn, problem.batch, backend="nested")
    assert capsys.readouterr().err == ""
