"""Cost of a summary, in gradients of the same batch, and its peak memory.

    python benchmarks/engine.py --out results            # everything, on the GPU if there is one
    python benchmarks/engine.py --models mlp lenet --device cpu --batch 200

Compares the sweep with nested differentiation, with ``torch.func`` (vmap of jvp of grad), and with
S Hessian-vector products, which is what a library of such products would do for order 2; and with
such libraries themselves where they are installed (``opponents.py``). Large transformers, on a GPU:

    python benchmarks/engine.py --models llama llama-lora gpt2-role gpt2 --seconds 0.5 \\
        --methods sweep-2 sweep-3 hvp-2 curvlinops-2 eigenthings-2 jet-3 --verify

With the direction from the same pass (whole), and replayed as CUDA graphs (cuda_graph=True):

    python benchmarks/engine.py --models mlp lenet \\
        --methods sweep-2 sweep-3 whole-2 whole-3 replay-2 replay-3 replay_whole-2 replay_whole-3

Writes a JSON file with the environment, prints a table, and draws the cost against S and the batch.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
from llama import LARGE, by_role, causal_lm_loss, llama, with_adapters
from losses import classification_loss, next_token_loss
from opponents import OPPONENTS
from torch import nn

import newton_summary as ns
from newton_summary.experiments import models


@dataclass
class Case:
    """A model, a loss, how to draw a batch, and a partition."""

    name: str
    build: Callable[[], nn.Module]
    partition: Any
    batch: int
    image: tuple[int, ...] | None = None  # shape of one image
    tokens: tuple[int, int] | None = None  # vocabulary, length
    skip: tuple[str, ...] = ()  # methods that would take minutes
    loss: Callable[..., torch.Tensor] | None = None
    large: bool = False  # for a GPU alone

    def draw(self, device: str, size: int) -> Any:
        if self.image is not None:
            images = torch.randn(size, *self.image, device=device)
            return images, torch.randint(0, 10, (size,), device=device)
        vocabulary, length = self.tokens or (0, 0)
        return torch.randint(0, vocabulary, (size, length + 1), device=device)

    @property
    def loss_fn(self) -> Any:
        if self.loss is not None:
            return self.loss
        return classification_loss if self.image else next_token_loss


GPT_BY_ROLE = {
    **{
        f"block{i}.{role}": rf"^blocks\.{i}\.({pattern})"
        for i in range(12)
        for role, pattern in (("attention", "attn"), ("mlp", "mlp"), ("norms", "norm"))
    },
    "rest": ...,
}


def small_mlp() -> torch.nn.Module:
    """1024-200-100-10 with tanh, for digits padded to 32 x 32; the paper's MLP has a layer more."""
    return models.perceptron([1024, 200, 100, 10], torch.nn.Tanh, models.TANH_GAIN)


