"""What a plain import needs, and what it says of itself."""

import importlib.metadata
import inspect
import re
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
    """But for two errors that only several processes can raise."""
    page = (Path(__file__).parents[1] / "docs/api.md").read_text(encoding="utf-8")
    listed = re.findall(r"auto(?:function|class|exception):: newton_summary\.(\S+)", page)
    others = [f"{home}.{x}" for home in ("analysis", "figures") for x in names_of(home)]
    assert set(newton_summary.__all__) - {"__version__"} <= set(listed)
    without = {name for name in (*listed, *others) if ">>> " not in inspect.getdoc(found(name))}
    assert without == {"RankError", "RankNotFiniteError"}


def names_of(home: str) -> list[str]:
    module = importlib.import_module(f"newton_summary.{home}")
    return [name for name in module.__all__ if callable(getattr(module, name))]


def found(name: str) -> object:
    """Return what the page calls ``newton_summary.name``."""
    home, _, own = name.rpartition(".")
    return getattr(importlib.import_module(f"newton_summary.{home}".rstrip(".")), own)


def test_every_public_name_exists():
    missing = [name for name in newton_summary.__all__ if not hasattr(newton_summary, name)]
    assert missing == []


def test_the_command_line_knows_the_backends():
    """Its options are read without torch, so it has the names again."""
    names = get_args(derivatives.Backend)
    assert get_args(config.Backend) == names == ("auto", *derivatives.BACKENDS)
