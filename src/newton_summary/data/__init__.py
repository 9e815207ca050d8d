"""Real data in the package, so that the demo, the tests and the examples run offline.

The images are a subset of MNIST (Y. LeCun, C. Cortes, C. J. C. Burges), available under the
Creative Commons Attribution-Share Alike 3.0 licence; ``scripts/make_mnist_subset.py`` chose them.
"""

from importlib import resources
from typing import Literal, get_args

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["load_mnist_subset"]

Split = Literal["train", "test"]

# Mean and standard deviation of the pixels of the full training set, scaled to [0, 1].
MNIST_MEAN = 0.1307
MNIST_STD = 0.3081


def load_mnist_subset(
    split: Split = "train",
    *,
    normalize: bool = True,
    pad: bool = True,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> tuple[Tensor, Tensor]:
    """Load 5,000 training or 1,000 test images of MNIST, as many of each digit.

    The defaults prepare the images for LeNet: padded with background to 32 x 32, then normalised.
    The paper's MLP takes them as they are, with ``pad=False``.

    Args:
        split: "train" (5,000 images of the MNIST training set) or "test" (1,000 of its test set).
        normalize: Subtract the mean 0.1307 and divide by the standard deviation 0.3081.
            Otherwise pixels lie in [0, 1].
        pad: Pad the 28 x 28 images with two pixels of background on each side.
        dtype: Floating-point type of the images.
        device: Where to put both tensors.

    Returns:
        Images, (N, 1, 32, 32) or (N, 1, 28, 28), and labels, (N,) of int64, in a fixed
        random order.

    Example:
        >>> images, labels = load_mnist_subset("test")
        >>> images.shape, labels.bincount().tolist()
        (torch.Size([1000, 1, 32, 32]), [100, 100, 100, 100, 100, 100, 100, 100, 100, 100])
    """
    if split not in get_args(Split):
        raise ValueError(f'Unknown split {split!r}. Use "train" or "test".')
    if not dtype.is_floating_point:
        raise ValueError(f"dtype={dtype}: images are floating-point, use torch.float32.")

    file = resources.files(__name__).joinpath("mnist_subset.npz")
    with file.open("rb") as stream, np.load(stream) as arrays:
        pixels = torch.from_numpy(arrays[f"{split}_images"])
        labels = torch.from_numpy(arrays[f"{split}_labels"])

    images = pixels.unsqueeze(1).to(device=device, dtype=dtype) / 255
    if pad:
        images = F.pad(images, (2, 2, 2, 2))
    if normalize:
        images = (images - MNIST_MEAN) / MNIST_STD
    return images, labels.to(device=device, dtype=torch.int64)
