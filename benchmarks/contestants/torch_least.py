"""The least Python that keeps what gradaccum promises where nothing is measured: the
floor under its time in small models.

One plain object for one optimizer, without options, groups, masters, workers, listeners
or checkpoints, and with every answer known. It notices a change of a ``.grad`` and a
backward pass that raised, copies a gradient that lies in others' memory, counts by the
transitions of the core, divides what the window holds, and notes what tells whether an
update that raised was half made.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from benchmarks.contestants.torch_loops import DEVICE, STEPS, Loss, Window, wait
from gradaccum.kit import (
    accumulate,
    at_rest,
    close,
    decide,
    ends,
    initial_state,
    make_options,
    select,
)

_VERSION = attrgetter("_version")
_OPTIONS = make_options(STEPS, on_overflow="ignore")
_MEASURING = make_options(STEPS)


def least_separate(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss: Loss
) -> Window:
    """A loop as with ``separate_sums=True``, around `LeastSeparate`."""
    return _loop(model, LeastSeparate(model, optimizer), loss)


def least(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Loss) -> Window:
    """A loop as with gradaccum, around `LeastAccumulator`."""
    return _loop(model, LeastAccumulator(model, optimizer), loss)


def _loop(
    model: nn.Module, accumulator: LeastAccumulator | LeastSeparate, loss: Loss
) -> Window:
    def window() -> None:
        for _ in range(STEPS):
            loss(model).backward()  # type: ignore[no-untyped-call]
            accumulator.step()
        wait()

    return window


class _Watched:
    """The gradient that autograd left, and its version."""

    __slots__ = ("gradient", "parameter", "passes", "version")

    def __init__(self, parameter: Tensor, passes: _Passes) -> None:
        self.parameter, self.passes = parameter, passes
        self.gradient: Tensor | None = None
        self.version = -1

    def arrive(self, parameter: Tensor) -> None:
        before, expected = self.gradient, self.version + 1
        if before is not None and before._version == expected:
            self.version = expected
        else:
            self.gradient = gradient = parameter.grad
            self.version = -1 if gradient is None else gradient._version
            if before is None:
                self.passes.fresh.append(self)
        if not self.passes.under_way:
            self.passes.begin()


class _Passes:
    """Whether a backward pass has delivered something and has not ended, and the
    gradients that it has made anew.
    """

    __slots__ = ("fresh", "under_way")

    def __init__(self) -> None:
        self.under_way, self.fresh = False, list[_Watched]()

    def begin(self) -> None:
        self.under_way = True
        Variable._execution_engine.queue_callback(self.end)

    def end(self) -> None:
        self.under_way = False
        for watched in self.fresh:
            gradient: Any = watched.gradient
            storage = gradient.untyped_storage()
            if (
                not storage.resizable()
                or torch._C._storage_Use_Count(storage._cdata) > 2
            ):
                watched.parameter.grad = watched.gradient = gradient.clone()
                watched.version = 0
        self.fresh.clear()


class Watch:
    """Notices a change of a ``.grad`` that no backward pass made, and a backward pass
    that raised; copies what is in others' memory.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.passes = _Passes()
        self.watched = [_Watched(parameter, self.passes) for parameter in parameters]
        for watched in self.watched:
            watched.parameter.register_post_accumulate_grad_hook(watched.arrive)  # type: ignore[no-untyped-call]

    def require_whole(self) -> None:
        for watched in self.watched:
            gradient = watched.parameter.grad
            if gradient is not watched.gradient or (
                gradient is not None and gradient._version != watched.version
            ):
                raise RuntimeError("something changed .grad")
        if self.passes.under_way:
            raise RuntimeError("a backward pass raised")

    def clear(self) -> None:
        """Free the gradients."""
        for watched in self.watched:
            watched.parameter.grad = watched.gradient = None
            watched.version = -1


class LeastAccumulator:
    """Accumulates for one optimizer, whose step it calls once per window."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.inner: Any = optimizer
        self.fused = bool(optimizer.defaults.get("fused"))
        self.parameters, self.fields = list(model.parameters()), initial_state()
        self.watch = Watch(self.parameters)
        self.before: list[list[int]] = []
        """The versions before the update: of the sum, the parameters, the divided sum
        and the optimizer's state.
        """

    def step(self) -> None:
        """Count a micro-batch; the last one of the window applies the update."""
        self.watch.require_whole()
        self.fields = fields = at_rest(accumulate(self.fields, 1.0, True, select))
        if ends(fields, STEPS, select):
            self._close()

    def _close(self) -> None:
        apply, overflow, divisor, _ = decide(
            self.fields, math.nan, True, _OPTIONS, select
        )
        gradients = [
            parameter.grad
            for parameter in self.parameters
            if parameter.grad is not None
        ]
        undivided = list(map(_VERSION, gradients))
        if self.fused:
            self.inner.grad_scale, self.inner.found_inf = (
                torch.tensor(divisor, device=DEVICE),
                None,
            )
        else:
            torch._foreach_mul_(gradients, torch.tensor(1 / divisor, device=DEVICE))
        state = self.inner.state.get(self.parameters[0], {}).values()
        moved = [value._version for value in state if isinstance(value, Tensor)]
        self.before = [
            undivided,
            list(map(_VERSION, self.parameters)),
            list(map(_VERSION, gradients)),
            moved,
        ]
        try:
            self.inner.step()
        finally:
            if self.fused:
                del self.inner.grad_scale, self.inner.found_inf
        self.fields = at_rest(close(self.fields, apply, overflow, _OPTIONS, select))
        self.watch.clear()


class LeastSeparate:
    """The floor of ``separate_sums=True``: ``.grad`` is the user's between two steps,
    and an inf or NaN skips the window's update.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.inner, self.parameters, self.passes = (
            optimizer,
            list(model.parameters()),
            _Passes(),
        )
        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(self._arrive)  # type: ignore[no-untyped-call]
        self.fields, self.sums = initial_state(), list[Tensor]()

    def _arrive(self, _: Tensor) -> None:
        if not self.passes.under_way:
            self.passes.begin()

    def step(self) -> None:
        """Move a micro-batch out of ``.grad``; the last one of the window applies the
        update.
        """
        if self.passes.under_way:
            raise RuntimeError("a backward pass raised")
        gradients = [
            parameter.grad
            for parameter in self.parameters
            if parameter.grad is not None
        ]
        if self.sums:
            torch._foreach_add_(self.sums, gradients)
        else:  # Copies, since somebody else may hold the memory.
            self.sums = [gradient.clone() for gradient in gradients]
        for parameter in self.parameters:
            parameter.grad = None
        self.fields = fields = at_rest(accumulate(self.fields, 1.0, True, select))
        if ends(fields, STEPS, select):
            self._close()

    def _close(self) -> None:
        norm = torch.linalg.vector_norm(
            torch.stack(torch._foreach_norm(self.sums))
        ).item()
        apply, overflow, divisor, _ = decide(
            self.fields, norm, math.isfinite(norm), _MEASURING, select
        )
        if apply:
            torch._foreach_mul_(self.sums, torch.tensor(1 / divisor, device=DEVICE))
            for parameter, total in zip(self.parameters, self.sums, strict=True):
                parameter.grad = total
            self.inner.step()
        for parameter in self.parameters:
            parameter.grad = None
        self.sums = []
        self.fields = at_rest(close(self.fields, apply, overflow, _MEASURING, select))
