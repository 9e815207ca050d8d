"""Let a loss run as it is written, without what others have put around it for training.

Re-entrant checkpoints, compiled kernels and wrappers of data parallelism change how a loss is
computed and not what it is; hooks on gradients change what its derivatives seem to be. None of them
can be differentiated again.
"""

from __future__ import annotations

import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction
from torch.utils.hooks import RemovableHandle


@contextmanager
def running_plainly() -> Iterator[None]:
    """Let losses run as they are written, until the end of the context."""
    with ExitStack() as stack:
        stack.enter_context(without_data_parallel())
        stack.enter_context(plain_checkpoints())
        stack.enter_context(not_compiled())
        stack.enter_context(without_new_hooks())
        yield


@contextmanager
def without_data_parallel() -> Iterator[None]:
    """Let modules wrapped for data parallelism run as if they were not.

    A loss may use the wrapped module although it is given the one inside. Its forward pass would
    prepare an all-reduce of gradients that never come, and send buffers to the other ranks.
    """
    wrapper = nn.parallel.DistributedDataParallel
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        yield
        return

    def forward(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        if self.device_ids and (inputs or kwargs):
            from torch.distributed.utils import _to_kwargs

            device = torch.device(self.device_type, self.device_ids[0])
            (inputs,), (kwargs,) = _to_kwargs(inputs, kwargs, device, False)
        return self.module(*inputs, **kwargs)

    original = wrapper.forward
    wrapper.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        wrapper.forward = original  # type: ignore[method-assign]


@contextmanager
def plain_checkpoints() -> Iterator[None]:
    """Let re-entrant checkpoints run as plain calls: autograd cannot see the parameters inside."""

    def run_plainly(run: Callable[..., Any], preserve_random_state: bool, *args: Any) -> Any:
        return run(*args)

    setattr(CheckpointFunction, "apply", staticmethod(run_plainly))  # noqa: B010
    try:
        yield
    finally:
        delattr(CheckpointFunction, "apply")


def not_compiled() -> AbstractContextManager[Any]:
    """Let compiled functions run as they are written: kernels have no second derivative."""
    used = "torch._dynamo" in sys.modules
    return torch.compiler.set_stance("force_eager") if used else nullcontext()


@contextmanager
def without_new_hooks() -> Iterator[None]:
    """Let the hooks rest that a loss puts on the gradients of its tensors."""
    names = ("register_hook", "register_post_accumulate_grad_hook")
    originals = {name: getattr(Tensor, name) for name in names}

    def resting(original: Callable[..., Any]) -> Callable[..., Any]:
        def register(tensor: Tensor, hook: Callable[..., Any]) -> Any:
            if not tensor.requires_grad:
                return original(tensor, hook)  # an error that tells why
            warnings.warn(
                "loss_fn hooks into the gradient of a tensor. Such hooks rest during a "
                "measurement: the derivatives are those of the loss.",
                stacklevel=2,
            )
            return RemovableHandle(OrderedDict())

        return register

    for name, original in originals.items():
        setattr(Tensor, name, resting(original))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(Tensor, name, original)
