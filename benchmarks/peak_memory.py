"""Peak memory on a CPU: every allocation of torch's, as its profiler sees it."""

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def peak_bytes(run: Callable[[], object]) -> int:
    """Return the most bytes that tensors took during a call, beyond those held before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    assert profiler.profiler is not None
    events = profiler.profiler.kineto_results.events()
    changes = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
    held = peak = 0
    for _, change in sorted(changes, key=lambda event: event[0]):
        held += change
        peak = max(peak, held)
    return peak
