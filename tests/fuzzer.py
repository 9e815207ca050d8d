"""Random losses for the sweep, against central differences of torch's own gradients.

    python tests/fuzzer.py --programs 2000            # seeds 0 to 1999; what failed is printed
    python tests/fuzzer.py --seed 17 --programs 1 --show

A program is a few parameters and some lines of Python that compose operations which the sweep has
rules for: shapes, views and writes in place, reductions, products, norms, attention, recurrent
layers, complex numbers, checkpoints. Its seed alone says what it is. One that fails is cut down to
the lines that the first wrong term of its loss needs.
"""

from __future__ import annotations

import argparse
import random
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from newton_summary import Partition, Summary, make_partition, summarize
from newton_summary.errors import CannotDifferentiate
from newton_summary.measuring.exact_loss import ExactLoss
from oracle import finite_differences

HBAR_TOLERANCE, D3_TOLERANCE = 1e-6, 1e-4
LARGEST = 60  # entries of a tensor
PARTITIONS = ("canonical", "trivial", "blocks-2", "alternate-2", "chunks-2")

SMOOTH = """
    torch.tanh({x}) | torch.sigmoid({x}) | torch.sin({x}) | torch.cos({x}) | torch.exp(-{x} * {x})
    F.gelu({x}) | F.silu({x}) | F.softplus({x}) | F.elu({x}) | F.mish({x}) | F.logsigmoid({x})
    torch.log({x}.square() + 0.5) | torch.sqrt({x} * {x} + 0.3) | torch.rsqrt({x}.square() + 0.7)
    1 / (1.3 + torch.cos({x})) | torch.erf({x}) | torch.atan({x}) | {x} ** 3 / 9 | {x}.square() / 3
    torch.expm1({x} / 3) | torch.log1p({x} ** 2) | ({x} ** 2 + 0.4) ** 0.7 | torch.asinh({x})
    F.gelu({x}, approximate='tanh') | torch.xlogy({x}, 1.5 + {x}.sin()) | torch.hypot({x}, {x} + 1)
"""
KINKS = """
    F.relu({x}) | F.leaky_relu({x}) | {x}.abs() | {x}.clamp(-0.7, 0.9) | F.hardtanh({x})
    F.hardswish({x}) | torch.maximum({x}, -{x} / 2) | F.softshrink({x}) | {x}.sort(-1)[0]
"""
SHAPES = """
    {x}.flatten() | {x}.unsqueeze(0) | {x}.flip(-1) | {x}.roll(1, -1) | {x}.cumsum(-1) | {x}.mT
    {x}.transpose(0, -1) | {x}.reshape(-1) | {x}[..., 1:] | {x}[..., ::2] | {x}[0] | {x}.clone()
    {x}.movedim(0, -1) | F.pad({x}, (1, 0)) | torch.stack([{x}, {x} * 2], -1) | {x}.tril() | {x} * 1
    torch.cat([{x}, {x}.flip(0)], -1) | {x}.chunk(2, -1)[0] | {x}.repeat_interleave(2, -1)
    {x}.expand(2, *{x}.shape) | {x}.squeeze() | {x}.narrow(-1, 0, 1) | {x}.diagonal(0, -2, -1)
    {x}[torch.tensor([0, -1, 0])] | {x}.index_select(-1, torch.tensor([0, 0])) | {x}.unbind(-1)[0]
    {x}.masked_fill({x} > 0.8, 0.8) | torch.where({x} > 0, {x}, 2 * {x}) | {x}.diff(dim=-1)
    {x}.contiguous() | {x}.unflatten(-1, (1, -1)) | {x}.take_along_dim({x}.argsort(-1), -1)
"""
REDUCTIONS = """
    {x}.sum(-1) | {x}.mean(0) | {x}.sum(-1, keepdim=True) | {x}.var(-1) | {x}.std(0, correction=0)
    {x}.logsumexp(-1) | {x}.amax(-1) | {x}.norm(dim=-1) | {x}.mean((0, -1)) | {x}.prod(-1)
    torch.var_mean({x}, -1)[0] | {x}.median(-1)[0] | {x}.topk(1, -1)[0] | {x}.sum()
    torch.linalg.vector_norm({x}, 3, -1) | {x}.logcumsumexp(-1) | {x}.mean(-1, keepdim=True)
"""
NORMS = """
    {x}.softmax(-1) | {x}.log_softmax(-1) | {x}.softmax(0) | F.layer_norm({x}, {x}.shape[-1:])
    F.normalize({x}, dim=-1) | F.rms_norm({x}, {x}.shape[-1:]) | {x} / ({x}.std() + 1)
    {x}.masked_fill({x} > 1, -inf).softmax(-1).nan_to_num() | F.dropout({x}, 0.3)
    F.glu({x}.repeat(1, 2)) | {x}.softmax(-1).max(-1)[0]
"""
PAIRS = """
    {x} + {y} | {x} - 0.5 * {y} | {x} * {y} | {x} / (2 + {y}.square()) | torch.lerp({x}, {y}, 0.3)
    torch.addcmul({x}, {y}, {y}) | torch.maximum({x}, {y}) | torch.where({x} > {y}, {x}, {y}.sin())
    torch.logaddexp({x}, {y}) | torch.atan2({x}, {y}.square() + 0.5) | {x}.sub({y}, alpha=2)
    torch.add({x}, {y}, alpha=0.3) | torch.exp(-({x} - {y}).square()) | F.mse_loss({x}, {y})
"""
PRODUCTS = """
    {x} @ {y}.mT | torch.matmul({x}.mT, {y}) | torch.einsum('...i,...i->...', {x}, {y})
    attention({x}, {y}, {y}.sin()) | attention({x}, {x}, {x}, is_causal=True)
    torch.cdist({x}, {y}) | F.cosine_similarity({x}, {y}, -1) | torch.outer({x}[0], {y}[0])
    torch.kron({x}, {y})
    torch.linalg.solve(definite({y}), {x}.mT) | torch.linalg.cholesky(definite({x}))
    torch.logdet(definite({x})) + {y} | torch.linalg.inv(definite({x})) @ {y}.mT
"""
LAYERS = """
    F.linear({x}, {W:3,n}, {b:3}) | {x} @ {W:n,2} | F.linear({x}, {W:4,n}) | {x} * {g:n} + {b:n}
    F.layer_norm({x}, {x}.shape[-1:], {g:n}, {b:n}) | F.prelu({x}, {g:1}) | {x} + 0.3 * {g:n} ** 2
    F.conv1d({x}.reshape(1, 1, -1), {W:2,1,2}, {b:2}, padding=1) | {x} - {x}.detach() * {g:n}
    F.embedding(torch.tensor([0, 2, 0]), {W:3,n}) + {x}.mean() | classify(F.linear({x}, {W:3,n}))
    lstm({x}, {W:8,n}, {W:8,2}, {b:8}, {b:8}) | gru({x}, {W:6,n}, {W:6,2}, {b:6}, {b:6})
    F.batch_norm({x}.reshape(-1, {n}), None, None, {g:n}, {b:n}, training=True)
    torch.einsum('...i,ij,kj->...k', {x}, {W:n,2}, {W:3,2})
"""
COMPLEX = """
    torch.fft.rfft({x}).abs() | torch.fft.irfft(torch.fft.rfft({x}) * (1 + 0.5j), n={n})
    torch.view_as_real(torch.exp(torch.complex({x}, -{x}) / 3)) | torch.polar({x}.exp(), {x}).imag
    (torch.fft.fft({x}) * torch.fft.fft({x}).conj()).real | torch.fft.fft({x}).angle()
    (torch.complex({x}, {x} + 1) / torch.complex({x} * 0 + 2, {x})).imag
"""
# Writes to y, a copy of x, or to a view v of it. Each is a line.
VIEWS = [
    "{y}[0]",
    "{y}[..., 1:]",
    "{y}.view(-1)",
    "{y}.mT",
    "{y}[..., 0]",
    "{y}.unsqueeze(-1)",
    "{y}",
]
WRITES = """
    {v}.mul_(1.5) | {v}.tanh_() | {v}.add_({x}.mean()) | {v}.copy_({x}.sum().sin()) | {v}.neg_()
    {v}[...] = {x}.std() | {v}.sin_() | {v}.clamp_(-1, 1) | {v} *= 0.3 + {x}.sum() ** 2 / 9
    {v}.masked_fill_({v} > 0.5, 0.5) | {v}.exp_() | {v}.square_() | {v}.div_(2 + {x}.mean() ** 2)
    {v} += {x}.mean()
"""


