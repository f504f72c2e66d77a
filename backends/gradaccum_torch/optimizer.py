"""The wrapped optimizer: a `torch.optim.Optimizer` that runs the inner one once per
window of micro-batches.

`Window` counts and closes; a `Strategy` stores the sum; a `GradWatch` notices outside
changes; `Update` runs the inner optimizer. A call that raises does so before anything
changed. Groups, state and defaults are the inner optimizer's own objects; the hooks are
this one's.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from functools import partial, wraps
from types import FunctionType, MethodType, TracebackType
from typing import TYPE_CHECKING, Any, Never, TypeVar, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gradaccum import GradAccumWarning, StepResult, UsageError, updates_in
from gradaccum.kit import (
    Epoch,
    Handle,
    Listener,
    Options,
    described,
    epoch,
    explain,
    require_weight,
)
from gradaccum_torch import update
from gradaccum_torch.checks import (
    known_window_size,
    place_of_attribute,
    require_loss,
    shared_step_error,
    step_argument_error,
)
from gradaccum_torch.grad_scaler import foreign_scaler_error, link_scaler
from gradaccum_torch.parameters import Group, Parameters
from gradaccum_torch.private import fsdp, names
from gradaccum_torch.saving import StateDict, load, require_no_open_window, save
from gradaccum_torch.sums.arithmetic import Versions
from gradaccum_torch.update import Loss, Update, rate_mark
from gradaccum_torch.window.watch import Allowed, require_no_gradients
from gradaccum_torch.window.window import Window
from gradaccum_torch.workers.interface import Workers
from gradaccum_torch.workers.workers import ALONE, workers_of

OptimizerState = Any
"""``optimizer.state``: a mapping from each parameter to what the optimizer keeps for
it.
"""
M = TypeVar("M")
_TORN = (
    "gradaccum: this worker's part of the window is lost, as the reduction of its large"
    " sums failed halfway. The window goes on without it; workers that lost no part"
    " keep theirs."
)
_FROM_SCALER = "grad_scale"
"""What ``scaler.step`` sets on an optimizer for the time of its step."""


@final
class AccumulatingOptimizer(torch.optim.Optimizer):
    """The optimizer that `gradaccum.wrap` returns, for the place of the one it wraps.

    ``loss.backward(); opt.step(); opt.zero_grad()`` stays as it was, in either order.
    In mid-window ``zero_grad`` keeps the partial sum, and ``step`` counts; the last
    ``step`` divides, clips, runs the inner optimizer and frees ``.grad``.

    Args:
        inner: the optimizer to run once per window.
        options: those of `gradaccum.wrap`, with ``accumulate_dtype`` as a torch dtype
            or None.
        workers: the workers that share a window.
        masters: the master weights by position, of a copied inner optimizer that has
            worked on them already.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        options: Options,
        workers: Workers,
        masters: Mapping[int, Tensor] | None = None,
    ) -> None:
        update.require_unwrapped(inner)
        require_no_gradients(
            [each for group in inner.param_groups for each in group["params"]]
        )
        # The base class would build groups and state of its own; of its attributes only
        # the tables of hooks are needed.
        self.__dict__.update(update.hook_tables())
        self._inner, self._options = inner, options
        self._parameters = Parameters(inner, options.master_weights, masters)
        self._scaler = link_scaler(options, self._parameters.device())
        self._window = Window(
            self._parameters,
            options,
            Update(self, inner, self._parameters),
            self._scaler,
            workers,
        )
        workers.take_part()
        self._loads: list[int] = []
        """The updates that each loaded state had. A list that grows: Lightning's
        proxies keep what is set on ``self``.
        """

    @property
    def result(self) -> StepResult:
        """The result of the last ``step``, ``flush`` or ``discard``, in Python numbers.

        Its ``loss`` is known if each micro-batch went through ``opt.backward``,
        ``opt.scale`` or a closure that returns it. With ``on_overflow="ignore"`` and
        losses on an accelerator this waits for the device. Over several workers it is
        inf from 2^135 on.
        """
        return self._window.result

    @property
    def master_weights(self) -> dict[int, Tensor]:
        """The float32 master of each half-precision parameter by its index, with
        ``master_weights=True``; the tensors themselves.
        """
        return self._parameters.masters_by_position()

    def add_listener(self, listener: Listener) -> Handle:
        """Call `listener` after each window that closes, applied or skipped; return a
        handle with ``remove()``.

        It is called when the ``step`` or ``flush`` that closed the window is through,
        or closes another one, and never for ``discard``. That call raises what the
        listener raises, at its end. Listeners are not part of a state, pickle or copy.

        Args:
            listener: a function of one `gradaccum.watching.ClosedWindow`, such as a
                `gradaccum.watching.JsonLines`.

        Raises:
            ArgumentTypeError: `listener` cannot be called.
        """
        return self._window.listeners.add(listener)

    def on_update(self, function: Callable[[], object]) -> Handle:
        """Call `function`, without arguments, after each update that is made.

        An average of the weights, a codebook, an own schedule: what moves once per
        update belongs here, as a window may also close inside ``flush``, and one
        ``flush`` may close several where workers hold different numbers of
        micro-batches. It is not called for a skipped window.

        Args:
            function: for example ``lambda: ema.update_parameters(model)``.

        Returns:
            A handle, whose ``remove()`` takes the function off.

        Raises:
            ArgumentTypeError: `function` cannot be called.
        """
        return self._window.listeners.on_update(function)

    def backward(
        self, loss: Tensor, weight: float | None = None, **kwargs: Argument
    ) -> None:
        """Run ``loss.backward(**kwargs)`` with the weight and the loss scale multiplied
        in.

        Several losses of one micro-batch: call `weigh` once, and then this for each,
        without a weight. A `GradAccumWarning` tells, once, of a second weight.

        Args:
            loss: scalar tensor, shape ``()``. It is not changed.
            weight: the micro-batch's number of items, >= 0; by default that of `weigh`,
                else 1. With 0 the micro-batch is counted and contributes nothing, not
                even NaN: there is no backward pass, or one of zeros where other workers
                wait for it.
            kwargs: those of `torch.Tensor.backward`.

        Raises:
            ArgumentTypeError, ArgumentValueError: `loss` is no tensor, `weight` no such
                number.
            UsageError: another loss of the same micro-batch had another weight; or
                several workers share the window, and ``create_graph`` is asked for; or
                other workers wait for a backward pass, and a `loss` of weight 0 has no
                graph.
        """
        if kwargs.get("create_graph"):
            self._window.workers.require_no_graph()
        self._window.backward(
            require_loss(loss),
            None if weight is None else require_weight(weight),
            kwargs,
        )

    def weigh(self, weight: float) -> None:
        """Give the micro-batch that the next ``step`` counts its weight, whoever runs
        the backward pass.

        So one ``loss.backward()`` of a summed loss serves several optimizers with
        ``reduction="sum_per_item"``: each divides by its own items.

        Args:
            weight: the number of items, >= 0.

        Raises:
            ArgumentTypeError, ArgumentValueError: `weight` is no such number.
            UsageError: a loss of the same micro-batch had another weight.
        """
        self._window.weigh(require_weight(weight))

    def scale(self, loss: Tensor) -> Tensor:
        """Return `loss` times the loss scale, for ``opt.scale(loss).backward()``; the
        weight is that of `weigh`, else 1.

        Args:
            loss: tensor of any shape, float dtype kept.

        Raises:
            ArgumentTypeError: `loss` is no tensor.
            UsageError: another loss of the same micro-batch had another weight.
        """
        return self._window.scale(require_loss(loss))

    def step(
        self, closure: Callable[[], Loss] | None = None, **misplaced: Never
    ) -> Loss:
        """Count the micro-batch whose gradient is in ``.grad``, and at the end of the
        window make the update.

        Args:
            closure: computes the loss of the micro-batch and its gradient, and is run
                once.
            misplaced: none: any other argument, such as a weight, is refused.

        Returns:
            What the closure returns, or None.

        Raises:
            UsageError: there was no backward pass since the last ``step``; something
                changed ``.grad``; or a plain ``backward()`` was used where weight or
                loss scale are needed. The window is as it was before the call.
            ArgumentTypeError: ``reduction="sum_per_item"``, and nothing gave the
                micro-batch its weight; or an argument is no closure.
        """
        if misplaced or not (closure is None or callable(closure)):
            raise step_argument_error(closure, misplaced)
        window = self._window
        loss = None if closure is None else window.evaluate(closure)
        if _FROM_SCALER in self.__dict__:
            return self._step_for_scaler()
        if window.add():
            window.reported(window.close)
        return loss

    def flush(self, *, denominator: float | None = None) -> None:
        """Close the open window now, dividing by what it holds; an empty one stays as
        it is.

        With ``module=`` or ``process_group=`` this is collective: this worker takes
        part in the windows of the others until they flush.

        Args:
            denominator: with ``steps=None``: divide the sum by this number, > 0, in
                place of the window's weight.

        Raises:
            ArgumentTypeError, ArgumentValueError: `denominator` is no such number, or
                windows close by themselves.
            UsageError: a micro-batch is under way (``backward`` without ``step``);
                something changed ``.grad``; another worker did not come in time; or
                `denominator` where several workers share the window.
        """
        self._window.reported(partial(self._window.flush, denominator))

    def epoch(
        self, loader: Iterable[M], *, carry: bool = False, progress: bool = False
    ) -> Epoch[M]:
        """Iterate over the micro-batches of a loader, and flush when it ends; ``break``
        or an error leaves the window open.

        A `GradAccumWarning` tells, once, of micro-batches of unequal size that have no
        weight.

        Args:
            loader: yields the micro-batches.
            carry: leave the last window open for the next pass.
            progress: show a progress bar; needs rich.

        Raises:
            ArgumentTypeError: `loader` is no iterable, or a flag no bool.
            MissingPackageError: `progress` without rich.
        """
        return epoch(
            loader,
            self.flush,
            carry=carry,
            progress=progress,
            see=self._window.sizes.see,
        )

    def updates_in(self, loader: Sized | int, epochs: int = 1) -> int:
        """Return the number of updates in `epochs` passes of `epoch` over a loader from
        here on: the length of a scheduler.

        Args:
            loader: has a length, or is its number of micro-batches, an int >= 0.
            epochs: the number of passes, an int >= 0.

        Raises:
            ArgumentTypeError: `loader` has no length; or windows end by weight or by
                ``flush``.
            ArgumentValueError: a number is below 0.
        """
        return updates_in(
            loader,
            self._options.steps,
            epochs=epochs,
            optimizer_step=self._window.updates,
            micro_step=self._window.micro_step,
        )

    def discard(self) -> None:
        """Forget the open window and the micro-batch under way: no update, nothing
        counted, the loss scale as it was.
        """
        self._window.discard()

    def regroup(self, workers: torch.nn.Module | dist.ProcessGroup | None) -> None:
        """Share the windows with other workers from here on, after one was lost or
        before one joins; collective among them.

        Each worker keeps its part of the open window, which the next end or ``flush``
        closes as the large batch of all parts. If some have closed a window in which
        the reduction failed on others, these take over the update: parameters, inner
        state, counters. So does a worker that joins.

        Args:
            workers: the process group of all that are there, each with a copy of the
                model; or a `DistributedDataParallel` module over it; None: this worker
                alone.

        Raises:
            ArgumentTypeError, ArgumentValueError: `workers` is none of these, or other
                workers gave other options.
            UsageError: workers hold shards of the model; the window of all was added up
                and its update raised: call ``flush`` or ``discard`` first; or a worker
                with an open window of its own is behind.
        """
        window, options = self._window, self._options
        held = window.workers.leave()
        is_module = isinstance(workers, torch.nn.Module)
        made = workers_of(
            self._inner,
            workers if is_module else None,
            options,
            process_group=None if is_module else ALONE if workers is None else workers,
        )
        if held == "torn":
            window.discard()
        window.regroup(made)
        made.take_part()
        fields = window.fields_to_save()
        has_own = held == "own" and fields.micro_step > 0
        closed = int(fields.optimizer_step + fields.skipped_windows)
        sent = made.catch_up(
            closed,
            has_own,
            lambda: save(window.between_windows(), self._parameters, self._inner, None),
        )
        if sent is not None:
            own = [
                {name: value for name, value in group.items() if name != "params"}
                for group in self._inner.param_groups
            ]
            self.load_state_dict(sent)
            if (
                held in ("kept", "torn")
                # Its schedulers are one update behind, and move the rates by
                # themselves.
            ):
                self._loads.pop()
                for group, rates in zip(self._inner.param_groups, own, strict=True):
                    group.update(rates)
                for scheduler in window.schedulers:
                    scheduler.follow()
        elif held == "torn":
            warnings.warn(_TORN, GradAccumWarning, stacklevel=2)

    def whole_window(self) -> WholeWindow:
        """Return the next window for one call to fill, such as
        `gradaccum_torch.backward`.
        """
        return WholeWindow(
            self._window, self._parameters, self._options, self._window.workers.group
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear ``.grad`` between two windows; in mid-window keep the partial sum.

        Raises:
            UsageError: it comes between ``backward`` and ``step`` in mid-window, where
                the micro-batch is part of the sum already.
        """
        self._window.zero_grad(set_to_none)

    def add_param_group(self, param_group: Group) -> None:
        """Add a group, also in mid-window; see `torch.optim.Optimizer.add_param_group`.

        Raises:
            ArgumentValueError: workers share the window, and they do not train a
                parameter of the group together.
            UsageError: ``.grad`` of a parameter of the group holds numbers.
        """
        given = param_group["params"]
        if self._window.workers.several and not isinstance(given, set):
            given = param_group["params"] = (
                [given] if isinstance(given, Tensor) else list(given)
            )
            self._window.workers.require_parameters(
                [each[1] if isinstance(each, tuple) else each for each in given]
            )
        self._inner.add_param_group(param_group)
        try:
            if not self._window.is_micro_batch_begun:
                require_no_gradients(self._inner.param_groups[-1]["params"])
        except UsageError:
            self._inner.param_groups.pop()
            raise
        self._window.groups_changed()

    def state_dict(self) -> StateDict:
        """Return the inner optimizer's ``state_dict`` with the open window under the
        key ``"gradaccum"``.

        As in torch, the tensors are the live ones: save or deep-copy them before
        training resumes.

        Raises:
            UsageError: a micro-batch is under way; something changed ``.grad``; or a
                window is open, and the caller is ``get_optimizer_state_dict`` of
                `torch.distributed.checkpoint`.
        """
        caller = names.model_state_caller("_get_optim_state_dict", 2)
        for before in update.save_pre_hooks(self).values():
            before(self)
        state_dict = save(self._window.save(), self._parameters, self._inner, caller)
        for after in update.save_post_hooks(self).values():
            replaced = after(self, state_dict)
            state_dict = state_dict if replaced is None else replaced
        return state_dict

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Restore a state from `state_dict`, mid-window included; a bare optimizer's
        state is an empty window.

        Between two windows the saved loss scale is kept only if it is dynamic in both
        optimizers.

        Raises:
            CheckpointError: the state is of other parameters, or of an open window
                under other options; nothing was changed.
        """
        state_dict = state_dict.copy()
        for before in update.load_pre_hooks(self).values():
            replaced = before(self, state_dict)
            state_dict = state_dict if replaced is None else replaced
        window = self._window
        window.restore(
            load(
                state_dict,
                window.sum_dtypes,
                self._parameters,
                self._inner,
                window.resumed,
            )
        )
        self._loads.append(window.updates)
        for after in update.load_post_hooks(self).values():
            after(self)

    @property
    def param_groups(self) -> list[Group]:
        """The inner optimizer's groups, the same list.

        Raises:
            UsageError: to a `torch.amp.GradScaler` that was not given as
                ``loss_scale=``, before it touches a gradient.
        """
        # Nothing else gives the scaler away: the kernel that unscales leaves the
        # version of a gradient as it was.
        if (caller := names.unscaling_caller(2)) is None:
            return self._inner.param_groups
        if self._scaler is None:
            raise foreign_scaler_error()
        return self._scaler.groups_for(caller)

    @param_groups.setter
    def param_groups(self, groups: list[Group]) -> None:
        self._inner.param_groups = groups

    @property
    def state(self) -> OptimizerState:
        """The inner optimizer's state by parameter, the same mapping."""
        return (
            self._inner.state
            if names.model_state_caller("_init_optim_state", 2) is None
            else self._initialized_state()
        )

    @state.setter
    def state(self, state: OptimizerState) -> None:
        self._inner.state = state

    @property
    def defaults(self) -> dict[str, Any]:
        """The inner optimizer's defaults."""
        return self._inner.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self._inner.defaults = defaults

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The inner optimizer. Its own ``step`` raises for as long as this one
        lives.
        """
        return self._inner

    if not TYPE_CHECKING:  # A type checker shall know a misspelt name.

        def __getattr__(self, name: str) -> Any:
            # Underscored names belong to one object: the inner one's would describe the
            # wrong optimizer.
            if name.startswith("_"):
                raise AttributeError(
                    f"{type(self).__name__!r} object has no attribute {name!r}"
                )
            try:
                value = getattr(self._inner, name)
            except AttributeError as error:
                if (place := place_of_attribute(name)) is None:
                    raise
                raise AttributeError(
                    f"{type(self).__name__!r} object has no attribute {name!r}. {place}"
                ) from error
            return (
                forwarded(value, name, self._window, self._parameters)
                if isinstance(value, (MethodType, FunctionType))
                else value
            )

    def __repr__(self) -> str:
        # The class and the options; ``print(opt.optimizer)`` shows the groups. A
        # GradScaler has the scale on its device: this waits for it.
        state = self._window.fields_to_save()
        size = (
            self._window.size
            if state.micro_step
            else known_window_size(self._options, state.optimizer_step)
        )
        return described(
            type(self).__name__, type(self._inner).__name__, self._options, state, size
        )

    def __getstate__(self) -> dict[str, Any]:
        self._window.workers.require_no_copy()
        state = {"inner": self._inner, "options": self._options, "loads": self._loads}
        return {
            **state,
            "masters": self._parameters.masters_by_position(),
            "window": self._window.pickled(),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        inner, options = state["inner"], state["options"]
        AccumulatingOptimizer.__init__(
            self,
            inner,
            options,
            workers_of(inner, None, options, process_group=ALONE),
            state["masters"],
        )
        self._window.unpickle(state["window"])
        self._loads.extend(state["loads"])

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """The flag by which ``scaler.step`` calls ``step`` at once, without unscaling
        and without waiting for the device.
        """
        return self._scaler is not None

    def _step_for_scaler(self) -> None:
        if self._scaler is None:
            raise foreign_scaler_error()
        self._window.note_scaled()
        with self._scaler.stepping(self):
            if self._window.add():
                self._window.reported(self._window.close)

    def _initialized_state(self) -> OptimizerState:
        require_no_open_window(self.result.micro_step)
        with self._parameters.masters_in_place(), self._window.update.running():
            names.initialize_state(self._inner)
        # An empty state, as of an inner optimizer without one, would have torch make a
        # step of this one.
        return {"initialized": True}


# Methods that only the inner optimizer has, called on the wrapped one.
#
# Some switch the weights (schedulefree's ``eval`` and ``train``); with master weights,
# the model then gets the rounded result. Some make an update of their own (SAM's
# ``first_step``): from a part of a window's gradient, and uncounted. Such a method
# looks at ``.grad``, whatever its name is. It is refused as it looks, before it has
# changed anything.


Argument = Any
"""What a method of torch or of the inner optimizer takes: handed through, whatever it
is.
"""

_GRAD: Any = Tensor.grad
_TOUCHES = (_GRAD.__get__, _GRAD.__set__, _GRAD.__delete__)


class _Watch(TorchFunctionMode):
    """Refuses to read or write the ``.grad`` of a parameter while it holds a part of a
    window.

    With ``separate_sums=True`` only the user knows whether ``.grad`` holds such a part:
    there it is refused always.
    """

    def __init__(self, method: str, window: Window, parameters: Parameters) -> None:
        super().__init__()
        self._method, self._window = method, window
        self._ids = {
            id(tensor)
            for tensor in (
                *parameters.unique(),
                *parameters.masters_by_position().values(),
            )
        }

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if (
            func in _TOUCHES
            and id(args[0]) in self._ids
            and (self._window.is_under_way() or self._holds_users(args[0]))
        ):
            raise _own_update_error(self._method)
        return func(*args, **(kwargs or {}))

    def _holds_users(self, parameter: Tensor) -> bool:
        return (
            self._window.strategy.watch.allowed is Allowed.ALL
            and parameter.grad is not None
        )


def forwarded(
    method: Callable[..., Any], name: str, window: Window, parameters: Parameters
) -> Callable[..., Any]:
    """Wrap a `method` of the inner optimizer so that it raises if it touches ``.grad``
    while a window is under way.
    """

    @wraps(method)
    def call(*args: Argument, **kwargs: Argument) -> Any:
        with parameters.published(), _Watch(name, window, parameters):
            return method(*args, **kwargs)

    return call


def _own_update_error(method: str) -> UsageError:
    expected = (
        "a method that leaves .grad alone while a window is open, or a call between two"
        " windows"
    )
    found = (
        "one that reads or writes .grad, which holds a part of the window's gradient,"
        " not yet divided"
    )
    fix = (
        f"An update of its own needs a window of its own: make {method} the step() of a"
        " small torch.optim.Optimizer and wrap that one too (RECIPES.md of"
        " gradaccum_torch, An optimizer with two updates). The window is as it was."
    )
    return explain(UsageError, f"{method}()", expected=expected, found=found, fix=fix)


class WholeWindow:
    """A window that one call fills and closes: inside its ``with`` block the
    micro-batches of the call are counted.

    If the block raises, the window is forgotten, and every ``.grad`` holds what it held
    before.
    """

    def __init__(
        self,
        window: Window,
        parameters: Parameters,
        options: Options,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        self.process_group = process_group
        self._window, self._parameters, self.options = window, parameters, options
        self._before: list[tuple[Tensor, Tensor]] = []
        self._sharded = any(map(names.is_sharded, parameters.unique()))
        self._parts: list[int] = []
        """Those that were updated, which cannot be undone."""

    def __enter__(self) -> WholeWindow:
        # Here: once entered, an error makes the window forgotten, and the update that
        # raised with it.
        self._window.update.require_whole()
        if self._window.is_under_way():
            fix = (
                "Call opt.flush() or opt.discard() first: this call makes a window of"
                " its own."
            )
            raise explain(
                UsageError,
                "optimizer",
                expected="one between two windows",
                found="one with an open window",
                fix=fix,
            )
        with_gradients = ((each, each.grad) for each in self._parameters.unique())
        self._before.extend(
            (each, gradient)
            for each, gradient in with_gradients
            if gradient is not None
        )
        # zero_grad(set_to_none=False) leaves zeros, into which autograd adds; anything
        # else would count as a part of the window.
        if any(names.holds_numbers(gradient) for _, gradient in self._before):
            fix = "Call opt.zero_grad() first: the window is this call's batch alone."
            raise explain(
                UsageError,
                ".grad",
                expected="no gradients from before",
                found="gradients",
                fix=fix,
            )
        self._window.strategy.watch.reset()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            return
        self._window.discard()
        with torch.no_grad():
            for parameter, gradient in self._before:
                parameter.grad = gradient.zero_()
        self._window.strategy.watch.reset()
        if self._parts:
            self._window.update.leave_half_made()

    @contextmanager
    def adding(self) -> Iterator[None]:
        """Add what backward passes inside the block deliver to the sum: the
        micro-batches that they are of are counted already.
        """
        strategy = self._window.strategy
        with strategy.watch.unwatched():
            yield
        strategy.load(strategy.release())

    def part(self, number: int, belongs: Callable[[Tensor], bool]) -> None:
        """Update the parameters that `belongs` is true of, whose sum is complete, and
        free it; the window stays open for the others.
        """
        before, others = (
            self._numbers(),
            Versions(each for each in self._parameters.unique() if not belongs(each)),
        )
        self._parts.append(number)
        self._window.close_part(number, belongs)
        moved = {
            name
            for old, new in zip(before, self._numbers(), strict=True)
            for name, _ in new.items() - old.items()
        }
        if moved or others.moved():
            raise shared_step_error(sorted(moved) or ["parameters without a gradient"])

    def _numbers(self) -> list[dict[str, object]]:
        numbers = int, float, Tensor
        return [
            {
                name: rate_mark(each)
                for name, each in group.items()
                if isinstance(each, numbers)
            }
            for group in self._parameters.groups()
        ]

    @property
    def parameters(self) -> set[int]:
        return set(map(id, self._parameters.unique()))

    def unsharded(self) -> set[int]:
        """Return the ids of the whole parameters that FSDP2 gathered in the last
        forward pass.
        """
        if not self._sharded:
            return set()
        return {
            id(whole)
            for unit in fsdp.units_holding(self._parameters.unique())
            for _, whole in unit.whole_parameters()
        }

    def bound_to_micro_batches(self) -> list[str]:
        """Return the options that look at single micro-batches, or at the window's end
        alone.
        """
        options, workers = self.options, self._window.workers
        given = {
            "separate_sums": options.separate_sums,
            "gradient_sync": workers.strategy is not None,
            "norm_group": workers.stages is not None,
        }
        return [f"{name}=" for name, is_given in given.items() if is_given]

    def begin_weightless(self) -> None:
        """Prepare for a backward pass that delivers a part of what is counted already:
        no weight is added, the scale holds.
        """
        self._window.begin_weightless()

    @property
    def arrived(self) -> bool:
        """True if autograd has delivered something since the last micro-batch was
        counted.
        """
        return self._window.is_micro_batch_begun

    def scale(self) -> float:
        """Return the current loss scale; may wait for the device."""
        return float(self._window.fields_to_save().loss_scale)
