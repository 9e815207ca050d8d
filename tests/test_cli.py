"""The command line: what it prints, what it writes, and what it says of mistakes."""

import ast
import inspect
import io
import json
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

import newton_summary
from experiment_cases import use_random_images
from newton_summary.cli import main as cli
from newton_summary.experiments import config, grid, training
from newton_summary.experiments.recipes import RECIPES
from newton_summary.experiments.rundir import Run
from newton_summary.inspection import settings

SMALL = ["--data.samples", "60", "--batch-size", "20", "--epochs", "2"]


@pytest.fixture
def call(tmp_path, monkeypatch, capsys):
    """Run a command in an empty folder; return its exit code, output and errors."""
    monkeypatch.chdir(tmp_path)

    def run(*args):
        code = cli.main(list(args))
        output = capsys.readouterr()
        return code, output.out, output.err

    return run


def fails(call, *args):
    """Return the one line that a mistake gives, after checking that nothing was written."""
    code, out, err = call(*args)
    assert code == 2 and out == ""
    assert err.startswith("newton-summary: ") and err.count("\n") == 1
    assert not list(Path.cwd().iterdir())
    return err


# --- help ----------------------------------------------------------------------------------------


def test_help_names_every_command(call):
    for args in ([], ["--help"], ["help"]):
        code, out, _ = call(*args)
        assert code == 0 and all(f"newton-summary {command}" in out for command in cli.COMMANDS)


def test_list_has_a_line_for_each_recipe(call):
    code, out, _ = call("list")
    assert code == 0 and [line.split()[0] for line in out.splitlines()] == list(RECIPES)
    _, out, _ = call("list", "--json")
    assert json.loads(out)["vgg_cifar10_adam"]["optimizer.lr"] == 1e-5


def test_help_of_a_recipe_shows_its_fields(call):
    for command in ("run", "sweep"):
        code, out, _ = call(command, "lenet-embedded", "--help")
        assert code == 0 and "--optimizer.lambda-int" in out and "500" in out
        assert call(command, "--help")[0] == 0
    assert "--jobs" in out
    code, out, _ = call("run", "mlp_embedded_adam", "--help")
    assert "--optimizer.beta1" in out and "--optimizer.lambda-int" not in out


@pytest.mark.parametrize("module", [cli, config, settings])
def test_no_line_of_help_breaks_inside_a_number_or_sentence(module):
    """tyro may break a line after any comma, and does wherever the text of a field does."""
    classes = [n for n in ast.walk(ast.parse(inspect.getsource(module))) if type(n) is ast.ClassDef]
    texts = [x.value.value for c in classes for x in c.body[1:] if type(x) is ast.Expr]
    assert texts and not [text for text in texts if "\n" in text or re.search(r"\d,\d", text)]


def test_version(call):
    assert call("--version")[1].strip() == newton_summary.__version__


def test_torch_is_not_needed_for_help():
    """The package itself is replaced by an empty one, since its import brings torch."""
    folder = str(Path(newton_summary.__file__).parent)
    code = (
        "import sys, types\n"
        "package = types.ModuleType('newton_summary'); package.__path__ = [sys.argv[1]]\n"
        "sys.modules['newton_summary'] = package\n"
        "from newton_summary.cli import main as cli\n"
        "cli.main(['run', 'rosenbrock', '--help'])\n"
        "assert 'torch' not in sys.modules, 'torch was imported'"
    )
    result = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "--epochs" in result.stdout


def test_without_tyro_it_says_what_to_install(call, monkeypatch):
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: None)
    assert "pip install -e '.[experiments]'" in fails(call, "list")
    assert "pip install -e '.[report]'" in fails(call, "inspect", "model.py")


