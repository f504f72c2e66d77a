"""Check the extra arguments of ``tx.update`` and ``flush``, which are passed on to the
inner optimizer.

Some of these arguments describe one batch: optax has `grad` and `value_fn` for line
searches, `grad_fn` for SAM, and `obj_fn` for Sophia. The inner optimizer runs at the
end of the window. An argument that describes only the last micro-batch would not match
the gradient of the whole window. So the caller must pass such arguments to `flush`,
with values that describe the whole window. `value` is an exception: losses can be added
up, so the inner optimizer gets the window's loss (see `extensions`).
"""

from __future__ import annotations

from inspect import signature

import optax

from gradaccum import ArgumentTypeError, UsageError
from gradaccum_jax.arrays import Extra

OF_A_BATCH = ("grad", "value_fn", "grad_fn", "obj_fn")
"""The extra arguments that describe one batch. Several of optax's optimizers accept
them.
"""
KNOWN = frozenset(("value", *OF_A_BATCH))
"""The extra arguments that are allowed even if the inner optimizer does not declare
them.
"""


def declared_by(inner: optax.GradientTransformation) -> frozenset[str]:
    if not isinstance(inner, optax.GradientTransformationExtraArgs):
        return frozenset()
    return frozenset(signature(inner.update).parameters)


def require_declared(extra: Extra, declared: frozenset[str]) -> None:
    """Raise if `extra` contains an argument that is neither in `declared` nor in
    `KNOWN`. Without this check, an `optax.chain` would accept a misspelt ``weight=``
    and ignore it.
    """
    for name in extra.keys() - declared - KNOWN:
        raise ArgumentTypeError(
            f"{name}: expected an argument of this call or of the inner optimizer;"
            " got a name that neither of them declares. weight= and last= are arguments"
            " of tx.update, and denominator= is an argument of gradaccum_jax.flush. If"
            " a transformation inside an optax.chain needs the argument, wrap the chain"
            " in a transformation that declares it:"
            f" def update(updates, state, params, *, {name}, **extra)."
        )


def require_none_of_a_batch(extra: Extra) -> None:
    for name in OF_A_BATCH:
        if extra.get(name) is not None:
            raise UsageError(
                f"{name}: expected an argument that describes the whole window, because"
                " the window has several micro-batches; got an argument that describes"
                " one micro-batch. Wrap the optimizer with steps=None, and pass the"
                " argument when you close the window:"
                f" gradaccum_jax.flush(tx, state, params, {name}=...)."
            )
