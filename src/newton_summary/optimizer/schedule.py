"""When summaries are measured, and from when on rates follow from them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

Variant = Literal["steered", "as-run", "as-published"]
VARIANTS: tuple[Variant, ...] = ("steered", "as-run", "as-published")


class Schedule:
    """Counts steps and measurements of the paper's algorithm.

    ``"as-run"`` measures at steps 0, period, 2 period, ... The first ``warmup`` measurements do not
    move, and until then the direction advances at the measurements alone.

    ``"as-published"`` counts steps from 1 and measures at steps period, 2 period, ... The direction
    advances at every step, and the first measurement that is not of the warm-up moves.

    The count waits where the first measurement is due and the direction is zero or not finite.

    Args:
        variant: One of these.
        period: Steps from one measurement to the next.
        warmup: Measurements of the warm-up.
    """

    def __init__(self, variant: Variant, period: int, warmup: int):
        self.variant, self.period, self.warmup = variant, period, warmup
        self.first = period - 1 if variant == "as-published" else 0
        self.t = 0  # steps made
        self.next = self.first  # the step of the next measurement
        self.tried = 0  # measurements since the start, or since groups were added

    @property
    def due(self) -> bool:
        """Whether the next step measures."""
        return self.t >= self.next

    @property
    def rests(self) -> bool:
        """Whether the next step does nothing at all."""
        return self.variant == "as-run" and 0 < self.tried <= self.warmup and not self.due

    @property
    def ready(self) -> bool:
        """Whether there are enough measurements for rates."""
        return self.tried > self.warmup

    def begin(self) -> None:
        """Count a measurement, and plan the next."""
        self.tried += 1
        self.next = self.first + ((self.t - self.first) // self.period + 1) * self.period

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
