"""The wrapped optimizer that `gradaccum.wrap` returns for an optax transformation, and
the functions `flush`, `discard` and `epoch`.

`wrap` returns a plain `optax.GradientTransformationExtraArgs`. Its functions `init` and
`update` are methods of an `Accumulation` object, from which `flush` reads the options.
`update` is jitted, so it is compiled only once in a loop outside `jax.jit`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
import optax

from gradaccum import ArgumentTypeError, ArgumentValueError, kit
from gradaccum.kit import (
    Options,
    Scalar,
    ends,
    given_weight,
    initial_state,
    use_of_weights,
)
from gradaccum_jax import gradient_sum, window
from gradaccum_jax.arrays import (
    Extra,
    Gradients,
    Params,
    Tree,
    Updates,
    gradient_types,
    plain,
    strong,
)
from gradaccum_jax.checks import (
    align,
    as_denominator,
    as_loss,
    as_weight,
    require_plain,
)
from gradaccum_jax.combinators import (
    QUESTION,
    Question,
    close_part,
    new_part,
    not_wrapped_error,
)
from gradaccum_jax.extra_arguments import (
    declared_by,
    require_declared,
    require_none_of_a_batch,
)
from gradaccum_jax.master_weights import in_place_of, on_masters
from gradaccum_jax.sharding import ShardAxes, replicated, vary, varying_axes
from gradaccum_jax.state import (
    UNKNOWN,
    AccumulationState,
    fields_of,
    first_terms,
    fresh,
    the_state,
)
from gradaccum_jax.update import Update, without_frozen
from gradaccum_jax.window import MicroBatch, check_known
from gradaccum_jax.workers import group
from gradaccum_jax.xla import call_jitted


class UpdateFunction(Protocol):
    """The type of a wrapped optimizer's ``update``."""

    def __call__(
        self, updates: Tree, state: Any, params: Params = None, **extra_args: Any
    ) -> tuple[Updates, AccumulationState]: ...


class Wrapped(optax.GradientTransformationExtraArgs):  # type: ignore[misc]
    """A wrapped optimizer, which consists of the two functions `init` and `update`."""

    init: Callable[[Params], AccumulationState]
    update: UpdateFunction


