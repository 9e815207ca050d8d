"""Write a file as a whole or not at all.

The new file is written beside the old one under an unpredictable name, synced, and only then
renamed; a link in its place is replaced, never followed.
"""

from __future__ import annotations

import errno
import io
import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from newton_summary.errors import CannotWriteError

PREVIOUS = ".previous"  # ends the name of the file that was replaced
_FLAGS = (
    os.O_WRONLY
    | os.O_CREAT
    | os.O_EXCL
    | getattr(os, "O_NOFOLLOW", 0)  # not on Windows
    | getattr(os, "O_BINARY", 0)  # only on Windows
)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def write_file(path: Path, content: bytes | memoryview, *, keep: bool = False) -> None:
    """Write a file that replaces the old one once it is complete and on the disk.

    Args:
        path: The file.
        content: Its new content.
        keep: Keep the old one, with ``.previous`` at the end of its name.

    Raises:
        CannotWriteError: With the reason, such as a full disk. The old file is still there.
    """
    if "\0" in path.name:
        raise cannot_write(path, OSError(errno.EINVAL, "its name contains a NUL"))
    part = path.with_name(f".{path.name[:100]}.{secrets.token_hex(8)}.part")
    try:
        _write_whole(part, content)
        if keep:
            _keep(path)
        os.replace(part, path)
    except OSError as error:
        missing = not path.parent.is_dir()
        reason = OSError(errno.ENOENT, f"there is no folder {path.parent}") if missing else error
        raise cannot_write(path, reason) from None
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)


def _write_whole(file: Path, content: bytes | memoryview) -> None:
    """Write a new file, and wait until it is on the disk."""
    descriptor = os.open(file, _FLAGS, 0o666)
    try:
        rest = memoryview(content)
        while rest:  # a full disk takes a part, and refuses the next
            rest = rest[os.write(descriptor, rest) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _keep(path: Path) -> None:
    """Give a file a second name, so that it exists at every moment."""
    previous = path.with_name(path.name + PREVIOUS)
    with suppress(FileNotFoundError):
        previous.unlink()
    try:
        os.link(path, previous, follow_symlinks=False)
    except FileNotFoundError:
        return
    except OSError:  # a file system without links
        os.replace(path, previous)


def cannot_write(path: Path, error: OSError) -> CannotWriteError:
    """Return the error for a failed write."""
    hint = " Free some space, then run the same command again." if error.errno in _FULL else ""
    found = CannotWriteError(f"{path} cannot be written: {error.strerror or error}.{hint}")
    found.errno = error.errno
    return found


def make_folder(path: Path) -> None:
    """Create a folder and its parents."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(path, error) from None


def sync_folder(path: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    if os.name == "nt":  # which has no descriptors of folders
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with suppress(OSError):  # not every file system can
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_part(file: Path) -> bool:
    """Whether a file is an incomplete one of :func:`write_file`."""
    return file.name.startswith(".") and file.name.endswith(".part")


def write_text(path: Path, text: str) -> Path:
    """Replace a text file."""
    write_file(path, text.encode(errors="backslashreplace"))
    return path


def tensor_file(value: Any) -> memoryview:
    """Return the file that ``torch.save`` writes of plain values and tensors."""
    stream = io.BytesIO()
    torch.save(_dense(value), stream)
    return stream.getbuffer()


def save_tensors(path: str | os.PathLike[str], value: Any) -> None:
    """Replace a file of plain values and tensors."""
    write_file(Path(path), tensor_file(value))


def _dense(value: Any) -> Any:
    """Copy tensors that repeat their entries: a reader accepts no more entries than bytes."""
    if isinstance(value, Tensor):
        return value.contiguous() if 0 in value.stride() else value
    if type(value) is dict:
        return {key: _dense(item) for key, item in value.items()}
    return type(value)(map(_dense, value)) if type(value) in (list, tuple) else value
