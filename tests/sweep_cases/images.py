"""Embeddings, pooling, interpolation, padding."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sweep_cases.table import (
    case,
    labels,
    layer,
    numbers,
    positive,
)

# --- embeddings -----------------------------------------------------------------------------------

case("embedding", lambda w: F.embedding(labels(4, 2, 3), w), (4, 2))
layer("Embedding", lambda: _Ignoring(nn.Embedding(4, 2), labels(4, 2, 3)), (2, 3, 2))
layer(
    "Embedding, sparse",
    lambda: _Ignoring(nn.Embedding(4, 2, sparse=True), labels(4, 2, 3)),
    (2, 3, 2),
)
layer("EmbeddingBag", lambda: _Ignoring(nn.EmbeddingBag(4, 2), labels(4, 2, 3)), (2, 2))
layer(
    "EmbeddingBag sum",
    lambda: _Ignoring(nn.EmbeddingBag(4, 2, mode="sum"), labels(4, 2, 3)),
    (2, 2),
)
layer(
    "EmbeddingBag max",
    lambda: _Ignoring(nn.EmbeddingBag(4, 2, mode="max"), labels(4, 2, 3)),
    (2, 2),
)


class _Ignoring(nn.Module):
    """A module of a constant, plus the input."""

    def __init__(self, module: nn.Module, constant: Tensor):
        super().__init__()
        self.module, self.constant = module, constant

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.module(self.constant)) * x


class Bags(nn.Module):
    """Bags of different sizes, one of them empty."""

    def __init__(self, mode: str, weighted: bool = False):
        super().__init__()
        self.bags = nn.EmbeddingBag(5, 2, mode=mode, padding_idx=1)
        self.weighted = weighted

    def forward(self, weights: Tensor) -> Tensor:
        words, offsets = torch.tensor([0, 2, 1, 4, 4, 3]), torch.tensor([0, 3, 3])
        return self.bags(words, offsets, weights if self.weighted else None) * weights.sum()


for mode in ("sum", "mean", "max"):
    layer(f"EmbeddingBag {mode} with offsets", lambda m=mode: Bags(m), (6,))
layer("EmbeddingBag with learned weights", lambda: Bags("sum", weighted=True), (6,))

# --- pooling, interpolation, padding --------------------------------------------------------------

for n in (1, 2, 3):
    sizes = (6, 5, 4)[:n]
    pools = {
        f"MaxPool{n}d": (2,),
        f"AvgPool{n}d": (2,),
        f"AdaptiveMaxPool{n}d": (3,),
        f"AdaptiveAvgPool{n}d": (3,),
        f"LPPool{n}d": (2, 2),
    }
    for name, arguments in pools.items():
        for what, shape in {"": (1, 2, *sizes), " without a batch": (1, *sizes)}.items():
            layer(
                name + what,
                lambda k=name, a=arguments: getattr(nn, k)(*a),
                shape,
                domain=positive if "LP" in name else lambda x: x,
            )
    layer(
        f"MaxPool{n}d strided",
        lambda n=n: getattr(nn, f"MaxPool{n}d")(3, stride=1, padding=1, dilation=1, ceil_mode=True),
        (1, 1, *sizes),
    )
    layer(
        f"AvgPool{n}d strided",
        lambda n=n: getattr(nn, f"AvgPool{n}d")(
            3, 2, padding=1, ceil_mode=True, count_include_pad=False
        ),
        (1, 1, *sizes),
    )
    layer(
        f"MaxPool{n}d with indices",
        lambda n=n: getattr(nn, f"MaxPool{n}d")(2, return_indices=True),
        (1, 2, *sizes),
    )
    layer(
        f"AdaptiveMaxPool{n}d with indices",
        lambda n=n: getattr(nn, f"AdaptiveMaxPool{n}d")(2, return_indices=True),
        (1, 2, *sizes),
    )
    case(
        f"max_unpool{n}d",
        lambda x, n=n: getattr(F, f"max_unpool{n}d")(
            *getattr(F, f"max_pool{n}d")(x, 2, return_indices=True), 2, output_size=x.shape
        ),
        (1, 2, *sizes),
    )
layer("LPPool1d 3", lambda: nn.LPPool1d(3, 2, ceil_mode=True), (1, 2, 5), domain=positive)
for n in (2, 3):
    layer(
        f"FractionalMaxPool{n}d",
        lambda n=n: getattr(nn, f"FractionalMaxPool{n}d")(2, output_ratio=0.6),
        (1, 1, *(6, 5, 5)[:n]),
    )
    layer(
        f"FractionalMaxPool{n}d with indices",
        lambda n=n: getattr(nn, f"FractionalMaxPool{n}d")(2, output_size=2, return_indices=True),
        (1, 1, *(6, 5, 5)[:n]),
    )

INTERPOLATION = {
    "nearest": (1, 2, 3),
    "nearest-exact": (1, 2, 3),
    "area": (1, 2, 3),
    "linear": (1,),
    "bilinear": (2,),
    "bicubic": (2,),
    "trilinear": (3,),
}
for mode, dimensions in INTERPOLATION.items():
    for n in dimensions:
        case(
            f"interpolate {mode} {n}d",
            lambda x, m=mode: F.interpolate(x, scale_factor=1.7, mode=m),
            (1, 2, *(4, 3, 2)[:n]),
        )
for mode in ("bilinear", "bicubic"):
    case(
        f"interpolate {mode}, antialias",
        lambda x, m=mode: F.interpolate(x, size=(2, 3), mode=m, antialias=True),
        (1, 1, 4, 4),
    )
    case(
        f"interpolate {mode}, corners",
        lambda x, m=mode: F.interpolate(x, size=(5, 3), mode=m, align_corners=True),
        (1, 1, 4, 4),
    )
layer("Upsample", lambda: nn.Upsample(scale_factor=2), (1, 1, 2, 2))
layer("UpsamplingBilinear2d", lambda: nn.UpsamplingBilinear2d(scale_factor=2), (1, 1, 2, 2))
case(
    "grid_sample",
    lambda x: F.grid_sample(x, 0.8 * numbers(1, 2, 2, 2).tanh(), align_corners=False),
    (1, 1, 3, 3),
    generic="grid_sampler",
)

for mode in ("constant", "reflect", "replicate", "circular"):
    for n in (1, 2, 3):
        case(
            f"pad {mode} {n}d",
            lambda x, m=mode, n=n: F.pad(x, (1, 2) * n, mode=m),
            (1, 1, *(4, 3, 3)[:n]),
        )
case("pad with a value", lambda x: F.pad(x, (1, 0, 2, 1), value=0.7), (2, 3))
case("pad, negative", lambda x: F.pad(x, (-1, 1, 1, -1), value=0.7), (3, 3))
case("constant_pad_nd", lambda x: torch.constant_pad_nd(x, (1, 1), 0.5), (3, 3))
for name in ("Zero", "Constant", "Reflection", "Replication", "Circular"):
    for n in (1, 2, 3):
        arguments = (1, 0.5) if name == "Constant" else (1,)
        layer(
            f"{name}Pad{n}d",
            lambda k=f"{name}Pad{n}d", a=arguments: getattr(nn, k)(*a),
            (1, 1, *(3, 3, 2)[:n]),
        )
