"""The large batch's gradients, loss and other outputs, from a Python loop over its
micro-batches.

In graph mode each micro-batch is a call of a compiled function, compiled once for each
size. The gradient of an argument that was cut is no sum: its parts are concatenated.
Nothing is added in place: a gradient may share its memory with the user's batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops

from gradaccum import ArgumentValueError, kit
from gradaccum.kit import Nest, explain, leaves_of
from gradaccum_mindspore.gradient_sum import (
    FLOATS,
    HALF,
    DType,
    divided,
    scaled,
    sum_dtype,
    working_dtype,
)
from gradaccum_mindspore.large_batch.batch import (
    Batch,
    MicroBatch,
    SplitOptions,
    items_of,
    micro_batches,
    weight_of,
)
from gradaccum_mindspore.large_batch.replay import Replay, require_one_stream


class GradientSums:
    """The gradients of the micro-batches so far."""

    def __init__(
        self, accumulate_dtype: object, joins: Sequence[int | None] = ()
    ) -> None:
        self.accumulate_dtype = accumulate_dtype
        self.joins = joins
        self.totals: list[Tensor] = []
        self.parts: list[list[Tensor]] = []
        self.dtypes: list[DType] = []
        self.outline: Nest = None

    def add(self, gradients: Nest, factor: float) -> None:
        """Take in one micro-batch's gradients times `factor`; a factor of 0 adds
        nothing, whatever they hold.
        """
        leaves: list[Tensor] = [leaf.value for leaf in leaves_of(gradients)]
        if not self.totals:
            self.outline = kit.mapped(lambda leaf: object(), gradients)
            self.dtypes = [leaf.dtype for leaf in leaves]
            self.totals = [None] * len(leaves)
            self.parts = [[] for _ in leaves]
        for place, gradient in enumerate(leaves):
            self._add_one(place, gradient, factor)

    def finished(self, divisor: float) -> Nest:
        totals = [self._total(place) for place in range(len(self.totals))]
        leaves = (
            divided(totals, divisor, self.dtypes, ms.float64)
            if divisor != 1
            else map(_cast, totals, self.dtypes)
        )
        return kit.with_leaves(self.outline, iter(leaves))

    def _add_one(self, place: int, gradient: Tensor, factor: float) -> None:
        dtype = sum_dtype(gradient.dtype, self.accumulate_dtype)
        given = (
            scaled(gradient, factor, dtype) if factor != 0 else _zeros(gradient, dtype)
        )
        if self._join(place) is not None:
            self.parts[place].append(given)
        elif factor != 0 or self.totals[place] is None:
            before = self.totals[place]
            self.totals[place] = given if before is None else _added(before, given)

    def _join(self, place: int) -> int | None:
        return self.joins[place] if place < len(self.joins) else None

    def _total(self, place: int) -> Tensor:
        axis = self._join(place)
        if axis is None:
            return self.totals[place]
        parts = self.parts[place]
        return parts[0] if len(parts) == 1 else ops.concat(parts, axis)


def _added(total: Tensor, given: Tensor) -> Tensor:
    work = working_dtype(total.dtype)
    return _cast(ops.add(_cast(total, work), _cast(given, work)), total.dtype)


def _cast(tensor: Tensor, dtype: DType) -> Tensor:
    return tensor if tensor.dtype == dtype else tensor.astype(dtype)


def _zeros(like: Tensor, dtype: DType) -> Tensor:
    return Tensor(np.zeros(like.shape), dtype)


class Operators:
    """The operations that the core asks for; in compiled code too."""

    def maximum(self, a: Tensor, b: Tensor) -> Tensor:
        # ops.maximum forgets a NaN that comes first
        return ops.where((a >= b) | (a != a), a, b)

    def minimum(self, a: Tensor, b: Tensor) -> Tensor:
        return ops.where((a <= b) | (a != a), a, b)

    def widened(self, value: Tensor) -> Tensor:
        if value.dtype in HALF:
            return value.astype(ms.float32)
        return value.astype(ms.int64) if value.dtype == ms.bool_ else value


OPERATORS = Operators()


class MergedOutputs:
    """The loss and the other outputs of the micro-batches so far."""

    def __init__(self, declared: Nest, loss_kind: str) -> None:
        self.declared = declared
        self.loss_kind = loss_kind
        self.kinds: list[str] = []
        self.shares: list[Any] = []
        self.outline: Nest = None
        self.loss_dtype: DType = ms.float32

    def add(self, value: Nest, weight: float) -> None:
        if not self.shares:
            self.kinds = self._kinds(value)
            self.loss_dtype = _first(value).dtype
            self.outline = kit.mapped(lambda leaf: object(), value)
        leaves = leaves_of(value, "output")
        if len(leaves) != len(self.kinds):
            raise _structure_error(len(self.kinds), len(leaves))
        given = [
            self._share(kind, leaf.path, leaf.value, weight)
            for kind, leaf in zip(self.kinds, leaves, strict=True)
        ]
        self.shares = (
            given
            if not self.shares
            else [
                _merged(*each)
                for each in zip(self.kinds, self.shares, given, strict=True)
            ]
        )

    def finished(self, weight: float, divisor: float) -> Nest:
        """Return what the call returns; `divisor` is the loss's."""
        loss, *others = (
            _joined(kind, each)
            for kind, each in zip(self.kinds, self.shares, strict=True)
        )
        total = (loss / _number(divisor, loss) if divisor != 1 else loss).astype(
            self.loss_dtype
        )
        rest = [
            kit.finished(kind, each, _number(weight or 1, each))
            for kind, each in zip(self.kinds[1:], others, strict=True)
        ]
        return kit.with_leaves(self.outline, iter([total, *rest]))

    def _kinds(self, value: Nest) -> list[str]:
        if self.declared is None:
            return [self.loss_kind]
        _, *others = cast("tuple[Nest, ...]", value)
        return [
            self.loss_kind,
            *kit.kinds_of(
                self.declared, others[0] if len(others) == 1 else tuple(others)
            ),
        ]

    def _share(self, kind: str, path: str, value: Any, weight: float) -> Any:
        value = value if isinstance(value, Tensor) else Tensor(value)
        if kind == "concatenate":
            if value.ndim == 0:
                raise kit.concatenate_error(path, "a scalar")
            return [value]
        if kind in kit.MEANS and weight == 0:
            # Not 0 * value: the mean over no tokens is NaN.
            return ops.zeros_like(OPERATORS.widened(value))
        return kit.share(kind, value, _number(weight, value), OPERATORS)


