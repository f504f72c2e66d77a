"""Detects changes to ``.grad`` that autograd did not make.

A hook runs right after autograd has added to a gradient. It records which tensor is in
``.grad``, how many times that tensor has been written to, and by what factor the loss
was multiplied. A single comparison in ``step`` then detects clipping, a
``model.zero_grad()``, an assignment, a reduction by another library, and a loss that
was not multiplied by its weight or by the loss scale. Writes that do not change the
tensor's version (through ``.data`` or NumPy) are not detected. Writes to a `DTensor`
are detected only in the first window, by comparing norms.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from gradaccum_torch.arithmetic import is_zero
from gradaccum_torch.torch_private.names import (
    call_at_the_end_of_backward,
    is_sharded,
    local,
    owns_memory,
    untraced,
)

FACTORS = [1.0]
"""A stack. Its last entry is the factor by which the loss of the current backward pass
was multiplied, or 1 for a plain ``loss.backward()``.
"""
PASSES = [0]
"""The total number of backward passes of all wrapped optimizers."""
IN_PARTS = -2
"""The value of `WatchedGradient.version` if ``.grad`` is a `DTensor`. For other
tensors, `WatchedGradient.version` is the tensor's version, which counts in-place
writes. The version of a `DTensor` is useless here, because a write to the `DTensor`'s
local part does not change the version.
"""


class WatchedGradient:
    """A parameter, and a record of its ``.grad`` after autograd's last addition."""

    __slots__ = ("gradient", "norm", "parameter", "version", "watch")

    def __init__(self, parameter: Tensor, watch: GradientWatch) -> None:
        self.parameter = parameter
        self.watch = watch
        self.note()

    def note(self) -> None:
        """Record that autograd produced the current ``.grad``."""
        gradient = self.parameter.grad
        self.gradient = gradient
        self.norm: Tensor | None = None
        """The norm of the local part of ``.grad``, if ``.grad`` is a `DTensor`. The
        norm is needed because clipping does not change the version of a `DTensor`.
        """
        if gradient is None:
            return
        if not is_sharded(gradient):
            self.version = gradient._version
            return
        self.version = IN_PARTS
        if self.watch.compares_norms:
            self.norm = local(gradient).norm()

    def gradient_arrived(self, parameter: Tensor) -> None:
        """Record that autograd has just accumulated into the gradient."""
        noted_gradient = self.gradient
        watch = self.watch
        if noted_gradient is not None and noted_gradient._version == self.version + 1:
            # This is the most common case: autograd has added one gradient in place.
            self.version += 1
        else:
            if self.parameter.grad is not noted_gradient:
                watch.new_gradients[id(parameter)] = self
            if noted_gradient is not None and not self._was_added(noted_gradient):
                watch.was_changed = True
                if not watch.is_running:
                    # The user may have cleared .grad, as netD.zero_grad() does in a
                    # GAN. The factors of the earlier losses then no longer matter.
                    watch.factors.clear()
            self.note()
        if not watch.is_running:
            watch.pass_began(id(parameter))
        if watch.move_gradient is not None:
            watch.move_gradient(self)

    def _was_added(self, noted_gradient: Tensor) -> bool:
        """True if autograd may have produced ``.grad`` by adding one gradient to
        `noted_gradient`. Normally, such an addition increases the version of
        `noted_gradient` by exactly 1. This method is called if the version has not
        increased by 1. The result is True in these cases:

        - ``.grad`` is None.
        - ``.grad`` is still `noted_gradient`, and its type is a subclass of `Tensor`,
          such as `DTensor`, whose version is not recorded.
        - ``.grad`` is a new tensor, and grad mode is enabled. With
          ``create_graph=True``, autograd puts the sum into a new tensor.
        - ``.grad`` is a new dense tensor, and `noted_gradient` is sparse. Autograd
          creates a new tensor when it adds a dense gradient to a sparse gradient.
        """
        gradient = self.parameter.grad
        if gradient is noted_gradient:
            return type(gradient) is not Tensor
        if gradient is None or torch.is_grad_enabled():
            return True
        return noted_gradient.is_sparse and not gradient.is_sparse

    def is_changed(self, gradient: Tensor) -> bool:
        """True if other code has changed ``.grad`` since autograd last added to it.
        `gradient` is the tensor that is in ``.grad`` now. If ``.grad`` is a `DTensor`,
        an in-place change is detected only if the norm was recorded.
        """
        if gradient is not self.gradient:
            return True
        if self.version != IN_PARTS:
            return gradient._version != self.version
        if self.norm is None:
            return False
        norm = local(gradient).norm()
        return not torch.allclose(norm, self.norm, rtol=0, atol=0, equal_nan=True)


