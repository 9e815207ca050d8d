"""Every error and warning of the library that a user can meet, with what triggers it.

``ERRORS`` and ``WARNINGS`` map the module that speaks to pairs of what it says and a call that
makes it say so, given an ``interrupts.Problem``. ``test_messages.py`` runs them all, and finds
what is missing here by reading the source.
"""

from __future__ import annotations

import copy
import itertools
import math
import os
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.overrides import TorchFunctionMode

import interrupts
import newton_summary as ns
from newton_summary import History, Summary, analysis, data, figures
from newton_summary.derivatives.sweep.rules import RULES
from newton_summary.derivatives.sweep.tape import positions_in
from newton_summary.history import Measured
from newton_summary.partition import Partition
from newton_summary.summary import SummaryWindow

OURS = interrupts.loss_fn
NAN = math.nan
GROUPED = hasattr(torch, "_grouped_mm")
OTHER, LARGE, LSTM = nn.Linear(2, 2), nn.Linear(1_100, 1), nn.LSTM(3, 2)
ONE = Summary(torch.ones(1), torch.eye(1), torch.ones(1))
TWO = Summary(torch.ones(2), torch.eye(2), torch.ones(2))


# --- losses that cannot be measured ---------------------------------------------------------------


def weights(model):
    return model.a.weight


def squares(model, batch):
    return sum(q.square().sum() for q in model.parameters())


class Cube(torch.autograd.Function):
    """A function whose backward pass may not be differentiated."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        return grad * 3 * ctx.saved_tensors[0] ** 2


def cubed(model, batch):
    return Cube.apply(weights(model)).sum()


class Held(torch.autograd.Function):
    """A function whose backward pass is of a number that autograd does not know to vary."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(3 * x.detach() ** 2, x)
        return x**3

    @staticmethod
    def backward(ctx, grad):
        slope, x = ctx.saved_tensors
        return grad * slope + 0 * x


class Foreign(torch.Tensor):
    """A tensor with operations of its own."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


class Mode(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@torch.jit.script
def SCRIPT(x: torch.Tensor) -> torch.Tensor:
    return x.square().sum()


@torch.jit.script
def SCRIPTED_NORM(x: torch.Tensor) -> torch.Tensor:
    return torch.layer_norm(x, [3]).pow(3).sum()


@torch.library.custom_op("newton_summary_tests::cube", mutates_args=())
def cube(x: torch.Tensor) -> torch.Tensor:
    return x**3


cube.register_autograd(
    lambda ctx, grad: grad * 3 * ctx.saved_tensors[0] ** 2,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)


def no_second(model, batch):
    """An operation whose backward pass torch cannot differentiate."""
    return torch.ops.aten._pdist_forward(weights(model), 3.0).square().sum()


def changed_behind(model, batch):
    x = weights(model) * 2
    y = x * 3
    x.detach().add_(1)
    return (x * y).sum()


def changed_later(model, batch):
    x = weights(model) * 2
    y = x.relu()
    x.detach().add_(1)
    return y.square().sum()


def looked_at_only(model, batch):
    x = weights(model) * 2
    x.data.add_(1)
    return x.sum()


def replaced(model, batch):
    x = weights(model) * 2
    x.data = x.data + 1
    return x.square().sum()


def view_of_another_type(model, batch):
    x = torch.complex(weights(model), weights(model))
    view = torch.view_as_real(x)
    x.mul_(2)
    return view.square().sum()


def several_in_place(model, batch):
    x = [weights(model) * 2, model.b.weight * 1]
    torch._foreach_mul_(x, 2.0)
    return x[0].square().sum() + x[1].square().sum()


def inside_grad(model, batch):
    return torch.func.grad(lambda w: SCRIPT(w) * w.sum())(weights(model)).square().sum()


def unpooled(model, batch):
    places = torch.zeros(1, 1, 3, dtype=torch.long)
    return F.max_unpool1d(weights(model)[0].reshape(1, 1, 3), places, 2).square().sum()


def beyond(model, batch):
    return (weights(model) * 2)[1:].as_strided((2, 3), (3, 1), 0).square().sum()


def sparse_weights(model, batch):
    ones = torch.ones(3, 2, dtype=torch.float64)
    return torch.sparse.mm(weights(model).to_sparse(), ones).square().sum()


def grouped(model, batch):
    x = F.pad(weights(model), (0, 13, 0, 12)).bfloat16()
    offsets = torch.tensor([8, 16], dtype=torch.int32)
    return torch._grouped_mm(x, x.mT, offs=offsets).float().square().mean()


def native_norm(model, batch):
    x = weights(model).reshape(1, 4, 3)
    return torch.native_group_norm(x, None, None, 1, 4, 3, 2, 1e-5)[0].pow(3).sum()


def single_value(model, batch):
    x = weights(model)[:1]
    return torch.batch_norm(x, None, None, None, None, True, 0.1, 1e-5, False).sum()


def single_only(model, batch):
    if weights(model).dtype == torch.float64:
        raise RuntimeError("not implemented for 'Double'")
    return OURS(model, batch)


def hooked(model, batch):
    x = weights(model) * 2
    x.register_hook(lambda grad: 2 * grad)
    return x.square().sum()


class Counter:
    """A loss that depends on how often it was called."""

    def __init__(self):
        self.calls = 0

    def __call__(self, model, batch):
        self.calls += 1
        return OURS(model, batch) * self.calls


def coupled(model, batch):
    return (weights(model).sum() * batch[0].sum()).square()


def concave(model, batch):
    return -weights(model).square().sum()


# --- what is done with the problem ----------------------------------------------------------------


def of(loss, **how):
    """Measure the problem's model with another loss."""
    return lambda p: ns.summarize(p.model, loss, p.batch, **how)


