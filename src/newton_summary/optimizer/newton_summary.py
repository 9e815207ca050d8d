"""NewtonSummary: the paper's second-order method as a torch optimizer (Algorithm 2, App. G)."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from newton_summary.derivatives import BACKENDS
from newton_summary.optimizer.averaging import make_average
from newton_summary.optimizer.checks import (
    as_loss_fn,
    check_curvature,
    check_direction,
    check_number,
    check_partition,
    check_whole,
    extended,
    holds_all,
    is_divided,
)
from newton_summary.optimizer.rates import RateRules
from newton_summary.optimizer.refresh import Refresh
from newton_summary.optimizer.update import Factors, Motion, make_motion
from newton_summary.parallel.fsdp import own_memory
from newton_summary.parallel.processes import find_processes
from newton_summary.partition import Partition
from newton_summary.probe.probe import LossFn
from newton_summary.solver import LearningRates
from newton_summary.summary import Summary

Closure = Callable[[], Tensor]
Variant = Literal["smoothed", "as-run", "as-published"]

# Where summaries are noisy, because curvature batches differ:
MAX_STEP = 0.02  # of the norm of a group's weights
RIDGE = 0.2  # of each diagonal entry of Hbar


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

    A gradient that is not finite never reaches the parameters: the step is not made, and the
    direction starts anew from zero. This is decided on the device, without waiting; such steps are
    counted and told at the next refresh. A refresh that gives no usable rates keeps the last good
    ones, is counted in :attr:`failed_refreshes`, shows in ``last_rates.status`` and warns once.

    Args:
        partition: The groups of a model's parameters, from :func:`make_partition`.
        lr: Factor on all rates, the paper's lambda_1.
        lambda_int: Strength of the cubic term; 0 leaves it out, and with it the third derivatives.
        momentum: mu of the heavy ball, u <- mu u + gradient. One for all groups; a scheduler may
            change it.
        eta_momentum: mu_eta of Algorithm 2, eta~ <- mu_eta eta~ + (eta)_+.
        summary_period: Steps from one refresh to the next, tau.
        summary_window: Summaries that are averaged with ``averaging="window"``, upsilon.
        warmup: Refreshes before the first move, each on a batch of its own. At least one is made.
            With a closure, which brings one batch a step, the first ``warmup`` steps do not move.
        direction: A torch optimizer whose step, with its own learning rate, is the direction of the
            parameters that it holds. Its state advances as usual and is saved with this one's. It
            sees a gradient of zero where the real one is not finite.
        curvature: ``(loss_fn, loader)``: ``loss_fn(model, batch)`` gives the mean loss of a batch
            that the loader gives. One batch is used for each summary. The loader starts over when
            it ends, and draws from random numbers of its own.
        averaging: ``"normalized"`` averages derivatives by step length over all refreshes, with
            exponential weights, and keeps each group's step length from one refresh to the next,
            or its rate where that is shorter, as it is while gradients are small;
            ``"window"`` averages the last few summaries and keeps the rates, as the paper does.
        summary_decay: Weight of the past in ``averaging="normalized"``.
        absolute_D3: With ``averaging="normalized"``, average abs(D3): noise then makes the cubic
            term larger, where with signs it makes it smaller.
        diagonal: Leave out the interactions between groups (App. K).
        negative: What becomes of groups whose rate comes out negative: ``"cut"`` sets these rates
            to zero, as the paper does; ``"drop"`` also solves again for the others without them.
        eta_average: Make ``eta_momentum`` an average, mu_eta eta~ + (1 - mu_eta) (eta)_+.
        ridge: Add this fraction of its own absolute value to each diagonal entry of Hbar. Steps
            become shorter, by 1 / (1 + ridge) where groups do not interact. Where all act alike, as
            layers do, and little but noise tells which should move, it lets all of them move. If
            not given, 0.2 where ``curvature`` has more than one batch (on any rank), and else 0.
        max_eta: No rate is larger (no step length, with ``averaging="normalized"``). Depends on
            the units of the parameters, so invariance under rescaling is lost.
        max_growth: From one refresh to the next no rate grows by more than this factor. Slows the
            beginning down if the first rates are too small.
        max_step: No step moves the weights of a group (tensors of two or more dimensions) by more
            than this fraction of their norm: else the rate of this group is shortened. A group
            without weights moves no further than one with weights of middling norm may, and small
            weights count as a tenth of these. Keeps layers with little curvature from growing
            until all others have too much of it. ``inf`` for no limit. If not given, 0.02 where
            ``curvature`` has more than one batch (on any rank), and else no limit.
        min_decrease: Accept rates only if a step along them lowers the loss of the curvature batch
            by this fraction of the predicted decrease; else halve them, at most five times. Costs
            one to six evaluations of the loss a refresh, and shortens steps where there is noise.
        keep_last_good: Whether a saddle point (possible with ``lambda_int=0``), or rates that are
            all zero, count as unusable. Rates that are not finite always do.
        shorten: Where negative rates were cut and the cubic model predicts that the others then
            raise the loss, shorten these to where the model is lowest along them. Costs nothing.
        backend: How summaries are computed, see :func:`summarize`.
        microbatch: Split curvature batches into parts of so many samples, see :func:`summarize`.
        distributed: Whether summaries are averaged over ranks, see :func:`summarize`. Gradients
            have to be the same on all ranks, as DistributedDataParallel leaves them; then so are
            the rates. A refresh exchanges one summary, other steps nothing; when the optimizer is
            made, ranks make sure that they do the same, and agree on ``max_step``.
        cuda_graph: On a GPU, capture the measurement as a CUDA graph after the first refreshes, and
            replay it: several times faster for small models, whose kernels are shorter than their
            launches. The loss must then do the same at each call (no branch on values, steps or
            random numbers), and the memory of a measurement stays taken. Falls back, with a
            warning, where it cannot be done: dropout, batch norm in training, several ranks.
        variant: The start, and the window: see :meth:`paper`. ``"smoothed"`` moves at the first
            step, from ``warmup`` summaries measured there.

    Attributes:
        model: The model of the partition.
        partition: The groups.
        direction: The optimizer whose step is the direction, if one was given.
        skipped_steps: Steps that were not made because of a gradient that was not finite, as of the
            last refresh.
    """

    def __init__(
        self,
        partition: Partition,
        lr: float | Tensor = 0.7,
        lambda_int: float = 1.0,
        momentum: float = 0.9,
        eta_momentum: float = 0.0,
        summary_period: int = 10,
        summary_window: int = 3,
        warmup: int = 3,
        direction: Optimizer | None = None,
        curvature: tuple[LossFn, Any] | None = None,
        *,
        averaging: str = "normalized",
        summary_decay: float = 0.9,
        absolute_D3: bool = True,
        diagonal: bool = False,
        negative: str = "cut",
        eta_average: bool = False,
        ridge: float | None = None,
        max_eta: float | None = None,
        max_growth: float | None = None,
        max_step: float | None = None,
        min_decrease: float | None = None,
        keep_last_good: bool = True,
        shorten: bool = True,
        backend: str = "auto",
        microbatch: int | None = None,
        distributed: str | bool | Any = "auto",
        cuda_graph: bool = False,
        variant: Variant = "smoothed",
    ):
        model = check_partition(partition)
        check_number(0 <= float(lr) < math.inf, "lr", lr, "0 or more, finite")
        check_number(0 <= momentum < 1, "momentum", momentum, "0 or more, below 1")
        check_number(0 <= summary_decay < 1, "summary_decay", summary_decay, "0 or more, below 1")
        check_number(
            min_decrease is None or 0 <= min_decrease < 1,
            *("min_decrease", min_decrease, "0 or more, below 1"),
        )
        check_number(
            max_step is None or max_step > 0,
            *("max_step", max_step, "above 0, or None"),
        )
        if backend != "auto" and backend not in BACKENDS:
            raise ValueError(f"Unknown backend {backend!r}: write 'auto' or one of {[*BACKENDS]}.")
        check_whole("summary_period", summary_period, least=1)
        check_whole("summary_window", summary_window, least=1)
        check_whole("warmup", warmup, least=0)
        if direction is not None:
            check_direction(direction, partition)
        self.model = model
        self.partition = partition
        self.direction = direction
        self.summary_period, self.warmup = summary_period, warmup
        processes = find_processes(distributed, partition.params)
        with processes.joint():
            self._loss_fn, self._data = check_curvature(curvature)
        options = {
            "lambda_int": lambda_int,
            "eta_momentum": eta_momentum,
            "summary_period": summary_period,
            "summary_window": summary_window,
            "warmup": warmup,
            "averaging": averaging,
            "summary_decay": summary_decay,
            "absolute_D3": absolute_D3,
            "diagonal": diagonal,
            "negative": negative,
            "eta_average": eta_average,
            "ridge": ridge,
            "max_eta": max_eta,
            "max_growth": max_growth,
            "max_step": max_step,
            "min_decrease": min_decrease,
            "keep_last_good": keep_last_good,
            "shorten": shorten,
        }
        processes.agree(partition.facts() | options, {})
        several = any(
            processes.gather(curvature is not None and _has_several_batches(curvature[1]))
        )
        self.max_step = max_step if max_step is not None else MAX_STEP if several else math.inf
        self._refresh = Refresh(
            model,
            partition,
            make_average(
                *(averaging, summary_window, summary_decay, absolute_D3),
                breathes=variant == "as-run",
            ),
            RateRules(
                lambda_int=lambda_int,
                diagonal=diagonal,
                negative=negative,
                eta_momentum=eta_momentum,
                eta_average=eta_average,
                ridge=ridge if ridge is not None else RIDGE if several else 0.0,
                max_eta=max_eta,
                max_growth=max_growth,
                keep_last_good=keep_last_good,
                shorten=shorten,
            ),
            min_decrease,
            backend,
            microbatch,
            distributed,
            cuda_graph,
            self.max_step,
        )
        self.skipped_steps = 0
        self.variant = variant
        self._t = 0  # steps since the first rates, or since the start in the paper's variants
        self._next_refresh = summary_period - 1 if variant == "as-published" else 0
        self._warmed_up = 0  # summaries since the start, or since groups were added
        self._motion: Motion | None = None
        self._factors: tuple[Tensor, list[Any], Factors] | None = None
        self._made = False  # until then, add_param_group is called by torch

        options = {"lr": lr, "momentum": momentum}
        if is_divided(partition):
            everything = list(partition.params.values())
            groups = [
                {"params": everything, "name": "all groups", "eta": self._refresh.eta, **options}
            ]
        else:
            groups = partition.param_groups(eta=0.0, **options)
        super().__init__(groups, options)
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
        **options: Any,
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
        then the mean of batches is that of the data as a whole.

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
            **options: Others of the class, but for those that are additions to Algorithm 2.
        """
        additions = {
            **{"averaging": "window", "max_step": math.inf},
            **{"shorten": False, "keep_last_good": False},
        }
        if variant not in ("as-run", "as-published"):
            raise ValueError(f"variant={variant!r}: write 'as-run' or 'as-published'.")
        if variant == "as-published" and warmup:
            raise ValueError(f"warmup={warmup}: Algorithm 2 as published has no warm-up.")
        for name, value in additions.items():
            if options.get(name, value) != value:
                raise ValueError(
                    f"{name}={options[name]!r} is an addition to the paper's algorithm, which has "
                    f"{name}={value!r}. Leave it out, or use NewtonSummary(..., averaging='window')"
                    f" with the additions that you want."
                )
        return cls(
            partition,
            lr=lr,
            lambda_int=lambda_int,
            momentum=momentum,
            eta_momentum=eta_momentum,
            summary_period=summary_period,
            summary_window=summary_window,
            warmup=warmup if warmup is not None else 3 if variant == "as-run" else 0,
            curvature=curvature,
            diagonal=diagonal,
            variant=variant,
            **{"ridge": 0.0, **options, **additions},
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
        if closure is not None and self._data is not None:
            with torch.enable_grad():
                loss = closure()
        if self.variant == "as-run" and self._warmed_up <= self.warmup and not self.refresh_due:
            self._t += 1  # the direction stays as it is
            return loss
        motion = self._motions()
        motion.direct(self.param_groups[0]["momentum"])
        if self.refresh_due and bool(motion.finite) and motion.moves:  # else at the next step
            loss = self._renew_rates(motion, closure, loss)
        solution = self._refresh.solution
        if solution is not None:
            motion.move(self._scaled(motion, solution))
        if solution is not None or (self.variant != "smoothed" and not self._first_pending):
            self._t += 1
        return loss

    @property
    def _first_pending(self) -> bool:
        """Whether the first refresh is due and could not be made: the count of steps waits."""
        return self.refresh_due and self._refresh.done == 0

    @property
    def refresh_due(self) -> bool:
        """Whether the next step measures a summary, and so needs a closure if it takes one."""
        if self.variant != "smoothed":
            return self._t >= self._next_refresh
        warming_up = self._warmed_up < max(1, self.warmup)
        return warming_up or self._t >= self._next_refresh or self._refresh.solution is None

    def _renew_rates(self, motion: Motion, closure: Closure | None, loss: Any) -> Any:
        """Measure, average and solve; return the loss if a closure gave it."""
        self._tell_skipped(motion.skipped)
        missing = max(1, self.warmup) - self._warmed_up if self.variant == "smoothed" else 1
        measured = False
        for _ in range(max(1, missing) if self._data is not None else 1):
            with self._refresh.processes().joint():  # a loader that fails on one rank stops all
                loss_fn, batch = self._curvature_batch(closure)
            measured = self._refresh.measure(motion, loss_fn, batch)
            self._warmed_up += measured
        if measured and self._data is None and self._refresh.last_summary is not None:
            loss = self._refresh.last_summary.loss
        if self.variant == "smoothed":
            if self._data is None and self._warmed_up < self.warmup:
                return loss  # the closure of the next step brings the next batch
            first = 0
        else:
            first = self.summary_period - 1 if self.variant == "as-published" else 0
        done = (self._t - first) // self.summary_period + 1
        self._next_refresh = first + done * self.summary_period
        if self.variant != "smoothed" and self._warmed_up <= self.warmup:
            return loss
        if measured:
            self._refresh.solve(motion, loss_fn, batch, lambda x: self._scaled(motion, x))
            self._show(self.eta)
        return loss

    def _curvature_batch(self, closure: Closure | None) -> tuple[LossFn, Any]:
        if self._data is not None and self._loss_fn is not None:
            return self._loss_fn, self._data.next_batch()
        if closure is None:
            raise ValueError(
                "A refresh of the summary is due, and there is nothing to measure it on. Give "
                "curvature=(loss_fn, loader) to NewtonSummary, or call step(closure) with a "
                "closure that returns the loss of a curvature batch, whenever opt.refresh_due."
            )
        return as_loss_fn(closure, self.partition), None

    def _scaled(self, motion: Motion, solution: Tensor) -> Factors:
        """Return lr * solution of every group, (S,), as the motion likes it."""
        lrs = [group["lr"] for group in self.param_groups]
        on_device = any(isinstance(lr, Tensor) for lr in lrs)
        known = self._factors
        if known is None or on_device or known[0] is not solution or known[1] != lrs:
            product: Factors
            if on_device:
                factors = torch.stack([torch.as_tensor(lr, device=motion.device) for lr in lrs])
                product = factors.to(motion.dtype) * motion.put(solution)
            else:
                exact = torch.tensor(lrs, dtype=torch.float64) * solution
                product = exact.tolist() if motion.takes_numbers else motion.put(exact)
            self._factors = known = (solution, lrs, product)
        return known[2]

    def _motions(self) -> Motion:
        """Return the buffers, made at the first step: a model may move to its device until then."""
        if self._motion is None:
            params = self.partition.params.values()
            if not self._refresh.done and all(p.grad is None for p in params):
                raise ValueError(
                    "No parameter of the partition has a gradient. Call loss.backward() before "
                    "step(). Is the partition one of the model that is trained?"
                )
            lengths = self._refresh.average.lengths
            self._motion = make_motion(
                self.partition, self.direction, self.state, lengths, self.skipped_steps
            )
            if self._refresh.norms is not None:
                self._motion.hold(self._refresh.norms)
        return self._motion

    # --- telling ----------------------------------------------------------------------------------

    @property
    def last_summary(self) -> Summary | None:
        """The last summary as it was measured; None before the first."""
        return self._refresh.last_summary

    @property
    def last_rates(self) -> LearningRates | None:
        """The last solution with its status, negative rates included; None before the first."""
        return self._refresh.last_rates

    @property
    def eta(self) -> Tensor:
        """The rates in use since the last refresh, (S,); ``param_groups`` has the same numbers.

        With ``averaging="normalized"`` they are those of the step at the refresh: after it each
        group keeps its step length, so its rate falls where the norm of its direction grows.
        """
        return self._refresh.eta

    @property
    def refreshes(self) -> int:
        """How many summaries were measured."""
        return self._refresh.done

    @property
    def failed_refreshes(self) -> int:
        """How many refreshes gave no usable rates."""
        return self._refresh.failed

    def _show(self, eta: Tensor) -> None:
        """Write the rates where loggers look for them."""
        if is_divided(self.partition):
            self.param_groups[0]["eta"] = eta
            return
        for group, value in zip(self.param_groups, eta.tolist(), strict=True):
            group["eta"] = value

    def _tell_skipped(self, skipped: int) -> None:
        if skipped > self.skipped_steps:
            warnings.warn(
                f"NewtonSummary: {skipped - self.skipped_steps} step(s) since the last refresh "
                f"were not made, because the gradient was not finite. Look for a division by zero "
                f"or an overflow in the loss. (opt.skipped_steps counts them.)",
                stacklevel=5,
            )
        self.skipped_steps = skipped

    # --- more groups, checkpoints, copies ---------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters of the same model, for example of a layer that was unfrozen.

        The averages start anew: the next step begins with the warm-up's refreshes.

        Args:
            param_group: ``"params"``, ``"name"`` of the new group, and if wanted ``"lr"``.
        """
        if not self._made:
            super().add_param_group(param_group)
            return
        given = param_group["params"]
        params = [given] if isinstance(given, Tensor) else list(given)
        name = param_group.get("name", f"group{len(self.partition)}")
        partition = extended(self.partition, self.model, params, name)
        held_all = self.direction is not None and holds_all(self.direction, self.partition)
        if is_divided(partition):
            self.param_groups[0]["params"].extend(params)
        else:
            super().add_param_group({"eta": 0.0, **param_group, "params": params, "name": name})
        if held_all and self.direction is not None:
            self.direction.add_param_group({"params": params})
        self.partition = partition
        self._refresh.extend(partition)
        self._show(self.eta)
        self._warmed_up = 0
        if self._motion is not None:
            self._tell_skipped(self._motion.skipped)
        self._motion = self._factors = None

    def state_dict(self) -> dict[str, Any]:
        """Return everything that a run needs to go on, bit for bit on the CPU.

        Only plain values and tensors, so ``torch.load(weights_only=True)`` reads it.
        """
        state = super().state_dict()
        state["state"] = {
            key: {name: own_memory(value) for name, value in values.items()}
            for key, values in state["state"].items()
        }
        state["newton_summary"] = {
            "groups": list(self.partition.names),
            "t": self._t,
            "next_refresh": self._next_refresh,
            "warmed_up": self._warmed_up,
            "skipped": self.skipped_steps,
            "skipped_since": 0
            if self._motion is None
            else self._motion.skipped - self.skipped_steps,
            "refresh": self._refresh.state_dict(),
            "direction": None if self.direction is None else self.direction.state_dict(),
            "data": None if self._data is None else self._data.state_dict(),
        }
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the state of another run of the same model and groups.

        What was given to the constructor holds, but for ``lr`` and ``momentum``, which schedulers
        may have changed: these come from the checkpoint.
        """
        saved = state_dict.get("newton_summary")
        if saved is None:
            raise ValueError("This is no state of NewtonSummary, but of another optimizer.")
        # Loaders and frameworks may have moved everything to the parameters' device.
        saved = tree_map(lambda x: x.cpu() if isinstance(x, Tensor) else x, saved)
        self._check_same(saved)
        super().load_state_dict({k: state_dict[k] for k in ("state", "param_groups")})
        self._t, self._next_refresh = saved["t"], saved["next_refresh"]
        self._warmed_up, self.skipped_steps = saved["warmed_up"], saved["skipped"]
        self._refresh.load_state_dict(saved["refresh"])
        if self.direction is not None:
            self.direction.load_state_dict(saved["direction"])
        if self._data is not None:
            self._data.load_state_dict(saved["data"])
        self._motion = self._factors = None  # made anew from the momentum buffers
        if saved["skipped_since"]:
            self._motions().asked += saved["skipped_since"]

    def _check_same(self, saved: dict[str, Any]) -> None:
        if saved["groups"] != list(self.partition.names):
            raise ValueError(
                f"The checkpoint has the groups {_first_names(saved['groups'])}, and this "
                f"optimizer {_first_names(self.partition.names)}. Make the same partition."
            )
        for part, mine, written in (
            ("direction", self.direction, "direction=..."),
            ("data", self._data, "curvature=(loss_fn, loader)"),
        ):
            if (saved[part] is None) != (mine is None):
                how = ("without", "with") if mine is None else ("with", "without")
                raise ValueError(
                    f"This optimizer was made {how[0]} {written}, and that of the checkpoint "
                    f"{how[1]}. Make it in the same way."
                )

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy needs: buffers are made anew, a scheduler's wrapper stays behind."""
        state = {k: v for k, v in self.__dict__.items() if k != "step"}
        return state | {"_motion": None, "_factors": None}


def _first_names(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:5])) + (", ..." if len(names) > 5 else "")


def _has_several_batches(loader: Any) -> bool:
    """Whether curvature batches differ; a loader that does not tell its length has many."""
    return not hasattr(loader, "__len__") or len(loader) > 1
