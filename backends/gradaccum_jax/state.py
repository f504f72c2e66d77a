"""The state of an accumulation as a pytree, and the results that users read from it.

It is flat, with the same field names in every backend, which
`optax.tree_utils.tree_get` finds. It holds arrays only, so no field can be lost in a
flatten.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gradaccum import ArgumentTypeError, StepResult, kit
from gradaccum.kit import Fields, Options, Scalar, State, UntilWeight
from gradaccum_jax.arrays import Array, DType, InnerState, Tree
from gradaccum_jax.sharding import axes_of, manual_axes, vary

STEPS = 4
"""The place of ``steps`` among the codes of `AccumulationState.terms`."""


class AccumulationState(NamedTuple):
    """The state between two micro-batches. Scalars have shape ``()``."""

    micro_step: Scalar
    """int32: micro-batches in the open window."""
    optimizer_step: Scalar
    """int32: updates applied."""
    skipped_windows: Scalar
    """int32: windows closed without an update."""
    weight: Scalar
    """float32, float64 with float64 accumulators: sum of the weights in the open
    window.
    """
    overflow: Scalar
    """bool: some micro-batch of the open window is known to have had a non-finite
    gradient.
    """
    loss_scale: Scalar
    """float32: the factor of the loss before differentiation."""
    growth_tracker: Scalar
    """int32: clean windows since the loss scale last changed."""
    accumulator: Tree
    """The open window's sum, scaled and undivided, in the tree of the parameters.
    Between two windows it holds what the last update left there.
    """
    inner_state: InnerState
    """The wrapped optimizer's own state; with master weights that of the masters."""
    last_applied: Scalar
    """bool: the last event closed a window with an update."""
    last_skipped: Scalar
    """bool: the last event closed a window without one."""
    last_overflow: Scalar
    """bool: the last event closed a window that had overflowed, or dropped its
    micro-batch.
    """
    last_grad_norm: Scalar
    """dtype of `weight`: global 2-norm of the last closed window's gradient before
    clipping; inf if it overflowed; 0 before any; `UNKNOWN` if nothing asked for it.
    """
    masters: Tree = None
    """With ``master_weights=True`` the tree of the parameters: float32 masters of the
    half-precision ones, None for the others.
    """
    terms: Array = None
    """int32, shape (5,): format, reduction, on_overflow, kind of loss scale and steps
    of the open window: `gradaccum.kit.encode_terms`.
    """
    loss: Scalar = None
    """dtype of `weight`: the open window's losses, added up as `gradaccum.kit.add_loss`
    does; `UNKNOWN` if one was not told.
    """
    last_loss: Scalar = None
    """dtype of `weight`: the last closed window's loss, unscaled; `UNKNOWN` before any,
    and where it was not told.
    """


def fresh(start: State, weight_dtype: DType, **trees: Tree) -> AccumulationState:
    """Return the state before the first micro-batch. Every scalar has its own array: no
    buffer may be donated twice.
    """
    dtypes = {**kit.FIELD_DTYPES, "weight": weight_dtype}
    fields: dict[str, Any] = {
        name: jnp.asarray(value, dtypes[name])
        for name, value in start._asdict().items()
    }
    event: dict[str, Any] = {
        name: jnp.asarray(False)
        for name in ("last_applied", "last_skipped", "last_overflow")
    }
    return AccumulationState(
        **fields, **event, last_grad_norm=jnp.zeros((), weight_dtype), **trees
    )


def first_terms(options: Options) -> Array:
    """Return the terms before a callable ``steps`` was called."""
    if not kit.is_known(options.steps):
        return current_terms(options, None)
    return current_terms(options, kit.steps_at(options.steps, 0, kit.select))


def current_terms(options: Options, steps: Scalar) -> Array:
    """Return the codes of the open window's terms, which each micro-batch writes."""
    codes = kit.encode_terms(kit.terms_of(options._replace(steps=None), 0))
    terms = jnp.asarray(codes, jnp.int32)
    if steps is None:
        return terms
    code = jnp.asarray(kit.code_of(steps), jnp.int32)
    return jnp.where(np.arange(len(codes)) == STEPS, code, terms)


def with_event(
    state: AccumulationState, applied: Scalar, skipped: Scalar, overflow: Scalar
) -> AccumulationState:
    return state._replace(
        last_applied=like(applied, state.last_applied),
        last_skipped=like(skipped, state.last_skipped),
        last_overflow=like(overflow, state.last_overflow),
    )


