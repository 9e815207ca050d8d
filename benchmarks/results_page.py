"""Write docs/results.md: every claim of the paper's experiments beside what stored runs measured.

    python benchmarks/results_page.py RUNS... [--out docs/results.md]

RUNS are run directories, folders of them, or archives of benchmarks/paper_runs.py. What they do not
contain is shown as "not run".
"""

# ruff: noqa: E501  (sentences of the page)

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import tarfile
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, pairwise, product
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from newton_summary.analysis import inverse_kept, layer_numbers, normalized
from newton_summary.experiments.config import flatten
from newton_summary.experiments.paper_figures import (
    eta_figure,
    hessian_figure,
    partition_curves,
    training_curves,
)
from newton_summary.experiments.paper_figures import test_curves as draw_test_curves
from newton_summary.experiments.recipes import ADAM_RATES, PARTITIONS, RECIPES, SETUPS
from newton_summary.experiments.results import best_row, outcome, ran_alone, setup_label
from newton_summary.experiments.rundir import Run, find_runs
from newton_summary.experiments.tables import PAPER_PARTITIONS, PAPER_TIMES
from newton_summary.history import Measured
from newton_summary.summary import Summary

T = TypeVar("T")
Cell = tuple[str, str]  # what was measured, and the verdict
NOT_RUN, PARTLY = "not run", "partly"
NOTES = Path(__file__).parent / "results" / "notes.md"  # why, written by hand
EPOCHS = Path(__file__).parent / "results" / "epoch-cost-paper-h200.json"  # of epoch_cost.py
STEPS = Path(__file__).parent / "results" / "step_lengths.jsonl"  # of benchmarks/step_lengths.py
JUMP = 1.5  # an epoch whose training loss is this many times that of the epoch before
COMPARABLE = 2.0  # ratio of losses
LONGER = 1.1  # ratio of times: epochs of one setup differ by less
FAR = 0.1  # share of the squares, or size of an interaction, from which on it is there
GROUPS = dict(zip(PARTITIONS, (1, 2, 6, 6, 10, 10, 18), strict=True))
PLACES = {"seed", "epochs", "recipe", "data.root", "data.download", "device"}
PLACES |= {"graph_steps", "optimizer.cuda_graph"}  # how a step is launched, not what it computes

CLAIMS = dict(
    re.split(r" = (?!1 )", line, maxsplit=1)
    for line in r"""
successful = 6.2: "In each set of experiments, the training is successful, but slow or unstable at some points."
training loss = 6.2: the minimum training loss "is comparable to the minimum training loss achieved by K-\[F\]AC or Adam in all the series except for MLP, whose training is slower."
unstable = 6.2: "Some runs have encountered instabilities due to very large step sizes."
test loss = App. I: "competitive with Adam and K-FAC when comparing the test losses, except for the MLP trained on MNIST."
grid search = 6.2: the rates of Adam and K-FAC, lambda_1 and lambda_int are "selected by grid search"
discrepancy = App. I: "in several cases" one method "might be better than another according to the loss, but worse in terms of accuracy"
loss and accuracy = App. I: it "can achieve smaller test losses than the other methods, while its test accuracy remains slightly lower (BigMLP, VGG)."
finer is better = "the finer the partition, the better the results"
finer is slower = "training with finer partitions takes more time"
memory = "memory usage tends to decrease as the partition becomes finer"
outperforms = 6.2: NewtonSummary "outperforms its diagonal approximation on LeNet and VGG11'"
grid = "its diagonal approximation with a grid of hyperparameters lambda_1 and lambda_int"
lambda_1 = 1 = "the configuration lambda_1 = 1 was tested with VGG11', but resulted in instantaneous divergence"
diagonal = the diagonal approximation "performs worse or is more unstable"
keep = "when training LeNet or VGG11' with CIFAR10, it is better to keep the off-diagonal coefficients"
small times = "For small networks (MLP, LeNet), the training times are very close with the different optimizers"
large K-FAC = with large networks, compared to Adam, "2 times longer with K-FAC"
large times = with large networks "3 times longer with our method"
overhead = the overhead is "either very small or not excessively large compared to K-FAC"
biases = "the learning rates computed for the biases are larger than those computed for the weights"
orders = of the weights alone, eta "can differ by several orders of magnitude"
LeNet = the first two layers of LeNet have smaller eta than the last three
VGG-11' = in VGG, the weights of the last convolutional layers have smaller eta than the first
blocks = "the block-diagonal approximation of the Hessian is indeed very rough, while the block-diagonal approximation of the inverse Hessian seems to be more reasonable"
long range = "there seem to be long-range interactions between layers"
LeNet layers = "For LeNet, all the layers (except the first one) seem to interact together at initialization"
last layers = "In the matrix Hbar^-1 computed on VGG, the last 3 layers interact strongly and the last 6 layers also interact, but a bit less."
all chunks = at the start "all the chunks of the network interact together, even the first one with the last one"
disappear = "after several training steps, the long-range interactions seem to disappear"
tridiagonal = later "the matrices become tridiagonal"
decreasing = the learning rates "are all decreasing during training"
last biases = the biases in the last layers need larger rates than those in the first
first weights = the rate of the weights of the first chunk is smaller than the others
very deep = "our method can be used to train very deep networks"
K-FAC = "we did not manage to tune the learning rate and the damping of K-FAC to make it work in this setup"
near Adam = "close to be competitive with Adam"
generalization = "Adam does not generalize at all, while our method attains a test accuracy around 35 % -- 40 %"
""".strip().splitlines()
)
"""What the paper says, by a short name."""


class Runs:
    """Stored runs, found by recipe."""

    def __init__(self, runs: Sequence[Run]):
        self.all = [run for run in runs if run.epoch > 0]

    def of(self, recipe: str, **changes: object) -> list[Run]:
        """Return the runs of a recipe that differ from it as said alone: the longest of each seed.

        Of two that are as long it is the newer one. Runs that were to have a few epochs, for their times, do not count.
        """
        least = RECIPES[recipe]().epochs / 10
        same = [run for run in self.alike(recipe, **changes) if run.config.epochs >= least]
        same.sort(key=lambda run: (run.epoch, started(run)))
        longest = max((run.epoch for run in same), default=0)
        by_seed = {run.config.seed: run for run in same}
        return [run for run in by_seed.values() if run.diverged or 2 * run.epoch >= longest]

    def alike(self, recipe: str, **changes: object) -> list[Run]:
        """Return all runs of a recipe that differ from it as said alone."""
        config = RECIPES[recipe]()
        config = replace(config, optimizer=replace(config.optimizer, **changes))
        wanted = _method(flatten(config))
        return [run for run in self.all if _method(flatten(run.config)) == wanted]

    def first(self, recipe: str) -> Run | None:
        """Return one run of a recipe that has measurements."""
        return next((run for run in self.of(recipe) if run.summaries()), None)

    def measured_at_best(self, recipe: str) -> Run | None:
        """Return the run of a recipe that was measured nearest to its best epoch."""
        return next(iter(self.measured(recipe)), None)

    def measured(self, recipe: str) -> list[Run]:
        """Return the runs of a recipe that were measured, the nearest to its best epoch first."""
        found = [run for run in self.alike(recipe) if len(full_batch(run)) > 1]
        return sorted(found, key=distance_to_best)


