"""Train the paper's experiments side by side on one machine, and pack what a report needs.

    python benchmarks/paper_runs.py --data DATA --work WORK --workers 16 --seconds 1500 \
        --pack results.tar.gz [PLAN.txt]

A plan has one line for each recipe: its name, seeds ("0", "0,1" or "0-4"), epochs ("-" for the
recipe's own), and fields to change:

    lenet_cifar10_adam  0-4  200  optimizer.lr=1e-3

Without a plan, everything that docs/results.md shows is run, the most wanted first. Every run is a
process of its own that writes WORK/RECIPE/CHANGES,seed=N, with its output beside it in a .log; the
same command skips what is finished and resumes what is not. At the deadline runs stop after the
step they are in. Needs torch and numpy; not the packages of the command line.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from newton_summary.experiments.config import ExperimentConfig, check, from_dict, to_dict
from newton_summary.experiments.grid import run_name
from newton_summary.experiments.recipes import ADAM_RATES, PARTITIONS, get_recipe

PACKED = ("config.json", "metrics.jsonl", "environment.json", "summaries.pt", "manifest.json")
GRACE = 30  # seconds from the deadline until processes are killed
SETUPS = ("vgg_cifar10", "lenet_cifar10", "mlp_mnist", "bigmlp_cifar10")
TUNED = [f"optimizer.lr={rate:g}" for rate in ADAM_RATES]
PLAN = "\n".join(
    [
        *(f"{setup}_newton_summary 0-4 -" for setup in SETUPS),
        *(f"{setup}_adam 0-4 -" for setup in SETUPS),
        *(f"vgg_cifar10_{p.replace('-', '_')} 0 -" for p in PARTITIONS[:-1]),
        *(f"{setup}_kfac 0-4 -" for setup in ("mlp_mnist", "lenet_cifar10")),
        *(f"{setup}_as_published 0 -" for setup in SETUPS),
        *(f"lenet_cifar10_adam 0 - {rate}" for rate in TUNED),
        *(f"mlp_mnist_adam 0 - {rate}" for rate in TUNED),
        *(
            f"lenet_cifar10_diagonal 0 - optimizer.lr={lr} optimizer.lambda_int={strength}"
            for lr in (0.3, 0.1, 0.03)
            for strength in (3.0, 1.0, 0.3)
        ),
        "vgg_cifar10_diagonal 0 -",
        "lenet_cifar10_sgd 0 100",
        "vgg_cifar10_sgd 0 100 measure.every=10",
        *(
            f"{setup}_kfac 0 - optimizer.factored=true"
            for setup in ("vgg_cifar10", "bigmlp_cifar10")
        ),
        *(f"{setup}_default 0 -" for setup in SETUPS),
        "lenet_cifar10_default_plateau 0-4 -",
        *(f"vgg_cifar10_adam 0 - {rate}" for rate in TUNED),
        *(f"bigmlp_cifar10_adam 0 - {rate}" for rate in TUNED),
        "vbigmlp_cifar10 0 100 measure.every=10",
        "vbigmlp_cifar10_adam 0 100",
    ]
)


# --- the plan ------------------------------------------------------------------------------------


def read_plan(text: str) -> Iterator[ExperimentConfig]:
    """Give the configurations of a plan; one that comes twice is given once."""
    given = []
    for line in text.splitlines():
        words = line.partition("#")[0].split()
        if not words:
            continue
        name, seeds, epochs, *changes = words
        config = get_recipe(name)()
        if epochs != "-":
            config = replace(config, epochs=int(epochs))
        for change in changes:
            config = changed(config, *change.split("=", 1))
        for seed in numbers(seeds):
            seeded = replace(config, seed=seed)
            check(seeded)
            if seeded not in given:
                given.append(seeded)
                yield seeded


def numbers(text: str) -> list[int]:
    """Return the numbers of "0", "0,3" or "0-4".

    >>> numbers("0-2,5")
    [0, 1, 2, 5]
    """
    ends = [part.partition("-") for part in text.split(",")]
    return [n for first, _, last in ends for n in range(int(first), int(last or first) + 1)]


def changed(config: Any, name: str, text: str) -> Any:
    """Return a configuration with another value of a dotted field."""
    name, _, rest = name.partition(".")
    if name not in {f.name for f in fields(config)}:
        raise SystemExit(f"{type(config).__name__} has no field {name!r}.")
    if rest or is_dataclass(getattr(config, name)):
        return replace(config, **{name: changed(getattr(config, name), rest, text)})
    try:
        value = json.loads(text)
    except ValueError:
        value = text
    return replace(config, **{name: value})


# --- one run -------------------------------------------------------------------------------------


def run_one(path: Path, until: float, side_by_side: int, compare_speed: bool) -> None:
    """Train the configuration that is read from standard input, until a moment at most."""
    import torch

    from newton_summary.experiments.rundir import CHECKPOINT
    from newton_summary.experiments.training import Reporter, train

    class Deadline(Exception):
        """Time is up."""

    class Log(Reporter):
        """Prints the epochs, and stops at the deadline."""

        def step(self, epoch: int, step: int) -> None:
            if time.time() > until:
                raise Deadline

        def row(self, row: dict[str, Any]) -> None:
            keys = ("epoch", "train_loss", "test_accuracy", "lr", "seconds", "status")
            print(*(f"{key}={row.get(key)}" for key in keys), flush=True)
            self.step(0, 0)

    torch.set_num_threads(1)
    config = from_dict(json.load(sys.stdin))
    try:
        train(
            config,
            path,
            Log(),
            compare_speed=compare_speed,
            side_by_side=side_by_side,
            checkpoint_seconds=60,
        )
        for file in path.glob(f"{CHECKPOINT}*"):
            file.unlink()
    except Deadline:
        print("stopped at the deadline", flush=True)


def unfinished(
    plan: str, data: Path | None, work: Path, graph_steps: bool
) -> Iterator[tuple[ExperimentConfig, Path]]:
    """Give the runs of a plan that lack epochs and did not diverge, with their directories."""
    from newton_summary.experiments.rundir import Run

    for config in read_plan(plan):
        files = replace(config.data, root=data, download=False)
        config = replace(config, data=files, graph_steps=graph_steps)
        path = work / config.recipe / run_name(config)
        run = Run.load(path) if (path / "config.json").is_file() else None
        if run is None or not (run.diverged or run.epoch >= config.epochs):
            yield config, path


# --- all of them ---------------------------------------------------------------------------------


def run_all(args: argparse.Namespace, todo: list[tuple[ExperimentConfig, Path]]) -> None:
    """Start runs as long as there is time, ``args.workers`` at a time."""
    until = time.time() + args.seconds
    running: dict[Path, subprocess.Popen[str]] = {}
    waiting = list(todo)
    try:
        while running or (waiting and time.time() < until):
            while waiting and len(running) < args.workers and time.time() < until:
                config, path = waiting.pop(0)
                running[path] = start(args, config, path, until)
            time.sleep(0.2)
            for path, process in list(running.items()):
                if process.poll() is not None:
                    del running[path]
                    say(f"{path.relative_to(args.work)}: {last_line(path)}")
                elif time.time() > until + GRACE:
                    process.kill()
    finally:
        for process in running.values():
            process.kill()
    if waiting:
        say(f"no time for {len(waiting)} of {len(todo)} runs")


def start(
    args: argparse.Namespace, config: ExperimentConfig, path: Path, until: float
) -> subprocess.Popen[str]:
    """Start the process of a run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, __file__, "--one", str(path), "--until", str(until)]
    command += ["--workers", str(args.workers)] + ["--compare-speed"] * args.compare_speed
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with log_of(path).open("a") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            text=True,
        )
    assert process.stdin is not None
    json.dump(to_dict(config), process.stdin)
    process.stdin.close()
    return process


