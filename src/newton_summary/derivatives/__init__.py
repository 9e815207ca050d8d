"""Ways to compute a summary. Each takes (closure, params, u, partition, order)."""

from collections.abc import Callable
from typing import Literal

from newton_summary.derivatives.dense import summarize_dense
from newton_summary.derivatives.differences import summarize_differences
from newton_summary.derivatives.nested import summarize_nested
from newton_summary.derivatives.sweep import summarize_sweep
from newton_summary.summary import Summary

Backend = Literal["auto", "sweep", "nested", "dense", "differences"]

BACKENDS: dict[str, Callable[..., Summary]] = {
    "sweep": summarize_sweep,
    "nested": summarize_nested,
    "dense": summarize_dense,
    "differences": summarize_differences,
}

# What "auto" tries, in this order.
AUTO = ("sweep", "nested", "differences")
