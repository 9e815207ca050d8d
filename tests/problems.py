"""Tiny seeded problems in float64, and oracles that share no code with the package.

A problem is a model, a loss function and a batch; `PROBLEMS` makes fresh ones. Everything is small
enough for the full derivative of order 3, P^3 numbers.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from newton_summary import Partition, make_partition


@dataclass
class Problem:
    """A loss to be differentiated."""

    model: nn.Module
    loss_fn: Callable[[nn.Module, Any], Tensor]
    batch: Any

    @property
    def params(self) -> dict[str, Tensor]:
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def loss(self) -> Tensor:
        return self.loss_fn(self.model, self.batch)

    def direction(self, seed: int = 1) -> dict[str, Tensor]:
        """A random direction: not the gradient, which has properties of its own."""
        generator = torch.Generator().manual_seed(seed)
        return {
            name: torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype)
            for name, p in self.params.items()
        }


PROBLEMS: dict[str, Callable[[], Problem]] = {}


def problem(make: Callable[[], Problem]) -> Callable[[], Problem]:
    """List a function that makes a problem; its weights are then seeded and in float64."""

    @functools.wraps(make)
    def seeded() -> Problem:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            made = make()
            made.model.double()
            with torch.no_grad():  # norm layers start from the identity, and biases from zero
                for p in made.model.parameters():
                    p.add_(0.3 * torch.randn(p.shape, dtype=torch.float64))
        return made

    PROBLEMS[make.__name__] = seeded
    return seeded


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y)


def spoil_gradients(model, step):
    """Make gradients that are not finite at two steps of a training, and leave one out at two."""
    if step in (44, 65):
        model[0].weight.grad[0] = torch.nan
    if step in (51, 52):
        model[0].bias.grad = None


def squared_error(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return (model(x) - y).square().mean()


def labels(n: int, classes: int) -> Tensor:
    return torch.randint(classes, (n,))


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


# --- without norms -------------------------------------------------------------------------------


@problem
def mlp_cross_entropy() -> Problem:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
    return Problem(model, cross_entropy, (randn(7, 3), labels(7, 3)))


@problem
def mlp_squared_error() -> Problem:
    """The loss is quadratic in the last layer, so its D3 is zero."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Sigmoid(), nn.Linear(4, 3), nn.ELU(), nn.Linear(3, 2))
    return Problem(model, squared_error, (randn(6, 3), randn(6, 2)))


@problem
def convnet() -> Problem:
    model = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.GELU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, 3)
    )
    return Problem(model, cross_entropy, (randn(5, 1, 6, 6), labels(5, 3)))


class Quadratic(nn.Module):
    """theta^T A theta / 2, A positive definite: every third derivative is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(2, 2))
        self.b = nn.Parameter(torch.randn(3))
        self.c = nn.Parameter(torch.randn(()))
        root = torch.randn(8, 8)
        self.register_buffer("A", root @ root.T)

    def forward(self) -> Tensor:
        theta = torch.cat([self.a.flatten(), self.b, self.c.reshape(1)])
        return theta @ self.A @ theta / 2


@problem
def quadratic() -> Problem:
    return Problem(Quadratic(), lambda model, batch: model(), None)


class Rosenbrock(nn.Module):
    """sum of 100 (x_{i+1} - x_i^2)^2 + (1 - x_i)^2."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.tensor([-1.2, 1.0, 0.5, -0.3]))

    def forward(self) -> Tensor:
        x, y = self.x[:-1], self.x[1:]
        return (100 * (y - x**2) ** 2 + (1 - x) ** 2).sum()


@problem
def rosenbrock() -> Problem:
    return Problem(Rosenbrock(), lambda model, batch: model(), None)


class Transformer(nn.Module):
    """One pre-norm block with fused causal attention; the embedding is the output layer too."""

    def __init__(self, vocabulary: int = 4, length: int = 3, width: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(0.1 * torch.randn(length, width))
        self.norm = nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width, bias=False)
        self.project = nn.Linear(width, width)
        self.final = nn.LayerNorm(width, bias=False)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position
        q, k, v = self.attention(self.norm(x)).unsqueeze(1).chunk(3, -1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1)
        x = x + self.project(F.silu(mixed))
        return self.head(self.final(x)).transpose(1, 2)


