"""Methods that only the inner optimizer has, called on the wrapped one.

Some switch the weights (schedulefree's ``eval`` and ``train``); where there are masters, the model is given what they make of them. Some
make an update of their own (SAM's ``first_step``): from a part of a window's gradient, and uncounted. What tells those apart is not the
name but that they look at ``.grad``: they are refused as they do so, before they have changed anything.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from gradaccum import UsageError
from gradaccum.kit import explain
from gradaccum_torch.window import Window

_GRAD: Any = Tensor.grad
_TOUCHES = (_GRAD.__get__, _GRAD.__set__, _GRAD.__delete__)


class _Watch(TorchFunctionMode):
    """While it is on, whoever reads or writes the ``.grad`` of a parameter that holds a part of a window is refused."""

    def __init__(self, method: str, window: Window) -> None:
        super().__init__()
        self._method, self._window = method, window
        self._ids = {id(tensor) for tensor in (*window.parameters.unique(), *window.parameters.masters().values())}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _TOUCHES and id(args[0]) in self._ids and self._window.is_under_way():
            raise _refused(self._method)
        return func(*args, **(kwargs or {}))


def is_forwarded(value: Any) -> bool:
    """Whether `value`, an attribute of the inner optimizer, is a method or function, and not an object of another kind."""
    return isinstance(value, (MethodType, FunctionType))


def forwarded(method: Callable[..., Any], name: str, window: Window) -> Callable[..., Any]:
    """`method` of the inner optimizer so that it leaves the window of the wrapped one right.

    Raises:
        UsageError: (when called) it touches ``.grad`` while a window or a micro-batch is under way.
    """

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        with window.parameters.published(), _Watch(name, window):
            return method(*args, **kwargs)

    return call


def _refused(method: str) -> UsageError:
    return explain(
        UsageError,
        f"{method}()",
        expected="a method that leaves .grad alone while a window is open, or a call between two windows",
        found="one that reads or writes .grad, which holds a part of the window's gradient, not yet divided",
        fix=f"An update of its own needs a window of its own: make {method} the step() of a small torch.optim.Optimizer and wrap that one "
        "too (RECIPES.md of gradaccum_torch, An optimizer with two updates). The window is as it was.",
    )
