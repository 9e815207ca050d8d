"""The page as a file: what it carries, from what it is made, and what is said of mistakes."""

import base64
import json
import math
import re
import subprocess
import sys
from dataclasses import replace
from importlib import resources

import numpy as np
import pytest
import torch

import newton_summary as ns
from newton_summary.page import document as page_module
from report_cases import NAMES, random_summary, small_history

pytest.importorskip("plotly")


def carried(path):
    """Return the contents of a page."""
    found = re.search(
        r'<script type="application/json" id="contents">(.*?)</script>', path.read_text()
    )
    return json.loads(found[1])


def unpacked(array):
    return np.frombuffer(base64.b64decode(array["data"]), np.dtype(array["type"]).newbyteorder("<"))


def upper(matrix):
    """Return the upper triangle row by row."""
    size = len(matrix)
    return [float(matrix[s, t]) for s in range(size) for t in range(s, size)]


# --- numbers -------------------------------------------------------------------------------------


def test_numbers_keep_seven_digits(tmp_path):
    history = small_history()
    run = carried(ns.report(history, tmp_path / "page.html"))["runs"][0]
    assert [group["name"] for group in run["groups"]] == list(NAMES)
    assert [group["title"] for group in run["groups"]] == [f"{name} (Linear)" for name in NAMES]
    assert [group["layer"] for group in run["groups"]] == [0, 0, 1, 1]
    assert [group["size"] for group in run["groups"]] == [12, 4, 8, 2]
    assert [group["role"] for group in run["groups"]] == ["weight", "bias"] * 2
    for shown, measured in zip(run["measured"], history.measured, strict=True):
        inverse = torch.linalg.inv(measured.summary.Hbar)
        np.testing.assert_allclose(unpacked(shown["Hbar"]), upper(measured.summary.Hbar), 1e-7)
        np.testing.assert_allclose(unpacked(shown["inverse"]), upper(inverse), 1e-5)
        np.testing.assert_allclose(unpacked(shown["eta"]), measured.eta, 1e-7)
        np.testing.assert_allclose(unpacked(shown["eta_stderr"]), measured.eta_stderr, 1e-7)
        assert shown["trials"] == [list(trial) for trial in measured.trials]
    assert run["curves"]["train_loss"] == [
        [e, float(m.summary.loss)] for e, m in enumerate(history.measured)
    ]


@pytest.mark.parametrize("scale", [1e-60, 1e60, 1e-40])
def test_numbers_beyond_float32_stay(tmp_path, scale):
    summary = random_summary(3)
    summary = ns.Summary(gbar=summary.gbar, Hbar=summary.Hbar * scale, D3=summary.D3)
    shown = carried(ns.report(summary, tmp_path / "page.html"))["runs"][0]["measured"][0]
    np.testing.assert_allclose(unpacked(shown["Hbar"]), upper(summary.Hbar), 1e-15)


def test_a_matrix_that_is_not_symmetric_is_whole(tmp_path):
    Hbar = torch.tensor([[1.0, 2.0], [2.5, 9.0]])
    summary = ns.Summary(gbar=torch.ones(2), Hbar=Hbar, D3=torch.ones(2))
    shown = carried(ns.report(summary, tmp_path / "page.html"))["runs"][0]["measured"][0]
    assert unpacked(shown["Hbar"]).tolist() == [1.0, 2.0, 2.5, 9.0]


def test_entries_that_are_not_finite_stay_so(tmp_path):
    Hbar = torch.tensor([[1.0, math.nan], [math.nan, -math.inf]])
    summary = ns.Summary(gbar=torch.ones(2), Hbar=Hbar, D3=torch.ones(2), loss=math.inf)
    shown = carried(ns.report(summary, tmp_path / "page.html"))["runs"][0]["measured"][0]
    assert str(unpacked(shown["Hbar"]).tolist()) == "[1.0, nan, -inf]"
    assert shown["loss"] == "inf" and shown["status"] == "not-finite"
    assert shown["inverse"] is None and "non-finite entries" in shown["no_inverse"]


def test_an_infinite_curvature_gives_no_interaction(tmp_path):
    Hbar = torch.eye(3)
    Hbar[2, 2] = math.inf
    summary = ns.Summary(gbar=torch.ones(3), Hbar=Hbar, D3=torch.ones(3))
    shown = carried(ns.report(summary, tmp_path / "page.html"))["runs"][0]["measured"][0]
    assert [pair[:2] for pair in shown["analysis"]["pairs"]] == [["0", "1"]]
    assert shown["analysis"]["undefined_pairs"] == 2


def test_no_inverse_comes_with_a_reason(tmp_path):
    summary = ns.Summary(gbar=torch.ones(2), Hbar=torch.ones(2, 2), D3=torch.ones(2))
    shown = carried(ns.report(summary, tmp_path / "page.html"))["runs"][0]["measured"][0]
    assert shown["inverse"] is None and "move against each other" in shown["no_inverse"]
    assert shown["analysis"]["kept"] is None


