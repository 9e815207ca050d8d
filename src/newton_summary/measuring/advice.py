"""Learning rates for any optimizer: the factor by which each of its groups should change."""

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

from newton_summary.derivatives import Backend
from newton_summary.display.table import ShownAsTable
from newton_summary.measuring.measurement import agree, find_partition, open_probe, summarize
from newton_summary.parallel.processes import Distributed, find_processes
from newton_summary.partition import Params, Partition, Spec, unwrap
from newton_summary.probe.directions import find_direction
from newton_summary.probe.inputs import NumSamples
from newton_summary.probe.probe import LossFn
from newton_summary.probe.undo import Journal
from newton_summary.solver import LearningRates, check_strength, learning_rates
from newton_summary.summary import Summary

VERDICTS = {
    "raise": "the loss would fall more with a larger rate",
    "lower": "the loss would fall more with a smaller rate",
    "keep": "the present rate is within the error, or within a quarter, of the best one",
    "noise": "the error is so large that even the sign is uncertain: measure on more data",
    "unknown": "the model of the loss has no minimum, see below",
    "no effect": "the loss does not depend on this group, such as a bias before a batch norm",
    "no step": "the optimizer does not move this group (its lr or its gradient is zero)",
}
"""What each verdict means."""


@dataclass(frozen=True)
class GroupAdvice:
    """The advice for one group.

    >>> GroupAdvice("fc.weight", (0.1,), 3.2, 0.4, change=3.2, verdict="raise").suggested
    (0.32000000000000006,)
    """

    name: str
    lrs: tuple[float, ...]  # present learning rates of its parameters
    factor: float  # the best step, as a multiple of the present one
    stderr: float | None  # standard error of the factor over batches; None with one batch
    change: float  # the factor that apply() takes
    verdict: str  # a key of VERDICTS

    @property
    def suggested(self) -> tuple[float, ...]:
        """The learning rates after :meth:`Advice.apply`."""
        return tuple(lr * self.change for lr in self.lrs)


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
        summary: The measurement, with its errors.
        rates: The solution; its ``eta`` are the factors.
    """

    _right = range(1, 5)

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
        """Return the advice for the group called ``name``."""
        return self.groups[self._partition.index(name)]

    def __repr__(self) -> str:
        """Return the number of groups, and how often each verdict occurs."""
        verdicts = [group.verdict for group in self.groups]
        counts = ", ".join(f"{verdicts.count(v)} {v}" for v in VERDICTS if v in verdicts)
        return f"Advice({len(verdicts)} group{'' if len(verdicts) == 1 else 's'}: {counts})"

    def _rows(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = [("group", "lr", "factor", "±", "suggested", "verdict")]
        for group in self.groups:
            error = "" if group.stderr is None else f"{group.stderr:.2g}"
            lrs, suggested = (_listed(values) for values in (group.lrs, group.suggested))
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
                f"A step with all of the factors promises {self.rates.model_change:+.3g}, more "
                f"than the whole loss: the model does not hold that far. A larger lambda_int gives "
                f"smaller factors; find one with suggest_lambda_int(model, loss_fn, data, "
                f"advice.summary, direction=optimizer)."
            )
        return "\n".join(lines)

    def apply(self) -> None:
        """Set the optimizer's learning rates to the suggested ones.

        A parameter group that lies in several groups of the partition is split; the parts keep its
        options and the state of the parameters. Schedulers remember the learning rates and the
        number of groups, so create them after this.

        Raises:
            ValueError: If tensors are divided among groups, which torch's optimizers cannot do.
            RuntimeError: If this was called before.
        """
        if self._applied:
            raise RuntimeError("This advice has been applied already. Measure again for more.")
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
        """Return the part of a parameter group in group ``s``; None for the rest."""
        kept = [i for i, p in enumerate(group["params"]) if labels.get(id(p)) == s]
        part = dict(group)
        for key in ("params", "param_names"):  # names, if torch was given some
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
    backend: Backend = "auto",
    microbatch: int | None = None,
    num_samples: NumSamples | None = None,
    progress: bool = False,
    distributed: Distributed = "auto",
) -> Advice:
    """Suggest a factor for the learning rate of each group of an optimizer.

    The direction is the optimizer's next step, so a factor of 1 means that the present learning
    rate is the best one for that step, given the curvature of the loss and the interactions between
    groups. Model and optimizer do not change until ``apply()``. Takes one step of the optimizer on
    a copy of its state, and one summary for each batch.

    The best step is too long for many small noisy ones: with gradients of small batches, use a
    ``fraction`` such as 0.3.

    Args:
        model: Any module.
        loss_fn: ``loss_fn(model, batch)`` returns the mean loss of a batch.
        data: Batches to measure on; with two or more there are error bars.
        optimizer: Any torch optimizer of this model, in its present state. Parameters that it does
            not hold are left out.
        partition: The groups; by default those of the optimizer. With ``"canonical"`` or
            ``"layers"``, ``apply()`` gives each tensor or layer its own learning rate.
        lambda_int: Strength of the cubic term.
        direction_data: The data whose gradient the optimizer follows; by default ``data``. A
            separate batch makes the factors those of real training steps: along the gradient of
            the data itself the loss seems to fall faster than it will.
        fraction: The part of the best change to suggest.
        max_change: The largest factor to suggest, up or down.
        diagonal: Leave out the interactions between groups.
        backend: As for :func:`summarize`.
        microbatch: As for :func:`summarize`.
        num_samples: As for :func:`summarize`.
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
            f"The optimizer is of type {type(optimizer).__name__}: pass the torch optimizer that "
            f"trains the model, suggest_lrs(model, loss_fn, data, optimizer)."
        )
    data = list(data) if isinstance(data, Iterable) and iter(data) is data else data
    with Journal() as thaw:
        _leave_out_others(model, optimizer, partition, thaw)
        part = (
            _own_groups(model, optimizer) if partition is None else find_partition(model, partition)
        )
        source = data if direction_data is None else direction_data
        processes = find_processes(distributed, part.params)
        with processes.joint():
            probe = open_probe(model, loss_fn, source, part, microbatch, processes, num_samples)
        agree(processes, part, optimizer)
        with probe:
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
            num_samples=num_samples,
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
    kept = partition.params.values() if isinstance(partition, Partition) else ()
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    params = dict(unwrap(model).named_parameters())
    strange = held - {id(p) for p in params.values()}
    if strange:
        raise ValueError(
            f"The optimizer holds {len(strange)} tensors that are not parameters of the model: it "
            f"belongs to another model."
        )
    for p in params.values():
        if p.requires_grad and id(p) not in held and not any(p is q for q in kept):
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
    no_effect = (summary.dead & (summary.gbar.cpu() == 0)).tolist()
    judged = []
    for s, name in enumerate(partition.names):
        error = None if errors is None else errors[s]
        verdict = _verdict(factors[s], error) if rates.ok else "unknown"
        verdict = "no effect" if no_effect[s] else verdict
        verdict = verdict if moved[s] else "no step"
        change = 1.0
        if verdict in ("raise", "lower"):
            change = min(max(fraction * factors[s], 1 / max_change), max_change)
        lrs = _lrs(optimizer, [partition.params[m.name] for m in partition.members[s]])
        judged.append(GroupAdvice(name, lrs, factors[s], error, change, verdict))
    return judged


