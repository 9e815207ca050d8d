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

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from newton_summary.parallel.processes import is_sharded, like_sharded, local_part, local_rows
from newton_summary.partition import Params, Partition, result_dtype

Factors = Tensor | list[float]
_unflatten: Callable[..., tuple[Tensor, ...]] = torch._utils._unflatten_dense_tensors


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
        self.views = self.split(self.u)
        self.dtype = torch.promote_types(torch.float32, first.dtype)  # of rates and norms
        self.group_numbers = [label for label in labels if isinstance(label, int)]
        self.divided = len(self.group_numbers) < len(labels)
        self._labels = labels
        self._zero = self.u.new_zeros(())
        if not self.divided:
            self.groups = torch.tensor(self.group_numbers, device=first.device)

    @cached_property
    def entries(self) -> Tensor:
        """The group of each entry of the buffer; made where there is no other way."""
        parts = (torch.as_tensor(x).expand(s) for x, s in zip(self._labels, self.shapes))
        flat = torch.cat([x.reshape(-1).to("cpu", torch.int32) for x in parts])
        return flat.to(self.u.device)

    def split(self, flat: Tensor) -> list[Tensor]:
        """Return a buffer as one tensor for each parameter, of its shape."""
        return [x.view(shape) for x, shape in zip(torch.split(flat, self.sizes), self.shapes)]

    def add_gradient(self) -> None:
        """Add the gradients to the direction; a parameter without one has gradient 0."""
        grads, places = [], []
        for i, p in enumerate(self.live):
            grad = p.grad
            if not p.requires_grad:  # frozen since
                self.views[i].zero_()
            elif grad is not None:
                grad = local_part(grad) if self.sharded else grad
                if grad.shape != self.shapes[i] or grad.layout is not torch.strided:
                    raise ValueError(_unfit(self.names[i], self.shapes[i], grad))
                grads.append(grad)
                places.append(self.views[i])
        if grads:
            torch._foreach_add_(places, grads)

    def norms(self) -> Tensor:
        """Return the norm of each tensor's direction."""
        return torch.stack(torch._foreach_norm(self.views, 2, self.dtype))

    def add_squares(self, total: Tensor) -> None:
        """Add the square of the norm of each group's direction, of what is here, to (S,)."""
        squares = self.u.to(self.dtype) if self.divided else self.norms()
        groups = self.entries if self.divided else self.groups
        total.index_add_(0, groups.to(total.device), squares.square().to(total))

    def add_weight_squares(self, total: Tensor) -> None:
        """Add the square of the norm of each group's weights, of what is here, to (S,).

        Weights are tensors of two or more dimensions.
        """
        weights = [i for i, shape in enumerate(self.shapes) if len(shape) >= 2]
        if not weights:
            return
        values = [self.params[i].detach() for i in weights]
        if self.divided:
            groups = torch.cat([self.split(self.entries)[i].reshape(-1) for i in weights])
            squares = torch.cat([x.reshape(-1).to(self.dtype) for x in values]).square()
        else:
            groups = self.groups[torch.tensor(weights, device=self.groups.device)]
            squares = torch.stack(torch._foreach_norm(values, 2, self.dtype)).square()
        total.index_add_(0, groups.to(total.device), squares.to(total))

    def zero_unless(self, condition: Tensor | bool) -> None:
        """Set the direction to zero unless the condition holds."""
        if isinstance(condition, Tensor):
            condition = condition.to(self.u.device, non_blocking=True)
            torch.where(condition, self.u, self._zero, out=self.u)
        elif not condition:
            self.u.zero_()

    def move(self, rates: Tensor | list[float]) -> None:
        """Subtract from each parameter its direction times the rate of its group, (S,)."""
        if isinstance(rates, list):
            factors = [rates[s] for s in self.group_numbers]
            torch._foreach_sub_(self.params, torch._foreach_mul(self.views, factors))
            return
        rates = rates.to(self.u.device, self.dtype, non_blocking=True)
        steps = (self.u * rates.index_select(0, self.entries)).to(self.u.dtype)
        torch._foreach_sub_(self.params, _unflatten(steps, self.params))


