"""The trainings of benchmarks/other_kinds.py: fifteen that steering was not tuned on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.optim import Adam

from newton_summary.data import load_mnist_subset

Data = tuple[Tensor, ...]  # batches are tuples of the same parts


def draw() -> Generator:
    """All data are drawn with the same seed, whatever the seed of the training."""
    return torch.Generator().manual_seed(0)


# --- an encoder with a decoder, which learns to reverse sequences ---------------------------------


class Reverser(nn.Module):
    """Word 0 is padding, word 1 the start."""

    def __init__(self, norm_first: bool):
        super().__init__()
        self.words = nn.Embedding(20, 32, padding_idx=0)
        self.places = nn.Embedding(16, 32)
        how = {"dropout": 0.1, "batch_first": True, "norm_first": norm_first}
        self.body = nn.Transformer(32, 2, 1, 1, 64, **how)
        self.head = nn.Linear(32, 20)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        ahead = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool).triu(1)
        padding = {"src_key_padding_mask": source == 0, "memory_key_padding_mask": source == 0}
        embedded = (self.words(x) + self.places.weight[: x.shape[1]] for x in (source, target))
        return self.head(self.body(*embedded, tgt_mask=ahead, **padding))


def sequences(count: int = 1024) -> Data:
    """Sequences of 3 to 8 words, and the same backwards behind a start."""
    generator = draw()
    source, target = torch.zeros(count, 8).long(), torch.zeros(count, 9).long()
    for i, length in enumerate(torch.randint(3, 9, (count,), generator=generator).tolist()):
        words = torch.randint(2, 20, (length,), generator=generator)
        source[i, :length], target[i, 0], target[i, 1 : length + 1] = words, 1, words.flip(0)
    return source, target


def reversal_loss(model: nn.Module, batch: Data) -> Tensor:
    source, target = batch
    scores = model(source, target[:, :-1])
    return F.cross_entropy(scores.flatten(0, 1), target[:, 1:].flatten(), ignore_index=0)


# --- a recurrent network that predicts a made-up language -----------------------------------------


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(12, 16), nn.Linear(64, 12)
        self.body = nn.GRU(16, 64, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.words(x))[0])


def language(count: int = 2048) -> Data:
    """Lines of 24 words: mostly a function of the two before."""
    generator = draw()
    lines = torch.randint(0, 12, (count, 24), generator=generator)
    follows = torch.rand(count, 24, generator=generator) > 0.1
    for i in range(2, 24):
        next_word = (2 * lines[:, i - 1] + lines[:, i - 2] + 1) % 12
        lines[:, i] = torch.where(follows[:, i], next_word, lines[:, i])
    return (lines,)


def next_word_loss(model: nn.Module, batch: Data) -> Tensor:
    (lines,) = batch
    return F.cross_entropy(model(lines[:, :-1]).flatten(0, 1), lines[:, 1:].flatten())


# --- an encoder, with norms after its layers, that compares how often two words occur -------------


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(12, 32), nn.Embedding(12, 32)
        layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.1, batch_first=True)
        self.body, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(32, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.words(x) + self.places.weight)[:, 0])


def counts(count: int = 2048) -> Data:
    x = torch.randint(1, 12, (count, 12), generator=draw())
    return x, ((x == 5).sum(1) > (x == 6).sum(1)).long()


def label_loss(model: nn.Module, batch: Data) -> Tensor:
    x, labels = batch
    return F.cross_entropy(model(x), labels)


# --- an encoder, with norms before its layers, that forecasts waves -------------------------------


class Forecaster(nn.Module):
    """The next four numbers, from the mean over 24 places."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.places = nn.Linear(1, 32), nn.Embedding(24, 32)
        layer = nn.TransformerEncoderLayer(
            32, 4, 64, dropout=0.1, batch_first=True, norm_first=True
        )
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.embed(x[..., None]) + self.places.weight).mean(1))


def waves(count: int = 1536) -> Data:
    """Sums of two waves whose frequencies belong together, with a little noise."""
    generator = draw()
    frequency, phase, size, noise = (
        torch.rand(count, width, generator=generator) for width in (1, 1, 1, 28)
    )
    angles = (0.2 + 0.6 * frequency) * torch.arange(28)
    first = (0.5 + size) * torch.sin(angles + 2 * math.pi * phase)
    lines = first + 0.3 * torch.sin(2.3 * angles) + 0.2 * (noise - 0.5)
    return lines[:, :24], lines[:, 24:]


def forecast_loss(model: nn.Module, batch: Data) -> Tensor:
    x, y = batch
    return F.mse_loss(model(x), y)


# --- differential equations -----------------------------------------------------------------------


