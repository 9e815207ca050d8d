"""The Lightning callback in real trainings, and NewtonSummary inside a LightningModule."""

import copy
import csv
import subprocess
import sys
import textwrap

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import newton_summary as ns
from newton_summary.integrations.lightning import SummaryCallback, training_loss
from newton_summary.integrations.monitor import Monitor
from newton_summary.integrations.sampling import sample_batches

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers",
    "ignore:.*LeafSpec",
    "ignore:Checkpoint directory",
    "ignore:No positive samples",
    "ignore:.*torch.jit.script",
    "ignore:Be aware that when using `ckpt_path`",
)


def make_dataset(samples=48):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, 4, generator=generator, dtype=torch.float64)
    return TensorDataset(x, (x.sum(1) > 0).long() + (x[:, 0] > 1).long())


class Plain(pl.LightningModule):
    """A smooth network whose derivatives are easily had in another way."""

    def __init__(self, optimizer=None):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
        self.make_optimizer = optimizer or (lambda m: torch.optim.SGD(m.parameters(), lr=0.1))

    def training_step(self, batch):
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return self.make_optimizer(self)


class Talkative(Plain):
    """Everything that a measurement could disturb: random numbers, buffers, metrics, notes."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            *(nn.Linear(4, 5, bias=False), nn.BatchNorm1d(5), nn.Tanh()),
            *(nn.Dropout(0.3), nn.Linear(5, 3)),
        ).double()
        self.accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=3)
        self.area = torchmetrics.AUROC(task="multiclass", num_classes=3)  # keeps lists
        self.outputs, self.by_label, self.steps = [], {}, 0
        self.losses, self.accuracies = [], []

    def training_step(self, batch, batch_idx):
        x, y = batch
        z = self.net(x)
        loss = F.cross_entropy(z, y)
        self.accuracy(z, y)
        self.area(z, y)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log_dict({"accuracy": self.accuracy, "area": self.area}, on_step=False, on_epoch=True)
        self.outputs.append(loss.detach())
        self.by_label[int(y[0])] = batch_idx
        self.steps += 1
        self.logger.experiment.log_metrics({"direct": float(loss.detach())}, self.global_step)
        return {"loss": loss, "of": len(x)}

    def on_train_epoch_end(self):
        self.losses += self.outputs
        self.accuracies.append(float(self.accuracy.compute()))
        self.outputs.clear()


def fit(module, folder, callbacks=(), ckpt_path=None, shuffle=True, **options):
    torch.manual_seed(3)
    loader = DataLoader(make_dataset(), 16, shuffle=shuffle)
    options = {"logger": False, "enable_checkpointing": False, "max_epochs": 3, **options}
    trainer = pl.Trainer(
        accelerator="cpu",
        callbacks=list(callbacks),
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
        **options,
    )
    trainer.fit(module, loader, ckpt_path=ckpt_path)
    return trainer


def quick(**options):
    return SummaryCallback(**{"report": None, "figures": False, **options})


@pytest.mark.parametrize(
    "loss_fn", [None, lambda module, batch: module.training_step(batch, 7)["loss"]]
)
def test_training_is_the_same_to_the_bit(loss_fn, tmp_path):
    """With dropout, batch norm, metrics, and a training_step that logs and takes notes."""
    runs = []
    for callbacks in ([], [quick(loss_fn=loss_fn)]):
        module = Talkative()
        logger = CSVLogger(tmp_path / str(len(runs)))
        trainer = fit(module, tmp_path, callbacks, logger=logger)
        logged = [
            {k: v for k, v in row.items() if not k.startswith("newton_summary/")}
            for row in read_rows(logger)
        ]
        metrics = {k: v for k, v in trainer.callback_metrics.items() if "newton" not in k}
        runs.append((module, [row for row in logged if len(row) > 1], metrics))
    (without, logged, metrics), (with_it, also_logged, same_metrics) = runs
    assert torch.stack(without.losses).equal(torch.stack(with_it.losses))
    assert without.accuracies == with_it.accuracies
    assert without.steps == with_it.steps == 9
    assert without.by_label == with_it.by_label
    assert set(vars(without)) == set(vars(with_it))
    for name, value in without.state_dict().items():
        assert value.equal(with_it.state_dict()[name]), name
    assert metrics == same_metrics
    assert logged == also_logged
    assert [row["direct"] for row in logged if "direct" in row]


def read_rows(logger):
    """The rows of a CSV logger, without empty cells."""
    with open(logger.experiment.metrics_file_path, newline="") as file:
        return [{k: v for k, v in row.items() if v} for row in csv.DictReader(file)]


def derivatives_by_hand(net, x, y):
    """gbar and Hbar from the whole Hessian."""
    params = {name: p.detach() for name, p in net.named_parameters()}

    def loss(params):
        return F.cross_entropy(torch.func.functional_call(net, params, x), y)

    g, H = torch.func.grad(loss)(params), torch.func.hessian(loss)(params)
    flat = {name: value.flatten() for name, value in g.items()}
    Hbar = torch.stack(
        [
            torch.stack([u @ H[a][b].reshape(len(u), len(v)) @ v for b, v in flat.items()])
            for a, u in flat.items()
        ]
    )
    return torch.stack([u @ u for u in flat.values()]), Hbar


def test_numbers_are_those_of_the_whole_hessian(tmp_path):
    """Measured before the training, on two batches of unequal size."""
    x, y = make_dataset().tensors
    callback = quick(data=[(x[:32], y[:32]), (x[32:], y[32:])], lambda_int=0.0)
    module = Plain()
    net = copy.deepcopy(module.net)
    with pytest.warns(UserWarning, match=r"rates after epoch 0 are unusable.*lambda_int > 0"):
        fit(module, tmp_path, [callback], max_epochs=1)
    measured = callback.history.measured[0]
    gbar, Hbar = derivatives_by_hand(net, x, y)
    loss = F.cross_entropy(net(x), y)
    assert callback.history.names == tuple(f"net.{name}" for name, _ in net.named_parameters())
    torch.testing.assert_close(measured.summary.gbar, gbar)
    torch.testing.assert_close(measured.summary.Hbar, Hbar)
    torch.testing.assert_close(measured.summary.loss, loss.detach())
    torch.testing.assert_close(measured.eta, torch.linalg.solve(Hbar, gbar), rtol=1e-6, atol=0)
    trial = measured.trials[0]
    grads = torch.autograd.grad(loss, list(net.parameters()))
    with torch.no_grad():
        for p, rate, g in zip(net.parameters(), measured.eta, grads):
            p -= trial.fraction * rate * g
        assert trial.real == pytest.approx(float(F.cross_entropy(net(x), y) - loss), rel=1e-9)


def test_loggers_get_rates_by_group(tmp_path):
    """Read back from the files of TensorBoard and of the CSV logger."""
    loggers = [TensorBoardLogger(tmp_path / "board"), CSVLogger(tmp_path / "csv")]
    callback = quick(every_n_epochs=2, figures=True)
    trainer = fit(Plain(), tmp_path, [callback], logger=loggers)
    assert callback.history.epochs == [0, 2, 3]  # three batches an epoch
    events = EventAccumulator(loggers[0].log_dir)
    events.Reload()
    rows = read_rows(loggers[1])
    for s, name in enumerate(callback.history.names):
        tag = f"newton_summary/eta/{name}"
        expected = [float(m.eta[s]) for m in callback.history.measured]
        scalars = events.Scalars(tag)
        assert [scalar.step for scalar in scalars] == [0, 6, 9]
        assert [scalar.value for scalar in scalars] == pytest.approx(expected)
        assert [float(row[tag]) for row in rows if tag in row] == pytest.approx(expected)
        assert float(trainer.callback_metrics[tag]) == pytest.approx(expected[-1])
    assert [image.step for image in events.Images("newton_summary/Hbar")] == [0, 6, 9]


def test_report_and_curves(tmp_path, capsys):
    callback = SummaryCallback(report="page.html", every_n_epochs=3, name="my run")
    fit(Plain(), tmp_path, [callback], accumulate_grad_batches=3, max_epochs=2)
    assert f"wrote {tmp_path / 'page.html'}" in capsys.readouterr().err
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "net.2.weight" in page and "my run" in page
    assert [epoch for epoch, _ in callback.history.curves["train_loss"]] == [1, 2]
    assert callback.history.facts["trained with"] == "SGD"
    # One step an epoch, on the gradient of everything: the first mean loss is that of the start.
    torch.testing.assert_close(
        torch.tensor(callback.history.curves["train_loss"][0][1]),
        callback.history.measured[0].summary.loss.float(),
    )


def test_a_try_leaves_no_report_and_a_failure_leaves_one(tmp_path):
    """``fast_dev_run`` is for looking whether the code runs; a training that breaks was real."""
    fit(Plain(), tmp_path / "try", [SummaryCallback(figures=False)], fast_dev_run=True)
    assert not (tmp_path / "try" / "newton_summary.html").exists()

    class Breaks(Plain):
        def on_train_epoch_end(self):
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        fit(Breaks(), tmp_path, [SummaryCallback(figures=False)])
    assert (tmp_path / "newton_summary.html").exists()


def test_history_goes_on_from_a_checkpoint(tmp_path):
    whole = quick()
    fit(Plain(), tmp_path, [whole], max_epochs=4)
    first, second = quick(), quick()
    checkpoints = ModelCheckpoint(tmp_path, save_last=True)
    fit(Plain(), tmp_path, [first, checkpoints], max_epochs=2, enable_checkpointing=True)
    fit(Plain(), tmp_path, [second], max_epochs=4, ckpt_path=tmp_path / "last.ckpt")
    assert second.history.epochs == whole.history.epochs == [0, 1, 2, 3, 4]
    assert second.history.rates[:2].equal(whole.history.rates[:2])
    assert [e for e, _ in second.history.curves["train_loss"]] == [1, 2, 3, 4]


def test_a_training_that_diverges_goes_on(tmp_path):
    """The first measurement would raise; later ones only warn, once."""

    def diverge(module):
        return torch.optim.SGD(module.parameters(), lr=float("inf"))

    callback = quick()
    with pytest.warns(
        UserWarning, match=r"measurement after epoch 1 failed.*continues.*Shown once"
    ):
        trainer = fit(Plain(diverge), tmp_path, [callback])
    assert trainer.current_epoch == 3
    assert callback.history.epochs == [0]


def test_rates_of_no_use_are_told(tmp_path):
    """A loss that is concave, without a third derivative."""

    def hill(module, batch):
        return -sum(p.square().sum() for p in module.parameters())

    with pytest.warns(UserWarning, match=r"rates after epoch 0 are unusable.*Shown once"):
        fit(Plain(), tmp_path, [quick(loss_fn=hill)])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"automatic_optimization": False}, ValueError, "manual optimization.*loss_fn"),
        ({"training_step": lambda batch: None}, TypeError, "returned NoneType.*data="),
    ],
)
def test_modules_without_a_loss_are_told_at_the_start(change, error, message, tmp_path):
    module = Plain()
    for name, value in change.items():
        setattr(module, name, value)
    with pytest.raises(error, match=message):
        fit(module, tmp_path, [quick()])


def test_a_missing_plotly_is_told_at_the_start(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install.*report=None"):
        fit(Plain(), tmp_path, [SummaryCallback()])


@pytest.mark.parametrize("options", [{"every_n_epochs": 0}, {"num_batches": 1.5}])
def test_wrong_numbers_are_told(options):
    with pytest.raises(ValueError, match=f"{next(iter(options))}=.*whole number"):
        SummaryCallback(**options)


def test_works_with_pytorch_lightning_alone(tmp_path):
    """In a new process in which the package ``lightning`` does not exist."""
    code = f"""
    import sys
    sys.modules["lightning"] = None
    import pytorch_lightning as pl, torch
    from newton_summary.integrations.lightning import SummaryCallback

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(3, 1)

        def training_step(self, batch, batch_idx):
            loss = self.layer(batch).square().mean()
            self.log("loss", loss)
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    callback = SummaryCallback(report=None, figures=False, lambda_int=0.0)
    trainer = pl.Trainer(max_epochs=2, accelerator="cpu", callbacks=[callback],
                         default_root_dir={str(tmp_path)!r}, enable_checkpointing=False)
    trainer.fit(Module(), torch.utils.data.DataLoader(torch.randn(16, 3), 4))
    assert isinstance(callback, pl.Callback)
    print(callback.history.epochs, *callback.history.names)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert "[0.0, 1.0, 2.0] layer.weight layer.bias" in result.stdout


