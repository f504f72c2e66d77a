"""Losses that couple the items of a batch, in two passes: any function of per-item outputs, exact.

The first pass computes the outputs of all items, and keeps nothing else. The loss of all outputs is differentiated once, by the outputs
and by what parameters it has itself: a temperature counted in each micro-batch would get its gradient many times. The second pass
computes each micro-batch again and carries the gradient of its outputs on to the parameters, through the gradient of
``sum(outputs * gradient)``.

In compiled code each pass is a loop with one body; the first micro-batch of the first pass stands before it, because it tells the shapes
of the outputs. Compiled code cannot raise for a value: where the second pass gives other outputs than the first, everything that is
returned is NaN. Compiled operators hold the place in their random numbers themselves, so a Cell that draws is refused while compiling. So
is a normalization whose statistics would move twice: the compiler did not keep their assignment between the two loops.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mindspore as ms
from mindspore import Parameter, Tensor, nn, ops
from mindspore.common import _no_grad
from mindspore.ops import constexpr

from gradaccum import ArgumentValueError, AutoMicroBatchSize
from gradaccum.kit import Division, Nest, concatenate_error, explain, leaves_of, mapped, with_leaves
from gradaccum_mindspore.large_batch.auto import fitted
from gradaccum_mindspore.large_batch.batch import (
    Batch,
    SplitOptions,
    filled,
    leaves_in,
    micro_batches,
    nest_in,
    plain_reduction,
    require_function,
    sizes_of,
    slices_of,
    split_options,
)
from gradaccum_mindspore.large_batch.compiled import CompiledLoop, begun, rows_joined, with_shares, with_tail
from gradaccum_mindspore.large_batch.gradients import Function, GradientSums, compilable, require_outputs
from gradaccum_mindspore.large_batch.replay import (
    DEPTH,
    ROUNDINGS,
    Replay,
    cells_of,
    random_cell,
    replay_error,
    require_replayable,
    require_same,
    statistics_of,
)
from gradaccum_mindspore.private import refuse_trace
from gradaccum_mindspore.sums import FLOATS, where, working_dtype

DOUBLE, SINGLE, HALF, LEAST = (ROUNDINGS[dtype] for dtype in (ms.float64, ms.float32, ms.float16, ms.bfloat16))
"""Numbers by themselves: the compiler follows no dict of dtypes."""


class CompiledCoupledLoop(CompiledLoop):
    """The loss and the gradients, for the compiler to follow."""

    def __init__(self, outputs_fn: Function, loss_fn: Function, weights: Any, options: SplitOptions) -> None:
        second = ms.value_and_grad(carried(outputs_fn), None, weights, True)
        super().__init__(outputs_fn, second, weights, False, options)
        self.outputs_of = leaves_function(outputs_fn)
        self.differentiated_loss = ms.value_and_grad(loss_of_leaves(loss_fn), 0, weights)
        self.check_cells = cells_check(outputs_fn)

    def run(self, batch: Batch) -> Any:
        self.check_cells()
        cuts = self.checked_cuts(sizes_of(batch, self.axes, "batch"))
        outline, whole = self.first_pass(batch, cuts)
        value, (cotangents, own) = self.differentiated_loss(floating_of(whole), others_in(whole), outline)
        loss, one = self.loss_of(value), self.zero + 1
        sums = self.collected(self.zeros(self.zero * 1), (own,) if self.single else own, one, one)
        sums, factor = self.second_pass(batch, cuts, whole, cotangents, sums)
        return self.finished(loss * factor.astype(loss.dtype), sums, one)

    def first_pass(self, batch: Batch, cuts: tuple[int, int, int]) -> tuple[Any, tuple[Tensor, ...]]:
        full, size, tail = cuts
        indices = ops.arange(size)
        outline = self.outputs_of(*slices_of(batch, self.axes, indices))
        first = leaves_in(outline)
        check_leaves(ranks_of(first), number_of_floating(first))
        kinds = ("concatenate",) * len(first)
        whole, step = begun(kinds, first, full), (self.zero * 1).astype(ms.int32) + 1
        while step < full:
            given = leaves_in(self.outputs_of(*slices_of(batch, self.axes, indices + step * size)))
            whole = with_shares(kinds, whole, given, step)
            step = step + 1
        whole = rows_joined(kinds, whole)
        if tail > 0:
            given = leaves_in(self.outputs_of(*slices_of(batch, self.axes, ops.arange(tail) + full * size)))
            whole = with_tail(kinds, whole, given)
        return outline, whole

    def second_pass(self, batch: Batch, cuts: tuple[int, int, int], whole: Any, cotangents: Any, sums: Any) -> tuple[Any, Tensor]:
        """Return the sums of gradients, and 1, or NaN where the outputs differ from those of the first pass."""
        full, size, tail = cuts
        step, factor = (self.zero * 1).astype(ms.int32), self.zero + 1
        while step < full:
            sums, factor = self.carry(batch, ops.arange(size) + step * size, step * size, cuts, whole, cotangents, sums, factor)
            step = step + 1
        if tail > 0:
            sums, factor = self.carry(batch, ops.arange(tail) + full * size, step * size, cuts, whole, cotangents, sums, factor)
        return sums, factor

    def carry(
        self,
        batch: Batch,
        indices: Tensor,
        start: Tensor,
        cuts: tuple[int, int, int],
        whole: Any,
        cotangents: Any,
        sums: Any,
        factor: Tensor,
    ) -> tuple[Any, Tensor]:
        full, size, tail = cuts
        items = full * size + tail
        given = rows_of(cotangents, indices, start, items)
        (_, again), gradients = self.backward(given, *slices_of(batch, self.axes, indices))
        different = differences(rows_of(whole, indices, start, items), again, self.zero)
        factor = where(different > 0, self.nan * 1, factor)
        return self.collected(sums, (gradients,) if self.single else gradients, factor, factor), factor


def leaves_function(outputs_fn: Function) -> Function:
    """Return `outputs_fn` as a function: a Cell that held a user's Cell would list its parameters."""

    def outputs_of(*arguments: Any) -> Any:
        return outputs_fn(*arguments)

    return outputs_of


