"""A loss as a repeatable function of the live parameters that leaves no trace.

Every way to compute derivatives works on a *closure*: a function without arguments that evaluates
the loss of one batch at the present parameters. A probe makes these closures. However often one is
called, it draws the same random numbers (dropout), starts from the same buffers (batch norm) and
modes, and the model is afterwards as it was before.

Hooks on gradients (``Tensor.register_hook``, the backward hooks of modules) are disabled during a
measurement: they see gradients that belong to no training step, and could change the derivatives.
Hooks on the forward pass are part of the model and run as usual. Compiled and checkpointed modules
run as they are written.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from newton_summary.display.warn import warn_user
from newton_summary.errors import CoupledSamplesError, NotFiniteError
from newton_summary.parallel.processes import ALONE, Processes
from newton_summary.partition import Params, Partition, unwrap
from newton_summary.probe.eager import (
    RestingHooks,
    install_switches,
    is_measuring,
    is_recorded,
    refuse_unknown_checkpoints,
    start_measuring,
)
from newton_summary.probe.inputs import (
    MANY,
    NumSamples,
    SampleCount,
    as_batches,
    check_loss_fn,
    check_microbatch,
    explain,
    has_known_length,
    has_length,
    leaves,
    outside_inference_mode,
    take_samples,
)
from newton_summary.probe.inputs import Closure as Closure
from newton_summary.probe.inputs import LossFn as LossFn
from newton_summary.probe.state import (
    Journal,
    ModelState,
    ParameterWatch,
    RandomState,
    TorchState,
    own_generators,
)


class WholeBatchOnly(TorchFunctionMode):
    """While active, a batch norm in training mode is an error: the batch is a part of one."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
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
        microbatch: Split batches into parts of at most this many samples.
        processes: The processes whose data counts together with this one's.
        num_samples: The number of samples in a batch, or a function of the batch that returns it.

    Attributes:
        params: The live parameters by name.
        num_parts: How many (parts of) batches there are; known after the first pass over the data.
        counted: Whether the number of samples is known.
        trusted: Whether the first evaluation showed that the loss does not change parameters.
        losses: Of all (parts of) batches, as they were when the gradient was computed.
        complaint: What was wrong with what the last loss did or returned.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        data: Any,
        partition: Partition,
        microbatch: int | None = None,
        processes: Processes = ALONE,
        num_samples: NumSamples | None = None,
    ):
        check_microbatch(microbatch)
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
        self.num_parts: int | None = None
        self.counted = True
        self._count = SampleCount(num_samples, self.model)
        self.trusted = False
        self.processes = processes
        self.params: Params = partition.params
        self._batches: Iterable[Any] | None = None
        self.losses: list[float] = []
        self.complaint: Exception | None = None
        self._warned: set[str] = set()

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
        journal.undo_later(self._model_state.release)
        self._model_state.rest()

    def __exit__(self, *error: object) -> None:
        """Put everything back, also after an error."""
        self._journal.__exit__(*error)

    # --- the data, as closures --------------------------------------------------------------------

    @property
    def batches(self) -> Iterable[Any]:
        """The batches, read when they are first needed."""
        if self._batches is None:
            self._batches = as_batches(self.data)
            if isinstance(self.data, Iterator):
                self.random.forget()  # reading it may have drawn
        return self._batches

    @property
    def in_one_piece(self) -> bool:
        """Whether all data is one batch, which this process evaluates alone and as a whole."""
        alone = self.processes.count == 1 and not self.processes.sharded
        whole = alone and self.microbatch is None
        return whole and isinstance(self.batches, list) and len(self.batches) == 1

    def closures(self) -> Iterator[tuple[Evaluation, int]]:
        """Yield a closure and a number of samples for every (part of a) batch.

        Every call goes through the same batches, also if they are shuffled or augmented.
        """
        batches = self.batches
        self.random.restore(self._start)
        count = 0
        state = self._start
        several = self.processes.count > 1  # then this one may have no data
        is_list = isinstance(batches, list)  # reading it draws no random numbers
        if not is_list:
            self.random.forget()
        for number, batch in enumerate(self._in_step(batches)):
            if number == MANY and not has_known_length(batches):
                self._warn(
                    f"{MANY:,} batches have been read from data without a length, which may never "
                    "end. Reading on; for 16 batches, pass itertools.islice(data, 16)."
                )
            if any(isinstance(x, Tensor) and x.is_inference() for x in leaves(batch)):
                batch = outside_inference_mode(batch)
            if not is_list:
                self.random.forget()
            size = self._count(batch, number, alone=not several)
            if several and size == 0:
                continue  # the share of a process for which nothing was left
            if size == 0:
                raise ValueError(f"Batch {number} has no samples.")
            self.counted = size is not None
            whole = Evaluation(self, batch, number, self._start, 1 if size is None else size)
            parts = whole.split(self.microbatch)
            if len(parts) > 1 and self.num_parts is None:  # in the first pass over the data
                self._check_parts(whole, parts)
            for part in parts:
                if is_list and count:
                    self.random.jump(state)
                if count or not is_list:
                    state = self.random.capture()
                part.state = state
                yield part, part.size
                if not is_list:  # the next batch must not depend on how much this one has drawn
                    self.random.jump(state)
                count += 1
        if count == 0 and not several:
            raise ValueError(
                "The data is empty: there is no batch to measure. If it is a generator that has "
                "been read before, make a new one."
            )
        self.num_parts = count

    def _in_step(self, batches: Iterable[Any]) -> Iterable[Any]:
        """Yield batches as long as all processes have one, where these must stay in step."""
        return batches

    def gradient(self, some: Iterable[tuple[Evaluation, int]] | None = None) -> Params:
        """Return the gradient of the mean loss over all data, or some, of all processes."""
        leaves = list(self.params.values())
        wide = [torch.promote_types(p.dtype, torch.float32) for p in leaves]
        mean = [torch.zeros_like(p, dtype=dtype) for p, dtype in zip(leaves, wide, strict=True)]
        samples = 0
        self.losses.clear()
        with self.processes.joint():
            for closure, size in self.closures() if some is None else some:
                loss = closure()
                check_finite(loss, closure.place)
                check_depends(loss, self.params)
                self.losses.append(float(loss.detach()))
                grads = torch.autograd.grad(loss, leaves, materialize_grads=True)
                samples += size
                with torch.no_grad():
                    batch_mean = [g.to_dense().to(d) for g, d in zip(grads, wide, strict=True)]
                    torch._foreach_lerp_(mean, batch_mean, size / samples)
        self.processes.average_(mean, samples)
        return {name: g.to(p.dtype) for (name, p), g in zip(self.params.items(), mean, strict=True)}

    def step(self, steps: Params, start: Iterable[Tensor] | None = None) -> None:
        """Subtract steps from the parameters, or from given starting values."""
        with torch.no_grad():
            for (name, p), before in zip(self.params.items(), start or self.params.values()):
                p.copy_(before - steps[name])

    def mean_loss(self, some: Iterable[tuple[Evaluation, int]] | None = None) -> Tensor:
        """Return the mean loss over all data, or some, of all processes, in float64 on the CPU."""
        first = next(iter(self.params.values()))
        total, samples = torch.zeros((), dtype=torch.float64, device=first.device), 0
        with self.processes.joint():
            for closure, size in self.closures() if some is None else some:
                total += size * closure().detach().reshape(()).to(total)
                samples += size
        means, _ = self.processes.mean({"loss": total / max(samples, 1)}, samples)
        loss: Tensor = means["loss"]
        return loss.cpu()

    def compare_loss(self, place: int, loss: Tensor) -> None:
        """Warn if a loss differs from when the gradient was computed."""
        if place >= len(self.losses):
            return
        before, now = self.losses[place], float(loss)
        eps = max(torch.finfo(x.dtype).eps for x in (loss, *self.params.values()))
        if not abs(now - before) <= eps**0.5 * max(abs(now), abs(before)):
            self._warn(
                f"The loss of the same batch was {before:.6g} when the direction was computed and "
                f"{now:.6g} when it was measured, with the same parameters and random numbers: it "
                "depends on something else that changes, such as a counter outside the model. The "
                "direction and the derivatives are those of different losses."
            )

    def _check_parts(self, whole: Evaluation, parts: list[Evaluation]) -> None:
        """Warn if the loss of two neighbouring parts is not the mean of theirs."""
        eps = max(torch.finfo(p.dtype).eps for p in self.params.values())
        if eps > 1e-6:
            return  # half precision: what it rounds away could be a coupling
        before = self.random.capture()
        pairs = zip(parts[::2], parts[1::2])
        with torch.no_grad():
            for both, pair in zip(whole.split(2 * parts[0].size), pairs):
                loss = float(both())
                draws = not self.random.is_at(whole.state)
                mean = sum(part.size / both.size * float(part()) for part in pair)
                if not draws and not abs(mean - loss) <= 100 * eps * abs(loss):
                    self._warn(
                        "The loss of a batch is not the mean over its parts of "
                        f"microbatch={self.microbatch} samples ({loss:.6g} for two parts "
                        f"together, {mean:.6g} on average): it depends on the batch as a whole, "
                        "as a mean over tokens that are not padding does, or is a sum over "
                        "samples. Measuring the mean over the parts; use microbatch=None to "
                        "measure whole batches."
                    )
        self.random.restore(before)

    def _warn(self, message: str) -> None:
        """Warn once in a measurement."""
        kind = message[:40]
        if kind not in self._warned:
            self._warned.add(kind)
            warn_user(message)

    def evaluate(self, evaluation: Evaluation) -> Tensor:
        """Return the loss of a batch at the present parameters."""
        with torch._C.DisableTorchFunction():  # this is nothing to record for a backend
            self.random.restore(evaluation.state)
            self._model_state.restore()
            torch.clear_autocast_cache()  # of an outer autocast: it may hold moved parameters
            recorded = is_recorded()
            known = self.trusted or recorded
            watch = ParameterWatch(self.params, in_detail=not known)
            self.random.forget()
        try:
            with ExitStack() as around:
                around.enter_context(refuse_unknown_checkpoints())
                if not recorded:  # a recorder sees them itself
                    around.enter_context(RestingHooks())
                if evaluation.is_part:
                    around.enter_context(WholeBatchOnly())
                around.enter_context(self._evaluating())
                loss = self.loss_fn(self.model, evaluation.batch)
        except (TypeError, AttributeError) as error:
            clearer = explain(error, self.model, self.data)
            if clearer is None:
                raise
            raise clearer from error
        finally:
            with torch._C.DisableTorchFunction():
                changed = watch.put_back()
        self.trusted = self.trusted or not known
        self.complaint = self._wrong_about(loss, changed, evaluation.number)
        if self.complaint is not None:
            raise self.complaint
        return loss

    def _wrong_about(self, loss: Any, changed: str | None, number: int) -> Exception | None:
        where = f"loss_fn(model, batch) on batch {number}"
        if changed is not None:
            return ValueError(
                f"{where} changed parameter {changed!r} in place. A loss may only read "
                "parameters: move what changes them to the training loop. An embedding with "
                "max_norm changes them too: renormalise its weight in the loop, and set "
                "max_norm=None."
            )
        if not isinstance(loss, Tensor):
            what, how = type(loss).__name__, "."
            if loss is None:
                what, how = "None", ". Does it end with a return statement?"
            elif isinstance(loss, tuple | list | Mapping):
                how = ", and nothing else."
            elif isinstance(loss, int | float):
                how = ", without .item()."
            return TypeError(f"{where} returned {what}: expected the loss as a tensor{how}")
        if loss.numel() != 1:
            return ValueError(
                f"{where} returned a tensor of shape {tuple(loss.shape)}: expected one number, "
                "the mean loss of the batch, for example with .mean()."
            )
        if not loss.dtype.is_floating_point:
            return TypeError(
                f"{where} returned a loss of dtype {loss.dtype}: expected a real floating-point "
                "number."
            )
        if self._has_freed(loss):
            return ValueError(
                f"{where} called backward(), which frees the graph of the loss. Return the loss "
                "without it: measuring takes the derivatives."
            )
        return None

    def _has_freed(self, loss: Tensor) -> bool:
        """Whether the graph of a loss has gone because its function called ``backward``."""
        with torch._C.DisableTorchFunction():
            params = list(self.params.values())
            if all(p.grad is None for p in params) or not loss.requires_grad:
                return False
            try:
                torch.autograd.grad(loss, params, retain_graph=True, allow_unused=True)
            except RuntimeError:
                return True
            return False

    def _evaluating(self) -> AbstractContextManager[None]:
        """Return a context in which the loss is evaluated."""
        return nullcontext()


