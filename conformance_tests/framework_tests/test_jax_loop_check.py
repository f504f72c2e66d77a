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


def train(tx: Any, data: Any, flush: bool = False) -> Any:
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


def kinds(report: gradaccum.LoopReport) -> list[str]:
    return [problem.kind for problem in report.problems]


def test_multi_steps_is_right_with_equal_sizes() -> None:
    recorder = LoopRecorder()
    state = train(optax.MultiSteps(recorder, 2), EVEN)
    report = recorder.report(state, loss_fn, PARAMS, EVEN, steps=2)
    assert report.right, report
    assert len(report.updates) == 2


def test_multi_steps_takes_a_mean_of_means() -> None:
    recorder = LoopRecorder()
    state = train(optax.MultiSteps(recorder, 4), DATA)
    report = recorder.report(state, loss_fn, PARAMS, DATA)
    assert kinds(report) == ["mean_of_means"], report


def test_multi_steps_leaves_the_short_window() -> None:
    recorder = LoopRecorder()
    state = train(optax.MultiSteps(recorder, 3), EVEN)
    report = recorder.report(state, loss_fn, PARAMS, EVEN, steps=3)
    assert kinds(report) == ["lost"], report


def test_sum_that_is_not_divided() -> None:
    recorder = LoopRecorder()
    state = train(optax.MultiSteps(recorder, 4, use_grad_mean=False), EVEN)
    assert kinds(recorder.report(state, loss_fn, PARAMS, EVEN)) == ["not_divided"]


def test_clip_of_each_micro_batch() -> None:
    recorder = LoopRecorder()
    clipped = optax.chain(
        optax.clip_by_global_norm(0.5), gradaccum.wrap(recorder, steps=4)
    )
    state = train(clipped, EVEN)
    assert kinds(recorder.report(state, loss_fn, PARAMS, EVEN)) == ["clipped_each"]


@pytest.mark.parametrize("options", [{}, {"clip_norm": 0.1}, {"loss_scale": 1.0}])
def test_wrapped_loop_is_right(options: dict[str, Any]) -> None:
    recorder = LoopRecorder()
    state = train(gradaccum.wrap(recorder, steps=3, **options), DATA, flush=True)
    report = recorder.report(state, loss_fn, PARAMS, DATA, steps=3)
    assert report.right, report
    assert len(report.updates) == 2


def test_state_of_no_recorder_is_refused() -> None:
    recorder = LoopRecorder()
    train(recorder, EVEN)
    with pytest.raises(gradaccum.UsageError, match="0 states"):
        recorder.report(None, loss_fn, PARAMS, EVEN)
