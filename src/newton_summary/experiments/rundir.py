"""Write a run directory, and compare one with its configuration.

Files are replaced atomically, the checkpoint last: whatever lies beyond it belongs to an incomplete
epoch, and is dropped when the run resumes.
"""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import torch

from newton_summary.errors import UserError
from newton_summary.experiments.config import (
    ExperimentConfig,
    flatten,
    from_dict,
    to_dict,
)
from newton_summary.history import Measured
from newton_summary.run_directory import (
    CHECKPOINT,
    CONFIG,
    ENVIRONMENT,
    METRICS,
    SUMMARIES,
    Row,
    read_config,
    read_environment,
    read_rows,
    read_summaries,
    read_tensors,
)

# Fields that may differ when a run resumes: where files are, how long to train, and how fast.
FREE = {"data.root", "data.download", "epochs", "recipe", "graph_steps"}


@dataclass
class Run:
    """A run directory that has been read."""

    path: Path
    config: ExperimentConfig
    rows: list[Row]

    @classmethod
    def load(cls, path: Path) -> Run:
        """Read configuration and metrics.

        Raises:
            UserError: If the directory is not one of a run.
        """
        values = read_config(path)
        try:
            config = from_dict(values)
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path / CONFIG} cannot be read: {error!r}.") from None
        return cls(path, config, read_rows(path / METRICS))

    @property
    def epoch(self) -> int:
        """The last epoch that has a row; -1 without any."""
        return int(self.rows[-1]["epoch"]) if self.rows else -1

    @property
    def diverged(self) -> bool:
        """Whether the run ended because its loss was not finite."""
        return bool(self.rows) and self.rows[-1]["status"] == "diverged"

    @property
    def finished(self) -> bool:
        """Whether there is nothing left to do."""
        return self.epoch >= self.config.epochs or self.diverged

    def check_same(self, config: ExperimentConfig) -> None:
        """Raise a UserError if the run has another configuration."""
        old, new = flatten(self.config), flatten(config)
        for name in sorted({*old, *new} - FREE):
            if old.get(name) != new.get(name):
                raise UserError(
                    f"{self.path} holds another run: there {name} = {old.get(name)}, here "
                    f"{new.get(name)}. Choose another --run-dir."
                )

    def until(self, config: ExperimentConfig) -> Run:
        """Return the run as it was after the epochs of a configuration, which may be fewer."""
        self.check_same(config)
        rows = [row for row in self.rows if row["epoch"] <= config.epochs]
        return replace(self, config=config, rows=rows)

    def summaries(self) -> list[Measured]:
        """Read the summaries."""
        return read_summaries(self.path)

    def environment(self) -> dict[str, Any]:
        """Read the sessions of the run."""
        return read_environment(self.path)

    def column(self, name: str) -> list[float]:
        """Return a metric by epoch, nan where it is missing."""
        return [math.nan if row.get(name) is None else float(row[name]) for row in self.rows]


# --- reading -------------------------------------------------------------------------------------


def read_checkpoint(path: Path) -> dict[str, Any] | None:
    """Return the last checkpoint, if there is one."""
    file = path / CHECKPOINT
    return read_tensors(file) if file.is_file() else None


def find_runs(paths: list[Path]) -> list[Run]:
    """Return the runs in directories and below them, by path."""
    runs: dict[Path, Run] = {}
    for path in paths:
        if not path.is_dir():
            raise UserError(f"{path} is not a directory.")
        found = sorted(file.parent for file in path.rglob(CONFIG))
        if not found:
            raise UserError(f"There is no run in {path}: no {CONFIG} in it or below it.")
        for folder in found:
            runs.setdefault(folder.resolve(), Run.load(folder))
    return list(runs.values())


# --- writing -------------------------------------------------------------------------------------


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Write a file that replaces the old one once it is complete."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as stream:
            yield stream
        part.replace(path)
    except OSError as error:
        raise cannot_write(path, error) from None
    except RuntimeError as error:  # torch.save, on a full disk
        if "write" not in str(error):
            raise
        raise UserError(f"{path} cannot be written: is the disk full?") from None
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)


def cannot_write(path: Path, error: OSError) -> UserError:
    """Return the error for a failed write."""
    hint = " Free some space, then run the same command to resume." if _is_full(error) else ""
    return UserError(f"{path} cannot be written: {error.strerror or error}.{hint}")


