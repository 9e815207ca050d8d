"""A history holds what it was given, in memory, in a file and on a screen."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from newton_summary import History, Summary, Trial, learning_rates, make_partition, summarize


def measured():
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    x = torch.randn(8, 3)
    batches = [(x[:4],), (x[4:],)]
    return summarize(model, lambda model, b: model(b[0]).exp().mean(), batches, stderr=True)


def history():
    summary = measured()
    rates = learning_rates(summary)
    made = History("first", facts={"model": "Linear"})
    made.add(0, summary, rates, trials=[Trial(0.5, -1.0, -0.9)])
    made.add(1, replace(summary, loss=torch.tensor(0.5)), replace(rates, eta=2 * rates.eta))
    made.add_value("train_loss", 0, 1.0)
    made.add_value("train_loss", 1, torch.tensor(0.5))
    return made, summary, rates


def test_history_in_order():
    made, summary, rates = history()
    assert made.names == summary.names == ("weight", "bias") and made.epochs == [0, 1]
    assert made.curves == {"train_loss": [(0.0, 1.0), (1.0, 0.5)]}
    torch.testing.assert_close(made.rates, torch.stack([rates.eta, 2 * rates.eta]).double())
    assert made.measured[0].trials == (Trial(0.5, -1.0, -0.9),) and made.measured[1].trials == ()
    first = made.measured[0]
    assert first.eta_stderr is not None and torch.equal(first.eta_stderr, rates.eta_stderr)
    assert summary.parts and not first.summary.parts  # errors stay, the batches do not
    assert torch.equal(first.summary.Hbar_stderr, summary.Hbar_stderr)


def test_empty_history():
    empty = History()
    assert (empty.names, empty.epochs, empty.rates.shape) == ((), [], (0, 0))
    assert str(empty) == repr(empty) and "0 measurements" in repr(empty)
    assert "<table>" in empty._repr_html_()


def test_one_measurement():
    summary = measured()
    made = History.of(summary, "now", lambda_int=0.5)
    assert made.name == "now" and made.epochs == [0]
    assert torch.equal(made.measured[0].eta, learning_rates(summary, 0.5).eta)
    with pytest.raises(ValueError, match="order=3, or use lambda_int=0"):
        History.of(replace(summary, D3=None))


def test_file_gives_back_everything(tmp_path):
    made, summary, _ = history()
    made.save(tmp_path / "h.pt")
    read = History.load(tmp_path / "h.pt")
    assert (read.name, read.curves, read.facts) == (made.name, made.curves, made.facts)
    assert read.epochs == made.epochs and torch.equal(read.rates, made.rates)
    for a, b in zip(read.measured, made.measured, strict=True):
        assert (a.kind, a.status, a.trials) == (b.kind, b.status, b.trials)
        assert a.summary.names == b.summary.names and a.summary.loss == b.summary.loss
        assert torch.equal(a.summary.Hbar, b.summary.Hbar)
        assert torch.equal(a.eta_stderr, b.eta_stderr)
    read.add(2, summary, learning_rates(summary))  # and goes on
    assert len(read.measured) == 3


def test_state_is_not_changed_by_what_comes_later():
    made, *_ = history()
    state = made.state_dict()
    made.add_value("train_loss", 2, 0.1)
    made.facts["model"] = "other"
    read = History.from_state_dict(state)
    assert len(read.curves["train_loss"]) == 2 and read.facts == {"model": "Linear"}


def test_wrong_files_and_groups_are_said(tmp_path):
    made, summary, rates = history()
    summary.save(tmp_path / "s.pt")
    with pytest.raises(ValueError, match="is not a history file"):
        History.load(tmp_path / "s.pt")
    other = Summary(summary.gbar, summary.Hbar, summary.D3)
    with pytest.raises(ValueError, match="'weight' and '0'"):
        made.add(2, other, rates)
    trivial = Summary(torch.ones(1), torch.eye(1), torch.ones(1))
    with pytest.raises(ValueError, match="2 groups and 1"):
        made.add(2, trivial, learning_rates(trivial))
    with pytest.raises(ValueError, match="1 learning rates, but the summary has 2"):
        made.add(2, summary, learning_rates(trivial))


@pytest.mark.parametrize("strength", ["x", -1.0, math.nan, [1.0]])
def test_a_saved_strength_is_a_number(strength):
    made, *_ = history()
    state = made.state_dict()
    state["measured"][0]["lambda_int"] = strength
    with pytest.raises(ValueError, match="expected a finite number, 0 or more"):
        History.from_state_dict(state)


def test_history_as_a_table():
    made, _, rates = history()
    lines = str(made).splitlines()
    assert lines[0] == repr(made) == "History('first', 2 measurements, 1 curve)"
    smallest = float(rates.eta.min())
    assert lines[2].split()[2] == f"{smallest:+.3e}" and lines[3].split()[1] == "0.5"
    assert lines[-1] == "train_loss: 0.5 at epoch 1"
    lost = Summary(torch.full((1,), math.nan), torch.eye(1), torch.ones(1))
    assert "not-finite" in str(History.of(lost))


def test_measurements_of_the_optimizer_are_told_apart_in_the_table():
    made, summary, rates = history()
    assert "measured along" not in str(made)
    made.add(1, summary, rates, kind="optimizer")
    rows = str(made).splitlines()[1:5]
    assert [row.partition("the ")[2] for row in rows[1:]] == [
        *("gradient", "gradient", "optimizer's last direction")
    ]


def test_factors_are_not_called_rates_in_the_table():
    made, _, _ = history()
    assert "smallest rate" in str(made)
    made.facts["measured along"] = "the next step of Adam"
    for shown in (made, History.from_state_dict(made.state_dict())):
        assert "smallest factor" in str(shown) and "rate" not in str(shown)


def test_names_are_escaped():
    model = nn.ParameterDict({"w": torch.ones(2)})
    partition = make_partition(model, {"<b>bold</b> & co": ["w"]})
    summary = Summary(torch.ones(1), torch.eye(1), torch.ones(1), partition=partition)
    made = History.of(summary, "<script>alert(1)</script>")
    for html in (made._repr_html_(), summary._repr_html_(), learning_rates(summary)._repr_html_()):
        assert "<script" not in html and "<b>" not in html
    assert "&lt;b&gt;bold&lt;/b&gt; &amp; co" in summary._repr_html_()
