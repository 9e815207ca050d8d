"""Results in a notebook, as HTML: tables, and a small heat map. Names are escaped."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

MOST_DRAWN = 48  # groups in the heat map

# From negative to positive in every heat map: matplotlib's RdBu_r, which figures and the page have.
DIVERGING = (
    *("#053061", "#2166ac", "#4393c3", "#92c5de", "#d1e5f0", "#f7f7f7"),
    *("#fddbc7", "#f4a582", "#d6604d", "#b2182b", "#67001f"),
)
UNKNOWN = "#bbbbbb"


def html_table(rows: Sequence[Sequence[str]], right: Iterable[int] = ()) -> str:
    """Return a table; the first row is the header, and the columns in ``right`` hold numbers."""
    to_right = set(right)

    def cells(row: Sequence[str], tag: str) -> str:
        sides = ("right" if c in to_right else "left" for c in range(len(row)))
        return "".join(
            f'<{tag} style="text-align:{side}">{escape(cell)}</{tag}>'
            for cell, side in zip(row, sides)
        )

    body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows[1:])
    return f"<table><thead><tr>{cells(rows[0], 'th')}</tr></thead><tbody>{body}</tbody></table>"


def paragraph(text: str) -> str:
    """Return lines of text as a paragraph."""
    return f"<p>{'<br>'.join(map(escape, text.splitlines()))}</p>"


def side_by_side(parts: Sequence[str]) -> str:
    """Return pieces of a page next to each other, or below each other on a narrow page."""
    cells = "".join(f"<div>{part}</div>" for part in parts)
    return f'<div style="display:flex;flex-wrap:wrap;gap:2em;align-items:flex-start">{cells}</div>'


def html_heatmap(names: Sequence[str], matrix: Tensor) -> str:
    """Return a matrix as a grid of coloured cells, logarithmic, with values under the pointer."""
    if len(names) > MOST_DRAWN:
        return paragraph(
            f"{len(names)} groups are too many for a small picture: "
            f"see newton_summary.figures.heatmap."
        )
    values = matrix.detach().double().cpu().tolist()
    sizes = [abs(value) for row in values for value in row if math.isfinite(value) and value]
    largest = max(sizes, default=1.0)
    smallest = max(min(sizes, default=1.0), largest * 1e-12)
    cells = []
    for name, row in zip(names, values, strict=True):
        cells.append(f'<span style="text-align:right;padding-right:.4em">{escape(name)}</span>')
        for other, value in zip(names, row, strict=True):
            colour, mark = UNKNOWN, "×"
            if math.isfinite(value):
                colour, mark = _colour(value, smallest, largest), ""
            title = escape(f"{name}, {other}: {value:.4g}")
            cells.append(f'<b style="background:{colour}" title="{title}">{mark}</b>')
    unknown = sum(not math.isfinite(value) for row in values for value in row)
    legend = (
        f"Hbar: red is positive, blue negative, logarithmic from {smallest:.1e} to {largest:.1e}"
    )
    legend += f"; ×: {unknown} entries that are not finite" if unknown else ""
    grid = f"display:grid;grid-template-columns:auto repeat({len(names)},1.3em);line-height:1.3em"
    return f'<div style="{grid}">{"".join(cells)}</div>{paragraph(legend)}'


def _colour(value: float, smallest: float, largest: float) -> str:
    """Return the colour of an entry: its sign, and its order of magnitude."""
    share = 0.0
    if value:
        span = math.log(largest / smallest)
        above = math.log(max(abs(value), smallest) / smallest)
        share = math.copysign(0.08 + 0.92 * (above / span if span > 0 else 1.0), value)
    place = (share + 1) / 2 * (len(DIVERGING) - 1)
    i = min(int(place), len(DIVERGING) - 2)
    ends = ([int(hexes[k : k + 2], 16) for k in (1, 3, 5)] for hexes in DIVERGING[i : i + 2])
    return "#" + "".join(f"{round(x + (place - i) * (y - x)):02x}" for x, y in zip(*ends))
