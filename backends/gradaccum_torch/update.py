"""The inner optimizer's one call at the end of a window: it is made, or the window is
as it was.

If the inner optimizer's ``step`` itself raised, nobody knows how far it came, and the
next call raises.
"""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from operator import is_not
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from gradaccum import ArgumentTypeError, UsageError
from gradaccum.kit import explain, half_made_error, round_to_float32
from gradaccum_torch.parameters import Group, Parameters, through
from gradaccum_torch.private.names import DIVIDES_BY_GRAD_SCALE, untraced, version
from gradaccum_torch.sums.arithmetic import DTYPE, GRAD, Versions, operand
from gradaccum_torch.sums.strategy import Strategy

Rates = tuple[object, object]
"""The learning rates of two groups."""


def rate_mark(rate: object) -> object:
    return (id(rate), version(rate)) if isinstance(rate, Tensor) else rate


class Progress(Enum):
    """The progress of the inner optimizer's last call."""

    NOT_BEGUN = 0
    RUNS = 1
    HALF_MADE = 2
    """Its ``step`` raised, and may have written a part of the update; or a micro-batch
    or a skipped window is being counted.
    """
    MADE = 3
    """The update was made, even if something raised after it; its window is not cleared
    yet.
    """


class Update:
    """The updates of one wrapped optimizer; no strong reference to the wrapper, which
    owns this object.
    """

    def __init__(
        self,
        wrapper: torch.optim.Optimizer,
        inner: torch.optim.Optimizer,
        parameters: Parameters,
    ) -> None:
        self._wrapper, self._inner, self._parameters = (
            weakref.ref(wrapper),
            inner,
            parameters,
        )
        self._before, self._after = step_pre_hooks(wrapper), step_post_hooks(wrapper)
        self.progress = Progress.NOT_BEGUN
        _guard(self, inner)

    def make(
        self, strategy: Strategy, divisor: float, unclipped: float, strayed: bool
    ) -> None:
        """Run the inner optimizer once on the sum divided by `divisor`, which without
        clipping is `unclipped`.

        If something raises before the inner optimizer's ``step``, the sum is as it was.
        `strayed`: the masters first take over what something else wrote into the model.
        """
        self.progress = Progress.NOT_BEGUN
        if strayed:
            self._parameters.take_over()
        with self._parameters.masters_in_place():
            # A fused kernel divides the sum as it reads it, if nothing else reads it
            # before.
            fused = getattr(self._inner, DIVIDES_BY_GRAD_SCALE, False)
            if (
                fused
                and can_divide(self._inner, divisor)
                and strategy.hands_over_whole()
                and not self._before
            ):
                with Dividing(self._inner, divisor):
                    self._step(strategy, 1.0, 1.0)
            else:
                self._step(strategy, divisor, unclipped)

    def forget(self) -> None:
        """Forget what an exception left: the window was discarded, a state was loaded,
        or it was ended as a whole.
        """
        self.progress = Progress.NOT_BEGUN

    def leave_half_made(self) -> None:
        self.progress = Progress.HALF_MADE

    def require_whole(self) -> None:
        if self.progress is not Progress.NOT_BEGUN:
            raise half_made_error()

    def rates(self) -> Rates:
        """Return the learning rates of the first group and the last; a rate in a tensor
        by its version, without a wait.
        """
        groups = self._inner.param_groups
        first, last = groups[0].get("lr"), groups[-1].get("lr")
        return (
            (first, last)
            if type(first) is type(last) is float
            else (rate_mark(first), rate_mark(last))
        )

    @contextmanager
    def running(self) -> Iterator[None]:
        before, self.progress = self.progress, Progress.RUNS
        try:
            yield
        finally:
            self.progress = before

    def _step(self, strategy: Strategy, divisor: float, unclipped: float) -> None:
        undivided, hooked, wrapper = strategy.undivided(), None, self._wrapper()
        assert wrapper is not None
        args: tuple[Any, ...] = (wrapper,)
        kwargs: dict[str, Any] = {}
        try:
            strategy.hand_over(undivided, divisor, unclipped)
            if self._before:
                hooked = _Gradients(self._inner)
                args, kwargs = _run_pre_hooks(wrapper, self._before, args, kwargs)
            self.progress = Progress.RUNS
            self._inner.step(*args[1:], **kwargs)
            if self._parameters.masters:
                through(self._parameters.round)
            self.progress = Progress.MADE
            for after in tuple(self._after.values()):
                after(wrapper, args, kwargs)
        except BaseException:
            if self.progress is Progress.NOT_BEGUN:
                strategy.take_back(
                    undivided, divisor, spoiled=hooked is not None and hooked.changed()
                )
            elif self.progress is Progress.RUNS:
                self.progress = Progress.HALF_MADE
            raise