def _verdict(factor: float, error: float | None) -> str:
    """Return the verdict on a factor, with two standard errors on either side."""
    margin = 0.0 if error is None else 2 * error
    if not math.isfinite(factor) or not math.isfinite(margin) or abs(factor) < margin:
        return "noise"
    if abs(factor - 1) <= max(margin, 0.25):
        return "keep"
    return "raise" if factor > 1 else "lower"


def _lrs(optimizer: Optimizer, params: Sequence[Tensor]) -> tuple[float, ...]:
    """Return the learning rates of the optimizer's groups that hold these parameters."""
    ids = {id(p) for p in params}
    touched = [g for g in optimizer.param_groups if any(id(p) in ids for p in g["params"])]
    return tuple(dict.fromkeys(float(group["lr"]) for group in touched))


def _whole_labels(partition: Partition) -> dict[int, int]:
    labels: dict[int, int] = {}
    for name, label in partition.labels.items():
        if not isinstance(label, int):
            raise ValueError(
                f"Parameter {name!r} is divided among groups, but torch's optimizers have one "
                f"learning rate per parameter. Use a partition into whole tensors."
            )
        labels[id(partition.params[name])] = label
    return labels


def _multiply(group: dict[str, Any], factor: float) -> None:
    for key in ("lr", "initial_lr"):  # the second is what a scheduler starts from
        if isinstance(group.get(key), Tensor):
            group[key].mul_(factor)
        elif key in group:
            group[key] *= factor


def _listed(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.3g}" for value in values)
