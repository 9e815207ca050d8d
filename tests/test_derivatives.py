"""Every backend against the full derivative and central differences; tensors of any order."""

import copy
import functools
import math
import warnings
from itertools import permutations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from newton_summary import derivative_tensor, make_partition, summarize, taylor_terms
from newton_summary.derivatives import BACKENDS
from newton_summary.derivatives.dense import full_derivatives
from newton_summary.derivatives.nested import attention, count_backward_passes
from newton_summary.errors import CannotDifferentiate
from problems import (
    PROBLEMS,
    contract_by_hand,
    finite_differences,
    partition_of,
    partition_specs,
    worst_error,
)

EXACT = [name for name in BACKENDS if name not in ("dense", "differences")]
CASES = [(name, spec) for name in PROBLEMS for spec in partition_specs(PROBLEMS[name]().model)]


@functools.cache
def prepared(name):
    """A problem with a direction and its full derivatives of order 1 to 3."""
    problem = PROBLEMS[name]()
    return problem, problem.direction(), full_derivatives(problem.loss, problem.params, 3)[1]


def expected_summary(name, spec):
    problem, u, full = prepared(name)
    return contract_by_hand(full, problem.params, u, partition_of(problem, spec))


def measure(name, spec, backend, **options):
    problem, u, _ = prepared(name)
    partition = partition_of(problem, spec)
    return summarize(
        problem.model,
        problem.loss_fn,
        problem.batch,
        partition=partition,
        direction=u,
        backend=backend,
        **options,
    )


# --- summaries -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "spec"), CASES)
@pytest.mark.parametrize("backend", EXACT)
def test_exact_backend_equals_dense_derivatives(backend, name, spec):
    """In float64, to 1e-10, for every problem and every partition."""
    actual = measure(name, spec, backend)
    assert max(worst_error(actual, expected_summary(name, spec))) < 1e-10
    assert actual.backend == backend
    assert not actual.approximate
    assert torch.equal(actual.Hbar, actual.Hbar.T)


@pytest.mark.parametrize(("name", "spec"), CASES)
def test_nested_equals_central_differences(name, spec):
    """Of native gradients, with code of their own, to the accuracy of the differences."""
    problem, u, _ = prepared(name)
    expected = finite_differences(
        problem.model, problem.loss_fn, problem.batch, u, partition_of(problem, spec)
    )
    errors = worst_error(measure(name, spec, "nested"), expected)
    assert errors[0] < 1e-12
    assert errors[1] < 1e-7
    assert errors[2] < 1e-6


@pytest.mark.parametrize(
    ("name", "spec"), [c for c in CASES if c[0] in ("mlp_cross_entropy", "quadratic", "rosenbrock")]
)
def test_dense_backend_contracts_the_full_derivative(name, spec):
    actual = measure(name, spec, "dense")
    assert max(worst_error(actual, expected_summary(name, spec))) < 1e-12
    assert actual.backend == "dense"


@pytest.mark.parametrize(("name", "spec"), CASES)
def test_differences_are_close_and_say_that_they_are_approximate(name, spec):
    actual = measure(name, spec, "differences")
    errors = worst_error(actual, expected_summary(name, spec))
    assert errors[0] < 1e-12
    assert max(errors) < 2e-5
    assert actual.approximate


@pytest.mark.parametrize(
    ("backend", "name"),
    [(b, n) for b in BACKENDS for n in PROBLEMS if b != "dense" or n == "mlp_cross_entropy"],
)
def test_float32_is_as_good_as_float32_allows(backend, name):
    problem, u, full = prepared(name)
    model = copy.deepcopy(problem.model).float()
    batch = problem.batch
    if batch is not None:
        batch = tuple(x.float() if x.is_floating_point() else x for x in batch)
    partition = make_partition(model)
    actual = summarize(
        model,
        problem.loss_fn,
        batch,
        partition=partition,
        direction={n: x.float() for n, x in u.items()},
        backend=backend,
    )
    assert actual.gbar.dtype == actual.Hbar.dtype == actual.D3.dtype == torch.float32
    expected = contract_by_hand(full, problem.params, u, partition)
    errors = worst_error(actual, expected)
    assert errors[0] < 1e-5
    if backend != "differences":
        assert max(errors) < 1e-4
    elif name != "convnet":  # the step crosses kinks of the max-pooling
        assert errors[1] < 0.03 and errors[2] < 0.1