# --- the samples ----------------------------------------------------------------------------------


def test_samples_are_drawn_without_touching_the_loader():
    class Noisy(TensorDataset):
        def __getitem__(self, i):
            return super().__getitem__(i)[0] + torch.rand(())

    generator = torch.Generator().manual_seed(5)
    loader = DataLoader(Noisy(torch.arange(20)), 6, shuffle=True, generator=generator)
    states = torch.get_rng_state(), generator.get_state()
    batches = sample_batches(loader, 8)
    assert torch.get_rng_state().equal(states[0]) and generator.get_state().equal(states[1])
    assert [len(batch) for batch in batches] == [6, 6, 6]  # whole ones, although 20 are there
    numbers = torch.cat([*batches]).floor().tolist()
    assert len(set(numbers)) == 18 and numbers != sorted(numbers)
    again = torch.cat([*sample_batches(loader, 2)]).floor().tolist()
    assert again == numbers[:12]


def test_ranks_draw_different_samples():
    loader = DataLoader(torch.arange(20), 4)
    first, second = (torch.cat([*sample_batches(loader, 2, r, 2)]).tolist() for r in (0, 1))
    assert len({*first, *second}) == 16


def test_a_small_dataset_is_one_batch():
    assert [len(batch) for batch in sample_batches(DataLoader(torch.arange(3), 8), 5)] == [3]


