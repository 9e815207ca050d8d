"""The page in headless Chromium: what a reader sees, and what the controls do."""

import json
import math
import os
import re
import shutil
from dataclasses import replace

import pytest
import torch
from torch import nn

import newton_summary as ns
from report_cases import NAMES, TITLES, random_summary, small_history

pytest.importorskip("plotly")

FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
)


@pytest.fixture(scope="module")
def browser():
    """Give Chromium; without it the tests are skipped, except where it is required."""
    names = ("chromium", "chromium-browser", "google-chrome")
    found = next((path for path in map(shutil.which, names) if path), None)
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        found = None
    if found is None:
        if os.environ.get("NEWTON_SUMMARY_BROWSER") == "required":
            pytest.fail("The tests of the page need chromium and playwright.")
        pytest.skip("needs chromium and playwright")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=found, args=list(FLAGS))
        yield chromium
        chromium.close()


class Opener:
    """Writes pages and opens them offline; remembers errors and requests."""

    def __init__(self, browser, folder):
        self.browser, self.folder = browser, folder
        self.pages, self.problems = [], []

    def __call__(self, what, width=1200, before="", **options):
        path = ns.report(what, self.folder / "page.html")
        viewport = {"width": width, "height": 900}
        page = self.browser.new_context(viewport=viewport, offline=True, **options).new_page()
        self.pages.append(page)
        page.on("console", lambda m: self.problems.append(m.text) if m.type != "log" else None)
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("request", lambda request: self.problems.append(request.url))
        if before:
            page.add_init_script(before)
        page.goto(path.as_uri())
        page.locator("html[data-ready]").wait_for(state="attached")
        assert self.problems.pop(0) == path.as_uri()
        return page

    def close(self):
        for page in self.pages:
            page.context.close()
        assert [text for text in self.problems if not text.startswith("data:")] == []


@pytest.fixture
def show(browser, tmp_path):
    """Give a function that opens a page; no error and no request may come of it."""
    opener = Opener(browser, tmp_path)
    yield opener
    opener.close()


@pytest.fixture(scope="module")
def history():
    return small_history(model="a small network", command="newton-summary inspect net.py:build")


@pytest.fixture(scope="module")
def shared(browser, history, tmp_path_factory):
    opener = Opener(browser, tmp_path_factory.mktemp("shared"))
    yield opener(history)
    opener.close()


@pytest.fixture
def page(shared):
    """Give the page of the small history, its controls as they were at first."""
    for field, value in (("matrix", "both"), ("scale", "normalised"), ("block", "all")):
        choose(shared, field, value)
    shared.locator("#epoch").focus()
    shared.keyboard.press("End")
    return shared


def hover(page, row, column, size, panel=0):
    """Return what is shown when the mouse rests on a cell."""
    # plotly draws the cells of a heat map as one image.
    image = page.locator("#heatmaps .panel").nth(panel).locator(".heatmaplayer image")
    image.scroll_into_view_if_needed()
    box = image.bounding_box()
    rows, columns = (size, size) if isinstance(size, int) else size
    page.mouse.move(0, 0)
    x = box["x"] + (column + 0.5) / columns * box["width"]
    y = box["y"] + (row + 0.5) / rows * box["height"]
    page.mouse.move(x, y)
    label = page.locator("#heatmaps .hovertext")
    label.wait_for()
    return label.text_content()


def hovered(text, symbol="H̄"):
    """Return the value, and the normalised one, of a hover label."""
    found = re.search(rf"{symbol} = (\S+?)(?: ± \S+?)?normalised (\S+)", text)
    return float(found[1]), float(found[2])


def choose(page, field, value):
    page.locator(f'input[name="{field}"][value="{value}"]').check(force=True)


def column(page, title):
    """Return the cells of a column of the first table of groups."""
    heads = page.locator("#groups thead").first.locator("th").all_text_contents()
    k = heads.index(title) + 1
    return page.locator(f"#groups table >> nth=0 >> tbody tr > :nth-child({k})").all_text_contents()


# --- heat maps -----------------------------------------------------------------------------------


