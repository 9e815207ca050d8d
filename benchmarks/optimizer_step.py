"""Cost of a step of NewtonSummary between refreshes, against Adam.

    OMP_NUM_THREADS=1 python benchmarks/optimizer_step.py --out benchmarks/optimizer_step.json

LeNet as in the paper (10 tensors, 62,006 parameters). Only ``optimizer.step()`` is timed: gradients
are there already. Rounds of all candidates alternate, so that a change in the machine's load meets
all of them; of each candidate the median round counts. The second table adds forward and backward.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import newton_summary as ns


def lenet() -> nn.Module:
    """Return LeNet-5 for 32 x 32 colour images."""
    return nn.Sequential(
        *(nn.Conv2d(3, 6, 5), nn.Tanh(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 16, 5), nn.Tanh(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(400, 120), nn.Tanh(), nn.Linear(120, 84), nn.Tanh(), nn.Linear(84, 10)),
    )


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean cross-entropy of a batch."""
    return F.cross_entropy(model(batch[0]), batch[1])


def candidates(device: str) -> dict[str, tuple[nn.Module, torch.optim.Optimizer]]:
    """Return optimizers by name, each with a model of its own and past its first refresh."""
    batch = (torch.randn(100, 3, 32, 32, device=device), torch.randint(10, (100,), device=device))
    made = {}
    for name in ("Adam", "Adam, fused", "NewtonSummary", "NewtonSummary.paper"):
        torch.manual_seed(0)
        model = lenet().to(device)
        optimizer: torch.optim.Optimizer
        if name.startswith("Adam"):
            fused = True if "fused" in name else None
            optimizer = torch.optim.Adam(model.parameters(), lr=1e-6, fused=fused)
        elif name == "NewtonSummary":
            optimizer = ns.NewtonSummary(model, loss_fn)
            loss_fn(model, batch).backward()
            optimizer.step(batch)
            optimizer._steered._due = 10**9  # no more refreshes
        else:
            part, curvature = ns.make_partition(model), (loss_fn, [batch])
            optimizer = ns.NewtonSummary.paper(
                part, lr=1e-6, summary_period=10**9, warmup=0, curvature=curvature
            )
        loss_fn(model, batch).backward()
        optimizer.step()
        made[name] = (model, optimizer)
    return made


def time_rounds(
    work: dict[str, Callable[[], object]], rounds: int, repeats: int
) -> dict[str, float]:
    """Return the median time of each piece of work in microseconds."""
    times: dict[str, list[float]] = {name: [] for name in work}
    for number in range(rounds + 2):
        for name, function in work.items():
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(repeats):
                function()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if number >= 2:
                times[name].append((time.perf_counter() - start) / repeats * 1e6)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    """Measure, print, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--repeats", type=int, default=100)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()

    made = candidates(args.device)
    steps = {name: optimizer.step for name, (_, optimizer) in made.items()}
    step = time_rounds(steps, args.rounds, args.repeats)

    batch = (
        torch.randn(100, 3, 32, 32, device=args.device),
        torch.randint(10, (100,), device=args.device),
    )

    def train(name: str) -> Callable[[], None]:
        model, optimizer = made[name]

        def one_step() -> None:
            optimizer.zero_grad()
            loss_fn(model, batch).backward()
            optimizer.step()

        return one_step

    whole = time_rounds({name: train(name) for name in made}, 11, 5)
    print(f"{'':22}{'step':>10}{'ratio':>8}{'with gradient':>16}{'ratio':>8}")
    for name in made:
        print(
            f"{name:22}{step[name]:>7.1f} us{step[name] / step['Adam']:>8.2f}"
            f"{whole[name] / 1000:>13.2f} ms{whole[name] / whole['Adam']:>8.2f}"
        )
    result = {
        "device": torch.cuda.get_device_name()
        if args.device != "cpu"
        else platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "step_us": step,
        "step_ratio": {name: value / step["Adam"] for name, value in step.items()},
        "step_with_gradient_us": whole,
    }
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
