"""Put faults into the numerical core, one at a time, and see whether its tests notice.

    pip install cosmic-ray coverage
    python scripts/mutate.py solver.py optimizer/rates.py --count 30 --seed 0

The faults are those of cosmic-ray: operators, comparisons, numbers, conditions, loops. Of the
functions of a module a seeded sample of places is drawn, and at each place one fault; messages and
types are left alone. The tests of the module run once, to see which of them run which lines. Then
each fault is put into the living functions, in a fork of this process, which runs the tests of its
line, the fastest first. What they do not notice is printed; whether it changes a number is for a
reader to decide. Processes that tests start do not see the faults.
"""

from __future__ import annotations

import argparse
import ast
import gc
import inspect
import os
import random
import resource
import sys
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SWEEP = "derivatives/sweep"
TESTS = {
    "solver.py": "thresholds learning_rates",
    "summary.py": "summary stderr",
    "optimizer/refreshes.py": "optimizer_algorithm2 optimizer_resume states",
    "optimizer/update.py": "optimizer_algorithm2 optimizer optimizer_loops",
    "optimizer/steering.py": "controller",
    "optimizer/steered.py": "optimizer_averaging optimizer",
    "optimizer/controller.py": "controller states",
    "optimizer/adam.py": "optimizer_adam",
    "measuring/advice.py": "thresholds advice",
    "measuring/factors.py": "thresholds advice",
    "measuring/rehearsal.py": "thresholds advice",
    "measuring/box.py": "thresholds box advice",
    "measuring/tried_rates.py": "tried_rates",
    "measuring/splitting.py": "thresholds splitting",
    "measuring/lambda_int.py": "strengths trials",
    "measuring/slope.py": "slope",
    **{
        f"{SWEEP}/rules/{name}.py": "thresholds sweep_operations"
        for name in (
            *("elementwise", "linear", "products", "convolutions", "selection"),
            *("solves", "recurrent_cells"),
        )
    },
    f"{SWEEP}/rules/normalize.py": "norms sweep_operations",
    f"{SWEEP}/rules/attention_tiles.py": "sweep_attention",
    **{f"{SWEEP}/{n}.py": "thresholds sweep_engine" for n in ("engine", "tape", "recorder")},
    "parallel/ranks.py": "ranks thresholds",
}


def meaning(code: str) -> str:
    """Return the code without types, texts and messages, to compare."""
    tree = ast.parse(code)
    for node in ast.walk(tree):
        for name in ("returns", "annotation"):
            if hasattr(node, name):
                setattr(node, name, None)
        if isinstance(node, ast.Raise):
            node.exc = None
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node.value = ""
    return ast.dump(tree)


def inner(code: CodeType) -> list[CodeType]:
    """Return the code of all functions in a module, those inside of others too."""
    parts = [part for part in code.co_consts if isinstance(part, CodeType)]
    return [found for part in parts for found in (part, *inner(part))]


def is_function(code: CodeType) -> bool:
    """Whether code runs when something is called; that of a class or a table runs once."""
    is_table = code.co_name.startswith("<") and code.co_name != "<lambda>"
    return bool(code.co_flags & inspect.CO_OPTIMIZED) and not is_table


