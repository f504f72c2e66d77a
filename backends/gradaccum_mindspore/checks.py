"""Checks of the gradients, weight and loss of a micro-batch. If a check fails, it
raises an error before anything has changed.

In a compiled program, the structure, shapes and dtypes of the arguments are constants,
so they are checked while MindSpore compiles the program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import mindspore as ms
import numpy as np
from mindspore import Tensor
from mindspore.ops import constexpr

from gradaccum import ArgumentTypeError, GradientError
from gradaccum.kit import given_weight, require_weight
from gradaccum_mindspore.gradient_sum import (
    DType,
    Gradients,
    Number,
    Shape,
    dtype_of,
    shape_of,
)

Weight: TypeAlias = Number | None
"""The number of items in a micro-batch; None means 1."""
Loss: TypeAlias = Number | None
"""The unscaled loss of a micro-batch; None if the caller passed no loss."""
Spec = tuple[str, Shape, DType]
"""The name, shape and dtype of a parameter of the model."""
Specs = tuple[Spec, ...]


def checked_gradients(gradients: Gradients, specs: Specs) -> Gradients:
    """Return the gradients as a tuple; raise if `require_gradients` rejects their
    shapes and dtypes.
    """
    gradients = tuple(gradients)
    shapes = list(map(shape_of, gradients))
    dtypes = list(map(dtype_of, gradients))
    require_gradients(shapes, dtypes, specs)
    return gradients


def require_gradients(
    shapes: Sequence[Shape], dtypes: Sequence[DType | None], specs: Specs
) -> bool:
    """Raise unless there is exactly one gradient for each parameter, with the
    parameter's shape and dtype. The gradient of a half-precision parameter may also be
    float32. A gradient may be None instead of a Tensor.

    - `shapes`, `dtypes`: the shape and the dtype of each gradient. If a dtype is
      None, the gradient is None, and its shape is not checked.
    """
    if len(shapes) != len(specs):
        raise gradient_error(
            "gradients",
            f"{len(specs)} gradients in the order of the optimizer's parameters",
            f"{len(shapes)}",
        )
    for shape, dtype, (name, own_shape, own_dtype) in zip(
        shapes, dtypes, specs, strict=True
    ):
        if isinstance(dtype, Tensor):
            raise GradientError(
                f"gradient of {name!r}: expected a dense Tensor; got a sparse gradient."
                " Write sparse=False in the layer."
            )
        is_half = str(own_dtype) in ("Float16", "BFloat16")
        is_wider = is_half and str(dtype) == "Float32"
        is_right = str(dtype) == str(own_dtype) or is_wider
        if dtype is not None and not (is_right and tuple(shape) == own_shape):
            raise gradient_error(
                f"gradient of {name!r}",
                f"shape {own_shape} and dtype {own_dtype}",
                f"shape {shape} and dtype {dtype}",
            )
    return True


def without_none(gradients: Gradients, specs: Specs) -> Gradients:
    """Replace each gradient that is None with zeros, because the compiler would treat a
    tuple that contains None as a constant, and compile again at each call.
    """
    pairs = zip(gradients, specs, strict=True)
    return tuple(
        Tensor(np.zeros(shape), dtype) if gradient is None else gradient
        for gradient, (_, shape, dtype) in pairs
    )


def gradient_error(argument: str, expected: str, found: str) -> GradientError:
    return GradientError(
        f"{argument}: expected {expected}; got {found}. Differentiate with respect to"
        " optimizer.parameters: loss, gradients = mindspore.value_and_grad(fn, None,"
        " optimizer.parameters)(x)."
    )


@constexpr  # type: ignore[untyped-decorator]
def require_certain_weight(dtype: object) -> None:
    """Raise if a positional argument has a floating-point `dtype`, because the argument
    may be the loss instead of the weight.
    """
    if "float" in str(dtype).lower():
        raise ArgumentTypeError(
            "weight: expected a keyword argument, because a floating-point value that"
            f" is passed by position may be the loss; got a value of dtype {dtype} that"
            " was passed by position. Write optimizer(gradients, weight=n) or"
            " optimizer(gradients, loss=loss). To pass both, write"
            " optimizer(gradients, n, loss)."
        )


def weight_as_number(weight: Number) -> float:
    if isinstance(weight, Tensor) and weight.size == 1:
        weight = weight.asnumpy().item()
    return require_weight(weight)


def loss_as_number(loss: Any) -> float:
    """Return the loss as a float, which may be inf or NaN."""
    if isinstance(loss, Tensor):
        loss = loss.astype(ms.float64).asnumpy()
    return float(np.asarray(loss).item())


# The following checks run while MindSpore compiles a program. MindSpore 2.7 warns if
# code ignores the result of a check. So some checks return True, and the calling code
# uses this result.


check_compiled_gradients: Callable[..., bool] = constexpr(require_gradients)


@constexpr  # type: ignore[untyped-decorator]
def check_compiled_weight(weight: object) -> None:
    """Raise if the weight is a constant of the compiled program and its value is
    invalid. None means that the weight is not a constant.
    """
    if weight is not None:
        require_weight(weight)


@constexpr  # type: ignore[untyped-decorator]
def check_compiled_no_weight(use: Any) -> None:
    given_weight(None, use)
