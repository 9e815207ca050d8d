"""benchmarks/results_page.py: verdicts from runs whose numbers are known."""

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import pytest

from newton_summary.experiments.recipes import RECIPES
from newton_summary.experiments.rundir import Run
from newton_summary.experiments.tables import PAPER_PARTITIONS

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "results_page.py"
spec = importlib.util.spec_from_file_location("results_page", SCRIPT)
results_page = importlib.util.module_from_spec(spec)
spec.loader.exec_module(results_page)


def run(recipe, losses, seed=0, accuracy=0.5, test_loss=1.0, **changes):
    """Return a run with given training losses."""
    config = replace(RECIPES[recipe](), seed=seed)
    config = replace(config, optimizer=replace(config.optimizer, **changes))
    rows = [
        {
            **{"epoch": i, "train_loss": loss, "status": "ok", "seconds": 2.0},
            **{"validation_loss": 1.0, "test_loss": test_loss, "test_accuracy": accuracy},
        }
        for i, loss in enumerate([None, *losses])
    ]
    return Run(Path(f"{recipe}-{seed}-{changes}"), config, rows)


def claim(lines, words):
    """Return what was measured for a claim, and the verdict."""
    (line,) = [line for line in lines if words in line]
    return [cell.strip() for cell in line.split("|")[2:4]]


def partitions(losses):
    return results_page.Runs(
        [
            run(f"vgg_cifar10_{p.replace('-', '_')}", [1.0, loss])
            if p != "canonical"
            else run("vgg_cifar10_newton_summary", [1.0, loss])
            for p, loss in losses.items()
        ]
    )


def test_the_papers_own_table_of_partitions_is_reproduced():
    printed = {name: values[0] for name, values in PAPER_PARTITIONS.items()}
    lines = results_page.partition_section(partitions(printed))
    assert claim(lines, "the finer the partition")[1] == "reproduced"
    for one, other, count, said in (
        ("blocks-2", "alternate-2", 19, "reproduced"),  # the same number of groups
        ("weights-biases", "alternate-2", 17, "partly"),
    ):
        swapped = {**printed, one: printed[other], other: printed[one]}
        lines = results_page.partition_section(partitions(swapped))
        measured, verdict = claim(lines, "the finer the partition")
        assert f"it holds for {count} of 19 pairs" in measured and verdict == said
    lines = results_page.partition_section(partitions({n: 1 / x for n, x in printed.items()}))
    assert claim(lines, "the finer the partition")[1] == "**not reproduced**"
    lines = results_page.partition_section(partitions({"trivial": 0.8}))
    assert claim(lines, "the finer the partition") == ["", "not run"]


def test_medians_and_ranges_are_over_the_seeds_of_one_setting():
    losses = [0.5, 0.1, 0.3]
    runs = [run("lenet_cifar10_adam", [2.0, loss], seed) for seed, loss in enumerate(losses)]
    other = run("lenet_cifar10_adam", [2.0, 1e-9], lr=0.01)
    lines = results_page.training_table(results_page.Runs([*runs, other]))
    row = next(line for line in lines if line.startswith("| LeNet / CIFAR-10 | Adam |"))
    assert "| 3 | 2 | 0.3 (0.1 to 0.5) | 0.3 (0.1 to 0.5) |" in row
    assert any("Adam at 0.01, best of 2 rates | 1 | 2 | 1e-09" in line for line in lines)


def test_of_two_runs_of_a_seed_the_longer_counts_and_then_the_newer(tmp_path):
    def stored(day, losses):
        path = tmp_path / day
        path.mkdir(exist_ok=True)
        sessions = {"sessions": [{"started": f"2026-11-{day}T09:00:00+00:00"}]}
        (path / "environment.json").write_text(json.dumps(sessions))
        return replace(run("lenet_cifar10_adam", losses), path=path)

    old, new = stored("17", [2.0, 0.5]), stored("20", [2.0, 0.6])
    for both in ([old, new], [new, old]):
        assert results_page.Runs(both).of("lenet_cifar10_adam") == [new]
    longer = stored("17", [2.0, 0.5, 0.4])
    assert results_page.Runs([longer, new]).of("lenet_cifar10_adam") == [longer]


