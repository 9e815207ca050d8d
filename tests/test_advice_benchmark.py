"""The finder of benchmarks/advice.py is Lightning's, and its tables are made of the losses."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import advice


@pytest.mark.slow  # imports lightning
@pytest.mark.filterwarnings("ignore")
def test_the_finder_is_lightnings(tmp_path):
    lightning = pytest.importorskip("lightning.pytorch")
    from lightning.pytorch.tuner import Tuner

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
    x = torch.randn(160, 4)
    batches = [(part, part.sin().sum(1, keepdim=True)) for part in x.split(16)]

    def loss_fn(model, batch):
        return (model(batch[0]) - batch[1]).square().mean()

    expected = advice.finder_rate(net, loss_fn, batches)

    class Module(lightning.LightningModule):
        lr = 1e-3

        def __init__(self):
            super().__init__()
            self.net = net

        def training_step(self, batch, _):
            return loss_fn(self.net, batch)

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=self.lr)

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=20, default_root_dir=tmp_path, **quiet
    )
    loader = torch.utils.data.DataLoader(batches, batch_size=None)
    found = Tuner(trainer).lr_find(Module(), loader)
    assert found.suggestion() == pytest.approx(expected, rel=1e-6)


def test_tables_compare_with_the_best_rate():
    cells = [
        {"training": "MLP", "method": "adam", "seed": 0, "lr": lr, "loss": 1.0 + (lr != 3e-3)}
        for lr in advice.RATES
    ]
    said = {"now": [-0.1, -0.1], "then": [-0.2, -0.2], "change": 3.0}
    cells.append({"training": "MLP", "method": "once", "seed": 0, "lr": 3e-4, "loss": 1.2})
    cells[-1]["advice"] = [said]
    cells.append({"training": "MLP", "method": "order", "seed": 0, "lr": 3e-3, "loss": 1.3})
    cells.append({"training": "MLP", "method": "finder", "seed": 0, "loss": float("nan")})
    text = advice.summary(cells)
    assert "| advice once, 10 times too small | 1 | 1.20 | 1.2 | 1 of 1 | 0 of 1 |" in text
    assert "| no advice, 10 times too large | 1 | 2.00 | 2 | 0 of 1 |  |" in text
    assert "batches in another order | 1 | 1.30 | 1.3 | 1 of 1 | 1 of 1 |" in text
    assert "| Lightning's finder | 1 | 1000.00 | failed | 0 of 1 |  |" in text
    assert "Of 1 pieces of advice 1 suggested a change; 0 predicted a higher loss" in text
