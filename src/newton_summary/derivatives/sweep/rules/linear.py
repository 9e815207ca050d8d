"""Operations that are linear in the values that depend on the parameters: without curvature.

Their rule is to apply the operation to every row of the stack. Common ones do so directly, with the
dimensions shifted by one; the others through ``torch.vmap``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from newton_summary.derivatives.sweep.rules.per_row import ROW_BY_ROW
from newton_summary.derivatives.sweep.tape import (
    Op,
    Sweep,
    Tangent,
    Tape,
    Value,
    add_tangents,
    align,
    cast,
    lift,
    plain,
)
from newton_summary.derivatives.sweep.torch_functions import dimensions, names
from newton_summary.display.warn import warn_user
from newton_summary.errors import CannotDifferentiate
from newton_summary.probe.eager import mark_approximate

Rule = Callable[..., Any]
Rows = Callable[[Tensor], Tensor]  # a function of all rows
SHORT = 16  # a sum of so few numbers side by side is faster as a product


def shifted(dim: int) -> int:
    """Return the dimension of the stack that belongs to dimension ``dim`` of a row."""
    return dim + 1 if dim >= 0 else dim


def on_rows(make: Callable[..., Rows]) -> Rule:
    """Return the rule that applies to all rows of x what ``make(op, x, ...)`` returns."""

    def rule(sweep: Sweep, op: Op, x: Value, *args: Any, **kwargs: Any) -> Tangent | None:
        t = sweep.tangent(x)
        return None if t is None else t.map(make(op, x, *args, **kwargs))

    return rule


# --- the same numbers in the same order ----------------------------------------------------------


@on_rows
def same_order(op: Op, x: Value, *args: Any, **kwargs: Any) -> Rows:
    """View, reshape, flatten, squeeze, clone, to, ...: only the shape changes."""
    y = op.out.tensor
    return lambda rows: rows.to(y.device).reshape(len(rows), *y.shape)


@on_rows
def expand(op: Op, x: Value, *args: Any, **kwargs: Any) -> Rows:
    """Expand: repeat along dimensions of length one."""
    y = op.out.tensor
    return lambda rows: lift(rows, y.dim()).expand(len(rows), *y.shape)


@on_rows
def transpose(op: Op, x: Value, dim0: int, dim1: int) -> Rows:
    """Swap two dimensions."""
    if x.tensor.dim() == 0:
        return lambda rows: rows
    return lambda rows: rows.transpose(shifted(dim0), shifted(dim1))


@on_rows
def matrix_transpose(op: Op, x: Value) -> Rows:
    """``x.T``, ``x.mT``, ``x.H``, ``x.mH``, ``x.t()``."""
    if x.tensor.dim() < 2:
        return lambda rows: rows
    if op.name == "T" and x.tensor.dim() > 2:
        return lambda rows: rows.permute(0, *range(rows.dim() - 1, 0, -1))
    return lambda rows: rows.mH if op.name in ("H", "mH") else rows.mT


@on_rows
def permute(op: Op, x: Value, *args: Any, dims: Any = None) -> Rows:
    """Reorder the dimensions."""
    order = dims or (args[0] if isinstance(args[0], Sequence) else args)
    ndim = x.tensor.dim()
    return lambda rows: rows.permute(0, *(d % ndim + 1 for d in order))


@on_rows
def centered(op: Op, x: Value, dim: int) -> Rows:
    """Subtract the mean over a dimension; what rounding leaves of rows without more is zero."""
    return lambda rows: without_mean(rows, shifted(dim))


def without_mean(rows: Tensor, dim: int) -> Tensor:
    """Subtract the mean over a dimension of all rows; what rounding leaves of a row is zero."""
    rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
    gaps = rows - rows.mean(dim, keepdim=True)
    every = list(range(1, rows.dim()))
    sizes, rest = rows.abs().amax(every, keepdim=True), gaps.abs().amax(every, keepdim=True)
    moves = rest > 64 * torch.finfo(rows.dtype).eps * sizes
    return gaps.mul_(moves)


def rotated(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor | None = None) -> Tensor:
    """Turn the halves of the last dimension into each other: a rotary embedding."""
    half = x.shape[-1] // 2
    y = torch.mul(x, cos, out=out)
    y[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-1)
    y[..., half:].addcmul_(x[..., :half], sin[..., half:])
    return y


@on_rows
def rotate(op: Op, x: Value, cos: Value, sin: Value) -> Rows:
    """A rotary embedding; on a CPU row by row, as a row stays in the cache."""

    def turn(rows: Tensor) -> Tensor:
        if rows.is_cuda:
            return rotated(rows, cos.now, sin.now)
        turned = torch.empty_like(rows)
        for row, out in zip(rows, turned, strict=True):
            rotated(row, cos.now, sin.now, out)
        return turned

    return turn


# --- masks that are added ------------------------------------------------------------------------

# Scores plus ``torch.finfo(dtype).min`` are lost in rounding. In a row of which some entries are
# masked so, these have no weight, and no derivatives. Where all of a row is, its softmax is a
# constant; but to autograd the sum has the slope 1, so that torch's gradient is not that of the
# loss. To rows of -inf it has none.

MASKED = ("add", "scaled_dot_product_attention")  # operations that may add a mask


def watch_masks(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Tensor | None]:
    """Run an operation that may add a mask, and return also whether it hides whole rows."""
    hides = [hides_rows(x) for x in (*args, *kwargs.values()) if may_be_mask(x)]
    return func(*args, **kwargs), torch.stack(hides).any() if hides else None


def may_be_mask(x: Any) -> bool:
    """Whether an argument may be a mask; a tensor inside ``torch.func`` may not."""
    if type(x) is not Tensor or x.requires_grad or x.dim() < 2 or x.layout != torch.strided:
        return False
    if torch._C._functorch.is_functorch_wrapped_tensor(x):
        return False
    return x.is_floating_point() and x.numel() > 0


def hides_rows(mask: Tensor) -> Tensor:
    """Return whether a row of a mask is huge throughout: one truth value on its device.

    >>> hides_rows(torch.tensor([[0.0, -1e30], [-1e30, -1e30]]))
    tensor(True)
    """
    largest = mask.amax(-1)
    huge = max(1e6, 1 / torch.finfo(mask.dtype).eps)
    return ((largest < -huge) & (largest > -torch.inf)).any()


def warn_of_hidden_rows(found: Iterable[Tensor | None]) -> None:
    """Warn, and mark the measurement as approximate, if one of the masks hides whole rows."""
    if any(hides is not None and bool(hides) for hides in found):
        mark_approximate()
        warn_user(
            "A mask of huge numbers hides whole rows of scores from the loss, but not from "
            "autograd: torch's own gradient is not that of the loss. Use a mask of -inf, or "
            "scaled_dot_product_attention with a boolean mask."
        )


# --- parts ---------------------------------------------------------------------------------------


@on_rows
def getitem(op: Op, x: Value, index: Any) -> Rows:
    """Indexing with anything that torch takes between brackets."""
    full = full_index(plain(index), x.tensor.dim())
    if any(isinstance(i, Tensor) for i in full):
        # Index the first dimensions with the stack behind them: tensors among the indices may move
        # their own dimension to the front.
        return lambda rows: rows.movedim(0, -1)[full].movedim(-1, 0)
    behind = (slice(None), *full)
    return lambda rows: rows[behind]


def setitem(sweep: Sweep, op: Op, x: Value, index: Any, value: Any) -> Tangent | None:
    """``x[index] = value``: linear in both."""
    full = full_index(plain(index), op.out.tensor.dim())

    def write(old: Tensor, new: Tensor) -> Tensor:
        rows = old.clone()
        for row, value_row in zip(rows, new, strict=True):
            row[full] = value_row.to(row.dtype)
        return rows

    return jointly(sweep, [x, value], write)


def jointly(sweep: Sweep, values: Sequence[Any], linear: Callable[..., Tensor]) -> Tangent | None:
    """Apply a linear operation to the rows of several values, brought to the same groups."""
    tangents = [sweep.tangent(value) for value in values]
    like = next((t.rows for t in tangents if t is not None), None)
    if like is None:
        return None
    shapes = [value.tensor.shape if isinstance(value, Value) else () for value in values]
    still = [Tangent((), (), like.new_zeros((0, *shape))) for shape in shapes]
    first, second, rows = align([t or none for t, none in zip(tangents, still, strict=True)])
    return Tangent(first, second, linear(*rows))


def full_index(index: Any, ndim: int) -> tuple[Any, ...]:
    """Write an index with a slice for every dimension that it leaves out."""
    if isinstance(index, list) and any(isinstance(i, Sequence | Tensor | slice) for i in index):
        raise CannotDifferentiate("sweep: an index of nested lists is ambiguous")
    parts = [
        torch.as_tensor(i) if isinstance(i, list | range | np.ndarray) else i
        for i in (index if isinstance(index, tuple) else [index])
    ]
    consumed = sum(
        i.dim() if isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) else 1
        for i in parts
        if i is not None and i is not Ellipsis and not isinstance(i, bool)
    )
    rest = [slice(None)] * (ndim - consumed)
    where = next((n for n, i in enumerate(parts) if i is Ellipsis), None)
    if where is None:
        return (*parts, *rest)
    return (*parts[:where], *rest, *parts[where + 1 :])


@on_rows
def read_view(op: Op, owner: Value, *args: Any, **kwargs: Any) -> Rows:
    """Entries of a tensor by their positions in it: a view, as it is after the owner changed."""
    return lambda rows: rows.reshape(len(rows), -1)[:, op.saved]


def write_view(sweep: Sweep, op: Op, owner: Value, view: Value) -> Tangent | None:
    """Entries of a tensor replaced at their positions: what writing to a view does to its owner."""

    def write(old: Tensor, new: Tensor) -> Tensor:
        k = len(old)
        rows = old.reshape(k, -1).index_copy(1, op.saved.flatten(), new.reshape(k, -1))
        return rows.reshape(old.shape)

    return jointly(sweep, [owner, view], write)


@on_rows
def embedding(
    op: Op,
    weight: Value,
    indices: Value,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Rows:
    """Rows of a table, by index; the padding row never moves."""
    if scale_grad_by_freq:
        raise CannotDifferentiate(
            "sweep: with scale_grad_by_freq=True the gradient of an embedding is not the "
            "derivative of the loss"
        )
    chosen = indices.now
    if padding_idx is None or padding_idx < 0:
        return lambda rows: rows[:, chosen]
    padding = (chosen == padding_idx)[None, ..., None]
    return lambda rows: rows[:, chosen].masked_fill(padding, 0)


# --- sums ----------------------------------------------------------------------------------------


def adding(sign: int) -> Rule:
    """Return the rule of ``a + sign alpha b``, with broadcasting."""

    def rule(sweep: Sweep, op: Op, a: Any, b: Any, alpha: float = 1, out: None = None) -> Any:
        factor = sign * alpha
        change = None if isinstance(factor, int) and factor == 1 else lambda rows: rows * factor
        return combine(sweep, op, [(a, None), (b, change)])

    return rule


subtract = adding(-1)


def combine(sweep: Sweep, op: Op, terms: list[tuple[Any, Rows | None]]) -> Tangent | None:
    """Return the sum of values, each after a linear function of its rows, with broadcasting."""
    y = op.out.tensor
    tangents = []
    for value, change in terms:
        t = sweep.tangent(value)
        if t is not None:
            rows = lift(t.rows, y.dim())
            rows = rows if change is None else change(rows)
            rows = rows if rows.shape[1:] == y.shape else rows.expand(rows.shape[0], *y.shape)
            tangents.append(Tangent(t.first, t.second, cast(rows, y.dtype)))
    return add_tangents(tangents) if tangents else None


def copy(
    sweep: Sweep, op: Op, x: Value, source: Any = None, *args: Any, value: Any = None, **kwargs: Any
) -> Any:
    """``x.copy_(source)`` and ``x.fill_(value)``: nothing of x is left."""
    return combine(sweep, op, [(value if source is None else source, None)])


def zero(sweep: Sweep, op: Op, *args: Any, **kwargs: Any) -> None:
    """``x.zero_()``, and functions made of level pieces: no derivatives at all."""


@on_rows
def reduce(op: Op, x: Value, *args: Any, **kwargs: Any) -> Rows:
    """Sum or mean over some dimensions, or all of them."""
    y = op.out.tensor
    if x.tensor.dim() == 0:
        return lambda rows: rows
    dims = dimensions(x.tensor, kwargs.get("dim", args[0] if args else None))
    chosen = [shifted(d) for d in dims]
    if op.name == "sum" and chosen in ([-1], [x.tensor.dim()]) and x.tensor.shape[-1] <= SHORT:
        ones = y.new_ones(x.tensor.shape[-1])
        return lambda rows: (cast(rows, y.dtype) @ ones).reshape(len(rows), *y.shape)
    reduction = torch.sum if op.name == "sum" else torch.mean
    return lambda rows: reduction(rows, chosen).reshape(len(rows), *y.shape)


# --- choosing ------------------------------------------------------------------------------------


def where(sweep: Sweep, op: Op, condition: Value, a: Any, b: Any) -> Tangent | None:
    """``torch.where(condition, a, b)``, also as a method of a."""
    if condition.tensor.dtype not in (torch.bool, torch.uint8):
        condition, a = a, condition
    return choose(sweep, op, condition, a, b)


def choose(sweep: Sweep, op: Op, condition: Value, a: Any, b: Any) -> Tangent | None:
    """The entries of a where a condition holds, and those of b elsewhere."""
    mask = condition.now.to(torch.bool)
    chosen: list[tuple[Any, Rows | None]] = [
        (a, lambda rows: rows.masked_fill(~mask, 0)),
        (b, lambda rows: rows.masked_fill(mask, 0)),
    ]
    return combine(sweep, op, chosen)


# --- joining -------------------------------------------------------------------------------------


def joining(join: Callable[[list[Tensor], int], Tensor]) -> Rule:
    """Return the rule of ``torch.cat``, or of ``torch.stack``.

    What does not depend on the parameters has zero derivatives.
    """

    def rule(sweep: Sweep, op: Op, tensors: Sequence[Value], dim: int = 0, **kwargs: Any) -> Any:
        y = op.out.tensor
        # torch.cat leaves out what has the shape (0,).
        some = [v for v in tensors if v.tensor.shape != (0,) or y.dim() == 1]
        return jointly(sweep, some, lambda *rows: join([r.to(y.dtype) for r in rows], shifted(dim)))

    return rule


SAME_ORDER = names("""
    view reshape flatten unflatten squeeze unsqueeze view_as reshape_as ravel contiguous clone to
    float double half bfloat16 type type_as cuda cpu
