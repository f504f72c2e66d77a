"""The layered window of several devices: that of one device with the whole batch, one
reduction per part.
"""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gradaccum
import gradaccum_jax

from .common import DEVICES, adam, assert_close, over
from .windows import computations

LAYERS = 3
WIDTH = 2 * DEVICES


def prelude(outer: Any, x: Any, mask: Any) -> Any:
    return jnp.tanh(x @ outer[0])


def layer(w: Any, x: Any, *_: Any) -> Any:
    return x + jnp.tanh(x @ w)


def loss_fn(outer: Any, x: Any, _: Any, mask: Any) -> Any:
    errors = jnp.sum((x @ outer[1]) ** 2, -1)
    return jnp.sum(mask * errors) / jnp.maximum(mask.sum(), 1)


def whole(params: Any, x: Any, mask: Any) -> Any:
    hidden = prelude(params[0], x, mask)
    hidden = jax.lax.scan(lambda x, w: (layer(w, x), None), hidden, params[1])[0]
    return loss_fn(params[0], hidden, None, mask)


def weight(x: Any, mask: Any) -> Any:
    return mask.sum()


RNG = np.random.default_rng(0)
PARAMS = jax.tree.map(
    lambda shape: jnp.asarray(RNG.normal(size=shape) / WIDTH),
    (((WIDTH, WIDTH), (WIDTH, 2)), (LAYERS, WIDTH, WIDTH)),
    is_leaf=lambda shape: isinstance(shape[0], int),
)
X = RNG.normal(size=(4 * DEVICES, WIDTH))
MASK = (RNG.random(4 * DEVICES) < 0.7).astype(float)
MASK[4:8] = 0  # one device has no item that counts


def require_window(made: Any, losses: Any) -> None:
    tx = gradaccum.wrap(adam(), steps=None)
    step = gradaccum_jax.value_and_update(whole, tx, steps=1, weight=weight)
    loss, updates, _ = step(PARAMS, tx.init(PARAMS), X, MASK)
    assert_close(losses, np.broadcast_to(loss, np.shape(losses)))
    assert_close(made, optax.apply_updates(PARAMS, updates))


def reductions(program: Any, *arguments: Any) -> int:
    """How often the compiled program reduces; in a loop once in each turn."""
    text = re.sub(r"-start\(", "(", program.lower(*arguments).compile().as_text())
    parts = computations(text)

    def runs(part: str) -> int:
        found = part.count(" all-reduce(")
        for line in part.splitlines():
            turns = re.search(r'"known_trip_count":\{"n":"(\d+)"', line)
            names = set(re.findall(r"%([\w.\-]+)", line.partition("(")[2]))
            for name in names & parts.keys():
                times = int(turns[1]) if turns and f"body=%{name}" in line else 1
                found += runs(parts[name]) * times
        return found

    return runs(parts["entry"])


def layered_window() -> None:
    """Replicated parameters: one reduction of the outer ones and of each layer, whatever
    the number of micro-batches.
    """
    found = []
    for steps in (1, 4):
        tx = gradaccum.wrap(adam(), steps=None, axis_name="data", on_overflow="ignore")
        step = gradaccum_jax.layered_value_and_update(
            prelude, layer, loss_fn, tx, steps=steps, weight=weight
        )

        def train(params: Any, state: Any, *batch: Any, step: Any = step) -> Any:
            loss, params, state = step(params, state, *batch)
            return params, state, loss

        state = over(step.init)(PARAMS)
        program = jax.jit(over(train))
        made, after, losses = program(PARAMS, state, X, MASK)
        require_window(made, losses)
        assert gradaccum_jax.result(after).applied
        found.append(reductions(program, PARAMS, state, X, MASK))
    assert found[0] == found[1]
    # The sums of all parts, and the weight and the loss of the call; a newer XLA
    # combines those outside of the loop.
    assert LAYERS + 1 <= found[0] <= LAYERS + 5
