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

LAYERS, WIDTH, STEPS = 4, 8, 4
RNG = np.random.default_rng(0)
Tree = Any


def drawn(*shape: int, dtype: Any = np.float64) -> Any:
    return np.asarray(RNG.normal(size=shape) / np.sqrt(shape[-1]), dtype)


def dropped(made: Any, key: Any) -> Any:
    return made if key is None else made * jax.random.bernoulli(key, 0.8, made.shape)


def own_key(key: Any, number: Any) -> Any:
    return None if key is None else jax.random.fold_in(key, number)


# An autoencoder, whose first and last matrix are one. Beside the activations it passes on
# which items count; they have no gradient, and the layers' numbers are integers.


def prelude(own: Tree, tied: Tree, x: Any, counts: Any, key: Any) -> Any:
    return {"x": x @ tied["w"] + own["bias"], "counts": counts}


def block(own: Tree, given: Any, x: Any, counts: Any, key: Any) -> Any:
    made = dropped(jnp.tanh(given["x"] @ own["w"]), key) * own["scale"]
    return {**given, "x": given["x"] + made}


def loss_fn(own: Tree, tied: Tree, given: Any, x: Any, counts: Any, key: Any) -> Any:
    errors = jnp.sum((given["x"] * own["scale"] @ tied["w"].T - x) ** 2, -1)
    counts = given["counts"]
    loss = jnp.sum(counts * errors) / jnp.maximum(counts.sum(), 1)
    return loss, {"counted": counts.sum(), "largest": errors.max()}


def autoencoder() -> Tree:
    layers = {
        "w": drawn(LAYERS, WIDTH, WIDTH),
        "scale": np.ones((LAYERS, WIDTH)),
        "number": np.arange(LAYERS, dtype=np.int32),
    }
    first, last = {"bias": drawn(WIDTH)}, {"scale": np.ones(WIDTH)}
    return first, layers, last, {"w": drawn(3, WIDTH)}


def whole(params: Tree, x: Any, counts: Any, key: Any) -> Any:
    """The same model in the usual order."""
    first, layers, last, tied = params

    def body(given: Any, own: Tree) -> Any:
        return block(own, given, x, counts, own_key(key, own["number"] + 1)), None

    given = jax.lax.scan(body, prelude(first, tied, x, counts, None), layers)[0]
    return loss_fn(last, tied, given, x, counts, None)


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


def two_windows(step: Any, params: Tree, state: Tree, *batch: Any) -> Any:
    """Parameters, state, loss and aux."""
    step = jax.jit(step)
    for number in range(2):
        loss, params, state = step(params, state, *batch, jax.random.key(number))
    return params, state._replace(accumulator=None), loss


def usual_step(loss_fn: Any, tx: Any, **options: Any) -> Any:
    call = gradaccum_jax.value_and_update(loss_fn, tx, **options)

    def step(params: Tree, state: Tree, *batch: Any) -> Any:
        loss, updates, state = call(params, state, *batch)
        return loss, gradaccum_jax.apply_updates(params, updates, state), state

    return step


def require_close(made: Any, wanted: Any, most: float) -> None:
    for a, b in zip(*map(jax.tree.leaves, (made, wanted)), strict=True):
        np.testing.assert_allclose(np.float64(a), np.float64(b), rtol=most, atol=most)


@pytest.mark.every_mode
@pytest.mark.parametrize("case", CASES)
def test_numbers_of_the_usual_window(case: str) -> None:
    """The two parts of tied parameters are added up in another order. No item of the
    second micro-batch counts.
    """
    inner, given, borders = CASES[case]
    tx, params = gradaccum.wrap(inner(), steps=None, **given), autoencoder()
    options: dict[str, Any] = {
        "has_aux": True,
        "steps": STEPS,
        "weight": lambda x, counts, key: counts.sum(),
        "aux": {"counted": "sum", "largest": "max"},
    }
    step = gradaccum_jax.layered_value_and_update(
        prelude, block, loss_fn, tx, borders=borders, **options
    )
    batch = drawn(8, 3), np.array([1, 1, 0, 0, 1, 0, 1, 1.0])
    made = two_windows(step, params, step.init(params), *batch)
    usual = usual_step(whole, tx, **options)
    require_close(made, two_windows(usual, params, tx.init(params), *batch), 1e-12)
    assert gradaccum_jax.result(made[1]).optimizer_step == 2


# A chain of matrices: nothing is tied, so that all is added up in the usual order.


