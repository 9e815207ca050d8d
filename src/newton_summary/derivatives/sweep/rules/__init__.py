"""What each operation does to derivatives. Each family has a file and a table.

| family | file | what |
|---|---|---|
| linear | ``linear.py`` | shapes, sums, joining, indexing: applied to every row |
| selection | ``selection.py`` | max-pooling, maxima, sorting: linear once the choice is made |
| bilinear | ``products.py``, ``convolutions.py`` | layers, matrix and elementwise products |
| elementwise | ``elementwise.py`` | functions of one number |
| normalize | ``normalize.py`` | softmax and its kin, the standardisation of norm layers |
| attention | ``attention.py`` | scaled_dot_product_attention, in tiles |
| solves | ``solves.py`` | linear equations, Cholesky factors, determinants |
| recurrence | ``recurrence.py`` | LSTM and GRU layers |
| lattice | ``lattice.py`` | the paths of ctc_loss |
| decomposed | ``decomposed/`` | recorded as several of the above: losses, rare layers |
| generic | ``generic.py`` | everything else |

A rule takes (sweep, operation, *arguments) with every tensor among the arguments as a ``Value``.
"""

from collections.abc import Callable
from typing import Any

from newton_summary.derivatives.sweep.rules import elementwise
from newton_summary.derivatives.sweep.rules.attention import ATTENTION
from newton_summary.derivatives.sweep.rules.convolutions import CONVOLUTIONS
from newton_summary.derivatives.sweep.rules.decomposed import DECOMPOSED
from newton_summary.derivatives.sweep.rules.generic import generic
from newton_summary.derivatives.sweep.rules.lattice import LATTICE, PREPARE_LATTICE
from newton_summary.derivatives.sweep.rules.linear import LINEAR, MASKED, watch_masks, zero
from newton_summary.derivatives.sweep.rules.normalize import NORMALIZE
from newton_summary.derivatives.sweep.rules.products import PRODUCTS
from newton_summary.derivatives.sweep.rules.recurrence import PREPARE_RECURRENCES, RECURRENCES
from newton_summary.derivatives.sweep.rules.selection import PREPARE_SELECTION, SELECTION
from newton_summary.derivatives.sweep.rules.solves import SOLVES

STRAIGHT: dict[str, Callable[..., Any]] = {
    **LINEAR,
    **SELECTION,
    **{
        name: elementwise.piecewise_linear(slope)
        for name, slope in elementwise.PIECEWISE_LINEAR.items()
    },
    **dict.fromkeys(elementwise.FLAT, zero),
}
BILINEAR: dict[str, Callable[..., Any]] = {**PRODUCTS, **CONVOLUTIONS}
RULES: dict[str, Callable[..., Any]] = {
    **STRAIGHT,
    **BILINEAR,
    **{name: elementwise.curved(f) for name, f in elementwise.CURVED.items()},
    **{name: elementwise.curved(f, relative=True) for name, f in elementwise.RELATIVE.items()},
    **NORMALIZE,
    **ATTENTION,
    **SOLVES,
    **RECURRENCES,
    **LATTICE,
}
# What holds for complex numbers as well. The rules of convolutions and vdot take no conjugates.
REAL = frozenset(["vdot", *CONVOLUTIONS])
COMPLEX = (frozenset(LINEAR) | frozenset(BILINEAR) | elementwise.HOLOMORPHIC) - REAL
PREPARE: dict[str, Callable[..., tuple[Any, Any]]] = {
    **dict.fromkeys(MASKED, watch_masks),
    **PREPARE_SELECTION,
    **PREPARE_RECURRENCES,
    **PREPARE_LATTICE,
}


__all__ = ["BILINEAR", "COMPLEX", "DECOMPOSED", "PREPARE", "RULES", "STRAIGHT", "generic"]
