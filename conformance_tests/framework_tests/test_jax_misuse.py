"""Calls that would give a silently wrong result: each is refused at once, by an error
of its class that says what to write.
"""

from __future__ import annotations

from collections.abc import Callable
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
TYPE, VALUE = gradaccum.ArgumentTypeError, gradaccum.ArgumentValueError
USAGE, GRADIENT = gradaccum.UsageError, gradaccum.GradientError


def wrap(inner: Any = SGD, **options: Any) -> Any:
    return gradaccum.wrap(inner, **{"steps": 4, **options})


def multi(inner: Any = SGD, every: Any = 2, **options: Any) -> Any:
    return gradaccum_jax.MultiSteps(inner, every, **options)


def update(
    tx: Any,
    grads: Any = GRADS,
    params: Any = PARAMS,
    jitted: bool = False,
    **extra: Any,
) -> Any:
    function = jax.jit(tx.update) if jitted else tx.update
    return function(grads, tx.init(params), params, **extra)


def flush(tx: Any, params: Any = PARAMS, given: Any = PARAMS, **extra: Any) -> Any:
    return gradaccum_jax.flush(tx, tx.init(params), given, **extra)


CLOSED = optax.GradientTransformation(lambda params: (), lambda g, s, p=None: (g, s))
NO_ARGUMENT = "expected an argument of this call"
INNER = "optimizer: expected .*"
CASES: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    # gradients
    "complex gradient": (
        lambda: update(wrap(), {**GRADS, "a": jnp.ones(2, jnp.complex64)}),
        GRADIENT,
        r"grads\['a'\]: .*complex64",
    ),
    # weights
    "traced weight of two": (
        lambda: update(wrap(), jitted=True, weight=jnp.ones(2)),
        TYPE,
        "weight: expected",
    ),
    # arguments that nobody takes; a chain would take and ignore them
    "misspelt weight": (
        lambda: update(wrap(optax.adam(0.1)), wieght=3.0),
        TYPE,
        f"wieght: {NO_ARGUMENT}.*weight= and last= belong",
    ),
    "weight of another library": (
        lambda: update(wrap(optax.adamw(0.1)), num_tokens=3.0),
        TYPE,
        f"num_tokens: {NO_ARGUMENT}",
    ),
    "argument beside a closed optimizer": (
        lambda: update(wrap(CLOSED), momentum=3.0),
        TYPE,
        f"momentum: {NO_ARGUMENT}",
    ),
    "weight of a flush": (
        lambda: flush(wrap(steps=None), weight=3.0),
        TYPE,
        f"weight: {NO_ARGUMENT}.*denominator= to",
    ),
    "function of the last micro-batch": (
        lambda: update(
            wrap(optax.lbfgs(), steps=None), value_fn=lambda p: 0.0, last=True
        ),
        USAGE,
        "value_fn: expected nothing in a window of several micro-batches",
    ),
    # windows of windows
    "wrapped": (lambda: wrap(wrap()), TYPE, INNER),
    "wrapped in a chain": (
        lambda: wrap(optax.chain(wrap())).init(PARAMS),
        TYPE,
        INNER,
    ),
    "optax.MultiSteps": (lambda: wrap(optax.MultiSteps(SGD, 2)), TYPE, INNER),
    "wrapped in MultiSteps": (
        lambda: multi(optax.chain(wrap())).init(PARAMS),
        TYPE,
        INNER,
    ),
    "apply_every": (
        lambda: wrap(optax.chain(optax.adam(0.1), optax.apply_every(4))).init(PARAMS),
        TYPE,
        "optimizer: .*not wrapped; got a wrapped one: ApplyEvery",
    ),
    # options
    "traced steps": (
        lambda: jax.jit(lambda n: wrap(steps=n).init(PARAMS))(4),
        TYPE,
        "steps: expected",
    ),
    "traced clip_norm": (
        lambda: jax.jit(lambda n: wrap(clip_norm=n).init(PARAMS))(1.0),
        TYPE,
        "clip_norm: expected",
    ),
    "MultiSteps whose second size is 0": (
        lambda: multi(every=lambda step: 1 - step).update(
            GRADS, update(multi(every=lambda step: 1 - step))[1], PARAMS
        ),
        VALUE,
        r"steps\(1\): expected an int >= 1; got Array\(0,",
    ),
    # states
    "flush of a bare optimizer": (
        lambda: gradaccum_jax.flush(SGD, wrap().init(PARAMS)),
        TYPE,
        "tx: expected",
    ),
    "result of nothing": (lambda: gradaccum_jax.result(()), TYPE, "state: expected .*"),
}


@pytest.mark.every_mode
@pytest.mark.parametrize("name", CASES)
def test_misuse_is_refused(name: str) -> None:
    call, kind, words = CASES[name]
    with pytest.raises(kind, match=f"^{words}"):
        call()


def test_refused_argument_leaves_the_window_open() -> None:
    tx = wrap(optax.adam(0.1), steps=2)
    _, state = update(tx)
    with pytest.raises(TYPE, match=r"^wieght: expected"):
        tx.update(GRADS, state, PARAMS, wieght=3.0)
    assert tx.update(GRADS, state, PARAMS, weight=3.0)[1].optimizer_step == 1


def test_axis_is_refused_by_a_jax_whose_types_do_not_know_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gradaccum_jax.workers.group.KNOWS_AXES", False)
    for call in (
        lambda: wrap(axis_name="data"),
        lambda: gradaccum_jax.value_and_grad(jnp.dot, steps=2, axis_name="data"),
        lambda: gradaccum_jax.data_parallel(
            wrap().init, jax.make_mesh((1,), ("data",)), "data"
        ),
    ):
        with pytest.raises(USAGE, match=f"jax.shard_map.*{jax.__version__}"):
            call()
