"""Accelerate's ``accumulate()``: one update of micro-batches is the update of the large
batch, also where the last micro-batch or the last window is short.
"""

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


@pytest.mark.parametrize(
    "items", [8, 7, 6], ids=["equal", "short_batch", "short_window"]
)
def test_accumulated_update(items: int) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(items, 5, dtype=torch.float64, generator=generator)
    data = TensorDataset(x, x.sum(1, keepdim=True).sin())
    weights = []
    for batch_size, steps in ((items, 1), (2, 4)):
        torch.manual_seed(0)
        net = nn.Linear(5, 1).double()
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
        model, optimizer, loader = accelerator.prepare(
            net, torch.optim.SGD(net.parameters(), lr=0.1), DataLoader(data, batch_size)
        )
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(inputs), targets)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        weights.append(net.weight.detach())
    torch.testing.assert_close(weights[1], weights[0])
