"""Norm layers, whose fused forms torch differentiates wrongly without a word."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from newton_summary import NewtonSummary, Summary, make_partition, summarize
from newton_summary.derivatives.nested import Differentiable
from newton_summary.derivatives.norms import ELEMENTARY
from newton_summary.errors import CannotDifferentiate
from problems import PROBLEMS, cross_entropy, finite_differences, worst_error


def native_nested(problem, u, partition):
    """The recursion of App. A on torch's own operations, as one would write it in ten lines."""
    params = problem.params

    def contract(entry):
        grads = torch.autograd.grad(
            entry, list(params.values()), create_graph=True, materialize_grads=True
        )
        return partition.inner(dict(zip(params, grads, strict=True)), u)

    gbar = contract(problem.loss())
    rows = [contract(entry) for entry in gbar]
    D3 = torch.stack([contract(row[s])[s] for s, row in enumerate(rows)])
    return Summary(gbar.detach(), torch.stack(rows).detach(), D3.detach())


def errors_of_both(name):
    """Errors, by order, of plain nested autograd and of ours, against central differences."""
    problem = PROBLEMS[name]()
    u = problem.direction()
    partition = make_partition(problem.model)
    expected = finite_differences(problem.model, problem.loss_fn, problem.batch, u, partition)
    native = native_nested(problem, u, partition)
    ours = summarize(
        problem.model,
        problem.loss_fn,
        problem.batch,
        partition=partition,
        direction=u,
        backend="nested",
    )
    return worst_error(native, expected), worst_error(ours, expected)


@pytest.mark.parametrize(
    "name",
    ["layer_norm", "layer_norm_two_dims", "batch_norm_1d", "batch_norm_2d", "instance_norm"],
)
def test_torch_is_wrong_at_order_three_and_we_are_right(name):
    """If this fails for torch, it has been mended, and the elementary form may go."""
    native, ours = errors_of_both(name)
    assert native[1] < 1e-6
    assert native[2] > 1e-3
    assert max(ours) < 1e-6


def test_torch_is_wrong_at_order_two_for_weight_norm_and_we_are_right():
    native, ours = errors_of_both("weight_norm")
    assert native[1] > 1e-3
    assert max(ours) < 1e-6


@pytest.mark.parametrize("name", ["group_norm", "rms_norm", "batch_norm_1d_eval"])
def test_torch_and_we_are_right(name):
    native, ours = errors_of_both(name)
    assert max(native) < 1e-6
    assert max(ours) < 1e-6


# --- called as operators, or where no mode sees them --------------------------------------------


def randn(*shape):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


aten = torch.ops.aten
ones = torch.ones(6, dtype=torch.float64)
OPERATORS = {
    "layer_norm": lambda h: aten.layer_norm(h, [6], ones, None),
    "layer_norm.default": lambda h: aten.layer_norm.default(h, [6], ones, None),
    "batch_norm": lambda h: aten.batch_norm(h, *[None] * 4, True, 0.1, 1e-5, False),
    "instance_norm": lambda h: aten.instance_norm(
        h[:, None], *[None] * 4, True, 0.1, 1e-5, False
    ).squeeze(1),
    "group_norm": lambda h: aten.group_norm(h, 2, ones, None),
    "weight_norm": lambda h: aten._weight_norm(h, ones[:, None], 0),
    "native_layer_norm": lambda h: aten.native_layer_norm(h, [6], ones, None, 1e-5)[0],
    "native_batch_norm": lambda h: aten.native_batch_norm(h, *[None] * 4, True, 0.1, 1e-5)[0],
    "native_group_norm": lambda h: aten.native_group_norm(h, ones, None, 6, 6, 1, 2, 1e-5)[0],
    "_weight_norm_interface": lambda h: aten._weight_norm_interface(h, ones[:, None], 0)[0],
}
if hasattr(aten, "_fused_rms_norm"):  # torch 2.6 has no such operator
    OPERATORS["_fused_rms_norm"] = lambda h: aten._fused_rms_norm(h, [6], ones, 1e-5)[0]


