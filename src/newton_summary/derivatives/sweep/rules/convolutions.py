"""Convolutions of batches: bilinear, as in ``products.py``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from newton_summary.derivatives.sweep.rules.products import Product, plus_bias, product
from newton_summary.derivatives.sweep.tape import Op, Sweep, Value, cast, parts_of
from newton_summary.derivatives.sweep.tf32 import convolutions_take_tf32

# Bytes of the result's derivatives that are computed at a time: cuDNN takes memory to work with.
AT_A_TIME = {"cpu": 2**24}
AT_A_TIME_ELSEWHERE = 2**27


def convolution(transposed: bool, n: int) -> Callable[..., Any]:
    """Return the rule for an n-dimensional convolution of a batch."""

    def rule(
        sweep: Sweep,
        op: Op,
        input: Value,
        weight: Value,
        bias: Any = None,
        stride: Any = 1,
        padding: Any = 0,
        *rest: Any,
        **kwargs: Any,
    ) -> Any:
        names = ("output_padding", "groups", "dilation") if transposed else ("dilation", "groups")
        given = {**dict(zip(names, rest, strict=False)), **kwargs}
        groups = given.get("groups", 1)
        dtype = op.out.tensor.dtype
        X, W = cast(input.now, dtype), cast(weight.now, dtype)
        settings = (
            per_dimension(stride, n),
            per_dimension(padding, n),
            per_dimension(given.get("dilation", 1), n),
            transposed,
            per_dimension(given.get("output_padding", 0), n),
            groups,
        )

        def conv(x: Tensor, w: Tensor) -> Tensor:
            return torch.convolution(x, w, None, *settings)

        def back(delta: Tensor, x: Tensor, w: Tensor, mask: list[bool]) -> Any:
            return torch.ops.aten.convolution_backward(delta, x, w, None, *settings, mask)

        most = AT_A_TIME.get(X.device.type, AT_A_TIME_ELSEWHERE)
        t = sweep.tangent(input)
        rows = len(t.first) + len(t.second) if t else 0
        in_pieces = X.device.type == "cpu" or rows * op.out.tensor.nbytes > most

        def left(rows: Tensor) -> Tensor:
            x = rows.reshape(-1, *rows.shape[2:])
            y = conv_by_columns(x, W, settings) if columns_pay(x, settings, op) else conv(x, W)
            return y.reshape(*rows.shape[:2], *y.shape[1:])

        def left_into(rows: Tensor, out: Tensor, add: bool) -> None:
            """Write a few rows at a time: a convolution makes a tensor of its own for them."""
            few = max(1, most // max(1, op.out.tensor.nbytes))
            for some in parts_of(len(rows), few):
                y = left(rows[some])
                out[some].add_(y) if add else out[some].copy_(y)

        h = Product(
            left=left,
            left_into=left_into if in_pieces else None,
            right=lambda rows: stacked(conv(X, row) for row in rows),
            pair=lambda a, b: stacked(conv(x, w) for x, w in zip(a, b, strict=True)),
            adjoint_left=lambda delta, rows: stacked(
                back(delta, X, row, [True, False, False])[0] for row in rows
            ),
            adjoint_right=lambda delta, rows: stacked(
                back(delta, row, W, [False, True, False])[1] for row in rows
            ),
        )
        return plus_bias(sweep, op, product(sweep, op, h, input, weight), bias, 1)

    return rule


def columns_pay(x: Tensor, settings: Any, op: Op) -> bool:
    """Whether a convolution is faster as a matrix product of patches.

    For small images (at most 16 positions) cuDNN in float32 reaches a tenth to a third of what a
    matrix product does: 15,000 images of 512 x 4 x 4 take 91 ms against 29 on an H200. Not so with
    TF32, where they take 3.5 against 8.6.
    """
    _, _, dilation, transposed, _, groups = settings
    if not x.is_cuda or x.dtype != torch.float32 or len(x) < 1000:
        return False
    positions = op.out.tensor.shape[2:].numel()
    plain = groups == 1 and not transposed and set(dilation) == {1}
    return plain and positions <= 16 and not convolutions_take_tf32()


def conv_by_columns(x: Tensor, w: Tensor, settings: Any, largest: int = 2**27) -> Tensor:
    """Convolve by multiplying the matrix of all patches, some images at a time."""
    stride, padding, *_ = settings
    x = F.pad(x, [p for pad in reversed(padding) for p in (pad, pad)])
    n = len(stride)
    out, patch = len(w), w[0].numel()
    sizes = [(x.shape[2 + i] - w.shape[2 + i]) // stride[i] + 1 for i in range(n)]
    results = []
    at_a_time = max(1, largest // (patch * torch.Size(sizes).numel()))
    for images in x.split(at_a_time):  # type: ignore[no-untyped-call]
        patches = images
        for i in range(n):
            patches = patches.unfold(2 + i, w.shape[2 + i], stride[i])
        # (images, channels, *positions, *offsets) -> (channels * offsets, images * positions)
        order = [1, *range(2 + n, 2 + 2 * n), 0, *range(2, 2 + n)]
        y = w.reshape(out, patch) @ patches.permute(order).reshape(patch, -1)
        results.append(y.reshape(out, len(images), *sizes).transpose(0, 1))
    return torch.cat(results)


def stacked(rows: Any) -> Tensor:
    """Stack tensors; a single one is not copied."""
    listed = list(rows)
    return listed[0][None] if len(listed) == 1 else torch.stack(listed)


def per_dimension(setting: Any, n: int) -> list[int]:
    """Write a setting of a convolution for every dimension."""
    if isinstance(setting, int):
        return [setting] * n
    return list(setting) * n if len(setting) == 1 else list(setting)


CONVOLUTIONS: dict[str, Callable[..., Any]] = {
    **{f"conv{n}d": convolution(False, n) for n in (1, 2, 3)},
    **{f"conv_transpose{n}d": convolution(True, n) for n in (1, 2, 3)},
}
