"""The controller inside NewtonSummary: Adam's step is the direction, and eta its steered length.

At a constant rate the parameters wander around what they would reach if the rate fell; their mean
over the last part of training is closer to it. After k of its updates the mean gives the newest
parameters the weight (TAIL + 1) / (k + TAIL), so that it is of about the last 1 / TAIL of all steps
(Shamir and Zhang, 2013), however many there will be. Below the peak of a schedule, whose end does
the same, newer parameters count more; where the rate is zero, they alone do.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import AdamW, Optimizer

from newton_summary.errors import NotFiniteError
from newton_summary.optimizer.adam import SECOND_BETA, FusedAdam
from newton_summary.optimizer.controller import RateController
from newton_summary.optimizer.curvature import Curvature
from newton_summary.optimizer.update import unfit
from newton_summary.parallel.processes import local_part
from newton_summary.partition import Partition, inner_of_all
from newton_summary.probe.inputs import LossFn
from newton_summary.summary import Summary

BEGIN = 1e-3  # eta of Adam's step before the start has found one
REFRESH_PERIOD = 15  # steps from one refresh to the next, if the budget allows it
OVERHEAD = 1.5  # of a summary, over what its arithmetic takes
EVERY = 5  # steps from one update of the mean to the next
TAIL = 30.0  # of the mean
AVERAGE = "average"  # in the state of a parameter
SURE = 3  # measurements whose gradient equalled that of training, before this is assumed
VERIFY = 8  # and every n-th measurement checks again


def period_within(budget: float, groups: int, order: int) -> int:
    """Return how often to measure, so that refreshes take at most a share of the time.

    In gradients of a batch of the training's size a refresh takes two for one group, and (S / 2 +
    4) / 3 or, with third derivatives, (S + 4) / 3 for a summary of S. This is counted, not timed,
    so that the same training always measures at the same steps.

    >>> period_within(0.25, groups=1, order=2), period_within(0.25, groups=42, order=3)
    (15, 69)
    """
    gradients = 2.0
    if groups > 1 or order > 2:
        gradients = OVERHEAD * ((groups if order > 2 else groups / 2) + 4) / 3
    return max(REFRESH_PERIOD, math.ceil(gradients * (1 / budget - 1)))


class Steered(RateController):
    """A RateController with its own optimizer, whose steps it calls rather than hooks.

    Args:
        partition: The groups, and with them the model.
        groups: NewtonSummary's ``param_groups``, which schedulers change.
        given: The optimizer to steer; Adam if there is none.
        curvature: Measures summaries.
        state: Where Adam keeps its state, and each parameter its mean.
        period: Steps from one refresh to the next.
        set_point: Where to keep the factor.
        memory: How much of the running means a refresh keeps.

    Attributes:
        summary: The last one, along the direction for an eta of 1.
    """

    def __init__(
        self,
        partition: Partition,
        groups: list[dict[str, Any]],
        given: Optimizer | None,
        curvature: Curvature,
        state: Any,
        period: int,
        set_point: float,
        memory: float,
    ):
        assert partition.model is not None
        self.partition, self.groups, self.given = partition, groups, given
        self.curvature = curvature
        params = list(partition.params.values())
        optimizer = given or AdamW(params, lr=1.0, weight_decay=0.0, fused=_fusable(params))
        self._base = [float(group["lr"]) for group in optimizer.param_groups]
        super().__init__(
            optimizer,
            partition.model,
            _not_yet,
            period=period,
            set_point=set_point,
            memory=memory,
            distributed=curvature.distributed,
        )
        self._shapes = [p.shape for p in self._held.values()]
        if given is None:
            self.multiplier = BEGIN
        self.share(state, skipped=0)
        self.summary: Summary | None = None

    def _attach(self) -> None:
        """Leave the optimizer as it is: :meth:`advance` calls what the hooks would."""

    def _include_thawed(self) -> None:
        """Leave it to ``NewtonSummary.add_param_group``: the groups are the user's."""

    def share(self, state: Any, skipped: int) -> None:
        """Keep Adam's state, and the mean of the parameters, where NewtonSummary saves them.

        Args:
            state: By parameter.
            skipped: Steps skipped so far.
        """
        self._state, self._skipped = state, skipped
        self._adam: FusedAdam | None = None  # made at the first step: a model may move until then
        if self.given is None:
            self.optimizer.state = state
            for p, values in state.items():
                if "step" in values and _fusable([p]):  # loaded to the CPU, it would stay there
                    values["step"] = values["step"].to(p.device)

    @property
    def due(self) -> bool:
        """Whether the next step needs a batch to measure."""
        return not self._started or self._before is not None

    @property
    def eta(self) -> float:
        """What the direction is multiplied by, except for ``lr``; 0 before the start."""
        lr = max(float(group["lr"]) for group in self.groups)
        lifted = max(map(float, self._lrs_from_peak())) / lr if lr else 1.0
        return self.multiplier * lifted if self._started else 0.0

    def go_on_from(self, other: Steered) -> None:
        """Adopt the rate of a controller of fewer parameters, and measure the next step."""
        names = ("multiplier", "history", "steps", "_balance", "_envelope", "_started")
        self.__dict__ |= {n: getattr(other, n) for n in (*names, "_highest", "_rises")}
        self._first_lrs[: len(other._first_lrs)] = other._first_lrs
        self._base[: len(other._base)] = other._base  # the direction's own have been multiplied
        self._skipped, self._due = other.skipped, other.steps + 1

    def measure(self, loss_fn: LossFn, batch: Any) -> None:
        """Measure the last step on a batch, and steer; or use the batch for the first step."""
        self.loss_fn = loss_fn
        self.before_step(batch)

    def advance(self) -> None:
        """Take one step of the optimizer, with the rates lr * eta."""
        self._note_schedule()
        if self._adam is None and self.given is None and FusedAdam.can_move(self._held):
            self._adam = FusedAdam(self._held, self._state)
        self._check_gradients()
        if self._adam is not None:
            self._step_of_adam(self._adam)
        else:
            self._step_of_others()
        before = self._before
        if self._started or before is None:
            self._after_hook()
        else:
            try:
                self._after_hook()
            except BaseException:  # the loss failed while the first step was measured
                self._place(before)
                raise
        if self.steps % EVERY == 0:
            update_average(self._held.values(), self._state, self.steps, self._level())

    def _step_of_adam(self, adam: FusedAdam) -> None:
        """Take a step of Adam, without waiting for an accelerator."""
        rates = self.rates
        self._follow(max(rates))
        adam.step(self.groups, rates)
        if adam.found.device.type == "cpu" and adam.found.item():
            self._ends.before = None

    def _step_of_others(self) -> None:
        """Take a step of the given optimizer, or of Adam where there is no such kernel."""
        self._set_groups()
        finite = self._gradients_are_finite()
        self._before_hook()
        if finite:
            self._let_step()
        else:
            self._ends.before = None
            self._skipped += 1

    @property
    def skipped(self) -> int:
        """How many steps were not made because of a gradient that was not finite (waits)."""
        return self._skipped + (0 if self._adam is None else self._adam.skipped)

    def _set_groups(self) -> None:
        """Give the optimizer the present lr, momentum and weight decay of the groups."""
        if self.given is not None:
            for base, group in zip(self._base, self.given.param_groups, strict=True):
                group["lr"] = base * float(self.groups[0]["lr"])
            return
        self.optimizer.param_groups = [
            self.optimizer.defaults
            | {"params": [p for p in group["params"] if p.requires_grad], "lr": float(group["lr"])}
            | {"betas": (group["momentum"], SECOND_BETA), "weight_decay": group["weight_decay"]}
            for group in self.groups
        ]

    def _own_lrs(self) -> list[Any]:
        lrs = self._lrs_from_peak()
        return lrs if self.given is None else [base * float(lrs[0]) for base in self._base]

    def _check_gradients(self) -> None:
        """Raise if a gradient is not one of its parameter."""
        for (name, p), shape in zip(self._held.items(), self._shapes):
            grad = p.grad
            if grad is not None and (grad.layout is not torch.strided or grad.shape != shape):
                raise ValueError(unfit(name, shape, grad))

    def _gradients_are_finite(self) -> bool:
        moving = (p for p in self._held.values() if p.requires_grad and p.grad is not None)
        grads = [local_part(p.grad) for p in moving]  # type: ignore[arg-type]
        if not grads:
            return True
        dtype = torch.float64 if any(x.dtype == torch.float64 for x in grads) else torch.float32
        norms = torch._foreach_norm(grads, 2, dtype)
        total = torch.stack([x.to(norms[0].device) for x in norms]).sum()
        if self._sharded:
            dist.all_reduce(total)
        return bool(total.isfinite())

    def _along(
        self, batch: Any, before: list[Tensor], u: dict[str, Tensor]
    ) -> tuple[float, float, float]:
        """Return loss, slope and curvature: of one group from two gradients, else exact ones."""
        lambda_int, diagonal = self.groups[0]["lambda_int"], self.groups[0]["diagonal"]
        if len(self.partition) == 1 and lambda_int == 0:
            loss, slope, curvature = self._along_one(batch, before, u)
            values = ([slope], [[curvature]], loss)
            gbar, Hbar, value = (torch.tensor(x, dtype=torch.float64) for x in values)
            how: Any = {"backend": "differences", "approximate": True}
            self._keep(Summary(gbar, Hbar, loss=value, partition=self.partition, **how))
            return loss, slope, curvature
        try:
            with self._moved_to(before):
                order = 3 if lambda_int > 0 else 2
                data = (self.loss_fn, batch)
                own = self.curvature.measure(self.partition, u, order, lambda: data)
                found = self.curvature.mean(own, u)
        except NotFiniteError as error:
            self.reason = str(error)
            return math.inf, math.nan, math.nan
        self._keep(found)
        H = found.hessian()
        lost = H.diagonal().sum() if diagonal else H.sum()
        return float(found.loss), float(found.gbar.sum()), float(lost)

    def _along_one(
        self, batch: Any, before: list[Tensor], u: dict[str, Tensor]
    ) -> tuple[float, float, float]:
        """Return the same; the gradient at the end is that of training, if it has been so far."""
        known = self._ends.agreed >= SURE and not self._sharded
        if not known or len(self.history) % VERIFY == 0:
            return super()._along(batch, before, u)
        moving = [(u[name], p.grad) for name, p in self._held.items() if p.grad is not None]
        slope_after = inner_of_all((d for d, _ in moving), (grad for _, grad in moving))
        self._ends.before = None  # taken already
        ((loss, slope),) = self._slopes(batch, u, before)
        return loss, slope, slope - float(slope_after)

    def _keep(self, found: Summary) -> None:
        """Keep a summary along the step as one along the direction, for an eta of 1."""
        lrs = torch.tensor([float(group["lr"]) for group in self.groups], dtype=torch.float64)
        shares = lrs / lrs.max() if lrs.any() else torch.ones_like(lrs)
        r = self._rate / max(self._base) * shares
        r = r.expand(len(self.partition)) if len(lrs) == 1 else r
        a = torch.where(r > 0, 1 / r, 0.0)
        found = found.to("cpu").to(torch.float64)
        D3 = None if found.D3 is None else found.D3 * a**3
        H = found.hessian() * a * a[:, None]
        self.summary = replace(found, gbar=found.gbar * a, Hbar=H, D3=D3)

    @property
    def _measurable(self) -> bool:
        return self._started or self._batch is not None

    def _start(self, batch: Any, before: list[Tensor]) -> None:
        super()._start(batch, before)
        if self._started and self.history[-1].slope == 0:
            raise ValueError(
                "The loss of the batch does not depend on the parameters that move. Is the "
                "partition of the model being trained, and does loss_fn use the model it is given?"
            )

    @property
    def _scheduled(self) -> list[dict[str, Any]]:
        return self.groups

    def _level(self) -> float:
        """Return how high the schedule is, as a fraction of its peak; 1 until it comes to that."""
        if self._rises or not self._highest:
            return 1.0
        return max(float(group["lr"]) for group in self.groups) / self._highest

    def _peak_lr(self) -> float:
        return max(self._base) * super()._peak_lr()