@pytest.mark.parametrize("backend", BACKENDS)
def test_bfloat16_parameters_give_float32_results(backend):
    problem, u, full = prepared("mlp_cross_entropy")
    model = copy.deepcopy(problem.model).bfloat16()
    x, y = problem.batch
    partition = make_partition(model)
    actual = summarize(
        model,
        problem.loss_fn,
        (x.bfloat16(), y),
        partition=partition,
        direction={n: v.bfloat16() for n, v in u.items()},
        backend=backend,
        order=2,
    )
    assert actual.gbar.dtype == actual.Hbar.dtype == actual.loss.dtype == torch.float32
    errors = worst_error(actual, contract_by_hand(full, problem.params, u, partition))
    assert errors[0] < 0.03
    assert errors[1] < (0.5 if backend == "differences" else 0.03)


def test_quadratic_has_its_matrix_and_no_third_derivative():
    problem, u, _ = prepared("quadratic")
    flat = torch.cat([x.flatten() for x in u.values()])
    A = problem.model.A
    for backend in EXACT:
        summary = measure("quadratic", "discrete", backend)
        torch.testing.assert_close(summary.Hbar, flat[:, None] * A * flat[None, :])
        assert torch.equal(summary.D3, torch.zeros(8, dtype=torch.float64))


def test_squared_error_has_no_third_derivative_in_the_last_layer():
    for backend in EXACT:
        summary = measure("mlp_squared_error", "canonical", backend)
        assert summary.D3[-2:].abs().max() < 1e-14
        assert summary.D3[:-2].abs().min() > 1e-4


@pytest.mark.parametrize("backend", BACKENDS)
def test_lower_orders_leave_out_the_rest(backend):
    full = measure("mlp_cross_entropy", "canonical", backend)
    first = measure("mlp_cross_entropy", "canonical", backend, order=1)
    second = measure("mlp_cross_entropy", "canonical", backend, order=2)
    assert (first.order, second.order, full.order) == (1, 2, 3)
    assert first.Hbar is None and first.D3 is None and second.D3 is None
    for lower in (first, second):
        torch.testing.assert_close(lower.gbar, full.gbar, rtol=1e-12, atol=0)
    torch.testing.assert_close(second.Hbar, full.Hbar, rtol=1e-12, atol=1e-14)
    problem = prepared("mlp_cross_entropy")[0]
    for summary in (first, second, full):
        torch.testing.assert_close(summary.loss, problem.loss().detach())
        assert summary.num_samples == 7


@pytest.mark.parametrize("backend", BACKENDS)
def test_along_the_gradient_gbar_is_its_squared_norm(backend):
    problem = prepared("mlp_cross_entropy")[0]
    grads = torch.autograd.grad(problem.loss(), list(problem.params.values()))
    summary = summarize(problem.model, problem.loss_fn, problem.batch, backend=backend)
    expected = torch.stack([g.square().sum() for g in grads])
    torch.testing.assert_close(summary.gbar, expected, rtol=1e-12, atol=0)


class Square(torch.autograd.Function):
    """x^2 with a backward pass that can itself be differentiated as often as `times` says."""

    @staticmethod
    def forward(ctx, x, times):
        ctx.save_for_backward(x)
        ctx.times = times
        return x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        if ctx.times == 1:
            return (2 * x * grad).detach(), None  # as if by a kernel that torch does not know
        return SquareBackward.apply(x, grad, ctx.times - 1), None


class SquareBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, grad, times):
        ctx.save_for_backward(x, grad)
        ctx.times = times
        return 2 * x * grad

    @staticmethod
    def backward(ctx, grad2):
        x, grad = ctx.saved_tensors
        if ctx.times == 1:
            return (2 * grad * grad2).detach(), (2 * x * grad2).detach(), None
        return 2 * grad * grad2, 2 * x * grad2, None


class SquareOnce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        return 2 * ctx.saved_tensors[0] * grad


