"""Run directories that are damaged, or made by somebody who means harm."""

import copy
import hashlib
import json
import os
import pickle
import zipfile
from functools import partial

import torch

from newton_summary.display.names import dotted_names

WRONG = (None, "x\x1b[31m", [], {"a": 1}, -1, True, 1e400, 10**400)
FILES = ("config.json", "metrics.jsonl", "summaries.pt", "checkpoint.pt", "environment.json")


def sign(path):
    """Make the checksums of a directory fit what is in it, as a stranger would."""
    files = {}
    for name in FILES:
        if (path / name).is_file():
            content = (path / name).read_bytes()
            files[name] = [len(content), hashlib.sha256(content).hexdigest()]
    own = hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()
    (path / "manifest.json").write_text(json.dumps({"files": files, "sha256": own}))
    for file in path.glob("*.previous"):
        file.unlink()


# --- one change ----------------------------------------------------------------------------------


def write(name, content, path):
    (path / name).unlink()
    (path / name).write_bytes(content)


def edit_json(name, change, path):
    value = json.loads((path / name).read_text())
    value = change(value) or value
    (path / name).write_text(json.dumps(value))


def edit_rows(change, path):
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    rows = change(rows) or rows
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def edit_tensors(name, change, path):
    value = torch.load(path / name, weights_only=True)
    value = change(value) or value
    torch.save(value, path / name)


def put(where, value, owner):
    *way, last = where
    for key in way:
        owner = owner[key]
    if value is DELETE:
        del owner[last]
    else:
        owner[last] = copy.deepcopy(value) if not isinstance(value, torch.Tensor) else value


DELETE = object()


def cut(name, share, path):
    content = (path / name).read_bytes()
    write(name, content[: int(len(content) * share)], path)


def replace_by(name, make, path):
    (path / name).unlink()
    make(path / name)


# --- all of them ---------------------------------------------------------------------------------


def json_cases(config, row):
    for name, value in dotted_names(config):
        where = name.split(".")
        wrong = [w for w in WRONG if type(w) is not type(value) or w == -1]
        for i in range(2):  # two of them each, other ones for the next field
            what = wrong[(hash_of(name) + 3 * i) % len(wrong)]
            yield (
                f"config {name}={what!r:.20}",
                partial(edit_json, "config.json", partial(put, where, what)),
            )
    for section in ("model", "data", "optimizer", "schedule", "measure"):
        for what in (DELETE, None, 3, "x", []):
            change = partial(put, [section], what)
            yield f"config {section}={what!r:.12}", partial(edit_json, "config.json", change)
    yield "config newer", partial(edit_json, "config.json", partial(put, ["warp"], 9))
    yield (
        "config newer inside",
        partial(edit_json, "config.json", partial(put, ["model", "warp"], 9)),
    )
    yield (
        "config other optimizer",
        partial(edit_json, "config.json", partial(put, ["optimizer", "name"], "lion")),
    )
    for name in row:
        for i in range(3):
            what = WRONG[(hash_of(name) + 3 * i) % len(WRONG)]
            yield f"metrics {name}={what!r:.20}", partial(edit_rows, partial(put, [1, name], what))
        yield f"metrics without {name}", partial(edit_rows, partial(put, [1, name], DELETE))
    changes = {
        "twice": lambda rows: [*rows, rows[-1]],
        "backwards": lambda rows: rows[::-1],
        "a hole": lambda rows: [rows[0], *rows[2:]],
        "shorter": lambda rows: rows[:2],
        "newer": lambda rows: [{**row, "warp": {"x": [1]}} for row in rows],
        "numbers": lambda rows: [1, 2, 3],
        "lists": lambda rows: [[], []],
        "null": lambda rows: [None],
        "rates": lambda rows: [{**row, "eta": {"a": "b"}} for row in rows],
        "diverged early": lambda rows: [{**row, "status": "diverged"} for row in rows],
        "names": lambda rows: [{**row, "eta": {"\x1b]0;x\x07": 1.0}} for row in rows],
    }
    for name, change in changes.items():
        yield f"metrics {name}", partial(edit_rows, change)
    environments = {
        "sessions=null": {"sessions": None},
        "sessions=7": {"sessions": 7},
        "sessions of numbers": {"sessions": [1, 2]},
        "command=7": {"sessions": [{"command": 7}]},
        "command of lists": {"sessions": [{"command": [[]]}]},
        "side_by_side": {"sessions": [{"side_by_side": {}}]},
        "adam_seconds=x": {"sessions": [], "adam_seconds": "x"},
        "adam_seconds=-1": {"sessions": [], "adam_seconds": -1},
        "a list": [],
        "escapes": {"sessions": [{"gpu": "\x1b[2J", "commit": "=cmd()", "torch": "a|b\n<img>"}]},
        "newer": {"sessions": [{"warp": [1, {"a": 2}]}], "warp": 9},
    }
    for name, value in environments.items():
        yield f"environment {name}", partial(edit_json, "environment.json", lambda _, v=value: v)


