"""NewtonSummary with its defaults against Adam at its best of five learning rates.

    python benchmarks/defaults.py --out results              # on the GPU if there is one
    python benchmarks/defaults.py --models mlp --seeds 1 --epochs 2 --device cpu

Trains the paper's MLP and LeNet on the 5,000 MNIST images inside the package, batches of 100, 20
epochs, constant learning rates, curvature on 1,000 random images. Compares the loss of the whole
training set at the end. Writes a JSON file and prints a table in Markdown.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from datetime import date
from pathlib import Path
from typing import Any

import torch
from losses import classification_loss
from torch import Tensor

import newton_summary as ns
from newton_summary.data import load_mnist_subset
from newton_summary.experiments import models


def small_mlp() -> torch.nn.Module:
    """1024-200-100-10 with tanh, for digits padded to 32 x 32; the paper's MLP has a layer more."""
    return models.perceptron([1024, 200, 100, 10], torch.nn.Tanh, models.TANH_GAIN)


MODELS = {"mlp": small_mlp, "lenet": lambda: models.lenet(1)}
ADAM_RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)


class RandomBatches:
    """Batches of 1,000 images without end, for the curvature."""

    def __init__(self, images: Tensor, labels: Tensor, seed: int):
        self.images, self.labels = images, labels
        self.generator = torch.Generator().manual_seed(seed)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            chosen = torch.randperm(len(self.images), generator=self.generator)[:1000]
            chosen = chosen.to(self.images.device)
            yield self.images[chosen], self.labels[chosen]


def train(task: dict[str, Any]) -> dict[str, Any]:
    """Train once, and return the task with the losses after every epoch and the time."""
    torch.set_num_threads(1)
    device = task["device"]
    images, labels = (t.to(device) for t in load_mnist_subset("train"))
    test_images, test_labels = (t.to(device) for t in load_mnist_subset("test"))
    torch.manual_seed(task["seed"])
    model = MODELS[task["model"]]().to(device)
    loss_fn = classification_loss
    if task["optimizer"] == "adam":
        optimizer: Any = torch.optim.Adam(model.parameters(), lr=task["lr"])
    else:
        curvature = RandomBatches(images, labels, task["seed"] + 1000)
        options = {} if task["lr"] is None else {"lr": task["lr"]}
        optimizer = ns.NewtonSummary(
            ns.make_partition(model), curvature=(loss_fn, curvature), **options
        )
    order = torch.Generator().manual_seed(task["seed"])
    losses: list[float] = []
    start = time.perf_counter()
    for _ in range(task["epochs"]):
        for chosen in torch.randperm(len(images), generator=order).to(device).split(100):
            optimizer.zero_grad()
            loss_fn(model, (images[chosen], labels[chosen])).backward()
            optimizer.step()
        with torch.no_grad():
            losses.append(float(loss_fn(model, (images, labels))))
    seconds = time.perf_counter() - start
    with torch.no_grad():
        accuracy = float((model(test_images).argmax(1) == test_labels).float().mean())
    return {**task, "losses": losses, "seconds": seconds, "test_accuracy": accuracy}


def table(results: list[dict[str, Any]]) -> str:
    """Return the comparison in Markdown: one row for each model and seed."""
    lines = [
        "| model | seed | Adam, best of five | at rate | NewtonSummary | ratio | test accuracy "
        "| time |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for lr in sorted({r["lr"] or 0 for r in results if r["optimizer"] != "adam"}):
        for key in sorted({(r["model"], r["seed"]) for r in results}):
            some = [r for r in results if (r["model"], r["seed"]) == key]
            adam = min((r for r in some if r["optimizer"] == "adam"), key=lambda r: r["losses"][-1])
            for ours in (r for r in some if r["optimizer"] != "adam" and (r["lr"] or 0) == lr):
                ratio = ours["losses"][-1] / adam["losses"][-1]
                name = ours["model"] + (f", lr {lr:g}" if lr else "")
                lines.append(
                    f"| {name} | {key[1]} | {adam['losses'][-1]:.1e} | {adam['lr']:g} "
                    f"| {ours['losses'][-1]:.1e} | {ratio:.2f} "
                    f"| {adam['test_accuracy']:.3f} / {ours['test_accuracy']:.3f} "
                    f"| {adam['seconds']:.1f} s / {ours['seconds']:.1f} s |"
                )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--lr", nargs="*", type=float, help="rates other than the default")
    parser.add_argument("--workers", type=int, default=3, help="runs at the same time")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("benchmark-results"))
    args = parser.parse_args()
    tasks = [
        {
            "model": m,
            "seed": s,
            "optimizer": o,
            "lr": lr,
            "epochs": args.epochs,
            "device": args.device,
        }
        for m in args.models
        for s in range(args.seeds)
        for o, lr in [
            *(("newton_summary", lr) for lr in (args.lr or [None])),
            *(("adam", lr) for lr in ADAM_RATES),
        ]
    ]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.workers, mp_context=context) as pool:
        results = list(pool.map(train, tasks))
    args.out.mkdir(parents=True, exist_ok=True)
    environment = {
        "date": date.today().isoformat(),
        "command": " ".join(["python", *sys.argv]),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if args.device == "cuda" else platform.processor(),
        "workers": args.workers,
        "version": ns.__version__,
    }
    path = args.out / "defaults.json"
    path.write_text(json.dumps({"environment": environment, "results": results}, indent=1))
    print(table(results))
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
