"""What an epoch costs with NewtonSummary, over one with Adam: refreshes, steps and gradients.

    python benchmarks/epoch_cost.py --device cuda --out benchmarks/results/epoch-cost-h200.json
    python benchmarks/epoch_cost.py --device cuda --parts epochs --data DATA

The fourteen trainings of optimizers.py with ``NewtonSummary(model, loss_fn)`` against Adam as torch
makes it, and the paper's four setups with ``NewtonSummary.paper``, a group for each tensor and
batches of 100, against that and against torch's fused Adam, which the recipes use. Each candidate
has a model of its own; rounds of 60 steps go by turns, so that a change in the load meets all of
them, and the median round counts. The first steps, when refreshes are closer together, are left
out. Only the shapes of the data matter: without the files of CIFAR-10, and for the paper's setups,
other numbers take their place. With ``--parts epochs``, whole epochs of the paper's recipes go by
turns, on their own data.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import date
from pathlib import Path

import torch
from losses import classification_loss
from optimizer_trainings import TRAININGS
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

import newton_summary as ns
from newton_summary.experiments.models import big_mlp, lenet, mlp, vgg11
from newton_summary.experiments.recipes import RECIPES
from newton_summary.experiments.recipes import SETUPS as RECIPES_OF
from newton_summary.experiments.training import Reporter, Session
from newton_summary.probe.inputs import LossFn

STEPS = 60  # of a round: four refreshes of the suite's, six of the paper's
WARM_UP = 90  # steps
Batch = tuple[Tensor, Tensor]
Step = Callable[[], None]
Times = dict[str, dict[str, float]]  # ms a step, by network and optimizer
SETUPS = {  # the network, its images, and whether products are rounded to TF32
    "MLP / MNIST": (mlp, (784,), False),
    "LeNet / CIFAR-10": (lenet, (3, 32, 32), False),
    "BigMLP / CIFAR-10": (big_mlp, (3, 32, 32), False),
    "VGG-11' / CIFAR-10": (vgg11, (3, 32, 32), True),
}


def training_step(
    model: nn.Module,
    loss_fn: LossFn,
    optimizer: Optimizer,
    batches: list[Batch],
    needs_batch: bool = False,
) -> Step:
    """Return a function that makes one step, on one batch after the other; warm."""
    count = 0

    def step() -> None:
        nonlocal count
        batch = batches[count % len(batches)]
        count += 1
        optimizer.zero_grad()
        loss_fn(model, batch).backward()
        optimizer.step(batch) if needs_batch else optimizer.step()  # type: ignore[arg-type]

    for _ in range(WARM_UP):
        step()
    return step


def by_turns(steps: dict[str, Step], rounds: int, device: str) -> dict[str, float]:
    """Return the time of a step of each in milliseconds."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            start = now(device)
            for _ in range(STEPS):
                step()
            times[name].append((now(device) - start) / STEPS * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def of_suite(device: str, folder: Path) -> Iterable[tuple[str, dict[str, Step]]]:
    """Give the trainings of the suite, with a step of each candidate."""
    for name, training in TRAININGS.items():
        (inputs, targets), _ = training.load(folder)
        pairs = zip(inputs.split(training.batch), targets.split(training.batch), strict=True)
        batches = [(x.to(device), y.to(device)) for x, y in list(pairs)[:16]]
        made = {}
        for kind in ("Adam", "NewtonSummary"):
            torch.manual_seed(0)
            model, loss_fn = training.build().to(device), training.loss_fn
            ours = kind == "NewtonSummary"
            optimizer = ns.NewtonSummary(model, loss_fn) if ours else Adam(model.parameters())
            made[kind] = training_step(model, loss_fn, optimizer, batches, needs_batch=ours)
        yield name, made


def of_paper(device: str) -> Iterable[tuple[str, dict[str, Step]]]:
    """Give the paper's setups, with a step of each candidate."""
    for name, (build, shape, tf32) in SETUPS.items():
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
        batches = [
            (torch.randn(100, *shape, device=device), torch.randint(10, (100,), device=device))
            for _ in range(16)
        ]
        made = {}
        for kind in ("Adam", "fused Adam", "NewtonSummary"):
            torch.manual_seed(0)
            model = build().to(device)
            fused = True if kind == "fused Adam" else None
            optimizer: Optimizer = Adam(model.parameters(), lr=1e-5, fused=fused)
            if kind == "NewtonSummary":
                optimizer = ns.NewtonSummary.paper(
                    ns.make_partition(model),
                    lr=1e-4,
                    curvature=(classification_loss, batches),
                    cuda_graph=device == "cuda",
                )
            made[kind] = training_step(model, classification_loss, optimizer, batches)
        yield name, made


def epochs_of_recipes(device: str, data: Path | None, rounds: int) -> Times:
    """Return the time of a step, in milliseconds, over whole epochs of the paper's recipes."""
    found: Times = {}
    for setup, about in RECIPES_OF.items():
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = about.tf32
        sessions = {}
        for kind, way in (("fused Adam", "adam"), ("NewtonSummary", "newton_summary")):
            config = RECIPES[f"{setup}_{way}"]()
            config = replace(config, data=replace(config.data, root=data, download=False))
            sessions[kind] = Session(config, torch.device(device))
        times: dict[str, list[float]] = {kind: [] for kind in sessions}
        for _ in range(1 + rounds):
            for kind, session in sessions.items():
                start = now(device)
                session.train_epoch(Reporter())
                session.epoch += 1
                times[kind].append((now(device) - start) / len(session.batches) * 1e3)
        found[setup] = {kind: statistics.median(some[1:]) for kind, some in times.items()}
        say(setup, found[setup])
    return found


def say(name: str, times: dict[str, float]) -> None:
    ours = times["NewtonSummary"]
    ratios = (f"{kind} {time:.2f} ({ours / time:.2f})" for kind, time in times.items())
    print(f"{name:28}" + ", ".join(ratios), flush=True)


def main() -> None:
    """Measure, print, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--parts", nargs="*", default=["suite", "paper"], choices=("suite", "paper", "epochs")
    )
    parser.add_argument("--data", type=Path, help="folder with the official files, for epochs")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found: dict[str, Times] = {}
    with tempfile.TemporaryDirectory() as folder:
        cases = {"suite": of_suite(args.device, Path(folder)), "paper": of_paper(args.device)}
        for part in args.parts:
            print(f"{part}: ms a step, and NewtonSummary's over each")
            if part == "epochs":
                found[part] = epochs_of_recipes(args.device, args.data, args.rounds)
                continue
            found[part] = {}
            for name, steps in cases[part]:
                found[part][name] = by_turns(steps, args.rounds, args.device)
                say(name, found[part][name])
    if args.out is not None:
        hardware = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
        about = {"date": f"{date.today()}", "hardware": hardware, "torch": torch.__version__}
        args.out.write_text(json.dumps({**about, **found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
