"""The programs that XLA makes: their collectives, their copies, what they write in place; and what JAX does to replicated gradients."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gradaccum
from benchmarks.questions.jax_workers import reductions
from conformance_tests.framework_tests.jax_workers.common import DEVICES, MESH, P, over

COLLECTIVE = re.compile(r" (all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute|collective-broadcast)(?:-start)?\(")


def computations(text: str) -> dict[str, str]:
    """The computations of an optimized program by name; the one that runs in every micro-batch is ``"entry"``."""
    found = re.findall(r"^(ENTRY )?%?([\w.\-]+) \(.*?\{\n(.*?)^\}", text, flags=re.MULTILINE | re.DOTALL)
    return {"entry" if entry else name: body for entry, name, body in found}


def collectives(text: str) -> tuple[list[str], list[str]]:
    """Those of every micro-batch, and those that stand in a branch or loop."""
    parts = computations(text)
    entry = COLLECTIVE.findall(parts.pop("entry"))
    return entry, [name for body in parts.values() for name in COLLECTIVE.findall(body)]


def compiled(params: Any, **options: Any) -> Any:
    """A step on all devices, or on one without ``axis_name``, with everything donated."""
    tx = gradaccum.wrap(optax.adamw(0.1), **options)
    lift = over if "axis_name" in options else jax.jit

    def step(params: Any, state: Any, x: Any) -> Any:
        grads = jax.grad(lambda p: sum(jnp.sum(leaf * leaf).real for leaf in jax.tree.leaves(p)) * x.mean())(params)
        updates, state = tx.update(grads, state, params, weight=x.sum())
        return optax.apply_updates(params, updates), state

    held = jax.device_put(params, jax.sharding.NamedSharding(MESH, P())) if "axis_name" in options else params
    return jax.jit(lift(step), donate_argnums=(0, 1)).lower(held, lift(tx.init)(held), jnp.ones(2 * DEVICES, jnp.float32)).compile()


def one_reduction_per_window() -> None:
    """However long the window is, with every option that looks at the gradient: the sums, the weight, the flag and the loss."""
    params = {f"p{index}": jnp.ones((8, 16), jnp.float32) for index in range(5)}
    looking = {"clip_norm": 1.0, "skip_norm": 9.0, "on_overflow": "drop_micro_batch", "loss_scale": gradaccum.DynamicLossScale()}
    for options in ({"steps": 1}, {"steps": 16}, {"steps": 4, **looking}):
        text = compiled(params, axis_name="data", **options).as_text()
        assert collectives(text) == ([], ["all-reduce"]), (options, collectives(text))
        assert reductions(text, 0) == (1, sum(leaf.nbytes for leaf in params.values()) + 12)
    assert collectives(compiled(params, axis_name="data", steps=None).as_text()) == ([], [])


def one_for_each_dtype() -> None:
    params = {"f": jnp.ones((3, 4), jnp.float32), "d": jnp.ones(4), "e": jnp.ones(5), "z": jnp.ones(2, jnp.complex64)}
    entry, ending = collectives(compiled(params, steps=4, axis_name="data").as_text())
    assert not entry
    assert len(ending) <= 3, ending


def nothing_is_copied() -> None:
    """All that is donated is written in place, and a micro-batch in mid-window copies what it copies on one device."""
    params = {f"p{index}": jnp.ones((256, 2048), jnp.float32) for index in range(2)}
    alone, shared = compiled(params, steps=4), compiled(params, steps=4, axis_name="data")
    size, memory = sum(leaf.nbytes for leaf in params.values()), shared.memory_analysis()
    assert memory.alias_size_in_bytes >= 4 * size  # parameters, two moments, the sum
    assert memory.argument_size_in_bytes <= 4 * size + 1000
    kind = re.compile(r"= f32\[(?:1,)?256,2048\]\S* copy\(")
    copies = [len(kind.findall(computations(program.as_text())["entry"])) for program in (alone, shared)]
    assert copies[1] <= copies[0], copies
    # At the end of a window the reduction of an array is a new one, which is written over the old.
    assert memory.temp_size_in_bytes <= alone.memory_analysis().temp_size_in_bytes + size + 1000


def replicated_gradients() -> None:
    """What the error about reduced gradients protects from: JAX adds up the gradient of a replicated parameter over the devices."""
    gradient = jax.grad(lambda w, x: (w * x).mean())
    made = jax.jit(jax.shard_map(gradient, mesh=MESH, in_specs=(P(), P("data")), out_specs=P()))(jnp.ones(()), jnp.arange(4.0))
    assert made == 6  # not the mean, 1.5
    tx = gradaccum.wrap(optax.sgd(1.0), steps=1, axis_name="data")

    def step(w: Any, state: Any, x: Any) -> Any:
        updates, state = tx.update(gradient(w, x), state, w)
        return w + updates, state

    after, _ = over(step)(jnp.ones(()), over(tx.init)(jnp.ones(())), jnp.arange(4.0))
    np.testing.assert_array_equal(after, 1 - 1.5)


def benchmark() -> None:
    """The contestants of the benchmark's question end with the same parameters, and only ours and the loop by hand reduce once."""
    from benchmarks.questions import jax_workers as question

    steps, width = 4, 16
    x = jnp.asarray(np.random.default_rng(40).normal(size=(question.DEVICES, steps, 8, width)), jnp.float32)
    ended, counts = {}, {}
    for label, make in question.CONTESTANTS.items():
        contestant = make(steps, jax.tree.map(lambda leaf: leaf.astype(jnp.float32), question.model(width)))
        run = jax.jit(contestant.window)
        text = run.lower(contestant.params, contestant.state, x).compile().as_text()
        counts[label] = question.reductions(str(text), steps)
        params, state = run(contestant.params, contestant.state, x)
        ended[label] = run(params, state, x)[0]
    jax.tree.map(lambda *leaves: [np.testing.assert_allclose(leaf, leaves[0], rtol=1e-4, atol=1e-6) for leaf in leaves], *ended.values())
    assert counts["gradaccum"][0] == 1, counts
    assert counts["gradaccum"][1] == counts[question.BASELINE][1] + 12, counts  # the weight, the flag and the loss
    assert counts["optax.MultiSteps"][1] == steps * counts[question.BASELINE][1], counts
