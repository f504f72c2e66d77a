"""The watch over ``.grad``: what autograd delivers to it, and whether anything else
changes it.

A hook runs right after autograd has added to a gradient. It notes which tensor ``.grad``
is, how often that was written into, and by what factor the loss was multiplied. So one
comparison in ``step`` finds a clip, a ``model.zero_grad()``, an assignment, a reduction
by another library, and a loss without its weight or its loss scale. Writes that torch
does not count (through ``.data``, by NumPy) are not found.
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
from gradaccum_torch.checks import Change
from gradaccum_torch.torch_private.names import (
    call_at_the_end_of_backward,
    is_sharded,
    local,
    owns_memory,
    processes,
    untraced,
)

FACTORS = [1.0]
"""The factor of the loss that is differentiated now, last; 1 for a plain
``loss.backward()``.
"""
PASSES = [0]
"""The number of backward passes that any wrapper has seen."""


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
        self.norm: Tensor | None = None
        """Of the local part of a `DTensor`, which counts no clip."""
        if gradient is None:
            self.version = -1
            return
        self.version = gradient._version
        if self.watch.compares_norms and is_sharded(gradient):
            self.norm = local(gradient).norm()

    def gradient_arrived(self, parameter: Tensor) -> None:
        """Note that autograd has just added to the gradient."""
        gradient = self.gradient
        if gradient is None or self.norm is not None:
            self._look(gradient)
        elif gradient._version == self.version + 1:
            # One addition in place, as nearly always.
            self.version += 1
        else:
            self._look(gradient)
        watch = self.watch
        if not watch.is_running:
            watch.pass_began(id(parameter))
        if watch.move_gradient is not None:
            watch.move_gradient(self)

    def _look(self, noted_gradient: Tensor | None) -> None:
        gradient = self.parameter.grad
        if gradient is not None and gradient.requires_grad:
            self.watch.has_graph = True
        elif gradient is not noted_gradient:
            self.watch.new_gradients.append(self)
        if noted_gradient is not None and not self._was_added(gradient):
            change = change_between(noted_gradient, gradient, has_arrived=True)
            self.watch.change = self.watch.change or change
            if not self.watch.is_running:
                # Where the user has replaced .grad since, as netD.zero_grad() of a GAN
                # does, what was multiplied is gone.
                self.watch.factors.clear()
        self.note()

    def _was_added(self, gradient: Tensor | None) -> bool:
        """True if one addition by autograd may have made this of the noted gradient.

        Autograd adds out of place with ``create_graph=True``, and where dense meets
        sparse. FSDP2 adds to the local part of a `DTensor`.
        """
        noted_gradient = self.gradient
        if gradient is noted_gradient:
            if type(gradient) is not Tensor or gradient.is_sparse:
                return True
            return gradient._version == self.version + 1
        return (
            gradient is None
            or gradient.requires_grad
            or (noted_gradient is not None and noted_gradient.is_sparse)
        )

    def is_changed(self) -> bool:
        gradient = self.parameter.grad
        if gradient is not self.gradient:
            return True
        if gradient is None:
            return False
        return gradient._version != self.version or not self.has_same_norm(gradient)

    def has_same_norm(self, gradient: Tensor) -> bool:
        if self.norm is None:
            return True
        norm = local(gradient).norm()
        return torch.allclose(norm, self.norm, rtol=0, atol=0, equal_nan=True)


class GradientWatch:
    """The watch over the gradients of one optimizer's parameters."""

    def __init__(self) -> None:
        self.factors: set[float] = set()
        """The factors of the losses whose gradients have arrived since the last
        ``step``.
        """
        self.change: Change | None = None
        """Autograd has added to a gradient that something else had changed."""
        self.has_plain_pass = False
        """A gradient of a plain ``loss.backward()`` has arrived since the last
        ``step``.
        """
        self.has_graph = False
        """A gradient can be differentiated again."""
        self.is_running = False
        """A backward pass has begun and not ended. Outside of a pass: it raised."""
        self.compares_norms = True
        """In the first window, the norms of sharded gradients are compared: a training
        loop does to every window what it did to its first.
        """
        self.new_gradients: list[WatchedGradient] = []
        """The gradients that the pass under way has made."""
        self.passes = 0
        """The backward passes since the last ``step``."""
        self.move_gradient: Callable[[WatchedGradient], None] | None = None
        """Moves a gradient that has arrived out of ``.grad``."""
        self._first_parameter = 0
        """The id of the parameter with which the micro-batch's first pass began."""
        self._watched: dict[int, WatchedGradient] = {}
        """Keyed by id(): the same identity as hash(tensor), ten times faster."""
        self._handles: dict[int, RemovableHandle] = {}
        WATCHES.add(self)

    def end_with(self, owner: object, *, clears: bool) -> None:
        """Stop to watch when `owner` is freed: torch keeps a hook on its parameter, and
        the hook keeps what it refers to.

        - `clears`: what the watch has seen in ``.grad`` is a part of a sum, which must
          not become a part of a later optimizer's.
        """
        finalizer = weakref.finalize(owner, free, self._watched, self._handles, clears)
        finalizer.atexit = False

    def __contains__(self, parameter: Tensor) -> bool:
        return id(parameter) in self._handles

    def follow(self, parameters: Iterable[Tensor]) -> None:
        """Watch these parameters, as far as they are trained, and no others."""
        trained = {
            id(parameter): parameter
            for parameter in parameters
            if parameter.requires_grad and parameter.is_leaf
        }
        if trained.keys() == self._watched.keys():
            return
        for key in self._watched.keys() - trained.keys():
            self._handles.pop(key).remove()
            del self._watched[key]
        for key, parameter in trained.items():
            if key not in self._watched:
                watched = WatchedGradient(parameter, self)
                self._watched[key] = watched
                handle = parameter.register_post_accumulate_grad_hook(
                    watched.gradient_arrived
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
        for watched in self.new_gradients:
            gradient = watched.parameter.grad
            if gradient is None or gradient is not watched.gradient:
                continue
            if not owns_memory(gradient):
                watched.parameter.grad = gradient.clone()
                watched.note()
        self.new_gradients.clear()

    def note(self, parameter: Tensor) -> None:
        """Take the ``.grad`` of one parameter as it is now for autograd's."""
        watched = self._watched.get(id(parameter))
        if watched is not None:
            watched.note()

    def is_intact(self) -> bool:
        """True if every ``.grad`` is as autograd left it."""
        if self.change is not None:
            return False
        for watched in self._watched.values():
            gradient = watched.parameter.grad
            if gradient is not watched.gradient:
                return False
            if gradient is None:
                continue
            if gradient._version != watched.version:
                return False
            if watched.norm is not None and not watched.has_same_norm(gradient):
                return False
        return True

    def is_shared(self) -> bool:
        """True if another wrapped optimizer has some of the parameters too."""
        others = [watch for watch in list(WATCHES) if watch is not self]
        return any(self._handles.keys() & watch._handles.keys() for watch in others)

    def likely_change(self) -> Change:
        """Return what was done to ``.grad``; may wait for the device."""
        if self.is_shared():
            return Change.SHARED
        change = self.change
        for watched in self._watched.values():
            if change is None and watched.is_changed():
                change = change_between(watched.gradient, watched.parameter.grad)
        if change is None or (change is Change.WRITTEN and processes() > 1):
            return Change.REDUCED
        return change

    def holds_gradients(self) -> bool:
        return any(watched.gradient is not None for watched in self._watched.values())

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
            watched = self._watched.get(id(parameter))
            if watched is None or watched.is_changed():
                return True
            if is_separate and not is_zero(gradient):
                return True
        return False

    def micro_batch_ended(self) -> None:
        """Forget what the micro-batch brought; its gradients stay noted."""
        self.factors.clear()
        self.passes = 0
        self.has_plain_pass = False

    @property
    def has_seen_anything(self) -> bool:
        """True if a backward pass has begun since the last `reset`, or something has
        changed a gradient.
        """
        return bool(self.factors) or self.is_running or self.change is not None

    def reset(self) -> None:
        """Take every ``.grad`` as it is now for autograd's."""
        self.micro_batch_ended()
        self.change = None
        self.has_graph = False
        self.is_running = False
        self.new_gradients.clear()
        for watched in self._watched.values():
            watched.note()


WATCHES: weakref.WeakSet[GradientWatch] = weakref.WeakSet()
"""The watches of all living wrappers."""


def is_watched(parameter: Tensor) -> bool:
    return any(parameter in watch for watch in list(WATCHES))


def free(
    watched_gradients: dict[int, WatchedGradient],
    handles: dict[int, RemovableHandle],
    clears: bool,
) -> None:
    """Remove the hooks of a watch that is being freed; if it `clears`, clear what its
    window has left in ``.grad`` of parameters that no other wrapped optimizer has.
    """
    for handle in handles.values():
        handle.remove()
    handles.clear()
    for watched in watched_gradients.values() if clears else ():
        parameter = watched.parameter
        is_left = parameter.grad is not None and parameter.grad is watched.gradient
        if is_left and not is_watched(parameter):
            parameter.grad = None


def change_between(
    noted_gradient: Tensor | None, gradient: Tensor | None, has_arrived: bool = False
) -> Change:
    """Return the likeliest cause of a change; may wait for the device.

    - `has_arrived`: autograd has added since, to nothing if the gradient has not been
      written into.
    """
    if gradient is None:
        return Change.CLEARED
    if gradient is not noted_gradient:
        is_new = has_arrived and gradient._version == 0
        return Change.CLEARED if is_new else Change.REPLACED
    return Change.CLEARED if is_zero(gradient) else Change.WRITTEN


for _called in (
    WatchedGradient.gradient_arrived,
    WatchedGradient._look,
    GradientWatch.pass_began,
    GradientWatch._pass_ended,
    GradientWatch._keep_new_gradients,
):
    untraced(_called)


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
