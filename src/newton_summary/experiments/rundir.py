"""Write a run directory, and compare one with its configuration.

Every write replaces some files and then the manifest, which makes them visible together. Anything
beyond the checkpoint belongs to epochs that are trained again when the run resumes.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from newton_summary.display.names import dotted_names, first_names
from newton_summary.errors import UserError
from newton_summary.experiments.config import ExperimentConfig, check, flatten, from_dict, to_dict
from newton_summary.history import Measured
from newton_summary.run_directory import (
    CHECKPOINT,
    CONFIG,
    ENVIRONMENT,
    MANIFEST,
    METRICS,
    SUMMARIES,
    Row,
    RunFiles,
    make_manifest,
    read_config,
    read_environment,
    read_rows,
    read_summaries,
)
from newton_summary.storage.reading import Damaged, load_tensors
from newton_summary.storage.writing import (
    PREVIOUS,
    cannot_write,
    is_part,
    make_folder,
    sync_folder,
    tensor_file,
    write_file,
)

LOCK_SECONDS = 3  # to wait for another process to release the directory

FORMER = {"optimizer.direction": "gradient"}  # fields of earlier versions that meant nothing
# Fields that may differ when a run resumes: where files are, how long to train, and how fast.
FREE = {"data.root", "data.download", "epochs", "recipe", "graph_steps", "optimizer.cuda_graph"}


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
        files = RunFiles(path)
        values = read_config(files)
        try:
            config = from_dict(values)
            check(config)
        except (UserError, ValueError, KeyError, TypeError, AttributeError) as error:
            why = f": {error}" if isinstance(error, UserError) else f" ({error!r})."
            raise UserError(f"{path / CONFIG} is not the configuration of a run{why}") from None
        known = flatten(config)
        fields = (both for both in dotted_names(values) if both not in FORMER.items())
        unknown = sorted(name for name, _ in fields if name not in known)
        if unknown:
            warnings.warn(
                f"{path / CONFIG} has fields of another version; ignoring them: "
                f"{first_names(unknown)}",
                stacklevel=2,
            )
        return cls(path, config, read_rows(files))

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
                    f"{self.path} contains another run: {name} is {old.get(name)} there and "
                    f"{new.get(name)} here. Choose another --run-dir."
                )

    def until(self, config: ExperimentConfig) -> Run:
        """Return the run as it was after the epochs of a configuration, which may be fewer."""
        self.check_same(config)
        rows = [row for row in self.rows if row["epoch"] <= config.epochs]
        return replace(self, config=config, rows=rows)

    def summaries(self) -> list[Measured]:
        """Read the summaries."""
        return read_summaries(RunFiles(self.path))

    def environment(self) -> dict[str, Any]:
        """Read the sessions of the run."""
        return read_environment(RunFiles(self.path))

    def column(self, name: str) -> list[float]:
        """Return a metric by epoch, nan where it is missing."""
        return [math.nan if row.get(name) is None else float(row[name]) for row in self.rows]


# --- reading -------------------------------------------------------------------------------------


def read_checkpoint(files: RunFiles) -> dict[str, Any] | None:
    """Return the last checkpoint, if there is one."""
    with files.opened(CHECKPOINT) as content:
        if content is None:
            return None
        state: dict[str, Any] = load_tensors(content)
        epoch = state.get("epoch") if isinstance(state, dict) else None
        if type(epoch) is not int or epoch < 0:
            raise Damaged("it is not a checkpoint")
        return state


def find_runs(paths: list[Path]) -> list[Run]:
    """Return the runs in directories and below them, by path.

    A directory that cannot be read is skipped with a warning that names it.

    Raises:
        UserError: If no run is left.
    """
    runs: dict[Path, Run] = {}
    problems: list[str] = []
    for path in paths:
        if not path.is_dir():
            raise UserError(f"{path} is not a directory.")
        found = sorted(file.parent for file in path.rglob(CONFIG))
        if not found:
            raise UserError(f"There is no run in {path}: no {CONFIG} in it or below.")
        for folder in found:
            if folder.resolve() in runs:
                continue
            try:
                run = Run.load(folder)
                run.summaries(), run.environment()
            except UserError as error:
                problems.append(str(error))
            else:
                runs[folder.resolve()] = run
    if not runs:
        raise UserError(
            problems[0] + (f" In all, {len(problems)} runs cannot be read." if problems[1:] else "")
        )
    for problem in problems:
        warnings.warn(f"skipped: {problem}", stacklevel=2)
    return list(runs.values())


# --- writing -------------------------------------------------------------------------------------


def finite(value: Any) -> Any:
    """Replace numbers that JSON cannot represent by None."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def encoded(name: str, content: Any) -> bytes | memoryview:
    """Return a file as its name demands: tensors, a line of JSON for each row, or JSON."""
    if name == SUMMARIES:
        return tensor_file([measured.state_dict() for measured in content])
    if name == CHECKPOINT:
        return tensor_file(content)
    if name == METRICS:
        return "".join(json.dumps(finite(row)) + "\n" for row in content).encode()
    return (json.dumps(content, indent=2) + "\n").encode()


