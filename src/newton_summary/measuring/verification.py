"""Check the sweep on your own model, against central differences of ordinary gradients."""

from __future__ import annotations

import copy
from collections import UserList
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Literal

import torch
from torch import Tensor, nn

from newton_summary.derivatives.differences import summarize_differences
from newton_summary.derivatives.sweep import summarize_sweep
from newton_summary.display.table import ShownAsTable
from newton_summary.errors import CannotDifferentiate
from newton_summary.measuring.exact_loss import ExactLoss, widened
from newton_summary.parallel.processes import refuse_sharded
from newton_summary.partition import Partition, Spec, make_partition, trainable, unwrap
from newton_summary.probe.directions import Direction, find_direction
from newton_summary.probe.inputs import as_batches, leaves
from newton_summary.probe.probe import LossFn, Probe
from newton_summary.probe.state import Journal, set_contents
from newton_summary.summary import Summary

# Steps of the differences: two long ones, and two that hardly ever meet a kink.
STEP_FACTORS = (1.0, 0.25, 1e-2, 2.5e-3)
TOLERANCE = 1e-4  # of the largest entry in a group's row of Hbar, and of the largest D3


Verdict = Literal["agrees", "differs", "unclear"]


@dataclass(frozen=True)
class Verification(ShownAsTable):
    """How far the sweep is from central differences, group by group. Made by :func:`verify`.

    ``print`` it for a table with a verdict for every group. ``status`` is the verdict on all of
    them: "differs" if any group does, "unclear" if fewer than half of them are clear, because the
    differences themselves depend on their step. ``ok`` means that it is "agrees".

    >>> net = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1))
    >>> def loss_fn(model, x):
    ...     return model(x).exp().mean()
    >>> found = verify(net, loss_fn, torch.eye(2), partition="layers")
    >>> found.ok, found.verdicts
    (True, ('agrees', 'agrees'))
    """

    _right = (1, 2)

    names: tuple[str, ...]
    Hbar_error: Tensor  # (S,)  largest difference in the group's row, over its largest entry
    D3_error: Tensor  # (S,)  difference over the largest D3
    Hbar_doubt: Tensor  # (S,)  the same between differences with two steps: how well they know
    D3_doubt: Tensor  # (S,)
    sweep: Summary
    differences: Summary

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        """``agrees``, ``differs``, or ``unclear`` where the differences depend on their step."""
        error = torch.stack([self.Hbar_error, self.D3_error])
        doubt = torch.stack([self.Hbar_doubt, self.D3_doubt])
        found = torch.where(doubt > error / 10, 1, 2) * ~(error <= TOLERANCE)
        order: tuple[Verdict, ...] = ("agrees", "unclear", "differs")  # the worse one counts
        return tuple(order[i] for i in found.amax(0).tolist())

    @property
    def status(self) -> Verdict:
        """The verdict on all groups together."""
        verdicts = self.verdicts
        if "differs" in verdicts:
            return "differs"
        return "agrees" if 2 * verdicts.count("agrees") >= len(verdicts) else "unclear"

    @property
    def ok(self) -> bool:
        """Whether no group differs, and at least half of them agree."""
        return self.status == "agrees"

    def _rows(self) -> list[list[str]]:
        rows = [["group", "Hbar: off by", "D3: off by", "verdict"]]
        for name, H, D, verdict in zip(
            self.names, self.Hbar_error.tolist(), self.D3_error.tolist(), self.verdicts, strict=True
        ):
            rows.append([name, f"{H:.1e}", f"{D:.1e}", verdict])
        return rows

    def _said(self) -> str:
        counts = {v: self.verdicts.count(v) for v in ("agrees", "differs", "unclear")}
        said = ", ".join(f"{n} {_SAID[v]}" for v, n in counts.items() if n)
        return f"The sweep against central differences in {self.sweep.gbar.dtype}: {said}."


_SAID = {
    "agrees": "agree",
    "differs": "DIFFER",
    "unclear": "unclear (the differences depend on their step: kinks such as ReLU and "
    "max-pooling, rounding inside the loss, or a negligible third derivative)",
}


