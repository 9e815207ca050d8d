"""Try steps along the learning rates: the predicted and the real change of the loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from newton_summary.display.warn import warn_user
from newton_summary.history import Trial
from newton_summary.measuring.measurement import agree, find_partition, open_probe
from newton_summary.parallel.processes import Distributed, find_processes
from newton_summary.partition import Partition, Spec, trainable, unwrap
from newton_summary.probe.directions import Direction, find_direction
from newton_summary.probe.inputs import NumSamples
from newton_summary.probe.probe import LossFn, check_finite
from newton_summary.probe.state import Journal, unmoved
from newton_summary.solver import LearningRates, learning_rates
from newton_summary.summary import Summary, need_summary


def step_trials(
    model: nn.Module,
    loss_fn: LossFn,
    data: Any,
    summary: Summary,
    rates: LearningRates | Tensor | None = None,
    *,
    fractions: Sequence[float] = (0.25, 0.5, 1.0),
    partition: Partition | Spec | None = None,
    direction: Direction = "gradient",
    microbatch: int | None = None,
    num_samples: NumSamples | None = None,
    distributed: Distributed = "auto",
) -> tuple[Trial, ...]:
    """Evaluate the loss at ``theta - fraction * U I_{P:S} eta``, and restore the model.

    Call it right after :func:`summarize`, with the same model, loss, data and direction. The model
    is restored bit for bit, and dropout draws the same random numbers as in the measurement. Takes
    one pass over the data for each fraction, and two more.

    Args:
        model: The model that was measured.
        loss_fn: As for :func:`summarize`.
        data: As for :func:`summarize`.
        summary: The measurement, of order 2 or 3.
        rates: Learning rates, as an object or a tensor (S,); by default those of the summary.
        fractions: Which parts of the step to try.
        partition: The groups of the summary, if it has no partition.
        direction: The same as for :func:`summarize`.
        microbatch: As for :func:`summarize`.
        num_samples: As for :func:`summarize`.
        distributed: As for :func:`summarize`.

    Returns:
        For each fraction the change of the loss that the second-order model predicts, and the real
        one, which may be infinite or nan. Empty if the rates are not finite.

    >>> import newton_summary as ns
    >>> model = nn.Linear(2, 1, bias=False)
    >>> _ = nn.init.ones_(model.weight)
    >>> def loss_fn(model, x):
    ...     return model(x).square().mean()
    >>> data = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    >>> summary = ns.summarize(model, loss_fn, data, partition="trivial")
    >>> for trial in ns.step_trials(model, loss_fn, data, summary, fractions=[0.5, 1.0]):
    ...     print(f"{trial.fraction}: {trial.predicted:.4f} predicted, {trial.real:.4f} real")
    0.5: -1.6673 predicted, -1.6673 real
    1.0: -2.2231 predicted, -2.2231 real
    """
    eta = _rates(summary, rates)
    fractions = as_floats(fractions, "fractions")
    wrong = [fraction for fraction in fractions if not math.isfinite(fraction)]
    if wrong:
        raise ValueError(f"fractions contains {wrong[0]}: expected finite numbers.")
    groups = find_groups(model, summary, partition)
    if not bool(torch.isfinite(eta).all()):
        return ()
    how: Any = {"direction": direction, "microbatch": microbatch}
    how |= {"num_samples": num_samples, "distributed": distributed}
    etas = [fraction * eta for fraction in fractions]
    changes = try_steps(model, loss_fn, data, summary, etas, groups, **how)
    return tuple(Trial(float(f), *change) for f, change in zip(fractions, changes, strict=True))


def try_steps(
    model: nn.Module,
    loss_fn: LossFn,
    data: Any,
    summary: Summary,
    etas: Sequence[Tensor],
    groups: Partition,
    *,
    direction: Direction = "gradient",
    microbatch: int | None = None,
    num_samples: NumSamples | None = None,
    distributed: Distributed = "auto",
) -> list[tuple[float, float]]:
    """Return the predicted and the real change of the loss for each of several steps.

    ``etas`` are finite learning rates, each (S,), and ``groups`` those of the live model
    (:func:`find_groups`). Everything else is as for :func:`step_trials`.
    """
    exact = summary.to("cpu", torch.float64)
    changes = []
    processes = find_processes(distributed, groups.params)
    with processes.joint():
        probe = open_probe(model, loss_fn, data, groups, microbatch, processes, num_samples)
    agree(processes, groups, direction, steps=len(etas))
    with Journal(), probe:
        u = find_direction(direction, probe)
        start = probe.mean_loss()
        check_finite(start)
        loss, measured = float(start), float(summary.loss)
        if math.isfinite(measured) and not math.isclose(loss, measured, rel_tol=1e-3, abs_tol=1e-9):
            warn_user(
                f"The loss is {loss:.6g}, but it was {measured:.6g} when the summary was "
                "measured, so predicted and real changes are those of different functions. Use "
                "the same data, and try steps before the model or the random state changes."
            )
        elif direction == "gradient":
            _warn_of_another_direction(exact, float(groups.inner(u, u).sum()))
        with unmoved(probe.params.values()) as copies:
            for eta in (eta.detach().to("cpu", torch.float64) for eta in etas):
                probe.step(groups.scale(u, eta), copies)
                predicted = float(exact.predicted_change(eta))
                changes.append((predicted, float(probe.mean_loss() - start)))
    return changes


def _warn_of_another_direction(summary: Summary, slope: float) -> None:
    """Warn if the slope of the summary is not that along the gradient, <u, u>."""
    measured = float(summary.gbar.sum())
    if math.isfinite(measured) and not math.isclose(slope, measured, rel_tol=0.05, abs_tol=1e-9):
        warn_user(
            f"The slope of the loss along the gradient is {slope:.4g}, but {measured:.4g} along "
            "the direction of the summary, so these steps are not those of its rates. Pass the "
            "direction that summarize was given, direction=..."
        )


def real_changes(*given: Any, **options: Any) -> list[float]:
    """Return only the real changes, given the same arguments; infinity for those that are nan."""
    return [math.inf if math.isnan(real) else real for _, real in try_steps(*given, **options)]


def _rates(summary: Summary, rates: LearningRates | Tensor | None) -> Tensor:
    need_summary(summary, "step_trials")
    summary.hessian()  # raises if there is none
    if rates is None:
        rates = learning_rates(summary, lambda_int=1.0 if summary.order == 3 else 0.0)
    try:
        eta = rates.eta if isinstance(rates, LearningRates) else torch.as_tensor(rates)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(
            f"rates has type {type(rates).__name__}: expected what learning_rates(summary) "
            "returns, or a tensor with one number per group."
        ) from None
    if tuple(eta.shape) != (len(summary),):
        raise ValueError(
            f"rates has shape {tuple(eta.shape)}, but the summary has {len(summary)} groups."
        )
    return eta.detach().to("cpu", torch.float64)


def as_floats(values: Any, name: str) -> tuple[float, ...]:
    """Return a user's sequence of numbers as floats."""
    try:
        return tuple(float(value) for value in values)
    except (TypeError, ValueError):
        raise TypeError(f"{name}={values!r}: expected a list of numbers.") from None


def find_groups(
    model: nn.Module, summary: Summary, partition: Partition | Spec | None
) -> Partition:
    """Return the summary's groups, with the parameters of the live model."""
    if partition is None:
        partition = summary.partition
    if partition is None:
        raise ValueError("The summary has no partition: pass it as partition=...")
    if isinstance(partition, Partition) and all(p.is_meta for p in partition.params.values()):
        live = trainable(unwrap(model))  # the summary was read from a file
        if {n: p.shape for n, p in live.items()} == {
            n: p.shape for n, p in partition.params.items()
        }:
            partition = Partition(partition.names, live, partition.labels, unwrap(model))
    groups = find_partition(model, partition)
    if summary.partition is not None and groups.names != summary.names:
        raise ValueError("The groups of the partition differ from those of the summary.")
    if len(groups) != len(summary):
        raise ValueError(
            f"The partition has {len(groups)} groups, but the summary has {len(summary)}."
        )
    return groups
