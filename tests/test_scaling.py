"""The tables on scaling in the documentation are those of benchmarks/scaling.py."""

import importlib
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"


@pytest.fixture(scope="module")
def scaling():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        yield importlib.import_module("scaling")


@pytest.fixture(scope="module")
def results():
    return json.loads((RESULTS / "scaling.json").read_text())


def test_the_tables_of_the_page_are_those_of_the_results(scaling, results):
    page = (ROOT / "docs" / "distributed.md").read_text()
    for table in (
        scaling.measured_table(results["measured"]),
        scaling.paper_table(results["on paper"]),
    ):
        assert table in page, f"Paste into docs/distributed.md:\n{table}"


def test_the_model_takes_the_sweep_as_it_was_measured(results):
    engine = json.loads((RESULTS / "engine-h200.json").read_text())
    times = {(r["model"], r["method"], r["order"]): r.get("ms") for r in engine["results"]}
    for row in results["on paper"]:
        assert row["sweep_ms"] == times[row["model"], "sweep", 3], (
            "Run: OMP_NUM_THREADS=1 python benchmarks/scaling.py --paper "
            "--out benchmarks/results/scaling.json, and paste its second table into "
            "docs/distributed.md"
        )
        assert row["bytes"] == 8 * (row["S"] ** 2 + 2 * row["S"] + 4)


def test_the_assumed_network(scaling):
    """Latency alone for nothing; twice the size at the speed of a node, or of the network."""
    network = scaling.Network()
    assert network.all_reduce_ms(0, 8) == pytest.approx(0.020 + 6 * 0.005)
    assert network.all_reduce_ms(0, 1024) == pytest.approx(0.020 + 20 * 0.005)
    gigabyte = 10**9
    assert network.all_reduce_ms(gigabyte, 8) == pytest.approx(0.05 + 2 * 7 / 8 * 1000 / 400)
    assert network.all_reduce_ms(gigabyte, 64) == pytest.approx(0.08 + 2 * 63 / 64 * 1000 / 50)
