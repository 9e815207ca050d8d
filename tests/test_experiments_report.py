"""Tables and paper_figures are made from run directories, and hold what the runs hold."""

import csv
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from damaged_runs import sign
from experiment_cases import shrink, tiny, use_random_images
from newton_summary.cli import main as cli
from newton_summary.errors import UserError
from newton_summary.experiments import paper_figures, tables
from newton_summary.experiments.config import (
    AdamConfig,
    MeasureConfig,
    NewtonSummaryConfig,
    SGDConfig,
)
from newton_summary.experiments.paper_report import make_report
from newton_summary.experiments.recipes import RECIPES
from newton_summary.experiments.results import Spread, method_labels, outcome
from newton_summary.experiments.rundir import Run, find_runs
from newton_summary.experiments.training import train
from newton_summary.run_directory import read_history

pytestmark = pytest.mark.filterwarnings("ignore:NewtonSummary")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two seeds of Adam and NewtonSummary, the studies of the appendices in small, and SGD."""
    root = tmp_path_factory.mktemp("runs")
    small = NewtonSummaryConfig(
        "as-run", lr=0.1, lambda_int=1.0, curvature_batch_size=20, summary_period=1
    )
    full = MeasureConfig(every=1, samples=20)
    configs = [
        *(tiny(seed=seed) for seed in (0, 1)),
        *(tiny(small, seed=seed) for seed in (0, 1)),
        tiny(replace(small, partition="trivial")),
        tiny(replace(small, diagonal=True)),
        tiny(SGDConfig(), measure=full),
    ]
    with pytest.MonkeyPatch.context() as patch:
        use_random_images(patch)
        for name in ("vgg_cifar10_trivial", "vgg_cifar10_newton_summary", "vgg_cifar10_adam"):
            configs.append(shrink(RECIPES[name]()))
        found = [train(config, root / str(i)) for i, config in enumerate(configs)]
        diverged = tiny(SGDConfig(lr=1e300), model=replace(tiny().model, name="autoencoder"))
        return [*found, train(diverged, root / "diverged")]


def rows_of(table):
    return [dict(zip(table.header, row)) for row in table.rows]


def test_outcome_is_read_off_the_metrics(runs):
    run = runs[0]
    result = outcome(run)
    assert result.status == "finished" and result.epochs == 3
    assert result.train_loss == run.rows[-1]["train_loss"]
    best = min(run.rows, key=lambda row: row["validation_loss"])
    assert (result.best_epoch, result.test_loss) == (best["epoch"], best["test_loss"])
    assert result.seconds == sum(row["seconds"] for row in run.rows)
    assert outcome(runs[-1]).status == "diverged"
    assert json.dumps(outcome(runs[-1]).as_dict())  # nan is None
    told = str(replace(result, epochs=1, train_loss=math.nan))
    assert told.startswith("finished after 1 epoch: test ") and "nan" not in told


def test_spread_leaves_out_what_is_not_finite():
    values = Spread((1.0, 3.0, math.nan))
    assert (values.mean, values.std) == (2, math.sqrt(2)) and str(values) == "2 ± 1.4"
    assert str(Spread((math.nan,))) == "-" and str(Spread((5.0,))) == "5"


def test_seeds_are_put_together_and_settings_are_not(runs, tmp_path):
    other = train(tiny(AdamConfig(lr=1e-2)), tmp_path)
    labels = method_labels([*runs[:2], other])
    assert list(labels.values()) == ["Adam, lr=0.001", "Adam, lr=0.001", "Adam, lr=0.01"]
    assert set(method_labels(runs[:2]).values()) == {"Adam"}


def test_a_seed_is_not_counted_twice(runs, tmp_path):
    longer = train(replace(runs[0].config, epochs=runs[0].config.epochs + 1), tmp_path)
    labels = list(method_labels([*runs[:2], longer]).values())
    first = runs[0].config.epochs
    assert labels == [f"Adam, epochs={first}"] * 2 + [f"Adam, epochs={first + 1}"]


def test_results_table(runs):
    rows = rows_of(tables.results_table(runs))
    adam = rows[0]
    assert (adam["setup"], adam["optimizer"], adam["seeds"]) == (
        "MLP / embedded MNIST",
        "Adam",
        "2",
    )
    mean = sum(run.rows[-1]["train_loss"] for run in runs[:2]) / 2
    assert adam["train loss"].startswith(f"{mean:.4g} ±")
    assert rows[-1][""] == "1 diverged"


def test_partition_table_stands_beside_the_paper(runs):
    rows = tables.partition_table(runs).rows
    vgg = [row for row in rows if row[0].startswith("VGG")]
    assert [row[1] for row in vgg] == ["trivial", "canonical"]
    assert [(row[4], row[6], row[8]) for row in vgg] == [
        ("0.812", "2512", "2.49 GB"),
        ("0.000305", "4612", "1.88 GB"),
    ]
    assert all(row[4] == "-" for row in rows if not row[0].startswith("VGG"))
    assert tables.partition_table(runs[:3]) is None


def test_diagonal_table(runs):
    rows = rows_of(tables.diagonal_table(runs))
    assert [row["Hbar"] for row in rows] == ["full", "diagonal"]
    assert tables.diagonal_table(runs[:4]) is None


def test_times_table_has_ratios_to_adam(runs):
    rows = rows_of(tables.times_table(runs))
    ours, adam = (
        next(r for r in rows if r["setup"].startswith("VGG") and r["optimizer"] == name)
        for name in ("NewtonSummary", "Adam")
    )
    assert ours["paper, over Adam"] == f"{4613 / 1696:.2f}"
    assert adam["over Adam"] == "1.00"
    expected = float(ours["s per epoch"]) / float(adam["s per epoch"])
    assert float(ours["over Adam"]) == pytest.approx(expected, rel=0.01)


def test_tables_as_text(runs):
    for table in tables.all_tables(runs):
        lines = table.markdown().splitlines()
        assert lines[0].startswith("### ")
        assert len({line.count("|") for line in lines if line.startswith("|")}) == 1
        assert next(csv.reader(table.csv().splitlines())) == list(table.header)


def test_curves_show_every_seed_and_the_median(runs):
    (axis,) = paper_figures.training_curves(runs[:2]).axes
    assert len(axis.lines) == 3  # two seeds and their median
    mean = axis.lines[-1].get_ydata()
    expected = (runs[0].rows[2]["train_loss"] + runs[1].rows[2]["train_loss"]) / 2
    assert mean[2] == pytest.approx(expected) and axis.get_yscale() == "log"
    assert len(paper_figures.test_curves(runs[:4]).axes) == 2


def test_main_optimizers_keep_their_colours_and_none_is_used_twice(runs):
    panels = paper_figures.training_curves(runs).axes
    for axis in panels:
        means = [line for line in axis.lines if not line.get_label().startswith("_")]
        looks = {line.get_label(): line.get_color() for line in means}
        assert len(set(looks.values())) == len(looks)
        assert all(
            paper_figures.FIXED[label] == c
            for label, c in looks.items()
            if label in paper_figures.FIXED
        )


def test_diagonal_is_dotted(runs):
    figure = paper_figures.diagonal_curves(runs)
    (axis,) = figure.axes
    styles = {line.get_label(): line.get_linestyle() for line in axis.lines}
    assert styles["NewtonSummary (diagonal)"] == ":" and styles["NewtonSummary"] == "-"
    assert paper_figures.diagonal_curves(runs[:4]) is None


def test_hessian_figure_has_the_blocks_at_two_times(runs):
    sgd = next(run for run in runs if run.config.measure.every)
    figure = paper_figures.hessian_figure(sgd)
    images = [axis for axis in figure.axes if axis.images]
    assert len(images) == 12
    first = sgd.summaries()[0]
    assert first.epoch == 0
    block = first.summary.blocks()["weight-weight"].values.numpy()
    assert images[0].images[0].get_array().tolist() == block.tolist()
    assert paper_figures.hessian_figure(runs[0]) is None


def test_eta_figure_has_a_line_for_each_group(runs):
    sgd = next(run for run in runs if run.config.measure.every)
    (axis,) = paper_figures.eta_figure(sgd).axes
    assert [line.get_linestyle() for line in axis.lines] == ["-", ":"] * 4
    measured = sgd.summaries()
    rates = [float(m.eta[0]) for m in measured]
    drawn = axis.lines[0].get_ydata()
    for rate, value in zip(rates, drawn):
        assert value == rate if rate > 0 else math.isnan(value)
    assert paper_figures.eta_figure(runs[0]) is None


@pytest.mark.slow
def test_report_writes_everything_and_the_page_shows_it(runs, tmp_path):
    files = make_report(runs, tmp_path / "out")
    names = {file.name for file in files}
    for table in ("results", "partitions", "diagonal", "times", "runs"):
        assert {f"{table}.md", f"{table}.csv"} <= names
    curves = ("training_curves", "test_curves", "partition_curves", "diagonal_curves")
    for figure in (*curves, "04_custom_hbar"):
        assert {f"{figure}.png", f"{figure}.pdf"} <= names
    assert {"04_custom_eta.png"} <= names
    assert [file.name for file in files[:2]] == ["report.html", "report.md"]
    page = files[1].read_text()
    for file in files:
        content = file.read_bytes()
        assert len(content) > 50
        assert file.suffix != ".png" or (content[:4] == b"\x89PNG" and f"({file.name})" in page)
        assert file.suffix != ".pdf" or content[:4] == b"%PDF"


@pytest.mark.slow
def test_a_new_report_leaves_nothing_of_an_earlier_one(runs, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    earlier = make_report(runs[:3], tmp_path)
    now = make_report(runs[:1], tmp_path)
    assert set(now) < set(earlier)
    left = {file.name for file in tmp_path.iterdir()}
    assert left == {"notes.txt", "files.json", *(file.name for file in now)}


@pytest.mark.slow
def test_report_from_the_command_line(runs, tmp_path, capsys):
    folder = runs[0].path
    assert cli.main(["report", str(folder), "--out", str(tmp_path / "out"), "--json"]) == 0
    files = json.loads(capsys.readouterr().out)
    assert [Path(file).name for file in files[:2]] == ["report.html", "report.md"]
    assert all(Path(file).is_file() for file in files)


def test_only_runs_in_the_papers_mode_are_studies(runs, tmp_path):
    """In another variant the partition is one of several differences."""
    canonical, trivial = runs[2].config, runs[4].config
    steered = replace(trivial, optimizer=replace(trivial.optimizer, variant="default"))
    for other, shown in ((trivial, True), (steered, False)):
        pair = [
            Run(tmp_path / str(i), config, runs[2].rows)
            for i, config in enumerate((canonical, other))
        ]
        assert (paper_figures.partition_curves(pair) is not None) is shown
        assert (tables.partition_table(pair) is not None) is shown


def test_a_constant_rate_and_the_time_are_facts_and_not_curves(runs, tmp_path):
    run = runs[0]
    history = read_history(run.path)
    assert set(history.curves) >= {"train_loss", "validation_loss"}
    assert not {"lr", "seconds"} & set(history.curves)
    seconds = sorted(row["seconds"] for row in run.rows[1:])
    assert history.facts["time"] == f"{seconds[1]:.3g} s per epoch" and len(seconds) == 3
    rows = [{**row, "lr": 0.1 / (1 + row["epoch"])} for row in run.rows]
    shutil.copytree(run.path, tmp_path / "falling")
    metrics = "".join(f"{json.dumps(row)}\n" for row in rows)
    (tmp_path / "falling" / "metrics.jsonl").write_text(metrics)
    sign(tmp_path / "falling")
    falling = read_history(tmp_path / "falling")
    assert falling.curves["lr"] == [(row["epoch"], row["lr"]) for row in rows]


def test_runs_without_an_epoch_are_no_report(runs, tmp_path):
    empty = Run(runs[0].path, runs[0].config, [])
    with pytest.raises(UserError, match="nothing to report"):
        make_report([empty], tmp_path)


@pytest.mark.slow
def test_demo_trains_measures_and_draws(tmp_path, capsys, monkeypatch):
    from newton_summary.experiments import demo as demonstration

    monkeypatch.setattr(
        demonstration,
        "RECIPES",
        {
            name: replace(RECIPES[name], config=shrink(RECIPES[name]()))
            for name in demonstration.RECIPES_SHOWN
        },
    )
    assert cli.main(["demo", "--out", str(tmp_path), "--epochs", "1"]) == 0
    out = capsys.readouterr().out
    assert f"open {tmp_path / 'report' / 'report.html'}" in out and "training_curves.png" in out
    assert "report.html" in out and "layers apart" in out and "from the same weights" in out
    assert "tried: -" in out  # the printed rates have a trial behind them
    assert [run.epoch for run in find_runs([tmp_path])] == [1, 1]
    assert len(list((tmp_path / "report").glob("*_hbar.png"))) == 2
