"""Measure a network: how its layers act on the loss, and how far each should move.

Run it with ``python examples/measure.py``.
"""

import torch
import torch.nn.functional as F
from torch import nn

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
data = load_mnist_subset("train")  # 5,000 images and labels, as one batch


def loss_fn(model, batch):
    """Return the mean loss of a batch."""
    images, labels = batch
    return F.cross_entropy(model(images), labels)


# A partition says which parameters move together. "canonical": every tensor is a group.
part = ns.make_partition(model, "canonical")
print(part, end="\n\n")

# Along the gradient: the slope of each group, the curvature of each and between each two of them,
# and the third derivative of each. Exact, for the price of a few gradients.
summary = ns.summarize(model, loss_fn, data, partition=part)
print(summary, end="\n\n")

# The step sizes that this suggests, with interactions between groups taken into account.
rates = ns.learning_rates(summary)
print(rates, end="\n\n")

# Is it true? Take a part of that step, and look at the loss. The model is put back afterwards.
print(f"The loss is {summary.loss:.4f}. A fraction of the step changes it by")
for trial in ns.step_trials(model, loss_fn, data, summary, rates, fractions=(0.1, 0.3, 1.0)):
    print(f"  {trial.fraction:4.1f}   {trial.real:+.4f}, predicted {trial.predicted:+.4f}")

# What one learning rate for all groups would have done: the trivial partition has one group.
together = ns.summarize(model, loss_fn, data, partition="trivial")
rate = ns.learning_rates(together)
(trial,) = ns.step_trials(model, loss_fn, data, together, rate, fractions=(1.0,))
print(f"With one rate for everything ({rate.eta[0]:.3g}) it changes by {trial.real:+.4f}.")
