"""The wrapped transformation in a loop, alone and combined with other optax transformations."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("optax", reason="optax is not installed")
import jax
import jax.numpy as jnp
import optax
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


def one_update(inner: Any, params: Any = PARAMS, gradient: Any = MEAN) -> Any:
    return inner.update(gradient, inner.init(params), params)[0]


def assert_same(a: Any, b: Any) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for left, right in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-5)  # Adam's first step divides two nearly equal numbers.


def wrap(inner: Any, **options: Any) -> Any:
    return gradaccum.wrap(inner, **{"steps": 4, **options})


@pytest.mark.parametrize(
    ("outer", "inner"),
    [
        (wrap(optax.chain(optax.clip(0.5), optax.adam(0.1))), optax.chain(optax.clip(0.5), optax.adam(0.1))),
        (optax.chain(wrap(optax.adam(0.1)), optax.scale(2.0)), optax.chain(optax.adam(0.1), optax.scale(2.0))),
        (optax.named_chain(("acc", wrap(optax.adam(0.1)))), optax.adam(0.1)),
        (wrap(optax.inject_hyperparams(optax.adam)(learning_rate=0.1)), optax.adam(0.1)),
        (optax.apply_if_finite(wrap(optax.adam(0.1)), 3), optax.adam(0.1)),
        (wrap(optax.apply_if_finite(optax.adam(0.1), 3)), optax.adam(0.1)),
        (wrap(optax.masked(optax.sgd(0.1), {"a": True, "b": False})), optax.masked(optax.sgd(0.1), {"a": True, "b": False})),
        (
            optax.partition({"x": wrap(optax.adam(0.1)), "y": wrap(optax.sgd(0.3))}, {"a": "x", "b": "y"}),
            optax.partition({"x": optax.adam(0.1), "y": optax.sgd(0.3)}, {"a": "x", "b": "y"}),
        ),
        (wrap(optax.partition({"x": optax.adam(0.1), "y": optax.set_to_zero()}, {"a": "x", "b": "y"})), None),
        (wrap(optax.add_noise(0.1, 0.5, jax.random.key(0))), None),
    ],
    ids=["chain_in", "chain_out", "named", "inject", "finite_out", "finite_in", "masked", "partition_out", "partition_in", "key"],
)
def test_four_micro_batches_are_one_update(outer: Any, inner: Any) -> None:
    total, state = run(outer)
    assert all(int(found.optimizer_step) == 1 for found in gradaccum_jax.state.find_states(state))
    if inner is not None:
        assert_same(total, one_update(inner))


def test_masked_wrapper_accumulates_its_part() -> None:
    total, state = run(optax.masked(wrap(optax.sgd(0.1)), {"a": True, "b": False}))
    np.testing.assert_allclose(total["a"], -0.1 * MEAN["a"], rtol=1e-6)
    np.testing.assert_allclose(total["b"]["c"], 4 * MEAN["b"]["c"], rtol=1e-6)
    assert len(jax.tree.leaves(state.inner_state.accumulator)) == 1


def test_extra_arguments_reach_inner_optimizer() -> None:
    def update(gradients: Any, state: Any, params: Any = None, *, factor: Any, name: str = "", **rest: Any) -> Any:
        assert set(rest) == set()
        return jax.tree.map(lambda g: g * factor * len(name), gradients), state

    inner = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    tx = optax.chain(gradaccum.wrap(inner, steps=1), optax.scale(1.0))
    updates, state = tx.update(GRADS[0], tx.init(PARAMS), PARAMS, weight=3, factor=2.0, name="ab")
    assert_same(updates, jax.tree.map(lambda g: 4 * g, GRADS[0]))
    wrapped = gradaccum.wrap(inner, steps=None)
    _, state = wrapped.update(GRADS[0], wrapped.init(PARAMS), factor=2.0, name="ab")
    updates, _ = gradaccum_jax.flush(wrapped, state, factor=jnp.asarray(3.0), name="abc")
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


def test_empty_flush_and_discard_change_nothing() -> None:
    tx = wrap(optax.adam(0.1), loss_scale=gradaccum.DynamicLossScale())
    start = tx.init(PARAMS)
    updates, flushed = jax.jit(lambda s, p: gradaccum_jax.flush(tx, s, p))(start, PARAMS)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(updates))
    assert_same(flushed, start)
    assert not gradaccum_jax.result(flushed).closed
    _, state = tx.update(GRADS[1], start, PARAMS, weight=3)
    discarded = jax.jit(lambda s: gradaccum_jax.discard(tx, s))(state)
    assert_same(discarded, start)


def test_none_gradient_counts_as_zero() -> None:
    """The sum of the window so far is kept."""
    tx = gradaccum.wrap(optax.sgd(1.0), steps=2)
    state = tx.init(PARAMS)
    _, state = tx.update(GRADS[1], state, PARAMS)
    updates, _ = tx.update({"a": None, "b": None}, state, PARAMS)
    assert_same(updates, jax.tree.map(lambda g: -g / 2, GRADS[1]))


def test_none_and_integer_parameters_stay() -> None:
    tx = gradaccum.wrap(optax.sgd(1.0), steps=2)
    params = {"w": jnp.ones(2), "frozen": None, "count": jnp.asarray(3)}
    grads = {"w": jnp.ones(2), "frozen": None, "count": np.zeros((), jax.dtypes.float0)}
    state = tx.init(params)
    assert state.accumulator["frozen"] is None
    for _ in range(2):
        updates, state = tx.update(grads, state, params)
    assert updates["frozen"] is None
    moved = optax.apply_updates(params, updates)
    np.testing.assert_array_equal(moved["w"], [0.0, 0.0])
    assert moved["count"] == 3
    assert moved["count"].dtype == jnp.int32


@pytest.mark.parametrize(
    ("grads", "message"),
    [
        ({"a": jnp.ones(2)}, r"grads\['b'\]\['c'\]: expected a gradient"),
        ({**GRADS[0], "new": jnp.ones(2)}, r"grads\['new'\]: expected no gradient"),
        ({"a": jnp.ones(3), "b": GRADS[0]["b"]}, r"grads\['a'\]: .*shape \(2,\); got one of shape \(3,\)"),
        ({"a": jnp.ones(2), "b": {"c": jnp.ones((1, 1), jnp.int32)}}, r"grads\['b'\]\['c'\]: .*dtype float32; got one of dtype int32"),
        ({"a": jnp.ones(2, jnp.complex64), "b": GRADS[0]["b"]}, r"grads\['a'\]: .*complex64"),
        ({"a": "text", "b": GRADS[0]["b"]}, r"grads\['a'\]"),
    ],
    ids=["missing", "extra", "shape", "integers", "complex", "text"],
)
def test_foreign_gradients_are_refused(grads: Any, message: str) -> None:
    tx = wrap(optax.sgd(1.0))
    with pytest.raises(gradaccum.GradientError, match=message):
        tx.update(grads, tx.init(PARAMS), PARAMS)


def test_narrower_gradients_are_accepted() -> None:
    """Gradients wider than the sum are accepted where `accumulate_dtype` asks for the narrow sum."""
    half = jax.tree.map(lambda g: g.astype(jnp.float16), GRADS[1])
    run(wrap(optax.sgd(1.0)), grads=[half])
    low = jax.tree.map(lambda p: p.astype(jnp.bfloat16), PARAMS)
    narrow = wrap(optax.sgd(1.0), accumulate_dtype="bfloat16")
    _, state = run(narrow, params=low, grads=[GRADS[1]])
    assert state.accumulator["a"].dtype == jnp.bfloat16


@pytest.mark.parametrize("weight", [-1, float("nan"), float("inf"), True, "3", jnp.ones(2), np.ones((1,)), jnp.asarray(-2.0)])
def test_invalid_weights_are_refused(weight: Any) -> None:
    tx = wrap(optax.sgd(1.0))
    with pytest.raises(gradaccum.GradAccumError, match="weight"):
        tx.update(GRADS[0], tx.init(PARAMS), PARAMS, weight=weight)


def test_symbolic_batch_size_is_a_weight() -> None:
    tx = wrap(optax.sgd(1.0), steps=2)
    state = tx.init(PARAMS["a"])
    (batch,) = export.symbolic_shape("batch")
    kind = jax.ShapeDtypeStruct((batch, 2), jnp.float32)
    exported = export.export(jax.jit(lambda s, x: tx.update(x.sum(0), s, weight=x.shape[0])[1].weight))(state, kind)
    assert exported.call(state, jnp.ones((5, 2))) == 5


def test_scalar_array_is_a_step_count() -> None:
    for steps in (jnp.int32(2), np.int64(2), np.asarray(2)):
        _, state = run(gradaccum.wrap(optax.sgd(1.0), steps))
        assert state.optimizer_step == 2


def test_traced_weights_must_be_real_scalars() -> None:
    tx = wrap(optax.sgd(1.0))
    for weight in (jnp.ones(2), jnp.asarray(True), jnp.asarray(1j)):
        with pytest.raises(gradaccum.ArgumentTypeError, match="weight"):
            jax.jit(lambda s, w: tx.update(GRADS[0], s, weight=w))(tx.init(PARAMS), weight)


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: wrap(wrap(optax.sgd(1.0))), gradaccum.ArgumentTypeError),
        (lambda: wrap(optax.chain(wrap(optax.sgd(1.0)))).init(PARAMS), gradaccum.ArgumentTypeError),
        (lambda: wrap(optax.MultiSteps(optax.sgd(1.0), 2)), gradaccum.ArgumentTypeError),
        (lambda: wrap(gradaccum_jax.MultiSteps(optax.sgd(1.0), 2)), gradaccum.ArgumentTypeError),
        (lambda: wrap(gradaccum_jax.MultiSteps(optax.sgd(1.0), 2).gradient_transformation()), gradaccum.ArgumentTypeError),
        (lambda: wrap(optax.MultiSteps(optax.sgd(1.0), 2).gradient_transformation()), gradaccum.ArgumentTypeError),
        (
            lambda: wrap(optax.chain(gradaccum_jax.MultiSteps(optax.sgd(1.0), 2).gradient_transformation())).init(PARAMS),
            gradaccum.ArgumentTypeError,
        ),
        (lambda: gradaccum_jax.MultiSteps(optax.chain(wrap(optax.sgd(1.0))), 2).init(PARAMS), gradaccum.ArgumentTypeError),
        (lambda: jax.jit(lambda steps: gradaccum.wrap(optax.sgd(1.0), steps).init(PARAMS))(4), gradaccum.ArgumentTypeError),
        (lambda: jax.jit(lambda norm: wrap(optax.sgd(1.0), clip_norm=norm).init(PARAMS))(1.0), gradaccum.ArgumentTypeError),
        (lambda: gradaccum.wrap(optax.sgd(1.0)), gradaccum.ArgumentTypeError),
        (lambda: wrap(optax.sgd(1.0), accumulate_dtype="no such"), gradaccum.ArgumentValueError),
        (lambda: wrap(optax.sgd(1.0), accumulate_dtype="int32"), gradaccum.ArgumentValueError),
        (lambda: wrap(optax.sgd(1.0), accumulate_dtype="float64").init(PARAMS), gradaccum.ArgumentValueError),
        (lambda: wrap(optax.sgd(1.0), control_flow="if"), gradaccum.ArgumentValueError),
        (lambda: wrap(optax.sgd(1.0), colour="red"), gradaccum.ArgumentTypeError),
        (lambda: wrap(optax.sgd(1.0)).update(GRADS[0], optax.sgd(1.0).init(PARAMS)), gradaccum.ArgumentTypeError),
        (lambda: gradaccum_jax.flush(optax.sgd(1.0), wrap(optax.sgd(1.0)).init(PARAMS)), gradaccum.ArgumentTypeError),
        (lambda: gradaccum_jax.discard(wrap(optax.sgd(1.0)), ()), gradaccum.ArgumentTypeError),
        (lambda: gradaccum_jax.result(()), gradaccum.ArgumentTypeError),
    ],
)
def test_misuse_is_refused(make: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        make()


def test_loss_scale_is_undone_at_close() -> None:
    tx = gradaccum.wrap(optax.sgd(1.0), steps=2, loss_scale=1024)
    params = {"w": jnp.asarray([2.0, 3.0])}
    state = tx.init(params)
    assert gradaccum_jax.scale_loss(jnp.asarray(2.0, jnp.float16), state).dtype == jnp.float32
    for _ in range(2):
        grads = jax.grad(lambda p, s: gradaccum_jax.scale_loss(jnp.sum(p["w"] ** 2), s))(params, state)
        np.testing.assert_array_equal(grads["w"], 1024 * 2 * params["w"])
        updates, state = tx.update(grads, state, params)
    np.testing.assert_array_equal(updates["w"], -2 * params["w"])
    np.testing.assert_allclose(gradaccum_jax.result(state).grad_norm, np.sqrt(4**2 + 6**2), rtol=1e-6)


def test_tree_map_params_sees_the_accumulator() -> None:
    tx = wrap(optax.adam(0.1))
    marked = optax.tree_map_params(tx, lambda leaf: "param", tx.init(PARAMS), transform_non_params=lambda leaf: "other")
    assert set(jax.tree.leaves(marked.accumulator)) == {"param"}
    assert marked.micro_step == "other"


def test_public_names() -> None:
    assert sorted(gradaccum_jax.__all__) == gradaccum_jax.__all__
    assert all(hasattr(gradaccum_jax, name) for name in gradaccum_jax.__all__)
    assert gradaccum.load_backend("jax") is gradaccum_jax.backend