def custom_loss(square):
    def loss_fn(model, batch):
        x, y = batch
        return nn.functional.cross_entropy(square(model(x)), y)

    return loss_fn


def custom_last(square):
    """The gradient that the custom function receives is a constant, as with a fused loss."""
    return lambda model, batch: square(model(batch[0])).mean()


CUSTOM = {
    "no second derivative": lambda x: Square.apply(x, 1),
    "marked once differentiable": SquareOnce.apply,
    "no third derivative": lambda x: Square.apply(x, 2),
}


@pytest.mark.parametrize("loss", [custom_loss, custom_last], ids=["inside", "last"])
@pytest.mark.parametrize("square", CUSTOM.values(), ids=CUSTOM)
def test_custom_functions_are_never_silently_wrong(square, loss):
    """torch.autograd.grad leaves out what it cannot differentiate, without a word."""
    problem = PROBLEMS["mlp_cross_entropy"]()
    data = (problem.model, loss(square), problem.batch)
    with pytest.raises(CannotDifferentiate, match=r"custom function Square\w*Backward"):
        summarize(*data, backend="nested")
    with pytest.raises(CannotDifferentiate, match="custom function"):
        derivative_tensor(*data, order=3)
    with pytest.raises(CannotDifferentiate, match="custom function"):
        taylor_terms(*data, order=3)
    with pytest.warns(UserWarning, match="Falling back"):
        summary = summarize(*data)
    assert summary.backend == "differences"
    assert summary.approximate
    assert summary.reason and summary.reason in str(summary)
    same_loss = loss(torch.square)
    exact = summarize(problem.model, same_loss, problem.batch, backend="nested")
    torch.testing.assert_close(summary.Hbar, exact.Hbar, rtol=1e-5, atol=1e-7)


