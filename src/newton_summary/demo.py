"""The main job on real data: ``python -m newton_summary.demo``, or ``./run demo``.

Measures a small network on images inside the package, prints the learning rate that each group of
parameters should have, and compares the predicted change of the loss with the real one.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import textwrap
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from newton_summary.data import load_mnist_subset
from newton_summary.learning_rates import STATUS, LearningRates, learning_rates
from newton_summary.measure import summarize
from newton_summary.partition import Params, make_partition, text_table
from newton_summary.summary import Summary

WIDTHS = (1024, 200, 100, 10)  # the paper's MLP
SCALINGS = (0.1, 0.3, 1.0)  # lr, the paper's lambda_t
DTYPES = {"float32": torch.float32, "float64": torch.float64}
PARTITIONS = (
    "canonical, trivial, weights-biases, blocks-K, alternate-K (K = 1 or 2), chunks-K (1-3)"
)
IMAGES = 5000

DESCRIPTION = f"""\
Measure a small network on real MNIST images, and print the learning rate of each group of its
parameters.

The network is the paper's MLP: {"-".join(map(str, WIDTHS))} with tanh, weights from N(0, 1/fan_in),
biases zero. Its parameters are divided into S groups, and each group may move by its own learning
rate eta_s along its part of the gradient. The loss is then a function of S numbers. Its slope
(gbar), its curvature (Hbar, S x S, with the interaction of every pair of groups) and the diagonal
of its third derivative (D3) are computed exactly, and eta minimises

    -eta.gbar + 1/2 eta.Hbar eta + lambda_int/6 ||D eta||^3,    D = Diag(|D3|^(1/3)).

Then the step is really taken, and the change of the loss compared with the predicted one, also for
a single learning rate for all parameters. Takes a few seconds."""

EPILOG = """\
examples:
  python -m newton_summary.demo                              one group per tensor, 1,000 images
  python -m newton_summary.demo --partition weights-biases   two groups
  python -m newton_summary.demo --lambda-int 0               without the cubic term: Newton's step
  python -m newton_summary.demo --samples 100 --json         a quick run, for another program"""


class OneLineParser(argparse.ArgumentParser):
    """A parser whose errors take one line."""

    def error(self, message: str) -> NoReturn:
        """Print the message alone, and exit with 2."""
        self.exit(2, f"newton_summary.demo: {message.rstrip('.')}. See --help.\n")


@dataclass(frozen=True)
class Step:
    """The step theta - lr U I_{P:S} eta."""

    lr: float
    predicted: float  # change of the loss, to second order
    real: float


@dataclass(frozen=True)
class Measurement:
    """A summary, the rates that it gives, and where they lead."""

    summary: Summary
    rates: LearningRates
    steps: list[Step]
    seconds: float  # for the summary


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; return 0, or exit with 2 on wrong arguments."""
    parser = make_parser()
    args = parser.parse_args(argv)
    dtype = DTYPES[args.dtype]
    try:
        device = find_device(args.device)
        model = make_mlp(args.seed).to(device, dtype)
    except ValueError as error:
        parser.error(f"argument --device: {error}")
    try:
        partition = make_partition(model, args.partition)
    except ValueError as error:
        parser.error(f"argument --partition: {error}")
    images, labels = load_mnist_subset("train", dtype=dtype, device=device)
    batch = images[: args.samples], labels[: args.samples]
    if not args.json:
        print(introduction(args, model), flush=True)
    with few_threads():
        per_group = measure(model, batch, partition, args.lambda_int)
        one_rate = per_group
        if len(partition) > 1:
            one_rate = measure(model, batch, "trivial", args.lambda_int)
    if args.json:
        print(json.dumps(as_json(args, per_group, one_rate), indent=2, allow_nan=False))
    else:
        print(report(per_group, one_rate))
    return 0


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = OneLineParser(
        prog="python -m newton_summary.demo",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--samples",
        type=number_of_samples,
        default=1000,
        metavar="N",
        help=f"images in the batch, 1 to {IMAGES} (default 1000)",
    )
    parser.add_argument(
        "--partition",
        type=partition_name,
        default="canonical",
        metavar="NAME",
        help=f"how parameters are grouped: {PARTITIONS} (default canonical, one group per tensor)",
    )
    parser.add_argument(
        "--lambda-int",
        type=strength,
        default=1.0,
        metavar="X",
        help="strength of the cubic term, 0 or more; larger means smaller steps (default 1)",
    )
    parser.add_argument(
        "--seed", type=whole_number, default=0, metavar="N", help="of the weights (default 0)"
    )
    parser.add_argument(
        "--device", default="cpu", metavar="NAME", help="such as cpu or cuda (default cpu)"
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, default="float32", help="of the network (default float32)"
    )
    parser.add_argument(
        "--json", action="store_true", help="print the result as JSON, and nothing else"
    )
    return parser


