"""The table of the front page: three trainings with the learning rate at hand, advised and found.

    OMP_NUM_THREADS=1 python benchmarks/front_page.py [--out results.jsonl] [--seeds 0 1 2]

From Adam at 3e-4: as it is, with one call of ``suggest_lrs`` before the training, steered by
``RateController``, and with the rate that Lightning's ``lr_find`` suggests in its default form. The
trainings are three of optimizer_trainings.py. The best of seven rates is read from
results/optimizers.jsonl, which holds the same trainings with the same seeds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.tuner import Tuner
from optimizer_trainings import TRAININGS, Training
from optimizers import train
from torch.optim import Adam
from torch.utils.data import DataLoader, TensorDataset

import newton_summary as ns

CHOSEN = ("CNN, batch norm, dropout", "GPT", "table")
START = 3e-4
BATCHES = 8
FOLDER = Path(tempfile.gettempdir()) / "newton_summary_trainings"


class Module(pl.LightningModule):
    def __init__(self, training: Training) -> None:
        super().__init__()
        self.model, self.training_, self.lr = training.build(), training, START

    def training_step(self, batch: Any) -> torch.Tensor:
        return self.training_.loss_fn(self.model, batch)

    def configure_optimizers(self) -> Adam:
        return Adam(self.parameters(), lr=self.lr)


def advised(training: Training, loader: DataLoader[Any]) -> tuple[float, str]:
    model = training.build()
    adam = Adam(model.parameters(), lr=START)
    some = dict(enumerate(itertools.islice(loader, BATCHES))).values()
    advice = ns.suggest_lrs(model, training.loss_fn, some, adam)
    (group,) = advice.groups
    return group.suggested[0], f"x{group.factor:.3g} ± {group.stderr:.2g}, {group.verdict}"


def found(training: Training, loader: DataLoader[Any]) -> tuple[float, str]:
    module = Module(training)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(
        accelerator="cpu", enable_model_summary=False, default_root_dir=FOLDER, **quiet
    )
    finder = Tuner(trainer).lr_find(module, loader)
    rate = None if finder is None else finder.suggestion()
    return (START, "no suggestion") if rate is None else (rate, "")


def run(name: str, seed: int) -> list[dict[str, Any]]:
    """Train as given, advised, steered and found."""
    training = TRAININGS[name]
    dataset = TensorDataset(*training.load(FOLDER)[0])
    rows = []
    for method in ("as given", "advised", "steered", "lr_find"):
        order = torch.Generator().manual_seed(seed)
        loader = DataLoader(dataset, training.batch, shuffle=True, generator=order)
        torch.manual_seed(seed)
        start, (lr, note) = time.perf_counter(), (START, "")
        if method in ("advised", "lr_find"):
            lr, note = (advised if method == "advised" else found)(training, loader)
        spent = time.perf_counter() - start
        kind = "steer" if method == "steered" else "adam"
        cell = {"training": name, "method": f"{kind} {lr!r}", "schedule": "constant", "seed": seed}
        cell = train(cell, FOLDER, "cpu", {})
        row = {"training": name, "method": method, "seed": seed, "lr": lr, "note": note}
        row |= {"loss": cell["loss"], "score": cell["score"]}
        rows.append(row | {"seconds": cell["seconds"], "to_find": round(spent, 2)})
    return rows


def best_of_seven(name: str, seed: int) -> tuple[float, str]:
    """Return the lowest loss of Adam at a constant rate, and the rate."""
    path = Path(__file__).parent / "results" / "optimizers.jsonl"
    cells = [json.loads(line) for line in path.read_text().splitlines()]
    of = ("training", "schedule", "seed")
    same = [c for c in cells if [c[k] for k in of] == [name, "constant", seed]]
    tried = [(c["loss"], c["method"].split()[1]) for c in same if c["method"].startswith("adam ")]
    return min(tried)


def main() -> None:
    """Run what is not in the file yet, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("front_page.jsonl"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    done = args.out.read_text().splitlines() if args.out.exists() else []
    rows = [json.loads(line) for line in done]
    for name, seed in itertools.product(CHOSEN, args.seeds):
        if not any((row["training"], row["seed"]) == (name, seed) for row in rows):
            new = run(name, seed)
            rows += new
            with args.out.open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in new)
    for name in CHOSEN:
        print(f"\n{name}: final loss of the training set, seeds {args.seeds}")
        for method in ("as given", "advised", "steered", "lr_find"):
            mine = [r for r in rows if (r["training"], r["method"]) == (name, method)]
            mine = [r for r in mine if r["seed"] in args.seeds]
            losses = " ".join(f"{row['loss']:.3g}" for row in mine)
            rates = " ".join(f"{row['lr']:.2g}" for row in mine)
            seconds = sum(row["seconds"] + row["to_find"] for row in mine)
            print(f"  {method:<10} {losses:<24} lr {rates:<26} {seconds:.0f} s")
        best = [best_of_seven(name, seed) for seed in args.seeds]
        losses, rates = " ".join(f"{x:.3g}" for x, _ in best), " ".join(lr for _, lr in best)
        print(f"  {'best of 7':<10} {losses:<24} lr {rates}")


if __name__ == "__main__":
    main()
