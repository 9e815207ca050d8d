"""Figures hold the numbers they are made from, and mark what cannot be drawn."""

import io
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from newton_summary import History, Summary, Trial, figures, learning_rates, make_partition
from newton_summary.analysis.interactions import strongest_pairs
from newton_summary.figures.drawing import short_name


def summary_of(size=6, seed=0):
    """A made-up summary of a chain of layers."""
    model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(size // 2)))
    generator = torch.Generator().manual_seed(seed)
    root = torch.randn(size, size + 1, generator=generator, dtype=torch.float64)
    ones = torch.ones(size, dtype=torch.float64)
    return Summary(ones, root @ root.T, ones, torch.tensor(2.0), 10, make_partition(model))


def history_of(etas, **options):
    """A history with the given learning rates, one row for each epoch."""
    summary = summary_of(len(etas[0]))
    made = History("run", **options)
    for epoch, eta in enumerate(etas):
        rates = replace(learning_rates(summary), eta=torch.tensor(eta))
        made.add(epoch, summary, rates)
    return made


def png(figure):
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=40)
    return stream.getvalue()


def texts(figure):
    return " ".join(text.get_text() for axis in figure.axes for text in axis.texts)


@pytest.mark.parametrize("size", [2, 10, 42, 200])
def test_heatmap_names_every_group(size):
    summary = summary_of(size)
    figure = figures.heatmap(summary, "normalized")
    axis = figure.axes[0]
    for ticks in (axis.get_xticklabels(), axis.get_yticklabels()):
        assert [tick.get_text() for tick in ticks] == list(summary.titles)
        height = ticks[0].get_fontsize() / 72  # inches, of a cell that is as high
        assert height <= figure.get_size_inches()[1] / size
    assert axis.images[0].get_array().diagonal().tolist() == pytest.approx([1.0] * size)
    assert png(figure)[:4] == b"\x89PNG"


@pytest.mark.parametrize("scale", ["raw", "symlog"])
def test_heatmap_holds_the_matrix(scale):
    summary = summary_of()
    H = summary.Hbar.numpy()
    for what, expected in (("Hbar", H), ("inverse", np.linalg.inv(H))):
        image = figures.heatmap(summary, what, scale).axes[0].images[0]
        np.testing.assert_allclose(image.get_array(), expected, rtol=1e-9)
        largest = np.abs(expected).max()
        assert image.get_clim() == pytest.approx((-largest, largest))  # zero is white


def test_heatmap_of_a_block():
    summary = summary_of()
    axis = figures.heatmap(summary, block="weight-bias").axes[0]
    assert axis.images[0].get_array().tolist() == summary.Hbar[0::2, 1::2].tolist()
    assert [tick.get_text() for tick in axis.get_yticklabels()] == [
        "0.weight (Linear)",
        "1.weight (Linear)",
        "2.weight (Linear)",
    ]
    with pytest.raises(ValueError, match="'weight-weight', 'weight-bias', 'bias-bias'"):
        figures.heatmap(summary, block="bias-weight")
    with pytest.raises(ValueError, match="no partition"):
        figures.heatmap(replace(summary, partition=None), block="bias-bias")
    alone = Summary(torch.ones(1), torch.eye(1), partition=make_partition(nn.Linear(1, 1, False)))
    assert "There are no groups in the block" in texts(figures.heatmap(alone, block="bias-bias"))


def test_entries_that_are_not_finite_are_hatched():
    H = summary_of().Hbar.clone()
    H[1, 2], H[2, 1] = math.nan, math.inf
    for scale in ("raw", "symlog"):
        axis = figures.heatmap(replace(summary_of(), Hbar=H), scale=scale).axes[0]
        array = axis.images[0].get_array()
        assert np.argwhere(np.ma.getmaskarray(array)).tolist() == [[1, 2], [2, 1]]
        assert array.max() == torch.nan_to_num(H, 0, 0).max()
        (hatched,) = axis.collections
        assert hatched.get_hatch() == "////"
        corners = [path.get_extents().min.tolist() for path in hatched.get_paths()]
        assert corners == [[1.5, 0.5], [0.5, 1.5]]  # column, row
        assert axis.get_xlabel() == "hatched: not finite, 2 of 36 entries"
    nothing = replace(summary_of(), Hbar=torch.full_like(H, math.nan))
    assert png(figures.heatmap(nothing)) and png(figures.heatmap(nothing, scale="symlog"))


