"""Losses that couple the items of a batch, computed exactly in two passes. The loss may
be any function of per-item outputs.

The first pass keeps the outputs of all items. The loss of all outputs is differentiated
once, with respect to the outputs and to the parameters of the loss itself. The second
pass propagates the gradient of each micro-batch's outputs to the parameters, by
differentiating ``sum(outputs * gradient)``.

Both passes run in PyNative mode, even if graph mode is set.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.common import _no_grad

from gradaccum import ArgumentValueError, UsageError
from gradaccum.kit import (
    MicroBatch,
    Nest,
    make_division,
    make_options,
    require_rows,
    with_leaves,
)
from gradaccum_mindspore.gradient_sum import HALF, working_dtype
from gradaccum_mindspore.large_batch.batch import Batch, CallOptions, positional
from gradaccum_mindspore.large_batch.gradients import (
    Function,
    TensorSum,
    require_scalar,
    tensors_of,
)
from gradaccum_mindspore.large_batch.replay import RandomReplay, SavedState, modules_of
from gradaccum_mindspore.mindspore_private import context, refuse_trace


class CoupledGradient(nn.Cell):  # type: ignore[misc]
    """The function that `coupled_value_and_grad` returns."""

    def __init__(self, passes: CoupledPasses) -> None:
        super().__init__(auto_prefix=False)
        self.passes = passes

    def __call__(self, *batch: Nest, **keywords: Nest) -> tuple[Tensor, Any]:
        refuse_trace()
        return self.passes.run(positional(self.passes.outputs_fn, batch, keywords))


@dataclass(frozen=True)
class CoupledPasses:
    """The two passes over the micro-batches. The first pass computes the outputs of all
    micro-batches. The second pass computes the outputs again, together with the
    gradients.

    The passes are not methods of `CoupledGradient`, because that class is a Cell. A
    Cell registers all Parameters in its attributes, such as `parameters`, as its own.
    """

    outputs_fn: Function
    loss_fn: Function
    parameters: Sequence[Parameter]
    is_single: bool
    """Whether the user passed one Parameter instead of a sequence."""
    options: CallOptions
    accumulate_dtype: object
    modules: Sequence[nn.Cell]

    def run(self, batch: Batch) -> tuple[Tensor, Any]:
        total = TensorSum(self.accumulate_dtype)
        with (
            context(mode=ms.PYNATIVE_MODE),
            SavedState(self.modules) as state,
            RandomReplay(self.modules) as replay,
        ):
            micro_batches = list(self.options.micro_batches(batch))
            outputs = self.first_pass(micro_batches, replay)
            loss, cotangents = self.differentiated_loss(outputs, total)
            state.restore()
            self.second_pass(micro_batches, replay, outputs, cotangents, total)
        gradients = total.quotients(1.0)
        return loss, gradients[0] if self.is_single else gradients

    def first_pass(
        self, micro_batches: Sequence[MicroBatch], replay: RandomReplay
    ) -> list[Nest]:
        """Run `outputs_fn` on each micro-batch, and return the outputs as a list."""
        outputs = []
        for number, micro_batch in enumerate(micro_batches):
            replay.begin(number)
            # Do not record operators here. MindSpore may already be recording, for an
            # outer gradient or after an error, and would then keep the activations of
            # all micro-batches.
            with _no_grad():
                outputs.append(self.outputs_fn(*micro_batch.arguments))
            for tensor in tensors_of(outputs[-1]):
                require_rows("outputs_fn", tensor.shape, micro_batch.items)
        return outputs

    def differentiated_loss(
        self, outputs: Sequence[Nest], total: TensorSum
    ) -> tuple[Tensor, dict[int, Sequence[Tensor]]]:
        """Return the loss, and the gradients of the loss with respect to the outputs.
        The gradients are keyed by the index of the output Tensor, and each gradient is
        split into one part per micro-batch. Only floating-point outputs have a
        gradient.

        Also add to `total` the gradients of the loss with respect to the parameters.
        """

        def loss_of_leaves(*leaves: Tensor) -> Tensor:
            loss = self.loss_fn(with_leaves(outputs[0], iter(leaves)))
            require_scalar(loss.shape)
            return loss

        parts_of_leaves = list(zip(*map(tensors_of, outputs), strict=True))
        all_rows = [ops.concat(parts, 0) for parts in parts_of_leaves]
        floating = tuple(
            place for place, rows in enumerate(all_rows) if rows.is_floating_point()
        )
        backward = ms.value_and_grad(loss_of_leaves, floating, self.parameters)
        loss, (cotangents, gradients) = backward(*all_rows)
        total.add(gradients)
        if len(floating) == 1:
            cotangents = (cotangents,)
        sizes = [[len(part) for part in parts_of_leaves[place]] for place in floating]
        cut_cotangents = map(ops.split, cotangents, sizes)
        return loss, dict(zip(floating, cut_cotangents, strict=True))

    def second_pass(
        self,
        micro_batches: Sequence[MicroBatch],
        replay: RandomReplay,
        outputs: Sequence[Nest],
        cotangents: dict[int, Sequence[Tensor]],
        total: TensorSum,
    ) -> None:
        """Compute the gradients of each micro-batch with respect to the parameters, and
        add them to `total`.
        """

        def products(rows: Sequence[Tensor], *micro_batch: Nest) -> tuple[Tensor, Any]:
            leaves = tensors_of(self.outputs_fn(*micro_batch))
            product = 0.0
            for place, cotangent in zip(cotangents, rows, strict=True):
                # Convert to a wider dtype, because the product could overflow in half
                # precision.
                work = working_dtype(cotangent.dtype)
                terms = leaves[place].astype(work) * cotangent.astype(work)
                product = product + terms.sum()
            return product, tuple(leaves)

        backward = ms.value_and_grad(products, None, self.parameters, True)
        for number, micro_batch in enumerate(micro_batches):
            replay.begin(number)
            rows = tuple(parts[number] for parts in cotangents.values())
            (_, leaves), gradients = backward(rows, *micro_batch.arguments)
            require_same(tensors_of(outputs[number]), leaves)
            total.add(gradients)
            del leaves, gradients  # Free the memory for the next gradients.


def coupled_value_and_grad(
    outputs_fn: Function,
    loss_fn: Function,
    weights: Parameter | Sequence[Parameter],
    *,
    steps: int | None = None,
    micro_batch_size: int | None = None,
    axes: Nest = 0,
    accumulate_dtype: object = None,
    modules: Sequence[nn.Cell] | None = None,
) -> CoupledGradient:
    """Return a function that takes a large batch, and returns the joint loss of all
    items and the gradients of this loss. Use it for a loss that couples the items of a
    batch, such as a contrastive loss.

    ``coupled_value_and_grad(outputs_fn, loss_fn, weights, steps=4)(*batch)`` returns
    the same as ``mindspore.value_and_grad(lambda *batch: loss_fn(outputs_fn(*batch)),
    None, weights)(*batch)``. The returned function runs `outputs_fn` on one micro-batch
    at a time, twice on each micro-batch. To scale the loss, return
    ``optimizer.scale(loss)`` from `loss_fn`.

    Args:
        outputs_fn: a function or Cell of the batch that returns a nested structure of
            Tensors. Each Tensor has one row per item, or the same number of rows for
            each item.
        loss_fn: a function of the outputs of the whole batch that returns a scalar. The
            loss is also differentiated, once, with respect to the parameters that
            `loss_fn` itself uses.
        weights: the Parameters of `outputs_fn` and `loss_fn` to differentiate with
            respect to.
        steps: the maximum number of micro-batches, as for `value_and_grad`.
        micro_batch_size: the number of items in a micro-batch.
        axes: the axis along which each array contains its items, as for
            `value_and_grad`; None for an array that is passed whole.
        accumulate_dtype: the dtype in which gradients are added up, as for
            `value_and_grad`.
        modules: the Cells that `outputs_fn` calls. You can leave this out if
            `outputs_fn` is a Cell or a method of a Cell. The Cells' statistics are
            updated once, and Dropout Cells draw the same random numbers in both passes.

    Returns:
        A Cell to call with the batch from Python. It runs in PyNative mode, even if
        graph mode is set, but `outputs_fn` may be compiled with `mindspore.jit`.
        Outside `mindspore.jit`, `mindspore.nn.Dropout` and `mindspore.ops.dropout` draw
        the same random numbers in both passes. If a call raises, the statistics are
        restored. With several workers, the loss couples only the items of one worker.

    Raises:
        ArgumentTypeError, ArgumentValueError: an option is invalid; or, on a call, the
            batch is empty, its arrays have unequal numbers of items, an output does not
            have the same number of rows for each item, or the loss is not a scalar.
        UsageError: on a call, `outputs_fn` does not return the same outputs in both
            passes, for example because it draws random numbers under `mindspore.jit`.

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
    known_modules = modules_of(outputs_fn, modules or ())
    if modules is None and not known_modules:
        raise ArgumentValueError(
            "modules: expected the Cells that outputs_fn calls, because outputs_fn runs"
            " twice but must update the Cells' statistics only once; got no Cells."
            " Write modules=(net,), or modules=() if outputs_fn calls no Cell."
        )
    division = make_division(steps, micro_batch_size)
    options = CallOptions(division, make_options(None, reduction="sum"), axes=axes)
    is_single = isinstance(weights, Parameter)
    passes = CoupledPasses(
        outputs_fn,
        loss_fn,
        (weights,) if is_single else tuple(weights),
        is_single,
        options,
        accumulate_dtype,
        known_modules,
    )
    return CoupledGradient(passes)


def require_same(first_pass: Sequence[Tensor], second_pass: Sequence[Tensor]) -> None:
    for first, second in zip(first_pass, second_pass, strict=True):
        before = first.astype(ms.float64).asnumpy()
        after = second.astype(ms.float64).asnumpy()
        largest = np.abs(before[np.isfinite(before)]).max(initial=0.0)
        # Allow small differences, because two compilations of the same function can
        # round differently.
        limit = largest * (2.0**-4 if first.dtype in HALF else 2.0**-11)
        if not np.allclose(before, after, rtol=0, atol=limit, equal_nan=True):
            raise UsageError(
                "outputs_fn: expected a function that returns the same outputs when it"
                " is called again; got different outputs in the second pass. Pass"
                " random numbers as part of the batch. Or draw them with nn.Dropout or"
                " ops.dropout, outside mindspore.jit, and list outputs_fn's Cells in"
                " modules=."
            )
