"""Runs the inner optimizer once per window, and rejects direct calls to its step."""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from gradaccum import ArgumentTypeError, UsageError
from gradaccum.kit import half_made_error
from gradaccum_torch.arithmetic import divide, gradient_dtype, narrowed
from gradaccum_torch.gradient_sum import Gradients
from gradaccum_torch.master_weights import MasterWeights, through

Hooks = OrderedDict[int, Callable[..., Any]]
"""The hooks of an optimizer, keyed by the id that torch has assigned to each hook."""


class Update:
    """Runs the inner optimizer of one wrapped optimizer, once per window."""

    def __init__(self, wrapper: torch.optim.Optimizer, masters: MasterWeights) -> None:
        # Use a weak reference, because the wrapper refers to this object.
        self.wrapper = weakref.ref(wrapper)
        self.masters = masters
        self.is_running = False
        self.is_broken = False
        """Whether an exception has interrupted an update or an addition to the gradient
        sum, so that the update or the sum may be incomplete.
        """
        self.is_made = False
        """Whether the inner optimizer has applied the update. The flag is also True if
        a hook raised an error after the update.
        """
        self.updated_parameters: list[Tensor] = []
        """The parameters that had a gradient in the last update."""
        guard(self, masters.inner)

    def require_usable(self) -> None:
        if self.is_broken:
            raise half_made_error()

    def make(self, sums: Gradients, divisor: float) -> None:
        """Run the inner optimizer once, with the gradient sums divided by `divisor`."""
        wrapper: Any = self.wrapper()
        inner: Any = self.masters.inner
        args: tuple[Any, ...] = (wrapper,)
        kwargs: dict[str, Any] = {}
        self.updated_parameters = list(sums)
        self.masters.copy_model_into_masters()
        with self.masters.in_place():
            self._hand_over(sums, divisor)
            for hook in hooks_of(wrapper, "step_pre"):
                new_arguments = hook(wrapper, args, kwargs)
                if new_arguments is not None:
                    args, kwargs = new_arguments
            self.is_running = True
            try:
                with self.masters.required_to_move(sums):
                    inner.step(*args[1:], **kwargs)
            finally:
                self.is_running = False
        through(self.masters.round)
        self.is_made = True
        for hook in hooks_of(wrapper, "step_post"):
            hook(wrapper, args, kwargs)

    def _hand_over(self, sums: Gradients, divisor: float) -> None:
        """Put the gradient sums, divided by `divisor`, into the ``.grad`` attributes
        that the inner optimizer reads.
        """
        same_dtype: list[Tensor] = []
        for parameter, total in sums.items():
            target = self.masters.worked_on(parameter)
            dtype = gradient_dtype(target)
            if total.requires_grad and divisor != 1:
                # Detach the sum, because its graph does not contain the division. An
                # optimizer that differentiates the gradient again then raises an error
                # instead of using a wrong derivative.
                total = total.detach()
                sums[parameter] = total
            if total.dtype == dtype:
                same_dtype.append(total)
            else:
                # Cast the sums one by one, so that each sum is freed as soon as it has
                # been cast.
                total = narrowed(total, divisor, dtype)
                sums[parameter] = total
            if target.grad is not total:
                target.grad = total
        divide(same_dtype, divisor)


def hooks_of(wrapper: torch.optim.Optimizer, kind: str) -> list[Callable[..., Any]]:
    """Return the hooks of one `kind`, such as ``"step_pre"``, that were registered on a
    wrapped optimizer. Return no hooks for the proxy with which Lightning replaces an
    optimizer.
    """
    hooks: Hooks | None = vars(wrapper).get(f"_optimizer_{kind}_hooks")
    return list(hooks.values()) if hooks else []


def hook_tables() -> dict[str, Hooks]:
    """Return the attributes in which a new torch optimizer stores its hooks, as a
    mapping from the attributes' names to empty dictionaries.
    """
    optimizer = torch.optim.SGD([torch.empty(0, device="cpu")])
    return {
        name: table
        for name, table in vars(optimizer).items()
        if isinstance(table, OrderedDict)
    }


# Each inner optimizer has at most one wrapper. While the wrapper is alive, only the
# wrapper may call the inner optimizer's step.


UPDATES: WeakKeyDictionary[torch.optim.Optimizer, weakref.ref[Update]] = (
    WeakKeyDictionary()
)
"""Maps each inner optimizer to a reference to the `Update` object of its wrapper."""


def refuse_bypass(inner: torch.optim.Optimizer, *_: object) -> None:
    """Raise if ``inner.step()`` is called directly while a wrapper of `inner` is alive.

    A step with learning rates of 0 is allowed, because it changes no parameter:
    torch.distributed.checkpoint performs such a step to create the optimizer's state.
    """
    reference = UPDATES.get(inner)
    update = None if reference is None else reference()
    if update is None or update.is_running:
        return
    name = type(inner).__name__
    if any(group.get("lr") != 0 for group in inner.param_groups):
        raise UsageError(
            "step(): expected a call to the wrapped optimizer's step(), because only"
            " the wrapped optimizer knows when a window ends; got a call to the inner"
            f" optimizer's {name}.step(). Write optimizer = gradaccum.wrap({name}(...),"
            " ...), and call optimizer.step(). For an optimizer with two steps per"
            " update, such as SAM, see RECIPES.md of gradaccum_torch."
        )


def guard(update: Update, inner: torch.optim.Optimizer) -> None:
    """Let only `update` run the step of `inner`. The same applies to a base optimizer
    inside `inner`, as in SAM, if the two share their list of parameter groups.
    """
    base_optimizers = [
        each
        for each in vars(inner).values()
        if isinstance(each, torch.optim.Optimizer)
        and each.param_groups is inner.param_groups
    ]
    for each in [inner, *base_optimizers]:
        UPDATES[each] = weakref.ref(update)
        if hasattr(each, "_optimizer_step_pre_hooks"):
            handle = each.register_step_pre_hook(refuse_bypass)
            weakref.finalize(update, handle.remove).atexit = False


def require_unwrapped(inner: torch.optim.Optimizer) -> None:
    """Raise if `inner` already has a wrapper that is still alive."""
    reference = UPDATES.get(inner)
    if reference is None or reference() is None:
        return
    gc.collect()  # A caught error may keep the wrapper alive in a reference cycle.
    if reference() is not None:
        raise ArgumentTypeError(
            "optimizer: expected an optimizer that is not wrapped yet; got"
            f" {type(inner).__name__}, which was already wrapped by an earlier call to"
            " gradaccum.wrap. Use the optimizer returned by that earlier call, or"
            " delete it (del opt) before wrapping again."
        )
