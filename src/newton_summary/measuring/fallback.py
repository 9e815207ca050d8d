"""What to do when a backend fails."""

from __future__ import annotations

from newton_summary.derivatives import AUTO
from newton_summary.errors import (
    CannotDifferentiate,
    CoupledSamplesError,
    NotFiniteError,
    RankError,
    is_out_of_memory,
)
from newton_summary.probe.probe import Evaluation, check_depends, check_finite
from newton_summary.probe.state import interrupt_behind

PASSED_ON = (CannotDifferentiate, CoupledSamplesError, RankError, Warning)


def reason_to_fall_back(error: Exception, batch: Evaluation, backend: str) -> Exception:
    """Return why a backend cannot measure a batch, or raise the loss's own error.

    Evaluating the loss directly shows whose error it is: if it fails there too, it is the loss's.
    """
    interrupt = interrupt_behind(error)
    if interrupt is not None:
        raise interrupt
    probe = batch.probe
    ours = isinstance(error, PASSED_ON) or error is probe.complaint
    if ours or is_out_of_memory(error) or backend not in AUTO or probe.processes.sharded:
        return error
    loss = batch()
    check_finite(loss, batch.place)
    check_depends(loss, probe.params)
    if isinstance(error, NotFiniteError):
        there = str(error).partition(",")[0]
        what = f"{there}, but evaluated directly it is {float(loss.detach()):.6g}"
    else:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        what = f"it fails with {type(error).__name__}" + (f": {lines[0]}" if lines else "")
    return CannotDifferentiate(f"{backend}: {what[0].lower()}{what[1:]}")
