"""Small experiments for the tests: random images in the place of MNIST and CIFAR-10."""

from dataclasses import replace

import torch

from newton_summary.experiments import datasets
from newton_summary.experiments.config import (
    AdamConfig,
    DataConfig,
    ExperimentConfig,
    ModelConfig,
    NewtonSummaryConfig,
)
from newton_summary.experiments.datasets import Source, Split

NARROW = {"mlp": 8, "vgg11": 2, "resnet18": 2, "big_mlp": 8, "vbig_mlp": 8, "gpt": 8}


def random_images(channels):
    def load(config, dtype, device):
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(40, channels, 32, 32, generator=generator, dtype=dtype)
        labels = torch.arange(40) % 10
        split = Split(images.to(device), labels.to(device))
        return split, split[slice(0, 10)]

    return load


def use_random_images(monkeypatch):
    """Put random images where the official files would be read."""
    monkeypatch.setitem(datasets.DATASETS, "mnist", Source(random_images(1), 10))
    monkeypatch.setitem(datasets.DATASETS, "cifar10", Source(random_images(3), 10))


def shrink(config):
    """Make a recipe so small that an epoch is two steps on narrow layers; two epochs."""
    optimizer = config.optimizer
    if isinstance(optimizer, NewtonSummaryConfig):
        optimizer = replace(optimizer, curvature_batch_size=4, summary_period=1)
    return replace(
        config,
        model=replace(config.model, width=NARROW.get(config.model.name)),
        data=replace(config.data, samples=8),
        measure=replace(config.measure, samples=4),
        optimizer=optimizer,
        batch_size=4,
        epochs=2,
        device="cpu",
    )


def tiny(optimizer=None, **changes):
    """Return a run of a few milliseconds an epoch, in float64."""
    config = ExperimentConfig(
        model=ModelConfig("mlp", width=20),
        data=DataConfig("embedded", samples=60),
        optimizer=optimizer or AdamConfig(),
        batch_size=20,
        epochs=3,
        device="cpu",
        dtype="float64",
    )
    return replace(config, **changes)
