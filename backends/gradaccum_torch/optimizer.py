"""The wrapped optimizer: a `torch.optim.Optimizer` that runs the inner one once per window of micro-batches.

These are the calls that a user makes. `Window` counts and closes; a `Strategy` stores the sum; `Sentinels` notice outside changes; `Update`
runs the inner optimizer. A call that raises does so before anything changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, final

import torch
from torch import Tensor

from gradaccum import StepResult
from gradaccum.kit import Handle, Listener, Options, described, require_weight
from gradaccum_torch.attempt import StepReturn
from gradaccum_torch.checkpoint import Loads, load, save
from gradaccum_torch.checks import known_window_size
from gradaccum_torch.closure import Loss, is_plain, needs_closure, note_missing_closure
from gradaccum_torch.delegating import DelegatingOptimizer, OptimizerState
from gradaccum_torch.entry import StateDict
from gradaccum_torch.forwarding import Argument, forwarded
from gradaccum_torch.grad_scaler import foreign_scaler_error, link_scaler
from gradaccum_torch.listening import NOBODY, Listening
from gradaccum_torch.loss import require_loss
from gradaccum_torch.masters import Group, Parameters
from gradaccum_torch.torch_private import LocalVariables, initialize_state
from gradaccum_torch.update import Update
from gradaccum_torch.whole_window import WholeWindow
from gradaccum_torch.window import Window
from gradaccum_torch.workers import Workers, workers_of

_FROM_SCALER = "grad_scale"
"""What ``scaler.step`` sets on an optimizer for the time of its step."""


@final
class AccumulatingOptimizer(DelegatingOptimizer):
    """What `gradaccum.wrap` makes of a torch optimizer; use it in the optimizer's place.

    ``loss.backward(); opt.step(); opt.zero_grad()`` stays as it was, in either order. In mid-window ``zero_grad`` keeps the partial
    sum, and ``step`` counts a micro-batch; the last one's ``step`` divides, clips, runs the inner optimizer and frees ``.grad``.

    Args:
        inner: the optimizer to run once per window.
        options: those of `gradaccum.wrap`, with ``accumulate_dtype`` as a torch dtype or None.
        workers: those that a window is added up over.
    """

    def __init__(self, inner: torch.optim.Optimizer, options: Options, workers: Workers) -> None:
        super().__init__(inner)
        self._workers = workers
        self._build(options)

    def _build(self, options: Options, masters: Mapping[int, Tensor] | None = None) -> None:
        """Begin anew; `masters`: the master weights by position, where the inner optimizer is a copy that has worked on them already."""
        self._options = options
        self._parameters = Parameters(self._inner, options.master_weights, masters)
        self._scaler = link_scaler(options, self._parameters.device())
        self._window = Window(self._parameters, options, Update(self, self._inner, self._parameters), self._scaler, self._workers)
        self._loads = Loads()

    @property
    def result(self) -> StepResult:
        """What the last ``step``, ``flush`` or ``discard`` did, in Python numbers.

        Its ``loss`` is known if each micro-batch went through ``opt.backward`` or ``opt.scale``, or through a closure that returns it.
        With ``on_overflow="ignore"`` and losses on an accelerator this waits for the device, where a window's end did not.
        """
        return self._window.result

    @property
    def master_weights(self) -> dict[int, Tensor]:
        """The float32 master of each half-precision parameter by its index, with ``master_weights=True``; the tensors themselves."""
        return self._parameters.masters()

    def add_listener(self, listener: Listener) -> Handle:
        """Call `listener` with a `gradaccum.watching.ClosedWindow` after each window that closes, applied or skipped.

        It is called when the ``step`` or ``flush`` that closed the window is through, or closes another one, and never in mid-window or for
        ``discard``. What it raises is raised by that call at its end; the windows have ended by then, and their updates are made.
        Listeners belong to this object: no state, pickle or copy has them.

        Args:
            listener: a function of one `gradaccum.watching.ClosedWindow`, such as a `gradaccum.watching.JsonLines`.

        Returns:
            A handle, whose ``remove()`` takes the listener off.

        Raises:
            ArgumentTypeError: `listener` cannot be called.
        """
        listening = Listening() if self._window.listening is NOBODY else self._window.listening
        handle = listening.add(listener)
        self._window.listening = listening
        return handle

    def backward(self, loss: Tensor, weight: float | None = None, **kwargs: Argument) -> None:
        """``loss.backward(**kwargs)`` with the weight and the loss scale multiplied in.

        Args:
            loss: scalar tensor, shape ``()``. It is not changed.
            weight: the micro-batch's number of items, >= 0; 1 if not given. With 0 the micro-batch is counted and contributes nothing,
                even if its gradient would be NaN: there is no backward pass, or one of zeros where other workers wait for it.
            kwargs: those of `torch.Tensor.backward`.

        Raises:
            ArgumentTypeError, ArgumentValueError: `loss` is no tensor, `weight` no such number.
            UsageError: another loss of the same micro-batch had another weight; or several workers share the window, and ``create_graph``
                is asked for; or other workers wait for a backward pass, and a `loss` of weight 0 has no graph.
        """
        if kwargs.get("create_graph"):
            self._workers.require_no_graph()
        own = 1.0 if weight is None else require_weight(weight)
        self._window.backward(require_loss(loss), own, kwargs)

    def scale(self, loss: Tensor) -> Tensor:
        """`loss` times the loss scale, for ``opt.scale(loss).backward()``; the weight is then 1.

        Args:
            loss: tensor of any shape, float dtype kept.

        Raises:
            ArgumentTypeError: `loss` is no tensor.
            UsageError: another loss of the same micro-batch had another weight.
        """
        return self._window.scale(require_loss(loss))

    def step(self, closure: Callable[[], Loss] | None = None) -> StepReturn:
        """Count the micro-batch whose gradient is in ``.grad``, and at the end of the window make the update.

        Args:
            closure: computes the loss of the micro-batch and its gradient, and is run once. An inner optimizer that evaluates the model
                again and again, as `torch.optim.LBFGS` does, needs ``steps=1``.

        Returns:
            None; with a closure, what it returns, or the inner optimizer's ``step`` if that evaluates it.

        Raises:
            UsageError: something changed ``.grad`` since autograd filled it, a plain ``backward()`` was used where weight or loss
                scale are needed, or a closure was given where it cannot work. The window is as it was before the call.
        """
        window = self._window
        if closure is not None and self._hands_over():
            return window.listening.after(lambda: window.step_with(closure))
        loss = None if closure is None else window.evaluate(closure)
        if _FROM_SCALER in self.__dict__:
            return self._step_for_scaler()
        if window.add():
            try:
                window.listening.after(window.close)
            except Exception as error:
                if closure is not None:
                    note_missing_closure(error)
                raise
        return loss

    def flush(self) -> None:
        """Close the open window now, dividing by what it holds; an empty one stays as it is.

        With ``module=`` or ``process_group=`` this is collective, as each window's end is: this worker takes part in the windows of the
        others until they flush.

        Raises:
            UsageError: a micro-batch is under way (``backward`` without ``step``), or something changed ``.grad``; or another worker did
                not come before the process group's timeout.
        """
        self._window.listening.after(self._window.flush)

    def discard(self) -> None:
        """Forget the open window and the micro-batch under way: no update, nothing counted, the loss scale as it was."""
        self._window.discard()

    def whole_window(self) -> WholeWindow:
        """The next window as one call fills it; `gradaccum_torch.backward` asks for it."""
        return WholeWindow(self._window, self._parameters, self._options, self._workers.group)

    def expect_open_window(self) -> None:
        """The checkpoint that `torch.distributed.checkpoint` is about to load was saved in mid-window.

        Its ``load`` fills the tensors of a state that ``get_optimizer_state_dict`` makes of this optimizer. After this call, until a state
        is loaded, that state has room for the sum of a window.
        """
        self._loads.expects_open_window = True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear what is in ``.grad`` between two windows; in mid-window keep the partial sum.

        Raises:
            UsageError: it comes between ``backward`` and ``step`` in mid-window, where the micro-batch is part of the sum already.
        """
        self._window.zero_grad(set_to_none)

    def add_param_group(self, param_group: Group) -> None:
        """Add a group, also in mid-window; see `torch.optim.Optimizer.add_param_group`.

        Raises:
            ArgumentValueError: workers share the window, and a parameter is none that they train together.
        """
        given = param_group["params"]
        if self._workers.several and not isinstance(given, set):
            given = param_group["params"] = [given] if isinstance(given, Tensor) else list(given)
            self._workers.require_parameters([each[1] if isinstance(each, tuple) else each for each in given])
        self._inner.add_param_group(param_group)
        self._window.groups_changed()

    def __repr__(self) -> str:
        # The class and the options; ``print(opt.optimizer)`` shows the groups. A GradScaler has the scale on its device: this waits for it.
        state = self._window.fields_to_save()
        size = self._window.size if state.micro_step else known_window_size(self._options, state.optimizer_step)
        return described(type(self).__name__, type(self._inner).__name__, self._options, state, size)

    def __getstate__(self) -> dict[str, Any]:
        self._workers.require_no_copy()
        state = {"inner": self._inner, "options": self._options, "loads": self._loads.pair}
        return {**state, "masters": self._parameters.masters(), "window": self._window.pickled()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__init__(state["inner"])
        self._workers = workers_of(self._inner, None, state["options"])
        self._build(state["options"], state["masters"])
        self._window.unpickle(state["window"])
        self._loads.pair = state["loads"]

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Read by ``scaler.step``: whether it may call ``step`` at once, without unscaling and without waiting for the device."""
        return self._scaler is not None

    def _hands_over(self) -> bool:
        """Whether the inner optimizer is to evaluate a closure itself."""
        return needs_closure(self._inner) or is_plain(self._options, self._window.size, self._parameters)

    def _step_for_scaler(self) -> None:
        """The step that ``scaler.step`` calls."""
        if self._scaler is None:
            raise foreign_scaler_error()
        self._window.note_scaled()
        with self._scaler.stepping(self):
            if self._window.add():
                self._window.listening.after(self._window.close)

    def _groups_for_scaler(self, caller: LocalVariables) -> list[Group]:
        if self._scaler is None:
            raise foreign_scaler_error()
        return self._scaler.groups_for(caller)

    def _initialized_state(self) -> OptimizerState:
        if not self.result.micro_step:  # The state of an open window has what is missing, and the inner optimizer stays as it is.
            with self._parameters.masters_in_place():
                initialize_state(self._inner)
        return {"initialized": True}  # An empty state, as of an inner optimizer without one, would have torch make a step of this one.

    def _forwarded(self, method: Callable[..., Any], name: str) -> Callable[..., Any]:
        return forwarded(method, name, self._window, self._parameters)

    def _save(self, caller: LocalVariables | None) -> StateDict:
        return save(self._window, self._parameters, self._inner, self._workers, caller, room=self._loads.expects_open_window)

    def _load(self, state_dict: StateDict) -> None:
        load(state_dict, self._window, self._parameters, self._inner, self._workers)
        self._loads.note(self._window.updates)
