"""Train with NewtonSummary, and with Adam beside it: same network, same batches, no tuning.

Run it with ``python examples/train.py``. One seed tells little: docs/steer.md compares several
trainings, with Adam at its best of seven learning rates.
"""

import time

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import newton_summary as ns
from newton_summary.data import load_mnist_subset
from newton_summary.experiments.models import mlp

EPOCHS = 6
train_set = TensorDataset(*load_mnist_subset("train", pad=False))
images, labels = load_mnist_subset("test", pad=False)


def loss_fn(model, batch):
    """Return the mean loss of a batch."""
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def newton_summary(model):
    """Return the optimizer, which needs no learning rate."""
    return ns.NewtonSummary(model, loss_fn)


def adam(model):
    """Return Adam with the learning rate that everybody starts from."""
    return torch.optim.Adam(model.parameters(), lr=1e-3)


for make_optimizer in (adam, newton_summary):
    torch.manual_seed(0)  # both start from the same weights and see the same batches
    model = mlp()  # 784-1024-200-100-10, weights N(0, 1/fan_in)
    optimizer = make_optimizer(model)
    print(f"{make_optimizer.__name__}\n  epoch  training loss  test accuracy  seconds")
    start = time.perf_counter()
    for epoch in range(1, EPOCHS + 1):
        losses = []
        for batch in DataLoader(train_set, batch_size=100, shuffle=True):
            loss = loss_fn(model, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step(batch) if make_optimizer is newton_summary else optimizer.step()
            losses.append(loss.detach())
        with torch.no_grad():
            accuracy = (model(images).argmax(1) == labels).float().mean()
        mean, seconds = torch.stack(losses).mean(), time.perf_counter() - start
        if epoch % 2 == 0:
            print(f"  {epoch:5}  {mean:13.5f}  {accuracy:13.1%}  {seconds:7.1f}")
