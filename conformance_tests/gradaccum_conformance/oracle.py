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

from gradaccum_conformance.couplings import COUPLINGS, TEMPERATURE, Coupling, mirrored
from gradaccum_conformance.harness import Loss
from gradaccum_conformance.specs import (
    Array,
    Arrays,
    Attention,
    AvgPool,
    Batch,
    Conv,
    Dense,
    Flatten,
    Layer,
    MeanOverLength,
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
    model: Model, weights: Arrays, coupling: Coupling, batch: Batch
) -> tuple[float, Arrays]:
    """The coupled loss of the whole batch and its gradient, that of ``temperature``
    among it.
    """
    left, from_left = outputs_and_backward(model, weights, batch.x)
    right, from_right = outputs_and_backward(model, weights, mirrored(batch.x))
    coupled = COUPLINGS[coupling](left, right, TEMPERATURE)
    one, other = from_left(coupled.left), from_right(coupled.right)
    gradient = {name: one[name] + other[name] for name in weights}
    return coupled.loss, gradient | {"temperature": np.asarray(coupled.temperature)}


def predict(model: Model, weights: Arrays, x: Array) -> Array:
    """The model's output for inputs (batch, *input_shape)."""
    for index, layer in enumerate(model.layers):
        x, _ = forward(layer, _own(weights, index), x)
    return x


@singledispatch
def forward(layer: Layer, w: Arrays, x: Array) -> tuple[Array, Backward]:
    """The layer's output for `x`, and its backward function."""
    raise TypeError(f"no such layer: {layer!r}")


@forward.register
def _(layer: Dense, w: Arrays, x: Array) -> tuple[Array, Backward]:
    def backward(dy: Array) -> tuple[Array, Arrays]:
        rows, dys = x.reshape(-1, layer.n_in), dy.reshape(-1, layer.n_out)
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
def _(layer: Attention, w: Arrays, x: Array) -> tuple[Array, Backward]:
    q, k, v = x @ w["query"].T, x @ w["key"].T, x @ w["value"].T
    p = _softmax(q @ k.swapaxes(1, 2) / np.sqrt(layer.size))
    mixed = p @ v

    def weight_gradient(dy: Array, value: Array) -> Array:
        gradient: Array = dy.reshape(-1, layer.size).T @ value.reshape(-1, layer.size)
        return gradient

    def backward(dy: Array) -> tuple[Array, Arrays]:
        d_mixed = dy @ w["output"]
        dv, dp = p.swapaxes(1, 2) @ d_mixed, d_mixed @ v.swapaxes(1, 2)
        ds = p * (dp - (dp * p).sum(-1, keepdims=True)) / np.sqrt(layer.size)
        dq, dk = ds @ k, ds.swapaxes(1, 2) @ q
        dx = dy + dq @ w["query"] + dk @ w["key"] + dv @ w["value"]
        inputs = {
            "query": (dq, x),
            "key": (dk, x),
            "value": (dv, x),
            "output": (dy, mixed),
        }
        return dx, {name: weight_gradient(*pair) for name, pair in inputs.items()}

    return x + mixed @ w["output"].T, backward


@forward.register
def _(layer: Tanh, w: Arrays, x: Array) -> tuple[Array, Backward]:
    y = np.tanh(x)
    return y, lambda dy: (dy * (1 - y * y), {})


@forward.register
def _(layer: AvgPool, w: Arrays, x: Array) -> tuple[Array, Backward]:
    b, c, height, width = x.shape
    size, rows, columns = layer.size, height // layer.size, width // layer.size

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


@forward.register
def _(layer: MeanOverLength, w: Arrays, x: Array) -> tuple[Array, Backward]:
    length = x.shape[1]
    return x.mean(1), lambda dy: (np.repeat(dy[:, None] / length, length, 1), {})


def _own(weights: Arrays, index: int) -> Arrays:
    prefix = f"{index}."
    return {
        name.removeprefix(prefix): array
        for name, array in weights.items()
        if name.startswith(prefix)
    }


def _softmax(x: Array) -> Array:
    e: Array = np.exp(x - x.max(-1, keepdims=True))
    p: Array = e / e.sum(-1, keepdims=True)
    return p


def _cross_entropy(logits: Array, labels: Array, loss: Loss) -> tuple[float, Array]:
    rows = np.arange(len(labels))
    p = _softmax(logits)
    shifted = logits - logits.max(-1, keepdims=True)
    losses = np.log(np.exp(shifted).sum(-1)) - shifted[rows, labels]
    gradient = p.copy()
    gradient[rows, labels] -= 1
    return (
        (float(losses.sum()), gradient)
        if loss == "sum"
        else (float(losses.mean()), gradient / len(labels))
    )
