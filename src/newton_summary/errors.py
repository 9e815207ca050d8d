"""The exceptions of this package. All derive from :class:`NewtonSummaryError`."""

from __future__ import annotations


class NewtonSummaryError(Exception):
    """Base class of the exceptions that this package defines.

    >>> import torch
    >>> from newton_summary import summarize
    >>> net = torch.nn.Linear(1, 1)
    >>> try:
    ...     summarize(net, lambda model, x: model(x).mean() / 0, torch.ones(2, 1))
    ... except NewtonSummaryError as error:
    ...     type(error).__name__
    'NotFiniteError'
    """


class CannotDifferentiate(NewtonSummaryError):
    """A backend cannot handle this model; the message names the operation."""


class NotFiniteError(NewtonSummaryError, ValueError):
    """The loss is infinite or nan."""


class CoupledSamplesError(NewtonSummaryError, ValueError):
    """A batch was to be split although the loss depends on it as a whole."""

    def __init__(self) -> None:
        super().__init__(
            "The model has a batch norm in training mode, so its loss is a function of the whole "
            "batch, and splitting the batch would change it. Leave microbatch=None, or call "
            "model.eval() to use the running statistics."
        )


class RankError(NewtonSummaryError, RuntimeError):
    """A rank failed, and all ranks have stopped; the message names it."""


class RankNotFiniteError(NotFiniteError, RankError):
    """The loss of a rank is infinite or nan; the message names it."""


class UserError(NewtonSummaryError):
    """A mistake that the user can fix; the command line prints the message and exits with 2.

    Attributes:
        rank: The process that it happened on, where several train together.
    """

    rank: int | None = None


class OtherRankError(UserError):
    """A mistake on another process, which reports it."""


class CannotWriteError(UserError, OSError):
    """A file that cannot be written; the message has the reason, such as a full disk."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether there is no memory left, on a device or in the machine: no other way has more."""
    import torch

    by_type = isinstance(error, MemoryError | torch.OutOfMemoryError)
    return by_type or "can't allocate memory" in str(error)  # torch, on the CPU
