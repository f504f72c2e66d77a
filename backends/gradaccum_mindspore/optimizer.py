"""The wrapped optimizer: a `mindspore.nn.Optimizer` that runs the one it wraps once per
window.

The compiler follows ``construct`` and never sees ``__call__``, which is the PyNative
path; `Flush` and `Discard` are Cells for that reason. The wrapped optimizer calls
`mindspore.nn.Cell`'s constructor alone and lends the inner optimizer's attributes:
there is one learning rate and one ``global_step``, which moves per update.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sized
from functools import partial
from typing import Any, TypeVar

from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore.experimental import optim

from gradaccum import (
    ArgumentTypeError,
    GradAccumWarning,
    StepResult,
    UsageError,
    kit,
    updates_in,
)
from gradaccum.kit import (
    Handle,
    Listener,
    Options,
    Schedule,
    State,
    UntilWeight,
    explain,
)
from gradaccum_mindspore import checks
from gradaccum_mindspore.checks import Loss, NamedGradients, Weight
from gradaccum_mindspore.grad_scaler import note_read, require_read
from gradaccum_mindspore.gradient_sum import Gradients, Number
from gradaccum_mindspore.master_weights import Optimizer, turn_to_masters
from gradaccum_mindspore.mindspore_private import OwnPhase, is_graph_mode, refuse_trace
from gradaccum_mindspore.state import Storage, window_size
from gradaccum_mindspore.update import (
    Update,
    inner_scale,
    require_kernels,
    require_unwrapped,
    with_inner_scale,
)
from gradaccum_mindspore.window.compiled import CompiledWindow
from gradaccum_mindspore.window.pynative import PyNativeWindow
from gradaccum_mindspore.workers.group import (
    SharedWindow,
    WorkerGroup,
    mark,
    place,
    refuse_compiled_flush,
    share,
    unmark,
)

M = TypeVar("M")
FIXED = (
    "options",
    "inner",
    "storage",
    "compiled_window",
    "pynative_window",
    "update",
    "micro_batch",
    "flush",
    "discard",
    "loss_scale",
)
"""Attributes that cannot be set, beside the options."""


CALL = "loss, gradients = value_and_grad(x, y), then optimizer(gradients, weight=n)"
ELSEWHERE = {
    "step": CALL,
    "backward": CALL,
    "update": CALL,
    "zero_grad": "nothing in its place, because the gradients are arguments here",
    "micro_step": "optimizer.result.micro_step",
    "optimizer_step": "optimizer.result.optimizer_step",
    "epoch_end": "for x, y in optimizer.epoch(loader), which flushes at the end",
}
"""What one writes in MindSpore, by the name in another framework."""


def elsewhere(name: str, error: AttributeError) -> AttributeError:
    """Return the error for an attribute that the optimizer has not."""
    if name not in ELSEWHERE:
        return error
    return explain(  # type: ignore[type-var]
        AttributeError,
        f"optimizer.{name}",
        expected="a name that an optimizer has in MindSpore",
        found="one of another framework",
        fix=f"Write {ELSEWHERE[name]}.",
    )


class Flush(nn.Cell):  # type: ignore[misc]
    """``optimizer.flush()``: close the open window, however few micro-batches it holds;
    nothing if it holds none.

    ``optimizer.flush(denominator=n)``, with ``steps=None`` and from Python, divides the
    window's sum by n, in place of its weight.
    """

    def __init__(
        self,
        compiled_window: CompiledWindow,
        pynative_window: PyNativeWindow,
        update: Update,
    ) -> None:
        super().__init__(auto_prefix=False)
        self.compiled_window = compiled_window
        self.pynative_window = pynative_window
        self.update = update

    def __call__(self, denominator: Weight = None) -> bool | Tensor:
        """Close the window from Python; returns whether there was one.

        Raises:
            ArgumentTypeError, ArgumentValueError: `denominator` is no finite number >
                0, or windows close by themselves.
            UsageError: `denominator` where several workers share the window.
        """
        refuse_trace()
        self.pynative_window.require_whole()
        storage, divides = self.compiled_window.storage, None
        if denominator is not None:
            plain = (
                denominator.item() if isinstance(denominator, Tensor) else denominator
            )
            divides = kit.require_denominator(
                plain, storage.options, several=self.compiled_window.workers is not None
            )
        flush = partial(self.pynative_window.flush, self.update, divides)
        if is_graph_mode() and divides is None and self.compiled_window.workers is None:
            flush = super().__call__
        closed: bool | Tensor = storage.listening.after(0, flush)
        return closed

    def construct(self, denominator: Weight = None) -> Tensor:
        if denominator is not None or self.compiled_window.workers is not None:
            refuse_compiled_flush()
        return self.compiled_window.flush(self.update)


class Discard(nn.Cell):  # type: ignore[misc]
    """``optimizer.discard()``: forget the open window."""

    def __init__(
        self, compiled_window: CompiledWindow, pynative_window: PyNativeWindow
    ) -> None:
        super().__init__(auto_prefix=False)
        self.compiled_window = compiled_window
        self.pynative_window = pynative_window

    def __call__(self) -> None:
        refuse_trace()
        self.pynative_window.discard()

    def construct(self) -> bool:
        return self.compiled_window.discard()


class MicroBatch(OwnPhase):
    """``optimizer(gradients, weight, loss)`` in compiled code, for Python to call in
    graph mode: it takes no names there.
    """

    def __init__(self, compiled_window: CompiledWindow, update: Update) -> None:
        super().__init__(auto_prefix=False)
        self.compiled_window = compiled_window
        self.update = update
        # As in `nn.Optimizer`. Else MindSpore takes the gradients for constants, and
        # compiles each time.
        self.enable_tuple_broaden = True

    def construct(
        self, gradients: Gradients | NamedGradients, weight: Weight, loss: Loss
    ) -> Tensor:
        require_read(self.compiled_window.storage.scaled)
        state, event, told = self.compiled_window.add(
            self.compiled_window.ordered(gradients), weight, loss
        )
        full = self.compiled_window.is_full(state)
        self.compiled_window.write_added(state, event, told, weight)
        if self.compiled_window.steps is None:
            return full
        certain = self.compiled_window.adds_certainly(weight)
        if full:
            self.compiled_window.close(self.update, loss is None and certain)
        return full


class AccumulatingOptimizer(OwnPhase, nn.Optimizer):  # type: ignore[misc]
    """The optimizer that `gradaccum.wrap` returns for a `mindspore.nn.Optimizer`.

    ``optimizer(gradients, weight, loss)`` takes in one micro-batch, in PyNative, inside
    `mindspore.jit`, in graph mode, in `mindspore.nn.TrainOneStepCell` and in
    `mindspore.train.Model`, and returns whether it closed a window (a bool, or a bool
    Tensor where compiled).

    Args:
        inner: the optimizer to run once per window.
        options: the checked options. With ``master_weights`` `inner` works on float32
            masters from now on: differentiate by this object's ``parameters``. Weights
            that are loaded into the model before the first update become the masters.
        name: part of the names of the Parameters that hold the state; two wrapped
            optimizers of one program need different ones.
        data_parallel: a window is that of all workers. Then this call, the end of each
            window and ``flush`` are collective.
    """

    def __init__(
        self,
        inner: Optimizer,
        options: Options,
        name: str = "gradaccum",
        *,
        data_parallel: bool = False,
    ) -> None:
        nn.Cell.__init__(self, auto_prefix=False)
        require_unwrapped(inner)
        require_kernels(inner, options)
        if options.master_weights:
            # The inner optimizer's parameters will be the masters; users go on
            # differentiating by the model's.
            self.parameters = ParameterTuple(inner.parameters)
        options = with_inner_scale(options, inner)
        if data_parallel and isinstance(options.steps, UntilWeight):
            raise kit.shared_until_weight_error(options.steps)
        sharded: tuple[int, ...] = ()
        if data_parallel:
            sharded = share(inner.parameters, options, name)
        else:
            unmark(inner.parameters)
        self.inner = inner
        self.options = options
        self.storage = Storage(
            inner.parameters,
            options,
            name,
            inner_scale(inner),
            place() if data_parallel else None,
            sharded,
        )
        if options.master_weights:
            turn_to_masters(inner, self.storage.masters)
        self.update = Update(inner, self.storage.masters)
        workers = WorkerGroup(self.storage, inner) if data_parallel else None
        self.compiled_window = CompiledWindow(self.storage, options, workers)
        self.pynative_window = (
            PyNativeWindow(self.storage, options)
            if workers is None
            else SharedWindow(self.storage, options, self.compiled_window, workers)
        )
        self.micro_batch = MicroBatch(self.compiled_window, self.update)
        self.flush = Flush(self.compiled_window, self.pynative_window, self.update)
        self.discard = Discard(self.compiled_window, self.pynative_window)
        if data_parallel:
            mark(self, inner.parameters)
        object.__setattr__(self, "_complete", True)

    def __getattr__(self, name: str) -> Any:
        try:
            return nn.Cell.__getattr__(self, name)
        except AttributeError:
            if "_cells" not in self.__dict__ or "inner" not in self._cells:
                raise
        try:
            return getattr(self._cells["inner"], name)
        except AttributeError as error:
            raise elsewhere(name, error) from None

    def __setattr__(self, name: str, value: object) -> None:
        if not self.__dict__.get("_complete", False):
            nn.Cell.__setattr__(self, name, value)
        elif name in Options._fields or name in FIXED:
            expected = (
                "options that stay as they were, because compiled code has read them"
                " already"
            )
            raise explain(
                UsageError,
                name,
                expected=expected,
                got=value,
                fix="Wrap the optimizer anew, or pass a schedule as steps=.",
            )
        elif (
            name not in self.__dict__
            and not hasattr(nn.Cell, name)
            and hasattr(self.inner, name)
        ):
            setattr(self.inner, name, value)
        else:
            nn.Cell.__setattr__(self, name, value)

    def __call__(
        self,
        gradients: Gradients | NamedGradients,
        *counted: Number | None,
        weight: Weight = None,
        loss: Loss = None,
    ) -> bool | Tensor:
        """Take in one micro-batch, from Python, ``optimizer(gradients, weight, loss)``;
        return whether it closed a window.

        Args:
            gradients: a tuple or list in the order of ``self.parameters``, or a dict by
                parameter name; None for a parameter that took no part. Multiplied by
                the loss scale, if there is one.
            counted: weight, or weight and loss. A floating Tensor or array alone needs
                its name: it may be the loss.
            weight: number or Tensor of one element, >= 0: how many items the
                micro-batch has; 1 if left out.
            loss: its loss, not scaled, a number or Tensor of one element; if all are
                passed, ``result.loss`` is the window's.

        Raises:
            GradientError: another number, shape or dtype than the parameters'.
            ArgumentTypeError, ArgumentValueError: `weight` is no finite number >= 0,
                `loss` no number; ``steps`` gave no int >= 1.
            UsageError: nobody has asked for the loss scale yet;
                ``jit(capture_mode="trace")`` is recording; or the inner optimizer
                raised in the last update.
        """
        refuse_trace()
        self.pynative_window.require_whole()
        require_read(self.storage.scaled)
        checks.require_told_apart(
            len(counted),
            getattr((*counted, None)[0], "dtype", None),
            weight is None,
            loss is None,
        )
        if counted:
            weight, loss = counted[0], counted[1] if len(counted) > 1 else loss
        self.storage.sizes.weighed = weight is not None
        full: bool | Tensor = self.storage.listening.after(
            1, self._take, gradients, weight, loss
        )
        return full

    def _take(
        self, gradients: Gradients | NamedGradients, weight: Weight, loss: Loss
    ) -> bool | Tensor:
        ordered = checks.gradients_by_position(
            gradients, self.storage.specs, self.storage.names
        )
        amount = checks.weight_as_number(
            kit.given_weight(weight, kit.use_of_weights(self.options))
        )
        told = None if loss is None else checks.loss_as_number(loss)
        if is_graph_mode():
            ordered = checks.without_none(ordered, self.storage.specs)
            dtype = self.storage.float_dtype
            given = (None if weight is None else amount, told)
            return self.micro_batch(
                ordered,
                *(
                    None if number is None else Tensor(number, dtype)
                    for number in given
                ),
            )
        size = self.pynative_window.size()
        state = self.pynative_window.add(ordered, amount, size, told)
        full = bool(kit.ends(state, size, kit.select))
        if full:
            self.pynative_window.close(state, self.update)
        return full

    def scale(self, loss: Tensor) -> Tensor:
        """Return ``loss`` times the loss scale, in the loss's dtype: differentiate
        this, in any mode.
        """
        if self.storage.unscaled:
            return loss
        return loss * ops.cast(self.loss_scale, loss.dtype)

    @property
    def loss_scale(self) -> Parameter:
        """The current loss scale, a float32 Parameter of shape (), in any mode, for
        ``sens`` say.
        """
        note_read(self.storage.scaled)
        return self.storage.loss_scale

    @property
    def result(self) -> StepResult:
        """The result of the last micro-batch, flush or discard, in Python numbers. For
        Python alone. Reading it calls the listeners.

        It does not count as asking for the loss scale.

        Raises:
            UsageError: compiled code skipped windows of workers with different learning
                rates.
        """
        if self.compiled_window.workers is not None:
            self.compiled_window.workers.require_same_rates()
        result: StepResult = self.storage.listening.after(0, self.storage.result)
        return result

    def epoch(
        self, loader: Iterable[M], *, carry: bool = False, progress: bool = False
    ) -> kit.Epoch[M]:
        """Iterate over the micro-batches of a loader, and flush when it ends:
        ``for x, y in opt.epoch(loader):``, from Python.

        A loop that is left early leaves its window open. With several workers each
        flushes once, when its own loader ends. A `GradAccumWarning` tells, once, of
        micro-batches of unequal size that were counted without a weight; in compiled
        code, if the program is compiled for their size. Another tells, once, of a
        window that such a loop left open for this one.

        Args:
            loader: yields the micro-batches, such as a `mindspore.dataset` dataset.
            carry: leave the last window open for the next pass.
            progress: show a progress bar; needs rich.

        Raises:
            ArgumentTypeError: `loader` is no iterable, or a flag no bool.
            MissingPackageError: `progress` without rich.
        """
        micro_batches = kit.epoch(
            loader,
            self._end_epoch,
            carry=carry,
            progress=progress,
            see=self.storage.sizes.see,
        )
        self.storage.open_window.epoch_begins(carry)
        return micro_batches

    def _end_epoch(self) -> None:
        self.flush()
        self.storage.open_window.in_epoch = False

    def updates_in(self, loader: Sized | int, epochs: int = 1) -> int:
        """Return the number of updates in `epochs` passes of `epoch` over a loader from
        here on: the length of a scheduler.

        Args:
            loader: has a length, or is its number of micro-batches, an int >= 0.
            epochs: the number of passes, an int >= 0.

        Raises:
            ArgumentTypeError: `loader` has no length; or windows end by weight or by
                ``flush``, so that nobody knows their number.
            ArgumentValueError: a number is below 0.
        """
        return updates_in(
            loader,
            self.options.steps,
            epochs=epochs,
            optimizer_step=self.storage.optimizer_step.item(),
            micro_step=self.storage.micro_step.item(),
        )

    def add_listener(self, listener: Listener) -> Handle:
        """Call `listener` with a `gradaccum.watching.ClosedWindow` after each window
        that closes, applied or skipped.

        Python calls it when the call of this optimizer, of ``flush`` or of
        `gradaccum_mindspore.TrainOneStepCell` that closed the window is through, and
        between two windows that one ``flush`` closes. In a compiled step of your own
        read ``result`` after each step, which calls it; ``weight`` and
        ``micro_batches`` are NaN there. That call raises what it raises; the update is
        made by then.

        Args:
            listener: a function of one `gradaccum.watching.ClosedWindow`.

        Returns:
            A handle, whose ``remove()`` takes the listener off.

        Raises:
            ArgumentTypeError: `listener` cannot be called.
        """
        return self.storage.listening.add(listener)

    def on_update(self, function: Callable[[], object]) -> Handle:
        """Call `function`, without arguments, after each update that is made.

        An average of the weights, a codebook, an own schedule: what moves once per
        update belongs here, as a window may also close inside ``flush``. It is not
        called for a skipped window. In a compiled step of your own it is called as a
        listener is: by reading ``result``.

        Args:
            function: for example ``lambda: average.update(net)``.

        Returns:
            A handle, whose ``remove()`` takes the function off.

        Raises:
            ArgumentTypeError: `function` cannot be called.
        """
        return self.storage.listening.on_update(function)

    def __repr__(self) -> str:
        """Return the state in one line; waits for the device.
        ``print(optimizer.inner)`` shows the inner optimizer.
        """
        state = self.storage.pull()
        return kit.described(
            type(self).__name__,
            type(self.inner).__name__,
            self.options,
            state,
            self._steps(state),
        )

    def _steps(self, state: State) -> Schedule:
        """Return the size of the open or next window; None if nobody knows it."""
        if state.micro_step and self.storage.varies:
            return self.storage.open_size()
        try:
            return window_size(self.options.steps, state.optimizer_step)
        except Exception:
            return None

    def construct(
        self,
        gradients: Gradients | NamedGradients,
        *counted: Any,
        weight: Weight = None,
        loss: Loss = None,
    ) -> Tensor:
        dtype = None
        if len(counted) > 0 and isinstance(counted[0], Tensor):
            dtype = counted[0].dtype
        checks.compiled_told_apart(len(counted), dtype, weight is None, loss is None)
        if len(counted) > 0:
            weight = counted[0]
        if len(counted) > 1:
            loss = counted[1]
        return self.micro_batch(gradients, weight, loss)

    def take(self, gradients: Gradients, weight: Weight, loss: Loss) -> bool:
        """Add a micro-batch for a caller who ends the window."""
        require_read(self.storage.scaled)
        state, event, told = self.compiled_window.add(
            self.compiled_window.ordered(gradients), weight, loss
        )
        return self.compiled_window.write_added(state, event, told, weight)


class AccumulatingExperimentalOptimizer(AccumulatingOptimizer, optim.Optimizer):  # type: ignore[misc]
    """The same for a `mindspore.experimental.optim.Optimizer`, and an instance of that,
    so that its schedulers take it.
    """

    def __init__(
        self,
        inner: Optimizer,
        options: Options,
        name: str = "gradaccum",
        *,
        data_parallel: bool = False,
    ) -> None:
        super().__init__(inner, options, name, data_parallel=data_parallel)
        self._rates: list[float] | None = []
        """The learning rates at the last micro-batch; None if nobody looks at them any
        more: in the third window, or after a warning.
        """

    def __call__(
        self,
        gradients: Gradients | NamedGradients,
        *counted: Number | None,
        weight: Weight = None,
        loss: Loss = None,
    ) -> bool | Tensor:
        """Take in one micro-batch, and warn, once, if a learning rate moved inside one
        of the first two windows.
        """
        if self._rates is not None:
            self._look_at_rates(self._rates)
        return super().__call__(gradients, *counted, weight=weight, loss=loss)

    def _look_at_rates(self, before: list[float]) -> None:
        rates = [float(group["lr"]) for group in self.inner.param_groups]
        moved = before not in ([], rates) and self.storage.micro_step.item() > 0
        self._rates = None if moved or self.storage.optimizer_step.item() > 1 else rates
        if moved:
            warnings.warn(kit.RATE_MOVED, GradAccumWarning, stacklevel=3)

    def add_param_group(self, param_group: object) -> None:
        """Raise `UsageError`: only the parameters at the time of wrapping have sums."""
        expected, found = (
            (
                "all groups before the optimizer is wrapped, because each parameter"
                " gets its sum then"
            ),
            "a group more",
        )
        raise explain(
            UsageError,
            "param_group",
            expected=expected,
            found=found,
            fix="Write gradaccum.wrap(optimizer, steps=4) after it.",
        )


def wrapped(optimizer: object) -> AccumulatingOptimizer:
    """Return `optimizer`; raise `ArgumentTypeError` if it is not wrapped."""
    if isinstance(optimizer, AccumulatingOptimizer):
        return optimizer
    found, fix = (
        f"an object of type {type(optimizer).__name__}",
        "Pass what gradaccum.wrap(optimizer, steps=4) returned.",
    )
    raise explain(
        ArgumentTypeError,
        "optimizer",
        expected="a wrapped optimizer",
        found=found,
        fix=fix,
    )
