"""Coarser partitions of a measured summary: exact sums, and which groups could be merged."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from newton_summary.display.names import nearest
from newton_summary.display.table import ShownAsTable, without_middle
from newton_summary.partition import Partition, make_partition
from newton_summary.solver import learning_rates
from newton_summary.summary import Summary, need_summary


def coarsen(summary: Summary, groups: Mapping[str, Iterable[str]]) -> Summary:
    """Return the summary of merged groups, without measuring again.

    Merged groups share one step size, so phi is restricted to equal entries of eta, and the entries
    of ``gbar`` and ``Hbar`` add up exactly. The third derivative of a merged group would need
    entries of D^(3) off the diagonal, which were not measured: ``D3`` is None.

    Args:
        summary: The measurement.
        groups: From the name of a new group to the names of the old groups in it. Groups that are
            not named stay as they are. A new group takes the place of its first old one.

    Returns:
        The summary of the coarser partition, with standard errors if ``summary.parts`` has the
        batches' own summaries.

    >>> H = torch.tensor([[2.0, 1.0], [1.0, 3.0]])
    >>> both = coarsen(Summary(gbar=torch.tensor([1.0, 2.0]), Hbar=H), {"both": ["0", "1"]})
    >>> both.gbar, both.Hbar
    (tensor([3.]), tensor([[7.]]))
    """
    assigned = _assignment(summary, groups)
    names = list(assigned)
    number = {old: s for s, name in enumerate(names) for old in assigned[name]}
    labels = torch.tensor([number[old] for old in summary.names])

    def sums(values: Tensor, dimension: int) -> Tensor:
        shape = list(values.shape)
        shape[dimension] = len(names)
        return values.new_zeros(shape).index_add(dimension, labels.to(values.device), values)

    coarse = replace(
        summary,
        gbar=sums(summary.gbar, 0),
        Hbar=None if summary.Hbar is None else sums(sums(summary.Hbar, 0), 1),
        D3=None,
        partition=_merged_partition(summary.partition, names, labels.tolist()),
        gbar_stderr=None,
        Hbar_stderr=None,
        parts=(),
    )
    if summary.parts:
        coarse = coarse.with_stderr([coarsen(part, groups) for part in summary.parts])
    return coarse


def _assignment(
    summary: Summary, groups: Mapping[str, Iterable[str]]
) -> dict[str, tuple[str, ...]]:
    """Return the old groups of every new one, in the order of the first of them."""
    need_summary(summary, "coarsen")
    if not isinstance(groups, Mapping):
        raise TypeError(
            f"groups has type {type(groups).__name__}: expected a mapping from names of new "
            f"groups to lists of old ones, such as {{'both': {list(summary.names[:2])}}}."
        )
    taken: dict[str, str] = {}
    for name, members in groups.items():
        if isinstance(members, str):
            raise TypeError(f"Group {name!r} is {members!r}: expected a list of group names.")
        for old in members:
            if old not in summary.names:
                raise ValueError(
                    f"Group {name!r}: the summary has no group {old!r}."
                    f"{nearest(old, summary.names)}"
                )
            if old in taken:
                raise ValueError(
                    f"Group {old!r} is listed twice, in {taken[old]!r} and in {name!r}."
                )
            taken[old] = name
    merged: dict[str, list[str]] = {}
    for old in summary.names:
        name = taken.get(old, old)
        if old not in taken and name in groups:
            raise ValueError(
                f"There already is a group {name!r}. Choose another name for the new one."
            )
        merged.setdefault(name, []).append(old)
    empty = [name for name in groups if name not in merged]
    if empty:
        raise ValueError(f"Group {empty[0]!r} is empty. Leave it out.")
    return {name: tuple(olds) for name, olds in merged.items()}


def _merged_partition(
    partition: Partition | None, names: list[str], new: list[int]
) -> Partition | None:
    if partition is None:
        return None
    labels: dict[str, int | Tensor] = {}
    for name, label in partition.labels.items():
        old = torch.as_tensor(label)
        moved = torch.tensor(new, device=old.device)[old]
        first = moved.flatten()[0]
        labels[name] = int(first) if bool((moved == first).all()) else moved
    return partition.regrouped(names, labels)


# --- which groups could be merged -----------------------------------------------------------------


@dataclass(frozen=True)
class Merges(ShownAsTable):
    """A coarser partition that should lose little, and why. Made by :func:`suggest_merges`.

    ``groups`` is what :func:`coarsen` takes; :meth:`partition` divides a model accordingly.

    >>> H = torch.diag(torch.tensor([1.0, 1.5, 40.0]))
    >>> suggest_merges(Summary(gbar=torch.ones(3), Hbar=H)).coarse().gbar
    tensor([2., 1.])
    """

    _right = (1, 3)

    groups: dict[str, tuple[str, ...]]  # every new group, from its name to its old groups
    rates: dict[str, float]  # of every old group alone, gbar_s / Hbar_ss; nan if it has none
    spread: float  # largest ratio of rates in a group
    kept: float  # share of the decrease by Newton's step that is left; nan if Hbar is not positive
    summary: Summary  # the measurement

    def __len__(self) -> int:
        """Return the number of new groups."""
        return len(self.groups)

    @property
    def spec(self) -> dict[str, list[Any]]:
        """The new groups as lists of parameters, for :func:`newton_summary.make_partition`."""
        fine = self.summary.partition
        if fine is None:
            raise ValueError(
                "The summary has no partition, so the parameters of its groups are unknown."
            )
        spec: dict[str, list[Any]] = {name: [] for name in self.groups}
        for name, olds in self.groups.items():
            for s in map(fine.index, olds):
                for member in fine.members[s]:
                    label, whole = fine.labels[member.name], member.name
                    spec[name].append(
                        whole if isinstance(label, int) else (whole, label.cpu() == s)
                    )
        return spec

    def partition(self, model: nn.Module) -> Partition:
        """Return the coarser partition of the model."""
        return make_partition(model, self.spec)

    def coarse(self) -> Summary:
        """Return the summary of the coarser partition."""
        return coarsen(self.summary, self.groups)

    def _rows(self) -> list[list[str]]:
        rows = [["new group", "groups", "rates alone", "ratio", "why"]]
        for name, olds in self.groups.items():
            rates = [self.rates[old] for old in olds]
            low, high = min(rates), max(rates)
            if len(olds) > 1:
                why = f"{', '.join(olds[:4])}" + (" ..." if len(olds) > 4 else "")
                cells = [f"{low:.2e} to {high:.2e}", f"{high / low:.2f}", f"alike: {why}"]
            elif math.isnan(low):
                cells = ["-", "-", "slope or curvature is not positive: left alone"]
            else:
                cells = [f"{low:.2e}", "1", "no other rate is close"]
            rows.append([name, str(len(olds)), *cells])
        return without_middle(rows)

    def _said(self) -> str:
        said = (
            f"{len(self.rates)} groups could become {len(self)}: merged are groups of one role "
            f"whose rates differ by a factor of {self.spread:g} at most."
        )
        if not math.isnan(self.kept):
            said += f"\nNewton's step with them keeps {100 * self.kept:.1f} % of the decrease."
        return said


def suggest_merges(summary: Summary, spread: float = 3.0) -> Merges:
    """Suggest which groups could share one learning rate.

    The paper's remark after Theorem 1 advises putting eigenvalues of the Hessian of the same order
    of magnitude into one group: the loss shrinks by (gamma - 1)^2 / (gamma + 1)^2 per step at
    worst, with gamma the largest ratio of eigenvalues in a group. A summary shows them only through
    the curvature along the direction: with the gradient as direction, Hbar_ss / gbar_s is a mean of
    the eigenvalues of group s, and its inverse is the rate that the group would have alone. Groups
    are merged, closest rates first, as long as the ratio of rates in a group is at most ``spread``.
    With 3, the bound is 1/4 if each of the old groups has a single eigenvalue.

    Weights and biases stay apart. So does a group whose slope or curvature is not positive.

    Args:
        summary: Of order 2 or 3.
        spread: Largest ratio of rates in a merged group, 1 or more.

    >>> H = torch.diag(torch.tensor([1.0, 1.5, 40.0]))
    >>> merges = suggest_merges(Summary(gbar=torch.ones(3), Hbar=H))
    >>> merges.groups, f"{merges.kept:.0%}"
    ({'0+1': ('0', '1'), '2': ('2',)}, '96%')
    """
    need_summary(summary, "suggest_merges")
    if not 1 <= spread < math.inf:
        raise ValueError(f"spread={spread}: expected a ratio of rates, 1 or more.")
    g = summary.gbar.detach().double().cpu()
    h = summary.hessian().detach().double().cpu().diagonal()
    alone = torch.where((g > 0) & (h > 0), g / h, math.nan)
    alone = torch.where(torch.isfinite(alone) & (alone > 0), alone, math.nan)
    rates = dict(zip(summary.names, alone.tolist(), strict=True))
    partition = summary.partition
    roles = ("",) * len(summary) if partition is None else partition.roles
    groups = {}
    for kind in dict.fromkeys(roles):
        known = [n for n, r in zip(summary.names, roles) if r == kind and not math.isnan(rates[n])]
        for members in _clusters(sorted(known, key=rates.__getitem__), rates, spread):
            inside = [name for name in summary.names if name in members]
            name = "+".join(inside) if len(inside) < 3 else f"{inside[0]}+{len(inside) - 1} more"
            while name in groups or (len(inside) > 1 and name in summary.names):
                name += "+"  # a group has that name already
            groups[name] = tuple(inside)
    assigned = _assignment(summary, groups)
    fine, coarse = _newton_decrease(summary), _newton_decrease(coarsen(summary, assigned))
    kept = coarse / fine if fine > 0 else math.nan
    return Merges(assigned, rates, float(spread), kept, summary)


def _clusters(ordered: list[str], rates: Mapping[str, float], spread: float) -> list[list[str]]:
    """Merge neighbours on the line of rates, the nearest first (complete linkage)."""
    clusters = [[name] for name in ordered]
    while len(clusters) > 1:
        ratios = [rates[after[-1]] / rates[before[0]] for before, after in pairwise(clusters)]
        best = min(range(len(ratios)), key=ratios.__getitem__)
        if not ratios[best] <= spread:
            break
        clusters[best : best + 2] = [clusters[best] + clusters[best + 1]]
    return clusters


def _newton_decrease(summary: Summary) -> float:
    """Return 1/2 gbar.Hbar^-1 gbar, nan where Hbar is not positive definite."""
    rates = learning_rates(summary.to(torch.float64), lambda_int=0)
    return -rates.model_change if rates.status in ("newton", "flat") else math.nan
