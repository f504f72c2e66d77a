"""A `torch.optim.Optimizer` whose groups, state and defaults are another's.

They are the inner optimizer's own objects, read through properties: loading a state replaces groups and state, and a learning-rate
scheduler writes into the groups. The hooks are this optimizer's own. Whatever is not the inner optimizer's is abstract, of torch's methods
too, and a subclass that is final fills it in: no method is written twice.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

import torch

from gradaccum_torch.entry import StateDict
from gradaccum_torch.hooks import hook_tables, load_post_hooks, load_pre_hooks, save_post_hooks, save_pre_hooks
from gradaccum_torch.masters import Group
from gradaccum_torch.torch_private import LocalVariables, model_state_caller, unscaling_caller

OptimizerState = Any
"""``optimizer.state``: a mapping from each parameter to what the optimizer keeps for it."""


class DelegatingOptimizer(torch.optim.Optimizer, ABC):
    """A `torch.optim.Optimizer` that reads another one's groups, state, defaults, attributes and methods.

    Args:
        inner: the other one.
    """

    _inner: torch.optim.Optimizer

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        # The base class would build groups and state of its own; of its attributes only the tables of hooks are needed.
        self.__dict__.update(hook_tables())
        self._inner = inner

    @property
    def param_groups(self) -> list[Group]:
        """The inner optimizer's groups, the very list.

        Raises:
            UsageError: to a `torch.amp.GradScaler` that was not given as ``loss_scale=``, before it touches a gradient.
        """
        # Nothing else gives the scaler away: the kernel that unscales leaves the version of a gradient as it was.
        scaler = unscaling_caller(2)
        return self._inner.param_groups if scaler is None else self._groups_for_scaler(scaler)

    @param_groups.setter
    def param_groups(self, groups: list[Group]) -> None:
        self._inner.param_groups = groups

    @property
    def state(self) -> OptimizerState:
        """The inner optimizer's state by parameter, the very mapping."""
        return self._inner.state if model_state_caller("_init_optim_state", 2) is None else self._initialized_state()

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
        """The inner optimizer. Its own ``step`` knows nothing of windows: do not call it."""
        return self._inner

    def __getattr__(self, name: str) -> Any:
        # Underscored names belong to one object: the inner one's would describe the wrong optimizer.
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        value = getattr(self._inner, name)
        return self._forwarded(value, name) if isinstance(value, (MethodType, FunctionType)) else value

    def state_dict(self) -> StateDict:
        """The inner optimizer's ``state_dict`` with the open window under the key ``"gradaccum"``.

        As in torch, the tensors are the live ones: save them, or deep-copy, before training goes on.

        Raises:
            UsageError: a micro-batch of the open window is under way, or something changed ``.grad``; or a window is open, each worker
                has a sum of its own, and the caller is ``get_optimizer_state_dict`` of `torch.distributed.checkpoint`.
        """
        caller = model_state_caller("_get_optim_state_dict", 2)
        for before in save_pre_hooks(self).values():
            before(self)
        state_dict = self._save(caller)
        for after in save_post_hooks(self).values():
            replaced = after(self, state_dict)
            state_dict = state_dict if replaced is None else replaced
        return state_dict

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Restore what `state_dict` gave, mid-window included; a bare optimizer's state is an empty window.

        Between two windows the options of this optimizer hold: the saved loss scale goes on only if it is dynamic in both.

        Raises:
            CheckpointError: the state is of other parameters, or of an open window under other options; nothing was changed.
        """
        state_dict = state_dict.copy()
        for before in load_pre_hooks(self).values():
            replaced = before(self, state_dict)
            state_dict = state_dict if replaced is None else replaced
        self._load(state_dict)
        for after in load_post_hooks(self).values():
            after(self)

    @abstractmethod
    def step(self, closure: Callable[[], Any] | None = None) -> Any: ...

    @abstractmethod
    def zero_grad(self, set_to_none: bool = True) -> None: ...

    @abstractmethod
    def add_param_group(self, param_group: Group) -> None: ...

    @abstractmethod
    def __getstate__(self) -> dict[str, Any]: ...

    @abstractmethod
    def __setstate__(self, state: dict[str, Any]) -> None: ...

    @abstractmethod
    def __repr__(self) -> str: ...

    @abstractmethod
    def _groups_for_scaler(self, caller: LocalVariables) -> list[Group]:
        """The groups for the method of a `torch.amp.GradScaler` that unscales gradients, given that method's local variables."""

    @abstractmethod
    def _initialized_state(self) -> OptimizerState:
        """The state for `torch.distributed.checkpoint`, which is about to give an optimizer without one the state of a first step."""

    @abstractmethod
    def _forwarded(self, method: Callable[..., Any], name: str) -> Callable[..., Any]:
        """`method` of the inner optimizer, as it may be called on this one."""

    @abstractmethod
    def _save(self, caller: LocalVariables | None) -> StateDict:
        """What `state_dict` gives, before its hooks; `caller`: the local variables of torch's checkpoint function, if that asks."""

    @abstractmethod
    def _load(self, state_dict: StateDict) -> None:
        """Restore what `_save` gave."""
