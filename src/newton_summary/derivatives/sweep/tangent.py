"""The derivatives of one value along the lines of the groups, stacked in one tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

Groups = tuple[int, ...]


@dataclass(frozen=True)
class Tangent:
    """First and second derivatives of a value y along theta + t U^s, for the groups s met so far.

    Both live in one tensor, so that a linear operation acts on all of them in one call: row i of
    ``rows`` is y1 of group ``first[i]``, and row ``len(first) + j`` is y2 of group ``second[j]``.
    What is not there is zero.
    """

    first: Groups
    second: Groups
    rows: Tensor  # (len(first) + len(second), *shape of y)

    @property
    def shape(self) -> torch.Size:
        """The shape of y."""
        return self.rows.shape[1:]

    @property
    def y1(self) -> Tensor:
        """First derivatives, (len(first), *shape)."""
        return self.rows[: len(self.first)]

    @property
    def y2(self) -> Tensor:
        """Second derivatives, (len(second), *shape)."""
        return self.rows[len(self.first) :]

    def map(self, linear: Callable[[Tensor], Tensor]) -> Tangent:
        """Apply a linear operation to every row."""
        return Tangent(self.first, self.second, linear(self.rows))

    def to(self, dtype: torch.dtype) -> Tangent:
        """Convert the rows."""
        return self if self.rows.dtype == dtype else self.map(lambda rows: rows.to(dtype))


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a tensor; asking first is faster than a conversion that does nothing."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def join(first: tuple[Groups, Tensor], second: tuple[Groups, Tensor] | None) -> Tangent:
    """Make a tangent from its first and second derivatives."""
    if second is None or not second[0]:
        return Tangent(first[0], (), first[1])
    return Tangent(first[0], second[0], torch.cat([first[1], second[1]]))


def union(*groups: Groups) -> Groups:
    """Return all groups, in the order in which they are met.

    >>> union((0, 1), (1, 2))
    (0, 1, 2)
    """
    return tuple(dict.fromkeys(s for some in groups for s in some))


def spread(groups: Groups, rows: Tensor, wanted: Groups) -> Tensor:
    """Arrange rows in the order of ``wanted``, with zeros for groups that have none."""
    if groups == wanted:
        return rows
    if groups == wanted[: len(groups)]:
        missing = rows.new_zeros((len(wanted) - len(groups), *rows.shape[1:]))
        return torch.cat([rows, missing])
    result = rows.new_zeros((len(wanted), *rows.shape[1:]))
    for i, s in enumerate(groups):
        result[wanted.index(s)] = rows[i]
    return result


def align(tangents: Sequence[Tangent]) -> tuple[Groups, Groups, list[Tensor]]:
    """Bring several tangents to the same groups; their rows then correspond."""
    first = union(*(t.first for t in tangents))
    second = union(*(t.second for t in tangents))
    rows = []
    for t in tangents:
        if t.first == first and t.second == second:
            rows.append(t.rows)
        else:
            rows.append(torch.cat([spread(t.first, t.y1, first), spread(t.second, t.y2, second)]))
    return first, second, rows


def add_rows(terms: Sequence[tuple[Groups, Tensor]]) -> tuple[Groups, Tensor]:
    """Add stacks of rows group by group; where no two of them share a group this is one copy."""
    terms = [term for term in terms if term[0]]
    if len(terms) == 1:
        return terms[0]
    groups = union(*(g for g, _ in terms))
    if sum(len(g) for g, _ in terms) == len(groups):
        return groups, torch.cat([rows for _, rows in terms])
    total: Tensor | None = None
    for g, rows in terms:
        if total is None:
            total = spread(g, rows, groups)
            total = total.clone() if total is rows else total
        else:
            where = [groups.index(s) for s in g]
            if where == list(range(where[0], where[0] + len(where))):
                total[where[0] : where[0] + len(where)] += rows
            else:
                total.index_add_(0, torch.tensor(where, device=rows.device), rows)
    assert total is not None
    return groups, total


# A function (out, which, add) that writes some of its rows to a tensor, or adds them to it.
Writer = Callable[[Tensor, slice, bool], object]
Term = tuple[Groups, Tensor | Writer]  # rows of some groups


def add_up(first: Sequence[Term], second: Sequence[Term], y: Tensor) -> Tangent | None:
    """Make the tangent of ``y`` from terms of y1 and terms of y2: each is written or added once."""
    first = [term for term in first if term[0]]
    second = [term for term in second if term[0]]
    if not first:
        return None
    groups1, groups2 = union(*(g for g, _ in first)), union(*(g for g, _ in second))
    parts = [x for _, x in (*first, *second)]
    if len(parts) == 1 and isinstance(parts[0], Tensor):
        return Tangent(groups1, groups2, parts[0])
    n = len(groups1) + len(groups2)
    apart = sum(len(g) for g, _ in (*first, *second)) == n  # no two terms share a group
    if apart and y.is_cuda and all(isinstance(part, Tensor) for part in parts):
        return Unjoined(first, second, y)  # type: ignore[arg-type]
    rows = y.new_empty((n, *y.shape))
    start = 0
    for groups, terms in ((groups1, first), (groups2, second)):
        present: set[int] = set()
        for mine, part in terms:
            for target, which, add in _stretches(mine, groups, start, present):
                _write(part, rows[target], which, add)
            present.update(mine)
        start += len(groups)
    return Tangent(groups1, groups2, rows)


def _stretches(
    mine: Groups, groups: Groups, start: int, present: set[int]
) -> Iterator[tuple[slice, slice, bool]]:
    """Give stretches of rows that lie side by side: where they belong, which, and whether to add.

    >>> list(_stretches((1, 2, 4, 5), (1, 2, 3, 4, 5), 10, {1, 2, 3, 4}))
    [(slice(10, 12, None), slice(0, 2, None), True), (slice(13, 14, None), slice(2, 3, None), True),
     (slice(14, 15, None), slice(3, 4, None), False)]
    """
    places = {s: start + i for i, s in enumerate(groups)}
    begin = 0
    for j in range(1, len(mine) + 1):
        if j < len(mine):
            together = places[mine[j]] == places[mine[j - 1]] + 1
            if together and (mine[j] in present) == (mine[begin] in present):
                continue
        target = places[mine[begin]]
        yield slice(target, target + j - begin), slice(begin, j), mine[begin] in present
        begin = j


def _write(part: Tensor | Writer, out: Tensor, which: slice, add: bool) -> None:
    if not isinstance(part, Tensor):
        part(out, which, add)
    elif add:
        out.add_(part[which])
    else:
        out.copy_(part[which])


class Unjoined(Tangent):
    """A tangent whose rows still lie in several pieces, until all of them are needed.

    Args:
        first: Terms of y1, no two of which share a group.
        second: Terms of y2, likewise.
        y: The value.
    """

    first_terms: Sequence[tuple[Groups, Tensor]]
    second_terms: Sequence[tuple[Groups, Tensor]]
    y: Tensor

    def __init__(
        self,
        first: Sequence[tuple[Groups, Tensor]],
        second: Sequence[tuple[Groups, Tensor]],
        y: Tensor,
    ):
        groups = union(*(g for g, _ in first)), union(*(g for g, _ in second))
        self.__dict__.update(
            first=groups[0], second=groups[1], first_terms=first, second_terms=second, y=y
        )

    @cached_property
    def rows(self) -> Tensor:
        """All rows in one tensor; made when they are first asked for."""
        return torch.cat([rows for _, rows in (*self.first_terms, *self.second_terms)])

    @property
    def joined(self) -> bool:
        """Whether that has happened."""
        return "rows" in self.__dict__

    @property
    def shape(self) -> torch.Size:
        """The shape of y."""
        return self.y.shape

    def to(self, dtype: torch.dtype) -> Tangent:
        """Convert the rows."""
        return self if self.y.dtype == dtype else super().to(dtype)


def matching(first: Groups, second: Groups) -> list[tuple[slice, slice]]:
    """Return where the groups of ``second`` stand in ``first``, as pairs of slices.

    >>> matching((3, 5, 7), (3, 5))
    [(slice(0, 2, None), slice(0, 2, None))]
    """
    if second == first[: len(second)]:
        return [(slice(0, len(second)), slice(0, len(second)))] if second else []
    places = [first.index(s) for s in second]
    return [(slice(i, i + 1), slice(j, j + 1)) for j, i in enumerate(places)]


def add_tangents(tangents: Sequence[Tangent]) -> Tangent:
    """Add tangents of values of the same shape."""
    if len(tangents) == 1:
        return tangents[0]
    if all(t.first == tangents[0].first and t.second == tangents[0].second for t in tangents):
        total = tangents[0].rows
        for t in tangents[1:]:
            total = total + t.rows
        return Tangent(tangents[0].first, tangents[0].second, total)
    first = add_rows([(t.first, t.y1) for t in tangents])
    second = [(t.second, t.y2) for t in tangents if t.second]
    return join(first, add_rows(second) if second else None)


def lift(rows: Tensor, ndim: int) -> Tensor:
    """Insert dimensions behind the first, so that rows (k, *y) broadcast with ndim dimensions."""
    missing = ndim + 1 - rows.dim()
    return rows if missing <= 0 else rows.reshape(rows.shape[0], *(1,) * missing, *rows.shape[1:])