def test_a_stream_of_samples_is_told():
    class Stream(IterableDataset):
        def __iter__(self):
            yield torch.zeros(3)

    with pytest.raises(ValueError, match=r"DataLoader of Stream.*Pass data="):
        sample_batches(DataLoader(Stream()), 2)


# --- NewtonSummary inside -------------------------------------------------------------------------


def newton(module):
    """As a user would write it in configure_optimizers, with a scheduler."""
    loader = DataLoader(make_dataset(), 24, shuffle=True)
    optimizer = ns.NewtonSummary(
        ns.make_partition(module), summary_period=4, curvature=(training_loss, loader)
    )
    return {
        "optimizer": optimizer,
        "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
    }


def test_newton_summary_trains_as_in_a_plain_loop(tmp_path):
    """To the bit: the same batches, the same curvature data, the same schedule."""
    module = Plain(newton)
    trainer = fit(module, tmp_path)
    net = Plain().net
    torch.manual_seed(3)
    loader = DataLoader(make_dataset(), 16, shuffle=True)

    def loss_fn(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1])

    curvature = DataLoader(make_dataset(), 24, shuffle=True)
    optimizer = ns.NewtonSummary(
        ns.make_partition(net), summary_period=4, curvature=(loss_fn, curvature)
    )
    losses = []
    for _ in range(3):
        for batch in loader:
            optimizer.zero_grad()
            loss = loss_fn(net, batch)
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
    assert losses[-1] < losses[0]
    for p, q in zip(module.net.parameters(), net.parameters(), strict=True):
        assert p.equal(q)
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.7 * 0.9**3)


