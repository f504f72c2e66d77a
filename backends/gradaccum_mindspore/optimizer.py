"""The wrapped optimizer: a `mindspore.nn.Optimizer` that runs its inner optimizer once
per window.

MindSpore compiles the method ``construct`` of a Cell, but never the method
``__call__``. So ``__call__`` contains the code for calls from Python, and ``construct``
contains the code for compiled programs. ``optimizer.flush`` and ``optimizer.discard``
are Cells (`Flush` and `Discard`), because both can be called from Python and from
compiled programs.

The wrapped optimizer calls the constructor of `mindspore.nn.Cell` instead of the
constructor of `mindspore.nn.Optimizer`, and gets every attribute that it lacks from the
inner optimizer. So both optimizers share one learning rate and one ``global_step``,
which counts updates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sized
from functools import partial
from typing import Any, TypeVar

from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore.experimental import optim

from gradaccum import StepResult, UsageError, kit, updates_in
from gradaccum.kit import Handle, Listener, Options, UntilWeight
from gradaccum_mindspore import checks
from gradaccum_mindspore.checks import Loss, Weight
from gradaccum_mindspore.extensions import ChangedRateWarning
from gradaccum_mindspore.gradient_sum import Gradients
from gradaccum_mindspore.loss_scale import NEVER, note_read, require_read
from gradaccum_mindspore.master_weights import Optimizer, put_masters_into
from gradaccum_mindspore.mindspore_private import (
    CellOfOnePhase,
    is_graph_mode,
    refuse_trace,
)
from gradaccum_mindspore.state import Storage
from gradaccum_mindspore.update import Update, require_no_scale, require_unwrapped
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
"""The names of attributes that must not be changed after wrapping, because compiled
code has already read them.
"""


class WindowCall(nn.Cell):  # type: ignore[misc]
    """The base class of `Flush` and `Discard`. Both can be called from Python and from
    compiled code.
    """

    def __init__(
        self, compiled_window: CompiledWindow, pynative_window: PyNativeWindow
    ) -> None:
        super().__init__(auto_prefix=False)
        self.compiled_window = compiled_window
        self.pynative_window = pynative_window


class Flush(WindowCall):
    """``optimizer.flush()``: close the open window, even if it is not full. If no
    window is open, the parameters do not change.

    ``optimizer.flush(denominator=n)`` divides the window's gradient sum by n instead of
    the window's weight. This requires ``steps=None`` and works only from Python.
    """

    def __call__(self, denominator: Weight = None) -> bool | Tensor:
        """Close the window from Python; return whether a window was open.

        Raises:
            ArgumentTypeError, ArgumentValueError: `denominator` is not a finite number
                > 0.
            UsageError: `denominator` is passed, but ``steps`` is not None or several
                workers share the window.
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
    """``optimizer.discard()``: drop the open window and its micro-batches."""

    def __call__(self) -> None:
        refuse_trace()
        self.pynative_window.discard()

    def construct(self) -> bool:
        return self.compiled_window.discard()


class MicroBatch(nn.Cell):  # type: ignore[misc]
    """Adds one micro-batch in compiled code: ``optimizer(gradients, weight, loss)``. In
    graph mode, this Cell is also called from Python. Such a call passes no keyword
    arguments, because a Cell does not accept them in graph mode.
    """

    def __init__(self, window: CompiledWindow) -> None:
        super().__init__(auto_prefix=False)
        self.window = window
        # Set this attribute, as `nn.Optimizer` does. Without it, MindSpore would treat
        # the gradients as constants and compile again at each call.
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


