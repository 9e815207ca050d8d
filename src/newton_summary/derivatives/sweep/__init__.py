"""The sweep: exact second and third order from one backward pass and one forward sweep."""

from newton_summary.derivatives.sweep.engine import summarize_sweep, sweep_batch
from newton_summary.derivatives.sweep.memory import StackTooLarge, bytes_of

__all__ = ["StackTooLarge", "bytes_of", "summarize_sweep", "sweep_batch"]
