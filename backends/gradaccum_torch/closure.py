"""``step(closure)``: a loop that puts the forward and the backward pass into a function, as Lightning's does.

Such a closure is run once, and what it puts into ``.grad`` is the micro-batch. Only an inner optimizer that evaluates the model again and
again, as `torch.optim.LBFGS` does, is given the closure itself: it reads ``.grad`` each time, at once. There it must be the true gradient,
and not be changed after: a window of one micro-batch without options that change its gradient. The first gradient that it reads decides on
the window.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, signature
from typing import Any

import torch

from gradaccum import UsageError
from gradaccum.kit import Decision, Options, ScaleRule, State, explain
from gradaccum_torch.checks import Size
from gradaccum_torch.closing import Verdict
from gradaccum_torch.knowledge import Told
from gradaccum_torch.masters import Parameters
from gradaccum_torch.misuse import other_weight_error
from gradaccum_torch.sums import sum_dtype

_NOTE = (
    "gradaccum: the closure was run once, for its micro-batch, and the inner optimizer's step is called without one. An optimizer that "
    "evaluates the model again needs steps=1, or a window for each of its updates (RECIPES.md of gradaccum_torch, An optimizer with two "
    "updates). The window is as it was: call opt.discard() to drop it."
)

Loss = Any
"""The value of a closure. torch hands it through, whatever it is."""


def needs_closure(inner: torch.optim.Optimizer) -> bool:
    """Whether the ``step`` of `inner` cannot do without a closure."""
    closure = signature(inner.step).parameters.get("closure")
    return closure is not None and closure.default is Parameter.empty


def is_plain(options: Options, size: Size, parameters: Parameters) -> bool:
    """Whether the inner optimizer can be given the closure; see `require_plain`."""
    return not _in_the_way(options, size, parameters)


def evaluated_once(closure: Callable[[], Loss]) -> Loss:
    """What `closure` returns, which runs a backward pass, also where the user has switched gradients off around ``step``."""
    with torch.enable_grad():
        return closure()


def note_missing_closure(error: Exception) -> None:
    """An inner optimizer that turns out to need the closure, which was run already, raises its own `error`; a note says what to write."""
    if "closure" in str(error).lower():
        error.add_note(_NOTE)


def require_plain(options: Options, size: Size, parameters: Parameters) -> None:
    """A closure sees the true gradient in ``.grad``, in a window of this size.

    Raises:
        UsageError: an option would change it.
    """
    if found := _in_the_way(options, size, parameters):
        raise explain(
            UsageError,
            "closure",
            expected="an inner optimizer that does without a closure, or steps=1 with no other option than reduction and accumulate_dtype",
            found=f"a closure, which must find the true gradient in .grad each time, beside {', '.join(found)}",
            fix="Leave these options out, or take an optimizer that does not evaluate the model again and again.",
        )


class Skipped(Exception):
    """Leaves the inner optimizer's step where its closure's first gradient must not be applied, before anything is written."""

    def __init__(self, loss: Loss) -> None:
        super().__init__("gradaccum: the window is skipped")
        self.loss = loss


class Evaluations:
    """What the first evaluation of a closure gave, before the parameters moved: it is the micro-batch, and the window.

    Args:
        closure: the user's.
    """

    def __init__(self, closure: Callable[[], Loss]) -> None:
        self.closure = closure
        self.weight, self.losses = 1.0, tuple[Told, ...]()
        self.ended: tuple[State, Decision] | None = None
        """The state with the micro-batch, and what was decided; None before it."""

    def decided(self, verdict: Verdict, losses: tuple[Told, ...], weight: float, loss: Loss) -> None:
        """The first evaluation has this verdict.

        Raises:
            UsageError: its gradient would have to be divided.
            Skipped: it must not be applied.
        """
        if verdict.decision.apply and verdict.decision.divisor != 1:
            fix = "Leave the weight out; where the optimizer does not evaluate the model again, write closure(); opt.step()."
            raise explain(UsageError, "weight", expected="1 inside a closure", got=weight, fix=fix)
        self.weight, self.losses, self.ended = weight, losses, (verdict.fields, verdict.decision)
        if not verdict.decision.apply:
            raise Skipped(loss)

    def require_same(self, weight: float) -> None:
        """A later evaluation has the weight of the first.

        Raises:
            UsageError: it has this one.
        """
        if weight != self.weight:
            raise other_weight_error(weight, self.weight)


def _in_the_way(options: Options, size: Size, parameters: Parameters) -> list[str]:
    """The options, as the user writes them, that change the gradient after the closure has put it into ``.grad``."""
    found = [f"{name}={value}" for name in ("clip_norm", "skip_norm") if (value := getattr(options, name)) is not None]
    found += [f"steps={size}"] if size != 1 else []
    found += ["loss_scale="] if options.scale_rule != ScaleRule() else []
    found += [f"on_overflow={options.on_overflow!r}"] if options.on_overflow == "drop_micro_batch" else []
    found += ["separate_sums=True"] if options.separate_sums else []
    found += ["master_weights=True"] if parameters.has_masters else []
    pairs = {(parameter.dtype, sum_dtype(parameter, options.accumulate_dtype)) for parameter in parameters.positions()}
    apart = {f"sums of {own} gradients in {total} (write accumulate_dtype={own})" for own, total in pairs if own != total}
    return [*found, *sorted(apart)]
