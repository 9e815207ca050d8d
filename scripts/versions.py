"""Run the whole suite with other versions of Python and torch, and print rows for docs/install.md.

    python scripts/versions.py 3.10:2.6.0 3.13:2.13.0

Each pair gets an environment below build/versions, made by the command `python3.10` or the like,
of gigabytes, and takes a quarter of an hour. The versions in constraints.txt are for the torch
named there; with another one, pip chooses. The output of each run is beside its environment.
"""

import argparse
import datetime
import os
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build/versions"
OUTCOMES = ["passed", "skipped", "failed", "errors"]


def make(python: str, torch: str) -> Path:
    """Return the interpreter of an environment with the extra `dev`, made if it is not there."""
    environment = FOLDER / f"python{python}-torch{torch}"
    if not environment.exists():
        subprocess.run([f"python{python}", "-m", "venv", environment], check=True)
    constraints = ROOT / "constraints.txt"
    pinned = f"torch=={torch}" in constraints.read_text().split()
    install = [environment / "bin/python", "-m", "pip", "install", "--quiet", f"torch=={torch}"]
    install += ["--constraint", constraints] if pinned else []
    subprocess.run([*install, "--editable", f"{ROOT}[dev]"], check=True)
    return environment / "bin/python"


def run_suite(python: Path) -> dict[str, int]:
    """Return how many tests ended in which way."""
    log = Path(f"{python.parents[1]}.log")
    with log.open("w") as output:
        subprocess.run(
            [python, "-m", "pytest", "--doctest-modules", "-n", "2", "-q", "-rs"],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    *_, last = log.read_text().splitlines()  # 3 failed, 4000 passed, 20 skipped in 700.00s
    if "passed" not in last:
        raise SystemExit(f"The suite did not run to its end: see {log}")
    found = {way: re.search(rf"(\d+) {way.rstrip('s')}", last) for way in OUTCOMES}
    return {way: int(match[1]) if match else 0 for way, match in found.items()}


def main() -> None:
    """Make the environments one after the other, and run the suite in each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("versions", nargs="+", metavar="PYTHON:TORCH", help="such as 3.10:2.6.0")
    for pair in parser.parse_args().versions:
        python, torch = pair.split(":")
        counts = run_suite(make(python, torch))
        cells = [python, torch, *counts.values(), datetime.date.today()]
        print(f"| {' | '.join(map(str, cells))} |", flush=True)


if __name__ == "__main__":
    main()
