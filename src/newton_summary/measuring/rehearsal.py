"""Rehearse other learning rates: a short training with them from the present state, undone after.

The best next step is not the best rate. A few steps on the curvature along them is another one,
most of all at the start of a training, and the noise of batches counts. So derivatives say which
rates to raise and which to lower, and a rehearsal says how far.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby, islice
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from newton_summary.errors import NotFiniteError
from newton_summary.measuring.box import Array
from newton_summary.probe.directions import borrowed
from newton_summary.probe.probe import Probe
from newton_summary.probe.state import Journal, unmoved

PASSES = 2  # over the data
MOST = 32  # batches, which are kept in memory
WORTH = 1.25  # a larger rate has to lower the loss by so much more


class Rehearsal(NamedTuple):
    """The loss that a short training reaches with the present rates, and as suggested.

    >>> Rehearsal(steps=32, now=1.9, then=0.7).then
    0.7
    """

    steps: int
    now: float  # mean over the last pass through the data, each batch before its step
    then: float


def rehearse(
    probe: Probe, optimizer: Optimizer, several: Sequence[Array]
) -> tuple[int, list[float]]:
    """Train with each of several factors on the steps of the groups, a step for each batch.

    Model and optimizer are put back bit for bit.

    Args:
        probe: The loss and its data, at most the first 32 batches of it.
        optimizer: Whose steps are taken, on a copy of its state.
        several: Factors of all groups, each (S,).

    Returns:
        The number of steps, and the loss that each of the factors reaches: the mean over the last
        pass through the data, each batch before its step; infinity if the loss is lost.
    """
    with Journal(), probe:
        with probe.processes.joint():
            parts = groupby(probe.closures(), key=lambda part: part[0].number)
            batches = [list(of_one) for _, of_one in islice(parts, MOST)]
        batches = batches[: min(probe.processes.gather(len(batches)))]
        reached = [_train(probe, optimizer, factors, batches) for factors in several]
    return PASSES * len(batches), reached


def _train(probe: Probe, optimizer: Optimizer, factors: Array, batches: Sequence[Any]) -> float:
    losses: list[float] = []
    with unmoved(probe.params.values()), borrowed(optimizer, probe.params) as step:
        for k in range(PASSES):
            for parts in batches:
                if k == PASSES - 1:
                    losses.append(float(probe.mean_loss(parts)))
                try:
                    u = step(probe.gradient(parts))
                except NotFiniteError:
                    return math.inf
                u = probe.partition.scale(u, torch.from_numpy(factors))
                with torch.no_grad():
                    for name, p in probe.params.items():
                        p.sub_(u[name])
                probe.moved()
    mean = sum(losses) / max(len(losses), 1)
    return mean if math.isfinite(mean) else math.inf


def prefer(start: float, now: float, reached: Sequence[float], larger: bool) -> int | None:
    """Return which of several rehearsals is better than the present rates; None if none is.

    A short rehearsal favours large rates, whose noise shows only later, so a larger one has to
    lower the loss by a quarter more: its logarithm, as far as losses are positive.

    >>> prefer(2.3, now=1.0, reached=[0.7, 0.4], larger=True)
    1
    >>> prefer(2.3, now=1.0, reached=[0.9, 0.95], larger=True)  # hardly better
    >>> prefer(2.3, now=1.0, reached=[0.9, 0.95], larger=False)
    0

    Args:
        start: The loss before.
        now: The loss that the present rates reach.
        reached: The losses that others reach.
        larger: Whether these are larger than the present ones.
    """
    logarithm = min(start, now, *reached) > 0

    def fall(loss: float) -> float:
        if not math.isfinite(loss):
            return -math.inf
        return math.log(start / loss) if logarithm else start - loss

    best = min(range(len(reached)), key=reached.__getitem__)
    if not larger and not now < start:  # smaller ones can only do less harm
        return best
    needed = fall(now) * (WORTH if larger and fall(now) > 0 else 1.0)
    return best if fall(reached[best]) > needed else None
