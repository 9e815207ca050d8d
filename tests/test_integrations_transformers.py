"""The Transformers callback in real trainings, and NewtonSummary given to the Trainer."""

import copy
import json
import os
from collections import UserList
from functools import partial

os.environ["HF_HUB_OFFLINE"] = "1"  # before the import: nothing is fetched

import pytest
import torch
import torch.nn.functional as F
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.utils.data import DataLoader, Dataset
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.modeling_outputs import SequenceClassifierOutput

import newton_summary as ns
from newton_summary.integrations.transformers import SummaryCallback, model_loss


class Text(Dataset):
    """Sequences in which every token follows from the one before."""

    def __init__(self):
        generator = torch.Generator().manual_seed(1)
        start = torch.randint(12, (24, 1), generator=generator)
        self.tokens = (start + 5 * torch.arange(6)) % 12

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, i):
        return {"input_ids": self.tokens[i], "labels": self.tokens[i]}


def make_gpt():
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=12, n_positions=6, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    return GPT2LMHeadModel(config)  # with dropout; in evaluation mode until it is trained


class Classifier(nn.Module):
    """A model of one's own, with a batch norm; smooth, in float64."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Linear(3, 4, bias=False), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)
        ).double()

    def forward(self, x, labels):
        z = self.net(x)
        return SequenceClassifierOutput(loss=F.cross_entropy(z, labels), logits=z)


class Points(Dataset):
    def __init__(self):
        self.x = torch.randn(24, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {"x": self.x[i], "labels": (self.x[i].sum() > 0).long()}


def fit(
    model,
    dataset,
    folder,
    callbacks=(),
    resume=None,
    optimizers=(None, None),
    trainer=Trainer,
    **options,
):
    options = {"num_train_epochs": 2, "save_strategy": "no", "report_to": "none", **options}
    arguments = TrainingArguments(
        str(folder),
        per_device_train_batch_size=8,
        logging_steps=1,
        learning_rate=1e-2,
        use_cpu=True,
        disable_tqdm=True,
        seed=4,
        **options,
    )
    trainer = trainer(
        model,
        arguments,
        train_dataset=dataset,
        eval_dataset=dataset,
        callbacks=list(callbacks),
        optimizers=optimizers,
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def quick(**options):
    return SummaryCallback(**{"report": None, "figures": False, **options})


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize(("make", "dataset"), [(make_gpt, Text()), (Classifier, Points())])
def test_training_is_the_same_to_the_bit(make, dataset, tmp_path):
    """With dropout in the one model and a batch norm in the other."""
    without, with_it = make(), make()
    expected = losses(fit(without, dataset, tmp_path, eval_strategy="epoch"))
    callback = quick(partition="weights-biases")
    actual = losses(fit(with_it, dataset, tmp_path, [callback], eval_strategy="epoch"))
    assert callback.history.epochs == [0, 1, 2]
    assert actual == expected and len(actual) == 6
    for name, value in without.state_dict().items():
        assert value.equal(with_it.state_dict()[name]), name


@pytest.mark.parametrize("limit", [{"num_train_epochs": 2}, {"max_steps": 6}])
def test_the_last_epoch_is_known(limit, tmp_path, monkeypatch):
    """Three batches an epoch."""
    known = []
    monkeypatch.setattr(SummaryCallback, "plan", lambda self, *given: known.append(given[1:]))
    fit(Classifier(), Points(), tmp_path, [quick()], **limit)
    assert known == [(6, 2, 0)]


class Searching(Trainer):
    """Checkpoints as those of a trial in hyperparameter_search."""

    def _get_output_dir(self, trial):
        return f"{self.args.output_dir}/run-0"


def test_checkpoints_elsewhere_are_left_alone(tmp_path):
    """Callbacks are not told where they are."""
    callback = quick(adjust=True)
    fit(Classifier(), Points(), tmp_path, [callback], trainer=Searching, save_strategy="epoch")
    assert len(list(tmp_path.glob("run-0/checkpoint-*"))) == 2
    assert len(callback.history.curves["train_loss"]) == 6


def test_numbers_are_those_of_training_mode(tmp_path):
    """Against the whole Hessian of a copy in training mode, although models start in the other.

    AdamW's first step is lr times the sign of the gradient, but for epsilon.
    """
    model = Classifier().eval()
    copied = copy.deepcopy(model).train()
    batch = {"x": Points().x, "labels": (Points().x.sum(1) > 0).long()}
    callback = quick(data=batch, partition="trivial", lambda_int=0.0)
    fit(model, Points(), tmp_path, [callback], num_train_epochs=1)
    params = {name: p.detach() for name, p in copied.named_parameters()}
    buffers = {name: b.clone() for name, b in copied.named_buffers()}

    def loss(params):
        state = params | {name: b.clone() for name, b in buffers.items()}
        return torch.func.functional_call(copied, state, (), batch).loss

    g = torch.func.grad(loss)(params)
    u = {name: 1e-2 * v / (v.abs() + 1e-8) for name, v in g.items()}
    Hu = torch.func.jvp(torch.func.grad(loss), (params,), (u,))[1]
    ug, uHu = (sum((u[n] * v[n]).sum() for n in g) for v in (g, Hu))
    measured = callback.history.measured[0]
    torch.testing.assert_close(measured.summary.gbar[0], ug)
    torch.testing.assert_close(measured.summary.Hbar[0, 0], uHu)
    torch.testing.assert_close(measured.eta[0], (ug / uHu).clamp(max=10))  # the largest suggested
    assert measured.summary.loss == pytest.approx(float(loss(params)))


def test_rates_and_curves_are_written(tmp_path):
    """To the Trainer's record, to TensorBoard, and to the report at the end."""
    callback = SummaryCallback(every_n_epochs=2, num_batches=1, partition="weights-biases")
    options = {"report_to": ["tensorboard"], "num_train_epochs": 3, "eval_strategy": "epoch"}
    trainer = fit(make_gpt(), Text(), tmp_path, [callback], **options)
    history = callback.history
    assert history.epochs == [0, 2, 3] and history.measured[0].summary.num_samples == 8
    events = EventAccumulator(str(tmp_path / "runs" / "newton_summary"))
    events.Reload()
    for s, name in enumerate(history.names):
        tag = f"newton_summary_groups/{name}"
        expected = [float(measured.eta[s]) for measured in history.measured]
        rows = [entry for entry in trainer.state.log_history if tag in entry]
        assert [row[tag] for row in rows] == expected
        assert [row["step"] for row in rows] == [0, 6, 9]
        assert [scalar.value for scalar in events.Scalars(tag)] == pytest.approx(expected)
    assert [image.step for image in events.Images("newton_summary/Hbar")] == [0, 6, 9]
    assert [value for _, value in history.curves["train_loss"]] == losses(trainer)
    evaluated = [e["eval_loss"] for e in trainer.state.log_history if "eval_loss" in e]
    assert history.curves["eval_loss"] == list(zip([1, 2, 3], evaluated))
    factors = {f"factor of lr, group{i}" for i in (0, 1)}  # with and without weight decay
    assert set(history.curves) == {"train_loss", "eval_loss", *factors}
    page = (tmp_path / "newton_summary.html").read_text(encoding="utf-8")
    assert all(name in page for name in history.names)


