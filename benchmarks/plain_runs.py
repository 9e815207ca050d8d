"""Train the paper's runs with Adam and SGD in one process, all of them at once.

    python benchmarks/plain_runs.py PLAN.txt --data DATA --work WORK --seconds 300

Plans and run directories are those of paper_runs.py. Small networks leave most of a GPU idle, and
processes side by side take turns on it. Here a stretch of steps is one CUDA graph, and each run has
a stream of its own, so that kernels of all runs are on the GPU together. Runs whose optimizer
decides something on the host are left to paper_runs.py. A run that was stopped starts anew.
"""

from __future__ import annotations

import argparse
import math
import time
from functools import cache
from pathlib import Path

import torch
from paper_runs import say, unfinished
from torch import Tensor

from newton_summary.experiments import training
from newton_summary.experiments.config import AdamConfig, ExperimentConfig, SGDConfig
from newton_summary.experiments.rundir import CHECKPOINT, RunWriter
from newton_summary.experiments.training import Reporter, Session, environment

STRETCH = 15  # steps in one graph: divides the 450 and 540 of an epoch


class PlainRun:
    """One run: its session, its files, and its steps as graphs on a stream of its own."""

    def __init__(self, config: ExperimentConfig, path: Path, device: torch.device, together: int):
        self.name, self.config, self.path = f"{config.recipe}/{path.name}", config, path
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.writer = RunWriter(path, config)
        self.session = Session(config, device, checkpoint_seconds=math.inf)
        self.session.stepper.gradient = self.session.stepper._gradient  # as part of our graphs
        self.steps = len(self.session.data.train) // config.batch_size
        if self.steps * config.batch_size != len(self.session.data.train) or self.steps % STRETCH:
            raise SystemExit(f"{self.name}: an epoch is not made of stretches of {STRETCH} steps.")
        self.index = torch.zeros(STRETCH, config.batch_size, dtype=torch.long, device=device)
        self.total = torch.zeros((), dtype=torch.float64, device=device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.writer.start(environment(device) | {"side_by_side": together})
        with torch.cuda.stream(self.stream):
            if self.stream is not None:
                self._capture()
            self._complete(None, 0.0)

    @property
    def finished(self) -> bool:
        """Whether it has all of its epochs, or diverged."""
        return self.session.epoch >= self.config.epochs or self.writer.rows[-1]["status"] != "ok"

    def start_epoch(self) -> None:
        """Launch the steps of an epoch; on a GPU nothing waits for them."""
        self.started = time.perf_counter()
        session = self.session
        session.generator.manual_seed(self.config.seed * 1_000_003 + session.epoch)
        session.task.model.train()
        order = torch.randperm(len(session.data.train), generator=session.generator)
        with torch.cuda.stream(self.stream):
            self.total.zero_()
            for index in order.to(self.index.device).view(-1, *self.index.shape):
                self.index.copy_(index)
                self._make_steps() if self.graph is None else self.graph.replay()

    def end_epoch(self) -> None:
        """Wait for the epoch; evaluate and write it."""
        with torch.cuda.stream(self.stream):
            loss = float(self.total) / len(self.session.data.train)
            self.session.epoch += 1
            self._complete(loss, time.perf_counter() - self.started)

    def close(self) -> None:
        """Close the files; a state that nobody resumes from is not kept."""
        self.writer.close()
        for file in self.path.glob(f"{CHECKPOINT}*"):
            file.unlink()
        row = self.writer.rows[-1]
        say(f"{self.name}: epoch {row['epoch']}, loss {row['train_loss']}, {row['status']}")

    def _complete(self, loss: float | None, seconds: float) -> None:
        row = {"epoch": self.session.epoch, "train_loss": loss, "seconds": seconds}
        row |= {} if loss is None else {"lr": self.session.lr}
        self.session._complete(row, self.writer, Reporter())

    def _make_steps(self) -> None:
        train, stepper = self.session.data.train, self.session.stepper
        for index in self.index:
            batch = train.inputs[index], train.targets[index]
            self.total.add_(stepper.step(batch), alpha=len(index))

    def _capture(self) -> None:
        optimizer = self.session.stepper.optimizer
        for group in optimizer.param_groups:
            group["capturable"] = True
        model = self.session.task.model.train()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        cudnn = torch.backends.cudnn
        benchmark, cudnn.benchmark = cudnn.benchmark, True
        try:
            self._make_steps()  # for libraries to allocate and to choose
            model.load_state_dict(before)
            for state in optimizer.state.values():  # moments and counts start from 0
                for value in state.values():
                    if isinstance(value, Tensor):
                        value.zero_()
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, stream=self.stream):
                self._make_steps()
        finally:
            cudnn.benchmark = benchmark


def run_together(todo: list[tuple[ExperimentConfig, Path]], until: float) -> None:
    """Make all runs, epoch by epoch, until a moment at most."""
    device = training.find_device(todo[0][0].device)
    runs = []
    for config, path in todo:
        path.parent.mkdir(parents=True, exist_ok=True)
        runs.append(PlainRun(config, path, device, len(todo)))
    say(f"{len(runs)} runs are ready")
    for run in runs:
        run.start_epoch()
    while runs:
        ready = [run for run in runs if run.stream is None or run.stream.query()]
        if not ready:
            time.sleep(0.001)
        for run in ready:
            run.end_epoch()  # the other runs go on meanwhile
            if run.finished or time.time() > until:
                run.close()
                runs.remove(run)
            else:
                run.start_epoch()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("plan", type=Path, help="file with the runs, as of paper_runs.py")
    parser.add_argument("--data", type=Path, help="folder with the official files")
    parser.add_argument("--work", type=Path, default=Path("runs"), help="folder of the runs")
    parser.add_argument("--seconds", type=float, default=1500, help="time for everything")
    args = parser.parse_args()
    until = time.time() + args.seconds
    training.load_dataset = cache(training.load_dataset)  # all runs share the data
    todo = list(unfinished(args.plan.read_text(), args.data, args.work, graph_steps=True))
    for config, _ in todo:
        if not isinstance(config.optimizer, AdamConfig | SGDConfig):
            raise SystemExit(f"{config.recipe}: its optimizer is neither Adam nor SGD.")
    for tf32 in (False, True):
        chosen = [(config, path) for config, path in todo if config.tf32 == tf32]
        if chosen and time.time() < until:
            with training._precision(chosen[0][0]):
                run_together(chosen, until)


if __name__ == "__main__":
    main()