def test_a_group_that_nothing_depends_on_leaves_the_others_an_inverse(tmp_path):
    summary = ns.Summary(
        gbar=torch.ones(2), Hbar=torch.diag(torch.tensor([2.0, 0.0])), D3=torch.ones(2)
    )
    shown = carried(ns.report(summary, tmp_path / "page.html"))["runs"][0]["measured"][0]
    assert shown["no_inverse"] is None and shown["inverse"] is not None
    assert shown["analysis"]["kept"] is not None


def test_second_order_alone_is_enough(tmp_path):
    whole = random_summary(3)
    summary = ns.Summary(gbar=whole.gbar, Hbar=whole.Hbar)
    shown = carried(ns.report(summary, tmp_path / "page.html"))["runs"][0]["measured"][0]
    expected = torch.linalg.solve(whole.Hbar, whole.gbar)  # Newton's step
    np.testing.assert_allclose(unpacked(shown["eta"]), expected, 1e-6)
    assert shown["D3"] is None


def test_pairs_and_kept_shares(tmp_path):
    """Two groups of one layer that do not touch the third one."""
    Hbar = torch.tensor([[4.0, 3.0, 0.0], [3.0, 9.0, 0.0], [0.0, 0.0, 1.0]])
    summary = ns.Summary(gbar=torch.ones(3), Hbar=Hbar, D3=torch.ones(3))
    analysis = carried(ns.report(summary, tmp_path / "page.html"))["runs"][0]["measured"][0][
        "analysis"
    ]
    assert analysis["pairs"][0] == ["0", "1", 0.5, 3.0, 1]
    # Both normalised matrices have three ones and 0.5 or -0.5 twice.
    assert analysis["kept"]["inverse"]["diagonal"] == pytest.approx(3 / 3.5)
    assert analysis["kept"]["hessian"]["tridiagonal"] == pytest.approx(1.0)


def test_a_page_of_42_groups_and_100_epochs_is_below_5_megabytes(tmp_path):
    history = ns.History("big")
    for epoch in range(101):
        summary = random_summary(42, seed=epoch)
        history.add(epoch, summary, ns.learning_rates(summary))
    assert ns.report(history, tmp_path / "page.html").stat().st_size < 5e6


# --- text ----------------------------------------------------------------------------------------


def test_no_text_closes_a_script_or_fills_a_place(tmp_path):
    nasty = "</script><script>alert(1)</script><!-- {{plotly}} &amp;"
    history = small_history(nasty, epochs=1, command=nasty)
    path = ns.report(history, tmp_path / "page.html")
    run = carried(path)["runs"][0]
    assert run["name"] == nasty and run["facts"]["command"] == nasty
    text = path.read_text()
    assert "alert(1)</script>" not in text.replace("&lt;/script&gt;", "")
    assert text.count("<script") == 3 and text.count("</script") == 3
    assert "<title>&lt;/script&gt;" in text


def test_the_page_names_no_other_address():
    """Of its own; plotly's source has some, which it uses only for maps."""
    files = resources.files("newton_summary.page")
    for name in ("page.html", "page.css", *page_module.SCRIPTS):
        assert "http:" not in files.joinpath(name).read_text().replace("http-equiv", "")
        assert "https:" not in files.joinpath(name).read_text()


# --- what it is made from ------------------------------------------------------------------------


def test_sources(tmp_path):
    history = small_history("one", epochs=1)
    history.save(tmp_path / "history.pt")
    sources = [
        history,
        history.measured[0].summary,
        tmp_path / "history.pt",
        str(tmp_path / "history.pt"),
    ]
    path = ns.report(sources, tmp_path / "new" / "folder")
    assert path == tmp_path / "new" / "folder" / "report.html"
    assert [run["name"] for run in carried(path)["runs"]] == ["one", "Sequential", "one", "one"]
    assert ns.report(history, tmp_path, title="A <title>").name == "report.html"
    page = (tmp_path / "report.html").read_text()
    assert '<h1 class="short">A &lt;title&gt;</h1>' in page


def test_a_step_beyond_the_whole_loss_is_doubted(tmp_path):
    """Newton's step along a slope of 1 and a curvature of 1 promises a decrease of 1/2."""
    for loss, doubted in ((0.6, False), (0.4, True), (math.nan, False)):
        one = torch.ones(1, dtype=torch.float64)
        summary = ns.Summary(gbar=one, Hbar=one[None], loss=loss)
        (run,) = carried(ns.report(summary, tmp_path / "page.html"))["runs"]
        assert ("whole loss of 0.4" in run["measured"][0]["doubt"]) is doubted


def test_gain_beyond_the_whole_loss_is_not_told(tmp_path):
    """By its quadratic model this summary promises a decrease of 1/2 with both kinds of rates."""
    for loss, told in ((0.6, True), (0.4, False), (math.nan, True)):
        one = torch.ones(1, dtype=torch.float64)
        summary = ns.Summary(gbar=one, Hbar=one[None], loss=loss)
        (run,) = carried(ns.report(summary, tmp_path / "page.html"))["runs"]
        gain = run["measured"][0]["analysis"]["gain"]
        assert (gain is not None and "promise 1 times" in gain) is told


