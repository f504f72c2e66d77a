"""Training steps: the training cell, and callbacks for `mindspore.train.Model.train`.

`mindspore.nn.TrainOneStepCell` can neither scale the loss by a scale that moves nor
weigh a micro-batch; `TrainOneStepCell` here does both.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import mindspore as ms
from mindspore import Tensor, nn, ops
from mindspore.ops import constexpr
from mindspore.train import Callback, ModelCheckpoint, RunContext

from gradaccum import ArgumentValueError, UsageError
from gradaccum.kit import Sizes
from gradaccum_mindspore.checks import Weight
from gradaccum_mindspore.gradient_sum import write_numbers
from gradaccum_mindspore.optimizer import AccumulatingOptimizer

# The training cell.


WeightFunction = Callable[..., Weight]


def items(*inputs: Tensor) -> Weight:
    """Return the length of the first input's first axis."""
    return inputs[0].shape[0]


@constexpr  # type: ignore[untyped-decorator]
def refuse_losses(shape: tuple[int, ...]) -> None:
    """Raise `ArgumentValueError`: the network returns several losses, of which
    MindSpore differentiates the sum.
    """
    raise ArgumentValueError(
        'network: expected one loss, because reduction="mean" takes a mean of each'
        f" micro-batch; got losses of shape {shape}, whose sum is differentiated. Let"
        " the network return their mean, as nn.MSELoss() does; or wrap with"
        ' reduction="sum" or "sum_per_item".'
    )


class TrainOneStepCell(nn.TrainOneStepCell):  # type: ignore[misc]
    """One micro-batch: the loss, its gradient and the wrapped optimizer's call. The
    last micro-batch of a window makes the update.

    In PyNative, in `mindspore.jit`, in graph mode, and as the network of
    `mindspore.train.Model`: ``Model(TrainOneStepCell(nn.WithLossCell(net, loss_fn),
    optimizer))``. A checkpoint of this cell holds a normalization's statistics too.
    Without ``data_parallel=True``, in MindSpore's data parallel mode, it takes the mean
    of the workers' gradients in each micro-batch, and all must have equally many items.

    Args:
        network: a Cell that returns the loss, not scaled.
        optimizer: the wrapped optimizer; its loss scale, if any, is applied here.
        weight: a function of the network's inputs that returns how many items the
            micro-batch has, a number or a Tensor of one element; the length of the
            first input's first axis unless given. None: every micro-batch weighs 1,
            which saves a pass over the gradients.

    Returns:
        When called: the loss of the micro-batch, not scaled.

    Raises:
        ArgumentValueError: on a call, the network returned several losses, and the
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
            # Micro-batches of any size are to count the same, as in a sum.
            optimizer.storage.sizes = Sizes("sum")
        # Not `weight`: a Cell that holds parameters in a tuple has an attribute of each
        # one's name.
        self.weight_of_micro_batch = weight
        self.takes_means = optimizer.options.reduction == "mean"
        self.backward = ms.value_and_grad(
            self.forward, None, self.weights, has_aux=True
        )

    def forward(self, *inputs: object) -> tuple[Tensor, Tensor]:
        """Return the scaled loss, to differentiate, and the loss."""
        loss = self.network(*inputs)
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
    """Close the open window in the last step of each epoch, so that no window reaches
    from one epoch into the next.

    Put this callback before callbacks that save checkpoints: they save at the end of a
    step, where this one flushes. `mindspore.train.Model.fit` validates after it. Where
    the data goes through a sink, not on a CPU, an epoch is ``sink_size`` steps.

    After each step it calls the optimizer's listeners with the window that the step
    closed. It warns, once, of micro-batches of unequal size without a weight, as those
    of ``Model(net, loss_fn, optimizer)``; not of a sink's, which Python does not see.

    Args:
        optimizer: the wrapped optimizer.
    """

    def __init__(self, optimizer: AccumulatingOptimizer) -> None:
        super().__init__()
        self.optimizer = optimizer
        self.has_flushed = False
        """In this epoch. Workers that share windows each flush once in an epoch,
        whatever they hold.
        """

    def on_train_begin(self, run_context: RunContext) -> None:
        """Raise `UsageError` if a `mindspore.train.ModelCheckpoint` stands before this
        callback.
        """
        callbacks = run_context.original_args().list_callback
        before = callbacks[: callbacks.index(self)]
        if any(isinstance(callback, ModelCheckpoint) for callback in before):
            raise UsageError(
                "callbacks: expected FlushAtEpochEnd before ModelCheckpoint, because"
                " both work at the end of a step; got FlushAtEpochEnd after it, so that"
                " the saved file lacks the epoch's last update. Write"
                " callbacks=[FlushAtEpochEnd(optimizer), ...]."
            )

    def on_train_epoch_begin(self, run_context: RunContext) -> None:
        self.has_flushed = False

    def on_train_step_end(self, run_context: RunContext) -> None:
        run = run_context.original_args()
        self.optimizer.storage.listener_calls.report(micro_batches=1)
        self.optimizer.storage.sizes.see(run.train_dataset_element)
        steps = run.batch_num
        if not run.dataset_sink_mode:
            # There `batch_num` is the `sink_size`, if one was given.
            steps = run.train_dataset.get_dataset_size()
        if run.cur_step_num % steps == 0:
            self._flush()

    def on_train_epoch_end(self, run_context: RunContext) -> None:
        """Flush the window that an epoch left open when it was stopped early."""
        has_workers = self.optimizer.storage.has_workers
        if not (has_workers and self.has_flushed):
            self._flush()

    def _flush(self) -> None:
        """Flush. If no worker had an open window, ``result`` stays the last step's, for
        the callbacks behind this one.
        """
        storage = self.optimizer.storage
        last_event = storage.last_event.tolist()
        if not self.optimizer.flush():
            write_numbers(storage.last_event, last_event)
        self.has_flushed = True