def swept(loss):
    return of(loss, backend="sweep")


def nested(loss):
    return of(loss, backend="nested")


def under(context, trigger):
    def run(p):
        with context():
            trigger(p)

    return run


@contextmanager
def little_memory():
    before = os.sysconf
    os.sysconf = lambda name: {"SC_PAGE_SIZE": 4096}.get(name, 2**8)
    try:
        yield
    finally:
        os.sysconf = before


def many_groups(p):
    ns.summarize(LARGE, squares, p.batch, partition="discrete")


@contextmanager
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def divided_along_columns(p):
    model = nn.Linear(2, 2, bias=False, device="meta")
    mesh = init_device_mesh("cpu", (1,))
    columns = DTensor.from_local(torch.ones(2, 2), mesh, [Shard(1)], run_check=False)
    model.weight = nn.Parameter(columns)
    ns.summarize(model, squares, p.batch)


def apart(p):
    """A model of its own, for what may move."""
    return copy.deepcopy(p.model), p.batch


def sgd(model, lr=0.1):
    return torch.optim.SGD(model.parameters(), lr=lr)


def ascent(model):
    first, *others = model.parameters()
    return torch.optim.SGD([{"params": first}, {"params": others, "maximize": True}], lr=0.1)


def groups(spec):
    return lambda p: ns.make_partition(p.model, spec)


def from_file(p):
    return Partition.from_state_dict(p.groups.state_dict())


def partition_state(label=None, **change):
    def trigger(p):
        state = p.groups.state_dict()
        labels = state["labels"] if label is None else dict.fromkeys(state["labels"], label)
        Partition.from_state_dict({**state, "labels": labels, **change})

    return trigger


def writing(p):
    u = {name: torch.ones_like(q) for name, q in p.model.named_parameters()}
    swept_along = {"backend": "sweep", "direction": u}
    ns.summarize(p.model, lambda m, b: weights(m).data.add_(1).sum(), p.batch, **swept_along)


def broken_rule(p):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(RULES, "tanh", lambda sweep, op, x: [][0])
        p.measure(backend="sweep")


def restored(**change):
    return lambda p: Summary.from_state_dict({**p.summary.state_dict(), **change})


def measured(**change):
    def trigger(p):
        state = History.of(ONE).measured[0].state_dict()
        Measured.from_state_dict({**state, **change})

    return trigger


def two_partitions(p):
    history = History.of(ONE)
    history.add(1, TWO, ns.learning_rates(TWO))


def mixed_history(p):
    one, two = History.of(ONE), History.of(TWO)
    History.from_state_dict(
        {
            **one.state_dict(),
            "measured": [one.measured[0].state_dict(), two.measured[0].state_dict()],
        }
    )


def saved(what, read):
    def trigger(p):
        with TemporaryDirectory() as folder:
            path = Path(folder) / "file.pt"
            torch.save(what, path)
            read(path)

    return trigger


def freezing(name, requires_grad):
    """Measure after a parameter has been frozen, or thawed, since the partition was made."""

    def trigger(p):
        model, batch = apart(p)
        model.get_parameter(name).requires_grad_(not requires_grad)
        partition = ns.make_partition(model)
        model.get_parameter(name).requires_grad_(requires_grad)
        ns.summarize(model, OURS, batch, partition=partition)

    return trigger


def along(**change):
    """Measure along ones, but for some parameters."""

    def trigger(p):
        u = {name: torch.ones_like(q) for name, q in p.model.named_parameters()}
        u |= {name.replace("_", "."): value for name, value in change.items()}
        p.measure(direction={name: value for name, value in u.items() if value is not None})

    return trigger


def tried(**how):
    return lambda p: ns.step_trials(p.model, OURS, p.batch, p.summary, **how)


def applied_twice(p):
    model, batch = apart(p)
    advice = ns.suggest_lrs(model, OURS, batch, sgd(model))
    advice.apply()
    return advice.apply


def divided_advice(p):
    ns.suggest_lrs(p.model, OURS, p.batch, p.adam, partition="discrete").apply()


def advised(partition):
    """Apply advice for an optimizer that has a scheduler."""

    def trigger(p):
        model, batch = apart(p)
        optimizer = sgd(model)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0)
        advice = ns.suggest_lrs(model, OURS, batch, optimizer, partition=partition)
        return lambda scheduler=scheduler: advice.apply()

    return trigger


def advised_before(p):
    """Apply advice after the rate was changed by hand."""
    model, batch = apart(p)
    optimizer = sgd(model)
    advice = ns.suggest_lrs(model, OURS, batch, optimizer)
    optimizer.param_groups[0]["lr"] *= 2
    return advice.apply


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)
        self.b.weight = self.a.weight
        self.a.bias.requires_grad_(False)


TIED, COMPLEX = Tied(), nn.Linear(2, 2, dtype=torch.cfloat)
with torch.inference_mode():
    INFERRED = nn.Linear(3, 2)


def several(first, second, model=OTHER):
    """Measure on two batches of ones, of given shapes."""
    batches = [tuple(map(torch.ones, shapes)) for shapes in (first, second)]
    return lambda p: ns.summarize(model, squares, batches)


