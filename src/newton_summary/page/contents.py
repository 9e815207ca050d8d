"""Histories as plain values for a page; numbers keep their digits."""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from newton_summary.analysis import (
    inverse_kept,
    joint_gain,
    layer_numbers,
    strongest_pairs,
    suggest_merges,
)
from newton_summary.display.names import first_names
from newton_summary.history import History, Measured
from newton_summary.solver import STATUS, USABLE, doubt_of, explain, flatness, refutation
from newton_summary.summary import Summary


def contents(histories: Sequence[History]) -> dict[str, Any]:
    """Return everything that the page shows, ready for JSON."""
    return {"runs": [_run(history) for history in histories]}


def _run(history: History) -> dict[str, Any]:
    return {
        "name": history.name,
        "unit": history.unit,
        "groups": _groups(history.measured[0].summary) if history.measured else [],
        "measured": [_measurement(measured) for measured in history.measured],
        "curves": {
            metric: [[epoch, _number(value)] for epoch, value in points]
            for metric, points in history.curves.items()
        },
        "facts": {str(key): str(value) for key, value in history.facts.items()},
    }


def _groups(summary: Summary) -> list[dict[str, Any]]:
    """Return what is known of each group; ``title`` is its name for readers."""
    partition, S = summary.partition, len(summary)
    columns = {
        "name": summary.names,
        "title": summary.titles,
        "layer": layer_numbers(summary),
        "role": (None,) * S if partition is None else partition.roles,
        "size": (None,) * S if partition is None else partition.sizes,
    }
    return [dict(zip(columns, values)) for values in zip(*columns.values(), strict=True)]


def _measurement(measured: Measured) -> dict[str, Any]:
    summary = measured.summary
    inverse, no_inverse = _inverse(summary)
    return {
        "epoch": measured.epoch,
        "kind": measured.kind,
        "loss": _number(float(summary.loss)),
        "samples": summary.num_samples,
        "backend": summary.backend,
        "reason": summary.reason,
        "approximate": summary.approximate,
        "status": measured.status,
        "status_text": _status(measured),
        "flat": flatness(flat) if (flat := _flat(summary)) else "",
        "doubt": doubt_about(measured),
        "gbar": _packed(summary.gbar),
        "gbar_stderr": _packed(summary.gbar_stderr),
        "Hbar": _packed(summary.Hbar),
        "Hbar_stderr": _packed(summary.Hbar_stderr),
        "inverse": _packed(inverse),
        "no_inverse": no_inverse,
        "D3": _packed(summary.D3),
        "eta": _packed(measured.eta),
        "eta_stderr": _packed(measured.eta_stderr),
        "trials": [[_number(value) for value in trial] for trial in measured.trials],
        "analysis": _analysis(measured),
    }


def _status(measured: Measured) -> str:
    """Return what the status of the rates means; a saddle with D3 is one of lambda_int = 0."""
    if measured.status not in STATUS:
        return ""
    D3 = measured.summary.D3
    lambda_int = 0.0 if measured.status == "saddle" or D3 is None else 1.0
    no_cubic = D3 is not None and not D3.any()
    return explain(measured.status, lambda_int, no_cubic, _flat(measured.summary))


def _flat(summary: Summary) -> str:
    """Return the names of the groups without slope and curvature."""
    if summary.Hbar is None:
        return ""
    flat = summary.dead & (summary.gbar == 0)
    if summary.D3 is not None:
        flat &= summary.D3 == 0
    return first_names([summary.names[s] for s in flat.nonzero().flatten().tolist()], most=5)


def doubt_about(measured: Measured) -> str:
    """Return why not to trust the learning rates of a measurement; empty if there is no reason."""
    if measured.trial is not None:
        predicted, real = measured.trial.predicted, measured.trial.real
        return refutation(predicted, real) if measured.refuted else ""
    if measured.summary.Hbar is None or measured.status not in USABLE:
        return _status(measured)
    exact = measured.summary.to(torch.float64)
    return doubt_of(float(exact.predicted_change(measured.eta)), float(exact.loss))


