"""Measure a model from a user's file, for ``newton-summary inspect FILE.py:build``.

``build()`` returns a model, a loss function and data. What goes wrong in it, or in the loss, is
told in one line with the place in the user's file.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import math
import platform
import shlex
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from newton_summary.analysis import Pair, strongest_pairs
from newton_summary.derivatives.batches import _as_batches, map_batch
from newton_summary.derivatives.probe import CannotDifferentiate, LossFn
from newton_summary.experiments.errors import UserError, nearest
from newton_summary.history import History
from newton_summary.learning_rates import LearningRates, learning_rates
from newton_summary.measure import summarize
from newton_summary.partition import make_partition, text_table
from newton_summary.strengths import Strengths, suggest_lambda_int
from newton_summary.summary import Summary
from newton_summary.trials import step_trials

if TYPE_CHECKING:
    from rich.console import Console

EXPECTED = {
    "model": "a torch.nn.Module",
    "loss_fn": "a function loss_fn(model, batch) that returns the mean loss of the batch",
    "data": "one batch, or an iterable of batches such as a DataLoader",
}
"""What ``build()`` returns, in order."""


class Built(NamedTuple):
    """What ``build()`` has returned."""

    model: nn.Module
    loss_fn: LossFn
    data: Any


@dataclass(frozen=True)
class Settings:
    """How to measure."""

    partition: str
    backend: str
    order: int
    lambda_int: float | None  # None: the best of some if D3 is measured, else 0
    max_batches: int
    device: str | None  # None: where the model is
    stderr: bool


@dataclass(frozen=True)
class Inspection:
    """What was found out about a model."""

    history: History
    summary: Summary
    rates: LearningRates
    pairs: tuple[Pair, ...]  # the strongest first
    strengths: Strengths | None  # what other lambda_int do, if none was asked for

    def __str__(self) -> str:
        """Return a few lines: what was measured, the slowest and fastest group, strongest pairs."""
        facts = self.history.facts
        lines = [
            facts["model"],
            f"{facts['partition']}, measured on {facts['data']} in {facts['time']} "
            f"(backend {self.summary.backend})",
            "",
        ]
        if self.rates.ok:
            lines += self._rates_in_words()
        else:
            lines.append(f"No learning rates, {self.rates.status}: {self.rates.detail}")
            if self.summary.order == 2:
                lines.append("--order 3 measures the cubic term, and --lambda-int is its strength.")
        if self.pairs:
            rows = [["Strongest pairs", "", "interaction"]]
            rows += [[f"  {p.first}", p.second, f"{p.interaction:+.3f}"] for p in self.pairs]
            lines += ["", text_table(rows, right=[2])]
        return "\n".join(lines)

    def _rates_in_words(self) -> list[str]:
        eta, errors = self.rates.eta.tolist(), self.rates.eta_stderr
        forwards = sorted((s for s in range(len(eta)) if eta[s] > 0), key=eta.__getitem__)
        ends = {"fastest": forwards[-1:], "slowest": forwards[:1]}
        if len(forwards) == 1:
            ends = {"forwards": forwards}
        rows = []
        for word, chosen in ends.items():
            for s in chosen:
                error = "" if errors is None else f" ± {float(errors[s]):.1g}"
                rows.append([f"  {word}", self.summary.names[s], f"{eta[s]:.4g}{error}"])
        lines = [f"Learning rates with {self._strength()}", *([text_table(rows)] if rows else [])]
        backwards = sum(value < 0 for value in eta)
        if backwards:
            verb = "is" if backwards == 1 else "are"
            lines.append(
                f"  {backwards} of {len(eta)} {verb} negative: their partners move too far"
            )
        for trial in self.history.measured[0].trials[-1:]:
            lines.append(
                f"  with these the loss of {float(self.summary.loss):.4g} should change by "
                f"{trial.predicted:+.3g}; it changed by {trial.real:+.3g}"
            )
            if trial.predicted < 0 < trial.real:
                lines.append(
                    "  that far the model does not hold: a larger --lambda-int gives shorter steps"
                )
        return lines

    def _strength(self) -> str:
        said = f"lambda_int {self.rates.lambda_int:g}"
        if self.strengths is None:
            return said
        values = [one.rates.lambda_int for one in self.strengths.tried]
        tried = f"{min(values):g} to {max(values):g}"
        if self.strengths.best.real < 0:
            return f"{said}, of {tried} the one with which the loss falls most"
        return f"{said}; the loss falls with none of {tried}"

    def as_dict(self) -> dict[str, Any]:
        """Return the rates and pairs as plain values; None stands for what is not finite."""

        def finite(value: float) -> float | None:
            return value if math.isfinite(value) else None

        def by_name(values: Tensor | None) -> dict[str, float | None] | None:
            if values is None:
                return None
            return dict(zip(self.summary.names, map(finite, values.tolist()), strict=True))

        return {
            "loss": finite(float(self.summary.loss)),
            "samples": self.summary.num_samples,
            "backend": self.summary.backend,
            "status": self.rates.status,
            "lambda_int": self.rates.lambda_int,
            "learning_rates": by_name(self.rates.eta),
            "stderr": by_name(self.rates.eta_stderr),
            "strongest_pairs": [pair._asdict() for pair in self.pairs],
            "facts": self.history.facts,
        }


# --- the user's file -----------------------------------------------------------------------------


def split_target(target: str) -> tuple[Path, str]:
    """Return the file and the function in ``FILE.py:build``; the function is ``build`` if not said.

    >>> split_target("net.py:make")[1], split_target("net.py")[1]
    ('make', 'build')
    """
    file, colon, function = target.rpartition(":")
    if not colon or not function.isidentifier():  # also C:\net.py
        file, function = target, "build"
    return Path(file), function


def load_build(target: str, seed: int = 0) -> Built:
    """Run the file, call the function, and check what it returns.

    Args:
        target: ``FILE.py:build``.
        seed: Of torch, before anything runs.
    """
    file, function = split_target(target)
    if not file.is_file():
        raise UserError(
            f"There is no file {file}. Write newton-summary inspect FILE.py:build, where build() "
            f"returns a model, a loss function and data."
        )
    torch.manual_seed(seed)
    with telling(file, f"{file} cannot be loaded"):
        module = _load(file)
    build = getattr(module, function, None)
    if not callable(build):
        own = [name for name, value in vars(module).items() if inspect.isfunction(value)]
        raise UserError(
            f"{file} has no function {function!r}.{nearest(function, own)} Write one that returns "
            f"a model, a loss function and data."
        )
    with telling(file, f"{function}() in {file} failed"):
        returned = build()
    return _checked(returned, f"{function}()")


def _load(file: Path) -> Any:
    """Import a file as Python does a script: modules beside it can be imported."""
    folder = str(file.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    name = file.stem if file.stem not in sys.modules else f"inspected_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise UserError(f"{file} is not a Python file: its name ends in .py.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look there
    spec.loader.exec_module(module)
    return module


def _checked(returned: Any, function: str) -> Built:
    """Return the three things, or say which one is wrong."""
    names = list(EXPECTED)
    if not isinstance(returned, tuple | list) or len(returned) != len(names):
        what = type(returned).__name__
        if isinstance(returned, tuple | list):
            what = f"a {what} of {len(returned)}"
        raise UserError(f"{function} returned {what}: return three things, model, loss_fn, data.")
    model, loss_fn, data = returned
    right = {
        "model": isinstance(model, nn.Module),
        "loss_fn": callable(loss_fn) and not isinstance(loss_fn, type),
        "data": data is not None and not isinstance(data, str | bytes | int | float),
    }
    for place, name, value in zip(("first", "second", "third"), names, returned, strict=True):
        if not right[name]:
            what = f"the class {value.__name__}" if isinstance(value, type) else _kind(value)
            raise UserError(
                f"{function} returned {what} as the {place} of model, loss_fn, data: {name} is "
                f"{EXPECTED[name]}."
            )
    if isinstance(loss_fn, nn.Module):
        raise UserError(
            f"{function} returned a {_kind(loss_fn)} as loss_fn, which compares outputs with "
            f"targets. Write def loss_fn(model, batch): x, y = batch; return criterion(model(x), y)"
        )
    with contextlib.suppress(ValueError):  # no signature to look at, as of some built-in functions
        _check_arguments(loss_fn, function)
    return Built(model, loss_fn, data)


def _check_arguments(loss_fn: Callable[..., Any], function: str) -> None:
    signature = inspect.signature(loss_fn)
    try:
        signature.bind(None, None)
    except TypeError:
        raise UserError(
            f"{function} returned a loss_fn with the arguments {signature}: loss_fn is called with "
            f"the model and a batch."
        ) from None


def _kind(value: Any) -> str:
    return "None" if value is None else type(value).__name__


# --- errors in it --------------------------------------------------------------------------------


@contextlib.contextmanager
def telling(file: Path, what: str, hint: str = "") -> Iterator[None]:
    """Tell errors of the user's code in one line, with the line of the file where it went wrong."""
    try:
        yield
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        place = _place(error, file)
        ours = isinstance(error, ValueError | TypeError | CannotDifferentiate | ImportError)
        if _raised_here(error) and not ours:
            raise  # a mistake of this package: all of it is wanted
        kind = "" if _raised_here(error) else f"{type(error).__name__}: "
        said = str(error).strip().split("\n")[0].rstrip(".") or "no message"
        raise UserError(f"{what}{place}: {kind}{said}.{hint if place else ''}") from error


