"""Warnings that name the user's line, however deep inside the package they arise."""

from __future__ import annotations

import sys
import warnings

_OTHERS = (__name__.partition(".")[0], "torch", "contextlib")


def warn_user(message: str) -> None:
    """Warn at the line outside this package, torch and contextlib that called into it."""
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and frame.f_globals["__name__"].partition(".")[0] in _OTHERS:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
