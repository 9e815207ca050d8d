"""What training prints to the console: a few words for each measurement."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from newton_summary.measuring.advice import Advice, BelowPeak, GroupAdvice, error_text
from newton_summary.measuring.factors import Estimate
from newton_summary.optimizer.controller import RateController, rates_in_words

LIMIT = 10.0  # suggest_lrs looks for factors up to this
TOO_LOW = 0.05  # of the peak of a schedule: the best step is then many times as long
PATIENCE = 2.0  # seconds after which a measurement that still runs is mentioned


class Console:
    """Standard error, or nothing."""

    def __init__(self, enabled: bool = True):
        self.enabled = enabled

    def say(self, text: str) -> None:
        """Write a line, below whatever progress bar is there: these do not end their line."""
        if self.enabled:
            print(f"\nnewton_summary: {text}", file=sys.stderr, flush=True)

    @contextmanager
    def patience(self, when: str) -> Iterator[None]:
        """Write a line while the body runs, if it takes more than two seconds."""
        timer = threading.Timer(PATIENCE, self.say, [f"measuring {when} ..."])
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()


def opening(loss: float, below_peak: BelowPeak) -> str:
    """Return the loss, and how far a schedule is below its peak.

    >>> opening(0.68, ((1e-4, 1e-3),))
    'loss 0.68, a schedule at 0.1 of its peak'
    """
    if not below_peak:
        return f"loss {loss:.4g}"
    share = min(lr / peak for lr, peak in below_peak)
    return f"loss {loss:.4g}, a schedule at {share:.2g} of its peak"


def rates_too_low(below_peak: BelowPeak) -> set[float]:
    """Return the rates so far below the peak of a schedule that advice means nothing."""
    return {lr for lr, peak in below_peak if lr < TOO_LOW * peak}


def is_too_low(advice: Advice) -> bool:
    """Whether all rates are."""
    low = rates_too_low(advice.below_peak)
    return low.issuperset(lr for group in advice.groups for lr in group.lrs)


def steered_sentence(loss: float, below_peak: BelowPeak, controller: RateController) -> str:
    """Return the loss, and what a controller did, which does not take advice."""
    said = steering(controller, brief=bool(rates_too_low(below_peak)))
    return f"{opening(loss, below_peak)}; {said}"


def sentence(advice: Advice, started: bool = False) -> str:
    """Return what advice says: the loss, and a clause for each group, each on its own line.

    If the training has ``started``, a lower rate brings the loss down at once, and less far in the
    end.
    """
    start = opening(float(advice.summary.loss), advice.below_peak)
    if is_too_low(advice):
        return f"{start}: too low for advice"
    several, together = len(advice.groups) > 1, advice.together
    noisy = [g for g in advice.groups if g.verdict == "noise"] if together is not None else []
    said = [
        clause(g, several, advice.kept_undecided(g), started)
        for g in advice.groups
        if g not in noisy
    ]
    if together is not None:
        lrs = tuple(dict.fromkeys(lr for group in noisy for lr in group.lrs))
        who = "the others" if said else "all"
        one = GroupAdvice(
            who, lrs, together.factor, together.stderr, noisy[0].change, together.verdict
        )
        said.append(f"{who} together (too noisy one by one): {clause(one, started=started)}")
    return "\n  ".join([start, *said]) if several else f"{start}; {said[0]}"


def steering(controller: RateController, brief: bool = False) -> str:
    """Return the present rates and, unless ``brief``, their last change, and why."""
    if controller.history and not any(controller.rates):
        return "steered: the schedule is at 0"
    said = f"steered: lr {rates_in_words(controller.rates)}"
    changes = (r for r in reversed(controller.history) if f"{r.change:.3g}" != "1")
    last = next(changes, None)
    if last is None or brief:
        return said
    factor = f", the best step was x{last.factor:.2g}" if math.isfinite(last.factor) else ""
    return f"{said} (last change after step {last.step}: x{last.change:.3g}, {last.why}{factor})"


def clause(
    group: GroupAdvice, named: bool = False, undecided: bool = False, started: bool = False
) -> str:
    """Return what to do with the learning rate of a group.

    >>> clause(GroupAdvice("group0", (3e-4,), 6.1, 0.8, change=6.1, verdict="raise"))
    'lr 0.0003 could be x6.1 ± 0.8'
    >>> clause(GroupAdvice("group0", (3e-4,), 10.0, 0.0, change=10.0, verdict="raise"))
    'lr 0.0003 could be x10 or more'
    >>> clause(GroupAdvice("group0", (3e-4,), 6.1, 0.8, change=3.2, verdict="raise"))
    'lr 0.0003 could be x3.2 by a rehearsal (the best next step: x6.1 ± 0.8)'
    >>> clause(GroupAdvice("group0", (3e-4,), 10.0, 1e-17, change=3.2, verdict="raise"))
    'lr 0.0003 could be x3.2 by a rehearsal (the best next step: x10 or more)'
    >>> clause(GroupAdvice("heads", (3e-4,), 1.1, 0.1, change=1.0, verdict="keep"), named=True)
    'lr 0.0003 of heads is right (the best next step: x1.1 ± 0.1)'
    >>> clause(GroupAdvice("group0", (3e-4,), 0.1, 0.0, change=1.0, verdict="keep"))
    'keep lr 0.0003: good enough in a rehearsal (for the next step alone: x0.1 or less)'
    >>> clause(GroupAdvice("group0", (3e-4,), 0.2, 0.1, 0.2, verdict="lower"), started=True)
    'for the next steps lr 0.0003 could be x0.2 ± 0.1'
    """
    lr = ", ".join(f"{value:.3g}" for value in group.lrs) + (f" of {group.name}" if named else "")
    found = _times(group.factor, group.stderr)
    if group.verdict in ("raise", "lower"):
        if not math.isclose(group.change, group.factor, rel_tol=1e-6):
            found = f"x{group.change:.2g} by a rehearsal (the best next step: {found})"
        if started and group.verdict == "lower":
            return f"for the next steps lr {lr} could be {found}"
        return f"lr {lr} {'could' if group.verdict == 'raise' else 'should'} be {found}"
    if group.verdict == "keep" and Estimate(group.factor, group.stderr).verdict != "keep":
        why = "a rehearsal decides nothing" if undecided else "good enough in a rehearsal"
        return f"keep lr {lr}: {why} (for the next step alone: {found})"
    return {
        "keep": f"lr {lr} is right (the best next step: {found})",
        "noise": f"lr {lr}: too noisy to say",
        "refuted": f"lr {lr} stays: other rates were tried, and are worse",
    }.get(group.verdict, f"lr {lr}: {group.verdict}")


def _times(factor: float, stderr: float | None) -> str:
    """Return a factor with its error; one at the limits may be beyond."""
    for limit, beyond in ((LIMIT, "or more"), (1 / LIMIT, "or less")):
        if math.isclose(factor, limit):
            return f"x{factor:.2g} {beyond}"
    error = error_text(stderr, factor)
    return f"x{factor:.2g} ± {error}" if error else f"x{factor:.2g}"
