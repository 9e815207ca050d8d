"""Signals at random moments of a training, which goes on to the same end afterwards."""

from __future__ import annotations

import os
import random
import signal
import time
import warnings
from pathlib import Path
from typing import Any

from experiment_cases import tiny
from newton_summary.experiments.config import (
    AdamConfig,
    ExperimentConfig,
    KFACConfig,
    MeasureConfig,
    NewtonSummaryConfig,
    SGDConfig,
)
from newton_summary.experiments.rundir import Run
from newton_summary.experiments.training import train

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
CLOCKS = {"seconds", "evaluation_seconds", "measure_seconds", "memory_gib"}
OPTIMIZERS = {
    "as-run": NewtonSummaryConfig("as-run", lr=0.03, curvature_batch_size=20, summary_period=1),
    "as-published": NewtonSummaryConfig("as-published", curvature_batch_size=20, summary_period=2),
    "default": NewtonSummaryConfig(curvature_batch_size=20, summary_period=2),
    "adam": AdamConfig(),
    "kfac": KFACConfig(covariance_period=2, inverse_period=3),
    "sgd": SGDConfig(),
}


def metrics(run: Run) -> list[dict[str, Any]]:
    """Return the rows without what a clock says."""
    return [{k: v for k, v in row.items() if k not in CLOCKS} for row in run.rows]


def content(run: Run) -> list[Any]:
    """Return all that a run has found, to compare to the bit."""
    measured = [
        (m.epoch, m.kind, m.eta.tolist(), m.summary.hessian().tolist()) for m in run.summaries()
    ]
    return [metrics(run), measured]


def start(config: ExperimentConfig, path: Path) -> int:
    """Train in a process of its own, and return its number."""
    process = os.fork()
    if process == 0:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                train(config, path)
        finally:
            os._exit(0)
    return process


def stop_again_and_again(name: str, folder: Path, seed: int, most: int = 20) -> int:
    """Stop a training until it ends of itself; return how often that was.

    Raises:
        AssertionError: If it does not end as one that was not stopped.
    """
    config = tiny(OPTIMIZERS[name], epochs=8, measure=MeasureConfig(every=2, samples=20))
    began = time.monotonic()
    whole = train(config, folder / "whole")
    seconds, numbers, stopped = time.monotonic() - began, random.Random(seed), 0
    for _ in range(most):
        process = start(config, folder / "cut")
        time.sleep(numbers.uniform(0, seconds / 2))
        if os.waitpid(process, os.WNOHANG)[0]:
            break
        os.kill(process, numbers.choice(SIGNALS))
        os.waitpid(process, 0)
        stopped += 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is damaged
        assert content(train(config, folder / "cut")) == content(whole), name
    return stopped
