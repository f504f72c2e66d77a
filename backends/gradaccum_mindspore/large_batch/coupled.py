"""Losses that couple the items of a batch, in two passes: any function of per-item
outputs, exact.

The first pass keeps the outputs of all items. The loss of all outputs is differentiated
once, by the outputs and by its own parameters. The second pass carries the gradient of
each micro-batch's outputs on to the parameters, through that of
``sum(outputs * gradient)``.

A function that graph mode has compiled holds the place in its random numbers itself, so
a Cell that draws is refused there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mindspore as ms
from mindspore import Parameter, Tensor, nn, ops
from mindspore.common import _no_grad
from mindspore.ops import constexpr

from gradaccum import ArgumentValueError
from gradaccum.kit import (
    Nest,
    concatenate_error,
    explain,
    leaves_of,
    mapped,
    with_leaves,
)
from gradaccum_mindspore.gradient_sum import FLOATS, working_dtype
from gradaccum_mindspore.large_batch.batch import (
    Batch,
    SplitOptions,
    leaves_in,
    micro_batches,
    nest_in,
    plain_reduction,
    refuse_names,
    require_function,
    split_options,
)
from gradaccum_mindspore.large_batch.compiled import compiled_call_error
from gradaccum_mindspore.large_batch.gradients import (
    Function,
    GradientSums,
    compilable,
    require_outputs,
)
from gradaccum_mindspore.large_batch.replay import (
    Replay,
    require_replayable,
    require_same,
)
from gradaccum_mindspore.mindspore_private import refuse_trace

Pieces = tuple[list[Tensor], ...]


class CoupledGradient(nn.Cell):  # type: ignore[misc]
    """The function that `coupled_value_and_grad` returns."""

    def __init__(
        self,
        outputs_fn: Function,
        loss_fn: Function,
        weights: Any,
        options: SplitOptions,
    ) -> None:
        super().__init__(auto_prefix=False)
        self.options = options
        for name, value in (
            ("outputs_fn", outputs_fn),
            ("loss_fn", loss_fn),
            ("trained", weights),
            ("made", {}),
        ):
            # A Cell would list their parameters as its own.
            object.__setattr__(self, name, value)

    def __call__(self, *batch: Nest, **named: Nest) -> tuple[Tensor, Any]:
        refuse_trace()
        refuse_names(tuple(named))
        require_replayable(self.outputs_fn)
        parts = [part.arguments for part in micro_batches(batch, self.options)]
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
                given = tuple(
                    part_of(cotangent, pieces[leaf], place)
                    for leaf, cotangent in cotangents.items()
                )
                (_, again), gradients = second(
                    ms.mutable(given), *compilable(arguments)
                )
                require_same([piece[place] for piece in pieces], output_leaves(again))
                sums.add(gradients, 1.0)
                del again, gradients  # They would live beside the next ones.
            return loss, sums.finished(1.0)

    def construct(self, *batch: Nest, **named: Nest) -> None:
        refuse_compiled_call()

    def outputs_of(self, parts: Sequence[Batch], replay: Replay) -> tuple[Nest, Pieces]:
        """Run the first pass: the structure of the outputs, and each leaf's parts."""
        forward = self._forward()
        structure = None
        given = []
        for place, arguments in enumerate(parts):
            replay.begin(place)
            # Where MindSpore records, for an outer gradient, or after an error, it
            # would keep all micro-batches.
            with _no_grad():
                structure = forward(*compilable(arguments))
            given.append(output_leaves(structure))
        return structure, tuple(map(list, zip(*given, strict=True)))

    def loss_of(
        self, structure: Nest, pieces: Pieces
    ) -> tuple[Tensor, dict[int, Tensor], Any]:
        """Return the loss, its gradient by each floating leaf of the outputs, and by
        its own parameters.
        """
        whole = [
            parts[0] if len(parts) == 1 else ops.concat(parts, 0) for parts in pieces
        ]
        floating = tuple(
            place for place, leaf in enumerate(whole) if leaf.dtype in FLOATS.values()
        )
        if not floating:
            raise no_output_error()
        loss, (by_outputs, own) = self._loss(structure, floating)(*whole)
        require_outputs(loss, False)
        by_outputs = by_outputs if isinstance(by_outputs, tuple) else (by_outputs,)
        return loss, dict(zip(floating, by_outputs, strict=True)), own

    def _forward(self) -> Function:
        """Return `outputs_fn`, compiled in graph mode."""
        if ms.get_context("mode") != ms.GRAPH_MODE or isinstance(
            self.outputs_fn, nn.Cell
        ):
            return self.outputs_fn  # type: ignore[no-any-return]
        return self._once("forward", lambda: ms.jit(self.outputs_fn))

    def _loss(self, structure: Nest, floating: tuple[int, ...]) -> Function:
        places = with_leaves(structure, iter(range(len(leaves_of(structure)))))
        outline = mapped(lambda leaf: object(), structure)
        compiled = ms.get_context("mode") == ms.GRAPH_MODE
        made = loss_function(self.loss_fn, outline, places, compiled)
        return self._once(
            ("loss", repr(places), floating),
            lambda: ms.value_and_grad(made, floating, self.trained),
        )

    def _differentiated(self, floating: tuple[int, ...]) -> Function:
        compiled = ms.get_context("mode") == ms.GRAPH_MODE
        made = surrogate(self.outputs_fn, floating, compiled)
        return self._once(
            ("second", floating),
            lambda: ms.value_and_grad(made, None, self.trained, True),
        )

    def _once(self, key: object, make: Callable[[], Function]) -> Function:
        """Call `make` once for each key and mode: MindSpore compiles each new function
        anew.
        """
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
    micro_batch_size: int | None = None,
    axes: Nest = 0,
    split: Callable[..., Any] | None = None,
    accumulate_dtype: object = None,
) -> CoupledGradient:
    """Return a function of a large batch that returns the loss of all items together,
    and its gradients, micro-batch by micro-batch.

    ``coupled_value_and_grad(outputs_fn, loss_fn, weights, steps=4)(*batch)`` is
    ``mindspore.value_and_grad(lambda *batch: loss_fn(outputs_fn(*batch)), None,
    weights)(*batch)``, for a contrastive loss, say. It runs `outputs_fn` twice on each
    micro-batch. To scale the loss, return ``optimizer.scale(loss)`` from `loss_fn`.

    Args:
        outputs_fn: a function or Cell of the batch that returns a nest of Tensors, each
            with one row, or as many, per item.
        loss_fn: a function of the outputs of the whole batch that returns a scalar. Its
            own parameters are differentiated once.
        weights: the Parameters to differentiate by, of both functions.
        steps: as for `value_and_grad`, with the four that follow.
        micro_batch_size: items of a micro-batch.
        axes: the axis of the items, for each leaf; None for a leaf that is given whole.
        split: a function of the batch that yields micro-batches; the outputs are
            concatenated in their order.
        accumulate_dtype: the dtype of the sums.

    Returns:
        A Cell to call with the batch from Python, in PyNative or graph mode. In
        PyNative `mindspore.nn.Dropout` and `mindspore.ops.dropout` draw the same
        numbers in both passes. Statistics move once, and a call that raises leaves them
        as they were. Over several workers the loss couples the items of one worker
        alone.

    Raises:
        ArgumentTypeError, ArgumentValueError: an option is wrong; on a call, the batch
            is empty or has leaves of unequal size, an output has no leading axis, or
            the loss is no scalar.
        UsageError: on a call, `outputs_fn` gives other outputs in the second pass than
            in the first; a Cell in training draws random numbers in graph mode; or
            compiled code calls.

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
    given = {
        "steps": steps,
        "micro_batch_size": micro_batch_size,
        "axes": axes,
        "split": split,
        "accumulate_dtype": accumulate_dtype,
    }
    options = split_options(False, plain_reduction("sum"), **given)
    return CoupledGradient(outputs_fn, loss_fn, weights, options)


def no_output_error() -> ArgumentValueError:
    fix = "Return embeddings or logits; the labels can stand beside them."
    return explain(
        ArgumentValueError,
        "outputs_fn",
        expected="a floating output to differentiate by",
        found="none",
        fix=fix,
    )


@constexpr  # type: ignore[untyped-decorator]
def refuse_compiled_call() -> None:
    raise compiled_call_error("coupled_value_and_grad")


def output_leaves(outputs: Nest) -> list[Tensor]:
    leaves = leaves_of(outputs, "outputs")
    for leaf in leaves:
        if not isinstance(leaf.value, Tensor) or leaf.value.ndim == 0:
            raise concatenate_error(
                leaf.path,
                (
                    "a scalar"
                    if isinstance(leaf.value, Tensor)
                    else f"a {type(leaf.value).__name__}"
                ),
            )
    return [leaf.value for leaf in leaves]


def part_of(whole: Tensor, pieces: Sequence[Tensor], place: int) -> Tensor:
    """Return the rows of `whole` of the micro-batch at `place`; `pieces` are the
    outputs of each.
    """
    start = sum(piece.shape[0] for piece in pieces[:place])
    return whole[start : start + pieces[place].shape[0]]


def loss_function(
    loss_fn: Function, outline: Nest, places: Nest, compiled: bool
) -> Function:
    def of_leaves(*leaves: Tensor) -> Tensor:
        return loss_fn(with_leaves(outline, iter(leaves)))

    def of_compiled_leaves(*leaves: Tensor) -> Tensor:
        return loss_fn(nest_in(places, leaves))

    return of_compiled_leaves if compiled else of_leaves


def surrogate(
    outputs_fn: Function, floating: tuple[int, ...], compiled: bool
) -> Function:
    """Return a function that carries the floating outputs' `cotangents` on to the
    parameters, and returns the outputs too.

    The products are float32 for half precision, so that its value, which means nothing,
    does not overflow.
    """
    leaves_at = leaves_in if compiled else output_leaves

    def products(
        cotangents: tuple[Tensor, ...], *arguments: Nest
    ) -> tuple[Tensor, Any]:
        leaves = leaves_at(outputs_fn(*arguments))
        total = 0.0
        for place, cotangent in zip(floating, cotangents):  # noqa: B905 - the compiler knows no strict
            work = working_dtype(cotangent.dtype)
            total = total + (leaves[place].astype(work) * cotangent.astype(work)).sum()
        return total, tuple(leaves)

    return products
