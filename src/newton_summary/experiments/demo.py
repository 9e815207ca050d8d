"""The demo: LeNet on the images in the package, trained, measured and drawn."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rich.console import Console

from newton_summary.analysis.interactions import joint_gain, strongest_pairs
from newton_summary.experiments.config import MeasureConfig
from newton_summary.experiments.datasets import load_dataset
from newton_summary.experiments.paper_report import make_report
from newton_summary.experiments.progress import watching
from newton_summary.experiments.recipes import RECIPES
from newton_summary.experiments.results import outcome
from newton_summary.experiments.rundir import Run, read_checkpoint
from newton_summary.experiments.tasks import make_task
from newton_summary.experiments.training import train
from newton_summary.measuring.tried_rates import learning_rates
from newton_summary.run_directory import RunFiles
from newton_summary.solver import LearningRates
from newton_summary.summary import Summary

RECIPES_SHOWN = ("lenet_embedded", "lenet_embedded_adam")

NEXT = """
What next:
  open {page} in a browser: the same, to explore
  ns.suggest_lrs(model, loss_fn, data, adam)    in Python: is your own learning rate right?
  newton-summary inspect my_model.py:build      measure your own model
  newton-summary list                           the paper's experiments, and others"""


def demonstrate(out: Path, epochs: int, console: Console) -> list[Path]:
    """Train LeNet with NewtonSummary and with Adam, measure its layers, and draw the figures.

    The run directories and the report are in ``out``; returns the files of the report.
    """

    def say(text: object = "") -> None:
        console.print(str(text), highlight=False, markup=False)

    runs = []
    for name in RECIPES_SHOWN:
        config = replace(RECIPES[name](), epochs=epochs, measure=MeasureConfig(every=1))
        with watching(console, RECIPES[name].about) as reporter:
            runs.append(train(config, out / name, reporter))
        say()
    say(_comparison(*runs))
    measured = runs[0].summaries()
    if measured:
        say()
        say(_layers(runs[0], measured[-1].summary))
    files = make_report(runs, out / "report")
    say(f"\nThe page, the tables and the figures are in {out / 'report'}:")
    return files


def _comparison(mine: Run, adam: Run) -> str:
    lines = ["Trained from the same weights:"]
    for label, run in (("NewtonSummary", mine), ("Adam, lr 1e-3", adam)):
        found = outcome(run)
        lines.append(
            f"  {label:<14} training loss {found.train_loss:.4f}, test accuracy "
            f"{found.last_test_accuracy:.1%}, {found.seconds:.1f} s of training"
        )
    return "\n".join(lines)


def _layers(run: Run, summary: Summary) -> str:
    """Describe the layers by the last measurement along the gradient of all images."""
    rates = _tried_rates(run, summary)
    groups = summary.partition
    if groups is not None:  # numbered layers are named with their type
        summary = replace(summary, partition=groups.regrouped(groups.titles, groups.labels))
        rates = replace(rates, names=summary.names)
    return "\n\n".join(
        [
            f"The layers at the end, along the gradient of {summary.num_samples:,} images. "
            f"Learning rates for the next step, which was tried:",
            str(rates),
            "The pairs that interact most (+1: they get in each other's way, -1: they help):",
            str(strongest_pairs(summary, 5)),
            "What the interactions between layers are worth:",
            str(joint_gain(summary)),
        ]
    )


def _tried_rates(run: Run, summary: Summary) -> LearningRates:
    """Return learning rates after a trial with the trained model, as its checkpoint has it."""
    checkpoint = read_checkpoint(RunFiles(run.path))
    if checkpoint is None or checkpoint["epoch"] != run.epoch:
        return learning_rates(summary)
    data = load_dataset(run.config.data)
    task = make_task(run.config.model, data)
    task.model.load_state_dict(checkpoint["model"])
    batches = list(data.train.parts(run.config.measure.batch_size))
    return learning_rates(summary, model=task.model, loss_fn=task.loss, data=batches)
