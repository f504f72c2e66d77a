"""The calls that take the large batch, as the conformance suite makes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gradaccum
from gradaccum_conformance import (
    TEMPERATURE,
    Arrays,
    Batch,
    Dtype,
    LargeBatchCall,
    LargeBatchHarness,
    Loss,
    Model,
    Option,
    Outcome,
    Returns,
    Session,
    VerifyCall,
    VerifyingHarness,
    mirrored,
)
from gradaccum_harnesses.jax.models import forward, total_loss
from gradaccum_harnesses.jax.program import Program, x64
from gradaccum_harnesses.jax.session import JaxSession, to_numpy
from gradaccum_harnesses.jax.workers import JaxWorkers
from gradaccum_jax import coupled_value_and_grad, value_and_grad, value_and_update


class JaxLargeBatch(JaxWorkers, VerifyingHarness, LargeBatchHarness):
    """The harness, with the calls that split a batch."""

    large_batch_modes = ("jit", "eager")

    def value_and_grad(self, call: LargeBatchCall, batch: Batch) -> Outcome:
        loss_fn = _loss_fn(call.model, call.loss, call.returns)
        with x64(call.dtype == "float64"):
            take = _in_mode(value_and_grad(loss_fn, **call.options), call.mode)
            value, gradient = take(
                _params(call.weights, call.dtype),
                *_arrays(batch, call.dtype),
                *_extra(call),
            )
            loss, aux = value if call.options.get("has_aux") else (value, {})
            return Outcome(float(loss), to_numpy(gradient), to_numpy(aux))

    def update(
        self,
        session: Session,
        batch: Batch,
        *,
        loss: Loss = "mean",
        options: Mapping[str, Option],
        returns: Returns | None = None,
    ) -> float:
        assert isinstance(session, JaxSession)
        with x64(session.wide):
            hashable = {
                name: tuple(value.tolist()) if isinstance(value, np.ndarray) else value
                for name, value in options.items()
            }
            take = _whole_window(
                session.program, loss, tuple(hashable.items()), returns
            )
            value, updates, state = take(
                session.params, session.opt_state, *_arrays(batch, str(session.dtype))
            )
            session.params = optax.apply_updates(session.params, updates)
            session.opt_state = state
            return float(value)

    def verify(
        self, model: Model, weights: Arrays, call: VerifyCall
    ) -> gradaccum.VerificationReport:
        def loss_fn(params: Any, *batch: Any) -> Any:
            return call.loss(forward(model, params, batch[0]), params, *batch)

        with x64(call.dtype == "float64"):
            dtype = getattr(jnp, call.dtype)
            batch = tuple(
                jnp.asarray(each, dtype if each.dtype.kind == "f" else None)
                for each in call.batch
            )
            return gradaccum.verify(
                _params(weights, call.dtype), loss_fn, batch, **call.options
            )

    def coupled(self, call: LargeBatchCall, batch: Batch) -> Outcome:
        def outputs_fn(params: Any, left: Any, right: Any, *_: Any) -> Any:
            return {
                "left": forward(call.model, params, left),
                "right": forward(call.model, params, right),
            }

        def loss_fn(params: Any, outputs: Any) -> Any:
            """The suite's `contrast`."""
            left = outputs["left"]
            scores = jnp.exp(params["temperature"]) * left @ outputs["right"].T
            losses = optax.softmax_cross_entropy_with_integer_labels(
                scores, jnp.arange(len(left))
            )
            loss = jnp.mean(losses)
            return loss if call.returns is None else call.returns(loss, left)

        with x64(call.dtype == "float64"):
            dtype = getattr(jnp, call.dtype)
            params = _params(
                {**call.weights, "temperature": np.asarray(TEMPERATURE)}, call.dtype
            )
            take = _in_mode(
                coupled_value_and_grad(outputs_fn, loss_fn, **call.options), call.mode
            )
            loss, gradient = take(
                params,
                *(jnp.asarray(x, dtype) for x in (batch.x, mirrored(batch.x))),
                *_extra(call),
            )
            return Outcome(float(loss), to_numpy(gradient), {})


@cache
def _whole_window(
    program: Program,
    loss: Loss,
    options: tuple[tuple[str, Option], ...],
    returns: Returns | None,
) -> Callable[..., Any]:
    loss_fn = _loss_fn(program.model, loss, returns)
    return _in_mode(
        value_and_update(loss_fn, program.tx, **dict(options)), program.mode
    )


def _loss_fn(model: Model, loss: Loss, returns: Returns | None) -> Callable[..., Any]:
    def loss_fn(params: Any, x: Any, y: Any, *_: Any) -> Any:
        value = total_loss(model, params, x, y, loss)
        return value if returns is None else returns(value, forward(model, params, x))

    return loss_fn


def _in_mode(function: Callable[..., Any], mode: str | None) -> Callable[..., Any]:
    return function if mode == "eager" else jax.jit(function)


def _params(weights: Arrays, dtype: Dtype) -> dict[str, Any]:
    return {
        name: jnp.asarray(array, getattr(jnp, dtype)) for name, array in weights.items()
    }


def _extra(call: LargeBatchCall) -> list[Any]:
    return [] if call.extra is None else [call.extra]


def _arrays(batch: Batch, dtype: str) -> tuple[Any, Any]:
    return jnp.asarray(batch.x, getattr(jnp, dtype)), jnp.asarray(batch.y, jnp.int32)


harness = JaxLargeBatch()
