"""Data of the experiments: readers of the official files, splits, minibatches by index."""

import gzip
import hashlib
import struct
import tarfile
import urllib.error

import numpy as np
import pytest
import torch

from newton_summary.errors import UserError
from newton_summary.experiments import files
from newton_summary.experiments.config import DataConfig
from newton_summary.experiments.datasets import DATASETS, Batches, Split, load_dataset


def idx(array):
    header = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return gzip.compress(header + array.tobytes())


@pytest.fixture
def official(tmp_path, monkeypatch):
    """Folder of small files in the official formats, whose md5s count as the published ones."""
    rng = np.random.default_rng(0)
    contents = {}
    for prefix, n in (("train", 30), ("t10k", 10)):
        images = rng.integers(0, 256, (n, 28, 28), dtype=np.uint8)
        contents[f"MNIST/raw/{prefix}-images-idx3-ubyte.gz"] = idx(images)
        contents[f"MNIST/raw/{prefix}-labels-idx1-ubyte.gz"] = idx(np.arange(n, dtype="u1") % 10)
    for i, name in enumerate([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]):
        records = rng.integers(0, 256, (4, 3073), dtype=np.uint8)
        records[:, 0] = i
        contents[f"cifar-10-batches-bin/{name}.bin"] = records.tobytes()
    for path, content in contents.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(content)
        digest = hashlib.md5(content).hexdigest()
        monkeypatch.setitem(files.MD5, path.rsplit("/")[-1], digest)
    return tmp_path


def test_mnist_is_read_and_normalised_and_padded_if_wanted(official):
    data = load_dataset(DataConfig("mnist", root=official, validation=5))
    assert data.train.inputs.shape == (25, 1, 28, 28) and data.test.inputs.shape == (10, 1, 28, 28)
    images, labels = files.read_mnist(official, False)["test"]
    expected = (torch.tensor(images[3, 0]) / 255 - 0.1307) / 0.3081
    torch.testing.assert_close(data.test.inputs[3, 0], expected)
    padded = load_dataset(DataConfig("mnist", root=official, validation=5, pad=True)).test.inputs
    torch.testing.assert_close(padded[3, 0, 2:-2, 2:-2], expected)
    torch.testing.assert_close(padded[3, 0, 0], torch.full((32,), -0.1307 / 0.3081))
    assert data.test.targets.tolist() == labels.tolist()


def test_cifar10_is_read_in_planes_of_colour(official):
    data = load_dataset(DataConfig("cifar10", root=official, validation=2))
    assert data.train.inputs.shape == (18, 3, 32, 32)
    raw = np.frombuffer((official / "cifar-10-batches-bin/test_batch.bin").read_bytes(), "u1")
    green = torch.tensor(raw.reshape(4, 3073)[2, 1 + 1024 : 1 + 2048]).reshape(32, 32)
    expected = (green / 255 - 0.4822) / 0.2435
    torch.testing.assert_close(data.test.inputs[2, 1], expected)
    assert data.test.targets.tolist() == [5, 5, 5, 5]
    assert sorted({*data.train.targets.tolist(), *data.validation.targets.tolist()}) == [*range(5)]


def test_environment_names_the_folder(official, monkeypatch):
    monkeypatch.setenv("NEWTON_SUMMARY_DATA", str(official))
    assert len(load_dataset(DataConfig("mnist", validation=5)).train) == 25


def test_corrupt_file_is_named(official):
    path = official / "cifar-10-batches-bin" / "data_batch_2.bin"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(UserError, match=r"data_batch_2\.bin is corrupt: its md5") as error:
        load_dataset(DataConfig("cifar10", root=official))
    assert "\n" not in str(error.value)


