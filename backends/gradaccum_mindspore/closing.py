"""The end of a window by request, and its end by being forgotten: cells beside the wrapped optimizer, in every mode."""

from __future__ import annotations

from typing import Any

import mindspore as ms
from mindspore import nn

from gradaccum_mindspore.capturing import refuse_trace
from gradaccum_mindspore.compiled_window import CompiledWindow
from gradaccum_mindspore.masters import Update
from gradaccum_mindspore.pynative_window import EagerWindow


class Flush(nn.Cell):  # type: ignore[misc]
    """``optimizer.flush()``: close the open window, however few micro-batches it holds; nothing if it holds none."""

    def __init__(self, window: CompiledWindow, eager: EagerWindow, update: Update) -> None:
        super().__init__(auto_prefix=False)
        self.window = window
        self.update = update
        self.eager = eager

    def __call__(self) -> Any:
        """Close the window from Python."""
        refuse_trace()
        if is_graph_mode():
            return super().__call__()
        state = self.eager.storage.pull()
        if state.micro_step > 0:
            self.eager.close(state, self.update)
        else:
            self.eager.storage.push_event(False, False, False)
        return state.micro_step > 0

    def construct(self) -> Any:
        state = self.window.read()
        open_window, never = state[0] > 0, state[0] < 0
        if open_window:
            self.close()
        else:
            self.window.write_event(self.window.event(never, never, never, self.window.norm()))
        return open_window

    def close(self) -> Any:
        """The end of a window, compiled."""
        self.window.decide()
        self.apply()
        return self.window.write_closed()

    def apply(self) -> Any:
        """The update, if that was decided."""
        if self.window.notes.apply:
            self.update(self.window.gradients(self.window.notes.divisor.value()))
        return True


class Discard(nn.Cell):  # type: ignore[misc]
    """``optimizer.discard()``: forget the open window."""

    def __init__(self, window: CompiledWindow, eager: EagerWindow) -> None:
        super().__init__(auto_prefix=False)
        self.window = window
        self.eager = eager

    def __call__(self) -> None:
        """Forget it from Python."""
        refuse_trace()
        self.eager.discard()

    def construct(self) -> Any:
        return self.window.forget()


def is_graph_mode() -> bool:
    """Whether a Cell called from Python is compiled."""
    return bool(ms.get_context("mode") == ms.GRAPH_MODE)
