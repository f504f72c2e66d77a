"""Lightning's ``accumulate_grad_batches``: one update of micro-batches is the update of
the large batch, also where the last micro-batch or the last window is short.
"""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Regression(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(5, 1).double()

    def training_step(self, batch: Any, index: int) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.net(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize(
    "items", [8, 7, 6], ids=["equal", "short_batch", "short_window"]
)
def test_accumulated_update(items: int) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(items, 5, dtype=torch.float64, generator=generator)
    data = TensorDataset(x, x.sum(1, keepdim=True).sin())
    weights = []
    for batch_size, steps in ((items, 1), (2, 4)):
        module = Regression()
        trainer = pl.Trainer(
            max_epochs=1,
            accelerator="cpu",
            accumulate_grad_batches=steps,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, DataLoader(data, batch_size))
        weights.append(module.net.weight.detach())
    torch.testing.assert_close(weights[1], weights[0])
