"""Shapes, parts, joining, indexing, and writing in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sweep_cases.table import (
    case,
    numbers,
)

# --- shapes ---------------------------------------------------------------------------------------

SHAPES: dict[str, Callable[[Tensor], Any]] = {  # of a tensor (2, 3, 4)
    "view": lambda x: x.view(4, -1),
    "view with a list": lambda x: x.view([6, 4]),
    "view_as": lambda x: x.view_as(numbers(6, 4)),
    "reshape": lambda x: x.reshape(3, 8),
    "torch.reshape": lambda x: torch.reshape(x, (3, 8)),
    "reshape_as": lambda x: x.reshape_as(numbers(6, 4)),
    "flatten": lambda x: x.flatten(1),
    "ravel": lambda x: torch.ravel(x),
    "unflatten": lambda x: x.unflatten(-1, (2, 2)),
    "Flatten": lambda x: nn.Flatten(0)(x),
    "Unflatten": lambda x: nn.Unflatten(2, (2, 2))(x),
    "permute": lambda x: x.permute(2, 0, -2),
    "permute with a keyword": lambda x: torch.permute(x, dims=(2, 0, 1)),
    "permute with a list": lambda x: torch.permute(x, [2, 0, 1]),
    "transpose": lambda x: x.transpose(0, -1),
    "swapaxes": lambda x: x.swapaxes(0, 1),
    "swapdims": lambda x: x.swapdims(-1, 1),
    "movedim": lambda x: x.movedim(0, -1),
    "movedim, several": lambda x: torch.movedim(x, (0, 1), (2, 0)),
    "moveaxis": lambda x: torch.moveaxis(x, 0, 1),
    "T": lambda x: x[0].T,
    "mT": lambda x: x.mT,
    "H": lambda x: x[0].H,
    "mH": lambda x: x.mH,
    "adjoint": lambda x: x.adjoint(),
    "t": lambda x: x[0].t() + torch.t(x[1]),
    "t of a vector": lambda x: x[0, 0].t() * x[0, 1].T,
    "squeeze": lambda x: x[:, :1].squeeze(1),
    "squeeze everything": lambda x: torch.squeeze(x[:1, :, :1]),
    "squeeze several": lambda x: x[:1, :1].squeeze((0, 1)),
    "unsqueeze": lambda x: x.unsqueeze(-2),
    "expand": lambda x: x[:, :1].expand(-1, 3, -1),
    "expand, new dimensions": lambda x: x.expand(2, 2, 3, 4),
    "expand with a list": lambda x: x[0].expand([2, 3, 4]),
    "expand_as": lambda x: x[0].expand_as(x),
    "broadcast_to": lambda x: torch.broadcast_to(x[0], (2, 3, 4)),
    "broadcast_tensors": lambda x: torch.broadcast_tensors(x, x[0, 0]),
    "repeat": lambda x: x.repeat(2, 1, 1, 2),
    "tile": lambda x: x.tile(2, 1),
    "torch.tile": lambda x: torch.tile(x, (2, 1, 1)),
    "repeat_interleave": lambda x: x.repeat_interleave(2, 1),
    "repeat_interleave, all": lambda x: x.repeat_interleave(2),
    "repeat_interleave, uneven": lambda x: torch.repeat_interleave(
        x, torch.tensor([1, 0, 2]), dim=1
    ),
    "narrow": lambda x: x.narrow(-1, 1, 2),
    "select": lambda x: x.select(1, -1),
    "split": lambda x: x.split(2, 2),
    "split, uneven": lambda x: torch.split(x, [1, 3], dim=-1),
    "chunk": lambda x: x.chunk(2, dim=-1),
    "tensor_split": lambda x: x.tensor_split(3, dim=1),
    "hsplit": lambda x: torch.hsplit(x, 3),
    "vsplit": lambda x: torch.vsplit(x, 2),
    "dsplit": lambda x: torch.dsplit(x, 2),
    "unsafe_split": lambda x: torch.unsafe_split(x, 2, 2),
    "unsafe_split_with_sizes": lambda x: torch.unsafe_split_with_sizes(x, [1, 3], dim=-1),
    "unsafe_chunk": lambda x: torch.unsafe_chunk(x, 2, dim=-1),
    "split_with_sizes": lambda x: x.split_with_sizes([1, 2], 1),
    "narrow_copy": lambda x: torch.narrow_copy(x, -1, 1, 2),
    "select_copy": lambda x: torch.select_copy(x, 1, -1),
    "unbind": lambda x: x.unbind(1),
    "unpacking": lambda x: [a * b for a, b in zip(*x, strict=True)],
    "cat": lambda x: torch.cat([x, x[:, :1] * x[:, 1:2], numbers(2, 1, 4)], dim=1),
    "cat, from the end": lambda x: torch.cat((x, x), dim=-1),
    "concat": lambda x: torch.concat([x[0], x[1]]),
    "concatenate": lambda x: torch.concatenate([x[0], x[1]], axis=1),
    "stack": lambda x: torch.stack([x[0], numbers(3, 4), x[1] * x[0]], dim=-1),
    "stack, from the end": lambda x: torch.stack([x[0], x[1]], -2),
    "hstack": lambda x: torch.hstack([x, x * 2]),
    "vstack": lambda x: torch.vstack([x[0], x[1, 0]]),
    "row_stack": lambda x: torch.row_stack([x[0], x[1]]),
    "dstack": lambda x: torch.dstack([x[0], x[1]]),
    "column_stack": lambda x: torch.column_stack([x[0, 0], x[1].T]),
    "block_diag": lambda x: torch.block_diag(x[0], x[1, 0], numbers(1, 2)),
    "atleast_1d": lambda x: torch.atleast_1d(x[0, 0, 0]),
    "atleast_2d": lambda x: torch.atleast_2d(x[0, 0], x[0]),
    "atleast_3d": lambda x: torch.atleast_3d(x[0]),
    "meshgrid": lambda x: torch.meshgrid(x[0, 0], x[1, :, 0], indexing="ij"),
    "combinations": lambda x: torch.combinations(x[0, 0]),
    "flip": lambda x: x.flip(0, 2),
    "flip with a list": lambda x: torch.flip(x, [1]),
    "fliplr and flipud": lambda x: torch.fliplr(x) * torch.flipud(x),
    "rot90": lambda x: torch.rot90(x, 1, (0, 2)),
    "roll": lambda x: x.roll(1, -1),
    "roll, several": lambda x: torch.roll(x, (1, 2), (0, 2)),
    "roll, all": lambda x: torch.roll(x, 3),
    "tril": lambda x: x.tril(),
    "triu": lambda x: torch.triu(x, diagonal=1),
    "diagonal": lambda x: x.diagonal(0, 1, 2),
    "torch.diagonal": lambda x: torch.diagonal(x, offset=1, dim1=0, dim2=1),
    "linalg.diagonal": lambda x: torch.linalg.diagonal(x),
    "diag": lambda x: (torch.diag(x[0]), torch.diag(x[0, 0])),
    "diagflat": lambda x: torch.diagflat(x[0]),
    "diag_embed": lambda x: torch.diag_embed(x, 1),
    "trace": lambda x: torch.trace(x[0]),
    "unfold": lambda x: x.unfold(2, 2, 1),
    "F.unfold": lambda x: F.unfold(x[:, None], (2, 2), padding=1),
    "F.fold": lambda x: F.fold(x[:, :, :4].transpose(1, 2), (1, 6), (1, 4)),
    "pixel_shuffle": lambda x: F.pixel_shuffle(x.reshape(1, 4, 2, 3), 2),
    "pixel_unshuffle": lambda x: F.pixel_unshuffle(x.reshape(1, 1, 4, 6), 2),
    "channel_shuffle": lambda x: F.channel_shuffle(x.reshape(1, 4, 3, 2), 2),
    "contiguous": lambda x: x.transpose(0, 1).contiguous(),
    "clone": lambda x: x.clone(),
    "to": lambda x: x.to(torch.float64) * x.double(),
    "type_as": lambda x: x.type_as(numbers(1)) + x.type(torch.float64),
    "as_strided": lambda x: x.contiguous().as_strided((3, 2), (4, 1), 1),
    "Identity": lambda x: nn.Identity()(x) * x,
}
for name, operation in SHAPES.items():
    case(name, operation, (2, 3, 4))
case("cat with an empty one", lambda x: torch.cat([torch.empty(0).double(), x, x]), (2, 3))
case("cat of several", lambda a, b: torch.cat([a, b, a * 2]), (2, 3), (1, 3))
case("stack of several", lambda a, b: torch.stack([a, b], 1), (2, 3), (2, 3))

# --- indexing -------------------------------------------------------------------------------------

INDEX: dict[str, Any] = {  # of a tensor (3, 4, 2, 2)
    "int": 1,
    "ints": (1, -1, 0),
    "slice": slice(1, None),
    "slices": (slice(None, 2), slice(None, None, 2)),
    "ellipsis": (..., 0),
    "int and ellipsis": (0, ..., slice(1)),
    "None": (None, slice(None), None, 1),
    "None behind an ellipsis": (..., None),
    "mask": torch.tensor([True, False, True]),
    "mask of two dimensions": torch.arange(12).reshape(3, 4) % 3 == 0,
    "mask behind a slice": (slice(None), torch.tensor([True, False, True, True])),
    "list": [0, 2],
    "tensor": torch.tensor([0, 2, 2]),
    "tensor without repeats": torch.tensor([2, 0]),
    "tensor of two dimensions": torch.tensor([[0, 2], [1, 1]]),
    "two tensors": (torch.tensor([0, 1]), torch.tensor([3, -1])),
    "tensors apart": (torch.tensor([0, 1]), slice(None), torch.tensor([1, 0])),
    "tensors apart, behind": (slice(None), torch.tensor([0, 1]), slice(None), torch.tensor([1, 0])),
    "tensor and int apart": (torch.tensor([0, 1, 2]), slice(1, 3), 0),
    "tensor and None": (None, torch.tensor([2, 0]), ..., 1),
    "broadcast tensors": (torch.tensor([[0], [1]]), torch.tensor([2, 3, 0])),
    "tensor, no dimensions": torch.tensor(1),
    "True": True,
    "range": range(2),
    "array": np.array([2, 0]),
    "mask as a list": [True, False, True],
    "mask as an array": np.arange(12).reshape(3, 4) % 3 == 0,
    "mask of no dimensions": torch.tensor(True),
    "lists": ([0, 1], [3, 0]),
    "lists apart": ([0, 1], slice(None), [1, 0]),
}
for name, index in INDEX.items():
    case(f"x[{name}]", lambda x, i=index: x[i], (3, 4, 2, 2))


def put(x: Tensor, index: Any, value: Any) -> Tensor:
    x = x * 1
    x[index] = value
    return x


for name, index in INDEX.items():
    if name not in ("True", "tensor", "tensor of two dimensions"):  # which entry wins is not said
        case(f"x[{name}] = y", lambda x, y, i=index: put(x, i, y), (3, 4, 2, 2), ())
case("x[i] = row", lambda x, y: put(x, 1, y), (3, 4), (4,))
case("x[:, i] = column", lambda x, y: put(x, (slice(None), 1), y), (3, 4), (3,))
case(
    "x[mask] = entries",
    lambda x, y: put(x, torch.arange(12).reshape(3, 4) % 4 == 0, y),
    (3, 4),
    (3,),
)
case("x[i] = constant", lambda x: put(x, 1, numbers(4)), (3, 4))
case("x[i] = number", lambda x: put(x, 1, 0.5), (3, 4))
case("constant[i] = x", lambda x: put(numbers(3, 4), 1, x), (4,))
case("index_put", lambda x, y: x.index_put((torch.tensor([0, 2]),), y), (3, 4), (4,))
case(
    "index_put, add",
    lambda x, y: x.index_put((torch.tensor([0, 0]),), y, accumulate=True),
    (3, 4),
    (2, 4),
)
case("index_select", lambda x: x.index_select(-1, torch.tensor([0, 3, 3])), (3, 4))
case("index_add", lambda x, y: x.index_add(0, torch.tensor([0, 2, 0]), y, alpha=2), (3, 4), (3, 4))
case("index_copy", lambda x, y: x.index_copy(1, torch.tensor([0, 2]), y), (3, 4), (3, 2))
case("index_fill", lambda x: x.index_fill(0, torch.tensor([0, 2]), 0.7), (3, 4))
case("gather", lambda x: x.gather(1, torch.tensor([[0, 1], [3, 3], [1, 0]])), (3, 4))
case("torch.gather", lambda x: torch.gather(x, dim=0, index=torch.tensor([[0, 1], [2, 2]])), (3, 4))
case(
    "scatter", lambda x, y: x.scatter(1, torch.tensor([[0, 1], [3, 2], [1, 0]]), y), (3, 4), (3, 2)
)
case("scatter of a number", lambda x: x.scatter(1, torch.tensor([[0], [3], [1]]), 0.3), (3, 4))
case(
    "scatter, keywords",
    lambda x, y: torch.scatter(x, dim=0, index=torch.tensor([[0, 1]]), src=y),
    (3, 4),
    (1, 2),
)
case(
    "scatter onto zeros",
    lambda y: torch.zeros(3, 4).double().scatter(1, torch.tensor([[0], [3], [1]]), y),
    (3, 1),
)
case(
    "scatter_add",
    lambda x, y: x.scatter_add(1, torch.tensor([[0, 0], [3, 2], [1, 1]]), y),
    (3, 4),
    (3, 2),
)
PLACES = torch.tensor([[0, 0], [3, 2], [1, 1]])
for how in ("sum", "mean", "amax", "amin", "prod"):
    for own in (True, False):
        case(
            f"scatter_reduce {how}{'' if own else ' without itself'}",
            lambda x, y, r=how, own=own: x.scatter_reduce(1, PLACES, y, r, include_self=own),
            (3, 4),
            (3, 2),
            generic="scatter_reduce" if how == "prod" else "",
        )
    case(
        f"scatter_reduce_ {how} onto a constant",
        lambda y, r=how: torch.full((3, 4), 0.3).double().scatter_reduce_(1, PLACES, y, r),
        (3, 2),
        generic="scatter_reduce" if how == "prod" else "",
    )
    if how != "sum":
        case(
            f"index_reduce_ {how}",
            lambda x, y, r=how: (x * 1).index_reduce_(0, torch.tensor([2, 0, 2]), y, r),
            (3, 4),
            (3, 4),
            generic="scatter_reduce" if how == "prod" else "",
        )
    case(
        f"segment_reduce {how}",
        lambda x, r=how: torch.segment_reduce(
            x, r.removeprefix("a"), lengths=torch.tensor([2, 1]), axis=0
        ),
        (3, 4),
        generic="scatter_reduce" if how == "prod" else "",
    )
case(
    "scatter_reduce of equal ones",
    lambda x, y: x.scatter_reduce(1, PLACES, y[:, :1].expand(3, 2), "amax"),
    (3, 4),
    (3, 2),
)
case(
    "scatter_reduce onto an infinite constant",
    lambda y: torch.full((3, 4), -torch.inf).double().scatter_reduce(1, PLACES, y, "amax").exp(),
    (3, 2),
)
case("masked_select", lambda x: x.masked_select(torch.arange(12).reshape(3, 4) % 3 == 0), (3, 4))
case(
    "masked_scatter",
    lambda x, y: x.masked_scatter(torch.arange(12).reshape(3, 4) % 3 == 0, y),
    (3, 4),
    (5,),
)
case("masked_fill", lambda x: x.masked_fill(torch.arange(4) > 1, 0.3), (3, 4))
case("masked_fill with a tensor", lambda x, y: x.masked_fill(torch.arange(4) > 1, y), (3, 4), ())
case("masked_fill, broadcast", lambda x: x.masked_fill(torch.ones(2, 1, 1).bool(), 0.3) * x, (3, 4))
case("take", lambda x: torch.take(x, torch.tensor([[0, 5], [11, 5]])), (3, 4))
case("take_along_dim", lambda x: torch.take_along_dim(x, torch.tensor([[0, 1]]), dim=1), (3, 4))
case("put", lambda x, y: x.put(torch.tensor([0, 5]), y), (3, 4), (2,))
case("select_scatter", lambda x, y: x.select_scatter(y, 0, 1), (3, 4), (4,))
case("slice_scatter", lambda x, y: x.slice_scatter(y, 0, 1), (3, 4), (2, 4))
case("diagonal_scatter", lambda x, y: x.diagonal_scatter(y), (3, 4), (3,))
case("where", lambda x, y: torch.where(torch.arange(4) > 1, x, y), (3, 4), (4,))
case(
    "where of numbers", lambda x: torch.where(x > 0, x, 0.3) * torch.where(x > 0.1, 2.0, x), (3, 4)
)
case("where, method", lambda x, y: x.where(torch.arange(4) > 1, y), (3, 4), (3, 1))
case("where, constant", lambda x: torch.where(numbers(3, 4) > 0, numbers(3, 4), x), (4,))
case(
    "where of masked branches", lambda x: torch.where(x > 0, x.clamp_min(1e-9).log(), x * x), (3, 4)
)

# --- in place -------------------------------------------------------------------------------------

IN_PLACE: dict[str, Callable[[Tensor, Tensor], Any]] = {  # x (2, 3) may be written to; y (3,)
    "relu_": lambda x, y: x.relu_(),
    "F.relu, in place": lambda x, y: F.relu(x, inplace=True),
    "tanh_": lambda x, y: x.tanh_(),
    "sigmoid_": lambda x, y: torch.sigmoid_(x),
    "exp_": lambda x, y: x.exp_(),
    "add_": lambda x, y: x.add_(y, alpha=2),
    "sub_": lambda x, y: x.sub_(y),
    "mul_": lambda x, y: x.mul_(y),
    "div_": lambda x, y: x.div_(2 + y),
    "pow_": lambda x, y: x.pow_(3),
    "pow_ of a tensor": lambda x, y: x.add_(2).pow_(y),
    "neg_": lambda x, y: x.neg_(),
    "clamp_": lambda x, y: x.clamp_(-0.3, 0.4),
    "masked_fill_": lambda x, y: x.masked_fill_(torch.arange(3) > 1, 0.3),
    "fill_": lambda x, y: x.fill_(0.5) * y,
    "fill_ with a tensor": lambda x, y: x.fill_(value=y[0]) * y,
    "as_strided_": lambda x, y: x.as_strided_((2, 2), (1, 2)) * y[:2],
    "zero_": lambda x, y: x.zero_() + y,
    "copy_": lambda x, y: x.copy_(y),
    "lerp_": lambda x, y: x.lerp_(y.expand(2, 3), 0.3),
    "addcmul_": lambda x, y: x.addcmul_(y, y, value=0.5),
    "addmm_": lambda x, y: x.addmm_(y.expand(2, 3), torch.outer(y, y)),
    "index_add_": lambda x, y: x.index_add_(0, torch.tensor([1]), y[None]),
    "index_copy_": lambda x, y: x.index_copy_(0, torch.tensor([1]), y[None]),
    "index_fill_": lambda x, y: x.index_fill_(0, torch.tensor([1]), 0.3),
    "index_put_": lambda x, y: x.index_put_((torch.tensor([1]),), y),
    "scatter_": lambda x, y: x.scatter_(0, torch.tensor([[1, 0, 1]]), y[None]),
    "scatter_add_": lambda x, y: x.scatter_add_(0, torch.tensor([[1, 0, 1]]), y[None]),
    "cumsum_": lambda x, y: x.cumsum_(1),
    "tril_": lambda x, y: x.tril_(),
    "unsqueeze_": lambda x, y: x.unsqueeze_(1) * y,
    "squeeze_": lambda x, y: x.unsqueeze(0).squeeze_(0) * y,
    "t_": lambda x, y: x.t_() * 2,
    "transpose_": lambda x, y: x.transpose_(0, 1) * 2,
    "x += y": lambda x, y: _chained("+=", x, y),
    "x -= y": lambda x, y: _chained("-=", x, y),
    "x *= y": lambda x, y: _chained("*=", x, y),
    "x /= y": lambda x, y: _chained("/=", x, 2 + y),
    "x **= 2": lambda x, y: _chained("**=", x, 2),
    "x += number": lambda x, y: _chained("+=", x, 0.5),
    "used before and after": lambda x, y: x.tanh() + x.mul_(2).exp() * x.add_(y).sum(),
    "constant += x": lambda x, y: torch.zeros(2, 3).double().add_(x).mul_(y),
    "constant *= x": lambda x, y: numbers(2, 3).mul_(x).div_(2 + y),
    "row += y": lambda x, y: _row_update(x, y),
    "view written to": lambda x, y: (x.view(-1).mul_(2), x * y)[1],
    "view of a view written to": lambda x, y: (x.t()[1:].tanh_(), x * y)[1],
    "base written to": lambda x, y: _base_written(x, y),
    "column by column": lambda x, y: _column_by_column(x, y),
    "view of a constant written to": lambda x, y: _view_of_constant(x, y),
    "one entry of a view": lambda x, y: (x.view(-1)[3].mul_(2), x.exp() * y)[1],
    "chain of views": lambda x, y: _chain_of_views(x, y),
}


def _chained(sign: str, x: Tensor, y: Any) -> Tensor:
    if sign == "+=":
        x += y
    elif sign == "-=":
        x -= y
    elif sign == "*=":
        x *= y
    elif sign == "/=":
        x /= y
    else:
        x **= y
    return x


def _row_update(x: Tensor, y: Tensor) -> Tensor:
    x[1] += y
    x[:, 0] *= y[1]
    x[0, 1:].sigmoid_()
    return x


def _base_written(x: Tensor, y: Tensor) -> Tensor:
    row, column = x[0], x[:, 1]
    x.mul_(1 + y)
    return row * y + column.sum()


def _column_by_column(x: Tensor, y: Tensor) -> Tensor:
    out = torch.empty(2, 3, dtype=x.dtype)
    state = y[:2]
    for i in range(3):
        state = torch.tanh(state + x[:, i])
        out[:, i] = state
    return out


def _view_of_constant(x: Tensor, y: Tensor) -> Tensor:
    out = torch.ones(2, 3, dtype=x.dtype)
    out[0].copy_(y)
    out[1].add_(x[0]).neg_()
    out[:, 2].add_(x[:, 0])
    return out


def _chain_of_views(x: Tensor, y: Tensor) -> Tensor:
    flat = x.view(6)
    middle = flat[1:5]
    middle.sin_()
    flat.mul_(2)
    x[0].add_(y)
    middle.exp_()
    return x * flat.sum() + middle.mean()


for name, operation in IN_PLACE.items():
    case(f"in place: {name}", lambda x, y, f=operation: f(x * 1, y), (2, 3), (3,))