def carried(outputs_fn: Function) -> Function:
    """Return a function whose gradient carries `cotangents` of the floating outputs on to the parameters; it returns the leaves too."""

    def products(cotangents: tuple[Tensor, ...], *arguments: Any) -> tuple[Tensor, Any]:
        leaves = leaves_in(outputs_fn(*arguments))
        floating = floating_of(leaves)
        total = _product(floating[0], cotangents[0])
        for place in range(1, len(floating)):
            total = total + _product(floating[place], cotangents[place]).astype(total.dtype)
        return total, leaves

    return products


def loss_of_leaves(loss_fn: Function) -> Function:
    """Return `loss_fn` as a function of the floating leaves, the other ones, and a nest in whose places they stand."""

    def of_leaves(floating: tuple[Tensor, ...], others: tuple[Tensor, ...], outline: Any) -> Tensor:
        return loss_fn(filled(outline, merged_leaves(leaves_in(outline), floating, others)))

    return of_leaves


def merged_leaves(outline: Any, floating: Any, others: Any) -> tuple[Tensor, ...]:
    """Return the leaves in order, from the floating ones and the others."""
    made: tuple[Tensor, ...] = ()
    near, far = 0, 0
    for place in range(len(outline)):
        if is_floating(outline[place]):
            made, near = (*made, floating[near]), near + 1
        else:
            made, far = (*made, others[far]), far + 1
    return made


def floating_of(leaves: Any) -> tuple[Tensor, ...]:
    made: tuple[Tensor, ...] = ()
    for place in range(len(leaves)):
        if is_floating(leaves[place]):
            made = (*made, leaves[place])
    return made


def others_in(leaves: Any) -> tuple[Tensor, ...]:
    made: tuple[Tensor, ...] = ()
    for place in range(len(leaves)):
        if not is_floating(leaves[place]):
            made = (*made, leaves[place])
    return made


def is_floating(leaf: Tensor) -> bool:
    dtype = leaf.dtype
    found: bool = dtype == ms.float32 or dtype == ms.float64 or dtype == ms.float16 or dtype == ms.bfloat16
    return found


def rows_of(leaves: Any, indices: Tensor, start: Tensor, items: int) -> tuple[Tensor, ...]:
    made: tuple[Tensor, ...] = ()
    for place in range(len(leaves)):
        each = leaves[place].shape[0] // items
        rows = ops.arange(indices.shape[0] * each) + start * each
        made = (*made, ops.gather(leaves[place], rows, 0))
    return made


def differences(first: Any, second: Any, zero: Tensor) -> Tensor:
    """Count the outputs that differ between the passes by more than rounding; returns a scalar in the dtype of `zero`."""
    found = zero * 1
    for place in range(len(first)):
        found = found + _differing(first[place], second[place], zero)
    return found


