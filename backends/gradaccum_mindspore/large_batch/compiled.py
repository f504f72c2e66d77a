"""The micro-batches of the large batch as one loop of compiled code: inside
`mindspore.jit` and inside a Cell in graph mode.

The loop is a ``while`` on a Tensor, so its body is compiled once: MindSpore unrolls a
loop over Python numbers, and each copy of a random operator would start at the same
seed. A last, smaller micro-batch is a second copy of the body. The sums start as zeros
that the graph computes, because constant zeros would be a second buffer of the model's
size.

Such a loop needs the shape of what it carries before it runs, so other outputs need
Python. Tuples of Tensors are walked by place: in a loop MindSpore takes the length of a
tuple of equal shapes for unknown, and `mindspore.ops.HyperMap` returned shape (1,) for
shape ().
"""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.ops import constexpr

from gradaccum import UsageError
from gradaccum.kit import (
    aux_shape_error,
    contribution,
    divided,
    divisor,
    explain,
    require_one_size,
)
from gradaccum_mindspore.checks import item_weights
from gradaccum_mindspore.gradient_sum import (
    DType,
    hidden_parameter,
    sum_dtype,
    where,
    working_dtype,
)
from gradaccum_mindspore.large_batch.batch import (
    SplitOptions,
    moving,
    sizes_of,
    slices_of,
)
from gradaccum_mindspore.large_batch.gradients import require_scalar
from gradaccum_mindspore.large_batch.replay import require_one_program
from gradaccum_mindspore.window.compiled import number_of


class CompiledLoop(nn.Cell):  # type: ignore[misc]
    """The large batch's loss and gradients by parameters, for the compiler to
    follow.
    """

    def __init__(
        self, fn: Any, backward: Any, weights: Any, whole: bool, options: SplitOptions
    ) -> None:
        super().__init__(auto_prefix=False)
        listed = (
            ()
            if weights is None
            else (weights,)
            if isinstance(weights, Parameter)
            else tuple(weights)
        )
        self.single = isinstance(weights, Parameter)
        self.dtypes = tuple(parameter.dtype for parameter in listed)
        self.sum_dtypes = tuple(
            sum_dtype(dtype, options.accumulate_dtype) for dtype in self.dtypes
        )
        self.shapes = tuple(tuple(parameter.shape) for parameter in listed)
        self.float_dtype = ms.float64 if ms.float64 in self.sum_dtypes else ms.float32
        self.zero = hidden_parameter(
            Tensor(0, self.float_dtype), "gradaccum.large_batch.zero"
        )
        self.nan = hidden_parameter(
            Tensor(float("nan"), self.float_dtype), "gradaccum.large_batch.nan"
        )
        """A Parameter, because the compiler made 0 of a sum with Python's NaN."""
        self.axes = options.axes
        self.reduction = options.reduction
        self.calls_weight = callable(options.weight)
        self.weight_function: Any = options.weight if self.calls_weight else None
        named = (
            ()
            if options.reduction.reduction == "sum"
            else moving(options.weight, listed)
        )
        self.weight_slopes: Any = (
            ms.grad(options.weight, None, named) if named else None
        )
        self.may_be_zero = options.weight is not None
        self.array = options.weight is not None and not self.calls_weight
        self.backward = backward
        self.checked_cuts = cuts_of(fn, whole, options)
        self.item_weights = weights_of(options)

    def run(self, batch: Any) -> Any:
        """Return the loss and the gradients, in the structure of
        `mindspore.value_and_grad`.
        """
        full, size, tail = self.checked_cuts(sizes_of(batch, self.axes, "batch"))
        zero = self.zero * 1
        step = zero.astype(ms.int32)
        loss = self.start(zero)
        weight = zero * 1
        sums = self.zeros(zero)
        per_item = self.weights_of_items(full * size + tail)
        while step < full:
            loss, weight, sums = self.add(
                batch, ops.arange(size) + step * size, per_item, loss, weight, sums
            )
            step = step + 1
        if tail > 0:
            loss, weight, sums = self.add(
                batch, ops.arange(tail) + full * size, per_item, loss, weight, sums
            )
        divides = self.divides(weight, zero)
        return self.finished(loss / divides, sums, divides)

    def weights_of_items(self, items: int) -> Tensor:
        """Return the weights, of shape (items,), where an array gives them; otherwise
        what nobody reads.
        """
        return self.item_weights(items, self.float_dtype) if self.array else self.zero

    def divides(self, weight: Tensor, zero: Tensor) -> Tensor:
        count = zero.astype(ms.int32)
        return divisor(
            (count, count, count, weight, weight > 0, zero + 1, count),
            self.reduction,
            where,
        )

    def finished(self, loss: Tensor, sums: Any, divides: Tensor) -> tuple[Tensor, Any]:
        made: tuple[Tensor, ...] = ()
        for place in range(len(self.shapes)):
            made = (*made, _finished(divides, sums[place], self.dtypes[place]))
        return loss, made[0] if self.single else made

    def add(
        self,
        batch: Any,
        indices: Tensor,
        per_item: Tensor,
        loss: Tensor,
        weight: Tensor,
        sums: Any,
    ) -> tuple[Tensor, Tensor, Any]:
        arguments = slices_of(batch, self.axes, indices)
        amount = self.amount(arguments, indices, per_item)
        value, gradients = self.differentiated(arguments)
        factor = contribution(amount, self.reduction)
        # Everything becomes NaN by a negative weight, and by one with a derivative:
        # compiled code cannot refuse a value.
        factor = where(amount > 0, factor, where(amount == 0, amount * 0, self.nan * 1))
        sums = self.collected(sums, gradients, amount, factor)
        given = value.astype(loss.dtype) * factor
        return (
            loss + where(amount != 0, given, ops.zeros_like(given)),
            weight + amount,
            sums,
        )

    def loss_of(self, value: Any) -> Tensor:
        if isinstance(value, (tuple, list)):
            check_loss("tuple", (), None)
        check_loss("Tensor", value.shape, value.dtype)
        return value

    def differentiated(self, arguments: Any) -> tuple[Tensor, Any]:
        value, gradients = self.backward(*arguments)
        return self.loss_of(value), (gradients,) if self.single else gradients

    def collected(
        self, sums: Any, gradients: Any, amount: Tensor, factor: Tensor
    ) -> Any:
        """Return the sums with a micro-batch's gradients times `factor`; one of weight
        0 adds nothing, whatever they hold.
        """
        made: tuple[Tensor, ...] = ()
        for place in range(len(self.shapes)):
            part = gradients[place].astype(
                working_dtype(self.sum_dtypes[place])
            ) * factor.astype(working_dtype(self.sum_dtypes[place]))
            if self.may_be_zero:
                part = where(amount != 0, part, (self.zero * 1).astype(part.dtype))
            made = (*made, _sum(sums[place], part))
        return made

    def amount(self, arguments: Any, indices: Tensor, per_item: Tensor) -> Tensor:
        """Return a micro-batch's weight, a scalar in the dtype of the sum of
        weights.
        """
        if self.calls_weight:
            given = self.weight_function(*arguments)
            amount = self.zero + number_of(given)
            if self.weight_slopes is not None:
                for slope in self.weight_slopes(*arguments):
                    amount = where((slope != 0).any(), self.nan * 1, amount)
        elif self.array:
            amount = self.zero + ops.gather(per_item, indices, 0).sum()
        else:
            amount = self.zero + indices.shape[0]
        return amount.astype(self.float_dtype)

    def start(self, zero: Tensor) -> Tensor:
        return zero * 1

    def zeros(self, zero: Tensor) -> Any:
        sums: tuple[Tensor, ...] = ()
        for place in range(len(self.shapes)):
            sums = (
                *sums,
                ops.broadcast_to(
                    zero.astype(self.sum_dtypes[place]), self.shapes[place]
                ),
            )
        return sums