def test_newton_summary_resumes_to_the_bit(tmp_path):
    whole, first, second = Plain(newton), Plain(newton), Plain(newton)
    fit(whole, tmp_path, max_epochs=4, shuffle=False)
    checkpoints = ModelCheckpoint(tmp_path, save_last=True)
    options = {"callbacks": [checkpoints], "enable_checkpointing": True, "shuffle": False}
    fit(first, tmp_path, max_epochs=2, **options)
    fit(second, tmp_path, max_epochs=4, ckpt_path=tmp_path / "last.ckpt", **options)
    assert not whole.net[0].weight.equal(first.net[0].weight)
    for p, q in zip(whole.net.parameters(), second.net.parameters(), strict=True):
        assert p.equal(q)


def test_what_newton_summary_used_is_in_the_history(tmp_path):
    callback = quick()
    trainer = fit(Plain(newton), tmp_path, [callback])
    kinds = [(m.epoch, m.kind) for m in callback.history.measured]
    assert kinds[:2] == [(0, "full"), (1, "full")] and kinds[-1] == (3, "optimizer")
    optimizer = trainer.optimizers[0]
    assert callback.history.measured[-1].eta.equal(optimizer.last_rates.eta)
    name = callback.history.names[0]
    logged = trainer.callback_metrics[f"newton_summary/optimizer/eta/{name}"]
    assert float(logged) == pytest.approx(float(optimizer.last_rates.eta[0]))