def test_history_goes_on_from_a_checkpoint(tmp_path):
    fit(make_gpt(), Text(), tmp_path, [quick(num_batches=1)], save_strategy="epoch")
    callback = quick(num_batches=1)
    options = {"save_strategy": "epoch", "num_train_epochs": 3}
    fit(make_gpt(), Text(), tmp_path, [callback], str(tmp_path / "checkpoint-6"), **options)
    assert callback.history.epochs == [0, 1, 2, 3]
    assert [epoch for epoch, _ in callback.history.curves["train_loss"]][-3:] == pytest.approx(
        [7 / 3, 8 / 3, 3]
    )
    saved = json.loads((tmp_path / "checkpoint-9" / "trainer_state.json").read_text())
    tag = f"newton_summary/suggested/{callback.history.names[0]}"
    rates = [row[tag] for row in saved["log_history"] if tag in row]
    assert rates == pytest.approx(callback.history.rates[:, 0].tolist())


def test_a_new_training_starts_afresh(tmp_path, capsys):
    """Of another model on other data, and by the same Trainer again; not from a checkpoint."""
    told = "a new training: the measurements of the one before are left out"
    used, fresh = quick(adjust=True), quick(adjust=True)
    fit(make_gpt(), Text(), tmp_path, [used], num_train_epochs=3)
    fit(Classifier(), Points(), tmp_path, [used], save_strategy="epoch")
    fit(Classifier(), Points(), tmp_path, [fresh])
    assert capsys.readouterr().err.count(told) == 1
    assert len(used.history.curves["measured loss"]) == 3
    assert used.history.curves == fresh.history.curves
    assert used.controller.history == fresh.controller.history
    checkpoint, options = str(tmp_path / "checkpoint-6"), {"num_train_epochs": 3}
    fit(Classifier(), Points(), tmp_path, [used], checkpoint, **options)
    epochs = [epoch for epoch, _ in used.history.curves["measured loss"]]
    assert epochs == [0, 1, 2, 3] and told not in capsys.readouterr().err
    trainer = fit(Classifier(), Points(), tmp_path, [callback := quick()], num_train_epochs=1)
    trainer.train()
    assert callback.history.epochs == [0, 1] and told in capsys.readouterr().err


