"""What is known of a model over its training: summaries, curves, and how they were measured.

Everything that shows a training (figures, the report, callbacks of frameworks) takes a
:class:`History`. A single measurement is a history with one entry.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from newton_summary.learning_rates import LearningRates, learning_rates
from newton_summary.summary import Summary


class Trial(NamedTuple):
    """A step ``fraction * eta`` that was tried: what the summary predicted, and what happened."""

    fraction: float
    predicted: float  # change of the loss by the second-order model
    real: float  # change of the loss of the same data


@dataclass(frozen=True)
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
    """By metric, such as ``"train_loss"``: pairs of epoch and value."""
    facts: dict[str, str] = field(default_factory=dict)
    """How it was measured, as a reader should see it: model, device, versions, command."""

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
        if self.measured and self.measured[0].summary.names != summary.names:
            raise ValueError(
                f"The history {self.name!r} has the groups of another partition: "
                f"{len(self.measured[0].summary)} of them, and this summary has {len(summary)}."
            )
        error = rates.eta_stderr
        self.measured.append(
            Measured(
                epoch,
                kind,
                summary.to("cpu"),
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
        return torch.stack([measured.eta.double() for measured in self.measured])

    # --- files ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return plain values and tensors."""
        return {**vars(self), "measured": [measured.state_dict() for measured in self.measured]}

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
        state = torch.load(path, map_location="cpu", weights_only=True)
        if not isinstance(state, dict) or "measured" not in state:
            raise ValueError(f"{path} holds no history. History.save writes one.")
        return cls.from_state_dict(state)
