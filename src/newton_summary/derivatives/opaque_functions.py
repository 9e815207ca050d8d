"""Functions that autograd can differentiate once, but perhaps not twice.

The backward pass of a custom function may be marked as not differentiable, or be a kernel unknown
to torch; that is noticed while differentiating. Or it may use a number that its forward pass
computed and kept: then the next derivative silently lacks what depends on this number. So does
torch's own derivative of sparse tensors made from parameters. Such results are compared with
differences of gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from newton_summary.derivatives.differences import step_sizes, summarize_differences
from newton_summary.errors import CannotDifferentiate
from newton_summary.partition import Params
from newton_summary.probe.eager import mark_approximate
from newton_summary.probe.probe import Closure, graph_nodes
from newton_summary.probe.state import unmoved
from newton_summary.summary import Summary


def watch_opaque_functions(entry: Tensor) -> set[str]:
    """Make every custom function in a graph raise if it cannot be differentiated again.

    The backward pass of a ``torch.autograd.Function`` may be a kernel unknown to torch, or marked
    ``once_differentiable``. ``torch.autograd.grad`` then silently leaves out what is behind it, and
    the next derivative would be wrong.

    Returns:
        The names of all functions in the graph whose derivatives are in doubt.
    """
    opaque = opaque_functions(entry)
    for node in filter(_is_custom, opaque):
        if not node.metadata.get("watched"):  # for another entry of the same tensor
            node.metadata["watched"] = True
            node.register_hook(_must_be_differentiable(node))
    return {node.name().removesuffix("Backward") for node in opaque}


def opaque_functions(entry: Tensor) -> list[Any]:
    """Return the nodes of a graph whose second derivatives may be silently wrong."""
    if entry.grad_fn is None:
        return []
    nodes = graph_nodes(entry.grad_fn)
    return [node for node in nodes if _is_custom(node) or "Sparse" in node.name()]


def _is_custom(node: Any) -> bool:
    return isinstance(node, BackwardCFunction) or "CppNode" in node.name()


def _must_be_differentiable(node: Any) -> Callable[..., None]:
    kept = (*getattr(node, "saved_tensors", ()), *getattr(node, "__dict__", {}).values())
    may_be_nonlinear = any(isinstance(x, Tensor) and x.is_floating_point() for x in kept)
    name = node.name()

    def hook(results: Sequence[Tensor | None], received: Sequence[Tensor | None]) -> None:
        if not torch.is_grad_enabled():  # the last derivative
            return
        varies = any(grad is not None and grad.requires_grad for grad in received)
        for grad in results:
            if grad is None or (not grad.requires_grad and not bool(grad.any())):
                continue
            if grad.requires_grad:
                ends = type(grad.grad_fn).__name__ == "Error"  # marked once_differentiable
            else:
                ends = varies or may_be_nonlinear
            if ends:
                raise CannotDifferentiate(
                    f"nested: the backward pass of the custom function {name} cannot be "
                    f"differentiated again"
                )

    return hook


def compare_with_differences(
    summary: Summary, closure: Closure, params: Params, u: Params, opaque: Iterable[str]
) -> None:
    """Raise if a summary differs from central differences, where these are reliable.

    Takes 2S + 1 gradients.
    """
    eps = max(torch.finfo(p.dtype).eps for p in params.values())
    tolerances = max(1e-4, 150 * eps**0.5), max(1e-3, 10 * eps**0.25)  # of Hbar and D3
    if summary.partition is None or tolerances[0] > 0.2:
        return  # half precision: the differences are rounding
    how = (closure, params, u, summary.partition, summary.order)
    first = summarize_differences(*how)
    units = step_sizes(params, u, summary.partition, relative=1.0)
    wrong = [e > t for e, t in zip(_errors(summary, first, units), tolerances, strict=True)]
    if not any(wrong):
        return
    second = summarize_differences(*how, step_factor=0.5)
    errors, doubts = _errors(summary, second, units), _errors(first, second, units)
    if not _has_this_slope(summary, closure, params, u, units, eps):
        mark_approximate()  # its gradient is another one by design, as a straight-through one
        return
    for name, is_wrong, error, doubt, tolerance in zip(
        ("Hbar", "D3"), wrong, errors, doubts, tolerances, strict=True
    ):
        if is_wrong and error > max(tolerance, 4 * doubt):
            raise CannotDifferentiate(
                f"nested: {name} is {error:.0%} off differences of gradients, as the derivatives "
                f"of {', '.join(sorted(opaque))} are not fully known to autograd"
            )


def _has_this_slope(
    summary: Summary, closure: Closure, params: Params, u: Params, units: Tensor, eps: float
) -> bool:
    """Return whether gbar is the slope of the loss: else differences are of another function."""
    assert summary.partition is not None
    h = eps ** (1 / 3) * units
    losses = {}
    for sign in (+1, -1):
        move = summary.partition.scale(u, sign * h)
        with unmoved(params.values()), torch.no_grad():
            for name, p in params.items():
                p.add_(move[name])
            losses[sign] = float(closure())
    slopes = summary.gbar.cpu().double() * h
    slope = (losses[+1] - losses[-1]) / 2
    return abs(slope - float(slopes.sum())) <= 10 * float(eps ** (1 / 3) * slopes.abs().sum())


def _errors(a: Summary, b: Summary, units: Tensor) -> tuple[float, float]:
    """Return how far Hbar and D3 are apart, in their largest entries for each group.

    ``units`` are steps of the groups in which the derivatives are comparable, (S,).
    """
    H, H_b = (s.hessian().cpu().double() * units * units[:, None] for s in (a, b))
    D3, D3_b = (0 * units if s.D3 is None else s.D3.cpu().double() * units**3 for s in (a, b))
    rows = H_b.abs().amax(1)
    floor = 1e-3 * rows.max()
    H_error = (H - H_b).abs().amax(1) / (rows + floor).clamp_min(1e-300)
    D3_error = (D3 - D3_b).abs() / (D3_b.abs() + rows + floor).clamp_min(1e-300)
    return float(H_error.max()), float(D3_error.max())
