"""Steer the learning rate of any optimizer by the slope and the curvature along its own steps.

A step moves the parameters from ``before`` by ``-d``. On the next batch, which had no part in it,

    slope     = <grad L(before), d>                       what the step gains, to first order
    curvature = <grad L(before) - grad L(before - d), d>  how much of that its end has lost

so ``slope / curvature`` is the best multiple of the step, the *factor*: 1 for a step to the bottom
of the valley, 1/2 for one that ends on the other side at the same height. Multiplying the rate by
the factor again and again would shrink it forever, since noise makes the best next step shorter
than the best step for training; the controller keeps the factor at a set point instead.

Slopes are noisy, and one in ten steps tells little. ``slope - curvature`` is the slope at the end
of a step, along the gradient of the next batch, which training computes anyway: so the slopes of
all other steps are used too, at the cost of a scalar product.

The curvature is that of the whole step, from two gradients, not the one at its start: it is valid
for a step of this length, also with kinks (ReLU), and any operation that has a gradient will do.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, astuple, dataclass, fields
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Optimizer

from newton_summary.derivatives import Backend
from newton_summary.display.table import ShownAsTable, without_middle
from newton_summary.display.warn import warn_user
from newton_summary.errors import NotFiniteError
from newton_summary.history import History
from newton_summary.measuring.measurement import find_partition, summarize
from newton_summary.measuring.param_groups import held_by
from newton_summary.measuring.slope import loss_and_slope
from newton_summary.optimizer.checkpoint import check_finite, read_counts, reporting_damage
from newton_summary.optimizer.curvature import thawed
from newton_summary.optimizer.steering import SET_POINT, Balance, EndSlopes, best_multiple
from newton_summary.parallel.processes import Distributed, find_processes, is_sharded, local_part
from newton_summary.partition import make_partition, trainable, unwrap
from newton_summary.probe.directions import measures_itself
from newton_summary.probe.inputs import LossFn, check_loss_fn
from newton_summary.probe.probe import Probe
from newton_summary.probe.state import Journal, TorchState, copies_of, unmoved, without_gradients

Why = Literal["start", "raise", "lower", "keep", "not finite"]

SHORTEST = 1e-3  # of the norm of the parameters: the step from which the start searches upwards
LONGEST = 0.1  # of the same: a step of this length is not lengthened where curvature is negative
FARTHEST = 0.3  # of the same: the first step is no longer, as the network may be damaged there
LOWEST = 0.3  # of the highest rate so far times 1 / sqrt(steps since then): no lower at first
REACH = 0.5  # of the peak of a schedule: below, the rate is not raised against it
DROP = 0.26  # by so much the set point is lower while a schedule is below its peak,
FALLING = 0.54  # but there it is not below this
AT_PEAK = 1 - 1e-6  # of the peak of a schedule: from there on, only rounding makes a difference
TRIALS = 12  # gradients that the start may take
STRIDE = 2  # every n-th step has its slope taken from the next training gradient
PERIOD = 10  # steps from one measurement to the next, which gain and memory are meant for
BURST = 3.0  # times the usual loss: where SGD's is higher, and above the first, the rate is halved
LONG, STILL_LONG = 2.0, 4.0  # standard errors by which a step is too long; of thousands of steps
SETTLED = 2000  # steps after which measurements count for less: both limits of the rate close in


@dataclass(frozen=True)
class RateRecord:
    """One measurement of a :class:`RateController`, and its consequence.

    >>> record = RateRecord(10, 1e-3, 0.9, 0.02, 0.025, 0.8, 1.1, "raise")
    >>> f"{record.rate * record.change:.2g}"  # the rate after it
    '0.0011'
    """

    step: int  # how many steps the optimizer had taken
    rate: float  # the largest learning rate in the step that was measured
    loss: float  # before the step, of the batch that it was measured on
    slope: float  # along the step
    curvature: float  # along the step
    factor: float  # slope / curvature, from their running means; 0 where that slope is negative
    change: float  # what the rate was multiplied by
    why: Why


class RateController(ShownAsTable):
    """Steer the learning rate of an optimizer, whatever the initial rate.

    Every ``period`` steps, slope and curvature of the loss along the optimizer's own last step are
    measured on the next batch, and the rate is changed so that their ratio stays at a set point.
    The first step is lengthened or shortened to the best one on its line, of at most 0.3 times the
    norm of the parameters. A measurement takes two gradients; in the first fifty steps they are
    closer together. From 2,000 steps on the rate stays below its highest value so far divided by
    the root of the steps since then, and gets ever closer to that, unless a schedule lowers it.

    The optimizer's learning rates are multiplied while it takes a step, and restored: schedulers
    and loggers see their own, and the shape of a schedule multiplies the rates found here
    (``controller.rates``) from its peak on. A warm-up is left out: until the peak, the rates are
    those of the peak, which measurements keep from being too high. All parameter groups have the
    same multiplier. Weight decay, gradient clipping and whatever else the optimizer does are part
    of the measured step.

    Args:
        optimizer: Any torch optimizer that moves along a direction times its learning rate, such as
            Adam, AdamW and SGD. Optimizers that keep other copies of the parameters in their state,
            such as schedule-free ones, are not supported.
        model: The model that it trains.
        loss_fn: ``loss_fn(model, batch)`` returns the mean loss of a batch.
        period: Measure every ``period``-th step.
        set_point: Where to keep the factor. A smaller one means longer steps; 1 is the careful
            choice.
        gain: The rate changes by at most ``exp(gain)``, up or down, at a measurement ten steps or
            less after the last one; by its square after twenty.
        memory: How much of the running means such a measurement keeps; its square after twenty.
        distributed: As for :func:`summarize`.

    Attributes:
        multiplier: What the optimizer's learning rates are multiplied by, from the peak of a
            schedule on.
        history: A :class:`RateRecord` for each measurement; ``print(controller)`` shows them.
        steps: How many steps the optimizer has taken.

    >>> _ = torch.manual_seed(0)
    >>> model = nn.Linear(3, 1)
    >>> X = torch.randn(64, 3)
    >>> Y = X.sum(1, keepdim=True)
    >>> def loss_fn(model, batch):
    ...     return (model(batch[0]) - batch[1]).square().mean()
    >>> adam = torch.optim.Adam(model.parameters(), lr=1e-6)
    >>> controller = RateController(adam, model, loss_fn)
    >>> for batch in zip(X.split(8), Y.split(8)):
    ...     adam.zero_grad()
    ...     loss_fn(model, batch).backward()
    ...     controller.step(batch)
    >>> 0.01 < controller.rates[0] < 1
    True
    """

    _right = range(7)

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        loss_fn: LossFn,
        *,
        period: int = PERIOD,
        set_point: float = SET_POINT,
        gain: float = 0.5,
        memory: float = 0.9,
        distributed: Distributed = "auto",
    ):
        check_loss_fn(loss_fn)
        _check(optimizer, period, set_point, gain, memory)
        self.optimizer, self.model, self.loss_fn = optimizer, model, loss_fn
        self.period, self.set_point, self.gain, self.memory = period, set_point, gain, memory
        self.distributed = distributed
        self.multiplier = 1.0
        self.history: list[RateRecord] = []
        self.steps = 0
        self._first_lrs: list[float] = []
        self._detached = False
        self._highest = 0.0  # learning rate of the optimizer so far
        self._rises = True  # the schedule has not come to its peak
        self._find_parameters()
        self._balance = Balance()
        self._envelope = 0.0  # highest multiplier so far, falling like 1 / sqrt(steps)
        self._started = False
        self._due = 1  # the number of the next step to measure
        self._before: list[Tensor] | None = None  # parameters before the step to be measured
        self._rate = 0.0  # the largest learning rate in that step
        self._ends = EndSlopes()  # of the steps since the last measurement
        self._batch: tuple[Any] | None = None  # on hand for the first step
        self._steps_itself = False  # step() is called in place of the optimizer's
        # While the optimizer takes a step: its groups, their own rates, and those of the step.
        self._lrs: list[tuple[dict[str, Any], Any, Any]] = []
        self.reason = ""  # why the last measurement failed, if it did
        self._attach()

    def _find_parameters(self) -> None:
        """Find those that can move, which of them the optimizer holds, and groups that are new."""
        self._partition = make_partition(self.model, "trivial")
        self._held = held_by(self.optimizer, self._partition.params)
        self._sharded = any(is_sharded(p) for p in self._held.values())
        self._first_lrs = self._firsts()

    def _attach(self) -> None:
        self._hooks = (
            self.optimizer.register_step_pre_hook(self._before_hook),
            self.optimizer.register_step_post_hook(self._after_hook),
        )

    # --- what a training loop calls ---------------------------------------------------------------

    def step(self, batch: Any) -> None:
        """Measure if it is due, and let the optimizer take its step.

        Args:
            batch: The batch of the gradients, or several if gradients are accumulated: anything
                that :func:`summarize` takes as data.
        """
        self.before_step(batch)
        self._steps_itself = True
        self._let_step()

    def _let_step(self) -> None:
        """Let the optimizer take its step; an interrupt leaves learning rates as they were."""
        with Journal() as journal:
            journal.undo_later(TorchState(()).restore)
            journal.undo_later(self._put_back_lrs)
            self.optimizer.step()

    def before_step(self, batch: Any) -> None:
        """Measure if it is due, where something else calls ``optimizer.step()``.

        For a GradScaler, a trainer or a closure. Steps not preceded by this call are taken with the
        present rate.
        """
        if self._detached:
            raise RuntimeError(
                "This controller is detached: call optimizer.step(), or make a new controller."
            )
        self._include_thawed()
        if self._before is not None:
            self._measure(batch, self._before)
            self._before = None
        self._batch = (batch,)

    def detach(self) -> None:
        """Stop steering: the optimizer takes its steps at its own learning rates from now on."""
        self._put_back_lrs()  # after a step that was not finished
        for hook in self._hooks:
            hook.remove()
        self._detached = True

    def _include_thawed(self) -> None:
        """Include parameters that were frozen until now, after a step that is not measured.

        Also those of a new parameter group.
        """
        if len(self.optimizer.param_groups) == len(self._first_lrs):
            if self._started and self._before is None:
                return
            if trainable(unwrap(self.model)).keys() <= self._partition.params.keys():
                return
        self._find_parameters()
        self._before = self._ends.before = None

    @property
    def rates(self) -> list[float]:
        """The learning rates of the next step, one for each parameter group."""
        return [float(lr) * self.multiplier for lr in self._lrs_from_peak()]

    @property
    def _scheduled(self) -> list[dict[str, Any]]:
        """The parameter groups that schedulers change."""
        return self.optimizer.param_groups

    def _own_lrs(self) -> list[Any]:
        """Return the learning rates that the optimizer would take a step with."""
        return self._lrs_from_peak()

    def _lrs_from_peak(self) -> list[Any]:
        """Return the learning rates of the schedule; until it has come to its peak, those there."""
        lrs = [group["lr"] for group in self._scheduled]
        if not self._rises:
            return lrs
        pairs = list(zip(lrs, self._peaks(), strict=True))
        if not any(map(float, lrs)):
            return [lr + peak for lr, peak in pairs]
        # A group at 0 beside others is one that the schedule leaves out for now.
        return [lr * max(1.0, peak / float(lr)) if lr else lr for lr, peak in pairs]

    def _note_schedule(self) -> None:
        """See whether the schedule has come to its peak, which may be lower than expected."""
        lr, peak = max(float(group["lr"]) for group in self._scheduled), max(self._peaks())
        if self._rises and lr < self._highest:
            self.multiplier *= peak / self._highest
            self._envelope *= peak / self._highest
            self._rises = False
        self._highest = max(self._highest, lr)
        self._rises &= self._highest < AT_PEAK * peak

    @without_gradients
    def _before_hook(self, *_: Any) -> None:
        self._put_back_lrs()  # after a step that was not finished
        if self._steps_itself and self._batch is None:
            self._steps_itself = False
            warn_user(
                "optimizer.step() was called after controller.step(batch), which has already "
                "taken the step: the model moves twice, and this step cannot be measured. Call "
                "only one of them."
            )
        if self.steps == PERIOD and not self.history:
            warn_user(
                f"The optimizer has taken {PERIOD} steps, but the controller has seen no batch, "
                "so it cannot steer: call controller.step(batch) in place of optimizer.step()."
                if self._batch is None
                else f"In {PERIOD} steps the optimizer has moved nothing, so there is no rate to "
                "steer: its lr is 0, or its gradients are zero or missing. Start from an lr above "
                "0, and call zero_grad() before backward()."
            )
        groups = self.optimizer.param_groups
        check_rates(groups)
        self._note_schedule()
        own = zip(groups, self._own_lrs(), strict=True)
        self._lrs = [(group, group["lr"], lr * self.multiplier) for group, lr in own]
        for group, _, multiplied in self._lrs:
            group["lr"] = multiplied
        self._follow(max(float(group["lr"]) for group in groups))

    def _follow(self, rate: float) -> None:
        """Take the slope at the end of the last step, and keep what the next one starts from."""
        self._ends.take(self._held.values())
        wanted = self.steps + 1 >= self._due and self._measurable
        followed = self._started and (wanted or self.steps % STRIDE == 0)
        before = copies_of(self._held.values()) if wanted or followed else None
        self._before = before if wanted else None
        self._rate = rate
        self._ends.follow(before if followed else None, rate)

    @property
    def _measurable(self) -> bool:
        """Whether a batch can be expected for measuring the next step."""
        return self._batch is not None

    def _after_hook(self, *_: Any) -> None:
        self._put_back_lrs()
        self.steps += 1
        given, self._batch = self._batch, None
        if given and not self._started and self._before is not None:
            self._start(given[0], self._before)
            self._before = None

    def _put_back_lrs(self) -> None:
        for group, own, multiplied in self._lrs:
            if group["lr"] is multiplied:
                group["lr"] = own
        self._lrs = []

    # --- measurements -----------------------------------------------------------------------------

    def _measure(self, batch: Any, before: list[Tensor]) -> None:
        """Measure the last step, and change the rate."""
        self._due = self.steps + min(self.period, 1 + self.steps // 5)
        u = self._step_taken(before)
        length, size = _norms(u.values(), before)
        length /= size
        if length == 0:
            return
        if not math.isfinite(length):
            warn_user(
                "Parameters of the model are nan or infinite after the last step, so no learning "
                "rate can help. Check for a non-finite batch or gradient, and go back to a "
                "checkpoint."
            )
        loss, slope, curvature = self._along(batch, before, u)
        if not (math.isfinite(slope) and math.isfinite(curvature)):
            self._change(loss, slope, curvature, math.nan, 0.5, "not finite")
            return
        shared = next(iter(self._held.values())).device if self._sharded else None
        # Where measurements are rare, each of them counts for more, up to twice as much; and for
        # less and less in a long training, where samples that are learnt by heart mislead.
        pace = min(max((self.steps - self.history[-1].step) / PERIOD, 1.0), 2.0)
        young = min(1.0, SETTLED / self.steps)
        pace *= young
        memory = self.memory**pace
        at_end = self._ends.mean(slope - curvature, self._rate, memory, shared)
        # SGD's steps are as long as its gradient. Counted alike, the few from where the loss has
        # gone up, which lead back down, would outweigh all others, and the rate would rise.
        by_length = isinstance(self.optimizer, SGD)
        weight = (self._rate / length) ** 2 if by_length else 1.0
        self._balance.add(weight * (at_end + curvature), weight * curvature, self._rate, memory)
        # A schedule far below its peak neither makes the rate rise again, nor fall twice. Until
        # then its end makes good again what longer steps do to the noise.
        top = self.multiplier * self._peak_lr()
        peak = max(REACH * top, self._rate)
        falls = self._rate < AT_PEAK * top
        set_point = self._lower_set_point if falls else self.set_point
        high = self._balance.error(peak, set_point, memory)
        low = self._balance.error(self._rate, set_point, memory)
        why: Why
        error, why = 0.0, "keep"
        if low < 0:
            error, why = low, "lower"
        elif high > 0 and (self._balance.curvature > 0 or length < LONGEST) and self._full_speed:
            error, why = high, "raise"
        change = math.exp(pace * self.gain * error)
        settled = self.steps > SETTLED
        if not (settled and falls):  # else the schedule does it
            self._envelope *= math.sqrt(self.history[-1].step / self.steps)
        if not settled:
            self._envelope = max(self._envelope, self.multiplier)
        errors = STILL_LONG if settled else LONG
        if self._balance.surely_too_long(self._rate, memory, errors):
            self._envelope = self.multiplier
        else:
            change = max(change, min(1.0, LOWEST**young * self._envelope / self.multiplier))
        if settled and self._envelope < change * self.multiplier:
            change = self._envelope / self.multiplier
            why = "lower" if change < 1 else why
        if by_length and loss > self.history[0].loss:
            usual = statistics.median(record.loss for record in self.history[-10:])
            if loss > BURST * usual:
                change, why = min(change, 0.5), "lower"
        self._change(loss, slope, curvature, self._balance.factor(self._rate), change, why)

    @property
    def _lower_set_point(self) -> float:
        """The set point below the peak of a schedule."""
        return max(self.set_point - DROP, min(self.set_point, FALLING))

    @property
    def _momentum(self) -> float:
        """The largest momentum of SGD's groups; of Adam, whose steps do not grow with it, 0."""
        return max(float(group.get("momentum", 0.0)) for group in self.optimizer.param_groups)

    @property
    def _full_speed(self) -> bool:
        """Whether the velocity has built up, so that steps are as long as the rate makes them."""
        return self.steps * (1 - self._momentum) >= 2 * self._momentum

    def _along(
        self, batch: Any, before: list[Tensor], u: dict[str, Tensor]
    ) -> tuple[float, float, float]:
        """Return loss, slope and curvature of the last step, from the gradients at both ends."""
        (_, slope_after), (loss, slope) = self._slopes(batch, u, None, before)
        return loss, slope, slope - slope_after

    def _start(self, batch: Any, before: list[Tensor]) -> None:
        """Lengthen or shorten the first step to the lowest loss on its line, if that is not far.

        Searches upwards from a short step, whatever the rate: beyond the first hill there may be
        another valley, in which the network is damaged.
        """
        u = self._step_taken(before)
        parts = [u[name] for name in self._held]
        length, size = _norms(parts, before)
        if length == 0:
            return

        def at(s: float) -> list[Tensor]:
            return list(torch._foreach_sub(before, torch._foreach_mul(parts, s)))

        ((loss, slope),) = self._slopes(batch, u, before)
        if not math.isfinite(slope):  # begin with the next batch
            self._place(before)
            self._change(loss, slope, math.nan, math.nan, 1.0, "not finite")
            return
        best, lowest, curvature = 0.0, loss, math.nan
        s = SHORTEST * size / length
        for _ in range(TRIALS if slope > 0 else 0):
            ((loss_there, slope_there),) = self._slopes(batch, u, at(s))
            level = loss_there == lowest and slope_there > 0  # rounding hides that it falls
            if not (loss_there < lowest or level):
                if best > 0:
                    break
                s *= 0.1
                continue
            best, lowest, curvature = s, loss_there, (slope - slope_there) / s
            target = slope / curvature if curvature > 0 else LONGEST * size / length
            target = min(target, FARTHEST * size / length)
            if target < 1.5 * s:
                break
            s = min(target, 10 * s)
        # Steps grow by 1 / (1 - momentum) while the velocity builds up.
        best = (best or s) * (1 - self._momentum)
        self._place(at(best))
        self._change(loss, slope, curvature, best_multiple(slope, curvature), best, "start")
        self._started = True
        self._due = self.steps + 1

    def _slopes(
        self, batch: Any, u: dict[str, Tensor], *places: list[Tensor] | None
    ) -> list[tuple[float, float]]:
        """Return the loss, and how fast it falls along ``-u``, at several values of the parameters.

        None stands for the present ones. Infinity and NaN where the loss is lost.
        """
        partition = self._partition
        backend: Backend = "sweep" if self._sharded else "differences"
        how: Any = {"order": 1, "backend": backend, "distributed": self.distributed}
        found = []
        with Journal(), thawed(partition), self._own_probe(batch) as probe:
            for place in places:
                try:
                    with nullcontext() if place is None else self._moved_to(place):
                        if probe is not None:
                            found.append(loss_and_slope(probe, u))
                            continue
                        given = (self.model, self.loss_fn, batch)
                        summary = summarize(*given, partition=partition, direction=u, **how)
                        found.append((float(summary.loss), float(summary.gbar[0])))
                except NotFiniteError as error:
                    self.reason = str(error)
                    found.append((math.inf, math.nan))
        return found

    def _own_probe(self, batch: Any) -> Any:
        """Return a probe of this process; nothing where several have to measure together."""
        several = find_processes(self.distributed, self._partition.params).count > 1
        if self._sharded or several:
            return nullcontext()
        groups = find_partition(self.model, self._partition)
        probe = Probe(self.model, self.loss_fn, batch, groups)
        probe.trusted = self._started
        return probe

    def _step_taken(self, before: list[Tensor]) -> dict[str, Tensor]:
        """Return what the last step has subtracted from each parameter of the model."""
        now = [p.detach() for p in self._held.values()]
        steps = dict(zip(self._held, torch._foreach_sub(before, now), strict=True))
        every = self._partition.params.items()
        return {n: steps[n] if n in steps else torch.zeros_like(p).detach() for n, p in every}

    @contextmanager
    def _moved_to(self, values: list[Tensor]) -> Iterator[None]:
        with unmoved(self._held.values()):
            self._place(values)
            yield

    def _place(self, values: list[Tensor]) -> None:
        there = [local_part(p.detach()) for p in self._held.values()]
        torch._foreach_copy_(there, [local_part(value) for value in values])

    def _peak_lr(self) -> float:
        """Return the largest learning rate of the optimizer's schedule, without the multiplier."""
        return max(self._peaks()) if self._rises else self._highest

    def _peaks(self) -> list[float]:
        """Return how high the learning rate of each group is expected to rise."""
        return [
            max(float(group.get("initial_lr", first)), float(group.get("max_lr", 0.0)))
            for group, first in zip(self._scheduled, self._firsts(), strict=True)
        ]

    def _firsts(self) -> list[float]:
        """Return the first learning rates of all groups, also of those that are new."""
        new = self._scheduled[len(self._first_lrs) :]
        return [*self._first_lrs, *(float(group["lr"]) for group in new)]

    def _change(
        self, loss: float, slope: float, curvature: float, factor: float, change: float, why: Why
    ) -> None:
        record = (self.steps, self._rate, loss, slope, curvature, factor, change, why)
        self.history.append(RateRecord(*record))
        self.multiplier *= change

    # --- checkpoints and tables -------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return everything needed to resume, bit for bit, except for the optimizer's own state."""
        return {
            "multiplier": self.multiplier,
            "steps": self.steps,
            "due": self._due,
            "started": self._started,
            "rate": self._rate,
            "first_lrs": self._firsts(),
            "highest": self._highest,
            "rises": self._rises,
            "balance": asdict(self._balance),
            "envelope": self._envelope,
            "before": None if self._before is None else [x.clone() for x in self._before],
            "ends": self._ends.state_dict(),
            "history": [asdict(record) for record in self.history],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from where :meth:`state_dict` was called.

        Raises:
            ValueError: If this is not such a state, or what it has saved does not fit the model.
        """
        known = self.state_dict()
        if not isinstance(state, Mapping) or set(state) != set(known):
            raise ValueError("Not a RateController state_dict: pass what state_dict() returned.")
        self._include_thawed()
        with reporting_damage():
            ends = EndSlopes(**state["ends"])
            before, ends.before = self._copies(state["before"]), self._copies(ends.before)
            if len(state["first_lrs"]) != len(self._first_lrs):
                raise ValueError(
                    f"The state is of an optimizer with {len(state['first_lrs'])} parameter "
                    f"groups, but this one has {len(self._first_lrs)}."
                )
            steps, due = read_counts(state, "steps", "due")
            read_counts(state["ends"], "count", "agreed")
            balance = Balance(**state["balance"])
            history = [RateRecord(**record) for record in state["history"]]
            names = ("multiplier", "rate", "envelope", "highest")
            numbers = [float(state[name]) for name in names]
            first_lrs = [float(lr) for lr in state["first_lrs"]]
            values = [numbers, first_lrs, list(asdict(balance).values())]
            check_finite([*values, before, list(asdict(ends).values())], "The state")
            if not numbers[0] > 0:
                raise ValueError(
                    f"The state has the multiplier {numbers[0]}: expected a number above 0."
                )
        self.multiplier, self._rate, self._envelope, self._highest = numbers
        self.steps, self._due = steps, due
        self._started, self._rises = bool(state["started"]), bool(state["rises"])
        self._first_lrs, self._balance, self.history = first_lrs, balance, history
        self._before, self._ends = before, ends

    def _copies(self, saved: list[Tensor] | None) -> list[Tensor] | None:
        """Return saved values of the parameters, in their place and of their type.

        None if others were frozen then: the step from there is not measured.
        """
        if saved is None:
            return None
        held, shapes = self._held.values(), [tuple(x.shape) for x in saved]
        if shapes == [tuple(p.shape) for p in held]:
            return [x.to(p).clone() for x, p in zip(saved, held, strict=True)]
        every = (tuple(p.shape) for p in unwrap(self.model).parameters())
        if all(shape in every for shape in shapes):  # in this order
            return None
        raise ValueError("The state is of a model with other parameters.")

    def to_history(self) -> History:
        """Return the measurements as curves by step, which :func:`report` shows."""
        return steering_history(self.history, type(self.optimizer).__name__)

    def __repr__(self) -> str:
        """Return the present rates, in a line."""
        rates = rates_in_words(self.rates)
        detached = ", detached" if self._detached else ""
        name = type(self.optimizer).__name__
        return f"RateController({name}, lr {rates}, step {self.steps}{detached})"

    def _rows(self) -> list[list[str]]:
        rows = [[field.name for field in fields(RateRecord)]]
        for step, *numbers, why in map(astuple, self.history):
            rows.append([str(step), *(f"{x:.3g}" for x in numbers), why])
        return without_middle(rows)

    def _said(self) -> str:
        if not self.history:
            return repr(self)
        return (
            f"factor: the best multiple of the step, slope / curvature, from their running means; "
            f"0 where the mean slope is negative\n"
            f"change: what the rate was then multiplied by, to bring the factor to "
            f"{self.set_point:g} ({self._lower_set_point:g} below the peak of a schedule, which "
            f"multiplies it as well)\n"
            f"after {self.steps} steps the learning rate {'was' if self._detached else 'is'} "
            f"{rates_in_words(self.rates)}"
        )


def rates_in_words(rates: Iterable[float]) -> str:
    """Return the different ones of some rates: many groups often have the same.

    >>> rates_in_words([0.01, 0.001, 0.01])
    '0.01, 0.001'
    """
    return ", ".join(dict.fromkeys(f"{rate:.3g}" for rate in rates))


def steering_history(records: Iterable[RateRecord], name: str) -> History:
    """Return what a controller has measured and done, as curves by step."""
    history = History(f"{name}, steered", unit="step")
    records = list(records)
    counts = Counter(r.why for r in records).items()
    history.facts["steered"] = ", ".join(f"{why}: {n} times" for why, n in counts if why != "start")
    for r in records:
        shown = {"loss": r.loss, "learning rate": r.rate * r.change, "factor": r.factor}
        for metric, value in shown.items():
            history.add_value(metric, r.step, value)
    return history


def check_rates(groups: Iterable[Mapping[str, Any]]) -> None:
    """Raise if the lr of a group, as left by a scheduler, is not finite.

    A tensor on an accelerator is not checked, since that would wait for it.
    """
    for group in groups:
        lr = group["lr"]
        waits = isinstance(lr, Tensor) and lr.device.type != "cpu"
        if not waits and not math.isfinite(lr):
            name = group.get("name", "a parameter group")
            raise ValueError(
                f"lr={float(lr)} of {name!r}: expected a finite number. Nothing moved."
            )


def _check(optimizer: Optimizer, period: int, set_point: float, gain: float, memory: float) -> None:
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"optimizer has type {type(optimizer).__name__}: expected the torch optimizer that "
            "trains the model, RateController(optimizer, model, loss_fn)."
        )
    if measures_itself(optimizer):
        raise ValueError(
            f"{type(optimizer).__name__} finds its own rate: use it without a controller, and "
            "callbacks without adjust, or steer an optimizer whose lr you choose, such as Adam."
        )
    if isinstance(period, bool) or not isinstance(period, int) or period < 1:
        raise ValueError(f"period={period!r}: expected a number of steps, 1 or more.")
    for name, value, top in (
        ("set_point", set_point, math.inf),
        ("gain", gain, math.inf),
        ("memory", memory, 1.0),
    ):
        if not isinstance(value, int | float) or not 0 < value < top:
            below = "" if top == math.inf else f", below {top:g}"
            raise ValueError(f"{name}={value!r}: expected a number above 0{below}.")
    if isinstance(optimizer, LBFGS):
        raise ValueError(
            "LBFGS calls the loss several times in a step, so there is no single step to measure: "
            "steer an optimizer such as Adam or SGD."
        )
    for hook in optimizer._optimizer_step_pre_hooks.values():
        if isinstance(getattr(hook, "__self__", None), RateController):
            raise ValueError("This optimizer already has a RateController: use only one.")


def _norms(step: Iterable[Tensor], before: list[Tensor]) -> tuple[float, float]:
    """Return the length of a step and that of the parameters, at least as if these were 0.01."""
    norms = torch._foreach_norm([x.detach() for x in (*step, *before)])
    whole = [n.full_tensor() if is_sharded(n) else n for n in norms]  # type: ignore[attr-defined]
    values = torch.stack([n.to(whole[0]) for n in whole]).tolist()
    least = 0.01 * math.sqrt(sum(x.numel() for x in before))
    count = len(values) - len(before)
    return math.hypot(*values[:count]), max(math.hypot(*values[count:]), least)
