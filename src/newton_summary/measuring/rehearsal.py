"""Rehearse other learning rates: a short training with them from the present state, undone after.

The best next step is not the best rate. A few steps on the curvature along them is another one,
most of all at the start of a training, and the noise of batches counts. So derivatives say which
rates to raise and which to lower, and a rehearsal says how far.

A short training favours large rates, whose noise shows only later. Where neither curvature nor
noise matter, the loss depends on the product of rate and steps alone: a rate c times as large is c
times as fast. At the edge of stability it is no faster. So the present rates are left for larger
ones if these are c^(1/2) times as fast. They are left for smaller ones if they are less than
c^(1/3) times as fast, by more than the standard error over the batches that nobody has trained on:
the best next step errs towards small rates. Once they are left, the benefit of the doubt is with
the farthest ones, against those halfway.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby, islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.optim import Optimizer

from newton_summary.errors import NotFiniteError
from newton_summary.measuring.box import Array
from newton_summary.probe.directions import borrowed
from newton_summary.probe.probe import Probe
from newton_summary.probe.state import Journal, unmoved

PASSES = 2  # as many steps as in two passes over the batches
MOST = 32  # batches, which are kept in memory
RAISE, LOWER, FARTHEST = 1 / 2, 1 / 3, 1 / 4  # the exponents of c


class Rehearsal(NamedTuple):
    """The loss that a short training reaches with the present rates, and with others.

    It is the loss of batches that it was not trained on: the last quarter of them.

    >>> Rehearsal(steps=32, now=1.9, then=1.7, then_steps=10).then
    1.7
    """

    steps: int  # with the present rates
    now: float
    then: float  # as suggested; with the best others if nothing is
    then_steps: int  # a larger rate has to be faster


def rehearse(
    probe: Probe, optimizer: Optimizer, several: Sequence[Array], times: Sequence[float]
) -> tuple[Rehearsal, int | None]:
    """Train with the present rates, and with each of several factors on the steps of the groups.

    Model and optimizer are put back bit for bit. Takes at most 2 gradients of each batch for the
    present rates and for each of the others.

    Args:
        probe: The loss and its data, at most the first 32 batches of it.
        optimizer: Whose steps are taken, on a copy of its state.
        several: Factors of all groups, each (S,): the farthest, and maybe some halfway.
        times: How many times as long as with the present rates a step is with each of them.

    Returns:
        The rehearsal, and which of the factors to prefer to the present rates; None if none is.
    """
    with Journal(), probe:
        with probe.processes.joint():
            parts = groupby(probe.closures(), key=lambda part: part[0].number)
            batches = [list(of_one) for _, of_one in islice(parts, MOST)]
        batches = batches[: min(probe.processes.gather(len(batches)))]
        if not batches:
            return Rehearsal(0, math.nan, math.nan, 0), None
        steps = PASSES * len(batches)
        pairs = [_lengths(steps, c, LOWER) for c in times]
        ends: tuple[int, ...] = (pairs[0][1],)
        if len(times) == 2:
            ends = _lengths(steps, times[1] / times[0], FARTHEST)
        present = _train(probe, optimizer, np.ones_like(several[0]), batches, {n for n, _ in pairs})
        others = [
            _train(probe, optimizer, factors, batches, {m, end})
            for factors, (_, m), end in zip(several, pairs, ends, strict=True)
        ]
    ahead = [_ahead(other[m], present[n], m == steps) for other, (n, m) in zip(others, pairs)]
    last = [other[end] for other, end in zip(others, ends, strict=True)]
    best = int(np.argmin([losses.mean() for losses in last]))  # the farthest of equals
    n, m = pairs[best]
    if any(ahead) and not ahead[best]:  # it is better than one that is
        m = ends[best]
    found = Rehearsal(n, float(present[n].mean()), float(others[best][m].mean()), m)
    return found, best if any(ahead) else None


def _lengths(steps: int, c: float, lower: float) -> tuple[int, int]:
    """Return after how many steps to compare rates with others, c times as large.

    The former have the benefit of the doubt.
    """
    if c > 1:
        return steps, max(round(steps / c**RAISE), 1)
    return max(round(steps * c**lower), 1), steps


def _ahead(losses: Array, present: Array, smaller: bool) -> bool:
    """Return whether losses of batches are below those of the present rates.

    Those of smaller rates have to be by a standard error, unless the present ones diverge.
    """
    if not np.isfinite(present).all():
        return smaller or bool(np.isfinite(losses).all())
    if not np.isfinite(losses).all():
        return False
    gains = present - losses
    if not smaller or len(gains) == 1:
        return bool(gains.mean() > 0)
    return bool(gains.mean() > gains.std(ddof=1) / math.sqrt(len(gains)))


def _train(
    probe: Probe, optimizer: Optimizer, factors: Array, batches: Sequence[Any], lengths: set[int]
) -> dict[int, Array]:
    """Return the losses of the last quarter of the batches after so many steps on the others.

    They are means over the last eighth of the steps.
    """
    count = max(len(batches) // 4, 1)
    trained = batches[:-count] or batches
    scored = {n: range(n - max(round(n / 8), 1), n) for n in lengths}
    losses: dict[int, list[float]] = {}
    with unmoved(probe.params.values()), borrowed(optimizer, probe.params) as step:
        for k in range(max(lengths)):
            try:
                u = step(probe.gradient(trained[k % len(trained)]))
            except NotFiniteError:
                break
            u = probe.partition.scale(u, torch.from_numpy(factors))
            with torch.no_grad():
                for name, p in probe.params.items():
                    p.sub_(u[name])
            probe.moved()
            if any(k in some for some in scored.values()):
                losses[k] = [float(probe.mean_loss(parts)) for parts in batches[-count:]]
    lost = [math.inf] * count
    means = {n: np.mean([losses.get(k, lost) for k in some], 0) for n, some in scored.items()}
    return {n: np.where(np.isfinite(mean), mean, math.inf) for n, mean in means.items()}
