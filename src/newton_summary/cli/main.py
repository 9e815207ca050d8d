"""The command ``newton-summary``: list, run, sweep, report, inspect and demo.

torch is imported only when needed, so that help and wrong arguments are answered at once. Exit
codes: 0, success; 1, a run of a grid failed; 2, an error that the user can fix; 130, interrupted.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from newton_summary.cli.arguments import grid, leading, named_recipe, parse, parse_fields
from newton_summary.display.names import file_name, nearest, printable
from newton_summary.display.table import text_table
from newton_summary.errors import UserError
from newton_summary.experiments import torchrun
from newton_summary.experiments.config import flatten
from newton_summary.experiments.grid import Result, run_all, run_name, table
from newton_summary.experiments.recipes import RECIPES
from newton_summary.inspection.settings import Settings

if TYPE_CHECKING:
    from rich.console import Console

USAGE = """\
Usage: newton-summary COMMAND [ARGUMENTS]

  newton-summary list                     list the recipes
  newton-summary run RECIPE [OPTIONS]     train a recipe; resumes if interrupted
  newton-summary sweep RECIPE [OPTIONS]   train a grid: options take several values, with commas
  newton-summary report DIR...            make tables, figures and a page from run directories
  newton-summary inspect FILE.py:build    measure your own model; build() returns a model, a loss
                                          function and data
  newton-summary demo                     train and measure LeNet on images inside the package
  newton-summary COMMAND --help           options of a command; with a recipe, all of its fields

Examples:
  newton-summary run lenet_embedded --epochs 3
  newton-summary run vgg_cifar10_adam --data-root /data --device cuda --optimizer.lr 1e-4
  newton-summary sweep mlp_embedded --optimizer.lr 0.1,0.3 --seed 0,1,2 --jobs 2
  torchrun --nproc-per-node 2 -m newton_summary run lenet_embedded
  newton-summary report runs
  newton-summary inspect my_model.py:build --partition blocks-4 --out my_model.html
"""


@dataclass(frozen=True)
class Output:
    """Output options."""

    quiet: bool = False
    """Print errors only."""
    json: bool = False
    """Print the result as JSON, and nothing else."""


@dataclass(frozen=True)
class ListOptions:
    """List the recipes."""

    json: bool = False
    """Print whole configurations as JSON."""


@dataclass(frozen=True)
class RunOptions(Output):
    """Train a recipe and write a run directory."""

    run_dir: Path | None = None
    """Run directory; by default runs/RECIPE/CHANGES. An interrupted run in it is resumed."""
    compare_speed: bool = True
    """At the end, time some steps of Adam in the same loop."""


@dataclass(frozen=True)
class GridOptions(Output):
    """Train a grid of options and seeds. Finished runs are skipped, failures reported."""

    runs_dir: Path | None = None
    """Folder for the run directories; by default runs/RECIPE."""
    jobs: int = 1
    """Number of runs at a time, each in its own process."""
    scheduler: str | None = None
    """Address of a dask scheduler, such as tcp://10.0.0.1:8786, whose workers train instead."""


@dataclass(frozen=True)
class ReportOptions(Output):
    """Make tables (Markdown, CSV), figures (PNG, PDF) and a page (HTML) from run directories."""

    out: Path = Path("report")
    """Folder to write to."""
    epoch: int | None = None
    """Epoch at which to draw Hbar; by default that of the best validation loss."""
    window: int | None = None
    """Epochs to average learning rates over; by default 20 in long runs."""


@dataclass(frozen=True)
class InspectOptions(Output, Settings):
    """Measure your own model and write a report, one page of HTML.

    FILE.py:build names a file and a function in it that returns three values: the model, a function
    loss_fn(model, batch) that returns the mean loss of a batch, and the data, one batch or an
    iterable of batches such as a DataLoader.
    """

    out: Path = Path("report.html")
    """Page to write."""
    seed: int = 0
    """Seed of torch, set before the file is run."""


@dataclass(frozen=True)
class DemoOptions(Output):
    """Train LeNet with NewtonSummary and with Adam, measure its layers, draw the figures.

    About a minute on an idle machine.
    """

    out: Path = Path("runs/demo")
    """Folder to write to."""
    epochs: int = 5
    """Passes over the 4500 images."""