@dataclass(frozen=True, eq=False)
class Accumulation:
    """An inner optimizer together with the checked options of `gradaccum.wrap`."""

    transformation: optax.GradientTransformation
    """The optimizer that was passed to `wrap`."""
    options: Options
    axes: tuple[str, ...]
    """The mesh axes along which devices share the window."""
    shard_axes: ShardAxes = None

    @cached_property
    def inner(self) -> optax.GradientTransformationExtraArgs:
        """The inner optimizer, wrapped by `master_weights.on_masters`."""
        inner = optax.with_extra_args_support(self.transformation)
        return on_masters(inner, self.options.master_weights)

    @cached_property
    def declared(self) -> frozenset[str]:
        """The extra arguments that the inner optimizer declares."""
        return declared_by(self.transformation)

    def init(self, params: Params) -> AccumulationState:
        """Return the state before the first micro-batch. The state's accumulator has
        the structure of `params`.
        """
        group.require_axes(self.axes)
        group.same("params", params, self.axes)
        accumulator = gradient_sum.zeros(params, self.options.accumulate_dtype)
        inner_state, masters = strong(self.inner.init(params))
        accumulator = without_frozen(
            accumulator, self.transformation, inner_state, in_place_of(params, masters)
        )
        if self.shard_axes:
            inner_state, masters = group.like_params(
                self.inner, (inner_state, masters), params
            )
        require_plain(inner_state)
        dtype = gradient_sum.weight_dtype(accumulator)
        state = fresh(
            initial_state(self.options.scale_rule.init_scale),
            dtype,
            accumulator=accumulator,
            inner_state=inner_state,
            masters=masters,
            terms=first_terms(self.options),
            loss=jnp.zeros((), dtype),
            last_loss=jnp.full((), UNKNOWN, dtype),
        )
        state = vary(state, varying_axes(params) - frozenset(self.shard_axes or ()))
        return group.shared_window(state, self.axes)

    def update(
        self,
        grads: Tree,
        state: AccumulationState,
        params: Params = None,
        *,
        weight: Scalar = None,
        value: Scalar = None,
        last: Scalar = None,
        **extra: Any,
    ) -> tuple[Updates, AccumulationState]:
        """Add one micro-batch to the open window. Return the updates and the new state.
        The updates are the inner optimizer's updates if the window ends with this
        micro-batch, and zeros otherwise.

        If `last` is True, the window ends with this micro-batch.
        """
        if QUESTION in extra:
            question: Question = extra.pop(QUESTION)
            return question.ask(self, state, params, extra)
        self.check(state, params, extra)
        steps = self.options.steps
        given_weight(weight, use_of_weights(self.options))
        if steps != 1 and (steps is not None or last is not None):
            require_none_of_a_batch(extra)
        check_known(steps, state.optimizer_step)
        dtype = jnp.result_type(state.weight)
        micro_batch = MicroBatch(
            self._align(grads, state), as_weight(weight, dtype), as_loss(value, dtype)
        )
        group.require_own("value", micro_batch.loss, self.axes)
        if last is not None:
            last = group.same("last", jnp.asarray(last, bool), self.axes)
        results: tuple[Updates, AccumulationState] = call_jitted(
            self._jitted_update, micro_batch, state, params, extra, last
        )
        return results

    def flush(
        self,
        state: AccumulationState,
        params: Params = None,
        *,
        denominator: Scalar = None,
        **extra: Any,
    ) -> tuple[Updates, AccumulationState]:
        self.check(state, params, extra)
        dtype = jnp.result_type(state.weight)
        divisor = as_denominator(denominator, self.options, dtype)
        divisor = group.same("denominator", divisor, self.axes)
        results: tuple[Updates, AccumulationState] = call_jitted(
            self._jitted_flush, state, params, extra, divisor
        )
        return results

    def check(self, state: AccumulationState, params: Params, extra: Extra) -> None:
        masters = the_state(state).masters
        if params is None and jax.tree.leaves(masters):
            raise ArgumentTypeError(
                "params: expected the parameters, because master_weights=True; got"
                " None. Pass the parameters after the state."
            )
        require_declared(extra, self.declared)
        group.require_axes((*self.axes, *(self.shard_axes or ())))
        if self.axes:
            group.require_shared("state", state, self.axes)
            group.same("params", params, self.axes)
            group.same("", extra, self.axes)

    def add(
        self, state: AccumulationState, grads: Tree, weight: Scalar, loss: Scalar
    ) -> AccumulationState:
        """Add one micro-batch to the open window, without ever closing the window."""
        micro_batch = MicroBatch(self._align(grads, state), weight, loss)
        return window.add(state, micro_batch, None, self.options, self.shard_axes)[0]

    def _align(self, grads: Tree, state: AccumulationState) -> Gradients:
        gradients = align(grads, state.accumulator)
        structure = jax.tree.structure(state.accumulator)
        group.require_own("grads", jax.tree.unflatten(structure, gradients), self.axes)
        return gradients

    @cached_property
    def _jitted_update(self) -> Callable[..., Any]:
        return jax.jit(self._update, inline=True)

    @cached_property
    def _jitted_flush(self) -> Callable[..., Any]:
        return jax.jit(self._flush, inline=True)

    def _update(
        self,
        micro_batch: MicroBatch,
        state: AccumulationState,
        params: Params,
        extra: Extra,
        last: Scalar,
    ) -> tuple[Updates, AccumulationState]:
        steps = kit.steps_at(self.options.steps, state.optimizer_step, jnp.where)
        state, was_dropped = window.add(
            state, micro_batch, steps, self.options, self.shard_axes
        )
        is_full = ends(fields_of(state), steps, jnp.where)
        return window.close(
            state,
            self._inner_update(state, params, extra, micro_batch.gradients),
            self.options,
            at_end=is_full if last is None else is_full | last,
            event=(False, False, was_dropped),
            takes_loss=micro_batch.loss is not None,
        )

    def _flush(
        self,
        state: AccumulationState,
        params: Params,
        extra: Extra,
        denominator: Scalar,
    ) -> tuple[Updates, AccumulationState]:
        return window.close(
            state,
            self._inner_update(state, params, extra),
            self.options,
            at_end=jnp.asarray(state.micro_step) > 0,
            event=(False, False, False),
            takes_loss=extra.get("value") is None,
            denominator=denominator,
        )

    def _inner_update(
        self,
        state: AccumulationState,
        params: Params,
        extra: Extra,
        gradients: Gradients | None = None,
    ) -> Update:
        master_params = in_place_of(params, state.masters)
        return Update(
            self.inner.update,
            gradient_types(state.accumulator, master_params, gradients),
            replicated(params, self.axes),
            group.same("", extra, self.axes),
            self.axes,
            self.shard_axes,
        )


S = TypeVar("S")