@pytest.mark.parametrize(
    ("losses", "said"),
    [([2.0, 0.5], "reproduced"), ([2.0, 0.2, 0.4, 0.1], "reproduced"), ([2.0, 0.1], "**not")],
)
def test_the_diagonal_is_worse_or_jumps_more_often(losses, said):
    whole = run("vgg_cifar10_newton_summary", [2.0, 0.3, 0.29, 0.28])
    short = run("vgg_cifar10_diagonal", [2.0])
    other = run("vgg_cifar10_diagonal", losses + losses[-1:] * (4 - len(losses)))
    worse = run("vgg_cifar10_diagonal", [2.0] * 4, lr=0.1)
    lines = results_page.diagonal_section(results_page.Runs([whole, short, other, worse]))
    assert claim(lines, "performs worse or is more unstable")[1].startswith(said)
    assert any("lambda_1 0.3, lambda_int 1 | 1 | 4 |" in line for line in lines)
    keep = "partly" if min(losses) > 0.28 else "**not"  # the test losses are the same
    assert claim(lines, "better to keep the off-diagonal")[1].startswith(keep)


def test_diagonal_runs_that_do_not_count_are_left_out():
    """One of a few epochs, for its times, and one of another partition."""
    short = run("vgg_cifar10_diagonal", [2.0, 0.5], lr=0.1)
    short = replace(short, config=replace(short.config, epochs=2))
    runs = [
        *(run("vgg_cifar10_newton_summary", [2.0, 0.3]), run("vgg_cifar10_diagonal", [2.0, 0.5])),
        *(short, run("vgg_cifar10_diagonal", [2.0, 0.1], partition="trivial")),
    ]
    lines = results_page.diagonal_section(results_page.Runs(runs))
    assert sum("| diagonal |" in line for line in lines) == 1
    assert "1.67" in claim(lines, "performs worse or is more unstable")[0]


def test_jumps_are_counted_in_the_epochs_that_all_runs_have():
    whole = run("vgg_cifar10_newton_summary", [2.0, 0.3, 0.3, 0.9, 0.3, 0.9])
    other = run("vgg_cifar10_diagonal", [2.0, 0.2, 0.4, 0.2])
    lines = results_page.diagonal_section(results_page.Runs([whole, other]))
    said = claim(lines, "performs worse or is more unstable")
    assert "epoch 4: 0.667, with 1 jumps against 1" in said[0]


def test_the_diagonal_table_shows_the_test_loss_and_accuracy():
    whole = run("vgg_cifar10_newton_summary", [2.0, 0.3], test_loss=0.96, accuracy=0.68)
    other = run("vgg_cifar10_diagonal", [2.0, 0.1], test_loss=0.86, accuracy=0.73)
    lines = results_page.diagonal_section(results_page.Runs([whole, other]))
    assert any("| diagonal |" in line and "| 0.86 | 73.0 % |" in line for line in lines)
    assert claim(lines, "outperforms its diagonal")[1] == "**not reproduced**"
    assert claim(lines, "instantaneous divergence")[1] == "not run"
    assert claim(lines, "with a grid")[1] == "not run"


def test_a_run_with_lambda_1_of_one_is_judged_by_when_it_ended():
    lost = run("vgg_cifar10_diagonal", [None], lr=1.0)
    lost.rows[-1]["status"] = "diverged"
    for runs, said in (
        ([lost], "reproduced"),
        ([run("vgg_cifar10_diagonal", [2.0], lr=1.0)], "**not"),
    ):
        lines = results_page.diagonal_section(results_page.Runs(runs))
        assert claim(lines, "instantaneous divergence")[1].startswith(said)


