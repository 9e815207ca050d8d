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
    """A backend cannot handle this model; the message names the operation.

    >>> import torch
    >>> from newton_summary import summarize
    >>> net = torch.nn.Linear(1, 1)
    >>> class Twice(torch.autograd.Function):
    ...     forward = staticmethod(lambda ctx, x: 2 * x)
    ...     backward = staticmethod(lambda ctx, grad: 2 * grad)
    >>> def loss_fn(model, x):
    ...     return Twice.apply(model(x)).square().mean()
    >>> try:
    ...     summarize(net, loss_fn, torch.ones(2, 1), backend="sweep")
    ... except CannotDifferentiate as error:
    ...     print(error)
    sweep: TwiceBackward made a tensor of shape (2, 1) in a way that cannot be recorded, such as a
    custom autograd function, TorchScript or torch.autograd.grad. Try backend='auto'.
    """


class NotFiniteError(NewtonSummaryError, ValueError):
    """The loss is infinite or nan, or its derivatives along an optimizer's next step are.

    >>> import torch
    >>> from newton_summary import summarize
    >>> net = torch.nn.Linear(1, 1)
    >>> try:
    ...     summarize(net, lambda model, x: (0 * model(x)).log().mean(), torch.ones(2, 1))
    ... except NotFiniteError as error:
    ...     print(error)
    The loss is -inf, ...
    """


class CoupledSamplesError(NewtonSummaryError, ValueError):
    """``microbatch`` was given, but the loss depends on the batch as a whole.

    >>> import torch
    >>> from newton_summary import summarize
    >>> net = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.BatchNorm1d(1))
    >>> data = torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    >>> try:
    ...     summarize(net, lambda model, x: model(x).exp().mean(), data, microbatch=2)
    ... except CoupledSamplesError:
    ...     summary = summarize(net, lambda model, x: model(x).exp().mean(), data)
    >>> summary.num_samples
    4
    """

    def __init__(self) -> None:
        super().__init__(
            "The model has a batch norm in training mode, so its loss is a function of the whole "
            "batch and would change if the batch were split. Use microbatch=None, or call "
            "model.eval() to use the running statistics."
        )


class RankError(NewtonSummaryError, RuntimeError):
    """A rank failed, and all ranks have stopped; the message names it."""


class RankNotFiniteError(NotFiniteError, RankError):
    """The loss of a rank is infinite or nan; the message names it."""


class UserError(NewtonSummaryError):
    """A mistake that the user can fix; the command line prints the message and exits with 2.

    >>> import torch
    >>> from newton_summary import Summary
    >>> try:
    ...     Summary(gbar=torch.ones(1)).save("nowhere/summary.pt")
    ... except UserError as error:
    ...     type(error).__name__
    'CannotWriteError'

    Attributes:
        rank: The process it happened on, where several train together.
    """

    rank: int | None = None


class SharedError(UserError):
    """A mistake on one of several processes, known to all of them; the first reports it."""


class CannotWriteError(UserError, OSError):
    """A file that cannot be written; the message has the reason, such as a full disk.

    >>> import torch
    >>> from newton_summary import Summary
    >>> try:
    ...     Summary(gbar=torch.ones(1)).save("nowhere/summary.pt")
    ... except CannotWriteError as error:
    ...     print(error)
    nowhere/summary.pt cannot be written: there is no folder nowhere.
    """


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, on a device or in the machine: other backends would have no more."""
    import torch

    by_type = isinstance(error, MemoryError | torch.OutOfMemoryError)
    return by_type or "can't allocate memory" in str(error)  # torch, on the CPU
