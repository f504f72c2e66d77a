"""The loop check in JAX: a transformation in the optimizer's place."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradaccum
import gradaccum_jax
from gradaccum_jax import LoopRecorder

SIZES = (5, 3, 4, 2)
generator = np.random.default_rng(0)
DATA = [
    (
        generator.normal(size=(size, 6)).astype(np.float32),
        generator.normal(size=(size, 2)).astype(np.float32),
    )
    for size in SIZES
]
EVEN = [(x[:2], y[:2]) for x, y in DATA]
PARAMS = {
    "w": generator.normal(size=(6, 7)).astype(np.float32),
    "v": generator.normal(size=(7, 2)).astype(np.float32),
}


def loss_fn(params: Any, x: Any, y: Any) -> Any:
    return jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"] - y) ** 2)


def loss_and_aux(*arguments: Any) -> Any:
    return loss_fn(*arguments), "aux"


def half_loss(dtype: Any) -> Any:
    """Return a loss that is small, as that of one of many items is."""

    def loss(*arguments: Any) -> Any:
        half = jax.tree.map(lambda leaf: leaf.astype(dtype), arguments)
        return loss_fn(*half).astype(jnp.float32) / 1000

    return loss


def train(tx: Any, data: Any, flush: bool = False, loss_fn: Any = loss_fn) -> Any:
    params = PARAMS
    state = tx.init(params)

    @jax.jit
    def step(params: Any, state: Any, x: Any, y: Any) -> Any:
        gradients = jax.grad(loss_fn)(params, x, y)
        extra = {"weight": len(x)} if flush else {}
        updates, state = tx.update(gradients, state, params, **extra)
        return optax.apply_updates(params, updates), state

    for x, y in data:
        params, state = step(params, state, x, y)
    if flush:
        state = gradaccum_jax.flush(tx, state, params)[1]
    return state


def multi_steps(steps: int, **options: Any) -> Any:
    return lambda recorder: optax.MultiSteps(recorder, steps, **options)


def clipped_each(recorder: Any) -> Any:
    return optax.chain(
        optax.clip_by_global_norm(0.5), gradaccum.wrap(recorder, steps=4)
    )


def partial(recorder: Any) -> Any:
    parts = {"w": recorder, "v": optax.set_to_zero()}
    return optax.MultiSteps(optax.multi_transform(parts, {"w": "w", "v": "v"}), 2)


CASES: dict[str, tuple[Any, Any, dict[str, Any], list[str]]] = {
    "equal sizes": (multi_steps(2), EVEN, {"steps": 2}, []),
    "unequal sizes": (multi_steps(4), DATA, {}, ["mean_of_means"]),
    "a short window": (multi_steps(3), EVEN, {"steps": 3}, ["lost"]),
    "a sum": (multi_steps(4, use_grad_mean=False), EVEN, {}, ["not_divided"]),
    "a clip of each": (clipped_each, EVEN, {}, ["clipped_each"]),
    "frozen parameters": (partial, EVEN, {}, []),
}
"""The loop's optimizer, its data, the options of the report, and the problems."""


@pytest.mark.parametrize("name", CASES)
def test_problem_is_named(name: str) -> None:
    make, data, options, kinds = CASES[name]
    recorder = LoopRecorder()
    state = train(make(recorder), data)
    report = recorder.report(state, loss_and_aux, PARAMS, data, **options)
    assert [problem.kind for problem in report.problems] == kinds, report
    assert ("only some parameters" in str(report)) == (make is partial)


@pytest.mark.parametrize("options", [{}, {"clip_norm": 0.1}])
def test_wrapped_loop_is_right(options: dict[str, Any]) -> None:
    recorder = LoopRecorder()
    state = train(gradaccum.wrap(recorder, steps=3, **options), DATA, flush=True)
    report = recorder.report(state, loss_fn, PARAMS, DATA, steps=3, **options)
    assert report.right, report
    assert len(report.updates) == 2


@pytest.mark.parametrize(("dtype", "scale"), [(jnp.bfloat16, 3), (jnp.float16, 4096)])
def test_half_precision_loss_of_float32_parameters(dtype: Any, scale: int) -> None:
    recorder = LoopRecorder()
    loss = half_loss(dtype)
    state = train(
        gradaccum.wrap(recorder, steps=3),
        DATA,
        True,
        lambda *arguments: scale * loss(*arguments),
    )
    report = recorder.report(state, loss, PARAMS, DATA)
    assert {problem.kind for problem in report.problems} == {"scaled"}, report


def test_state_without_one_count_is_refused() -> None:
    recorder = LoopRecorder()
    state = optax.chain(recorder, recorder).init(PARAMS)
    replicated = jax.tree.map(lambda leaf: leaf[None], state[0])
    for given, words in (
        (state, "got 2 of them"),
        (replicated, "unreplicate.*jax.vmap"),
    ):
        with pytest.raises(gradaccum.ArgumentValueError, match=words):
            recorder.report(given, loss_fn, PARAMS, DATA)


def test_parameters_without_gradients_are_left_out() -> None:
    recorder = LoopRecorder()
    params = {**PARAMS, "count": jnp.int32(3), "key": jax.random.key(0)}
    tx = gradaccum.wrap(recorder, steps=len(EVEN))
    state = tx.init(params)
    for batch in EVEN:
        grads = jax.grad(loss_fn, allow_int=True)(params, *batch)
        _, state = tx.update(grads, state, params)
    assert recorder.report(state, loss_fn, params, EVEN).right


def test_recorder_is_an_argument_of_a_jitted_function() -> None:
    recorder = LoopRecorder()
    assert jax.jit(lambda given: given)(recorder) is recorder
