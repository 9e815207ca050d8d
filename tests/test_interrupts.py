"""An exception at any line, as Ctrl-C is one, leaves everything as it was."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import interrupts
import newton_summary as ns
from interrupts import Interrupt
from newton_summary.probe.state import Journal, RandomState

TRIES = 20  # of each kind; ``python tests/interrupts.py`` tries as many as it is asked to


@pytest.mark.parametrize("kind", interrupts.KINDS)
@pytest.mark.filterwarnings("ignore")
def test_an_interrupt_anywhere_leaves_everything_as_it_was(kind):
    assert interrupts.campaign(kind, "trace", TRIES, check_every=TRIES) == []


@pytest.mark.filterwarnings("ignore")
def test_a_campaign_finds_what_is_left_behind(monkeypatch):
    monkeypatch.setattr(RandomState, "restore", lambda self, state, anew=False: None)
    assert "random numbers" in interrupts.campaign("nested", "trace", 5)[0]


def test_a_step_that_fails_leaves_the_learning_rate_of_its_optimizer():
    model = nn.Linear(2, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    controller = ns.RateController(sgd, model, lambda model, x: model(x).square().mean())
    controller.multiplier = 3.0

    def fail(*args):
        raise ArithmeticError

    handle = sgd.register_step_pre_hook(fail)  # after the controller's
    for step in (lambda: controller.step(torch.ones(4, 2)), sgd.step, sgd.step):
        with pytest.raises(ArithmeticError):
            step()
    handle.remove()
    controller.step(torch.ones(4, 2))
    assert sgd.param_groups[0]["lr"] == 0.1


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


def test_a_journal_that_another_thread_ends_is_undone():
    undone = []
    journal = Journal()
    with ThreadPoolExecutor(1) as other:
        other.submit(journal.__enter__).result()
    journal.undo_later(lambda: undone.append("step"))
    journal.__exit__()
    assert undone == ["step"]


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
