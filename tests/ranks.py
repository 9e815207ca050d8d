"""Start processes of torch.distributed for a test, with a limit on their time."""

import os
import socket
import time
from contextlib import ExitStack
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

LIMIT = 250  # seconds until processes that hang are killed; a busy machine takes many


def run_once(work, count, factory):
    """Run ranks for all workers of pytest-xdist: the first to ask starts them, others wait."""
    base = factory.getbasetemp()
    root = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder = root / f"{work.__name__}-{count}"
    try:
        folder.mkdir()
    except FileExistsError:
        end = time.monotonic() + LIMIT
        while not (folder / "over").exists():
            assert time.monotonic() < end, "another worker has not ended its ranks"
            time.sleep(0.1)
        return results_in(folder, count)
    try:
        return run_ranks(work, count, folder)
    finally:
        (folder / "over").touch()


def results_in(folder, count):
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(count)]


def run_ranks(work, count, folder):
    """Run ``work(rank, count)`` in so many processes, in a folder; return what each returned."""
    context = mp.get_context("spawn")
    arguments = (work, count, str(folder), free_ports(5))
    processes = [context.Process(target=_enter, args=(rank, *arguments)) for rank in range(count)]
    for process in processes:
        process.start()
    end = time.monotonic() + LIMIT
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))
    late = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for process in processes:
        process.kill()
        process.join()
    assert not late, f"ranks {late} of {count} were still running after {LIMIT} seconds"
    return results_in(folder, count)


def free_ports(count):
    """Return ports for scripts that make process groups of their own, one for each group."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for free in sockets:
            free.bind(("127.0.0.1", 0))
        return [free.getsockname()[1] for free in sockets]


def _enter(rank, work, count, folder, ports):
    os.environ.update(MASTER_ADDR="127.0.0.1", FREE_PORTS=" ".join(map(str, ports)))
    torch.set_num_threads(1)
    os.chdir(folder)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=count,
        timeout=timedelta(seconds=30),
    )
    results = work(rank, count)
    end = results.pop("at the end", None)
    torch.save(results, f"{folder}/{rank}.pt")
    if end is not None:  # something after which the ranks can no longer talk
        torch.save(results | {"end": end(rank)}, f"{folder}/{rank}.pt")
    elif dist.is_initialized():
        leave_group()


def leave_group():
    """Destroy the group once its threads have dropped the last message, as torch 2.6 needs it."""
    time.sleep(0.2)
    dist.destroy_process_group()
