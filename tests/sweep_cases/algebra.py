"""Complex numbers and linear algebra."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from newton_summary.derivatives.sweep.rules.elementwise import HOLOMORPHIC
from sweep_cases.functions import FUNCTIONS
from sweep_cases.table import (
    case,
    layer,
    numbers,
    positive,
)

# --- complex numbers, linear algebra --------------------------------------------------------------

case("fft", lambda x: torch.fft.rfft(x).abs(), (2, 4), domain=positive)
case("fft and back", lambda x: torch.fft.irfft(torch.fft.rfft(x) * (1 + 0.5j), n=4), (2, 4))
case("fft, real and imaginary", lambda x: torch.fft.fft(x).real * torch.fft.fft(x).imag, (2, 4))
case("view_as_complex", lambda x: torch.view_as_complex(x).angle(), (3, 2), domain=positive)
case(
    "view_as_complex of a part",
    lambda x: torch.view_as_complex(x[:, :2].contiguous()).angle(),
    (3, 3),
    domain=positive,
)
case("polar", lambda a, b: torch.view_as_real(torch.polar(a, b)), (3,), (3,), domain=positive)
case("atan2 in all quadrants", lambda x: torch.arctan2(x[0] + 0.1, x[1] - 0.1), (2, 5))
case("angle of a real number", lambda x: torch.angle(x) + x * x, (3,), generic="angle")


def pair(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return two rows of complex numbers."""
    return torch.complex(x[0], x[1] + 0.3), torch.complex(x[1] - 1.4, x[0])


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
    "power spectrum": lambda x: torch.fft.rfft(x).abs().square(),
    "spectral convolution": lambda x: torch.fft.irfft(torch.fft.rfft(x[0]) * torch.fft.rfft(x[1])),
    "complex quotient": lambda x: torch.view_as_real(pair(x)[0] / pair(x)[1]),
    "complex over real": lambda x: (pair(x)[0] / (3 + x[0])).imag,
    "real over complex": lambda x: (x[0] / pair(x)[1]).real,
    "complex times real": lambda x: torch.view_as_real(pair(x)[0] * x[1] * (2 - 0.5j)),
    "complex einsum": lambda x: torch.einsum("i,j,j->i", *pair(x), pair(x)[0]).imag,
    "complex dot": lambda x: torch.dot(*pair(x)).real,
    "complex outer product": lambda x: torch.view_as_real(torch.outer(*pair(x))),
    "complex linear": lambda x: F.linear(pair(x)[0], torch.outer(*pair(x))).imag,
    "complex norm": lambda x: torch.linalg.vector_norm(torch.outer(*pair(x)), dim=1),
    "complex norm 1": lambda x: torch.linalg.norm(pair(x)[0], 1),
    "complex power": lambda x: torch.view_as_real(pair(x)[1] ** 3 + pair(x)[1] ** 0.5),
    "complex exponent": lambda x: torch.view_as_real(pair(x)[1] ** pair(x)[0]),
    "complex zeros": lambda x: (torch.fft.rfft(x) * torch.tensor([1.0, 0.0, 1.0])).abs(),
    "complex angle of zero": lambda x: (pair(x)[0] * torch.tensor([0, 1, 1, 0])).angle(),
    "complex in place": lambda x: pair(x)[0].mul_(pair(x)[1]).exp_().real,
}
for name, operation in COMPLEX.items():
    case(name, operation, (2, 4))
for name in sorted(HOLOMORPHIC - {"pow"}):
    case(
        f"complex {name}",
        lambda x, f=FUNCTIONS[name]: torch.view_as_real(f(torch.complex(x[0] + 1.2, x[1] - 1.2))),
        (2, 3),
    )


class _Filter(nn.Module):
    """A complex factor of its own, in front or behind: it has fewer groups than the input."""

    def __init__(self, in_front: bool):
        super().__init__()
        self.pairs = nn.Parameter(torch.randn(3, 2))
        self.in_front = in_front

    def forward(self, x: Tensor) -> Tensor:
        factors = torch.view_as_complex(self.pairs), torch.fft.rfft(x)
        product = torch.mul(*factors if self.in_front else factors[::-1])
        return torch.fft.irfft(product, n=4)


