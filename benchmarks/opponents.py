"""What other packages do for the same numbers, where they are installed.

``curvlinops-for-pytorch`` and ``hessian-eigenthings`` multiply the Hessian with vectors, one for
each group (order 2); ``jet-for-pytorch`` takes the third derivative along one direction only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel


class Loss(nn.Module):
    """For curvlinops: a model whose output is the loss."""

    def __init__(self, loss_fn: Callable[..., Tensor], model: nn.Module, batch: Any):
        super().__init__()
        self.loss_fn, self.model, self.batch = loss_fn, model, batch

    def forward(self, _: Tensor) -> Tensor:
        """Return the loss, whatever is given."""
        return self.loss_fn(self.model, self.batch)


class Unchanged(nn.Module):
    """For curvlinops: a loss function that is given the loss."""

    reduction = "mean"

    def forward(self, loss: Tensor, _: Tensor) -> Tensor:
        """Return it."""
        return loss


def curvlinops(
    loss_fn: Callable[..., Tensor], model: nn.Module, batch: Any, u: Any, part: Any
) -> Tensor:
    """Hbar by curvlinops' Hessian operator, some groups at a time."""
    from curvlinops import HessianLinearOperator

    params = dict(part.params)
    operator = HessianLinearOperator(
        Loss(loss_fn, model, batch),
        Unchanged(),
        list(params.values()),
        [(next(model.parameters()).new_zeros(1),) * 2],
        check_deterministic=False,
    )
    rows = []
    with sdpa_kernel(SDPBackend.MATH):
        for start in range(0, len(part), 4):
            some = range(start, min(start + 4, len(part)))
            columns = [part.restrict(u, s) for s in some]
            zeros = {n: torch.zeros_like(p) for n, p in params.items()}
            products = operator @ [
                torch.stack([c.get(n, zeros[n]) for c in columns], -1) for n in params
            ]
            for i in range(len(some)):
                product = {n: x[..., i] for n, x in zip(params, products, strict=True)}
                rows.append(part.inner(product, u))
    return torch.stack(rows)


def eigenthings(
    loss_fn: Callable[..., Tensor], model: nn.Module, batch: Any, u: Any, part: Any
) -> Tensor:
    """Hbar by hessian-eigenthings' Hessian operator, group by group."""
    from hessian_eigenthings import HessianOperator

    params = dict(part.params)
    operator = HessianOperator(model, [batch], loss_fn)
    rows = []
    with sdpa_kernel(SDPBackend.MATH):
        for s in range(len(part)):
            mine = part.restrict(u, s)
            flat = [mine.get(n, torch.zeros_like(p)).flatten() for n, p in params.items()]
            pieces = operator.matvec(torch.cat(flat)).split([p.numel() for p in params.values()])
            product = {n: x.view_as(p) for (n, p), x in zip(params.items(), pieces, strict=True)}
            rows.append(part.inner(product, u))
    return torch.stack(rows)


def jet(loss_fn: Callable[..., Tensor], model: nn.Module, batch: Any, u: Any, part: Any) -> Tensor:
    """The first three derivatives along u of all parameters together, by jet-for-pytorch."""
    from jet import jet as overload

    names = list(part.params)
    start = tuple(part.params[n].detach() for n in names)

    class Bound(nn.Module):
        def __init__(self, values: dict[str, Tensor]):
            super().__init__()
            self.values = values

        def forward(self, *inputs: Any) -> Any:
            return torch.func.functional_call(model, self.values, inputs)

    def loss(*values: Tensor) -> Tensor:
        return loss_fn(Bound(dict(zip(names, values, strict=True))), batch)

    with sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        zeros = [torch.zeros_like(p) for p in start]
        arguments = [(p, u[n], z, z) for n, p, z in zip(names, start, zeros, strict=True)]
        return torch.stack(overload(loss, start)(*arguments)[1:])


OPPONENTS = {"curvlinops": curvlinops, "eigenthings": eigenthings, "jet": jet}
