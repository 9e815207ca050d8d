"""Where the direction ``u`` of a measurement comes from."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from newton_summary.derivatives.probe import Probe, check_depends, check_finite
from newton_summary.partition import Params, _nearest

Direction = str | Mapping[str, Tensor] | Optimizer


def gradient(probe: Probe) -> Params:
    """Return the gradient of the mean loss over all of the probe's data."""
    leaves = list(probe.params.values())
    total = [torch.zeros_like(p) for p in leaves]
    samples = 0
    for closure, size in probe.closures():
        loss = closure()
        check_finite(loss)
        check_depends(loss)
        grads = torch.autograd.grad(loss, leaves, materialize_grads=True)
        torch._foreach_add_(total, [grad.detach() for grad in grads], alpha=size)
        samples += size
    torch._foreach_div_(total, samples)
    return dict(zip(probe.params, total, strict=True))


DIRECTIONS: dict[str, Callable[[Probe], Params]] = {"gradient": gradient}


def find_direction(direction: Direction, probe: Probe) -> Params:
    """Return ``u`` for every parameter of the probe.

    Args:
        direction: ``"gradient"`` of the probe's data, a mapping from parameter name to tensor, or
            an optimizer: then ``u`` is the step that it would subtract, given that gradient.
        probe: The loss and its data.
    """
    if isinstance(direction, str):
        if direction not in DIRECTIONS:
            raise ValueError(
                f"Unknown direction {direction!r}. Write {', '.join(map(repr, DIRECTIONS))}, a "
                f"mapping from parameter name to tensor, or an optimizer."
            )
        return DIRECTIONS[direction](probe)
    if isinstance(direction, Optimizer):
        return optimizer_step(direction, gradient(probe), probe.params)
    if isinstance(direction, Mapping):
        return _checked(direction, probe.params)
    raise TypeError(
        f"The direction is of type {type(direction).__name__}: write 'gradient', a mapping from "
        f"parameter name to tensor, or an optimizer."
    )


def _checked(direction: Mapping[str, Tensor], params: Params) -> Params:
    for name in direction:
        if name not in params:
            raise ValueError(
                f"The direction names {name!r}, which is no trainable parameter of the model."
                f"{_nearest(name, params)}"
            )
    for name, p in params.items():
        if name not in direction:
            raise ValueError(
                f"The direction has nothing for parameter {name!r}. Give it a tensor of shape "
                f"{tuple(p.shape)}; zeros if it should not move."
            )
        value = direction[name]
        if value.shape != p.shape:
            raise ValueError(
                f"The direction of {name!r} has shape {tuple(value.shape)}, and the parameter "
                f"{tuple(p.shape)}."
            )
        if value.dtype != p.dtype or value.device != p.device:
            raise ValueError(
                f"The direction of {name!r} is {value.dtype} on {value.device}, and the parameter "
                f"{p.dtype} on {p.device}. Convert it with .to(parameter)."
            )
        if not bool(torch.isfinite(value).all()):
            raise ValueError(f"The direction of {name!r} has entries that are not finite.")
    return {name: direction[name].detach() for name in params}


def optimizer_step(optimizer: Optimizer, grads: Params, params: Params) -> Params:
    """Return what the optimizer's next step would subtract from each parameter.

    The step is really taken, on copies of the optimizer's state and with the parameters put back
    bit for bit, so neither it nor the model changes.
    """
    owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for name, p in params.items():
        if id(p) not in owned:
            raise ValueError(
                f"The optimizer does not hold parameter {name!r}: it belongs to another model, or "
                f"the parameter should be frozen with requires_grad_(False)."
            )
    everything = [p for group in optimizer.param_groups for p in group["params"]]
    before = [p.detach().clone() for p in everything]
    old_grads = [p.grad for p in everything]
    old_state, old_groups = optimizer.state, optimizer.param_groups
    hooks: dict[str, Any] = {
        name: getattr(optimizer, name)
        for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    }
    by_id = {id(p): grads[name] for name, p in params.items()}
    try:
        state: dict[Any, Any] = defaultdict(dict)
        state.update({p: copy.deepcopy(values) for p, values in old_state.items()})
        optimizer.state = state
        optimizer.param_groups = [
            {k: v if k == "params" else copy.deepcopy(v) for k, v in group.items()}
            for group in old_groups
        ]
        for name, old in hooks.items():
            setattr(optimizer, name, type(old)())
        for p in everything:
            grad = by_id.get(id(p))
            p.grad = None if grad is None else grad.clone()
        type(optimizer).step(optimizer)  # not optimizer.step, which a scheduler has wrapped
        after = {id(p): p.detach().clone() for p in everything}
    except TypeError as error:
        raise ValueError(
            f"{type(optimizer).__name__} cannot give a direction: its step needs a closure "
            f"({error})."
        ) from error
    finally:
        optimizer.state, optimizer.param_groups = old_state, old_groups
        for name, old in hooks.items():
            setattr(optimizer, name, old)
        with torch.no_grad():
            for p, value, grad in zip(everything, before, old_grads, strict=True):
                p.copy_(value)
                p.grad = grad
    start = {id(p): value for p, value in zip(everything, before, strict=True)}
    return {name: start[id(p)] - after[id(p)] for name, p in params.items()}
