"""The demo: its numbers are those of the library, and its output can be read by man and machine."""

import json
import math
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

import newton_summary as ns
from newton_summary import demo
from newton_summary.data import load_mnist_subset

SMALL = ["--samples", "20"]


@pytest.fixture
def run(capsys):
    """Run the demo in this process, and return what it prints."""

    def run_demo(*args):
        assert demo.main([*SMALL, *args]) == 0
        return capsys.readouterr().out

    return run_demo


@pytest.fixture
def run_json(run):
    return lambda *args: json.loads(run("--json", *args))


def batch_of(samples, dtype=torch.float32):
    images, labels = load_mnist_subset("train", dtype=dtype)
    return images[:samples], labels[:samples]


def test_network_starts_as_the_paper_says():
    """MLP 1024-200-100-10: weights N(0, 1/fan_in), biases zero; the seed decides."""
    model = demo.make_mlp(0)
    shapes = [tuple(p.shape) for p in model.parameters()]
    assert shapes == [(200, 1024), (200,), (100, 200), (100,), (10, 100), (10,)]
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            assert not p.any()
        else:
            assert float(p.detach().std()) * p.shape[1] ** 0.5 == pytest.approx(1, abs=0.1)
    again, other = demo.make_mlp(0), demo.make_mlp(1)
    assert torch.equal(model.layer1.weight, again.layer1.weight)
    assert not torch.equal(model.layer1.weight, other.layer1.weight)


def test_process_is_left_as_it_was(run):
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    run()
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize(("variable", "expected"), [(None, 1), ("2", 2)])
def test_one_thread_unless_the_user_chose(variable, expected, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if variable:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with demo.few_threads():
            assert torch.get_num_threads() == expected
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_numbers_are_those_of_the_library(run_json):
    """Against the nested backend, and a step that is really taken on a copy of the network."""
    result = run_json("--dtype", "float64", "--seed", "3", "--lambda-int", "0.5")
    model, batch = demo.make_mlp(3).double(), batch_of(20, torch.float64)
    summary = ns.summarize(model, demo.loss_fn, batch, backend="nested")
    rates = ns.learning_rates(summary, lambda_int=0.5)
    measured = result["per_group"]
    assert result["loss"] == pytest.approx(float(summary.loss), rel=1e-10)
    assert measured["groups"] == list(summary.names)
    assert measured["entries"] == [204_800, 200, 20_000, 100, 1_000, 10]
    for name, expected in (
        ("gbar", summary.gbar),
        ("Hbar", summary.Hbar),
        ("D3", summary.D3),
        ("eta", rates.eta),
    ):
        actual = torch.tensor(measured[name], dtype=torch.float64)
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-9)

    params = dict(model.named_parameters())
    u = dict(zip(params, torch.autograd.grad(demo.loss_fn(model, batch), list(params.values()))))
    for step in measured["steps"]:
        moved = demo.make_mlp(3).double()
        with torch.no_grad():
            for s, (name, p) in enumerate(moved.named_parameters()):
                p -= step["lr"] * measured["eta"][s] * u[name]
            loss = float(F.cross_entropy(moved(batch[0]), batch[1]))
        assert step["real"] == pytest.approx(loss - result["loss"], abs=1e-9)


def test_small_steps_go_as_predicted(run_json):
    """The error of a second-order prediction is of third order in lr; the loss falls."""
    result = run_json("--dtype", "float64")
    for measured in (result["per_group"], result["one_rate"]):
        assert [step["lr"] for step in measured["steps"]] == [0.1, 0.3, 1.0]
        small = measured["steps"][0]
        assert small["predicted"] < 0
        assert small["real"] == pytest.approx(small["predicted"], rel=0.05)


def test_one_rate_is_the_trivial_partition(run_json):
    """And with that partition there is nothing to compare it with."""
    compared = run_json("--dtype", "float64")["one_rate"]
    alone = run_json("--dtype", "float64", "--partition", "trivial")
    assert compared["groups"] == alone["per_group"]["groups"] == ["all"]
    assert compared["eta"] == pytest.approx(alone["per_group"]["eta"], rel=1e-9)
    assert alone["one_rate"] == alone["per_group"]


def test_interactions_have_unit_diagonal(run_json):
    measured = run_json()["per_group"]
    H = measured["Hbar"]
    for s, row in enumerate(measured["interactions"]):
        for t, value in enumerate(row):
            expected = H[s][t] / math.sqrt(abs(H[s][s] * H[t][t]))
            assert value == pytest.approx(expected, rel=1e-5)
        assert abs(row[s]) == pytest.approx(1)


