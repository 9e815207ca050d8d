"""What a step does to every parameter: gradient to direction, direction to update.

The direction of all parameters of one dtype on one device lies end to end in one buffer, so a step
takes few operations, whatever the number of tensors. Nothing here waits for an accelerator: whether
a direction is finite is decided on the device, and one that is not is set to zero, all of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from newton_summary.parallel.processes import is_sharded, like_sharded, local_part, local_rows
from newton_summary.partition import Params, Partition, result_dtype


class Bucket:
    """Parameters of one dtype on one device, and their direction end to end in one buffer.

    Of sharded parameters it holds what this rank has of them.

    Args:
        names: Of the parameters, in the order of the buffer.
        live: The live parameters.
        labels: The group of each parameter, or of each entry of a parameter.
    """

    def __init__(
        self, names: Sequence[str], live: Sequence[Tensor], labels: Sequence[int | Tensor]
    ):
        self.names, self.live = list(names), list(live)
        self.params = [local_part(p) for p in live]
        self.sharded = is_sharded(live[0])  # then all of them are
        self.shapes = [p.shape for p in self.params]
        self.sizes = [p.numel() for p in self.params]
        first = self.params[0]
        self.u = torch.zeros(sum(self.sizes), dtype=first.dtype, device=first.device)
        self.on_cpu = self.u.device.type == "cpu"
        self.views = self.split(self.u)
        self.dtype = torch.promote_types(torch.float32, first.dtype)  # of rates and norms
        self.group_numbers = [label for label in labels if isinstance(label, int)]
        self.divided = len(self.group_numbers) < len(labels)
        self._labels = labels
        self._zero = self.u.new_zeros(())
        self.known_rates: Tensor | None = None  # of the groups, which ``rates`` has

    @cached_property
    def entries(self) -> Tensor:
        """The group of each entry of the buffer; made only where necessary."""
        parts = (torch.as_tensor(x).expand(s) for x, s in zip(self._labels, self.shapes))
        flat = torch.cat([x.reshape(-1).to("cpu", torch.int32) for x in parts])
        return flat.to(self.u.device)

    @cached_property
    def rates(self) -> Tensor:
        """The rate of each entry of the buffer; also made only where necessary."""
        return torch.empty_like(self.u, dtype=self.dtype)

    @cached_property
    def rate_views(self) -> list[Tensor]:
        """The same, one tensor for each parameter."""
        return self.split(self.rates)

    def split(self, flat: Tensor) -> list[Tensor]:
        """Return a buffer as one tensor for each parameter, of its shape."""
        return [x.view(shape) for x, shape in zip(torch.split(flat, self.sizes), self.shapes)]

    def addresses(self) -> list[int]:
        """Return where the parameters are in memory."""
        return [p.data_ptr() for p in self.params]

    def gradients(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return where gradients belong in the buffer, and these; frozen parameters have none."""
        places, grads = [], []
        for p, view, shape, name in zip(self.live, self.views, self.shapes, self.names):
            grad = p.grad
            if not p.requires_grad:  # frozen since
                view.zero_()
            elif grad is not None:
                grad = local_part(grad) if self.sharded else grad
                if grad.shape != shape or grad.layout is not torch.strided:
                    raise ValueError(unfit(name, shape, grad))
                places.append(view)
                grads.append(grad)
        return places, grads

    def advance(self, momenta: Sequence[float]) -> None:
        """Set the direction to momentum u + gradient; a parameter without one has gradient 0.

        Args:
            momenta: Of each group; of all groups, if there is but one.
        """
        places, grads = self.gradients()
        one = len(set(momenta)) == 1
        if one and len(grads) == len(self.live) and self.on_cpu:
            for view, grad in zip(places, grads):  # one pass over memory, not two
                torch.add(grad, view, alpha=momenta[0], out=view)
            return
        if one:
            self.u.mul_(momenta[0])
        else:
            torch._foreach_mul_(self.views, [momenta[s] for s in self.group_numbers])
        if grads:
            torch._foreach_add_(places, grads)

    def zero_unless(self, condition: Tensor | bool) -> None:
        """Set the direction to zero unless the condition holds."""
        if isinstance(condition, Tensor):
            if condition.device != self.u.device:
                condition = condition.to(self.u.device, non_blocking=True)
            torch.where(condition, self.u, self._zero, out=self.u)
        elif not condition:
            self.u.zero_()

    def move(self, rates: Tensor) -> None:
        """Subtract from each parameter its direction times the rate of its group, (S,)."""
        if self.on_cpu and rates.is_cpu and not self.divided:  # one pass, no rate of each entry
            values = rates.tolist()
            for p, view, s in zip(self.params, self.views, self.group_numbers):
                p.sub_(view, alpha=values[s])
            return
        if rates is not self.known_rates:
            there = rates.to(self.u.device, self.dtype, non_blocking=True)
            torch.index_select(there, 0, self.entries, out=self.rates)
            self.known_rates = rates
        self.move_by_rates()

    def move_by_rates(self) -> None:
        """Subtract from each parameter its direction times the rate of each entry."""
        if self.u.dtype == self.dtype:  # one launch
            torch._foreach_addcmul_(self.params, self.views, self.rate_views, value=-1.0)
        else:
            steps = (self.u * self.rates).to(self.u.dtype)
            torch._foreach_sub_(self.params, self.split(steps))


