"""The table of errors and warnings is complete, true, and nothing is changed by meeting one."""

from __future__ import annotations

import ast
import re
import sys
import warnings
from functools import cache
from pathlib import Path

import interrupts
import newton_summary
from messages import ELSEWHERE, ERRORS, OUTSIDE, WARNINGS
from test_errors import WRONG_ARGUMENTS
from test_wrong_arguments import MEASURED, WRONG

SOURCE = Path(newton_summary.__file__).parent
INTERNAL = ("NotImplementedError", "AssertionError", "CannotCapture", "StackTooLarge", "Damaged")


@cache
def sites():
    """Return where the source raises or warns: the module and lines, with the statement."""
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        module = path.relative_to(SOURCE).as_posix()
        if module.startswith(OUTSIDE):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                name = ast.unparse(node.exc.func).rpartition(".")[2]
            elif isinstance(node, ast.Call):
                name = ast.unparse(node.func).rpartition(".")[2]
                if name not in ("warn", "_warn", "warn_user"):
                    continue
            else:
                continue
            if name not in INTERNAL:
                found[module, node.lineno, node.end_lineno] = ast.unparse(node)
    return found


def frames(trace):
    while trace is not None:
        path = Path(trace.tb_frame.f_code.co_filename)
        if path.is_relative_to(SOURCE):
            yield path.relative_to(SOURCE).as_posix(), trace.tb_lineno
        trace = trace.tb_next


def met_by(error):
    """Return the lines of the source that an error, and those behind it, were raised at."""
    met = set()
    while error is not None:
        met.update(list(frames(error.__traceback__))[-1:])
        error = error.__cause__ or error.__context__
    return met


class Meeting:
    """Runs triggers on one problem, which none of them may change."""

    def __init__(self):
        self.problem = interrupts.Problem()
        self.met, self.wrong = set(), []

    def run(self, name, trigger, expected, module=None):
        before = interrupts.everything(self.problem, trains=False)
        spoken, warned = [], set()
        plain = warnings.warn

        def warn(message, *args, **kwargs):
            frame = sys._getframe(1)
            while frame is not None:
                path = Path(frame.f_code.co_filename)
                if path.is_relative_to(SOURCE):
                    warned.add((path.relative_to(SOURCE).as_posix(), frame.f_lineno))
                frame = frame.f_back
            spoken.append(str(message))

        warnings.warn = warn
        try:
            call = trigger(self.problem)
            if callable(call):  # the rest was preparation, such as a forward pass with dropout
                before = interrupts.everything(self.problem, trains=False)
                call()
        except Exception as error:
            met = met_by(error)
            spoken.append(str(error))
        else:
            met = set()
        finally:
            warnings.warn = plain
        met |= warned
        self.met |= met
        if not any(re.search(expected, text, re.DOTALL) for text in spoken):
            self.wrong.append(f"{name}: {expected!r} is not in {spoken}")
        elif module is not None and module not in {where for where, _ in met}:
            self.wrong.append(f"{name}: {expected!r} comes from {sorted(met)}")
        after = interrupts.everything(self.problem, trains=False)
        changed = [part for part in before if not interrupts.same(before[part], after[part])]
        if changed:
            self.wrong.append(f"{name}: {expected!r} has changed {', '.join(changed)}")
            self.problem = interrupts.Problem()


def test_every_error_and_warning_is_in_the_table_and_changes_nothing():
    meeting = Meeting()
    for table in (ERRORS, WARNINGS):
        for module, rows in table.items():
            for expected, trigger in rows:
                meeting.run(module, trigger, expected, module)
    for name, (trigger, expected) in {**WRONG, **WRONG_ARGUMENTS}.items():
        meeting.run(name, lambda p, trigger=trigger: trigger(), expected)
    for name, (trigger, expected) in MEASURED.items():
        meeting.run(name, trigger, expected)
    assert not meeting.wrong, "\n".join(meeting.wrong)
    missing = [
        f"{module}:{first}: {text}"
        for (module, first, last), text in sites().items()
        if not any(where == module and first <= line <= last for where, line in meeting.met)
        and not any(where == module and part in text for where, part, _ in ELSEWHERE)
    ]
    assert not missing, "\n".join(missing)


def test_what_is_tested_elsewhere_is():
    tests = "".join(path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("*.py"))
    present = sites()
    for module, part, why in ELSEWHERE:
        assert any(where == module and part in text for (where, *_), text in present.items()), part
        assert not why.startswith("test_") or f"def {why}(" in tests, why
