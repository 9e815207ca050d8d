"""``newton-summary inspect``: what it measures, prints and writes, and what it says of mistakes."""

import json
import re
from pathlib import Path

import pytest
import torch

import newton_summary as ns
from newton_summary.cli import main as cli

pytest.importorskip("plotly")

NET = """\
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.second = nn.Linear(4, 2)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))

def loss_fn(model, batch):
    x, y = batch
    return nn.functional.cross_entropy(model(x), y)

def build():
    model = Net().double()
    x = torch.randn(60, 3, dtype=torch.float64)
    data = torch.utils.data.TensorDataset(x, (x[:, 0] > 0).long())
    return model, loss_fn, torch.utils.data.DataLoader(data, batch_size=20)
"""

WORDS = """\
import torch
from torch import nn

def build():
    words, layers = nn.Embedding(10, 6), (nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 10))
    model = nn.Sequential(words, nn.Flatten(), *layers).double()
    loss_fn = lambda model, batch: nn.functional.cross_entropy(model(batch), batch[:, 0])
    return model, loss_fn, torch.randint(10, (64, 4))
"""


ZEROS = """\
import torch
from torch import nn

def build():
    model = nn.Sequential(nn.Linear(3, 5), nn.SiLU(), nn.Linear(5, 1)).double()
    nn.init.zeros_(model[2].weight)
    data = torch.randn(3, 20, 3, dtype=torch.float64)
    loss_fn = lambda model, x: (model(x) - x.prod(1, keepdim=True)).square().mean()
    return model, loss_fn, iter(data)
"""


@pytest.fixture
def call(tmp_path, monkeypatch, capsys):
    """Run a command in a folder that has net.py; return its exit code, output and errors."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*cli.sys.path])
    Path("net.py").write_text(NET)

    def run(*args):
        code = cli.main(list(args))
        output = capsys.readouterr()
        return code, output.out, output.err

    return run


def expected(order=3, batches=3, **options):
    """Measure the same model without the command line."""
    space = {}
    exec(compile(NET, "net.py", "exec"), space)
    torch.manual_seed(0)
    model, loss_fn, loader = space["build"]()
    return ns.summarize(model, loss_fn, list(loader)[:batches], order=order, stderr=True, **options)


# --- what it measures ----------------------------------------------------------------------------


def test_report_and_words(call):
    code, out, err = call("inspect", "net.py:build")
    assert code == 0 and err == ""
    summary = expected()
    rates = ns.learning_rates(summary)
    fastest = int(rates.eta.argmax())
    assert f"fastest  {summary.names[fastest]}" in out and f"{rates.eta[fastest]:.4g}" in out
    scale = summary.Hbar.diagonal().abs().sqrt()
    interaction = (summary.Hbar / scale[:, None] / scale[None, :]).abs()
    pair = float(interaction.triu(1).max())
    assert f"{pair:.3f}" in out.split("Strongest pairs")[1].splitlines()[1]
    assert "60 samples in 3 batches" in out and "report.html" in out
    page = Path("report.html").read_text()
    assert "Net of net.py:build" in page and "newton-summary" in page


def test_groups_without_slope_are_named(call):
    """Before an output layer of zeros; D3 = 0 has nothing to do with ReLU there."""
    Path("zeros.py").write_text(ZEROS)
    code, out, _ = call("inspect", "zeros.py:build", "--partition", "layers")
    assert code == 0 and "D3 is 0 in all groups\n" in out and "ReLU" not in out
    assert "No slope or curvature here: '0' (" in out
    assert (
        "No slope or curvature here: '0' ("
        in json.loads(
            Path("report.html").read_text().split('id="contents">')[1].split("</script>")[0]
        )["runs"][0]["measured"][0]["status_text"]
    )


def test_json_has_the_numbers(call):
    code, out, _ = call("inspect", "net.py:build", "--json", "--out", "deep/page.html")
    found = json.loads(out)
    summary = expected()
    rates = ns.learning_rates(summary)
    assert code == 0 and Path(found["page"]).is_file()
    assert list(found["learning_rates"]) == list(summary.names)
    assert list(found["learning_rates"].values()) == pytest.approx(rates.eta.tolist())
    assert list(found["stderr"].values()) == pytest.approx(rates.eta_stderr.tolist())
    assert found["loss"] == pytest.approx(float(summary.loss)) and found["backend"] == "sweep"


def test_options_reach_the_measurement(call):
    _, out, _ = call(
        *("inspect", "net.py", "--json", "--partition", "weights-biases", "--backend", "nested"),
        *("--order", "2", "--max-batches", "2", "--no-stderr", "--device", "cpu"),
    )
    found = json.loads(out)
    summary = expected(order=2, batches=2, partition="weights-biases", backend="nested")
    newton = torch.linalg.solve(summary.Hbar, summary.gbar)
    assert found["status"] == "cut" and found["real_change"] < 0  # Newton's step is too long
    fraction = found["learning_rates"]["weights"] / float(newton[0])
    assert fraction == pytest.approx(0.25)
    assert list(found["learning_rates"].values()) == pytest.approx((fraction * newton).tolist())
    assert found["stderr"] is None and found["samples"] == 40 and found["backend"] == "nested"
    assert "in the first 2 of 3 batches" in found["facts"]["data"]
    rates = {}
    for strength in ("0.1", "10"):
        _, out, _ = call("inspect", "net.py", "--json", "--lambda-int", strength)
        rates[strength] = json.loads(out)["learning_rates"]
        wanted = ns.learning_rates(expected(), float(strength))
        assert list(rates[strength].values()) == pytest.approx(wanted.eta.tolist())


def test_the_strength_is_found_if_none_is_given(call):
    """A net that predicts a copy of its input: with lambda_int = 1 the step is much too long."""
    Path("words.py").write_text(WORDS)
    _, out, _ = call("inspect", "words.py", "--json")
    found = json.loads(out)
    assert found["lambda_int"] == 100 and found["facts"]["lambda_int"] == "100"
    space = {}
    exec(compile(WORDS, "words.py", "exec"), space)
    torch.manual_seed(0)
    summary = ns.summarize(*space["build"]())
    expected = ns.learning_rates(summary, 100.0).eta.tolist()
    assert list(found["learning_rates"].values()) == pytest.approx(expected)
    _, out, _ = call("inspect", "words.py")
    assert "lambda_int 100, found by trials" in out
    assert "Refuted" not in out and "it changed by -0.39" in out
    assert 'class="banner"' not in Path("report.html").read_text()
    _, out, _ = call("inspect", "words.py", "--lambda-int", "1")
    assert "No learning rates with lambda_int 1;" in out and "Refuted: a step" in out
    assert "Leave out --lambda-int" in out and "fastest" not in out
    assert 'class="banner" role="alert">Do not use' in Path("report.html").read_text()


EDGES = """\
import torch
from torch import nn

