"""``torchrun -m newton_summary run`` is the run of one process; a sweep runs on a dask cluster."""

import contextlib
import io
import json
import math
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from torch import nn

from distributed_cases import FSDP_RUNS
from experiment_cases import tiny
from newton_summary.cli import main as cli
from newton_summary.errors import UserError
from newton_summary.experiments import datasets
from newton_summary.experiments import grid as sweep_module
from newton_summary.experiments.config import AdamConfig, KFACConfig, SGDConfig, to_dict
from newton_summary.experiments.data_parallel import RankGroup
from newton_summary.experiments.rundir import Run, RunWriter
from newton_summary.experiments.tasks import Task
from newton_summary.experiments.training import _check_divisible, train
from ranks import free_ports, leave_group, run_once

LIMIT = 100  # seconds
PAGE = Path(__file__).parents[1] / "docs" / "distributed.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
FEW = ["--data.samples", "41", "--batch-size", "14", "--dtype", "float64", "--no-compare-speed"]
FEW += ["--device", "cpu"]
NEWTON = ["run", "mlp_embedded", *FEW, "--optimizer.curvature-batch-size", "15"]
NEWTON += ["--optimizer.summary-period", "2", "--measure.every", "1", "--measure.batch-size", "9"]


def environment():
    source = str(Path(cli.__file__).parents[2])
    paths = [source, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


def torchrun(count, arguments, folder):
    """Run the command line in so many processes; kill them all if they take too long."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    command = [sys.executable, *launcher, "-m", "newton_summary", *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, cwd=folder, env=environment(), **pipes)
    try:
        out, err = process.communicate(timeout=LIMIT)
    finally:
        process.terminate()  # which the launcher passes on to its processes
    return process.returncode, out, err


def rows(folder):
    """The metrics in a run directory."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return without_clocks([json.loads(line) for line in lines])


def without_clocks(rows):
    """Metrics without times and memory."""
    clocks = ("seconds", "evaluation_seconds", "measure_seconds", "memory_gib")
    return [{k: v for k, v in row.items() if k not in clocks} for row in rows]


def assert_same_metrics(found, expected):
    assert len(found) == len(expected)
    for a, b in zip(found, expected):
        assert a.keys() == b.keys()
        for key, value in b.items():
            numbers = isinstance(value, dict | float)
            assert (
                (a[key] == pytest.approx(value, rel=1e-9, abs=1e-12))
                if numbers
                else (a[key] == value)
            )


BASELINES = {
    "adam": AdamConfig(),
    "sgd": SGDConfig(),
    "kfac": KFACConfig(covariance_period=1, inverse_period=2),
}


def baseline(name):
    return tiny(BASELINES[name], epochs=1)


def baselines(rank, count):
    """What each rank does, as if torchrun had started it."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(count), LOCAL_RANK=str(rank))
    found = {"rows": {}}
    for name in BASELINES:
        found["rows"][name] = train(baseline(name), Path(name)).rows
    if rank == 0:
        Path("run").write_text("in the way")
    found["mistake"] = told(["run", "rosenbrock", "--run-dir", "run"])
    if rank == 1:
        datasets.DATASETS["nothing"] = datasets.Source(no_data, 1)
    found["no data"] = told(["run", "rosenbrock", "--run-dir", "nowhere"])
    leave_group()
    found["examples"] = []
    # A port for each: a rank that is ahead would meet the group of the example before.
    examples = EXAMPLES if FSDP_RUNS else EXAMPLES[:2]
    for port, example in zip(os.environ["FREE_PORTS"].split(), examples):
        os.environ["MASTER_PORT"] = port
        found["examples"].append(output_of(example))
    return found


def output_of(example):
    """Run a script of the documentation, which makes its own process group."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(example, "docs/distributed.md", "exec"), {"__name__": "__main__"})
    return out.getvalue()


def no_data(*args):
    raise UserError("The disk is empty.")


def told(arguments):
    """Return the exit code of a command and what it writes as an error."""
    err = io.StringIO()
    with contextlib.redirect_stderr(err):
        return cli.main(arguments), err.getvalue()


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return run_once(baselines, 2, tmp_path_factory)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    assert cli.main([*NEWTON, "--epochs", "3", "--run-dir", str(folder / "run"), "--quiet"]) == 0
    return rows(folder / "run")


AFTER_THE_GROUP = """
import os, torch
from pathlib import Path
from newton_summary.experiments import data_parallel, torchrun
torchrun.launched = lambda: True
def threads():
    return {x.name: (x / "comm").read_text() for x in Path("/proc/self/task").iterdir()}
before = threads()
with data_parallel.assemble(torch.device("cpu")):
    of_group = threads().keys() - before  # old versions of torch give them no name
    torch.optim.SGD([torch.zeros(1)], lr=1.0)  # imports much of torch, with the group as defaults
assert of_group and not of_group & threads().keys(), (of_group, threads())
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are listed on Linux")
def test_no_thread_of_the_group_outlives_it():
    """One that dropped the last message while the interpreter ended aborted 3 runs of 40."""
    (port,) = free_ports(1)
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, "-c", AFTER_THE_GROUP]
    subprocess.run(command, env={**environment(), **alone}, check=True, timeout=LIMIT)


@pytest.mark.slow
def test_a_run_on_one_rank_then_two_then_one(one_process, tmp_path):
    """The second epoch, with batches of 14 and 13 samples, is trained by torchrun."""
    run = [*NEWTON, "--run-dir", str(tmp_path / "run")]
    assert cli.main([*run, "--epochs", "1", "--quiet"]) == 0
    code, out, err = torchrun(2, [*run, "--epochs", "2", "--json"], tmp_path)
    assert code == 0, err
    assert json.loads(out)["epochs"] == 2  # one process prints
    assert_same_metrics(rows(tmp_path / "run"), one_process[:3])
    assert cli.main([*run, "--epochs", "3", "--quiet"]) == 0
    assert_same_metrics(rows(tmp_path / "run"), one_process)
    sessions = json.loads((tmp_path / "run" / "environment.json").read_text())["sessions"]
    assert [(s.get("ranks"), s["from_epoch"]) for s in sessions] == [(None, 0), (2, 1), (None, 2)]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run"]  # nobody else wrote


@pytest.mark.slow
@pytest.mark.parametrize("name", BASELINES)
def test_other_optimizers_on_two_ranks(two, tmp_path, name):
    """Gradients are averaged for all of them; K-FAC sees the whole batch."""
    run = train(baseline(name), tmp_path / "run")
    for rank in two:
        assert_same_metrics(without_clocks(rank["rows"][name]), without_clocks(run.rows))


@pytest.mark.slow
def test_the_examples_of_the_page(two):
    """To measure, to train under DDP, to train under FSDP2; the first process prints."""
    assert len(EXAMPLES) == 3
    measured, ddp, *fsdp = two[0]["examples"]
    assert "Summary of 4 groups" in measured and "64 samples" in measured
    assert float(re.search(r"loss (\S+),", ddp)[1]) < 1.5
    assert two[1]["examples"] == [""] * len(two[0]["examples"])
    assert len(fsdp) == FSDP_RUNS
    for output in fsdp:
        assert float(re.search(r"loss (\S+)", output)[1]) < math.log(3)  # chance: three classes


@pytest.mark.slow
def test_a_mistake_is_told_once(two):
    """The first process cannot write, and says so; the others know, and end in the same way."""
    first, second = (rank["mistake"] for rank in two)
    assert first == (2, "newton-summary: run is a file, not a directory.\n")
    assert second == (2, "")


@pytest.mark.slow
def test_a_mistake_of_one_process_ends_all(two):
    """The data is not at hand on rank 1."""
    first, second = (rank["no data"] for rank in two)
    assert first[0] == second[0] == 2
    assert first[1] == "newton-summary: rank 1: The disk is empty.\n"
    assert second[1] == ""


# --- parts of it, in this process -----------------------------------------------------------------


def test_only_run_is_for_torchrun(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert cli.main(["list"]) == 2
    assert "torchrun can only start `newton-summary run`" in capsys.readouterr().err
    monkeypatch.setenv("RANK", "1")
    assert cli.main(["list"]) == 2
    assert capsys.readouterr().err == ""  # the first process speaks


def test_parts_of_a_batch():
    groups = [RankGroup(rank, 3) for rank in range(3)]
    for length in (0, 1, 2, 7, 9):
        parts = [range(length)[ranks.part(length)] for ranks in groups]
        assert [i for part in parts for i in part] == list(range(length))
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert [list(ranks.every("abcde")) for ranks in groups] == [["a", "d"], ["b", "e"], ["c"]]


def test_batch_norms_are_not_divided():
    task = Task(nn.BatchNorm1d(3), None, None)
    _check_divisible(task, RankGroup())
    with pytest.raises(UserError, match="depends on the whole batch: training on 2 processes"):
        _check_divisible(task, RankGroup(0, 2))


# --- dask -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def cluster(**options):
    """A dask scheduler with its workers, which can import the package."""
    distributed = pytest.importorskip("distributed")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment().items():
            patch.setenv(name, value)
        with distributed.LocalCluster(dashboard_address=None, **options) as local:
            yield local


@pytest.mark.slow
def test_a_sweep_on_a_dask_cluster(tmp_path, capsys):
    """Two worker processes give what one machine gives; a failure is told in the same way."""
    sweep = ["sweep", "mlp_embedded_adam", *FEW[:6], "--epochs", "1", "--device", "cpu", "--json"]
    sweep += ["--seed", "0,1", "--optimizer.lr", "0.001,0.01"]
    here, there = tmp_path / "here", tmp_path / "there"
    assert cli.main([*sweep, "--runs-dir", str(here)]) == 0
    alone = json.loads(capsys.readouterr().out)
    names = [Path(point["run_dir"]).name for point in alone]
    there.mkdir()
    (there / names[-1]).write_text("in the way")
    with cluster(n_workers=2, threads_per_worker=1) as local:
        scheduler = ["--scheduler", local.scheduler_address]
        assert cli.main([*sweep, "--runs-dir", str(there), *scheduler]) == 1
        with local.get_client() as client:
            workers = set(client.run(os.getpid).values())
    found = json.loads(capsys.readouterr().out)
    assert [Path(point["run_dir"]).name for point in found] == names
    for a, b in zip(found[:-1], alone):
        for key in ("train_loss", "validation_loss", "test_loss"):
            assert a["outcome"][key] == b["outcome"][key]
    assert found[-1]["outcome"] is None and "is a file, not a directory" in found[-1]["error"]
    files = (there / name / "environment.json" for name in names[:-1])
    used = {json.loads(file.read_text())["sessions"][0]["process"] for file in files}
    assert used <= workers and len(workers) == 2 and os.getpid() not in workers


def test_clusters_that_cannot_be_used(tmp_path, capsys, monkeypatch):
    """Nobody there, and workers whose threads would share random numbers."""
    monkeypatch.setattr(sweep_module, "CONNECTING", 0.5)
    sweep = ["sweep", "rosenbrock", "--seed", "0,1", "--runs-dir", str(tmp_path / "runs")]
    assert cli.main([*sweep, "--scheduler", "tcp://127.0.0.1:9"]) == 2
    assert "Cannot reach a dask scheduler at tcp://127.0.0.1:9" in capsys.readouterr().err
    assert cli.main([*sweep, "--scheduler", "tcp://127.0.0.1:9", "--jobs", "2"]) == 2
    assert "--jobs is for this machine" in capsys.readouterr().err
    with cluster(n_workers=1, threads_per_worker=2, processes=False) as local:
        assert cli.main([*sweep, "--scheduler", local.scheduler_address]) == 2
    assert "dask worker --nthreads 1" in capsys.readouterr().err
    with cluster(n_workers=0, processes=False) as local:
        assert cli.main([*sweep, "--scheduler", local.scheduler_address]) == 2
    assert "has no workers" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


LONG = tiny(epochs=10**6)


@pytest.mark.slow
def test_a_killed_process_of_a_sweep_costs_its_run(tmp_path):
    """The others are trained, also those that it would have trained next; then it resumes."""
    ended = []

    def tell(result):
        ended.append(result)
        if len(ended) == 2:  # only the long run is left
            for process in multiprocessing.active_children():
                process.kill()

    configs = [replace(LONG, seed=1), *(tiny(epochs=1, seed=seed) for seed in (2, 3))]
    results = sweep_module.run_all(configs, tmp_path, 2, tell)
    assert [result.error is None for result in results] == [False, True, True]
    assert "was killed by signal 9" in results[0].error
    path = results[0].path
    epoch = Run.load(path).epoch if (path / "config.json").exists() else 0
    assert train(tiny(epochs=max(epoch, 0) + 1, seed=1), path).finished


@pytest.mark.slow
def test_the_processes_of_a_sweep_end_with_it(tmp_path):
    code = (
        "import sys, json; from pathlib import Path\n"
        "from newton_summary.experiments.config import from_dict\n"
        "from newton_summary.experiments.grid import run_all\n"
        "if __name__ == '__main__':\n"
        "    configs = [from_dict(value) for value in json.loads(sys.argv[1])]\n"
        "    run_all(configs, Path(sys.argv[2]), 2, print)"
    )
    (tmp_path / "grid.py").write_text(code)
    configs = [to_dict(replace(LONG, seed=seed)) for seed in (1, 2)]
    command = [sys.executable, str(tmp_path / "grid.py"), json.dumps(configs), str(tmp_path)]
    process = subprocess.Popen(command, env=environment())
    paths = [tmp_path / sweep_module.run_name(replace(LONG, seed=seed)) for seed in (1, 2)]
    until = time.time() + 120
    while not all((path / "metrics.jsonl").exists() for path in paths):
        assert time.time() < until and process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    process.wait()
    for path in paths:  # a restart finds the directories free
        writer = RunWriter(path, Run.load(path).config)
        writer.start({})
        writer.close()
