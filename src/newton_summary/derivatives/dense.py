"""The whole derivative of order 1 to 3, contracted as the paper writes it: for tiny models."""

from __future__ import annotations

import torch
from torch import Tensor

from newton_summary.derivatives.nested import evaluate, refuse_wrong_norms
from newton_summary.partition import Params, Partition, result_dtype
from newton_summary.probe.probe import Closure
from newton_summary.summary import Summary

MAX_NUMBERS = 2**28  # in the full derivative: 2 GiB in float64, P = 645 at order 3


def partition_matrix(partition: Partition) -> Tensor:
    """Return I_{S:P} as a matrix: 1 where parameter p is in group s."""
    labels = [
        torch.full((partition.params[name].numel(),), label)
        if isinstance(label, int)
        else label.flatten().cpu()
        for name, label in partition.labels.items()
    ]
    return torch.nn.functional.one_hot(torch.cat(labels), len(partition)).T


def full_derivatives(closure: Closure, params: Params, order: int) -> tuple[Tensor, list[Tensor]]:
    """Return the loss and its full derivatives of order 1..order, the d-th of shape (P,) * d."""
    loss = evaluate(closure, params)
    leaves = list(params.values())
    g = jacobian(loss.reshape(1), leaves, last=order == 1)[0]
    derivatives = [g.detach()]
    if order >= 2:
        derivatives.append(jacobian(g, leaves, last=True))
    if order >= 3:  # row by row, so that only the graph of one row is traversed again
        rows = [jacobian(g_i.reshape(1), leaves, last=False)[0] for g_i in g]
        derivatives.append(torch.stack([jacobian(row, leaves, last=True) for row in rows]))
    return loss.detach(), derivatives


def jacobian(entries: Tensor, leaves: list[Tensor], last: bool) -> Tensor:
    """Return the derivatives of every entry with respect to all leaves, shape (entries, P)."""
    if not entries.requires_grad:  # constant in theta, e.g. the Hessian of a quadratic loss
        return entries.new_zeros(len(entries), sum(leaf.numel() for leaf in leaves))
    if not last:
        refuse_wrong_norms(entries)
    rows = torch.autograd.grad(
        entries,
        leaves,
        grad_outputs=torch.eye(len(entries), dtype=entries.dtype, device=entries.device),
        is_grads_batched=True,
        retain_graph=True,
        create_graph=not last,
        allow_unused=True,
    )
    flat = [
        leaf.new_zeros(len(entries), leaf.numel()) if row is None else row.reshape(len(entries), -1)
        for row, leaf in zip(rows, leaves, strict=True)
    ]
    return torch.cat(flat, 1)


def summarize_dense(
    closure: Closure, params: Params, u: Params, partition: Partition, order: int = 3
) -> Summary:
    """Compute a summary from the full derivatives: P^order numbers, so for tiny models only.

    Hbar = I_{S:P} U H U I_{P:S} with the matrices written out, and likewise for the other orders.
    """
    P = sum(p.numel() for p in params.values())
    if P**order > MAX_NUMBERS:
        raise ValueError(
            f"The dense backend would need {P}^{order} = {float(P**order):.0e} numbers. It is "
            "meant for tiny models; use backend='nested' or 'sweep'."
        )
    dtype = result_dtype(params)
    loss, full = full_derivatives(closure, params, order)
    g, *higher = (derivative.to(dtype) for derivative in full)
    flat_u = torch.cat([u[name].flatten().to(dtype) for name in params])
    IU = partition_matrix(partition).to(flat_u) * flat_u  # I_{S:P} U
    Hbar = IU @ higher[0] @ IU.T if order >= 2 else None
    D3 = torch.einsum("sp,sq,sr,pqr->s", IU, IU, IU, higher[1]) if order >= 3 else None
    return Summary(IU @ g, Hbar, D3, loss=loss, partition=partition, backend="dense")