def loss_fn(model, batch):
    return model(batch).square().mean()

def build():  # at the minimum
    model = nn.Linear(2, 1).double()
    nn.init.zeros_(model.weight), nn.init.zeros_(model.bias)
    return model, loss_fn, torch.ones(4, 2).double()

def hill():  # along which the curvature is negative
    model = nn.Linear(2, 1, bias=False).double()
    return model, lambda model, batch: 1 - loss_fn(model, batch), torch.ones(4, 2).double()

def single():
    model, loss_fn, data = hill()
    return model, lambda model, batch: 1 - loss_fn(model, batch), data
"""


def test_what_is_said_where_there_is_little_to_say(call):
    Path("edges.py").write_text(EDGES)
    _, out, _ = call("inspect", "edges.py")
    assert "no cubic term: D3 is 0 in all groups" in out and "no such step lowers the loss" in out
    _, out, _ = call("inspect", "edges.py:hill", "--order", "2")
    assert "gradient, with no" not in out and "absolute values of Hbar's eigenvalues" in out
    assert "it changed by -" in out and "found by trials" not in out  # there is only 0
    _, out, _ = call("inspect", "edges.py:single")
    assert "forwards  weight" in out and "fastest" not in out


FLAT = """\
import torch

def build():
    model, data = torch.nn.Linear(1, 1, bias=False), torch.randn(8, 5, 1)
    return model, lambda model, x: 1e-3 * (model(x) - 1).square().mean(), iter(data)
