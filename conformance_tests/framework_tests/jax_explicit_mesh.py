"""Gradients typed ``unreduced`` on explicit meshes of four host devices: run by `test_jax_explicit_mesh`, ``python FILE CHECK``.

A process of its own: the number of devices is fixed when JAX starts.
"""

from __future__ import annotations

import os
import re
import sys
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradaccum
import gradaccum_jax
from conformance_tests.framework_tests.jax_versions import on_mesh
from gradaccum_jax.sharding import reshard

P: Any = jax.sharding.PartitionSpec
LIBRARY: Any = jax
EXPLICIT = jax.sharding.AxisType.Explicit
DATA = jax.make_mesh((4,), ("data",), axis_types=(EXPLICIT,))
BOTH = jax.make_mesh((2, 2), ("data", "model"), axis_types=(EXPLICIT,) * 2)
WHOLE, COLUMNS = {"w": P(), "v": P()}, {"w": P(None, "model"), "v": P(None, "model")}
ROUNDOFF = 2.0**-24
rng = np.random.default_rng(0)
BATCHES = np.asarray(rng.normal(size=(6, 8, 6)), np.float32)
START = {"w": np.asarray(rng.normal(size=(6, 4)), np.float32), "v": np.asarray(rng.normal(size=(1, 4)), np.float32)}


def loss(params: Any, x: Any) -> Any:
    """The bias is multiplied by ones of the type of `x`: JAX adds no ``reduced`` array to a sharded one."""
    return jnp.mean(jnp.square(jnp.tanh(x @ params["w"]) + (0 * x[:, :1] + 1) @ params["v"] - 1))


def parameters(specs: Any = WHOLE, dtype: Any = None) -> Any:
    return {name: jnp.copy(jax.device_put(jnp.asarray(leaf, dtype), specs[name])) for name, leaf in START.items()}


def local(params: Any) -> Any:
    """The parameters in the type whose gradient is each device's part."""

    def retyped(leaf: Any) -> Any:
        return LIBRARY.reshard(leaf, P(*LIBRARY.typeof(leaf).sharding.spec.partitions, reduced={"data"}))

    return jax.tree.map(retyped, params)


def waiting(tree: Any) -> Any:
    """The axes along which every leaf is in parts."""
    (axes,) = {frozenset(LIBRARY.typeof(leaf).sharding.spec.unreduced) for leaf in jax.tree.leaves(tree)}
    return axes


def gradients(params: Any, x: Any, scale: Any = 1.0) -> Any:
    made = jax.grad(lambda params: loss(params, x) * scale)(local(params))
    assert waiting(made) == {"data"}
    return made


def step_of(tx: Any, **given: Any) -> Any:
    def step(params: Any, state: Any, x: Any) -> Any:
        updates, state = tx.update(gradients(params, x, state.loss_scale), state, params, **given)
        return optax.apply_updates(params, updates), state

    return step


def alone(large: Any, clip_norm: float | None = None) -> Any:
    """The parameters after one update for each large batch, on one device, without any window."""
    tx = optax.chain(optax.clip_by_global_norm(clip_norm) if clip_norm else optax.identity(), optax.sgd(0.5))
    params = jax.tree.map(jnp.asarray, START)
    state = tx.init(params)
    for x in large:
        updates, state = tx.update(jax.grad(loss)(params, jnp.asarray(x)), state, params)
        params = optax.apply_updates(params, updates)
    return params


def large(size: int, count: int = len(BATCHES)) -> Any:
    return [np.concatenate(BATCHES[at : at + size]) for at in range(0, count, size)]


def assert_near(params: Any, wanted: Any) -> None:
    for name in wanted:
        scale = np.abs(wanted[name]).max()
        np.testing.assert_allclose(np.asarray(params[name]), wanted[name], rtol=0, atol=8 * ROUNDOFF * scale)


def assert_reduced_in_a_branch(text: str) -> None:
    """One all-reduce for all sums, and nothing else, in a computation that only a conditional enters."""
    kinds = r" (all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)(?:-start)?\("
    assert re.findall(kinds, text) == ["all-reduce"], re.findall(kinds, text)
    bodies = re.findall(r"^(?:ENTRY )?%([\w.-]+) \([^\n]*\{\n(.*?)^\}", text, flags=re.MULTILINE | re.DOTALL)
    (name,) = [name for name, body in bodies if re.search(kinds, body)]
    callers = [line for line in text.splitlines() if re.search(rf"%{re.escape(name)}[,}}\s]", line) and " = " in line]
    assert len(callers) == 1, callers
    assert " conditional(" in callers[0], callers


OPTIMIZERS = [gradaccum.wrap(optax.sgd(0.5), steps=3, clip_norm=0.1)]


def check_scan() -> None:
    """The sums are a scan's carry of unchanging type."""
    with jax.set_mesh(DATA):
        params, xs = parameters(), jax.device_put(BATCHES, P(None, "data"))
        for tx in OPTIMIZERS:
            step = step_of(tx)

            def train(params: Any, xs: Any, tx: Any = tx, step: Any = step) -> Any:
                start = (params, tx.init(local(params)))
                return jax.lax.scan(lambda carry, x: (step(*carry, x), None), start, xs)[0]

            compiled = jax.jit(train).lower(params, xs).compile()
            assert_reduced_in_a_branch(compiled.as_text())
            made, state = compiled(params, xs)
            assert waiting(state.accumulator) == {"data"}
            assert_near(made, alone(large(3), clip_norm=0.1))


