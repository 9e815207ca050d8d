"""Dropout, norms, attention, parametrisations, recurrent layers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from sweep_cases.table import (
    OnCopy,
    case,
    layer,
    numbers,
)

# --- dropout --------------------------------------------------------------------------------------

for name, shape in {
    "Dropout": (4, 5),
    "Dropout1d": (2, 3, 2),
    "Dropout2d": (2, 3, 2, 2),
    "Dropout3d": (1, 4, 2, 1, 2),
    "AlphaDropout": (4, 5),
    "FeatureAlphaDropout": (2, 4, 2),
}.items():
    operation = name.replace("Feature", "feature_").replace("AlphaDropout", "alpha_dropout")
    generic = operation if "Alpha" in name else ""
    layer(name, lambda k=name: getattr(nn, k)(0.4), shape, generic=generic)
    layer(
        f"{name} in place",
        lambda k=name: OnCopy(getattr(nn, k)(0.4, inplace=True)),
        shape,
        generic=generic,
    )
    layer(f"{name} in evaluation", lambda k=name: getattr(nn, k)(0.4).eval(), shape)

# --- norms ----------------------------------------------------------------------------------------

layer("LayerNorm", lambda: nn.LayerNorm(4), (3, 4))
layer("LayerNorm of two dimensions", lambda: nn.LayerNorm((2, 3)), (2, 2, 3))
layer("LayerNorm without weights", lambda: nn.LayerNorm(4, elementwise_affine=False), (3, 4))
layer("LayerNorm without bias", lambda: nn.LayerNorm(4, bias=False), (2, 2, 4))
case(
    "native_layer_norm",
    lambda x, w: torch.native_layer_norm(x, [4], w, None, 1e-5)[0],
    (3, 4),
    (4,),
)
case("aten.layer_norm", lambda x, w: torch.ops.aten.layer_norm(x, [4], w), (3, 4), (4,))
case("aten.layer_norm.default", lambda x: torch.ops.aten.layer_norm.default(x, [4]), (3, 4))
layer("RMSNorm", lambda: nn.RMSNorm(4), (3, 4))
layer("RMSNorm with eps", lambda: nn.RMSNorm((2, 3), eps=1e-3, elementwise_affine=False), (2, 2, 3))
layer("GroupNorm", lambda: nn.GroupNorm(2, 4), (2, 4, 3))
layer("GroupNorm without weights", lambda: nn.GroupNorm(2, 4, affine=False), (2, 4, 3))
for n in (1, 2, 3):
    sizes = (3, 2, 2)[:n]
    layer(f"BatchNorm{n}d", lambda n=n: getattr(nn, f"BatchNorm{n}d")(2), (3, 2, *sizes))
    layer(
        f"BatchNorm{n}d in evaluation",
        lambda n=n: getattr(nn, f"BatchNorm{n}d")(2).eval(),
        (2, 2, *sizes),
    )
    layer(
        f"InstanceNorm{n}d",
        lambda n=n: getattr(nn, f"InstanceNorm{n}d")(2, affine=True),
        (2, 2, *sizes),
    )
    layer(
        f"InstanceNorm{n}d without a batch",
        lambda n=n: getattr(nn, f"InstanceNorm{n}d")(2),
        (2, *sizes),
    )
layer("BatchNorm1d of vectors", lambda: nn.BatchNorm1d(3), (4, 3))
layer(
    "BatchNorm1d without statistics",
    lambda: nn.BatchNorm1d(3, track_running_stats=False, affine=False),
    (4, 3),
)
layer("BatchNorm1d without momentum", lambda: nn.BatchNorm1d(3, momentum=None), (4, 3))
layer(
    "InstanceNorm1d with statistics",
    lambda: nn.InstanceNorm1d(2, track_running_stats=True).eval(),
    (2, 2, 3),
)
layer("LocalResponseNorm", lambda: nn.LocalResponseNorm(2, alpha=0.5), (2, 4, 3))
layer("LocalResponseNorm of images", lambda: nn.LocalResponseNorm(3), (1, 4, 2, 2))

# --- attention ------------------------------------------------------------------------------------

Q, K = (2, 3, 2), (2, 4, 2)
attend = F.scaled_dot_product_attention
mask = numbers(3, 4) > -0.5
mask[:, 0] = True
case("attention", attend, Q, K, K)
case("attention with heads", attend, (1, 2, 2, 2), (1, 2, 3, 2), (1, 2, 3, 3))
case("attention with a mask", lambda q, k, v: attend(q, k, v, attn_mask=mask), Q, K, K)
case("attention with a bias", lambda q, k, v: attend(q, k, v, numbers(3, 4)), Q, K, K)
case("attention with a learned bias", lambda q, k, v, m: attend(q, k, v, m), Q, K, K, (3, 4))
case("attention, causal", lambda q, k, v: attend(q, k, v, is_causal=True), Q, Q, Q)
case("attention with a scale", lambda q, k, v: attend(q, k, v, scale=2.0), Q, K, K)
case(
    "attention, grouped",
    lambda q, k, v: attend(q, k, v, enable_gqa=True),
    (1, 4, 2, 2),
    (1, 2, 3, 2),
    (1, 2, 3, 2),
)
case("attention by names", lambda q, k, v: attend(value=v, key=k, query=q), Q, K, K)
case("attention with itself", lambda x: attend(x, x, x), Q)


class SelfAttention(nn.Module):
    """``nn.MultiheadAttention`` of a sequence with itself, or of one with another."""

    def __init__(self, call: dict[str, Any] | None = None, **options: Any):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, **options)
        self.call = call or {}

    def forward(self, query: Tensor, key: Tensor | None = None, value: Tensor | None = None) -> Any:
        key = query if key is None else key
        result, weights = self.attention(query, key, key if value is None else value, **self.call)
        return result if weights is None else (result, weights)


causal = torch.ones(3, 3, dtype=torch.bool).triu(1)
padded = torch.tensor([[False, False, True], [False, False, False]])
layer("MultiheadAttention", lambda: SelfAttention(batch_first=True), (2, 3, 4))
layer("MultiheadAttention, sequence first", lambda: SelfAttention(), (3, 2, 4))
layer("MultiheadAttention without a batch", lambda: SelfAttention(), (3, 4))
layer(
    "MultiheadAttention without weights",
    lambda: SelfAttention({"need_weights": False}, batch_first=True),
    (2, 3, 4),
)
layer(
    "MultiheadAttention, all weights",
    lambda: SelfAttention({"average_attn_weights": False}),
    (3, 2, 4),
)
layer("MultiheadAttention without bias", lambda: SelfAttention(bias=False), (3, 1, 4))
layer(
    "MultiheadAttention, causal",
    lambda: SelfAttention({"attn_mask": causal, "is_causal": True, "need_weights": False}),
    (3, 2, 4),
)
layer(
    "MultiheadAttention with masks",
    lambda: SelfAttention({"attn_mask": causal, "key_padding_mask": padded}),
    (3, 2, 4),
)
layer(
    "MultiheadAttention with a bias", lambda: SelfAttention({"attn_mask": numbers(3, 3)}), (3, 2, 4)
)
layer("MultiheadAttention, bias_kv", lambda: SelfAttention(add_bias_kv=True), (3, 1, 4))
layer("MultiheadAttention, add_zero_attn", lambda: SelfAttention(add_zero_attn=True), (3, 1, 4))
layer(
    "MultiheadAttention of others",
    lambda: SelfAttention(kdim=3, vdim=2),
    (2, 1, 4),
    (3, 1, 3),
    (3, 1, 2),
)
layer("MultiheadAttention of another", lambda: SelfAttention(), (2, 1, 4), (3, 1, 4))
layer("MultiheadAttention with dropout", lambda: SelfAttention(dropout=0.4), (3, 2, 4))
layer("MultiheadAttention in evaluation", lambda: SelfAttention(batch_first=True).eval(), (2, 3, 4))
for norm_first in (False, True):
    for activation in ("relu", "gelu"):
        layer(
            f"TransformerEncoderLayer {activation}, norm_first={norm_first}",
            lambda f=norm_first, a=activation: nn.TransformerEncoderLayer(
                4, 2, 5, dropout=0.2, activation=a, batch_first=True, norm_first=f
            ),
            (1, 3, 4),
        )
layer(
    "TransformerEncoderLayer in evaluation",
    lambda: nn.TransformerEncoderLayer(4, 2, 3).eval(),
    (3, 1, 4),
)
layer(
    "TransformerDecoderLayer",
    lambda: nn.TransformerDecoderLayer(4, 2, 3, dropout=0),
    (2, 1, 4),
    (3, 1, 4),
)
layer(
    "TransformerEncoder",
    lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(4, 2, 2, batch_first=True), 2, nn.LayerNorm(4)
    ),
    (1, 2, 4),
)

# --- parametrisations, recurrent layers -----------------------------------------------------------

layer("weight_norm", lambda: parametrizations.weight_norm(nn.Linear(3, 2)), (2, 3))
layer(
    "weight_norm of another dimension",
    lambda: parametrizations.weight_norm(nn.Conv1d(2, 2, 2), dim=1),
    (1, 2, 3),
)
layer(
    "weight_norm of the whole",
    lambda: parametrizations.weight_norm(nn.Linear(3, 2), dim=None),
    (2, 3),
)
layer("old weight_norm", lambda: torch.nn.utils.weight_norm(nn.Linear(3, 2)), (2, 3))
layer(
    "spectral_norm of a convolution",
    lambda: parametrizations.spectral_norm(nn.Conv2d(2, 2, 2)).eval(),
    (1, 2, 3, 2),
)
layer(
    "spectral_norm in evaluation",
    lambda: parametrizations.spectral_norm(nn.Linear(3, 2)).eval(),
    (2, 3),
)
layer("old spectral_norm", lambda: torch.nn.utils.spectral_norm(nn.Linear(3, 2)).eval(), (2, 3))
layer(
    "orthogonal, cayley",
    lambda: parametrizations.orthogonal(nn.Linear(3, 3).double(), orthogonal_map="cayley"),
    (2, 3),
)
layer(
    "orthogonal, matrix_exp",
    lambda: parametrizations.orthogonal(nn.Linear(3, 3).double(), orthogonal_map="matrix_exp"),
    (2, 3),
    generic="matrix_exp",
)
layer(
    "orthogonal, householder",
    lambda: parametrizations.orthogonal(nn.Linear(3, 3).double(), orthogonal_map="householder"),
    (2, 3),
    generic="linalg_householder_product",
)
layer("RNNCell", lambda: nn.RNNCell(3, 2), (2, 3), (2, 2))
layer("RNNCell relu", lambda: nn.RNNCell(3, 4, nonlinearity="relu"), (2, 3), (2, 4))
layer("GRUCell", lambda: nn.GRUCell(3, 2), (2, 3), (2, 2))
layer("LSTMCell", lambda: _States(nn.LSTMCell(3, 2)), (2, 3), (2, 2), (2, 2))


class Recurrent(nn.Module):
    """A recurrent layer, from zero, or from a state that depends on the parameters."""

    def __init__(self, kind: str, lengths: list[int] | None = None, **options: Any):
        super().__init__()
        self.layer = getattr(nn, kind)(2, 2, **options)
        self.lengths = lengths

    def forward(self, x: Tensor, *state: Tensor) -> Any:
        if self.lengths is not None:
            x = nn.utils.rnn.pack_padded_sequence(x, self.lengths, enforce_sorted=False)
        start = state if len(state) > 1 else state[0] if state else None
        output, end = self.layer(x, start)
        if self.lengths is not None:
            output = nn.utils.rnn.pad_packed_sequence(output)[0]
        return (output, *end) if isinstance(end, tuple) else (output, end)


for kind in ("RNN", "GRU", "LSTM"):
    states = ((1, 2, 2),) * (2 if kind == "LSTM" else 1)
    layer(kind, lambda k=kind: Recurrent(k), (3, 2, 2))
    layer(f"{kind} from a state", lambda k=kind: Recurrent(k, batch_first=True), (2, 3, 2), *states)
    layer(f"{kind} without bias", lambda k=kind: Recurrent(k, bias=False), (3, 1, 2))
    layer(f"{kind} without a batch", lambda k=kind: Recurrent(k), (3, 2))
    layer(
        f"{kind} of two layers, both ways",
        lambda k=kind: Recurrent(k, num_layers=2, bidirectional=True, dropout=0.3),
        (2, 2, 2),
    )
    layer(
        f"{kind} of packed sequences",
        lambda k=kind: Recurrent(k, [1, 3, 2], bidirectional=True),
        (3, 3, 2),
    )
    layer(
        f"{kind} with a norm on its weights, written to",
        lambda k=kind: _Written(parametrizations.weight_norm(getattr(nn, k)(2, 2), "weight_hh_l0")),
        (3, 2, 2),
    )


class _Written(nn.Module):
    """A recurrent layer of which only the last state is used, once its outputs are written to."""

    def __init__(self, layers: nn.Module):
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        outputs, state = self.layers(x)
        outputs.zero_()
        return state[1] if isinstance(state, tuple) else state


layer("RNN relu", lambda: Recurrent("RNN", nonlinearity="relu"), (3, 2, 2))
layer("LSTM with a projection", lambda: Recurrent("LSTM", proj_size=1), (3, 2, 2))


class _States(nn.Module):
    def __init__(self, cell: nn.Module):
        super().__init__()
        self.cell = cell

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> Any:
        return self.cell(x, (h, c))
