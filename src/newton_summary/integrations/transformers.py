"""Measurements while training with Transformers' Trainer.

Needs ``pip install -e '.[transformers]'``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from newton_summary.display.warn import warn_user
from newton_summary.integrations.loggers import PREFIX, Logger, NumbersOnly
from newton_summary.integrations.monitor import Monitor
from newton_summary.integrations.sampling import sample_batches
from newton_summary.partition import unwrap
from newton_summary.probe.eager import is_measuring
from newton_summary.probe.inputs import to_device

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

    >>> from types import SimpleNamespace
    >>> class Model(nn.Module):  # as those of Transformers are
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.head = nn.Linear(2, 3)
    ...     def forward(self, inputs, labels):
    ...         loss = nn.functional.cross_entropy(self.head(inputs), labels)
    ...         return SimpleNamespace(loss=loss)
    >>> batch = {"inputs": torch.zeros(4, 2), "labels": torch.tensor([0, 1, 2, 0])}
    >>> model_loss(Model(), batch).shape
    torch.Size([])
    """
    loss = _loss_of(model(**to_device(batch, next(model.parameters()).device)))
    if loss is None:
        raise ValueError(
            f"{type(model).__name__} returned no loss for a batch of {', '.join(batch)}. Add "
            f"labels, or pass loss_fn=..., with loss_fn(model, batch) -> mean loss."
        )
    return loss