CIFAR, MNIST = (3, 32, 32), (1, 32, 32)
GPT2 = (50257, 256, 768, 12, 12)
SLOW = ("nested-3", "torch.func-2", "torch.func-3")
CASES = [
    Case("mlp", small_mlp, "canonical", 1000, MNIST),
    Case("lenet", models.lenet, "canonical", 1000, CIFAR),
    Case("vgg11", models.vgg11, "canonical", 1000, CIFAR),
    Case("bigmlp", models.big_mlp, "canonical", 1000, CIFAR),
    Case("vbigmlp-chunks", models.vbig_mlp, "chunks-5", 1000, CIFAR),
    Case("vbigmlp", models.vbig_mlp, "canonical", 1000, CIFAR, skip=SLOW),
    Case("resnet18", models.resnet18, "canonical", 250, CIFAR),
    Case(
        "gpt2-role",
        lambda: models.GPT(*GPT2),
        GPT_BY_ROLE,
        4,
        tokens=(50257, 256),
        skip=("torch.func-2", "torch.func-3"),
    ),
    Case(
        "gpt2",
        lambda: models.GPT(*GPT2),
        "canonical",
        4,
        tokens=(50257, 256),
        skip=(*SLOW, "nested-2"),
    ),
    Case(
        "llama",
        lambda: llama(LARGE),
        by_role(LARGE["num_hidden_layers"]),
        1,
        tokens=(LARGE["vocab_size"], 1024),
        skip=("nested-2", *SLOW),
        loss=causal_lm_loss,
        large=True,
    ),
    Case(
        "llama-lora",
        lambda: with_adapters(llama(LARGE)),
        {f"block{i}": rf"layers\.{i}\." for i in range(LARGE["num_hidden_layers"])},
        1,
        tokens=(LARGE["vocab_size"], 1024),
        skip=("nested-2", *SLOW),
        loss=causal_lm_loss,
        large=True,
    ),
    Case("mlp12", lambda: models.big_mlp(12, 256), "canonical", 200, CIFAR),
    Case("gpt-cpu", lambda: models.GPT(1000, 128, 128, 2, 4), "canonical", 4, tokens=(1000, 128)),
    Case("gpt-cpu-32", lambda: models.GPT(1000, 32, 32, 2, 4), "canonical", 16, tokens=(1000, 32)),
    Case("gpt-cpu-64", lambda: models.GPT(1000, 64, 32, 2, 4), "canonical", 64, tokens=(1000, 64)),
    Case(
        "gpt-cpu-256", lambda: models.GPT(1000, 256, 256, 2, 4), "canonical", 8, tokens=(1000, 256)
    ),
]
FOR_CPU = ("mlp12", "gpt-cpu", "gpt-cpu-32", "gpt-cpu-64", "gpt-cpu-256")