class Motion:
    """The direction of every parameter, kept from step to step, and the move along it.

    Args:
        partition: The groups, and with them the live parameters.
        given: An optimizer whose step is the direction of the parameters that it holds. The others
            have u <- momentum u + gradient, as in Algorithm 2.
        state: The state of the optimizer, where ``momentum_buffer`` is kept for each parameter.
        with_norms: Whether groups move by lengths, which takes the norm of each one's direction at
            every step, or by multiples of the direction.
        skipped: How many steps were not made before.
    """

    def __init__(
        self,
        partition: Partition,
        given: Optimizer | None,
        state: Mapping[Any, dict[str, Any]],
        with_norms: bool,
        skipped: int,
    ):
        self.partition, self.given, self.with_norms = partition, given, with_norms
        held = set() if given is None else {id(p) for p in _params_of(given)}
        kinds: dict[Any, list[str]] = {}
        for name, p in partition.params.items():
            kinds.setdefault((id(p) in held, p.device, p.dtype, is_sharded(p)), []).append(name)
        self.heavy_ball: list[Bucket] = []
        self.stepped: list[Bucket] = []  # those that the given optimizer moves
        for (is_held, *_), names in kinds.items():
            params = [partition.params[name] for name in names]
            labels = [local_rows(partition.labels[name], partition.params[name]) for name in names]
            bucket = Bucket(names, params, labels)
            (self.stepped if is_held else self.heavy_ball).append(bucket)
        self.buckets = self.heavy_ball + self.stepped
        for bucket in self.heavy_ball:
            for p, view in zip(bucket.live, bucket.views):
                if "momentum_buffer" in state[p]:
                    view.copy_(local_part(state[p]["momentum_buffer"]))
                state[p]["momentum_buffer"] = like_sharded(view, p)
        devices = [p.device for p in partition.params.values()]
        self.device = next((d for d in devices if d.type != "cpu"), devices[0])
        self.dtype = result_dtype(partition.params)
        self._all_groups = list(range(len(partition)))
        self.norms = torch.zeros(len(partition), dtype=self.dtype, device=self.device)
        self._least_norms: Tensor | None = None
        self.finite: Tensor | bool = True  # whether the last direction was
        self.made: Tensor | int = 0  # how many of those asked for were
        self.asked = skipped

    # --- gradient to direction --------------------------------------------------------------------

    def direct(self, momentum: float) -> None:
        """Set the direction from the present gradients; to zero if it would not be finite."""
        for bucket in self.heavy_ball:
            bucket.u.mul_(momentum)
            bucket.add_gradient()
        shown = True if self.given is None else self._step_given(self.given)
        self.finite = self._look() & shown
        for bucket in self.buckets:
            bucket.zero_unless(self.finite)
        self.made = self.made + self.finite
        self.asked += 1

    def _look(self) -> Tensor | bool:
        """Return whether the direction is finite, and keep its norms if they are wanted."""
        if not self.with_norms:
            return self._all_finite(self.buckets)
        self.norms = self.measured_norms()
        finite = _is_finite(self.norms.sum())
        self.norms.nan_to_num_(math.inf, math.inf)  # a rate is then zero, and not nan
        return finite

    def _step_given(self, given: Optimizer) -> Tensor | bool:
        """Let the given optimizer step, put the parameters back: u is what it subtracted.

        It is shown a gradient of zero where the real one is not finite: that would spoil its state
        for ever.

        Returns:
            Whether it was shown the real gradient.
        """
        params = [p for bucket in self.stepped for p in bucket.params]
        live = [p for bucket in self.stepped for p in bucket.live]
        grads = [p.grad for p in live]
        before = [p.detach().clone() for p in params]
        views = [view for bucket in self.stepped for view in bucket.views]
        for bucket in self.stepped:
            bucket.u.zero_()
            bucket.add_gradient()
        finite = self._all_finite(self.stepped)
        for bucket in self.stepped:
            bucket.zero_unless(finite)
        try:
            for p, view in zip(live, views):
                wanted = p.grad is not None and p.requires_grad
                p.grad = like_sharded(view, p) if wanted else None
            given.step()
            torch._foreach_copy_(views, torch._foreach_sub(before, params))
        finally:
            torch._foreach_copy_(params, before)
            for p, grad in zip(live, grads):
                p.grad = grad
        return finite

    def _all_finite(self, buckets: Sequence[Bucket]) -> Tensor | bool:
        """Return whether all directions are finite."""
        sums = [bucket.u.sum(dtype=bucket.dtype) for bucket in buckets]
        if len(sums) > 1:
            sums = [torch.stack([x.to(self.device, self.dtype) for x in sums]).sum()]
        return _is_finite(sums[0])

    def measured_norms(self) -> Tensor:
        """Return ||U^s|| of the present direction, (S,)."""
        if len(self.buckets) == 1 and self.buckets[0].group_numbers == self._all_groups:
            return self.buckets[0].norms()  # each tensor is a group
        return self._root_of_sums(Bucket.add_squares)

    def weight_norms(self) -> Tensor:
        """Return the norm of the weights of each group, (S,): tensors of two dimensions or more."""
        return self._root_of_sums(Bucket.add_weight_squares)

    def _root_of_sums(self, add: Callable[[Bucket, Tensor], None]) -> Tensor:
        """Return the root of what all buckets add to the groups, (S,)."""
        total = torch.zeros(len(self.partition), dtype=self.dtype, device=self.device)
        for bucket in self.buckets:
            add(bucket, total)
        return total.sqrt_()

    @property
    def moves(self) -> bool:
        """Whether the present direction is not zero (waits)."""
        return bool(self.measured_norms().any())

    def direction(self) -> Params:
        """Return the present direction by name, as views."""
        u = {n: view for b in self.buckets for n, view in zip(b.names, b.views)}
        return {name: like_sharded(u[name], p) for name, p in self.partition.params.items()}

    # --- direction to update ----------------------------------------------------------------------

    @property
    def takes_numbers(self) -> bool:
        """Whether :meth:`move` likes its factors best as plain numbers, or on the device."""
        return not self.with_norms and not any(bucket.divided for bucket in self.buckets)

    def put(self, values: Tensor) -> Tensor:
        """Copy a vector from the CPU to the device without waiting."""
        values = values.to(self.dtype)
        if self.device.type == "cuda":
            values = values.pin_memory()
        return values.to(self.device, non_blocking=True)

    def hold(self, norms: Tensor) -> None:
        """Make rates no larger than for directions of these norms, (S,), whatever the lengths.

        A direction that is shorter than at the refresh has less to say, and then moves by less.
        """
        self._least_norms = self.put(norms).clamp_min(_least(self.dtype))

    def rates(self, factors: Factors) -> Factors:
        """Return what ``u`` is multiplied with, (S,), from rates or from step lengths.

        Finite also where the direction is zero.
        """
        if not self.with_norms:
            return factors
        lengths = factors if isinstance(factors, Tensor) else self.put(as_vector(factors))
        if self._least_norms is None:
            return lengths / self.norms.clamp_min(_least(self.dtype))
        return lengths / torch.maximum(self.norms, self._least_norms)

    def move(self, factors: Factors) -> None:
        """Subtract U I_{P:S} rates from the parameters; nothing if u was not finite."""
        rates = self.rates(factors)
        for bucket in self.buckets:
            bucket.move(rates)

    def try_move(self, factors: Factors, evaluate: Callable[[], Tensor]) -> Tensor:
        """Return what ``evaluate`` gives after a move; the parameters are then as before."""
        params = [p for bucket in self.buckets for p in bucket.params]
        before = [p.detach().clone() for p in params]
        try:
            self.move(factors)
            return evaluate()
        finally:
            for p, old in zip(params, before):
                p.copy_(old)

    @property
    def skipped(self) -> int:
        """How many steps were not made because of a gradient that was not finite (waits)."""
        return self.asked - int(self.made)


