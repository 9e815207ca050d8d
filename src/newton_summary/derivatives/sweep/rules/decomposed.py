"""Operations that are recorded as several elementary ones: attention, losses, and some others.

Each function takes what the torch function of its name takes, and is run in its place with the
recorder active. ``NotImplemented`` means: record the call as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

MEAN, SUM = 1, 2  # how torch numbers reductions


def reduced(losses: Tensor, reduction: int) -> Tensor:
    """Apply a reduction by its number."""
    if reduction == MEAN:
        return losses.mean()
    return losses.sum() if reduction == SUM else losses


# --- arithmetic ----------------------------------------------------------------------------------


def div(a: Any, b: Any, *, rounding_mode: str | None = None, out: None = None) -> Any:
    """``a / b``: a times the reciprocal of b, where b depends on the parameters."""
    if rounding_mode is not None or not isinstance(b, Tensor) or not b.requires_grad:
        return NotImplemented
    return a * torch.reciprocal(b)


def rdiv(b: Tensor, a: Any) -> Tensor:
    """``a / b``, reflected."""
    return a * torch.reciprocal(b)


def power(base: Any, exponent: Any) -> Any:
    """``base ** exponent``: a power, an exponential, or both."""
    if not isinstance(exponent, Tensor) or not exponent.requires_grad:
        return NotImplemented  # recorded as "power" if the exponent is a number
    base = base if isinstance(base, Tensor) else torch.as_tensor(base, device=exponent.device)
    return torch.exp(exponent * torch.log(base.to(exponent.dtype)))


def addmm(c: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """``beta c + alpha a @ b``; also baddbmm, addmv and addbmm's kin."""
    return torch.add(c if beta == 1 else c * beta, torch.matmul(a, b), alpha=alpha)


