"""What ``loss_fn`` is, and what to say to somebody who gives something else."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

LossFn = Callable[[nn.Module, Any], Tensor]

_WANTED = (
    "loss_fn(model, batch) is wanted, which calls the model and returns the mean loss of the "
    "batch, for example"
)
_EXAMPLE = "lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])"


def check_loss_fn(loss_fn: Any) -> None:
    """Raise unless ``loss_fn`` can be called with a model and a batch."""
    if isinstance(loss_fn, nn.modules.loss._Loss):
        raise TypeError(
            f"loss_fn is {loss_fn}, which takes outputs and targets. {_WANTED} "
            f"lambda model, batch: criterion(model(batch[0]), batch[1]), with "
            f"criterion = nn.{loss_fn}."
        )
    if getattr(loss_fn, "__module__", None) == "torch.nn.functional":
        name = f"F.{loss_fn.__name__}"
        raise TypeError(
            f"loss_fn is {name}, which takes outputs and targets. {_WANTED} "
            f"lambda model, batch: {name}(model(batch[0]), batch[1])."
        )
    if not callable(loss_fn):
        raise TypeError(f"loss_fn is of type {type(loss_fn).__name__}. {_WANTED} {_EXAMPLE}.")
    try:
        signature = inspect.signature(loss_fn)
    except ValueError:  # of a function in C, which has none
        return
    try:
        signature.bind(None, None)
    except TypeError as error:
        raise TypeError(
            f"loss_fn has the arguments {signature} ({error}). {_WANTED} {_EXAMPLE}."
        ) from None


def explain(error: TypeError, model: nn.Module, data: Any) -> TypeError | None:
    """Return a clearer error where a loss has failed because of what it was given, if it has."""
    if data is None:
        return TypeError(
            f"The data is None, so loss_fn was given None as its batch, and failed: {error}. Give "
            f"a batch, or an iterable of batches such as a DataLoader."
        )
    if f"must be Tensor, not {type(model).__name__}" in str(error):
        return TypeError(
            f"loss_fn takes its first argument, the model, for a tensor: {error}. {_WANTED} "
            f"{_EXAMPLE}."
        )
    if isinstance(data, list) and "must be Tensor, not list" in str(error):
        return TypeError(
            f"A list of tensors is taken as one batch, and loss_fn failed with it: {error}. For "
            f"several batches of one tensor each, give iter(data) or a DataLoader."
        )
    return None