# --- optimizers -----------------------------------------------------------------------------------


def newton(**settings):
    return lambda p: ns.NewtonSummary(p.groups, OURS, **settings)


def paper(**settings):
    return lambda p: ns.NewtonSummary.paper(p.groups, **settings)


def controller(**settings):
    return lambda p: ns.RateController(sgd(p.model), p.model, OURS, **settings)


def controlled_twice(p):
    optimizer = sgd(p.model)
    first = ns.RateController(optimizer, p.model, OURS)
    ns.RateController(optimizer, p.model, OURS)
    del first


def controlled_lbfgs(p):
    return ns.RateController(torch.optim.LBFGS(p.model.parameters()), p.model, OURS)


def steered_once(p, lr=0.1):
    """A model, a batch and an optimizer with its controller, after one step."""
    model, batch = apart(p)
    optimizer = torch.optim.SGD(model.parameters(), lr)
    controller = ns.RateController(optimizer, model, OURS)
    OURS(model, batch).backward()
    controller.step(batch)
    return model, batch, optimizer, controller


def steps_twice(p):
    """A loop that calls the controller's step, and that of the optimizer as before."""
    _, _, optimizer, _ = steered_once(p)
    return optimizer.step


def steered_when_detached(p):
    _, batch, _, controller = steered_once(p)
    controller.detach()
    return lambda: controller.step(batch)


def steered_into_nan(p):
    """A loop in which the second step is made of a gradient that is not finite."""
    model, batch, _, controller = steered_once(p)
    for parameter in model.parameters():
        parameter.grad.fill_(math.nan)
    controller.step(batch)
    return lambda: controller.before_step(batch)


def steps_without_it(p):
    """A loop that makes a controller, and never calls it."""
    model, batch = apart(p)
    optimizer = sgd(model)
    controller = ns.RateController(optimizer, model, OURS)
    OURS(model, batch).backward()
    for _ in range(10):
        optimizer.step()
    assert not controller.history
    return optimizer.step


def steps_of_nothing(p):
    """A loop that starts from a rate of 0."""
    _, batch, _, controller = steered_once(p, lr=0.0)
    for _ in range(9):
        controller.step(batch)
    assert not controller.history
    return lambda: controller.step(batch)


def stepped(make, *, batch=True, grad=None, steps=1):
    """Take steps of an optimizer of a copy of the model."""

    def trigger(p):
        model, data = apart(p)
        optimizer = make(model, data)
        given = [data] if batch else []
        for step in range(steps):
            if step > 0:
                optimizer.step(*given)
            model.zero_grad()
            OURS(model, data).backward()
            if grad is not None:
                weights(model).grad = grad(weights(model).grad)
        return lambda: optimizer.step(*given)

    return trigger


def refreshing(loader, loss=OURS, **how):
    """The paper's algorithm, with a summary in each step."""
    given = {"summary_period": 1, "warmup": 0, **how}
    return lambda model, batch: ns.NewtonSummary.paper(
        ns.make_partition(model), curvature=(loss, loader(batch)), **given
    )


def lost_step(p):
    """A step with a gradient that is not finite, and a good one."""
    model, batch = apart(p)
    optimizer = refreshing(lambda b: [b])(model, batch)
    for factor in (NAN, 1.0):
        model.zero_grad()
        (OURS(model, batch) * factor).backward()
        if factor != 1.0:
            optimizer.step()
    return optimizer.step


class EmptyLater:
    """A loader that has a batch in the first epoch only."""

    def __init__(self, batch):
        self.batches = [batch]

    def __iter__(self):
        given, self.batches = self.batches, []
        return iter(given)


class Unsized:
    """A loader without batches that does not say so."""

    def __init__(self, batch):
        pass

    def __iter__(self):
        return iter(())


class Long:
    """More than a thousand batches, which do not say how many they are."""

    def __iter__(self):
        return itertools.repeat(torch.ones(1), 1001)


def closure_of(loss):
    def trigger(p):
        model, batch = apart(p)
        optimizer = ns.NewtonSummary.paper(ns.make_partition(model), warmup=0)
        OURS(model, batch).backward()
        return lambda: optimizer.step(lambda: loss(model, batch))

    return trigger


def calls_backward(model, batch):
    model.zero_grad()
    loss = OURS(model, batch)
    loss.backward()
    return loss


def added(tensor):
    def trigger(p):
        model, _ = apart(p)
        optimizer = ns.NewtonSummary(model, OURS)
        optimizer.add_param_group({"params": [tensor(model)], "name": "new"})

    return trigger


def root(model, batch):
    """A loss with a slope and no curvature that is finite."""
    x = weights(model)[0, 0]
    return (x - x.detach()).abs().pow(1.5)


def still(model, batch):
    return (weights(model) * 0).sum()


def rate_of_nan(model, batch):
    optimizer = ns.NewtonSummary(model, OURS)
    optimizer.param_groups[0]["lr"] = NAN
    return optimizer


def masked(model, batch):
    scores = weights(model)
    mask = torch.full_like(scores, torch.finfo(scores.dtype).min, requires_grad=False)
    return (torch.softmax(scores + mask, -1) * scores).sum()


def evaluating(model, batch):
    optimizer = ns.NewtonSummary(model, OURS)
    optimizer.eval()
    return optimizer