layer("complex factor in front", lambda: _Filter(True), (2, 4))
layer("complex factor behind", lambda: _Filter(False), (2, 4))
case("complex vdot", lambda x: torch.vdot(*pair(x)).real, (2, 4), generic="vdot")
case("complex sgn", lambda x: torch.view_as_real(pair(x)[1].sgn()), (2, 4), generic="sgn")


def regular(x: Tensor) -> Tensor:
    """Return regular matrices."""
    return x + 2 * torch.eye(x.shape[-1])


def definite(x: Tensor) -> Tensor:
    """Return positive definite matrices."""
    return x @ x.mT + torch.eye(x.shape[-1])


def lower(x: Tensor) -> Tensor:
    """Return lower triangular matrices."""
    return (x + 2 * torch.eye(x.shape[-1])).tril()


ONE, SOME, SIDES = (3, 3), (2, 3, 3), (3, 2)
case("inverse", lambda x: torch.linalg.inv(regular(x)) + torch.inverse(regular(x)), ONE)
case("inverses", lambda x: torch.linalg.inv(regular(x)), SOME)
case("as many inverses as rows", lambda x: torch.linalg.inv(regular(x)), (2, 2, 2))
case("solve", lambda x, y: torch.linalg.solve(regular(x), y), ONE, SIDES)
case("solve for several matrices", lambda x, y: torch.linalg.solve(regular(x), y), SOME, SIDES)
case("solve for several sides", lambda x, y: torch.linalg.solve(regular(x), y), ONE, (2, 3, 2))
case("solve for a vector", lambda x, y: torch.linalg.solve(regular(x), y), SOME, (3,))
case("solve for vectors", lambda x, y: torch.linalg.solve(regular(x), y), SOME, (2, 3))
case(
    "solve from the right",
    lambda x, y: torch.linalg.solve(regular(x), y.mT, left=False),
    ONE,
    SIDES,
)
case("solve a constant system", lambda y: torch.linalg.solve(regular(numbers(3, 3)), y), SIDES)
for upper in (True, False):
    for unit in (True, False):
        case(
            f"solve_triangular {upper} {unit}",
            lambda x, y, u=upper, one=unit: torch.linalg.solve_triangular(
                regular(x), y, upper=u, left=True, unitriangular=one
            ),
            SOME,
            SIDES,
        )
    case(
        f"solve_triangular {upper} from the right",
        lambda x, y, u=upper: torch.linalg.solve_triangular(regular(x), y.mT, upper=u, left=False),
        ONE,
        SIDES,
    )
    case(
        f"triangular_solve {upper}",
        lambda x, y, u=upper: torch.triangular_solve(y, regular(x), upper=u, transpose=u)[0],
        ONE,
        SIDES,
    )
    case(f"cholesky {upper}", lambda x, u=upper: torch.linalg.cholesky(definite(x), upper=u), SOME)
    case(
        f"cholesky_solve {upper}",
        lambda x, y, u=upper: torch.cholesky_solve(y, lower(x).mT if u else lower(x), upper=u),
        ONE,
        SIDES,
    )
    case(
        f"cholesky_inverse {upper}",
        lambda x, u=upper: torch.cholesky_inverse(lower(x).mT if u else lower(x), upper=u),
        ONE,
    )
case("cholesky of a lower triangle", lambda x: torch.cholesky(lower(x) + lower(x).mT), ONE)
case("cholesky_ex", lambda x: torch.linalg.cholesky_ex(definite(x))[0], ONE)
case("logdet", lambda x: torch.logdet(definite(x)), SOME)
case("slogdet", lambda x: torch.linalg.slogdet(regular(x))[1] + torch.slogdet(x)[1], SOME)
case("det", lambda x: torch.linalg.det(x + torch.eye(3)), (3, 3), generic="linalg_det")
case("eigvalsh", lambda x: torch.linalg.eigvalsh(x + x.T), (3, 3), generic="linalg_eigvalsh")
case("svdvals", lambda x: torch.linalg.svdvals(x), (3, 2), generic="linalg_svdvals")
case("matrix_exp", lambda x: torch.linalg.matrix_exp(x), (2, 2), generic="linalg_matrix_exp")
case(
    "matrix_power", lambda x: torch.linalg.matrix_power(x, 3), (2, 2), generic="linalg_matrix_power"
)
