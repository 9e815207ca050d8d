"""Second and third derivatives are finite and right wherever the gradient is finite."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from newton_summary import Summary, make_partition, summarize
from newton_summary.derivatives.sweep.rules.elementwise import _gelu
from oracle import finite_differences

Loss = Callable[[nn.Module, Tensor], Tensor]
MASK = torch.tensor([[1, 1, 0, 1], [0, 0, 0, 0], [0, 1, 0, 0]], dtype=torch.bool)
WEIGHTS = torch.arange(4)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 4)).double()


def inputs() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(3, 5, dtype=torch.float64)


def assert_close(actual: Summary, expected: Summary, Hbar: float, D3: float) -> None:
    for name, tolerance in (("Hbar", Hbar), ("D3", D3)):
        a, b = (getattr(s, name).double() for s in (actual, expected))
        assert float((a - b).abs().max()) <= tolerance * float(b.abs().max()), name


# --- rows that are masked as a whole -------------------------------------------------------------


def filled(z: Tensor) -> Tensor:
    return z.masked_fill(~MASK, -math.inf).softmax(-1).masked_fill(~MASK, 0)


def chosen(z: Tensor) -> Tensor:
    return torch.where(MASK, torch.where(MASK, z, -math.inf).log_softmax(-1), 0.0)


def masked_softmax(z: Tensor) -> Tensor:
    return torch.where(MASK, torch.masked.softmax(z, -1, mask=MASK), 0.0)


def masked_log_softmax(z: Tensor) -> Tensor:
    return torch.where(MASK, torch.masked.log_softmax(z, -1, mask=MASK), 0.0)


def masked_logsumexp(z: Tensor) -> Tensor:
    sums = torch.masked.logsumexp(z, -1, mask=MASK)
    return torch.where(MASK.any(-1), sums, 0.0)[:, None] * WEIGHTS


def attention(z: Tensor) -> Tensor:
    """A decoder whose first token is padding on the left: its query sees no key."""
    mask = torch.ones(3, 3, dtype=torch.bool).tril() & torch.tensor([False, True, True])
    return F.scaled_dot_product_attention(z[None], z[None].sin(), z[None].cos(), attn_mask=mask)


def attention_with_additive_mask(z: Tensor) -> Tensor:
    mask = torch.zeros(3, 3, dtype=z.dtype)
    mask[0] = -math.inf
    return F.scaled_dot_product_attention(z[None], z[None].sin(), z[None].cos(), attn_mask=mask)


@pytest.mark.parametrize(
    "operation",
    [
        *(filled, chosen, masked_softmax, masked_log_softmax, masked_logsumexp),
        *(attention, attention_with_additive_mask),
    ],
    ids=lambda f: f.__name__,
)
def test_rows_that_are_masked_as_a_whole(operation: Callable[[Tensor], Tensor]) -> None:
    model, x = network(), inputs()
    partition = make_partition(model, "canonical")
    u = {name: torch.randn_like(p) for name, p in partition.params.items()}

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return (operation(model(x)) * WEIGHTS).square().sum()

    actual = summarize(model, loss, x, partition=partition, direction=u, backend="sweep")
    expected = finite_differences(model, loss, x, partition, u)
    assert torch.allclose(actual.loss, expected.loss, rtol=1e-12)
    assert_close(actual, expected, 1e-8, 1e-6)


# --- powers beyond the range of float32 ----------------------------------------------------------


def entropy(model: nn.Module, x: Tensor) -> Tensor:
    p = (40 * model(x)).softmax(-1)
    return (p * p.log()).sum(-1).mean()


def after(norm: Callable[[Tensor], Tensor]) -> Loss:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        x = torch.cat([x, torch.zeros_like(x[:1])])
        hidden = norm(F.linear(x, model[0].weight))
        return (model[2](hidden) * WEIGHTS).square().mean()

    return loss


def saturated(model: nn.Module, x: Tensor) -> Tensor:
    """Torch's own gradient is bounded where a probability is 0 or 1."""
    p = torch.cat([torch.sigmoid(model(x)), torch.sigmoid(1000 * model(x[:1]))])
    return F.binary_cross_entropy(p, (p > 0.3).to(p.dtype))


@pytest.mark.parametrize(
    "loss",
    [
        entropy,
        after(lambda h: F.layer_norm(h, [4], eps=1e-12)),
        after(lambda h: F.rms_norm(h, [4], eps=1e-12)),
        after(lambda h: F.normalize(h, dim=-1)),
        after(lambda h: h / (h.square().sum(-1, keepdim=True) + 1e-12).sqrt()),
        after(lambda h: h * (h.square().mean(-1, keepdim=True) + 1e-12) ** -0.5),
        saturated,
    ],
    ids=["p log p", "layer_norm", "rms_norm", "normalize", "division", "power", "saturated"],
)
def test_float32_has_the_range_that_it_needs(loss: Loss) -> None:
    model, x = network(), inputs()
    torch.manual_seed(2)
    u = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    expected = summarize(model, loss, x, direction=u, backend="sweep")
    narrow = {name: U.float() for name, U in u.items()}
    actual = summarize(model.float(), loss, x.float(), direction=narrow, backend="sweep")
    assert_close(actual, expected, 1e-4, 1e-3)


@pytest.mark.parametrize("loss", [entropy, after(lambda h: F.layer_norm(h, [4], eps=1e-12))])
def test_the_same_in_float64_as_nested(loss: Loss) -> None:
    model, x = network(), inputs()
    actual, expected = (summarize(model, loss, x, backend=name) for name in ("sweep", "nested"))
    assert_close(actual, expected, 1e-12, 1e-11)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_derivatives_of_gelu_are_finite_where_it_is_straight(dtype):
    x = torch.tensor([-500.0, -300.0, -30.0, 30.0, 300.0, 500.0], dtype=dtype)
    first, second, third = _gelu(x, x, "tanh")
    assert torch.equal(first, (x > 0).to(dtype))
    assert not second.any() and not third.any()
