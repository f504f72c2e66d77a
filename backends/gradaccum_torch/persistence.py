"""Saving, loading, copying and pickling, in mid-window too: the resumed run is bitwise the uninterrupted one.

`state_dict` follows torch: the tensors in it are the live ones. A copied or unpickled parameter has lost its ``.grad`` (torch keeps
only its data), so the window's gradients travel with the optimizer and are put back.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from gradaccum import CheckpointError
from gradaccum.kit import State, Terms, explain, initial_state, resumed, terms_of
from gradaccum_torch.checkpoint import KEY, Saved, decode, encode
from gradaccum_torch.facade import Facade
from gradaccum_torch.model_state import asked_by, gather, initialize, spread
from gradaccum_torch.window import Window


class PersistentOptimizer(Facade):
    """The part of the wrapped optimizer that moves it to disk or elsewhere in memory."""

    _window: Window

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's ``state_dict`` with the open window under the key ``"gradaccum"``.

        As in torch, the tensors are the live ones: save them, or deep-copy, before training goes on.

        Raises:
            UsageError: a micro-batch of the open window is under way, or something changed ``.grad``; or a window is open and the caller is
                ``get_optimizer_state_dict`` of `torch.distributed.checkpoint`, which would drop it.
        """
        its_locals = asked_by("_get_optim_state_dict")
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        window = self._window
        window.require_at_rest("state_dict()")
        state_dict = self._inner.state_dict()
        fields, masters = window.fields_to_save(), window.parameters.masters()
        state_dict[KEY] = encode(fields, self._terms(), window.grad_norm, window.strategy.sums(), masters, window.parameters.groups())
        if its_locals is not None:
            state_dict = spread(state_dict, window.parameters, its_locals)
        for after in self._optimizer_state_dict_post_hooks.values():
            replaced = after(self, state_dict)
            state_dict = state_dict if replaced is None else replaced
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` gave, mid-window included; a bare optimizer's state is an empty window.

        Between two windows the options of this optimizer hold: the saved loss scale goes on only if it is dynamic in both.

        Raises:
            CheckpointError: the state is of other parameters, or of an open window under other options; nothing was changed.
        """
        state_dict = state_dict.copy()
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = before(self, state_dict)
            state_dict = state_dict if replaced is None else replaced
        state_dict = gather(state_dict, self._window.parameters)
        saved = self._decode(state_dict)
        self._load_inner({key: value for key, value in state_dict.items() if key != KEY})
        self._restore(saved)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    @property
    def state(self) -> Any:
        """The inner optimizer's state by parameter, the very mapping."""
        if asked_by("_init_optim_state") is None:
            return self._inner.state
        with self._window.parameters.masters_in_place():
            initialize(self._inner)
        return {"initialized": True}  # Else a step of this optimizer would be made, even if the inner one has no state.

    @state.setter
    def state(self, state: Any) -> None:
        self._inner.state = state

    def __getstate__(self) -> dict[str, Any]:
        window, strategy = self._window, self._window.strategy
        return {
            "inner": self._inner,
            "options": self._options,
            "masters": window.parameters.masters(),
            "fields": window.fields_to_save(),
            "grad_norm": window.grad_norm,
            "loads": window.loads,
            "micro_batch": window.micro_batch,
            "gradients": [None if parameter.grad is None else parameter.grad.detach() for parameter in strategy.positions()],
            "sums": None if strategy.sum_in_grad else strategy.sums(),
            "sentinels": strategy.sentinels.flags(),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        Facade.__init__(self, state["inner"], state["options"])
        window = self._window = Window(self._inner, self._options, state["masters"])
        window.start_with(state["fields"])
        window.grad_norm, window.loads, window.micro_batch = state["grad_norm"], state["loads"], state["micro_batch"]
        for parameter, gradient in zip(window.strategy.positions(), state["gradients"], strict=True):
            parameter.grad = gradient
        if state["sums"] is not None:
            window.strategy.load(state["sums"])
        window.strategy.sentinels.reset(*state["sentinels"])

    def _decode(self, state_dict: dict[str, Any]) -> Saved:
        window = self._window
        bare = Saved(initial_state(), None, 0.0, {}, {})
        saved = decode(state_dict[KEY], window.parameters, window.sum_dtypes) if KEY in state_dict else bare
        return saved._replace(fields=self._resumed(saved.fields, saved.terms))

    def _terms(self) -> Terms:
        """What the open window depends on; between two windows the schedule, which may have come to its end, is not asked."""
        window = self._window
        return terms_of(self._options._replace(steps=window.size if window.fields.micro_step else None), window.fields.optimizer_step)

    def _resumed(self, fields: State, saved: Terms | None) -> State:
        """The fields to go on with, of a state that was saved under `saved`, which is None for a bare optimizer's."""
        scaler = self._window.scaler
        if scaler is not None and not fields.micro_step and (saved is None or saved.scale != "dynamic"):
            return scaler.current(fields)  # It is the user's own, and may have been loaded from a file of its own.
        if saved is None:
            return initial_state(self._options.scale_rule.init_scale)
        return resumed(fields, saved, self._options)

    def _load_inner(self, state_dict: dict[str, Any]) -> None:
        try:
            # torch casts what it loads to the dtype of the parameter in the groups.
            with self._window.parameters.masters_in_place():
                self._inner.load_state_dict(state_dict)
        except (ValueError, KeyError) as error:
            expected, fix = "a state of these parameter groups", "Load a state that was saved from this model and optimizer."
            raise explain(CheckpointError, "state_dict", expected=expected, found=f"one where {error}", fix=fix) from error

    def _restore(self, saved: Saved) -> None:
        window = self._window
        window.strategy.clear()
        window.micro_batch.clear()
        window.strategy.load([_copy(saved.sums.get(index), own) for index, own in enumerate(window.strategy.positions())])
        window.parameters.load(saved.masters)
        window.grad_norm = saved.grad_norm
        window.start_with(saved.fields)
        window.loads = window.loads[0] + 1, saved.fields.optimizer_step


def _copy(total: Tensor | None, parameter: Tensor) -> Tensor | None:
    """A tensor of our own where the parameter is, so that training on leaves the saved one as it is."""
    return None if total is None else total.detach().to(parameter.device, copy=True)