def test_a_trainer_steers_again(tmp_path):
    """Its optimizer stays: for a second training, and to resume after an interrupt."""

    class Interrupt(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 5:
                raise KeyboardInterrupt

    callback = quick(adjust=True)
    trainer = fit(Classifier(), Points(), tmp_path, [callback], save_strategy="epoch")
    first = callback.controller
    trainer.add_callback(Interrupt)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.remove_callback(Interrupt)
    second = callback.controller
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert (first.steps, second.steps, callback.controller.steps) == (6, 5, 6)
    trainer.remove_callback(callback)
    trainer.train()
    assert callback.controller.steps == 6


def test_a_model_without_a_loss_is_told_at_the_start(tmp_path):
    class Silent(Classifier):
        def forward(self, x, labels):
            return {"logits": self.net(x)}

    with pytest.raises(
        ValueError, match=r"Silent returned no loss for a batch of x, labels.*loss_fn"
    ):
        fit(Silent(), Points(), tmp_path, [quick()])


def test_a_given_loss_is_taken(tmp_path):
    def loss_fn(model, batch):
        return 2 * model(**batch).loss

    given, default = quick(loss_fn=loss_fn), quick()
    for callback in (given, default):
        fit(Classifier(), Points(), tmp_path, [callback], num_train_epochs=1)
    once, twice = (c.history.measured[0].summary for c in (default, given))
    torch.testing.assert_close(twice.gbar, 2 * once.gbar)  # along Adam's step, which is the same
    torch.testing.assert_close(twice.Hbar, 2 * once.Hbar)


# --- steering -------------------------------------------------------------------------------------


def test_steering_equals_a_plain_loop_to_the_bit(tmp_path):
    """With accumulation, the Trainer's linear schedule, clipping, and an evaluation each epoch."""
    order = RecordedOrder(Points())
    options = {"gradient_accumulation_steps": 2, "num_train_epochs": 4, "max_grad_norm": 0.1}
    fit(Classifier(), order, tmp_path, **options)  # only to see the order of the samples
    model, callback = Classifier(), quick(adjust=True)
    adam = torch.optim.Adam(model.parameters(), lr=1e-6)
    trainer = fit(
        model,
        Points(),
        tmp_path,
        [callback],
        optimizers=(adam, None),
        eval_strategy="epoch",
        **options,
    )
    plain = Classifier()
    adam = torch.optim.Adam(plain.parameters(), lr=1e-6)
    controller = ns.RateController(adam, plain, model_loss, set_point=1.0)
    steps = trainer.state.max_steps
    batches = [
        torch.utils.data.default_collate([Points()[int(i)] for i in chosen])
        for chosen in torch.tensor(order.seen).split(8)
    ]
    for step, some in enumerate(
        x for e in range(4) for x in (batches[3 * e : 3 * e + 2], batches[3 * e + 2 : 3 * e + 3])
    ):
        adam.zero_grad()
        for batch in some:
            (plain(**batch).loss / len(some)).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        controller.step(UserList(some))
        for group in adam.param_groups:
            group["initial_lr"] = 1e-6  # what torch's schedulers note
            group["lr"] = 1e-6 * (steps - step - 1) / steps
    assert callback.controller.history == controller.history and len(controller.history) > 4
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q)
    tag = "newton_summary/steered_lr"
    logged = [entry[tag] for entry in trainer.state.log_history if tag in entry]
    assert logged == [record.rate * record.change for record in controller.history]


def smoothed(model, batch):
    logits = model(batch["input_ids"]).logits[:, :-1]
    return F.cross_entropy(
        logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), label_smoothing=0.1
    )


@pytest.mark.filterwarnings("ignore:The Trainer trains with label_smoothing_factor")
@pytest.mark.parametrize("loss_fn", [None, smoothed])
def test_steering_without_labels_is_explained(loss_fn, tmp_path):
    """Label smoothing takes them out of the batch: told before anything is measured."""
    for data in (None, [Text()[:4]]):
        callback = quick(adjust=True, loss_fn=loss_fn, data=data)
        with pytest.raises(ValueError, match="these lack labels: label smoothing"):
            fit(make_gpt(), Text(), tmp_path, [callback], label_smoothing_factor=0.1)
        assert not callback.history.curves


