"""The kernels behind ``fused`` and ``cells``.

Imported only where there is a GPU, and only if Triton is there.
"""

from newton_summary.derivatives.sweep.rules.triton_kernels.bend import bend
from newton_summary.derivatives.sweep.rules.triton_kernels.cells import cell_sums, standardized
from newton_summary.derivatives.sweep.rules.triton_kernels.under import under

__all__ = ["bend", "cell_sums", "standardized", "under"]
