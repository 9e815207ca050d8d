"""Arguments of the command line: recipes, their fields, and a command's own options.

tyro reads the values and prints the help; what it cannot read is told in one line. Nothing here
needs torch.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator
from dataclasses import make_dataclass
from typing import Annotated, Any, TypeVar

from newton_summary.display.names import nearest
from newton_summary.errors import UserError
from newton_summary.experiments.config import ExperimentConfig, flatten, option_names
from newton_summary.experiments.recipes import get_recipe

T = TypeVar("T")
Options = TypeVar("Options")


_WORDS = (
    (r"Error parsing (\S+): .*int\(\).*: '(.*)'\.", r"\1 \2: write a whole number."),
    (r"Error parsing (\S+): .*\bINT\b.* from \['(.*)'\]\.", r"\1 \2: write a whole number."),
    (r"Error parsing (\S+): .*to float: '(.*)'\.", r"\1 \2: write a number."),
    (r"Error parsing (\S+): .*\bFLOAT\b.* from \['(.*)'\]\.", r"\1 \2: write a number."),
    (r"invalid choice '(.*)' for argument '(\S+)'\. .*\((.*)\)\.", r"\2 \1: write one of \3."),
    (r"Missing value for argument '(\S+)'\..*", r"\1 needs a value."),
)
"""What tyro says of a wrong value, and what is said instead."""


class HelpPrinted(Exception):
    """Help was asked for, and printed."""


def named_recipe(
    args: list[str], options: object, command: str
) -> tuple[ExperimentConfig, list[str]]:
    """Return the configuration of the recipe that is named first, and the other arguments."""
    if args and args[0] in ("-h", "--help"):
        parse(options, ["--help"], f"{command} RECIPE")
    if not args or args[0].startswith("-"):
        raise UserError(
            f"Which recipe? Write newton-summary {command} RECIPE; `newton-summary list` shows all."
        )
    return get_recipe(args[0])(), args[1:]


def leading(args: list[str]) -> Iterator[str]:
    """Give the arguments before the first option."""
    for arg in args:
        if arg.startswith("-"):
            return
        yield arg


def parse(default: T, args: list[str], command: str) -> T:
    """Read options into a dataclass; a mistake becomes one line, help is printed."""
    import tyro

    told = io.StringIO()
    try:
        with contextlib.redirect_stderr(told):
            return tyro.cli(
                type(default), default=default, args=args, prog=f"newton-summary {command}"
            )
    except SystemExit as end:
        if end.code == 0:
            raise HelpPrinted from None
        raise UserError(_told(_one_line(told.getvalue()), default, command)) from None


def _one_line(box: str) -> str:
    """Return the first paragraph of a framed message, the frame in Unicode or in ASCII."""
    lines = [line.strip("│╭╮╰╯ ") for line in box.strip().splitlines()[1:]]  # without the title
    is_rule = [set(line) <= {"─", "-"} for line in lines]  # or empty
    if is_rule[0]:  # below the title, in ASCII
        lines, is_rule = lines[1:], is_rule[1:]
    return " ".join(lines[: is_rule.index(True)]).rstrip(".") + "."


def _told(line: str, default: object, command: str) -> str:
    """Return what tyro says in the words of this program."""
    for pattern, ours in _WORDS:
        found = re.fullmatch(pattern, line)
        if found:
            return found.expand(ours)
    unknown = re.fullmatch(r"Unrecognized options: (\S+?)(?:, .*)?\.", line)
    if unknown is None:
        return line
    name = unknown[1].partition("=")[0]
    if not name.startswith("-"):
        return (
            f"What is {name!r}? Options are written as --name value; those that are yes or no as "
            f"--name or --no-name."
        )
    known = [f"--{option.replace('_', '-')}" for option in vars(default)]
    return (
        f"Unknown option {name}.{nearest(name, known)} `newton-summary {command} --help` shows all."
    )


def parse_fields(
    recipe: ExperimentConfig, options: Options, args: list[str], command: str
) -> tuple[ExperimentConfig, Options]:
    """Read the fields of a configuration together with a command's own options."""
    if not {"-h", "--help"} & set(args):
        split_options(args, options, recipe)  # for its errors

    import tyro

    kinds = {"options": type(options), "config": ExperimentConfig}
    unnamed = tyro.conf.arg(name="")  # --optimizer.lr, not --config.optimizer.lr
    both = make_dataclass(
        "Arguments", [(name, Annotated[kind, unnamed]) for name, kind in kinds.items()]
    )
    both.__doc__ = type(options).__doc__
    args = [_spelled(arg) for arg in args]
    result: Any = parse(both(options, recipe), args, command)
    return result.config, result.options


def _spelled(arg: str) -> str:
    """Return an argument as tyro knows it: --data-root is short for --data.root."""
    name, equals, value = arg.partition("=")
    return f"--data.root{equals}{value}" if name == "--data-root" else arg


def split_options(
    args: list[str], options: object, recipe: ExperimentConfig
) -> tuple[list[str], dict[str, str]]:
    """Divide arguments into a command's own and those of fields, by name.

    Raises:
        UserError: For an option that does not exist, with the nearest ones.
    """
    own = {name.replace("_", "-") for name in vars(options)}
    fields = {name.replace("_", "-"): name for name in option_names(recipe)}
    values = flatten(recipe)
    commands: list[str] = []
    chosen: dict[str, str] = {}
    rest = [_spelled(arg) for arg in args]
    while rest:
        arg = rest.pop(0)
        name, equals, value = arg.removeprefix("--").partition("=")
        name = name.replace("_", "-")
        if not arg.startswith("--"):
            raise UserError(f"What is {arg!r}? Fields are written as --name value.")
        plain = ".".join(part.removeprefix("no-") for part in name.split("."))
        if name in own or plain in own:
            commands.append(arg)
            if not equals and rest and not rest[0].startswith("--"):
                commands.append(rest.pop(0))
        elif name in fields:
            given = bool(rest) and not rest[0].startswith("--")
            is_flag = isinstance(values[fields[name]], bool) and not equals and not given
            if not equals and not given and not is_flag:
                raise UserError(f"--{name} needs a value.")
            chosen[fields[name]] = value if equals else "true" if is_flag else rest.pop(0)
        elif plain in fields and isinstance(values[fields[plain]], bool):
            chosen[fields[plain]] = "false"
        else:
            known = [f"--{option}" for option in [*fields, *own, "data-root"]]
            raise UserError(
                f"Unknown option --{name}.{nearest(f'--{name}', known)} "
                f"`newton-summary run {recipe.recipe} --help` shows all."
            )
    return commands, chosen


def tokens_of(recipe: ExperimentConfig, name: str, value: str) -> list[str]:
    """Return a field and its value as arguments; yes or no become a flag."""
    option = name.replace("_", "-")
    if not isinstance(flatten(recipe)[name], bool):
        return [f"--{option}", value]
    if value.lower() not in ("true", "false"):
        raise UserError(f"--{option} {value}: write true or false.")
    *parents, last = option.split(".")
    return ["--" + ".".join([*parents, last if value.lower() == "true" else f"no-{last}"])]
