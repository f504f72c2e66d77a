"""How far an update came before something raised. The versions of parameters, gradients and state tell.

Nothing can undo a half-made update without a second copy of the model. But the window can be left as it was before the update, or as it
is after, or refused; the update is never made twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradaccum_torch.hooks import NO_HOOKS, all_step_post_hooks, step_post_hooks
from gradaccum_torch.tensors import GRAD
from gradaccum_torch.torch_private import is_sharded, version
from gradaccum_torch.versions import Versions

StepReturn = Any
"""What an optimizer's ``step`` returns: the loss of its closure, or None."""
Numbers = dict[str, int | float]
"""The versions of an optimizer state's tensors, and its numbers, by name."""


class Attempt:
    """One run of the inner optimizer.

    Args:
        inner: the optimizer.
        idle: whether a fused kernel has provably not run; it counts no version.
    """

    def __init__(self, inner: torch.optim.Optimizer, idle: Callable[[], bool] = lambda: False) -> None:
        self._inner, self._idle = inner, idle
        self._own = [tensor for group in inner.param_groups for tensor in group["params"]]
        self._gradients: list[Tensor | None] = []
        self._written: Versions | None = None
        self._parameters: Versions | None = None
        self._state: list[Numbers] = []
        self.made = False
        """The inner optimizer has made its update."""

    def handed_over(self) -> None:
        """The inner optimizer's gradients are in place."""
        self._gradients = list(map(GRAD, self._own))
        self._written = Versions([gradient for gradient in self._gradients if gradient is not None])

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> StepReturn:
        """The inner optimizer's ``step``."""
        inner = self._inner
        self._parameters, self._state = Versions(self._own), self._states()
        hook = None
        if (hooks := step_post_hooks(inner)) or (all_step_post_hooks and hooks is not NO_HOOKS):
            hook = inner.register_step_post_hook(self._note_made)
            hooks.move_to_end(hook.id, last=False)
        try:
            returned = inner.step(*args, **kwargs)
        finally:
            if hook is not None:
                hook.remove()
        self.made = True
        return returned

    def begun(self) -> bool:
        """Whether a parameter or the optimizer's state was written, or may have been."""
        if self._parameters is None:
            return False
        uncounted = any(group.get("fused") for group in self._inner.param_groups) or any(map(is_sharded, self._own))
        return self.moved() or self._states() != self._state or (uncounted and not self._idle())

    def moved(self) -> bool:
        """Whether a parameter was written, as far as writes are counted."""
        return self._parameters is not None and bool(self._parameters.moved())

    def gradients_changed(self) -> bool:
        """Whether a hook wrote into the gradients that were handed over."""
        if self._written is None:
            return False
        replaced = any(tensor.grad is not gradient for tensor, gradient in zip(self._own, self._gradients, strict=True))
        return replaced or bool(self._written.moved())

    def _note_made(self, *_: object) -> None:
        self.made = True

    def _states(self) -> list[Numbers]:
        """The state, as numbers, of the first parameter with a gradient in each group: a step begins there."""
        states = []
        for group in self._inner.param_groups:
            for tensor in group["params"]:
                if tensor.grad is not None:
                    states.append(_written(self._inner.state.get(tensor, {})))
                    break
        return states


def _written(state: Mapping[str, object]) -> Numbers:
    """The version of each tensor, and each number; a new one counts as if it were not there."""
    seen: Numbers = {}
    for name, value in state.items():
        number = version(value) if isinstance(value, Tensor) else value
        if isinstance(number, (int, float)) and number:
            seen[name] = number
    return seen
