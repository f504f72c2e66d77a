"""A look at ``.grad`` right after autograd has accumulated into it, for as long as somebody wants it.

torch keeps a hook on its parameter, and the hook keeps what it refers to. So the hooks are taken off when their owner is freed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, cast

from torch import Tensor
from torch._C._dynamo import eval_frame
from torch.utils.hooks import RemovableHandle

Hook = Callable[[Tensor], None]


def can_be_hooked(parameter: Tensor) -> bool:
    """Whether torch lets us hook the accumulation into `parameter`, which it does only where a gradient can arrive."""
    return parameter.is_leaf and parameter.requires_grad


def untraced(function: Callable[..., object]) -> None:
    """Keep Dynamo from compiling `function` and what it calls: in a compiled training step it would trace what autograd calls.

    `torch.compiler.disable` does the same, but imports all of the compiler, and puts a frame around every call.
    """
    frames: Any = eval_frame
    if hasattr(frames, "_FrameExecStrategy"):
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    else:
        frames.skip_code(function.__code__)


class Hooks:
    """The hooks of one owner, which must not be referred to by them: only so is it freed as it is dropped."""

    def __init__(self) -> None:
        self._handles: dict[int, RemovableHandle] = {}
        weakref.finalize(self, _remove_all, self._handles).atexit = False

    def __contains__(self, parameter: Tensor) -> bool:
        return id(parameter) in self._handles

    def add(self, parameter: Tensor, hook: Hook) -> None:
        """Call ``hook(parameter)`` after each accumulation into `parameter`, which the hook must keep alive."""
        self._handles[id(parameter)] = cast(RemovableHandle, parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]

    def remove(self, parameter: Tensor) -> None:
        """Take the hook off `parameter`."""
        self._handles.pop(id(parameter)).remove()

    def keep(self, parameters: dict[int, Tensor]) -> None:
        """Take the hooks off all but these, by id."""
        for number in self._handles.keys() - parameters.keys():
            self._handles.pop(number).remove()


def _remove_all(handles: dict[int, RemovableHandle]) -> None:
    for handle in handles.values():
        handle.remove()