def test_an_inverse_that_does_not_exist_is_said():
    singular = replace(summary_of(), Hbar=torch.ones(6, 6).double())
    assert "Hbar has no inverse" in " ".join(texts(figures.heatmap(singular, "inverse")).split())


def test_heatmap_of_extreme_and_zero_entries():
    for H in (torch.zeros(3, 3), torch.diag(torch.tensor([1e-30, 1.0, 1e30]).double())):
        summary = Summary(torch.ones(3).to(H), H)
        for scale in ("raw", "symlog"):
            assert png(figures.heatmap(summary, scale=scale))
    assert png(figures.heatmap(Summary(torch.ones(1), torch.eye(1)), "inverse"))


def test_wrong_use_of_the_heatmap():
    with pytest.raises(ValueError, match="what='hbar'"):
        figures.heatmap(summary_of(), "hbar")
    with pytest.raises(ValueError, match="scale='log'"):
        figures.heatmap(summary_of(), scale="log")
    with pytest.raises(ValueError, match="no Hbar"):
        figures.heatmap(Summary(torch.ones(2)))


# --- rates ----------------------------------------------------------------------------------------


def test_rates_weights_solid_biases_dotted_negative_marked():
    figure = figures.rates(history_of([[1.0, 2.0], [-3.0, 4.0], [math.nan, 8.0]]))
    (axis,) = figure.axes
    assert axis.get_yscale() == "log"
    assert [line.get_linestyle() for line in axis.lines] == ["-", ":"]
    np.testing.assert_equal(axis.lines[0].get_ydata(), [1, math.nan, math.nan])
    np.testing.assert_equal(axis.lines[1].get_ydata(), [2, 4, 8])
    negative, _, lost = axis.collections
    finite = np.ma.compressed(np.ma.masked_invalid(negative.get_offsets()[:, 1]))
    assert finite.tolist() == [3]
    assert lost.get_offsets()[:, 0].tolist() == [2]
    labels = [text.get_text() for text in axis.get_legend().get_texts()]
    assert labels == ["0.weight (Linear)", "0.bias (Linear)", "negative: size", "not finite"]


def test_long_rates_are_averaged_as_in_the_paper():
    etas = [[float(e), 1.0] for e in range(1, 101)]
    (axis,) = figures.rates(history_of(etas)).axes
    assert axis.lines[0].get_xdata().tolist() == [10, 30, 50, 70, 90]
    assert axis.lines[0].get_ydata()[0] == np.mean(range(1, 21))
    (axis,) = figures.rates(history_of(etas), window=0).axes
    assert len(axis.lines[0].get_xdata()) == 100


def test_rates_of_many_groups_show_the_depth():
    figure = figures.rates(history_of([[1.0] * 200, [2.0] * 200]))
    assert len(figure.axes) == 2 and figure.axes[1].get_ylabel() == "layer"
    colours = {line.get_color() for line in figure.axes[0].lines}
    assert len(colours) == 100 and png(figure)


def test_rates_of_one_measurement_and_of_none():
    assert png(figures.rates(history_of([[1.0, 2.0]])))
    assert png(figures.rates(history_of([[math.nan, math.nan]])))
    assert png(figures.rates(history_of([[0.0, 0.0]])))
    with pytest.raises(ValueError, match="no measurement"):
        figures.rates(History("empty"))


@pytest.mark.parametrize("size", [1, 42, 200])
def test_rate_bars(size):
    eta = torch.linspace(-1, 3, size) if size > 1 else torch.ones(1)
    error = 0.1 * torch.ones(size)
    rates = replace(learning_rates(Summary(eta, torch.eye(size)), 0), eta_stderr=error)
    figure = figures.rate_bars(rates)
    axis = figure.axes[0]
    drawn = {}
    for container in axis.containers:
        points, _, (bars,) = container.lines
        for x, y, bar in zip(*points.get_data(), bars.get_segments()):
            drawn[int(y)] = x
            assert bar[:, 0] == pytest.approx([x - 0.1, x + 0.1])
    assert [drawn[s] for s in range(size)] == pytest.approx(eta.abs().tolist())
    assert len(axis.get_yticklabels()) == size and png(figure)


