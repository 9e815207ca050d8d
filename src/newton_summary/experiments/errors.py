"""Mistakes of a user, told in one line."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """Something that the user can mend; the command line prints the message and exits with 2.

    Attributes:
        rank: The process that it happened on, where several train together.
    """

    rank: int | None = None


class OtherRankError(UserError):
    """A mistake on another process, which tells it."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return " Did you mean ...?" with the names most like a wrong one, or nothing.

    >>> nearest("lenet_cifar", ["lenet_cifar10", "rosenbrock"])
    " Did you mean 'lenet_cifar10'?"
    """
    close = difflib.get_close_matches(name, list(known), n=3, cutoff=0.5)
    return f" Did you mean {' or '.join(repr(c) for c in close)}?" if close else ""
