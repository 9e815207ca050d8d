"""Steps of the paper's algorithm that a CUDA graph would make, with a stand-in on the CPU.

The graphs themselves are tested on a GPU, in test_cuda.py.
"""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from torch import nn

from newton_summary import NewtonSummary, make_partition
from newton_summary.optimizer import update
from problems import cross_entropy, spoil_gradients


class Eager:
    """Does at each launch what the graphs do."""

    launches: ClassVar[list[bool]] = []
    captures = 0

    def __init__(self, bucket, made):
        self.bucket, self.made, self.addresses = bucket, made, bucket.addresses()
        Eager.captures += 1

    def launch(self, grads, momentum, moves):
        Eager.launches.append(moves)
        u = self.bucket.u
        u.mul_(momentum).add_(torch.cat([grad.reshape(-1) for grad in grads]))
        extent = torch.linalg.vector_norm(u, torch.inf)
        self.bucket.zero_unless(bool(extent < torch.inf))
        self.made += extent < torch.inf
        if moves:
            self.bucket.move_by_rates()
        return extent


def fails(bucket, made):
    raise RuntimeError("operation not permitted when stream is capturing")


def train(monkeypatch, captured=None, lr=0.3):
    """Train past gradients that are not finite or missing, and other settings."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    batches = [(torch.randn(20, 5).double(), torch.randint(3, (20,))) for _ in range(3)]
    optimizer = NewtonSummary.paper(
        make_partition(model), lr=lr, curvature=(cross_entropy, batches), summary_period=5
    )
    for step in range(90):
        optimizer.zero_grad()
        cross_entropy(model, batches[step % 3]).backward()
        spoil_gradients(model, step)
        if step == 58:
            model[2].weight.data = model[2].weight.data.clone()  # elsewhere in memory
        for group in optimizer.param_groups:
            group["momentum"] = 0.9 if step < 71 else 0.8
            group["lr"] = lr if step < 77 else lr / 3
            if step == 62:  # for one step, and back to the rates before
                group["lr"] = torch.tensor(2.0)
        if step == 1 and captured is not None:
            held = optimizer._get_update()
            held._capturable, held._made = True, torch.tensor(held._made)
            held.buckets[0].on_cpu = False  # moves by the rate of each entry, as on a GPU
            monkeypatch.setattr(update, "CapturedStep", captured)
            monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)
            monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        optimizer.step()
    return model, optimizer


@pytest.mark.filterwarnings("ignore:NewtonSummary. 1 step")
@pytest.mark.parametrize("captured", [Eager, fails])
@pytest.mark.parametrize("lr", [0.3, torch.tensor(0.3)])
def test_captured_steps_are_the_same(monkeypatch, captured, lr):
    monkeypatch.setattr(Eager, "launches", [])
    monkeypatch.setattr(Eager, "captures", 0)
    expected, plain = train(monkeypatch, lr=lr)
    model, optimizer = train(monkeypatch, captured, lr)
    for a, e in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(a, e, rtol=1e-9, atol=1e-12)
    assert optimizer.skipped_steps == plain.skipped_steps == 2
    held = optimizer._get_update()
    assert held.skipped == 2
    if captured is fails:
        assert held._captured is None and not held._capturable
    else:
        assert Eager.captures == 2  # the second one where the parameters are then
        assert Eager.launches.count(False) > 8  # refreshes
        assert (Eager.launches.count(True) > 40) == (not isinstance(lr, torch.Tensor))