# --- mistakes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["rum"], "Unknown command 'rum'. Did you mean 'run'?"),
        (["run"], "Missing recipe: use newton-summary run RECIPE"),
        (["run", "lenet_embeded"], "Did you mean 'lenet_embedded'"),
        (["run", "rosenbrock", "--epochs", "-3"], "epochs = -3"),
        (["run", "rosenbrock", "--device", "cuda:99"], "The device 'cuda:99' is not available"),
        (["run", "mlp_mnist_adam", "--data-root", "nowhere"], "folder nowhere does not exist"),
        (["sweep", "rosenbrock", "--optimizer.lr", "1,1.0"], "twice"),
        (["sweep", "rosenbrock", "--epochs", "1,2"], "--epochs takes one value"),
        (["sweep", "rosenbrock", "--jobs", "0"], "--jobs 0"),
        (["run", "lenet_embedded_sgd", "--optimizer.momentum", "-1"], "Invalid momentum"),
        (["report"], "Missing runs: use newton-summary report DIR"),
        (["report", "nowhere"], "nowhere is not a directory"),
        (["report", "."], "There is no run in ."),
    ],
)
def test_mistakes_are_one_line(call, args, said):
    assert said in fails(call, *args)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["run", "rosenbrock", "--optimizer.lamda-int", "1"], "--optimizer.lambda-int"),
        (["run", "rosenbrock", "--epochs", "many"], "--epochs"),
        (["run", "rosenbrock", "--optimizer.backend", "magic"], "'sweep', 'nested'"),
        (["inspect", "net.py", "--order", "4"], "'2', '3'"),
        (["run", "rosenbrock", "--optimizer.variant", "none"], "as-published"),
        (["sweep", "rosenbrock", "--optimizer.lr", "1,x"], "--optimizer.lr"),
        (["sweep", "rosenbrock", "--optimizer.diagonal", "1,2"], "'True', 'False'"),
        (["list", "--josn"], "--json"),
    ],
)
def test_wrong_options_are_named_with_what_may_be_meant(call, args, said):
    """tyro's own message, and nothing written."""
    code, out, err = call(*args)
    assert (code, out) == (2, "") and said in err and "Traceback" not in err
    assert not list(Path.cwd().iterdir())