def verify(
    model: nn.Module,
    loss_fn: LossFn,
    data: Any,
    *,
    partition: Partition | Spec = "canonical",
    direction: Direction = "gradient",
) -> Verification:
    """Compare the sweep with central differences of gradients on a model of your own.

    Works on a copy of the model in float64, where differences are good to about 1e-6; what the
    model computes internally in float32 is in float64 as well. Gradients come from torch's own
    backward pass. Whatever the loss takes out of the graph, for example by ``detach``, is held
    constant while the parameters move, as it is a constant to autograd and to the sweep. Takes
    about 8S gradients, so a small batch will do.

    Args:
        model: Any module that can be copied.
        loss_fn: ``loss_fn(model, batch)`` as for :func:`summarize`. It must use the model it is
            given, which is the copy.
        data: One batch, or an iterable of batches, of which the first is used.
        partition: A partition of the model, or what :func:`make_partition` takes.
        direction: ``"gradient"`` or a mapping, as for :func:`summarize`.

    Returns:
        The errors and a verdict for every group; print it.

    Raises:
        CannotDifferentiate: If the sweep cannot follow the loss.

    >>> net = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    >>> batch = torch.linspace(-1, 1, 20).reshape(5, 4)
    >>> verify(net, lambda model, x: model(x).square().mean(), batch).ok
    True
    """
    refuse_sharded(dict(unwrap(model).named_parameters()), "verify")
    exact = _copy(unwrap(model)).double()
    if isinstance(partition, Partition):
        groups = Partition(partition.names, trainable(exact), partition.labels, exact)
    else:
        groups = make_partition(exact, partition)
    if not isinstance(direction, str):
        if not isinstance(direction, Mapping):
            raise TypeError(
                f"direction has type {type(direction).__name__}: verify works on a copy of the "
                "model, so it takes only 'gradient' or a mapping from parameter name to tensor."
            )
        direction = {name: value.double() for name, value in direction.items()}
    # Not a list: a list of tensors would count as one batch.
    first = None if data is None else UserList(map(widened, islice(as_batches(data), 1)))
    with (
        Journal(),
        _not_called(unwrap(model)),
        _in_float64(),
        Probe(exact, ExactLoss(loss_fn), first, groups) as probe,
    ):
        u = find_direction(direction, probe)
        closure, _ = next(iter(probe.closures()))
        arguments = (closure, probe.params, u, groups)
        try:
            sweep = summarize_sweep(*arguments)
        except CannotDifferentiate as error:
            raise CannotDifferentiate(
                "verify checks the sweep, which cannot follow this loss, so summarize uses "
                f"another backend and says so ({error})."
            ) from error
        by_step = [summarize_differences(*arguments, 3, factor) for factor in STEP_FACTORS]
    errors = [_errors(sweep, differences) for differences in by_step]
    doubts = [_errors(a, b) for a, b in (by_step[:2], by_step[2:])]
    H_error, D3_error = (torch.stack(some).amin(0) for some in zip(*errors, strict=True))
    H_doubt, D3_doubt = (torch.stack(some).amin(0) for some in zip(*doubts, strict=True))
    return Verification(groups.names, H_error, D3_error, H_doubt, D3_doubt, sweep, by_step[0])


def _copy(model: nn.Module) -> nn.Module:
    """Copy a model; activations that it has stored, which torch does not copy, without history."""
    with suppress(RuntimeError):
        return copy.deepcopy(model)
    attributes = (x for module in model.modules() for x in leaves(vars(module)))
    stored = (x for x in attributes if isinstance(x, Tensor) and not x.is_leaf)
    return copy.deepcopy(model, {id(x): x.detach().clone() for x in stored})


@contextmanager
def _not_called(model: nn.Module) -> Iterator[None]:
    """Raise if the loss calls the model that was copied, and not the copy that it is given."""

    def stop(module: nn.Module, args: Any) -> None:
        raise ValueError(
            "loss_fn(model, batch) uses a model from elsewhere, not its argument, which here is a "
            "copy in float64. Make loss_fn use its argument."
        )

    with Journal() as journal:
        for module in model.modules():
            hooks = module._forward_pre_hooks
            journal.undo_later(partial(set_contents, hooks, dict(hooks)))
            module.register_forward_pre_hook(stop)
        yield


@contextmanager
def _in_float64() -> Iterator[None]:
    """Raise a clear error where a model cannot compute in float64."""
    try:
        yield
    except (RuntimeError, NotImplementedError) as error:
        if not any(name in str(error) for name in ("Double", "double", "float64")):
            raise
        raise ValueError(
            f"verify works in float64, and this model cannot: {str(error).splitlines()[0]}"
        ) from error


def _errors(a: Summary, b: Summary) -> tuple[Tensor, Tensor]:
    """Return the largest difference in each row of Hbar, and the differences of D3, relative."""
    assert a.D3 is not None and b.D3 is not None
    gap = (a.hessian() - b.hessian()).abs()
    scale = b.hessian().abs()
    tiny = torch.finfo(scale.dtype).tiny
    # Of the row's largest entry; a row that is all rounding is held against the whole matrix.
    row_scale = torch.maximum(scale.amax(1), 1e-6 * scale.max()).clamp_min(tiny)
    D3_gap = (a.D3 - b.D3).abs() / b.D3.abs().max().clamp_min(tiny)
    return gap.amax(1) / row_scale, D3_gap
