"""Logs of measurements, read back: TensorBoard, Weights & Biases, and a loop of one's own."""

import copy
import io
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.utils.tensorboard import SummaryWriter

import newton_summary as ns
from newton_summary.figures import heatmap
from newton_summary.integrations.monitor import Monitor
from newton_summary.integrations.tensorboard import TensorBoard, log_summary
from newton_summary.integrations.wandb import WeightsAndBiases


@pytest.fixture
def setup():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    x = torch.randn(32, 3, dtype=torch.float64)
    return model, (x, x.sum(1, keepdim=True))


def loss_fn(model, batch):
    return (model(batch[0]) - batch[1]).square().mean()


def read(folder):
    events = EventAccumulator(str(folder))
    events.Reload()
    return events


def test_a_summary_is_read_back_from_tensorboard(setup, tmp_path):
    model, batch = setup
    summary = ns.summarize(model, loss_fn, batch)
    rates = ns.learning_rates(summary)
    with SummaryWriter(tmp_path) as writer:
        log_summary(writer, summary, rates, step=7)
    events = read(tmp_path)
    eta, g, H = rates.eta.numpy(), summary.gbar.numpy(), summary.Hbar.numpy()
    expected = {
        "newton_summary/loss": float(loss_fn(model, batch).detach()),
        "newton_summary/predicted_change": -eta @ g + eta @ H @ eta / 2,
        "newton_summary_groups/0.weight": eta[0],
        "newton_summary_groups/0.bias": eta[1],
        "newton_summary_groups/2.weight": eta[2],
        "newton_summary_groups/2.bias": eta[3],
    }
    assert set(events.Tags()["scalars"]) == set(expected)
    for tag, value in expected.items():
        (scalar,) = events.Scalars(tag)
        assert scalar.step == 7
        assert scalar.value == pytest.approx(value, rel=1e-6), tag
    for tag, what in (("Hbar", ("Hbar", "symlog")), ("interactions", ("normalized", "raw"))):
        (image,) = events.Images(f"newton_summary/{tag}")
        picture = np.asarray(Image.open(io.BytesIO(image.encoded_image_string)).convert("RGB"))
        canvas = FigureCanvasAgg(heatmap(summary, *what))
        canvas.draw()
        assert np.array_equal(picture, np.asarray(canvas.buffer_rgba())[..., :3])


def test_without_figures_there_are_none(setup, tmp_path):
    model, batch = setup
    summary = ns.summarize(model, loss_fn, batch)
    with SummaryWriter(tmp_path) as writer:
        log_summary(writer, summary, ns.learning_rates(summary), step=0, figures=False)
    assert read(tmp_path).Tags()["images"] == []


def test_rates_that_are_not_finite_are_written_as_such(tmp_path):
    summary = ns.Summary(gbar=torch.ones(2), Hbar=-torch.eye(2), D3=torch.tensor([1.0, 0]))
    with SummaryWriter(tmp_path) as writer:
        log_summary(writer, summary, ns.learning_rates(summary), step=0)
    assert np.isnan(read(tmp_path).Scalars("newton_summary_groups/0")[0].value)


def test_a_loop_of_ones_own(setup, tmp_path):
    """A monitor measures, logs, and writes the report; checkpoints carry its history."""
    model, batch = setup
    sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    with SummaryWriter(tmp_path) as writer:
        monitor = Monitor(
            loss_fn=loss_fn,
            data=batch,
            loggers=[TensorBoard(writer)],
            name="my <run>",
            partition="canonical",
        )
        for epoch in range(3):
            if epoch == 2:  # go on in another process
                torch.save(monitor.state_dict(), tmp_path / "monitor.pt")
                monitor = Monitor(
                    loss_fn=loss_fn,
                    data=batch,
                    loggers=[TensorBoard(writer)],
                    partition="canonical",
                )
                monitor.load_state_dict(torch.load(tmp_path / "monitor.pt"))
            measured = monitor.measure(model, epoch, step=10 * epoch, optimizer=sgd)
            assert float(measured.summary.loss) == pytest.approx(loss_fn(model, batch).item())
            sgd.zero_grad()
            loss_fn(model, batch).backward()
            sgd.step()
    path = monitor.write_report(tmp_path / "new folder" / "report.html")
    assert "0.weight" in path.read_text(encoding="utf-8")
    assert monitor.history.epochs == [0, 1, 2] and monitor.history.name == "my <run>"
    assert monitor.history.facts["model"] == "Sequential, 21 parameters"
    scalars = read(tmp_path).Scalars("newton_summary_groups/2.bias")
    assert [scalar.step for scalar in scalars] == [0, 10, 20]
    assert [scalar.value for scalar in scalars] == pytest.approx(
        monitor.history.rates[:, 3].tolist(), rel=1e-6
    )
    assert [len(entry.trials) for entry in monitor.history.measured] == [1, 1, 1]


def test_without_a_step_logs_count_epochs(setup, tmp_path):
    model, batch = setup
    with SummaryWriter(tmp_path) as writer:
        board = TensorBoard(writer)
        monitor = Monitor(loss_fn=loss_fn, data=batch, loggers=[board], figures=False)
        for epoch, step in ((0, None), (1, None), (2, None), (3, 0)):
            monitor.measure(model, epoch, step)
    points = read(tmp_path).Scalars("newton_summary/loss")
    assert [point.step for point in points] == [0, 1, 2, 0]


