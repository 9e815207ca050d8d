"""All optimizers behind one interface: ``step(batch)`` moves the model and returns the loss."""

from __future__ import annotations

from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.optim import LBFGS, SGD, Adam, Optimizer

from newton_summary.errors import UserError
from newton_summary.experiments.config import (
    AdamConfig,
    KFACConfig,
    LBFGSConfig,
    NewtonSummaryConfig,
    OptimizerConfig,
    SGDConfig,
)
from newton_summary.experiments.data_parallel import Team
from newton_summary.experiments.datasets import Batch, Batches, Split
from newton_summary.experiments.kfac import KFAC
from newton_summary.experiments.tasks import Task, negative_log_likelihood, reconstruction_error
from newton_summary.optimizer import NewtonSummary
from newton_summary.partition import Partition, make_partition


class Stepper(Protocol):
    """Moves a model, batch by batch. Nothing in a step waits for the device, but in L-BFGS."""

    @property
    def optimizer(self) -> Optimizer:
        """The torch optimizer, for its state and for schedulers."""
        ...

    def step(self, batch: Batch) -> Tensor:
        """Make one step; return the loss of the batch before it, on the device.

        Where several processes share a batch, their shares of the loss add up to it.
        """
        ...


class GradientStepper:
    """For optimizers that need gradients alone."""

    def __init__(self, task: Task, optimizer: Optimizer, team: Team):
        self.task, self.optimizer, self.team = task, optimizer, team
        self.params = list(task.model.parameters())

    def step(self, batch: Batch) -> Tensor:
        """Make one step."""
        self.optimizer.zero_grad()
        loss = self.team.backward(partial(self.task.loss, self.task.model), batch, self.params)
        self.optimizer.step()
        return loss


class KFACStepper(GradientStepper):
    """Shows K-FAC the inputs when its covariances are due; all of them, on every process."""

    optimizer: KFAC

    def step(self, batch: Batch) -> Tensor:
        """Make one step."""
        if self.optimizer.covariances_due:
            self.optimizer.observe(batch[0])
        return super().step(batch)


class ClosureStepper:
    """For L-BFGS, which evaluates the loss as often as it likes."""

    def __init__(self, task: Task, optimizer: Optimizer, team: Team):
        self.task, self.optimizer, self.team = task, optimizer, team
        self.params = list(task.model.parameters())

    def step(self, batch: Batch) -> Tensor:
        """Make one step."""
        loss_of = partial(self.task.loss, self.task.model)

        def closure() -> Tensor:
            self.optimizer.zero_grad()
            return self.team.total(self.team.backward(loss_of, batch, self.params))

        first = self.optimizer.step(closure)  # type: ignore[arg-type]
        return torch.as_tensor(first).detach() / self.team.size


def make_stepper(
    config: OptimizerConfig, task: Task, train: Split, team: Team | None = None
) -> Stepper:
    """Make the optimizer of a configuration, for a model that is on its device.

    Args:
        config: Which optimizer, with its settings.
        task: The model and its loss.
        train: The training samples, of which NewtonSummary draws batches of its own.
        team: The processes that share each batch; this one alone if not given.

    Raises:
        UserError: For settings that the optimizer does not take.
    """
    try:
        return _make_stepper(config, task, train, team or Team())
    except ValueError as error:
        raise UserError(f"optimizer: {error}") from None


def _make_stepper(config: OptimizerConfig, task: Task, train: Split, team: Team) -> Stepper:
    params = list(task.model.parameters())
    if isinstance(config, AdamConfig):
        betas = (config.beta1, config.beta2)
        fused = params[0].is_cuda
        return GradientStepper(task, Adam(params, lr=config.lr, betas=betas, fused=fused), team)
    if isinstance(config, SGDConfig):
        return GradientStepper(task, SGD(params, lr=config.lr, momentum=config.momentum), team)
    if isinstance(config, LBFGSConfig):
        return ClosureStepper(
            task,
            LBFGS(
                params,
                lr=config.lr,
                max_iter=config.iterations,
                history_size=config.history,
                line_search_fn="strong_wolfe",
            ),
            team,
        )
    if isinstance(config, KFACConfig):
        return KFACStepper(task, _kfac(config, task), team)
    if isinstance(config, NewtonSummaryConfig):
        return GradientStepper(task, _newton_summary(config, task, train, team), team)
    raise UserError(f"There is no optimizer for {type(config).__name__}.")


def _kfac(config: KFACConfig, task: Task) -> KFAC:
    if task.criterion not in (negative_log_likelihood, reconstruction_error):
        raise UserError("K-FAC is there for classification and for the squared error alone.")
    gaussian = task.criterion is reconstruction_error
    optimizer = KFAC(
        task.model,
        lr=config.lr,
        damping=config.damping,
        momentum=config.momentum,
        covariance_period=config.covariance_period,
        inverse_period=config.inverse_period,
        decay=config.decay,
        likelihood="gaussian" if gaussian else "categorical",
    )
    if not optimizer.layers:
        raise UserError("K-FAC finds no layer: it takes no NTK parameterisation.")
    return optimizer


def _newton_summary(
    config: NewtonSummaryConfig, task: Task, train: Split, team: Team
) -> NewtonSummary:
    direction = None
    if config.direction == "adam":
        direction = Adam(task.model.parameters(), lr=1e-3)
    # With the window this is the paper's optimizer, without any safeguard.
    make = NewtonSummary.paper if config.averaging == "window" else NewtonSummary
    return make(
        checked_partition(task, config.partition),
        lr=config.lr,
        lambda_int=config.lambda_int,
        momentum=config.momentum,
        eta_momentum=config.eta_momentum,
        summary_period=config.summary_period,
        summary_window=config.summary_window,
        warmup=config.warmup,
        direction=direction,
        curvature=(
            task.loss,
            Batches(train, config.curvature_batch_size, drop_last=True, part=team.part),
        ),
        diagonal=config.diagonal,
        negative=config.negative,
        backend=config.backend,
        cuda_graph=config.cuda_graph and next(task.model.parameters()).is_cuda,
    )


def checked_partition(task: Task, spec: str) -> Partition:
    """Return a partition of the model; an unknown one is the user's mistake."""
    try:
        return make_partition(task.model, spec)
    except ValueError as error:
        raise UserError(f"partition = {spec!r}: {error}") from None
