"""mindcv's `TrainStep` with ``gradient_accumulation_steps``: one update of micro-batches
is the update of the large batch, also where the last micro-batch or the last window is
short, and where gradients are clipped.
"""

from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindcv.utils.train_step import TrainStep
from mindspore import Tensor, nn

CLIPPED = {"clip_grad": True, "clip_value": 0.1}


@pytest.mark.parametrize(
    ("items", "options"),
    [(8, {}), (7, {}), (6, {}), (8, CLIPPED)],
    ids=["equal", "short_batch", "short_window", "clipped"],
)
def test_accumulated_update(items: int, options: dict[str, Any]) -> None:
    ms.set_context(mode=ms.GRAPH_MODE)
    random = np.random.default_rng(1)
    x = random.standard_normal((items, 5)).astype(np.float32)
    y = np.sin(x.sum(1, keepdims=True))
    first = random.standard_normal((1, 5)).astype(np.float32)
    weights = []
    for size, steps in ((items, 1), (2, 4)):
        net = nn.Dense(5, 1, weight_init=Tensor(first), bias_init="zeros")
        step = TrainStep(
            nn.WithLossCell(net, nn.MSELoss()),
            nn.SGD(net.trainable_params(), 0.1),
            Tensor(1.0, ms.float32),
            gradient_accumulation_steps=steps,
            **options,
        )
        for start in range(0, items, size):
            step(Tensor(x[start : start + size]), Tensor(y[start : start + size]))
        weights.append(net.weight.asnumpy())
    np.testing.assert_allclose(weights[1], weights[0], rtol=1e-4)
