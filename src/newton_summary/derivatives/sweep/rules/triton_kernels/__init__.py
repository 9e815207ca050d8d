"""The kernels behind ``fused`` and ``fused_norms``.

Imported only where there is a GPU, and only if Triton is there.
"""

from newton_summary.derivatives.sweep.rules.triton_kernels.elementwise import pass_elementwise
from newton_summary.derivatives.sweep.rules.triton_kernels.norms import norm_sums, standardized
from newton_summary.derivatives.sweep.rules.triton_kernels.softmax import pass_softmax

__all__ = ["norm_sums", "pass_elementwise", "pass_softmax", "standardized"]
