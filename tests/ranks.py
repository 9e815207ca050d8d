"""Start processes of torch.distributed for a test, with a limit on their time."""

import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

LIMIT = 100  # seconds until processes that hang are killed


def run_ranks(work, count, folder):
    """Run ``work(rank, count)`` in so many processes; return what each of them returned."""
    context = mp.get_context("spawn")
    arguments = (work, count, str(folder))
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


def _enter(rank, work, count, folder):
    torch.set_num_threads(1)
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
    else:
        dist.destroy_process_group()
