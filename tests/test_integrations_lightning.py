"""The Lightning callback in real trainings, and NewtonSummary inside a LightningModule."""

import copy
import csv
import math
import subprocess
import sys
import textwrap
from collections import UserList
from types import SimpleNamespace

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


def fit(module, folder, callbacks=(), ckpt_path=None, shuffle=True, loader=None, **options):
    torch.manual_seed(3)
    loader = loader or DataLoader(make_dataset(), 16, shuffle=shuffle)
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


def test_factor_is_that_of_the_whole_hessian(tmp_path, capsys):
    """Of SGD's step, before the training, on two batches of unequal size."""
    x, y = make_dataset().tensors
    callback = quick(data=[(x[:32], y[:32]), (x[32:], y[32:])], lambda_int=0.0)
    module = Plain()
    net = copy.deepcopy(module.net)
    trainer = fit(module, tmp_path, [callback], max_epochs=1)
    measured = callback.history.measured[0]
    gbar, Hbar = derivatives_by_hand(net, x, y)
    loss = F.cross_entropy(net(x), y)
    assert callback.history.names == ("group0",)
    torch.testing.assert_close(measured.summary.gbar, 0.1 * gbar.sum()[None])
    torch.testing.assert_close(measured.summary.Hbar, 0.01 * Hbar.sum()[None, None])
    factor = min(float(gbar.sum() / (0.1 * Hbar.sum())), 10.0)  # the largest one suggested
    assert float(measured.eta) == pytest.approx(factor, rel=1e-6)
    points = callback.history.curves["factor of lr, group0"]
    assert points[0] == (0, float(measured.eta))
    logged = trainer.callback_metrics["newton_summary/factor/group0"]
    assert float(logged) == pytest.approx(points[-1][1])
    with torch.no_grad():  # the suggested step
        for p, g in zip(net.parameters(), torch.autograd.grad(loss, list(net.parameters()))):
            p -= factor * 0.1 * g
        real = float(F.cross_entropy(net(x), y) - loss)
    (trial,) = measured.trials
    assert trial.real == pytest.approx(real, rel=1e-9)
    assert "newton_summary: epoch 0: loss 1." in capsys.readouterr().err


def test_the_error_of_an_earlier_factor_is_not_kept():
    """A factor at its limit has none, and Lightning keeps old values."""
    trainer = SimpleNamespace(callback_metrics={}, is_global_zero=False)
    (log,) = quick()._logs(trainer)
    factor, error = (f"newton_summary/{name}/group0" for name in ("factor", "factor_error"))
    log.scalars({factor: 3.0, error: 0.5}, 1)
    log.scalars({"newton_summary/steered_lr": 0.1}, 2)
    assert trainer.callback_metrics[error] == 0.5
    log.scalars({factor: 10.0}, 3)
    assert trainer.callback_metrics[factor] == 10 and error not in trainer.callback_metrics


def test_loggers_get_factors_and_rates_by_group(tmp_path):
    """Read back from the files of TensorBoard and of the CSV logger."""
    loggers = [TensorBoardLogger(tmp_path / "board"), CSVLogger(tmp_path / "csv")]
    callback = quick(every_n_epochs=2, figures=True, partition="layers")
    trainer = fit(Plain(), tmp_path, [callback], logger=loggers)
    assert callback.history.epochs == [0, 2, 3]  # three batches an epoch
    events = EventAccumulator(loggers[0].log_dir)
    events.Reload()
    rows = read_rows(loggers[1])
    factors = [value for _, value in callback.history.curves["factor of lr, group0"]]
    expected = {"newton_summary/factor/group0": factors}
    for s, name in enumerate(callback.history.names):
        rates = [float(m.eta[s]) for m in callback.history.measured]
        expected[f"newton_summary_groups/{name}"] = rates
    trials = [m.trials[-1] for m in callback.history.measured]
    expected["newton_summary/predicted_change"] = [trial.predicted for trial in trials]
    expected["newton_summary/real_change"] = [trial.real for trial in trials]
    for tag, values in expected.items():
        scalars = events.Scalars(tag)
        assert [scalar.step for scalar in scalars] == [0, 6, 9]
        assert [scalar.value for scalar in scalars] == pytest.approx(values)
        assert [float(row[tag]) for row in rows if tag in row] == pytest.approx(values)
        assert float(trainer.callback_metrics[tag]) == pytest.approx(values[-1])
    for picture in ("Hbar", "interactions", "rates"):
        assert [image.step for image in events.Images(f"newton_summary/{picture}")] == [0, 6, 9]
    assert "custom_scalars__config__" in events.Tags()["tensors"]


