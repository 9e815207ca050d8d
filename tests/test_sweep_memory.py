"""Whatever the limit of the stack, the numbers are the same, and coupled samples stay together."""

import os

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import newton_summary as ns
from newton_summary.derivatives.sweep import memory
from newton_summary.derivatives.sweep.memory import default_limit, group_chunks


def make_net(*extra):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3), *extra, nn.Tanh(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(27, 4)
    ).double()


def make_batch(n=24):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, 1, 8, 8, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 4, (n,), generator=generator)


class Counted:
    """A loss that remembers how large its batches were."""

    def __init__(self, coupling=0.0):
        self.coupling = coupling
        self.sizes = []

    def __call__(self, model, batch):
        self.sizes.append(len(batch[0]))
        logits = model(batch[0])
        return F.cross_entropy(logits, batch[1]) + self.coupling * logits.mean(0).square().sum()


def assert_same(actual, expected):
    for name in ("loss", "gbar", "Hbar", "D3"):
        a, e = getattr(actual, name), getattr(expected, name)
        torch.testing.assert_close(a, e, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("limit", [2**40, 2**17, 2**14, 2**10, 1])
def test_parts_of_a_batch_add_up(limit):
    net, loss_fn = make_net(), Counted()
    expected = ns.summarize(net, Counted(), make_batch(), backend="nested")
    for _ in range(2):
        assert_same(ns.summarize(net, loss_fn, make_batch(), stack_limit=limit), expected)
    assert (min(loss_fn.sizes) < 24) == (limit < 2**17 + 1)


@pytest.mark.parametrize("limit", [2**16, 2**12])
@pytest.mark.parametrize("extra", [nn.BatchNorm2d(3), nn.Dropout(0.5)], ids=["norm", "dropout"])
def test_coupled_or_random_samples_stay_together(extra, limit):
    net = make_net(extra)
    expected = ns.summarize(net, Counted(), make_batch(), backend="nested")
    for _ in range(2):
        assert_same(ns.summarize(net, Counted(), make_batch(), stack_limit=limit), expected)


@pytest.mark.parametrize("coupling", [1.0, 1e-4, 1e-9])
def test_a_loss_that_couples_samples_is_not_split(coupling):
    """A little coupling too: it is held against rounding, not against the loss."""
    net, loss_fn = make_net(), Counted(coupling)
    expected = ns.summarize(net, Counted(coupling), make_batch(), backend="nested")
    assert_same(ns.summarize(net, loss_fn, make_batch(), stack_limit=2**14), expected)


def test_what_is_known_of_one_loss_is_not_taken_for_another():
    def make_loss(coupling):
        return lambda model, batch: Counted(coupling)(model, batch)

    net = make_net()
    for coupling in (0.0, 1.0):
        expected = ns.summarize(net, make_loss(coupling), make_batch(), backend="nested")
        actual = ns.summarize(net, make_loss(coupling), make_batch(), stack_limit=2**14)
        assert_same(actual, expected)


def test_what_is_known_in_evaluation_is_not_taken_for_training():
    net, loss_fn = make_net(nn.BatchNorm2d(3)), Counted()
    for mode in (False, True, False):
        net.train(mode)
        expected = ns.summarize(net, Counted(), make_batch(), backend="nested")
        assert_same(ns.summarize(net, loss_fn, make_batch(), stack_limit=2**14), expected)


def test_the_limit_is_a_part_of_what_is_free(monkeypatch):
    cpu, gpu, much = torch.device("cpu"), torch.device("cuda"), 2**50
    monkeypatch.setattr(memory, "free_memory", lambda device: 2**40)
    for device in (cpu, gpu):
        assert default_limit(device, much, may_split=False) == 2**39
        assert default_limit(device, much, may_split=True) == 2**38
    monkeypatch.setattr(memory, "free_memory", None)  # is not asked for if little is needed
    for device in (cpu, gpu):
        for may_split in (False, True):
            assert default_limit(device, 1000, may_split) > 1000


def test_parts_of_a_batch_are_even():
    """Room for ten of 24 samples makes three parts, none of which is small."""
    net, loss_fn = make_net(), Counted()
    for _ in range(2):
        loss_fn.sizes.clear()
        ns.summarize(net, loss_fn, make_batch(), stack_limit=8 * 2**14)
    assert loss_fn.sizes[-3:] == [8, 8, 8]


@pytest.mark.parametrize("S", [1, 2, 3, 7, 20])
@pytest.mark.parametrize("parts", [1, 2, 3, 50])
def test_every_two_groups_meet_in_a_chunk(S, parts):
    chunks = [set(chunk) for chunk in group_chunks(S, parts)]
    for s in range(S):
        for t in range(S):
            assert any({s, t} <= chunk for chunk in chunks)


@pytest.mark.parametrize("coupled", [0, 1])
def test_every_batch_is_checked(coupled):
    """One of two batches couples its samples and stays whole; the other is split."""
    net, sizes = make_net(), []
    batches = [
        (*make_batch(n), torch.full((n,), float(i == coupled))) for i, n in enumerate((24, 16))
    ]

    def loss_fn(model, batch):
        sizes.append(len(batch[0]))
        return Counted(batch[2][0])(model, batch)

    expected = ns.summarize(net, loss_fn, batches, backend="nested")
    sizes.clear()
    assert_same(ns.summarize(net, loss_fn, batches, stack_limit=2**14), expected)
    assert min(sizes) < 16


@pytest.mark.parametrize("limit", ["4 gigabytes", "GB", "-1GB", "1..2GB", 0, -5, True, "0"])
def test_a_limit_that_is_none_is_refused(limit):
    with pytest.raises(ValueError, match=r"stack_limit=.*such as '4GB'"):
        ns.summarize(make_net(), Counted(), make_batch(), stack_limit=limit)


def test_a_limit_as_a_text():
    loss_fn, expected = Counted(), Counted()
    ns.summarize(make_net(), loss_fn, make_batch(), stack_limit="16KiB")
    ns.summarize(make_net(), expected, make_batch(), stack_limit=2**14)
    assert loss_fn.sizes == expected.sizes and min(loss_fn.sizes) < 24


def test_the_free_memory_is_some_of_what_the_machine_has(monkeypatch):
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < memory.free_memory(torch.device("cpu")) <= pages
    monkeypatch.setattr(os, "sysconf_names", {})
    assert memory.free_memory(torch.device("cpu")) == memory.UNKNOWN
