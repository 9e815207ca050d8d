"""The numbers of the front page are those of its runs."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CHOSEN = ("CNN, batch norm, dropout", "GPT", "table")
ROWS = {
    "Adam at 3e-4": ("as given", "loss"),
    "one call": ("advised", "loss"),
    "steered": ("steered", "loss"),
    "rate of Lightning": ("lr_find", "loss"),
    "the rate that it finds": ("lr_find", "lr"),
}


def read(name):
    return [json.loads(line) for line in (ROOT / "benchmarks/results" / name).open()]


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_table_is_that_of_the_runs(page):
    table = re.search(r"\| final training loss.*?\n\n", (ROOT / page).read_text(), re.DOTALL)[0]
    rows = {
        line.split("|")[1].strip(" *"): line.split("|")[2:5]
        for line in table.strip().splitlines()[2:]
    }
    runs, opponents = read("front_page.jsonl"), read("optimizers.jsonl")
    for start, cells in rows.items():
        shown = [[float(x) for x in cell.strip(" *").split()] for cell in cells]
        for training, numbers in zip(CHOSEN, shown, strict=True):
            if start.startswith("best of seven"):
                tried = [c for c in opponents if c["training"] == training]
                tried = [c for c in tried if c["schedule"] == "constant"]
                adam = [c for c in tried if c["method"].startswith("adam ")]
                values = [min(c["loss"] for c in adam if c["seed"] == s) for s in range(3)]
            else:
                method, field = next(v for k, v in ROWS.items() if start.startswith(k))
                values = [
                    r[field] for r in runs if (r["training"], r["method"]) == (training, method)
                ]
            assert numbers == pytest.approx(values, rel=0.1), (start, training)
