"""The sweep as a whole: any code in a loss, and never a silently wrong number."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrizations
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function
from torch.utils.checkpoint import checkpoint

from newton_summary import Partition, Summary, learning_rates, make_partition, summarize
from newton_summary.derivatives.sweep import summarize_sweep
from newton_summary.derivatives.sweep.tape import Tangent, add_tangents
from newton_summary.derivatives.sweep.tf32 import convolutions_take_tf32, products_take_tf32
from newton_summary.errors import CannotDifferentiate
from newton_summary.probe.probe import Probe
from oracle import finite_differences

Loss = Callable[[nn.Module, Tensor], Tensor]


class Net(nn.Module):
    """Three layers, a parameter of its own, and one that no loss reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 4)
        self.b = nn.Linear(4, 4)
        self.c = nn.Linear(4, 2)
        self.scale = nn.Parameter(torch.randn(4))
        self.unused = nn.Parameter(torch.randn(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.tail(torch.tanh(self.a(x)))

    def tail(self, h: Tensor) -> Tensor:
        return self.c(torch.tanh(self.b(h)) * self.scale)


def net(dtype: torch.dtype = torch.float64) -> Net:
    torch.manual_seed(0)
    model = Net().to(dtype)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.5)
    return model


def batch(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(5, 3, generator=torch.Generator().manual_seed(1), dtype=dtype)


def plain(model: Net, x: Tensor) -> Tensor:
    return model(x).square().mean()


def direction(partition: Partition) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return {
        name: (torch.randn(p.shape, generator=generator) / p.numel() ** 0.5).to(p.dtype)
        for name, p in partition.params.items()
    }


def measure(
    model: nn.Module, loss: Loss, x: Any, backend: str = "sweep", **options: Any
) -> Summary:
    partition = make_partition(model, options.pop("partition", "canonical"))
    u = direction(partition)
    return summarize(model, loss, x, partition=partition, direction=u, backend=backend, **options)


def errors(actual: Summary, expected: Summary) -> list[float]:
    """Return the errors of gbar, Hbar and D3, each relative to the largest entry."""
    return [
        float((a - e).abs().max() / e.abs().max())
        for a, e in zip(
            (actual.gbar, actual.Hbar, actual.D3),
            (expected.gbar, expected.Hbar, expected.D3),
            strict=True,
        )
    ]


def differences(model: nn.Module, loss: Loss, x: Tensor) -> Summary:
    partition = make_partition(model, "canonical")
    return finite_differences(model, loss, x, partition, direction(partition))


# --- orders, partitions, precision ---------------------------------------------------------------


def test_orders_agree() -> None:
    first, second, third = (measure(net(), plain, batch(), order=order) for order in (1, 2, 3))
    assert first.Hbar is None and first.D3 is None and second.D3 is None
    # The first order comes from the gradient, the others read it off the sweep.
    torch.testing.assert_close(first.gbar, third.gbar, rtol=1e-12, atol=1e-14)
    assert torch.equal(second.gbar, third.gbar)
    assert torch.equal(first.loss, third.loss)
    torch.testing.assert_close(second.Hbar, third.Hbar, rtol=0, atol=1e-14)


def test_what_the_last_operation_takes_twice_counts_once() -> None:
    """x.(A x): x and A x both go into the product, and the adjoint of x has that of A x in it."""
    model = nn.Linear(3, 3, bias=False).double()
    x = torch.randn(3, dtype=torch.float64)

    def loss_fn(model: nn.Linear, x: Tensor) -> Tensor:
        y = torch.tanh(model(x))
        return y @ model(y)

    u = {"weight": torch.ones(3, 3, dtype=torch.float64)}
    summary = summarize(model, loss_fn, x, direction=u, backend="sweep")
    loss_fn(model, x).backward()
    torch.testing.assert_close(summary.gbar, model.weight.grad.sum().reshape(1), rtol=1e-12, atol=0)


def _spectrum(model: Net, x: Tensor) -> Tensor:
    return torch.fft.fft(model(x).flatten() * torch.arange(10))


ENDS: dict[str, Loss] = {  # where the rest of the loss depends on one value, or on several
    "complex numbers": lambda m, x: (_spectrum(m, x) * _spectrum(m, x).conj()).real.sum(),
    "one complex value": lambda m, x: _spectrum(m, x).abs().sum(),
    "a complex product": lambda m, x: (lambda z: (z * z.conj() * (1 + 2j)).imag.sum())(
        _spectrum(m, x)
    ),
    "complex numbers on the way": lambda m, x: torch.fft.irfft(_spectrum(m, x).exp()).tanh().sum(),
    "a penalty": lambda m, x: plain(m, x) + m.b.weight.square().sum(),
    "a penalty in front": lambda m, x: m.a.weight.square().sum() * plain(m, x),
    "a skip": lambda m, x: (lambda y: (y + y.tanh() * 2).sum())(m(x)),
    "two hidden values": lambda m, x: (lambda h: (m.tail(h) * h[:, :2]).sum())(m.a(x).tanh()),
    "two parts": lambda m, x: (lambda a, b: (a * b).sum())(*m(x).chunk(2, -1)),
    "a linear end": lambda m, x: (m(x).exp() * torch.tensor([1.0, -2.0])).reshape(-1)[1:].sum(),
    "a curve beside": lambda m, x: (m(x).square().sum(), m.a(x).tanh().sum() * 3)[1],
    "a parameter alone": lambda m, x: (m.scale * torch.arange(4)).exp().sum(),
}


@pytest.mark.parametrize("name", ENDS)
def test_gbar_is_that_of_the_gradient(name: str) -> None:
    """It is read off where the rest of the loss is a function of one value."""
    model, partition = net(), make_partition(net(), "canonical")
    gradient = torch.autograd.grad(
        ENDS[name](model, batch()), list(model.parameters()), materialize_grads=True
    )
    u = direction(partition)
    expected = partition.inner(dict(zip(partition.params, gradient, strict=True)), u)
    actual = measure(model, ENDS[name], batch())
    torch.testing.assert_close(actual.gbar, expected, rtol=1e-12, atol=1e-14)


class Tied(nn.Module):
    """One matrix used three times, at the beginning, transposed, and at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 4)
        self.middle = nn.Linear(4, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.table.weight

    def forward(self, words: Tensor) -> Tensor:
        h = torch.tanh(self.middle(self.table(words)))
        return self.head(h + torch.sin(h @ self.table.weight.T) @ self.table.weight)


SPECS: dict[str, Any] = {
    "canonical": "canonical",
    "trivial": "trivial",
    "weights-biases": "weights-biases",
    "blocks-2": "blocks-2",
    "discrete": "discrete",
    "across the depth": {"ends": r"^(a|c)\.weight", "rest": ...},
    "inside a tensor": {
        "rows": [("a.weight", slice(0, 2))],
        "the others": [("a.weight", slice(2, None)), "b.weight", "c.bias"],
        "rest": ["a.bias", "b.bias", "c.weight", "scale", "unused"],
    },
}


@pytest.mark.parametrize("spec", SPECS)
def test_any_partition(spec: str) -> None:
    model = net()
    actual, expected = (
        measure(model, plain, batch(), backend, partition=SPECS[spec])
        for backend in ("sweep", "nested")
    )
    assert max(errors(actual, expected)) < 1e-12


@pytest.mark.parametrize("spec", ["canonical", "trivial", {"all": [".*"]}])
def test_tied_weights(spec: Any) -> None:
    torch.manual_seed(0)
    model, words = Tied().double(), torch.tensor([[0, 2], [4, 2], [1, 1]])

    def loss(model: nn.Module, words: Tensor) -> Tensor:
        return F.cross_entropy(model(words).transpose(1, 2), words.flip(0))

    spec = spec if isinstance(spec, str) else {"all": list(make_partition(model, "trivial").params)}
    actual, expected = (
        measure(model, loss, words, backend, partition=spec) for backend in ("sweep", "nested")
    )
    assert max(errors(actual, expected)) < 1e-12


@pytest.mark.parametrize("spec", ["canonical", "discrete"])
def test_groups_in_chunks_give_the_same(spec: str) -> None:
    model = net()
    partition = make_partition(model, spec)
    u = direction(partition)
    with Probe(model, plain, batch(), partition) as probe:
        ((closure, _),) = probe.closures()
        whole, chunks = (
            summarize_sweep(closure, probe.params, u, partition, stack_limit=limit)
            for limit in (None, 3000)
        )
    assert max(errors(chunks, whole)) < 1e-13


def test_float32_agrees_with_nested_float32() -> None:
    model, x = net(torch.float32), batch(torch.float32)
    actual, expected = (measure(model, plain, x, backend) for backend in ("sweep", "nested"))
    assert actual.Hbar.dtype == torch.float32
    assert max(errors(actual, expected)) < 1e-4


def test_autocast_in_the_loss_and_around_the_measurement() -> None:
    model, x = net(torch.float32), batch(torch.float32)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = model(x)
        assert y.dtype == torch.bfloat16
        return y.float().square().mean()

    expected = measure(model, plain, x)
    inside = measure(model, loss, x)
    with torch.autocast("cpu", torch.bfloat16):
        around = measure(model, plain, x)
        nothing = measure(model, lambda m, x: with_autocast_off(plain, m, x), x)
    assert 1e-4 < max(errors(inside, expected)) < 0.05
    assert 1e-4 < max(errors(around, expected)) < 0.05
    assert max(errors(nothing, expected)) < 1e-6  # the sweep itself is not under that autocast


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "loss",
    [
        lambda y, t: F.cross_entropy(y, t.argmax(1)),
        lambda y, t: F.cross_entropy(y, t.softmax(1), label_smoothing=0.1),
        lambda y, t: F.multi_margin_loss(y, t.argmax(1)),
        lambda y, t: F.cosine_embedding_loss(y, t, torch.ones(len(t))),
        lambda y, t: F.poisson_nll_loss(input=y, target=t),
        F.mse_loss,
    ],
)
def test_losses_take_half_precision_as_autocast_does(loss, dtype) -> None:
    """Torch takes them in float32 as a whole; taken apart, their parts would stay in half."""
    torch.manual_seed(0)
    model, x = nn.Linear(5, 4), 3 * torch.randn(16, 5)
    t = torch.randn(16, 4)

    def under_autocast(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype):
            return loss(model(x), t)

    summary = measure(model, under_autocast, x)
    torch.testing.assert_close(summary.loss, under_autocast(model, x).detach(), rtol=1e-6, atol=0)


def with_autocast_off(loss: Loss, model: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return loss(model, x)


def test_generic_operation_is_run_again_under_its_autocast() -> None:
    """Operators by their full name have no rule."""
    model, x = net(torch.float32), batch(torch.float32)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = torch.ops.aten.linear.default(torch.tanh(model.a(x)), model.b.weight)
        assert y.dtype == torch.bfloat16
        return y.float().square().mean()

    exact = measure(model, lambda m, x: with_autocast_off(loss_without_autocast, m, x), x)
    assert max(errors(measure(model, loss, x), exact)) < 0.03


def loss_without_autocast(model: nn.Module, x: Tensor) -> Tensor:
    return F.linear(torch.tanh(model.a(x)), model.b.weight).square().mean()


def test_several_batches_are_weighted_by_their_size() -> None:
    model, x = net(), batch()
    data = torch.utils.data.DataLoader(x, batch_size=3)
    parts, whole = measure(model, plain, data), measure(model, plain, x)
    assert max(errors(parts, whole)) < 1e-12
    assert max(errors(parts, measure(model, plain, data, "nested"))) < 1e-12


# --- code that the sweep records itself ----------------------------------------------------------

RECORDED: dict[str, Loss] = {}


def recorded(loss: Loss) -> Loss:
    RECORDED[loss.__name__] = loss
    return loss


@recorded
def parameters_used_once(model: Net, x: Tensor) -> Tensor:
    return plain(model, x)


@recorded
def control_flow(model: Net, x: Tensor) -> Tensor:
    h = model.a(x)
    h = torch.tanh(h) if h.sum() > 0 else torch.sigmoid(h)
    for _ in range(2 + int(h.detach().sum() > 1e6)):
        h = torch.tanh(model.b(h))
    return model.c(h).square().mean()


@dataclasses.dataclass
class Output:
    logits: Tensor
    extra: dict[str, list[Tensor]]


@recorded
def results_in_dicts_and_dataclasses(model: Net, x: Tensor) -> Tensor:
    h = torch.tanh(model.a(x))
    output = Output(model.tail(h), {"hidden": [h, h.exp()]})
    return output.logits.square().mean() + sum(t.mean() for t in output.extra["hidden"])


@recorded
def buffer_filled_in_a_loop(model: Net, x: Tensor) -> Tensor:
    out = x.new_zeros(5, 3, 4)
    h = torch.tanh(model.a(x))
    for i in range(3):
        h = torch.tanh(model.b(h))
        out[:, i] = h * model.scale
    return model.c(out.mean(1)).square().mean() + out[:, 1:].exp().mean()


@recorded
def list_of_rows(model: Net, x: Tensor) -> Tensor:
    return torch.stack([model(row) for row in x]).square().mean()


@recorded
def views_written_to(model: Net, x: Tensor) -> Tensor:
    h = model.a(x) * 1
    left, right, flat = h[:, :2], h[:, 1:], h.view(-1)
    left.sin_()
    flat[3:9] *= 2
    right[0] = model.scale[1:]
    return model.tail(h * flat.sum()).square().mean() + left.exp().sum() * right.mean()


@recorded
def layer_of_sequences_written_to(model: Net, x: Tensor) -> Tensor:
    """With three dimensions and a bias, torch gives out a view of what it computed."""
    h = model.b(torch.tanh(model.a(x[None])))
    h[0, 1].add_(model.scale)
    h.relu_()
    return model.c(h).square().mean()


@recorded
def output_written_to_through_a_view(model: Net, x: Tensor) -> Tensor:
    """The slope of the loss is read off at the view."""
    y = model(x).view(-1)
    y.exp_()
    return y.mean()


@recorded
def written_after_use(model: Net, x: Tensor) -> Tensor:
    h = model.a(x) * 1
    row = h[0]
    before = torch.sin(row) + torch.cos(h[1])  # sin and cos keep their input: clone what they get
    kept = torch.tanh(h.clone()[:, 1])
    h = h.clone()
    h.mul_(2).add_(1)
    return model.tail(h).square().mean() + (before * model.scale).sum() * kept.mean()


@recorded
def parameter_copied_and_written_to(model: Net, x: Tensor) -> Tensor:
    weight = model.b.weight * 1
    weight[0] = 0
    weight.view(-1)[5] *= 3
    weight.diagonal().add_(model.scale)
    return model.c(F.linear(torch.tanh(model.a(x)), weight)).square().mean()


@recorded
def constant_written_to_after_use(model: Net, x: Tensor) -> Tensor:
    factor = torch.full((4,), 2.0, dtype=x.dtype)
    h = torch.tanh(model.a(x)) * factor.exp() - factor
    factor.mul_(3)
    return model.tail(h + factor).square().mean()


@recorded
def checkpoint_without_reentry(model: Net, x: Tensor) -> Tensor:
    h = checkpoint(lambda z: torch.tanh(model.a(z)), x, use_reentrant=False)
    return checkpoint(model.tail, h, use_reentrant=False).square().mean()


@recorded
def leaves_that_are_no_parameters(model: Net, x: Tensor) -> Tensor:
    noise = torch.zeros(5, 4, dtype=x.dtype, requires_grad=True)
    return model.tail(torch.tanh(model.a(x)) + noise.exp()).square().mean() + noise.sum()


@recorded
def functional_parameters(model: Net, x: Tensor) -> Tensor:
    doubled = {name: 2 * p for name, p in model.c.named_parameters()}
    return functional_call(model.c, doubled, (torch.tanh(model.a(x)),)).square().mean()


@recorded
def lists_of_tensors(model: Net, x: Tensor) -> Tensor:
    h = torch.tanh(model.a(x))
    first, second = torch._foreach_mul([h, model.b(h)], [model.b(h), h])
    return model.c(first * second).square().mean()


@recorded
def operators_of_aten(model: Net, x: Tensor) -> Tensor:
    h = torch.ops.aten.addmm(model.a.bias, x, model.a.weight.t())
    y = model.tail(torch.ops.aten.tanh.default(h))
    return torch.ops.aten.mean.default(torch.ops.aten.mul.Tensor(y, y))


@recorded
def sparse_matrix(model: Net, x: Tensor) -> Tensor:
    graph = (torch.ones(5, 5, dtype=x.dtype) - torch.eye(5, dtype=x.dtype)).to_sparse()
    return model.tail(torch.tanh(torch.sparse.mm(graph, model.a(x)))).square().mean()


@recorded
def sparse_matrix_and_bias(model: Net, x: Tensor) -> Tensor:
    graph = (torch.ones(5, 5, dtype=x.dtype) - torch.eye(5, dtype=x.dtype)).to_sparse()
    return model.tail(torch.tanh(torch.addmm(model.a.bias, graph, model.a(x)))).square().mean()


@recorded
def sums_that_are_no_layers(model: Net, x: Tensor) -> Tensor:
    weight, bias = model.a.weight.t(), model.a.bias
    h = torch.addmm(bias, x, weight, beta=2, alpha=0.5) + torch.addmm(bias[:1], x, weight).sin()
    return model.tail(torch.tanh(h)).square().mean()


@recorded
def random_numbers(model: Net, x: Tensor) -> Tensor:
    h = torch.tanh(model.a(x))
    h = h + torch.randn_like(h) * model.scale
    kept = torch.bernoulli(torch.full_like(h, 0.7))
    return model.tail(F.dropout(h * kept, 0.3)).square().mean()


@recorded
def eigenvalues_and_eigenvectors(model: Net, x: Tensor) -> Tensor:
    """Two results of one operation, of which the loss uses both."""
    values, vectors = torch.linalg.eigh(model.b.weight + model.b.weight.T)
    return (torch.tanh(model.a(x)) @ vectors.square()).square().mean() * values.exp().sum()


@recorded
def states_of_a_cell(model: Net, x: Tensor) -> Tensor:
    """The state h of an LSTM is computed from its state c."""
    gates = torch.cat([model.b.weight] * 4)
    zeros = x.new_zeros(5, 4)
    h, c = torch.ops.aten.lstm_cell.default(
        torch.tanh(model.a(x)), [zeros, zeros + 0.3], gates, gates.sin()
    )
    return (h.exp() * c).square().mean() + (c.cos() * model.scale).mean()


@recorded
def last_state_written_to(model: Net, x: Tensor) -> Tensor:
    """The outputs of a GRU contain its last state, which is the second result."""
    gates = torch.cat([model.b.weight] * 3)
    zeros = x.new_zeros(1, 5, 4)
    inside = torch.tanh(model.a(x))[None]
    outputs, last = torch.ops.aten.gru.input(
        inside, zeros, [gates, gates.sin()], False, 1, 0.0, False, False, False
    )
    last.add_(model.scale)
    return outputs.exp().mean() + last.square().mean()


@recorded
def keywords(model: Net, x: Tensor) -> Tensor:
    h = torch.mm(input=x, mat2=model.a.weight.t())
    h = torch.add(input=h, other=model.a.bias, alpha=2)
    h = torch.matmul(torch.tanh(input=h), other=model.b.weight)
    h = torch.cat(tensors=[h, torch.mul(input=h, other=h)], dim=1)[:, 2:6]
    h = torch.addcmul(input=h, tensor1=h, tensor2=model.scale, value=2)
    return torch.sum(input=torch.where(condition=h > 0, input=h.sin(), other=h.exp())) / 7


def halved(a: Tensor, *, x: Tensor) -> Tensor:
    """A function of somebody's library that takes part in torch's protocol."""
    if has_torch_function((a, x)):
        return handle_torch_function(halved, (a, x), a, x=x)
    return a * x / 2


@recorded
def function_of_a_library(model: Net, x: Tensor) -> Tensor:
    return model.tail(halved(torch.tanh(model.a(x)), x=model.scale)).square().mean()


@pytest.mark.parametrize("name", RECORDED)
def test_code_that_the_sweep_records(name: str) -> None:
    model = net()
    actual = measure(model, RECORDED[name], batch())
    assert actual.backend == "sweep"
    error = errors(actual, differences(model, RECORDED[name], batch()))
    assert error[0] < 1e-12
    assert error[1] < 1e-8
    assert error[2] < 1e-5


def test_reentrant_checkpoint_is_looked_through() -> None:
    """There ``torch.autograd.grad`` does not see the parameters: nothing else to compare with."""

    def loss(model: Net, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        return checkpoint(model, x, use_reentrant=True).square().mean()

    model = net()
    assert max(errors(measure(model, loss, batch()), measure(model, plain, batch()))) < 1e-13


def test_compiled_model_runs_as_it_is_written() -> None:
    model = net()
    compiled = torch.compile(lambda x: model.tail(torch.tanh(model.a(x))), backend="aot_eager")

    def loss(model: Net, x: Tensor) -> Tensor:
        return compiled(x).square().mean()

    actual = measure(model, loss, batch())
    assert max(errors(actual, measure(model, plain, batch()))) < 1e-13


def test_forward_hooks_of_modules_are_a_part_of_the_loss() -> None:
    model = net()
    model.b.register_forward_hook(lambda module, inputs, output: output * inputs[0].exp())
    model.c.register_forward_pre_hook(lambda module, inputs: (inputs[0].sin(),))
    error = errors(measure(model, plain, batch()), differences(model, plain, batch()))
    assert error[1] < 1e-8 and error[2] < 1e-5


def test_hooks_on_gradients_rest() -> None:
    def loss(model: Net, x: Tensor) -> Tensor:
        h = torch.tanh(model.a(x))
        h.register_hook(lambda gradient: 3 * gradient)
        return model.tail(h).square().mean()

    model = net()
    with pytest.warns(UserWarning, match="hooks are disabled"):
        actual = measure(model, loss, batch())
    assert max(errors(actual, measure(model, plain, batch()))) < 1e-13


@pytest.mark.parametrize("kind", ["float", "bfloat16", "half", "to", "type", "type_as"])
def test_conversions(kind: str) -> None:
    def convert(h: Tensor) -> Tensor:
        if kind == "to":
            return h.to("cpu", torch.float32).to(h)
        if kind == "type":
            return h.type(torch.float32).type("torch.DoubleTensor")
        if kind == "type_as":
            return h.type_as(torch.zeros(1)).type_as(h)
        return getattr(h, kind)().double().cpu()

    def loss(model: Net, x: Tensor) -> Tensor:
        return model.tail(convert(torch.tanh(model.a(x)))).square().mean()

    model = net()
    error = max(errors(measure(model, loss, batch()), measure(model, plain, batch())))
    assert 0 < error < (0.05 if kind in ("bfloat16", "half") else 1e-6)


# --- numbers that autograd takes for constants ---------------------------------------------------
# Here the loss says that a number does not move, although it does: the derivatives are those that
# autograd means, as ``nested`` has them.

CONSTANTS: dict[str, Loss] = {}


def constant(loss: Loss) -> Loss:
    CONSTANTS[loss.__name__] = loss
    return loss


@constant
def detached(model: Net, x: Tensor) -> Tensor:
    h = torch.tanh(model.a(x))
    return model.tail(h / h.detach().abs().max()).square().mean()


@constant
def detached_in_place(model: Net, x: Tensor) -> Tensor:
    h = torch.tanh(model.a(x))
    z = model.b(h) * 1
    z.detach_()
    return model.tail(torch.tanh(z + h)).square().mean()


@constant
def data_of_a_tensor(model: Net, x: Tensor) -> Tensor:
    h = torch.tanh(model.a(x))
    return model.tail(h / h.data.abs().max()).square().mean()


@constant
def straight_through(model: Net, x: Tensor) -> Tensor:
    h = torch.tanh(model.a(x))
    return model.tail(h + (h.round() - h).detach()).square().mean()


@constant
def computed_without_gradients(model: Net, x: Tensor) -> Tensor:
    h = torch.tanh(model.a(x))
    with torch.no_grad():
        largest = h.abs().amax(0)
        first = model.b.weight[0]
    return model.tail(h / largest * first).square().mean()


@constant
def changed_without_gradients(model: Net, x: Tensor) -> Tensor:
    h = model.a(x) * 1
    column = h[:, 1]
    with torch.no_grad():
        h.clamp_(-0.5, 0.5)
        column.mul_(2)
        h[:, 3].zero_()
    return model.tail(torch.tanh(h)).square().mean() * column.exp().sum()


@constant
def output_changed_without_gradients(model: Net, x: Tensor) -> Tensor:
    y = model(x)
    with torch.no_grad():
        y.mul_(2)
    return y.exp().mean()


@constant
def loss_changed_without_gradients(model: Net, x: Tensor) -> Tensor:
    loss = plain(model, x)
    with torch.no_grad():
        loss.add_(1)
    return loss


@constant
def through_numpy(model: Net, x: Tensor) -> Tensor:
    h = torch.tanh(model.a(x))
    return model.tail(h * torch.from_numpy(2 * h.detach().numpy())).square().mean()


@pytest.mark.parametrize("name", CONSTANTS)
def test_what_autograd_takes_for_constant(name: str) -> None:
    model = net()
    actual, expected = (
        measure(model, CONSTANTS[name], batch(), backend) for backend in ("sweep", "nested")
    )
    assert max(errors(actual, expected)) < 1e-12


def test_spectral_norm_in_training_moves_its_vectors_without_gradients() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        parametrizations.spectral_norm(nn.Linear(3, 4)), nn.Tanh(), nn.Linear(4, 2)
    ).double()
    actual, expected = (measure(model, plain, batch(), b) for b in ("sweep", "nested"))
    assert max(errors(actual, expected)) < 1e-12


def test_padding_of_an_embedding_never_moves() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(4, 3, padding_idx=1), nn.Tanh(), nn.Linear(3, 2)).double()
    words = torch.tensor([[0, 1], [1, 3], [2, 2]])
    actual, expected = (measure(model, plain, words, b) for b in ("sweep", "nested"))
    assert max(errors(actual, expected)) < 1e-12


@pytest.mark.parametrize(
    ("read", "call"),
    [
        (lambda t: t.item(), "item"),
        (lambda t: float(t), "float"),
        (lambda t: t.tolist(), "tolist"),
        (lambda t: torch.tensor([t, 1.0])[0], "torch.tensor"),
    ],
)
def test_a_number_read_out_is_warned_about(read: Callable[[Tensor], Any], call: str) -> None:
    def loss(model: Net, x: Tensor) -> Tensor:
        h = torch.tanh(model.a(x))
        return model.tail(h * read(h.abs().max())).square().mean()

    model = net()
    with pytest.warns(UserWarning, match=rf"{call}\(\) on a tensor that depends on the parameters"):
        actual = measure(model, loss, batch())
    assert max(errors(actual, measure(model, loss, batch(), "nested"))) < 1e-12


def test_a_number_read_out_of_something_else_is_nobodys_business() -> None:
    def loss(model: Net, x: Tensor) -> Tensor:
        return model(x * x.max().item()).square().mean() * float(model.a.weight.detach().sum())

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        measure(net(), loss, batch())


# --- what the sweep cannot record: another backend, and the reason -------------------------------


class Square(torch.autograd.Function):
    """A function that autograd, and only autograd, can differentiate."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


class Doubling(Tensor):
    """A tensor whose sums are twice as large."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        return result * 2 if func is Tensor.add else result


FALLS_BACK: dict[str, tuple[str, Loss]] = {}


def falls_back(reason: str) -> Callable[[Loss], Loss]:
    def note(loss: Loss) -> Loss:
        FALLS_BACK[loss.__name__] = (reason, loss)
        return loss

    return note


@falls_back("SquareBackward")
def custom_function(model: Net, x: Tensor) -> Tensor:
    return model.tail(Square.apply(model.a(x))).square().mean()


@falls_back("SquareBackward")
def custom_function_at_the_end(model: Net, x: Tensor) -> Tensor:
    return Square.apply(model(x).mean())


@falls_back(r"the loss calls torch\.autograd\.grad")
def gradient_penalty(model: Net, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    y = model(x).sum()
    (slope,) = torch.autograd.grad(y, x, create_graph=True)
    return slope.square().mean() + y.square() / 10


@falls_back(r"the loss calls torch\.autograd\.grad")
def nothing_but_a_gradient(model: Net, x: Tensor) -> Tensor:
    y = model(x).square().sum()
    return torch.autograd.grad(y, model.scale, create_graph=True)[0].sum()


@falls_back("cannot be recorded")
def vmapped(model: Net, x: Tensor) -> Tensor:
    return model.tail(torch.vmap(lambda row: torch.tanh(model.a(row)))(x)).square().mean()


@falls_back("cannot be recorded")
def gradient_by_functorch(model: Net, x: Tensor) -> Tensor:
    def energy(h: Tensor) -> Tensor:
        return model.tail(h).square().sum()

    return torch.func.grad(energy)(torch.tanh(model.a(x))).square().mean()


@falls_back("several tensors in place")
def lists_written_to(model: Net, x: Tensor) -> Tensor:
    h = torch.tanh(model.a(x))
    written = [h * 1, model.b(h) * 1]
    torch._foreach_mul_(written, [model.b(h), h])
    return model.c(written[0] * written[1]).square().mean()


@falls_back("class Doubling")
def tensor_subclass(model: Net, x: Tensor) -> Tensor:
    h = torch.tanh(model.a(x)).as_subclass(Doubling) + 1.0
    return model.tail(h.as_subclass(Tensor)).square().mean()


@pytest.mark.parametrize("name", FALLS_BACK)
def test_fallback_is_right_and_says_why(name: str) -> None:
    reason, loss = FALLS_BACK[name]
    model = net()
    with pytest.raises(CannotDifferentiate, match=reason):
        measure(model, loss, batch())
    with pytest.warns(UserWarning, match=f"Falling back from 'sweep'.*{reason}"):
        actual = measure(model, loss, batch(), "auto")
    assert actual.backend != "sweep"
    assert reason.strip("\\") in actual.reason or "autograd.grad" in actual.reason
    error = errors(actual, differences(model, loss, batch()))
    assert error[1] < 1e-6 and error[2] < 1e-4


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_unseen_values_beside_the_loss_do_not_matter() -> None:
    """A metric from TorchScript or a custom function, read out, updated, detached into the loss."""
    scripted = torch.jit.script(root_mean_square)
    total = torch.zeros((), dtype=torch.float64)

    def loss(model: Net, x: Tensor) -> Tensor:
        y = model(x)
        metric = scripted(y) + Square.apply(y.sum()) * model.scale.sum()
        metric.mul_(2)
        total.copy_(metric.detach())
        return y.square().mean() * (1 + 0 * metric.detach())

    model = net()
    actual = measure(model, loss, batch())
    assert actual.backend == "sweep" and float(total) != 0
    assert max(errors(actual, measure(model, plain, batch()))) < 1e-13

    def reaches(model: Net, x: Tensor) -> Tensor:
        y = model(x)
        return y.square().mean() + scripted(y)

    with pytest.raises(CannotDifferentiate, match="TorchScript"):
        measure(model, reaches, batch())


def root_mean_square(y: Tensor) -> Tensor:
    return (y * y).mean().sqrt()


def memory_shared_by_detach(model: Net, x: Tensor) -> Tensor:
    h = torch.sigmoid(model.a(x)) + 0
    h.detach().mul_(2)
    return model.tail(h).square().mean()


def memory_shared_by_data(model: Net, x: Tensor) -> Tensor:
    h = model.a(x) * 1
    h.data.mul_(2)
    return model.tail(h).square().mean()


def data_replaced(model: Net, x: Tensor) -> Tensor:
    h = model.a(x) * 1
    h.data = torch.ones_like(h)
    return model.tail(h).square().mean()


def view_through_detach(model: Net, x: Tensor) -> Tensor:
    h = torch.sigmoid(model.a(x)) + 0
    y = model.tail(h)
    h.detach()[:, 0].zero_()
    return y.square().mean() + h.mean()


@pytest.mark.parametrize(
    "loss", [memory_shared_by_detach, memory_shared_by_data, data_replaced, view_through_detach]
)
def test_changes_behind_the_back_of_autograd_are_noticed(loss: Loss) -> None:
    with pytest.raises(CannotDifferentiate, match="changed in place"):
        measure(net(), loss, batch())


def test_operator_of_a_library_falls_back() -> None:
    """The gradient of such an operator may be computed in its forward pass: no second one."""

    @torch.library.custom_op("newton_summary_tests::cube", mutates_args=())
    def cube(x: Tensor) -> Tensor:
        return x**3

    cube.register_autograd(
        lambda ctx, gradient: 3 * ctx.x**2 * gradient,
        setup_context=lambda ctx, inputs, output: setattr(ctx, "x", inputs[0]),
    )
    with pytest.raises(CannotDifferentiate, match="cube"):
        measure(net(), lambda model, x: model.tail(cube(model.a(x))).square().mean(), batch())


class Louder(TorchFunctionMode):
    """Makes every tanh twice as large."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return 2 * result if func is torch.tanh else result


def test_function_modes_inside_and_outside_of_the_loss() -> None:
    def loss(model: Net, x: Tensor) -> Tensor:
        with Louder():
            return plain(model, x)

    model = net()
    inside = measure(model, loss, batch())
    assert max(errors(inside, measure(model, loss, batch(), "nested"))) < 1e-12
    with Louder(), pytest.raises(CannotDifferentiate, match="Louder"):
        measure(model, plain, batch())
    with torch.device("cpu"):
        measure(model, plain, batch())


def test_grad_may_be_asked_for() -> None:
    def loss(model: Net, x: Tensor) -> Tensor:
        assert model.a.weight.grad is None
        return plain(model, x)

    assert max(errors(*(measure(net(), f, batch()) for f in (loss, plain)))) < 1e-12


def test_a_module_converted_to_what_it_is() -> None:
    """Routers of mixtures of experts are converted in each forward pass."""

    def loss(model: Net, x: Tensor) -> Tensor:
        model.a = model.a.to(torch.float64)
        return plain(model, x)

    model = net()
    model.a.weight.grad = torch.ones_like(model.a.weight)
    assert max(errors(*(measure(model, f, batch()) for f in (loss, plain)))) < 1e-12
    assert torch.equal(model.a.weight.grad, torch.ones_like(model.a.weight))


def test_mixed_dtypes_in_a_sum() -> None:
    def loss(model: Net, x: Tensor) -> Tensor:
        h = torch.tanh(model.a(x))
        return (model.b(h) + model.a(x).sum(-1, keepdim=True).float()).square().mean()

    actual = measure(net(torch.bfloat16), loss, batch(torch.bfloat16))
    expected = measure(net(), loss, batch())
    assert max(errors(actual, expected)) < 0.05


class Experts(nn.Module):
    """Tokens sorted by expert, one of which gets none."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 4)
        self.up = nn.Parameter(torch.randn(3, 4, 8))
        self.down = nn.Parameter(torch.randn(3, 8, 4))

    def forward(self, x: Tensor, product: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        h = torch.tanh(self.a(x))
        return h + product(torch.tanh(product(h, self.up)), self.down)


@pytest.mark.skipif(not hasattr(torch, "_grouped_mm"), reason="needs torch._grouped_mm")
def test_grouped_products() -> None:
    """They exist in float32 and less alone."""

    def grouped(x: Tensor, w: Tensor) -> Tensor:
        offsets = torch.tensor([2, 2, 4], dtype=torch.int32)
        return torch._grouped_mm(x, w, offs=offsets).narrow(0, 0, 4)

    def by_hand(x: Tensor, w: Tensor) -> Tensor:
        return torch.cat([x[:2] @ w[0], x[2:4] @ w[2]])

    torch.manual_seed(0)
    model = Experts()
    actual, expected = (
        measure(
            model.to(dtype),
            lambda m, x, f=product: m(x[:4], f).square().mean(),
            batch(dtype),
        )
        for product, dtype in ((grouped, torch.float32), (by_hand, torch.float64))
    )
    assert max(errors(actual, expected)) < 1e-5


def test_cholesky_factors_of_many_columns() -> None:
    """They are multiplied some columns at a time; a determinant and a solution are not."""
    x = torch.randn(220, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    eye = torch.eye(220, dtype=torch.float64)

    def kernel(model: Net) -> Tensor:
        z = model.a(x)
        return (
            torch.exp(-(z[:, None] - z[None]).square().sum(-1) / 2) + model.scale.exp().sum() * eye
        )

    def by_factor(model: Net, y: Tensor) -> Tensor:
        L = torch.linalg.cholesky(kernel(model))
        return y[0] @ torch.cholesky_solve(y.mT, L)[:, 0] + 2 * L.diagonal().log().sum()

    def by_hand(model: Net, y: Tensor) -> Tensor:
        K = kernel(model)
        return y[0] @ torch.linalg.solve(K, y[0]) + torch.logdet(K)

    y = x[:, 0].sin()[None]
    assert max(errors(*(measure(net(), f, y) for f in (by_factor, by_hand)))) < 1e-10


def test_repeated_labels_of_ctc_loss_are_no_mask() -> None:
    """No path leaves out the blank between them, which is no mask that hides scores."""

    def loss(model: Net, x: Tensor) -> Tensor:
        logs = model.a(x)[:, None].log_softmax(-1)
        return F.ctc_loss(logs, torch.tensor([[1, 1]]), torch.tensor([len(x)]), torch.tensor([2]))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not measure(net(), loss, batch()).approximate


def test_unpooling_twice_to_one_place_falls_back() -> None:
    """The second entry is written over the first, but torch's gradient has both."""

    def loss(model: Net, x: Tensor) -> Tensor:
        y, places = F.max_pool1d(model.a(x)[:, None], 3, 1, return_indices=True)
        return F.max_unpool1d(y, torch.zeros_like(places), 3, 1).square().sum()

    with pytest.raises(CannotDifferentiate, match="two entries in one place"):
        measure(net(), loss, batch())
    with pytest.warns(UserWarning, match="two entries in one place"):
        actual = measure(net(), loss, batch(), "auto")
    assert actual.backend != "sweep" and actual.approximate


def test_as_strided_scatter_where_autograd_itself_is_wrong() -> None:
    def loss(model: Net, x: Tensor) -> Tensor:
        y = model.a(x)
        return torch.as_strided_scatter(y.exp(), y[:2, :2].sin(), (2, 2), (1, 2), 1).square().sum()

    def by_hand(model: Net, x: Tensor) -> Tensor:
        y = model.a(x)
        flat = y.exp().flatten()
        flat = flat.index_copy(0, torch.tensor([1, 3, 2, 4]), y[:2, :2].sin().flatten())
        return flat.square().sum()

    assert max(errors(*(measure(net(), f, batch()) for f in (loss, by_hand)))) < 1e-12


# --- losses that are none ------------------------------------------------------------------------


def scaled_under_no_grad(model: Net) -> None:
    with torch.no_grad():
        model.a.weight.mul_(0.9)


def scaled_through_data(model: Net) -> None:
    model.a.weight.data.mul_(0.9)


def scaled_through_a_view(model: Net) -> None:
    with torch.no_grad():
        model.a.weight[0].mul_(0.9)


def scaled_through_detach(model: Net) -> None:
    model.a.weight.detach().view(-1)[1:].mul_(0.9)


@pytest.mark.parametrize(
    "change",
    [scaled_under_no_grad, scaled_through_data, scaled_through_a_view, scaled_through_detach],
)
def test_loss_that_changes_a_parameter(change: Callable[[Net], None]) -> None:
    def loss(model: Net, x: Tensor) -> Tensor:
        change(model)
        return plain(model, x)

    model = net()
    before = model.a.weight.detach().clone()
    with pytest.raises(ValueError, match=r"a\.weight"):
        measure(model, loss, batch())
    assert torch.equal(model.a.weight, before)


def test_loss_that_does_not_depend_on_the_parameters() -> None:
    def loss(model: Net, x: Tensor) -> Tensor:
        return torch.zeros(3, requires_grad=True).exp().sum()

    with pytest.raises(ValueError, match="does not depend on the parameters"):
        measure(net(), loss, batch())


class Attention(nn.Module):
    """One head, with a projection for each of queries, keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(3, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(
            self.query(x), self.key(x), self.value(x), is_causal=True
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_bias_of_keys_has_no_derivatives(dtype: torch.dtype) -> None:
    """It shifts all scores of a query by the same: rates made of rounding would be huge."""
    torch.manual_seed(0)
    model, x = Attention().to(dtype), torch.randn(6, 7, 3, dtype=dtype)
    actual = measure(model, plain, x)
    s = actual.partition.names.index("key.bias")
    assert float(actual.gbar[s]) == float(actual.D3[s]) == 0
    assert not actual.Hbar[s].any()
    rates = learning_rates(actual)
    assert rates.ok and float(rates.eta[s]) == 0
    assert max(errors(actual, measure(model, plain, x, "nested"))) < 1e3 * torch.finfo(dtype).eps


# --- rounding to TF32 -----------------------------------------------------------------------------


@pytest.mark.skipif(
    not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="older than torch 2.9"
)
@pytest.mark.parametrize("chosen", ["tf32", "ieee"])
def test_rounding_is_read_where_torch_sets_it_today(chosen: str) -> None:
    """Torch's old flag raises an error here."""
    flags = torch.backends.cuda.matmul, torch.backends.cudnn.conv
    before = [flag.fp32_precision for flag in flags]
    try:
        for flag in flags:
            flag.fp32_precision = chosen
        assert products_take_tf32() is convolutions_take_tf32() is (chosen == "tf32")
    finally:
        for flag, value in zip(flags, before, strict=True):
            flag.fp32_precision = value


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (((0, 1), (1,)), ((2, 0, 1), (0, 1))),  # one has all groups of the other
        (((3, 0), (0, 3)), ((0, 3), ())),
        (((0, 1), (0,)), ((0, 2), (2,))),  # neither has
        (((0, 1), (0,)), ((0, 1), (1,))),
    ],
)
def test_tangents_of_other_groups_add_up(one: Any, other: Any) -> None:
    torch.manual_seed(0)
    a, b = (Tangent(*groups, torch.randn(sum(map(len, groups)), 2, 3)) for groups in (one, other))
    for x, y in ((a, b), (b, a)):
        total = add_tangents([x, y])
        for groups, rows, terms in (
            (total.first, total.y1, [(x.first, x.y1), (y.first, y.y1)]),
            (total.second, total.y2, [(x.second, x.y2), (y.second, y.y2)]),
        ):
            assert {*groups} == {s for found, _ in terms for s in found}
            for s, row in zip(groups, rows, strict=True):
                expected = sum(found[g.index(s)] for g, found in terms if s in g)
                torch.testing.assert_close(row, expected, rtol=0, atol=0)
