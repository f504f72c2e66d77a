"""The conformance suite's models as JAX functions of a flat dict of parameters."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax


def forward(model: Any, params: dict[str, Any], x: Any) -> Any:
    for index, layer in enumerate(model.layers):
        x = _apply(
            layer, {name: params[f"{index}.{name}"] for name in layer.shapes()}, x
        )
    return x


def total_loss(model: Any, params: dict[str, Any], x: Any, y: Any, loss: str) -> Any:
    losses = optax.softmax_cross_entropy_with_integer_labels(
        forward(model, params, x), y
    )
    return jnp.mean(losses) if loss == "mean" else jnp.sum(losses)


def _apply(layer: Any, own: dict[str, Any], x: Any) -> Any:
    match type(layer).__name__:
        case "Dense":
            return x @ own["weight"].T + own["bias"]
        case "Conv":
            kernels = ("NCHW", "OIHW", "NCHW")
            return (
                jax.lax.conv_general_dilated(
                    x, own["weight"], (1, 1), "VALID", dimension_numbers=kernels
                )
                + own["bias"][:, None, None]
            )
        case "Tanh":
            return jnp.tanh(x)
        case "AvgPool":
            return _pool(x, layer.size)
        case "Flatten":
            return x.reshape(x.shape[0], -1)
    raise AssertionError(f"no JAX form of the layer {layer}")


def _pool(x: Any, size: int) -> Any:
    batch, channels, height, width = x.shape
    rows = height // size
    columns = width // size
    squares = x[:, :, : rows * size, : columns * size].reshape(
        batch, channels, rows, size, columns, size
    )
    return squares.mean(axis=(3, 5))