class Double(torch.autograd.Function):
    """Linear, so its gradient is a constant, as that of a collective operation may be."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


def test_linear_custom_functions_are_exact():
    problem = PROBLEMS["mlp_cross_entropy"]()
    data = (lambda model, batch: Double.apply(problem.loss_fn(model, batch)), problem.batch)
    actual = summarize(problem.model, *data, backend="nested", direction=problem.direction())
    expected = measure("mlp_cross_entropy", "canonical", "nested")
    torch.testing.assert_close(actual.Hbar, 2 * expected.Hbar)
    torch.testing.assert_close(actual.D3, 2 * expected.D3)


def test_custom_functions_that_can_be_differentiated_are_exact():
    problem = PROBLEMS["mlp_cross_entropy"]()
    same = custom_loss(torch.square)
    expected = summarize(problem.model, same, problem.batch, backend="nested")
    for square, order in ((lambda x: Square.apply(x, 3), 3), (lambda x: Square.apply(x, 2), 2)):
        data = (problem.model, custom_loss(square), problem.batch)
        actual = summarize(*data, backend="nested", order=order)
        torch.testing.assert_close(actual.Hbar, expected.Hbar, rtol=1e-12, atol=1e-14)
    actual = summarize(
        problem.model, custom_loss(lambda x: Square.apply(x, 3)), problem.batch, backend="nested"
    )
    torch.testing.assert_close(actual.D3, expected.D3, rtol=1e-12, atol=1e-14)


# --- tensors of any order ------------------------------------------------------------------------


@pytest.fixture
def backward_passes(monkeypatch):
    """Count the calls of torch.autograd.grad, and remember what each differentiates by."""
    calls = []
    grad = torch.autograd.grad

    def spy(outputs, inputs, *args, **kwargs):
        calls.append(list(inputs))
        return grad(outputs, inputs, *args, **kwargs)

    monkeypatch.setattr(torch.autograd, "grad", spy)
    return calls


def tensor_of(name, spec, order):
    problem, u, _ = prepared(name)
    partition = partition_of(problem, spec)
    return derivative_tensor(
        problem.model, problem.loss_fn, problem.batch, order=order, partition=partition, direction=u
    )


SMALL = [
    ("mlp_cross_entropy", "canonical"),
    ("mlp_squared_error", "blocks-2"),
    ("layer_norm", "chunks-2"),
    ("batch_norm_1d", "weights-biases"),
    ("quadratic", "index sets"),
    ("rosenbrock", "discrete"),
    ("transformer", "regex"),
]


@pytest.mark.parametrize(("name", "spec"), SMALL)
@pytest.mark.parametrize("order", [1, 2, 3])
def test_tensor_is_the_contraction_of_the_full_derivative(name, spec, order):
    problem, u, full = prepared(name)
    partition = partition_of(problem, spec)
    S, P = len(partition), len(full[0])
    IU = torch.zeros(S, P, dtype=torch.float64)
    position = 0
    for parameter, p in problem.params.items():
        label = partition.labels[parameter]
        label = torch.full(p.shape, label) if isinstance(label, int) else label
        for s, value in zip(label.flatten().tolist(), u[parameter].flatten(), strict=True):
            IU[s, position] = value
            position += 1
    expected = full[order - 1]
    for _ in range(order):  # contracts the first dimension, and puts the group last
        expected = torch.tensordot(expected, IU, dims=([0], [1]))
    actual = tensor_of(name, spec, order)
    assert actual.shape == (S,) * order
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("name", "spec"), SMALL)
@pytest.mark.parametrize("order", [2, 3, 4])
def test_tensor_is_symmetric(name, spec, order):
    tensor = tensor_of(name, spec, order)
    for dims in permutations(range(order)):
        assert torch.equal(tensor, tensor.permute(dims))


@pytest.mark.parametrize(("name", "spec"), SMALL)
def test_summary_is_the_tensors_first_entries(name, spec):
    summary = measure(name, spec, "nested")
    torch.testing.assert_close(summary.gbar, tensor_of(name, spec, 1), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(summary.Hbar, tensor_of(name, spec, 2), rtol=1e-12, atol=1e-12)
    third = tensor_of(name, spec, 3)
    diagonal = torch.stack([third[s, s, s] for s in range(len(third))])
    torch.testing.assert_close(summary.D3, diagonal, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("name", "spec"), SMALL)
def test_order_four_is_the_derivative_of_order_three(name, spec):
    """Central differences of order 4 of the third tensor, on moved copies of the model."""
    problem, u, _ = prepared(name)
    partition = partition_of(problem, spec)
    actual = tensor_of(name, spec, 4)
    h = 1e-3
    for s in range(len(partition)):
        thirds = {}
        for k in (-2, -1, 1, 2):
            moved = copy.deepcopy(problem.model)
            params = dict(moved.named_parameters())
            with torch.no_grad():
                for parameter, part in partition.restrict(u, s).items():
                    params[parameter] += k * h * part
            thirds[k] = derivative_tensor(
                moved,
                problem.loss_fn,
                problem.batch,
                order=3,
                partition=partition_specs(moved)[spec],
                direction=u,
            )
        expected = (thirds[-2] - 8 * thirds[-1] + 8 * thirds[1] - thirds[2]) / (12 * h)
        size = max(float(actual.abs().max()), 1.0)
        torch.testing.assert_close(actual[..., s], expected, rtol=1e-6, atol=1e-6 * size)


@pytest.mark.parametrize(("S", "order"), [(1, 4), (2, 4), (4, 2), (4, 3), (6, 3), (10, 2)])
def test_count_of_backward_passes_stays_below_table_1(S, order):
    """Table 1: S^(d-1) backward passes for the last order, after those of the orders before."""
    count = count_backward_passes(S, order)
    assert count <= sum(S**d for d in range(order))
    # One row for each multi-index with s1 <= s2 <= ...: no row is computed twice.
    assert count == sum(math.comb(S + d - 1, d) for d in range(order))


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_tensor_makes_as_many_backward_passes_as_it_says(order, backward_passes):
    tensor = tensor_of("mlp_cross_entropy", "canonical", order)
    assert len(backward_passes) == count_backward_passes(len(tensor), order)
    assert len(backward_passes) <= sum(len(tensor) ** d for d in range(order))


def test_no_entry_of_the_tensor_is_computed_twice(backward_passes):
    """Each backward pass differentiates by the groups from the last index on, and only by them."""
    tensor = tensor_of("mlp_cross_entropy", "canonical", 3)
    S = len(tensor)
    computed = [len(leaves) for leaves in backward_passes]  # canonical: a leaf is a group
    last = computed[1 + S :]
    assert sum(last) == math.comb(S + 2, 3)
    assert sum(computed) == sum(math.comb(S + d, d + 1) for d in range(3))


def test_summary_makes_two_backward_passes_for_each_group(backward_passes):
    summary = measure("mlp_cross_entropy", "canonical", "nested")
    assert len(backward_passes) == 2 * len(summary) + 1


def test_leaves_come_in_the_order_of_the_groups(backward_passes):
    """Not in that of a set of strings, which changes from process to process, and with it sums."""
    measure("transformer", "canonical", "nested")
    order = [id(p) for p in prepared("transformer")[0].params.values()]
    first, *_ = backward_passes
    assert [id(p) for p in first] == order
    for leaves in backward_passes:
        places = [order.index(id(p)) for p in leaves]
        assert places == sorted(places)


@pytest.mark.parametrize(("name", "spec"), SMALL)
def test_taylor_term_is_the_full_contraction_of_the_tensor(name, spec):
    """Eqn. 3: the d-th derivative along u is D^(d)(u)[1_S, ..., 1_S]."""
    problem, u, _ = prepared(name)
    terms = taylor_terms(problem.model, problem.loss_fn, problem.batch, order=4, direction=u)
    expected = torch.stack([tensor_of(name, spec, d).sum() for d in (1, 2, 3, 4)])
    torch.testing.assert_close(terms, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("order", [1, 3, 6])
def test_taylor_terms_take_one_backward_pass_for_each_order(order, backward_passes):
    problem, u, _ = prepared("mlp_cross_entropy")
    terms = taylor_terms(problem.model, problem.loss_fn, problem.batch, order=order, direction=u)
    assert terms.shape == (order,)
    assert len(backward_passes) == order


def test_taylor_terms_add_up_to_the_loss_at_a_distance():
    """Six terms predict a small step to its seventh power."""
    problem, u, _ = prepared("mlp_cross_entropy")
    small = {n: 0.05 * x for n, x in u.items()}
    terms = taylor_terms(problem.model, problem.loss_fn, problem.batch, order=6, direction=small)
    moved = copy.deepcopy(problem.model)
    with torch.no_grad():
        for parameter, p in moved.named_parameters():
            p += small[parameter]
    change = problem.loss_fn(moved, problem.batch) - problem.loss()
    series = sum(term / math.factorial(d) for d, term in enumerate(terms, start=1))
    torch.testing.assert_close(series, change.detach(), rtol=1e-5, atol=0)


def test_tensor_and_terms_of_a_loss_that_ends_early_are_zero():
    """A quadratic has no third derivative, and the graph ends before it is asked for."""
    assert torch.equal(tensor_of("quadratic", "canonical", 4), torch.zeros((3,) * 4).double())
    problem, u, _ = prepared("quadratic")
    terms = taylor_terms(problem.model, problem.loss_fn, None, order=5, direction=u)
    assert torch.equal(terms[2:], torch.zeros(3).double())
    linear = nn.Linear(2, 1).double()
    batch = torch.ones(3, 2).double()
    tensor = derivative_tensor(linear, lambda model, x: model(x).mean(), batch, order=2)
    assert torch.equal(tensor, torch.zeros(2, 2).double())


@pytest.mark.parametrize("order", [0, -1, 1.5, True, "3"])
def test_order_of_a_tensor_is_a_whole_number(order):
    problem = PROBLEMS["quadratic"]()
    for function in (derivative_tensor, taylor_terms):
        with pytest.raises(ValueError, match="whole number"):
            function(problem.model, problem.loss_fn, None, order=order)


# --- custom functions that keep a number of their forward pass ------------------------------------


class KeepsItsSigmoid(torch.autograd.Function):
    """A softplus whose backward pass uses what the forward pass has kept: no way back from it."""

    @staticmethod
    def forward(ctx, x):
        ctx.sigmoid = torch.sigmoid(x)
        return F.softplus(x)

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.sigmoid


class KeepsItsSlope(torch.autograd.Function):
    """x^3 with a right second derivative, and a third that is lost on the way."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * (3 * x.detach() ** 2 + 6 * x.detach() * (x - x.detach()))


