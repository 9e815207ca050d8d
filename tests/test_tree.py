"""The tree shows the way of the data: each part imports only from those before it."""

import ast
import re
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
import torch
from torch import nn

import newton_summary as ns

ROOT = Path(ns.__file__).parent

# The way of the data, and the order of CONTRIBUTING.md.
ORDER = [
    "errors",
    "display",
    "storage",
    "parallel",
    "partition",
    "summary",
    "solver",
    "history",
    "run_directory",
    "probe",
    "derivatives",
    "measuring",
    "optimizer",
    "analysis",
    "figures",
    "page",
    "integrations",
    "data",
    "experiments",
    "inspection",
    "cli",
]


def modules() -> dict[str, Path]:
    names = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in PATHS}
    return {name.removesuffix(".__init__"): path for path, name in names.items()}


PATHS = [path for path in sorted(ROOT.rglob("*.py")) if path.parent != ROOT or path.stem in ORDER]
MODULES = modules()


def imported(path: Path) -> set[str]:
    """What a module imports of the package when it runs, lazy imports included."""
    tree = ast.parse(path.read_text())
    typing = {
        node
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and getattr(block.test, "id", "") == "TYPE_CHECKING"
        for node in ast.walk(block)
    }
    found = set()
    for node in ast.walk(tree):
        if node in typing or not isinstance(node, ast.ImportFrom) or not node.module:
            continue
        home, _, rest = node.module.partition(".")
        if home != "newton_summary":
            continue
        for alias in node.names:
            longer = f"{rest}.{alias.name}".lstrip(".")
            found.add(longer if longer in MODULES else rest)
    return found - {""}


@pytest.mark.parametrize("name", MODULES)
def test_imports_come_from_earlier_parts(name):
    place = ORDER.index(name.partition(".")[0])
    later = {x for x in imported(MODULES[name]) if ORDER.index(x.partition(".")[0]) > place}
    assert not later, f"{name} imports {later}, which come after it"


def test_no_module_imports_itself_by_a_detour():
    graph = {name: imported(path) for name, path in MODULES.items()}
    list(TopologicalSorter(graph).static_order())  # raises CycleError


def test_the_formulas_of_the_paper_are_where_the_guide_says():
    """CONTRIBUTING has a table with the file and the functions of each formula, and its test."""
    guide = (ROOT.parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = guide.partition("## Where the paper's formulas are")[2].partition("\n\n| To add")[0]
    found = 0
    for row in rows.splitlines():
        if not row.startswith("|") or "`" not in row.split("|")[2]:
            continue
        _, _, code, test, _ = row.split("|")
        for place in (*code.split(";"), test):
            file, *names = re.findall(r"`([^`]+)`", place)
            folder = ROOT.parents[1] / "tests" if place is test else ROOT
            text = (folder / file).read_text(encoding="utf-8")
            for name in names:
                *_, own = name.split(".")
                assert re.search(rf"(def|class) {own}\b", text), (file, name)
                found += 1
    assert found > 25


def test_the_root_holds_few_modules():
    assert len([path for path in ROOT.glob("*.py") if not path.stem.startswith("__")]) <= 8


def test_no_module_is_named_like_a_public_function():
    public = {name for name in ns.__all__ if callable(getattr(ns, name))}
    assert not public & {name.rpartition(".")[2] for name in MODULES}


# --- one process sees one process -----------------------------------------------------------------


def entered(call):
    """Return the files of the package whose functions a call passes through."""
    found = set()

    def look(frame, event, argument):
        if event == "call" and frame.f_code.co_filename.startswith(f"{ROOT}/"):
            found.add(str(Path(frame.f_code.co_filename).relative_to(ROOT)))

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        call()
    finally:
        sys.setprofile(before)
    return found


def loss_fn(model, batch):
    return (model(batch[0]) - batch[1]).square().mean()


@pytest.fixture
def walks():
    """What ``summarize``, and a step that measures, pass through on a small network."""
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    batch = torch.randn(5, 3).double(), torch.randn(5, 2).double()
    partition = ns.make_partition(net)
    optimizer = ns.NewtonSummary(partition, curvature=(loss_fn, [batch]), summary_period=1)
    paper = ns.NewtonSummary.paper(
        partition, curvature=(loss_fn, [batch]), summary_period=1, warmup=1
    )
    closed = ns.NewtonSummary(partition, summary_period=1)

    def closure():
        return loss_fn(net, batch)

    closure().backward()
    for _ in range(2):  # what is found out once, and rates
        ns.summarize(net, loss_fn, batch)
        optimizer.step()
        paper.step()
    while not (closed.refreshes > 3 and closed.refresh_due):
        closed.step(closure)
    return {
        "summarize": entered(lambda: ns.summarize(net, loss_fn, batch, partition=partition)),
        "refresh": entered(optimizer.step),
        "refresh of the paper": entered(paper.step),
        "refresh by a closure": entered(lambda: closed.step(closure)),
    }


def test_alone_nothing_of_several_processes_is_entered(walks):
    """One module decides that there is one process."""
    for files in walks.values():
        assert {file for file in files if file.startswith("parallel/")} == {"parallel/processes.py"}
        assert not any("sharded" in file for file in files)


@pytest.mark.parametrize(
    ("walk", "most"),
    [
        ("summarize", 15),
        ("refresh", 20),
        ("refresh of the paper", 20),
        ("refresh by a closure", 20),
    ],
)
def test_few_files_are_passed_through(walks, walk, most):
    """The sweep's rules included, of which the model needs three."""
    assert len(walks[walk]) <= most, "\n".join(sorted(walks[walk]))


def test_the_modules_that_get_faults_exist(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT.parents[1] / "scripts"))
    import mutate

    tests = Path(__file__).parent
    for module, names in mutate.TESTS.items():
        assert (ROOT / module).is_file(), module
        assert all((tests / f"test_{name}.py").is_file() for name in names.split()), names
