"""Try to break the library at length, and print the counts of the table in docs/faults.md.

    python scripts/campaign.py                          # every part
    python scripts/campaign.py interrupts leaks --scale 3

The tests of these parts run a share of the same code: what fails there is an assertion, and here a
count with its message.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

# What was tried, how often, and what was not as it should be.
Counts = Iterator[tuple[str, int, list[str]]]


def attempt(call: Callable[..., Any], *args: Any) -> tuple[Any, list[str]]:
    """Return what a call returns, and what it raised."""
    try:
        return call(*args), []
    except Exception:
        return 0, [traceback.format_exc(limit=-3)]


def interrupts(scale: int) -> Counts:
    """Interrupt measurements and steps at random moments."""
    import interrupts

    sys.unraisablehook = lambda _: None  # an interrupt inside a destructor
    for kind in interrupts.KINDS:
        for way in interrupts.WAYS:
            failures = interrupts.campaign(kind, way, 100 * scale, seed=scale)
            yield f"{kind}, by {way}", 100 * scale, failures


def kills(scale: int) -> Counts:
    """Stop trainings by signals, and a small one at every operation on its files."""
    import kills
    from test_run_files import kill_everywhere

    with without_waiting() as folder:
        yield "every operation on a file", *attempt(kill_everywhere, folder, 1)
    for name in kills.OPTIMIZERS:
        stopped, failures = 0, []
        for seed in range(4 * scale):
            with without_waiting() as folder:
                count, failed = attempt(kills.stop_again_and_again, name, folder, seed)
                stopped, failures = stopped + count, failures + failed
        yield f"signals, {name}", stopped, failures


def flips(scale: int) -> Counts:
    """Flip bits in the files of a run."""
    from test_run_files import FLIPPED, flip_bits

    for name in FLIPPED:
        with without_waiting() as folder:
            yield name, 100 * scale, attempt(flip_bits, name, folder, 100 * scale)[1]


def strangers(scale: int) -> Counts:
    """Read and resume directories that are damaged or hostile, all of them."""
    from test_run_files import make_good, visit_strangers

    with without_waiting() as folder:
        good = make_good(folder / "good")
        yield "directories", *attempt(visit_strangers, good, folder, 1)


def disks(scale: int) -> Counts:
    """Train, and write reports, on disks that are too small; go on when there is room."""
    import full_disks

    if not full_disks.can_mount():
        yield "not tried, as no small disk can be mounted here", 0, []
        return
    numbers = random.Random(scale)
    sizes = [f"size={numbers.randrange(4, 6000)}k" for _ in range(20 * scale)]
    files = [f"nr_inodes={count}" for count in range(2, 15)]
    with without_waiting() as folder:
        yield "trainings", *attempt(full_disks.fill, folder, [*sizes, *files])
    with without_waiting() as folder:
        sizes = [f"size={4**n}k" for n in range(1, 7)]
        yield "reports", *attempt(full_disks.report_on, folder, sizes)


def leaks(scale: int) -> Counts:
    """Call everything again and again, and see what is left."""
    import leaks

    for use in leaks.USES:
        grown = leaks.grows(use, 250 * scale)
        yield use, 250 * scale, [grown] * bool(grown)


def threads(scale: int) -> Counts:
    """Measure in two threads at once."""
    from test_threads import measure_at_once

    for backends in (("sweep", "sweep"), ("sweep", "nested")):
        for same_model in (False, True):
            name = f"{' and '.join(backends)}, {'one model' if same_model else 'two models'}"
            times = (250 if "nested" not in backends else 50) * scale
            yield name, 2 * times, attempt(measure_at_once, backends, same_model, times)[1]


def programs(scale: int) -> Counts:
    """Compare random losses with differences of gradients."""
    import fuzzer

    seeds = range(10_000 * scale, 10_000 * scale + 500 * scale)  # others than in the tests
    outcomes = {seed: fuzzer.check(fuzzer.write_program(seed)) for seed in seeds}
    wrong = [f"{s}: {o}" for s, o in outcomes.items() if o.kind in ("wrong", "crash")]
    yield "random programs", len(outcomes), wrong


PARTS = {
    f.__name__: f for f in (interrupts, kills, flips, strangers, disks, leaks, threads, programs)
}


@contextlib.contextmanager
def without_waiting() -> Iterator[Path]:
    """Give a folder, and do not wait for the disk meanwhile."""
    fsync = os.fsync
    with tempfile.TemporaryDirectory() as folder:
        os.fsync = lambda descriptor: None
        try:
            yield Path(folder)
        finally:
            os.fsync = fsync


def main() -> int:
    """Run the parts that were asked for, and print a row for each."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("parts", nargs="*", default=list(PARTS), help=", ".join(PARTS))
    parser.add_argument("--scale", type=int, default=1, help="so many times as much")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    rows, wrong = [], 0
    for part in options.parts:
        start, tried, failed = time.process_time(), 0, 0
        for name, count, failures in PARTS[part](options.scale):
            print(f"{part}: {name}: {len(failures)} of {count}", *failures, sep="\n  ", flush=True)
            tried, failed = tried + count, failed + len(failures)
        seconds = time.process_time() - start
        rows.append(f"| {part} | {tried:,} | {failed} | {seconds:.0f} s |")
        wrong += failed
    print("| part | tried | not as it should be | process time |", "|---|---|---|---|", sep="\n")
    print(*rows, sep="\n")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
