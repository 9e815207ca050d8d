"""Read a run directory: what ``newton-summary run`` writes, and all that a report needs.

config.json       the whole configuration
metrics.jsonl     one line per epoch, from epoch 0, the start
summaries.pt      summaries with their learning rates, by epoch
checkpoint.pt     everything the run needs to resume
environment.json  versions, machine and times of each session
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import torch

from newton_summary.display.names import dotted_names
from newton_summary.errors import UserError
from newton_summary.history import History, Measured

CONFIG, METRICS, SUMMARIES, CHECKPOINT, ENVIRONMENT = (
    "config.json",
    "metrics.jsonl",
    "summaries.pt",
    "checkpoint.pt",
    "environment.json",
)

# Metrics that are drawn as curves.
CURVES = (
    *("train_loss", "validation_loss", "test_loss", "validation_accuracy", "test_accuracy"),
    "lr",
)

Row = dict[str, Any]


def read_history(path: Path) -> History:
    """Return what figures and pages show of a run; full-batch summaries where there are any.

    Raises:
        UserError: If the directory is not a run directory, or a file in it cannot be read.
    """
    config, rows = read_config(path), read_rows(path / METRICS)
    every = read_summaries(path)
    curves = {
        metric: [(row["epoch"], row[metric]) for row in rows if row.get(metric) is not None]
        for last in rows[-1:]
        for metric in last
        if metric in CURVES
    }
    if len({value for _, value in curves.get("lr", [])}) == 1:
        del curves["lr"]  # constant: the facts have it
    session = (read_environment(path).get("sessions") or [{}])[-1]
    facts = {key: str(value) for key, value in dotted_names(config)}
    facts |= {key: str(value) for key, value in session.items() if value is not None}
    seconds = [row["seconds"] for row in rows if row["epoch"] > 0]
    if seconds:
        facts["time"] = f"{statistics.median(seconds):.3g} s per epoch"
    facts["command"] = " ".join(session.get("command", []))
    return History(str(path), [m for m in every if m.kind == "full"] or every, curves, facts)


def read_config(path: Path) -> dict[str, Any]:
    """Return the configuration of a run as plain values."""
    file = path / CONFIG
    try:
        config = json.loads(file.read_text())
    except FileNotFoundError:
        raise UserError(f"{path} is not a run directory: it has no {CONFIG}.") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read: {error!r}.") from None
    if not isinstance(config, dict):
        raise UserError(f"{file} is not a configuration: it has no fields.")
    return config


def read_rows(file: Path) -> list[Row]:
    """Return the complete lines of a metrics file; a kill may have cut the last one."""
    rows: list[Row] = []
    if not file.is_file():
        return rows
    for line in file.read_text().splitlines(keepends=True):
        try:
            row = json.loads(line) if line.endswith("\n") else None
        except ValueError:
            row = None
        if row is None:
            break
        rows.append(row)
    return rows


def read_summaries(path: Path) -> list[Measured]:
    """Return the summaries of a run."""
    file = path / SUMMARIES
    return [Measured.from_state_dict(s) for s in read_tensors(file)] if file.is_file() else []


def read_environment(path: Path) -> dict[str, Any]:
    """Return the sessions of a run."""
    try:
        content: dict[str, Any] = json.loads((path / ENVIRONMENT).read_text())
    except (OSError, ValueError):
        return {"sessions": []}
    return content


def read_tensors(file: Path) -> Any:
    """Return what ``torch.save`` has written; nothing in the file is executed."""
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # pickle and zip raise many kinds
        raise UserError(f"{file} cannot be read ({type(error).__name__}). Delete it.") from None