@problem
def transformer() -> Problem:
    tokens = torch.randint(4, (4, 4))
    return Problem(Transformer(), cross_entropy, (tokens[:, :-1], tokens[:, 1:]))


# --- with each norm layer ------------------------------------------------------------------------


def norm_problem(name: str, norm: Callable[[], nn.Module], *, eval_mode: bool = False) -> None:
    """A convolution, a norm of 4 channels, and a linear layer, on (N, 1, 9) inputs."""

    def make() -> Problem:
        layers = nn.Sequential(
            nn.Conv1d(1, 4, 2), norm(), nn.Tanh(), nn.AvgPool1d(4), nn.Flatten(), nn.Linear(8, 2)
        )
        if eval_mode:
            layers(torch.randn(9, 1, 9))  # running statistics that are not the identity
            layers.eval()
        return Problem(layers, cross_entropy, (randn(6, 1, 9), labels(6, 2)))

    make.__name__ = name
    problem(make)


class ChannelsLast(nn.Module):
    """Apply a norm of the last dimension to dimension 1."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


class TwoDimensional(nn.Module):
    """Apply a norm of images to (N, C, L)."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.unsqueeze(2)).squeeze(2)


norm_problem("layer_norm", lambda: ChannelsLast(nn.LayerNorm(4)))
norm_problem("layer_norm_two_dims", lambda: nn.LayerNorm((4, 8), bias=False))
norm_problem("rms_norm", lambda: ChannelsLast(nn.RMSNorm(4)))
norm_problem("group_norm", lambda: nn.GroupNorm(2, 4))
norm_problem("instance_norm", lambda: nn.InstanceNorm1d(4, affine=True))
norm_problem("batch_norm_1d", lambda: nn.BatchNorm1d(4))
norm_problem("batch_norm_2d", lambda: TwoDimensional(nn.BatchNorm2d(4)))
norm_problem("batch_norm_1d_eval", lambda: nn.BatchNorm1d(4), eval_mode=True)
norm_problem("batch_norm_2d_eval", lambda: TwoDimensional(nn.BatchNorm2d(4)), eval_mode=True)
norm_problem("batch_norm_momentum_none", lambda: nn.BatchNorm1d(4, momentum=None))
norm_problem("batch_norm_no_affine", lambda: nn.BatchNorm1d(4, affine=False))
norm_problem("batch_norm_no_statistics", lambda: nn.BatchNorm1d(4, track_running_stats=False))


@problem
def weight_norm() -> Problem:
    """Torch's fused weight norm is wrong from order 2 on."""
    first = nn.utils.parametrizations.weight_norm(nn.Linear(3, 4))
    model = nn.Sequential(first, nn.Tanh(), nn.Linear(4, 2))
    return Problem(model, cross_entropy, (randn(7, 3), labels(7, 2)))


# --- partitions of any of them -------------------------------------------------------------------


def partition_specs(model: nn.Module) -> dict[str, Any]:
    """Return every kind of partition that makes sense for a model."""
    params = {n: p for n, p in model.named_parameters() if p.requires_grad}
    names = list(params)
    first = max(params, key=lambda name: params[name].numel())
    others = [name for name in names if name != first]
    half = params[first].shape[0] // 2
    specs: dict[str, Any] = {
        "canonical": "canonical",
        "trivial": "trivial",
        "weights-biases": "weights-biases",
        "discrete": "discrete",
        "index sets": {
            "head": [(first, slice(0, half))],
            "tail and all others": [(first, slice(half, None)), *others],
        },
        "lists": [names[::2], names[1::2]] if len(names) > 1 else [names],
    }
    if len(others) > 0:
        specs["regex"] = {"first": rf"^{names[0]}$", "rest": ...}
    for name in ("blocks-1", "blocks-2", "alternate-1", "alternate-2", "chunks-1", "chunks-2"):
        with contextlib.suppress(ValueError):  # fewer layers than blocks
            make_partition(model, name)
            specs[name] = name
    return specs


# --- oracles -------------------------------------------------------------------------------------


@dataclass
class Expected:
    """What a summary should hold, and the size that moving each group naturally has."""

    gbar: Tensor
    Hbar: Tensor
    D3: Tensor
    scale: Tensor  # (S,): a group moves by its own norm when its eta is this


