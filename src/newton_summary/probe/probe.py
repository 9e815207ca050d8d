"""A loss as a repeatable function of the live parameters that leaves no trace.

Every way to compute derivatives works on a *closure*: a function without arguments that evaluates
the loss of one batch at the present parameters. A probe makes these closures. However often one is
called, it draws the same random numbers (dropout), starts from the same buffers (batch norm) and
modes, and the model is afterwards as it was before.

Hooks on gradients (``Tensor.register_hook``, the backward hooks of modules) rest during a
measurement: they see gradients that belong to no training step, and could change the derivatives.
Hooks on the forward pass are a part of the model and run as ever. Compiled modules, and those in
checkpoints, run as they are written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import TracebackType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from newton_summary.errors import CoupledSamplesError, NotFiniteError
from newton_summary.parallel.processes import ALONE, Processes
from newton_summary.partition import Params, Partition, unwrap
from newton_summary.probe.eager import RestingHooks, install_switches, refuse_unknown_checkpoints
from newton_summary.probe.inputs import LossFn as LossFn
from newton_summary.probe.inputs import (
    as_batches,
    check_loss_fn,
    count_samples,
    explain,
    outside_inference_mode,
    take_samples,
)
from newton_summary.probe.state import (
    ModelState,
    ParameterWatch,
    RandomState,
    TorchState,
    own_generators,
)
from newton_summary.probe.undo import Journal, is_measuring, start_measuring

Closure = Callable[[], Tensor]


class WholeBatchOnly(TorchFunctionMode):
    """While active, a batch norm in training mode is an error: the batch is a part of one."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        in_training = args[5] if len(args) > 5 else kwargs.get("training", False)
        if func in (F.batch_norm, torch.batch_norm) and in_training and is_measuring():
            raise CoupledSamplesError()
        return func(*args, **kwargs)


