"""Files of a run: kills at every write, flipped bits, full disks, and directories of strangers."""

import csv
import io
import json
import os
import random
import re
import shutil
import warnings
import zipfile
from dataclasses import replace
from functools import partial

import pytest
import torch

import full_disks
from damaged_runs import cases, edit_json, put, sign
from experiment_cases import tiny
from newton_summary import History, Summary, make_partition, report
from newton_summary.cli import main as cli
from newton_summary.errors import UserError
from newton_summary.experiments.config import MeasureConfig
from newton_summary.experiments.rundir import Run, RunWriter, find_runs, read_checkpoint
from newton_summary.experiments.tables import Table, all_tables
from newton_summary.experiments.training import train
from newton_summary.history import Measured
from newton_summary.page.contents import contents
from newton_summary.run_directory import (
    RunFiles,
    make_manifest,
    read_history,
    read_rows,
    read_summaries,
)
from newton_summary.solver import learning_rates
from newton_summary.storage import reading, writing

CONFIG = tiny(measure=MeasureConfig(every=1, samples=20), epochs=2)


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    """Do not wait for the disk, which other tests keep busy."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


# --- a training in small: numbers that depend on all numbers before ------------------------------


def work(path, epochs=3):
    """Write a run as a training does, from wherever the directory is; return its end."""
    writer = RunWriter(path, replace(CONFIG, epochs=epochs))
    if writer.known is not None and writer.known.finished:
        return content(path)
    try:
        state = writer.start({"command": []})
        x = torch.zeros(3, dtype=torch.float64) if state is None else state["x"]
        for epoch in range(len(writer.rows), epochs + 1):
            x = torch.cos(3 * x + epoch)
            loss = float(x.sum())
            summary = Summary(x.clone(), torch.diag(x**2 + 1), x**3)
            rates = learning_rates(summary)
            writer.add_summary(Measured(epoch, "full", summary, rates.eta, rates.status))
            row = {"epoch": epoch, "train_loss": loss, "seconds": 1.0, "status": "ok"}
            writer.add_row(row, {"epoch": epoch, "x": x})
        writer.add_environment(adam_seconds=1.0)
    finally:
        writer.close()
    return content(path)


def content(path):
    """Return everything that a run directory says."""
    run = Run.load(path)
    state = read_checkpoint(RunFiles(path, ("checkpoint.pt",)))
    eta = [(m.epoch, *m.eta.tolist()) for m in run.summaries()]
    return run.rows, eta, None if state is None else (state["epoch"], *state["x"].tolist())


class Killed(BaseException):
    """The process is no more."""


class Killer:
    """Ends the process at the n-th operation on files: before it, in the midst of it, or after."""

    def __init__(self, patch, count=None, when="before"):
        self.left, self.when, self.count, self.dead = count, when, 0, False
        for name in ("replace", "link", "unlink", "fsync", "open"):
            patch.setattr(os, name, self.hook(getattr(os, name)))
        patch.setattr(os, "write", self.hook(os.write, half=True))

    def hook(self, call, half=False):
        def called(*args, **kwargs):
            if self.dead:
                raise Killed  # nothing is cleaned up after a kill
            self.count += 1
            if self.count != self.left:
                return call(*args, **kwargs)
            self.dead = True
            if half and self.when == "midst":
                call(args[0], args[1][: len(args[1]) // 2])
            elif self.when == "after":
                call(*args, **kwargs)
            raise Killed

        return called


def killed(path, count, when):
    with pytest.MonkeyPatch.context() as patch:
        killer = Killer(patch, count, when)
        try:
            work(path)
        except (Killed, RuntimeError):  # torch 2.6 raises an error of its own in torch.save
            assert killer.dead
            return True, killer.count
    return False, killer.count


def kill_everywhere(folder, stride):
    """Resumed runs equal an uninterrupted one to the bit, whichever write was the last."""
    expected = work(folder / "whole")
    _, operations = killed(folder / "count", None, "")
    kills = list(enumerate(range(1, operations + 1, stride)))
    for number, count in kills:
        path = folder / "cut"
        when = ("before", "midst", "after")[number % 3]
        assert killed(path, count, when)[0]
        if number % 7 == 0:  # and once more, soon after it resumed
            killed(path, 1 + count % 29, "after")
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # nothing is damaged
            assert work(path) == expected, (count, when)
        shutil.rmtree(path)
    return len(kills)


def test_a_kill_at_every_operation_is_survived(tmp_path):
    assert kill_everywhere(tmp_path, stride=6) > 100 // 6


def test_what_is_read_is_what_was_checked(tmp_path, monkeypatch):
    """Epochs that another process writes meanwhile are seen whole or not at all."""
    work(tmp_path, epochs=1)
    files = RunFiles(tmp_path)
    with monkeypatch.context() as patch:

        def kill(manifest):
            if len((tmp_path / "metrics.jsonl").read_bytes().splitlines()) > 2:
                raise Killed
            return make_manifest(manifest)

        patch.setattr("newton_summary.experiments.rundir.make_manifest", kill)
        with pytest.raises(Killed):
            work(tmp_path, epochs=3)
    assert [len(read_rows(files)), len(read_summaries(files))] == [2, 2]
    work(tmp_path, epochs=3)
    assert [len(read_rows(files)), len(read_rows(RunFiles(tmp_path)))] == [2, 4]


FLIPPED = ("checkpoint.pt", "metrics.jsonl", "summaries.pt", "manifest.json")


def flip_bits(name, folder, count):
    """The run goes on from the state before, with a warning, and ends as it would have."""
    expected = work(folder / "good")
    generator = random.Random(name)
    raw = (folder / "good" / name).read_bytes()
    for number in range(count):
        path = folder / str(number)
        shutil.copytree(folder / "good", path)
        place = generator.randrange(8 * len(raw))
        damaged = bytearray(raw)
        damaged[place // 8] ^= 1 << place % 8
        (path / name).write_bytes(damaged)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            found = content(path)
        if found == expected and name == "manifest.json" and not said:
            continue  # white space
        assert any(f"{name} " in str(warning.message) for warning in said), place
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            longer = work(path, epochs=4)
        assert longer[0][:4] == expected[0] and len(longer[0]) == 5, place
        shutil.rmtree(path)


@pytest.mark.parametrize("name", FLIPPED)
def test_flipped_bits_are_noticed(name, tmp_path):
    flip_bits(name, tmp_path, count=10)


@pytest.mark.parametrize("name", ["config.json", "environment.json"])
def test_a_changed_description_is_said(name, tmp_path):
    work(tmp_path)
    text = (tmp_path / name).read_text()
    (tmp_path / name).write_text(text + " ")
    with pytest.warns(UserWarning, match=rf"{name} was changed after the run wrote it"):
        Run.load(tmp_path)


def test_a_lost_or_shorter_metrics_file_makes_no_false_row(tmp_path):
    expected = work(tmp_path / "good")
    lines = (tmp_path / "good" / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    for keep in (None, 0, 1, 2, 3):
        path = tmp_path / str(keep)
        shutil.copytree(tmp_path / "good", path)
        (path / "metrics.jsonl").unlink()
        if keep is not None:
            (path / "metrics.jsonl").write_bytes(b"".join(lines[:keep]))
        with pytest.warns(UserWarning, match=r"metrics\.jsonl (is missing|is damaged)"):
            assert work(path, epochs=4)[0][:4] == expected[0]
        (path / "metrics.jsonl.previous").unlink()
        (path / "metrics.jsonl").write_bytes(b"".join(lines[:2]))
        with pytest.raises(
            UserError, match=r"metrics\.jsonl is damaged: its checksum differs\. Res"
        ):
            work(path, epochs=5)


def test_the_state_before_has_no_summaries_of_the_one_after(tmp_path):
    writer = RunWriter(tmp_path, CONFIG)
    writer.start({"command": []})
    summary = Summary(torch.ones(1), torch.eye(1), torch.ones(1))
    for epoch in (0, 1):
        if epoch == 1:
            writer.add_summary(Measured(1, "full", summary, torch.ones(1), "minimum"))
        writer.add_row({"epoch": epoch, "seconds": 1.0, "status": "ok"}, {"epoch": epoch})
    writer.close()
    assert len(Run.load(tmp_path).summaries()) == 1
    (tmp_path / "metrics.jsonl").unlink()
    with pytest.warns(UserWarning, match="Using the state before the last write"):
        files = RunFiles(tmp_path)
    assert [len(read_rows(files)), read_summaries(files)] == [1, []]


def test_a_directory_without_a_manifest_is_read_and_not_resumed(tmp_path):
    work(tmp_path)
    for file in tmp_path.glob("manifest.json*"):
        file.unlink()
    assert Run.load(tmp_path).epoch == 3
    with pytest.raises(UserError, match=r"has no manifest\.json"):
        work(tmp_path, epochs=4)


@pytest.mark.parametrize("count", range(1, 9))
def test_an_interrupt_in_the_middle_of_a_file_is_one(tmp_path, monkeypatch, count):
    """And leaves nothing behind."""
    write, writes = os.write, []

    def interrupted(descriptor, data):
        writes.append(len(data))
        if len(writes) == count:
            raise KeyboardInterrupt
        return write(descriptor, data[:500])

    monkeypatch.setattr(os, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        writing.save_tensors(tmp_path / "state.pt", {"a": torch.ones(1000), "b": torch.ones(10)})
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_one_line(tmp_path):
    """With a limit on the size of files, which the kernel holds."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    large = {"epoch": 1, "x": torch.zeros(100_000)}
    expected = work(tmp_path, epochs=0)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
        writer = RunWriter(tmp_path, replace(CONFIG, epochs=1))
        writer.start({})
        row = {"epoch": 1, "train_loss": 0.0, "seconds": 1.0, "status": "ok"}
        with pytest.raises(UserError, match=r"checkpoint\.pt cannot be written: .*Free some space"):
            writer.add_row(row, large)
    finally:
        writer.close()
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert content(tmp_path) == expected


