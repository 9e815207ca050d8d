"""Results that show themselves, in a terminal and in a notebook: a table and a few words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

from newton_summary.notebook import html_table, paragraph
from newton_summary.partition import text_table


class ShownAsTable:
    """Prints itself as the table of ``_rows``, the header first, and the words of ``_said``."""

    _numbers: ClassVar[Iterable[int]] = ()  # columns that are aligned to the right

    def _rows(self) -> Sequence[Sequence[str]]:
        raise NotImplementedError

    def _said(self) -> str:
        raise NotImplementedError

    def __str__(self) -> str:
        """Return the table and the words."""
        table, said = text_table(self._rows(), right=self._numbers), self._said()
        return f"{table}\n{said}" if said else table

    def _repr_html_(self) -> str:
        """Return the same for a notebook."""
        table, said = html_table(self._rows(), right=self._numbers), self._said()
        return table + paragraph(said) if said else table
