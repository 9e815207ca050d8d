"""How results look in a notebook: tables, and a small heat map as inline SVG. Names are escaped."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

MOST_NAMED = 24  # groups whose names and values the heat map shows
MOST_DRAWN = 100
SIDE = 320.0  # of the map, in pixels
LEVELS = 24  # of colour, on each side of zero
BLUE, WHITE, RED, GREY = (33, 102, 172), (247, 247, 247), (178, 24, 43), "#bbb"


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
    """Return pieces of a page next to each other, below each other where there is no room."""
    cells = "".join(f"<div>{part}</div>" for part in parts)
    return f'<div style="display:flex;flex-wrap:wrap;gap:2em;align-items:flex-start">{cells}</div>'


def html_heatmap(names: Sequence[str], matrix: Tensor) -> str:
    """Return a matrix as a picture: red above zero, blue below, logarithmic in between.

    Values appear under the pointer. Entries that are not finite are grey and crossed.
    """
    size = len(names)
    if size > MOST_DRAWN:
        return paragraph(
            f"{size} groups are too many for a small picture: see newton_summary.figures.heatmap."
        )
    values = matrix.detach().double().cpu().tolist()
    finite = [abs(v) for row in values for v in row if math.isfinite(v) and v]
    largest = max(finite, default=1.0)
    smallest = max(min(finite, default=1.0), largest * 1e-12)
    by_colour: dict[str, list[str]] = {}
    titles, crosses = [], []
    for s, row in enumerate(values):
        for t, value in enumerate(row):
            colour = _colour(value, smallest, largest)
            by_colour.setdefault(colour, []).append(f"M{t} {s}h1v1h-1z")
            if not math.isfinite(value):
                crosses.append(f"M{t} {s}l1 1M{t} {s + 1}l1-1")
            if size <= MOST_NAMED:
                said = escape(f"{names[s]}, {names[t]}: {value:.4g}")
                titles.append(
                    f'<path fill-opacity="0" d="M{t} {s}h1v1h-1z"><title>{said}</title></path>'
                )
    cells = "".join(
        f'<path fill="{colour}" d="{"".join(path)}"/>' for colour, path in by_colour.items()
    )
    cells += f'<path stroke="#555" stroke-width=".06" d="{"".join(crosses)}"/>{"".join(titles)}'
    scale, labels, margin = SIDE / max(size, 1), "", 4.0
    if size <= MOST_NAMED:
        margin = 7.0 * max(map(len, names), default=0) + 8
        scale = min(scale, 28.0)
        labels = "".join(
            f'<text x="{margin - 5:g}" y="{(s + 0.5) * scale + 4:g}" text-anchor="end" '
            f'font-size="11" fill="currentColor">{escape(name)}</text>'
            for s, name in enumerate(names)
        )
    width, height = margin + size * scale + 2, size * scale + 2
    unknown = sum(not math.isfinite(v) for row in values for v in row)
    legend = (
        f"Hbar: red is positive, blue negative, logarithmic from {smallest:.1e} to {largest:.1e}"
    )
    legend += f"; crossed: {unknown} entries that are not finite" if unknown else ""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
        f'role="img" aria-label="heat map of Hbar">{labels}'
        f'<g transform="translate({margin:g} 1) scale({scale:g})">{cells}</g></svg>'
        f'<div style="max-width:{max(width, 300):g}px">{paragraph(legend)}</div>'
    )


def _colour(value: float, smallest: float, largest: float) -> str:
    """Return the colour of an entry; its strength tells the order of magnitude."""
    if not math.isfinite(value):
        return GREY
    strength = 0.0
    if value:
        span = math.log(largest / smallest)
        above = math.log(max(abs(value), smallest) / smallest)
        strength = 0.08 + 0.92 * (above / span if span > 0 else 1.0)
    strength = math.ceil(strength * LEVELS) / LEVELS
    end = RED if value > 0 else BLUE
    return "#" + "".join(f"{round(w + strength * (e - w)):02x}" for w, e in zip(WHITE, end))
