"""Long use: what many calls leave behind in the process."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import threading
from collections.abc import Callable
from typing import Any

import torch

import newton_summary as ns
from interrupts import KINDS, Problem, loss_fn


def failing(problem: Problem) -> Callable[[], Any]:
    """Return a measurement of a loss that raises in the midst of it."""

    def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        loss_fn(model, batch)
        raise ArithmeticError

    def run() -> None:
        with contextlib.suppress(ArithmeticError):
            ns.summarize(problem.model, loss, problem.batch)

    return run


def sequences(_: Problem) -> Callable[[], Any]:
    """Return a measurement of what the sweep passes as one operation for all steps."""
    lstm, gru = torch.nn.LSTM(3, 4), torch.nn.GRU(4, 5)
    x, y, lengths = torch.randn(6, 2, 3), torch.randint(1, 5, (2, 2)), torch.full((2,), 6)

    def loss(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        logs = gru(lstm(batch)[0])[0].log_softmax(-1)
        return torch.nn.functional.ctc_loss(logs, y, lengths, lengths // 3)

    model = torch.nn.ModuleList([lstm, gru])
    return lambda: ns.summarize(model, loss, x, num_samples=2, backend="sweep")


USES = {
    **KINDS,
    "a loss that fails": failing,
    "sequences": sequences,
    "a model of its own": lambda _: Problem,
    "a page": lambda p: lambda: p.summary._repr_html_(),
}


def held() -> dict[str, float]:
    """Return what the process holds."""
    gc.collect()
    with contextlib.suppress(AttributeError):  # of glibc: memory that is free goes back
        ctypes.CDLL(None).malloc_trim(0)
    objects = gc.get_objects()
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[1])
    return {
        "objects": len(objects),
        "tensors": sum(issubclass(type(x), torch.Tensor) for x in objects),
        "threads": threading.active_count(),
        "files": len(os.listdir("/proc/self/fd")),
        "MiB": pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
    }


def growth(use: str, calls: int, before: int = 20) -> dict[str, float]:
    """Return by how much the process holds more after some calls, in the lesser of two rounds.

    A record of each measurement is meant to be kept by what trains.
    """
    problem = Problem()
    run = USES[use](problem)

    def repeat(times: int) -> dict[str, float]:
        for _ in range(times):
            run()
            problem.model.log.clear()  # a step of training keeps its inputs there
        records = sum(len(getattr(trainer, "history", ())) for trainer in problem.trainers)
        return held() | {"records": records}

    def round_of(first: dict[str, float]) -> tuple[dict[str, float], dict[str, float]]:
        last = repeat(calls)
        grown = {name: value - first[name] for name, value in last.items()}
        grown["objects"] -= grown.pop("records")
        return grown, last

    once, last = round_of(repeat(before))
    again, _ = round_of(last)  # what is kept for a while, to be read at once, is no growth
    return {name: min(once[name], again[name]) for name in once}


def grows(use: str, calls: int, before: int = 20) -> str:
    """Return what grows with the calls, if anything does."""
    limits = {"objects": calls / 2, "tensors": calls / 2, "threads": 0, "files": 0}
    limits["MiB"] = 1 + calls / 1000
    grown = growth(use, calls, before)
    return ", ".join(f"{grown[x]:g} {x} more" for x, limit in limits.items() if grown[x] > limit)
