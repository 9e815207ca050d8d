"""Systems of linear equations, Cholesky factors and determinants.

They are given by equations that are bilinear: A X = B, or L L^T = A. Along a group

    A X1_s = B1_s - A1_s X           A X2_s = B2_s - A2_s X - 2 A1_s X1_s

and with the adjoint of B, Lambda = A^-T delta, what is curved contributes as the product A X with
the adjoint -Lambda would.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from newton_summary.derivatives.sweep.rules.products import contribute
from newton_summary.derivatives.sweep.tape import (
    Op,
    Tangent,
    Value,
    add_rows,
    add_tangents,
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
        first.append((A.first, -times(A.y1, X)))
        second.append((A.second, -times(A.y2, X)))
    groups, sides = add_rows(first)
    X1 = side_by_side(solve, sides)
    result = Tangent(groups, (), X1)
    if sweep.order == 3:
        if A is not None:
            second.append((A.first, -2 * times(A.y1, pick(groups, X1, A.first))))
        if any(some for some, _ in second):
            more, sides = add_rows(second)
            result = join((groups, X1), (more, side_by_side(solve, sides)))
    delta = sweep.adjoint(op.out)
    if A is not None and delta is not None:
        contribute(sweep, result, A, -times(A.rows.mT, solve_transposed(delta)))
    return result


def times(A: Tensor, X: Tensor) -> Tensor:
    """Return ``A X`` for stacks; a CPU takes ten times as long for single columns as for rows."""
    if A.stride(-2) == 1:
        return (X.mT @ A.mT).mT
    alone = X.shape[-1] == 1 and X.dim() == A.dim()
    return (A * X.mT).sum(-1, keepdim=True) if alone else A @ X


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

    part, off = torch.ones_like(A), int(unitriangular)  # laid out in memory as A is
    part = part.triu_(off) if upper else part.tril_(-off)

    def triangle(M: Tensor, upper: bool) -> Solve:
        how = {"upper": upper, "unitriangular": unitriangular}
        return lambda sides: torch.linalg.solve_triangular(M, sides, **how)

    solve, transposed = triangle(A, upper), triangle(A.mT, not upper)
    return pass_solution(sweep, op, a, b, solve, transposed, lambda rows: rows * part)


def cholesky(sweep: Sweep, op: Op, a: Value, **kwargs: Any) -> Tangent | None:
    """``L L^T = A``, L lower triangular.

    L1 = L F1 with F1 = phi(L^-1 A1 L^-T), where phi takes the lower triangle and half of the
    diagonal; likewise L2 = L F2 with F2 = phi(L^-1 A2 L^-T - 2 F1 F1^T).
    """
    t = sweep.tangent(a)
    if t is None:
        return None
    L = op.out.now
    eye = torch.eye(L.shape[-1], dtype=L.dtype, device=L.device)
    phi = torch.ones_like(eye).tril() - eye / 2
    inverse = torch.linalg.solve_triangular(L, eye, upper=False)
    f = t.map(lambda rows: both_sides(inverse, rows).mul_(phi))
    F1 = f.y1
    if sweep.order == 3:
        bent = lower(F1, F1.mT, lambda rows, columns: slice(columns.stop)).mul_(-2 * phi)
        f = add_tangents([f, Tangent((), t.first, bent)])
    delta = sweep.adjoint(op.out)
    if delta is not None:
        adjoint = (L.mT @ delta) * phi  # L^T delta_A L, twice its symmetric part
        work = lower(-(adjoint + adjoint.mT), F1, lambda rows, columns: slice(columns.start, None))
        sweep.add_Hbar(t.first, t.first, gram(work, F1))
        if sweep.order == 3:
            sweep.add_D3(f.second, 3 * dots(pick(t.first, work, f.second), f.y2))
    if not op.wanted:
        return None
    return f.map(lambda F: lower(L, F, lambda rows, columns: slice(columns.start, rows.stop)))


def both_sides(M: Tensor, rows: Tensor) -> Tensor:
    """Return the lower triangle of ``M A M^T`` for the symmetric parts A of rows, M triangular."""
    A = (rows + rows.mT).mul_(0.5)  # autograd takes the symmetric part
    result = torch.zeros_like(A)
    M = M.expand(A.shape)
    for some in few_parts(M.shape[-1], 50):
        left = (..., some, slice(some.stop))
        corner = (..., slice(some.stop), slice(some.stop))
        result[left] = M[left] @ A[corner] @ M[corner].mT
    return result


def lower(A: Tensor, B: Tensor, inner: Callable[[slice, slice], slice]) -> Tensor:
    """Return the lower triangle of ``A B`` for a stack B, some rows and columns at a time.

    ``inner(rows, columns)`` says which products are not zero, so that the others are left out.
    """
    A = A.expand(B.shape)
    result = torch.zeros_like(B)
    parts = few_parts(B.shape[-1], 100)
    for i, rows in enumerate(parts):
        for columns in parts[: i + 1]:
            some = inner(rows, columns)
            result[..., rows, columns] = A[..., rows, some] @ B[..., some, columns]
    return result


def few_parts(n: int, length: int) -> list[slice]:
    """Cut n rows or columns into at most six parts of this length or longer.

    >>> few_parts(20, 50), few_parts(150, 50)
    ([slice(0, 20, None)], [slice(0, 50, None), slice(50, 100, None), slice(100, 150, None)])
    """
    parts = max(1, min(6, n // length))
    return [slice(n * i // parts, n * (i + 1) // parts) for i in range(parts)]


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
