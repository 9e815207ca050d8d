"""The sweep as a CUDA graph: recorded once on the device, then launched as a whole.

On a small model a sweep is mostly the cost of launching some hundred short kernels from Python.
A training run measures the same model on batches of the same shape again and again, so the kernels
can be captured once and replayed, with the new batch copied to where the first one was.

What is captured is what the loss did that one time. The caller promises that it does the same each
time: no Python that depends on values, on the step or on random numbers. What can be checked is:
dropout, and buffers that change (a batch norm in training), are not captured.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from newton_summary.derivatives.sweep.engine import (
    Leaves,
    Place,
    contributions,
    joined,
    prepared,
    totals_at,
    where_in_totals,
    without_autocast,
)
from newton_summary.display.warn import warn_user
from newton_summary.errors import CannotDifferentiate
from newton_summary.partition import Params, Partition, result_dtype
from newton_summary.probe.inputs import count_samples
from newton_summary.probe.probe import Closure, LossFn, Probe, check_finite
from newton_summary.summary import Summary

WARM_UP = 2  # runs on the capturing stream, in which libraries make their choices
BEFORE_CAPTURE = 3  # measurements without a graph, whose errors are in their own words
MOST_GRAPHS = 4  # each holds the memory of a sweep


class CannotCapture(Exception):
    """This model or this loss cannot be captured; the message says why."""


class SweepGraphs:
    """Graphs of the sweep of one model, one for each shape of batch.

    Captures the sweep after the first measurements, and replays it.

    Args:
        unfit: Why nothing can be captured, if that is known.
    """

    def __init__(self, unfit: str | None = None):
        self.unfit, self._asked, self._stopped = unfit, 0, False
        self._graphs: dict[Any, SweepGraph] = {}

    def summarize(
        self, partition: Partition, loss_fn: LossFn, batch: Any, u: Params, order: int, ranks: int
    ) -> Summary | None:
        """Return a summary as the sweep measures it; None where that has to be done without."""
        self._asked += 1
        if self._stopped or self._asked <= BEFORE_CAPTURE:
            return None
        try:
            if self.unfit is not None or ranks > 1:
                raise CannotCapture(self.unfit or "there are several ranks")
            return self.replay(partition, loss_fn, batch, u, order)
        except CannotCapture as error:
            self._stopped, self._graphs = True, {}
            warn_user(f"NewtonSummary: cuda_graph=True has no effect, because {error}.")
            return None

    def replay(
        self, partition: Partition, loss_fn: LossFn, batch: Any, u: Params, order: int
    ) -> Summary:
        """Measure a summary of one batch.

        Raises:
            CannotCapture: If that cannot be captured.
            NotFiniteError: If the loss is not finite.
        """
        key = self._key(partition, loss_fn, batch, u)
        graph = self._graphs.get(key)
        if graph is None:
            self._check(partition)
            if len(self._graphs) >= MOST_GRAPHS:
                self._graphs.clear()
            graph = self._graphs[key] = SweepGraph(loss_fn, batch, u, partition, order)
        return graph.replay(batch)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the graphs, which cannot be copied and are captured again."""
        return self.__dict__ | {"_graphs": {}}

    @staticmethod
    def _check(partition: Partition) -> None:
        devices = {p.device for p in partition.params.values()}
        if {d.type for d in devices} != {"cuda"} or len(devices) > 1:
            raise CannotCapture(f"the parameters are on {', '.join(sorted(map(str, devices)))}")
        current = torch.cuda.current_device()  # what runs on another one is not captured
        if devices != {torch.device("cuda", current)}:
            raise CannotCapture(
                f"the parameters are on {devices.pop()} and the current device is cuda:{current}"
            )
        if not all(isinstance(label, int) for label in partition.labels.values()):
            raise CannotCapture("the partition divides tensors")

    @staticmethod
    def _key(partition: Partition, loss_fn: LossFn, batch: Any, u: Params) -> Any:
        """Return all that must be the same for a graph to be used again."""
        leaves, structure = pytree.tree_flatten(batch)
        # Also buffers and frozen parameters: a graph reads them where they were at its capture.
        assert partition.model is not None
        modules = list(partition.model.modules())
        tensors = [x for m in modules for own in (m._parameters, m._buffers) for x in own.values()]
        key = (
            partition,
            loss_fn,
            repr(structure),  # torch 2.6 cannot hash it
            tuple((x.shape, x.dtype, x.device) if isinstance(x, Tensor) else x for x in leaves),
            tuple((x.data_ptr(), x.dtype) for x in (*tensors, *u.values()) if x is not None),
            tuple(p.requires_grad for p in partition.params.values()),
            tuple(module.training for module in modules),
            torch.cuda.is_initialized() and torch.cuda.current_device(),  # type: ignore[no-untyped-call]
            torch.is_autocast_enabled("cuda"),
            torch.get_autocast_dtype("cuda"),
        )
        try:
            hash(key)
        except TypeError as error:
            raise CannotCapture(
                f"loss_fn, or something in the curvature batch, cannot be compared: {error}"
            ) from error
        return key