def hash_of(name):
    return int(hashlib.md5(name.encode()).hexdigest(), 16)


def tensors():
    """Tensors that no measurement has."""
    large = torch.ones(1, dtype=torch.float64).expand(100_000, 100_000)
    yield "expanded", large
    yield "wide", torch.ones(1, dtype=torch.float64).expand(10**9)
    yield "complex", torch.ones(2, dtype=torch.complex64)
    yield "sparse", torch.sparse_coo_tensor([[0]], [1.0], (10**9,))
    yield "compressed", torch.eye(3).to_sparse_csr()
    yield "meta", torch.empty(10**6, 10**6, device="meta")
    yield "whole numbers", torch.ones(4, dtype=torch.int64)
    yield "truths", torch.ones(4, dtype=torch.bool)
    yield "quantized", torch.quantize_per_tensor(torch.ones(4), 1.0, 0, torch.qint8)
    yield "nested", torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])
    yield "empty", torch.empty(0)
    yield "many axes", torch.ones([1] * 20)
    yield "a parameter", torch.nn.Parameter(torch.ones(4))
    yield "a number", 3.0
    yield "text", "x"
    yield "None", None


def summary_cases(state):
    for field in ("gbar", "Hbar", "D3", "loss", "eta"):
        where = [1, field] if field == "eta" else [1, "summary", field]
        for name, value in tensors():
            change = partial(put, where, value)
            yield f"summaries {field} {name}", partial(edit_tensors, "summaries.pt", change)
    for name in state[1]:
        for what in (DELETE, 7, {"a": [1]}):
            change = partial(put, [1, name], what)
            yield f"summaries {name}={what!r:.9}", partial(edit_tensors, "summaries.pt", change)
    for name in state[1]["summary"]:
        for what in (DELETE, [1], -7):
            change = partial(put, [1, "summary", name], what)
            yield f"summaries .{name}={what!r:.9}", partial(edit_tensors, "summaries.pt", change)
    first = next(iter(state[1]["summary"]["partition"]["labels"]))
    for where, what in [
        (["names"], ["a"]),
        (["names"], [1, 2, 3, 4, 5, 6]),
        (["names"], 7),
        (["shapes", first], [10**10, 10**10]),
        (["shapes", first], [-1]),
        (["shapes", first], "x"),
        (["shapes", "other"], [1]),
        (["labels", first], 99),
        (["labels", first], -1),
        (["labels", first], "x"),
        (["labels", first], torch.zeros(1, dtype=torch.int64).expand(10**6, 10**6)),
        (["labels", first], torch.full((3,), 99)),
        (["labels", first], 1.5),
        (["types"], {"a": 7}),
        (["types"], 7),
    ]:
        change = partial(put, [1, "summary", "partition", *where], what)
        yield (
            f"summaries partition {where}={what!r:.15}",
            partial(edit_tensors, "summaries.pt", change),
        )
    loop = []
    loop.append(loop)
    laughs = [1] * 10
    for _ in range(30):
        laughs = [laughs] * 10
    for name, value in {
        "a number": 7,
        "a table": {"a": 1},
        "numbers": [1, 2],
        "a loop": loop,
        "laughs": [laughs],
        "a set": [{1, 2}],
        "bytes": [bytearray(100)],
        "trials": [{**state[0], "trials": [[1, 2]]}],
        "trials of text": [{**state[0], "trials": [["a", "b", "c"]]}],
        "other groups": [state[0], {**state[1], **other_groups(state[1])}],
        "newer": [{**s, "warp": 9, "summary": {**s["summary"], "warp": 9}} for s in state],
        "not finite": [{**s, "summary": {**s["summary"], **not_finite(s)}} for s in state],
        "zero": [{**s, "summary": {**s["summary"], **zeros(s)}} for s in state],
    }.items():
        yield f"summaries {name}", partial(edit_tensors, "summaries.pt", lambda _, v=value: v)


def not_finite(state):
    summary = state["summary"]
    return {"gbar": summary["gbar"] * float("nan"), "Hbar": summary["Hbar"] / 0}


def zeros(state):
    return {name: state["summary"][name] * 0 for name in ("gbar", "Hbar", "D3")}


def other_groups(state):
    one = torch.ones(1, dtype=torch.float64)
    summary = {**state["summary"], "gbar": one, "Hbar": one[None], "D3": one, "partition": None}
    return {"summary": summary, "eta": one}


class Malice:
    """Runs a command when it is unpickled."""

    def __reduce__(self):
        return os.system, ("touch /tmp/this-must-not-exist",)


def zip_file(pickled, path, compression=zipfile.ZIP_STORED, storage=b""):
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("a/data.pkl", pickled)
        archive.writestr("a/data/0", storage)
        archive.writestr("a/version", "3\n")


def allocating(module, name, *args):
    """A pickle that calls something with numbers, which would allocate a lot."""
    numbers = b"".join(b"\x8a\x08" + n.to_bytes(8, "little") for n in args)
    return b"\x80\x02c" + f"{module}\n{name}\n".encode() + b"(" + numbers + b"tR."


