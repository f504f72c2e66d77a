"""Process a whole window of a wrapped optimizer in one call, which adds each
micro-batch of a large batch and makes the update.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from mindspore import Tensor, nn, ops

from gradaccum import ArgumentValueError
from gradaccum.kit import MicroBatch, Nest, make_division
from gradaccum_mindspore.large_batch.batch import CallOptions, Weight
from gradaccum_mindspore.large_batch.compiled import CompiledLoop
from gradaccum_mindspore.large_batch.gradients import (
    Function,
    gradient_function,
    run_micro_batches,
)
from gradaccum_mindspore.large_batch.replay import SavedState, modules_of
from gradaccum_mindspore.mindspore_private import refuse_trace
from gradaccum_mindspore.optimizer import AccumulatingOptimizer


class LargeBatchUpdate(nn.Cell):  # type: ignore[misc]
    """The function that `value_and_update` returns."""

    def __init__(
        self,
        fn: Function,
        optimizer: AccumulatingOptimizer,
        options: CallOptions,
        modules: Sequence[nn.Cell],
    ) -> None:
        super().__init__(auto_prefix=False)
        parameters = optimizer.parameters
        backward = gradient_function(fn, parameters, options.has_aux, optimizer.scale)
        self.optimizer = optimizer
        self.options = options
        # As an attribute, a Cell of the user would be a part of this Cell.
        self.saved_state = partial(SavedState, modules_of(fn, modules))
        self.loop = CompiledUpdateLoop(backward, optimizer, options)

    def __call__(self, *batch: Nest) -> Any:
        refuse_trace()
        optimizer = self.optimizer
        storage = optimizer.storage
        last_event = storage.last_event.value().copy()

        def add(
            gradients: tuple[Tensor, ...], loss: Tensor, micro_batch: MicroBatch
        ) -> None:
            optimizer(gradients, micro_batch.weight, loss)

        with self.saved_state():
            try:
                value, _ = run_micro_batches(
                    self.loop.backward, batch, self.options, add
                )
            except BaseException:
                optimizer.discard()
                ops.assign(storage.last_event, last_event)
                raise
        optimizer.flush()
        return value

    def construct(self, *batch: Nest) -> Any:
        return self.loop.run(batch)


class CompiledUpdateLoop(CompiledLoop):
    """A compiled loop that passes the gradients of each micro-batch to the optimizer.

    Instead of gradient sums, the loop carries a zero, on which each micro-batch and the
    update depend.
    """

    def __init__(
        self, backward: Function, optimizer: AccumulatingOptimizer, options: CallOptions
    ) -> None:
        super().__init__(backward, optimizer.parameters, options)
        self.optimizer = optimizer

    def first_sums(self, zero: Tensor) -> Tensor:
        return zero

    def add_gradients(
        self, sums: Any, gradients: Any, weight: Tensor, factor: Tensor, loss: Tensor
    ) -> Any:
        return ops.depend(sums, self.optimizer(gradients, weight + sums, loss))

    def results(self, loss: Tensor, sums: Any, divisor: Tensor) -> Tensor:
        return ops.depend(loss + sums, self.optimizer.flush())


def value_and_update(
    fn: Function,
    optimizer: AccumulatingOptimizer,
    has_aux: bool = False,
    *,
    steps: int | None = None,
    micro_batch_size: int | None = None,
    weight: Weight = None,
    axes: Nest = 0,
    merge_aux: Callable[[list[Any], list[float]], Any] | str | None = None,
    modules: Sequence[nn.Cell] = (),
) -> LargeBatchUpdate:
    """Return a function of a large batch that makes one update of a wrapped optimizer
    and returns the large batch's loss.

    The call ends the window of `optimizer`: all its options apply, the loss is
    multiplied by its loss scale, and ``optimizer.result`` describes the window. If the
    window already contained micro-batches, the update includes them. The function works
    in PyNative, inside `mindspore.jit` and in graph mode.

    Args:
        fn: a function or Cell of the batch that returns an unscaled scalar loss, or
            ``(loss, aux)`` with `has_aux`.
        optimizer: an optimizer wrapped with ``steps=None``; its ``reduction`` applies.
        has_aux: True if `fn` also returns an auxiliary output (aux).
        steps: the maximum number of micro-batches, as for `value_and_grad`.
        micro_batch_size: the number of items in a micro-batch.
        weight: a function of the micro-batch's arguments that returns its weight, or a
            sequence with one number per item. By default, the weight is the number of
            items.
        axes: the axis along which each array contains its items, as for
            `value_and_grad`.
        merge_aux: how the auxiliary outputs are merged, as for `value_and_grad`.
        modules: the Cells whose statistics are restored if a micro-batch raises, in
            addition to `fn` or the Cell whose method `fn` is.

    Returns:
        A Cell to call with the batch. It returns the loss, or ``(loss, aux)``, of all
        micro-batches of the batch, including dropped micro-batches. If `fn` raises, the
        window is discarded, and the optimizer is otherwise unchanged.

    Raises:
        ArgumentTypeError, ArgumentValueError: as for `value_and_grad`; or `optimizer`
            is not wrapped with ``steps=None``.

    Examples:
        >>> import gradaccum
        >>> from mindspore import Tensor, nn
        >>> net = nn.Dense(2, 1, weight_init="ones", has_bias=False)
        >>> inner = nn.SGD(net.trainable_params(), 0.5)
        >>> optimizer = gradaccum.wrap(inner, steps=None, clip_norm=1.0)
        >>> train_step = value_and_update(lambda x: net(x).mean(), optimizer, steps=2)
        >>> float(train_step(Tensor([[0.0, 4.0], [6.0, 4.0]]))), optimizer.result.grad_norm
        (7.0, 5.0)
        >>> [round(number, 4) for number in net.weight.asnumpy()[0].tolist()]
        [0.7, 0.6]
    """
    if optimizer.options.steps is not None:
        raise ArgumentValueError(
            "optimizer: expected an optimizer wrapped with steps=None, because each"
            f" call closes its own window; got steps={optimizer.options.steps!r}. Write"
            " gradaccum.wrap(optimizer, steps=None)."
        )
    division = make_division(steps, micro_batch_size)
    options = CallOptions(division, optimizer.options, weight, axes, has_aux, merge_aux)
    return LargeBatchUpdate(fn, optimizer, options, modules)
