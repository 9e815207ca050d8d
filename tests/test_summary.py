"""Summaries: files, conversions, means, windows, inverses and blocks."""

import itertools
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from newton_summary import Summary, SummaryWindow, make_partition, summarize
from problems import PROBLEMS


@pytest.fixture
def summary():
    """Of an MLP with the groups 0.weight, 0.bias, 2.weight and 2.bias."""
    problem = PROBLEMS["mlp_cross_entropy"]()
    return summarize(problem.model, problem.loss_fn, problem.batch, backend="nested")


def random_summary(seed, S=3, order=3, **fields):
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    H = randn(S, S)
    return Summary(
        gbar=randn(S),
        Hbar=H + H.T if order >= 2 else None,
        D3=randn(S) if order >= 3 else None,
        loss=randn(),
        **fields,
    )


def assert_same(a, b):
    for name in ("gbar", "Hbar", "D3", "loss"):
        x, y = getattr(a, name), getattr(b, name)
        assert (x is None) == (y is None)
        if x is not None:
            assert x.dtype == y.dtype
            assert torch.equal(x, y) or (x.isnan() & y.isnan()).all()
    for name in ("num_samples", "backend", "reason", "approximate", "names", "order"):
        assert getattr(a, name) == getattr(b, name)


# --- made by hand --------------------------------------------------------------------------------


def test_made_by_hand():
    g, H, d = torch.ones(2), torch.eye(2), torch.zeros(2)
    summary = Summary(gbar=g, Hbar=H, D3=d)
    assert len(summary) == 2
    assert summary.order == 3
    assert summary.backend == "given"
    assert summary.names == ("0", "1")
    assert summary.num_samples == 0
    assert summary.loss.isnan()
    assert Summary(gbar=g).order == 1
    assert Summary(gbar=g, Hbar=H).order == 2
    assert Summary(gbar=g, loss=0.5).loss == 0.5


@pytest.mark.parametrize(
    ("fields", "fragments"),
    [
        ({"gbar": torch.ones(2, 2)}, ["gbar has shape (2, 2)", "vector"]),
        ({"gbar": torch.ones(())}, ["gbar has shape ()", "vector"]),
        ({"gbar": torch.ones(2), "Hbar": torch.ones(2)}, ["Hbar has shape (2,)", "shape (2, 2)"]),
        ({"gbar": torch.ones(2), "Hbar": torch.ones(3, 3)}, ["Hbar has shape (3, 3)", "2 entries"]),
        ({"gbar": torch.ones(2), "D3": torch.ones(2, 2)}, ["D3 has shape (2, 2)", "shape (2,)"]),
        (
            {"gbar": torch.ones(3), "partition": make_partition(nn.Linear(2, 2))},
            ["2 groups", "3 entries"],
        ),
    ],
)
def test_wrong_shapes(fields, fragments):
    with pytest.raises(ValueError) as caught:
        Summary(**fields)
    for fragment in fragments:
        assert fragment in str(caught.value)


@pytest.mark.parametrize("value", [[1.0, 2.0], torch.tensor([1, 2]), None, 3.0])
def test_wrong_types(value):
    with pytest.raises(TypeError, match=r"gbar is .*real floating-point tensor"):
        Summary(gbar=value)
    if value is not None:
        with pytest.raises(TypeError, match=r"Hbar is .*real floating-point tensor"):
            Summary(gbar=torch.ones(2), Hbar=value)


def test_summaries_are_compared_by_identity(summary):
    assert summary == summary
    assert summary != random_summary(0)
    assert len({summary, summary}) == 1


# --- files and conversions -----------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["canonical", "trivial", "blocks-1", "discrete", "index set"])
def test_saved_and_loaded(tmp_path, spec):
    problem = PROBLEMS["mlp_cross_entropy"]()
    if spec == "index set":
        spec = {
            "top": [("0.weight", slice(0, 2)), "2.bias"],
            "rest": [("0.weight", slice(2, 4)), "0.bias", "2.weight"],
        }
    for backend, order in (("nested", 3), ("differences", 2), ("nested", 1)):
        summary = summarize(
            problem.model,
            problem.loss_fn,
            problem.batch,
            partition=spec,
            backend=backend,
            order=order,
        )
        path = tmp_path / "summary.pt"
        summary.save(path)
        loaded = Summary.load(path)
        assert_same(loaded, summary)
        assert loaded.partition.sizes == summary.partition.sizes
        assert loaded.partition.members == summary.partition.members
        assert loaded.partition.roles == summary.partition.roles
        assert loaded.partition.model is None
        for name, label in summary.partition.labels.items():
            assert torch.equal(
                torch.as_tensor(loaded.partition.labels[name]), torch.as_tensor(label)
            )
        assert str(loaded).splitlines()[0] == str(summary).splitlines()[0]
        assert path.stat().st_size < 50_000, "no parameters in the file"


