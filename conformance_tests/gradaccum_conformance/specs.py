"""Models, batches and optimizers as plain data, so that every backend builds the same
ones.

A model is a tuple of layers applied in turn to ``x``; its loss is the softmax
cross-entropy of the last layer's output. Parameters are NumPy arrays by name:
``"{index of the layer}.{parameter}"``. Every array is row-major with the batch first.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Arrays = dict[str, Array]


class Dense(NamedTuple):
    """``x @ weight.T + bias`` on the last axis; weight (n_out, n_in), bias (n_out,)."""

    n_in: int
    n_out: int

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {"weight": (self.n_out, self.n_in), "bias": (self.n_out,)}


class Conv(NamedTuple):
    """Cross-correlation, stride 1, no padding, on (batch, c_in, height, width); weight
    (c_out, c_in, size, size), bias (c_out,).
    """

    c_in: int
    c_out: int
    size: int

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {
            "weight": (self.c_out, self.c_in, self.size, self.size),
            "bias": (self.c_out,),
        }


class Tanh(NamedTuple):
    """Elementwise tanh."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {}


class AvgPool(NamedTuple):
    """Mean of each `size` x `size` square, stride `size`, no padding (rows and columns
    left over are dropped).
    """

    size: int

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {}


class Flatten(NamedTuple):
    """(batch, ...) to (batch, product)."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {}


Layer = Dense | Conv | Tanh | AvgPool | Flatten


class Model(NamedTuple):
    """A network: the shape of one input and the layers."""

    name: str
    input_shape: tuple[int, ...]
    layers: tuple[Layer, ...]

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes by parameter name, in the order every backend must keep."""
        return {
            f"{index}.{name}": shape
            for index, layer in enumerate(self.layers)
            for name, shape in layer.shapes().items()
        }


class Batch(NamedTuple):
    """Inputs, shape (batch, *input_shape), float64, and labels, shape (batch,),
    int64.
    """

    x: Array
    y: NDArray[np.int64]

    def rows(self, start: int, stop: int) -> Batch:
        """The items from `start` up to `stop`."""
        return Batch(self.x[start:stop], self.y[start:stop])

    @property
    def items(self) -> int:
        return len(self.y)


class Optimizer(NamedTuple):
    """An inner optimizer. ``capture`` is plain SGD that also stores its number of calls
    and its last gradient.
    """

    kind: Literal["capture", "sgd", "momentum", "adam", "adamw"]
    learning_rate: float = 0.125
    """``momentum`` has coefficient 0.9, ``adamw`` weight decay 0.01; else 0. Adam's
    betas are (0.9, 0.999), its epsilon 1e-8.
    """


LINEAR = Model("linear", (6,), (Dense(6, 4),))
MLP = Model("mlp", (6,), (Dense(6, 8), Tanh(), Dense(8, 4)))
LENET = Model(
    "lenet",
    (1, 8, 8),
    (
        Conv(1, 6, 3),
        Tanh(),
        AvgPool(2),
        Flatten(),
        Dense(54, 64),
        Tanh(),
        Dense(64, 10),
    ),
)
MODELS = (LINEAR, MLP, LENET)


def make_weights(model: Model) -> Arrays:
    """Initial weights, float64 values that float32 holds exactly: uniform in
    +-1/sqrt(fan_in), the rule of LeCun et al. 1998.
    """
    rng = np.random.default_rng(0)
    weights = {}
    for name, shape in model.parameter_shapes().items():
        fan_in = int(np.prod(shape[1:])) if len(shape) > 1 else int(shape[0])
        bound = 1 / np.sqrt(fan_in)
        weights[name] = (
            rng.uniform(-bound, bound, shape).astype(np.float32).astype(np.float64)
        )
    return weights


def make_batch(model: Model, items: int, seed: int = 0) -> Batch:
    """A batch of normal inputs (held exactly by float32) and uniform labels."""
    rng = np.random.default_rng(seed)
    last = model.layers[-1]
    assert isinstance(last, Dense)
    x = (
        rng.standard_normal((items, *model.input_shape))
        .astype(np.float32)
        .astype(np.float64)
    )
    return Batch(x, rng.integers(0, last.n_out, items))
