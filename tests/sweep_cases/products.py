"""Products, Python operators, convolutions."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from sweep_cases.table import (
    case,
    layer,
    numbers,
    positive,
)

# --- products -------------------------------------------------------------------------------------

layer("Linear", lambda: nn.Linear(4, 3), (5, 4))
layer("Linear without bias", lambda: nn.Linear(4, 3, bias=False), (2, 3, 4))
case("F.linear of a vector", F.linear, (4,), (3, 4), (3,))
case("F.linear to one number", lambda x, w: F.linear(x, w), (2, 4), (4,))
layer("Bilinear", lambda: nn.Bilinear(3, 2, 4), (5, 3), (5, 2))

MATMUL = {
    "matrices": ((2, 3), (3, 4)),
    "vectors": ((3,), (3,)),
    "matrix and vector": ((2, 3), (3,)),
    "vector and matrix": ((3,), (3, 4)),
    "batches": ((2, 3, 4), (2, 4, 2)),
    "batch and matrix": ((2, 3, 4), (4, 2)),
    "matrix and batch": ((3, 4), (2, 4, 2)),
    "batch and vector": ((2, 3, 4), (4,)),
    "vector and batch": ((4,), (2, 4, 2)),
    "broadcast batches": ((2, 1, 3, 4), (3, 4, 2)),
    "broadcast both": ((2, 1, 2, 3), (1, 3, 3, 2)),
}
for what, shapes in MATMUL.items():
    case(f"matmul of {what}", torch.matmul, *shapes)
case("matmul with a constant", lambda a: a @ numbers(3, 2), (2, 3))
case("matmul of more groups", lambda a, b, c: a @ (b * c), (2, 3, 4), (4,), (4,))
case("matmul of a constant", lambda a: numbers(4, 2) @ a, (2, 3))
case("@", lambda a, b: a @ b, (2, 3), (3, 4))
case("matmul of a matrix with itself", lambda a: a @ a, (3, 3))
case("mm", torch.mm, (2, 3), (3, 4))
case("bmm", torch.bmm, (2, 2, 3), (2, 3, 2))
case("mv", torch.mv, (2, 3), (3,))
case("dot", torch.dot, (3,), (3,))
case("vdot", torch.vdot, (3,), (3,))
case("inner of vectors", torch.inner, (3,), (3,))
case("inner of matrices", torch.inner, (2, 3), (4, 3))
case("linalg.vecdot", torch.linalg.vecdot, (2, 3), (2, 3))
case("linalg.matmul", torch.linalg.matmul, (2, 3), (3, 2))
case("linalg.multi_dot", lambda a, b, c: torch.linalg.multi_dot([a, b, c]), (2, 3), (3, 4), (4, 2))
case("chain_matmul", lambda a, b, c: torch.chain_matmul(a, b, c), (2, 3), (3, 4), (4, 2))
case("addmm", lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=2), (2, 4), (2, 3), (3, 4))
case("addmm, broadcast", lambda c, a, b: torch.addmm(c, a, b), (4,), (2, 3), (3, 4))
case("addmv", lambda c, a, b: torch.addmv(c, a, b, alpha=2), (2,), (2, 3), (3,))
case("addr", lambda c, a, b: torch.addr(c, a, b, beta=0.5, alpha=2), (2, 3), (2,), (3,))
case("baddbmm", lambda c, a, b: torch.baddbmm(c, a, b, beta=0.5), (2, 2, 4), (2, 2, 3), (2, 3, 4))
case("addbmm", lambda c, a, b: torch.addbmm(c, a, b, alpha=2), (2, 4), (2, 2, 3), (2, 3, 4))
case("outer", torch.outer, (3,), (4,))
case("kron", torch.kron, (2, 2), (2, 3))
case("tensordot", lambda a, b: torch.tensordot(a, b, ([0, 2], [1, 0])), (2, 3, 4), (4, 2, 2))
case("tensordot of one dimension", lambda a, b: torch.tensordot(a, b, 1), (2, 3), (3, 2))
case("tensordot of length one", lambda a, b: torch.tensordot(a, b, 1), (2, 1), (3, 2))
case("cross", lambda a, b: torch.cross(a, b, dim=-1), (2, 3), (2, 3))
case("linalg.cross", torch.linalg.cross, (2, 3), (2, 3))
case("cartesian_prod", torch.cartesian_prod, (2,), (3,))

EINSUM = {
    "ij->ji": ((2, 3),),
    "ii->i": ((3, 3),),
    "ii": ((3, 3),),
    "ijk->k": ((2, 3, 4),),
    "...ij->...ji": ((2, 2, 3),),
    "ij,jk->ik": ((2, 3), (3, 4)),
    "ij,jk": ((2, 3), (3, 4)),
    "ik,kj->ij": ((2, 3), (3, 4)),
    "bij,bjk->bik": ((2, 2, 3), (2, 3, 2)),
    "...ij,...jk->...ik": ((2, 2, 3), (3, 2)),
    "...i,...i": ((2, 3), (2, 3)),
    "ij,kl->ik": ((2, 3), (4, 2)),
    "i,j->ij": ((2,), (3,)),
    "i,i->": ((3,), (3,)),
    "i,->i": ((3,), ()),
    "bhqd,bhkd->bhqk": ((2, 2, 2, 3), (2, 2, 3, 3)),
    "iij,jk->ik": ((2, 2, 3), (3, 2)),
    "bii,bi->b": ((2, 3, 3), (2, 3)),
    "a b, b c -> a c": ((2, 3), (3, 2)),
    "i,j,k->ijk": ((2,), (2,), (3,)),
    "ij,jk,kl->il": ((2, 3), (3, 2), (2, 2)),
    "...a,abc,...c->...b": ((2, 3), (3, 2, 2), (2, 2)),
    "ij,jk,kl": ((2, 3), (3, 2), (2, 2)),
    "ab,bc,cd,da->": ((2, 3), (3, 2), (2, 2), (2, 2)),
    "ij,ij,ij->j": ((2, 3), (2, 3), (2, 3)),
}
for equation, shapes in EINSUM.items():
    case(f"einsum {equation}", lambda *x, e=equation: torch.einsum(e, *x), *shapes)
case("einsum with a list", lambda a, b: torch.einsum("ij,jk->ik", [a, b]), (2, 3), (3, 4))
case("einsum in sublists", lambda a, b: torch.einsum(a, [0, 1], b, [1, 2], [0, 2]), (2, 3), (3, 4))
case("einsum of length one", lambda a, b: torch.einsum("ij,ij->ij", a, b), (1, 3), (2, 3))
case("einsum with a constant", lambda a: torch.einsum("ij,jk->ki", a, numbers(3, 2)), (2, 3))
case("einsum of a matrix with itself", lambda a: torch.einsum("ij,kj->ik", a, a), (3, 3))

case("mul", torch.mul, (2, 3), (2, 3))
case("mul, broadcast", torch.mul, (2, 1, 3), (4, 1))
case("mul by one number", torch.mul, (2, 3), ())
case("mul by itself", lambda x: x * x, (2, 3))
case("mul by a constant", lambda x: x * numbers(4, 1, 3), (2, 3))
case("multiply", torch.multiply, (2, 3), (3,))
case("addcmul", lambda c, a, b: torch.addcmul(c, a, b, value=2), (2, 3), (3,), (2, 1))
case(
    "addcdiv",
    lambda c, a, b: torch.addcdiv(c, a, b, value=2),
    (2, 3),
    (3,),
    (2, 1),
    domain=positive,
)
case("div", torch.div, (2, 3), (3,), domain=positive)
case("true_divide", torch.true_divide, (2, 3), (2, 1), domain=positive)
case(
    "divide by a constant", lambda x: torch.divide(x, 3) + torch.true_divide(x, numbers(3)), (2, 3)
)
case("divide", torch.divide, (2, 3), (3,), domain=positive)
case("ger", torch.ger, (2,), (3,))
case("div by a constant", lambda x: x / positive(numbers(3).tanh()), (2, 3))
case("div of a constant", lambda x: numbers(2, 3) / x, (3,), domain=positive)
case("lerp", torch.lerp, (2, 3), (2, 3), (3,))
case("lerp by a number", lambda a, b: torch.lerp(a, b, 0.3), (2, 3), (2, 3))
layer("CosineSimilarity", lambda: nn.CosineSimilarity(-1), (3, 4), (3, 4))
layer("CosineSimilarity, broadcast", lambda: nn.CosineSimilarity(1), (3, 4), (1, 4))
layer("CosineSimilarity, broadcast twice", lambda: nn.CosineSimilarity(1), (1, 2, 3), (2, 1, 3))
layer("PairwiseDistance", lambda: nn.PairwiseDistance(), (3, 4), (3, 4))
layer("PairwiseDistance 3", lambda: nn.PairwiseDistance(3, keepdim=True), (3, 4), (3, 4))
case("cdist", torch.cdist, (2, 3), (4, 3))
case("pdist", F.pdist, (3, 2))

# --- Python operators -----------------------------------------------------------------------------

case("+", lambda a, b: a + b, (2, 3), (3,))
case("-", lambda a, b: a - b, (2, 3), (3,))
case("*", lambda a, b: a * b, (2, 3), (2, 1))
case("/", lambda a, b: a / b, (2, 3), (3,), domain=positive)
case("**", lambda a, b: a**b, (2, 3), (3,), domain=positive)
case("unary operators", lambda a: abs(-(+a)), (2, 3))
case("numbers on the right", lambda a: ((a + 1) * 2 - 3) / 4, (2, 3))
case("numbers on the left", lambda a: (3 - (2 * (1 + a))) + 0.5, (2, 3))
case("1 / x", lambda a: 1 / a, (2, 3), domain=positive)
case("2 ** x", lambda a: 2**a, (2, 3))
case("x ** 2", lambda a: a**2, (2, 3))
case("x ** 3", lambda a: a**3, (2, 3))
case("x ** 4", lambda a: a**4, (2, 3))
case("x ** 1", lambda a: a**1 + a**0, (2, 3))
case("x ** 2.5", lambda a: a**2.5, (2, 3), domain=positive)
case("x ** -1", lambda a: a**-1, (2, 3), domain=positive)
case("x ** 0.5", lambda a: a**0.5 + a.pow(-0.5), (2, 3), domain=positive)
case("x ** a constant", lambda a: a ** torch.tensor([1.0, 2.0, 3.5]), (2, 3), domain=positive)
case("a constant ** x", lambda a: torch.tensor([1.0, 2.0, 3.5]) ** a, (2, 3))
case("integers", lambda a: (torch.arange(3) * a + torch.ones(2, 1, dtype=torch.int64)) / 7, (2, 3))
case("integers, reflected", lambda a: torch.arange(3) - a / torch.arange(1, 4), (2, 3))
case("masks as factors", lambda a: a * (a > 0) + (a.abs() < 0.2) * 0.1, (2, 3))
case("tensors of one number", lambda a: a * torch.tensor(2.0) + torch.tensor(1), (2, 3))
case("add with alpha", lambda a, b: torch.add(a, b, alpha=2.5), (2, 3), (2, 1))
case("sub with alpha", lambda a, b: torch.sub(a, b, alpha=2), (2, 3), (3,))
case("subtract", torch.subtract, (2, 3), (3,))
case("rsub", lambda a, b: torch.rsub(a, b, alpha=2), (2, 3), (3,))
case("neg", lambda a: torch.neg(a) + torch.negative(a) + torch.positive(a), (2, 3))
case("float_power", lambda a: torch.float_power(a, 2.5), (2, 3), domain=positive)
case("remainder", lambda a: a % 0.3, (2, 3), generic="remainder")
case("fmod", lambda a: torch.fmod(a, 0.3), (2, 3), generic="fmod")
case("sum of a list", lambda a, b: sum([a, b, a * b]), (2, 3), (2, 3))

SPARSE = torch.tensor([[0.0, 2.0], [0.5, 0.0], [1.0, -1.0]]).double()
case("sparse @ matrix", lambda x: SPARSE.to_sparse() @ x, (2, 4))
case("sparse @ vector", lambda x: SPARSE.to_sparse() @ x, (2,))
case("sparse @ matrix, CSR", lambda x: torch.mm(SPARSE.to_sparse_csr(), x), (2, 4))
case("torch.sparse.mm", lambda x: torch.sparse.mm(SPARSE.to_sparse(), x), (2, 4))

# --- convolutions ---------------------------------------------------------------------------------

for n in (1, 2, 3):
    sizes = (5, 4, 3)[:n]
    Conv, Transposed = getattr(nn, f"Conv{n}d"), getattr(nn, f"ConvTranspose{n}d")
    layer(f"Conv{n}d", lambda C=Conv: C(2, 2, 2), (2, 2, *sizes))
    layer(f"Conv{n}d strided", lambda C=Conv: C(2, 2, 3, stride=2, padding=1), (2, 2, *sizes))
    layer(f"Conv{n}d dilated", lambda C=Conv: C(1, 2, 2, dilation=2), (2, 1, *sizes))
    layer(f"Conv{n}d grouped", lambda C=Conv: C(4, 2, 2, groups=2, bias=False), (1, 4, *sizes))
    layer(f"Conv{n}d depthwise", lambda C=Conv: C(2, 4, 2, groups=2), (1, 2, *sizes))
    layer(f"Conv{n}d same", lambda C=Conv: C(1, 2, 2, padding="same"), (1, 1, *sizes))
    layer(
        f"Conv{n}d same, dilated",
        lambda C=Conv: C(1, 1, 2, padding="same", dilation=2),
        (1, 1, *sizes),
    )
    layer(f"Conv{n}d valid", lambda C=Conv: C(1, 2, 2, padding="valid"), (1, 1, *sizes))
    for mode in ("circular", "reflect", "replicate"):
        layer(
            f"Conv{n}d {mode}",
            lambda C=Conv, m=mode: C(1, 1, 3, padding=1, padding_mode=m),
            (1, 1, *sizes),
        )
    layer(f"Conv{n}d without a batch", lambda C=Conv: C(2, 1, 2), (2, *sizes))
    layer(f"ConvTranspose{n}d", lambda C=Transposed: C(2, 2, 2), (2, 2, *sizes))
    layer(
        f"ConvTranspose{n}d strided",
        lambda C=Transposed: C(2, 1, 2, stride=2, padding=1, output_padding=1, dilation=2),
        (1, 2, *sizes),
    )
    layer(f"ConvTranspose{n}d grouped", lambda C=Transposed: C(2, 4, 2, groups=2), (1, 2, *sizes))
    layer(f"ConvTranspose{n}d without a batch", lambda C=Transposed: C(2, 1, 2), (2, *sizes))
case("conv2d of a constant", lambda w: F.conv2d(numbers(2, 1, 4, 4), w), (2, 1, 2, 2))
case("conv2d with a constant", lambda x: F.conv2d(x, numbers(1, 2, 2, 2)), (2, 2, 3, 3))
case(
    "conv2d with keywords",
    lambda x, w, b: F.conv2d(input=x, weight=w, bias=b, stride=(2, 1), padding=(1, 0)),
    (1, 1, 3, 4),
    (2, 1, 2, 2),
    (2,),
)
case("conv2d of a shared tensor", lambda x: F.conv2d(x, x), (2, 2, 3, 3))
case(
    "conv2d of no images",
    lambda x, w: torch.cat([x[1:].flatten(), F.conv2d(x[:0], w).flatten()]),
    *((2, 2, 3, 3), (1, 2, 2, 2)),
)
case(
    "torch.convolution",
    lambda x, w: torch.convolution(x, w, None, [1], [1], [1], False, [0], 1),
    (1, 1, 4),
    (2, 1, 2),
    generic="convolution",
)
case(
    "conv_tbc",
    lambda x, w, b: torch.conv_tbc(x, w, b, 1),
    (4, 1, 2),
    (2, 2, 3),
    (3,),
    generic="conv_tbc",
)
