"""Central differences of ordinary gradients: approximate, for what cannot be differentiated twice.

Every group is moved by +h and by -h along its part of the direction, 2S + 1 gradients in all:

    Hbar_st ~ (gbar_s(+h_t) - gbar_s(-h_t)) / 2 h_t
    D3_s    ~ (gbar_s(+h_s) - 2 gbar_s(0) + gbar_s(-h_s)) / h_s^2

The row of an embedding given by ``padding_idx`` is a constant to autograd, and so to the exact
backends. Here it moves unless the direction leaves it out, as gradients do.
"""

from __future__ import annotations

import torch
from torch import Tensor

from newton_summary.partition import Params, Partition, result_dtype
from newton_summary.probe.probe import Closure, check_depends, check_finite
from newton_summary.probe.state import unmoved
from newton_summary.summary import Summary


def step_sizes(
    params: Params, u: Params, partition: Partition, relative: float | None = None
) -> Tensor:
    """Return the step h_s of every group, shape (S,).

    A group moves by ``relative`` times its own size, or that of the average parameter if it is
    smaller, as biases that start from zero are. By default that is eps^(1/4): the error of rounding
    in the second difference is eps / h^2 and that of truncation is h^2.
    """
    if relative is None:
        relative = max(torch.finfo(p.dtype).eps for p in params.values()) ** 0.25
    squares = partition.inner(params, params).detach().double().cpu()
    counts = torch.tensor(partition.sizes, dtype=torch.float64)
    overall = squares.sum() / counts.sum()
    rms = torch.maximum(squares / counts, overall if overall > 0 else torch.ones(())).sqrt()
    rms_u = (partition.inner(u, u).detach().double().cpu() / counts).sqrt()
    steps = relative * rms / rms_u
    return torch.where(rms_u > 0, steps, torch.ones_like(steps))  # a group that does not move


def summarize_differences(
    closure: Closure,
    params: Params,
    u: Params,
    partition: Partition,
    order: int = 3,
    step_factor: float = 1.0,
) -> Summary:
    """Approximate a summary by 2S + 1 gradients, each at slightly moved parameters.

    The parameters are moved in place and restored, bit for bit. Where the loss is smooth, the
    result is accurate to about 1e-6 of the largest entry in float64, and to a few percent in
    float32 (Hbar to about one). Kinks within the step (max-pooling, ReLU) add to the error, most of
    all in D3.
    """
    leaves = list(params.values())

    def gradient() -> tuple[Tensor, Tensor]:
        loss = closure()
        check_finite(loss)
        check_depends(loss, params)
        grads = torch.autograd.grad(loss, leaves, materialize_grads=True)
        gbar = partition.inner(dict(zip(params, grads, strict=True)), u)
        return loss.detach().reshape(()), gbar.detach()

    loss, gbar = gradient()
    how = {"loss": loss, "partition": partition, "backend": "differences"}
    if order == 1:
        return Summary(gbar, **how)  # type: ignore[arg-type]
    S = len(partition)
    steps = step_sizes(params, u, partition) * step_factor
    Hbar = torch.zeros(S, S, dtype=result_dtype(params), device=gbar.device)
    D3 = torch.zeros_like(gbar)
    for t in range(S):
        U_t = partition.restrict(u, t)
        moved = {}
        for sign in (+1, -1):
            with unmoved(params[name] for name in U_t):
                with torch.no_grad():
                    for name, part in U_t.items():
                        params[name].add_(part, alpha=sign * float(steps[t]))
                moved[sign] = gradient()[1]
        Hbar[:, t] = (moved[+1] - moved[-1]) / (2 * float(steps[t]))
        D3[t] = (moved[+1][t] - 2 * gbar[t] + moved[-1][t]) / float(steps[t]) ** 2
    Hbar = (Hbar + Hbar.T) / 2
    return Summary(gbar, Hbar, D3 if order == 3 else None, approximate=True, **how)  # type: ignore[arg-type]
