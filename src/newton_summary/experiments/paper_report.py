"""From run directories to a folder of tables, figures and an interactive page."""

from __future__ import annotations

import importlib.util
import io
import json
import warnings
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from newton_summary.display.names import file_name, markdown_text
from newton_summary.errors import UserError
from newton_summary.experiments.results import group_by, method_labels, setup_label
from newton_summary.experiments.rundir import Run
from newton_summary.experiments.tables import all_tables
from newton_summary.storage.writing import make_folder, write_file, write_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FILES = "files.json"  # of the last report in a folder


def make_report(
    runs: Sequence[Run], out: Path, epoch: int | None = None, window: int | None = None
) -> list[Path]:
    """Write every table (Markdown, CSV) and figure (PNG, PDF) that the runs have data for.

    In the folder, ``report.md`` shows everything; ``report.html``, the interactive page, needs
    plotly. Hbar is drawn at an epoch, by default that of the best validation loss; learning rates
    are averaged over a window of epochs, by default 20 in long runs.

    Returns:
        The files that were written, the pages first.
    """
    runs = [run for run in runs if run.rows]
    if not runs:
        raise UserError("No run has completed an epoch: there is nothing to report.")
    make_folder(out)
    files: list[Path] = []
    now = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    page = [f"# Report of {len(runs)} run{'s' if len(runs) > 1 else ''}", "", f"Made {now}.", ""]
    for table in all_tables(runs):
        page += [table.markdown()]
        files.append(write_text(out / f"{table.name}.md", table.markdown()))
        files.append(write_text(out / f"{table.name}.csv", table.csv()))
    for name, title, figure in _figures(runs, epoch, window):
        shown = markdown_text(title)
        page += [f"### {shown}", "", f"![{shown}]({name}.png)", ""]
        files += _save(figure, out / name)
    written = [*_interactive(runs, out), write_text(out / "report.md", "\n".join(page)), *files]
    _remove_stale(out, written)
    return written


def _interactive(runs: Sequence[Run], out: Path) -> list[Path]:
    """Write the interactive page, where plotly is installed."""
    if importlib.util.find_spec("plotly") is None:
        warnings.warn(
            "no page without plotly: run pip install -e '.[report]' in your clone", stacklevel=3
        )
        return []
    from newton_summary.page import report

    return [report([run.path for run in runs], out / "report.html")]


def _remove_stale(out: Path, written: Sequence[Path]) -> None:
    """Remove what an earlier report left behind, and remember what belongs to this one."""
    names = sorted(file.name for file in written)
    try:
        earlier = json.loads((out / FILES).read_text())
    except (OSError, ValueError):
        earlier = []
    for name in earlier:
        if isinstance(name, str) and name not in names and Path(name).name == name:
            (out / name).unlink(missing_ok=True)
    write_text(out / FILES, json.dumps(names, indent=1))


def _figures(
    runs: Sequence[Run], epoch: int | None, window: int | None
) -> list[tuple[str, str, Figure]]:
    """Return the figures with a name for their files and a title.

    Hbar and the learning rates are drawn for the first seed of each method.
    """
    try:
        from newton_summary.experiments import paper_figures
    except ImportError as error:
        raise UserError(
            f"Figures need matplotlib ({error}): run pip install -e '.[experiments]' in your clone."
        ) from None
    found: list[tuple[str, str, Figure | None]] = [
        ("training_curves", "Training loss", paper_figures.training_curves(runs)),
        ("test_curves", "Test loss and accuracy", paper_figures.test_curves(runs)),
        ("partition_curves", "Choice of the partition", paper_figures.partition_curves(runs)),
        ("diagonal_curves", "Whole Hbar and its diagonal", paper_figures.diagonal_curves(runs)),
    ]
    labels = method_labels(runs)
    methods = group_by(runs, lambda run: (setup_label(run.config), labels[run.path]))
    for number, ((setup, label), seeds) in enumerate(methods.items()):
        run = seeds[0]  # the others look alike
        name = f"{number:02}_{file_name(run.config.recipe)}"
        what = f"{setup}, {label}, seed {run.config.seed}"
        matrices = paper_figures.hessian_figure(run, epoch)
        rates = paper_figures.eta_figure(run, window)
        found.append((f"{name}_hbar", f"Hbar: {what}", matrices))
        found.append((f"{name}_eta", f"Learning rates: {what}", rates))
    return [(name, title, figure) for name, title, figure in found if figure is not None]


def _save(figure: Figure, path: Path) -> list[Path]:
    files = []
    for kind in ("png", "pdf"):
        file = path.with_name(f"{path.name}.{kind}")
        picture = io.BytesIO()
        figure.savefig(picture, format=kind, dpi=150)
        write_file(file, picture.getvalue())
        figure.set_layout_engine("none")  # the first one stays
        files.append(file)
    return files