def number_of_samples(text: str) -> int:
    """Parse ``--samples``."""
    value = whole_number(text)
    if not 1 <= value <= IMAGES:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 1 to {IMAGES}.")
    return value


def whole_number(text: str) -> int:
    """Parse a whole number, 0 or more."""
    if not (text.isascii() and text.isdigit() and int(text) < 2**63):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, 0 or more.")
    return int(text)


def strength(text: str) -> float:
    """Parse ``--lambda-int``."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number, 0 or more.")
    return value


def partition_name(text: str) -> str:
    """Parse ``--partition``; the rest is checked against the network."""
    if text == "discrete":
        raise argparse.ArgumentTypeError(
            "'discrete' gives every parameter its own group: too many for this network."
        )
    return text


def find_device(name: str) -> torch.device:
    """Return a device that works, or raise ValueError in one line."""
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{name!r} cannot be used here ({reason}).") from None
    return device


def make_mlp(seed: int) -> nn.Sequential:
    """Return the network with its starting weights, the same on every device and in every dtype."""
    layers: OrderedDict[str, nn.Module] = OrderedDict(flatten=nn.Flatten())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for number, (fan_in, fan_out) in enumerate(pairwise(WIDTHS), start=1):
            linear = nn.Linear(fan_in, fan_out)
            nn.init.normal_(linear.weight, 0, fan_in**-0.5)
            nn.init.zeros_(linear.bias)
            layers[f"layer{number}"] = linear
            layers[f"tanh{number}"] = nn.Tanh()
    layers.popitem()  # the last layer gives the logits
    return nn.Sequential(layers)


@contextmanager
def few_threads() -> Iterator[None]:
    """Use one thread on the CPU, unless OMP_NUM_THREADS says otherwise.

    Threads that wait for each other make the time depend on what else runs. On two cores, nested,
    1,000 images: two threads took 0.07 s on an idle machine and up to 4.6 s next to two busy
    programs; one thread took 0.11 s and up to 0.23 s.
    """
    before = torch.get_num_threads()
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean loss of the batch."""
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def measure(
    model: nn.Module, batch: tuple[Tensor, Tensor], partition: Any, lambda_int: float
) -> Measurement:
    """Measure along the gradient, find the rates, and try steps of several lengths."""
    params = dict(model.named_parameters())
    grads = torch.autograd.grad(loss_fn(model, batch), list(params.values()))
    u = dict(zip(params, grads, strict=True))
    start = time.perf_counter()
    summary = summarize(model, loss_fn, batch, partition=partition, direction=u)
    seconds = time.perf_counter() - start
    rates = learning_rates(summary, lambda_int)
    steps = []
    if bool(torch.isfinite(rates.eta).all()):
        steps = [try_step(model, batch, u, summary, rates.eta, lr) for lr in SCALINGS]
    return Measurement(summary, rates, steps, seconds)


