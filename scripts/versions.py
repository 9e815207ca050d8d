"""Run the tests with other versions of Python and torch, and print rows for docs/install.md.

    python scripts/versions.py 3.10:2.6.0 3.13:2.13.0   # all of them: a quarter of an hour each
    python scripts/versions.py --share 3.10:2.6.0       # where versions differ: four minutes

Each pair gets an environment below build/versions, of 5 GB or more, made by the command
`python3.10` or the like, of pyenv too. The versions in constraints.txt are for the torch named
there; with another one, pip chooses. The output of the tests is beside the environment. The exit
status is 1 if a test failed, and 3 if an environment could not be made (no network, no room), which
is one line: continuous integration then goes on.
"""

import argparse
import datetime
import fcntl
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build/versions"
OUTCOMES = ["passed", "skipped", "failed", "errors"]
ROOM = 12e9  # bytes: the environment, and what pip unpacks meanwhile
NO_ENVIRONMENT = 3
# What reaches into torch: derivatives, operations of the sweep, hooks and patches, optimizers.
SHARE = [
    *("derivatives", "directions", "splitting", "sweep_operations", "sweep_engine"),
    *("sweep_attention", "sweep_finite", "norms", "fallback", "checkpoints", "no_trace", "threads"),
    *("interrupts", "ranks", "states", "controller", "optimizer", "optimizer_adam"),
    "cpu_products",
    *("optimizer_algorithm2", "optimizer_loops", "optimizer_resume"),
]
SHARE_NEEDS = ["hypothesis", "pytest", "pytest-xdist", "scipy", "--editable", f"{ROOT}[report]"]


class NoEnvironment(Exception):
    """An environment could not be made."""


def call(*command: str | Path, **environment: str) -> None:
    """Run a command of twenty minutes at most, without its output."""
    try:
        subprocess.run(
            command,
            env=os.environ | environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            check=True,
            timeout=1200,
        )
    except subprocess.CalledProcessError as error:
        lines = [line.strip() for line in error.stderr.splitlines() if line.strip()]
        reasons = [line for line in lines if "ERROR" in line] or lines or [str(error)]
        raise NoEnvironment(reasons[-1]) from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoEnvironment(str(error)) from error


def make(python: str, torch: str, share: bool) -> Path:
    """Return the interpreter of an environment, made if it is not there."""
    environment = FOLDER / f"python{python}-torch{torch}"
    made = environment / "made"
    FOLDER.mkdir(parents=True, exist_ok=True)
    with Path(f"{environment}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a second call waits for the first
        if not made.exists():  # or a call before was stopped
            free = shutil.disk_usage(FOLDER).free
            if free < ROOM:
                raise NoEnvironment(
                    f"it needs {ROOM / 1e9:.0f} GB of disk, {free / 1e9:.1f} are free"
                )
            call(f"python{python}", "-m", "venv", "--clear", environment, PYENV_VERSION=python)
        constraints = ROOT / "constraints.txt"
        pinned = f"torch=={torch}" in constraints.read_text().split()
        call(
            *(environment / "bin/python", "-m", "pip", "install", "--quiet", "--no-compile"),
            *("--retries", "2", "--timeout", "60"),
            *(["--constraint", constraints] if pinned else []),
            f"torch=={torch}",
            *(SHARE_NEEDS if share else ["--editable", f"{ROOT}[dev]"]),
        )
        call(environment / "bin/python", "-c", "import torch")
        made.touch()
    return environment / "bin/python"


def run_tests(python: Path, share: bool) -> dict[str, int]:
    """Return how many tests ended in which way; if some failed, print the output."""
    log = Path(f"{python.parents[1]}.log")
    chosen = [f"tests/test_{name}.py" for name in SHARE] if share else ["--doctest-modules"]
    with log.open("w") as output:
        status = subprocess.run(
            [python, "-m", "pytest", "-n", "2", "-q", "-rfEs", *chosen],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=output,
            stderr=subprocess.STDOUT,
        ).returncode
    text = log.read_text()
    if status:
        print(text)
    if status not in (0, 1):
        sys.exit(f"The tests did not run to their end: see {log}")
    *_, last = text.splitlines()  # 3 failed, 4000 passed, 20 skipped in 700.00s
    found = {way: re.search(rf"(\d+) {way.rstrip('s')}", last) for way in OUTCOMES}
    return {way: int(match[1]) if match else 0 for way, match in found.items()}


def main() -> int:
    """Make the environments one after the other, and run the tests in each."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("versions", nargs="+", metavar="PYTHON:TORCH", help="such as 3.10:2.6.0")
    parser.add_argument("--share", action="store_true", help="only where versions differ")
    options = parser.parse_args()
    status = 0
    for pair in options.versions:
        python, torch = pair.split(":")
        try:
            interpreter = make(python, torch, options.share)
        except NoEnvironment as reason:
            print(f"No tests with Python {python} and torch {torch}: {reason}", flush=True)
            status = status or NO_ENVIRONMENT
            continue
        counts = run_tests(interpreter, options.share)
        cells = [python, torch, *counts.values(), datetime.date.today()]
        print(f"| {' | '.join(map(str, cells))} |", flush=True)
        if counts["failed"] or counts["errors"]:
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