def tanh_network(inputs: int) -> nn.Module:
    hidden = nn.Linear(inputs, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh()
    return nn.Sequential(*hidden, nn.Linear(32, 1))


def points_of_a_line(batches: int, seed: int) -> Data:
    generator = torch.Generator().manual_seed(seed)
    return (torch.cat([torch.rand(64, 1, generator=generator) for _ in range(batches)]),)


@torch.enable_grad()  # evaluation takes derivatives as well
def poisson_loss(model: nn.Module, batch: Data) -> Tensor:
    """u'' = -(2 pi)^2 sin(2 pi x) on [0, 1], with u = 0 at the ends by construction."""
    (x,) = batch
    x = x.requires_grad_(True)
    u = model(x) * x * (1 - x)
    (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(slope.sum(), x, create_graph=True)
    return (second + (2 * math.pi) ** 2 * torch.sin(2 * math.pi * x)).square().mean()


@torch.enable_grad()
def heat_loss(model: nn.Module, batch: Data) -> Tensor:
    """u_t = 0.1 u_xx, sin(pi x) at the time 0, and 0 at both ends; points are (t, x)."""
    (points,) = batch
    points = points.clone().requires_grad_()
    (slopes,) = torch.autograd.grad(model(points).sum(), points, create_graph=True)
    (seconds,) = torch.autograd.grad(slopes[:, 1].sum(), points, create_graph=True)
    t, x = points.detach().unbind(1)
    starts = model(torch.stack([torch.zeros_like(t), x], 1))[:, 0]
    ends = model(torch.stack([t, (x > 0.5).float()], 1))
    residual = slopes[:, 0] - 0.1 * seconds[:, 1]
    start_error = starts - torch.sin(math.pi * x)
    return residual.square().mean() + start_error.square().mean() + ends.square().mean()


# --- a diffusion model of points in the plane -----------------------------------------------------


class Denoiser(nn.Module):
    """Predicts the noise in points, given how much there is of it."""

    def __init__(self) -> None:
        super().__init__()
        self.time, self.point = nn.Linear(16, 64), nn.Linear(2, 64)
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.head = nn.Linear(64, 2)
        self.register_buffer("frequencies", torch.linspace(0, 4, 8).exp())

    def forward(self, points: Tensor, time: Tensor) -> Tensor:
        angles = time[:, None] * self.frequencies
        waves = torch.cat([angles.sin(), angles.cos()], 1)
        hidden = F.silu(self.point(points) + self.time(waves))
        hidden = hidden + F.silu(self.first(hidden))
        hidden = hidden + F.silu(self.second(hidden))
        return self.head(hidden)


def moons(count: int = 2048) -> Data:
    """Points of two half circles, with a little noise."""
    generator = draw()
    angle = math.pi * torch.rand(count, generator=generator)
    which = torch.randint(0, 2, (count,), generator=generator).float()
    sign = 1 - 2 * which
    points = torch.stack([sign * angle.cos() + which, sign * angle.sin() + 0.5 * which], 1)
    return (points + 0.05 * torch.randn(count, 2, generator=generator),)


def denoising_loss(model: nn.Module, batch: Data) -> Tensor:
    (points,) = batch
    time, noise = torch.rand(len(points)), torch.randn_like(points)
    angle = math.pi / 2 * time[:, None]
    return F.mse_loss(model(angle.cos() * points + angle.sin() * noise, time), noise)


# --- a recurrent network that labels every word of lines of several lengths -----------------------


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(30, 16, padding_idx=0)
        self.body = nn.GRU(16, 32, batch_first=True, bidirectional=True)
        self.head = nn.Linear(64, 6)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        how = {"batch_first": True, "enforce_sorted": False}
        packed = nn.utils.rnn.pack_padded_sequence(self.words(x), lengths, **how)
        hidden, _ = nn.utils.rnn.pad_packed_sequence(
            self.body(packed)[0], batch_first=True, total_length=x.shape[1]
        )
        return self.head(hidden)


def tagged_lines(count: int = 1024) -> Data:
    """Lines of 3 to 12 words; a label depends on the word and on both neighbours."""
    generator = draw()
    x = torch.randint(1, 30, (count, 12), generator=generator)
    lengths = torch.randint(3, 13, (count,), generator=generator)
    left, right = F.pad(x[:, :-1], (1, 0)), F.pad(x[:, 1:], (0, 1))
    is_word = torch.arange(12) < lengths[:, None]
    return x * is_word, lengths, torch.where(is_word, (x + left + right) % 6, -100)


def tag_loss(model: nn.Module, batch: Data) -> Tensor:
    x, lengths, labels = batch
    return F.cross_entropy(model(x, lengths).flatten(0, 1), labels.flatten(), ignore_index=-100)


# --- a graph network ------------------------------------------------------------------------------


class GraphNetwork(nn.Module):
    """Three rounds in which each node hears the mean of its neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 32)
        self.rounds = nn.ModuleList([nn.Linear(64, 32) for _ in range(3)])
        self.norms = nn.ModuleList([nn.LayerNorm(32) for _ in range(3)])
        self.head = nn.Linear(32, 1)

    def forward(self, nodes: Tensor, links: Tensor) -> Tensor:
        hidden = self.embed(nodes)
        for layer, norm in zip(self.rounds, self.norms, strict=True):
            heard = torch.cat([hidden, links @ hidden], -1)
            hidden = norm(hidden + F.relu(layer(heard)))
        return self.head(hidden.mean(1))[:, 0]


def graphs(count: int = 1024) -> Data:
    """Graphs of eight nodes; the target is a sum over nodes and their neighbours."""
    generator = draw()
    nodes = torch.randn(count, 8, 3, generator=generator)
    links = torch.rand(count, 8, 8, generator=generator) < 0.3
    links = (links | links.transpose(1, 2)).float()
    links = links / links.sum(-1, keepdim=True).clamp(min=1)
    heard = (links @ nodes)[..., 0]
    return nodes, links, torch.tanh(heard * nodes[..., 1]).sum(1)


def graph_loss(model: nn.Module, batch: Data) -> Tensor:
    nodes, links, y = batch
    return F.mse_loss(model(nodes, links), y)


# --- a mixture of experts -------------------------------------------------------------------------


class Mixture(nn.Module):
    """Two of four experts are heard; the second output is small if all are used alike."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(5, 4)
        self.experts = nn.ModuleList(
            [nn.Sequential(nn.Linear(5, 32), nn.GELU(), nn.Linear(32, 1)) for _ in range(4)]
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        shares = self.gate(x).softmax(-1)
        weights, chosen = shares.topk(2, -1)
        answers = torch.cat([expert(x) for expert in self.experts], 1).gather(1, chosen)
        answer = (weights / weights.sum(-1, keepdim=True) * answers).sum(1)
        return answer, 4 * shares.mean(0).square().sum()


def two_regions(count: int = 2048) -> Data:
    """One function of five numbers where the first is positive, another one elsewhere."""
    x = torch.randn(count, 5, generator=draw())
    return x, torch.where(x[:, 0] > 0, torch.sin(3 * x[:, 1]), x[:, 2] * x[:, 3])


def mixture_loss(model: nn.Module, batch: Data) -> Tensor:
    x, y = batch
    answer, imbalance = model(x)
    return F.mse_loss(answer, y) + 0.01 * imbalance


# --- two towers with a contrastive loss -----------------------------------------------------------


class Towers(nn.Module):
    """The similarity of each of the first to each of the second, by a temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 16))
        self.second = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 16))
        self.log_scale = nn.Parameter(torch.tensor(math.log(10.0)))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x, y = F.normalize(self.first(x), dim=-1), F.normalize(self.second(y), dim=-1)
        return x @ y.T * self.log_scale.exp()


def two_views(count: int = 2048) -> Data:
    """Two noisy functions of six numbers that are not shown."""
    generator = draw()
    hidden = torch.randn(count, 6, generator=generator)
    A, B = (torch.randn(6, width, generator=generator) for width in (10, 20))
    noise = (0.1 * torch.randn(count, width, generator=generator) for width in (10, 20))
    return torch.tanh(hidden @ A) + next(noise), torch.sin(hidden @ B) + next(noise)


def contrastive_loss(model: nn.Module, batch: Data) -> Tensor:
    scores, same = model(*batch), torch.arange(len(batch[0]))
    return (F.cross_entropy(scores, same) + F.cross_entropy(scores.T, same)) / 2


# --- digits ---------------------------------------------------------------------------------------


class VAE(nn.Module):
    """Returns the logits of the pixels, and the mean and the log-variance of the code."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 16))
        self.decoder = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 256))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encoder(x).chunk(2, -1)
        code = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        return self.decoder(code), mean, log_variance


def small_digits(count: int = 2000) -> Data:
    images, _ = load_mnist_subset("train")
    return ((F.avg_pool2d(images[:count], 2).flatten(1) * 0.5 + 0.3).clamp(0, 1),)


def evidence_loss(model: nn.Module, batch: Data) -> Tensor:
    (x,) = batch
    logits, mean, log_variance = model(x)
    pixels = F.binary_cross_entropy_with_logits(logits, x, reduction="sum") / len(x)
    return pixels + 0.5 * (mean**2 + log_variance.exp() - 1 - log_variance).sum(-1).mean()


def convolutions() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 5, stride=2), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.Conv2d(8, 16, 3, stride=2), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten()),
        nn.Linear(576, 10),
    )