def test_report_and_curves(tmp_path, capsys):
    callback = SummaryCallback(
        report="page.html", every_n_epochs=3, name="my run", partition="layers"
    )
    fit(Plain(), tmp_path, [callback], accumulate_grad_batches=3, max_epochs=2)
    assert f"wrote {tmp_path / 'page.html'}" in capsys.readouterr().err
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "net.2" in page and "my run" in page
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


def test_a_new_training_starts_afresh(tmp_path, capsys):
    """Of another model on other data, such as the next fold; or of the same model again."""

    class Wide(Plain):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(6, 3)).double()

    told = "a new training: the measurements of the one before are left out"
    used = quick(adjust=True, console=True)
    fit(Plain(), tmp_path, [used], max_epochs=3)
    assert told not in capsys.readouterr().err
    data = TensorDataset(torch.randn(32, 6).double(), torch.arange(32) % 3)
    for module in (Wide(), again := Plain(), again):
        fresh, other = quick(adjust=True), copy.deepcopy(module)
        loader = DataLoader(data if isinstance(module, Wide) else make_dataset(), 16)
        fit(module, tmp_path, [used], max_epochs=2, loader=loader)
        fit(other, tmp_path, [fresh], max_epochs=2, loader=loader)
        assert capsys.readouterr().err.count(told) == 1
        assert len(used.history.curves["measured loss"]) == 3
        assert used.history.curves == fresh.history.curves
        assert used.controller.history == fresh.controller.history


def test_a_training_that_goes_on_keeps_its_history(tmp_path, capsys):
    """The same trainer and module, whose number of epochs is raised; another module is new."""
    callback, module = quick(console=True), Plain()
    trainer = fit(module, tmp_path, [callback], max_epochs=2)
    for again, epochs in ((module, [0, 1, 2, 3, 4]), (Plain(), [4, 5, 6])):
        trainer.fit_loop.max_epochs += 2
        trainer.fit(again, DataLoader(make_dataset(), 16))
        assert callback.history.epochs == epochs
        assert ("a new training" in capsys.readouterr().err) == (again is not module)


def test_a_trainer_that_goes_on_has_a_new_controller(tmp_path, capsys):
    """As Lightning makes a new optimizer: like that of a new callback. Not from a checkpoint."""
    checkpoints = ModelCheckpoint(tmp_path, save_last=True)
    callback, module = quick(adjust=True, console=True), Plain()
    saved = {"max_epochs": 2, "enable_checkpointing": True}
    trainer = fit(module, tmp_path, [callback, checkpoints], **saved)
    other = copy.deepcopy(module)
    told, loader = "a new controller, since", DataLoader(make_dataset(), 16)
    assert told not in capsys.readouterr().err
    trainer.fit_loop.max_epochs = 4
    trainer.fit(module, loader)
    assert told in capsys.readouterr().err and callback._epochs == [0, 1, 2, 3, 4]
    fit(other, tmp_path, [fresh := quick(adjust=True)], max_epochs=2, loader=loader)
    assert callback.controller.history == fresh.controller.history
    trainer.fit_loop.max_epochs = 5
    trainer.fit(module, loader, ckpt_path=tmp_path / "last.ckpt")
    assert told not in capsys.readouterr().err and callback.controller.steps == 9


def test_a_used_callback_goes_on_from_a_checkpoint(tmp_path, capsys):
    checkpoints = ModelCheckpoint(tmp_path, save_last=True)
    fit(Plain(), tmp_path, [quick(), checkpoints], max_epochs=2, enable_checkpointing=True)
    callback = quick(console=True)
    fit(Plain(), tmp_path, [callback], max_epochs=4)
    fit(Plain(), tmp_path, [callback], max_epochs=3, ckpt_path=tmp_path / "last.ckpt")
    assert callback.history.epochs == [0, 1, 2, 3]
    assert "a new training" not in capsys.readouterr().err
    fit(Plain(), tmp_path, [callback], max_epochs=1)
    assert callback.history.epochs == [0, 1]


