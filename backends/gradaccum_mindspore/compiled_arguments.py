"""What a micro-batch hands over, read and checked while the compiler follows: gradients, weight, loss.

Structure, shapes, dtypes and every Python number are constants of the program. So a wrong one raises while compiling.
"""

from __future__ import annotations

import mindspore as ms
from mindspore import Tensor
from mindspore.ops import constexpr

from gradaccum.kit import Options
from gradaccum_mindspore.checks import (
    check_compiled_gradients,
    check_compiled_loss,
    check_compiled_loss_shape,
    check_compiled_structure,
    check_compiled_weight,
    check_compiled_weight_shape,
    compiled_names_of,
)
from gradaccum_mindspore.compiled_state import CompiledState
from gradaccum_mindspore.plain_ends import is_certain
from gradaccum_mindspore.state import Storage
from gradaccum_mindspore.sums import each
from gradaccum_mindspore.types import DType, Gradients, NamedGradients, Number, Shape, Weight


def number_of(weight: Number) -> Number:
    """A weight as a number or a scalar Tensor; raises while compiling if it is neither."""
    if isinstance(weight, Tensor):
        check_compiled_weight_shape(weight.shape)
        return weight.reshape(())
    check_compiled_weight(weight)
    return weight


def shape_of(gradient: Tensor | None) -> Shape:
    """The gradient's shape, a constant while compiling."""
    return () if gradient is None else gradient.shape


def dtype_of(gradient: Tensor | None) -> DType | None:
    """The gradient's dtype, a constant while compiling."""
    return None if gradient is None else gradient.dtype


@constexpr  # type: ignore[untyped-decorator]
def is_constant(number: float | None) -> bool:
    """Whether a number is a constant of the program; what only the running program knows comes as None."""
    return number is not None


@constexpr  # type: ignore[untyped-decorator]
def float64_of(number: float) -> Tensor:
    """A constant as a Tensor, because MindSpore rounds a Python number to float32."""
    return Tensor(number, ms.float64)


class CompiledArguments(CompiledState):
    """Reads the arguments of the wrapped optimizer's call."""

    def __init__(self, storage: Storage, options: Options) -> None:
        super().__init__(storage, options)
        self.names_of = compiled_names_of(storage.specs, storage.names)

    def ordered(self, gradients: Gradients | NamedGradients) -> Gradients:
        """The gradients in the parameters' order; raises `GradientError` while compiling."""
        specs = self.storage.specs
        if isinstance(gradients, dict):
            gradients = self.by_name(gradients)
        gradients = tuple(gradients)
        check_compiled_structure(len(gradients), specs)
        checked = check_compiled_gradients(each(shape_of, gradients), each(dtype_of, gradients), specs)
        return gradients if checked else ()  # MindSpore 2.7 warns of a check whose result is unused

    def by_name(self, gradients: NamedGradients) -> Gradients:
        """A dict's values in the parameters' order."""
        ordered: Gradients = ()
        for name in self.names_of(tuple(gradients.keys())):
            ordered = (*ordered, gradients[name])
        return ordered

    def adds_certainly(self, weight: Weight) -> bool:
        """Whether the micro-batch is added whatever it holds, and its weight is a constant of the program; so is the answer."""
        if self.options.on_overflow == "drop_micro_batch":
            return False
        if weight is None:
            return True
        if isinstance(weight, Tensor):
            return False
        check_compiled_weight(weight)
        certain: bool = is_certain(weight)
        return certain

    def amount(self, weight: Weight) -> Tensor | None:
        """A weight as a scalar of the dtype of `State.weight`; None stays None."""
        return None if weight is None else self.scalar(number_of(weight))

    def loss_number(self, loss: Number) -> Tensor:
        """A told loss as a scalar Tensor."""
        if isinstance(loss, Tensor):
            check_compiled_loss_shape(loss.shape)
            return self.scalar(loss.reshape(()))
        check_compiled_loss(loss)
        return self.scalar(loss)

    def scalar(self, number: Number) -> Tensor:
        """A number or a Tensor as one of the dtype of `State.weight`."""
        if isinstance(number, Tensor):
            return number.astype(self.float_dtype)
        if self.float_dtype == ms.float64 and is_constant(number):
            return float64_of(number)
        return self.one * number