def content_cases():
    """Contents that are not even of the right kind, for every file."""
    deep = b"[" * 100_000
    for name in FILES:
        for what, content in {
            "empty": b"",
            "text": b"hello\n",
            "zeros": bytes(1000),
            "not UTF-8": b'{"a": "\xff\xfe"}\n',
            "deep": deep,
            "deep object": b'{"a":' * 50_000,
            "a long number": b"1" * 10_000 + b"\n",
            "a list": b"[]\n",
            "a pickle": pickle.dumps({"a": 1}),
            "malice": pickle.dumps(Malice()),
        }.items():
            yield f"{name} {what}", partial(write, name, content)
        for share in (0.2, 0.5, 0.99):
            yield f"{name} cut at {share}", partial(cut, name, share)
        yield f"{name} missing", partial(replace_by, name, lambda file: None)
        yield f"{name} folder", partial(replace_by, name, os.mkdir)
        yield f"{name} pipe", partial(replace_by, name, os.mkfifo)
        yield f"{name} loop", partial(replace_by, name, lambda file: file.symlink_to(file))
        yield f"{name} device", partial(replace_by, name, lambda file: file.symlink_to("/dev/zero"))
    bomb = partial(zip_file, b"\x80\x02N.", compression=8, storage=bytes(50 << 20))
    for name in ("summaries.pt", "checkpoint.pt"):
        for what, pickled in {
            "malice": pickle.dumps(Malice(), 2),
            "torch.Tensor": allocating("torch", "Tensor", 10**5, 10**5),
            "FloatStorage": allocating("torch", "FloatStorage", 10**10),
            "bytearray": allocating("builtins", "bytearray", 10**10),
            "memo": b"\x80\x02}r\xff\xff\xff\x7f.",
            "no end": b"\x80\x02}",
            "nothing": b"",
            "stack": b"\x80\x02....",
        }.items():
            yield f"{name} zip of {what}", partial(replace_by, name, partial(zip_file, pickled))
        yield f"{name} bomb", partial(replace_by, name, bomb)


def manifest_cases():
    """Manifests that lie; these are not signed."""
    for what, content in {
        "empty": b"",
        "a list": b"[]",
        "numbers": b'{"files": 7, "sha256": 7}',
        "deep": b"[" * 100_000,
        "not UTF-8": b"\xff",
    }.items():
        yield f"manifest {what}", partial(write, "manifest.json", content)
    for what, files in {
        "outside": {"../../etc/passwd": [1, "x"]},
        "root": {"/etc/passwd": [1, "x"]},
        "wrong entry": {"config.json": 7},
        "wrong types": {"metrics.jsonl": [None, {}]},
        "nothing": {},
        "other": {"warp.json": [1, "x"]},
    }.items():
        own = hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()
        content = json.dumps({"files": files, "sha256": own}).encode()
        yield f"manifest {what}", partial(write, "manifest.json", content)


def checkpoint_cases(state):
    for name in state:
        for what in (DELETE, None, 7, "x", {"a": 1}, [torch.ones(3)]):
            change = partial(put, [name], what)
            yield f"checkpoint {name}={what!r:.12}", partial(edit_tensors, "checkpoint.pt", change)
    weight = next(iter(state["model"]))
    for name, value in tensors():
        for where in (["model", weight], ["optimizer", "state", 0, "exp_avg"], ["random", "cpu"]):
            change = partial(put, where, value)
            yield f"checkpoint {where} {name}", partial(edit_tensors, "checkpoint.pt", change)
    for where, what in [
        (["model", "other"], torch.ones(3)),
        (["model", weight], DELETE),
        (["optimizer", "state"], {}),
        (["optimizer", "state", 0], {}),
        (["optimizer", "state", 99], {"step": torch.ones(())}),
        (["optimizer", "state", 0, "step"], torch.ones(5)),
        (["optimizer", "param_groups"], []),
        (["optimizer", "param_groups", 0, "params"], [0]),
        (["optimizer", "param_groups", 0, "lr"], "x"),
        (["optimizer", "param_groups", 0, "lr"], float("nan")),
        (["epoch"], -5),
        (["epoch"], 10**9),
        (["epoch"], True),
        (["epoch"], 1.5),
    ]:
        change = partial(put, where, what)
        yield f"checkpoint {where}={what!r:.12}", partial(edit_tensors, "checkpoint.pt", change)


def cases(path):
    """Yield names and changes of a good run directory; those that a stranger signs, and others."""
    config = json.loads((path / "config.json").read_text())
    row = json.loads((path / "metrics.jsonl").read_text().splitlines()[1])
    summaries = torch.load(path / "summaries.pt", weights_only=True)
    state = torch.load(path / "checkpoint.pt", weights_only=True)
    signed = [
        *json_cases(config, row),
        *summary_cases(summaries),
        *content_cases(),
        *checkpoint_cases(state),
    ]
    damaged = [(f"{name}, not signed", change) for name, change in content_cases()]
    return signed, [*damaged, *manifest_cases()]