def test_hand_made_summary_is_saved_and_loaded(tmp_path):
    for order in (1, 2, 3):
        summary = random_summary(order, order=order)
        summary.save(tmp_path / "summary.pt")
        assert_same(Summary.load(str(tmp_path / "summary.pt")), summary)


def test_loaded_in_another_process(tmp_path, summary):
    """With plain values alone in the file: nothing in it is executed."""
    path = tmp_path / "summary.pt"
    summary.save(path)
    code = (
        "import sys, torch, newton_summary as ns\n"
        "s = ns.Summary.load(sys.argv[1])\n"
        "torch.load(sys.argv[1], weights_only=True)\n"
        "print(*s.names, float(s.Hbar.sum()).hex(), s.partition.sizes)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True
    )
    expected = (
        f"{' '.join(summary.names)} {float(summary.Hbar.sum()).hex()} {summary.partition.sizes}"
    )
    assert result.stdout.strip() == expected


def test_file_that_holds_no_summary(tmp_path):
    path = tmp_path / "other.pt"
    torch.save({"weights": torch.ones(2)}, path)
    with pytest.raises(ValueError, match=r"other\.pt is not a summary file"):
        Summary.load(path)
    state = random_summary(0).state_dict()
    torch.save(state | {"gbar": torch.ones(0), "Hbar": torch.ones(0, 0), "D3": None}, path)
    with pytest.raises(ValueError, match=r"other\.pt is not a summary file.*no groups"):
        Summary.load(path)


def test_converted(summary):
    single = summary.to(torch.float32)
    for name in ("gbar", "Hbar", "D3", "loss"):
        assert getattr(single, name).dtype == torch.float32
        torch.testing.assert_close(getattr(single, name).double(), getattr(summary, name))
    assert single.partition is summary.partition
    assert single.num_samples == summary.num_samples
    assert summary.gbar.dtype == torch.float64, "the original stays"
    moved = summary.to("meta")
    assert moved.Hbar.device.type == "meta" and moved.loss.device.type == "meta"
    lower = Summary(gbar=torch.ones(2)).to(torch.float64)
    assert lower.gbar.dtype == torch.float64 and lower.Hbar is None


# --- means ---------------------------------------------------------------------------------------


def test_mean_keeps_the_sign_of_the_third_derivative():
    a, b = random_summary(0, num_samples=2), random_summary(1, num_samples=6)
    mean = Summary.mean([a, b])
    for name in ("gbar", "Hbar", "D3", "loss"):
        expected = (getattr(a, name) + getattr(b, name)) / 2
        torch.testing.assert_close(getattr(mean, name), expected)
    assert mean.num_samples == 8
    opposite = Summary(gbar=a.gbar, Hbar=a.Hbar, D3=-a.D3)
    torch.testing.assert_close(Summary.mean([a, opposite]).D3, torch.zeros(3).double())


@given(
    seed=st.integers(0, 2**20),
    weights=st.lists(st.floats(0.01, 100), min_size=1, max_size=5),
)
@settings(max_examples=40, deadline=None)
def test_weighted_mean(seed, weights):
    summaries = [random_summary(seed + i) for i in range(len(weights))]
    mean = Summary.mean(summaries, weights)
    for name in ("gbar", "Hbar", "D3", "loss"):
        expected = sum(w * getattr(s, name) for s, w in zip(summaries, weights, strict=True))
        torch.testing.assert_close(getattr(mean, name), expected / sum(weights))
    doubled = Summary.mean(summaries, [2 * w for w in weights])
    torch.testing.assert_close(doubled.Hbar, mean.Hbar)