@pytest.mark.parametrize("stage", ["test", "validate"])
def test_a_test_from_a_checkpoint_neither_rewinds_nor_resumes(stage, tmp_path, capsys):
    """Between two folds; Lightning restores callbacks then too."""

    class Tested(Plain):
        def test_step(self, batch):
            return F.cross_entropy(self.net(batch[0]), batch[1])

        validation_step = test_step

    callback = quick(adjust=True, console=True)
    checkpoints = ModelCheckpoint(tmp_path, save_top_k=-1, filename="{epoch}")
    trainer = fit(Plain(), tmp_path, [callback, checkpoints], enable_checkpointing=True)
    curves = copy.deepcopy(callback.history.curves)
    run = getattr(trainer, stage)
    loader = DataLoader(make_dataset(), 16)
    run(Tested(), loader, ckpt_path=tmp_path / "epoch=0.ckpt", verbose=False)
    assert callback.history.curves == curves
    fit(module := Plain(), tmp_path, [callback], max_epochs=1)
    assert "a new training" in capsys.readouterr().err
    fit(fresh := Plain(), tmp_path, [quick(adjust=True)], max_epochs=1)
    assert [epoch for epoch, _ in callback.history.curves["measured loss"]] == [0, 1]
    assert module.net[0].weight.equal(fresh.net[0].weight)


def test_a_training_that_diverges_goes_on(tmp_path):
    """The first measurement would raise; later ones only warn, once."""

    class Diverges(Plain):
        def on_train_epoch_end(self):
            nn.init.constant_(self.net[0].weight, float("nan"))

    callback = quick()
    with pytest.warns(
        UserWarning, match=r"measurement after epoch 1 failed.*continues.*Shown once"
    ):
        trainer = fit(Diverges(), tmp_path, [callback])
    assert trainer.current_epoch == 3
    assert callback.history.epochs == [0]


def test_rates_of_no_use_are_told():
    """Along the gradient of a concave loss without third derivative; by trials there are some."""

    def hill(module, batch):
        return -sum(p.square().sum() for p in module.parameters())

    with pytest.warns(UserWarning, match=r"rates after epoch 0 are unusable.*Shown once"):
        Monitor(loss_fn=hill, data=torch.ones(2, 1), lambda_int=1.0).measure(Plain().net, 0)
    assert Monitor(loss_fn=hill, data=torch.ones(2, 1)).measure(Plain().net, 0).trial.real < 0


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


def test_a_report_that_cannot_be_written_is_told_at_the_start(tmp_path):
    (tmp_path / "file").touch()
    callback = quick(report=tmp_path / "file" / "page.html")
    with pytest.raises(ns.CannotWriteError, match=r"page\.html cannot be written: Not a directory"):
        fit(Plain(), tmp_path, [callback])
    assert not callback.history.measured
    fit(Plain(), tmp_path, [quick(report="new/folder/page.html")], max_epochs=1)
    assert (tmp_path / "new" / "folder" / "page.html").exists()


@pytest.mark.parametrize("options", [{"every_n_epochs": 0}, {"num_batches": 1.5}])
def test_wrong_numbers_are_told(options):
    with pytest.raises(ValueError, match=f"{next(iter(options))}=.*whole number"):
        SummaryCallback(**options)


@pytest.mark.slow
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
    assert "[0.0, 1.0, 2.0] group0" in result.stdout


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


# --- steering -------------------------------------------------------------------------------------


class Scheduled(Plain):
    """Momentum, a schedule for each step, and gradients that are accumulated and clipped."""

    def configure_optimizers(self):
        sgd = torch.optim.Adam(self.parameters(), lr=1e-6)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(sgd, 40)
        return {"optimizer": sgd, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


STEERED = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5, "shuffle": False}


