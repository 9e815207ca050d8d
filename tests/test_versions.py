"""The oldest Python and torch that pyproject.toml promises, as far as a newer environment can tell.

ruff refuses syntax, and mypy parts of the standard library, that the oldest Python lacks. The names
of torch in the source are compared with a list, which `python tests/test_versions.py` writes when
run with the oldest torch. `scripts/versions.py` runs the whole suite with other versions.
"""

import ast
import importlib.util
import re
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
PROJECT = (ROOT / "pyproject.toml").read_text()
NAMES = Path(__file__).with_name("names_of_oldest_torch.txt")


def promised(pattern: str) -> str:
    """Return what a pattern finds in pyproject.toml (Python 3.10 has no tomllib)."""
    found = re.findall(pattern, PROJECT, re.MULTILINE)
    assert len(found) == 1, f"{pattern} occurs {len(found)} times"
    return found[0]


def torch_names(source: str) -> set[str]:
    """Return the dotted names of torch in a module, such as torch.nn.Linear."""
    nodes = list(ast.walk(ast.parse(source)))
    home = {"torch": "torch"}  # local name: full name
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("torch."):
            home |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
        elif isinstance(node, ast.Import):
            home |= {a.asname: a.name for a in node.names if a.asname and "torch" in a.name}
    names = set(home.values())
    for node in nodes:
        attributes: list[str] = []
        while isinstance(node, ast.Attribute):
            attributes.insert(0, node.attr)
            node = node.value
        if attributes and isinstance(node, ast.Name) and node.id in home:
            names.add(".".join([home[node.id], *attributes]))
    return names


def used() -> set[str]:
    return set().union(*(torch_names(p.read_text()) for p in (ROOT / "src").rglob("*.py")))


def exists(name: str) -> bool:
    """Whether the torch at hand has this name; it need not import its submodules by itself."""
    home, _, last = name.rpartition(".")
    if not home:
        return True
    if not exists(home):
        return False
    try:
        return hasattr(look_up(home), last) or bool(importlib.import_module(name))
    except ImportError:
        return False


def look_up(name: str) -> object:
    value: object = torch
    for part in name.split(".")[1:]:
        value = getattr(value, part)
    return value


def test_checks_of_syntax_and_types_are_for_the_oldest_python():
    oldest = promised(r'^requires-python = ">=(.*)"')
    assert promised(r'^target-version = "py(.*)"') == oldest.replace(".", "")
    assert promised(r'^python_version = "(.*)"') == oldest


def test_names_are_found():
    source = "from torch import nn\nimport torch.nn.functional as F\nnn.Linear\nF.relu\nx.torch.y"
    expected = {"torch", "torch.nn", "torch.nn.functional"}
    assert torch_names(source) == expected | {"torch.nn.Linear", "torch.nn.functional.relu"}
    assert exists("torch.nn.Linear") and not exists("torch.nn.Liner.weight")


def test_names_of_torch_are_in_the_oldest():
    """Those only: methods of tensors, and arguments, are seen by scripts/versions.py alone."""
    oldest, *known = NAMES.read_text().split()
    assert oldest == promised(r'"torch>=([\d.]+)"')
    new = sorted(used() - set(known))
    assert not new, (
        f"Not known to be in torch {oldest}: {new}. Those that are belong in {NAMES.name}."
    )


@pytest.fixture
def versions(monkeypatch, tmp_path):
    """scripts/versions.py, for --share 3.10:2.6.0, which makes environments elsewhere."""
    script = ROOT / "scripts" / "versions.py"
    spec = importlib.util.spec_from_file_location("versions", script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "FOLDER", tmp_path)
    monkeypatch.setattr(sys, "argv", ["versions.py", "--share", "3.10:2.6.0"])
    return module


def test_the_share_of_the_oldest_torch_is_there(versions):
    assert all((ROOT / f"tests/test_{name}.py").exists() for name in versions.SHARE)
    oldest = promised(r'^requires-python = ">=(.*)"'), promised(r'"torch>=([\d.]+)"')
    assert f"--share {':'.join(oldest)}." in (ROOT / ".ci/run").read_text()


def test_no_environment_is_one_line(versions, monkeypatch, capsys):
    """Continuous integration goes on at this status."""
    monkeypatch.setattr(versions, "ROOM", 1e18)
    assert versions.main() == 3
    assert re.fullmatch("No tests with Python 3.10 and torch 2.6.0: .*\n", capsys.readouterr().out)
    monkeypatch.setattr(versions, "ROOM", 0)
    monkeypatch.setenv("PATH", "/nowhere")
    assert versions.main() == 3
    assert "'python3.10'" in capsys.readouterr().out


@pytest.mark.slow
def test_a_test_that_fails_is_told(versions, monkeypatch, tmp_path, capsys):
    interpreter = tmp_path / "environment/bin/python"
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_two.py").write_text("def test_a(): pass\ndef test_b(): assert False")
    monkeypatch.setattr(versions, "ROOT", tmp_path)
    monkeypatch.setattr(versions, "SHARE", ["two"])
    monkeypatch.setattr(versions, "make", lambda *_: interpreter)
    interpreter.parent.mkdir(parents=True)
    interpreter.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"')
    interpreter.chmod(0o755)
    assert versions.main() == 1
    *output, row = capsys.readouterr().out.splitlines()
    assert row.startswith("| 3.10 | 2.6.0 | 1 | 0 | 1 | 0 |")
    assert any(line.startswith("FAILED tests/test_two.py::test_b") for line in output)


if __name__ == "__main__":
    oldest = promised(r'"torch>=([\d.]+)"')
    assert torch.__version__.startswith(f"{oldest}."), f"needs torch {oldest}"
    NAMES.write_text("\n".join([oldest, *sorted(filter(exists, used()))]) + "\n")
