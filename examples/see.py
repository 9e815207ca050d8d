"""See the layers during a training: a page with heat maps, learning rates and curves.

Run it with ``python examples/see.py``, and open the page that it names.
"""

import sys
from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from newton_summary.data import load_mnist_subset
from newton_summary.integrations.monitor import Monitor

torch.manual_seed(0)
model = nn.Sequential(
    OrderedDict(  # LeNet-5
        conv1=nn.Sequential(nn.Conv2d(1, 6, 5), nn.Tanh(), nn.MaxPool2d(2)),
        conv2=nn.Sequential(nn.Conv2d(6, 16, 5), nn.Tanh(), nn.MaxPool2d(2), nn.Flatten()),
        linear1=nn.Sequential(nn.Linear(400, 120), nn.Tanh()),
        linear2=nn.Sequential(nn.Linear(120, 84), nn.Tanh()),
        linear3=nn.Linear(84, 10),
    )
)
dataset = TensorDataset(*load_mnist_subset("train"))
test = load_mnist_subset("test")


def loss_fn(model, batch):
    """Return the mean loss of a batch."""
    images, labels = batch
    return F.cross_entropy(model(images), labels)


# The monitor measures on the first 500 images whenever it is asked to. It changes nothing. One
# group for each layer; "canonical" would have one for each tensor.
layers = {name: rf"^{name}\." for name, _ in model.named_children()}
monitor = Monitor(
    loss_fn=loss_fn, data=dataset[:500], partition=layers, name="LeNet, SGD", console=False
)
sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

print("the learning rate along the gradient that the curvature suggests for each layer")
print("epoch  test loss  " + "".join(f"{name:>9}" for name in layers))
for epoch in range(5):
    if epoch > 0:
        losses = []
        for batch in DataLoader(dataset, batch_size=100, shuffle=True):
            loss = loss_fn(model, batch)
            sgd.zero_grad()
            loss.backward()
            sgd.step()
            losses.append(loss.detach())
        monitor.history.add_value("train_loss", epoch, torch.stack(losses).mean())
    test_loss = loss_fn(model, test).item()
    monitor.history.add_value("test_loss", epoch, test_loss)
    measured = monitor.measure(model, epoch)
    rates = "".join(f"{rate:9.3f}" for rate in measured.eta.tolist())
    print(f"{epoch:5}  {test_loss:9.4f}  {rates}")

path = monitor.write_report(sys.argv[1] if len(sys.argv) > 1 else "lenet.html")
print(f"\nOpen {path} in a browser: {path.stat().st_size / 1e6:.1f} MB, no network needed.")
