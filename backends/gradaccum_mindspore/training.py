"""Training steps: the training cell, and callbacks for `mindspore.train.Model.train`.

`mindspore.nn.TrainOneStepCell` can neither scale the loss by a scale that moves nor
weigh a micro-batch; `TrainOneStepCell` here does both.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.ops import constexpr
from mindspore.train import Callback, ModelCheckpoint, RunContext

from gradaccum import ArgumentTypeError, ArgumentValueError, UsageError, kit
from gradaccum.kit import Decision, Handle, Listener, Sizes, State, explain
from gradaccum_mindspore.checks import Weight
from gradaccum_mindspore.extensions import Losses
from gradaccum_mindspore.gradient_sum import DType, compiled_clear, compiled_divided
from gradaccum_mindspore.mindspore_private import QuietPhase, decides_on_host
from gradaccum_mindspore.optimizer import AccumulatingOptimizer, wrapped
from gradaccum_mindspore.state import NUMPY_DTYPES, write_numbers
from gradaccum_mindspore.update import Update
from gradaccum_mindspore.window.compiled import CompiledWindow
from gradaccum_mindspore.window.pynative import PyNativeWindow, require_room

# The training cell's programs on a CPU in graph mode, where Python chooses among them:
# one for a micro-batch, one for the end of a window. All micro-batches have one
# program: two would draw their dropout's random numbers from the start of the same
# sequence.


class Program(QuietPhase):
    """A Cell whose call costs what its operators cost, however many cells it holds."""

    def __init__(self) -> None:
        super().__init__(auto_prefix=False)

    def _check_construct_args(self, *inputs: object) -> None:
        """Check nothing: the compiler checks once, where MindSpore inspects a signature
        at each call.
        """


class MicroBatchProgram(Program):
    """Adds one micro-batch of the training cell."""

    def __init__(self, cell: nn.Cell) -> None:
        super().__init__()
        self.cell = cell

    def construct(self, *inputs: object) -> Tensor:
        return self.cell.added(*inputs)

    def follow_cell(self) -> None:
        """Train or not as the cell does; `set_train` would also change cells that the
        user froze.
        """
        self._phase = self.cell._phase
        self.add_flags(training=self.cell.training)


class UpdateProgram(Program):
    """The end of a window that is applied, whose numbers are decided on. It has no
    branch and writes everything: an interruption finds the window open or closed.
    """

    def __init__(self, window: CompiledWindow, update: Update) -> None:
        super().__init__()
        self.window = window
        self.update = update
        self.lowers_flag = window.options.on_overflow == "drop_micro_batch"
        """Only then is a window applied whose overflow flag is up."""

    def construct(
        self, divisor: Tensor, event: Tensor, losses: Tensor, *scale: Tensor
    ) -> bool:
        # An input that is not used would make it half as fast.
        window = self.window
        storage = self.window.storage
        self.update(compiled_divided(storage.sums, divisor, storage.gradient_dtypes))
        compiled_clear(storage.sums, 0 * divisor)
        ops.assign(storage.micro_step, window.no_step)
        ops.assign(storage.weight, window.zero)
        ops.assign_add(storage.optimizer_step, window.one_step)
        if self.lowers_flag:
            ops.assign(storage.overflow, window.false)
        window.write_event(event)
        ops.assign(storage.window_loss.loss, losses)
        if window.scale_moves:
            ops.assign(storage.loss_scale, scale[0])
            ops.assign(storage.growth_tracker, scale[1])
        return True


class HostWindow(PyNativeWindow):
    """As `PyNativeWindow`, between compiled micro-batches."""

    def __init__(self, window: CompiledWindow, update: Update) -> None:
        super().__init__(window.storage, window.storage.options)
        self.scale_moves = window.scale_moves
        self.update_program = UpdateProgram(window, update)

    def carry_out(
        self, state: State, decision: Decision, losses: Losses, update: Update
    ) -> None:
        """Make the update and close the window in one program; a window that is skipped
        needs none.
        """
        if not decision.apply:
            super().carry_out(state, decision, losses, update)
            return
        dtype = self.storage.float_dtype
        scale: tuple[Tensor, ...] = ()
        if self.scale_moves:
            closed = kit.close(state, True, decision.overflow, self.options, kit.select)
            *_, loss_scale, growth_tracker = closed
            scale = (tensor(loss_scale, ms.float32), tensor(growth_tracker, ms.int32))
        event = (True, False, decision.overflow, decision.grad_norm)
        self.update_program(
            tensor(decision.divisor / self.storage.inner_scale, dtype),
            tensor(event, dtype),
            tensor(losses, dtype),
            *scale,
        )


def tensor(values: object, dtype: DType) -> Tensor:
    with np.errstate(over="ignore"):
        return Tensor.from_numpy(np.array(values, NUMPY_DTYPES[dtype]))


class HostTraining:
    """Calls the programs of one training cell. Several workers end their window in
    PyNative.
    """

    def __init__(self, cell: nn.Cell, steps: int) -> None:
        optimizer = cell.optimizer
        self.cell = cell
        self.steps = steps
        self.storage = optimizer.storage
        self.update = optimizer.update
        self.workers = optimizer.compiled_window.workers
        if self.workers is None:
            self.window = HostWindow(optimizer.compiled_window, self.update)
        else:
            self.window = optimizer.pynative_window
        self.micro_batch = MicroBatchProgram(cell)

    def __call__(self, *inputs: object) -> Any:
        is_last = self.storage.micro_step.item() + 1 >= self.steps
        if is_last:
            require_room(self.storage.pull(), self.steps)
        if self.workers is not None:
            self.workers.require_own_sum("gradients")
        if self.micro_batch.training != self.cell.training:
            self.micro_batch.follow_cell()
        loss = self.micro_batch(*inputs)
        if is_last:
            self.window.close(self.storage.pull(), self.update)
        return loss


# The training cell.


WeightFunction = Callable[..., Weight]


def items(*inputs: Tensor) -> Weight:
    """Return the length of the first input's first axis."""
    first = inputs[0]
    if not isinstance(first, Tensor):
        refuse_input("no Tensor")
    elif first.ndim == 0:
        refuse_input("a Tensor of shape ()")
    return first.shape[0]


