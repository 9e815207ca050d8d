"""Results that print themselves as a table with a few words, in a terminal and in a notebook."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from newton_summary.display.html import html_table, paragraph
from newton_summary.display.names import printable

MAX_ROWS = 60  # of a printed table; longer ones lose their middle


class ShownAsTable:
    """Prints itself as a title, the table of ``_rows``, header first, and what ``_said`` says."""

    _right: ClassVar[Iterable[int]] = ()  # columns that are aligned to the right

    def _title(self) -> str:
        return ""

    def _rows(self) -> Sequence[Sequence[str]]:
        raise NotImplementedError

    def _said(self) -> str:
        return ""

    def _html_rows(self) -> str:
        return html_table(self._rows(), right=self._right)

    def __str__(self) -> str:
        """Return the title, the table and the words."""
        rows = self._rows()
        table = text_table(rows, right=self._right) if len(rows) > 1 else ""
        return "\n".join(filter(None, (self._title(), table, self._said())))

    def _repr_html_(self) -> str:
        """Return the same for a notebook."""
        title, said = (paragraph(x) if x else "" for x in (self._title(), self._said()))
        return title + self._html_rows() + said


def without_middle(rows: list[Any]) -> list[Any]:
    """Return the rows of a table, header first; of many rows the middle is left out."""
    if len(rows) <= MAX_ROWS + 1:
        return rows
    gap = ["..." if cell else "" for cell in rows[0]]
    return [*rows[: MAX_ROWS // 2 + 1], gap, *rows[-MAX_ROWS // 2 + 1 :]]


def text_table(rows: Sequence[Sequence[str]], right: Iterable[int] = ()) -> str:
    """Lay out rows of text in columns; the first row is the header.

    >>> print(text_table([("group", "size"), ("a", "10")], right=[1]))
    group  size
    a        10
    """
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(len(row[c]) for row in rows) for c in range(len(rows[0]))]
    to_right = set(right)
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if c in to_right else cell.ljust(width)
            for c, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
