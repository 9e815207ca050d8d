"""Measurements in several threads, and inside of each other, give what they give alone."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from newton_summary import NewtonSummary, make_partition, suggest_lrs, summarize
from newton_summary.probe import eager
from problems import PROBLEMS


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def make(seed: int) -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(seed)
    layers = nn.Linear(5, 6), nn.LayerNorm(6), nn.Tanh(), nn.Dropout(0.5), nn.Linear(6, 3)
    batch = torch.randn(8, 5, dtype=torch.float64), torch.randint(3, (8,))
    return nn.Sequential(*layers).double(), batch


def in_threads(*functions):
    """Run functions at once, and raise what they raise."""
    errors = []

    def run(function):
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
        assert not thread.is_alive(), "a thread hangs"
    if errors:
        raise errors[0]


def measure_at_once(backends, same_model, times):
    """With dropout: both draw from torch's generator. On one model they would undo each other."""
    problems = [make(0), make(0 if same_model else 1)]
    if same_model:
        problems[1] = problems[0]
    torch.manual_seed(0)
    alone = [summarize(m, loss_fn, b, backend=n) for (m, b), n in zip(problems, backends)]
    equal = []

    def measure(i: int):
        model, batch = problems[i]
        for _ in range(times):
            summary = summarize(model, loss_fn, batch, backend=backends[i])
            equal.append(torch.equal(summary.Hbar, alone[i].Hbar))

    in_threads(lambda: measure(0), lambda: measure(1))
    assert all(equal) and len(equal) == 2 * times


@pytest.mark.parametrize(("backends", "times"), [(("sweep",) * 2, 50), (("sweep", "nested"), 5)])
@pytest.mark.parametrize("same_model", [False, True])
def test_two_threads_give_what_one_gives(backends, times, same_model):
    measure_at_once(backends, same_model, times)


def test_hooks_of_other_threads_are_registered_and_fire():
    (model, batch), fired, done = make(0), [], threading.Event()

    def measure():
        for _ in range(20):
            summarize(model, loss_fn, batch)
        done.set()

    def train():
        count = 0
        while not done.is_set() or count == 0:
            count += 1
            x = torch.ones(2, requires_grad=True)
            x.register_hook(lambda grad: fired.append("tensor"))
            x.register_post_accumulate_grad_hook(lambda x: fired.append("accumulated"))
            (2 * x).sum().backward()
            assert len(fired) == 2 * count

    in_threads(measure, train)


def test_hooks_that_another_thread_registers_on_the_measured_model_stay():
    """Those of the loss do not, and those that were there rest meanwhile."""
    (model, batch), fired, handles = make(0), [], []
    layer = model[0]

    def register():
        return [
            layer.register_forward_pre_hook(lambda *_: fired.append("before")),
            layer.register_forward_hook(lambda *_: fired.append("after")),
            layer.register_full_backward_hook(lambda *_: fired.append("backward")),
            layer.weight.register_hook(lambda grad: fired.append("gradient")),
        ]

    def loss(model, batch):
        value = loss_fn(model, batch)
        register()[-1].remove()
        in_threads(lambda: handles.extend(register()))
        return value

    def fire():
        fired.clear()
        loss_fn(model, batch).backward()
        return sorted(fired)

    register()
    once = fire()
    with pytest.warns(UserWarning, match="hooks are disabled"):
        summarize(model, loss, batch)
    assert len(once) == 4 and len(handles) == 4
    assert fire() == sorted(2 * once)
    for handle in handles:
        handle.remove()
    assert fire() == once


@pytest.mark.parametrize("alive", [False, True])
def test_turns_of_threads(alive):
    """One that ended in its turn is passed over, and one that has it is waited for."""
    done = threading.Event()
    owner = threading.Thread(target=done.wait if alive else lambda: None)
    owner.start()
    if not alive:
        owner.join()
    eager._turns["turn"] = owner.ident
    (model, batch), measured = make(0), threading.Event()
    expected = None

    def measure():
        nonlocal expected
        expected = summarize(model, loss_fn, batch)
        measured.set()

    waiting = threading.Thread(target=measure)
    waiting.start()
    assert measured.wait(0.3 if alive else 60) != alive
    eager._turns.pop("turn", None)
    done.set()
    waiting.join(60)
    assert expected is not None and eager._turns == {}


def test_measuring_changes_no_setting_of_torch_for_other_threads():
    """Flags of attention kernels and of torch.compile hold for all threads."""
    problem, seen = PROBLEMS["mlp_cross_entropy"](), []

    def settings():
        flags = torch.backends.cuda
        kernels = (flags.flash_sdp_enabled(), flags.math_sdp_enabled(), flags.cudnn_sdp_enabled())
        import torch._dynamo.eval_frame as dynamo

        return (*kernels, flags.mem_efficient_sdp_enabled(), dynamo._stance.stance)

    def loss(model, batch):
        in_threads(lambda: seen.append(settings()))
        return problem.loss_fn(model, batch)

    for backend in ("sweep", "nested", "differences"):
        summarize(problem.model, loss, problem.batch, backend=backend, order=2)
    assert set(seen) == {settings()}


@pytest.mark.parametrize("outer", ["sweep", "nested", "differences"])
@pytest.mark.parametrize("same_model", [False, True])
def test_a_measurement_inside_a_loss(outer, same_model):
    """It is a number to the loss around it, and leaves no trace there."""
    problem, other = PROBLEMS["layer_norm"](), PROBLEMS["mlp_cross_entropy"]()
    other = problem if same_model else other
    alone = summarize(problem.model, problem.loss_fn, problem.batch, backend=outer)
    inside = summarize(other.model, other.loss_fn, other.batch)
    seen = []

    def loss(model, batch):
        before = problem.loss_fn(model, batch)
        seen.append(summarize(other.model, other.loss_fn, other.batch))
        return (before + problem.loss_fn(model, batch)) / 2

    actual = summarize(problem.model, loss, problem.batch, backend=outer)
    torch.testing.assert_close(actual.Hbar, alone.Hbar, rtol=1e-9, atol=1e-9)
    for summary in seen:
        assert summary.backend == "sweep"
    torch.testing.assert_close(seen[0].Hbar, inside.Hbar)


def test_an_optimizer_that_measures_is_no_direction():
    model, batch = make(0)
    groups = make_partition(model)
    optimizer = NewtonSummary(groups, curvature=(loss_fn, [batch]))
    before = [p.detach().clone() for p in model.parameters()]
    for call in (
        lambda: summarize(model, loss_fn, batch, direction=optimizer),
        lambda: suggest_lrs(model, loss_fn, [batch, batch], optimizer),
    ):
        with pytest.raises(ValueError, match=r"NewtonSummary (cannot give|finds)"):
            call()
    for p, value in zip(model.parameters(), before, strict=True):
        assert torch.equal(p, value)
