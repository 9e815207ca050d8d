"""When summaries are measured, and from when on rates follow from them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

Variant = Literal["smoothed", "as-run", "as-published"]
VARIANTS: tuple[Variant, ...] = ("smoothed", "as-run", "as-published")


class Schedule:
    """Counts steps and measurements.

    ``"smoothed"`` measures ``warmup`` summaries at the first step, one at least, and moves at once.
    Closures bring one batch a step: with these it measures at the first ``warmup`` steps and moves
    at the last of them. Then there is one measurement every ``period`` steps.

    ``"as-run"`` measures at steps 0, period, 2 period, ... The first ``warmup`` measurements do not
    move, and until then the direction advances at the measurements alone.

    ``"as-published"`` counts steps from 1 and measures at steps period, 2 period, ... The direction
    advances at every step, and the first measurement that is not of the warm-up moves.

    The count waits where the first measurement is due and the direction is zero or not finite.

    Args:
        variant: One of these.
        period: Steps from one measurement to the next.
        warmup: Measurements of the warm-up.
        at_once: Whether there is data for several measurements at one step.
    """

    def __init__(self, variant: Variant, period: int, warmup: int, at_once: bool):
        self.variant, self.period, self.warmup, self.at_once = variant, period, warmup, at_once
        self.first = period - 1 if variant == "as-published" else 0
        self.t = 0  # steps made
        self.next = self.first  # the step of the next measurement
        self.tried = 0  # measurements since the start, or since groups were added

    @property
    def needed(self) -> int:
        """How many measurements give the first rates."""
        return max(1, self.warmup) if self.variant == "smoothed" else self.warmup + 1

    @property
    def due(self) -> bool:
        """Whether the next step measures."""
        return self.t >= self.next

    @property
    def rests(self) -> bool:
        """Whether the next step does nothing at all."""
        return self.variant == "as-run" and 0 < self.tried < self.needed and not self.due

    @property
    def ready(self) -> bool:
        """Whether there are enough measurements for rates."""
        return self.tried >= self.needed

    def begin(self) -> int:
        """Return how many measurements to make now, count them, and plan the next."""
        missing = self.needed - self.tried if self.variant == "smoothed" and self.at_once else 1
        number = max(1, missing)
        self.tried += number
        self.next = self.first + ((self.t - self.first) // self.period + 1) * self.period
        if self.variant == "smoothed" and not self.ready:
            self.next = self.t + 1
        return number

    def advance(self) -> None:
        """Count a step."""
        if self.tried > 0 or not self.due:
            self.t += 1

    def restart(self) -> None:
        """Begin with the warm-up again at the next step."""
        self.tried, self.next = 0, self.t

    def state_dict(self) -> dict[str, int]:
        """Return the counts."""
        return {"t": self.t, "next": self.next, "tried": self.tried}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over saved counts."""
        counts = [state[name] for name in ("t", "next", "tried")]
        if not all(isinstance(x, int) and x >= 0 for x in counts):
            raise ValueError(f"the counts of steps are {counts}")
        self.t, self.next, self.tried = counts
