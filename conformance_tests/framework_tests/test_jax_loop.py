"""The wrapped transformation in a loop, alone and combined with other optax
transformations.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import export

import gradaccum
import gradaccum_jax

PARAMS = {"a": jnp.asarray([1.0, 2.0]), "b": {"c": jnp.asarray([[3.0]])}}
GRADS = [jax.tree.map(lambda p, i=i: p * 0.25 + i, PARAMS) for i in range(4)]
MEAN = jax.tree.map(lambda *g: sum(g) / 4, *GRADS)


def run(tx: Any, params: Any = PARAMS, grads: Any = GRADS) -> tuple[Any, Any]:
    """Return the sum of all updates, and the last state."""
    state, total = tx.init(params), None
    update = jax.jit(tx.update)
    for gradient in grads:
        updates, state = update(gradient, state, params)
        total = updates if total is None else jax.tree.map(jnp.add, total, updates)
    return total, state


def assert_same(a: Any, b: Any) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for left, right in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        # Adam's first step divides two nearly equal numbers.
        np.testing.assert_allclose(left, right, rtol=1e-5)


def wrap(inner: Any, **options: Any) -> Any:
    return gradaccum.wrap(inner, **{"steps": 4, **options})


@pytest.mark.parametrize(
    ("outer", "inner"),
    [
        (
            optax.chain(wrap(optax.adam(0.1)), optax.scale(2.0)),
            optax.chain(optax.adam(0.1), optax.scale(2.0)),
        ),
        (optax.named_chain(("acc", wrap(optax.adam(0.1)))), optax.adam(0.1)),
        (
            optax.transforms.partition(
                {"x": wrap(optax.adam(0.1)), "y": wrap(optax.sgd(0.3))},
                {"a": "x", "b": "y"},
            ),
            optax.transforms.partition(
                {"x": optax.adam(0.1), "y": optax.sgd(0.3)}, {"a": "x", "b": "y"}
            ),
        ),
    ],
    ids=["chain", "named", "partition"],
)
def test_four_micro_batches_are_one_update(outer: Any, inner: Any) -> None:
    """The wrapper inside of a combinator; the tests of integrations have it around each
    of optax's.
    """
    total, state = run(outer)
    assert all(
        int(found.optimizer_step) == 1
        for found in gradaccum_jax.state.find_states(state)
    )
    assert_same(total, inner.update(MEAN, inner.init(PARAMS), PARAMS)[0])


def test_masked_wrapper_accumulates_its_part() -> None:
    total, state = run(optax.masked(wrap(optax.sgd(0.1)), {"a": True, "b": False}))
    np.testing.assert_allclose(total["a"], -0.1 * MEAN["a"], rtol=1e-6)
    np.testing.assert_allclose(total["b"]["c"], 4 * MEAN["b"]["c"], rtol=1e-6)
    assert len(jax.tree.leaves(state.inner_state.accumulator)) == 1


def test_extra_arguments_reach_inner_optimizer() -> None:
    def update(
        gradients: Any,
        state: Any,
        params: Any = None,
        *,
        factor: Any,
        name: str = "",
        **rest: Any,
    ) -> Any:
        assert set(rest) == ({"value"} if name == "abc" else set()), (
            "a flush tells the window's loss, nothing else is added"
        )
        return jax.tree.map(lambda g: g * factor * len(name), gradients), state

    inner = optax.GradientTransformationExtraArgs(
        lambda params: optax.EmptyState(), update
    )
    tx = optax.chain(gradaccum.wrap(inner, steps=1), optax.scale(1.0))
    updates, state = tx.update(
        GRADS[0], tx.init(PARAMS), PARAMS, weight=3, factor=2.0, name="ab"
    )
    assert_same(updates, jax.tree.map(lambda g: 4 * g, GRADS[0]))
    wrapped = gradaccum.wrap(inner, steps=None)
    _, state = wrapped.update(GRADS[0], wrapped.init(PARAMS), factor=2.0, name="ab")
    updates, _ = gradaccum_jax.flush(
        wrapped, state, factor=jnp.asarray(3.0), name="abc"
    )
    assert_same(updates, jax.tree.map(lambda g: 9 * g, GRADS[0]))


def test_flush_and_result_in_a_chain() -> None:
    wrapped, following = wrap(optax.sgd(0.5)), optax.scale(2.0)
    tx = optax.chain(wrapped, following)
    _, state = tx.update(GRADS[1], tx.init(PARAMS), PARAMS)
    assert gradaccum_jax.result(state).micro_step == 1
    updates, first = gradaccum_jax.flush(wrapped, state[0], PARAMS)
    updates, second = following.update(updates, state[1], PARAMS)
    assert_same(updates, jax.tree.map(lambda g: -g, GRADS[1]))
    assert gradaccum_jax.result((first, second)).applied


def test_discard_leaves_the_state_of_the_start() -> None:
    """Every leaf of it, the sum that the next window would write over too."""
    tx = wrap(optax.adam(0.1), loss_scale=gradaccum.DynamicLossScale())
    start = tx.init(PARAMS)
    _, state = tx.update(GRADS[1], start, PARAMS, weight=3)
    assert_same(jax.jit(lambda s: gradaccum_jax.discard(tx, s))(state), start)


def test_narrower_gradients_are_accepted() -> None:
    """Gradients wider than the sum are accepted where `accumulate_dtype` asks for the
    narrow sum.
    """
    half = jax.tree.map(lambda g: g.astype(jnp.float16), GRADS[1])
    run(wrap(optax.sgd(1.0)), grads=[half])
    low = jax.tree.map(lambda p: p.astype(jnp.bfloat16), PARAMS)
    narrow = wrap(optax.sgd(1.0), accumulate_dtype="bfloat16")
    _, state = run(narrow, params=low, grads=[GRADS[1]])
    assert state.accumulator["a"].dtype == jnp.bfloat16


def test_symbolic_batch_size_is_a_weight() -> None:
    tx = wrap(optax.sgd(1.0), steps=2)
    state = tx.init(PARAMS["a"])
    (batch,) = export.symbolic_shape("batch")
    kind = jax.ShapeDtypeStruct((batch, 2), jnp.float32)
    exported = export.export(
        jax.jit(lambda s, x: tx.update(x.sum(0), s, weight=x.shape[0])[1].weight)
    )(state, kind)
    assert exported.call(state, jnp.ones((5, 2))) == 5


def test_scalar_array_is_a_step_count() -> None:
    for steps in (jnp.int32(2), np.int64(2), np.asarray(2)):
        _, state = run(gradaccum.wrap(optax.sgd(1.0), steps))
        assert state.optimizer_step == 2


def test_tree_map_params_sees_the_accumulator() -> None:
    tx = wrap(optax.adam(0.1))
    marked = optax.tree_map_params(
        tx,
        lambda leaf: "param",
        tx.init(PARAMS),
        transform_non_params=lambda leaf: "other",
    )
    assert set(jax.tree.leaves(marked.accumulator)) == {"param"}
    assert marked.micro_step == "other"


def test_idle_updates_keep_negative_zeros() -> None:
    tx = gradaccum.wrap(optax.sgd(1.0), steps=2)
    params = jnp.asarray([-0.0, 0.0, 1.0])
    updates, _ = tx.update(jnp.ones(3), tx.init(params), params)
    np.testing.assert_array_equal(
        np.signbit(optax.apply_updates(params, updates)), [True, False, False]
    )


def test_invalid_traced_weight_skips_the_window() -> None:
    """With dropping, it skips the micro-batch."""
    params = jnp.zeros(2)
    for weight in (-1.0, np.nan, np.inf):
        for on_overflow, applied in (
            ("skip_window", False),
            ("ignore", False),
            ("drop_micro_batch", True),
        ):
            tx = gradaccum.wrap(optax.sgd(1.0), steps=2, on_overflow=on_overflow)
            update = jax.jit(lambda g, s, w, tx=tx: tx.update(g, s, weight=w))
            _, state = update(params + 7, tx.init(params), weight)
            updates, state = update(params + 3, state, 1.0)
            assert bool(gradaccum_jax.result(state).applied) is applied
            np.testing.assert_array_equal(updates, params - 3 if applied else params)