def check_streaming() -> None:
    """A jitted step whose state is donated; also of a state that was made for ordinary parameters."""
    wanted = alone(large(3), clip_norm=0.1)
    with jax.set_mesh(DATA):
        for tx in OPTIMIZERS:
            for start in (local, lambda params: params):
                params = parameters()
                state, step = tx.init(start(params)), jax.jit(step_of(tx), donate_argnums=(0, 1))
                for x in BATCHES:
                    before = state
                    params, state = step(params, state, jax.device_put(x, P("data")))
                    assert before.accumulator["w"].is_deleted()
                    assert waiting(state.accumulator) == {"data"}
                assert_near(params, wanted)
                assert gradaccum_jax.result(state).optimizer_step == 2
            text = jax.jit(step_of(tx), donate_argnums=(0, 1)).lower(params, state, jax.device_put(x, P("data"))).compile().as_text()
            assert_reduced_in_a_branch(text)


def check_two_axes() -> None:
    """Parameters sharded along one axis, their gradients in parts along the other; steps=None, flush and discard."""
    wanted = alone(large(2, 4))
    tx = gradaccum.wrap(optax.sgd(0.5), steps=None)
    with jax.set_mesh(BOTH):
        params = parameters(COLUMNS)
        state, step = tx.init(local(params)), jax.jit(step_of(tx, weight=2.0))
        for start in (0, 2):
            for at in (4, start, start + 1):
                params, state = step(params, state, jax.device_put(BATCHES[at], P("data", None)))
                assert LIBRARY.typeof(state.accumulator["w"]).sharding.spec == P(None, "model", unreduced={"data"})
                state = gradaccum_jax.discard(tx, state) if at == 4 else state
            updates, state = gradaccum_jax.flush(tx, state, params)
            params = optax.apply_updates(params, updates)
            assert gradaccum_jax.result(state).applied
        assert LIBRARY.typeof(params["w"]).sharding.spec == P(None, "model")
        assert waiting(state.accumulator) == {"data"}
        assert_near(params, wanted)


def check_norm_and_overflow() -> None:
    """The norm is the reduced gradient's; parts whose sum overflows skip the window on all devices; a clean window follows."""
    tx = gradaccum.wrap(optax.sgd(0.5), steps=2, loss_scale=gradaccum.DynamicLossScale(init_scale=1024.0))
    wanted = float(
        np.linalg.norm(
            np.concatenate(
                [np.ravel(leaf) for leaf in jax.tree.leaves(jax.grad(loss)(jax.tree.map(jnp.asarray, START), np.concatenate(BATCHES[:2])))]
            )
        )
    )
    with jax.set_mesh(DATA):
        params = parameters()
        state, step = tx.init(local(params)), jax.jit(step_of(tx))
        bad = BATCHES[1].copy()
        bad[3, 0] = np.inf
        for x in (BATCHES[0], bad, BATCHES[0], BATCHES[1]):
            params, state = step(params, state, jax.device_put(x, P("data")))
        assert state.skipped_windows == 1
        assert state.loss_scale == 512
        assert_near(params, alone(large(2, 2)))
        np.testing.assert_allclose(gradaccum_jax.result(state).grad_norm, wanted, rtol=8 * ROUNDOFF)


def check_reduced_parameters() -> None:
    """Parameters that are typed ``reduced`` throughout get updates of that type; bfloat16 ones with masters, summed in float32."""
    with jax.set_mesh(DATA):
        for options in ({}, {"master_weights": True}):
            tx = gradaccum.wrap(optax.sgd(0.5), steps=3, **options)
            params = local(parameters(dtype=jnp.bfloat16 if options else None))
            state, types = tx.init(params), jax.tree.map(LIBRARY.typeof, params)
            for x in BATCHES:
                params, state = jax.jit(step_of(tx))(params, state, jax.device_put(x.astype(params["w"].dtype), P("data")))
                assert jax.tree.map(LIBRARY.typeof, params) == types
            assert state.accumulator["w"].dtype == jnp.float32
            if not options:
                assert_near({name: LIBRARY.reshard(leaf, P()) for name, leaf in params.items()}, alone(large(3)))


def check_mixed() -> None:
    """A window of gradients in parts and of whole ones; a weight of 0 adds nothing; a window saved as whole sums goes on."""
    tx = gradaccum.wrap(optax.sgd(0.5), steps=4)
    with jax.set_mesh(DATA):
        params = parameters()
        state = tx.init(local(params))
        xs = [jax.device_put(x, P("data")) for x in BATCHES]
        parts, entire, poisoned = gradients(params, xs[0]), jax.grad(loss)(params, xs[1]), gradients(params, xs[5] * np.nan)
        for made, weight in ((parts, 1.0), (entire, 1.0), (poisoned, 0.0)):
            _, state = tx.update(made, state, params, weight=weight)
        saved = state._replace(accumulator=LIBRARY.reshard(state.accumulator, P()))
        restored = gradaccum_jax.check_state(tx, jax.tree.map(np.asarray, saved), params)
        for held in (state, jax.device_put(restored, P())):
            updates, after = tx.update(gradients(params, xs[2]), held, params, weight=1.0)
            assert waiting(after.accumulator) == {"data"}
            assert_near(optax.apply_updates(params, updates), alone(large(3, 3)))


