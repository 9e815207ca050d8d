"""What each rank does in the tests of several processes."""

import collections
import contextlib
import io
import os
import time
import warnings
import weakref
from contextlib import contextmanager
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import newton_summary as ns
from newton_summary.derivatives.sweep import chunked_logits, engine, token_runs
from newton_summary.derivatives.sweep import sharded as sharded_sweep
from newton_summary.experiments.models import GPT
from newton_summary.integrations.monitor import Monitor
from newton_summary.parallel import fsdp
from newton_summary.parallel import processes as sharded
from problems import PROBLEMS

STEPS = 24
# In torch 2.6 a sharded model on the CPU can be measured, but not called: "'Stream' object has no
# attribute 'record_event'".
FSDP_RUNS = hasattr(torch.cpu.Stream, "record_event")


class Found(dict):
    """Results of a rank. Tests of those that this torch cannot give are skipped."""

    def __missing__(self, key):
        if FSDP_RUNS:
            raise KeyError(key)
        pytest.skip(f"torch {torch.__version__} cannot run fully_shard on the CPU")


def make_net():
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(5, 6), nn.GELU())
    layers = [nn.Linear(4, 5), nn.Tanh(), nn.LayerNorm(5), inner, nn.Linear(6, 3)]
    return nn.Sequential(*layers).double()


def sharded_net(net=None):
    """The same model under FSDP2, in five units."""
    net = make_net() if net is None else net
    for layer in net:
        if next(layer.parameters(), None) is not None:
            fully_shard(layer)
    return fully_shard(net)


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def draw(seed, size=12):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 4, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 3, (size,), generator=generator)


def some_direction():
    torch.manual_seed(7)
    return {name: torch.randn_like(p) for name, p in make_net().named_parameters()}


def cut(batch, rank, count):
    """Parts of different sizes: with 13 samples 1 and 12, or 1, 2, 3 and 7."""
    sizes = [*range(1, count), len(batch[0]) - sum(range(1, count))]
    return tuple(t.split(sizes)[rank] for t in batch)


def even_part(batch, rank, count):
    return tuple(t.tensor_split(count)[rank] for t in batch)


# Ways to measure: how, and the same data for one process and for a rank of several.
MEASUREMENTS = {
    "order 3": {},
    "order 2": {"order": 2},
    "order 1": {"order": 1},
    "one group": {"partition": "trivial"},
    "one group, order 2": {"partition": "trivial", "order": 2},
    "two groups": {"partition": "weights-biases"},
    "every number": {"partition": "discrete"},
    "nested": {"backend": "nested"},
    "given direction": {"direction": some_direction()},
    "errors": {"stderr": True},
}
SHARDED = {name: how for name, how in MEASUREMENTS.items() if name != "nested"}


def measure_all(rank, count):
    """Shards of different sizes, in different numbers of batches; none on the last rank."""
    mine = cut(draw(1, 13), rank, count)
    found = {}
    whole = draw(1, 13)
    batches = [tuple(t[i : i + 2] for t in whole) for i in range(0, 13, 2)]
    some = batches[:5] if rank == 0 else batches[5:] if rank == 1 else []
    found["unequal batches"] = ns.summarize(make_net(), loss_fn, some, stderr=True)
    last = rank == count - 1
    found["empty list"] = ns.summarize(make_net(), loss_fn, [] if last else [whole])
    nobody = tuple(t[:0] for t in whole)
    found["empty batch"] = ns.summarize(make_net(), loss_fn, nobody if last else whole)
    states = {name: summary.state_dict() for name, summary in found.items()}
    return states | measure_each(make_net, MEASUREMENTS, mine)


def measure_each(build, ways, batch):
    return {
        name: ns.summarize(build(), loss_fn, batch, **how).state_dict()
        for name, how in ways.items()
    }


# --- a module wrapped for data parallelism --------------------------------------------------------


