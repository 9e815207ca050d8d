"""Measure a model from a user's file, for ``newton-summary inspect FILE.py:build``."""

from __future__ import annotations

import math
import platform
import shlex
import sys
import time
from collections import UserList
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from newton_summary.analysis.interactions import Pair, strongest_pairs
from newton_summary.display.table import text_table
from newton_summary.errors import UserError
from newton_summary.experiments.rundir import finite
from newton_summary.history import History
from newton_summary.inspection.settings import Settings
from newton_summary.inspection.user_file import Built, kind_of, telling
from newton_summary.measuring.measurement import summarize
from newton_summary.measuring.trial_steps import step_trials
from newton_summary.measuring.tried_rates import learning_rates
from newton_summary.partition import make_partition
from newton_summary.probe.inputs import as_batches, to_device
from newton_summary.solver import LearningRates
from newton_summary.summary import Summary


@dataclass(frozen=True)
class Inspection:
    """Results of measuring a model."""

    history: History
    summary: Summary
    rates: LearningRates
    pairs: tuple[Pair, ...]  # the strongest first
    found: bool  # whether lambda_int was found by trials

    def __str__(self) -> str:
        """Return what was measured, the slowest and fastest groups, and the strongest pairs."""
        facts = self.history.facts
        lines = [
            facts["model"],
            f"{facts['partition']}, measured on {facts['data']} in {facts['time']} "
            f"(backend {self.summary.backend})",
            "",
        ]
        if self.rates.ok and not self.rates.refuted:
            lines += self._rates_in_words()
        elif self.rates.ok:
            lines += [f"No learning rates with {self._strength()}", f"  {self.rates.doubt}"]
            if not self.found:
                lines.append("  Leave out --lambda-int: it is then found by trials.")
        else:
            lines.append(f"No learning rates, {self.rates.status}: {self.rates.detail}")
            if not self.found:
                lines.append("Leave out --lambda-int: steps are then tried until one lowers it.")
        if self.pairs:
            rows = [["Strongest pairs", "", "interaction"]]
            titles = dict(zip(self.summary.names, self.summary.titles, strict=True))
            rows += [
                [f"  {titles[p.first]}", titles[p.second], f"{p.interaction:+.3f}"]
                for p in self.pairs
            ]
            lines += ["", text_table(rows, right=[2])]
        return "\n".join(lines)

    def _rates_in_words(self) -> list[str]:
        eta, errors = self.rates.eta.tolist(), self.rates.eta_stderr
        forwards = sorted((s for s in range(len(eta)) if eta[s] > 0), key=eta.__getitem__)
        ends = [("forwards", s) for s in forwards]
        if len(forwards) > 1:
            ends = [("fastest", forwards[-1]), ("slowest", forwards[0])]
        rows = []
        for word, s in ends:
            digit = 0.0 if errors is None else float(f"{float(errors[s]):.1g}")
            error = "" if errors is None else f" ± {digit:g}"  # 20, not 2e+01
            rows.append([f"  {word}", self.summary.titles[s], f"{eta[s]:.4g}{error}"])
        head = f"Learning rates along the gradient, with {self._strength()}"
        lines = [head, *([text_table(rows)] if rows else [])]
        backwards = sum(value < 0 for value in eta)
        if backwards:
            verb, whose = ("is", "its") if backwards == 1 else ("are", "their")
            lines.append(
                f"  {backwards} of {len(eta)} {verb} negative: {whose} partners move too far"
            )
        lines.append(
            f"  with these the loss of {float(self.summary.loss):.4g} should change by "
            f"{self.rates.model_change:+.3g}; it changed by {self.rates.real_change:+.3g}"
        )
        if self.rates.status not in ("minimum", "newton"):
            lines.append(f"  {self.rates.detail}")
        return lines

    def _strength(self) -> str:
        said = f"lambda_int {self.rates.lambda_int:g}"
        if self.rates.no_cubic:
            said = "no cubic term: D3 is 0 in all groups"
            said += "" if self.rates.no_effect else ", as with ReLU and squared error"
        elif self.found and self.summary.D3 is not None:  # else there is only 0
            said += ", found by trials"
        return said if self.rates.real_change < 0 else f"{said}; no such step lowers the loss"

    def as_dict(self) -> dict[str, Any]:
        """Return the rates and pairs as plain values; None stands for what is not finite."""
        names, stderr = self.summary.names, self.rates.eta_stderr
        values: dict[str, Any] = {
            "loss": float(self.summary.loss),
            "samples": self.summary.num_samples,
            "backend": self.summary.backend,
            "status": self.rates.status,
            "lambda_int": self.rates.lambda_int,
            "predicted_change": self.rates.model_change,
            "real_change": self.rates.real_change,
            "learning_rates": dict(zip(names, self.rates.eta.tolist(), strict=True)),
            "stderr": None if stderr is None else dict(zip(names, stderr.tolist(), strict=True)),
            "strongest_pairs": [pair._asdict() for pair in self.pairs],
            "facts": self.history.facts,
        }
        return finite(values)  # type: ignore[no-any-return]


