"""Grids of hyperparameters and seeds: one run directory per point."""

from __future__ import annotations

import hashlib
import importlib
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from newton_summary.display.names import file_name
from newton_summary.errors import UserError
from newton_summary.experiments.config import ExperimentConfig, flatten
from newton_summary.experiments.recipes import RECIPES

if TYPE_CHECKING:
    from newton_summary.experiments.results import Outcome

Task = tuple[ExperimentConfig, Path]

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
    safe = file_name(name, LONGEST_NAME)
    if safe != name:  # and those that differ in what was left out
        digest = hashlib.md5(name.encode(errors="replace"), usedforsecurity=False).hexdigest()[:8]
        safe = f"{safe[: LONGEST_NAME - 9]}-{digest}"
    return safe


@dataclass(frozen=True)
class Result:
    """The outcome of a run of a grid."""

    config: ExperimentConfig
    path: Path
    outcome: Outcome | None  # None if it failed
    error: str | None = None
    skipped: bool = False  # it was finished already


def run_one(config: ExperimentConfig, path: Path, side_by_side: int = 1) -> Result:
    """Train one point; errors are returned, so that the other points continue."""
    import torch

    from newton_summary.experiments.results import outcome
    from newton_summary.experiments.rundir import Run
    from newton_summary.experiments.training import train
    from newton_summary.run_directory import CONFIG

    if side_by_side != 1:
        torch.set_num_threads(1)
    try:
        known = Run.load(path) if (path / CONFIG).is_file() else None
        if known is not None and known.epoch >= config.epochs:
            return Result(config, path, outcome(known.until(config)), skipped=True)
        return Result(config, path, outcome(train(config, path, side_by_side=side_by_side)))
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
        jobs: How many to train at a time, in processes with one thread each.
        done: Called after each run.
        scheduler: Address of a dask scheduler whose workers train instead of this machine.

    Raises:
        UserError: If the cluster cannot be used. Finished runs are kept.
    """
    names = [run_name(config) for config in configs]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UserError(f"The grid contains {twice} twice.")
    root = root.absolute()  # workers have other working directories
    tasks = [(config, root / name) for config, name in zip(configs, names, strict=True)]
    if scheduler is not None:
        ended = on_cluster(tasks, scheduler)
    elif jobs > 1:
        ended = in_processes(tasks, jobs)
    else:
        ended = (run_one(*task) for task in tasks)
    results: dict[Path, Result] = {}
    for result in ended:
        results[result.path] = result
        done(result)
    return [results[root / name] for name in names]


# --- processes -----------------------------------------------------------------------------------


def in_processes(tasks: Sequence[Task], jobs: int) -> Iterator[Result]:
    """Train in processes of this machine; one that dies loses only its current run."""
    context = multiprocessing.get_context("spawn")  # a fork would share torch's threads
    waiting = deque(tasks)
    idle: list[tuple[Any, Any]] = []  # pipes and processes
    busy: dict[Any, tuple[Any, Task]] = {}  # processes and what they train, by pipe
    pipe: Any
    try:
        while waiting or busy:
            while waiting and len(busy) < jobs:
                if not idle:
                    pipe, other = context.Pipe()
                    process = context.Process(target=_work, args=(other, jobs), daemon=True)
                    process.start()
                    other.close()  # so that the pipe ends with the process
                    idle.append((pipe, process))
                pipe, process = idle.pop()
                busy[pipe] = process, waiting.popleft()
                pipe.send(busy[pipe][1])
            for pipe in connection.wait(list(busy)):
                process, task = busy.pop(pipe)
                try:
                    result = pipe.recv()
                    idle.append((pipe, process))
                except EOFError:
                    process.join()
                    code = process.exitcode
                    why = f"was killed by signal {-code}" if code < 0 else f"exited with {code}"
                    why += ", perhaps out of memory; run the same command to resume"
                    result = Result(*task, None, f"its process {why}")
                yield result
    finally:
        for process in (*(p for _, p in idle), *(p for p, _ in busy.values())):
            process.terminate()
            process.join()


def _work(pipe: Any, jobs: int) -> None:
    """Train what arrives through a pipe, as long as the other process lives."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the first process ends us
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with suppress(EOFError):
        while True:
            task: Task = pipe.recv()
            pipe.send(run_one(*task, jobs))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)


# --- dask ----------------------------------------------------------------------------------------


def on_cluster(tasks: Sequence[Task], scheduler: str) -> Iterator[Result]:
    """Train on the workers of a dask cluster, which replaces those that die."""
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
                f"Workers of {scheduler} have several threads, so runs would share torch's random "
                "numbers. Start them with dask worker --nthreads 1."
            )
        futures = {client.submit(run_one, *task, 0, pure=False): task for task in tasks}
        for future in distributed.as_completed(list(futures)):
            try:
                yield future.result()
            except Exception as error:  # a worker that died again and again
                reason = f"{type(error).__name__}: {error}".splitlines()[0]
                yield Result(*futures[future], None, reason)


# --- the table at the end ------------------------------------------------------------------------


def table(results: Sequence[Result], varied: Sequence[str]) -> list[list[str]]:
    """Return rows of text, header first: each point with its numbers over seeds, best first."""
    from newton_summary.experiments.results import group_by, spread, troubles

    columns = [name for name in varied if name != "seed"]
    points = group_by(results, lambda result: tuple(map(flatten(result.config).get, columns)))
    rows = []
    for point, runs in points.items():
        ended = [run.outcome for run in runs if run.outcome is not None]
        train, validation, test, accuracy = (
            spread(ended, name)
            for name in ("train_loss", "validation_loss", "test_loss", "test_accuracy")
        )
        problems = troubles(run.outcome.status if run.outcome else "failed" for run in runs)
        cells = [
            *map(str, (*point, len(runs))),
            f"{min(train.finite):.4g}" if train.finite else "-",
            *map(str, (train, validation, test, accuracy)),
            problems,
        ]
        mean = validation.mean
        rows.append((bool(problems), mean if mean == mean else float("inf"), cells))
    rows.sort(key=lambda row: row[:2])
    header = [*columns, "runs", "best train", "train", "validation", "test", "accuracy", "trouble"]
    return [header, *(cells for *_, cells in rows)]
