"""The official files of MNIST and CIFAR-10: find or download them, and check their md5."""

from __future__ import annotations

import gzip
import hashlib
import os
import sys
import tarfile
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from newton_summary.errors import UserError
from newton_summary.storage.writing import make_folder, write_file

Bytes = npt.NDArray[np.uint8]

ENVIRONMENT = "NEWTON_SUMMARY_DATA"

MD5 = {
    "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
    "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
    "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
    "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
    "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
    "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
    "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
    "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
    "cifar-10-binary.tar.gz": "c32a1d4ab5d03f1284b67883e8d87530",
}

# The mirror first: the original site is often down.
MNIST_URLS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "http://yann.lecun.com/exdb/mnist/",
)
CIFAR10_URLS = ("https://www.cs.toronto.edu/~kriz/",)
CIFAR10_ARCHIVE = "cifar-10-binary.tar.gz"

MNIST_FOLDER = Path("MNIST/raw")
CIFAR10_FOLDER = Path("cifar-10-batches-bin")
CIFAR10_RECORD = 1 + 3 * 32 * 32  # a label, then the planes of red, green and blue


class DataError(UserError):
    """Data files that are missing, corrupt, or cannot be downloaded."""


# --- readers -------------------------------------------------------------------------------------


def read_mnist(root: Path | None, download: bool) -> dict[str, tuple[Bytes, Bytes]]:
    """Return images, (N, 1, 28, 28), and labels, (N,), of ``"train"`` and ``"test"``."""
    splits = {}
    for split, prefix in (("train", "train"), ("test", "t10k")):
        names = (f"{prefix}-images-idx3-ubyte.gz", f"{prefix}-labels-idx1-ubyte.gz")
        images, labels = (
            _idx(path) for path in _find(names, MNIST_FOLDER, root, download, _fetch_mnist)
        )
        splits[split] = images[:, None], labels
    return splits


def read_cifar10(root: Path | None, download: bool) -> dict[str, tuple[Bytes, Bytes]]:
    """Return images, (N, 3, 32, 32), and labels, (N,), of ``"train"`` and ``"test"``."""
    train = [f"data_batch_{i}.bin" for i in range(1, 6)]
    splits = {}
    for split, names in (("train", train), ("test", ["test_batch.bin"])):
        paths = _find(names, CIFAR10_FOLDER, root, download, _fetch_cifar10)
        content = b"".join(checked(path) for path in paths)
        records = np.frombuffer(content, np.uint8).reshape(-1, CIFAR10_RECORD)
        splits[split] = records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0]
    return splits


def _idx(path: Path) -> Bytes:
    """Read an idx file: two zero bytes, type 8, the number of axes, their sizes, the values."""
    raw = gzip.decompress(checked(path))
    axes = raw[3]
    shape = np.frombuffer(raw, ">u4", axes, offset=4)
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * axes).reshape(shape)


def checked(path: Path) -> bytes:
    """Return the bytes of a file, after comparing its md5 with the published one."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from None
    if hashlib.md5(content, usedforsecurity=False).hexdigest() != MD5[path.name]:
        raise DataError(
            f"{path} is corrupt: its md5 is not the published {MD5[path.name]}. Delete it and "
            "download it again."
        )
    return content


# --- finding and downloading ---------------------------------------------------------------------


def _find(
    names: Sequence[str],
    folder: Path,
    root: Path | None,
    download: bool,
    fetch: Callable[[Path], None],
) -> list[Path]:
    """Return the paths of files below the root, the environment's folder or the cache."""
    named = root if root is not None else os.environ.get(ENVIRONMENT) or None
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    base = Path(cache) / "newton_summary" if named is None else Path(named)
    places = (base / folder, base / folder.parts[0], base)
    for place in places:
        if all((place / name).is_file() for name in names):
            return [place / name for name in names]
    if named is not None and not base.is_dir():
        raise DataError(f"The data folder {base} does not exist.")
    if named is not None or not download:
        missing = next(name for name in names if not (places[0] / name).is_file())
        raise DataError(
            f"{missing} is not in {places[0]}. Set --data-root or {ENVIRONMENT} to the folder of "
            "the official files, or set neither (nor --data.no-download) to download them."
        )
    fetch(places[0])
    return [places[0] / name for name in names]


def _fetch_mnist(folder: Path) -> None:
    for name in MD5:
        if name.endswith("ubyte.gz") and not (folder / name).is_file():
            _download(name, MNIST_URLS, folder)


def _fetch_cifar10(folder: Path) -> None:
    archive = folder.parent / CIFAR10_ARCHIVE
    if not archive.is_file():
        _download(CIFAR10_ARCHIVE, CIFAR10_URLS, folder.parent)
    checked(archive)
    make_folder(folder)
    with tarfile.open(archive) as files:
        for member in files:
            name = Path(member.name).name
            content = files.extractfile(member) if name in MD5 else None
            if content is not None:
                write_file(folder / name, content.read())
    archive.unlink()


def _download(name: str, urls: Sequence[str], folder: Path) -> None:
    """Download a file from the first site that has it, with a progress bar on standard error."""
    make_folder(folder)
    problem: object = None
    for url in urls:
        try:
            with urllib.request.urlopen(url + name, timeout=30) as response:
                size = int(response.headers.get("Content-Length") or 0)
                content = _read_with_bar(response, name, size)
        except (urllib.error.URLError, OSError, ValueError) as error:
            problem = getattr(error, "reason", error)
            continue
        if hashlib.md5(content, usedforsecurity=False).hexdigest() == MD5[name]:
            return write_file(folder / name, content)
        problem = "the download does not have the published md5"
    raise DataError(
        f"{name} could not be downloaded ({problem}). Set --data-root or {ENVIRONMENT} to a "
        "folder that contains it, or use --data.name embedded."
    )


def _read_with_bar(stream: BinaryIO, name: str, size: int) -> bytes:
    parts: list[bytes] = []
    done = 0
    while part := stream.read(1 << 18):
        parts.append(part)
        done += len(part)
        share = f" of {size / 1e6:.1f} MB {'#' * (20 * done // size):<20}" if size else " MB"
        sys.stderr.write(f"\rdownloading {name}: {done / 1e6:.1f}{share}")
        sys.stderr.flush()
    sys.stderr.write("\n")
    if size and done != size:
        raise ValueError(f"the connection ended after {done} of {size} bytes")
    return b"".join(parts)
