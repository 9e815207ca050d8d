"""Which values the rule of an operation reads; of others a tape keeps the shape alone."""

from __future__ import annotations

import torch

from newton_summary.derivatives.sweep.rules import elementwise
from newton_summary.derivatives.sweep.rules.linear import SAME_ORDER
from newton_summary.derivatives.sweep.rules.selection import POOLING
from newton_summary.derivatives.sweep.tape import Op, Tape, Value, find_values
from newton_summary.derivatives.sweep.torch_functions import names

LARGE = 2**16  # bytes: smaller values are kept whoever reads them
# Rules that read nothing of what moves.
NOTHING = frozenset(
    [
        *SAME_ORDER,
        *POOLING,
        *names("""
    add sub subtract neg negative sum mean cat concat concatenate stack transpose T mT t permute
    expand expand_as broadcast_to __getitem__ split chunk unbind read_view write_view
    embedding where masked_fill
"""),
    ]
)
ARGUMENTS = elementwise.OF_ARGUMENT | frozenset(
    names("""
    linear conv1d conv2d conv3d matmul bmm mm mul multiply standardize scaled_dot_product_attention
""")
)
RESULT = elementwise.OF_RESULT | frozenset(names("softmax log_softmax"))


def values_read(op: Op) -> list[Value]:
    """Return the values with a slot whose numbers the rule of an operation may read."""
    if op.name in NOTHING and not op.complex:
        return []
    arguments = [] if op.name in RESULT else find_values((op.args, op.kwargs))
    results = [] if op.name in ARGUMENTS else [value for value in op.outputs if value is not None]
    return [value for value in (*arguments, *results) if value.slot is not None]


def forget_unread(tape: Tape) -> None:
    """Keep only the shapes of large values that no rule reads."""
    read = {value.slot for op in tape.ops for value in values_read(op)}
    for op in tape.ops:
        for value in op.outputs:
            if value is not None and value.slot not in read and not value.forgotten:
                x = value.tensor
                if x.dim() > 0 and x.layout == torch.strided and x.nbytes >= LARGE:
                    value.forget()
