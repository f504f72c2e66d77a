"""The extra arguments of ``tx.update`` and ``flush``, which the inner optimizer gets.

Some describe one batch: optax has `grad` and `value_fn` for line searches, `grad_fn`
for SAM, and `obj_fn` for Sophia. The inner optimizer runs at the window's end, where a
streaming loop has those of the last micro-batch only, and would continue with a
function that does not belong to the gradient. So the caller closes the window and
passes those of the whole window. `value` is another matter: losses add up, and the
inner optimizer gets the window's (see `extensions`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from difflib import get_close_matches
from inspect import Parameter, signature
from types import FunctionType
from typing import Any, NamedTuple

import optax

from gradaccum import ArgumentTypeError, UsageError
from gradaccum.kit import explain
from gradaccum_jax.arrays import Extra

OF_A_BATCH = ("grad", "value_fn", "grad_fn", "obj_fn")
"""optax's extra arguments that describe the gradient's batch."""
KNOWN = frozenset(("value", *OF_A_BATCH))
"""What an inner optimizer may be given without declaring it."""
OWN = ("weight", "value", "last", "denominator")
"""gradaccum's own."""
SYNONYMS = {
    "weight": (
        "batch_size",
        "bs",
        "items",
        "n",
        "n_examples",
        "n_items",
        "n_samples",
        "n_tokens",
        "ntokens",
        "num_examples",
        "num_items",
        "num_items_in_batch",
        "num_samples",
        "num_tokens",
        "sample_weight",
        "sample_weights",
        "token_count",
        "tokens",
    ),
    "value": ("loss", "loss_value", "losses"),
    "last": (
        "final",
        "final_batch",
        "is_final",
        "is_last",
        "is_last_batch",
        "last_batch",
        "last_micro_batch",
        "last_step",
    ),
    "denominator": ("divisor", "normalizer"),
}
"""Other words for `OWN`, which every `optax.chain` would take and ignore."""


class Declared(NamedTuple):
    """The extra arguments that an inner optimizer takes."""

    names: frozenset[str] = frozenset()
    """The declared ones."""
    takes_any: bool = True
    """True if it takes others too, as everything that `optax.chain` made does."""


TAKES_ANY: Declared = Declared()


def declared_by(inner: optax.GradientTransformation) -> Declared:
    if not isinstance(inner, optax.GradientTransformationExtraArgs):
        return Declared(takes_any=False)
    try:
        parameters = signature(inner.update).parameters.values()
    except (TypeError, ValueError):
        return TAKES_ANY
    names = {parameter.name for parameter in parameters}
    kinds = {parameter.kind for parameter in parameters}
    return Declared(
        frozenset(names.union(_declared_within(inner.update))),
        Parameter.VAR_KEYWORD in kinds,
    )


def _declared_within(update: Callable[..., Any]) -> Iterator[str]:
    """Yield the extra arguments that the parts of `update` declare: optax's combinators
    keep their parts in closures, and hand everything on to them.
    """
    waiting: list[Any] = [update]
    seen: list[Any] = []
    while waiting:
        part = waiting.pop()
        if any(part is other for other in seen):
            continue
        if isinstance(part, FunctionType):
            seen.append(part)
            yield from list(signature(part).parameters)[3:]
            waiting += _enclosed(part)
        elif isinstance(part, tuple | list):
            waiting += part
        elif isinstance(part, dict):
            waiting += part.values()
        elif callable(part):
            for name in ("__wrapped__", "__func__", "func"):
                if hasattr(part, name):
                    waiting.append(getattr(part, name))


def _enclosed(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        # A variable that nothing was assigned to yet has no contents.
        with suppress(ValueError):
            yield cell.cell_contents


def require_taken(extra: Extra, declared: Declared) -> None:
    """Raise unless the inner optimizer takes each extra argument, and none that it does
    not declare is one of `OWN` by another name.
    """
    for name in extra.keys() - declared.names - KNOWN:
        meant = _meant_argument(name, declared)
        if meant is None and declared.takes_any:
            continue
        if name in OWN:
            fix = (
                "weight= and last= belong to tx.update, denominator= to"
                " gradaccum_jax.flush."
            )
        elif meant is not None:
            fix = f"Did you mean {meant}=?"
        else:
            fix = "Leave it out, or give it to an inner optimizer that declares it."
        raise explain(
            ArgumentTypeError,
            name,
            expected="an argument of this call, or one that the inner optimizer"
            " declares",
            found="neither",
            fix=fix,
        )


def _meant_argument(name: str, declared: Declared) -> str | None:
    for own_name, synonyms in SYNONYMS.items():
        if name in synonyms:
            return own_name
    cutoff = 0.75 if declared.takes_any else 0.6
    return next(iter(get_close_matches(name, OWN, 1, cutoff)), None)


def require_declared(extra: Extra, declared: Declared) -> None:
    """Raise unless the inner optimizer declares each extra argument of a call that runs
    the loss function: there a flag of the loss would be lost.
    """
    for name in extra.keys() - declared.names - KNOWN - {*OWN}:
        raise explain(
            ArgumentTypeError,
            name,
            expected="an argument of the loss function, or one that the inner optimizer"
            " declares",
            found="neither",
            fix="Leave it out, or let the loss function take it.",
        )


def require_none_of_a_batch(extra: Extra) -> None:
    for name in OF_A_BATCH:
        if extra.get(name) is not None:
            raise explain(
                UsageError,
                name,
                expected="nothing in a window of several micro-batches",
                found="that of one micro-batch",
                fix="Wrap with steps=None, where tx.update only notes its type, and"
                " close the window yourself with what belongs to all of it:"
                f" gradaccum_jax.flush(tx, state, params, {name}=...).",
            )