@contextmanager
def counted(calls):
    """Count collectives that Python code starts, and their bytes; not those of DDP's reducer."""
    names = ["all_reduce", "all_gather_object", "broadcast", "broadcast_object_list", "barrier"]
    names += [
        "all_gather",
        "all_gather_into_tensor",
        "reduce_scatter_tensor",
        "_broadcast_coalesced",
    ]
    originals = {name: getattr(dist, name) for name in names}

    def wrap(name):
        def call(*args, **kwargs):
            size = args[0].nbytes if isinstance(args[0], torch.Tensor) else 0
            calls.append((name, size))
            return originals[name](*args, **kwargs)

        return call

    for name in names:
        setattr(dist, name, wrap(name))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def wrapped(rank, count):
    """Everything that takes a model is given the wrapped one."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3)).double()
    model = DistributedDataParallel(net)
    reductions, kinds = [], []

    def hook(state, bucket):
        reductions.append(bucket.buffer().numel())
        return (
            dist.all_reduce(bucket.buffer().div_(count), async_op=True)
            .get_future()
            .then(lambda future: future.value()[0])
        )

    model.register_comm_hook(None, hook)

    def loss(given, batch):
        kinds.append(type(given).__name__)
        return loss_fn(given, batch)

    def loss_of_wrapped(given, batch):  # although it is given the module inside
        return loss_fn(model, batch)

    batches = [even_part(draw(seed, 8 * count), rank, count) for seed in range(3)]
    partition = ns.make_partition(model)
    before = [b.clone() for b in net.buffers()]
    calls = []
    with counted(calls):
        summary = ns.summarize(model, loss, batches[0], partition=partition)
        same = ns.summarize(model, loss_of_wrapped, batches[0], partition=partition)
        adam = torch.optim.Adam(model.parameters())
        advice = ns.suggest_lrs(model, loss, batches, adam, "canonical")
    kinds_of_collectives = {name for name, _ in calls}
    measured_reductions = len(reductions)
    unmoved = all(torch.equal(a, b) for a, b in zip(before, net.buffers()))
    eval_net = net.eval()
    verified = ns.verify(DistributedDataParallel(eval_net), loss_fn, batches[0]).ok
    net.train()
    optimizer = ns.NewtonSummary(partition, summary_period=1)
    for batch in batches:
        loss_fn(model, batch).backward()
        optimizer.step(lambda: loss_fn(model, batch))  # noqa: B023 -- called at once
        optimizer.zero_grad()
    return {
        "names": partition.names,
        "kinds": kinds,
        "collectives": sorted(kinds_of_collectives),
        "reductions": (measured_reductions, len(reductions)),
        "summary": summary.Hbar,
        "same": same.Hbar,
        "factors": [group.factor for group in advice.groups],
        "stderr": [group.stderr for group in advice.groups],
        "verified": verified,
        "unmoved": unmoved,
        "params": [p.detach().clone() for p in net.parameters()],
    }


# --- training -------------------------------------------------------------------------------------


def make_optimizer(kind, model, curvature):
    partition = ns.make_partition(model, "discrete" if kind == "every number" else "canonical")
    curvature = (loss_fn, curvature)
    if kind == "paper":
        options = {"lr": 0.05, "lambda_int": 30.0, "summary_period": 5}
        return ns.NewtonSummary.paper(partition, curvature=curvature, **options)
    if kind == "adam":
        adam = torch.optim.Adam(model.parameters(), lr=1e-2)
        return ns.NewtonSummary(partition, direction=adam, curvature=curvature)
    if kind == "every number":
        return ns.NewtonSummary(partition, lr=0.1, curvature=curvature)
    if kind == "weight decay":
        return ns.NewtonSummary(partition, weight_decay=0.01, curvature=curvature)
    return ns.NewtonSummary(partition, curvature=curvature)


KINDS = ("default", "paper", "adam", "weight decay", "every number")


def train(model, kind, part, calls=None):
    """Train; ``part`` cuts a batch. Return parameters, rates, and collectives a step."""
    optimizer = make_optimizer(kind, model, [part(draw(100 + i)) for i in range(5)])
    steps = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_fn(model, part(draw(1000 + step))).backward()
        made, refreshes = len(calls or ()), optimizer.refreshes
        optimizer.step()
        steps.append((optimizer.refreshes - refreshes, (calls or [])[made:]))
    params = [sharded.whole(p).detach().clone() for p in model.parameters()]
    return {"params": params, "eta": optimizer.eta.clone(), "steps": steps}


def train_all(rank, count, kinds=KINDS):
    def part(batch):
        return even_part(batch, rank, count)

    found = Found()
    for kind in kinds:
        calls = []
        model = DistributedDataParallel(make_net())
        with counted(calls):
            found["ddp", kind] = train(model, kind, part, calls)
        calls = []
        if FSDP_RUNS:
            with counted(calls):
                found["fsdp", kind] = train(sharded_net(), kind, part, calls)
    return found


def steer(model, part):
    """Train with a controlled Adam; return the parameters and the record."""
    adam = torch.optim.Adam(model.parameters(), lr=1e-4)
    controller = ns.RateController(adam, model, loss_fn, period=5)
    for step in range(30):
        batch = part(draw(1000 + step))
        adam.zero_grad()
        loss_fn(model, batch).backward()
        controller.step(batch)
    params = [sharded.whole(p).detach().clone() for p in model.parameters()]
    return {"params": params, "rates": [record.rate for record in controller.history]}


def steer_callback(model, part):
    """The same as callbacks do it with ``adjust=True``, and with gradients scaled as in float16."""
    adam = torch.optim.Adam(model.parameters(), lr=1e-4)
    monitor = Monitor(loss_fn=loss_fn, adjust={"set_point": 0.8}, console=False)
    monitor.steer(adam, model, loss_fn)
    monitor.controller.period = 5
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step in range(30):
        batch = part(draw(1000 + step))
        adam.zero_grad()
        scaler.scale(loss_fn(model, batch)).backward()
        monitor.before_step([batch], step / 30, step)
        scaler.step(adam)
        scaler.update()
    params = [p.detach().clone() for p in model.parameters()]
    return {"params": params, "rates": [record.rate for record in monitor.controller.history]}


def steer_all(rank, count):
    def part(batch):
        return even_part(batch, rank, count)

    found = Found(ddp=steer(DistributedDataParallel(make_net()), part))
    found["callback"] = steer_callback(DistributedDataParallel(make_net()), part)
    if FSDP_RUNS:
        found["fsdp"] = steer(sharded_net(), part)
    return found


def share_a_device(rank, count):
    """What processes do that share one GPU; on the CPU if there is none."""
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")

    def there(batch):
        return tuple(t.to(device) for t in batch)

    mine = there(cut(draw(1, 13), rank, count))
    net = make_net().to(device)
    summary = ns.summarize(net, loss_fn, mine)
    error = error_of(lambda: ns.summarize(net, breaking("raises", rank), mine))
    model = DistributedDataParallel(net, device_ids=[device] if device.type == "cuda" else None)
    trained = train(model, "default", lambda batch: there(even_part(batch, rank, count)))
    return {
        "device": str(device),
        "summary": summary.to("cpu").state_dict(),
        "error": error,
        "params": [p.cpu() for p in trained["params"]],
    }


# --- sharded parameters ---------------------------------------------------------------------------


def measure_sharded(rank, count):
    mine = cut(draw(1, 13), rank, count)
    found = measure_each(sharded_net, SHARDED, mine)
    if not FSDP_RUNS:
        return Found(summaries=found)
    net = sharded_net()
    with torch.no_grad():
        net(mine[0])  # leaves whole parameters in the outermost module
    found["after a forward pass"] = ns.summarize(net, loss_fn, mine).state_dict()
    loss_fn(net, mine).backward()
    gradient = [sharded.local_part(p.grad).clone() for p in net.parameters()]
    values = [sharded.local_part(p).clone() for p in net.parameters()]
    ns.summarize(net, loss_fn, [mine, mine])
    adam = torch.optim.Adam(net.parameters())
    advice = ns.suggest_lrs(net, loss_fn, [mine, mine], adam, "canonical")
    still = all(
        torch.equal(sharded.local_part(p.grad), g) and torch.equal(sharded.local_part(p), v)
        for p, g, v in zip(net.parameters(), gradient, values)
    )
    net.zero_grad()
    loss_fn(net, mine).backward()  # the hooks are back: gradients are reduced as before
    again = [sharded.local_part(p.grad) for p in net.parameters()]
    return {
        "summaries": found,
        "no trace": still and all(torch.equal(a, b) for a, b in zip(again, gradient)),
        "factors": [group.factor for group in advice.groups],
        "rehearsal": advice.rehearsal,
        "resumed": resumed(mine),
        "trials": ns.step_trials(net, loss_fn, mine, ns.summarize(net, loss_fn, mine)),
        "others": other_models(),
        "pieces": passed_in_pieces(rank, count),
        "wholes": most_whole_at_a_time(rank),
        "errors": sharded_mistakes(rank),
        "failed": fail_sharded(rank),
    }


def other_models():
    """Return by how much sharded models of other kinds are off: also tied and frozen ones."""
    errors = {}
    for name in ("convnet", "transformer", "weight_norm", "rms_norm", "frozen"):
        models = [PROBLEMS["mlp_cross_entropy" if name == "frozen" else name]() for _ in range(2)]
        if name == "frozen":
            for problem in models:
                next(problem.model.parameters()).requires_grad_(False)
        plain, problem = models
        fully_shard(problem.model)
        given = (plain.loss_fn, plain.batch)  # all ranks have the same batch
        a = ns.summarize(problem.model, *given)
        b = ns.summarize(plain.model, *given, distributed=False)
        errors[name] = max(
            float((getattr(a, key) - getattr(b, key)).abs().max() / getattr(b, key).abs().max())
            for key in ("gbar", "Hbar", "D3")
        )
    return errors


def language_model():
    torch.manual_seed(5)
    texts = torch.randint(0, 40, (4, 9), generator=torch.Generator().manual_seed(6))
    return GPT(40, 8, 16, 2, 2).double(), texts


def next_token_loss(model, texts):
    logits = model(texts[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), texts[:, 1:].flatten())


def passed_in_pieces(rank, count):
    """Return the derivatives of a sharded language model, and how often each kind of piece came.

    With as many texts on all ranks, and with more on the last one.
    """
    calls = collections.Counter()

    def counting(name):
        original = getattr(engine, name)

        def call(*args):
            calls[name] += 1
            return original(*args)

        return mock.patch.object(engine, name, call)

    found = {}
    with contextlib.ExitStack() as small:
        for name in ("pass_tokens", "pass_in_pieces"):
            small.enter_context(counting(name))
        for module in (chunked_logits, token_runs):
            small.enter_context(mock.patch.dict(module.AT_A_TIME, cpu=1))
        small.enter_context(mock.patch.object(engine, "SMALL", 0))
        small.enter_context(mock.patch.object(token_runs.Tokens, "fewest", 2))
        small.enter_context(mock.patch.object(chunked_logits, "FEWEST_ROWS", 3))
        for name, part in (("as many", even_part), ("more", cut)):
            model, texts = language_model()
            for block in model.blocks:
                fully_shard(block)
            (mine,) = part((texts,), rank, count)
            calls.clear()
            summary = ns.summarize(fully_shard(model), next_token_loss, mine)
            found[name] = summary.state_dict(), dict(calls)
    return found


def resumed(mine):
    """Whether sharded training that was saved and loaded goes on bit for bit."""
    runs = []
    for _ in range(2):
        net = sharded_net()
        options = {"curvature": (loss_fn, [mine]), "summary_period": 2}
        runs.append((net, ns.NewtonSummary(ns.make_partition(net), **options)))
    (net, optimizer), (other, later) = runs
    take_steps(net, optimizer, mine)
    file = io.BytesIO()
    torch.save((net.state_dict(), optimizer.state_dict()), file)
    file.seek(0)
    weights, state = torch.load(file, weights_only=True)
    other.load_state_dict(weights)
    later.load_state_dict(state)
    for some in runs:
        take_steps(*some, mine)
    pairs = zip(net.parameters(), other.parameters())
    return all(torch.equal(sharded.local_part(a), sharded.local_part(b)) for a, b in pairs)


def take_steps(net, optimizer, batch):
    for _ in range(3):
        optimizer.zero_grad()
        loss_fn(net, batch).backward()
        optimizer.step()


def most_whole_at_a_time(rank):
    """Return how many numbers of gathered tensors are alive at most, and how many the model has."""
    layers = [layer for _ in range(12) for layer in (nn.Linear(6, 6), nn.Tanh())]
    net = sharded_net(nn.Sequential(*layers).double())
    alive, most = set(), [0]
    real = fsdp.whole

    def watched(tensor):
        result = real(tensor)
        if result is not tensor:
            memory = result.untyped_storage()
            alive.add(key := (memory._cdata, memory.nbytes()))
            weakref.finalize(memory, alive.discard, key)
            most[0] = max(most[0], sum(size for _, size in alive) // 8)
        return result

    fsdp.whole = watched
    try:
        ns.summarize(net, lambda model, x: model(x).square().mean(), torch.ones(3, 6).double())
    finally:
        fsdp.whole = real
    return most[0], sum(p.numel() for p in net.parameters())


def sharded_mistakes(rank):
    net, batch = sharded_net(), draw(1)
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("copy", "shard"))
    copied = fully_shard(make_net(), mesh=mesh)
    mistakes = {
        "verify": lambda: ns.verify(net, loss_fn, batch),
        "derivative_tensor": lambda: ns.derivative_tensor(net, loss_fn, batch, order=2),
        "taylor_terms": lambda: ns.taylor_terms(net, loss_fn, batch, order=2),
        "mesh": lambda: ns.summarize(copied, loss_fn, batch),
        "microbatch": lambda: ns.summarize(net, loss_fn, batch, microbatch=2),
        "backend": lambda: ns.summarize(net, loss_fn, batch, backend="nested"),
        "alone": lambda: ns.summarize(net, loss_fn, batch, distributed=False),
        "batches": lambda: ns.summarize(net, loss_fn, [batch] * (1 + rank)),
    }
    return {name: error_of(call) for name, call in mistakes.items()}


class BreaksBackward(torch.autograd.Function):
    """Nothing on the way forward, an error on the way back."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise KeyError("no way back")


