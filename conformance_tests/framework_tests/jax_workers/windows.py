"""The window of four devices is the large batch of all: its numbers, its program, and
other numbers of devices.
"""

from __future__ import annotations

import re
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gradaccum
import gradaccum_jax
from benchmarks.questions.jax_workers import reductions
from conformance_tests.framework_tests.jax_workers.common import (
    DEVICES,
    MESH,
    P,
    adam,
    over,
    parameters,
)
from conformance_tests.framework_tests.refusing import refused


def mixed_dtypes() -> None:
    """Integers take no part; complex and float32 parameters stand beside each other."""
    params = {
        "i": jnp.arange(3),
        "z": jnp.ones(2, jnp.complex64),
        "f": jnp.ones(2, jnp.float32),
        "none": None,
    }
    tx = gradaccum.wrap(optax.sgd(1.0), steps=1, axis_name="data")

    def step(params: Any, state: Any, x: Any) -> Any:
        grads = {
            "i": None,
            "z": x[0] * params["z"],
            "f": x[0] * params["f"],
            "none": None,
        }
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    after, _ = over(step)(
        params, over(tx.init)(params), jnp.arange(4, dtype=jnp.float32)
    )
    np.testing.assert_array_equal(after["f"], 1 - np.full(2, 1.5))
    np.testing.assert_array_equal(after["z"], 1 - np.full(2, 1.5))
    np.testing.assert_array_equal(after["i"], np.arange(3))


def chain() -> None:
    """The wrapped optimizer stands in a chain, whose other states are replicated."""
    tx = optax.chain(
        gradaccum.wrap(optax.sgd(0.5), steps=1, axis_name="data"), optax.trace(0.9)
    )
    params = {"w": jnp.ones(3)}

    def step(params: Any, state: Any, x: Any) -> Any:
        updates, state = tx.update({"w": x[0] * jnp.ones(3)}, state, params)
        return optax.apply_updates(params, updates), state

    after, state = over(step)(params, over(tx.init)(params), jnp.arange(4.0))
    np.testing.assert_array_equal(after["w"], 1 - 0.5 * np.full(3, 1.5))
    np.testing.assert_array_equal(state[1].trace["w"], -0.5 * np.full(3, 1.5))


def scan() -> None:
    """A whole epoch inside: in `data_parallel`, and in a `jax.shard_map` of the user's
    own, where the state never comes out.
    """
    tx = gradaccum.wrap(adam(), steps=3, axis_name="data", clip_norm=0.5)
    params, gradients = (
        {"w": jnp.ones(2)},
        np.random.default_rng(15).normal(size=(DEVICES, 6, 2)),
    )

    def epoch(params: Any, state: Any, rows: Any) -> Any:
        def body(carry: Any, g: Any) -> Any:
            updates, state = tx.update({"w": g}, carry[1], carry[0])
            return (optax.apply_updates(carry[0], updates), state), None

        return jax.lax.scan(body, (params, state), rows[0])[0]

    after, _ = over(epoch)(params, over(tx.init)(params), gradients)
    whole = jax.shard_map(
        lambda p, rows: epoch(p, tx.init(p), rows)[0],
        mesh=MESH,
        in_specs=(P(), P("data")),
        out_specs=P(),
    )
    again = jax.jit(whole)(params, gradients)
    alone = gradaccum.wrap(adam(), steps=1, clip_norm=0.5)
    state, expected = alone.init(params), params
    for g in (gradients[:, :3].mean((0, 1)), gradients[:, 3:].mean((0, 1))):
        updates, state = alone.update({"w": jnp.asarray(g)}, state, expected)
        expected = optax.apply_updates(expected, updates)
    for made in (after, again):
        np.testing.assert_allclose(made["w"], expected["w"], rtol=1e-12)


