"""The state of a window as tensors: read, and assigned with no more operators than there are fields to change.

A kernel costs about the same for one number as for a thousand, so a micro-batch assigns only what it changes.
"""

from __future__ import annotations

from typing import Any

import mindspore as ms
from mindspore import Tensor, nn, ops

from gradaccum.kit import Options, ScaleRule, close, discard, encode_terms, ends, steps_at
from gradaccum_mindspore.notes import Notes
from gradaccum_mindspore.sizes import check_constant_size, check_size_dtype
from gradaccum_mindspore.state import Storage
from gradaccum_mindspore.sums import compiled_clear


def where(condition: Any, a: Any, b: Any) -> Any:
    """`mindspore.ops.where`, as a function the compiler can follow."""
    return ops.where(condition, a, b)


class CompiledState(nn.Cell):  # type: ignore[misc]
    """Reads and writes a `Storage`, for the compiler to follow."""

    def __init__(self, storage: Storage, options: Options) -> None:
        super().__init__(auto_prefix=False)
        self.storage = storage
        self.steps: Any = options.steps
        self.calls_steps = callable(options.steps)
        # A function or an object inside a named tuple is nothing the compiler can follow.
        self.options = options._replace(steps=None, scaler=None)
        self.float_dtype = storage.float_dtype
        self.scale_moves = options.scale_rule._replace(init_scale=1.0) != ScaleRule()
        self.true = Tensor(True)
        self.one = Tensor(1.0, storage.float_dtype)
        self.inner_scale = Tensor(storage.inner_scale, storage.float_dtype)
        self.varies = storage.varies
        self.last_code = Tensor([0, 0, 0, 1], ms.int32)
        self.other_codes = Tensor([*encode_terms(storage.terms_after(0))[:3], 0], ms.int32)
        self.notes = Notes(storage.float_dtype)

    def read(self) -> Any:
        """The state as plain tensors."""
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

    def size(self, optimizer_step: Any) -> Any:
        """Micro-batches in the window that follows this update; below 1 only where a function of the user's gives that."""
        if self.calls_steps:
            given = self.steps(optimizer_step)
            if isinstance(given, Tensor):
                check_size_dtype(given.dtype)
                return given.reshape(())
            return 0 * optimizer_step + check_constant_size(given)
        return steps_at(self.steps, optimizer_step, where)

    def is_full(self, state: Any) -> Any:
        """Whether the window ends with the micro-batch that was counted last."""
        if self.calls_steps:
            # Not `ends`: the compiler takes a Tensor for a function there.
            micro_step, optimizer_step, _, _, _, _, _ = state
            return micro_step >= self.size(optimizer_step)
        return ends(state, self.steps, where)

    def write_size(self, state: Any) -> Any:
        """Assign the size of the open window, where it is not the same in every window."""
        if self.varies:
            ops.assign(self.storage.terms, self.other_codes + self.last_code * self.size(state[1]).astype(ms.int32))
        return True

    def norm(self) -> Any:
        """The `grad_norm` of the last window."""
        return self.storage.last_event.value()[3]

    def event(self, applied: Any, skipped: Any, overflow: Any, grad_norm: Any) -> Any:
        """What `Storage.last_event` is to hold."""
        return ops.stack([value.astype(self.float_dtype) for value in (applied, skipped, overflow, grad_norm)])

    def write_event(self, event: Any) -> Any:
        """Assign what a `StepResult` will say."""
        return ops.assign(self.storage.last_event, event)

    def write_open(self, state: Any, event: Any) -> Any:
        """Assign what a micro-batch changes."""
        store = self.storage
        ops.assign(store.micro_step, state[0].astype(ms.int32))
        ops.assign(store.weight, state[3].astype(self.float_dtype))
        if event is not None:
            ops.assign(store.overflow, state[4])
            self.write_event(event)
        return True

    def write_closed(self) -> Any:
        """Clear the sums, assign the state after the window and what became of it."""
        store, notes = self.storage, self.notes
        apply, overflow = notes.applied & self.true, notes.overflow & self.true
        after = close(self.read(), apply, overflow, self.options, where)
        compiled_clear(store.sums, after[3])
        self.write_open(after, self.event(apply, apply == False, overflow, notes.grad_norm.value()))  # noqa: E712
        ops.assign(store.optimizer_step, after[1].astype(ms.int32))
        ops.assign(store.skipped_windows, after[2].astype(ms.int32))
        if self.scale_moves:
            ops.assign(store.loss_scale, after[5].astype(ms.float32))
            ops.assign(store.growth_tracker, after[6].astype(ms.int32))
        return True

    def forget(self) -> Any:
        """Assign the state with the open window forgotten."""
        state = discard(self.read())
        event = self.event(state[0] < 0, state[0] < 0, state[0] < 0, self.norm())
        compiled_clear(self.storage.sums, state[3])
        return self.write_open(state, event)