def fail_sharded(rank):
    """Failures of rank 1 at every stage of a measurement, while rank 0 gathers parameters."""
    net, batch, failing = sharded_net(), draw(1), rank == 1
    u = {name: torch.ones_like(p) for name, p in net.named_parameters()}

    def halfway(model, batch):
        if failing:
            return loss_fn(model[:2], batch) + int("no number")
        return loss_fn(model, batch)

    def backward(model, batch):
        x = model[1](model[0](batch[0]))
        return F.cross_entropy(model[2:](BreaksBackward.apply(x) if failing else x), batch[1])

    def swallowing(model, batch):
        try:
            return breaking("raises", rank)(model, batch)
        except RuntimeError:  # of another rank, which is not this loss's to handle
            return model[0](batch[0]).sum()

    def other_path(model, batch):
        return model[1](model[0](batch[0])).sum() if failing else loss_fn(model, batch)

    def with_broken(owner, name, where):
        def broken(*args):
            raise LookupError(where)

        with pytest.MonkeyPatch.context() as patch:
            if failing:
                patch.setattr(owner, name, broken)
            ns.summarize(net, loss_fn, batch, direction=u)

    def at_the_end(done, total):
        if failing and done:
            raise LookupError("at the end")

    failures = {
        "raises": lambda: ns.summarize(net, breaking("raises", rank), batch),
        "halfway": lambda: ns.summarize(net, halfway, batch),
        "halfway along u": lambda: ns.summarize(net, halfway, batch, direction=u),
        "swallowed": lambda: ns.summarize(net, swallowing, batch),
        "backward": lambda: ns.summarize(net, backward, batch),
        "backward along u": lambda: with_broken(ns.Partition, "inner", "backward"),
        "in the sweep": lambda: with_broken(sharded_sweep, "leaf_tangent", "in the sweep"),
        "at the end": lambda: ns.summarize(net, loss_fn, batch, progress=at_the_end),
        "second batch": lambda: ns.summarize(net, loss_fn, BrokenLoader(rank)),
        "not finite": lambda: ns.summarize(net, breaking("nan", rank), batch),
        "interrupt": lambda: ns.summarize(net, breaking("interrupt", rank), batch),
        "other path": lambda: ns.summarize(net, other_path, batch),
        "order": lambda: ns.summarize(net, loss_fn, batch, order=2 + rank),
        "curvature": lambda: refresh(sharded_net(), loss_fn, BrokenLoader(rank), steps=3),
        "refresh": lambda: refresh(net, breaking("raises", rank), [batch]),
    }
    found = {name: error_of(call) for name, call in failures.items()}
    calls, gathered, whole = [], [], fsdp.whole
    with counted(calls), pytest.MonkeyPatch.context() as patch:
        patch.setattr(fsdp, "whole", lambda tensor: gathered.append(tensor) or whole(tensor))
        again = ns.summarize(net, loss_fn, batch, direction=u)
    return {"errors": found, "and then": again.loss, "calls": calls, "gathered": len(gathered)}


