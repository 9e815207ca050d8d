"""The same on a GPU as on a CPU: numbers, random state, files. Skipped where there is none."""

import copy
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from newton_summary import NewtonSummary, NotFiniteError, Summary, make_partition, summarize
from newton_summary.derivatives import BACKENDS
from newton_summary.derivatives.sweep.cuda_graph import BEFORE_CAPTURE, SweepGraph, graphs_of
from newton_summary.derivatives.sweep.kernels import kernels
from newton_summary.derivatives.sweep.rules import convolutions, fused_norms, products
from newton_summary.derivatives.sweep.tape import gram
from problems import PROBLEMS, cross_entropy, partition_of, partition_specs, spoil_gradients

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def on_gpu(problem):
    problem.model.cuda()
    if problem.batch is not None:
        problem.batch = tuple(x.cuda() for x in problem.batch)
    return problem


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_numbers_are_those_of_the_cpu(backend, name):
    if (backend, name) == ("differences", "weight_norm"):
        pytest.skip("torch's gradient of weight_norm on a GPU is only good to 2e-7 in float64")
    here, there = PROBLEMS[name](), on_gpu(PROBLEMS[name]())
    u = here.direction()
    expected = summarize(here.model, here.loss_fn, here.batch, direction=u, backend="nested")
    actual = summarize(
        there.model,
        there.loss_fn,
        there.batch,
        direction={n: x.cuda() for n, x in u.items()},
        backend=backend,
    )
    assert actual.Hbar.device.type == "cuda"
    rtol = 1e-4 if backend == "differences" else 1e-8
    for field in ("gbar", "Hbar", "D3"):
        a, e = getattr(actual, field).cpu(), getattr(expected, field)
        size = max(float(e.abs().max()), float(expected.gbar.abs().max())) + 1e-3
        torch.testing.assert_close(a, e, rtol=rtol, atol=rtol * size)


