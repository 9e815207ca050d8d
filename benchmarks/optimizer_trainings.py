"""The trainings of benchmarks/optimizers.py: fourteen small ones, half of them held out."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from newton_summary.data import load_mnist_subset
from newton_summary.experiments import models

Data = tuple[Tensor, Tensor]
SAMPLES = 5000  # of a training set
SYMBOLS = "abcdefghijklmnopqrstuvwxyz ."


# --- data -----------------------------------------------------------------------------------------


def mnist() -> tuple[Data, Data]:
    return load_mnist_subset("train"), load_mnist_subset("test")


def cifar10(cache: Path) -> tuple[Data, Data]:
    """The first images of CIFAR-10 if its files are at hand, MNIST in three colours otherwise."""
    if not cache.exists():
        from newton_summary.errors import UserError
        from newton_summary.experiments.config import DataConfig
        from newton_summary.experiments.datasets import load_dataset

        try:
            every = load_dataset(DataConfig("cifar10", download=False, samples=SAMPLES))
            data = (every.train[:SAMPLES], every.test[:1000])
            parts = [(part.inputs.clone(), part.targets.clone()) for part in data]
        except UserError as error:
            print(f"MNIST in three colours instead of CIFAR-10: {error}", file=sys.stderr)
            shades = torch.tensor([1.0, 0.5, -0.5])[:, None, None]
            train, test = ((images * shades, labels) for images, labels in mnist())
            return train, test  # not cached: the files may come later
        cache.parent.mkdir(parents=True, exist_ok=True)
        torch.save(parts, cache)
    train, test = torch.load(cache)
    return train, test


def text(length: int = 33) -> tuple[Data, Data]:
    """Lines of a made-up language: Zipf's law over 300 words, each followed by some more often."""
    draw = torch.Generator().manual_seed(0)
    spelled = torch.randint(0, 26, (300, 7), generator=draw).tolist()
    sizes = torch.randint(2, 8, (300,), generator=draw).tolist()
    words = [row[:size] for row, size in zip(spelled, sizes, strict=True)]
    common = 1 / torch.arange(1, 301, dtype=torch.float64)
    liking = torch.rand(300, 300, generator=draw, dtype=torch.float64) ** 8
    chain = common * (0.02 + liking)
    symbols: list[int] = []
    word = 0
    while len(symbols) < length * 4400:
        symbols += [*words[word], 26 + int(word % 17 == 0)]
        word = int(torch.multinomial(chain[word], 1, generator=draw))
    lines = torch.tensor(symbols[: length * 4400]).reshape(-1, length)
    none = torch.zeros(len(lines))
    return (lines[:4000], none[:4000]), (lines[4000:], none[4000:])


def table() -> tuple[Data, Data]:
    """Four categories and eight numbers; the target is a random network of them, with noise."""
    draw = torch.Generator().manual_seed(0)
    categories = torch.randint(0, 20, (6000, 4), generator=draw)
    numbers = torch.randn(6000, 8, generator=draw)
    effects = torch.randn(4, 20, generator=draw)
    W1, w2 = torch.randn(12, 24, generator=draw) / 3, torch.randn(24, generator=draw) / 3
    effect = torch.stack([effects[i][categories[:, i]] for i in range(4)], 1)
    y = torch.relu(torch.cat([effect, numbers], 1) @ W1) @ w2
    y = (y - y.mean()) / y.std() + 0.1 * torch.randn(6000, generator=draw)
    x = torch.cat([categories.float(), numbers], 1)
    return (x[:5000], y[:5000]), (x[5000:], y[5000:])


# --- networks -------------------------------------------------------------------------------------


def dense(*sizes: int) -> nn.Module:
    """Linear layers with ReLU, with the weights of torch."""
    layers: list[nn.Module] = [nn.Flatten()]
    for fan_in, fan_out in pairwise(sizes):
        layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def relu_lenet() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)),
    )


def dropout_cnn() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 5, stride=2), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.Conv2d(8, 16, 5, stride=2), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten()),
        *(nn.Dropout(0.2), nn.Linear(400, 10)),
    )


def small_resnet() -> nn.Module:
    """Three residual blocks with batch norm, behind a convolution that halves the image."""
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU()),
        models.ResidualBlock(8, 8, 1),
        models.ResidualBlock(8, 16, 2),
        models.ResidualBlock(16, 32, 2),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)),
    )


