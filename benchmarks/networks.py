"""NewtonSummary from its defaults on several small networks, against Adam at 1e-3.

    OMP_NUM_THREADS=1 python benchmarks/networks.py --seeds 2
    OMP_NUM_THREADS=1 python benchmarks/networks.py --networks LSTM --lr 2 0.1  # falls linearly

The 5,000 MNIST images inside the package, batches of 100, curvature on 1,000 random images, 12
epochs, constant rates, unless ``--lr`` is given for ours. "torch" are weights as torch draws them,
"paper" from N(0, gain^2 / fan_in). Prints the loss of the whole training set (in evaluation mode)
and the test accuracy.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import newton_summary as ns
from newton_summary.data import load_mnist_subset
from newton_summary.experiments import models

TRAIN, TEST = load_mnist_subset("train"), load_mnist_subset("test")
BATCH = 100


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    images, labels = batch
    return nn.functional.cross_entropy(model(images), labels)


def dense(activation: type[nn.Module]) -> nn.Module:
    hidden = nn.Linear(1024, 200), activation(), nn.Linear(200, 100), activation()
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(100, 10))


def relu_lenet() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 6, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)),
    )


def batch_norm() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 5, stride=2), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.Conv2d(8, 16, 5, stride=2), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(400, 10)),
    )


class Rows(nn.Module):
    """An LSTM that reads an image row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.LSTM(32, 48, batch_first=True)
        self.head = nn.Linear(48, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.rows(images[:, 0])[0][:, -1])


class Patches(nn.Module):
    """A transformer of two blocks over the sixteen patches of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(64, 64)
        self.place = nn.Parameter(0.02 * torch.randn(16, 64))
        layer = nn.TransformerEncoderLayer(64, 4, 128, 0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, nn.LayerNorm(64), enable_nested_tensor=False)
        self.head = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        patches = images.unfold(2, 8, 8).unfold(3, 8, 8).reshape(len(images), 16, 64)
        return self.head(self.blocks(self.embed(patches) + self.place).mean(1))


NETWORKS = {
    "MLP, tanh, torch": lambda: dense(nn.Tanh),
    "MLP, tanh, paper": lambda: models.perceptron([1024, 200, 100, 10], nn.Tanh, 1.0),
    "MLP, ReLU, torch": lambda: dense(nn.ReLU),
    "10 x 128, ELU, paper": lambda: models.big_mlp(features=1024, width=128, depth=10),
    "LeNet, tanh, paper": lambda: models.lenet(1),
    "LeNet, ReLU, torch": relu_lenet,
    "two convolutions with batch norm, torch": batch_norm,
    "LSTM over rows, torch": Rows,
    "transformer over patches, torch": Patches,
}


class RandomBatches:
    """Batches of 1,000 images without end, for the curvature."""

    def __init__(self, seed: int):
        self.generator = torch.Generator().manual_seed(seed)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            chosen = torch.randperm(len(TRAIN[0]), generator=self.generator)[:1000]
            yield TRAIN[0][chosen], TRAIN[1][chosen]


def train(
    network: str, ours: bool, seed: int, epochs: int, lr: Sequence[float] = ()
) -> tuple[float, float, float]:
    """Return the training loss at the end, the test accuracy and the seconds.

    ``lr`` of NewtonSummary is the default if it is empty; it falls from the first to the last.
    """
    torch.manual_seed(seed)
    model = NETWORKS[network]()
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=1e-3)
    if ours:
        curvature = (loss_fn, RandomBatches(seed))
        options = {"lr": lr[0]} if lr else {}
        optimizer = ns.NewtonSummary(ns.make_partition(model), curvature=curvature, **options)
    end = lr[-1] / lr[0] if ours and lr else 1.0
    steps = epochs * -(-len(TRAIN[0]) // BATCH)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, end, total_iters=steps)
    order = torch.Generator().manual_seed(seed)
    start = time.perf_counter()
    for _ in range(epochs):
        for chosen in torch.randperm(len(TRAIN[0]), generator=order).split(BATCH):
            optimizer.zero_grad()
            loss_fn(model, (TRAIN[0][chosen], TRAIN[1][chosen])).backward()
            optimizer.step()
            schedule.step()
    seconds = time.perf_counter() - start
    return *scores(model), seconds


def scores(model: nn.Module) -> tuple[float, float]:
    """Return the loss of the whole training set and the test accuracy."""
    model.eval()
    with torch.no_grad():
        accuracy = float((model(TEST[0]).argmax(1) == TEST[1]).float().mean())
        return float(loss_fn(model, TRAIN)), accuracy


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--networks", nargs="*", default=[""], help="parts of their names")
    parser.add_argument("--lr", nargs="*", type=float, default=[], help="ours: start, and end")
    args = parser.parse_args()
    print("| network | seed | Adam, 1e-3 | NewtonSummary | ratio | test accuracy | time |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for network in (n for n in NETWORKS if any(part in n for part in args.networks)):
        for seed in range(args.seeds):
            adam, ours = (train(network, x, seed, args.epochs, args.lr) for x in (False, True))
            print(
                f"| {network} | {seed} | {adam[0]:.1e} | {ours[0]:.1e} | {ours[0] / adam[0]:.2f} "
                f"| {adam[1]:.3f} / {ours[1]:.3f} | {adam[2]:.0f} s / {ours[2]:.0f} s |",
                flush=True,
            )


if __name__ == "__main__":
    main()
