"""A user's training script for MindSpore: a type checker names each line that ends in
`# wrong`, and no other line.
"""

from mindspore import nn

import gradaccum
import gradaccum_mindspore


def train(model: nn.Cell) -> None:
    optimizer = nn.Momentum(model.get_parameters(), 0.1, 0.9)
    opt: gradaccum_mindspore.AccumulatingOptimizer = gradaccum.wrap(
        optimizer, steps=4, clip_norm=1.0, data_parallel=True
    )
    opt.flush()
    gradaccum_mindspore.wrap(
        optimizer, steps=[(0, 4), (1000, 8)], reduction="sum_per_item", name="generator"
    )

    gradaccum_mindspore.wrap(optimizer, steps="four")  # wrong
    gradaccum_mindspore.wrap(optimizer)  # wrong
    gradaccum_mindspore.wrap(optimizer, steps=4, clip_nrom=1.0)  # wrong
    gradaccum_mindspore.wrap(optimizer, steps=4, reduction="average")  # wrong
    gradaccum.wrap(optimizer, steps=4, clip_nrom=1.0)  # wrong