def _is_full(error: OSError) -> bool:
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def write_json(path: Path, value: Any) -> None:
    """Replace a JSON file."""
    with replacing(path) as stream:
        stream.write((json.dumps(value, indent=2) + "\n").encode())


def finite(value: Any) -> Any:
    """Replace numbers that JSON cannot represent by None."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


class RunWriter:
    """Writes a run directory, epoch by epoch.

    Args:
        path: The directory; made when the first file is written.
        config: What is to be run. If the directory holds another configuration, this is an error.
    """

    def __init__(self, path: Path, config: ExperimentConfig):
        self.path, self.config = path, config
        self.rows: list[Row] = []
        self.summaries: list[Measured] = []
        self._lock: int | None = None  # a descriptor of the directory
        self.known = self._check()

    def _check(self) -> Run | None:
        """Return the run in the directory, or raise if this one may not be written there."""
        if self.path.exists() and not self.path.is_dir():
            raise UserError(f"{self.path} is a file, not a directory.")
        if not self.path.is_dir() or all(_is_part(file) for file in self.path.iterdir()):
            return None
        if not (self.path / CONFIG).is_file():
            raise UserError(
                f"{self.path} is not a run directory: it is not empty and has no {CONFIG}."
            )
        run = Run.load(self.path)
        run.check_same(self.config)
        if self.config.epochs < run.epoch:
            raise UserError(
                f"{self.path} already has {run.epoch} epochs, more than requested; request at "
                f"least as many, or choose another --run-dir."
            )
        return replace(run, config=self.config)

    def start(self, session: Mapping[str, Any]) -> dict[str, Any] | None:
        """Start or resume: drop what lies beyond the checkpoint, and return the checkpoint."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise cannot_write(self.path, error) from None
        self._acquire()
        self.known = self._check()  # again, now that no other process can write
        for file in filter(_is_part, self.path.iterdir()):
            file.unlink()  # left by a kill
        checkpoint = read_checkpoint(self.path)
        last = -1 if checkpoint is None else int(checkpoint["epoch"])
        self.rows = [row for row in read_rows(self.path / METRICS) if row["epoch"] <= last]
        if last >= 0:
            self.summaries = [m for m in read_summaries(self.path) if m.epoch <= last]
        write_json(self.path / CONFIG, to_dict(self.config))
        with replacing(self.path / METRICS) as stream:
            stream.writelines(_line(row) for row in self.rows)
        self._write_summaries()
        environment = read_environment(self.path)
        sessions = [*environment.get("sessions", []), {**session, "from_epoch": max(last, 0)}]
        write_json(self.path / ENVIRONMENT, {**environment, "sessions": sessions})
        return checkpoint

    def _acquire(self) -> None:
        """Lock the directory for as long as this process lives."""
        try:
            import fcntl
        except ImportError:  # not on Windows
            return
        self._lock = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.close()
            raise UserError(f"{self.path} is being written by another process.") from None

    def add_summary(self, measured: Measured) -> None:
        """Keep a summary; it is written with its epoch."""
        self.summaries.append(measured)

    def add_row(self, row: Row, checkpoint: Mapping[str, Any] | None) -> None:
        """Write an epoch: the summaries, its metrics, and the state to resume from."""
        if self.summaries and self.summaries[-1].epoch == row["epoch"]:
            self._write_summaries()
        try:
            with (self.path / METRICS).open("ab") as stream:
                stream.write(_line(row))
        except OSError as error:
            raise cannot_write(self.path / METRICS, error) from None
        self.rows.append(row)
        if checkpoint is not None:
            with replacing(self.path / CHECKPOINT) as stream:
                torch.save(checkpoint, stream)

    def add_environment(self, **values: Any) -> None:
        """Add facts on the whole run."""
        write_json(self.path / ENVIRONMENT, {**read_environment(self.path), **values})

    def _write_summaries(self) -> None:
        with replacing(self.path / SUMMARIES) as stream:
            torch.save([m.state_dict() for m in self.summaries], stream)

    def close(self) -> Run:
        """Unlock the directory; return the run as it is now."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
        return Run(self.path, self.config, list(self.rows))


def _is_part(file: Path) -> bool:
    """Whether a file is an incomplete one of :func:`replacing`."""
    return file.name.startswith(".") and file.name.endswith(".part")


def _line(row: Row) -> bytes:
    return (json.dumps(finite(row)) + "\n").encode()