def digits(count: int = 2000) -> Data:
    images, labels = load_mnist_subset("train")
    return images[:count], labels[:count]


# --- adapters of a small GPT-2 --------------------------------------------------------------------


class Adapted(nn.Module):
    """A layer of GPT-2 that is frozen, and two small factors that are trained (LoRA)."""

    def __init__(self, layer: nn.Module, rank: int = 4):
        super().__init__()
        self.layer = layer
        fan_in, fan_out = layer.weight.shape  # Conv1D of Transformers: the transpose of Linear's
        self.A = nn.Parameter(torch.randn(fan_in, rank) / fan_in**0.5)
        self.B = nn.Parameter(torch.zeros(rank, fan_out))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + x @ self.A @ self.B


def adapted_gpt2() -> nn.Module:
    """GPT-2 after 150 steps on progressions with differences to 3, then frozen, with adapters."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 32, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    no_dropout = {"resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0}
    model = GPT2LMHeadModel(GPT2Config(**sizes, **ends, **no_dropout))
    generator = torch.Generator().manual_seed(1)
    adam = Adam(model.parameters(), lr=3e-3)
    for _ in range(150):
        causal_loss(model, progressions(64, 3, generator)).backward()
        adam.step()
        adam.zero_grad()
    model.requires_grad_(False)
    for block in model.transformer.h:
        block.attn.c_attn, block.mlp.c_fc = Adapted(block.attn.c_attn), Adapted(block.mlp.c_fc)
    return model


def progressions(count: int, largest: int, generator: Generator) -> Data:
    """Twelve numbers modulo 32, with differences from 1 to the largest."""
    first = torch.randint(0, 32, (count, 1), generator=generator)
    difference = torch.randint(1, 1 + largest, (count, 1), generator=generator)
    return ((first + difference * torch.arange(12)) % 32,)


def causal_loss(model: nn.Module, batch: Data) -> Tensor:
    (x,) = batch
    return model(input_ids=x, labels=x).loss


# --- trainings ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """A training: ``steps`` batches of ``batch`` samples, evaluated in parts of ``part``."""

    build: Callable[[], nn.Module]
    data: Callable[[], Data]
    loss_fn: Callable[[nn.Module, Any], Tensor]
    batch: int
    steps: int = 400
    part: int = 256
    new_data: Callable[[], Data] | None = None  # to evaluate on, if not the data of the training
    warms_up: bool = False  # is trained with a warm-up too, unless schedules are given

    def batches(self, data: Data) -> Iterator[Data]:
        """All batches, by torch's random numbers; data that suffice for all steps stay in order."""
        count = len(data[0]) // self.batch  # in an epoch
        is_once = count == self.steps
        for step in range(self.steps):
            if step % count == 0:
                order = torch.arange(len(data[0])) if is_once else torch.randperm(len(data[0]))
                chosen = order.split(self.batch)
            yield tuple(part[chosen[step % count]] for part in data)

    def evaluate(self, model: nn.Module, data: Data) -> float:
        """Return the mean loss of the parts, without dropout and with the same noise for all."""
        model.train(False)
        torch.manual_seed(123)
        data = self.new_data() if self.new_data else data
        with torch.no_grad():
            parts = zip(*(x.split(self.part) for x in data), strict=True)
            losses = [self.loss_fn(model, part).item() for part in parts]
        return sum(losses) / len(losses)


