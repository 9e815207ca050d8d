"""The sweep as a CUDA graph: recorded once on the device, then launched as a whole.

On a small model, most of a sweep's time goes into launching some hundred short kernels from Python.
If the same model is measured repeatedly on batches of the same shape, as in training, the kernels
can be captured once and replayed, with the new batch copied to where the first one was.

The capture holds what the loss did that one time. The caller promises that it does the same each
time: no Python that depends on values, on the step or on random numbers. Checked are dropout and
changing buffers (a batch norm in training), which are not captured.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import ReferenceType, WeakKeyDictionary, WeakMethod, ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils import _pytree as pytree

from newton_summary.derivatives.sweep.engine import (
    Leaves,
    contributions,
    joined,
    prepared,
    totals_at,
    where_in_totals,
    without_autocast,
)
from newton_summary.derivatives.sweep.rules.linear import warn_of_hidden_rows
from newton_summary.derivatives.sweep.tape import Place
from newton_summary.derivatives.sweep.tf32 import convolutions_take_tf32, products_take_tf32
from newton_summary.display.warn import warn_user
from newton_summary.errors import CannotDifferentiate
from newton_summary.partition import Params, Partition, result_dtype
from newton_summary.probe.eager import is_approximate
from newton_summary.probe.inputs import count_samples
from newton_summary.probe.probe import Closure, LossFn, Probe, check_finite
from newton_summary.summary import Summary

WARM_UP = 2  # runs on the capturing stream, in which libraries make their choices
BEFORE_CAPTURE = 3  # measurements without a graph, whose errors are in their own words
MOST_GRAPHS = 4  # of a model: each holds the memory of a sweep
PLAIN = (Tensor, str, bytes, int, float, complex, torch.dtype, torch.device, type(None))


class CannotCapture(Exception):
    """This model or this loss cannot be captured; the message says why."""


class Wanted(NamedTuple):
    """What is to be measured."""

    model: nn.Module
    partition: Partition
    loss_fn: LossFn
    batch: Any
    u: Params | None  # the direction; None for the gradient of the batch
    order: int  # 2 or 3


class SweepGraphs:
    """Graphs of the sweep of one model, one for each loss, partition, order and shape of batch.

    Captures a sweep after the first measurements of its kind, and replays it. Nothing here keeps
    the model or the loss alive.
    """

    def __init__(self) -> None:
        # The graph; before it is captured how often it was asked for, None if it cannot be.
        self._graphs: dict[Any, SweepGraph | int | None] = {}
        self._u: Params = {}  # the direction, where all graphs read it
        self._said: set[str] = set()

    def summarize(self, wanted: Wanted, unfit: str | None = None) -> Summary | None:
        """Return a summary as measured by the sweep; None where there can be no graph.

        Args:
            wanted: What is to be measured.
            unfit: Why it cannot be captured, if that is known.
        """
        try:
            if unfit is not None:
                raise CannotCapture(unfit)
            return self.replay(wanted)
        except CannotCapture as error:
            if str(error) not in self._said:
                warn_user(f"cuda_graph=True has no effect, because {error}.")
            self._said.add(str(error))
            return None

    def replay(self, wanted: Wanted) -> Summary | None:
        """Measure a summary of one batch; None if it is not captured yet, or could not be.

        Raises:
            CannotCapture: If that cannot be captured.
            NotFiniteError: If the loss is not finite.
        """
        self._check(wanted.partition)
        wanted = wanted._replace(u=wanted.u and self._hold(wanted.u))
        key = self._key(wanted)
        graph = self._graphs.get(key, 0)
        if isinstance(graph, int):
            if graph == 0 and len(self._graphs) >= MOST_GRAPHS:
                self._graphs.clear()
            if graph < BEFORE_CAPTURE:
                self._graphs[key] = graph + 1
                return None
            torch.clear_autocast_cache()  # it keeps how parameters were cast
            if wanted.u is None and any(map(_is_held, wanted.partition.params.values())):
                raise CannotCapture(
                    "something keeps the autograd graph of an earlier loss, so the gradient "
                    "cannot be captured: delete that loss (del loss) before one of the calls"
                )
            self._graphs[key] = None
            self._graphs[key] = graph = SweepGraph(wanted)
        return None if graph is None else graph.replay(wanted.batch, wanted.partition)

    def _hold(self, u: Params) -> Params:
        """Copy a direction to tensors with fixed addresses, and return these."""
        if {n: _kind(x) for n, x in u.items()} != {n: _kind(x) for n, x in self._u.items()}:
            self._u = {name: torch.empty_like(x) for name, x in u.items()}
        torch._foreach_copy_(list(self._u.values()), [u[name] for name in self._u])
        return self._u

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the graphs, which cannot be copied and are captured again."""
        return self.__dict__ | {"_graphs": {}, "_u": {}}

    @staticmethod
    def _check(partition: Partition) -> None:
        devices = {p.device for p in partition.params.values()}
        if {d.type for d in devices} != {"cuda"} or len(devices) > 1:
            raise CannotCapture(f"the parameters are on {', '.join(sorted(map(str, devices)))}")
        current = torch.cuda.current_device()  # what runs on another one is not captured
        if devices != {torch.device("cuda", current)}:
            raise CannotCapture(
                f"the parameters are on {devices.pop()} but the current device is cuda:{current}"
            )
        if not all(isinstance(label, int) for label in partition.labels.values()):
            raise CannotCapture("the partition divides tensors")

    @staticmethod
    def _key(wanted: Wanted) -> Any:
        """Return everything that must be the same for a graph to be reused."""
        model, partition, loss_fn, batch, u, order = wanted
        leaves, structure = pytree.tree_flatten(batch)
        odd = next((type(x) for x in leaves if not isinstance(x, PLAIN)), None)
        if odd is not None:  # what is in it may change
            raise CannotCapture(f"the batch holds a {odd.__module__}.{odd.__qualname__}")
        # Also buffers and frozen parameters: a graph reads them where they were at its capture.
        modules = list(model.modules())
        owned = [x for m in modules for own in (m._parameters, m._buffers) for x in own.values()]
        tensors = [x for x in (*owned, *(u or {}).values()) if x is not None]
        given = [*tensors, *(x for x in leaves if isinstance(x, Tensor))]
        if any(x.layout is not torch.strided for x in given):  # its entries may lie elsewhere then
            raise CannotCapture("the batch, a buffer or a parameter is sparse")
        try:
            loss = _weakly(loss_fn)
            hash(loss)
        except TypeError as error:
            raise CannotCapture(f"loss_fn cannot be compared: {error}") from error
        return (
            order,
            partition.names,
            tuple(partition.labels.items()),
            loss,
            repr(structure),  # torch 2.6 cannot hash it
            tuple(_kind(x) if isinstance(x, Tensor) else (type(x), x) for x in leaves),
            tuple((x.data_ptr(), x.stride(), *_kind(x)) for x in tensors),
            tuple(p.requires_grad for p in partition.params.values()),
            tuple(module.training for module in modules),
            torch.is_autocast_enabled("cuda"),
            torch.get_autocast_dtype("cuda"),
            (products_take_tf32(), convolutions_take_tf32()),
        )


