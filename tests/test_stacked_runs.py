"""benchmarks/stacked_runs.py: each run of a stack is the one that it would be alone."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from newton_summary.experiments.rundir import Run
from newton_summary.experiments.training import train

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import stacked_runs
from paper_runs import unfinished

PLAN = """
mlp_embedded_adam 0,3 2 data.samples=300
mlp_embedded_adam 0 2 data.samples=300 optimizer.lr=1e-2
"""


@pytest.fixture
def todo(tmp_path):
    return list(unfinished(PLAN, None, tmp_path, graph_steps=False))


def test_runs_of_a_stack_are_those_alone(todo, tmp_path):
    stacked_runs.train_all(todo, seconds=600)
    losses = []
    for config, path in todo:
        run = Run.load(path)
        alone = train(config, tmp_path / "alone" / path.name)
        assert run.finished and run.config == config
        for name in ("train_loss", "validation_loss", "test_loss", "test_accuracy", "lr"):
            mine, expected = run.column(name), alone.column(name)
            assert mine == pytest.approx(expected, rel=1e-4, nan_ok=True)
        losses.append(run.rows[-1]["train_loss"])
    assert len(set(losses)) == 3


def test_time_ends_a_stack(todo):
    stacked_runs.train_all(todo, seconds=-1)
    assert [Run.load(path).epoch for _, path in todo] == [0, 0, 0]


def test_runs_that_differ_otherwise_are_refused(tmp_path):
    plan = "mlp_embedded_adam 0 1\nlenet_embedded_adam 0 1\n"
    with pytest.raises(SystemExit, match="seeds and Adam's learning rate alone"):
        stacked_runs.train_all(list(unfinished(plan, None, tmp_path, False)), seconds=1)
    with pytest.raises(SystemExit, match="seeds and Adam's learning rate alone"):
        stacked_runs.train_all(list(unfinished("mlp_embedded 0 1", None, tmp_path, False)), 1)


@pytest.mark.parametrize("change", ["schedule.factor=0.5", "measure.every=1"])
def test_runs_that_do_more_than_train_are_refused(change, tmp_path):
    todo = list(unfinished(f"mlp_embedded_adam 0 1 {change}", None, tmp_path, False))
    with pytest.raises(SystemExit, match="no schedule and measures nothing"):
        stacked_runs.train_all(todo, seconds=1)


def test_a_run_that_can_be_resumed_is_left_as_it_is(tmp_path):
    (begun, path), *_ = unfinished("mlp_embedded_adam 0 1 data.samples=300", None, tmp_path, False)
    train(begun, path)
    todo = [(replace(begun, epochs=2), path)]
    with pytest.raises(SystemExit, match="can be resumed"):
        stacked_runs.train_all(todo, seconds=600)
    assert Run.load(path).column("epoch") == [0, 1]
