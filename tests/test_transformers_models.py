"""The sweep on small models of Transformers, against differences of torch's own gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from newton_summary import make_partition, summarize
from newton_summary.measuring.exact_loss import ExactLoss
from oracle import finite_differences

transformers = pytest.importorskip("transformers")

WORDS, LENGTH = 30, 6
DECODER = {
    "vocab_size": WORDS,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 16,
}
GROUPED = {**DECODER, "num_key_value_heads": 1}  # two heads of queries share one of keys
ENCODER = {**DECODER, "type_vocab_size": 2}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
SEQUENCES = {
    "vocab_size": WORDS,
    "d_model": 8,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 12,
    "decoder_ffn_dim": 12,
    **TOKENS,
}
EXPERTS = {**GROUPED, "num_local_experts": 3, "num_experts_per_tok": 2}
IMAGES = {"image_size": 8, "patch_size": 4, "num_channels": 1}
TOWER = {
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}

# Name of the class, and its configuration. Activations are smooth: kinks leave differences behind.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHead", {"vocab_size": WORDS, "n_embd": 8, "n_layer": 2, "n_head": 2}),
    "llama": ("LlamaForCausalLM", GROUPED),
    "llama, eager": ("LlamaForCausalLM", {**GROUPED, "attn_implementation": "eager"}),
    "mistral": ("MistralForCausalLM", GROUPED),
    "qwen2": ("Qwen2ForCausalLM", GROUPED),
    "gemma": ("GemmaForCausalLM", {**GROUPED, "head_dim": 4}),
    "phi": ("PhiForCausalLM", DECODER),
    "opt": (
        "OPTForCausalLM",
        {**DECODER, "ffn_dim": 12, "word_embed_proj_dim": 8, "activation_function": "gelu"},
    ),
    "gpt_neox": ("GPTNeoXForCausalLM", DECODER),
    "mixtral": ("MixtralForCausalLM", EXPERTS),
    "mixtral, eager experts": ("MixtralForCausalLM", EXPERTS),
    "mamba": ("MambaForCausalLM", {**DECODER, "state_size": 4, "time_step_rank": 2}),
    "bert": ("BertForMaskedLM", ENCODER),
    "roberta": ("RobertaForMaskedLM", ENCODER),
    "electra": ("ElectraForMaskedLM", {**ENCODER, "embedding_size": 6}),
    "albert": ("AlbertForMaskedLM", {**ENCODER, "embedding_size": 6}),
    "deberta-v2": (
        "DebertaV2ForMaskedLM",
        {**ENCODER, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    ),
    "distilbert": (
        "DistilBertForMaskedLM",
        {"vocab_size": WORDS, "dim": 8, "n_layers": 2, "n_heads": 2, "hidden_dim": 12},
    ),
    "t5": (
        "T5ForConditionalGeneration",
        {
            **{"vocab_size": WORDS, "d_model": 8, "d_kv": 4, "d_ff": 12, "num_layers": 1},
            **{"num_heads": 2, "feed_forward_proj": "gated-gelu", **TOKENS},
        },
    ),
    "bart": ("BartForConditionalGeneration", SEQUENCES),
    "whisper": (
        "WhisperForConditionalGeneration",
        {**SEQUENCES, "num_mel_bins": 4, "max_source_positions": 5},
    ),
    "vit": ("ViTForImageClassification", {**TOWER, **IMAGES, "num_labels": 3}),
    "clip": (
        "CLIPModel",
        {
            "text_config": {**TOWER, "vocab_size": WORDS, "max_position_embeddings": 16},
            "vision_config": {**TOWER, **IMAGES},
            "projection_dim": 4,
        },
    ),
}


def build(name: str) -> nn.Module:
    kind, settings = MODELS[name]
    base = kind.partition("For")[0].removesuffix("LMHead").removesuffix("Model")
    config = getattr(transformers, f"{base}Config")(**settings)
    if name.endswith("eager experts"):
        config._experts_implementation = "eager"
    torch.manual_seed(0)
    cls = getattr(transformers, "GPT2LMHeadModel" if kind == "GPT2LMHead" else kind)
    model: nn.Module = cls(config).double().eval()
    with torch.no_grad():
        for p in model.parameters():  # biases start from zero, and the rest is small
            p.add_(0.2 * torch.randn_like(p))
    return model


def batch(name: str) -> dict[str, Tensor]:
    torch.manual_seed(1)
    words = torch.randint(3, WORDS - 2, (2, LENGTH))
    if name == "vit":
        return {"pixel_values": torch.randn(2, 1, 8, 8).double(), "labels": torch.tensor([0, 2])}
    if name == "clip":
        return {"pixel_values": torch.randn(2, 1, 8, 8).double(), "input_ids": words}
    if name == "whisper":
        return {"input_features": torch.randn(2, 4, 10).double(), "labels": words}
    mask = torch.ones_like(words)
    if name.endswith("eager"):
        mask[0, -2:] = 0  # a query that sees no key has a gradient that is not of its loss
    else:
        mask[0, :2] = 0  # padding on the left: the first queries see no key
    labels = words.masked_fill(mask == 0, -100)
    return {"input_ids": words, "attention_mask": mask, "labels": labels}


def loss_fn(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    options = {"return_loss": True} if "labels" not in inputs else {}
    loss: Tensor = model(**inputs, **options).loss
    return loss


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_model(name: str) -> None:
    if name == "mixtral" and not hasattr(torch, "_grouped_mm"):
        pytest.skip("Transformers then has a custom operator, which the sweep refuses")
    model, inputs = build(name), batch(name)
    names = list(make_partition(model, "canonical").params)
    half = names[: len(names) // 2]
    partition = make_partition(model, {"first": half, "rest": ...})
    torch.manual_seed(2)
    u = {n: torch.randn_like(p) for n, p in partition.params.items()}
    for module in model.modules():  # differences would move the row of padding; autograd does not
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            table = next(n for n, p in partition.params.items() if p is module.weight)
            u[table][module.padding_idx] = 0
    sizes = partition.inner(u, u).sqrt()
    u = {n: U / sizes[partition.labels[n]] for n, U in u.items()}
    exact = ExactLoss(loss_fn)
    actual = summarize(
        model, exact, inputs, partition=partition, direction=u, backend="sweep", microbatch=None
    )
    expected = finite_differences(model, exact, inputs, partition, u)
    for found, wanted, tolerance in (
        (actual.gbar, expected.gbar, 1e-9),
        (actual.Hbar, expected.Hbar, 1e-6),
        (actual.D3, expected.D3, 1e-4),
    ):
        assert float((found - wanted).abs().max() / wanted.abs().max()) < tolerance
