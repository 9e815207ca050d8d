"""Which values the rules of operations read; of others a tape keeps the shape alone."""

from __future__ import annotations

from newton_summary.derivatives.sweep.rules import elementwise
from newton_summary.derivatives.sweep.rules.linear import SAME_ORDER
from newton_summary.derivatives.sweep.rules.selection import POOLING
from newton_summary.derivatives.sweep.torch_functions import names

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