def _differing(a: Tensor, b: Tensor, zero: Tensor) -> Tensor:
    if not is_floating(a):
        return ops.ReduceSum()((a != b).astype(zero.dtype), ())
    work, rounding = working_dtype(a.dtype), _rounding(a)
    first, second = a.astype(work), b.astype(work)
    largest = ops.ReduceMax()(ops.abs(where(ops.isfinite(first), first, ops.zeros_like(first))), ())
    gap = where(ops.isfinite(first), ops.abs(first - second), ops.zeros_like(first))
    lost = ops.isfinite(first) != ops.isfinite(second)
    return ops.ReduceSum()(((gap > largest * rounding) | lost).astype(zero.dtype), ())


def ranks_of(leaves: Any) -> tuple[int, ...]:
    """Return each leaf's number of axes; -1 for a leaf that is no Tensor."""
    ranks: tuple[int, ...] = ()
    for place in range(len(leaves)):
        ranks = (*ranks, len(leaves[place].shape) if isinstance(leaves[place], Tensor) else -1)
    return ranks


def cells_check(outputs_fn: Function) -> Any:
    """Return a function that refuses, while compiling, random draws and normalizations whose statistics would move twice."""

    @constexpr(reuse_result=False)  # type: ignore[untyped-decorator]
    def check_cells() -> None:
        found = random_cell(outputs_fn) or normalization_of(outputs_fn)
        if found is not None:
            raise replay_error(
                f"a {found} in training in compiled code", "Call it from Python in PyNative mode, or write set_train(False)."
            )

    return check_cells


def normalization_of(outputs_fn: Function) -> str | None:
    """Return the class of a normalization in training that keeps statistics; None if none is found."""
    for cell in cells_of(outputs_fn, DEPTH):
        for _, each in cell.cells_and_names():
            if each.training and "Norm" in type(each).__name__ and statistics_of(each):
                return type(each).__name__
    return None


@constexpr  # type: ignore[untyped-decorator]
def check_leaves(ranks: tuple[int, ...], floating: int) -> None:
    """Refuse outputs that have no rows, and those of which none is floating, while compiling."""
    for place, rank in enumerate(ranks):
        if rank <= 0:
            raise concatenate_error(f"outputs, leaf {place}", "a scalar" if rank == 0 else "no Tensor")
    if floating == 0:
        raise no_output_error()


def no_output_error() -> ArgumentValueError:
    fix = "Return embeddings or logits; the labels can stand beside them."
    return explain(ArgumentValueError, "outputs_fn", expected="a floating output to differentiate by", found="none", fix=fix)


def number_of_floating(leaves: Any) -> int:
    found = 0
    for place in range(len(leaves)):
        if isinstance(leaves[place], Tensor) and is_floating(leaves[place]):
            found = found + 1
    return found


def _product(output: Tensor, cotangent: Tensor) -> Tensor:
    work = working_dtype(cotangent.dtype)
    return (output.astype(work) * cotangent.astype(work)).sum()


def _rounding(leaf: Tensor) -> float:
    if leaf.dtype == ms.float64:
        return DOUBLE
    if leaf.dtype == ms.float32:
        return SINGLE
    return LEAST if leaf.dtype == ms.bfloat16 else HALF


Pieces = tuple[list[Tensor], ...]


