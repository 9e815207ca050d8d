"""The sweep: exact second and third order from one backward pass and one forward sweep."""

from newton_summary.derivatives.sweep.engine import summarize_sweep, sweep_batch
from newton_summary.derivatives.sweep.memory import StackTooLarge

__all__ = ["StackTooLarge", "summarize_sweep", "sweep_batch"]