class WithNorm(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(4, 6), norm, nn.Linear(6, 3)
        self.double()

    def forward(self, x):
        return self.b(torch.tanh(self.norm(self.a(x))))


BATCH = (randn(6, 4), torch.arange(6) % 3)


def measured(model, backend, order=3):
    """Return the summary along some direction, or None where it is said that there is none."""
    u = {name: randn(*p.shape) for name, p in model.named_parameters()}
    try:
        return summarize(model, cross_entropy, BATCH, direction=u, backend=backend, order=order)
    except CannotDifferentiate:
        return None


@pytest.mark.parametrize("backend", ["sweep", "nested"])
@pytest.mark.parametrize("name", OPERATORS)
def test_norms_called_as_operators_are_right_or_refused(name, backend):
    torch.manual_seed(0)
    model = WithNorm(OPERATORS[name])
    actual = measured(model, backend)
    if actual is None:
        assert name.startswith(("native", "_"))
        return
    u = {name: randn(*p.shape) for name, p in model.named_parameters()}
    expected = finite_differences(model, cross_entropy, BATCH, u, make_partition(model))
    assert all(error < 1e-6 for error in worst_error(actual, expected))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("order", [2, 3])
@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.BatchNorm1d])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("runs_before", [0, 4])
def test_norms_in_torchscript_are_right_or_refused(runs_before, norm, training, order):
    """Nested differentiation sees them only in the graph, where they may be inside of another node.

    A batch norm in evaluation is linear.
    """
    torch.manual_seed(0)
    plain = WithNorm(norm(6)).train(training)
    scripted = torch.jit.script(plain)
    for _ in range(runs_before):  # until TorchScript fuses
        torch.autograd.grad(scripted(BATCH[0]).sum(), list(plain.parameters()))
    actual, expected = measured(scripted, "nested", order), measured(plain, "nested", order)
    assert (actual is None) == (order == 3 and (norm is nn.LayerNorm or training))
    if actual is not None:
        torch.testing.assert_close(actual.Hbar, expected.Hbar)
    if actual is not None and order == 3:
        torch.testing.assert_close(actual.D3, expected.D3)


# --- the elementary forms are the same functions -------------------------------------------------


x2, x3, x4 = randn(6, 4), randn(5, 4, 3), randn(5, 4, 3, 2)
w, b = randn(4), randn(4)


def statistics():
    return torch.full((4,), 0.3).double(), torch.full((4,), 1.7).double()


CALLS = {
    "layer_norm": lambda: F.layer_norm(x2, (4,)),
    "layer_norm, positions": lambda: F.layer_norm(x2, [4], w, b, 1e-3),
    "layer_norm, keywords": lambda: F.layer_norm(
        input=x2, normalized_shape=(4,), weight=w, bias=None, eps=1e-2
    ),
    "layer_norm, two dimensions": lambda: F.layer_norm(x3, (4, 3)),
    "torch.layer_norm": lambda: torch.layer_norm(x2, (4,), w, b, 1e-3, False),
    "torch.layer_norm, keywords": lambda: torch.layer_norm(
        x2, normalized_shape=(4,), weight=w, bias=b, eps=1e-3, cudnn_enable=False
    ),
    "rms_norm": lambda: F.rms_norm(x2, (4,)),
    "rms_norm, weight": lambda: F.rms_norm(x2, (4,), w, 1e-3),
    "torch.rms_norm": lambda: torch.rms_norm(x2, (4,), weight=w, eps=1e-3),
    "group_norm": lambda: F.group_norm(x3, 2),
    "group_norm, 2d": lambda: F.group_norm(x2, 2, w, b),
    "group_norm, 4d": lambda: F.group_norm(x4, num_groups=2, weight=w, bias=b, eps=1e-3),
    "torch.group_norm": lambda: torch.group_norm(x4, 2, w, b, 1e-3, False),
    "instance_norm": lambda: F.instance_norm(x3),
    "instance_norm, affine": lambda: F.instance_norm(x4, weight=w, bias=b, eps=1e-3),
    "instance_norm, statistics": lambda: F.instance_norm(x4, *statistics(), w, b),
    "instance_norm, evaluation": lambda: F.instance_norm(
        x3, *statistics(), w, b, use_input_stats=False
    ),
    "torch.instance_norm": lambda: torch.instance_norm(
        x3, w, b, None, None, True, 0.1, 1e-3, False
    ),
    "torch.instance_norm, evaluation": lambda: torch.instance_norm(
        x3, w, b, *statistics(), use_input_stats=False, momentum=0.1, eps=1e-3, cudnn_enabled=False
    ),
    "batch_norm, evaluation": lambda: F.batch_norm(x3, *statistics()),
    "batch_norm, evaluation, affine": lambda: F.batch_norm(
        x2, *statistics(), w, b, False, 0.1, 0.1
    ),
    "batch_norm, training": lambda: F.batch_norm(x2, None, None, training=True),
    "batch_norm, training, affine": lambda: F.batch_norm(x4, *statistics(), w, b, True, 0.3, 0.1),
    "batch_norm, training, keywords": lambda: F.batch_norm(
        input=x3, running_mean=None, running_var=None, weight=w, bias=b, training=True, eps=1e-3
    ),
    "torch.batch_norm": lambda: torch.batch_norm(x3, w, b, None, None, True, 0.1, 1e-3, False),
    "torch.batch_norm, evaluation": lambda: torch.batch_norm(
        x3, None, None, *statistics(), training=False, momentum=0.1, eps=1e-3, cudnn_enabled=False
    ),
    "weight_norm, dimension 0": lambda: torch._weight_norm(x2, randn(6, 1), 0),
    "weight_norm, dimension 1": lambda: torch._weight_norm(x2, randn(1, 4), 1),
    "weight_norm, whole": lambda: torch._weight_norm(x2, randn(), -1),
}