def faults(path: Path, count: int, seed: int) -> list[tuple[int, str, list[Any]]]:
    """Draw faults; return the line, what it becomes, and pairs of old and new code of functions."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator, operator_names

    code = path.read_text(encoding="utf-8")
    places: dict[tuple[int, int], list[tuple[str, int]]] = {}
    for name in sorted(name for name in operator_names() if "Variable" not in name):
        operator, occurrence = get_operator(name)(), 0
        for node in ast_nodes(get_ast(code)):
            for start, _ in operator.mutation_positions(node):
                places.setdefault(start, []).append((name, occurrence))
                occurrence += 1
    numbers, plain, drawn = random.Random(seed), meaning(code), []
    old = inner(compile(code, str(path), "exec"))
    for place in numbers.sample(sorted(places), len(places)):
        name, occurrence = numbers.choice(places[place])
        if len(drawn) == count:
            break
        changed = mutate_code(code, get_operator(name)(), occurrence)
        try:
            new = inner(compile(changed, str(path), "exec"))
        except SyntaxError:
            continue
        if meaning(changed) == plain:
            continue
        pairs = [(a, b) for a, b in zip(old, new) if a != b and is_function(a)]
        if pairs and len(old) == len(new):
            line = changed.splitlines()[place[0] - 1].strip()
            drawn.append((place[0], f"{name.partition('/')[2]}: {line}", pairs))
    return drawn


class Faults:
    """Runs the tests of some modules, and then again with each fault."""

    def __init__(self, modules: list[str], count: int, seed: int):
        self.paths = {module: ROOT / "src" / "newton_summary" / module for module in modules}
        self.drawn = {module: faults(path, count, seed) for module, path in self.paths.items()}

    def pytest_runtestloop(self, session: Any) -> bool:
        """Find the tests of each line, and try the faults."""
        import coverage
        from _pytest.runner import runtestprotocol

        if not session.items:
            sys.exit("The tests cannot be collected.")
        include = [str(path) for path in self.paths.values()]
        watch = coverage.Coverage(data_file=None, config_file=False, include=include)
        watch.start()
        seconds = {}
        for item, following in zip(session.items, [*session.items[1:], None]):
            watch.switch_context(item.nodeid)
            reports = runtestprotocol(item, log=False, nextitem=following)
            seconds[item.nodeid] = sum(report.duration for report in reports)
            if any(report.failed for report in reports):
                sys.exit(f"{item.nodeid} fails without any fault.")
        watch.stop()
        for module, path in self.paths.items():
            lines, survived = watch.get_data().contexts_by_lineno(str(path)), 0
            for line, text, pairs in self.drawn[module]:
                known = set(lines.get(line, ())) - {""}
                items = [i for i in session.items if i.nodeid in known]
                if not self._noticed(sorted(items, key=lambda i: seconds[i.nodeid]), pairs):
                    survived += 1
                    print(f"{module}:{line} ({len(items)} tests) {text}", file=sys.stderr)
            noticed = len(self.drawn[module]) - survived
            print(f"{module}: {noticed} of {len(self.drawn[module])} noticed", file=sys.stderr)
        return True

    def _noticed(self, items: list[Any], pairs: list[Any]) -> bool:
        from _pytest.runner import runtestprotocol

        child = os.fork()
        if child == 0:
            used = resource.getrusage(resource.RUSAGE_SELF).ru_utime
            resource.setrlimit(resource.RLIMIT_CPU, (int(used) + 120,) * 2)
            for function in [x for x in gc.get_objects() if type(x) is FunctionType]:
                for old, new in pairs:
                    if function.__code__ == old:
                        function.__code__ = new
                        break
            for item in items:
                if any(r.failed for r in runtestprotocol(item, log=False, nextitem=None)):
                    os._exit(1)
            os._exit(0)
        return os.waitpid(child, 0)[1] != 0


def main() -> None:
    """Try the faults of the modules that were asked for, in a process for each set of tests."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("modules", nargs="*", default=list(TESTS))
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-k", default="", help="some of the tests, as for pytest")
    options = parser.parse_args()
    import hypothesis  # noqa: F401  once, for all
    import pytest
    import torch  # noqa: F401

    os.chdir(ROOT)
    for names in dict.fromkeys(TESTS[module] for module in options.modules):
        if os.fork() == 0:
            modules = [module for module in options.modules if TESTS[module] == names]
            tests = [f"tests/test_{name}.py" for name in names.split()]
            given = ["-q", "-s", "-n", "0", "-p", "no:cacheprovider", "-k", options.k, *tests]
            os._exit(pytest.main(given, [Faults(modules, options.count, options.seed)]))
        os.wait()


if __name__ == "__main__":
    main()