@constexpr  # type: ignore[untyped-decorator]
def refuse_input(found: str) -> None:
    """Raise `ArgumentTypeError`: the first input has no items to count."""
    raise explain(
        ArgumentTypeError,
        "weight",
        expected="a function of the network's inputs, because the first of them has no"
        " axis of items",
        found=found,
        fix="Write TrainOneStepCell(network, optimizer, weight=count).",
    )


@constexpr  # type: ignore[untyped-decorator]
def refuse_losses(shape: tuple[int, ...]) -> None:
    """Raise `ArgumentValueError`: the network returns several losses, of which
    MindSpore differentiates the sum.
    """
    raise explain(
        ArgumentValueError,
        "network",
        expected='one loss, because reduction="mean" takes a mean of each micro-batch',
        found=f"losses of shape {shape}, whose sum is differentiated",
        fix="Let the network return their mean, as nn.MSELoss() does; or wrap with"
        ' reduction="sum" or "sum_per_item".',
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
        ArgumentTypeError: `optimizer` is not wrapped, `weight` is no function; on a
            call, the first input has no axis of items.
        ArgumentValueError: on a call, the network returned several losses, and the
            optimizer's reduction is "mean".
    """

    def __init__(
        self,
        network: nn.Cell,
        optimizer: AccumulatingOptimizer,
        weight: WeightFunction | None = items,
    ) -> None:
        wrapped(optimizer)
        if weight is not None and not callable(weight):
            raise explain(
                ArgumentTypeError,
                "weight",
                expected="a function of the network's inputs, or None",
                got=weight,
                fix="Leave it out.",
            )
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
        host = None
        steps = optimizer.options.steps
        # A subclass's construct is the user's, and runs as it stands.
        is_plain = type(self).construct is TrainOneStepCell.construct
        if is_plain and isinstance(steps, int):
            host = HostTraining(self, steps)
        object.__setattr__(self, "host", host)

    def forward(self, *inputs: object) -> tuple[Tensor, Tensor]:
        """Return the scaled loss, to differentiate, and the loss."""
        loss = self.network(*inputs)
        return self.optimizer.scale(loss), loss

    def __call__(self, *inputs: object, **named: object) -> Any:
        step: Callable[..., Any] = super().__call__
        if not named and self.host is not None and decides_on_host():
            step = self.host
        listener_calls = self.optimizer.storage.listener_calls
        return listener_calls.around(1, partial(step, *inputs, **named))

    def construct(self, *inputs: object) -> Tensor:
        loss, gradients, weight = self.differentiated(*inputs)
        if loss.size == 1:
            return ops.depend(loss, self.optimizer(gradients, weight, loss))
        return ops.depend(loss, self.optimizer(gradients, weight=weight))

    def added(self, *inputs: object) -> Tensor:
        """Run a micro-batch after which nothing ends here."""
        loss, gradients, weight = self.differentiated(*inputs)
        one_loss = loss if loss.size == 1 else None
        is_added = self.optimizer.micro_batch.add(gradients, weight, one_loss)
        return ops.depend(loss, is_added)

    def differentiated(
        self, *inputs: object
    ) -> tuple[Tensor, tuple[Tensor, ...], Weight]:
        """Return the loss, the gradients of the scaled loss, and the weight."""
        weight = None
        if self.weight_of_micro_batch is not None:
            weight = self.weight_of_micro_batch(*inputs)
        (_, loss), gradients = self.backward(*inputs)
        if self.takes_means and loss.size != 1:
            refuse_losses(loss.shape)
        return loss, self.grad_reducer(gradients), weight


class FlushAtEpochEnd(Callback):  # type: ignore[misc]
    """Close the open window in the last step of each epoch, so that no window reaches
    from one epoch into the next.

    Put this callback before callbacks that save checkpoints: they save at the end of a
    step, where this one flushes. `mindspore.train.Model.fit` validates after it. Where
    the data goes through a sink, not on a CPU, an epoch is ``sink_size`` steps.

    It tells, once, of micro-batches of unequal size without a weight, as those of
    ``Model(net, loss_fn, optimizer)``; not of a sink's, which Python does not see.

    Args:
        optimizer: the wrapped optimizer.

    Raises:
        ArgumentTypeError: `optimizer` is not wrapped.
    """

    def __init__(self, optimizer: AccumulatingOptimizer) -> None:
        super().__init__()
        self.optimizer = wrapped(optimizer)
        self.steps: int | None = None
        """Of an epoch whose data goes through no sink; ``batch_num`` is the
        ``sink_size`` there too, if one was given.
        """
        self.has_flushed = False
        """In this epoch. Workers that share windows each flush once in an epoch,
        whatever they hold.
        """

    def on_train_begin(self, run_context: RunContext) -> None:
        """Raise `UsageError` if a `mindspore.train.ModelCheckpoint` stands before this
        callback.
        """
        run = run_context.original_args()
        self.steps = None
        if not run.get("dataset_sink_mode"):
            self.steps = run.train_dataset.get_dataset_size()
        callbacks = run.list_callback
        before = callbacks[: callbacks.index(self)]
        if any(isinstance(callback, ModelCheckpoint) for callback in before):
            raise explain(
                UsageError,
                "callbacks",
                expected="FlushAtEpochEnd before ModelCheckpoint, which saves as the"
                " step ends",
                found="the other order",
                fix="Write callbacks=[FlushAtEpochEnd(optimizer), ...].",
            )

    def on_train_epoch_begin(self, run_context: RunContext) -> None:
        self.has_flushed = False

    def on_train_step_end(self, run_context: RunContext) -> None:
        run = run_context.original_args()
        self.optimizer.storage.sizes.see(run.train_dataset_element)
        if run.cur_step_num % (self.steps or run.batch_num) == 0:
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


class WatchWindows(Callback):  # type: ignore[misc]
    """Call `listeners` with a `gradaccum.watching.ClosedWindow` after each step that
    closed a window.

    While `Model.train` runs they are listeners of the optimizer. The callback looks for
    a closed window after each step, and waits for the device. Put it before
    `FlushAtEpochEnd`. ``weight`` is NaN where compiled code closes the window; so is
    ``loss``, unless all losses are passed to the optimizer, as by
    `gradaccum_mindspore.TrainOneStepCell`.

    Args:
        optimizer: the wrapped optimizer.
        listeners: functions of one window.

    Raises:
        ArgumentTypeError: `optimizer` is not wrapped, or a listener cannot be called.
    """

    def __init__(self, optimizer: AccumulatingOptimizer, *listeners: Listener) -> None:
        super().__init__()
        self.optimizer = wrapped(optimizer)
        self.listeners = listeners
        self.handles: list[Handle] = []
        for listener in listeners:
            kit.Listeners().add(listener)

    def on_train_begin(self, run_context: RunContext) -> None:
        """Begin to listen.

        Raises:
            UsageError: the data goes through a sink.
        """
        if run_context.original_args().get("dataset_sink_mode"):
            raise explain(
                UsageError,
                "dataset_sink_mode",
                expected="False beside WatchWindows",
                found="steps of a sink, which Python does not see",
                fix="Write model.train(..., dataset_sink_mode=False).",
            )
        self.on_train_end(run_context)  # where the last training raised
        self.handles = [
            self.optimizer.add_listener(listener) for listener in self.listeners
        ]

    def on_train_step_end(self, run_context: RunContext) -> None:
        self.optimizer.storage.listener_calls.report(micro_batches=1)

    def on_train_end(self, run_context: RunContext) -> None:
        for handle in self.handles:
            handle.remove()
