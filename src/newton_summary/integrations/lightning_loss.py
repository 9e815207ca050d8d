"""The loss of a LightningModule: its ``training_step``, without side effects."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from newton_summary.probe.state import PlainAttributes


def training_loss(module: Any, batch: Any) -> Tensor:
    """Return the loss of ``training_step`` for a batch, without logging and without a trace.

    The batch is moved to the device as Lightning does it. To train with
    :class:`newton_summary.NewtonSummary`, return it from ``configure_optimizers`` with
    ``curvature=(training_loss, loader)``.

    Args:
        module: A LightningModule with automatic optimization, attached to a trainer.
        batch: A batch of the data loader.
    """
    return step_loss(module, to_device(module, batch))


def step_loss(module: Any, batch: Any) -> Tensor:
    """Return the same for a batch that Lightning has moved already."""
    if not module.automatic_optimization:
        raise ValueError(
            f"{type(module).__name__} uses manual optimization, so its training_step does not "
            f"return a loss. Pass loss_fn=..., with loss_fn(module, batch) -> mean loss."
        )
    with quiet(module):
        takes_index = len(inspect.signature(module.training_step).parameters) > 1
        output = module.training_step(batch, 0) if takes_index else module.training_step(batch)
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor):
        raise TypeError(
            f"training_step of {type(module).__name__} returned {type(output).__name__} and not a "
            f"loss. Pass data=... whose batches all have a loss."
        )
    return loss


def to_device(module: Any, batch: Any) -> Any:
    """Return a batch as the training loop passes it to ``training_step``."""
    batch = module.trainer.precision_plugin.convert_input(batch)
    batch = module.on_before_batch_transfer(batch, 0)
    return module.trainer.strategy.batch_to_device(batch)


@contextmanager
def quiet(module: Any) -> Iterator[None]:
    """Hide from the training what a module logs and what it keeps in attributes.

    Those of the module and its submodules are restored, such as counters and lists of outputs, with
    the contents of containers, and tensors, such as those of metrics (torchmetrics).
    """
    trainer, loggers = module.trainer, module.trainer.loggers
    with torch._C.DisableTorchFunction():  # not part of what a measurement records
        attributes = PlainAttributes(list(module.modules()))
        tensors = [(tensor.data, tensor.clone()) for tensor in attributes.tensors()]
    try:
        vars(module).update(dict.fromkeys(("log", "log_dict"), lambda *_, **__: None))
        if loggers:
            trainer.loggers = [_dummy_logger()]
        yield
    finally:
        trainer.loggers = loggers
        with torch._C.DisableTorchFunction():
            attributes.restore()
            for tensor, before in tensors:
                tensor.copy_(before)


def _dummy_logger() -> Any:
    """Return Lightning's own logger that does nothing."""
    try:
        from lightning.pytorch.loggers.logger import DummyLogger
    except ImportError:
        from pytorch_lightning.loggers.logger import DummyLogger  # type: ignore[assignment]
    return DummyLogger()