_GRAPHS: WeakKeyDictionary[nn.Module, SweepGraphs] = WeakKeyDictionary()


def graphs_of(model: nn.Module) -> SweepGraphs:
    """Return the graphs of a model, which live as long as it does."""
    return _GRAPHS.setdefault(model, SweepGraphs())


def _weakly(loss_fn: LossFn) -> ReferenceType[Any]:
    """Return a weak reference, which equals another one of the same function or method."""
    return WeakMethod(loss_fn) if inspect.ismethod(loss_fn) else ref(loss_fn)


def _kind(x: Tensor) -> tuple[Any, ...]:
    return x.shape, x.dtype, x.device


def _is_held(p: Tensor) -> bool:
    """Whether an autograd graph that ends in a parameter is alive.

    A later one ends in the same node then, which belongs to the stream of the first: on the default
    stream, it cannot be captured.
    """
    notes: Any = get_gradient_edge(p).node.metadata  # of the old node; else of one that dies here
    notes[__name__] = True
    notes = get_gradient_edge(p).node.metadata
    return notes.pop(__name__, False) is True


class SweepGraph:
    """The sweep of one batch, which is copied, and of all others of its shape, to order 2 or 3.

    The direction is in tensors with fixed addresses, or is the gradient of the batch.
    """

    def __init__(self, wanted: Wanted):
        model, partition, loss_fn, batch, u, order = wanted
        self.order = order
        self.samples = count_samples(batch) or 0
        leaves, structure = pytree.tree_flatten(batch)
        if any(isinstance(x, Tensor) and not x.is_cuda for x in leaves):
            raise CannotCapture("a tensor of the batch is not on the GPU")
        self._graph = torch.cuda.CUDAGraph()
        with Probe(model, loss_fn, [batch], partition) as probe:
            self._inputs = [x.detach().clone() if isinstance(x, Tensor) else x for x in leaves]
            held = pytree.tree_unflatten(self._inputs, structure)

            def run() -> tuple[list[Place], Tensor]:
                torch.clear_autocast_cache()  # of parameters: casting them is to be captured too
                given = Leaves(probe.params, u, partition)  # it keeps the gradient that it finds
                return _run(lambda: loss_fn(probe.model, held), given, order)

            try:
                _check_repeatable(probe.model, run)
                stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream), _without_waiting():
                    for _ in range(WARM_UP):
                        run()
                torch.cuda.current_stream().wait_stream(stream)
                with torch.cuda.graph(self._graph):
                    places, self._numbers = run()
            except (CannotDifferentiate, RuntimeError) as error:
                raise CannotCapture(str(error).splitlines()[0]) from error
            finally:
                torch.clear_autocast_cache()  # what was cast while capturing has no numbers yet
            self._approximate = is_approximate()
        self._where = where_in_totals(places, len(partition))

    def replay(self, batch: Any, partition: Partition) -> Summary:
        """Measure a summary of a batch of the same shape."""
        numbers = self._launch(batch)
        loss, hidden = numbers[0], numbers[1]
        check_finite(loss)
        warn_of_hidden_rows([hidden])
        totals = totals_at(self._where, numbers[2:].numpy(), len(partition))
        dtype = result_dtype(partition.params)
        gbar, Hbar, D3 = (torch.from_numpy(x).to(dtype) for x in totals)
        return Summary(
            gbar,
            Hbar,
            D3 if self.order == 3 else None,
            loss=loss.to(dtype),
            num_samples=self.samples,
            partition=partition,
            backend="sweep",
            approximate=self._approximate or bool(hidden),
        )

    def _launch(self, batch: Any) -> Tensor:
        leaves = pytree.tree_leaves(batch)
        for held, new in zip(self._inputs, leaves, strict=True):
            if isinstance(held, Tensor):
                held.copy_(new.detach())
        self._graph.replay()
        return self._numbers.cpu()


def _run(closure: Closure, leaves: Leaves, order: int) -> tuple[list[Place], Tensor]:
    """Sweep without waiting for the device.

    Returns:
        Where the contributions belong; and the loss, whether a mask hides whole rows, and all
        contributions, end to end and in float64.
    """
    tape = prepared(closure, leaves, order)
    if tape.cut is None:
        raise CannotCapture("the loss is linear in the parameters")
    loss, masks = tape.loss.detach().reshape(1), [x for x in tape.hidden if x is not None]
    hidden = torch.stack(masks).any().reshape(1) if masks else torch.zeros_like(loss)
    with without_autocast(loss.device.type):
        _, adjoints = leaves.backward(tape)
        groups = range(len(leaves.partition))
        places, numbers = contributions(tape, adjoints, leaves, order, groups)
    return places, joined([loss, hidden, numbers]).double()


@contextmanager
def _without_waiting() -> Iterator[None]:
    """Raise where something waits for the device.

    Waiting during a capture is an error too, but it leaves torch's random numbers and memory in
    disorder.
    """
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this does not find everything
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _check_repeatable(model: nn.Module, run: Callable[[], Any]) -> None:
    """Raise if a run draws random numbers or changes a buffer, which a replay could not undo."""
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