def _place(error: BaseException, file: Path) -> str:
    if isinstance(error, SyntaxError) and error.lineno is not None:
        return f", line {error.lineno}"
    own = str(file.resolve())
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if str(Path(frame.filename).resolve()) == own
    ]
    return f", line {lines[-1]}" if lines else ""


def _raised_here(error: BaseException) -> bool:
    """Whether this package raised the error, and not the user's code or torch."""
    frames = traceback.extract_tb(error.__traceback__)
    package = Path(__file__).resolve().parent
    return bool(frames) and package in Path(frames[-1].filename).resolve().parents


# --- measuring -----------------------------------------------------------------------------------


def inspect_model(
    built: Built,
    settings: Settings,
    *,
    name: str,
    file: Path,
    progress: Callable[[int, int | None], None] | bool = False,
) -> Inspection:
    """Measure a model and try steps along its learning rates.

    Args:
        built: Model, loss and data.
        settings: How to measure.
        name: Of the report.
        file: Where the user's code is, for messages.
        progress: As :func:`summarize` takes it.
    """
    model, loss_fn, data = built
    lambda_int = _strength(settings)
    with telling(file, "Measuring failed", _hint(data)):
        batches = take_batches(data, settings.max_batches)
        if settings.device is not None:
            device = _device(settings.device)
            model, batches = model.to(device), [_moved(batch, device) for batch in batches]
        groups = make_partition(model, settings.partition)
        start = time.perf_counter()
        summary = summarize(
            model,
            loss_fn,
            iter(batches),
            partition=groups,
            backend=settings.backend,
            order=settings.order,
            stderr=settings.stderr and len(batches) > 1,
            progress=progress,
        )
        seconds = time.perf_counter() - start
        strengths = None
        if lambda_int is None:
            strengths = suggest_lambda_int(model, loss_fn, iter(batches), summary)
            rates = strengths.rates
        else:
            rates = learning_rates(summary, lambda_int)
        trials = step_trials(model, loss_fn, iter(batches), summary, rates) if rates.ok else ()
    history = History(name)
    history.add(0, summary, rates, trials=trials)
    history.facts = _facts(built, settings, summary, len(batches), seconds, rates.lambda_int)
    return Inspection(history, summary, rates, tuple(strongest_pairs(summary, 5)), strengths)


