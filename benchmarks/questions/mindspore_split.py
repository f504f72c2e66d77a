"""MindSpore, GRAPH_MODE: the gradient of a large batch from 8 micro-batches, beside a
cell by hand that adds them, and beside one pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import mindspore as ms
from mindspore import nn, ops

import gradaccum_mindspore
from benchmarks.case import Case
from benchmarks.contestants.mindspore_peers import STEPS, Gradient, Net, batch

BASELINE = "hand-written loop in a cell"
SIZES = {
    "4 x 64^2, 8 items": (64, 8),
    "4 x 256^2, 8 items": (256, 8),
    "4 x 1024^2, 8 items": (1024, 8),
}
"""(width, items of a micro-batch)."""


class ByHand(Gradient):
    """The tutorials' sums without their Parameters: slices of the batch in turn,
    gradients added, the mean at the end.
    """

    def __init__(self, net: Net, items: int) -> None:
        super().__init__(net)
        self.items = items

    def construct(self, x: Any) -> Any:
        total = self.gradient(self.net, self.weights)(x[: self.items])
        for place in range(1, STEPS):
            more = self.gradient(self.net, self.weights)(
                x[place * self.items : (place + 1) * self.items]
            )
            total = [a + b for a, b in zip(total, more)]  # noqa: B905
        return [a / STEPS for a in total]


class Ours(nn.Cell):  # type: ignore[misc]
    """`gradaccum_mindspore.value_and_grad` in a cell."""

    def __init__(self, net: Net, items: int) -> None:
        super().__init__(auto_prefix=False)
        self.net = net
        self.value_and_grad = gradaccum_mindspore.value_and_grad(
            net, None, net.trainable_params(), micro_batch_size=items
        )

    def construct(self, x: Any) -> Any:
        return self.value_and_grad(x)


def cases(quick: bool) -> Iterator[Case]:
    ms.set_context(mode=ms.GRAPH_MODE)
    for name, (width, items) in list(SIZES.items())[: 2 if quick else None]:
        x = ops.concat([batch(items, width)] * STEPS)
        cells = {
            BASELINE: ByHand(Net(width), items),
            "gradaccum": Ours(Net(width), items),
            "large batch in one pass": Gradient(Net(width)),
        }
        yield Case(
            name, BASELINE, {label: window_of(cell, x) for label, cell in cells.items()}
        )


def window_of(cell: Any, x: Any) -> Callable[[], object]:
    """One call, and a wait for its last gradient."""

    def window() -> object:
        out = cell(x)
        gradients = out[1] if len(out) == 2 else out
        return gradients[-1].asnumpy()

    return window
