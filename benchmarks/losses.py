"""Losses of the benchmarks."""

import torch.nn.functional as F
from torch import Tensor, nn


def next_token_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the mean loss of predicting every token from those before it."""
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def classification_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean negative log-likelihood of the labels."""
    images, labels = batch
    return F.cross_entropy(model(images), labels)