def test_hover_shows_the_numbers(page, history):
    H = history.measured[-1].summary.Hbar
    inverse = torch.linalg.inv(H)
    d = H.diagonal().abs().sqrt()
    for s, t in ((0, 0), (0, 3), (2, 1), (3, 2)):
        text = hover(page, s, t, 4)
        assert NAMES[s] in text and NAMES[t] in text
        value, scaled = hovered(text)
        assert value == pytest.approx(float(H[s, t]), rel=1e-5)
        assert scaled == pytest.approx(float(H[s, t] / d[s] / d[t]), abs=6e-4)
        value, _ = hovered(hover(page, s, t, 4, panel=1), "H̄⁻¹")
        assert value == pytest.approx(float(inverse[s, t]), rel=1e-5)
    error = float(history.measured[-1].summary.Hbar_stderr[0, 3])
    shown = re.search(r"± (\S+?)normalised", hover(page, 0, 3, 4))[1]
    assert float(shown) == pytest.approx(error, rel=0.06)  # two digits


def test_controls_change_the_heat_map(page, history):
    panels = page.locator("#heatmaps .panel")
    image = panels.first.locator(".heatmaplayer image")
    assert panels.count() == 2
    pictures = set()
    for scale in ("normalised", "raw", "log"):
        choose(page, "scale", scale)
        pictures.add(image.evaluate("node => node.href.baseVal"))
        H = history.measured[-1].summary.Hbar  # the numbers stay, whatever the colours
        assert hovered(hover(page, 0, 1, 4))[0] == pytest.approx(float(H[0, 1]), rel=1e-5)
    assert len(pictures) == 3
    choose(page, "matrix", "inverse")
    assert panels.count() == 1 and "Inverse" in panels.first.locator("h3").text_content()
    choose(page, "matrix", "Hbar")
    choose(page, "block", "weight-bias")
    assert hovered(hover(page, 1, 0, 2))[0] == pytest.approx(float(H[2, 1]), rel=1e-5)
    rows = panels.first.locator(".yaxislayer-above text, .ytick text").all_text_contents()
    columns = panels.first.locator(".xaxislayer-above text, .xtick text").all_text_contents()
    assert set(rows) == set(TITLES[0::2]) and set(columns) == set(TITLES[1::2])


def test_the_slider_goes_through_training(page, history):
    assert page.locator("#epoch-text").text_content() == "epoch 2"
    page.locator("#epoch").focus()
    page.keyboard.press("Home")
    assert page.locator("#epoch-text").text_content() == "epoch 0"
    first = history.measured[0]
    assert hovered(hover(page, 1, 2, 4))[0] == pytest.approx(
        float(first.summary.Hbar[1, 2]), rel=1e-5
    )
    rates = [float(cell.split(" ± ")[0]) for cell in column(page, "Rate η")]
    assert rates == pytest.approx(first.eta.tolist(), rel=1e-3)
    errors = [float(cell.split(" ± ")[1]) for cell in column(page, "Rate η")]
    assert errors == pytest.approx(first.eta_stderr.tolist(), rel=0.06)


def test_every_name_is_readable_with_200_groups(show):
    names = [f"encoder.layers.{s // 4}.part{s % 4}.weight" for s in range(200)]
    page = show(random_summary(200, names=names), width=1000)
    assert page.locator("#heatmaps .ytick text").count() < 200
    page.locator("#every").check()
    labels = page.locator("#heatmaps .panel").first.locator(".ytick text")
    assert labels.count() == 200 and len(set(labels.all_text_contents())) == 200
    boxes = [labels.nth(k).bounding_box() for k in (0, 1, 2)]
    assert boxes[1]["y"] - boxes[0]["y"] >= 10.5  # the size of the letters
    assert page.evaluate("document.documentElement.scrollWidth") <= 1000


def test_long_names_leave_room_for_the_numbers_of_pairs_and_say_what_they_are(show):
    parts = (
        "self_attn.in_proj_weight",
        "self_attn.out_proj.weight",
        "linear1.weight",
        "norm1.bias",
    )
    names = [f"encoder.layers.{s // 4}.{parts[s % 4]}" for s in range(12)]
    names += ["patch.weight", "patch.bias", "norm.weight", "norm.bias"]
    page = show(random_summary(16, names=names), width=1200)
    table = page.locator("#pairs .table").first
    assert table.evaluate("node => node.scrollWidth <= node.clientWidth")
    titles = table.locator("tbody [title]")
    assert {titles.nth(k).get_attribute("title") for k in range(titles.count())} <= set(names)
    labels = set(page.locator("#heatmaps .ytick text").all_text_contents())
    assert labels & {"patch.weight", "patch.bias"} and not labels & {"weight", "bias"}


