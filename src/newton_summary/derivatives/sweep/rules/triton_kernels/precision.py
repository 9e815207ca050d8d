"""How kernels multiply matrices."""

from __future__ import annotations

import torch

from newton_summary.derivatives.sweep.tf32 import products_take_tf32

# Of float32, where torch may not use TF32: "tf32x3" has its precision, on tensor cores.
OF_FLOAT32 = "tf32x3"


def precision_of(dtype: torch.dtype) -> str:
    """Return the ``input_precision`` of products of two matrices."""
    if dtype != torch.float32:
        return "ieee"
    return "tf32" if products_take_tf32() else OF_FLOAT32
