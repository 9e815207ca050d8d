"""A table of operations for the sweep, each in the middle of a tape and at its end.

Every input of an operation is itself a curved function of several groups of parameters, so that
first and second derivatives, own and shared groups all reach the operation's rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """An operation and the shapes of the inputs that it gets, with entries between -1 and 1."""

    make: Callable[[], Callable[..., Any]]  # a function, or a module with parameters of its own
    shapes: tuple[Shape, ...]
    domain: Callable[[Tensor], Tensor]  # from the interval -1 to 1 to where the operation is smooth
    generic: frozenset[str]  # the operations on its tape that have no rule of their own


CASES: dict[str, Case] = {}


def layer(
    name: str,
    make: Callable[[], Callable[..., Any]],
    *shapes: Shape,
    domain: Callable[[Tensor], Tensor] = lambda x: x,
    generic: str = "",
) -> None:
    """List something that is made anew for every test."""
    assert name not in CASES, f"two cases called {name}"
    CASES[name] = Case(make, shapes, domain, frozenset(generic.split()))


def case(name: str, operation: Callable[..., Any], *shapes: Shape, **options: Any) -> None:
    """List a function."""
    layer(name, lambda: operation, *shapes, **options)


class Around(nn.Module):
    """The loss ``<c, sin(gain h(x))> + <c', h(x')>`` around an operation h."""

    def __init__(self, case: Case):
        super().__init__()
        self.operation = case.make()
        self.shapes, self.domain = case.shapes, case.domain
        self.W = nn.Parameter(0.7 * torch.randn(3, 4))
        self.b = nn.Parameter(0.3 * torch.randn(3))
        self.V = nn.ParameterList([0.5 * torch.randn(math.prod(s), 3) for s in case.shapes])
        self.gain = nn.Parameter(torch.tensor(0.7))
        if isinstance(self.operation, nn.Module):
            with torch.no_grad():  # norm layers start from the identity, and biases from zero
                for p in self.operation.parameters():
                    p.add_(0.2 * torch.randn(p.shape))

    def forward(self, batch: Tensor) -> Tensor:
        z = torch.tanh(self.W @ batch + self.b)
        middle = self.apply_to(z)
        end = self.apply_to(torch.sin(z))
        total = torch.zeros((), dtype=batch.dtype)
        for i, (y, last) in enumerate(zip(middle, end, strict=True)):
            c = torch.cos(torch.arange(y.numel(), dtype=batch.dtype) + i + 0.5).reshape(y.shape)
            total = total + (torch.sin(self.gain * y) * c).sum() + (last * c.flip(0)).sum()
        return total

    def apply_to(self, z: Tensor) -> list[Tensor]:
        inputs = [self.domain(torch.tanh(V @ z)).reshape(s) for V, s in zip(self.V, self.shapes)]
        result = self.operation(*inputs)
        results = result if isinstance(result, tuple | list) else [result]
        return [torch.atleast_1d(y) for y in results if y.dtype.is_floating_point]


def positive(x: Tensor) -> Tensor:
    """Between 0.4 and 1.6."""
    return 1 + 0.6 * x


def probability(x: Tensor) -> Tensor:
    """Between 0.1 and 0.9."""
    return 0.5 + 0.4 * x


def wide(x: Tensor) -> Tensor:
    """Between -4 and 4, on both sides of every bend."""
    return 4 * x


def numbers(*shape: int, seed: int = 0) -> Tensor:
    """Fixed numbers that do not depend on the parameters."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def labels(classes: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(classes, shape, generator=generator)


class OnCopy(nn.Module):
    """A module that writes in place, on a copy of what it gets."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x * 1)
