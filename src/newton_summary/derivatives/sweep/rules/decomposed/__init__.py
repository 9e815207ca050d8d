"""Operations that are recorded as several elementary ones.

Each function has the arguments of the torch function of its name, and is run in its place with the
recorder active. ``NotImplemented`` means: record the call as it is.
"""

from collections.abc import Callable
from typing import Any

from newton_summary.derivatives.sweep.rules.decomposed.arithmetic import ARITHMETIC
from newton_summary.derivatives.sweep.rules.decomposed.layers import LAYERS
from newton_summary.derivatives.sweep.rules.decomposed.losses import LOSSES
from newton_summary.derivatives.sweep.rules.decomposed.matrices import MATRICES
from newton_summary.derivatives.sweep.rules.decomposed.recurrent import RECURRENT
from newton_summary.derivatives.sweep.rules.decomposed.reductions import REDUCTIONS
from newton_summary.derivatives.sweep.torch_functions import names

# What holds for complex numbers as well; other calls with them are recorded as they are.
COMPLEX_FORMS = names("""
    div divide true_divide pow lerp addcmul addcdiv abs absolute angle polar
    addmm addmv baddbmm addbmm addr outer ger inner tensordot linalg_multi_dot chain_matmul kron
    einsum linalg_vector_norm linalg_norm linalg_matrix_norm dist sum_to_size
""")


DECOMPOSED: dict[str, Callable[..., Any]] = {
    **ARITHMETIC,
    **MATRICES,
    **REDUCTIONS,
    **LAYERS,
    **RECURRENT,
    **LOSSES,
}
