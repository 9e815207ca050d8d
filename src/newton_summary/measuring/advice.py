"""Learning rates for somebody else's optimizer: by how much each of its groups should step more."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from newton_summary.display.table import ShownAsTable
from newton_summary.measuring.measurement import find_partition, summarize
from newton_summary.parallel.agreement import live_values
from newton_summary.parallel.ranks import agree, find_ranks, together
from newton_summary.partition import Params, Partition, Spec, unwrap
from newton_summary.probe.directions import find_direction
from newton_summary.probe.probe import LossFn, Probe
from newton_summary.probe.undo import Journal
from newton_summary.solver import LearningRates, check_strength, learning_rates
from newton_summary.summary import Summary

VERDICTS = {
    "raise": "the loss would fall more with a larger rate",
    "lower": "the loss would fall more with a smaller rate",
    "keep": "the present rate is within the error, or within a quarter, of the best one",
    "noise": "the error is so large that not even the sign is sure: measure on more data",
    "unknown": "the model of the loss has no minimum, see below",
    "no effect": "the loss does not depend on this group, such as a bias before a batch norm",
    "no step": "the optimizer does not move this group (its lr or its gradient is zero)",
}
"""What each verdict means."""


@dataclass(frozen=True)
class GroupAdvice:
    """What the measurement says about one group."""

    name: str
    lrs: tuple[float, ...]  # present, of the optimizer's groups that this one touches
    factor: float  # the curvature's optimum, as a multiple of the present step
    stderr: float | None  # of the factor, over batches; None if there was one batch
    change: float  # what apply() multiplies the learning rate with
    verdict: str  # a key of VERDICTS

    @property
    def suggested(self) -> tuple[float, ...]:
        """The learning rates after :meth:`Advice.apply`."""
        return tuple(lr * self.change for lr in self.lrs)


class Advice(ShownAsTable):
    """Factors on the learning rates of an optimizer, made by :func:`suggest_lrs`.

    ``print(advice)`` shows a table, ``advice.apply()`` changes the optimizer.

    Attributes:
        groups: One :class:`GroupAdvice` for each group.
        summary: The measurement, with its errors.
        rates: The solution; its ``eta`` are the factors.
    """

    _numbers = range(1, 5)

    def __init__(
        self,
        groups: Sequence[GroupAdvice],
        summary: Summary,
        rates: LearningRates,
        optimizer: Optimizer,
        partition: Partition,
    ):
        self.groups, self.summary, self.rates = tuple(groups), summary, rates
        self._optimizer, self._partition = optimizer, partition
        self._applied = False

    def __getitem__(self, name: str) -> GroupAdvice:
        """Return what is said about the group called ``name``."""
        return self.groups[self._partition.index(name)]

    def __repr__(self) -> str:
        """Return in a line how many groups there are, and how often each verdict."""
        verdicts = [group.verdict for group in self.groups]
        counts = ", ".join(f"{verdicts.count(v)} {v}" for v in VERDICTS if v in verdicts)
        return f"Advice({len(verdicts)} groups: {counts})"

    def _rows(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = [("group", "lr", "factor", "±", "suggested", "verdict")]
        for group in self.groups:
            error = "" if group.stderr is None else f"{group.stderr:.2g}"
            lrs, suggested = (_numbers(values) for values in (group.lrs, group.suggested))
            rows.append((group.name, lrs, f"{group.factor:.3g}", error, suggested, group.verdict))
        return rows

    def _said(self) -> str:
        ones = torch.ones_like(self.summary.gbar)
        changes = ones.new_tensor([group.change for group in self.groups])
        now, then = (float(self.summary.predicted_change(x)) for x in (ones, changes))
        lines = [
            f"predicted change of the loss ({float(self.summary.loss):.4g}) by one step: "
            f"{now:+.3g} now, {then:+.3g} as suggested",
            *(f"{v}: {VERDICTS[v]}" for v in VERDICTS if any(g.verdict == v for g in self.groups)),
        ]
        if not self.rates.ok:
            lines.append(f"{self.rates.status}: {self.rates.detail}")
        if self.rates.doubt:
            lines.append(
                f"With all factors in full one step would promise "
                f"{self.rates.model_change:+.3g}, more than the whole loss: the model does not "
                f"hold that far. A larger lambda_int gives smaller factors; "
                f"suggest_lambda_int(model, loss_fn, data, advice.summary, direction=optimizer) "
                f"finds one."
            )
        return "\n".join(lines)

    def apply(self) -> None:
        """Set the optimizer's learning rates to those suggested.

        Where a group of the optimizer lies in several groups of the partition, it is split: the
        new ones have the same options, and the state of the parameters is kept. Schedulers remember
        the learning rates and the number of the groups, so make them after this.

        Raises:
            ValueError: If tensors are divided among groups, which torch's optimizers cannot do.
            RuntimeError: If this was called before.
        """
        if self._applied:
            raise RuntimeError("This advice has been applied. Ask for it again after training on.")
        labels = _whole_labels(self._partition)
        groups: list[dict[str, Any]] = []
        for group in self._optimizer.param_groups:
            found = {labels[id(p)]: None for p in group["params"] if id(p) in labels}
            if len(found) <= 1:
                groups.append(group)
                _multiply(group, self.groups[next(iter(found))].change if found else 1.0)
                continue
            groups += [self._part(group, s, labels) for s in found]
            if any(id(p) not in labels for p in group["params"]):
                groups.append(self._part(group, None, labels))
        self._optimizer.param_groups[:] = groups
        self._applied = True

    def _part(self, group: dict[str, Any], s: int | None, labels: dict[int, int]) -> dict[str, Any]:
        """Return the part of a parameter group in group ``s``; None for what is in none."""
        kept = [i for i, p in enumerate(group["params"]) if labels.get(id(p)) == s]
        part = dict(group)
        for key in ("params", "param_names"):  # the names where torch was given some
            if key in group:
                part[key] = [group[key][i] for i in kept]
        for key in ("lr", "initial_lr"):
            if isinstance(part.get(key), Tensor):
                part[key] = part[key].clone()
        own = "rest" if s is None else self.groups[s].name
        part["name"] = f"{group['name']}.{own}" if "name" in group else own
        _multiply(part, 1.0 if s is None else self.groups[s].change)
        return part


def suggest_lrs(
    model: nn.Module,
    loss_fn: LossFn,
    data: Any,
    optimizer: Optimizer,
    partition: Partition | Spec | None = None,
    lambda_int: float = 1.0,
    *,
    direction_data: Any = None,
    fraction: float = 1.0,
    max_change: float = 10.0,
    diagonal: bool = False,
    backend: str = "auto",
    microbatch: int | None = None,
    progress: bool = False,
    distributed: str | bool | Any = "auto",
) -> Advice:
    """Tell by which factor each group of an optimizer should change its learning rate.

    The optimizer's next step is the direction, so a factor of 1 says that the present learning rate
    is the best one for that step, by the curvature of the loss and with the interactions between
    groups. Model and optimizer stay as they are until ``apply()``. Costs one step of the optimizer
    on a copy of its state, and one summary for each batch.

    What is best for one step is more than what is best for many small noisy ones: with gradients
    of small batches, take a ``fraction`` such as 0.3.

    Args:
        model: Any module.
        loss_fn: ``loss_fn(model, batch)`` returns the mean loss of a batch.
        data: Batches to measure on; two or more of them tell the error.
        optimizer: Any torch optimizer of this model, in its present state. Parameters that it does
            not hold are left out.
        partition: The groups; by default those of the optimizer. ``"canonical"`` tells about every
            tensor, and ``apply()`` then gives each its own learning rate.
        lambda_int: Strength of the cubic term.
        direction_data: The data whose gradient the optimizer steps along; ``data`` if not given. A
            batch of its own makes the factors those of real training steps: along the gradient of
            the data itself the loss seems to fall faster than it will.
        fraction: How much of the optimum to suggest.
        max_change: At most this factor up or down is suggested at a time.
        diagonal: Leave out the interactions between groups.
        backend: As for :func:`summarize`.
        microbatch: As for :func:`summarize`.
        progress: As for :func:`summarize`.
        distributed: As for :func:`summarize`.

    Returns:
        The advice.

    >>> _ = torch.manual_seed(0)
    >>> model = nn.Linear(3, 1)
    >>> x, y = torch.randn(64, 3), torch.randn(64, 1)
    >>> def loss_fn(model, batch):
    ...     return (model(batch[0]) - batch[1]).square().mean()
    >>> adam = torch.optim.Adam(model.parameters(), lr=1e-6)
    >>> batches = [(x[:32], y[:32]), (x[32:], y[32:])]
    >>> advice = suggest_lrs(model, loss_fn, batches, adam, lambda_int=0.0)
    >>> advice["group0"].verdict
    'raise'
    >>> advice.apply()
    >>> f"{adam.param_groups[0]['lr']:.0e}"
    '1e-05'
    """
    for name, value, low, high in (
        ("fraction", fraction, 0, 1),
        ("max_change", max_change, 1, sys.float_info.max),
    ):
        if not isinstance(value, int | float) or not low < value <= high:
            raise ValueError(f"{name}={value!r}: fraction is in (0, 1], max_change above 1.")
    lambda_int = check_strength(lambda_int)
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"The optimizer is of type {type(optimizer).__name__}: give the torch optimizer that "
            f"trains the model, suggest_lrs(model, loss_fn, data, optimizer)."
        )
    data = list(data) if isinstance(data, Iterable) and iter(data) is data else data
    with Journal() as thaw:
        _leave_out_others(model, optimizer, partition, thaw)
        part = (
            _own_groups(model, optimizer) if partition is None else find_partition(model, partition)
        )
        source = data if direction_data is None else direction_data
        ranks = find_ranks(distributed, part.params)
        with together(ranks):
            agree(ranks, [1], part, live_values(part, None), optimizer=type(optimizer).__name__)
        with together(ranks), Probe(model, loss_fn, source, part, microbatch, ranks) as probe:
            u = find_direction(optimizer, probe)
        summary = summarize(
            model,
            loss_fn,
            data,
            partition=part,
            direction=u,
            order=3 if lambda_int > 0 else 2,
            backend=backend,
            microbatch=microbatch,
            progress=progress,
            stderr=True,
            distributed=distributed,
        )
    rates = learning_rates(summary, lambda_int, diagonal=diagonal)
    return Advice(
        _judge(rates, summary, part, u, optimizer, fraction, max_change),
        summary,
        rates,
        optimizer,
        part,
    )


def _leave_out_others(
    model: nn.Module, optimizer: Optimizer, partition: Any, thaw: Journal
) -> None:
    """Freeze the parameters that the optimizer does not hold, until the end of ``thaw``."""
    wanted = partition.params.values() if isinstance(partition, Partition) else ()
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    params = dict(unwrap(model).named_parameters())
    strange = held - {id(p) for p in params.values()}
    if strange:
        raise ValueError(
            f"The optimizer holds {len(strange)} tensors that are no parameters of the model: it "
            f"belongs to another model."
        )
    for p in params.values():
        if p.requires_grad and id(p) not in held and not any(p is q for q in wanted):
            thaw.undo_later(partial(p.requires_grad_, True))
            p.requires_grad_(False)


def _own_groups(model: nn.Module, optimizer: Optimizer) -> Partition:
    """Return the optimizer's own groups as a partition."""
    names = {id(p): name for name, p in unwrap(model).named_parameters()}
    groups: dict[str, list[str]] = {}
    for i, group in enumerate(optimizer.param_groups):
        members = [names[id(p)] for p in group["params"] if p.requires_grad]
        if members:
            name = str(group.get("name", f"group{i}"))
            groups[name if name not in groups else f"{name} ({i})"] = members
    return find_partition(model, groups)


