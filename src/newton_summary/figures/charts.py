"""One function for each figure of a summary or a training run, for papers and notebooks.

Each returns a matplotlib figure, which a notebook shows and ``savefig`` writes. They are drawn
without pyplot, so without global state. The colours suit colour-blind readers, and values that are
negative or not finite are marked, not dropped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import numpy as np
import torch

from newton_summary.analysis.interactions import normalized, strongest_pairs
from newton_summary.display.html import DIVERGING
from newton_summary.figures.drawing import (
    COLOURS,
    PANEL,
    UNKNOWN,
    Array,
    Figure,
    Line2D,
    Patch,
    Picture,
    Scale,
    draw_matrix,
    draw_rates,
    figure_text,
    message_figure,
    over_epochs,
    short_name,
    titled_figure,
)
from newton_summary.history import History
from newton_summary.solver import LearningRates, learning_rates
from newton_summary.summary import Block, Summary, need_summary

POSITIVE, NEGATIVE = COLOURS[:2]
AGAINST, TOGETHER = DIVERGING[-3], DIVERGING[2]  # signs of an interaction, as in the heat maps

Matrix = Literal["Hbar", "normalized", "inverse"]
BlockName = Literal["weight-weight", "weight-bias", "bias-bias"]

MATRICES: dict[str, tuple[str, Callable[[Summary], torch.Tensor]]] = {
    "Hbar": ("Hbar", Summary.hessian),
    "normalized": ("Hbar, scaled to a unit diagonal", normalized),
    "inverse": ("inverse of Hbar", lambda summary: summary.inverse(without_dead=True)),
}
"""Title of each matrix, and how to compute it."""


# --- matrices -------------------------------------------------------------------------------------


def heatmap(
    summary: Summary, what: Matrix = "Hbar", scale: Scale = "raw", block: BlockName | None = None
) -> Figure:
    """Draw a matrix of the groups, with their names (paper, Figs. 1 and 2).

    Args:
        summary: Of order 2 or 3.
        what: ``"Hbar"``, ``"normalized"`` (to a unit diagonal) or ``"inverse"``. If there is no
            inverse, the figure says why.
        scale: Of the colours: ``"raw"``, or ``"symlog"``, logarithmic on both sides of zero.
        block: ``"weight-weight"``, ``"weight-bias"`` or ``"bias-bias"``; by default everything.

    >>> summary = Summary(gbar=torch.ones(2), Hbar=torch.tensor([[2.0, 1.0], [1.0, 3.0]]))
    >>> heatmap(summary, "normalized").axes[0].get_title(loc="left")
    'Hbar, scaled to a unit diagonal'
    """
    if what not in MATRICES:
        raise ValueError(f"what={what!r}: expected one of {', '.join(map(repr, MATRICES))}.")
    need_summary(summary, "heatmap")
    title, matrix_of = MATRICES[what]
    title += "" if block is None else f", {block}"
    summary.hessian()  # raises if there is none
    try:
        matrix = matrix_of(summary)
    except ValueError as error:
        return message_figure(title, str(error))
    shown = _titled(summary, block_of(summary, matrix, block))
    if 0 in shown.values.shape:
        return message_figure(title, f"There are no groups in the block {block}.")
    rows, columns = shown.values.shape
    cell = max(0.08, min(0.5, 7 / max(rows, columns)))  # inches: room for a name, and on a page
    margin = 0.07 * max(len(short_name(n)) for n in (*shown.rows, *shown.columns)) + 0.3
    size = (max(cell * columns, 1.6) + margin + 1.2, max(cell * rows, 1.6) + margin + 0.6)
    figure, axis = titled_figure(title, *size, layout="compressed")
    draw_matrix(axis, shown, scale, font_size=max(4.0, min(9.0, 60 * cell)))
    return figure


def block_of(summary: Summary, matrix: torch.Tensor, name: str | None) -> Block:
    """Return a block of a matrix by its name; without one, all of it."""
    if name is None:
        return Block(summary.names, summary.names, matrix)
    blocks = summary.blocks(matrix)
    if name not in blocks:
        raise ValueError(f"block={name!r}: expected one of {', '.join(map(repr, blocks))}.")
    return blocks[name]


def _titled(summary: Summary, block: Block) -> Block:
    """Return a block with titles in place of names."""
    titles = dict(zip(summary.names, summary.titles, strict=True))
    rows, columns = (tuple(titles[n] for n in names) for names in (block.rows, block.columns))
    return Block(rows, columns, block.values)


def pairs(summary: Summary | torch.Tensor, count: int = 15) -> Figure:
    """Draw the strongest interactions between groups, and how many layers apart they are.

    Args:
        summary: A summary of order 2 or 3, or Hbar.
        count: Largest number of pairs.

    >>> pairs(torch.tensor([[2.0, 1.0], [1.0, 3.0]])).axes[0].get_yticklabels()[0].get_text()
    '0 – 1'
    """
    strongest = strongest_pairs(summary, count)
    if not len(strongest):
        return message_figure("Strongest interactions", "There are no pairs with an interaction.")
    title = "Strongest interactions, and layers apart"
    figure, axis = titled_figure(title, 1.7 * PANEL[0], 0.24 * len(strongest) + 1.1)
    signs = {AGAINST: "in each other's way", TOGETHER: "help each other"}
    colours = [AGAINST if pair.interaction > 0 else TOGETHER for pair in strongest]
    for row, (pair, colour) in enumerate(zip(strongest, colours, strict=True)):
        axis.barh(row, abs(pair.interaction), color=colour, height=0.7)
        apart = "same layer" if pair.distance == 0 else f"{pair.distance} apart"
        text = f" {pair.interaction:+.2f}, {apart}"
        axis.text(abs(pair.interaction), row, text, va="center", fontsize=7)
    titles = dict(zip(summary.names, summary.titles)) if isinstance(summary, Summary) else {}
    names = [
        " – ".join(short_name(titles.get(name, name), 24) for name in (pair.first, pair.second))
        for pair in strongest
    ]
    axis.set_yticks(range(len(names)), names, fontsize=7)
    axis.set_ylim(len(names) - 0.5, -0.5)
    axis.set_xlim(0, 1.6 * max(abs(pair.interaction) for pair in strongest))  # room for the texts
    axis.set_xlabel("size of the interaction, H_st / sqrt(|H_ss H_tt|)", fontsize=8)
    handles = [Patch(color=c, label=sign) for c, sign in signs.items() if c in colours]
    figure.legend(handles=handles, fontsize=7, frameon=False, loc="outside right upper")
    return figure


# --- learning rates -------------------------------------------------------------------------------


def rates(history: History, window: int | None = None) -> Figure:
    """Draw the learning rates during training: weights solid, biases dotted (Section 6.1).

    Args:
        history: With at least one measurement. Those along the full gradient are drawn, if any.
        window: Average over windows of this many epochs, as the paper does (20); 0 for no average.
            By default 20 if training has four windows or more, else 0.

    >>> summary = Summary(gbar=torch.ones(2), Hbar=torch.eye(2))
    >>> rates(History.of(summary, "MLP", lambda_int=0)).axes[0].get_title(loc="left")
    'Learning rates, MLP'
    """
    _need_histories([history], "rates")
    if not history.measured:
        raise ValueError(f"The history {history.name!r} has no measurements.")
    title = f"Learning rates, {figure_text(history.name)}"
    if refuted := [f"{m.epoch:g}" for m in history.measured if m.refuted]:
        more = ", ..." if len(refuted) > 8 else ""
        title += f"; refuted by trials: {history.unit} {', '.join(refuted[:8])}{more}"
    figure, axis = titled_figure(title, 1.9 * PANEL[0], 1.3 * PANEL[1])
    draw_rates(axis, history, window)
    return figure


def rate_bars(summary: Summary | LearningRates, lambda_int: float = 1.0) -> Figure:
    """Draw the learning rate of each group, with its error bar if there is one.

    Args:
        summary: A summary, or the rates themselves.
        lambda_int: Strength of the cubic term, for a summary.

    >>> summary = Summary(gbar=torch.ones(2), Hbar=torch.eye(2))
    >>> rate_bars(summary, lambda_int=0).axes[0].get_title(loc="left")
    'Learning rates: newton'
    """
    found = summary if isinstance(summary, LearningRates) else learning_rates(summary, lambda_int)
    eta: Array = found.eta.detach().double().cpu().numpy()
    names = found.names or tuple(str(s) for s in range(len(eta)))
    names = summary.titles if isinstance(summary, Summary) else names
    error = found.eta_stderr
    errors = np.zeros_like(eta) if error is None else error.detach().double().cpu().numpy()
    row = 0.24 if len(eta) <= 45 else 0.09  # inches
    title = f"Learning rates: {found.status}{', refuted' if found.refuted else ''}"
    figure, axis = titled_figure(title, 1.6 * PANEL[0], 0.9 + row * len(eta))
    rows = np.arange(len(eta))
    handles = []
    for chosen, colour, marker, fill, label in (
        (eta > 0, POSITIVE, "o", POSITIVE, "positive"),
        (eta < 0, NEGATIVE, "v", "none", "negative: size"),
    ):
        look: Any = {"marker": marker, "color": colour, "markerfacecolor": fill, "linestyle": ""}
        if chosen.any():
            axis.errorbar(
                np.abs(eta[chosen]), rows[chosen], xerr=None if error is None else errors[chosen],
                markersize=4, elinewidth=1, capsize=2, label=label, **look,
            )  # fmt: skip
            handles.append(Line2D([], [], label=label, **look))
    if (eta > 0).any() or (eta < 0).any():
        sizes = np.abs(eta[np.isfinite(eta) & (eta != 0)])
        axis.set_xscale("log", nonpositive="clip")
        axis.set_xlim(sizes.min() / 10, max((np.abs(eta) + errors)[np.isfinite(eta)].max(), 0) * 3)
    for chosen, marker, label in ((~np.isfinite(eta), "x", "not finite"), (eta == 0, "|", "zero")):
        if chosen.any():
            place = axis.get_yaxis_transform()
            where = np.full(int(chosen.sum()), 0.02)
            axis.scatter(where, rows[chosen], marker=marker, color=UNKNOWN, transform=place)
            handles.append(Line2D([], [], marker=marker, color=UNKNOWN, label=label, linestyle=""))
    axis.set_yticks(rows, [short_name(n) for n in names], fontsize=8 if len(eta) <= 45 else 5)
    axis.set_ylim(len(eta) - 0.5, -0.5)
    axis.grid(axis="x", alpha=0.3)
    axis.set_xlabel("learning rate" + ("" if error is None else " ± standard error over batches"))
    figure.legend(handles=handles, loc="outside right upper", fontsize=7, frameon=False)
    return figure


# --- a training -----------------------------------------------------------------------------------


def curves(histories: History | Sequence[History], metrics: Sequence[str] | None = None) -> Figure:
    """Draw the curves of one or more training runs, one panel for each metric.

    Args:
        histories: One or more.
        metrics: Which curves; by default all. A loss is drawn on a logarithmic scale.

    >>> history = History("MLP", curves={"train_loss": [(0, 2.3), (1, 0.4), (2, 0.2)]})
    >>> curves(history).axes[0].get_yscale()
    'log'
    """
    histories = list(histories) if isinstance(histories, Iterable) else [histories]
    _need_histories(histories, "curves")
    with_points = (m for history in histories for m, points in history.curves.items() if points)
    known = list(dict.fromkeys(with_points))
    metrics = known if metrics is None else list(metrics)
    for metric in metrics:
        if metric not in known:
            raise ValueError(f"No history has a curve {metric!r}. Use one of {known}.")
    if not metrics:
        raise ValueError("The histories have no curves: add points with History.add_value.")
    size = (PANEL[0] * len(metrics), PANEL[1] + 0.18 * len(histories))
    figure = Picture(figsize=size, layout="constrained")
    axes = figure.subplots(1, len(metrics), squeeze=False)[0]
    for axis, metric in zip(axes, metrics, strict=True):
        drawn: list[float] = []
        for number, history in enumerate(histories):
            if not history.curves.get(metric):
                continue
            x, y = np.array(history.curves[metric], dtype=np.float64).T
            lost = x[~np.isfinite(y)]
            note = f" (not finite from epoch {lost[0]:g})" if len(lost) else ""
            style = ("-", "--", "-.")[number // len(COLOURS) % 3]
            axis.plot(
                x, np.where(np.isfinite(y), y, np.nan), style, color=COLOURS[number % len(COLOURS)],
                label=figure_text(history.name) + note, marker="." if len(x) <= 3 else None,
            )  # fmt: skip
            drawn += y[np.isfinite(y)].tolist()
        if "loss" in metric and drawn and min(drawn) > 0:
            axis.set_yscale("log")
        over_epochs(axis, metric.replace("_", " "))
    handles, labels = max(
        (axis.get_legend_handles_labels() for axis in axes), key=lambda x: len(x[0])
    )
    figure.legend(handles, labels, loc="outside lower left", fontsize=8, frameon=False)
    return figure


def predicted_change(history: History) -> Figure:
    """Draw the real change of the loss by the steps that were tried against the predicted one.

    On the line both agree; above it the loss fell less than predicted, or rose.

    >>> from newton_summary import Trial
    >>> summary = Summary(gbar=torch.ones(1), Hbar=torch.eye(1))
    >>> history = History("MLP")
    >>> history.add(0, summary, learning_rates(summary, 0), trials=[Trial(1.0, -0.5, -0.4)])
    >>> predicted_change(history).axes[0].get_ylabel()
    'real change'
    """
    _need_histories([history], "predicted_change")
    tried = [(m.epoch, trial) for m in history.measured for trial in m.trials]
    if not tried:
        raise ValueError(f"The history {history.name!r} has no trials: see step_trials.")
    title = f"Predicted and real change, {figure_text(history.name)}"
    figure, axis = titled_figure(title, 1.4 * PANEL[0], 1.3 * PANEL[1])
    numbers = [v for _, t in tried for v in (t.predicted, t.real) if math.isfinite(v)]
    largest = max(map(abs, numbers), default=1.0) or 1.0
    smallest = min((abs(v) for v in numbers if v), default=1.0)
    near = 10.0 ** math.floor(math.log10(max(smallest, largest * 1e-6)))
    axis.axline((0, 0), slope=1, color=UNKNOWN, linewidth=1)
    axis.axhline(0, color="black", linewidth=0.5)
    for number, fraction in enumerate(sorted({trial.fraction for _, trial in tried})):
        points = [trial for _, trial in tried if trial.fraction == fraction]
        x = np.array([trial.predicted for trial in points])
        y = np.array([trial.real for trial in points])
        lost = ~np.isfinite(y)
        look: Any = {"color": COLOURS[number % len(COLOURS)]}
        marker = "os^Dvp*h"[number % 8]
        label = f"{fraction:g} of the step" + (f" ({lost.sum()} not finite)" if lost.any() else "")
        axis.scatter(x[~lost], y[~lost], marker=marker, s=22, label=label, **look)
        axis.scatter(x[lost], np.full(lost.sum(), largest * 1.5), marker="x", **look)
    for set_scale in (axis.set_xscale, axis.set_yscale):
        set_scale("symlog", linthresh=near)
    axis.set_xlabel("predicted change of the loss")
    axis.set_ylabel("real change")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=7, frameon=False)
    return figure


def _need_histories(histories: Sequence[object], what: str) -> None:
    for history in histories:
        if not isinstance(history, History):
            raise TypeError(
                f"{what} needs a History, not {type(history).__name__}. For a single measurement "
                "use History.of(summary)."
            )
