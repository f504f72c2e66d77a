"""A whole window of a wrapped optimizer in one call: each micro-batch of the large
batch goes through the optimizer, and it updates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mindspore as ms
from mindspore import Tensor, nn, ops
from mindspore.ops import constexpr

from gradaccum import ArgumentValueError, UsageError
from gradaccum.kit import Nest, aux_shape_error, explain
from gradaccum_mindspore.gradient_sum import where
from gradaccum_mindspore.large_batch.batch import (
    Batch,
    SplitOptions,
    refuse_names,
    require_function,
    split_options,
    with_constant_weight,
)
from gradaccum_mindspore.large_batch.compiled import CompiledLoop
from gradaccum_mindspore.large_batch.gradients import (
    Function,
    MergedOutputs,
    differentiated,
    divisor_of,
    loss_kind,
    weighed,
)
from gradaccum_mindspore.large_batch.replay import Replay
from gradaccum_mindspore.mindspore_private import refuse_trace
from gradaccum_mindspore.optimizer import AccumulatingOptimizer, wrapped


class LargeBatchUpdate(nn.Cell):  # type: ignore[misc]
    """The function that `value_and_update` returns."""

    def __init__(
        self,
        fn: Function,
        optimizer: AccumulatingOptimizer,
        has_aux: bool,
        options: SplitOptions,
    ) -> None:
        super().__init__(auto_prefix=False)
        self.optimizer = optimizer
        self.options = with_constant_weight(options, (), optimizer.parameters)
        backward = ms.value_and_grad(
            scaled(fn, optimizer, has_aux), None, optimizer.parameters, True
        )
        # A Cell would list its parameters as its own.
        object.__setattr__(self, "user_function", fn)
        object.__setattr__(self, "backward", backward)
        self.loop = CompiledUpdateLoop(fn, backward, optimizer, options)

    def __call__(self, *batch: Nest, **named: Nest) -> Any:
        refuse_trace()
        refuse_names(tuple(named))
        undo = undoing(self.optimizer)
        with Replay(self.user_function, lends=False) as replay:
            try:
                outputs = self.accumulated(batch, replay)
                self.optimizer.flush()
            except BaseException:
                replay.keeps = undo()
                raise
            return outputs

    def construct(self, *batch: Nest, **named: Nest) -> Any:
        refuse_names(tuple(named.keys()))
        return self.loop.run(batch)

    def accumulated(self, batch: Batch, replay: Replay) -> Any:
        """Return the merged outputs of a window that the optimizer has taken in."""
        options = self.options
        outputs = MergedOutputs(options.aux, loss_kind(options.reduction.reduction))
        weight = 0.0
        for place, (part, amount) in enumerate(
            weighed(self.user_function, batch, options)
        ):
            replay.begin(place)
            value, gradients = differentiated(
                self.backward, part.arguments, options.aux is not None, scaled=True
            )
            self.optimizer(gradients, amount, loss_in(value, options.aux is not None))
            outputs.add(value, amount)
            del value, gradients  # They would live beside the next ones.
            weight += amount
        return outputs.finished(weight, divisor_of(weight, options))


class CompiledUpdateLoop(CompiledLoop):
    """The same in compiled code: the optimizer adds each micro-batch's gradients in the
    loop.
    """

    def __init__(
        self,
        fn: Function,
        backward: Function,
        optimizer: AccumulatingOptimizer,
        options: SplitOptions,
    ) -> None:
        super().__init__(fn, backward, optimizer.parameters, False, options)
        self.optimizer = optimizer
        sizes = [parameter.size for parameter in optimizer.parameters]
        self.smallest = sizes.index(min(sizes))

    def differentiated(self, arguments: Any) -> tuple[Tensor, Any]:
        """Return the loss, and the gradients with it: the optimizer gets both."""
        (_, value), gradients = self.backward(*arguments)
        return self.loss_of(value), (gradients, value)

    def start(self, zero: Tensor) -> Tensor:
        """Return the first sum of losses: NaN if someone else opened a window, because
        compiled code cannot raise.
        """
        return where(self.optimizer.storage.micro_step > 0, self.nan * 1, zero)

    def zeros(self, zero: Tensor) -> Any:
        """Return no sums; NaN if someone else opened a window, which makes an overflow,
        so that no update is made.
        """
        return self.start(zero)

    def collected(
        self, sums: Any, gradients: Any, amount: Tensor, factor: Tensor
    ) -> Any:
        k = self.smallest
        gradients, loss = gradients
        spoiled = gradients[k] + sums.astype(gradients[k].dtype)
        return ops.depend(
            sums,
            self.optimizer(
                (*gradients[:k], spoiled, *gradients[k + 1 :]), amount, loss
            ),
        )

    def finished(self, loss: Tensor, sums: Any, divides: Tensor) -> Any:
        return ops.depend(loss, self.optimizer.flush())


def value_and_update(
    fn: Function,
    optimizer: AccumulatingOptimizer,
    has_aux: bool = False,
    *,
    steps: int | None = None,
    micro_batch_size: int | None = None,
    micro_batch_weight: float | None = None,
    weight: Callable[..., Any] | Sequence[float] | Tensor | None = None,
    axes: Nest = 0,
    split: Callable[..., Any] | None = None,
    aux: Nest = None,
) -> LargeBatchUpdate:
    """Return a function of a large batch that makes one update of a wrapped optimizer
    and returns the large batch's loss.

    The micro-batches are one window of `optimizer`: all its options hold, `fn` is
    scaled by its loss scale, and ``optimizer.result`` tells what the window did. In
    PyNative, inside `mindspore.jit` and in graph mode.

    Args:
        fn: a function or Cell of the batch that returns a scalar loss, not scaled; with
            `has_aux` a tuple of it and other outputs.
        optimizer: what `gradaccum.wrap` returned with ``steps=None``; its ``reduction``
            holds.
        has_aux: `fn` returns other outputs too, declared by `aux`.
        steps: as for `value_and_grad`, with the options that follow.
        micro_batch_size: items of a micro-batch.
        micro_batch_weight: the weight up to which items are packed.
        weight: a callable of the micro-batch, or one number per item; the number of
            items unless given.
        axes: the axis of the items, for each leaf.
        split: a function of the batch that yields micro-batches.
        aux: how the other outputs merge.

    Returns:
        A Cell to call with the batch. It returns the loss, or the tuple of it and the
        merged outputs, of all micro-batches: a dropped one's too. If it raises before
        the update was made, the optimizer and the statistics of `fn`'s Cells are as
        before.

    Raises:
        ArgumentTypeError, ArgumentValueError: as for `value_and_grad`; or `optimizer`
            is not wrapped with ``steps=None``.
        UsageError: on a call from Python, `optimizer` has an open window. Compiled code
            cannot raise: there the loss is NaN then, and the window is an overflow.

    Examples:
        >>> import gradaccum
        >>> from mindspore import Tensor, nn
        >>> net = nn.Dense(2, 1, weight_init="ones", has_bias=False)
        >>> inner = nn.SGD(net.trainable_params(), 0.5)
        >>> optimizer = gradaccum.wrap(inner, steps=None, clip_norm=1.0)
        >>> train_step = value_and_update(lambda x: net(x).mean(), optimizer, steps=2)
        >>> float(train_step(Tensor([[0.0, 4.0], [6.0, 4.0]]))), optimizer.result.grad_norm
        (7.0, 5.0)
        >>> [round(each, 4) for each in net.weight.asnumpy()[0].tolist()]
        [0.7, 0.6]
    """
    require_function("fn", fn)
    require_open_steps(optimizer)
    division = {
        "steps": steps,
        "micro_batch_size": micro_batch_size,
        "micro_batch_weight": micro_batch_weight,
        "split": split,
    }
    options = split_options(
        has_aux, optimizer.options, **division, weight=weight, axes=axes, aux=aux
    )
    return LargeBatchUpdate(fn, optimizer, has_aux, options)


def loss_in(value: Any, has_aux: bool) -> Tensor:
    return value[0] if has_aux else value


def windows_of(optimizer: AccumulatingOptimizer) -> int:
    return int(
        optimizer.storage.optimizer_step.item()
        + optimizer.storage.skipped_windows.item()
    )


def scaled(fn: Function, optimizer: AccumulatingOptimizer, has_aux: bool) -> Function:
    def of_batch(*arguments: Nest) -> tuple[Any, ...]:
        value = fn(*arguments)
        check_outputs(isinstance(value, (tuple, list)), has_aux)
        # Flat: in graph mode MindSpore returns no dict in a tuple in a tuple.
        return (
            optimizer.scale(loss_in(value, has_aux)),
            *(value if has_aux else (value,)),
        )

    return of_batch


@constexpr  # type: ignore[untyped-decorator]
def check_outputs(several: bool, has_aux: bool) -> None:
    """Refuse undeclared other outputs, and missing ones; while compiling too."""
    if several != has_aux:
        raise aux_shape_error(
            "several outputs" if several else "the loss alone", declared=has_aux
        )


def require_open_steps(optimizer: object) -> None:
    steps = wrapped(optimizer).options.steps
    if steps is not None:
        expected = (
            "an optimizer wrapped with steps=None, because the call closes the window"
        )
        fix = "Write gradaccum.wrap(optimizer, steps=None)."
        raise explain(
            ArgumentValueError,
            "optimizer",
            expected=expected,
            found=f"steps={steps!r}",
            fix=fix,
        )


def undoing(optimizer: AccumulatingOptimizer) -> Callable[[], bool]:
    """Return a function that discards the window to come, or returns True if that was
    closed; raise if one is open now.
    """
    held = optimizer.storage.micro_step.item()
    if held > 0:
        found = f"a window that holds {held} micro-batches"
        fix = "Write optimizer.flush() or optimizer.discard() before it."
        raise explain(
            UsageError,
            "optimizer",
            expected="no open window, because the call is a window",
            found=found,
            fix=fix,
        )
    event = optimizer.storage.last_event.value().copy()
    closed = windows_of(optimizer)

    def undo() -> bool:
        made = windows_of(optimizer) != closed
        if not made:
            optimizer.discard()
            ops.assign(optimizer.storage.last_event, event)
        return made

    return undo