# --- failures -------------------------------------------------------------------------------------


def error_of(call):
    try:
        call()
    except (Exception, KeyboardInterrupt) as error:
        return type(error).__name__, str(error), type(error.__cause__).__name__
    return None


def breaking(kind, rank):
    """A loss that breaks on rank 1."""

    def loss(model, batch):
        if rank == 1 and kind == "raises":
            raise KeyError("no such label")
        if rank == 1 and kind == "interrupt":
            raise KeyboardInterrupt
        value = loss_fn(model, batch)
        return value * float("nan") if rank == 1 and kind == "nan" else value

    return loss


def broken_loader(rank):
    yield draw(1)
    if rank == 1:
        raise OSError("the disk is gone")
    yield draw(2)


class BrokenLoader:
    def __init__(self, rank):
        self.rank = rank

    def __iter__(self):
        return broken_loader(self.rank)


def fail(rank, count):
    batch = draw(1)
    net = make_net()
    u = some_direction()
    failures = {
        "raises": lambda: ns.summarize(net, breaking("raises", rank), batch),
        "raises along u": lambda: ns.summarize(net, breaking("raises", rank), batch, direction=u),
        "nan": lambda: ns.summarize(net, breaking("nan", rank), batch),
        "nan along u": lambda: ns.summarize(net, breaking("nan", rank), batch, direction=u),
        "loader": lambda: ns.summarize(net, loss_fn, BrokenLoader(rank)),
        "generator": lambda: ns.summarize(net, loss_fn, broken_loader(rank)),
        "no data": lambda: ns.summarize(net, loss_fn, []),
        "alike": lambda: ns.summarize(net, loss_fn, batch, direction="downhill"),
        "curvature": lambda: refresh(make_net(), loss_fn, BrokenLoader(rank), steps=3),
        "empty curvature": lambda: refresh(net, loss_fn, [] if rank == 1 else [batch]),
        "refresh": lambda: refresh(net, breaking("raises", rank), [batch]),
        "argument": lambda: ns.summarize(net, loss_fn, batch, order=3 + rank),
        "interrupt": lambda: ns.summarize(net, breaking("interrupt", rank), batch),
    }
    found = {name: error_of(call) for name, call in failures.items()}
    found["waiting"] = interrupted_while_waiting(rank, lambda: ns.summarize(net, loss_fn, batch))
    found["differences"] = differences(rank)
    found["subgroups"] = subgroups(rank)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = refresh(net, breaking("nan", rank), [batch])
    found["nan in a refresh"] = optimizer.failed_refreshes, str(caught[-1].message)
    found["and then"] = ns.summarize(make_net(), loss_fn, batch).loss
    return found