def started(run: Run) -> str:
    """Return when a run was started, empty if that is not known."""
    return min((str(s["started"]) for s in run.environment().get("sessions", ())), default="")


def _method(values: dict[str, object]) -> dict[str, object]:
    return {k: v for k, v in values.items() if k not in PLACES and not k.startswith("measure.")}


def load(paths: Iterable[Path], folder: Path) -> Runs:
    """Read run directories and archives of them, unpacked into a folder."""
    found = []
    for i, path in enumerate(paths):
        if path.is_file():
            with tarfile.open(path) as archive:
                archive.extractall(folder / str(i), filter="data")
            path = folder / str(i)
        found += find_runs([path])
    return Runs(found)


# --- numbers -------------------------------------------------------------------------------------


def lowest(run: Run, epochs: int | None = None, column: str = "train_loss") -> float:
    """Return the lowest loss of a run's first epochs, of all by default; nan if it has none."""
    losses = [row.get(column) for row in run.rows if epochs is None or row["epoch"] <= epochs]
    return min((x for x in losses if x is not None and math.isfinite(x)), default=math.nan)


def common_epochs(*groups: Sequence[Run]) -> int:
    """Return how many epochs all runs have, but for those that diverged."""
    return min((run.epoch for group in groups for run in group if not run.diverged), default=0)


def median(values: Iterable[float]) -> float:
    """Return the median of the finite values, nan without any."""
    finite = [value for value in values if math.isfinite(value)]
    return statistics.median(finite) if finite else math.nan


def spread(values: Sequence[float], form: str = ".3g") -> str:
    """Return the median, with the range where there are several values."""
    finite = sorted(value for value in values if math.isfinite(value))
    if not finite:
        return NOT_RUN if not values else "-"
    text = f"{statistics.median(finite):{form}}"
    return text if len(finite) == 1 else f"{text} ({finite[0]:{form}} to {finite[-1]:{form}})"


def jumps(run: Run, epochs: int | None = None) -> int:
    """Return in how many of a run's first epochs, of all by default, the training loss jumped."""
    losses = run.column("train_loss")[1 : None if epochs is None else epochs + 1]
    return sum(b > JUMP * a for a, b in pairwise(losses))


def verdict(holds: bool) -> str:
    return "reproduced" if holds else "**not reproduced**"


def verdict_of_some(hold: Iterable[bool]) -> str:
    found = list(hold)
    return verdict(all(found)) if all(found) or not any(found) else PARTLY


def table(header: str, rows: Iterable[Sequence[str]]) -> list[str]:
    """Return a table; the header has a bar between columns."""
    columns = header.split(" | ")
    lines = [columns, ["---"] * len(columns), *rows]
    return [*("| " + " | ".join(line) + " |" for line in lines), ""]


def claims(cells: Mapping[str, Cell | None]) -> list[str]:
    """Return a table of claims, by their keys; None is one that was not run."""
    rows = [(CLAIMS[key], *(cell or ("", NOT_RUN))) for key, cell in cells.items()]
    return table("the paper | measured here | ", rows)


def judged(
    found: Mapping[str, T],
    form: Callable[[str, T], str],
    test: Callable[[T], bool],
    before: str = "",
    after: str = "",
) -> Cell | None:
    """Return what was found for each name, and whether all or some of it passes a test."""
    if not found:
        return None
    text = "; ".join(form(name, value) for name, value in found.items())
    return f"{before}{text}{after}", verdict_of_some(map(test, found.values()))


# --- training (Section 6.2, App. I) --------------------------------------------------------------

METHODS: dict[str, str] = {
    "NewtonSummary, as run": "newton_summary",
    "NewtonSummary, as published": "as_published",
    "NewtonSummary, the package's defaults": "default",
    "NewtonSummary, the same with the plateau schedule": "default_plateau",
    "Adam": "adam",
    "K-FAC": "kfac",
    "SGD (of Fig. 1 and 2b; the paper does not show its losses)": "sgd",
}
RIVALS = {"Adam": "adam", "K-FAC": "kfac"}
OURS = ("SGD", "NewtonSummary, the same")  # shown where they were run


def of_recipe(runs: Runs, recipe: str) -> list[Run]:
    """Return the runs of a recipe; K-FAC's cheaper damping counts if alone."""
    found = runs.of(recipe)
    return found or (runs.of(recipe, factored=True) if recipe.endswith("_kfac") else [])


def of_method(runs: Runs, setup: str, suffix: str) -> list[Run]:
    """Return the runs of an optimizer in a setup."""
    return of_recipe(runs, f"{setup}_{suffix}")


def tuned_adam(runs: Runs, setup: str) -> dict[float, list[Run]]:
    """Return Adam's runs by learning rate."""
    found = {rate: runs.of(f"{setup}_adam", lr=rate) for rate in ADAM_RATES}
    return {rate: group for rate, group in found.items() if group}


def best_adam(runs: Runs, setup: str) -> tuple[float, list[Run]] | None:
    """Return Adam's best rate by the median lowest training loss."""
    tried = tuned_adam(runs, setup)
    if not tried:
        return None
    losses = {rate: median(map(lowest, group)) for rate, group in tried.items()}
    rate = min(losses, key=lambda rate: (math.isnan(losses[rate]), losses[rate]))
    return rate, tried[rate]


def training_table(runs: Runs) -> list[str]:
    rows = []
    for setup in SETUPS:
        entries = [(label, of_method(runs, setup, way)) for label, way in METHODS.items()]
        best = best_adam(runs, setup)
        tried = len(tuned_adam(runs, setup))
        if best is not None and tried > 1:
            entries.append((f"Adam at {best[0]:g}, best of {tried} rates", best[1]))
        for label, found in entries:
            if label.startswith(OURS) and not found:
                continue
            if any(getattr(run.config.optimizer, "factored", False) for run in found):
                label += ", factored damping"
            rows.append((_setup(setup), label, *training_cells(found)))
    return table(
        "setup | optimizer | seeds | epochs | lowest training loss | last training loss | "
        "lowest test loss | test accuracy, best validation | jumps | diverged",
        rows,
    )


def training_cells(found: list[Run]) -> tuple[str, ...]:
    if not found:
        return ("0", *[NOT_RUN] * 6, "")
    results = [outcome(run) for run in found]
    epochs = sorted({result.epochs for result in results})
    return (
        f"{len(found)}",
        str(epochs[0]) if len(epochs) == 1 else f"{epochs[0]} to {epochs[-1]}",
        spread([result.best_train_loss for result in results]),
        spread([result.train_loss for result in results]),
        spread([lowest(run, column="test_loss") for run in found], ".4g"),
        spread([100 * result.test_accuracy for result in results], ".1f") + " %",
        spread([jumps(run) for run in found], ".0f"),
        str(sum(run.diverged for run in found) or ""),
    )


def _setup(name: str) -> str:
    return setup_label(RECIPES[f"{name}_adam"]())


def training_claims(runs: Runs) -> list[str]:
    return claims(
        {
            "successful": _successful(runs),
            "training loss": _comparable(runs, "train_loss", COMPARABLE),
            "unstable": _unstable(runs),
            "test loss": _comparable(runs, "test_loss", 1.1),
            "grid search": _grid_search(runs),
            "discrepancy": _discrepancy(runs),
            "loss and accuracy": _loss_and_accuracy(runs),
        }
    )


