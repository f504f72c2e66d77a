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
HALVES = jax.tree.map(lambda p: p.astype(jnp.bfloat16), PARAMS)
SGD = optax.sgd(1.0)
TYPE, VALUE = gradaccum.ArgumentTypeError, gradaccum.ArgumentValueError
USAGE, GRADIENT = gradaccum.UsageError, gradaccum.GradientError
FLOAT8 = jnp.ones(2, jnp.float8_e4m3fn)


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


def reducing(gradients: Any, state: Any, params: Any = None) -> Any:
    return jax.lax.pmean(gradients, "members"), state


CLOSED = optax.GradientTransformation(lambda params: (), lambda g, s, p=None: (g, s))
REDUCING = optax.GradientTransformation(lambda params: (), reducing)


def members(tx: Any) -> Any:
    given = jnp.ones((3, 2))
    return jax.vmap(tx.update, axis_name="members")(
        given, jax.vmap(tx.init)(given), given
    )


def floats_later(step: Any) -> Any:
    """Sizes that are right where they are concrete."""
    return 2.0 * step if isinstance(step, jax.core.Tracer) else 2


LAST = r"last: expected True or False.*Write last=True or last=False"
LOSS, HELD = "value: expected .*a real scalar", "state: expected .*"
INNER = "optimizer: expected .*"
CASES: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    # gradients
    "complex gradient": (
        lambda: update(wrap(), {**GRADS, "a": jnp.ones(2, jnp.complex64)}),
        GRADIENT,
        r"grads\['a'\]: .*complex64",
    ),
    "gradient of a count": (
        lambda: update(wrap(), {"n": jnp.asarray(0)}, {"n": jnp.asarray(3)}),
        GRADIENT,
        r"grads\['n'\]: .*takes no part.*Give None or float0",
    ),
    "float8 parameters": (
        lambda: wrap().init(FLOAT8),
        TYPE,
        "params: expected parameters of 16 bits or more; got dtype float8_e4m3fn",
    ),
    "float8 gradient": (
        lambda: update(wrap(), FLOAT8, jnp.ones(2)),
        GRADIENT,
        "grads: .*one of dtype float8_e4m3fn",
    ),
    # weights, losses and flags
    "traced weight of two": (
        lambda: update(wrap(), jitted=True, weight=jnp.ones(2)),
        TYPE,
        "weight: expected",
    ),
    "traced flag for a weight": (
        lambda: update(wrap(), jitted=True, weight=jnp.asarray(True)),
        TYPE,
        "weight: expected",
    ),
    "two losses": (lambda: update(wrap(), value=jnp.ones(2)), TYPE, LOSS),
    "flag for a loss": (lambda: update(wrap(), value=True), TYPE, LOSS),
    "number for last": (lambda: update(wrap(), last=1), TYPE, LAST),
    # arguments that nobody takes; a chain would take and ignore them
    "misspelt weight": (
        lambda: update(wrap(optax.adam(0.1)), wieght=3.0),
        TYPE,
        r"wieght: expected an argument of this call.*Did you mean weight=\?",
    ),
    "weight of another library": (
        lambda: update(wrap(optax.adamw(0.1)), num_tokens=3.0),
        TYPE,
        r"num_tokens: .*Did you mean weight=\?",
    ),
    "argument beside a closed optimizer": (
        lambda: update(wrap(CLOSED), momentum=3.0),
        TYPE,
        "momentum: expected an argument of this call.*Leave it out",
    ),
    "weight of a flush": (
        lambda: flush(wrap(steps=None), weight=3.0),
        TYPE,
        r"weight: expected.*denominator= to gradaccum_jax\.flush",
    ),
    "function of the last micro-batch": (
        lambda: update(
            wrap(optax.lbfgs(), steps=None), value_fn=lambda p: 0.0, last=True
        ),
        USAGE,
        "value_fn: expected nothing in a window of several micro-batches",
    ),
    "step of torch": (
        lambda: wrap().step,
        AttributeError,
        r"tx\.step: .*Write .*tx\.update\(",
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
    "optimizer that reduces over members": (
        lambda: members(wrap(REDUCING, steps=1)),
        USAGE,
        r"optimizer: .*reduces over \['members'\].*before tx\.update",
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
    "float64 sums without float64": (
        lambda: wrap(accumulate_dtype="float64").init(PARAMS),
        VALUE,
        "accumulate_dtype: expected",
    ),
    "later size that is a float, traced": (
        lambda: update(wrap(steps=floats_later), jitted=True),
        TYPE,
        r"steps\(optimizer_step\): .*float32 and shape.*astype",
    ),
    "MultiSteps whose second size is 0": (
        lambda: multi(every=lambda step: 1 - step).update(
            GRADS, update(multi(every=lambda step: 1 - step))[1], PARAMS
        ),
        VALUE,
        r"steps\(1\): expected an int >= 1; got Array\(0,",
    ),
    # states
    "state of a bare optimizer": (
        lambda: wrap().update(GRADS, SGD.init(PARAMS)),
        TYPE,
        HELD,
    ),
    "flush of a bare optimizer": (
        lambda: gradaccum_jax.flush(SGD, wrap().init(PARAMS)),
        TYPE,
        "tx: expected",
    ),
    "result of nothing": (lambda: gradaccum_jax.result(()), TYPE, HELD),
    "stacked states described": (
        lambda: gradaccum_jax.describe(jax.vmap(wrap().init)(jnp.ones((2, 3)))),
        TYPE,
        HELD + "stacked",
    ),
    "traced state described": (
        lambda: jax.jit(gradaccum_jax.describe)(wrap().init(PARAMS)),
        TYPE,
        HELD + "traced",
    ),
    # float32 masters
    "update of masters without parameters": (
        lambda: wrap(master_weights=True).update(
            HALVES, wrap(master_weights=True).init(HALVES)
        ),
        TYPE,
        r"params: expected .*master_weights=True",
    ),
    "masters of float32 parameters": (
        lambda: flush(wrap(master_weights=True), HALVES, PARAMS),
        VALUE,
        "params: expected half-precision parameters of these shapes",
    ),
}


@pytest.mark.every_mode
@pytest.mark.parametrize("name", CASES)
def test_misuse_is_refused(name: str) -> None:
    call, kind, words = CASES[name]
    with pytest.raises(kind, match=f"^{words}"):
        call()


STATE_READERS: dict[str, Callable[..., Any]] = {
    "result": lambda tx, state: gradaccum_jax.result(state),
    "flush": lambda tx, state: gradaccum_jax.flush(tx, state, PARAMS),
    "update": lambda tx, state: tx.update(GRADS, state, PARAMS),
}


@pytest.mark.parametrize("name", STATE_READERS)
def test_state_of_shapes_is_refused(name: str) -> None:
    tx = wrap(optax.adam(1.0))
    state = jax.eval_shape(tx.init, PARAMS)
    with pytest.raises(TYPE, match=r"^state: expected a state of arrays.*shapes"):
        STATE_READERS[name](tx, state)


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
