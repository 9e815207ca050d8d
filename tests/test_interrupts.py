"""An exception at any line, as Ctrl-C is one, leaves everything as it was."""

from __future__ import annotations

import random
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from newton_summary import derivative_tensor, make_partition, step_trials, suggest_lrs, summarize
from newton_summary.probe.undo import Journal, is_measuring

TRIES = 25  # of each kind; thousands were tried once


class Interrupt(BaseException):
    """Like KeyboardInterrupt, which would stop the tests."""


class InterruptAt:
    """A trace function that raises at the n-th line, call or return."""

    def __init__(self, n: int):
        self.n, self.count = n, 0

    def __call__(self, frame, event, arg):
        self.count += 1
        if self.count == self.n:
            sys.settrace(None)
            raise Interrupt
        return self


def count_and_interrupt(function, n: int) -> int:
    """Run a function, raise at the n-th event, and return how many there were."""
    interrupt, before = InterruptAt(n), sys.gettrace()
    try:
        sys.settrace(interrupt)
        function()
    except Interrupt:
        pass
    except RuntimeError as error:
        if "mode stack" not in str(error):  # a mode of torch that was stopped half-way
            raise
    finally:
        sys.settrace(before)
    return interrupt.count


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)
        self.dropout = nn.Dropout(0.3)
        self.calls, self.seen, self.log = 0, None, []

    def forward(self, x):
        self.calls += 1
        self.seen = x
        self.log.append(x)
        return self.b(self.dropout(torch.tanh(self.norm(self.a(x)))))


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


@pytest.fixture
def problem():
    torch.manual_seed(0)
    model = Net().double()
    batch = (torch.randn(6, 3, dtype=torch.float64), torch.randint(3, (6,)))
    model.a.weight.register_hook(lambda grad: grad)
    model.b.register_full_backward_hook(lambda *args: None)
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    loss_fn(model, batch).backward()
    optimizer.step()
    return model, batch, optimizer


def everything(model, optimizer):
    """Return all that an interrupted measurement could have changed."""
    params = [
        (p.detach().clone(), p.grad.clone(), p.requires_grad, p._version, p._backward_hooks)
        for p in model.parameters()
    ]
    buffers = [(id(b), b.clone()) for b in model.buffers()]
    modules = [
        (m.training, dict(m._backward_hooks), dict(m._forward_hooks)) for m in model.modules()
    ]
    plain = (model.calls, id(model.seen), list(map(id, model.log)))
    numbers = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist())
    settings = (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), is_measuring())
    states = [{k: v.clone() for k, v in s.items()} for s in optimizer.state.values()]
    optimizer_names = sorted(vars(optimizer))
    return params, buffers, modules, plain, numbers, settings, states, optimizer_names


def assert_equal(a, b):
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    elif isinstance(a, tuple | list):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_equal(x, y)
    elif isinstance(a, dict):
        assert_equal(list(a.items()), list(b.items()))
    else:
        assert a == b


@pytest.mark.parametrize(
    "kind", ["sweep", "nested", "differences", "optimizer", "trials", "advice", "tensor"]
)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_anywhere_leaves_everything_as_it_was(problem, kind):
    model, batch, optimizer = problem
    groups = make_partition(model, "weights-biases")
    summary = summarize(model, loss_fn, batch, partition=groups)
    how = {"partition": groups, "order": 2}
    run = {
        "sweep": lambda: summarize(model, loss_fn, batch, backend="sweep", partition=groups),
        "nested": lambda: summarize(model, loss_fn, batch, backend="nested", **how),
        "differences": lambda: summarize(model, loss_fn, batch, backend="differences", **how),
        "optimizer": lambda: summarize(model, loss_fn, batch, direction=optimizer, **how),
        "trials": lambda: step_trials(model, loss_fn, batch, summary),
        "advice": lambda: suggest_lrs(model, loss_fn, [batch, batch], optimizer),
        "tensor": lambda: derivative_tensor(model, loss_fn, batch, **how),
    }[kind]
    before = everything(model, optimizer)
    total = count_and_interrupt(run, 0)
    numbers = random.Random(0)
    for _ in range(TRIES):
        count_and_interrupt(run, numbers.randint(1, total))
        assert_equal(everything(model, optimizer), before)
    again = summarize(model, loss_fn, batch, partition=groups)
    assert again.backend == "sweep"
    assert torch.equal(again.Hbar, summary.Hbar)


def test_what_an_interrupted_journal_leaves_is_undone_by_the_one_around_it():
    undone = []

    class Interrupted(Journal):
        def __exit__(self, *error):
            raise Interrupt

    def work():
        with Journal() as outer:
            outer.undo_later(lambda: undone.append("outer"))
            with Interrupted() as inner:
                inner.undo_later(lambda: undone.append("inner, first"))
                inner.undo_later(lambda: undone.append("inner, second"))

    with pytest.raises(Interrupt):
        work()
    assert undone == ["inner, second", "inner, first", "outer"]


@pytest.mark.parametrize("error", [Interrupt, ArithmeticError])
def test_a_step_that_is_interrupted_is_taken_again_and_one_that_fails_is_passed_over(error):
    steps = []

    def fail():
        steps.append("failing")
        if error is ArithmeticError or len(steps) == 1:
            raise error

    def work():
        with Journal(), Journal() as journal:
            journal.undo_later(lambda: steps.append("last"))
            journal.undo_later(fail)

    with pytest.raises(error):
        work()
    assert steps == ["failing", "failing", "last"]
