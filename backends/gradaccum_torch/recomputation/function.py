"""A function whose activations are recomputed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from gradaccum_torch.recomputation.run import Rules, modules_in, run


class Recomputed:
    """Called as `function`; a copy or a pickle holds a copy of it, so that a bound method stays that of its own object's copy.

    Args:
        function: what to run, once in the forward pass and once in the backward pass.
        rules: how it is recomputed.
    """

    def __init__(self, function: Callable[..., Any], rules: Rules) -> None:
        self._function, self._rules = function, rules
        for name in functools.WRAPPER_ASSIGNMENTS:
            if hasattr(function, name):
                setattr(self, name, getattr(function, name))

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The function itself, as `inspect.signature` looks for it."""
        return self._function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return run(self._function, modules_in((self._function, args, kwargs)), args, kwargs, self._rules)

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        """Decorates methods, as a function does."""
        return self if instance is None else functools.partial(self, instance)
