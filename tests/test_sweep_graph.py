"""When a captured sweep may be used again. The graphs themselves are in test_cuda.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from newton_summary import NewtonSummary, make_partition, summarize
from newton_summary.derivatives.sweep import cuda_graph
from newton_summary.derivatives.sweep.cuda_graph import CannotCapture, SweepGraphs
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

    def capture(*args: Any) -> Any:
        found.append(args)
        return SimpleNamespace(replay=lambda batch: None)

    monkeypatch.setattr(cuda_graph, "SweepGraph", capture)
    monkeypatch.setattr(SweepGraphs, "_check", staticmethod(lambda partition: None))
    return found


def graphs_of(model: nn.Module) -> Any:
    """Return a function that measures a batch with graphs of the model."""
    leaves, graphs = leaves_of(model), SweepGraphs()
    return lambda batch: graphs.replay(leaves.partition, loss_fn, batch, leaves.u, order=3)


def new_numbers(model: Net) -> None:
    with torch.no_grad():
        model.layer.weight.mul_(2)
        model.frozen.weight.mul_(2)
        model.temperature.mul_(2)


def new_weight(model: Net) -> None:
    model.layer.weight.data = model.layer.weight.data.clone()


def new_frozen_weight(model: Net) -> None:
    model.frozen.weight.data = model.frozen.weight.data.clone()


def new_buffer(model: Net) -> None:
    model.temperature = 0.9 * model.temperature


def other_mode(model: Net) -> None:
    model.layer.eval()


@pytest.mark.parametrize(
    ("change", "count"),
    [(new_numbers, 1), (new_weight, 2), (new_frozen_weight, 2), (new_buffer, 2), (other_mode, 2)],
)
def test_what_lies_elsewhere_is_captured_anew(change: Any, count: int, captures: list) -> None:
    model = Net()
    before = [x.data for x in (*model.parameters(), *model.buffers())]  # so that nothing is freed
    replay = graphs_of(model)
    replay((torch.randn(4, 3),))
    change(model)
    replay((torch.randn(4, 3),))
    assert len(captures) == count and len(before) == 5


def test_a_batch_that_cannot_be_compared_is_not_captured(captures: list) -> None:
    replay = graphs_of(Net())
    with pytest.raises(CannotCapture, match=r"numpy\.ndarray"):
        replay((torch.randn(4, 3), np.ones(4)))
    assert not captures


def test_parameters_on_another_device_than_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs there is not captured, and a replay would give the first numbers for ever."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    params = {"weight": SimpleNamespace(device=torch.device("cuda:1"))}
    partition: Any = SimpleNamespace(params=params, labels={"weight": 0})
    with pytest.raises(CannotCapture, match="on cuda:1 and the current device is cuda:0"):
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
    totals = totals_at(where_in_totals(places, S), numbers[1:].numpy(), S)
    expected = summarize(model, loss_fn, batch, direction=leaves.u, backend="nested")
    for name in ("gbar", "Hbar", "D3"):
        torch.testing.assert_close(torch.from_numpy(getattr(totals, name)), getattr(expected, name))
    torch.testing.assert_close(numbers[0], expected.loss)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, "parameters are on cpu"),
        ({"microbatch": 2}, "microbatch=2"),
        ({"backend": "nested"}, "backend='nested'"),
        ({"curvature": None}, r"closure .* give curvature=\(loss_fn, loader\)"),
    ],
)
def test_the_optimizer_says_why_nothing_is_captured(options: Any, reason: str) -> None:
    model, batch = nn.Linear(3, 2), (torch.randn(4, 3),)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return model(batch[0]).exp().mean()

    options = {"curvature": (loss, [batch]), **options}
    optimizer = NewtonSummary(make_partition(model), summary_period=1, cuda_graph=True, **options)

    def train(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            loss(model, batch).backward()
            optimizer.step(None if options["curvature"] else lambda: loss(model, batch))

    with pytest.warns(UserWarning, match=f"cuda_graph=True has no effect, because .*{reason}"):
        train(9)
    assert optimizer.refreshes > 4
