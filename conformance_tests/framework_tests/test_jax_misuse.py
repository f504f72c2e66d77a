"""Calls that would give a silently wrong result: each is refused at once, by an error
of its class that says what to write.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import gradaccum
import gradaccum_jax

PARAMS = {"a": jnp.asarray([1.0, 2.0]), "b": {"c": jnp.asarray([[3.0]])}}
GRADS = jax.tree.map(lambda p: p * 0.25, PARAMS)
SGD = optax.sgd(1.0)
TYPE = gradaccum.ArgumentTypeError
USAGE = gradaccum.UsageError
GRADIENT = gradaccum.GradientError


def wrap(inner: Any = SGD, **options: Any) -> Any:
    return gradaccum.wrap(inner, **{"steps": 4, **options})


def update(tx: Any, grads: Any = GRADS, jitted: bool = False, **extra: Any) -> Any:
    function = jax.jit(tx.update) if jitted else tx.update
    return function(grads, tx.init(PARAMS), PARAMS, **extra)


def flush(tx: Any, **extra: Any) -> Any:
    return gradaccum_jax.flush(tx, tx.init(PARAMS), PARAMS, **extra)


def loss(params: Any, *batch: Any) -> Any:
    return jnp.mean(params * jax.tree.leaves(batch)[0])


def layered(tx: Any) -> Any:
    return gradaccum_jax.layered_value_and_update(loss, loss, loss, tx)


HALF = wrap(master_weights=True)
NO_ARGUMENT = "expected an argument of this call"
INNER = "optimizer: expected .*"
CASES: dict[str, Any] = {
    "gradients of other parameters": (
        lambda: update(wrap(), {**GRADS, "b": jnp.ones(1)}),
        GRADIENT,
        r"grads: expected the structure of the parameters; got .*\['b'\]",
    ),
    "gradients in another container": (
        lambda: wrap().update([jnp.ones(1)], wrap().init((jnp.ones(1),))),
        GRADIENT,
        r"grads: .*PyTreeDef\(\(\*,\)\); got .*PyTreeDef\(\[\*\]\)",
    ),
    "state of a bare optimizer": (
        lambda: wrap().update(GRADS, SGD.init(PARAMS), PARAMS),
        TYPE,
        r"state: expected the state of a wrapped.*tx\.init.*check_state",
    ),
    "master weights without parameters": (
        lambda: gradaccum_jax.flush(HALF, HALF.init(jnp.ones(1, jnp.float16))),
        TYPE,
        "params: expected the parameters, because master_weights=True",
    ),
    "traced weight of two": (
        lambda: update(wrap(), jitted=True, weight=jnp.ones(2)),
        TYPE,
        "weight: expected",
    ),
    "misspelt weight": (
        lambda: update(wrap(optax.adam(0.1)), wieght=3.0),
        TYPE,
        f"wieght: {NO_ARGUMENT}.*weight= and last= are",
    ),
    "weight of a flush": (
        lambda: flush(wrap(steps=None), weight=3.0),
        TYPE,
        f"weight: {NO_ARGUMENT}.*denominator= is",
    ),
    "function of the last micro-batch": (
        lambda: update(
            wrap(optax.lbfgs(), steps=None), value_fn=lambda p: 0.0, last=True
        ),
        USAGE,
        "value_fn: expected an argument that describes the whole window",
    ),
    "wrapped": (lambda: wrap(wrap()), TYPE, INNER),
    "wrapped in a chain": (lambda: update(wrap(optax.chain(wrap()))), TYPE, INNER),
    "optax.MultiSteps": (lambda: update(wrap(optax.MultiSteps(SGD, 2))), TYPE, INNER),
    "apply_every": (
        lambda: update(wrap(optax.chain(SGD, optax.apply_every(4)))),
        TYPE,
        "optimizer: .*not wrapped yet; got a wrapped optimizer: ApplyEvery",
    ),
    "traced steps": (
        lambda: jax.jit(lambda n: wrap(steps=n).init(PARAMS))(4),
        TYPE,
        "steps: expected",
    ),
    "flush of a bare optimizer": (
        lambda: flush(SGD),
        TYPE,
        "tx: expected a wrapped optimizer",
    ),
    "flush before a schedule": (
        lambda: flush(
            optax.chain(
                wrap(optax.scale_by_adam()), optax.scale_by_schedule(lambda count: 1.0)
            )
        ),
        USAGE,
        r"tx: expected no stateful transformation after.*changed state\[1\]\.count.*Wrap the whole",
    ),
    "window of a bare optimizer": (
        lambda: gradaccum_jax.value_and_update(loss, SGD, steps=2),
        TYPE,
        "tx: expected a wrapped optimizer",
    ),
    "outputs that are not per item": (
        lambda: gradaccum_jax.coupled_value_and_grad(
            lambda params, x: params, loss, steps=2
        )(jnp.ones(2), jnp.ones(6)),
        gradaccum.ArgumentValueError,
        "outputs_fn: .*(2,).* 3 items",
    ),
    "aux that is not per item": (
        lambda: gradaccum_jax.value_and_grad(
            lambda params, x: (params, params),
            has_aux=True,
            merge_aux="concatenate",
            steps=2,
        )(1.0, jnp.ones(4)),
        gradaccum.ArgumentValueError,
        "aux: expected the same",
    ),
    "clipped layers": (
        lambda: layered(wrap(steps=None, on_overflow="ignore", clip_norm=1.0)),
        USAGE,
        "tx: expected an optimizer that can update each layer independently; got options",
    ),
}


@pytest.mark.every_mode
@pytest.mark.parametrize("name", CASES)
def test_misuse_is_refused(name: str) -> None:
    call, kind, words = CASES[name]
    with pytest.raises(kind, match=f"^{words}"):
        call()
