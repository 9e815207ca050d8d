"""Activation checkpoints change how a loss is computed, and nothing about its derivatives."""

from __future__ import annotations

import threading
import warnings

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint as checkpoints
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from newton_summary import Summary, make_partition, summarize
from problems import PROBLEMS, finite_differences, worst_error
from sweep_cases import CASES, Around

BATCH = torch.linspace(-1, 1, 4, dtype=torch.float64)


class Checkpointed(Around):
    """An operation of the sweep's table inside of a checkpoint."""

    use_reentrant: bool | None = None

    def apply_to(self, z: Tensor) -> list[Tensor]:
        if self.use_reentrant is None:
            return super().apply_to(z)
        return checkpoint(super().apply_to, z, use_reentrant=self.use_reentrant)


def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch)


def assert_same(actual: Summary, expected: Summary) -> None:
    assert actual.backend == expected.backend
    for name in ("loss", "gbar", "Hbar", "D3"):
        torch.testing.assert_close(
            getattr(actual, name), getattr(expected, name), rtol=1e-12, atol=1e-12
        )


# A share of the table, and what was once wrong. All 1,078 cases were tried once in both kinds.
SOME = sorted({*list(CASES)[::20], *(n for n in CASES if n in ("addcmul", "lerp", "maximum"))})


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("name", SOME)
def test_operation_in_a_checkpoint(name: str, use_reentrant: bool) -> None:
    """Recomputing would save other tensors than operations in elementary form have saved."""
    torch.manual_seed(0)
    model = Checkpointed(CASES[name]).double()
    u = {n: torch.randn_like(p) for n, p in model.named_parameters()}
    expected = summarize(model, loss_fn, BATCH, direction=u, backend="sweep")
    model.use_reentrant = use_reentrant
    assert_same(summarize(model, loss_fn, BATCH, direction=u, backend="sweep"), expected)


