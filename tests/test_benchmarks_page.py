"""The tables on the cost of a summary in the documentation are those of the results."""

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def tables():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        yield importlib.import_module("engine_tables")


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("engine-h200", ["cost", "against_nested", "memory"]),
        ("engine-h200-default", ["cost"]),
        ("engine-h200-sweep", ["peaks"]),
        ("engine-h200-opponents", ["cost"]),
        ("engine-cpu", ["against_nested"]),
    ],
)
def test_the_tables_of_the_page_are_those_of_the_results(tables, name, parts):
    results = tables.read(ROOT / "benchmarks" / "results" / f"{name}.json")
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    for part in parts:
        table = getattr(tables, part)(results)
        assert table in page, f"Paste into docs/benchmarks.md:\n{table}"


def test_small_gpts_are_those_of_their_runs(tables):
    found = tables.small_gpts(ROOT / "benchmarks" / "results" / "engine-cpu-gpt.json")
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    assert found in page, f"Paste into docs/benchmarks.md:\n{found}"