class Probe:
    """The loss of a model on some data, batch by batch, without a trace.

    Args:
        model: The model; wrappers of data parallelism are looked through.
        loss_fn: ``loss_fn(model, batch)`` gives the mean loss of a batch.
        data: One batch, or an iterable of batches.
        partition: The groups, and with them the parameters.
        microbatch: Split batches into parts of at most so many samples.
        processes: The processes whose data counts together with this one's.

    Attributes:
        params: The live parameters by name.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        data: Any,
        partition: Partition,
        microbatch: int | None = None,
        processes: Processes = ALONE,
    ):
        if microbatch is not None and not (isinstance(microbatch, int) and microbatch >= 1):
            raise ValueError(f"microbatch={microbatch}: write a number of samples, 1 or more.")
        check_loss_fn(loss_fn)
        _check_differentiable(partition.params)
        self.model = unwrap(model)
        self.loss_fn = loss_fn
        self.partition = partition
        self.microbatch = microbatch
        self.data = data
        self.random = RandomState(
            (p.device for p in partition.params.values()), own_generators(data)
        )
        self.num_parts: int | None = None  # known after the first pass over the data
        self._params_checked = False
        self.processes = processes
        self.params: Params = partition.params
        self._batches: Iterable[Any] | None = None  # read when they are first needed
        self.recorded = False  # whether a recorder sees to it that the parameters do not change

    # --- leaving no trace -------------------------------------------------------------------------

    def __enter__(self) -> Probe:
        """Remember everything that an evaluation may change."""
        self._journal = Journal().__enter__()
        try:
            self._prepare(self._journal)
        except BaseException:
            self._journal.__exit__(None, None, None)
            raise
        return self

    def _prepare(self, journal: Journal) -> None:
        torch_state = TorchState(self.random.devices)
        journal.undo_later(torch_state.restore)
        start_measuring(journal, alone=self.processes.count == 1)
        inference: Any = torch._C._InferenceMode(False)
        journal.undo_later(lambda: inference.__exit__(None, None, None))
        inference.__enter__()
        torch_state.prepare()
        install_switches()
        self._start = self.random.capture()
        journal.undo_later(lambda: self.random.restore(self._start, anew=True))
        self._model_state = ModelState(self.model)
        journal.undo_later(self._release)
        self._model_state.rest()

    def _release(self) -> None:
        with torch._C.DisableTorchFunction():
            self._model_state.release()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Put everything back, also after an error."""
        self._journal.__exit__(kind, error, trace)

    # --- the data, as closures --------------------------------------------------------------------

    def closures(self) -> Iterator[tuple[Closure, int]]:
        """Give a closure and a number of samples for every (part of a) batch.

        Every call goes through the same batches, also if they are shuffled or augmented.
        """
        if self._batches is None:
            self._batches = as_batches(self.data)
            self.random.forget()  # reading the data may have drawn
        self.random.restore(self._start)
        count = 0
        state = self._start
        several = self.processes.count > 1  # then this one may have no data
        is_list = isinstance(self._batches, list)  # reading it draws no random numbers
        if not is_list:
            self.random.forget()
        for number, batch in enumerate(self._in_step(self._batches)):
            batch = outside_inference_mode(batch)
            if not is_list:
                self.random.forget()
            if several and count_samples(batch) == 0:
                continue  # the share of a process for which nothing was left
            for part in self._parts(batch):
                if is_list and count:
                    self.random.jump(state)
                if count or not is_list:
                    state = self.random.capture()
                self._last = number, batch, state
                yield self._closure(part, number, part is not batch, state), count_samples(part)
                if not is_list:  # the next batch must not depend on how much this one has drawn
                    self.random.jump(state)
                count += 1
        if count == 0 and not several:
            raise ValueError("The data is empty: it gave no batch to measure.")
        self.num_parts = count

    def _in_step(self, batches: Iterable[Any]) -> Iterable[Any]:
        """Give batches as long as all processes have one, where these have to be in step."""
        return batches

    def gradient(self) -> Params:
        """Return the gradient of the mean loss over all data, of all processes."""
        leaves = list(self.params.values())
        wide = [torch.promote_types(p.dtype, torch.float32) for p in leaves]
        mean = [torch.zeros_like(p, dtype=dtype) for p, dtype in zip(leaves, wide, strict=True)]
        samples = 0
        with self.processes.joint():
            for closure, size in self.closures():
                loss = closure()
                check_finite(loss)
                check_depends(loss, self.params)
                grads = torch.autograd.grad(loss, leaves, materialize_grads=True)
                samples += size
                with torch.no_grad():
                    batch_mean = [g.to_dense().to(d) for g, d in zip(grads, wide, strict=True)]
                    torch._foreach_lerp_(mean, batch_mean, size / samples)
        self.processes.average_(mean, samples)
        return {name: g.to(p.dtype) for (name, p), g in zip(self.params.items(), mean, strict=True)}

    def mean_loss(self) -> Tensor:
        """Return the mean loss over all data, of all processes, in float64 on the CPU."""
        first = next(iter(self.params.values()))
        total, samples = torch.zeros((), dtype=torch.float64, device=first.device), 0
        with self.processes.joint():
            for closure, size in self.closures():
                total += size * closure().detach().reshape(()).to(total)
                samples += size
        means, _ = self.processes.mean({"loss": total / max(samples, 1)}, samples)
        loss: Tensor = means["loss"]
        return loss.cpu()

    def parts_that_fit(self, fraction: float, loss: Tensor) -> list[tuple[Closure, int]]:
        """Return the last batch in equal parts, each at most a fraction of it, as closures.

        The batch stays whole where it may not be split: see :meth:`may_split`.

        Args:
            fraction: The largest part.
            loss: Of the whole batch.
        """
        number, batch, state = self._last
        size = count_samples(batch)
        parts = -(-size // max(1, int(size * fraction)))
        self.microbatch = -(-size // parts)
        split = list(self._parts(batch)) if self.may_split(loss) else [batch]
        self.microbatch = None
        return [
            (self._closure(part, number, part is not batch, state), count_samples(part))
            for part in split
        ]

    def may_split(self, loss: Tensor) -> bool:
        """Return whether the last batch may be split into parts of ``microbatch`` samples.

        It may if the mean loss of the parts is the loss of the whole: not for a batch norm in
        training, a contrastive loss, or dropout, whose draws would change.
        """
        _, batch, state = self._last
        size = count_samples(batch)
        total = torch.zeros_like(loss, dtype=torch.float64)
        try:
            with torch.no_grad(), WholeBatchOnly():
                for part in self._parts(batch):
                    self.random.restore(state)
                    self.random.forget()
                    self._model_state.restore()
                    part_loss = self.loss_fn(self.model, part).detach().reshape(())
                    total += part_loss * (count_samples(part) / size)
        except CoupledSamplesError:
            return False
        # Equal but for rounding; what half precision rounds away could be a coupling.
        precise = torch.finfo(loss.dtype).bits >= 32
        tolerance = 100 * torch.finfo(loss.dtype).eps * max(abs(float(loss)), 1e-6)
        return precise and abs(float(total) - float(loss)) <= tolerance

    def _parts(self, batch: Any) -> Iterator[Any]:
        size = count_samples(batch)
        if self.microbatch is None or size <= self.microbatch:
            yield batch
            return
        for start in range(0, size, self.microbatch):
            yield take_samples(batch, size, slice(start, start + self.microbatch))

    def _closure(self, batch: Any, number: int, is_part: bool, state: RandomState.State) -> Closure:
        def closure() -> Tensor:
            with torch._C.DisableTorchFunction():  # this is nothing to record for a backend
                self.random.restore(state)
                self._model_state.restore()
                torch.clear_autocast_cache()  # of an outer autocast: it may hold moved parameters
                known = self._params_checked or self.recorded
                watch = ParameterWatch(self.params, in_detail=not known)
                self.random.forget()
            try:
                with ExitStack() as around:
                    around.enter_context(refuse_unknown_checkpoints())
                    if not self.recorded:  # a recorder sees them itself
                        around.enter_context(RestingHooks())
                    if is_part:
                        around.enter_context(WholeBatchOnly())
                    around.enter_context(self._evaluating())
                    loss = self.loss_fn(self.model, batch)
            except TypeError as error:
                clearer = explain(error, self.model, self.data)
                if clearer is None:
                    raise
                raise clearer from error
            finally:
                with torch._C.DisableTorchFunction():
                    changed = watch.put_back()
            self._params_checked = self._params_checked or not known
            if changed is not None:
                raise ValueError(
                    f"loss_fn(model, batch) on batch {number} changed parameter {changed!r} in "
                    f"place. A loss only reads them; what changes them belongs in the training "
                    f"loop."
                )
            self._check(loss, number)
            return loss

        return closure

    @staticmethod
    def _check(loss: Any, number: int) -> None:
        where = f"loss_fn(model, batch) on batch {number}"
        if not isinstance(loss, Tensor):
            raise TypeError(f"{where} returned {type(loss).__name__}: return a tensor, the loss.")
        if loss.numel() != 1:
            raise ValueError(
                f"{where} returned a tensor of shape {tuple(loss.shape)}: return one number, the "
                f"mean loss of the batch, for example with .mean()."
            )
        if not loss.dtype.is_floating_point:
            raise TypeError(f"{where} returned a loss of dtype {loss.dtype}: it has to be real.")

    def _evaluating(self) -> AbstractContextManager[None]:
        """Return a context in which the loss is evaluated."""
        return nullcontext()


def check_finite(loss: Tensor) -> None:
    """Raise if the loss is not finite."""
    if not bool(torch.isfinite(loss.detach())):
        raise NotFiniteError(
            f"The loss is {float(loss.detach())}, so it has no derivatives. Look for a division by "
            f"zero, a logarithm of zero, or parameters that have diverged."
        )


def check_depends(loss: Tensor, params: Mapping[str, Tensor] | None = None) -> None:
    """Raise if the loss does not depend on any parameter."""
    if not loss.requires_grad or (params is not None and not _reaches(loss, params.values())):
        raise ValueError(
            "The loss does not depend on the parameters through operations that can be "
            "differentiated. Does loss_fn use the model it is given, without .detach(), .item() "
            "or torch.no_grad()?"
        )


def _reaches(loss: Tensor, params: Iterable[Tensor]) -> bool:
    """Return whether one of the parameters is a leaf of the graph of the loss."""
    wanted = {id(p) for p in params}
    if loss.grad_fn is None:
        return id(loss) in wanted
    nodes = graph_nodes(loss.grad_fn)
    return any(id(getattr(node, "variable", None)) in wanted for node in nodes)


def graph_nodes(root: Any) -> Iterator[Any]:
    """Give every node of an autograd graph once, starting from a ``grad_fn``."""
    seen = {root}
    stack = [root]
    while stack:
        node = stack.pop()
        yield node
        for child, _ in node.next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                stack.append(child)


def _check_differentiable(params: Mapping[str, Tensor]) -> None:
    for name, p in params.items():
        if p.is_inference():
            raise ValueError(
                f"Parameter {name!r} was made under torch.inference_mode(), so it cannot be "
                f"differentiated. Make or load the model outside of it."
            )
        if p.is_complex():
            raise ValueError(
                f"Parameter {name!r} is complex ({p.dtype}). Measure a model of real parameters, "
                f"for example their torch.view_as_real."
            )