@dataclass
class Evaluation:
    """The loss of a batch, or of a part of one, as a function of the live parameters."""

    probe: Probe
    batch: Any
    number: int  # of the batch in the data
    state: RandomState.State  # in which it starts
    size: int  # number of samples, for its weight
    is_part: bool = False

    def __call__(self) -> Tensor:
        """Evaluate the loss."""
        return self.probe.evaluate(self)

    @property
    def place(self) -> str:
        """Where the batch is in the data, for messages; empty if it is all of it."""
        return "" if self.probe.in_one_piece else f" on batch {self.number}"

    def split(self, samples: int | None) -> list[Evaluation]:
        """Return parts of at most this many samples; the whole if there is nothing to split."""
        can_be_cut = any(has_length(x) and len(x) == self.size for x in leaves(self.batch))
        if samples is None or self.size <= samples or not can_be_cut:
            return [self]
        cuts = [slice(i, i + samples) for i in range(0, self.size, samples)]
        return [
            replace(
                self,
                batch=take_samples(self.batch, self.size, cut),
                size=len(range(self.size)[cut]),
                is_part=True,
            )
            for cut in cuts
        ]


def check_finite(loss: Tensor, place: str = "") -> None:
    """Raise if the loss of a batch, at a place in the data, is not finite."""
    if not math.isfinite(loss.detach()):
        raise NotFiniteError(
            f"The loss is {float(loss.detach())}{place}, so it has no derivatives. Check for a "
            "division by zero, a logarithm of zero, non-finite data, or diverged parameters."
        )


