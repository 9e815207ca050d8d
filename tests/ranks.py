"""Start processes of torch.distributed for a test, with a limit on their time."""

import os
import socket
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

LIMIT = 100  # seconds until processes that hang are killed


def run_ranks(work, count, folder):
    """Run ``work(rank, count)`` in so many processes, in a folder; return what each returned."""
    context = mp.get_context("spawn")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]  # for scripts that make a process group of their own
    arguments = (work, count, str(folder), port)
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
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(count)]


def _enter(rank, work, count, folder, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
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
        dist.destroy_process_group()
