"""Is a learning rate right? suggest_lrs against the best rate, Lightning's finder and Prodigy.

    export OMP_NUM_THREADS=1
    python benchmarks/advice.py run --out new.jsonl --workers 16 --seconds 450 --methods once while
    python benchmarks/advice.py merge --out new.jsonl        # into benchmarks/results/advice.jsonl
    python benchmarks/advice.py table
    python benchmarks/advice.py page                         # into docs/advise.md

Sixteen trainings, those of optimizer_trainings.py and two more, three seeds, Adam at a constant
rate. ``adam``: seven rates, and those that advice starts from, which for the table adds an eighth.
``once``: advice before the first step, from a rate 10 times too small, about right, and 10 times
too large; again after ten steps if it says "not yet". ``order``: the rate that is about right, with
the batches in another order, to see what chance alone does. ``step``: ``once`` without a rehearsal,
by the best next step. ``while``: from the same rates, advice before every epoch. ``finder``: the
rate of Lightning's finder with its defaults. ``prodigy`` needs ``prodigyopt``.
Cells are appended to a file as they end, so a run that was stopped goes on. Methods are run in the
order in which they are given, each with all seeds.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import itertools
import json
import math
import statistics
import time
import warnings
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from optimizer_trainings import TRAININGS, Data, Training, dense, mnist, squared
from side_by_side import Cell, read, run_cells
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

import newton_summary as ns

RATES = (3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
ABOUT_RIGHT = defaultdict(
    lambda: 3e-3,
    {
        "BigMLP": 3e-4,
        "table": 1e-2,
        **dict.fromkeys(
            ["MLP, ReLU, squared error", "autoencoder", "MLP, ReLU", "ViT", "VGG-11'"], 1e-3
        ),
    },
)
STARTS = {"10 times too small": 0.1, "about right": 1.0, "10 times too large": 10.0}
BATCHES = {"once": 16, "step": 16, "while": 8}  # that the advice is measured on
METHODS = ["once", "adam", "order", "finder", "prodigy", "while", "step"]
RESULTS = Path(__file__).parent / "results" / "advice.jsonl"
PAGE = Path(__file__).parent.parent / "docs" / "advise.md"


# --- two more trainings ---------------------------------------------------------------------------


def noisy_images() -> tuple[Data, Data]:
    """Noisy images of digits, and the clean ones."""
    draw = torch.Generator().manual_seed(0)
    return tuple((x + torch.randn(x.shape, generator=draw), x) for x, _ in mnist())  # type: ignore[return-value]


class UNet(nn.Module):
    """Two levels, with batch norm and a connection across."""

    def __init__(self) -> None:
        super().__init__()

        def block(fan_in: int, fan_out: int, stride: int = 1) -> nn.Module:
            conv = nn.Conv2d(fan_in, fan_out, 3, stride, 1, bias=False)
            return nn.Sequential(conv, nn.BatchNorm2d(fan_out), nn.ReLU())

        self.top, self.down, self.low = block(1, 8), block(8, 16, 2), block(16, 16)
        self.up = nn.ConvTranspose2d(16, 8, 2, 2)
        self.end = nn.Sequential(block(16, 8), nn.Conv2d(8, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        top = self.top(x)
        return self.end(torch.cat([top, self.up(self.low(self.down(top)))], 1))


class Adapted(nn.Module):
    """A linear layer that is frozen, and two small factors that are trained (LoRA)."""

    def __init__(self, layer: nn.Linear, rank: int = 4):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.A = nn.Parameter(torch.randn(rank, layer.in_features) / layer.in_features**0.5)
        self.B = nn.Parameter(torch.zeros(layer.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + x @ self.A.T @ self.B.T


def adapted_mlp() -> nn.Module:
    """A network trained for an epoch on upright digits, with adapters."""
    model = dense(1024, 200, 100, 10)
    (images, labels), _ = mnist()
    adam = Adam(model.parameters(), lr=1e-3)
    for x, y in zip(images.split(50), labels.split(50), strict=True):
        adam.zero_grad()
        F.cross_entropy(model(x), y).backward()
        adam.step()
    layers = [Adapted(m) if isinstance(m, nn.Linear) else m for m in model]  # type: ignore[union-attr]
    return nn.Sequential(*layers)


def turned_digits() -> tuple[Data, Data]:
    return tuple((x.transpose(2, 3), y) for x, y in mnist())  # type: ignore[return-value]


EVERY = TRAININGS | {
    "U-Net": Training(UNet, noisy_images, squared, batch=25, epochs=4, samples=1000),
    "LoRA": Training(adapted_mlp, turned_digits),
}


# --- one training ---------------------------------------------------------------------------------


def finder_rate(model: nn.Module, loss_fn: Any, batches: list[Any]) -> float:
    """The rate that Lightning 2.6's ``lr_find`` suggests, with its defaults, for Adam.

    A hundred steps with rates from 1e-8 to 1; of the smoothed losses, without the first ten and the
    last one, the rate at the steepest descent.
    """
    twin = copy.deepcopy(model)
    adam = Adam(twin.parameters(), lr=1e-8)
    average, best, rates, losses = 0.0, math.inf, [], []
    for k in range(100):
        rates.append(1e-8 * 1e8 ** ((k + 1) / 100 if k else 0))
        adam.param_groups[0]["lr"] = rates[-1]
        adam.zero_grad()
        loss = loss_fn(twin, batches[k % len(batches)])
        loss.backward()
        adam.step()
        average = 0.98 * average + 0.02 * float(loss.detach())
        losses.append(average / (1 - 0.98 ** (k + 2)))
        if k > 0 and losses[-1] > 4 * best:
            break
        best = losses[-1] if k == 0 else min(best, losses[-1])
    kept = torch.tensor(losses[10:-1])
    finite = torch.isfinite(kept)
    if finite.sum() < 2:
        raise ValueError("no suggestion")
    lrs = torch.tensor(rates[10:-1])[finite]
    slopes = torch.gradient(kept[finite], spacing=[lrs])[0]
    return float(lrs[slopes.argmin()])


def advise(
    model: nn.Module,
    training: Training,
    data: Data,
    adam: Optimizer,
    chosen: Tensor,
    rehearsal: bool,
) -> dict[str, Any]:
    """Apply advice from some samples; return what it said."""
    batches = [(data[0][c], data[1][c]) for c in chosen.split(training.batch)]
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        advice = ns.suggest_lrs(model, training.loss_fn, batches, adam, rehearsal=rehearsal)
    seconds = time.perf_counter() - start
    advice.apply()
    (group,) = advice.groups
    said = {"factor": group.factor, "stderr": group.stderr, "change": group.change}
    said |= {"verdict": group.verdict, "strength": advice.rates.lambda_int}
    said |= {"now": advice.now, "then": advice.then, "seconds": round(seconds, 2)}
    said |= {"rehearsal": advice.rehearsal}
    return said


def train(cell: Cell, folder: Path) -> Cell:
    """Train once; return the cell with its results."""
    training, method, seed = EVERY[cell["training"]], cell["method"], cell["seed"]
    data, _ = training.load(folder)
    torch.manual_seed(seed)
    model = training.build()
    params = [p for p in model.parameters() if p.requires_grad]
    shift = 500 if method == "order" else 0
    order, draw = (torch.Generator().manual_seed(seed + k) for k in (shift, 1000))
    lr = cell.get("lr", 1.0)
    start = time.perf_counter()
    if method == "finder":
        chosen = torch.randperm(len(data[0]), generator=draw).split(training.batch)
        lr = finder_rate(model, training.loss_fn, [(data[0][c], data[1][c]) for c in chosen])
    if method == "prodigy":
        from prodigyopt import Prodigy

        optimizer: Optimizer = Prodigy(params, lr=1.0)
    else:
        optimizer = Adam(params, lr=lr)
    advices: list[dict[str, Any]] = []

    def is_due(epoch: int, step: int) -> bool:
        if step == 0:
            return method == "while" or (method in ("once", "step") and epoch == 0)
        return epoch == 0 and step == 10 and bool(advices) and advices[0]["verdict"] == "not yet"

    for epoch in range(training.epochs):
        batches = torch.randperm(len(data[0]), generator=order).split(training.batch)
        for step, chosen in enumerate(batches):
            if is_due(epoch, step):
                samples = torch.randperm(len(data[0]), generator=draw)
                samples = samples[: BATCHES[method] * training.batch]
                rehearsal = method != "step"
                advices.append(advise(model, training, data, optimizer, samples, rehearsal))
            optimizer.zero_grad()
            loss = training.loss_fn(model, (data[0][chosen], data[1][chosen]))
            loss.backward()
            optimizer.step()
        if not math.isfinite(float(loss.detach())):
            break
    seconds = time.perf_counter() - start
    model.eval()
    with torch.no_grad():
        parts = zip(*(t.split(500) for t in data), strict=True)
        losses = [float(training.loss_fn(model, part)) for part in parts]
    cell |= {"loss": statistics.fmean(losses), "seconds": round(seconds, 2), "advice": advices}
    return cell | {"last_lr": optimizer.param_groups[0]["lr"]}


def starts(name: str) -> dict[str, float]:
    return {start: float(f"{ABOUT_RIGHT[name] * k:.0e}") for start, k in STARTS.items()}


def cells(args: argparse.Namespace) -> list[Cell]:
    """All cells, one method after the other."""
    found = []
    for method, seed, name in itertools.product(args.methods, args.seeds, args.trainings or EVERY):
        if method == "prodigy" and not importlib.util.find_spec("prodigyopt"):
            continue
        rates = {
            "adam": sorted({*RATES, *starts(name).values()}),
            "order": [ABOUT_RIGHT[name]],
            **dict.fromkeys(BATCHES, starts(name).values()),
        }
        cell = {"training": name, "method": method, "seed": seed}
        found += [cell | ({"lr": lr} if lr else {}) for lr in rates.get(method, [None])]
    return found


def key(cell: Cell) -> tuple[Any, ...]:
    return tuple(cell.get(name) for name in ("training", "method", "seed", "lr"))


def run(args: argparse.Namespace) -> None:
    done = {key(cell) for cell in read(args.out)}
    todo = [cell for cell in cells(args) if key(cell) not in done]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    TRAININGS["LeNet"].load(args.out.parent)  # prepares the images for all
    function = partial(train, folder=args.out.parent)
    count = run_cells(todo, function, args.out, args.workers, args.seconds)
    print(f"{count} cells of {len(todo)}; {args.out}")


def merge(args: argparse.Namespace) -> None:
    """Put the cells of a run into the results, in the place of older ones."""
    every = {key(cell): json.dumps(cell) + "\n" for cell in read(args.results) + read(args.out)}
    args.results.write_text("".join(every.values()), encoding="utf-8")


# --- tables ---------------------------------------------------------------------------------------


def final(cell: Cell | None) -> float:
    loss = math.inf if cell is None else cell.get("loss", math.inf)
    return max(loss, 1e-12) if math.isfinite(loss) else math.inf


def summary(every: list[Cell]) -> str:
    """Return the tables as Markdown."""
    runs: dict[tuple[str, int], dict[tuple[str, Any], Cell]] = defaultdict(dict)
    for cell in every:
        runs[cell["training"], cell["seed"]][cell["method"], cell.get("lr")] = cell
    rows: dict[str, list[tuple[str, float, float]]] = defaultdict(list)  # training, ratio, worse
    for (name, _), found in runs.items():
        rates = {lr: final(cell) for (method, lr), cell in found.items() if method == "adam"}
        if not {*RATES, *starts(name).values()} <= rates.keys():
            continue
        best = min(rates[lr] for lr in RATES)
        for start, lr in starts(name).items():
            rows[f"no advice, {start}"].append((name, rates[lr] / best, math.nan))
            for method in BATCHES:
                if (method, lr) in found:
                    cell = found[method, lr]
                    loss = final(cell)
                    # What advice has left as it was is a training without it, on the same machine.
                    kept = all(said["change"] == 1 for said in cell.get("advice", ()))
                    worse = 1.0 if kept else loss / rates[lr]
                    rows[f"advice {method}, {start}"].append((name, loss / best, worse))
        right = ABOUT_RIGHT[name]
        if ("order", right) in found:
            loss = final(found["order", right])
            rows["order"].append((name, loss / best, loss / rates[right]))
        for method in ("finder", "prodigy"):
            if (method, None) in found:
                rows[method].append((name, final(found[method, None]) / best, math.nan))
    lines = [
        "| | runs | loss / that of the best of seven rates | worst | within 1.5 of the best "
        "| worse by more than 10 % than without |",
        "|---|---|---|---|---|---|",
    ]
    order = [*(f"no advice, {s}" for s in STARTS), "order"]
    order += [*(f"advice {m}, {s}" for m in ("once", "while", "step") for s in STARTS)]
    order += ["finder", "prodigy"]
    names = {"finder": "Lightning's finder", "prodigy": "Prodigy"}
    names["order"] = "no advice, about right, batches in another order"
    names |= {f"advice while, {s}": f"advice before every epoch, {s}" for s in STARTS}
    names |= {f"advice step, {s}": f"advice once, without rehearsal, {s}" for s in STARTS}
    for what in order:
        if not rows[what]:
            continue
        ratios, worse = [r for _, r, _ in rows[what]], [w for _, _, w in rows[what]]
        is_compared = not all(map(math.isnan, worse))
        bad = f"{sum(w > 1.1 for w in worse)} of {len(worse)}" if is_compared else ""
        near = f"{sum(r <= 1.5 for r in ratios)} of {len(ratios)}"
        lines.append(
            f"| {names.get(what, what)} | {len(ratios)} | {_mean(ratios):.2f} "
            f"| {_number(max(ratios))} | {near} | {bad} |"
        )
    return "\n".join([*lines, "", *_by_training(rows), "", _promises(every)])


def _by_training(rows: dict[str, list[tuple[str, float, float]]]) -> list[str]:
    """Return the ratio to the best rate for each training, as the mean over seeds."""
    kinds = {"no advice": "without", "advice once": "once", "advice while": "while"}
    middle = [f"{what}, {s}" for what in kinds for s in STARTS]
    heads = [f"{how}: {size}" for how in kinds.values() for size in ("small", "right", "large")]
    others = [("finder", "finder"), ("prodigy", "Prodigy")]
    columns = list(zip([*middle, *(k for k, _ in others)], [*heads, *(h for _, h in others)]))
    lines = [f"| | {' | '.join(head for _, head in columns)} |", "|---" * (1 + len(columns)) + "|"]
    for name in EVERY:
        found = [[r for n, r, _ in rows[what] if n == name] for what, _ in columns]
        if any(found):
            shown = " | ".join(_number(_mean(ratios)) if ratios else "" for ratios in found)
            lines.append(f"| {name} | {shown} |")
    return lines


def _promises(every: list[Cell]) -> str:
    """Say how often a suggestion was predicted, or turned out, to be worse than before."""
    shown = [c for c in every if c.get("lr") in starts(c["training"]).values()]  # in the tables
    said = [one for cell in shown for one in cell.get("advice", ())]
    predicted = sum(one["then"][0] > one["now"][0] for one in said)
    real = sum(one["then"][1] > one["now"][1] and one["change"] != 1 for one in said)
    changed = sum(one["change"] != 1 for one in said)
    return (
        f"Of {len(said)} pieces of advice {changed} suggested a change; {predicted} predicted a "
        f"higher loss than with the present rate, and after {real} of the suggested steps the loss "
        f"of the same data was higher than with the present rate."
    )


def _mean(ratios: list[float]) -> float:
    return math.exp(statistics.fmean(math.log(min(r, 1e3)) for r in ratios))


def _number(ratio: float) -> str:
    return "failed" if not math.isfinite(ratio) else f"{ratio:.3g}"


def page(args: argparse.Namespace) -> None:
    """Write the tables into the docs, between two marks."""
    begin, end = "<!-- benchmarks/advice.py -->\n", "<!-- end -->"
    before, rest = PAGE.read_text(encoding="utf-8").split(begin)
    text = f"{before}{begin}\n{summary(read(args.results))}\n\n{end}{rest.split(end)[1]}"
    PAGE.write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=["run", "merge", "table", "page"])
    parser.add_argument("--out", type=Path, default=Path("benchmark-results/advice.jsonl"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--trainings", nargs="*", default=[])
    parser.add_argument("--methods", nargs="*", default=METHODS)
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1e9, help="start no cell after so long")
    args = parser.parse_args()
    if args.command == "table":
        print(summary(read(args.results)))
    else:
        {"run": run, "merge": merge, "page": page}[args.command](args)


if __name__ == "__main__":
    main()
