"""The kernels behind ``fused``, ``fused_norms``, ``fused_attention``, layers and inner products.

Imported only where there is a GPU, and only if Triton is there.
"""

from newton_summary.derivatives.sweep.rules.triton_kernels.attention import pass_attention
from newton_summary.derivatives.sweep.rules.triton_kernels.elementwise import (
    pass_elementwise,
    pass_product,
)
from newton_summary.derivatives.sweep.rules.triton_kernels.gram import gram
from newton_summary.derivatives.sweep.rules.triton_kernels.layer import multiply_rows
from newton_summary.derivatives.sweep.rules.triton_kernels.norms import norm_sums, standardized
from newton_summary.derivatives.sweep.rules.triton_kernels.softmax import pass_softmax

__all__ = [
    "gram",
    "multiply_rows",
    "norm_sums",
    "pass_attention",
    "pass_elementwise",
    "pass_product",
    "pass_softmax",
    "standardized",
]
