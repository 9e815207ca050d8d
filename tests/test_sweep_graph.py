"""When a captured sweep may be used again. The graphs themselves are in test_cuda.py."""

from __future__ import annotations

import gc
import warnings
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from newton_summary import NewtonSummary, NotFiniteError, make_partition, summarize
from newton_summary.derivatives.sweep import cuda_graph
from newton_summary.derivatives.sweep.cuda_graph import (
    BEFORE_CAPTURE,
    MOST_GRAPHS,
    CannotCapture,
    SweepGraph,
    SweepGraphs,
    Wanted,
    graphs_of,
)
from newton_summary.derivatives.sweep.engine import Leaves, totals_at, where_in_totals


class Net(nn.Module):
    """A layer, a frozen one, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.frozen = nn.Linear(3, 2), nn.Linear(2, 2).requires_grad_(False)
        self.register_buffer("temperature", torch.ones(()))


def loss_fn(model: Net, batch: Any) -> Tensor:
    return model.frozen(model.layer(batch[0])).square().mean() / model.temperature


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Note what would be captured, on a machine without a GPU."""
    found: list[Any] = []

    def capture(wanted: Wanted) -> Any:
        found.append(wanted)
        return SimpleNamespace(replay=lambda batch, partition: None)

    monkeypatch.setattr(cuda_graph, "SweepGraph", capture)
    monkeypatch.setattr(cuda_graph, "BEFORE_CAPTURE", 0)
    monkeypatch.setattr(SweepGraphs, "_check", staticmethod(lambda partition: None))
    return found


def replaying(model: nn.Module) -> Any:
    """Return a function that measures a batch with graphs of the model."""
    leaves, graphs = leaves_of(model), SweepGraphs()
    return lambda batch, order=3, loss_fn=loss_fn: graphs.replay(
        Wanted(model, leaves.partition, loss_fn, batch, leaves.u, order)
    )


def new_numbers(model: Net) -> None:
    with torch.no_grad():
        model.layer.weight.mul_(2)
        model.frozen.weight.mul_(2)
        model.temperature.mul_(2)


def new_weight(model: Net) -> None:
    model.layer.weight.data = model.layer.weight.data.clone()


def new_frozen_weight(model: Net) -> None:
    model.frozen.weight.data = model.frozen.weight.data.clone()


def fewer_units(model: Net) -> None:
    model.layer.weight.data = model.layer.weight.data[:1]  # at the same place


def other_strides(model: Net) -> None:
    model.frozen.weight.data = model.frozen.weight.data.T


def new_buffer(model: Net) -> None:
    model.temperature = 0.9 * model.temperature


def other_mode(model: Net) -> None:
    model.layer.eval()


@pytest.mark.parametrize(
    ("change", "count"),
    [
        (new_numbers, 1),
        *((new_weight, 2), (new_frozen_weight, 2), (new_buffer, 2), (other_mode, 2)),
        *((fewer_units, 2), (other_strides, 2)),
    ],
)
def test_what_lies_elsewhere_is_captured_anew(change: Any, count: int, captures: list) -> None:
    model = Net()
    before = [x.data for x in (*model.parameters(), *model.buffers())]  # so that nothing is freed
    replay = replaying(model)
    replay((torch.randn(4, 3),))
    change(model)
    replay((torch.randn(4, 3),))
    assert len(captures) == count and len(before) == 5


@pytest.mark.parametrize("odd", [np.ones(4), object()])
def test_a_batch_whose_contents_may_change_is_not_captured(odd: Any, captures: list) -> None:
    replay = replaying(Net())
    with pytest.raises(CannotCapture, match=r"numpy\.ndarray|builtins\.object"):
        replay((torch.randn(4, 3), odd))
    assert not captures


def test_a_loss_that_cannot_be_compared_is_not_captured(captures: list) -> None:
    class Loss:
        __slots__ = ()  # no weak references

        def __call__(self, model: nn.Module, batch: Any) -> Tensor:
            return loss_fn(model, batch)

    with pytest.raises(CannotCapture, match="loss_fn cannot be compared: cannot create weak ref"):
        replaying(Net())((torch.randn(4, 3),), loss_fn=Loss())


