"""The loss as a tape of operations, the values on it, and the derivatives of a value by group."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache
from itertools import groupby
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from newton_summary.derivatives.sweep.kernels import kernels
from newton_summary.errors import CannotDifferentiate, is_out_of_memory

if TYPE_CHECKING:
    from newton_summary.derivatives.sweep.token_runs import TokenRun


class Value:
    """A tensor that went into or came out of an operation, as it was at that moment."""

    __slots__ = ("edge", "forgotten", "part", "slot", "tensor", "version")

    def __init__(self, tensor: Tensor, slot: int | None, edge: Any = None):
        """Slot: number of the value on the tape; None for what does not depend on parameters."""
        self.tensor = tensor
        self.version = version_of(tensor)
        self.slot = slot
        self.edge = edge  # of autograd's graph, where the adjoint of the value appears
        self.part: Tensor | None = None  # if only a part of that adjoint belongs to it: which one
        self.forgotten = False  # whether only the shape of the tensor is left

    def forget(self) -> None:
        """Keep nothing but the shape, dtype and device: no rule reads the numbers."""
        self.tensor = self.tensor.detach().new_empty(()).expand(self.tensor.shape)
        self.version, self.forgotten = version_of(self.tensor), True

    def cut(self, take: Callable[[Tensor], Tensor]) -> Value:
        """Return a part of the value, in the same slot."""
        part = Value(take(self.tensor if self.forgotten else self.now), self.slot)
        part.forgotten = self.forgotten
        return part

    @property
    def readable(self) -> bool:
        """Whether the numbers are there, and have not changed since."""
        return not self.forgotten and version_of(self.tensor) == self.version

    @property
    def now(self) -> Tensor:
        """The tensor, unless it has changed since. It may still be part of autograd's graph."""
        assert not self.forgotten
        if not self.readable:
            raise changed_in_place(self.tensor)
        return self.tensor


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor was changed; one made under inference_mode does not count."""
    try:
        return tensor._version
    except RuntimeError:
        return 0


def changed_in_place(tensor: Tensor) -> CannotDifferentiate:
    """Return the error for a change that the recorder did not see."""
    return CannotDifferentiate(
        f"sweep: a tensor of shape {tuple(tensor.shape)} that the loss depends on is changed in "
        f"place in a way that cannot be recorded, such as through .detach() or .data"
    )


def positions_in(owner: Tensor, view: Tensor) -> Tensor:
    """Return where each entry of a view stands among the flattened entries of the owner."""
    if view.dtype != owner.dtype:
        raise changed_in_place(owner)
    span = 1 + sum((n - 1) * step for n, step in zip(owner.shape, owner.stride(), strict=True))
    memory = torch.full((span,), -1, device=owner.device)
    numbers = torch.arange(owner.numel(), device=owner.device).reshape(owner.shape)
    memory.as_strided(owner.shape, owner.stride()).copy_(numbers)
    start = view.storage_offset() - owner.storage_offset()
    try:
        positions = memory.as_strided(view.shape, view.stride(), start).contiguous()
    except RuntimeError:
        positions = numbers - 1
    if bool((positions < 0).any()):
        raise CannotDifferentiate("sweep: as_strided reaches beyond the tensor it is taken from")
    return positions


@dataclass(eq=False)
class Op:
    """One operation on the tape: ``y = h(x_1, ..., x_m)``."""

    name: str
    func: Callable[..., Any]
    args: tuple[Any, ...]  # with every tensor as a Value
    kwargs: dict[str, Any]
    outputs: list[Value | None]  # None for an output that does not depend on the parameters
    saved: Any = None  # what a rule keeps from the recording, such as the indices of a maximum
    inputs: list[int] = field(default_factory=list)  # slots that the operation depends on
    curved: bool = False  # whether it may contribute to Hbar and D3
    wanted: bool = True  # whether a later operation needs the derivatives of the outputs
    finishes: list[int] = field(default_factory=list)  # slots that no later operation needs
    complex: bool = False  # whether a tensor among arguments and results is complex
    rule: Any = None  # that it is passed with

    def __post_init__(self) -> None:
        """Find the slots."""
        if not self.inputs:
            values = find_values((self.args, self.kwargs))
            self.inputs = [value.slot for value in values if value.slot is not None]

    @property
    def passed(self) -> bool:
        """Whether the sweep has anything to do here."""
        return self.curved or self.wanted

    @property
    def made(self) -> list[Value]:
        """The outputs that depend on the parameters."""
        return [value for value in self.outputs if value is not None]

    @property
    def out(self) -> Value:
        """The first output that depends on the parameters."""
        return next(value for value in self.outputs if value is not None)


@dataclass
class Cut:
    """A place on the tape where the loss depends on all before it through a single value y.

    There gbar is read off: it is <adjoint, y1>.
    """

    index: int  # of the operation before which it is
    value: Value
    adjoint: Tensor | None = None  # known after the backward pass; None if it is zero

    @property
    def slot(self) -> int:
        """Of the value."""
        assert self.value.slot is not None
        return self.value.slot


@dataclass(frozen=True)
class ChunkedLogits:
    """A layer with many outputs and what follows up to a log-softmax, passed a few rows at a time.

    The derivatives of its result are not kept. If gbar is read off after it, its part of gbar is
    read off here instead.
    """

    ops: list[int]  # places on the tape
    rows: int  # in all
    at_a_time: int
    reads_gbar: bool = False
    chosen: dict[int, Tensor] = field(default_factory=dict)  # place -> rows that go on, if not all


@dataclass
class Tape:
    """All operations that lead from the parameters to the loss."""

    ops: list[Op]
    loss: Tensor
    leaves: dict[int, str]  # slot -> parameter name
    needed: set[int] = field(default_factory=set)  # slots whose derivatives a later operation uses
    cut: Cut | None = None  # where gbar is read off; else it comes from the gradient
    small: bool = False  # whether the derivatives of all values together take little memory
    chunked: list[ChunkedLogits] = field(default_factory=list)  # what is passed in pieces
    runs: list[TokenRun] = field(default_factory=list)  # likewise
    hidden: list[Tensor | None] = field(default_factory=list)  # whether masks hide whole rows


def is_of_rows(softmax: Op) -> bool:
    """Whether a softmax is one over the last dimension."""
    dim = softmax.args[1] if len(softmax.args) > 1 else softmax.kwargs.get("dim")
    return dim in (-1, softmax.out.tensor.dim() - 1)


def find_tensors(tree: Any) -> list[Tensor]:
    """Return every tensor in nested tuples, lists and dicts."""
    return _collect(tree, Tensor, [])


def find_values(tree: Any) -> list[Value]:
    """Return every value in nested tuples, lists and dicts."""
    return _collect(tree, Value, [])


def _collect(tree: Any, kind: type, found: list[Any]) -> list[Any]:
    if isinstance(tree, kind):
        found.append(tree)
    elif isinstance(tree, (tuple, list, dict)):
        for x in tree.values() if isinstance(tree, dict) else tree:
            _collect(x, kind, found)
    return found


def map_tree(change: Callable[[Any], Any], tree: Any) -> Any:
    """Apply a function to everything in nested tuples, lists and dicts."""
    if type(tree) is tuple:
        return tuple([map_tree(change, x) for x in tree])
    if isinstance(tree, list):
        return [map_tree(change, x) for x in tree]
    if isinstance(tree, dict):
        return {key: map_tree(change, x) for key, x in tree.items()}
    return change(tree)


def plain(tree: Any) -> Any:
    """Replace every value by its tensor."""
    return map_tree(lambda x: x.now if isinstance(x, Value) else x, tree)


# --- derivatives along the lines of the groups, stacked in one tensor of rows ---------------------

Groups = tuple[int, ...]
Piece = tuple[Groups, Tensor]  # rows of some groups
Place = tuple[str, Groups, Groups]  # gbar, Hbar or D3, its groups, and those of Hbar's columns
Adjoints = dict[int, Tensor | None]  # of the loss, by the slot of a value; None for zero


@dataclass(frozen=True)
class Tangent:
    """First and second derivatives of a value y along theta + t U^s, for the groups s met so far.

    Both are in one tensor, so that a linear operation acts on all of them in one call: row i of
    ``rows`` is y1 of group ``first[i]``, and row ``len(first) + j`` is y2 of group ``second[j]``.
    Missing rows are zero.
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

    def completed(self) -> Tangent:
        """Write out the second derivatives of all groups, including those that are zero."""
        if self.second == self.first:
            return self
        y2 = spread(self.second, self.y2, self.first)
        return Tangent(self.first, self.first, torch.cat([self.y1, y2]))


