"""The layered window is the usual one to the last bit: draws, weights, tied and frozen
parameters, masters; what it keeps in memory.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradaccum
import gradaccum_jax
from conformance_tests.framework_tests.jax_large_batch import in_float64  # noqa: F401

LAYERS, WIDTH = 4, 8
RNG = np.random.default_rng(0)
Tree = Any


def drawn(*shape: int) -> Any:
    return RNG.normal(size=shape) / np.sqrt(shape[-1])


# An autoencoder, whose first and last matrix are one. Beside the activations it passes
# on which items count; they have no gradient, and the layers' numbers are integers.


def prelude(own: Tree, tied: Tree, x: Any, counts: Any, key: Any) -> Any:
    return {"x": x.astype(tied["w"].dtype) @ tied["w"] + own["bias"], "counts": counts}


def block(own: Tree, given: Any, x: Any, counts: Any, key: Any) -> Any:
    made = jnp.tanh(given["x"] @ own["w"]) * own["scale"]
    return {
        **given,
        "x": given["x"] + made * jax.random.bernoulli(key, 0.8, made.shape),
    }


def loss_fn(own: Tree, tied: Tree, given: Any, x: Any, counts: Any, key: Any) -> Any:
    made = given["x"] * own["scale"] @ tied["w"].T
    errors, counts = jnp.sum((made.astype(x.dtype) - x) ** 2, -1), given["counts"]
    loss = jnp.sum(counts * errors) / jnp.maximum(counts.sum(), 1)
    return loss, {"counted": counts.sum(), "largest": errors.max()}


def autoencoder(
    layers: int = LAYERS, width: int = WIDTH, dtype: Any = np.float64
) -> Tree:
    stacked = {"w": drawn(layers, width, width), "scale": np.ones((layers, width))}
    first, last, tied = (
        {"bias": drawn(width)},
        {"scale": np.ones(width)},
        drawn(3, width),
    )
    params = jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), (first, stacked, last))
    params[1]["number"] = jnp.arange(layers, dtype=jnp.int32)
    return (*params, {"w": jnp.asarray(tied, dtype)})


def whole(params: Tree, x: Any, counts: Any, key: Any) -> Any:
    """The same model in the usual order."""
    first, layers, last, tied = params

    @jax.checkpoint
    def body(given: Any, own: Tree) -> Any:
        own_key = jax.random.fold_in(key, own["number"] + 1)
        return block(own, given, x, counts, own_key), None

    given = jax.lax.scan(body, prelude(first, tied, x, counts, None), layers)[0]
    return loss_fn(last, tied, given, x, counts, None)


OPTIONS: dict[str, Any] = {
    "has_aux": True,
    "steps": 4,
    "weight": lambda x, counts, key: counts.sum(),
    "aux": {"counted": "sum", "largest": "max"},
}


def wrap(inner: Any, **options: Any) -> Any:
    return gradaccum.wrap(inner, steps=None, **options)


def layered(tx: Any, layer: Any = block, tied: Tree = None, **options: Any) -> Any:
    """With `tied`, these are constants and no parameters."""
    first, last = (
        (prelude, loss_fn)
        if tied is None
        else (
            lambda own, *given: prelude(own, tied, *given),
            lambda own, *given: loss_fn(own, tied, *given),
        )
    )
    return gradaccum_jax.layered_value_and_update(
        first, layer, last, tx, **OPTIONS | options
    )


def usual(tx: Any, tied: Tree = None, **options: Any) -> Any:
    constant = () if tied is None else (tied,)

    def in_order(params: Tree, *batch: Any) -> Any:
        return whole((*params, *constant), *batch)

    call = gradaccum_jax.value_and_update(in_order, tx, **OPTIONS | options)

    def step(params: Tree, state: Tree, *batch: Any) -> Any:
        loss, updates, state = call(params, state, *batch)
        return loss, gradaccum_jax.apply_updates(params, updates, state), state

    return step


def two_windows(step: Any, params: Tree, state: Tree, *batch: Any) -> Any:
    """Parameters, state, loss and aux."""
    step = jax.jit(step)
    for number in range(2):
        loss, params, state = step(params, state, *batch, jax.random.key(number))
    return params, state._replace(accumulator=None), loss


def require_close(made: Any, wanted: Any, most: float = 1e-12) -> None:
    for a, b in zip(*map(jax.tree.leaves, (made, wanted)), strict=True):
        np.testing.assert_allclose(np.float64(a), np.float64(b), rtol=most, atol=most)


def frozen() -> Any:
    """An adamw that decays matrices alone; two arrays stand still."""
    layers = {"w": "moves", "scale": "still", "number": "moves"}
    decays = optax.adamw(
        1e-2,
        weight_decay=0.1,
        mask=lambda params: jax.tree.map(lambda leaf: leaf.ndim > 2, params),
    )
    return optax.transforms.partition(
        {"moves": decays, "still": optax.set_to_zero()},
        ({"bias": "still"}, layers, "moves", "moves"),
    )


CASES: dict[str, Any] = {
    "by layer": (frozen, {"on_overflow": "ignore", "loss_scale": 8.0}, "keep"),
    "by layer, borders recomputed": (
        lambda: optax.lion(1e-2),
        {"on_overflow": "ignore", "reduction": "sum_per_item"},
        "recompute",
    ),
    "kept and clipped": (
        lambda: optax.adamw(1e-2),
        {"clip_norm": 0.1, "loss_scale": gradaccum.DynamicLossScale(8.0)},
        "keep",
    ),
}


@pytest.mark.every_mode
@pytest.mark.parametrize("case", CASES)
def test_numbers_of_the_usual_window(case: str) -> None:
    """The two parts of tied parameters are added up in another order. No item of the
    second micro-batch counts.
    """
    inner, options, borders = CASES[case]
    tx, params = wrap(inner(), **options), autoencoder()
    batch = drawn(8, 3), np.array([1, 1, 0, 0, 1, 0, 1, 1.0])
    step = layered(tx, borders=borders)
    made = two_windows(step, params, step.init(params), *batch)
    require_close(made, two_windows(usual(tx), params, tx.init(params), *batch))
    assert gradaccum_jax.result(made[1]).optimizer_step == 2


BITS: dict[str, Any] = {
    "by layer": ({"on_overflow": "ignore"}, "keep", jnp.float64),
    "kept": ({}, "recompute", jnp.float64),
    "masters by layer": (
        {"on_overflow": "ignore", "master_weights": True},
        "keep",
        jnp.bfloat16,
    ),
}


@pytest.mark.every_mode
@pytest.mark.parametrize("case", BITS)
def test_same_bits_where_the_order_is_the_same(case: str) -> None:
    """Nothing is tied. A short last micro-batch; moments and counters too. XLA rounds
    half precision where it likes.
    """
    options, borders, dtype = BITS[case]
    *params, tied = autoencoder(dtype=dtype)
    tx, batch = wrap(optax.adamw(1e-2), **options), (drawn(11, 3), np.ones(11))
    step = layered(tx, tied=tied, borders=borders)
    made = two_windows(step, tuple(params), step.init(tuple(params)), *batch)
    start = tuple(params), tx.init(tuple(params))
    exact = 0 if jax.__version_info__[:2] == (0, 7) else 1e-12
    require_close(
        made,
        two_windows(usual(tx, tied), *start, *batch),
        1e-2 if dtype == jnp.bfloat16 else exact,
    )


def test_open_window_belongs_to_the_update() -> None:
    """What it holds counts in the window that the call closes. All may be skipped."""
    params, x, key = autoencoder(), drawn(12, 3), jax.random.key(0)
    tx, counts = wrap(optax.sgd(0.5), skip_norm=1e3), np.ones(12)
    gradient = jax.grad(whole, has_aux=True, allow_int=True)
    first = gradient(params, x[8:], counts[8:], key)[0]
    _, state = tx.update(first, tx.init(params), params, weight=4.0)
    step = layered(tx, steps=1)
    _, made, state = step(params, state, x[:8], counts[:8], key)
    own = jax.random.fold_in(key, 0)
    second = gradient(params, x[:8], counts[:8], own)[0]
    wanted = [
        p - 0.5 * (4 * a + 8 * b) / 12 if a.dtype == np.float64 else p
        for p, a, b in zip(*map(jax.tree.leaves, (params, first, second)), strict=True)
    ]
    require_close(made, wanted)
    assert gradaccum_jax.result(state).applied
    tx = wrap(optax.sgd(0.5), skip_norm=1e-9)
    _, same, state = layered(tx)(params, tx.init(params), x, counts, key)
    require_close(same, params, 0)
    assert gradaccum_jax.result(state).skipped


def test_memory_is_that_of_a_layer() -> None:
    """The usual window's sums grow with the layers; here the activations at the borders
    do.
    """
    layers, width = 16, 128
    tx = wrap(optax.adamw(1e-2), on_overflow="ignore")
    params = autoencoder(layers, width, jnp.float32)
    batch = np.ones((16, 3), np.float32), np.ones(16, np.float32), jax.random.key(0)

    def needed(step: Any, state: Tree) -> Any:
        """Beside the donated parameters and moments."""
        call = jax.jit(step, donate_argnums=(0, 1)).lower(params, state, *batch)
        held = call.compile().memory_analysis()
        kept = jax.tree.leaves((params, state._replace(accumulator=None)))
        return (
            held.argument_size_in_bytes
            + held.output_size_in_bytes
            - held.alias_size_in_bytes
            + held.temp_size_in_bytes
            - sum(leaf.nbytes for leaf in kept)
        )

    step, border = layered(tx, steps=16), 4 * 16 * width
    assert needed(step, step.init(params)) < 28 * width**2 + 3 * layers * border
    assert needed(usual(tx, steps=16), tx.init(params)) > layers * 4 * width**2


INSEPARABLE = {
    "whole tree": lambda: optax.chain(optax.clip_by_global_norm(1e9), optax.sgd(0.1)),
    "whole array": lambda: optax.lamb(1e-2),
    "after NaN is taken out": lambda: optax.chain(
        optax.zero_nans(), optax.clip_by_global_norm(1.0), optax.sgd(0.1)
    ),
    "state of the whole array": lambda: optax.novograd(0.1),
    "state without the layers' axis": optax.scale_by_factored_rms,
    "a little of the whole array": lambda: optax.stateless(
        lambda updates, params: jax.tree.map(
            lambda leaf: leaf * (1 + 2e-5 * jnp.sin(leaf.mean())), updates
        )
    ),
}
PARAMS = autoencoder(3, 8, np.float32)
BATCH = np.ones((8, 3), np.float32), np.ones(8, np.float32), jax.random.key(0)
SGD = wrap(optax.sgd(0.1))


@pytest.mark.every_mode
@pytest.mark.parametrize("kind", INSEPARABLE)
def test_optimizers_that_look_at_several_layers_are_refused(kind: str) -> None:
    step = layered(wrap(INSEPARABLE[kind](), on_overflow="ignore"))
    words = r"tx: expected an inner optimizer that updates each array and each layer by"
    for dtype in (jnp.float32, jnp.bfloat16):
        params = autoencoder(3, 8, dtype)
        with pytest.raises(gradaccum.UsageError, match=f"^{words} itself"):
            jax.eval_shape(step, params, step.init(params), *BATCH)


def run(params: Tree = PARAMS, layer: Any = block, **changed: Any) -> Any:
    step = layered(SGD, layer)
    return step(PARAMS, step.init(params)._replace(**changed), *BATCH)


def with_traced_rate(rate: Any) -> Any:
    step = layered(wrap(optax.sgd(rate), on_overflow="ignore"))
    return step(PARAMS, step.init(PARAMS), *BATCH)


def doubled(own: Tree, given: Any, *batch: Any) -> Any:
    return {**given, "x": jnp.concatenate([given["x"]] * 2, 1)}


REFUSED: dict[str, Any] = {
    "bare optimizer": (lambda: layered(optax.sgd(0.1)), "tx: expected a wrapped"),
    "dropping": (
        lambda: layered(wrap(optax.sgd(0.1), on_overflow="drop_micro_batch")),
        "tx: expected .*on_overflow=",
    ),
    "traced learning rate": (
        lambda: jax.eval_shape(with_traced_rate, 0.1),
        "tx: expected .*one that cannot be tried out on small arrays",
    ),
    "state without sums": (
        lambda: run(accumulator=None),
        r"state\.accumulator\[0\].*what step\.init\(params\) has.*; got nothing",
    ),
    "state of other layers": (
        lambda: run(autoencoder(4, 8, np.float32)),
        r"state\.accumulator\[1\]\['number'\].*int32\[3\]; got int32\[4\]",
    ),
    "layer that widens": (
        lambda: run(layer=doubled),
        r"layer\(\.\.\.\).*: expected what it takes, float32\[2, 8\]; got float32\[2, 16",
    ),
}


@pytest.mark.every_mode
@pytest.mark.parametrize("name", REFUSED)
def test_misuse_is_refused(name: str) -> None:
    call, words = REFUSED[name]
    with pytest.raises(gradaccum.GradAccumError, match=f"^{words}"):
        call()
