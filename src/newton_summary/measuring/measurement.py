"""Measure a model: its summary, its derivative tensors, the terms of its Taylor expansion."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from newton_summary.derivatives import AUTO, BACKENDS, Backend
from newton_summary.derivatives.nested import (
    Contraction,
    count_backward_passes,
    nested_taylor_terms,
    nested_tensor,
)
from newton_summary.derivatives.sweep import StackTooLarge, bytes_of, sweep_batch
from newton_summary.derivatives.sweep.cuda_graph import Wanted, graphs_of
from newton_summary.derivatives.sweep.sharded import ShardedLeaves, ShardedProbe
from newton_summary.display.names import nearest
from newton_summary.display.warn import warn_user
from newton_summary.errors import CannotDifferentiate
from newton_summary.measuring.fallback import reason_to_fall_back
from newton_summary.measuring.splitting import measure_in_parts
from newton_summary.parallel.processes import (
    Distributed,
    Processes,
    find_processes,
    is_sharded,
    refuse_sharded,
)
from newton_summary.partition import Params, Partition, Spec, make_partition, result_dtype, unwrap
from newton_summary.probe.directions import Direction, find_direction
from newton_summary.probe.eager import is_approximate, start_measuring
from newton_summary.probe.inputs import NumSamples, check_microbatch
from newton_summary.probe.probe import Closure, Evaluation, LossFn, Probe
from newton_summary.probe.state import Journal
from newton_summary.summary import Summary, not_finite


def summarize(
    model: nn.Module,
    loss_fn: LossFn,
    data: Any,
    *,
    partition: Partition | Spec = "canonical",
    direction: Direction = "gradient",
    order: Literal[1, 2, 3] = 3,
    backend: Backend = "auto",
    microbatch: int | None = None,
    stack_limit: int | str | None = None,
    num_samples: NumSamples | None = None,
    progress: bool | Callable[[int, int | None], None] = False,
    stderr: bool = False,
    distributed: Distributed = "auto",
    cuda_graph: bool = False,
) -> Summary:
    """Measure the derivatives of the loss with respect to the step sizes of S groups.

    With phi(eta) = L(theta + U I_{P:S} eta), these are ``gbar`` = phi'(0), ``Hbar`` = phi''(0) and
    ``D3``, the diagonal of phi'''(0) (paper, Sections 3 and 4). The model, its buffers, gradients
    and mode and the random state are restored.

    Args:
        model: Any module. A compiled one is measured as it was before ``torch.compile``.
        loss_fn: ``loss_fn(model, batch)`` returns the mean loss of a batch as a scalar tensor.
        data: One batch (a tensor, tuple, mapping, or list of tensors), or an iterable of batches
            such as a DataLoader, which are weighted by their numbers of samples.
        partition: A :class:`Partition` of this model, or an argument of :func:`make_partition`.
        direction: ``"gradient"`` of the same data, a mapping from parameter name to tensor, or a
            torch optimizer, for the direction of its next step.
        order: The highest derivative to measure: 1, 2 or 3.
        backend: ``"sweep"``, ``"nested"``, ``"dense"``, ``"differences"``, or ``"auto"``: the
            sweep, or the next one that can handle the model (``summary.reason`` says why).
        microbatch: Split batches into parts of this many samples, to save memory, or time on a CPU,
            whose cache holds small parts. An error where a batch norm in training mode couples the
            samples.
        num_samples: How many samples a batch has: a number, or a function of the batch. By default
            what an object says of itself (``num_graphs``, ``batch_size``), or the length of the
            first tensor in the batch. Several batches whose numbers remain unknown are an error.
        progress: True to count the batches on standard error, or a function that is called with
            the number of batches done and their total (None while unknown).
        stack_limit: Bytes that the sweep's derivatives of all groups may take at a time, also as
            ``"4GB"``. Beyond it batches are split if the loss is a mean over samples (this is
            checked), else the groups are swept in chunks. By default batches are split beyond a
            quarter of the free memory, and groups are swept in chunks beyond half of it.
        stderr: Also compute standard errors over batches (or over the parts that these are split
            into), ``gbar_stderr`` and ``Hbar_stderr``, and keep the batches' summaries in
            ``parts``, from which :func:`learning_rates` computes the errors of the rates. They take
            the direction as given, although it may come from the same data.
        distributed: Whether to average over the ranks of torch.distributed, each with its own data
            and all with the same direction: ``"auto"`` if a process group of several ranks is
            initialised, True, False, or a process group. All ranks must call this, and all get
            identical results; an error on one of them is raised on all.
        cuda_graph: Speed up many measurements of a small model on a GPU: the fourth one with the
            same model, loss, partition, order and batch shapes is captured, and replayed from then
            on. The loss must do the same each time: its Python code, and whatever it reads besides
            the parameters, the buffers and the batch, are frozen at the capture. For one batch as a
            whole, along its gradient or a mapping. Where it cannot be captured (dropout, a batch
            norm in training, several ranks, a CPU) it is measured as usual, with a warning.

    Returns:
        The summary, with ``loss``, ``num_samples``, ``partition``, ``backend`` and ``reason``.

    >>> import newton_summary as ns
    >>> _ = torch.manual_seed(0)
    >>> model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    >>> def loss_fn(model, batch):
    ...     x, y = batch
    ...     return (model(x) - y).square().mean()
    >>> batch = torch.randn(32, 3), torch.randn(32, 1)
    >>> summary = ns.summarize(model, loss_fn, batch)
    >>> summary.names
    ('0.weight', '0.bias', '2.weight', '2.bias')
    >>> summary.gbar.shape, summary.Hbar.shape, summary.D3.shape
    (torch.Size([4]), torch.Size([4, 4]), torch.Size([4]))

    The slope along the gradient is its squared length, and with squared error the loss is
    quadratic in the last layer:

    >>> loss_fn(model, batch).backward()
    >>> torch.allclose(summary.gbar[0], model[0].weight.grad.square().sum())
    True
    >>> summary.D3[2:]
    tensor([0., 0.])
    """
    processes = find_processes(distributed, dict(unwrap(model).named_parameters()))
    with processes.joint():
        if order not in (1, 2, 3):
            raise ValueError(
                f"order={order!r}: expected 1, 2 or 3; for higher orders see derivative_tensor."
            )
        limit = None if stack_limit is None else bytes_of(stack_limit)
        backends = backends_for(backend, microbatch, processes.sharded)
        partition = find_partition(model, partition)
        check_memory(len(partition), min(order, 2))
        probe = open_probe(model, loss_fn, data, partition, microbatch, processes, num_samples)
    agree(processes, partition, direction, order=order, stderr=stderr)
    if cuda_graph:
        given: dict[str, Any] = {"stderr": stderr, "stack_limit": limit, "progress": progress}
        given |= {"backend": backends[0] != "sweep", "num_samples": num_samples}
        replayed = _replayed(probe, direction, order, **given)
        if replayed is not None:
            return replayed
    with Journal(), probe:
        # The sweep's own backward pass gives the gradient of a batch that it measures as a whole.
        swept = isinstance(direction, str) and direction == "gradient" and backends[0] == "sweep"
        u = None if swept and probe.in_one_piece else find_direction(direction, probe)
        with processes.joint():
            own = measure(probe, u, order, backends, limit, _reporter(progress))
    summary = mean_over(processes, own, u or {})
    if not stderr:
        return summary
    plain = [replace(part, partition=None).to("cpu") for part in own.parts]
    parts = [
        replace(part.to(summary.gbar.device), partition=partition)
        for some in processes.gather(plain)
        for part in some
    ]
    if len(parts) == 1:
        warn_user(
            "Standard errors need at least two batches, so there are none. Pass several batches, "
            "such as a DataLoader, or split this one with microbatch=..."
        )
    return summary.with_stderr(parts)


@torch.inference_mode(mode=False)
def _replayed(probe: Probe, direction: Direction, order: int, **given: Any) -> Summary | None:
    """Return the summary from a captured sweep; None where it must be measured without one."""
    given |= {"order": order == 1, "direction": isinstance(direction, Optimizer)}
    others = [name for name, value in given.items() if value is not None and value is not False]
    graphs, u, batch, unfit = graphs_of(probe.model), None, None, None
    with Journal() as journal:
        start_measuring(journal, alone=probe.processes.count == 1)  # threads take turns
        if isinstance(probe.data, Iterator) or not probe.in_one_piece:
            unfit = "it supports only one whole batch in one process"
        elif others:
            unfit = f"it cannot be combined with {others[0]}"
        else:
            (batch,) = probe.batches
            if not (isinstance(direction, str) and direction == "gradient"):
                u = find_direction(direction, probe)
        wanted = Wanted(probe.model, probe.partition, probe.loss_fn, batch, u, order)
        summary = graphs.summarize(wanted, unfit)
    if summary is None or not_finite(summary):
        return None
    return summary.to(next(iter(probe.params.values())).device)


def open_probe(
    model: nn.Module,
    loss_fn: LossFn,
    data: Any,
    partition: Partition,
    microbatch: int | None,
    processes: Processes,
    num_samples: NumSamples | None = None,
) -> Probe:
    """Return a probe for a model that is whole, or divided among processes."""
    kind = ShardedProbe if processes.sharded else Probe
    return kind(model, loss_fn, data, partition, microbatch, processes, num_samples)


def agree(
    processes: Processes, partition: Partition, direction: Direction | None, **facts: Any
) -> None:
    """Make sure that all processes are about to measure the same thing."""
    if processes.agreed:
        return
    values = {f"parameter {name!r}": p for name, p in partition.params.items()}
    if isinstance(direction, Mapping):
        tensors = {name: u for name, u in direction.items() if isinstance(u, Tensor)}
        values |= {f"the direction of {name!r}": u for name, u in tensors.items()}
    kind = "given" if isinstance(direction, Mapping) else type(direction).__name__
    kind = direction if isinstance(direction, str) else kind
    whole = {name: value for name, value in values.items() if not is_sharded(value)}
    processes.agree({**partition.facts(), "direction": kind, **facts}, whole)


def measure(
    probe: Probe,
    u: Params | None,
    order: int,
    backends: Sequence[str],
    stack_limit: int | None = None,
    report: Callable[[int, int | None], None] = lambda done, total: None,
) -> Summary:
    """Return this process's summary along ``u``, by the first backend that can measure it.

    Its ``parts`` are the summaries of the batches. Without ``u``, it is along the gradient of the
    only batch.
    """
    reason, found = None, None
    for name, following in zip(backends, [*backends[1:], None], strict=True):
        if u is None and name != "sweep":
            u = probe.gradient()
        try:
            run = partial(_measure_batch, probe, name, u, order, stack_limit)
            summary = replace(_mean_summary(probe, name, run, order, report), reason=reason)
        except CannotDifferentiate as error:
            if following is None and found is None:
                if name in AUTO[:-1] and not probe.processes.sharded:
                    why = str(error).rstrip(".")
                    raise CannotDifferentiate(f"{why}. Try backend='auto'.") from error
                raise
            why = str(error).removeprefix(f"{name}: ")
        else:
            if is_approximate():
                summary = replace(summary, approximate=True)
            why = not_finite(summary)
            if not why:
                return summary
            found = found or summary
        if following is None:
            break
        reason = f"{name}: {why}"
        how = {"nested": "exact, but slower", "differences": "approximate"}[following]
        warn_user(f"Falling back from {name!r} to {following!r} ({how}), because {why}")
    assert found is not None
    warn_user(f"With backend={found.backend!r}, {not_finite(found)}.")
    return found


def mean_over(processes: Processes, summary: Summary, u: Params) -> Summary:
    """Return the mean of the summaries of all processes, weighted by their numbers of samples.

    Exact for a loss that is a mean over samples. The message of each process has S^2 + 2S + 4
    numbers at order 3, whatever the size of the model. The direction must be the same on all.
    """
    names = (*("gbar", "Hbar", "D3")[: summary.order], "loss")
    parts = {name: getattr(summary, name) for name in names}
    same = () if processes.sharded else u.values()
    means, samples = processes.mean(parts, summary.num_samples, same)
    return replace(summary, **means, num_samples=samples, parts=())


def backends_for(backend: str, microbatch: int | None, sharded: bool) -> Sequence[str]:
    """Return the backends to try, in order; raise if there is none."""
    check_microbatch(microbatch)
    if backend != "auto" and backend not in BACKENDS:
        raise ValueError(
            f"Unknown backend {backend!r}.{nearest(backend, BACKENDS)} Use 'auto' or one of "
            f"{', '.join(map(repr, BACKENDS))}."
        )
    if not sharded:
        return AUTO if backend == "auto" else (backend,)
    if backend not in ("auto", "sweep"):
        raise ValueError(
            f"backend={backend!r}, but the model is sharded, and only the sweep gathers "
            "parameters as it needs them. Use backend='auto'."
        )
    if microbatch is not None:
        raise ValueError(
            f"microbatch={microbatch}, but the model is sharded, and all ranks need the same "
            "number of batches. Use smaller batches instead."
        )
    return ("sweep",)


def derivative_tensor(
    model: nn.Module,
    loss_fn: LossFn,
    data: Any,
    *,
    order: int,
    partition: Partition | Spec = "canonical",
    direction: Direction = "gradient",
    microbatch: int | None = None,
    num_samples: NumSamples | None = None,
) -> Tensor:
    """Return the whole tensor D^(order)(u), shape (S,) * order (paper, Section 3).

    Entry (s1, ..., sd) is the derivative of the loss along U^s1, ..., U^sd. The tensor is
    symmetric, and each entry is computed once: of the order of S^(order-1) / (order-1)! backward
    passes (:func:`newton_summary.derivatives.nested.count_backward_passes`).

    Args:
        model: Any module.
        loss_fn: As for :func:`summarize`.
        data: As for :func:`summarize`.
        order: 1 or more.
        partition: As for :func:`summarize`.
        direction: As for :func:`summarize`.
        microbatch: As for :func:`summarize`.
        num_samples: As for :func:`summarize`.

    >>> import newton_summary as ns
    >>> model = nn.Linear(2, 1, bias=False)
    >>> _ = nn.init.ones_(model.weight)
    >>> def loss_fn(model, x):
    ...     return model(x).pow(3).mean()
    >>> u = {"weight": torch.tensor([[1.0, 2.0]])}
    >>> ns.derivative_tensor(
    ...     model, loss_fn, torch.eye(2), order=3, partition="discrete", direction=u
    ... )
    tensor([[[ 3.,  0.],
             [ 0.,  0.]],
    <BLANKLINE>
            [[ 0.,  0.],
             [ 0., 24.]]])
    """
    partition = find_partition(model, partition)
    _check_order(order, len(partition))
    refuse_sharded(partition.params, "derivative_tensor")
    probe = Probe(model, loss_fn, data, partition, microbatch, num_samples=num_samples)
    return _mean_tensor(probe, direction, order, nested_tensor)


def taylor_terms(
    model: nn.Module,
    loss_fn: LossFn,
    data: Any,
    *,
    order: int,
    direction: Direction = "gradient",
    microbatch: int | None = None,
    num_samples: NumSamples | None = None,
) -> Tensor:
    """Return the derivatives of t -> L(theta + t u) at 0, of order 1 to ``order``, shape (order,).

    Divided by d! they are the terms of the Taylor expansion (paper, Section 3). One backward pass
    for each order.

    Args:
        model: Any module.
        loss_fn: As for :func:`summarize`.
        data: As for :func:`summarize`.
        order: 1 or more.
        direction: As for :func:`summarize`.
        microbatch: As for :func:`summarize`.
        num_samples: As for :func:`summarize`.

    >>> import newton_summary as ns
    >>> model = nn.Linear(1, 1, bias=False)
    >>> _ = nn.init.zeros_(model.weight)
    >>> def loss_fn(model, x):
    ...     return model(x).exp().mean()
    >>> u = {"weight": torch.ones(1, 1)}
    >>> ns.taylor_terms(model, loss_fn, torch.full((1, 1), 2.0), order=4, direction=u)
    tensor([ 2.,  4.,  8., 16.])
    """
    _check_order(order)
    partition = make_partition(model, "trivial")
    refuse_sharded(partition.params, "taylor_terms")
    probe = Probe(model, loss_fn, data, partition, microbatch, num_samples=num_samples)
    return _mean_tensor(probe, direction, order, nested_taylor_terms)


def find_partition(model: nn.Module, partition: Partition | Spec) -> Partition:
    """Return a partition of this model, made from a specification if it is one."""
    if not isinstance(partition, Partition):
        return make_partition(model, partition)
    live = dict(unwrap(model).named_parameters())
    for name, p in partition.params.items():
        if live.get(name) is not p:
            what = "has no parameter" if name not in live else "has another parameter called"
            raise ValueError(
                f"The partition belongs to another model: this one {what} {name!r}. Make one with "
                "make_partition(model, ...)."
            )
        if not p.requires_grad:
            raise ValueError(
                f"Parameter {name!r} of the partition has been frozen since. Make a new "
                "partition, or call requires_grad_(True) on it."
            )
    for name, p in live.items():
        if p.requires_grad and name not in partition.params:
            raise ValueError(
                f"Parameter {name!r} requires a gradient but is in no group of the partition. "
                "Make a new partition, freeze the parameter, or add it to the NewtonSummary that "
                "trains the model, with add_param_group."
            )
    return partition.to()  # the model may have moved since


def _measure_batch(
    probe: Probe,
    backend: str,
    u: Params | None,
    order: int,
    stack_limit: int | None,
    batch: Evaluation,
) -> list[Summary]:
    """Measure a batch, in parts if the sweep's stack would be too large and it may be split."""
    given: dict[str, Any] = {"u": u, "partition": probe.partition, "order": order}
    run = partial(BACKENDS[backend], params=probe.params, **given)
    if backend == "sweep":
        run = partial(run, stack_limit=stack_limit)
        if isinstance(probe, ShardedProbe):
            assert u is not None
            sharded = ShardedLeaves(probe.params, u, probe.partition, probe.processes)
            run = partial(sweep_batch, leaves=sharded, order=order, stack_limit=stack_limit)
        elif probe.microbatch is None:
            try:
                return [replace(run(batch, may_split=True), num_samples=batch.size)]
            except StackTooLarge as error:
                large = error.with_traceback(None)  # which would keep the tape
            samples = max(1, batch.size * large.limit // large.needed)
            if u is None:  # all parts move along the gradient of the whole
                u = probe.gradient([(batch, batch.size)])
            return measure_in_parts(batch, samples, u, partial(run, u=u))
    return [replace(run(batch), num_samples=batch.size)]


def _mean_summary(
    probe: Probe,
    backend: str,
    measure_batch: Callable[[Evaluation], Sequence[Summary]],
    order: int,
    report: Callable[[int, int | None], None],
) -> Summary:
    """Average the summaries of all batches, weighted by their numbers of samples."""
    summaries: list[Summary] = []
    total = probe.num_parts
    done = 0
    report(done, total)
    for done, (batch, _) in enumerate(probe.closures(), start=1):
        try:
            parts = measure_batch(batch)
        except Exception as error:
            reason = reason_to_fall_back(error, batch, backend)
            if reason is error:
                raise
            raise reason from error
        for part in parts:
            dtype = torch.promote_types(part.loss.dtype, part.gbar.dtype)
            summaries.append(replace(part, loss=part.loss.to(dtype)))
        if len(parts) == 1:
            probe.compare_loss(done - 1, parts[0].loss)
        report(done, total)
    if total is None:
        report(done, done)
    if not summaries:  # other processes have data
        return _nothing(probe, order)
    if not probe.counted:
        summaries = [replace(part, num_samples=0) for part in summaries]
    sizes = [part.num_samples for part in summaries]
    mean = summaries[0] if len(summaries) == 1 else Summary.mean(summaries, sizes)
    return replace(mean, parts=tuple(summaries))


def _nothing(probe: Probe, order: int) -> Summary:
    """Return the summary of no samples: zeros, which do not count in the mean over processes."""
    first, S = next(iter(probe.params.values())), len(probe.partition)
    zeros = partial(torch.zeros, dtype=result_dtype(probe.params), device=first.device)
    H, D3 = zeros(S, S) if order > 1 else None, zeros(S) if order > 2 else None
    return Summary(zeros(S), H, D3, zeros(()), partition=probe.partition, backend="no data")


def _mean_tensor(
    probe: Probe,
    direction: Direction,
    order: int,
    compute: Callable[[Closure, Contraction, int], Tensor],
) -> Tensor:
    """Average a tensor over all batches, weighted by their numbers of samples."""
    mean, samples = None, 0
    with Journal(), probe:
        u = find_direction(direction, probe)
        for closure, size in probe.closures():
            value = compute(closure, Contraction(probe.params, u, probe.partition), order)
            samples += size
            mean = value if mean is None else torch.lerp(mean, value, size / samples)
    assert mean is not None
    return mean


def _check_order(order: int, S: int = 1) -> None:
    """Raise unless there is a tensor of this order of S groups; say what a large one takes.

    Each further order takes about 2.5 times as long: 0.3 s for order 8 of a network of two layers,
    2 s for order 10.
    """
    if isinstance(order, bool) or not isinstance(order, int) or order < 1:
        raise ValueError(f"order={order!r}: expected a whole number, 1 or more.")
    passes = count_backward_passes(S, order)
    times = f"{2.5 ** min(order - 4, 300):.0e} times as long as order 4"
    if order > 20 or passes > 10**9:
        raise ValueError(
            f"order={order} of {S} groups takes {passes:,} backward passes, and about {times}: "
            "use a lower order, or fewer groups."
        )
    check_memory(S, order)
    if order > 8 or passes > 10**5:
        warn_user(
            f"order={order} of {S} groups takes {passes:,} backward passes, and about {times}; "
            "memory grows in the same way."
        )


def check_memory(S: int, order: int) -> None:
    """Raise if the derivatives of S groups, (S,) * order, cannot be in the memory of the machine.

    Three copies in float64, as they are added up.
    """
    names = getattr(os, "sysconf_names", {})  # not on Windows
    if "SC_PHYS_PAGES" in names and "SC_PAGE_SIZE" in names:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if 3 * 8 * S**order > memory:
            raise ValueError(
                f"Derivatives of order {order} of {S:,} groups take {24 * S**order / 2**30:.3g} "
                f"GiB, but this machine has {memory / 2**30:.3g}: use a coarser partition, such "
                "as 'canonical'."
            )


def _reporter(
    progress: bool | Callable[[int, int | None], None],
) -> Callable[[int, int | None], None]:
    if callable(progress):
        return progress
    if not progress:
        return lambda done, total: None

    def write(done: int, total: int | None) -> None:
        of = "" if total is None else f" of {total}"
        end = "\n" if done == total else ""
        sys.stderr.write(f"\rmeasuring: {done}{of} batches{end}")
        sys.stderr.flush()

    return write
