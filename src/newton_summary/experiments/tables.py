"""The paper's tables from run directories, each next to the paper's own values."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import wraps
from operator import attrgetter

from newton_summary.display.names import markdown_text, printable
from newton_summary.experiments.config import NewtonSummaryConfig
from newton_summary.experiments.recipes import PARTITIONS
from newton_summary.experiments.results import (
    Spread,
    group_by,
    is_paper_mode,
    method_labels,
    outcome,
    setup_label,
    spread,
    troubles,
)
from newton_summary.experiments.rundir import Run

# App. J: training loss, seconds, gigabytes; VGG-11' on CIFAR-10, 100 epochs.
PAPER_PARTITIONS = {
    "trivial": (8.12e-1, 2512, 2.49),
    "weights-biases": (7.64e-1, 2855, 2.49),
    "blocks-2": (5.94e-1, 3182, 2.38),
    "alternate-2": (5.70e-1, 3422, 2.08),
    "blocks-4": (1.50e-2, 3674, 1.97),
    "alternate-4": (5.37e-2, 4180, 1.91),
    "canonical": (3.05e-4, 4612, 1.88),
}

# App. M: seconds of whole runs.
PAPER_TIMES = {
    "MLP / MNIST": {"Adam": 2848, "K-FAC": 2953, "NewtonSummary": 3315},
    "LeNet / CIFAR-10": {"Adam": 2944, "K-FAC": 3022, "NewtonSummary": 3369},
    "BigMLP / CIFAR-10": {"Adam": 1777, "K-FAC": 2989, "NewtonSummary": 4365},
    "VGG-11' / CIFAR-10": {"Adam": 1696, "K-FAC": 3117, "NewtonSummary": 4613},
}


Row = list[tuple[str, str]]  # the title of each column, and the cell
Rows = Callable[[Sequence[Run]], Iterator[Row]]


@dataclass(frozen=True)
class Table:
    """Rows of text, with a name for files and a title for readers."""

    name: str
    title: str
    header: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    note: str = ""

    def markdown(self) -> str:
        """Return the table in Markdown."""
        lines = [f"### {self.title}", ""]
        for cells in (self.header, ("---",) * len(self.header), *self.rows):
            shown = cells if cells[0] == "---" else map(markdown_text, cells)
            lines.append("| " + " | ".join(shown) + " |")
        return "\n".join([*lines, "", *([self.note, ""] if self.note else [])])

    def csv(self) -> str:
        """Return the table as comma-separated values."""
        stream = io.StringIO()
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerows([map(_csv_cell, row) for row in (self.header, *self.rows)])
        return stream.getvalue()


def table(name: str, title: str, note: str = "") -> Callable[[Rows], Callable[..., Table | None]]:
    """Turn a function that yields rows into one that returns their table; None without rows."""

    def decorate(rows_of: Rows) -> Callable[..., Table | None]:
        @wraps(rows_of)
        def make(runs: Sequence[Run]) -> Table | None:
            rows = list(rows_of(runs))
            header = [tuple(title for title, _ in row) for row in rows[:1]]
            cells = [tuple(cell for _, cell in row) for row in rows]
            return Table(name, title, header[0], cells, note) if rows else None

        return make

    return decorate


@table(
    "results",
    "Results",
    "Training loss: mean over the last epoch, and the lowest of all epochs. Test: at the epoch "
    "of the lowest validation loss. Mean ± standard deviation over seeds. The paper shows "
    "these as curves, without numbers.",
)
def results_table(runs: Sequence[Run]) -> Iterator[Row]:
    """Return losses and accuracy by setup and optimizer, over seeds (Section 6.2, App. I)."""
    labels = method_labels(runs)
    methods = group_by(runs, lambda run: (setup_label(run.config), labels[run.path]))
    for (setup, optimizer), group in methods.items():
        results = [outcome(run) for run in group]
        yield [
            ("setup", setup),
            ("optimizer", optimizer),
            ("seeds", str(len(group))),
            ("epochs", _range([result.epochs for result in results])),
            ("train loss", str(spread(results, "train_loss"))),
            ("best train loss", str(spread(results, "best_train_loss"))),
            ("test loss", str(spread(results, "test_loss"))),
            ("test accuracy", _percent(spread(results, "test_accuracy"))),
            ("", troubles(result.status for result in results)),
        ]


@table(
    "partitions", "Choice of the partition (App. J)", "The paper's values are those of 100 epochs."
)
def partition_table(runs: Sequence[Run]) -> Iterator[Row]:
    """Return loss, time and memory by partition (App. J)."""
    studied = [run for run in runs if is_paper_mode(run.config) and not _optimizer(run).diagonal]
    for setup, group in group_by(studied, lambda run: setup_label(run.config)).items():
        by_partition = group_by(group, lambda run: _optimizer(run).partition)
        if len(by_partition) < 2:
            continue
        known = setup == "VGG-11' / CIFAR-10"
        order = [p for p in PARTITIONS if p in by_partition]
        for partition in [*order, *(p for p in by_partition if p not in order)]:
            results = [outcome(run) for run in by_partition[partition]]
            paper = PAPER_PARTITIONS.get(partition) if known else None
            yield [
                ("setup", setup),
                ("partition", partition),
                ("epochs", _range([result.epochs for result in results])),
                ("train loss", str(spread(results, "train_loss"))),
                ("paper", "-" if paper is None else f"{paper[0]:.3g}"),
                ("training s", str(spread(results, "seconds"))),
                ("paper", "-" if paper is None else str(paper[1])),
                ("memory GiB", str(spread(results, "memory_gib"))),
                ("paper", "-" if paper is None else f"{paper[2]} GB"),
            ]


@table(
    "diagonal",
    "Diagonal approximation (App. K)",
    'The paper (App. K): the diagonal approximation "performs worse or is more unstable".',
)
def diagonal_table(runs: Sequence[Run]) -> Iterator[Row]:
    """Compare NewtonSummary with its diagonal approximation (App. K)."""
    paper = [run for run in runs if is_paper_mode(run.config)]
    studied = [run for run in paper if _optimizer(run).partition == "canonical"]
    for setup, group in group_by(studied, lambda run: setup_label(run.config)).items():
        if not any(_optimizer(run).diagonal for run in group):
            continue
        settings = attrgetter(*(f"config.optimizer.{x}" for x in ("diagonal", "lr", "lambda_int")))
        for (diagonal, lr, lambda_int), same in sorted(group_by(group, settings).items()):
            results = [outcome(run) for run in same]
            yield [
                ("setup", setup),
                ("Hbar", "diagonal" if diagonal else "full"),
                ("lambda_1", str(lr)),
                ("lambda_int", str(lambda_int)),
                ("epochs", _range([result.epochs for result in results])),
                ("best train loss", str(spread(results, "best_train_loss"))),
                ("train loss", str(spread(results, "train_loss"))),
                ("", troubles(result.status for result in results)),
            ]


@table(
    "times",
    "Times and memory (App. M)",
    "Seconds of training alone, without evaluation and measurements. In the same process: "
    "against some steps of Adam that were timed at the end of the run.",
)
def times_table(runs: Sequence[Run]) -> Iterator[Row]:
    """Return the time of an epoch by setup and optimizer, and its ratio to Adam's (App. M)."""
    label_of = method_labels(runs)
    for setup, group in group_by(runs, lambda run: setup_label(run.config)).items():
        methods = group_by(group, lambda run: label_of[run.path])
        times = {
            label: spread([outcome(run) for run in same], "seconds_per_epoch")
            for label, same in methods.items()
        }
        adam = next((t.mean for label, t in times.items() if label.startswith("Adam")), math.nan)
        paper = PAPER_TIMES.get(setup, {})
        for label, same in methods.items():
            measured = [run.environment().get("adam_seconds") for run in same]
            beside = Spread(tuple(float(value) for value in measured if value)).mean
            yield [
                ("setup", setup),
                ("optimizer", label),
                ("s per epoch", str(times[label])),
                ("over Adam", _ratio(times[label].mean, adam)),
                ("over Adam, same process", _ratio(times[label].mean, beside)),
                ("paper, over Adam", _ratio(paper.get(label), paper.get("Adam"))),
                ("memory GiB", str(spread([outcome(run) for run in same], "memory_gib"))),
                ("machine", _devices(same)),
            ]


