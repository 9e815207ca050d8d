"""Write a file as a whole or not at all.

The new file is written beside the old one under a name that nobody can foresee, synced, and only
then renamed; a link in its place is replaced, never followed.
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

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


class Digested:
    """A stream that counts and digests what is written to it.

    Attributes:
        error: What went wrong in writing; torch.save replaces it by an error of its own.
    """

    def __init__(self, stream: BinaryIO):
        self._stream, self._digest = stream, hashlib.sha256()
        self.size = 0
        self.error: OSError | None = None

    def write(self, content: Any) -> int:
        """Write bytes."""
        rest = memoryview(content).cast("B")
        self._digest.update(rest)
        self.size += len(rest)
        try:
            while rest:  # a full disk takes a part, and refuses the next
                rest = rest[self._stream.write(rest) :]
        except OSError as error:
            self.error = error
            raise
        return len(content)

    def flush(self) -> None:
        """Do nothing: the file is flushed at its end."""

    @property
    def digest(self) -> str:
        """Sha256 of everything so far."""
        return self._digest.hexdigest()


@contextmanager
def replacing(path: Path, *, keep: bool = False) -> Iterator[Digested]:
    """Write a file that replaces the old one once it is complete and on the disk.

    Args:
        path: The file.
        keep: Keep the old one, with ``.previous`` at the end of its name.

    Raises:
        CannotWriteError: With the reason, such as a full disk. The old file is still there.
    """
    if "\0" in path.name:
        raise cannot_write(path, OSError(errno.EINVAL, "there is a NUL in its name"))
    part = path.with_name(f".{path.name[:100]}.{secrets.token_hex(8)}.part")
    stream: Digested | None = None
    try:
        with open(os.open(part, _FLAGS, 0o666), "wb", buffering=0) as file:
            stream = Digested(file)  # without a buffer, so that no error comes late
            yield stream
            os.fsync(file.fileno())
        if keep:
            _keep(path)
        os.replace(part, path)
    except OSError as error:
        missing = stream is None and not path.parent.is_dir()
        reason = OSError(errno.ENOENT, f"there is no folder {path.parent}") if missing else error
        raise cannot_write(path, reason) from None
    except Exception:
        if stream is None or stream.error is None:
            raise
        raise cannot_write(path, stream.error) from None
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)


def _keep(path: Path) -> None:
    """Give a file a second name, so that there is one at every moment."""
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
    """Make a folder, and those above it."""
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
    """Whether a file is an incomplete one of :func:`replacing`."""
    return file.name.startswith(".") and file.name.endswith(".part")


def write_text(path: Path, text: str) -> Path:
    """Replace a text file."""
    with replacing(path) as stream:
        stream.write(text.encode(errors="backslashreplace"))
    return path


def write_tensors(stream: Digested, value: Any) -> None:
    """Write plain values and tensors as ``torch.save`` does."""
    try:
        torch.save(_dense(value), stream)  # type: ignore[arg-type]
    except RuntimeError as error:  # after an interrupt torch cannot end the file, and says so
        if isinstance(error.__context__, KeyboardInterrupt):
            raise error.__context__ from None
        raise


def save_tensors(path: str | os.PathLike[str], value: Any) -> None:
    """Replace a file of plain values and tensors."""
    with replacing(Path(path)) as stream:
        write_tensors(stream, value)


def _dense(value: Any) -> Any:
    """Copy tensors that repeat their entries: a reader accepts no more entries than bytes."""
    if isinstance(value, Tensor):
        return value.contiguous() if 0 in value.stride() else value
    if type(value) is dict:
        return {key: _dense(item) for key, item in value.items()}
    return type(value)(map(_dense, value)) if type(value) in (list, tuple) else value
