"""``verify``: what it finds, what it cannot tell, and what it takes for the loss."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from newton_summary import Verification, make_partition, summarize, verify
from newton_summary.derivatives.sweep.rules import RULES

Loss = Callable[[nn.Module, Tensor], Tensor]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


def inputs() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(6, 5)


CLASS_WEIGHTS = torch.tensor([1.0, 2.0, 0.5])


def narrow_softmax(model: nn.Module, x: Tensor) -> Tensor:
    return torch.softmax(model(x), -1, dtype=torch.float32).log().square().mean()


def narrow_inside(model: nn.Module, x: Tensor) -> Tensor:
    h = model[0](x).float() * torch.ones(4, dtype=torch.bfloat16)
    h = torch.tanh(h.to(torch.float32)).type_as(torch.zeros(()))
    return model[2](h.to(model[2].weight.dtype)).half().square().mean()


def own_weights(model: nn.Module, x: Tensor) -> Tensor:
    return F.cross_entropy(model(x), torch.arange(6) % 3, CLASS_WEIGHTS)


def under_autocast(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return model(x).square().mean()


def buffer_written_to(model: nn.Module, x: Tensor) -> Tensor:
    out = torch.zeros(6, 3)
    out[:, 1:] += model(x)[:, 1:]
    return out.square().mean() + out.exp().mean()


@pytest.mark.parametrize(
    "loss", [narrow_softmax, narrow_inside, own_weights, under_autocast, buffer_written_to]
)
def test_what_is_computed_in_float32_inside(loss: Loss) -> None:
    found = verify(network(), loss, inputs())
    assert found.verdicts == ("agrees",) * 4
    assert found.sweep.loss.dtype == torch.float64
    assert max(found.Hbar_error.max(), found.D3_error.max()) < 1e-5


@pytest.mark.skipif(not hasattr(torch, "_grouped_mm"), reason="needs torch._grouped_mm")
def test_grouped_products_have_no_float64_of_their_own() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(2, 4, 8))

        def forward(self, x: Tensor) -> Tensor:
            return torch._grouped_mm(x, self.w, offs=torch.tensor([2, 5], dtype=torch.int32))

    torch.manual_seed(0)
    found = verify(Experts(), lambda model, x: model(x).exp().mean(), torch.randn(6, 4))
    assert found.ok


def test_a_model_that_cannot_compute_in_float64() -> None:
    class Narrow(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            raise RuntimeError("narrow_cpu not implemented for 'Double'\nand much more")

    with pytest.raises(ValueError, match=r"this model cannot: narrow_cpu .* for 'Double'$"):
        verify(network(), lambda model, x: Narrow.apply(model(x)).mean(), inputs())


# --- what is a constant to autograd --------------------------------------------------------------


def straight_through(model: nn.Module, x: Tensor) -> Tensor:
    h = model[0](x)
    return model[2](h + (torch.round(h) - h).detach()).square().mean()


def target_network(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        target = torch.tanh(model(x)) + 0.3
    return (model(x) - target).square().mean()


def scaled_by_data(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean() * model[0].weight.data.square().mean()


def scaled_by_a_number(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean() * model(x).square().mean().item()


def nearest_code(model: nn.Module, x: Tensor) -> Tensor:
    """The losses of a VQ-VAE: codes follow the encoder, and the encoder the codes."""
    h, codes = model[0](x), model[2].weight
    chosen = codes[torch.cdist(h, codes).argmin(-1)]
    quantized = h + (chosen - h).detach()
    pull = (chosen - h.detach()).square().mean() + 0.25 * (chosen.detach() - h).square().mean()
    return quantized.exp().mean() + pull


@pytest.mark.filterwarnings("ignore:loss_fn calls")
@pytest.mark.parametrize(
    "loss", [straight_through, target_network, scaled_by_data, scaled_by_a_number, nearest_code]
)
def test_what_is_taken_out_of_the_graph_stays_as_it_is(loss: Loss) -> None:
    """Else differences of gradients would see the derivative of another function."""
    found = verify(network(), loss, inputs(), partition={"all": ".*weight|0.bias", "rest": ...})
    assert found.ok
    assert max(found.Hbar_error.max(), found.D3_error.max()) < 1e-5


# --- verdicts ------------------------------------------------------------------------------------


def test_a_wrong_rule_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = RULES["tanh"]

    def wrong(sweep, op, x, *args):
        t = right(sweep, op, x, *args)
        return None if t is None else t.map(lambda rows: 1.01 * rows)

    monkeypatch.setitem(RULES, "tanh", wrong)
    model = nn.Sequential(network(), nn.Tanh(), nn.Linear(3, 2))
    found = verify(model, lambda model, x: model(x).square().mean(), inputs())
    assert found.status == "differs" and not found.ok
    assert "DIFFER" in str(found)


def made(verdicts: list[str]) -> Verification:
    """Return a verification with these verdicts."""
    found = verify(network(), lambda model, x: model(x).square().mean(), inputs())
    numbers = {"agrees": (0.0, 0.0), "differs": (1.0, 0.0), "unclear": (1.0, 1.0)}
    error, doubt = (torch.tensor([numbers[v][i] for v in verdicts]) for i in (0, 1))
    zero = torch.zeros_like(error)
    names = tuple(f"group {i}" for i in range(len(verdicts)))
    return Verification(names, error, zero, doubt, zero, found.sweep, found.differences)


@pytest.mark.parametrize(
    ("verdicts", "status"),
    [
        (["agrees", "agrees"], "agrees"),
        (["agrees", "unclear"], "agrees"),
        (["agrees", "unclear", "unclear"], "unclear"),
        (["unclear"], "unclear"),
        (["agrees", "agrees", "agrees", "differs"], "differs"),
        (["unclear", "unclear", "differs"], "differs"),
    ],
)
def test_status_of_all_groups(verdicts: list[str], status: str) -> None:
    found = made(verdicts)
    assert list(found.verdicts) == verdicts
    assert found.status == status
    assert found.ok == (status == "agrees")


def test_groups_and_a_direction_of_ones_own() -> None:
    """Both are of the model, and moved to its copy in float64: the numbers are those along u."""
    model, x = network(), inputs()
    groups = make_partition(model, "layers")
    u = {name: 0.5 * torch.ones_like(p) for name, p in model.named_parameters()}

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().mean()

    found = verify(model, loss_fn, x, partition=groups, direction=u)
    assert found.ok and found.names == groups.names
    expected = summarize(model, loss_fn, x, partition=groups, direction=u)
    torch.testing.assert_close(found.sweep.Hbar.float(), expected.Hbar, rtol=1e-4, atol=1e-6)
    first = verify(model, loss_fn, iter([x, x + 1]), partition=groups, direction=u)
    torch.testing.assert_close(first.sweep.Hbar, found.sweep.Hbar)


def test_a_model_that_has_stored_an_activation() -> None:
    """Which torch does not copy; it stays as it is, in the model and in its lists."""

    class Storing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.stored = super().forward(x)
            self.losses = [self.stored.square().mean()]
            return self.stored

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).exp().mean() + model.losses[0]

    model = Storing(5, 3)
    loss_fn(model, inputs())
    before = model.stored, model.losses[0]
    assert verify(model, loss_fn, inputs()).ok
    assert model.stored is before[0] and model.losses[0] is before[1]
    assert model.stored.grad_fn is not None


def test_a_model_with_an_attribute_that_contains_itself() -> None:
    model = nn.Linear(5, 3)
    model.tree = {}
    model.tree["root"] = model.tree
    assert verify(model, lambda model, x: model(x).exp().mean(), inputs()).ok
