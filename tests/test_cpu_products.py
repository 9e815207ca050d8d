"""Products with a matrix on a CPU: both libraries give the same, in every layout."""

from pathlib import Path

import pytest
import torch
from torch import nn

import newton_summary as ns
from newton_summary.derivatives.sweep import chunked_logits
from newton_summary.derivatives.sweep.rules import products
from newton_summary.derivatives.sweep.rules.products import times_transposed, write_product
from newton_summary.experiments.models import GPT

try:
    products.by_onednn()(torch.ones(1, 2), torch.ones(1, 2))
except (AttributeError, RuntimeError):
    pytest.skip("this torch has no oneDNN", allow_module_level=True)


@pytest.fixture
def onednn(monkeypatch):
    """Use oneDNN for products of any size, on any processor; return how often it was called."""
    calls = []
    original = products.by_onednn()

    def multiply(X, W):
        calls.append((X.shape, W.shape))
        return original(X, W)

    monkeypatch.setattr(products, "LARGE_ON_CPU", 1)
    monkeypatch.setattr(products, "FEWEST_TERMS", 1)
    monkeypatch.setattr(products, "mkl_lacks_avx512", lambda: True)
    monkeypatch.setattr(products, "by_onednn", lambda: multiply)
    return calls


def normal(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


WEIGHTS = {  # name -> a weight of shape (17, 40), and whether oneDNN takes it
    "plain": (normal(17, 40), True),
    "transposed": (normal(40, 17).T, True),
    "parameter": (nn.Parameter(normal(17, 40)), True),
    "strided": (normal(17, 80)[:, ::2], False),
    "stack": (normal(3, 17, 40), False),
    "float64": (normal(17, 40).double(), False),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_products_are_those_of_float64(onednn, name):
    W, taken = WEIGHTS[name]
    X = normal(23, 40).to(W.dtype)
    found = times_transposed(X, W)
    torch.testing.assert_close(
        found.double(), X.double() @ W.detach().double().mT, rtol=1e-5, atol=1e-5
    )
    assert bool(onednn) == taken
    assert not found.requires_grad or not taken


def test_rows_that_lie_apart_go_to_the_other_library(onednn):
    """For oneDNN they would take a thousand times as long."""
    X, W = normal(24, 100)[:, :40], normal(17, 40)
    torch.testing.assert_close(times_transposed(X, W), X @ W.T)
    assert not onednn


class Subclass(torch.Tensor):
    """One whose operations may be others."""


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_what_else_goes_to_the_other_library(onednn, monkeypatch):
    X, W = normal(23, 40), normal(17, 40)
    expected = X @ W.T
    others = [W.as_subclass(Subclass), W.to_sparse(), W.to_sparse_csr()]
    for x, w in ((X.as_subclass(Subclass), W), *((X, w) for w in others)):
        torch.testing.assert_close(times_transposed(x, w).as_subclass(torch.Tensor), expected)
    limits = {"LARGE_ON_CPU": 23 * 17 * 40 + 1, "FEWEST_TERMS": 41}
    for name, value in (limits | {"mkl_lacks_avx512": lambda: False}).items():
        with monkeypatch.context() as patch:
            patch.setattr(products, name, value)
            torch.testing.assert_close(times_transposed(X, W), expected)
    with monkeypatch.context() as patch:
        patch.setattr(torch.backends.mkldnn, "enabled", False)
        torch.testing.assert_close(times_transposed(X, W), expected)
    assert not onednn
    times_transposed(X, W)
    assert onednn


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("maker", "capability", "mkl", "expected"),
    [
        ("AuthenticAMD", "AVX512", True, True),
        ("AuthenticAMD", "AVX2", True, False),
        ("AuthenticAMD", "AVX512", False, False),
        ("GenuineIntel", "AVX512", True, False),
    ],
)
def test_which_processors_gain(monkeypatch, maker, capability, mkl, expected, dtype):
    """Whatever the default type is when that is found out, once for the process."""
    monkeypatch.setattr(Path, "read_text", lambda *_: f"vendor_id : {maker}")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: mkl)
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        found = products.mkl_lacks_avx512.__wrapped__()
    finally:
        torch.set_default_dtype(default)
    assert found is expected


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 23])
def test_products_are_written_in_pieces(onednn, monkeypatch, rows, add):
    monkeypatch.setattr(products, "AT_A_TIME", 5 * 17 * 4)  # five rows
    monkeypatch.setattr(products, "FEWEST_ROWS", 1)
    X, W, before = normal(rows, 40), normal(17, 40), normal(rows, 17)
    out = before.clone()
    write_product(out, X, W, add)
    expected = X.double() @ W.double().T + (before.double() if add else 0)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    assert len(onednn) == -(-rows // 5)


@pytest.mark.parametrize("add", [False, True])
def test_few_numbers_of_rows_are_met(onednn, monkeypatch, add):
    """oneDNN keeps code for each of them. What is left and small goes to the other library."""
    monkeypatch.setattr(products, "LARGE_ON_CPU", 10 * 17 * 40)
    for rows in range(100, 600, 7):
        X, W, before = normal(rows, 40), normal(17, 40), normal(rows, 17)
        expected = X.double() @ W.double().T
        torch.testing.assert_close(times_transposed(X, W).double(), expected, rtol=1e-5, atol=1e-5)
        write_product(before, X, W, add)
        expected += normal(rows, 17) if add else 0
        torch.testing.assert_close(before.double(), expected, rtol=1e-5, atol=1e-5)
    assert {shape[0] for shape, _ in onednn} <= {2**n for n in range(4, 10)} | set(range(10, 16))


def test_a_weight_with_many_outputs_is_not_read_for_every_few_rows(onednn):
    X, W = normal(130, 3), normal(20000, 3)
    write_product(torch.empty(130, 20000), X, W, add=False)
    assert [shape[0] for shape, _ in onednn] == [128, 2]


def gpt():
    texts = torch.randint(0, 40, (3, 13), generator=torch.Generator().manual_seed(0))
    return (
        GPT(40, 12, 16, 2, 2),
        texts,
        lambda model, x: nn.functional.cross_entropy(
            model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten()
        ),
    )


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(6, 8, 2, batch_first=True), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])


def recurrent():
    return Recurrent(), normal(5, 7, 6), lambda model, x: model(x).square().mean()


@pytest.mark.parametrize("build", [gpt, recurrent])
def test_a_summary_in_float32_is_that_of_float64(onednn, monkeypatch, build):
    """With oneDNN in all products: against nested differentiation, which has none of them."""
    monkeypatch.setattr(chunked_logits, "FEWEST_ROWS", 1)
    monkeypatch.setitem(chunked_logits.AT_A_TIME, "cpu", 2**10)
    torch.manual_seed(0)
    model, batch, loss_fn = build()
    found = ns.summarize(model, loss_fn, batch, backend="sweep")
    assert onednn
    onednn.clear()
    batch = batch.double() if batch.is_floating_point() else batch
    expected = ns.summarize(model.double(), loss_fn, batch, backend="nested")
    assert not onednn
    for name in ("gbar", "Hbar", "D3"):
        actual, correct = getattr(found, name).double(), getattr(expected, name)
        torch.testing.assert_close(
            actual, correct, rtol=2e-4, atol=2e-5 * float(correct.abs().max())
        )
