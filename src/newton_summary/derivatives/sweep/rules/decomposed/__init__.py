"""Operations that are recorded as several elementary ones.

Each function takes what the torch function of its name takes, and is run in its place with the
recorder active. ``NotImplemented`` means: record the call as it is.
"""

from collections.abc import Callable
from typing import Any

from newton_summary.derivatives.sweep.rules.decomposed.arithmetic import ARITHMETIC
from newton_summary.derivatives.sweep.rules.decomposed.layers import LAYERS
from newton_summary.derivatives.sweep.rules.decomposed.losses import LOSSES
from newton_summary.derivatives.sweep.rules.decomposed.products import PRODUCTS
from newton_summary.derivatives.sweep.rules.decomposed.recurrent import RECURRENT
from newton_summary.derivatives.sweep.rules.decomposed.reductions import REDUCTIONS

DECOMPOSED: dict[str, Callable[..., Any]] = {
    **ARITHMETIC,
    **PRODUCTS,
    **REDUCTIONS,
    **LAYERS,
    **RECURRENT,
    **LOSSES,
}
