"""Methods that only the inner optimizer has, called on the wrapped one.

Some switch the weights (schedulefree's ``eval`` and ``train``); with master weights, the model then gets the rounded result. Some make an
update of their own (SAM's ``first_step``): from a part of a window's gradient, and uncounted. Such a method looks at ``.grad``, whatever
its name is. It is refused as it looks, before it has changed anything.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from gradaccum import UsageError
from gradaccum.kit import explain
from gradaccum_torch.masters import Parameters
from gradaccum_torch.window import Window

Argument = Any
"""What a method of torch or of the inner optimizer takes: handed through, whatever it is."""

_GRAD: Any = Tensor.grad
_TOUCHES = (_GRAD.__get__, _GRAD.__set__, _GRAD.__delete__)


class _Watch(TorchFunctionMode):
    """Refuses to read or write the ``.grad`` of a parameter while it holds a part of a window.

    With ``separate_sums=True`` nobody but the user knows whether what is in ``.grad`` is such a part: there a gradient is refused always.
    """

    def __init__(self, method: str, window: Window, parameters: Parameters) -> None:
        super().__init__()
        self._method, self._window = method, window
        self._ids = {id(tensor) for tensor in (*parameters.unique(), *parameters.masters().values())}

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _TOUCHES and id(args[0]) in self._ids and (self._window.is_under_way() or self._holds_users(args[0])):
            raise _own_update_error(self._method)
        return func(*args, **(kwargs or {}))

    def _holds_users(self, parameter: Tensor) -> bool:
        return not self._window.strategy.sentinels.watching and parameter.grad is not None


def forwarded(method: Callable[..., Any], name: str, window: Window, parameters: Parameters) -> Callable[..., Any]:
    """`method` of the inner optimizer so that it leaves the window of the wrapped one right.

    Raises:
        UsageError: (when called) it touches ``.grad`` while a window or a micro-batch is under way.
    """

    @functools.wraps(method)
    def call(*args: Argument, **kwargs: Argument) -> Any:
        with parameters.published(), _Watch(name, window, parameters):
            return method(*args, **kwargs)

    return call


def _own_update_error(method: str) -> UsageError:
    """The error for a method that makes an update from a part of a window's gradient."""
    return explain(
        UsageError,
        f"{method}()",
        expected="a method that leaves .grad alone while a window is open, or a call between two windows",
        found="one that reads or writes .grad, which holds a part of the window's gradient, not yet divided",
        fix=f"An update of its own needs a window of its own: make {method} the step() of a small torch.optim.Optimizer and wrap that one "
        "too (RECIPES.md of gradaccum_torch, An optimizer with two updates). The window is as it was.",
    )
