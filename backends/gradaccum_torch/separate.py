"""Sums apart from ``.grad``, which stays the user's between two steps: to clear, assign, reduce or clip, as beside a bare optimizer.

``step`` copies the micro-batch out of ``.grad``, since somebody else may hold that tensor (the bucket of a reducer, a loop that assigned
it), and empties ``.grad``. Nothing is watched: every change is the user's to make. A flushed window leaves ``.grad`` as the user has it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradaccum import UsageError
from gradaccum.kit import explain
from gradaccum_torch.buffers import BufferStrategy
from gradaccum_torch.checks import Size
from gradaccum_torch.masters import Parameters
from gradaccum_torch.norm import is_finite
from gradaccum_torch.rivals import Rivals
from gradaccum_torch.sums import sum_dtype
from gradaccum_torch.tensors import GRAD, REQUIRES_GRAD, coalesced


class SeparateStrategy(BufferStrategy):
    """The sum is in buffers, and what is in ``.grad`` when ``step`` is called is the micro-batch."""

    keeps_micro_batch_apart = True
    expects = True

    def __init__(self, parameters: Parameters, accumulate_dtype: torch.dtype | None) -> None:
        self._users: list[tuple[Tensor, Tensor]] | None = None
        """What is in ``.grad`` beside the window, while the inner optimizer has the window's gradient there."""
        self._of_one = False
        self._rivals = Rivals()
        super().__init__(parameters, accumulate_dtype)
        self.sentinels.leave_all_changes()

    def groups_changed(self) -> None:
        super().groups_changed()
        self._rivals.meet(self._parameters.unique(), self.sentinels)

    def expect(self, size: Size) -> None:
        self._of_one = size == 1

    def require_whole(self) -> None:
        """What a backward pass that raised has left in ``.grad`` is the user's to clear."""

    @property
    def begun(self) -> bool:
        """What autograd delivers may be for somebody else, until ``step`` takes it."""
        return False

    def take(self) -> bool:
        self._rivals.require_not_taken()
        filled = self._filled()
        _require_no_graph(filled)
        if filled and not self._of_one:
            _require_no_noise(filled[0])
        new = self._copied(filled)  # Memory may run out here, before anything was added.
        for parameter in filled:
            if parameter in new:
                self._held[parameter] = new[parameter]
                parameter.grad = None
            else:
                self._absorb(parameter)
        self.sentinels.reset()
        self._rivals.took(filled)
        return True

    def hand_over(self, divisor: float, unclipped: float) -> None:
        if self._users is None:
            pairs = [(parameter, parameter.grad) for parameter in self._parameters.unique()]
            self._users = [(parameter, gradient) for parameter, gradient in pairs if gradient is not None]
            self._parameters.free_gradients()
        super().hand_over(divisor, unclipped)

    def take_back(self, divisor: float, spoiled: bool) -> None:
        super().take_back(divisor, spoiled)
        self._give_users_back()

    def window_ended(self) -> None:
        self._held.clear()
        if self._users is not None:
            self._parameters.free_gradients()
            self._give_users_back()

    def clear(self) -> None:
        self._users, self._rivals.lost = None, []
        super().clear()

    def _copied(self, parameters: Sequence[Tensor]) -> dict[Tensor, Tensor]:
        """The first micro-batch of each of `parameters` that has no sum yet."""
        return {
            parameter: parameter.grad.detach().to(sum_dtype(parameter, self._accumulate_dtype), copy=True)
            for parameter in parameters
            if parameter not in self._held and parameter.grad is not None
        }

    def _give_users_back(self) -> None:
        for parameter, gradient in self._users or ():
            parameter.grad = gradient
        self._users = None


class SeparateDroppingStrategy(SeparateStrategy):
    """As above; a micro-batch whose gradient is not finite adds nothing."""

    def take(self) -> bool:
        filled = self._filled()
        if is_finite([coalesced(parameter.grad) for parameter in filled if parameter.grad is not None]):
            return super().take()
        self._parameters.free_gradients()
        self.sentinels.reset()
        self._rivals.took(filled)
        return False


def _require_no_graph(parameters: Sequence[Tensor]) -> None:
    """A copy would lose the graph that an optimizer of second order differentiates.

    Raises:
        UsageError: a gradient has one.
    """
    if any(map(REQUIRES_GRAD, map(GRAD, parameters))):
        raise explain(
            UsageError,
            "separate_sums",
            expected="gradients without a graph, as backward() leaves them",
            found="a .grad that can be differentiated again, after backward(create_graph=True)",
            fix="For an optimizer that does that, such as AdaHessian, leave separate_sums=True out: the sum in .grad keeps the graph. For "
            "any other, leave create_graph=True out, or assign p.grad = gradient.detach().",
        )


def _require_no_noise(parameter: Tensor) -> None:
    """Opacus' optimizer, which gives each of its parameters a ``summed_grad``, adds noise before it calls ``step``.

    Raises:
        UsageError: it has this parameter.
    """
    if hasattr(parameter, "summed_grad"):
        raise explain(
            UsageError,
            "make_private",
            expected="an optimizer that is not wrapped, or is wrapped with steps=1",
            found="a longer window of micro-batches, to each of which Opacus has added the noise of a whole batch",
            fix="Leave gradaccum.wrap out, and take opacus.utils.batch_memory_manager.BatchMemoryManager, which adds noise once per batch.",
        )
