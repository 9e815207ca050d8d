"""Advice for the optimizer that you have: which layers of a network should Adam move faster?

Run it with ``python examples/advise.py``.
"""

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import newton_summary as ns
from newton_summary.data import load_mnist_subset

torch.manual_seed(0)
model = nn.Sequential(
    nn.Flatten(),
    nn.Linear(1024, 200),
    nn.Tanh(),
    nn.Linear(200, 100),
    nn.Tanh(),
    nn.Linear(100, 10),
)
dataset = TensorDataset(*load_mnist_subset("train"))


def loss_fn(model, batch):
    """Return the mean loss of a batch."""
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def train(model, adam, epochs):
    """Train as usual, and return the mean loss of the last epoch."""
    torch.manual_seed(1)
    for _ in range(epochs):
        losses = []
        for batch in DataLoader(dataset, batch_size=100, shuffle=True):
            loss = loss_fn(model, batch)
            adam.zero_grad()
            loss.backward()
            adam.step()
            losses.append(loss.detach())
    return float(torch.stack(losses).mean())


# Somebody has chosen a careful learning rate, and trains for one epoch.
adam = torch.optim.Adam(model.parameters(), lr=1e-5)
print(f"loss in the first epoch:  {train(model, adam, 1):.4f}\n")

# By which factor should each layer step more? The direction is Adam's own next step, measured on
# batches of 1,000; what differs between these gives the error bars. Nothing is changed yet.
batches = DataLoader(dataset, batch_size=1000)
advice = ns.suggest_lrs(model, loss_fn, batches, adam, partition="canonical", fraction=0.3)
print(advice, end="\n\n")

# Go on with and without it, from the same state of the model and of Adam, on the same batches.
before, after = copy.deepcopy((model, adam)), (model, adam)
advice.apply()  # gives every layer its own learning rate
print(f"three more epochs, as before:    {train(*before, 3):.4f}")
print(f"three more epochs, as suggested: {train(*after, 3):.4f}")
