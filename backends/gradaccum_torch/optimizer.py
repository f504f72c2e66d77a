"""The wrapped optimizer: a `torch.optim.Optimizer` that runs the inner optimizer once
per window of micro-batches.

`Window` counts the micro-batches and closes the window. The ``param_groups``, ``state``
and ``defaults`` of the wrapped optimizer are the inner optimizer's own objects. The
wrapped optimizer's hooks are separate from the inner optimizer's hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sized
from functools import wraps
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any, TypeVar, final

import torch
from torch import Tensor

from gradaccum import StepResult, UsageError, updates_in
from gradaccum.kit import (
    Epoch,
    Handle,
    Listener,
    Options,
    described,
    epoch,
    require_weight,
)
from gradaccum_torch import saving
from gradaccum_torch.arithmetic import is_zero
from gradaccum_torch.grad_scaler import groups_for_a_scaler, link_scaler
from gradaccum_torch.master_weights import Group, MasterWeights
from gradaccum_torch.saving import StateDict
from gradaccum_torch.torch_private.names import is_called_by_model_state
from gradaccum_torch.update import Update, hook_tables, hooks_of, require_unwrapped
from gradaccum_torch.whole_window import WholeWindow
from gradaccum_torch.window import Window
from gradaccum_torch.workers.interface import Workers

M = TypeVar("M")


@final
class AccumulatingOptimizer(torch.optim.Optimizer):
    """The optimizer that `gradaccum.wrap` returns. Use it instead of the optimizer that
    you passed to `gradaccum.wrap`.

    A loop of ``loss.backward(); opt.step(); opt.zero_grad()`` works unchanged, and
    ``zero_grad`` may also come first. In the middle of a window, ``zero_grad`` keeps
    the partial sum, and ``step`` counts the micro-batch. The last ``step`` of a window
    divides and clips the sum, runs the inner optimizer and frees ``.grad``.

    Args:
        inner: the optimizer that runs once per window.
        options: the options of `gradaccum.wrap`, with ``accumulate_dtype`` as a torch
            dtype or None.
        workers: the workers that share a window.
        masters: a mapping from parameter indices to existing master weights. It is
            passed if `inner` is a copied or unpickled optimizer that already used
            master weights.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        options: Options,
        workers: Workers,
        masters: Mapping[int, Tensor] | None = None,
    ) -> None:
        require_unwrapped(inner)
        if masters is None:
            for group in inner.param_groups:
                require_no_gradients(group["params"])
        # Do not call the constructor of the base class, because it would create new
        # groups and a new state. Create only the attributes that store hooks.
        self.__dict__.update(hook_tables())
        self._inner = inner
        self._options = options
        master_weights = MasterWeights(inner, options.master_weights, masters)
        self._scaler = link_scaler(options, master_weights.parameters())
        update = Update(self, master_weights)
        self._window = Window(master_weights, options, update, self._scaler, workers)
        workers.take_part()

    def backward(
        self, loss: Tensor, weight: float | None = None, **kwargs: Any
    ) -> None:
        """Run ``loss.backward(**kwargs)``, with the gradient multiplied by the loss
        scale and, with ``reduction="mean"``, by the weight.

        If a micro-batch has several losses, call `weigh` once, and then call this
        method for each loss, without a weight. A `GradAccumWarning` is issued once if
        you pass a weight again with the second loss.

        Args:
            loss: scalar tensor, shape ``()``. It is not changed.
            weight: the number of items in the micro-batch, >= 0. The default is the
                weight passed to `weigh`, or 1 if `weigh` was not called. A micro-batch
                with weight 0 is counted, but contributes nothing, not even NaN. Its
                backward pass runs only if other workers wait for it. In that case the
                backward pass produces zeros.
            kwargs: the arguments of `torch.Tensor.backward`.

        Raises:
            ArgumentTypeError, ArgumentValueError: `weight` is not a number >= 0.
            UsageError: a different weight was already given for this micro-batch; the
                loss was multiplied by ``scaler.scale``; or the workers are already
                reducing the window's gradients.
        """
        if weight is not None:
            weight = require_weight(weight)
        self._window.backward(loss, weight, kwargs)

    def weigh(self, weight: float) -> None:
        """Set the weight of the current micro-batch, which the next ``step()`` will
        count.

        You can call ``weigh`` without calling this optimizer's ``backward``. For
        example, several optimizers with ``reduction="sum_per_item"`` can share a single
        ``loss.backward()`` of a summed loss. If you call ``weigh`` on each optimizer,
        each optimizer divides by its own number of items.

        With ``reduction="mean"``, the gradient has to be multiplied by the weight.
        ``backward`` and ``scale`` do this by multiplying the loss by the weight and the
        loss scale. If you clip ``.grad`` yourself, multiply the maximum norm by both
        numbers, because ``.grad`` contains the multiplied gradient.

        Args:
            weight: the number of items, >= 0.

        Raises:
            ArgumentTypeError, ArgumentValueError: `weight` is not a number >= 0.
            UsageError: a different weight was already given for this micro-batch.
        """
        self._window.weigh(require_weight(weight))

    def scale(self, loss: Tensor) -> Tensor:
        """Return `loss` multiplied by the loss scale and, with ``reduction="mean"``, by
        the micro-batch's weight, for use in ``opt.scale(loss).backward()``. The weight
        is 1 unless you called `weigh`. A weight of 0 always multiplies `loss` by 0.

        Args:
            loss: tensor of any shape; its float dtype is kept.

        Raises:
            ArgumentTypeError: with ``reduction="sum_per_item"``, no weight was passed
                for the micro-batch.
            UsageError: `loss` was multiplied by ``scaler.scale``.
        """
        return self._window.scale(loss)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Count the micro-batch whose gradient is in ``.grad``, and apply the update at
        the end of the window.

        Args:
            closure: a function that computes the loss of the micro-batch and its
                gradient. It is called once.

        Returns:
            The return value of the closure, or None.

        Raises:
            UsageError: there was no backward pass since the last ``step``; other code
                has changed ``.grad``; or the gradient must be multiplied by a weight or
                a loss scale, but comes from a plain ``backward()`` or an assignment to
                ``.grad``. The window is unchanged.
            ArgumentTypeError: with ``reduction="sum_per_item"``, no weight was passed
                for the micro-batch.
        """
        window = self._window
        loss = None
        if closure is not None:
            loss = window.evaluate(closure)
        if "grad_scale" in self.__dict__:
            self._step_for_scaler()
        elif window.add_micro_batch():
            with window.listeners.settled():
                window.close()
        return loss

    def _step_for_scaler(self) -> None:
        """Count the micro-batch when the user calls ``scaler.step(opt)``. The loss
        scale is changed later, when the user calls ``scaler.update()``.
        """
        window = self._window
        scaler = self._scaler
        assert scaler is not None
        scaler.stepping_optimizer = self
        try:
            if window.add_micro_batch():
                with window.listeners.settled():
                    window.close()
            else:
                scaler.prepare_update(window.state, overflow=False)
        except BaseException:
            # scaler.step deletes ``grad_scale`` and ``found_inf`` only if it ends
            # without an error. Delete them now, so that a later step() without the
            # scaler does not find them.
            vars(self).pop("grad_scale", None)
            vars(self).pop("found_inf", None)
            if not window.state.micro_step:
                scaler.write(window.state)
            raise
        finally:
            scaler.stepping_optimizer = None

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """True if ``scaler.step`` should call ``step`` directly, without first
        unscaling the gradients and waiting for the device.
        """
        return self._scaler is not None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear ``.grad`` between two windows. In the middle of a window, keep the
        partial sum.

        Raises:
            UsageError: the call was made in the middle of a window, after ``backward``
                and before ``step``. At that point the micro-batch's gradient is already
                part of the sum.
        """
        self._window.zero_grad(set_to_none)

    @property
    def result(self) -> StepResult:
        """The result of the last ``step``, ``flush`` or ``discard``, as Python numbers.

        ``result.loss`` is NaN unless the loss of each micro-batch was passed to
        ``opt.backward`` or ``opt.scale``, or returned by a closure. If the losses are
        on an accelerator, reading the result waits for the device.
        """
        return self._window.result

    def flush(self, *, denominator: float | None = None) -> None:
        """Close the open window now. Its gradient sum is divided by the weight of the
        micro-batches counted so far. If no window is open, nothing changes.

        With ``module=`` or ``process_group=``, this call is collective. Unless the
        module is sharded, this worker then contributes zeros to the other workers'
        windows, and applies their updates, until all workers have called ``flush``.

        Args:
            denominator: a number > 0, by which the sum is divided instead of the
                window's weight. It is allowed only with ``steps=None``.

        Raises:
            ArgumentTypeError, ArgumentValueError: `denominator` is not a number > 0.
            UsageError: a micro-batch is not finished (``backward`` without ``step``);
                other code has changed ``.grad``; the reduction over the workers failed
                or timed out; or `denominator` was passed although ``steps`` is not None
                or several workers share the window.
        """
        window = self._window
        # Step the schedulers that the user calls after every micro-batch, because their
        # next call comes after the next micro-batch. If that micro-batch closes a
        # window too, this call would be their only step for two updates.
        schedulers = [each for each in window.schedulers if each.is_called_each_time()]
        followers = [each for each in window.schedulers if each.is_called_at_updates()]
        with window.listeners.settled():
            window.flush(followers, denominator)
        for scheduler in schedulers:
            scheduler.follow()

    def discard(self) -> None:
        """Discard the open window and the current micro-batch. No update is applied, no
        counter increases, and the loss scale does not change.
        """
        self._window.discard()

    def add_listener(self, listener: Listener) -> Handle:
        """Call `listener` each time a window closes, whether its update was applied or
        skipped. Return a handle with ``remove()``.

        The listener is called at the end of the ``step`` or ``flush`` that closed the
        window. If a ``flush`` closes several windows, the listener is called after each
        of them. ``discard`` does not call the listener. If the listener raises an
        error, the ``step`` or ``flush`` raises the same error after all its other work
        is done. State dicts, pickles and copies of the optimizer contain no listeners.

        Args:
            listener: a function that takes a `gradaccum.watching.ClosedWindow`.

        Raises:
            ArgumentTypeError: `listener` is not callable.
        """
        return self._window.listeners.add(listener)

    def on_update(self, function: Callable[[], object]) -> Handle:
        """Call `function`, without arguments, after each update.

        Use this for anything that must happen once per update, such as updating an
        average of the weights, a codebook or your own schedule. `function` is also
        called for updates inside ``flush``, which may close several windows if the
        workers have different numbers of micro-batches. `function` is not called for
        a skipped window.

        Args:
            function: for example ``lambda: ema.update_parameters(model)``.

        Returns:
            A handle. Call its ``remove()`` to stop the calls.

        Raises:
            ArgumentTypeError: `function` is not callable.
        """
        return self._window.listeners.on_update(function)

    def epoch(
        self, loader: Iterable[M], *, carry: bool = False, progress: bool = False
    ) -> Epoch[M]:
        """Iterate over the micro-batches of a loader, and call ``flush`` when the
        loader is exhausted. If the loop ends early, through a ``break`` or an error,
        the window stays open.

        A `GradAccumWarning` is issued once if micro-batches have unequal sizes and you
        pass no weights.

        Args:
            loader: yields the micro-batches.
            carry: if True, leave the last window open for the next epoch.
            progress: if True, show a progress bar. Requires the rich package.

        Raises:
            ArgumentTypeError: `loader` is not iterable, or a flag is not a bool.
            ModuleNotFoundError: `progress` is True, and rich is not installed.
        """
        see = self._window.sizes.see
        return epoch(loader, self.flush, carry=carry, progress=progress, see=see)

    def updates_in(self, loader: Sized | int, epochs: int = 1) -> int:
        """Return the number of updates in the next `epochs` passes over a loader,
        assuming that each pass uses the method `epoch`. You can use this number as the
        length of a learning-rate schedule.

        Args:
            loader: a loader with a length, or its number of micro-batches, an int >= 0.
            epochs: the number of passes, an int >= 0.

        Raises:
            ArgumentTypeError: `loader` has no length; or ``steps`` defines windows by
                total weight or is None.
            ArgumentValueError: a number is below 0.
        """
        return updates_in(
            loader,
            self._options.steps,
            epochs=epochs,
            optimizer_step=self._window.updates,
            micro_step=int(self._window.state.micro_step),
        )

    def whole_window(self) -> WholeWindow:
        """Return a context manager for code that processes a whole window in one call,
        as `gradaccum_torch.backward` does.
        """
        return WholeWindow(self._window)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The inner optimizer. Calling its ``step`` directly raises an error while the
        wrapper exists.
        """
        return self._inner

    @property
    def master_weights(self) -> dict[int, Tensor]:
        """With ``master_weights=True``, the float32 master weight of each
        half-precision parameter, keyed by the parameter's index. The tensors are not
        copied.
        """
        return self._window.masters.by_index()

    @property
    def param_groups(self) -> list[Group]:
        """The inner optimizer's ``param_groups``: the same list, not a copy.

        Raises:
            UsageError: the caller is a `torch.amp.GradScaler` that was not passed as
                ``loss_scale=``. The error is raised before the scaler changes a
                gradient.
        """
        groups = groups_for_a_scaler(self._scaler)
        return self._inner.param_groups if groups is None else groups

    @param_groups.setter
    def param_groups(self, groups: list[Group]) -> None:
        self._inner.param_groups = groups

    @property
    def state(self) -> Any:
        """The inner optimizer's ``state``, keyed by parameter: the same mapping, not a
        copy.

        Raises:
            UsageError: the caller is `torch.distributed.checkpoint.state_dict`, which
                would not save the open window.
        """
        if is_called_by_model_state():
            raise UsageError(
                "torch.distributed.checkpoint.state_dict: expected an optimizer with"
                " only per-parameter state; got a wrapped optimizer, whose window and"
                " master weights would not be saved. Call get_state_dict(model,"
                " opt.optimizer) between two windows, and save"
                ' opt.state_dict()["gradaccum"] together with the result (see'
                " DISTRIBUTED.md of gradaccum_torch)."
            )
        return self._inner.state

    @state.setter
    def state(self, state: Any) -> None:
        self._inner.state = state

    @property
    def defaults(self) -> dict[str, Any]:
        """The inner optimizer's defaults."""
        return self._inner.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self._inner.defaults = defaults

    if not TYPE_CHECKING:  # Let type checkers report misspelt names.

        def __getattr__(self, name: str) -> Any:
            # Do not return the inner optimizer's attributes whose names begin with an
            # underscore. Their values describe the inner optimizer, and would be wrong
            # for the wrapper.
            if name.startswith("_"):
                raise AttributeError(name)
            value = getattr(self._inner, name)
            masters = self._window.masters
            is_method = isinstance(value, (MethodType, FunctionType))
            return on_masters(value, masters) if is_method else value

    def add_param_group(self, param_group: Group) -> None:
        """Add a parameter group, as `torch.optim.Optimizer.add_param_group` does. You
        may call this method in the middle of a window.

        Raises:
            ArgumentValueError: several workers share the window, and not all of them
                train every parameter of the group.
            UsageError: ``.grad`` of a parameter of the group already contains a
                gradient.
        """
        self._inner.add_param_group(param_group)
        parameters = self._inner.param_groups[-1]["params"]
        try:
            self._window.workers.add_parameters(parameters)
            if not self._window.has_new_gradient:
                require_no_gradients(parameters)
            self._window.parameters_changed()
        except Exception:
            self._inner.param_groups.pop()
            raise

    def state_dict(self) -> StateDict:
        """Return the inner optimizer's ``state_dict``, with the open window stored
        under the key ``"gradaccum"``.

        As in torch, the tensors are not copied: save or deep-copy them before training
        continues.

        Raises:
            UsageError: a micro-batch is not finished, or other code has changed
                ``.grad``.
        """
        for hook in hooks_of(self, "state_dict_pre"):
            hook(self)
        state_dict = saving.save(self._window)
        for hook in hooks_of(self, "state_dict_post"):
            new_state_dict = hook(self, state_dict)
            state_dict = state_dict if new_state_dict is None else new_state_dict
        return state_dict

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Restore what `state_dict` returned, including an open window. If the state
        comes from an optimizer that is not wrapped, no window is open afterwards.

        The saved loss scale is restored too if the state contains an open window, or if
        the saved scale and the scale of this optimizer are both dynamic. Otherwise,
        this optimizer uses the loss scale that was passed to `gradaccum.wrap`.

        Raises:
            CheckpointError: the saved state belongs to different parameters, or
                contains an open window with different options. The error is raised
                before anything is changed.
        """
        state_dict = dict(state_dict)
        for hook in hooks_of(self, "load_state_dict_pre"):
            new_state_dict = hook(self, state_dict)
            state_dict = state_dict if new_state_dict is None else new_state_dict
        saving.load(self._window, state_dict)
        for scheduler in self._window.schedulers:
            scheduler.optimizer_loaded()
        for hook in hooks_of(self, "load_state_dict_post"):
            hook(self)

    def __getstate__(self) -> dict[str, Any]:
        self._window.require_savable()
        return {
            "inner": self._inner,
            "options": self._options,
            "masters": self._window.masters.by_index(),
            "window": saving.entry_of(self._window),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        AccumulatingOptimizer.__init__(
            self, state["inner"], state["options"], Workers(), state["masters"]
        )
        entry = state["window"]
        self._window.restore(saving.state_in(entry), entry["sums"], entry)

    def __repr__(self) -> str:
        # Show the class and the options. To see the groups, use
        # ``print(opt.optimizer)``. If the scale comes from a GradScaler, this method
        # may wait for the device.
        return described(
            type(self).__name__,
            type(self._inner).__name__,
            self._options,
            self._window.current_state(),
            self._window.current_size(),
        )


def on_masters(method: Callable[..., Any], masters: MasterWeights) -> Any:
    """Return a function that calls `method` of the inner optimizer on the float32
    master weights, and then writes the rounded master weights into the model. This is
    needed for methods that change the weights, such as ``eval`` and ``train`` of
    schedulefree's optimizers.
    """
    if not masters.masters:
        return method

    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        with masters.work_on_masters():
            return method(*args, **kwargs)

    return call


def require_no_gradients(parameters: Iterable[Tensor]) -> None:
    """Raise if any of `parameters` has a nonzero ``.grad``, because this gradient would
    become part of the next update.
    """
    for parameter in parameters:
        if parameter.grad is not None and not is_zero(parameter.grad):
            raise UsageError(
                ".grad: expected parameters without gradients when they are added to a"
                " wrapped optimizer; got gradients from earlier backward passes or from"
                " another optimizer's window. Set .grad to None on these parameters"
                " first."
            )
