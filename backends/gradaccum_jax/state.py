"""The state of a wrapped optimizer as a pytree, and the results that users read from
it.

The state is flat, so `optax.tree_utils.tree_get` can find each field. The fields have
the same names in every backend. The state contains only arrays, so no field is lost
when it is flattened.
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
from gradaccum_jax.sharding import axes_of, vary

STEPS = 4
"""The index of the window's size (``steps``) in `AccumulationState.terms`."""


class AccumulationState(NamedTuple):
    """The state of a wrapped optimizer between two micro-batches. Scalars have shape
    ``()``.
    """

    micro_step: Scalar
    """int32: the number of micro-batches in the open window."""
    optimizer_step: Scalar
    """int32: the number of updates applied."""
    skipped_windows: Scalar
    """int32: the number of windows closed without an update."""
    weight: Scalar
    """The sum of the weights in the open window: a float32, or a float64 if the
    accumulator contains float64.
    """
    overflow: Scalar
    """bool: True if a micro-batch of the open window is known to have a gradient that
    is not finite.
    """
    loss_scale: Scalar
    """float32: the factor by which the loss is multiplied before differentiation."""
    growth_tracker: Scalar
    """int32: the number of windows that did not overflow since the loss scale last
    changed.
    """
    accumulator: Tree
    """The sum of the open window's gradients, still multiplied by the loss scale and
    not yet divided by a weight. It has the tree structure of the parameters. Between
    two windows it contains leftover values from the last update.
    """
    inner_state: InnerState
    """The inner optimizer's own state. With master weights, this state belongs to the
    master weights, not to the parameters.
    """
    last_applied: Scalar
    """bool: True if the last call closed a window with an update."""
    last_skipped: Scalar
    """bool: True if the last call closed a window without an update."""
    last_overflow: Scalar
    """bool: True if the last call closed a window that had overflowed. Also True if the
    last call dropped its micro-batch, because the micro-batch's gradient was not finite
    (``on_overflow="drop_micro_batch"``).
    """
    last_grad_norm: Scalar
    """The global 2-norm of the last closed window's gradient before clipping, in the
    dtype of `weight`. It is inf if the window overflowed, 0 before the first window,
    and `UNKNOWN` if no option needed the norm.
    """
    masters: Tree = None
    """With ``master_weights=True``, a tree with the structure of the parameters: a
    float32 master copy of each half-precision parameter, and None for every other
    parameter.
    """
    terms: Array = None
    """int32, shape (5,): the version of the state's format, followed by four settings
    of the open window: the reduction, `on_overflow`, the kind of loss scale (unused,
    static or dynamic), and the window's size. `gradaccum.kit.encode_terms` explains the
    numbers.
    """
    loss: Scalar = None
    """The sum of the open window's losses (see `gradaccum.kit.add_loss`), in the dtype
    of `weight`. It is `UNKNOWN` if a micro-batch was passed without its loss.
    """
    last_loss: Scalar = None
    """The unscaled loss of the last closed window, in the dtype of `weight`. It is
    `UNKNOWN` before the first window, or if a micro-batch of the window was passed
    without its loss.
    """


