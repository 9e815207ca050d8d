"""What is known of a model over its training: summaries, curves, and how they were measured.

Everything that shows a training (figures, the report, callbacks of frameworks) takes a
:class:`History`. A single measurement is a history with one entry.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from newton_summary.display.html import html_table, paragraph
from newton_summary.display.table import shorten, text_table
from newton_summary.solver import LearningRates, learning_rates
from newton_summary.summary import Summary, _differing, _read_file

_NUMBERS = range(5)  # columns of the table of a history
_ALONG = {"full": "the gradient", "optimizer": "the optimizer's own, as it last was"}


class Trial(NamedTuple):
    """A step ``fraction * eta`` that was tried: what the summary predicted, and what happened."""

    fraction: float
    predicted: float  # change of the loss by the second-order model
    real: float  # change of the loss of the same data


@dataclass(frozen=True, eq=False)
class Measured:
    """A summary at the end of an epoch (of epoch 0: at the start)."""

    epoch: float
    kind: str  # "full": along the full-batch gradient; "optimizer": the last one it used
    summary: Summary
    eta: Tensor  # (S,)
    status: str  # of the learning rates
    eta_stderr: Tensor | None = None  # (S,)
    trials: tuple[Trial, ...] = ()  # of steps along eta, where they were tried

    def state_dict(self) -> dict[str, Any]:
        """Return plain values and tensors."""
        state = {f.name: getattr(self, f.name) for f in fields(self)}
        trials = [tuple(trial) for trial in self.trials]
        return {**state, "summary": self.summary.to("cpu").state_dict(), "trials": trials}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Measured:
        """Return what :meth:`state_dict` has written."""
        trials = tuple(Trial(*trial) for trial in state.get("trials", ()))
        summary = Summary.from_state_dict(state["summary"])
        return cls(**{**state, "summary": summary, "trials": trials})


@dataclass
class History:
    """Measurements over a training, in order, with its curves."""

    name: str = "run"
    measured: list[Measured] = field(default_factory=list)
    curves: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    """Pairs of epoch and value, by metric such as ``"train_loss"``."""
    facts: dict[str, str] = field(default_factory=dict)
    """How it was measured, as a reader should see it (model, device, versions, command)."""

    @classmethod
    def of(cls, summary: Summary, name: str = "measurement", lambda_int: float = 1.0) -> History:
        """Return the history of a single measurement."""
        history = cls(name)
        history.add(0, summary, learning_rates(summary, lambda_int))
        return history

    def add(
        self,
        epoch: float,
        summary: Summary,
        rates: LearningRates,
        kind: str = "full",
        trials: Sequence[Trial] = (),
    ) -> None:
        """Append a measurement; all of one history have the same groups."""
        if self.measured and self.names != summary.names:
            raise ValueError(
                f"The history {self.name!r} has the groups of another partition: "
                f"{_differing(self.names, summary.names)}. Begin another history."
            )
        if not isinstance(rates, LearningRates):
            raise TypeError(
                f"The rates are of type {type(rates).__name__}: give learning_rates(summary)."
            )
        if len(rates.eta) != len(summary):
            raise ValueError(
                f"There are {len(rates.eta)} learning rates, and the summary has {len(summary)} "
                f"groups."
            )
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
            )
        )

    def add_value(self, metric: str, epoch: float, value: float) -> None:
        """Append a point to a curve."""
        self.curves.setdefault(metric, []).append((float(epoch), float(value)))

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the groups; none before the first measurement."""
        return self.measured[0].summary.names if self.measured else ()

    @property
    def epochs(self) -> list[float]:
        """When it was measured."""
        return [measured.epoch for measured in self.measured]

    @property
    def rates(self) -> Tensor:
        """Return the learning rates by measurement and group, (M, S)."""
        if not self.measured:
            return torch.zeros(0, 0, dtype=torch.float64)
        return torch.stack([measured.eta.double() for measured in self.measured])

    # --- views ------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        """Return the name, and how much there is."""
        return (
            f"History({self.name!r}, {len(self.measured)} measurements, {len(self.curves)} curves)"
        )

    def __str__(self) -> str:
        """Return a table of the measurements, and where the curves end."""
        return "\n".join([repr(self), text_table(self._rows(), right=_NUMBERS), *self._ends()])

    def _repr_html_(self) -> str:
        """Return the same for a notebook."""
        ends = paragraph("\n".join(self._ends())) if self.curves else ""
        return paragraph(repr(self)) + html_table(self._rows(), right=_NUMBERS) + ends

    def _rows(self) -> list[list[str]]:
        rows = [["epoch", "loss", "smallest rate", "median", "largest rate", "status"]]
        for m in self.measured:
            eta = m.eta.double()
            numbers = (eta.min(), eta.median(), eta.max())
            rates = [f"{float(number):+.3e}" for number in numbers]
            rows.append([f"{m.epoch:g}", f"{float(m.summary.loss):.6g}", *rates, m.status])
        kinds = [m.kind for m in self.measured]
        if len(set(kinds)) > 1:  # two rows of one epoch are told apart
            columns = zip(rows, ["measured along", *(_ALONG[kind] for kind in kinds)])
            rows = [[*row, along] for row, along in columns]
        return shorten(rows)

    def _ends(self) -> list[str]:
        return [
            f"{metric}: {points[-1][1]:.6g} at epoch {points[-1][0]:g}"
            for metric, points in self.curves.items()
            if points
        ]

    # --- files ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return plain values and tensors."""
        measured = [measured.state_dict() for measured in self.measured]
        curves = {metric: list(points) for metric, points in self.curves.items()}
        return {"name": self.name, "measured": measured, "curves": curves, "facts": {**self.facts}}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> History:
        """Return what :meth:`state_dict` has written."""
        measured = [Measured.from_state_dict(entry) for entry in state["measured"]]
        curves = {k: [(x, y) for x, y in points] for k, points in state["curves"].items()}
        return cls(**{**state, "measured": measured, "curves": curves})

    def save(self, path: str | Path) -> None:
        """Write the history to a file that :meth:`load` reads."""
        torch.save(self.state_dict(), path)

    @classmethod
    def load(cls, path: str | Path) -> History:
        """Read a history from a file; nothing in the file is executed."""
        return cls.from_state_dict(_read_file(path, "measured", cls.__name__))
