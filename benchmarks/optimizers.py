"""Which optimizer needs no learning rate: ours against tuned and parameter-free ones.

    export OMP_NUM_THREADS=1
    python benchmarks/optimizers.py run --out results.jsonl --workers 16 --seconds 500
    python benchmarks/optimizers.py run --out results.jsonl --part held-out   # once, at the end
    python benchmarks/optimizers.py table --out results.jsonl
    python benchmarks/optimizers.py verdict --out results.jsonl --part all  # what must hold

"newton -" is NewtonSummary(model, loss_fn), "steer 0.001" RateController on Adam from that rate.
Fourteen trainings (optimizer_trainings.py), three seeds, constant rates and the same linear decay.
A cell is one training with one method, schedule and seed; cells run in processes of one thread each
and are appended to a file as they end, so a run that was stopped goes on. Prodigy and schedule-free
AdamW need ``pip install prodigyopt schedulefree``; without them their cells are left out.

``--variant NAME '{"set_point": 0.8}'`` runs the controller with other settings, under a name of its
own; names in capitals are constants of its module. ``--longer 10`` trains ten times as long.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from optimizer_trainings import DEVELOPMENT, HELD_OUT, TRAININGS
from side_by_side import Cell, read, run_cells
from torch import nn
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from newton_summary import NewtonSummary
from newton_summary.optimizer import controller, steering
from newton_summary.probe.inputs import LossFn

ADAM = (1e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
SGDS = (3e-3, 1e-2, 3e-2, 1e-1, 3e-1)
STARTS = (1e-3, 1e-5, 1e-1)
SCHEDULES = ("constant", "linear")


def methods(variants: Iterable[str], starts: Iterable[float] = STARTS) -> list[str]:
    """All methods, the most telling ones first."""
    ours = [f"steer{name} {lr:g}" for name in variants for lr in starts]
    adam = [f"adam {lr:g}" for lr in ADAM]
    others = {"prodigyopt": "prodigy 1", "schedulefree": "schedulefree 0.0025"}
    others = [m for package, m in others.items() if importlib.util.find_spec(package)]
    return [*ours, "newton -", *adam, *others, *(f"sgd {lr:g}" for lr in SGDS), "steersgd 0.01"]


def cells(args: argparse.Namespace) -> list[Cell]:
    part = {"development": DEVELOPMENT, "held-out": HELD_OUT, "all": TRAININGS}[args.part]
    chosen = [t for t in part if not args.trainings or t in args.trainings]
    wanted = [
        m
        for m in methods(["", *args.variants], args.starts)
        if not args.methods or any(f"{m} ".startswith(f"{x} ") for x in args.methods)
    ]
    longer = {"longer": args.longer} if args.longer > 1 else {}
    return [
        {"training": t, "method": m, "schedule": schedule, "seed": seed, **longer}
        for seed in args.seeds
        for schedule in args.schedules
        for m in wanted
        for t in chosen
    ]


def key(cell: Cell) -> tuple[Any, ...]:
    names = ("training", "method", "schedule", "seed")
    return (*(cell[name] for name in names), cell.get("longer", 1))


# --- one training ---------------------------------------------------------------------------------


def make_optimizer(kind: str, lr: str, model: nn.Module, loss_fn: LossFn) -> Optimizer:
    if kind == "newton":
        return NewtonSummary(model, loss_fn)
    return make_other(kind, float(lr), model)


def make_other(kind: str, lr: float, model: nn.Module) -> Optimizer:
    if kind == "prodigy":
        from prodigyopt import Prodigy

        return Prodigy(model.parameters(), lr=lr)
    if kind == "schedulefree":
        from schedulefree import AdamWScheduleFree

        return AdamWScheduleFree(model.parameters(), lr=lr)
    if "sgd" in kind:
        return SGD(model.parameters(), lr=lr, momentum=0.9)
    return Adam(model.parameters(), lr=lr)


@contextmanager
def settings(options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Set the constants among some options, for a while; gives those for the constructor."""
    constants = {name: options[name] for name in options if name.isupper()}
    with ExitStack() as restored:
        for name, value in constants.items():
            homes = [m for m in (steering, controller) if hasattr(m, name)]
            if not homes:
                raise ValueError(f"{name} is a constant of neither steering nor controller.")
            for home in homes:
                restored.callback(setattr, home, name, getattr(home, name))
                setattr(home, name, value)
        yield {name: options[name] for name in options.keys() - constants.keys()}


def train(cell: Cell, folder: Path, device: str, variants: dict[str, Any]) -> Cell:
    """Train once; return the cell with its results."""
    variant = cell["method"].split()[0].removeprefix("steer")
    with settings(variants.get(variant, {})) as options:
        return train_with(options, cell, folder, device)


