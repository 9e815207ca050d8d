"""Steer the training of an encoder with a decoder, a kind that the suite does not have.

    OMP_NUM_THREADS=1 python benchmarks/reversal.py

nn.Transformer learns to reverse 1,024 sequences of 3 to 8 words, padded and masked. Prints the loss
of these sequences without dropout after 320 steps, seeds 0 to 4, with norms after and before the
layers, at a constant rate and with a linear decay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import newton_summary as ns
from newton_summary.probe.inputs import LossFn

EPOCHS, COUNT, BATCH, WORDS, WIDTH = 10, 1024, 32, 20, 32


class Reverser(nn.Module):
    """Word 0 is padding, word 1 the start."""

    def __init__(self, norm_first: bool):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, padding_idx=0)
        self.places = nn.Embedding(16, WIDTH)
        how = {"dropout": 0.1, "batch_first": True, "norm_first": norm_first}
        self.body = nn.Transformer(WIDTH, 2, 1, 1, 64, **how)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        ahead = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool).triu(1)
        padding = {"src_key_padding_mask": source == 0, "memory_key_padding_mask": source == 0}
        embedded = (self.words(x) + self.places.weight[: x.shape[1]] for x in (source, target))
        return self.head(self.body(*embedded, tgt_mask=ahead, **padding))


def sequences() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    source, target = torch.zeros(COUNT, 8).long(), torch.zeros(COUNT, 9).long()
    for i, length in enumerate(torch.randint(3, 9, (COUNT,), generator=generator).tolist()):
        words = torch.randint(2, WORDS, (length,), generator=generator)
        source[i, :length], target[i, 0], target[i, 1 : length + 1] = words, 1, words.flip(0)
    return source, target


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    source, target = batch
    scores = model(source, target[:, :-1])
    return F.cross_entropy(scores.flatten(0, 1), target[:, 1:].flatten(), ignore_index=0)


def adam(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=lr)


METHODS: dict[str, Callable[[nn.Module, LossFn], Any]] = {
    "Adam 1e-3": lambda model, _: adam(model, 1e-3),
    "Adam 3e-3": lambda model, _: adam(model, 3e-3),
    "Adam 1e-2": lambda model, _: adam(model, 1e-2),
    "RateController": lambda model, loss: ns.RateController(adam(model, 1e-3), model, loss),
    "RateController, set_point=1": lambda model, loss: ns.RateController(
        adam(model, 1e-3), model, loss, set_point=1.0
    ),
    "NewtonSummary": ns.NewtonSummary,
    "NewtonSummary, careful": lambda model, loss: ns.NewtonSummary(model, loss, variant="careful"),
}


def train(
    method: str,
    model: nn.Module,
    loss_fn: LossFn,
    data: tuple[Tensor, ...],
    epochs: int,
    shape: Callable[[float], float],
) -> float:
    """Return the loss of all samples at the end; the share of steps gives the rate's ``shape``."""
    stepper = METHODS[method](model, loss_fn)
    optimizer = getattr(stepper, "optimizer", stepper)
    count = len(data[0])
    steps = epochs * count // BATCH
    schedule = LambdaLR(optimizer, lambda t: shape(t / steps))
    for _ in range(epochs):
        for chosen in torch.randperm(count).split(BATCH):
            batch = tuple(part[chosen] for part in data)
            model.zero_grad()
            loss_fn(model, batch).backward()
            if method.startswith("Adam"):
                optimizer.step()
            else:
                stepper.step(batch)
            schedule.step()
    if method.startswith("NewtonSummary"):
        stepper.eval()  # the mean of the last steps
    model.train(False)
    with torch.no_grad():
        return loss_fn(model, data).item()


def constant(_: float) -> float:
    return 1.0


def decay(share: float) -> float:
    return 1 - share


def main() -> None:
    for norm_first in (False, True):
        for shape in (constant, decay):
            for method in METHODS:
                losses = []
                for seed in range(5):
                    torch.manual_seed(seed)
                    losses.append(
                        train(method, Reverser(norm_first), loss_fn, sequences(), EPOCHS, shape)
                    )
                norms = "norms before" if norm_first else "norms after"
                print(norms, shape.__name__, method, *(f"{x:.2g}" for x in losses), flush=True)


if __name__ == "__main__":
    main()
