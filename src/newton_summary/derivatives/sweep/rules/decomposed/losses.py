"""The losses of torch.nn.functional."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from newton_summary.derivatives.norms import Maybe
from newton_summary.derivatives.sweep.rules.decomposed.layers import pairwise_distance
from newton_summary.derivatives.sweep.rules.lattice import NEVER, ctc_lattice

MEAN, SUM = 1, 2  # how torch numbers reductions


def reduced(losses: Tensor, reduction: int) -> Tensor:
    """Apply a reduction by its number."""
    if reduction == MEAN:
        return losses.mean()
    return losses.sum() if reduction == SUM else losses


def huber_loss(x: Tensor, y: Tensor, reduction: int = MEAN, delta: float = 1.0) -> Tensor:
    """Quadratic near zero, linear beyond ``delta``."""
    error = x - y
    near = (error.detach().abs() <= delta).to(error.dtype)
    losses = near * 0.5 * torch.square(error) + (1 - near) * delta * (error.abs() - 0.5 * delta)
    return reduced(losses, reduction)


def smooth_l1_loss(x: Tensor, y: Tensor, reduction: int = MEAN, beta: float = 1.0) -> Tensor:
    """Huber's loss over beta."""
    if beta == 0:
        return reduced(torch.abs(x - y), reduction)
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
    n = x.shape[classes]
    by_class = weight
    if by_class is not None:
        by_class = by_class.reshape((1,) * classes + (-1,) + (1,) * (logs.dim() - 1 - classes))
    if target.dtype.is_floating_point:
        if label_smoothing:
            target = target * (1 - label_smoothing) + label_smoothing / n
        target = target if by_class is None else target * by_class
        losses = -(logs * target).sum(classes)
        return losses.sum() / losses.numel() if reduction == MEAN else reduced(losses, reduction)
    nll = torch._C._nn.nll_loss_nd(logs, target, weight, reduction, ignore_index)  # type: ignore[arg-type]
    if label_smoothing == 0:
        return nll
    valid = (target != ignore_index).to(x.dtype)
    weighted = logs if by_class is None else logs * by_class
    smooth = -weighted.sum(classes) * valid
    if reduction == MEAN:
        weights = valid if weight is None else weight[target.clamp_min(0)] * valid
        smooth = smooth.sum() / weights.sum()
    else:
        smooth = reduced(smooth, reduction)
    return (1 - label_smoothing) * nll + label_smoothing / n * smooth


def binary_cross_entropy(
    x: Tensor, y: Tensor, weight: Maybe = None, reduction: int = MEAN
) -> Tensor:
    """``-y log x - (1 - y) log(1 - x)``, the logarithms at least -100."""
    losses = -(y * _bounded_log(x) + (1 - y) * _bounded_log(1 - x))
    return reduced(losses if weight is None else losses * weight, reduction)


def _bounded_log(p: Tensor) -> Tensor:
    """The logarithm, at least -100; of zero, -100 with no derivative."""
    zero = p <= 0
    return torch.log(p.masked_fill(zero, 1.0)).masked_fill(zero, -100.0).clamp_min(-100)


def binary_cross_entropy_with_logits(
    x: Tensor, y: Tensor, weight: Maybe = None, pos_weight: Maybe = None, reduction: int = MEAN
) -> Tensor:
    """``y softplus(-x) + (1 - y) softplus(x)``, the first term times ``pos_weight``."""
    positive = -torch._C._nn.log_sigmoid(x)
    scale = y if pos_weight is None else y * pos_weight
    losses = scale * positive + (1 - y) * (x + positive)
    return reduced(losses if weight is None else losses * weight, reduction)


def kl_div(x: Tensor, y: Tensor, reduction: int = MEAN, *, log_target: bool = False) -> Tensor:
    """``y (log y - x)``."""
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


def multi_margin_loss(
    x: Tensor,
    y: Tensor,
    p: float = 1,
    margin: float = 1.0,
    weight: Maybe = None,
    reduction: int = MEAN,
) -> Tensor:
    """``max(0, margin - x_y + x_i)^p`` over the other classes i, divided by their number."""
    scores, labels = (x.reshape(1, -1), y.reshape(1)) if x.dim() < 2 else (x, y)
    gaps = torch.relu(margin - scores.gather(1, labels[:, None]) + scores)
    others = torch.ones_like(scores.detach()).scatter(1, labels[:, None], 0.0)
    if weight is not None:
        others = others * weight[labels, None]
    losses = (torch.pow(gaps, p) * others).sum(1) / scores.shape[1]
    return reduced(losses.reshape(y.shape), reduction)


def multilabel_margin_loss(x: Tensor, y: Tensor, reduction: int = MEAN) -> Tensor:
    """``max(0, 1 - x_j + x_i)`` over classes j that are labels and i that are not."""
    scores, labels = (x.reshape(1, -1), y.reshape(1, -1)) if x.dim() < 2 else (x, y)
    listed = (labels >= 0).to(torch.int64).cumprod(1)  # a negative label ends the list
    classes = labels.clamp_min(0)
    is_label = torch.zeros_like(labels).scatter_add(1, classes, listed) > 0
    pairs = (listed[:, :, None] * ~is_label[:, None, :]).to(x.dtype)
    gaps = torch.relu(1 - scores.gather(1, classes)[:, :, None] + scores[:, None, :])
    losses = (gaps * pairs).sum((1, 2)) / scores.shape[1]
    return reduced(losses.reshape(x.shape[:-1]), reduction)


