"""The sweep, operation by operation, against central differences of torch's own gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import get_overridable_functions

from newton_summary import Summary, make_partition, summarize
from newton_summary.derivatives.sweep import engine
from newton_summary.derivatives.sweep.engine import rule_for
from newton_summary.derivatives.sweep.recorder import Recorder
from newton_summary.derivatives.sweep.rules import (
    DECOMPOSED,
    PREPARE,
    RULES,
    generic,
    recurrent_cells,
)
from newton_summary.derivatives.sweep.rules.convolutions import conv_by_columns
from newton_summary.derivatives.sweep.tape import Op, gram, sums
from newton_summary.derivatives.sweep.torch_functions import canonical_name
from newton_summary.probe.probe import Probe
from oracle import finite_differences
from sweep_cases import CASES, Around

BATCH = torch.linspace(-1, 1, 4, dtype=torch.float64)


def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch)


def operations_on_the_tape(model: nn.Module, batch: Tensor) -> list[Op]:
    with Probe(model, loss_fn, BATCH, make_partition(model, "canonical")) as probe:
        ((closure, _),) = probe.closures()
        recorder = Recorder(probe.params)
        return recorder.record(closure).ops


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).abs().max() / expected.abs().max())


def in_natural_units(actual: Summary, like: Summary) -> tuple[Tensor, Tensor]:
    """Return Hbar and D3 with every group moving by as much as makes them of the order of one.

    A group of small derivatives then counts as much as one of large ones.
    """
    n = (like.D3.abs() ** (1 / 3)).maximum(like.Hbar.diag().abs().sqrt())
    n = n.clamp_min(0.01 * n.max())
    return actual.Hbar / n / n[:, None], actual.D3 / n**3


LATER = {"aminmax", "grid_sample", "narrow_copy"}  # torch 2.6 cannot differentiate them twice


def skip_unless_torch_differentiates(model: nn.Module) -> None:
    params = list(model.parameters())
    try:
        grads = torch.autograd.grad(model(BATCH), params, create_graph=True)
        torch.autograd.grad(sum(g.sum() for g in grads), params, materialize_grads=True)
    except RuntimeError as error:
        pytest.skip(f"torch {torch.__version__}: {error}")


@pytest.mark.parametrize("name", CASES)
def test_operation_agrees_with_central_differences(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "LARGE", 0)  # forget all that no rule reads, small as it is
    case = CASES[name]
    torch.manual_seed(0)
    model = Around(case).double()
    if name in LATER:
        skip_unless_torch_differentiates(model)
    partition = make_partition(model, "canonical")
    u = {n: torch.randn_like(p) / p.numel() ** 0.5 for n, p in partition.params.items()}
    ops = operations_on_the_tape(model, BATCH)
    assert {op.name for op in ops if rule_for(op) is generic} == case.generic
    actual = summarize(model, loss_fn, BATCH, partition=partition, direction=u, backend="sweep")
    assert actual.backend == "sweep"
    expected = finite_differences(model, loss_fn, BATCH, partition, u)
    assert torch.allclose(actual.loss, expected.loss, rtol=1e-12)
    # torch's own gradients of some functions (hardsigmoid, celu) have constants in float32.
    assert relative_error(actual.gbar, expected.gbar) < 1e-8
    assert relative_error(actual.Hbar, expected.Hbar) < 1e-8
    assert relative_error(actual.D3, expected.D3) < 1e-5
    (Hbar, D3), (expected_Hbar, expected_D3) = (
        in_natural_units(s, expected) for s in (actual, expected)
    )
    assert relative_error(Hbar, expected_Hbar) < 1e-7
    assert relative_error(D3, expected_D3) < 1e-5


SECOND = (
    *("softmax", "log_softmax", "logsumexp", "linalg.norm", "normalize", "native_layer_norm"),
    *("solve", "solve a constant system", "cholesky True", "cholesky_inverse True", "slogdet"),
    *("logdet", "GRU from a state", "LSTM from a state", "LSTM without bias", "GRU without bias"),
)


@pytest.mark.parametrize("name", SECOND)
def test_second_derivatives_alone_are_those_of_all_three(name: str) -> None:
    """Many rules carry less along if nobody asks for D3."""
    torch.manual_seed(0)
    model = Around(CASES[name]).double()
    two, three = (
        summarize(model, loss_fn, BATCH, backend="sweep", order=order) for order in (2, 3)
    )
    assert two.D3 is None
    torch.testing.assert_close(two.gbar, three.gbar, rtol=1e-12, atol=0)
    torch.testing.assert_close(two.Hbar, three.Hbar, rtol=1e-10, atol=1e-14)


def test_a_system_with_few_sides_is_solved_by_its_factors() -> None:
    """And all together give the same as torch's own derivatives, at shapes that are rare."""
    torch.manual_seed(0)
    model = nn.Linear(5, 5).double()
    eye = 3 * torch.eye(5, dtype=torch.float64)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        W, one = model.weight.square(), model.bias[0].square()
        x = torch.linalg.solve(W + eye, model.bias[:, None])
        turned = W[:4].reshape(2, 2, 5).T[0].sum()
        few = torch.cat([one.sum()[None], W.sum(()).flatten()[:3]])
        return x.pow(3).sum() + turned.square() + few.square().sum()

    swept, plain = (
        summarize(model, loss, BATCH, partition="trivial", backend=b) for b in ("sweep", "nested")
    )
    assert swept.backend == "sweep" and plain.backend == "nested"
    torch.testing.assert_close(swept.Hbar, plain.Hbar)
    torch.testing.assert_close(swept.D3, plain.D3)


