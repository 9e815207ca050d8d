"""The training loop: from a configuration to a run directory.

The data lives on the device, and a step does not wait for it: the loss is summed there and read
once an epoch.
"""

from __future__ import annotations

import copy
import itertools
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.lr_scheduler import ReduceLROnPlateau

from newton_summary.errors import CannotDifferentiate, NotFiniteError, SharedError, UserError
from newton_summary.experiments import torchrun
from newton_summary.experiments.config import AdamConfig, ExperimentConfig, check
from newton_summary.experiments.data_parallel import RankGroup, assemble
from newton_summary.experiments.datasets import Batches, Dataset, Split, load_dataset
from newton_summary.experiments.optimizers import GraphedGradient, checked_partition, make_stepper
from newton_summary.experiments.results import is_paper_mode
from newton_summary.experiments.rundir import Run, RunWriter
from newton_summary.experiments.tasks import Task, make_task
from newton_summary.history import Kind, Measured
from newton_summary.measuring.measurement import summarize
from newton_summary.optimizer import NewtonSummary
from newton_summary.run_directory import CHECKPOINT, Row
from newton_summary.solver import LearningRates, learning_rates
from newton_summary.summary import Summary

EVALUATION_BATCH = 1000
SPEED_WARMUP, SPEED_STEPS = 3, 50  # of Adam, to compare its speed with
MANY_GROUPS = 256  # with more, the rates of the groups are left out of the metrics


class Reporter:
    """Receives the progress of a run. This one ignores it."""

    def start(self, config: ExperimentConfig, steps: int, epoch: int) -> None:
        """A run starts, or resumes after ``epoch``; ``steps`` is the number of steps per epoch."""

    def step(self, epoch: int, step: int) -> None:
        """This many steps of an epoch have been launched."""

    def measure(self, epoch: int, done: int, total: int | None) -> None:
        """This many batches of a measurement are done."""

    def row(self, row: Row) -> None:
        """An epoch is complete."""


def train(
    config: ExperimentConfig,
    path: Path,
    reporter: Reporter | None = None,
    *,
    compare_speed: bool = False,
    side_by_side: int = 1,
    checkpoint_seconds: float = 0.0,
) -> Run:
    """Train as configured and write the run directory; resume a run that was interrupted.

    Args:
        config: The whole configuration.
        path: The run directory.
        reporter: Receives the progress.
        compare_speed: At the end, time some steps of Adam on the same model and data.
        side_by_side: How many runs share the machine (0: unknown); stored, because epoch times are
            meaningless then.
        checkpoint_seconds: Shortest time between checkpoints; 0 writes one every epoch.

    Returns:
        The run, with its metrics. One that diverged is an ordinary result: ``run.diverged``.

    Raises:
        UserError: For mistakes the user can fix. Nothing has been written then, or the run can be
            resumed.
    """
    check(config)
    try:
        device = find_device(config.device)
        with assemble(device) as ranks, _precision(config), _memory_errors():
            writer = ranks.agreed(lambda: RunWriter(path, config, writes=ranks.rank == 0))
            known = ranks.from_first(lambda: writer.known)
            if known is not None and known.finished:
                return known
            facts = environment(device) | {"side_by_side": side_by_side}
            facts |= {"ranks": ranks.size} if ranks.size > 1 else {}
            session = ranks.agreed(lambda: Session(config, device, ranks, checkpoint_seconds))
            try:
                state, writer.rows = ranks.from_first(lambda: (writer.start(facts), writer.rows))
                ranks.agreed(lambda: session.restore(state, path / CHECKPOINT))
                session.run(writer, reporter or Reporter())
                if compare_speed and not isinstance(config.optimizer, AdamConfig):
                    writer.add_environment(adam_seconds=session.adam_seconds())
            finally:
                run = writer.close()
            return run
    except UserError as error:
        if not isinstance(error, SharedError):
            error.rank = torchrun.rank()
        raise