def addbmm(c: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """``beta c + alpha sum_i a_i @ b_i``."""
    return torch.add(c if beta == 1 else c * beta, torch.matmul(a, b).sum(0), alpha=alpha)


def addr(c: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """``beta c + alpha a b^T``."""
    return torch.add(c if beta == 1 else c * beta, outer(a, b), alpha=alpha)


def outer(a: Tensor, b: Tensor) -> Tensor:
    """``a b^T``."""
    return a[:, None] * b[None, :]


def addcmul(c: Tensor, a: Tensor, b: Tensor, *, value: float = 1) -> Tensor:
    """``c + value a b``."""
    return torch.add(c, a * b, alpha=value)


def addcdiv(c: Tensor, a: Tensor, b: Tensor, *, value: float = 1) -> Tensor:
    """``c + value a / b``."""
    return torch.add(c, a * torch.reciprocal(b), alpha=value)


def lerp(a: Tensor, b: Tensor, weight: Any) -> Tensor:
    """``a + weight (b - a)``."""
    return a + (b - a) * weight


def maximum(a: Tensor, b: Tensor) -> Tensor:
    """The larger of two; equal ones share, as in autograd."""
    return _choose(a, b, a > b)


def minimum(a: Tensor, b: Tensor) -> Tensor:
    """The smaller of two."""
    return _choose(a, b, a < b)


def _choose(a: Tensor, b: Tensor, first: Tensor) -> Tensor:
    mask = first.to(a.dtype) + 0.5 * (a == b).to(a.dtype)
    return a * mask + b * (1 - mask)


def variance(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """``torch.var`` in its several spellings."""
    dim = kwargs.get("dim", args[0] if args and not isinstance(args[0], bool) else None)
    correction = kwargs.get("correction")
    if correction is None:
        unbiased = kwargs.get("unbiased", args[0] if args and isinstance(args[0], bool) else True)
        if len(args) > 1 and isinstance(args[1], bool):
            unbiased = args[1]
        correction = 1 if unbiased else 0
    keepdim = kwargs.get("keepdim", args[2] if len(args) > 2 else False)
    dims = list(range(x.dim())) if dim is None else [dim] if isinstance(dim, int) else list(dim)
    n = math.prod(x.shape[d] for d in dims)
    centered = x - x.mean(dims, keepdim=True)
    return (centered * centered).sum(dims, keepdim=keepdim) / max(n - correction, 0)


def standard_deviation(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """``torch.std``."""
    return torch.sqrt(variance(x, *args, **kwargs))


def vector_norm(
    x: Tensor, ord: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Any:
    """The Euclidean norm, and the sum of absolute values."""
    dims = list(range(x.dim())) if dim is None else dim
    if ord == 2:
        return torch.sqrt((x * x).sum(dims, keepdim=keepdim))
    if ord == 1:
        return x.abs().sum(dims, keepdim=keepdim)
    return NotImplemented


def einsum(equation: str, operands: Sequence[Tensor], *path: Any) -> Any:
    """Write an equation out, and contract more than two operands pair by pair."""
    equation = equation.replace(" ", "")
    inputs, arrow, output = equation.partition("->")
    letters = inputs.split(",")
    if "..." in equation or not arrow:
        return torch.einsum(_written_out(letters, output if arrow else None, operands), *operands)
    for i, some in enumerate(letters):
        twice = next((c for c in some if some.count(c) > 1), None)
        if twice is not None:  # a diagonal
            first = some.index(twice)
            second = some.index(twice, first + 1)
            rest = some[:first] + some[first + 1 : second] + some[second + 1 :] + twice
            tensors = list(operands)
            tensors[i] = operands[i].diagonal(0, first, second)
            return torch.einsum(
                f"{','.join([*letters[:i], rest, *letters[i + 1 :]])}->{output}", *tensors
            )
    if len(operands) <= 2:
        return NotImplemented
    a, b, *others = operands
    later = set("".join(letters[2:]) + output)
    kept = "".join(c for c in dict.fromkeys(letters[0] + letters[1]) if c in later)
    pair = torch.einsum(f"{letters[0]},{letters[1]}->{kept}", a, b)
    return torch.einsum(f"{','.join([kept, *letters[2:]])}->{output}", pair, *others)


def _written_out(letters: list[str], output: str | None, operands: Sequence[Tensor]) -> str:
    used = set("".join(letters)) - {"."}
    free = [c for c in "zyxwvutsrqponmlkjihgfedcbaZYXWVUTSRQPONMLKJIHGFEDCBA" if c not in used]
    counts = [
        t.dim() - len(some.replace("...", "")) if "..." in some else 0
        for some, t in zip(letters, operands, strict=True)
    ]
    most = max(counts, default=0)
    dots = "".join(free[:most])
    written = [
        some.replace("...", dots[most - n :]) for some, n in zip(letters, counts, strict=True)
    ]
    if output is None:
        joined = "".join(letters).replace(".", "")
        output = ("..." if most else "") + "".join(
            sorted(c for c in set(joined) if joined.count(c) == 1)
        )
    return f"{','.join(written)}->{output.replace('...', dots)}"


# --- layers --------------------------------------------------------------------------------------


def dropout(x: Tensor, p: float, train: bool) -> Tensor:
    """Multiply by a mask, drawn as torch draws it."""
    if not train or p == 0:
        return x
    ones = torch.ones_like(x.detach())
    mask = torch.native_dropout(ones, p, True)[0] if x.is_cuda else torch.dropout(ones, p, True)
    return x * mask


def feature_dropout(x: Tensor, p: float, train: bool) -> Tensor:
    """Drop whole channels."""
    if not train or p == 0:
        return x
    return x * torch.feature_dropout(torch.ones_like(x.detach()), p, True)


def convolution(n: int) -> Callable[..., Any]:
    """Return how to record a convolution with padding by name, or without a batch."""

    def conv(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Any:
        func = getattr(torch, f"conv{n}d")
        if x.dim() == n + 1:
            return func(x[None], weight, bias, stride, padding, dilation, groups)[0]
        if not isinstance(padding, str):
            return NotImplemented
        if padding == "valid":
            return func(x, weight, bias, stride, 0, dilation, groups)
        dilations = [dilation] * n if isinstance(dilation, int) else dilation
        pads: list[int] = []
        for size, d in zip(reversed(weight.shape[2:]), reversed(list(dilations)), strict=True):
            total = d * (size - 1)
            pads += [total // 2, total - total // 2]
        return func(torch.constant_pad_nd(x, pads), weight, bias, stride, 0, dilation, groups)

    return conv


def conv_transpose(n: int) -> Callable[..., Any]:
    """Return how to record a transposed convolution without a batch."""

    def conv(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if x.dim() == n + 1:
            return getattr(torch, f"conv_transpose{n}d")(x[None], *args, **kwargs)[0]
        return NotImplemented

    return conv


def prelu(x: Tensor, weight: Tensor) -> Tensor:
    """``max(0, x) + w min(0, x)``."""
    if weight.numel() > 1:
        weight = weight.reshape((1, -1) + (1,) * (x.dim() - 2) if x.dim() > 1 else (-1,))
    return torch.relu(x) - weight * torch.relu(-x)


def glu(x: Tensor, dim: int = -1) -> Tensor:
    """``a sigmoid(b)``."""
    a, b = x.chunk(2, dim)
    return a * torch.sigmoid(b)


def bilinear(a: Tensor, b: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``a W b``."""
    y = torch.einsum("...i,oij,...j->...o", a, weight, b)
    return y if bias is None else y + bias


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention with the matrix of weights written out."""
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = torch.matmul(query * factor, key.transpose(-2, -1))
    if is_causal:
        L, T = scores.shape[-2:]
        attn_mask = torch.ones(L, T, dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, -math.inf)
        else:
            scores = scores + attn_mask
    weights = torch.softmax(scores, -1)
    return torch.matmul(dropout(weights, dropout_p, dropout_p > 0), value)


# --- losses --------------------------------------------------------------------------------------


def mse_loss(x: Tensor, y: Tensor, reduction: int = MEAN) -> Tensor:
    """Squared error."""
    return reduced(torch.square(x - y), reduction)


def l1_loss(x: Tensor, y: Tensor, reduction: int = MEAN) -> Tensor:
    """Absolute error."""
    return reduced(torch.abs(x - y), reduction)


def huber_loss(x: Tensor, y: Tensor, reduction: int = MEAN, delta: float = 1.0) -> Tensor:
    """Quadratic near zero, linear beyond ``delta``."""
    error = x - y
    near = (error.detach().abs() <= delta).to(error.dtype)
    losses = near * 0.5 * torch.square(error) + (1 - near) * delta * (error.abs() - 0.5 * delta)
    return reduced(losses, reduction)


def smooth_l1_loss(x: Tensor, y: Tensor, reduction: int = MEAN, beta: float = 1.0) -> Tensor:
    """Huber's loss over beta."""
    if beta == 0:
        return l1_loss(x, y, reduction)
    return huber_loss(x, y, reduction, beta) / beta


def cross_entropy_loss(
    x: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Log-softmax, then the negative log-likelihood."""
    classes = 0 if x.dim() == 1 else 1
    logs = torch.log_softmax(x, classes)
    if target.dtype.is_floating_point:
        return _soft_cross_entropy(logs, target, weight, reduction, label_smoothing, classes)
    nll = torch._C._nn.nll_loss_nd(logs, target, weight, reduction, ignore_index)
    if label_smoothing == 0:
        return nll
    valid = (target != ignore_index).to(x.dtype)
    n = x.shape[classes]
    weighted = logs if weight is None else logs * _class_shape(weight, logs, classes)
    smooth = -weighted.sum(classes) * valid
    if reduction == MEAN:
        if weight is None:
            denominator = valid.sum()
        else:
            denominator = (weight[target.clamp_min(0)] * valid).sum()
        smooth = smooth.sum() / denominator
    else:
        smooth = reduced(smooth, reduction)
    return (1 - label_smoothing) * nll + label_smoothing / n * smooth


def _class_shape(weight: Tensor, logs: Tensor, classes: int) -> Tensor:
    return weight.reshape((1,) * classes + (-1,) + (1,) * (logs.dim() - 1 - classes))


def _soft_cross_entropy(
    logs: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    label_smoothing: float,
    classes: int,
) -> Tensor:
    if label_smoothing:
        target = target * (1 - label_smoothing) + label_smoothing / logs.shape[classes]
    if weight is not None:
        target = target * _class_shape(weight, logs, classes)
    losses = -(logs * target).sum(classes)
    if reduction == MEAN:
        return losses.sum() / (losses.numel())
    return reduced(losses, reduction)


def binary_cross_entropy(
    x: Tensor, y: Tensor, weight: Tensor | None = None, reduction: int = MEAN
) -> Tensor:
    """``-y log x - (1 - y) log(1 - x)``, the logarithms at least -100."""
    losses = -(y * torch.log(x).clamp_min(-100) + (1 - y) * torch.log1p(-x).clamp_min(-100))
    return reduced(losses if weight is None else losses * weight, reduction)


def binary_cross_entropy_with_logits(
    x: Tensor,
    y: Tensor,
    weight: Tensor | None = None,
    pos_weight: Tensor | None = None,
    reduction: int = MEAN,
) -> Tensor:
    """``y softplus(-x) + (1 - y) softplus(x)``, the first term times ``pos_weight``."""
    positive = -torch._C._nn.log_sigmoid(x)
    scale = y if pos_weight is None else y * pos_weight
    losses = scale * positive + (1 - y) * (x + positive)
    return reduced(losses if weight is None else losses * weight, reduction)


def kl_div(x: Tensor, y: Tensor, reduction: int = MEAN, *, log_target: bool = False) -> Any:
    """``y (log y - x)``."""
    if y.requires_grad:
        return NotImplemented
    losses = y.exp() * (y - x) if log_target else torch.xlogy(y, y) - y * x
    return reduced(losses, reduction)


def poisson_nll_loss(
    x: Tensor, y: Tensor, log_input: bool, full: bool, eps: float, reduction: int
) -> Tensor:
    """Negative log-likelihood of a Poisson distribution."""
    losses = torch.exp(x) - y * x if log_input else x - y * torch.log(x + eps)
    if full:
        stirling = y * torch.log(y) - y + 0.5 * torch.log(2 * math.pi * y)
        losses = losses + stirling.masked_fill(y <= 1, 0)
    return reduced(losses, reduction)


def soft_margin_loss(x: Tensor, y: Tensor, reduction: int = MEAN) -> Tensor:
    """``log(1 + exp(-y x))``."""
    return reduced(-torch._C._nn.log_sigmoid(y * x), reduction)


def hinge_embedding_loss(
    x: Tensor, y: Tensor, margin: float = 1.0, reduction: int = MEAN
) -> Tensor:
    """``x`` where y = 1, ``max(0, margin - x)`` where y = -1."""
    losses = x * (y != -1).to(x.dtype) + torch.relu(margin - x) * (y != 1).to(x.dtype)
    return reduced(losses, reduction)


def margin_ranking_loss(
    a: Tensor, b: Tensor, y: Tensor, margin: float = 0.0, reduction: int = MEAN
) -> Tensor:
    """``max(0, -y (a - b) + margin)``."""
    return reduced(torch.relu(-y * (a - b) + margin), reduction)


def cosine_similarity(a: Tensor, b: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
    """``a.b / (|a| |b|)``, each length at least eps."""
    lengths = [torch.sqrt((x * x).sum(dim, keepdim=True)).clamp_min(eps) for x in (a, b)]
    return (a * torch.reciprocal(lengths[0]) * (b * torch.reciprocal(lengths[1]))).sum(dim)


def cosine_embedding_loss(
    a: Tensor, b: Tensor, y: Tensor, margin: float = 0.0, reduction: int = MEAN
) -> Tensor:
    """``1 - cos`` where y = 1, ``max(0, cos - margin)`` where y = -1."""
    eps = 1e-12
    lengths = ((a * a).sum(-1) + eps) * ((b * b).sum(-1) + eps)
    cos = (a * b).sum(-1) * torch.rsqrt(lengths)
    losses = (1 - cos) * (y == 1).to(a.dtype) + torch.relu(cos - margin) * (y == -1).to(a.dtype)
    return reduced(losses, reduction)


def pairwise_distance(
    a: Tensor, b: Tensor, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False
) -> Tensor:
    """The norm of ``a - b + eps``."""
    return torch.linalg.vector_norm(a - b + eps, p, -1, keepdim)


def triplet_margin_loss(
    anchor: Tensor,
    positive: Tensor,
    negative: Tensor,
    margin: float = 1.0,
    p: float = 2.0,
    eps: float = 1e-6,
    swap: bool = False,
    reduction: int = MEAN,
) -> Tensor:
    """``max(0, |anchor - positive| - |anchor - negative| + margin)``."""
    near = pairwise_distance(anchor, positive, p, eps)
    far = pairwise_distance(anchor, negative, p, eps)
    if swap:
        far = torch.minimum(far, pairwise_distance(positive, negative, p, eps))
    return reduced(torch.relu(near - far + margin), reduction)


DECOMPOSED: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(["div", "divide", "true_divide"], div),
    **dict.fromkeys(["__rdiv__", "__rtruediv__"], rdiv),
    "pow": power,
    **dict.fromkeys(["addmm", "addmv", "baddbmm"], addmm),
    "addbmm": addbmm,
    "addr": addr,
    **dict.fromkeys(["outer", "ger"], outer),
    "addcmul": addcmul,
    "addcdiv": addcdiv,
    "lerp": lerp,
    **dict.fromkeys(["maximum", "fmax"], maximum),
    **dict.fromkeys(["minimum", "fmin"], minimum),
    "var": variance,
    "std": standard_deviation,
    **dict.fromkeys(["vector_norm", "linalg_vector_norm"], vector_norm),
    "einsum": einsum,
    "dropout": dropout,
    "feature_dropout": feature_dropout,
    **{f"conv{n}d": convolution(n) for n in (1, 2, 3)},
    **{f"conv_transpose{n}d": conv_transpose(n) for n in (1, 2, 3)},
    **dict.fromkeys(["prelu", "_prelu_kernel"], prelu),
    "glu": glu,
    "bilinear": bilinear,
    "scaled_dot_product_attention": scaled_dot_product_attention,
    "mse_loss": mse_loss,
    "l1_loss": l1_loss,
    "huber_loss": huber_loss,
    "smooth_l1_loss": smooth_l1_loss,
    "cross_entropy_loss": cross_entropy_loss,
    "binary_cross_entropy": binary_cross_entropy,
    "binary_cross_entropy_with_logits": binary_cross_entropy_with_logits,
    "kl_div": kl_div,
    "poisson_nll_loss": poisson_nll_loss,
    "soft_margin_loss": soft_margin_loss,
    "hinge_embedding_loss": hinge_embedding_loss,
    "margin_ranking_loss": margin_ranking_loss,
    "cosine_similarity": cosine_similarity,
    "cosine_embedding_loss": cosine_embedding_loss,
    "pairwise_distance": pairwise_distance,
    "triplet_margin_loss": triplet_margin_loss,
}