@pytest.mark.parametrize("spec", partition_specs(PROBLEMS["convnet"]().model))
@pytest.mark.parametrize("moved_after", [False, True])
def test_partitions_of_a_model_that_was_moved(spec, moved_after):
    problem = PROBLEMS["convnet"]()
    expected = summarize(
        problem.model, problem.loss_fn, problem.batch, partition=partition_of(problem, spec)
    )
    partition = partition_of(problem, spec)
    on_gpu(problem)
    if not moved_after:
        partition = partition_of(problem, spec)
    for backend in ("sweep", "nested", "differences"):
        actual = summarize(
            problem.model,
            problem.loss_fn,
            problem.batch,
            partition=partition,
            backend=backend,
            order=2,
        )
        torch.testing.assert_close(actual.Hbar.cpu(), expected.Hbar, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_random_state_of_the_gpu_is_put_back(backend):
    """And every evaluation draws the same numbers: else the differences would be noise."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 3))
    model = model.double().cuda()
    batch = (torch.randn(6, 3).double().cuda(), torch.randint(3, (6,)).cuda())
    torch.cuda.manual_seed(1)
    before = torch.cuda.get_rng_state()
    loss = cross_entropy(model, batch).detach()
    torch.cuda.set_rng_state(before)
    summary = summarize(model, cross_entropy, batch, backend=backend)
    assert torch.equal(torch.cuda.get_rng_state(), before)
    torch.testing.assert_close(summary.loss, loss)
    exact = summarize(model, cross_entropy, batch, backend="nested")
    torch.testing.assert_close(summary.Hbar, exact.Hbar, rtol=1e-4, atol=1e-6)
    parts = list(zip(batch[0].split(2), batch[1].split(2), strict=True))
    first, second = (
        summarize(model, cross_entropy, parts, backend=backend, order=2) for _ in range(2)
    )
    torch.testing.assert_close(first.Hbar, second.Hbar)


def test_files_go_from_one_to_the_other(tmp_path):
    problem = on_gpu(PROBLEMS["mlp_cross_entropy"]())
    summary = summarize(
        problem.model, problem.loss_fn, problem.batch, partition="discrete", backend="nested"
    )
    summary.save(tmp_path / "summary.pt")
    loaded = Summary.load(tmp_path / "summary.pt")
    assert loaded.Hbar.device.type == "cpu"
    assert torch.equal(loaded.to("cuda").Hbar, summary.Hbar)


def test_fused_attention_with_half_precision():
    problem = PROBLEMS["transformer"]()
    exact = summarize(problem.model, problem.loss_fn, problem.batch)
    model = copy.deepcopy(problem.model).float().cuda()
    batch = tuple(x.cuda() for x in problem.batch)

    def loss_fn(model, batch):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return F.cross_entropy(model(batch[0]).float(), batch[1])

    for backend in ("sweep", "nested"):
        actual = summarize(model, loss_fn, batch, backend=backend, order=2)
        torch.testing.assert_close(
            actual.Hbar.double().cpu(),
            exact.Hbar,
            rtol=0.3,
            atol=0.1 * float(exact.Hbar.abs().max()),
        )


def train(steps=40, **options):
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(36, 12), nn.ELU(), nn.Linear(12, 3)),
    )
    model.to("cuda", torch.float64)
    inputs = torch.randn(60, 1, 8, 8, dtype=torch.float64).cuda()
    targets = torch.randint(3, (60,)).cuda()
    batches = [(inputs[i : i + 20], targets[i : i + 20]) for i in (0, 20, 40)]
    batches.append((inputs[:10], targets[:10]))  # of another shape
    optimizer = NewtonSummary(
        make_partition(model),
        lambda_int=1.0,
        summary_period=2,
        curvature=(cross_entropy, batches),
        **options,
    )
    for step in range(steps):
        optimizer.zero_grad()
        cross_entropy(model, batches[step % 3]).backward()
        optimizer.step()
    return model, optimizer


def captured_in(graphs):
    return [graph for graph in graphs._graphs.values() if isinstance(graph, SweepGraph)]


def test_a_cuda_graph_gives_the_same_training():
    plain, expected = train()
    captured, actual = train(cuda_graph=True)
    assert captured_in(actual._curvature._graphs), "nothing was captured"
    for a, e in zip(captured.parameters(), plain.parameters()):
        torch.testing.assert_close(a, e, rtol=1e-7, atol=1e-9)
    for field in ("gbar", "Hbar", "D3", "loss"):
        a, e = getattr(actual.last_summary, field), getattr(expected.last_summary, field)
        torch.testing.assert_close(a.cpu(), e.cpu(), rtol=1e-6, atol=1e-9)
    assert actual.last_summary.num_samples == expected.last_summary.num_samples


def test_captured_steps_give_the_same_training():
    """Also past gradients that are not finite or missing, and other momenta."""

    def train_with(cuda_graph):
        model, batches = lenet()
        optimizer = NewtonSummary.paper(
            make_partition(model), curvature=(cross_entropy, batches), cuda_graph=cuda_graph
        )
        for step in range(90):
            optimizer.zero_grad()
            cross_entropy(model, batches[step % 3]).backward()
            spoil_gradients(model, step)
            if step == 74:
                for group in optimizer.param_groups:
                    group["momentum"] = 0.8
            if step == 77:
                for group in optimizer.param_groups:
                    group["lr"] = 0.1
            optimizer.step()
        return model, optimizer

    with pytest.warns(UserWarning, match="1 step.* the gradient was not finite"):
        plain, expected = train_with(cuda_graph=False)
    with pytest.warns(UserWarning, match="1 step.* the gradient was not finite"):
        captured, actual = train_with(cuda_graph=True)
    assert expected._update._captured is None and actual._update._captured is not None
    assert actual.skipped_steps == expected.skipped_steps == 2
    assert actual._update.skipped == 2
    for a, e in zip(captured.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, e, rtol=1e-7, atol=1e-9)
    for a, e in zip(actual._update.direction.values(), expected._update.direction.values()):
        torch.testing.assert_close(a, e, rtol=1e-6, atol=1e-9)


def test_captured_steps_follow_parameters_that_move_in_memory():
    """As after ``p.data = ...``; and autograd knows that they have changed the parameters."""

    def train_with(cuda_graph):
        model, batches = lenet()
        optimizer = NewtonSummary.paper(
            make_partition(model), 0.05, curvature=(cross_entropy, batches), cuda_graph=cuda_graph
        )
        for step in range(62):
            optimizer.zero_grad()
            cross_entropy(model, batches[step % 3]).backward()
            if step in (44, 55):
                for p in model.parameters():
                    p.data = p.data.clone()
            optimizer.step()
        loss = cross_entropy(model, batches[0])
        loss.backward(retain_graph=True)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        return model, optimizer

    plain, _ = train_with(cuda_graph=False)
    captured, optimizer = train_with(cuda_graph=True)
    assert optimizer._update._captured is not None
    for a, e in zip(captured.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, e, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize(
    ("layer", "reason"),
    [(nn.Dropout(0.5), "random numbers"), (nn.BatchNorm1d(6), "buffer '1.running_mean'")],
)
def test_what_a_cuda_graph_cannot_replay_is_measured_without(layer, reason):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), copy.deepcopy(layer), nn.Tanh(), nn.Linear(6, 2)).cuda()
    batch = (torch.randn(30, 5).cuda(), torch.randint(2, (30,)).cuda())
    optimizer = NewtonSummary(
        make_partition(model), summary_period=1, curvature=(cross_entropy, [batch]), cuda_graph=True
    )
    cross_entropy(model, batch).backward()

    def train():
        for _ in range(9):  # the first measurements are made before anything is captured
            optimizer.step()

    with pytest.warns(UserWarning, match=reason):
        train()
    assert optimizer.refreshes > 4


def lenet(*between, dtype=torch.float64):
    torch.manual_seed(0)
    layers = (nn.Conv2d(1, 4, 3), nn.Tanh(), nn.MaxPool2d(2), nn.Flatten())
    model = nn.Sequential(*layers, nn.Linear(36, 12), *between, nn.ELU(), nn.Linear(12, 3))
    batches = [(torch.randn(20, 1, 8, 8, dtype=dtype), torch.randint(3, (20,))) for _ in range(3)]
    return model.to("cuda", dtype), [tuple(x.cuda() for x in batch) for batch in batches]


def move(model, far=0.01):
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1 + far * torch.rand_like(p))


def replay_often(model, loss_fn, batch, times):
    return [summarize(model, loss_fn, batch, cuda_graph=True) for _ in range(times)]


def assert_same_summary(actual, expected, rtol=1e-8, what=""):
    assert (actual.num_samples, actual.backend) == (expected.num_samples, expected.backend)
    for field in ("gbar", "Hbar", "D3", "loss"):
        a, e = getattr(actual, field), getattr(expected, field)
        if e is None:
            assert a is None, f"{what}: there is a {field}"
            continue
        assert (a.device, a.dtype, a.shape) == (e.device, e.dtype, e.shape), f"{what}: {field}"
        atol = rtol * (float(e.abs().max()) + 1e-6)
        error = float((a - e).abs().max())
        assert error <= atol, f"{what}: {field} is off by {error:.2e}, allowed {atol:.2e}"


def assert_cuda_is_in_order(what):
    """A capture that fails can leave generator and allocator unusable."""
    for name, use in {
        "random numbers": lambda: torch.randn(3, device="cuda").sum().item(),
        "empty_cache": torch.cuda.empty_cache,
        "synchronize": torch.cuda.synchronize,
    }.items():
        try:
            use()
        except RuntimeError as error:
            pytest.fail(f"after {what}, {name}: {str(error).splitlines()[0]}")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("order", [2, 3])
@pytest.mark.parametrize("given", [False, True], ids=["gradient", "given"])
def test_a_replayed_summary_is_the_usual_one(given, order, dtype):
    """Of other batches, along other directions and with other parameters than at the capture."""
    model, batches = lenet(dtype=dtype)
    for i in range(BEFORE_CAPTURE + 5):
        move(model, far=0.2)
        u = {name: torch.randn_like(p) for name, p in model.named_parameters()}
        how = {"direction": u if given else "gradient", "order": order}
        expected = summarize(model, cross_entropy, batches[i % 3], **how)
        actual = summarize(model, cross_entropy, batches[i % 3], cuda_graph=True, **how)
        rtol = 1e-9 if dtype == torch.float64 else 5e-3  # TF32 in convolutions
        assert_same_summary(actual, expected, rtol, f"call {i}")
    assert len(captured_in(graphs_of(model))) == 1, "nothing was captured"
    with pytest.raises(NotFiniteError, match="The loss is nan"):
        summarize(
            model, cross_entropy, (batches[0][0] * torch.nan, batches[0][1]), cuda_graph=True, **how
        )
    assert_cuda_is_in_order("a capture")


@pytest.mark.parametrize("name", PROBLEMS)
def test_replayed_or_measured_as_usual(name):
    """Whatever cannot be captured does no harm; the warnings of this test say why it cannot."""
    problem = on_gpu(PROBLEMS[name]())
    given = (problem.model, problem.loss_fn, problem.batch)
    for i in range(BEFORE_CAPTURE + 3):
        move(problem.model)
        expected = summarize(*given)
        assert_same_summary(summarize(*given, cuda_graph=True), expected, what=f"call {i}")
    assert_cuda_is_in_order(f"{len(captured_in(graphs_of(problem.model)))} captures")


@pytest.mark.parametrize(
    ("layer", "reason"),
    [(nn.Dropout(0.5), "random numbers"), (nn.BatchNorm1d(12), "buffer '5.running_mean'")],
)
def test_what_cannot_be_replayed_is_summarized_without(layer, reason):
    model, batches = lenet(copy.deepcopy(layer))
    with pytest.warns(UserWarning, match=reason):
        replay_often(model, cross_entropy, batches[0], BEFORE_CAPTURE + 2)
    assert not captured_in(graphs_of(model))
    assert_cuda_is_in_order("a capture that was not tried")


def test_a_loss_that_waits_for_the_device_is_found_before_the_capture():
    model, batches = lenet()

    def waits(model, batch):
        loss = cross_entropy(model, batch)
        return loss if batch[0].sum().item() < 1e9 else 2 * loss

    expected = summarize(model, waits, batches[0])
    with pytest.warns(UserWarning, match="no effect, because .*synchroniz"):
        found = replay_often(model, waits, batches[0], BEFORE_CAPTURE + 2)
    for i, actual in enumerate(found):
        assert_same_summary(actual, expected, what=f"call {i}")
    assert_cuda_is_in_order("a loss that waits")
    assert torch.cuda.get_sync_debug_mode() == 0


def test_the_gradient_is_captured_once_no_loss_is_kept():
    """The ends of its graph belong to the default stream, which cannot be captured."""
    model, batches = lenet()
    loss = cross_entropy(model, batches[0])
    loss.backward()
    with pytest.warns(UserWarning, match="keeps the autograd graph"):
        replay_often(model, cross_entropy, batches[0], BEFORE_CAPTURE + 1)
    assert_cuda_is_in_order("a loss that was kept")
    del loss
    summarize(model, cross_entropy, batches[0], cuda_graph=True)
    assert len(captured_in(graphs_of(model))) == 1, "not captured after del loss"
    kept = cross_entropy(model, batches[1])  # does not matter any more
    expected = summarize(model, cross_entropy, batches[1])
    actual = summarize(model, cross_entropy, batches[1], cuda_graph=True)
    assert_same_summary(actual, expected, what="replayed")
    kept.backward()


@pytest.mark.parametrize("given", [False, True], ids=["gradient", "given"])
def test_an_autocast_around_it_casts_the_parameters_anew(given):
    """Its cache would keep them as they were at the capture, and give them to others."""
    model, batches = lenet(dtype=torch.float32)
    u = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    how = {"direction": u if given else "gradient"}
    with torch.autocast("cuda", dtype=torch.bfloat16):
        for i in range(BEFORE_CAPTURE + 3):
            move(model, far=0.5)
            torch.clear_autocast_cache()  # of torch: it does not see that they have moved
            expected = summarize(model, cross_entropy, batches[0], **how)
            actual = summarize(model, cross_entropy, batches[0], cuda_graph=True, **how)
            assert_same_summary(actual, expected, 0.02, f"call {i}")
            loss = cross_entropy(model, batches[0]).detach()
            torch.testing.assert_close(loss, actual.loss, rtol=1e-2, atol=1e-2)
    assert len(captured_in(graphs_of(model))) == 1, "nothing was captured"


def test_a_graph_goes_with_its_model():
    model, batches = lenet()
    replay_often(model, cross_entropy, batches[0], BEFORE_CAPTURE + 2)
    assert captured_in(graphs_of(model))
    for p in model.parameters():
        p.data = p.data.clone()  # elsewhere
    move(model)
    for i in range(BEFORE_CAPTURE + 2):
        expected = summarize(model, cross_entropy, batches[0])
        actual = summarize(model, cross_entropy, batches[0], cuda_graph=True)
        assert_same_summary(actual, expected, what=f"call {i} elsewhere")
    assert len(captured_in(graphs_of(model))) == 2
    gone, graphs = weakref.ref(model), weakref.ref(graphs_of(model))
    del model, p, expected, actual
    gc.collect()
    assert gone() is None, "the model is kept alive"
    assert graphs() is None, "the graphs are kept alive"


@pytest.mark.parametrize("order", [2, 3])
@pytest.mark.parametrize("activation", [nn.ELU(), nn.Tanh(), nn.Sigmoid(), nn.SiLU()])
def test_fused_passes_are_those_of_the_cpu(activation, order):
    """Convolutions whose rows stay in pieces, a second use of a layer, a loss right behind it."""
    torch.manual_seed(0)
    shared = nn.Conv2d(3, 3, 3, padding=1)
    model = nn.Sequential(
        *(nn.Conv2d(2, 3, 3), activation, shared, activation, shared, activation),
        *(nn.MaxPool2d(2), nn.Conv2d(3, 4, 2), activation),
    ).double()
    batch = torch.randn(7, 2, 9, 9, dtype=torch.float64)

    def loss_fn(model, x):
        return model(x).pow(2).mean()

    expected = summarize(model, loss_fn, batch, order=order, backend="nested")
    actual = summarize(model.cuda(), loss_fn, batch.cuda(), order=order, backend="sweep")
    assert kernels() is not None
    for field in ("gbar", "Hbar", "D3")[:order]:
        e = getattr(expected, field)
        torch.testing.assert_close(
            getattr(actual, field).cpu(), e, rtol=1e-9, atol=1e-10 * float(e.abs().max())
        )


class Attention(nn.Module):
    """Of one head, in the open, with a mask and many outputs."""

    def __init__(self):
        super().__init__()
        self.queries, self.keys, self.values = (nn.Linear(4, 4) for _ in range(3))
        self.norm = nn.LayerNorm(12)
        self.widen, self.words = nn.Linear(4, 12), nn.Linear(12, 3000)

    def forward(self, x):
        scores = self.queries(x) @ self.keys(x).mT / 2
        later = torch.ones_like(scores, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(later, -float("inf")).softmax(-1)
        return self.words(self.norm(torch.tanh(self.widen(weights @ self.values(x)))))


class Gated(nn.Module):
    """Root mean square norms that are written out, around a gate."""

    def __init__(self):
        super().__init__()
        self.widen, self.gate, self.up = nn.Linear(4, 12), nn.Linear(12, 9), nn.Linear(12, 9)
        self.words = nn.Linear(9, 3000)

    def forward(self, x):
        def norm(y):
            return y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)

        x = norm(self.widen(x))
        return self.words(norm(F.silu(self.gate(x)) * self.up(x)))


def squared_logs(model, batch):
    return model(batch[0]).log_softmax(-1).square().mean()


def next_word(model, batch):
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def with_norms(first, second):
    """Two norms of which one is on a way around."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1, self.norm1 = nn.Conv2d(2, 4, 3, padding=1), first
            self.conv2, self.norm2 = nn.Conv2d(4, 4, 3, padding=1), second
            self.head = nn.Linear(100, 3)

        def forward(self, x):
            x = torch.tanh(self.norm1(self.conv1(x)))
            return self.head((x + self.norm2(self.conv2(x))).flatten(1))

    return Block()


def images(n):
    return torch.randn(n, 2, 5, 5, dtype=torch.float64), torch.randint(3, (n,))


def texts():
    return torch.randn(3, 6, 4, dtype=torch.float64), torch.randint(3000, (3, 6))


FUSED = {
    "batch norms": (
        lambda: with_norms(nn.BatchNorm2d(4), nn.BatchNorm2d(4, affine=False)),
        cross_entropy,
        lambda: images(300),
    ),
    "group and instance": (
        lambda: with_norms(nn.GroupNorm(2, 4), nn.InstanceNorm2d(4)),
        cross_entropy,
        lambda: images(6),
    ),
    "layer norms": (
        lambda: with_norms(nn.LayerNorm([4, 5, 5]), nn.LayerNorm([5, 5])),
        cross_entropy,
        lambda: images(6),
    ),
    "attention": (Attention, next_word, texts),
    "log-softmax in between": (Attention, squared_logs, texts),
    "gate": (Gated, next_word, texts),
}


@pytest.mark.parametrize("order", [2, 3])
@pytest.mark.parametrize("name", ["batch norms", "layer norms"])
def test_norms_pass_some_entries_at_a_time(name, order, monkeypatch):
    torch.manual_seed(0)
    make, loss_fn, draw = FUSED[name]
    model, batch = make().double().cuda(), tuple(x.cuda() for x in draw())
    how = {"order": order, "partition": "canonical", "backend": "sweep"}
    expected = summarize(model, loss_fn, batch, **how)
    monkeypatch.setattr(fused_norms, "AT_A_TIME", 1)
    monkeypatch.setattr(fused_norms, "EVEN", 64)
    calls = []
    original = kernels().standardized
    counted = lambda *given: (calls.append(given), original(*given))[1]  # noqa: E731
    monkeypatch.setattr(kernels(), "standardized", counted)
    actual = summarize(model, loss_fn, batch, **how)
    assert len(calls) > 10
    for field in ("gbar", "Hbar", "D3")[:order]:
        torch.testing.assert_close(getattr(actual, field), getattr(expected, field))


@pytest.mark.parametrize("order", [2, 3])
@pytest.mark.parametrize("name", FUSED)
def test_fused_norms_and_softmax_are_those_of_the_cpu(name, order, monkeypatch):
    calls = []
    for kernel in ("standardized", "pass_softmax", "pass_product"):
        original = getattr(kernels(), kernel)
        monkeypatch.setattr(
            kernels(),
            kernel,
            lambda *args, kernel=kernel, original=original: (calls.append(kernel), original(*args))[
                1
            ],
        )
    torch.manual_seed(0)
    make, loss_fn, draw = FUSED[name]
    model, batch = make().double(), draw()
    groups = {"gate": "^(gate|up)", "rest": ...} if name == "gate" else "canonical"
    how = {"order": order, "partition": groups}
    expected = summarize(model, loss_fn, batch, **how, backend="nested")
    moved = tuple(x.cuda() for x in batch)
    actual = summarize(model.cuda(), loss_fn, moved, **how, backend="sweep")
    assert len(calls) >= 2
    assert ("pass_product" in calls) == (name == "gate")
    for field in ("gbar", "Hbar", "D3")[:order]:
        e = getattr(expected, field)
        torch.testing.assert_close(
            getattr(actual, field).cpu(), e, rtol=1e-9, atol=1e-10 * float(e.abs().max())
        )
    single = summarize(model.float(), loss_fn, (moved[0].float(), moved[1]), **how, backend="sweep")
    for field in ("gbar", "Hbar", "D3")[:order]:
        e = getattr(expected, field)
        difference = (getattr(single, field).cpu().double() - e).abs().max()
        assert difference < 1e-4 * e.abs().max()


class Attending(nn.Module):
    """Queries, keys and values of heads of a size, all with a bias; fewer heads of keys."""

    def __init__(self, heads, of_keys, size, **how):
        super().__init__()
        self.heads, self.of_keys, self.size, self.how = heads, of_keys, size, how
        self.inner = nn.Linear(6, 6)
        self.q = nn.Linear(6, heads * size)
        self.k, self.v = (nn.Linear(6, of_keys * size) for _ in range(2))
        self.out = nn.Linear(heads * size, 3)

    def forward(self, x):
        x = torch.tanh(self.inner(x))

        def split(y, heads):
            return y.unflatten(-1, (heads, self.size)).transpose(-2, -3)

        q = split(self.q(x), self.heads)
        k, v = split(self.k(x), self.of_keys), split(self.v(x), self.of_keys)
        how = {name: moved(value, q) for name, value in self.how.items()}
        y = F.scaled_dot_product_attention(q, k, v, enable_gqa=self.heads != self.of_keys, **how)
        return self.out(y.transpose(-2, -3).flatten(-2))


def moved(value, like):
    """Return a mask where it is needed, and in which type."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.to(like.device, None if value.dtype == torch.bool else like.dtype)


def some_keys():
    """A mask with a query that may attend to nothing."""
    mask = torch.rand(70, 70, generator=torch.Generator().manual_seed(2)) > 0.3
    mask[3] = False
    return mask


ATTENDING = {
    "causal": lambda: Attending(3, 3, 64, is_causal=True),
    "grouped, causal, odd size": lambda: Attending(4, 2, 20, is_causal=True),
    "mask": lambda: Attending(2, 2, 8, attn_mask=some_keys()),
    "grouped, mask that is added": lambda: Attending(2, 1, 16, attn_mask=torch.randn(70, 70)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "order"), [("causal", 2), *((name, 3) for name in ATTENDING)])
def test_attention_by_kernels_is_that_of_the_cpu(name, order, dtype, monkeypatch):
    """The bias of the keys, which changes no weight, has no derivatives."""
    calls = []
    original = kernels().pass_attention
    monkeypatch.setattr(
        kernels(),
        "pass_attention",
        lambda *args: (calls.append(name), original(*args))[1],
    )
    torch.manual_seed(0)
    model, batch = ATTENDING[name]().to(dtype), torch.randn(2, 70, 6).to(dtype)

    def loss_fn(model, x):
        y = model(x)
        return y.to(torch.promote_types(y.dtype, torch.float32)).tanh().square().mean()

    u = {n: torch.randn_like(p) * p.detach().abs().mean() for n, p in model.named_parameters()}
    double = {n: x.double() for n, x in u.items()}
    exact = copy.deepcopy(model).double()
    expected = summarize(
        exact, loss_fn, batch.double(), order=order, direction=double, backend="nested"
    )
    there = {n: x.cuda() for n, x in u.items()}
    actual = summarize(
        model.cuda(), loss_fn, batch.cuda(), order=order, direction=there, backend="sweep"
    )
    assert calls
    tolerance = 2e-5 if dtype == torch.float32 else 0.05
    for field in ("gbar", "Hbar", "D3")[:order]:
        e = getattr(expected, field)
        difference = (getattr(actual, field).cpu().double() - e).abs().max()
        assert difference < tolerance * e.abs().max()
    assert not actual.Hbar[actual.names.index("k.bias")].any()


@pytest.mark.parametrize(("k", "m"), [(1, 70), (37, 37), (148, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inner_products_of_rows(k, m, dtype):
    """Also of rows that do not lie side by side, and of squares, whose sum grows throughout."""
    torch.manual_seed(0)
    X = torch.randn(k, 4, 100, 3, 96, dtype=torch.float64).to("cuda", dtype)[:, :, :, 1]
    Y = torch.randn(m, 4, 100, 96, dtype=torch.float64).to("cuda", dtype)
    for left, right in ((X, Y), (X, X), (Y.square(), Y.square())):
        expected = left.double().flatten(1) @ right.double().flatten(1).T
        difference = (gram(left, right) - expected).abs().max()
        assert difference < 2e-6 * expected.abs().max()


@pytest.mark.parametrize("k", [37, 70, 148])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_half_of_symmetric_inner_products_is_all_of_them(k, dtype):
    X = torch.randn(k, 6, 1000, device="cuda", dtype=dtype)
    weight = 2.0 ** torch.randint(-2, 3, (6, 1000), device="cuda").to(dtype)  # rounds nothing
    whole = gram(X * weight, X)
    torch.testing.assert_close(gram(X * weight, X, symmetric=True), whole, rtol=1e-5, atol=1e-2)


@pytest.mark.parametrize("shape", [(5, 9, 768, 300), (3, 40, 50, 129), (2, 300, 1030, 128)])
@pytest.mark.parametrize("strided", [False, True])
def test_rows_times_a_weight_have_the_precision_of_float32(shape, strided):
    k, tokens, features, width = shape
    rows = torch.randn(k, tokens + 3, features, device="cuda")[:, :tokens]
    rows = rows if strided else rows.contiguous()
    W = torch.randn(width, features, device="cuda")
    expected = F.linear(rows.double(), W.double())
    size = expected.abs().max()
    found = kernels().multiply_rows(rows, W, None, False)
    assert found.shape == (k, tokens, width)
    assert (found - expected).abs().max() <= 2e-6 * size
    out = torch.ones(k, tokens, width, device="cuda")
    kernels().multiply_rows(rows, W, out, True)
    assert (out - 1 - expected).abs().max() <= 2e-6 * size


@pytest.mark.parametrize("bits", [0x7FFFFFFF, 0x7FC00000, -1, -0x400000])
def test_rows_and_weights_that_are_nan_stay_so(bits):
    """A GPU writes nan as 0x7FFFFFFF, which rounding to TF32 by its bits makes a zero."""
    nan = torch.tensor([bits], dtype=torch.int32, device="cuda").view(torch.float32)
    rows, W = torch.randn(3, 5, 40, device="cuda"), torch.randn(20, 40, device="cuda")
    rows[1, 2, 7] = W[4, 5] = nan[0]
    found = kernels().multiply_rows(rows, W, None, False)
    assert torch.equal(found.isnan(), F.linear(rows, W).isnan())


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
    reason="needs a GPU on which it pays",
)
def test_a_large_layer_is_multiplied_on_tensor_cores(monkeypatch):
    monkeypatch.setattr(products, "LARGE", 1)
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(40, 70), nn.Tanh(), nn.Linear(70, 33), nn.Tanh(), nn.Linear(33, 5)
    )
    batch = torch.randn(50, 40), torch.randint(5, (50,))
    expected = summarize(net.double(), cross_entropy, (batch[0].double(), batch[1]))
    there = copy.deepcopy(net).float().cuda()
    found = summarize(there, cross_entropy, tuple(x.cuda() for x in batch))
    for name in ("gbar", "Hbar", "D3"):
        a, e = getattr(found, name).cpu().double(), getattr(expected, name)
        assert (a - e).abs().max() <= 2e-5 * e.abs().max(), name


def test_convolutions_in_pieces_are_those_of_the_cpu(monkeypatch):
    monkeypatch.setattr(convolutions, "AT_A_TIME_ELSEWHERE", 1)
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(64, 5)
    ).double()
    batch = torch.randn(6, 2, 8, 8, dtype=torch.float64), torch.randint(5, (6,))
    expected = summarize(net, cross_entropy, batch)
    found = summarize(copy.deepcopy(net).cuda(), cross_entropy, tuple(x.cuda() for x in batch))
    for name in ("gbar", "Hbar", "D3"):
        torch.testing.assert_close(getattr(found, name).cpu(), getattr(expected, name))


def test_a_bias_before_a_batch_norm_has_no_derivatives():
    torch.manual_seed(0)
    model = with_norms(nn.BatchNorm2d(4), nn.BatchNorm2d(4)).cuda()
    batch = tuple(x.cuda() for x in images(100))
    summary = summarize(model, cross_entropy, (batch[0].float(), batch[1]), backend="sweep")
    for name in ("conv1.bias", "conv2.bias"):
        row = summary.names.index(name)
        assert not summary.Hbar[row].any() and not summary.D3[row].any()


@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_a_run_goes_on_wherever_its_checkpoint_was_loaded_to(where, tmp_path):
    """Lightning loads checkpoints to the CPU, Transformers may load them to the device."""

    def make():
        problem = on_gpu(PROBLEMS["mlp_cross_entropy"]())
        part = make_partition(problem.model)
        batches = [problem.batch, problem.batch]
        optimizer = NewtonSummary(part, summary_period=2, curvature=(problem.loss_fn, batches))
        return problem, optimizer

    def train(problem, optimizer, steps):
        for _ in range(steps):
            optimizer.zero_grad()
            problem.loss().backward()
            optimizer.step()

    whole, resumed = make(), make()
    train(*whole, 5)
    torch.save([whole[0].model.state_dict(), whole[1].state_dict()], tmp_path / "checkpoint.pt")
    weights, state = torch.load(tmp_path / "checkpoint.pt", map_location=where)
    resumed[0].model.load_state_dict(weights)
    resumed[1].load_state_dict(state)
    for run in (whole, resumed):
        train(*run, 5)
    for name, p in whole[0].params.items():
        torch.testing.assert_close(resumed[0].params[name], p, rtol=1e-9, atol=1e-12)