def test_steering_equals_a_plain_loop_to_the_bit(tmp_path, capsys):
    """Three batches an epoch, so the last step of each epoch is of a single batch."""
    module, callback = Scheduled(), quick(adjust=True, console=True)
    logger = CSVLogger(tmp_path)
    trainer = fit(module, tmp_path, [callback], max_epochs=6, logger=logger, **STEERED)

    def loss_fn(net, batch):
        return F.cross_entropy(net(batch[0]), batch[1])

    plain = Scheduled()
    net, found = plain.net, plain.configure_optimizers()
    adam, schedule = found["optimizer"], found["lr_scheduler"]["scheduler"]
    controller = ns.RateController(adam, net, loss_fn, set_point=1.0)
    first, second, third = DataLoader(make_dataset(), 16)
    for batches in [(first, second), (third,)] * 6:
        adam.zero_grad()
        for batch in batches:
            (loss_fn(net, batch) / 2).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        controller.step(UserList(batches))
        schedule.step()
    (last,) = [r for r in controller.history if r.change != 1][-1:]
    told = f"; steered: lr {controller.rates[0]:.3g} (last change after step {last.step}: "
    told += f"x{last.change:.3g}, {last.why}"
    assert told in capsys.readouterr().err
    assert callback.controller.history == controller.history and len(controller.history) > 5
    for p, q in zip(module.net.parameters(), net.parameters(), strict=True):
        assert p.equal(q)
    logged = [float(r[k]) for r in read_rows(logger) if (k := "newton_summary/steered_lr") in r]
    assert logged == pytest.approx([r.rate * r.change for r in controller.history])
    assert len(callback.history.curves["steered lr"]) == len(controller.history)
    assert controller.rates[0] > 1e-4  # from 1e-6
    trainer.optimizers[0].step()  # not by the trainer: not steered
    assert callback.controller.steps == controller.steps


def test_only_the_loss_is_measured_while_steering(tmp_path, monkeypatch, capsys):
    """What the console shows; with a partition its groups too, but no advice nor a rehearsal."""
    x, y = make_dataset().tensors

    def refused(*_, **__):
        raise AssertionError("not while steering")

    monkeypatch.setattr("newton_summary.measuring.advice.rehearse", refused)
    for partition in (None, "layers"):
        module, logger = Plain(), CSVLogger(tmp_path)
        expected = F.cross_entropy(module.net(x), y).item()
        callback = SummaryCallback(adjust=True, partition=partition, data=[(x, y)], figures=False)
        trainer = fit(module, tmp_path, [callback], max_epochs=2, logger=logger)
        logged = {key.removeprefix("newton_summary/") for row in read_rows(logger) for key in row}
        assert {"loss", "steered_lr", "steered_factor"} <= logged
        assert not any(key.startswith(("suggested", "factor")) for key in logged)
        losses = [float(row[k]) for row in read_rows(logger) if (k := "newton_summary/loss") in row]
        assert len(losses) == 3 and losses[0] == pytest.approx(expected)
        assert float(trainer.callback_metrics["newton_summary/loss"]) == pytest.approx(losses[-1])
        said = capsys.readouterr().err
        assert said.count(": epoch") == 3 and f"epoch 0: loss {expected:.4g}; steered: lr" in said
        assert callback.history.epochs == ([] if partition is None else [0, 1, 2])
        assert "wrote" in said  # the report
    assert len(callback.history.names) == 2 and "real_change" in logged


