"""The package imports what it is asked for, when it is asked for."""

import ast
import subprocess
import sys
from inspect import getsource

import pytest

import newton_summary as ns


def run(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_the_command_line_tells_its_help_without_torch():
    code = (
        "import sys\n"
        "from newton_summary.cli.main import main\n"
        "main(['--help']), main(['list']), main(['run', 'mlp_embedded', '--help'])\n"
        "print('torch' in sys.modules)"
    )
    assert run(code).splitlines()[-1] == "False"


def test_names_are_there_to_be_seen_and_others_are_not():
    offered = set(dir(ns))
    assert set(ns.__all__) <= offered
    assert {"analysis", "figures"} <= offered and not {"Any", "import_module"} & offered
    assert ns.analysis.normalized and ns.figures.heatmap
    with pytest.raises(AttributeError, match="no attribute 'sumarize'"):
        _ = ns.sumarize


def test_every_name_says_where_it_lives():
    assert set(ns._HOMES) == set(ns.__all__) - {"__version__"}


def test_type_checkers_see_every_name():
    """They do not run the package, and read what it imports for them."""
    imports = [x for x in ast.walk(ast.parse(getsource(ns))) if isinstance(x, ast.ImportFrom)]
    seen = {alias.asname or alias.name for line in imports for alias in line.names}
    assert {*ns.__all__, *ns._SUBMODULES} - {"__version__"} <= seen
