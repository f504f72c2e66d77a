"""The accumulation alone: sums and counters, while the caller runs the optimizer.

For training steps that are cut in pieces: one that adds, one that updates, one that clears. It is the wrapped optimizer's own code
and state, so `load_checkpoint_into` checks and loads its checkpoints alike. If you can, wrap the optimizer instead: nobody can call that in
the wrong order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mindspore import Parameter, Tensor

from gradaccum import ArgumentValueError, UsageError
from gradaccum.kit import explain, make_options
from gradaccum_mindspore.backend import backend
from gradaccum_mindspore.capturing import refuse_trace
from gradaccum_mindspore.checks import require_parameters
from gradaccum_mindspore.compiled_window import CompiledWindow
from gradaccum_mindspore.phase import OwnPhase
from gradaccum_mindspore.scaled import require_read
from gradaccum_mindspore.state import StateReader, Storage
from gradaccum_mindspore.types import Gradients, Loss, NamedGradients, Weight
from gradaccum_mindspore.workers.found import shares_windows


class Accumulator(StateReader, OwnPhase):
    """Adds gradients up, in PyNative, inside `mindspore.jit` and in graph mode.

    ``accumulator(gradients, weight, loss)`` takes in one micro-batch, the last two if you like, and returns a bool Tensor: whether the
    window is full now. Then: run the optimizer on ``gradients()`` if ``applicable()``, and ``clear()``.

    Args:
        parameters: the model's parameters, in the order of the gradients.
        steps: as for `gradaccum.wrap`; None: the caller decides when a window is full.
        name: part of the names of the Parameters that hold the state.
        data_parallel: False where there are several workers, and the caller reduces ``gradients()`` or the micro-batches.
        options: the other options of `gradaccum.wrap`, except ``master_weights``: the caller's optimizer would have to work on them.

    Raises:
        ArgumentTypeError, ArgumentValueError: an option is wrong, or `parameters` are none.
        UsageError: there are several workers, and `data_parallel` is not False.
        UsageError: on a call, there is a loss scale that nobody has asked for yet.
        GradientError: on a call, another number, shape or dtype of gradients than the parameters'.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        steps: object = None,
        *,
        name: str = "gradaccum",
        data_parallel: bool | None = None,
        **options: Any,
    ) -> None:
        super().__init__(auto_prefix=False)
        parameters = require_parameters(parameters)
        checked = make_options(steps, driver=backend, **options)
        if checked.master_weights:
            raise _masters_error()
        if shares_windows(data_parallel):
            raise _workers_error()
        self.storage = Storage(parameters, checked, name)
        self.window = CompiledWindow(self.storage, checked)

    def __call__(self, gradients: Gradients | NamedGradients, weight: Weight = None, loss: Loss = None) -> Tensor:
        """One micro-batch, from Python."""
        refuse_trace()
        return super().__call__(gradients, weight, loss)

    def construct(self, gradients: Gradients | NamedGradients, weight: Weight = None, loss: Loss = None) -> Tensor:
        require_read(self.storage.scaled)
        state, event, told = self.window.add(self.window.ordered(gradients), weight, loss)
        full, needed = self.window.is_full(state), self.window.needs_first(state)
        self.window.write_added(state, event, told, weight)
        if self.window.measures_noise:
            self.window.see_first(needed)
        return full

    def applicable(self) -> Tensor:
        """Whether the open window may be applied: no overflow, a norm within ``skip_norm``, a weight above 0. A bool Tensor."""
        self.window.note_decision()
        return self.window.notes.applied & self.window.true

    def gradients(self) -> tuple[Tensor, ...]:
        """The open window's gradient: divided, unscaled, clipped; in the parameters' order and dtypes. Changes nothing."""
        self.window.note_decision()
        return self.window.gradients(self.window.notes.divisor.value())

    def clear(self) -> Tensor:
        """Close the window: count it as an update or as skipped, adjust the loss scale, forget the sums. Returns ``applicable()``."""
        self.window.note_decision()
        self.window.finish(False)
        return self.window.notes.applied & self.window.true


def _workers_error() -> UsageError:
    expected = "False, because the end of a window that workers share is one call, and here the caller makes it of several"
    return explain(
        UsageError,
        "data_parallel",
        expected=expected,
        got=True,
        fix="Wrap the optimizer: gradaccum.wrap(optimizer, steps=4, data_parallel=True).",
    )


def _masters_error() -> ArgumentValueError:
    expected = "False, because an accumulation alone has no optimizer to work on them"
    return explain(
        ArgumentValueError, "master_weights", expected=expected, got=True, fix="Wrap the optimizer: gradaccum.wrap(optimizer, steps=4)."
    )
