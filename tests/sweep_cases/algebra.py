"""Complex numbers and linear algebra."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

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
    "view_as_complex of a part",
    lambda x: torch.view_as_complex(x[:, :2].contiguous()).angle(),
    (3, 3),
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
COMPLEX: dict[str, Callable[[Tensor], Tensor]] = {  # of a tensor (2, 4), and back to real numbers
    "fft2": lambda x: torch.fft.ifft2(torch.fft.fft2(x)).real,
    "fftn": lambda x: torch.fft.ifftn(torch.fft.fftn(x)).real,
    "ifft": lambda x: torch.fft.ifft(x).imag,
    "rfft2": lambda x: torch.fft.irfft2(torch.fft.rfft2(x)),
    "rfftn": lambda x: torch.fft.irfftn(torch.fft.rfftn(x)),
    "hfft": lambda x: torch.fft.hfft(torch.fft.ihfft(x), n=4),
    "fftshift": lambda x: torch.fft.ifftshift(torch.fft.fftshift(x, 1)),
    "complex": lambda x: torch.view_as_real(torch.complex(x[0], x[1]).conj().resolve_conj()),
    "conj": lambda x: torch.complex(x[0], x[1]).conj_physical().conj().imag.resolve_neg(),
    "complex product": lambda x: torch.view_as_real(torch.fft.fft(x[0]) * torch.fft.fft(x[1])),
    "complex shapes": lambda x: torch.fft.fft(x).reshape(2, 2, 2).mT.flip(0).sum(1)[0].real,
    "complex matrix": lambda x: (torch.fft.fft(x) @ torch.fft.fft(x).mH).real,
    "complex square": lambda x: torch.fft.fft(x).square().real,
    "power spectrum": lambda x: torch.fft.rfft(x).abs().square(),
    "spectral convolution": lambda x: torch.fft.irfft(torch.fft.rfft(x[0]) * torch.fft.rfft(x[1])),
}
for name, operation in COMPLEX.items():
    mixed = name in ("complex product", "spectral convolution")
    generic = {"complex matrix": "matmul", "complex square": "square", "power spectrum": "abs"}
    case(name, operation, (2, 4), generic="mul" if mixed else generic.get(name, ""))
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
