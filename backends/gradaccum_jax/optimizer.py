"""The wrapped optimizer: what `gradaccum.wrap` puts in an optax transformation's place.

All of it is pure functions of (gradients, state, parameters), traced once; nothing is decided on the host. Its work is one
compiled function, so that a loop that is not itself under `jax.jit` does not compile anew in every micro-batch; under `jit`
that function is inlined. `wrap` returns a plain `optax.GradientTransformationExtraArgs`: its two functions are methods of the
`Accumulation`, which is how `flush` and `discard` find the options again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from gradaccum import ArgumentTypeError
from gradaccum.kit import Decision, Fields, Options, State, accumulate, close, contribution, decide, divisor, ends, explain, initial_state
from gradaccum.kit import discard as forget
from gradaccum_jax import sums, terms
from gradaccum_jax.agreement import agree, require_equal_parts
from gradaccum_jax.alignment import align
from gradaccum_jax.checks import as_weight, require_params, require_plain, require_state
from gradaccum_jax.compiled import call
from gradaccum_jax.control_flow import ControlFlow, once
from gradaccum_jax.dtypes import Handed, handed
from gradaccum_jax.masters import in_place_of
from gradaccum_jax.norm import measure
from gradaccum_jax.representable import representable
from gradaccum_jax.sizes import check_known, size_at
from gradaccum_jax.state import AccumulationState, fields_of, fresh, with_event, with_fields
from gradaccum_jax.update import Inner, Kinds, end_window, keep_window
from gradaccum_jax.variables import plain
from gradaccum_jax.varying import axes_of, vary, vary_like


@dataclass(frozen=True, eq=False)
class Accumulation:
    """An inner optimizer and the validated options; `init` and `update` are those of the transformation."""

    inner: optax.GradientTransformationExtraArgs
    """Its state is a pair: the wrapped optimizer's own, and the masters; see `masters.on_masters`."""
    options: Options
    control_flow: ControlFlow

    def init(self, params: Any) -> AccumulationState:
        """The state before the first micro-batch; one accumulator, in the structure of `params`.

        Raises:
            ArgumentTypeError: the inner optimizer accumulates too.
            ArgumentValueError: ``accumulate_dtype`` is one that JAX has switched off.
        """
        accumulator = sums.zeros(params, self.options.accumulate_dtype)
        inner_state, masters = sums.strong(self.inner.init(params))
        require_plain(inner_state)
        fields = initial_state(self.options.scale_rule.init_scale)
        trees = {"accumulator": accumulator, "inner_state": inner_state, "masters": masters, "terms": terms.first_terms(self.options)}
        return vary_like(params, fresh(fields, sums.weight_dtype(accumulator), **trees))

    def update(
        self, grads: Any, state: AccumulationState, params: Any = None, *, weight: Any = None, **extra: Any
    ) -> tuple[Any, AccumulationState]:
        """Take one micro-batch; at the end of the window the inner optimizer's updates, zeros before it.

        Args:
            grads: a tree like the parameters', times the loss scale. None: the parameter took no part.
            state: what `init` or the last call returned.
            params: the parameters, if the inner optimizer wants them, and with master weights.
            weight: the micro-batch's weight, a real scalar >= 0; 1 if left out. At 0 its gradient adds exactly nothing.
            extra: passed on to the inner optimizer.

        Raises:
            GradientError: `grads` has another structure, shape or dtype; names the leaf.
            ArgumentTypeError, ArgumentValueError: `state` is not this optimizer's, `weight` not such a scalar, or `params` missing.
            ArgumentTypeError, ArgumentValueError: a callable ``steps`` gave no int >= 1, outside `jax.jit`. Under it, where no value is
                known, each micro-batch of such a window counts as not finite: no update is made, and `result` says ``overflow``.
            UsageError: the inner optimizer reduces over a named axis, and there is a weight or an option that each device would see to by
                itself: `clip_norm`, `skip_norm`, ``on_overflow="drop_micro_batch"``.
        """
        self._check(state, params)
        check_known(self.options.steps, state.optimizer_step)
        aligned = align(grads, state.accumulator, any_float=self.options.accumulate_dtype is not None)
        weight = as_weight(weight, jnp.result_type(state.weight))
        stepped: tuple[Any, AccumulationState] = call(self._compiled_update, self._update, aligned, state, params, weight, extra)
        return stepped

    def flush(self, state: AccumulationState, params: Any = None, **extra: Any) -> tuple[Any, AccumulationState]:
        """Close the open window; see `gradaccum_jax.flush`."""
        self._check(state, params)
        flushed: tuple[Any, AccumulationState] = call(self._compiled_flush, self._flush, state, params, extra)
        return flushed

    def discard(self, state: AccumulationState) -> AccumulationState:
        """Forget the open window; see `gradaccum_jax.discard`."""
        emptied = with_fields(require_state(state), forget(fields_of(state)))
        return with_event(emptied._replace(accumulator=sums.clear(state.accumulator)), False, False, False)

    def _check(self, state: Any, params: Any) -> None:
        require_state(state)
        if self.options.master_weights:
            require_params(params, state.masters)

    @cached_property
    def _compiled_update(self) -> Callable[..., Any]:
        return jax.jit(self._update)

    @cached_property
    def _compiled_flush(self) -> Callable[..., Any]:
        return jax.jit(self._flush)

    def _update(
        self, gradients: list[Any], state: AccumulationState, params: Any, weight: Any, extra: dict[str, Any]
    ) -> tuple[Any, AccumulationState]:
        steps = size_at(self.options.steps, state.optimizer_step)
        state, dropped = self._accumulate(gradients, state, weight, steps)
        dtypes = self._dtypes(state, params, gradients)
        inner = self._inner(dtypes, params, extra)
        if steps is None:
            kinds = self._kinds(inner(jnp.ones_like(state.weight)), state, weight)
            never = jnp.asarray(state.micro_step) < 0
            updates, total = keep_window(state.accumulator, kinds.updates, never, self.control_flow)
            return updates, with_event(state._replace(accumulator=total), False, False, dropped)
        full = ends(fields_of(state), steps, jnp.where)
        return self._end(state, inner, dtypes, full, dropped, weight)

    def _flush(self, state: AccumulationState, params: Any, extra: dict[str, Any]) -> tuple[Any, AccumulationState]:
        dtypes = self._dtypes(state, params, None)
        return self._end(state, self._inner(dtypes, params, extra), dtypes, jnp.asarray(state.micro_step) > 0, False)

    def _accumulate(self, gradients: list[Any], state: AccumulationState, weight: Any, steps: Any) -> tuple[AccumulationState, Any]:
        """The state with the micro-batch in it, and whether it was left out as not finite, or as one of a window of no size."""
        given, one = weight is not None, jnp.ones_like(state.weight)
        weight = weight if given else one
        factor = contribution(weight, self.options) if given and self.options.reduction == "mean" else None
        dropping = self.options.on_overflow == "drop_micro_batch"
        finite = sums.all_finite(gradients) | (weight == 0) if dropping else jnp.asarray(True)
        finite = finite & (steps >= 1) if callable(self.options.steps) else finite
        clean = fields_of(state._replace(overflow=jnp.zeros_like(state.overflow)))
        dropped = State(*accumulate(clean, weight, finite, jnp.where)).overflow if dropping else False
        # Always true without a weight: XLA on the CPU makes a lone addition in place a loop of single elements, a select one of vectors.
        kept = (weight > 0 if given else jnp.asarray(state.micro_step) >= 0) & (~dropped if dropping else True)
        total = sums.add(state.accumulator, gradients, factor, kept, (weight >= 0) & (~dropped if dropping else True))
        counted = with_fields(state, accumulate(fields_of(state), weight, finite, jnp.where))
        return counted._replace(accumulator=total, terms=vary(terms.now(self.options, steps), axes_of(state.terms))), dropped

    def _dtypes(self, state: AccumulationState, params: Any, gradients: list[Any] | None) -> Handed:
        """Those of the inner optimizer's gradients."""
        return handed(state.accumulator, in_place_of(params, state.masters), gradients)

    def _inner(self, dtypes: Handed, params: Any, extra: dict[str, Any]) -> Callable[[Any], Inner]:
        def of(divisor: Any) -> Inner:
            gradients = partial(sums.divide, divisor=divisor, dtypes=dtypes.given)
            return Inner(self.inner.update, gradients, dtypes.like, params, extra, self.control_flow)

        return of

    def _end(
        self, state: AccumulationState, inner: Callable[[Any], Inner], dtypes: Handed, last: Any, dropped: Any, weight: Any = None
    ) -> tuple[Any, AccumulationState]:
        """Close the window where `last` holds."""
        decision = self._decide(state, dtypes, last)
        made, held = inner(decision.divisor), (state.inner_state, state.masters)
        kinds = self._kinds(made, state, weight)
        apply, overflow = agree(last & decision.apply, decision.overflow, last, kinds.axes, self.control_flow)
        updates, total, (inner_state, masters) = end_window(made, state.accumulator, held, kinds.updates, apply=apply, last=last)
        fields = _choose(last, close(fields_of(state), apply, overflow, self.options, jnp.where), fields_of(state))
        norm = jnp.where(last, decision.grad_norm, state.last_grad_norm).astype(jnp.result_type(state.last_grad_norm))
        ended = with_fields(state, fields)._replace(accumulator=total, inner_state=inner_state, masters=masters, last_grad_norm=norm)
        return updates, with_event(ended, apply, last & ~apply, jnp.where(last, overflow, dropped))

    def _kinds(self, inner: Inner, state: AccumulationState, weight: Any) -> Kinds:
        kinds = inner.kinds(state.accumulator, (state.inner_state, state.masters))
        require_equal_parts(self.options, kinds.axes, weight)
        return kinds

    def _decide(self, state: AccumulationState, dtypes: Handed, last: Any) -> Decision:
        """Measured only where the window ends."""
        start = (jnp.zeros_like(state.weight), jnp.asarray(True))
        largest = float(jnp.finfo(start[0].dtype).max)
        divides = divisor(fields_of(state), self.options, jnp.where)

        def look(_: tuple[Any, Any]) -> tuple[Any, Any]:
            norm, finite = measure(state.accumulator, start[0].dtype, self.control_flow)
            return norm, finite & representable(state.accumulator, divides, dtypes.like)

        norm, finite = once(last, look, start, self.control_flow)
        return Decision(*decide(fields_of(state), norm, finite, self.options, jnp.where, largest))