def train_with(options: dict[str, Any], cell: Cell, folder: Path, device: str) -> Cell:
    training = TRAININGS[cell["training"]]
    kind, lr = cell["method"].split()
    train_set, test_set = (tuple(t.to(device) for t in split) for split in training.load(folder))
    torch.manual_seed(cell["seed"])
    model = training.build().to(device)
    optimizer = make_optimizer(kind, lr, model, training.loss_fn)
    steers = None
    if kind.startswith("steer"):
        steers = controller.RateController(optimizer, model, training.loss_fn, **options)
    n = len(train_set[0])
    epochs = training.epochs * cell.get("longer", 1)
    total = epochs * -(-n // training.batch)
    schedule = LambdaLR(optimizer, lambda t: 1 - t / total if cell["schedule"] == "linear" else 1.0)
    order = torch.Generator().manual_seed(cell["seed"])
    mode: Callable[..., Any] = getattr(optimizer, "train", lambda: None)
    mode()
    curve: list[float] = []
    start = time.perf_counter()
    for _ in range(epochs):
        losses = []
        for chosen in torch.randperm(n, generator=order).to(device).split(training.batch):
            batch = (train_set[0][chosen], train_set[1][chosen])
            optimizer.zero_grad()
            loss = training.loss_fn(model, batch)
            loss.backward()
            if steers or kind == "newton":
                (steers or optimizer).step(batch)
            else:
                optimizer.step()
            schedule.step()
            losses.append(loss.detach())
        curve.append(float(torch.stack(losses).mean()))
        if not math.isfinite(curve[-1]):
            break
    seconds = time.perf_counter() - start
    getattr(optimizer, "eval", lambda: None)()
    model.eval()
    with torch.no_grad():
        parts = zip(*(t.split(500) for t in train_set), strict=True)
        loss_of_parts = [float(training.loss_fn(model, part)) for part in parts]
        score = training.score(model, test_set)
    cell |= {"loss": statistics.fmean(loss_of_parts), "curve": curve, "score": score}
    cell |= {"seconds": round(seconds, 2), "device": device}
    if steers or kind == "newton":
        cell["rates"] = [
            (r.step, *(float(f"{x:.3g}") for x in (r.rate, r.slope, r.curvature)), r.why)
            for r in (steers or optimizer).history
        ]
    return cell


def run(args: argparse.Namespace) -> None:
    done = {key(cell) for cell in read(args.out)}
    todo = [cell for cell in cells(args) if key(cell) not in done]
    folder = args.out.parent
    TRAININGS["LeNet"].load(folder)  # prepares the images for all
    function = partial(train, folder=folder, device=args.device, variants=args.variants)
    count = run_cells(todo, function, args.out, args.workers, args.seconds)
    print(f"{count} cells of {len(todo)}; {args.out}")


# --- tables ---------------------------------------------------------------------------------------


def read_of_length(args: argparse.Namespace) -> list[Cell]:
    return [cell for cell in read(args.out) if cell.get("longer", 1) == args.longer]


def final(cell: Cell) -> float:
    """The loss at the end; a training that failed counts as its start, times ten."""
    loss = cell.get("loss", math.inf)
    return max(loss, 1e-12) if math.isfinite(loss) else math.inf


def table(args: argparse.Namespace) -> None:
    """Print for every method how its loss compares with Adam's best rate of the same training."""
    by_setting: dict[tuple[str, str, int], dict[str, Cell]] = defaultdict(dict)
    for cell in read_of_length(args):
        setting = (cell["schedule"], cell["training"], cell["seed"])
        by_setting[setting][cell["method"]] = cell
    part = {"development": DEVELOPMENT, "held-out": HELD_OUT, "all": TRAININGS}[args.part]
    for schedule in args.schedules:
        settings = {k: v for k, v in by_setting.items() if k[0] == schedule and k[1] in part}
        if settings:
            print(f"\n## {schedule} rate, {args.part}\n")
            print_comparison(settings)
            print_losses(settings, args.methods)


def group_best(found: dict[str, Cell], kind: str) -> Cell | None:
    some = [cell for m, cell in found.items() if m.split()[0] == kind]
    return min(some, key=final) if some else None


def print_comparison(settings: dict[tuple[str, str, int], dict[str, Cell]]) -> None:
    names = list(dict.fromkeys(m for found in settings.values() for m in found))
    rows: dict[str, list[tuple[float, ...]]] = defaultdict(list)
    for found in settings.values():
        best = group_best(found, "adam")
        if best is None:
            continue
        standard, prodigy = found.get("adam 0.001"), found.get("prodigy 1")
        shown = {m: found[m] for m in names if m in found}
        if sgd := group_best(found, "sgd"):
            shown["sgd, best"] = sgd
        for m, cell in shown.items():
            rows[m].append(
                (
                    final(cell) / final(best),
                    final(cell) < final(standard) if standard else math.nan,
                    final(cell) < final(prodigy) if prodigy else math.nan,
                    (cell.get("seconds") or math.nan) / best["seconds"],
                    not math.isfinite(final(cell)) or final(cell) > 3 * final(best) + 1,
                )
            )
    print(
        "| method | runs | loss / Adam's best | worst | better than Adam 1e-3 | than Prodigy "
        "| time / Adam's | failed |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for m, found_rows in rows.items():
        ratio, standard_wins, prodigy_wins, seconds, failed = zip(*found_rows, strict=True)
        print(
            f"| {m} | {len(ratio)} | {mean(ratio):.2f} | {max(ratio):.2f} | {share(standard_wins)} "
            f"| {share(prodigy_wins)} | {statistics.median(seconds):.2f} | {sum(failed)} |"
        )


def verdict(args: argparse.Namespace) -> None:
    """Print what must hold of each method that needs no learning rate, and whether it does."""
    by_setting: dict[tuple[str, str, int], dict[str, Cell]] = defaultdict(dict)
    part = {"development": DEVELOPMENT, "held-out": HELD_OUT, "all": TRAININGS}[args.part]
    for cell in read_of_length(args):
        if cell["training"] in part and cell["schedule"] in args.schedules:
            setting = (cell["schedule"], cell["training"], cell["seed"])
            by_setting[setting][cell["method"]] = cell
    ours = {m for found in by_setting.values() for m in found if m.startswith(("newton", "steer"))}
    for m in sorted(ours):
        pairs = [
            (found[m], best, found)
            for found in by_setting.values()
            if m in found and (best := group_best(found, "adam"))
        ]
        print(f"\n## {m}, {args.part}, {len(pairs)} runs")
        if not pairs:
            continue
        ratio = [final(cell) / final(best) for cell, best, _ in pairs]
        timed = [r for cell, best, _ in pairs if (r := at_equal_time(cell, best)) is not None]
        both = [(cell.get("seconds"), best.get("seconds")) for cell, best, _ in pairs]
        times = [a / b for a, b in both if a and b]
        lost = sum(not math.isfinite(final(cell)) for cell, _, _ in pairs)
        still = sum(final(cell) >= cell["curve"][0] for cell, _, _ in pairs if cell.get("curve"))
        limit = 1.25 if pairs[0][0].get("device") == "cuda" else 2.0
        say("diverged or not moved", lost + still, lost + still == 0)
        say("loss / Adam's best of seven, equal epochs (1)", mean(ratio), mean(ratio) <= 1)
        if timed:
            say("the same at equal time (1.5)", mean(timed), mean(timed) <= 1.5)
        say("worst (3)", max(ratio), max(ratio) <= 3)
        for name in ("adam 0.001", "prodigy 1"):
            wins = [final(cell) < final(found[name]) for cell, _, found in pairs if name in found]
            if wins:
                say(
                    f"better than {name}, share (0.75)",
                    statistics.fmean(wins),
                    sum(wins) >= 0.75 * len(wins),
                )
        if times:
            say(f"time / Adam's, worst ({limit:g})", max(times), max(times) <= limit)


def say(what: str, value: float, holds: bool) -> None:
    print(f"{'holds' if holds else 'FAILS':6} {what}: {value:.3g}")


def mean(ratios: Iterable[float]) -> float:
    return math.exp(statistics.fmean(math.log(min(max(r, 1e-6), 1e3)) for r in ratios))


def at_equal_time(cell: Cell, best: Cell) -> float | None:
    """Compare the last epoch of Adam's best with the one that a method was in at that time."""
    if not (cell.get("curve") and best.get("curve")):
        return None
    if not (cell.get("seconds") and best.get("seconds")):
        return None
    epochs = len(cell["curve"]) * best["seconds"] / cell["seconds"]
    reached = cell["curve"][min(max(int(epochs), 1), len(cell["curve"])) - 1]
    return reached / max(best["curve"][-1], 1e-12)


def share(wins: Iterable[float]) -> str:
    known = [win for win in wins if not math.isnan(win)]
    return f"{sum(known)} of {len(known)}" if known else ""


def print_losses(settings: dict[tuple[str, str, int], dict[str, Cell]], shown: list[str]) -> None:
    """Print the geometric mean over seeds of the final loss, for each training and method."""
    losses: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for (_, training, _), found in settings.items():
        for m, cell in found.items():
            if not shown or any(m.startswith(x) for x in shown):
                losses[m][training].append(final(cell))
    trainings = [t for t in TRAININGS if any(t in by for by in losses.values())]
    print(f"\n| method | {' | '.join(trainings)} |")
    print("|---" * (1 + len(trainings)) + "|")
    for m, by in losses.items():
        means = [
            f"{math.exp(statistics.fmean(map(math.log, by[t]))):.3g}" if by[t] else ""
            for t in trainings
        ]
        print(f"| {m} | {' | '.join(means)} |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=["run", "table", "verdict"])
    parser.add_argument("--out", type=Path, default=Path("benchmark-results/optimizers.jsonl"))
    parser.add_argument("--part", choices=["development", "held-out", "all"], default="development")
    parser.add_argument("--trainings", nargs="*", default=[])
    parser.add_argument("--methods", nargs="*", default=[], help="names, with rate or without")
    parser.add_argument("--starts", nargs="*", type=float, default=STARTS, help="of the controller")
    parser.add_argument("--schedules", nargs="*", default=SCHEDULES, choices=SCHEDULES)
    parser.add_argument("--longer", type=int, default=1, help="times as many epochs")
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--variant", nargs=2, action="append", default=[], dest="variants")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1e9, help="start no cell after so long")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    args.variants = {name: json.loads(options) for name, options in args.variants}
    {"run": run, "table": table, "verdict": verdict}[args.command](args)


if __name__ == "__main__":
    main()