def loaded(change=lambda state: None, **settings):
    """Load a state of NewtonSummary after a change, or with other settings."""

    def trigger(p):
        model, batch = apart(p)
        OURS(model, batch).backward()
        optimizer = refreshing(lambda b: [b])(model, batch)
        optimizer.step()
        state = copy.deepcopy(optimizer.state_dict())
        change(state)
        how = {"curvature": (OURS, [batch]), "summary_period": 1, "warmup": 0, **settings}
        other = ns.NewtonSummary.paper(ns.make_partition(model), **how)
        return lambda: other.load_state_dict(state)

    return trigger


def ours(*path, **change):
    """Change what NewtonSummary has written into a state."""

    def make(state):
        place = state["newton_summary"]
        for name in path:
            place = place[name]
        place.update(change)

    return make


def buffer(value):
    return lambda state: state["state"][0].update(momentum_buffer=value)


def steered(**change):
    """Load a state of RateController after a change."""

    def trigger(p):
        model, batch = apart(p)
        trainer = ns.RateController(sgd(model), model, OURS)
        OURS(model, batch).backward()
        trainer.step(batch)
        return lambda: trainer.load_state_dict({**trainer.state_dict(), **change})

    return trigger


# --- the table ------------------------------------------------------------------------------------

ERRORS = {
    "__init__.py": [("has no attribute 'nothing'", lambda p: ns.nothing)],
    "analysis/coarsening.py": [
        ("expected a ratio of rates", lambda p: analysis.suggest_merges(TWO, spread=0.5)),
        ("'b' is empty", lambda p: analysis.coarsen(TWO, {"b": []})),
        ("expected a list of group names", lambda p: analysis.coarsen(TWO, {"b": "0"})),
        ("has no group '5'", lambda p: analysis.coarsen(TWO, {"b": ["5"]})),
        ("is listed twice", lambda p: analysis.coarsen(TWO, {"b": ["0"], "c": ["0"]})),
        ("already is a group '1'", lambda p: analysis.coarsen(TWO, {"1": ["0"]})),
        ("its groups are unknown", lambda p: analysis.suggest_merges(TWO).partition(p.model)),
    ],
    "analysis/interactions.py": [
        ("2 rows of values but 1 epochs", lambda p: analysis.smooth([[1.0], [2.0]], [0])),
        ("window=0", lambda p: analysis.smooth([[1.0]], [0], window=0)),
        ("do not reach the middle", lambda p: analysis.smooth([[1.0]], [0], window=5)),
        ("or Hbar as a tensor", lambda p: analysis.normalized(None)),
        (r"Hbar has shape \(2,\): expected \(S, S\)", lambda p: analysis.normalized(torch.ones(2))),
    ],
    "data/__init__.py": [
        ("Unknown split 'x'", lambda p: data.load_mnist_subset("x")),
        ("images are floating-point", lambda p: data.load_mnist_subset(dtype=torch.int64)),
    ],
    "derivatives/dense.py": [
        (
            "meant for tiny models",
            lambda p: ns.summarize(LARGE, squares, p.batch, backend="dense"),
        ),
    ],
    "derivatives/nested.py": [
        ("nested: .*not implemented", nested(no_second)),
        ("NativeLayerNorm are wrong", nested(lambda m, b: SCRIPTED_NORM(weights(m)))),
    ],
    "derivatives/norms.py": [
        ("more than 1 value per channel", nested(single_value)),
    ],
    "derivatives/opaque_functions.py": [
        (
            "CubeBackward cannot be differentiated",
            nested(cubed),
        ),
        ("% off differences of gradients", nested(lambda m, b: Held.apply(weights(m)).sum())),
    ],
    "derivatives/sweep/recorder.py": [
        ("cannot be recorded", swept(looked_at_only)),
        ("cannot be recorded", swept(replaced)),
        ("cannot be recorded", swept(changed_behind)),
        ("cannot be recorded", swept(view_of_another_type)),
        ("changes several tensors in place", swept(several_in_place)),
        ("changed parameter 'a.weight' in place", writing),
        (
            "class Foreign override torch's operations",
            swept(lambda m, b: weights(m).as_subclass(Foreign).square().sum()),
        ),
        ("Mode, which is active", under(Mode, swept(OURS))),
        ("made a tensor", swept(lambda m, b: SCRIPT(weights(m)))),
        ("made a tensor", swept(inside_grad)),
    ],
    "derivatives/sweep/rules/generic.py": [
        ("own derivatives of .* are wrong", swept(native_norm)),
        ("is a custom operator", swept(lambda m, b: cube(weights(m)).sum())),
        ("cannot be differentiated again", swept(no_second)),
    ],
    "derivatives/sweep/rules/linear.py": [
        (
            "an index of nested lists is ambiguous",
            swept(lambda m, b: weights(m)[[[0, 1], [1, 2]]].square().sum()),
        ),
        (
            "scale_grad_by_freq",
            swept(
                lambda m, b: F.embedding(b[1], weights(m), scale_grad_by_freq=True).square().sum()
            ),
        ),
    ],
    "derivatives/sweep/rules/products.py": [
        ("a sparse matrix depends", swept(sparse_weights)),
        *([("grouped_mm is supported for rows times matrices", swept(grouped))] if GROUPED else []),
    ],
    "derivatives/sweep/rules/selection.py": [
        ("two entries in one place", swept(unpooled)),
    ],
    "derivatives/sweep/tape.py": [
        ("cannot be recorded", swept(changed_later)),
        ("cannot be recorded", lambda p: positions_in(torch.ones(2), torch.ones(1).double())),
        ("reaches beyond", swept(beyond)),
        ("a way that its rule does not support", broken_rule),
    ],
    "figures/charts.py": [
        ("what='x': expected one of", lambda p: figures.heatmap(TWO, what="x")),
        ("block='x': expected one of", lambda p: figures.heatmap(p.summary, block="x")),
        ("has no measurements", lambda p: figures.rates(History())),
        ("no trials: see step_trials", lambda p: figures.predicted_change(History.of(ONE))),
        ("have no curves", lambda p: figures.curves(History())),
        (
            "No history has a curve 'x'",
            lambda p: figures.curves(History(curves={"y": [(0, 1.0)]}), ["x"]),
        ),
    ],
    "figures/drawing.py": [("scale='x'", lambda p: figures.heatmap(TWO, scale="x"))],
    "history.py": [
        ("has epoch -1", measured(epoch=-1)),
        ("has kind 'x'", measured(kind="x")),
        ("does not have 1 learning rates", measured(eta=torch.ones(2))),
        ("groups of another partition", two_partitions),
        ("Got 1 learning rates", lambda p: History().add(0, TWO, ns.learning_rates(ONE))),
        ("Groups differ", mixed_history),
    ],
    "display/names.py": [("no argument 'microbatches'", newton(microbatches=3))],
    "measuring/advice.py": [
        ("has been applied already", applied_twice),
        (
            "next step .* not finite .*: ask with a smaller lr",
            lambda p: ns.suggest_lrs(p.model, OURS, p.batch, sgd(p.model, lr=1e200)),
        ),
    ],
    "measuring/exact_loss.py": [],
    "measuring/lambda_int.py": [
        (
            "suggest_lambda_int needs D3",
            lambda p: ns.suggest_lambda_int(p.model, OURS, p.batch, p.measure(order=2)),
        ),
        (
            "no strengths to try",
            lambda p: ns.suggest_lambda_int(p.model, OURS, p.batch, p.summary, strengths=()),
        ),
    ],
    "measuring/measurement.py": [
        ("order 2 of 1,101 groups", under(little_memory, many_groups)),
        ("belongs to another model", of(OURS, partition=ns.make_partition(OTHER))),
        ("has been frozen", freezing("a.bias", False)),
        ("but is in no group of the partition", freezing("a.bias", True)),
    ],
    "measuring/param_groups.py": [
        ("not a trainable one of the model", lambda p: newton(direction=sgd(OTHER))(p)),
        ("has maximize=True", lambda p: ns.suggest_lrs(p.model, OURS, p.batch, ascent(p.model))),
        ("has maximize=True", lambda p: ns.RateController(ascent(p.model), p.model, OURS)),
        (
            "not a trainable one of the model",
            lambda p: ns.suggest_lrs(p.model, OURS, p.batch, sgd(OTHER)),
        ),
        ("have one learning rate per parameter", divided_advice),
    ],
    "measuring/trial_steps.py": [
        ("fractions contains nan", tried(fractions=[NAN])),
        (r"rates has shape \(1,\)", tried(rates=torch.ones(1))),
        ("has no partition: pass", lambda p: ns.step_trials(p.model, OURS, p.batch, TWO)),
        ("groups of the partition differ", tried(partition="layers")),
        (
            "The partition has 1 groups, but the summary has 2",
            lambda p: ns.step_trials(p.model, OURS, p.batch, TWO, partition="trivial"),
        ),
    ],
    "measuring/tried_rates.py": [
        ("pass all three", lambda p: ns.learning_rates(p.summary, model=p.model)),
        ("pass all three", lambda p: ns.learning_rates(p.summary, data=p.batch)),
    ],
    "measuring/verification.py": [
        ("from elsewhere", lambda p: ns.verify(p.model, lambda _, b: OURS(p.model, b), p.batch)),
        ("verify works on a copy", lambda p: ns.verify(p.model, OURS, p.batch, direction=p.adam)),
        ("verify works in float64", lambda p: ns.verify(p.model, single_only, p.batch)),
        ("cannot follow this loss", lambda p: ns.verify(p.model, cubed, p.batch)),
    ],
    "optimizer/checkpoint.py": [
        ("Not a state_dict of NewtonSummary", loaded(lambda s: s.pop("newton_summary"))),
        ("was saved by newton_summary 0.1.0", loaded(ours(format=1))),
        ("The checkpoint has the groups", loaded(ours(groups=["a"]))),
        ("saved with other settings", loaded(lambda_int=2.0)),
        ("was made without curvature", loaded(curvature=None)),
        ("The param_groups of the checkpoint have", loaded(lambda s: s["param_groups"].pop())),
        ("eta = .*: expected 6 finite numbers", loaded(ours(eta=torch.ones(2)))),
        ("expected whole numbers, 0 or more", loaded(ours("counts", refreshes=-1))),
        ("expected whole numbers, 0 or more", loaded(ours("data", index=-1))),
        ("damaged or incomplete", loaded(ours(counts=3))),
        ("non-finite entries", loaded(buffer(torch.full((4, 3), NAN)))),
        ("a number that is nan", steered(multiplier=NAN)),
        ("has shape", loaded(buffer(torch.ones(2)))),
    ],
    "optimizer/checks.py": [
        ("variant='x': expected one of", newton(variant="x")),
        ("expected a share of the time", newton(budget=2)),
        ("was read from a file", lambda p: ns.NewtonSummary(from_file(p), OURS)),
        ("direction=3: expected a torch", newton(direction=3)),
        ("does not hold all", lambda p: newton(direction=sgd(p.model.a))(p)),
        ("summary_period=0", newton(summary_period=0)),
        ("momentum=2", newton(momentum=2)),
        ("is only for the paper's algorithm", newton(eta_momentum=0.5)),
        ("Register it with the model first", added(lambda model: nn.Parameter(torch.ones(2)))),
        ("is already in the partition", added(lambda model: model.a.weight)),
    ],
    "optimizer/controller.py": [
        ("optimizer has type NoneType", lambda p: ns.RateController(None, p.model, OURS)),
        ("period=0", controller(period=0)),
        ("gain=-1", controller(gain=-1)),
        ("already has a RateController", controlled_twice),
        ("This controller is detached", steered_when_detached),
        ("LBFGS calls the loss several times", controlled_lbfgs),
        (
            "NewtonSummary finds its own rate: use it without",
            lambda p: ns.RateController(ns.NewtonSummary(p.model, OURS), p.model, OURS),
        ),
        ("Not a RateController state_dict", steered(other=1)),
        ("of a model with other parameters", steered(before=[torch.ones(2)])),
        ("an optimizer with 2 parameter groups", steered(first_lrs=[1.0, 1.0])),
        ("multiplier -1.0: expected a number above 0", steered(multiplier=-1.0)),
        ("lr=nan of", stepped(rate_of_nan)),
    ],
    "optimizer/curvature.py": [
        ("nothing to measure it on", stepped(lambda m, b: ns.NewtonSummary(m, OURS), batch=False)),
        ("curvature: expected a pair", newton(curvature=3)),
        ("not finite", stepped(refreshing(lambda b: [b], loss=root), batch=False)),
        (
            "curvature batch does not depend",
            stepped(refreshing(lambda b: [b], loss=still), batch=False),
        ),
        ("loader is empty: there is no batch", paper(curvature=(OURS, []))),
        ("no batch when it was restarted", stepped(refreshing(EmptyLater), batch=False, steps=2)),
        ("loader is empty: it yielded", stepped(refreshing(Unsized), batch=False)),
        (
            "because it is an iterator",
            stepped(refreshing(lambda b: iter([b])), batch=False, steps=2),
        ),
    ],
    "optimizer/newton_summary.py": [
        ("variant='x': use 'as-run' or 'as-published'", paper(variant="x")),
        ("loss_fn=0.5: expected a function", lambda p: ns.NewtonSummary(p.model, 0.5, lr=0.5)),
        (r"call train\(\) before step", stepped(evaluating)),
        ("as published has no warm-up", paper(variant="as-published", warmup=2)),
        (
            "direction is only for variant='steered' or 'careful'",
            lambda p: newton(variant="as-run", direction=sgd(p.model))(p),
        ),
        ("Set weight_decay in", lambda p: newton(direction=sgd(p.model), weight_decay=0.1)(p)),
    ],
    "optimizer/refreshes.py": [
        ("but counts 0", loaded(ours("average", count=0))),
    ],
    "optimizer/steered.py": [
        (
            "does not depend on the parameters that move",
            stepped(lambda m, b: ns.NewtonSummary(m, still)),
        ),
        ("gradient", stepped(lambda m, b: ns.NewtonSummary(m, OURS), grad=torch.Tensor.to_sparse)),
    ],
    "optimizer/update.py": [
        ("gradient", stepped(refreshing(lambda b: [b]), batch=False, grad=torch.Tensor.to_sparse)),
    ],
    "page/__init__.py": [
        ("list of runs is empty", lambda p: ns.report([], "page.html")),
        ("a run directory, not int", lambda p: ns.report(3, "page.html")),
        ("neither a measurement nor a curve", lambda p: ns.report(History(), "page.html")),
        ("summary has no Hbar", lambda p: ns.report(Summary(torch.ones(1)), "page.html")),
    ],
    "parallel/fsdp.py": [
        ("is sharded as", under(one_rank, divided_along_columns)),
    ],
    "parallel/ranks.py": [
        ("no process group is initialised", lambda p: p.measure(distributed=True)),
        (
            "does not belong to",
            under(one_rank, lambda p: p.measure(distributed=dist.GroupMember.NON_GROUP_MEMBER)),
        ),
    ],
    "partition/groups.py": [
        ("Two groups are called 'a'", partition_state(names=["a", "a"])),
        ("There is no group 'x'", lambda p: p.groups.index("x")),
        ("no values", lambda p: from_file(p).param_groups()),
        ("divided among groups", lambda p: ns.make_partition(p.model, "discrete").param_groups()),
        ("Not the groups of a partition", partition_state(names=[1, 2])),
        ("are not whole numbers", partition_state(label=0.5)),
        ("do not exist", partition_state(label=7)),
        ("is empty. Leave it out, or add", partition_state(label=0)),
    ],
    "partition/schemes.py": [
        ("Did you mean 'canonical'", groups("canonica")),
        ("needs a number: for example 'blocks-2'", groups("blocks")),
        ("at most 1 level deep. Use 'modules-1'.", groups("modules-7")),
        ("from 1 to 2, how many layers", groups("chunks-9")),
        ("no parameter that requires a gradient", lambda p: ns.make_partition(nn.ReLU())),
        ("lazy module", lambda p: ns.make_partition(nn.LazyLinear(2))),
        ("3 is not a partition: use a name", groups(3)),
        ("Group names must be strings", groups({1: ...})),
        ("expected a regular expression, a list", groups({"a": 3})),
        ("only one group can take the rest", groups({"a": ..., "b": ...})),
        ("nothing is left", groups({"a": ".", "b": ...})),
        ("not a valid regular expression", groups({"a": "("})),
        ("which is frozen", lambda p: ns.make_partition(TIED, {"x": "a.bias", "y": ...})),
        ("which is tied to", lambda p: ns.make_partition(TIED, {"x": "b.weight", "y": ...})),
        ("The names are", groups({"x": "zzz", "y": ...})),
        ("expected a list of parameter names", groups(["a.weight"])),
        ("listed twice, as two groups", groups([["a.weight"], ["a.weight"]])),
        (r"or a pair \(name, index\)", groups([[3]])),
        ("no parameter 'x'", groups([["x"]])),
        ("is in two groups", groups({"x": ["a.weight"], "y": ["a.weight"], "z": ...})),
        ("is in two groups", groups({"x": [("a.weight", 0)], "y": [("a.weight", 0)], "z": ...})),
        ("is in no group. Add it to one, freeze", groups([["a.weight"]])),
        ("Entry .* is in no group", groups({"x": [("a.weight", 0)], "y": ...})),
        ("not a valid index", groups({"x": [("a.weight", 99)], "y": ...})),
        ("selects no entry", groups({"x": [("a.weight", slice(0, 0))], "y": ...})),
    ],
    "probe/directions.py": [
        ("direction has type int", lambda p: p.measure(direction=3)),
        ("is not a trainable parameter", along(x=torch.ones(1))),
        ("The direction lacks parameter", along(a_weight=None)),
        ("has type list: expected a tensor", along(a_weight=[1])),
        (r"has shape \(1,\)", along(a_weight=torch.ones(1))),
        ("is torch.float32 on cpu", along(a_weight=torch.ones(4, 3))),
        ("non-finite entries", along(a_weight=torch.full((4, 3), NAN).double())),
        ("does not hold parameter", lambda p: p.measure(direction=sgd(OTHER))),
        (
            "its step needs a closure",
            lambda p: p.measure(direction=torch.optim.LBFGS(p.model.parameters())),
        ),
    ],
    "probe/inputs.py": [
        ("loss_fn has type list. Expected", lambda p: ns.NewtonSummary(p.model, [p.batch])),
        ("called backward", closure_of(calls_backward)),
        ("closure returned float", closure_of(lambda m, b: 1.0)),
        ("returned a detached loss", closure_of(lambda m, b: OURS(m, b).detach())),
        (
            "a set of samples",
            lambda p: ns.summarize(p.model, OURS, torch.utils.data.TensorDataset(*p.batch)),
        ),
        ("num_samples=0.5", lambda p: p.measure(num_samples=0.5)),
        (
            "is unknown",
            lambda p: ns.summarize(p.model, lambda m, b: weights(m).square().sum(), iter([3, 4])),
        ),
        ("may never end", lambda p: ns.summarize(OTHER, squares, itertools.repeat(torch.ones(1)))),
        ("the second", several([(4, 2, 3)], [(4, 5, 3)], LSTM)),
        ("do not agree on these", several([(4, 3), (2,)], [(8, 3), (3,)])),
    ],
    "probe/probe.py": [
        ("function of the whole batch", lambda p: p.measure(microbatch=2)),
        ("made under torch.inference_mode", lambda p: ns.summarize(INFERRED, OURS, p.batch)),
        ("is complex", lambda p: ns.summarize(COMPLEX, OURS, p.batch)),
    ],
    "solver.py": [
        ("learning_rates needs Hbar", lambda p: ns.learning_rates(Summary(torch.ones(2)))),
        (
            "The summary has no D3",
            lambda p: ns.learning_rates(Summary(torch.ones(1), torch.eye(1))),
        ),
        (
            "a vector with one entry per group",
            lambda p: ns.learning_rates(Summary(torch.ones(0), torch.ones(0, 0), torch.ones(0))),
        ),
    ],
    "summary.py": [
        ("joint_gain needs a Summary", lambda p: analysis.joint_gain(None)),
        ("gbar has shape", lambda p: Summary(torch.ones(2, 2))),
        ("The partition has 2 groups", lambda p: Summary(torch.ones(1), partition=p.groups)),
        ("no summaries to average", lambda p: Summary.mean([])),
        ("1 summaries but 2 weights", lambda p: Summary.mean([ONE], [1, 2])),
        (r"weights=\[-1.*: expected positive numbers", lambda p: Summary.mean([ONE], [-1])),
        (r"weights=\[nan\]: expected positive numbers", lambda p: Summary.mean([ONE], [NAN])),
        ("D3 is list", lambda p: Summary(torch.ones(1), None, [1.0])),
        ("This summary has no Hbar", lambda p: Summary(torch.ones(1)).hessian()),
        (
            "non-finite entries",
            lambda p: Summary(torch.ones(1), torch.full((1, 1), NAN)).inverse(),
        ),
        (
            "the row of group '0' is zero",
            lambda p: Summary(torch.ones(1), torch.zeros(1, 1)).inverse(),
        ),
        (
            "can move against each other",
            lambda p: Summary(torch.ones(2), torch.ones(2, 2)).inverse(),
        ),
        ("its groups have no roles", lambda p: TWO.block("weight", "bias")),
        ("Unknown role 'x'", lambda p: p.summary.block("x", "bias")),
        (r"The matrix has shape \(1, 1\)", lambda p: p.summary.block("bias", "bias", torch.eye(1))),
        ("order=3: expected 1 or 2", lambda p: TWO.predicted_change(torch.ones(2), order=3)),
        (r"eta has shape \(3,\)", lambda p: TWO.predicted_change(torch.ones(3))),
        ("The loss is not a number", restored(loss=torch.ones(2))),
        ("gbar_stderr has shape", restored(gbar_stderr=torch.ones(3))),
        ("num_samples is 'x'", restored(num_samples="x")),
        ("no groups, or a negative number of samples", restored(num_samples=-1)),
        (
            "is not a summary file .*: use one written by Summary.save",
            saved({"x": 1}, Summary.load),
        ),
        ("size=0: expected 1 or more", lambda p: SummaryWindow(0)),
        ("gbar is list", lambda p: Summary([1.0])),
        ("Hbar has shape", lambda p: Summary(torch.ones(2), torch.ones(1))),
        ("The groups differ", lambda p: Summary.mean([ONE, TWO])),
    ],
}