def test_text_has_every_table(run):
    text = run()
    for word in ("MLP 1024-200-100-10", "20 MNIST images", "gbar", "Hbar_ss", "eta", "predicted"):
        assert word in text
    for name in ns.make_partition(demo.make_mlp(0)).names:
        assert text.count(name) == 3  # a row of each table, and a column of the last
    assert "nan" not in text
    assert max(map(len, text.splitlines())) <= 100


def test_text_shows_what_json_holds(run, run_json):
    text, measured = run(), run_json()["per_group"]
    for eta in measured["eta"]:
        assert f"{eta:.4g}" in text
    for step in measured["steps"]:
        assert f"{step['predicted']:+.5f} " in text
        assert f"{step['real']:+.5f}" in text


def test_one_group_has_no_interactions_to_show(run):
    text = run("--partition", "trivial")
    assert "interact" not in text
    assert "one rate per group" not in text


@pytest.mark.parametrize("partition", ["weights-biases", "blocks-2", "alternate-1", "chunks-3"])
def test_partitions_named_in_the_help_work(partition, run_json):
    model = demo.make_mlp(0)
    result = run_json("--partition", partition)
    assert result["per_group"]["groups"] == list(ns.make_partition(model, partition).names)


def measurement(steps, status="minimum"):
    """A measurement of two groups made by hand."""
    model = torch.nn.Linear(1, 1)
    eta = torch.ones(2) if steps else torch.full((2,), math.nan)
    summary = ns.Summary(
        torch.ones(2),
        torch.eye(2),
        torch.ones(2),
        loss=torch.tensor(2.0),
        partition=ns.make_partition(model),
    )
    return demo.Measurement(summary, ns.LearningRates(eta, 1.0, status), steps, 0.1)


def test_a_step_that_goes_wrong_is_told():
    """The model predicts a fall and the loss rises: the text must not look like a success."""
    one_rate = demo.measure(demo.make_mlp(0), batch_of(20), "trivial", 1.0)
    fine = measurement([demo.Step(lr, -lr, -lr) for lr in demo.SCALINGS])
    wrong = measurement([*fine.steps[:2], demo.Step(1.0, -1.0, 0.5)])
    assert "rises" not in demo.report(fine, one_rate)
    assert "With lr = 1 the loss rises where a fall was predicted" in demo.report(
        wrong, one_rate
    ).replace("\n", " ")


def test_rates_that_do_not_exist_are_told():
    """No steps then: dashes in the table, null in JSON, and the reason in words."""
    one_rate = demo.measure(demo.make_mlp(0), batch_of(20), "trivial", 1.0)
    none = measurement([], status="no-minimum")
    text = demo.report(none, one_rate)
    assert "The model has no minimum" in text
    assert text.count(" -  ") >= 3
    values = demo.finite(demo.measurement_values(none))
    assert values["eta"] == [None, None]
    json.dumps(values, allow_nan=False)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--samples", "0"], "from 1 to 5000"),
        (["--samples", "5001"], "from 1 to 5000"),
        (["--samples", "many"], "whole number"),
        (["--seed", "-1"], "whole number"),
        (["--lambda-int", "-1"], "0 or more"),
        (["--lambda-int", "nan"], "0 or more"),
        (["--partition", "canonicl"], "canonical"),
        (["--partition", "blocks-9"], "from 1 to 2"),
        (["--partition", "discrete"], "too many"),
        (["--device", "toaster"], "toaster"),
        (["--device", "meta"], "meta"),
        (["--dtype", "int8"], "float32"),
        (["--nonsense"], "--nonsense"),
    ],
)
def test_wrong_arguments_are_one_line_and_exit_2(args, message, capsys):
    with pytest.raises(SystemExit) as exit_info:
        demo.main(args)
    assert exit_info.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert message in err


def test_help_teaches(capsys):
    with pytest.raises(SystemExit) as exit_info:
        demo.main(["--help"])
    assert exit_info.value.code == 0
    text = capsys.readouterr().out
    for word in ("gbar", "Hbar", "lambda_int/6", "examples:", "--partition", "canonical"):
        assert word in text


def test_runs_as_a_module():
    """In a new process, as ``./run demo`` calls it."""
    command = [sys.executable, "-m", "newton_summary.demo", *SMALL, "--json"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["settings"]["samples"] == 20
