"""The state of an accumulation in one line, in the same words in every backend."""

from __future__ import annotations

from gradaccum.loss_scale import ScaleRule
from gradaccum.options import Options, make_options
from gradaccum.resuming import terms_of
from gradaccum.schedule import Schedule, UntilWeight
from gradaccum.state import State

_DEFAULTS = make_options(1)
_AS_WRITTEN = {"noise_decay": "noise_scale"}
_TOLD_OTHERWISE = ("steps", "scale_rule", "scaler")
"""Options that stand in the line in another form."""


def status(state: State, steps: Schedule) -> str:
    """What the open window holds, and how far the run is: ``micro-batch 2 of 4, update 17, 1 skipped, scale 65536``.

    Where windows end by their weight: ``micro-batch 2, weight 96 of 128, update 17``.

    Args:
        state: in Python numbers.
        steps: the size of the open window, or of the next one; None: not known, or the caller closes it.
    """
    by_weight = isinstance(steps, UntilWeight)
    said = [f"micro-batch {state.micro_step}" + ("" if steps is None or by_weight else f" of {steps}")]
    said += [f"weight {state.weight:.10g} of {steps.weight}"] if isinstance(steps, UntilWeight) else []
    said += [f"update {state.optimizer_step}"]
    said += [f"{state.skipped_windows} skipped"] if state.skipped_windows else []
    said += [f"scale {state.loss_scale:.10g}"] if state.loss_scale != 1 else []
    return ", ".join(said)


def described(wrapper: str, inner: str, options: Options, state: State, steps: Schedule) -> str:
    """One line for ``repr``: ``AccumulatingOptimizer(SGD, steps=4, clip_norm=1.0 | micro-batch 2 of 4, update 17)``.

    The options are those of `gradaccum.wrap` that are not at their defaults. The inner optimizer prints its own itself.

    Args:
        wrapper: the name of the wrapped optimizer's class.
        inner: the name of the inner optimizer's.
        options: the checked options.
        state: as for `status`.
        steps: as for `status`.
    """
    names = [name for name in Options._fields if name not in _TOLD_OTHERWISE and getattr(options, name) != getattr(_DEFAULTS, name)]
    given = [f"steps={_in_a_word(options.steps)}", *(f"{_AS_WRITTEN.get(name, name)}={getattr(options, name)!r}" for name in names)]
    given += [f"loss_scale={scale}"] if (scale := _scale(options)) else []
    return f"{wrapper}({', '.join((inner, *given))} | {status(state, steps)})"


def _in_a_word(steps: object) -> str:
    """`steps` as the user may have written it; a function by its name."""
    if isinstance(steps, UntilWeight):
        return f"until_weight({_in_a_word(steps.weight)})"
    return getattr(steps, "__name__", type(steps).__name__) if callable(steps) else repr(steps)


def _scale(options: Options) -> str:
    """Who moves the loss scale, or that it stays; "" without one."""
    if options.scaler is not None:
        return type(options.scaler).__name__
    return "" if options.scale_rule == ScaleRule() else terms_of(options._replace(steps=None), 0).scale
