"""Trainings on a disk that is really full: a small file system in memory, which takes root."""

from __future__ import annotations

import subprocess
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

from experiment_cases import tiny
from kills import OPTIMIZERS, content
from newton_summary.cli import main as cli
from newton_summary.errors import CannotWriteError
from newton_summary.experiments.config import MeasureConfig
from newton_summary.experiments.training import train

CONFIG = tiny(OPTIMIZERS["default"], epochs=4, measure=MeasureConfig(every=2, samples=20))


def can_mount() -> bool:
    """Whether there is a file system in memory here, and root to mount it."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            with small_disk(Path(folder) / "disk", "size=4k"):
                return True
        except (OSError, subprocess.CalledProcessError):
            return False


@contextmanager
def small_disk(path: Path, limit: str) -> Iterator[None]:
    """Mount a file system with a limit, such as ``size=300k`` or ``nr_inodes=5``."""
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", limit, "newton-summary-test", path]
    subprocess.run(command, check=True, capture_output=True)
    try:
        yield
    finally:
        subprocess.run(["umount", path], check=True)


def give_room(path: Path) -> None:
    """Lift the limits."""
    limits = "remount,size=100m,nr_inodes=1000"
    subprocess.run(["mount", "-o", limits, path], check=True)


def fill(folder: Path, limits: list[str]) -> int:
    """Train on a full disk, and go on after there is room; return how often it was full.

    Raises:
        AssertionError: If it says more or less than one line, or does not end as on a large disk.
    """
    whole, told = content(train(CONFIG, folder / "whole")), []
    for limit in limits:
        disk = folder / limit
        with small_disk(disk, limit), warnings.catch_warnings():
            warnings.simplefilter("error")  # nothing is damaged
            try:
                train(CONFIG, disk / "run")
            except CannotWriteError as error:
                told.append(str(error))
            give_room(disk)
            assert content(train(CONFIG, disk / "run")) == whole, limit
    for line in told:
        assert line.startswith(str(folder)) and "Free some space" in line and "\n" not in line
    return len(told)


def report_on(folder: Path, limits: list[str]) -> int:
    """Write reports to a full disk; return how often it was full."""
    train(CONFIG, folder / "runs" / "run")
    full = 0
    for limit in limits:
        disk, err = folder / limit, StringIO()
        with small_disk(disk, limit), redirect_stdout(StringIO()), redirect_stderr(err):
            code = cli.main(["report", str(folder / "runs"), "--out", str(disk / "out")])
            full += code != 0
            assert (code, err.getvalue().count("\n")) in [(0, 0), (2, 1)], err.getvalue()
            assert code == 0 or "Free some space" in err.getvalue()
            give_room(disk)
            assert cli.main(["report", str(folder / "runs"), "--out", str(disk / "out")]) == 0
    return full
