"""Where the direction ``u`` of a measurement comes from."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer, SparseAdam

from newton_summary.display.names import nearest
from newton_summary.parallel.processes import local_part
from newton_summary.partition import Params
from newton_summary.probe.probe import Probe
from newton_summary.probe.state import Journal, unmoved

Direction = str | Mapping[str, Tensor] | Optimizer


def gradient(probe: Probe) -> Params:
    """Return the gradient of the mean loss over all of the probe's data."""
    return probe.gradient()


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
                f"Unknown direction {direction!r}. Use {', '.join(map(repr, DIRECTIONS))}, a "
                "mapping from parameter name to tensor, or an optimizer."
            )
        return DIRECTIONS[direction](probe)
    if isinstance(direction, Optimizer):
        g = probe.gradient()
        with probe.processes.joint(), borrowed(direction, probe.params) as step:
            return step(g)
    if isinstance(direction, Mapping):
        with probe.processes.joint():
            # Compiled modules put a prefix before the names of their parameters.
            plain = {str(name).replace("_orig_mod.", ""): u for name, u in direction.items()}
            return _checked(plain, probe.params, probe.model)
    raise TypeError(
        f"direction has type {type(direction).__name__}: expected 'gradient', a mapping from "
        "parameter name to tensor, or an optimizer."
    )


def _checked(direction: Mapping[str, Tensor], params: Params, model: nn.Module) -> Params:
    for name in direction:
        if name not in params:
            raise ValueError(_unknown_name(name, params, model))
    for name, p in params.items():
        if name not in direction:
            raise ValueError(
                f"The direction lacks parameter {name!r}: give it a tensor of shape "
                f"{tuple(p.shape)}, zeros if it should not move."
            )
        value = direction[name]
        if not isinstance(value, Tensor):
            raise TypeError(
                f"The direction of {name!r} has type {type(value).__name__}: expected a tensor of "
                f"shape {tuple(p.shape)}."
            )
        if value.shape != p.shape:
            raise ValueError(
                f"The direction of {name!r} has shape {tuple(value.shape)}, but the parameter has "
                f"shape {tuple(p.shape)}."
            )
        if value.dtype != p.dtype or value.device != p.device:
            raise ValueError(
                f"The direction of {name!r} is {value.dtype} on {value.device}, but the parameter "
                f"is {p.dtype} on {p.device}. Convert it with .to(parameter)."
            )
    # One check for all, which waits for a GPU once; NaN and infinity survive in a norm.
    parts = {name: local_part(direction[name]) for name in params}  # of what is sharded
    norms = torch._foreach_norm(list(parts.values()))
    finite = torch.isfinite(torch.stack([norm.to(norms[0]) for norm in norms])).tolist()
    for name, is_finite in zip(params, finite, strict=True):
        if not is_finite and not bool(torch.isfinite(parts[name]).all()):
            hint = ""
            if parts[name].dtype == torch.float16:
                hint = " In float16 the default eps of Adam, 1e-8, is 0: use eps=1e-4, or float32."
            raise ValueError(f"The direction of {name!r} has non-finite entries.{hint}")
    # A copy if it lies in the memory of a parameter, which may be moved while it is used.
    live = {local_part(p).untyped_storage().data_ptr() for p in params.values()}
    own = {name: direction[name].detach() for name in params}
    for name, u in own.items():
        if u.is_inference() or local_part(u).untyped_storage().data_ptr() in live:
            own[name] = u.clone()
    return own


def _unknown_name(name: str, params: Params, model: nn.Module) -> str:
    everything = dict(model.named_parameters(remove_duplicate=False))
    if name in everything:
        first = next((n for n, p in params.items() if p is everything[name]), None)
        if first is None:
            return f"The direction names {name!r}, which is frozen. Leave it out."
        return f"The direction names {name!r}, which is tied to {first!r}. Use {first!r} alone."
    return (
        f"The direction names {name!r}, which is not a trainable parameter of the "
        f"model.{nearest(name, params)}"
    )


def measures_itself(optimizer: object) -> bool:
    """Whether an optimizer is NewtonSummary, which is made of this module and finds its rates."""
    return hasattr(optimizer, "last_summary")


@contextmanager
def borrowed(optimizer: Optimizer, params: Params) -> Iterator[Callable[[Params], Params]]:
    """Yield a function from gradients to what the optimizer's next step would subtract.

    Each call takes a real step, on a copy of the optimizer's state that lives as long as this
    context, without its hooks and schedulers. The parameters are restored bit for bit, so neither
    the optimizer nor the model changes.

    Raises:
        ValueError: If the optimizer lacks a parameter, or needs to evaluate the loss (LBFGS).
    """
    if measures_itself(optimizer):
        raise ValueError(
            f"{type(optimizer).__name__} cannot give a direction: it measures the loss in its own "
            "step. Use 'gradient', a mapping from parameter name to tensor, or another optimizer."
        )
    everything = [p for group in optimizer.param_groups for p in group["params"]]
    owned = {id(p) for p in everything}
    for name, p in params.items():
        if id(p) not in owned:
            raise ValueError(
                f"The optimizer does not hold parameter {name!r}: it belongs to another model, or "
                f"the parameter should be frozen with requires_grad_(False)."
            )
    old_grads = [p.grad for p in everything]
    old_attributes = dict(optimizer.__dict__)

    def put_back() -> None:
        optimizer.__dict__.update(old_attributes)
        for name in [name for name in optimizer.__dict__ if name not in old_attributes]:
            del optimizer.__dict__[name]
        for p, grad in zip(everything, old_grads, strict=True):
            p.grad = grad

    def step(grads: Params) -> Params:
        by_id = {id(p): grads[name] for name, p in params.items()}
        for p in everything:
            grad = by_id.get(id(p))
            if grad is not None and isinstance(optimizer, SparseAdam):
                grad = grad.to_sparse(1)  # it takes no other; of the rows that the loss has used
            p.grad = None if grad is None else grad.clone()
        with unmoved(everything) as copies:
            before = {id(p): value for p, value in zip(everything, copies, strict=True)}
            try:
                type(optimizer).step(optimizer)  # not optimizer.step, which a scheduler has wrapped
            except TypeError as error:
                if "closure" not in str(error) and "'NoneType' object is not" not in str(error):
                    raise
                raise ValueError(
                    f"{type(optimizer).__name__} cannot give a direction: its step needs a "
                    f"closure ({error}). Use another optimizer, or pass summarize(direction=...) "
                    "a mapping from parameter name to the value before its step minus that after."
                ) from error
            return {name: before[id(p)] - p.detach() for name, p in params.items()}

    with Journal() as journal:
        journal.undo_later(put_back)
        optimizer.state = defaultdict(dict)
        optimizer.state.update({p: copy.deepcopy(v) for p, v in old_attributes["state"].items()})
        optimizer.param_groups = [
            {k: v if k == "params" else copy.deepcopy(v) for k, v in group.items()}
            for group in old_attributes["param_groups"]
        ]
        for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
            setattr(optimizer, hooks, OrderedDict())
        yield step