def lstm(x: Tensor, *weights: Tensor) -> Tensor:
    start = [x.new_zeros(1, 1, 2)] * 2
    steps = x.reshape(-1, 1, x.shape[-1])
    return torch.lstm(steps, start, list(weights), True, 1, 0.0, True, False, False)[0]


def gru(x: Tensor, *weights: Tensor) -> Tensor:
    steps = x.reshape(-1, 1, x.shape[-1])
    start = x.new_zeros(1, 1, 2)
    return torch.gru(steps, start, list(weights), True, 1, 0.0, True, False, False)[0]


def classify(logits: Tensor) -> Tensor:
    rows = logits.reshape(-1, logits.shape[-1])
    return F.cross_entropy(rows, torch.arange(len(rows)) % rows.shape[-1])


def definite(x: Tensor) -> Tensor:
    return x.mT @ x + torch.eye(x.shape[-1], dtype=x.dtype)


NAMES = {
    **{"torch": torch, "F": F, "checkpoint": checkpoint, "inf": float("inf")},
    **{"lstm": lstm, "gru": gru, "classify": classify, "definite": definite},
    "attention": F.scaled_dot_product_attention,
}


def choices(text: str) -> list[str]:
    """Return the templates of a table."""
    return [part.strip() for line in text.strip().splitlines() for part in line.split(" | ")]


