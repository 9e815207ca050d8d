"""Why LeNet collapses under the paper's algorithm as run: how far every ten steps move it.

    OMP_NUM_THREADS=1 python benchmarks/step_lengths.py --data DATA --seeds 0 1 2 3 4 --epochs 40

An epoch is a line of benchmarks/results/step_lengths.jsonl. ``moved`` is the length of the path in
the ten steps between two refreshes, ``farthest`` the group that moved farthest in them, and
``lowest`` the smallest eigenvalue of the averaged Hbar whose rates they used, scaled to entries of
size 1 on its diagonal. It takes some ten seconds an epoch on one core.

With ``--definite`` the rates are kept where the averaged Hbar is not positive definite. That is not
in the paper's algorithm. benchmarks/results/step_lengths_definite.jsonl has the losses of such runs
(``--seeds 0 1 3 9 --epochs 200``), and how many refreshes were kept from taking effect.

With ``--printed`` the window averages D = abs(D3)^(1/3), as App. G prints it, and not D3 with its
sign. benchmarks/results/step_lengths_printed.jsonl has the losses of such runs (``--seeds 0 1 2 3 4
9 --epochs 200``), and the longest ten steps of each epoch.

With ``--compare`` a line has ``ahead`` too: at each refresh, the length of the first step that
follows with D3 averaged with its sign, and with D averaged as printed.
benchmarks/results/step_lengths_compared.jsonl has these of seeds 3 and 9, until they have collapsed
(``--seeds 3 9 --epochs 15``).
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from newton_summary.experiments.datasets import Batch
from newton_summary.experiments.recipes import RECIPES
from newton_summary.experiments.training import Reporter, Session
from newton_summary.optimizer import NewtonSummary
from newton_summary.optimizer.refreshes import mean_with_D
from newton_summary.optimizer.update import Update
from newton_summary.solver import learning_rates
from newton_summary.summary import Summary

RECIPE = "lenet_cifar10_newton_summary"
RESULTS = Path(__file__).parent / "results" / "step_lengths.jsonl"


class Watch:
    """Steps as a stepper does, and keeps how far each group moved."""

    def __init__(self, session: Session, definite: bool, printed: bool, compare: bool):
        self.stepper = session.stepper
        self.inner = session.stepper.step
        session.stepper.step = self.step  # type: ignore[method-assign]
        assert isinstance(self.stepper.optimizer, NewtonSummary)
        self.optimizer = self.stepper.optimizer
        self.moved: list[Tensor] = []  # (S,), a step each
        self.lowest: list[float] = []  # a refresh each
        self.renew = self.optimizer._renew_rates
        self.kept = 0  # refreshes whose rates were not taken
        if definite:
            self.optimizer._renew_rates = self.renew_if_definite  # type: ignore[method-assign]
        if printed:
            average = self.optimizer._average
            average.mean = lambda: mean_with_D(average._held)  # type: ignore[method-assign]
        self.ahead: list[list[float]] = []  # a refresh each
        if compare:
            self.optimizer._renew_rates = self.renew_and_compare  # type: ignore[method-assign]

    def renew_if_definite(self, update: Update) -> None:
        """Keep the rates, if there are any, where Hbar is not positive definite."""
        keep = self.optimizer._eta is not None and self.lowest_eigenvalue() <= 0
        self.kept += keep
        if not keep:
            self.renew(update)

    def renew_and_compare(self, update: Update) -> None:
        """Renew the rates, and keep how long the step is, and would be with D averaged."""
        self.renew(update)
        if self.optimizer._schedule.ready:
            group, held = self.optimizer.param_groups[0], self.optimizer._average._held
            u, partition = update.direction, self.optimizer.partition
            sizes = partition.inner(u, u).double().sqrt()
            lengths = [
                (learning_rates(mean, group["lambda_int"]).eta.clamp_min(0) * sizes).norm()
                for mean in (Summary.mean(held), mean_with_D(held))
            ]
            self.ahead.append([rounded(group["lr"] * float(x)) for x in lengths])

    def lowest_eigenvalue(self) -> float:
        """Return that of the averaged Hbar, scaled."""
        H = self.optimizer._average.mean().Hbar
        scale = H.diagonal().abs().clamp_min(1e-300).sqrt()
        return float(torch.linalg.eigvalsh(H / torch.outer(scale, scale))[0])

    def step(self, batch: Batch) -> Tensor:
        """Take a step."""
        before = [p.detach().clone() for p in self.stepper.params]
        refreshes = self.optimizer.refreshes
        loss = self.inner(batch)
        steps = zip(self.stepper.params, before, strict=True)
        self.moved.append(torch.stack([(p.detach() - old).norm() for p, old in steps]))
        if self.optimizer.refreshes > refreshes:
            self.lowest.append(self.lowest_eigenvalue())
        return loss

    def take(self) -> dict[str, Any]:
        """Return what the epoch's steps were, and forget them."""
        names = self.optimizer.partition.names
        tens = [torch.stack(self.moved[i : i + 10]) for i in range(0, len(self.moved), 10)]
        found = {
            "moved": [rounded(float(ten.norm(dim=1).sum())) for ten in tens],
            "farthest": [names[int(ten.sum(0).argmax())] for ten in tens],
            "lowest": list(map(rounded, self.lowest)),
            "kept": self.kept,
        }
        if self.ahead:
            found["ahead"] = self.ahead
        self.moved, self.lowest, self.kept, self.ahead = [], [], 0, []
        return found


def rounded(x: float) -> float:
    return float(f"{x:.3g}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", required=True, help="folder with CIFAR-10")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--epochs", type=int, default=40)
    way = parser.add_mutually_exclusive_group()
    way.add_argument("--definite", action="store_true", help="keep rates if Hbar is indefinite")
    way.add_argument("--printed", action="store_true", help="average D, as App. G prints it")
    way.add_argument("--compare", action="store_true", help="with the steps that D averaged gives")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    for seed in options.seeds:
        config = RECIPES[RECIPE]()
        config = replace(config, seed=seed, device="cpu", graph_steps=False)
        config = replace(config, data=replace(config.data, root=options.data))
        session = Session(config, torch.device("cpu"))
        watch = Watch(session, options.definite, options.printed, options.compare)
        for epoch in range(1, options.epochs + 1):
            lr, loss = session.lr, session.train_epoch(Reporter())
            session.epoch = epoch
            session._reduce_on_plateau(loss)
            row = {"seed": seed, "epoch": epoch, "loss": rounded(loss), "lr": lr, **watch.take()}
            with options.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(f"seed {seed}, epoch {epoch}: loss {loss:.3f}, lr {lr:g}", flush=True)
            if not math.isfinite(loss):
                break


if __name__ == "__main__":
    main()
