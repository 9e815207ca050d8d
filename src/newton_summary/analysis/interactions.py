"""How the groups of a model interact, read off a summary (paper, Section 6.1 and App. H).

Nothing here depends on the scale of the direction: before entries of different groups are compared,
``Hbar`` or its inverse is scaled to a unit diagonal. Everything is computed in float64. Functions
that need only ``Hbar`` also take it as an (S, S) tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from newton_summary.display.table import ShownAsTable, without_middle
from newton_summary.history import History
from newton_summary.solver import LearningRates, learning_rates
from newton_summary.summary import Summary, need_summary


def normalized(summary: Summary | Tensor) -> Tensor:
    """Return ``Hbar`` scaled to a unit diagonal, ``H_st / sqrt(|H_ss H_tt|)``, shape (S, S).

    It does not change if the direction of a group is scaled. The diagonal is the sign of H_ss.
    Where ``Hbar`` is positive definite the other entries lie between -1 and 1. If H_ss is 0 or not
    finite, the row and the column of group s are nan.

    Args:
        summary: A summary, or any symmetric (S, S) matrix, such as the inverse.

    >>> normalized(torch.tensor([[4.0, 1.0], [1.0, 1.0]]))
    tensor([[1.0000, 0.5000],
            [0.5000, 1.0000]], dtype=torch.float64)
    """
    return _unit_diagonal(_double(summary).hessian())


def layer_numbers(summary: Summary | Tensor) -> tuple[int, ...]:
    """Return the number of each group's layer, counted in the order of the groups, (S,).

    Groups that hold parameters of the same layer have the same number: a weight and its bias, a
    convolution and its batch norm. Without a partition every group counts as a layer.

    >>> from newton_summary import make_partition
    >>> net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Tanh(), torch.nn.Linear(2, 1))
    >>> layer_numbers(Summary(torch.ones(4), partition=make_partition(net)))
    (0, 0, 1, 1)
    """
    partition = _as_summary(summary).partition
    return tuple(range(len(summary))) if partition is None else partition.layers


# --- how much of the inverse is near its diagonal -------------------------------------------------


class Kept(NamedTuple):
    """The share of a matrix that three approximations keep, from 0 to 1.

    >>> inverse_kept(torch.eye(2)).hessian
    Kept(diagonal=1.0, block_diagonal=1.0, tridiagonal=1.0)
    """

    diagonal: float
    block_diagonal: float  # weight and bias of one layer
    tridiagonal: float  # neighbouring layers too


@dataclass(frozen=True)
class InverseKept(ShownAsTable):
    """How much of the inverse of ``Hbar``, and of ``Hbar``, lies near the diagonal.

    Shares of the sum of squares of the entries, with the matrix scaled to a unit diagonal. 1 means
    that nothing is left out; what ``tridiagonal`` lacks are interactions between distant layers.
    Made by :func:`inverse_kept`.

    >>> kept = inverse_kept(torch.tensor([[1.0, 0.5], [0.5, 1.0]]))
    >>> kept.num_layers, f"{kept.inverse.diagonal:.2f}"
    (2, '0.80')
    """

    _right = (2, 3)

    inverse: Kept
    hessian: Kept
    num_layers: int

    def _rows(self) -> list[tuple[str, ...]]:
        kinds = (
            ("diagonal", "each group alone"),
            ("block-diagonal", "groups of one layer"),
            ("tridiagonal", "groups of neighbouring layers"),
        )
        rows: list[tuple[str, ...]] = [("approximation", "keeps", "of the inverse", "of Hbar")]
        for (name, keeps), inverse, hessian in zip(kinds, self.inverse, self.hessian, strict=True):
            rows.append((name, keeps, _percent(inverse), _percent(hessian)))
        return rows

    def _said(self) -> str:
        return (
            f"Share of the squares, each matrix scaled to a unit diagonal; {self.num_layers} "
            f"{'layer' if self.num_layers == 1 else 'layers'}."
        )


def inverse_kept(summary: Summary | Tensor) -> InverseKept:
    """Compute how much of the inverse of ``Hbar`` lies near its diagonal.

    Section 6.1 of the paper asks whether the entries that a diagonal, block-diagonal or tridiagonal
    approximation of the Hessian, or of its inverse, leaves out are negligible; App. H sees the
    inverse become tridiagonal during training. With P the inverse scaled to a unit diagonal, the
    answer is sum_kept P_st^2 / sum P_st^2. A block-diagonal ``Hbar`` keeps 1 in the last two. Of
    two groups that act almost as one, the diagonal keeps 1/2. The shares are nan where the inverse
    has a zero on its diagonal. Groups that do not affect the loss, whose row of ``Hbar`` is zero,
    do not count.

    Raises:
        ValueError: If ``Hbar`` has no inverse.

    >>> kept = inverse_kept(torch.tensor([[1.0, 0.5, 0.0], [0.5, 1.0, 0.5], [0.0, 0.5, 1.0]]))
    >>> f"{kept.inverse.diagonal:.3f}, {kept.inverse.tridiagonal:.3f}"  # each group is a layer
    '0.659, 0.951'
    """
    summary = _double(summary)
    layers = torch.tensor(layer_numbers(summary))
    apart = (layers[:, None] - layers[None, :]).abs()
    masks = (torch.eye(len(summary), dtype=torch.bool), apart == 0, apart <= 1)

    inverse = summary.inverse(without_dead=True)
    live = ~summary.dead

    def kept(matrix: Tensor) -> Kept:
        squares = _unit_diagonal(matrix[live][:, live]).square()
        shares = (squares[mask[live][:, live]].sum() / squares.sum() for mask in masks)
        return Kept(*map(float, shares))

    count = len(set(layers[live].tolist()))
    return InverseKept(kept(inverse), kept(summary.hessian()), count)


# --- what moving together is worth ----------------------------------------------------------------


@dataclass(frozen=True)
class JointGain(ShownAsTable):
    """The predicted change of the loss with rates from all of ``Hbar``, and from its diagonal.

    ``joint`` and ``diagonal`` are changes to second order, with all of ``Hbar`` for both.
    ``joint_model`` and ``diagonal_model`` include the cubic term: the joint rates minimise it, so
    theirs is never the larger one. Made by :func:`joint_gain`.

    >>> gain = joint_gain(Summary(gbar=torch.ones(2), Hbar=torch.eye(2)), lambda_int=0)
    >>> gain.joint, gain.ratio  # nothing to gain without interactions
    (-1.0, 1.0)
    """

    _right = (1, 2)

    joint: float
    diagonal: float
    joint_model: float
    diagonal_model: float
    joint_rates: LearningRates
    diagonal_rates: LearningRates
    loss: float  # where the step starts; nan if unknown

    @property
    def ratio(self) -> float:
        """Decrease by the joint step over that by the diagonal one; nan if the latter is none."""
        return self.joint / self.diagonal if self.diagonal < 0 else math.nan

    def _rows(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = [
            ("rates from", "change of the loss", "with the cubic term", "status")
        ]
        for name, change, model, rates in (
            ("all of Hbar", self.joint, self.joint_model, self.joint_rates),
            ("its diagonal", self.diagonal, self.diagonal_model, self.diagonal_rates),
        ):
            rows.append((name, f"{change:+.4g}", f"{model:+.4g}", rates.status))
        return rows

    def _said(self) -> str:
        if math.isfinite(self.ratio):
            said = f"The joint step promises {self.ratio:.3g} times the decrease."
        elif self.diagonal >= 0:
            said = "With the diagonal's rates the loss is not predicted to fall: groups interact."
        else:
            said = "The two steps cannot be compared."
        if -self.joint > self.loss > 0:
            said += (
                f"\nThat is more than the whole loss of {self.loss:.4g}: the model does not hold "
                "that far. Take only part of the step."
            )
        return said


def joint_gain(summary: Summary, lambda_int: float = 1.0) -> JointGain:
    """Compare the step from all of ``Hbar`` with the one from its diagonal (App. K).

    Args:
        summary: Of order 3, or of order 2 with ``lambda_int=0``.
        lambda_int: Strength of the cubic term in both.

    >>> H = torch.tensor([[1.0, 0.5], [0.5, 1.0]])
    >>> print(joint_gain(Summary(gbar=torch.tensor([1.0, 1.0]), Hbar=H), lambda_int=0))
    rates from    change of the loss  with the cubic term  status
    all of Hbar              -0.6667              -0.6667  newton
    its diagonal                -0.5                 -0.5  newton
    The joint step promises 1.33 times the decrease.
    """
    need_summary(summary, "joint_gain")
    summary = _double(summary)
    joint, diagonal = (learning_rates(summary, lambda_int, diagonal=d) for d in (False, True))

    def model(rates: LearningRates) -> float:
        cube = rates.radius**3 if lambda_int > 0 else 0.0  # without D3 the radius is nan
        return rates.model_change + lambda_int / 6 * cube

    return JointGain(
        joint.model_change,
        diagonal.model_change,
        model(joint),
        model(diagonal),
        joint,
        diagonal,
        float(summary.loss),
    )


# --- pairs ----------------------------------------------------------------------------------------


class Pair(NamedTuple):
    """Two groups and how they interact.

    >>> strongest_pairs(torch.tensor([[4.0, 1.0], [1.0, 1.0]]))[0]
    Pair(first='0', second='1', interaction=0.5, value=1.0, distance=1)
    """

    first: str
    second: str
    interaction: float  # H_st / sqrt(|H_ss H_tt|)
    value: float  # H_st
    distance: int  # layers apart; 0 for a weight and its bias


@dataclass(frozen=True)
class StrongestPairs(ShownAsTable):
    """Pairs of groups, the strongest interaction first. Made by :func:`strongest_pairs`.

    >>> pairs = strongest_pairs(torch.tensor([[4.0, 1.0], [1.0, 0.0]]))
    >>> len(pairs), pairs.undefined  # group 1 has no curvature of its own
    (0, 1)
    """

    _right = (2, 3, 4)

    pairs: tuple[Pair, ...]
    undefined: int  # number of pairs without one: H_ss = 0, or entries that are not finite

    def __len__(self) -> int:
        """Return the number of pairs."""
        return len(self.pairs)

    def __getitem__(self, index: int) -> Pair:
        """Return one pair; 0 is the strongest."""
        return self.pairs[index]

    def __iter__(self) -> Iterator[Pair]:
        """Iterate over the pairs."""
        return iter(self.pairs)

    def _rows(self) -> list[list[str]]:
        rows = [["group", "group", "interaction", "Hbar_st", "layers apart"]]
        for first, second, interaction, value, distance in self.pairs:
            rows.append([first, second, f"{interaction:+.3f}", f"{value:+.3e}", str(distance)])
        return without_middle(rows)

    def _said(self) -> str:
        if not self.undefined:
            return ""
        return (
            f"Undefined for {self.undefined} pairs: a group has no curvature of its own, or an "
            f"entry is not finite."
        )


def strongest_pairs(summary: Summary | Tensor, count: int = 10) -> StrongestPairs:
    """Return the pairs of groups that interact most, with their distance in depth.

    Args:
        summary: A summary, or Hbar.
        count: Largest number of pairs.

    >>> Hbar = torch.tensor([[4.0, -1.0, 0.0], [-1.0, 1.0, 0.1], [0.0, 0.1, 1.0]])
    >>> print(strongest_pairs(Hbar, count=2))
    group  group  interaction     Hbar_st  layers apart
    0      1           -0.500  -1.000e+00             1
    1      2           +0.100  +1.000e-01             1
    """
    if not isinstance(count, int) or count < 0:
        raise ValueError(f"count={count!r}: expected a number of pairs, 0 or more.")
    summary = _double(summary)
    values, scaled = summary.hessian(), normalized(summary)
    layers, names = layer_numbers(summary), summary.names
    every = torch.triu_indices(len(summary), len(summary), offset=1).T  # (pairs, 2)
    strength = scaled[every[:, 0], every[:, 1]].abs()
    defined = torch.isfinite(strength)
    ranked = strength[defined].argsort(descending=True, stable=True)[:count]
    pairs = (
        Pair(
            names[s], names[t], float(scaled[s, t]), float(values[s, t]), abs(layers[s] - layers[t])
        )
        for s, t in every[defined][ranked].tolist()
    )
    return StrongestPairs(tuple(pairs), int((~defined).sum()))


# --- over a training ------------------------------------------------------------------------------


class Smoothed(NamedTuple):
    """Means over windows of epochs. Made by :func:`smooth`.

    >>> smooth([[1.0], [3.0]], epochs=[0, 1], window=2).epochs
    tensor([1.], dtype=torch.float64)
    """

    epochs: Tensor  # (K,)  middle of each window
    values: Tensor  # (K, ...)


def smooth(
    values: Tensor | Sequence[Sequence[float]], epochs: Sequence[float], window: int = 20
) -> Smoothed:
    """Average values over windows of epochs, as the paper does in its figures of ``eta``.

    There, for k = 10, 30, 50, ... the value is the mean over the epochs k - 10 to k + 9, "to remove
    the noise" (App. H has twice that). Windows are counted from the first epoch. The last one is
    left out if training did not reach its middle. Values that are not finite are left out of the
    means; where nothing is left, the mean is nan.

    Args:
        values: One row for each epoch, (M, ...), such as ``history.rates``.
        epochs: When they were measured, (M,), in order.
        window: Length of a window in epochs.

    >>> smooth([[1.0], [3.0], [5.0], [7.0]], epochs=[0, 1, 2, 3], window=2).values.flatten()
    tensor([2., 6.], dtype=torch.float64)
    """
    if isinstance(values, History):
        raise TypeError(
            "smooth needs values and their epochs: smooth(history.rates, history.epochs)."
        )
    values = torch.as_tensor(values).detach().double().cpu()
    times = torch.as_tensor(list(epochs), dtype=torch.float64)
    if len(times) == 0 or len(values) != len(times):
        raise ValueError(f"Got {len(values)} rows of values but {len(times)} epochs.")
    if not window > 0:
        raise ValueError(f"window={window}: expected a number of epochs above 0.")
    values = torch.where(torch.isfinite(values), values, math.nan)
    number = ((times - times[0]) / window).floor()
    windows = number.unique()  # type: ignore[no-untyped-call]
    middles = times[0] + (windows + 0.5) * window
    reached = middles <= times.max()
    if not reached.any():
        raise ValueError(
            f"Epochs {float(times[0]):g} to {float(times.max()):g} do not reach the middle of a "
            f"window of {window} epochs. Use a shorter window."
        )
    means = [values[number == i].nanmean(0) for i in windows[reached]]
    return Smoothed(middles[reached], torch.stack(means))


# --- helpers --------------------------------------------------------------------------------------


def _as_summary(summary: Summary | Tensor) -> Summary:
    if isinstance(summary, Summary):
        return summary
    if not isinstance(summary, Tensor):
        raise TypeError(
            f"summary has type {type(summary).__name__}: expected a Summary, or Hbar as a tensor."
        )
    if summary.ndim != 2 or summary.shape[0] != summary.shape[1]:
        raise ValueError(f"Hbar has shape {tuple(summary.shape)}: expected (S, S).")
    return Summary(gbar=summary.new_full(summary.shape[:1], math.nan), Hbar=summary)


def _double(summary: Summary | Tensor) -> Summary:
    summary = _as_summary(summary)
    summary.hessian()  # raises if there is none
    return summary.to("cpu", torch.float64)


def _unit_diagonal(matrix: Tensor) -> Tensor:
    scale = matrix.detach().diagonal().abs().sqrt()
    scale = torch.where((scale > 0) & torch.isfinite(scale), scale, math.nan)
    return matrix.detach() / scale[:, None] / scale[None, :]


def _percent(share: float) -> str:
    return "-" if math.isnan(share) else f"{100 * share:.1f} %"