WARNINGS = {
    "derivatives/sweep/rules/linear.py": [("hides whole rows of scores", of(masked))],
    "derivatives/sweep/recorder.py": [
        (r"loss_fn calls \.item\(\)", swept(lambda m, b: OURS(m, b) * OURS(m, b).item())),
    ],
    "probe/inputs.py": [
        (
            "do not agree.*Using the length of the first",
            several([(4, 3), (4,), (2,)], [(8, 3), (8,), (3,)]),
        ),
    ],
    "probe/eager.py": [
        ("registers a hook on the gradient", nested(hooked)),
    ],
    "probe/probe.py": [
        ("The loss of the same batch was", nested(Counter())),
        (
            "read from data without a length",
            lambda p: ns.taylor_terms(OTHER, squares, Long(), order=1),
        ),
        ("not the mean over its parts of microbatch=2", of(coupled, microbatch=2)),
    ],
    "measuring/trial_steps.py": [
        (
            "when the summary was measured",
            lambda p: ns.step_trials(p.model, lambda m, b: 2 * OURS(m, b), p.batch, p.summary),
        ),
        (
            "Pass the direction that summarize was given",
            lambda p: ns.step_trials(p.model, OURS, p.batch, p.measure(direction=sgd(p.model))),
        ),
    ],
    "measuring/advice.py": [
        (r"were \[.*\] when the advice was given", advised_before),
    ],
    "measuring/param_groups.py": [
        ("will fail or ignore some", advised("canonical")),
        ("will undo this change", advised("trivial")),
    ],
    "measuring/measurement.py": [
        ("Standard errors need at least two batches", lambda p: p.measure(stderr=True)),
        ("Falling back from 'sweep' to 'nested'", of(lambda m, b: SCRIPT(weights(m)))),
        ("With backend='sweep', ", swept(root)),
        (
            "order=9 of 1 groups takes 9",
            lambda p: ns.taylor_terms(OTHER, squares, torch.ones(1), order=9),
        ),
    ],
    "optimizer/controller.py": [
        ("the model moves twice", steps_twice),
        ("the controller has seen no batch", steps_without_it),
        ("the optimizer has moved nothing", steps_of_nothing),
        ("are nan or infinite after the last step", steered_into_nan),
    ],
    "optimizer/newton_summary.py": [
        ("refresh of one group", lambda p: ns.NewtonSummary(p.model, OURS, cuda_graph=True)),
        (
            "a refresh yielded no usable rates",
            stepped(refreshing(lambda b: [b], loss=concave), batch=False),
        ),
        (
            "were skipped",
            lost_step,
        ),
    ],
}