def _judge(
    rates: LearningRates,
    summary: Summary,
    partition: Partition,
    u: Params,
    optimizer: Optimizer,
    fraction: float,
    max_change: float,
) -> list[GroupAdvice]:
    factors = rates.eta.double().cpu().tolist()
    errors = None if rates.eta_stderr is None else rates.eta_stderr.double().cpu().tolist()
    moved = (partition.inner(u, u) > 0).tolist()
    unfelt = (summary.dead & (summary.gbar.cpu() == 0)).tolist()
    judged = []
    for s, name in enumerate(partition.names):
        error = None if errors is None else errors[s]
        verdict = _verdict(factors[s], error) if rates.ok else "unknown"
        verdict = "no effect" if unfelt[s] else verdict
        verdict = verdict if moved[s] else "no step"
        change = 1.0
        if verdict in ("raise", "lower"):
            change = min(max(fraction * factors[s], 1 / max_change), max_change)
        lrs = _lrs(optimizer, [partition.params[m.name] for m in partition.members[s]])
        judged.append(GroupAdvice(name, lrs, factors[s], error, change, verdict))
    return judged


def _verdict(factor: float, error: float | None) -> str:
    """Judge a factor, with two standard errors on either side."""
    margin = 0.0 if error is None else 2 * error
    if not math.isfinite(factor) or not math.isfinite(margin) or abs(factor) < margin:
        return "noise"
    if abs(factor - 1) <= max(margin, 0.25):
        return "keep"
    return "raise" if factor > 1 else "lower"


def _lrs(optimizer: Optimizer, params: Sequence[Tensor]) -> tuple[float, ...]:
    """Return the learning rates of the optimizer's groups that hold these parameters."""
    wanted = {id(p) for p in params}
    touched = [g for g in optimizer.param_groups if any(id(p) in wanted for p in g["params"])]
    return tuple(dict.fromkeys(float(group["lr"]) for group in touched))


def _whole_labels(partition: Partition) -> dict[int, int]:
    labels: dict[int, int] = {}
    for name, label in partition.labels.items():
        if not isinstance(label, int):
            raise ValueError(
                f"Parameter {name!r} is divided among groups, and torch's optimizers have one "
                f"learning rate for each parameter. Use a partition of whole tensors."
            )
        labels[id(partition.params[name])] = label
    return labels


def _multiply(group: dict[str, Any], factor: float) -> None:
    for key in ("lr", "initial_lr"):  # the second is what a scheduler starts from
        if isinstance(group.get(key), Tensor):
            group[key].mul_(factor)
        elif key in group:
            group[key] *= factor


def _numbers(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.3g}" for value in values)