def interrupted_while_waiting(rank, call):
    """An interrupt that rank 1 hears of when its last message has come through."""
    real, size = dist.all_reduce, 8 * 84  # of a summary of eight groups

    def interrupted(tensor, *args, **kwargs):
        work = real(tensor, *args, **kwargs)
        if tensor.nbytes == size:
            raise KeyboardInterrupt
        return work

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(dist, "all_reduce", interrupted)
        return error_of(call)


def differences(rank):
    """Ranks that are about to do different things."""
    batch, u, net = draw(1), some_direction(), make_net()
    other = nn.Linear(4, 3).double()
    moved = make_net()
    with torch.no_grad():
        moved[4].weight[0, 0] += rank
    v = {**u, "0.bias": u["0.bias"] + rank}
    calls = {
        "order": lambda: ns.summarize(net, loss_fn, batch, order=2 + rank, direction=u),
        "groups": lambda: ns.summarize(
            net, loss_fn, batch, partition="trivial" if rank else "canonical", direction=u
        ),
        "model": lambda: ns.summarize(other if rank else net, loss_fn, batch),
        "stderr": lambda: ns.summarize(net, loss_fn, [batch, batch], stderr=rank == 1),
        "kind": lambda: ns.summarize(net, loss_fn, batch, direction=u if rank else "gradient"),
        "values": lambda: ns.summarize(moved, loss_fn, batch),
        "direction": lambda: ns.summarize(net, loss_fn, batch, direction=v),
        "optimizer": lambda: ns.NewtonSummary(ns.make_partition(net), summary_period=10 + rank),
        "diagonal": lambda: ns.NewtonSummary(ns.make_partition(net), diagonal=rank == 1),
        **{
            f"gradients, {spec}": lambda spec=spec: refresh(
                make_net(), loss_fn, [batch], seed=rank, spec=spec
            )
            for spec in ("canonical", "weights-biases", "trivial")
        },
    }
    return {name: error_of(call) for name, call in calls.items()}


