"""Recurrent layers, step by step: their fused kernels have no second derivative.

Weights come as torch keeps them: for each layer and direction (w_ih, w_hh, b_ih, b_hh, w_hr), the
biases and the projection w_hr only where there are any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

State = tuple[Tensor, ...]  # (h,), or (h, c) of an LSTM
Cell = Callable[[Tensor, Tensor, State], State]  # gates of the input, gates of h, state -> state


def tanh_cell(x: Tensor, h: Tensor, state: State) -> State:
    """``tanh(x + h)``."""
    return (torch.tanh(x + h),)


def relu_cell(x: Tensor, h: Tensor, state: State) -> State:
    """``max(0, x + h)``."""
    return (torch.relu(x + h),)


def gru_cell(x: Tensor, h: Tensor, state: State) -> State:
    """Reset, update and new gate."""
    x_r, x_z, x_n = x.chunk(3, -1)
    h_r, h_z, h_n = h.chunk(3, -1)
    n = torch.tanh(x_n + torch.sigmoid(x_r + h_r) * h_n)
    return (n + torch.sigmoid(x_z + h_z) * (state[0] - n),)


def lstm_cell(x: Tensor, h: Tensor, state: State) -> State:
    """Input, forget, cell and output gate."""
    i, f, g, o = (x + h).chunk(4, -1)
    c = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


# --- one step: RNNCell, GRUCell, LSTMCell --------------------------------------------------------


def one_step(cell: Cell) -> Callable[..., Any]:
    """Return how to record a cell."""

    def run(
        x: Tensor,
        state: Any,
        w_ih: Tensor,
        w_hh: Tensor,
        b_ih: Tensor | None = None,
        b_hh: Tensor | None = None,
    ) -> Any:
        state = (state,) if isinstance(state, Tensor) else tuple(state)
        new = cell(F.linear(x, w_ih, b_ih), F.linear(state[0], w_hh, b_hh), state)
        return new if len(new) > 1 else new[0]

    return run


# --- whole layers: RNN, GRU, LSTM ----------------------------------------------------------------


def layers(cell: Cell) -> Callable[..., Any]:
    """Return how to record the layers of a recurrent network, of a plain or a packed sequence."""

    def run(*args: Any) -> Any:
        if isinstance(args[3], Sequence):  # packed: (data, batch_sizes, hx, weights, ...)
            data, batch_sizes, start, weights, *settings = args
            sequence = list(data.split_with_sizes(batch_sizes.tolist()))
            outputs, state = stack(cell, sequence, start, weights, *settings)
            return torch.cat(outputs), *state
        x, start, weights, *settings, batch_first = args
        outputs, state = stack(cell, list(x.unbind(int(batch_first))), start, weights, *settings)
        return torch.stack(outputs, int(batch_first)), *state

    return run


def stack(
    cell: Cell,
    sequence: list[Tensor],
    start: Any,
    weights: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
) -> tuple[list[Tensor], State]:
    """Pass a sequence, one tensor (samples, features) a step, through all layers."""
    starts = (start,) if isinstance(start, Tensor) else tuple(start)
    directions = 2 if bidirectional else 1
    per_direction = len(weights) // (num_layers * directions)
    ends: list[State] = []
    for layer in range(num_layers):
        if layer > 0 and dropout > 0 and train:
            dropped = torch.dropout(torch.cat(sequence), dropout, True)
            sequence = list(dropped.split_with_sizes([len(x) for x in sequence]))
        results = []
        for direction in range(directions):
            which = layer * directions + direction
            mine = weights[which * per_direction : (which + 1) * per_direction]
            state = tuple(h[which] for h in starts)
            outputs, end = one_layer(
                cell, sequence[::-1] if direction else sequence, state, mine, has_biases
            )
            results.append(outputs[::-1] if direction else outputs)
            ends.append(end)
        sequence = [torch.cat(parts, -1) for parts in zip(*results, strict=True)]
    return sequence, tuple(torch.stack(parts) for parts in zip(*ends, strict=True))


def one_layer(
    cell: Cell, sequence: list[Tensor], start: State, weights: Sequence[Tensor], has_biases: bool
) -> tuple[list[Tensor], State]:
    """Pass a sequence through one layer in one direction.

    The samples of a packed sequence are sorted by length: going forward the last ones end first,
    going backward they join in last.
    """
    w_ih, w_hh, *rest = weights
    b_ih, b_hh = rest[:2] if has_biases else (None, None)
    w_hr = rest[-1] if len(rest) in (1, 3) else None
    gates = F.linear(torch.cat(sequence), w_ih, b_ih).split_with_sizes([len(x) for x in sequence])
    state = tuple(h[: len(sequence[0])] for h in start)
    outputs: list[Tensor] = []
    ended: list[State] = []
    for x in gates:
        n, before = len(x), len(state[0])
        if n < before:
            ended.append(tuple(h[n:] for h in state))
            state = tuple(h[:n] for h in state)
        elif n > before:
            state = tuple(torch.cat([h, h0[before:n]]) for h, h0 in zip(state, start, strict=True))
        state = cell(x, F.linear(state[0], w_hh, b_hh), state)
        if w_hr is not None:
            state = (F.linear(state[0], w_hr), *state[1:])
        outputs.append(state[0])
    return outputs, tuple(torch.cat(parts) for parts in zip(state, *ended[::-1], strict=True))


CELLS: dict[str, Cell] = {
    "rnn_tanh": tanh_cell,
    "rnn_relu": relu_cell,
    "gru": gru_cell,
    "lstm": lstm_cell,
}


def _entries() -> Iterator[tuple[str, Callable[..., Any]]]:
    for name, cell in CELLS.items():
        yield name, layers(cell)
        yield f"{name}_cell", one_step(cell)


RECURRENT: dict[str, Callable[..., Any]] = dict(_entries())