@pytest.mark.parametrize("where", ["buffer", "batch"])
def test_what_is_sparse_is_not_captured(where: str, captures: list) -> None:
    """It has no address, and a new batch has its entries elsewhere."""
    model, sparse = Net(), torch.eye(3).to_sparse()
    if where == "buffer":
        model.register_buffer("adjacency", sparse)
    with pytest.raises(CannotCapture, match="is sparse"):
        replaying(model)((torch.randn(4, 3), sparse if where == "batch" else 1))
    assert not captures


def test_other_orders_losses_and_numbers_are_captured_anew(captures: list) -> None:
    class Trainer:
        def loss(self, model: nn.Module, batch: Any) -> Tensor:
            return loss_fn(model, batch)

    replay, x, trainer = replaying(Net()), torch.randn(4, 3), Trainer()
    for again in (0, 1):
        replay((x, 1))
        replay((x, 1.0))
        replay((x, 1), order=2)
        replay((x, 1), loss_fn=trainer.loss)  # another object each time, and an equal one
        assert len(captures) == 4, again


def test_parameters_on_another_device_than_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs there is not captured, and a replay would give the first numbers for ever."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    params = {"weight": SimpleNamespace(device=torch.device("cuda:1"))}
    partition: Any = SimpleNamespace(params=params, labels={"weight": 0})
    with pytest.raises(CannotCapture, match="on cuda:1 but the current device is cuda:0"):
        SweepGraphs._check(partition)


@pytest.mark.parametrize("convert", [lambda y: y, torch.fft.fft], ids=["linear", "complex"])
def test_a_loss_without_a_place_to_read_its_slope_off(convert: Any) -> None:
    model, x = nn.Linear(3, 2, bias=False), torch.randn(4, 3)
    leaves = leaves_of(model)
    with pytest.raises(CannotCapture, match="linear in the parameters"):
        cuda_graph._run(lambda: convert(model(x)).real.sum(), leaves, 3)


def leaves_of(model: nn.Module) -> Leaves:
    partition = make_partition(model, "canonical")
    u = {name: torch.ones_like(p) for name, p in partition.params.items()}
    return Leaves(partition.params, u, partition)


def test_what_is_captured_is_the_sweep() -> None:
    """The loss and all contributions in one vector, which a replay writes anew."""
    model, batch = Net().double(), (torch.randn(4, 3, dtype=torch.float64),)
    leaves = leaves_of(model)
    places, numbers = cuda_graph._run(lambda: loss_fn(model, batch), leaves, 3)
    S = len(leaves.partition)
    totals = totals_at(where_in_totals(places, S), numbers[2:].numpy(), S)
    expected = summarize(model, loss_fn, batch, direction=leaves.u, backend="nested")
    for name in ("gbar", "Hbar", "D3"):
        torch.testing.assert_close(torch.from_numpy(getattr(totals, name)), getattr(expected, name))
    torch.testing.assert_close(numbers[0], expected.loss)
    assert numbers[1] == 0  # no mask hides a row


