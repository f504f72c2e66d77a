"""The large batch's value and gradients in one call, with the memory of one
micro-batch.

Python's call is a `PythonLoop`; a call inside `mindspore.jit` or a Cell in graph mode
is a loop of compiled code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mindspore as ms
from mindspore import Parameter, Tensor, nn

from gradaccum.kit import Nest
from gradaccum_mindspore.large_batch.batch import (
    SplitOptions,
    plain_reduction,
    refuse_names,
    require_function,
    split_options,
    with_constant_weight,
)
from gradaccum_mindspore.large_batch.compiled import CompiledLoop
from gradaccum_mindspore.large_batch.gradients import Function, PythonLoop
from gradaccum_mindspore.mindspore_private import refuse_trace


class LargeBatchGradient(nn.Cell):  # type: ignore[misc]
    """The function that `value_and_grad` returns."""

    def __init__(
        self,
        fn: Function,
        grad_position: Any,
        weights: Any,
        has_aux: bool,
        options: SplitOptions,
    ) -> None:
        super().__init__(auto_prefix=False)
        self.options = options
        backward = ms.value_and_grad(fn, grad_position, weights, has_aux)
        positions = positions_of(grad_position)
        self.loop = CompiledLoop(fn, backward, weights, bool(positions), options)
        listed = (weights,) if isinstance(weights, Parameter) else weights or ()
        self.python_loop = PythonLoop(
            fn, backward, positions, with_constant_weight(options, positions, listed)
        )

    def __call__(self, *batch: Nest, **named: Nest) -> tuple[Any, Any]:
        refuse_trace()
        refuse_names(tuple(named))
        return self.python_loop.run(batch)

    def construct(self, *batch: Nest, **named: Nest) -> tuple[Any, Any]:
        refuse_names(tuple(named.keys()))
        return self.loop.run(batch)  # type: ignore[no-any-return]


def value_and_grad(
    fn: Function,
    grad_position: int | tuple[int, ...] | None = 0,
    weights: Parameter | Sequence[Parameter] | None = None,
    has_aux: bool = False,
    *,
    steps: int | None = None,
    micro_batch_size: int | None = None,
    micro_batch_weight: float | None = None,
    reduction: str = "mean",
    weight: Callable[..., Any] | Sequence[float] | Tensor | None = None,
    axes: Nest = 0,
    split: Callable[..., Any] | None = None,
    aux: Nest = None,
    accumulate_dtype: object = None,
) -> LargeBatchGradient:
    """Return a function of a large batch that returns its value and gradients, computed
    micro-batch by micro-batch.

    It is `mindspore.value_and_grad`, divided:
    ``value_and_grad(forward, None, weights, steps=4)(x, y)`` returns
    ``(loss, gradients)`` as ``mindspore.value_and_grad(forward, None, weights)(x, y)``
    does. In PyNative, inside `mindspore.jit` and in graph mode.

    Args:
        fn: a function or Cell of the batch that returns a scalar loss; with `has_aux` a
            tuple of it and other outputs.
        grad_position: as for `mindspore.value_and_grad`: the arguments to differentiate
            by. The gradient of an argument that is divided is that of the large batch:
            one part per item.
        weights: the Parameters to differentiate by.
        has_aux: `fn` returns other outputs too, declared by `aux`. ``value`` is then
            the tuple of the loss and the merged outputs.
        steps: at most so many micro-batches, of ceil(items / steps) items.
        micro_batch_size: items of a micro-batch.
        micro_batch_weight: consecutive items are packed up to this weight, by `weight`;
            a callable is asked about each item alone.
        reduction: "mean": `fn` returns a mean, weighed by `weight`. "sum": it returns a
            sum. "sum_per_item": it returns a sum, and the sum over the batch is divided by
            the sum of the weights.
        weight: a callable of the micro-batch's arguments that returns its weight, such
            as its tokens; or one number per item; the number of items unless given. A
            micro-batch of weight 0 adds nothing, whatever its loss is. If all weigh 0,
            loss and gradients are 0. A callable must not depend on what is
            differentiated: it would raise, or in compiled code make everything NaN.
        axes: the axis of the items, an int, for each leaf of the batch (a prefix nest
            of the tuple of arguments); None: given whole to each micro-batch, as are
            numbers and texts; "items": a list or tuple of items, as ``(0, "items")``
            for images and one dict per image, from Python only. A list that may be as
            long as the batch needs it, or ``[0, 0]``, an axis per element.
        split: a function of the batch that yields micro-batches, each a tuple of
            arguments, in place of cutting; with `steps` it gets ``steps=`` too.
        aux: how the other outputs merge, a prefix nest of the second output, or of the
            tuple of several: "sum", "mean" (by the weight), "weighted_mean", "max", "min",
            "concatenate" (along axis 0). Half precision is summed, and returned, in
            float32. From Python only.
        accumulate_dtype: the dtype of the sums; None: float32 for half precision, else
            the gradient's own. The gradients returned have their own dtype.

    Returns:
        A Cell to call with the batch. If a call raises, the statistics of the Cells
        that `fn` names are as before. Called from Python, it returns the loss in its
        own dtype; compiled code, in float32, or in float64 if a sum is float64.

    Raises:
        ArgumentTypeError, ArgumentValueError: an option is wrong; on a call, the batch
            is empty or has leaves of unequal size, or `fn` returns something else than
            declared.
        UsageError: on a call, compiled micro-batches of two sizes would draw the same
            random numbers: MindSpore starts each compiled program at the seed of
            `mindspore.set_seed`; or compiled code calls with an option that needs
            Python.

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
    require_function("fn", fn)
    division = {
        "steps": steps,
        "micro_batch_size": micro_batch_size,
        "micro_batch_weight": micro_batch_weight,
        "split": split,
    }
    merging = {
        "weight": weight,
        "axes": axes,
        "aux": aux,
        "accumulate_dtype": accumulate_dtype,
    }
    options = split_options(has_aux, plain_reduction(reduction), **division, **merging)
    return LargeBatchGradient(fn, grad_position, weights, has_aux, options)


def positions_of(grad_position: Any) -> tuple[int, ...]:
    if grad_position is None:
        return ()
    return (
        tuple(grad_position)
        if isinstance(grad_position, tuple | list)
        else (grad_position,)
    )
