"""Parts of figures: a matrix, and learning rates during training, drawn into given axes."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

try:
    import matplotlib as mpl
except ImportError as error:
    raise ImportError(
        "Figures need matplotlib: run pip install -e '.[experiments]' in your clone."
    ) from error
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.collections import PolyCollection
from matplotlib.colors import Normalize, SymLogNorm
from matplotlib.figure import Figure as Figure
from matplotlib.lines import Line2D as Line2D
from matplotlib.patches import Patch as Patch
from matplotlib.ticker import MaxNLocator

from newton_summary.analysis.interactions import layer_numbers, smooth
from newton_summary.display.names import printable
from newton_summary.history import History
from newton_summary.summary import Block

Array = npt.NDArray[np.float64]
Scale = Literal["raw", "symlog"]

# Okabe and Ito's colours, which suit most colour-blind readers.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
UNKNOWN = "#808080"
PANEL = (4.2, 3.2)  # inches
DECADES = (3, 12)  # of a matrix on the logarithmic scale, at least and at most
MOST_NAMES = 45  # in a legend
SMOOTHED = 20  # epochs in a window, as in the paper


class Picture(Figure):
    """A matplotlib figure that a notebook shows, also where pyplot was never imported."""

    def _repr_png_(self) -> bytes:
        stream = io.BytesIO()
        self.savefig(stream, format="png", dpi=110)
        return stream.getvalue()


def titled_figure(
    title: str, width: float, height: float, layout: Any = "constrained"
) -> tuple[Figure, Axes]:
    """Return a figure of a given size in inches, with axes under a title."""
    figure = Picture(figsize=(width, height), layout=layout)
    axis = figure.subplots()
    axis.set_title(title, loc="left", fontsize=10)
    return figure, axis


def draw_matrix(
    axis: Axes, block: Block, scale: Scale = "raw", font_size: float = 6.0, numbers: bool = True
) -> None:
    """Draw a matrix into axes, with a colour bar; entries that are not finite are hatched.

    ``font_size`` is that of the names, in points, 0 for no names; ``numbers`` writes the entries of
    a small matrix into its cells.
    """
    if scale not in ("raw", "symlog"):
        raise ValueError(f"scale={scale!r}: use 'raw' or 'symlog'.")
    values: Array = block.values.detach().double().cpu().numpy()
    unknown = ~np.isfinite(values)
    largest = float(np.abs(values[~unknown]).max(initial=0.0)) or 1.0
    low = _linear_below(values[~unknown], largest)
    norm = (
        Normalize(-largest, largest)
        if scale == "raw"
        else SymLogNorm(low, vmin=-largest, vmax=largest)
    )
    image = axis.imshow(np.ma.masked_where(unknown, values), cmap="RdBu_r", norm=norm)
    if unknown.any():
        _hatch(axis, unknown)
    for this, names in ((axis.xaxis, block.columns), (axis.yaxis, block.rows)):
        this.set_ticks(range(len(names)) if font_size else [])
        if font_size:
            this.set_ticklabels([short_name(name) for name in names], fontsize=font_size)
    axis.tick_params(axis="x", rotation=90)
    axis.tick_params(length=2, pad=1)
    if numbers and font_size and max(values.shape) <= 10:
        for (row, column), value in np.ndenumerate(values):
            dark = abs(norm(value) - 0.5) > 0.35 and not unknown[row, column]
            colour = "white" if dark else "black"
            text = f"{value:.2g}" if abs(value) < 1e4 else f"{value:.0e}"
            axis.text(column, row, text, ha="center", va="center", fontsize=6, color=colour)
    figure = axis.get_figure()
    assert figure is not None
    part = math.sqrt(low * largest) if scale == "symlog" else largest / 2
    ticks = [-largest, -part, 0, part, largest]
    bar = figure.colorbar(image, ax=axis, fraction=0.046, aspect=30, ticks=ticks)
    bar.ax.minorticks_off()
    bar.ax.set_yticklabels(
        [f"{t:.2g}" if not t or 0.01 <= abs(t) < 1000 else f"{t:.1e}" for t in ticks],
        fontsize=9 if max(values.shape) > 100 else max(font_size, 6),
    )


def _linear_below(values: Array, largest: float) -> float:
    """Return the size below which the logarithmic scale turns linear.

    All but the smallest entries lie above it, within limits.
    """
    sizes = np.abs(values[values != 0])
    decades = math.log10(largest / np.quantile(sizes, 0.05)) if sizes.size else 0.0
    least, most = DECADES
    return float(largest * 10.0 ** -min(max(math.ceil(decades), least), most))


def _hatch(axis: Axes, where: npt.NDArray[np.bool_]) -> None:
    """Cover cells with a grey hatch, and say what they are."""
    corners = np.array([(-0.5, -0.5), (0.5, -0.5), (0.5, 0.5), (-0.5, 0.5)])
    cells = np.argwhere(where)[:, ::-1]
    look: Any = {"facecolor": "#d9d9d9", "edgecolor": UNKNOWN, "hatch": "////"}
    axis.add_collection(
        PolyCollection(list(cells[:, None, :] + corners), linewidth=0, **look), autolim=False
    )
    axis.set_xlabel(
        f"hatched: not finite, {len(cells)} of {where.size} entries", loc="left", fontsize=7
    )


def message_figure(title: str, text: str) -> Figure:
    """Return a figure with a message in place of a picture."""
    figure, axis = titled_figure(title, PANEL[0] * 1.2, PANEL[1] * 0.7)
    axis.set_axis_off()
    axis.text(0.0, 0.9, textwrap.fill(text, 60), va="top", fontsize=9, transform=axis.transAxes)
    return figure


def over_epochs(axis: Axes, what: str) -> None:
    """Set axes up for training: something against whole epochs."""
    axis.set_xlabel("epoch")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.set_ylabel(what)
    axis.grid(alpha=0.3)


def draw_rates(axis: Axes, history: History, window: int | None = None) -> None:
    """Draw the learning rates during training into axes, with the arguments of ``rates``."""
    full = [m for m in history.measured if m.kind == "full"] or history.measured
    epochs: Array = np.array([m.epoch for m in full], dtype=np.float64)
    values: Array = np.stack([m.eta.double().numpy() for m in full])
    if window is None:
        window = SMOOTHED if epochs[-1] - epochs[0] >= 4 * SMOOTHED - 1 else 0
    if window:
        smoothed = smooth(torch.from_numpy(values), list(epochs), window)
        epochs, values = smoothed.epochs.numpy(), smoothed.values.numpy()
        axis.text(
            1, 1.01, f"means over {window} epochs", ha="right", fontsize=7, transform=axis.transAxes
        )
    summary = full[0].summary
    roles = ("weight",) * len(summary) if summary.partition is None else summary.partition.roles
    layers = layer_numbers(summary)
    colours = _layer_colours(max(layers) + 1)
    for s, name in enumerate(summary.titles):
        line, style = values[:, s], ":" if roles[s] == "bias" else "-"
        colour = colours[layers[s]]
        up, down = np.where(line > 0, line, np.nan), np.where(line < 0, -line, np.nan)
        axis.plot(epochs, up, style, color=colour, label=short_name(name), marker=".")
        axis.scatter(epochs, down, marker="v", s=16, facecolors="none", edgecolors=colour)
    if np.isfinite(values).any() and (values != 0).any():
        axis.set_yscale("log")
    lost = epochs[~np.isfinite(values).all(1)]
    bottom = axis.get_xaxis_transform()
    axis.scatter(lost, np.full_like(lost, 0.02), marker="x", color=UNKNOWN, transform=bottom)
    if len(epochs) == 1:
        axis.set_xlim(epochs[0] - 1, epochs[0] + 1)
    factors = "measured along" in history.facts  # the step of an optimizer
    over_epochs(axis, "factor on the learning rate" if factors else "learning rate")
    _rates_legend(axis, roles, bool((values < 0).any()), bool(len(lost)), colours)


def _rates_legend(
    axis: Axes, roles: Sequence[str], negative: bool, lost: bool, colours: Sequence[Any]
) -> None:
    """Name the lines beside the axes; with very many, show the depth as a colour bar instead."""
    figure = axis.get_figure()
    assert figure is not None
    handles = list(axis.get_legend_handles_labels()[0])
    ink = mpl.rcParams["text.color"]  # white in a dark style
    if len(handles) > MOST_NAMES:
        handles = [Line2D([], [], color=ink, label="weights")]
        if "bias" in roles:
            handles.append(Line2D([], [], color=ink, linestyle=":", label="biases"))
        depth = ScalarMappable(Normalize(0, len(colours) - 1), "viridis")
        figure.colorbar(depth, ax=axis, label="layer", fraction=0.04)
    look: Any = {"linestyle": "none", "markerfacecolor": "none", "color": ink}
    if negative:
        handles.append(Line2D([], [], marker="v", label="negative: size", **look))
    if lost:
        handles.append(Line2D([], [], marker="x", label="not finite", **{**look, "color": UNKNOWN}))
    place: Any = {"bbox_to_anchor": (1.01, 1.0), "ncols": 1 + len(handles) // 24}
    if len(roles) > MOST_NAMES:
        place = {"bbox_to_anchor": (0.0, -0.12), "ncols": 4}
    axis.legend(
        handles=handles, loc="upper left", borderaxespad=0, fontsize=8, frameon=False, **place
    )


def short_name(name: str, most: int = 32) -> str:
    """Return the name of a group for a label, without empty words; long ones lose their middle."""
    name = name.replace("parametrizations.", "").replace(".original", "")
    if len(name) > most:
        end = most * 2 // 3
        name = f"{name[: most - end - 1]}…{name[-end:]}"
    return figure_text(name)


def figure_text(text: str) -> str:
    """Return text that matplotlib draws as it is: dollar signs would begin a formula."""
    return printable(text).replace("$", r"\$")


def _layer_colours(count: int) -> list[Any]:
    """Return a colour for each layer: distinct ones for a few, a scale over depth for many."""
    if count <= len(COLOURS):
        return list(COLOURS[:count])
    return [mpl.colormaps["viridis"](i / (count - 1)) for i in range(count)]
