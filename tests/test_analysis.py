"""Interactions between groups: against numpy, by hand, and in limiting cases."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch import nn

from newton_summary import Summary, make_partition, summarize
from newton_summary.analysis import (
    coarsen,
    inverse_kept,
    joint_gain,
    layer_numbers,
    normalized,
    smooth,
    strongest_pairs,
    suggest_merges,
)
from problems import PROBLEMS, Problem, squared_error


def net(layers=3):
    return nn.Sequential(*(nn.Linear(2, 2) for _ in range(layers)))


def positive(size, seed=0):
    """A positive definite matrix whose groups have very different scales."""
    generator = torch.Generator().manual_seed(seed)
    root = torch.randn(size, size + 2, generator=generator, dtype=torch.float64)
    scale = 10.0 ** torch.linspace(-4, 3, size, dtype=torch.float64)
    return scale[:, None] * (root @ root.T) * scale


def summary_of(H, partition=None, gbar=None):
    gbar = torch.ones(len(H), dtype=H.dtype) if gbar is None else gbar
    return Summary(gbar=gbar, Hbar=H, D3=torch.ones_like(gbar), partition=partition)


NEED_HBAR = (normalized, inverse_kept, joint_gain, strongest_pairs, suggest_merges)


@pytest.mark.parametrize("analyse", NEED_HBAR)
def test_order_one_is_not_enough(analyse):
    with pytest.raises(ValueError, match="no Hbar: measure with order=2"):
        analyse(Summary(gbar=torch.ones(3)))


@pytest.mark.parametrize("analyse", NEED_HBAR)
def test_what_is_no_summary_is_said(analyse):
    with pytest.raises(TypeError, match="list"):
        analyse([1.0])


def test_a_tensor_in_place_of_a_summary():
    H = positive(4)
    assert torch.equal(normalized(H), normalized(summary_of(H)))
    assert inverse_kept(H) == inverse_kept(summary_of(H))
    assert strongest_pairs(H) == strongest_pairs(summary_of(H))
    with pytest.raises(ValueError, match=r"\(2, 3\)"):
        normalized(torch.ones(2, 3))
    with pytest.raises(TypeError, match="needs a Summary, not Tensor"):
        joint_gain(H)


# --- normalised -----------------------------------------------------------------------------------


def test_normalized_is_the_correlation_of_a_covariance():
    H = positive(5)
    samples = np.linalg.cholesky(H.numpy())
    lengths = np.linalg.norm(samples, axis=1)
    cosines = (samples / lengths[:, None]) @ (samples / lengths[:, None]).T
    np.testing.assert_allclose(normalized(H).numpy(), cosines, atol=1e-12)
    assert normalized(H.float()).dtype == torch.float64


def test_normalized_keeps_signs_and_marks_what_has_no_scale():
    H = torch.tensor([[-4.0, 2.0, 1.0], [2.0, 9.0, 0.0], [1.0, 0.0, 0.0]])
    scaled = normalized(H)
    assert scaled[:2, :2].tolist() == pytest.approx(np.array([[-1, 1 / 3], [1 / 3, 1]]))
    assert torch.isnan(scaled[2]).all() and torch.isnan(scaled[:, 2]).all()
    H[0, 1] = H[1, 0] = math.inf
    assert torch.isinf(normalized(H)[0, 1])  # shown as it is
    assert torch.isnan(normalized(torch.tensor([[math.nan]]))).all()


# --- layers ---------------------------------------------------------------------------------------


class Lists(nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList(torch.ones(2, 2) for _ in range(3))
        self.biases = nn.ParameterList(torch.ones(2) for _ in range(3))


@pytest.mark.parametrize(
    ("model", "spec", "expected"),
    [
        (net(), "canonical", (0, 0, 1, 1, 2, 2)),
        (net(), "weights-biases", (0, 0)),
        (net(5), "blocks-2", (0, 0, 1, 1, 2, 2)),
        (net(5), "alternate-2", (0, 0, 1, 1, 2, 2)),
        (Lists(), "canonical", (0, 1, 2, 0, 1, 2)),
        (net(2), {"a": ["0.weight"], "b": ["1.weight"], "c": ["0.bias", "1.bias"]}, (0, 0, 0)),
        (nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)), "canonical", (0, 0, 0)),
        (nn.Linear(1, 2), "discrete", (0, 0, 0, 0)),
        (
            nn.Sequential(nn.Conv1d(1, 2, 3), nn.BatchNorm1d(2), net(1)),
            "canonical",
            (0,) * 4 + (1,) * 2,
        ),
        (nn.Sequential(nn.Conv1d(1, 2, 3), nn.BatchNorm1d(2), net(2)), "layers", (0, 1, 2)),
        (
            nn.Sequential(nn.Conv1d(1, 2, 3), nn.BatchNorm1d(2), net(2)),
            "chunks-3",
            (0, 0, 1, 1, 2, 2),
        ),
    ],
)
def test_groups_of_one_module_are_one_layer(model, spec, expected):
    partition = make_partition(model, spec)
    summary = summary_of(torch.eye(len(partition)), partition)
    assert layer_numbers(summary) == expected
    read = Summary.from_state_dict(summary.state_dict())  # without the model
    assert layer_numbers(read) == expected


def test_without_a_partition_every_group_is_a_layer():
    assert layer_numbers(torch.eye(3)) == (0, 1, 2)


# --- what the inverse keeps -----------------------------------------------------------------------


def test_block_diagonal_hbar_is_kept_whole():
    partition = make_partition(net())
    H = torch.block_diag(*(positive(2, seed) for seed in range(3)))
    kept = inverse_kept(summary_of(H, partition))
    for matrix in (kept.inverse, kept.hessian):
        assert matrix[1:] == pytest.approx((1, 1), abs=1e-12)
        assert 0 < matrix.diagonal < 1
    assert kept.num_layers == 3


def test_tridiagonal_inverse_is_kept_by_the_tridiagonal_alone():
    partition = make_partition(net(4))
    apart = np.abs(np.subtract.outer(np.arange(8) // 2, np.arange(8) // 2))
    inverse = torch.from_numpy(0.1 * (apart <= 1) + 2.0 * np.eye(8))
    kept = inverse_kept(summary_of(torch.linalg.inv(inverse), partition))
    assert kept.inverse.tridiagonal == pytest.approx(1, abs=1e-12)
    assert kept.inverse.block_diagonal < 0.999
    assert kept.hessian.tridiagonal < 1 - 1e-9  # the inverse of a tridiagonal matrix is full


def test_kept_is_a_share_of_the_squares():
    H = positive(10).numpy()
    kept = inverse_kept(summary_of(torch.from_numpy(H), make_partition(net(5))))
    for matrix, actual in ((np.linalg.inv(H), kept.inverse), (H, kept.hessian)):
        squares = {
            (s, t): matrix[s, t] ** 2 / abs(matrix[s, s] * matrix[t, t])
            for s, t in itertools.product(range(10), repeat=2)
        }
        whole = math.fsum(squares.values())
        near = [
            math.fsum(v for (s, t), v in squares.items() if condition(s, t)) / whole
            for condition in (
                lambda s, t: s == t,
                lambda s, t: s // 2 == t // 2,
                lambda s, t: abs(s // 2 - t // 2) < 2,
            )
        ]
        assert tuple(actual) == pytest.approx(tuple(near)) and near[-1] < 0.9


def test_kept_of_two_groups_by_hand():
    for correlation in (0.0, 0.3, -0.9, 1 - 1e-9):
        H = torch.tensor([[1.0, correlation], [correlation, 1.0]], dtype=torch.float64)
        kept = inverse_kept(1e6 * H)
        assert kept.inverse.diagonal == pytest.approx(1 / (1 + correlation**2))
        assert kept.inverse.tridiagonal == 1


def test_kept_does_not_depend_on_the_scale_of_groups():
    H, scale = positive(5), 10.0 ** torch.tensor([3.0, -5, 0, 2, -1], dtype=torch.float64)
    a, b = inverse_kept(H), inverse_kept(scale[:, None] * H * scale)
    np.testing.assert_allclose([*a.inverse, *a.hessian], [*b.inverse, *b.hessian], rtol=1e-9)


def test_kept_at_the_edges():
    one = inverse_kept(torch.tensor([[3.0]]))
    assert tuple(one.inverse) == tuple(one.hessian) == (1, 1, 1) and "1 layer." in str(one)
    exchange = inverse_kept(torch.tensor([[0.0, 1.0], [1.0, 0.0]]))  # no diagonal to scale with
    assert math.isnan(exchange.inverse.diagonal) and "-" in str(exchange)
    with pytest.raises(ValueError, match="no inverse"):
        inverse_kept(torch.ones(2, 2))
    with pytest.raises(ValueError, match="non-finite entries"):
        inverse_kept(torch.tensor([[math.nan]]))


def test_kept_as_a_table():
    partition = make_partition(net(2))
    text = str(inverse_kept(summary_of(torch.eye(4), partition)))
    assert text.splitlines()[2].split() == [
        "block-diagonal", "groups", "of", "one", "layer", "100.0", "%", "100.0", "%",
    ]  # fmt: skip


# --- joint and diagonal step ----------------------------------------------------------------------


def test_joint_gain_by_hand():
    H, g = positive(4), torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)
    gain = joint_gain(summary_of(H, gbar=g), lambda_int=0)
    a, b = H.numpy(), g.numpy()
    alone = b / np.diag(a)
    assert gain.joint == pytest.approx(-0.5 * b @ np.linalg.inv(a) @ b)
    assert gain.diagonal == pytest.approx(-alone @ b + 0.5 * alone @ a @ alone)
    assert (gain.joint_model, gain.diagonal_model) == (gain.joint, gain.diagonal)
    assert gain.joint < gain.diagonal


def test_joint_step_is_the_lower_one_with_the_cubic_term():
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        root = torch.randn(3, 3, generator=generator, dtype=torch.float64)
        g, D3 = torch.randn(2, 3, generator=generator, dtype=torch.float64)
        summary = Summary(gbar=g, Hbar=root + root.T, D3=D3)
        gain = joint_gain(summary, 2.0)
        for rates, model in (
            (gain.joint_rates, gain.joint_model),
            (gain.diagonal_rates, gain.diagonal_model),
        ):
            eta, d = rates.eta.numpy(), np.cbrt(np.abs(D3.numpy()))
            cubic = 2.0 / 6 * np.linalg.norm(d * eta) ** 3
            expected = -eta @ g.numpy() + 0.5 * eta @ summary.Hbar.numpy() @ eta + cubic
            assert model == pytest.approx(expected)
        assert gain.joint_model <= gain.diagonal_model + 1e-12


def test_without_interaction_there_is_no_gain():
    gain = joint_gain(summary_of(torch.diag(torch.tensor([1.0, 5.0, 0.1]).double())))
    assert gain.ratio == pytest.approx(1) and "1 times the decrease" in str(gain)
    assert joint_gain(summary_of(torch.tensor([[2.0]]))).ratio == pytest.approx(1)


def test_joint_gain_says_what_cannot_be():
    flat = Summary(torch.ones(2), torch.diag(torch.tensor([1.0, math.nan])), torch.ones(2))
    assert "cannot be compared" in str(joint_gain(flat)) and "not-finite" in str(joint_gain(flat))
    uphill = torch.tensor([[1.0, 0.999], [0.999, 1.0]]).double()
    assert "not predicted to fall" in str(
        joint_gain(summary_of(uphill.repeat(2, 2) + torch.eye(4) / 99), 0)
    )
    far = Summary(torch.ones(1), torch.tensor([[0.1]]), torch.ones(1), loss=0.5)
    assert "more than the whole loss of 0.5" in str(joint_gain(far, 0))
    with pytest.raises(ValueError, match="no D3"):
        joint_gain(Summary(torch.ones(2), torch.eye(2)))


# --- pairs ----------------------------------------------------------------------------------------


def test_strongest_pairs_are_those_of_a_search():
    partition = make_partition(net())
    summary = summary_of(positive(6), partition)
    H = summary.Hbar.numpy()
    expected = sorted(
        itertools.combinations(range(6), 2),
        key=lambda st: -abs(H[st]) / math.sqrt(H[st[0], st[0]] * H[st[1], st[1]]),
    )
    pairs = strongest_pairs(summary, 5)
    assert [(p.first, p.second) for p in pairs] == [
        (partition.names[s], partition.names[t]) for s, t in expected[:5]
    ]
    assert [p.distance for p in pairs] == [abs(s // 2 - t // 2) for s, t in expected[:5]]
    assert [p.value for p in pairs] == [H[st] for st in expected[:5]]
    assert len(strongest_pairs(summary, 99)) == 15 and len(strongest_pairs(summary, 0)) == 0
    assert pairs[0].first in str(pairs).splitlines()[1]


def test_pairs_without_an_interaction_are_counted():
    H = torch.tensor([[1.0, 0.5, math.nan], [0.5, 1.0, 2.0], [math.nan, 2.0, 0.0]])
    pairs = strongest_pairs(H)
    assert [(p.first, p.second, p.interaction) for p in pairs] == [("0", "1", 0.5)]
    assert pairs.undefined == 2 and "Undefined for 2 pairs" in str(pairs)
    assert len(strongest_pairs(torch.tensor([[1.0]]))) == 0
    with pytest.raises(ValueError, match="count=-1"):
        strongest_pairs(H, -1)


# --- smoothing ------------------------------------------------------------------------------------


def test_smoothing_is_that_of_the_paper():
    """For each epoch k in {10, 30, ...} the mean over the epochs [k - 10, k + 9]."""
    values = torch.randn(100, 3, generator=torch.Generator().manual_seed(0))
    epochs, means = smooth(values, range(100))
    assert epochs.tolist() == [10, 30, 50, 70, 90]
    for k, mean in zip((10, 30, 50, 70, 90), means):
        rows = [values[e].tolist() for e in range(k - 10, k + 10)]
        assert mean.tolist() == pytest.approx([math.fsum(column) / 20 for column in zip(*rows)])
    assert smooth(values, range(100), window=40).epochs.tolist() == [20, 60]
    assert smooth(values[:11], range(11)).epochs.tolist() == [10]  # its middle is just reached


def test_smoothing_leaves_out_what_is_not_finite_and_an_unfinished_window():
    values = torch.tensor([1.0, math.nan, 3.0, math.inf, math.nan, 7.0])
    epochs, means = smooth(values, [0, 1, 2, 3, 4, 6], window=2)
    assert epochs.tolist() == [1, 3, 5] and means[:2].tolist() == [1, 3] and math.isnan(means[2])
    with pytest.raises(ValueError, match="Use a shorter window"):
        smooth(values, range(6), window=20)
    with pytest.raises(ValueError, match="6 rows of values but 5 epochs"):
        smooth(values, range(5))
    with pytest.raises(ValueError, match="window=0"):
        smooth(values, range(6), window=0)


# --- coarser partitions ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(PROBLEMS)[:3])
def test_coarse_summary_is_what_a_measurement_gives(name):
    problem = PROBLEMS[name]()
    u = problem.direction()
    fine = summarize(problem.model, problem.loss_fn, problem.batch, direction=u)
    first, second, *_ = fine.names
    groups = {"both": [second, first]}
    coarse = coarsen(fine, groups)
    spec = {"both": [first, second], **{n: [n] for n in fine.names[2:]}}
    measured = summarize(
        problem.model, problem.loss_fn, problem.batch, direction=u, partition=spec, order=2
    )
    assert coarse.names == measured.names and coarse.D3 is None
    torch.testing.assert_close(coarse.gbar, measured.gbar)
    torch.testing.assert_close(coarse.Hbar, measured.Hbar)
    assert coarse.partition.members == measured.partition.members
    assert (coarse.loss, coarse.num_samples) == (fine.loss, fine.num_samples)


def mlp():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x, y = torch.randn(9, 3).double(), torch.randn(9, 2).double()
    return Problem(model, squared_error, [(x[:5], y[:5]), (x[5:7], y[5:7]), (x[7:], y[7:])])


def test_coarse_errors_are_those_of_a_measurement():
    problem = mlp()
    fine = summarize(problem.model, squared_error, problem.batch, stderr=True)
    coarse = coarsen(fine, {"weights": ["0.weight", "2.weight"]})
    spec = {"weights": ["0.weight", "2.weight"], "0.bias": ["0.bias"], "2.bias": ["2.bias"]}
    measured = summarize(problem.model, squared_error, problem.batch, partition=spec, stderr=True)
    torch.testing.assert_close(coarse.gbar_stderr, measured.gbar_stderr)
    torch.testing.assert_close(coarse.Hbar_stderr, measured.Hbar_stderr)


def test_coarsening_divided_parameters():
    model = nn.Linear(2, 2)
    partition = make_partition(model, "discrete")
    fine = summary_of(positive(6), partition)
    coarse = coarsen(fine, {"weight": [n for n in fine.names if "weight" in n]})
    assert coarse.partition.labels["weight"] == 0  # whole again
    assert len(coarse) == 3 and coarse.partition.labels["bias"].tolist() == [1, 2]
    torch.testing.assert_close(coarse.Hbar[0, 0], fine.Hbar[:4, :4].sum())


def test_coarsening_order_one_and_without_partition():
    coarse = coarsen(Summary(gbar=torch.tensor([1.0, 2.0, 4.0])), {"ends": ["0", "2"]})
    assert coarse.gbar.tolist() == [5, 2] and coarse.Hbar is None


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ({"a": ["0.weigth"]}, "Did you mean '0.weight'"),
        ({"a": ["0.weight"], "b": ["0.weight"]}, "listed twice, in 'a' and in 'b'"),
        ({"0.bias": ["0.weight", "1.weight"]}, "already is a group '0.bias'"),
        ({"a": []}, "'a' is empty"),
    ],
)
def test_wrong_groups_are_said(groups, message):
    with pytest.raises(ValueError, match=message):
        coarsen(summary_of(torch.eye(4), make_partition(net(2))), groups)


def test_a_name_in_place_of_a_list_is_said():
    with pytest.raises(TypeError, match="list of group names"):
        coarsen(summary_of(torch.eye(4), make_partition(net(2))), {"a": "0.weight"})


# --- which groups to merge ------------------------------------------------------------------------


def test_groups_of_like_rates_are_merged_by_role():
    partition = make_partition(net(4))
    # rates alone are 1 / h: weights 1, 2, 50, 60; biases 1, 100, 2.5, -
    h = torch.tensor([1, 1, 1 / 2, 1 / 100, 1 / 50, 1 / 2.5, 1 / 60, -1.0], dtype=torch.float64)
    merges = suggest_merges(summary_of(torch.diag(h), partition))
    assert merges.groups == {
        "0.weight+1.weight": ("0.weight", "1.weight"),
        "0.bias+2.bias": ("0.bias", "2.bias"),
        "1.bias": ("1.bias",),
        "2.weight+3.weight": ("2.weight", "3.weight"),
        "3.bias": ("3.bias",),
    }
    assert merges.partition(net(4)).names == merges.coarse().names
    text = str(merges)
    assert "8 groups could become 5" in text and "not positive: left alone" in text
    assert "1.00e+00 to 2.50e+00" in text and "2.50" in text


def test_nearest_rates_are_merged_first():
    h = 1 / torch.tensor([1.0, 2.0, 3.5, 9.0, 10.0], dtype=torch.float64)
    groups = suggest_merges(summary_of(torch.diag(h)), spread=3).groups
    assert list(groups.values()) == [("0",), ("1", "2"), ("3", "4")]
    assert len(suggest_merges(summary_of(torch.diag(h)), spread=1)) == 5
    assert suggest_merges(summary_of(torch.diag(h)), spread=20).groups == {
        "0+4 more": ("0", "1", "2", "3", "4")
    }


def test_share_of_the_decrease_that_is_kept():
    H, g = torch.diag(torch.tensor([1.0, 2.0]).double()), torch.ones(2).double()
    # 1/2 (1 + 1/2) apart, 1/2 2^2 / 3 together
    assert suggest_merges(summary_of(H, gbar=g)).kept == pytest.approx((2 / 3) / (3 / 4))
    assert math.isnan(suggest_merges(summary_of(-H, gbar=g)).kept)
    assert math.isnan(suggest_merges(summary_of(H, gbar=0 * g)).kept)


def test_merges_of_a_measured_model_can_be_measured():
    problem = mlp()
    fine = summarize(problem.model, squared_error, problem.batch, partition="discrete", order=2)
    merges = suggest_merges(fine, spread=10)
    assert 1 < len(merges) < len(fine)
    partition = merges.partition(problem.model)
    measured = summarize(problem.model, squared_error, problem.batch, partition=partition, order=2)
    torch.testing.assert_close(merges.coarse().Hbar, measured.Hbar)


def test_merges_at_the_edges():
    one = suggest_merges(summary_of(torch.tensor([[2.0]])))
    assert one.groups == {"0": ("0",)} and one.kept == pytest.approx(1)
    with pytest.raises(ValueError, match="no partition"):
        one.spec  # noqa: B018
    bad = Summary(torch.tensor([1.0, math.nan]), torch.tensor([[1.0, 0.0], [0.0, math.inf]]))
    assert len(suggest_merges(bad)) == 2
    with pytest.raises(ValueError, match=r"spread=0\.5"):
        suggest_merges(bad, 0.5)
    clash = Summary(torch.ones(3), torch.eye(3), partition=make_partition(
        nn.ParameterDict({"a": torch.ones(1), "b": torch.ones(1), "c": torch.ones(1)}),
        {"a": ["a"], "c": ["b"], "a+c": ["c"]},
    ))  # fmt: skip
    clash = Summary(
        clash.gbar, torch.diag(torch.tensor([1.0, 1.0, 100.0])), None, 0.0, 0, clash.partition
    )
    assert suggest_merges(clash).groups == {"a+c+": ("a", "c"), "a+c": ("a+c",)}
