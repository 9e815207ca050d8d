"""The law by which a learning rate is steered: running means of what steps gain and lose."""

from __future__ import annotations

import math
from dataclasses import dataclass

DOUBT = 4.0  # standard errors of the slope that an error has to overcome to count in full


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
        """Take a measurement in, along a step with some rate."""
        new = 1 - memory
        self.slope += new * (slope / rate - self.slope)
        self.square += new * ((slope / rate) ** 2 - self.square)
        self.curvature += new * (curvature / rate**2 - self.curvature)
        self.weight += new * (1 - self.weight)

    def factor(self, rate: float) -> float:
        """Return slope / curvature of a step with this rate: its best multiple."""
        return self.slope / (self.curvature * rate) if self.curvature else math.inf

    def stderr(self, memory: float) -> float:
        """Return the standard error of the mean slope.

        Of a mean with the weights (1 - m) m^k of independent values the variance is theirs times
        (1 - m) / (1 + m).
        """
        mean = self.slope / self.weight
        variance = max(self.square / self.weight - mean**2, 0.0)
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

    def surely_rises(self, rate: float, memory: float) -> bool:
        """Return whether steps with this rate raise the loss, by two standard errors."""
        return self.slope - 0.5 * self.curvature * rate < -2 * self.stderr(memory)