@pytest.mark.parametrize("partition", [None, "layers"])
def test_a_warm_up_that_is_left_out_is_not_told(partition, tmp_path, capsys):
    """Until the peak, steps have the controller's rates: these are told, and measured along."""

    class Warm(Plain):
        def configure_optimizers(self):
            adam = torch.optim.Adam(self.parameters(), lr=1e-3)
            schedule = torch.optim.lr_scheduler.LinearLR(adam, 1e-3, 1.0, total_iters=99)
            return {"optimizer": adam, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    callback = quick(adjust=True, console=True, partition=partition)
    fit(Warm(), tmp_path, [callback], max_epochs=6)
    lines = [line for line in capsys.readouterr().err.splitlines() if ": epoch" in line]
    assert not any("of its peak" in line for line in lines) and "(last change" in lines[-1]
    if partition:
        rate = callback.controller.rates[0]
        assert [group.lrs for group in callback.advice.groups] == [(rate,), (rate,)]
        start = Plain()
        start.training_step(make_dataset().tensors).backward()
        gain = sum(1e-3 * p.grad.abs().sum() for p in start.parameters())  # of Adam's first step
        measured = callback.history.measured[0].summary.gbar.sum()
        torch.testing.assert_close(measured, gain, rtol=1e-4, atol=0)


def test_the_end_of_a_schedule_is_not_explained(tmp_path, capsys):
    """The best step there is thousands of times as long as the present one."""

    class Cycle(Plain):
        def configure_optimizers(self):
            adam = torch.optim.Adam(self.parameters(), lr=1e-3)
            schedule = torch.optim.lr_scheduler.OneCycleLR(adam, 1e-3, total_steps=19)
            return {"optimizer": adam, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    for adjust in (False, True):
        callback = quick(adjust=adjust, console=True)
        fit(Cycle(), tmp_path, [callback], max_epochs=6)
        factors = callback.history.curves.get("factor of lr, group0", [])
        assert [epoch for epoch, _ in factors] == ([] if adjust else [1, 2, 3, 4, 5])
        *_, before, last = [s for s in capsys.readouterr().err.splitlines() if ": epoch" in s]
        assert "(last change after" in before if adjust else "lr " in before
        end = "; steered: lr " if adjust else ": too low for advice"
        assert f"of its peak{end}" in last and last.count(";") <= 1 + adjust and "(" not in last


def test_steering_resumes_to_the_bit(tmp_path):
    whole, first, second = Scheduled(), Scheduled(), Scheduled()
    fit(whole, tmp_path, [quick(adjust=True)], max_epochs=6, **STEERED)
    checkpoints = ModelCheckpoint(tmp_path, save_last=True)
    saved = {**STEERED, "enable_checkpointing": True}
    fit(first, tmp_path, [quick(adjust=True), checkpoints], max_epochs=3, **saved)
    path = tmp_path / "last.ckpt"
    fit(second, tmp_path, [quick(adjust=True)], max_epochs=6, ckpt_path=path, **STEERED)
    for p, q in zip(whole.net.parameters(), second.net.parameters(), strict=True):
        assert p.equal(q)


def test_steering_needs_one_optimizer(tmp_path):
    class Two(Plain):
        def configure_optimizers(self):
            return [torch.optim.SGD(self.net[i].parameters(), lr=0.1) for i in (0, 2)]

    module = Two()
    module.automatic_optimization = False
    told = r"needs one optimizer.*Two has 2, and manual optim.*lowers one loss.*keep the rates"
    with pytest.raises(ValueError, match=told):
        fit(module, tmp_path, [quick(adjust=True)])


# --- the budget -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_budget_makes_measurements_rarer_and_smaller(tmp_path):
    """By a clock that advances by 10 s a training batch and 0.02 s a batch of a measurement."""
    now = [0.0]

    class Slow(Plain):
        def training_step(self, batch):
            now[0] += 10
            return super().training_step(batch)

    def measured_loss(module, batch):
        now[0] += 0.02
        return F.cross_entropy(module.net(batch[0]), batch[1])

    seen = {}
    for share in (None, 0.5, 0.01):
        callback = quick(loss_fn=measured_loss, num_batches=3, budget=share)
        callback.budget.clock = lambda: now[0]
        fit(Slow(), tmp_path, [callback], max_epochs=12)
        samples = [m.summary.num_samples for m in callback.history.measured]
        seen[share] = (len(samples), samples[-1])
        assert share is None or callback.budget.spent <= share * callback.budget.training
    assert seen[None] == seen[0.5] == (13, 48)
    assert seen[0.01][0] < 8
    assert seen[0.01][1] == 32  # two batches, the fewest with an error


@pytest.mark.parametrize(
    ("first", "last", "then"),
    [
        (0, math.inf, "next measurement after epoch 8 or so"),
        (0, 7, "next measurement after epoch 7 or so"),  # at the end
        (0, 6, "the training is probably too short for another measurement"),
        (40, 60, "next measurement after epoch 48 or so"),  # resumed
    ],
)
def test_a_measurement_that_is_skipped_for_the_budget_is_told_once(first, last, then, capsys):
    """Two measurements of 1 s fit after 20 s of training: after 7 epochs, and 8 is asked for.

    What was spent in another training, or in a part that a trainer goes on from, does not count.
    """
    now = [0.0]
    monitor = Monitor(every_n_epochs=2, budget=0.1)
    monitor.budget.clock = lambda: now[0]
    with monitor.budget.measuring():
        now[0] += 50.0
    monitor.plan(Plain(), math.inf, last, first)
    assert monitor.is_due(first)
    with monitor.budget.measuring():
        now[0] += 1.0
    due = []
    for _ in range(8):
        now[0] += 3.0
        due.append(monitor.is_due(first + len(due) + 1))
    assert due == [False] * 7 + [True]
    told = capsys.readouterr().err
    assert told.count("newton_summary") == 1
    assert f"epoch {first + 2}: not measured, for the budget; {then}\n" in told


def test_a_resumed_training_has_as_many_batches_to_measure_on():
    """Training time of an epoch over that of a batch measured, not over all epochs so far."""
    now, monitor = [0.0], Monitor(num_batches=8, budget=0.1)
    monitor.budget.clock = lambda: now[0]
    used = []
    for first in (0, 40):
        monitor.plan(Plain(), math.inf, 100, first)
        monitor._samples, monitor._batches = UserList(range(8)), 0
        for epoch in range(first, first + 3):
            with monitor.budget.measuring():
                now[0] += len(monitor._data(epoch))
            now[0] += 50.0
        used.append(monitor._batches)
    assert used == [5, 5]


@pytest.mark.parametrize(
    ("limit", "batches", "last"),
    [
        ({"max_epochs": 2}, 6, 2),
        ({"max_epochs": -1, "max_steps": 6}, 6, 2),
        ({"max_epochs": 9, "max_steps": 6}, 6, 2),
        ({"max_epochs": 9, "max_steps": 5, "accumulate_grad_batches": 2}, 10, 2.5),
    ],
)
def test_the_last_epoch_is_known(limit, batches, last, tmp_path, monkeypatch):
    """Three batches an epoch."""
    known = []
    monkeypatch.setattr(SummaryCallback, "plan", lambda self, *given: known.append(given[1:]))
    fit(Plain(), tmp_path, [quick()], **limit)
    assert known == [(batches, last, 0)]


def test_measurements_and_steering_share_a_budget():
    callback, module = quick(adjust=True, budget=0.05), Plain()
    callback.steer(torch.optim.Adam(module.parameters()), module, training_loss)
    steering = 2 / callback.controller.period  # two gradients
    assert callback.budget.share + steering == pytest.approx(0.05)


def test_options_of_the_controller_are_passed_on():
    callback, module = quick(adjust={"set_point": 0.65}, budget=0.05), Plain()
    callback.steer(torch.optim.Adam(module.parameters()), module, training_loss)
    assert callback.controller.set_point == 0.65 and callback.controller.period == 80


@pytest.mark.parametrize("adjust", [True, {}])
def test_callbacks_steer_with_care(adjust):
    callback, module = quick(adjust=adjust), Plain()
    callback.steer(torch.optim.Adam(module.parameters()), module, training_loss)
    assert callback.controller.set_point == 1.0 and callback.controller.period == 10


@pytest.mark.parametrize("adjust", [1.0, "yes", None])
def test_something_else_than_options_is_refused(adjust):
    with pytest.raises(TypeError, match=r"adjust=.*: expected True or False, or options"):
        quick(adjust=adjust)


@pytest.mark.parametrize("share", [0, -1, 1, 5, True, "x"])
def test_a_wrong_budget_is_refused(share):
    with pytest.raises(ValueError, match=r"budget=.*such as 0\.05"):
        SummaryCallback(budget=share)


@pytest.mark.parametrize("make", [Monitor, SummaryCallback])
@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"every_n_epoch": 5}, r"has no argument 'every_n_epoch'\. Did you mean 'every_n_epochs'"),
        ({"microbatches": 5}, "has no argument 'microbatches'. Did you mean 'microbatch'"),
        ({"model": None}, "has no argument 'model'"),
        ({"adjust": {"setpoint": 1}}, "Did you mean 'set_point'.* Its options are period, set_"),
        ({"adjust": {"optimizer": 1}}, "RateController has no option 'optimizer'"),
        ({"partition": "layer"}, "Unknown partition 'layer'. Did you mean 'layers'"),
        ({"partition": "blocks"}, "needs a number: for example 'blocks-2'"),
    ],
)
def test_wrong_options_are_told_before_the_training(make, options, told):
    with pytest.raises((TypeError, ValueError), match=told):
        make(**options)