class RunWriter:
    """Writes a run directory, epoch by epoch.

    Args:
        path: The directory; made when the first file is written.
        config: What to run. It is an error if the directory has another configuration.
        writes: Whether to write: of several processes only the first does.
    """

    def __init__(self, path: Path, config: ExperimentConfig, writes: bool = True):
        self.path, self.config, self.writes = path, config, writes
        self.rows: list[Row] = []
        self.summaries: list[Measured] = []
        self.environment: dict[str, Any] = {"sessions": []}
        self._manifest: dict[str, Any] = {}
        self._lock: int | None = None  # a descriptor of the directory
        self.known = self._check() if writes else None

    def _check(self) -> Run | None:
        """Return the run in the directory, or raise if this one may not be written there."""
        if self.path.exists() and not self.path.is_dir():
            raise UserError(f"{self.path} is a file, not a directory.")
        if not self.path.is_dir() or all(is_part(file) for file in self.path.iterdir()):
            return None
        if not any((self.path / f"{CONFIG}{end}").is_file() for end in ("", PREVIOUS)):
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
        """Start or resume: drop everything beyond the checkpoint, and return the checkpoint."""
        make_folder(self.path)
        self._acquire()
        self._check()  # again, now that no other process can write
        for file in filter(is_part, self.path.iterdir()):
            file.unlink()  # left by a kill
        files = RunFiles(self.path, (METRICS, SUMMARIES, CHECKPOINT))
        checkpoint = read_checkpoint(files)
        rows, summaries = read_rows(files), read_summaries(files)
        self.environment = read_environment(files)
        if files.manifest is None and (rows or checkpoint):
            raise UserError(
                f"{self.path} has no {MANIFEST}: it was written by an older version, or is an "
                "incomplete copy. Choose another --run-dir."
            )
        last = -1 if checkpoint is None else int(checkpoint["epoch"])
        if last >= len(rows):
            raise UserError(f"{self.path / METRICS} ends before epoch {last} of {CHECKPOINT}.")
        self._manifest = dict(files.manifest or {})
        try:  # to give the files of the state that was read their names back, the manifest last
            for name, place in files.places.items():
                if place.name != name:
                    os.replace(place, self.path / name)
        except OSError as error:
            raise cannot_write(self.path, error) from None
        self.rows = rows[: last + 1]
        self.summaries = [m for m in summaries if m.epoch <= last]
        self.environment["sessions"].append({**session, "from_epoch": max(last, 0)})
        contents: dict[str, Any] = {CONFIG: to_dict(self.config)}
        if self.rows != rows or len(self.summaries) < len(summaries):
            contents |= {SUMMARIES: self.summaries, METRICS: self.rows}
        self._replace({**contents, ENVIRONMENT: self.environment})
        return checkpoint

    def _acquire(self) -> None:
        """Lock the directory for as long as this process lives."""
        try:
            import fcntl
        except ImportError:  # not on Windows
            return
        self._lock = os.open(self.path, os.O_RDONLY)
        until = time.monotonic() + LOCK_SECONDS  # a process that was killed may still be ending
        while True:
            try:
                return fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                if time.monotonic() > until:
                    self.close()
                    raise UserError(f"{self.path} is being written by another process.") from None
            time.sleep(0.05)

    def add_summary(self, measured: Measured) -> None:
        """Keep a summary; it is written with its epoch."""
        self.summaries.append(measured)

    def add_row(self, row: Row, checkpoint: Mapping[str, Any] | None) -> None:
        """Write an epoch: the summaries, its metrics, and the state to resume from."""
        self.rows.append(row)
        contents: dict[str, Any] = {METRICS: self.rows}
        if self.summaries and self.summaries[-1].epoch == row["epoch"]:
            contents[SUMMARIES] = self.summaries
        if checkpoint is not None:
            contents[CHECKPOINT] = checkpoint
        self._replace(contents)

    def add_environment(self, **values: Any) -> None:
        """Add facts about the whole run."""
        self.environment |= values
        self._replace({ENVIRONMENT: self.environment})

    def _replace(self, contents: Mapping[str, Any]) -> None:
        """Replace files, and then the manifest, which makes them valid.

        The previous manifest is kept if it was that of other epochs: it helps to recover from a
        damaged file.
        """
        if not self.writes:
            return
        for name, content in contents.items():
            file = encoded(name, content)
            write_file(self.path / name, file, keep=True)
            self._manifest[name] = [len(file), hashlib.sha256(file).hexdigest()]
        sync_folder(self.path)
        manifest = encoded(MANIFEST, make_manifest(self._manifest))
        write_file(self.path / MANIFEST, manifest, keep=METRICS in contents)
        sync_folder(self.path)

    def close(self) -> Run:
        """Unlock the directory; return the run as it is now."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
        return Run(self.path, self.config, list(self.rows))
