"""NewtonSummary: the paper's second-order method as a torch optimizer (Algorithm 2, App. G)."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from newton_summary.display.names import check_arguments
from newton_summary.display.table import text_table, without_middle
from newton_summary.display.warn import warn_user
from newton_summary.errors import NotFiniteError
from newton_summary.history import History
from newton_summary.optimizer import checkpoint
from newton_summary.optimizer.checks import (
    BUDGET,
    SET_POINTS,
    Variant,
    as_partition,
    check_direction,
    check_settings,
    extended,
    is_number,
)
from newton_summary.optimizer.controller import check_rates, steering_history
from newton_summary.optimizer.curvature import Curvature, Measuring
from newton_summary.optimizer.refreshes import (
    Schedule,
    WindowAverage,
    plain_summary,
    restored_summary,
)
from newton_summary.optimizer.steered import Steered, period_within, swap_average
from newton_summary.optimizer.update import Update
from newton_summary.parallel.fsdp import own_memory
from newton_summary.parallel.processes import find_processes
from newton_summary.partition import Params, Partition
from newton_summary.probe.inputs import check_loss_fn
from newton_summary.probe.probe import Closure, LossFn
from newton_summary.probe.state import without_gradients
from newton_summary.solver import LearningRates, learning_rates
from newton_summary.summary import Summary

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from newton_summary.optimizer.controller import RateRecord

OF_GROUPS = ("lr", "momentum", "weight_decay")  # settings that each group has for itself
COMMON = (  # settings that all groups share
    "variant",
    "lambda_int",
    "eta_momentum",
    "summary_period",
    "summary_window",
    "warmup",
    "diagonal",
    "budget",
)
STEERED = {"lr": 1.0, "lambda_int": 0.0, "summary_window": 10, "warmup": 0}
DEFAULTS: dict[Variant, dict[str, Any]] = {  # what depends on the variant
    "steered": STEERED,
    "careful": STEERED,
    "as-run": {"lr": 0.3, "lambda_int": 1.0, "summary_window": 3, "warmup": 3},
    "as-published": {"lr": 0.3, "lambda_int": 1.0, "summary_window": 3, "warmup": 0},
}
Data = Callable[[], tuple[LossFn, Any]]  # the loss of a measurement, and its batch
COUNTS = ("refreshes", "failed_refreshes", "skipped_steps", "skipped_since")


class NewtonSummary(Optimizer):
    """Train without choosing a learning rate: it is found and adapted from the loss's curvature.

    >>> _ = torch.manual_seed(0)
    >>> net = torch.nn.Linear(3, 1)
    >>> X = torch.randn(64, 3)
    >>> Y = X.sum(1, keepdim=True)
    >>> def loss_fn(model, batch):
    ...     return (model(batch[0]) - batch[1]).square().mean()
    >>> opt = NewtonSummary(net, loss_fn)
    >>> for batch in zip(X.split(8), Y.split(8)):
    ...     opt.zero_grad()
    ...     loss_fn(net, batch).backward()
    ...     _ = opt.step(batch)
    >>> 0.01 < opt.param_groups[0]["eta"] < 1
    True

    The direction ``u`` is Adam's step, the update ``theta - lr * eta u``. At a *refresh*, every
    fifteen steps or more, the summary of the loss along the last step is measured on the next
    batch, which had no part in that step, and steers ``eta`` in the same way as
    :class:`RateController` (see there): slope over curvature, the best multiple of a step, is kept
    at 0.8, or at 1 if the variant is ``"careful"``. In between, a step costs the same as one of
    Adam.

    Pass the batch to ``step``, or a list of batches if gradients are accumulated. Or omit
    ``loss_fn`` and call ``opt.step(lambda: loss_fn(model, batch))``: the closure is evaluated when
    a refresh is due (:attr:`refresh_due`); it must return the loss of one batch, the same at each
    call, and must not call ``backward()``. Or pass ``curvature``, separate data to measure on. With
    ``loss_fn`` or ``curvature`` a closure has torch's usual meaning: it is called once, at the
    start, and leaves gradients.

    At a constant rate, evaluate between :meth:`eval` and :meth:`train`: the mean of the parameters
    over the last steps has a lower loss than the last ones.

    With a partition of several groups the summary also shows how they interact
    (:attr:`last_summary`), but takes longer; all groups have the same ``eta``, since separate ones
    brought no gain (docs/steer.md). :meth:`paper` is the paper's algorithm, with an ``eta`` for
    each group.

    ``param_groups`` has one entry for each group of the partition, with its ``"name"``, its
    ``"lr"``, which schedulers change, and its ``"eta"``; the learning rate of a group is their
    product. A partition that divides tensors does not fit this scheme: then there is one entry for
    everything, whose ``"eta"`` is a vector. ``lr``, ``momentum`` and ``weight_decay`` may differ
    from group to group; the other settings are those of the first group.

    A gradient that is not finite never reaches the parameters: the step is skipped. On accelerators
    this is decided on the device, without waiting; skipped steps are counted, and reported at the
    next refresh.

    Args:
        partition: The model, or groups of its parameters from :func:`make_partition`.
        loss_fn: ``loss_fn(model, batch)`` returns the mean loss of a batch passed to :meth:`step`.
            A number in its place is ``lr``.
        lambda_int: Strength of the cubic term; 0 leaves it out, and with it the third derivatives.
            If steered, it is 0 by default, and used for :attr:`last_rates` only.
        momentum: Adam's first beta; in the paper's algorithm mu of u <- mu u + gradient.
        eta_momentum: mu_eta of Algorithm 2, eta~ <- mu_eta eta~ + (eta)_+; 0 if steered.
        summary_period: Steps from one refresh to the next, tau. By default 15, or more if the
            budget requires it; fewer in the first seventy steps.
        summary_window: Number of summaries to average, upsilon; 3 in the paper. If steered, the
            memory of the running means, whose past is weighted by 1 - 1 / ``summary_window``; 10.
        warmup: Refreshes of the paper's algorithm before its first move.
        direction: A torch optimizer to steer in place of Adam. Its step, with its own learning
            rate, is the direction. It must hold all parameters; its state is saved with this one's.
        curvature: ``(loss_fn, loader)``: ``loss_fn(model, batch)`` returns the mean loss of a batch
            from the loader. Each summary uses one batch. The loader starts over when it ends, and
            draws from its own random numbers.
        lr: Factor on all rates, the paper's lambda_1 and lambda_t. Steering compensates for a
            constant one, so that only the shape of a schedule matters.
        variant: ``"steered"``; ``"careful"``, with shorter steps, for models that long ones harm,
            such as an encoder with a decoder (docs/limits.md); or the paper's algorithm
            ``"as-run"`` or ``"as-published"``, see :meth:`paper`.
        diagonal: Leave out the interactions between groups (App. K).
        weight_decay: That of AdamW: each step multiplies the parameters by
            1 - lr * eta * weight_decay. Not in the paper's algorithm.
        budget: The share of the time that refreshes may take, which determines ``summary_period``
            if that is not given. Estimated from the number of groups, not by a clock, so that
            training is reproducible.
        **measuring: How summaries are measured: ``backend`` and ``microbatch`` as for
            :func:`summarize`; ``distributed`` likewise (gradients must be the same on all ranks, as
            with DistributedDataParallel; then so are the rates); and ``cuda_graph=True`` to capture
            the measurement on a GPU as a CUDA graph after the first refreshes and replay it, and
            with the paper's algorithm the steps in between: several times faster for small models,
            whose kernels are shorter than their launches. The loss must then do the same at each
            call (no branch on values, steps or random numbers), and the memory of a measurement
            stays allocated. Only for batches of ``curvature``, and not for one group, whose refresh
            takes two gradients. Falls back, with a warning, where it cannot be done: dropout, batch
            norm in training, several ranks.

    Attributes:
        model: The model of the partition.
        partition: The groups.
        direction: The optimizer whose step is the direction, if one was given.
        skipped_steps: Steps skipped because of a gradient that was not finite, as of the last
            refresh.
        failed_refreshes: Refreshes that yielded no usable rates.
        last_summary: The last summary as measured, along ``u``; None before the first. With one
            group, ``Hbar`` is that of a whole step, from the gradients at both its ends.
    """

    def __init__(
        self,
        partition: Partition | nn.Module,
        loss_fn: LossFn | float | Tensor | None = None,
        lambda_int: float | None = None,
        momentum: float = 0.9,
        eta_momentum: float = 0.0,
        summary_period: int | None = None,
        summary_window: int | None = None,
        warmup: int | None = None,
        direction: Optimizer | None = None,
        curvature: tuple[LossFn, Any] | None = None,
        *,
        lr: float | Tensor | None = None,
        variant: Variant = "steered",
        diagonal: bool = False,
        weight_decay: float = 0.0,
        budget: float = BUDGET,
        **measuring: Unpack[Measuring],
    ):
        partition = as_partition(partition)
        if loss_fn is not None and not callable(loss_fn):
            if not is_number(loss_fn):
                check_loss_fn(loss_fn)  # raises
            if lr is not None:
                raise TypeError(f"loss_fn={loss_fn!r}: expected a function, loss_fn(model, batch).")
            lr, loss_fn = loss_fn, None
        check_arguments(NewtonSummary, measuring, Measuring.__annotations__)
        given = {
            "lr": lr,
            "lambda_int": lambda_int,
            "summary_period": summary_period,
            "summary_window": summary_window,
            "warmup": warmup,
        }
        settings = {
            "variant": variant,
            "momentum": momentum,
            "eta_momentum": eta_momentum,
            "diagonal": diagonal,
            "weight_decay": weight_decay,
            "budget": budget,
            "summary_period": 10,
            **DEFAULTS.get(variant, STEERED),
            **{name: value for name, value in given.items() if value is not None},
        }
        check_settings(settings)
        steered = variant in SET_POINTS
        if steered and summary_period is None:
            order = 3 if settings["lambda_int"] > 0 else 2
            settings["summary_period"] = period_within(budget, len(partition), order)
        if direction is not None:
            if not steered:
                raise ValueError(
                    "direction is only for variant='steered' or 'careful': leave it out."
                )
            if weight_decay:
                raise ValueError("Set weight_decay in the optimizer that is the direction.")
            check_direction(direction, partition)
        assert partition.model is not None
        self.model, self.partition, self.direction = partition.model, partition, direction
        processes = find_processes(measuring.get("distributed", "auto"), partition.params)
        with processes.joint():
            self._curvature = Curvature(curvature, loss_fn, measuring)
        without_summary = steered and len(partition) == 1 and settings["lambda_int"] == 0
        if without_summary and measuring.get("cuda_graph"):
            warn_user(
                "cuda_graph=True has no effect, because a refresh of one group with lambda_int=0 "
                "takes two gradients and no summary."
            )
        processes.agree(partition.facts() | settings | {"lr": float(settings["lr"])}, {})
        self._schedule = Schedule(variant, settings["summary_period"], settings["warmup"])
        self._average = WindowAverage(settings["summary_window"], as_run=variant == "as-run")
        self._eta: Tensor | None = None  # (S,), float64 on the CPU, none of them negative
        self._update: Update | None = None  # of the paper's algorithm
        self._steered: Steered | None = None
        self.last_summary: Summary | None = None
        self._last_rates: LearningRates | None = None
        self.failed_refreshes = self.skipped_steps = self._skipped_since = 0
        self._warned: set[str] = set()
        self._evaluating = False  # whether the model has the mean of its parameters
        self._made = False  # until then, add_param_group is called by torch
        if partition.divided:
            everything = list(partition.params.values())
            groups = [{"params": everything, "name": "all groups", "eta": self.eta}]
        else:
            groups = partition.param_groups(eta=0.0)
        super().__init__(groups, settings)
        self._made = True
        if steered:
            self._steered = self._make_steered()

    def _make_steered(self) -> Steered:
        settings = self.param_groups[0]
        memory = 1 - 1 / max(settings["summary_window"], 1.001)
        given = (self.partition, self.param_groups, self.direction, self._curvature, self.state)
        set_point = SET_POINTS[settings["variant"]]
        return Steered(*given, settings["summary_period"], set_point, memory)

    @classmethod
    def paper(
        cls,
        partition: Partition,
        lr: float = 0.3,
        lambda_int: float = 1.0,
        *,
        curvature: tuple[LossFn, Any] | None = None,
        momentum: float = 0.9,
        eta_momentum: float = 0.0,
        summary_period: int = 10,
        summary_window: int = 3,
        warmup: int | None = None,
        diagonal: bool = False,
        variant: Literal["as-run", "as-published"] = "as-run",
        **measuring: Unpack[Measuring],
    ) -> NewtonSummary:
        """Return Algorithm 2 (App. G) with nothing added, as run or as published.

        >>> from newton_summary import make_partition
        >>> _ = torch.manual_seed(0)
        >>> net = torch.nn.Linear(3, 2)
        >>> def loss_fn(model, batch):
        ...     return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])
        >>> batch = torch.randn(40, 3), torch.randint(2, (40,))
        >>> opt = NewtonSummary.paper(make_partition(net), curvature=(loss_fn, [batch]))
        >>> for _ in range(40):
        ...     opt.zero_grad()
        ...     loss_fn(net, batch).backward()
        ...     _ = opt.step()
        >>> opt.refreshes, bool((opt.eta > 0).any())  # three without a move, and one more
        (4, True)

        One step reads: direction ``u``, summary of the loss along it, average with earlier
        summaries, rates ``eta``, update ``theta - lr * U I_{P:S} eta``. Summary, average and rates
        are renewed every ``summary_period`` steps.

        ``"as-run"`` is what the paper's experiments did. The first ``warmup`` refreshes, at steps
        0, tau, 2 tau, ..., do not move; until then the direction advances at the refreshes alone.
        The first move is at step ``warmup`` * tau. The window holds the last upsilon, upsilon + 1,
        ..., 2 upsilon - 1 summaries, and upsilon again. D3 is averaged with its sign, so that
        summaries of opposite sign cancel, and the cubic term with them (docs/results.md).

        ``"as-published"`` is the pseudo-code: steps count from 1, the direction advances at each of
        them, the first refresh and the first move are at step tau, and the window holds the last
        upsilon summaries, of which abs(D3)^(1/3) is averaged.

        Any finite solution is accepted: a saddle point, or a step of length zero where every rate
        is negative. Only a step whose gradient is not finite, or a refresh whose summary is not, is
        skipped.

        Args:
            partition: As for the class, like all that follow.
            lr: lambda_1.
            lambda_int: lambda_int.
            curvature: Loss and data of the summaries.
            momentum: mu_g.
            eta_momentum: mu_eta.
            summary_period: tau.
            summary_window: upsilon.
            warmup: Refreshes before the first move; by default 3 as run, 0 as published.
            diagonal: Leave out the interactions between groups (App. K).
            variant: ``"as-run"`` or ``"as-published"``.
            **measuring: How summaries are measured. Anything that is not part of Algorithm 2 is an
                error.
        """
        check_arguments(NewtonSummary.paper, measuring, Measuring.__annotations__)
        if callable(lr):
            raise TypeError(
                "The second argument of NewtonSummary.paper is lr. Pass loss and data of the "
                "summaries as one argument: NewtonSummary.paper(partition, curvature=(loss_fn, "
                "batches))."
            )
        if variant not in ("as-run", "as-published"):
            raise ValueError(f"variant={variant!r}: use 'as-run' or 'as-published'.")
        if variant == "as-published" and warmup:
            raise ValueError(f"warmup={warmup}: Algorithm 2 as published has no warm-up.")
        return cls(
            partition,
            lr=lr,
            lambda_int=lambda_int,
            momentum=momentum,
            eta_momentum=eta_momentum,
            summary_period=summary_period,
            summary_window=summary_window,
            warmup=warmup,
            curvature=curvature,
            variant=variant,
            diagonal=diagonal,
            **measuring,
        )

    # --- a step -----------------------------------------------------------------------------------

    @without_gradients
    def step(  # type: ignore[override]
        self, closure: Closure | Any = None, batch: Any = None
    ) -> Tensor | None:
        """Take one step along the present gradients.

        Args:
            closure: See the class. Anything that is not callable counts as the batch:
                ``step(batch)``.
            batch: The batch of the gradients, or a list of batches.

        Returns:
            The loss, if the closure was called; else None.
        """
        if closure is not None and not callable(closure):
            closure, batch = None, closure
        if self._evaluating:
            raise RuntimeError(
                "The model holds its averaged parameters: call train() before step()."
            )
        check_rates(self.param_groups)
        loss = None
        if closure is not None and self._curvature.loss_fn is not None:
            with torch.enable_grad():
                loss = closure()
        before = self.refreshes
        data = partial(self._curvature.next, self.partition, closure, batch)
        if self._steered is not None:
            self._step_steered(self._steered, data)
        else:
            self._step_of_paper(data)
        if self._curvature.loss_fn is None and self.refreshes > before:
            steered, summary = self._steered, self.last_summary
            loss = summary.loss if summary and not steered else torch.tensor(self.history[-1].loss)
        return loss

    def eval(self) -> None:
        """Give the model the mean of its parameters over the last steps, to evaluate or save it.

        At a constant learning rate it has a lower loss than the last parameters, which
        :meth:`train` restores. The Trainer of Transformers calls both. The paper's algorithm has no
        mean.
        """
        self._set_evaluating(True)

    def train(self) -> None:
        """Restore the model's own parameters, to continue training; see :meth:`eval`."""
        self._set_evaluating(False)

    def _set_evaluating(self, wanted: bool) -> None:
        if self._evaluating != wanted:
            swap_average(self.partition.params.values(), self.state)
            self._evaluating = wanted

    def _step_of_paper(self, data: Data) -> None:
        """Make a step of Algorithm 2."""
        if self._schedule.rests:
            self._schedule.advance()
            return
        update = self._get_update()
        momenta, lrs = self._of_groups("momentum"), self._of_groups("lr")
        if self.refresh_due:
            update.advance(momenta)  # direction
            if update.usable:  # else at the next step
                with self._refreshing(update) as (u, order):
                    own = self._curvature.measure(self.partition, u, order, data)  # summary
                    self.last_summary = self._curvature.mean(own, u)  # mean over the ranks
                    self._average.push(self.last_summary)  # window
                    self._renew_rates(update)  # rates
            update.move(lrs)  # update
        else:
            update.step(momenta, lrs)
        self._schedule.advance()

    def _step_steered(self, steered: Steered, data: Data) -> None:
        """Measure the last step if that is due, steer by it, and make the next one."""
        self._check_gradients()
        seen = len(steered.history)
        if steered.due:
            self._report_skipped(steered.skipped)
            with find_processes(self._curvature.distributed, self.partition.params).joint():
                loss_fn, batch = data()
            steered.measure(loss_fn, batch)
        steered.advance()
        if len(steered.history) > seen:
            self._take_over(steered)
        elif self._eta is not None and self._eta[0] != steered.eta:  # until a schedule's peak
            self._set_eta(steered.eta)

    def _take_over(self, steered: Steered) -> None:
        """Store the results of a refresh."""
        if steered.history[-1].why == "not finite":
            self._fail(self._not_finite(), steered.reason)
        elif steered.summary is not None:
            self.last_summary, self._last_rates = steered.summary, None
        self._set_eta(steered.eta)

    def _set_eta(self, eta: float) -> None:
        self._eta = torch.full((len(self.partition),), eta, dtype=torch.float64)
        self._show_rates()

    @contextmanager
    def _refreshing(self, update: Update) -> Iterator[tuple[Params, int]]:
        """Yield the direction and the order of a refresh, and handle one that fails."""
        self._report_skipped(update.skipped)
        before = copy.copy(self._schedule)
        self._schedule.begin()
        try:
            yield update.direction, 3 if self.param_groups[0]["lambda_int"] > 0 else 2
        except NotFiniteError as error:
            self._fail(self._not_finite(), str(error))
        except BaseException:
            self._schedule = before
            raise

    def _not_finite(self) -> LearningRates:
        """Return the rates of a loss that is not finite."""
        nan = torch.full((len(self.partition),), math.nan)
        return LearningRates(nan, math.nan, "not-finite", self.partition.names)

    @property
    def refresh_due(self) -> bool:
        """Whether the next step measures, and so needs a batch or a closure."""
        return self._schedule.due if self._steered is None else self._steered.due

    def _renew_rates(self, update: Update) -> None:
        """Set the rates from the averaged summary; keep the last ones if it yields none."""
        if not self._schedule.ready:
            return
        settings = self.param_groups[0]
        rates = self._solve(self._average.mean())
        found = rates.eta.tolist()
        if rates.ok and not any(value > 0 for value in found):
            rates = replace(rates, status="no-positive-rate")
        self._last_rates = rates
        if not rates.ok:
            steered = "NewtonSummary(model, loss_fn), which steers one rate for all groups"
            self._fail(rates, rates.detailed(instead=steered))
        if not all(map(math.isfinite, found)):
            return
        eta = rates.eta.double().clamp_min(0)
        if self._eta is not None:
            eta += settings["eta_momentum"] * self._eta
        self._eta = eta
        update.hold(eta)
        self._show_rates()

    def _solve(self, summary: Summary) -> LearningRates:
        """Return the minimum of the cubic model, with negative entries."""
        settings = self.param_groups[0]
        return learning_rates(summary, settings["lambda_int"], diagonal=settings["diagonal"])

    def _get_update(self) -> Update:
        """Return the buffers, made at the first step: a model may move to its device until then."""
        if self._update is None:
            self._check_gradients()
            skipped = self.skipped_steps + self._skipped_since
            self._update = Update(self.partition, self.state, skipped, self._curvature.captures)
            self._skipped_since = 0
            if self._eta is not None:
                self._update.hold(self._eta)
        return self._update

    def _check_gradients(self) -> None:
        if self.refreshes == 0 and all(p.grad is None for p in self.partition.params.values()):
            raise ValueError(
                "No parameter of the partition has a gradient. Call loss.backward() before "
                "step(), not in a closure. Is this the partition of the model being trained?"
            )

    def _of_groups(self, name: str) -> list[Any]:
        return [group[name] for group in self.param_groups]

    # --- what happened ----------------------------------------------------------------------------

    @property
    def eta(self) -> Tensor:
        """The rates in use, (S,); ``param_groups`` has the same numbers."""
        if self._eta is None:
            return torch.zeros(len(self.partition), dtype=torch.float64)
        return self._eta

    @property
    def last_rates(self) -> LearningRates | None:
        """The minimum of the last summary's cubic model with its status; None before the first.

        It includes negative rates, which the paper's algorithm sets to zero; with that algorithm,
        it is that of the averaged summary.
        """
        if self._last_rates is None and self._steered is not None and self.last_summary is not None:
            self._last_rates = self._solve(self.last_summary)  # not before somebody asks
        return self._last_rates

    @property
    def refreshes(self) -> int:
        """How many measurements were made."""
        return self._curvature.count if self._steered is None else len(self._steered.history)

    @property
    def history(self) -> list[RateRecord]:
        """What each refresh measured and changed, if steered: see :class:`RateController`."""
        return [] if self._steered is None else self._steered.history

    def to_history(self) -> History:
        """Return what was measured and done by step, with the last summary, for :func:`report`."""
        direction = "NewtonSummary" if self.direction is None else type(self.direction).__name__
        history = steering_history(self.history, direction)
        if self.last_summary is not None and self.last_rates is not None:
            step = self.history[-1].step if self.history else self.refreshes
            rates = self.last_rates
            if self._steered is not None and len(self.partition) > 1:
                history.facts["learning rates"] = (
                    "those of the cubic model; the steps of all groups have the steered one"
                )
            elif (
                self._steered is not None and rates.status != "not-finite"
            ):  # of a refresh that failed
                rates = replace(rates, eta=self.eta, status="steered")
            history.add(step, self.last_summary, rates, kind="optimizer")
        return history

    def __repr__(self) -> str:
        """Return the settings, and a table of the groups."""
        head = ("name", *OF_GROUPS, "eta")
        rows = [[_shown(group[key]) for key in head] for group in self.param_groups]
        table = text_table(without_middle([list(head), *rows]), right=range(1, len(head)))
        said = ", ".join(f"{name}={self.param_groups[0][name]!r}" for name in COMMON)
        return f"{type(self).__name__}({said})\n{table}\nthe learning rate of a step is lr * eta"

    def _show_rates(self) -> None:
        """Write the rates to where loggers look for them."""
        if self.partition.divided:
            self.param_groups[0]["eta"] = self.eta
            return
        for group, value in zip(self.param_groups, self.eta.tolist(), strict=True):
            group["eta"] = value

    def _fail(self, found: LearningRates, reason: str) -> None:
        """Count a refresh without usable rates, and warn at the first of a kind."""
        self.failed_refreshes += 1
        self._last_rates = found
        if found.status in self._warned:
            return
        self._warned.add(found.status)
        if found.eta.isfinite().all():
            outcome = "they are used as they are"
        elif self._steered is not None and self._eta is not None:
            outcome = "the last rate is halved"
        else:
            outcome = "there are none yet" if self._eta is None else "the last good ones are kept"
        warn_user(
            f"NewtonSummary: a refresh yielded no usable rates, and {outcome}. {reason} (Shown "
            "once; opt.failed_refreshes counts them.)"
        )

    def _report_skipped(self, count: int) -> None:
        skipped = count - self.skipped_steps
        if skipped > 0:
            warn_user(
                f"NewtonSummary: {skipped} step(s) since the last refresh were skipped, because "
                "the gradient was not finite. Check for a division by zero or an overflow in the "
                "loss. (opt.skipped_steps counts them.)"
            )
        self.skipped_steps += skipped

    # --- more groups, checkpoints, copies ---------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters of the same model, for example of an unfrozen layer.

        The paper's algorithm restarts with its warm-up; a steered rate is kept.

        Args:
            param_group: ``"params"``, the ``"name"`` of the new group, and optionally ``"lr"``,
                ``"momentum"`` and ``"weight_decay"``.
        """
        if not self._made:
            super().add_param_group(param_group)
            return
        given = param_group["params"]
        params = [given] if isinstance(given, Tensor) else list(given)
        name = param_group.get("name", f"group{len(self.partition)}")
        partition = extended(self.partition, self.model, params, name)
        if self.partition.divided:
            self.param_groups[0]["params"].extend(params)
        else:
            super().add_param_group({"eta": 0.0, **param_group, "params": params, "name": name})
        if self.direction is not None:
            self.direction.add_param_group({"params": params})
        self.partition = partition
        self._average = WindowAverage(self._average.size, self._average.as_run)
        self._schedule.restart()
        if self._steered is not None:
            old, self._steered = self._steered, self._make_steered()
            self._steered.go_on_from(old)
        if self._eta is not None:
            added = self._steered.eta if self._steered is not None else 0.0
            self._eta = torch.cat([self._eta, torch.tensor([added], dtype=torch.float64)])
        self._show_rates()
        if self._update is not None:
            self._report_skipped(self._update.skipped)
        self._update = None

    def state_dict(self) -> dict[str, Any]:
        """Return everything needed to resume, bit for bit on the CPU.

        Only plain values and tensors, so ``torch.load(weights_only=True)`` reads it.
        """
        state = super().state_dict()
        state["state"] = tree_map(own_memory, state["state"])
        mover = self._update or self._steered
        since = self._skipped_since if mover is None else mover.skipped - self.skipped_steps
        counts = (self._curvature.count, self.failed_refreshes, self.skipped_steps, since)
        state[checkpoint.KEY] = {
            "format": checkpoint.FORMAT,
            "settings": self._fixed_settings(),
            "groups": list(self.partition.names),
            "schedule": self._schedule.state_dict(),
            "average": self._average.state_dict(),
            "eta": self._eta,
            "steering": None if self._steered is None else self._steered.state_dict(),
            "last_rates": None if self.last_rates is None else asdict(self.last_rates),
            "last_summary": None if self.last_summary is None else plain_summary(self.last_summary),
            "counts": dict(zip(COUNTS, counts, strict=True)),
            "warned": sorted(self._warned),
            "evaluating": self._evaluating,
            "direction": None if self.direction is None else self.direction.state_dict(),
            "data": None if self._curvature.data is None else self._curvature.data.state_dict(),
        }
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of another run with the same model, groups and settings.

        ``lr``, ``momentum`` and whatever else was changed in ``param_groups`` come from the
        checkpoint. To continue with another setting, load first, then change it in
        ``param_groups``.

        Raises:
            ValueError: If the state does not fit; nothing is changed then.
        """
        saved = checkpoint.find_saved(state_dict)
        with checkpoint.reporting_damage():
            given = {
                "direction": self.direction is not None,
                "data": self._curvature.data is not None,
            }
            checkpoint.check_same(saved, self.partition.names, self._fixed_settings(), given)
            checkpoint.check_groups(state_dict, self.param_groups)
            counts = checkpoint.read_counts(saved["counts"], *COUNTS)
            eta = checkpoint.read_rates(saved["eta"], self.partition)
            rates, summary = saved["last_rates"], saved["last_summary"]
            rates = None if rates is None else LearningRates(**rates)
            warned, evaluating = set(saved["warned"]), bool(saved["evaluating"])
            summary = None if summary is None else restored_summary(summary, self.partition)
            schedule, average = copy.copy(self._schedule), copy.copy(self._average)
            schedule.load_state_dict(saved["schedule"])
            average.load_state_dict(saved["average"], self.partition)
            steered, data = copy.copy(self._steered), copy.copy(self._curvature.data)
            if steered is not None:
                steered.load_state_dict(saved["steering"])
            if data is not None:
                data.load_state_dict(saved["data"])
            if self.direction is not None:
                checkpoint.check_finite(saved["direction"]["state"], "The state of the direction")
                check_rates(saved["direction"]["param_groups"])
                self.direction.load_state_dict(saved["direction"])
        super().load_state_dict({k: state_dict[k] for k in ("state", "param_groups")})
        self._schedule, self._average, self._eta = schedule, average, eta
        self._last_rates, self.last_summary, self._warned = rates, summary, warned
        self._evaluating = evaluating
        self._curvature.data, self._curvature.count = data, counts[0]
        self.failed_refreshes, self.skipped_steps, self._skipped_since = counts[1:]
        self._update = None  # made again from the momentum buffers
        if steered is not None:
            steered.groups = self.param_groups
            steered.share(self.state, skipped=sum(counts[2:]))
            self._steered, self._skipped_since = steered, 0

    def _fixed_settings(self) -> dict[str, Any]:
        """Return what the optimizer was created with, except for what schedulers change."""
        return {name: self.defaults[name] for name in (*COMMON, "weight_decay")}

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy needs: buffers are made again, a scheduler's wrapper stays behind."""
        return {k: v for k, v in self.__dict__.items() if k != "step"} | {"_update": None}


def _shown(value: Any) -> str:
    if isinstance(value, Tensor) and value.numel() > 1:
        return f"{value.min():.4g} to {value.max():.4g}"
    return value if isinstance(value, str) else f"{float(value):.4g}"
