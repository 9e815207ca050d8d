"""What ``torchrun`` tells each of the processes that it starts; known before torch is imported."""

from __future__ import annotations

import os


def launched() -> bool:
    """Whether ``torchrun`` has started several processes, of which this is one."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ


def rank() -> int:
    """Return the number of this process."""
    return int(os.environ["RANK"]) if launched() else 0


def local_rank() -> int:
    """Return the number of this process on its machine."""
    return int(os.environ.get("LOCAL_RANK", "0")) if launched() else 0


def local_size() -> int:
    """Return how many processes this machine has."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if launched() else 1
