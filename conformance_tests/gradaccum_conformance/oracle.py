"""The truth: loss and gradient of a model in float64 NumPy, differentiated by hand.

Each layer is a pair of functions: forward returns the output and a function that maps
the output's gradient to the input's gradient and the parameters' gradients. The softmax
cross-entropy's gradient is (softmax - one-hot): Bridle, 1990.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import singledispatch

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from gradaccum_conformance.coupled_loss import TEMPERATURE, contrast, mirrored
from gradaccum_conformance.harness import Loss
from gradaccum_conformance.specs import (
    Array,
    Arrays,
    AvgPool,
    Batch,
    Conv,
    Dense,
    Flatten,
    Layer,
    Model,
    Tanh,
)

Backward = Callable[[Array], tuple[Array, Arrays]]


def loss_and_gradient(
    model: Model, weights: Arrays, batch: Batch, *, loss: Loss = "mean"
) -> tuple[float, Arrays]:
    """The loss of the batch, mean or sum over its items, and its gradient by parameter
    name.
    """
    logits, backward = outputs_and_backward(model, weights, batch.x)
    value, gradient = _cross_entropy(logits, batch.y, loss)
    return value, backward(gradient)


def outputs_and_backward(
    model: Model, weights: Arrays, x: Array
) -> tuple[Array, Callable[[Array], Arrays]]:
    """The model's output, and the function that maps its gradient to the
    parameters'.
    """
    backwards = []
    for index, layer in enumerate(model.layers):
        x, backward = forward(layer, _own(weights, index), x)
        backwards.append((index, backward))

    def parameters_gradient(dx: Array) -> Arrays:
        gradient: Arrays = {}
        for index, backward in reversed(backwards):
            dx, own = backward(dx)
            gradient |= {f"{index}.{name}": array for name, array in own.items()}
        return {name: gradient[name] for name in weights}

    return x, parameters_gradient


def coupled_loss_and_gradient(
    model: Model, weights: Arrays, batch: Batch
) -> tuple[float, Arrays]:
    """The `contrast` loss of the whole batch and its gradient, with that of
    ``temperature``.
    """
    left, left_backward = outputs_and_backward(model, weights, batch.x)
    right, right_backward = outputs_and_backward(model, weights, mirrored(batch.x))
    coupled = contrast(left, right, TEMPERATURE)
    left_gradient = left_backward(coupled.left)
    right_gradient = right_backward(coupled.right)
    gradient = {name: left_gradient[name] + right_gradient[name] for name in weights}
    return coupled.loss, gradient | {"temperature": np.asarray(coupled.temperature)}


def predict(model: Model, weights: Arrays, x: Array) -> Array:
    """The model's output for inputs (batch, *input_shape)."""
    return outputs_and_backward(model, weights, x)[0]


@singledispatch
def forward(layer: Layer, w: Arrays, x: Array) -> tuple[Array, Backward]:
    """The layer's output for `x`, and its backward function."""
    raise TypeError(f"no such layer: {layer!r}")


@forward.register
def _(layer: Dense, w: Arrays, x: Array) -> tuple[Array, Backward]:
    def backward(dy: Array) -> tuple[Array, Arrays]:
        rows = x.reshape(-1, layer.n_in)
        dys = dy.reshape(-1, layer.n_out)
        return dy @ w["weight"], {"weight": dys.T @ rows, "bias": dys.sum(0)}

    return x @ w["weight"].T + w["bias"], backward


@forward.register
def _(layer: Conv, w: Arrays, x: Array) -> tuple[Array, Backward]:
    size = (layer.size, layer.size)
    patches: Array = sliding_window_view(x, size, axis=(2, 3))  # type: ignore[call-overload]  # numpy 1.26 types axis as one int

    def backward(dy: Array) -> tuple[Array, Arrays]:
        margin = layer.size - 1
        padded = np.pad(dy, ((0, 0), (0, 0), (margin, margin), (margin, margin)))
        flipped = w["weight"][:, :, ::-1, ::-1]
        windows: Array = sliding_window_view(padded, size, axis=(2, 3))  # type: ignore[call-overload]
        dx = np.einsum("bohwij,ocij->bchw", windows, flipped)
        return dx, {
            "weight": np.einsum("bohw,bchwij->ocij", dy, patches),
            "bias": dy.sum((0, 2, 3)),
        }

    return np.einsum("bchwij,ocij->bohw", patches, w["weight"]) + w["bias"][
        :, None, None
    ], backward


@forward.register
def _(layer: Tanh, w: Arrays, x: Array) -> tuple[Array, Backward]:
    y = np.tanh(x)
    return y, lambda dy: (dy * (1 - y * y), {})


@forward.register
def _(layer: AvgPool, w: Arrays, x: Array) -> tuple[Array, Backward]:
    b, c, height, width = x.shape
    size = layer.size
    rows = height // layer.size
    columns = width // layer.size

    def backward(dy: Array) -> tuple[Array, Arrays]:
        dx = np.zeros_like(x)
        dx[:, :, : rows * size, : columns * size] = (
            dy.repeat(size, 2).repeat(size, 3) / size**2
        )
        return dx, {}

    squares = x[:, :, : rows * size, : columns * size].reshape(
        b, c, rows, size, columns, size
    )
    return squares.mean((3, 5)), backward


@forward.register
def _(layer: Flatten, w: Arrays, x: Array) -> tuple[Array, Backward]:
    return x.reshape(len(x), -1), lambda dy: (dy.reshape(x.shape), {})


def _own(weights: Arrays, index: int) -> Arrays:
    prefix = f"{index}."
    return {
        name.removeprefix(prefix): array
        for name, array in weights.items()
        if name.startswith(prefix)
    }


def _cross_entropy(logits: Array, labels: Array, loss: Loss) -> tuple[float, Array]:
    rows = np.arange(len(labels))
    shifted = logits - logits.max(-1, keepdims=True)
    exponentials = np.exp(shifted)
    totals = exponentials.sum(-1, keepdims=True)
    losses = np.log(totals[:, 0]) - shifted[rows, labels]
    gradient = exponentials / totals
    gradient[rows, labels] -= 1
    if loss == "sum":
        return float(losses.sum()), gradient
    return float(losses.mean()), gradient / len(labels)
