"""Refusals while JAX traces: nothing has run, and what was accumulated is still there.
Beside them what is nearly the same, and right.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

import gradaccum
from gradaccum_jax import result
from gradaccum_jax.sharding import vary

from ..refusing import refused
from .common import P, inside, over

lax = jax.lax
DATA = frozenset(["data"])
SGD = optax.sgd(1.0)


def wrap(inner: Any = SGD, steps: Any = 2, **options: Any) -> Any:
    return gradaccum.wrap(inner, steps=steps, **{"axis_name": "data", **options})


TX = wrap()
ALONE = wrap(axis_name=None)
W = jnp.ones(3)
X = jnp.arange(8.0)
BATCH = (P(), P("data"))


def hinting(updates: Any, state: Any, params: Any = None, *, hint: Any = 1.0) -> Any:
    return updates, state


HINTED = wrap(
    optax.GradientTransformationExtraArgs(lambda params: (), hinting), steps=1
)


def loss_fn(w: Any, x: Any) -> Any:
    return (w.sum() * x).mean()


def own(value: Any, x: Any) -> Any:
    """Other numbers on each device."""
    return value + x.mean()


def same(value: Any, x: Any) -> Any:
    return 1.0 * value


def run(step: Any, tx: Any = TX, state: Any = None) -> Any:
    """A step in `data_parallel`."""
    return over(step)(W, over(tx.init)(W) if state is None else state, X)


def step_of(tx: Any, seen: Any = same, after: Any = same, **extra: Any) -> Any:
    """A step that hands `seen` of the parameters to the optimizer, with extra arguments,
    and returns `after` of the new ones.
    """

    def step(w: Any, state: Any, x: Any) -> Any:
        given = {name: value(w, x) for name, value in extra.items()}
        updates, state = tx.update(jax.grad(loss_fn)(w, x), state, seen(w, x), **given)
        return after(w + updates, x), state

    return step


def alone(
    tx: Any = TX, reduce: Any = None, copied: bool = True, value: Any = None
) -> Any:
    """A micro-batch in a `jax.shard_map` of the user's own."""

    def local(w: Any, x: Any) -> Any:
        grads = jax.grad(loss_fn)(vary(w, DATA) if copied else w, x)
        grads = grads if reduce is None else reduce(grads, "data")
        loss = None if value is None else value(x)
        return tx.update(grads, tx.init(w), w, value=loss)[0]

    return inside(local, BATCH)(W, X)


def rate_of_each_device(w: Any, state: Any, x: Any) -> Any:
    return step_of(wrap(optax.sgd(x.mean()), steps=1))(w, state, x)


def ending_apart(w: Any, x: Any) -> Any:
    state = TX.init(w)
    state = state._replace(micro_step=state.micro_step + (x[0] > 2).astype(jnp.int32))
    return TX.update(x[0] * vary(w, DATA), state, w)[0]


def beside(change: Any) -> Any:
    """A number that is kept beside the state, such as PPO's KL coefficient."""

    def step(w: Any, state: Any, x: Any) -> Any:
        w, held = step_of(TX)(w, state[0], x)
        return w, (held, change(state[1], x))

    return run(step, state=(over(TX.init)(W), jnp.ones(())))[1][1]


SAME = "expected a value that is the same on all devices"
MADE = "depends on a device's own batch"
CASES: dict[str, tuple[Any, ...]] = {
    "gradients that JAX reduced": (
        lambda: alone(copied=False),
        "grads: expected",
        "reduced over ('data',)",
    ),
    "average loss of a shared window": (
        lambda: alone(value=lambda x: lax.pmean(x.mean(), "data")),
        "value: expected the value from this device's own micro-batch",
        "pmean",
    ),
    "types not checked": (
        lambda: inside(lambda w, x: TX.init(w).loss_scale, BATCH, check_vma=False)(
            W, X
        ),
        "axis_name",
        "check_vma=False",
    ),
    "bare optimizer": (
        lambda: run(step_of(optax.adam(0.1)), state=optax.adam(0.1).init(W)),
        "state: expected step to return (params, state)",
    ),
    "init of one device": (lambda: over(ALONE.init)(W), "state", "axis_name=('data',)"),
    "state of one device": (
        lambda: run(step_of(ALONE), state=ALONE.init(W)),
        "state: expected a state of an optimizer",
        "axis_name=('data',)",
    ),
    "norm alone": (
        lambda: run(lambda *args: result(step_of(TX)(*args)[1]).grad_norm),
        "state: expected step to return (params, state)",
    ),
    "weight of one device": (
        lambda: inside(
            lambda w, x: ALONE.update(w, ALONE.init(w), w, weight=x.sum())[0], BATCH
        )(W, X),
        "axis_name: expected",
        "axis_name=('data',)",
    ),
    "window's end": (
        lambda: inside(ending_apart, BATCH)(W, X),
        f"state.micro_step: {SAME}",
    ),
    "last": (lambda: run(step_of(TX, last=lambda w, x: x[0] > 2)), f"last: {SAME}"),
    "parameters given": (
        lambda: run(step_of(HINTED, own), HINTED),
        "params: expected",
        MADE,
    ),
    "extra argument": (
        lambda: run(step_of(HINTED, hint=own), HINTED),
        "['hint']: expected",
        MADE,
    ),
    "learning rate": (
        lambda: run(rate_of_each_device, wrap(steps=1)),
        "result of the inner optimizer",
        MADE,
    ),
    "parameters returned": (
        lambda: run(step_of(TX, after=jax.jit(own))),
        "results of step[0]",
        MADE,
    ),
    "beside the state": (
        lambda: beside(lambda beta, x: jnp.where(x[0] > 2.5, 2 * beta, beta / 2)),
        "results of step[1][1]: expected",
        MADE,
    ),
}
"""The call, and what its `gradaccum.UsageError` says."""


def refused_calls() -> None:
    for name, (call, *words) in CASES.items():
        try:
            with refused(gradaccum.UsageError, *words):
                call()
        except Exception as error:
            error.add_note(name)
            raise


def accepted_calls() -> None:
    norm = lambda w, x: jnp.linalg.norm(w)  # noqa: E731
    mean = lambda w, x: w + lax.pmean(x.mean(), "data")  # noqa: E731
    run(step_of(HINTED, hint=norm), HINTED)
    assert run(step_of(TX, after=jax.jit(mean)))[0].tolist() == [4.5] * 3
    for value in (
        alone(value=jnp.mean),
        alone(ALONE, lax.pmean, value=lambda x: lax.pmean(x.mean(), "data")),
    ):
        assert not value.any()


def own_derivative() -> None:
    """A step whose loss has a derivative of its own cannot be traced with parameters
    that are the same on all devices, and is right.
    """

    @jax.custom_vjp
    def scaled(w: Any, x: Any) -> Any:
        return w.sum() * x.mean()

    scaled.defvjp(
        lambda w, x: (scaled(w, x), (w, x)),
        lambda kept, g: (g * kept[1].mean() * jnp.ones(3), jnp.zeros_like(kept[1])),
    )

    def step(w: Any, state: Any, x: Any) -> Any:
        updates, state = TX.update(jax.grad(scaled)(w, x), state, w)
        return w + updates, state

    carried = (W, over(TX.init)(W))
    for _ in range(2):
        carried = over(step)(*carried, X)
    assert carried[0].tolist() == [1 - 3.5] * 3
