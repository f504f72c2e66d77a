"""The inner optimizer's call at the end of a window: made once or not at all, with no
second buffer of the parameters' size.

If the inner optimizer runs, its updates take the accumulator's place, where the next
window's first micro-batch overwrites them. The parameters are closed over, not carried.
So XLA works in place, and a micro-batch in mid-window costs the addition and a select.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator
from contextlib import suppress
from difflib import get_close_matches
from inspect import Parameter, signature
from types import FunctionType
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax

from gradaccum import ArgumentTypeError, UsageError
from gradaccum.kit import Scalar, explain
from gradaccum_jax.arrays import (
    Array,
    Axes,
    Extra,
    Handed,
    InnerState,
    Params,
    Tree,
    Updates,
    cast_like,
    takes_part,
    wider,
)
from gradaccum_jax.gradient_sum import divide, emptied, fills, pick, to
from gradaccum_jax.sharding import ShardAxes, replicated
from gradaccum_jax.workers.group import same
from gradaccum_jax.xla import named_axes, once, origins, traced_once

T = TypeVar("T")
Call = Callable[[Tree, InnerState], tuple[Any, Any]]


class Traced(NamedTuple):
    """The facts that JAX knows of the inner optimizer's call while it traces."""

    updates: Updates
    call: Call
    """The optimizer as `Update.run` calls it, ``call(gradients, state)``: for arguments
    of the same types it is not traced again.
    """


class Update(NamedTuple):
    """A call of the inner optimizer that the end of a window may make."""

    optimizer: Callable[..., tuple[Any, Any]]
    """``optimizer(gradients, state, params, **extra)``: the inner transformation's
    ``update``.
    """
    dtypes: Handed
    params: Params
    extra: Extra
    axes: tuple[str, ...] = ()
    """The mesh axes whose devices share the window."""
    shard_axes: ShardAxes = None
    frozen_found: Callable[[list[str]], None] | None = None
    """What is called with the paths of parameters that the optimizer does not train."""

    def told(self, loss: Scalar) -> Update:
        """Return the same call with the window's loss as the ``value`` that optax's
        optimizers read.
        """
        return self._replace(extra={**self.extra, "value": loss})

    def traced(self, accumulator: Tree, held: InnerState, divisor: Scalar) -> Traced:
        """Trace the call; nothing of it enters the program. A call that takes no
        ``value``, such as SAM's, is made without.
        """
        try:
            return self._traced(accumulator, held, divisor)
        except TypeError as error:
            if (
                "value" not in self.extra
                or "unexpected keyword argument 'value'" not in str(error)
            ):
                raise
        rest = {name: given for name, given in self.extra.items() if name != "value"}
        return self._replace(extra=rest)._traced(accumulator, held, divisor)

    def _traced(self, accumulator: Tree, held: InnerState, divisor: Scalar) -> Traced:
        call = traced_once(self._call, (accumulator, held))

        def whole(accumulator: Tree, held: InnerState) -> tuple[Updates, InnerState]:
            leaves, structure = jax.tree.flatten(self._gradients(accumulator, divisor))
            gradients = [
                to(leaf, dtype)
                for leaf, dtype in zip(leaves, self.dtypes.like, strict=True)
            ]
            made: tuple[Updates, InnerState] = call(
                jax.tree.unflatten(structure, gradients), held
            )
            return made

        program, (updates, _) = jax.make_jaxpr(whole, return_shape=True)(
            accumulator, held
        )
        require_no_reduction(named_axes(program), self.shard_axes)
        if self.frozen_found is not None:
            self.frozen_found(_frozen_in(program, accumulator))
        return Traced(_still(updates, accumulator), call)

    def run(
        self,
        accumulator: Tree,
        held: InnerState,
        divisor: Scalar,
        traced: Traced,
        apply: Scalar,
    ) -> tuple[Updates, Tree, InnerState]:
        """Run the inner optimizer if `apply` holds.

        Returns:
            The updates twice and the new state; otherwise zeros, the accumulator and
            the state.
        """
        buffer = jax.tree.map(_wide_enough, accumulator, traced.updates)

        def call(operand: tuple[Tree, InnerState]) -> tuple[Updates, InnerState]:
            gradients = self._gradients(cast_like(operand[0], accumulator), divisor)
            made, after = traced.call(gradients, operand[1])
            return cast_like(_still(made, accumulator), buffer), cast_like(after, held)

        buffer, after = once(apply, call, (buffer, held))
        return (
            self._updates_where(apply, buffer, traced.updates),
            cast_like(buffer, accumulator),
            after,
        )

    def keep(
        self, accumulator: Tree, updates: Updates, never: Scalar
    ) -> tuple[Updates, Tree]:
        """Return the updates, all zeros, and the accumulator of a micro-batch that can
        end no window.

        Constant zeros would cost a copy of the parameters: nothing tells XLA that the
        gradient, which reads the old parameters, comes first. After a loop over all
        sums, even one that never runs, the gradient has come, and the select is free.
        """
        accumulator = once(never, lambda held: emptied(held, never), accumulator)
        return self._updates_where(never, accumulator, updates), accumulator

    def _call(self, gradients: Tree, held: InnerState) -> tuple[Any, Any]:
        made = self.optimizer(gradients, held, self.params, **self.extra)
        if not self.axes:
            return made
        return same(
            "what the inner optimizer made",
            made,
            self.axes,
            "Let the optimizer close over nothing that is a device's own.",
        )

    def _gradients(self, accumulator: Tree, divisor: Scalar) -> Tree:
        return replicated(divide(accumulator, divisor, self.dtypes.given), self.axes)

    def _updates_where(self, apply: Scalar, buffer: Tree, updates: Updates) -> Updates:
        """Return the updates in `buffer` if `apply` holds, in the dtypes of `updates`;
        otherwise zeros.
        """
        nothing = fills(_nothing)
        made = jax.tree.map(
            lambda leaf, update: to(pick(apply, leaf, nothing(leaf)), update.dtype),
            buffer,
            updates,
        )
        return replicated(made, self.axes)