@pytest.mark.parametrize(("worse", "said"), [(2, "reproduced"), (1, "partly"), (0, "**not")])
def test_loss_and_accuracy_may_order_optimizers_differently(worse, said):
    runs = []
    for i, setup in enumerate(("mlp_mnist", "lenet_cifar10")):
        runs.append(run(f"{setup}_adam", [2.0], accuracy=0.6, test_loss=1.0))
        accuracy = 0.5 if i < worse else 0.7
        runs.append(run(f"{setup}_newton_summary", [2.0], accuracy=accuracy, test_loss=0.9))
    lines = results_page.training_claims(results_page.Runs(runs))
    assert claim(lines, "but worse in terms of accuracy")[1].startswith(said)


def test_short_runs_of_kfac_with_its_cheaper_damping_are_named():
    runs = results_page.Runs([run("bigmlp_cifar10_kfac", [2.0] * 39, factored=True)])
    assert "`bigmlp_cifar10_kfac` (39 of 100)" in results_page.shorter(runs)[0]


def test_times_of_kfac_and_of_newton_summary_are_judged_beside_adam():
    ratios = {
        (setup, name): ratio
        for setup in results_page.SETUPS
        for name, ratio in (("Adam", 1.0), ("K-FAC", 2.0), ("NewtonSummary", 1.2))
    }
    turns = {("mlp_mnist", "NewtonSummary"): 1.4}
    lines = results_page.time_claims(ratios | {("vgg_cifar10", "K-FAC"): 2.6}, turns)
    assert "MLP / MNIST (by turns) 1.40" in claim(lines, "very close with the different")[0]
    lines = results_page.time_claims(ratios | {("vgg_cifar10", "K-FAC"): 2.6}, {})
    assert claim(lines, "2 times longer with K-FAC")[1] == "partly"
    assert claim(lines, "very close with the different")[1] == "partly"
    assert claim(lines, "3 times longer")[1] == "**not reproduced**"
    assert claim(lines, "not excessively large")[1] == "reproduced"


def test_verdicts_are_counted_and_so_is_what_was_not_run():
    rows = ["| a | b | reproduced |", "| a | b | partly |", "| a | b | not run |"]
    lines = results_page.tally(["## One", *rows, "## Two", "| a | b | **not reproduced** |"])
    assert (
        "| One | 1 | 1 | 0 | 1 |" in lines
        and "| **all** | **1** | **1** | **1** | **1** |" in lines
    )
    assert results_page.tally(["## One", rows[-1]]) == []


@pytest.mark.parametrize(("lenet", "mlp", "said"), [(0.2, 1.5, "reproduced"), (1.5, 1.5, "**not")])
def test_comparable_is_within_a_factor_of_two_but_for_the_mlp(lenet, mlp, said):
    runs = [
        run("lenet_cifar10_adam", [2.0, 0.15]),
        run("lenet_cifar10_newton_summary", [2.0, lenet]),
        run("mlp_mnist_adam", [2.0, 0.1]),
        run("mlp_mnist_newton_summary", [2.0, mlp]),
    ]
    lines = results_page.training_claims(results_page.Runs(runs))
    measured, verdict = claim(lines, "is comparable to the minimum training loss")
    assert verdict.startswith(said) and f"{lenet / 0.15:.3g} of Adam's at epoch 2" in measured
    kfac = run("lenet_cifar10_kfac", [2.0, 1.0, lenet / 3])
    lines = results_page.training_claims(results_page.Runs([*runs, kfac]))
    measured, verdict = claim(lines, "is comparable to the minimum training loss")
    assert f"{lenet:.3g} of K-FAC's at epoch 2" in measured and verdict.startswith(said)


