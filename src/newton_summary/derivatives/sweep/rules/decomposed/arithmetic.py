"""Arithmetic of two or three tensors, entry by entry."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from newton_summary.derivatives.sweep.rules.decomposed.reductions import root


def div(a: Any, b: Any, *, rounding_mode: str | None = None, out: None = None) -> Any:
    """``a / b``: a times the reciprocal of b, where b depends on the parameters."""
    if rounding_mode is not None or not isinstance(b, Tensor) or not b.requires_grad:
        return NotImplemented
    return a * torch.reciprocal(b)


def power(base: Any, exponent: Any) -> Any:
    """``base ** exponent``: a power, an exponential, or both."""
    if not isinstance(exponent, Tensor) or not exponent.requires_grad:
        # The roots have rules that hold near zero; all other powers are recorded as "pow".
        root = None if isinstance(exponent, Tensor) else ROOTS.get(exponent)
        return NotImplemented if root is None else root(base)
    base = base if isinstance(base, Tensor) else torch.as_tensor(base, device=exponent.device)
    return torch.exp(exponent * torch.log(base.to(exponent.dtype)))


ROOTS: dict[float, Any] = {0.5: torch.sqrt, -0.5: torch.rsqrt, -1: torch.reciprocal}


def xlogy(x: Any, y: Any) -> Any:
    """``x log(y)``, and 0 where x = 0 and the logarithm is not defined."""
    x, y = (torch.as_tensor(v) for v in (x, y))
    return x * torch.log(torch.where((x == 0) & (y <= 0), 1.0, y))


def absolute(x: Tensor) -> Any:
    """The absolute value of complex numbers; its derivative at 0 is taken to be 0."""
    return root(torch.view_as_real(x).square().sum(-1)) if x.is_complex() else NotImplemented


def angle(x: Tensor) -> Any:
    """The angle of complex numbers: that of 0 does not move."""
    if not x.is_complex():
        return NotImplemented
    zero = x == 0
    return torch.where(zero, x.detach().angle(), torch.log(x.masked_fill(zero, 1.0)).imag)


def atan2(y: Tensor, x: Tensor) -> Tensor:
    """The angle of the point (x, y)."""
    dtype = torch.result_type(x, y)
    wide = torch.promote_types(dtype, torch.float32)  # there are no narrower complex numbers
    pair = torch.broadcast_tensors(x.to(wide), y.to(wide))  # type: ignore[no-untyped-call]
    return torch.angle(torch.complex(*pair)).to(dtype)


def logit(x: Tensor, eps: float | None = None) -> Tensor:
    """``log(x / (1 - x))``, of x between eps and 1 - eps."""
    x = x if eps is None else x.clamp(eps, 1 - eps)
    return torch.log(x) - torch.log1p(-x)


def one_of(a: Tensor, b: Tensor, first: Tensor) -> Tensor:
    """One of two for each entry; equal ones share, as in autograd."""
    mask = first.to(a.dtype) + 0.5 * (a == b).to(a.dtype)
    return a * mask + b * (1 - mask)


def of_two(choose: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Any]:
    """Return how to record ``torch.max(a, b)``, which is also called max."""

    def run(a: Tensor, b: Any = None, *args: Any, **kwargs: Any) -> Any:
        return choose(a, b) if isinstance(b, Tensor) else NotImplemented

    return run


def clamp(x: Tensor, min: Any = None, max: Any = None) -> Any:
    """Clamp between limits that depend on the parameters themselves."""
    if not any(isinstance(limit, Tensor) and limit.requires_grad for limit in (min, max)):
        return NotImplemented
    x = x if min is None else torch.maximum(x, torch.as_tensor(min, dtype=x.dtype))
    return x if max is None else torch.minimum(x, torch.as_tensor(max, dtype=x.dtype))


def logaddexp(a: Tensor, b: Tensor) -> Tensor:
    """``log(exp(a) + exp(b))``."""
    pair = torch.broadcast_tensors(a, b)  # type: ignore[no-untyped-call]
    return torch.logsumexp(torch.stack(pair), 0)


LOG2 = math.log(2)

ARITHMETIC: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(["div", "divide", "true_divide"], div),
    "pow": power,
    "float_power": lambda base, exponent: torch.pow(
        *(x.double() if isinstance(x, Tensor) else x for x in (base, exponent))
    ),
    **dict.fromkeys(["xlogy", "special_xlogy"], xlogy),
    **dict.fromkeys(["logit", "special_logit"], logit),
    **dict.fromkeys(["abs", "absolute"], absolute),
    "angle": angle,
    "polar": lambda size, angle: torch.complex(size * torch.cos(angle), size * torch.sin(angle)),
    **dict.fromkeys(["atan2", "arctan2"], atan2),
    "hypot": lambda a, b: root(a * a + b * b),
    "lerp": lambda input, end, weight: input + (end - input) * weight,
    "addcmul": lambda input, a, b, *, value=1: torch.add(input, a * b, alpha=value),
    "addcdiv": lambda input, a, b, *, value=1: torch.add(
        input, a * torch.reciprocal(b), alpha=value
    ),
    **dict.fromkeys(["maximum", "fmax"], lambda a, b: one_of(a, b, a > b)),
    **dict.fromkeys(["minimum", "fmin"], lambda a, b: one_of(a, b, a < b)),
    "max": of_two(torch.maximum),
    "min": of_two(torch.minimum),
    **dict.fromkeys(["clamp", "clip", "clamp_min"], clamp),
    "clamp_max": lambda x, max: clamp(x, None, max),
    "logaddexp": logaddexp,
    "logaddexp2": lambda a, b: logaddexp(a * LOG2, b * LOG2) / LOG2,
}
