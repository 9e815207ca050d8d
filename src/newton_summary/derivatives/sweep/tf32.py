"""Whether torch may round the factors of float32 products to TF32 on a GPU.

Since torch 2.9 there are new flags, and the old ones raise an error where the new ones are used.
"""

from __future__ import annotations

import torch

OF_FLOAT32 = "tf32x3"  # which has the precision of float32, on tensor cores


def products_take_tf32() -> bool:
    """Whether matrix products may be rounded; by default they are not."""
    matmul = torch.backends.cuda.matmul
    if hasattr(matmul, "fp32_precision"):
        return bool(matmul.fp32_precision == "tf32")
    return bool(matmul.allow_tf32)


def convolutions_take_tf32() -> bool:
    """Whether convolutions may be rounded, as they are by default."""
    cudnn = torch.backends.cudnn
    if hasattr(cudnn, "conv"):
        return bool(cudnn.conv.fp32_precision == "tf32")
    return bool(cudnn.allow_tf32)


def precision_of(dtype: torch.dtype) -> str:
    """Return the ``input_precision`` of a kernel's products of two matrices."""
    if dtype != torch.float32:
        return "ieee"
    return "tf32" if products_take_tf32() else OF_FLOAT32