def check_no_mesh_set() -> None:
    """The arrays say their mesh: init, update, flush and discard are called where `jax.set_mesh` is not."""
    tx = gradaccum.wrap(optax.sgd(0.5), steps=3)
    on = jax.NamedSharding
    params = {name: jax.device_put(leaf, on(DATA, P())) for name, leaf in START.items()}
    typed = {name: jax.device_put(leaf, on(DATA, P(reduced={"data"}))) for name, leaf in START.items()}
    state, grad = tx.init(typed), jax.jit(jax.grad(loss))
    for at in (4, 0, 1):
        _, state = tx.update(grad(typed, jax.device_put(BATCHES[at], on(DATA, P("data")))), state, params)
        state = gradaccum_jax.discard(tx, state) if at == 4 else state
    updates, state = gradaccum_jax.flush(tx, state, params)
    assert waiting(state.accumulator) == {"data"}
    assert_near(optax.apply_updates(params, updates), alone(large(2, 2)))


def check_refused() -> None:
    """What needs each micro-batch's whole gradient names the way out; what was accumulated is still there."""
    with jax.set_mesh(DATA):
        params, x = parameters(), jax.device_put(BATCHES[0], P("data"))
        made = gradients(params, x)
        dropping = gradaccum.wrap(optax.sgd(0.5), steps=3, on_overflow="drop_micro_batch")
        state = dropping.init(local(params))
        _, state = dropping.update(LIBRARY.reshard(made, P()), state, params)
        with pytest.raises(gradaccum.UsageError, match=r"^on_overflow: expected .*unreduced.*jax\.reshard"):
            dropping.update(made, state, params)
        assert float(jnp.abs(LIBRARY.reshard(state.accumulator["w"], P())).max()) > 0
        steps = gradaccum_jax.MultiSteps(optax.sgd(0.5), 2)
        with pytest.raises(gradaccum.UsageError, match=r"^updates: expected .*gradaccum\.wrap"):
            steps.update(made, steps.init(params), params)
        for given in ({}, {"mesh": DATA, "axis_name": "data"}):
            with pytest.raises(gradaccum.ArgumentTypeError, match=r"^argument 0\['v'\]: expected .*reduced over \['data'\].*jax\.reshard"):
                gradaccum_jax.value_and_grad(loss, steps=2, **given)(local(params), x)
        with pytest.raises(gradaccum.ArgumentTypeError, match=r"^argument 0\['v'\]: expected .*value_and_update take"):
            gradaccum_jax.coupled_value_and_grad(lambda p, x: x @ p["w"], lambda p, z: z.mean(), steps=2)(local(params), x)
        whole = gradaccum.wrap(optax.sgd(0.5), steps=None)
        _, updates, _ = gradaccum_jax.value_and_update(loss, whole, steps=2)(local(params), whole.init(local(params)), x)
        _, expected, _ = gradaccum_jax.value_and_update(loss, whole, steps=2)(params, whole.init(params), x)
        assert waiting(made) == {"data"}
        assert_near({name: LIBRARY.reshard(leaf, P()) for name, leaf in updates.items()}, expected)
        shared = gradaccum.wrap(optax.sgd(0.5), steps=2, axis_name="data")
        gradaccum_jax.data_parallel(shared.init, DATA, "data")(local(params))


def check_too_old() -> None:
    """JAX 0.7 lets no such array out of `jax.jit`, and a loop that adds up parts gives seven times the sum: named, not summed wrongly."""
    tx = gradaccum.wrap(optax.sgd(0.5), steps=3)
    spec = {"reduced": {"data"}}
    with on_mesh(DATA):
        params, x = parameters({name: jax.NamedSharding(DATA, P()) for name in WHOLE}), jnp.asarray(BATCHES[0])
        state = tx.init(params)

        def step(x: Any) -> Any:
            parts = jnp.einsum("bi,bj->ij", x, x[:, :4], out_sharding=P(None, None, unreduced={"data"}))
            return tx.update({"w": parts, "v": None}, state, params)

        with pytest.raises(gradaccum.UsageError, match=r"^grads: expected .*JAX 0\.\d.*gradaccum_jax\.data_parallel"):
            jax.jit(step)(jax.device_put(x, jax.NamedSharding(DATA, P("data", None))))
        with pytest.raises(gradaccum.UsageError, match=r"^params: expected .*JAX 0\.\d"):
            jax.jit(lambda params: tx.init(jax.tree.map(lambda leaf: reshard(leaf, P(None, None, **spec)), params)))(params)


if __name__ == "__main__":
    globals()[f"check_{sys.argv[1]}"]()
