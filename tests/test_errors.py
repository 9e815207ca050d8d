"""Messages say what is wrong and what to write instead, and the model is left as it was."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from newton_summary import (
    History,
    NewtonSummary,
    Summary,
    derivative_tensor,
    learning_rates,
    make_partition,
    suggest_lrs,
    summarize,
    taylor_terms,
    verify,
)
from newton_summary.derivatives import BACKENDS
from newton_summary.errors import CannotDifferentiate, NotFiniteError
from problems import PROBLEMS

BACKENDS_AND_AUTO = ["auto", *BACKENDS]


@pytest.fixture
def problem():
    """Checks at the end that nothing about the model has changed."""
    problem = PROBLEMS["batch_norm_1d"]()
    problem.model[0].weight.grad = torch.ones_like(problem.model[0].weight)
    before = {n: v.detach().clone() for n, v in problem.model.state_dict().items()}
    random = torch.get_rng_state()
    yield problem
    for n, v in problem.model.state_dict().items():
        assert torch.equal(v, before[n]), n
    assert torch.equal(random, torch.get_rng_state())
    assert all(module.training for module in problem.model.modules())
    weight = problem.model[0].weight
    assert torch.equal(weight.grad, torch.ones_like(weight))
    assert problem.model[0].bias.grad is None


def measure(problem, loss_fn, backend, direction="gradient"):
    return summarize(problem.model, loss_fn, problem.batch, backend=backend, direction=direction)


def model_loss(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y)


OTHER = nn.Linear(9, 2).double()

LOSSES = {
    "not a scala": (
        lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], reduction="none"),
        ValueError,
        ["shape (6,)", ".mean()", "batch 0"],
    ),
    "empty": (
        lambda model, batch: model(batch[0])[:0],
        ValueError,
        ["shape (0, 2)", ".mean()"],
    ),
    "not finite": (
        lambda model, batch: model_loss(model, batch) * float("nan"),
        ValueError,
        ["loss is nan", "diverged"],
    ),
    "infinite": (
        lambda model, batch: model_loss(model, batch) / 0,
        ValueError,
        ["loss is inf", "division by zero"],
    ),
    "not a tenso": (
        lambda model, batch: model_loss(model, batch).item(),
        TypeError,
        ["returned float", "expected the loss as a tensor, without .item()."],
    ),
    "a tuple": (
        lambda model, batch: (model_loss(model, batch), 1.0),
        TypeError,
        ["returned tuple", "expected the loss as a tensor, and nothing else."],
    ),
    "nothing": (
        lambda model, batch: None,
        TypeError,
        ["returned None: expected the loss as a tensor. Does it end with a return"],
    ),
    "an intege": (
        lambda model, batch: (model(batch[0]).argmax(1) != batch[1]).sum(),
        TypeError,
        [r"dtype torch.int64", "real floating-point number"],
    ),
    "detached": (
        lambda model, batch: model_loss(model, batch).detach(),
        ValueError,
        ["does not depend on the parameters", ".detach()"],
    ),
    "constant": (
        lambda model, batch: batch[0].mean(),
        ValueError,
        ["does not depend on the parameters"],
    ),
    "differentiated": (
        lambda model, batch: [loss := model_loss(model, batch), loss.backward()][0],
        ValueError,
        ["on batch 0 called backward()", "Return the loss without it"],
    ),
    "of the input alone": (
        lambda model, batch: batch[0].clone().requires_grad_().square().mean(),
        ValueError,
        ["does not depend on the parameters"],
    ),
    "of another model": (
        lambda model, batch: OTHER(batch[0]).mean(),
        ValueError,
        ["does not depend on the parameters", "the model it is given"],
    ),
}


@pytest.mark.parametrize("given_direction", [False, True])
@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("backend", BACKENDS_AND_AUTO)
def test_loss_that_is_none(problem, backend, kind, given_direction):
    """With and without a gradient pass before the backend has its turn."""
    loss_fn, error, fragments = LOSSES[kind]
    direction = problem.direction() if given_direction else "gradient"
    with pytest.raises(error) as caught:
        measure(problem, loss_fn, backend, direction)
    for fragment in fragments:
        assert fragment in str(caught.value)


@pytest.mark.parametrize("kind", LOSSES)
def test_loss_that_is_none_for_tensors_and_terms(problem, kind):
    loss_fn, error, fragments = LOSSES[kind]
    u = problem.direction()
    for function in (derivative_tensor, taylor_terms):
        with pytest.raises(error) as caught:
            function(problem.model, loss_fn, problem.batch, order=2, direction=u)
        for fragment in fragments:
            assert fragment in str(caught.value)


def test_the_batch_is_named(problem):
    def loss_fn(model, batch):
        loss = model_loss(model, batch)
        return loss if len(batch[0]) > 2 else loss.reshape(1, 1).expand(2, 1)

    x, y = problem.batch
    with pytest.raises(ValueError, match="on batch 1 returned a tensor of shape"):
        summarize(problem.model, loss_fn, [(x, y), (x[:2], y[:2])])


@pytest.mark.parametrize("given_direction", [False, True])
def test_the_batch_that_is_not_finite_is_named(problem, given_direction):
    x, y = problem.batch
    direction = problem.direction() if given_direction else "gradient"
    data = [(x, y), (x * float("nan"), y)]
    with pytest.raises(NotFiniteError, match=r"The loss is nan on batch 1, .* non-finite data"):
        summarize(problem.model, problem.loss_fn, data, direction=direction)


CHANGES = {
    "no_grad": lambda p: p.mul_(0.5),
    "data": lambda p: p.data.clamp_(-0.1, 0.1),
    "nan": lambda p: p.fill_(float("nan")),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("given_direction", [False, True])
@pytest.mark.parametrize("backend", BACKENDS_AND_AUTO)
def test_loss_that_changes_a_parameter(problem, backend, given_direction, change):
    def loss_fn(model, batch):
        with torch.no_grad():
            change(model[-1].weight)
        return model_loss(model, batch)

    direction = problem.direction() if given_direction else "gradient"
    message = (
        r"change[sd] parameter '5\.weight' in place.*may only read|takes \.data of a parameter"
    )
    with pytest.raises((ValueError, CannotDifferentiate), match=message):
        measure(problem, loss_fn, backend, direction)


def test_loss_that_changes_a_parameter_later(problem):
    """Later evaluations are watched too, if not with a copy: here the change is one that undoes."""
    calls = []

    def loss_fn(model, batch):
        loss = model_loss(model, batch)
        calls.append(0)
        if len(calls) == 2:
            with torch.no_grad():
                model[-1].weight.mul_(1.0)
        return loss

    with pytest.raises(ValueError, match=r"changed parameter '5\.weight' in place"):
        measure(problem, loss_fn, "nested")


def test_parameters_that_are_not_finite_are_not_said_to_be_changed():
    problem = PROBLEMS["mlp_cross_entropy"]()
    with torch.no_grad():
        problem.model[0].bias.fill_(float("nan"))
        problem.model[2].bias.fill_(float("inf"))
    with pytest.raises(ValueError, match="loss is nan"):
        summarize(problem.model, problem.loss_fn, problem.batch)


def test_embedding_that_renormalises_itself_is_a_change():
    model = nn.Sequential(nn.Embedding(4, 3, max_norm=0.1), nn.Linear(3, 2))
    before = model[0].weight.detach().clone()
    loss_fn = lambda model, x: model(x).square().mean()  # noqa: E731
    with pytest.raises(ValueError, match=r"changed parameter '0\.weight' in place"):
        summarize(model, loss_fn, torch.arange(4))
    assert torch.equal(model[0].weight, before)


@pytest.mark.parametrize("data", [[], iter(()), (x for x in ())])
@pytest.mark.parametrize("given_direction", [False, True])
def test_data_without_a_batch(problem, data, given_direction):
    direction = problem.direction() if given_direction else "gradient"
    with pytest.raises(ValueError, match=r"data is empty.*read before, make a new one"):
        summarize(problem.model, problem.loss_fn, data, direction=direction)


@pytest.mark.parametrize("given_direction", [False, True])
def test_loader_without_a_batch(problem, given_direction):
    """Shuffling has drawn from the random state by then, which is put back all the same."""
    dataset = torch.utils.data.TensorDataset(*problem.batch)
    loader = torch.utils.data.DataLoader(dataset, batch_size=100, drop_last=True, shuffle=True)
    direction = problem.direction() if given_direction else "gradient"
    with pytest.raises(ValueError, match="data is empty"):
        summarize(problem.model, problem.loss_fn, loader, direction=direction)


def test_data_without_a_batch_for_tensors(problem):
    for function in (derivative_tensor, taylor_terms):
        with pytest.raises(ValueError, match="data is empty"):
            function(problem.model, problem.loss_fn, [], order=2, direction=problem.direction())
    with pytest.raises(ValueError, match="data is empty"):
        verify(problem.model, problem.loss_fn, [])


@pytest.mark.parametrize("backend", ["nestd", "exact", "", None])
def test_unknown_backend(problem, backend):
    with pytest.raises(ValueError, match=rf"backend {backend!r}.*'auto'.*'nested'.*'differences'"):
        measure(problem, problem.loss_fn, backend)


def test_misspelt_backend_is_guessed(problem):
    with pytest.raises(ValueError, match="Did you mean 'nested'"):
        measure(problem, problem.loss_fn, "nestd")


@pytest.mark.parametrize("order", [0, 4, -1, 2.5, "2", None])
def test_unknown_order(problem, order):
    with pytest.raises(ValueError, match=r"order=.*1, 2 or 3.*derivative_tensor"):
        summarize(problem.model, problem.loss_fn, problem.batch, order=order)


@pytest.mark.parametrize("microbatch", [0, -3, 2.5, "2"])
def test_microbatch_is_a_number_of_samples(problem, microbatch):
    with pytest.raises(ValueError, match=r"microbatch=.*number of samples"):
        summarize(problem.model, problem.loss_fn, problem.batch, microbatch=microbatch)


def test_no_trainable_parameter():
    problem = PROBLEMS["mlp_cross_entropy"]()
    problem.model.requires_grad_(False)
    for model in (problem.model, nn.ReLU()):
        with pytest.raises(
            ValueError, match=r"no parameter that requires a gradient.*requires_grad_"
        ):
            summarize(model, problem.loss_fn, problem.batch)
        with pytest.raises(ValueError, match="no parameter that requires a gradient"):
            taylor_terms(model, problem.loss_fn, problem.batch, order=2)


def test_partition_of_another_model(problem):
    other = PROBLEMS["batch_norm_1d"]()
    with pytest.raises(ValueError, match=r"another model.*another parameter called '0\.weight'"):
        summarize(
            problem.model, problem.loss_fn, problem.batch, partition=make_partition(other.model)
        )
    unlike = make_partition(nn.ModuleDict({"a": OTHER}))
    with pytest.raises(ValueError, match=r"has no parameter 'a\.weight'.*make_partition"):
        derivative_tensor(problem.model, problem.loss_fn, problem.batch, order=1, partition=unlike)


def test_partition_made_before_freezing_and_thawing():
    problem = PROBLEMS["mlp_cross_entropy"]()
    data = (problem.model, problem.loss_fn, problem.batch)
    partition = make_partition(problem.model)
    problem.model[0].bias.requires_grad_(False)
    with pytest.raises(ValueError, match=r"'0\.bias' of the partition has been frozen"):
        summarize(*data, partition=partition)
    partition = make_partition(problem.model)
    problem.model[0].bias.requires_grad_(True)
    with pytest.raises(ValueError, match=r"'0\.bias' requires a gradient but is in no group"):
        summarize(*data, partition=partition)


def test_partition_from_a_file_is_of_no_model(problem, tmp_path):
    summary = measure(problem, problem.loss_fn, "nested")
    summary.save(tmp_path / "summary.pt")
    loaded = type(summary).load(tmp_path / "summary.pt")
    with pytest.raises(ValueError, match="another model"):
        summarize(problem.model, problem.loss_fn, problem.batch, partition=loaded.partition)


def test_dense_backend_is_for_tiny_models():
    model = nn.Linear(100, 10)
    batch = (torch.randn(3, 100), torch.randint(10, (3,)))
    with pytest.raises(ValueError, match=r"1010\^3 = 1e\+09 numbers.*tiny models.*'nested'"):
        summarize(model, model_loss, batch, backend="dense")
    assert summarize(model, model_loss, batch, backend="dense", order=1).order == 1


def test_complex_parameters():
    model = nn.Linear(2, 2, dtype=torch.complex64)
    with pytest.raises(ValueError, match=r"'weight' is complex.*real"):
        summarize(model, lambda model, x: model(x).abs().mean(), torch.ones(3, 2).cfloat())


def test_a_dataset_is_not_a_batch():
    data = torch.utils.data.TensorDataset(torch.randn(4, 3), torch.randn(4, 1))
    with pytest.raises(TypeError, match=r"TensorDataset.*DataLoader"):
        summarize(nn.Linear(3, 1), lambda model, batch: model(batch[0]).sum(), data)


NET = nn.Linear(3, 2)
BATCH = (torch.randn(4, 3), torch.randint(2, (4,)))
ADAM = torch.optim.Adam(NET.parameters())
PAIRS = [BATCH]
WRITTEN_OUT = r"Expected loss_fn\(model, batch\).*lambda model, batch: "

WRONG_ARGUMENTS = {
    "a criterion": (
        lambda: summarize(NET, nn.CrossEntropyLoss(), BATCH),
        r"CrossEntropyLoss\(\), which takes outputs.*" + WRITTEN_OUT + "criterion",
    ),
    "a functional criterion": (
        lambda: summarize(NET, F.cross_entropy, BATCH),
        WRITTEN_OUT + r"F\.cross_entropy\(model",
    ),
    "a function of output and target": (
        lambda: summarize(NET, lambda output, target: F.cross_entropy(output, target), BATCH),
        "the model, as a tensor.*" + WRITTEN_OUT,
    ),
    "a function of the batch": (
        lambda: summarize(NET, lambda batch: NET(batch[0]).sum(), BATCH),
        r"arguments \(batch\).*" + WRITTEN_OUT,
    ),
    "no loss": (lambda: summarize(NET, None, BATCH), "type NoneType.*" + WRITTEN_OUT),
    "a criterion for curvature": (
        lambda: NewtonSummary(make_partition(NET), curvature=(nn.MSELoss(), PAIRS)),
        WRITTEN_OUT,
    ),
    "no data": (lambda: summarize(NET, model_loss, None), "data=None.*DataLoader"),
    "a list of tensors": (
        lambda: summarize(NET, lambda model, x: model(x).mean(), [torch.ones(4, 3)] * 2),
        r"one batch.*not list.*iter\(data\)",
    ),
    "a list of tensors that are cut": (
        lambda: summarize(NET, lambda model, x: model(x[:, :3]).mean(), [torch.ones(4, 5)] * 2),
        r"one batch.*list indices.*iter\(data\)",
    ),
    "a list of tensors that are flattened": (
        lambda: summarize(NET, lambda model, x: model(x.flatten(1)).mean(), [torch.ones(4, 3)] * 2),
        r"one batch.*'list' object.*iter\(data\)",
    ),
    "rates of a model": (lambda: learning_rates(NET), r"not Linear.*summarize\(model"),
    "advice for nothing": (lambda: suggest_lrs(None, model_loss, BATCH, ADAM), "NoneType.*Module"),
    "advice for no optimizer": (
        lambda: suggest_lrs(NET, model_loss, BATCH, None),
        "optimizer has type NoneType.*torch optimizer",
    ),
    "a check of nothing": (lambda: verify(None, model_loss, BATCH), "NoneType.*Module"),
    "groups of parameters": (lambda: make_partition(NET.parameters()), "generator.*Module"),
    "groups of a class": (lambda: make_partition(nn.Linear), "type.*Module.*not.*class"),
    "an optimizer of parameters": (
        lambda: NewtonSummary(NET.parameters()),
        r"model\.parameters\(\) as for.*make_partition\(model\)",
    ),
    "a criterion for an optimizer": (lambda: NewtonSummary(NET, nn.MSELoss()), WRITTEN_OUT),
}


@pytest.mark.parametrize("case", WRONG_ARGUMENTS)
def test_arguments_of_the_wrong_kind(case):
    call, message = WRONG_ARGUMENTS[case]
    with pytest.raises(TypeError, match=message):
        call()


def test_an_error_of_the_loss_itself_stays_what_it_is():
    def loss_fn(model, batch):
        return model(batch[0]) + "one"

    with pytest.raises(TypeError, match="unsupported operand") as caught:
        summarize(NET, loss_fn, BATCH)
    assert "Expected" not in str(caught.value)


@pytest.mark.parametrize("kind", [Summary, History])
def test_files_of_something_else(kind, tmp_path):
    text, model, numbers = (tmp_path / name for name in ("text", "model", "numbers"))
    text.write_text("hello")
    torch.save(NET, model)
    torch.save({"a": 1}, numbers)
    for path in (text, model, numbers):
        with pytest.raises(
            ValueError, match=rf"{path.name} is not a .* file .*{kind.__name__}\.save"
        ):
            kind.load(path)
    with pytest.raises(FileNotFoundError):
        kind.load(tmp_path / "nowhere")


def test_verify_wants_the_model_that_it_gives():
    """In float32, where torch would complain of dtypes, and in float64; without a trace."""
    for model in (nn.Sequential(NET), nn.Sequential(nn.Linear(3, 2).double())):
        x = BATCH[0].to(model[0].weight.dtype)
        for call in (model, model[0]):
            with pytest.raises(ValueError, match=r"from elsewhere.*use its argument"):
                verify(model, lambda _, batch, call=call: call(batch).square().mean(), x)
        assert model(x).shape == (4, 2)
