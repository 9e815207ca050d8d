"""Histories to make pages of."""

import torch
from torch import nn

import newton_summary as ns

NAMES = ("0.weight", "0.bias", "2.weight", "2.bias")
TITLES = tuple(f"{name} (Linear)" for name in NAMES)


def small_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def loss_fn(model, batch):
    inputs, labels = batch
    return nn.functional.cross_entropy(model(inputs), labels)


def small_batches(count=3):
    torch.manual_seed(1)
    inputs = torch.randn(count, 20, 3, dtype=torch.float64)
    return [(x, (x[:, 0] > 0).long()) for x in inputs]


def small_history(name="small", epochs=3, lr=0.5, **facts):
    """Measure a small network over a few epochs, with trials, curves and standard errors."""
    model, batches = small_model(), small_batches()
    history = ns.History(name, facts=facts)
    for epoch in range(epochs):
        summary = ns.summarize(model, loss_fn, batches, stderr=True)
        rates = ns.learning_rates(summary)
        trials = ns.step_trials(model, loss_fn, batches, summary, rates)
        history.add(epoch, summary, rates, trials=trials)
        history.add_value("train_loss", epoch, float(summary.loss))
        history.add_value("test_loss", epoch, 1.1 * float(summary.loss))
        history.add_value("test_accuracy", epoch, 0.5 + 0.1 * epoch)
        for batch in batches:
            model.zero_grad()
            loss_fn(model, batch).backward()
            with torch.no_grad():
                for p in model.parameters():
                    p -= lr * p.grad
    return history


def random_summary(size, seed=0, names=None):
    """Return a summary with a positive definite Hbar, of groups with given names."""
    generator = torch.Generator().manual_seed(seed)
    root = torch.randn(size, size, generator=generator, dtype=torch.float64)
    scale = 10 ** torch.linspace(-3, 3, size, dtype=torch.float64)
    Hbar = (root @ root.T / size + torch.eye(size)) * scale[:, None] * scale[None, :]
    gbar = torch.rand(size, generator=generator, dtype=torch.float64) * scale
    partition = None
    if names is not None:
        model = nn.ParameterDict({f"p{s}": torch.ones(s + 1) for s in range(size)})
        partition = ns.make_partition(model, {name: [f"p{s}"] for s, name in enumerate(names)})
    return ns.Summary(gbar=gbar, Hbar=Hbar, D3=scale**3, partition=partition)
