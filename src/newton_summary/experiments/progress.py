"""Progress of a run on a terminal: a bar, and a line for each epoch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from newton_summary.display.names import printable
from newton_summary.experiments.config import ExperimentConfig
from newton_summary.experiments.training import Reporter
from newton_summary.run_directory import Row


class RichReporter(Reporter):
    """Prints a line per epoch, with a progress bar on a terminal."""

    def __init__(self, console: Console, progress: Progress, title: str):
        self.console, self.progress, self.title = console, progress, title
        self.measuring: TaskID | None = None

    def start(self, config: ExperimentConfig, steps: int, epoch: int) -> None:
        """Show the title and the bar."""
        self.console.print(printable(self.title), style="bold", highlight=False, markup=False)
        self.epochs, self.steps = config.epochs, steps
        if epoch:
            self.console.print(f"resuming after epoch {epoch}")
        self.training = self.progress.add_task(
            "training", total=config.epochs * steps, completed=epoch * steps
        )

    def step(self, epoch: int, step: int) -> None:
        """Move the bar."""
        done = (epoch - 1) * self.steps + step
        text = f"epoch {epoch}/{self.epochs}"
        self.progress.update(self.training, completed=done, description=text)

    def measure(self, epoch: int, done: int, total: int | None) -> None:
        """Show a second bar during a measurement."""
        if self.measuring is None:
            self.measuring = self.progress.add_task("measuring", total=total)
        self.progress.update(self.measuring, completed=done, total=total)
        if done == total:
            self.progress.remove_task(self.measuring)
            self.measuring = None

    def row(self, row: Row) -> None:
        """Print an epoch."""
        self.console.print(line(row, self.epochs), highlight=False)


def line(row: Row, epochs: int) -> str:
    """Return the metrics of an epoch as one line."""
    width = len(str(epochs))
    cells = [f"epoch {row['epoch']:>{width}}/{epochs}"]
    if row["epoch"]:
        cells.append(f"train {_number(row['train_loss'])}")
    for name in ("validation", "test"):
        accuracy = row.get(f"{name}_accuracy")
        share = "" if accuracy is None else f" ({accuracy:.1%})"
        cells.append(f"{name} {_number(row[f'{name}_loss'])}{share}")
    if row.get("lr") is not None:
        cells.append(f"lr {row['lr']:.3g}")
    if row.get("eta"):
        ends = {f"{rate(row['eta'].values()):.2g}": None for rate in (min, max)}
        cells.append(f"eta {' to '.join(ends)}")
    cells.append(f"{row['seconds']:.1f} s")
    return "  ".join(cells) + ("" if row["status"] == "ok" else f"  {row['status']}")


def _number(value: Any) -> str:
    return "-" if value is None else f"{value:.4g}"


@contextmanager
def watching(console: Console, title: str = "") -> Iterator[RichReporter]:
    """Yield a reporter that prints to a console, with a title when the run starts."""
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeRemainingColumn(),
        TextColumn("left"),
        console=console,
        transient=True,
        refresh_per_second=4,
        disable=not console.is_terminal,
    )
    with progress:
        yield RichReporter(console, progress, title)
