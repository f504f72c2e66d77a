"""The wrapped optimizer: a `mindspore.nn.Optimizer` that runs the one it wraps once per
window.

The compiler follows ``construct`` and never sees ``__call__``, which is the PyNative
path; `Flush` and `Discard` are Cells for that reason. The wrapped optimizer calls
`mindspore.nn.Cell`'s constructor alone and lends the inner optimizer's attributes:
there is one learning rate and one ``global_step``, which moves per update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sized
from functools import partial
from typing import Any, TypeVar

from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore.experimental import optim

from gradaccum import StepResult, UsageError, kit, updates_in
from gradaccum.kit import (
    Handle,
    Listener,
    Options,
    UntilWeight,
)
from gradaccum_mindspore import checks
from gradaccum_mindspore.checks import Loss, Weight
from gradaccum_mindspore.extensions import ChangedRateWarning
from gradaccum_mindspore.gradient_sum import Gradients
from gradaccum_mindspore.loss_scale import note_read, require_read
from gradaccum_mindspore.master_weights import Optimizer, put_masters_into
from gradaccum_mindspore.mindspore_private import is_graph_mode, refuse_trace
from gradaccum_mindspore.state import Storage
from gradaccum_mindspore.update import (
    Update,
    require_no_scale,
    require_unwrapped,
)
from gradaccum_mindspore.window.compiled import CompiledWindow
from gradaccum_mindspore.window.pynative import PyNativeWindow
from gradaccum_mindspore.workers.agreement import (
    mark,
    place,
    places_of_shards,
    require_same_everywhere,
    unmark,
)
from gradaccum_mindspore.workers.group import (
    SharedWindow,
    WorkerGroup,
    refuse_compiled_flush,
)

M = TypeVar("M")

FIXED_NAMES = {*Options._fields, "options", "inner", "loss_scale"}
"""Attributes that cannot be set, because compiled code has read them."""


class WindowCall(nn.Cell):  # type: ignore[misc]
    """A call without gradients, for Python and for the compiler."""

    def __init__(
        self, compiled_window: CompiledWindow, pynative_window: PyNativeWindow
    ) -> None:
        super().__init__(auto_prefix=False)
        self.compiled_window = compiled_window
        self.pynative_window = pynative_window


class Flush(WindowCall):
    """``optimizer.flush()``: close the open window, however few micro-batches it holds;
    nothing if it holds none.

    ``optimizer.flush(denominator=n)``, with ``steps=None`` and from Python, divides the
    window's sum by n, in place of its weight.
    """

    def __call__(self, denominator: Weight = None) -> bool | Tensor:
        """Close the window from Python; returns whether there was one.

        Raises:
            ArgumentTypeError, ArgumentValueError: `denominator` is no finite number >
                0, or windows close by themselves.
            UsageError: `denominator` where several workers share the window.
        """
        refuse_trace()
        storage = self.pynative_window.storage
        storage.pull()
        has_workers = storage.has_workers
        if denominator is not None:
            if isinstance(denominator, Tensor):
                denominator = denominator.item()
            denominator = kit.require_denominator(
                denominator, storage.options, several=has_workers
            )
        flush = partial(self.pynative_window.flush, denominator)
        if is_graph_mode() and denominator is None and not has_workers:
            flush = super().__call__
        was_open: bool | Tensor = storage.listener_calls.around(0, flush)
        return was_open

    def construct(self) -> Tensor:
        if self.compiled_window.workers is not None:
            refuse_compiled_flush()
        return self.compiled_window.flush()


class Discard(WindowCall):
    """``optimizer.discard()``: forget the open window."""

    def __call__(self) -> None:
        refuse_trace()
        self.pynative_window.discard()

    def construct(self) -> bool:
        return self.compiled_window.discard()


class MicroBatch(nn.Cell):  # type: ignore[misc]
    """``optimizer(gradients, weight, loss)`` in compiled code, for Python to call in
    graph mode: it takes no names there.
    """

    def __init__(self, window: CompiledWindow) -> None:
        super().__init__(auto_prefix=False)
        self.window = window
        # As in `nn.Optimizer`. Else MindSpore takes the gradients for constants, and
        # compiles each time.
        self.enable_tuple_broaden = True

    def construct(self, gradients: Gradients, weight: Weight, loss: Loss) -> Tensor:
        window = self.window
        require_read(window.storage.scale_key)
        state, event, losses = window.add(
            window.checked_gradients(gradients), weight, loss
        )
        is_full = window.is_full(state)
        window.write_added(state, event, losses, weight)
        if window.steps is None:
            return is_full
        if is_full:
            window.close()
        return is_full


class AccumulatingOptimizer(nn.Optimizer):  # type: ignore[misc]
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
        require_no_scale(inner)
        if options.master_weights:
            # The inner optimizer's parameters will be the masters; users go on
            # differentiating by the model's.
            self.parameters = ParameterTuple(inner.parameters)
        parameters = inner.parameters
        this_place = None
        sharded_places: tuple[int, ...] = ()
        if data_parallel:
            if isinstance(options.steps, UntilWeight):
                raise kit.shared_until_weight_error(options.steps)
            require_same_everywhere(parameters, options, name)
            sharded_places = places_of_shards(parameters, options)
            this_place = place()
        else:
            unmark(parameters)
        self.inner = inner
        self.options = options
        self.storage = Storage(parameters, options, name, this_place, sharded_places)
        if options.master_weights:
            put_masters_into(inner, self.storage.masters)
        update = Update(inner, self.storage.masters)
        workers = WorkerGroup(self.storage, inner) if data_parallel else None
        self.compiled_window = CompiledWindow(self.storage, options, update, workers)
        self.pynative_window = PyNativeWindow(self.storage, options, update)
        if workers is not None:
            self.pynative_window = SharedWindow(
                self.storage, options, update, self.compiled_window, workers
            )
        self.micro_batch = MicroBatch(self.compiled_window)
        self.flush = Flush(self.compiled_window, self.pynative_window)
        self.discard = Discard(self.compiled_window, self.pynative_window)
        if data_parallel:
            mark(self, parameters)
        if isinstance(inner, optim.Optimizer):
            warning = ChangedRateWarning(self.storage, inner)
            self.storage.extensions = (*self.storage.extensions, warning)
        object.__setattr__(self, "_is_complete", True)

    def __getattr__(self, name: str) -> Any:
        try:
            return nn.Cell.__getattr__(self, name)
        except AttributeError:
            if "_cells" not in self.__dict__ or "inner" not in self._cells:
                raise
        return getattr(self._cells["inner"], name)

    def __setattr__(self, name: str, value: object) -> None:
        if not self.__dict__.get("_is_complete", False):
            nn.Cell.__setattr__(self, name, value)
        elif name in FIXED_NAMES:
            raise UsageError(
                f"{name}: expected options that stay as they were, because compiled"
                f" code has read them already; got {value!r} ({type(value).__name__})."
                " Wrap the optimizer anew, or pass a schedule as steps=."
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
        gradients: Gradients,
        positional_weight: Weight = None,
        positional_loss: Loss = None,
        *,
        weight: Weight = None,
        loss: Loss = None,
    ) -> bool | Tensor:
        """Take in one micro-batch, from Python, ``optimizer(gradients, weight, loss)``;
        return whether it closed a window.

        Args:
            gradients: a tuple or list in the order of ``self.parameters``; None for a
                parameter that took no part. Multiplied by the loss scale, if there is
                one.
            positional_weight: `weight` without its name. A floating Tensor or array
                alone needs its name, because it may be the loss.
            positional_loss: `loss` without its name, behind the weight.
            weight: number or Tensor of one element, >= 0: how many items the
                micro-batch has; 1 if left out.
            loss: its loss, not scaled, a number or Tensor of one element; if all are
                passed, ``result.loss`` is the window's.

        Raises:
            GradientError: another number, shape or dtype than the parameters'.
            ArgumentTypeError, ArgumentValueError: `weight` is no finite number >= 0;
                ``steps`` gave no int >= 1.
            UsageError: nobody has asked for the loss scale yet;
                ``jit(capture_mode="trace")`` is recording; the window is full, because
                its update raised; or an exception left the window, or its update,
                written in part.
        """
        refuse_trace()
        for extension in self.storage.extensions:
            extension.micro_batch_given()
        require_read(self.storage.scale_key)
        if positional_weight is not None:
            if positional_loss is None and loss is None:
                dtype = getattr(positional_weight, "dtype", None)
                checks.require_certain_weight(dtype)
            weight = positional_weight
        if positional_loss is not None:
            loss = positional_loss
        self.storage.sizes.weighed = weight is not None
        is_full: bool | Tensor = self.storage.listener_calls.around(
            1, partial(self._add, gradients, weight, loss)
        )
        return is_full

    def _add(self, gradients: Gradients, weight: Weight, loss: Loss) -> bool | Tensor:
        gradients = checks.checked_gradients(gradients, self.storage.specs)
        use_of_weights = self.compiled_window.use_of_weights
        weight_number = checks.weight_as_number(
            kit.given_weight(weight, use_of_weights)
        )
        loss_number = None if loss is None else checks.loss_as_number(loss)
        if is_graph_mode():
            self.storage.pull()
            dtype = self.storage.float_dtype
            return self.micro_batch(
                checks.without_none(gradients, self.storage.specs),
                None if weight is None else Tensor(weight_number, dtype),
                None if loss is None else Tensor(loss_number, dtype),
            )
        size = self.pynative_window.size()
        state = self.pynative_window.add(gradients, weight_number, size, loss_number)
        is_full = bool(kit.ends(state, size, kit.select))
        if is_full:
            self.pynative_window.close(state)
        return is_full

    def scale(self, loss: Tensor) -> Tensor:
        """Return ``loss`` times the loss scale, in the loss's dtype: differentiate
        this, in any mode.
        """
        if not self.storage.has_scale:
            return loss
        return loss * ops.cast(self.loss_scale, loss.dtype)

    @property
    def loss_scale(self) -> Parameter:
        """The current loss scale, a float32 Parameter of shape (), in any mode, for
        ``sens`` say.
        """
        note_read(self.storage.scale_key)
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
        result: StepResult = self.storage.listener_calls.around(0, self.storage.result)
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
            ModuleNotFoundError: `progress` without rich.
        """
        micro_batches = kit.epoch(
            loader,
            self._end_epoch,
            carry=carry,
            progress=progress,
            see=self.storage.sizes.see,
        )
        self.storage.open_window_warning.epoch_begins(carry)
        return micro_batches

    def _end_epoch(self) -> None:
        self.flush()
        self.storage.open_window_warning.in_epoch = False

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
        return self.storage.listener_calls.add(listener)

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
        return self.storage.listener_calls.on_update(function)

    def __repr__(self) -> str:
        """Return the state in one line; waits for the device.
        ``print(optimizer.inner)`` shows the inner optimizer.
        """
        steps = self.options.steps
        if self.storage.size_varies:
            steps = self.storage.open_size()
        return kit.described(
            type(self).__name__,
            type(self.inner).__name__,
            self.options,
            self.storage.read(),
            steps,
        )

    def construct(
        self,
        gradients: Gradients,
        positional_weight: Weight = None,
        positional_loss: Loss = None,
        *,
        weight: Weight = None,
        loss: Loss = None,
    ) -> Tensor:
        if positional_weight is not None:
            is_alone = positional_loss is None and loss is None
            if is_alone and isinstance(positional_weight, Tensor):
                checks.require_certain_weight(positional_weight.dtype)
            weight = positional_weight
        if positional_loss is not None:
            loss = positional_loss
        return self.micro_batch(gradients, weight, loss)


class AccumulatingExperimentalOptimizer(AccumulatingOptimizer, optim.Optimizer):  # type: ignore[misc]
    """The same for a `mindspore.experimental.optim.Optimizer`, and an instance of that,
    so that its schedulers take it.
    """
