"""Hbar and D3 from torch's own gradients: central differences of eighth order.

Along group s the gradient seen through the partition is f(t) = gbar(theta + t U^s); its first
derivative is the column s of Hbar, and the second derivative of its entry s is D3_s.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from newton_summary.partition import Partition
from newton_summary.probe.probe import Probe
from newton_summary.summary import Summary

# f'(0) h ~ sum_k c_k (f(k h) - f(-k h)),  f''(0) h^2 ~ sum_k c_k (f(k h) - 2 f(0) + f(-k h))
FIRST = {8: (4 / 5, -1 / 5, 4 / 105, -1 / 280), 6: (3 / 4, -3 / 20, 1 / 60)}
SECOND = {8: (8 / 5, -1 / 5, 8 / 315, -1 / 560), 6: (3 / 2, -3 / 20, 1 / 90)}
STEPS = (2e-2, 5e-3, 1e-3, 2e-4, 5e-5)


def finite_differences(
    model: nn.Module,
    loss_fn: Callable[[nn.Module, Any], Tensor],
    batch: Any,
    partition: Partition,
    u: dict[str, Tensor],
) -> Summary:
    """Differentiate the gradient numerically, in float64, along the line of every group."""
    params = partition.params
    assert all(p.dtype == torch.float64 for p in params.values())
    with Probe(model, loss_fn, batch, partition) as probe:
        ((closure, _),) = probe.closures()
        start = {name: p.detach().clone() for name, p in params.items()}

        def gradient(s: int, t: float) -> Tensor:
            part = partition.restrict(u, s)
            with torch.no_grad():
                for name, U in part.items():
                    params[name].copy_(start[name] + t * U)
            grads = torch.autograd.grad(closure(), list(params.values()), materialize_grads=True)
            with torch.no_grad():
                for name in part:
                    params[name].copy_(start[name])
            return partition.inner(dict(zip(params, grads, strict=True)), u)

        loss = closure().detach().reshape(())
        gbar = gradient(0, 0.0)
        columns, D3 = [], []
        for s in range(len(partition)):
            column, second = _differentiate(lambda t, s=s: gradient(s, t), gbar)
            columns.append(column)
            D3.append(second[s])
    return Summary(gbar, torch.stack(columns, 1), torch.stack(D3), loss=loss, partition=partition)


def _differentiate(f: Callable[[float], Tensor], f0: Tensor) -> tuple[Tensor, Tensor]:
    """Return f'(0) and f''(0), with a step at which two formulas agree: no kink is crossed."""
    for h in STEPS:
        plus, minus = ([f(sign * k * h) for k in (1, 2, 3, 4)] for sign in (1, -1))
        odd = [a - b for a, b in zip(plus, minus, strict=True)]
        even = [a - 2 * f0 + b for a, b in zip(plus, minus, strict=True)]
        first = {order: _weigh(c, odd) / h for order, c in FIRST.items()}
        second = {order: _weigh(c, even) / h**2 for order, c in SECOND.items()}
        if _agree(first, 1e-9) and _agree(second, 1e-6):
            return first[8], second[8]
    raise ArithmeticError("central differences do not settle: is the loss smooth here?")


def _weigh(coefficients: tuple[float, ...], terms: list[Tensor]) -> Tensor:
    return sum(c * term for c, term in zip(coefficients, terms, strict=False))  # type: ignore[return-value]


def _agree(estimates: dict[int, Tensor], tolerance: float) -> bool:
    gap = (estimates[8] - estimates[6]).abs().max()
    return bool(gap <= tolerance * (1 + estimates[8].abs().max()))