UNARY = {
    "smooth": (choices(SMOOTH), 6),
    "kinks": (choices(KINKS), 1),
    "shapes": (choices(SHAPES), 4),
    "reductions": (choices(REDUCTIONS), 2),
    "norms": (choices(NORMS), 2),
    "layers": (choices(LAYERS), 4),
    "complex": (choices(COMPLEX), 1),
}
BINARY = {"pairs": (choices(PAIRS), 3), "products": (choices(PRODUCTS), 2)}
BLOCKS = {"writes": 2, "checkpoint": 1}


@dataclass(frozen=True)
class Step:
    """Some lines that make one tensor of others."""

    target: str
    uses: tuple[str, ...]
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Program:
    """Parameters by name and shape, steps, and the tensors whose sum is the loss."""

    seed: int
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    steps: tuple[Step, ...] = ()
    outputs: tuple[str, ...] = ()

    def source(self) -> str:
        """Return the loss as Python code."""
        body = [line for step in self.steps for line in step.lines]
        total = " + ".join(f"torch.sin({name} + 0.3).mean()" for name in self.outputs)
        arguments = ", ".join(self.shapes)
        lines = [f"def loss({arguments}):  # shapes {self.shapes}", *body, f"return {total}"]
        return "\n    ".join(lines)

    def cut_down(self, outputs: tuple[str, ...]) -> Program:
        """Return the part of the program that some outputs need."""
        needed, kept = set(outputs), []
        for step in reversed(self.steps):
            if step.target in needed:
                needed.update(step.uses)
                kept.append(step)
        shapes = {name: shape for name, shape in self.shapes.items() if name in needed}
        return replace(self, shapes=shapes, steps=tuple(kept[::-1]), outputs=outputs)


class Loss(nn.Module):
    """A program with numbers for its parameters."""

    def __init__(self, program: Program):
        super().__init__()
        generator = torch.Generator().manual_seed(program.seed)
        self.values = nn.ParameterDict(
            {
                name: nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64))
                for name, shape in sorted(program.shapes.items())
            }
        )
        scope: dict[str, Any] = dict(NAMES)
        exec(program.source(), scope)
        self.function = scope["loss"]

    def forward(self, batch: Tensor) -> Tensor:
        return self.function(**self.values)  # type: ignore[no-any-return]


# --- making a program ----------------------------------------------------------------------------