class Session:
    """One process's part of a run: data, model and optimizer in memory."""

    def __init__(
        self,
        config: ExperimentConfig,
        device: torch.device,
        ranks: RankGroup | None = None,
        checkpoint_seconds: float = 0.0,
    ):
        self.config, self.device = config, device
        self.checkpoint_seconds, self.saved = checkpoint_seconds, time.monotonic()
        self.ranks = ranks = ranks or RankGroup()
        dtype = getattr(torch, config.dtype)
        load = partial(load_dataset, config.data, dtype, device)
        self.data: Dataset = ranks.first_on_each_machine(load)
        self.task: Task = initial_task(config, self.data, device)
        _check_fit(self.task, self.data, config)
        _check_divisible(self.task, ranks)
        self.stepper = make_stepper(config.optimizer, self.task, self.data.train, ranks)
        if config.graph_steps and device.type == "cuda" and ranks.size == 1:
            self.stepper.gradient = GraphedGradient(self.stepper.gradient, self.stepper.params)
        if config.measure.every:
            self.measured_groups = checked_partition(self.task, config.measure.partition)
        self.scheduler = ReduceLROnPlateau(
            self.stepper.optimizer,
            factor=min(config.schedule.factor, 1 - 1e-9),
            patience=config.schedule.patience,
            threshold=config.schedule.threshold,
        )
        self.generator = torch.Generator()
        self.batches = Batches(self.data.train, config.batch_size, self.generator)
        self.epoch = 0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    # --- the loop ---------------------------------------------------------------------------------

    def run(self, writer: RunWriter, reporter: Reporter) -> None:
        """Train to the last epoch, or until the loss is not finite."""
        reporter.start(self.config, len(self.batches), self.epoch)
        if not writer.rows:
            self._complete({"epoch": 0, "train_loss": None, "seconds": 0.0}, writer, reporter)
        while self.epoch < self.config.epochs and writer.rows[-1]["status"] == "ok":
            start = time.perf_counter()
            try:
                loss = self.train_epoch(reporter)
            except (NotFiniteError, LinAlgError):
                loss = math.nan
            seconds = max(time.perf_counter() - start, 0.0)  # clocks of virtual machines step back
            self.epoch += 1
            row = {"epoch": self.epoch, "train_loss": loss, "lr": self.lr, "seconds": seconds}
            if math.isfinite(loss) and self.config.schedule.factor < 1:
                self._reduce_on_plateau(loss)
            self._complete(row, writer, reporter)

    def _reduce_on_plateau(self, loss: float) -> None:
        before = self.lr
        self.scheduler.step(loss)
        if is_paper_mode(self.config) and self.lr < before:
            # The author's copy of the schedule forgets the best loss when it reduces the rate, so
            # that a jump of the loss does not reduce it again and again.
            self.scheduler.best = loss

    def train_epoch(self, reporter: Reporter) -> float:
        """Make a pass over the training set; return the mean loss of its batches."""
        self.generator.manual_seed(order_seed(self.config, self.epoch))
        self.task.model.train()
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        interval = max(1, len(self.batches) // 50)
        for i, batch in enumerate(self.batches, start=1):
            total.add_(self.stepper.step(batch), alpha=len(batch[0]))
            if i % interval == 0:
                reporter.step(self.epoch + 1, i)
        return float(self.ranks.total(total)) / len(self.data.train)

    def _complete(self, row: Row, writer: RunWriter, reporter: Reporter) -> None:
        """Evaluate, measure and write the present epoch."""
        fine = row["train_loss"] is None or math.isfinite(row["train_loss"])
        row["status"] = "ok" if fine else "diverged"
        start = time.perf_counter()
        with self._evaluating():
            for name, split in (("validation", self.data.validation), ("test", self.data.test)):
                row |= {f"{name}_{key}": value for key, value in self.evaluate(split).items()}
        row["evaluation_seconds"] = max(time.perf_counter() - start, 0.0)
        row |= self._optimizer_facts(writer)
        every = self.config.measure.every
        if fine and every and (self.epoch % every == 0 or self.epoch == self.config.epochs):
            start = time.perf_counter()
            row |= self._measure(writer, reporter)
            row["measure_seconds"] = max(time.perf_counter() - start, 0.0)
        row["memory_gib"] = peak_memory(self.device)
        state = self.state_dict() if fine and self._checkpoint_due() else None
        self.ranks.agreed(lambda: writer.add_row(row, state))
        reporter.row(row)

    # --- metrics ----------------------------------------------------------------------------------

    @property
    def lr(self) -> float:
        """The learning rate, the paper's lambda_t."""
        return float(self.stepper.optimizer.param_groups[0]["lr"])

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Give the model the mean of its last parameters, if the optimizer keeps one."""
        optimizer = self.stepper.optimizer
        if not isinstance(optimizer, NewtonSummary):
            yield
            return
        optimizer.eval()
        try:
            yield
        finally:
            optimizer.train()

    @torch.no_grad()
    def evaluate(self, split: Split) -> dict[str, float | None]:
        """Return the mean loss of a part of the data, and the accuracy where there is one."""
        model = self.task.model.eval()
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        for batch in self.ranks.every(split.parts(EVALUATION_BATCH)):
            outputs = model(batch[0])
            values = [self.task.criterion(outputs, batch).double()]
            if self.task.accuracy is not None:
                values.append(self.task.accuracy(outputs, batch))
            sums[: len(values)] += torch.stack(values) * len(batch[0])
        loss, accuracy = (self.ranks.total(sums) / len(split)).tolist()
        return {"loss": loss, "accuracy": None if self.task.accuracy is None else accuracy}

    def _optimizer_facts(self, writer: RunWriter) -> Row:
        """Return the counters and rates of NewtonSummary, and keep its last summary."""
        optimizer = self.stepper.optimizer
        if not isinstance(optimizer, NewtonSummary) or optimizer.last_rates is None:
            return {}
        summary, rates = optimizer.last_summary, optimizer.last_rates
        if summary is not None:
            self._add_summary(writer, "optimizer", summary, optimizer.eta, rates)
        facts: Row = {
            "refreshes": optimizer.refreshes,
            "failed_refreshes": optimizer.failed_refreshes,
            "skipped_steps": optimizer.skipped_steps,
        }
        if len(optimizer.partition) <= MANY_GROUPS:
            facts["eta"] = dict(zip(optimizer.partition.names, optimizer.eta.tolist()))
        return facts

    def _checkpoint_due(self) -> bool:
        now = time.monotonic()
        due = self.epoch == self.config.epochs or now - self.saved >= self.checkpoint_seconds
        self.saved = now if due else self.saved
        return due

    def _measure(self, writer: RunWriter, reporter: Reporter) -> Row:
        """Measure along the gradient of the whole training set (Section 6.1)."""
        config = self.config.measure
        samples = self.data.train[slice(config.samples)]
        self.task.model.train()
        try:
            summary = summarize(
                self.task.model,
                self.task.loss,
                list(self.ranks.every(samples.parts(config.batch_size))),
                partition=self.measured_groups,
                progress=lambda done, total: reporter.measure(self.epoch, done, total),
            )
        except (NotFiniteError, CannotDifferentiate) as error:
            return {"measure_error": str(error)}
        rates = learning_rates(summary, config.lambda_int)
        self._add_summary(writer, "full", summary, rates.eta, rates)
        return {"full_loss": float(summary.loss), "measure_status": rates.status}

    def _add_summary(
        self, writer: RunWriter, kind: Kind, summary: Summary, eta: Tensor, rates: LearningRates
    ) -> None:
        """Keep a summary of the present epoch, with the learning rates in use."""
        made = (self.epoch, kind, summary, eta.detach().cpu(), rates.status)
        writer.add_summary(Measured(*made, lambda_int=rates.lambda_int))

    def adam_seconds(self) -> float:
        """Return how long an epoch of Adam takes in the same loop, from some of its steps."""
        model = copy.deepcopy(self.task.model).train()
        task = Task(model, self.task.criterion, self.task.accuracy)
        stepper = make_stepper(AdamConfig(lr=0.0), task, self.data.train, self.ranks)
        passes = itertools.chain.from_iterable(itertools.repeat(self.batches))
        for i, batch in enumerate(itertools.islice(passes, SPEED_WARMUP + SPEED_STEPS)):
            if i == SPEED_WARMUP:
                _wait(self.device)
                start = time.perf_counter()
            stepper.step(batch)
        _wait(self.device)
        return max(time.perf_counter() - start, 0.0) / SPEED_STEPS * len(self.batches)

    # --- resuming ---------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the next epoch depends on."""
        cuda = torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None
        return {
            "epoch": self.epoch,
            "model": self.task.model.state_dict(),
            "optimizer": self.stepper.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "random": {"cpu": torch.get_rng_state(), "cuda": cuda},
        }

    def restore(self, state: dict[str, Any] | None, file: Path) -> None:
        """Return to the end of an epoch."""
        if state is None:
            return
        try:
            self.epoch = int(state["epoch"])
            self.task.model.load_state_dict(state["model"])
            optimizer = self.stepper.optimizer
            optimizer.load_state_dict(state["optimizer"])
            for group in optimizer.param_groups:
                if not 0 <= float(group["lr"]) < math.inf:
                    raise ValueError(f"lr is {group['lr']}")
                for p in group["params"]:
                    _check_moments(optimizer.state.get(p, {}), p)
            if state["scheduler"].keys() != self.scheduler.state_dict().keys():
                raise ValueError("the schedule was saved by another version")
            self.scheduler.load_state_dict(state["scheduler"])
            torch.set_rng_state(state["random"]["cpu"])
            if self.device.type == "cuda" and state["random"]["cuda"] is not None:
                torch.cuda.set_rng_state(state["random"]["cuda"], self.device)
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            raise UserError(
                f"{file} does not fit the run ({reason}). Restore it from a copy, or choose "
                f"another --run-dir."
            ) from None


def _check_moments(moments: Any, p: Tensor) -> None:
    """Check what torch's optimizers keep for a parameter, since they do not check it on loading."""
    for name in ("exp_avg", "exp_avg_sq", "momentum_buffer"):
        value = moments.get(name)
        if name not in moments or (value is None and name == "momentum_buffer"):
            continue
        if value.shape != p.shape or not value.is_floating_point():
            raise ValueError(f"{name} has shape {tuple(value.shape)}, not {tuple(p.shape)}")
    if "step" in moments and not 0 <= float(moments["step"]) < math.inf:
        raise ValueError(f"step is {float(moments['step'])}")


# --- what a run starts from ----------------------------------------------------------------------


def initial_task(config: ExperimentConfig, data: Dataset, device: torch.device) -> Task:
    """Return the model of a run before its first step, the same for all devices."""
    torch.manual_seed(config.seed)
    task = make_task(config.model, data)  # on the CPU
    task.model.to(device, getattr(torch, config.dtype))
    return task


def order_seed(config: ExperimentConfig, epoch: int) -> int:
    """Return the seed of the order of the samples after a number of epochs."""
    return config.seed * 1_000_003 + epoch


# --- the machine ---------------------------------------------------------------------------------


def find_device(name: str) -> torch.device:
    """Return a working device; ``"auto"`` uses a GPU if there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and torchrun.launched() and torch.cuda.is_available():
        # Each process has its own.
        return torch.device("cuda", torchrun.local_rank() % torch.cuda.device_count())
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).tolist()  # fails on a meta device
    except Exception as error:  # torch raises many types, with long messages
        reason = str(error).splitlines()[0].rstrip(".")
        if "device type at start" in reason:  # and all that torch was ever built for
            reason = "use cpu, cuda, cuda:1, ... or another device of torch"
        raise UserError(f"The device {name!r} is not available: {reason}.") from None
    return device


def peak_memory(device: torch.device) -> float | None:
    """Return the peak memory in GiB: of torch on the GPU, or of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    try:
        import resource
    except ImportError:  # not on Windows
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def environment(device: torch.device) -> dict[str, Any]:
    """Return the versions, the machine and the time of a session."""
    from newton_summary import __version__

    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    program = Path(sys.argv[0]).name.replace("__main__.py", "newton-summary")
    return {
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": [program, *sys.argv[1:]],
        "newton_summary": __version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "platform": platform.platform(),
        "device": str(device),
        "gpu": gpu,
        "threads": torch.get_num_threads(),
        "process": os.getpid(),
    }


def _commit() -> str | None:
    """Return the commit of the source, if it is in a git repository."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() or None


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def _precision(config: ExperimentConfig) -> Iterator[None]:
    """Switch TF32 on or off, for products and convolutions alike."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = config.tf32
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before


@contextmanager
def _memory_errors() -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"The device ran out of memory: {str(error).splitlines()[0]} Try a smaller "
            f"--optimizer.curvature-batch-size, --measure.batch-size or --batch-size."
        ) from None