def ensemble() -> None:
    """Members under `jax.vmap` on each device, all of them shared by the devices."""
    tx = gradaccum.wrap(optax.sgd(1.0), steps=1, axis_name="data", clip_norm=1.0)
    params, gradients = (
        jnp.zeros((3, 2)),
        np.random.default_rng(16).normal(size=(DEVICES, 3, 2)),
    )

    def step(params: Any, state: Any, rows: Any) -> Any:
        updates, state = jax.vmap(tx.update)(rows[0], state, params)
        return params + updates, state

    after, state = over(step)(params, over(jax.vmap(tx.init))(params), gradients)
    mean = gradients.mean(0)
    norms = np.linalg.norm(mean, axis=1, keepdims=True)
    np.testing.assert_allclose(after, -mean / np.maximum(norms, 1), rtol=1e-12)
    np.testing.assert_allclose(
        gradaccum_jax.result(state).grad_norm, norms[:, 0], rtol=1e-12
    )
    assert gradaccum_jax.result(state).overflow.shape == (3,)


COLLECTIVE = re.compile(
    r" (all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute|collective-broadcast)(?:-start)?\("
)


def computations(text: str) -> dict[str, str]:
    """The computations of an optimized program by name; the one that runs in every
    micro-batch is ``"entry"``.
    """
    found = re.findall(
        r"^(ENTRY )?%?([\w.\-]+) \(.*?\{\n(.*?)^\}",
        text,
        flags=re.MULTILINE | re.DOTALL,
    )
    return {"entry" if entry else name: body for entry, name, body in found}


def collectives(text: str) -> tuple[list[str], list[str]]:
    """Those of every micro-batch, and those that stand in a branch or loop."""
    parts = computations(text)
    entry = COLLECTIVE.findall(parts.pop("entry"))
    return entry, [name for body in parts.values() for name in COLLECTIVE.findall(body)]


def compiled(params: Any, **options: Any) -> Any:
    """A step on all devices, or on one without ``axis_name``, with everything
    donated.
    """
    tx = gradaccum.wrap(optax.adamw(0.1), **options)
    lift = over if "axis_name" in options else jax.jit

    def step(params: Any, state: Any, x: Any) -> Any:
        grads = jax.grad(
            lambda p: (
                sum(jnp.sum(leaf * leaf).real for leaf in jax.tree.leaves(p)) * x.mean()
            )
        )(params)
        updates, state = tx.update(grads, state, params, weight=x.sum())
        return optax.apply_updates(params, updates), state

    held = (
        jax.device_put(params, jax.sharding.NamedSharding(MESH, P()))
        if "axis_name" in options
        else params
    )
    return (
        jax.jit(lift(step), donate_argnums=(0, 1))
        .lower(held, lift(tx.init)(held), jnp.ones(2 * DEVICES, jnp.float32))
        .compile()
    )


def one_reduction_per_window() -> None:
    """However long the window is, with every option that looks at the gradient: the
    sums, the weight, the flag and the loss.
    """
    params = {f"p{index}": jnp.ones((8, 16), jnp.float32) for index in range(5)}
    looking = {
        "clip_norm": 1.0,
        "skip_norm": 9.0,
        "on_overflow": "drop_micro_batch",
        "loss_scale": gradaccum.DynamicLossScale(),
    }
    for options in ({"steps": 1}, {"steps": 16}, {"steps": 4, **looking}):
        text = compiled(params, axis_name="data", **options).as_text()
        assert collectives(text) == ([], ["all-reduce"]), (options, collectives(text))
        assert reductions(text, 0) == (
            1,
            sum(leaf.nbytes for leaf in params.values()) + 12,
        )
    assert collectives(compiled(params, axis_name="data", steps=None).as_text()) == (
        [],
        [],
    )


def one_for_each_dtype() -> None:
    params = {
        "f": jnp.ones((3, 4), jnp.float32),
        "d": jnp.ones(4),
        "e": jnp.ones(5),
        "z": jnp.ones(2, jnp.complex64),
    }
    entry, ending = collectives(compiled(params, steps=4, axis_name="data").as_text())
    assert not entry
    assert len(ending) <= 3, ending


