"""The part of the wrapped optimizer that is just the inner one: groups, state, hooks, representation.

The groups and the state are the inner optimizer's own objects, read through properties, because both are replaced when a state
is loaded, and because a learning-rate scheduler writes into them.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch

from gradaccum import UsageError
from gradaccum.kit import Options, explain
from gradaccum_torch.grad_scaler import refused

_HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)


class Facade(torch.optim.Optimizer):
    """A `torch.optim.Optimizer` whose groups, state and defaults are another's."""

    _inner: torch.optim.Optimizer
    _options: Options

    def __init__(self, inner: torch.optim.Optimizer, options: Options) -> None:
        # The base class would build groups and state of its own; of its attributes only the tables of hooks are needed.
        self._inner, self._options = inner, options
        for name in _HOOKS:
            self.__dict__[name] = OrderedDict()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The inner optimizer's groups, the very list.

        Raises:
            UsageError: to a `torch.amp.GradScaler` that was not given as ``loss_scale=``, before it touches a gradient.
        """
        # Nothing else gives it away: the kernel that unscales leaves the version of a gradient as it was.
        caller = sys._getframe(1)
        if caller.f_code.co_name == "_unscale_grads_":
            return self._groups_for_scaler(caller.f_locals)
        return self._inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self._inner.param_groups = groups

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
        return getattr(self._inner, name)

    def __repr__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self._options._asdict().items() if value is not None)
        return f"{type(self).__name__} ({options})\n{self._inner!r}"

    def _run_update(self, *closure: Callable[[], Any]) -> Any:
        """The inner optimizer's step, between the hooks that were registered here; its own hooks it runs itself."""
        args, kwargs = self._run_pre_hooks((self, *closure))
        returned = self._step_inner(*args[1:], **kwargs)
        for after in tuple(self._optimizer_step_post_hooks.values()):
            after(self, args, kwargs)
        return returned

    def _run_pre_hooks(self, args: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What the step is called with: a hook may return other arguments, as in torch, which refuses everything else but None."""
        kwargs: dict[str, Any] = {}
        for before in tuple(self._optimizer_step_pre_hooks.values()):
            result: Any = before(self, args, kwargs)
            if isinstance(result, tuple) and len(result) == 2:
                args, kwargs = result
            elif result is not None:
                expected, fix = "None, or a tuple of new positional and new keyword arguments", "Return nothing."
                raise explain(UsageError, "step pre-hook", expected=f"to return {expected}", got=result, fix=fix)
        return args, kwargs

    def _step_inner(self, *args: Any, **kwargs: Any) -> Any:
        return self._inner.step(*args, **kwargs)

    def _groups_for_scaler(self, its_locals: Mapping[str, Any]) -> list[dict[str, Any]]:
        """What the method of a scaler that unscales gradients is to see, given that method's local variables."""
        raise refused()
