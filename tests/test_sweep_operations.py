"""The sweep, operation by operation, against central differences of torch's own gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from newton_summary import make_partition, summarize
from newton_summary.derivatives.probe import Probe
from newton_summary.derivatives.sweep.recorder import Recorder
from newton_summary.derivatives.sweep.rules import DECOMPOSED, PREPARE, RULES, generic, rule_for
from newton_summary.derivatives.sweep.tape import Op
from oracle import finite_differences
from sweep_cases import CASES, Around


def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch)


def operations_on_the_tape(model: nn.Module, batch: Tensor) -> list[Op]:
    with Probe(model, loss_fn, batch, make_partition(model, "canonical")) as probe:
        ((closure, _),) = probe.closures()
        recorder = Recorder(probe.params, frozenset(RULES), PREPARE, DECOMPOSED)
        return recorder.record(closure).ops


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("name", CASES)
def test_operation_agrees_with_central_differences(name: str) -> None:
    case = CASES[name]
    torch.manual_seed(0)
    model = Around(case).double()
    batch = torch.linspace(-1, 1, 4, dtype=torch.float64)
    partition = make_partition(model, "canonical")
    u = {n: torch.randn_like(p) / p.numel() ** 0.5 for n, p in partition.params.items()}
    ops = operations_on_the_tape(model, batch)
    assert {op.name for op in ops if rule_for(op) is generic} == case.generic
    actual = summarize(model, loss_fn, batch, partition=partition, direction=u, backend="sweep")
    assert actual.backend == "sweep"
    expected = finite_differences(model, loss_fn, batch, partition, u)
    assert torch.allclose(actual.loss, expected.loss, rtol=1e-12)
    assert relative_error(actual.gbar, expected.gbar) < 1e-12
    assert relative_error(actual.Hbar, expected.Hbar) < 1e-8
    assert relative_error(actual.D3, expected.D3) < 1e-5
