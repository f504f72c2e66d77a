"""One parameter under watch: which tensor its ``.grad`` is, and of which version, as autograd left it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from gradaccum_torch.torch_private import at_the_end_of_backward, keep_own, untraced, version
from gradaccum_torch.values import Values

_MULTIPLIED: list[Arrivals] = []
"""Of the wrapper whose own backward pass is running, if it multiplied the loss: then what reaches other wrappers is multiplied too."""


class Arrivals:
    """What the backward passes since the last micro-batch have delivered, for all parameters together."""

    def __init__(self) -> None:
        self.values = Values()
        self.gradients: list[Watched] = []
        """The parameters whose values are noted when a backward pass ends."""
        self.under_way = False
        """A backward pass has delivered something and has not ended. Outside of a backward pass it means that one raised."""
        self.inside = False
        """The backward pass is the wrapper's own."""
        self.arrived = False
        """Autograd has delivered something since the last micro-batch."""
        self.outside = False
        """Something arrived from a backward pass that is not the wrapper's own."""
        self.multiplied = False
        """Something arrived from another wrapper's own pass, of a loss that was multiplied by its weight or its loss scale."""
        self.disturbed = False
        """Something else changed a gradient before another accumulation, so that only this flag remembers the change."""

    @contextmanager
    def own_pass(self, multiplied: bool) -> Iterator[None]:
        """Inside, the wrapper's own backward pass runs; `multiplied`: of a loss that was."""
        self.inside = True
        if multiplied:
            _MULTIPLIED.append(self)
        try:
            yield
        finally:
            self.inside = False
            if multiplied:
                _MULTIPLIED.remove(self)

    def begin(self) -> None:
        """A backward pass has delivered its first gradient."""
        self.arrived = True
        if not self.inside:
            self.outside = True
            self.multiplied |= bool(_MULTIPLIED)
        self.values.noted = None
        self.under_way = at_the_end_of_backward(self._end)

    def _end(self) -> None:
        self.under_way = False
        if self.values.wanted:
            self.values.note(gradient for watched in self.gradients if (gradient := watched.parameter.grad) is not None)


class Watched:
    """One parameter, and what autograd left in its ``.grad``."""

    __slots__ = ("arrivals", "gradient", "parameter", "version")

    def __init__(self, parameter: Tensor, arrivals: Arrivals) -> None:
        self.parameter, self.arrivals = parameter, arrivals
        self.note()

    def note(self) -> None:
        """Take ``.grad`` as it is now for what autograd left there."""
        self.gradient = gradient = self.parameter.grad
        self.version = -1 if gradient is None else version(gradient)

    def arrive(self, parameter: Tensor) -> None:
        """Autograd has accumulated into the parameter: note what is there, and whether that alone turned what was noted into it."""
        before, expected = self.gradient, self.version + 1
        if before is not None and before._version == expected:
            self.version = expected  # One addition in place, as nearly always. `Sentinels.intact` sees whether it is still the parameter's.
        else:
            self._look(before, expected, parameter)
        if not self.arrivals.under_way:
            self.arrivals.begin()

    def _look(self, before: Tensor | None, expected: int, parameter: Tensor) -> None:
        if parameter.grad is not before:
            keep_own(parameter)
        self.gradient = gradient = parameter.grad
        self.version = now = -1 if gradient is None else gradient._version
        if before is not None and (gradient is not before or now != expected) and not _by_autograd(before, gradient):
            self.arrivals.disturbed = True

    def is_touched(self) -> bool:
        """True if something other than autograd wrote into ``.grad``, or replaced it."""
        gradient = self.parameter.grad
        return gradient is not self.gradient or (gradient is not None and version(gradient) != self.version)


def _by_autograd(before: Tensor, gradient: Tensor | None) -> bool:
    """Whether autograd may have turned `before` into `gradient` otherwise than by one addition in place.

    It adds out of place where it records the addition (``create_graph=True``) and where a dense gradient meets a sparse one.
    """
    if gradient is before:
        # FSDP adds to the local part of a DTensor, whose own version does not count that.
        return type(gradient) is not Tensor or _shares_memory(gradient)
    return gradient is None or torch.is_grad_enabled() or (before.is_sparse and not gradient.is_sparse)


def _shares_memory(gradient: Tensor) -> bool:
    """Whether it is a part of something larger."""
    return type(gradient) is Tensor and not gradient.is_sparse and gradient.untyped_storage().nbytes() > gradient.nbytes


untraced(Watched.arrive)
untraced(Watched._look)
untraced(Arrivals._end)
