"""The wrapped optimizer that `gradaccum.wrap` returns for an optax transformation, with
`flush` and `discard`.

A loop outside `jax.jit` compiles once. `wrap` returns a plain
`optax.GradientTransformationExtraArgs`, whose two functions are methods of an
`Accumulation`, where `flush` and `discard` find the options.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import optax

from gradaccum import ArgumentTypeError, ArgumentValueError, kit
from gradaccum.kit import (
    Options,
    Scalar,
    ends,
    explain,
    given_weight,
    initial_state,
    optimizer_error,
    use_of_weights,
    wrapped_twice_error,
)
from gradaccum_jax import checks, statistics, sums
from gradaccum_jax.arrays import (
    Extra,
    Gradients,
    InnerState,
    Params,
    Tree,
    Updates,
    handed,
    plain,
    strong,
)
from gradaccum_jax.checks import (
    align,
    as_loss,
    as_weight,
    require_arrays,
    require_params,
    require_plain,
    require_state,
)
from gradaccum_jax.control_flow import call_jitted
from gradaccum_jax.parameters import in_place_of
from gradaccum_jax.sharding import ShardAxes, replicated, require_ordinary, vary_like
from gradaccum_jax.update import (
    ANY,
    Takes,
    Update,
    require_none_of_a_batch,
    require_taken,
)
from gradaccum_jax.window import window
from gradaccum_jax.window.state import (
    AccumulationState,
    fields_of,
    first_terms,
    fresh,
)
from gradaccum_jax.window.window import MicroBatch, check_known, size_at
from gradaccum_jax.workers import group


@dataclass(frozen=True, eq=False)
class Accumulation:
    """An inner optimizer and the checked options."""

    inner: optax.GradientTransformationExtraArgs
    """The wrapped optimizer under `parameters.on_masters` or
    `parameters.without_masters`.
    """
    options: Options
    axes: tuple[str, ...] = ()
    """The mesh axes whose devices share the window."""
    shard_axes: ShardAxes = None
    takes: Takes = ANY

    def init(self, params: Params) -> AccumulationState:
        """Return the state before the first micro-batch, with one accumulator in the
        structure of `params`.
        """
        require_arrays(params, "params")
        require_ordinary(params)
        group.require_axes(self.axes)
        group.require_told(params, frozenset(self.axes), self.shard_axes, self.options)
        group.require_same_params(params, self.axes)
        accumulator = sums.zeros(params, self.options.accumulate_dtype)
        inner_state, masters = self._inner_state(params)
        require_plain(inner_state)
        fields = initial_state(self.options.scale_rule.init_scale)
        dtype = sums.weight_dtype(accumulator)
        trees = {
            "accumulator": accumulator,
            "inner_state": inner_state,
            "masters": masters,
            "terms": first_terms(self.options),
        }
        known = statistics.fresh(dtype)
        state = vary_like(
            params,
            fresh(fields, dtype, **trees, **known),
            frozenset(self.shard_axes or ()),
        )
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
        """Take in one micro-batch; return the inner optimizer's updates at the end of
        the window, zeros before it.

        If `last` is True, the window ends with this micro-batch.
        """
        self.check(state, params, extra)
        given_weight(weight, use_of_weights(self.options))
        if self.options.steps != 1 and (
            self.options.steps is not None or last is not None
        ):
            require_none_of_a_batch(extra)
        check_known(self.options.steps, state.optimizer_step)
        aligned = align(
            grads,
            state.accumulator,
            any_float=self.options.accumulate_dtype is not None,
        )
        group.require_own(aligned, state.accumulator, self.axes)
        dtype = jnp.result_type(state.weight)
        micro_batch = MicroBatch(
            aligned, as_weight(weight, dtype), as_loss(value, dtype)
        )
        group.require_own_loss(micro_batch.loss, state, self.axes)
        ends_here = (
            group.same(
                "last",
                checks.as_last(last),
                self.axes,
                "Write jax.lax.pmax(last, axis_name).",
            )
            if last is not None
            else None
        )
        stepped: tuple[Updates, AccumulationState] = call_jitted(
            self._jitted_update,
            self._update,
            micro_batch,
            state,
            params,
            extra,
            ends_here,
        )
        return stepped

    def flush(
        self,
        state: AccumulationState,
        params: Params = None,
        *,
        denominator: Scalar = None,
        **extra: Any,
    ) -> tuple[Updates, AccumulationState]:
        self.check(state, params, extra)
        divides = checks.as_denominator(
            denominator, self.options, jnp.result_type(state.weight)
        )
        divides = group.same(
            "denominator",
            divides,
            self.axes,
            "Write jax.lax.psum(denominator, axis_name).",
        )
        flushed: tuple[Updates, AccumulationState] = call_jitted(
            self._jitted_flush, self._flush, state, params, extra, divides
        )
        return flushed

    def discard(self, state: AccumulationState) -> AccumulationState:
        group.require_axes(self.axes)
        return window.discard(require_state(state))

    def check(self, state: object, params: Params, extra: Extra) -> None:
        held = require_state(state)
        require_ordinary(params)
        require_taken(extra, self.takes)
        group.require_in_scope(self.shard_axes)
        if self.axes:
            group.require_axes(self.axes)
            group.require_shared(held, self.axes)
            group.require_same_params(params, self.axes)
            group.same_extra(extra, self.axes)
        if self.options.master_weights:
            require_params(params, held.masters)

    def add(
        self, state: AccumulationState, grads: Tree, weight: Scalar, loss: Scalar
    ) -> AccumulationState:
        """Add one micro-batch to a window that the caller closes."""
        aligned = align(
            grads,
            state.accumulator,
            any_float=self.options.accumulate_dtype is not None,
        )
        group.require_own(aligned, state.accumulator, self.axes)
        return window.add(
            state,
            MicroBatch(aligned, weight, loss),
            None,
            self.options,
            self.shard_axes,
        )[0]

    def _inner_state(self, params: Params) -> InnerState:
        held = strong(self.inner.init(params))
        return group.like_params(self.inner, held, params) if self.shard_axes else held

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
        ends_here: Scalar,
    ) -> tuple[Updates, AccumulationState]:
        steps = size_at(self.options.steps, state.optimizer_step)
        state, dropped = window.add(
            state, micro_batch, steps, self.options, self.shard_axes
        )
        update, full = (
            self._inner_update(state, params, extra, micro_batch.gradients),
            ends(fields_of(state), steps, jnp.where),
        )
        event, tells = (False, False, dropped), micro_batch.loss is not None
        if steps is None and ends_here is None:
            return window.keep(
                state, update, self.options, never=full, event=event, tells=tells
            )
        at_end = full if ends_here is None else full | ends_here
        return window.close(
            state, update, self.options, at_end=at_end, event=event, tells=tells
        )

    def _flush(
        self,
        state: AccumulationState,
        params: Params,
        extra: Extra,
        denominator: Scalar,
    ) -> tuple[Updates, AccumulationState]:
        update, is_open = (
            self._inner_update(state, params, extra),
            jnp.asarray(state.micro_step) > 0,
        )
        told = {
            "event": (False, False, False),
            "tells": extra.get("value") is None,
            "denominator": denominator,
        }
        return window.close(state, update, self.options, at_end=is_open, **told)

    def _inner_update(
        self,
        state: AccumulationState,
        params: Params,
        extra: Extra,
        gradients: Gradients | None = None,
    ) -> Update:
        dtypes = handed(
            state.accumulator, in_place_of(params, state.masters), gradients
        )
        held = replicated(params, self.axes)
        return Update(
            self.inner.update,
            dtypes,
            held,
            group.same_extra(extra, self.axes),
            self.axes,
            self.shard_axes,
        )


def flush(
    tx: optax.GradientTransformation,
    state: AccumulationState,
    params: Params = None,
    *,
    denominator: Scalar = None,
    **extra: Any,
) -> tuple[Updates, AccumulationState]:
    """Close the open window: make the update of the micro-batches that it holds.

    An empty window changes nothing: then `result` says neither applied nor skipped. If
    `tx` stands inside an `optax.chain`, wrap the whole chain instead; or flush its part
    and pass the updates through the rest of the chain:

        updates, states[i] = gradaccum_jax.flush(tx, states[i], params)
        updates, states[i + 1] = following.update(updates, states[i + 1], params)

    The inner optimizer gets the window's loss as ``value`` if the micro-batches passed
    theirs, unless `extra` has one.

    Args:
        tx: from `gradaccum.wrap`.
        state: its state; flax nnx's ``optimizer.opt_state`` too, as in the recipes.
        params: the parameters, if the inner optimizer wants them, and with master
            weights. The updates have their dtypes.
        denominator: with ``steps=None``, what the sum is divided by in place of its
            weight: a finite scalar > 0.
        extra: passed on to the inner optimizer.

    Returns:
        The updates, zeros if none was made, and the new state.

    Raises:
        ArgumentTypeError: `tx` is not wrapped, `state` is not its state, `params` are
            missing, or nobody takes an `extra` of that name.
        ArgumentValueError: `denominator` is no finite number > 0, or stands beside
            ``steps``.
    """
    return require_accumulation(tx).flush(
        plain(state), plain(params), denominator=denominator, **extra
    )


M = TypeVar("M")


def epoch(loader: Iterable[M], *, progress: bool = False) -> kit.Epoch[tuple[M, bool]]:
    """Return an iterator over the micro-batches of a loader, each beside whether it is
    the last one.

        for batch, last in gradaccum_jax.epoch(loader):
            # step calls tx.update(grads, state, params, weight=n, last=last)
            params, state = step(params, state, batch, last)

    The loader is read one micro-batch ahead.

    Args:
        loader: yields the micro-batches.
        progress: show a progress bar with rich.

    Raises:
        ArgumentTypeError: `loader` is no iterable, or `progress` no bool.
        MissingPackageError: `progress` without rich.

    Examples:
        >>> list(epoch([10, 20, 30]))
        [(10, False), (20, False), (30, True)]
    """
    batches = kit.epoch(loader, lambda: None, progress=progress)
    return kit.Epoch(loader, _one_ahead(batches))


def _one_ahead(batches: Iterator[M]) -> Iterator[tuple[M, bool]]:
    held: list[M] = []
    for batch in batches:
        if held:
            yield held.pop(), False
        held.append(batch)
    if held:
        yield held.pop(), True


def discard(
    tx: optax.GradientTransformation, state: AccumulationState
) -> AccumulationState:
    """Forget the open window: no update, nothing counted, the loss scale untouched.

    Raises:
        ArgumentTypeError: `tx` is not wrapped, or `state` is not its state.
    """
    return require_accumulation(tx).discard(plain(state))


def require_accumulation(tx: object) -> Accumulation:
    owner = getattr(getattr(tx, "update", None), "__self__", None)
    if isinstance(owner, Accumulation):
        return owner
    fix = (
        "Pass what gradaccum.wrap returned; of an optax.chain that holds it, pass it"
        " and its own part of the chain's state."
    )
    raise explain(
        ArgumentTypeError,
        "tx",
        expected="a wrapped optimizer",
        found=f"a {type(tx).__name__} that is not wrapped",
        fix=fix,
    )


def require_open(tx: optax.GradientTransformation) -> Accumulation:
    """Raise unless `tx` is wrapped with ``steps=None``: the call closes its window."""
    accumulation = require_accumulation(tx)
    if accumulation.options.steps is not None:
        expected, fix = (
            "one wrapped with steps=None, as this call closes the window",
            "Write gradaccum.wrap(optimizer, steps=None).",
        )
        raise explain(
            ArgumentValueError,
            "tx",
            expected=expected,
            found=f"steps={accumulation.options.steps!r}",
            fix=fix,
        )
    return accumulation


def require_transformation(optimizer: object) -> optax.GradientTransformation:
    if not isinstance(optimizer, optax.GradientTransformation):
        fix = (
            "Pass for example optax.adamw(1e-3); instead of an optax.MultiSteps, pass"
            " the optimizer inside it."
        )
        raise optimizer_error("an optax.GradientTransformation", optimizer, fix)
    owner = getattr(optimizer.update, "__self__", None)
    # MultiSteps.gradient_transformation(), optax's too
    if isinstance(owner, Accumulation) or hasattr(owner, "has_updated"):
        raise wrapped_twice_error(owner)
    return optimizer
