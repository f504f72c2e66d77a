"""The extra arguments of ``tx.update`` and ``flush``, which are passed to the inner
optimizer.

Some of them describe one batch: optax has `grad` and `value_fn` for line searches,
`grad_fn` for SAM, and `obj_fn` for Sophia. The inner optimizer runs at the end of the
window. A loop then has only the last micro-batch's function, which does not belong to
the window's gradient. So the caller passes the whole window's arguments to `flush`.
`value` is different: losses add up, so the inner optimizer gets the window's loss (see
`extensions`).
"""

from __future__ import annotations

from inspect import signature

import optax

from gradaccum import ArgumentTypeError, UsageError
from gradaccum_jax.arrays import Extra

OF_A_BATCH = ("grad", "value_fn", "grad_fn", "obj_fn")
"""optax's extra arguments that describe the gradient's batch."""
KNOWN = frozenset(("value", *OF_A_BATCH))
"""The extra arguments that are allowed even if the inner optimizer does not declare
them.
"""


def declared_by(inner: optax.GradientTransformation) -> frozenset[str]:
    if not isinstance(inner, optax.GradientTransformationExtraArgs):
        return frozenset()
    return frozenset(signature(inner.update).parameters)


def require_declared(extra: Extra, declared: frozenset[str]) -> None:
    """Raise unless the inner optimizer declares each extra argument, because an
    `optax.chain` would accept a misspelt ``weight=`` and ignore it.
    """
    for name in extra.keys() - declared - KNOWN:
        raise ArgumentTypeError(
            f"{name}: expected an argument of this call or of the inner optimizer;"
            " got a name that neither of them declares. weight= and last= are arguments"
            " of tx.update, and denominator= is an argument of gradaccum_jax.flush. If"
            " a part of an optax.chain needs the argument, wrap the chain in a"
            " transformation that declares it:"
            f" def update(updates, state, params, *, {name}, **extra)."
        )


def require_none_of_a_batch(extra: Extra) -> None:
    for name in OF_A_BATCH:
        if extra.get(name) is not None:
            raise UsageError(
                f"{name}: expected no such argument in a window of several"
                " micro-batches; got an argument that describes one micro-batch. Wrap"
                " with steps=None, and close the window with the argument for the whole"
                f" window: gradaccum_jax.flush(tx, state, params, {name}=...)."
            )