def test_a_training_goes_on_after_the_disk_was_full(tmp_path):
    """On small disks; ``python scripts/campaign.py disks`` tries more of them."""
    if not full_disks.can_mount():
        pytest.skip("mounting a small disk takes root, on Linux")
    limits = ["size=2500k", "nr_inodes=7"]
    assert full_disks.fill(tmp_path, limits) == len(limits)


def test_writing_never_follows_a_link(tmp_path):
    path, precious = tmp_path / "run", tmp_path / "precious.txt"
    precious.write_text("mine")
    work(path, epochs=1)
    for number, name in enumerate(("metrics.jsonl", "environment.json", "manifest.json")):
        linked = (path / name, path / f"{name}.previous")
        for file in linked:
            precious = tmp_path / file.name
            shutil.move(file, precious)
            file.symlink_to(precious)
        kept = [(tmp_path / file.name).read_bytes() for file in linked]
        work(path, epochs=2 + number)
        assert kept == [(tmp_path / file.name).read_bytes() for file in linked]
        assert not (path / name).is_symlink()
    kept = precious.read_bytes()
    target = tmp_path / "link.pt"
    target.symlink_to(precious)
    Summary(torch.ones(1)).save(target)
    assert precious.read_bytes() == kept and not target.is_symlink()


# --- strangers ------------------------------------------------------------------------------------


