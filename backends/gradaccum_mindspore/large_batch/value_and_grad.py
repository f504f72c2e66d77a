"""Compute the loss and gradients of a large batch, or update the parameters through a
wrapped optimizer, with only as much memory as one micro-batch needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from mindspore import Parameter, Tensor, nn, ops

from gradaccum import ArgumentValueError, kit
from gradaccum.kit import MicroBatch, Nest
from gradaccum_mindspore.large_batch.batch import CallOptions, Weight, positional
from gradaccum_mindspore.large_batch.compiled import CompiledLoop
from gradaccum_mindspore.large_batch.gradients import (
    Function,
    TensorSum,
    gradient_function,
    identity,
    run_micro_batches,
)
from gradaccum_mindspore.large_batch.replay import SavedState, modules_of
from gradaccum_mindspore.mindspore_private import refuse_trace
from gradaccum_mindspore.optimizer import AccumulatingOptimizer


class LargeBatchGradient(nn.Cell):  # type: ignore[misc]
    """The function that `value_and_grad` returns.

    Python calls ``__call__``, and MindSpore compiles ``construct``.
    """

    def __init__(
        self,
        fn: Function,
        weights: Parameter | Sequence[Parameter],
        options: CallOptions,
        accumulate_dtype: object,
        modules: Sequence[nn.Cell],
    ) -> None:
        super().__init__(auto_prefix=False)
        self.is_single = isinstance(weights, Parameter)
        parameters = (weights,) if self.is_single else tuple(weights)
        backward = gradient_function(fn, parameters, options.has_aux, identity)
        self.options = options
        self.accumulate_dtype = accumulate_dtype
        # `partial` hides the user's Cell from MindSpore, which would otherwise register
        # the Cell as a child of this Cell.
        self.positional = partial(positional, fn)
        self.saved_state = partial(SavedState, modules_of(fn, modules))
        self.loop = CompiledLoop(backward, parameters, options, accumulate_dtype)

    def __call__(self, *batch: Nest, **keywords: Nest) -> tuple[Any, Any]:
        refuse_trace()
        batch = self.positional(batch, keywords)
        total = TensorSum(self.accumulate_dtype)

        def add(
            gradients: tuple[Tensor, ...], loss: Tensor, micro_batch: MicroBatch
        ) -> None:
            total.add(gradients, micro_batch.factor)

        with self.saved_state():
            value, divisor = run_micro_batches(
                self.loop.backward, batch, self.options, add
            )
        gradients = total.quotients(divisor)
        return value, gradients[0] if self.is_single else gradients

    def construct(self, *batch: Nest) -> tuple[Any, Any]:
        loss, gradients = self.loop.run(batch)
        return loss, gradients[0] if self.is_single else gradients


def value_and_grad(
    fn: Function,
    grad_position: None,
    weights: Parameter | Sequence[Parameter],
    has_aux: bool = False,
    *,
    steps: int | None = None,
    micro_batch_size: int | None = None,
    reduction: str = "mean",
    weight: Weight = None,
    axes: Nest = 0,
    merge_aux: Callable[[list[Any], list[float]], Any] | str | None = None,
    accumulate_dtype: object = None,
    modules: Sequence[nn.Cell] = (),
) -> LargeBatchGradient:
    """Return a function that takes a large batch, and returns the batch's loss and
    gradients. The function runs `fn` on one micro-batch at a time.

    ``value_and_grad(forward, None, weights, steps=4)(x, y)`` returns
    ``(loss, gradients)`` as ``mindspore.value_and_grad(forward, None, weights)(x, y)``
    does. The returned function works in PyNative mode, inside `mindspore.jit` and in
    graph mode.

    Args:
        fn: a function or Cell of the batch that returns a scalar loss, or
            ``(loss, aux)`` with `has_aux`.
        grad_position: None, as in `mindspore.value_and_grad`. The gradients with
            respect to the arguments are not computed.
        weights: the Parameters to differentiate with respect to.
        has_aux: True if `fn` also returns an auxiliary output (aux), a nested structure
            of Tensors. The call then returns ``(loss, aux)`` instead of the loss, and
            must be made from Python.
        steps: the maximum number of micro-batches. Each micro-batch has ceil(items /
            steps) items, but the last may have fewer.
        micro_batch_size: the number of items in a micro-batch.
        reduction: "mean" if `fn` returns a mean, which is weighted by `weight`; "sum"
            if it returns a sum; "sum_per_item" if it returns a sum, and the loss of the
            batch should be divided by the batch's total weight.
        weight: a sequence with one number per item, or a function of the micro-batch's
            arguments that returns the micro-batch's weight, such as its number of
            tokens. By default, the weight is the number of items. A micro-batch of
            weight 0 adds nothing, whatever its loss is. If all weights are 0, the loss
            and the gradients are 0. A weight is treated as a constant, so it must not
            depend on the Parameters in `weights`.
        axes: the axis along which each array of the batch contains its items. Pass an
            int for all arrays, or a tuple with an int or a nested structure of ints for
            each argument. An int applies to all arrays at its place in the structure.
            None means that an array is passed whole to each micro-batch, as numbers and
            strings are. If a list has as many arrays as the batch has items, give one
            axis per array, such as ``[0, 0]``, because the arrays could be mistaken for
            the items.
        merge_aux: how the aux outputs of the micro-batches are merged. None returns
            them as a list. "concatenate" returns one aux with a row per item, in the
            order of the items. A function is called once, with the list of aux outputs
            and the list of the micro-batches' weights, and returns the aux of the whole
            batch.
        accumulate_dtype: the dtype in which gradients are added up. None means float32
            for half-precision gradients, and the gradient's own dtype for all others.
            The returned gradients are converted back to their own dtype.
        modules: the Cells whose statistics are restored if a call raises, in addition
            to `fn` or the Cell that `fn` is a method of.

    Returns:
        A Cell to call with the batch. In a call from Python, arguments may also be
        passed by keyword, and the returned loss has the dtype of `fn`'s loss. In
        compiled code, the loss is float32, or float64 if a gradient sum is float64.
        After `mindspore.set_seed`, micro-batches of different sizes may begin with the
        same random numbers, as in a hand-written loop.

    Raises:
        ArgumentTypeError, ArgumentValueError: an option is invalid; or, on a call, the
            batch is empty, its arrays have unequal numbers of items, the loss is not a
            scalar, or aux does not have the same number of rows for each item although
            `merge_aux` is "concatenate".

    Examples:
        >>> import mindspore as ms
        >>> from mindspore import Tensor, nn
        >>> net = nn.Dense(2, 1, weight_init="ones", bias_init="zeros")
        >>> def forward(x):
        ...     return net(x).mean()
        >>> backward = value_and_grad(forward, None, net.trainable_params(), steps=2)
        >>> loss, (weight, bias) = backward(Tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]))
        >>> float(loss), weight.asnumpy().tolist()
        (7.0, [[3.0, 4.0]])
    """
    options = CallOptions(
        kit.make_division(steps, micro_batch_size),
        kit.make_options(None, reduction=reduction),
        weight,
        axes,
        has_aux,
        merge_aux,
    )
    return LargeBatchGradient(fn, weights, options, accumulate_dtype, modules)


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
        # `partial` hides the user's Cell from MindSpore, which would otherwise register
        # the Cell as a child of this Cell.
        self.positional = partial(positional, fn)
        self.saved_state = partial(SavedState, modules_of(fn, modules))
        self.loop = CompiledUpdateLoop(backward, optimizer, options)

    def __call__(self, *batch: Nest, **keywords: Nest) -> Any:
        refuse_trace()
        batch = self.positional(batch, keywords)
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
    """A compiled loop that passes the gradients of each micro-batch to the optimizer,
    instead of adding them up itself.

    The optimizer must process the micro-batches in order, but the compiler may reorder
    calls that do not depend on each other. So the loop makes each call depend on the
    previous call: it passes a zero from one micro-batch to the next. (The base class
    passes the gradient sums instead.) `add_gradients` adds this zero to the weight that
    the optimizer gets, and returns the zero only after the optimizer has run.
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
    """Return a function that takes a large batch, applies one update of a wrapped
    optimizer, and returns the loss of the batch.

    The call closes the optimizer's window. All options of the optimizer apply, its loss
    scale multiplies the loss that is differentiated, and ``optimizer.result`` describes
    the window. If the window already contained micro-batches, the update includes them.
    The function works in PyNative mode, inside `mindspore.jit` and in graph mode.

    Args:
        fn: a function or Cell of the batch that returns an unscaled scalar loss, or
            ``(loss, aux)`` with `has_aux`.
        optimizer: an optimizer wrapped with ``steps=None``; its ``reduction`` applies.
        has_aux: True if `fn` also returns an auxiliary output (aux).
        steps: the maximum number of micro-batches, as for `value_and_grad`.
        micro_batch_size: the number of items in a micro-batch.
        weight: a sequence with one number per item, or a function of the micro-batch's
            arguments that returns the micro-batch's weight. By default, the weight is
            the number of items.
        axes: the axis along which each array contains its items, as for
            `value_and_grad`.
        merge_aux: how the auxiliary outputs are merged, as for `value_and_grad`.
        modules: the Cells whose statistics are restored if a micro-batch raises, in
            addition to `fn` or the Cell that `fn` is a method of.

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
    division = kit.make_division(steps, micro_batch_size)
    options = CallOptions(division, optimizer.options, weight, axes, has_aux, merge_aux)
    return LargeBatchUpdate(fn, optimizer, options, modules)
