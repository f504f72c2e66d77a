"""A training step for one micro-batch, and a callback for
`mindspore.train.Model.train`.

`mindspore.nn.TrainOneStepCell` supports neither a dynamic loss scale nor micro-batch
weights. The `TrainOneStepCell` of this module supports both.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import mindspore as ms
from mindspore import Tensor, nn, ops
from mindspore.ops import constexpr
from mindspore.train import Callback, ModelCheckpoint, RunContext

from gradaccum import ArgumentTypeError, ArgumentValueError, UsageError
from gradaccum.kit import Sizes
from gradaccum_mindspore.checks import Weight
from gradaccum_mindspore.gradient_sum import write_numbers
from gradaccum_mindspore.optimizer import AccumulatingOptimizer

WeightFunction = Callable[..., Weight]


def items(*inputs: Tensor) -> Weight:
    """Return the number of items in a micro-batch: the length of the first input's
    first axis.
    """
    return inputs[0].shape[0]


@constexpr  # type: ignore[untyped-decorator]
def refuse_losses(shape: tuple[int, ...]) -> None:
    """Raise `ArgumentValueError`, because the network returned several losses.
    MindSpore would differentiate their sum instead of their mean.
    """
    raise ArgumentValueError(
        'network: expected a scalar loss, because reduction="mean" needs the mean over'
        f" each micro-batch; got losses of shape {shape}, whose sum MindSpore would"
        " differentiate. Return the mean of the losses, as nn.MSELoss() does, or"
        ' pass reduction="sum" or "sum_per_item" to gradaccum.wrap.'
    )


@constexpr  # type: ignore[untyped-decorator]
def refuse_sequence(length: int) -> None:
    raise ArgumentTypeError(
        "network: expected a Cell that returns only the loss; got a Cell that returns a"
        f" sequence of {length} values. Write a Cell that calls this network and returns"
        " its loss."
    )


class TrainOneStepCell(nn.TrainOneStepCell):  # type: ignore[misc]
    """A training step for one micro-batch: it computes the loss and its gradients, and
    calls the wrapped optimizer. The last micro-batch of a window triggers the update.

    It works in PyNative mode, in `mindspore.jit`, in graph mode, and as the network of
    `mindspore.train.Model`: ``Model(TrainOneStepCell(nn.WithLossCell(net, loss_fn),
    optimizer))``. A checkpoint of this cell also contains the statistics of
    normalization layers. If the optimizer was wrapped without ``data_parallel=True``
    and MindSpore is in its data parallel mode, the cell averages the gradients over the
    workers in each micro-batch. In this case all workers must have the same number of
    items.

    Args:
        network: a Cell that returns the unscaled loss.
        optimizer: the wrapped optimizer. If it has a loss scale, this cell multiplies
            the loss by the scale.
        weight: a function of the network's inputs that returns the number of items in
            the micro-batch, as a number or a one-element Tensor. By default, this is
            the length of the first input's first axis. None means that every
            micro-batch has weight 1. This saves a pass over the gradients.

    Returns:
        A call returns the unscaled loss of the micro-batch.

    Raises:
        ArgumentTypeError: `weight` is not a function; or, in a call, the network
            returned a tuple.
        ArgumentValueError: in a call, the network returned several losses, and the
            optimizer's reduction is "mean".
    """

    def __init__(
        self,
        network: nn.Cell,
        optimizer: AccumulatingOptimizer,
        weight: WeightFunction | None = items,
    ) -> None:
        super().__init__(network, optimizer)
        if optimizer.storage.has_workers:
            self.grad_reducer = nn.Identity()
        if weight is None:
            # The user chose weight 1 for every micro-batch, so no warning is needed if
            # the sizes differ. `Sizes("sum")` never warns.
            optimizer.storage.sizes = Sizes("sum")
        elif not callable(weight):
            raise ArgumentTypeError(
                "weight: expected a function of the network's inputs; got"
                f" {weight!r} ({type(weight).__name__}). Write weight=lambda x, y:"
                " x.shape[0]. If you meant a loss scale, write"
                " gradaccum.wrap(optimizer, steps=4, loss_scale=1024.0)."
            )
        # The attribute is not called `weight`, because a Parameter may have this name:
        # a Cell with a tuple of Parameters gets an attribute named after each
        # Parameter.
        self.weight_of_micro_batch = weight
        self.takes_means = optimizer.options.reduction == "mean"
        self.backward = ms.value_and_grad(
            self.forward, None, self.weights, has_aux=True
        )

    def set_grad(self, requires_grad: bool = True) -> TrainOneStepCell:
        """Raise `UsageError` if `requires_grad` is true, because another training cell
        makes such a call, and would use each micro-batch in a second update.
        """
        if requires_grad:
            raise UsageError(
                "set_grad(): expected a training cell that is not inside another"
                " training cell; got a call, most likely from an enclosing training"
                " cell, so each micro-batch would be used twice. Pass no optimizer to"
                " Model: Model(TrainOneStepCell(network, optimizer)). If you call"
                " set_grad() yourself, delete the call."
            )
        return self

    def forward(self, *inputs: object) -> tuple[Tensor, Tensor]:
        """Return the scaled loss, which is differentiated, and the unscaled loss."""
        loss = self.network(*inputs)
        if isinstance(loss, (tuple, list)):
            refuse_sequence(len(loss))
        return self.optimizer.scale(loss), loss

    def __call__(self, *inputs: object, **keywords: object) -> Any:
        listener_calls = self.optimizer.storage.listener_calls
        return listener_calls.around(1, partial(super().__call__, *inputs, **keywords))

    def construct(self, *inputs: object) -> Tensor:
        weight = None
        if self.weight_of_micro_batch is not None:
            weight = self.weight_of_micro_batch(*inputs)
        (_, loss), gradients = self.backward(*inputs)
        gradients = self.grad_reducer(gradients)
        if loss.size == 1:
            return ops.depend(loss, self.optimizer(gradients, weight, loss))
        if self.takes_means:
            refuse_losses(loss.shape)
        return ops.depend(loss, self.optimizer(gradients, weight=weight))


class FlushAtEpochEnd(Callback):  # type: ignore[misc]
    """A callback that closes the open window in the last step of each epoch, so that no
    window spans two epochs.

    Put this callback before callbacks that save checkpoints, so that a checkpoint
    contains the epoch's last update. At the end of a step, callbacks run in the order
    in which they are listed. `mindspore.train.Model.fit` validates after the flush. In
    dataset sink mode, which is not available on a CPU, an epoch has ``sink_size``
    steps.

    After each step that closed a window, the callback calls the optimizer's listeners.
    The callback warns once if micro-batches differ in size but have no weight, as in
    ``Model(net, loss_fn, optimizer)``. In sink mode it cannot warn, because Python does
    not see the micro-batches.

    Args:
        optimizer: the wrapped optimizer.
    """

    def __init__(self, optimizer: AccumulatingOptimizer) -> None:
        super().__init__()
        self.optimizer = optimizer
        self.has_flushed = False
        """True if this callback has already flushed in the current epoch. If workers
        share windows, each worker flushes once per epoch, even if its window is empty.
        """

    def on_train_begin(self, run_context: RunContext) -> None:
        """Raise `UsageError` if a `mindspore.train.ModelCheckpoint` comes before this
        callback.
        """
        callbacks = run_context.original_args().list_callback
        before = callbacks[: callbacks.index(self)]
        if any(isinstance(callback, ModelCheckpoint) for callback in before):
            raise UsageError(
                "callbacks: expected FlushAtEpochEnd before ModelCheckpoint, because"
                " both run at the end of a step; got FlushAtEpochEnd after"
                " ModelCheckpoint, so the saved file would lack the epoch's last"
                " update. Write callbacks=[FlushAtEpochEnd(optimizer), ...]."
            )

    def on_train_epoch_begin(self, run_context: RunContext) -> None:
        self.has_flushed = False

    def on_train_step_end(self, run_context: RunContext) -> None:
        run = run_context.original_args()
        self.optimizer.storage.listener_calls.report(micro_batches=1)
        self.optimizer.storage.sizes.see(run.train_dataset_element)
        steps = run.batch_num
        if not run.dataset_sink_mode:
            # If a `sink_size` was passed, `batch_num` equals `sink_size` even outside
            # sink mode.
            steps = run.train_dataset.get_dataset_size()
        if run.cur_step_num % steps == 0:
            self._flush()

    def on_train_epoch_end(self, run_context: RunContext) -> None:
        """If training stopped before the end of an epoch, flush the window that is
        still open.
        """
        if not (self.optimizer.storage.has_workers and self.has_flushed):
            self._flush()

    def _flush(self) -> None:
        """Flush the optimizer. If no worker had an open window, keep the ``result`` of
        the last step, because callbacks that run later may read it.
        """
        storage = self.optimizer.storage
        last_event = storage.last_event.tolist()
        if not self.optimizer.flush():
            write_numbers(storage.last_event, last_event)
        self.has_flushed = True