def test_mean_of_one_is_itself_bit_for_bit(summary):
    for weights in (None, [7]):
        assert_same(Summary.mean([summary], weights), summary)


def test_a_summary_of_weight_0_does_not_count():
    summary = random_summary(0)
    mean = Summary.mean([summary, random_summary(5)], [1.0, 0.0])
    torch.testing.assert_close(mean.Hbar, summary.Hbar)


@pytest.mark.parametrize("weights", [[1] * 1000, [1] * 999 + [0.5]])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_mean_of_many_is_as_exact_as_its_type(dtype, weights):
    torch.manual_seed(0)
    summaries = [
        Summary(
            torch.rand(4).to(dtype), torch.rand(4, 4).to(dtype), loss=torch.ones(1).to(dtype)[0]
        )
        for _ in range(1000)
    ]
    mean = Summary.mean(summaries, weights)
    w = torch.tensor(weights, dtype=torch.float64) / sum(weights)
    for name in ("loss", "gbar", "Hbar"):
        numbers = torch.stack([getattr(summary, name).double() for summary in summaries])
        found, exact = getattr(mean, name), torch.tensordot(w, numbers, 1)
        assert found.dtype == dtype
        rtol = torch.finfo(dtype).eps * (4 if dtype == torch.float32 else 1)
        torch.testing.assert_close(found.double(), exact, rtol=rtol, atol=0)


def test_mean_has_the_common_type():
    types = torch.bfloat16, torch.float16, torch.float32, torch.float64
    for one, other in itertools.product(types, types):
        pair = [Summary(torch.ones(2, dtype=each), loss=1) for each in (one, other)]
        mean = Summary.mean(pair)
        assert mean.gbar.dtype == torch.promote_types(one, other)
        assert mean.loss.dtype == torch.get_default_dtype()


def test_mean_has_the_lowest_order_and_is_approximate_if_any_is():
    exact, rough = random_summary(0), random_summary(1, order=2, approximate=True)
    mean = Summary.mean([rough, exact])
    assert mean.order == 2
    assert mean.approximate


def test_wrong_means(summary):
    with pytest.raises(ValueError, match="at least one"):
        Summary.mean([])
    with pytest.raises(ValueError, match="2 summaries but 1 weights"):
        Summary.mean([summary, summary], [1.0])
    for weights in ([0.0, 0.0], [1.0, -2.0], [2.0, -1.0]):
        with pytest.raises(ValueError, match="expected positive numbers"):
            Summary.mean([summary, summary], weights)
    with pytest.raises(ValueError, match="3 groups and 4"):
        Summary.mean([random_summary(0), random_summary(0, S=4)])
    other = Summary(
        summary.gbar,
        summary.Hbar,
        partition=make_partition(nn.ModuleDict({"a": nn.Linear(3, 4), "b": nn.Linear(4, 3)})),
    )
    with pytest.raises(ValueError, match=r"'0\.weight' and 'a\.weight'"):
        Summary.mean([summary, other])


# --- windows -------------------------------------------------------------------------------------


def test_window_averages_the_last_ones():
    window = SummaryWindow(2)
    summaries = [random_summary(seed) for seed in range(4)]
    assert len(window) == 0 and window.size == 2
    first = window.push(summaries[0])
    assert_same(first, summaries[0])
    for previous, newest in itertools.pairwise(summaries):
        mean = window.push(newest)
        assert len(window) == 2
        torch.testing.assert_close(mean.Hbar, (previous.Hbar + newest.Hbar) / 2)
        torch.testing.assert_close(window.mean().D3, mean.D3)


def test_window_is_saved_and_loaded(tmp_path, summary):
    window = SummaryWindow(3)
    for factor in (1.0, 2.0, 3.0, 4.0):
        scaled = Summary(factor * summary.gbar, factor * summary.Hbar, partition=summary.partition)
        window.push(scaled)
    torch.save(window.state_dict(), tmp_path / "window.pt")
    other = SummaryWindow(1)
    other.load_state_dict(torch.load(tmp_path / "window.pt", weights_only=True))
    assert other.size == 3 and len(other) == 3
    torch.testing.assert_close(other.mean().Hbar, 3 * summary.Hbar)
    torch.testing.assert_close(other.push(summary).gbar, (3 + 4 + 1) / 3 * summary.gbar)