def test_every_elementary_form_is_tried():
    called = set()

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            called.add(func)
            return func(*args, **(kwargs or {}))

    with Watch():
        for call in CALLS.values():
            call()
    assert set(ELEMENTARY) <= called


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_elementary_form_is_the_same_function(call):
    with Differentiable():
        ours = call()
    torch.testing.assert_close(ours, call(), rtol=1e-12, atol=1e-12)


MODULES = {
    "BatchNorm1d": lambda: (nn.BatchNorm1d(4), x2),
    "BatchNorm1d, no momentum": lambda: (nn.BatchNorm1d(4, momentum=None), x3),
    "BatchNorm2d": lambda: (nn.BatchNorm2d(4, momentum=0.7), x4),
    "BatchNorm1d, no statistics": lambda: (nn.BatchNorm1d(4, track_running_stats=False), x3),
    "BatchNorm1d, no affine": lambda: (nn.BatchNorm1d(4, affine=False), x3),
    "BatchNorm2d, evaluation": lambda: (nn.BatchNorm2d(4).eval(), x4),
    "BatchNorm1d, evaluation, no statistics": lambda: (
        nn.BatchNorm1d(4, track_running_stats=False).eval(),
        x3,
    ),
    "InstanceNorm1d": lambda: (nn.InstanceNorm1d(4, affine=True, track_running_stats=True), x3),
    "InstanceNorm2d, no batch": lambda: (nn.InstanceNorm2d(4), x4[0]),
    "InstanceNorm1d, evaluation": lambda: (
        nn.InstanceNorm1d(4, track_running_stats=True).eval(),
        x3,
    ),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)
def test_modules_and_their_running_statistics_are_the_same(make, dtype):
    """A forward pass that reads the statistics again, in evaluation, has to find them updated."""
    native, x = make()
    native = native.to(dtype)
    ours = copy.deepcopy(native)
    with Differentiable():
        actual = [ours(x.to(dtype)), ours(2 * x.to(dtype)), ours.eval()(x.to(dtype))]
    expected = [native(x.to(dtype)), native(2 * x.to(dtype)), native.eval()(x.to(dtype))]
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    assert actual[0].dtype == dtype
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
    for mine, theirs in zip(ours.buffers(), native.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)


def test_one_value_per_channel_is_the_error_that_torch_raises():
    with Differentiable(), pytest.raises(ValueError, match="more than 1 value per channel"):
        F.batch_norm(x2[:1], None, None, training=True)


