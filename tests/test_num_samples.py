"""How many samples a batch has: found, given, or refused where it matters."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from newton_summary import derivative_tensor, step_trials, suggest_lrs, summarize, taylor_terms
from newton_summary.probe.inputs import as_batches, count_samples


class Graphs:
    """Like a batch of PyTorch Geometric: nodes of several graphs, listed by key."""

    def __init__(self, sizes: list[int]):
        generator = torch.Generator().manual_seed(sum(sizes))
        self._store = {
            "x": torch.randn(sum(sizes), 3, generator=generator, dtype=torch.float64),
            "y": torch.randn(len(sizes), 2, generator=generator, dtype=torch.float64),
            "batch": torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes)),
        }
        self.num_graphs = len(sizes)

    def __getattr__(self, name):
        if name not in self.__dict__["_store"]:
            raise AttributeError(name)
        return self.__dict__["_store"][name]

    def __iter__(self):
        return iter(self._store.items())

    def keys(self):
        return self._store.keys()

    def to(self, *args):
        return self


def graph_loss(model: nn.Module, graphs) -> Tensor:
    get = graphs.__getitem__ if isinstance(graphs, dict) else graphs.__getattr__
    x, y, batch = get("x"), get("y"), get("batch")
    pooled = torch.zeros(len(y), 2, dtype=x.dtype).index_add(0, batch, torch.tanh(model(x)))
    return (pooled - y).square().mean()


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 2).double()


def weighted(model: nn.Module, loss_fn, batches, weights) -> float:
    losses = [float(loss_fn(model, batch).detach()) for batch in batches]
    return sum(n * loss for n, loss in zip(weights, losses, strict=True)) / sum(weights)


BATCHES = [Graphs([2, 3, 4]), Graphs([5])]


def test_an_object_says_how_many_samples_it_has():
    net = model()
    summary = summarize(net, graph_loss, BATCHES)
    assert summary.num_samples == 4
    assert float(summary.loss) == pytest.approx(weighted(net, graph_loss, BATCHES, [3, 1]))


def test_one_object_is_one_batch():
    """Though it can be iterated over, and is not split: nothing says how."""
    net = model()
    whole = summarize(net, graph_loss, BATCHES[0])
    assert whole.num_samples == 3
    assert float(whole.loss) == pytest.approx(float(graph_loss(net, BATCHES[0])))
    for how in ({"microbatch": 1}, {"stack_limit": 1}):
        summary = summarize(net, graph_loss, BATCHES[0], **how)
        torch.testing.assert_close(summary.Hbar, whole.Hbar)


def test_tensors_that_do_not_agree_are_refused():
    """Nodes or graphs? The first tensor is of nodes."""
    batches = [{"x": b.x, "y": b.y, "batch": b.batch} for b in BATCHES]
    with pytest.warns(UserWarning, match=r"do not agree.*9 in one.*5 in another.*num_samples="):
        summarize(model(), graph_loss, batches)
    pairs = [(b.x, b.y) for b in BATCHES]
    loss_fn = lambda m, b: m(b[0]).square().mean() + b[1].mean()  # noqa: E731
    with pytest.raises(ValueError, match=r"do not agree.*num_samples=lambda batch"):
        summarize(model(), loss_fn, pairs)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one = summarize(model(), loss_fn, pairs[:1])  # nothing to weigh
        given = summarize(model(), loss_fn, pairs, num_samples=lambda batch: len(batch[1]))
    assert one.num_samples == 9
    assert given.num_samples == 4
    assert float(given.loss) == pytest.approx(weighted(model(), loss_fn, pairs, [3, 1]))


class Opaque:
    """Tells nothing about itself."""

    __slots__ = ("inside",)

    def __init__(self, x: Tensor):
        self.inside = x


def test_unknown_numbers_are_refused_where_they_matter():
    batches = [Opaque(torch.ones(n, 3, dtype=torch.float64)) for n in (8, 2)]
    loss_fn = lambda m, batch: m(batch.inside).square().mean()  # noqa: E731
    assert summarize(model(), loss_fn, batches[0]).num_samples == 0
    with pytest.raises(ValueError, match=r"type Opaque is unknown.*num_samples="):
        summarize(model(), loss_fn, batches)
    for given, total in ((5, 10), (lambda batch: len(batch.inside), 10)):
        assert summarize(model(), loss_fn, batches, num_samples=given).num_samples == total


@pytest.mark.parametrize("given", [-1, 2.5, "8", True, lambda batch: None, lambda batch: -2])
def test_wrong_numbers(given):
    x = torch.ones(4, 3, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"num_samples=.*whole number"):
        summarize(model(), lambda m, x: m(x).square().mean(), x, num_samples=given)


def test_every_function_takes_the_number():
    net, n = model(), {"num_samples": lambda graphs: int(graphs.num_graphs) ** 2}
    expected = weighted(net, graph_loss, BATCHES, [9, 1])
    summary = summarize(net, graph_loss, BATCHES, **n)
    assert float(summary.loss) == pytest.approx(expected)
    gbar = derivative_tensor(net, graph_loss, BATCHES, order=1, **n)
    torch.testing.assert_close(gbar, summary.gbar)
    terms = taylor_terms(net, graph_loss, BATCHES, order=1, **n)
    torch.testing.assert_close(terms[0], summary.gbar.sum())
    assert len(step_trials(net, graph_loss, BATCHES, summary, fractions=[1.0], **n)) == 1
    adam = torch.optim.Adam(net.parameters())
    assert suggest_lrs(net, graph_loss, BATCHES, adam, **n).summary.num_samples == 10


# --- time first -----------------------------------------------------------------------------------


def test_batches_with_time_first_are_refused():
    """Their first dimension is the same, the second is not, and the model counts steps first."""

    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(3, 2)

        def forward(self, x):
            return self.lstm(x)[0]

    net = Recurrent().double()
    batches = [(torch.randn(5, n, 3, dtype=torch.float64),) for n in (8, 2)]
    loss_fn = lambda m, b: m(b[0]).square().mean()  # noqa: E731
    with pytest.raises(ValueError, match=r"\(5, 8, 3\) and \(5, 2, 3\).*batch_first=False"):
        summarize(net, loss_fn, batches)
    summary = summarize(net, loss_fn, batches, num_samples=lambda batch: batch[0].shape[1])
    assert summary.num_samples == 10
    assert float(summary.loss) == pytest.approx(weighted(net, loss_fn, batches, [8, 2]))
    labelled = [(x, torch.zeros(x.shape[1])) for (x,) in batches]  # the labels say it
    with pytest.raises(ValueError, match="do not agree"):
        summarize(net, loss_fn, labelled)


@pytest.mark.parametrize("labels", [(4,), (4, 1)])
def test_time_first_with_labels_that_stay_as_many_is_refused(labels):
    """Sequences of 2 and of 40 steps, of four samples each."""
    net = nn.RNN(3, 2).double()
    batches = [
        (torch.randn(steps, 4, 3, dtype=torch.float64), torch.zeros(labels)) for steps in (2, 40)
    ]
    loss_fn = lambda m, b: (m(b[0])[0][-1].sum() - b[1]).square().mean()  # noqa: E731
    with pytest.raises(ValueError, match=r"\(2, 4, 3\) and \(40, 4, 3\).*batch_first=False"):
        summarize(net, loss_fn, batches)
    summary = summarize(net, loss_fn, batches, num_samples=lambda batch: len(batch[1]))
    assert summary.num_samples == 8


CONSTANTS = {
    "of another length": lambda n: (torch.zeros(n, 5), torch.ones(2)),
    "as long as the second dimension": lambda n: (torch.zeros(n, 3), torch.zeros(n), torch.ones(3)),
    "square": lambda n: (torch.zeros(n, n),),
}


@pytest.mark.parametrize("kind", CONSTANTS)
def test_constants_in_a_batch_are_not_taken_for_labels(kind):
    """Such as class weights, also where a layer counts steps first."""
    net = nn.RNN(3, 2).double()
    loss_fn = lambda m, b: sum(p.square().sum() for p in m.parameters())  # noqa: E731
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert summarize(net, loss_fn, [CONSTANTS[kind](n) for n in (8, 4)]).num_samples == 12


def test_sequences_of_varying_length_are_counted_by_the_first_dimension():
    torch.manual_seed(0)
    net = nn.Embedding(5, 2).double()
    batches = [(torch.randint(5, (n, length)),) for n, length in ((8, 3), (8, 4), (2, 6))]
    loss_fn = lambda m, b: m(b[0]).square().mean()  # noqa: E731
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert summarize(net, loss_fn, batches).num_samples == 18


# --- what is counted ------------------------------------------------------------------------------


@dataclass
class Pair:
    x: Tensor
    n: int


class Loaded:
    def __init__(self, x: Tensor):
        self.name, self.x = "a", x


class Sized:
    batch_size = torch.Size([6, 2])


COUNTED = {
    "tensor": (torch.ones(5, 2), 5),
    "mapping": ({"scale": torch.tensor(2.0), "x": torch.ones(5)}, 5),
    "dataclass": (Pair(torch.ones(5), 3), 5),
    "object with tensors": (Loaded(torch.ones(5)), 5),
    "object with a size": (Sized(), 6),
    "objects inside": ((Graphs([2, 3, 4]), torch.ones(7)), 3),
    "packed": (pack_sequence([torch.ones(4), torch.ones(2)]), 2),
    "texts": ({"text": ["a", "b"], "label": [0, 1]}, 2),
    "flattened labels": ((torch.ones(4, 3), torch.ones(12)), 4),
    "nothing": (None, 1),
    "text": ("text", None),
    "number": (3, None),
    "empty": (torch.ones(0, 3), 0),
}


@pytest.mark.parametrize("kind", COUNTED)
def test_what_is_counted(kind):
    batch, expected = COUNTED[kind]
    assert count_samples(batch) == expected


def test_a_packed_sequence_is_not_cut():
    net = nn.LSTM(3, 2).double()
    batch = pack_sequence([torch.randn(n, 3, dtype=torch.float64) for n in (4, 3, 1)])
    assert isinstance(batch, PackedSequence)
    loss_fn = lambda m, b: m(b)[0].data.square().mean()  # noqa: E731
    whole = summarize(net, loss_fn, batch)
    assert whole.num_samples == 3
    torch.testing.assert_close(summarize(net, loss_fn, batch, microbatch=1).Hbar, whole.Hbar)


def test_what_is_one_batch_and_what_are_several():
    x = torch.ones(2)
    for one in (x, (x, x), [x, x], {"x": x}, Graphs([1]), Pair(x, 1), None, Loaded(x)):
        assert as_batches(one) == [one] or as_batches(one)[0] is one
    for several in ([(x, x), (x, x)], [Graphs([1]), Graphs([2])], iter([x, x])):
        assert len(list(as_batches(several))) == 2


def test_a_batch_without_samples():
    with pytest.raises(ValueError, match="Batch 0 has no samples"):
        summarize(model(), lambda m, x: m(x).sum(), torch.ones(0, 3, dtype=torch.float64))
    batches = [(torch.ones(n, 3, dtype=torch.float64),) for n in (2, 0)]
    with pytest.raises(ValueError, match="Batch 1 has no samples"):
        summarize(model(), lambda m, b: F.mse_loss(m(b[0]), 0 * m(b[0])), batches)
