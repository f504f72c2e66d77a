"""One parameter under watch: which tensor its ``.grad`` is, and of which version, as autograd left it."""

from __future__ import annotations

import sys
from functools import partial

import torch
from torch import Tensor
from torch.autograd import Variable

from gradaccum_torch.hooks import untraced
from gradaccum_torch.values import Values


class Arrivals:
    """What is known of the backward passes since the last micro-batch, by all parameters together."""

    def __init__(self) -> None:
        self.values = Values()
        self.gradients: list[Watched] = []
        """Those whose values are noted when a backward pass ends."""
        self.sharing: list[Watched] = []
        """Those whose gradients are parts of something larger, as those of parameters that ``torch.cat`` joined are."""
        self.settled = True
        """Those were noted when the last backward pass had ended: all parts count their versions together."""
        self.under_way = False
        """A backward pass has delivered something and has not ended; outside of one: it raised."""
        self.inside = False
        """The backward pass is the wrapper's own."""
        self.arrived = False
        """Autograd has delivered something since the last micro-batch."""
        self.outside = False
        """Something arrived from a backward pass that is not the wrapper's own."""
        self.disturbed = False
        """A change by someone else was followed by another accumulation, so that only this remembers it."""

    def begin(self) -> None:
        """A backward pass has delivered its first gradient; torch forgets what is queued here where the pass raises."""
        self.arrived = True
        if not self.inside:
            self.outside = True
        self.values.forget()
        self.settled = False
        if _ends():
            self.under_way = True
            Variable._execution_engine.queue_callback(partial(Arrivals._end, self))

    def _end(self) -> None:
        self.under_way, self.settled = False, True
        self.sharing = [watched for watched in self.sharing if watched.parameter.grad is watched.gradient]
        for watched in self.sharing:
            watched.note()
        if self.values.wanted:
            self.values.note(gradient for watched in self.gradients if (gradient := watched.parameter.grad) is not None)


def _ends() -> bool:
    """Whether the engine will tell that the backward pass has ended.

    FSDP calls the hooks of what it reduces after the backward pass, and a compiled backward pass runs outside of the engine.
    """
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    return torch._C._current_graph_task_id() >= 0 and not getattr(compiled, "in_compiled_autograd_region", False)


class Watched:
    """One parameter, and what autograd left in its ``.grad``."""

    __slots__ = ("arrivals", "gradient", "parameter", "version")

    def __init__(self, parameter: Tensor, arrivals: Arrivals) -> None:
        self.parameter, self.arrivals = parameter, arrivals
        self.note()

    def note(self) -> None:
        """Take ``.grad`` as it is now for what autograd left there."""
        self.gradient = gradient = self.parameter.grad
        self.version = -1 if gradient is None else gradient._version

    def arrive(self, parameter: Tensor) -> None:
        """Autograd has accumulated into the parameter: note what is there, and whether that alone turned what was noted into it."""
        before, version, gradient = self.gradient, self.version, parameter.grad
        self.gradient = gradient
        self.version = now = -1 if gradient is None else gradient._version
        if before is None:
            if gradient is not None and _shares_memory(gradient):
                self.arrivals.sharing.append(self)
        elif (gradient is not before or now != version + 1) and not _by_autograd(before, gradient):
            self.arrivals.disturbed = True
        if not self.arrivals.under_way:
            self.arrivals.begin()

    def is_touched(self) -> bool:
        """Whether somebody else wrote, and not autograd into another part of the same memory."""
        gradient = self.parameter.grad
        if gradient is not self.gradient:
            return True
        return gradient is not None and gradient._version != self.version and (self.arrivals.settled or not _shares_memory(gradient))


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
untraced(Arrivals._end)
