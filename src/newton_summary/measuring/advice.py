"""Learning rates for any optimizer: the factor by which each of its groups should change."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypedDict

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from newton_summary.derivatives import Backend
from newton_summary.display.names import check_arguments, first_names
from newton_summary.display.table import ShownAsTable
from newton_summary.display.warn import warn_user
from newton_summary.errors import NotFiniteError
from newton_summary.measuring.factors import NEAR, Estimate, FactorModel, Verdict, has_effect
from newton_summary.measuring.lambda_int import STRENGTHS
from newton_summary.measuring.measurement import agree, find_partition, open_probe, summarize
from newton_summary.measuring.param_groups import (
    leave_out_others,
    multiply_rates,
    own_groups,
    rates_of,
)
from newton_summary.measuring.rehearsal import LEVEL, Rehearsal, rehearse
from newton_summary.measuring.trial_steps import real_changes
from newton_summary.parallel.processes import Distributed, find_processes
from newton_summary.partition import Params, Partition, Spec
from newton_summary.probe.directions import borrowed, measures_itself
from newton_summary.probe.inputs import NumSamples, read_all
from newton_summary.probe.probe import LossFn, Probe
from newton_summary.probe.state import Journal, unmoved
from newton_summary.solver import Array, LearningRates, check_strength, learning_rates
from newton_summary.summary import Summary, not_finite

if TYPE_CHECKING:
    from typing_extensions import Unpack

ALIKE = 2.0  # rates within this factor train alike: none is rehearsed
WORTH = 3.0  # a smaller change is not made: one in four of them harms in the end
SHORT = 8  # steps of a rehearsal: fewer than four batches
LOW = 0.5  # of the peak of a schedule: advice for a lower rate says little about the peak
BelowPeak = tuple[tuple[float, float], ...]  # pairs of a rate and the peak of its schedule
VERDICTS: dict[Verdict, str] = {
    "raise": "the loss would fall more with a larger rate",
    "lower": "the loss would fall more, or rise less, with a smaller rate",
    "keep": "the present rate is within the error of the best one, or about as good: near it, or "
    "fast enough in the rehearsal",
    "noise": "the batches do not agree on whether another rate is better",
    "refuted": "a step with another rate was tried, and lowered the loss less than the present one",
    "not yet": "parts of it have no gradient yet, such as a LoRA factor whose partner is zero, or "
    "a layer before an output layer that starts at zero: ask again after some steps",
    "no effect": "the loss hardly depends on this group, such as a bias before a batch norm",
    "no step": "the optimizer does not move this group: its gradient is zero, or its lr is, as "
    "before the first step of a warm-up (ask before the scheduler is made), or the step is lost in "
    "rounding",
}
"""What each verdict means."""


class Measuring(TypedDict, total=False):
    """Options of the measurement, as for :func:`summarize`."""

    backend: Backend
    microbatch: int | None
    num_samples: NumSamples | None
    progress: bool
    distributed: Distributed


class Change(NamedTuple):
    """The change of the loss by one step, as predicted by the model and as tried on the data.

    >>> Change(predicted=-0.12, real=-0.11).real
    -0.11
    """

    predicted: float  # by the cubic model
    real: float  # of the loss of the same data; may be nan or infinite


@dataclass(frozen=True)
class GroupAdvice:
    """The advice for one group.

    >>> GroupAdvice("fc.weight", (0.1,), 3.2, 0.4, change=3.2, verdict="raise").suggested
    (0.32000000000000006,)
    """

    name: str
    lrs: tuple[float, ...]  # present learning rates of its parameters
    factor: float  # the best step inside the limits, as a multiple of the present one
    stderr: float | None  # standard error of the factor over batches; None with one batch
    change: float  # the factor that apply() takes
    verdict: Verdict  # a key of VERDICTS

    @property
    def suggested(self) -> tuple[float, ...]:
        """The learning rates after :meth:`Advice.apply`."""
        return tuple(lr * self.change for lr in self.lrs)


@dataclass(eq=False)
class Advice(ShownAsTable):
    """Factors for the learning rates of an optimizer, made by :func:`suggest_lrs`.

    ``print(advice)`` shows a table, ``advice["fc.weight"]`` a group, ``advice.apply()`` changes the
    optimizer.

    >>> _ = torch.manual_seed(0)
    >>> model = nn.Linear(3, 1)
    >>> data = torch.utils.data.DataLoader(torch.randn(64, 3), batch_size=16)
    >>> sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    >>> advice = suggest_lrs(model, lambda model, x: model(x).square().mean(), data, sgd)
    >>> advice
    Advice(1 group: 1 raise)

    Attributes:
        groups: One :class:`GroupAdvice` for each group.
        now: The change of the loss by a step with the present rates.
        then: The change by a step with the suggested rates: above ``now`` only for smaller rates
            that got further in the rehearsal, and predicted to be only where the present ones fail
            in it.
        together: The factor, with its error, of the groups that are too noisy one by one; None if
            that is noise as well, or if trials decide otherwise.
        rehearsal: The loss after some steps with the present rates and with the best others; None
            if there was nothing to rehearse.
        summary: The measurement, with its errors.
        rates: The solution without limits, and with the strength of the cubic term that was used.
        below_peak: Rates that a schedule had below half of its peak, with the peak.
    """

    _right = (1, 2, 3, 5, 6)

    groups: tuple[GroupAdvice, ...]
    now: Change
    then: Change
    together: Estimate | None
    rehearsal: Rehearsal | None
    summary: Summary
    rates: LearningRates
    _optimizer: Optimizer
    _partition: Partition
    _limits: tuple[float, float]
    _waits: bool  # whether parameters have no gradient before this step, but after it
    below_peak: BelowPeak = ()
    _within_noise: bool = False  # whether no change is suggested for its small gain
    _applied: bool = False

    def __getitem__(self, name: str) -> GroupAdvice:
        """Return the advice for the group called ``name``."""
        return self.groups[self._partition.index(name)]

    def __repr__(self) -> str:
        """Return the number of groups, and how often each verdict occurs."""
        verdicts = [group.verdict for group in self.groups]
        counts = ", ".join(f"{verdicts.count(v)} {v}" for v in VERDICTS if v in verdicts)
        return f"Advice({len(verdicts)} group{'' if len(verdicts) == 1 else 's'}: {counts})"

    def _rows(self) -> list[tuple[str, ...]]:
        head = ("group", "lr", "change", "suggested", "verdict", "best next step", "±")
        rows: list[tuple[str, ...]] = [head]
        for title, group in zip(self._partition.titles, self.groups, strict=True):
            judged = group.verdict not in ("not yet", "no effect", "no step")
            factor, error = self._factor(group.factor, group.stderr) if judged else ("", "")
            both = (group.lrs, group.suggested)
            lrs, suggested = (", ".join(f"{rate:.3g}" for rate in rates) for rates in both)
            change = f"x{group.change:.3g}"
            rows.append((title, lrs, change, suggested, group.verdict, factor, error))
        return rows

    def _said(self) -> str:
        changed = any(group.change != 1 for group in self.groups)
        lines = [
            f"change of the loss ({float(self.summary.loss):.4g}) by one step: "
            + (
                f"{self.now.real:+.3g} now, {self.then.real:+.3g} as suggested "
                f"(predicted: {self.now.predicted:+.3g} and {self.then.predicted:+.3g})"
                if changed
                else f"{self.now.real:+.3g} (predicted: {self.now.predicted:+.3g})"
            )
        ]
        worse = self.then.real > self.now.real
        step = "is worse" if worse else ""
        if not worse and self.then.predicted > self.now.predicted:
            step = "is predicted to be worse"
        if changed and self.then.real > 0:
            step = "raises the loss" if worse else "still raises the loss (by less than now)"
        tried = self.rehearsal
        if tried is None and step:
            lines.append(f"the next step {step}")
        if tried is not None:
            steps, now, then, then_steps, start, held_out, change, _ = tried
            reached, reached_then = told_apart(now, then)
            batches = "held-out batches" if held_out else "the batches it trains on"
            others = "other rates" if math.isnan(change) else f"lr x{change:.3g}"
            lines.append(
                f"rehearsal: the loss of {batches} goes from {start:.4g} to {reached} in {steps} "
                f"steps now, to {reached_then} in {then_steps} "
                f"{'as suggested' if changed else f'with {others}'}"
                f"{step and f', though the next step {step}'}"
            )
            if max(steps, then_steps) < SHORT:
                lines.append(
                    "a rehearsal this short says little: give sixteen batches or more, of the "
                    "size that you train with"
                )
        if self.together is not None:
            noisy = [group for group in self.groups if group.verdict == "noise"]
            factor, error = self._factor(self.together.factor, self.together.stderr)
            best, change = f"{factor}{error and ' ± '}{error}", noisy[0].change
            if not math.isclose(change, self.together.factor, rel_tol=5e-3):
                best = f"x{change:.3g} (best next step: {best})"
            names = first_names([group.name for group in noisy])
            lines.append(f"too noisy one by one: {names}; together: {best}")
        limited = any(self.at_limit(group.change) for group in self.groups)
        beyond = any(self.at_limit(g.factor) and g.change != 1 for g in self.groups)
        if (limited or beyond) and not self.below_peak:
            fails = self.then.real >= 0 and not (tried and tried.then < tried.start)
            when = "at once" if limited and fails else "after some training"
            what = "" if limited else "the best next step is "
            lines.append(f"{what}at the limit (max_change): apply, and ask again {when}")
        lines += [
            f"a schedule has lr at {lr:.3g}, and at {peak:.3g} at its peak: this is advice for "
            f"{lr:.3g} alone; for the peak, ask before the scheduler is made"
            for lr, peak in self.below_peak
        ]
        for verdict in VERDICTS:
            reasons = dict.fromkeys(self._why(g) for g in self.groups if g.verdict == verdict)
            lines += [f"{verdict}: {', or '.join(reasons)}"] if reasons else []
        if self.rehearsal is None and any(g.verdict == "noise" for g in self.groups):
            lines.append("nothing was rehearsed: whether the present rate trains is not known")
        if self.rates.no_cubic and self.summary.gbar.any():  # not where nothing moves
            only = "" if self.rates.ok else ", and only max_change limits the best next step"
            partial = self._waits or self.rates.no_effect  # D3 may be 0 in the others alone
            like = "" if partial else ", as with ReLU and squared error"
            lines.append(f"D3 is 0 in all groups{like}: the model of the loss is quadratic{only}")
        return "\n".join(lines)

    def _why(self, group: GroupAdvice) -> str:
        """Return what the verdict on a group means."""
        tried, own = self.rehearsal, Estimate(group.factor, group.stderr).verdict
        if group.verdict == "noise" and self.together is not None:
            return "the batches do not agree on this group alone: " + (
                "all such groups together keep their rates"
                if group.change == 1
                else "it takes the factor of all such groups together"
            )
        if group.verdict == "noise":
            fails = tried is None and _fails(self.now, self.summary)
            keep = "" if fails else "keep the present one, or "
            reason = (
                "the predicted gain by another rate is less than twice its standard error over the "
                "batches"
                if self._within_noise
                else VERDICTS["noise"]
            )
            return f"{reason}: {keep}measure on more batches"
        if group.verdict != "keep":
            return VERDICTS[group.verdict]
        if self.kept_undecided(group):
            return (
                "the rehearsal decides nothing: its loss falls with neither rate; give more batches"
            )
        changed = any(other.change != 1 for other in self.groups)
        if tried is not None and tried.then < tried.now and not changed:
            return (
                f"another rate got further in the rehearsal, but a change by less than x{WORTH:g} "
                f"is not sure to help in the end"
                if tried.asked_for
                else "a smaller rate got further in the rehearsal, but its next step is predicted "
                "to be worse: ask again after some training"
            )
        if own == "keep":
            is_near = abs(group.factor - 1) <= NEAR - 1
            where = "near" if is_near else "within two standard errors of"
            return f"the present rate is {where} the best one for the next step"
        if tried is None or not tried.asked_for:
            return f"rates within a factor of {ALIKE:g} of the best one train alike"
        return "the present rate is fast enough in the rehearsal, though not best for the next step"

    def kept_undecided(self, group: GroupAdvice) -> bool:
        """Whether a group keeps its rate only because a rehearsal lowered the loss with none."""
        if self.rehearsal is None or self.rehearsal.decides or group.verdict != "keep":
            return False
        return Estimate(group.factor, group.stderr).verdict != "keep"

    def _factor(self, factor: float, stderr: float | None) -> tuple[str, str]:
        """Return a factor and its error as text; one at the limits may be beyond."""
        sign = ("≥" if factor > 1 else "≤") if self.at_limit(factor) else ""
        shown = not sign or Estimate(factor, stderr).verdict == "noise"
        return f"{sign}x{factor:.3g}", error_text(stderr, factor) if shown else ""

    def at_limit(self, factor: float) -> bool:
        """Whether the best factor may lie beyond this one, whose error then says little."""
        return any(math.isclose(factor, limit) for limit in self._limits)

    def apply(self) -> None:
        """Set the optimizer's learning rates to the suggested ones.

        A parameter group that lies in several groups of the partition is split; the parts keep its
        options and the state of the parameters. Create schedulers after this: they remember the
        number of groups, and many of them the learning rates. A warning names those that do, and
        another one says if the rates are no longer those that the advice is about.

        Raises:
            ValueError: If tensors are divided among groups, which torch's optimizers cannot do.
            RuntimeError: If this was called before.
        """
        if self._applied:
            raise RuntimeError("This advice has been applied already. Measure again for more.")
        present = [rates_of(self._optimizer, self._partition, s) for s in range(len(self.groups))]
        told = [group.lrs for group in self.groups]
        if present != told:
            warn_user(
                f"The learning rates were {sorted({lr for lrs in told for lr in lrs})} when the "
                f"advice was given, and are {sorted({lr for lrs in present for lr in lrs})} now. "
                "The present ones are multiplied."
            )
        changes = [group.change for group in self.groups]
        multiply_rates(self._optimizer, self._partition, changes)
        self._applied = True


def error_text(stderr: float | None, factor: float) -> str:
    """Return the error of a factor; nothing where there is none, or rounding, as at a limit."""
    return f"{stderr:.2g}" if stderr and stderr > 1e-6 * factor else ""


def told_apart(a: float, b: float) -> tuple[str, str]:
    """Return two numbers with four digits, or with as many as tell them apart, up to eight.

    >>> told_apart(1.535, 1.0724)
    ('1.535', '1.072')
    >>> told_apart(0.692041, 0.691973)
    ('0.69204', '0.69197')
    """
    pairs = [(f"{a:.{digits}g}", f"{b:.{digits}g}") for digits in range(4, 9)]
    return next((pair for pair in pairs if pair[0] != pair[1]), pairs[0])


def suggest_lrs(
    model: nn.Module,
    loss_fn: LossFn,
    data: Any,
    optimizer: Optimizer,
    partition: Partition | Spec | None = None,
    lambda_int: float | Literal["auto"] = "auto",
    *,
    direction_data: Any = None,
    fraction: float = 1.0,
    max_change: float = 10.0,
    rehearsal: bool = True,
    diagonal: bool = False,
    **measuring: Unpack[Measuring],
) -> Advice:
    """Suggest a factor for the learning rate of each group of an optimizer.

    The direction is the optimizer's next step, so a factor of 1 means that the present learning
    rate is the best one for that step, given the curvature of the loss and the interactions between
    groups. The factors minimise the measured model inside the limits ``1 / max_change`` and
    ``max_change``, and the step is tried on the data: nothing is suggested that is predicted to be
    worse than the present rates, unless these fail in the rehearsal.

    The best next step is not the best rate for training, so the factors say which rates to raise
    and which to lower, and a rehearsal says how far: a short training run on a copy, with the
    present rates and with two others, judged on batches that it was not trained on. A rate c times
    as large has to reach the same loss in at most 1/sqrt(c) of the steps. Where the present rates
    would stay, smaller ones are rehearsed too, in case these do not train: with momentum the next
    step says little about later ones. Batches of the size you train with, sixteen or more (the
    first 32 are used), make it realistic. Model and optimizer do not change until ``apply()``.
    Takes one summary of each batch, up to twenty forward passes, and up to seven gradients of each
    batch for the rehearsal; as much again if the rates stay.

    Args:
        model: Any module.
        loss_fn: ``loss_fn(model, batch)`` returns the mean loss of a batch.
        data: Batches to measure on; two or more give error bars.
        optimizer: Any torch optimizer of this model, in its present state. Parameters that it does
            not hold are left out.
        partition: The groups; by default those of the optimizer. With ``"canonical"`` or
            ``"layers"``, ``apply()`` gives each tensor or layer its own learning rate.
        lambda_int: Strength of the cubic term; "auto" picks the one of 0, 1, 10, ... 1e8 whose step
            lowers the loss most.
        direction_data: The data whose gradient the optimizer follows; by default ``data``. With a
            separate batch the factors are those of real training steps: along the gradient of the
            data itself the loss seems to fall faster than it will.
        fraction: How much of the best change to suggest; the rehearsal then goes no further.
        max_change: The limit of the factors, up or down.
        rehearsal: Whether to rehearse. Otherwise the factors are suggested as they are.
        diagonal: Leave out the interactions between groups.
        **measuring: ``backend``, ``microbatch``, ``num_samples``, ``progress`` and ``distributed``,
            as for :func:`summarize`.

    Returns:
        The advice.

    Raises:
        NotFiniteError: If the loss is not finite, or its derivatives along the next step are not.

    >>> _ = torch.manual_seed(0)
    >>> model = nn.Linear(3, 1)
    >>> x, y = torch.randn(64, 3), torch.randn(64, 1)
    >>> def loss_fn(model, batch):
    ...     return (model(batch[0]) - batch[1]).square().mean()
    >>> adam = torch.optim.Adam(model.parameters(), lr=1e-6)
    >>> batches = [(x[:32], y[:32]), (x[32:], y[32:])]
    >>> advice = suggest_lrs(model, loss_fn, batches, adam)
    >>> advice["group0"].verdict
    'raise'
    >>> advice.apply()
    >>> f"{adam.param_groups[0]['lr']:.0e}"
    '1e-05'
    """
    check_arguments(suggest_lrs, measuring, Measuring.__annotations__)
    for name, value, low, high, wanted in (
        ("fraction", fraction, 0, 1, "a number above 0, at most 1"),
        ("max_change", max_change, 1, sys.float_info.max, "a finite number above 1"),
    ):
        if not isinstance(value, int | float) or not low < value <= high:
            raise ValueError(f"{name}={value!r}: expected {wanted}.")
    if lambda_int != "auto":
        lambda_int = check_strength(lambda_int)
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"optimizer has type {type(optimizer).__name__}: expected the torch optimizer that "
            "trains the model, suggest_lrs(model, loss_fn, data, optimizer)."
        )
    if measures_itself(optimizer):
        raise ValueError(
            f"{type(optimizer).__name__} finds its own rates: pass an optimizer whose lr you "
            "choose, such as Adam."
        )
    if isinstance(data, Iterator):  # is read several times; a list of tensors would be one batch
        data = dict(enumerate(read_all(data))).values()
    microbatch, num_samples = measuring.get("microbatch"), measuring.get("num_samples")
    distributed = measuring.get("distributed", "auto")
    same: dict[str, Any] = {"microbatch": microbatch, "num_samples": num_samples}
    same["distributed"] = distributed
    with Journal() as thaw:
        leave_out_others(model, optimizer, partition, thaw)
        part = (
            own_groups(model, optimizer) if partition is None else find_partition(model, partition)
        )
        source = data if direction_data is None else direction_data
        processes = find_processes(distributed, part.params)
        with processes.joint():
            probe = open_probe(model, loss_fn, source, part, microbatch, processes, num_samples)
        agree(processes, part, optimizer)
        with probe:
            u, waiting = _next_step(optimizer, probe)
        summary = summarize(
            model,
            loss_fn,
            data,
            partition=part,
            direction=u,
            order=3 if lambda_int else 2,
            stderr=True,
            **measuring,
        )
        if wrong := not_finite(summary):
            raise NotFiniteError(
                f"Along the optimizer's next step {wrong}, as where it is far too long: ask with a "
                "smaller lr."
            )
        sizes = part.inner(u, u).detach().double().cpu().numpy()
        moved = sizes > 0
        live = moved & has_effect(summary, max_change)

        def try_factors(factors: Sequence[Array]) -> list[float]:
            """Return the real change of the loss by each of several steps."""
            etas = [torch.from_numpy(c) for c in factors]
            return real_changes(model, loss_fn, data, summary, etas, part, direction=u, **same)

        def rehearse_factors(
            factors: Sequence[Array], unasked: bool = False
        ) -> tuple[Rehearsal | None, int | None]:
            """Return which of several factors a short training prefers to the present rates."""
            with processes.joint():
                probe = open_probe(model, loss_fn, data, part, microbatch, processes, num_samples)
            times = [math.sqrt(float((c**2 * sizes).sum() / sizes.sum())) for c in factors]
            return rehearse(probe, optimizer, factors, None if unasked else times)

        limits = (1 / max_change, max_change)
        strengths = (0.0, *STRENGTHS) if lambda_int == "auto" else (lambda_int,)
        models = [FactorModel(summary, live, s, limits, diagonal) for s in strengths]
        factor_model = _best_strength(models, try_factors)
        found = factor_model.factors(fraction)
        waits = np.array([any(m.name in waiting for m in members) for members in part.members])
        early = waits & live & (found.changes > 1)
        found = replace(found, changes=np.where(early, 1.0, found.changes))
        changes = found.changes
        longest = _longest(changes, factor_model) if fraction == 1 else changes
        whole = fraction == 1 and max_change > ALIKE
        by_training = rehearse_factors if rehearsal else None
        trials = _Trials(factor_model, summary, try_factors, by_training)
        checked = trials.check(changes, longest, ALIKE if whole else 1.0)
        verdicts = {own.verdict for own, judged in zip(found.own, live, strict=True) if judged}
        is_noise = found.within_noise or verdicts <= {"noise"}
        if whole and not early.any():
            checked = trials.lower(checked, changes, is_noise)
    rates = learning_rates(summary, factor_model.mean.strength, diagonal=diagonal)
    sure = checked.verdict is None and not found.within_noise
    sure &= found.together is not None and found.together.verdict != "noise"
    judged = []
    for s, name in enumerate(part.names):
        own, change = found.own[s], float(checked.changes[s])
        verdict: Verdict = "noise" if found.tied[s] else own.verdict
        if found.within_noise and verdict != "keep":
            verdict = "noise"
        if checked.verdict is not None:
            verdict = checked.verdict
        if not live[s]:
            verdict = "no effect" if moved[s] else "no step"
        if early[s] or (waits[s] and not live[s]):
            verdict = "not yet"
        lrs = rates_of(optimizer, part, s)
        judged.append(GroupAdvice(name, lrs, own.factor, own.stderr, change, verdict))
    limits = (limits[0] / fraction, limits[1] / fraction)  # of the factors before the fraction
    return Advice(
        tuple(judged),
        checked.now,
        checked.then,
        found.together if sure and any(g.verdict == "noise" for g in judged) else None,
        checked.rehearsal,
        summary,
        rates,
        optimizer,
        part,
        limits,
        bool(waits.any()),
        below_peak(optimizer),
        found.within_noise,
    )


def below_peak(optimizer: Optimizer) -> BelowPeak:
    """Return the rates that a schedule has below half of its peak, with the peak."""
    pairs = {
        (float(g["lr"]), float(g.get("max_lr", g.get("initial_lr", g["lr"]))))
        for g in optimizer.param_groups
    }
    return tuple(sorted(both for both in pairs if 0 < both[0] < LOW * both[1]))


def _next_step(optimizer: Optimizer, probe: Probe) -> tuple[Params, set[str]]:
    """Return the optimizer's next step, and the parameters whose gradient is zero only before it.

    The step says nothing about the right rate of the latter.
    """
    g = probe.gradient()
    with probe.processes.joint(), borrowed(optimizer, probe.params) as step:
        u = step(g)
    still = {name for name, x in g.items() if type(x) is Tensor and not x.any()}
    if still:
        with unmoved(probe.params.values()):
            probe.step({name: 1e-3 * x for name, x in u.items()})
            try:
                later = probe.gradient()
            except NotFiniteError:  # far too long a step, as its derivatives tell
                return u, set()
        still = {name for name in still if later[name].any()}
    return u, still


def _best_strength(
    models: Sequence[FactorModel], try_factors: Callable[..., list[float]]
) -> FactorModel:
    """Return the model whose minimum lowers the loss most."""
    if len(models) == 1 or not models[0].live.any():
        return models[0]
    minima: dict[bytes, tuple[FactorModel, Array]] = {}
    for one in models:
        c = one.minimum()
        minima.setdefault(np.float16(c).tobytes(), (one, c))  # three digits tell them apart
    if len(minima) == 1:
        return models[0]
    real = try_factors([c for _, c in minima.values()])
    return list(minima.values())[int(np.argmin(real))][0]


@dataclass(frozen=True)
class _Checked:
    """What remains of a suggestion after trials."""

    changes: Array
    now: Change
    then: Change
    verdict: Verdict | None = None  # of all groups, if it is not that of their factors
    rehearsal: Rehearsal | None = None


@dataclass(frozen=True)
class _Trials:
    """Tries suggestions: by steps, and by short trainings unless there is no rehearsal."""

    model: FactorModel
    summary: Summary
    by_step: Callable[..., list[float]]
    by_training: Callable[..., tuple[Rehearsal | None, int | None]] | None

    @property
    def lowest(self) -> Array:
        """The smallest factors, (S,)."""
        return np.where(self.model.live, self.model.limits[0], 1.0)

    def check(self, changes: Array, longest: Array, alike: float) -> _Checked:
        """Try the suggested step; take shorter changes if the loss falls less than now, or none.

        With a rehearsal, the longest change whose step is better than now, or half of it, if they
        are not ``alike``; none if the better one is small.
        """
        ones = np.ones_like(changes)
        several = [ones]
        if (changes != 1).any():  # the last in case that even the present rates raise the loss
            several += [longest, longest**0.5, changes, changes**0.5, changes**0.25, self.lowest]
        predicted = map(self.model.change, several)
        tried = [Change(*both) for both in zip(predicted, self.by_step(several))]
        rounding = 8 * torch.finfo(self.summary.gbar.dtype).eps * abs(float(self.summary.loss))
        now = tried[0]

        def is_lower(i: int) -> bool:
            return tried[i].real < now.real + rounding and tried[i].predicted <= now.predicted

        count = len(several) if now.real > rounding else len(several) - 1
        usable = [i for i in range(1 if self.by_training else 3, count) if is_lower(i)]
        if not usable:
            return _Checked(ones, now, now, "refuted" if count > 1 else None)
        if self.by_training is None:
            return _Checked(several[usable[0]], now, tried[usable[0]])
        usable = [i for i in usable if np.abs(np.log(several[i])).max() >= math.log(alike)]
        if not usable:
            return _Checked(ones, now, now, "keep")
        compared = [i for i in usable if i < 3] or usable[:1]
        rehearsal, best = self.by_training([several[i] for i in compared])
        chosen = ones if best is None else several[compared[best]]
        least = min(WORTH, self.model.limits[1]) if alike > 1 else 1.0
        if best is None or np.abs(np.log(chosen)).max() < math.log(least):
            return _Checked(ones, now, now, "keep", rehearsal)
        return _Checked(chosen, now, tried[compared[best]], None, rehearsal)

    def lower(self, checked: _Checked, changes: Array, is_noise: bool) -> _Checked:
        """Rehearse smaller rates where the present ones stay.

        Later steps may be unlike the next one: early in training, momentum has yet to build up. If
        the present rates do not train, smaller ones are taken whatever is predicted for that step.
        If the factors are noise, only then; and nothing is rehearsed unless the next step fails.
        """
        tried = checked.rehearsal
        was_rehearsed = tried is not None and tried.decides and (changes < 1).any()
        if self.by_training is None or (checked.changes != 1).any() or was_rehearsed:
            return checked
        if is_noise and not _fails(checked.now, self.summary):
            return checked
        smaller = [self.lowest, self.lowest**0.5]
        rehearsal, best = self.by_training(smaller, unasked=True)
        if rehearsal is None or best is None:
            return replace(checked, rehearsal=checked.rehearsal or rehearsal)
        then = Change(self.model.change(smaller[best]), *self.by_step([smaller[best]]))
        is_worse = then.predicted > checked.now.predicted
        if (is_worse or is_noise) and rehearsal.now < rehearsal.start:
            return replace(checked, rehearsal=rehearsal)
        return _Checked(smaller[best], checked.now, then, "lower", rehearsal)


def _fails(change: Change, summary: Summary) -> bool:
    """Whether a step raises the loss by more than it may where nothing is left to learn."""
    return change.real > LEVEL * abs(float(summary.loss))


def _longest(changes: Array, model: FactorModel) -> Array:
    """Return changes with their logarithms stretched to the limits, if the model allows it."""
    logs = np.log(changes)
    if not logs.any():
        return changes
    ones, far = np.ones_like(changes), math.log(model.limits[1]) / float(np.abs(logs).max())
    powers = np.geomspace(max(far, 1.0), 1.0, 33)
    several = ((changes**t).clip(*model.limits) for t in powers)
    return next((c for c in several if model.change(c) <= model.change(ones)), changes)
