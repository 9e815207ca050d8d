"""Derivatives by repeated differentiation: Pearlmutter's trick extended (paper, App. A).

The d-th tensor is the derivative of the one before:

    D^(d)_{s1..sd} = <dD^(d-1)_{s1..s(d-1)} / dT^sd, U^sd>

Exact at every order, at the cost of one backward pass for every entry of the previous tensor.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import permutations
from math import comb
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from newton_summary.derivatives.norms import is_wrong
from newton_summary.derivatives.opaque_functions import (
    compare_with_differences,
    opaque_functions,
    watch_opaque_functions,
)
from newton_summary.derivatives.sweep.rules.linear import MASKED, warn_of_hidden_rows, watch_masks
from newton_summary.derivatives.sweep.torch_functions import look_up
from newton_summary.errors import CannotDifferentiate, is_out_of_memory
from newton_summary.partition import Params, Partition
from newton_summary.probe.probe import Closure, check_depends, check_finite, graph_nodes
from newton_summary.summary import Summary


@dataclass
class Contraction:
    """The map from a scalar f of the parameters to <df/dT^s, U^s> for every group s."""

    params: Params
    u: Params
    partition: Partition
    backward_passes: int = 0  # calls of autograd so far
    opaque: set[str] = field(default_factory=set)  # functions whose derivatives are to be doubted

    def __call__(self, entry: Tensor, groups: slice = slice(None), last: bool = False) -> Tensor:
        """Contract the gradient of a scalar with U, shape (S,).

        Groups other than the given ones are left zero; the ``last`` derivative is not
        differentiated again.
        """
        if not entry.requires_grad:  # constant in theta, e.g. Hbar of a quadratic loss
            return entry.new_zeros(len(self.partition))
        # In a fixed order, so that sums come out the same to the last bit in every process.
        members = self.partition.members[groups]
        needed = list(dict.fromkeys(member.name for group in members for member in group))
        self.backward_passes += 1
        if not last and self.backward_passes <= 2:  # the loss, and its gradient as a whole
            refuse_wrong_norms(entry)
        if not last and (self.backward_passes == 1 or self.opaque):
            self.opaque |= watch_opaque_functions(entry)
        try:
            grads = torch.autograd.grad(
                entry,
                [self.params[name] for name in needed],
                create_graph=not last,
                retain_graph=True,
                materialize_grads=True,
            )
        except (RuntimeError, NotImplementedError) as error:
            if is_out_of_memory(error):
                raise
            raise CannotDifferentiate(f"nested: {error}") from error
        return self.partition.inner(dict(zip(needed, grads, strict=True)), self.u)


def refuse_wrong_norms(entry: Tensor) -> None:
    """Raise if a graph contains a norm whose second derivative torch gets wrong."""
    for node in graph_nodes(entry.grad_fn) if entry.grad_fn is not None else ():
        if is_wrong(node):
            raise CannotDifferentiate(
                f"nested: torch's own derivatives of {node.name().partition('Backward')[0]} are "
                "wrong, and it was called in a way that cannot be replaced. Use the norm of "
                "torch.nn.functional, outside TorchScript."
            )


class Differentiable(TorchFunctionMode):
    """While active, norms and attention run in a form that can be differentiated again.

    Selecting a kernel with ``torch.nn.attention.sdpa_kernel`` would affect all threads.
    """

    def __init__(self) -> None:
        super().__init__()
        self.entered: list[Any] = []  # functions that torch writes in Python
        self.finished = False  # an interrupt may leave it active
        self.hidden: list[Tensor | None] = []  # whether masks hide whole rows

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.finished:
            return func(*args, **kwargs)
        call = look_up(func)
        if call.name in MASKED:
            func = attention if func is F.scaled_dot_product_attention else func
            result, hides = watch_masks(func, args, kwargs)
            self.hidden.append(hides)
            return result
        if call.elementary is not None:
            return call.elementary(*args, **kwargs)
        if call.inside is None or func in self.entered:
            return func(*args, **kwargs)
        self.entered.append(func)
        try:
            with self:
                return call.inside(*args, **kwargs)
        finally:
            self.entered.pop()


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **kwargs: Any,
) -> Tensor:
    """``F.scaled_dot_product_attention`` from products and a softmax."""
    device = query.device.type
    if torch.is_autocast_enabled(device):  # which knows the whole and not the parts of it
        dtype = torch.get_autocast_dtype(device)
        query, key, value, attn_mask = (  # type: ignore[assignment]
            x if x is None or not x.is_floating_point() or x.dtype == torch.float64 else x.to(dtype)
            for x in (query, key, value, attn_mask)
        )
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        zeros = torch.zeros(attn_mask.shape, dtype=query.dtype, device=query.device)
        attn_mask = zeros.masked_fill(~attn_mask, -torch.inf)
    math = torch._scaled_dot_product_attention_math
    with torch.autocast(device, enabled=False):
        return math(query, key, value, attn_mask, dropout_p, is_causal, **kwargs)[0]


def evaluate(closure: Closure, params: Params) -> Tensor:
    """Evaluate the loss with operations that can be differentiated repeatedly."""
    mode = Differentiable()
    try:
        with mode:
            loss = closure()
    finally:
        mode.finished = True
    check_finite(loss)
    check_depends(loss, params)
    warn_of_hidden_rows(mode.hidden)
    return loss.reshape(())


def summarize_nested(
    closure: Closure, params: Params, u: Params, partition: Partition, order: int = 3
) -> Summary:
    """Compute a summary with 2S + 1 backward passes (paper, App. A).

    The arguments are those of :func:`~newton_summary.derivatives.sweep.engine.summarize_sweep`.
    """
    loss = evaluate(closure, params)
    contract = Contraction(params, u, partition)
    S = len(partition)
    gbar = contract(loss, last=order == 1)
    summary = Summary(gbar.detach(), loss=loss.detach(), partition=partition, backend="nested")
    if order == 1:
        return summary
    # Hbar is symmetric: row s needs the groups from s on.
    Hbar = torch.zeros(S, S, dtype=gbar.dtype, device=gbar.device)
    D3 = torch.zeros_like(gbar)
    for s in range(S):
        row = contract(gbar[s], slice(s, None), last=order == 2)
        Hbar[s, s:] = Hbar[s:, s] = row[s:].detach()
        if order == 3:  # only D^(3)_sss enters the cubic term: the other S^3 - S are skipped
            D3[s] = contract(row[s], slice(s, s + 1), last=True)[s]
    summary = replace(summary, Hbar=Hbar, D3=D3 if order == 3 else None)
    if contract.opaque:
        compare_with_differences(summary, closure, params, u, contract.opaque)
    return summary


def nested_tensor(closure: Closure, contract: Contraction, order: int) -> Tensor:
    """Return D^(order)(u), shape (S,) * order, each entry computed once.

    The tensor is symmetric: only entries with s1 <= s2 <= ... are computed, and then copied. One
    backward pass gives a row of them, so there are :func:`count_backward_passes` of these.
    """
    S = len(contract.partition)
    loss = evaluate(closure, contract.params)
    _check_opaque_functions(loss, closure, contract, order)
    rows: dict[tuple[int, ...], Tensor] = {(): loss}
    for d in range(1, order + 1):
        longer: dict[tuple[int, ...], Tensor] = {}
        for index, entry in rows.items():
            first = index[-1] if index else 0
            row = contract(entry, slice(first, None), last=d == order)
            longer.update({(*index, s): row[s] for s in range(first, S)})
        rows = longer
    sample = next(iter(rows.values()))
    tensor = torch.zeros((S,) * order, dtype=sample.dtype, device=sample.device)
    for index, entry in rows.items():
        for mirrored in set(permutations(index)):
            tensor[mirrored] = entry.detach()
    return tensor


def _check_opaque_functions(
    loss: Tensor, closure: Closure, contract: Contraction, order: int
) -> None:
    """Raise if derivatives up to the third are wrong, where there is reason to doubt them."""
    if order > 1 and opaque_functions(loss):
        summarize_nested(closure, contract.params, contract.u, contract.partition, min(order, 3))


def count_backward_passes(S: int, order: int) -> int:
    """Return how many backward passes :func:`nested_tensor` makes.

    One for each entry with ordered indices of the tensors of order 0 to order - 1: of the order of
    S^(order - 1) / (order - 1)!, where Table 1 of the paper has S^(order - 1).

    >>> count_backward_passes(S=10, order=2), count_backward_passes(S=10, order=3)
    (11, 66)
    """
    return sum(comb(S + d - 1, d) for d in range(order))


def nested_taylor_terms(closure: Closure, contract: Contraction, order: int) -> Tensor:
    """Return the derivatives 1..order of t -> L(theta + t u) with one backward pass for each.

    The contraction must have a partition into one group.
    """
    term = evaluate(closure, contract.params)
    _check_opaque_functions(term, closure, contract, order)
    terms: list[Tensor] = []
    for d in range(1, order + 1):
        (term,) = contract(term, last=d == order)
        terms.append(term.detach())
    return torch.stack(terms)
