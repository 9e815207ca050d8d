"""Steps that were tried: real changes against a copy moved by hand, and no trace."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from newton_summary import Summary, learning_rates, make_partition, step_trials, summarize
from problems import PROBLEMS, cross_entropy, squared_error
from test_no_trace import Trace, everything


def problem():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x, y = torch.randn(9, 3).double(), torch.randint(2, (9,))
    return model, [(x[:6], y[:6]), (x[6:], y[6:])]  # batches of different sizes


def loss_of_moved_copy(model, data, u, rates, fraction):
    moved = copy.deepcopy(model)
    with torch.no_grad():
        for name, p in moved.named_parameters():
            p -= fraction * rates[name] * u[name]
    x, y = (torch.cat(parts) for parts in zip(*data))
    return F.cross_entropy(moved(x), y).item()


def gradient(model, data):
    x, y = (torch.cat(parts) for parts in zip(*data))
    grads = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
    return dict(zip(dict(model.named_parameters()), grads))


@pytest.mark.parametrize("direction", ["gradient", "momentum"])
def test_trials_are_those_of_a_copy_moved_by_hand(direction):
    model, data = problem()
    u = gradient(model, data)
    if direction == "momentum":
        u = {name: value + 0.1 for name, value in u.items()}
        direction = u
    summary = summarize(model, cross_entropy, data, direction=direction)
    rates = learning_rates(summary)
    trials = step_trials(model, cross_entropy, data, summary, rates, direction=direction)
    assert [trial.fraction for trial in trials] == [0.25, 0.5, 1.0]
    by_name = dict(zip(summary.names, rates.eta.tolist()))
    start = loss_of_moved_copy(model, data, u, by_name, 0)
    for trial in trials:
        end = loss_of_moved_copy(model, data, u, by_name, trial.fraction)
        assert trial.real == pytest.approx(end - start, abs=1e-12)
        eta = trial.fraction * rates.eta
        expected = -eta @ summary.gbar + 0.5 * eta @ summary.Hbar @ eta
        assert trial.predicted == pytest.approx(float(expected))
    assert trials == step_trials(model, cross_entropy, data, summary, direction=direction)


def test_a_quadratic_does_what_is_predicted():
    quadratic = PROBLEMS["quadratic"]()
    summary = summarize(quadratic.model, quadratic.loss_fn, quadratic.batch)
    for trial in step_trials(
        quadratic.model, quadratic.loss_fn, quadratic.batch, summary, fractions=(-1, 0, 0.3, 1, 2)
    ):
        assert trial.real == pytest.approx(trial.predicted, rel=1e-9, abs=1e-12)


def test_trials_leave_no_trace_and_draw_as_the_measurement_did():
    made = everything()  # batch norm, dropout, and buffers that every pass changes
    summary = summarize(made.model, made.loss_fn, made.batch)
    trace = Trace(made.model)
    rates = torch.linspace(0.5, 1, len(summary))
    nothing, tiny = step_trials(
        made.model, made.loss_fn, made.batch, summary, rates, fractions=(0.0, 1e-4)
    )
    trace.assert_same(made.model)
    assert nothing == (0, 0, 0)
    assert tiny.real == pytest.approx(tiny.predicted, rel=1e-3)  # one function, one draw


def test_no_trace_after_a_loss_that_raises():
    model, data = problem()
    summary = summarize(model, cross_entropy, data)
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def failing(model, batch):
        if not torch.equal(model[0].weight, before["0.weight"]):
            raise RuntimeError("moved")
        return cross_entropy(model, batch)

    trace = Trace(model)
    with pytest.raises(RuntimeError, match="moved"):
        step_trials(model, failing, data, summary)
    trace.assert_same(model)


def test_a_step_to_where_the_loss_is_infinite_is_told():
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.ones_(model.weight)
    x = torch.ones(2, 1).double()

    def loss_fn(model, x):
        return -torch.log(model(x)).mean()

    summary = summarize(model, loss_fn, x, direction={"weight": torch.ones(1, 1).double()})
    rates = torch.tensor([1.0])  # to weight 0
    direction = {"weight": torch.ones(1, 1).double()}
    (trial,) = step_trials(model, loss_fn, x, summary, rates, fractions=(1,), direction=direction)
    assert trial.real == math.inf and trial.predicted == pytest.approx(1.5)


def test_a_summary_from_a_file_and_one_without_a_partition(tmp_path):
    model, data = problem()
    summary = summarize(model, cross_entropy, data)
    expected = step_trials(model, cross_entropy, data, summary)
    summary.save(tmp_path / "s.pt")
    assert step_trials(model, cross_entropy, data, Summary.load(tmp_path / "s.pt")) == expected
    bare = Summary(summary.gbar, summary.Hbar, summary.D3)
    with pytest.raises(ValueError, match="no partition"):
        step_trials(model, cross_entropy, data, bare)
    assert step_trials(model, cross_entropy, data, bare, partition="canonical") == expected
    with pytest.raises(ValueError, match="1 groups, but the summary has 4"):
        step_trials(model, cross_entropy, data, bare, partition="trivial")
    with pytest.raises(ValueError, match="groups of the partition differ"):
        step_trials(model, cross_entropy, data, summary, partition="trivial")
    other = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="another model"):
        step_trials(other, cross_entropy, data, Summary.load(tmp_path / "s.pt"))


def test_groups_that_divide_a_parameter():
    model, data = problem()
    partition = make_partition(model, {"row": [("0.weight", 0)], "others": [
        ("0.weight", slice(1, None)), "0.bias", "2.weight", "2.bias"
    ]})  # fmt: skip
    summary = summarize(model, cross_entropy, data, partition=partition)
    rates = torch.tensor([0.5, 0.0]).double()
    (trial,) = step_trials(model, cross_entropy, data, summary, rates, fractions=(1,))
    u = gradient(model, data)
    only = {name: torch.zeros(()) for name in u} | {"0.weight": torch.zeros(4, 3).double()}
    only["0.weight"][0] = 0.5
    start, end = (loss_of_moved_copy(model, data, u, only, f) for f in (0, 1))
    assert trial.real == pytest.approx(end - start, abs=1e-12)


def test_a_direction_that_was_forgotten_is_told(recwarn):
    """Else the rates along one direction would be tried along another."""
    model, data = problem()
    adam = torch.optim.Adam(model.parameters(), lr=1e-2)
    summary = summarize(model, cross_entropy, data, direction=adam)
    step_trials(model, cross_entropy, data, summary, direction=adam)
    given = {"model": model, "loss_fn": cross_entropy, "data": data}
    learning_rates(summary, **given, direction=adam)
    along_gradient = summarize(model, cross_entropy, data)
    learning_rates(along_gradient, **given)
    assert not recwarn
    with pytest.warns(UserWarning, match="Pass the direction that summarize was given") as told:
        step_trials(model, cross_entropy, data, summary)
    assert told[0].filename == __file__
    with pytest.warns(UserWarning, match="Pass the direction that summarize was given"):
        learning_rates(summary, **given)


def test_what_cannot_be_tried():
    model, data = problem()
    summary = summarize(model, cross_entropy, data)
    nan = torch.full((4,), math.nan)
    assert step_trials(model, cross_entropy, data, summary, nan) == ()
    with pytest.raises(ValueError, match=r"shape \(3,\), but the summary has 4 groups"):
        step_trials(model, cross_entropy, data, summary, nan[:3])
    with pytest.raises(ValueError, match="contains nan: expected finite numbers"):
        step_trials(model, cross_entropy, data, summary, fractions=(math.nan,))
    with pytest.raises(ValueError, match="no Hbar"):
        step_trials(model, cross_entropy, data, summarize(model, cross_entropy, data, order=1))
    second = summarize(model, cross_entropy, data, order=2)
    assert len(step_trials(model, cross_entropy, data, second)) == 3  # by Newton's step
    with pytest.warns(UserWarning, match="are those of different functions") as told:
        step_trials(model, squared_error_of_labels, data, summary)
    assert told[0].filename == __file__  # the caller's line
    with pytest.raises(TypeError, match="not NoneType: measure one with summarize"):
        step_trials(model, cross_entropy, data, None)


def squared_error_of_labels(model, batch):
    x, y = batch
    return squared_error(model, (x, F.one_hot(y, 2).double()))