KINDS = {
    "reversal, norms after": Kind(
        partial(Reverser, norm_first=False), sequences, reversal_loss, 32, 320, part=1024
    ),
    "reversal, norms before": Kind(
        partial(Reverser, norm_first=True), sequences, reversal_loss, 32, 320, part=1024
    ),
    "GRU": Kind(Recurrent, language, next_word_loss, 32, 320, part=2048, warms_up=True),
    "encoder": Kind(Encoder, counts, label_loss, 32, 320, part=2048, warms_up=True),
    "forecast": Kind(Forecaster, waves, forecast_loss, 32, part=1536),
    "Poisson": Kind(
        partial(tanh_network, 1),
        partial(points_of_a_line, batches=400, seed=0),
        poisson_loss,
        batch=64,
        new_data=partial(points_of_a_line, batches=4, seed=99),
    ),
    "heat": Kind(
        partial(tanh_network, 2), lambda: (torch.rand(2048, 2, generator=draw()),), heat_loss, 64
    ),
    "diffusion": Kind(Denoiser, moons, denoising_loss, 64),
    "GRU, tags": Kind(Tagger, tagged_lines, tag_loss, 32),
    "graphs": Kind(GraphNetwork, graphs, graph_loss, 32),
    "experts": Kind(Mixture, two_regions, mixture_loss, 64),
    "towers": Kind(Towers, two_views, contrastive_loss, 64),
    "VAE": Kind(VAE, small_digits, evidence_loss, 64),
    "CNN, batch norm": Kind(convolutions, digits, label_loss, 50),
    "LoRA": Kind(adapted_gpt2, lambda: progressions(1024, 7, draw()), causal_loss, 32),
}