def groups_in(label: int | Tensor) -> list[int]:
    """Return the groups that a parameter lies in, given its label in a partition."""
    return [label] if isinstance(label, int) else torch.unique(label).tolist()


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a tensor; asking first is faster than a conversion that does nothing."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def union(*groups: Groups) -> Groups:
    """Return all groups, in the order in which they are met.

    >>> union((0, 1), (1, 2))
    (0, 1, 2)
    """
    return tuple(dict.fromkeys(s for some in groups for s in some))


@lru_cache(maxsize=1024)
def stretches(some: Groups, among: Groups, cut: int = 0) -> list[tuple[slice, slice]]:
    """Return where groups stand among others, as pairs of slices (there, here).

    Groups that lie side by side in both make one pair, but none crosses the ``cut`` there.

    >>> stretches((3, 5, 9), (1, 3, 5, 7, 9))
    [(slice(1, 3, None), slice(0, 2, None)), (slice(4, 5, None), slice(2, 3, None))]
    """
    places = {s: i for i, s in enumerate(among)}
    shifts = ((places[s] - j, places[s] < cut) for j, s in enumerate(some))
    found, start = [], 0
    for (shift, _), stretch in groupby(shifts):
        end = start + len(list(stretch))
        found.append((slice(start + shift, end + shift), slice(start, end)))
        start = end
    return found