"""


def test_an_error_of_a_large_rate_is_a_plain_number(call):
    """A flat quadratic, whose rate is some hundreds."""
    Path("flat.py").write_text(FLAT)
    _, out, _ = call("inspect", "flat.py")
    rate, error = re.search(r"forwards  weight +(\S+) ± (\S+)\n", out).groups()
    assert float(rate) > 100 and error.isdigit() and int(error) >= 10


def test_the_seed_decides(call):
    losses = []
    for seed in ("0", "0", "1"):
        _, out, _ = call("inspect", "net.py", "--json", "--seed", seed)
        losses.append(json.loads(out)["loss"])
    assert losses[0] == losses[1] != losses[2]


def test_quiet_and_what_the_file_prints(call):
    assert call("inspect", "net.py", "--quiet")[:2] == (0, "")
    Path("net.py").write_text(f"print('hello')\n{NET}")
    _, out, err = call("inspect", "net.py", "--json")
    assert json.loads(out)["samples"] == 60 and err == "hello\n"


def test_a_neighbouring_module_can_be_imported(call):
    Path("parts.py").write_text(NET)
    Path("whole.py").write_text("from parts import build as make\n")
    code, out, _ = call("inspect", "whole.py:make")
    assert code == 0 and "Net" in out


def test_help_names_the_options(call):
    code, out, _ = call("inspect", "--help")
    assert code == 0
    for option in ("--out", "--partition", "--max-batches", "--lambda-int", "--no-stderr"):
        assert option in out


# --- mistakes ------------------------------------------------------------------------------------

BUILD = "import torch\nfrom torch import nn\nmodel = nn.Linear(2, 1)\n"
GOOD_LOSS = "loss = lambda model, batch: model(batch).square().mean()\n"
RETURN = "def build():\n    return "


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (BUILD, ["has no function 'build'"]),
        (f"{BUILD}def bild(): pass\n", ["Did you mean 'bild'?"]),
        (f"{BUILD}def build():\n    x = 1\n    raise KeyError('a')\n", ["line 6", "KeyError"]),
        ("import no_such_module\n", ["cannot be loaded", "line 1", "no_such_module"]),
        ("def build(:\n", ["cannot be loaded", "line 1", "SyntaxError"]),
        ("import sys\nsys.exit(3)\n", ["line 2", "SystemExit"]),
        (f"{BUILD}{RETURN}model\n", ["returned Linear", "model, loss_fn, data"]),
        (f"{BUILD}{RETURN}model, None\n", ["a tuple of 2"]),
        (f"{BUILD}{RETURN}nn.Linear, print, 1\n", ["the class Linear", "first", "torch.nn.Module"]),
        (f"{BUILD}{RETURN}model, 3.0, []\n", ["float", "second", "loss_fn(model, batch)"]),
        (f"{BUILD}{RETURN}model, nn.MSELoss(), []\n", ["MSELoss", "criterion(model("]),
        (f"{BUILD}{RETURN}model, lambda x: x, []\n", ["arguments (x)", "loss_fn(model, batch)"]),
        (f"{BUILD}{GOOD_LOSS}{RETURN}model, loss, None\n", ["None", "third", "a DataLoader"]),
        (f"{BUILD}{GOOD_LOSS}{RETURN}model, loss, []\n", ["The data is empty"]),
        (
            f"{BUILD}{GOOD_LOSS}{RETURN}model, loss, torch.ones(5, 3)\n",
            ["Measuring net.py failed, line 4", "shapes"],
        ),
        (
            f"{BUILD}{GOOD_LOSS}{RETURN}model, loss, [torch.ones(5, 2)] * 2\n",
            ["line 4", "A list of tensors is taken as one batch"],
        ),
        (f"{BUILD}{RETURN}model, lambda m, b: 1.0, torch.ones(2)\n", ["returned float"]),
        (
            f"{BUILD}{RETURN}model, lambda m, b: m(b), torch.ones(3, 2)\n",
            ["Measuring net.py failed"],
        ),
    ],
)
def test_mistakes_in_the_file(call, source, words):
    Path("net.py").write_text(source)
    code, out, err = call("inspect", "net.py:build", "--out", "page.html")
    assert code == 2 and out == "" and err.count("\n") == 1
    assert all(word in err for word in words), err
    assert not Path("page.html").exists()


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["absent.py:build"], "no file absent.py"),
        ([], "Expected one model: use"),
        (["net.py", "other.py"], "Expected one model: use newton-summary inspect"),
        (["net.py", "--partition", "canonicle"], "canonical"),
        (["net.py", "--max-batches", "0"], "--max-batches 0"),
        (["net.py", "--device", "abacus"], "'abacus' is not available"),
        (["net.py", "--lambda-int", "-1"], "--lambda-int -1"),
        (["net.py", "--order", "2", "--lambda-int", "1"], "use --order 3"),
        (["net.py", "--out", "net.py/page.html"], "cannot be written"),
    ],
)
def test_mistakes_in_the_command(call, args, words):
    code, out, err = call("inspect", *args)
    assert code == 2 and out == "" and err.count("\n") == 1
    assert words in err, err
    assert {file.name for file in Path().iterdir()} <= {"net.py", "__pycache__"}


def test_without_plotly_nothing_is_measured(call, monkeypatch):
    find_spec = cli.importlib.util.find_spec
    absent = lambda name: None if name == "plotly" else find_spec(name)  # noqa: E731
    monkeypatch.setattr(cli.importlib.util, "find_spec", absent)
    code, _, err = call("inspect", "absent.py")
    assert code == 2 and "pip install -e '.[report]'" in err


def test_a_mistake_of_the_package_is_not_hidden(call, monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("ours")

    module = pytest.importorskip("newton_summary.inspection.inspection")
    broken.__code__ = broken.__code__.replace(co_filename=module.__file__)
    monkeypatch.setattr(module, "summarize", broken)
    with pytest.raises(RuntimeError, match="ours"):
        call("inspect", "net.py")
