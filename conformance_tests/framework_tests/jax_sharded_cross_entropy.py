"""Cross-entropy over class shards on four host devices against the dense loss: run by `test_jax_sharded_cross_entropy`.

A process of its own: the number of devices is fixed when JAX starts.
"""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Callable
from functools import cache
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradaccum
from gradaccum_jax import sharded_cross_entropy, verify_loss_scaling
from gradaccum_jax.workers import cross_entropy

jax.config.update("jax_enable_x64", True)
P = jax.sharding.PartitionSpec
MESH = jax.sharding.Mesh(np.array(jax.devices()), ("model",))
SHARDED, WHOLE = P(None, "model"), P()
ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
ITEMS, CLASSES = 6, 8
UPSTREAM = 2.0**10
LABELS = jnp.asarray([0, 2, -100, 4, 1, 3], jnp.int32)
OPTIONS: list[dict[str, Any]] = [
    {"reduction": reduction, "label_smoothing": smoothing, "num_classes": classes}
    for reduction, smoothing, classes in itertools.product(("mean", "sum", "none"), (0.0, 0.1, 1.0), (None, 5))
] + [{"ignore_index": 2}]


def sharded(function: Callable[..., Any], mesh: Any = MESH, specs: Any = (SHARDED, WHOLE), out: Any = WHOLE, **options: Any) -> Any:
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=out, **options))


@cache
def program(**options: Any) -> Any:
    return sharded(lambda x, y: sharded_cross_entropy(x, y, axis_name="model", **options))


def loss_of(logits: Any, labels: Any, **options: Any) -> Any:
    return program(**options)(logits, labels)


def dense(
    logits: Any,
    labels: Any,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    num_classes: int | None = None,
    ignore_index: int = -100,
) -> Any:
    """With `optax`, in the dtype that is computed in."""
    logits = logits[..., :num_classes].astype(jnp.promote_types(logits.dtype, jnp.float32))
    kept = labels != ignore_index
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.where(kept, labels, 0))
    evenly = -jax.nn.log_softmax(logits).mean(-1)
    losses = jnp.where(kept, (1 - label_smoothing) * losses + label_smoothing * evenly, 0)
    return {"none": losses, "sum": losses.sum(), "mean": losses.sum() / kept.sum()}[reduction]


def upstream(loss: Any) -> Any:
    return (UPSTREAM * jnp.linspace(1, 2, loss.size)).astype(loss.dtype).reshape(loss.shape)


def everything(function: Callable[..., Any], logits: Any, labels: Any, chosen: list[dict[str, Any]]) -> list[tuple[Any, Any]]:
    """The loss and the gradient for each of the options, in one program."""
    made = []
    for options in chosen:
        y = jnp.where(labels == -100, options.get("ignore_index", -100), labels)
        loss, pull_back = jax.vjp(lambda x, y=y, options=options: function(x, y, **options), logits)
        made.append((loss, pull_back(upstream(loss))[0]))
    return made


def bound(wide: Any, size: float) -> float:
    """How far two computations may be apart, each with so many roundings of terms of so large a `size`.

    A logit less the maximum is rounded once, and the exponential turns that into a relative error of as many roundings as the difference is
    large, at most 24; then the additions over classes and items, and eight operations for each item.
    """
    return 2 * (24 + CLASSES + ITEMS + 8) * ROUNDOFF[wide.name] * size


def check_equal(dtype: str, offset: float) -> None:
    logits = (3 * np.random.default_rng(0).standard_normal((ITEMS, CLASSES)) + offset).astype(jnp.dtype(dtype))
    wide = jnp.promote_types(logits.dtype, jnp.float32)
    chosen = OPTIONS if (dtype, offset) == ("float64", 0.0) else OPTIONS[::6]
    mine = jax.jit(lambda x, y: everything(loss_of, x, y, chosen))(jnp.asarray(logits), LABELS)
    true = jax.jit(lambda x, y: everything(dense, x, y, chosen))(jnp.asarray(logits, wide), LABELS)
    for options, (loss, gradient), (dense_loss, dense_gradient) in zip(chosen, mine, true, strict=True):
        assert (loss.dtype, gradient.dtype) == (wide, logits.dtype)
        assert loss.shape == dense_loss.shape
        np.testing.assert_allclose(loss, dense_loss, rtol=0, atol=bound(wide, float(dense_loss.max()) + 24) * ITEMS, err_msg=str(options))
        allowed = bound(wide, 2 * UPSTREAM) + ROUNDOFF[dtype] * np.abs(dense_gradient)
        assert (np.abs(np.asarray(gradient, wide) - dense_gradient) <= allowed).all(), (dtype, options)
        classes = options.get("num_classes")
        assert classes is None or not np.any(gradient[:, classes:]), "padding has a gradient"