def test_a_smoothed_loss_that_needs_no_labels_is_steered(tmp_path):
    def loss_fn(model, batch):
        return smoothed(model, {**batch, "labels": batch["input_ids"]})

    callback = quick(adjust=True, loss_fn=loss_fn)
    fit(make_gpt(), Text(), tmp_path, [callback], label_smoothing_factor=0.1)
    assert callback.controller.history


def test_a_report_that_cannot_be_written_is_told_at_the_start(tmp_path):
    (tmp_path / "file").touch()
    callback = SummaryCallback(report=tmp_path / "file" / "page.html")
    with pytest.raises(ns.CannotWriteError, match=r"page\.html cannot be written: Not a directory"):
        fit(Classifier(), Points(), tmp_path, [callback])
    assert not callback.history.measured


def test_another_loss_than_that_of_the_training_is_told(tmp_path, recwarn):
    options = {"label_smoothing_factor": 0.1, "num_train_epochs": 1}
    fit(make_gpt(), Text(), tmp_path, [quick(loss_fn=smoothed)], **options)
    fit(make_gpt(), Text(), tmp_path, [quick()], num_train_epochs=1)
    told = "trains with label_smoothing_factor"
    assert not any(told in str(warned.message) for warned in recwarn)
    with pytest.warns(UserWarning, match=told):
        fit(make_gpt(), Text(), tmp_path, [quick()], **options)


class Weighted(Trainer):
    """Pops the labels, as many such trainers do."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        logits = model(**inputs).logits
        return F.cross_entropy(logits, labels, weight=logits.new_tensor([1.0, 5.0]))


class Kept(Trainer):
    """The same, of a model that has seen the labels."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        logits = model(**inputs).logits
        return F.cross_entropy(logits, inputs["labels"], weight=logits.new_tensor([1.0, 5.0]))


class Noting(Trainer):
    """Overrides compute_loss, but trains with the loss of the model."""

    def compute_loss(self, *args, **kwargs):
        return super().compute_loss(*args, **kwargs)


def by_function(output, labels, num_items_in_batch=None):
    return F.cross_entropy(output.logits, labels)


class Unlabelled(Classifier):
    """Takes batches without labels, and then returns no loss."""

    def forward(self, x, labels=None):
        z = self.net(x)
        loss = None if labels is None else F.cross_entropy(z, labels)
        return SequenceClassifierOutput(loss=loss, logits=z)


@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize(
    ("trainer", "options", "told"),
    [
        (Weighted, {}, True),
        (Kept, {}, True),
        (Kept, {"adjust": True}, True),
        (partial(Trainer, compute_loss_func=by_function), {}, True),
        (Noting, {}, False),
        (Trainer, {}, False),
        (Weighted, {"loss_fn": lambda model, batch: model(**batch).loss}, False),
    ],
)
def test_a_loss_computed_by_the_trainer_is_told_once(
    trainer, options, told, accumulated, tmp_path, recwarn
):
    fit(
        Unlabelled(),
        Points(),
        tmp_path,
        [quick(**options)],
        trainer=trainer,
        gradient_accumulation_steps=accumulated,
    )
    said = [str(w.message) for w in recwarn if "compute_loss of its own" in str(w.message)]
    assert len(said) == told


def test_each_training_of_a_callback_is_told_of_its_loss(tmp_path, recwarn):
    """Also after one that was interrupted in its first step."""

    class Interrupted(Trainer):
        def training_step(self, model, *args, **kwargs):
            super().training_step(model, *args, **kwargs)
            raise KeyboardInterrupt

    callback, model = quick(), Classifier()
    with pytest.raises(KeyboardInterrupt):
        fit(model, Points(), tmp_path, [callback], trainer=Interrupted)
    fit(model, Points(), tmp_path, [callback])
    assert not model._forward_hooks
    assert not any("compute_loss of its own" in str(w.message) for w in recwarn)
    with pytest.warns(UserWarning, match="compute_loss of its own"):
        fit(Unlabelled(), Points(), tmp_path, [callback], trainer=Weighted)


