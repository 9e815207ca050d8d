"""The environment that ``torchrun`` gives its processes, readable without importing torch."""

from __future__ import annotations

import os


def launched() -> bool:
    """Whether this is one of several processes that ``torchrun`` started."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ


def rank() -> int:
    """Return the rank of this process."""
    return int(os.environ["RANK"]) if launched() else 0


def on_machine() -> tuple[int, int]:
    """Return the rank of this process on its machine, and how many processes that has."""
    rank, size = (os.environ.get(name) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    return (int(rank or 0), int(size or 1)) if launched() else (0, 1)
