"""A measurement leaves no trace, also when the loss raises; and what a model may be made of."""

import copy
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from newton_summary import derivative_tensor, make_partition, summarize, taylor_terms
from newton_summary.derivatives import BACKENDS
from problems import PROBLEMS, Problem, cross_entropy, finite_differences, worst_error

EXACT = [name for name in BACKENDS if name not in ("dense", "differences")]


class Everything(nn.Module):
    """Batch norm, dropout, and a buffer of its own that every forward pass changes."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Dropout(0.3))
        self.head = nn.Linear(4, 3)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("cache", None)
        self.register_buffer("replaced", torch.ones(2))

    def forward(self, x):
        self.calls += 1
        self.cache = x.detach()
        self.replaced = self.replaced + 1
        self.register_buffer("new", torch.ones(3), persistent=False)
        return self.head(self.body(x)) * (1 + 0.1 * self.calls)


def everything():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Everything().double()
        x = torch.randn(6, 3, dtype=torch.float64)
        y = torch.randint(3, (6,))
    model.head.bias.requires_grad_(False)
    model.body[2].eval()  # modes may be mixed
    model.head.weight.grad = torch.full((3, 4), 7.0).double()

    def loss_fn(model, batch):
        x, y = batch
        random.random()
        np.random.rand()
        loss = F.cross_entropy(model(x), y)
        model.eval()
        return loss

    return Problem(model, loss_fn, (x, y))


class Trace:
    """Everything about a model and its surroundings that a measurement could disturb."""

    def __init__(self, model):
        self.values = {n: v.clone() for n, v in model.state_dict(keep_vars=True).items()}
        self.objects = {n: id(v) for n, v in model.state_dict(keep_vars=True).items()}
        self.buffers = [
            {n: None if b is None else (id(b), b.clone()) for n, b in m._buffers.items()}
            for m in model.modules()
        ]
        self.grads = [
            None if p.grad is None else (id(p.grad), p.grad.clone()) for p in model.parameters()
        ]
        self.requires_grad = [p.requires_grad for p in model.parameters()]
        self.versions = [p._version for p in model.parameters()]
        self.modes = [m.training for m in model.modules()]
        self.torch = torch.get_rng_state()
        self.python = random.getstate()
        self.numpy = np.random.get_state()
        self.grad_mode = (torch.is_grad_enabled(), torch.is_inference_mode_enabled())

    def assert_same(self, model):
        now = Trace(model)
        assert now.objects == self.objects
        for name in ("modes", "requires_grad", "python", "grad_mode", "versions"):
            assert getattr(now, name) == getattr(self, name), name
        for n, value in self.values.items():
            assert torch.equal(now.values[n], value), n
        for name in ("buffers", "grads"):
            torch.testing.assert_close(getattr(now, name), getattr(self, name), rtol=0, atol=0)
        assert torch.equal(now.torch, self.torch)
        assert all(np.array_equal(a, b) for a, b in zip(now.numpy, self.numpy, strict=True))


# --- no trace ------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_measurement_leaves_no_trace(backend):
    problem = everything()
    optimizer = torch.optim.Adam(problem.model.parameters())
    for direction in ("gradient", optimizer):
        trace = Trace(problem.model)
        summarize(
            problem.model, problem.loss_fn, problem.batch, backend=backend, direction=direction
        )
        trace.assert_same(problem.model)
    assert problem.model.body[0].weight.grad is None


def test_tensors_and_taylor_terms_leave_no_trace():
    problem = everything()
    trace = Trace(problem.model)
    derivative_tensor(problem.model, problem.loss_fn, problem.batch, order=2)
    taylor_terms(problem.model, problem.loss_fn, problem.batch, order=2)
    trace.assert_same(problem.model)


@pytest.mark.parametrize("calls_before", [0, 1, 2])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_loss_that_raises_leaves_no_trace(backend, calls_before):
    """In the gradient, in the measurement, and in the middle of the differences."""
    problem = everything()
    count = 0

    def failing(model, batch):
        nonlocal count
        loss = problem.loss_fn(model, batch)
        model.body[1].num_batches_tracked.fill_(3)
        model.body[1].running_var.data.fill_(3.0)
        model.head.bias.requires_grad_(True)
        if count == calls_before:
            raise ArithmeticError("in the middle")
        count += 1
        return loss

    trace = Trace(problem.model)
    data = [problem.batch] * 3
    with pytest.raises(ArithmeticError, match="in the middle"):
        summarize(problem.model, failing, data, backend=backend, order=2)
    trace.assert_same(problem.model)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_interrupt_leaves_no_trace(backend):
    problem = everything()

    def interrupted(model, batch):
        problem.loss_fn(model, batch)
        raise KeyboardInterrupt

    trace = Trace(problem.model)
    with pytest.raises(KeyboardInterrupt):
        summarize(problem.model, interrupted, problem.batch, backend=backend)
    trace.assert_same(problem.model)


def test_a_loss_that_calls_backward_leaves_the_gradients():
    problem = everything()

    def loss_fn(model, batch):
        problem.loss_fn(model, batch).backward()
        return problem.loss_fn(model, batch)

    trace = Trace(problem.model)
    summarize(problem.model, loss_fn, problem.batch, backend="nested", order=1)
    trace.assert_same(problem.model)


def test_every_evaluation_starts_from_the_same_state():
    """The loss depends on a counter in a buffer and changes the mode: calls must not notice."""
    problem = everything()
    losses = []

    def loss_fn(model, batch):
        loss = problem.loss_fn(model, batch)
        losses.append(loss.detach().clone())
        return loss

    summarize(problem.model, loss_fn, problem.batch, backend="differences", order=1)
    assert len(losses) == 2
    assert torch.equal(losses[0], losses[1])


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_a_model_writes_down_while_it_is_measured_is_gone(backend):
    class Caching(nn.Linear):
        def forward(self, x):
            self.cache = x  # not there before
            return super().forward(x)

    model = Caching(2, 1).double()
    before = set(vars(model))
    x = torch.ones(3, 2, dtype=torch.float64)
    summarize(model, lambda model, x: model(x).square().mean(), x, backend=backend)
    assert set(vars(model)) == before


def test_model_can_be_trained_on_after_a_measurement():
    """A training run with measurements in between is bit for bit the run without."""

    def train(measure):
        problem = everything()
        torch.manual_seed(0)
        optimizer = torch.optim.SGD(problem.model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(4):
            problem.model.train()
            optimizer.zero_grad()
            loss = F.cross_entropy(problem.model(problem.batch[0]), problem.batch[1])
            if measure:  # between forward and backward pass: the graph has to survive
                for backend in BACKENDS:
                    summarize(
                        problem.model,
                        problem.loss_fn,
                        problem.batch,
                        backend=backend,
                        order=2,
                        direction=optimizer,
                    )
            loss.backward()
            optimizer.step()
        return problem.model.state_dict()

    expected, actual = train(False), train(True)
    for name, value in expected.items():
        assert torch.equal(actual[name], value), name


def test_hooks_on_gradients_rest_and_are_put_back():
    """They see gradients that belong to no training step, and could change the derivatives."""
    problem = PROBLEMS["mlp_cross_entropy"]()
    model = problem.model
    called = []
    model[0].weight.register_hook(lambda grad: called.append("parameter") or 2 * grad)
    model[0].register_full_backward_hook(lambda *args: called.append("module"))
    model[2].register_full_backward_pre_hook(lambda *args: called.append("module, before"))
    model[2].weight.register_post_accumulate_grad_hook(lambda p: called.append("accumulated"))
    expected = summarize(*vars(PROBLEMS["mlp_cross_entropy"]()).values(), backend="nested")
    for backend in BACKENDS:
        actual = summarize(model, problem.loss_fn, problem.batch, backend=backend, order=2)
        torch.testing.assert_close(actual.gbar, expected.gbar)
    assert called == []
    problem.loss().backward()
    assert sorted(called) == ["accumulated", "module", "module, before", "parameter"]


def test_hooks_on_the_forward_pass_are_a_part_of_the_model():
    problem = PROBLEMS["mlp_cross_entropy"]()
    problem.model[0].register_forward_hook(lambda module, args, out: 2 * out)
    u = problem.direction()
    partition = make_partition(problem.model)
    expected = finite_differences(problem.model, problem.loss_fn, problem.batch, u, partition)
    for backend in EXACT:
        actual = summarize(
            problem.model,
            problem.loss_fn,
            problem.batch,
            partition=partition,
            direction=u,
            backend=backend,
        )
        assert max(worst_error(actual, expected)) < 1e-6


# --- modes of torch ------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("backend", BACKENDS)
def test_works_where_gradients_are_switched_off(backend, mode):
    problem = everything()
    data = (problem.model, problem.loss_fn, problem.batch)
    torch.manual_seed(1)
    expected = summarize(*data, backend=backend, order=2)
    trace = Trace(problem.model)
    with mode():
        torch.manual_seed(1)
        actual = summarize(*data, backend=backend, order=2)
    assert torch.equal(actual.Hbar, expected.Hbar)
    trace.torch = torch.get_rng_state()
    trace.assert_same(problem.model)


def test_data_and_direction_made_under_inference_mode():
    problem = PROBLEMS["mlp_cross_entropy"]()
    expected = summarize(
        problem.model,
        problem.loss_fn,
        problem.batch,
        direction=problem.direction(),
        backend="nested",
    )
    with torch.inference_mode():
        batch = tuple(x.clone() for x in problem.batch)
        u = {n: x.clone() for n, x in problem.direction().items()}
        actual = summarize(problem.model, problem.loss_fn, batch, direction=u, backend="nested")
    assert torch.equal(actual.Hbar, expected.Hbar)


def test_model_made_under_inference_mode_is_told_so():
    with torch.inference_mode():
        model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"'weight' was made under torch\.inference_mode"):
        summarize(model, lambda model, x: model(x).mean(), torch.ones(3, 2))


@pytest.mark.parametrize("where", ["outside", "inside"])
@pytest.mark.parametrize("backend", ["nested", "differences"])
def test_autocast_does_not_keep_old_parameters(backend, where):
    """An outer autocast remembers casts of the weights, which are out of date once they move."""
    problem = PROBLEMS["mlp_cross_entropy"]()
    model = problem.model.float()
    batch = (problem.batch[0].float(), problem.batch[1])

    def loss_fn(model, batch):
        if where == "outside":
            return F.cross_entropy(model(batch[0]).float(), batch[1])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(batch[0])
        return F.cross_entropy(out.float(), batch[1])

    exact = summarize(model, problem.loss_fn, batch, backend="nested")
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=where == "outside"):
        actual = summarize(model, loss_fn, batch, backend=backend, order=2)
    scale = exact.Hbar.diagonal().abs().sqrt()
    error = ((actual.Hbar - exact.Hbar) / scale[:, None] / scale[None, :]).abs().max()
    assert error < (0.6 if backend == "differences" else 0.1)
    assert actual.Hbar.dtype == torch.float32


# --- what a model may be made of -----------------------------------------------------------------


def check(model, loss_fn, batch, seed=None, backends=EXACT, step=1e-3):
    """Compare with central differences on a copy."""
    problem = Problem(model.double(), loss_fn, batch)
    u = problem.direction()
    partition = make_partition(model)
    expected = finite_differences(model, loss_fn, batch, u, partition, seed=seed, step=step)
    summaries = []
    for backend in backends:
        if seed is not None:
            torch.manual_seed(seed)
        actual = summarize(model, loss_fn, batch, partition=partition, direction=u, backend=backend)
        assert max(worst_error(actual, expected)) < 1e-6, backend
        summaries.append(actual)
    return summaries


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def batch_of(*shape, classes=3):
    return torch.randn(shape, dtype=torch.float64), torch.randint(classes, shape[:1])


def test_frozen_parameters_are_constants():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
    model[0].weight.requires_grad_(False)
    for summary in check(model, cross_entropy, batch_of(5, 3)):
        assert summary.names == ("0.bias", "2.weight", "2.bias")


def test_parameters_that_the_loss_does_not_reach_have_derivative_zero():
    model = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    loss_fn = lambda model, batch: F.cross_entropy(model[0](batch[0]), batch[1])  # noqa: E731
    batch = batch_of(5, 3)
    for backend in BACKENDS:
        summary = summarize(model.double(), loss_fn, batch, backend=backend)
        assert summary.gbar[2:].abs().max() == 0
        assert summary.Hbar[2:].abs().max() == summary.D3[2:].abs().max() == 0
        assert summary.gbar[:2].min() > 0


def test_a_parameter_used_twice_and_tied_weights():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 3)
            self.tied = nn.Linear(3, 3, bias=False)
            self.tied.weight = self.layer.weight

        def forward(self, x):
            return self.tied(torch.tanh(self.layer(torch.sin(self.layer(x)))))

    for summary in check(Twice(), cross_entropy, batch_of(5, 3)):
        assert summary.names == ("layer.weight", "layer.bias")


def test_in_place_operations():
    class InPlace(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 6), nn.Linear(6, 3)
            self.relu = nn.ELU(inplace=True)

        def forward(self, x):
            h = self.relu(self.a(x))
            h = F.gelu(h)
            h += 1.0
            h[:, :2] *= 2.0
            out = self.b(h)
            out.add_(x)
            return out

    check(InPlace(), cross_entropy, batch_of(5, 3), backends=["nested", "auto"])
    relu = nn.Sequential(nn.Linear(3, 6), nn.ReLU(inplace=True), nn.Linear(6, 3))
    check(relu, cross_entropy, batch_of(5, 3), step=4e-4)


def test_dropout_draws_the_same_numbers_in_every_evaluation():
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 3))
    batch = batch_of(5, 3)
    exact, *_ = check(model, cross_entropy, batch, seed=4)
    torch.manual_seed(4)
    rough = summarize(
        model,
        cross_entropy,
        batch,
        direction=Problem(model, cross_entropy, batch).direction(),
        backend="differences",  # evaluates the loss 2S + 1 times
    )
    torch.testing.assert_close(rough.Hbar, exact.Hbar, rtol=1e-5, atol=1e-5)


def test_integer_inputs_and_embeddings():
    class Words(nn.Module):
        def __init__(self, sparse=False, padding=None):
            super().__init__()
            self.embed = nn.Embedding(5, 3, sparse=sparse, padding_idx=padding)
            self.out = nn.Linear(3, 3)

        def forward(self, x):
            return self.out(torch.tanh(self.embed(x)).sum(1))

    batch = (torch.randint(5, (6, 2)), torch.randint(3, (6,)))
    check(Words(), cross_entropy, batch)
    for padding in (None, 0):
        model = Words(padding=padding).double()
        expected = summarize(model, cross_entropy, batch, backend="nested")
        model.embed.sparse = True
        for backend in (*EXACT, "differences"):
            actual = summarize(model, cross_entropy, batch, backend=backend, order=2)
            torch.testing.assert_close(actual.Hbar, expected.Hbar, rtol=1e-5, atol=1e-6)


def test_scalar_parameters_and_bare_ones():
    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(1.3))
            self.shift = nn.Parameter(torch.randn(1, 3))
            self.layer = nn.Linear(3, 3)

        def forward(self, x):
            return self.layer(torch.tanh(self.scale * x + self.shift)) * self.scale.exp()

    check(Bare(), cross_entropy, batch_of(5, 3))


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
def test_recurrent_networks(kind):
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = kind(2, 2, batch_first=True)
            self.out = nn.Linear(2, 3)

        def forward(self, x):
            return self.out(self.rnn(x)[0][:, -1])

    check(Recurrent(), cross_entropy, batch_of(4, 3, 2), backends=["nested"])
    (summary,) = check(Recurrent(), cross_entropy, batch_of(4, 3, 2), backends=["auto"])
    assert not summary.approximate


@pytest.mark.parametrize("parametrize", ["weight_norm", "spectral_norm", "orthogonal"])
def test_parametrised_weights(parametrize):
    layer = nn.Linear(3, 3).double()
    parametrized = getattr(nn.utils.parametrizations, parametrize)(layer)
    model = nn.Sequential(parametrized, nn.Tanh(), nn.Linear(3, 3)).double().eval()
    check(model, cross_entropy, batch_of(5, 3), backends=["nested"])


def test_encoder_layer_of_torch_in_both_modes():
    """Evaluation mode has a fast path without derivatives, which must not be taken."""
    for training in (True, False):
        layer = nn.TransformerEncoderLayer(4, 2, 5, dropout=0.0, batch_first=True).double()
        layer.train(training)
        loss_fn = lambda model, batch: model(batch[0]).square().mean()  # noqa: E731
        check(layer, loss_fn, batch_of(3, 2, 4), backends=["nested"])


def test_the_padding_row_of_an_embedding_is_a_constant():
    """As autograd has it: a direction that moves the row is as good as one that does not."""
    model = nn.Sequential(nn.Embedding(5, 3, padding_idx=1), nn.Flatten(), nn.Linear(6, 2)).double()
    torch.nn.init.normal_(model[0].weight)
    batch = (torch.tensor([[0, 1], [2, 3], [1, 4]]), torch.tensor([0, 1, 1]))
    moving = Problem(model, cross_entropy, batch).direction()
    resting = {name: value.clone() for name, value in moving.items()}
    resting["0.weight"][1] = 0
    expected = finite_differences(model, cross_entropy, batch, resting, make_partition(model))
    for backend in EXACT:
        actual = summarize(model, cross_entropy, batch, direction=moving, backend=backend)
        assert max(worst_error(actual, expected)) < 1e-6, backend


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointed_activations(use_reentrant):
    """Also with the gradient as direction, where autograd would not see parameters inside."""
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
            self.b = nn.Linear(4, 3)

        def forward(self, x):
            return self.b(checkpoint(self.a, x, use_reentrant=use_reentrant))

    model, batch = Checkpointed().double(), batch_of(5, 3)
    batch[0].requires_grad_(use_reentrant)
    plain = lambda model, batch: F.cross_entropy(model.b(model.a(batch[0])), batch[1])  # noqa: E731
    expected = summarize(model, plain, batch, backend="dense")
    for backend in BACKENDS:
        actual = summarize(model, cross_entropy, batch, backend=backend)
        tolerance = {"rtol": 1e-4, "atol": 1e-6} if backend == "differences" else {}
        for name in ("gbar", "Hbar", "D3"):
            torch.testing.assert_close(getattr(actual, name), getattr(expected, name), **tolerance)


@pytest.mark.parametrize("backend", BACKENDS)
def test_hooks_that_the_loss_puts_on_gradients_rest(backend):
    problem = PROBLEMS["mlp_cross_entropy"]()

    def hooked(model, batch):
        h = model[0](batch[0])
        handle = h.register_hook(lambda grad: 3 * grad)
        model[0].weight.register_hook(lambda grad: 5 * grad)
        handle.remove()
        h.register_hook(lambda grad: 7 * grad)
        return F.cross_entropy(model[2](model[1](h)), batch[1])

    expected = summarize(*vars(problem).values(), backend=backend)
    with pytest.warns(UserWarning, match="hooks are disabled"):
        actual = summarize(problem.model, hooked, problem.batch, backend=backend)
    assert actual.approximate
    for name in ("gbar", "Hbar", "D3"):
        torch.testing.assert_close(getattr(actual, name), getattr(expected, name))
    h = torch.zeros(2, requires_grad=True)
    h.register_hook(lambda grad: 3 * grad)
    assert torch.equal(torch.autograd.grad(h.sum(), h)[0], torch.full((2,), 3.0))


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_models_are_measured_as_they_are_written(backend):
    """The model as a whole, a layer inside, and a loss that calls the compiled one."""
    problem = PROBLEMS["mlp_cross_entropy"]()
    compiled = torch.compile(problem.model, backend="aot_eager")
    compiled(problem.batch[0])
    expected = summarize(*vars(problem).values(), backend=backend)
    losses = [problem.loss_fn, lambda model, batch: problem.loss_fn(compiled, batch)]
    for loss_fn in losses:
        actual = summarize(compiled, loss_fn, problem.batch, backend=backend)
        assert actual.names == expected.names
        assert torch.equal(actual.Hbar, expected.Hbar) and torch.equal(actual.D3, expected.D3)
    assert make_partition(nn.DataParallel(compiled)).names == expected.names
    problem.model[0].compile(backend="aot_eager")
    actual = summarize(*vars(problem).values(), backend=backend)
    assert torch.equal(actual.Hbar, expected.Hbar)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_torchscript_inside_a_model_can_be_measured():
    model = nn.Sequential(nn.Linear(3, 4), torch.jit.script(nn.Tanh()), nn.Linear(4, 3)).double()
    batch = batch_of(5, 3)
    with pytest.warns(UserWarning, match="Falling back from 'sweep'"):
        actual = summarize(model, cross_entropy, batch)
    plain = nn.Sequential(model[0], nn.Tanh(), model[2])
    expected = summarize(plain, cross_entropy, batch, backend="dense")
    assert actual.backend == "nested"
    torch.testing.assert_close(actual.Hbar, expected.Hbar)
    torch.testing.assert_close(actual.D3, expected.D3)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_a_batch_norm_in_torchscript_keeps_its_statistics():
    norm = torch.jit.script(nn.BatchNorm1d(4))
    model = nn.Sequential(nn.Linear(3, 4), norm, nn.Linear(4, 3)).double()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    with pytest.warns(UserWarning, match="Falling back from 'nested'"):
        summarize(model, cross_entropy, batch_of(5, 3))
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


def test_data_parallel_wrappers_are_looked_through():
    problem = PROBLEMS["mlp_cross_entropy"]()
    wrapped = nn.DataParallel(problem.model)
    expected = summarize(problem.model, problem.loss_fn, problem.batch, backend="nested")
    actual = summarize(wrapped, problem.loss_fn, problem.batch, backend="nested")
    assert actual.names == expected.names
    assert torch.equal(actual.Hbar, expected.Hbar)


def test_parameters_in_several_dtypes():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 3).double()

        def forward(self, x):
            return self.b(torch.tanh(self.a(x)).double())

    x, y = batch_of(5, 3)
    model = Mixed()
    exact = copy.deepcopy(model).double()
    expected = summarize(exact, cross_entropy, (x, y), backend="nested")
    for backend in BACKENDS:
        actual = summarize(model, cross_entropy, (x.float(), y), backend=backend, order=2)
        assert actual.Hbar.dtype == torch.float64
        torch.testing.assert_close(actual.Hbar, expected.Hbar, rtol=1e-2, atol=1e-3)