def check_depends(loss: Tensor, params: Mapping[str, Tensor] | None = None) -> None:
    """Raise if the loss does not depend on any parameter."""
    if not loss.requires_grad or (params is not None and not _reaches(loss, params.values())):
        raise ValueError(
            "The loss does not depend on the parameters through differentiable operations. Does "
            "loss_fn use the model it is given, without .detach(), .item() or torch.no_grad()?"
        )


def _reaches(loss: Tensor, params: Iterable[Tensor]) -> bool:
    """Return whether one of the parameters is a leaf of the graph of the loss."""
    wanted = {id(p) for p in params}
    if loss.grad_fn is None:
        return id(loss) in wanted
    return any(id(getattr(node, "variable", None)) in wanted for node in graph_nodes(loss.grad_fn))


def graph_nodes(root: Any) -> Iterator[Any]:
    """Yield every node of an autograd graph once, starting from a ``grad_fn``."""
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
                "differentiated. Create or load the model outside it."
            )
        if p.is_meta:
            raise ValueError(
                f"Parameter {name!r} is on the meta device and has no values. Create the model on "
                "a real device, or call model.to_empty(device=...) and load its weights."
            )
        if p.is_complex():
            raise ValueError(
                f"Parameter {name!r} is complex ({p.dtype}). Use real parameters, for example "
                "torch.view_as_real of these."
            )
