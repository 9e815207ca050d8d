"""The code of the README and of the documentation runs, and prints what the pages show.

The blocks of a page are run in order, as one program. Where a block of text follows a block of
Python, it is what that prints. After a change, ``python tests/test_docs.py PAGE...`` writes the
present output into pages.
"""

import contextlib
import importlib.util
import io
import math
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from newton_summary.cli.main import main
from newton_summary.experiments.recipes import RECIPES

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    *(page for page in sorted((ROOT / "docs").glob("*.md")) if page.name != "distributed.md"),
]  # the scripts of distributed.md are run by test_distributed_run.py, on several processes
SLOW = {"integrations.md", "tutorial.md"}
BLOCK = re.compile(
    r"^(?:<!-- needs (?P<needs>\w+) -->\n)?```python\n(?P<code>.*?)^```$"
    r"(?P<between>\n\n```text\n)?(?P<output>(?(between).*?))(?(between)^```$)",
    re.DOTALL | re.MULTILINE,
)
TOLERANCE = 0.1  # of numbers: they differ between machines, and errors have two digits


def run_blocks(page):
    """Run the blocks of a page; give what each one printed."""
    text = page.read_text(encoding="utf-8")
    namespace = {"__name__": "page"}
    for block in BLOCK.finditer(text):
        if block["needs"] and importlib.util.find_spec(block["needs"]) is None:
            continue
        # Blank lines in front give tracebacks the line numbers of the page.
        lines_before = text.count("\n", 0, block.start("code"))
        code = compile("\n" * lines_before + block["code"], str(page), "exec")
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(code, namespace)
        yield block, "".join(f"{line.rstrip()}\n" for line in printed.getvalue().splitlines())


def same(actual, expected):
    """Whether two words are the same, numbers up to a tolerance."""
    try:
        a, b = (float(word.strip("(),;:%")) for word in (actual, expected))
    except ValueError:
        return actual == expected
    return math.isclose(a, b, rel_tol=TOLERANCE, abs_tol=1e-6)


def differences(actual, expected):
    """Return the words in which two texts differ."""
    actual, expected = actual.split(), expected.split()
    if len(actual) != len(expected):
        return [(len(actual), "words instead of", len(expected))]
    return [pair for pair in zip(actual, expected) if not same(*pair)]


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=pytest.mark.slow if page.name in SLOW else (), id=page.name)
        for page in PAGES
    ],
)
@pytest.mark.filterwarnings("error:Standard errors need")
def test_python_blocks_run_and_print_what_is_shown(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for block, printed in run_blocks(page):
        if block["between"]:
            assert not differences(printed, block["output"]), f"{page.name} prints\n{printed}"


def test_the_pages_have_code_and_output():
    """The expression that finds them finds some."""
    found = [block for page in PAGES for block in BLOCK.finditer(page.read_text(encoding="utf-8"))]
    assert len(found) > 20
    assert sum(bool(block["between"]) for block in found) > 5


def test_outputs_that_differ_are_noticed():
    assert not differences("loss 1.001 (3.0)", "loss 1.000 (3.1)")
    assert differences("loss 1.2", "loss 1.0")
    assert differences("raise", "lower")
    assert differences("a b", "a")


def test_the_model_of_the_command_line_can_be_inspected(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    Path("my_model.py").write_text(BLOCK.search(page)["code"], encoding="utf-8")
    assert main(["inspect", "my_model.py:build"]) == 0
    shown = page.partition("$ newton-summary inspect my_model.py:build\n")[2].partition("```")[0]
    printed = re.sub(r"in \S+ s \(", "in 0.07 s (", capsys.readouterr().out)  # the time
    assert not differences(printed, shown), printed


def test_commands_name_recipes_that_exist():
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    named = re.findall(r"newton[-_]summary (?:run|sweep) ([a-z]\w+)(?![\w$])", text)
    assert len(named) > 5
    assert [name for name in named if name not in RECIPES] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_to_files_lead_somewhere(page):
    text = page.read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)#\s]+)\)", text) + re.findall(r'(?:src|srcset)="([^"]+)"', text)
    for target in targets:
        if "://" not in target:
            assert (page.parent / target).exists(), target


@pytest.mark.slow
def test_documentation_builds_without_a_warning(tmp_path):
    pytest.importorskip("sphinx")
    pytest.importorskip("furo")
    pytest.importorskip("myst_parser")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html"]
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    built = subprocess.run(
        [*command, str(ROOT / "docs"), str(tmp_path / "html")],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert built.returncode == 0, built.stderr
    api = (tmp_path / "html" / "api.html").read_text(encoding="utf-8")
    import newton_summary

    for name in set(newton_summary.__all__) - {"__version__"}:
        assert f'id="newton_summary.{name}"' in api, name


def refresh(page):
    """Write the present output into a page."""
    text, shift = page.read_text(encoding="utf-8"), 0
    for block, printed in run_blocks(page):
        if block["between"]:
            start, end = (place + shift for place in block.span("output"))
            text = text[:start] + printed + text[end:]
            shift += len(printed) - (end - start)
    page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    pages = [Path(name).resolve() for name in sys.argv[1:]]
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for page in pages:
            refresh(page)
