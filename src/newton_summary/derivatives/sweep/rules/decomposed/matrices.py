"""Systems of linear equations and Cholesky factors in all their forms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def solve(A: Tensor, B: Tensor, *, left: bool = True) -> Any:
    """``torch.linalg.solve``: vectors become matrices, and from the right is from the left."""
    if B.dim() == 1 or (A.dim() - 1 == B.dim() and B.shape == A.shape[:-1]):
        return torch.linalg.solve(A, B.unsqueeze(-1), left=left).squeeze(-1)
    return NotImplemented if left else torch.linalg.solve(A.mT, B.mT).mT


def solve_triangular(
    A: Tensor, B: Tensor, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> Any:
    """``torch.linalg.solve_triangular``, from the left."""
    if left:
        return NotImplemented
    X = torch.linalg.solve_triangular(A.mT, B.mT, upper=not upper, unitriangular=unitriangular)
    return X.mT


def triangular_solve(
    B: Tensor, A: Tensor, upper: bool = True, transpose: bool = False, unitriangular: bool = False
) -> tuple[Tensor, Tensor]:
    """``torch.triangular_solve``."""
    M, upper = (A.mT, not upper) if transpose else (A, upper)
    X = torch.linalg.solve_triangular(M, B, upper=upper, unitriangular=unitriangular)
    return X, A.clone()


def cholesky(A: Tensor, upper: bool = False) -> Any:
    """``torch.cholesky``."""
    return torch.linalg.cholesky(A, upper=upper)


def linalg_cholesky(A: Tensor, *, upper: bool = False) -> Any:
    """``torch.linalg.cholesky``: the upper factor is the lower one, transposed."""
    return torch.linalg.cholesky(A).mT if upper else NotImplemented


def cholesky_ex(
    A: Tensor, *, upper: bool = False, check_errors: bool = False
) -> tuple[Tensor, Tensor]:
    """``torch.linalg.cholesky_ex``, where there is a factor."""
    _, info = torch.linalg.cholesky_ex(A.detach(), check_errors=check_errors)
    return torch.linalg.cholesky(A, upper=upper), info


def cholesky_solve(B: Tensor, L: Tensor, upper: bool = False) -> Any:
    """Solve ``L L^T X = B``, or ``L^T L X = B`` of an upper triangle."""
    lower = L.mT if upper else L
    half = torch.linalg.solve_triangular(lower, B, upper=False)
    return torch.linalg.solve_triangular(lower.mT, half, upper=True)


def cholesky_inverse(L: Tensor, upper: bool = False) -> Any:
    """The inverse of the matrix whose Cholesky factor is L."""
    eye = torch.eye(L.shape[-1], dtype=L.dtype, device=L.device)
    return cholesky_solve(eye, L, upper)


MATRICES: dict[str, Callable[..., Any]] = {
    "linalg_solve": solve,
    "linalg_solve_triangular": solve_triangular,
    "triangular_solve": triangular_solve,
    "cholesky": cholesky,
    "linalg_cholesky": linalg_cholesky,
    "linalg_cholesky_ex": cholesky_ex,
    "cholesky_solve": cholesky_solve,
    "cholesky_inverse": cholesky_inverse,
}
