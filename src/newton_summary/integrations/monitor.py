"""Measure a model repeatedly during training: what all callbacks share."""

from __future__ import annotations

import importlib.util
import math
import platform
from collections import UserList
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import newton_summary
from newton_summary.display.names import check_arguments, nearest
from newton_summary.display.warn import warn_user
from newton_summary.errors import CannotDifferentiate
from newton_summary.history import History, Measured, Trial
from newton_summary.integrations.budget import Budget
from newton_summary.integrations.console import Console, is_too_low, sentence, steered_sentence
from newton_summary.integrations.loggers import (
    PREFIX,
    Logger,
    advice_scalars,
    log_figures,
    rate_scalars,
    scalars_of,
)
from newton_summary.measuring.advice import Advice, below_peak, suggest_lrs
from newton_summary.measuring.measurement import summarize
from newton_summary.measuring.trial_steps import step_trials
from newton_summary.measuring.tried_rates import learning_rates
from newton_summary.optimizer import NewtonSummary
from newton_summary.optimizer.checks import SET_POINTS
from newton_summary.optimizer.controller import PERIOD, RateController
from newton_summary.page import report
from newton_summary.partition import Partition, Spec, unwrap
from newton_summary.partition.schemes import named_spec
from newton_summary.probe.probe import LossFn
from newton_summary.solver import LearningRates, refutation
from newton_summary.storage.writing import cannot_write
from newton_summary.summary import Summary

REPORT = "newton_summary.html"
UNNAMED = "run"
LOSS = "measured loss"  # a curve
ASKED_FIRST = {"on_init_end": "transformers", "state_key": "lightning"}  # of a trainer's callbacks


