"""The micro-batches as a loop of Python: in PyNative, and in graph mode, where each micro-batch is a call of a compiled function.

One function is differentiated and called again and again, so graph mode compiles it once for each size of micro-batch. Python sees
every value here: it checks weights, and starts over with smaller micro-batches where memory asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import mindspore as ms
from mindspore import Tensor

from gradaccum import ArgumentValueError
from gradaccum.kit import (
    Division,
    Nest,
    aux_shape_error,
    children_of,
    contribution,
    divisor,
    explain,
    initial_state,
    leaves_of,
    mapped,
    select,
    spread,
)
from gradaccum_mindspore.large_batch.batch import Batch, MicroBatch, items_of, micro_batches
from gradaccum_mindspore.large_batch.gradients import GradientSums
from gradaccum_mindspore.large_batch.merging import MergedOutputs, loss_kind, require_outputs
from gradaccum_mindspore.large_batch.options import SplitOptions
from gradaccum_mindspore.large_batch.randomness import require_one_stream
from gradaccum_mindspore.large_batch.replay import Replay
from gradaccum_mindspore.large_batch.weights import weight_of

Function = Callable[..., Any]
NO_AUX = "origin fn requires more than one outputs"
"""What MindSpore says of a function that returns no other output with ``has_aux=True``."""


class PythonLoop:
    """The large batch's value and gradients.

    Args:
        fn: the user's function, to look for Cells that draw random numbers.
        backward: `mindspore.value_and_grad` of it.
        positions: the arguments that it is differentiated by.
        options: the checked options.
    """

    def __init__(self, fn: Function, backward: Function, positions: tuple[int, ...], options: SplitOptions) -> None:
        self.fn, self.backward, self.positions, self.options = fn, backward, positions, options

    def run(self, batch: Batch, division: Division) -> tuple[Any, Any]:
        """One pass over the batch, divided so; if it raises, statistics are as before."""
        with Replay(self.fn, lends=False) as replay:
            return self.passed(batch, division, replay)

    def passed(self, batch: Batch, division: Division, replay: Replay) -> tuple[Any, Any]:
        """One pass over the batch."""
        options = self.options
        sums = GradientSums(options.accumulate_dtype, self.joins(batch))
        outputs = MergedOutputs(options.aux, loss_kind(options.reduction.reduction))
        items, weight, unit = 0, 0.0, None
        for place, (part, amount) in enumerate(weighed(self.fn, batch, options, division)):
            replay.begin(place)
            unit = unit or unit_of(amount, options)
            value, gradients = differentiated(self.backward, part.arguments, options.aux is not None)
            sums.add(gradients, factor_of(amount / unit, options))
            outputs.add(value, part.items, amount / unit)
            del value, gradients  # They would live beside the next ones.
            items, weight = items + (part.items or 0), weight + amount / unit
        divides = divisor_of(weight, options)
        return outputs.finished(items, weight, divides), sums.finished(divides)

    def joins(self, batch: Batch) -> list[int | None]:
        """The axis along which each gradient's parts are concatenated; None where they are added."""
        return [self._axis(place, batch) for place in self.positions if place < len(batch)]

    def _axis(self, place: int, batch: Batch) -> Any:
        if self.options.split is not None:
            fix = "Leave split out, or differentiate by the weights alone."
            raise explain(ArgumentValueError, "grad_position", expected="None beside split", got=place, fix=fix)
        if children_of(batch[place]):
            expected = "an argument that is one Tensor, because MindSpore gives no gradient of a nest in PyNative"
            fix = "Let fn take the Tensors to differentiate by as arguments of their own."
            found = f"argument {place}, a {type(batch[place]).__name__}"
            raise explain(ArgumentValueError, "grad_position", expected=expected, found=found, fix=fix)
        axes = iter(spread(self.options.axes, batch, "axes"))
        of_arguments = [[next(axes) for _ in leaves_of(argument)] for argument in batch]
        return of_arguments[place][0]


def weighed(fn: object, batch: Batch, options: SplitOptions, division: Division) -> Iterator[tuple[MicroBatch, float]]:
    """Each micro-batch with its weight, one after the other."""
    per_item = options.weight is not None and not callable(options.weight) and options.split is None
    total = items_of(batch, options.axes) if per_item else None
    sizes: set[int | None] = set()
    for part in micro_batches(batch, options, division):
        known = part if options.split is None else part._replace(items=_counted(part.arguments, options.axes))
        require_one_stream(fn, sizes, known.items)
        yield known, weight_of(options.weight, known.arguments, known.items, known.cut, total)


def differentiated(backward: Function, arguments: Batch, has_aux: bool, *, scaled: bool = False) -> tuple[Any, Any]:
    """The value and the gradients of one micro-batch; the value is a pair of the scaled loss and the function's own where it is `scaled`.

    Raises:
        ArgumentValueError: the loss is no scalar, or other outputs come undeclared, or are missing.
    """
    try:
        value, gradients = backward(*compilable(arguments))
    except (ValueError, RuntimeError) as error:
        if NO_AUX in str(error):
            raise aux_shape_error("the loss alone", declared=True) from error
        raise
    require_outputs(value[1] if scaled else value, has_aux)
    return value, gradients


def unit_of(first: float, options: SplitOptions) -> float:
    """What weights are measured in: numbers of items in the first micro-batch's, so that equal ones need no multiplication."""
    return first if options.weight is None and options.reduction.reduction == "mean" else 1.0


def factor_of(weight: float, options: SplitOptions) -> float:
    """What a micro-batch's gradient is multiplied by; one of weight 0 adds nothing under any reduction."""
    return float(contribution(weight, options.reduction)) if weight > 0 else 0.0


def divisor_of(weight: float, options: SplitOptions) -> float:
    """What the sums are divided by."""
    state = initial_state(1.0)._replace(weight=weight)
    return float(divisor(state, options.reduction, select))


def compilable(arguments: Batch) -> Batch:
    """The arguments as graph mode takes them.

    A container of Tensors would be a constant there, compiled anew for each micro-batch. A slice, which shares the batch's memory,
    would be refused where the function returns it as it came.
    """
    if ms.get_context("mode") != ms.GRAPH_MODE:
        return arguments
    copies = (mapped(_copied, argument) for argument in arguments)
    return tuple(ms.mutable(each) if children_of(each) and _all_tensors(each) else each for each in copies)


def _copied(leaf: object) -> object:
    return leaf.copy() if isinstance(leaf, Tensor) else leaf


def _counted(arguments: Batch, axes: Nest) -> int | None:
    """The items of a micro-batch of the user's own split; None if its leaves disagree."""
    try:
        return items_of(arguments, axes, own_split=True)
    except ArgumentValueError:
        return None


def _all_tensors(nest: Nest) -> bool:
    return all(isinstance(leaf.value, Tensor) for leaf in leaves_of(nest))