def nothing_is_copied() -> None:
    """All that is donated is written in place, and a micro-batch in mid-window copies
    what it copies on one device.
    """
    params = {f"p{index}": jnp.ones((256, 2048), jnp.float32) for index in range(2)}
    alone, shared = (
        compiled(params, steps=4),
        compiled(params, steps=4, axis_name="data"),
    )
    size, memory = (
        sum(leaf.nbytes for leaf in params.values()),
        shared.memory_analysis(),
    )
    assert memory.alias_size_in_bytes >= 4 * size  # parameters, two moments, the sum
    assert memory.argument_size_in_bytes <= 4 * size + 1000
    kind = re.compile(r"= f32\[(?:1,)?256,2048\]\S* copy\(")
    copies = [
        len(kind.findall(computations(program.as_text())["entry"]))
        for program in (alone, shared)
    ]
    assert copies[1] <= copies[0], copies
    # At the end of a window the reduction of an array is a new one, which is written
    # over the old.
    assert (
        memory.temp_size_in_bytes
        <= alone.memory_analysis().temp_size_in_bytes + size + 1000
    )


def benchmark() -> None:
    """The contestants of the benchmark's question end with the same parameters, and
    only ours and the loop by hand reduce once.
    """
    from benchmarks.questions import jax_workers as question

    steps, width = 4, 16
    x = jnp.asarray(
        np.random.default_rng(40).normal(size=(question.DEVICES, steps, 8, width)),
        jnp.float32,
    )
    ended, counts = {}, {}
    for label, make in question.CONTESTANTS.items():
        contestant = make(
            steps,
            jax.tree.map(lambda leaf: leaf.astype(jnp.float32), question.model(width)),
        )
        run = jax.jit(contestant.window)
        text = run.lower(contestant.params, contestant.state, x).compile().as_text()
        counts[label] = question.reductions(str(text), steps)
        params, state = run(contestant.params, contestant.state, x)
        ended[label] = run(params, state, x)[0]
    jax.tree.map(
        lambda *leaves: [
            np.testing.assert_allclose(leaf, leaves[0], rtol=1e-4, atol=1e-6)
            for leaf in leaves
        ],
        *ended.values(),
    )
    assert counts["gradaccum"][0] == 1, counts
    # the weight, the flag and the loss
    assert counts["gradaccum"][1] == counts[question.BASELINE][1] + 12, counts
    assert counts["optax.MultiSteps"][1] == steps * counts[question.BASELINE][1], counts


OPTIONS: dict[str, Any] = {
    "steps": 4,
    "clip_norm": 1.0,
    "on_overflow": "drop_micro_batch",
}


def opened(tx: Any) -> tuple[Any, Any]:
    """Parameters and state after two of four micro-batches, as a checkpoint holds them;
    one of these was dropped on one device.
    """
    params, rng = parameters(), np.random.default_rng(20)

    def step(params: Any, state: Any, gradients: Any, weight: Any) -> Any:
        own = jax.tree.map(lambda leaf: leaf[0], gradients)
        return (
            params,
            tx.update(own, state, params, weight=weight[0], value=own["c"])[1],
        )

    state = over(tx.init)(params)
    for index, weights in enumerate(([1.0, 2.5, 0.0, 3.0], [2.5, 1.0, 3.0, 0.0])):
        gradients = {
            name: rng.normal(size=(DEVICES, *leaf.shape))
            for name, leaf in params.items()
        }
        if index:
            gradients["w"][2] = np.inf
        params, state = over(step)(params, state, gradients, np.asarray(weights))
    return jax.tree.map(np.asarray, (params, state))


def other_number_of_devices() -> None:
    """Through files to two devices, to one, and from one back to four: sum and weight
    are what they were, and so is the update.
    """
    tx = gradaccum.wrap(adam(), axis_name="data", **OPTIONS)
    params, saved = opened(tx)
    ended = {}

    def flush(params: Any, state: Any) -> Any:
        updates, state = gradaccum_jax.flush(tx, state, params)
        return optax.apply_updates(params, updates), state

    for way in ((2,), (1, DEVICES), (DEVICES,)):
        state = saved
        for devices in way:
            state = gradaccum_jax.redistributed(
                gradaccum_jax.check_state(tx, through_a_file(state), params), devices
            )
            np.testing.assert_allclose(
                state.weight.sum(), saved.weight.sum(), rtol=1e-15
            )
            np.testing.assert_allclose(state.loss.sum(), saved.loss.sum(), rtol=1e-15)
            assert state.overflow.any() == saved.overflow.any() == True  # noqa: E712
        for own, old in zip(
            jax.tree.leaves(state.accumulator),
            jax.tree.leaves(saved.accumulator),
            strict=True,
        ):
            np.testing.assert_allclose(own.sum(0), old.sum(0), rtol=1e-14)
            assert way != (DEVICES,) or np.array_equal(own, old)
        mesh = jax.sharding.Mesh(np.array(jax.devices()[:devices]), ("data",))
        ended[way] = over(flush, mesh)(params, state)
    for after, closed in ended.values():
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12),
            after,
            ended[(DEVICES,)][0],
        )
        result = gradaccum_jax.result(closed)
        np.testing.assert_allclose(
            result.loss, gradaccum_jax.result(ended[(DEVICES,)][1]).loss, rtol=1e-12
        )
        assert result.optimizer_step == 1
        assert not np.allclose(after["w"], params["w"])


