"""Complex numbers and linear algebra."""

from __future__ import annotations

import torch

from sweep_cases.table import (
    case,
    positive,
)

# --- complex numbers, linear algebra --------------------------------------------------------------

case("fft", lambda x: torch.fft.rfft(x).abs(), (2, 4), domain=positive, generic="abs")
case(
    "fft and back",
    lambda x: torch.fft.irfft(torch.fft.rfft(x) * (1 + 0.5j), n=4),
    (2, 4),
    generic="mul",
)
case("fft, real and imaginary", lambda x: torch.fft.fft(x).real * torch.fft.fft(x).imag, (2, 4))
case(
    "view_as_complex",
    lambda x: torch.view_as_complex(x).angle(),
    (3, 2),
    domain=positive,
    generic="angle",
)
case(
    "polar",
    lambda a, b: torch.view_as_real(torch.polar(a, b)),
    (3,),
    (3,),
    domain=positive,
    generic="polar",
)
case("inverse", lambda x: torch.linalg.inv(x + 2 * torch.eye(3)), (3, 3), generic="linalg_inv")
case(
    "solve",
    lambda x, y: torch.linalg.solve(x + 2 * torch.eye(3), y),
    (3, 3),
    (3, 2),
    generic="linalg_solve",
)
case("det", lambda x: torch.linalg.det(x + torch.eye(3)), (3, 3), generic="linalg_det")
case(
    "slogdet",
    lambda x: torch.linalg.slogdet(x + 2 * torch.eye(3))[1],
    (3, 3),
    generic="linalg_slogdet",
)
case(
    "cholesky",
    lambda x: torch.linalg.cholesky(x @ x.T + torch.eye(3)),
    (3, 3),
    generic="linalg_cholesky",
)
case("eigvalsh", lambda x: torch.linalg.eigvalsh(x + x.T), (3, 3), generic="linalg_eigvalsh")
case("svdvals", lambda x: torch.linalg.svdvals(x), (3, 2), generic="linalg_svdvals")
case("matrix_exp", lambda x: torch.linalg.matrix_exp(x), (2, 2), generic="linalg_matrix_exp")
case(
    "matrix_power", lambda x: torch.linalg.matrix_power(x, 3), (2, 2), generic="linalg_matrix_power"
)
