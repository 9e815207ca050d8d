"""Arguments of the command line: recipes, their fields, and a command's own options.

tyro parses the values, prints the help and reports mistakes. Nothing here needs torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import make_dataclass
from typing import Annotated, Any, TypeVar

from newton_summary.errors import UserError
from newton_summary.experiments.config import ExperimentConfig
from newton_summary.experiments.recipes import get_recipe

T = TypeVar("T")
Options = TypeVar("Options")

PATHS = ("--runs-dir", "--scheduler", "--data-root", "--data.root")  # whose commas are their own


def parse(default: T, args: list[str], command: str) -> T:
    """Read options into a dataclass. After printing help or a mistake, raise SystemExit."""
    import tyro

    return tyro.cli(type(default), default=default, args=args, prog=f"newton-summary {command}")


def parse_fields(
    recipe: ExperimentConfig, options: Options, args: list[str], command: str, flags: bool = True
) -> tuple[ExperimentConfig, Options]:
    """Read the fields of a configuration together with a command's own options.

    With ``flags``, --name and --no-name set a field that is true or false; otherwise it takes a
    value, as in a grid.
    """
    import tyro

    unnamed = tyro.conf.arg(name="")  # --optimizer.lr, not --config.optimizer.lr
    config: Any = Annotated[ExperimentConfig, unnamed]
    if not flags:
        config = Annotated[ExperimentConfig, unnamed, tyro.conf.FlagConversionOff]
    both = make_dataclass(
        "Arguments", [("options", Annotated[type(options), unnamed]), ("config", config)]
    )
    both.__doc__ = type(options).__doc__
    args = [arg.replace("--data-root", "--data.root", 1) for arg in args]
    result: Any = parse(both(options, recipe), args, command)
    return result.config, result.options


def named_recipe(
    args: list[str], options: object, command: str
) -> tuple[ExperimentConfig, list[str]]:
    """Return the configuration of the recipe that is named first, and the other arguments."""
    if args and args[0] in ("-h", "--help"):
        parse(options, ["--help"], f"{command} RECIPE")
    if not args or args[0].startswith("-"):
        raise UserError(
            f"Missing recipe: use newton-summary {command} RECIPE; `newton-summary list` shows all."
        )
    return get_recipe(args[0])(), args[1:]


def leading(args: list[str]) -> list[str]:
    """Return the arguments before the first option."""
    return list(itertools.takewhile(lambda arg: not arg.startswith("-"), args))


def grid(args: list[str]) -> Iterator[list[str]]:
    """Yield the arguments of each point of a grid: values with commas are alternatives.

    >>> list(grid(["--seed", "0,1", "--optimizer.lr=1,2"]))[1]
    ['--seed', '0', '--optimizer.lr=2']
    """
    choices, name = [], ""
    for arg in args:
        if arg.startswith("--"):
            name, equals, value = arg.partition("=")
            prefix = name + equals
        else:
            prefix, value = "", arg
        values = [value] if name in PATHS else value.split(",")
        choices.append([prefix + value for value in values])
    for point in itertools.product(*choices):
        yield list(point)