def test_the_callback_of_the_other_framework_is_told(tmp_path):
    from transformers import Trainer, TrainingArguments

    from newton_summary.integrations import transformers as other

    with pytest.raises(AttributeError, match=r"Use newton_summary\.integrations\.lightning\.Summ"):
        fit(Plain(), tmp_path, [other.SummaryCallback()])
    with pytest.raises(AttributeError, match=r"Use newton_summary\.integrations\.transformers\.S"):
        Trainer(Plain(), TrainingArguments(str(tmp_path)), callbacks=[quick()])
    assert not hasattr(quick(), "other") and copy.deepcopy(quick()).advice is None


def test_options_of_a_subclass_are_those_of_the_callback():
    class Short(SummaryCallback):
        def __init__(self):
            super().__init__(microbatch=2)

    assert Short().options == {"microbatch": 2}


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
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.9**3)


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
    logged = trainer.callback_metrics[f"newton_summary_groups/optimizer/{name}"]
    assert float(logged) == pytest.approx(float(optimizer.last_rates.eta[0]))


def test_of_a_single_group_it_is_the_rate_that_was_steered_to():
    """Not that of the last batch alone, which may be negative."""
    net = Plain().net

    def loss_fn(net, batch):
        return F.cross_entropy(net(batch[0]), batch[1])

    data = list(DataLoader(make_dataset(), 16))
    optimizer = ns.NewtonSummary(net, loss_fn)
    for batch in data:
        optimizer.zero_grad()
        loss_fn(net, batch).backward()
        optimizer.step(batch)
    monitor = Monitor(loss_fn=loss_fn, data=data, partition="trivial")
    monitor.measure(net, 1, optimizer=optimizer)
    used = monitor.history.measured[-1]
    assert used.kind == "optimizer" and used.epoch == 1 and used.status == "steered"
    assert used.eta.equal(optimizer.eta)


