"""Measurements during a training with Lightning: ``pip install -e '.[lightning]'``.

Works with the packages ``lightning`` and ``pytorch_lightning``, which have the same contents.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from newton_summary.integrations.loggers import PREFIX, Logger, NumbersOnly
from newton_summary.integrations.monitor import Monitor
from newton_summary.integrations.sampling import sample_batches
from newton_summary.integrations.tensorboard import TensorBoard
from newton_summary.integrations.wandb import WeightsAndBiases
from newton_summary.probe.state import PlainAttributes

try:
    from lightning.pytorch import Callback
    from lightning.pytorch.loggers.logger import DummyLogger
except ImportError:
    try:
        from pytorch_lightning import Callback  # type: ignore[assignment]
        from pytorch_lightning.loggers.logger import DummyLogger  # type: ignore[assignment]
    except ImportError:
        raise ImportError(
            "The callback needs Lightning: run pip install -e '.[lightning]' in your clone."
        ) from None

__all__ = ["SummaryCallback", "training_loss"]


def training_loss(module: Any, batch: Any) -> Tensor:
    """Return the loss of ``training_step`` for a batch, without logging and without a trace.

    The batch is moved to the device as Lightning does it. To train with
    :class:`newton_summary.NewtonSummary`, return it from ``configure_optimizers`` with
    ``curvature=(training_loss, loader)``.

    Args:
        module: A LightningModule with automatic optimization, attached to a trainer.
        batch: A batch of the data loader.

    >>> from lightning.pytorch import LightningModule
    >>> from newton_summary import NewtonSummary
    >>> class Model(LightningModule):
    ...     def configure_optimizers(self):
    ...         return NewtonSummary(self, curvature=(training_loss, self.train_dataloader()))
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
            f"training_step of {type(module).__name__} returned {type(output).__name__}, not a "
            "loss. Pass data=... whose batches all have a loss."
        )
    return loss


def to_device(module: Any, batch: Any) -> Any:
    """Return a batch as the training loop passes it to ``training_step``."""
    batch = module.trainer.precision_plugin.convert_input(batch)
    batch = module.on_before_batch_transfer(batch, 0)
    return module.trainer.strategy.batch_to_device(batch)


@contextmanager
def quiet(module: Any) -> Iterator[None]:
    """Hide from training what a module logs and stores in attributes.

    Attributes of the module and its submodules are restored, such as counters and lists of outputs,
    with the contents of containers, and tensors, such as those of metrics (torchmetrics).
    """
    trainer, loggers = module.trainer, module.trainer.loggers
    with torch._C.DisableTorchFunction():  # not part of what a measurement records
        attributes = PlainAttributes(list(module.modules()))
        tensors = [(tensor.data, tensor.clone()) for tensor in attributes.tensors()]
    try:
        vars(module).update(dict.fromkeys(("log", "log_dict"), lambda *_, **__: None))
        if loggers:
            trainer.loggers = [DummyLogger()]
        yield
    finally:
        trainer.loggers = loggers
        with torch._C.DisableTorchFunction():
            attributes.restore()
            for tensor, before in tensors:
                tensor.copy_(before)