def update_average(params: Iterable[Tensor], state: Any, steps: int, level: float) -> None:
    """Add the present parameters to the mean.

    Args:
        params: Those that move; others, and those in half precision, have no mean.
        state: Of the optimizer, by parameter.
        steps: Steps taken so far.
        level: The learning rate, as a fraction of its peak.
    """
    moving = [p for p in params if p.requires_grad and p.grad is not None and p.itemsize >= 4]
    old = [p for p in moving if AVERAGE in state[p]]
    for p in moving:
        if AVERAGE not in state[p]:
            state[p][AVERAGE] = p.detach().clone()
    k = steps // EVERY
    weight = 1 - min(level, 1.0) * (1 - (TAIL + 1) / (k + TAIL))
    if old:
        means = [local_part(state[p][AVERAGE]) for p in old]
        torch._foreach_lerp_(means, [local_part(p.detach()) for p in old], weight)


def swap_average(params: Iterable[Tensor], state: Any) -> None:
    """Exchange parameters and their means."""
    for p in params:
        if AVERAGE in state.get(p, {}):
            here, mean = local_part(p.detach()), local_part(state[p][AVERAGE])
            kept = here.clone()
            here.copy_(mean)
            mean.copy_(kept)


def _not_yet(model: Any, batch: Any) -> Tensor:
    raise AssertionError("A loss comes with each measurement.")


def _fusable(params: list[Tensor]) -> bool:
    kinds = ("cpu", "cuda", "mps", "xpu")
    return all(p.is_floating_point() and p.device.type in kinds for p in params)
