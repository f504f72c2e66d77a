"""An open window that was saved goes on, on as many devices or on others."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import gradaccum
import gradaccum_jax
from conformance_tests.framework_tests.jax_workers.common import DEVICES, adam, closer, events, over, parameters, stepper
from conformance_tests.framework_tests.refusing import refused

OPTIONS: dict[str, Any] = {"steps": 4, "clip_norm": 1.0, "on_overflow": "drop_micro_batch", "noise_scale": 0.5}


def opened(tx: Any) -> tuple[Any, Any]:
    """Parameters and state after two of four micro-batches, as a checkpoint holds them; one of these was dropped on one device."""
    params = parameters()
    state, step = over(tx.init)(params), over(stepper(tx))
    for index, event in enumerate(events(20, windows=1, steps=2)):
        if index:
            event.gradients["w"][2] = np.inf
        params, state = step(params, state, event.gradients, event.weight)
    return jax.tree.map(np.asarray, (params, state))


def other_number_of_devices() -> None:
    """On two and on four: the sum and the weight are what they were, and so is the update; on four nothing changes at all."""
    tx = gradaccum.wrap(adam(), axis_name="data", **OPTIONS)
    params, saved = opened(tx)
    ended = {}
    for devices in (2, DEVICES):
        state = gradaccum_jax.redistributed(gradaccum_jax.check_state(tx, saved, params), devices)
        np.testing.assert_allclose(state.weight.sum(), saved.weight.sum(), rtol=1e-15)
        np.testing.assert_allclose(state.loss.sum(), saved.loss.sum(), rtol=1e-15)
        assert state.noise.first_weight.shape == (devices,)
        assert state.noise.first_weight.any() == (devices == DEVICES)
        assert state.overflow.any() == saved.overflow.any() == True  # noqa: E712
        for own, old in zip(jax.tree.leaves(state.accumulator), jax.tree.leaves(saved.accumulator), strict=True):
            np.testing.assert_allclose(own.sum(0), old.sum(0), rtol=1e-14)
            assert devices != DEVICES or np.array_equal(own, old)
        mesh = jax.sharding.Mesh(np.array(jax.devices()[:devices]), ("data",))
        ended[devices] = over(closer(tx)["flush"], mesh)(params, state)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), ended[2][0], ended[DEVICES][0])
    two, four = (gradaccum_jax.result(ended[devices][1]) for devices in (2, DEVICES))
    assert (two.optimizer_step, np.isnan(two.noise_scale), np.isnan(four.noise_scale)) == (1, True, False)
    np.testing.assert_allclose(two.loss, four.loss, rtol=1e-12)
    assert not np.allclose(ended[2][0]["w"], params["w"])


def checked_state() -> None:
    """Plain dicts are rebuilt. Other options, a state of one device, and other shapes are refused."""
    tx = gradaccum.wrap(adam(), axis_name="data", **OPTIONS)
    params, saved = opened(tx)
    restored = gradaccum_jax.check_state(tx, saved._asdict(), params)
    assert jax.tree.structure(restored) == jax.tree.structure(saved)
    jax.tree.map(np.testing.assert_array_equal, restored, saved)
    with refused(gradaccum.CheckpointError, "reduction"):
        gradaccum_jax.check_state(gradaccum.wrap(adam(), axis_name="data", **OPTIONS, reduction="sum"), saved, params)
    alone = gradaccum.wrap(adam(), **OPTIONS)
    with refused(gradaccum.CheckpointError, "weight", "one entry for each device"):
        gradaccum_jax.check_state(tx, alone.init(params), params)
    with refused(gradaccum.CheckpointError, "weight", "(4,)"):
        gradaccum_jax.check_state(alone, saved, params)
    with refused(gradaccum.CheckpointError, "overflow", "(4,)"):
        gradaccum_jax.check_state(tx, saved._replace(overflow=saved.overflow[:2]), params)
    closed = jax.tree.map(jnp.asarray, over(closer(tx)["discard"])(params, restored)[1])
    scaled = gradaccum.wrap(adam(), axis_name="data", **OPTIONS, loss_scale=8.0)
    assert gradaccum_jax.check_state(scaled, closed, params).loss_scale == 8
    for state, workers, name in ((alone.init(params), 2, "state"), (saved, 0, "workers"), (saved, 2.0, "workers"), (3, 2, "state")):
        with refused(gradaccum.GradAccumError, f"{name}: expected"):
            gradaccum_jax.redistributed(state, workers)
