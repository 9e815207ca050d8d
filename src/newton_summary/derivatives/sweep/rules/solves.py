"""Systems of linear equations, Cholesky factors and determinants.

They are given by equations that are bilinear: A X = B, or L L^T = A. Along a group

    A X1_s = B1_s - A1_s X           A X2_s = B2_s - A2_s X - 2 A1_s X1_s

and with the adjoint of B, Lambda = A^-T delta, what is curved contributes as the product A X with
the adjoint -Lambda would.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from newton_summary.derivatives.sweep.rules.products import contribute
from newton_summary.derivatives.sweep.tape import (
    Op,
    Tangent,
    Value,
    add_rows,
    dots,
    gram,
    join,
    lift,
    pick,
)

if TYPE_CHECKING:
    from newton_summary.derivatives.sweep.engine import Sweep

Solve = Callable[[Tensor], Tensor]  # right-hand sides (..., n, m) -> A^-1 of them


def solver(A: Tensor, columns: int) -> Callable[[bool], Solve]:
    """Return how to multiply by A^-1, or by A^-T.

    Args:
        A: The matrix, or several.
        columns: How many right-hand sides there will be. Products with the inverse are faster for
            as many as A has itself; for less than that it costs more to compute than the factors.
    """
    if columns >= A.shape[-1]:
        inverse = torch.linalg.inv(A)
        return lambda transposed: lambda sides: (inverse.mT if transposed else inverse) @ sides
    factors = torch.linalg.lu_factor(A)
    return lambda transposed: (
        lambda sides: torch.linalg.lu_solve(*factors, sides, adjoint=transposed)
    )


def side_by_side(solve: Solve, rows: Tensor) -> Tensor:
    """Solve for a stack (k, ..., n, m) of right-hand sides at once."""
    k, m = len(rows), rows.shape[-1]
    columns = rows.movedim(0, -2)  # (..., n, k, m)
    shape = columns.shape
    return solve(columns.reshape(*shape[:-2], k * m)).reshape(shape).movedim(-2, 0)


def pass_solution(
    sweep: Sweep,
    op: Op,
    a: Value,
    b: Value | None,
    solve: Solve,
    solve_transposed: Solve,
    part: Callable[[Tensor], Tensor],
) -> Tangent:
    """Pass ``X = A^-1 B``, given how to multiply by A^-1 and by A^-T.

    ``part`` returns the part of A that counts, such as its upper triangle.
    """
    X = op.out.now
    A, B = sweep.tangent(a), sweep.tangent(b)
    first, second = [], []
    if B is not None:
        rows = lift(B.rows, X.dim()).expand(len(B.rows), *X.shape)
        k = len(B.first)
        first.append((B.first, rows[:k]))
        second.append((B.second, rows[k:]))
    if A is not None:
        A = A.map(lambda rows: part(lift(rows, X.dim())))
        first.append((A.first, -(A.y1 @ X)))
        second.append((A.second, -(A.y2 @ X)))
    groups, sides = add_rows(first)
    X1 = side_by_side(solve, sides)
    result = Tangent(groups, (), X1)
    if sweep.order == 3:
        if A is not None:
            second.append((A.first, -2 * (A.y1 @ pick(groups, X1, A.first))))
        if any(some for some, _ in second):
            more, sides = add_rows(second)
            result = join((groups, X1), (more, side_by_side(solve, sides)))
    delta = sweep.adjoint(op.out)
    if A is not None and delta is not None:
        contribute(sweep, result, A, -(A.rows.mT @ solve_transposed(delta)))
    return result


def solution(sweep: Sweep, op: Op, a: Value, b: Value, **kwargs: Any) -> Tangent:
    """``torch.linalg.solve`` with matrices on the right."""
    rows = sum(0 if t is None else len(t.rows) for t in (sweep.tangent(a), sweep.tangent(b)))
    inverse = solver(a.now, rows * op.out.tensor.shape[-1])
    return pass_solution(sweep, op, a, b, inverse(False), inverse(True), lambda rows: rows)


def inverse(sweep: Sweep, op: Op, a: Value, **kwargs: Any) -> Tangent:
    """``torch.linalg.inv``."""
    X = op.out.now
    return pass_solution(
        sweep, op, a, None, lambda sides: X @ sides, lambda sides: X.mT @ sides, lambda rows: rows
    )


def triangular_solution(
    sweep: Sweep,
    op: Op,
    a: Value,
    b: Value,
    *,
    upper: bool,
    left: bool = True,
    unitriangular: bool = False,
) -> Tangent:
    """``torch.linalg.solve_triangular`` from the left."""
    A = a.now

    def part(rows: Tensor) -> Tensor:
        off = int(unitriangular)
        return rows.triu(off) if upper else rows.tril(-off)

    def triangle(M: Tensor, upper: bool) -> Solve:
        how = {"upper": upper, "unitriangular": unitriangular}
        return lambda sides: torch.linalg.solve_triangular(M, sides, **how)

    return pass_solution(sweep, op, a, b, triangle(A, upper), triangle(A.mT, not upper), part)


def cholesky(sweep: Sweep, op: Op, a: Value, **kwargs: Any) -> Tangent | None:
    """``L L^T = A``, L lower triangular.

    L1 = L F1 with F1 = phi(L^-1 A1 L^-T), where phi takes the lower triangle and half of the
    diagonal; likewise L2 = L F2 with F2 = phi(L^-1 A2 L^-T - 2 F1 F1^T).
    """
    t = sweep.tangent(a)
    if t is None:
        return None
    L, k = op.out.now, len(t.first)
    eye = torch.eye(L.shape[-1], dtype=L.dtype, device=L.device)
    phi = torch.ones_like(eye).tril() - eye / 2
    turned = torch.linalg.solve_triangular(L, eye, upper=False).mT  # L^-T
    A = (t.rows + t.rows.mT).mul_(0.5)  # autograd takes the symmetric part
    F = times_upper(times_upper(A, turned).mT, turned, below=True).mul_(phi)
    F1, groups = F[:k], t.second
    if sweep.order == 3:
        bent = times_upper(F1, F1.mT, below=True).mul_(-2 * phi)
        groups, F2 = add_rows([(t.first, bent), (t.second, F[k:])])
        F = torch.cat([F1, F2])
    delta = sweep.adjoint(op.out)
    if delta is not None:
        adjoint = (L.mT @ delta) * phi  # L^T delta_A L, twice its symmetric part
        work = times_lower(-(adjoint + adjoint.mT), F1, below=False)
        sweep.add_Hbar(t.first, t.first, gram(work, F1))
        if sweep.order == 3:
            sweep.add_D3(groups, 3 * dots(pick(t.first, work, groups), F[k:]))
    return Tangent(t.first, groups, times_lower(L, F)) if op.wanted else None


def times_upper(A: Tensor, B: Tensor, below: bool = False) -> Tensor:
    """Return ``A B`` for stacks A and upper triangular B, some columns at a time.

    ``below`` says that of the result only the lower triangle counts. Zeros are left out, which are
    up to two thirds of the products.
    """
    B = B.expand(A.shape)
    result = torch.zeros_like(A) if below else torch.empty_like(A)
    for a, b in some_columns(A.shape[-1]):
        start = a if below else 0
        result[..., start:, a:b] = A[..., start:, :b] @ B[..., :b, a:b]
    return result


def times_lower(A: Tensor, B: Tensor, below: bool = True) -> Tensor:
    """Return ``A B`` for stacks B of lower triangular matrices, likewise."""
    A = A.expand(B.shape)
    result = torch.zeros_like(B) if below else torch.empty_like(B)
    for a, b in some_columns(A.shape[-1]):
        start = a if below else 0
        result[..., start:, a:b] = A[..., start:, a:] @ B[..., a:, a:b]
    return result


def some_columns(n: int) -> list[tuple[int, int]]:
    """Return from where to where some columns of n are taken at a time.

    >>> some_columns(20), some_columns(150)
    ([(0, 20)], [(0, 50), (50, 100), (100, 150)])
    """
    parts = max(1, min(6, n // 50))
    cuts = [n * i // parts for i in range(parts + 1)]
    return list(pairwise(cuts))


def log_determinant(sweep: Sweep, op: Op, a: Value) -> Any:
    """``log |det A|``, with Z = A^-1 A1: y1 = tr Z1, y2 = tr (A^-1 A2 - Z1 Z1)."""
    t = sweep.tangent(a)
    if t is None:
        return None
    Z = torch.linalg.inv(a.now) @ t.rows
    k = len(t.first)
    Z1, turned = Z[:k], Z[:k].mT
    result = Tangent(t.first, (), _trace(Z1))
    if sweep.order == 3:
        squares = -(Z1 * turned).sum((-2, -1))
        groups, rows = add_rows([(t.second, _trace(Z[k:])), (t.first, squares)])
        result = join((t.first, _trace(Z1)), (groups, rows))
    y = op.outputs[-1]  # behind the sign
    delta = None if y is None else sweep.adjoint(y)
    if delta is not None:
        work = turned * -delta[..., None, None]
        sweep.add_Hbar(t.first, t.first, gram(work, Z1))
        if sweep.order == 3:  # delta (2 tr Z1^3 - 3 tr Z1 Z2)
            sweep.add_D3(t.first, -2 * dots(work, Z1 @ Z1))
            if t.second:
                sweep.add_D3(t.second, 3 * dots(pick(t.first, work, t.second), Z[k:]))
    return [None, result] if len(op.outputs) == 2 else result


def _trace(rows: Tensor) -> Tensor:
    return rows.diagonal(dim1=-2, dim2=-1).sum(-1)


SOLVES: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(["inverse", "linalg_inv"], inverse),
    "linalg_solve": solution,
    "linalg_solve_triangular": triangular_solution,
    "linalg_cholesky": cholesky,
    "logdet": log_determinant,
    **dict.fromkeys(["slogdet", "linalg_slogdet"], log_determinant),
}
