"""Learning rates backed by a trial: the public ``learning_rates``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from newton_summary.measuring.box import absolute_newton
from newton_summary.measuring.lambda_int import STRENGTHS, suggest_lambda_int
from newton_summary.measuring.trial_steps import find_groups, real_changes
from newton_summary.parallel.processes import Distributed
from newton_summary.probe.directions import Direction
from newton_summary.probe.inputs import NumSamples
from newton_summary.probe.probe import LossFn
from newton_summary.solver import LearningRates, arrays_of
from newton_summary.solver import learning_rates as solve
from newton_summary.summary import Summary

FRACTIONS = tuple(4.0**-k for k in range(9))  # of a step that is shortened until the loss falls


def learning_rates(
    summary: Summary,
    lambda_int: float | Literal["auto"] | None = None,
    *,
    diagonal: bool = False,
    model: nn.Module | None = None,
    loss_fn: LossFn | None = None,
    data: Any = None,
    direction: Direction = "gradient",
    microbatch: int | None = None,
    num_samples: NumSamples | None = None,
    distributed: Distributed = "auto",
) -> LearningRates:
    """Minimise the cubic model of the loss over the learning rates (paper, Section 5 and App. D).

    The model is ``-eta.gbar + 1/2 eta.Hbar eta + lambda_int/6 ||D eta||^3`` with
    ``D = Diag(|D3|^(1/3))`` (Method 1). A model without a minimum is not an error: see ``status``.
    If ``u`` of a group is multiplied by a, its rate is divided by a (App. E).

    Given the model, loss and data that were measured, the step is tried on the data, and the model
    restored: ``rates.real_change`` is the actual change of the loss. By default ``lambda_int`` is
    then found by trials as well, and a step that raises the loss is shortened until it lowers it.

    Args:
        summary: gbar (S,), Hbar (S, S), of which the symmetric part counts, and D3 (S,).
        lambda_int: Strength of the cubic term. 0 gives Newton's step, and needs no D3. "auto", the
            default with a model, picks the one of 1, 10, ... 1e8 whose step lowers the loss most
            (11 passes over the data); without a model the default is 1.
        diagonal: Set the off-diagonal of Hbar to zero first (App. K).
        model: The model that was measured, as it was then.
        loss_fn: As for :func:`summarize`.
        data: As for :func:`summarize`.
        direction: The same as for :func:`summarize`.
        microbatch: As for :func:`summarize`.
        num_samples: As for :func:`summarize`.
        distributed: As for :func:`summarize`.

    Returns:
        The rates, with ``eta_stderr`` if the summary was measured with ``stderr=True``: the
        jackknife over its batches, one more solution for each.

    Raises:
        ValueError: If Hbar is missing, or D3 where it is needed, if shapes do not match, if
            ``lambda_int`` is negative or not finite, or "auto" without a model.

    >>> g, H = torch.tensor([3.0, 1.0]), torch.tensor([[2.0, 1.0], [1.0, 1.0]])
    >>> summary = Summary(gbar=g, Hbar=H, D3=torch.tensor([1.0, 8.0]))
    >>> learning_rates(summary, lambda_int=0).eta  # Newton's step
    tensor([ 2., -1.])
    >>> print(learning_rates(summary))
    group  learning rate
    0        +1.1781e+00
    1        -5.2913e-02
    lambda_int = 1, radius 1.183, predicted change of the loss, to second order, -2.154
    minimum: The minimum of the cubic model.

    With the model the step is tried:

    >>> import newton_summary as ns
    >>> net = nn.Linear(2, 1, bias=False)
    >>> x = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    >>> def loss_fn(model, x):
    ...     return (model(x) - 1).square().mean()
    >>> summary = ns.summarize(net, loss_fn, x)
    >>> rates = ns.learning_rates(summary, model=net, loss_fn=loss_fn, data=x)
    >>> rates.real_change < 0
    True
    """
    if model is None or loss_fn is None:
        if lambda_int == "auto":
            raise ValueError(
                'lambda_int="auto" tries steps, which needs the model: '
                "learning_rates(summary, model=model, loss_fn=loss_fn, data=data)."
            )
        if model is not None or loss_fn is not None or data is not None:
            raise ValueError("To try steps, pass all three: model=, loss_fn= and data=.")
        return solve(summary, 1.0 if lambda_int is None else lambda_int, diagonal=diagonal)
    options: dict[str, Any] = {"direction": direction, "microbatch": microbatch}
    options |= {"num_samples": num_samples, "distributed": distributed}

    def tried(*etas: Tensor) -> list[float]:
        groups = find_groups(model, summary, None)
        return real_changes(model, loss_fn, data, summary, etas, groups, **options)

    if lambda_int is not None and lambda_int != "auto":
        rates = solve(summary, lambda_int, diagonal=diagonal)
        finite = bool(torch.isfinite(rates.eta).all())
        return replace(rates, real_change=tried(rates.eta)[0]) if finite else rates
    strengths = STRENGTHS if summary.order == 3 and bool(summary.D3.any()) else (0.0,)  # type: ignore[union-attr]
    found = suggest_lambda_int(
        model, loss_fn, data, summary, strengths=strengths, diagonal=diagonal, **options
    ).best
    if found.real < 0:
        return replace(found.rates, real_change=found.real)
    rates = found.rates if found.rates.ok else _absolute(summary, found.rates)
    if not bool(torch.isfinite(rates.eta).all()):
        return rates
    real = tried(*(fraction * rates.eta for fraction in FRACTIONS))
    if not min(real) < 0:
        return replace(found.rates, real_change=real[0])
    fraction = FRACTIONS[real.index(min(real))]
    eta = fraction * rates.eta
    error = None if rates.eta_stderr is None else fraction * rates.eta_stderr
    change = float(summary.predicted_change(eta))
    cut = {"eta": eta, "eta_stderr": error, "radius": fraction * rates.radius}
    status = rates.status if rates.status == "absolute" else "cut"
    return replace(rates, **cut, status=status, model_change=change, real_change=min(real))  # type: ignore[arg-type]


def _absolute(summary: Summary, rates: LearningRates) -> LearningRates:
    """Return |Hbar|^-1 gbar for a model without minimum."""
    g, H, _ = arrays_of(summary, rates.diagonal)
    if not (np.isfinite(g).all() and np.isfinite(H).all()):
        return rates
    eta = torch.from_numpy(absolute_newton(g, H, floor=1e-3)).to(rates.eta)
    return replace(rates, eta=eta, status="absolute", eta_stderr=None, escaping=())