def test_a_short_name_says_of_which_module_a_weight_is(show):
    """Of nn.Transformer: "decoder.weight" was that of decoder.norm, and "0.weight" of out_proj."""
    model = nn.Transformer(4, 1, 1, 1, 4)
    names = [f"t.{name}" for name, _ in model.named_parameters()]
    page = show(random_summary(len(names), names=names), width=1280)
    table = page.locator("#pairs .table").first
    assert table.evaluate("node => node.scrollWidth <= node.clientWidth")
    found = table.locator("tbody [title]")
    shown = {found.nth(k).get_attribute("title"): found.nth(k).text_content() for k in range(24)}
    of_modules = {
        name: label for name, label in shown.items() if name.endswith((".weight", ".bias"))
    }
    assert len(of_modules) > 8
    for name, label in of_modules.items():
        tail = re.split(r"[.…]", label)[-2:]
        assert name.split(".")[-1] == tail[1] and name.split(".")[-2].endswith(tail[0])
    assert sum(len(label) < len(name) for name, label in of_modules.items()) > 8


def test_what_is_not_finite_is_shown_as_such(show):
    Hbar = torch.eye(3)
    Hbar[0, 1] = Hbar[1, 0] = math.nan
    Hbar[2, 1] = Hbar[1, 2] = -math.inf
    summary = ns.Summary(gbar=torch.ones(3), Hbar=Hbar, D3=torch.ones(3))
    page = show(summary)
    assert "H̄ = nan" in hover(page, 0, 1, 3)
    assert "H̄ = -inf" in hover(page, 1, 2, 3)
    assert hovered(hover(page, 2, 0, 3))[0] == 0
    cells = page.locator("#heatmaps .annotation-text").all_text_contents()
    assert sorted(cells) == ["-inf", "-inf", "nan", "nan"]
    ground = page.locator("#heatmaps .bglayer .bg").first
    assert "hatch" in ground.evaluate("node => getComputedStyle(node).fill")
    note = page.locator("#heatmaps .panel").nth(1).locator(".note")
    assert note.text_content() == ("No inverse: Hbar has non-finite entries, so it has no inverse.")
    assert column(page, "Rate η") == ["nan"] * 3


def test_groups_without_slope_and_curvature_are_named(show, history):
    H = torch.diag(torch.tensor([0.0, 2.0, 0.0], dtype=torch.float64))
    names = ("first", "second", "third")
    some = replace(random_summary(3, names=names), gbar=H.sum(0), Hbar=H, D3=0 * H[0])
    page = show(some)
    words = page.locator("#flat-text").text_content()
    assert words.startswith("No slope or curvature here: 'first', 'third' (")
    assert words in page.locator("#facts").text_content()
    assert page.locator("#flat-text").is_visible()
    assert not show(history).locator("#flat-text").is_visible()


def test_markup_in_names_is_text(show):
    nasty = [
        "<img src=x onerror=window.hacked=1>",
        "</script><script>window.hacked=1</script>",
        "<b>bold</b>",
        "&lt;%{x}",
    ]
    history = ns.History("<i>run</i>", facts={"<u>": "<script>window.hacked=1</script>"})
    summary = random_summary(4, names=nasty)
    history.add(0, summary, ns.learning_rates(summary))
    history.add_value("<s>loss", 0, 1.0)
    page = show(history)
    assert column(page, "Group") == nasty
    assert page.locator("h1").text_content() == "<i>run</i>"
    assert "<script>window.hacked=1</script>" in page.locator("#facts").text_content()
    for s, name in enumerate(nasty):
        assert hover(page, s, s, 4).startswith(name)
    labels = page.locator("#heatmaps .ytick text").all_text_contents()
    assert "<b>bold</b>" in labels and "&lt;%{x}" in labels
    assert page.evaluate("window.hacked") is None
    assert page.locator("img, b, i, u, s").count() == 0