def through_a_file(state: Any) -> Any:
    leaves, structure = jax.tree.flatten(state)
    with tempfile.TemporaryFile() as file:
        np.savez(file, *leaves)
        file.seek(0)
        return jax.tree.unflatten(structure, list(np.load(file).values()))


def checked_state() -> None:
    """Plain dicts are rebuilt. Other options, a state of one device, and other shapes
    are refused.
    """
    tx = gradaccum.wrap(adam(), axis_name="data", **OPTIONS)
    params, saved = opened(tx)
    restored = gradaccum_jax.check_state(tx, saved._asdict(), params)
    assert jax.tree.structure(restored) == jax.tree.structure(saved)
    jax.tree.map(np.testing.assert_array_equal, restored, saved)
    with refused(gradaccum.CheckpointError, "reduction"):
        gradaccum_jax.check_state(
            gradaccum.wrap(adam(), axis_name="data", **OPTIONS, reduction="sum"),
            saved,
            params,
        )
    alone = gradaccum.wrap(adam(), **OPTIONS)
    with refused(gradaccum.CheckpointError, "weight", "one entry for each device"):
        gradaccum_jax.check_state(tx, alone.init(params), params)
    with refused(gradaccum.CheckpointError, "weight", "(4,)"):
        gradaccum_jax.check_state(alone, saved, params)
    with refused(gradaccum.CheckpointError, "overflow", "(4,)"):
        gradaccum_jax.check_state(
            tx, saved._replace(overflow=saved.overflow[:2]), params
        )
    closed = jax.tree.map(
        jnp.asarray,
        over(lambda params, state: (params, gradaccum_jax.discard(tx, state)))(
            params, restored
        )[1],
    )
    scaled = gradaccum.wrap(adam(), axis_name="data", **OPTIONS, loss_scale=8.0)
    assert gradaccum_jax.check_state(scaled, closed, params).loss_scale == 8
    for state, workers, name in (
        (alone.init(params), 2, "state"),
        (saved, 0, "workers"),
        (saved, 2.0, "workers"),
        (3, 2, "state"),
    ):
        with refused(gradaccum.GradAccumError, f"{name}: expected"):
            gradaccum_jax.redistributed(state, workers)


def empty_flush() -> None:
    """It says that nothing was applied, also where a part of a chain or a partition is
    shared; the flush before it closes the window of all.
    """
    shared = gradaccum.wrap(adam(), steps=4, axis_name="data", mesh=MESH)
    beside = optax.partition(
        {"trained": shared, "frozen": optax.set_to_zero()},
        {"w": "frozen", "b": "trained", "c": "frozen"},
    )
    for tx in (shared, optax.chain(optax.clip(9.0), shared), beside):

        def step(params: Any, state: Any, x: Any, tx: Any = tx) -> Any:
            gradients = jax.grad(lambda p: jnp.mean(p["b"]) * x.mean())(params)
            updates, state = tx.update(gradients, state, params)
            return optax.apply_updates(params, updates), state

        def flush(params: Any, state: Any, tx: Any = tx) -> Any:
            updates, state = gradaccum_jax.flush(tx, state, params)
            return optax.apply_updates(params, updates), state

        params = parameters()
        carried = over(step)(params, tx.init(params), jnp.arange(2.0 * DEVICES))
        said = []
        for _ in range(3):
            carried = over(flush)(*carried)
            result = gradaccum_jax.result(carried[1])
            said.append((bool(result.applied), int(result.optimizer_step)))
        assert said == [(True, 1), (False, 1), (False, 1)], said
