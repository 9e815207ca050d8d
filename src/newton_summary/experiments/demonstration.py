"""The demo: LeNet on the images inside the package, trained, measured and drawn."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rich.console import Console

from newton_summary.experiments.config import MeasureConfig
from newton_summary.experiments.progress import watching
from newton_summary.experiments.recipes import RECIPES
from newton_summary.experiments.report import make_report
from newton_summary.experiments.training import train

RECIPES_SHOWN = ("lenet_embedded", "lenet_embedded_adam")


def demonstrate(out: Path, epochs: int, console: Console) -> list[Path]:
    """Train LeNet with NewtonSummary and with Adam, measure its layers, and draw the figures.

    Args:
        out: Folder for the run directories and the report.
        epochs: Passes over the 4,500 training images.
        console: Where to tell of it.

    Returns:
        The files of the report.
    """
    runs = []
    for name in RECIPES_SHOWN:
        measure = MeasureConfig(every=max(1, epochs))  # at the start and at the end
        config = replace(RECIPES[name](), epochs=epochs, measure=measure)
        with watching(console, f"{name}: {RECIPES[name].about}") as reporter:
            runs.append(train(config, out / name, reporter))
    files = make_report(runs, out / "report")
    console.print(f"The tables and figures are in {out / 'report'}:", highlight=False)
    return files
