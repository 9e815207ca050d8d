"""One HTML file: the template filled with style, script, drawing library and contents."""

from __future__ import annotations

import base64
import gzip
import html
import importlib.util
import json
import re
from collections.abc import Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from newton_summary.history import History
from newton_summary.page.contents import contents, doubt_about

SCRIPTS = ("values.js", "heatmap.js", "charts.js", "tables.js", "sections.js", "page.js")
"""The parts of the page's script, in order; together they are one module."""


def page(histories: Sequence[History], title: str | None = None) -> str:
    """Return the page as text."""
    title = title or _title(histories)
    parts = {
        "title": html.escape(title),
        # It may break after a part of a path or of a list of options.
        "heading": re.sub(r"([/,=_])", r"\1<wbr>", html.escape(title)),
        "size": "long" if len(title) > 60 else "short",
        "lead": html.escape(_lead(histories)),
        "banner": _banner(histories),
        "style": _file("page.css"),
        "script": "\n".join(_file(name) for name in SCRIPTS),
        "contents": _json({"title": title, **contents(histories)}),
        "plotly": _drawing_library(),
    }
    # In one pass, so that nothing inside the parts is treated as a place to fill.
    return re.sub(r"\{\{(\w+)\}\}", lambda place: parts[place[1]], _file("page.html"))


def _file(name: str) -> str:
    return resources.files("newton_summary.page").joinpath(name).read_text(encoding="utf-8")


def _json(value: Any) -> str:
    """Return JSON for a script element, which no text inside can close."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _drawing_library() -> str:
    """Return plotly.js, compressed and in base64."""
    found = importlib.util.find_spec("plotly")
    if found is None or not found.submodule_search_locations:
        raise ImportError("The report needs plotly: run pip install -e '.[report]' in your clone.")
    return _compressed(Path(found.submodule_search_locations[0]) / "package_data" / "plotly.min.js")


@cache  # half a second, and a training may write its report every epoch
def _compressed(file: Path) -> str:
    return base64.b64encode(gzip.compress(file.read_bytes(), mtime=0)).decode("ascii")


def _title(histories: Sequence[History]) -> str:
    names = ", ".join(history.name for history in histories)
    if len(histories) == 1:
        return names
    return f"Comparison of {len(histories)} runs" + (f": {names}" if len(names) < 50 else "")


def _banner(histories: Sequence[History]) -> str:
    """Return a warning if learning rates are refuted, doubtful or not a minimum; else nothing."""
    lines = []
    for history in histories:
        doubts = [(m.epoch, doubt) for m in history.measured if (doubt := doubt_about(m))]
        if not doubts:
            continue
        epochs = ", ".join(f"{epoch:g}" for epoch, _ in doubts[:8])
        more = ", ..." if len(doubts) > 8 else ""
        when = f" measured at epoch {epochs}{more}" if len(history.measured) > 1 else ""
        which = f" of {history.name}" if len(histories) > 1 else ""
        lines.append(f"Do not use the learning rates{which}{when}. {doubts[-1][1]}")
    text = "<br>".join(html.escape(line) for line in lines)
    return f'<p class="banner" role="alert">{text}</p>' if lines else ""


def _lead(histories: Sequence[History]) -> str:
    """Return a sentence on what was measured."""
    texts = []
    for history in histories:
        if not history.measured:
            continue
        summary = history.measured[-1].summary
        text = f"{len(summary)} group{'s' if len(summary) > 1 else ''} of parameters"
        if summary.partition is not None:
            text += f" ({sum(summary.partition.sizes):,} numbers)"
        if summary.num_samples and summary.num_samples > 1:  # one is a closure, of any size
            text += f" measured on {summary.num_samples:,} samples"
        if len(history.measured) > 1:
            text += f" at {len(history.measured)} points of training"
        texts.append(text)
    if not texts:
        return "No summary was measured; the page shows the curves of training."
    if len(set(texts)) == 1:
        return f"{'In each run ' if len(texts) > 1 else ''}{texts[0]}."
    if len(set(texts)) > 3:
        sizes = [len(history.names) for history in histories if history.measured]
        return f"{len(texts)} runs with {min(sizes)} to {max(sizes)} groups of parameters."
    return "; ".join(dict.fromkeys(texts)) + "."