def spread(groups: Groups, rows: Tensor, wanted: Groups) -> Tensor:
    """Arrange rows in the order of ``wanted``, with zeros for groups that have none."""
    if groups == wanted:
        return rows
    result = rows.new_zeros((len(wanted), *rows.shape[1:]))
    for there, here in stretches(groups, wanted):
        result[there] = rows[here]
    return result


def pick(groups: Groups, rows: Tensor, wanted: Groups) -> Tensor:
    """Return the rows of some of the groups, in their order."""
    found = [rows[there] for there, _ in stretches(wanted, groups)]
    return found[0] if len(found) == 1 else torch.cat([rows[:0], *found])


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
    result = Tangent(groups1, groups2, y.new_empty((n, *y.shape)))
    for groups, rows, terms in ((groups1, result.y1, first), (groups2, result.y2, second)):
        written = 0  # rows so far: groups stand in the order in which terms bring them
        for mine, part in terms:
            for there, here in stretches(mine, groups, written):
                out, add = rows[there], there.start < written
                if not isinstance(part, Tensor):
                    part(out, here, add)
                else:
                    out.add_(part[here]) if add else out.copy_(part[here])
                written = max(written, there.stop)
    return result


class Unjoined(Tangent):
    """A tangent whose rows still lie in several pieces, until all of them are needed.

    No two terms of y1 share a group, and no two of y2.
    """

    first_terms: Sequence[Piece]
    second_terms: Sequence[Piece]
    y: Tensor

    def __init__(self, first: Sequence[Piece], second: Sequence[Piece], y: Tensor):
        groups1, groups2 = (union(*(groups for groups, _ in terms)) for terms in (first, second))
        self.__dict__.update(first=groups1, second=groups2, y=y)
        self.__dict__.update(first_terms=first, second_terms=second)

    @cached_property
    def rows(self) -> Tensor:
        """All rows in one tensor; made when they are first asked for, instead of the pieces."""
        joined = torch.cat([rows for _, rows in (*self.first_terms, *self.second_terms)])
        self.__dict__.update(first_terms=(), second_terms=())
        return joined

    @property
    def joined(self) -> bool:
        """Whether they are in one tensor already."""
        return "rows" in self.__dict__

    @property
    def shape(self) -> torch.Size:
        """The shape of y."""
        return self.y.shape

    def to(self, dtype: torch.dtype) -> Tangent:
        """Convert the rows."""
        return self if self.y.dtype == dtype else super().to(dtype)