class CoupledGradient(nn.Cell):  # type: ignore[misc]
    """The function that `coupled_value_and_grad` returns: ``(loss, gradients)`` of a large batch whose loss couples its items."""

    def __init__(self, outputs_fn: Function, loss_fn: Function, weights: Any, options: SplitOptions) -> None:
        super().__init__(auto_prefix=False)
        self.options = options
        for name, value in (("outputs_fn", outputs_fn), ("loss_fn", loss_fn), ("trained", weights), ("made", {})):
            object.__setattr__(self, name, value)  # A Cell would list their parameters as its own.
        self.loop = CompiledCoupledLoop(outputs_fn, loss_fn, weights, options)

    def __call__(self, *batch: Nest) -> tuple[Tensor, Any]:
        refuse_trace()
        require_replayable(self.outputs_fn)
        division = self.options.division
        if isinstance(division.micro_batch_size, AutoMicroBatchSize):
            return fitted(self.run, self.outputs_fn, division.micro_batch_size, batch, self.options)  # type: ignore[no-any-return]
        return self.run(batch, division)

    def construct(self, *batch: Nest) -> tuple[Tensor, Any]:
        return self.loop.run(batch)  # type: ignore[no-any-return]

    def run(self, batch: Batch, division: Division) -> tuple[Tensor, Any]:
        parts = [part.arguments for part in micro_batches(batch, self.options, division)]
        with Replay(self.outputs_fn) as replay:
            structure, pieces = self.outputs_of(parts, replay)
            loss, cotangents, own = self.loss_of(structure, pieces)
            sums = GradientSums(self.options.accumulate_dtype)
            sums.add(own, 1.0)
            del own
            replay.set_back()
            second = self._differentiated(tuple(cotangents))
            for place, arguments in enumerate(parts):
                replay.begin(place)
                given = tuple(part_of(cotangent, pieces[leaf], place) for leaf, cotangent in cotangents.items())
                (_, again), gradients = second(ms.mutable(given), *compilable(arguments))
                require_same([piece[place] for piece in pieces], output_leaves(again))
                sums.add(gradients, 1.0)
                del again, gradients  # They would live beside the next ones.
            return loss, sums.finished(1.0)

    def outputs_of(self, parts: Sequence[Batch], replay: Replay) -> tuple[Nest, Pieces]:
        """Run the first pass: the structure of the outputs, and for each leaf its part of each micro-batch."""
        forward, structure, given = self._forward(), None, []
        for place, arguments in enumerate(parts):
            replay.begin(place)
            with _no_grad():  # Where MindSpore records, for an outer gradient, or after an error, it would keep all micro-batches.
                structure = forward(*compilable(arguments))
            given.append(output_leaves(structure))
        return structure, tuple(map(list, zip(*given, strict=True)))

    def loss_of(self, structure: Nest, pieces: Pieces) -> tuple[Tensor, dict[int, Tensor], Any]:
        """Return the loss of all outputs, its gradient by each floating leaf of them, and by the loss's own parameters."""
        whole = [parts[0] if len(parts) == 1 else ops.concat(parts, 0) for parts in pieces]
        floating = tuple(place for place, leaf in enumerate(whole) if leaf.dtype in FLOATS.values())
        if not floating:
            raise no_output_error()
        loss, (by_outputs, own) = self._loss(structure, floating)(*whole)
        require_outputs(loss, False)
        by_outputs = by_outputs if isinstance(by_outputs, tuple) else (by_outputs,)
        return loss, dict(zip(floating, by_outputs, strict=True)), own

    def _forward(self) -> Function:
        """Return `outputs_fn`, compiled in graph mode; a function that Python calls is not compiled there by itself."""
        if ms.get_context("mode") != ms.GRAPH_MODE or isinstance(self.outputs_fn, nn.Cell):
            return self.outputs_fn  # type: ignore[no-any-return]
        return self._once("forward", lambda: ms.jit(self.outputs_fn))

    def _loss(self, structure: Nest, floating: tuple[int, ...]) -> Function:
        places = with_leaves(structure, iter(range(len(leaves_of(structure)))))
        outline = mapped(lambda leaf: object(), structure)
        compiled = ms.get_context("mode") == ms.GRAPH_MODE
        made = loss_function(self.loss_fn, outline, places, compiled)
        return self._once(("loss", repr(places), floating), lambda: ms.value_and_grad(made, floating, self.trained))

    def _differentiated(self, floating: tuple[int, ...]) -> Function:
        compiled = ms.get_context("mode") == ms.GRAPH_MODE
        made = surrogate(self.outputs_fn, floating, compiled)
        return self._once(("second", floating), lambda: ms.value_and_grad(made, None, self.trained, True))

    def _once(self, key: object, make: Callable[[], Function]) -> Function:
        """Call `make` once for each key and mode: MindSpore compiles each new function anew."""
        key = (key, ms.get_context("mode"))
        if key not in self.made:
            self.made[key] = make()
        return self.made[key]  # type: ignore[no-any-return]


