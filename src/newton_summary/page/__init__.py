"""Measurements as one interactive page, which opens offline and keeps every number.

``report`` gathers histories, ``contents`` turns them into plain values, ``document`` puts these
into one HTML file together with the drawing library.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path

from newton_summary.history import History
from newton_summary.optimizer import NewtonSummary
from newton_summary.optimizer.controller import RateController
from newton_summary.run_directory import read_history
from newton_summary.storage.writing import make_folder, write_text
from newton_summary.summary import Summary

Source = Summary | History | RateController | NewtonSummary | str | Path


def report(what: Source | Sequence[Source], path: str | Path, *, title: str | None = None) -> Path:
    """Write measurements as one HTML page: heat maps, learning rates, curves, tables.

    The page opens from a file, without a network. Writing it needs plotly (extra ``report``).

    Args:
        what: A :class:`Summary`, a :class:`History`, the path of a run directory or of a file
            written by ``History.save``, or a :class:`RateController` or :class:`NewtonSummary`, for
            what it has measured and done; or several of these, to compare.
        path: File to write, such as ``"report.html"``, or a folder to write ``report.html`` into.
        title: Heading of the page; by default the names of the runs.

    Returns:
        The path of the page.

    Raises:
        ImportError: If plotly is not installed.
        ValueError: If there is nothing to show, or a summary has no Hbar.

    >>> import tempfile, torch
    >>> summary = Summary(gbar=torch.ones(2), Hbar=torch.tensor([[2.0, 1.0], [1.0, 3.0]]))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = report(summary, f"{folder}/report.html", title="Two groups")
    ...     "Two groups" in path.read_text(encoding="utf-8")
    True
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(
            f"path has type {type(path).__name__}: use report(what, path), where path is the file "
            "to write, such as 'report.html'."
        )
    from newton_summary.page.document import page

    if isinstance(what, Summary | History | str | os.PathLike) or not isinstance(what, Iterable):
        sources = [what]
    else:
        sources = list(what)
    if not sources:
        raise ValueError("There is nothing to report: the list of runs is empty.")
    histories = [_history(source) for source in sources]
    _leave_out_common_folders(histories)
    for history in histories:
        if not history.measured and not history.curves:
            raise ValueError(
                f"{history.name!r} has neither a measurement nor a curve: there is nothing to show."
            )
    path = Path(path)
    is_folder = os.path.isdir(path) or path.suffix == ""  # of a name that cannot be: False
    path = path / "report.html" if is_folder else path
    make_folder(path.parent)
    return write_text(path, page(histories, title))


def _leave_out_common_folders(histories: list[History]) -> None:
    """Leave out the folders with which the names of all runs begin."""
    paths = [Path(history.name).parts for history in histories]
    folders = zip(*(path[:-1] for path in paths), strict=False)
    shared = len(list(takewhile(lambda parts: len(set(parts)) == 1, folders)))
    if len(paths) > 1 and shared:
        for i, (history, path) in enumerate(zip(histories, paths, strict=True)):
            histories[i] = replace(history, name=str(Path(*path[shared:])))


def _history(source: object) -> History:
    """Return a source as a history."""
    if isinstance(source, History):
        return source
    if isinstance(source, RateController | NewtonSummary):
        return source.to_history()
    if isinstance(source, Summary):
        if source.order == 1:
            raise ValueError("The summary has no Hbar: measure it with order=2 or order=3.")
        lambda_int = 1.0 if source.order == 3 else 0.0  # the cubic term needs D3
        return History.of(source, lambda_int=lambda_int)
    if not isinstance(source, str | os.PathLike):
        raise TypeError(
            f"report needs a summary, a history or a run directory, not {type(source).__name__}. "
            "summarize(model, loss_fn, data) makes a summary; that of advice is advice.summary."
        )
    path = Path(source)
    if not os.path.exists(path):
        raise FileNotFoundError(
            f"{path} does not exist: pass a run directory, or a file written by History.save."
        )
    return History.load(path) if path.is_file() else read_history(path)