def check_inside_and_around() -> None:
    """`jax.grad` in the mapped function and around it, of features and class weights, with items along another axis of the mesh."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 2), ("data", "model"))
    rng = np.random.default_rng(1)
    features, weights = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((4, 3), (CLASSES, 3)))
    labels = jnp.asarray([1, 7, 3, 0])
    specs = (P("data"), P("model"), P("data"))

    def loss(x: Any, w: Any, y: Any) -> Any:
        return jax.lax.pmean(sharded_cross_entropy(x @ w.T, y, axis_name="model"), "data")

    expected = jax.grad(lambda x, w: dense(x @ w.T, labels), argnums=(0, 1))(features, weights)
    inside = sharded(jax.grad(loss, argnums=(0, 1)), mesh, specs, specs[:2])
    around = jax.grad(sharded(loss, mesh, specs), argnums=(0, 1))
    for made in (jax.jit(inside)(features, weights, labels), jax.jit(around)(features, weights, labels)):
        for one, other in zip(made, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=bound(jnp.dtype("float32"), 4.0))


def check_program() -> None:
    """Two all-reduces with or without the gradient; a million classes on each device in a float32 array or two beside the gradient."""
    items, held = 4, 10**6
    labels = jax.ShapeDtypeStruct((items,), jnp.int32)
    for dtype, smoothing in ((jnp.float32, 0.0), (jnp.float32, 0.1), (jnp.bfloat16, 0.0)):
        logits = jax.ShapeDtypeStruct((items, 4 * held), dtype)
        forward = sharded(lambda x, y, s=smoothing: sharded_cross_entropy(x, y, axis_name="model", label_smoothing=s))
        both = jax.jit(jax.value_and_grad(forward)).lower(logits, labels).compile()
        for program in (jax.jit(forward).lower(logits, labels).compile(), both):
            assert len(re.findall(r" all-reduce(?:-start)?\(", program.as_text())) == 2
            assert not re.search(r"all-gather|all-to-all|collective-permute", program.as_text())
        arrays = both.memory_analysis().temp_size_in_bytes / (4 * items * held)
        assert arrays < 0.1 + (dtype != jnp.float32) + (smoothing > 0), (dtype, smoothing, arrays)


@jax.custom_vjp
def ignores_upstream(losses: Any, logits: Any, index: Any) -> Any:
    """The mistake that is often made: right for a loss that is the last call, and wrong for a scaled one."""
    return losses


ignores_upstream.defvjp(
    lambda losses, logits, index: (losses, (losses, logits, index)),
    lambda kept, cotangent: (jnp.zeros_like(kept[0]), jax.nn.softmax(kept[1]), None),
)


def check_linearity() -> None:
    logits = jnp.asarray(np.random.default_rng(0).standard_normal((ITEMS, CLASSES)), jnp.float32)
    for options in ({}, {"label_smoothing": 0.1, "num_classes": 5}):
        report = verify_loss_scaling(lambda x, o=options: loss_of(2 * x, LABELS, **o), logits)
        assert report == (True, {"params": 0.0}, ()), report

    def deaf(x: Any, y: Any) -> Any:
        return jax.lax.psum(ignores_upstream(x.sum(-1), x, y), "model").mean()

    report = verify_loss_scaling(lambda x: sharded(deaf)(2 * x, LABELS), logits)
    assert (report.linear, report.culprits) == (False, ()), report
    rule = cross_entropy.class_sharded_losses.bwd
    program.cache_clear()
    try:
        cross_entropy.class_sharded_losses.defvjp(
            cross_entropy._forward, lambda s, u, saved, cotangent: rule(s, u, saved, jnp.ones_like(cotangent))
        )
        report = verify_loss_scaling(lambda x: loss_of(2 * x, LABELS), logits)
    finally:
        program.cache_clear()
        cross_entropy.class_sharded_losses.defvjp(cross_entropy._forward, rule)
    assert (report.linear, report.culprits) == (False, ()), report


def check_accumulation() -> None:
    """A window of two micro-batches of unequal numbers of items, with a loss scale, is the large batch."""
    weights = jnp.asarray(np.random.default_rng(0).standard_normal((ITEMS, CLASSES)), jnp.float32)
    tx = gradaccum.wrap(optax.sgd(1.0), steps=2, loss_scale=gradaccum.StaticLossScale(1024.0))
    state = tx.init(weights)
    for rows in (slice(0, 3), slice(3, ITEMS)):
        part = jax.grad(lambda x, y=LABELS[rows]: 1024.0 * loss_of(x, y))(weights[rows])
        gradients = jnp.zeros_like(weights).at[rows].set(part)
        updates, state = tx.update(gradients, state, weights, weight=float((LABELS[rows] >= 0).sum()))
    np.testing.assert_allclose(updates, -jax.grad(dense)(weights, LABELS), rtol=0, atol=bound(jnp.dtype("float32"), 2.0))


def check_extremes() -> None:
    """Labels that are no class or differ between devices, nothing but ignored ones, masked logits, and a probability of almost one."""
    logits = jnp.zeros((2, CLASSES), jnp.float32)
    for wrong in (jnp.asarray([0, CLASSES]), jnp.asarray([0, -1])):
        loss, gradient = jax.value_and_grad(lambda x, y=wrong: loss_of(x, y, reduction="none").sum())(logits)
        assert math.isnan(loss)
        assert np.isnan(gradient[1]).all()
        assert np.isfinite(gradient[0]).all()
    each = jnp.asarray([[0, 1], [2, 3], [4, 5], [6, 7]])
    own = sharded(lambda x, y: sharded_cross_entropy(x, y[0], axis_name="model"), specs=(SHARDED, P("model")))
    assert math.isnan(own(logits, each)), "each device has labels of its own"
    assert math.isclose(own(logits, jnp.broadcast_to(each[0], (4, 2))), math.log(CLASSES), rel_tol=1e-6)
    loss, gradient = jax.value_and_grad(loss_of)(logits, jnp.asarray([-100, -100]))
    assert math.isnan(loss)
    assert not gradient.any()
    masked = logits.at[:, 3:].set(-jnp.inf)
    loss, gradient = jax.value_and_grad(loss_of)(masked, jnp.asarray([0, 1]))
    assert math.isclose(loss, math.log(3), rel_tol=1e-6)
    assert np.isfinite(gradient).all()
    sure = jnp.zeros((1, CLASSES), jnp.bfloat16).at[0, 0].set(12)
    gradient = jax.grad(loss_of)(sure, jnp.asarray([0]))
    exact = jax.nn.softmax(sure.astype(jnp.float64)) - jax.nn.one_hot(jnp.asarray([0]), CLASSES)
    np.testing.assert_allclose(gradient.astype(jnp.float64), exact, rtol=2.0**-8, atol=(CLASSES + 1) * 2.0**-24)
    with jax.numpy_dtype_promotion("strict"):
        loss_of(logits, jnp.asarray([0, 1], jnp.int64), label_smoothing=0.1, num_classes=5)
    jax.jit(lambda x: loss_of(x, jnp.asarray([0, 1], jnp.uint8)))(logits)


def check_refusals() -> None:
    logits, labels = jnp.zeros((2, CLASSES), jnp.float32), jnp.asarray([0, 1])
    with pytest.raises(gradaccum.UsageError, match=r"^axis_name: .*check_vma=True"):
        sharded(lambda x, y: sharded_cross_entropy(x, y, axis_name="model"), check_vma=False)(logits, labels)
    with pytest.raises(gradaccum.UsageError, match=r"^axis_name: .*'data'"):
        sharded(lambda x, y: sharded_cross_entropy(x, y, axis_name="data"))(logits, labels)
    with pytest.raises(gradaccum.UsageError, match=r"^logits_shard: .*replicated"):
        sharded(lambda x, y: sharded_cross_entropy(x, y, axis_name="model"), specs=(WHOLE, WHOLE))(logits, labels)
    for classes, kind in ((0, gradaccum.ArgumentValueError), (9, gradaccum.ArgumentValueError), (7.0, gradaccum.ArgumentTypeError)):
        with pytest.raises(kind, match=r"^num_classes: expected an int in \[1, 8\]"):
            loss_of(logits, labels, num_classes=classes)


if __name__ == "__main__":
    for dtype, offset in (("float64", 0.0), ("float32", 1e4), ("float16", 0.0), ("bfloat16", 0.0)):
        check_equal(dtype, offset)
    check_inside_and_around()
    check_program()
    check_linearity()
    check_accumulation()
    check_extremes()
    check_refusals()