def keeping_loss(function):
    def loss_fn(model, batch):
        return function.apply(model[0](batch[0])).square().mean()

    return loss_fn


@pytest.mark.parametrize(
    ("function", "dtype"),
    [
        (KeepsItsSigmoid, torch.float64),
        (KeepsItsSigmoid, torch.float32),
        (KeepsItsSlope, torch.float64),
    ],
)
def test_what_a_custom_function_keeps_is_found_out(function, dtype):
    """The derivatives that autograd gives are 36 % off, without a sign of it."""
    problem = PROBLEMS["mlp_cross_entropy"]()
    model, batch = problem.model.to(dtype), (problem.batch[0].to(dtype), problem.batch[1])
    loss_fn = keeping_loss(function)
    with pytest.raises(CannotDifferentiate, match=rf"{function.__name__}.*\w\. Try backend='auto'"):
        summarize(model, loss_fn, batch, backend="nested")
    with pytest.raises(CannotDifferentiate, match="off differences of gradients"):
        derivative_tensor(model, loss_fn, batch, order=3)
    with pytest.warns(UserWarning, match="off differences of gradients"):
        summary = summarize(model, loss_fn, batch)
    assert summary.backend == "differences"
    assert summary.approximate


class StraightThrough(torch.autograd.Function):
    """Rounds, and passes gradients as if it did not."""

    @staticmethod
    def forward(ctx, x):
        ctx.scale = torch.ones_like(x)
        return (4 * x).round() / 4

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.scale


