"""A limit on the time for measurements: a share of the time for training."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from newton_summary.partition import make_partition

FEWEST = 2  # batches: one has no error bar
MEASUREMENTS = 10  # that a training should have room for


class Budget:
    """Keeps the time for measurements below a share of the time for training.

    A measurement is allowed once those before it, and one more (on the fewest batches, where there
    is a choice), fit into the share of training so far. The first, whose time is unknown, is always
    allowed, on credit.

    >>> ticks = iter([0, 0, 3, 40, 80])  # start; begin and end of a measurement; two questions
    >>> budget = Budget(0.1, clock=lambda: float(next(ticks)))
    >>> with budget.measuring():
    ...     pass
    >>> budget.allows(), budget.allows()  # twice 3 s, after 37 s and after 77 s of training
    (False, True)

    Args:
        share: Time for measurements over time for training; None for no limit.
        clock: Returns seconds.
    """

    def __init__(self, share: float | None, clock: Callable[[], float] = time.monotonic):
        if share is not None and not (isinstance(share, int | float) and 0 < share < 1):
            raise ValueError(
                f"budget={share!r}: expected a share of the training time, such as 0.05, "
                "or None for no limit."
            )
        self.share, self.clock = share, clock
        self.begin = clock()
        self.spent = 0.0  # seconds in measurements
        self.last = 0.0  # seconds of the last one

    def start(self) -> None:
        """Count the time of training, and of measurements, from now on."""
        self.begin, self.spent = self.clock(), 0.0

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Count the time inside as that of a measurement."""
        begin = self.clock()
        try:
            yield
        finally:
            self.last = self.clock() - begin
            self.spent += self.last

    @property
    def training(self) -> float:
        """Seconds of training so far."""
        return self.clock() - self.begin - self.spent

    def needed(self, used: int = 0) -> float:
        """Return after how many seconds of training another measurement fits.

        The last one was on ``used`` batches.
        """
        if self.share is None or not self.spent:
            return 0.0
        smallest = self.last * min(1.0, FEWEST / used) if used else self.last
        return (self.spent + smallest) / self.share

    def allows(self, used: int = 0) -> bool:
        """Return whether another measurement fits now."""
        needed = self.needed(used)
        return not needed or needed <= self.training

    def batches(self, used: int, most: int, seconds: float) -> int:
        """Return how many batches to measure on, at most ``most``.

        The last measurement was on ``used`` batches, 0 before the first; the other argument is the
        training time between measurements, in seconds.
        """
        if self.share is None or not used or not self.last:
            return most
        return max(FEWEST, min(most, int(self.share * seconds * used / self.last)))

    def affordable(self, model: nn.Module, partition: Any, batches: float) -> Any:
        """Return the given partition, or a coarser one with room for ten measurements, or None.

        A measurement of the optimizer's groups and of S others takes about 60 + S gradients of each
        of its batches (docs/integrations.md), and training one for each batch.

        >>> model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(30)))
        >>> for batches in (1e6, 1e5, 7e4, 1e2):
        ...     print(Budget(0.02).affordable(model, "canonical", batches))
        canonical
        layers
        weights-biases
        None

        Args:
            model: The model.
            partition: The groups to measure; None for those of the optimizer alone.
            batches: How many batches training has; infinity if unknown.
        """
        if self.share is None:
            return partition
        for spec in (partition, "layers", "weights-biases"):
            cost = FEWEST * (60 + len(make_partition(model, spec)))
            if MEASUREMENTS * cost <= self.share * batches:
                return spec
        return None