def test_wrong_windows():
    with pytest.raises(ValueError, match="size=0: expected 1 or more"):
        SummaryWindow(0)
    with pytest.raises(ValueError, match="at least one"):
        SummaryWindow(2).mean()


# --- the inverse ---------------------------------------------------------------------------------


def with_matrix(H, **fields):
    return Summary(gbar=torch.ones(len(H), dtype=H.dtype), Hbar=H, **fields)


def test_inverse_of_a_measured_matrix(summary):
    inverse = summary.inverse()
    torch.testing.assert_close(inverse @ summary.Hbar, torch.eye(4).double(), rtol=0, atol=1e-9)
    assert torch.equal(inverse, inverse.T)


@given(seed=st.integers(0, 2**20), S=st.integers(1, 8), spread=st.integers(0, 30))
@settings(max_examples=60, deadline=None)
def test_inverse_does_not_suffer_from_different_scales(seed, S, spread):
    """diag(d) A diag(d) has the inverse diag(1/d) A^-1 diag(1/d), whatever d is."""
    generator = torch.Generator().manual_seed(seed)
    Q = torch.linalg.qr(torch.randn(S, S, generator=generator, dtype=torch.float64))[0]
    signs = torch.randint(2, (S,), generator=generator).double() * 2 - 1  # indefinite, too
    A = Q @ torch.diag(signs * (0.5 + torch.rand(S, generator=generator).double())) @ Q.T
    A = (A + A.T) / 2
    d = 10 ** (spread * (torch.rand(S, generator=generator).double() - 0.5))
    inverse = with_matrix(d[:, None] * A * d[None, :]).inverse()
    scaled = d[:, None] * inverse * d[None, :]
    torch.testing.assert_close(scaled, torch.linalg.inv(A), rtol=1e-8, atol=1e-8)


def test_inverse_of_float32_is_float32():
    H = torch.tensor([[2.0, 1.0], [1.0, 3.0]])
    inverse = with_matrix(H).inverse()
    assert inverse.dtype == torch.float32
    torch.testing.assert_close(inverse, torch.tensor([[0.6, -0.2], [-0.2, 0.4]]))


def test_matrices_without_inverse():
    with pytest.raises(ValueError, match=r"no inverse.*coarser partition"):
        with_matrix(torch.ones(2, 2)).inverse()
    alike = torch.tensor([[3.0, 1.0, 1.0], [1.0, 2.0, 2.0], [1.0, 2.0, 2.0]])  # 1 and 2
    with pytest.raises(ValueError, match=r"no inverse: '1', '2' can move against each other"):
        with_matrix(alike).inverse()
    scales = torch.tensor([1e-6, 1.0, 1e6]).double()
    with pytest.raises(ValueError, match="no inverse"):
        with_matrix(scales[:, None] * scales[None, :]).inverse()
    dead = torch.diag(torch.tensor([1.0, 0.0]))
    with pytest.raises(ValueError, match=r"row of group '1' is zero.*direction move it"):
        with_matrix(dead).inverse()
    for bad in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="non-finite entries"):
            with_matrix(torch.tensor([[bad, 0.0], [0.0, 1.0]])).inverse()
    with pytest.raises(ValueError, match="no Hbar: measure with order=2"):
        Summary(gbar=torch.ones(2)).inverse()


def test_dead_group_is_named(summary):
    H = summary.Hbar.clone()
    H[2] = H[:, 2] = 0
    with pytest.raises(ValueError, match=r"'2\.weight'"):
        Summary(summary.gbar, H, partition=summary.partition).inverse()


def test_matrix_of_zero_diagonal_has_an_inverse():
    H = torch.tensor([[0.0, 1e-9], [1e-9, 0.0]]).double()
    torch.testing.assert_close(
        with_matrix(H).inverse(), torch.tensor([[0.0, 1e9], [1e9, 0.0]]).double()
    )


# --- blocks, predictions, tables -----------------------------------------------------------------


