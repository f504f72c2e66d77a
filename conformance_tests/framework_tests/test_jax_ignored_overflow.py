"""``on_overflow="ignore"`` in JAX: the program measures nothing and has one conditional; half precision is not looked at either."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("optax", reason="optax is not installed")
import jax
import jax.numpy as jnp
import optax

import gradaccum
import gradaccum_jax
from gradaccum_jax import window

PARAMS = {"w": jnp.ones((4, 4)), "half": jnp.ones(3, jnp.float16)}


def conditionals(jaxpr: Any) -> int:
    """The loops and conditionals of a program, with those inside of them."""
    inner = [getattr(value, "jaxpr", value) for eqn in jaxpr.eqns for value in jax.tree.leaves(list(eqn.params.values())) if _holds(value)]
    return sum(eqn.primitive.name in ("while", "cond") for eqn in jaxpr.eqns) + sum(map(conditionals, inner))


def _holds(value: Any) -> bool:
    return hasattr(getattr(value, "jaxpr", value), "eqns")


def program(**options: Any) -> Any:
    tx = gradaccum.wrap(optax.sgd(0.1), **{"steps": 3, "on_overflow": "ignore", **options})
    return jax.make_jaxpr(lambda grads, state: tx.update(grads, state, PARAMS, weight=2.0))(PARAMS, tx.init(PARAMS)).jaxpr


@pytest.mark.parametrize("options", [{}, {"steps": gradaccum.until_weight(8)}, {"loss_scale": 8.0}, {"master_weights": True}])
def test_nothing_is_measured(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    """The one conditional is the inner optimizer's run."""
    unasked = program(**options)
    assert conditionals(unasked) == 1
    assert conditionals(program(**options, clip_norm=1.0)) > 1
    monkeypatch.setattr(window, "measure", None)
    monkeypatch.setattr(window.sums, "fits", None)
    program(**options)


def test_half_precision_overflows_as_a_bare_optimizer_does() -> None:
    """A sum that float16 cannot hold: inf reaches the optimizer."""
    tx = gradaccum.wrap(optax.sgd(1.0), steps=2, reduction="sum", on_overflow="ignore")
    state = tx.init(PARAMS)
    grads = {"w": PARAMS["w"], "half": jnp.full(3, 6e4, jnp.float16)}
    _, state = tx.update(grads, state, PARAMS)
    updates, state = tx.update(grads, state, PARAMS)
    assert np.isinf(updates["half"]).all()
    assert np.isfinite(updates["w"]).all()
    assert (state.optimizer_step, state.last_overflow) == (1, False)


def test_bad_weight_makes_no_update() -> None:
    """Compiled code cannot raise: the window ends without an update, as with every other option."""
    tx = gradaccum.wrap(optax.sgd(1.0), steps=2, on_overflow="ignore")
    step, state = jax.jit(lambda state, weight: tx.update(PARAMS, state, PARAMS, weight=weight)), tx.init(PARAMS)
    for weight in (1.0, -1.0):
        updates, state = step(state, weight)
    assert not any(np.any(np.asarray(leaf) != 0) for leaf in jax.tree.leaves(updates))
    result = gradaccum_jax.result(state)
    assert (bool(result.skipped), bool(result.overflow), int(result.optimizer_step)) == (True, True, 0)
