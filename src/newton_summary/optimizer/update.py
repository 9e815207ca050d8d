"""What a step does to every parameter: gradient to direction, direction to update.

The direction of all parameters of one dtype on one device lies end to end in one buffer, so a step
takes few operations, whatever the number of tensors. Nothing here waits for an accelerator: whether
a direction is finite is decided on the device, and one that is not is set to zero, all of it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from newton_summary.parallel.processes import is_sharded, like_sharded, local_part, local_rows
from newton_summary.partition import Params, Partition, result_dtype

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

    def scale(self, momenta: Sequence[float]) -> None:
        """Multiply the direction by the momentum of each group; of all, if there is but one."""
        if len(set(momenta)) == 1:
            self.u.mul_(momenta[0])
        else:
            torch._foreach_mul_(self.views, [momenta[s] for s in self.group_numbers])

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

    def decay(self, fractions: Sequence[float | Tensor], made: Tensor | bool) -> None:
        """Shrink parameters that have a gradient by the fraction of their group, if a step is made.

        Args:
            fractions: Of each group; of all groups, if there is but one.
            made: Whether the step is made.
        """
        equal: dict[Any, list[Tensor]] = defaultdict(list)
        for i, p in enumerate(self.live):
            if p.requires_grad and p.grad is not None:
                fraction = fractions[0 if len(fractions) == 1 else self.group_numbers[i]]
                equal[fraction].append(self.params[i])
        for fraction, params in equal.items():
            if isinstance(made, Tensor) or isinstance(fraction, Tensor):
                factor = 1 - torch.as_tensor(made, device=self.u.device) * fraction
                torch._foreach_mul_(params, factor.to(self.dtype))
            elif made and fraction:
                torch._foreach_mul_(params, 1 - fraction)

    def move(self, rates: Tensor) -> None:
        """Subtract from each parameter its direction times the rate of its group, (S,)."""
        if rates.device.type == "cpu" and not self.divided:  # numbers that nobody waits for
            values = rates.tolist()
            factors = [values[s] for s in self.group_numbers]
            if self.u.device.type != "cpu":
                torch._foreach_sub_(self.params, torch._foreach_mul(self.views, factors))
                return
            for p, view, factor in zip(self.params, self.views, factors):
                p.sub_(view, alpha=factor)
            return
        rates = rates.to(self.u.device, self.dtype, non_blocking=True)
        steps = (self.u * rates.index_select(0, self.entries)).to(self.u.dtype)
        torch._foreach_sub_(self.params, _unflatten(steps, self.params))


class Update:
    """The direction of every parameter, kept from step to step, and the move along it.

    Args:
        partition: The groups, and with them the live parameters.
        given: An optimizer whose step is the direction of the parameters that it holds. The others
            have u <- momentum u + gradient, as in Algorithm 2.
        state: The state of the optimizer, where ``momentum_buffer`` is kept for each parameter.
        skipped: How many steps were not made before.
    """

    def __init__(
        self,
        partition: Partition,
        given: Optimizer | None,
        state: Mapping[Any, dict[str, Any]],
        skipped: int,
    ):
        self.partition, self.given = partition, given
        held = set() if given is None else {id(p) for g in given.param_groups for p in g["params"]}
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
        self.sharded = any(bucket.sharded for bucket in self.buckets)
        for bucket in self.heavy_ball:
            for p, view in zip(bucket.live, bucket.views):
                if "momentum_buffer" in state[p]:
                    view.copy_(local_part(state[p]["momentum_buffer"]))
                state[p]["momentum_buffer"] = like_sharded(view, p)
        devices = [p.device for p in partition.params.values()]
        self.device = next((d for d in devices if d.type != "cpu"), devices[0])
        self.dtype = result_dtype(partition.params)
        self._every = list(range(len(partition)))
        self.norms = torch.zeros(len(partition), dtype=self.dtype, device=self.device)
        self.finite: Tensor | bool = True  # whether the last direction was
        self._eta: Tensor | None = None  # the rates that are held, (S,)
        self._norms: Tensor | None = None  # (S,) of the directions they were found for
        self._made: Tensor | int = 0  # how many of the steps asked for were
        self._asked = skipped

    # --- gradient to direction --------------------------------------------------------------------

    def advance(self, momenta: Sequence[float]) -> None:
        """Set the direction from the present gradients; to zero if it would not be finite.

        Args:
            momenta: Of each group; of all groups, if there is but one.
        """
        for bucket in self.heavy_ball:
            bucket.scale(momenta)
            bucket.add_gradient()
        shown = True if self.given is None else self._step_given(self.given)
        self.norms = self._norms_of_groups()
        self.finite = _is_finite(self.norms.sum()) & shown
        for bucket in self.buckets:
            bucket.zero_unless(self.finite)
        self._made = self._made + self.finite
        self._asked += 1

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
        sums = [b.u.abs().sum(dtype=b.dtype).to(self.device) for b in self.stepped]
        finite = _is_finite(self._over_ranks(torch.stack(sums).sum()))
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

    @property
    def usable(self) -> bool:
        """Whether the direction is finite and not zero (waits)."""
        return bool(self.finite) and bool(self.norms.any())

    @property
    def skipped(self) -> int:
        """How many steps were not made because of a gradient that was not finite (waits)."""
        return self._asked - int(self._made)

    def direction(self) -> Params:
        """Return the present direction by name, as views."""
        u = {n: view for b in self.buckets for n, view in zip(b.names, b.views)}
        return {name: like_sharded(u[name], p) for name, p in self.partition.params.items()}

    def _norms_of_groups(self) -> Tensor:
        """Return ||U^s|| of the present direction, (S,)."""
        first = self.buckets[0]
        if len(self.buckets) == 1 and not self.sharded and first.group_numbers == self._every:
            return first.norms()  # each tensor is a group
        return self._root_of_sums(Bucket.add_squares)

    def weight_norms(self) -> Tensor:
        """Return the norm of the weights of each group, (S,): tensors of two dimensions or more."""
        return self._root_of_sums(Bucket.add_weight_squares)

    def _root_of_sums(self, add: Callable[[Bucket, Tensor], None]) -> Tensor:
        """Return the root of what the buckets of all ranks add to the groups, (S,)."""
        total = torch.zeros(len(self.partition), dtype=self.dtype, device=self.device)
        for bucket in self.buckets:
            if bucket.sharded or not self.sharded or dist.get_rank() == 0:  # else counted already
                add(bucket, total)
        return self._over_ranks(total).sqrt_()

    def _over_ranks(self, numbers: Tensor) -> Tensor:
        if self.sharded:
            dist.all_reduce(numbers)
        return numbers

    # --- direction to update ----------------------------------------------------------------------

    def hold(self, eta: Tensor, norms: Tensor | None) -> None:
        """Take over the rates of a refresh, (S,), for the moves to come.

        Args:
            eta: The rates.
            norms: Of the directions then, if no step is to be longer than it was then.
        """
        on_host = norms is None and not any(bucket.divided for bucket in self.buckets)
        self._eta = eta if on_host else self.put(eta)
        self._norms = None if norms is None else self.put(norms)

    def put(self, values: Tensor) -> Tensor:
        """Copy a vector from the CPU to the device without waiting."""
        if self.device.type == "cpu":
            return values
        values = values.to(self.dtype)
        values = values.pin_memory() if self.device.type == "cuda" else values
        return values.to(self.device, non_blocking=True)

    def move(
        self, lrs: Sequence[float | Tensor], weight_decay: Sequence[float | Tensor] = (0.0,)
    ) -> None:
        """Subtract U I_{P:S} (lr eta) from the parameters.

        Nothing moves if u was not finite, or before there are rates.

        Args:
            lrs: The factor on the rates of each group; of all groups, if there is but one.
            weight_decay: Fractions of lr by which parameters shrink, likewise.
        """
        if self._eta is None:
            return
        if any(isinstance(x, Tensor) or x for x in weight_decay):
            fractions = [lr * x for lr, x in zip(lrs, weight_decay, strict=True)]
            for bucket in self.buckets:
                bucket.decay(fractions, self.finite)
        rates = self._eta * self._factors(lrs, self._eta.device)
        if self._norms is not None:  # a direction that has grown since moves as far as then
            rates = rates * (self._norms / self.norms).nan_to_num(1.0, 1.0).clamp_max(1)
        for bucket in self.buckets:
            bucket.move(rates)

    def _factors(self, lrs: Sequence[float | Tensor], device: torch.device) -> Tensor | float:
        if any(isinstance(lr, Tensor) for lr in lrs):
            return torch.stack([torch.as_tensor(x, device=self.device) for x in lrs]).to(self.dtype)
        if len(set(lrs)) == 1:
            return lrs[0]
        factors = torch.tensor(lrs, dtype=torch.float64)
        return factors if device.type == "cpu" else self.put(factors)


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
