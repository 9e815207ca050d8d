"""Results of a run, and of several seeds together."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from newton_summary.experiments.config import ExperimentConfig, NewtonSummaryConfig, flatten
from newton_summary.experiments.rundir import Run, finite

T = TypeVar("T")

LABELS = {
    "newton_summary": "NewtonSummary",
    "adam": "Adam",
    "kfac": "K-FAC",
    "sgd": "SGD",
    "mlp": "MLP",
    "lenet": "LeNet",
    "vgg11": "VGG-11'",
    "big_mlp": "BigMLP",
    "vbig_mlp": "VBigMLP",
    "resnet18": "ResNet-18",
    "autoencoder": "Autoencoder",
    "gpt": "GPT",
    "rosenbrock": "Rosenbrock",
    "mnist": "MNIST",
    "cifar10": "CIFAR-10",
    "embedded": "embedded MNIST",
}
"""Of optimizers, models and data; others are called by their names."""


@dataclass(frozen=True)
class Outcome:
    """The numbers that are compared between runs; nan where missing."""

    status: str  # "finished", "diverged" or "unfinished"
    epochs: int  # that were completed
    train_loss: float  # of the last epoch
    best_train_loss: float  # the lowest of all epochs
    best_epoch: int  # that with the lowest validation loss
    validation_loss: float  # at the best epoch
    test_loss: float  # at the best epoch
    test_accuracy: float  # at the best epoch
    last_test_loss: float
    last_test_accuracy: float
    seconds: float  # of training alone; nan if runs shared the machine
    seconds_per_epoch: float
    memory_gib: float

    def __str__(self) -> str:
        """Return the numbers at the best validation loss, in a line."""
        train = "" if math.isnan(self.train_loss) else f"train {self.train_loss:.4g}, "
        share = "" if math.isnan(self.test_accuracy) else f" ({self.test_accuracy:.2%})"
        epochs = "1 epoch" if self.epochs == 1 else f"{self.epochs} epochs"
        return (
            f"{self.status} after {epochs}: {train}test {self.test_loss:.4g}{share} at the best "
            f"validation loss, epoch {self.best_epoch}"
        )

    def as_dict(self) -> dict[str, Any]:
        """Return values that JSON can represent."""
        return finite(asdict(self))  # type: ignore[no-any-return]


def outcome(run: Run) -> Outcome:
    """Summarize a run."""
    trained = [row for row in run.rows if row["epoch"] > 0]
    losses = [value for value in run.column("train_loss") if math.isfinite(value)]
    best = best_row(run)
    last = run.rows[-1] if run.rows else {}
    seconds = [row["seconds"] for row in trained] if ran_alone(run) else []
    return Outcome(
        status="diverged" if run.diverged else "finished" if run.finished else "unfinished",
        epochs=max(run.epoch, 0),
        train_loss=_number(last.get("train_loss")),
        best_train_loss=min(losses, default=math.nan),
        best_epoch=int(best.get("epoch", 0)),
        validation_loss=_number(best.get("validation_loss")),
        test_loss=_number(best.get("test_loss")),
        test_accuracy=_number(best.get("test_accuracy")),
        last_test_loss=_number(last.get("test_loss")),
        last_test_accuracy=_number(last.get("test_accuracy")),
        seconds=sum(seconds) if seconds else math.nan,
        seconds_per_epoch=statistics.median(seconds) if seconds else math.nan,
        memory_gib=_number(last.get("memory_gib")),
    )


def ran_alone(run: Run) -> bool:
    """Whether no other run shared the machine, so that times are meaningful."""
    sessions = run.environment().get("sessions", [])
    return all(session.get("side_by_side", 1) == 1 for session in sessions)


def best_row(run: Run) -> dict[str, Any]:
    """Return the row of the epoch with the lowest validation loss."""
    rows = [row for row in run.rows if row.get("validation_loss") is not None]
    return min(rows, key=lambda row: float(row["validation_loss"]), default={})


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)


# --- several runs --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spread:
    """A number over several seeds; those that are not finite are counted, not averaged."""

    values: tuple[float, ...]

    @property
    def finite(self) -> list[float]:
        """The values that count."""
        return [value for value in self.values if math.isfinite(value)]

    @property
    def mean(self) -> float:
        """Mean of the finite ones, nan without any."""
        return statistics.fmean(self.finite) if self.finite else math.nan

    @property
    def std(self) -> float:
        """Standard deviation, nan with fewer than two values."""
        return statistics.stdev(self.finite) if len(self.finite) > 1 else math.nan

    def __str__(self) -> str:
        """Return mean ± standard deviation."""
        if not self.finite:
            return "-"
        text = f"{self.mean:.4g}"
        return text if math.isnan(self.std) else f"{text} ± {self.std:.2g}"


def spread(results: Iterable[Outcome], name: str) -> Spread:
    """Return one number of several outcomes."""
    return Spread(tuple(float(getattr(result, name)) for result in results))


def setup_label(config: ExperimentConfig) -> str:
    """Return the model and its data, as in ``"LeNet / CIFAR-10"``."""
    model, data = config.model.name, config.data.name
    label = LABELS.get(model, model) + (", NTK" if config.model.ntk else "")
    return label if data == "nothing" else f"{label} / {LABELS.get(data, data)}"


def optimizer_label(config: ExperimentConfig) -> str:
    """Return the optimizer, with what sets it apart from the paper's NewtonSummary."""
    optimizer = config.optimizer
    label = LABELS.get(optimizer.name, optimizer.name)
    if not isinstance(optimizer, NewtonSummaryConfig):
        return label
    marks = {
        optimizer.partition: optimizer.partition != "canonical",
        "diagonal": optimizer.diagonal,
        optimizer.variant: optimizer.variant != "as-run",
    }
    shown = ", ".join(mark for mark, differs in marks.items() if differs)
    return f"{label} ({shown})" if shown else label


