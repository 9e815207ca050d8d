"""The law by which a learning rate is steered: running means of what steps gain and lose."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from newton_summary.parallel.processes import local_part
from newton_summary.partition import inner_of_all

SET_POINT = 0.8  # where the factor is kept; 1 is careful
SAME = 0.01  # relative difference of two slopes that are the same but for rounding
DOUBT = 4.0  # standard errors of the slope that an error has to overcome to count in full
ROUNDING = 1e-12  # of the square of a mean: less is no variance
UNREAD = 100  # slopes that may be left on the device


def best_multiple(slope: float, curvature: float) -> float:
    """Return slope / curvature of a step: 0 if it leads uphill, infinite without a minimum.

    >>> best_multiple(3.0, 2.0), best_multiple(-3.0, 2.0), best_multiple(3.0, -2.0)
    (1.5, 0.0, inf)
    """
    if slope <= 0:
        return 0.0
    return math.inf if curvature <= 0 else slope / curvature


@dataclass
class Balance:
    """Running means of slope and curvature along steps, each for a learning rate of 1.

    A step with the rate r gains ``slope * r`` to first order and loses ``curvature * r**2 / 2``.

    Attributes:
        slope: Mean of slope / r.
        square: Mean of its square, which tells how much it varies.
        curvature: Mean of curvature / r^2.
        weight: Sum of the weights of all measurements; 1 in the end.
    """

    slope: float = 0.0
    square: float = 0.0
    curvature: float = 0.0
    weight: float = 0.0

    def add(self, slope: float, curvature: float, rate: float, memory: float) -> None:
        """Add a measurement, along a step with some rate."""
        new = 1 - memory
        self.slope += new * (slope / rate - self.slope)
        self.square += new * ((slope / rate) ** 2 - self.square)
        self.curvature += new * (curvature / rate**2 - self.curvature)
        self.weight += new * (1 - self.weight)

    def factor(self, rate: float) -> float:
        """Return the best multiple of a step with this rate."""
        return best_multiple(self.slope, self.curvature * rate)

    def stderr(self, memory: float) -> float:
        """Return the standard error of the mean slope.

        Of a mean with the weights (1 - m) m^k of independent values the variance is theirs times
        (1 - m) / (1 + m).
        """
        mean = self.slope / self.weight
        variance = self.square / self.weight - mean**2
        if variance < ROUNDING * mean**2:  # such as after one measurement
            return 0.0
        return self.weight * math.sqrt(variance * (1 - memory) / (1 + memory))

    def error(self, rate: float, set_point: float, memory: float) -> float:
        """Return how far the rate is from where the factor is at its set point.

        Zero there, up to 1 where the rate is too low and down to -1 where it is too high; smaller
        as the slope is less sure, or else noise, which often turns its sign, would drive the rate
        to zero.
        """
        gained, lost = self.slope, set_point * self.curvature * rate
        total = abs(gained) + abs(lost) + DOUBT * self.stderr(memory)
        return (gained - lost) / total if total > 0 else 0.0

    def surely_too_long(self, rate: float, memory: float, errors: float) -> bool:
        """Return whether such steps raise the loss, and short ones lower it, by this many errors.

        Where short ones do not either, the rate is not to blame: a network that memorises its
        samples forgets those of the next batch, which it has not seen for longest.
        """
        doubt = errors * self.stderr(memory)
        return self.slope > doubt and self.slope - 0.5 * self.curvature * rate < -doubt


@dataclass
class EndSlopes:
    """Slopes at the ends of steps, along the gradients that training computes after them.

    They count as long as these gradients are those of the measured loss, rather than clipped, of
    another loss, or sums over several batches: where both slopes of a step are known, their sizes
    must be similar.

    Attributes:
        before: The parameters before the last step, if its slope is wanted.
        rate: The learning rate of that step.
        measured: Its slope at the end, for a learning rate of 1, if it was measured as well.
        total: Sum of the slopes, for a learning rate of 1, since the last measurement.
        count: How many there are.
        pair: Both slopes of the last step that was measured.
        trained_size: Running mean of the size of slopes that were measured as well.
        measured_size: That of the same as they were measured.
        agreed: How many of these were the same, one after the other: no dropout, no clipping.
        unread: Slopes that were not waited for, with rate, and as measured.
    """

    before: list[Tensor] | None = None
    rate: float = 0.0
    measured: float | None = None
    total: float = 0.0
    count: int = 0
    pair: tuple[float, float] | None = None
    trained_size: float = 0.0
    measured_size: float = 0.0
    agreed: int = 0
    unread: list[tuple[Tensor, float, float | None]] = field(default_factory=list)

    def follow(self, before: list[Tensor] | None, rate: float) -> None:
        """Begin with the step that is taken next."""
        self.before, self.rate, self.measured = before, rate, None

    def take(self, params: Iterable[Tensor]) -> None:
        """Take the slope of the last step from the present gradients; does not wait."""
        before, self.before = self.before, None
        if before is None or self.rate == 0:
            return
        parts = [(b, p, p.grad) for b, p in zip(before, params, strict=True) if p.grad is not None]
        if not parts:
            return
        starts, ends, grads = (list(map(local_part, some)) for some in zip(*parts, strict=True))
        slope = inner_of_all(torch._foreach_sub(starts, ends), grads)
        self.unread.append((slope, self.rate, self.measured))
        self.measured = None
        if len(self.unread) >= UNREAD:
            self.read()

    def read(self) -> None:
        """Add up the slopes that were taken (waits)."""
        slopes = torch.stack([slope for slope, _, _ in self.unread]).tolist() if self.unread else []
        for slope, (_, rate, measured) in zip(slopes, self.unread, strict=True):
            if measured is not None:
                self.pair = (slope / rate, measured)
            elif math.isfinite(slope):
                self.total, self.count = self.total + slope / rate, self.count + 1
        self.unread = []

    def mean(self, slope: float, rate: float, memory: float, shared: torch.device | None) -> float:
        """Return the mean of all slopes since the last time, given the one that was measured.

        Args:
            slope: At the end of the last step.
            rate: The learning rate of that step.
            memory: How much of the running means is left.
            shared: Where parameters are divided among ranks, so that each has parts of the slopes,
                the device on which to add them up.
        """
        self.read()
        trained = 0.0 if self.pair is None else self.pair[0]
        total, count = self.total, float(self.count)
        if shared is not None:
            parts = torch.tensor([total, count, trained], dtype=torch.float64, device=shared)
            dist.all_reduce(parts)
            total, count, trained = parts.tolist()
            count /= dist.get_world_size()
        if self.pair is not None and math.isfinite(trained):
            self.trained_size += (1 - memory) * (abs(trained) - self.trained_size)
            self.measured_size += (1 - memory) * (abs(self.pair[1]) - self.measured_size)
            same = math.isclose(trained, self.pair[1], rel_tol=SAME)
            self.agreed = self.agreed + 1 if same else 0
        self.total, self.count, self.pair, self.measured = 0.0, 0, None, slope / rate
        alike = 0.5 * self.measured_size < self.trained_size < 2 * self.measured_size
        return (total * rate + slope) / (count + 1) if alike else slope

    def state_dict(self) -> dict[str, Any]:
        """Return everything as plain values and tensors."""
        self.read()
        before = None if self.before is None else [x.clone() for x in self.before]
        saved = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "unread"}
        return saved | {"before": before}
