"""RateController on small networks with small batches: how often a training is lost.

    OMP_NUM_THREADS=1 python benchmarks/small_steered.py

Made-up data, 400 samples, 600 steps, six seeds; the loss of all samples at the end, beside that of
the same optimizer at the rate it starts with. What is lost is dead (the loss of a constant) or NaN.
"""

from __future__ import annotations

import torch
from losses import classification_loss
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

import newton_summary as ns

SAMPLES, STEPS, SEEDS = 400, 600, 6
OPTIMIZERS = {
    "SGD": lambda model: SGD(model.parameters(), lr=0.1),
    "SGD, momentum 0.9": lambda model: SGD(model.parameters(), lr=0.01, momentum=0.9),
    "Adam": lambda model: Adam(model.parameters(), lr=1e-3),
}
NETWORKS = {
    "tanh": lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)),
    "ReLU": lambda: nn.Sequential(
        *(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3))
    ),
    "ReLU, squared error": lambda: nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1)),
}


def squared_error(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def train(network: str, optimizer: str, size: int, seed: int, steered: bool) -> float:
    """Return the final loss of all samples."""
    torch.manual_seed(seed)
    x = torch.randn(SAMPLES, 6)
    squared = "squared" in network
    y = x[:, :1] * x[:, 1:2] + x[:, 2:3] if squared else x[:, :3].argmax(1)
    loss_fn = squared_error if squared else classification_loss
    model = NETWORKS[network]()
    inner: Optimizer = OPTIMIZERS[optimizer](model)
    controller = ns.RateController(inner, model, loss_fn) if steered else None
    for _ in range(STEPS):
        chosen = torch.randint(SAMPLES, (size,))
        batch = (x[chosen], y[chosen])
        inner.zero_grad()
        loss_fn(model, batch).backward()
        controller.step(batch) if controller is not None else inner.step()
    return float(loss_fn(model, (x, y)).detach())


def main() -> None:
    for network in NETWORKS:
        for optimizer in OPTIMIZERS:
            for size in (12, 64):
                for steered in (False, True):
                    losses = [train(network, optimizer, size, s, steered) for s in range(SEEDS)]
                    said = " ".join(f"{loss:.2g}" for loss in losses)
                    how = "steered" if steered else "as given"
                    print(
                        f"{network:20} {optimizer:18} batches of {size}, {how:9} {said}", flush=True
                    )


if __name__ == "__main__":
    main()
