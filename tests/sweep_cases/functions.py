"""Reductions and functions of one number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import get_overridable_functions

from newton_summary.derivatives.sweep.rules.elementwise import CURVED, PIECEWISE_LINEAR, RELATIVE
from newton_summary.derivatives.sweep.torch_functions import names
from sweep_cases.table import (
    OnCopy,
    case,
    layer,
    numbers,
    positive,
    probability,
    wide,
)

# --- reductions -----------------------------------------------------------------------------------

REDUCTIONS: dict[str, Callable[[Tensor], Any]] = {  # of a tensor (2, 3, 4)
    "sum": lambda x: x.sum(),
    "sum over a dimension": lambda x: x.sum(1),
    "sum over several": lambda x: torch.sum(x, dim=(0, -1), keepdim=True),
    "sum over axis": lambda x: torch.sum(x, axis=1),
    "sum as dtype": lambda x: x.sum(dtype=torch.float64) + x.sum(-1, dtype=torch.float64),
    "sum of no dimensions": lambda x: x.sum(()),
    "mean": lambda x: x.mean(),
    "mean over a dimension": lambda x: x.mean(-1, keepdim=True),
    "mean over several": lambda x: torch.mean(x, (0, 1)),
    "nansum": lambda x: x.nansum(1),
    "nanmean": lambda x: x.nanmean(1),
    "sum_to_size": lambda x: x.sum_to_size(1, 4),
    "amax": lambda x: x.amax(1),
    "amax over several": lambda x: torch.amax(x, dim=(0, 2), keepdim=True),
    "amin of all": lambda x: x.amin(),
    "amax of equal entries": lambda x: torch.stack([x, x, x - 3]).amax(0),
    "max of equal entries": lambda x: torch.stack([x, x]).max() * torch.cat([x, x]).min(),
    "maximum of equal entries": lambda x: torch.maximum(x, x) + torch.minimum(x, 2 * x),
    "aminmax": lambda x: torch.aminmax(x, dim=1),
    "max": lambda x: x.max(),
    "min": lambda x: torch.min(x),
    "max over a dimension": lambda x: x.max(1),
    "max with keepdim": lambda x: torch.max(x, dim=-1, keepdim=True)[0],
    "min over a dimension": lambda x: x.min(dim=0).values,
    "max of two": lambda x: torch.max(x[0], x[1]),
    "min of two": lambda x: torch.min(x[0], x[1]),
    "median": lambda x: x.median(),
    "max over an axis": lambda x: torch.max(x, axis=1, keepdims=True),
    "max over an axis of numpy": lambda x: torch.max(x, np.int64(0)),
    "softmax over an axis": lambda x: torch.softmax(x, axis=0) * torch.log_softmax(x, axis=1),
    "sort over an axis": lambda x: torch.sort(x, axis=0)[0] + torch.topk(x, 2, axis=0)[0],
    "logsumexp over an axis": lambda x: torch.logsumexp(x, axis=(0, 1)),
    "names of numpy": lambda x: torch.add(x1=x, x2=x.sum(axis=0)) * torch.sum(a=x, axis=1)[:, None],
    "var over an axis": lambda x: x.var(axis=0) * x.std(axis=0, keepdims=True),
    "median over a dimension": lambda x: x.median(1),
    "nanmedian": lambda x: x.nanmedian(-1, keepdim=True),
    "mode": lambda x: x.mode(1),
    "kthvalue": lambda x: x.kthvalue(2, 1),
    "topk": lambda x: x.topk(2),
    "topk over a dimension": lambda x: torch.topk(x, 2, dim=1, largest=False),
    "sort": lambda x: x.sort(),
    "sort over a dimension": lambda x: torch.sort(x, dim=1, descending=True),
    "stable sort": lambda x: torch.sort(x, dim=0, stable=True),
    "msort": lambda x: torch.msort(x),
    "cummax": lambda x: x.cummax(1),
    "cummin": lambda x: torch.cummin(x, dim=-1),
    "quantile": lambda x: x.quantile(0.3),
    "quantile over a dimension": lambda x: x.quantile(torch.tensor([0.2, 0.7]).double(), dim=1),
    "prod": lambda x: (1 + x[0]).prod(),
    "prod over a dimension": lambda x: x.prod(1),
    "prod with keepdim": lambda x: torch.prod(x, dim=-1, keepdim=True),
    "cumsum": lambda x: x.cumsum(1),
    "cumprod": lambda x: x.cumprod(1),
    "logcumsumexp": lambda x: x.logcumsumexp(1),
    "diff": lambda x: x.diff(dim=1),
    "trapezoid": lambda x: torch.trapezoid(x, dim=1),
    "var": lambda x: x.var(),
    "var over a dimension": lambda x: x.var(1),
    "var, biased": lambda x: x.var(1, False),
    "var with correction": lambda x: torch.var(x, dim=(0, 1), correction=0, keepdim=True),
    "var, unbiased keyword": lambda x: torch.var(x, -1, unbiased=False, keepdim=True),
    "var of all, biased": lambda x: x.var(False),
    "std": lambda x: x.std(),
    "std over a dimension": lambda x: torch.std(x, -1, keepdim=True),
    "var_mean": lambda x: torch.var_mean(x, dim=1),
    "std_mean": lambda x: torch.std_mean(x, 1, keepdim=True),
    "norm": lambda x: x.norm(),
    "norm over a dimension": lambda x: x.norm(dim=1),
    "norm 1": lambda x: x.norm(1),
    "norm 3": lambda x: x.norm(p=3, dim=-1, keepdim=True),
    "norm 0.5": lambda x: x.norm(p=0.5, dim=0),
    "norm inf": lambda x: x.norm(float("inf"), dim=1),
    "norm -inf": lambda x: x.norm(-float("inf"), dim=1),
    "norm fro": lambda x: torch.norm(x, p="fro", dim=(1, 2)),
    "linalg.norm": lambda x: torch.linalg.norm(x),
    "linalg.norm 1": lambda x: torch.linalg.norm(x[0], 1),
    "linalg.vector_norm": lambda x: torch.linalg.vector_norm(x, dim=(0, 1)),
    "linalg.vector_norm 3": lambda x: torch.linalg.vector_norm(x, 3, dim=1),
    "linalg.matrix_norm": lambda x: torch.linalg.matrix_norm(x),
    "dist": lambda x: torch.dist(x[0], x[1], 3),
    "normalize": lambda x: F.normalize(x, dim=-1),
    "normalize 3": lambda x: F.normalize(x, 3, dim=1),
    "renorm": lambda x: x.renorm(2, 0, 0.5),
    "logsumexp": lambda x: x.logsumexp(1),
    "logsumexp over several": lambda x: torch.logsumexp(x, (0, -1), keepdim=True),
    "special.logsumexp": lambda x: torch.special.logsumexp(x, 0),
    "logaddexp": lambda x: torch.logaddexp(x[0], x[1]),
    "logaddexp2": lambda x: torch.logaddexp2(x[0], x[1]),
    "softmax": lambda x: x.softmax(1),
    "softmax as dtype": lambda x: torch.softmax(x, dim=-1, dtype=torch.float64),
    "F.softmax": lambda x: F.softmax(x, 0),
    "log_softmax": lambda x: x.log_softmax(1),
    "F.log_softmax": lambda x: F.log_softmax(x, dim=-1),
    "special.softmax": lambda x: torch.special.softmax(x, 1) * torch.special.log_softmax(x, 1),
    "F.softmin": lambda x: F.softmin(x, 1),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x, tau=1.5, dim=1),
    "cov": lambda x: torch.cov(x[0]),
    "corrcoef": lambda x: torch.corrcoef(x[0]),
    "count_nonzero and argmax": lambda x: x.sum() * x.argmax() + x.count_nonzero(),
}
REDUCTIONS_GENERIC = {
    "prod": "prod",
    "prod over a dimension": "prod",
    "prod with keepdim": "prod",
    "cumprod": "cumprod",
    "quantile": "quantile",
    "quantile over a dimension": "quantile",
    "trapezoid": "trapezoid",
    "renorm": "renorm",
    "linalg.norm 1": "linalg_norm",
    "cov": "cov",
    "corrcoef": "corrcoef",
}
for name, operation in REDUCTIONS.items():
    case(name, operation, (2, 3, 4), generic=REDUCTIONS_GENERIC.get(name, ""))
NUMBER: dict[str, Callable[[Tensor], Any]] = {  # of a tensor of no dimensions
    "max": lambda x: x.max(0),
    "amax": lambda x: x.amax(),
    "sort": lambda x: x.sort(0),
    "roll": lambda x: x.roll(3),
    "softmax": lambda x: x.softmax(0) * x,
    "log_softmax": lambda x: x.log_softmax(-1) + x,
    "logsumexp": lambda x: x.logsumexp(0),
    "logcumsumexp": lambda x: x.logcumsumexp(0),
    "sum": lambda x: x.sum(0) * x.mean(-1),
    "norm": lambda x: x.norm(dim=0),
    "transpose": lambda x: x.transpose(0, -1) * x.T,
    "masked_fill": lambda x: x.masked_fill(torch.tensor([True, False]), 0.3),
    "cumsum": lambda x: x.cumsum(0) * x.flatten(),
}
for name, operation in NUMBER.items():
    case(f"{name} of a number", operation, ())
ROWS = torch.tensor([[0.0], [1.0], [2.0]])  # a factor that makes a row zero
ZERO_ROWS: dict[str, Callable[[Tensor], Any]] = {  # of a tensor (3, 4): torch's derivative is 0
    "norm": lambda x: (x * ROWS).norm(dim=1),
    "norm 3": lambda x: (x * ROWS).norm(3, dim=1),
    "std": lambda x: (x * ROWS).std(1),
    "normalize": lambda x: F.normalize(x * ROWS, dim=1),
    "cosine_similarity": lambda x: F.cosine_similarity(x * ROWS, x),
}
for name, operation in ZERO_ROWS.items():
    case(f"{name} of a row of zeros", operation, (3, 4))
case("maximum", torch.maximum, (3, 4), (4,))
case("minimum", torch.minimum, (3, 4), (3, 1))
case("fmax and fmin", lambda a, b: torch.fmax(a, b) * torch.fmin(a, b), (3, 4), (3, 4))
case("maximum with a constant", lambda a: torch.maximum(a, torch.tensor(0.1)), (3, 4))

# --- elementwise: every entry of the tables -------------------------------------------------------

ELEMENTWISE = [*CURVED, *RELATIVE, *PIECEWISE_LINEAR]
FUNCTIONS = {
    **{name: f for name, f in vars(torch._C._nn).items() if callable(f)},
    **{
        f.__name__: f
        for some in get_overridable_functions().values()
        for f in some
        if hasattr(f, "__name__")
    },
    **{name: getattr(torch, name) for name in ELEMENTWISE if hasattr(torch, name)},
}
POSITIVE = names("log log2 log10 log1p sqrt rsqrt reciprocal pow")
LEVEL = [torch.sign, torch.sgn, torch.floor, torch.ceil, torch.round, torch.trunc, torch.fix]
LEVEL.append(torch.special.round)
DOMAINS = {
    **dict.fromkeys(POSITIVE, positive),
    **dict.fromkeys(["acosh", "arccosh"], lambda x: 2 + 0.6 * x),
    **dict.fromkeys(["asin", "arcsin", "acos", "arccos", "atanh", "arctanh"], lambda x: 0.8 * x),
    **dict.fromkeys(["relu6", "hardsigmoid", "hardswish"], lambda x: 3 * (x + 1) - 2),
}
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "threshold": (0.1, 0.3),
    "clamp": (-0.3, 0.4),
    "clip": (-0.3, 0.4),
    "clamp_min": (0.1,),
    "clamp_max": (0.1,),
    "pow": (2.5,),
}
for name in ELEMENTWISE:
    case(
        f"elementwise {name}",
        lambda x, n=name: FUNCTIONS[n](x, *ARGUMENTS.get(n, ())),
        (2, 3),
        domain=DOMAINS.get(name, lambda x: x),
    )

case("clamp below", lambda x: x.clamp(min=-0.2) * x.clamp(max=0.3), (2, 3))
case("clamp with tensors", lambda x, low: torch.clamp(x, min=low), (2, 3), (3,))
case("clip with tensors", lambda x, low, high: torch.clip(x, low, high), (2, 3), (3,), (2, 1))
case("clamp_min with a tensor", torch.clamp_min, (2, 3), (3,))
case("clamp_max with a tensor", torch.clamp_max, (2, 3), (3,))
case("clamp with larger limits", lambda x: x.clamp(min=numbers(2, 3) / 2), (3,))
case("pow with a larger exponent", lambda x: x ** (2 + numbers(2, 3)), (3,), domain=positive)
case("clamp with constants", lambda x: x.clamp(numbers(3) / 2, torch.tensor(0.4)), (2, 3))
case("logit", lambda x: torch.logit(x) + torch.special.logit(x), (2, 3), domain=probability)
case("logit with eps", lambda x: torch.logit(x, 0.3), (2, 3), domain=probability)
case("gelu tanh", lambda x: F.gelu(x, approximate="tanh"), (2, 3), domain=wide)
case("powers at zero", lambda x: x.relu() ** 1 + x.relu() ** 0 + x.relu() ** 2, (2, 3))
case("powers at zero, tensors", lambda x: x.relu() ** torch.tensor([1.0, 2.0, 3.0]), (2, 3))
case("elu with alpha", lambda x: F.elu(x, 0.7), (2, 3), domain=wide)
case("celu with alpha", lambda x: F.celu(x, 0.7), (2, 3), domain=wide)
case("softplus with beta", lambda x: F.softplus(x, beta=2, threshold=3), (2, 3), domain=wide)
case("leaky_relu with a slope", lambda x: F.leaky_relu(x, 0.3), (2, 3), domain=wide)
case("hardtanh with limits", lambda x: F.hardtanh(x, -0.3, 0.6), (2, 3))
case("nan_to_num", lambda x: torch.nan_to_num(x, 0.5), (2, 3))
case("atan2", torch.atan2, (2, 3), (3,), domain=positive)
case("hypot", torch.hypot, (2, 3), (3,), domain=positive)
case("xlogy", torch.xlogy, (2, 3), (3,), domain=positive)
case("copysign", lambda x: torch.copysign(x, torch.tensor(-1.0)), (2, 3), generic="copysign")
case("level functions", lambda x: sum(f(3 * x) for f in LEVEL) * x, (2, 3))
case("special.xlogy", torch.special.xlogy, (2, 3), (3,), domain=positive)
case("xlogy of zeros", lambda x: torch.xlogy(x.relu(), x.relu()), (2, 3))
case("division with rounding", lambda x: x.div(0.3, rounding_mode="floor") * x, (2, 3))
case("sign and round", lambda x: x * x.sign() + x.round() * x.floor() + x.ceil() * x, (2, 3))
case("digamma", torch.digamma, (2, 3), domain=positive, generic="digamma")
case("lgamma", torch.lgamma, (2, 3), domain=positive, generic="lgamma")

# --- modules of torch.nn.modules.activation -------------------------------------------------------

SPECIAL_ACTIVATIONS = {"MultiheadAttention", "Threshold", "GLU", "Softmax2d", "PReLU"}
for name in torch.nn.modules.activation.__all__:
    if name not in SPECIAL_ACTIVATIONS:
        kind = getattr(nn, name)
        dim = {"dim": 1} if name in ("Softmax", "Softmin", "LogSoftmax") else {}
        layer(name, lambda k=kind, d=dim: k(**d), (2, 3), domain=wide)
        if "inplace" in kind.__init__.__code__.co_varnames:
            layer(
                f"{name} in place",
                lambda k=kind: OnCopy(k(inplace=True)),
                (2, 3),
                domain=wide,
            )
layer("Threshold", lambda: nn.Threshold(0.1, 0.4), (2, 3))
layer("GLU", lambda: nn.GLU(), (2, 4), domain=wide)
layer("GLU of a dimension", lambda: nn.GLU(0), (2, 4))
layer("Softmax2d", lambda: nn.Softmax2d(), (1, 2, 2, 2))
layer("PReLU", lambda: nn.PReLU(), (2, 3), domain=wide)
layer("PReLU with channels", lambda: nn.PReLU(3), (2, 3, 2), domain=wide)
layer("PReLU of a vector", lambda: nn.PReLU(), (3,), domain=wide)
layer("RReLU in evaluation", lambda: nn.RReLU().eval(), (2, 3), domain=wide)
