"""The sum of a window's gradients. It is kept either in ``.grad`` itself, where
autograd accumulates gradients anyway, or in separate buffers.

At the end of a window, `Window` reads the sum as a mapping from each parameter to a
tensor. `gradaccum_torch.arithmetic` computes the norm of the sum and divides the sum.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from gradaccum.kit import Options
from gradaccum_torch.arithmetic import add, all_finite, gradient_dtype, sum_dtype
from gradaccum_torch.gradient_watch import GradientWatch, WatchedGradient
from gradaccum_torch.torch_private.names import keep_own, untraced

Gradients = dict[Tensor, Tensor]
"""A mapping from each parameter to its gradient. Parameters without a gradient are left
out.
"""
GetParameters = Callable[[], list[Tensor]]


class UpdateGuard(Protocol):
    """An object whose flag `is_broken` shows that a gradient sum may be incomplete. The
    flag is set before a gradient sum is modified, and is cleared after the
    modification. If an exception interrupts the modification, the flag stays set.
    """

    is_broken: bool


class GradientSum:
    """The sum of the open window's gradients, kept in ``.grad`` itself. This kind of
    sum needs no second buffer, and no additional work for each micro-batch.
    """

    is_beside_grad = False
    """Whether the sum is kept outside ``.grad``, so that ``.grad`` contains only the
    current micro-batch's gradient.
    """
    expects_windows = False
    """Whether `expect_window` has to be called before each window."""
    adds_at_once = False
    """Whether a `SumOnArrival` moves every gradient out of ``.grad`` immediately. This
    is necessary if the backward passes of several micro-batches run before the next
    ``step``.
    """

    def __init__(self, parameters: GetParameters, watch: GradientWatch) -> None:
        self.parameters = parameters
        self.watch = watch

    def expect_window(self, size: object) -> None:
        """Prepare for the next window. The window's size is a number of micro-batches,
        a weight, or None if only ``flush`` closes the window.
        """

    def follow_additions(self, gradient_added: Callable[[Tensor], None] | None) -> bool:
        """From now on, call ``gradient_added(parameter)`` whenever a gradient has been
        added to the sum of `parameter` during a backward pass. If `gradient_added` is
        None, stop these calls. Return False if gradients are added only in ``step``.
        """
        if gradient_added is None:
            self.watch.move_gradient = None
        else:

            def gradient_arrived(watched_gradient: WatchedGradient) -> None:
                gradient_added(watched_gradient.parameter)

            untraced(gradient_arrived)
            self.watch.move_gradient = gradient_arrived
        return True

    def take(self, parameter: Tensor) -> Tensor | None:
        """Return the parameter's gradient sum, or None if the parameter has no sum. No
        other code writes to the memory of the returned tensor.
        """
        keep_own(parameter)
        return parameter.grad

    def put(self, parameter: Tensor, total: Tensor) -> None:
        """Make `total` the gradient sum of `parameter`."""
        parameter.grad = total
        self.watch.note(parameter)

    def add_micro_batch(self, guard: UpdateGuard) -> bool:
        """Add the micro-batch's gradients to the sum. If the sum is kept in ``.grad``,
        there is nothing to do, because autograd has already added the gradients. Return
        False if the gradients were dropped because they are not finite.

        - `guard`: the object whose flag `is_broken` is set before the sum is modified.
          The caller clears the flag.
        """
        return True

    def gradients(self) -> Gradients:
        """Return the gradient sum of each parameter. The tensors are not copied."""
        return {
            parameter: parameter.grad
            for parameter in self.parameters()
            if parameter.grad is not None
        }

    def replace(self, gradients: Gradients) -> None:
        """Replace the sum with `gradients`. Neither the mapping nor its tensors are
        copied.
        """
        for parameter in self.parameters():
            parameter.grad = gradients.get(parameter)
        self.watch.reset()

    def prepare_update(self, gradients: Gradients) -> None:
        """Called before the gradient sums in `gradients` are divided and put into
        ``.grad``. Drop all other references to the sums, so that the memory of each sum
        can be freed.
        """

    def clear(self) -> None:
        """Clear the sum and the gradients of the current micro-batch."""
        for parameter in self.parameters():
            parameter.grad = None
        self.watch.reset()


class SumInBuffers(GradientSum):
    """The sum of the open window's gradients, kept in separate buffers. ``step`` adds
    the micro-batch's ``.grad`` to these buffers.

    The sum's dtype can therefore differ from the gradients' dtype, a micro-batch can be
    dropped, and the user may modify ``.grad`` between two calls to ``step``.
    """

    is_beside_grad = True

    def __init__(
        self, parameters: GetParameters, watch: GradientWatch, options: Options
    ) -> None:
        super().__init__(parameters, watch)
        self.accumulate_dtype = options.accumulate_dtype
        self.drops_micro_batches = options.on_overflow == "drop_micro_batch"
        self.buffers: Gradients = {}

    def follow_additions(self, gradient_added: Callable[[Tensor], None] | None) -> bool:
        return False

    def take(self, parameter: Tensor) -> Tensor | None:
        return self.buffers.get(parameter)

    def put(self, parameter: Tensor, total: Tensor) -> None:
        self.buffers[parameter] = total

    def prepare_update(self, gradients: Gradients) -> None:
        self.buffers = gradients
        for parameter in self.parameters():
            parameter.grad = None

    def add_micro_batch(self, guard: UpdateGuard) -> bool:
        gradients = super().gradients()
        is_finite = not self.drops_micro_batches or all_finite(gradients.values())
        new_buffers: Gradients = {}
        if is_finite:
            # Allocate the new buffers first. If memory runs out during the allocation,
            # nothing has been added yet.
            new_buffers = {
                parameter: self._copy(parameter, gradient)
                for parameter, gradient in gradients.items()
                if parameter not in self.buffers
            }
        guard.is_broken = True
        if is_finite:
            self._add(gradients)
            self.buffers.update(new_buffers)
        for parameter in gradients:
            parameter.grad = None
        self.watch.reset()
        return is_finite

    @torch.no_grad()
    def _add(self, gradients: Gradients) -> None:
        totals: list[Tensor] = []
        terms: list[Tensor] = []
        for parameter, gradient in gradients.items():
            total = self.buffers.get(parameter)
            if total is None:
                continue
            is_usual = type(total) is Tensor and not total.is_sparse
            if not is_usual or gradient.is_sparse:
                self.buffers[parameter] = add(total, gradient)
            else:
                totals.append(total)
                terms.append(gradient)
        if totals:
            torch._foreach_add_(totals, terms)

    def add_gradient(self, parameter: Tensor, gradient: Tensor) -> None:
        total = self.buffers.get(parameter)
        if total is None:
            self.buffers[parameter] = self._copy(parameter, gradient)
        else:
            self.buffers[parameter] = add(total, gradient)

    def _copy(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        """Return a copy of `gradient` in the sum's dtype. A copy is needed because
        other code may write to the gradient's memory.
        """
        dtype = sum_dtype(parameter, self.accumulate_dtype)
        return gradient.detach().to(dtype, copy=True)

    def gradients(self) -> Gradients:
        # Iterate in the order of the parameters, so that resuming a window does not
        # change the bits of its norm.
        return {
            parameter: self.buffers[parameter]
            for parameter in self.parameters()
            if parameter in self.buffers
        }

    def replace(self, gradients: Gradients) -> None:
        self.buffers = gradients

    def clear(self) -> None:
        self.buffers = {}
        super().clear()


class SumOnArrival(SumInBuffers):
    """The sum of the open window's gradients, kept in buffers of a wider dtype. Each
    gradient is added as soon as autograd has accumulated it, so that at most two
    half-precision gradients are in ``.grad`` at a time.

    One gradient of the micro-batch, the gradient with the fewest elements, stays in
    ``.grad`` until ``step``, so that a write to ``.grad`` can be detected. If the
    window has only one micro-batch, all gradients stay in ``.grad``.
    """

    expects_windows = True

    def __init__(
        self, parameters: GetParameters, watch: GradientWatch, options: Options
    ) -> None:
        super().__init__(parameters, watch, options)
        self._staying: WatchedGradient | None = None
        self._gradient_added: Callable[[Tensor], None] | None = None

    @property
    def is_beside_grad(self) -> bool:  # type: ignore[override]
        return self.watch.move_gradient is None

    def expect_window(self, size: object) -> None:
        self.watch.move_gradient = None
        if size != 1:
            reference = weakref.ref(self)

            def move(watched_gradient: WatchedGradient) -> None:
                living = reference()
                if living is not None:
                    living.move(watched_gradient)

            untraced(move)
            self.watch.move_gradient = move

    def follow_additions(self, gradient_added: Callable[[Tensor], None] | None) -> bool:
        moves = self.watch.move_gradient is not None
        self._gradient_added = gradient_added if moves else None
        return moves

    def move(self, watched_gradient: WatchedGradient) -> None:
        """Compare the new gradient with the one that was left in ``.grad`` so far. Add
        the gradient with more elements to its buffer, and leave the other in ``.grad``.
        """
        moved_gradient: WatchedGradient | None = watched_gradient
        staying = self._staying
        if not self.adds_at_once:
            size = watched_gradient.parameter.numel()
            if staying is None or size < staying.parameter.numel():
                self._staying = watched_gradient
                moved_gradient = staying
            elif staying is watched_gradient:
                moved_gradient = None
        if moved_gradient is not None and moved_gradient.parameter.grad is not None:
            self.add_gradient(moved_gradient.parameter, moved_gradient.parameter.grad)
            moved_gradient.parameter.grad = None
            moved_gradient.note()
            if self._gradient_added is not None:
                self._gradient_added(moved_gradient.parameter)

    def add_micro_batch(self, guard: UpdateGuard) -> bool:
        self._staying = None
        return super().add_micro_batch(guard)

    def clear(self) -> None:
        self._staying = None
        super().clear()


def make_gradient_sum(
    parameters: GetParameters, watch: GradientWatch, options: Options
) -> GradientSum:
    """Return an empty gradient sum. The sum is kept in ``.grad`` if the options and the
    parameters' dtypes allow this, because a sum in ``.grad`` needs no second buffer.
    """
    is_wider = any(
        sum_dtype(parameter, options.accumulate_dtype) != gradient_dtype(parameter)
        for parameter in parameters()
    )
    if options.separate_sums or options.on_overflow == "drop_micro_batch":
        return SumInBuffers(parameters, watch, options)
    if is_wider:
        return SumOnArrival(parameters, watch, options)
    return GradientSum(parameters, watch)