def fresh(start: State, weight_dtype: DType, **trees: Tree) -> AccumulationState:
    """Return the state before the first micro-batch. Each scalar gets an array of its
    own, because JAX cannot donate the same buffer twice.
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
    """Return the value of `AccumulationState.terms` for the first window. If ``steps``
    is a callable, it is not called, and the array contains 0 as the window's size.
    """
    if not kit.is_known(options.steps):
        return current_terms(options, None)
    return current_terms(options, kit.steps_at(options.steps, 0, kit.select))


def current_terms(options: Options, steps: Scalar) -> Array:
    """Return the value of `AccumulationState.terms` for the open window, whose size is
    `steps`. The size may be traced. The array is written to the state with every
    micro-batch.
    """
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
    """Return `state` with its first seven fields replaced by `fields`. Each new field
    is cast to the type of the old field, because the state may be the carry of a scan,
    and the type of a carry must not change.
    """
    return AccumulationState._make((*all_like(fields, fields_of(state)), *state[7:]))


def like(new: Scalar, old: Scalar) -> Array:
    return all_like((new,), (old,))[0]


def all_like(news: Sequence[Scalar], olds: Sequence[Scalar]) -> list[Array]:
    """Cast each new value to the dtype of the corresponding old value, and mark it as
    varying along the same mesh axes as the old value.
    """
    arrays = [
        jnp.asarray(new, jnp.result_type(old))
        for new, old in zip(news, olds, strict=True)
    ]
    return [vary(new, axes_of(old)) for new, old in zip(arrays, olds, strict=True)]


def is_state(node: object) -> bool:
    return isinstance(node, AccumulationState)


def find_states(tree: Tree) -> list[AccumulationState]:
    return list(filter(is_state, jax.tree.leaves(tree, is_leaf=is_state)))


def the_state(tree: Tree) -> AccumulationState:
    states = find_states(tree)
    if len(states) != 1:
        raise ArgumentTypeError(
            "state: expected the state of a wrapped optimizer, or a tree that"
            f" contains exactly one such state; got a {type(tree).__name__} that"
            f" contains {len(states)} such states. Pass the state that tx.init(params)"
            " or tx.update(...) returned, or convert a restored state with"
            " gradaccum_jax.check_state."
        )
    return states[0]


def result(state: Tree) -> StepResult:
    """Return the result of the last update, flush or discard.

    Args:
        state: the state of a wrapped optimizer, or a tree that contains exactly one
            such state, for example the state of an `optax.chain`.

    Returns:
        A `StepResult` whose fields are `jax.Array` scalars of shape ``()``. The flags
        are bools, and the counters are int32. `loss_scale` is a float32. `grad_norm`
        and `loss` are float32, or float64 if the accumulator contains float64.

    Raises:
        ArgumentTypeError: `state` does not contain exactly one such state.
    """
    window_state = the_state(state)
    overflow = jnp.asarray(window_state.last_overflow)
    if overflow.ndim > jnp.ndim(window_state.last_applied):
        overflow = overflow.any(axis=0)  # one flag per device
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
    """Return a one-line description of the state, for example
    ``micro-batch 2 of 4, update 17, 1 skipped, scale 65536``.

    The number after "of" is the size of the window that contains the last micro-batch.
    Call this function outside compiled code, because it synchronizes with the device.

    Args:
        state: as in `result`.

    Raises:
        ArgumentTypeError: as in `result`.
    """
    window_state = the_state(state)
    code = int(window_state.terms[STEPS])
    # If devices share a window, each device has its own weight. These weights add up to
    # the window's weight.
    fields = State(*(jnp.sum(field).item() for field in fields_of(window_state)))
    return kit.status(fields, UntilWeight(-code) if code < 0 else code or None)


def scale_loss(loss: Scalar, state: Tree) -> Scalar:
    """Return `loss` times the loss scale. Call this function inside the function that
    you differentiate.

    Args:
        loss: a scalar. A half-precision loss becomes float32.
        state: as in `result`.

    Raises:
        ArgumentTypeError: as in `result`.
    """
    return loss * jnp.asarray(the_state(state).loss_scale)


# The loss of a window is unknown if a micro-batch was passed without its loss. The norm
# is unknown if it was not computed.
#
# Computations treat an unknown number as NaN. But with ``jax_debug_nans``, JAX raises
# an error when a jitted function returns a NaN, and each micro-batch's state is
# returned by a jitted function. So the state stores the lowest finite float32 instead
# of NaN. No sum of losses has this value.


UNKNOWN = float(jnp.finfo(jnp.float32).min)
"""The number that the state stores instead of NaN: the lowest finite float32, which
float64 represents exactly too.
"""


def as_stored(number: Scalar) -> Scalar:
    return jnp.where(jnp.isnan(number), UNKNOWN, number)


def as_read(number: Scalar) -> Scalar:
    with jax.debug_nans(False):  # this NaN is intended
        number = jnp.asarray(number)  # not a flax nnx variable, whose == differs
        return jnp.where(number == UNKNOWN, jnp.nan, number)