def fields_of(state: AccumulationState) -> Fields:
    return state[:7]


def with_fields(state: AccumulationState, fields: Fields) -> AccumulationState:
    """Return `state` with new `fields`, each in its old type, which a scan's carry must
    keep.
    """
    return AccumulationState._make((*all_like(fields, fields_of(state)), *state[7:]))


def like(new: Scalar, old: Scalar) -> Array:
    return all_like((new,), (old,))[0]


def all_like(news: Sequence[Scalar], olds: Sequence[Scalar]) -> list[Array]:
    """Cast each of `news` to the dtype and the mesh axes of its old value."""
    arrays = [
        jnp.asarray(new, jnp.result_type(old))
        for new, old in zip(news, olds, strict=True)
    ]
    if not manual_axes():
        return arrays
    return [vary(new, axes_of(old)) for new, old in zip(arrays, olds, strict=True)]


def is_state(node: object) -> bool:
    return isinstance(node, AccumulationState)


def find_states(tree: Tree) -> list[AccumulationState]:
    return list(filter(is_state, jax.tree.leaves(tree, is_leaf=is_state)))


def the_state(tree: Tree) -> AccumulationState:
    states = find_states(tree)
    if len(states) != 1:
        raise ArgumentTypeError(
            "state: expected the state of a wrapped optimizer, or a tree that holds"
            f" one; got a {type(tree).__name__} that holds {len(states)} of them. Pass"
            " what tx.init(params) or tx.update(...) returned."
        )
    return states[0]


def result(state: Tree) -> StepResult:
    """Return the result of the last update, flush or discard.

    Args:
        state: the state of a wrapped optimizer, or a tree that holds exactly one, such
            as the state of an `optax.chain`.

    Returns:
        A `StepResult` of `jax.Array` scalars, shape ``()``: bools; `grad_norm` and
        `loss` float32 (float64 with float64 accumulators); `loss_scale` float32;
        counters int32.

    Raises:
        ArgumentTypeError: `state` holds no such state, or several.
    """
    window_state = the_state(state)
    overflow = jnp.asarray(window_state.last_overflow)
    if overflow.ndim > jnp.ndim(window_state.last_applied):
        overflow = overflow.any(axis=0)  # one for each device
    return StepResult(
        applied=jnp.asarray(window_state.last_applied),
        skipped=jnp.asarray(window_state.last_skipped),
        overflow=overflow,
        grad_norm=as_read(window_state.last_grad_norm),
        loss_scale=jnp.asarray(window_state.loss_scale),
        micro_step=jnp.asarray(window_state.micro_step),
        optimizer_step=jnp.asarray(window_state.optimizer_step),
        loss=as_read(window_state.last_loss),
    )


def describe(state: Tree) -> str:
    """Return the state in one line:
    ``micro-batch 2 of 4, update 17, 1 skipped, scale 65536``.

    The size is that of the last micro-batch's window. This waits for the device; call
    it outside of compiled code.

    Args:
        state: as in `result`.

    Raises:
        ArgumentTypeError: `state` holds no accumulation's state, or several.
    """
    window_state = the_state(state)
    code = int(window_state.terms[STEPS])
    # each device that shares a window has a weight of its own
    fields = State(*(jnp.sum(field).item() for field in fields_of(window_state)))
    return kit.status(fields, UntilWeight(-code) if code < 0 else code or None)


def scale_loss(loss: Scalar, state: Tree) -> Scalar:
    """Multiply `loss` by the loss scale, inside the function that is differentiated.

    Args:
        loss: a scalar. A half-precision loss becomes float32.
        state: as in `result`.

    Raises:
        ArgumentTypeError: `state` holds no accumulation's state, or several.
    """
    return loss * jnp.asarray(the_state(state).loss_scale)


# Numbers that nobody knows, as the state stores them: the loss of a window that was
# given none, the norm of a window that nobody measured.
#
# They are NaN wherever anything is computed. But ``jax_debug_nans`` stops at each NaN
# that leaves a jitted function, and a state leaves one in every micro-batch. So the
# state stores the lowest float32 in a NaN's place, which is no sum of losses.


UNKNOWN = float(jnp.finfo(jnp.float32).min)
"""Exact in float64 too."""


def as_stored(number: Scalar) -> Scalar:
    return jnp.where(jnp.isnan(number), UNKNOWN, number)


def as_read(number: Scalar) -> Scalar:
    with jax.debug_nans(False):  # this NaN is no accident
        return jnp.where(number == UNKNOWN, jnp.nan, number)
