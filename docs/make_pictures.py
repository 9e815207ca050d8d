"""Make the pictures of the documentation again: ``python docs/make_pictures.py``.

Trains LeNet on the images inside the package, measures it along the way, and draws what was
measured, in light and in dark. Takes about a minute on one core. The picture of the report's page
needs playwright and Chromium; without them it is left as it is.
"""

import importlib.util
import os
import shutil
import tempfile
from collections import OrderedDict
from pathlib import Path

import matplotlib as mpl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from newton_summary import figures
from newton_summary.analysis import normalized
from newton_summary.data import load_mnist_subset
from newton_summary.experiments.models import TANH_GAIN, initialize
from newton_summary.figures.drawing import Picture, draw_matrix
from newton_summary.history import History
from newton_summary.integrations.monitor import Monitor
from newton_summary.summary import Block

IMAGES = Path(__file__).parent / "images"
EPOCHS = 5
DARK = {"text": "#e6e6e6", "page": "#131416"}  # the page is furo's


def lenet() -> nn.Module:
    """Return LeNet-5 with weights drawn as in the paper, its layers with names."""
    model = nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(1, 6, 5),
            act1=nn.Tanh(),
            pool1=nn.MaxPool2d(2),
            conv2=nn.Conv2d(6, 16, 5),
            act2=nn.Tanh(),
            pool2=nn.MaxPool2d(2),
            flat=nn.Flatten(),
            fc1=nn.Linear(400, 120),
            act3=nn.Tanh(),
            fc2=nn.Linear(120, 84),
            act4=nn.Tanh(),
            fc3=nn.Linear(84, 10),
        )
    )
    return initialize(model, TANH_GAIN)


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean loss of a batch."""
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def train() -> History:
    """Train with SGD, and measure before the training and after every epoch."""
    torch.manual_seed(0)
    model = lenet()
    dataset = TensorDataset(*load_mnist_subset("train"))
    test = load_mnist_subset("test")
    monitor = Monitor(loss_fn=loss_fn, data=dataset[:1000], name="LeNet, SGD")
    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(EPOCHS + 1):
        if epoch > 0:
            losses = []
            for batch in DataLoader(dataset, batch_size=100, shuffle=True):
                sgd.zero_grad()
                loss = loss_fn(model, batch)
                loss.backward()
                sgd.step()
                losses.append(loss.detach())
            monitor.history.add_value("train_loss", epoch, torch.stack(losses).mean())
        with torch.no_grad():
            monitor.history.add_value("test_loss", epoch, loss_fn(model, test))
        monitor.measure(model, epoch)
        print(f"epoch {epoch}: test loss {monitor.history.curves['test_loss'][-1][1]:.4f}")
    return monitor.history


def interactions(history: History) -> Picture:
    """Draw how the layers interact, before the training and after it."""
    figure = Picture(figsize=(10.4, 4.9), layout="compressed")
    shown = {"before training": 0, f"after {EPOCHS} epochs": -1}
    for axis, (title, i) in zip(figure.subplots(1, 2), shown.items(), strict=True):
        summary = history.measured[i].summary
        block = Block(summary.names, summary.names, normalized(summary))
        draw_matrix(axis, block, font_size=9)
        axis.set_title(title, loc="left", fontsize=12)
    return figure


def save(name: str, draw) -> None:
    """Write a picture twice: for a light page and for a dark one."""
    for kind, colours in (("light", {}), ("dark", DARK)):
        settings = {}
        if colours:
            coloured = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color")
            settings = dict.fromkeys((*coloured, "ytick.color"), colours["text"])
            settings |= {"axes.facecolor": colours["page"], "figure.facecolor": colours["page"]}
        with mpl.rc_context(settings):
            draw().savefig(IMAGES / f"{name}_{kind}.png", dpi=130, bbox_inches="tight")
    print(f"wrote {name}")


def photograph(history: History) -> None:
    """Write a picture of the report's page."""
    if importlib.util.find_spec("playwright") is None or not shutil.which("chromium"):
        print("no picture of the report without playwright and Chromium")
        return
    from playwright.sync_api import sync_playwright

    import newton_summary as ns

    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        page_file = ns.report(history, os.path.join(folder, "report.html"))
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"))
        for kind in ("light", "dark"):
            page = browser.new_page(
                viewport={"width": 1180, "height": 1010}, color_scheme=kind, device_scale_factor=1
            )
            page.goto(page_file.as_uri())
            page.wait_for_timeout(2000)
            page.screenshot(path=IMAGES / f"report_{kind}.png")
        browser.close()
    print("wrote report")


def main() -> None:
    """Train, draw, write."""
    IMAGES.mkdir(exist_ok=True)
    history = train()
    save("interactions", lambda: interactions(history))
    save("rates", lambda: figures.rates(history))
    photograph(history)


if __name__ == "__main__":
    main()
