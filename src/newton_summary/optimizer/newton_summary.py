"""NewtonSummary: the paper's second-order method as a torch optimizer (Algorithm 2, App. G)."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from newton_summary.display.table import text_table, without_middle
from newton_summary.display.warn import warn_user
from newton_summary.errors import NotFiniteError
from newton_summary.optimizer import checkpoint
from newton_summary.optimizer.checks import (
    Closure,
    check_direction,
    check_partition,
    check_settings,
    extended,
    holds_all,
    is_divided,
)
from newton_summary.optimizer.curvature import Curvature
from newton_summary.optimizer.rates import (
    Average,
    NormalizedAverage,
    WindowAverage,
    limit,
    plain_summary,
    restored_summary,
    solve,
    solve_common,
)
from newton_summary.optimizer.schedule import Schedule, Variant
from newton_summary.optimizer.update import Update
from newton_summary.parallel.fsdp import own_memory
from newton_summary.parallel.processes import find_processes
from newton_summary.partition import Params, Partition
from newton_summary.probe.probe import LossFn
from newton_summary.solver import LearningRates
from newton_summary.summary import Summary

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from newton_summary.optimizer.curvature import Measuring

OF_GROUPS = ("lr", "momentum", "weight_decay")  # settings that each group has for itself
COMMON = (  # settings that all groups share
    "variant",
    "lambda_int",
    "eta_momentum",
    "summary_period",
    "summary_window",
    "warmup",
    "diagonal",
    "ridge",
    "max_step",
)
COUNTS = ("refreshes", "failed_refreshes", "failed_in_a_row", "skipped_steps", "skipped_since")
PATIENCE = 3  # refreshes in a row without separate rates, after which one rate serves all groups


class NewtonSummary(Optimizer):
    """Learning rates from the curvature of the loss, one for each group of parameters.

    One step reads: direction ``u``, summary of the loss along it, average with earlier summaries,
    rates ``eta``, update ``theta - lr * U I_{P:S} eta``. Summary, average and rates are renewed
    every ``summary_period`` steps; a step in between costs about as much as one of SGD with
    momentum.

    Curvature is measured on data of its own. Either give it here,

    >>> import newton_summary as ns
    >>> net = torch.nn.Linear(3, 1)
    >>> x, y = torch.randn(64, 3), torch.randn(64, 1)
    >>> def loss_fn(model, batch):
    ...     return (model(batch[0]) - batch[1]).square().mean()
    >>> opt = ns.NewtonSummary(ns.make_partition(net), curvature=(loss_fn, [(x, y)]))
    >>> loss_fn(net, (x, y)).backward()
    >>> _ = opt.step()

    or leave ``curvature`` out and call ``opt.step(lambda: loss_fn(model, curvature_batch))``: then
    the closure is evaluated when a refresh is due (:attr:`refresh_due`), returns the loss of one
    batch, the same at each call, and does not call ``backward()``. With ``curvature`` a closure has
    torch's usual meaning: it is called once, at the start, and leaves gradients.

    ``param_groups`` has one entry for each group of the partition, with its ``"name"``, its
    ``"lr"`` (the paper's lambda_t, which schedulers change) and its ``"eta"`` as of the last
    refresh; the learning rate of a group is their product. A partition that divides tensors cannot
    be written in this way: then there is one entry for everything, whose ``"eta"`` is a vector.
    ``lr``, ``momentum`` and ``weight_decay`` may differ from group to group; of the other settings
    those of the first group count.

    A gradient that is not finite never reaches the parameters: the step is not made, and the
    direction starts again from zero. This is decided on the device, without waiting; such steps are
    counted, and reported at the next refresh. A refresh that gives no usable rates keeps the last
    good ones, is counted in :attr:`failed_refreshes`, and warns once. Where there are none yet, and
    after three such refreshes in a row, all groups get one rate: the best along the direction as a
    whole, with the absolute value of the curvature. So networks train for which separate rates have
    no minimum, such as those with ReLU and squared error, whose ``D3`` is zero.

    Args:
        partition: The groups of a model's parameters, from :func:`make_partition`.
        lr: Factor on all rates, the paper's lambda_1.
        lambda_int: Strength of the cubic term; 0 leaves it out, and with it the third derivatives.
        momentum: mu of the heavy ball, u <- mu u + gradient.
        eta_momentum: mu_eta of Algorithm 2, eta~ <- mu_eta eta~ + (eta)_+.
        summary_period: Steps from one refresh to the next, tau.
        summary_window: Summaries that are averaged, upsilon. With ``variant="smoothed"`` the memory
            of exponential averages, whose past is weighted by 1 - 1 / ``summary_window``.
        warmup: Refreshes before the first move, each on a batch of its own. At least one is made.
            With a closure, which brings one batch a step, the first ``warmup`` steps do not move.
        direction: A torch optimizer whose step, with its own learning rate, is the direction of the
            parameters that it holds. Its state advances as usual and is saved with this one's. It
            sees a gradient of zero where the real one is not finite.
        curvature: ``(loss_fn, loader)``: ``loss_fn(model, batch)`` gives the mean loss of a batch
            that the loader gives. One batch is used for each summary. The loader starts over when
            it ends, and draws from random numbers of its own.
        variant: ``"smoothed"`` averages derivatives by step length over all refreshes, and between
            refreshes no step of a group is longer than at the last one. Where negative rates were
            cut to zero, and the others then raise the cubic model, these are shortened to where it
            is lowest. ``"as-run"`` and ``"as-published"`` are the paper's algorithm, see
            :meth:`paper`.
        diagonal: Leave out the interactions between groups (App. K).
        ridge: Add this fraction of its own absolute value to each diagonal entry of Hbar. Steps
            become shorter, by 1 / (1 + ridge) where groups do not interact. Where all act alike, as
            layers do, and little but noise tells which should move, it lets all of them move.
        max_step: No step moves the weights of a group (tensors of two or more dimensions) by more
            than this fraction of their norm: else the rate of this group is shortened. A group
            without weights moves no further than one with weights of median norm may, and small
            weights count as a tenth of these. Keeps layers with little curvature from growing until
            all others have too much of it. ``inf`` for no limit. The limit compares groups, so with
            it a training is not invariant under rescaling a group (App. E).
        weight_decay: Decoupled, as in AdamW: each step first multiplies the parameters by
            1 - lr * weight_decay. As there, what adapts (``eta``) does not enter, so a group whose
            rate is zero decays too. AdamW with a rate of 1e-3 and a decay of 0.01 shrinks as much
            as ``lr=0.7`` with 1.4e-5.
        **measuring: How summaries are measured: ``backend`` and ``microbatch`` as for
            :func:`summarize`; ``distributed`` as there (gradients have to be the same on all ranks,
            as DistributedDataParallel leaves them; then so are the rates); and ``cuda_graph=True``
            to capture the measurement on a GPU as a CUDA graph after the first refreshes and replay
            it: several times faster for small models, whose kernels are shorter than their
            launches. The loss must then do the same at each call (no branch on values, steps or
            random numbers), and the memory of a measurement stays taken. Falls back, with a
            warning, where it cannot be done: dropout, batch norm in training, several ranks.

    Attributes:
        model: The model of the partition.
        partition: The groups.
        direction: The optimizer whose step is the direction, if one was given.
        skipped_steps: Steps that were not made because of a gradient that was not finite, as of the
            last refresh.
        failed_refreshes: Refreshes that gave no usable rates.
        last_summary: The last summary as it was measured; None before the first.
        last_rates: The last solution with its status, negative rates included; None before the
            first.
    """

    def __init__(
        self,
        partition: Partition,
        lr: float | Tensor = 0.7,
        lambda_int: float = 1.0,
        momentum: float = 0.9,
        eta_momentum: float = 0.0,
        summary_period: int = 10,
        summary_window: int = 10,
        warmup: int = 3,
        direction: Optimizer | None = None,
        curvature: tuple[LossFn, Any] | None = None,
        *,
        variant: Variant = "smoothed",
        diagonal: bool = False,
        ridge: float = 0.2,
        max_step: float = 0.02,
        weight_decay: float = 0.0,
        **measuring: Unpack[Measuring],
    ):
        self.model = check_partition(partition)
        settings = {
            "variant": variant,
            "lr": lr,
            "lambda_int": lambda_int,
            "momentum": momentum,
            "eta_momentum": eta_momentum,
            "summary_period": summary_period,
            "summary_window": summary_window,
            "warmup": warmup,
            "diagonal": diagonal,
            "ridge": ridge,
            "max_step": max_step,
            "weight_decay": weight_decay,
        }
        check_settings(settings)
        if direction is not None:
            check_direction(direction, partition)
        self.partition, self.direction = partition, direction
        processes = find_processes(measuring.get("distributed", "auto"), partition.params)
        with processes.joint():
            self._curvature = Curvature(curvature, measuring)
        processes.agree(partition.facts() | {k: settings[k] for k in settings if k != "lr"}, {})
        at_once = self._curvature.data is not None
        self._schedule = Schedule(variant, summary_period, warmup, at_once)
        self._average = _make_average(settings)
        self._eta: Tensor | None = None  # (S,), float64 on the CPU, none of them negative
        self._norms: Tensor | None = None  # (S,) of the direction they were found for
        self._update: Update | None = None
        self.last_summary: Summary | None = None
        self.last_rates: LearningRates | None = None
        self.failed_refreshes = self._failed_in_a_row = 0
        self.skipped_steps = self._skipped_since = 0
        self._warned: set[str] = set()
        self._made = False  # until then, add_param_group is called by torch
        self._divided = is_divided(partition)
        if self._divided:
            everything = list(partition.params.values())
            groups = [{"params": everything, "name": "all groups", "eta": self.eta}]
        else:
            groups = partition.param_groups(eta=0.0)
        super().__init__(groups, settings)
        self._made = True

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
        """Return Algorithm 2 (App. G) with nothing added, as it was run or as it was published.

        ``"as-run"`` is what the experiments of the paper did. The first ``warmup`` refreshes, at
        steps 0, tau, 2 tau, ..., do not move; until then the direction advances at the refreshes
        alone. The first move is at step ``warmup`` * tau. The window holds the last upsilon,
        upsilon + 1, ..., 2 upsilon - 1 summaries, and upsilon again.

        ``"as-published"`` is the pseudo-code: steps count from 1, the direction advances at each of
        them, the first refresh and the first move are at step tau, and the window holds the last
        upsilon summaries.

        Both average D3 with its sign, as the experiments did, where App. G averages abs(D3)^(1/3):
        then the mean of batches is that of the data as a whole. Any finite solution is taken: a
        saddle point, or a step of length zero where every rate is negative. Only a step whose
        gradient, and a refresh whose summary, is not finite is left out.

        Args:
            partition: As for the class, like all that follow.
            lr: lambda_1.
            lambda_int: lambda_int.
            curvature: Loss and data of the summaries.
            momentum: mu_g.
            eta_momentum: mu_eta.
            summary_period: tau.
            summary_window: upsilon.
            warmup: Refreshes before the first move; if not given, 3 as run, 0 as published.
            diagonal: Leave out the interactions between groups (App. K).
            variant: ``"as-run"`` or ``"as-published"``.
            **measuring: How summaries are measured. Whatever is not of Algorithm 2 is refused.
        """
        if variant not in ("as-run", "as-published"):
            raise ValueError(f"variant={variant!r}: write 'as-run' or 'as-published'.")
        if warmup is None:
            warmup = 3 if variant == "as-run" else 0
        elif variant == "as-published" and warmup > 0:
            raise ValueError(f"warmup={warmup}: Algorithm 2 as published has no warm-up.")
        without = {"direction": None, "ridge": 0.0, "max_step": math.inf, "weight_decay": 0.0}
        for name in [name for name in measuring if name in without]:
            value = measuring.pop(name)  # type: ignore[misc]
            if value != without[name]:
                raise ValueError(
                    f"{name}={value!r} is an addition to the paper's algorithm, which has "
                    f"{name}={without[name]!r}. Leave it out, or use NewtonSummary(..., "
                    f"variant={variant!r}) with the additions that you want."
                )
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
            ridge=0.0,
            max_step=math.inf,
            **measuring,
        )

    # --- a step -----------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> Tensor | None:  # type: ignore[override]
        """Make one step along the present gradients.

        Args:
            closure: See the class. Not needed where ``curvature`` was given.

        Returns:
            What the closure returned if it was called; else None.
        """
        loss = None
        if closure is not None and self._curvature.data is not None:
            with torch.enable_grad():
                loss = closure()
        if not self._schedule.rests:
            update = self._get_update()
            update.advance(self._of_groups("momentum"))  # direction
            if self.refresh_due and update.usable:  # else at the next step
                with self._refreshing(update) as (u, order):
                    for _ in range(self._schedule.begin()):
                        own = self._curvature.measure(self.partition, u, order, closure)  # summary
                        self.last_summary = self._curvature.mean(own, u)  # mean over the ranks
                        self._average.push(self.last_summary, update.norms)  # average
                        loss = self.last_summary.loss if self._curvature.data is None else loss
                    self._renew_rates(update)  # rates
            update.move(self._of_groups("lr"), self._of_groups("weight_decay"))  # update
        self._schedule.advance()
        return loss

    @contextmanager
    def _refreshing(self, update: Update) -> Iterator[tuple[Params, int]]:
        """Give the direction and the order of a refresh, and see to one that fails."""
        self._report_skipped(update)
        before = copy.copy(self._schedule)
        try:
            yield update.direction(), 3 if self.param_groups[0]["lambda_int"] > 0 else 2
        except NotFiniteError as error:
            nan = torch.full((len(self.partition),), math.nan)
            rates = LearningRates(nan, math.nan, "not-finite", self.partition.names)
            self._fail(rates, rates, str(error))
        except BaseException:
            self._schedule = before
            raise

    @property
    def refresh_due(self) -> bool:
        """Whether the next step measures a summary, and so needs a closure if it takes one."""
        return self._schedule.due

    def _renew_rates(self, update: Update) -> None:
        """Set the rates from the averaged summary; keep the last ones if it gives none."""
        if not self._schedule.ready:
            return
        settings = self.param_groups[0]
        smoothed = settings["variant"] == "smoothed"
        ridge, max_step = settings["ridge"], settings["max_step"]
        how = {"lambda_int": settings["lambda_int"], "diagonal": settings["diagonal"]}
        norms = update.norms.double().cpu()
        mean = self._average.mean(norms)
        found = rates = solve(mean, **how, ridge=ridge, shorten=smoothed)
        if found.ok:
            self._failed_in_a_row, self.last_rates = 0, rates
        else:
            if smoothed and (self._eta is None or self._failed_in_a_row + 1 >= PATIENCE):
                rates = solve_common(found, mean, ridge)
            self._fail(found, rates, found.detail)
        if not (rates.ok if smoothed else rates.eta.isfinite().all()):
            return
        eta = rates.eta.double().clamp_min(0)
        if self._eta is not None:
            eta += settings["eta_momentum"] * self._eta
        if max_step < math.inf:
            lrs = torch.tensor([float(lr) for lr in self._of_groups("lr")], dtype=torch.float64)
            eta = limit(eta, lrs, norms, update.weight_norms().double().cpu(), max_step)
        self._eta, self._norms = eta, norms if smoothed else None
        update.hold(self._eta, self._norms)
        self._show_rates()

    def _get_update(self) -> Update:
        """Return the buffers, made at the first step: a model may move to its device until then."""
        if self._update is None:
            params = self.partition.params.values()
            if self.refreshes == 0 and all(p.grad is None for p in params):
                raise ValueError(
                    "No parameter of the partition has a gradient. Call loss.backward() before "
                    "step(). Is the partition of the model that is trained?"
                )
            skipped = self.skipped_steps + self._skipped_since
            self._update = Update(self.partition, self.direction, self.state, skipped)
            self._skipped_since = 0
            if self._eta is not None:
                self._update.hold(self._eta, self._norms)
        return self._update

    def _of_groups(self, name: str) -> list[Any]:
        return [group[name] for group in self.param_groups]

    # --- what happened ----------------------------------------------------------------------------

    @property
    def eta(self) -> Tensor:
        """The rates in use since the last refresh, (S,); ``param_groups`` has the same numbers.

        With ``variant="smoothed"`` the rate of a group falls below that while its direction is
        longer than at the refresh, so that its step is not.
        """
        if self._eta is None:
            return torch.zeros(len(self.partition), dtype=torch.float64)
        return self._eta

    @property
    def refreshes(self) -> int:
        """How many summaries were measured."""
        return self._curvature.count

    def __repr__(self) -> str:
        """Return the settings, and a table of the groups."""
        head = ("name", *OF_GROUPS, "eta")
        rows = [[_shown(group[key]) for key in head] for group in self.param_groups]
        table = text_table(without_middle([list(head), *rows]), right=range(1, len(head)))
        said = ", ".join(f"{name}={self.param_groups[0][name]!r}" for name in COMMON)
        return f"{type(self).__name__}({said})\n{table}"

    def _show_rates(self) -> None:
        """Write the rates where loggers look for them."""
        if self._divided:
            self.param_groups[0]["eta"] = self.eta
            return
        for group, value in zip(self.param_groups, self.eta.tolist(), strict=True):
            group["eta"] = value

    def _fail(self, found: LearningRates, used: LearningRates, reason: str) -> None:
        """Count a refresh without usable rates, and warn at the first of a kind."""
        self.failed_refreshes += 1
        self._failed_in_a_row += 1
        self.last_rates = used
        if found.status in self._warned:
            return
        self._warned.add(found.status)
        if used is not found:
            outcome = "all groups get one rate"
        elif self.param_groups[0]["variant"] != "smoothed" and used.eta.isfinite().all():
            outcome = "they are taken as they are"
        else:
            outcome = "there are none yet" if self._eta is None else "the last good ones are kept"
        warn_user(
            f"NewtonSummary: a refresh gave no usable rates, and {outcome}. {reason} (Shown once; "
            f"opt.failed_refreshes counts them.)"
        )

    def _report_skipped(self, update: Update) -> None:
        skipped = update.skipped - self.skipped_steps
        if skipped > 0:
            warn_user(
                f"NewtonSummary: {skipped} step(s) since the last refresh were not made, because "
                f"the gradient was not finite. Look for a division by zero or an overflow in the "
                f"loss. (opt.skipped_steps counts them.)"
            )
        self.skipped_steps += skipped

    # --- more groups, checkpoints, copies ---------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters of the same model, for example of a layer that was unfrozen.

        The averages start again: the next step begins with the warm-up's refreshes.

        Args:
            param_group: ``"params"``, ``"name"`` of the new group, and if wanted ``"lr"``,
                ``"momentum"`` and ``"weight_decay"``.
        """
        if not self._made:
            super().add_param_group(param_group)
            return
        given = param_group["params"]
        params = [given] if isinstance(given, Tensor) else list(given)
        name = param_group.get("name", f"group{len(self.partition)}")
        partition = extended(self.partition, self.model, params, name)
        held_all = self.direction is not None and holds_all(self.direction, self.partition)
        if self._divided:
            self.param_groups[0]["params"].extend(params)
        else:
            super().add_param_group({"eta": 0.0, **param_group, "params": params, "name": name})
        if held_all and self.direction is not None:
            self.direction.add_param_group({"params": params})
        self.partition = partition
        none_yet = torch.zeros(1, dtype=torch.float64)
        self._eta = None if self._eta is None else torch.cat([self._eta, none_yet])
        self._norms = None if self._norms is None else torch.cat([self._norms, none_yet])
        self._average = _make_average(self.param_groups[0])
        self._schedule.restart()
        self._show_rates()
        if self._update is not None:
            self._report_skipped(self._update)
        self._update = None

    def state_dict(self) -> dict[str, Any]:
        """Return everything that a run needs to go on, bit for bit on the CPU.

        Only plain values and tensors, so ``torch.load(weights_only=True)`` reads it.
        """
        state = super().state_dict()
        state["state"] = {
            key: {name: own_memory(value) for name, value in values.items()}
            for key, values in state["state"].items()
        }
        since = self._skipped_since
        if self._update is not None:
            since = self._update.skipped - self.skipped_steps
        failed = self.failed_refreshes, self._failed_in_a_row
        counts = (self.refreshes, *failed, self.skipped_steps, since)
        state[checkpoint.KEY] = {
            "format": checkpoint.FORMAT,
            "settings": self._fixed_settings(),
            "groups": list(self.partition.names),
            "schedule": self._schedule.state_dict(),
            "average": self._average.state_dict(),
            "eta": self._eta,
            "norms": self._norms,
            "last_rates": None if self.last_rates is None else asdict(self.last_rates),
            "last_summary": None if self.last_summary is None else plain_summary(self.last_summary),
            "counts": dict(zip(COUNTS, counts, strict=True)),
            "warned": sorted(self._warned),
            "direction": None if self.direction is None else self.direction.state_dict(),
            "data": None if self._curvature.data is None else self._curvature.data.state_dict(),
        }
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the state of another run with the same model, groups and settings.

        ``lr``, ``momentum`` and whatever else was changed in ``param_groups`` come from the
        checkpoint. To go on with another setting, load first, then change it in ``param_groups``.

        Raises:
            ValueError: If the state does not fit; then nothing was changed.
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
            eta = checkpoint.read_vector(saved["eta"], self.partition, "eta")
            norms = checkpoint.read_vector(saved["norms"], self.partition, "norms")
            rates, summary = saved["last_rates"], saved["last_summary"]
            rates = None if rates is None else LearningRates(**rates)
            summary = None if summary is None else restored_summary(summary, self.partition)
            schedule, average = copy.copy(self._schedule), copy.copy(self._average)
            schedule.load_state_dict(saved["schedule"])
            average.load_state_dict(saved["average"], self.partition)
            data = copy.copy(self._curvature.data)
            if data is not None:
                data.load_state_dict(saved["data"])
            if self.direction is not None:
                self.direction.load_state_dict(saved["direction"])
        super().load_state_dict({k: state_dict[k] for k in ("state", "param_groups")})
        self._schedule, self._average, self._eta, self._norms = schedule, average, eta, norms
        self.last_rates, self.last_summary, self._warned = rates, summary, set(saved["warned"])
        self._curvature.data, self._curvature.count = data, counts[0]
        self.failed_refreshes, self._failed_in_a_row = counts[1:3]
        self.skipped_steps, self._skipped_since = counts[3:]
        self._update = None  # made again from the momentum buffers

    def _fixed_settings(self) -> dict[str, Any]:
        """Return what the optimizer was made with, but for what schedulers change."""
        return {name: self.defaults[name] for name in (*COMMON, "weight_decay")}

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy needs: buffers are made again, a scheduler's wrapper stays behind."""
        return {k: v for k, v in self.__dict__.items() if k != "step"} | {"_update": None}


def _make_average(settings: dict[str, Any]) -> Average:
    window, variant = settings["summary_window"], settings["variant"]
    if variant == "smoothed":
        return NormalizedAverage(window)
    return WindowAverage(window, as_run=variant == "as-run")


def _shown(value: Any) -> str:
    if isinstance(value, Tensor) and value.numel() > 1:
        return f"{value.min():.4g} to {value.max():.4g}"
    return value if isinstance(value, str) else f"{float(value):.4g}"
