"""Runs one custom backward alone, to see whether it carries the gradient that it is handed.

Custom backwards are `mindspore.nn.Cell.bprop` and the framework's autograd functions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops
from numpy.typing import NDArray

from gradaccum.kit import relative_error

Output: TypeAlias = "Tensor | tuple[Output, ...]"
"""The result of a custom backward's forward pass: Tensors, in tuples."""
FLOATS = (ms.float16, ms.bfloat16, ms.float32, ms.float64)


class Custom(NamedTuple):
    """A custom backward as it was met."""

    call: Callable[..., Any]
    """The cell, or the autograd function's ``apply``."""
    arguments: tuple[Any, ...]
    output: Output


def is_linear(custom: Custom, tolerance: float) -> bool:
    """Whether the gradients of a custom backward double with the gradient handed to it."""
    tensors = [value for value in custom.arguments if is_float(value)]
    gradient = ops.GradOperation(get_all=True, sens_param=True)(_of_tensors(custom))
    rng = np.random.default_rng(0)
    upstream = _like(custom.output, rng)
    once, twice = ([wide(each) for each in gradient(*tensors, _times(upstream, factor))] for factor in (1.0, 2.0))
    return all(relative_error(b / 2, a, norm) <= tolerance for a, b in zip(once, twice, strict=True))


def is_float(value: object) -> bool:
    """Whether it is a floating Tensor."""
    return isinstance(value, Tensor) and value.dtype in FLOATS


def norm(gradient: NDArray[np.float64]) -> float:
    """Its 2-norm."""
    return float(np.linalg.norm(gradient))


def wide(gradient: Tensor) -> NDArray[np.float64]:
    """Its numbers in float64."""
    values: NDArray[np.float64] = gradient.asnumpy().astype(np.float64)
    return values


def _of_tensors(custom: Custom) -> Callable[..., Any]:
    """The call as a function of its floating Tensors alone."""

    def function(*tensors: Tensor) -> Output:
        given = iter(tensors)
        return custom.call(*[next(given) if is_float(value) else value for value in custom.arguments])

    return function


def _like(output: Output, rng: np.random.Generator) -> Output:
    """Random gradients for an output, from numbers that every dtype holds."""
    if isinstance(output, (tuple, list)):
        return tuple(_like(part, rng) for part in output)
    return Tensor(rng.integers(1, 4, output.shape).astype(np.float32), output.dtype)


def _times(upstream: Output, factor: float) -> Output:
    if isinstance(upstream, tuple):
        return tuple(_times(part, factor) for part in upstream)
    return upstream * Tensor(factor, upstream.dtype)
