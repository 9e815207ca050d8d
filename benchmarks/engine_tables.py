"""The tables of docs/benchmarks.md, from the files that benchmarks/engine.py writes.

python benchmarks/engine_tables.py benchmarks/results/engine-h200.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

NAMES = {
    "mlp": "MLP",
    "lenet": "LeNet",
    "vgg11": "VGG-11'",
    "bigmlp": "BigMLP",
    "vbigmlp-chunks": "VBigMLP, five chunks",
    "vbigmlp": "VBigMLP, per tensor",
    "resnet18": "ResNet-18, batch norm in training",
    "gpt2-role": "GPT-2 small, by block and role",
    "gpt2": "GPT-2 small, per tensor",
    "llama": "Llama, 1.1 billion parameters",
    "llama-lora": "Llama, adapters alone",
    "mlp12": "MLP of 12 layers of 256",
}
METHODS = {
    "sweep": "sweep",
    "hvp": "HVPs",
    "nested": "nested",
    "torch.func": "torch.func",
    "curvlinops": "curvlinops",
    "eigenthings": "hessian-eigenthings",
    "jet": "jet, one direction",
}

SMALL_GPTS = {  # features, texts x tokens
    "gpt-cpu": (128, "4 x 128"),
    "gpt-cpu-32": (32, "16 x 32"),
    "gpt-cpu-64": (32, "64 x 64"),
    "gpt-cpu-256": (256, "8 x 256"),
}
Results = dict[tuple[str, str, int], dict[str, Any]]  # by model, method and order


def read(path: Path) -> Results:
    """Return the measurements in a file."""
    rows = json.loads(path.read_text())["results"]
    return {(r["model"], r["method"], r["order"]): r for r in rows}


def table(header: list[str], rows: list[list[str]]) -> str:
    """Return a table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("|" + "|".join(f" {x} " if x != "---" else x for x in r) + "|" for r in lines)


def models_in(results: Results) -> list[str]:
    """Return the models that were measured, in the order of the page."""
    measured = {model for model, _, _ in results}
    return [model for model in NAMES if model in measured]


def entry(row: dict[str, Any] | None, key: str, form: str) -> str:
    """Return a number, or why there is none."""
    if row is None:
        return "-"
    return "fails" if "error" in row else format(row[key], form)


def gradients(row: dict[str, Any] | None) -> str:
    """Return a time in gradients, to three digits."""
    large = row is not None and row.get("gradients", 0) >= 99.95
    return entry(row, "gradients", ".0f" if large else ".1f")


def cost(results: Results) -> str:
    """Time of every method, in gradients."""
    columns = [
        (method, order)
        for method in METHODS
        for order in (2, 3)
        if any(key[1:] == (method, order) for key in results)
    ]
    header = ["model", "S", "batch", "one gradient"]
    header += [f"{METHODS[method]}, order {order}" for method, order in columns]
    header.insert(6, "(S+4)/3")
    rows = []
    for model in models_in(results):
        one = results[model, "gradient", 1]
        numbers = [gradients(results.get((model, *column))) for column in columns]
        numbers[1] = f"**{numbers[1]}**"
        numbers.insert(2, f"{(one['S'] + 4) / 3:.1f}")
        rows.append(
            [NAMES[model], str(one["S"]), str(one["batch"]), f"{one['ms']:.2f} ms", *numbers]
        )
    return table(header, rows)


def against_nested(results: Results) -> str:
    """Time and agreement of the sweep and nested differentiation."""
    rows = []
    for model in models_in(results):
        sweep = results.get((model, "sweep", 3))
        nested = results.get((model, "nested", 3))
        if sweep is None or nested is None:
            continue
        rows.append(
            [
                NAMES[model],
                f"{sweep['ms']:.1f} ms = {sweep['gradients']:.1f} gradients",
                f"{nested['ms']:.0f} ms",
                f"{nested['ms'] / sweep['ms']:.1f}",
                f"{nested['Hbar_difference']:.0e}, {nested['D3_difference']:.0e}",
            ]
        )
    return table(
        ["model", "sweep", "nested", "ratio", "largest difference in Hbar, D3"],
        rows,
    )


def memory(results: Results) -> str:
    """Peak memory of every method beside the weights."""
    columns = [
        ("gradient", 1),
        ("sweep", 2),
        ("sweep", 3),
        ("hvp", 2),
        ("nested", 3),
        ("torch.func", 3),
    ]
    header = ["model", "gradient", "sweep, order 2", "sweep, order 3", "HVPs"]
    header += ["nested, order 3", "torch.func, order 3"]
    rows = [
        [NAMES[model], *(entry(results.get((model, *c)), "GiB", ".2f") for c in columns)]
        for model in models_in(results)
    ]
    return table(header, rows)


def peaks(results: Results) -> str:
    """Time over (S+4)/3 gradients, and peak memory over that of a gradient, of the sweep."""
    rows = []
    for model in models_in(results):
        one, *both = (
            results[model, m, d] for m, d in (("gradient", 1), ("sweep", 2), ("sweep", 3))
        )
        floor = (one["S"] + 4) / 3
        memory = [f"{row['GiB']:.2f} GiB" for row in (one, both[1])]
        ratios = [f"{both[1]['gradients'] / floor:.2f}", f"{both[1]['GiB'] / one['GiB']:.1f}"]
        rows.append([NAMES[model], f"{one['ms']:.2f} ms", *map(gradients, both), *ratios, *memory])
    header = ["model", "one gradient", "order 2", "order 3", "order 3, times the floor"]
    header += ["peaks of a gradient", "gradient", "order 3"]
    return table(header, rows)


def small_gpts(path: Path) -> str:
    """Small GPTs on a CPU: medians of several runs, and one run with MKL alone."""
    stored = json.loads(path.read_text())
    rows = []
    for model, (features, data) in SMALL_GPTS.items():
        *runs, by_mkl = (
            {r["method"]: r for r in run["results"] if r["model"] == model}
            for run in (*stored["runs"], stored["mkl"])
        )
        floor = (runs[0]["sweep"]["S"] + 4) / 3
        one = median(run["gradient"]["ms"] for run in runs)
        found = median(run["sweep"]["gradients"] for run in runs)
        mkl = by_mkl["sweep"]["gradients"]
        numbers = [f"{one:.1f} ms", f"**{found:.1f}**", f"{found / floor:.2f}", f"{mkl:.1f}"]
        rows.append([str(features), data, *numbers, f"{mkl / floor:.2f}"])
    header = ["features", "texts x tokens", "one gradient", "order 3", "times the floor"]
    return table([*header, "by MKL alone", "times the floor"], rows)


def main() -> None:
    """Print all tables of some files."""
    for path in sys.argv[1:]:
        results = read(Path(path))
        parts = [cost(results)]
        if any(method == "nested" for _, method, _ in results):
            parts.append(against_nested(results))
        parts += [memory(results), peaks(results)]
        print(path, *parts, sep="\n\n", end="\n\n")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main()