@torch.no_grad()
def try_step(
    model: nn.Module,
    batch: tuple[Tensor, Tensor],
    u: Params,
    summary: Summary,
    eta: Tensor,
    lr: float,
) -> Step:
    """Evaluate the loss at theta - lr U I_{P:S} eta; the model keeps its theta."""
    assert summary.partition is not None
    params = dict(model.named_parameters())
    moved = {n: params[n] - step for n, step in summary.partition.scale(u, lr * eta).items()}
    images, labels = batch
    after = F.cross_entropy(functional_call(model, moved, (images,)), labels)
    predicted = summary.predicted_change(lr * eta)
    return Step(lr, float(predicted), float(after) - float(summary.loss))


def interactions(Hbar: Tensor) -> list[list[float]]:
    """Return Hbar_st / sqrt(|Hbar_ss Hbar_tt|): the curvature in units where each group has 1."""
    H = Hbar.detach().double().cpu()
    scale = H.diagonal().abs().sqrt()
    rows: list[list[float]] = (H / scale[:, None] / scale[None, :]).tolist()
    return rows


# --- output --------------------------------------------------------------------------------------


def introduction(args: argparse.Namespace, model: nn.Module) -> str:
    """Return what is being done."""
    count = sum(p.numel() for p in model.parameters())
    return f"""\
Learning rates from exact derivatives

network   MLP {"-".join(map(str, WIDTHS))} with tanh, {count:,} parameters, seed {args.seed}
data      {args.samples:,} MNIST images as one batch, {args.dtype} on {args.device}
groups    {args.partition}
model     -eta.gbar + 1/2 eta.Hbar eta + lambda_int/6 ||D eta||^3, lambda_int = {args.lambda_int:g}

Each group s of parameters may move by its own learning rate eta_s along its part of the gradient u.
Measuring how the loss changes with all of them ..."""


def report(per_group: Measurement, one_rate: Measurement) -> str:
    """Return the tables, each with a legend."""
    summary, rates = per_group.summary, per_group.rates
    how = ", approximate" if summary.approximate else ""
    sections = [
        f"... done in {per_group.seconds:.2f} s (backend {summary.backend}{how}). "
        f"The loss is {float(summary.loss):.5g}.",
        "1. The groups, their derivatives, and their learning rates",
        group_table(summary, rates),
        GROUP_LEGEND,
        paragraph(f"Status of the rates: {rates.status}. {STATUS[rates.status]}"),
        "2. Predicted and real change of the loss for the step theta - lr eta_s u",
        step_table(per_group, one_rate),
        comment(per_group, one_rate),
    ]
    if len(summary) > 1:
        sections += [
            "3. How strongly the groups interact: Hbar_st / sqrt(|Hbar_ss Hbar_tt|)",
            interaction_table(summary),
            INTERACTION_LEGEND,
        ]
    return "\n\n".join(sections)


def paragraph(text: str) -> str:
    """Break a text into lines."""
    return textwrap.fill(text, 96)


GROUP_LEGEND = paragraph(
    "gbar, Hbar_ss and D3: first, second and third derivative of the loss along the group's part "
    "of u. eta: the learning rates that are best together. One of them can be negative: then the "
    "steps of the other groups overshoot for this one."
)

INTERACTION_LEGEND = paragraph(
    "0: the groups do not feel each other's steps. 1: a group's step takes as much of the other's "
    "slope away as the other's own step does, so that both together go twice as far as either "
    "should. Below 0: each makes the other's slope steeper."
)


def group_table(summary: Summary, rates: LearningRates) -> str:
    """Return one row for each group."""
    assert summary.partition is not None
    assert summary.D3 is not None
    columns = (summary.gbar, summary.hessian().diagonal(), summary.D3, rates.eta)
    numbers = zip(*(column.tolist() for column in columns), strict=True)
    rows = [("group", "entries", "gbar", "Hbar_ss", "D3", "eta")]
    for name, size, values in zip(summary.names, summary.partition.sizes, numbers, strict=True):
        gbar, H, D3, eta = values
        rows.append((name, f"{size:,}", f"{gbar:.3e}", f"{H:.3e}", f"{D3:.3e}", f"{eta:.4g}"))
    return text_table(rows, right=range(1, 6))