def test_what_was_not_measured_or_validated_anew_is_not_repeated(tmp_path):
    """A measurement without a refresh in between, and a validation after every second epoch."""

    class Validated(Plain):
        def validation_step(self, batch):
            self.log("validation", F.cross_entropy(self.net(batch[0]), batch[1]))

        def val_dataloader(self):
            return DataLoader(make_dataset(), 16)

    callback, module = quick(), Validated(newton)
    trainer = fit(module, tmp_path, [callback], max_epochs=4, check_val_every_n_epoch=2)
    before = [measured.kind for measured in callback.history.measured]
    callback.measure(module, 9, optimizer=trainer.optimizers[0])
    kinds = [measured.kind for measured in callback.history.measured]
    assert before.count("full") == 5 and "optimizer" in before and kinds == [*before, "full"]
    assert [epoch for epoch, _ in callback.history.curves["validation"]] == [2, 4]
    assert [epoch for epoch, _ in callback.history.curves["train_loss"]] == [1, 2, 3, 4]


def test_the_strength_is_found_at_each_measurement():
    """Along the gradient, as suggest_lambda_int finds it; never a step that failed its trial."""
    net, data = Plain().net, list(DataLoader(make_dataset(), 48))

    def loss_fn(net, batch):
        return (net(batch[0])[:, 0] - batch[0].sum(1).sin()).square().mean()

    monitor = Monitor(loss_fn=loss_fn, data=data)
    for epoch in range(2):
        measured = monitor.measure(net, epoch)
        found = ns.suggest_lambda_int(net, loss_fn, data, ns.summarize(net, loss_fn, data))
        assert measured.eta.equal(found.rates.eta)
        assert measured.trials[-1].real == found.best.real < 0
        with torch.no_grad():
            net[0].weight.mul_(3)
    kept = Monitor(loss_fn=loss_fn, data=data, lambda_int=2.0).measure(net, 0)
    assert kept.eta.equal(ns.learning_rates(kept.summary, 2.0).eta)


@pytest.mark.filterwarnings("ignore:Falling back from 'sweep'")  # scripted parts of the metrics
def test_curvature_from_training_step_leaves_no_trace(tmp_path):
    """A refresh evaluates training_step too: its notes and metrics are those of training alone."""
    module = Talkative()
    module.make_optimizer = newton
    fit(module, tmp_path, logger=CSVLogger(tmp_path))
    assert module.steps == len(module.losses) == 9