class Layers(nn.Module):
    """What is checkpointed in practice: norms, attention, recurrent layers."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.2, batch_first=True)
        self.lstm = nn.LSTM(4, 3, batch_first=True)
        self.head = nn.Linear(3, 2)
        self.use_reentrant: bool | None = None

    def forward(self, x: Tensor) -> Tensor:
        h = self.run(self.encoder, x)
        h = self.run(lambda x: self.lstm(x)[0], h)
        return self.head(h).square().mean()

    def run(self, layer, x: Tensor) -> Tensor:
        if self.use_reentrant is None:
            return layer(x)
        return checkpoint(layer, x, use_reentrant=self.use_reentrant)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("backend", ["sweep", "nested", "differences"])
def test_layers_in_checkpoints(backend: str, use_reentrant: bool) -> None:
    """Along the gradient, where autograd would not see parameters in re-entrant ones."""
    torch.manual_seed(0)
    model = Layers().double()
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    expected = summarize(model, loss_fn, x, backend=backend)
    model.use_reentrant = use_reentrant
    assert_same(summarize(model, loss_fn, x, backend=backend), expected)


def test_checkpoints_against_first_order_differences() -> None:
    """With nothing of ours but the model: the oracle runs the checkpoint as torch does."""
    torch.manual_seed(0)
    model = Layers().double().eval()
    model.use_reentrant = False
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    partition = make_partition(model)
    u = {n: torch.randn_like(p) for n, p in model.named_parameters()}
    expected = finite_differences(model, loss_fn, x, u, partition)
    actual = summarize(model, loss_fn, x, direction=u, partition=partition)
    assert actual.backend == "sweep"
    assert max(worst_error(actual, expected)) < 1e-6


def test_contexts_and_composable_checkpoints() -> None:
    """Selective checkpoints run in contexts of their own; composable ones are hooks on modules."""
    from torch.distributed._composable import checkpoint as composable

    def policy(ctx, operation, *args, **kwargs):
        return checkpoints.CheckpointPolicy.MUST_SAVE

    def contexts():
        return checkpoints.create_selective_checkpoint_contexts(policy)

    problem = PROBLEMS["layer_norm"]()
    expected = summarize(problem.model, problem.loss_fn, problem.batch)

    def selective(model, batch):
        out = checkpoint(model, batch[0], use_reentrant=False, context_fn=contexts)
        return F.cross_entropy(out, batch[1])

    assert_same(summarize(problem.model, selective, problem.batch), expected)
    for module in problem.model:
        composable(module)
    assert_same(summarize(problem.model, problem.loss_fn, problem.batch), expected)


def test_checkpoints_outside_of_a_measurement_run_as_ever() -> None:
    """After a measurement, and in a second thread during one, the layer runs twice."""
    problem = PROBLEMS["mlp_cross_entropy"]()
    calls = []

    def layer(x: Tensor) -> Tensor:
        calls.append(threading.get_ident())
        return torch.tanh(x)

    def train() -> None:
        for use_reentrant in (True, False):
            x = torch.ones(3, requires_grad=True)
            checkpoint(layer, x, use_reentrant=use_reentrant).sum().backward()

    def with_another_thread(model, batch):
        other = threading.Thread(target=train)
        other.start()
        other.join()
        return checkpoint(problem.loss_fn, model, batch, use_reentrant=False)

    summarize(problem.model, with_another_thread, problem.batch, order=1, backend="nested")
    assert len(calls) == 2 * 2 * 2  # two evaluations, two checkpoints, each forward and again
    calls.clear()
    train()
    assert len(calls) == 4


def test_a_graph_made_before_the_measurement_is_recomputed_as_it_was() -> None:
    problem = PROBLEMS["layer_norm"]()
    x, y = problem.batch

    def loss() -> Tensor:
        return F.cross_entropy(checkpoint(problem.model, x, use_reentrant=False), y)

    loss().backward()
    expected = [p.grad.clone() for p in problem.model.parameters()]
    problem.model.zero_grad()
    waiting = loss()
    summarize(problem.model, problem.loss_fn, problem.batch)
    waiting.backward()
    for p, grad in zip(problem.model.parameters(), expected, strict=True):
        assert torch.equal(p.grad, grad)


def test_a_torch_whose_checkpoints_are_unknown_is_an_error(monkeypatch) -> None:
    problem = PROBLEMS["layer_norm"]()
    monkeypatch.delattr(checkpoints, "_checkpoint_hook")

    def checkpointed(model, batch):
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
            return problem.loss_fn(model, batch)

    with pytest.raises(RuntimeError, match=r"Checkpoints .* cannot be measured with torch 2"):
        summarize(problem.model, checkpointed, problem.batch)
    assert summarize(problem.model, problem.loss_fn, problem.batch).backend == "sweep"


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_transformers_with_gradient_checkpointing(kind: str, use_reentrant: bool) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    small = {"num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 17}
    if kind == "gpt2":
        config = transformers.GPT2Config(
            n_embd=8, n_positions=16, n_layer=2, n_head=2, vocab_size=17
        )
        model = transformers.GPT2LMHeadModel(config)
    else:
        config = transformers.LlamaConfig(hidden_size=8, intermediate_size=12, **small)
        model = transformers.LlamaForCausalLM(config)
    model = model.double().train()
    tokens = torch.randint(17, (2, 6))

    def language_loss(model, batch):
        return model(input_ids=batch, labels=batch, use_cache=False).loss

    partition = make_partition(model, "blocks-4")
    u = {n: torch.randn_like(p) for n, p in partition.params.items()}
    for backend in ("sweep", "nested"):
        how = {"partition": partition, "direction": u, "backend": backend}
        torch.manual_seed(1)
        expected = summarize(model, language_loss, tokens, **how)
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        torch.manual_seed(1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            actual = summarize(model, language_loss, tokens, **how)
        model.gradient_checkpointing_disable()
        assert_same(actual, expected)