def exponential(model: nn.Module, batch: Any) -> Tensor:
    return model(batch[0]).exp().mean()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, "parameters are on cpu"),
        ({"microbatch": 2}, "microbatch=2"),
        ({"backend": "nested"}, "backend='nested'"),
        ({"curvature": None}, r"closure .* pass curvature=\(loss_fn, loader\)"),
        ({"curvature": None, "loss_fn": exponential}, r"step\(batch\) .* pass curvature="),
    ],
)
def test_the_optimizer_says_why_nothing_is_captured(options: Any, reason: str) -> None:
    model, batch = nn.Linear(3, 2), (torch.randn(4, 3),)
    options = {"curvature": (exponential, [batch]), **options}
    optimizer = NewtonSummary(make_partition(model), summary_period=1, cuda_graph=True, **options)

    def train(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            exponential(model, batch).backward()
            optimizer.step(batch if "loss_fn" in options else lambda: exponential(model, batch))

    with pytest.warns(UserWarning, match=f"cuda_graph=True has no effect, because .*{reason}"):
        train(9)
    assert optimizer.refreshes > 4


def test_one_group_is_steered_without_a_summary() -> None:
    model = nn.Linear(3, 2)
    with pytest.warns(UserWarning, match="cuda_graph=True has no effect, because .* one group"):
        NewtonSummary(model, exponential, cuda_graph=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        NewtonSummary(model, exponential, lambda_int=1.0, cuda_graph=True)
        NewtonSummary.paper(make_partition(model, "trivial"), cuda_graph=True)


# --- summarize(cuda_graph=True) -------------------------------------------------------------------


class Eager(SweepGraph):
    """Launches by running the sweep again, on a machine without a GPU."""

    def __init__(self, wanted: Wanted):
        made.append(wanted.order)
        self.model = weakref.ref(wanted.model)
        self.u, self.loss_fn, self.order = wanted.u, weakref.ref(wanted.loss_fn), wanted.order
        self.samples, self._approximate = len(wanted.batch[0]), False

    def _launch(self, batch: Any) -> Tensor:
        launched.append(self.order)
        model, loss_fn = self.model(), self.loss_fn()
        assert model is not None and loss_fn is not None
        partition = make_partition(model)
        leaves = Leaves(partition.params, self.u, partition)
        places, numbers = cuda_graph._run(lambda: loss_fn(model, batch), leaves, self.order)
        self._where = where_in_totals(places, len(partition))
        return numbers


made: list[int] = []
launched: list[int] = []


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    made.clear()
    launched.clear()
    monkeypatch.setattr(cuda_graph, "SweepGraph", Eager)
    monkeypatch.setattr(SweepGraphs, "_check", staticmethod(lambda partition: None))


def small() -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    batches = [(torch.randn(5, 3).double(), torch.randint(2, (5,))) for _ in range(3)]
    return model, batches


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def assert_same(actual: Any, expected: Any) -> None:
    assert actual.partition.names == expected.partition.names
    for name in ("num_samples", "backend", "reason", "approximate", "parts", "order"):
        assert getattr(actual, name) == getattr(expected, name), name
    for name in ("gbar", "Hbar", "D3", "loss"):
        a, e = getattr(actual, name), getattr(expected, name)
        assert (a is None) == (e is None)
        if a is not None:
            torch.testing.assert_close(a, e, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("order", [2, 3])
@pytest.mark.parametrize("given", [False, True], ids=["gradient", "given"])
def test_a_replayed_summary_is_the_usual_one(
    given: bool, order: Any, mode: Any, eager: None
) -> None:
    """With other batches, other directions and other parameters than those of the capture."""
    model, batches = small()
    for i in range(BEFORE_CAPTURE + 3):
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.1 * torch.randn_like(p))
        u = {name: torch.randn_like(p) for name, p in model.named_parameters()}
        how: Any = {"direction": u if given else "gradient", "order": order}
        expected = summarize(model, cross_entropy, batches[i % 3], **how)
        with mode():
            actual = summarize(model, cross_entropy, batches[i % 3], cuda_graph=True, **how)
        assert_same(actual, expected)
        assert not actual.Hbar.is_inference()
    assert made == [order]
    assert launched == 3 * [order]


def test_a_loss_written_anew_each_time_is_never_captured(eager: None) -> None:
    """That would take longer than measuring."""
    model, batches = small()
    for _ in range(3 * MOST_GRAPHS):
        summarize(model, lambda m, b: cross_entropy(m, b), batches[0], cuda_graph=True)
    assert not made
    assert len(graphs_of(model)._graphs) <= MOST_GRAPHS


def test_graphs_keep_neither_model_nor_loss_alive(eager: None) -> None:
    class Trainer:
        def __init__(self, model: nn.Module):
            self.model = model

        def loss(self, model: nn.Module, batch: Any) -> Tensor:
            return cross_entropy(self.model, batch)

    model, batches = small()
    trainer = Trainer(model)
    loss = trainer.loss  # which refers to the model
    for _ in range(BEFORE_CAPTURE + 2):
        summarize(model, loss, batches[0], cuda_graph=True)
    assert made
    gone, graphs = weakref.ref(model), weakref.ref(graphs_of(model))
    del model, loss, trainer
    gc.collect()
    assert gone() is None
    assert graphs() is None


def test_a_graph_of_the_gradient_waits_until_no_loss_is_kept(eager: None) -> None:
    model, batches = small()
    loss = cross_entropy(model, batches[0])
    loss.backward()
    for _ in range(BEFORE_CAPTURE):
        summarize(model, cross_entropy, batches[0], cuda_graph=True)
    with pytest.warns(UserWarning, match=r"keeps the autograd graph .* \(del loss\)"):
        summarize(model, cross_entropy, batches[0], cuda_graph=True)
    assert not made
    del loss
    summarize(model, cross_entropy, batches[0], cuda_graph=True)
    assert made
    kept = cross_entropy(model, batches[0])
    summarize(model, cross_entropy, batches[0], cuda_graph=True)
    assert len(made) == 1 and len(launched) == 2
    u = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    for _ in range(BEFORE_CAPTURE + 1):
        summarize(model, cross_entropy, batches[0], direction=u, cuda_graph=True)
    assert len(made) == 2  # along a given direction it needs no gradient
    assert kept.requires_grad


def test_what_an_autocast_keeps_is_not_in_the_way(eager: None) -> None:
    model, batches = small()
    model.float()
    batch = (batches[0][0].float(), batches[0][1])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for _ in range(BEFORE_CAPTURE + 1):
            cross_entropy(model, batch)
            summarize(model, cross_entropy, batch, cuda_graph=True)
    assert made


def test_a_replay_raises_what_a_measurement_does(eager: None) -> None:
    model, batches = small()
    u = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    for _ in range(BEFORE_CAPTURE + 1):
        summarize(model, cross_entropy, batches[0], cuda_graph=True)
        summarize(model, cross_entropy, batches[0], direction=u, cuda_graph=True)
    assert len(made) == 2
    with pytest.raises(NotFiniteError, match="The loss is nan, so it has no derivatives"):
        summarize(model, cross_entropy, (batches[0][0] * torch.nan, batches[0][1]), cuda_graph=True)
    for wrong in ({}, {**u, "0.bias": u["0.bias"] * torch.nan}, "newton", 3):
        messages = []
        for graph in (False, True):
            with pytest.raises((ValueError, TypeError)) as error:
                summarize(model, cross_entropy, batches[0], direction=wrong, cuda_graph=graph)  # type: ignore[arg-type]
            messages.append(str(error.value))
        assert messages[0] == messages[1]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"stderr": True, "data": "several"}, "only one whole batch in one process"),
        ({"data": "several"}, "one whole batch"),
        ({"data": "iterator"}, "one whole batch"),
        ({"microbatch": 2}, "only one whole batch"),
        ({"order": 1}, "cannot be combined with order"),
        ({"backend": "nested"}, "cannot be combined with backend"),
        ({"stack_limit": "1GB"}, "cannot be combined with stack_limit"),
        ({"num_samples": 7}, "cannot be combined with num_samples"),
        ({"progress": lambda done, total: None}, "cannot be combined with progress"),
        ({"direction": "optimizer"}, "cannot be combined with direction"),
    ],
)
def test_what_is_not_replayed_is_measured_with_a_warning(
    options: dict, reason: str, eager: None
) -> None:
    model, batches = small()
    kinds = {"several": lambda: batches, "iterator": lambda: iter(batches[:1])}
    data = kinds.get(options.pop("data", None), lambda: batches[0])
    if "direction" in options:
        options["direction"] = torch.optim.Adam(model.parameters())
    expected = summarize(model, cross_entropy, data(), **options)
    with pytest.warns(UserWarning, match=f"cuda_graph=True has no effect, because .*{reason}"):
        actual = summarize(model, cross_entropy, data(), cuda_graph=True, **options)
    if not options.get("stderr"):
        assert_same(actual, expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it is said once
        for _ in range(BEFORE_CAPTURE):
            summarize(model, cross_entropy, data(), cuda_graph=True, **options)
        assert not made
        for _ in range(BEFORE_CAPTURE + 1):  # and stands in the way of nothing else
            summarize(model, cross_entropy, batches[0], cuda_graph=True)
    assert made


def test_on_a_cpu_it_is_measured_as_usual() -> None:
    model, batches = small()
    expected = summarize(model, cross_entropy, batches[0])
    with pytest.warns(UserWarning, match="no effect, because the parameters are on cpu"):
        actual = summarize(model, cross_entropy, batches[0], cuda_graph=True)
    assert_same(actual, expected)


def test_a_mask_that_hides_rows_is_seen_in_a_replay(eager: None) -> None:
    model = nn.Linear(3, 3).double()
    x, shown = torch.randn(4, 3).double(), torch.zeros(4, 3).double()
    hidden = shown.clone()
    hidden[1] = torch.finfo(torch.float64).min

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return (model(batch[0]) + batch[1]).softmax(-1).square().mean()

    for _ in range(BEFORE_CAPTURE + 1):
        assert not summarize(model, loss, (x, shown), cuda_graph=True).approximate
    assert launched
    with pytest.warns(UserWarning, match="hides whole rows"):
        assert summarize(model, loss, (x, hidden), cuda_graph=True).approximate
    assert len(launched) == 2
