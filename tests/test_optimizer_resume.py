"""A run of NewtonSummary can be killed at any step and goes on bit for bit; copies; its data."""

from __future__ import annotations

import copy
import io
import pickle
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

import newton_summary as ns
from newton_summary.optimizer.curvature import CurvatureData
from test_optimizer import (
    CURVATURE,
    DIRECTIONS,
    PAPER,
    _seed_and_strict_warnings,  # noqa: F401
    flat,
    loss_fn,
    make_batches,
    make_net,
    make_optimizer,
    quiet,
    train,
)

STEPS = 75
KILLED_AT = (0, 8, 59)


class Augmented(Dataset):
    """Samples that draw from all three random generators when they are read."""

    def __init__(self, size=40, dtype=torch.float64):
        generator = torch.Generator().manual_seed(5)
        self.x = torch.randn(size, 3, generator=generator, dtype=torch.float64).to(dtype)
        self.y = (self.x[:, 0] * self.x[:, 1] > 0).long()

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        noise = torch.randn(3) + random.gauss(0, 1) + np.random.standard_normal()
        return self.x[i] + 0.1 * noise.to(self.x), self.y[i]


class Run:
    """A training run that can be saved, with dropout and shuffled, augmented data."""

    def __init__(self, options, dtype=torch.float64):
        torch.manual_seed(3)
        random.seed(3)
        np.random.seed(3)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(3, 5), torch.nn.Dropout(0.2), torch.nn.Tanh(), torch.nn.Linear(5, 2)
        ).to(dtype)
        data = Augmented(dtype=dtype)
        self.batches = make_batches(9, seed=8, dtype=dtype)
        options = dict(options)
        kind = options.pop("direction", None)
        given = None if kind is None else DIRECTIONS[kind](list(self.model.parameters()))
        loader = DataLoader(data, batch_size=8, shuffle=True, **options.pop("loader", {}))
        self.opt = ns.NewtonSummary(
            ns.make_partition(self.model, options.pop("partition", "canonical")),
            lr=0.05,
            summary_period=3,
            curvature=(loss_fn, loader),
            direction=given,
            **options,
        )
        self.scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(self.opt, patience=20)
        self.t = 0

    def train(self, until):
        while self.t < until:
            self.opt.zero_grad()
            loss = loss_fn(self.model, self.batches[self.t % 9])
            loss.backward()
            if self.t == 33:
                self.model[0].weight.grad.fill_(float("nan"))
            self.opt.step()
            self.scheduler.step(loss.item())
            self.t += 1

    def save(self):
        file = io.BytesIO()
        state = {
            "model": self.model.state_dict(),
            "opt": self.opt.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "random": torch.get_rng_state(),
            "t": self.t,
        }
        torch.save(state, file)
        return file.getvalue()

    def load(self, saved):
        state = torch.load(io.BytesIO(saved), weights_only=True)
        self.model.load_state_dict(state["model"])
        self.opt.load_state_dict(state["opt"])
        self.scheduler.load_state_dict(state["scheduler"])
        torch.set_rng_state(state["random"])
        self.t = state["t"]


RUNS = {
    "default": {},
    "as-run": PAPER | {"eta_momentum": 0.5, "warmup": 3},
    "as-published": PAPER | {"variant": "as-published"},
    "weight_decay": {"weight_decay": 0.01, "lambda_int": 1.0},
    "one group": {"partition": "trivial"},
    "divided": {
        "partition": [
            [("0.weight", 0)],
            [("0.weight", slice(1, 5)), "0.bias"],
            ["3.weight", "3.bias"],
        ]
    },
    "Adam": {"direction": "Adam"},
    "SGD": {"direction": "SGD"},
    "generator": {"loader": {"generator": "fresh"}},
}


def make_run(name):
    options = dict(RUNS[name])
    if "loader" in options:
        options["loader"] = {"generator": torch.Generator().manual_seed(11)}
    return Run(options)


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_run_killed_at_any_step_ends_in_the_same_parameters(name):
    """With dropout, shuffling, augmentation, a scheduler, and one gradient that is not finite."""

    def check():
        whole, saved = make_run(name), {}
        for t in KILLED_AT:
            whole.train(t)
            saved[t] = whole.save()
        whole.train(STEPS)
        assert torch.isfinite(flat(whole.model)).all() and whole.opt.skipped_steps == 1
        for t in KILLED_AT:
            resumed = make_run(name)
            random.seed(t)  # what a new process starts with does not matter
            resumed.load(saved[t])
            resumed.train(STEPS)
            assert torch.equal(flat(resumed.model), flat(whole.model)), f"killed at {t}"
            assert resumed.opt.refreshes == whole.opt.refreshes
            assert resumed.opt.failed_refreshes == whole.opt.failed_refreshes
            assert resumed.opt.skipped_steps == 1
            assert torch.equal(resumed.opt.last_rates.eta, whole.opt.last_rates.eta)
            assert torch.equal(resumed.opt.last_summary.Hbar, whole.opt.last_summary.Hbar)

    quiet(check)