def add_tangents(tangents: Sequence[Tangent]) -> Tangent:
    """Add tangents of values of the same shape."""
    if len(tangents) == 1:
        return tangents[0]
    if all(t.first == tangents[0].first and t.second == tangents[0].second for t in tangents):
        total = tangents[0].rows
        for t in tangents[1:]:
            total = total + t.rows
        return Tangent(tangents[0].first, tangents[0].second, total)
    if len(tangents) == 2:
        fewer, more = sorted(tangents, key=lambda t: len(t.first) + len(t.second))
        if {*fewer.first} <= {*more.first} and {*fewer.second} <= {*more.second}:
            return _added_to(more, fewer)
    first, second = [(t.first, t.y1) for t in tangents], [(t.second, t.y2) for t in tangents]
    added = add_up(first, second, tangents[0].rows[0])
    assert added is not None
    return added


def _added_to(more: Tangent, fewer: Tangent) -> Tangent:
    """Add two tangents, of which one has all groups of the other: each number is written once."""
    result = Tangent(more.first, more.second, torch.empty_like(more.rows))
    for mine, theirs, x, y, out in (
        (more.first, fewer.first, more.y1, fewer.y1, result.y1),
        (more.second, fewer.second, more.y2, fewer.y2, result.y2),
    ):
        for there, here in stretches(theirs, mine):
            torch.add(x[there], y[here], out=out[there])
        for there, _ in stretches(tuple(s for s in mine if s not in theirs), mine):
            out[there].copy_(x[there])
    return result


def parts_of(n: int, at_a_time: int) -> Iterator[slice]:
    """Yield slices that cover n."""
    for start in range(0, n, at_a_time):
        yield slice(start, min(n, start + at_a_time))


def lift(rows: Tensor, ndim: int) -> Tensor:
    """Insert dimensions behind the first, so that rows (k, *y) broadcast with ndim dimensions."""
    missing = ndim + 1 - rows.dim()
    return rows if missing <= 0 else rows.reshape(rows.shape[0], *(1,) * missing, *rows.shape[1:])


# --- inner products and sums of rows --------------------------------------------------------------


class Contributions(Protocol):
    """Receives contributions to Hbar and D3: a sweep, or sums of some of them."""

    order: int

    def add_Hbar(self, rows: Groups, columns: Groups, entries: Tensor) -> None:
        """Add entries to Hbar."""

    def add_D3(self, groups: Groups, entries: Tensor) -> None:
        """Add entries to D3."""