def test_what_was_not_measured_or_validated_anew_is_not_repeated(tmp_path):
    """One refresh in four epochs, and a validation after every second epoch."""

    def rarely(module):
        loader = DataLoader(make_dataset(), 24, shuffle=True)
        return ns.NewtonSummary(
            ns.make_partition(module), summary_period=100, curvature=(training_loss, loader)
        )

    class Validated(Plain):
        def validation_step(self, batch):
            self.log("validation", F.cross_entropy(self.net(batch[0]), batch[1]))

        def val_dataloader(self):
            return DataLoader(make_dataset(), 16)

    callback = quick()
    fit(Validated(rarely), tmp_path, [callback], max_epochs=4, check_val_every_n_epoch=2)
    kinds = [measured.kind for measured in callback.history.measured]
    assert kinds.count("full") == 5 and kinds.count("optimizer") == 1
    assert [epoch for epoch, _ in callback.history.curves["validation"]] == [2, 4]
    assert [epoch for epoch, _ in callback.history.curves["train_loss"]] == [1, 2, 3, 4]


def test_the_strength_that_was_found_stays(tmp_path):
    """Of the first measurement, as suggest_lambda_int finds it, also after a checkpoint."""

    def loss_fn(module, batch):
        return (module.net(batch[0])[:, 0] - batch[0].sum(1).sin()).square().mean()

    data, module = list(DataLoader(make_dataset(), 48)), Plain()
    summary = ns.summarize(module, loss_fn, data)
    expected = ns.suggest_lambda_int(module, loss_fn, data, summary)
    assert expected.lambda_int > 1
    options = {"data": data, "loss_fn": loss_fn}
    callback = quick(**options)
    fit(module, tmp_path, [callback])
    first, *_, last = callback.history.measured
    assert callback.lambda_int == expected.lambda_int and first.eta.equal(expected.rates.eta)
    rates = ns.learning_rates(last.summary, expected.lambda_int)
    assert last.eta.equal(rates.eta)
    again = quick(**options)
    again.load_state_dict(callback.state_dict())
    assert again.measure(module, 5).eta.equal(rates.eta)
    assert quick(order=2).lambda_int == 0 and quick(lambda_int=2.0).lambda_int == 2


def test_a_strength_is_looked_for_until_there_is_one():
    """Along a direction of zeros nothing changes; the next measurement has another one."""
    net = nn.Linear(2, 1).double()
    x = torch.randn(8, 2).double()
    u = {name: torch.ones_like(p) for name, p in net.named_parameters()}
    monitor = Monitor(loss_fn=lambda net, x: net(x).exp().mean(), data=x)
    monitor.options["direction"] = {name: 0 * along for name, along in u.items()}
    monitor.measure(net, 0)
    assert monitor.lambda_int is None and "lambda_int" not in monitor.history.facts
    monitor.options["direction"] = u
    monitor.measure(net, 1)
    assert monitor.lambda_int is not None
    assert monitor.history.facts["lambda_int"] == f"{monitor.lambda_int:g}"


@pytest.mark.filterwarnings("ignore:Falling back from 'sweep'")  # scripted parts of the metrics
def test_curvature_from_training_step_leaves_no_trace(tmp_path):
    """A refresh evaluates training_step too: its notes and metrics are those of training alone."""
    module = Talkative()
    module.make_optimizer = newton
    fit(module, tmp_path, logger=CSVLogger(tmp_path))
    assert module.steps == len(module.losses) == 9
