"""The losses of torch.nn.functional."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sweep_cases.table import (
    case,
    labels,
    layer,
    numbers,
    positive,
    probability,
    wide,
)

# --- losses ---------------------------------------------------------------------------------------

for reduction in ("mean", "sum", "none"):
    r = {"reduction": reduction}
    for name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"):
        loss = getattr(F, name)
        case(
            f"{name} {reduction}",
            lambda x, f=loss, r=r: f(x, numbers(2, 3), **r),
            (2, 3),
            domain=wide,
        )
    case(f"cross_entropy {reduction}", lambda x, r=r: F.cross_entropy(x, labels(3, 4), **r), (4, 3))
    case(
        f"cross_entropy with weights, {reduction}",
        lambda x, r=r: F.cross_entropy(
            x, torch.tensor([0, 2, 1, 0]), positive(numbers(3).tanh()), ignore_index=1, **r
        ),
        (4, 3),
    )
    case(
        f"cross_entropy, smoothed, {reduction}",
        lambda x, r=r: F.cross_entropy(x, labels(3, 4), label_smoothing=0.2, **r),
        (4, 3),
    )
    case(
        f"cross_entropy, smoothed, with weights, {reduction}",
        lambda x, r=r: F.cross_entropy(
            x,
            torch.tensor([0, 2, 1, 0]),
            positive(numbers(3).tanh()),
            ignore_index=1,
            label_smoothing=0.2,
            **r,
        ),
        (4, 3),
    )
    case(
        f"cross_entropy, soft, {reduction}",
        lambda x, r=r: F.cross_entropy(x, numbers(4, 3).softmax(1), label_smoothing=0.1, **r),
        (4, 3),
    )
    case(
        f"cross_entropy, soft, with weights, {reduction}",
        lambda x, r=r: F.cross_entropy(
            x, numbers(4, 3).softmax(1), positive(numbers(3).tanh()), **r
        ),
        (4, 3),
    )
    case(
        f"cross_entropy of maps, {reduction}",
        lambda x, r=r: F.cross_entropy(x, labels(3, 2, 2, 2), **r),
        (2, 3, 2, 2),
    )
    case(
        f"cross_entropy of maps, smoothed, {reduction}",
        lambda x, r=r: F.cross_entropy(
            x, labels(3, 2, 2), positive(numbers(3).tanh()), label_smoothing=0.1, **r
        ),
        (2, 3, 2),
    )
    case(f"nll_loss {reduction}", lambda x, r=r: F.nll_loss(x, labels(3, 4), **r), (4, 3))
    case(
        f"nll_loss of maps, {reduction}",
        lambda x, r=r: F.nll_loss(x, labels(3, 2, 2), positive(numbers(3).tanh()), **r),
        (2, 3, 2),
    )
    y = (numbers(2, 3) > 0).double()
    case(
        f"binary_cross_entropy {reduction}",
        lambda x, y=y, r=r: F.binary_cross_entropy(x, y, **r),
        (2, 3),
        domain=probability,
    )
    case(
        f"binary_cross_entropy with weights, {reduction}",
        lambda x, r=r: F.binary_cross_entropy(
            x, numbers(2, 3).sigmoid(), positive(numbers(3).tanh()), **r
        ),
        (2, 3),
        domain=probability,
    )
    case(
        f"binary_cross_entropy_with_logits {reduction}",
        lambda x, y=y, r=r: F.binary_cross_entropy_with_logits(x, y, **r),
        (2, 3),
    )
    case(
        f"binary_cross_entropy_with_logits with weights, {reduction}",
        lambda x, y=y, r=r: F.binary_cross_entropy_with_logits(
            x, y, positive(numbers(3).tanh()), pos_weight=positive(numbers(3, seed=1).tanh()), **r
        ),
        (2, 3),
    )
    case(f"kl_div {reduction}", lambda x, r=r: F.kl_div(x, numbers(2, 3).softmax(1), **r), (2, 3))
    case(
        f"kl_div of logarithms, {reduction}",
        lambda x, r=r: F.kl_div(x, numbers(2, 3), log_target=True, **r),
        (2, 3),
    )
    case(
        f"poisson_nll_loss {reduction}",
        lambda x, r=r: F.poisson_nll_loss(x, numbers(2, 3).exp() + 1, full=True, **r),
        (2, 3),
    )
    case(
        f"gaussian_nll_loss {reduction}",
        lambda x, v, r=r: F.gaussian_nll_loss(x, numbers(2, 3), v, full=True, **r),
        (2, 3),
        (2, 3),
        domain=positive,
    )
    case(
        f"soft_margin_loss {reduction}",
        lambda x, y=y, r=r: F.soft_margin_loss(x, 2 * y - 1, **r),
        (2, 3),
    )
    case(
        f"hinge_embedding_loss {reduction}",
        lambda x, y=y, r=r: F.hinge_embedding_loss(x, 2 * y - 1, 0.6, **r),
        (2, 3),
    )
    case(
        f"margin_ranking_loss {reduction}",
        lambda a, b, r=r: F.margin_ranking_loss(a, b, numbers(4).sign(), 0.1, **r),
        (4,),
        (4,),
    )
    case(
        f"cosine_embedding_loss {reduction}",
        lambda a, b, r=r: F.cosine_embedding_loss(a, b, numbers(4).sign(), -0.9, **r),
        (4, 3),
        (4, 3),
    )
    case(
        f"triplet_margin_loss {reduction}",
        lambda a, b, c, r=r: F.triplet_margin_loss(a, b, c, **r),
        (3, 2),
        (3, 2),
        (3, 2),
    )
    case(
        f"triplet_margin_loss, swapped, {reduction}",
        lambda a, b, c, r=r: F.triplet_margin_loss(a, b, c, p=3, swap=True, **r),
        (3, 2),
        (3, 2),
        (3, 2),
    )
    case(
        f"triplet_margin_with_distance_loss {reduction}",
        lambda a, b, c, r=r: F.triplet_margin_with_distance_loss(a, b, c, swap=True, **r),
        (3, 2),
        (3, 2),
        (3, 2),
    )
    case(
        f"multi_margin_loss {reduction}",
        lambda x, r=r: F.multi_margin_loss(x, labels(3, 4), **r),
        (4, 3),
    )
    case(
        f"multi_margin_loss 2 {reduction}",
        lambda x, r=r: F.multi_margin_loss(
            x, labels(3, 4), p=2, weight=positive(numbers(3).tanh()), **r
        ),
        (4, 3),
    )
    case(
        f"multilabel_margin_loss {reduction}",
        lambda x, r=r: F.multilabel_margin_loss(x, torch.tensor([[0, 2, -1], [1, -1, 0]]), **r),
        (2, 3),
    )
    case(
        f"multilabel_soft_margin_loss {reduction}",
        lambda x, y=y, r=r: F.multilabel_soft_margin_loss(x, y, positive(numbers(3).tanh()), **r),
        (2, 3),
    )
    case(
        f"ctc_loss {reduction}",
        lambda x, r=r: F.ctc_loss(
            x.log_softmax(-1), torch.tensor([[1, 2], [2, 2]]), (4, 4), (2, 1), **r
        ),
        (4, 2, 3),
    )
case(
    "ctc_loss with targets in one list",
    lambda x: F.ctc_loss(
        x.log_softmax(-1),
        torch.tensor([1, 2, 1]),
        torch.tensor([3, 2]),
        torch.tensor([2, 1]),
        zero_infinity=True,
    ),
    (3, 2, 3),
)
case(
    "ctc_loss without an alignment",
    lambda x: F.ctc_loss(
        x.log_softmax(-1), torch.tensor([[1, 1], [2, 1]]), (2, 2), (2, 2), zero_infinity=True
    ),
    (2, 2, 3),
)
case(
    "ctc_loss of one sample",
    lambda x: F.ctc_loss(
        x.log_softmax(-1), torch.tensor([2, 1]), torch.tensor(4), torch.tensor(2), blank=0
    ),
    (4, 3),
)
case("multi_margin_loss of a vector", lambda x: F.multi_margin_loss(x, torch.tensor(1)), (3,))
case(
    "multilabel_margin_loss of a vector",
    lambda x: F.multilabel_margin_loss(x, torch.tensor([2, -1, 0])),
    (3,),
)
case(
    "cross_entropy of a vector",
    lambda x: F.cross_entropy(x, torch.tensor(1), label_smoothing=0.1),
    (3,),
)
case(
    "cross_entropy, soft maps", lambda x: F.cross_entropy(x, numbers(2, 3, 2).softmax(1)), (2, 3, 2)
)
case(
    "cross_entropy of learned targets",
    lambda x, y: F.cross_entropy(x, y.softmax(1)),
    (2, 3),
    (2, 3),
)
case(
    "cross_entropy, nothing ignored",
    lambda x: F.cross_entropy(x, torch.tensor([0, -100]), label_smoothing=0.1),
    (2, 3),
)
case("mse_loss of two predictions", F.mse_loss, (2, 3), (2, 3))
case(
    "mse_loss with weights",
    lambda x: F.mse_loss(x, numbers(2, 3), weight=positive(numbers(2, 3).tanh())),
    (2, 3),
)
case("l1_loss of two predictions", F.l1_loss, (2, 3), (2, 3))
case("huber_loss with delta", lambda x: F.huber_loss(x, numbers(2, 3), delta=0.4), (2, 3))
case("smooth_l1_loss with beta", lambda x: F.smooth_l1_loss(x, numbers(2, 3), beta=0.4), (2, 3))
case("smooth_l1_loss without beta", lambda x: F.smooth_l1_loss(x, numbers(2, 3), beta=0.0), (2, 3))
case(
    "kl_div batchmean",
    lambda x: F.kl_div(x.log_softmax(1), numbers(2, 3).softmax(1), reduction="batchmean"),
    (2, 3),
)
case(
    "kl_div of learned targets",
    lambda x, y: F.kl_div(x.log_softmax(1), y.softmax(1), reduction="sum"),
    (2, 3),
    (2, 3),
)
case(
    "kl_div of learned logarithms",
    lambda x, y: F.kl_div(x, y, reduction="sum", log_target=True),
    (2, 3),
    (2, 3),
)
case(
    "poisson_nll_loss of rates",
    lambda x: F.poisson_nll_loss(x, numbers(2, 3).exp(), log_input=False),
    (2, 3),
    domain=positive,
)
case(
    "binary_cross_entropy of learned targets",
    lambda x, y: F.binary_cross_entropy(x, y),
    (2, 3),
    (2, 3),
    domain=probability,
)
case(
    "binary_cross_entropy_with_logits of learned targets",
    lambda x, y: F.binary_cross_entropy_with_logits(x, y.sigmoid()),
    (2, 3),
    (2, 3),
)
layer(
    "AdaptiveLogSoftmaxWithLoss",
    lambda: _WithTargets(nn.AdaptiveLogSoftmaxWithLoss(3, 6, [2, 4], div_value=1.0)),
    (4, 3),
)
layer("CrossEntropyLoss", lambda: _WithTargets(nn.CrossEntropyLoss(label_smoothing=0.1)), (4, 3))
layer("NLLLoss2d", lambda: _WithTargets(nn.NLLLoss()), (4, 3, 2))


class _WithTargets(nn.Module):
    def __init__(self, loss: nn.Module):
        super().__init__()
        self.loss = loss

    def forward(self, x: Tensor) -> Any:
        result = self.loss(x, labels(3, x.shape[0], *x.shape[2:]))
        return result.loss if hasattr(result, "loss") else result