@pytest.mark.parametrize("backend", ["nested", "dense", "differences"])
@pytest.mark.parametrize(
    "name", ["batch_norm_1d", "batch_norm_2d", "batch_norm_momentum_none", "batch_norm_1d_eval"]
)
def test_running_statistics_stay_bit_for_bit(name, backend):
    problem = PROBLEMS[name]()
    before = {n: v.clone() for n, v in problem.model.named_buffers()}
    objects = dict(problem.model.named_buffers())
    summarize(problem.model, problem.loss_fn, problem.batch, backend=backend, order=2)
    for n, v in problem.model.named_buffers():
        assert v is objects[n]
        assert torch.equal(v, before[n])


def test_statistics_that_are_read_in_the_same_evaluation_are_the_updated_ones():
    """A loss that runs the model in training and then in evaluation mode."""
    problem = PROBLEMS["batch_norm_1d"]()

    def loss_fn(model, batch):
        x, y = batch
        first = F.cross_entropy(model(x), y)
        model.eval()
        return first + F.cross_entropy(model(x), y)

    u = problem.direction()
    partition = make_partition(problem.model)
    actual = summarize(
        problem.model, loss_fn, problem.batch, partition=partition, direction=u, backend="nested"
    )
    native = copy.deepcopy(problem.model)
    torch.testing.assert_close(actual.loss, loss_fn(native, problem.batch).detach())
    assert problem.model.training and all(m.training for m in problem.model.modules())


def two_terms(model, batch):
    """Not a function of one value that the last operation takes: the logits enter twice."""
    outputs = model(batch[0])
    return F.cross_entropy(outputs, batch[1]) + 0.01 * outputs.square().mean()


def penalised(model, batch):
    """A function of no one value but itself."""
    weight = next(model.parameters())
    return cross_entropy(model, batch) + 1e-3 * weight.square().sum()


@pytest.mark.parametrize("loss_fn", [cross_entropy, two_terms, penalised])
def test_a_bias_before_a_batch_norm_has_no_derivatives_at_all(loss_fn):
    """The norm takes it out again; rounding that stays would be all that its rate is made of."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()),
        *(nn.Linear(144, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)),
    )
    batch = torch.randn(40, 1, 8, 8), torch.randint(3, (40,))
    summary = summarize(model, loss_fn, batch, backend="sweep")
    for s in (summary.names.index("0.bias"), summary.names.index("4.bias")):
        assert summary.gbar[s] == 0 and summary.D3[s] == 0
        assert not summary.Hbar[s].any() and not summary.Hbar[:, s].any()
    optimizer = NewtonSummary(make_partition(model), curvature=(loss_fn, [batch]))
    for _ in range(60):
        optimizer.zero_grad()
        loss = loss_fn(model, batch)
        loss.backward()
        optimizer.step()
    assert optimizer.failed_refreshes == 0
    assert cross_entropy(model, batch) < 0.3


def test_a_bias_before_a_batch_norm_stays_where_it_is():
    """Also on a large batch, whose mean of equal numbers is not that number in float32."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
    model.append(nn.Linear(144, 3))
    batches = [(torch.randn(3000, 1, 8, 8), torch.randint(3, (3000,))) for _ in range(2)]
    bias = model[0].bias.detach().clone()
    before = [p.detach().clone() for p in model.parameters()]
    curvature = cross_entropy, batches
    optimizer = NewtonSummary.paper(make_partition(model), curvature=curvature, summary_period=2)
    for _ in range(9):
        optimizer.zero_grad()
        cross_entropy(model, batches[0]).backward()
        optimizer.step()
    assert optimizer.failed_refreshes == 0
    assert torch.equal(model[0].bias, bias)
    assert not all(map(torch.equal, model.parameters(), before))


@pytest.mark.parametrize("size", [40, 1000])
def test_a_bias_before_a_batch_norm_has_no_derivatives_along_any_direction(size):
    """The mean of many equal numbers is not that number in float32, and must not be taken off."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
    model.append(nn.Linear(144, 3))
    batch = torch.randn(size, 1, 8, 8), torch.randint(3, (size,))
    u = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    summary = summarize(model, cross_entropy, batch, direction=u, backend="sweep")
    s = summary.names.index("0.bias")
    assert summary.gbar[s] == 0 and summary.D3[s] == 0 and not summary.Hbar[s].any()
