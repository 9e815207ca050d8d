"""Measurements of a model during training: summaries, curves, and how they were made.

What shows a training run (figures, the report, callbacks) takes a :class:`History`. A single
measurement is a history with one entry.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from newton_summary.display.table import ShownAsTable, without_middle
from newton_summary.solver import LearningRates, check_strength, learning_rates
from newton_summary.storage.writing import save_tensors
from newton_summary.summary import Summary, _differing, read_state

Kind = Literal["full", "optimizer"]
Unit = Literal["epoch", "step"]

_ALONG = {"full": "the gradient", "optimizer": "the optimizer's last direction"}


class Trial(NamedTuple):
    """A step ``fraction * eta`` that was tried: what the summary predicted, and what happened.

    >>> trial = Trial(fraction=0.5, predicted=-0.12, real=-0.11)
    >>> f"{trial.real / trial.predicted:.0%} of the predicted decrease"
    '92% of the predicted decrease'
    """

    fraction: float
    predicted: float  # change of the loss by the second-order model
    real: float  # change of the loss of the same data


@dataclass(frozen=True, eq=False)
class Measured:
    """A summary after some epochs (0: before training), and its learning rates.

    >>> summary = Summary(gbar=torch.tensor([2.0]), Hbar=torch.tensor([[4.0]]))
    >>> (measured,) = History.of(summary, lambda_int=0).measured
    >>> measured
    Measured(epoch 0, loss nan, 1 group, newton)
    >>> measured.epoch, measured.eta, measured.status
    (0, tensor([0.5000]), 'newton')
    """

    epoch: float
    kind: Kind  # "full": along the full-batch gradient; "optimizer": the last one that it used
    summary: Summary
    eta: Tensor  # (S,)
    status: str  # of the learning rates
    eta_stderr: Tensor | None = None  # (S,)
    trials: tuple[Trial, ...] = ()  # of steps along eta, where they were tried
    lambda_int: float | None = None  # of the learning rates, if known

    @property
    def trial(self) -> Trial | None:
        """The trial of the full step; None if it was not tried."""
        return next((trial for trial in self.trials if trial.fraction == 1), None)

    @property
    def refuted(self) -> bool:
        """Whether the full step was tried and raised the loss."""
        return self.trial is not None and not self.trial.real <= 0

    def __repr__(self) -> str:
        """Return the epoch, the loss, the number of groups and the status, in a line."""
        loss, S = float(self.summary.loss), len(self.summary)
        groups = f"{S} group{'' if S == 1 else 's'}"
        status = f"{self.status}, refuted" if self.refuted else self.status
        return f"Measured(epoch {self.epoch:g}, loss {loss:.4g}, {groups}, {status})"

    def state_dict(self) -> dict[str, Any]:
        """Return the measurement as plain values and tensors."""
        state = {f.name: getattr(self, f.name) for f in fields(self)}
        trials = [tuple(trial) for trial in self.trials]
        return {**state, "summary": self.summary.to("cpu").state_dict(), "trials": trials}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Measured:
        """Rebuild a measurement from :meth:`state_dict`."""
        known = {f.name for f in fields(cls)}
        trials = tuple(Trial(*map(float, trial)) for trial in state.get("trials", ()))
        summary, strength = Summary.from_state_dict(state["summary"]), state.get("lambda_int")
        given = {name: value for name, value in state.items() if name in known}
        if strength is not None:
            given["lambda_int"] = check_strength(strength)
        made = cls(**{**given, "summary": summary, "trials": trials})
        if not (type(made.epoch) in (int, float) and 0 <= made.epoch < math.inf):
            raise ValueError(f"A measurement has epoch {made.epoch!r}.")
        if made.kind not in get_args(Kind) or not isinstance(made.status, str):
            raise ValueError(f"A measurement has kind {made.kind!r} and status {made.status!r}.")
        for rates in (made.eta, *(() if made.eta_stderr is None else (made.eta_stderr,))):
            fits = isinstance(rates, Tensor) and rates.shape == summary.gbar.shape
            if not fits or not rates.is_floating_point():
                raise ValueError(f"A measurement does not have {len(summary)} learning rates.")
        return made


@dataclass
class History(ShownAsTable):
    """The measurements of a training run, in order, with its curves.

    >>> history = History("MLP, SGD")
    >>> for epoch, curvature in enumerate((4.0, 2.0, 1.0)):
    ...     summary = Summary(gbar=torch.tensor([1.0]), Hbar=torch.tensor([[curvature]]))
    ...     history.add(epoch, summary, learning_rates(summary, lambda_int=0))
    ...     history.add_value("train_loss", epoch, 1 / (1 + epoch))
    >>> history
    History('MLP, SGD', 3 measurements, 1 curve)
    >>> history.epochs, history.rates.flatten().tolist()
    ([0, 1, 2], [0.25, 0.5, 1.0])
    """

    _right = range(5)

    name: str = "run"
    measured: list[Measured] = field(default_factory=list)
    curves: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    """Pairs of epoch and value, by metric such as ``"train_loss"``."""
    facts: dict[str, str] = field(default_factory=dict)
    """How it was measured, for readers: model, device, versions, command."""
    unit: Unit = "epoch"
    """What "epoch" counts in the measurements and curves: epochs, or steps of an optimizer."""

    @classmethod
    def of(cls, summary: Summary, name: str | None = None, lambda_int: float = 1.0) -> History:
        """Return the history of a single measurement, by default named after the model's type."""
        types = {} if summary.partition is None else summary.partition.types
        history = cls(name or types.get("", "measurement"))
        history.add(0, summary, learning_rates(summary, lambda_int))
        return history

    def add(
        self,
        epoch: float,
        summary: Summary,
        rates: LearningRates,
        kind: Kind = "full",
        trials: Sequence[Trial] = (),
    ) -> None:
        """Append a measurement; all measurements of a history have the same groups."""
        if self.measured and self.names != summary.names:
            raise ValueError(
                f"The history {self.name!r} has groups of another partition: "
                f"{_differing(self.names, summary.names)}. Start a new history."
            )
        if not isinstance(rates, LearningRates):
            raise TypeError(f"rates has type {type(rates).__name__}: pass learning_rates(summary).")
        if len(rates.eta) != len(summary):
            raise ValueError(
                f"Got {len(rates.eta)} learning rates, but the summary has {len(summary)} groups."
            )
        if not trials and not math.isnan(rates.real_change):
            trials = [Trial(1.0, rates.model_change, rates.real_change)]
        error = rates.eta_stderr
        self.measured.append(
            Measured(
                epoch,
                kind,
                replace(summary, parts=()).to("cpu"),  # many batches over many epochs add up
                rates.eta.detach().cpu(),
                rates.status,
                None if error is None else error.detach().cpu(),
                tuple(trials),
                rates.lambda_int,
            )
        )

    def add_value(self, metric: str, epoch: float, value: float) -> None:
        """Append a point to a curve."""
        self.curves.setdefault(metric, []).append((float(epoch), float(value)))

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the groups; empty before the first measurement."""
        return self.measured[0].summary.names if self.measured else ()

    @property
    def epochs(self) -> list[float]:
        """Epochs of the measurements."""
        return [measured.epoch for measured in self.measured]

    @property
    def rates(self) -> Tensor:
        """Return the learning rates by measurement and group, (M, S)."""
        if not self.measured:
            return torch.zeros(0, 0, dtype=torch.float64)
        return torch.stack([measured.eta.double() for measured in self.measured])

    # --- views ------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        """Return the name, and the numbers of measurements and curves."""
        counts = {"measurement": len(self.measured), "curve": len(self.curves)}
        text = ", ".join(f"{n} {word}{'' if n == 1 else 's'}" for word, n in counts.items())
        return f"History({self.name!r}, {text})"

    def _title(self) -> str:
        return repr(self)

    def _rows(self) -> list[list[str]]:
        what = "factor" if "measured along" in self.facts else "rate"
        rows = [[self.unit, "loss", f"smallest {what}", "median", f"largest {what}", "status"]]
        for m in self.measured:
            eta = m.eta.double()
            numbers = (eta.min(), eta.median(), eta.max())
            rates = [f"{float(number):+.3e}" for number in numbers]
            status = f"{m.status}, refuted" if m.refuted else m.status
            rows.append([f"{m.epoch:g}", f"{float(m.summary.loss):.6g}", *rates, status])
        kinds = [m.kind for m in self.measured]
        if len(set(kinds)) > 1:  # two rows of one epoch
            columns = zip(rows, ["measured along", *(_ALONG[kind] for kind in kinds)])
            rows = [[*row, along] for row, along in columns]
        return without_middle(rows)

    def _said(self) -> str:
        """Return where the curves end."""
        ends = {metric: points[-1] for metric, points in self.curves.items() if points}
        return "\n".join(
            f"{metric}: {y:.6g} at {self.unit} {x:g}" for metric, (x, y) in ends.items()
        )

    # --- files ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the history as plain values and tensors."""
        measured = [measured.state_dict() for measured in self.measured]
        curves = {metric: list(points) for metric, points in self.curves.items()}
        plain = {"name": self.name, "facts": {**self.facts}, "unit": self.unit}
        return {**plain, "measured": measured, "curves": curves}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> History:
        """Rebuild a history from :meth:`state_dict`."""
        measured = [Measured.from_state_dict(entry) for entry in state["measured"]]
        curves = {
            str(name): [(float(x), float(y)) for x, y in points]
            for name, points in state["curves"].items()
        }
        facts = {str(name): str(fact) for name, fact in state["facts"].items()}
        unit: Unit = "step" if state.get("unit") == "step" else "epoch"
        history = cls(str(state["name"]), measured, curves, facts, unit)
        for entry in measured:
            if entry.summary.names != history.names:
                raise ValueError(
                    f"Groups differ: {_differing(history.names, entry.summary.names)}."
                )
        return history

    def save(self, path: str | Path) -> None:
        """Write the history to a file, which :meth:`load` reads on any machine."""
        save_tensors(path, self.state_dict())

    @classmethod
    def load(cls, path: str | Path) -> History:
        """Read a history from a file; nothing in the file is executed."""
        return read_state(path, cls.from_state_dict, "measured", cls.__name__)