def test_rate_bars_mark_what_is_not_a_rate():
    rates = learning_rates(Summary(torch.ones(4), torch.eye(4)), 0)
    rates = replace(rates, eta=torch.tensor([1.0, -2.0, 0.0, math.nan]))
    figure = figures.rate_bars(rates)
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["positive", "negative: size", "not finite", "zero"]
    assert "newton" in figure.axes[0].get_title(loc="left")
    fills = [c.lines[0].get_markerfacecolor() for c in figure.axes[0].containers]
    assert fills[0] != "none" and fills[1] == "none"  # negative ones are open
    lost = figures.rate_bars(Summary(torch.full((2,), math.nan), torch.eye(2), torch.ones(2)))
    assert "not-finite" in lost.axes[0].get_title(loc="left") and png(lost)


# --- a training -----------------------------------------------------------------------------------


def test_curves_of_several_histories():
    a = History("a", curves={"train_loss": [(0, 2.0), (1, 1.0)], "accuracy": [(0, 0.5)]})
    b = History("b", curves={"train_loss": [(0, 3.0), (1, math.inf)]})
    figure = figures.curves([a, b])
    loss, accuracy = figure.axes
    assert (loss.get_yscale(), accuracy.get_yscale()) == ("log", "linear")
    assert loss.lines[0].get_ydata().tolist() == [2, 1]
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["a", "b (not finite from epoch 1)"]
    assert len(figures.curves(a, ["accuracy"]).axes) == 1
    with pytest.raises(ValueError, match="No history has a curve 'los'"):
        figures.curves(a, ["los"])
    with pytest.raises(ValueError, match="no curves"):
        figures.curves(History())
    a.curves["test accuracy"] = []  # as of a run whose task has none
    assert len(figures.curves([a, b]).axes) == len(figure.axes)


def test_predicted_against_real_change():
    made = History.of(summary_of())
    trials = (Trial(0.5, -1.0, -0.75), Trial(1.0, -2.0, math.inf))
    made.measured[0] = replace(made.measured[0], trials=trials)
    figure = figures.predicted_change(made)
    (axis,) = figure.axes
    points = [c.get_offsets().tolist() for c in axis.collections]
    assert points[0] == [[-1.0, -0.75]] and points[2] == []
    assert points[3][0][0] == -2.0  # marked above all others
    labels = [text.get_text() for text in axis.get_legend().get_texts()]
    assert labels == ["0.5 of the step", "1 of the step (1 not finite)"] and png(figure)
    with pytest.raises(ValueError, match="step_trials"):
        figures.predicted_change(History.of(summary_of()))


def test_pairs():
    summary = summary_of()
    figure = figures.pairs(summary, 4)
    (axis,) = figure.axes
    expected = [abs(pair.interaction) for pair in strongest_pairs(summary, 4)]
    assert [bar.get_width() for bar in axis.patches] == expected
    for bar, pair in zip(axis.patches, strongest_pairs(summary, 4)):  # red and blue as in heat maps
        red, _, blue, _ = bar.get_facecolor()
        assert (red > blue) == (pair.interaction > 0)
    first = strongest_pairs(summary, 1)[0]
    text = axis.get_yticklabels()[0].get_text()
    assert text == f"{first.first} (Linear) – {first.second} (Linear)"
    bare = figures.pairs(summary.Hbar, 1).axes[0].get_yticklabels()[0].get_text()
    assert bare == " – ".join(str(summary.names.index(name)) for name in first[:2])
    assert png(figure)
    frame = axis.get_window_extent()
    assert all(text.get_window_extent().x1 < frame.x1 for text in axis.texts)
    (legend,), signs = (
        figure.legends,
        {pair.interaction > 0 for pair in strongest_pairs(summary, 4)},
    )
    assert len(legend.texts) == len(signs)
    (alone,) = figures.pairs(torch.tensor([[2.0, 1.0], [1.0, 3.0]])).legends[0].texts
    assert alone.get_text() == "in each other's way"
    assert "no pairs" in texts(figures.pairs(Summary(torch.ones(1), torch.eye(1))))


def test_figures_show_themselves_in_a_notebook():
    assert figures.pairs(summary_of())._repr_png_()[:4] == b"\x89PNG"


def test_long_names_are_cut_inside():
    name = "transformer.encoder.layers.11.attention.output.dense.weight"
    assert len(short_name(name)) == 32 and short_name(name).endswith("output.dense.weight")
    assert short_name("0.parametrizations.weight.original0") == "0.weight0"