def sync(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def measure(run: Callable[[], Any], device: str, seconds: float = 2.0) -> dict[str, float]:
    """Return the median time in milliseconds, and the peak memory beyond what is held before."""
    gc.collect()
    held = 0
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
    times: list[float] = []
    start = time.perf_counter()
    while len(times) < 4 or (time.perf_counter() - start < seconds and len(times) < 200):
        t0 = time.perf_counter()
        run()
        sync(device)
        times.append(1000 * (time.perf_counter() - t0))
        if time.perf_counter() - start > 3 * seconds and len(times) > 1:
            break
    peak = (torch.cuda.max_memory_allocated() - held) / 2**30 if device == "cuda" else float("nan")
    warm = times[1:] or times
    return {
        "ms": statistics.median(warm),
        "runs": len(warm),
        "spread": max(warm) - min(warm),
        "GiB": peak,
    }


def torch_func_summary(
    case: Case, model: nn.Module, batch: Any, u: Any, part: Any, order: int
) -> Any:
    """Hbar by vmap of jvp of grad, D3 by nested jvp: what torch.func offers."""
    params = {n: p.detach() for n, p in model.named_parameters()}
    chunk = 4

    def loss(values: dict[str, torch.Tensor]) -> torch.Tensor:
        def call(m: nn.Module, *inputs: Any) -> Any:
            return torch.func.functional_call(m, values, inputs)

        class Bound(nn.Module):
            def forward(self, *inputs: Any) -> Any:
                return call(model, *inputs)

        return case.loss_fn(Bound(), batch)

    def along(eta: torch.Tensor) -> torch.Tensor:
        return loss({n: p + d for (n, p), d in zip(params.items(), part.scale(u, eta).values())})

    S = len(part)
    eye, zero = torch.eye(S, device=batch_device(batch)), torch.zeros(S, device=batch_device(batch))

    def row(e: torch.Tensor) -> torch.Tensor:
        return torch.func.jvp(torch.func.grad(along), (zero,), (e,))[1]

    def third(e: torch.Tensor) -> torch.Tensor:
        f = along
        for _ in range(3):
            f = (lambda g: lambda x: torch.func.jvp(g, (x,), (e,))[1])(f)
        return f(zero)

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        H = torch.func.vmap(row, chunk_size=chunk)(eye)
        return H if order == 2 else (H, torch.func.vmap(third, chunk_size=chunk)(eye))


def batch_device(batch: Any) -> torch.device:
    return (batch[0] if isinstance(batch, tuple) else batch).device


def hessian_vector_products(case: Case, model: nn.Module, batch: Any, u: Any, part: Any) -> Any:
    """S Hessian-vector products by double backward, one for each group."""
    params = dict(part.params)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        loss = case.loss_fn(model, batch)
        grads = torch.autograd.grad(loss, list(params.values()), create_graph=True)
        rows = []
        for s in range(len(part)):
            U_s = part.restrict(u, s)
            dot = sum((g * U_s[n]).sum() for n, g in zip(params, grads) if n in U_s)
            products = torch.autograd.grad(dot, list(params.values()), retain_graph=True)
            rows.append(part.inner(dict(zip(params, products)), u))
    return torch.stack(rows)


def run_case(
    case: Case, device: str, batch_size: int, methods: list[str], seconds: float
) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    model = case.build().to(device)
    batch = case.draw(device, batch_size)
    part = ns.make_partition(model, case.partition)
    leaves = list(part.params.values())

    def gradient() -> Any:
        return torch.autograd.grad(case.loss_fn(model, batch), leaves)

    u = {n: g.clone() for n, g in zip(part.params, gradient())}
    base = measure(gradient, device, seconds)
    rows = [
        dict(
            model=case.name,
            S=len(part),
            batch=batch_size,
            method="gradient",
            order=1,
            gradients=1.0,
            **base,
        )
    ]
    reference = None
    for method in methods:
        if method in case.skip:
            continue
        name, _, order_text = method.partition("-")
        order = int(order_text or 3)

        def run(name: str = name, order: int = order) -> Any:
            if name == "torch.func":
                return torch_func_summary(case, model, batch, u, part, order)
            if name in OPPONENTS:
                return OPPONENTS[name](case.loss_fn, model, batch, u, part)
            if name == "hvp":
                return hessian_vector_products(case, model, batch, u, part)
            replayed = name.startswith("replay")
            how: dict[str, Any] = {"partition": part, "order": order, "cuda_graph": replayed}
            if not name.endswith("whole"):  # else the gradient, from the sweep's own pass
                how["direction"] = u
            if name != "whole" and not replayed:
                how["backend"] = name
            return ns.summarize(model, case.loss_fn, batch, **how)

        row: dict[str, Any] = {
            "model": case.name,
            "S": len(part),
            "batch": batch_size,
            "method": name,
            "order": order,
        }
        try:
            results: list[Any] = []
            for _ in range(5 if name.startswith("replay") else 0):
                run()  # until it is captured, which is no part of the time

            def keep(run: Callable[[], Any] = run, results: list[Any] = results) -> None:
                results[:] = [run()]

            row.update(measure(keep, device, seconds))
            row["gradients"] = row["ms"] / base["ms"]
            if name == "sweep" and order == 3:
                reference = results[0]
            elif name.startswith("replay") and order == 3 and reference is not None:
                for key in ("Hbar", "D3"):
                    a, b = getattr(results[0], key), getattr(reference, key)
                    row[f"{key}_difference"] = float((a - b).abs().max() / b.abs().max())
            elif order == 2 and isinstance(results[0], torch.Tensor) and reference is not None:
                a, b = results[0], reference.Hbar
                row["Hbar_difference"] = float((a - b).abs().max() / b.abs().max())
            elif name == "nested" and order == 3 and reference is not None:
                for key in ("Hbar", "D3"):
                    a, b = getattr(results[0], key), getattr(reference, key)
                    row[f"{key}_difference"] = float((a - b).abs().max() / a.abs().max())
        except Exception as error:  # another package may fail in any way
            row["error"] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
        rows.append(row)
        print(table_row(row), flush=True)
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
    return rows


HEADER = (
    f"{'model':15s} {'S':>4s} {'batch':>6s} {'method':12s} {'order':>5s} {'ms':>10s} "
    f"{'gradients':>9s} {'GiB':>7s}"
)


def table_row(row: dict[str, Any]) -> str:
    start = (
        f"{row['model']:15s} {row['S']:4d} {row['batch']:6d} {row['method']:12s} {row['order']:5d}"
    )
    if "error" in row:
        return f"{start} {row['error']}"
    end = "".join(f"  {k} {row[k]:.1e}" for k in ("Hbar_difference", "D3_difference") if k in row)
    return f"{start} {row['ms']:10.3f} {row['gradients']:9.2f} {row['GiB']:7.3f}{end}"


def scaling(device: str, seconds: float) -> dict[str, list[dict[str, Any]]]:
    """Time and memory of the sweep against S (a deep MLP, cut finer and finer) and the batch."""
    results: dict[str, list[dict[str, Any]]] = {"S": [], "batch": []}
    width = 1024 if device == "cuda" else 128
    for depth in (5, 10, 20, 40):
        case = Case(
            f"mlp{depth}", lambda depth=depth: models.big_mlp(depth, width), "canonical", 500, CIFAR
        )
        results["S"] += [
            dict(r, depth=depth)
            for r in run_case(case, device, 500, ["sweep-2", "sweep-3"], seconds)
        ]
    for k in (1, 2, 5, 10, 20):
        case = Case(f"blocks-{k}", lambda: models.big_mlp(20, width), f"blocks-{k}", 500, CIFAR)
        results["S"] += [
            dict(r, depth=20) for r in run_case(case, device, 500, ["sweep-2", "sweep-3"], seconds)
        ]
    for size in (125, 250, 500, 1000, 2000, 4000):
        case = Case("lenet", models.lenet, "canonical", size, CIFAR)
        results["batch"] += run_case(case, device, size, ["sweep-2", "sweep-3"], seconds)
    return results


def draw(result: dict[str, Any], folder: Path) -> None:
    """Draw the cost against S and against the batch, from a file of results."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [r for r in result["results"] if "error" not in r]
    figure, axes = plt.subplots(figsize=(9, 5))
    for color, (method, marker) in enumerate(
        {"sweep": "o", "hvp": "v", "nested": "s", "torch.func": "^"}.items()
    ):
        for order in (2, 3):
            some = [r for r in rows if r["method"] == method and r["order"] == order]
            face = f"C{color}" if order == 3 else "none"
            axes.scatter(
                [r["S"] for r in some],
                [r["gradients"] for r in some],
                marker=marker,
                s=45,
                facecolors=face,
                edgecolors=f"C{color}",
                label=f"{method}, order {order}" if some else None,
            )
    S = sorted({r["S"] for r in rows})
    axes.plot(S, [(s + 4) / 3 for s in S], "k--", lw=1, label="(S + 4) / 3")
    axes.set(xscale="log", yscale="log", xlabel="number of groups S")
    axes.set_ylabel("time, in gradients of the same batch")
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1))
    axes.set_title("Cost of a summary, every model of the benchmark", loc="left")
    figure.tight_layout()
    figure.savefig(folder / "engine_cost.png", dpi=150)
    if "scaling" in result:
        draw_scaling(result["scaling"], folder)


def draw_scaling(scaling: dict[str, list[dict[str, Any]]], folder: Path) -> None:
    """Draw time and memory of the sweep against S and against the batch."""
    import matplotlib.pyplot as plt

    deeper = [r for r in scaling["S"] if r["model"].startswith("mlp")]
    finer = [r for r in scaling["S"] if r["model"].startswith("blocks")]
    series = {
        "MLPs of 5, 10, 20, 40 layers": ("S", deeper),
        "an MLP of 20 layers, in more and more groups": ("S", finer),
        "LeNet": ("batch", scaling["batch"]),
    }
    labels = {"ms": "time, ms", "gradients": "time, in gradients", "GiB": "peak memory, GiB"}
    figure, panels = plt.subplots(2, 3, figsize=(12, 6.5))
    for column, (title, (key, some)) in enumerate(series.items()):
        for order in (2, 3):
            part = [r for r in some if r["method"] == "sweep" and r["order"] == order]
            part.sort(key=lambda r: r[key])
            x = [r[key] for r in part]
            time_unit = "ms" if key == "batch" else "gradients"
            for row, quantity in enumerate((time_unit, "GiB")):
                panel = panels[row, column]
                panel.plot(x, [r[quantity] for r in part], "o-", label=f"order {order}")
                panel.set_ylabel(labels[quantity])
        for panel in panels[:, column]:
            panel.set(xlim=(0, None), ylim=(0, None))
            panel.set_xlabel("samples in the batch" if key == "batch" else "number of groups S")
            panel.legend(fontsize=8)
        panels[0, column].set_title(title, loc="left", fontsize=10)
    figure.tight_layout()
    figure.savefig(folder / "engine_scaling.png", dpi=150)


NARROW = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}


def verify_llama() -> None:
    """Compare the sweep with central differences in float64.

    On two blocks of the large Llama, and on all of its blocks at an eighth of the width.
    """
    for changes, length in (({"num_hidden_layers": 2}, 257), (NARROW, 129)):
        config = {**LARGE, "vocab_size": 1000, **changes}
        model = llama(config, torch.float32)
        tokens = torch.randint(0, 1000, (1, length), device=next(model.parameters()).device)
        groups = by_role(config["num_hidden_layers"])
        print(ns.verify(model, causal_lm_loss, tokens, partition=groups))


def environment(device: str) -> dict[str, Any]:
    return {
        "date": date.today().isoformat(),
        "command": " ".join(["python", *sys.argv]),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.processor(),
        "threads": torch.get_num_threads(),
        "tf32": {
            "matrix products": torch.backends.cuda.matmul.allow_tf32,
            "convolutions": torch.backends.cudnn.allow_tf32,
        },
        "version": ns.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models",
        nargs="*",
        default=[c.name for c in CASES if c.name not in FOR_CPU and not c.large],
    )
    parser.add_argument(
        "--methods",
        nargs="*",
        default=[
            "sweep-2",
            "sweep-3",
            "nested-2",
            "nested-3",
            "torch.func-2",
            "torch.func-3",
            "hvp-2",
        ],
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, help="samples in a batch, instead of each model's own")
    parser.add_argument("--seconds", type=float, default=2.0, help="time for each measurement")
    parser.add_argument(
        "--precision",
        choices=("float32", "default", "tf32"),
        default="float32",
        help="TF32 nowhere, as torch has it (in convolutions), or everywhere",
    )
    parser.add_argument(
        "--scaling", action="store_true", help="also measure against S and the batch"
    )
    parser.add_argument(
        "--verify", action="store_true", help="also compare smaller Llamas with differences"
    )
    parser.add_argument("--mkl", action="store_true", help="on a CPU, no products by oneDNN")
    parser.add_argument("--draw", type=Path, metavar="FILE", help="only draw a file of results")
    parser.add_argument("--out", type=Path, default=Path("benchmark-results"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.backends.mkldnn.set_flags(not args.mkl)
    if args.draw:
        draw(json.loads(args.draw.read_text()), args.out)
        return
    torch.backends.cuda.matmul.allow_tf32 = args.precision == "tf32"
    torch.backends.cudnn.allow_tf32 = args.precision != "float32"
    by_name = {case.name: case for case in CASES}
    print(HEADER)
    rows = []
    for name in args.models:
        rows += run_case(
            by_name[name],
            args.device,
            args.batch or by_name[name].batch,
            args.methods,
            args.seconds,
        )
    result: dict[str, Any] = {"environment": environment(args.device), "results": rows}
    if args.verify:
        verify_llama()
    if args.scaling:
        result["scaling"] = scaling(args.device, args.seconds)
    path = args.out / "engine.json"
    path.write_text(json.dumps(result, indent=1))
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
