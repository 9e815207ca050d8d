"""Steer the training of a physics-informed network, where that can fail: docs/limits.md.

    OMP_NUM_THREADS=1 python benchmarks/physics.py

Poisson's equation u'' = -(2 pi)^2 sin(2 pi x) on [0, 1] with u = 0 at the ends; prints the mean
square of the residual on 256 new points after 400 steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import newton_summary as ns


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    x = x.requires_grad_(True)
    u = model(x) * x * (1 - x)
    (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(slope.sum(), x, create_graph=True)
    return (second + (2 * math.pi) ** 2 * torch.sin(2 * math.pi * x)).square().mean()


def points(count: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(64, 1, generator=generator) for _ in range(count)]


def train(seed: int, make: Callable[[nn.Module], Callable[[Tensor], Any]]) -> float:
    """Return the loss of new points at the end."""
    torch.manual_seed(seed)
    hidden = nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh()
    model = nn.Sequential(*hidden, nn.Linear(32, 1))
    step = make(model)
    for x in points(400, seed=0):
        model.zero_grad()
        loss_fn(model, x).backward()
        step(x)
    owner = getattr(step, "__self__", None)
    if isinstance(owner, ns.NewtonSummary):
        owner.eval()  # the mean of the last steps
    return sum(loss_fn(model, x).item() for x in points(4, seed=99)) / 4


def adam(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=lr)


def plain(lr: float) -> Callable[[nn.Module], Callable[[Tensor], Any]]:
    def make(model: nn.Module) -> Callable[[Tensor], Any]:
        optimizer = adam(model, lr)
        return lambda x: optimizer.step()

    return make


METHODS = {
    "Adam 3e-3": plain(3e-3),
    "Adam 1e-2": plain(1e-2),
    "Adam 3e-2": plain(3e-2),
    "RateController": lambda model: ns.RateController(adam(model, 1e-3), model, loss_fn).step,
    "NewtonSummary": lambda model: ns.NewtonSummary(model, loss_fn).step,
}

if __name__ == "__main__":
    for name, make in METHODS.items():
        print(name, *(f"{train(seed, make):.2g}" for seed in range(4)), flush=True)