def test_gain_is_told_with_the_strength_of_the_rates(tmp_path):
    """And not of absolute rates, or where the rates are no minimum."""
    H = torch.tensor([[2.0, 1.0], [1.0, 3.0]])
    bent = torch.diag(torch.tensor([2.0, -1.0]))
    one, none = torch.ones(2), torch.zeros(2)
    for Hbar, D3, strength, status in (
        (H, one, 100.0, None),
        (H, one, 0.0, None),
        (H, one, 0.0, "absolute"),
        (bent, one, 0.0, None),
        (bent, none, 1.0, None),
    ):
        summary = ns.Summary(gbar=torch.ones(2), Hbar=Hbar, D3=D3)
        rates = ns.learning_rates(summary, strength)
        history = ns.History("one")
        history.add(0, summary, rates if status is None else replace(rates, status=status))
        (run,) = carried(ns.report(history, tmp_path / "page.html"))["runs"]
        gain = run["measured"][0]["analysis"]["gain"]
        if Hbar is H and status is None:
            assert f"with lambda_int = {strength:g})" in gain
        else:
            assert gain is None


def test_names_leave_out_the_folder_of_all_runs(tmp_path):
    names = ["runs/lenet/a/seed=0", "runs/lenet/a/seed=1", "runs/lenet/b"]
    histories = [ns.History(name, curves={"loss": [(0, 1.0)]}) for name in names]
    page = carried(ns.report(histories, tmp_path / "page.html"))
    assert [run["name"] for run in page["runs"]] == ["a/seed=0", "a/seed=1", "b"]
    assert [history.name for history in histories] == names
    assert carried(ns.report(histories[:1], tmp_path))["runs"][0]["name"] == names[0]


def test_curves_alone_are_enough(tmp_path):
    history = ns.History("adam", curves={"train_loss": [(0, 1.0), (1, math.nan)]})
    run = carried(ns.report(history, tmp_path / "page.html"))["runs"][0]
    assert run["measured"] == [] and run["curves"]["train_loss"] == [[0, 1.0], [1, "nan"]]


@pytest.mark.parametrize(
    ("what", "error", "words"),
    [
        ([], ValueError, "empty"),
        (ns.History("x"), ValueError, "'x' has neither a measurement nor a curve"),
        (ns.Summary(gbar=torch.ones(2)), ValueError, "order=2"),
        (3, TypeError, "int"),
        ([3], TypeError, "int"),
        (torch.nn.Linear(2, 2), TypeError, "a run directory, not Linear.*makes a summary"),
    ],
)
def test_mistakes(tmp_path, what, error, words):
    with pytest.raises(error, match=words):
        ns.report(what, tmp_path / "page.html")
    assert not list(tmp_path.iterdir())


def test_a_folder_without_a_run_is_told(tmp_path):
    with pytest.raises(Exception, match="not a run directory"):
        ns.report(tmp_path, tmp_path / "page.html")


def test_without_plotly_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(page_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install -e '\.\[report\]'"):
        ns.report(random_summary(2), tmp_path / "page.html")
    assert not list(tmp_path.iterdir())


def test_a_page_is_written_as_a_whole(tmp_path, monkeypatch):
    target = tmp_path / "page.html"
    target.write_text("before")

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="No space"):
        ns.report(random_summary(2), target)
    assert [file.name for file in tmp_path.iterdir()] == [
        "page.html"
    ] and target.read_text() == "before"


def test_plotly_is_not_imported_with_the_package():
    code = "import sys, newton_summary as ns; ns.report; print('plotly' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


# --- colours -------------------------------------------------------------------------------------

# How colours look without one kind of cone: Machado, Oliveira and Fernandes 2009, severity 1, on
# linear RGB.
BLINDNESS = {
    "none": np.eye(3),
    "protan": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deutan": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "tritan": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}


def lab(colour, blindness):
    """Return CIE L*a*b* of a colour as seen by a kind of eye."""
    rgb = np.array([int(colour[k : k + 2], 16) for k in (1, 3, 5)]) / 255
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    seen = np.clip(np.array(BLINDNESS[blindness]) @ linear, 0, 1)
    to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    x, y, z = np.cbrt(np.array(to_xyz) @ seen / [0.9505, 1.0, 1.089])
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("blindness", BLINDNESS)
def test_signs_are_told_apart_by_every_eye(blindness):
    css = resources.files("newton_summary.page").joinpath("page.css").read_text()
    scales = [scale.split() for scale in re.findall(r"--diverging: (.*?);", css)]
    assert len(scales) == 2  # light and dark
    for scale in scales:
        places = [round(share * (len(scale) - 1)) for share in (0, 0.25, 0.5, 0.75, 1)]
        low, half_low, middle, half_high, high = (lab(scale[k], blindness) for k in places)
        for one, other in ((low, high), (half_low, half_high), (low, middle), (high, middle)):
            assert np.linalg.norm(one - other) > 30
        assert abs(low[0] - middle[0]) > 35 and abs(high[0] - middle[0]) > 35  # also printed grey