def test_the_state_matters():
    """The test above can fail: without the optimizer's state the run ends elsewhere."""
    whole, resumed = make_run("default"), make_run("default")
    quiet(lambda: whole.train(30))
    resumed.model.load_state_dict(whole.model.state_dict())
    resumed.t = 30
    quiet(lambda: whole.train(60))
    quiet(lambda: resumed.train(60))
    assert not torch.allclose(flat(resumed.model), flat(whole.model), rtol=1e-3)


def trained(steps=1, **options):
    model = make_net()
    opt = make_optimizer(model, **options)
    quiet(lambda: train(model, opt, steps))
    return model, opt


def test_a_checkpoint_of_something_else_is_refused():
    model, opt = trained()
    with pytest.raises(ValueError, match="another optimizer"):
        opt.load_state_dict(torch.optim.SGD(model.parameters(), lr=0.1).state_dict())
    with pytest.raises(ValueError, match="Use the same partition"):
        make_optimizer(make_net(), partition="trivial").load_state_dict(opt.state_dict())
    adam = torch.optim.Adam(model.parameters())
    with pytest.raises(ValueError, match=r"with direction=\.\.\., that of the checkpoint"):
        make_optimizer(model, direction=adam).load_state_dict(opt.state_dict())
    with pytest.raises(ValueError, match="curvature"):
        make_optimizer(model, curvature=None).load_state_dict(opt.state_dict())


def test_other_settings_are_named():
    """All that differ, and no other; lr and momentum belong to schedulers."""
    _, opt = trained(lambda_int=10.0, summary_period=5, diagonal=True, lr=0.1, momentum=0.5)
    fresh = make_optimizer(make_net())
    with pytest.raises(ValueError, match="other settings") as caught:
        fresh.load_state_dict(opt.state_dict())
    text = str(caught.value)
    assert "lambda_int=10.0 (here 0.0)" in text and "summary_period=5 (here 15)" in text
    assert "diagonal=True (here False)" in text
    assert not [name for name in ("lr", "momentum", "budget", "variant") if f" {name}=" in text]
    with pytest.raises(ValueError, match=r"variant='steered' \(here 'as-run'\)"):
        make_optimizer(make_net(), **PAPER).load_state_dict(trained()[1].state_dict())


def test_lr_momentum_and_changed_groups_come_from_the_checkpoint():
    _, opt = trained(lr=0.1, momentum=0.5)
    opt.param_groups[1]["weight_decay"] = 0.1
    opt.param_groups[0]["lambda_int"] = 3.0
    other = make_optimizer(make_net())
    other.load_state_dict(opt.state_dict())
    for key in ("lr", "momentum", "weight_decay", "lambda_int", "eta", "name"):
        assert [g[key] for g in other.param_groups] == [g[key] for g in opt.param_groups]


def spoil(path, value):
    """Return a function that puts a value somewhere deep in a state."""

    def spoiled(state):
        for key in path[:-1]:
            state = state[key]
        if value is KeyError:
            del state[path[-1]]
        else:
            state[path[-1]] = value

    return spoiled


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("newton_summary", "eta"), torch.ones(3)),
        (("newton_summary", "eta"), torch.full((4,), float("nan"))),
        (("newton_summary", "steering", "multiplier"), KeyError),
        (("newton_summary", "steering"), None),
        (("newton_summary", "counts", "refreshes"), -1),
        (("newton_summary", "counts", "failed_refreshes"), KeyError),
        (("newton_summary", "schedule", "next"), 2.5),
        (("newton_summary", "average", "summaries"), KeyError),
        (("newton_summary", "last_summary", "Hbar"), torch.ones(2, 2)),
        (("newton_summary", "data", "index"), KeyError),
        (("newton_summary", "settings"), KeyError),
        (("state", 0, "exp_avg"), torch.zeros(2, 2)),
        (("param_groups", 1, "params"), [1, 2]),
    ],
)
def test_nothing_is_half_loaded(path, value):
    """A state that is damaged anywhere is refused, and the optimizer goes on as it was."""
    _, donor = trained(3)
    model, opt = trained(5)
    twin, other = trained(5)
    state = copy.deepcopy(donor.state_dict())
    spoil(path, value)(state)
    before = copy.deepcopy(opt.state_dict())
    with pytest.raises(ValueError):
        opt.load_state_dict(state)
    assert same(opt.state_dict(), before)
    quiet(lambda: train(model, opt, 12, start=5))
    quiet(lambda: train(twin, other, 12, start=5))
    assert torch.equal(flat(model), flat(twin))