STILL: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda x: x.softmax(-1),
    "logsumexp": lambda x: x.logsumexp(-1),
    "layer_norm": lambda x: F.layer_norm(x, (4,)),
    "tanh": torch.tanh,
    "log": lambda x: (x + 9).log(),
    "relu": F.relu,
    "max": lambda x: x.amax(-1),
    "max_pool": lambda x: F.max_pool1d(x[None], 2),
    "sort": lambda x: x.sort(-1)[0],
    "cat": lambda x: torch.cat([x, x]),
    "setitem": lambda x: x.clone().index_put((torch.tensor([0]),), x[1]),
    "product": lambda x: x @ x,
    "convolution": lambda x: F.conv1d(x[None], x[:, :, None]),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "cholesky": lambda x: torch.linalg.cholesky(x @ x.mT + 99 * torch.eye(4).to(x)),
    "logdet": lambda x: (x + 99 * torch.eye(4).to(x)).logdet(),
    "solve": lambda x: torch.linalg.solve(x + 99 * torch.eye(4).to(x), x),
    "kl_div": lambda x: F.kl_div(x, x.exp(), log_target=False),
}


@pytest.mark.parametrize("name", STILL)
def test_what_does_not_move_adds_nothing(name: str) -> None:
    """Rounded weights depend on the parameters, and their derivatives are zero."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4).double()

    def moving(model: nn.Module, batch: Tensor) -> Tensor:
        return model.weight.pow(3).sum() + model.bias.square().sum()

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        still = STILL[name]((3 * model.weight).round())
        return moving(model, batch) + still.square().sum()

    actual, expected = (summarize(model, f, BATCH, backend="sweep") for f in (loss, moving))
    for part in ("gbar", "Hbar", "D3"):
        torch.testing.assert_close(getattr(actual, part), getattr(expected, part))


@pytest.mark.parametrize("wanted", [False, True])
@pytest.mark.parametrize("batch", [(2,), (1,)])
def test_attention_with_shared_keys_and_as_the_last_curved_operation(
    batch: tuple[int], wanted: bool
) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 6).double()
    x = torch.randn(2, 1, 3, 4, dtype=torch.float64)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        q, k, v = model(x).unflatten(-1, (3, 2)).unbind(-2)
        out = F.scaled_dot_product_attention(q, k[: batch[0]], v[: batch[0]])
        return out.square().sum() if wanted else out.sum()

    swept, plain = (summarize(model, loss, x, backend=b) for b in ("sweep", "nested"))
    assert swept.backend == "sweep"
    torch.testing.assert_close(swept.Hbar, plain.Hbar)
    torch.testing.assert_close(swept.D3, plain.D3)


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])
def test_recurrent_layers_of_five_units(
    kind: Callable[..., nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two, as elsewhere, wrong numbers of gates come to the same; in both directions."""
    torch.manual_seed(0)
    monkeypatch.setattr(recurrent_cells, "STEPS", 2)
    model = kind(2, 5, bidirectional=True).double()
    x = torch.randn(3, 2, 2, dtype=torch.float64)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x)[0].square().sum()

    swept, plain = (summarize(model, loss, x, backend=b) for b in ("sweep", "nested"))
    assert swept.backend == "sweep"
    torch.testing.assert_close(swept.Hbar, plain.Hbar)
    torch.testing.assert_close(swept.D3, plain.D3)


@pytest.mark.parametrize("n", [1, 2])
def test_convolutions_by_columns_are_convolutions(n: int) -> None:
    """Which CUDA takes for small images; in parts of one image, and of all."""
    torch.manual_seed(0)
    x = torch.randn(3, 2, *[5, 6][:n], dtype=torch.float64)
    w = torch.randn(4, 2, *[3, 2][:n], dtype=torch.float64)
    stride, padding = (2, 1)[:n], (1, 2)[:n]
    settings = (stride, padding, (1,) * n, False, (0,) * n, 1)
    expected = (F.conv1d, F.conv2d)[n - 1](x, w, stride=stride, padding=padding)
    for largest in (1, 2**27):
        torch.testing.assert_close(conv_by_columns(x, w, settings, largest), expected)


# --- the tables ----------------------------------------------------------------------------------