def make_good(path):
    train(CONFIG, path)
    sign(path)
    return path


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return make_good(tmp_path_factory.mktemp("good") / "run")


def outcome_of(use, path):
    """Return how a use of a directory ended: None, or the one line about it."""
    try:
        use(path)
    except UserError as error:
        text = str(error)
        assert "\n" not in text and str(path) in text and len(text) < 1000
        return text
    return None


def show(path):
    """Read everything as a report does."""
    runs = find_runs([path])
    all_tables(runs)
    contents([read_history(run.path) for run in runs])


def resume(path):
    writer = RunWriter(path, replace(CONFIG, epochs=3))
    try:
        writer.start({})
    finally:
        writer.close()


def visit_strangers(good, folder, stride):
    """Each is read, or ends in one line that names it; nothing else is raised."""
    signed, damaged = cases(good)
    assert len(signed) > 400 and len(damaged) > 100
    refused = 0
    tried = [*enumerate(signed), *enumerate(damaged, len(signed))][::stride]
    for number, (_, change) in tried:
        path = folder / str(number)
        shutil.copytree(good, path)
        change(path)
        if number < len(signed):
            sign(path)
        refused += outcome_of(show, path) is not None
        outcome_of(resume, path)
        shutil.rmtree(path)
    assert refused > len(tried) // 2
    assert not os.path.exists("/tmp/this-must-not-exist")
    return len(tried)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_directories_of_strangers_are_one_line(good, tmp_path):
    visit_strangers(good, tmp_path, stride=2)