class SummaryCallback(Monitor, Callback):
    """Says every N epochs whether the trainer's learning rates are right, and can steer them.

    >>> from newton_summary.integrations.lightning import SummaryCallback
    >>> callback = SummaryCallback(every_n_epochs=5)  # Trainer(callbacks=[callback])

    It takes the arguments of :class:`~newton_summary.integrations.monitor.Monitor`. By default the
    loss is that of ``training_step``, the data are samples of the training data, and the report is
    in the directory of the trainer's logger. What ``training_step`` logs or stores in attributes of
    the module is hidden from training, which is bit for bit the same as without the callback,
    unless ``adjust=True``: then a :class:`newton_summary.RateController` steers the rate.

    The trainer's loggers get ``newton_summary/loss``, ``newton_summary/predicted_change``,
    ``newton_summary/real_change`` and ``newton_summary/factor/<group>``, as do
    ``callback_metrics``; with ``adjust``, in place of these but the loss,
    ``newton_summary/steered_lr`` and ``newton_summary/steered_factor``; with a ``partition``,
    ``newton_summary_groups/<group>`` and, in TensorBoard and W&B, heat maps of Hbar. The history
    and the controller are saved in checkpoints and restored from them.
    """

    _sum: Any = 0.0  # of the losses of this epoch, and their number
    _count = 0
    _taken: Mapping[str, Any] = {}  # the metrics of the epoch before
    _waiting: list[Any]  # batches of the gradient so far
    _found: list[Logger] | None = None  # the trainer's logs

    def batch_loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the mean loss of a batch, by ``training_step`` or by ``loss_fn``."""
        return self._own_loss(model, to_device(model, batch))

    def _own_loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the mean loss of a batch that is already on its device."""
        if self.loss_fn is None:
            return step_loss(model, batch)
        with quiet(model):
            return self.loss_fn(model, batch)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Check that the report can be written; start to steer."""
        directory = self._directory(trainer)
        if trainer.is_global_zero and not trainer.fast_dev_run:
            self.check_report(directory)
        self.console.enabled &= trainer.is_global_zero
        self.begin(pl_module, goes_on=trainer.global_step > 0)
        steps, accumulated = trainer.estimated_stepping_batches, trainer.accumulate_grad_batches
        last = math.inf if trainer.max_epochs < 0 else trainer.max_epochs
        if math.isfinite(trainer.num_training_batches):  # max_steps may come first
            last = steps / math.ceil(trainer.num_training_batches / accumulated)
        self.plan(pl_module, steps * accumulated, last, trainer.current_epoch)
        self._waiting, self._found = [], None
        if self.adjust:
            if len(trainer.optimizers) != 1 or not pl_module.automatic_optimization:
                raise ValueError(
                    "adjust=True needs one optimizer and automatic optimization, but "
                    f"{type(pl_module).__name__} has {len(trainer.optimizers)}, and "
                    f"{'automatic' if pl_module.automatic_optimization else 'manual'}"
                    " optimization. Steering is for one optimizer that lowers one loss. In a "
                    "GAN the loss of each player moves with the other: keep the rates there."
                )
            self.steer(trainer.optimizers[0], pl_module, self._own_loss)

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        """Measure the last step, before the closure that computes the gradient of the next."""
        if self.controller is None:
            return
        self._waiting.append(batch)
        whole = (batch_idx + 1) % trainer.accumulate_grad_batches == 0
        if whole or trainer.is_last_batch:
            epoch = trainer.current_epoch + batch_idx / trainer.num_training_batches
            self.before_step(self._waiting, epoch, trainer.global_step, self._logs(trainer))
            self._waiting = []

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Measure the model before the epoch, if it is due."""
        self._sum, self._count = 0.0, 0
        if self.is_due(trainer.current_epoch):
            self._measure(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Add up the loss, on its device."""
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, Tensor):  # Lightning has divided it, to accumulate gradients
            self._sum = self._sum + loss.detach() * trainer.accumulate_grad_batches
            self._count += 1

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Add points to the curves: the mean loss, and what the module and callbacks log."""
        epoch = trainer.current_epoch + 1
        values = {} if not self._count else {"train_loss": self._sum / self._count}
        values.update(trainer.callback_metrics)
        for name, value in values.items():
            # With on_step and on_epoch Lightning has a metric three times: x, x_step, x_epoch.
            again = name.endswith(("_step", "_epoch")) and name.rpartition("_")[0] in values
            # It also keeps old values, such as the result of an earlier validation.
            old = self._taken.get(name) is value
            if not again and not old and not name.startswith(PREFIX):
                self.history.add_value(name, epoch, float(value))
        self._taken = values

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Measure the trained model, and write the report."""
        if self.has_time(trainer.current_epoch):
            self._measure(trainer, pl_module)
        self.stop_steering()
        self._write(trainer)

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Keep the history where a checkpoint is loaded for a test, not to resume from it."""
        if trainer.state.fn != "fit":
            checkpoint["callbacks"].pop(self.state_key, None)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Write the report so far; not with several processes, since others may have exited."""
        if trainer.world_size == 1:
            self._write(trainer)

    def _measure(self, trainer: Any, module: Any) -> None:
        if self.data is None and self._samples is None:
            self._samples = sample_batches(
                trainer.train_dataloader, self.num_batches, trainer.global_rank, trainer.world_size
            )
        self.measure(
            module,
            trainer.current_epoch,
            trainer.global_step,
            loggers=self._logs(trainer),
            optimizer=next(iter(trainer.optimizers), None),
        )

    def _logs(self, trainer: Any) -> list[Logger]:
        if self._found is None:

            def write(values: Mapping[str, float], step: int) -> None:
                """Write to the trainer's metrics, which other callbacks can watch."""
                # A factor at a limit has no error, and the trainer keeps that of the one before.
                for name in values:
                    trainer.callback_metrics.pop(name.replace("/factor/", "/factor_error/"), None)
                trainer.callback_metrics.update({k: Tensor([v])[0] for k, v in values.items()})

            self._found = [NumbersOnly(write)]
            if trainer.is_global_zero:
                self._found += [_adapted(logger) for logger in trainer.loggers]
        return self._found

    @staticmethod
    def _directory(trainer: Any) -> str:
        """Return where the report goes, by a collective call."""
        return str(trainer.log_dir or trainer.default_root_dir)

    def _write(self, trainer: Any) -> None:
        directory = self._directory(trainer)
        if trainer.is_global_zero and not trainer.fast_dev_run:
            self.finish(directory)


def _adapted(logger: Any) -> Logger:
    """Wrap a Lightning logger as one of ours."""
    kind = type(logger).__name__
    if kind == "TensorBoardLogger":
        return TensorBoard(logger.experiment)
    if kind == "WandbLogger":
        return WeightsAndBiases(logger.experiment)
    return NumbersOnly(lambda values, step: logger.log_metrics(dict(values), step=step))