def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: int = MEAN,
    zero_infinity: bool = False,
) -> Tensor:
    """Connectionist temporal classification.

    alpha[n, l] is the logarithm of the probability of all paths that end in the l-th of
    (blank, first label, blank, second label, ..., blank).
    """
    logs = log_probs[:, None] if log_probs.dim() == 2 else log_probs
    device = logs.device
    steps, counts = (
        torch.as_tensor(x, dtype=torch.int64, device=device).reshape(-1)
        for x in (input_lengths, target_lengths)
    )
    labels = _padded(targets, counts, len(steps))
    path = torch.full((len(steps), 2 * labels.shape[1] + 1), blank, device=device)
    path[:, 1::2] = labels
    emitted = logs.gather(2, path.expand(len(logs), *path.shape))
    skips = torch.zeros_like(path, dtype=torch.bool)  # from one label to the next, if they differ
    skips[:, 2:] = (path[:, 2:] != blank) & (path[:, 2:] != path[:, :-2])
    alpha = ctc_lattice(emitted, torch.where(skips, 0.0, NEVER).to(logs.dtype), steps)
    ends = torch.stack([2 * counts, (2 * counts - 1).clamp_min(0)], 1)
    missing = torch.stack([counts < 0, counts == 0], 1)
    losses = -torch.logsumexp(alpha.gather(1, ends).masked_fill(missing, NEVER), 1)
    impossible = losses > -NEVER / 2
    losses = losses.masked_fill(impossible, 0.0 if zero_infinity else math.inf)
    losses = losses / counts.clamp_min(1) if reduction == MEAN else losses
    return reduced(losses.reshape(log_probs.shape[1:-1]), reduction)


def _padded(targets: Tensor, counts: Tensor, n: int) -> Tensor:
    """Return labels as a matrix with one row for each sample; they may stand in one long list."""
    if targets.dim() == 2:
        return targets
    if n == 1:
        return targets[None]
    return pad_sequence(list(targets.split_with_sizes(counts.tolist())), batch_first=True)


def hinge_embedding_loss(
    x: Tensor, y: Tensor, margin: float = 1.0, reduction: int = MEAN
) -> Tensor:
    """``x`` where y = 1, ``max(0, margin - x)`` where y = -1."""
    losses = x * (y != -1).to(x.dtype) + torch.relu(margin - x) * (y != 1).to(x.dtype)
    return reduced(losses, reduction)


def cosine_embedding_loss(
    a: Tensor, b: Tensor, y: Tensor, margin: float = 0.0, reduction: int = MEAN
) -> Tensor:
    """``1 - cos`` where y = 1, ``max(0, cos - margin)`` where y = -1."""
    eps = 1e-12
    lengths = ((a * a).sum(-1) + eps) * ((b * b).sum(-1) + eps)
    cos = (a * b).sum(-1) * torch.rsqrt(lengths)
    losses = (1 - cos) * (y == 1).to(a.dtype) + torch.relu(cos - margin) * (y == -1).to(a.dtype)
    return reduced(losses, reduction)


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


def in_single_precision(form: Callable[..., Any]) -> Callable[..., Any]:
    """Return a form of a loss that takes numbers of half precision as autocast does: in float32."""

    def widened(x: Any) -> Any:
        half = isinstance(x, Tensor) and x.dtype in (torch.bfloat16, torch.float16)
        return x.float() if half and torch.is_autocast_enabled(x.device.type) else x

    def run(*args: Any, **kwargs: Any) -> Any:
        return form(*map(widened, args), **{name: widened(x) for name, x in kwargs.items()})

    return run


FORMS: dict[str, Callable[..., Any]] = {
    "mse_loss": lambda x, y, reduction=MEAN: reduced(torch.square(x - y), reduction),
    "l1_loss": lambda x, y, reduction=MEAN: reduced(torch.abs(x - y), reduction),
    "huber_loss": huber_loss,
    "smooth_l1_loss": smooth_l1_loss,
    "cross_entropy_loss": cross_entropy_loss,
    "binary_cross_entropy": binary_cross_entropy,
    "binary_cross_entropy_with_logits": binary_cross_entropy_with_logits,
    "kl_div": kl_div,
    "poisson_nll_loss": poisson_nll_loss,
    "multi_margin_loss": multi_margin_loss,
    "multilabel_margin_loss": multilabel_margin_loss,
    "ctc_loss": ctc_loss,
    "soft_margin_loss": lambda x, y, reduction=MEAN: reduced(
        -torch._C._nn.log_sigmoid(y * x), reduction
    ),
    "hinge_embedding_loss": hinge_embedding_loss,
    "margin_ranking_loss": lambda a, b, y, margin=0.0, reduction=MEAN: reduced(
        torch.relu(-y * (a - b) + margin), reduction
    ),
    "cosine_embedding_loss": cosine_embedding_loss,
    "triplet_margin_loss": triplet_margin_loss,
}
LOSSES = {name: in_single_precision(form) for name, form in FORMS.items()}
