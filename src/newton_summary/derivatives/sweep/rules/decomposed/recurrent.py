"""Recurrent layers, step by step: their fused kernels have no second derivative.

Weights come as torch keeps them: for each layer and direction (w_ih, w_hh, b_ih, b_hh, w_hr), the
biases and the projection w_hr only where there are any.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from newton_summary.derivatives.norms import Maybe
from newton_summary.derivatives.sweep.rules.recurrence import recurrence

State = tuple[Tensor, ...]  # (h,), or (h, c) of an LSTM
Cell = Callable[[Tensor, Tensor, State], State]  # gates of the input, gates of h, state -> state


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
        x: Tensor, state: Any, w_ih: Tensor, w_hh: Tensor, b_ih: Maybe = None, b_hh: Maybe = None
    ) -> Any:
        state = (state,) if isinstance(state, Tensor) else tuple(state)
        weights = [w for w in (w_ih, w_hh, b_ih, b_hh) if w is not None]
        _, new = one_layer(cell, x[None], None, state, weights, len(weights) == 4, False)
        return new if len(new) > 1 else new[0]

    return run


# --- whole layers: RNN, GRU, LSTM ----------------------------------------------------------------


def layers(cell: Cell) -> Callable[..., Any]:
    """Return how to record the layers of a recurrent network, of a plain or a packed sequence.

    The sequence is (steps, samples, features). A packed one, with the numbers ``sizes`` of samples
    in each step, is (steps and samples, features).
    """

    def run(*args: Any) -> Any:
        if isinstance(args[3], Sequence):  # packed: (data, batch_sizes, hx, weights, ...)
            sequence, counts, start, weights, *settings = args
            sizes, batch_first = counts.tolist(), False
        else:
            sequence, start, weights, *settings, batch_first = args
            sizes = None
        has_biases, num_layers, dropout, train, bidirectional = settings
        sequence = sequence.transpose(0, 1) if batch_first else sequence
        starts = (start,) if isinstance(start, Tensor) else tuple(start)
        directions = 2 if bidirectional else 1
        n = len(weights) // (num_layers * directions)
        ends: list[State] = []
        for layer in range(num_layers):
            if layer > 0 and dropout > 0 and train:
                sequence = torch.dropout(sequence, dropout, True)
            results = []
            for reverse in (False, True)[:directions]:
                which = len(ends)
                mine, state = weights[which * n : (which + 1) * n], tuple(h[which] for h in starts)
                outputs, end = one_layer(cell, sequence, sizes, state, mine, has_biases, reverse)
                results.append(outputs)
                ends.append(end)
            sequence = results[0] if len(results) == 1 else torch.cat(results, -1)
        sequence = sequence.transpose(0, 1) if batch_first else sequence
        return sequence, *(torch.stack(parts) for parts in zip(*ends, strict=True))

    return run


def one_layer(
    cell: Cell,
    sequence: Tensor,
    sizes: list[int] | None,
    start: State,
    weights: Sequence[Tensor],
    has_biases: bool,
    reverse: bool,
) -> tuple[Tensor, State]:
    """Pass a sequence through one layer in one direction."""
    w_ih, w_hh, *rest = weights
    b_ih, b_hh = rest[:2] if has_biases else (None, None)
    w_hr = rest[-1] if len(rest) in (1, 3) else None
    alike = len({x.dtype for x in (sequence, w_ih, w_hh, *start)}) == 1
    alike = alike and not torch.is_autocast_enabled(sequence.device.type)
    if cell in (lstm_cell, gru_cell) and sizes is None and w_hr is None and alike:
        outputs, *end = recurrence(sequence, w_ih, b_ih, w_hh, b_hh, reverse, *start)
        return outputs, (outputs[0 if reverse else -1], *end)
    gates = F.linear(sequence, w_ih, b_ih)
    steps = gates.unbind(0) if sizes is None else gates.split_with_sizes(sizes)
    results, state = step_by_step(cell, steps[::-1] if reverse else steps, start, w_hh, b_hh, w_hr)
    results = results[::-1] if reverse else results
    return torch.stack(results) if sizes is None else torch.cat(results), state


def step_by_step(
    cell: Cell, gates: Sequence[Tensor], start: State, w_hh: Tensor, b_hh: Maybe, w_hr: Maybe
) -> tuple[list[Tensor], State]:
    """Go through the steps one by one.

    The samples of a packed sequence are sorted by length: going forward the last ones end first,
    going backward they join in last.
    """
    state = tuple(h[: len(gates[0])] for h in start)
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
    "rnn_tanh": lambda x, h, state: (torch.tanh(x + h),),
    "rnn_relu": lambda x, h, state: (torch.relu(x + h),),
    "gru": gru_cell,
    "lstm": lstm_cell,
}
RECURRENT: dict[str, Callable[..., Any]] = {
    **{name: layers(cell) for name, cell in CELLS.items()},
    **{f"{name}_cell": one_step(cell) for name, cell in CELLS.items()},
}
