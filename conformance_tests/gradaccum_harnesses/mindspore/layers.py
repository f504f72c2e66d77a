"""The conformance suite's layers in MindSpore operators, for float32 and float64 alike.

MindSpore has no float64 convolution on a CPU, so there it is slices and a matrix
product. Constants are Tensors, because a Python number is rounded to float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mindspore as ms
from mindspore import Parameter, Tensor, nn, ops

from gradaccum_mindspore.gradient_sum import working_dtype, write


class Affine(nn.Cell):  # type: ignore[misc]
    """``x @ weight.T + bias`` on the last axis."""

    def __init__(self, weight: Any, bias: Any) -> None:
        super().__init__(auto_prefix=False)
        self.weight = weight
        self.bias = bias
        self.product = ops.MatMul(transpose_b=True)

    def construct(self, x: Any) -> Any:
        flat = x if len(x.shape) == 2 else x.reshape((-1, x.shape[-1]))
        out = self.product(flat, self.weight) + self.bias
        return out if len(x.shape) == 2 else out.reshape((*x.shape[:-1], -1))


class Convolution(nn.Cell):  # type: ignore[misc]
    """Cross-correlation, stride 1, no padding."""

    def __init__(self, weight: Any, bias: Any) -> None:
        super().__init__(auto_prefix=False)
        self.weight = weight
        self.bias = bias
        self.channels = weight.shape[0]
        self.size = weight.shape[-1]
        self.product = ops.MatMul(transpose_b=True)
        self.stack = ops.Stack(2)

    def construct(self, x: Any) -> Any:
        batch, _, height, width = x.shape
        height = height - self.size + 1
        width = width - self.size + 1
        pieces = []
        for row in range(self.size):
            for column in range(self.size):
                pieces.append(x[:, :, row : row + height, column : column + width])
        columns = (
            self.stack(pieces).reshape((batch, -1, height * width)).transpose((0, 2, 1))
        )
        out = (
            self.product(
                columns.reshape((batch * height * width, -1)),
                self.weight.reshape((self.channels, -1)),
            )
            + self.bias
        )
        return (
            out.reshape((batch, height * width, self.channels))
            .transpose((0, 2, 1))
            .reshape((batch, -1, height, width))
        )


class SquareMean(nn.Cell):  # type: ignore[misc]
    """Mean of each `size` x `size` square."""

    def __init__(self, size: int, dtype: Any) -> None:
        super().__init__(auto_prefix=False)
        self.size = size
        self.count = Tensor(size * size, dtype)

    def construct(self, x: Any) -> Any:
        batch, channels, height, width = x.shape
        size = self.size
        rows = height // size
        columns = width // size
        squares = x[:, :, : rows * size, : columns * size].reshape(
            (batch, channels, rows, size, columns, size)
        )
        return squares.sum((3, 5)) / self.count


def cross_entropy(logits: Any, labels: Any) -> Any:
    """Softmax cross-entropy against one-hot labels, summed over the items."""
    shifted = logits - ops.stop_gradient(ops.ReduceMax(keep_dims=True)(logits, -1))
    total = ops.ReduceSum()
    return total(ops.log(total(ops.exp(shifted), -1))) - total(labels * shifted)


class Network(nn.Cell):  # type: ignore[misc]
    """Layers in turn, and their `cross_entropy`."""

    def __init__(self, layers: Sequence[Any]) -> None:
        super().__init__(auto_prefix=False)
        self.layers = nn.CellList(list(layers), auto_prefix=False)

    def construct(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x

    def loss(self, x: Any, labels: Any) -> Any:
        return cross_entropy(self.construct(x), labels)


class Capture(nn.Optimizer):  # type: ignore[misc]
    """Plain SGD that counts calls and keeps the last gradients."""

    def __init__(self, parameters: Sequence[Any], learning_rate: float) -> None:
        super().__init__(learning_rate, parameters)
        self.rate = Tensor(
            learning_rate,
            ms.float64 if parameters[0].dtype == ms.float64 else ms.float32,
        )
        self.calls = Parameter(Tensor(0), name="capture.calls", requires_grad=False)
        self.seen = self.parameters.clone(prefix="seen", init="zeros")

    def construct(self, gradients: Any) -> Any:
        for parameter, seen, gradient in zip(self.parameters, self.seen, gradients):  # noqa: B905
            write(seen, gradient)
            work = working_dtype(parameter.dtype)
            moved = parameter.astype(work) - self.rate.astype(work) * gradient.astype(
                work
            )
            write(parameter, moved.astype(parameter.dtype))
        ops.assign_add(self.calls, Tensor(1))
        return True