class Writer:
    """Writes a program, running each step as soon as it is there: what fails is left out."""

    def __init__(self, seed: int):
        self.rng = random.Random(seed)
        self.seed = seed
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.steps: list[Step] = []
        self.scope: dict[str, Any] = dict(NAMES)
        self.tensors: list[str] = []

    def write(self, length: int) -> Program:
        """Return a program of about so many steps."""
        for _ in range(self.rng.randint(1, 3)):
            shape = tuple(self.rng.randint(2, 4) for _ in range(self.rng.randint(1, 3)))
            self.tensors.append(self.parameter("x", shape))
        attempts = 0
        while len(self.steps) < length and attempts < 10 * length:
            attempts += 1
            step = self.propose()
            if self.runs(step):
                self.steps.append(step)
                self.tensors.append(step.target)
        used = {name for step in self.steps for name in step.uses}
        loose = [step.target for step in self.steps if step.target not in used]
        return Program(self.seed, self.shapes, tuple(self.steps), tuple(loose)).cut_down(
            tuple(loose)
        )

    def parameter(self, kind: str, shape: tuple[int, ...]) -> str:
        """Return a new parameter."""
        name = f"{kind}{len(self.shapes)}"
        self.shapes[name] = shape
        generator = torch.Generator().manual_seed(self.seed + len(self.shapes))
        value = torch.randn(shape, generator=generator, dtype=torch.float64)
        self.scope[name] = value.requires_grad_()
        return name

    def propose(self) -> Step:
        """Return a step that may or may not run."""
        weights = {
            **{name: weight for name, (_, weight) in UNARY.items()},
            **{name: weight for name, (_, weight) in BINARY.items()},
            **BLOCKS,
        }
        kind = self.rng.choices(list(weights), list(weights.values()))[0]
        target = f"t{len(self.steps)}"
        x, y = (self.rng.choice(self.tensors[-5:]) for _ in range(2))
        if kind == "writes":
            return Step(target, (x,), self.writes(target, x))
        if kind == "checkpoint":
            inner = self.filled(self.rng.choice(UNARY["smooth"][0] + UNARY["norms"][0]), "z")
            how = f"checkpoint(lambda z: {inner} * z.sin(), {x}, use_reentrant=False)"
            return Step(target, (x,), (f"{target} = {how}",))
        if kind in BINARY:
            template = self.rng.choice(BINARY[kind][0])
            return Step(target, (x, y), (f"{target} = {template.format(x=x, y=y)}",))
        template = self.rng.choice(UNARY[kind][0])
        before = len(self.shapes)
        line = f"{target} = {self.filled(template, x)}"
        return Step(target, (x, *list(self.shapes)[before:]), (line,))

    def filled(self, template: str, x: str) -> str:
        """Put names in the place of braces, such as new parameters for {W:3,n}."""
        n = self.scope[x].shape[-1] if x in self.scope and self.scope[x].dim() else 1
        pieces = []
        for part in template.split("{"):
            inside, brace, rest = part.partition("}")
            if not brace:
                pieces.append(part)
            elif ":" in inside:
                kind, _, sizes = inside.partition(":")
                shape = tuple(n if s == "n" else int(s) for s in sizes.split(","))
                pieces.append(self.parameter(kind, shape) + rest)
            else:
                pieces.append({"x": x, "n": str(n)}[inside] + rest)
        return "".join(pieces)

    def writes(self, target: str, x: str) -> tuple[str, ...]:
        """Return a copy of a tensor that is then written to, also through views of it."""
        lines = [f"{target} = {x} * 1"]
        views = [target]
        for i in range(self.rng.randint(2, 6)):
            if self.rng.random() < 0.4:
                view = f"{target}v{i}"
                template = self.rng.choice(VIEWS)
                lines.append(f"{view} = {template.format(y=self.rng.choice(views))}")
                views.append(view)
            write = self.rng.choice(choices(WRITES))
            lines.append(write.format(v=self.rng.choice(views), x=x))
            if self.rng.random() < 0.3:  # a value in between
                lines.append(f"{target}k{i} = {self.rng.choice(views)}.sin().sum()")
                lines.append(f"{self.rng.choice(views)}.add_({target}k{i} / 5)")
        return tuple(lines)

    def runs(self, step: Step) -> bool:
        """Run a step, and keep what it makes if that is a small tensor of moderate numbers."""
        scope = dict(self.scope)
        parameters = [self.scope[name] for name in self.shapes]
        try:
            exec("\n".join(step.lines), scope)
            y = scope[step.target]
            if y.dtype != torch.float64 or not 0 < y.numel() <= LARGEST:
                return False
            grads = torch.autograd.grad(y.sum(), parameters, retain_graph=True, allow_unused=True)
        except (RuntimeError, IndexError, ValueError, TypeError, AssertionError):
            return False
        numbers = [
            y.detach().abs().max() / 30,
            *(g.abs().max() / 1e3 for g in grads if g is not None),
        ]
        if not all(bool(number < 1) for number in numbers):
            return False
        self.scope[step.target] = y
        return True


def write_program(seed: int) -> Program:
    """Return the program of a seed."""
    return Writer(seed).write(3 + seed % 10)


