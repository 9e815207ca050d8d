"""Systems of linear equations, Cholesky factors and determinants.

They are given by equations that are bilinear: A X = B, or L L^T = A. Along a group

    A X1_s = B1_s - A1_s X           A X2_s = B2_s - A2_s X - 2 A1_s X1_s

and with the adjoint of B, Lambda = A^-T delta, what is curved contributes as the product A X with
the adjoint -Lambda would.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from newton_summary.derivatives.sweep.rules.products import contribute
from newton_summary.derivatives.sweep.tape import (
    Op,
    Sweep,
    Tangent,
    Value,
    add_up,
    dots,
    gram,
    lift,
    pick,
)

Solve = Callable[[Tensor], Tensor]  # right-hand sides (..., n, m) -> A^-1 of them


def solver(A: Tensor, columns: int) -> tuple[Solve, Solve]:
    """Return how to multiply by A^-1, and by A^-T.

    Args:
        A: The matrix, or several.
        columns: How many right-hand sides there will be. Products with the inverse are faster for
            as many as A has itself; for less than that it costs more to compute than the factors.
    """
    if columns >= A.shape[-1]:
        return by_inverse(torch.linalg.inv(A))
    solve = partial(torch.linalg.lu_solve, *torch.linalg.lu_factor(A))
    return solve, partial(solve, adjoint=True)


def by_inverse(inverse: Tensor) -> tuple[Solve, Solve]:
    """Return how to multiply by an inverse, and by its transpose."""
    return lambda sides: inverse @ sides, lambda sides: inverse.mT @ sides


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
    part: Callable[[Tensor], Tensor] = lambda rows: rows,
) -> Tangent:
    """Pass ``X = A^-1 B``, given how to multiply by A^-1 and by A^-T.

    ``part`` returns the part of A that counts, such as its upper triangle.
    """
    X = op.out.now
    A, B = sweep.tangent(a), sweep.tangent(b)
    first, second = [], []
    if B is not None:
        B = B.map(lambda rows: lift(rows, X.dim()).expand(len(rows), *X.shape))
        first.append((B.first, B.y1))
        second.append((B.second, B.y2))
    if A is not None:
        A = A.map(lambda rows: part(lift(rows, X.dim())))
        first.append((A.first, -times(A.y1, X)))
        second.append((A.second, -times(A.y2, X)))
    sides = add_up(first, (), X)
    assert sides is not None
    result = sides.map(lambda rows: side_by_side(solve, rows))
    if sweep.order == 3:
        if A is not None:
            X1 = pick(result.first, result.y1, A.first)
            second.append((A.first, -2 * times(A.y1, X1)))
        sides = add_up(second, (), X)
        if sides is not None:
            rows = torch.cat([result.rows, side_by_side(solve, sides.rows)])
            result = Tangent(result.first, sides.first, rows)
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
    return pass_solution(sweep, op, a, b, *solver(a.now, rows * op.out.tensor.shape[-1]))


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
    solve = partial(torch.linalg.solve_triangular, unitriangular=unitriangular)
    solvers = partial(solve, A, upper=upper), partial(solve, A.mT, upper=not upper)
    return pass_solution(sweep, op, a, b, *solvers, lambda rows: rows * part)


def cholesky(sweep: Sweep, op: Op, a: Value, **kwargs: Any) -> Tangent | None:
    """``L L^T = A``, L lower triangular.

    L1 L^T + L L1^T = A1 and L2 L^T + L L2^T = A2 - 2 L1 L1^T. What is curved contributes as the
    product L L^T would with the adjoint of -A.
    """
    L, t = op.out.now, sweep.known(a)
    t = t.completed() if sweep.order == 3 else t
    result = t.map(lambda rows: factor_tangents(L, rows, len(t.first)))
    delta = sweep.adjoint(op.out)
    if delta is not None:
        twice = (L.mT @ delta).tril()
        twice = twice.tril(-1).mT + twice  # L^T (2 delta_A) L
        half = torch.linalg.solve_triangular(L.mT, twice, upper=True)
        adjoint = torch.linalg.solve_triangular(L.mT, half.mT, upper=True)
        work = torch.zeros_like(result.y1)  # its lower triangle: that of L1 is all there is
        for columns in few_parts(L.shape[-1], 100):
            rest = slice(columns.start, None)
            work[..., rest, columns] = -adjoint[..., rest, rest] @ result.y1[..., rest, columns]
        sweep.add_Hbar(t.first, t.first, gram(work, result.y1))
        if sweep.order == 3:
            sweep.add_D3(t.first, 3 * dots(work, result.y2))
    return result if op.wanted else None


def factor_tangents(L: Tensor, rows: Tensor, k: int) -> Tensor:
    """Return k rows of L1, and others of L2, given those of A1 and A2: some columns at a time."""
    result = torch.zeros_like(rows)
    L1, L2, each = result[:k], result[k:], L.expand(rows.shape)
    for some in few_parts(L.shape[-1], 50):
        before, upto, rest = slice(some.start), slice(some.stop), slice(some.start, None)
        sides = (rows[..., rest, some] + rows[..., some, rest].mT).mul_(0.5)  # as autograd does
        sides -= result[..., rest, before] @ each[..., some, before].mT
        sides -= each[..., rest, before] @ result[..., some, before].mT
        solve = columns_solver(L[..., rest, some])
        L1[..., rest, some] = solve(sides[:k])
        if len(L2):
            sides[k:] -= 2 * L1[..., rest, upto] @ L1[..., some, upto].mT
            L2[..., rest, some] = solve(sides[k:])
    return result


def columns_solver(L: Tensor) -> Callable[[Tensor], Tensor]:
    """Return how to find columns of L1, from the diagonal on, if those before are zero."""
    n = L.shape[-1]
    eye = torch.eye(n, dtype=L.dtype, device=L.device)
    phi = torch.ones_like(eye).tril_() - eye / 2  # takes the lower triangle, half of the diagonal
    corner, below = L[..., :n, :], L[..., n:, :]
    inverse = torch.linalg.solve_triangular(corner, eye, upper=False)

    def solve(sides: Tensor) -> Tensor:
        shape = sides.shape[:-2]
        C, B, M = (x.expand(*shape, *x.shape[-2:]) for x in (corner, below, inverse))
        top = C @ (M @ sides[..., :n, :] @ M.mT).mul_(phi)
        return torch.cat([top, (sides[..., n:, :] - B @ top.mT) @ M.mT], -2)

    return solve


def few_parts(n: int, length: int) -> list[slice]:
    """Cut n rows or columns into at most six parts of this length or longer.

    >>> few_parts(20, 50), few_parts(150, 50)
    ([slice(0, 20, None)], [slice(0, 50, None), slice(50, 100, None), slice(100, 150, None)])
    """
    parts = max(1, min(6, n // length))
    return [slice(n * i // parts, n * (i + 1) // parts) for i in range(parts)]


def log_determinant(sweep: Sweep, op: Op, a: Value) -> Any:
    """``log |det A|``, with Z = A^-1 A1: y1 = tr Z1, y2 = tr (A^-1 A2 - Z1 Z1)."""
    t = sweep.known(a)
    Z = torch.linalg.inv(a.now) @ t.rows
    k = len(t.first)
    Z1, turned = Z[:k], Z[:k].mT
    first, second = _trace(Z1), []
    if sweep.order == 3:
        second = [(t.second, _trace(Z[k:])), (t.first, -(Z1 * turned).sum((-2, -1)))]
    result = add_up([(t.first, first)], second, first[0])
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
    **dict.fromkeys(
        ["inverse", "linalg_inv"],
        lambda sweep, op, a, **kwargs: pass_solution(sweep, op, a, None, *by_inverse(op.out.now)),
    ),
    "linalg_solve": solution,
    "linalg_solve_triangular": triangular_solution,
    "linalg_cholesky": cholesky,
    "logdet": log_determinant,
    **dict.fromkeys(["slogdet", "linalg_slogdet"], log_determinant),
}