class HostMotion(Motion):
    """The same for groups of whole tensors on the CPU, where nothing is gained by not looking.

    Norms and rates are plain numbers here. For small models a step is mostly the cost of calling
    operations: with lengths, LeNet's takes 85 microseconds in this way and 140 in the other.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._parts = [
            (p, view, view.view(-1).numpy(), s)
            for bucket in self.buckets
            for p, view, s in zip(bucket.params, bucket.views, bucket.group_numbers)
        ]
        self._norms = [0.0] * len(self.partition)
        self._least = [_least(self.dtype)] * len(self.partition)

    @staticmethod
    def suits(partition: Partition) -> bool:
        """Return whether all tensors are whole, on the CPU, and of a type that numpy knows."""
        return all(isinstance(label, int) for label in partition.labels.values()) and all(
            p.device.type == "cpu" and p.dtype in (torch.float32, torch.float64)
            for p in partition.params.values()
        )

    def _look(self) -> Tensor | bool:
        if not self.with_norms:
            return self._all_finite(self.buckets)
        squares = [0.0] * len(self._norms)
        for _, _, vector, s in self._parts:
            squares[s] += float(np.dot(vector, vector))
        finite = math.isfinite(sum(squares))
        self._norms = [math.sqrt(x) for x in squares] if finite else [0.0] * len(squares)
        return finite

    @property
    def takes_numbers(self) -> bool:
        """Plain numbers are what everything here is made of."""
        return True

    def hold(self, norms: Tensor) -> None:
        """Make rates no larger than for directions of these norms, (S,), whatever the lengths."""
        self._least = [max(n, _least(self.dtype)) for n in norms.tolist()]

    def rates(self, factors: Factors) -> list[float]:
        """Return what ``u`` is multiplied with, (S,), from rates or from step lengths."""
        values: list[float] = factors.tolist() if isinstance(factors, Tensor) else factors
        if not self.with_norms:
            return values
        return [x / max(n, least) for x, n, least in zip(values, self._norms, self._least)]

    def move(self, factors: Factors) -> None:
        """Subtract U I_{P:S} rates from the parameters; nothing if u was not finite."""
        rates = self.rates(factors)
        for p, view, _, s in self._parts:
            p.add_(view, alpha=-rates[s])


class ShardedMotion(Motion):
    """The same for parameters that FSDP2 has divided among ranks, each of which moves its part.

    The norms of all groups, or whether a direction is finite, are a sum over ranks: one message at
    every step, of S numbers or of one.
    """

    def _all_finite(self, buckets: Sequence[Bucket]) -> Tensor | bool:
        mine = torch.stack([b.u.abs().sum(dtype=self.dtype).to(self.device) for b in buckets])
        return _is_finite(_sum_over_ranks(mine.sum().reshape(1)).sum())

    def measured_norms(self) -> Tensor:
        """Return ||U^s|| of the present direction on all ranks, (S,)."""
        return self._root_of_sums(Bucket.add_squares)

    def _root_of_sums(self, add: Callable[[Bucket, Tensor], None]) -> Tensor:
        """Return the root of what the buckets of all ranks add to the groups, (S,)."""
        total = torch.zeros(len(self.partition), dtype=self.dtype, device=self.device)
        for bucket in self.buckets:
            if bucket.sharded or dist.get_rank() == 0:  # others are the same on all ranks
                add(bucket, total)
        return _sum_over_ranks(total).sqrt_()


def _sum_over_ranks(numbers: Tensor) -> Tensor:
    dist.all_reduce(numbers)
    return numbers


def make_motion(
    partition: Partition,
    given: Optimizer | None,
    state: Mapping[Any, dict[str, Any]],
    with_norms: bool,
    skipped: int,
) -> Motion:
    """Return the motion that suits a partition; arguments as of :class:`Motion`."""
    kind = HostMotion if HostMotion.suits(partition) else Motion
    if any(is_sharded(p) for p in partition.params.values()):
        kind = ShardedMotion
    return kind(partition, given, state, with_norms, skipped)


def as_vector(factors: Factors) -> Tensor:
    """Return factors as a tensor, (S,)."""
    return factors if isinstance(factors, Tensor) else torch.tensor(factors, dtype=torch.float64)


def _least(dtype: torch.dtype) -> float:
    """Return a norm so small that it counts as zero, and large enough to divide by."""
    return float(torch.finfo(dtype).tiny ** 0.5)


def _params_of(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _is_finite(number: Tensor) -> Tensor | bool:
    """Return whether a number is finite: at once on the CPU, else as a tensor, without waiting."""
    return math.isfinite(number.item()) if number.device.type == "cpu" else number.abs() < math.inf


def _unfit(name: str, shape: torch.Size, grad: Tensor) -> str:
    if grad.layout is not torch.strided:
        return (
            f"The gradient of {name!r} is sparse, which NewtonSummary does not support. Use "
            f"sparse=False in the embedding."
        )
    return (
        f"Parameter {name!r} has changed its shape from {tuple(shape)} to {tuple(grad.shape)}. "
        f"Make a new partition and a new optimizer."
    )