class AccumulatingOptimizer(CellOfOnePhase, nn.Optimizer):  # type: ignore[misc]
    """The optimizer that `gradaccum.wrap` returns for a `mindspore.nn.Optimizer`.

    ``optimizer(gradients, weight, loss)`` adds one micro-batch, and returns whether it
    closed a window (a bool, or a bool Tensor in compiled code). The optimizer works in
    PyNative mode, inside `mindspore.jit`, in graph mode, in
    `mindspore.nn.TrainOneStepCell` and in `mindspore.train.Model`.

    Args:
        inner: the optimizer to run once per window.
        options: the validated options. With ``master_weights``, the half-precision
            parameters of `inner` are replaced with float32 master weights, so
            differentiate with respect to this object's ``parameters``. If you change
            the model's weights, for example by loading or clipping them, the next
            update first copies the changed values into the master weights.
        name: a string that is included in the names of the Parameters that store the
            state. Two wrapped optimizers in one program need different names.
        data_parallel: True if all workers share each window. The constructor, the end
            of each window and ``flush`` are then collective operations, in which every
            worker must take part.
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
            # Keep the model's parameters, because users differentiate with respect to
            # them. Below, the inner optimizer's parameters are replaced with the master
            # weights.
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
                f"{name}: expected no assignment after wrapping, because compiled code"
                f" has already read the value; got {value!r} ({type(value).__name__})."
                " Wrap the optimizer again, or pass a schedule as steps=."
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
        """Add one micro-batch, from Python: ``optimizer(gradients, weight, loss)``.
        Return whether it closed a window.

        Args:
            gradients: a tuple or list in the order of ``self.parameters``, with None
                for a parameter without a gradient. If there is a loss scale, the
                gradients must be multiplied by the scale.
            positional_weight: `weight`, passed by position. If the weight is a
                floating-point Tensor or array and you pass no loss, use ``weight=``
                instead, because the weight could be mistaken for the loss.
            positional_loss: `loss`, passed by position after the weight.
            weight: the number of items in the micro-batch: a number or a one-element
                Tensor, >= 0. The default is 1.
            loss: the unscaled loss of the micro-batch: a number or a one-element
                Tensor. If all losses of a window are passed, ``result.loss`` is the
                window's loss.

        Raises:
            GradientError: the gradients differ from the parameters in number, shape or
                dtype.
            ArgumentTypeError, ArgumentValueError: `weight` is not a finite number >= 0,
                or the function passed as ``steps`` did not return an int >= 1.
            UsageError: the loss scale has never been read; the call is inside
                ``jit(capture_mode="trace")``; the window is full, because its update
                raised an error; or an exception left the window or its update partially
                written.
        """
        refuse_trace()
        for extension in self.storage.extensions:
            extension.micro_batch_given()
        require_read(self.storage.scale_key)
        if positional_weight is not None:
            if positional_loss is None and loss is None:
                checks.require_certain_weight(getattr(positional_weight, "dtype", None))
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
        self.storage.sizes.weight = weight_number
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
        """Return ``loss`` times the loss scale, in the loss's dtype. Differentiate the
        result instead of ``loss``. This works from Python and in compiled code.
        """
        if self.storage.scale_key == NEVER:
            return loss
        return loss * ops.cast(self.loss_scale, loss.dtype)

    @property
    def loss_scale(self) -> Parameter:
        """The current loss scale: a float32 Parameter of shape (), which you can pass
        as ``sens``, for example. It can be read from Python and in compiled code.

        Reading this property counts as scaling the loss, so an unscaled loss no longer
        raises an error. To log the scale, read ``result.loss_scale`` instead.
        """
        note_read(self.storage.scale_key)
        return self.storage.loss_scale

    @property
    def result(self) -> StepResult:
        """The result of the last call (a micro-batch, ``flush`` or ``discard``), as
        Python numbers. You can read it only from Python. Reading it also calls the
        listeners.

        If the optimizer has a loss scale, your training step must get the scale from
        ``loss_scale``, or call ``scale``. Otherwise, adding a micro-batch raises an
        error. Reading the scale from ``result`` does not prevent this error.

        Raises:
            UsageError: compiled code skipped a window, because the workers had
                different learning rates or were closing windows of different
                optimizers; an exception left the window partially written; or several
                windows have closed since the listeners were last called.
        """
        if self.compiled_window.workers is not None:
            self.compiled_window.workers.require_same_rates()
        result: StepResult = self.storage.listener_calls.around(0, self.storage.result)
        return result

    def epoch(
        self, loader: Iterable[M], *, carry: bool = False, progress: bool = False
    ) -> kit.Epoch[M]:
        """Iterate from Python over the micro-batches of a loader, and flush when the
        loader is exhausted: ``for x, y in opt.epoch(loader):``.

        If you leave the loop early, the window stays open. With several workers, each
        worker flushes once, when its own loader is exhausted. A `GradAccumWarning` is
        issued once if micro-batches differ in size but no weight is passed. In compiled
        code, different sizes are detected only if the program is compiled for each
        size. Another warning is issued once if an earlier loop was left early and its
        window is still open.

        Args:
            loader: an iterable over the micro-batches, such as a `mindspore.dataset`
                dataset.
            carry: True leaves the last window open for the next epoch.
            progress: True shows a progress bar. This requires the rich package.

        Raises:
            ArgumentTypeError: `loader` is not iterable, or `carry` or `progress` is not
                a bool.
            ModuleNotFoundError: `progress` is true, but rich is not installed.
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
        """Return the number of updates that the next `epochs` epochs over a loader will
        make. Use this number, for example, as the length of a schedule.

        Args:
            loader: an object with a length, or the number of micro-batches, an int >=
                0.
            epochs: the number of epochs, an int >= 0.

        Raises:
            ArgumentTypeError: `loader` has no length; or the number of updates is not
                known in advance, because ``steps`` does not define windows by the
                number of micro-batches.
            ArgumentValueError: `epochs` or the number of micro-batches is below 0.
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
        that closes, whether its update is applied or skipped.

        The listener is called from Python, at the end of the call that closed the
        window: a call of this optimizer, of ``flush`` or of
        `gradaccum_mindspore.TrainOneStepCell`. If one ``flush`` closes several windows,
        the listener is called after each of them. If you compile the step yourself,
        read ``result`` after each step. Reading it calls the listener, with NaN as
        ``weight`` and ``micro_batches``. If the listener raises an error, the call that
        closed the window raises the same error, although the update has already been
        made.

        Args:
            listener: a function that accepts a `gradaccum.watching.ClosedWindow`.

        Returns:
            A handle whose ``remove()`` removes the listener.

        Raises:
            ArgumentTypeError: `listener` is not callable.
        """
        return self.storage.listener_calls.add(listener)

    def on_update(self, function: Callable[[], object]) -> Handle:
        """Call `function`, without arguments, after each update.

        Use it for everything that has to change once per update, such as an average of
        the weights, a codebook or your own schedule. Code in your training loop could
        miss an update that is applied inside ``flush``. The function is not called for
        a skipped window. If you compile the step yourself, read ``result`` after each
        step. Reading it calls the function.

        Args:
            function: for example ``lambda: average.update(net)``.

        Returns:
            A handle whose ``remove()`` removes the function.

        Raises:
            ArgumentTypeError: `function` is not callable.
        """
        return self.storage.listener_calls.on_update(function)

    def __repr__(self) -> str:
        """Return a one-line description of the state. The call synchronizes with the
        device. ``print(optimizer.inner)`` shows the inner optimizer.
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
    """The wrapper for a `mindspore.experimental.optim.Optimizer`. The wrapper is also
    an instance of `mindspore.experimental.optim.Optimizer`, so that MindSpore's
    schedulers accept it.
    """

    def add_param_group(self, param_group: object) -> None:
        raise UsageError(
            "param_group: expected no new parameters after wrapping, because they have"
            " no gradient sum; got another group. Pass all groups to the constructor of"
            " the optimizer, and then wrap the optimizer."
        )
