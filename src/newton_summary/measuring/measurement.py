"""Measure a model: its summary, its derivative tensors, the terms of its Taylor expansion."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from newton_summary.derivatives import AUTO, BACKENDS
from newton_summary.derivatives.nested import Contraction, nested_taylor_terms, nested_tensor
from newton_summary.derivatives.sweep import StackTooLarge, summarize_sweep
from newton_summary.derivatives.sweep.sharded import summarize_sharded
from newton_summary.display.names import nearest
from newton_summary.display.warn import warn_user
from newton_summary.errors import CannotDifferentiate
from newton_summary.parallel.agreement import live_values
from newton_summary.parallel.fsdp import is_sharded, refuse_sharded
from newton_summary.parallel.mean import mean_over_ranks, message_length, parts_of_all
from newton_summary.parallel.ranks import OBJECTS, agree, find_ranks, together
from newton_summary.partition import Params, Partition, Spec, make_partition, result_dtype, unwrap
from newton_summary.probe.directions import Direction, find_direction, needs_gradient
from newton_summary.probe.probe import Closure, LossFn, Probe
from newton_summary.probe.undo import Journal
from newton_summary.summary import Summary


def summarize(
    model: nn.Module,
    loss_fn: LossFn,
    data: Any,
    *,
    partition: Partition | Spec = "canonical",
    direction: Direction = "gradient",
    order: int = 3,
    backend: str = "auto",
    microbatch: int | None = None,
    stack_limit: int | None = None,
    progress: bool | Callable[[int, int | None], None] = False,
    stderr: bool = False,
    distributed: str | bool | Any = "auto",
) -> Summary:
    """Measure the derivatives of the loss in the step sizes of S groups.

    With phi(eta) = L(theta + U I_{P:S} eta), gives ``gbar`` = phi'(0), ``Hbar`` = phi''(0) and
    ``D3``, the diagonal of phi'''(0). The model, its buffers, gradients, mode and the random state
    are afterwards as they were.

    Args:
        model: Any module. A compiled one is measured as it was before ``torch.compile``.
        loss_fn: ``loss_fn(model, batch)`` returns the mean loss of a batch as a scalar tensor.
        data: One batch (a tensor, tuple, mapping, or a list that holds tensors), or an iterable of
            batches such as a DataLoader; these are weighted by their numbers of samples. The number
            of samples is the length of the first tensor in the batch.
        partition: A :class:`Partition` of this model, or what :func:`make_partition` takes.
        direction: ``"gradient"`` of the same data, a mapping from parameter name to tensor, or a
            torch optimizer, whose next step is then the direction.
        order: 1, 2 or 3: the highest derivative wanted.
        backend: ``"sweep"``, ``"nested"``, ``"dense"``, ``"differences"``, or ``"auto"``: the
            sweep, and what comes after it where it cannot go on (``summary.reason`` says why).
        microbatch: Split batches into parts of so many samples, to save memory. Refused where a
            batch norm in training mode couples the samples.
        progress: True to see the batches counted on standard error, or a function that is called
            with the number of batches done and their total (None while it is not known).
        stack_limit: Bytes that the sweep's derivatives of all groups may take at a time. Beyond it
            batches are split where the loss is a mean over samples (that is checked), and else the
            groups are swept in chunks. If not given, batches are split beyond 64 MiB on a CPU and a
            quarter of the free memory elsewhere, groups are swept in chunks beyond half of it.
        stderr: Also give the standard errors over batches (or over the parts that these are split
            into), ``gbar_stderr`` and ``Hbar_stderr``, and keep the batches' summaries in
            ``parts``, from which :func:`learning_rates` tells the errors of the rates. They hold
            for the direction as it is: that it is itself made from data is not counted.
        distributed: Whether to average over the ranks of torch.distributed, each with data of its
            own and all with the same direction: ``"auto"`` where a process group of several ranks
            is initialised, True, False, or a process group. All ranks have to call this, and get
            the same to the last bit; what fails on one of them is raised on all.

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
    ranks = find_ranks(distributed, dict(unwrap(model).named_parameters()))
    with together(ranks):
        partition, names = _checked(model, partition, order, backend, microbatch)
        to_find = needs_gradient(direction)
        lengths = [1] * to_find + [message_length(len(partition), order)] + [OBJECTS] * stderr
        facts = {"direction": "to be found" if to_find else "given", "order": order}
        values = live_values(partition, direction)
        agree(ranks, lengths, partition, values, stderr=stderr, **facts)
    with (
        Journal(),
        together(ranks),
        Probe(model, loss_fn, data, partition, microbatch, ranks) as probe,
    ):
        u = find_direction(direction, probe)
        reason = None
        for name in names:
            try:
                if probe.shards is not None:
                    run = partial(summarize_sharded, stack_limit=stack_limit, ranks=ranks)
                    summary = _mean_summary(probe, u, run, order, _reporter(progress))
                elif name == "sweep":
                    summary = _within_limit(probe, u, order, _reporter(progress), stack_limit)
                else:
                    probe.recorded = False
                    summary = _mean_summary(probe, u, BACKENDS[name], order, _reporter(progress))
            except CannotDifferentiate as error:
                if name == names[-1]:
                    if backend in AUTO[:-1]:
                        raise CannotDifferentiate(f"{error}. Try backend='auto'.") from error
                    raise
                reason = str(error)
                following = names[names.index(name) + 1]
                warn_user(
                    f"Falling back from {name!r} to {following!r}, because "
                    f"{reason.removeprefix(f'{name}: ')}"
                )
            else:
                parts, summary = summary.parts, replace(summary, reason=reason, parts=())
                if ranks is not None:
                    summary = mean_over_ranks(ranks, summary, u)
                    parts = parts_of_all(ranks, parts, summary) if stderr else ()
                if not stderr:
                    return summary
                if len(parts) == 1:
                    warn_user(
                        "One batch tells no standard errors, so there are none. Give several "
                        "batches, such as a DataLoader, or split this one with microbatch=..."
                    )
                return summary.with_stderr(parts)
    raise AssertionError("unreachable")


def _checked(
    model: nn.Module,
    partition: Partition | Spec,
    order: int,
    backend: str,
    microbatch: int | None,
) -> tuple[Partition, tuple[str, ...]]:
    """Return the partition, and the backends to try."""
    if order not in (1, 2, 3):
        raise ValueError(f"order={order!r}: a summary has order 1, 2 or 3. See derivative_tensor.")
    if backend != "auto" and backend not in BACKENDS:
        raise ValueError(
            f"Unknown backend {backend!r}.{nearest(backend, BACKENDS)} "
            f"Write 'auto' or one of {', '.join(map(repr, BACKENDS))}."
        )
    partition = find_partition(model, partition)
    if any(is_sharded(p) for p in partition.params.values()):
        return partition, _for_sharded(backend, microbatch)
    return partition, AUTO if backend == "auto" else (backend,)


def _for_sharded(backend: str, microbatch: int | None) -> tuple[str, ...]:
    """Return the only backend that takes sharded parameters, or say that there is no other."""
    if backend not in ("auto", "sweep"):
        raise ValueError(
            f"backend={backend!r}, and the model is sharded: only the sweep gathers parameters as "
            f"it needs them. Write backend='auto'."
        )
    if microbatch is not None:
        raise ValueError(
            f"microbatch={microbatch}, and the model is sharded: all ranks need the same number of "
            f"batches. Give smaller batches instead."
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
    _check_order(order)
    partition = find_partition(model, partition)
    refuse_sharded(partition.params, "derivative_tensor")
    with Journal(), Probe(model, loss_fn, data, partition, microbatch) as probe:
        u = find_direction(direction, probe)
        return _mean_tensor(
            probe,
            lambda closure: nested_tensor(closure, Contraction(probe.params, u, partition), order),
        )


def taylor_terms(
    model: nn.Module,
    loss_fn: LossFn,
    data: Any,
    *,
    order: int,
    direction: Direction = "gradient",
    microbatch: int | None = None,
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
    with Journal(), Probe(model, loss_fn, data, partition, microbatch) as probe:
        u = find_direction(direction, probe)
        return _mean_tensor(
            probe,
            lambda closure: nested_taylor_terms(
                closure, Contraction(probe.params, u, partition), order
            ),
        )


def find_partition(model: nn.Module, partition: Partition | Spec) -> Partition:
    """Return a partition of this model, made from a specification if need be."""
    if not isinstance(partition, Partition):
        return make_partition(model, partition)
    live = dict(unwrap(model).named_parameters())
    for name, p in partition.params.items():
        if live.get(name) is not p:
            what = "has no parameter" if name not in live else "has another parameter called"
            raise ValueError(
                f"The partition is of another model: this one {what} {name!r}. "
                f"Make one with make_partition(model, ...)."
            )
        if not p.requires_grad:
            raise ValueError(
                f"Parameter {name!r} is in the partition and has been frozen since. Make the "
                f"partition again, or call requires_grad_(True) on it."
            )
    for name, p in live.items():
        if p.requires_grad and name not in partition.params:
            raise ValueError(
                f"Parameter {name!r} requires a gradient and is in no group of the partition. "
                f"Make the partition again, or freeze the parameter."
            )
    return partition.to()  # the model may have moved since


# Into parts of how many samples a model's batches are split, found once for a loss, a mode, S,
# order and limit. By the loss itself, which is kept so that its id stays its own: two that share
# their code may differ in what they have closed over.
_splits: WeakKeyDictionary[nn.Module, dict[Any, tuple[int | None, Any]]] = WeakKeyDictionary()


def _within_limit(
    probe: Probe,
    u: Params,
    order: int,
    report: Callable[[int, int | None], None],
    stack_limit: int | None,
) -> Summary:
    """Sweep all batches, in parts if the stack of a whole one would be too large."""
    probe.recorded = True
    known = _splits.setdefault(probe.model, {})
    modes = tuple(module.training for module in probe.model.modules())
    key = (id(probe.loss_fn), modes, len(probe.partition), order, stack_limit)
    may_split = probe.microbatch is None
    if may_split and key in known:
        may_split = False
        probe.microbatch, _ = known[key]
    run = partial(summarize_sweep, stack_limit=stack_limit, may_split=may_split)
    try:
        return _mean_summary(probe, u, run, order, report)
    except StackTooLarge as large:
        part = probe.split_to_fit(large.limit / large.needed, large.loss)
        if len(known) >= 16:  # somebody makes a new loss for every measurement
            known.clear()
        known[key] = (part, probe.loss_fn)
    run = partial(summarize_sweep, stack_limit=stack_limit)
    return _mean_summary(probe, u, run, order, report)


def _mean_summary(
    probe: Probe,
    u: Params,
    backend: Callable[..., Summary],
    order: int,
    report: Callable[[int, int | None], None],
) -> Summary:
    """Average the summaries of all batches, weighted by their numbers of samples."""
    summaries, sizes = [], []
    total = probe.num_parts
    done = 0
    report(done, total)
    for done, (closure, size) in enumerate(probe.closures(), start=1):
        summary = backend(closure, probe.params, u, probe.partition, order)
        loss = summary.loss.to(torch.promote_types(summary.loss.dtype, summary.gbar.dtype))
        summaries.append(replace(summary, loss=loss, num_samples=size))
        sizes.append(size)
        report(done, total)
    if total is None:
        report(done, done)
    if not summaries:  # other ranks have data
        return _nothing(probe, order)
    mean = summaries[0] if len(summaries) == 1 else Summary.mean(summaries, sizes)
    return replace(mean, parts=tuple(summaries))


def _nothing(probe: Probe, order: int) -> Summary:
    """Return the summary of no samples: zeros, which count nothing in the mean over ranks."""
    first = next(iter(probe.params.values()))
    zeros = torch.zeros(len(probe.partition), dtype=result_dtype(probe.params), device=first.device)
    return Summary(
        zeros,
        zeros.new_zeros(len(zeros), len(zeros)) if order > 1 else None,
        zeros.clone() if order > 2 else None,
        zeros.new_zeros(()),
        partition=probe.partition,
        backend="no data",
    )


def _mean_tensor(probe: Probe, compute: Callable[[Closure], Tensor]) -> Tensor:
    mean, samples = None, 0
    for closure, size in probe.closures():
        value = compute(closure)
        samples += size
        mean = value if mean is None else torch.lerp(mean, value, size / samples)
    assert mean is not None
    return mean


def _check_order(order: int) -> None:
    if isinstance(order, bool) or not isinstance(order, int) or order < 1:
        raise ValueError(f"order={order!r}: write a whole number, 1 or more.")


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