def subgroups(rank):
    """Each rank in a group of its own: it works alone, and is told so in another's group."""
    groups = [dist.new_group([r]) for r in range(dist.get_world_size())]
    net, batch = make_net(), draw(1)
    own = ns.summarize(net, loss_fn, batch, distributed=groups[rank]).num_samples
    other = groups[1 - rank]
    return own, error_of(lambda: ns.summarize(net, loss_fn, batch, distributed=other))


def refresh(net, loss, data, seed=3, spec="canonical", steps=1):
    partition = ns.make_partition(net, spec)
    optimizer = ns.NewtonSummary(partition, curvature=(loss, data))
    loss_fn(net, draw(seed)).backward()
    for _ in range(steps):
        optimizer.step()
    optimizer.zero_grad()
    return optimizer


def time_out(rank, count):
    """A group with a short time-out, in which only rank 0 measures."""
    hasty = dist.new_group(timeout=timedelta(seconds=1))
    start = time.monotonic()
    error = None
    if rank == 0:
        error = error_of(lambda: ns.summarize(make_net(), loss_fn, draw(1), distributed=hasty))
    seconds = time.monotonic() - start
    dist.barrier()
    return error, seconds


def end_by_death(rank):
    """The last rank dies; the others measure on."""
    if rank == dist.get_world_size() - 1:
        os._exit(0)
    start = time.monotonic()
    error = error_of(lambda: ns.summarize(make_net(), loss_fn, draw(1)))
    return error, time.monotonic() - start