@torch.no_grad()
def _check_fit(task: Task, data: Dataset, config: ExperimentConfig) -> None:
    """Raise a UserError if the model cannot take the samples."""
    training = task.model.training
    batch = next(data.train.parts(2))
    try:
        task.loss(task.model.eval(), batch)
    except (RuntimeError, IndexError, ValueError, TypeError):
        raise UserError(
            f"The model {config.model.name!r} does not fit the data {config.data.name!r}, whose "
            f"samples have shape {tuple(batch[0].shape[1:])}."
        ) from None
    finally:
        task.model.train(training)


def _check_divisible(task: Task, ranks: RankGroup) -> None:
    """Raise a UserError if dividing a batch among processes would change its loss."""
    coupled = any(isinstance(module, _BatchNorm) for module in task.model.modules())
    if ranks.size > 1 and coupled:
        raise UserError(
            f"The model has batch norms, so its loss depends on the whole batch: training on "
            f"{ranks.size} processes would differ from training on one. Use one process."
        )


def speed(run: Run) -> tuple[float, float | None] | None:
    """Return the median seconds of an epoch, without the first of several, and those of Adam."""
    times = [row["seconds"] for row in run.rows[2:] or run.rows[1:]]
    seconds = statistics.median_high(times) if times else 0.0
    return (seconds, run.environment().get("adam_seconds")) if seconds > 0 else None
