"""Steer trainings of other kinds than those of the suite, which steering was tuned on.

    export OMP_NUM_THREADS=1
    python benchmarks/other_kinds.py run --out results.jsonl --workers 2
    python benchmarks/other_kinds.py table --out results.jsonl

Fifteen trainings of 320 or 400 steps (kinds.py), seeds 0 to 2, at a constant rate, with a linear
decay to zero ("decay"), and, for the GRU and the encoder, with a rise from zero over a tenth of the
steps before it ("warm-up"). With our methods, and with Adam at four rates. The loss is that of all
samples at the end, without dropout; of Poisson's equation on new points.

A cell is one training with one method, schedule and seed; cells run in processes of one thread each
and are appended to a file as they end, so a run that was stopped goes on. The kind LoRA needs
``pip install transformers``; without it it is left out.

``--variant NAME '{"set_point": 0.8}'`` adds a method NAME, the controller with other settings;
names in capitals are constants of its modules.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import time
from collections import defaultdict
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from kinds import KINDS
from optimizers import final, mean, settings
from side_by_side import Cell, read, run_cells
from torch import nn
from torch.optim import Adam
from torch.optim.lr_scheduler import LambdaLR

from newton_summary import NewtonSummary, RateController
from newton_summary.probe.inputs import LossFn

ADAM = {"Adam 1e-3": 1e-3, "Adam 3e-3": 3e-3, "Adam 1e-2": 1e-2, "Adam 3e-2": 3e-2}
CONTROLLERS: dict[str, dict[str, Any]] = {
    "RateController": {},
    "RateController, set_point=1.0": {"set_point": 1.0},
}
NEWTON = {"NewtonSummary": {}, "NewtonSummary, careful": {"variant": "careful"}}
SCHEDULES = {
    "constant": lambda share: 1.0,  # of the rate, by the share of steps that are done
    "decay": lambda share: 1 - share,
    "warm-up": lambda share: min(share / 0.1, (1 - share) / 0.9),
}


def methods(variants: Iterable[str]) -> list[str]:
    return [*CONTROLLERS, *variants, *NEWTON, *ADAM]


def schedules(args: argparse.Namespace, kind: str) -> list[str]:
    return args.schedules or [s for s in SCHEDULES if s != "warm-up" or KINDS[kind].warms_up]


def cells(args: argparse.Namespace) -> list[Cell]:
    wanted = [
        m
        for m in methods(args.variants)
        if not args.methods or any(f"{m} ".startswith(f"{x} ") for x in args.methods)
    ]
    kinds = list(args.kinds)
    if "LoRA" in kinds and not importlib.util.find_spec("transformers"):
        print("LoRA is left out: it needs `pip install transformers`.")
        kinds.remove("LoRA")
    return [
        {"kind": kind, "method": m, "schedule": schedule, "seed": seed}
        for seed in args.seeds
        for kind in kinds
        for schedule in schedules(args, kind)
        for m in wanted
    ]


def key(cell: Cell) -> tuple[Any, ...]:
    return tuple(cell[name] for name in ("kind", "method", "schedule", "seed"))


# --- one training ---------------------------------------------------------------------------------


def make_stepper(method: str, model: nn.Module, loss_fn: LossFn, options: dict[str, Any]) -> Any:
    """Return what takes the steps: an optimizer, or a controller of one."""
    if method in NEWTON:
        return NewtonSummary(model, loss_fn, **options)
    params = [p for p in model.parameters() if p.requires_grad]
    if method in ADAM:
        return Adam(params, lr=ADAM[method])
    return RateController(Adam(params, lr=1e-3), model, loss_fn, **options)


def train(cell: Cell, variants: dict[str, dict[str, Any]]) -> Cell:
    """Train once; return the cell with its results."""
    method = cell["method"]
    with settings((variants | CONTROLLERS | NEWTON).get(method, {})) as options:
        kind = KINDS[cell["kind"]]
        data = kind.data()
        torch.manual_seed(cell["seed"])
        model = kind.build()
        stepper = make_stepper(method, model, kind.loss_fn, options)
        optimizer = getattr(stepper, "optimizer", stepper)
        shape = SCHEDULES[cell["schedule"]]
        schedule = LambdaLR(optimizer, lambda t: shape(t / kind.steps))
        start = time.perf_counter()
        for batch in kind.batches(data):
            optimizer.zero_grad()
            kind.loss_fn(model, batch).backward()
            if method in ADAM:
                stepper.step()
            else:
                stepper.step(batch)
            schedule.step()
        seconds = time.perf_counter() - start
        if method in NEWTON:
            stepper.eval()  # the mean of the last steps
    return cell | {"loss": kind.evaluate(model, data), "seconds": round(seconds, 2)}


def run(args: argparse.Namespace) -> None:
    done = {key(cell) for cell in read(args.out)}
    todo = [cell for cell in cells(args) if key(cell) not in done]
    function = partial(train, variants=args.variants)
    count = run_cells(todo, function, args.out, args.workers, args.seconds)
    print(f"{count} cells of {len(todo)}; {args.out}")


# --- the table ------------------------------------------------------------------------------------


def table(every: Iterable[Cell]) -> str:
    """Return the losses over those of the best of Adam's rates, as Markdown.

    For each kind and schedule the geometric mean over seeds, with the worst seed in parentheses;
    then the same over all kinds. Seeds without all rates of Adam are left out.
    """
    runs: dict[tuple[str, str, int], dict[str, float]] = defaultdict(dict)
    for cell in every:
        runs[cell["kind"], cell["schedule"], cell["seed"]][cell["method"]] = final(cell)
    ratios: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for (kind, schedule, _), losses in runs.items():
        if not ADAM.keys() <= losses.keys():
            continue
        best = min(losses[m] for m in ADAM)
        for method in losses.keys() - ADAM.keys():
            ratios[method, schedule][kind].append(losses[method] / best)
    ours = {m for losses in runs.values() for m in losses if m not in ADAM}
    columns = sorted(ours, key=place)
    lines = [f"| | {' | '.join(map(name, columns))} |", "|---" * (1 + len(columns)) + "|"]
    for schedule in SCHEDULES:
        here = [ratios[method, schedule] for method in columns]
        for kind in [kind for kind in KINDS if any(kind in column for column in here)]:
            shown = [found([column.get(kind, [])]) for column in here]
            lines.append(f"| {kind}, {schedule} | {' | '.join(shown)} |")
        if any(here):
            shown = [found(column.values()) for column in here]
            lines.append(f"| **all, {schedule}** | {' | '.join(shown)} |")
    return "\n".join(lines)


def place(method: str) -> int:
    """Return where the columns of a method stand; variants come last."""
    known = methods(())
    return known.index(method) if method in known else len(known)


def name(method: str) -> str:
    head, comma, option = method.partition(", ")
    return f"`{head}`{comma}" + (f"`{option}`" if option else "")


def found(kinds: Iterable[list[float]]) -> str:
    """Return the mean over kinds of the mean over seeds, and the worst seed."""
    some = [seeds for seeds in kinds if seeds]
    if not some:
        return ""
    worst = max(map(max, some))
    return f"{mean(map(mean, some)):.2f} ({worst:.3g})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=["run", "table"])
    parser.add_argument("--out", type=Path, default=Path("benchmark-results/other_kinds.jsonl"))
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), choices=KINDS)
    parser.add_argument("--methods", nargs="*", default=[], help="names; Adam with rate or without")
    parser.add_argument("--schedules", nargs="*", default=[], choices=SCHEDULES)
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--variant", nargs=2, action="append", default=[], dest="variants")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1e9, help="start no cell after so long")
    args = parser.parse_args()
    if known := [name for name, _ in args.variants if name in methods(())]:
        parser.error(f"--variant {known[0]!r} is the name of a method: choose another one.")
    args.variants = {name: json.loads(options) for name, options in args.variants}
    if args.command == "run":
        run(args)
    else:
        print(table(read(args.out)))


if __name__ == "__main__":
    main()
