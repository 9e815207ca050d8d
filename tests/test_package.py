"""What a plain import needs, and what it says of itself."""

import importlib.metadata
import inspect
import subprocess
import sys
from pathlib import Path
from typing import get_args

import newton_summary
from newton_summary import derivatives
from newton_summary.experiments import config

OPTIONAL = [
    *("lightning", "matplotlib", "plotly", "pytest", "rich", "scipy", "transformers", "tyro"),
]


def test_import_needs_torch_and_numpy_alone():
    """In a new process, since pytest and its plugins have imported much already."""
    code = f"import sys, newton_summary\nprint(*sorted(set(sys.modules) & set({OPTIONAL!r})))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == []


def test_import_works_when_nothing_optional_is_installed():
    """Also an import that is caught would be a dependency: here each optional one fails."""
    code = (
        "import sys\n"
        f"sys.modules.update(dict.fromkeys({OPTIONAL!r}))\n"
        "import newton_summary, newton_summary.data"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_version_is_that_of_the_distribution():
    assert newton_summary.__version__ == importlib.metadata.version("newton-summary")


def test_distribution_asks_for_torch_and_numpy_alone():
    requires = importlib.metadata.requires("newton-summary")
    always = {r.split(">")[0].strip() for r in requires if "extra ==" not in r}
    assert always == {"torch", "numpy"}


def test_types_are_published():
    assert (Path(newton_summary.__file__).parent / "py.typed").is_file()


def test_every_public_function_and_class_has_an_example():
    for home in (newton_summary, newton_summary.analysis, newton_summary.figures):
        for name in home.__all__:
            value = getattr(home, name)
            is_error = isinstance(value, type) and issubclass(value, Exception)
            if callable(value) and not is_error and name != "RateRecord":
                assert ">>> " in inspect.getdoc(value), name


def test_every_public_name_exists():
    missing = [name for name in newton_summary.__all__ if not hasattr(newton_summary, name)]
    assert missing == []


def test_the_command_line_knows_the_backends():
    """Its options are read without torch, so it has the names again."""
    names = get_args(derivatives.Backend)
    assert get_args(config.Backend) == names == ("auto", *derivatives.BACKENDS)
