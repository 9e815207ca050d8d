"""Steer trainings whose schedule begins with a warm-up, as fine-tuning does by default.

    OMP_NUM_THREADS=1 python benchmarks/warm_up.py

A recurrent network that predicts a made-up language, and an encoder with norms after its layers
that compares how often two words occur. Prints the loss of all samples without dropout at the end,
seeds 0 to 2, at a constant rate and with a warm-up from zero over a tenth of the steps, followed by
a linear decay.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
import torch.nn.functional as F
from reversal import METHODS, constant, train
from torch import Tensor, nn

from newton_summary.probe.inputs import LossFn

COUNT, WORDS, EPOCHS = 2048, 12, 5


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, 16), nn.Linear(64, WORDS)
        self.body = nn.GRU(16, 64, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.words(x))[0])


def language() -> tuple[Tensor, ...]:
    """Lines of 24 words: mostly a function of the two before."""
    draw = torch.Generator().manual_seed(0)
    lines = torch.randint(0, WORDS, (COUNT, 24), generator=draw)
    follows = torch.rand(COUNT, 24, generator=draw) > 0.1
    for i in range(2, 24):
        next_word = (2 * lines[:, i - 1] + lines[:, i - 2] + 1) % WORDS
        lines[:, i] = torch.where(follows[:, i], next_word, lines[:, i])
    return (lines,)


def next_word_loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    (lines,) = batch
    return F.cross_entropy(model(lines[:, :-1]).flatten(0, 1), lines[:, 1:].flatten())


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, 32), nn.Embedding(WORDS, 32)
        layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.1, batch_first=True)
        self.body, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(32, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.words(x) + self.places.weight)[:, 0])


def counts() -> tuple[Tensor, ...]:
    x = torch.randint(1, WORDS, (COUNT, WORDS), generator=torch.Generator().manual_seed(0))
    return x, ((x == 5).sum(1) > (x == 6).sum(1)).long()


def label_loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def warm_up(share: float) -> float:
    return min(share / 0.1, (1 - share) / 0.9)


TRAININGS: dict[str, tuple[Callable[[], nn.Module], LossFn, tuple[Tensor, ...]]] = {
    "recurrent": (Recurrent, next_word_loss, language()),
    "encoder": (Encoder, label_loss, counts()),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--methods", nargs="*", default=list(METHODS))
    parser.add_argument("--trainings", nargs="*", default=list(TRAININGS), choices=TRAININGS)
    args = parser.parse_args()
    for name in args.trainings:
        build, loss_fn, data = TRAININGS[name]
        for shape in (constant, warm_up):
            for method in args.methods:
                losses = []
                for seed in range(3):
                    torch.manual_seed(seed)
                    losses.append(train(method, build(), loss_fn, data, EPOCHS, shape))
                print(name, shape.__name__, method, *(f"{x:.3g}" for x in losses), flush=True)


if __name__ == "__main__":
    main()
