"""Measurements during a training with Transformers' Trainer.

Needs ``pip install -e '.[transformers]'``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from newton_summary.history import History
from newton_summary.integrations.loggers import PREFIX, Logger
from newton_summary.integrations.monitor import Monitor
from newton_summary.integrations.sampling import sample_batches
from newton_summary.partition import unwrap
from newton_summary.probe.cutting import map_batch

try:
    from transformers import TrainerCallback
except ImportError:
    raise ImportError(
        "The callback needs Transformers: run pip install -e '.[transformers]' in your clone."
    ) from None

__all__ = ["SummaryCallback", "model_loss"]

HISTORY = "newton_summary.pt"  # beside the other files of a checkpoint


def model_loss(model: nn.Module, batch: Any) -> Tensor:
    """Return ``model(**batch).loss``, the batch moved to the device of the model.

    For language models that is the mean over the predicted tokens. The Trainer itself divides by
    the number of all labels, including the first of each sequence, which is not predicted: the loss
    it logs is smaller by that factor.

    To train with :class:`newton_summary.NewtonSummary`, pass it ``curvature=(model_loss, loader)``,
    and pass the optimizer to the Trainer: ``optimizers=(optimizer, scheduler)``, with None for the
    scheduler of the arguments.
    """
    output = model(**to_device(model, batch))
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if not isinstance(loss, Tensor):
        raise ValueError(
            f"{type(model).__name__} returned no loss for a batch of {', '.join(batch)}. Add "
            f"labels, or pass loss_fn=..., with loss_fn(model, batch) -> mean loss."
        )
    return loss


def to_device(model: nn.Module, batch: Any) -> Any:
    """Return a batch with its tensors on the device of the model."""
    device = next(model.parameters()).device
    return map_batch(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, batch)


class SummaryCallback(Monitor, TrainerCallback):
    """Measures the model of a Trainer every N epochs, logs the rates, writes the report.

    >>> from newton_summary.integrations.transformers import SummaryCallback
    >>> callback = SummaryCallback(every_n_epochs=5)  # Trainer(..., callbacks=[callback])

    It takes the arguments of :class:`~newton_summary.integrations.monitor.Monitor`. By default the
    loss is ``model(**batch).loss``, measured in training mode, the data are samples of the training
    data, and the report is in ``args.output_dir``. The training is bit for bit the same as without
    it.

    ``trainer.state.log_history`` gets ``newton_summary/loss``, ``newton_summary/predicted_change``
    and ``newton_summary/eta/<group>``. With ``report_to="tensorboard"`` they are also written to
    the folder ``runs/newton_summary`` of the output directory (a separate run next to the
    Trainer's; or to ``TENSORBOARD_LOGGING_DIR``), with ``report_to="wandb"`` to the current run,
    both with heat maps of Hbar. ``callback.history`` is saved in checkpoints.
    """

    def batch_loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the mean loss of a batch, by the model or by ``loss_fn``."""
        if self.loss_fn is None:
            return model_loss(model, batch)
        return self.loss_fn(model, to_device(model, batch))

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Find the logs, and the history of a resumed run; measure before the start."""
        self.check_report()
        self._found = _loggers(args) if state.is_world_process_zero else []
        saved = _checkpoint(args, state) / HISTORY
        if state.global_step and saved.is_file():
            self.history = History.load(saved)
        if self.is_due(state.epoch or 0):
            self._measure(args, state, **kwargs)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Measure the model after the epoch, if it is due."""
        if self.is_due(round(state.epoch, 6)):
            self._measure(args, state, **kwargs)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Add points to the curves of training and evaluation."""
        for name, value in (logs or {}).items():
            if name == "loss":
                self.history.add_value("train_loss", state.epoch, value)
            elif name.startswith("eval_") and not name.endswith(("_per_second", "_runtime")):
                self.history.add_value(name, state.epoch, value)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save the history with the checkpoint."""
        if state.is_world_process_zero:
            self.history.save(_checkpoint(args, state) / HISTORY)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Measure the trained model, and write the report."""
        if round(state.epoch, 6) not in self.history.epochs:
            self._measure(args, state, **kwargs)
        if state.is_world_process_zero:
            self.finish(args.output_dir)

    def _measure(self, args: Any, state: Any, **kwargs: Any) -> None:
        model = unwrap(kwargs["model"])
        if self.data is None:
            self.data = sample_batches(
                kwargs["train_dataloader"], self.num_batches, args.process_index, args.world_size
            )
        loggers = [_LogHistory(state), *self._found]
        optimizer = getattr(kwargs["optimizer"], "optimizer", kwargs["optimizer"])
        with _training_mode(model):
            self.measure(
                model,
                round(state.epoch or 0, 6),
                state.global_step,
                loggers=loggers,
                optimizer=optimizer,
            )


class _LogHistory:
    """The Trainer's own log, which it saves in trainer_state.json."""

    def __init__(self, state: Any):
        self.state = state

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Write numbers by name."""
        self.state.log_history.append({**values, "epoch": self.state.epoch or 0, "step": step})

    def figure(self, name: str, figure: Any, step: int) -> None:
        """Ignore pictures."""


@contextmanager
def _training_mode(model: nn.Module) -> Iterator[None]:
    """Switch to training mode, as the Trainer's steps do; models are loaded in eval mode."""
    modes = [(module, module.training) for module in model.modules()]
    model.train()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _checkpoint(args: Any, state: Any) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"


def _loggers(args: Any) -> list[Logger]:
    """Return the logs that the Trainer's arguments name."""
    found: list[Logger] = []
    if "tensorboard" in args.report_to:
        from torch.utils.tensorboard import SummaryWriter

        from newton_summary.integrations.tensorboard import TensorBoard

        beside = os.path.join(args.output_dir, "runs", PREFIX)
        found.append(TensorBoard(SummaryWriter(os.getenv("TENSORBOARD_LOGGING_DIR", beside))))
    if "wandb" in args.report_to:
        import wandb

        from newton_summary.integrations.wandb import WeightsAndBiases

        if wandb.run is not None:
            found.append(WeightsAndBiases(wandb.run))
    return found