def _ours(runs: Runs) -> dict[str, list[Run]]:
    found = {setup: runs.of(f"{setup}_newton_summary") for setup in SETUPS}
    return {setup: group for setup, group in found.items() if group}


def _successful(runs: Runs) -> Cell | None:
    found = {}
    for setup, group in _ours(runs).items():
        first = [run.column("train_loss")[1] for run in group]
        least = median(lowest(run) / loss for run, loss in zip(group, first))
        last = median(run.column("train_loss")[-1] / loss for run, loss in zip(group, first))
        found[_setup(setup)] = least, last, sum(run.diverged for run in group)
    return judged(
        found,
        lambda name, x: f"{name} {x[0]:.2g} and {x[1]:.2g}{f', {x[2]} diverged' if x[2] else ''}",
        lambda x: x[1] < 0.5 and x[2] == 0,
        before="training loss over that of the first epoch, lowest and last (medians): ",
        after=". A last one below 0.5 counts, if no run diverged.",
    )


def _unstable(runs: Runs) -> Cell | None:
    ours = _ours(runs)
    if not ours:
        return None
    some = {s: sum(jumps(run) > 0 or run.diverged for run in group) for s, group in ours.items()}
    text = "; ".join(f"{n} of {len(ours[s])} on {_setup(s)}" for s, n in some.items())
    text = f"runs with a jump of the loss by {JUMP} in an epoch, or that diverged: {text}. "
    calm, lost = longest_steps(STEPS)
    if not calm or not lost:
        said = PARTLY if any(some.values()) else verdict(False)
        return f"{text}Their cause is not measured.", said
    text += (
        f"LeNet on a CPU, the longest ten steps of a seed over the median ones until then: "
        f"{', '.join(f'{x:.0f}' for x in sorted(lost))} where the loss then rises by a tenth above its "
        f"lowest, {min(calm):.0f} to {max(calm):.0f} in the {len(calm)} other seeds."
    )
    return text, verdict(any(some.values()) and min(lost) > 2 * max(calm))


def longest_steps(file: Path) -> tuple[list[float], list[float]]:
    """Return how far ten steps moved at most, over the median until then, for each seed.

    First those of seeds whose loss never rises by a tenth above its lowest, then the others.
    """
    seeds: dict[int, list[dict[str, Any]]] = {}
    for line in file.read_text().splitlines() if file.is_file() else ():
        row = json.loads(line)
        seeds.setdefault(row["seed"], []).append(row)
    calm, lost = [], []
    for rows in seeds.values():
        losses = [row["loss"] for row in rows]
        rises = any(loss > 1.1 * min(losses[: i + 1]) for i, loss in enumerate(losses))
        moved = [row["moved"] for row in rows]
        before = [
            statistics.median(x for epoch in moved[:i] for x in epoch) for i in range(1, len(rows))
        ]
        longest = max(max(epoch) / median for epoch, median in zip(moved[1:], before, strict=True))
        (lost if rises else calm).append(longest)
    return calm, lost


def _comparable(runs: Runs, column: str, factor: float) -> Cell | None:
    texts, ratios = [], {}
    for setup, group in _ours(runs).items():
        versus = {}
        for name, way in RIVALS.items():
            others = of_method(runs, setup, way)
            epoch = common_epochs(group, others)
            ours, theirs = (
                median(lowest(run, epoch, column) for run in some) for some in (group, others)
            )
            if math.isfinite(ours / theirs):
                versus[f"{ours / theirs:.3g} of {name}'s at epoch {epoch}"] = ours / theirs
        if versus:
            texts.append(f"{_setup(setup)} {', '.join(versus)}")
            ratios[setup] = max(versus.values())
    if not ratios:
        return None
    holds = all((ratio <= factor) == (setup != "mlp_mnist") for setup, ratio in ratios.items())
    good = [ratio <= factor for setup, ratio in ratios.items() if setup != "mlp_mnist"]
    said = PARTLY if not holds and any(good) else verdict(holds)
    return (
        f"lowest so far (medians): {'; '.join(texts)}. At most {factor:g} of both counts as "
        f"comparable.",
        said,
    )


def _grid_search(runs: Runs) -> Cell | None:
    """Compare Adam's best rate with the printed one."""
    best = {setup: best_adam(runs, setup) for setup in SETUPS if len(tuned_adam(runs, setup)) > 1}
    found = {_setup(s): (x[0], SETUPS[s].adam) for s, x in best.items() if x is not None}
    cell = judged(
        found,
        lambda name, x: f"{name} {x[0]:g} (printed {x[1]:g})",
        lambda x: x[0] == x[1],
        before="Adam's best rate of those that were run, by the training loss: ",
        after=". The grids of K-FAC and NewtonSummary were not run.",
    )
    return cell and (cell[0], PARTLY if cell[1] == verdict(True) else cell[1])


def _discrepancy(runs: Runs) -> Cell | None:
    found = {}
    for setup in SETUPS:
        groups = [of_method(runs, setup, way) for way in ("newton_summary", "adam", "kfac")]
        epochs = common_epochs(*groups)
        tests = [
            (
                median(lowest(run, epochs, "test_loss") for run in group),
                median(_best_accuracy(run, epochs) for run in group),
            )
            for group in groups
            if group
        ]
        differ = [(a[0] - b[0]) * (a[1] - b[1]) > 0 for a, b in combinations(tests, 2)]
        if differ:
            found[setup] = sum(differ), len(differ)
    if not found:
        return None
    text = "; ".join(f"{_setup(s)} {n} of {pairs}" for s, (n, pairs) in found.items())
    count = sum(n for n, _ in found.values())
    before = (
        "pairs of NewtonSummary, Adam and K-FAC that the lowest test loss and the highest accuracy "
        "order differently"
    )
    said = PARTLY if count == 1 else verdict(count > 1)
    return f"{before} (medians): {text}. Two or more count.", said


def _loss_and_accuracy(runs: Runs) -> Cell | None:
    found = {}
    for setup, (name, way) in product(("bigmlp_cifar10", "vgg_cifar10"), RIVALS.items()):
        groups = of_method(runs, setup, "newton_summary"), of_method(runs, setup, way)
        if all(groups):
            epochs = common_epochs(*groups)
            loss, its_loss = (median(lowest(r, epochs, "test_loss") for r in g) for g in groups)
            points, its = (median(_best_accuracy(r, epochs) for r in g) for g in groups)
            ratio, gain = loss / its_loss, 100 * (points - its)
            found[f"{_setup(setup)}, {name}, epoch {epochs}"] = ratio, gain
    return judged(
        found,
        lambda name, x: f"{name}: {x[0]:.3f}, {x[1]:+.1f} points",
        lambda x: x[0] < 1 and x[1] < 0,
        before="lowest test loss over the other's, and difference of the highest accuracies: ",
        after=". Smaller with a lower accuracy counts.",
    )


def _best_accuracy(run: Run, epochs: int) -> float:
    """Return the highest test accuracy of the first epochs, as a curve shows it."""
    rows = [row for row in run.rows if row["epoch"] <= epochs]
    return max((row["test_accuracy"] for row in rows if row.get("test_accuracy")), default=math.nan)