def test_links_in_names_are_no_links(show):
    """Of all that names may hold: addresses, escapes of terminals, marks of direction."""
    nasty = [
        '<a href="javascript:window.hacked=1">a</a>',
        '<a href="https://example.com/x" xlink:href="https://example.com/y">b</a>',
        "https://example.com/z",
        "javascript:window.hacked=1",
        "[c](https://example.com)",
        "\x1b[31mred\x1b]8;;https://example.com\x07d\x1b]8;;\x07",
        "\u202ethgir\u2066left",
        "long" * 1000,
    ]
    history = ns.History(nasty[0], facts={nasty[1]: nasty[2]})
    summary = random_summary(len(nasty), names=nasty)
    history.add(0, summary, ns.learning_rates(summary))
    history.add_value(nasty[1], 0, 1.0)
    page = show(history)
    for s in (0, 1, 2):
        hover(page, s, s, len(nasty))
        links = page.evaluate("[...document.querySelectorAll('a')].map(a => a.outerHTML)")
        assert [link for link in links if "example.com" in link or "hacked" in link] == []
    assert column(page, "Group") == nasty
    for name in page.locator("#heatmaps .ytick text").all()[:4]:
        name.click(force=True)
    assert page.evaluate("window.hacked") is None
    assert page.url.startswith("file:")


# --- tables and charts ---------------------------------------------------------------------------


def test_the_table_of_groups_sorts(page, history):
    eta = history.measured[-1].eta.tolist()
    by_rate = [name for _, name in sorted(zip(eta, TITLES, strict=True))]
    head = page.locator("#groups thead button", has_text="Rate")
    head.click()
    assert column(page, "Group") == by_rate[::-1]
    assert page.locator('#groups th[aria-sort="descending"]').text_content() == "Rate η"
    page.keyboard.press("Enter")  # the button keeps the focus
    assert column(page, "Group") == by_rate
    page.locator("#groups thead button", has_text="Group").click()
    assert column(page, "Group") == sorted(TITLES)
    page.locator("#groups thead button", has_text="Entries").click()
    assert column(page, "Entries") == ["12", "8", "4", "2"]


def test_a_factor_at_its_limit_may_be_beyond(show):
    """And a rate of 10 along the gradient is a number like any other."""
    rates = ns.learning_rates(random_summary(3))
    rates = replace(rates, eta=torch.tensor([10.0, 0.1, 3.0]), eta_stderr=torch.zeros(3))
    for title, facts, expected in (
        ("Factor η", {"measured along": "Adam's step"}, ["10.00 or more", "0.1000 or less"]),
        ("Rate η", {}, ["10.00 ± 0", "0.1000 ± 0"]),
    ):
        history = ns.History("run", facts=facts)
        history.add(0, random_summary(3), rates)
        page = show(history)
        assert column(page, title) == [*expected, "3.000 ± 0"]


def test_charts_show_every_line(page, history):
    lines = page.locator("#rates .panel").nth(1).locator(".scatterlayer .trace")
    assert lines.count() == len(NAMES)
    assert page.locator("#trials .panel").count() == 2
    words = page.locator("#trials .panel").first.locator(".about").text_content()
    real = history.measured[-1].trials[-1].real
    assert float(re.search(r"step × 1.0: .*real (\S+?)\.$", words)[1]) == pytest.approx(real, 5e-3)
    titles = page.locator("#curves h3").all_text_contents()
    assert titles == ["loss", "accuracy"]
    assert page.locator("#curves .panel").first.locator(".scatterlayer .trace").count() == 2
    facts = page.locator("#facts").text_content()
    assert "a small network" in facts and "newton-summary inspect net.py:build" in facts


def test_ticks_within_a_decade_have_their_exponent(show):
    summary = random_summary(2)
    rates = ns.learning_rates(summary)
    history = ns.History("run")
    history.add(0, summary, replace(rates, eta=torch.tensor([1.7e-5, 5.8e-5])))
    ticks = show(history).locator("#rates .ytick text").all_text_contents()
    assert len(ticks) > 1 and all("−5" in text for text in ticks)


def test_a_single_rate_has_no_chart(show):
    one = torch.ones(1, dtype=torch.float64)
    page = show(ns.Summary(gbar=one, Hbar=one[None]))
    assert not page.locator("#rates-section").is_visible()
    assert column(page, "Rate η") == ["1.000"]


