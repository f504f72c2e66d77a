"""Compute the loss, gradients and auxiliary output (aux) of a large batch, in a Python
loop over its micro-batches.

In graph mode, the loop calls a function that MindSpore compiles once for each
micro-batch size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, ops
from mindspore.ops import constexpr

from gradaccum import kit
from gradaccum.kit import MicroBatch, Nest
from gradaccum_mindspore.gradient_sum import (
    DType,
    add_into,
    divided,
    hidden_parameter,
    scaled,
    sum_dtype,
)
from gradaccum_mindspore.large_batch.batch import Batch, CallOptions

Function = Callable[..., Any]


class TensorSum:
    """The weighted sums of several tensors over the micro-batches."""

    def __init__(self, accumulate_dtype: object = None) -> None:
        self.accumulate_dtype = accumulate_dtype
        self.totals: list[Parameter] = []
        self.dtypes: list[DType] = []

    def add(self, tensors: Sequence[Tensor], factor: float = 1.0) -> None:
        """Add the tensors times `factor`. A factor of 0 adds nothing, even if the
        tensors are NaN.
        """
        if not self.totals:
            self.dtypes = [tensor.dtype for tensor in tensors]
            self.totals = [self.zeros_for(tensor) for tensor in tensors]
        if factor == 0:
            return
        for total, tensor in zip(self.totals, tensors, strict=True):
            add_into(total, scaled(tensor, factor, total.dtype))

    def zeros_for(self, tensor: Tensor) -> Parameter:
        dtype = sum_dtype(tensor.dtype, self.accumulate_dtype)
        return hidden_parameter(Tensor(np.zeros(tensor.shape), dtype), "total")

    def quotients(self, divisor: float) -> tuple[Tensor, ...]:
        return divided(self.totals, divisor, self.dtypes, ms.float64)


def gradient_function(
    fn: Function, parameters: Sequence[Parameter], has_aux: bool, scale: Function
) -> Function:
    """Return a function that takes the arguments of a micro-batch and returns a pair:
    the outputs and the gradients of the scaled loss. The outputs are
    ``(scaled loss, loss)``, or ``(scaled loss, loss, aux)`` with `has_aux`.
    """

    def outputs(*arguments: Nest) -> tuple[Any, ...]:
        if has_aux:
            returned = fn(*arguments)
            if isinstance(returned, Tensor):
                raise kit.missing_aux_error(returned)
            loss, aux = returned
            require_scalar(loss.shape)
            return scale(loss), loss, aux
        loss = fn(*arguments)
        require_scalar(loss.shape)
        return scale(loss), loss

    return ms.value_and_grad(outputs, None, tuple(parameters), True)  # type: ignore[no-any-return]


def identity(loss: Tensor) -> Tensor:
    return loss


@constexpr  # type: ignore[untyped-decorator]
def require_scalar(shape: tuple[int, ...]) -> None:
    """Raise unless `shape`, the shape of a loss, is (). If a loss had several elements,
    MindSpore would differentiate their sum.
    """
    if shape:
        raise kit.scalar_loss_error(f"a Tensor of shape {tuple(shape)}")


def tensors_of(outputs: Nest) -> list[Any]:
    return [leaf.value for leaf in kit.leaves_of(outputs)]


def run_micro_batches(
    backward: Function,
    batch: Batch,
    options: CallOptions,
    add: Callable[[tuple[Tensor, ...], Tensor, MicroBatch], object],
) -> tuple[Any, float]:
    """Compute the gradients of each micro-batch and pass them to `add`. Return the loss
    of the large batch, or ``(loss, aux)``, and the number by which to divide the
    gradient sums.

    Args:
        backward: a function that `gradient_function` returned.
        batch: the arguments of the user's function for the whole large batch.
        options: the options of the function that processes the large batch.
        add: a function that is called for each micro-batch, with the gradients, the
            loss and the micro-batch.
    """
    losses = TensorSum()
    weights: list[float] = []
    auxes: list[Nest] = []
    for micro_batch in options.micro_batches(batch):
        (_, loss, *aux), gradients = backward(*micro_batch.arguments)
        if options.merge_aux == "concatenate":
            for tensor in tensors_of(aux):
                kit.require_rows("aux", tensor.shape, micro_batch.items)
        add(gradients, loss, micro_batch)
        del gradients  # Free the memory for the next gradients.
        losses.add([loss], micro_batch.factor)
        weights.append(micro_batch.weight)
        auxes += aux
    divisor = kit.denominator(sum(weights), options.reduction, kit.select)
    (value,) = losses.quotients(divisor)
    if options.has_aux:
        value = (value, kit.merged_aux(auxes, weights, options.merge_aux, ops.concat))
    return value, divisor
