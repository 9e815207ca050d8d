"""Measurements in Weights & Biases; needs the package ``wandb``."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from newton_summary.integrations.loggers import PREFIX

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class WeightsAndBiases:
    """A :class:`~newton_summary.integrations.loggers.Logger` that writes to a run of W&B.

    W&B counts calls of ``log`` and drops values with an earlier number. Measurements therefore log
    the training step as a metric, ``newton_summary/step``, which is their axis, and mix with
    whatever else the run logs.

    Args:
        run: The run that ``wandb.init()`` returns.

    >>> from unittest.mock import Mock
    >>> run = Mock()  # or wandb.init()
    >>> WeightsAndBiases(run).scalars({"newton_summary/loss": 0.5}, step=3)
    >>> run.log.call_args.args
    ({'newton_summary/loss': 0.5, 'newton_summary/step': 3},)
    """

    def __init__(self, run: Any):
        self.run = run
        run.define_metric(f"{PREFIX}/*", step_metric=f"{PREFIX}/step")

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Write numbers by name."""
        self.run.log({**values, f"{PREFIX}/step": step})

    def figure(self, name: str, figure: Figure, step: int) -> None:
        """Write a picture."""
        import wandb
        from PIL import Image  # matplotlib needs it

        file = io.BytesIO()  # W&B draws only pyplot's own class of figures
        figure.savefig(file, format="png")
        self.run.log({name: wandb.Image(Image.open(file)), f"{PREFIX}/step": step})