@table("runs", "Runs")
def runs_table(runs: Sequence[Run]) -> Iterator[Row]:
    """Return where each number comes from: directory, command, date and machine."""
    for run in runs:
        last = (run.environment()["sessions"] or [{}])[-1]
        yield [
            ("run", str(run.path)),
            ("seed", str(run.config.seed)),
            ("status", outcome(run).status),
            ("started", str(last.get("started", "-"))),
            ("machine", str(last.get("gpu") or last.get("device") or "-")),
            ("torch", str(last.get("torch", "-"))),
            ("commit", str(last.get("commit") or "-")),
        ]


def all_tables(runs: Sequence[Run]) -> list[Table]:
    """Return every table that these runs have data for."""
    every = (results_table, partition_table, diagonal_table, times_table, runs_table)
    return [made for make in every if (made := make(runs)) is not None]


def _csv_cell(text: str) -> str:
    """Return a cell that no spreadsheet evaluates: one that begins like a formula is quoted."""
    text = printable(text)
    is_number = re.fullmatch(r"[-+\d.e ±%]*", text) is not None
    return f"'{text}" if text[:1] in ("=", "+", "-", "@") and not is_number else text


# --- cells ---------------------------------------------------------------------------------------


def _optimizer(run: Run) -> NewtonSummaryConfig:
    assert isinstance(run.config.optimizer, NewtonSummaryConfig)
    return run.config.optimizer


def _range(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low} to {high}"


def _percent(value: Spread) -> str:
    if not value.finite:
        return "-"
    error = "" if math.isnan(value.std) else f" ± {100 * value.std:.2g}"
    return f"{100 * value.mean:.2f}{error} %"


def _ratio(value: float | None, unit: float | None) -> str:
    if value is None or unit is None or not unit > 0 or math.isnan(value):
        return "-"
    return f"{value / unit:.2f}"


def _devices(runs: Sequence[Run]) -> str:
    names = {
        str(session.get("gpu") or session.get("device", "-"))
        for run in runs
        for session in run.environment().get("sessions", [])
    }
    return ", ".join(sorted(names)) or "-"
