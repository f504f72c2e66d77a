"""MindSpore, PyNative, float32, Adam: a window layer by layer, with an optimizer for
each layer, beside the usual one.

Both make the update that the large batch makes. Memory is what a process's resident set
grows by while a model is made and trained for three windows, without parameters and
moments: gradients, sums, borders, and what MindSpore puts aside for either. The wide
layers have few items, so that reading and writing the parameters takes the time; the
narrow ones have little work at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import mindspore as ms
from mindspore import nn, ops

import gradaccum
import gradaccum_mindspore
from benchmarks.case import Case, Curve
from benchmarks.peak import peak_bytes

BASELINE, LAYERED = "usual window", "layered"
ITEMS = 4
"""Of a micro-batch."""
MICRO_BATCHES = (1, 4, 16)
SHAPES = {
    "4 layers of 1024": (4, 1024),
    "16 layers of 1024": (16, 1024),
    "16 layers of 64": (16, 64),
}


def cases(quick: bool) -> Iterator[Case | Curve]:
    needed: dict[str, list[float]] = {BASELINE: [], LAYERED: []}
    for name, (layers, width) in SHAPES.items():
        width = min(width, 64) if quick else width
        for micro_batches in MICRO_BATCHES:
            sizes = layers, width, micro_batches
            windows = {way: update_of(way, *sizes) for way in needed}
            held = 12 * layers * width * (width + 1)
            peaks = {
                way: (peak_bytes("mindspore_layered", way, *sizes) - held) / 2**20
                for way in needed
            }
            if name == "16 layers of 1024":
                for way, mebibytes in peaks.items():
                    needed[way].append(mebibytes)
            yield Case(
                f"{name}, {micro_batches} micro-batches",
                BASELINE,
                windows,
                {way: {"needed MiB": peaks[way]} for way in needed},
            )
    for way, grown in needed.items():
        yield Curve(
            "MindSpore: a window of 16 layers of 1024",
            way,
            MICRO_BATCHES,
            grown,
            "micro-batches",
            "sums and temporaries, MiB",
        )


def window(way: str, *sizes: int) -> Callable[[], object]:
    """Three updates of a new model."""

    def run() -> None:
        update = update_of(way, *sizes)
        for _ in range(3):
            update()

    return run


def update_of(
    way: str, layers: int, width: int, micro_batches: int
) -> Callable[[], object]:
    ms.set_context(mode=ms.PYNATIVE_MODE)
    ms.set_seed(0)
    model = nn.SequentialCell(
        [nn.Dense(width, width, activation="tanh") for _ in range(layers)]
    )
    x, y = (ops.randn(ITEMS * micro_batches, width) for _ in range(2))

    def loss_fn(outputs: ms.Tensor, targets: ms.Tensor) -> ms.Tensor:
        return (outputs - targets).square().mean()

    if way == BASELINE:
        opt = gradaccum.wrap(
            nn.Adam(model.trainable_params()), None, on_overflow="ignore"
        )
        update = gradaccum_mindspore.value_and_update(
            lambda x, y: loss_fn(model(x), y), opt, micro_batch_size=ITEMS
        )

        def run() -> object:
            return update(x, y).asnumpy(), model[0].weight.asnumpy()

    else:
        optimizers = [nn.Adam(layer.trainable_params()) for layer in model]

        def run() -> object:
            loss = gradaccum_mindspore.layered_backward(
                model, loss_fn, x, y, micro_batch_size=ITEMS, optimizer=optimizers
            )
            return loss.asnumpy(), model[0].weight.asnumpy()

    return run
