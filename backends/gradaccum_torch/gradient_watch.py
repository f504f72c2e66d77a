"""The watch over ``.grad``: what autograd delivers to it, and whether anything else
changes it.

A hook runs right after autograd has added to a gradient. It notes which tensor ``.grad``
is, how often that was written into, and by what factor the loss was multiplied. So one
comparison in ``step`` finds a clip, a ``model.zero_grad()``, an assignment, a reduction
by another library, and a loss without its weight or its loss scale. Writes that torch
does not count (through ``.data``, by NumPy) are not found; of a `DTensor` they are found
in the first window, by norms.
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
"""The factor of the loss that is differentiated now, last; 1 for a plain
``loss.backward()``.
"""
PASSES = [0]
"""The number of backward passes that any wrapper has seen."""
IN_PARTS = -2
"""The version of a `DTensor`, whose parts are written into without being counted."""


class WatchedGradient:
    """One parameter, and its ``.grad`` as autograd left it."""

    __slots__ = ("gradient", "norm", "parameter", "version", "watch")

    def __init__(self, parameter: Tensor, watch: GradientWatch) -> None:
        self.parameter = parameter
        self.watch = watch
        self.note()

    def note(self) -> None:
        """Take ``.grad`` as it is now for autograd's."""
        gradient = self.parameter.grad
        self.gradient = gradient
        self.version = -1
        self.norm: Tensor | None = None
        """Of the local part of a `DTensor`, which does not count a clip."""
        if gradient is not None and is_sharded(gradient):
            self.version = IN_PARTS
            if self.watch.compares_norms:
                self.norm = local(gradient).norm()
        elif gradient is not None:
            self.version = gradient._version

    def gradient_arrived(self, parameter: Tensor) -> None:
        """Note that autograd has just added to the gradient."""
        noted_gradient = self.gradient
        watch = self.watch
        if noted_gradient is not None and noted_gradient._version == self.version + 1:
            # One addition in place, as nearly always.
            self.version += 1
        else:
            if self.parameter.grad is not noted_gradient:
                watch.new_gradients[id(parameter)] = self
            if noted_gradient is not None and not self._was_added(noted_gradient):
                watch.was_changed = True
                if not watch.is_running:
                    # Where the user has replaced .grad since, as netD.zero_grad() of a
                    # GAN does, what was multiplied is gone.
                    watch.factors.clear()
            self.note()
        if not watch.is_running:
            watch.pass_began(id(parameter))
        if watch.move_gradient is not None:
            watch.move_gradient(self)

    def _was_added(self, noted_gradient: Tensor) -> bool:
        """True if one addition by autograd may have made this of the noted gradient.

        Autograd adds out of place with ``create_graph=True``, and where dense meets
        sparse. A `DTensor` may count several writes.
        """
        gradient = self.parameter.grad
        if gradient is noted_gradient:
            return type(gradient) is not Tensor or gradient.is_sparse
        return gradient is None or gradient.requires_grad or noted_gradient.is_sparse

    def is_changed(self) -> bool:
        gradient = self.parameter.grad
        if gradient is not self.gradient:
            return True
        if gradient is None:
            return False
        if self.version != IN_PARTS:
            return gradient._version != self.version
        if self.norm is None:
            return False
        norm = local(gradient).norm()
        return not torch.allclose(norm, self.norm, rtol=0, atol=0, equal_nan=True)


class GradientWatch:
    """The watch over the gradients of one optimizer's parameters."""

    def __init__(self) -> None:
        self.factors: set[float] = set()
        """The factors of the losses whose gradients have arrived since the last
        ``step``.
        """
        self.was_changed = False
        """Autograd has added to a gradient that something else had changed."""
        self.has_plain_pass = False
        """A gradient of a plain ``loss.backward()`` has arrived since the last
        ``step``.
        """
        self.is_running = False
        """A backward pass has begun and not ended. Outside of a pass: it raised."""
        self.new_gradients: dict[int, WatchedGradient] = {}
        """The gradients that the pass under way has made, by the id of the parameter."""
        self.passes = 0
        """The user's backward passes since the last ``step``."""
        self.engine_passes = 0
        """The same with the passes of a reentrant checkpoint, inside the user's."""
        self.move_gradient: Callable[[WatchedGradient], None] | None = None
        """Moves a gradient that has arrived out of ``.grad``."""
        self.compares_norms = True
        """In the first window, the norms of sharded gradients are compared: a training
        loop does to every window what it did to its first.
        """
        self._first_parameter = 0
        """The id of the parameter with which the micro-batch's first pass began."""
        self._watched_gradients: dict[int, WatchedGradient] = {}
        """Keyed by id(): the same identity as hash(tensor), ten times faster."""
        self._handles: dict[int, RemovableHandle] = {}
        WATCHES.add(self)

    def end_with(self, owner: object) -> None:
        """Stop to watch when `owner` is freed: torch keeps a hook on its parameter, and
        the hook keeps what it refers to.
        """
        weakref.finalize(owner, remove, self._handles).atexit = False

    def __contains__(self, parameter: Tensor) -> bool:
        return id(parameter) in self._handles

    def follow(self, parameters: Iterable[Tensor]) -> None:
        """Watch these parameters, as far as they are trained, and no others."""
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
        """Note the factor of the backward pass, and wait for its end."""
        if not self.factors:
            self._first_parameter = key
        # A reentrant checkpoint runs a pass for each of its segments inside the user's,
        # which is over when its first parameter comes again.
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
        """Copy each new gradient into whose memory somebody else may write; during the
        pass autograd itself holds it.
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
        """Take the ``.grad`` of one parameter as it is now for autograd's."""
        watched_gradient = self._watched_gradients.get(id(parameter))
        self.new_gradients.pop(id(parameter), None)
        if watched_gradient is not None:
            watched_gradient.note()

    def is_intact(self) -> bool:
        """True if every ``.grad`` is as autograd left it."""
        if self.was_changed:
            return False
        for watched_gradient in self._watched_gradients.values():
            gradient = watched_gradient.parameter.grad
            if gradient is not watched_gradient.gradient:
                return False
            if gradient is None or gradient._version == watched_gradient.version:
                continue
            if watched_gradient.is_changed():
                return False
        return True

    def holds_other_gradients(
        self, parameters: Iterable[Tensor], *, is_separate: bool
    ) -> bool:
        """True if ``.grad`` holds what no backward pass brought; `is_separate`: it
        holds no part of the sum. May wait for the device.
        """
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is None:
                continue
            watched_gradient = self._watched_gradients.get(id(parameter))
            if watched_gradient is None or watched_gradient.is_changed():
                return True
            if is_separate and not is_zero(gradient):
                return True
        return False

    def micro_batch_ended(self) -> None:
        """Forget what the micro-batch brought; its gradients stay noted."""
        self.factors.clear()
        self.passes = 0
        self.engine_passes = 0
        self.has_plain_pass = False

    @property
    def has_seen_anything(self) -> bool:
        """True if a backward pass has begun since the last `reset`, or something has
        changed a gradient.
        """
        return bool(self.factors) or self.is_running or self.was_changed

    def reset(self) -> None:
        """Take every ``.grad`` as it is now for autograd's."""
        self.micro_batch_ended()
        self.was_changed = False
        self.is_running = False
        self.new_gradients.clear()
        for watched_gradient in self._watched_gradients.values():
            watched_gradient.note()


WATCHES: weakref.WeakSet[GradientWatch] = weakref.WeakSet()
"""The watches of all living wrappers."""


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
    """Turn whatever a backward pass brings to `leaves` inside the block into zeros, NaN
    too.
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