def test_gradients_that_are_not_those_of_the_loss_are_taken_at_their_word():
    """Differences of the loss see the rounding; the derivatives are those without it."""
    problem = PROBLEMS["mlp_cross_entropy"]()

    def detached(model, batch):
        h = model[0](batch[0])
        return F.cross_entropy(model[2](h + ((4 * h).round() / 4 - h).detach()), batch[1])

    def custom(model, batch):
        return F.cross_entropy(model[2](StraightThrough.apply(model[0](batch[0]))), batch[1])

    expected = summarize(problem.model, detached, problem.batch)
    with pytest.warns(UserWarning, match="StraightThrough"):
        actual = summarize(problem.model, custom, problem.batch)
    assert (expected.backend, actual.backend) == ("sweep", "nested")
    assert actual.approximate
    torch.testing.assert_close(actual.Hbar, expected.Hbar)
    torch.testing.assert_close(actual.D3, expected.D3)


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="torch has no such function")
def test_fused_linear_cross_entropy_in_chunks_is_not_silently_wrong():
    """It computes the gradient in its forward pass, and keeps it."""
    options = nn.LinearCrossEntropyOptions(batch_chunk_size=2)

    def loss_fn(model, batch):
        x, y = batch
        h = torch.tanh(model[0](x))
        loss = F.linear_cross_entropy(h, model[2].weight, y, options=options)
        return loss + 0.1 * loss**2

    problem = PROBLEMS["mlp_cross_entropy"]()
    u, groups = problem.direction(), make_partition(problem.model)
    expected = finite_differences(problem.model, loss_fn, problem.batch, u, groups)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        actual = summarize(problem.model, loss_fn, problem.batch, direction=u, partition=groups)
    assert max(worst_error(actual, expected)) < (1e-3 if actual.approximate else 1e-6)


@pytest.mark.parametrize("masked", [False, True])
def test_attention_in_elementary_form_is_the_same_under_autocast(masked):
    """Autocast lowers the inputs of attention; it would widen the softmax inside of it."""
    torch.manual_seed(0)
    inputs = [torch.randn(2, 2, 4, 8, requires_grad=True) for _ in range(3)]
    mask = torch.randn(4, 4) if masked else None
    found = []
    for function in (attention, F.scaled_dot_product_attention):
        with torch.autocast("cpu", torch.bfloat16), sdpa_kernel(SDPBackend.MATH):
            y = function(*inputs, attn_mask=mask)
        grads = torch.autograd.grad(y.float().square().sum(), inputs, create_graph=True)
        again = torch.autograd.grad(sum(g.square().sum() for g in grads), inputs)
        found.append([y, *grads, *again])
    torch.testing.assert_close(*found, rtol=0, atol=0)