def test_a_step_that_promises_too_much_is_doubted(show):
    one = torch.ones(1, dtype=torch.float64)
    page = show(ns.Summary(gbar=one, Hbar=one[None], loss=0.4))
    words = page.locator("#rates .about").text_content()
    assert "more than the whole loss of 0.4" in words and "learning_rates(summary, model=" in words


def test_runs_side_by_side(show, history):
    other = small_history("<other>", epochs=2, lr=0.1)
    adam = ns.History("adam", curves={"train_loss": [(0, 1.0), (1, 0.5)]})
    page = show([history, other, adam])
    assert page.locator("h1").text_content() == "Comparison of 3 runs: small, <other>, adam"
    assert page.locator("#heatmaps h3").all_text_contents() == ["small", "<other>"]
    value, _ = hovered(hover(page, 0, 2, 4, panel=1))
    assert value == pytest.approx(float(other.measured[-1].summary.Hbar[0, 2]), rel=1e-5)
    loss = page.locator("#curves .panel").first.locator(".scatterlayer .trace")
    assert loss.count() == 5
    page.get_by_role("checkbox", name="<other>").uncheck()
    assert page.locator("#heatmaps .panel").count() == 1 and loss.count() == 3
    page.get_by_role("checkbox", name="small").uncheck()
    assert not page.locator("#interactions").is_visible() and loss.count() == 1


# --- the page as a whole -------------------------------------------------------------------------


@pytest.mark.parametrize("width", [380, 900])
def test_a_long_title_goes_on_after_a_part_of_it(show, width):
    name = "runs/resnet18_adamw/batch_size=256,optimizer.weight_decay=0.05,seed=0,augment=cutout"
    page = show(ns.History(name, curves={"train_loss": [(0, 1.0), (1, 0.5)]}), width=width)
    assert page.title() == page.locator("h1").text_content() == name
    lines = page.locator("h1").evaluate(
        """h1 => {
          const lines = new Map();
          for (const node of h1.childNodes) {
            for (let i = 0; i < node.length; i++) {
              const range = document.createRange();
              range.setStart(node, i);
              range.setEnd(node, i + 1);
              const top = Math.round(range.getBoundingClientRect().top);
              lines.set(top, (lines.get(top) ?? "") + node.data[i]);
            }
          }
          return [...lines.values()];
        }"""
    )
    assert "".join(lines) == name and len(lines) > 1
    assert all(line[-1] in "/,=_" for line in lines[:-1]), lines


@pytest.mark.parametrize("width", [380, 1600])
def test_nothing_is_wider_than_the_window(show, history, width):
    page = show([history, random_summary(42)], width=width)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    cut = page.evaluate(
        "[...document.querySelectorAll('svg.main-svg, .choice')].filter("
        "node => node.getBoundingClientRect().right > innerWidth + 1).length"
    )
    assert cut == 0


def test_dark_and_light(page):
    ground = "getComputedStyle(document.body).backgroundColor"
    picture = page.locator("#heatmaps .heatmaplayer image").first
    page.emulate_media(color_scheme="dark")
    page.locator("html[data-theme=dark]").wait_for(state="attached")
    dark, dark_cells = page.evaluate(ground), picture.evaluate("node => node.href.baseVal")
    page.locator("#theme").click()
    assert page.evaluate(ground) == "rgb(255, 255, 255)" != dark
    assert picture.evaluate("node => node.href.baseVal") != dark_cells
    page.locator("#theme").click()
    assert page.evaluate(ground) == dark
    page.emulate_media(color_scheme="light")
    page.locator("html[data-theme=light]").wait_for(state="attached")
    assert page.evaluate(ground) == "rgb(255, 255, 255)"


def test_the_data_can_be_downloaded(page, history):
    with page.expect_download() as waiting:
        page.locator("#download").click()
    data = json.loads(waiting.value.path().read_text())
    H = data["runs"][0]["measured"][1]["Hbar"]
    torch.testing.assert_close(
        torch.tensor(H, dtype=torch.float64), history.measured[1].summary.Hbar, rtol=1e-6, atol=0
    )


def test_an_old_browser_is_told_and_has_the_tables(show, history):
    page = show(history, before="delete window.DecompressionStream")
    assert "DecompressionStream" in page.locator("#problem").text_content()
    assert column(page, "Group") == list(TITLES)
