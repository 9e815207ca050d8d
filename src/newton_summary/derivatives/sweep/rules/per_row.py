"""Linear operations without their own rule: applied to every row, through ``torch.vmap``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from newton_summary.derivatives.sweep.tape import Op, Sweep, Tangent, Value, align, map_tree
from newton_summary.derivatives.sweep.torch_functions import names


def per_row(sweep: Sweep, op: Op, *args: Any, **kwargs: Any) -> Any:
    """Apply the operation to every row, jointly in all arguments that depend on the parameters.

    Other floating-point tensors among the arguments are additive, and so have zero derivatives;
    but in some operations they are factors. Through vmap, or row by row where vmap cannot.
    """
    func, keep_constants = WITHOUT_CONSTANT.get(op.name, op.func), op.name in WITH_FACTORS
    if str(getattr(func, "__name__", "")).endswith("_"):  # not in place
        func = getattr(torch, op.name, None) or getattr(Tensor, op.name)
    moving = sweep.moving((args, kwargs))
    if not moving:
        return None
    first, second, rows = align(list(moving.values()))

    def call(*one_row: Tensor) -> Any:
        given = dict(zip(moving, one_row, strict=True))
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
        return [Tangent(first, second, r) for r in result]
    return Tangent(first, second, result)


@contextmanager
def without_vmap_fallback() -> Iterator[None]:
    """Make vmap raise where it would warn and loop over the rows itself."""
    functorch = torch._C._functorch
    before = functorch._is_vmap_fallback_enabled()  # type: ignore[attr-defined]
    functorch._set_vmap_fallback_enabled(False)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        functorch._set_vmap_fallback_enabled(before)  # type: ignore[attr-defined]


def fill(tree: Any, given: dict[int, Tensor], keep_constants: bool) -> Any:
    """Replace values by rows."""

    def row(value: Any) -> Any:
        if not isinstance(value, Value):
            return value
        if value.slot in given:
            return given[value.slot].to(value.tensor.dtype)
        number = value.tensor.dtype.is_floating_point or value.tensor.is_complex()
        keep = keep_constants or not number
        return value.now.detach() if keep else torch.zeros_like(value.tensor)

    return map_tree(row, tree)


def _scatter(x: Tensor, dim: int, index: Tensor, src: Any = None, value: Any = None) -> Tensor:
    given = src if src is not None else value
    return torch.scatter(x, dim, index, given if isinstance(given, Tensor) else 0.0)


WITHOUT_CONSTANT: dict[str, Callable[..., Any]] = {
    "pad": lambda x, pad, mode="constant", value=None: torch._C._nn.pad(
        x, pad, mode, 0.0 if mode == "constant" else None
    ),
    "scatter": _scatter,
    "index_fill": lambda x, dim, index, value: torch.index_fill(
        x, dim, index, value if isinstance(value, Tensor) else 0.0
    ),
    "_pad_packed_sequence": lambda data, sizes, batch_first, value, n: (
        torch._C._VariableFunctions._pad_packed_sequence(data, sizes, batch_first, 0.0, n)
    ),
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

WITH_FACTORS = ["nll_loss_nd"]

ROW_BY_ROW: dict[str, Callable[..., Any]] = dict.fromkeys([*PER_ROW, *WITH_FACTORS], per_row)