@pytest.mark.parametrize(
    ("lenet", "mlp", "said"),
    [(0.9, 0.9, "reproduced"), (0.9, 1.5, "partly"), (1.5, 1.5, "**not")],
)
def test_success_is_judged_by_the_end_and_network_by_network(lenet, mlp, said):
    runs = [
        run("lenet_cifar10_newton_summary", [2.0, 0.1, lenet]),
        run("mlp_mnist_newton_summary", [2.0, 0.1, mlp]),
    ]
    measured, verdict = claim(
        results_page.training_claims(results_page.Runs(runs)), "the training is successful"
    )
    assert f"LeNet / CIFAR-10 0.05 and {lenet / 2:.2g}" in measured and verdict.startswith(said)
    runs[0].rows[-1]["status"] = "diverged"
    lines = results_page.training_claims(results_page.Runs(runs))
    measured, verdict = claim(lines, "the training is successful")
    assert "1 diverged" in measured and verdict == ("partly" if mlp < 1 else "**not reproduced**")


def test_accuracies_are_the_highest_of_a_curve_beside_adam_and_kfac():
    """Not those at the best validation loss, which here is at the first epoch."""
    ours = run("vgg_cifar10_newton_summary", [2.0, 1.0], accuracy=0.6, test_loss=0.9)
    kfac = run("vgg_cifar10_kfac", [2.0, 1.0], accuracy=0.5, test_loss=1.0)
    kfac.rows[-1] |= {"validation_loss": 2.0, "test_accuracy": 0.7, "test_loss": 3.0}
    lines = results_page.training_claims(results_page.Runs([ours, kfac]))
    measured, verdict = claim(lines, "can achieve smaller test losses")
    assert "VGG-11' / CIFAR-10, K-FAC, epoch 2: 0.900, -10.0 points" in measured
    assert verdict == "reproduced"


@pytest.mark.parametrize(("rate", "said"), [(3e-4, "partly"), (1e-3, "**not reproduced**")])
def test_adams_best_rate_is_compared_with_the_printed_one(rate, said):
    runs = [
        run("lenet_cifar10_adam", [2.0, 1.0 if lr != rate else 0.5], lr=lr) for lr in (3e-4, 1e-3)
    ]
    lines = results_page.training_claims(results_page.Runs(runs))
    measured, verdict = claim(lines, "selected by grid search")
    assert f"{rate:g} (printed 0.0003)" in measured and verdict == said


def test_jumps_are_counted():
    assert results_page.jumps(run("lenet_cifar10_adam", [2.0, 1.0, 1.6, 1.5, 4.0])) == 2


def test_the_page_without_runs_is_the_page_of_the_documentation_or_shows_runs(tmp_path):
    page = results_page.page(results_page.Runs([]), tmp_path)
    assert "No runs are stored." in page and "reproduced" not in page.partition("## Training")[2]
    assert not list(tmp_path.iterdir())
    written = (SCRIPT.parent.parent / "docs" / "results.md").read_text()
    assert page.partition("No runs are stored.")[0] in written


def test_the_cause_of_instabilities_is_read_from_the_lengths_of_steps(tmp_path, monkeypatch):
    """Seed 0 is calm; seed 1 takes ten steps a hundred times as long, and its loss rises."""
    rows = [
        {"seed": seed, "epoch": epoch, "loss": loss, "moved": moved}
        for seed, losses, lengths in (
            (0, (2.0, 1.0, 1.05), ([1.0, 2.0, 3.0], [1.0, 4.0], [2.0, 2.0])),
            (1, (2.0, 1.0, 1.2), ([1.0, 2.0, 3.0], [2.0, 200.0], [2.0, 3.0])),
        )
        for epoch, (loss, moved) in enumerate(zip(losses, lengths, strict=True), start=1)
    ]
    file = tmp_path / "step_lengths.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert results_page.longest_steps(file) == ([2.0], [100.0])
    runs = results_page.Runs([run("lenet_cifar10_newton_summary", [2.0, 1.0, 1.9])])
    monkeypatch.setattr(results_page, "STEPS", file)
    said = claim(results_page.training_claims(runs), "very large step sizes")
    assert "100 where the loss then rises" in said[0] and said[1] == "reproduced"
    monkeypatch.setattr(results_page, "STEPS", tmp_path / "missing.jsonl")
    said = claim(results_page.training_claims(runs), "very large step sizes")
    assert "not measured" in said[0] and said[1] == "partly"
