"""benchmarks/paper_runs.py: plans, processes side by side, and the archive."""

import importlib.util
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from newton_summary.experiments.recipes import RECIPES

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "paper_runs.py"
spec = importlib.util.spec_from_file_location("paper_runs", SCRIPT)
paper_runs = importlib.util.module_from_spec(spec)
spec.loader.exec_module(paper_runs)


def test_a_plan_names_recipes_seeds_epochs_and_changes():
    text = "# of all\nlenet_cifar10_adam 0-2,5 7 optimizer.lr=1e-3 data.pad=true  # or so\n"
    configs = list(paper_runs.read_plan(text))
    assert [config.seed for config in configs] == [0, 1, 2, 5]
    assert {(c.epochs, c.optimizer.lr, c.data.pad) for c in configs} == {(7, 1e-3, True)}
    (own,) = paper_runs.read_plan("vgg_cifar10_trivial 0 -")
    assert own == RECIPES["vgg_cifar10_trivial"]()
    with pytest.raises(SystemExit, match="AdamConfig has no field 'lrr'"):
        list(paper_runs.read_plan("lenet_cifar10_adam 0 - optimizer.lrr=1"))


def test_the_plan_for_everything_is_valid_and_has_five_seeds_of_the_four_setups():
    configs = list(paper_runs.read_plan(paper_runs.PLAN))
    assert len({repr(config) for config in configs}) == len(configs)
    for setup in paper_runs.SETUPS:
        mine = [c.seed for c in configs if c.recipe == f"{setup}_newton_summary"]
        assert mine == [0, 1, 2, 3, 4]


@pytest.mark.slow
def test_runs_side_by_side_without_the_command_line_and_packs_them(tmp_path):
    for name in ("tyro", "rich"):
        (tmp_path / "blocked").mkdir(exist_ok=True)
        (tmp_path / "blocked" / f"{name}.py").write_text("raise ImportError('blocked')")
    plan = tmp_path / "plan"
    plan.write_text("rosenbrock 0 1\nrosenbrock 0 1 batch_size=2\n")
    path = os.pathsep.join([str(tmp_path / "blocked"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(SCRIPT), str(plan), "--work", str(tmp_path / "work")]
    command += ["--workers", "2", "--pack", str(tmp_path / "runs.tar.gz")]
    for done in (2, 0):
        result = subprocess.run(
            command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path}
        )
        assert result.returncode == 0, result.stderr
        assert f"{done} runs to do" in result.stdout and result.stdout.count("finished") == 2
    with tarfile.open(tmp_path / "runs.tar.gz") as archive:
        names = archive.getnames()
        environment = archive.extractfile("rosenbrock/seed=0/environment.json")
        assert json.load(environment)["sessions"][0]["side_by_side"] == 2
    assert "rosenbrock/batch_size=2,seed=0/metrics.jsonl" in names
    assert not any("checkpoint" in name for name in names)