# --- checking one --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """The result of a check: right, wrong, crash, fallback, unsettled (a kink nearby), or empty."""

    kind: str
    Hbar_error: float = 0.0
    D3_error: float = 0.0
    note: str = ""


def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch)


def partition_of(model: nn.Module, seed: int) -> Partition:
    """Return the partition of a seed."""
    spec = PARTITIONS[seed % len(PARTITIONS)]
    try:
        return make_partition(model, spec)
    except ValueError:  # fewer tensors than groups
        return make_partition(model, "canonical")


def check(program: Program) -> Outcome:
    """Compare the sweep with differences of gradients, in float64."""
    if not program.outputs:
        return Outcome("empty")
    torch.manual_seed(program.seed)
    model, batch = Loss(program), torch.zeros(1, dtype=torch.float64)
    partition = partition_of(model, program.seed)
    u = {name: torch.randn_like(p) / p.numel() ** 0.5 for name, p in partition.params.items()}
    options: dict[str, Any] = {"partition": partition, "direction": u}
    try:
        # What the loss detaches is a constant: it stays as it is when the parameters move.
        exact = ExactLoss(loss_fn)
        actual = summarize(model, exact, batch, backend="sweep", **options)
    except CannotDifferentiate as error:
        return Outcome("fallback", note=str(error))
    except Exception as error:
        return Outcome("crash", note=f"{type(error).__name__}: {error}")
    try:
        expected = finite_differences(model, exact, batch, partition, u)
    except ArithmeticError:  # a kink nearby
        return Outcome("unsettled")
    H, D = (relative_error(actual, expected, name) for name in ("Hbar", "D3"))
    right = H < HBAR_TOLERANCE and D < D3_TOLERANCE
    return Outcome("right" if right else "wrong", H, D)


def relative_error(actual: Summary, expected: Summary, name: str) -> float:
    """Return the largest error over the largest entry, or over a thousandth where all are small."""
    a, b = getattr(actual, name), getattr(expected, name)
    gap = float((a - b).abs().max() / b.abs().max().clamp_min(1e-3))
    return gap if gap == gap else float("inf")


def smoke(program: Program, dtype: torch.dtype) -> float | None:
    """Return how far Hbar in a narrower type is from that in float64; None if torch cannot."""
    summaries = []
    for kind in (torch.float64, dtype):
        model, batch = Loss(program).to(kind), torch.zeros(1, dtype=kind)
        try:
            model(batch)
        except RuntimeError:  # such as of complex numbers
            return None
        torch.manual_seed(program.seed)
        u = {name: torch.ones_like(p) for name, p in model.named_parameters()}
        summaries.append(summarize(model, loss_fn, batch, direction=u, backend="sweep"))
    wide, narrow = summaries
    return float((wide.Hbar - narrow.Hbar.double()).abs().max() / wide.Hbar.abs().max())


def shrink(program: Program, fails: Callable[[Program], bool]) -> Program:
    """Return the smallest part of a program that ends at one of its tensors and still fails."""
    ends = [step.target for step in program.steps]
    parts = [program.cut_down((end,)) for end in ends]
    return next((part for part in parts if fails(part)), program)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument("--programs", type=int, default=100)
    parser.add_argument("--show", action="store_true", help="print every program")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    counts: Counter[str] = Counter()
    worst = Outcome("right")
    steps = 0
    start = time.process_time()
    for seed in range(options.seed, options.seed + options.programs):
        program = write_program(seed)
        outcome = check(program)
        counts[outcome.kind] += 1
        steps += len(program.steps)
        if options.show:
            print(f"# {seed}: {outcome}\n{program.source()}\n")
        if outcome.kind == "right":
            worst = replace(
                worst,
                Hbar_error=max(worst.Hbar_error, outcome.Hbar_error),
                D3_error=max(worst.D3_error, outcome.D3_error),
            )
        elif outcome.kind in ("wrong", "crash"):
            small = shrink(program, lambda part, kind=outcome.kind: check(part).kind == kind)
            print(f"# seed {seed}: {outcome}\n{small.source()}\n", flush=True)
        elif outcome.kind == "fallback":
            print(f"# seed {seed}: {outcome.note}", flush=True)
    print(f"{dict(counts)} of {options.programs} programs with {steps} steps")
    print(
        f"largest error of those that are right: Hbar {worst.Hbar_error:.1e}, "
        f"D3 {worst.D3_error:.1e}; {time.process_time() - start:.0f} s"
    )


if __name__ == "__main__":
    main()