def count_bytes(rank, count):
    """Return for each number of groups the messages of a refresh."""
    found = {}
    for spec in ("canonical", "weights-biases", "trivial", "blocks-2"):
        net = make_net()
        optimizer = ns.NewtonSummary(
            ns.make_partition(net, spec), curvature=(loss_fn, [draw(1)]), variant="as-run"
        )
        loss_fn(net, draw(2)).backward()
        calls = []
        with counted(calls):
            optimizer.step()
        found[spec] = len(optimizer.partition), calls
    calls = []
    with counted(calls):
        ns.summarize(make_net(), loss_fn, draw(1))
    found["gradient"] = len(list(make_net().parameters())), calls
    return found


def numbers(rank, count):
    """What four ranks do: measure, and train with the defaults."""
    mine = cut(draw(1, 13), rank, count)
    return {
        "measured": measure_all(rank, count),
        "trained": train_all(rank, count, ["default"]),
        "sharded": {"summaries": measure_each(sharded_net, SHARDED, mine)},
    }


def everything(rank, count):
    """What two ranks do: all of the above, in one start of the processes."""
    return {
        "measured": measure_all(rank, count),
        "wrapped": wrapped(rank, count),
        "trained": train_all(rank, count),
        "sharded": measure_sharded(rank, count),
        "failed": fail(rank, count),
        "bytes": count_bytes(rank, count),
        "waited": time_out(rank, count),
        "at the end": end_by_death,
    }
