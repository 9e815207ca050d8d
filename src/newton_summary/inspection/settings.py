"""How ``newton-summary inspect`` measures. Nothing here needs torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from newton_summary.experiments.config import Backend


@dataclass(frozen=True)
class Settings:
    """How to measure."""

    partition: str = "canonical"
    """Groups: canonical (one per tensor), layers, blocks-4, chunks-4, weights-biases, ..."""
    max_batches: int = 16
    """Measure on the first N batches of the data."""
    order: Literal[2, 3] = 3
    """2 leaves out the third derivative, about half of the time."""
    lambda_int: float | None = None
    """Strength of the cubic term; if not given, the best of 1, 10, ... 1e8, or 0 with --order 2."""
    backend: Backend = "auto"
    """How to compute derivatives; auto takes the first way that works."""
    device: str | None = None
    """Move model and data there, for example to cuda; they stay where they are if not given."""
    stderr: bool = True
    """Show standard errors over the batches, if there are several."""
