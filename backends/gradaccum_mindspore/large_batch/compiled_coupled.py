"""Losses that couple the items of a batch, as two loops of compiled code: inside `mindspore.jit` and inside a Cell in graph mode.

Each pass is a loop with one body; the first micro-batch of the first pass stands before it, because it tells the shapes of the outputs.
Compiled code cannot raise for a value: where the second pass gives other outputs than the first, everything that is returned is NaN.
Compiled operators hold the place in their random numbers themselves, so a Cell that draws is refused while compiling.
So is a normalization whose statistics would move twice: the compiler did not keep their assignment between the two loops.
"""

from __future__ import annotations

from typing import Any

import mindspore as ms
from mindspore import Tensor, ops
from mindspore.ops import constexpr

from gradaccum import ArgumentValueError
from gradaccum.kit import concatenate_error, explain
from gradaccum_mindspore.large_batch.batch import Batch
from gradaccum_mindspore.large_batch.compiled import CompiledLoop
from gradaccum_mindspore.large_batch.compiled_outputs import begun, rows_joined, with_shares, with_tail
from gradaccum_mindspore.large_batch.nests import filled, leaves_in, sizes_of, slices_of
from gradaccum_mindspore.large_batch.options import SplitOptions
from gradaccum_mindspore.large_batch.python_loop import Function
from gradaccum_mindspore.large_batch.randomness import DEPTH, cells_of, random_cell
from gradaccum_mindspore.large_batch.replay import ROUNDINGS, replay_error, statistics_of
from gradaccum_mindspore.sums import where, working_dtype

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
        """Both passes."""
        self.check_cells()
        cuts = self.checked_cuts(sizes_of(batch, self.axes, "batch"))
        outline, whole = self.first_pass(batch, cuts)
        value, (cotangents, own) = self.differentiated_loss(floating_of(whole), others_in(whole), outline)
        loss, one = self.loss_of(value), self.zero + 1
        sums = self.collected(self.zeros(self.zero * 1), (own,) if self.single else own, one, one)
        sums, factor = self.second_pass(batch, cuts, whole, cotangents, sums)
        return self.finished(loss * factor.astype(loss.dtype), sums, one)

    def first_pass(self, batch: Batch, cuts: tuple[int, int, int]) -> tuple[Any, tuple[Tensor, ...]]:
        """The nest of the outputs of one micro-batch, and the leaves of the outputs of all items."""
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
        """The sums of gradients, and 1, or NaN where the outputs differ from those of the first pass."""
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
        """The sums with one micro-batch's gradients, and the factor, from the gradients of all outputs."""
        full, size, tail = cuts
        items = full * size + tail
        given = rows_of(cotangents, indices, start, items)
        (_, again), gradients = self.backward(given, *slices_of(batch, self.axes, indices))
        different = differences(rows_of(whole, indices, start, items), again, self.zero)
        factor = where(different > 0, self.nan * 1, factor)
        return self.collected(sums, (gradients,) if self.single else gradients, factor, factor), factor


def leaves_function(outputs_fn: Function) -> Function:
    """`outputs_fn` as a function: a Cell that held a user's Cell would list its parameters."""

    def outputs_of(*arguments: Any) -> Any:
        return outputs_fn(*arguments)

    return outputs_of


def carried(outputs_fn: Function) -> Function:
    """A function whose gradient carries `cotangents` of the floating outputs on to the parameters; it returns the leaves too."""

    def products(cotangents: tuple[Tensor, ...], *arguments: Any) -> tuple[Tensor, Any]:
        leaves = leaves_in(outputs_fn(*arguments))
        floating = floating_of(leaves)
        total = _product(floating[0], cotangents[0])
        for place in range(1, len(floating)):
            total = total + _product(floating[place], cotangents[place]).astype(total.dtype)
        return total, leaves

    return products


def loss_of_leaves(loss_fn: Function) -> Function:
    """`loss_fn` as a function of the floating leaves, the other ones, and a nest in whose places they stand."""

    def of_leaves(floating: tuple[Tensor, ...], others: tuple[Tensor, ...], outline: Any) -> Tensor:
        return loss_fn(filled(outline, merged_leaves(leaves_in(outline), floating, others)))

    return of_leaves


def merged_leaves(outline: Any, floating: Any, others: Any) -> tuple[Tensor, ...]:
    """The leaves in order, from the floating ones and the others."""
    made: tuple[Tensor, ...] = ()
    near, far = 0, 0
    for place in range(len(outline)):
        if is_floating(outline[place]):
            made, near = (*made, floating[near]), near + 1
        else:
            made, far = (*made, others[far]), far + 1
    return made


def floating_of(leaves: Any) -> tuple[Tensor, ...]:
    """The leaves by which a loss is differentiated."""
    made: tuple[Tensor, ...] = ()
    for place in range(len(leaves)):
        if is_floating(leaves[place]):
            made = (*made, leaves[place])
    return made


def others_in(leaves: Any) -> tuple[Tensor, ...]:
    """The other leaves, such as labels."""
    made: tuple[Tensor, ...] = ()
    for place in range(len(leaves)):
        if not is_floating(leaves[place]):
            made = (*made, leaves[place])
    return made


def is_floating(leaf: Tensor) -> bool:
    """Whether a leaf has a gradient."""
    dtype = leaf.dtype
    found: bool = dtype == ms.float32 or dtype == ms.float64 or dtype == ms.float16 or dtype == ms.bfloat16
    return found


def rows_of(leaves: Any, indices: Tensor, start: Tensor, items: int) -> tuple[Tensor, ...]:
    """The rows of leaves of the whole batch that belong to the micro-batch of the items `indices`, which begin at `start`."""
    made: tuple[Tensor, ...] = ()
    for place in range(len(leaves)):
        each = leaves[place].shape[0] // items
        rows = ops.arange(indices.shape[0] * each) + start * each
        made = (*made, ops.gather(leaves[place], rows, 0))
    return made


def differences(first: Any, second: Any, zero: Tensor) -> Tensor:
    """How many outputs differ between the passes by more than rounding; a scalar in the dtype of `zero`."""
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
    """How many axes each leaf has; -1 of what is no Tensor."""
    ranks: tuple[int, ...] = ()
    for place in range(len(leaves)):
        ranks = (*ranks, len(leaves[place].shape) if isinstance(leaves[place], Tensor) else -1)
    return ranks


def cells_check(outputs_fn: Function) -> Any:
    """A function that refuses, while compiling, a Cell that draws random numbers, and a normalization whose statistics would move twice."""

    @constexpr(reuse_result=False)  # type: ignore[untyped-decorator]
    def check_cells() -> None:
        found = random_cell(outputs_fn) or normalization_of(outputs_fn)
        if found is not None:
            raise replay_error(
                f"a {found} in training in compiled code", "Call it from Python in PyNative mode, or write set_train(False)."
            )

    return check_cells


def normalization_of(outputs_fn: Function) -> str | None:
    """The class of a normalization in training that keeps statistics; None if none is found."""
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
    """The error for outputs that no loss can be differentiated by."""
    fix = "Return embeddings or logits; the labels can stand beside them."
    return explain(ArgumentValueError, "outputs_fn", expected="a floating output to differentiate by", found="none", fix=fix)


def number_of_floating(leaves: Any) -> int:
    """How many leaves have a gradient."""
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
