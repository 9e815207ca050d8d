"""Tasks: a model, its loss and its accuracy."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from newton_summary.display.names import nearest
from newton_summary.errors import UserError
from newton_summary.experiments import models
from newton_summary.experiments.config import ModelConfig
from newton_summary.experiments.datasets import ADDITION_SYMBOLS, Batch, Dataset

Criterion = Callable[[Tensor, Batch], Tensor]


def negative_log_likelihood(outputs: Tensor, batch: Batch) -> Tensor:
    """Mean over the samples of -log p(label)."""
    return F.cross_entropy(outputs, batch[1])


def answer_loss(outputs: Tensor, batch: Batch) -> Tensor:
    """Mean over samples and digits of -log p(digit), for the last positions of a text."""
    _, answers = batch
    return F.cross_entropy(outputs[:, -answers.shape[1] :].flatten(0, 1), answers.flatten())


def reconstruction_error(outputs: Tensor, batch: Batch) -> Tensor:
    """Mean over samples and pixels of the squared error."""
    images, _ = batch
    return F.mse_loss(outputs, images.flatten(1))


def right_labels(outputs: Tensor, batch: Batch) -> Tensor:
    """Fraction of the samples whose label is the most likely one."""
    return (outputs.argmax(1) == batch[1]).double().mean()


def right_digits(outputs: Tensor, batch: Batch) -> Tensor:
    """Fraction of the digits of the answers that are right."""
    _, answers = batch
    return (outputs[:, -answers.shape[1] :].argmax(2) == answers).double().mean()


@dataclass(frozen=True)
class Architecture:
    """How to build a model, and how to score its outputs."""

    build: Callable[..., nn.Module]
    gain: float | None = None  # of the initialisation; needed for the NTK parameterisation
    criterion: Criterion = negative_log_likelihood
    accuracy: Criterion | None = right_labels


MODELS = {
    "mlp": Architecture(models.mlp, models.TANH_GAIN),
    "lenet": Architecture(models.lenet, models.TANH_GAIN),
    "vgg11": Architecture(models.vgg11, models.ELU_GAIN),
    "big_mlp": Architecture(models.big_mlp, models.ELU_GAIN),
    "vbig_mlp": Architecture(models.vbig_mlp, models.ELU_GAIN),
    "resnet18": Architecture(models.resnet18, models.ELU_GAIN),
    "autoencoder": Architecture(
        models.autoencoder, models.TANH_GAIN, criterion=reconstruction_error, accuracy=None
    ),
    "gpt": Architecture(
        partial(models.GPT, len(ADDITION_SYMBOLS), 8, width=64, depth=2, heads=4),
        criterion=answer_loss,
        accuracy=right_digits,
    ),
    "rosenbrock": Architecture(
        models.Rosenbrock, criterion=lambda outputs, batch: outputs.mean(), accuracy=None
    ),
}


@dataclass(frozen=True)
class Task:
    """A model with its loss."""

    model: nn.Module
    criterion: Criterion
    accuracy: Criterion | None

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Mean loss of a batch."""
        return self.criterion(model(batch[0]), batch)


def make_task(config: ModelConfig, data: Dataset) -> Task:
    """Build a model for the samples of a data set, on the CPU, from torch's random numbers."""
    if config.name not in MODELS:
        raise UserError(
            f"Unknown model {config.name!r}.{nearest(config.name, MODELS)} Use one of "
            f"{', '.join(MODELS)}."
        )
    architecture = MODELS[config.name]
    sample = data.train.inputs[0]
    takes = inspect.signature(architecture.build).parameters
    options: dict[str, Any] = {"features": sample.numel(), "channels": sample.shape[0]}
    options = {name: value for name, value in options.items() if name in takes}
    for name, value in (("width", config.width), ("depth", config.depth)):
        if value is None:
            continue
        if name not in takes:
            raise UserError(f"The model {config.name!r} has no {name} to set.")
        options[name] = value
    model = architecture.build(**options)
    if config.ntk:
        if architecture.gain is None:
            raise UserError(f"The model {config.name!r} has no NTK parameterisation.")
        model = models.to_ntk(model, architecture.gain)
    return Task(model, architecture.criterion, architecture.accuracy)
