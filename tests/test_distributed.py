"""Two gloo processes measure what one measures."""

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn

import newton_summary as ns


def make_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def make_batch():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(13, 4, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 3, (13,), generator=generator)


def measure_part(rank, path, results):
    """One rank: the first 5 samples, or the other 8."""
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    x, y = make_batch()
    mine = slice(0, 5) if rank == 0 else slice(5, 13)
    summary = ns.summarize(make_net(), loss_fn, (x[mine], y[mine]))
    alone = ns.summarize(make_net(), loss_fn, (x[mine], y[mine]), distributed=False)
    torch.save(
        {"summary": summary.state_dict(), "alone": float(alone.loss)}, f"{results}/{rank}.pt"
    )
    dist.destroy_process_group()


def test_two_processes_give_the_summary_of_one(tmp_path):
    """Unequal shards are weighted; the result is the same to the last bit on both ranks."""
    mp.spawn(measure_part, args=(tmp_path / "store", tmp_path), nprocs=2)
    saved = [torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1)]
    first, second = (ns.Summary.from_state_dict(s["summary"]) for s in saved)
    whole = ns.summarize(make_net(), loss_fn, make_batch())
    for name in ("loss", "gbar", "Hbar", "D3"):
        assert torch.equal(getattr(first, name), getattr(second, name))
        torch.testing.assert_close(getattr(first, name), getattr(whole, name), rtol=1e-12, atol=0)
    assert first.num_samples == whole.num_samples == 13
    assert saved[0]["alone"] != saved[1]["alone"]