# One wrapper for each inner optimizer, which makes all its steps for as long as the
# wrapper lives.


_UPDATES: WeakKeyDictionary[torch.optim.Optimizer, weakref.ref[Update]] = (
    WeakKeyDictionary()
)
"""The wrapper's updates by the inner optimizer."""


class _Guard:
    """A hook that refuses steps of the inner optimizer which a living wrapper does not
    make.
    """

    def __init__(self, update: weakref.ref[Update] | None = None) -> None:
        self._update = update

    def __call__(self, inner: torch.optim.Optimizer, *_: object) -> None:
        update = None if self._update is None else self._update()
        if update is not None and update.progress is not Progress.RUNS:
            raise _bypassed_error(inner)

    def __reduce__(self) -> tuple[type[_Guard], tuple[()]]:
        return _Guard, ()  # The copy of an inner optimizer has no wrapper yet.


untraced(_Guard.__call__)


def _guard(update: Update, inner: torch.optim.Optimizer) -> None:
    _UPDATES[inner] = reference = weakref.ref(update)
    try:
        handle = inner.register_step_pre_hook(_Guard(reference))
    except AttributeError:
        return  # An optimizer that never calls ``Optimizer.__init__`` has no hooks.
    weakref.finalize(update, handle.remove).atexit = False


def require_unwrapped(inner: torch.optim.Optimizer) -> None:
    """Raise unless no living wrapper has `inner`."""
    # An error that was caught may keep a wrapper in a cycle.
    for search in (
        lambda: None,
        gc.collect,
    ):
        search()
        if (reference := _UPDATES.get(inner)) is None or reference() is None:
            return
    expected, found = (
        "one that no living wrapper has",
        f"{type(inner).__name__}, which an earlier gradaccum.wrap has wrapped",
    )
    fix = (
        "Use the optimizer that gradaccum.wrap returned first, or delete it (del opt)"
        " before you wrap again."
    )
    raise explain(
        ArgumentTypeError, "optimizer", expected=expected, found=found, fix=fix
    )


def _bypassed_error(inner: torch.optim.Optimizer) -> UsageError:
    name = type(inner).__name__
    expected, found = (
        "the wrapped optimizer's, which alone knows when a window ends",
        f"the inner optimizer's own: {name}.step()",
    )
    fix = (
        f"Write optimizer = gradaccum.wrap({name}(...), ...), so that one name is left,"
        " and call its step()."
    )
    return explain(UsageError, "step()", expected=expected, found=found, fix=fix)


