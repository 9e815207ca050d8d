"""One process with NCCL on a GPU: DDP, FSDP2 and the exchange itself. Skipped where there is none.

python -m pytest tests/test_distributed_cuda.py
"""

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import newton_summary as ns
from distributed_cases import cut, draw, loss_fn, make_net, sharded_net, train
from newton_summary import distributed, sharded

pytestmark = pytest.mark.skipif(
    not (torch.cuda.is_available() and dist.is_available() and dist.is_nccl_available()),
    reason="needs a GPU and NCCL",
)


@pytest.fixture(autouse=True)
def nccl(tmp_path):
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def on_gpu(batch):
    return tuple(t.cuda() for t in batch)


def assert_close(summary, expected):
    assert summary.Hbar.device.type == "cuda"
    for name in ("loss", "gbar", "Hbar", "D3"):
        a, e = getattr(summary, name).cpu(), getattr(expected, name)
        torch.testing.assert_close(a, e, rtol=0, atol=1e-12 * float(e.abs().max()))


def test_messages_travel_by_nccl(monkeypatch):
    """Also with a single rank, if it is not taken for one that works alone."""
    expected = ns.summarize(make_net(), loss_fn, draw(1), distributed=False)

    def one_rank(given, params):
        return distributed.Ranks(None, next(iter(params.values())).device)

    monkeypatch.setattr("newton_summary.measure.find_ranks", one_rank)
    batches = [on_gpu(cut(draw(1), rank, 2)) for rank in range(2)]
    assert_close(ns.summarize(make_net().cuda(), loss_fn, batches), expected)
    with_errors = ns.summarize(make_net().cuda(), loss_fn, batches, stderr=True)
    assert with_errors.Hbar_stderr.device.type == "cuda"

    def broken(model, batch):
        raise KeyError("no such label")

    with pytest.raises(KeyError):  # which failed on all ranks alike
        ns.summarize(make_net().cuda(), broken, batches)


def test_numbers_on_the_cpu_go_by_way_of_the_gpu():
    ranks = distributed.Ranks(None, torch.device("cpu"))
    with ranks.joint([2]):
        total = ranks.total(torch.tensor([1.0, 2.0]))
    assert total.device.type == "cpu" and total.tolist() == [1.0, 2.0]


def test_training_under_ddp_and_fsdp():
    """As without them, on the CPU; DDP moves inputs to its device, also in a measurement."""
    alone = train(make_net(), "default", lambda batch: batch)
    model = DistributedDataParallel(make_net().cuda(), device_ids=[0])
    runs = [
        train(model, "default", on_gpu),
        train(sharded_net(make_net().cuda()), "default", on_gpu),
    ]
    for run in runs:
        for p, expected in zip(run["params"], alone["params"]):
            torch.testing.assert_close(p.cpu(), expected, rtol=0, atol=1e-10)

    def loss_of_wrapped(given, batch):
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1].cuda())

    by_wrapper = ns.summarize(model, loss_of_wrapped, draw(1))
    plain = ns.summarize(model, loss_fn, on_gpu(draw(1)))
    torch.testing.assert_close(by_wrapper.Hbar, plain.Hbar, rtol=1e-12, atol=0)


def test_sharded_parameters():
    expected = ns.summarize(make_net(), loss_fn, draw(1), distributed=False)
    net = sharded_net(make_net().cuda())
    assert all(sharded.is_sharded(p) for p in net.parameters())
    assert_close(ns.summarize(net, loss_fn, on_gpu(draw(1))), expected)