def chain(layers: int, width: int, dtype: Any = np.float64) -> Tree:
    shapes = ((3, width), (layers, width, width), (width, 2))
    return tuple({"w": jnp.asarray(drawn(*shape), dtype)} for shape in shapes)


def enter(own: Tree, x: Any, key: Any = None) -> Any:
    return dropped(jnp.tanh(x @ own["w"]), key)


def link(own: Tree, x: Any, items: Any, key: Any = None) -> Any:
    return x + dropped(jnp.tanh(x @ own["w"]), key)


def leave(own: Tree, x: Any, items: Any, key: Any = None) -> Any:
    made = x @ own["w"]
    return jnp.mean(made.astype(jnp.promote_types(made.dtype, jnp.float32)) ** 2)


def in_the_usual_order(params: Tree, items: Any, key: Any = None) -> Any:
    @jax.checkpoint
    def body(x: Any, given: Any) -> Any:
        return link(given[0], x, items, own_key(key, given[1] + 1)), None

    numbers = jnp.arange(len(params[1]["w"]), dtype=jnp.int32)
    x = enter(params[0], items, own_key(key, 0))
    return leave(params[2], jax.lax.scan(body, x, (params[1], numbers))[0], items)


def layered(tx: Any, layer: Any = link, **options: Any) -> Any:
    return gradaccum_jax.layered_value_and_update(
        enter, layer, leave, tx, **{"steps": 2, **options}
    )


def wrap(inner: Any, **options: Any) -> Any:
    return gradaccum.wrap(inner, steps=None, **options)


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
    """Dropout, a short last micro-batch; moments and counters too. XLA rounds half
    precision where it likes.
    """
    options, borders, dtype = BITS[case]
    tx, params = wrap(optax.adamw(1e-2), **options), chain(4, 8, dtype)
    step, items = layered(tx, steps=STEPS, borders=borders), drawn(11, 3)
    usual = usual_step(in_the_usual_order, tx, steps=STEPS)
    made, wanted = [params, step.init(params)], [params, tx.init(params)]
    exact = 0 if jax.__version_info__[:2] == (0, 7) else 1e-12
    for number in range(2):
        key = jax.random.key(number)
        loss, *made = step(*made, items, key)
        wanted_loss, *wanted = usual(*wanted, items, key)
        require_close(
            (loss, made[0], made[1]._replace(accumulator=None)),
            (wanted_loss, wanted[0], wanted[1]._replace(accumulator=None)),
            1e-2 if dtype == jnp.bfloat16 else exact,
        )


def test_large_batch_and_an_open_window() -> None:
    """What an open window holds counts in the window that the call closes."""
    params, items = chain(3, 8), drawn(12, 3)
    tx = wrap(optax.sgd(0.5), skip_norm=1e3)
    gradient = jax.grad(in_the_usual_order)
    first = gradient(params, items[8:])
    _, state = tx.update(first, tx.init(params), params, weight=4.0)
    step = layered(tx, steps=None, micro_batch_size=3)
    _, made, state = step(params, state, items[:8])
    wanted = jax.tree.map(lambda p, g: p - 0.5 * g, params, gradient(params, items))
    require_close(made, wanted, 1e-12)
    assert gradaccum_jax.result(state).applied
    tx = wrap(optax.sgd(0.5), skip_norm=1e-9)
    _, same, state = layered(tx)(params, tx.init(params), items)
    require_close(same, params, 0)
    assert gradaccum_jax.result(state).skipped


def test_memory_is_that_of_a_layer() -> None:
    """The usual window's sums grow with the layers; here the activations at the borders
    do.
    """
    layers, width = 16, 128
    tx = wrap(optax.adamw(1e-2), on_overflow="ignore")
    params, items = chain(layers, width, jnp.float32), jnp.ones((16, 3), jnp.float32)

    def needed(step: Any, state: Tree) -> Any:
        """Beside the donated parameters and moments."""
        call = jax.jit(step, donate_argnums=(0, 1)).lower(params, state, items)
        held = call.compile().memory_analysis()
        kept = jax.tree.leaves((params, state._replace(accumulator=None)))
        all_bytes = held.argument_size_in_bytes + held.output_size_in_bytes
        return (
            all_bytes
            - held.alias_size_in_bytes
            + held.temp_size_in_bytes
            - sum(leaf.nbytes for leaf in kept)
        )

    step, border = layered(tx, steps=16), 4 * 16 * width
    assert needed(step, step.init(params)) < 28 * width**2 + 3 * layers * border
    usual = usual_step(in_the_usual_order, tx, steps=16)
    assert needed(usual, tx.init(params)) > layers * 4 * width**2