def test_a_measurement_shows_itself_in_a_line(setup):
    model, batch = setup
    measured = Monitor(loss_fn=loss_fn, data=batch).measure(model, 2)
    loss = f"{loss_fn(model, batch).item():.4g}"
    assert repr(measured) == f"Measured(epoch 2, loss {loss}, 4 groups, {measured.status})"


@pytest.mark.parametrize("lr", [0.01, 1.0, 30.0])
def test_rates_along_an_optimizer_are_those_of_its_trial(lr, setup):
    """And not the best next step, which a rehearsal may have refused."""
    model, batch = setup
    sgd = torch.optim.SGD(model.parameters(), lr=lr)
    measured = Monitor(loss_fn=loss_fn, data=[batch] * 2, console=False).measure(
        model, 0, optimizer=sgd
    )
    twin = copy.deepcopy(model)
    before = loss_fn(twin, batch)
    gradients = torch.autograd.grad(before, list(twin.parameters()))
    with torch.no_grad():
        for p, g in zip(twin.parameters(), gradients, strict=True):
            p -= float(measured.eta) * lr * g
        change = float(loss_fn(twin, batch) - before)
    assert measured.trial.real == pytest.approx(change, rel=1e-4)


@pytest.mark.parametrize(("given", "missing"), [({"data": torch.ones(2)}, "loss_fn"), ({}, "data")])
def test_what_is_missing_is_told(given, missing, setup):
    with pytest.raises(ValueError, match=f"pass {missing}="):
        Monitor(**given).measure(setup[0], 0)


class FakeRun:
    """Records what a run of W&B is told."""

    def __init__(self):
        self.rows, self.axes = [], {}

    def define_metric(self, name, step_metric):
        self.axes[name] = step_metric

    def log(self, row):
        self.rows.append(row)


def test_weights_and_biases(setup, monkeypatch):
    """All rates of a measurement in one row, with their own axis; pictures as wandb.Image."""
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(Image=np.asarray))
    model, batch = setup
    run = FakeRun()
    monitor = Monitor(loss_fn=loss_fn, data=batch, loggers=[WeightsAndBiases(run)])
    measured = monitor.measure(model, 0, step=5)
    assert run.axes == {"newton_summary/*": "newton_summary/step"}
    numbers, *pictures = run.rows
    assert [row["newton_summary/step"] for row in run.rows] == [5, 5, 5, 5]
    rates = [v for name, v in numbers.items() if name.startswith("newton_summary_groups/")]
    assert rates == measured.eta.tolist()
    for row, name in zip(pictures, ("Hbar", "interactions", "rates"), strict=True):
        pixels = row[f"newton_summary/{name}"]
        assert pixels.shape[2] in (3, 4) and pixels.std() > 0


def test_a_factor_at_its_limit_has_no_error_in_the_log(setup):
    """Every half of the batches finds the same limit: that is no measure of its error."""
    model, (x, y) = setup
    batches = list(zip(x.split(8), y.split(8)))
    for lr, at_limit in ((1e-6, True), (0.1, False)):
        logged = {}
        log = SimpleNamespace(scalars=lambda values, step, to=logged: to.update(values))
        sgd = torch.optim.SGD(model.parameters(), lr=lr)
        monitor = Monitor(
            loss_fn=loss_fn, data=batches, loggers=[log], figures=False, console=False
        )
        monitor.measure(model, 0, optimizer=sgd)
        assert (logged["newton_summary/factor/group0"] == pytest.approx(10.0)) == at_limit
        assert ("newton_summary/factor_error/group0" not in logged) == at_limit


def test_a_schedule_below_its_peak_is_told_with_rates_as_they_are_steered(setup, capsys):
    model, batch = setup
    adam = torch.optim.Adam(model.parameters())
    torch.optim.lr_scheduler.OneCycleLR(adam, max_lr=0.01, total_steps=100)
    held = dict(adam.param_groups[0])
    for partition in (None, "layers"):
        monitor = Monitor(
            loss_fn=loss_fn, data=[batch, batch], figures=False, partition=partition, adjust=True
        )
        monitor.controller = SimpleNamespace(multiplier=100.0, rates=[0.04], history=[])
        monitor.measure(model, 0, optimizer=adam)
        assert ", a schedule at 0.04 of its peak; steered: lr 0.04\n" in capsys.readouterr().err
        assert dict(adam.param_groups[0]) == held
        monitor.controller.optimizer = adam
        monitor.measure(model, 1)  # of the optimizer that is steered
        assert ", a schedule at 0.04 of its peak; steered: lr 0.04\n" in capsys.readouterr().err
    ((lr, peak),) = monitor.advice.below_peak
    assert (lr, peak) == pytest.approx((0.04, 1.0))


@pytest.mark.parametrize("adjust", [False, True])
def test_a_direction_is_refused_where_it_is_that_of_an_optimizer(setup, adjust):
    model, batch = setup
    monitor = Monitor(
        loss_fn=loss_fn, data=batch, direction="gradient", adjust=adjust, console=False
    )
    monitor.measure(model, 0)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor.steer(sgd, model, loss_fn)
    with pytest.raises(ValueError, match="is the next step of SGD: leave out direction="):
        monitor.measure(model, 1, optimizer=sgd)