class CapturedStep:
    """A step as a CUDA graph: two launches in place of seven.

    One graph leads from gradients to direction, another one on to the parameters, with the rates
    that the bucket holds.

    Args:
        bucket: All parameters, on the current device, in float32 or wider.
        made: Counts the steps that were made, on the device.
    """

    def __init__(self, bucket: Bucket, made: Tensor):
        self.params, self.addresses = bucket.params, bucket.addresses()
        self.grads = torch.empty_like(bucket.u)
        self.places = bucket.split(self.grads)
        self.momentum, self._known = self.grads.new_zeros(()), 0.0
        self._graphs = [self._capture(bucket, made, moves) for moves in (False, True)]

    def _capture(
        self, bucket: Bucket, made: Tensor, moves: bool
    ) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """Return a graph, and where it leaves the extent of the direction."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            bucket.u.mul_(self.momentum).add_(self.grads)
            extent = _extent(bucket.u)
            finite = _is_finite(extent)
            bucket.zero_unless(finite)
            made += finite
            if moves:
                bucket.move_by_rates()
        return graph, extent

    def launch(self, grads: list[Tensor], momentum: float, moves: bool) -> Tensor:
        """Make a step by the gradients of all parameters; return the extent of the direction."""
        if momentum != self._known:
            self._known = momentum
            self.momentum.fill_(momentum)
        torch._foreach_copy_(self.places, grads)
        graph, extent = self._graphs[moves]
        graph.replay()
        if moves:  # autograd does not see what a graph does
            torch.autograd.graph.increment_version(self.params)
        return extent


class Update:
    """The direction of every parameter, kept from step to step, and the move along it.

    Args:
        partition: The groups, and with them the live parameters.
        state: The state of the optimizer, where ``momentum_buffer`` is kept for each parameter.
        skipped: How many steps were skipped before.
        cuda_graph: Whether steps may be captured, if they can be.

    Attributes:
        direction: By name, as views of the buffers.
    """

    def __init__(
        self,
        partition: Partition,
        state: Mapping[Any, dict[str, Any]],
        skipped: int,
        cuda_graph: bool = False,
    ):
        kinds: dict[Any, list[str]] = {}
        for name, p in partition.params.items():
            kinds.setdefault((p.device, p.dtype, is_sharded(p)), []).append(name)
        self.buckets: list[Bucket] = []
        for names in kinds.values():
            params = [partition.params[name] for name in names]
            labels = [local_rows(partition.labels[name], partition.params[name]) for name in names]
            self.buckets.append(Bucket(names, params, labels))
        self.sharded = any(bucket.sharded for bucket in self.buckets)
        u = {}
        for bucket in self.buckets:
            for name, p, view in zip(bucket.names, bucket.live, bucket.views):
                if "momentum_buffer" in state[p]:
                    view.copy_(local_part(state[p]["momentum_buffer"]))
                state[p]["momentum_buffer"] = u[name] = like_sharded(view, p)
        self.direction: Params = {name: u[name] for name in partition.params}
        devices = [p.device for p in partition.params.values()]
        self.device = next((d for d in devices if d.type != "cpu"), devices[0])
        self.dtype = result_dtype(partition.params)
        self._eta: Tensor | None = None  # the rates that are held, (S,), on the CPU
        self._last: tuple[list[Any], Tensor] | None = None  # lr of each group, and rates
        self._extent = torch.zeros(())  # of the direction, before it is set to zero
        self._made: Tensor | int = 0  # how many of the steps asked for were
        if self.device.type != "cpu":
            self._made = torch.zeros((), dtype=torch.int64, device=self.device)
        self._asked = skipped
        first = self.buckets[0]
        self._capturable = (
            cuda_graph
            and len(self.buckets) == 1
            and first.u.is_cuda
            and first.u.dtype == first.dtype
            and not first.sharded
        )
        self._captured: CapturedStep | None = None

    # --- gradient to direction --------------------------------------------------------------------

    def advance(self, momenta: Sequence[float]) -> None:
        """Set the direction from the present gradients; to zero if it would not be finite.

        Args:
            momenta: Of each group; of all groups, if there is but one.
        """
        if self._capturable and self._launch(momenta, moves=False):
            self._asked += 1
            return
        for bucket in self.buckets:
            bucket.advance(momenta)
        self._extent = self._total(_extent)
        finite = _is_finite(self._extent)
        for bucket in self.buckets:
            bucket.zero_unless(finite)
        self._made += finite
        self._asked += 1

    def _launch(self, momenta: Sequence[float], moves: bool) -> bool:
        """Do the same by a graph, and move if requested; return whether it could be done."""
        bucket = self.buckets[0]
        _, grads = bucket.gradients()
        if len(grads) < len(bucket.live) or len(set(momenta)) > 1 or bucket.known_rates is None:
            return False
        if self._captured is None or self._captured.addresses != bucket.addresses():
            current = bucket.u.get_device() == torch.cuda.current_device()
            if not current or torch.cuda.is_current_stream_capturing():
                return False
            try:
                self._captured = CapturedStep(bucket, torch.as_tensor(self._made))
            except RuntimeError:  # something else that the device was asked for meanwhile
                self._capturable = False
                return False
        self._extent = self._captured.launch(grads, momenta[0], moves)
        return True

    @property
    def usable(self) -> bool:
        """Whether the direction is not zero, as one that was not finite is (waits)."""
        if any(bucket.on_cpu for bucket in self.buckets):
            return bool(self._total(Tensor.any))
        return 0 < self._extent.item() < math.inf

    @property
    def skipped(self) -> int:
        """How many steps were not made because of a gradient that was not finite (waits)."""
        return self._asked - int(self._made)

    def _total(self, of: Callable[[Tensor], Tensor]) -> Tensor:
        """Add up a number of each bucket's direction, over the buckets of all ranks."""
        if len(self.buckets) == 1 and not self.sharded:
            return of(self.buckets[0].u)
        total = torch.zeros((), dtype=self.dtype, device=self.device)
        for bucket in self.buckets:
            if bucket.sharded or not self.sharded or dist.get_rank() == 0:  # else counted already
                total += of(bucket.u).to(total)
        if self.sharded:
            dist.all_reduce(total)
        return total

    # --- direction to update ----------------------------------------------------------------------

    def hold(self, eta: Tensor) -> None:
        """Store the rates of a refresh, (S,), for the following moves."""
        self._eta, self._last = eta, None

    def step(self, momenta: Sequence[float], lrs: Sequence[float | Tensor]) -> None:
        """Advance the direction and move, with nothing in between."""
        last, held = self._last, self.buckets[0].known_rates
        if (
            self._capturable
            and last is not None
            and last[1] is held
            and not _on_device(lrs)
            and last[0] == lrs
            and self._launch(momenta, moves=True)
        ):
            self._asked += 1
            return
        self.advance(momenta)
        self.move(lrs)

    def move(self, lrs: Sequence[float | Tensor]) -> None:
        """Subtract U I_{P:S} (lr eta) from the parameters.

        Nothing moves if u was not finite, or before there are rates.

        Args:
            lrs: The factor on the rates of each group; of all groups, if there is but one.
        """
        if self._eta is None:
            return
        if _on_device(lrs):
            factors = torch.stack([torch.as_tensor(x, device=self.device) for x in lrs])
            rates = self._eta.to(self.device, self.dtype, non_blocking=True) * factors.to(
                self.dtype
            )
        elif self._last is not None and self._last[0] == lrs:
            rates = self._last[1]
        else:
            rates = self._eta * torch.tensor(lrs, dtype=torch.float64)
            self._last = list(lrs), rates
        for bucket in self.buckets:
            bucket.move(rates)


def _on_device(lrs: Sequence[float | Tensor]) -> bool:
    """Return whether one of the numbers is a tensor, which may be on the device."""
    return any(isinstance(lr, Tensor) for lr in lrs)


def _extent(u: Tensor) -> Tensor:
    """Return a number, 0 or more, that is finite if and only if all of a direction is."""
    if u.device.type == "cpu" or not u.numel():  # where a sum is much faster
        return u.to(torch.promote_types(torch.float32, u.dtype)).sum().abs()
    largest: Tensor = torch.linalg.vector_norm(u, math.inf)
    return largest


def _is_finite(number: Tensor) -> Tensor | bool:
    """Return whether such a number is: at once on the CPU, else as a tensor, without waiting."""
    return math.isfinite(number.item()) if number.device.type == "cpu" else number < math.inf


def unfit(name: str, shape: torch.Size, grad: Tensor) -> str:
    """Return why a gradient cannot be used."""
    if grad.layout is not torch.strided:
        return (
            f"The gradient of {name!r} is sparse, which NewtonSummary does not support: use "
            "sparse=False in the embedding."
        )
    return (
        f"Parameter {name!r} has changed shape, from {tuple(shape)} to {tuple(grad.shape)}. Make "
        "a new partition and a new optimizer."
    )
