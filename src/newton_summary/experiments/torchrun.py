"""The environment that ``torchrun`` gives its processes, readable without importing torch."""

from __future__ import annotations

import os


def launched() -> bool:
    """Whether this is one of several processes that ``torchrun`` started."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ


def rank() -> int:
    """Return the rank of this process."""
    return int(os.environ["RANK"]) if launched() else 0


def local_rank() -> int:
    """Return the rank of this process on its machine."""
    return int(os.environ.get("LOCAL_RANK", "0")) if launched() else 0


def local_size() -> int:
    """Return the number of processes on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if launched() else 1
