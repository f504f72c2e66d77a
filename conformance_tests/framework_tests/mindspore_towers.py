"""Two towers with a temperature, seven pairs of data, and a loss that couples the items
of a batch.
"""

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

RNG = np.random.RandomState(5)
IMAGES, TEXTS = RNG.randn(7, 4), RNG.randn(7, 4)
LEFT, RIGHT = RNG.randn(3, 4), RNG.randn(3, 4)


class Towers(nn.Cell):
    """Two towers, and a temperature that only the loss reads."""

    def __init__(self, dtype=ms.float64):
        super().__init__()
        self.left, self.right = (
            Parameter(Tensor(LEFT, dtype), name="left"),
            Parameter(Tensor(RIGHT, dtype), name="right"),
        )
        self.temperature = Parameter(Tensor(0.7, dtype), name="temperature")

    def construct(self, images, texts):
        return {
            "images": ops.tanh(ops.matmul(images, self.left.T)),
            "texts": ops.tanh(ops.matmul(texts, self.right.T)),
        }


def info_nce(net):
    """CLIP's loss: each image's own text among all texts, and the other way round, at a
    learned temperature.
    """

    def loss(outputs):
        a, b = outputs["images"], outputs["texts"]
        logits = ops.matmul(a, b.T) * ops.exp(net.temperature)
        own = (a * b).sum(1) * ops.exp(net.temperature)
        by_image, by_text = (
            ops.log(ops.exp(logits).sum(1)),
            ops.log(ops.exp(logits).sum(0)),
        )
        return ((by_image - own) + (by_text - own)).mean()

    return loss