@pytest.mark.filterwarnings("ignore")
def test_checkpoints_of_strangers_do_not_fit(good, tmp_path, monkeypatch):
    """What can be read and is no state of the run is refused before a step."""
    signed, _ = cases(good)
    chosen = [case for case in signed if case[0].startswith("checkpoint [")][::5]
    for number, (_, change) in enumerate(chosen):
        path = tmp_path / str(number)
        shutil.copytree(good, path)
        change(path)
        sign(path)
        outcome_of(lambda path: train(replace(CONFIG, epochs=3), path), path)


def test_a_report_goes_on_without_the_damaged_ones(good, tmp_path):
    for name in ("a", "b", "c"):
        shutil.copytree(good, tmp_path / name)
    (tmp_path / "a" / "summaries.pt").write_bytes(b"x")
    (tmp_path / "somebody").mkdir()
    (tmp_path / "somebody" / "config.json").write_text('{"model": "bert"}')
    with pytest.warns(UserWarning, match="skipped") as said:
        assert [run.path.name for run in find_runs([tmp_path])] == ["b", "c"]
    text = "\n".join(str(warning.message) for warning in said)
    assert "a/summaries.pt is damaged" in text and "somebody/config.json" in text


def test_fields_of_a_newer_version_are_passed_over(good, tmp_path):
    chosen = [(name, change) for name, change in cases(good)[0] if "newer" in name]
    assert len(chosen) == 5
    for name, change in chosen:
        shutil.copytree(good, tmp_path / name)
        change(tmp_path / name)
        sign(tmp_path / name)
        with warnings.catch_warnings(record=True):
            assert Run.load(tmp_path / name).epoch == 2
            show(tmp_path / name)


def test_a_field_that_meant_nothing_is_not_missed(good, tmp_path):
    """Runs of earlier versions have a direction, which is told only where it is another one."""
    for direction, told in (("gradient", 0), ("adam", 1)):
        path = tmp_path / direction
        shutil.copytree(good, path)
        edit_json("config.json", partial(put, ["optimizer", "direction"], direction), path)
        sign(path)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            assert Run.load(path).epoch == 2
        assert ["'optimizer.direction'" in str(warning.message) for warning in said] == [
            True
        ] * told


NASTY = "\x1b[31m|a<img src=x>$\\frac$[x](http://x.y)=1\n"


def test_names_are_shown_and_not_obeyed(good, tmp_path, capsys):
    """In the terminal, in Markdown, in CSV, in figures, and in the names of files."""
    for number, name in enumerate((NASTY, "../../" + NASTY)):
        path = tmp_path / "runs" / str(number)
        shutil.copytree(good, path)
        config = json.loads((path / "config.json").read_text())
        config["recipe"] = name
        config["model"]["name"] = name
        (path / "config.json").write_text(json.dumps(config))
        sign(path)
    (tmp_path / "runs" / "1" / "metrics.jsonl").write_text("x")
    out = tmp_path / "report"
    with pytest.warns(UserWarning, match=r"skipped: .*metrics\.jsonl is damaged"):
        assert cli.main(["report", str(tmp_path / "runs"), "--out", str(out)]) == 0
    assert "\x1b" not in capsys.readouterr().out
    for file in out.iterdir():
        assert re.fullmatch(r"[\w.,=+-]+", file.name)
        if file.suffix in (".md", ".csv"):
            text = file.read_text()
            assert "\x1b" not in text
            assert file.suffix == ".csv" or not re.search(r"<img|://|(?<!\\)\]\(http", text)
    cells = next(csv.reader([Table("a", "b", ("=1", "@x", "-1 ± 2", "-", "-1|x"), []).csv()]))
    assert cells == ["'=1", "'@x", "-1 ± 2", "-", "'-1|x"]
    summary = Summary(torch.ones(1), torch.eye(1), partition=None)
    partition = make_partition(torch.nn.ParameterDict({"w": torch.ones(2)}), {NASTY: ["w"]})
    assert "\x1b" not in str(replace(summary, partition=partition))


def test_names_that_no_file_can_have(tmp_path, capsys):
    for name in ("x" * 300, "a\0b"):
        for command in (["report", name], ["run", "rosenbrock", "--run-dir", name]):
            assert cli.main(command) == 2
            assert capsys.readouterr().err.count("\n") == 1