def _loss_of(output: Any) -> Tensor | None:
    """Return the loss in what a model returns, if there is one."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    return loss if isinstance(loss, Tensor) else None


class SummaryCallback(Monitor, TrainerCallback):
    """Says every N epochs whether the Trainer's learning rates are right, and can steer them.

    >>> from newton_summary.integrations.transformers import SummaryCallback
    >>> callback = SummaryCallback(every_n_epochs=5)  # Trainer(..., callbacks=[callback])

    It takes the arguments of :class:`~newton_summary.integrations.monitor.Monitor`. By default the
    loss is ``model(**batch).loss``, measured in training mode, the data are samples of the training
    data, and the report is in ``args.output_dir``. The training is bit for bit the same as without
    it, unless it has ``adjust=True``: then a :class:`newton_summary.RateController` steers the
    rate, and the Trainer's schedule multiplies what it finds.

    ``trainer.state.log_history`` gets ``newton_summary/loss``, ``newton_summary/predicted_change``,
    ``newton_summary/real_change`` and ``newton_summary/factor/<group>``; with ``adjust``, in place
    of these but the loss, ``newton_summary/steered_lr`` and ``newton_summary/steered_factor``; with
    a ``partition``, ``newton_summary_groups/<group>``. With
    ``report_to="tensorboard"`` they are also written to the folder ``runs/newton_summary`` of the
    output directory (a separate run next to the Trainer's; or to ``TENSORBOARD_LOGGING_DIR``), with
    ``report_to="wandb"`` to the current run, both with heat maps of Hbar. The history and the
    controller are saved in checkpoints.
    """

    _watch: Any = None  # the hook that sees the losses of the first step
    _hook: Any = None  # that sees the batches
    _trained = False  # along the gradient of the model's own loss

    def batch_loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the mean loss of a batch, by the model or by ``loss_fn``."""
        try:
            if self.loss_fn is None:
                return model_loss(model, batch)
            return self.loss_fn(model, to_device(batch, next(model.parameters()).device))
        except (ValueError, TypeError, LookupError) as error:
            if lacking := self._lacking(batch):
                raise ValueError(
                    "adjust=True measures on the batches that the Trainer passes to the model, "
                    f"and these lack {lacking}: label smoothing, compute_loss_func or a "
                    "compute_loss of your own takes them out. Let the model compute its loss, or "
                    "use RateController in a training loop of your own."
                ) from error
            raise

    def _lacking(self, batch: Any) -> str:
        """Return the keys that samples of the training data have but a batch lacks."""
        first = self._sample()
        if not (isinstance(first, Mapping) and isinstance(batch, Mapping)):
            return ""
        return ", ".join(name for name in first if name not in batch)

    def _sample(self) -> Any:
        """Return a batch to measure on; not from a loader, which would draw random numbers."""
        data = self.data if self._samples is None else self._samples
        return data[0] if isinstance(data, Sequence) and data else data

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Find the loggers, and the history of a resumed run; measure before the start."""
        if state.is_world_process_zero:
            self.check_report(args.output_dir)
        self.console.enabled &= state.is_world_process_zero
        self._found = _loggers(args) if state.is_world_process_zero else []
        saved = _checkpoint(args, state) / HISTORY
        if state.global_step and saved.is_file():
            self.load_state_dict(torch.load(saved, weights_only=True))
        elif state.global_step:
            warn_user(
                f"There is no {saved}, so the callback resumes without the history"
                f"{' and the controller' if self.adjust else ''} of the training so far. It looks "
                "only in output_dir: resume from a checkpoint there that was saved with it."
            )
        model = unwrap(kwargs["model"])
        self.begin(model)
        for hook in (self._watch, self._hook):  # of a training that was interrupted
            if hook is not None:
                hook.remove()
        self._watch = self._hook = None
        if self.data is None:
            loader, rank = kwargs["train_dataloader"], args.process_index
            self._samples = sample_batches(loader, self.num_batches, rank, args.world_size)
        if args.label_smoothing_factor and self.adjust:
            self._check_unlabelled(model)
        if args.label_smoothing_factor and self.loss_fn is None:
            warn_user(
                f"The Trainer trains with label_smoothing_factor={args.label_smoothing_factor}, "
                "but the callback measures the loss of the model, without it. Pass the loss you "
                "train with as loss_fn=..., with loss_fn(model, batch) -> mean loss."
            )
        watched = self.loss_fn is None and not args.label_smoothing_factor
        batches = state.max_steps * args.gradient_accumulation_steps
        self.plan(model, batches, state.num_train_epochs, state.epoch or 0)
        self.steer(_plain(kwargs["optimizer"]), model, self.batch_loss)
        if self.is_due(state.epoch or 0):
            self._measure(args, state, **kwargs)
        if watched and not args.torch_compile:  # a hook would be compiled too
            self._trained = False
            self._watch = model.register_forward_hook(self._watch_loss)
        if self.adjust:
            self._waiting: list[Any] = []
            self._hook = model.register_forward_pre_hook(self._note_batch, with_kwargs=True)

    def _check_unlabelled(self, model: nn.Module) -> None:
        """Raise if steering needs the labels that label smoothing takes out of the batches."""
        sample = self._sample()
        if isinstance(sample, Mapping):
            with torch.no_grad(), _mode(model, training=False):
                self.batch_loss(model, {k: x for k, x in sample.items() if k != "labels"})

    def _note_batch(self, model: nn.Module, args: Any, batch: dict[str, Any]) -> None:
        """Keep a training batch: the Trainer does not pass it to callbacks."""
        if model.training and not is_measuring():
            # Without it the loss is the mean over this batch.
            kept = {name: x for name, x in batch.items() if name != "num_items_in_batch"}
            self._waiting.append(kept)

    def _watch_loss(self, model: nn.Module, args: Any, output: Any) -> None:
        """Note it if the gradient passes through the model's loss: callbacks see no trainer."""
        loss = _loss_of(output)
        if model.training and not is_measuring() and loss is not None and loss.requires_grad:
            loss.register_hook(self._note_gradient)  # type: ignore[no-untyped-call]

    def _note_gradient(self, gradient: Tensor) -> None:
        self._trained = True

    def _check_trained(self) -> None:
        """Warn after the first backward pass if it was not that of the model's loss."""
        self._watch.remove()
        self._watch = None
        if not self._trained:
            warn_user(
                "The Trainer trains with compute_loss_func or a compute_loss of its own, but the "
                "callback measures the loss of the model, model(**batch).loss. Pass the loss you "
                "train with as loss_fn=..., with loss_fn(model, batch) -> mean loss."
            )

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Measure the last step, on the batches of the next one."""
        if self._watch is not None:
            self._check_trained()
        if self.controller is not None and self._waiting:
            epoch = state.epoch or 0
            self.before_step(self._waiting, epoch, state.global_step, self._logs(state))
            self._waiting = []

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
        """Save the history with the checkpoint, if it is where callbacks can know it to be.

        In a search over hyperparameters each trial has a folder of its own.
        """
        saved = _checkpoint(args, state) / HISTORY
        if state.is_world_process_zero and saved.parent.is_dir():
            torch.save(self.state_dict(), saved)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Measure the trained model, and write the report."""
        if self.has_time(round(state.epoch, 6)):
            self._measure(args, state, **kwargs)
        if self.controller is not None:
            self._hook.remove()
        self.stop_steering()
        if state.is_world_process_zero:
            self.finish(args.output_dir)

    def _measure(self, args: Any, state: Any, **kwargs: Any) -> None:
        model = unwrap(kwargs["model"])
        epoch, optimizer = round(state.epoch or 0, 6), _plain(kwargs["optimizer"])
        logs = self._logs(state)
        with _mode(model, training=True):  # as for the Trainer's steps
            self.measure(model, epoch, state.global_step, loggers=logs, optimizer=optimizer)

    def _logs(self, state: Any) -> list[Logger]:
        """Return the Trainer's own log, which it saves in trainer_state.json, and the others."""

        def write(values: Mapping[str, float], step: int) -> None:
            state.log_history.append({**values, "epoch": state.epoch or 0, "step": step})

        return [NumbersOnly(write), *self._found]


@contextmanager
def _mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Put a model into training or evaluation mode for a while; models are loaded in the latter."""
    modes = [(module, module.training) for module in model.modules()]
    model.train(training)
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def _plain(optimizer: Any) -> Any:
    """Return the torch optimizer inside accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)


def _checkpoint(args: Any, state: Any) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"


def _loggers(args: Any) -> list[Logger]:
    """Return the loggers named in the Trainer's arguments."""
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