def step_table(per_group: Measurement, one_rate: Measurement) -> str:
    """Return one row for each scaling of the step, for both ways of choosing the rates."""
    columns = {"one rate per group": per_group} if per_group is not one_rate else {}
    columns[f"one rate for all, {float(one_rate.rates.eta):.3g}"] = one_rate
    lines = [f"{'':4}", f"{'lr':>4}", *(f"{lr:>4g}" for lr in SCALINGS)]
    for title, measurement in columns.items():
        steps = [(change(step.predicted), change(step.real)) for step in measurement.steps]
        steps = steps or [("-", "-")] * len(SCALINGS)  # the rates do not exist
        for i, (left, right) in enumerate([("predicted", "real"), *steps], start=1):
            lines[i] += f"    {left:>12} {right:>12}"
        lines[0] += f"    {title:>25}"
    return "\n".join(lines)


def change(value: float) -> str:
    """Return a signed number, or a dash for none."""
    return f"{value:+.5f}" if math.isfinite(value) else "-"


def comment(per_group: Measurement, one_rate: Measurement) -> str:
    """Return what the table of steps shows."""
    text = "The prediction is of second order: close for small steps, and less so for large ones."
    wrong = [step.lr for step in per_group.steps if step.predicted < 0 <= step.real]
    if wrong:
        text += (
            f" With lr = {wrong[0]:g} the loss rises where a fall was predicted: the step leaves "
            f"the region where the model holds. A smaller lr or a larger --lambda-int helps."
        )
    if per_group.steps and one_rate.steps and per_group is not one_rate:
        ours, single = (min(m.steps, key=lambda step: step.real) for m in (per_group, one_rate))
        text += (
            f" The best of these steps changes the loss by {ours.real:+.3f} with one rate per "
            f"group, and by {single.real:+.3f} with one rate for all."
        )
    return paragraph(text)


def interaction_table(summary: Summary) -> str:
    """Return the normalised Hbar as text."""
    rows = [("", *summary.names)]
    for name, values in zip(summary.names, interactions(summary.hessian()), strict=True):
        rows.append((name, *(f"{v:.2f}" if math.isfinite(v) else "-" for v in values)))
    return text_table(rows, right=range(1, len(rows)))


def as_json(
    args: argparse.Namespace, per_group: Measurement, one_rate: Measurement
) -> Mapping[str, Any]:
    """Return the settings and the results as plain values; numbers that are not finite as None."""
    settings = {
        "network": {"kind": "mlp", "widths": list(WIDTHS), "activation": "tanh"},
        "seed": args.seed,
        "samples": args.samples,
        "device": args.device,
        "dtype": args.dtype,
        "partition": args.partition,
        "lambda_int": args.lambda_int,
    }
    result: Mapping[str, Any] = finite(
        {
            "settings": settings,
            "loss": float(per_group.summary.loss),
            "per_group": measurement_values(per_group),
            "one_rate": measurement_values(one_rate),
        }
    )
    return result


def measurement_values(measurement: Measurement) -> dict[str, Any]:
    """Return a measurement as plain values."""
    summary, rates = measurement.summary, measurement.rates
    assert summary.partition is not None
    assert summary.D3 is not None
    return {
        "groups": list(summary.names),
        "entries": list(summary.partition.sizes),
        "gbar": summary.gbar.tolist(),
        "Hbar": summary.hessian().tolist(),
        "D3": summary.D3.tolist(),
        "eta": rates.eta.tolist(),
        "radius": rates.radius,
        "status": rates.status,
        "interactions": interactions(summary.hessian()),
        "steps": [vars(step) for step in measurement.steps],
        "backend": summary.backend,
        "seconds": measurement.seconds,
    }


def finite(value: Any) -> Any:
    """Replace numbers that JSON cannot hold by None."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


if __name__ == "__main__":
    sys.exit(main())