def _frozen_in(program: Any, accumulator: Tree) -> list[str]:
    """Return the paths of parameters whose gradient reaches no result of the inner
    optimizer's `program`, or whose update is a constant; none if it is so of all.
    """
    leaves = jax.tree_util.tree_flatten_with_path(accumulator)[0]
    results = origins(program.jaxpr, len(leaves))
    read = functools.reduce(operator.or_, results, 0)
    places = [place for place, (_, leaf) in enumerate(leaves) if takes_part(leaf)]
    frozen = [
        f"params{jax.tree_util.keystr(leaves[place][0])}"
        for place in places
        if not read & 1 << place or not results[place]
    ]
    return frozen if len(frozen) < len(places) else []


def _wide_enough(held: Array, update: Array) -> Array:
    return to(held, wider(held.dtype, update.dtype))


def _still(updates: Updates, accumulator: Tree) -> Updates:
    """Replace the update of each parameter that takes no part by the sum, an exact 0 in
    its dtype.
    """
    return jax.tree.map(
        lambda held, update: update if takes_part(held) else held, accumulator, updates
    )


def no_update(leaf: Array) -> Array:
    return jnp.full_like(leaf, _nothing(leaf))


def _nothing(leaf: Array) -> complex:
    """Return -0.0, the one zero that leaves every parameter bit for bit as it is: -0.0
    + 0.0 is 0.0, but x + -0.0 is x.
    """
    if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        return complex(-0.0, -0.0)
    return -0.0 if jnp.issubdtype(leaf.dtype, jnp.floating) else 0


# Extra arguments of the inner optimizer that describe one batch: optax has `grad` and
# `value_fn` for line searches, `grad_fn` for SAM, and `obj_fn` for Sophia.
#
# The inner optimizer runs at the window's end, where a streaming loop has those of the
# last micro-batch only. Training would continue with a function that does not belong to
# the gradient. So the caller closes the window and passes those of the whole window.
# `value` is another matter: losses add up, and the inner optimizer gets the window's
# (see `extensions`).


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


class Takes(NamedTuple):
    """The extra arguments that an inner optimizer takes."""

    names: frozenset[str] = frozenset()
    """The declared ones."""
    any: bool = True
    """True if it takes others too, as everything that `optax.chain` made does."""


ANY = Takes()


def takes(inner: optax.GradientTransformation) -> Takes:
    if not isinstance(inner, optax.GradientTransformationExtraArgs):
        return Takes(any=False)
    try:
        declared = signature(inner.update).parameters.values()
    except (TypeError, ValueError):
        return ANY
    return Takes(
        frozenset(p.name for p in declared).union(_declared_within(inner.update)),
        any(p.kind is Parameter.VAR_KEYWORD for p in declared),
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
        else:
            waiting += [
                getattr(part, name)
                for name in ("__wrapped__", "__func__", "func")
                if callable(part) and hasattr(part, name)
            ]


def _enclosed(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        # a variable that nothing was assigned to yet
        with suppress(ValueError):
            yield cell.cell_contents


def require_taken(extra: Extra, taken: Takes) -> None:
    """Raise unless the inner optimizer takes each extra argument, and none that it does
    not declare is one of `OWN` by another name.
    """
    for name in extra.keys() - taken.names - KNOWN:
        near = [own for own, others in SYNONYMS.items() if name in others]
        near = near or get_close_matches(name, OWN, 1, 0.75 if taken.any else 0.6)
        if near or not taken.any:
            fix = (
                f"Did you mean {near[0]}=?"
                if near
                else "Leave it out, or give it to an inner optimizer that declares it."
            )
            fix = (
                "weight= and last= belong to tx.update, denominator= to"
                " gradaccum_jax.flush."
                if name in OWN
                else fix
            )
            expected, found = (
                "an argument of this call, or one that the inner optimizer declares",
                "neither",
            )
            raise explain(
                ArgumentTypeError, name, expected=expected, found=found, fix=fix
            )


def require_declared(extra: Extra, taken: Takes) -> None:
    """Raise unless the inner optimizer declares each extra argument of a call that runs
    the loss function: there a flag of the loss would be lost.
    """
    for name in extra.keys() - taken.names - KNOWN - {*OWN}:
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
            expected, found = (
                "nothing in a window of several micro-batches",
                "that of one micro-batch",
            )
            fix = (
                "Wrap with steps=None, where tx.update only notes its type, and close"
                " the window yourself with what belongs to all of it:"
                f" gradaccum_jax.flush(tx, state, params, {name}=...)."
            )
            raise explain(UsageError, name, expected=expected, found=found, fix=fix)


def require_no_reduction(axes: Axes, shard_axes: ShardAxes) -> None:
    """Raise unless the inner optimizer reduces over no mesh axes but those that shard
    parameters.

    Each device decides by its own gradient. If one skipped the optimizer, the others
    would wait for it for ever.
    """
    if found := sorted(axes - frozenset(shard_axes or ())):
        fix = (
            "Reduce the gradients before tx.update, jax.lax.pmean(grads, axis), or wrap"
            " with axis_name=, which reduces once per window."
        )
        raise explain(
            UsageError,
            "optimizer",
            expected="one that does not reduce",
            found=f"one that reduces over {found}",
            fix=fix,
        )