def flush(
    tx: optax.GradientTransformation,
    state: S,
    params: Params = None,
    *,
    denominator: Scalar = None,
    **extra: Any,
) -> tuple[Updates, S]:
    """Close the open window, and apply an update from the micro-batches that it
    contains.

    If the window is empty, nothing changes, and both `applied` and `skipped` are False
    in `result`.

    If the losses were passed with the micro-batches, the inner optimizer gets the
    window's loss as ``value``, unless `extra` contains a ``value``.

    Args:
        tx: an optimizer from `gradaccum.wrap`; or an `optax.chain`, `optax.partition`
            or `optax.masked` that contains one such optimizer, or an
            `optax.apply_if_finite` directly around it. The states of transformations
            around, before or next to the wrapped optimizer do not change.
            Transformations after the wrapped optimizer in a chain are applied to the
            updates.
        state: the state of `tx`, or flax nnx's ``optimizer.opt_state``, as shown in the
            recipes.
        params: the parameters. They are required with master weights, or if the inner
            optimizer needs them. The updates have the dtypes of the parameters, or
            of the master weights.
        denominator: a finite scalar > 0. The sum of the gradients is divided by this
            number instead of the window's weight. This requires ``steps=None``.
        extra: arguments that are passed on to the inner optimizer.

    Returns:
        The updates, which are zeros if no update was applied, and the new state.

    Raises:
        ArgumentTypeError: `tx` is not wrapped, `extra` contains an argument that the
            inner optimizer does not declare, or `denominator` is not a number.
        ArgumentValueError: `denominator` is not a finite number > 0.
        UsageError: `denominator` is passed, but ``steps`` is not None; or a
            transformation after the wrapped optimizer in a chain is stateful.
    """

    def close(
        accumulation: Accumulation, state: Any, params: Params, extra: Extra
    ) -> tuple[Updates, Any]:
        return accumulation.flush(state, params, denominator=denominator, **extra)

    accumulation = accumulation_of(tx)
    state = plain(state)
    params = plain(params)
    if accumulation is None:
        return close_part(tx, state, params, extra, close)
    return close(accumulation, state, params, extra)


M = TypeVar("M")


def epoch(loader: Iterable[M], *, progress: bool = False) -> kit.Epoch[tuple[M, bool]]:
    """Return an iterator over the micro-batches of a loader, each paired with a bool
    that is True only for the last micro-batch.

        for batch, last in gradaccum_jax.epoch(loader):
            # step calls tx.update(grads, state, params, weight=n, last=last)
            params, state = step(params, state, batch, last)

    The loader is read one micro-batch ahead.

    Args:
        loader: an iterable over the micro-batches.
        progress: True shows a progress bar. This requires the rich package.

    Raises:
        ArgumentTypeError: `loader` is not an iterable, or `progress` is not a bool.
        ModuleNotFoundError: `progress` is true, but rich is not installed.

    Examples:
        >>> list(epoch([10, 20, 30]))
        [(10, False), (20, False), (30, True)]
    """
    batches = kit.epoch(loader, lambda: None, progress=progress)
    return kit.Epoch(loader, _one_ahead(batches))


def _one_ahead(batches: Iterator[M]) -> Iterator[tuple[M, bool]]:
    waiting_batches: list[M] = []
    for batch in batches:
        if waiting_batches:
            yield waiting_batches.pop(), False
        waiting_batches.append(batch)
    if waiting_batches:
        yield waiting_batches.pop(), True


def discard(tx: optax.GradientTransformation, state: S) -> S:
    """Discard the open window. No update is applied, the window is not counted, and the
    loss scale does not change.

    Args:
        tx: as in `flush`.
        state: as in `flush`.

    Raises:
        ArgumentTypeError: `state` does not contain exactly one state of a wrapped
            optimizer.
    """
    state = plain(state)
    return new_part(state, window.discard(the_state(state)))


def accumulation_of(tx: object) -> Accumulation | None:
    """Return the `Accumulation` of `tx`, or None if `tx` is not wrapped."""
    owner = getattr(getattr(tx, "update", None), "__self__", None)
    return owner if isinstance(owner, Accumulation) else None


def require_open(tx: optax.GradientTransformation) -> Accumulation:
    """Return the `Accumulation` of `tx`, for a function that closes the window itself.
    Such a function needs ``steps=None``, so an error is raised if `tx` was wrapped with
    another value of `steps`, or not wrapped at all.
    """
    accumulation = accumulation_of(tx)
    if accumulation is None:
        raise not_wrapped_error(tx)
    if accumulation.options.steps is not None:
        raise ArgumentValueError(
            "tx: expected an optimizer wrapped with steps=None, because this call"
            f" closes the window; got steps={accumulation.options.steps!r}. Write"
            " gradaccum.wrap(optimizer, steps=None)."
        )
    return accumulation