@contextmanager
def shared_gpu(folder: Path) -> Iterator[None]:
    """Let kernels of all processes run at the same time: with NVIDIA's MPS, started here."""
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["CUDA_MPS_PIPE_DIRECTORY"] = os.environ["CUDA_MPS_LOG_DIRECTORY"] = str(folder)
    subprocess.run(["nvidia-cuda-mps-control", "-d"], check=True)
    try:
        yield
    finally:
        subprocess.run(["nvidia-cuda-mps-control"], input="quit\n", text=True, check=False)


def log_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.log")


def last_line(path: Path) -> str:
    lines = log_of(path).read_text().splitlines()
    return lines[-1] if lines else "no output"


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {text}", flush=True)


def pack(work: Path, file: Path) -> None:
    """Write what reports read, and the logs."""
    chosen = [p for p in work.rglob("*") if p.name in PACKED or p.suffix == ".log"]
    with tarfile.open(file, "w:gz") as archive:
        for path in sorted(chosen):
            archive.add(path, path.relative_to(work))
    say(f"{file}: {len(chosen)} files, {file.stat().st_size / 2**20:.1f} MiB")


def print_table(work: Path) -> None:
    """Print one line for each run directory."""
    from newton_summary.experiments.results import outcome
    from newton_summary.experiments.rundir import find_runs

    if not any(work.rglob("config.json")):
        return
    for run in find_runs([work]):
        found = outcome(run)
        print(
            f"{run.path.relative_to(work)!s:<70} {found.status:<10} {found.epochs:>4} epochs  "
            f"train {found.train_loss:<10.4g} lowest {found.best_train_loss:<10.4g} "
            f"test {found.test_accuracy:.2%}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("plan", nargs="?", type=Path, help="file with the runs; all if not given")
    parser.add_argument("--data", type=Path, help="folder with the official files")
    parser.add_argument("--work", type=Path, default=Path("runs"), help="folder of the runs")
    parser.add_argument("--workers", type=int, default=1, help="runs at a time")
    parser.add_argument("--seconds", type=float, default=1500, help="time for everything")
    parser.add_argument(
        "--graph-steps", action="store_true", help="replay gradients as CUDA graphs"
    )
    parser.add_argument("--mps", action="store_true", help="let processes share the GPU by MPS")
    parser.add_argument("--compare-speed", action="store_true", help="time Adam after each run")
    parser.add_argument("--pack", type=Path, help="archive of the results")
    parser.add_argument("--dry", action="store_true", help="print the runs alone")
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one is not None:
        run_one(args.one, args.until, args.workers, args.compare_speed)
        return
    plan = PLAN if args.plan is None else args.plan.read_text()
    todo = list(unfinished(plan, args.data, args.work, args.graph_steps))
    if args.dry:
        for config, path in todo:
            print(path.relative_to(args.work), config.epochs)
    else:
        say(f"{len(todo)} runs to do, {args.workers} at a time, in {args.seconds:.0f} s")
        with shared_gpu(args.work.absolute() / "mps") if args.mps else nullcontext():
            run_all(args, todo)
        print_table(args.work)
    if args.pack is not None:
        pack(args.work, args.pack)


if __name__ == "__main__":
    main()
