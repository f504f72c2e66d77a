"""The extra arguments of ``tx.update`` and ``flush``, which the inner optimizer gets.

Some describe one batch: optax has `grad` and `value_fn` for line searches, `grad_fn`
for SAM, and `obj_fn` for Sophia. The inner optimizer runs at the window's end, where a
streaming loop has those of the last micro-batch only, and would continue with a
function that does not belong to the gradient. So the caller closes the window and
passes those of the whole window. `value` is another matter: losses add up, and the
inner optimizer gets the window's (see `extensions`).
"""

from __future__ import annotations

from inspect import signature

import optax

from gradaccum import ArgumentTypeError, UsageError
from gradaccum_jax.arrays import Extra

OF_A_BATCH = ("grad", "value_fn", "grad_fn", "obj_fn")
"""optax's extra arguments that describe the gradient's batch."""
KNOWN = frozenset(("value", *OF_A_BATCH))
"""What an inner optimizer may be given without declaring it."""


def declared_by(inner: optax.GradientTransformation) -> frozenset[str]:
    """Return the names of the arguments that an inner optimizer declares."""
    if not isinstance(inner, optax.GradientTransformationExtraArgs):
        return frozenset()
    return frozenset(signature(inner.update).parameters)


def require_declared(extra: Extra, declared: frozenset[str]) -> None:
    """Raise unless the inner optimizer declares each extra argument: an `optax.chain`
    would take a misspelt ``weight=`` and ignore it.
    """
    for name in extra.keys() - declared - KNOWN:
        raise ArgumentTypeError(
            f"{name}: expected an argument of this call, or one that the inner"
            " optimizer declares; got neither. weight= and last= belong to tx.update,"
            " denominator= to gradaccum_jax.flush. Around an optax.chain declare it:"
            f" def update(updates, state, params, *, {name}, **extra)."
        )


def require_none_of_a_batch(extra: Extra) -> None:
    for name in OF_A_BATCH:
        if extra.get(name) is not None:
            raise UsageError(
                f"{name}: expected nothing in a window of several micro-batches; got"
                " that of one micro-batch. Wrap with steps=None, and close the window"
                " with what belongs to all of it: gradaccum_jax.flush(tx, state,"
                f" params, {name}=...)."
            )
