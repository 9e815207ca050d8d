"""The paper's figures from run directories. Drawn without pyplot, so without global state."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from newton_summary.experiments.config import NewtonSummaryConfig, flatten
from newton_summary.experiments.results import (
    best_row,
    group_by,
    is_paper_mode,
    method_labels,
    optimizer_label,
    setup_label,
)
from newton_summary.experiments.rundir import Run
from newton_summary.figures.charts import MATRICES, block_of, rates
from newton_summary.figures.drawing import COLOURS, PANEL, draw_matrix, figure_text, over_epochs
from newton_summary.history import History, Measured

FIXED = dict(zip(("NewtonSummary", "Adam", "K-FAC", "SGD"), COLOURS))
STYLES = ("-", "--", "-.")  # after all colours are used up


def training_curves(runs: Sequence[Run]) -> Figure:
    """Training loss by epoch, one panel a setup: seeds thin, their median thick (Section 6.2)."""
    return _curves(_without_studies(runs), [("train_loss", "training loss", True)])


def test_curves(runs: Sequence[Run]) -> Figure:
    """Test loss and accuracy by epoch (App. I)."""
    return _curves(
        _without_studies(runs),
        [("test_loss", "test loss", True), ("test_accuracy", "test accuracy", False)],
    )


def partition_curves(runs: Sequence[Run]) -> Figure | None:
    """Training loss with the partitions of a study (App. J)."""
    return _study_curves(runs, _is_study, lambda optimizer: not optimizer.diagonal)


def _is_study(run: Run) -> bool:
    """Whether a run is one of a study of partitions, and not of a comparison of optimizers."""
    return is_paper_mode(run.config) and flatten(run.config)["optimizer.partition"] != "canonical"


def _without_studies(runs: Sequence[Run]) -> list[Run]:
    """Leave out partition studies in setups that have other runs to show."""
    setups = {setup_label(run.config) for run in runs if not _is_study(run)}
    return [run for run in runs if not _is_study(run) or setup_label(run.config) not in setups]


def diagonal_curves(runs: Sequence[Run]) -> Figure | None:
    """Training loss with the whole Hbar (solid) and with its diagonal (dotted) (App. K)."""

    def diagonal(run: Run) -> bool:
        return getattr(run.config.optimizer, "diagonal", False)

    return _study_curves(runs, diagonal, lambda optimizer: optimizer.partition == "canonical")


def _study_curves(
    runs: Sequence[Run],
    studied: Callable[[Run], bool],
    beside: Callable[[NewtonSummaryConfig], bool],
) -> Figure | None:
    """Draw the setups that have runs of a study, with the optimizers that belong beside them."""
    setups = {setup_label(run.config) for run in runs if studied(run)}
    chosen = [
        run
        for run in runs
        if setup_label(run.config) in setups
        and isinstance(run.config.optimizer, NewtonSummaryConfig)
        and beside(run.config.optimizer)
    ]
    return _curves(chosen, [("train_loss", "training loss", True)]) if chosen else None


def _curves(runs: Sequence[Run], metrics: Sequence[tuple[str, str, bool]]) -> Figure:
    setups = group_by(runs, lambda run: setup_label(run.config))
    label_of = method_labels(runs)
    panels = [(setup, group, metric) for setup, group in setups.items() for metric in metrics]
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(1.3 * PANEL[0] * columns, PANEL[1] * rows), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axis, (setup, group, (metric, title, logarithmic)) in zip(axes, panels):
        methods = group_by(group, lambda run: label_of[run.path])
        looks = _looks(list(methods))
        for label, same in methods.items():
            _curve(axis, same, metric, label, looks[label], positive=logarithmic)
        axis.set_title(figure_text(setup), loc="left")
        over_epochs(axis, title)
        axis.set_xlim(0, max(1, *(run.epoch for run in group)))
        if logarithmic and axis.lines:
            axis.set_yscale("log")
        if metric == metrics[-1][0] and axis.lines:
            place = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0)}
            axis.legend(fontsize="small", frameon=False, **place)
    for axis in axes[len(panels) :]:
        axis.set_axis_off()
    return figure


def _looks(labels: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Return a colour and a line style for each label; the main optimizers have their own."""
    free = [colour for colour in COLOURS if colour not in {FIXED.get(label) for label in labels}]
    others = [label for label in labels if label not in FIXED]
    looks = {label: (FIXED[label], "-") for label in labels if label in FIXED}
    for i, label in enumerate(others):
        style = STYLES[i // len(free) % len(STYLES)]
        looks[label] = free[i % len(free)], ":" if "diagonal" in label else style
    return looks


def _curve(
    axis: Axes, runs: Sequence[Run], metric: str, label: str, look: tuple[str, str], positive: bool
) -> None:
    """Draw the seeds, and their median over the epochs that all of them have.

    With ``positive``, other values are left out: a logarithmic axis cannot show them.
    """
    colour, style = look
    series = [np.array(run.column(metric)) for run in runs]
    if positive:
        series = [np.where(values > 0, values, np.nan) for values in series]
    epochs = [[row["epoch"] for row in run.rows] for run in runs]
    if not any(np.isfinite(values).any() for values in series):
        return
    if len(series) > 1:
        for x, y in zip(epochs, series):
            axis.plot(x, y, color=colour, linestyle=style, linewidth=0.6, alpha=0.5)
    shortest = min(map(len, series))
    middle = np.median([values[:shortest] for values in series], axis=0)
    marker = "." if shortest <= 3 else None
    x = epochs[0][:shortest]
    axis.plot(x, middle, color=colour, linestyle=style, label=figure_text(label), marker=marker)


# --- Hbar ----------------------------------------------------------------------------------------


def chosen_summaries(run: Run, epoch: int | None = None) -> list[tuple[str, Measured]]:
    """Return the summaries at the start and at an epoch (default: the best), with a title each.

    Those along the full-batch gradient if there are any, else the last ones of the optimizer. The
    best epoch is that of the lowest validation loss.
    """
    every = run.summaries()
    chosen = [m for m in every if m.kind == "full"] or every
    if not chosen:
        return []
    best = int(best_row(run).get("epoch", 0))
    wanted = best if epoch is None else epoch
    first, nearest = chosen[0], min(chosen, key=lambda m: abs(m.epoch - wanted))
    titles = [("at the start" if first.epoch == 0 else f"epoch {first.epoch}", first)]
    if nearest.epoch != first.epoch:
        exact = nearest.epoch == best
        titles.append((f"epoch {nearest.epoch}" + (", best validation" if exact else ""), nearest))
    elif chosen[-1].epoch != first.epoch:  # the start was best
        titles.append((f"epoch {chosen[-1].epoch}, the last", chosen[-1]))
    return titles


def hessian_figure(run: Run, epoch: int | None = None) -> Figure | None:
    """Hbar and its inverse by blocks, at the start and at an epoch (Section 6.1, App. H)."""
    chosen = chosen_summaries(run, epoch)
    if not chosen:
        return None
    columns = [(title, m, name) for title, m in chosen for name in _block_names(m)]
    size = max(2.4, min(5.0, 0.22 * len(chosen[0][1].summary)))
    figure = Figure(figsize=(size * len(columns) + 1, 2 * size + 1), layout="constrained")
    axes = figure.subplots(2, len(columns), squeeze=False)
    for column, (title, measured, name) in enumerate(columns):
        for axis, what in zip(axes[:, column], ("Hbar", "inverse")):
            which = name or "all groups"
            axis.set_title(f"{what}, {which}\n{title}", fontsize="small", loc="left")
            try:
                matrix = MATRICES[what][1](measured.summary)
            except ValueError:
                axis.text(0.5, 0.5, "no inverse", ha="center", transform=axis.transAxes)
                axis.set_axis_off()
                continue
            block = block_of(measured.summary, matrix, name)
            few = max(block.values.shape) <= 24
            draw_matrix(axis, block, "symlog", font_size=5 if few else 0, numbers=False)
    title = figure_text(f"{setup_label(run.config)}, {optimizer_label(run.config)}")
    figure.suptitle(title, x=0.01, ha="left")
    return figure


def _block_names(measured: Measured) -> Sequence[str | None]:
    """Return the blocks that are not empty, or None for the whole matrix."""
    partition = measured.summary.partition
    roles = () if partition is None else partition.roles
    if "weight" in roles and "bias" in roles and "mixed" not in roles:
        return ["weight-weight", "weight-bias", "bias-bias"]
    return [None]


# --- eta -----------------------------------------------------------------------------------------


def eta_figure(run: Run, window: int | None = None) -> Figure | None:
    """Learning rates eta* by epoch: weights solid, biases dotted (Section 6.1).

    Long runs are averaged over windows of epochs, 20 by default as in Fig. 2b (App. H has 40).
    Negative rates are marked.
    """
    history = History(f"{setup_label(run.config)}, {optimizer_label(run.config)}", run.summaries())
    full = [m for m in history.measured if m.kind == "full"] or history.measured
    return rates(history, window) if len(full) >= 2 else None
