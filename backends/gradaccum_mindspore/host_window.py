"""The end of a window where Python chooses the compiled programs: it decides on Python numbers, and an update is one program.

A compiled end that decides for itself has a graph for the update, one for a norm whose squares overflow, and dozens of scalar operators.
On a CPU the host reads the state without a wait, and NumPy measures the sums in one pass. So the program gets the few numbers that it
writes, has no branch, and writes everything: an interruption finds the window open or closed.
"""

from __future__ import annotations

from functools import lru_cache

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops

from gradaccum.kit import Decision, Fields, State, close, has_exact_inverse, select
from gradaccum_mindspore.compiled_window import CompiledWindow
from gradaccum_mindspore.knowledge import Known
from gradaccum_mindspore.phase import OwnPhase
from gradaccum_mindspore.pynative_window import PyNativeWindow
from gradaccum_mindspore.state import NUMPY_DTYPES
from gradaccum_mindspore.sums import compiled_clear, divide, multiply
from gradaccum_mindspore.types import DType
from gradaccum_mindspore.update import Update


class Program(OwnPhase):
    """A Cell whose call costs what its operators cost, however many cells it holds."""

    def __init__(self) -> None:
        super().__init__(auto_prefix=False)

    def _check_construct_args(self, *inputs: object) -> None:
        """Nothing: the compiler checks them once, where MindSpore inspects a signature at each call."""


class Applied(Program):
    """The end of a window that was decided on. It takes nothing that it does not use: MindSpore runs such a program half as fast.

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

    def construct(self, divisor: Tensor, event: Tensor, loss: Tensor, *more: Tensor) -> bool:
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
        window.write_event(event)
        store.knowledge.compiled_write(loss, more[0] if store.knowledge.has_noise else None)
        if window.scale_moves:
            ops.assign(store.loss_scale, more[-2])
            ops.assign(store.growth_tracker, more[-1])
        return True


class HostWindow(PyNativeWindow):
    """As `PyNativeWindow`, between compiled micro-batches.

    Args:
        window: the window in compiled code.
        update: the inner optimizer's call.
    """

    def __init__(self, window: CompiledWindow, update: Update) -> None:
        super().__init__(window.storage, window.storage.options)
        self.scale_moves = window.scale_moves
        self.applied = {multiplies: Applied(window, update, multiplies) for multiplies in (False, True)}

    def carry_out(self, state: State, decision: Decision, known: Known, update: Update) -> None:
        """Make the update and close the window in one program; a window that is skipped needs none."""
        if not decision.apply:
            super().carry_out(state, decision, known, update)
            return
        multiplies, factor = self.factor(decision.divisor)
        values = [(True, False, decision.overflow, decision.grad_norm), known.loss, *([] if known.noise is None else [known.noise])]
        moved = self.moved(close(state, True, decision.overflow, self.options, select)) if self.scale_moves else ()
        self.applied[multiplies](factor, *(tensor(each, self.storage.float_dtype) for each in values), *moved)

    def factor(self, divisor: float) -> tuple[bool, Tensor]:
        """Whether to multiply, and the factor; or the divisor."""
        divides = divisor / self.storage.inner_scale
        multiplies = has_exact_inverse(divides)
        return multiplies, number(1 / divides if multiplies else divides, self.storage.float_dtype)

    def moved(self, after: Fields) -> tuple[Tensor, Tensor]:
        """The loss scale and its tracker in a state."""
        *_, loss_scale, tracker = after
        return number(loss_scale, ms.float32), number(tracker, ms.int32)


def tensor(values: object, dtype: DType) -> Tensor:
    """Python numbers as a Tensor."""
    with np.errstate(over="ignore"):
        return Tensor.from_numpy(np.array(values, NUMPY_DTYPES[dtype]))


number = lru_cache(maxsize=64)(tensor)
"""The same for one number, made once: most windows have the same ones."""