def test_blocks_by_role(summary):
    blocks = summary.blocks()
    assert list(blocks) == ["weight-weight", "weight-bias", "bias-bias"]
    assert blocks["weight-bias"].rows == ("0.weight", "2.weight")
    assert blocks["weight-bias"].columns == ("0.bias", "2.bias")
    H = summary.Hbar
    assert torch.equal(blocks["weight-weight"].values, H[[0, 2]][:, [0, 2]])
    assert torch.equal(blocks["weight-bias"].values, H[[0, 2]][:, [1, 3]])
    assert torch.equal(blocks["bias-bias"].values, H[[1, 3]][:, [1, 3]])
    assert torch.equal(summary.block("bias", "weight").values, blocks["weight-bias"].values.T)
    inverse = summary.inverse()
    assert torch.equal(summary.blocks(inverse)["bias-bias"].values, inverse[[1, 3]][:, [1, 3]])


def test_blocks_without_groups_of_a_role():
    problem = PROBLEMS["rosenbrock"]()
    summary = summarize(
        problem.model, problem.loss_fn, None, partition="discrete", backend="nested"
    )
    assert summary.block("bias", "bias").values.shape == (0, 0)
    assert summary.block("weight", "bias").values.shape == (4, 0)


def test_wrong_blocks(summary):
    with pytest.raises(ValueError, match="Unknown role 'weights': use 'weight'"):
        summary.block("weights", "bias")
    with pytest.raises(ValueError, match="no partition"):
        random_summary(0).blocks()
    with pytest.raises(ValueError, match=r"shape \(2, 2\), but there are 4 groups"):
        summary.block("weight", "bias", torch.ones(2, 2))


def test_predicted_change_of_a_quadratic_is_its_change():
    problem = PROBLEMS["quadratic"]()
    u = problem.direction()
    partition = make_partition(problem.model)
    summary = summarize(
        problem.model, problem.loss_fn, None, partition=partition, direction=u, backend="nested"
    )
    eta = torch.tensor([0.3, -0.2, 0.5]).double()
    before = problem.loss().detach()
    with torch.no_grad():
        for name, step in partition.scale(u, eta).items():
            problem.params[name] -= step
    torch.testing.assert_close(summary.predicted_change(eta), problem.loss().detach() - before)
    torch.testing.assert_close(summary.predicted_change(eta, order=1), -eta @ summary.gbar)


def test_wrong_predictions(summary):
    with pytest.raises(ValueError, match=r"eta has shape \(2,\).*\(4,\)"):
        summary.predicted_change(torch.ones(2))
    with pytest.raises(ValueError, match="order=3: expected 1 or 2"):
        summary.predicted_change(torch.ones(4), order=3)


def test_table(summary):
    lines = str(summary).splitlines()
    assert lines[0].startswith("Summary of 4 groups, order 3, backend nested, 7 samples, loss ")
    assert lines[1].split() == ["group", "gbar", "Hbar_ss", "D3_sss"]
    assert [line.split()[0] for line in lines[2:]] == list(summary.names)
    assert lines[2].split()[1] == f"{float(summary.gbar[0]):+.3e}"
    assert lines[3].split()[3] == f"{float(summary.D3[1]):+.3e}"
    assert len({len(line) for line in lines[1:]}) == 1, "columns are aligned"


def test_table_tells_what_is_unusual():
    text = str(random_summary(0, approximate=True, reason="an operation", backend="differences"))
    assert "backend differences, approximate" in text
    assert "(an operation)" in text
    assert str(Summary(gbar=torch.ones(1))).splitlines()[1].split() == ["group", "gbar"]


def test_long_table_is_shortened():
    assert len(str(random_summary(0, S=300)).splitlines()) < 70


def test_groups_that_nothing_depends_on_can_be_left_out_of_the_inverse():
    H = torch.tensor([[2.0, 0.0, 1.0], [0.0, 0.0, 0.0], [1.0, 0.0, 3.0]], dtype=torch.float64)
    summary = Summary(gbar=torch.ones(3, dtype=torch.float64), Hbar=H)
    with pytest.raises(ValueError, match="the row of group '1' is zero"):
        summary.inverse()
    inverse = summary.inverse(without_dead=True)
    live = [0, 2]
    torch.testing.assert_close(inverse[live][:, live] @ H[live][:, live], torch.eye(2).double())
    assert inverse[1].isnan().all() and inverse[:, 1].isnan().all()
    nothing = Summary(gbar=torch.ones(2), Hbar=torch.zeros(2, 2))
    with pytest.raises(ValueError, match="no inverse"):
        nothing.inverse(without_dead=True)
