"""The data of an experiment as tensors on the training device, and minibatches by index.

MNIST and CIFAR-10 come from their official files, the embedded images from the package itself;
"addition" and "nothing" are generated, for the small GPT and for functions without data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from newton_summary.data import MNIST_MEAN, MNIST_STD, load_mnist_subset
from newton_summary.display.names import nearest
from newton_summary.errors import UserError
from newton_summary.experiments.config import DataConfig
from newton_summary.experiments.files import Bytes, read_cifar10, read_mnist

Batch = tuple[Tensor, Tensor]

SPLIT_SEED = 0  # of the validation set, the same for all runs


@dataclass(frozen=True)
class Split:
    """Samples on one device."""

    inputs: Tensor  # (N, ...)
    targets: Tensor  # (N,) or (N, positions)

    def __len__(self) -> int:
        """Return N."""
        return len(self.inputs)

    def __getitem__(self, index: Tensor | slice) -> Split:
        """Return some of the samples."""
        return Split(self.inputs[index], self.targets[index])

    def parts(self, size: int) -> Iterator[Batch]:
        """Yield all samples in order, ``size`` at a time."""
        for start in range(0, len(self), size):
            part = slice(start, start + size)
            yield self.inputs[part], self.targets[part]


@dataclass(frozen=True)
class Dataset:
    """Samples for training, validation and testing."""

    train: Split
    validation: Split
    test: Split


class Batches:
    """Minibatches gathered on the device of the data, in a new random order at each pass.

    The order comes from the CPU, so it does not depend on the device. Its random numbers are those
    of ``generator``, or torch's own.

    Args:
        split: The samples.
        size: Samples in a batch; the last one has what is left.
        generator: Random numbers for the order.
        drop_last: Drop a smaller last batch, unless it is the only one.
        part: Which samples to take of a batch of a given length; all by default.
        shuffle: Whether to draw an order; otherwise the samples come as they are stored.
    """

    def __init__(
        self,
        split: Split,
        size: int,
        generator: torch.Generator | None = None,
        drop_last: bool = False,
        part: Callable[[int], slice] | None = None,
        shuffle: bool = True,
    ):
        self.part, self.shuffle = part, shuffle
        self.split, self.size, self.generator = split, min(size, len(split)), generator
        self.used = len(split) // self.size * self.size if drop_last else len(split)

    def __len__(self) -> int:
        """Return the number of batches."""
        return -(-self.used // self.size)

    def __iter__(self) -> Iterator[Batch]:
        """Draw an order, and yield the batches."""
        n = len(self.split)
        order = torch.randperm(n, generator=self.generator) if self.shuffle else torch.arange(n)
        order = order[: self.used].to(self.split.inputs.device)
        for start in range(0, self.used, self.size):
            index = order[start : start + self.size]
            if self.part is not None:
                index = index[self.part(len(index))]
            yield self.split.inputs[index], self.split.targets[index]


# --- the sets ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """Where samples come from, as (training and validation samples, test samples)."""

    load: Callable[[DataConfig, torch.dtype, torch.device], tuple[Split, Split]]
    validation: int  # training samples held out unless a number is given


def load_dataset(
    config: DataConfig, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> Dataset:
    """Load a data set, normalised, onto a device.

    Raises:
        UserError: If the data is missing or corrupt.
    """
    name = config.name
    if name not in DATASETS:
        raise UserError(
            f"Unknown data set {name!r}.{nearest(name, DATASETS)} Use one of {', '.join(DATASETS)}."
        )
    source = DATASETS[name]
    known, test = source.load(config, dtype, torch.device(device))
    held_out = source.validation if config.validation is None else config.validation
    if not 0 < held_out < len(known):
        raise UserError(
            f"Cannot hold out {held_out} of the {len(known)} samples of {name!r} for validation."
        )
    order = torch.randperm(len(known), generator=torch.Generator().manual_seed(SPLIT_SEED))
    order = order.to(known.inputs.device)
    n = config.samples
    train, chosen = order[held_out:][:n], order[:held_out][:n]
    return Dataset(known[train], known[chosen], test[slice(n)])


# The official files: how to read them, mean and standard deviation of each channel.
OFFICIAL = {
    "mnist": (read_mnist, (MNIST_MEAN,), (MNIST_STD,)),
    "cifar10": (read_cifar10, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
}


def _images(config: DataConfig, dtype: torch.dtype, device: torch.device) -> tuple[Split, Split]:
    """60,000 and 10,000 digits of 28 x 28, or 50,000 and 10,000 colour images of 32 x 32."""
    read, *statistics = OFFICIAL[config.name]
    mean, std = (torch.tensor(x, dtype=dtype, device=device)[:, None, None] for x in statistics)

    def split(pixels: Bytes, labels: Bytes) -> Split:
        images = torch.tensor(pixels, device=device).to(dtype).div_(255)
        if config.pad and config.name == "mnist":
            images = F.pad(images, (2,) * 4)  # black
        images.sub_(mean).div_(std)
        return Split(images, torch.tensor(labels, dtype=torch.int64, device=device))

    files = read(config.root, config.download)
    return split(*files["train"]), split(*files["test"])


def _embedded(config: DataConfig, dtype: torch.dtype, device: torch.device) -> tuple[Split, Split]:
    """5,000 and 1,000 digits of MNIST in the package."""
    load = partial(load_mnist_subset, pad=config.pad, dtype=dtype, device=device)
    return Split(*load("train")), Split(*load("test"))


ADDITION_SYMBOLS = "0123456789+="


def _addition(config: DataConfig, dtype: torch.dtype, device: torch.device) -> tuple[Split, Split]:
    """All sums of two numbers below 100, as in ``"07+45=250"``: the answer's last digit first.

    The input is the text without its last symbol, the targets are the three digits of the answer.
    """
    texts = [f"{a:02}+{b:02}={f'{a + b:03}'[::-1]}" for a in range(100) for b in range(100)]
    tokens = torch.tensor([[ADDITION_SYMBOLS.index(c) for c in text] for text in texts])
    order = torch.randperm(len(tokens), generator=torch.Generator().manual_seed(SPLIT_SEED))
    tokens = tokens[order].to(device)
    every = Split(tokens[:, :-1], tokens[:, -3:])
    return every[slice(2000, None)], every[slice(0, 2000)]


def _nothing(config: DataConfig, dtype: torch.dtype, device: torch.device) -> tuple[Split, Split]:
    """Empty samples, for a loss that depends on the parameters alone."""
    empty = Split(
        torch.zeros(101, 1, dtype=dtype, device=device),
        torch.zeros(101, dtype=torch.int64, device=device),
    )
    return empty, empty[slice(0, 1)]


DATASETS = {
    "mnist": Source(_images, 6000),
    "cifar10": Source(_images, 5000),
    "embedded": Source(_embedded, 500),
    "addition": Source(_addition, 1000),
    "nothing": Source(_nothing, 1),
}
