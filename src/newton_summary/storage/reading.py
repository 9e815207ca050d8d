"""Read files that may be damaged, or made by somebody else.

Nothing in a file is executed, nothing is allocated that its bytes do not fill, and whatever is
wrong with it becomes one line.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import pickle
import stat
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import torch
from torch import Tensor

from newton_summary.errors import UserError

MOST_JSON = 1 << 28  # bytes
MOST_VALUES = 10**8

# What torch.save writes for plain values and dense tensors, and nothing else.
_DTYPES = {
    **{"FloatStorage": torch.float32, "DoubleStorage": torch.float64, "HalfStorage": torch.float16},
    **{"BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "IntStorage": torch.int32},
    **{"ShortStorage": torch.int16, "CharStorage": torch.int8, "ByteStorage": torch.uint8},
    "BoolStorage": torch.bool,
}
_OPCODES = (
    *(pickle.PROTO, pickle.STOP, pickle.MARK, pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE),
    *(pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1, pickle.BINFLOAT),
    *(pickle.BINUNICODE, pickle.EMPTY_DICT, pickle.EMPTY_LIST, pickle.EMPTY_TUPLE, pickle.TUPLE),
    *(pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3, pickle.APPEND, pickle.APPENDS, pickle.SETITEM),
    *(pickle.SETITEMS, pickle.BINPUT, pickle.LONG_BINPUT, pickle.BINGET, pickle.LONG_BINGET),
    *(pickle.GLOBAL, pickle.REDUCE, pickle.BUILD, pickle.BINPERSID),
)

# Opening a pipe would wait for a writer; Windows would change line ends.
_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


class Damaged(Exception):
    """What is wrong with the content of a file."""


@contextmanager
def opened(file: Path) -> Iterator[BinaryIO]:
    """Open an ordinary file; errors in the block, of any kind, become one line.

    Raises:
        FileNotFoundError: If there is none.
        UserError: If it cannot be read, with the reason.
    """
    try:
        descriptor = os.open(file, _FLAGS)
        with open(descriptor, "rb") as stream:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise Damaged("it is not an ordinary file")
            yield stream
    except (FileNotFoundError, UserError):
        raise
    except Exception as error:  # pickle and zip raise many kinds, and strangers find more
        reason = error.strerror if isinstance(error, OSError) else str(error)
        kind = "" if isinstance(error, Damaged | OSError) else f"{type(error).__name__}: "
        text = " ".join(f"{kind}{reason}".split())[:300].rstrip(" .:")
        raise UserError(f"{file} cannot be read: {text}.") from None


def digest(stream: BinaryIO) -> str:
    """Return the sha256 of a file, and go back to its start."""
    found = hashlib.sha256()
    while part := stream.read(1 << 20):
        found.update(part)
    stream.seek(0)
    return found.hexdigest()


def size_of(stream: BinaryIO) -> int:
    """Return the length of a file."""
    return os.fstat(stream.fileno()).st_size


def load_json(stream: BinaryIO) -> Any:
    """Return the value in a JSON file."""
    if size_of(stream) > MOST_JSON:
        raise Damaged(f"it has {size_of(stream):,} bytes")
    return parse_json(stream.read())


def parse_json(content: bytes) -> Any:
    """Return the value in a text of JSON."""
    try:
        return json.loads(content.decode())
    except RecursionError:
        raise Damaged("its values are nested too deeply") from None
    except ValueError as error:
        raise Damaged(f"it is not JSON ({error})") from None


def load_tensors(stream: BinaryIO) -> Any:
    """Return plain values and dense tensors on the CPU, as ``torch.save`` wrote them.

    Everything is checked against the checksums in the file. Tensors that are sparse, complex,
    quantized, without storage, or larger than their bytes are refused.
    """
    with zipfile.ZipFile(stream) as archive:
        entries = {entry.filename.partition("/")[2]: entry for entry in archive.infolist()}
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries.values()):
            raise Damaged("it is compressed")
        if sum(entry.file_size for entry in archive.infolist()) > size_of(stream):
            raise Damaged("it would be larger than its bytes")
        if "data.pkl" not in entries:
            raise Damaged("it was not written by torch.save")
        if "byteorder" in entries and archive.read(entries["byteorder"]) != sys.byteorder.encode():
            raise Damaged("it was written on a machine with another byte order")
        with archive.open(entries["data.pkl"]) as pickled:
            value = _Unpickler(pickled, archive, entries).load()
            pickled.read()  # to the end, where its checksum is compared
    _check_plain(value)
    return value


class _Unpickler(pickle._Unpickler):
    """Python's own, without most of it; the one in C allocates on the word of the file."""

    dispatch: ClassVar[dict[int, Any]] = {
        code[0]: pickle._Unpickler.dispatch[code[0]] for code in _OPCODES
    }

    def __init__(
        self, stream: Any, archive: zipfile.ZipFile, entries: dict[str, zipfile.ZipInfo]
    ) -> None:
        super().__init__(stream)
        self._archive, self._entries = archive, entries
        self._storages: dict[str, Tensor] = {}

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _tensor
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        raise Damaged(f"it holds {module}.{name}, not only plain values and dense tensors")

    def persistent_load(self, pid: Any) -> Tensor:
        """Return a storage, as a tensor with one axis."""
        _, dtype, key, _, _ = pid
        if key not in self._storages:
            content = bytearray(self._archive.read(self._entries[f"data/{key}"]))
            self._storages[key] = (
                torch.frombuffer(content, dtype=dtype) if content else torch.empty(0, dtype=dtype)
            )
        if self._storages[key].dtype != dtype:
            raise Damaged("one storage has two types")
        return self._storages[key]


def _tensor(storage: Tensor, offset: int, size: Any, stride: Any, *_: Any) -> Tensor:
    """Return a view of a storage, whose entries all lie in it and are not repeated."""
    count = math.prod(size)
    if min((offset, *size, *stride)) < 0 or len(size) != len(stride) or len(size) > 16:
        raise Damaged("a tensor has an impossible shape")
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if count > len(storage) or (count and last >= len(storage)):
        raise Damaged(f"a tensor of shape {tuple(size)} has more entries than bytes")
    return storage.as_strided(tuple(size), tuple(stride), offset)


def _check_plain(value: Any) -> None:
    """Refuse types that no file needs, what contains itself, and what would be walked for ever."""
    weights: dict[int, int] = {}  # values in a container, as often as they are met

    def weigh(item: Any, depth: int) -> int:
        if item is None or type(item) in (bool, int, float, str, Tensor):
            return 1
        if type(item) not in (dict, OrderedDict, list, tuple):
            raise Damaged(f"it holds a value of type {type(item).__name__}")
        if depth > 50:
            raise Damaged("its values are nested too deeply")
        if id(item) not in weights:
            if isinstance(item, dict) and any(type(key) not in (str, int) for key in item):
                raise Damaged("a key in it is not a string")
            parts = item.values() if isinstance(item, dict) else item
            weights[id(item)] = 1 + sum(weigh(part, depth + 1) for part in parts)
        if weights[id(item)] > MOST_VALUES:
            raise Damaged("it refers to the same values again and again")
        return weights[id(item)]

    weigh(value, 0)