def require_outputs(value: Any, has_aux: bool) -> None:
    if isinstance(value, tuple | list) != has_aux:
        raise kit.aux_shape_error(
            (
                f"a {type(value).__name__} of {len(value)}"
                if not has_aux
                else "the loss alone"
            ),
            declared=has_aux,
        )
    loss = _first(value)
    if not isinstance(loss, Tensor):
        raise kit.scalar_loss_error(f"an object of type {type(loss).__name__}")
    require_scalar(tuple(loss.shape), loss.dtype)


def require_scalar(shape: tuple[int, ...], dtype: DType) -> None:
    """Raise unless the loss is a scalar of a floating dtype; while compiling too."""
    if shape:
        raise kit.scalar_loss_error(f"a Tensor of shape {shape}")
    if dtype not in FLOATS.values():
        raise kit.scalar_loss_error(f"a Tensor of dtype {dtype}")


def loss_kind(reduction: str) -> str:
    """Return how losses add up: as the gradients do."""
    return "weighted_mean" if reduction == "mean" else "sum"


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, tuple | list) else value


def _number(number: float, like: Tensor) -> Tensor:
    """Return a Tensor, because MindSpore rounds a Python number to float32."""
    return Tensor(number, ms.float64 if like.dtype == ms.float64 else ms.float32)


def _merged(kind: str, so_far: Any, given: Any) -> Any:
    return (
        [*so_far, *given]
        if kind == "concatenate"
        else kit.merged(kind, so_far, given, OPERATORS)
    )


def _joined(kind: str, parts: Any) -> Tensor:
    if kind != "concatenate":
        return parts
    return parts[0] if len(parts) == 1 else ops.concat(parts, 0)


def _structure_error(expected: int, found: int) -> ArgumentValueError:
    fix = "Return the same outputs for every micro-batch."
    return explain(
        ArgumentValueError,
        "loss_fn",
        expected=f"{expected} outputs, as of the first micro-batch",
        found=f"{found}",
        fix=fix,
    )


Function = Callable[..., Any]
NO_AUX = "origin fn requires more than one outputs"
"""What MindSpore says of a function that returns no other output with ``has_aux=True``.
"""


