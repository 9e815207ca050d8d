"""Adam in as few launches as possible: small models on an accelerator wait for each of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from newton_summary.parallel.processes import is_sharded
from newton_summary.partition import Params

EPS, SECOND_BETA = 1e-8, 0.999


class Lot(NamedTuple):
    """Parameters of one dtype with the same settings, moved by one launch."""

    group: int  # whose settings they have
    params: list[Tensor]
    means: list[Tensor]
    squares: list[Tensor]
    steps: list[Tensor]


class FusedAdam:
    """AdamW by torch's fused kernel, on parameters of one device, with the state that AdamW keeps.

    A step whose gradient is not finite is skipped. The kernel detects it, so nothing waits.

    Args:
        params: By name.
        state: By parameter, with ``step``, ``exp_avg`` and ``exp_avg_sq``.

    Attributes:
        found: 1 if the last gradient was not finite, else 0; on the device.
    """

    def __init__(self, params: Params, state: Mapping[Any, dict[str, Any]]):
        self.params, self._state = params, state
        first = next(iter(params.values()))
        self.found = torch.zeros((), dtype=torch.float32, device=first.device)
        self._one, self._made = torch.ones_like(self.found), torch.zeros_like(self.found)
        self._asked = 0
        self._known: Any = None  # what the lots are made from
        self._lots: list[Lot] = []
        self._steps: list[Tensor] = []

    @staticmethod
    def can_move(params: Params) -> bool:
        """Return whether there is such a kernel for these parameters."""
        devices = {p.device for p in params.values()}
        plain = all(p.is_floating_point() and not is_sharded(p) for p in params.values())
        return plain and len(devices) == 1 and devices.pop().type in ("cpu", "cuda")

    @property
    def skipped(self) -> int:
        """How many steps were skipped (waits for the device)."""
        return self._asked - int(self._made)

    def step(self, groups: Sequence[Mapping[str, Any]], rates: Sequence[float]) -> None:
        """Move along the present gradients.

        Args:
            groups: With ``params``, ``momentum`` and ``weight_decay``.
            rates: The learning rate of each.
        """
        ready = [p.requires_grad and p.grad is not None for p in self.params.values()]
        kinds = [(rate, g["momentum"], g["weight_decay"]) for rate, g in zip(rates, groups)]
        known = ready, [kinds.index(kind) for kind in kinds]
        if known != self._known:
            self._make_lots(groups, known[1])
            self._known = known
        self._asked += 1
        if not self._lots:
            self._made += 1
            return
        grads: Any = [[p.grad for p in lot.params] for lot in self._lots]
        self.found.zero_()
        for some in grads:
            torch._amp_foreach_non_finite_check_and_unscale_(some, self.found, self._one)
        torch._foreach_add_(self._steps, [1 - self.found] * len(self._steps))
        for lot, some in zip(self._lots, grads):
            rate, momentum, decay = kinds[lot.group]
            torch._fused_adamw_(
                *(lot.params, some, lot.means, lot.squares, [], lot.steps),
                lr=rate,
                beta1=momentum,
                beta2=SECOND_BETA,
                weight_decay=float(decay),
                eps=EPS,
                amsgrad=False,
                maximize=False,
                found_inf=self.found,
            )

    def _make_lots(self, groups: Sequence[Mapping[str, Any]], alike: Sequence[int]) -> None:
        """Gather what moves, and initialise its state where there is none."""
        lots: dict[Any, Lot] = {}
        for number, group in zip(alike, groups):
            for p in group["params"]:
                if p.requires_grad and p.grad is not None:
                    key = number, p.dtype
                    lot = lots.setdefault(key, Lot(number, [], [], [], []))
                    for values, value in zip(lot[1:], (p, *self._begun(p))):
                        values.append(value)
        self._lots = list(lots.values())
        self._steps = [step for lot in self._lots for step in lot.steps] + [self._made]

    def _begun(self, p: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        state = self._state[p]
        if "exp_avg" not in state:
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
            state["step"] = torch.zeros_like(self.found)
        return state["exp_avg"], state["exp_avg_sq"], state["step"]
