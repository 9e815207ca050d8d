"""Rehearse other learning rates: a short training run from the present state, undone afterwards.

The best next step is not the best rate. A few steps later the curvature along them is different,
most of all early in training, and the noise of batches counts. So derivatives say which rates to
raise and which to lower, and a rehearsal says how far.

A short training favours large rates, whose noise shows only later. Where neither curvature nor
noise matter, the loss depends on the product of rate and steps alone: a rate c times as large is c
times as fast. At the edge of stability it is no faster. Halfway between the two, a larger rate has
to be sqrt(c) times as fast. The present one has the benefit of the doubt: it gives way to a smaller
one only if it is less than c^(1/4) times as fast; so does the larger one of two others. A rate that
raises the loss is not fast at all: a smaller one has to raise it less in as many steps, and one
that is larger in some group must not raise it. Batches that nobody has trained on decide.

A smaller rate that the derivatives do not ask for has to be twice as fast as the present one, on
the batches that were trained on, which favours large rates. It is if the present rate does not
train. Where that one does train, the next step may not be predicted to be worse.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from itertools import groupby, islice
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.optim import Optimizer

from newton_summary.errors import NotFiniteError
from newton_summary.probe.directions import borrowed
from newton_summary.probe.probe import Probe
from newton_summary.probe.state import Journal, unmoved
from newton_summary.solver import Array

PASSES = 2  # as many steps as in two passes over the batches
MOST = 32  # batches, which are kept in memory
RAISE, LOWER = 1 / 2, 1 / 4  # the exponents of c
LEVEL = 0.01  # of the loss at the start: where nothing is left to learn, it rises by less
ROUNDING = 1e-6  # of it, in float32: which of two rates that hardly move is ahead means nothing


class Rehearsal(NamedTuple):
    """The loss that a short training reaches with the present rates, and with others.

    It is the loss of batches that it was not trained on, the last quarter of them. With a single
    batch, or with smaller rates that derivatives did not ask for, it is that of the batches that it
    was trained on.

    >>> Rehearsal(steps=32, now=1.9, then=1.7, then_steps=10).then
    1.7
    """

    steps: int  # with the present rates
    now: float
    then: float  # as suggested; with the best others if nothing is
    then_steps: int  # a larger rate has to be faster
    start: float = math.nan  # before the first step
    held_out: bool = True  # the batches of these losses
    change: float = math.nan  # of all rates with the best others; nan where it differs by group
    asked_for: bool = True  # by derivatives

    @property
    def decides(self) -> bool:
        """Whether the loss fell at all; else none of the rates is known to train."""
        return not min(self.now, self.then) >= self.start


def rehearse(
    probe: Probe, optimizer: Optimizer, several: Sequence[Array], times: Sequence[float] | None
) -> tuple[Rehearsal | None, int | None]:
    """Train with the present rates, and with each of several sets of factors on the groups' steps.

    Model and optimizer are put back bit for bit. Takes 2 gradients of each batch for the present
    rates and for each of the others.

    Args:
        probe: The loss and its data, at most the first 32 batches of it.
        optimizer: Whose steps are taken, on a copy of its state.
        several: Factors of all groups, each (S,).
        times: How many times as long as with the present rates a step is with each of them. None
            for smaller rates that derivatives do not ask for, which have half of the steps.

    Returns:
        The rehearsal, None without batches, and which of the factors to prefer to the present
        rates; None if none is.
    """
    with Journal(), probe:
        with probe.processes.joint():
            parts = groupby(probe.closures(), key=lambda part: part[0].number)
            batches = [list(of_one) for _, of_one in islice(parts, MOST)]
        batches = batches[: min(probe.processes.gather(len(batches)))]  # as each process has
        few, steps = len(batches), PASSES * len(batches)
        if not batches:
            return None, None
        pairs, ends = [(steps, few)] * len(several), [few] * len(several)
        if times is not None:
            pairs = [_lengths(steps, c) for c in times]
            ends = [_lengths(steps, min(times) / c)[0] for c in times]  # compared as if present
        train = partial(_train, probe, optimizer, batches, seen=times is None)
        present = train(np.ones_like(several[0]), {0, *(n for n, _ in pairs)})
        others = [
            train(c, {m, end} if times is None else {n, m, end})
            for c, (n, m), end in zip(several, pairs, ends, strict=True)
        ]
    found, better = [], []
    for i, (other, (n, m)) in enumerate(zip(others, pairs, strict=True)):
        is_lost = (times is None or times[i] < 1) and present[n] > present[0]
        if is_lost and times is not None and other[m] >= present[n]:
            m = n
        asked_for, change = times is not None, _common(several[i])
        held_out = asked_for and few > 1
        found.append(Rehearsal(n, present[n], other[m], m, present[0], held_out, change, asked_for))
        limit = math.inf
        if times is None:
            limit = present[n] - ROUNDING * abs(present[0])
        elif (several[i] > 1).any():
            limit = present[0] + LEVEL * abs(present[0])
        if other[m] < min(present[n], limit) or (is_lost and present[n] == limit == math.inf):
            better.append(i)
    best = min(better or range(len(found)), key=lambda i: others[i][ends[i]])
    return found[best], best if better else None


def _lengths(steps: int, c: float) -> tuple[int, int]:
    """Return after how many steps to compare the present rates, and those c times as large."""
    if c > 1:
        return steps, max(round(steps / c**RAISE), 1)
    return max(round(steps * c**LOWER), 1), steps


def _common(factors: Array) -> float:
    """Return the factor of all groups; nan if it differs."""
    return float(factors[0]) if np.allclose(factors, factors[0]) else math.nan


def _train(
    probe: Probe,
    optimizer: Optimizer,
    batches: Sequence[Any],
    factors: Array,
    lengths: set[int],
    seen: bool,
) -> dict[int, float]:
    """Return the loss of the last quarter of the batches after some steps on the others.

    Or that of the others, which were ``seen``. It is the mean after each of the last eighth of the
    steps; after 0 steps, that of the start.
    """
    count = max(len(batches) // 4, 1)
    trained = batches[:-count] or batches
    judged = [part for parts in (trained if seen else batches[-count:]) for part in parts]
    scored = {n: range(n - max(round(n / 8), 1), n) for n in lengths}
    losses = {-1: float(probe.mean_loss(judged))} if 0 in lengths else {}
    with unmoved(probe.params.values()), borrowed(optimizer, probe.params) as step:
        for k in range(max(lengths)):
            try:
                u = step(probe.gradient(trained[k % len(trained)]))
            except NotFiniteError:
                break
            probe.step(probe.partition.scale(u, torch.from_numpy(factors)))
            if any(k in some for some in scored.values()):
                losses[k] = float(probe.mean_loss(judged))
    means = {n: fmean(losses.get(k, math.inf) for k in some) for n, some in scored.items()}
    return {n: mean if math.isfinite(mean) else math.inf for n, mean in means.items()}