# --- partitions, diagonal, times -----------------------------------------------------------------


def partition_runs(runs: Runs) -> dict[str, list[Run]]:
    """Return the runs of the partition study."""
    suffixes = {name: name.replace("-", "_") for name in PARTITIONS} | {
        "canonical": "newton_summary"
    }
    return {name: runs.of(f"vgg_cifar10_{suffix}") for name, suffix in suffixes.items()}


def partition_section(runs: Runs) -> list[str]:
    rows, losses, times = [], {}, {}
    groups = partition_runs(runs)
    common = common_epochs(*groups.values())
    for name, found in groups.items():
        results = [outcome(run) for run in found]
        loss, seconds, gigabytes = PAPER_PARTITIONS[name]
        at_common = [run.column("train_loss")[common] for run in found if run.epoch >= common]
        if found:
            losses[name] = median(at_common)
        alone = seconds_alone(runs.alike(found[0].config.recipe)) if found else []
        times[name] = median(alone)
        rows.append(
            (
                name,
                str(GROUPS[name]),
                str(len(found)),
                spread(at_common),
                str(max((r.epochs for r in results), default=0) or NOT_RUN),
                spread([result.train_loss for result in results]),
                f"{loss:.3g}",
                spread(alone) if alone else "-",
                f"{seconds / 100:.1f}",
                spread([result.memory_gib for result in results]),
                f"{gigabytes}",
            )
        )
    header = (
        f"partition | S | seeds | training loss, epoch {common} | epochs | last epoch | paper, epoch "
        f"100 | s per epoch, alone | paper | memory GiB | paper, GB"
    )
    order = sorted(losses, key=lambda name: -losses[name])
    printed = sorted(PAPER_PARTITIONS, key=lambda name: -PAPER_PARTITIONS[name][0])
    cell: Cell | None = None
    if len(losses) == len(PARTITIONS):
        pairs = [(a, b) for a, b in combinations(PARTITIONS, 2) if GROUPS[a] < GROUPS[b]]
        hold = [losses[b] < losses[a] for a, b in pairs]
        cell = (
            f"it holds for {sum(hold)} of {len(hold)} pairs with different S; from worst to best at "
            f"epoch {common}: {', '.join(order)} (printed: {', '.join(printed)})",
            verdict_of_some(hold),
        )
    finer = {"finer is better": cell, "finer is slower": None, "memory": _memory(runs, groups)}
    timed = [name for name in PARTITIONS if math.isfinite(times[name])]
    if len(timed) > 1:
        ratio = times[timed[-1]] / times[timed[0]]
        text = f"{timed[-1]} over {timed[0]}: {ratio:.2f} (paper 1.84). More than {LONGER} counts."
        finer["finer is slower"] = text, verdict(ratio > LONGER)
    return table(header, rows) + claims(finer)


def _memory(runs: Runs, groups: Mapping[str, list[Run]]) -> Cell | None:
    """Compare the memory of the partitions in the runs for the times, all launched alike."""
    values = {
        name: median(
            outcome(run).memory_gib
            for run in runs.alike(found[0].config.recipe)
            if seconds_alone([run])
        )
        for name, found in groups.items()
        if found
    }
    if sum(map(math.isfinite, values.values())) < len(PARTITIONS):
        return None
    text = ", ".join(f"{values[name]:.2f}" for name in PARTITIONS)
    falls = (
        values[b] <= values[a] for a, b in combinations(PARTITIONS, 2) if GROUPS[a] < GROUPS[b]
    )
    return f"GiB, from trivial to canonical, alone on the machine: {text}", verdict(all(falls))


class Versus(NamedTuple):
    """The best diagonal runs against those with the whole Hbar, in the epochs that all have."""

    loss: float  # ratios
    test_loss: float
    jumps: float
    their_jumps: float

    @classmethod
    def of(cls, whole: list[Run], tried: list[list[Run]], epochs: int) -> Versus:
        best = min(tried, key=lambda group: median(lowest(run, epochs) for run in group))
        losses, tests = (
            [median(lowest(run, epochs, column) for run in some) for some in (best, whole)]
            for column in ("train_loss", "test_loss")
        )
        jumped = (median(jumps(run, epochs) for run in some) for some in (best, whole))
        return cls(losses[0] / losses[1], tests[0] / tests[1], *jumped)


def diagonal_runs(runs: Runs, recipe: str) -> dict[tuple[float, float], list[Run]]:
    """Return the diagonal runs by lambda_1 and lambda_int."""
    optimizers = [run.config.optimizer for run in runs.all if run.config.recipe == recipe]
    known = sorted({(o.lr, o.lambda_int) for o in optimizers})  # type: ignore[attr-defined]
    groups = {key: runs.of(recipe, lr=key[0], lambda_int=key[1]) for key in known}
    return {key: group for key, group in groups.items() if group}


def diagonal_section(runs: Runs) -> list[str]:
    rows, found, settings = [], {}, {}
    for setup in ("lenet_cifar10", "vgg_cifar10"):
        whole, groups = runs.of(f"{setup}_newton_summary"), diagonal_runs(runs, f"{setup}_diagonal")
        rows.append((_setup(setup), "whole", "the table's", *_diagonal_cells(whole)))
        for (lr, strength), group in groups.items():
            setting = f"lambda_1 {lr:g}, lambda_int {strength:g}"
            rows.append((_setup(setup), "diagonal", setting, *_diagonal_cells(group)))
        settings[setup] = list(groups)
        epochs = max((run.epoch for group in groups.values() for run in group), default=0)
        tried = [some for some in groups.values() if 2 * max(run.epoch for run in some) >= epochs]
        if whole and tried:
            common = common_epochs(whole, *tried)
            found[f"{_setup(setup)}, epoch {common}"] = Versus.of(whole, tried, common)
    header = (
        "setup | Hbar | setting | seeds | epochs | lowest training loss | lowest test loss | "
        "test accuracy, best validation | jumps | diverged"
    )
    return table(header, rows) + claims(
        {
            "outperforms": judged(
                found,
                lambda name, x: f"{name}: training loss {x.loss:.3g}, test loss {x.test_loss:.3g}",
                lambda x: x.loss > 1,
                before="the best diagonal run over the whole Hbar, ",
                after=". Judged by the training loss.",
            ),
            "diagonal": _worse_or_unstable(found),
            "keep": _better_to_keep(found),
            "lambda_1 = 1": _diverges_at_once(runs),
            "grid": _grid(settings),
        }
    )


def _worse_or_unstable(found: Mapping[str, Versus]) -> Cell | None:
    return judged(
        found,
        lambda name, x: (
            f"{name}: {x.loss:.3g}, with {x.jumps:.0f} jumps against {x.their_jumps:.0f}"
        ),
        lambda x: x.loss > 1 or x.jumps > x.their_jumps,
        before="lowest loss of the best diagonal run over that with the whole Hbar: ",
        after=". A higher loss or more jumps counts.",
    )


def _better_to_keep(found: Mapping[str, Versus]) -> Cell | None:
    """Judge by both losses: whether the whole matrix is better in what was asked for."""
    ratios = {
        f"{name}, {kind}": ratio
        for name, x in found.items()
        for kind, ratio in (("training loss", x.loss), ("test loss", x.test_loss))
    }
    return judged(
        ratios,
        lambda name, ratio: f"{name} {ratio:.3g}",
        lambda ratio: ratio > 1,
        before="the best diagonal run over the whole Hbar: ",
        after=". Above 1 counts.",
    )


