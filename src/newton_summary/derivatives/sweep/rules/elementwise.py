"""Functions applied entry by entry: three derivative arrays serve all groups.

    y1_s = f' x1_s
    y2_s = f' x2_s + f'' x1_s^2
    <delta, d2h[x1_s, x1_t]> = <delta f'' x1_s, x1_t>                        one Gram matrix
    <delta, d3h[x1_s, x1_s, x1_s] + 3 d2h[x1_s, x2_s]> = <delta, f''' x1_s^3 + 3 f'' x1_s x2_s>

The tables below give (f', f'', f''') of each as arrays, or its slope; ``None`` stands for zero. Of
complex numbers <a, b> is the real part of conj(a) b, and holomorphic functions have this rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from newton_summary.derivatives.sweep.rules import fused
from newton_summary.derivatives.sweep.rules.linear import Rows, on_rows
from newton_summary.derivatives.sweep.tape import (
    Op,
    Sweep,
    Tangent,
    Value,
    cast,
    gram,
    lift,
    parts_of,
    pick,
    plain,
    stretches,
    sums,
)
from newton_summary.derivatives.sweep.torch_functions import names

Derivatives = tuple[Tensor, Tensor | None, Tensor | None]
LOG2 = math.log(2)
IN_CACHE = 2**23  # bytes of all arrays that are passed at a time on a CPU


def curved(derivatives: Callable[..., Derivatives], relative: bool = False) -> Callable[..., Any]:
    """Return the rule for a function of one number.

    Args:
        derivatives: Gives (f', f'', f''') as a function of (x, y, *arguments).
        relative: Whether these are (x f', x^2 f'', x^3 f''') instead. Powers and logarithms near
            zero have derivatives beyond the range of float32, but not along relative changes.
    """

    def rule(sweep: Sweep, op: Op, x: Value, *args: Any, **kwargs: Any) -> Tangent | None:
        t = broadcast(sweep.known(x), op)
        if relative:
            X = cast(x.now, op.out.tensor.dtype)
            t = t.map(lambda rows: rows / X)
        known = [given(x), given(op.out)]
        if known[1].dtype == torch.bfloat16 and fused.available(known[1]):
            known = [value.float() for value in known]
        f1, f2, f3 = derivatives(*known, *plain(args), **plain(kwargs))
        if f2 is None:
            return t.map(lambda rows: rows * f1)
        delta = sweep.adjoint(op.out)
        if f1.is_cuda and f1.dtype == known[1].dtype:  # not so under autocast
            # First what is summed up, then the rows: two arrays as large as those are not held.
            third, is_summed = sweep.order == 3, delta is not None
            how = ("pass_elementwise", t, f1, f2, f3)
            passed = fused.run(*how, delta, third, op.wanted and not is_summed)
            if passed is not None:
                made = fused.contributed(sweep, t, passed)
                del passed
                if is_summed and op.wanted:
                    rows = fused.run(*how, None, third, True)
                    assert rows is not None
                    made = fused.contributed(sweep, t, rows)
                return made
        return _pass_curved(sweep, t, (f1, f2, f3), delta, op.wanted)

    return rule


def _pass_curved(
    sweep: Sweep, t: Tangent, derivatives: Derivatives, delta: Tensor | None, wanted: bool
) -> Tangent | None:
    """Pass a curved function by torch operations, on a CPU for as many entries as it caches."""
    k, third = len(t.first), sweep.order == 3
    same_groups = stretches(t.second, t.first)
    x = t.rows.reshape(len(t.rows), -1)
    y = x.new_empty((2 * k if third else k, x.shape[1])) if wanted else None
    arrays = *derivatives, None if delta is None else delta.conj()
    flat = [None if f is None else f.expand(t.shape).reshape(-1) for f in arrays]
    Hbar, D3, crossed = [], [], []
    at_a_time = x.shape[1] if x.is_cuda else max(1024, IN_CACHE // (6 * k * x.element_size()))
    for some in parts_of(x.shape[1], at_a_time):
        x1, x2 = x[:k, some], x[k:, some]
        f1, f2, f3, delta = (None if f is None else f[some] for f in flat)
        assert f1 is not None and f2 is not None
        squares = x1 * x1 if third else None
        if y is not None:
            torch.mul(x1, f1, out=y[:k, some])
            if squares is not None:
                y2 = torch.mul(squares, f2, out=y[k:, some])
                for mine, theirs in same_groups:
                    y2[mine].addcmul_(x2[theirs], f1)
        if delta is not None:
            if squares is not None and f3 is not None:  # <delta f3, x1^3>
                cubes = squares.mul_(x1).conj()
                D3.append(gram(cubes, (delta * f3)[None]).reshape(-1))
            work = torch.mul(x1, delta * f2, out=squares)
            Hbar.append(gram(work.conj(), x1))
            if t.second and third:  # 3 <delta f2 x1, x2>
                crossed.append(3 * sums(pick(t.first, work, t.second).mul_(x2)))
    if Hbar:
        sweep.add_Hbar(t.first, t.first, total(Hbar))
    for groups, found in ((t.first, D3), (t.second, crossed)):
        if found:
            sweep.add_D3(groups, total(found))
    if y is None:
        return None
    return Tangent(t.first, t.first if third else (), y.reshape(len(y), *t.shape))


def total(terms: list[Tensor]) -> Tensor:
    """Return the sum of tensors of one shape."""
    return terms[0] if len(terms) == 1 else torch.stack(terms).sum(0)


def given(value: Value) -> Tensor:
    """Return the numbers of a value; of one that the tables below do not read, only its shape."""
    return value.tensor if value.forgotten else value.now


def broadcast(t: Tangent, op: Op) -> Tangent:
    """Spread the derivatives of x out to the shape of y: another argument may have been larger."""
    shape = op.out.tensor.shape
    if t.shape == shape:
        return t
    return t.map(lambda rows: lift(rows, len(shape)).expand(len(rows), *shape))


def piecewise_linear(slope: Callable[..., Tensor]) -> Callable[..., Any]:
    """Return the rule for a function made of straight pieces, given its slope."""

    @on_rows
    def rule(op: Op, x: Value, *args: Any, **kwargs: Any) -> Rows:
        f1 = slope(given(x), given(op.out), *plain(args), **plain(kwargs))
        return lambda rows: lift(rows, op.out.tensor.dim()) * f1

    return rule


# --- functions made of straight pieces -----------------------------------------------------------


def _clamp_slope(x: Tensor, y: Tensor, min: Any = None, max: Any = None) -> Tensor:
    low, high = -math.inf if min is None else min, math.inf if max is None else max
    return ((x >= low) & (x <= high)).to(x.dtype)


def _hard_slope(low: float, high: float, slope: float) -> Callable[..., Tensor]:
    return lambda x, y, *args, **kwargs: ((x > low) & (x < high)).to(x.dtype) * slope


PIECEWISE_LINEAR: dict[str, Callable[..., Tensor]] = {
    "relu": lambda x, y, inplace=None: (y > 0).to(y.dtype),
    "relu6": _hard_slope(0, 6, 1),
    "leaky_relu": lambda x, y, negative_slope=0.01, inplace=None: torch.where(
        x > 0, torch.ones_like(x), negative_slope
    ),
    "rrelu": lambda x, y, *args, **kwargs: torch.where(x < 0, y / torch.where(x < 0, x, 1.0), 1.0),
    "frac": lambda x, y: torch.ones_like(x),
    "hardtanh": lambda x, y, min_val=-1.0, max_val=1.0, inplace=None: (
        (x > min_val) & (x < max_val)
    ).to(x.dtype),
    "threshold": lambda x, y, threshold, value, inplace=None: (x > threshold).to(x.dtype),
    "hardsigmoid": _hard_slope(-3, 3, 1 / 6),
    "hardshrink": lambda x, y, lambd=0.5: (x.abs() > lambd).to(x.dtype),
    "softshrink": lambda x, y, lambd=0.5: (x.abs() > lambd).to(x.dtype),
    "abs": lambda x, y: x.sgn(),
    "absolute": lambda x, y: x.sgn(),
    "clamp": _clamp_slope,
    "clip": _clamp_slope,
    "clamp_min": lambda x, y, min: (x >= min).to(x.dtype),
    "clamp_max": lambda x, y, max: (x <= max).to(x.dtype),
    "nan_to_num": lambda x, y, *args, **kwargs: torch.isfinite(x).to(x.dtype),
    "deg2rad": lambda x, y: torch.full_like(x, math.pi / 180),
    "rad2deg": lambda x, y: torch.full_like(x, 180 / math.pi),
}


# Level pieces: no derivatives at all.
FLAT = names("sign sgn floor ceil round trunc fix special_round")


# --- smooth functions ----------------------------------------------------------------------------

Three = tuple[Tensor, Tensor, Tensor]


def _chain(outer: Three, inner: Three) -> Three:
    """Return the derivatives of f(g(x)), given those of f at g(x) and those of g."""
    (f1, f2, f3), (g1, g2, g3) = outer, inner
    return f1 * g1, f2 * g1 * g1 + f1 * g2, f3 * g1**3 + 3 * f2 * g1 * g2 + f1 * g3


def _times_x(x: Tensor, g: Tensor, derivatives: Three) -> Three:
    """Return the derivatives of x g(x)."""
    g1, g2, g3 = derivatives
    return g + x * g1, 2 * g1 + x * g2, 3 * g2 + x * g3


def tanh(x: Tensor, y: Tensor) -> Three:
    """Of the hyperbolic tangent y."""
    f1 = torch.addcmul(y.new_ones(()), y, y, value=-1)
    f2 = torch.addcmul(y.new_zeros(()), y, f1, value=-2)
    return f1, f2, (f1 * 4).addcmul_(f1, f1, value=-6)


def sigmoid(x: Tensor, y: Tensor) -> Three:
    """Of the logistic function y."""
    f1 = y * (1 - y)
    return f1, f1 * (1 - 2 * y), f1 * (1 - 6 * f1)


SELU = 1.6732632423543772848170429916717, 1.0507009873554804934193349852946


def _elu(x: Tensor, alpha: float = 1.0, slope: float = 1.0, rate: float = 1.0) -> Three:
    """``slope x`` for x > 0, ``alpha slope (exp(rate x) - 1)`` otherwise."""
    height = alpha * slope
    f1 = torch.clamp(x, max=0).mul_(rate).exp_().mul_(height * rate)
    f2 = (f1 * rate).masked_fill_(x >= 0, 0)  # none at 0 itself, as in torch
    return f1.masked_fill_(x > 0, slope), f2, f2 if rate == 1 else f2 * rate


def _gelu(x: Tensor, y: Tensor, approximate: str = "none") -> Three:
    if approximate == "none":  # x Phi(x), with phi' = -x phi
        cdf = 0.5 * (1 + torch.erf(x * math.sqrt(0.5)))
        pdf = torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
        return cdf + x * pdf, pdf * (2 - x * x), pdf * x * (x * x - 4)
    c, a = math.sqrt(2 / math.pi), 0.044715  # x (1 + t) / 2, t = tanh v, v = c (x + a x^3)
    squares = (x * math.sqrt(a * c)).square_()
    t = (squares + c).mul_(x).tanh_()
    v1, v2 = squares.mul_(3).add_(c), x * (6 * a * c)
    s = (t * t).neg_().add_(1)  # by v
    t1 = s * v1
    t_t1 = t * t1
    t2 = (s * v2).addcmul_(t_t1, v1, value=-2)
    t3 = (t1 * t1).addcmul_(t, t2).mul_(v1).addcmul_(t_t1, v2, value=2).mul_(-2)
    t3.add_(s, alpha=6 * a * c)
    f1 = t.add_(1).addcmul_(x, t1).mul_(0.5)
    return f1, torch.addcmul(t1, x, t2, value=0.5), t3.mul_(x).add_(t2, alpha=3).mul_(0.5)


def _silu(x: Tensor, y: Tensor, inplace: Any = None) -> Three:
    s = torch.sigmoid(x)
    return _times_x(x, s, sigmoid(x, s))


def _mish(x: Tensor, y: Tensor, inplace: Any = None) -> Three:
    t = torch.tanh(F.softplus(x))
    return _times_x(x, t, _chain(tanh(x, t), _softplus(x, y)))


def _softplus(x: Tensor, y: Tensor, beta: float = 1.0, threshold: float = 20.0) -> Three:
    s = torch.sigmoid(beta * x)
    s1, s2, _ = sigmoid(x, s)
    straight = beta * x > threshold
    f2, f3 = (f.masked_fill(straight, 0) for f in (beta * s1, beta * beta * s2))
    return s.masked_fill(straight, 1), f2, f3


def _log_sigmoid(x: Tensor, y: Tensor) -> Three:
    s1, s2, _ = sigmoid(x, torch.sigmoid(x))
    return torch.sigmoid(-x), -s1, -s2


def _hardswish(x: Tensor, y: Tensor, inplace: Any = None) -> Derivatives:
    middle = ((x > -3) & (x < 3)).to(x.dtype)
    f1 = torch.where(x >= 3, torch.ones_like(x), middle * (2 * x + 3) / 6)
    return f1, middle / 3, None


def _power(x: Tensor, y: Tensor, exponent: Any) -> Derivatives:
    n = exponent
    if isinstance(n, Tensor):
        factors = (n, n * (n - 1), n * (n - 1) * (n - 2))
        f1, f2, f3 = (torch.where(c == 0, 0.0, c * x ** (n - k)) for k, c in enumerate(factors, 1))
        return f1, f2, f3
    if n == 2:
        return 2 * x, torch.full_like(x, 2.0), None
    if n in (0, 1):
        return torch.full_like(x, n), None, None
    f1 = n * x ** (n - 1)
    if n == 3:
        return f1, 6 * x, torch.full_like(x, 6.0)
    return f1, n * (n - 1) * x ** (n - 2), n * (n - 1) * (n - 2) * x ** (n - 3)


def _relative_log(base: float) -> Callable[..., Three]:
    c = 1 / math.log(base)
    return lambda x, y: (torch.full_like(y, c), torch.full_like(y, -c), torch.full_like(y, 2 * c))


def _relative_power(n: float) -> Callable[..., Three]:
    return lambda x, y: (n * y, n * (n - 1) * y, n * (n - 1) * (n - 2) * y)


def _log1p(x: Tensor, y: Tensor) -> Three:
    d = 1 / (1 + x)
    return d, -(d**2), 2 * d**3


def _tan(x: Tensor, y: Tensor) -> Three:
    f1 = 1 + y * y
    return f1, 2 * y * f1, f1 * (2 + 6 * y * y)


def _periodic(slope: Callable[[Tensor], Tensor], sign: float) -> Callable[..., Three]:
    """Functions with f'' = sign f: sin, cos, sinh, cosh."""

    def derivatives(x: Tensor, y: Tensor) -> Three:
        f1 = slope(x)
        return f1, sign * y, sign * f1

    return derivatives


def _inverse_root(sign: float, square: float, one: float) -> Callable[..., Three]:
    """Functions with f' = sign / sqrt(one + square x^2): asin, acos, asinh, acosh."""

    def derivatives(x: Tensor, y: Tensor) -> Three:
        q = one + square * x * x
        f1 = sign * q**-0.5
        return f1, -square * x * f1 / q, f1 / q * (3 * x * x / q - square)

    return derivatives


