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


ROOTS: dict[float, Callable[[Tensor], Tensor]] = {
    0.5: torch.sqrt,
    -0.5: torch.rsqrt,
    -1: torch.reciprocal,
}


def float_power(base: Any, exponent: Any) -> Any:
    """``base ** exponent`` in float64."""
    base, exponent = (x.double() if isinstance(x, Tensor) else x for x in (base, exponent))
    return torch.pow(base, exponent)


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


def polar(size: Tensor, angle: Tensor) -> Tensor:
    """Complex numbers from their absolute values and angles."""
    return torch.complex(size * torch.cos(angle), size * torch.sin(angle))


def atan2(y: Tensor, x: Tensor) -> Tensor:
    """The angle of the point (x, y)."""
    dtype = torch.result_type(x, y)
    wide = torch.promote_types(dtype, torch.float32)  # there are no narrower complex numbers
    pair = torch.broadcast_tensors(x.to(wide), y.to(wide))  # type: ignore[no-untyped-call]
    return torch.angle(torch.complex(*pair)).to(dtype)


def hypot(a: Tensor, b: Tensor) -> Tensor:
    """``sqrt(a^2 + b^2)``."""
    return root(a * a + b * b)


def logit(x: Tensor, eps: float | None = None) -> Tensor:
    """``log(x / (1 - x))``, of x between eps and 1 - eps."""
    x = x if eps is None else x.clamp(eps, 1 - eps)
    return torch.log(x) - torch.log1p(-x)


def lerp(input: Tensor, end: Tensor, weight: Any) -> Any:
    """``input + weight (end - input)``."""
    return input + (end - input) * weight


def addcmul(input: Tensor, a: Tensor, b: Tensor, *, value: float = 1) -> Tensor:
    """``input + value a b``."""
    return torch.add(input, a * b, alpha=value)


def addcdiv(input: Tensor, a: Tensor, b: Tensor, *, value: float = 1) -> Tensor:
    """``input + value a / b``."""
    return torch.add(input, a * torch.reciprocal(b), alpha=value)


def maximum(a: Tensor, b: Tensor) -> Tensor:
    """The larger of two; equal ones share, as in autograd."""
    return _choose(a, b, a > b)


def minimum(a: Tensor, b: Tensor) -> Tensor:
    """The smaller of two."""
    return _choose(a, b, a < b)


def _choose(a: Tensor, b: Tensor, first: Tensor) -> Tensor:
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


def clamp_max(x: Tensor, max: Any) -> Any:
    """``torch.clamp_max``."""
    return clamp(x, None, max)


def logaddexp(a: Tensor, b: Tensor) -> Tensor:
    """``log(exp(a) + exp(b))``."""
    pair = torch.broadcast_tensors(a, b)  # type: ignore[no-untyped-call]
    return torch.logsumexp(torch.stack(pair), 0)


def logaddexp2(a: Tensor, b: Tensor) -> Tensor:
    """``log2(2^a + 2^b)``."""
    return logaddexp(a * math.log(2), b * math.log(2)) / math.log(2)


ARITHMETIC: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(["div", "divide", "true_divide"], div),
    "pow": power,
    "float_power": float_power,
    **dict.fromkeys(["xlogy", "special_xlogy"], xlogy),
    **dict.fromkeys(["logit", "special_logit"], logit),
    **dict.fromkeys(["abs", "absolute"], absolute),
    "angle": angle,
    "polar": polar,
    **dict.fromkeys(["atan2", "arctan2"], atan2),
    "hypot": hypot,
    "lerp": lerp,
    "addcmul": addcmul,
    "addcdiv": addcdiv,
    **dict.fromkeys(["maximum", "fmax"], maximum),
    **dict.fromkeys(["minimum", "fmin"], minimum),
    "max": of_two(torch.maximum),
    "min": of_two(torch.minimum),
    **dict.fromkeys(["clamp", "clip", "clamp_min"], clamp),
    "clamp_max": clamp_max,
    "logaddexp": logaddexp,
    "logaddexp2": logaddexp2,
}
