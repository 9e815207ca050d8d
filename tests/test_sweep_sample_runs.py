"""Attentions passed for some samples at a time: the same numbers, in less memory."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import newton_summary as ns
from newton_summary.derivatives.sweep import engine, token_runs
from newton_summary.derivatives.sweep.sample_runs import Samples
from newton_summary.derivatives.sweep.token_runs import TokenRun
from newton_summary.experiments import models

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
from losses import next_token_loss
from peak_memory import peak_bytes

Heads = Callable[["Attends", Tensor], Tensor]
B, T, C = 4, 3, 8


class Attends(nn.Module):
    """Two blocks with an attention that is written in one way or another."""

    def __init__(self, attend: Heads, frozen: bool = False):
        super().__init__()
        self.attend = attend
        self.qkv, self.proj = nn.Linear(C, 3 * C), nn.Linear(C, C)
        self.norm, self.gain = nn.LayerNorm(C), nn.Parameter(torch.rand(C) + 0.5)
        self.table = nn.Parameter(torch.randn(B, T, C))  # which has samples too, and is no value
        self.mix = nn.Linear(B, B)
        self.register_buffer("mask", torch.randn(B, 1, T, T))
        self.register_buffer("same_mask", torch.randn(T, T))
        if frozen:
            self.qkv.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x, self.rows = x * self.gain, self.table.view(-1, C).sin()
        self.made, self.kept = self.table[:, 0].sin(), None
        for _ in range(2):
            x = x + self.proj(self.attend(self, self.norm(x))).tanh()
            x = x + F.gelu(self.norm(x))
        return x


def split_heads(x: Tensor) -> Tensor:
    return x.view(B, T, 2, C // 2).transpose(1, 2)


def merged(x: Tensor) -> Tensor:
    return x.transpose(1, 2).reshape(B, T, -1)


def by_permute(self: Attends, x: Tensor) -> Tensor:
    q, k, v = self.qkv(x).view(B, T, 3, 2, C // 2).permute(2, 0, 3, 1, 4)
    return merged(F.scaled_dot_product_attention(q, k, v, is_causal=True))


def by_chunks_and_mask(self: Attends, x: Tensor) -> Tensor:
    q, k, v = (split_heads(y) for y in self.qkv(x).chunk(3, -1))
    return merged(F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask))


def by_split_and_same_mask(self: Attends, x: Tensor) -> Tensor:
    q, k, v = (split_heads(y) for y in torch.split(self.qkv(x), C, dim=2))
    return merged(F.scaled_dot_product_attention(q, k, v, attn_mask=self.same_mask))


def grouped_queries(self: Attends, x: Tensor) -> Tensor:
    y = self.qkv(x)
    q = y[..., :C].unflatten(-1, (4, 2)).transpose(1, 2)
    k, v = (y[:, :, C + i : C + i + 4].unflatten(-1, (2, 2)).transpose(1, 2) for i in (0, 4))
    return merged(F.scaled_dot_product_attention(q, k, v, enable_gqa=True))


def by_rows(self: Attends, x: Tensor) -> Tensor:
    """Tokens of all samples in one dimension, as GPT-2 of Transformers has its layers."""
    y = torch.addmm(self.qkv.bias, x.view(-1, C), self.qkv.weight.t()).view(B, T, 3 * C)
    q, k, v = (split_heads(y) for y in y.split(C, dim=2))
    return merged(F.scaled_dot_product_attention(q, k, v)).reshape(-1, C).reshape(B, T, C)


def rotated(self: Attends, x: Tensor) -> Tensor:
    """Rotary embeddings, keys and values joined to an empty cache, and heads that are repeated."""
    y = self.qkv(x)
    q, k, v, _ = y.split((C, C // 2, C // 2, C), dim=-1)
    q = q.view(B, T, 4, 2).transpose(1, 2)
    k, v = (z.view(B, T, 2, 2).transpose(1, 2) for z in (k, v))
    q = q + torch.cat((-q[..., 1:], q[..., :1]), dim=-1) * self.gain[:2]
    k, v = (torch.cat([x.new_empty(0), z], dim=-2) for z in (k, v))
    k, v = (z[:, :, None].expand(B, 2, 2, T, 2).reshape(B, 4, T, 2) for z in (k, v))
    return merged(F.scaled_dot_product_attention(q, k, v, is_causal=True))


def joined_samples(self: Attends, x: Tensor) -> Tensor:
    """Twice as many samples go in as come out: a join along the samples."""
    q, k, v = (split_heads(y) for y in self.qkv(torch.cat([x, x.flip(1)], dim=0)[:B]).chunk(3, -1))
    return merged(F.scaled_dot_product_attention(q, k, v))


def of_heads_in_rows(self: Attends, x: Tensor) -> Tensor:
    """Samples and heads are one dimension: nothing can be told apart."""
    q, k, v = (split_heads(y).reshape(2 * B, T, C // 2) for y in self.qkv(x).chunk(3, -1))
    return merged(F.scaled_dot_product_attention(q, k, v).view(B, 2, T, C // 2))


def with_a_table(self: Attends, x: Tensor) -> Tensor:
    """A parameter is added that has as many rows as there are samples."""
    return by_permute(self, x + self.table)


def reshaped_like_a_value(self: Attends, x: Tensor) -> Tensor:
    """What a parameter is made to becomes a value for all samples only inside of the run."""
    y = by_permute(self, x)
    return y * self.rows.reshape_as(y)


def split_into_one(self: Attends, x: Tensor) -> Tensor:
    """A split along the samples, whose only piece has as many as the sizes say."""
    (q, k, v) = (split_heads(y) for y in self.qkv(x).chunk(3, -1))
    (q,) = q.split([B], dim=0)
    return merged(F.scaled_dot_product_attention(q, k, v))


def tokens_first(self: Attends, x: Tensor) -> Tensor:
    """Samples come second, then with the heads in one dimension, as MultiheadAttention has them."""
    y = self.qkv(x.transpose(0, 1)).tanh()
    heads = (z.reshape(T, 2 * B, C // 2).transpose(0, 1) for z in y.chunk(3, -1))
    q, k, v = (z.view(B, 2, T, C // 2) for z in heads)
    return merged(F.scaled_dot_product_attention(q, k, v))


def normalized_over_samples(self: Attends, x: Tensor) -> Tensor:
    q, k, v = (split_heads(y) for y in self.qkv(x).chunk(3, -1))
    q = F.batch_norm(q, None, None, training=True)
    return merged(F.scaled_dot_product_attention(q, k, v))


def mixed_by_a_layer(self: Attends, x: Tensor) -> Tensor:
    """A layer whose features are the samples."""
    q, k, v = (split_heads(y) for y in self.qkv(x).chunk(3, -1))
    q = self.mix(q.transpose(0, 3)).transpose(0, 3)
    return merged(F.scaled_dot_product_attention(q, k, v))


def joined_to_a_constant(self: Attends, x: Tensor) -> Tensor:
    """Keys and values of earlier tokens, which do not depend on the parameters."""
    q, k, v = (split_heads(y) for y in self.qkv(x).chunk(3, -1))
    k, v = (torch.cat([self.mask[..., :1].expand(B, 2, T, C // 2), z], dim=2) for z in (k, v))
    return merged(F.scaled_dot_product_attention(q, k, v))


def rows_in_another_order(self: Attends, x: Tensor) -> Tensor:
    """An index of several numbers, then features in the place of samples, which are as many."""
    q, k, v = (split_heads(y)[[1, 2, 3, 0]].transpose(0, 3) for y in self.qkv(x).chunk(3, -1))
    return merged(F.scaled_dot_product_attention(q, k, v).transpose(0, 3))


def weight_with_as_many_rows(self: Attends, x: Tensor) -> Tensor:
    """A layer with as many outputs as there are samples, its weight made before the run."""
    y = by_permute(self, x)
    return y * F.linear(y, self.made)[..., :1]


def values_of_the_block_before(self: Attends, x: Tensor) -> Tensor:
    """One of several results of an operation inside of a run is needed long behind it."""
    y = self.qkv(x).view(1, B, T, 3 * C).squeeze(0)
    q, k, v = y.view(B, T, 3, 2, C // 2).permute(2, 0, 3, 1, 4)
    k, self.kept = k + (self.kept if self.kept is not None else 1), v
    return merged(F.scaled_dot_product_attention(q, k, v))


def across_samples(self: Attends, x: Tensor) -> Tensor:
    """The samples meet: keys are those of the next sample."""
    q, k, v = (split_heads(y) for y in self.qkv(x).chunk(3, -1))
    return merged(F.scaled_dot_product_attention(q, k[[1, 2, 3, 0]], v))


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).sin().mean()


def measured_in_pieces(
    monkeypatch: pytest.MonkeyPatch, measure: Callable[[], ns.Summary], samples: int
) -> tuple[ns.Summary, list[TokenRun]]:
    """Measure with so many samples at a time, and return also what was passed so."""
    runs: list[TokenRun] = []

    def noting(sweep: engine.Sweep, run: TokenRun) -> None:
        runs.append(run)
        token_runs.pass_tokens(sweep, run)

    with monkeypatch.context() as patched:
        patched.setattr(engine, "SMALL", 1)
        patched.setattr(engine, "pass_tokens", noting)
        patched.setattr(token_runs, "AT_A_TIME", {"cpu": 1})
        patched.setattr(Samples, "fewest", samples)
        summary = measure()
    return summary, [run for run in runs if isinstance(run.axis, Samples)]


WAYS = [
    (by_permute, 2),
    (by_chunks_and_mask, 2),
    (by_split_and_same_mask, 2),
    (grouped_queries, 2),
    (by_rows, 2),
    (rotated, 2),
    (joined_samples, 2),
    (of_heads_in_rows, 0),
    (with_a_table, 2),
    (reshaped_like_a_value, 2),
    (split_into_one, 2),
    (tokens_first, 2),
    (normalized_over_samples, None),
    (mixed_by_a_layer, None),
    (joined_to_a_constant, None),
    (rows_in_another_order, None),
    (weight_with_as_many_rows, None),
    (values_of_the_block_before, 2),
    (across_samples, None),
]


@pytest.mark.parametrize(("attend", "expected_runs"), WAYS, ids=[way.__name__ for way, _ in WAYS])
@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("frozen", [False, True])
def test_some_samples_at_a_time_change_nothing(
    attend, expected_runs, samples, frozen, monkeypatch
) -> None:
    torch.manual_seed(0)
    model = Attends(attend, frozen).double()
    x = torch.randn(B, T, C).double()
    u = {n: torch.randn_like(p) for n, p in model.named_parameters() if p.requires_grad}

    def measure(backend: Any = "sweep") -> ns.Summary:
        return ns.summarize(model, loss, x, direction=u, backend=backend)

    expected = measure("nested")
    actual, runs = measured_in_pieces(monkeypatch, measure, samples)
    if expected_runs is not None:
        assert len(runs) == expected_runs
    for name in ("gbar", "Hbar", "D3"):
        a, e = getattr(actual, name), getattr(expected, name)
        torch.testing.assert_close(a, e, rtol=1e-9, atol=1e-11 * float(e.abs().max()))


def test_a_run_goes_from_one_sum_of_the_residual_stream_to_the_next(monkeypatch) -> None:
    torch.manual_seed(0)
    model, tokens = models.GPT(11, 8, 8, 3, 2), torch.randint(0, 11, (3, 9))
    measure = lambda: ns.summarize(model, next_token_loss, tokens, backend="sweep")  # noqa: E731
    _, runs = measured_in_pieces(monkeypatch, measure, 1)
    assert len(runs) == 3
    assert all(run.tokens == 3 and len(run.ops) == 12 for run in runs)  # from norm to sum
    for run in runs:  # nothing but the sum goes on
        ops = set(run.ops)
        assert ops == set(range(min(ops), max(ops) + 1))


def test_queries_keys_and_values_are_never_held_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, tokens = models.GPT(11, 64, 32, 2, 2), torch.randint(0, 11, (16, 65))

    def peak() -> int:
        return peak_bytes(lambda: ns.summarize(model, next_token_loss, tokens, backend="sweep"))

    monkeypatch.setattr(token_runs, "AT_A_TIME", {"cpu": 2**20})
    pieces = peak()
    monkeypatch.setattr(engine, "find_sample_runs", lambda *args: [])
    assert pieces < 0.7 * peak()
