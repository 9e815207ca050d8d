"""One process with NCCL on a GPU, and two with gloo that share it. Skipped where there is none.

python -m pytest tests/test_distributed_cuda.py
"""

import json

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import newton_summary as ns
from distributed_cases import (
    cut,
    draw,
    loss_fn,
    make_net,
    sharded_net,
    share_a_device,
    train,
)
from newton_summary.cli import main as cli
from newton_summary.parallel import processes as sharded
from newton_summary.parallel.ranks import Ranks
from ranks import run_ranks
from test_distributed_run import NEWTON, assert_same_metrics, rows, torchrun

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


def one_rank(given, params):
    """Ranks as find_processes returns them where there are several."""
    first = next(iter(params.values()))
    return Ranks(None, first.device, sharded.is_sharded(first))


def broken(model, batch):
    raise KeyError("no such label")


def test_messages_travel_by_nccl(monkeypatch):
    """Also with a single rank, if it is not taken for one that works alone."""
    expected = ns.summarize(make_net(), loss_fn, draw(1), distributed=False)

    monkeypatch.setattr("newton_summary.measuring.measurement.find_processes", one_rank)
    batches = [on_gpu(cut(draw(1), rank, 2)) for rank in range(2)]
    assert_close(ns.summarize(make_net().cuda(), loss_fn, batches), expected)
    with_errors = ns.summarize(make_net().cuda(), loss_fn, batches, stderr=True)
    assert with_errors.Hbar_stderr.device.type == "cuda"
    with pytest.raises(KeyError):  # which failed on all ranks alike
        ns.summarize(make_net().cuda(), broken, batches)


def test_numbers_on_the_cpu_go_by_way_of_the_gpu():
    ranks = Ranks(None, torch.device("cpu"))
    with ranks.joint():
        numbers = torch.tensor([1.0, 2.0])
    means, total = ranks.mean({"numbers": numbers}, 3)
    assert means["numbers"].device.type == "cpu"
    assert means["numbers"].tolist() == [1.0, 2.0] and total == 3


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


def test_sharded_parameters(monkeypatch):
    """Also with the meetings before they are gathered."""
    expected = ns.summarize(make_net(), loss_fn, draw(1), distributed=False)
    net = sharded_net(make_net().cuda())
    assert all(sharded.is_sharded(p) for p in net.parameters())
    assert_close(ns.summarize(net, loss_fn, on_gpu(draw(1))), expected)
    monkeypatch.setattr("newton_summary.measuring.measurement.find_processes", one_rank)
    assert_close(ns.summarize(net, loss_fn, on_gpu(draw(1))), expected)
    with pytest.raises(KeyError):  # which failed on all ranks alike
        ns.summarize(net, broken, on_gpu(draw(1)))


def test_two_processes_share_a_gpu(tmp_path):
    """With gloo: they measure and train as one process does, and a failure is told to both."""
    expected = ns.summarize(make_net(), loss_fn, draw(1, 13), distributed=False)
    alone = train(make_net(), "default", lambda batch: batch)
    found = run_ranks(share_a_device, 2, tmp_path)
    for rank in found:
        assert rank["device"] == "cuda:0"
        summary = ns.Summary.from_state_dict(rank["summary"])
        assert_close(summary.to("cuda"), expected)
        assert torch.equal(rank["summary"]["Hbar"], found[0]["summary"]["Hbar"])
        for p, first, one in zip(rank["params"], found[0]["params"], alone["params"]):
            assert torch.equal(p, first)
            torch.testing.assert_close(p, one, rtol=0, atol=1e-10)
        assert rank["error"][:2] == ("RankError", "Rank 1 of 2: KeyError: 'no such label'")


def test_a_recipe_on_two_processes_that_share_a_gpu(tmp_path):
    """Started by torchrun, and the run of one process."""
    run = ["cuda" if word == "cpu" else word for word in NEWTON] + ["--epochs", "1"]
    code, _, err = torchrun(2, [*run, "--run-dir", tmp_path / "two"], tmp_path)
    assert code == 0, err
    assert cli.main([*run, "--run-dir", str(tmp_path / "one"), "--quiet"]) == 0
    assert_same_metrics(rows(tmp_path / "two"), rows(tmp_path / "one"))
    session = json.loads((tmp_path / "two" / "environment.json").read_text())["sessions"][0]
    assert session["ranks"] == 2 and session["device"] == "cuda:0"
