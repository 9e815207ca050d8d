"""Attention by kernels, on a GPU that Triton supports; the formulas are in ``triton_kernels``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from newton_summary.derivatives.sweep.kernels import kernels
from newton_summary.derivatives.sweep.rules import fused
from newton_summary.derivatives.sweep.rules.linear import without_mean
from newton_summary.derivatives.sweep.tape import dots, gram, parts_of

if TYPE_CHECKING:
    from newton_summary.derivatives.sweep.rules.attention_tiles import Attention, Stack

AT_A_TIME = 2**28  # bytes of the gradient's derivatives
LARGEST_HEAD = {torch.float32: 64, torch.bfloat16: 128}  # larger ones spill registers
SHARED_MEMORY = 200 * 2**10  # bytes; data centre GPUs have them from Hopper on


def usable(a: Attention) -> bool:
    """Whether the kernels support an attention."""
    d = a.q.shape[-1]
    fits = d == a.v.shape[-1] and d <= LARGEST_HEAD.get(a.q.dtype, 0)
    if not fits or a.delta is None or a.out is None or not fused.available(a.q):
        return False
    device = torch.cuda.get_device_properties(a.q.device)
    return getattr(device, "shared_memory_per_multiprocessor", 0) >= SHARED_MEMORY


def run(a: Attention) -> None:
    """Pass all of an attention, some samples and heads at a time."""
    heads = a.heads
    one_head = a.S * (heads.shared * heads.L + 2 * heads.T) * a.q.shape[-1] * a.q.itemsize
    room = max(1, AT_A_TIME // one_head)
    for b in parts_of(heads.B, max(1, room // heads.H)):
        for h in parts_of(heads.H, room):
            _pass_some(a, b, h)


def _pass_some(a: Attention, b: slice, h: slice) -> None:
    """Pass some samples and heads. The factor of the scores is in the keys."""
    S = a.S
    assert a.delta is not None and a.out is not None
    q, delta, out = (x[:, b, h].flatten(2, 3) for x in (a.q, a.delta, a.out))
    mask = None if a.mask is None else a.mask[:, b, h].flatten(2, 3)[0]
    k, v = a.k[:, b, h], a.v[:, b, h]
    Q, K, V = (
        _rows(a, a.Q, a.q, b, h).flatten(2, 3),
        _rows(a, a.K, a.k, b, h),
        _rows(a, a.V, a.v, b, h),
    )
    # What shifts all keys alike changes no weight: without it, sums of powers of the scores'
    # derivatives lose no digits, and the bias of the keys has no derivatives made of rounding.
    k, K = (without_mean(x, -2).mul_(a.factor).to(x.dtype) for x in (k, K))
    found = kernels()
    assert found is not None
    parts, f3 = found.pass_attention(q[0], k[0], v[0], delta[0], mask, Q, K, V, out, S, a.causal)
    for g, rows in zip(parts, (Q, K, V), strict=True):
        rows = rows.transpose(2, 3)  # as they lie in memory
        a.Hbar += gram(g, rows[:S])
        if a.order == 3:
            a.D3 += 3 * dots(g, rows[S:])
    if f3 is not None:
        a.D3 += f3


def _rows(a: Attention, stack: Stack | None, x: Tensor, b: slice, h: slice) -> Tensor:
    """Return the derivatives of x, S rows of each order, for some samples and heads."""
    n = a.S * (a.order - 1)
    if stack is None:
        return x[:, b, h].new_zeros(()).expand(n, *x[0, b, h].shape)
    rows = stack.some(b, h)
    missing = n - len(rows)
    return torch.cat([rows, rows.new_zeros((missing, *rows.shape[1:]))]) if missing else rows
