"""What a notebook shows: well-formed, complete, and the colours tell the signs."""

import math
import xml.etree.ElementTree as ElementTree
from importlib import resources

import pytest
import torch

from newton_summary import (
    Summary,
    analysis,
    learning_rates,
    make_partition,
    suggest_lambda_int,
    suggest_lrs,
    summarize,
    verify,
)
from newton_summary.display.html import (
    DIVERGING,
    MOST_DRAWN,
    UNKNOWN,
    html_heatmap,
    html_table,
    paragraph,
)


def page(html):
    return ElementTree.fromstring(f"<div>{html.replace('<br>', '<br/>')}</div>")


def cells(html):
    """The rows of a table as text, read by an XML parser."""
    return [["".join(cell.itertext()) for cell in row] for row in page(html).iter("tr")]


def summary_of(H):
    return Summary(torch.ones(len(H)), H, torch.ones(len(H)))


def test_table_holds_its_cells_escaped():
    rows = [("name", "value"), ("<a>&\"'", "1")]
    assert cells(html_table(rows, right=[1])) == [list(row) for row in rows]
    assert html_table(rows, right=[1]).count("text-align:right") == 2


def test_summary_shows_the_numbers_of_its_text():
    summary = summary_of(torch.tensor([[1.0, 0.5], [0.5, -2.0]]))
    lines = str(summary).splitlines()
    assert cells(summary._repr_html_()) == [line.split() for line in lines[1:]]
    assert lines[0] in summary._repr_html_()
    first = Summary(gbar=torch.ones(2))
    assert "<b " not in first._repr_html_() and len(cells(first._repr_html_())) == 3


def test_rates_show_the_numbers_of_their_text():
    rates = learning_rates(summary_of(torch.eye(3)))
    assert cells(rates._repr_html_())[1:] == [s.split() for s in str(rates).splitlines()[1:4]]
    assert rates.status in rates._repr_html_()


def test_partitions_and_advice_show_the_words_of_their_text():
    model = torch.nn.Linear(2, 1)
    partition = make_partition(model)
    rows = cells(partition._repr_html_())
    assert " ".join(" ".join(row) for row in rows).split() == str(partition).split()[4:]
    data = torch.utils.data.DataLoader(torch.randn(24, 2), 8)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    advice = suggest_lrs(model, lambda m, x: m(x).square().mean(), data, sgd, partition=partition)
    html, lines = advice._repr_html_(), str(advice).splitlines()
    assert [" ".join(row).split() for row in cells(html)] == [line.split() for line in lines[:3]]
    assert lines[3] in html and repr(advice).startswith("Advice(2 groups: ")


def results():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    data = torch.randn(20, 3), torch.randint(2, (20,))

    def loss_fn(model, batch):
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

    summary = summarize(model, loss_fn, data)
    yield learning_rates(summary)
    yield suggest_lambda_int(model, loss_fn, data, summary)
    yield verify(model, loss_fn, data)
    yield analysis.inverse_kept(summary)
    yield analysis.joint_gain(summary)
    yield analysis.strongest_pairs(summary)  # which has nothing to say below the table
    yield analysis.strongest_pairs(torch.diag(torch.tensor([0.0, 1.0, 2.0])))
    yield analysis.suggest_merges(summary)


@pytest.mark.parametrize("result", list(results()), ids=lambda result: type(result).__name__)
def test_results_show_the_words_of_their_text(result):
    html, lines = result._repr_html_(), str(result).splitlines()
    rows = cells(html)
    assert len(rows) > 1
    assert [" ".join(row).split() for row in rows] == [s.split() for s in lines[: len(rows)]]
    said = ["".join(p.itertext()) for p in page(html).iter("p")]
    assert said == (["".join(lines[len(rows) :])] if lines[len(rows) :] else [])


def rgb(colour):
    return tuple(int(colour[i : i + 2], 16) for i in (1, 3, 5))


def drawn(html, size):
    """The colour of every cell, by row and column."""
    colours = [cell.get("style").removeprefix("background:") for cell in page(html).iter("b")]
    return {divmod(i, size): colour for i, colour in enumerate(colours)}


def test_colours_tell_sign_and_size():
    H = torch.tensor([[1e3, -1e3, 0.0], [1.0, -1.0, 1e-3], [math.nan, math.inf, -1e-3]])
    html = html_heatmap(("a", "b", "c"), H)
    colours = drawn(html, 3)
    assert len(colours) == 9
    for (row, column), colour in colours.items():
        value = float(H[row, column])
        if not math.isfinite(value):
            assert colour == UNKNOWN
            continue
        red, _, blue = rgb(colour)
        assert (red > blue, red < blue) == (value > 0, value < 0)
    strengths = [rgb(colours[cell])[1] for cell in ((0, 0), (1, 0), (1, 2), (0, 2))]
    assert strengths == sorted(strengths) and len(set(strengths)) == 4  # green fades with the size
    assert "2 entries that are not finite" in html
    titles = [cell.get("title") for cell in page(html).iter("b")]
    assert titles[0] == "a, a: 1000" and titles[6] == "c, a: nan"


@pytest.mark.parametrize("size", [1, 24, MOST_DRAWN])
def test_every_entry_is_drawn(size):
    html = html_heatmap([str(s) for s in range(size)], torch.ones(size, size))
    assert set(drawn(html, size).values()) == {DIVERGING[-1]}
    assert len(drawn(html, size)) == size**2 and f"repeat({size}," in html


def test_colours_are_the_same_in_notebooks_figures_and_on_the_page():
    mpl = pytest.importorskip("matplotlib")
    shares = torch.linspace(0, 1, len(DIVERGING)).tolist()
    in_figures = [mpl.colors.to_hex(mpl.colormaps["RdBu_r"](share)) for share in shares]
    for mine, theirs in zip(DIVERGING, in_figures, strict=True):
        assert all(abs(a - b) <= 3 for a, b in zip(rgb(mine), rgb(theirs)))
    style = resources.files("newton_summary.page").joinpath("page.css").read_text()
    assert f"--diverging: {' '.join(DIVERGING)};" in style


def test_nothing_but_zeros_or_nan_and_too_many_groups():
    assert set(drawn(html_heatmap("ab", torch.zeros(2, 2)), 2).values()) == {"#f7f7f7"}
    assert set(drawn(html_heatmap("ab", torch.full((2, 2), math.nan)), 2).values()) == {UNKNOWN}
    many = Summary(torch.ones(49), torch.eye(49))
    assert "<b " not in many._repr_html_() and "too many" in many._repr_html_()
    assert paragraph("a\n<b") == "<p>a<br>&lt;b</p>"