def _diverges_at_once(runs: Runs) -> Cell:
    found = runs.of("vgg_cifar10_diagonal", lr=1.0)
    if not found:
        command = "newton-summary run vgg_cifar10_diagonal --optimizer.lr 1"
        return f"It would take one run of at most four minutes, `{command}`.", NOT_RUN
    ends = ", ".join(f"{run.epoch}{' (diverged)' if run.diverged else ''}" for run in found)
    return f"last epochs: {ends}", verdict_of_some(r.diverged and r.epoch <= 1 for r in found)


def _grid(settings: Mapping[str, Sequence[tuple[float, float]]]) -> Cell | None:
    """Say which settings were run; a grid has several values of both."""
    if not any(settings.values()):
        return None
    values = {s: [sorted(set(column)) for column in zip(*some)] for s, some in settings.items()}
    text = "; ".join(
        f"{_setup(s)}, lambda_1 {', '.join(f'{x:g}' for x in lr)} and lambda_int "
        f"{', '.join(f'{x:g}' for x in strength)}"
        for s, (lr, strength) in ((s, some) for s, some in values.items() if some)
    )
    grids = [bool(some) and min(map(len, some)) > 1 for some in values.values()]
    if all(grids):
        return text, verdict(True)
    lacking = "no grid on one of them" if any(grids) else "no grid"
    return (
        f"{lacking}: {text}. Twelve settings of a network take about an hour of the GPU.",
        PARTLY if any(grids) else NOT_RUN,
    )


def _diagonal_cells(found: list[Run]) -> tuple[str, ...]:
    return (
        str(len(found)),
        str(max((run.epoch for run in found), default=0) or NOT_RUN),
        spread([lowest(run) for run in found]),
        spread([lowest(run, column="test_loss") for run in found], ".4g"),
        spread([100 * outcome(run).test_accuracy for run in found], ".1f") + " %" * bool(found),
        spread([jumps(run) for run in found], ".0f"),
        str(sum(run.diverged for run in found) or ""),
    )


def seconds_alone(found: Iterable[Run]) -> list[float]:
    """Return the seconds per epoch of runs that were alone, with passes as torch launches them.

    The first epoch counts only if there is no other: kernels are compiled and graphs captured in it.
    """
    return [
        median(
            [row["seconds"] for row in run.rows if row["epoch"] > 1] or [run.rows[-1]["seconds"]]
        )
        for run in found
        if ran_alone(run) and not run.config.graph_steps
    ]


TIMED = RIVALS | {"NewtonSummary": "newton_summary"}


def times_section(runs: Runs) -> list[str]:
    rows, ratios = [], {}
    for setup in SETUPS:
        label = _setup(setup)
        paper = PAPER_TIMES[label]
        epochs = SETUPS[setup].epochs
        alone = {
            name: median(seconds_alone(runs.alike(f"{setup}_{way}"))) for name, way in TIMED.items()
        }
        factored = math.isnan(alone["K-FAC"])
        if factored:
            alone["K-FAC"] = median(seconds_alone(runs.alike(f"{setup}_kfac", factored=True)))
        ours = [run for run in runs.alike(f"{setup}_newton_summary") if seconds_alone([run])]
        beside = [run.environment().get("adam_seconds") for run in ours]
        if math.isnan(alone["Adam"]):  # timed at the end of a run of NewtonSummary, if not itself
            alone["Adam"] = median(float(seconds) for seconds in beside if seconds)
        for name, seconds in alone.items():
            ratio = seconds / alone["Adam"]
            ratios[setup, name] = ratio
            rows.append(
                (
                    label,
                    name + (", factored damping" if name == "K-FAC" and factored else ""),
                    NOT_RUN if math.isnan(seconds) else f"{seconds:.3g}",
                    NOT_RUN if math.isnan(ratio) else f"{ratio:.2f}",
                    f"{paper[name] / epochs:.3g}",
                    f"{paper[name] / paper['Adam']:.2f}",
                )
            )
    header = "setup | optimizer | s per epoch | over Adam | paper, s per epoch | paper, over Adam"
    return table(header, rows) + time_claims(ratios, by_turns(EPOCHS) if runs.all else {})


def by_turns(file: Path) -> dict[tuple[str, str], float]:
    """Return the newest ratios of whole epochs that were timed by turns, by setup."""
    if not file.is_file():
        return {}
    newest = json.loads(file.read_text())["later"][-1]["epochs"]
    return {(s, "NewtonSummary"): x["NewtonSummary"] / x["fused Adam"] for s, x in newest.items()}


def time_claims(
    ratios: Mapping[tuple[str, str], float], turns: Mapping[tuple[str, str], float]
) -> list[str]:
    """Judge the times over Adam's, by setup and optimizer; those by turns count where known."""
    small, large = ("mlp_mnist", "lenet_cifar10"), ("bigmlp_cifar10", "vgg_cifar10")

    def close(
        names: Sequence[str], setups: Sequence[str], least: float, most: float
    ) -> Cell | None:
        known = {
            f"{name}, {_setup(s)}{' (by turns)' * ((s, name) in turns)}": turns.get(
                (s, name), ratios[s, name]
            )
            for name in names
            for s in setups
        }
        return judged(
            {key: ratio for key, ratio in known.items() if math.isfinite(ratio)},
            lambda key, ratio: f"{key} {ratio:.2f}",
            lambda ratio: least <= ratio <= most,
            before="over Adam: ",
            after=f". {least:.2g} to {most:.2g} counts.",
        )

    return claims(
        {
            "small times": close(("NewtonSummary", "K-FAC"), small, 0, 1.3),
            "large K-FAC": close(("K-FAC",), large, 1.5, 2.5),
            "large times": close(("NewtonSummary",), large, 2, 4),
            "overhead": _overhead(ratios),
        }
    )


def _overhead(ratios: Mapping[tuple[str, str], float]) -> Cell | None:
    """Compare NewtonSummary with our K-FAC, and with the paper's beside Adam."""
    found = {}
    for setup in SETUPS:
        ours, kfac, paper = ratios[setup, "NewtonSummary"], ratios[setup, "K-FAC"], _setup(setup)
        theirs = PAPER_TIMES[paper]["K-FAC"] / PAPER_TIMES[paper]["Adam"]
        if math.isfinite(ours / kfac):
            found[setup] = ours / kfac, ours / theirs
    return judged(
        found,
        lambda s, x: f"{_setup(s)} {x[0]:.2f} / {x[1]:.2f}",
        lambda x: max(x) <= 1.5,
        before="over our K-FAC / over the paper's (both beside Adam): ",
        after=". At most 1.5 counts.",
    )


# --- Hbar and eta (Section 6.1, App. H) ----------------------------------------------------------


def full_batch(run: Run) -> list[Measured]:
    """Return the measurements on all of the data."""
    return [m for m in run.summaries() if m.kind == "full"]


def best_epoch(run: Run) -> int:
    """Return the epoch of the lowest validation loss, before which the paper measures."""
    return int(best_row(run).get("epoch", 0))


