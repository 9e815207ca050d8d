"""What ranks tell each other, with threads in the place of processes: seen by every tool."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from newton_summary.errors import NotFiniteError, RankError, RankNotFiniteError
from newton_summary.parallel.ranks import Ranks, find_ranks


class Threads:
    """Messages between threads, each of which is a rank."""

    def __init__(self, count: int, patch: pytest.MonkeyPatch):
        self.count, self.here, self.sent = count, threading.local(), [None] * count
        self.barrier = threading.Barrier(count, timeout=20)
        for name, value in {
            "get_backend": lambda group=None: "gloo",
            "get_world_size": lambda group=None: count,
            "get_process_group_ranks": lambda group: list(range(count)),
            "get_rank": lambda group=None: self.here.rank,
            "is_initialized": lambda: True,
            "group": SimpleNamespace(WORLD=SimpleNamespace(_device_types=["cpu"])),
            "all_reduce": self.all_reduce,
            "all_gather_object": self.all_gather_object,
        }.items():
            patch.setattr(dist, name, value)

    def exchange(self, value):
        self.sent[self.here.rank] = value
        self.barrier.wait()
        values = list(self.sent)
        self.barrier.wait()
        return values

    def all_reduce(self, message, op=dist.ReduceOp.SUM, group=None, async_op=False):
        stacked = torch.stack(self.exchange(message.clone()))
        message.copy_(stacked.amax(0) if op == dist.ReduceOp.MAX else stacked.sum(0))
        return SimpleNamespace(wait=lambda: None)

    def all_gather_object(self, values, value, group=None):
        values[:] = self.exchange(value)

    def run(self, work):
        """Return what each rank returns or raises."""
        results = [None] * self.count

        def one(rank):
            self.here.rank = rank
            try:
                results[rank] = work(Ranks(None, torch.device("cpu")), rank)
            except BaseException as error:
                results[rank] = error

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self.count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results


@pytest.fixture
def two(monkeypatch):
    return Threads(2, monkeypatch)


def test_means_are_weighted_and_keep_shape_and_type(two):
    torch.manual_seed(0)
    parts = [{"a": torch.randn(2, 3), "b": torch.randn((), dtype=torch.float64)} for _ in range(2)]
    expected = {name: (1 * parts[0][name] + 3 * parts[1][name]) / 4 for name in ("a", "b")}
    same = [torch.ones(3), torch.ones(2)]
    for means, total in two.run(lambda ranks, i: ranks.mean(parts[i], (1, 3)[i], same)):
        assert total == 4
        for name in ("a", "b"):
            assert means[name].dtype == parts[0][name].dtype
            torch.testing.assert_close(means[name], expected[name])


def test_a_mean_of_nothing_and_along_other_directions(two):
    for error in two.run(lambda ranks, i: ranks.mean({}, 0)):
        assert isinstance(error, ValueError) and "empty on all ranks" in str(error)
    for error in two.run(lambda ranks, i: ranks.mean({}, 1, [torch.ones(2) * (1 + i)])):
        assert isinstance(error, RankError) and "differ by 3.3e-01 of their mean" in str(error)


def test_tensors_of_any_size_are_averaged(two):
    torch.manual_seed(0)
    given = [[torch.randn(5), torch.randn(2, 2)] for _ in range(2)]
    expected = [(2 * a + b) / 3 for a, b in zip(*given, strict=True)]
    two.run(lambda ranks, i: ranks.average_(given[i], (2, 1)[i]))
    for tensors in given:
        torch.testing.assert_close(tensors, expected)


def test_what_is_the_same_is_agreed_upon(two):
    def work(ranks, i):
        ranks.agree({"order": 3}, {"w": torch.ones(4), "v": torch.zeros(2)})
        return ranks.agreed

    assert two.run(work) == [True, True]


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        (({"order": 2}, {"order": 3}), "order is 2 on rank 0 and 3 on rank 1"),
        (({"a": 1}, {"a": 1, "b": 2}), "b is missing on rank 0 and 2 on rank 1"),
        (({"a": 1, "b": 2}, {"a": 1}), "b is 2 on rank 0 and missing on rank 1"),
    ],
)
def test_facts_that_differ_are_named(two, facts, said):
    for error in two.run(lambda ranks, i: ranks.agree(facts[i], {})):
        assert isinstance(error, RankError) and said in str(error)


@pytest.mark.parametrize(("gap", "differ"), [(1e-4, False), (4e-3, True), (torch.inf, True)])
def test_values_that_differ_are_named(two, gap, differ):
    """Sums apart by more than a thousandth of the norm, which is 2."""

    def work(ranks, i):
        w = torch.ones(4)
        w[0] += i * gap
        ranks.agree({}, {"same": torch.ones(1), "w": w})

    for error in two.run(work):
        assert isinstance(error, RankError) == differ
        assert not differ or "differ in the values of w:" in str(error)


def joint(failures):
    def work(ranks, i):
        with ranks.joint():
            if failures[i] is not None:
                raise failures[i]
        return "done"

    return work


def test_work_that_succeeds(two):
    assert two.run(joint([None, None])) == ["done", "done"]


def test_what_fails_on_one_rank_is_raised_on_all(monkeypatch):
    three = Threads(3, monkeypatch)
    for error in three.run(joint([None, ValueError("no\n batch"), None])):
        assert type(error) is RankError and str(error) == "Rank 1 of 3: ValueError: no batch"
    own = NotFiniteError("The loss is nan.")
    for error in three.run(joint([own, None, own])):
        assert type(error) is RankNotFiniteError
        assert str(error) == "Ranks 0, 2 of 3: The loss is nan."
    for error in three.run(joint([ValueError("a"), KeyError(), own])):
        assert type(error) is RankError
        words = ["Rank 0 of 3: ValueError: a", "Rank 1 of 3: KeyError", "Rank 2 of 3: The loss is"]
        assert all(word in str(error) for word in words)


def test_what_fails_alike_is_raised_as_it_is(two):
    errors = [ValueError("x"), ValueError("x")]
    assert two.run(joint(errors)) == errors


def test_an_interrupt_stops_the_others_too(two):
    interrupt = KeyboardInterrupt()
    mine, other = two.run(joint([interrupt, None]))
    assert mine is interrupt
    assert isinstance(other, RankError) and "Rank 0 of 2: KeyboardInterrupt" in str(other)


@pytest.mark.parametrize("swallowed", [True, False])
def test_a_reason_that_a_loss_catches_is_raised_at_the_end(two, swallowed):
    def work(ranks, i):
        with ranks.joint():
            try:
                ranks.meet("here" if i == 0 else "there")
            except RankError:
                if not swallowed:
                    raise ArithmeticError from None

    for error in two.run(work):
        assert isinstance(error, RankError)
        assert "rank 0 has reached here, but rank 1 there" in str(error)


def test_objects_are_gathered_in_order_where_all_meet(two):
    assert two.run(lambda ranks, i: ranks.meet_and_gather("place", i)) == [[0, 1], [0, 1]]


def test_many_ranks_are_not_all_named(monkeypatch):
    ten = Threads(10, monkeypatch)
    failures = [ValueError()] * 9 + [None]
    for error in ten.run(joint(failures)):
        assert str(error) == "Ranks 0, 1, 2, 3, 4, 5, 6, 7, ... of 10: ValueError"


def test_a_connection_that_is_lost(two, monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("[gloo] Connection closed by peer. And more.")

    monkeypatch.setattr(dist, "all_reduce", fail)

    def work(ranks, i):
        with pytest.raises(RankError, match=r"Rank \d of 2 timed out.*\(Connection closed by peer"):
            ranks.meet("a place")
        with pytest.raises(RankError, match="timed out"):  # and says so again
            ranks.gather(0)
        return "told"

    assert two.run(work) == ["told", "told"]


CPU = torch.device("cpu")


@pytest.mark.usefixtures("two")
def test_who_measures_together():
    assert find_ranks(False, CPU, sharded=False) is None
    ranks = find_ranks("auto", CPU, sharded=True)
    assert isinstance(ranks, Ranks) and ranks.count == 2
    assert find_ranks(ranks, CPU, sharded=False) is ranks
    with pytest.raises(ValueError, match="the model is sharded, so all ranks must take part"):
        find_ranks(False, CPU, sharded=True)


def test_one_rank_measures_alone_unless_its_parameters_are_sharded(monkeypatch):
    Threads(1, monkeypatch)
    assert find_ranks("auto", CPU, sharded=False) is None
    assert isinstance(find_ranks("auto", CPU, sharded=True), Ranks)


def test_a_group_of_others(two):
    def work(ranks, i):
        find_ranks(dist.GroupMember.NON_GROUP_MEMBER, CPU, sharded=False)

    for number, error in enumerate(two.run(work)):
        assert isinstance(error, ValueError)
        assert f"process group that rank {number} does not belong to" in str(error)


@pytest.mark.parametrize(("kinds", "where"), [(["cpu", "cuda"], "cpu"), (["cuda"], "meta")])
@pytest.mark.usefixtures("two")
def test_flags_are_sent_from_the_cpu_where_that_can_be(kinds, where, monkeypatch):
    monkeypatch.setattr(dist.group.WORLD, "_device_types", kinds)
    assert Ranks(None, torch.device("meta"))._flag_device() == torch.device(where)