class SweepGraph:
    """The sweep of one batch, which is copied, and of all others of its shape, to order 2 or 3.

    The direction lies in tensors that stay where they are.
    """

    def __init__(self, loss_fn: LossFn, batch: Any, u: Params, partition: Partition, order: int):
        self.partition, self.order = partition, order
        self.samples = count_samples(batch) or 0
        self._dtype = result_dtype(partition.params)
        leaves, structure = pytree.tree_flatten(batch)
        if any(isinstance(x, Tensor) and not x.is_cuda for x in leaves):
            raise CannotCapture("a tensor of the curvature batch is not on the GPU")
        self._inputs = [x.clone() if isinstance(x, Tensor) else x for x in leaves]
        held = pytree.tree_unflatten(self._inputs, structure)
        self._graph = torch.cuda.CUDAGraph()
        assert partition.model is not None
        with Probe(partition.model, loss_fn, [held], partition) as probe:
            given = Leaves(probe.params, u, partition)

            def run() -> tuple[list[Place], Tensor]:
                return _run(lambda: loss_fn(probe.model, held), given, order)

            try:
                _check_repeatable(probe.model, run)
                stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    for _ in range(WARM_UP):
                        run()
                torch.cuda.current_stream().wait_stream(stream)
                with torch.cuda.graph(self._graph):
                    places, self._numbers = run()
            except (CannotDifferentiate, RuntimeError) as error:
                raise CannotCapture(str(error).splitlines()[0]) from error
        self._where = where_in_totals(places, len(partition))

    def replay(self, batch: Any) -> Summary:
        """Measure a summary of a batch of the same shape."""
        leaves = pytree.tree_leaves(batch)
        for held, new in zip(self._inputs, leaves, strict=True):
            if isinstance(held, Tensor):
                held.copy_(new)
        self._graph.replay()
        numbers = self._numbers.cpu()
        loss = numbers[0]
        check_finite(loss)
        totals = totals_at(self._where, numbers[1:].numpy(), len(self.partition))
        gbar, Hbar, D3 = (torch.from_numpy(x).to(self._dtype) for x in totals)
        return Summary(
            gbar,
            Hbar,
            D3 if self.order == 3 else None,
            loss=loss.to(self._dtype),
            num_samples=self.samples,
            partition=self.partition,
            backend="sweep",
        )


def _run(closure: Closure, leaves: Leaves, order: int) -> tuple[list[Place], Tensor]:
    """Sweep without waiting for the device.

    Returns:
        The loss and all contributions end to end, in float64, and where the latter belong.
    """
    tape = prepared(closure, leaves, order)
    if tape.cut is None:
        raise CannotCapture("the loss is linear in the parameters")
    with without_autocast(tape.loss.device.type):
        _, adjoints = leaves.backward(tape)
        groups = range(len(leaves.partition))
        places, numbers = contributions(tape, adjoints, leaves, order, groups)
    return places, joined([tape.loss.detach().reshape(1), numbers]).double()


def _check_repeatable(model: nn.Module, run: Callable[[], Any]) -> None:
    """Raise if a run draws random numbers or changes a buffer: a replay could not put that back."""
    random = torch.cuda.get_rng_state(), torch.get_rng_state()
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    run()
    if not all(
        torch.equal(*pair)
        for pair in zip(random, (torch.cuda.get_rng_state(), torch.get_rng_state()))
    ):
        raise CannotCapture("the loss draws random numbers, as dropout does")
    for name, buffer in model.named_buffers():
        if name not in buffers or not torch.equal(buffer, buffers[name]):
            raise CannotCapture(f"the loss changes the buffer {name!r}, as a batch norm does")
