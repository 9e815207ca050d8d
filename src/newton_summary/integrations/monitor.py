"""Measure a model repeatedly during its training: what all callbacks share."""

from __future__ import annotations

import importlib.util
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import newton_summary
from newton_summary.display.warn import warn_user
from newton_summary.errors import CannotDifferentiate
from newton_summary.history import History, Measured, Trial
from newton_summary.integrations.loggers import Logger, log_measured
from newton_summary.measuring.lambda_int import suggest_lambda_int
from newton_summary.measuring.measurement import summarize
from newton_summary.measuring.trial_steps import step_trials
from newton_summary.optimizer import NewtonSummary
from newton_summary.page import report
from newton_summary.partition import Partition, Spec, unwrap
from newton_summary.probe.probe import LossFn
from newton_summary.solver import LearningRates, learning_rates
from newton_summary.summary import Summary

REPORT = "newton_summary.html"
UNNAMED = "run"


class Monitor:
    """Measures a model during its training, keeps a history, logs, and writes the report.

    In a training loop of your own:

    >>> from newton_summary.integrations.monitor import Monitor
    >>> _ = torch.manual_seed(0)
    >>> model, x, y = nn.Linear(3, 1), torch.randn(64, 3), torch.randn(64, 1)
    >>> def loss_fn(model, batch):
    ...     return (model(batch[0]) - batch[1]).square().mean()
    >>> monitor = Monitor(loss_fn=loss_fn, data=(x, y), lambda_int=0.0)
    >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> for epoch in range(3):
    ...     _ = monitor.measure(model, epoch)
    ...     loss_fn(model, (x, y)).backward()
    ...     sgd.step()
    ...     sgd.zero_grad()
    >>> monitor.history.epochs
    [0.0, 1.0, 2.0]

    and at the end ``monitor.write_report("report.html")``. The callbacks are monitors that know
    where to find model, loss, data and logs.

    The first measurement raises an error if its arguments are wrong. Later ones only warn, once, so
    that a training continues although it has diverged or memory is short.

    Args:
        every_n_epochs: How often a callback measures: before the training, after every N epochs,
            and at the end.
        data: The data to measure on, as for :func:`newton_summary.summarize`. By default callbacks
            draw samples from the training data, once, and measure on these.
        num_batches: The number of batches of samples to draw.
        loss_fn: ``loss_fn(model, batch)`` returns the mean loss of a batch. Callbacks have a
            default.
        partition: The groups, as for :func:`newton_summary.summarize`.
        lambda_int: Strength of the cubic term, as for :func:`newton_summary.learning_rates`. By
            default the first measurement finds it with :func:`newton_summary.suggest_lambda_int`
            (11 more passes over its data), and the others use it; 0 with ``order=2``.
        report: Where callbacks write the report at the end; None for no report. A relative path
            starts in the directory that the framework writes to.
        loggers: Logs to write to, besides those that a callback finds.
        figures: Whether to log heat maps of Hbar too.
        trials: Whether to try the steps on the same data, so that the report can show predicted
            against real changes of the loss. Takes five more passes over the data.
        name: Name of the history, the title of the report; by default the type of the model.
        **options: More arguments for :func:`newton_summary.summarize`, such as ``microbatch``,
            ``backend`` or ``stderr``.

    Attributes:
        history: The measurements, with the curves of the training.
    """

    def __init__(
        self,
        every_n_epochs: int = 1,
        *,
        data: Any = None,
        num_batches: int = 8,
        loss_fn: LossFn | None = None,
        partition: Partition | Spec = "canonical",
        lambda_int: float | None = None,
        report: str | Path | None = REPORT,
        loggers: Sequence[Logger] = (),
        figures: bool = True,
        trials: bool = True,
        name: str | None = None,
        **options: Any,
    ):
        for what, number in (("every_n_epochs", every_n_epochs), ("num_batches", num_batches)):
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise ValueError(f"{what}={number!r}: write a whole number, 1 or more.")
        super().__init__()  # of the framework's callback
        self.every_n_epochs, self.num_batches = every_n_epochs, num_batches
        self.data, self.loss_fn = data, loss_fn
        self.partition, self.lambda_int = partition, lambda_int
        self.report, self.figures, self.trials = report, figures, trials
        self.loggers = list(loggers)
        self.options = {"order": 2 if lambda_int == 0 else 3, **options}
        if lambda_int is None and self.options["order"] < 3:
            self.lambda_int = 0.0
        self.history = History(name or UNNAMED)
        self._loss = self.batch_loss  # one object: how to split batches is remembered by loss
        self._warned = False
        self._last_used: Summary | None = None  # the optimizer's, as it was last added

    def batch_loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the mean loss of a batch."""
        if self.loss_fn is None:
            raise ValueError("There is no loss to measure: pass loss_fn=... to the monitor.")
        return self.loss_fn(model, batch)

    def is_due(self, epoch: float) -> bool:
        """Return whether to measure after this many epochs."""
        return epoch % self.every_n_epochs == 0 and epoch not in self.history.epochs

    def measure(
        self,
        model: nn.Module,
        epoch: float,
        step: int = 0,
        *,
        data: Any = None,
        loggers: Sequence[Logger] = (),
        optimizer: Optimizer | None = None,
    ) -> Measured | None:
        """Measure the model, add it to the history, and write to the logs.

        Args:
            model: The model; it is not changed.
            epoch: Epochs done, not necessarily a whole number.
            step: Steps done, for the logs.
            data: Data to use instead of the monitor's.
            loggers: Logs besides the monitor's own.
            optimizer: The optimizer of the model. If it is :class:`newton_summary.NewtonSummary`
                with the same groups, the last summary that it used is added as well, once.

        Returns:
            The measurement; None if it failed and was not the first.
        """
        data = self.data if data is None else data
        if data is None:
            raise ValueError("There is nothing to measure on: pass data=... to the monitor.")
        try:
            summary = summarize(model, self._loss, data, partition=self.partition, **self.options)
            rates = self._rates(model, data, summary)
            tried = self._try(model, data, summary, rates) if self.trials else ()
            self.history.add(float(epoch), summary, rates, trials=tried)
        except (ValueError, RuntimeError, CannotDifferentiate) as error:
            if not self.history.measured:
                raise
            self._warn(
                f"The measurement after epoch {epoch:g} failed, and the training continues: {error}"
            )
            return None
        if not rates.ok:
            self._warn(f"The rates after epoch {epoch:g} are unusable. {rates.detail}")
        measured = self.history.measured[-1]
        self._note_facts(model, measured, optimizer)
        new = [measured]
        if isinstance(optimizer, NewtonSummary):
            last, used = optimizer.last_summary, optimizer.last_rates
            same = last is self._last_used  # nothing was measured in between
            if last is not None and used is not None and not same and last.names == summary.names:
                self.history.add(float(epoch), last, used, kind="optimizer")
                new.append(self.history.measured[-1])
            self._last_used = last
        for logger in (*self.loggers, *loggers):
            for entry in new:
                log_measured(logger, entry, step, self.figures)
        return measured

    def write_report(self, path: str | Path | None = None) -> Path | None:
        """Write the report.

        Args:
            path: The file to write; by default the monitor's ``report``.

        Returns:
            The path; None without a measurement or without a path.
        """
        path = self.report if path is None else path
        if path is None or not self.history.measured:
            return None
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        report(self.history, path)
        return path

    def finish(self, directory: str | Path) -> None:
        """Write the report at the end of a training, and print its path to standard error."""
        path = None if self.report is None else self.write_report(Path(directory) / self.report)
        if path is not None:
            print(f"\nnewton_summary: wrote {path}", file=sys.stderr)

    def check_report(self) -> None:
        """Raise at the start of a training if the report at its end cannot be written."""
        if self.report is not None and importlib.util.find_spec("plotly") is None:
            raise ImportError(
                "The report at the end of the training needs plotly: "
                "run pip install -e '.[report]' in your clone, or pass report=None."
            )

    def _rates(self, model: nn.Module, data: Any, summary: Summary) -> LearningRates:
        if self.lambda_int is None and "lambda_int" in self.history.facts:  # of a resumed run
            self.lambda_int = float(self.history.facts["lambda_int"])
        if self.lambda_int is not None:
            return learning_rates(summary, self.lambda_int)
        found = suggest_lambda_int(model, self._loss, data, summary, **self._for_trials())
        if found.best.real < 0:  # else try again next time
            self.lambda_int = found.lambda_int  # one for all, so that rates can be compared
        return found.rates

    def _try(
        self, model: nn.Module, data: Any, summary: Summary, rates: LearningRates
    ) -> tuple[Trial, ...]:
        return step_trials(model, self._loss, data, summary, rates, **self._for_trials())

    def _for_trials(self) -> dict[str, Any]:
        same = ("direction", "microbatch", "distributed")
        return {name: self.options[name] for name in same if name in self.options}

    def _warn(self, message: str) -> None:
        if not self._warned:
            self._warned = True
            warn_user(f"{message} (Shown once.)")

    def _note_facts(
        self, model: nn.Module, measured: Measured, optimizer: Optimizer | None
    ) -> None:
        """Note in the history how it was measured."""
        model = unwrap(model)
        if self.history.name == UNNAMED:
            self.history.name = type(model).__name__
        params = [p for p in model.parameters() if p.requires_grad]
        summary = measured.summary
        self.history.facts |= {
            "model": f"{type(model).__name__}, {sum(p.numel() for p in params):,} parameters",
            "backend": summary.backend,
            "device": str(params[0].device),
            "newton_summary": newton_summary.__version__,
            "torch": str(torch.__version__),  # a subclass of str, which checkpoints refuse
            "python": platform.python_version(),
        }
        if self.lambda_int is not None:
            self.history.facts["lambda_int"] = f"{self.lambda_int:g}"
        if optimizer is not None:
            self.history.facts["trained with"] = type(optimizer).__name__

    # --- checkpoints ------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the history as plain values and tensors."""
        return {"history": self.history.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the history by a saved one."""
        self.history = History.from_state_dict(state["history"])
