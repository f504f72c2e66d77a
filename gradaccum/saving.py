"""The settings that an open window depends on. They are saved together with the
window's state, and checked when the window resumes.

A partial gradient sum is meaningful only with the settings that produced it, so an open
window can resume only with the same settings. If no window is open, every option may
change.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from operator import add
from typing import NamedTuple, SupportsInt, cast

from gradaccum.errors import CheckpointError
from gradaccum.options import (
    ON_OVERFLOW,
    REDUCTIONS,
    Options,
    ScaleRule,
    Schedule,
    UntilWeight,
    make_options,
    require_steps,
)
from gradaccum.state import Scalar, State, round_to_float32
from gradaccum.transitions import select, steps_at

SCALES_IN_USE = ("unused", "static", "dynamic")
FORMAT = 1
"""The version of the format in which a checkpoint stores a window. A release that drops
an entry, or changes the meaning of an entry, increments this number.
"""


class Terms(NamedTuple):
    """The settings that an open window depends on."""

    reduction: str
    on_overflow: str
    scale: str
    """Whether the loss scale is ``"unused"``, ``"static"`` or ``"dynamic"``."""
    steps: int | UntilWeight | None
    """The size of a complete window: a number of micro-batches, or an `UntilWeight`
    with the total weight at which the window ends. None means that the caller closes
    the window.
    """


def terms_of(options: Options, optimizer_step: Scalar) -> Terms:
    """Return the settings that the next window depends on: the reduction,
    `on_overflow`, the kind of loss scale and the window's size. `optimizer_step` is the
    number of updates applied before this window, as an int or an integer scalar.
    """
    steps = None
    if options.steps is not None:
        size = steps_at(options.steps, int(optimizer_step), select)
        steps = require_steps(size, int(optimizer_step), options.steps)
    scale = _scale_in_use(options.scale_rule)
    return Terms(options.reduction, options.on_overflow, scale, steps)


def require_format(number: object) -> None:
    """Raise `CheckpointError` unless `number` is `FORMAT`, the format that this release
    reads.
    """
    if number != FORMAT:
        raise CheckpointError(
            f"format: expected a window's state in format {FORMAT}; got format"
            f" {number}. Load the state with the release of gradaccum that saved it."
        )


def encode_terms(terms: Terms) -> tuple[int, int, int, int, int]:
    """Return `FORMAT` and `terms` encoded as integers, for checkpoints that contain
    only arrays. The last integer is the number of micro-batches in a window, 0 for
    ``steps=None``, or -w for ``steps=until_weight(w)``.
    """
    return (
        FORMAT,
        REDUCTIONS.index(terms.reduction),
        ON_OVERFLOW.index(terms.on_overflow),
        SCALES_IN_USE.index(terms.scale),
        code_of(terms.steps),
    )


def code_of(size: Scalar) -> Scalar:
    """Return a window's size as a single number, as in `encode_terms`: the number of
    micro-batches, 0 for None, or -w for ``until_weight(w)``.
    """
    if isinstance(size, UntilWeight):
        return -cast(Scalar, size.weight)
    return 0 if size is None else size


def decode_terms(codes: Iterable[SupportsInt]) -> Terms:
    """Return the settings that `encode_terms` encoded.

    Raises:
        CheckpointError: `codes` were saved in another format.
    """
    saved_format, *indices, steps = (int(code) for code in codes)
    require_format(saved_format)
    reduction, on_overflow, scale = indices
    names = REDUCTIONS[reduction], ON_OVERFLOW[on_overflow], SCALES_IN_USE[scale]
    return Terms(*names, UntilWeight(-steps) if steps < 0 else steps or None)


def resumed(fields: State, saved_terms: Terms, options: Options) -> State:
    """Return the state from which a saved run resumes with `options`. The saved state
    is returned unchanged in two cases:

    - A window is open. A full window whose update was interrupted also counts as open.
    - Both the saved run and the resuming run use a dynamic loss scale.

    Otherwise, the loss scale starts again at the initial scale of `options`, and the
    growth tracker starts again at 0.

    Args:
        fields: the saved state, as Python numbers.
        saved_terms: the settings that were in effect when the state was saved.
        options: the options of the optimizer that resumes.

    Raises:
        CheckpointError: a window is open, and one of its settings differs from
            `options`. The error names the setting.
    """
    if fields.micro_step:
        _require_same_window(fields, saved_terms, options)
        return fields
    if saved_terms.scale == _scale_in_use(options.scale_rule) == "dynamic":
        return fields
    return fields._replace(
        loss_scale=round_to_float32(options.scale_rule.init_scale), growth_tracker=0
    )


def redistributed(states: Sequence[State], workers: int) -> list[State]:
    """Return the states from which `workers` workers resume an open window. The number
    of workers that saved the window may be different.

    The first worker resumes with the sum of all gradient sums, so it also gets the
    total weight and the combined overflow flag. The other workers resume with an empty
    sum. Every worker gets the highest `micro_step` that was saved, so that all workers
    end the window together.

    Args:
        states: one state for each worker that saved the window, as Python numbers.
        workers: the number of workers that resume, >= 1.

    Raises:
        CheckpointError: the states were not saved at the same moment. The error names
            the field that differs.
    """
    for name in ("optimizer_step", "skipped_windows", "loss_scale", "growth_tracker"):
        values = [getattr(state, name) for state in states]
        if any(value != values[0] for value in values):
            raise CheckpointError(
                f"{name}: expected the same value on every worker; got {values!r}"
                f" ({type(values).__name__}). Load states that all workers saved after"
                " the same update."
            )
    nothing = states[0]._replace(
        micro_step=max(state.micro_step for state in states), weight=0.0, overflow=False
    )
    # Do not use `sum`: since Python 3.12 it rounds differently from NumPy. The
    # MindSpore backend compares the result with a sum that NumPy has computed.
    everything = nothing._replace(
        weight=reduce(add, [state.weight for state in states]),
        overflow=any(state.overflow for state in states),
    )
    return [everything, *[nothing] * (workers - 1)]


def _scale_in_use(rule: ScaleRule) -> str:
    if rule == ScaleRule():
        return "unused"
    return "static" if rule.growth_factor == rule.backoff_factor == 1 else "dynamic"


def _require_same_window(fields: State, saved: Terms, options: Options) -> None:
    terms = terms_of(options, fields.optimizer_step)
    saved_values = saved._asdict()
    values = terms._asdict()
    # A negative micro_step marks a window that an exception left incomplete.
    saved_values["micro_step"] = fields.micro_step
    values["micro_step"] = abs(fields.micro_step)
    if terms.scale != "dynamic":
        saved_values["loss_scale"] = fields.loss_scale
        values["loss_scale"] = round_to_float32(options.scale_rule.init_scale)
    for name, value in values.items():
        if saved_values[name] != value:
            argument = "loss_scale" if name == "scale" else name
            raise CheckpointError(
                f"{argument}: expected an open window that was saved with"
                f" {name}={value!r}; got a window that was saved with"
                f" {name}={saved_values[name]!r}. Wrap with the options that this"
                " window was saved with. To change the options, save between two"
                " windows."
            )


# The following functions describe the state in one line, with the same wording in every
# backend.


_DEFAULTS = make_options(1)
_SHOWN_OTHERWISE = ("steps", "scale_rule", "scaler")
"""The options that `described` formats differently from the other options."""


def status(state: State, steps: Schedule) -> str:
    """Return the progress as text:
    ``micro-batch 2 of 4, update 17, 1 skipped, scale 65536``.

    If the window ends at a given weight, the text is ``micro-batch 2, weight 96 of 128,
    update 17``.

    Args:
        state: the state, as Python numbers.
        steps: the size of the open window, or of the next window if no window is open.
            None means that the size is not known, or that the caller closes the window.
    """
    words = [f"micro-batch {state.micro_step}"]
    if isinstance(steps, UntilWeight):
        words.append(f"weight {state.weight:.10g} of {steps.weight}")
    elif steps is not None:
        words[0] += f" of {steps}"
    words.append(f"update {state.optimizer_step}")
    if state.skipped_windows:
        words.append(f"{state.skipped_windows} skipped")
    if state.loss_scale != 1:
        words.append(f"scale {state.loss_scale:.10g}")
    return ", ".join(words)


def described(
    wrapper: str, inner: str, options: Options, state: State, steps: Schedule
) -> str:
    """Return one line for ``repr``, such as ``AccumulatingOptimizer(SGD, steps=4,
    clip_norm=1.0 | micro-batch 2 of 4, update 17)``.

    The line shows ``steps`` and the options that differ from their defaults. `wrapper`
    and `inner` are the class names of the wrapper and the inner optimizer. `state` and
    `steps` have the same meaning as for `status`.
    """
    steps_in_words = getattr(options.steps, "__name__", repr(options.steps))
    words = [inner, f"steps={steps_in_words}"]
    for name in Options._fields:
        value = getattr(options, name)
        if name not in _SHOWN_OTHERWISE and value != getattr(_DEFAULTS, name):
            words.append(f"{name}={value!r}")
    scale = _scale_in_use(options.scale_rule)
    if options.scaler is not None:
        scale = type(options.scaler).__name__
    if scale != "unused":
        words.append(f"loss_scale={scale}")
    return f"{wrapper}({', '.join(words)} | {status(state, steps)})"
