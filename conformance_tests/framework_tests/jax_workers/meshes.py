"""Meshes of several axes; cross-entropy over class shards."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradaccum
import gradaccum_jax
from conformance_tests.framework_tests.jax_versions import on_mesh
from conformance_tests.framework_tests.jax_workers.common import P, over
from conformance_tests.framework_tests.jax_workers.windows import collectives
from gradaccum_jax import sharded_cross_entropy, verify_loss_scaling

X = np.random.default_rng(30).normal(size=(3, 8, 6))
START = {"w": np.ones((6, 4)), "b": np.zeros(4)}


def loss_fn(params: Any, x: Any) -> Any:
    return jnp.square(x @ params["w"] + params["b"]).mean()


def train(mesh: Any, axis: Any, params: Any) -> tuple[Any, str]:
    """One window of three micro-batches: the parameters after it, and the optimized
    program.
    """
    tx = gradaccum.wrap(optax.adam(0.1), steps=3, clip_norm=0.1, axis_name=axis)

    def step(params: Any, state: Any, x: Any) -> Any:
        updates, state = tx.update(jax.grad(loss_fn)(params, x), state, params)
        return optax.apply_updates(params, updates), state

    state, run = over(tx.init, mesh, axis)(params), over(step, mesh, axis)
    for x in X:
        params, state = run(params, state, x)
    assert gradaccum_jax.result(state).optimizer_step == 1
    return params, run.lower(params, state, X[0]).compile().as_text()


def require_large_batch(params: Any) -> None:
    tx = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.1))
    start = jax.tree.map(jnp.asarray, START)
    updates, _ = tx.update(
        jax.grad(loss_fn)(start, X.reshape(-1, 6)), tx.init(start), start
    )
    expected = optax.apply_updates(start, updates)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(np.asarray(a), b, rtol=1e-10),
        params,
        expected,
    )


def devices(*shape: int) -> Any:
    return np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)


def two_axes() -> None:
    mesh = jax.sharding.Mesh(devices(2, 2), ("pod", "data"))
    params, text = train(
        mesh,
        ("pod", "data"),
        jax.device_put(START, jax.sharding.NamedSharding(mesh, P())),
    )
    require_large_batch(params)
    assert collectives(text) == ([], ["all-reduce"])


def axis_for_the_compiler() -> None:
    """Parameters are sharded over an axis that does not share the window: they stay
    so.
    """
    mesh = jax.sharding.Mesh(devices(2, 2), ("data", "model"))
    shapes = {"w": P(None, "model"), "b": P("model")}
    params, _ = train(
        mesh,
        "data",
        {
            name: jax.device_put(leaf, jax.sharding.NamedSharding(mesh, shapes[name]))
            for name, leaf in START.items()
        },
    )
    require_large_batch(params)
    assert params["w"].sharding.shard_shape(params["w"].shape) == (6, 2), params[
        "w"
    ].sharding


def explicit_axes() -> None:
    kinds = jax.sharding.AxisType
    require_large_batch(
        train(
            jax.make_mesh(
                (4, 1), ("data", "model"), axis_types=(kinds.Explicit, kinds.Auto)
            ),
            "data",
            START,
        )[0]
    )
    mesh = jax.make_mesh((4,), ("data",), axis_types=(kinds.Explicit,))
    require_large_batch(train(mesh, "data", START)[0])
    with on_mesh(mesh):
        params, _ = train(
            mesh, "data", jax.device_put(START, jax.sharding.NamedSharding(mesh, P()))
        )
    require_large_batch(params)
    mesh, shapes = (
        jax.make_mesh((2, 2), ("data", "model"), axis_types=(kinds.Explicit,) * 2),
        {"w": P(None, "model"), "b": P("model")},
    )
    given = {
        name: jax.device_put(leaf, jax.sharding.NamedSharding(mesh, shapes[name]))
        for name, leaf in START.items()
    }
    params, _ = train(mesh, "data", given)
    require_large_batch(params)
    if (
        jax.__version_info__ >= (0, 10)
        # jax.shard_map of JAX 0.7 gathers what is sharded along an explicit axis that
        # it leaves alone
    ):
        assert params["w"].sharding.shard_shape(params["w"].shape) == (6, 2), params[
            "w"
        ].sharding


MESH = jax.sharding.Mesh(np.array(jax.devices()), ("model",))
CLASSES = 8
SHARDED, WHOLE = P(None, "model"), P()


def sharded(
    function: Callable[..., Any],
    mesh: Any = MESH,
    specs: Any = (SHARDED, WHOLE),
    out: Any = WHOLE,
    **options: Any,
) -> Any:
    return jax.jit(
        jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=out, **options)
    )


def loss_of(logits: Any, labels: Any, **options: Any) -> Any:
    return sharded(
        lambda x, y: sharded_cross_entropy(x, y, axis_name="model", **options)
    )(logits, labels)


def inside_and_around() -> None:
    """`jax.grad` in the mapped function and around it, of features and class weights,
    with items along another axis of the mesh.
    """
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 2), ("data", "model"))
    rng = np.random.default_rng(1)
    features, weights = (
        jnp.asarray(rng.standard_normal(shape)) for shape in ((4, 3), (CLASSES, 3))
    )
    labels = jnp.asarray([1, 7, 3, 0])
    specs = (P("data"), P("model"), P("data"))

    def loss(x: Any, w: Any, y: Any) -> Any:
        return jax.lax.pmean(
            sharded_cross_entropy(x @ w.T, y, axis_name="model"), "data"
        )

    def dense(x: Any, w: Any) -> Any:
        return optax.softmax_cross_entropy_with_integer_labels(x @ w.T, labels).mean()

    expected = jax.grad(dense, argnums=(0, 1))(features, weights)
    inside = sharded(jax.grad(loss, argnums=(0, 1)), mesh, specs, specs[:2])
    around = jax.grad(sharded(loss, mesh, specs), argnums=(0, 1))
    for made in (
        jax.jit(inside)(features, weights, labels),
        jax.jit(around)(features, weights, labels),
    ):
        for one, other in zip(made, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-13)


def two_reductions_and_no_copy() -> None:
    """Two all-reduces with or without the gradient; a million classes on each device in
    a float32 array or two beside the gradient.
    """
    items, held = 4, 10**6
    labels = jax.ShapeDtypeStruct((items,), jnp.int32)
    for dtype, smoothing in (
        (jnp.float32, 0.0),
        (jnp.float32, 0.1),
        (jnp.bfloat16, 0.0),
    ):
        logits = jax.ShapeDtypeStruct((items, 4 * held), dtype)
        forward = sharded(
            lambda x, y, s=smoothing: sharded_cross_entropy(
                x, y, axis_name="model", label_smoothing=s
            )
        )
        both = jax.jit(jax.value_and_grad(forward)).lower(logits, labels).compile()
        for program in (jax.jit(forward).lower(logits, labels).compile(), both):
            assert len(re.findall(r" all-reduce(?:-start)?\(", program.as_text())) == 2
            assert not re.search(
                r"all-gather|all-to-all|collective-permute", program.as_text()
            )
        arrays = both.memory_analysis().temp_size_in_bytes / (4 * items * held)
        assert arrays < 0.1 + (dtype != jnp.float32) + (smoothing > 0), (
            dtype,
            smoothing,
            arrays,
        )


def sharded_loss_is_linear() -> None:
    labels = jnp.asarray([0, 2, -100, 4, 1, 3])
    logits = jnp.asarray(np.random.default_rng(0).standard_normal((6, CLASSES)))
    report = verify_loss_scaling(
        lambda x: loss_of(2 * x, labels, label_smoothing=0.1, num_classes=5), logits
    )
    assert report == (True, {"params": 0.0}, ()), report


def labels_of_any_integers() -> None:
    logits = jnp.zeros((2, CLASSES), jnp.float32)
    with jax.numpy_dtype_promotion("strict"):
        loss_of(
            logits, jnp.asarray([0, 1], jnp.int64), label_smoothing=0.1, num_classes=5
        )
    loss_of(logits, jnp.asarray([0, 1], jnp.uint8))


def sharded_loss_refusals() -> None:
    logits, labels = jnp.zeros((2, CLASSES), jnp.float32), jnp.asarray([0, 1])
    with pytest.raises(gradaccum.UsageError, match=r"^axis_name: .*check_vma=True"):
        sharded(
            lambda x, y: sharded_cross_entropy(x, y, axis_name="model"), check_vma=False
        )(logits, labels)
    with pytest.raises(gradaccum.UsageError, match=r"^axis_name: .*'data'"):
        sharded(lambda x, y: sharded_cross_entropy(x, y, axis_name="data"))(
            logits, labels
        )
    with pytest.raises(gradaccum.UsageError, match=r"^logits_shard: .*replicated"):
        sharded(
            lambda x, y: sharded_cross_entropy(x, y, axis_name="model"),
            specs=(WHOLE, WHOLE),
        )(logits, labels)
    for classes, kind in (
        (0, gradaccum.ArgumentValueError),
        (9, gradaccum.ArgumentValueError),
        (7.0, gradaccum.ArgumentTypeError),
    ):
        with pytest.raises(kind, match=r"^num_classes: expected an int in \[1, 8\]"):
            loss_of(logits, labels, num_classes=classes)