def test_the_rate_at_the_end_of_a_schedule_is_said_to_be_its_first(tmp_path, capsys):
    """The Trainer's linear schedule ends at 0, where nothing can be seen."""
    fit(Classifier(), Points(), tmp_path, [quick(every_n_epochs=1)], num_train_epochs=2)
    *earlier, last = [line for line in capsys.readouterr().err.splitlines() if ": epoch" in line]
    said = "(the schedule is at 0: measured at its first rate)"
    assert len(earlier) == 2 and said in last and not any(said in line for line in earlier)


def test_the_console_tells_the_steered_rate_from_the_start(tmp_path, capsys):
    fit(Classifier(), Points(), tmp_path, [quick(adjust=True)], num_train_epochs=1)
    lines = [line for line in capsys.readouterr().err.splitlines() if ": epoch" in line]
    assert len(lines) == 2 and "; steered: lr 0.01" in lines[0]
    assert "; steered: the schedule is at 0" in lines[1]


def test_steering_resumes_to_the_bit(tmp_path):
    whole, resumed = Classifier(), Classifier()
    options = {"save_strategy": "epoch", "num_train_epochs": 4}
    fit(whole, Points(), tmp_path, [quick(adjust=True)], **options)
    checkpoint = str(tmp_path / "checkpoint-6")
    fit(resumed, Points(), tmp_path, [quick(adjust=True)], checkpoint, **options)
    for name, value in whole.state_dict().items():
        assert value.equal(resumed.state_dict()[name]), name


@pytest.mark.parametrize(("adjust", "told"), [(False, "history of"), (True, "history and the con")])
def test_a_checkpoint_that_is_elsewhere_is_told(adjust, told, tmp_path, recwarn):
    """The Trainer restores model and optimizer from there, but callbacks do not see the path."""
    options = {"save_strategy": "epoch", "num_train_epochs": 3}
    fit(Classifier(), Points(), tmp_path / "old", [quick(adjust=adjust)], **options)
    there, here = (str(tmp_path / name / "checkpoint-6") for name in ("old", "new"))
    fit(Classifier(), Points(), tmp_path / "old", [quick(adjust=adjust)], there, **options)
    assert not any("There is no" in str(warned.message) for warned in recwarn)
    callback = quick(adjust=adjust)
    with pytest.warns(UserWarning, match=rf"no {here}.*pt, so .* without the {told}.*output_dir"):
        fit(Classifier(), Points(), tmp_path / "new", [callback], there, **options)
    assert callback._epochs == [2, 3]


# --- NewtonSummary given to the Trainer -----------------------------------------------------------


def newton(model, **options):
    loader = DataLoader(Points(), 12, shuffle=True)
    part = ns.make_partition(model, "weights-biases")
    return ns.NewtonSummary(part, summary_period=3, curvature=(model_loss, loader), **options)


def test_newton_summary_trains_as_in_a_plain_loop(tmp_path):
    """To the bit, with the Trainer's linear schedule; gradients are clipped at a large norm."""
    model = Classifier()
    optimizers = (newton(model), None)
    trainer = fit(model, Points(), tmp_path, optimizers=optimizers, max_grad_norm=1e6)
    order = RecordedOrder(Points())
    fit(Classifier(), order, tmp_path)  # only to see in which order the samples come
    plain = Classifier()
    optimizer = newton(plain)
    for step, chosen in enumerate(torch.tensor(order.seen).split(8)):
        batch = torch.utils.data.default_collate([Points()[int(i)] for i in chosen])
        optimizer.zero_grad()
        plain(**batch).loss.backward()
        optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] = (5 - step) / 6
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert p.equal(q)
    assert losses(trainer)[-1] < losses(trainer)[0]


class RecordedOrder(Dataset):
    def __init__(self, dataset):
        self.dataset, self.seen = dataset, []

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, i):
        self.seen.append(i)
        return self.dataset[i]


def test_newton_summary_resumes_to_the_bit(tmp_path):
    whole, resumed = Classifier(), Classifier()
    callback = quick(partition="weights-biases", lambda_int=0.0)
    options = {"save_strategy": "epoch", "num_train_epochs": 4}
    fit(whole, Points(), tmp_path, [callback], optimizers=(newton(whole), None), **options)
    kinds = [measured.kind for measured in callback.history.measured]
    assert kinds == ["full", *["full", "optimizer"] * 4]
    checkpoint = str(tmp_path / "checkpoint-6")
    fit(resumed, Points(), tmp_path, [], checkpoint, (newton(resumed), None), **options)
    for name, value in whole.state_dict().items():
        assert value.equal(resumed.state_dict()[name]), name