# --- single files ---------------------------------------------------------------------------------


def test_flips_in_a_saved_summary_are_noticed_or_change_nothing(tmp_path):
    summary = Summary(torch.rand(4), torch.rand(4, 4), torch.rand(4))
    summary.save(tmp_path / "good.pt")
    raw = (tmp_path / "good.pt").read_bytes()
    generator, refused = random.Random(0), 0
    for _ in range(200):
        place = generator.randrange(8 * len(raw))
        damaged = bytearray(raw)
        damaged[place // 8] ^= 1 << place % 8
        (tmp_path / "bad.pt").write_bytes(damaged)
        try:
            found = Summary.load(tmp_path / "bad.pt")
        except ValueError:
            refused += 1
            continue
        assert torch.equal(found.gbar, summary.gbar) and torch.equal(found.Hbar, summary.Hbar)
        assert torch.equal(found.D3, summary.D3)
    assert refused > 50


DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32),
    *(torch.int16, torch.int8, torch.uint8, torch.bool),
)


def test_what_is_written_is_read(tmp_path):
    """Views, shared and expanded tensors, and torch's own states; as torch reads them."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    wide = torch.arange(12.0).reshape(3, 4)
    value = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "tensors": [wide.T, wide[1:, ::2], torch.ones(1).expand(5), torch.empty(0, 3), wide],
        "types": [torch.ones(2).to(dtype) for dtype in DTYPES],
        "plain": [None, True, 2**70, -1, 0.1, "ü\x00", (1, (2,)), {3: "x"}],
    }
    writing.save_tensors(tmp_path / "file.pt", value)
    found = reading.load_tensors(reading.content_of(tmp_path / "file.pt"))
    expected = torch.load(tmp_path / "file.pt", weights_only=True)
    assert found["plain"] == expected["plain"] == value["plain"]
    for name in ("tensors", "types"):
        for mine, other in zip(found[name], expected[name], strict=True):
            assert mine.dtype == other.dtype and torch.equal(mine, other)
    for name, tensor in expected["model"].items():
        assert torch.equal(found["model"][name], tensor)
    model.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])


def test_names_are_checked_where_torch_finds_them():
    """It does not mind the case of letters, and reads files that do not begin as a zip does."""
    allocating = b"\x80\x02cbuiltins\nbytearray\nK\x02\x85R."  # a number of bytes
    for name in ("data.pkl", "DATA.pkl"):
        stream = io.BytesIO()
        with zipfile.ZipFile(stream, "w") as archive:
            archive.writestr(f"archive/{name}", allocating)
            archive.writestr("archive/version", "3\n")
        with pytest.raises(reading.Damaged, match="bytearray"):
            reading.load_tensors(stream.getvalue())
    before, after = io.BytesIO(), io.BytesIO()
    torch.save([1], before, _use_new_zipfile_serialization=False)
    torch.save([2], after)
    for content in (
        before.getvalue() + after.getvalue(),
        stream.getvalue().replace(b".pkl", b".abc"),
    ):
        with pytest.raises(reading.Damaged, match=r"not written by torch\.save"):
            reading.load_tensors(content)


def test_errors_of_writing_name_the_file(tmp_path):
    history = History.of(Summary(torch.ones(1), torch.eye(1)), lambda_int=0)
    with pytest.raises(OSError, match="there is no folder"):
        history.save(tmp_path / "missing" / "history.pt")
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match="folder cannot be written: Is a directory"):
        history.save(tmp_path / "folder")
    for name, reason in (
        ("a\0b.html", "its name contains a NUL"),
        (300 * "a" + ".html", "File name too long"),
    ):
        for write in (history.save, partial(report, history)):
            with pytest.raises(UserError, match=f"cannot be written: {reason}"):
                write(tmp_path / name)
        with pytest.raises(FileNotFoundError, match="does not exist: pass a run directory"):
            report(tmp_path / name, tmp_path / "report.html")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_a_clock_that_goes_back(tmp_path, monkeypatch):
    times = iter(range(10**6, 0, -1))
    monkeypatch.setattr("time.perf_counter", lambda: float(next(times)))
    run = train(tiny(epochs=1), tmp_path)
    assert all(row["seconds"] >= 0 for row in Run.load(tmp_path).rows)
    from newton_summary.experiments.training import speed

    assert speed(run) is None
