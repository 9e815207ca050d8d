"""NewtonSummary with its defaults where weights are drawn as torch draws them.

    python benchmarks/initialisation.py --seeds 6

``benchmarks/defaults.py`` draws weights from N(0, 1/fan_in), as the paper does. torch's own layers
draw them from a uniform distribution of a third of that variance. Here the same MLP starts from
these, in the loop of the README, against Adam at 1e-3: batches of 100, curvature on 1,000 images,
20 epochs. Prints the loss of the whole training set at the end, as a table in Markdown.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from networks import TRAIN, dense, loss_fn, scores
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import newton_summary as ns


def train(kind: str, seed: int, epochs: int) -> tuple[float, float, float]:
    """Return the training loss at the end, the test accuracy and the seconds."""
    torch.manual_seed(seed)
    model = dense(nn.Tanh)
    dataset = TensorDataset(*TRAIN)
    if kind == "adam":
        optimizer: Any = torch.optim.Adam(model.parameters(), lr=1e-3)
    else:
        curvature = DataLoader(dataset, batch_size=1000, shuffle=True)
        optimizer = ns.NewtonSummary(ns.make_partition(model), curvature=(loss_fn, curvature))
    start = time.perf_counter()
    for _ in range(epochs):
        for batch in DataLoader(dataset, batch_size=100, shuffle=True):
            optimizer.zero_grad()
            loss_fn(model, batch).backward()
            optimizer.step()
    seconds = time.perf_counter() - start
    return *scores(model), seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=20)
    args = parser.parse_args()
    print("| seed | Adam, 1e-3 | NewtonSummary | ratio | test accuracy | time |")
    print("|---|---|---|---|---|---|", flush=True)
    for seed in range(args.seeds):
        adam, ours = (train(kind, seed, args.epochs) for kind in ("adam", "newton_summary"))
        print(
            f"| {seed} | {adam[0]:.1e} | {ours[0]:.1e} | {ours[0] / adam[0]:.2f} "
            f"| {adam[1]:.3f} / {ours[1]:.3f} | {adam[2]:.1f} s / {ours[2]:.1f} s |",
            flush=True,
        )


if __name__ == "__main__":
    main()
