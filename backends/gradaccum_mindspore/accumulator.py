"""The accumulation alone: sums and counters, while the caller runs the optimizer.

For training steps that are cut in pieces: one that adds, one that updates, one that clears. It is the wrapped optimizer's own code
and state, so its checkpoints are checked and loaded alike. Whoever can, wraps the optimizer instead: that cannot be called in the
wrong order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mindspore import nn, ops

from gradaccum import ArgumentValueError, StepResult
from gradaccum.kit import explain, make_options
from gradaccum_mindspore.backend import backend
from gradaccum_mindspore.capturing import refuse_trace
from gradaccum_mindspore.checks import require_parameters
from gradaccum_mindspore.compiled_window import CompiledWindow
from gradaccum_mindspore.scaled import note_read, require_read
from gradaccum_mindspore.state import Storage


class Accumulator(nn.Cell):  # type: ignore[misc]
    """Adds gradients up, in PyNative, inside `mindspore.jit` and in graph mode.

    ``accumulator(gradients)`` or ``accumulator(gradients, weight)`` takes in one micro-batch and returns a bool Tensor: whether the window
    is full now. Then: run the optimizer on ``gradients()`` if ``applicable()``, and ``clear()``.

    Args:
        parameters: the model's parameters, in the order of the gradients.
        steps: as for `gradaccum.wrap`; None: the caller decides when a window is full.
        name: part of the names of the Parameters that hold the state.
        options: the other options of `gradaccum.wrap`, but for ``master_weights``: the optimizer that would work on them is the caller's.

    Raises:
        ArgumentTypeError, ArgumentValueError: an option is wrong, or `parameters` are none.
        UsageError: on a call, there is a loss scale, and nobody has asked for it yet.
        GradientError: on a call, another number, shape or dtype of gradients than the parameters'.
    """

    def __init__(self, parameters: Sequence[Any], steps: Any = None, *, name: str = "gradaccum", **options: Any) -> None:
        super().__init__(auto_prefix=False)
        parameters = require_parameters(parameters)
        checked = make_options(steps, driver=backend, **options)
        if checked.master_weights:
            raise _no_masters()
        self.storage = Storage(parameters, checked, name)
        self.window = CompiledWindow(self.storage, checked)

    def __call__(self, gradients: Any, weight: Any = None) -> Any:
        """One micro-batch, from Python."""
        refuse_trace()
        return super().__call__(gradients, weight)

    def construct(self, gradients: Any, weight: Any = None) -> Any:
        require_read(self.storage.scaled)
        ordered = self.window.ordered(gradients)
        state, event = self.window.add(ordered, weight)
        full = self.window.is_full(state)
        self.window.write_open(state, event)
        self.window.write_size(state)
        return full

    def applicable(self) -> Any:
        """Whether the open window may be applied: no overflow, a norm within ``skip_norm``, a weight above 0. A bool Tensor."""
        self.window.decide()
        return self.window.notes.applied & self.window.true

    def gradients(self) -> Any:
        """The open window's gradient: divided, unscaled, clipped; in the parameters' order and dtypes. Changes nothing."""
        self.window.decide()
        return self.window.gradients(self.window.notes.divisor.value())

    def clear(self) -> Any:
        """Close the window: count it as an update or as skipped, adjust the loss scale, forget the sums. Returns ``applicable()``."""
        self.window.decide()
        self.window.write_closed()
        return self.window.notes.applied & self.window.true

    def scale(self, loss: Any) -> Any:
        """``loss`` times the loss scale: what to differentiate."""
        return loss * ops.cast(self.loss_scale, loss.dtype)

    @property
    def loss_scale(self) -> Any:
        """The current loss scale, a float32 Tensor of shape () (a Parameter): in PyNative and in compiled code."""
        note_read(self.storage.scaled)
        return self.storage.loss_scale

    @property
    def result(self) -> StepResult:
        """What the last event did, in Python numbers. For Python, not for compiled code."""
        note_read(self.storage.scaled)
        return self.storage.result()


def _no_masters() -> ArgumentValueError:
    expected = "False, because an accumulation alone has no optimizer to work on them"
    return explain(
        ArgumentValueError, "master_weights", expected=expected, got=True, fix="Wrap the optimizer: gradaccum.wrap(optimizer, steps=4)."
    )
