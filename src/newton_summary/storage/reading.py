"""Read files that may be damaged or come from an untrusted source.

Nothing in a file is executed, no more is allocated than its bytes fill, and whatever is wrong with
it is reported in one line.
"""

from __future__ import annotations

import io
import json
import os
import pickletools
import re
import stat
import zipfile
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from newton_summary.errors import UserError

MOST_VALUES = 10**8

# What torch.save refers to for plain values and dense tensors.
_NAMES = re.compile(
    r"torch \w+Storage|torch\._utils _rebuild_tensor_v2|collections OrderedDict", re.ASCII
)

# Opening a pipe would wait for a writer; Windows would change line ends.
_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


class Damaged(Exception):
    """What is wrong with the content of a file."""


@contextmanager
def explained(file: Path) -> Iterator[None]:
    """Report errors of any kind while reading a file in one line that names it.

    Raises:
        FileNotFoundError: If there is none.
        UserError: If it cannot be read, with the reason.
    """
    try:
        yield
    except (FileNotFoundError, UserError):
        raise
    except Exception as error:  # pickle and zip raise many kinds, and strangers find more
        reason = error.strerror if isinstance(error, OSError) else str(error)
        kind = "" if isinstance(error, Damaged | OSError) else f"{type(error).__name__}: "
        text = " ".join(f"{kind}{reason}".split())[:300].rstrip(" .:")
        raise UserError(f"{file} cannot be read: {text}.") from None


def content_of(file: Path) -> bytes:
    """Return the bytes of an ordinary file."""
    with explained(file), open(os.open(file, _FLAGS), "rb") as stream:
        if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
            raise Damaged("it is not an ordinary file")
        return stream.read()


def load_json(content: bytes) -> Any:
    """Return the value in a text of JSON."""
    try:
        return json.loads(content.decode())
    except RecursionError:
        raise Damaged("its values are nested too deeply") from None
    except ValueError as error:
        raise Damaged(f"it is not JSON ({error})") from None


def load_tensors(content: bytes) -> Any:
    """Return plain values and dense tensors on the CPU, as ``torch.save`` wrote them.

    Everything is checked against the checksums in the file, which torch does not do. Tensors that
    are sparse, quantized, without storage, or larger than their bytes are refused.
    """
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        entries = archive.infolist()
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
            raise Damaged("it is compressed")
        if sum(entry.file_size for entry in entries) > len(content):
            raise Damaged("its content would be larger than the file")
        if (damaged := archive.testzip()) is not None:
            raise Damaged(f"the checksum of {damaged} differs")
        # As torch looks for it: by the name in the archive, in letters of either case.
        inner = [entry.orig_filename.partition("/")[2].lower() for entry in entries]
        if "data.pkl" not in inner or not content.startswith(b"PK\3\4"):
            raise Damaged("it was not written by torch.save")
        for entry, name in zip(entries, inner, strict=True):
            if name == "data.pkl":
                _check_names(archive.read(entry))
    value = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    _check_plain(value)
    return value


def _check_names(pickled: bytes) -> None:
    """Raise if anything but dense tensors is referred to: torch would allocate what it claims."""
    for opcode, name, _ in pickletools.genops(pickled):
        if opcode.name == "GLOBAL" and not _NAMES.fullmatch(str(name)):
            raise Damaged(f"it contains {name}, not only plain values and dense tensors")


def _check_plain(value: Any) -> None:
    """Raise for types that no file needs, values that contain themselves, and endless ones."""
    weights: dict[int, int] = {}  # values in a container, as often as they are met

    def weigh(item: Any, depth: int) -> int:
        if isinstance(item, Tensor) and item.nbytes > item.untyped_storage().nbytes():
            raise Damaged(
                f"a tensor of shape {tuple(item.shape)} has more entries than its bytes hold"
            )
        if item is None or type(item) in (bool, int, float, str, Tensor):
            return 1
        if type(item) not in (dict, OrderedDict, list, tuple):
            raise Damaged(f"it contains a value of type {type(item).__name__}")
        if depth > 50:
            raise Damaged("its values are nested too deeply")
        if id(item) not in weights:
            if isinstance(item, dict) and any(type(key) not in (str, int) for key in item):
                raise Damaged("a key in it is not a string")
            parts = item.values() if isinstance(item, dict) else item
            weights[id(item)] = 1 + sum(weigh(part, depth + 1) for part in parts)
        if weights[id(item)] > MOST_VALUES:
            raise Damaged("it repeats the same values too often")
        return weights[id(item)]

    weigh(value, 0)