def _choose(condition: Any, a: Fields, b: Fields) -> Fields:
    return tuple(jnp.where(condition, new, old) for new, old in zip(a, b, strict=True))


def flush(tx: Any, state: AccumulationState, params: Any = None, **extra: Any) -> tuple[Any, AccumulationState]:
    """Close the open window: the update that its micro-batches amount to, divided by what it holds.

    An empty window changes nothing; its `result` has ``applied`` and ``skipped`` False. Where `tx` stands inside an
    `optax.chain`, wrap the whole chain instead, which flushes as one; or else flush its own part and pass the updates through what
    follows it in the chain:

        updates, states[i] = gradaccum_jax.flush(tx, states[i], params)
        updates, states[i + 1] = following.update(updates, states[i + 1], params)

    Args:
        tx: what `gradaccum.wrap` returned.
        state: its state; flax nnx's ``optimizer.opt_state`` too, as in the recipes.
        params: the parameters, if the inner optimizer wants them, and with master weights. They say the dtype of half-precision updates:
            nobody knows here whether the gradients were float32, so give a float32 copy to get float32 updates of those.
        extra: passed on to the inner optimizer.

    Returns:
        The updates, zeros if none was made, and the new state.

    Raises:
        ArgumentTypeError: `tx` is not wrapped, `state` is not its state, or `params` are missing.
    """
    return require_accumulation(tx).flush(plain(state), plain(params), **extra)


def discard(tx: Any, state: AccumulationState) -> AccumulationState:
    """Forget the open window: no update, nothing counted, the loss scale untouched.

    Raises:
        ArgumentTypeError: `tx` is not wrapped, or `state` is not its state.
    """
    return require_accumulation(tx).discard(plain(state))


def require_accumulation(tx: Any) -> Accumulation:
    """The accumulation behind `tx`.

    Raises:
        ArgumentTypeError: `tx` is not wrapped.
    """
    owner = getattr(getattr(tx, "update", None), "__self__", None)
    if isinstance(owner, Accumulation):
        return owner
    fix = "Pass what gradaccum.wrap returned; of an optax.chain that holds it, pass it and its own part of the chain's state."
    raise explain(ArgumentTypeError, "tx", expected="a wrapped optimizer", found=f"a {type(tx).__name__} that is not wrapped", fix=fix)