def cuts_of(fn: Any, whole: bool, options: SplitOptions) -> Any:
    """Return a function from the leaves' sizes to the number and size of the
    micro-batches, and the last one's size.
    """

    @constexpr(reuse_result=False)  # type: ignore[untyped-decorator]
    def checked_cuts(sizes: tuple[tuple[Any, ...], ...]) -> tuple[int, int, int]:
        require_compilable(whole, options)
        lists = [each for each in sizes if len(each) == 3]
        items = require_one_size([each for each in sizes if len(each) == 2], lists)
        cuts = divided(options.division, items, None)
        size = cuts[0].items
        tail = cuts[-1].items
        if tail == size:
            return len(cuts), size, 0
        require_one_program(fn, "micro-batches of two sizes in compiled code")
        return len(cuts) - 1, size, tail

    return checked_cuts


def weights_of(options: SplitOptions) -> Any:
    @constexpr(reuse_result=False)  # type: ignore[untyped-decorator]
    def weights(items: int, dtype: DType) -> Tensor:
        return Tensor(np.array(item_weights(options.weight, items)), dtype)

    return weights


def require_compilable(whole: bool, options: SplitOptions) -> None:
    found = {
        "grad_position": whole,
        "has_aux": options.aux is not None,
        "split": options.split is not None,
        "micro_batch_weight": options.division.micro_batch_weight is not None,
    }
    for name, given in found.items():
        if given:
            raise compiled_call_error(name)


def compiled_call_error(argument: str) -> UsageError:
    expected = (
        "a call from Python, because compiled code has one loop of equal micro-batches"
    )
    fix = (
        "Call it outside mindspore.jit: in PyNative, with the function itself compiled"
        " by mindspore.jit, or in graph mode."
    )
    return explain(
        UsageError,
        argument,
        expected=expected,
        found="a call in compiled code",
        fix=fix,
    )


@constexpr  # type: ignore[untyped-decorator]
def check_loss(kind: str, shape: tuple[int, ...], dtype: DType | None) -> None:
    if dtype is None:
        raise aux_shape_error(f"a {kind}", declared=False)
    require_scalar(tuple(shape), dtype)


def _sum(total: Tensor, part: Tensor) -> Tensor:
    return (
        total.astype(part.dtype) + part.astype(total.dtype).astype(part.dtype)
    ).astype(total.dtype)


def _finished(divides: Tensor, total: Tensor, dtype: DType) -> Tensor:
    work = working_dtype(total.dtype)
    return (total.astype(work) / divides.astype(work)).astype(dtype)