def _strength(settings: Settings) -> float | None:
    """Return lambda_int, None if it is to be found; a wrong one is told before measuring."""
    has_D3 = settings.order == 3
    if settings.lambda_int is None:
        return None if has_D3 else 0.0
    if not 0 <= settings.lambda_int < math.inf:
        raise UserError(f"--lambda-int {settings.lambda_int:g}: write a finite number, 0 or more.")
    if settings.lambda_int > 0 and not has_D3:
        raise UserError(
            f"--lambda-int {settings.lambda_int:g} needs the third derivative D3, which --order "
            f"{settings.order} leaves out: write --order 3, or --lambda-int 0."
        )
    return settings.lambda_int


def _hint(data: Any) -> str:
    """Return how the data was understood, where that may not be what the user thinks."""
    if isinstance(data, list) and data and all(isinstance(x, Tensor) for x in data):
        return (
            " (A list of tensors is taken as one batch. For several batches of one tensor each, "
            "return iter(data) or a DataLoader.)"
        )
    return ""


@contextlib.contextmanager
def progress_bar(console: Console) -> Iterator[Callable[[int, int | None], None]]:
    """Give a function that shows the batches done, on a terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("measuring"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("measuring", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def take_batches(data: Any, most: int) -> list[Any]:
    """Return the first batches of the data."""
    if most < 1:
        raise UserError(f"--max-batches {most}: write 1 or more.")
    batches = list(islice(iter(_as_batches(data)), most))
    if not batches:
        raise UserError("The data is empty: it gave no batch to measure.")
    return batches


def _device(name: str) -> torch.device:
    from newton_summary.experiments.training import find_device

    return find_device(name)


def _moved(batch: Any, device: torch.device) -> Any:
    return map_batch(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, batch)


def _facts(
    built: Built,
    settings: Settings,
    summary: Summary,
    batches: int,
    seconds: float,
    lambda_int: float,
) -> dict[str, str]:
    """Return how it was measured, in words."""
    from newton_summary import __version__

    model = built.model
    first = next(iter(model.parameters()))
    count = sum(p.numel() for p in model.parameters())
    every = len(built.data) if hasattr(built.data, "__len__") and batches > 1 else batches
    which = f"{batches} batch{'es' if batches > 1 else ''}"
    if every > batches:
        which = f"the first {batches} of {every:,} batches"
    return {
        "model": f"{type(model).__name__}, {count:,} parameters, "
        f"in {'training' if model.training else 'evaluation'} mode",
        "loss": f"{getattr(built.loss_fn, '__name__', _kind(built.loss_fn))}, "
        f"{float(summary.loss):.6g} at the start",
        "data": f"{summary.num_samples:,} samples in {which}",
        "partition": f"{settings.partition}, {len(summary)} group{'s' if len(summary) > 1 else ''}",
        "direction": "gradient of the same data",
        "order": str(settings.order),
        "backend": f"{summary.backend} (asked for: {settings.backend})",
        "lambda_int": f"{lambda_int:g}",
        "device": f"{first.device}, {str(first.dtype).removeprefix('torch.')}",
        "time": f"{seconds:.2f} s",
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "versions": f"newton_summary {__version__}, torch {torch.__version__}, "
        f"Python {platform.python_version()}",
        "command": shlex.join(["newton-summary", *sys.argv[1:]]),
    }
