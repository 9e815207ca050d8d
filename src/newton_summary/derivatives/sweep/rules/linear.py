"""Operations that are linear in the values that depend on the parameters: without curvature.

Their rule is to apply the operation to every row of the stack. Common ones do so directly, with the
dimensions shifted by one; the others through ``torch.vmap``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from newton_summary.derivatives.sweep.tangent import Tangent, add_tangents, align, cast, lift
from newton_summary.derivatives.sweep.tape import Op, Value, find_values, plain
from newton_summary.derivatives.sweep.torch_functions import names
from newton_summary.errors import CannotDifferentiate

if TYPE_CHECKING:
    from newton_summary.derivatives.sweep.engine import Sweep

Rule = Callable[..., Any]


def shifted(dim: int) -> int:
    """Return the dimension of the stack that belongs to dimension ``dim`` of a row."""
    return dim + 1 if dim >= 0 else dim


def only(sweep: Sweep, x: Any) -> Tangent | None:
    """Return the tangent of the one argument that depends on the parameters."""
    return sweep.tangent(x)


# --- the same numbers in the same order ----------------------------------------------------------


def same_order(sweep: Sweep, op: Op, x: Value, *args: Any, **kwargs: Any) -> Tangent | None:
    """View, reshape, flatten, squeeze, clone, to, ...: only the shape changes."""
    t, y = only(sweep, x), op.out.tensor
    if t is None:
        return None
    return t.map(lambda rows: rows.to(y.device).reshape(rows.shape[0], *y.shape))


def as_complex(sweep: Sweep, op: Op, x: Value) -> Tangent | None:
    """``view_as_complex``, which wants each pair of numbers side by side, also in the rows."""
    t = only(sweep, x)
    return None if t is None else t.map(lambda rows: torch.view_as_complex(rows.contiguous()))


def expand(sweep: Sweep, op: Op, x: Value, *args: Any, **kwargs: Any) -> Tangent | None:
    """Expand: repeat along dimensions of length one."""
    t, y = only(sweep, x), op.out.tensor
    if t is None:
        return None
    return t.map(lambda rows: lift(rows, y.dim()).expand(rows.shape[0], *y.shape))


def transpose(sweep: Sweep, op: Op, x: Value, dim0: int, dim1: int) -> Tangent | None:
    """Swap two dimensions."""
    t = only(sweep, x)
    if t is None or x.tensor.dim() == 0:
        return t
    return t.map(lambda rows: rows.transpose(shifted(dim0), shifted(dim1)))


def matrix_transpose(sweep: Sweep, op: Op, x: Value) -> Tangent | None:
    """``x.T``, ``x.mT``, ``x.H``, ``x.mH``, ``x.t()``."""
    t = only(sweep, x)
    if t is None or t.rows.dim() < 3:
        return t
    if op.name == "T" and t.rows.dim() > 3:
        return t.map(lambda rows: rows.permute(0, *range(rows.dim() - 1, 0, -1)))
    return t.map(lambda rows: rows.mH if op.name in ("H", "mH") else rows.mT)


def permute(sweep: Sweep, op: Op, x: Value, *args: Any, dims: Any = None) -> Tangent | None:
    """Reorder the dimensions."""
    order = dims or (args[0] if isinstance(args[0], Sequence) else args)
    t = only(sweep, x)
    ndim = x.tensor.dim()
    return None if t is None else t.map(lambda r: r.permute(0, *(d % ndim + 1 for d in order)))


def centered(sweep: Sweep, op: Op, x: Value, dim: int) -> Tangent | None:
    """Subtract the mean over a dimension; what rounding leaves of rows without more is zero."""
    t = only(sweep, x)
    if t is None:
        return None
    rows = t.rows.to(torch.promote_types(t.rows.dtype, torch.float32))
    gaps = rows - rows.mean(shifted(dim), keepdim=True)
    every = list(range(1, rows.dim()))
    sizes, rest = rows.abs().amax(every, keepdim=True), gaps.abs().amax(every, keepdim=True)
    moves = rest > 64 * torch.finfo(rows.dtype).eps * sizes
    return Tangent(t.first, t.second, gaps * moves)


# --- parts ---------------------------------------------------------------------------------------


def getitem(sweep: Sweep, op: Op, x: Value, index: Any) -> Tangent | None:
    """Indexing with anything that torch takes between brackets."""
    t = only(sweep, x)
    if t is None:
        return None
    full = full_index(plain(index), x.tensor.dim())
    if any(isinstance(i, Tensor) for i in full):
        # Index the first dimensions with the stack behind them: tensors among the indices may move
        # their own dimension to the front.
        return t.map(lambda rows: rows.movedim(0, -1)[full].movedim(-1, 0))
    return t.map(lambda rows: rows[(slice(None), *full)])


def setitem(sweep: Sweep, op: Op, x: Value, index: Any, value: Any) -> Tangent | None:
    """``x[index] = value``: linear in both."""
    target, source = sweep.tangent(x), sweep.tangent(value)
    y = op.out.tensor
    present = [t for t in (target, source) if t is not None]
    if not present:
        return None
    zero = Tangent((), (), y.new_zeros((0, *y.shape)))
    empty = Tangent(
        (), (), y.new_zeros(0, *(value.tensor.shape if isinstance(value, Value) else ()))
    )
    first, second, (old, new) = align([target or zero, source or empty])
    full = full_index(plain(index), y.dim())
    rows = torch.stack([put(o, full, n) for o, n in zip(old, new, strict=True)])
    return Tangent(first, second, rows)


def put(old: Tensor, index: tuple[Any, ...], new: Tensor) -> Tensor:
    """Return a copy with some entries replaced."""
    result = old.clone()
    result[index] = new.to(old.dtype)
    return result


def full_index(index: Any, ndim: int) -> tuple[Any, ...]:
    """Write an index with a slice for every dimension that it leaves out."""
    if isinstance(index, list) and any(isinstance(i, Sequence | Tensor | slice) for i in index):
        raise CannotDifferentiate("sweep: an index of nested lists may mean two things")
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


def read_view(sweep: Sweep, op: Op, owner: Value, *args: Any, **kwargs: Any) -> Tangent | None:
    """Entries of a tensor by their positions in it: a view, as it is after the owner changed."""
    t = only(sweep, owner)
    return None if t is None else t.map(lambda rows: rows.reshape(len(rows), -1)[:, op.saved])


def write_view(sweep: Sweep, op: Op, owner: Value, view: Value) -> Tangent | None:
    """Entries of a tensor replaced at their positions: what writing to a view does to its owner."""
    present = [t for t in (sweep.tangent(owner), sweep.tangent(view)) if t is not None]
    if not present:
        return None
    zeros = [Tangent((), (), v.tensor.new_zeros((0, *v.tensor.shape))) for v in (owner, view)]
    first, second, (old, new) = align(
        [sweep.tangent(owner) or zeros[0], sweep.tangent(view) or zeros[1]]
    )
    k = len(old)
    rows = old.reshape(k, -1).index_copy(1, op.saved.flatten(), new.reshape(k, -1))
    return Tangent(first, second, rows.reshape(old.shape))


def embedding(
    sweep: Sweep,
    op: Op,
    weight: Value,
    indices: Value,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tangent | None:
    """Rows of a table, by index; the padding row never moves."""
    t = only(sweep, weight)
    if t is None:
        return None
    if scale_grad_by_freq:
        raise CannotDifferentiate(
            "sweep: with scale_grad_by_freq=True the gradient of an embedding is not the "
            "derivative of the loss"
        )
    chosen = indices.now
    rows = t.rows[:, chosen]
    if padding_idx is not None and padding_idx >= 0:
        rows = rows.masked_fill((chosen == padding_idx)[None, ..., None], 0)
    return Tangent(t.first, t.second, rows)


# --- sums ----------------------------------------------------------------------------------------


def add(sweep: Sweep, op: Op, a: Any, b: Any, *, alpha: float = 1, out: None = None) -> Any:
    """``a + alpha b``, with broadcasting."""
    return combine(sweep, op, [(a, 1), (b, alpha)])


def sub(sweep: Sweep, op: Op, a: Any, b: Any, *, alpha: float = 1, out: None = None) -> Any:
    """``a - alpha b``, with broadcasting."""
    return combine(sweep, op, [(a, 1), (b, -alpha)])


def rsub(sweep: Sweep, op: Op, a: Any, b: Any, alpha: float = 1) -> Any:
    """``b - alpha a``."""
    return combine(sweep, op, [(b, 1), (a, -alpha)])


def combine(sweep: Sweep, op: Op, terms: list[tuple[Any, Any]]) -> Tangent | None:
    """Return a linear combination of values."""
    y = op.out.tensor
    tangents = []
    for value, factor in terms:
        t = sweep.tangent(value)
        if t is not None:
            rows = lift(t.rows, y.dim())
            rows = rows if rows.shape[1:] == y.shape else rows.expand(rows.shape[0], *y.shape)
            rows = rows if isinstance(factor, int) and factor == 1 else rows * factor
            tangents.append(Tangent(t.first, t.second, cast(rows, y.dtype)))
    return add_tangents(tangents) if tangents else None


def copy(
    sweep: Sweep, op: Op, x: Value, source: Any = None, *args: Any, value: Any = None, **kwargs: Any
) -> Any:
    """``x.copy_(source)`` and ``x.fill_(value)``: nothing of x is left."""
    return combine(sweep, op, [(value if source is None else source, 1)])


def zero(sweep: Sweep, op: Op, *args: Any, **kwargs: Any) -> None:
    """``x.zero_()``, and functions made of level pieces: no derivatives at all."""


def neg(sweep: Sweep, op: Op, x: Value) -> Tangent | None:
    """``-x``."""
    t = only(sweep, x)
    return None if t is None else t.map(torch.neg)


def reduce(sweep: Sweep, op: Op, x: Value, *args: Any, **kwargs: Any) -> Tangent | None:
    """Sum or mean over some dimensions, or all of them."""
    t, y = only(sweep, x), op.out.tensor
    if t is None or x.tensor.dim() == 0:
        return t
    dims = kwargs.get("dim", kwargs.get("axis", args[0] if args else None))
    if isinstance(dims, torch.dtype):
        dims = None
    if dims is None or (isinstance(dims, Sequence) and not dims):
        dims = range(x.tensor.dim())
    chosen = [shifted(d) for d in ([dims] if isinstance(dims, int) else dims)]
    if not chosen:
        return t
    reduction = torch.sum if op.name == "sum" else torch.mean
    return t.map(lambda r: reduction(r, chosen).reshape(r.shape[0], *y.shape))


# --- choosing ------------------------------------------------------------------------------------


def where(sweep: Sweep, op: Op, condition: Value, a: Any, b: Any) -> Tangent | None:
    """``torch.where(condition, a, b)``, also as a method of a."""
    if condition.tensor.dtype not in (torch.bool, torch.uint8):
        condition, a = a, condition
    return choose(sweep, op, condition, a, b)


def masked_fill(sweep: Sweep, op: Op, x: Value, mask: Value, value: Any) -> Tangent | None:
    """``x``, and ``value`` where the mask is true."""
    return choose(sweep, op, mask, value, x)


def choose(sweep: Sweep, op: Op, condition: Value, a: Any, b: Any) -> Tangent | None:
    """The entries of a where a condition holds, and those of b elsewhere."""
    y, mask = op.out.tensor, condition.now.to(torch.bool)
    tangents = []
    for value, others in ((a, ~mask), (b, mask)):
        t = sweep.tangent(value)
        if t is not None:
            rows = lift(t.rows, y.dim()).masked_fill(others, 0)
            rows = cast(rows.expand(len(rows), *y.shape), y.dtype)
            tangents.append(Tangent(t.first, t.second, rows))
    return add_tangents(tangents) if tangents else None


def constant_pad(sweep: Sweep, op: Op, x: Value, pad: Any, value: Any = 0) -> Tangent | None:
    """Constants around x."""
    t = only(sweep, x)
    return None if t is None else t.map(lambda rows: torch.constant_pad_nd(rows, pad, 0.0))


# --- joining -------------------------------------------------------------------------------------


def cat(sweep: Sweep, op: Op, tensors: Sequence[Value], dim: int = 0, **kwargs: Any) -> Any:
    """Join along a dimension; what does not depend on the parameters has zero derivatives."""
    return _joined(
        sweep, op, tensors, lambda rows: torch.cat(rows, shifted(kwargs.get("axis", dim)))
    )


def stack(sweep: Sweep, op: Op, tensors: Sequence[Value], dim: int = 0) -> Any:
    """Join along a new dimension."""
    return _joined(sweep, op, tensors, lambda rows: torch.stack(rows, shifted(dim)))


def _joined(
    sweep: Sweep, op: Op, values: Sequence[Value], join: Callable[[list[Tensor]], Tensor]
) -> Tangent | None:
    y = op.out.tensor
    tangents = [
        sweep.tangent(v) or Tangent((), (), v.tensor.new_zeros((0, *v.tensor.shape)))
        for v in values
        if v.tensor.shape != (0,) or y.dim() == 1  # torch.cat leaves these out
    ]
    if not any(t.first for t in tangents):
        return None
    first, second, rows = align(tangents)
    return Tangent(first, second, join([r.to(y.dtype) for r in rows]))


# --- everything else that is linear --------------------------------------------------------------


def per_row(sweep: Sweep, op: Op, *args: Any, **kwargs: Any) -> Any:
    """Apply the operation to every row, jointly in all arguments that depend on the parameters.

    Other floating-point tensors among the arguments are additive, and so have zero derivatives.
    """
    return apply_per_row(sweep, op, linear_part(op), args, kwargs)


def first_argument_per_row(sweep: Sweep, op: Op, *args: Any, **kwargs: Any) -> Any:
    """The same where the operation is linear in its first argument and others are constants."""
    return apply_per_row(sweep, op, linear_part(op), args, kwargs, keep_constants=True)


def apply_per_row(
    sweep: Sweep,
    op: Op,
    func: Callable[..., Any],
    args: Any,
    kwargs: Any,
    keep_constants: bool = False,
) -> Any:
    """Run ``func`` on every row through vmap, or one row after the other where vmap cannot."""
    moving = {v.slot: v for v in find_values((args, kwargs)) if sweep.tangent(v) is not None}
    if not moving:
        return None
    tangents = [sweep.tangent(v) for v in moving.values()]
    first, second, rows = align([t for t in tangents if t is not None])
    slots = list(moving)

    def call(*one_row: Tensor) -> Any:
        given = dict(zip(slots, one_row, strict=True))
        return func(*fill(args, given, keep_constants), **fill(kwargs, given, keep_constants))

    try:
        if any(r.dim() == 1 for r in rows):  # of single numbers vmap rolls the stack, for one
            raise NotImplementedError
        with without_vmap_fallback():
            result = torch.vmap(call)(*rows)
    except (RuntimeError, NotImplementedError, ValueError):  # an operation that vmap does not know
        results = [call(*one_row) for one_row in zip(*rows, strict=True)]
        if isinstance(results[0], tuple | list):
            result = [torch.stack(parts) for parts in zip(*results, strict=True)]
        else:
            result = torch.stack(results)
    if isinstance(result, tuple | list):
        outputs = zip(op.outputs, result, strict=True)
        return [None if v is None else Tangent(first, second, r) for v, r in outputs]
    return Tangent(first, second, result)


@contextmanager
def without_vmap_fallback() -> Iterator[None]:
    """Let vmap raise where it would warn and go through the rows itself."""
    functorch = torch._C._functorch
    before = functorch._is_vmap_fallback_enabled()  # type: ignore[attr-defined]
    functorch._set_vmap_fallback_enabled(False)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        functorch._set_vmap_fallback_enabled(before)  # type: ignore[attr-defined]


def fill(tree: Any, given: dict[int | None, Tensor], keep_constants: bool) -> Any:
    """Put rows in the place of values."""
    if isinstance(tree, Value):
        if tree.slot in given:
            return given[tree.slot].to(tree.tensor.dtype)
        number = tree.tensor.dtype.is_floating_point or tree.tensor.is_complex()
        keep = keep_constants or not number
        return tree.now.detach() if keep else torch.zeros_like(tree.tensor)
    if isinstance(tree, tuple | list):
        return type(tree)(fill(x, given, keep_constants) for x in tree)
    if isinstance(tree, dict):
        return {key: fill(x, given, keep_constants) for key, x in tree.items()}
    return tree


def linear_part(op: Op) -> Callable[..., Any]:
    """Return the function of a call, without its constant part, and not in place."""
    func = WITHOUT_CONSTANT.get(op.name, op.func)
    if str(getattr(func, "__name__", "")).endswith("_"):
        func = getattr(torch, op.name, None) or getattr(Tensor, op.name)
    return func


def _pad(x: Tensor, pad: Any, mode: str = "constant", value: Any = None) -> Tensor:
    return torch._C._nn.pad(x, pad, mode, 0.0 if mode == "constant" else None)


def _scatter(x: Tensor, dim: int, index: Tensor, src: Any = None, value: Any = None) -> Tensor:
    given = src if src is not None else value
    return torch.scatter(x, dim, index, given if isinstance(given, Tensor) else 0.0)


def _pad_packed(data: Tensor, batch_sizes: Tensor, batch_first: bool, value: Any, n: int) -> Any:
    return torch._C._VariableFunctions._pad_packed_sequence(data, batch_sizes, batch_first, 0.0, n)


def _index_fill(x: Tensor, dim: int, index: Tensor, value: Any) -> Tensor:
    return torch.index_fill(x, dim, index, value if isinstance(value, Tensor) else 0.0)


WITHOUT_CONSTANT: dict[str, Callable[..., Any]] = {
    "pad": _pad,
    "scatter": _scatter,
    "index_fill": _index_fill,
    "_pad_packed_sequence": _pad_packed,
}

PER_ROW = names("""
    pad masked_scatter scatter scatter_add index_add index_copy
    index_fill index_put put gather take take_along_dim index_select masked_select select_scatter
    slice_scatter diagonal_scatter
    cumsum diff flip fliplr flipud roll rot90 tril triu trace
    diagonal linalg_diagonal diag diag_embed diagflat
    repeat tile repeat_interleave narrow narrow_copy select select_copy unfold im2col col2im
    _pack_padded_sequence _pad_packed_sequence
    split chunk unbind tensor_split split_with_sizes unsafe_split unsafe_chunk
    unsafe_split_with_sizes hsplit vsplit dsplit
    movedim moveaxis swapaxes swapdims adjoint
    pixel_shuffle pixel_unshuffle channel_shuffle
    avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d
    max_unpool2d max_unpool3d
    upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d
    _upsample_nearest_exact2d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d
    upsample_bicubic2d upsample_trilinear3d _upsample_bilinear2d_aa _upsample_bicubic2d_aa
    hstack vstack row_stack dstack column_stack block_diag atleast_1d atleast_2d atleast_3d
    combinations cartesian_prod meshgrid broadcast_tensors
    real imag conj conj_physical resolve_conj resolve_neg complex view_as_real
    fft_fft fft_fft2 fft_fftn fft_ifft fft_ifft2 fft_ifftn fft_rfft fft_rfft2 fft_rfftn fft_irfft
    fft_irfft2 fft_irfftn fft_hfft fft_ihfft fft_fftshift fft_ifftshift
