"""A window that one call fills and closes: it begins empty, and after an error it was never begun."""

from __future__ import annotations

from types import TracebackType

import torch
import torch.distributed as dist
from torch import Tensor

from gradaccum import UsageError
from gradaccum.kit import Options, explain
from gradaccum_torch.fsdp_private import units_holding
from gradaccum_torch.masters import Parameters
from gradaccum_torch.torch_private import elements, is_sharded
from gradaccum_torch.window import Window


class WholeWindow:
    """Inside its ``with`` block the micro-batches of one call are counted.

    If the block raises, the window is forgotten, and every ``.grad`` holds what it held before.

    Args:
        window: the window to fill.
        parameters: those that it sums over.
        options: those of `gradaccum.wrap`.
        process_group: of the workers that share the window, if they make one.
    """

    def __init__(self, window: Window, parameters: Parameters, options: Options, process_group: dist.ProcessGroup | None = None) -> None:
        self.process_group = process_group
        self._window, self._parameters, self.options = window, parameters, options
        self._before: list[tuple[Tensor, Tensor]] = []
        self._sharded = any(map(is_sharded, parameters.unique()))

    def __enter__(self) -> WholeWindow:
        """Begin.

        Raises:
            UsageError: a window is open, a micro-batch is under way, or there are gradients.
        """
        if self._window.is_under_way():
            fix = "Call opt.flush() or opt.discard() first: this call makes a window of its own."
            raise explain(UsageError, "optimizer", expected="one between two windows", found="one with an open window", fix=fix)
        with_gradients = ((each, each.grad) for each in self._parameters.unique())
        self._before = [(each, gradient) for each, gradient in with_gradients if gradient is not None]
        # zero_grad(set_to_none=False) leaves zeros, into which autograd adds; anything else would count as a part of the window.
        if any(bool(elements(gradient).any()) for _, gradient in self._before):
            fix = "Call opt.zero_grad() first: the window is this call's batch alone."
            raise explain(UsageError, ".grad", expected="no gradients from before", found="gradients", fix=fix)
        self._window.strategy.sentinels.reset()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if kind is None:
            return
        self._window.discard()
        with torch.no_grad():
            for parameter, gradient in self._before:
                parameter.grad = gradient.zero_()
        self._window.strategy.sentinels.reset()

    @property
    def parameters(self) -> set[int]:
        """The ids of the parameters that the window sums over."""
        return set(map(id, self._parameters.unique()))

    def unsharded(self) -> set[int]:
        """The ids of the whole parameters that FSDP2 has made of sharded ones in the last forward pass."""
        if not self._sharded:
            return set()
        return {id(whole) for unit in units_holding(self._parameters.unique()) for _, whole in unit.whole_parameters()}

    def begin_weightless(self) -> None:
        """A backward pass is about to deliver a part of what the window has counted already: it adds no weight and has the scale."""
        self._window.begin_weightless()

    @property
    def arrived(self) -> bool:
        """Autograd has delivered something since the last micro-batch was counted."""
        return self._window.strategy.sentinels.arrived

    def scale(self) -> float:
        """The loss scale as it is now; may wait for the device."""
        return float(self._window.fields_to_save().loss_scale)
