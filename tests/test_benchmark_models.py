"""The models of benchmarks/engine.py against central differences; those of kinds.py can be trained.

The former at a small size.
"""

import math
import sys
from pathlib import Path

import pytest
import torch

import newton_summary as ns
from newton_summary.experiments import models
from oracle import finite_differences

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
from kinds import KINDS
from losses import classification_loss, next_token_loss


def images(count, channels, size=32):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, channels, size, size, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 10, (count,), generator=generator)


def tokens(count, length, vocabulary):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, vocabulary, (count, length), generator=generator)


BY_ROLE = {"attention": r"\.attn\.", "mlp": r"\.mlp\.", "rest": ...}
CASES = {
    "mlp": (lambda: models.mlp(64), "canonical", images(3, 1, 8)),
    "lenet": (models.lenet, "canonical", images(1, 3)),
    "vgg11": (lambda: models.vgg11(2), "canonical", images(1, 3)),
    "bigmlp": (lambda: models.big_mlp(5, 12), "canonical", images(3, 3)),
    "vbigmlp-chunks": (lambda: models.vbig_mlp(10, 8), "chunks-5", images(3, 3)),
    "vbigmlp": (lambda: models.vbig_mlp(10, 8), "canonical", images(3, 3)),
    "resnet18": (lambda: models.resnet18(2), "blocks-3", images(2, 3)),
    "gpt2-role": (lambda: models.GPT(11, 6, 8, 2, 2), BY_ROLE, tokens(2, 6, 11)),
    "gpt2": (lambda: models.GPT(11, 6, 8, 1, 2), "canonical", tokens(2, 6, 11)),
}
# Models with max-pooling or ReLU: short steps, from a point that no kink is near to.
KINKED = {"lenet": 0, "vgg11": 4, "resnet18": 15}


@pytest.mark.parametrize("name", CASES)
def test_the_sweep_agrees_with_central_differences(name):
    """Hbar to 1e-8, D3 to 1e-5 of the largest entry."""
    build, spec, batch = CASES[name]
    torch.manual_seed(KINKED.get(name, 0))
    model = build().double()
    loss_fn = next_token_loss if name.startswith("gpt") else classification_loss
    part = ns.make_partition(model, spec)
    generator = torch.Generator().manual_seed(2)
    u = {}
    for n, p in part.params.items():  # of the size of the parameters, so that steps are theirs
        scale = max(float(p.detach().square().mean().sqrt()), 0.05)
        scale *= 0.02 if name in KINKED else 1
        u[n] = scale * torch.randn(p.shape, generator=generator, dtype=torch.float64)
    sweep = ns.summarize(model, loss_fn, batch, partition=part, direction=u, backend="sweep")
    expected = finite_differences(model, loss_fn, batch, part, u)
    H_error = float((sweep.Hbar - expected.Hbar).abs().max() / expected.Hbar.abs().max())
    D3_error = float((sweep.D3 - expected.D3).abs().max() / expected.D3.abs().max())
    assert H_error < 1e-8 and D3_error < 1e-5, (H_error, D3_error)


SLOW = [pytest.param("LoRA", marks=pytest.mark.slow)]  # imports transformers


@pytest.mark.parametrize("name", [*(name for name in KINDS if name != "LoRA"), *SLOW])
@pytest.mark.filterwarnings("ignore")  # of nested tensors, in torch
def test_a_training_of_another_kind_has_a_loss_and_gradients(name):
    kind = KINDS[name]
    data = kind.data()
    torch.manual_seed(0)
    model = kind.build()
    batch = next(kind.batches(data))
    assert all(len(part) == kind.batch for part in batch)
    kind.loss_fn(model, batch).backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    assert grads and all(grad is not None and grad.isfinite().all() for grad in grads.values())
    assert any(grad.any() for grad in grads.values())
    assert math.isfinite(kind.evaluate(model, tuple(part[:256] for part in data)))