# What has its test where there are several ranks, or is not seen by itself, and why.
ELSEWHERE = [
    *(
        (module, text, "test_mistakes_with_sharded_parameters")
        for module, text in [
            ("derivatives/sweep/sharded.py", "needs the same number of batches"),
            ("measuring/measurement.py", "only the sweep gathers"),
            ("measuring/measurement.py", "Use smaller batches"),
            ("parallel/fsdp.py", "over a mesh of shape"),
            ("parallel/processes.py", "takes whole models only"),
            ("parallel/ranks.py", "all ranks must take part"),
        ]
    ),
    ("parallel/fsdp.py", "offloaded parameters", "GPU"),
    (
        "parallel/ranks.py",
        "empty on all ranks",
        "test_what_fails_alike_on_all_ranks_is_told_as_it_is",
    ),
    *([] if GROUPED else [("derivatives/sweep/rules/products.py", "grouped_mm", "older torch")]),
    ("figures/drawing.py", "Figures need matplotlib", "where it is not installed"),
    ("page/document.py", "The report needs plotly", "where it is not installed"),
    ("optimizer/curvature.py", "STATUS['not-finite']", "step() catches it, and warns"),
    ("solver.py", "LinAlgError", "learning_rates() catches it"),
]

# Errors of files, commands, callbacks and GPUs: test_run_files.py, test_cli.py, test_inspect.py,
# test_integrations_*.py, test_cuda.py.
OUTSIDE = (
    "cli/",
    "experiments/",
    "inspection/",
    "integrations/",
    "run_directory.py",
    "storage/",
    "derivatives/sweep/cuda_graph.py",
)