class PythonLoop:
    """The large batch's value and gradients."""

    def __init__(
        self,
        fn: Function,
        backward: Function,
        positions: tuple[int, ...],
        options: SplitOptions,
    ) -> None:
        self.fn = fn
        self.backward = backward
        self.positions = positions
        self.options = options

    def run(self, batch: Batch) -> tuple[Any, Any]:
        """Run one pass over the batch; if it raises, statistics are as before."""
        with Replay(self.fn, lends=False) as replay:
            return self.passed(batch, replay)

    def passed(self, batch: Batch, replay: Replay) -> tuple[Any, Any]:
        options = self.options
        sums = GradientSums(options.accumulate_dtype, self.joins(batch))
        outputs = MergedOutputs(options.aux, loss_kind(options.reduction.reduction))
        weight = 0.0
        unit = None
        for place, (part, amount) in enumerate(weighed(self.fn, batch, options)):
            replay.begin(place)
            unit = unit or unit_of(amount, options)
            value, gradients = differentiated(
                self.backward, part.arguments, options.aux is not None
            )
            sums.add(gradients, factor_of(amount / unit, options))
            outputs.add(value, amount / unit)
            del value, gradients  # They would live beside the next ones.
            weight += amount / unit
        divides = divisor_of(weight, options)
        return outputs.finished(weight, divides), sums.finished(divides)

    def joins(self, batch: Batch) -> list[int | None]:
        """Return the axis along which each gradient's parts are concatenated; None
        where they are added.
        """
        return [
            self._axis(place, batch) for place in self.positions if place < len(batch)
        ]

    def _axis(self, place: int, batch: Batch) -> Any:
        if self.options.split is not None:
            fix = "Leave split out, or differentiate by the weights alone."
            raise explain(
                ArgumentValueError,
                "grad_position",
                expected="None beside split",
                got=place,
                fix=fix,
            )
        if kit.children_of(batch[place]):
            expected = (
                "an argument that is one Tensor, because MindSpore gives no gradient of"
                " a nest in PyNative"
            )
            fix = (
                "Let fn take the Tensors to differentiate by as arguments of their own."
            )
            found = f"argument {place}, a {type(batch[place]).__name__}"
            raise explain(
                ArgumentValueError,
                "grad_position",
                expected=expected,
                found=found,
                fix=fix,
            )
        axes = iter(kit.spread(self.options.axes, batch, "axes"))
        of_arguments = [[next(axes) for _ in leaves_of(argument)] for argument in batch]
        return of_arguments[place][0]


def weighed(
    fn: object, batch: Batch, options: SplitOptions
) -> Iterator[tuple[MicroBatch, float]]:
    per_item = (
        options.weight is not None
        and not callable(options.weight)
        and options.split is None
    )
    total = items_of(batch, options.axes) if per_item else None
    sizes: set[int | None] = set()
    for part in micro_batches(batch, options):
        known = (
            part
            if options.split is None
            else part._replace(items=_counted(part.arguments, options.axes))
        )
        require_one_stream(fn, sizes, known.items)
        yield (
            known,
            weight_of(options.weight, known.arguments, known.items, known.cut, total),
        )


def differentiated(
    backward: Function, arguments: Batch, has_aux: bool, *, scaled: bool = False
) -> tuple[Any, Any]:
    """Return value and gradients of one micro-batch; a `scaled` value stands before the
    function's own, which is returned.
    """
    try:
        value, gradients = backward(*compilable(arguments))
    except (ValueError, RuntimeError) as error:
        if NO_AUX in str(error):
            raise kit.aux_shape_error("the loss alone", declared=True) from error
        raise
    if scaled:
        value = value[1:] if has_aux else value[1]
    require_outputs(value, has_aux)
    return value, gradients


def unit_of(first: float, options: SplitOptions) -> float:
    """Return the unit of weights: of numbers of items the first one, so that equal ones
    need no multiplication.
    """
    return (
        first
        if options.weight is None and options.reduction.reduction == "mean"
        else 1.0
    )


def factor_of(weight: float, options: SplitOptions) -> float:
    """Return the factor of a micro-batch's gradient; weight 0 adds nothing under any
    reduction.
    """
    return float(kit.contribution(weight, options.reduction)) if weight > 0 else 0.0


def divisor_of(weight: float, options: SplitOptions) -> float:
    state = kit.initial_state(1.0)._replace(weight=weight)
    return float(kit.divisor(state, options.reduction, kit.select))


def compilable(arguments: Batch) -> Batch:
    """Return the arguments as graph mode takes them.

    A container of Tensors would be a constant there, compiled anew for each
    micro-batch. A slice, which shares the batch's memory, would be refused where the
    function returns it as it came.
    """
    if ms.get_context("mode") != ms.GRAPH_MODE:
        return arguments
    copies = (kit.mapped(_copied, argument) for argument in arguments)
    return tuple(
        ms.mutable(each) if kit.children_of(each) and _all_tensors(each) else each
        for each in copies
    )


def _copied(leaf: object) -> object:
    return leaf.copy() if isinstance(leaf, Tensor) else leaf


def _counted(arguments: Batch, axes: Nest) -> int | None:
    """Return the items of a micro-batch of the user's own split; None if its leaves
    disagree.
    """
    try:
        return items_of(arguments, axes, own_split=True)
    except ArgumentValueError:
        return None


def _all_tensors(nest: Nest) -> bool:
    return all(isinstance(leaf.value, Tensor) for leaf in leaves_of(nest))
