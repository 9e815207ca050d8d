"""Cells of a benchmark in processes side by side, each result a line of a file."""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

Cell = dict[str, Any]


def read(path: Path) -> list[Cell]:
    return [json.loads(line) for line in path.open()] if path.exists() else []


def run_cells(
    todo: Iterable[Cell], train: Callable[[Cell], Cell], out: Path, workers: int, seconds: float
) -> int:
    """Run cells, in order, and append each to the file as it ends; start none after ``seconds``."""
    end = time.monotonic() + seconds
    context = multiprocessing.get_context("spawn")
    jobs, results = context.SimpleQueue(), context.SimpleQueue()
    processes = [context.Process(target=_work, args=(jobs, results, train)) for _ in range(workers)]
    for process in processes:
        process.start()
    waiting = iter(todo)
    for _ in processes:
        jobs.put(next(waiting, None))
    count, busy = 0, len(processes)
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("a") as file:
        while busy:
            cell = results.get()
            if cell is None:
                busy -= 1
                continue
            file.write(json.dumps(cell) + "\n")
            file.flush()
            count += 1
            jobs.put(next(waiting, None) if time.monotonic() < end else None)
    for process in processes:
        process.join()
    return count


def _work(jobs: Any, results: Any, train: Callable[[Cell], Cell]) -> None:
    torch.set_num_threads(1)
    while (cell := jobs.get()) is not None:
        start = time.perf_counter()
        try:
            cell = train(cell)
        except Exception as error:  # a cell that fails is a result too
            cell["error"] = f"{type(error).__name__}: {error}"
        cell["whole_seconds"] = round(time.perf_counter() - start, 2)
        results.put(cell)
    results.put(None)