# Conversions that lose digits, or do nothing on a CPU in float64: see test_sweep_engine.py.
CONVERSIONS = {"to", "float", "double", "half", "bfloat16", "type", "type_as", "cpu", "cuda"}
# What we write on the tape ourselves, and functions that torch does not list.
INTERNAL = {
    *("read_view", "write_view", "standardize", "centered", "rotated"),
    *("recurrence", "ctc_lattice"),
}
UNLISTED = {
    *("_pack_padded_sequence", "_pad_packed_sequence", "_safe_softmax", "_sparse_mm"),
    *("segment_reduce", "_grouped_mm"),
}
# See test_sweep_engine.py and test_sweep_eager_rotary.py.
ELSEWHERE = {"as_strided_scatter", "_grouped_mm", "rotated"}


def test_every_entry_of_the_tables_is_an_operation_of_torch() -> None:
    listed = [f for functions in get_overridable_functions().values() for f in functions]
    listed += [f for f in vars(torch._C._nn).values() if callable(f)]
    names = {canonical_name(f) for f in listed} | INTERNAL | UNLISTED
    assert {*RULES, *DECOMPOSED, *PREPARE} - names == set()


def test_every_entry_of_the_tables_has_a_case(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[str] = set()
    run_decomposed = Recorder._run_decomposed

    def noting(self: Recorder, name: str, *arguments: object) -> object:
        result = run_decomposed(self, name, *arguments)
        seen.update([name] if result is not NotImplemented else [])
        return result

    monkeypatch.setattr(Recorder, "_run_decomposed", noting)
    for case in CASES.values():
        torch.manual_seed(0)
        seen.update(op.name for op in operations_on_the_tape(Around(case).double(), BATCH))
    assert {*RULES, *DECOMPOSED} - seen - CONVERSIONS - ELSEWHERE == set()


# Functions with an end at zero.
AT_THEIR_ENDS = [
    *(partial(torch.clamp, min=-1, max=0), partial(torch.clamp, min=0, max=1)),
    *(partial(torch.clamp_max, max=0), partial(torch.clamp_min, min=0)),
    *(partial(F.hardtanh, min_val=0, max_val=1), partial(F.hardtanh, min_val=-1, max_val=0)),
    *(partial(F.threshold, threshold=0, value=0), partial(F.hardshrink, lambd=0)),
    *(partial(F.softshrink, lambd=0), lambda y: F.relu6(y + 6)),
    *(lambda y: F.hardswish(y + 3), lambda y: F.hardswish(y - 3)),
]


def takes_our_slopes_of_hardswish() -> bool:
    """Whether this torch takes the slopes outside at the ends, as newer ones do; 2.6 does not."""
    ends = torch.tensor([-3.0, 3.0], requires_grad=True)
    return torch.autograd.grad(F.hardswish(ends).sum(), ends)[0].tolist() == [0.0, 1.0]


@pytest.mark.parametrize(
    "activation",
    [
        *(F.relu, F.relu6, F.leaky_relu, F.hardtanh, F.hardswish, torch.abs, nn.PReLU()),
        *(F.elu, F.selu, F.celu),
        *AT_THEIR_ENDS,
    ],
    ids=lambda f: getattr(f, "__name__", type(f).__name__),
)
def test_derivatives_at_zero_are_those_of_torch(activation: Callable[[Tensor], Tensor]) -> None:
    """Layers that start from zero give nothing else."""
    if activation in AT_THEIR_ENDS[-2:] and not takes_our_slopes_of_hardswish():
        pytest.skip(f"torch {torch.__version__} takes the other slope of hardswish at its ends")
    activation = activation.double() if isinstance(activation, nn.Module) else activation
    model = nn.Linear(2, 3).double()
    nn.init.zeros_(model.weight), nn.init.zeros_(model.bias)
    x = torch.tensor([[1.0, 2.0], [-3.0, 1.0]], dtype=torch.float64)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        y = model(batch)
        return (activation(y) + 0.5 * y * torch.arange(3)).exp().mean()

    gradient = torch.autograd.grad(loss(model, x), list(model.parameters()))
    actual = summarize(model, loss, x, direction="gradient", backend="sweep")
    torch.testing.assert_close(actual.gbar, torch.stack([g.square().sum() for g in gradient]))
    if isinstance(activation, nn.PReLU):
        return  # torch's second derivative takes the other slope at 0 than its first
    expected = summarize(model, loss, x, direction="gradient", backend="nested")
    torch.testing.assert_close(actual.Hbar, expected.Hbar)
    torch.testing.assert_close(actual.D3, expected.D3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_inner_products_of_half_precision_are_added_up_in_single(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    X, Y = torch.randn(3, 10, 1000).to(dtype), torch.randn(2, 10, 1000).to(dtype)
    expected = torch.einsum("inm,jnm->ij", X.double(), Y.double())
    torch.testing.assert_close(gram(X, Y).double(), expected, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(sums(X).double(), X.double().sum((1, 2)), rtol=1e-5, atol=1e-3)