def _run_pre_hooks(
    wrapper: object, hooks: Table, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    for before in tuple(hooks.values()):
        result = before(wrapper, args, kwargs)
        if isinstance(result, tuple) and len(result) == 2:
            args, kwargs = result
        elif result is not None:
            expected, fix = (
                "None, or a tuple of new positional and new keyword arguments",
                "Return nothing.",
            )
            raise explain(
                UsageError,
                "step pre-hook",
                expected=f"to return {expected}",
                got=result,
                fix=fix,
            )
    return args, kwargs


class _Gradients:
    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self._parameters = [
            tensor for group in inner.param_groups for tensor in group["params"]
        ]
        self._gradients: list[Tensor | None] = list(map(GRAD, self._parameters))
        self._written = Versions(
            gradient for gradient in self._gradients if gradient is not None
        )

    def changed(self) -> bool:
        return self._written.moved() or any(
            map(is_not, map(GRAD, self._parameters), self._gradients)
        )


# ``step(closure)``: a loop that puts the forward and the backward pass into a function,
# as Lightning's does. The closure is run once, and what it puts into ``.grad`` is the
# micro-batch.


MISSING_CLOSURE = (
    "gradaccum: the closure was run once, for its micro-batch, and the inner"
    " optimizer's step is called without one. An optimizer that evaluates the model"
    " again is used bare, or has a window for each of its updates (RECIPES.md of"
    " gradaccum_torch, An optimizer with two updates). Call opt.discard() to drop the"
    " window."
)

Loss = Any
"""The value of a closure. torch hands it through, whatever it is."""


# The division of a window's sum inside the update itself, where the inner optimizer is
# one of torch's fused ones.
#
# Their kernels divide each gradient by ``optimizer.grad_scale`` as they read it, which
# is how `torch.amp.GradScaler` unscales. A window's divisor (loss scale, denominator
# and clipping in one) goes the same way, and a pass over the gradients is saved. The
# kernels divide in float32 by a float32, bit for bit what dividing first would give. So
# float64 goes this way only where the divisor is a float32, and half precision never.


_FLOAT32 = {torch.float32}
_REAL = (Tensor, torch.nn.Parameter)
"""A fake tensor takes no real one beside it."""
_WIDE = {torch.float32, torch.float64}


def can_divide(inner: torch.optim.Optimizer, divisor: float) -> bool:
    """True if ``inner.step()`` itself can divide ``.grad``, exactly, and before any
    Python code reads it.
    """
    hooks = (*all_step_pre_hooks.values(), *step_pre_hooks(inner).values())
    hooked = any(not hook.__module__.startswith("gradaccum_torch.") for hook in hooks)
    return (
        not hooked
        and _is_torchs(inner)
        and all(_takes(group, divisor) for group in inner.param_groups)
    )


class Dividing:
    """A block in which every ``inner.step()`` divides by `divisor`; ``.grad`` holds the
    divided gradient after it.
    """

    def __init__(self, inner: torch.optim.Optimizer, divisor: float) -> None:
        self._inner, self._divisor = inner, divisor

    def __enter__(self) -> None:
        inner: Any = self._inner
        first = next(
            (group["params"][0] for group in inner.param_groups if group["params"]),
            None,
        )
        inner.grad_scale, inner.found_inf = _scale(self._divisor, first), None

    def __exit__(self, *_: object) -> None:
        inner: Any = self._inner
        del inner.grad_scale, inner.found_inf


def _scale(divisor: float, parameter: Tensor | None) -> Tensor:
    device = torch.device("cpu") if parameter is None else parameter.device
    if device.type == "cpu" and type(parameter) in _REAL:
        return operand(divisor, torch.float32)
    scale = torch.tensor(divisor, dtype=torch.float32, device="cpu")
    # Filled where it is used: a copy from the host would be one more wait for the
    # device.
    return (
        scale
        if device.type == "cpu"
        else torch.full((), scale.item(), dtype=torch.float32, device=device)
    )


def _is_torchs(inner: torch.optim.Optimizer) -> bool:
    """True if ``inner.step`` is torch's own: a subclass or a patch may read the
    gradients in Python.
    """
    step: Any = None if "step" in vars(inner) else type(inner).step
    while step is not None and step.__globals__["__name__"].startswith("torch.optim."):
        # functools.wraps copies the name of the module too, but not the module's
        # variables.
        if (step := getattr(step, "__wrapped__", None)) is None:
            return True
    return False


def _takes(group: Group, divisor: float) -> bool:
    dtypes = set(map(DTYPE, group["params"]))
    return bool(group.get("fused")) and (
        dtypes <= _FLOAT32 or (dtypes <= _WIDE and round_to_float32(divisor) == divisor)
    )


# The hooks of optimizers: an optimizer keeps them in tables, and torch shows the table
# to whoever registers a hook.


Table = OrderedDict[int, Callable[..., Any]]
"""The hooks of an optimizer by number."""


def hook_tables() -> dict[str, Table]:
    fresh = torch.optim.SGD([torch.empty(0, device="cpu")])
    return {
        name: table
        for name, table in vars(fresh).items()
        if isinstance(table, OrderedDict)
    }


def _table_of(register: Callable[[Callable[..., None]], RemovableHandle]) -> Table:
    handle = register(lambda *_: None)
    handle.remove()
    return cast(Table, handle.hooks_dict_ref())


def _table(register: str) -> Callable[[torch.optim.Optimizer], Table]:
    """Return the table of hooks, empty for an optimizer that never calls
    ``Optimizer.__init__``.
    """

    def table(optimizer: torch.optim.Optimizer) -> Table:
        try:
            return _table_of(getattr(optimizer, register))
        except AttributeError:
            return OrderedDict()

    return table


step_pre_hooks, step_post_hooks = map(
    _table, ("register_step_pre_hook", "register_step_post_hook")
)


save_pre_hooks, save_post_hooks = map(
    _table, ("register_state_dict_pre_hook", "register_state_dict_post_hook")
)


load_pre_hooks, load_post_hooks = map(
    _table, ("register_load_state_dict_pre_hook", "register_load_state_dict_post_hook")
)
"""One optimizer's hooks by number."""


all_step_pre_hooks = _table_of(register_optimizer_step_pre_hook)
"""The hooks before each step of any optimizer: a fused kernel must not divide a
gradient that such a hook reads undivided.
"""