""")


def is_view_of_leaf(op: Op, tape: Tape) -> bool:
    """Whether an operation only changes the shape of a parameter, or transposes a matrix."""
    x, y = op.args[0], op.outputs[0]
    leaf = (
        op.name in (*SAME_ORDER, "t", "T", "mT")
        and op.inputs[0] in tape.leaves
        and op.inputs[0] == x.slot
    )
    return leaf and y is not None and y.tensor.dtype == x.tensor.dtype


LINEAR: dict[str, Rule] = {
    **dict.fromkeys(SAME_ORDER, same_order),
    **ROW_BY_ROW,
    **dict.fromkeys(["expand", "expand_as", "broadcast_to"], expand),
    "transpose": transpose,
    **dict.fromkeys(["T", "mT", "H", "mH", "t"], matrix_transpose),
    "permute": permute,
    "centered": centered,
    "rotated": rotate,
    "view_as_complex": on_rows(
        lambda op, x: lambda rows: torch.view_as_complex(rows.contiguous())  # pairs side by side
    ),
    "__getitem__": getitem,
    "__setitem__": setitem,
    **dict.fromkeys(["read_view", "as_strided"], read_view),
    "write_view": write_view,
    **dict.fromkeys(["copy", "fill"], copy),
    "zero": zero,
    "embedding": embedding,
    "where": where,
    "masked_fill": lambda sweep, op, x, mask, value: choose(sweep, op, mask, value, x),
    "constant_pad_nd": on_rows(
        lambda op, x, pad, value=0: lambda rows: torch.constant_pad_nd(rows, pad, 0.0)
    ),
    "add": adding(1),
    **dict.fromkeys(["sub", "subtract"], subtract),
    "rsub": lambda sweep, op, a, b, alpha=1: subtract(sweep, op, b, a, alpha),
    **dict.fromkeys(["neg", "negative"], on_rows(lambda op, x: torch.neg)),
    **dict.fromkeys(["sum", "mean"], reduce),
    **dict.fromkeys(["cat", "concat", "concatenate"], joining(torch.cat)),
    "stack": joining(torch.stack),
}