class Patches(nn.Module):
    """A transformer of two blocks over the sixteen patches of a colour image."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(192, 48)
        self.place = nn.Parameter(0.02 * torch.randn(16, 48))
        layer = nn.TransformerEncoderLayer(48, 4, 96, 0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, nn.LayerNorm(48), enable_nested_tensor=False)
        self.head = nn.Linear(48, 10)

    def forward(self, images: Tensor) -> Tensor:
        patches = images.unfold(2, 8, 8).unfold(3, 8, 8).permute(0, 2, 3, 1, 4, 5)
        x = self.embed(patches.reshape(len(images), 16, 192)) + self.place
        return self.head(self.blocks(x).mean(1))


class Recurrent(nn.Module):
    """An LSTM that predicts the next symbol."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(len(SYMBOLS), 24)
        self.lstm = nn.LSTM(24, 64, batch_first=True)
        self.head = nn.Linear(64, len(SYMBOLS))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.lstm(self.embed(tokens))[0])


class Tabular(nn.Module):
    """Embeddings of four categories and eight numbers into a ReLU network."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.ModuleList([nn.Embedding(20, 6) for _ in range(4)])
        self.layers = dense(32, 64, 64, 1)

    def forward(self, x: Tensor) -> Tensor:
        found = [embed(x[:, i].long()) for i, embed in enumerate(self.embed)]
        return self.layers(torch.cat([*found, x[:, 4:]], 1))[:, 0]


# --- losses ---------------------------------------------------------------------------------------


def squared_labels(model: nn.Module, batch: Data) -> Tensor:
    return F.mse_loss(model(batch[0]), F.one_hot(batch[1], 10).float())


def squared(model: nn.Module, batch: Data) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def reconstruction(model: nn.Module, batch: Data) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[0].flatten(1))


def cross_entropy(model: nn.Module, batch: Data) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def next_symbol(model: nn.Module, batch: Data) -> Tensor:
    lines = batch[0]
    return F.cross_entropy(model(lines[:, :-1]).flatten(0, 1), lines[:, 1:].flatten())


def right_labels(model: nn.Module, batch: Data) -> float:
    return float((model(batch[0]).argmax(1) == batch[1]).float().mean())


# --- trainings ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Training:
    build: Callable[[], nn.Module]
    data: Callable[..., tuple[Data, Data]]
    loss_fn: Callable[[nn.Module, Any], Tensor] = cross_entropy
    batch: int = 50
    epochs: int = 8
    samples: int = SAMPLES

    def load(self, folder: Path) -> tuple[Data, Data]:
        train, test = self.data(folder / "cifar10.pt") if self.data is cifar10 else self.data()
        return (train[0][: self.samples], train[1][: self.samples]), test

    def score(self, model: nn.Module, test: Data) -> float:
        """Return the accuracy on the test set, or the loss where there is none."""
        if self.loss_fn in (cross_entropy, squared_labels):
            return right_labels(model, test)
        return float(self.loss_fn(model, test))


DEVELOPMENT = {
    "MLP": Training(
        lambda: models.perceptron([1024, 200, 100, 10], nn.Tanh, 1.0), mnist, batch=100, epochs=16
    ),
    "LeNet": Training(models.lenet, cifar10, epochs=10),
    "MLP, ReLU, squared error": Training(lambda: dense(1024, 128, 64, 10), mnist, squared_labels),
    "GPT": Training(
        lambda: models.GPT(len(SYMBOLS), 32, 48, 2, 4), text, next_symbol, batch=20, epochs=3
    ),
    "ResNet, batch norm": Training(small_resnet, cifar10, samples=2500),
    "CNN, batch norm, dropout": Training(dropout_cnn, mnist),
    "autoencoder": Training(lambda: models.autoencoder(1024, 128), mnist, reconstruction, epochs=6),
}
HELD_OUT = {
    "VGG-11'": Training(lambda: models.vgg11(width=6), cifar10, samples=2500),
    "BigMLP": Training(lambda: models.big_mlp(10, 96, 3072), cifar10),
    "LeNet, ReLU": Training(relu_lenet, cifar10, epochs=10),
    "MLP, ReLU": Training(lambda: dense(1024, 200, 100, 10), mnist, batch=25, epochs=5),
    "ViT": Training(Patches, cifar10, samples=2500),
    "LSTM": Training(Recurrent, text, next_symbol, batch=20, epochs=3),
    "table": Training(Tabular, table, squared, batch=100, epochs=16),
}
TRAININGS = DEVELOPMENT | HELD_OUT
