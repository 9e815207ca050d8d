"""A Llama of transformers' own class with random weights, and adapters of low rank on it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# 1.1 billion parameters.
LARGE = {
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
}


def llama(config: dict[str, int], dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """Return a model on the GPU if there is one: drawing its weights on a CPU takes a minute."""
    from transformers import LlamaConfig, LlamaForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**config, attn_implementation="sdpa"))
    return model.to(dtype)


def by_role(blocks: int) -> dict[str, object]:
    """Group attention, perceptron and norms of each block, and all that is not in a block."""
    roles = (("attention", "self_attn"), ("mlp", "mlp"), ("norms", ".*norm"))
    groups = {
        f"block{i}.{role}": rf"^model\.layers\.{i}\.{pattern}"
        for i in range(blocks)
        for role, pattern in roles
    }
    return {**groups, "rest": ...}


class Adapted(nn.Module):
    """A frozen linear layer with a trained addition of low rank."""

    def __init__(self, layer: nn.Linear, rank: int):
        super().__init__()
        self.layer = layer
        like = {"dtype": layer.weight.dtype, "device": layer.weight.device}
        self.A = nn.Parameter(torch.randn(rank, layer.in_features, **like) / layer.in_features**0.5)
        self.B = nn.Parameter(0.01 * torch.randn(layer.out_features, rank, **like))

    def forward(self, x: Tensor) -> Tensor:
        """Add the adapter's part."""
        return self.layer(x) + F.linear(F.linear(x, self.A), self.B)


def with_adapters(model: nn.Module, rank: int = 8) -> nn.Module:
    """Freeze a model, and put adapters on the queries and values of every block."""
    model.requires_grad_(False)
    for block in model.model.layers:
        for name in ("q_proj", "v_proj"):
            setattr(block.self_attn, name, Adapted(getattr(block.self_attn, name), rank))
    return model


def causal_lm_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the mean loss of predicting every token from those before it, in float32."""
    logits = model(input_ids=tokens[:, :-1], use_cache=False).logits.float()
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