def test_interruption_is_no_traceback(call, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(training, "train", interrupted)
    code, _, err = call("run", "rosenbrock")
    assert code == 130 and "run the same command to resume" in err


# --- run -----------------------------------------------------------------------------------------


def test_run_writes_prints_and_goes_on(call):
    args = ["run", "mlp_embedded", *SMALL, "--optimizer.curvature-batch-size=20"]
    code, out, err = call(*args)
    assert code == 0 and err == ""
    (folder,) = Path("runs/mlp_embedded").iterdir()
    run = Run.load(folder)
    assert run.config.optimizer.curvature_batch_size == 20 and run.config.data.samples == 60
    lines = out.splitlines()
    assert sum(line.startswith("epoch ") for line in lines) == 3
    assert "finished after 2 epochs" in out and "times Adam's" in lines[-1]
    before = (folder / "metrics.jsonl").read_bytes()
    code, out, _ = call(*args)
    assert code == 0 and (folder / "metrics.jsonl").read_bytes() == before
    code, out, _ = call(*args, "--epochs", "3")
    assert "resuming after epoch 2" in out and Run.load(folder).epoch == 3


def test_a_warning_is_printed_once(call, monkeypatch):
    """The files of a run are opened at several places."""
    args = ["run", "mlp_embedded", *SMALL, "--quiet"]
    call(*args)
    (folder,) = Path("runs/mlp_embedded").iterdir()
    changed = [folder / name for name in ("config.json", "environment.json")]
    for file in changed:
        file.write_text(file.read_text() + " ")
    monkeypatch.setattr(warnings, "showwarning", print_warning)  # pytest would collect them
    code, _, err = call(*args)
    assert code == 0
    expected = [f"newton-summary: {file} was changed after the run wrote it." for file in changed]
    assert sorted(err.splitlines()) == expected


def print_warning(*warning):
    sys.stderr.write(warnings.formatwarning(*warning))


def test_terminal_shows_a_bar_and_the_time_left():
    from rich.console import Console

    from newton_summary.experiments.progress import watching

    console = Console(force_terminal=True, width=100, record=True, file=io.StringIO())
    row = {"epoch": 1, "train_loss": None, "validation_loss": 2.0, "validation_accuracy": 0.5}
    row |= {"test_loss": 3.0, "test_accuracy": None, "seconds": 1.0, "status": "diverged"}
    with watching(console, "a run") as reporter:
        reporter.start(RECIPES["rosenbrock"](), 10, 2)
        reporter.step(3, 5)
        reporter.measure(3, 0, 4)
        reporter.progress.refresh()
        reporter.measure(3, 4, 4)
        reporter.row({**row, "lr": 0.25, "eta": {"x": 2.0, "y": -1.0}})
        reporter.row({**row, "eta": {"x": 2.0, "y": 2.0}})
    shown = console.export_text()
    assert "a run" in shown and "resuming after epoch 2" in shown
    assert "epoch 3/5" in shown and "50%" in shown and "left" in shown and "measuring" in shown
    assert "train -  validation 2 (50.0%)  test 3  lr 0.25  eta -1 to 2  1.0 s  diverged" in shown
    assert "test 3  eta 2  1.0 s" in shown


def test_run_for_scripts(call):
    args = ["run", "mlp-embedded-adam", *SMALL, "--run-dir", "here", "--no-compare-speed"]
    assert call(*args, "--quiet") == (0, "", "")
    code, out, err = call(*args, "--json")
    result = json.loads(out)
    assert (code, err, result["status"], result["epochs"]) == (0, "", "finished", 2)
    assert result["run_dir"] == "here"
    code, _, err = call(*args, "--optimizer.lr", "1")
    assert (
        code == 2 and "here contains another run: optimizer.lr is 0.001 there and 1.0 here" in err
    )


def test_flags_and_data_root(call, monkeypatch, tmp_path):
    use_random_images(monkeypatch)
    args = [*SMALL, "--data-root", str(tmp_path), "--model.ntk", "--data.no-download", "--quiet"]
    assert call("run", "mlp_mnist_adam", *args, "--run-dir", "a")[0] == 0
    config = Run.load(Path("a")).config
    assert config.data.root == tmp_path and config.model.ntk and not config.data.download


# --- sweep --------------------------------------------------------------------------------------


def test_sweep_runs_the_grid_once_and_tells_the_best(call):
    args = ["sweep", "mlp_embedded_adam", *SMALL, "--optimizer.lr", "1e-5,1e-2", "--seed", "0,1"]
    code, out, _ = call(*args)
    assert code == 0 and out.count(": done\n") == 4
    assert len(list(Path("runs/mlp_embedded_adam").iterdir())) == 4
    header, best, worst = out.splitlines()[-3:]
    assert header.split()[0] == "optimizer.lr"
    assert best.split()[:2] == ["0.01", "2"] and worst.split()[:2] == ["1e-05", "2"]
    assert "±" in best
    code, out, _ = call(*args, "--json")
    results = json.loads(out)
    assert [r["skipped"] for r in results] == [True] * 4
    assert {r["config"]["seed"] for r in results} == {0, 1}


def test_a_grid_of_switches(call):
    code, out, _ = call(
        *("sweep", "mlp_embedded", *SMALL, "--optimizer.curvature-batch-size", "20"),
        *("--optimizer.diagonal", "True,False", "--json"),
    )
    assert code == 0 and [r["config"]["optimizer.diagonal"] for r in json.loads(out)] == [1, 0]


def test_a_sweep_of_fewer_epochs_reads_them_off_longer_runs(call):
    swept = ["sweep", "mlp_embedded_adam", "--data.samples", "60", "--seed", "0,1", "--json"]
    for epochs in (2, 1):
        code, out, _ = call(*swept, "--epochs", str(epochs))
        results = json.loads(out)
        assert code == 0
        assert [r["outcome"]["epochs"] for r in results] == [epochs, epochs]
        assert [r["skipped"] for r in results] == [epochs == 1] * 2


@pytest.mark.slow
def test_sweep_in_processes_survives_a_failing_run(call):
    """blocks-9 is more blocks than the model has layers."""
    args = ["--optimizer.partition", "trivial,blocks-9", "--optimizer.curvature-batch-size", "20"]
    code, out, _ = call("sweep", "mlp_embedded", *SMALL, *args, "--jobs", "2")
    assert code == 1
    assert "partition = 'blocks-9'" in out and "1 failed" in out.splitlines()[-1]
    done = [run for run in Path("runs/mlp_embedded").iterdir() if Run.load(run).finished]
    assert len(done) == 1


def test_names_of_runs_are_short_and_their_own():
    from dataclasses import replace

    config = RECIPES["lenet_embedded"]()
    optimizer = replace(config.optimizer, partition="x" * 200)
    long = [grid.run_name(replace(config, optimizer=optimizer, seed=seed)) for seed in (0, 1)]
    assert grid.run_name(config) == "seed=0"
    assert long[0] != long[1] and all(len(name) <= 120 for name in long)