def distance_to_best(run: Run) -> float:
    """Return by how many epochs the nearest measurement misses the best epoch."""
    return min(abs(m.epoch - best_epoch(run)) for m in full_batch(run))


def chosen(run: Run, epoch: int | None = None) -> list[tuple[str, Measured]]:
    """Return the full-batch measurements at the start and at an epoch, the best by default."""
    full = full_batch(run)
    if not full:
        return []
    wanted = best_epoch(run) if epoch is None else epoch
    later = min(full, key=lambda m: abs(m.epoch - wanted))
    return [("start", full[0]), (f"epoch {later.epoch:g}", later)]


def kept_table(named: Sequence[tuple[str, Run, int | None]]) -> list[str]:
    rows = []
    for label, run, epoch in named:
        for when, measured in chosen(run, epoch):
            kept = inverse_kept(measured.summary)
            cells = [
                f"{100 * i:.0f} % / {100 * h:.0f} %" for i, h in zip(kept.inverse, kept.hessian)
            ]
            rows.append((f"{label}, {when}", *cells))
    header = (
        "share of the squares: inverse / Hbar | diagonal | one block a layer | neighbouring layers"
    )
    return table(header, rows) if rows else [NOT_RUN, ""]


def weight_rates(run: Run) -> tuple[list[list[float]], list[list[float]]]:
    """Return the positive rates of each layer's weights and biases over all measurements."""
    full = full_batch(run)
    roles = full[0].summary.partition.roles if full and full[0].summary.partition else ()
    by_role = {"weight": [], "bias": []}  # type: dict[str, list[list[float]]]
    for s, role in enumerate(roles):
        by_role[role].append([float(m.eta[s]) for m in full if float(m.eta[s]) > 0])
    return by_role["weight"], by_role["bias"]


def eta_claims(lenet: Run | None, vgg: Run | None) -> list[str]:
    named = {name: run for name, run in (("LeNet", lenet), ("VGG-11'", vgg)) if run is not None}
    rates = {name: weight_rates(run) for name, run in named.items()}
    cells: dict[str, Cell | None] = {
        "biases": _larger_biases(rates),
        "orders": None,
        "LeNet": None,
        "VGG-11'": None,
    }
    orders = {}
    for name, (weights, _) in rates.items():
        middle = [median(some) for some in weights]
        known = [m for m in middle if m > 0]
        orders[name] = math.log10(max(known) / min(known))
        if name == "LeNet":
            pairs = [first < last for first in middle[:2] for last in middle[2:]]
        else:
            *convolutions, _ = middle
            half = len(convolutions) // 2
            pairs = [a > b for a in convolutions[:half] for b in convolutions[half:]]
        cells[name] = (
            f"{name}, medians of the positive rates by layer: "
            f"{', '.join(f'{m:.2g}' for m in middle)} (positive in "
            f"{', '.join(str(len(some)) for some in weights)} of {len(full_batch(named[name]))} "
            f"measurements). It holds for {sum(pairs)} of {len(pairs)} pairs of layers.",
            verdict(all(pairs)),
        )
    if orders:
        text = "; ".join(f"{name}: by {x:.1f} orders" for name, x in orders.items())
        cells["orders"] = f"{text}. Two in one network count.", verdict(max(orders.values()) >= 2)
    return claims(cells)


def _larger_biases(rates: Mapping[str, tuple[list[list[float]], list[list[float]]]]) -> Cell | None:
    found = {}
    for name, (weights, biases) in rates.items():
        larger = [median(b) > median(w) for w, b in zip(weights, biases) if w and b]
        counts = "; ".join(", ".join(str(len(x)) for x in some) for some in (weights, biases))
        found[name] = sum(larger), len(larger), counts
    return judged(
        found,
        lambda name, x: (
            f"{name}: in {x[0]} of {x[1]} layers (positive rates of weights and biases, by layer: "
            f"{x[2]})"
        ),
        lambda x: x[0] == x[1],
        before="medians of the positive rates, ",
        after=". Layers whose weights or biases never have a positive rate are left out.",
    )


def hbar_claims(runs: Runs) -> list[str]:
    lenet = runs.measured_at_best("lenet_cifar10_sgd")
    every_vgg = runs.measured("vgg_cifar10_sgd")
    vgg = next(iter(every_vgg), None)
    kept = {
        f"{name}, {when}": inverse_kept(measured.summary)
        for name, run in (("LeNet", lenet), ("VGG-11'", vgg))
        if run is not None
        for when, measured in chosen(run)
    }
    rough = judged(
        kept,
        lambda name, k: (
            f"{name}: {100 * k.inverse[1]:.0f} % of the inverse, {100 * k.hessian[1]:.0f} % of Hbar"
        ),
        lambda k: k.inverse[1] > k.hessian[1],
        before="kept by blocks: ",
    )
    long = judged(
        {name: 1 - k.hessian[2] for name, k in kept.items()},
        lambda name, x: f"{name}: {100 * x:.0f} %",
        lambda x: x >= FAR,
        before="share of Hbar beyond neighbouring layers: ",
        after=f". At least {100 * FAR:.0f} % counts.",
    )
    first = None if lenet is None else _all_but_first(chosen(lenet)[0][1].summary)
    ends = _last_layers(every_vgg)
    cells = {"blocks": rough, "long range": long, "LeNet layers": first, "last layers": ends}
    return claims(cells)


def sizes(
    matrix: Tensor, layers: Sequence[int], least: int, end: int
) -> dict[tuple[int, int], float]:
    """Return the sizes of the entries between two layers from one number up to another."""
    inside = [(s, layer) for s, layer in enumerate(layers) if least <= layer < end]
    return {(s, t): abs(float(matrix[s, t])) for s, a in inside for t, b in inside if a < b}


def _all_but_first(summary: Summary) -> Cell:
    matrix, layers = normalized(summary), layer_numbers(summary)
    others = list(sizes(matrix, layers, 1, len(layers)).values())
    first = [
        abs(float(matrix[s, t]))
        for s, a in enumerate(layers)
        if a == 0
        for t, b in enumerate(layers)
        if b > 0
    ]
    said = [f"{min(x):.2g} to {max(x):.2g}, median {median(x):.2g}" for x in (others, first)]
    return (
        f"sizes in Hbar, scaled to a unit diagonal: among the other layers {said[0]}; of the first "
        f"with the others {said[1]}. From {FAR:g} on they interact.",
        verdict_of_some([min(others) >= FAR, median(first) < FAR]),
    )


def _last_layers(every: Sequence[Run]) -> Cell | None:
    found = {}
    for run in every:
        when, measured = chosen(run)[1]
        inverse = normalized(measured.summary.inverse(without_dead=True))
        layers = layer_numbers(measured.summary)
        count = max(layers) + 1
        three, six, others = (
            sizes(inverse, layers, *some)
            for some in ((count - 3, count), (count - 6, count), (0, count - 6))
        )
        rest = {pair: size for pair, size in six.items() if pair not in three}
        values = [median(x.values()) for x in (three, rest, others)]
        found[f"{when} of {run.epoch}"] = values
    return judged(
        found,
        lambda when, x: (
            f"{when}: last 3 {x[0]:.2g}, the other pairs of the last 6 {x[1]:.2g}, the first layers "
            f"{x[2]:.2g}"
        ),
        lambda x: x[0] > x[1] > x[2],
        before="median size of an interaction, in each run, ",
    )


