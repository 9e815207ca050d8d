"""All optimizers behind one interface: ``step(batch)`` moves the model and returns the loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from newton_summary.errors import UserError
from newton_summary.experiments.config import (
    AdamConfig,
    KFACConfig,
    NewtonSummaryConfig,
    OptimizerConfig,
    SGDConfig,
)
from newton_summary.experiments.data_parallel import RankGroup
from newton_summary.experiments.datasets import Batch, Batches, Split
from newton_summary.experiments.kfac import KFAC
from newton_summary.experiments.tasks import Task, negative_log_likelihood, reconstruction_error
from newton_summary.optimizer import NewtonSummary
from newton_summary.partition import Partition, make_partition


class Stepper:
    """Moves a model, batch by batch. Nothing in a step waits for the device.

    Attributes:
        optimizer: The torch optimizer, for its state and for schedulers.
        params: The parameters of the model.
        gradient: Leaves the gradient of a batch in the parameters and returns the loss.
    """

    def __init__(self, task: Task, optimizer: Optimizer, ranks: RankGroup):
        self.task, self.optimizer, self.ranks = task, optimizer, ranks
        self.params = list(task.model.parameters())
        self.gradient: Callable[[Batch], Tensor] = self._gradient

    def step(self, batch: Batch) -> Tensor:
        """Take one step; return the loss of the batch before it, on the device.

        Where several processes share a batch, their shares of the loss add up to it.
        """
        if isinstance(self.optimizer, KFAC) and self.optimizer.covariances_due:
            self.optimizer.observe(batch[0])  # the whole batch, on every process
        loss = self.gradient(batch)
        if isinstance(self.optimizer, NewtonSummary):
            self.optimizer.step(self.ranks.share(batch))
        else:
            self.optimizer.step()
        return loss

    def _gradient(self, batch: Batch) -> Tensor:
        self.optimizer.zero_grad()
        return self.ranks.backward(partial(self.task.loss, self.task.model), batch, self.params)


class GraphedGradient:
    """Replays the gradient of a batch as a CUDA graph, captured at the first batch of a size.

    For models too small to keep a GPU busy: a replay is one launch. Batches of another size are
    computed as usual.
    """

    def __init__(self, gradient: Callable[[Batch], Tensor], params: list[nn.Parameter]):
        self.gradient, self.params = gradient, params
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, batch: Batch) -> Tensor:
        """Leave the gradient in the parameters; return the loss, valid until the next call."""
        if self.graph is None:
            self._capture(batch)
        if any(x.shape != static.shape for x, static in zip(batch, self.batch)):
            return self.gradient(batch)
        for static, x in zip(self.batch, batch):
            static.copy_(x)
        assert self.graph is not None
        self.graph.replay()
        for p, grad in zip(self.params, self.grads):
            p.grad = grad
        return self.loss

    def _capture(self, batch: Batch) -> None:
        self.batch = (batch[0].clone(), batch[1].clone())
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        cudnn = torch.backends.cudnn
        before, cudnn.benchmark = cudnn.benchmark, True  # the fastest of its algorithms is kept
        try:
            with torch.cuda.stream(stream):
                for _ in range(3):  # lets libraries allocate and choose before the capture
                    self.gradient(self.batch)
            torch.cuda.current_stream().wait_stream(stream)
            for p in self.params:
                p.grad = None  # so that the capture makes its own, which replays overwrite
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.loss = self.gradient(self.batch)
        finally:
            cudnn.benchmark = before
        self.grads = [p.grad for p in self.params]


def make_stepper(config: OptimizerConfig, task: Task, train: Split, ranks: RankGroup) -> Stepper:
    """Make the optimizer of a configuration, for a model that is on its device.

    NewtonSummary may draw its own batches from ``train``. Several ``ranks`` share each batch.

    Raises:
        UserError: For settings that the optimizer rejects.
    """
    params = list(task.model.parameters())
    optimizer: Optimizer
    try:
        if isinstance(config, AdamConfig):
            betas = (config.beta1, config.beta2)
            optimizer = Adam(params, lr=config.lr, betas=betas, fused=params[0].is_cuda)
        elif isinstance(config, SGDConfig):
            optimizer = SGD(params, lr=config.lr, momentum=config.momentum)
        elif isinstance(config, KFACConfig):
            optimizer = _kfac(config, task)
        else:
            assert isinstance(config, NewtonSummaryConfig)
            optimizer = _newton_summary(config, task, train, ranks)
    except ValueError as error:
        raise UserError(f"optimizer: {error}") from None
    return Stepper(task, optimizer, ranks)


def _kfac(config: KFACConfig, task: Task) -> KFAC:
    if task.criterion not in (negative_log_likelihood, reconstruction_error):
        raise UserError("K-FAC supports classification and squared error only.")
    gaussian = task.criterion is reconstruction_error
    likelihood: Literal["gaussian", "categorical"] = "gaussian" if gaussian else "categorical"
    optimizer = KFAC(task.model, **asdict(config), likelihood=likelihood)
    if not optimizer.layers:
        raise UserError("K-FAC found no layers: it does not support the NTK parameterisation.")
    return optimizer


def _newton_summary(
    config: NewtonSummaryConfig, task: Task, train: Split, ranks: RankGroup
) -> NewtonSummary:
    own = ("lr", "lambda_int", "momentum", "summary_period", "summary_window")
    given: dict[str, Any] = {name: getattr(config, name) for name in own}
    options = {name: value for name, value in given.items() if value is not None}
    if config.curvature is None:
        options["loss_fn"] = task.loss
    else:
        size, shuffle = config.curvature
        batches = Batches(train, size, drop_last=True, part=ranks.part, shuffle=shuffle)
        options["curvature"] = (task.loss, batches)
    make: Callable[..., NewtonSummary] = NewtonSummary
    if config.variant != "default":
        make, options["variant"] = NewtonSummary.paper, config.variant
    return make(
        checked_partition(task, config.partition),
        diagonal=config.diagonal,
        backend=config.backend,
        cuda_graph=config.cuda_graph and next(task.model.parameters()).is_cuda,
        **options,
    )


def checked_partition(task: Task, spec: str) -> Partition:
    """Return a partition of the model, or raise a UserError if the name is unknown."""
    try:
        return make_partition(task.model, spec)
    except ValueError as error:
        raise UserError(f"partition = {spec!r}: {error}") from None