def _rational(square: float) -> Callable[..., Three]:
    """Functions with f' = 1 / (1 + square x^2): atan, atanh."""

    def derivatives(x: Tensor, y: Tensor) -> Three:
        d = 1 / (1 + square * x * x)
        return d, -2 * square * x * d**2, d**2 * (8 * x * x * d - 2 * square)

    return derivatives


def _erf(sign: float) -> Callable[..., Three]:
    def derivatives(x: Tensor, y: Tensor) -> Three:
        f1 = sign * 2 / math.sqrt(math.pi) * torch.exp(-x * x)
        return f1, -2 * x * f1, f1 * (4 * x * x - 2)

    return derivatives


CURVED: dict[str, Callable[..., Derivatives]] = {
    "tanh": tanh,
    "sigmoid": sigmoid,
    "special_expit": sigmoid,
    "elu": lambda x, y, alpha=1.0, scale=1.0, input_scale=1.0, inplace=None: _elu(
        x, alpha, scale, input_scale
    ),
    "selu": lambda x, y, inplace=None: _elu(x, *SELU),
    "celu": lambda x, y, alpha=1.0, inplace=None: _elu(x, alpha, 1.0, 1 / alpha),
    "gelu": _gelu,
    "silu": _silu,
    "mish": _mish,
    "softplus": _softplus,
    "log_sigmoid": _log_sigmoid,
    "hardswish": _hardswish,
    "square": lambda x, y: _power(x, y, 2),
    "pow": _power,
    "exp": lambda x, y: (y, y, y),
    "exp2": lambda x, y: (y * LOG2, y * LOG2**2, y * LOG2**3),
    "expm1": lambda x, y: (y + 1,) * 3,
    "log1p": _log1p,
    "sin": _periodic(torch.cos, -1),
    "cos": _periodic(lambda x: -torch.sin(x), -1),
    "tan": _tan,
    "sinh": _periodic(torch.cosh, 1),
    "cosh": _periodic(torch.sinh, 1),
    "asin": _inverse_root(1, -1, 1),
    "acos": _inverse_root(-1, -1, 1),
    "asinh": _inverse_root(1, 1, 1),
    "acosh": _inverse_root(1, 1, -1),
    "atan": _rational(1),
    "atanh": _rational(-1),
    "erf": _erf(1),
    "erfc": _erf(-1),
}
# Of which the tables above read the argument alone, or the result alone.
OF_ARGUMENT = frozenset(names("elu selu celu gelu silu mish softplus square"))
OF_RESULT = frozenset(names("relu tanh sigmoid special_expit exp"))

CURVED |= {f"special_{name}": CURVED[name] for name in names("exp2 expm1 log1p erf erfc")}
CURVED |= {f"arc{name[1:]}": CURVED[name] for name in names("asin acos asinh acosh atan atanh")}

HOLOMORPHIC = frozenset(
    names("""
    exp exp2 special_exp2 expm1 special_expm1 log1p special_log1p square pow sigmoid special_expit
    tanh sin cos tan sinh cosh asin arcsin acos arccos asinh arcsinh acosh arccosh atan arctan atanh
    arctanh log log2 log10 sqrt rsqrt reciprocal
""")
)

RELATIVE: dict[str, Callable[..., Derivatives]] = {
    "log": _relative_log(math.e),
    "log2": _relative_log(2.0),
    "log10": _relative_log(10.0),
    "sqrt": _relative_power(0.5),
    "rsqrt": _relative_power(-0.5),
    "reciprocal": _relative_power(-1),
}