""")

FIRST_ARGUMENT_PER_ROW = ["nll_loss_nd"]

SAME_ORDER = names("""
    view reshape flatten unflatten squeeze unsqueeze view_as reshape_as ravel contiguous clone to
    float double half bfloat16 type type_as cuda cpu
""")

LINEAR: dict[str, Rule] = {
    **dict.fromkeys(SAME_ORDER, same_order),
    **dict.fromkeys(PER_ROW, per_row),
    **dict.fromkeys(FIRST_ARGUMENT_PER_ROW, first_argument_per_row),
    **dict.fromkeys(["expand", "expand_as", "broadcast_to"], expand),
    "transpose": transpose,
    **dict.fromkeys(["T", "mT", "H", "mH", "t"], matrix_transpose),
    "permute": permute,
    "centered": centered,
    "view_as_complex": as_complex,
    "__getitem__": getitem,
    "__setitem__": setitem,
    **dict.fromkeys(["read_view", "as_strided"], read_view),
    "write_view": write_view,
    **dict.fromkeys(["copy", "fill"], copy),
    "zero": zero,
    "embedding": embedding,
    "where": where,
    "masked_fill": masked_fill,
    "constant_pad_nd": constant_pad,
    "add": add,
    "sub": sub,
    "subtract": sub,
    "rsub": rsub,
    "neg": neg,
    "negative": neg,
    "sum": reduce,
    "mean": reduce,
    "cat": cat,
    "concat": cat,
    "concatenate": cat,
    "stack": stack,
}
