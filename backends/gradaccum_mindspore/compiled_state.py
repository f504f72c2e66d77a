"""The state of a window as Tensors: reads it, and assigns no more fields than an event changes.

A kernel costs about the same for one number as for a thousand, so a micro-batch assigns only what it changes.
"""

from __future__ import annotations

from typing import Any

import mindspore as ms
from mindspore import Tensor, nn, ops

from gradaccum.kit import Fields, Options, ScaleRule, UntilWeight, encode_terms, ends, measures, steps_at
from gradaccum_mindspore.knowledge import NO_LOSS
from gradaccum_mindspore.notes import Notes
from gradaccum_mindspore.plain_ends import LARGEST_SCALE, SMALLEST_SCALE
from gradaccum_mindspore.sizes import check_constant_size, check_size_dtype, sizes_of
from gradaccum_mindspore.state import GRAD_NORM, STEPS, Storage
from gradaccum_mindspore.sums import where
from gradaccum_mindspore.types import DType, Number

MICRO_STEP, OPTIMIZER_STEP, SKIPPED_WINDOWS, WEIGHT, OVERFLOW, LOSS_SCALE, GROWTH_TRACKER = range(7)
"""The places of the state's fields. If code that writes unpacks a state, MindSpore warns of each field that the code does not use."""


def exact_in(dtype: DType, options: Options) -> Options:
    """`options` for a program that computes in `dtype`: in float64 as Tensors, because MindSpore rounds a Python number to float32."""
    if dtype != ms.float64:
        return options
    limits = {name: getattr(options, name) for name in ("clip_norm", "skip_norm", "noise_decay")}
    return options._replace(**{name: Tensor(limit, dtype) for name, limit in limits.items() if limit is not None})


class CompiledState(nn.Cell):  # type: ignore[misc]
    """Reads and writes a `Storage`, for the compiler to follow."""

    def __init__(self, storage: Storage, options: Options) -> None:
        super().__init__(auto_prefix=False)
        self.storage = storage
        self.steps: Any = options.steps
        self.sizes: Any = sizes_of(options.steps)
        self.calls_steps, self.by_weight = callable(self.sizes), isinstance(options.steps, UntilWeight)
        self.measures, self.measures_noise = measures(options), options.noise_decay is not None
        scale = options.scale_rule.init_scale
        self.may_be_plain = not self.measures and not self.calls_steps and SMALLEST_SCALE < scale < LARGEST_SCALE
        """Whether a window of good weights has nothing to be decided: it is applied, divided by its weight."""
        # The compiler cannot follow a function or an object inside a named tuple.
        self.options = exact_in(storage.float_dtype, options._replace(steps=None, scaler=None))
        self.float_dtype = storage.float_dtype
        self.scale_moves = options.scale_rule._replace(init_scale=1.0) != ScaleRule()
        self.true = Tensor(True)
        self.one = Tensor(1.0, storage.float_dtype)
        self.false, self.no_step, self.one_step = Tensor(False), Tensor(0, ms.int32), Tensor(1, ms.int32)
        self.zero = Tensor(0.0, storage.float_dtype)
        self.unknown = Tensor(NO_LOSS, storage.float_dtype)
        self.plain_event = Tensor([1.0, 0.0, 0.0, float("nan")], storage.float_dtype)
        """What `Storage.last_event` holds after an update that nothing was measured for."""
        self.nan, self.infinity = (Tensor(float(number), storage.float_dtype) for number in ("nan", "inf"))
        self.inner_scale = Tensor(storage.inner_scale, storage.float_dtype)
        self.varies = storage.varies
        self.size_code = Tensor([0] * STEPS + [-1 if self.by_weight else 1], ms.int32)
        self.other_codes = Tensor([*encode_terms(storage.terms_after(0))[:-1], 0], ms.int32)
        self.notes = Notes(storage.float_dtype)

    def read(self) -> Fields:
        """The state as plain Tensors, in the order of `gradaccum.kit.State`'s fields."""
        store = self.storage
        return (
            store.micro_step.value(),
            store.optimizer_step.value(),
            store.skipped_windows.value(),
            store.weight.value(),
            store.overflow & self.true,
            store.loss_scale.value(),
            store.growth_tracker.value(),
        )

    def size(self, optimizer_step: Tensor) -> Number:
        """Micro-batches in the window that follows this update, or its weight; below 1 only if the user's function returns that."""
        if self.calls_steps:
            given = self.sizes(optimizer_step)
            if isinstance(given, Tensor):
                check_size_dtype(given.dtype, self.by_weight)
                return given.reshape(())
            check_constant_size(given, self.by_weight)
            return 0 * optimizer_step + given
        return steps_at(self.sizes, optimizer_step, where)

    def is_full(self, state: Fields) -> Tensor:
        """Whether the window ends with the micro-batch that was counted last."""
        if self.calls_steps:
            # Not `ends`: the compiler takes a Tensor for a function there.
            micro_step, optimizer_step, _, weight, _, _, _ = state
            held = weight if self.by_weight else micro_step
            return held >= self.size(optimizer_step)
        return ends(state, self.steps, where)

    def grad_norm(self) -> Tensor:
        """The norm of the window that was closed last."""
        return self.storage.last_event.value()[GRAD_NORM]

    def event(self, applied: Tensor, skipped: Tensor, overflow: Tensor, grad_norm: Tensor) -> Tensor:
        """What `Storage.last_event` is to hold."""
        return ops.stack([value.astype(self.float_dtype) for value in (applied, skipped, overflow, grad_norm)])

    def write_event(self, event: Tensor) -> Tensor:
        """Assign what the next `StepResult` will say."""
        return ops.assign(self.storage.last_event, event)

    def write_open(self, state: Fields, event: Tensor | None) -> bool:
        """Assign what a micro-batch changes; without an `event` it changes neither that nor the overflow flag."""
        ops.assign(self.storage.micro_step, state[MICRO_STEP].astype(ms.int32))
        ops.assign(self.storage.weight, state[WEIGHT].astype(self.float_dtype))
        if event is not None:
            ops.assign(self.storage.overflow, state[OVERFLOW])
            self.write_event(event)
        return True

    def write_empty(self, event: Tensor) -> bool:
        """Assign what an empty window holds. The core's zeros would be operators: the compiler does not see that they are constants."""
        ops.assign(self.storage.micro_step, self.no_step)
        ops.assign(self.storage.weight, self.zero)
        ops.assign(self.storage.overflow, self.false)
        self.write_event(event)
        return True

    def write_size(self, state: Fields) -> bool:
        """Assign the size of the open window, if windows have different sizes."""
        if self.varies:
            ops.assign(self.storage.terms, self.other_codes + self.size_code * self.size(state[OPTIMIZER_STEP]).astype(ms.int32))
        return True

    def write_counters(self, state: Fields) -> bool:
        """Assign what only the end of a window changes."""
        ops.assign(self.storage.optimizer_step, state[OPTIMIZER_STEP].astype(ms.int32))
        ops.assign(self.storage.skipped_windows, state[SKIPPED_WINDOWS].astype(ms.int32))
        if self.scale_moves:
            ops.assign(self.storage.loss_scale, state[LOSS_SCALE].astype(ms.float32))
            ops.assign(self.storage.growth_tracker, state[GROWTH_TRACKER].astype(ms.int32))
        return True