class GradientWatch:
    """Detects whether any code other than autograd changes the gradients of one
    optimizer's parameters.
    """

    def __init__(self, owner: object) -> None:
        self.factors: set[float] = set()
        """The factors by which the losses were multiplied in the backward passes since
        the last ``step``.
        """
        self.was_changed = False
        """Whether other code changed a gradient before autograd added to the gradient
        again. The `WatchedGradient` does not show such a change, because it records
        only the result of the last addition.
        """
        self.has_plain_pass = False
        """Whether a plain ``loss.backward()`` has added a gradient since the last
        ``step``.
        """
        self.is_running = False
        """Whether a backward pass has begun and has not ended. It remains True after a
        backward pass that raised an error.
        """
        self.new_gradients: dict[int, WatchedGradient] = {}
        """The gradients created so far by the current backward pass, keyed by the
        parameter's id.
        """
        self.passes = 0
        """The number of the user's backward passes since the last ``step``."""
        self.engine_passes = 0
        """The number of backward passes since the last ``step``, including the passes
        that reentrant checkpointing runs inside the user's passes.
        """
        self.move_gradient: Callable[[WatchedGradient], None] | None = None
        """The function that moves a new gradient out of ``.grad``, or None if new
        gradients stay in ``.grad``.
        """
        self.compares_norms = True
        """Whether changes to sharded gradients are detected by comparing norms. This is
        True only in the first window, because a loop that changes gradients does so in
        every window.
        """
        self._first_parameter = 0
        """The id of the parameter whose gradient was the first to arrive in the current
        micro-batch. `pass_began` uses this id to tell the user's own backward passes
        from the passes that reentrant checkpointing runs inside them.
        """
        self._watched_gradients: dict[int, WatchedGradient] = {}
        """The watched gradients, keyed by ``id(parameter)`` instead of by the parameter
        itself, because ``id(parameter)`` is ten times faster than ``hash(parameter)``.
        """
        self._handles: dict[int, RemovableHandle] = {}
        # Remove the hooks when the owner is freed. Otherwise, the parameters would keep
        # the hooks alive, and with them every object to which the hooks refer.
        weakref.finalize(owner, remove, self._handles).atexit = False
        WATCHES.add(self)

    def __contains__(self, parameter: Tensor) -> bool:
        return id(parameter) in self._handles

    def follow(self, parameters: Iterable[Tensor]) -> None:
        """From now on, watch the trainable leaf tensors among `parameters`. Stop
        watching all other tensors.
        """
        trained_parameters = {
            id(parameter): parameter
            for parameter in parameters
            if parameter.requires_grad and parameter.is_leaf
        }
        for key in self._watched_gradients.keys() - trained_parameters.keys():
            self._handles.pop(key).remove()
            del self._watched_gradients[key]
        for key in trained_parameters.keys() - self._watched_gradients.keys():
            watched_gradient = WatchedGradient(trained_parameters[key], self)
            self._watched_gradients[key] = watched_gradient
            handle = trained_parameters[key].register_post_accumulate_grad_hook(
                watched_gradient.gradient_arrived
            )  # type: ignore[no-untyped-call]
            self._handles[key] = cast(RemovableHandle, handle)

    def pass_began(self, key: int) -> None:
        """Record the beginning of a backward pass and the factor by which its loss was
        multiplied. Register a callback for the end of the pass.
        """
        if not self.factors:
            self._first_parameter = key
        # Reentrant checkpointing runs separate backward passes for its segments inside
        # the user's backward pass. Therefore, a pass counts as the user's own pass only
        # if it begins with the same parameter as the micro-batch's first pass.
        if key == self._first_parameter:
            self.passes += 1
        self.engine_passes += 1
        PASSES[0] += 1
        if len(FACTORS) == 1:
            self.has_plain_pass = True
        self.factors.add(FACTORS[-1])
        self.is_running = call_at_the_end_of_backward(self._pass_ended)
        if not self.is_running:
            self._keep_new_gradients()

    def _pass_ended(self) -> None:
        self.is_running = False
        if self.new_gradients:
            self._keep_new_gradients()

    def _keep_new_gradients(self) -> None:
        """Copy each new gradient whose memory other code may write to. If autograd's
        engine is running, the copies are made only at the end of the pass, because
        autograd still refers to the gradients until then.
        """
        for watched_gradient in self.new_gradients.values():
            gradient = watched_gradient.parameter.grad
            if gradient is None or gradient is not watched_gradient.gradient:
                continue
            if not owns_memory(gradient):
                watched_gradient.parameter.grad = gradient.clone()
                watched_gradient.note()
        self.new_gradients.clear()

    def note(self, parameter: Tensor) -> None:
        """Record that autograd produced the parameter's current ``.grad``."""
        watched_gradient = self._watched_gradients.get(id(parameter))
        self.new_gradients.pop(id(parameter), None)
        if watched_gradient is not None:
            watched_gradient.note()

    def is_intact(self) -> bool:
        """True if no code other than autograd has changed the watched ``.grad``
        attributes.
        """
        if self.was_changed:
            return False
        for watched_gradient in self._watched_gradients.values():
            gradient = watched_gradient.parameter.grad
            if gradient is not watched_gradient.gradient:
                return False
            if gradient is None or gradient._version == watched_gradient.version:
                continue
            if watched_gradient.is_changed(gradient):
                return False
        return True

    def holds_other_gradients(
        self, parameters: Iterable[Tensor], *, is_separate: bool
    ) -> bool:
        """True if other code has changed any ``.grad``. Pass ``is_separate=True`` if
        ``.grad`` contains no part of the window's sum. The result is then also True if
        any ``.grad`` is nonzero. This may synchronize with the device.
        """
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is None:
                continue
            watched_gradient = self._watched_gradients.get(id(parameter))
            if watched_gradient is None or watched_gradient.is_changed(gradient):
                return True
            if is_separate and not is_zero(gradient):
                return True
        return False

    def micro_batch_ended(self) -> None:
        """Clear the record of the micro-batch's backward passes, but keep the record of
        the gradients.
        """
        self.factors.clear()
        self.passes = 0
        self.engine_passes = 0
        self.has_plain_pass = False

    @property
    def has_seen_anything(self) -> bool:
        """True if, since the last `reset`, a backward pass has begun or other code has
        changed a gradient.
        """
        return bool(self.factors) or self.is_running or self.was_changed

    def reset(self) -> None:
        """Treat every current ``.grad`` as the work of autograd, and forget all
        backward passes so far.
        """
        self.micro_batch_ended()
        self.was_changed = False
        self.is_running = False
        self.new_gradients.clear()
        for watched_gradient in self._watched_gradients.values():
            watched_gradient.note()


WATCHES: weakref.WeakSet[GradientWatch] = weakref.WeakSet()
"""The `GradientWatch` of each wrapped optimizer that is still alive."""


def is_watched(parameter: Tensor) -> bool:
    return any(parameter in watch for watch in list(WATCHES))


def remove(handles: dict[int, RemovableHandle]) -> None:
    for handle in handles.values():
        handle.remove()
    handles.clear()


for _hook in (
    WatchedGradient.gradient_arrived,
    GradientWatch.pass_began,
    GradientWatch._pass_ended,
    GradientWatch._keep_new_gradients,
):
    untraced(_hook)


@contextmanager
def delivering_zeros(leaves: Iterable[Tensor]) -> Iterator[None]:
    """Inside the block, every gradient that a backward pass computes for `leaves` is
    replaced with zeros, even a gradient that is NaN.
    """
    handles = [
        leaf.register_hook(torch.zeros_like)  # type: ignore[no-untyped-call]
        for leaf in leaves
        if leaf.requires_grad and leaf.is_leaf
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