def finite_differences(
    model: nn.Module,
    loss_fn: Callable[[nn.Module, Any], Tensor],
    batch: Any,
    u: dict[str, Tensor],
    partition: Partition,
    seed: int | None = None,
    step: float = 1e-3,
) -> Expected:
    """Differentiate by central differences of order 4 of plain gradients, native operations only.

    Works on a copy of the model, and takes from the partition only which entry is in which group.
    """
    S = len(partition)
    masks: dict[str, Tensor] = {}
    for name, label in partition.labels.items():
        shape = u[name].shape
        label = torch.full(shape, label) if isinstance(label, int) else label
        masks[name] = torch.stack([label == s for s in range(S)]).to(u[name])

    def group_sums(a: dict[str, Tensor], b: dict[str, Tensor]) -> Tensor:
        return sum((masks[n] * (a[n] * b[n])).reshape(S, -1).sum(1) for n in u)

    def gbar_at(eta: Tensor) -> Tensor:
        moved = copy.deepcopy(model)
        params = dict(moved.named_parameters())
        with torch.no_grad():
            for name in u:
                params[name] += u[name] * torch.einsum("s,s...->...", eta, masks[name])
        if seed is not None:
            torch.manual_seed(seed)
        loss_fn(moved, batch).backward()
        grads = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in params.items()}
        return group_sums(grads, u)

    theta = {name: p.detach() for name, p in model.named_parameters() if name in u}
    scale = (group_sums(theta, theta) / group_sums(u, u)).sqrt()
    zero = torch.zeros(S, dtype=torch.float64)
    gbar = gbar_at(zero)
    Hbar = torch.zeros(S, S, dtype=torch.float64)
    D3 = torch.zeros(S, dtype=torch.float64)
    for s in range(S):
        h = float(step * scale[s])
        at = {k: gbar_at(zero.index_fill(0, torch.tensor(s), k * h)) for k in (-2, -1, 1, 2)}
        Hbar[:, s] = (at[-2] - 8 * at[-1] + 8 * at[1] - at[2]) / (12 * h)
        D3[s] = (16 * (at[1] + at[-1]) - at[2] - at[-2] - 30 * gbar)[s] / (12 * h * h)
    return Expected(gbar, (Hbar + Hbar.T) / 2, D3, scale)


def contract_by_hand(
    full: list[Tensor], params: dict[str, Tensor], u: dict[str, Tensor], partition: Partition
) -> Expected:
    """Contract full derivatives, I_{S:P} U being built entry by entry."""
    IU = torch.zeros(len(partition), len(full[0]), dtype=torch.float64)
    theta = torch.zeros_like(IU)
    position = 0
    for name, p in params.items():
        label = partition.labels[name]
        for i, (value, moved) in enumerate(zip(p.detach().flatten(), u[name].flatten())):
            s = label if isinstance(label, int) else int(label.flatten()[i])
            IU[s, position], theta[s, position] = moved, value
            position += 1
    g, H, T = full
    D3 = torch.einsum("sp,sq,sr,pqr->s", IU, IU, IU, T)
    return Expected(IU @ g, IU @ H @ IU.T, D3, theta.norm(dim=1) / IU.norm(dim=1))


def worst_error(actual: Any, expected: Expected) -> list[float]:
    """Return the largest error of each order.

    Every entry is taken in units in which a step of length one is as long as the group itself, and
    compared with the largest entry of its order (or a hundredth of the largest of all).
    """
    r = expected.scale
    units = [r, r[:, None] * r[None, :], r**3]
    truth = [expected.gbar, expected.Hbar, expected.D3]
    given = [actual.gbar, actual.Hbar, actual.D3]
    sizes = [float((t * unit).abs().max()) for t, unit in zip(truth, units)]
    return [
        float(((a.to(t) - t) * unit).abs().max()) / max(size, 1e-2 * max(sizes))
        for a, t, unit, size in zip(given, truth, units, sizes)
        if a is not None
    ]


def partition_of(problem: Problem, spec_name: str) -> Partition:
    return make_partition(problem.model, partition_specs(problem.model)[spec_name])