class Sweep:
    """The state of a forward sweep over a tape; at first it has the tangents of the parameters."""

    def __init__(self, tape: Tape, adjoints: Adjoints, tangents: dict[int, Tangent], order: int):
        self.tape, self.adjoints, self.tangents, self.order = tape, adjoints, tangents, order
        self.found: list[tuple[Place, Tensor]] = []  # contributions, and where they belong

    def tangent(self, value: object) -> Tangent | None:
        """Return the derivatives of a value; None if they are zero."""
        if not isinstance(value, Value) or value.slot is None:
            return None
        return self.tangents.get(value.slot)

    def known(self, value: Value) -> Tangent:
        """Return the derivatives of the only value that an operation depends on."""
        return self.tangents[value.slot]  # type: ignore[index]

    def moving(self, tree: Any) -> dict[int, Tangent]:
        """Return the derivatives of all values in a tree that have some, by their slots."""
        found = {v.slot: self.tangent(v) for v in find_values(tree)}
        return {slot: t for slot, t in found.items() if slot is not None and t is not None}

    def adjoint(self, value: Value) -> Tensor | None:
        """Return delta_y of an operation's output; None if the loss does not depend on it."""
        assert value.slot is not None
        return self.adjoints.get(value.slot)

    def add_Hbar(self, rows: Groups, columns: Groups, entries: Tensor) -> None:
        """Add entries to Hbar: Hbar[rows[i], columns[j]] += entries[i, j]."""
        self.found.append((("Hbar", rows, columns), entries))

    def add_D3(self, groups: Groups, entries: Tensor) -> None:
        """Add entries to D3."""
        self.found.append((("D3", groups, ()), entries))

    def read_gbar(self, cut: Cut) -> None:
        """Add what is read off at a cut to gbar."""
        t = self.tangent(cut.value)
        if t is not None and cut.adjoint is not None:
            self.found.append((("gbar", t.first, ()), gram(t.y1, cut.adjoint[None])))

    def pass_op(self, op: Op) -> None:
        """Apply an operation's rule."""
        try:
            result = op.rule(self, op, *op.args, **op.kwargs)
        except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
            if is_out_of_memory(error):
                raise
            raise CannotDifferentiate(
                f"sweep: {op.name!r} is called in a way that its rule does not support: {error}"
            ) from error
        if result is None:
            return
        several = isinstance(result, list)
        outputs, results = (op.outputs, result) if several else ([op.out], [result])
        for value, tangent in zip(outputs, results, strict=True):
            if value is not None and tangent is not None and value.slot in self.tape.needed:
                self.tangents[value.slot] = tangent.to(value.tensor.dtype)


def gram(X: Tensor, Y: Tensor, symmetric: bool = False) -> Tensor:
    """Return the inner products of all rows of X with all rows of Y; they are real.

    ``symmetric`` says that the result is so: then a kernel computes half of it.
    """
    if X.is_complex():
        X, Y = as_real(X), as_real(cast(Y, X.dtype))
    k, m = len(X), len(Y)
    pieces = pieces_of(X.shape[1:]) if X.is_cuda else 1
    known = pieces > 1 and X.dtype == Y.dtype and X.dtype in (torch.bfloat16, torch.float32)
    if known and (found := kernels()) is not None:
        products: Tensor = found.gram(X, Y, pieces, symmetric)
        return products
    if X.dtype in (torch.bfloat16, torch.float16):
        X, Y = X.float(), Y.float()
    Y = cast(Y, X.dtype)
    if pieces > 1:
        # A product of two long thin matrices leaves a GPU idle: many products of shorter ones.
        left = X.reshape(k, pieces, -1).transpose(0, 1)
        right = Y.reshape(m, pieces, -1).permute(1, 2, 0)
        return torch.bmm(left, right).sum(0)
    return X.reshape(k, -1) @ Y.reshape(m, -1).T


@cache
def pieces_of(shape: torch.Size, most: int = 1024, shortest: int = 256) -> int:
    """Return into how many pieces of one length an array of this shape can be cut.

    Short ones are not cut. Lengths that are multiples of eight come first: a GPU reads them faster.

    >>> [pieces_of(torch.Size(s)) for s in ((1000, 64, 8, 8), (250, 3, 7), (9, 50257))]
    [1024, 1, 261]
    """
    n = shape.numel()
    if n < 64 * shortest:
        return 1
    counts = [d for d in range(1, min(most, n // shortest) + 1) if n % d == 0]
    return max((d for d in counts if n // d % 8 == 0), default=counts[-1])


def as_real(X: Tensor) -> Tensor:
    """Return complex numbers as pairs of real ones."""
    return torch.view_as_real(X.resolve_conj()) if X.is_complex() else X


def dots(X: Tensor, Y: Tensor) -> Tensor:
    """Return the inner product of each row of X with the same row of Y."""
    return sums(X.conj() * Y)


def sums(X: Tensor) -> Tensor:
    """Return the sum of each row, its real part."""
    wide = torch.promote_types(X.dtype, torch.float32)
    return X.reshape(len(X), -1).sum(1, dtype=wide).real
