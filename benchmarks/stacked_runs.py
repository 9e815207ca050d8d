"""Train several runs of Adam on one network in one process, with their parameters stacked.

    python benchmarks/stacked_runs.py PLAN.txt --data DATA --work WORK --seconds 600

The plan is one of paper_runs.py whose runs differ in seeds and learning rates alone. Every run has
its own initial parameters, order of samples and moments, and its own directory, as with
paper_runs.py; but a layer is one batched product for all of them, and a step one CUDA graph. The
numbers are the same up to rounding. For networks of linear layers: of convolutions a stack is slow.
Starts from the beginning; a run that is finished is left alone, and one that paper_runs.py can
resume is refused.
"""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from paper_runs import say, unfinished
from torch import Tensor
from torch.func import functional_call, stack_module_state, vmap
from torch.optim import Adam

from newton_summary.experiments.config import AdamConfig, ExperimentConfig
from newton_summary.experiments.datasets import Dataset, Split, load_dataset
from newton_summary.experiments.rundir import RunWriter
from newton_summary.experiments.training import (
    EVALUATION_BATCH,
    environment,
    find_device,
    initial_task,
    order_seed,
    peak_memory,
)

WARM_UP = 3  # steps before the capture


class Stack:
    """Runs side by side: entry r of every tensor belongs to run r."""

    def __init__(self, configs: list[ExperimentConfig], data: Dataset, device: torch.device):
        config = configs[0]
        self.configs, self.data, self.device, self.size = configs, data, device, config.batch_size
        tasks = [initial_task(c, data, device) for c in configs]
        self.task = tasks[0]
        state = stack_module_state([task.model for task in tasks])[0]
        self.params: dict[str, Tensor] = {n: x.detach() for n, x in state.items()}
        self.apart = [{n: x[r] for n, x in self.params.items()} for r in range(len(configs))]
        groups = []
        for c, mine in zip(configs, self.apart, strict=True):
            assert isinstance(c.optimizer, AdamConfig)
            betas = (c.optimizer.beta1, c.optimizer.beta2)
            groups.append({"params": list(mine.values()), "lr": c.optimizer.lr, "betas": betas})
        cuda = device.type == "cuda"
        self.optimizer = Adam(groups, fused=cuda, capturable=cuda)
        self.index = torch.zeros(len(configs), self.size, dtype=torch.int64, device=device)
        self.total = torch.zeros(len(configs), dtype=torch.float64, device=device)
        self.graph = self._captured() if cuda else None

    def _captured(self) -> torch.cuda.CUDAGraph:
        """Return a graph of a step; parameters and moments are as before."""
        before = {n: x.clone() for n, x in self.params.items()}
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                self._step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step()
        for name, x in self.params.items():
            x.copy_(before[name])
        for moments in self.optimizer.state.values():
            for x in moments.values():
                x.zero_()
        return graph

    def _loss(self, params: dict[str, Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
        return self.task.criterion(self._call(params, inputs), (inputs, targets))

    def _call(self, params: dict[str, Tensor], inputs: Tensor) -> Tensor:
        return functional_call(self.task.model, params, (inputs,))

    def _step(self) -> None:
        """Make a step of all runs, on the samples of the index."""
        leaves = {n: x.detach().requires_grad_() for n, x in self.params.items()}
        train = self.data.train
        losses = vmap(self._loss)(leaves, train.inputs[self.index], train.targets[self.index])
        grads = torch.autograd.grad(losses.sum(), list(leaves.values()))
        for name, grad in zip(leaves, grads, strict=True):
            for mine, its in zip(self.apart, grad.contiguous(), strict=True):
                mine[name].grad = its
        self.optimizer.step()
        self.total.add_(losses.detach(), alpha=self.size)

    def train_epoch(self, epoch: int) -> list[float]:
        """Make a pass over the training set; return the mean loss of the batches of each run."""
        orders = []
        for config in self.configs:
            generator = torch.Generator().manual_seed(order_seed(config, epoch))
            orders.append(torch.randperm(len(self.data.train), generator=generator))
        index = torch.stack(orders).to(self.device).view(len(orders), -1, self.size)
        self.total.zero_()
        for i in range(index.shape[1]):
            self.index.copy_(index[:, i])
            self._step() if self.graph is None else self.graph.replay()
        return (self.total / len(self.data.train)).tolist()

    @torch.no_grad()
    def evaluate(self, split: Split) -> list[tuple[float, float]]:
        """Return the mean loss and the accuracy of each run on a part of the data."""
        sums = torch.zeros(2, len(self.configs), dtype=torch.float64, device=self.device)
        for batch in split.parts(EVALUATION_BATCH):
            outputs = vmap(self._call, in_dims=(0, None))(self.params, batch[0])
            scores = (self.task.criterion, self.task.accuracy)
            found = [vmap(score, in_dims=(0, None))(outputs, batch).double() for score in scores]
            sums += torch.stack(found) * len(batch[0])
        loss, accuracy = (sums / len(split)).tolist()
        return list(zip(loss, accuracy, strict=True))


def check_alike(configs: list[ExperimentConfig]) -> None:
    """Refuse runs that differ in more than seeds and learning rates, or do more than train."""
    same = {repr(replace(c, seed=0, optimizer=AdamConfig())) for c in configs}
    if len(same) > 1 or not all(isinstance(c.optimizer, AdamConfig) for c in configs):
        raise SystemExit("The runs of a stack may differ in seeds and Adam's learning rate alone.")
    if any(c.schedule.factor < 1 or c.measure.every for c in configs):
        raise SystemExit("A stack has no schedule and measures nothing: use paper_runs.py.")


def train_all(todo: list[tuple[ExperimentConfig, Path]], seconds: float) -> None:
    """Train all runs to their last epoch, or until time is up."""
    until = time.time() + seconds
    configs = [config for config, _ in todo]
    check_alike(configs)
    config = configs[0]
    device = find_device(config.device)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = config.tf32
    data = load_dataset(config.data, getattr(torch, config.dtype), device)
    if len(data.train) % config.batch_size:
        raise SystemExit("The training set must be a multiple of the batch.")
    stack = Stack(configs, data, device)
    writers = [RunWriter(path, c) for c, path in todo]
    try:
        for writer in writers:
            writer.path.parent.mkdir(parents=True, exist_ok=True)
            if writer.start(environment(device) | {"side_by_side": len(todo)}) is not None:
                raise SystemExit(f"{writer.path} can be resumed: use paper_runs.py.")
        write_rows(stack, writers, 0, None, 0.0)
        for epoch in range(1, config.epochs + 1):
            if time.time() > until:
                say(f"stopped before epoch {epoch} of {config.epochs}")
                break
            start = time.perf_counter()
            losses = stack.train_epoch(epoch - 1)
            write_rows(stack, writers, epoch, losses, time.perf_counter() - start)
            say(f"epoch {epoch}: " + " ".join(f"{loss:.2e}" for loss in losses))
    finally:
        for writer in writers:
            writer.close()


def write_rows(
    stack: Stack, writers: list[RunWriter], epoch: int, losses: list[float] | None, seconds: float
) -> None:
    """Evaluate, and write an epoch of every run that has not diverged."""
    start = time.perf_counter()
    validation, test = stack.evaluate(stack.data.validation), stack.evaluate(stack.data.test)
    evaluation = time.perf_counter() - start
    for r, (writer, config) in enumerate(zip(writers, stack.configs, strict=True)):
        loss = None if losses is None else losses[r]
        if writer.rows and writer.rows[-1]["status"] != "ok":
            continue
        row: dict[str, Any] = {"epoch": epoch, "train_loss": loss, "seconds": seconds}
        if loss is not None:
            row["lr"] = config.optimizer.lr  # type: ignore[attr-defined]
        row["status"] = "ok" if loss is None or math.isfinite(loss) else "diverged"
        for name, scores in (("validation", validation), ("test", test)):
            row |= {f"{name}_loss": scores[r][0], f"{name}_accuracy": scores[r][1]}
        row |= {"evaluation_seconds": evaluation, "memory_gib": peak_memory(stack.device)}
        writer.add_row(row, None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("plan", type=Path, help="file with the runs, as for paper_runs.py")
    parser.add_argument("--data", type=Path, help="folder with the official files")
    parser.add_argument("--work", type=Path, default=Path("runs"), help="folder of the runs")
    parser.add_argument("--seconds", type=float, default=1500, help="time for everything")
    args = parser.parse_args()
    todo = list(unfinished(args.plan.read_text(), args.data, args.work, graph_steps=True))
    if todo:
        say(f"{len(todo)} runs in a stack")
        train_all(todo, args.seconds)


if __name__ == "__main__":
    main()