# --- entry ---------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return the exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # letters that the terminal does not have
            stream.reconfigure(errors="backslashreplace")
    try:
        with _short_warnings(), _one_line():
            return _dispatch(args)
    except UserError as error:
        # Of several processes the first one reports, and those with an error of their own.
        if torchrun.rank() == 0 or error.rank is not None:
            where = f" (rank {error.rank})" if error.rank else ""
            text = printable(" ".join(str(error).split()))
            print(f"newton-summary{where}: {text}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("newton-summary: interrupted; run the same command to resume.", file=sys.stderr)
        return 130
    except SystemExit as end:  # tyro has printed help, or what is wrong with the arguments
        return int(end.code or 0)
    except BrokenPipeError:  # of a reader such as head, which has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


@contextlib.contextmanager
def _one_line() -> Iterator[None]:
    """Turn file-system errors, such as a name that is too long, into errors of one line."""
    try:
        yield
    except (UserError, BrokenPipeError):
        raise
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise UserError(f"{where}{error.strerror or error}.") from error
    except ValueError as error:
        if "null" not in str(error):  # a NUL in a path
            raise
        raise UserError(f"Invalid file name: {error}.") from None
    except MemoryError:
        raise UserError("Out of memory. Try smaller batches or fewer groups.") from None


def _dispatch(args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help", "help"):
        print(USAGE, end="")
        return 0
    if args[0] == "--version":
        from newton_summary import __version__

        print(__version__)
        return 0
    name, rest = args[0], args[1:]
    if name not in COMMANDS:
        raise UserError(
            f"Unknown command {name!r}.{nearest(name, COMMANDS)} Use one of {', '.join(COMMANDS)}."
        )
    if torchrun.launched() and name != "run":
        raise UserError(f"torchrun can only start `newton-summary run`, not {name}.")
    if any(importlib.util.find_spec(package) is None for package in ("tyro", "rich")):
        extra = "report" if name == "inspect" else "experiments"
        raise UserError(
            f"{name} needs tyro and rich: run pip install -e '.[{extra}]' in your clone."
        )
    return COMMANDS[name](rest) or 0


# --- commands ------------------------------------------------------------------------------------


def list_recipes(args: list[str]) -> None:
    """Print the recipes."""
    options = parse(ListOptions(), args, "list")
    if options.json:
        print(json.dumps({name: flatten(recipe()) for name, recipe in RECIPES.items()}, indent=2))
    else:
        print(text_table([(name, recipe.about) for name, recipe in RECIPES.items()]))


def run(args: list[str]) -> None:
    """Train a recipe."""
    recipe, args = named_recipe(args, RunOptions(), "run")
    config, options = parse_fields(recipe, RunOptions(), args, f"run {recipe.recipe}")
    path = options.run_dir or Path("runs") / file_name(config.recipe) / run_name(config)
    from newton_summary.experiments.progress import watching
    from newton_summary.experiments.results import outcome
    from newton_summary.experiments.rundir import Run
    from newton_summary.experiments.training import speed, train
    from newton_summary.run_directory import CONFIG

    console = _console(options)
    finished = (path / CONFIG).is_file() and Run.load(path).epoch >= config.epochs
    with watching(console, f"{config.recipe} in {path}") as reporter:
        done = train(config, path, reporter, compare_speed=options.compare_speed)
    result = outcome(done)
    seconds, adam = speed(done) or (None, None)
    ratio = seconds / adam if seconds and adam else None
    if options.json and torchrun.rank() == 0:
        print(json.dumps({"run_dir": str(path), **result.as_dict(), "time_over_adam": ratio}))
    if finished:
        console.print("already finished; results:")
    console.print(str(result))
    if seconds is not None:
        text = f"an epoch of training took {seconds:.2f} s"
        text += "" if ratio is None else f", {ratio:.2f} times Adam's {adam:.2f} s"
        console.print(text)


def train_grid(args: list[str]) -> int:
    """Train a grid."""
    recipe, args = named_recipe(args, GridOptions(), "sweep")
    command = f"sweep {recipe.recipe}"
    parsed = [parse_fields(recipe, GridOptions(), p, command, flags=False) for p in grid(args)]
    configs, options = [config for config, _ in parsed], parsed[0][1]
    if options.jobs < 1:
        raise UserError(f"--jobs {options.jobs}: expected 1 or more.")
    if options.scheduler is not None and options.jobs > 1:
        raise UserError("--jobs is for this machine; each worker of --scheduler trains one run.")
    values = [flatten(config) for config in configs]
    varied = [name for name in values[0] if len({repr(value[name]) for value in values}) > 1]
    if "epochs" in varied:
        raise UserError(
            "--epochs takes one value in a grid: the metrics include the earlier epochs."
        )
    root = options.runs_dir or Path("runs") / recipe.recipe
    console = _console(options)
    count = iter(range(1, len(configs) + 1))

    def tell(result: Result) -> None:
        how = result.error or ("already done" if result.skipped else "done")
        console.print(printable(f"{next(count)}/{len(configs)}  {result.path.name}: {how}"))

    results = run_all(configs, root, options.jobs, tell, options.scheduler)
    rows = table(results, varied)
    if options.json:
        print(json.dumps([_as_json(result) for result in results], indent=2))
    console.print(text_table(rows, right=range(len(rows[0]))))
    return 1 if any(result.error for result in results) else 0


def report(args: list[str]) -> None:
    """Make tables and figures."""
    folders = leading(args)
    options = parse(ReportOptions(), args[len(folders) :], "report DIR...")
    if not folders:
        raise UserError("Missing runs: use newton-summary report DIR..., for example runs.")
    from newton_summary.experiments.paper_report import make_report
    from newton_summary.experiments.rundir import find_runs

    runs = find_runs([Path(folder) for folder in folders])
    _tell_files(make_report(runs, options.out, options.epoch, options.window), options)


def inspect(args: list[str]) -> None:
    """Measure a user's model and write the page."""
    targets = leading(args)
    options = parse(InspectOptions(), args[len(targets) :], "inspect FILE.py:build")
    if len(targets) != 1:
        raise UserError("Expected one model: use newton-summary inspect FILE.py:build.")
    if importlib.util.find_spec("plotly") is None:
        raise UserError("The report needs plotly: run pip install -e '.[report]' in your clone.")
    from newton_summary.experiments.progress import watching
    from newton_summary.inspection.inspection import inspect_model
    from newton_summary.inspection.user_file import load_build, split_target
    from newton_summary.page import report as write_report

    console = _console(options)
    file, function = split_target(targets[0])
    # What the user's code prints stays out of the JSON.
    with contextlib.redirect_stdout(sys.stderr) if options.json else contextlib.nullcontext():
        built = load_build(targets[0], options.seed)
        with watching(console) as reporter:
            name = f"{type(built.model).__name__} of {file.name}:{function}"
            show = partial(reporter.measure, 0)
            found = inspect_model(built, options, name=name, file=file, progress=show)
    page = write_report(found.history, options.out)
    if options.json:
        print(json.dumps({"page": str(page), **found.as_dict()}))
    console.print(f"{found}\n\nThe report is in {page}")


def demo(args: list[str]) -> None:
    """Train, measure and draw on the images inside the package."""
    options = parse(DemoOptions(), args, "demo")
    from newton_summary.experiments.demo import NEXT, demonstrate

    console = _console(options)
    files = demonstrate(options.out, options.epochs, console)
    _tell_files(files, options)
    console.print(NEXT.format(page=files[0]))


COMMANDS: dict[str, Callable[[list[str]], int | None]] = {
    "list": list_recipes,
    "run": run,
    "sweep": train_grid,
    "report": report,
    "inspect": inspect,
    "demo": demo,
}


# --- output --------------------------------------------------------------------------------------


def _console(options: Output) -> Console:
    """Return where to print: nowhere with --quiet or --json."""
    from rich.console import Console

    silent = options.quiet or options.json or torchrun.rank() > 0
    return Console(quiet=silent, soft_wrap=True, highlight=False, markup=False)


def _as_json(result: Result) -> dict[str, Any]:
    return {
        "run_dir": str(result.path),
        "config": flatten(result.config),
        "outcome": None if result.outcome is None else result.outcome.as_dict(),
        "error": result.error,
        "skipped": result.skipped,
    }


def _tell_files(files: Sequence[Path], options: Output) -> None:
    """Print the page and the pictures; the same tables are beside them as CSV, figures as PDF."""
    if options.json:
        print(json.dumps([str(file) for file in files]))
    elif not options.quiet:
        for file in files:
            if file.name == "report.md" or file.suffix in (".html", ".png"):
                print(printable(str(file)))


@contextlib.contextmanager
def _short_warnings() -> Iterator[None]:
    """Print each warning once, without the lines of code that it comes from."""
    before = warnings.formatwarning
    printed: set[str] = set()

    def text_of(message: Warning | str, *_: object, **__: object) -> str:
        line = f"newton-summary: {printable(' '.join(str(message).split()))}\n"
        is_new = line not in printed
        printed.add(line)
        return line if is_new else ""

    warnings.formatwarning = text_of
    try:
        with warnings.catch_warnings():
            # What torch says when a thread of its own uses a GPU for the first time.
            warnings.filterwarnings("ignore", message="Attempting to run cuBLAS")
            yield
    finally:
        warnings.formatwarning = before