def _inverse(summary: Summary) -> tuple[Tensor | None, str | None]:
    """Return the inverse of Hbar, or None and the reason."""
    try:
        return summary.to(torch.float64).inverse(without_dead=True), None
    except ValueError as error:
        return None, str(error)


# --- analysis -------------------------------------------------------------------------------------


def _analysis(measured: Measured) -> dict[str, Any]:
    """Return pairs, what approximations keep, and two sentences on joint steps and merging."""
    summary = measured.summary
    if summary.Hbar is None:
        return {"pairs": [], "undefined_pairs": 0, "kept": None, "gain": None, "merges": None}
    alone = replace(summary, parts=())  # no errors of rates that are not shown
    pairs = strongest_pairs(alone, 12)
    return {
        "pairs": [[x if isinstance(x, str | int) else _number(x) for x in pair] for pair in pairs],
        "undefined_pairs": pairs.undefined,
        "kept": _kept(alone),
        "gain": _gain(alone, measured),
        "merges": _merges(alone),
    }


def _kept(summary: Summary) -> dict[str, dict[str, float | str]] | None:
    try:
        kept = inverse_kept(summary)
    except ValueError:  # no inverse: the page says so elsewhere
        return None
    return {
        name: {key: _number(share) for key, share in shares._asdict().items()}
        for name, shares in {"inverse": kept.inverse, "hessian": kept.hessian}.items()
    }


def _gain(summary: Summary, measured: Measured) -> str | None:
    """Return what all of Hbar gains, if the rates are its own."""
    lambda_int = measured.lambda_int
    if lambda_int is None or measured.status == "absolute" or (lambda_int and summary.D3 is None):
        return None
    gain = joint_gain(summary, lambda_int)
    beyond = -gain.joint > gain.loss > 0  # more than the whole loss: no model holds that far
    if beyond or not gain.joint_rates.ok or not math.isfinite(gain.ratio):
        return None
    return (
        f"Rates from all of Hbar promise {gain.ratio:.3g} times the decrease of those from its "
        f"diagonal ({gain.joint:+.3g} against {gain.diagonal:+.3g}, to second order, with "
        f"lambda_int = {lambda_int:g})."
    )


def _merges(summary: Summary) -> str | None:
    merges = suggest_merges(summary)
    joined = [" + ".join(groups) for groups in merges.groups.values() if len(groups) > 1]
    if not joined or not math.isfinite(merges.kept):
        return None
    shown = "; ".join(joined[:6]) + ("; ..." if len(joined) > 6 else "")
    return (
        f"Groups whose own rates differ by a factor of {merges.spread:g} at most could be merged, "
        f"into {len(merges)} groups that keep {merges.kept:.0%} of Newton's decrease: {shown}."
    )


# --- numbers --------------------------------------------------------------------------------------


def _number(value: float) -> float | str:
    """Return a number, or the name of one that JSON cannot hold."""
    return float(value) if math.isfinite(value) else str(float(value))


def _packed(tensor: Tensor | None) -> dict[str, str] | None:
    """Return numbers as base64, in 32 bits if these give seven digits, else in 64.

    A matrix is written by rows; of a symmetric one only the upper triangle.
    """
    if tensor is None:
        return None
    values = tensor.detach().double().cpu().numpy()
    if values.ndim == 2 and np.array_equal(values, values.T, equal_nan=True):
        values = values[np.triu_indices(len(values))]
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        short = values.astype("<f4")
    shown = np.isfinite(values) & (values != 0)
    enough = np.isfinite(short[shown]) & (np.abs(short[shown]) >= np.finfo(np.float32).tiny)
    kind = "float32" if enough.all() else "float64"
    raw = short if kind == "float32" else values.astype("<f8")
    return {"type": kind, "data": base64.b64encode(raw.tobytes()).decode("ascii")}
