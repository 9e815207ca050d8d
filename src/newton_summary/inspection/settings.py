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
    """2 leaves out the third derivative, and takes about half the time."""
    lambda_int: float | None = None
    """Strength of the cubic term; by default the best of 1, 10, ... 1e8, or 0 with --order 2."""
    backend: Backend = "auto"
    """How to compute derivatives; auto uses the first backend that works."""
    device: str | None = None
    """Device to move model and data to, such as cuda; by default they stay where they are."""
    stderr: bool = True
    """Show standard errors over the batches, if there are several."""
