"""The end of a window where Python chooses the compiled programs: it decides on Python numbers, and an update is one program.

A compiled end that decides for itself has a graph for the update, one for a norm whose squares overflow, and dozens of scalar operators.
On a CPU the host reads the state without a wait, and NumPy measures the sums in one pass. So the program gets the few numbers that it
writes, has no branch, and writes everything: an interruption finds the window open or closed.
"""

from __future__ import annotations

import math
from functools import lru_cache

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from gradaccum.kit import Decision, Fields, State, close, select
from gradaccum_mindspore.compiled_window import CompiledWindow
from gradaccum_mindspore.knowledge import Known
from gradaccum_mindspore.pynative_window import PyNativeWindow
from gradaccum_mindspore.state import NUMPY_DTYPES
from gradaccum_mindspore.sums import compiled_clear, divide, multiply
from gradaccum_mindspore.types import DType
from gradaccum_mindspore.update import Update

SMALLEST, LARGEST = 2.0**-100, 2.0**100
"""Within these the reciprocal of a power of two is a normal number, so that a product with it is the quotient to the last bit."""


class Program(nn.Cell):  # type: ignore[misc]
    """A Cell whose call costs what its operators cost, however many cells it holds."""

    def __init__(self) -> None:
        super().__init__(auto_prefix=False)

    @property
    def compile_phase(self) -> str | None:
        """The program of the last call."""
        phase: str | None = self._compile_phase
        return phase

    @compile_phase.setter
    def compile_phase(self, phase: str) -> None:
        # MindSpore's own setter tells all cells below, at each call: for a wrapped optimizer a quarter of a small micro-batch.
        self._compile_phase = phase

    def _check_construct_args(self, *inputs: object) -> None:
        """Nothing: the compiler checks them once, where MindSpore inspects a signature at each call."""


class Ending(Program):
    """A program that makes an update and closes the window.

    Args:
        window: the window in compiled code.
        update: the inner optimizer's call.
        multiplies: the sums are multiplied by the reciprocal of the divisor.
    """

    def __init__(self, window: CompiledWindow, update: Update, multiplies: bool) -> None:
        super().__init__()
        self.window, self.update, self.multiplies = window, update, multiplies
        self.lowers_flag = window.options.on_overflow == "drop_micro_batch"
        """Only then is a window applied whose overflow flag is up."""

    def end(self, divisor: Tensor, loss_scale: Tensor, tracker: Tensor) -> bool:
        """Make the update, forget the sums, and write the state except what is known of the window."""
        window, store = self.window, self.window.storage
        if self.multiplies:
            self.update(multiply(store.sums, divisor, store.handed))
        else:
            self.update(divide(store.sums, divisor, store.handed))
        compiled_clear(store.sums, 0 * divisor)
        ops.assign(store.micro_step, window.no_step)
        ops.assign(store.weight, window.zero)
        ops.assign_add(store.optimizer_step, window.one_step)
        if self.lowers_flag:
            ops.assign(store.overflow, window.false)
        if window.scale_moves:
            ops.assign(store.loss_scale, loss_scale)
            ops.assign(store.growth_tracker, tracker)
        return True


class Applied(Ending):
    """The end of a window that was decided on."""

    def construct(self, divisor: Tensor, loss_scale: Tensor, tracker: Tensor, event: Tensor, loss: Tensor, *noise: Tensor) -> bool:
        self.end(divisor, loss_scale, tracker)
        self.window.write_event(event)
        self.window.storage.knowledge.compiled_write(loss, noise[0] if len(noise) else None)
        return True


class HostWindow(PyNativeWindow):
    """As `PyNativeWindow`, between compiled micro-batches.

    Args:
        window: the window in compiled code.
        update: the inner optimizer's call.
    """

    def __init__(self, window: CompiledWindow, update: Update) -> None:
        super().__init__(window.storage, window.storage.options)
        self.applied = {multiplies: Applied(window, update, multiplies) for multiplies in (False, True)}

    def carry_out(self, state: State, decision: Decision, known: Known, update: Update) -> None:
        """Make the update and close the window in one program; a window that is skipped needs none."""
        if not decision.apply:
            super().carry_out(state, decision, known, update)
            return
        multiplies, numbers = self.numbers(decision.divisor, close(state, True, decision.overflow, self.options, select))
        more = [(True, False, decision.overflow, decision.grad_norm), known.loss, *([] if known.noise is None else [known.noise])]
        self.applied[multiplies](*numbers, *(tensor(values, self.storage.float_dtype) for values in more))

    def numbers(self, divisor: float, after: Fields) -> tuple[bool, tuple[Tensor, Tensor, Tensor]]:
        """Whether to multiply, and the arguments of `Ending.end`, for this divisor and the state after the window."""
        divides = divisor / self.storage.inner_scale
        multiplies = SMALLEST < divides < LARGEST and math.frexp(divides)[0] == 0.5
        *_, loss_scale, tracker = after
        factor = number(1 / divides if multiplies else divides, self.storage.float_dtype)
        return multiplies, (factor, number(loss_scale, ms.float32), number(tracker, ms.int32))


def tensor(values: object, dtype: DType) -> Tensor:
    """Python numbers as a Tensor."""
    with np.errstate(over="ignore"):
        return Tensor.from_numpy(np.array(values, NUMPY_DTYPES[dtype]))


number = lru_cache(maxsize=64)(tensor)
"""The same for one number, made once: most windows have the same ones."""
