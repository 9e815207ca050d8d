"""Every script in examples/ runs, and what it prints is true."""

import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import newton_summary as ns
from newton_summary.data import load_mnist_subset

pytestmark = pytest.mark.slow  # each is a process of its own, and trains
EXAMPLES = Path(__file__).parents[1] / "examples"
NUMBER = r"([-+]?\d+\.?\d*(?:e[-+]\d+)?)"


@pytest.fixture
def run(tmp_path):
    """Run an example as a user would, in an empty folder; return what it prints."""

    def run(name, *arguments):
        command = [sys.executable, str(EXAMPLES / f"{name}.py"), *map(str, arguments)]
        source = str(Path(ns.__file__).parents[1])
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": source}
        result = subprocess.run(
            command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=240
        )
        assert result.returncode == 0, result.stderr
        assert result.stderr == "" or name == "train"  # which may tell of a refresh without rates
        return result.stdout

    return run


def numbers(pattern, text):
    """The numbers that a pattern finds, row by row; # in it stands for a number."""
    found = re.findall(pattern.replace("#", NUMBER), text, re.MULTILINE)
    assert found, f"{pattern} is not in:\n{text}"
    return [[float(x) for x in row] if isinstance(row, tuple) else float(row) for row in found]


def test_there_is_one_for_each_use():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {"measure", "see", "advise", "train"}


def test_measure(run):
    """The rates are those of the nested backend; a short step does what was predicted."""
    text = run("measure")
    torch.manual_seed(0)
    widths = (1024, 200, 100, 10)
    layers = [torch.nn.Flatten()]
    for fan_in, fan_out in pairwise(widths):
        layers += [torch.nn.Linear(fan_in, fan_out), torch.nn.Tanh()]
    model = torch.nn.Sequential(*layers[:-1])

    def loss_fn(model, batch):
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

    summary = ns.summarize(model, loss_fn, load_mnist_subset("train"), backend="nested", order=3)
    expected = ns.learning_rates(summary).eta.tolist()
    assert numbers(r"^\d\.(?:weight|bias) +#$", text) == pytest.approx(expected, rel=1e-2)
    (short, *_), *_ = trials = numbers(r"^ +# +#, predicted #$", text)
    assert short == 0.1 and trials[0][1] == pytest.approx(trials[0][2], rel=0.05)
    (one_rate,) = numbers(r"it changes by #\.$", text)
    assert trials[-1][1] < one_rate < 0  # a rate for each group goes further


def test_see(run, tmp_path):
    text = run("see", "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    rows = numbers(r"^ +# +# +# +# +# +# +#$", text)
    assert [row[0] for row in rows] == list(range(5))
    assert rows[-1][1] < 0.2 < rows[0][1]
    assert all(name in page for name in ("conv1", "linear3", "LeNet, SGD", "test_loss"))
    assert "Open page.html" in text


def test_advise(run):
    text = run("advise")
    (before,) = numbers(r"more epochs, as before: +#$", text)
    (after,) = numbers(r"more epochs, as suggested: +#$", text)
    assert after < before
    assert re.search(r"^3\.weight \(Linear\) +1e-05 .* raise ", text, re.MULTILINE)


def test_train(run):
    text = run("train")
    adam, newton = text.split("newton_summary")
    for table in (adam, newton):
        rows = numbers(r"^ +# +# +#% +#$", table)
        assert [row[0] for row in rows] == [2, 4, 6]
        assert rows[-1][1] < rows[0][1] / 3  # training loss
        assert rows[-1][2] > 90  # test accuracy
