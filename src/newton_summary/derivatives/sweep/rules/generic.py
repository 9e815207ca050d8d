"""Any other operation: its own derivatives, by differentiating that one operation repeatedly.

Along group s the inputs move as x(t) = x + t x1_s + t^2/2 x2_s. For any cotangent v, the
derivatives of S(t) = <v, h(x(t))> at 0 are linear in v: by v they give y1_s and y2_s, and at v =
delta the third is this operation's share of D3_s. The share of Hbar is the Hessian of <delta, h(x)>
along x1_s, x1_t. A complex number counts as two real ones.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket

from newton_summary.derivatives.sweep.rules.per_row import fill
from newton_summary.derivatives.sweep.tape import (
    Op,
    Sweep,
    Tangent,
    as_real,
    find_values,
    gram,
    spread,
    union,
)
from newton_summary.derivatives.sweep.torch_functions import names
from newton_summary.errors import CannotDifferentiate, is_out_of_memory

# Operators that torch differentiates wrongly two or three times; as functions they are in norms.py.
WRONG = frozenset(
    names("""
    native_layer_norm native_batch_norm native_group_norm _native_batch_norm_legit
    _batch_norm_with_update cudnn_batch_norm miopen_batch_norm _fused_rms_norm
    _weight_norm_interface
""")
)


def generic(sweep: Sweep, op: Op, *args: Any, **kwargs: Any) -> Any:
    """Pass an operation without its own rule, one group after the other."""
    if op.name.partition(".")[0] in WRONG:
        raise CannotDifferentiate(f"sweep: torch's own derivatives of {op.name!r} are wrong")
    if isinstance(op.func, OpOverload | OpOverloadPacket) and not str(op.func).startswith("aten."):
        raise CannotDifferentiate(
            f"sweep: {op.func} is a custom operator, and may have no second derivative"
        )
    try:
        with torch.enable_grad():
            return Local(sweep, op, args, kwargs).run()
    except (RuntimeError, NotImplementedError) as error:
        if is_out_of_memory(error):
            raise
        raise CannotDifferentiate(
            f"sweep: the operation {op.name!r} cannot be differentiated again: "
            f"{str(error).splitlines()[0]}"
        ) from error


class Local:
    """One operation as a function of the inputs that move."""

    def __init__(self, sweep: Sweep, op: Op, args: Any, kwargs: Any):
        """Find the inputs that move, and their tangents."""
        self.sweep, self.op, self.args, self.kwargs = sweep, op, args, kwargs
        moving = sweep.moving((args, kwargs))
        self.slots, tangents = list(moving), list(moving.values())
        values = {value.slot: value for value in find_values((args, kwargs))}
        self.x = [values[slot].now.detach() for slot in moving]
        self.first = union(*(t.first for t in tangents))
        self.x1 = [spread(t.first, t.y1, self.first) for t in tangents]
        self.x2 = [spread(t.second, t.y2, self.first) for t in tangents]

    def call(self, x: list[Tensor]) -> list[Tensor]:
        """Evaluate the operation, with the same random numbers as when it was recorded."""
        given = dict(zip(self.slots, x, strict=True))
        args = fill(self.args, given, keep_constants=True)
        if isinstance(args[0], Tensor):  # which an operation in place writes to
            args = (args[0].clone(), *args[1:])
        kwargs = fill(self.kwargs, given, keep_constants=True)
        circumstances = self.op.saved
        with circumstances.again() if hasattr(circumstances, "again") else nullcontext():
            result = self.op.func(*args, **kwargs)
        result = args[0] if result is None else result
        results = list(result) if isinstance(result, tuple | list) else [result]
        return [r for r, value in zip(results, self.op.outputs, strict=True) if value is not None]

    def run(self) -> Any:
        """Return the tangents of the outputs; the contributions are added on the way."""
        delta = [
            torch.zeros_like(v.tensor) if (d := self.sweep.adjoint(v)) is None else d
            for v in self.op.made
        ]
        self._add_Hbar(delta)
        lines = [self._line(i, delta) for i in range(len(self.first))]
        if not self.op.wanted:
            return None
        groups = self.first, self.first if self.sweep.order == 3 else ()
        by_row = (line[n] for n in range(self.sweep.order - 1) for line in lines)
        rows = iter(torch.stack(rows) for rows in zip(*by_row, strict=True))
        return [None if v is None else Tangent(*groups, next(rows)) for v in self.op.outputs]

    def _line(self, i: int, delta: list[Tensor]) -> list[list[Tensor]]:
        """Differentiate along the line of the i-th group: y1 of all outputs, and y2; adds to D3."""
        dtype, device = self.x[0].real.dtype, self.x[0].device
        t = torch.zeros((), dtype=dtype, device=device, requires_grad=True)
        moved = [
            x + t * x1[i] + 0.5 * t * t * x2[i]
            for x, x1, x2 in zip(self.x, self.x1, self.x2, strict=True)
        ]
        y = self.call(moved)
        v = [d.detach().clone().requires_grad_() for d in delta]
        term = inner(v, y)
        results: list[list[Tensor]] = []
        for _ in range(self.sweep.order - 1):
            (term,) = _derivative(term, [t], create_graph=True)
            results.append([g.detach() for g in _derivative(term, v, create_graph=True)])
        if self.sweep.order == 3:
            (third,) = _derivative(term, [t], create_graph=False)
            self.sweep.add_D3(self.first[i : i + 1], third.detach().reshape(1))
        return results

    def _add_Hbar(self, delta: list[Tensor]) -> None:
        x = [value.detach().clone().requires_grad_() for value in self.x]
        grads = _derivative(inner(delta, self.call(x)), x, create_graph=True)
        rows = []
        for i in range(len(self.first)):
            slope = inner(grads, [x1[i] for x1 in self.x1])
            products = _derivative(slope, x, create_graph=False)
            rows.append(sum(gram(as_real(p[None]), as_real(x)) for p, x in zip(products, self.x1)))
        self.sweep.add_Hbar(self.first, self.first, torch.cat(rows))  # type: ignore[arg-type]


def inner(a: list[Tensor], b: list[Tensor]) -> Tensor:
    """Return the inner product of several tensors with as many others, a real number."""
    products = [(as_real(x) * as_real(y)).sum() for x, y in zip(a, b, strict=True)]
    return torch.stack(products).sum()


def _derivative(scalar: Tensor, inputs: list[Tensor], create_graph: bool) -> list[Tensor]:
    """Return the gradient; zeros where there is no dependence."""
    if not scalar.requires_grad:
        return [torch.zeros_like(x) for x in inputs]
    return list(
        torch.autograd.grad(
            scalar, inputs, create_graph=create_graph, retain_graph=True, materialize_grads=True
        )
    )