NO_KFAC = (
    "`newton-summary run vbigmlp_cifar10_kfac`. K-FAC takes 6.3 s per epoch on BigMLP, and VBigMLP "
    "has five times its layers: six settings of 100 epochs would take about five hours of the GPU."
)


def vbig_section(runs: Runs) -> list[str]:
    ours, adam = runs.of("vbigmlp_cifar10"), runs.of("vbigmlp_cifar10_adam")
    run = next((run for run in ours if any(m.kind == "full" for m in run.summaries())), None)
    keys = ("all chunks", "disappear", "tridiagonal", "decreasing", "last biases", "first weights")
    ends = ("very deep", "near Adam", "K-FAC", "generalization")
    cells: dict[str, Cell | None] = dict.fromkeys((*keys, *ends))
    cells["K-FAC"] = NO_KFAC, NOT_RUN
    if run is not None:
        (_, start), (when, later) = chosen(run, 100)
        chunks = normalized(start.summary)[::2, ::2].abs()
        pairs = chunks[tuple(torch.triu_indices(*chunks.shape, offset=1))]
        cells["all chunks"] = (
            f"weights of the first and the last chunk: {float(chunks[0, -1]):.2g}; the smallest of "
            f"all pairs of chunks: {float(pairs.min()):.2g}. From {FAR:g} on they interact.",
            verdict(float(pairs.min()) >= FAR),
        )
        kept = [inverse_kept(m.summary) for m in (start, later)]
        cells["disappear"] = judged(
            {
                "Hbar": [1 - k.hessian[2] for k in kept],
                "the inverse": [1 - k.inverse[2] for k in kept],
            },
            lambda name, x: f"of {name} {100 * x[0]:.0f} % and {100 * x[1]:.0f} %",
            lambda x: x[1] < min(FAR, x[0]),
            before=f"share beyond neighbouring chunks at the start and at {when}: ",
            after=f". Less than {100 * FAR:.0f} % counts.",
        )
        text = ", ".join(f"{100 * k.hessian[2]:.0f} % / {100 * k.inverse[2]:.0f} %" for k in kept)
        cells["tridiagonal"] = (
            f"neighbouring chunks hold, of Hbar / inverse, at the start and at {when}: {text}. More "
            f"than at the start, and than 90 %, counts.",
            verdict_of_some(
                after > before and after > 0.9
                for before, after in (
                    (kept[0].hessian[2], kept[1].hessian[2]),
                    (kept[0].inverse[2], kept[1].inverse[2]),
                )
            ),
        )
        full = [m for m in run.summaries() if m.kind == "full"]
        parts = full[: len(full) // 2], full[len(full) // 2 :]
        S = len(full[0].eta)
        early, late = ([median(float(m.eta[s]) for m in part) for s in range(S)] for part in parts)
        count = sum(b < a for a, b in zip(early, late))
        text = f"{count} of {S} fall from the first to the second half"
        cells["decreasing"] = text, verdict(count == S)
        weights, biases = ([median(rates) for rates in some] for some in weight_rates(run))
        text = "biases, first to last chunk: " + ", ".join(f"{m:.2g}" for m in biases)
        cells["last biases"] = text, verdict(biases[-1] > biases[0])
        text = "weights, first to last chunk: " + ", ".join(f"{m:.2g}" for m in weights)
        cells["first weights"] = text, verdict(weights[0] == min(weights))
    if ours:
        loss = median(map(lowest, ours))
        text = (
            f"training loss {loss:.2g} after {ours[0].epoch} epochs; guessing has "
            f"{math.log(10):.2f}, of which half counts"
        )
        cells["very deep"] = text, verdict(loss < math.log(10) / 2)
    if ours and adam:
        epoch = common_epochs(ours, adam)
        mine, its = (median(lowest(run, epoch) for run in some) for some in (ours, adam))
        ratio = mine / its
        text = f"lowest training loss over Adam's, epoch {epoch}: {ratio:.3g}. At most 2 counts."
        cells["near Adam"] = text, verdict(ratio <= COMPARABLE)
    if ours:
        mine, its = ([100 * outcome(r).test_accuracy for r in x] for x in (ours, adam))
        text = f"test accuracy {spread(mine, '.1f')} %, Adam "
        text += f"{spread(its, '.1f')} %" if adam else NOT_RUN
        text += ". 35 % and more counts, and less than 15 % for Adam."
        hold = [median(mine) >= 35, bool(adam) and median(its) < 15]
        cells["generalization"] = text, verdict_of_some(hold)
    return claims(cells)


# --- the page ------------------------------------------------------------------------------------

INTRODUCTION = """\
# The paper's experiments

This page takes every claim of the paper's Section 6 and Appendices H to M, and says what we
measured and whether the claim holds. Numbers are medians over seeds, with the range in parentheses.
"not run" marks what the stored runs do not contain. `benchmarks/results_page.py` writes the page
from stored runs: see [Commands](#commands).

## What was run

The paper's text (Appendix G) and its author's public scripts (p-wol/GroupedNewton on GitHub) differ.
The recipes follow the scripts, which made the figures, as we infer from names ("final"), seeds (five)
and settings (those of the paper's tables). `--optimizer.variant as-published` follows the text.

| | as published (text) | as run (scripts) |
|---|---|---|
| curvature batch B | 1000, drawn at random | **100**, in order, never shuffled |
| start | first refresh at step tau, along tau gradients | refreshes at steps 0, tau, 2 tau without a move; first move at step 3 tau |
| window | the last 3 refreshes | the last 3, 4, 5, 3, 4, 5, ... |
| averaged in it | D, that is abs(D3)^(1/3) | D3 with its sign |
| plateau schedule | torch's | the same, except that it forgets the best loss when it halves the rate |
| MLP | "layers of sizes 1024, 200, 100, 10" | 784-1024-200-100-10 on 28 x 28 images: S = 8, 1,029,950 parameters |
| VBigMLP | "100 layers", S = 2L = 200 | 100 layers of 1024 and a classification layer: 202 tensors, in 5 chunks S = 10 |

- **As published** on VGG-11' and BigMLP are runs of 17 and 18 November, which still averaged D3 with
  its sign.
- **Learning rates.** Only NewtonSummary has the plateau schedule. Adam, K-FAC and SGD keep the rates
  of the paper's table. The paper gives no rates for SGD, nor for Adam on VBigMLP; those are ours.
- **Data.** The validation set (6,000 images of MNIST, 5,000 of CIFAR-10) is the same for all seeds.
- **K-FAC** is our own implementation, with the conventions of the package that the paper used:
  covariances averaged from the identity (0.95), (A (x) G + lambda I)^-1 by eigenvectors, kl_clip
  0.01, weight decay 0.003 from the twentieth covariance on. In rows marked "factored damping", the
  root of lambda is added to A and G instead (`--optimizer.factored`), which is cheaper and damps more.
- **Precision.** VGG-11' rounds products and convolutions to TF32 for all optimizers (`--tf32`, the
  recipe's default).
"""

COMMANDS = """\
## Commands

The page is written from the stored archives by

    python benchmarks/results_page.py benchmarks/results/paper-*.tar.gz

New runs, side by side up to a deadline, and a page from them:

    python benchmarks/paper_runs.py --data DATA --work runs --workers 16 --pack runs.tar.gz
    python benchmarks/results_page.py runs.tar.gz

One by one:

    newton-summary run lenet_cifar10_newton_summary --data-root DATA
    newton-summary sweep lenet_cifar10_adam --optimizer.lr 1e-5,3e-5,1e-4,3e-4,1e-3,3e-3,1e-2 --seed 0,1,2
    newton-summary report runs
"""


def page(runs: Runs, pictures: Path) -> str:
    """Return the page, and draw its pictures into a folder."""
    lenet, vgg = runs.first("lenet_cifar10_sgd"), runs.first("vgg_cifar10_sgd")
    at_best = [runs.measured_at_best(f"{setup}_sgd") for setup in ("lenet_cifar10", "vgg_cifar10")]
    vbig = runs.first("vbigmlp_cifar10")

    def measured(lenet: Run | None, vgg: Run | None) -> list[tuple[str, Run, int | None]]:
        named = [("LeNet", lenet, None), ("VGG-11'", vgg, None), ("VBigMLP", vbig, 100)]
        return [(label, run, epoch) for label, run, epoch in named if run is not None]

    four = [
        run
        for setup in SETUPS
        for way in ("newton_summary", "adam", "kfac")
        for run in of_method(runs, setup, way)
    ]
    studied = [run for found in partition_runs(runs).values() for run in found]
    draw = Pictures(pictures)
    sections = [
        "## Training and test (Section 6.2, Fig. 2a, App. I)",
        "",
        "The paper shows curves without numbers, except for VGG-11' (App. J: 3.05e-4 after 100 epochs). A *jump* is an "
        f"epoch whose training loss is more than {JUMP} times that of the epoch before. The *last* training loss leaves out "
        "runs that diverged; all other columns count them, up to where they diverged.",
        "",
        *training_table(runs),
        *shorter(runs),
        *draw("training.png", "training loss by epoch", training_curves(four) if four else None),
        *draw("test.png", "test loss and accuracy", draw_test_curves(four) if four else None),
        *training_claims(runs),
        *([NOTES.read_text()] if NOTES.is_file() else []),
        "## Interactions between layers (Section 6.1, Fig. 1)",
        "",
        *kept_table(measured(*at_best)),
        *hbar_claims(runs),
        *(
            line
            for label, run, epoch in measured(*at_best)
            for line in draw(
                f"{_file(label)}_hbar.png",
                f"Hbar and its inverse, {label}",
                hessian_figure(run, epoch),
            )
        ),
        "## Learning rates over training (Section 6.1, Fig. 2b)",
        "",
        *eta_claims(lenet, vgg),
        *(
            line
            for label, run, epoch in measured(lenet, vgg)
            for line in draw(
                f"{_file(label)}_eta.png",
                f"learning rates, {label}",
                eta_figure(run, _window(run, 40 if epoch else 20)),
            )
        ),
        "## A very deep perceptron (App. H)",
        "",
        *vbig_section(runs),
        "## Choice of the partition (App. J)",
        "",
        *partition_section(runs),
        *draw(
            "partitions.png",
            "training loss by partition",
            partition_curves(studied) if studied else None,
        ),
        "## Diagonal approximation (App. K)",
        "",
        *diagonal_section(runs),
        "## Times (App. M)",
        "",
        "Only runs that were alone on the machine, and whose forward and backward passes were not replayed as CUDA graphs. Adam is "
        "torch's fused Adam. Newer measurements of a step are under [What the runs say](#what-the-runs-say).",
        "",
        *times_section(runs),
    ]
    return "\n".join([INTRODUCTION, *machines(runs), *tally(sections), *sections, COMMANDS])


def tally(lines: Iterable[str]) -> list[str]:
    """Count the verdicts of each section; nothing where no claim was run."""
    kinds = (verdict(True), PARTLY, verdict(False), NOT_RUN)
    counts: dict[str, list[int]] = {}
    for line in lines:
        if line.startswith("## "):
            counts[line.removeprefix("## ")] = [0] * len(kinds)
        cell = line.split("|")[-2].strip() if line.startswith("| ") else ""
        if cell in kinds:
            list(counts.values())[-1][kinds.index(cell)] += 1
    rows = [(title, *map(str, found)) for title, found in counts.items() if any(found)]
    if not any(sum(found[:-1]) for found in counts.values()):
        return []
    total = [f"**{sum(column)}**" for column in zip(*counts.values(), strict=True)]
    header = "claims about | reproduced | partly | not reproduced | not run"
    about = (
        "A claim about several networks, or of several parts, is *reproduced* where all of it holds, and *partly* "
        "where some does. A claim about all layers of a network needs all of them."
    )
    return ["## What came out", "", about, "", *table(header, [*rows, ("**all**", *total)])]


class Pictures:
    """Draws figures into a folder and gives the lines that show them."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __call__(self, name: str, title: str, figure: object) -> list[str]:
        """Return the lines of a picture, none without a figure."""
        if figure is None:
            return []
        self.folder.mkdir(parents=True, exist_ok=True)
        figure.savefig(self.folder / name, dpi=110)
        return [f"![{title}]({self.folder.name}/{name})", ""]


def _window(run: Run, window: int) -> int | None:
    return window if run.epoch >= 2 * window else None


def _file(label: str) -> str:
    return "".join(c for c in label.lower() if c.isalnum())


def shorter(runs: Runs) -> list[str]:
    """Name the recipes whose runs have fewer epochs than the paper's."""
    lengths: dict[str, list[int]] = {}
    for recipe in sorted({run.config.recipe for run in runs.all} & set(RECIPES)):
        epochs = [run.epoch for run in of_recipe(runs, recipe) if not run.diverged]
        if epochs and min(epochs) < RECIPES[recipe]().epochs:
            lengths[recipe] = sorted({min(epochs), max(epochs)})
    short = [
        f"`{name}` ({' to '.join(map(str, epochs))} of {RECIPES[name]().epochs})"
        for name, epochs in lengths.items()
    ]
    return (
        [f"Recipes with fewer epochs than in the paper: {', '.join(short)}.", ""] if short else []
    )


def machines(runs: Runs) -> list[str]:
    """Say where and when the runs were made."""
    found: Counter[str] = Counter()
    days = set()
    for run in runs.all:
        sessions = run.environment().get("sessions", [])
        days |= {str(s["started"])[:10] for s in sessions}
        places = {f"{s.get('gpu') or s['device'].upper()}, torch {s['torch']}" for s in sessions}
        found[" and ".join(sorted(places))] += bool(sessions)
    if not days:
        return ["No runs are stored.", ""]
    where = "; ".join(f"{n} on {place}" for place, n in found.most_common() if n)
    return [
        f"{len(runs.all)} runs, {min(days)}{'' if len(days) == 1 else ' to ' + max(days)}: {where}.",
        "",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("runs", nargs="*", type=Path, help="run directories, or archives of them")
    parser.add_argument("--out", type=Path, default=Path("docs/results.md"))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = load(args.runs, Path(folder)) if args.runs else Runs([])
        args.out.write_text(page(runs, args.out.with_suffix("")))


if __name__ == "__main__":
    main()