def is_paper_mode(config: ExperimentConfig) -> bool:
    """Whether the optimizer is the paper's, as its author ran it."""
    optimizer = config.optimizer
    return isinstance(optimizer, NewtonSummaryConfig) and optimizer.variant == "as-run"


def troubles(statuses: Iterable[str]) -> str:
    """Return how many runs did not end as expected."""
    counts = Counter(statuses)
    bad = [name for name in ("diverged", "failed", "unfinished") if counts[name]]
    return ", ".join(f"{counts[name]} {name}" for name in bad)


def group_by(items: Iterable[T], key: Callable[[T], Any]) -> dict[Any, list[T]]:
    """Return runs, or results of them, by a key, in order of first appearance."""
    groups: dict[Any, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


# Fields that do not distinguish methods.
NOT_OF_A_METHOD = {
    *("seed", "epochs", "recipe", "data.root", "data.download", "device", "graph_steps"),
}


def method_labels(runs: Sequence[Run]) -> dict[Path, str]:
    """Return the optimizer of each run, with the fields in which runs of one label differ.

    Runs of one setup with the same label differ only in their seed, or in a field that does not
    distinguish methods. Where that would count a seed twice, such as after 4 and after 5 epochs,
    they are kept apart.
    """
    labels: dict[Path, str] = {}
    groups = group_by(runs, lambda run: (setup_label(run.config), optimizer_label(run.config)))
    for (_, label), group in groups.items():
        settings = [flatten(run.config) for run in group]
        differing = [
            name
            for name in settings[0]
            if not name.startswith("measure.")
            and any(other[name] != settings[0][name] for other in settings)
        ]
        varied = [name for name in differing if name not in NOT_OF_A_METHOD]
        each = [repr([values[name] for name in ("seed", *varied)]) for values in settings]
        if len(set(each)) < len(each):
            varied += [name for name in differing if name in ("epochs", "device")]
        for run, values in zip(group, settings, strict=True):
            marks = [f"{name.rpartition('.')[2]}={values[name]}" for name in varied]
            labels[run.path] = ", ".join([label, *marks])
    return labels