def test_missing_file_is_named(official):
    (official / "MNIST/raw/t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(UserError, match=r"t10k-labels-idx1-ubyte\.gz is not in"):
        load_dataset(DataConfig("mnist", root=official, validation=5))


def test_folder_that_does_not_exist(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        load_dataset(DataConfig("mnist", root=tmp_path / "nowhere"))


class Response:
    """What urlopen gives: the bytes of a file."""

    def __init__(self, content):
        self.headers = {"Content-Length": str(len(content))}
        self.content = content

    def read(self, size):
        part, self.content = self.content[:size], self.content[size:]
        return part

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


def test_files_are_fetched_once_with_a_bar(official, tmp_path, monkeypatch, capsys):
    asked = []

    def urlopen(url, timeout):
        asked.append(url)
        return Response((official / "MNIST/raw" / url.rsplit("/")[-1]).read_bytes())

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(files.urllib.request, "urlopen", urlopen)
    first = load_dataset(DataConfig("mnist", validation=5))
    assert len(asked) == 4 and "downloading train-images" in capsys.readouterr().err
    again = load_dataset(DataConfig("mnist", validation=5))
    assert len(asked) == 4 and torch.equal(first.train.inputs, again.train.inputs)


def test_cifar10_is_unpacked_from_its_archive(official, tmp_path, monkeypatch, capsys):
    archive = tmp_path / "archive.tar.gz"
    with tarfile.open(archive, "w:gz") as files_of:
        files_of.add(official / "cifar-10-batches-bin", "cifar-10-batches-bin")
    content = archive.read_bytes()
    monkeypatch.setitem(files.MD5, files.CIFAR10_ARCHIVE, hashlib.md5(content).hexdigest())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(files.urllib.request, "urlopen", lambda *a, **k: Response(content))
    fetched = load_dataset(DataConfig("cifar10", validation=2))
    there = load_dataset(DataConfig("cifar10", root=official, validation=2))
    assert torch.equal(fetched.train.inputs, there.train.inputs)
    folder = tmp_path / "cache" / "newton_summary"
    assert [path.name for path in folder.iterdir()] == ["cifar-10-batches-bin"]


def test_no_network_is_one_line(tmp_path, monkeypatch):
    def urlopen(url, timeout):
        raise urllib.error.URLError("no route to host")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(files.urllib.request, "urlopen", urlopen)
    with pytest.raises(UserError, match=r"could not be downloaded \(no route to host\)") as error:
        load_dataset(DataConfig("mnist"))
    assert "\n" not in str(error.value)


def test_file_with_another_md5_is_not_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(files.urllib.request, "urlopen", lambda *a, **k: Response(b"login page"))
    with pytest.raises(UserError, match="does not have the published md5"):
        load_dataset(DataConfig("mnist"))
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_unknown_set_and_impossible_split():
    with pytest.raises(UserError, match="Did you mean 'cifar10'"):
        load_dataset(DataConfig("cifar"))
    with pytest.raises(UserError, match="Cannot hold out"):
        load_dataset(DataConfig("embedded", validation=5000))


@pytest.mark.parametrize("name", ["embedded", "addition", "nothing"])
def test_parts_do_not_overlap_and_are_always_the_same(name):
    first, second = load_dataset(DataConfig(name)), load_dataset(DataConfig(name))
    for part in ("train", "validation", "test"):
        assert torch.equal(getattr(first, part).inputs, getattr(second, part).inputs)
    assert len(first.validation) == DATASETS[name].validation
    if name == "addition":
        rows = [tuple(row) for part in ("train", "validation", "test")
                for row in getattr(first, part).inputs[:, :5].tolist()]  # fmt: skip
        assert len(set(rows)) == len(rows) == 10_000


def test_sums_are_right():
    data = load_dataset(DataConfig("addition"))
    row, answer = data.train.inputs[0].tolist(), data.train.targets[0].tolist()
    a, b = row[0] * 10 + row[1], row[3] * 10 + row[4]
    assert a + b == answer[0] + 10 * answer[1] + 100 * answer[2]
    assert row[-2:] == answer[:2]


def test_batches_take_every_sample_once_in_a_new_order():
    split = Split(torch.arange(10.0)[:, None], torch.arange(10))
    batches = Batches(split, 4, torch.Generator().manual_seed(0))
    first, second = ([y.tolist() for _, y in batches] for _ in range(2))
    assert len(batches) == len(first) == 3
    assert sorted(i for part in first for i in part) == list(range(10)) and first != second
    assert [len(y) for _, y in Batches(split, 4, drop_last=True)] == [4, 4]
    assert [len(y) for _, y in Batches(split, 40, drop_last=True)] == [10]