# --- measuring -----------------------------------------------------------------------------------


def inspect_model(
    built: Built,
    settings: Settings,
    *,
    name: str,
    file: Path,
    progress: Callable[[int, int | None], None] | bool = False,
) -> Inspection:
    """Measure a model and try steps along its learning rates.

    ``name`` is the title of the report, ``file`` the user's file, for messages; ``progress`` is as
    for :func:`summarize`.
    """
    model, loss_fn, data = built
    lambda_int = _strength(settings)
    with telling(file, f"Measuring {file} failed", _hint(data)):
        batches = take_batches(data, settings.max_batches)
        if settings.device is not None:
            from newton_summary.experiments.training import find_device

            device = find_device(settings.device)
            model = model.to(device)
            batches = UserList(to_device(batch, device) for batch in batches)
        groups = make_partition(model, settings.partition)
        start = time.perf_counter()
        summary = summarize(
            model,
            loss_fn,
            batches,
            partition=groups,
            backend=settings.backend,
            order=settings.order,
            stderr=settings.stderr and len(batches) > 1,
            progress=progress,
        )
        seconds = time.perf_counter() - start
        rates = learning_rates(summary, lambda_int, model=model, loss_fn=loss_fn, data=batches)
        trials = step_trials(model, loss_fn, batches, summary, rates) if rates.ok else ()
    history = History(name)
    history.add(0, summary, rates, trials=trials)
    history.facts = _facts(built, settings, summary, len(batches), seconds, rates.lambda_int)
    pairs = tuple(strongest_pairs(summary, 5))
    return Inspection(history, summary, rates, pairs, found=lambda_int is None)


def _strength(settings: Settings) -> float | None:
    """Return lambda_int, None if it is to be found; raise a UserError for a wrong one."""
    if settings.lambda_int is None:
        return None
    if not 0 <= settings.lambda_int < math.inf:
        raise UserError(
            f"--lambda-int {settings.lambda_int:g}: expected a finite number, 0 or more."
        )
    if settings.lambda_int > 0 and settings.order != 3:
        raise UserError(
            f"--lambda-int {settings.lambda_int:g} needs the third derivative D3, which --order "
            f"{settings.order} leaves out: use --order 3, or --lambda-int 0."
        )
    return settings.lambda_int


def _hint(data: Any) -> str:
    """Return how the data was interpreted, where this may surprise the user."""
    if isinstance(data, list) and data and all(isinstance(x, Tensor) for x in data):
        return (
            " (A list of tensors is taken as one batch. For several batches of one tensor each, "
            "return iter(data) or a DataLoader.)"
        )
    return ""


def take_batches(data: Any, most: int) -> UserList[Any]:
    """Return the first batches of the data; not as a list: one of tensors would be one batch."""
    if most < 1:
        raise UserError(f"--max-batches {most}: expected 1 or more.")
    batches = UserList(islice(iter(as_batches(data)), most))
    if not batches:
        raise UserError("The data is empty: there is no batch to measure.")
    return batches


def _facts(
    built: Built,
    settings: Settings,
    summary: Summary,
    batches: int,
    seconds: float,
    lambda_int: float,
) -> dict[str, str]:
    """Describe how it was measured."""
    from newton_summary import __version__

    model = built.model
    first = next(iter(model.parameters()))
    count = sum(p.numel() for p in model.parameters())
    every = len(built.data) if hasattr(built.data, "__len__") and batches > 1 else batches
    which = f"{batches} batch{'es' if batches > 1 else ''}"
    if every > batches:
        which = f"the first {batches} of {every:,} batches"
    return {
        "model": f"{type(model).__name__}, {count:,} parameters, "
        f"in {'training' if model.training else 'evaluation'} mode",
        "loss": f"{getattr(built.loss_fn, '__name__', kind_of(built.loss_fn))}, "
        f"{float(summary.loss):.6g} at the start",
        "data": f"{summary.num_samples:,} samples in {which}",
        "partition": f"{settings.partition}, {len(summary)} group{'s' if len(summary) > 1 else ''}",
        "direction": "gradient of the same data",
        "order": str(settings.order),
        "backend": f"{summary.backend} (asked for: {settings.backend})",
        "lambda_int": f"{lambda_int:g}",
        "device": f"{first.device}, {str(first.dtype).removeprefix('torch.')}",
        "time": f"{seconds:.2f} s",
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "versions": f"newton_summary {__version__}, torch {torch.__version__}, "
        f"Python {platform.python_version()}",
        "command": shlex.join(["newton-summary", *sys.argv[1:]]),
    }
