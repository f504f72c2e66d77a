"""The wrapped optimizer: what `gradaccum.wrap` puts in an optax transformation's place.

All of it is pure functions of (gradients, state, parameters), traced once; nothing is decided on the host. Its work is one
compiled function, so that a loop that is not itself under `jax.jit` does not compile anew in every micro-batch; under `jit`
that function is inlined. `wrap` returns a plain `optax.GradientTransformationExtraArgs`: its two functions are methods of the
`Accumulation`, which is how `flush` and `discard` find the options again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import optax

from gradaccum import ArgumentTypeError
from gradaccum.kit import Options, ends, explain, initial_state
from gradaccum_jax import sums, window
from gradaccum_jax.alignment import align
from gradaccum_jax.checks import as_weight, require_params, require_plain, require_state
from gradaccum_jax.control_flow import ControlFlow
from gradaccum_jax.dtypes import handed, strong
from gradaccum_jax.jitted import call_jitted
from gradaccum_jax.masters import in_place_of
from gradaccum_jax.sizes import check_known, size_at
from gradaccum_jax.state import AccumulationState, fields_of, first_terms, fresh
from gradaccum_jax.trees import plain
from gradaccum_jax.update import Update
from gradaccum_jax.varying import vary_like


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
        inner_state, masters = strong(self.inner.init(params))
        require_plain(inner_state)
        fields = initial_state(self.options.scale_rule.init_scale)
        trees = {"accumulator": accumulator, "inner_state": inner_state, "masters": masters, "terms": first_terms(self.options)}
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
        stepped: tuple[Any, AccumulationState] = call_jitted(self._jitted_update, self._update, aligned, state, params, weight, extra)
        return stepped

    def flush(self, state: AccumulationState, params: Any = None, **extra: Any) -> tuple[Any, AccumulationState]:
        """Close the open window; see `gradaccum_jax.flush`."""
        self._check(state, params)
        flushed: tuple[Any, AccumulationState] = call_jitted(self._jitted_flush, self._flush, state, params, extra)
        return flushed

    def discard(self, state: AccumulationState) -> AccumulationState:
        """Forget the open window; see `gradaccum_jax.discard`."""
        return window.discard(require_state(state))

    def _check(self, state: Any, params: Any) -> None:
        require_state(state)
        if self.options.master_weights:
            require_params(params, state.masters)

    @cached_property
    def _jitted_update(self) -> Callable[..., Any]:
        return jax.jit(self._update)

    @cached_property
    def _jitted_flush(self) -> Callable[..., Any]:
        return jax.jit(self._flush)

    def _update(
        self, gradients: list[Any], state: AccumulationState, params: Any, weight: Any, extra: dict[str, Any]
    ) -> tuple[Any, AccumulationState]:
        steps = size_at(self.options.steps, state.optimizer_step)
        state, dropped = window.add(state, gradients, weight, steps, self.options)
        update, full = self._inner_update(state, params, extra, gradients), ends(fields_of(state), steps, jnp.where)
        if steps is None:
            return window.keep(state, update, self.options, never=full, dropped=dropped, weight=weight)
        return window.close(state, update, self.options, at_end=full, dropped=dropped, weight=weight)

    def _flush(self, state: AccumulationState, params: Any, extra: dict[str, Any]) -> tuple[Any, AccumulationState]:
        update = self._inner_update(state, params, extra)
        return window.close(state, update, self.options, at_end=jnp.asarray(state.micro_step) > 0)

    def _inner_update(self, state: AccumulationState, params: Any, extra: dict[str, Any], gradients: list[Any] | None = None) -> Update:
        dtypes = handed(state.accumulator, in_place_of(params, state.masters), gradients)
        return Update(self.inner.update, dtypes, params, extra, self.control_flow)


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
