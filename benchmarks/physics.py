"""Steer the training of a physics-informed network, a kind that the suite does not have.

    OMP_NUM_THREADS=1 python benchmarks/physics.py

Poisson's equation u'' = -(2 pi)^2 sin(2 pi x) on [0, 1] with u = 0 at the ends. Prints the mean
square of the residual on 256 new points after 400 steps, seeds 0 to 4, at a constant rate and with
a linear decay.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import newton_summary as ns

STEPS = 400


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    x = x.requires_grad_(True)
    u = model(x) * x * (1 - x)
    (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(slope.sum(), x, create_graph=True)
    return (second + (2 * math.pi) ** 2 * torch.sin(2 * math.pi * x)).square().mean()


def points(count: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(64, 1, generator=generator) for _ in range(count)]


def adam(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=lr)


METHODS: dict[str, Callable[[nn.Module], Any]] = {
    "Adam 3e-3": lambda model: adam(model, 3e-3),
    "Adam 1e-2": lambda model: adam(model, 1e-2),
    "Adam 3e-2": lambda model: adam(model, 3e-2),
    "RateController": lambda model: ns.RateController(adam(model, 1e-3), model, loss_fn),
    "NewtonSummary": lambda model: ns.NewtonSummary(model, loss_fn),
}


def train(method: str, seed: int, decays: bool) -> float:
    """Return the loss of new points at the end."""
    torch.manual_seed(seed)
    hidden = nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh()
    model = nn.Sequential(*hidden, nn.Linear(32, 1))
    stepper = METHODS[method](model)
    optimizer = getattr(stepper, "optimizer", stepper)
    schedule = LambdaLR(optimizer, lambda t: 1 - t / STEPS if decays else 1.0)
    for x in points(STEPS, seed=0):
        model.zero_grad()
        loss_fn(model, x).backward()
        if method.startswith("Adam"):
            optimizer.step()
        else:
            stepper.step(x)
        schedule.step()
    if method == "NewtonSummary":
        stepper.eval()  # the mean of the last steps
    return sum(loss_fn(model, x).item() for x in points(4, seed=99)) / 4


if __name__ == "__main__":
    for decays in (False, True):
        for method in METHODS:
            losses = [f"{train(method, seed, decays):.2g}" for seed in range(5)]
            print("linear decay" if decays else "constant", method, *losses, flush=True)
