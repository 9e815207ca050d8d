"""The tables of the pages on steering, training and limits are those of the stored runs."""

import json
import math
import re
import sys
from pathlib import Path
from statistics import fmean

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import other_kinds
from kinds import KINDS
from optimizer_trainings import DEVELOPMENT, HELD_OUT, TRAININGS
from optimizers import settings

from newton_summary.optimizer import controller

ROOT = Path(__file__).parents[1]
METHODS = {
    "RateController": "steer 0.001",
    "Adam 1e-3": "adam 0.001",
    "Adam 3e-3": "adam 0.003",
    "Prodigy": "prodigy 1",
    "schedule-free AdamW": "schedulefree 0.0025",
}


def read(file="optimizers.jsonl"):
    """Return the final losses by training, schedule and seed, then by method."""
    found = {}
    for line in (ROOT / "benchmarks/results" / file).open():
        cell = json.loads(line)
        key = cell["training"], cell["schedule"], cell["seed"]
        found.setdefault(key, {})[cell["method"]] = cell["loss"]
    return found


def row(method, trainings, schedule):
    """Return the numbers of a row: runs, mean and worst ratio to Adam's best, runs that are won."""
    ratios, wins = [], {"adam 0.001": 0, "prodigy 1": 0}
    for (training, kind, _), losses in read().items():
        if training in trainings and kind in schedule and method in losses:
            best = min(loss for name, loss in losses.items() if name.startswith("adam "))
            ratios.append(losses[method] / best)
            for other in wins:
                wins[other] += losses[method] < losses[other]
    return len(ratios), math.exp(fmean(map(math.log, ratios))), max(ratios), *wins.values()


def check(cells, method, trainings, schedule):
    runs, mean, worst, *wins = row(method, trainings, schedule)
    shown = [float(re.match(r"[\d.]+", cell)[0]) for cell in cells[:3]]
    assert shown[0] == runs, cells
    assert shown[1] == pytest.approx(mean, abs=0.00501) and shown[2] == pytest.approx(worst, 0.05)
    for cell, won in zip(cells[3:], wins, strict=True):
        assert cell in ("", f"{won} of {runs}"), cells


def rows_of(page, first):
    table = re.search(rf"\| {first}.*?\n\n", (ROOT / page).read_text(), re.DOTALL)[0]
    return [[x.strip(" *") for x in line.split("|")[1:-1]] for line in table.strip().splitlines()]


def test_steering():
    checked = 0
    for name, *cells in rows_of("docs/steer.md", "development, constant rate"):
        if ":" in name:
            part, _, name = (x.strip(" *") for x in name.partition(":"))
            trainings = DEVELOPMENT if part.startswith("development") else HELD_OUT
            schedule = "constant" if "constant" in part else "linear"
        if method := METHODS.get(name.split(",")[0]):
            check(cells[:5], method, trainings, schedule)
            checked += 1
    assert checked == 18


def test_training():
    for name, *cells in rows_of("docs/training.md", "development, constant rate"):
        trainings = DEVELOPMENT if name.startswith("development") else HELD_OUT
        schedule = "constant" if "constant" in name else "linear"
        if name == "all":
            trainings, schedule = TRAININGS, "constant, linear"
        check(cells, "newton -", trainings, schedule)


def test_set_points():
    best = {
        key: min(loss for name, loss in losses.items() if name.startswith("adam "))
        for key, losses in read().items()
    }
    tried = read("set_points.jsonl")
    rows = rows_of("docs/steer.md", "set point \\| constant \\| worst")[2:]
    assert len(rows) == 3
    for name, *cells in rows:
        method = f"steer{100 * float(name.split(',')[0]):.0f} 0.001"
        for kind, mean, worst in (("constant", *cells[:2]), ("linear", *cells[2:])):
            ratios = [x[method] / best[key] for key, x in tried.items() if key[1] == kind]
            assert len(ratios) == 42 and float(worst) == pytest.approx(max(ratios), 0.05)
            assert float(mean) == pytest.approx(math.exp(fmean(map(math.log, ratios))), abs=0.00501)


def test_other_kinds():
    cells = other_kinds.read(ROOT / "benchmarks/results/other_kinds.jsonl")
    assert {cell["kind"] for cell in cells} == set(KINDS)
    table = other_kinds.table(cells)
    page = (ROOT / "docs/training.md").read_text()
    shown = page.partition("<!-- benchmarks/other_kinds.py -->")[2].partition("<!-- end -->")[0]
    assert shown.strip() == table, f"Paste into docs/training.md:\n{table}"


def test_the_table_of_other_kinds_compares_with_the_best_rate():
    def cells(kind, seed, ours, *adam):
        losses = {"RateController": ours, **dict(zip(other_kinds.ADAM, adam))}
        cell = {"kind": kind, "schedule": "constant", "seed": seed}
        return [cell | {"method": m, "loss": loss} for m, loss in losses.items()]

    found = [
        *cells("GRU", 0, 2.0, 1.0, 3.0, 4.0, math.nan),
        *cells("GRU", 1, 1.0, 3.0, 2.0, 4.0, 5.0),
        *cells("GRU", 2, 9.0, 1.0),  # not all rates: left out
        *cells("VAE", 0, 40.0, 20.0, 10.0, 30.0, 30.0),
    ]
    assert other_kinds.table(found).splitlines() == [
        "| | `RateController` |",
        "|---|---|",
        "| GRU, constant | 1.00 (2) |",
        "| VAE, constant | 4.00 (4) |",
        "| **all, constant** | 2.00 (4) |",
    ]


def test_a_variant_leaves_the_constants_to_the_next_cell():
    before = controller.FALLING
    with settings({"set_point": 0.8, "FALLING": 0.5}) as options:
        assert options == {"set_point": 0.8} and controller.FALLING == 0.5
    assert before == controller.FALLING
    with pytest.raises(ValueError, match="FALING"), settings({"FALING": 0.5}):
        pass
