"""Time of a refresh and of a step on several processes, what they exchange, and a model of more.

    OMP_NUM_THREADS=1 python benchmarks/scaling.py --rounds 80 --out benchmarks/results/scaling.json
    OMP_NUM_THREADS=1 python benchmarks/scaling.py --paper --out benchmarks/results/scaling.json

The second keeps the times of processes that are in the file, and computes bytes and the model anew:
for new results of benchmarks/engine.py. Both print the tables of docs/distributed.md.

Measured: LeNet under DDP on 1, 2 and 4 gloo processes, which share a batch of fixed size. Of each
quantity the slowest rank's median counts.

On paper: a refresh at 8, 64 and 1024 GPUs that each measure the batch of benchmarks/engine.py. The
sweep and the gradient are those measured on one GPU (``--engine``), the solution of the S x S
system is measured here; only the network is assumed (``Network``).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from engine import CASES
from losses import classification_loss
from torch.nn.parallel import DistributedDataParallel

import newton_summary as ns
from newton_summary.experiments import models

SAMPLES = 400  # in a batch of all processes together
PROCESSES = (1, 2, 4)
GPUS = (8, 64, 1024)
MEETING = 24  # bytes that show whether all ranks are well, before each message
PERIOD = 10  # steps from one refresh to the next
SHOWN = {  # in the table of the documentation
    "lenet": "LeNet",
    "vgg11": "VGG-11'",
    "bigmlp": "BigMLP",
    "gpt2-role": "GPT-2 small, by block and role",
}


# --- measured -------------------------------------------------------------------------------------


def median_ms(run: Callable[[], Any], rounds: int) -> float:
    """Return the median time of a call that all ranks make at the same time."""
    times = []
    for _ in range(rounds + 2):  # the first two warm up
        dist.barrier()
        start = time.perf_counter()
        run()
        times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times[2:])


def work(rank: int, count: int, folder: str, rounds: int) -> None:
    """Measure as one of several ranks, and write the times."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store{count}", rank=rank, world_size=count
    )
    torch.manual_seed(0)
    model = DistributedDataParallel(models.lenet())
    batch = (torch.randn(SAMPLES, 3, 32, 32), torch.randint(0, 10, (SAMPLES,)))
    mine = tuple(t.tensor_split(count)[rank] for t in batch)
    loss_fn = classification_loss
    partition = ns.make_partition(model)
    S, P = len(partition), sum(partition.sizes)
    options: dict[str, Any] = {"curvature": (loss_fn, [mine]), "lr": 1e-6}
    plain = ns.NewtonSummary(partition, summary_period=10**9, **options)
    fresh = ns.NewtonSummary(partition, summary_period=1, **options)

    def gradient() -> None:
        model.zero_grad()
        loss_fn(model, mine).backward()

    def step() -> None:
        gradient()
        plain.step()

    gradient()
    u = {name: p.grad.clone() for name, p in partition.params.items() if p.grad is not None}
    summary = ns.summarize(model, loss_fn, mine, partition=partition, direction=u)
    message = torch.zeros(message_bytes(S) // 8, dtype=torch.float64)
    vector = torch.zeros(P)
    sent = count_bytes(fresh.step) if count > 1 else 0
    assert sent == refresh_bytes(S, count)
    runs: dict[str, Callable[[], Any]] = {
        "step": step,
        "refresh": fresh.step,
        "own summary": lambda: ns.summarize(
            model, loss_fn, mine, partition=partition, direction=u, distributed=False
        ),
        "solution": lambda: ns.learning_rates(summary),
        "message of a summary": lambda: dist.all_reduce(message),
        "message of a gradient": lambda: dist.all_reduce(vector),
    }
    times = {name: median_ms(run, rounds) for name, run in runs.items()}
    every: list[Any] = [None] * count
    dist.all_gather_object(every, times)
    if rank == 0:
        slowest = {name: max(times[name] for times in every) for name in runs}
        facts = {"processes": count, "S": S, "P": P, "bytes of a refresh": sent}
        row = facts | {"bytes of a gradient": 4 * P if count > 1 else 0, "ms": slowest}
        Path(folder, f"{count}.json").write_text(json.dumps(row))
    dist.destroy_process_group()


def message_bytes(S: int) -> int:
    """Return the bytes of a summary: gbar, Hbar, D3, loss, samples, norm of u and its square."""
    return 8 * (S * S + 2 * S + 4)


def refresh_bytes(S: int, processes: int) -> int:
    """Return the bytes of a refresh: a meeting, which shows whether all is well, and a summary."""
    return MEETING + message_bytes(S) if processes > 1 else 0


def count_bytes(run: Callable[[], Any]) -> int:
    """Return how many bytes a rank gives to collectives."""
    sizes = []
    original = dist.all_reduce

    def counting(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sizes.append(tensor.nbytes)
        return original(tensor, *args, **kwargs)

    dist.all_reduce = counting
    try:
        run()
    finally:
        dist.all_reduce = original
    return sum(sizes)


def measure(rounds: int) -> list[dict[str, Any]]:
    """Return the times of 1, 2 and 4 processes."""
    with tempfile.TemporaryDirectory() as folder:
        for count in PROCESSES:
            mp.spawn(work, args=(count, folder, rounds), nprocs=count)
        return [json.loads(Path(folder, f"{count}.json").read_text()) for count in PROCESSES]


# --- on paper -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Network:
    """What is assumed, since it was not measured: round numbers of present machines."""

    gpus_of_a_node: int = 8
    call_us: float = 20.0  # to start a collective
    hop_us: float = 5.0  # latency of each of 2 log2(GPUs) hops of a tree
    inside_gb_s: float = 400.0  # of each GPU, within a node
    outside_gb_s: float = 50.0  # of each GPU, between nodes

    def all_reduce_ms(self, size: int, gpus: int) -> float:
        """Return the time of an all-reduce of ``size`` bytes: latency, and 2 (n-1)/n transfers."""
        speed = self.inside_gb_s if gpus <= self.gpus_of_a_node else self.outside_gb_s
        latency_us = self.call_us + 2 * self.hop_us * math.log2(gpus)
        return latency_us / 1e3 + 2 * (gpus - 1) / gpus * size / (speed * 1e6)


def solution_ms(S: int) -> float:
    """Return the time of solving for the rates of S groups, measured on this machine's CPU."""
    torch.manual_seed(0)
    A = torch.randn(S, S, dtype=torch.float64)
    summary = ns.Summary(torch.randn(S).double(), A @ A.T / S, torch.randn(S).double())
    times = []
    for _ in range(32):
        start = time.perf_counter()
        ns.learning_rates(summary)
        times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times[2:])  # the first two warm up


def on_paper(engine: dict[str, Any], network: Network) -> list[dict[str, Any]]:
    """Return a refresh and a step of every model of the engine's benchmark, at more GPUs."""
    builds = {case.name: case.build for case in CASES}
    times = {(r["model"], r["method"], r["order"]): r for r in engine["results"]}
    rows = []
    for (name, method, order), sweep in times.items():
        if (method, order) != ("sweep", 3) or "error" in sweep:
            continue
        gradient = times[name, "gradient", 1]["ms"]
        with torch.device("meta"):
            P = sum(p.numel() for p in builds[name]().parameters())
        S = sweep["S"]
        size = message_bytes(S)
        solution = solution_ms(S)
        for gpus in GPUS:
            message = network.all_reduce_ms(MEETING, gpus) + network.all_reduce_ms(size, gpus)
            refresh = sweep["ms"] + message + solution
            step = gradient + network.all_reduce_ms(4 * P, gpus)  # not hidden by the backward pass
            rows.append(
                {
                    "model": name,
                    "S": S,
                    "P": P,
                    "GPUs": gpus,
                    "samples of a GPU": sweep["batch"],
                    "bytes": size,
                    "bytes of a vector": 4 * P,
                    "sweep_ms": sweep["ms"],
                    "message_ms": message,
                    "solution_ms": solution,
                    "refresh_ms": refresh,
                    "step_ms": step,
                    "over_steps_alone": 1 + refresh / (PERIOD * step),
                }
            )
    return rows


# --- tables ---------------------------------------------------------------------------------------


def measured_table(rows: list[dict[str, Any]]) -> str:
    """Return the times of gloo processes as Markdown."""
    names = {
        "step": "step",
        "refresh": "refresh",
        "own summary": "a rank's own summary",
        "solution": "solution",
        "message of a summary": "message of a summary",
        "message of a gradient": "of a gradient",
    }
    lines = [f"| processes | {' | '.join(names.values())} | bytes of a refresh | of a gradient |"]
    lines.append("|---" * (len(names) + 3) + "|")
    for row in rows:
        cells = [f"{row['ms'][name]:.{0 if row['ms'][name] >= 10 else 1}f}" for name in names]
        if row["processes"] == 1:
            cells[-2:] = "-", "-"
        sizes = f"{row['bytes of a refresh']:,} | {row['bytes of a gradient']:,}"
        lines.append(f"| {row['processes']} | {' | '.join(cells)} | {sizes} |")
    return "\n".join(lines)


def paper_table(rows: list[dict[str, Any]]) -> str:
    """Return the model as Markdown."""
    lines = [
        "| model | S | GPUs | bytes of a summary | of a vector of P | sweep | solution | message | "
        "refresh | step | over steps alone |",
        "|---" * 11 + "|",
    ]
    for row in rows:
        if row["model"] in SHOWN:
            ms = {name: row[f"{name}_ms"] for name in ("sweep", "solution", "refresh", "step")}
            cells = {name: f"{value:.1f}" for name, value in ms.items()}
            lines.append(
                f"| {SHOWN[row['model']]} | {row['S']} | {row['GPUs']} | {row['bytes']:,} | "
                f"{row['bytes of a vector'] / 1e6:.1f} MB | {cells['sweep']} | {cells['solution']} "
                f"| {row['message_ms']:.2f} | {cells['refresh']} | {cells['step']} | "
                f"{row['over_steps_alone']:.2f} |"
            )
    return "\n".join(lines)


def main() -> None:
    """Measure, compute, print and write."""
    folder = Path(__file__).parent
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--engine", type=Path, default=folder / "results" / "engine-h200.json")
    parser.add_argument("--paper", action="store_true", help="keep the times that --out has")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    network = Network()
    engine = json.loads(args.engine.read_text())
    if args.paper:
        if args.out is None or not args.out.exists():
            parser.error("--paper needs --out, a file with the times of processes")
        result = json.loads(args.out.read_text())
        for row in result["measured"]:
            row["bytes of a refresh"] = refresh_bytes(row["S"], row["processes"])
    else:
        result = {
            "environment": {
                "date": date.today().isoformat(),
                "command": " ".join(["python", *sys.argv]),
                "torch": torch.__version__,
                "python": platform.python_version(),
                "cores": mp.cpu_count(),
                "load at the start": os.getloadavg()[0],
                "version": ns.__version__,
            },
            "measured": measure(args.rounds),
        }
    result["network"] = asdict(network)
    result["engine"] = engine["environment"]
    result["on paper"] = on_paper(engine, network)
    print(measured_table(result["measured"]))
    print()
    print(paper_table(result["on paper"]))
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