INSEPARABLE = {
    "whole tree": lambda: optax.chain(optax.clip_by_global_norm(1e9), optax.sgd(0.1)),
    "whole array": lambda: optax.lamb(1e-2),
    "after NaN is taken out": lambda: optax.chain(
        optax.zero_nans(), optax.clip_by_global_norm(1.0), optax.sgd(0.1)
    ),
    "state of the whole array": lambda: optax.novograd(0.1),
    "skips all": lambda: optax.apply_if_finite(optax.sgd(0.1), 3),
    "state without the layers' axis": optax.scale_by_factored_rms,
    "a little of the whole array": lambda: optax.stateless(
        lambda updates, params: jax.tree.map(
            lambda leaf: leaf * (1 + 2e-5 * jnp.sin(leaf.mean())), updates
        )
    ),
}
ITEMS = np.ones((4, 3), np.float32)


@pytest.mark.every_mode
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("kind", INSEPARABLE)
def test_optimizers_that_look_at_several_layers_are_refused(
    kind: str, dtype: Any
) -> None:
    params = chain(3, 8, dtype)
    step = layered(wrap(INSEPARABLE[kind](), on_overflow="ignore"))
    with pytest.raises(
        gradaccum.UsageError,
        match=(
            r"^tx: expected an inner optimizer that updates each array and each layer by"
            r" itself"
        ),
    ):
        jax.eval_shape(step, params, step.init(params), ITEMS)


PARAMS, SGD = chain(3, 8, np.float32), wrap(optax.sgd(0.1))


def run(params: Tree = PARAMS, layer: Any = link, **changed: Any) -> Any:
    step = layered(SGD, layer)
    return step(PARAMS, step.init(params)._replace(**changed), ITEMS)


def with_traced_rate(rate: Any) -> Any:
    step = layered(wrap(optax.sgd(rate), on_overflow="ignore"))
    return step(PARAMS, step.init(PARAMS), ITEMS)


def doubled(own: Tree, x: Any, items: Any) -> Any:
    return jnp.concatenate([x, x], 1)


REFUSED: dict[str, Any] = {
    "bare optimizer": (lambda: layered(optax.sgd(0.1)), "tx: expected a wrapped"),
    "windows that end by themselves": (
        lambda: layered(gradaccum.wrap(optax.sgd(0.1), steps=2)),
        "tx: expected .*steps=None",
    ),
    "dropping": (
        lambda: layered(wrap(optax.sgd(0.1), on_overflow="drop_micro_batch")),
        "tx: expected .*on_overflow=",
    ),
    "traced learning rate": (
        lambda: jax.eval_shape(with_traced_rate, 0.1),
        "tx: expected .*one that cannot be tried out on small arrays",
    ),
    "borders": (lambda: layered(SGD, borders="host"), "borders: expected .*'host'"),
    "no layer": (lambda: layered(SGD, 3), "layer: expected a function"),
    "keyword": (
        lambda: layered(SGD)(PARAMS, layered(SGD).init(PARAMS), ITEMS, train=True),
        "train: expected .*got neither",
    ),
    "key among the parameters": (
        lambda: layered(SGD).init(({"key": jax.random.key(0)}, *PARAMS[1:])),
        ".*or a random key",
    ),
    "list of parameters": (
        lambda: layered(SGD).init([*PARAMS]),
        "params: expected a tuple",
    ),
    "layers without an axis": (
        lambda: layered(SGD).init((PARAMS[0], {"w": jnp.ones(())}, PARAMS[2])),
        r"params.*with one leading axis in params\[1\]",
    ),
    "state without sums": (
        lambda: run(accumulator=None),
        r"state\.accumulator\[0\].*what step\.init\(params\) has, float32\[3, 8\]; got"
        " nothing",
    ),
    "state of other layers": (
        lambda: run(chain(4, 8, np.float32)),
        r"state\.accumulator\[1\]\['w'\].*float32\[3, 8, 8\]; got float32\[4, 8, 8\]",
    ),
    "layer that widens": (
        lambda: run(layer=doubled),
        r"layer\(\.\.\.\): expected what it takes, float32\[2, 8\]; got float32\[2, 16\]",
    ),
}


@pytest.mark.every_mode
@pytest.mark.parametrize("name", REFUSED)
def test_misuse_is_refused(name: str) -> None:
    call, words = REFUSED[name]
    with pytest.raises(gradaccum.GradAccumError, match=f"^{words}"):
        call()