def same(a, b):
    """Whether two nested states are equal, bit for bit."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b) and a.dtype == b.dtype
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b or (a != a and b != b)


def test_a_state_of_version_0_1_0_says_why_it_is_not_loaded():
    """As that version wrote it: no settings, other averages."""
    _, opt = trained()
    state = opt.state_dict()
    params = [
        {k: g[k] for k in ("params", "name", "lr", "momentum", "eta")}
        for g in state["param_groups"]
    ]
    refresh = {"done": 3, "failed": 0, "told": [], "solution": opt.eta, "eta": opt.eta}
    refresh |= {"norms": None, "peak": opt.eta, "average": {"count": 0, "sum": None}}
    refresh |= {"last_rates": None, "last_summary": None}
    own = {"groups": list(opt.partition.names), "t": 1, "next_refresh": 10, "warmed_up": 3}
    own |= {"skipped": 0, "skipped_since": 0, "refresh": refresh, "direction": None}
    own["data"] = state["newton_summary"]["data"]
    old = {"state": state["state"], "param_groups": params, "newton_summary": own}
    before = copy.deepcopy(opt.state_dict())
    with pytest.raises(ValueError, match=r"saved by newton_summary 0\.1\.0.*new optimizer"):
        opt.load_state_dict(old)
    assert same(opt.state_dict(), before)


def test_settings_are_shown():
    _, opt = trained(lambda_int=2.0, weight_decay=0.01)
    opt.param_groups[1]["lr"] = 0.25
    torch.optim.lr_scheduler.StepLR(opt, 5)  # torch adds keys of its own to settings and groups
    shown = repr(opt)
    assert shown == str(opt) and shown.endswith("is lr * eta")
    for name, value in opt.defaults.items():
        assert name in shown
        if name not in ("lr", "momentum", "weight_decay"):
            assert f"{name}={value!r}" in shown
    row = next(line for line in shown.splitlines() if line.startswith("0.bias"))
    assert row.split() == ["0.bias", "0.25", "0.9", "0.01", f"{opt.eta[1]:.4g}"]
    assert all(opt.defaults.keys() <= group.keys() for group in opt.param_groups)


def test_the_state_can_be_copied_and_pickled():
    model = make_net()
    opt = make_optimizer(model)
    quiet(lambda: train(model, opt, 4))
    for state in (
        copy.deepcopy(opt.state_dict()),
        pickle.loads(pickle.dumps(opt.state_dict())),
    ):
        twin = make_net()
        twin.load_state_dict(model.state_dict())
        other = make_optimizer(twin)
        other.load_state_dict(state)
        start = flat(twin)
        quiet(lambda twin=twin, other=other: train(twin, other, 12, start=4))
        assert not torch.equal(flat(twin), start)
        results = flat(twin)
    quiet(lambda: train(model, opt, 12, start=4))
    assert torch.equal(flat(model), results)


@pytest.mark.parametrize("kind", [None, "Adam"])
@pytest.mark.parametrize("how", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_the_optimizer_itself_can_be_copied(kind, how):
    """The copy has a copy of the model, in ``opt.model``, and goes on as the original does."""
    model = make_net()
    given = None if kind is None else DIRECTIONS[kind](list(model.parameters()))
    opt = make_optimizer(model, direction=given, summary_period=3)
    torch.optim.lr_scheduler.StepLR(opt, 5)  # wraps opt.step
    quiet(lambda: train(model, opt, 4))
    twin = how(opt)
    assert twin.model is not model
    quiet(lambda: train(model, opt, 6, start=4))
    quiet(lambda: train(twin.model, twin, 6, start=4))
    assert torch.equal(flat(twin.model), flat(model))


# --- the curvature data ---------------------------------------------------------------------------


def take(data, count):
    return [data.next_batch() for _ in range(count)]


def test_training_sees_the_random_numbers_it_would_see_without():
    """Dropout and shuffling of the training loop do not depend on the curvature loader."""
    loader = DataLoader(Augmented(), batch_size=8, shuffle=True)
    drawn = []
    for batches in (0, 7):
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        take(CurvatureData(loader), batches)
        drawn.append((torch.rand(3).tolist(), random.random(), np.random.rand()))
    assert drawn[0] == drawn[1]


def test_the_loader_starts_over_with_another_order():
    data = CurvatureData(DataLoader(torch.arange(6), batch_size=2, shuffle=True))
    epochs = [torch.cat(take(data, 3)) for _ in range(3)]
    assert all(sorted(epoch.tolist()) == list(range(6)) for epoch in epochs)
    assert len({tuple(epoch.tolist()) for epoch in epochs}) > 1


def test_the_loader_does_not_repeat_the_order_of_training():
    """A loader of the same kind, under the same seed, gives training another order."""
    loader = DataLoader(torch.arange(50), batch_size=50, shuffle=True)
    torch.manual_seed(1)
    data = CurvatureData(loader)
    assert not torch.equal(data.next_batch(), next(iter(loader)))


def test_the_seed_of_torch_decides():
    loader = DataLoader(torch.arange(50), batch_size=5, shuffle=True)
    series = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        series.append(torch.cat(take(CurvatureData(loader), 4)).tolist())
    assert series[0] == series[1] != series[2]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_saved_position_is_found_again(workers):
    def make():
        return CurvatureData(
            DataLoader(Augmented(), batch_size=8, shuffle=True, num_workers=workers)
        )

    data = make()
    take(data, 7)  # into the second epoch
    state = copy.deepcopy(data.state_dict())
    expected = take(data, 5)
    torch.manual_seed(99)
    other = make()
    other.load_state_dict(state)
    for (x, y), (a, b) in zip(take(other, 5), expected):
        assert torch.equal(x, a) and torch.equal(y, b)


def test_one_batch_a_list_and_an_iterator():
    x, y = CURVATURE[0]
    assert take(CurvatureData((x, y)), 2)[1][0] is x
    assert take(CurvatureData([x, y]), 2)[1][0] is x
    assert take(CurvatureData({"x": x}), 1)[0]["x"] is x
    assert [b[0] is c[0] for b, c in zip(take(CurvatureData(CURVATURE), 6), CURVATURE * 2)] == [
        True
    ] * 6
    data = CurvatureData(iter(CURVATURE))
    assert take(data, 5)[4][0] is CURVATURE[4][0]
    with pytest.raises(ValueError, match="cannot be restarted"):
        data.next_batch()


def test_a_position_beyond_the_end_of_a_shorter_loader():
    """As on two ranks, each with half of the batches that one had."""
    data = CurvatureData(list(range(6)))
    take(data, 5)
    half = CurvatureData(list(range(3)))
    half.load_state_dict(data.state_dict())
    assert take(half, 4) == [0, 1, 2, 0]


def test_an_iterator_is_resumed_by_its_count():
    data = CurvatureData(iter(range(10)))
    take(data, 4)
    other = CurvatureData(iter(range(10)))
    other.load_state_dict(data.state_dict())
    assert other.next_batch() == 4


def test_empty_loaders_are_told():
    with pytest.raises(ValueError, match="empty"):
        CurvatureData(DataLoader(TensorDataset(torch.zeros(0, 2))))

    class Sometimes:
        def __init__(self, times):
            self.times = times

        def __iter__(self):
            self.times -= 1
            return iter(CURVATURE[:2] if self.times >= 0 else [])

    with pytest.raises(ValueError, match="empty"):
        CurvatureData(Sometimes(0)).next_batch()
    data = CurvatureData(Sometimes(1))
    take(data, 2)
    with pytest.raises(ValueError, match="was restarted"):
        data.next_batch()


def test_a_distributed_sampler_is_told_the_epoch():
    sampler = DistributedSampler(torch.arange(12), num_replicas=2, rank=0)
    data = CurvatureData(DataLoader(torch.arange(12), batch_size=2, sampler=sampler))
    first, second = (torch.cat(take(data, 3)).tolist() for _ in range(2))
    assert first != second


def test_a_batch_of_any_type_is_taken_as_it_is():
    """Also one that looks like a series of batches."""
    model = make_net()
    seen = []

    def loss(model, batch):
        seen.append(type(batch))
        return F.cross_entropy(model(torch.stack(batch)), torch.zeros(4, dtype=torch.long))

    batch = [torch.ones(3, dtype=torch.float64) * i for i in range(4)]
    opt = make_optimizer(model, curvature=(loss, [batch, batch]))
    loss(model, batch).backward()
    quiet(opt.step)
    assert set(seen) == {list}
