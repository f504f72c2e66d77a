"""The loop over the micro-batches of a large batch in compiled code, inside
`mindspore.jit` and inside a Cell in graph mode.

The loop is a ``while`` loop whose condition is a Tensor, so its body is compiled once.
MindSpore would unroll a loop over Python numbers, and each copy of a random operator
would start at the same seed. If the last micro-batch is smaller, the body is compiled a
second time for it. The gradient sums start as zeros that the graph computes, because
constant zeros would need a second buffer as large as the model.

The shapes of the loop's variables must be known before the loop runs. The shapes of an
auxiliary output (aux) are known only afterwards, so a function that returns an aux must
be called from Python. The code indexes tuples of Tensors instead of iterating over
them, because in a loop MindSpore does not know the length of a tuple whose Tensors have
equal shapes. `mindspore.ops.HyperMap` is not used, because in a loop it may return a
Tensor of shape (1,) for a Tensor of shape ().
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.ops import constexpr

from gradaccum import kit
from gradaccum_mindspore.gradient_sum import (
    DType,
    compiled_scaled,
    hidden_parameter,
    sum_dtype,
    where,
    working_dtype,
)
from gradaccum_mindspore.large_batch.batch import CallOptions
from gradaccum_mindspore.large_batch.gradients import Function
from gradaccum_mindspore.window.compiled import number_of


class TensorOutline:
    """The shape and dtype of a Tensor, which are known while MindSpore compiles."""

    def __init__(self, shape: tuple[int, ...], dtype: DType) -> None:
        self.shape = shape
        self.dtype = dtype
        self.ndim = len(shape)


tensor_outline = constexpr(TensorOutline)


class CompiledLoop(nn.Cell):  # type: ignore[misc]
    """Computes the loss and gradients of a large batch in compiled code."""

    def __init__(
        self,
        backward: Function,
        parameters: Sequence[Parameter],
        options: CallOptions,
        accumulate_dtype: object = None,
    ) -> None:
        super().__init__(auto_prefix=False)
        self.backward = backward
        self.dtypes = tuple(parameter.dtype for parameter in parameters)
        self.shapes = tuple(tuple(parameter.shape) for parameter in parameters)
        self.sum_dtypes = tuple(
            sum_dtype(dtype, accumulate_dtype) for dtype in self.dtypes
        )
        has_float64 = ms.float64 in self.sum_dtypes
        self.float_dtype = ms.float64 if has_float64 else ms.float32
        self.zero = hidden_parameter(
            Tensor(0, self.float_dtype), "gradaccum.large_batch.zero"
        )
        # `nan` is a Parameter, because the compiler replaces a sum with 0 if a term of
        # the sum is Python's NaN.
        self.nan = hidden_parameter(
            Tensor(float("nan"), self.float_dtype), "gradaccum.large_batch.nan"
        )
        self.axes = options.axes
        self.reduction = options.reduction
        self.may_be_zero = options.weight is not None
        self.calls_weight = callable(options.weight)
        self.weight_function: Any = options.weight if self.calls_weight else None
        self.plan = plan_of(options, self.float_dtype)

    def run(self, batch: Any) -> Any:
        full, size, tail, weights = self.plan(outline_of(batch))
        zero = self.zero * 1
        step = zero.astype(ms.int32)
        loss = zero * 1
        total_weight = zero * 1
        sums = self.first_sums(zero)
        while step < full:
            indices = ops.arange(size) + step * size
            loss, total_weight, sums = self.add(
                batch, indices, weights[step], loss, total_weight, sums
            )
            step = step + 1
        if tail > 0:
            indices = ops.arange(tail) + full * size
            loss, total_weight, sums = self.add(
                batch, indices, weights[full], loss, total_weight, sums
            )
        divisor = kit.denominator(total_weight, self.reduction, where)
        return self.results(loss / divisor, sums, divisor)

    def add(
        self,
        batch: Any,
        indices: Tensor,
        weight: Tensor,
        loss: Tensor,
        total_weight: Tensor,
        sums: Any,
    ) -> tuple[Tensor, Tensor, Any]:
        """Add the micro-batch that consists of the items at `indices`. Return the new
        loss, total weight and gradient sums.
        """
        arguments = items_at(batch, self.axes, indices)
        if self.calls_weight:
            given = self.zero + number_of(self.weight_function(*arguments))
            # Compiled code cannot raise an error that depends on a value. So a negative
            # weight makes all results NaN.
            weight = where(given >= 0, given, self.nan * 1).astype(self.float_dtype)
        outputs, gradients = self.backward(*arguments)
        factor = kit.contribution(weight, self.reduction)
        sums = self.add_gradients(sums, gradients, weight, factor, outputs[1])
        term = outputs[1].astype(loss.dtype) * factor
        term = where(weight != 0, term, ops.zeros_like(term))
        return loss + term, total_weight + weight, sums

    def first_sums(self, zero: Tensor) -> Any:
        sums: tuple[Tensor, ...] = ()
        for place in range(len(self.shapes)):
            zeros = zero.astype(self.sum_dtypes[place])
            sums = (*sums, ops.broadcast_to(zeros, self.shapes[place]))
        return sums

    def add_gradients(
        self, sums: Any, gradients: Any, weight: Tensor, factor: Tensor, loss: Tensor
    ) -> Any:
        """Add the gradients times `factor`, and return the new gradient sums. A
        micro-batch of weight 0 adds nothing, whatever its gradients are.
        """
        new_sums: tuple[Tensor, ...] = ()
        for place in range(len(self.shapes)):
            dtype = self.sum_dtypes[place]
            term = compiled_scaled(gradients[place], factor, dtype)
            if self.may_be_zero:
                term = where(weight != 0, term, (self.zero * 1).astype(term.dtype))
            total = (sums[place].astype(term.dtype) + term).astype(dtype)
            new_sums = (*new_sums, total)
        return new_sums

    def results(self, loss: Tensor, sums: Any, divisor: Tensor) -> Any:
        gradients: tuple[Tensor, ...] = ()
        for place in range(len(self.shapes)):
            work = working_dtype(self.sum_dtypes[place])
            quotient = sums[place].astype(work) / divisor.astype(work)
            gradients = (*gradients, quotient.astype(self.dtypes[place]))
        return loss, gradients


def plan_of(options: CallOptions, dtype: DType) -> Callable[[Any], Any]:
    """Return a function that MindSpore calls at compile time, with the shapes and
    dtypes of a batch (`outline_of`). The function returns the number of micro-batches
    of full size, their size, the size of a smaller last micro-batch (0 if there is
    none), and the weights of all micro-batches.
    """

    @constexpr(reuse_result=False)  # type: ignore[untyped-decorator]
    def plan(outline: Any) -> tuple[int, int, int, Tensor]:
        large = kit.LargeBatch(outline, options.axes, options.weight)
        cuts = kit.divided(options.division, large.items)
        size = cuts[0].items
        tail = cuts[-1].items % size
        weights = np.array([large.weight_of(cut) for cut in cuts])
        return len(cuts) - bool(tail), size, tail, Tensor(weights, dtype)

    planned: Callable[[Any], Any] = plan
    return planned


# MindSpore compiles `outline_of` and `items_at`. Every ``if`` in them depends only on
# types or structure, so it is resolved at compile time.


def outline_of(nest: Any) -> Any:
    """Return `nest` with each Tensor replaced by its shape and dtype. Any other value,
    such as a number in a list, is replaced by an empty tuple, because the value is not
    split: every micro-batch gets the whole value.
    """
    if isinstance(nest, (tuple, list)):
        parts = []
        for place in range(len(nest)):
            parts.append(outline_of(nest[place]))
        return tuple(parts) if isinstance(nest, tuple) else parts
    if isinstance(nest, dict):
        named = {}
        for key in nest.keys():  # noqa: SIM118 - the compiler cannot iterate over dicts
            named[key] = outline_of(nest[key])
        return named
    if isinstance(nest, Tensor):
        return tensor_outline(nest.shape, nest.dtype)
    return ()


def items_at(nest: Any, axes: Any, indices: Tensor) -> Any:
    """Return a copy of `nest` in which each Tensor contains only the items at
    `indices`.
    """
    if isinstance(nest, (tuple, list)):
        parts = []
        for place in range(len(nest)):
            part_axes = axes[place] if isinstance(axes, (tuple, list)) else axes
            parts.append(items_at(nest[place], part_axes, indices))
        return tuple(parts) if isinstance(nest, tuple) else parts
    if isinstance(nest, dict):
        named = {}
        for key in nest.keys():  # noqa: SIM118 - the compiler cannot iterate over dicts
            part_axes = axes[key] if isinstance(axes, dict) else axes
            named[key] = items_at(nest[key], part_axes, indices)
        return named
    if isinstance(nest, Tensor) and axes is not None:
        return ops.gather(nest, indices, axes)
    return nest
