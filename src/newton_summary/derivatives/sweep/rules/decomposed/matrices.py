"""Matrices: products in all their forms, systems of linear equations, Cholesky factors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from string import ascii_letters
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def plus(product: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """Return how to record ``beta input + alpha product(a, b)``."""

    def add(input: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
        return torch.add(input if beta == 1 else input * beta, product(a, b), alpha=alpha)

    return add


def contract(equation: str, operands: Sequence[Tensor]) -> Tensor:
    """``torch.einsum`` below its Python part."""
    result: Tensor = torch._C._VariableFunctions.einsum(equation, operands)  # type: ignore[attr-defined]
    return result


def outer(a: Tensor, b: Tensor) -> Tensor:
    """``a b^T``."""
    return a[:, None] * b[None, :]


def inner(a: Tensor, b: Tensor) -> Tensor:
    """Sum over the last dimension of both."""
    if a.dim() == 0 or b.dim() == 0:
        return a * b
    return tensordot(a, b, [-1], [-1])


def tensordot(a: Tensor, b: Tensor, dims_a: Sequence[int], dims_b: Sequence[int]) -> Tensor:
    """Sum over pairs of dimensions."""
    in_a = list(ascii_letters[: a.dim()])
    in_b = list(ascii_letters[a.dim() : a.dim() + b.dim()])
    for i, j in zip(dims_a, dims_b, strict=True):
        in_b[j] = in_a[i]
    output = [c for c in (*in_a, *in_b) if (c in in_a) != (c in in_b)]
    return contract(f"{''.join(in_a)},{''.join(in_b)}->{''.join(output)}", [a, b])


def chain_matmul(*matrices: Any) -> Tensor:
    """The product of several matrices, which may also come as one list."""
    listed = matrices[0] if isinstance(matrices[0], Sequence) else matrices
    product: Tensor = functools.reduce(torch.matmul, listed)
    return product


def kron(a: Tensor, b: Tensor) -> Tensor:
    """The product of every entry of a with the whole of b."""
    n = max(a.dim(), b.dim())
    a, b = (x.reshape((1,) * (n - x.dim()) + tuple(x.shape)) for x in (a, b))
    for d in range(n):
        a, b = a.unsqueeze(2 * d + 1), b.unsqueeze(2 * d)
    return (a * b).reshape([a.shape[2 * d] * b.shape[2 * d + 1] for d in range(n)])


def cross(a: Tensor, b: Tensor, dim: int | None = None) -> Tensor:
    """The vector product, along a dimension of length three."""
    if dim is None:
        dim = next(d for d, n in enumerate(a.shape) if n == 3)
    return a.roll(-1, dim) * b.roll(-2, dim) - a.roll(-2, dim) * b.roll(-1, dim)


def einsum(equation: str, *operands: Any, path: Any = None) -> Any:
    """Write an equation out, and contract more than two operands pair by pair."""
    tensors = operands[0] if isinstance(operands[0], Sequence) else operands
    written = _written_out(equation.replace(" ", ""), tensors)
    inputs, _, output = written.partition("->")
    letters = inputs.split(",")
    for i, some in enumerate(letters):
        twice = next((c for c in some if some.count(c) > 1), None)
        if twice is not None:  # a diagonal
            first = some.index(twice)
            second = some.index(twice, first + 1)
            letters[i] = some[:first] + some[first + 1 : second] + some[second + 1 :] + twice
            taken = [*tensors[:i], tensors[i].diagonal(0, first, second), *tensors[i + 1 :]]
            return contract(f"{','.join(letters)}->{output}", taken)
    expanded = _of_equal_lengths(letters, tensors)
    if len(tensors) > 2:
        later = set("".join(letters[2:]) + output)
        kept = "".join(c for c in dict.fromkeys(letters[0] + letters[1]) if c in later)
        pair = contract(f"{letters[0]},{letters[1]}->{kept}", expanded[:2])
        return contract(f"{','.join([kept, *letters[2:]])}->{output}", [pair, *expanded[2:]])
    if written == equation and all(x is y for x, y in zip(expanded, operands[0], strict=False)):
        return NotImplemented
    return contract(written, expanded)


def _of_equal_lengths(letters: list[str], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Expand dimensions of length one to the length that their letter has elsewhere."""
    lengths: dict[str, int] = {}
    for some, x in zip(letters, tensors, strict=True):
        for c, n in zip(some, x.shape, strict=True):
            lengths[c] = n if lengths.get(c, 1) == 1 else lengths[c]
    shapes = [torch.Size(lengths[c] for c in some) for some in letters]
    return [
        x if x.shape == shape else x.expand(shape) for x, shape in zip(tensors, shapes, strict=True)
    ]


def _written_out(equation: str, operands: Sequence[Tensor]) -> str:
    """Replace dots by letters, and add the output if it is omitted."""
    inputs, arrow, output = equation.partition("->")
    if "..." not in equation and arrow:
        return equation
    letters = inputs.split(",")
    used = set(equation) - set(".,->")
    free = [c for c in "zyxwvutsrqponmlkjihgfedcbaZYXWVUTSRQPONMLKJIHGFEDCBA" if c not in used]
    counts = [
        t.dim() - len(some.replace("...", "")) if "..." in some else 0
        for some, t in zip(letters, operands, strict=True)
    ]
    most = max(counts, default=0)
    dots = "".join(free[:most])
    written = [
        some.replace("...", dots[most - n :]) for some, n in zip(letters, counts, strict=True)
    ]
    if not arrow:
        joined = "".join(letters).replace(".", "")
        output = ("..." if most else "") + "".join(
            sorted(c for c in set(joined) if joined.count(c) == 1)
        )
    return f"{','.join(written)}->{output.replace('...', dots)}"


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


def addmm(c: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """c + a b, as a layer where c is a bias: so the first models of Transformers write theirs."""
    is_bias = c.dim() == 1 and len(c) == b.shape[1] and beta == alpha == 1
    if is_bias and a.layout == b.layout == torch.strided:
        return F.linear(a, b.t(), c)
    return plus(torch.matmul)(c, a, b, beta=beta, alpha=alpha)


MATRICES: dict[str, Callable[..., Any]] = {
    "addmm": addmm,
    **dict.fromkeys(["addmv", "baddbmm"], plus(torch.matmul)),
    "addbmm": plus(lambda a, b: torch.matmul(a, b).sum(0)),
    "addr": plus(outer),
    **dict.fromkeys(["outer", "ger"], outer),
    "inner": inner,
    "linalg_vecdot": lambda a, b, *, dim=-1: (a * b).sum(dim),
    "tensordot": tensordot,
    **dict.fromkeys(["linalg_multi_dot", "chain_matmul"], chain_matmul),
    "kron": kron,
    "cross": cross,
    "linalg_cross": lambda a, b, *, dim=-1: cross(a, b, dim),
    "einsum": einsum,
    "linalg_solve": solve,
    "linalg_solve_triangular": solve_triangular,
    "triangular_solve": triangular_solve,
    "cholesky": lambda A, upper=False: torch.linalg.cholesky(A, upper=upper),
    "linalg_cholesky": lambda A, *, upper=False: (
        torch.linalg.cholesky(A).mT if upper else NotImplemented
    ),
    "linalg_cholesky_ex": cholesky_ex,
    "cholesky_solve": cholesky_solve,
    "cholesky_inverse": cholesky_inverse,
}
