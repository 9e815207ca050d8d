"""Split a batch to save memory, where its loss is the mean over its parts, and nowhere else.

Masks, ignored labels, class weights, penalties on statistics of a batch and norms over it make the
loss a function of the whole. Any of them may have no effect at the present parameters, as where a
layer starts from zero, and still have derivatives there. So a batch and its parts are compared a
little way along the direction, for each batch anew: all parts by their losses, and two of them by
their gradients, which show small penalties better.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from newton_summary.derivatives.differences import step_sizes
from newton_summary.errors import is_out_of_memory
from newton_summary.partition import Params
from newton_summary.probe.probe import Evaluation, Probe
from newton_summary.probe.state import unmoved
from newton_summary.summary import Summary

DISTANCE = 0.2  # of the size of the parameters, from where losses and gradients are compared
# What rounding may change, in units of eps. Measured on six networks in float32: 1.3 of the loss,
# 40 of the gradient of a tensor, 9 of the whole gradient.
LOSS, TENSOR, GRADIENT = 20, 400, 30


def measure_in_parts(
    whole: Evaluation, samples: int, u: Params, run: Callable[[Evaluation], Summary]
) -> list[Summary]:
    """Measure a batch in parts, or as a whole where the two differ.

    Takes two more forward passes than measuring the parts.

    Args:
        whole: The loss of the batch.
        samples: In a part, at most.
        u: The direction.
        run: Measures a batch, or a part of one.
    """
    parts = whole.split(-(-whole.size // -(-whole.size // samples)))  # of even size
    if len(parts) == 1 or not is_mean_of_parts(whole, parts, u):
        parts = [whole]
    return [replace(run(part), num_samples=part.size) for part in parts]


def is_mean_of_parts(whole: Evaluation, parts: Sequence[Evaluation], u: Params) -> bool:
    """Return whether the loss of a batch is the mean over its parts, and its gradient too."""
    probe = whole.probe
    eps = max(torch.finfo(p.dtype).eps for p in probe.params.values())
    if eps > 1e-6:
        return False  # what half precision rounds away could be a coupling
    sizes = step_sizes(probe.params, u, probe.partition, DISTANCE)
    try:
        with unmoved(probe.params.values()), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a loss that is given too few samples
            probe.step(probe.partition.scale(u, -sizes))
            if not _same_gradient(whole, parts[:2], eps):
                return False
            with torch.no_grad():
                mean = sum(part.size / whole.size * float(part()) for part in parts)
                return _is_close(mean, float(whole()), eps)
    except Exception as error:  # such as a loss that needs all samples of the batch
        if is_out_of_memory(error):
            raise
        return False


def _same_gradient(whole: Evaluation, pair: Sequence[Evaluation], eps: float) -> bool:
    """Return whether the gradient of the first two parts together is the mean of theirs."""
    both = whole.split(sum(part.size for part in pair))[0]
    loss, gradient = _gradient(whole.probe, [both])
    mean, mean_gradient = _gradient(whole.probe, pair)
    norms = [float(g.norm()) for g in gradient]
    total = sum(norm**2 for norm in norms) ** 0.5
    return _is_close(mean, loss, eps) and all(
        float((a - b).norm()) <= eps * (TENSOR * norm + GRADIENT * total)
        for a, b, norm in zip(gradient, mean_gradient, norms, strict=True)
    )


def _gradient(probe: Probe, parts: Sequence[Evaluation]) -> tuple[float, list[Tensor]]:
    """Return the mean loss over parts of a batch, and its gradient."""
    leaves, samples = list(probe.params.values()), sum(part.size for part in parts)
    loss, mean = 0.0, [torch.zeros_like(p) for p in leaves]
    for part in parts:
        value, weight = part(), part.size / samples
        grads = torch.autograd.grad(value, leaves, materialize_grads=True)
        torch._foreach_add_(mean, [g.to_dense() for g in grads], alpha=weight)
        loss += weight * float(value.detach())
    return loss, mean


def _is_close(mean: float, loss: float, eps: float) -> bool:
    """Return whether two losses are the same but for rounding."""
    return abs(mean - loss) <= LOSS * eps * abs(loss)
