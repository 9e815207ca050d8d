"""The slope of the loss along a direction: a summary of order 1 and one group, computed directly.

Training measures it again and again, so it must cost little more than the gradient itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from newton_summary.partition import Params, inner_of_all
from newton_summary.probe.probe import Probe, check_depends, check_finite


def loss_and_slope(probe: Probe, u: Params) -> tuple[float, float]:
    """Return the mean loss of the data of a probe, and its derivative along ``u``, in float64.

    Raises:
        NotFiniteError: If the loss is not finite.
    """
    found: list[tuple[int, Tensor, Tensor]] = []
    leaves = list(probe.params.values())
    for closure, size in probe.closures():
        known = probe.trusted
        loss = closure()
        check_depends(loss, None if known else probe.params)
        grads = torch.autograd.grad(loss, leaves, allow_unused=True)
        pairs = [(g, u[name]) for g, name in zip(grads, probe.params) if g is not None]
        slope = inner_of_all((g for g, _ in pairs), (d for _, d in pairs))
        found.append((size, loss.detach(), slope))
    total = sum(size for size, _, _ in found)  # nothing has waited until here
    loss_mean = sum(size / total * loss.item() for size, loss, _ in found)
    check_finite(torch.tensor(loss_mean))
    return loss_mean, sum(size / total * slope.item() for size, _, slope in found)
