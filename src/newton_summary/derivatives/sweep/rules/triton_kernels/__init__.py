"""The kernels behind ``fused`` and ``cells``.

Imported only where there is a GPU, and only if Triton is there.
"""

from newton_summary.derivatives.sweep.rules.triton_kernels.elementwise import bend
from newton_summary.derivatives.sweep.rules.triton_kernels.norms import cell_sums, standardized
from newton_summary.derivatives.sweep.rules.triton_kernels.softmax import under

__all__ = ["bend", "cell_sums", "standardized", "under"]
