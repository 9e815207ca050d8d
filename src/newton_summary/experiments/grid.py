"""Grids of hyperparameters and seeds: one run directory per point."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from newton_summary.errors import UserError
from newton_summary.experiments.config import ExperimentConfig, flatten
from newton_summary.experiments.recipes import RECIPES

LONGEST_NAME = 120
CONNECTING = 10  # seconds to wait for a cluster
NOT_IN_NAME = {"recipe", "epochs", "data.root", "data.download", "seed", "graph_steps"}


def run_name(config: ExperimentConfig) -> str:
    """Return a name for a run: how it differs from its recipe, and its seed.

    >>> from dataclasses import replace
    >>> run_name(replace(RECIPES["rosenbrock"](), batch_size=2))
    'batch_size=2,seed=0'
    """
    now = flatten(config)
    recipe = RECIPES.get(config.recipe)
    default = {} if recipe is None else flatten(recipe())
    changes = [n for n in now if n not in NOT_IN_NAME and now[n] != default.get(n)]
    name = ",".join(f"{n}={now[n]}".replace("/", "_") for n in [*changes, "seed"])
    if len(name) > LONGEST_NAME:
        digest = hashlib.md5(name.encode(), usedforsecurity=False).hexdigest()[:8]
        name = f"{name[: LONGEST_NAME - 9]}-{digest}"
    return name


@dataclass(frozen=True)
class Result:
    """How a run of a grid ended."""

    config: ExperimentConfig
    path: Path
    outcome: dict[str, Any] | None  # None if it failed
    error: str | None = None
    skipped: bool = False  # it was finished already


def run_one(config: ExperimentConfig, path: Path, side_by_side: int = 1) -> Result:
    """Train one point; errors are returned, so that the other points continue."""
    import torch

    from newton_summary.experiments.results import as_dict, outcome
    from newton_summary.experiments.rundir import Run
    from newton_summary.experiments.training import train
    from newton_summary.run_directory import CONFIG

    if side_by_side != 1:
        torch.set_num_threads(1)
    try:
        known = Run.load(path) if (path / CONFIG).is_file() else None
        done = known is not None and known.epoch >= config.epochs
        run = known.until(config) if known is not None and done else None
        run = run or train(config, path, side_by_side=side_by_side)
        return Result(config, path, as_dict(outcome(run)), skipped=done)
    except Exception as error:  # whatever it is, the other runs do not depend on it
        text = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        return Result(config, path, None, text.splitlines()[0] if text else "unknown")


def run_all(
    configs: Sequence[ExperimentConfig],
    root: Path,
    jobs: int,
    done: Callable[[Result], None],
    scheduler: str | None = None,
) -> list[Result]:
    """Train all points, some at a time, and return how they ended, in order.

    Args:
        configs: The points.
        root: Directory of the run directories; on a cluster, one that all machines see.
        jobs: How many at a time, in processes with one thread each.
        done: Called after each run.
        scheduler: Address of a dask scheduler whose workers train instead of this machine.

    Raises:
        UserError: If the cluster cannot be used, or a process dies. Finished runs are kept.
    """
    try:
        from joblib import Parallel, delayed, parallel_config
    except ImportError:
        raise UserError(
            "A grid needs joblib: run pip install -e '.[experiments]' in your clone."
        ) from None
    names = [run_name(config) for config in configs]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UserError(f"The grid contains {twice} twice.")
    root = root.absolute()  # workers have other working directories
    beside = 0 if scheduler else jobs  # 0: not known
    work = [delayed(run_one)(c, root / n, beside) for c, n in zip(configs, names, strict=True)]
    results: dict[Path, Result] = {}
    with ExitStack() as cluster:
        if scheduler is not None:
            cluster.enter_context(connected(scheduler))
            # One task per run: joblib would batch short ones, which would then fail together.
            cluster.enter_context(parallel_config(backend="dask"))
        try:
            options = {"n_jobs": -1 if scheduler else jobs, "return_as": "generator_unordered"}
            for result in Parallel(batch_size=1, **options)(work):
                results[result.path] = result
                done(result)
        except Exception as error:  # not from a run, whose errors are results
            raise UserError(
                f"A process exited before its run was finished, with {len(results)} of "
                f"{len(work)} runs done ({type(error).__name__}: "
                f"{str(error).splitlines()[0] if str(error) else 'no message'}). Run the same "
                f"command to resume."
            ) from None
    return [results[root / name] for name in names]


@contextmanager
def connected(scheduler: str) -> Iterator[None]:
    """Connect to a dask cluster."""
    try:
        distributed: Any = importlib.import_module("distributed")
    except ImportError:
        raise UserError(
            "A grid on a cluster needs dask: run pip install -e '.[cluster]' in your clone."
        ) from None
    try:
        client = distributed.Client(scheduler, timeout=CONNECTING)
    except (OSError, ValueError) as error:
        raise UserError(
            f"Cannot reach a dask scheduler at {scheduler}: {str(error).splitlines()[0]}"
        ) from None
    with client:
        threads = client.nthreads()  # of each worker
        if not threads:
            raise UserError(f"The scheduler at {scheduler} has no workers: start dask worker.")
        if max(threads.values()) > 1:
            raise UserError(
                f"Workers of {scheduler} have several threads, so that runs would share torch's "
                f"random numbers. Start them with dask worker --nthreads 1."
            )
        yield


# --- the table at the end ------------------------------------------------------------------------


def table(results: Sequence[Result], varied: Sequence[str]) -> list[list[str]]:
    """Return rows of text, header first: each point with its numbers over seeds, best first."""
    from newton_summary.experiments.results import Spread

    columns = [name for name in varied if name != "seed"]
    points: dict[tuple[Any, ...], list[Result]] = {}
    for result in results:
        values = flatten(result.config)
        points.setdefault(tuple(values[name] for name in columns), []).append(result)
    rows = []
    for point, runs in points.items():
        numbers = {
            name: Spread(tuple(_value(run, name) for run in runs))
            for name in ("train_loss", "validation_loss", "test_loss", "test_accuracy")
        }
        lowest = min(numbers["train_loss"].finite, default=None)
        troubles = [
            f"{count} {what}"
            for what in ("diverged", "failed")
            if (count := sum(_status(run) == what for run in runs))
        ]
        mean = numbers["validation_loss"].mean
        cells = [
            *(str(value) for value in point),
            str(len(runs)),
            "-" if lowest is None else f"{lowest:.4g}",
            *(str(number) for number in numbers.values()),
            ", ".join(troubles),
        ]
        rows.append((bool(troubles), mean if mean == mean else float("inf"), cells))
    rows.sort(key=lambda row: row[:2])
    header = [*columns, "runs", "best train", "train", "validation", "test", "accuracy", "trouble"]
    return [header, *(cells for *_, cells in rows)]


def _value(result: Result, name: str) -> float:
    value = None if result.outcome is None else result.outcome[name]
    return float("nan") if value is None else float(value)


def _status(result: Result) -> str:
    return "failed" if result.outcome is None else str(result.outcome["status"])