class Monitor:
    """Measures a model during training, keeps a history, logs, and writes the report.

    Given the optimizer, it measures along its next step, and says by which factor each of its
    learning rates should change (:func:`newton_summary.suggest_lrs`); without one, it measures
    along the gradient. In your own training loop:

    >>> from newton_summary.integrations.monitor import Monitor
    >>> _ = torch.manual_seed(0)
    >>> model, x, y = nn.Linear(3, 1), torch.randn(64, 3), torch.randn(64, 1)
    >>> def loss_fn(model, batch):
    ...     return (model(batch[0]) - batch[1]).square().mean()
    >>> monitor = Monitor(loss_fn=loss_fn, data=(x, y), console=False)
    >>> sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    >>> for epoch in range(3):
    ...     _ = monitor.measure(model, epoch, optimizer=sgd)
    ...     loss_fn(model, (x, y)).backward()
    ...     sgd.step()
    ...     sgd.zero_grad()
    >>> monitor.history.epochs
    [0.0, 1.0, 2.0]
    >>> monitor.advice["group0"].verdict
    'raise'

    and at the end ``monitor.write_report("report.html")``. The callbacks are monitors that find
    model, optimizer, loss, data and logs themselves.

    The first measurement raises an error if its arguments are wrong. Later ones only warn, once, so
    that training continues even if it has diverged or memory is short.

    Args:
        every_n_epochs: How often a callback measures: before training, after every N epochs, and at
            the end.
        data: The data to measure on, as for :func:`newton_summary.summarize`. By default callbacks
            draw samples from the training data, once, and measure on these.
        num_batches: The number of batches of samples to draw; a measurement's time grows with it.
        loss_fn: ``loss_fn(model, batch)`` returns the mean loss of a batch; callbacks have a
            default.
        partition: Groups to measure besides those of the optimizer, such as ``"layers"``. Without
            an optimizer, by default one for each tensor.
        lambda_int: Strength of the cubic term; by default found by trials, and found again when a
            trial fails.
        adjust: Whether callbacks steer the learning rate during training, with a
            :class:`newton_summary.RateController` and its careful ``set_point=1.0``; or other
            options for it, as ``{"set_point": 0.8}``. A measurement is then that of the loss
            alone, and of the groups of a ``partition``.
        budget: The most time that measuring may take, as a share of training time: callbacks then
            measure in fewer epochs, on fewer batches, with fewer groups.
        report: Where callbacks write the report at the end; None for no report. A relative path is
            relative to the directory that the framework writes to.
        loggers: Loggers to write to, besides those that a callback finds.
        figures: Whether to log heat maps and a chart of the rates too.
        console: Whether to write a line about each measurement to standard error.
        name: Name of the history, the title of the report; by default the type of the model.
        **options: More arguments for :func:`newton_summary.summarize`, such as ``microbatch`` or
            ``backend``.

    Attributes:
        history: The measurements, with the training curves.
        advice: The last advice on the optimizer's learning rates.
        controller: The controller that steers them, with ``adjust=True``; after the training, to
            read.
    """

    advice: Advice | None = None
    controller: RateController | None = None

    def __init__(
        self,
        every_n_epochs: int = 1,
        *,
        data: Any = None,
        num_batches: int = 8,
        loss_fn: LossFn | None = None,
        partition: Partition | Spec | None = None,
        lambda_int: float | None = None,
        adjust: bool | Mapping[str, Any] = False,
        budget: float | None = None,
        report: str | Path | None = REPORT,
        loggers: Sequence[Logger] = (),
        figures: bool = True,
        console: bool = True,
        name: str | None = None,
        **options: Any,
    ):
        for what, number in (("every_n_epochs", every_n_epochs), ("num_batches", num_batches)):
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise ValueError(f"{what}={number!r}: expected a whole number, 1 or more.")
        if not isinstance(adjust, bool | Mapping):
            raise TypeError(
                f"adjust={adjust!r}: expected True or False, or options of RateController, such as "
                '{"set_point": 0.8}.'
            )
        steering = RateController.__init__.__kwdefaults__ or {}
        for option in adjust if isinstance(adjust, Mapping) else ():
            if option not in steering:
                raise TypeError(
                    f"adjust={adjust!r}: RateController has no option {option!r}."
                    f"{nearest(option, steering)} Its options are {', '.join(steering)}."
                )
        check_arguments(type(self), options, summarize.__kwdefaults__ or {})
        if isinstance(partition, str):
            named_spec(partition)
        super().__init__()  # of the framework's callback
        self.every_n_epochs, self.num_batches = every_n_epochs, num_batches
        self.data, self.loss_fn = data, loss_fn
        self.lambda_int = lambda_int
        self.adjust = adjust or isinstance(adjust, Mapping)  # without options: those by default
        self.budget = Budget(budget)
        if self.adjust and self.budget.share is not None:
            self.budget.share /= 2  # the other half is the controller's
        self.report, self.figures = report, figures
        self.loggers, self.console = list(loggers), Console(console)
        self.options = options
        self._given = name or UNNAMED, partition
        self._loss = self.batch_loss  # one object: how to split batches is remembered by loss
        self._first, self._last = 0.0, math.inf  # epochs of the training, if known
        self._seen: int | None = None  # id of the model of the last training
        self._samples: UserList[Any] | None = None  # of the training data
        self._forget()

    if not TYPE_CHECKING:  # or any attribute would do

        def __getattr__(self, name: str) -> Any:
            """Tell a trainer that needs the callback of another framework."""
            told = f"{type(self).__module__}.{type(self).__name__} has no attribute {name!r}."
            if framework := ASKED_FIRST.get(name):
                told += f" Use newton_summary.integrations.{framework}.SummaryCallback here."
            raise AttributeError(told)

    def _forget(self) -> None:
        """Forget all measurements."""
        name, self.partition = self._given
        self.history, self.advice, self.controller = History(name), None, None
        self.budget.last = 0.0
        self._warned = self._skipped = False
        self._last_used: Summary | None = None  # the optimizer's, as it was last added
        self._batches = 0  # measured on last
        self._steered: Mapping[str, Any] | None = None  # state of a controller not yet made
        self._resumes = False  # from a checkpoint

    def begin(self, model: nn.Module, goes_on: bool = False) -> None:
        """Prepare for a training: start afresh after another one.

        Not if it resumes from a checkpoint, or if a trainer ``goes_on`` with the same model.
        """
        self.stop_steering()  # of a training that was interrupted
        same = goes_on and self._seen == id(model)
        if self._seen is not None and not (self._resumes or same):
            if self._epochs:
                self.console.say("a new training: the measurements of the one before are left out")
            self._forget()
        self._seen, self._resumes = id(model), False
        self._samples = None

    def stop_steering(self) -> None:
        """Leave the optimizer to itself; the controller stays, to read."""
        if self.controller is not None:
            self.controller.detach()

    def batch_loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the mean loss of a batch."""
        if self.loss_fn is None:
            raise ValueError("There is no loss to measure: pass loss_fn=... to the monitor.")
        return self.loss_fn(model, batch)

    def is_due(self, epoch: float) -> bool:
        """Return whether to measure after this many epochs; tell the first time it is too soon."""
        if epoch % self.every_n_epochs:
            return False
        is_due = self.has_time(epoch)
        if epoch and not (is_due or epoch in self._epochs or self._skipped):
            self._skipped = True
            pace = (epoch - self._first) / max(self.budget.training, 1e-9)
            soonest = self._first + self.budget.needed(self._batches) * pace
            later = min(math.ceil(soonest / self.every_n_epochs) * self.every_n_epochs, self._last)
            then = f"next measurement after epoch {later:g} or so"
            if soonest > self._last:
                then = "the training is probably too short for another measurement"
            self.console.say(f"epoch {epoch:g}: not measured, for the budget; {then}")
        return is_due

    def has_time(self, epoch: float) -> bool:
        """Return whether nothing was measured yet after this many epochs, and the budget allows."""
        return epoch not in self._epochs and self.budget.allows(self._batches)

    @property
    def _epochs(self) -> list[float]:
        """When something was measured, if only the loss."""
        return [*self.history.epochs, *(epoch for epoch, _ in self.history.curves.get(LOSS, ()))]

    def plan(self, model: nn.Module, batches: float, epochs: float, first: float = 0.0) -> None:
        """Prepare for training to some epoch, from the first: choose groups the budget allows."""
        self.budget.start()
        self._first, self._last = first, epochs
        if self.partition is not None:
            given = self.partition
            self.partition = self.budget.affordable(model, given, batches)
            if self.partition is not given:
                groups = "the optimizer's groups" if self.partition is None else self.partition
                self.console.say(f"the budget allows {groups} instead of {given}")

    # --- measurements -----------------------------------------------------------------------------

    def measure(
        self,
        model: nn.Module,
        epoch: float,
        step: int | None = None,
        *,
        data: Any = None,
        loggers: Sequence[Logger] = (),
        optimizer: Optimizer | None = None,
    ) -> Measured | None:
        """Measure the model, add it to the history, and write to the logs.

        Args:
            model: The model; it is not changed.
            epoch: Epochs done, not necessarily a whole number.
            step: Steps done, for the logs; by default they count epochs.
            data: Data to use instead of the monitor's.
            loggers: Loggers besides the monitor's own.
            optimizer: The optimizer of the model, along whose next step to measure; by default the
                one that is steered, if there is one. Along the gradient with
                :class:`newton_summary.NewtonSummary`, whose last summary is added as well, once, if
                it has the same groups.

        Returns:
            The measurement; None if it failed and was not the first, or is that of the loss alone.
        """
        if optimizer is None and self.controller is not None:
            optimizer = self.controller.optimizer
        along = optimizer is not None and not isinstance(optimizer, NewtonSummary)
        if along and "direction" in self.options:
            raise ValueError(
                f"The direction is the next step of {type(optimizer).__name__}: leave out "
                "direction=..., or, in a loop of your own, the optimizer."
            )
        step = int(epoch) if step is None else step
        data = self._data(epoch) if data is None else data
        if data is None:
            raise ValueError("There is nothing to measure on: pass data=... to the monitor.")
        try:
            with self.budget.measuring(), self.console.patience(f"after epoch {epoch:g}"):
                if self.controller is not None and self.partition is None:
                    self._measure_loss(float(epoch), model, data, optimizer)
                    rates = None
                else:
                    rates = self._measure_at(float(epoch), model, data, optimizer)
        except (ValueError, RuntimeError, CannotDifferentiate) as error:
            if not self._epochs:
                raise
            self._warn(f"The measurement after epoch {epoch:g} failed; training continues: {error}")
            return None
        if rates is None:
            for logger in (*self.loggers, *loggers):
                logger.scalars({f"{PREFIX}/loss": self.history.curves[LOSS][-1][1]}, step)
            return None
        if not rates.ok:
            self._warn(f"The rates after epoch {epoch:g} are unusable. {rates.detail}")
        measured = self.history.measured[-1]
        if self.advice is None and measured.trial is not None and measured.refuted:
            _, predicted, real = measured.trial
            self._warn(f"After epoch {epoch:g}: {refutation(predicted, real)}")
        self._note_facts(model, measured.summary, optimizer)
        new = [measured]
        if isinstance(optimizer, NewtonSummary):
            last, names = optimizer.last_summary, measured.summary.names
            same = last is self._last_used  # nothing was measured in between
            if last is not None and not same and last.names == names:
                new += [replace(m, epoch=float(epoch)) for m in optimizer.to_history().measured]
                self.history.measured += new[1:]
            self._last_used = last
        values: dict[str, float] = {}
        if self.advice is not None and not (self.adjust or is_too_low(self.advice)):
            values = advice_scalars(self.advice)
        for entry in new:
            values |= scalars_of(entry)
            if self.advice is None or self.partition is not None:
                values |= rate_scalars(entry)
        for logger in (*self.loggers, *loggers):
            logger.scalars(values, step)
            if self.figures:
                log_figures(logger, self.history, step)
        return measured

    def _measure_loss(
        self, epoch: float, model: nn.Module, data: Any, optimizer: Optimizer | None
    ) -> None:
        """Measure the loss, for one gradient of each batch: the controller measures the rest."""
        assert self.controller is not None and optimizer is not None
        options = {**self.options, "order": 1, "stderr": False}
        summary = summarize(model, self._loss, data, partition="trivial", **options)
        loss = float(summary.loss)
        self.history.add_value(LOSS, epoch, loss)
        self._note_facts(model, summary, optimizer)
        with self._present_rates(optimizer):
            low = below_peak(optimizer)
        self.console.say(f"epoch {epoch:g}: {steered_sentence(loss, low, self.controller)}")

    def _measure_at(
        self, epoch: float, model: nn.Module, data: Any, optimizer: Optimizer | None
    ) -> LearningRates:
        """Measure, and add to the history."""
        if optimizer is None or isinstance(optimizer, NewtonSummary):
            summary = summarize(
                model, self._loss, data, partition=self.partition or "canonical", **self.options
            )
            shared = self._shared()
            tried = {"model": model, "loss_fn": self._loss, "data": data, **shared}
            given = tried if self.lambda_int is None else {}
            rates = learning_rates(summary, self.lambda_int, **given)
            trials = step_trials(model, self._loss, data, summary, rates, **shared)
            self.history.add(epoch, summary, rates, trials=trials)
            return rates
        given = self._shared("backend")
        if self.lambda_int is not None:
            given["lambda_int"] = self.lambda_int
        advise = partial(suggest_lrs, model, self._loss, data, optimizer, **given)
        steered = self.controller is not None
        with self._present_rates(optimizer) as ended:
            by_group = partial(advise, partition=self.partition, rehearsal=False)
            self.advice = groups = by_group() if steered else advise()
            if self.partition is not None and not steered:
                groups = by_group()
        # The step that was tried; its errors are those of the best factors, where it takes these.
        changes = groups.rates.eta.new_tensor([group.change for group in groups.groups])
        errors = [
            math.nan
            if g.stderr is None or g.change != g.factor or groups.at_limit(g.factor)
            else g.stderr
            for g in groups.groups
        ]
        stderr = None if all(map(math.isnan, errors)) else changes.new_tensor(errors)
        rates = replace(groups.rates, eta=changes, eta_stderr=stderr, status="minimum")
        self.history.add(epoch, groups.summary, rates, trials=[Trial(1.0, *groups.then)])
        if self.controller is None:
            said = sentence(self.advice, started=epoch > 0)
        else:
            loss = float(self.advice.summary.loss)
            said = steered_sentence(loss, self.advice.below_peak, self.controller)
        at = " (the schedule is at 0: measured at its first rate)" if ended else ""
        self.console.say(f"epoch {epoch:g}{at}: {said}")
        for group in () if steered or is_too_low(self.advice) else self.advice.groups:
            self.history.add_value(f"factor of lr, {group.name}", epoch, group.factor)
        return rates

    def _shared(self, *more: str) -> dict[str, Any]:
        """Return the options that trials also take, and more of them by name."""
        same = ("direction", "microbatch", "num_samples", "distributed", *more)
        return {name: self.options[name] for name in same if name in self.options}

    def _data(self, epoch: float) -> Any:
        """Return the data to measure on; of drawn samples, as many batches as the budget allows."""
        if self._samples is None:
            return self.data
        period = self.budget.training * self.every_n_epochs / max(epoch - self._first, 1)
        self._batches = self.budget.batches(self._batches, len(self._samples), period)
        return self._samples[: self._batches]

    def _note_facts(self, model: nn.Module, summary: Summary, optimizer: Optimizer | None) -> None:
        """Record in the history how it was measured."""
        model = unwrap(model)
        if self.history.name == UNNAMED:
            self.history.name = type(model).__name__
        params = [p for p in model.parameters() if p.requires_grad]
        self.history.facts |= {
            "model": f"{type(model).__name__}, {sum(p.numel() for p in params):,} parameters",
            "backend": summary.backend,
            "device": str(params[0].device),
            "newton_summary": newton_summary.__version__,
            "torch": str(torch.__version__),  # a subclass of str, which checkpoints refuse
            "python": platform.python_version(),
        }
        if optimizer is not None:
            self.history.facts["trained with"] = type(optimizer).__name__
        if self.advice is not None:
            self.history.facts["measured along"] = (
                f"the next step of {type(optimizer).__name__}: a factor of 1 is its present rate"
            )

    def _warn(self, message: str) -> None:
        if not self._warned:
            self._warned = True
            warn_user(f"{message} (Shown once.)")

    # --- steering ---------------------------------------------------------------------------------

    def steer(self, optimizer: Optimizer, model: nn.Module, loss_fn: LossFn) -> None:
        """Steer the learning rates of an optimizer from now on, if ``adjust`` is set."""
        if not self.adjust:
            return
        # Two gradients a measurement.
        share = self.budget.share
        options: dict[str, Any] = {
            "period": PERIOD if share is None else max(PERIOD, math.ceil(2 / share)),
            "set_point": SET_POINTS["careful"],
        }
        if isinstance(self.adjust, Mapping):
            options |= self.adjust
        if self.controller is not None and self._steered is None:
            self.console.say("a new controller, since the trainer has made a new optimizer")
        self.controller = RateController(optimizer, model, loss_fn, **options)
        if self._steered is not None:
            self.controller.load_state_dict(self._steered)
            self._steered = None
        self._recorded = len(self.controller.history)

    def before_step(
        self, batches: Sequence[Any], epoch: float, step: int, loggers: Sequence[Logger] = ()
    ) -> None:
        """Let the controller measure before a step of the optimizer, and log what it did."""
        assert self.controller is not None
        self.controller.before_step(UserList(batches))
        for record in self.controller.history[self._recorded :]:
            values = {"steered_lr": record.rate * record.change, "steered_factor": record.factor}
            for name, value in values.items():
                self.history.add_value(name.replace("_", " "), epoch, value)
            for logger in (*self.loggers, *loggers):
                logger.scalars({f"{PREFIX}/{name}": value for name, value in values.items()}, step)
        self._recorded = len(self.controller.history)

    @contextmanager
    def _present_rates(self, optimizer: Optimizer) -> Iterator[bool]:
        """Show the learning rates of the next step, those of the controller if there is one.

        At the end of a schedule, where they are zero and nothing could be measured, show those of
        its peak, and yield True.
        """
        groups, names = optimizer.param_groups, ("lr", "initial_lr", "max_lr")
        own = [{name: group[name] for name in names if name in group} for group in groups]
        factor = 1.0 if self.controller is None else self.controller.multiplier
        present = [lrs["lr"] for lrs in own] if self.controller is None else self.controller.rates
        ended = not any(map(float, present)) and any("initial_lr" in lrs for lrs in own)
        if ended:
            present = [lrs.get("initial_lr", lrs["lr"]) * factor for lrs in own]
        try:
            for group, lrs, lr in zip(groups, own, present, strict=True):
                group.update({**{name: peak * factor for name, peak in lrs.items()}, "lr": lr})
            yield ended
        finally:
            for group, lrs in zip(groups, own, strict=True):
                group.update(lrs)

    # --- the report -------------------------------------------------------------------------------

    def write_report(self, path: str | Path | None = None) -> Path | None:
        """Write the report.

        Args:
            path: The file to write; by default the monitor's ``report``.

        Returns:
            The path; None without a measurement or without a path.
        """
        path = self.report if path is None else path
        if path is None or not self._epochs:
            return None
        return report(self.history, path)

    def finish(self, directory: str | Path) -> None:
        """Write the report at the end of training, and print its path to standard error."""
        path = None if self.report is None else self.write_report(Path(directory) / self.report)
        if path is not None:
            self.console.say(f"wrote {path}")

    def check_report(self, directory: str | Path) -> None:
        """Raise at the start of training if the report at its end cannot be written."""
        if self.report is None:
            return
        if importlib.util.find_spec("plotly") is None:
            raise ImportError(
                "The report at the end of training needs plotly: run pip install -e '.[report]' "
                "in your clone, or pass report=None."
            )
        path = Path(directory) / self.report
        try:
            with TemporaryFile(dir=next(p for p in path.absolute().parents if p.exists())):
                pass
        except OSError as error:
            raise cannot_write(path, error) from None

    # --- checkpoints ------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the history, and the state of the controller, as plain values and tensors."""
        steered = self._steered if self.controller is None else self.controller.state_dict()
        return {"history": self.history.state_dict(), "controller": steered}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the history by a saved one; a controller resumes from its state."""
        self.history = History.from_state_dict(state["history"])
        self._steered = state.get("controller")
        self._resumes = True
