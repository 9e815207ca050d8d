"""Where the direction comes from: the gradient, a mapping, or somebody's optimizer."""

import copy
from functools import partial

import pytest
import torch
from torch import nn, optim
from torch.utils.checkpoint import checkpoint

from newton_summary import make_partition, suggest_lrs, summarize
from newton_summary.probe.directions import find_direction
from newton_summary.probe.probe import Probe
from problems import PROBLEMS, Problem, cross_entropy, finite_differences, worst_error


@pytest.fixture
def problem():
    return PROBLEMS["mlp_cross_entropy"]()


def direction_of(problem, direction, batch=None):
    partition = make_partition(problem.model)
    batch = problem.batch if batch is None else batch
    with Probe(problem.model, problem.loss_fn, batch, partition) as probe:
        return find_direction(direction, probe)


def test_gradient_of_one_batch_is_bit_for_bit_that_of_autograd(problem):
    u = direction_of(problem, "gradient")
    grads = torch.autograd.grad(problem.loss(), list(problem.params.values()))
    for value, grad in zip(u.values(), grads, strict=True):
        assert torch.equal(value, grad)


def test_gradient_is_that_of_all_the_data(problem):
    x, y = problem.batch
    u = direction_of(problem, "gradient", [(x[:2], y[:2]), (x[2:], y[2:])])
    grads = torch.autograd.grad(problem.loss(), list(problem.params.values()))
    for value, grad in zip(u.values(), grads, strict=True):
        torch.testing.assert_close(value, grad, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradient_of_many_batches_is_added_up_in_float32(dtype):
    """In the narrow type itself, adding a thousand equal numbers ends far off, or overflows."""
    model = nn.Linear(2, 1, bias=False).to(dtype)
    batches = [torch.ones(64, 2, dtype=dtype)] * 1000
    loss_fn = lambda model, x: model(x).mean()  # noqa: E731
    partition = make_partition(model)

    def tuple_loss(model, batch):
        return loss_fn(model, batch[0])

    with Probe(model, tuple_loss, [(batch,) for batch in batches], partition) as probe:
        u = find_direction("gradient", probe)
    torch.testing.assert_close(u["weight"], torch.ones(1, 2, dtype=dtype), rtol=1e-2, atol=0)
    assert u["weight"].dtype == dtype


# --- the gradient that the sweep finds itself -----------------------------------------------------


class Unusual(nn.Module):
    """Dropout, a checkpoint, a batch norm; parameters tied, frozen, unused, and in sparse rows."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(6, 4, sparse=True)
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.tied = nn.Linear(4, 4, bias=False)
        self.tied.weight = self.first.weight
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.unused = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(()))
        self.dropout = nn.Dropout(0.3)

    def forward(self, words):
        h = self.dropout(self.embedding(words).mean(1))
        h = checkpoint(lambda h: torch.tanh(self.first(h)), h, use_reentrant=False)
        return self.scale * self.tied(torch.sigmoid(self.frozen(self.norm(self.dropout(h)))))


def unusual():
    torch.manual_seed(0)
    model = Unusual().double()
    return Problem(model, cross_entropy, (torch.randint(6, (8, 3)), torch.randint(4, (8,))))


EACH = {**PROBLEMS, "unusual": unusual}


def plain_gradient(problem):
    """Return the gradient by torch alone, from the random numbers that are next; draw none."""
    state, buffers = torch.get_rng_state(), copy.deepcopy(problem.model.state_dict())
    grads = torch.autograd.grad(
        problem.loss(), list(problem.params.values()), materialize_grads=True
    )
    torch.set_rng_state(state)
    problem.model.load_state_dict(buffers)
    return {name: g.to_dense() for name, g in zip(problem.params, grads, strict=True)}


def assert_same(actual, expected, rtol=1e-12):
    for name in ("loss", "gbar", "Hbar", "D3"):
        a, b = getattr(actual, name), getattr(expected, name)
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            torch.testing.assert_close(a, b, rtol=rtol, atol=rtol * float(b.abs().max()))


@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize("name", EACH)
def test_one_evaluation_gives_the_gradient_and_the_summary_along_it(name, order):
    problem, calls = EACH[name](), []
    u = plain_gradient(problem)

    def counted(model, batch):
        calls.append(batch)
        return problem.loss_fn(model, batch)

    actual = summarize(problem.model, counted, problem.batch, order=order)
    assert len(calls) == 1 and actual.backend == "sweep"
    expected = summarize(problem.model, problem.loss_fn, problem.batch, order=order, direction=u)
    assert_same(actual, expected)
    torch.testing.assert_close(actual.gbar.sum(), sum(g.square().sum() for g in u.values()))


@pytest.mark.parametrize("spec", ["trivial", "weights-biases", "discrete"])
def test_along_its_own_gradient_in_other_groups(problem, spec):
    given = (problem.model, problem.loss_fn, problem.batch)
    expected = summarize(*given, partition=spec, direction=plain_gradient(problem))
    assert_same(summarize(*given, partition=spec), expected)


def test_a_batch_that_is_split_moves_along_the_gradient_of_the_whole():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    batch = torch.randn(256, 4).double(), torch.randint(3, (256,))
    problem = Problem(model, cross_entropy, batch)
    actual = summarize(model, cross_entropy, batch, stack_limit=2**13, stderr=True)
    assert len(actual.parts) > 1
    given = {"direction": plain_gradient(problem), "stack_limit": 2**13}
    assert_same(actual, summarize(model, cross_entropy, batch, **given))
    assert_same(actual, summarize(model, cross_entropy, batch), rtol=1e-10)


@pytest.mark.filterwarnings("ignore:Falling back")
def test_what_the_sweep_cannot_measure_moves_along_the_gradient_too(problem):
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        def backward(ctx, grad):
            return 3 * ctx.saved_tensors[0] ** 2 * grad

    custom = Problem(problem.model, lambda m, b: Cube.apply(cross_entropy(m, b)), problem.batch)
    plain = Problem(problem.model, lambda m, b: cross_entropy(m, b) ** 3, problem.batch)
    actual = summarize(custom.model, custom.loss_fn, custom.batch)
    assert actual.backend == "nested"
    given = (plain.model, plain.loss_fn, plain.batch)
    assert_same(actual, summarize(*given, direction=plain_gradient(plain)))


def test_autocast_and_no_grad_around_its_own_gradient():
    problem = PROBLEMS["mlp_cross_entropy"]()
    problem.model.float()
    problem.batch = problem.batch[0].float(), problem.batch[1]
    given = (problem.model, problem.loss_fn, problem.batch)
    with torch.autocast("cpu", torch.bfloat16):
        u = plain_gradient(problem)
        with torch.no_grad():
            assert_same(summarize(*given), summarize(*given, direction=u), rtol=1e-2)


@pytest.mark.parametrize("how", [{"microbatch": 4}, {"backend": "nested"}])
def test_elsewhere_the_gradient_is_computed_before(problem, how):
    calls = []

    def counted(model, batch):
        calls.append(batch)
        return problem.loss_fn(model, batch)

    expected = summarize(problem.model, problem.loss_fn, problem.batch)
    assert_same(summarize(problem.model, counted, problem.batch, **how), expected, rtol=1e-10)
    assert len(calls) > 1


def test_several_batches_move_along_the_gradient_of_all(problem):
    x, y = problem.batch
    batches = [(x[:2], y[:2]), (x[2:], y[2:])]
    given = {"direction": plain_gradient(problem)}
    expected = summarize(problem.model, problem.loss_fn, problem.batch, **given)
    assert_same(summarize(problem.model, problem.loss_fn, batches), expected, rtol=1e-10)


def test_mapping_is_taken_as_it_is(problem):
    given = problem.direction()
    u = direction_of(problem, given)
    assert list(u) == list(problem.params)
    for name in given:
        assert torch.equal(u[name], given[name])
    shuffled = dict(reversed(given.items()))
    assert list(direction_of(problem, shuffled)) == list(problem.params)


def test_names_of_a_compiled_model_are_understood(problem):
    compiled = torch.compile(problem.model)
    u = {name: torch.randn_like(p) for name, p in compiled.named_parameters()}
    found = direction_of(problem, u)
    assert all(found[name.removeprefix("_orig_mod.")] is not None for name in u)
    assert len(found) == len(u)


def test_zero_direction_gives_zeros(problem):
    zeros = {name: torch.zeros_like(p) for name, p in problem.params.items()}
    for backend in ("nested", "sweep", "differences"):
        summary = summarize(
            problem.model, problem.loss_fn, problem.batch, direction=zeros, backend=backend
        )
        assert summary.gbar.abs().max() == summary.Hbar.abs().max() == summary.D3.abs().max() == 0


@pytest.mark.parametrize("backend", ["nested", "differences"])
def test_the_parameters_themselves_are_a_direction(problem, backend):
    """Their memory is moved by the differences, and the direction must not move along."""
    copied = {name: p.detach().clone() for name, p in problem.params.items()}
    partition = make_partition(problem.model)
    expected = finite_differences(problem.model, problem.loss_fn, problem.batch, copied, partition)
    for direction in (
        dict(problem.model.named_parameters()),
        {name: p.detach() for name, p in problem.params.items()},
        {name: p.data.view(p.shape) for name, p in problem.params.items()},
    ):
        actual = summarize(
            problem.model,
            problem.loss_fn,
            problem.batch,
            partition=partition,
            direction=direction,
            backend=backend,
        )
        assert max(worst_error(actual, expected)) < 1e-5


OPTIMIZERS = {
    "SGD": lambda params: optim.SGD(params, lr=0.1),
    "SGD, momentum": lambda params: optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01),
    "SGD, nesterov": lambda params: optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
    "Adam": lambda params: optim.Adam(params, lr=0.01),
    "Adam, amsgrad": lambda params: optim.Adam(params, lr=0.01, amsgrad=True),
    "Adam, tensor lr": lambda params: optim.Adam(params, lr=torch.tensor(0.01)),
    "AdamW": lambda params: optim.AdamW(params, lr=0.01, weight_decay=0.1),
    "RMSprop": lambda params: optim.RMSprop(params, lr=0.01, momentum=0.5, centered=True),
    "Adagrad": lambda params: optim.Adagrad(params, lr=0.1),
    "NAdam": lambda params: optim.NAdam(params, lr=0.01),
}


def take_step(model, loss_fn, batch, optimizer):
    optimizer.zero_grad()
    loss_fn(model, batch).backward()
    optimizer.step()


def state_of(optimizer):
    """A deep copy of everything that an optimizer holds, with the identities of what it holds."""
    state = {
        id(p): {k: v.clone() if torch.is_tensor(v) else copy.deepcopy(v) for k, v in values.items()}
        for p, values in optimizer.state.items()
    }
    identities = {id(p): {k: id(v) for k, v in vs.items()} for p, vs in optimizer.state.items()}
    groups = [
        {k: [id(p) for p in v] if k == "params" else copy.deepcopy(v) for k, v in group.items()}
        for group in optimizer.param_groups
    ]
    return state, identities, groups


def same(a, b):
    if torch.is_tensor(a):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b


@pytest.mark.parametrize("steps_before", [0, 3])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_direction_of_an_optimizer_is_the_step_it_would_take(problem, kind, steps_before):
    optimizer = OPTIMIZERS[kind](problem.model.parameters())
    for _ in range(steps_before):
        take_step(problem.model, problem.loss_fn, problem.batch, optimizer)
    optimizer.zero_grad()

    twin_model, twin_optimizer = copy.deepcopy((problem.model, optimizer))
    before = {name: p.detach().clone() for name, p in twin_model.named_parameters()}
    take_step(twin_model, problem.loss_fn, problem.batch, twin_optimizer)
    expected = {name: before[name] - p.detach() for name, p in twin_model.named_parameters()}

    held = state_of(optimizer)
    attributes = dict(optimizer.__dict__)
    u = direction_of(problem, optimizer)
    for name in expected:
        assert torch.equal(u[name], expected[name])
        assert torch.equal(problem.params[name], before[name])
        assert problem.params[name].grad is None
    assert same(state_of(optimizer), held)
    assert optimizer.__dict__.keys() == attributes.keys()
    assert all(optimizer.__dict__[k] is v for k, v in attributes.items())

    # And the optimizer goes on as if nothing had been.
    take_step(problem.model, problem.loss_fn, problem.batch, optimizer)
    for name, p in twin_model.named_parameters():
        assert torch.equal(problem.params[name], p)


def test_summary_along_an_optimizer_is_the_summary_along_its_step(problem):
    optimizer = optim.Adam(problem.model.parameters(), lr=0.01)
    u = direction_of(problem, optimizer)
    data = (problem.model, problem.loss_fn, problem.batch)
    actual = summarize(*data, direction=optimizer, backend="nested")
    expected = summarize(*data, direction=u, backend="nested")
    assert torch.equal(actual.Hbar, expected.Hbar)


def test_hooks_and_schedulers_do_not_notice(problem):
    optimizer = optim.SGD(problem.model.parameters(), lr=0.1, momentum=0.9)
    scheduler = optim.lr_scheduler.StepLR(optimizer, step_size=1)
    called = []
    optimizer.register_step_pre_hook(lambda *args: called.append("before"))
    optimizer.register_step_post_hook(lambda *args: called.append("after"))
    wrapped = optimizer.step
    for p in problem.params.values():
        p.grad = torch.ones_like(p)
    grads = [p.grad for p in problem.params.values()]
    direction_of(problem, optimizer)
    assert called == []
    assert optimizer.step is wrapped
    assert not getattr(optimizer, "_opt_called", False)
    assert scheduler.last_epoch == 0
    for p, grad in zip(problem.params.values(), grads, strict=True):
        assert p.grad is grad
        assert torch.equal(grad, torch.ones_like(grad))
    optimizer.step()
    assert called == ["before", "after"]


def test_optimizers_that_write_into_their_groups(problem):
    """As schedule-free ones do, which count their steps there."""

    class Counting(optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                group["lr"] *= 0.5
                group["seen"].append(len(group["params"]))
            return super().step(closure)

    optimizer = Counting(problem.model.parameters(), lr=0.1)
    optimizer.param_groups[0]["seen"] = []
    grads = direction_of(problem, "gradient")
    for _ in range(2):
        u = direction_of(problem, optimizer)
        torch.testing.assert_close(u["0.weight"], 0.05 * grads["0.weight"])
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert optimizer.param_groups[0]["seen"] == []


def test_a_step_that_somebody_has_wrapped_is_not_called(problem):
    optimizer = optim.SGD(problem.model.parameters(), lr=0.1)
    called = []
    optimizer.step = lambda closure=None: called.append(1)
    u = direction_of(problem, optimizer)
    assert called == []
    assert u["0.weight"].abs().max() > 0


def test_groups_with_their_own_rates_and_frozen_parameters(problem):
    problem.model[0].bias.requires_grad_(False)
    optimizer = optim.SGD(
        [
            {"params": problem.model[0].parameters(), "lr": 0.5},
            {"params": problem.model[2].parameters(), "lr": 0.0},
        ]
    )
    u = direction_of(problem, optimizer)
    assert "0.bias" not in u
    grads = direction_of(problem, "gradient")
    torch.testing.assert_close(u["0.weight"], 0.5 * grads["0.weight"])
    assert torch.equal(u["2.weight"], torch.zeros(3, 4).double())


def test_optimizer_that_fails_is_left_as_it_was(problem):
    class Failing(optim.SGD):
        def step(self, closure=None):
            super().step()
            self.count = 1
            raise ArithmeticError("too bad")

    optimizer = Failing(problem.model.parameters(), lr=0.1, momentum=0.9)
    before = {name: p.detach().clone() for name, p in problem.params.items()}
    held = state_of(optimizer)
    with pytest.raises(ArithmeticError):
        summarize(problem.model, problem.loss_fn, problem.batch, direction=optimizer)
    assert same(state_of(optimizer), held)
    assert not hasattr(optimizer, "count")
    for name, p in problem.params.items():
        assert torch.equal(p, before[name])
        assert p.grad is None


def test_lbfgs_needs_a_closure(problem):
    optimizer = optim.LBFGS(problem.model.parameters())
    held = state_of(optimizer)
    remedy = (
        r"LBFGS cannot give a direction.*closure.*another optimizer, or pass summarize\(.*mapping"
    )
    for measure in (
        partial(summarize, direction=optimizer),
        partial(suggest_lrs, optimizer=optimizer),
    ):
        with pytest.raises(ValueError, match=remedy):
            measure(problem.model, problem.loss_fn, problem.batch)
    assert same(state_of(optimizer), held)


def test_a_closure_that_is_called_though_it_may_be_none(problem):
    class Sharp(optim.SGD):
        def step(self, closure=None):
            return closure()

    with pytest.raises(ValueError, match="Sharp cannot give a direction: its step needs a closure"):
        direction_of(problem, Sharp(problem.model.parameters()))


def test_another_error_of_the_step_is_its_own(problem):
    optimizer = optim.Adam(problem.model.parameters())
    optimizer.param_groups[0]["lr"] = "1e-3"
    with pytest.raises(TypeError, match="'str'"):
        direction_of(problem, optimizer)


def test_optimizer_of_another_model(problem):
    other = optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"does not hold parameter '0\.weight'"):
        summarize(problem.model, problem.loss_fn, problem.batch, direction=other)


def test_graphs_made_before_remain_valid(problem):
    """Parameters that are moved and put back count no new version."""
    loss = problem.loss()
    optimizer = optim.SGD(problem.model.parameters(), lr=0.1)
    data = (problem.model, problem.loss_fn, problem.batch)
    summarize(*data, direction=optimizer, backend="differences", order=2)
    loss.backward()


# --- errors --------------------------------------------------------------------------------------


def wrong(problem, change):
    u = problem.direction()
    change(u)
    return u


ERRORS = {
    "wrong name": (lambda u: u.update({"0.wieght": u["0.weight"]}), ["0.wieght", "'0.weight'"]),
    "missing": (lambda u: u.pop("2.bias"), ["lacks parameter '2.bias'", r"(3,)"]),
    "shape": (lambda u: u.update({"0.bias": torch.ones(5)}), ["'0.bias' has shape (5,)", "(4,)"]),
    "dtype": (
        lambda u: u.update({"0.bias": u["0.bias"].float()}),
        ["'0.bias' is torch.float32", "torch.float64", ".to("],
    ),
    "not a tensor": (lambda u: u.update({"0.bias": None}), ["'0.bias' has type NoneType", "(4,)"]),
    "not finite": (
        lambda u: u["2.weight"].fill_(float("nan")),
        ["'2.weight'", "non-finite entries"],
    ),
    "infinite": (
        lambda u: u["2.weight"][0].fill_(float("inf")),
        ["'2.weight'", "non-finite entries"],
    ),
}


@pytest.mark.parametrize("kind", ERRORS)
def test_wrong_direction_names_the_culprit(problem, kind):
    change, fragments = ERRORS[kind]
    before = {name: p.detach().clone() for name, p in problem.params.items()}
    with pytest.raises((ValueError, TypeError)) as caught:
        summarize(problem.model, problem.loss_fn, problem.batch, direction=wrong(problem, change))
    for fragment in fragments:
        assert fragment in str(caught.value)
    for name, p in problem.params.items():
        assert torch.equal(p, before[name])


def test_sparse_adam_takes_its_own_step():
    """It refuses dense gradients, and moves no row whose gradient is zero."""
    torch.manual_seed(0)
    model = nn.Embedding(5, 3, sparse=True).double()
    optimizer = optim.SparseAdam(model.parameters(), lr=0.01)
    data = (model, lambda model, x: model(x).square().mean(), torch.tensor([1, 3]))
    take_step(*data, optimizer)
    summary = summarize(*data, direction=optimizer, order=1)
    before = model.weight.detach().clone()
    take_step(*data, optimizer)
    torch.testing.assert_close(
        summary.gbar[0], (before * (before - model.weight))[[1, 3]].sum() / 3
    )
    assert suggest_lrs(*data, optimizer).groups[0].verdict == "raise"


def test_adam_divides_by_zero_in_float16():
    model, x = nn.Linear(2, 1).half(), torch.tensor([[0.0, 1.0]]).half()
    data = (model, lambda model, x: model(x).float().square().mean(), x)
    with pytest.raises(ValueError, match=r"'weight' has non-finite.*eps of Adam.*use eps=1e-4"):
        suggest_lrs(*data, optim.Adam(model.parameters()))
    assert suggest_lrs(*data, optim.Adam(model.parameters(), eps=1e-4)).groups


def test_frozen_and_tied_names_are_explained(problem):
    transformer = PROBLEMS["transformer"]()
    u = transformer.direction()
    u["head.weight"] = u["embed.weight"]
    with pytest.raises(ValueError, match=r"'head\.weight', which is tied to 'embed\.weight'"):
        summarize(transformer.model, transformer.loss_fn, transformer.batch, direction=u)
    u = problem.direction()
    problem.model[0].bias.requires_grad_(False)
    with pytest.raises(ValueError, match=r"'0\.bias', which is frozen"):
        summarize(problem.model, problem.loss_fn, problem.batch, direction=u)


@pytest.mark.parametrize("direction", ["gradeint", "newton"])
def test_unknown_name_of_a_direction(problem, direction):
    with pytest.raises(ValueError, match=rf"Unknown direction '{direction}'.*'gradient'"):
        summarize(problem.model, problem.loss_fn, problem.batch, direction=direction)


@pytest.mark.parametrize("direction", [3, None, [torch.ones(2)]])
def test_direction_of_another_type(problem, direction):
    with pytest.raises(TypeError, match=r"mapping from parameter name to tensor, or an optimizer"):
        summarize(problem.model, problem.loss_fn, problem.batch, direction=direction)
