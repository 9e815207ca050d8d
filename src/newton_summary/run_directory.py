"""Read a run directory: what ``newton-summary run`` writes, and everything a report needs.

config.json       the whole configuration
metrics.jsonl     one line per epoch, from epoch 0, the start
summaries.pt      summaries with their learning rates, by epoch
checkpoint.pt     everything the run needs to resume
environment.json  versions, machine and times of each session
manifest.json     checksums of the files above; written last, so that they become visible together

Replaced files are kept with ``.previous`` appended to their names. They are read if a file is
damaged or a write was interrupted: files that belong together have the checksums of one manifest.
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from newton_summary.display.names import dotted_names
from newton_summary.errors import UserError
from newton_summary.history import History, Measured
from newton_summary.storage.reading import Damaged, content_of, explained, load_json, load_tensors
from newton_summary.storage.writing import PREVIOUS

CONFIG, METRICS, SUMMARIES, CHECKPOINT, ENVIRONMENT, MANIFEST = (
    "config.json",
    "metrics.jsonl",
    "summaries.pt",
    "checkpoint.pt",
    "environment.json",
    "manifest.json",
)
EDITABLE = (CONFIG, ENVIRONMENT)  # a change is warned of, and does no harm to a training

# Metrics that are drawn as curves.
CURVES = (
    *("train_loss", "validation_loss", "test_loss", "validation_accuracy", "test_accuracy"),
    "lr",
)
TIMES = ("seconds", "evaluation_seconds", "measure_seconds")

Row = dict[str, Any]
Manifest = Mapping[str, Sequence[Any]]  # size and sha256 by name


class RunFiles:
    """The files of a run directory that belong together.

    Args:
        path: The directory.
        needed: Files that must be intact; otherwise an older state is used.

    Attributes:
        places: Where each file is, the manifest last; one that was being replaced is at its
            earlier name.
        manifest: Their checksums; None for a directory that has no manifest.

    Raises:
        UserError: If no state is intact; the message names the file.
    """

    def __init__(self, path: Path, needed: Sequence[str] = (METRICS, SUMMARIES)):
        self.path, self.needed = path, needed
        self.manifest: Manifest | None = None
        self.places: dict[str, Path] = {}
        self._contents: dict[str, bytes] = {}  # of files that had their checksums
        for _ in range(10):  # another process may be writing it
            before = self._stamp()
            try:
                return self._choose()
            except UserError:
                if self._stamp() == before:
                    raise
        self._choose()

    def _stamp(self) -> Any:
        try:
            return (self.path / MANIFEST).stat().st_mtime_ns
        except OSError:
            return None

    def _choose(self) -> None:
        problems: list[str] = []
        for name in (MANIFEST, MANIFEST + PREVIOUS):
            self._contents = {}
            try:
                with explained(self.path / name):
                    manifest = _manifest(load_json(content_of(self.path / name)))
                self.places = {
                    n: self._find(n, entry, is_newest=not problems) for n, entry in manifest.items()
                }
            except FileNotFoundError:
                continue
            except UserError as error:
                problems.append(str(error))
                continue
            self.manifest = manifest
            self.places[MANIFEST] = self.path / name
            if problems:
                warnings.warn(f"{problems[0]} Using the state before the last write.", stacklevel=4)
            return
        if problems:
            raise UserError(problems[0])
        self.places = {
            name: file
            for name in (CONFIG, METRICS, SUMMARIES, CHECKPOINT, ENVIRONMENT)
            if (file := self.path / name).exists()
        }

    def _find(self, name: str, entry: Sequence[Any], is_newest: bool) -> Path:
        """Return the file with the size and the checksum of a manifest."""
        file = self.path / name
        editable = name in EDITABLE
        if not editable and name not in self.needed:
            return file
        for place in (file, file.with_name(name + PREVIOUS)) if is_newest or not editable else ():
            try:
                content = content_of(place)
            except FileNotFoundError:
                continue
            if [len(content), hashlib.sha256(content).hexdigest()] == entry:
                self._contents[name] = content
                return place
        if editable:
            if is_newest and file.exists():
                warnings.warn(f"{file} was changed after the run wrote it.", stacklevel=6)
            return file
        problem = "is damaged: its checksum differs" if file.exists() else "is missing"
        raise UserError(f"{file} {problem}. Restore it from a copy, or delete {self.path}.")

    @contextmanager
    def opened(self, name: str) -> Iterator[bytes | None]:
        """Yield the content of a file, None if the run has not written it yet.

        Errors become a UserError that names the file.
        """
        file = self.places.get(name, self.path / name)
        try:
            with explained(file):
                yield self._content(name, file)
        except UserError as error:
            advice = f"Restore it from a copy, or delete {self.path}."
            raise UserError(f"{error} {advice}") from None

    def _content(self, name: str, file: Path) -> bytes | None:
        if name not in self.places:
            return None
        try:
            return self._contents[name] if name in self._contents else content_of(file)
        except FileNotFoundError:
            if self.manifest is None:
                return None
            raise UserError(f"{file} is missing.") from None


def make_manifest(files: Manifest) -> dict[str, Any]:
    """Return a manifest, with its own checksum."""
    return {"files": files, "sha256": _own_digest(files)}


def _manifest(value: Any) -> Manifest:
    files = value.get("files") if isinstance(value, dict) else None
    if not isinstance(files, dict) or value.get("sha256") != _own_digest(files):
        raise Damaged("its checksum differs")
    for name, entry in files.items():
        if Path(name).name != name or not isinstance(entry, list) or len(entry) != 2:
            raise Damaged("it is not a manifest")
    return files


def _own_digest(files: Any) -> str:
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


# --- contents ------------------------------------------------------------------------------------


def read_history(path: Path) -> History:
    """Return what figures and pages show of a run; full-batch summaries where there are any.

    Raises:
        UserError: If the directory is not a run directory, or a file in it cannot be read.
    """
    files = RunFiles(path)
    config, rows, every = read_config(files), read_rows(files), read_summaries(files)
    curves = {
        metric: [(row["epoch"], row[metric]) for row in rows if row.get(metric) is not None]
        for last in rows[-1:]
        for metric in last
        if metric in CURVES
    }
    if len({value for _, value in curves.get("lr", [])}) == 1:
        del curves["lr"]  # constant: the facts have it
    session = (read_environment(files)["sessions"] or [{}])[-1]
    facts = {key: str(value) for key, value in dotted_names(config)}
    facts |= {key: str(value) for key, value in session.items() if value is not None}
    seconds = [row["seconds"] for row in rows if row["epoch"] > 0]
    if seconds:
        facts["time"] = f"{statistics.median(seconds):.3g} s per epoch"
    facts["command"] = " ".join(session.get("command", []))
    return History(str(path), [m for m in every if m.kind == "full"] or every, curves, facts)


def read_config(files: RunFiles) -> dict[str, Any]:
    """Return the configuration of a run as plain values."""
    if CONFIG not in files.places:
        raise UserError(f"{files.path} is not a run directory: it has no {CONFIG}.")
    with files.opened(CONFIG) as content:
        config = load_json(content or b"")
        if not isinstance(config, dict):
            raise Damaged("it is not a configuration")
        return config


def read_rows(files: RunFiles) -> list[Row]:
    """Return the metrics, one row for each epoch from 0."""
    with files.opened(METRICS) as content:
        rows = [load_json(line) for line in (content or b"").splitlines()]
        for number, row in enumerate(rows):
            _check_row(row, number, number == len(rows) - 1)
        return rows


def _check_row(row: Any, number: int, is_last: bool) -> None:
    where = f"in line {number + 1}"
    if not isinstance(row, dict) or row.get("epoch") != number or type(row["epoch"]) is not int:
        raise Damaged(f"{where}, expected epoch {number}")
    if row.get("status") != "ok" and not (row.get("status") == "diverged" and is_last):
        raise Damaged(f"{where}, status is {row.get('status')!r}")
    for name in (*CURVES, *TIMES, "memory_gib"):
        least = 0 if name in TIMES else -math.inf
        value = row.get(name)
        if (value is not None or name == "seconds") and not _is_number(value, least):
            raise Damaged(f"{where}, {name} is {value!r}")
    rates = row.get("eta", {})
    if not isinstance(rates, dict) or not all(r is None or _is_number(r) for r in rates.values()):
        raise Damaged(f"{where}, eta is not a table of rates")


def _is_number(value: Any, least: float = -math.inf) -> bool:
    if type(value) not in (int, float):
        return False
    return bool(abs(value) < 1e308 and value >= least)


def read_summaries(files: RunFiles) -> list[Measured]:
    """Return the summaries of a run."""
    with files.opened(SUMMARIES) as content:
        states = [] if content is None else load_tensors(content)
        if not isinstance(states, list):
            raise Damaged("it is not a list of summaries")
        found = [Measured.from_state_dict(state) for state in states]
        if any(m.summary.names != found[0].summary.names for m in found if m.kind == found[0].kind):
            raise Damaged("its summaries have different groups")
        return found


def read_environment(files: RunFiles) -> dict[str, Any]:
    """Return the sessions of a run, and what is known about the whole run."""
    with files.opened(ENVIRONMENT) as content:
        found: dict[str, Any] = {"sessions": []} if content is None else load_json(content)
        sessions = found.get("sessions") if isinstance(found, dict) else None
        if not isinstance(sessions, list) or not all(isinstance(s, dict) for s in sessions):
            raise Damaged("it is not a list of sessions")
        if not all(isinstance(word, str) for s in sessions for word in s.get("command", [])):
            raise Damaged("a command in it is not a list of words")
        speed = found.get("adam_seconds")
        if speed is not None and not _is_number(speed, 0):
            raise Damaged(f"adam_seconds is {speed!r}")
        return found
