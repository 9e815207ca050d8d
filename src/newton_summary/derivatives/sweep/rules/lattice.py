"""The lattice of connectionist temporal classification as one operation.

alpha_t[l] is the logarithm of the probability of all beginnings of paths that are at l in step t:

    alpha_t[l] = logsumexp_j(alpha_t-1[l - j], j = 0, 1, 2) + emitted_t[l]

With p_j the softmax of the three ways to get there, and c = x - <x> under p,

    alpha1 = <x1> + emitted1         alpha2 = <x2> + <c1^2> + emitted2

and its contributions are the cumulants of logsumexp, added up over all steps at once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import handle_torch_function

from newton_summary.derivatives.sweep.tape import Op, Sweep, Tangent, Value, dots, gram

NEVER = -1e30  # the logarithm of 0, such that differences of it are numbers
WAYS = (slice(2, None), slice(1, -1), slice(0, -2))  # from l, l - 1, l - 2, behind two more


def ctc_lattice(emitted: Tensor, blocked: Tensor, steps: Tensor) -> Tensor:
    """Return alpha of each sample after its last step; one operation on the tape.

    Args:
        emitted: Logarithms of probabilities, (T, samples, L).
        blocked: What is added to the way from l - 2: zero, or ``NEVER``; (samples, L).
        steps: How many steps each sample has, (samples,).
    """
    return handle_torch_function(ctc_lattice, (emitted,), emitted, blocked, steps)


class Lattice:
    """What happened in all steps but the first."""

    def __init__(self, emitted: Tensor, blocked: Tensor, steps: Tensor):
        T, B, L = emitted.shape
        self.begins = torch.arange(L, device=emitted.device) < 2
        self.live = (torch.arange(1, T, device=emitted.device)[:, None] < steps)[..., None]
        ways = emitted.new_empty((T - 1, 3, B, L))
        padded = emitted.new_full((B, L + 2), NEVER)
        padded[:, 2:] = torch.where(self.begins, emitted[0], NEVER).clamp_min_(NEVER)
        ended = bool((steps < T).any())
        for t in range(T - 1):
            for way, here in zip(ways[t], WAYS, strict=True):
                way.copy_(padded[:, here])
            ways[t, 2] += blocked
            after = torch.logsumexp(ways[t], 0).add_(emitted[t + 1]).clamp_min_(NEVER)
            padded[:, 2:] = torch.where(self.live[t], after, padded[:, 2:]) if ended else after
        self.alpha = padded[:, 2:].clone()
        stays = emitted.new_tensor([1.0, 0, 0])[:, None, None]
        self.p = torch.where(self.live[:, None], ways.softmax(1), stays)  # (T - 1, 3, B, L)

    def back(self, delta: Tensor) -> Tensor:
        """Return the adjoints of alpha in all steps, (T, B, L), given that of the last."""
        T, _, B, L = self.p.shape
        adjoints = delta.new_zeros((T + 1, B, L + 2))  # behind two that nothing is made of
        adjoints[T, :, 2:] = delta
        for t in reversed(range(T)):
            for p, here in zip(self.p[t], WAYS, strict=True):
                adjoints[t, :, here].addcmul_(adjoints[t + 1, :, 2:], p)
            adjoints[t, :, :2] = 0
        return adjoints[..., 2:]

    def of_emitted(self, rows: Tensor) -> Tensor:
        """Return what counts of derivatives or adjoints (..., T, B, L) of what is emitted."""
        first = rows[..., :1, :, :] * self.begins
        return torch.cat([first, rows[..., 1:, :, :] * self.live], -3)


class _Lattice(torch.autograd.Function):
    """The lattice for autograd."""

    @staticmethod
    def forward(ctx: Any, lattice: Lattice, emitted: Tensor) -> Tensor:
        ctx.lattice = lattice
        return lattice.alpha.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, delta: Tensor) -> Any:
        return None, ctx.lattice.of_emitted(ctx.lattice.back(delta))


def prepare(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Lattice]:
    """Run the lattice so that its rule gets what happened in its steps."""
    with torch.no_grad():
        lattice = Lattice(*args)
    return _Lattice.apply(lattice, args[0]), lattice  # type: ignore[no-untyped-call]


def pass_lattice(sweep: Sweep, op: Op, emitted: Value, blocked: Value, steps: Value) -> Tangent:
    """Pass all steps."""
    t = sweep.known(emitted)
    lattice: Lattice = op.saved
    k, third = len(t.first), sweep.order == 3
    e = lattice.of_emitted((t.completed() if third else t).rows)
    T, _, B, L = lattice.p.shape
    alpha = e.new_zeros((len(e), T + 1, B, L + 2))  # behind two that nothing comes from
    means = e.new_empty((len(e), T, B, L))
    alpha[:, 0, :, 2:] = e[:, 0]
    for step in range(T):
        before, mean = alpha[:, step], means[:, step]
        after = alpha[:, step + 1, :, 2:]
        torch.mul(before[..., WAYS[0]], lattice.p[step, 0], out=mean)
        for p, here in zip(lattice.p[step, 1:], WAYS[1:], strict=True):
            mean.addcmul_(before[..., here], p)
        torch.add(mean, e[:, step + 1], out=after)
        for p, here in zip(lattice.p[step], WAYS, strict=True) if third else ():
            gap = before[:k, :, here] - mean[:k]
            after[k:].addcmul_(gap.square_(), p)
    delta = sweep.adjoint(op.out)
    if delta is not None:
        adjoints = lattice.back(delta)[1:]
        for j, here in enumerate(WAYS):
            x = alpha[:, :-1, :, here]
            gap = x[:k] - means[:k]
            work = gap * (adjoints * lattice.p[:, j])
            sweep.add_Hbar(t.first, t.first, gram(work, gap))
            if third:
                sweep.add_D3(t.first, dots(work, gap.square_().add_(x[k:], alpha=3)))
    return Tangent(t.first, t.first if third else (), alpha[:, -1, :, 2:])


LATTICE = {"ctc_lattice": pass_lattice}
PREPARE_LATTICE = {"ctc_lattice": prepare}