def coupled_value_and_grad(
    outputs_fn: Function,
    loss_fn: Function,
    weights: Parameter | Sequence[Parameter],
    *,
    steps: int | None = None,
    micro_batch_size: int | str | AutoMicroBatchSize | None = None,
    axes: Nest = 0,
    split: Callable[..., Any] | None = None,
    accumulate_dtype: object = None,
) -> CoupledGradient:
    """Return a function of a large batch that returns the loss of all items together, and its gradients, micro-batch by micro-batch.

    ``coupled_value_and_grad(outputs_fn, loss_fn, weights, steps=4)(*batch)`` is
    ``mindspore.value_and_grad(lambda *batch: loss_fn(outputs_fn(*batch)), None, weights)(*batch)``, for a contrastive loss, say. It runs
    `outputs_fn` twice on each micro-batch. To scale the loss, return ``optimizer.scale(loss)`` from `loss_fn`.

    Args:
        outputs_fn: a function or Cell of the batch that returns a nest of Tensors, each with one row, or as many, per item.
        loss_fn: a function of the outputs of the whole batch that returns a scalar. Its own parameters are differentiated once.
        weights: the Parameters to differentiate by, of both functions.
        steps: as for `value_and_grad`, with the four that follow.
        micro_batch_size: an int, "auto" or an `AutoMicroBatchSize`.
        axes: the axis of the items, for each leaf of the batch; None for a leaf that is given whole.
        split: a function of the batch that yields micro-batches; the outputs are concatenated in their order.
        accumulate_dtype: the dtype of the sums of gradients.

    Returns:
        A Cell to call with the batch: in PyNative, inside `mindspore.jit` and in graph mode. In PyNative `mindspore.nn.Dropout` and
        `mindspore.ops.dropout` draw the same numbers in both passes. From Python statistics move once, and a call that raises leaves them
        as they were; inside compiled code those of Cells of your own move twice. Over several workers the loss couples the items of one
        worker alone.

    Raises:
        ArgumentTypeError, ArgumentValueError: an option is wrong; on a call, the batch is empty or has leaves of unequal size, an output
            has no leading axis, or the loss is no scalar.
        UsageError: on a call, `outputs_fn` gives other outputs in the second pass than in the first; or a Cell in training draws random
            numbers in graph mode or inside compiled code, or normalizes inside compiled code. Other outputs make everything NaN inside
            compiled code, which cannot raise.

    Examples:
        >>> from mindspore import Tensor, nn
        >>> net = nn.Dense(2, 1, weight_init="ones", has_bias=False)
        >>> def spread(outputs):
        ...     return (outputs * outputs).mean() - outputs.mean() ** 2
        >>> backward = coupled_value_and_grad(net, spread, net.trainable_params(), steps=2)
        >>> loss, _ = backward(Tensor([[1.0, 2.0], [3.0, 4.0]]))
        >>> float(loss)
        4.0
    """
    require_function("outputs_fn", outputs_fn)
    require_function("loss_fn", loss_fn)
    options = split_options(
        False,
        plain_reduction("sum"),
        steps=steps,
        micro_batch_size=micro_batch_size,
        axes=axes,
        split=split,
        accumulate_dtype=accumulate_dtype,
    )
    return CoupledGradient(outputs_fn, loss_fn, weights, options)


def output_leaves(outputs: Nest) -> list[Tensor]:
    leaves = leaves_of(outputs, "outputs")
    for leaf in leaves:
        if not isinstance(leaf.value, Tensor) or leaf.value.ndim == 0:
            raise concatenate_error(leaf.path, "a scalar" if isinstance(leaf.value, Tensor) else f"a {type(leaf.value).__name__}")
    return [leaf.value for leaf in leaves]


def part_of(whole: Tensor, pieces: Sequence[Tensor], place: int) -> Tensor:
    """Return the rows of `whole` that belong to the micro-batch at `place`; `pieces` are the outputs of each."""
    start = sum(piece.shape[0] for piece in pieces[:place])
    return whole[start : start + pieces[place].shape[0]]


def loss_function(loss_fn: Function, outline: Nest, places: Nest, compiled: bool) -> Function:
    def of_leaves(*leaves: Tensor) -> Tensor:
        return loss_fn(with_leaves(outline, iter(leaves)))

    def of_compiled_leaves(*leaves: Tensor) -> Tensor:
        return loss_fn(nest_in(places, leaves))

    return of_compiled_leaves if compiled else of_leaves


def surrogate(outputs_fn: Function, floating: tuple[int, ...], compiled: bool) -> Function:
    """Return a function whose gradient carries the `cotangents` of the floating outputs on to the parameters; it returns the outputs too.

    Its value means nothing. The products are float32 for half precision, so that the value does not overflow.
    """
    leaves_at = leaves_in if compiled else output_leaves

    def products(cotangents: tuple[Tensor, ...], *arguments: Nest) -> tuple[Tensor, Any]:
        leaves = leaves_at(outputs_fn(*arguments))
        total = 0.0
        for place, cotangent in zip(floating, cotangents):  # noqa: B905 - the compiler knows no strict
            work = working_dtype(cotangent.dtype)
            total = total + (leaves[place].astype(work) * cotangent.astype(work)).sum()
        return total, tuple(leaves)

    return products
