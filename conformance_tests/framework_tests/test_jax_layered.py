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
from conformance_tests.framework_tests.refusing import refused

LAYERS, WIDTH, WORDS, LENGTH = 4, 8, 11, 5
Tree = Any


def transformer(seed: int, dtype: Any = jnp.float64) -> Tree:
    """The positions, stacked blocks, the last norm, and an embedding that the head
    shares with the prelude.
    """
    rng = np.random.default_rng(seed)

    def drawn(*shape: int) -> Any:
        return jnp.asarray(rng.normal(size=shape) / np.sqrt(shape[-1]), dtype)

    blocks = {
        "qkv": drawn(LAYERS, WIDTH, 3 * WIDTH),
        "out": drawn(LAYERS, WIDTH, WIDTH),
        "up": drawn(LAYERS, WIDTH, 2 * WIDTH),
    }
    blocks |= {
        "down": drawn(LAYERS, 2 * WIDTH, WIDTH),
        "norm": jnp.ones((LAYERS, 2, WIDTH), dtype),
        "number": jnp.arange(LAYERS),
    }
    return (
        {"positions": drawn(LENGTH, WIDTH)},
        blocks,
        {"norm": jnp.ones(WIDTH, dtype)},
        {"words": drawn(WORDS, WIDTH)},
    )


def normed(x: Any, scale: Any) -> Any:
    return scale * x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def prelude(own: Tree, tied: Tree, words: Any, labels: Any, key: Any) -> Any:
    """Activations beside the mask of the items that count, which has no gradient."""
    return {"x": tied["words"][words] + own["positions"], "counts": labels >= 0}


def block(own: Tree, given: Any, words: Any, labels: Any, key: Any) -> Any:
    x = given["x"]
    q, k, v = jnp.split(normed(x, own["norm"][0]) @ own["qkv"], 3, -1)
    mask = jnp.tril(jnp.ones((LENGTH, LENGTH), bool)) & given["counts"][:, None]
    scores = jnp.where(mask, jnp.einsum("btd,bsd->bts", q, k), -30)
    x = x + jnp.einsum("bts,bsd->btd", jax.nn.softmax(scores), v) @ own["out"]
    kept = jax.random.bernoulli(key, 0.8, x.shape)
    return {
        **given,
        "x": x + kept * (jnp.tanh(normed(x, own["norm"][1]) @ own["up"]) @ own["down"]),
    }


def loss_fn(
    own: Tree, tied: Tree, given: Any, words: Any, labels: Any, key: Any
) -> Any:
    logits = normed(given["x"], own["norm"]) @ tied["words"].T
    losses = optax.softmax_cross_entropy_with_integer_labels(
        logits.astype(jnp.promote_types(logits.dtype, jnp.float32)), labels
    )
    counts = given["counts"]
    right = jnp.sum(counts * (logits.argmax(-1) == labels))
    return jnp.sum(counts * losses) / jnp.maximum(counts.sum(), 1), {
        "right": right,
        "largest": jnp.abs(logits).max(),
    }


def whole(params: Tree, words: Any, labels: Any, key: Any) -> Any:
    """The same model in the usual order."""
    first, blocks, last, tied = params

    def body(x: Any, own: Tree) -> Any:
        return (
            block(
                own,
                x,
                words,
                labels,
                jax.random.fold_in(key, own["number"].astype(jnp.int32) + 1),
            ),
            None,
        )

    x = jax.lax.scan(body, prelude(first, tied, words, labels, None), blocks)[0]
    return loss_fn(last, tied, x, words, labels, None)


def tokens(words: Any, labels: Any, key: Any) -> Any:
    return jnp.sum(labels >= 0)


def batch(seed: int) -> tuple[Any, Any]:
    """Eight sequences, of which the second micro-batch has no label."""
    rng = np.random.default_rng(seed)
    words, labels = rng.integers(0, WORDS, (2, 8, LENGTH))
    labels[rng.random(labels.shape) < 0.3] = -1
    labels[2:4] = -1
    return words, labels


AUX = {"right": "sum", "largest": "max"}


def windows(tx: Any, params: Tree, count: int, layered: bool, **options: Any) -> Any:
    """Parameters, state, loss and aux after so many windows."""
    call: Any = gradaccum_jax.value_and_update
    if layered:
        step = gradaccum_jax.layered_value_and_update(
            prelude,
            block,
            loss_fn,
            tx,
            True,
            steps=4,
            weight=tokens,
            aux=AUX,
            axes=(0, 0, "key"),
            **options,
        )
        state = step.init(params)
    else:
        usual, state = (
            call(whole, tx, True, steps=4, weight=tokens, aux=AUX, axes=(0, 0, "key")),
            tx.init(params),
        )

        def step(params: Tree, state: Tree, *batch: Any) -> Any:
            loss, updates, state = usual(params, state, *batch)
            return loss, gradaccum_jax.apply_updates(params, updates, state), state

    jitted = jax.jit(step)
    for number in range(count):
        loss, params, state = jitted(
            params, state, *batch(number), jax.random.key(number)
        )
    return params, state._replace(accumulator=None), loss


def frozen() -> Any:
    """Return an adamw that decays matrices alone; the positions and one array of the
    blocks stand still.
    """
    labels = (
        {"positions": "still"},
        dict.fromkeys(("qkv", "out", "up", "down", "number"), "moves")
        | {"norm": "still"},
        "moves",
        "moves",
    )
    decays = optax.adamw(
        1e-2,
        weight_decay=0.1,
        mask=lambda params: jax.tree.map(lambda leaf: leaf.ndim > 2, params),
    )
    return optax.transforms.partition(
        {"moves": decays, "still": optax.set_to_zero()}, labels
    )


CASES = {
    "by layer": ({"on_overflow": "ignore", "loss_scale": 8.0}, {}, frozen),
    "by layer, borders recomputed": (
        {"on_overflow": "ignore", "reduction": "sum_per_item"},
        {"borders": "recompute"},
        lambda: optax.lion(1e-2),
    ),
    "kept and clipped": (
        {"clip_norm": 0.1, "loss_scale": gradaccum.DynamicLossScale(8.0)},
        {},
        lambda: optax.adamw(1e-2),
    ),
}


@pytest.mark.every_mode
@pytest.mark.parametrize("case", CASES)
def test_bits_of_the_usual_window(case: str) -> None:
    """But for the tied parameters, whose two parts are added up in another order."""
    options, further, inner = CASES[case]
    tx = gradaccum.wrap(inner(), steps=None, **options)
    made, wanted = (
        windows(tx, transformer(0), 2, layered, **(further if layered else {}))
        for layered in (True, False)
    )
    for a, b in zip(jax.tree.leaves(made), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-12, atol=1e-12)
    assert gradaccum_jax.result(made[1]).optimizer_step == 2


# A chain of matrices: nothing is tied, so that all is added up in the usual order.


def chain(layers: int, width: int, dtype: Any = jnp.float32) -> Tree:
    rng = np.random.default_rng(0)
    shapes = ((3, width), (layers, width, width), (width, 2))
    return tuple(
        {"w": jnp.asarray(rng.normal(size=shape) / np.sqrt(shape[-1]), dtype)}
        for shape in shapes
    )


def enter(own: Tree, x: Any, key: Any = None) -> Any:
    return (
        jnp.tanh(x @ own["w"]) * jax.random.bernoulli(key, 0.9, (len(x), 1))
        if key is not None
        else jnp.tanh(x @ own["w"])
    )


def link(own: Tree, x: Any, items: Any, key: Any = None) -> Any:
    made = jnp.tanh(x @ own["w"])
    return (
        x + made * jax.random.bernoulli(key, 0.8, x.shape)
        if key is not None
        else x + made
    )


def leave(own: Tree, x: Any, items: Any, key: Any = None) -> Any:
    made = x @ own["w"]
    return jnp.mean(made.astype(jnp.promote_types(made.dtype, jnp.float32)) ** 2)


def in_the_usual_order(params: Tree, items: Any, key: Any = None) -> Any:
    def own_key(number: Any) -> Any:
        return None if key is None else jax.random.fold_in(key, number)

    def body(x: Any, given: Any) -> Any:
        return link(given[0], x, items, own_key(given[1] + 1)), None

    numbers = jnp.arange(len(params[1]["w"]), dtype=jnp.int32)
    return leave(
        params[2],
        jax.lax.scan(body, enter(params[0], items, own_key(0)), (params[1], numbers))[
            0
        ],
        items,
    )


BITS = {
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
    most = (
        1e-2
        if dtype == jnp.bfloat16
        else 0
        if jax.__version_info__[:2] == (0, 7)
        else 1e-12
    )

    def require_same(a: Any, b: Any) -> None:
        np.testing.assert_allclose(
            np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=most, atol=most
        )

    params, items = chain(4, 8, dtype), np.random.default_rng(1).normal(size=(11, 3))
    tx = gradaccum.wrap(optax.adamw(1e-2), steps=None, **options)
    step = gradaccum_jax.layered_value_and_update(
        enter, link, leave, tx, steps=4, borders=borders
    )
    usual = gradaccum_jax.value_and_update(in_the_usual_order, tx, steps=4)
    made, expected = [params, step.init(params)], [params, tx.init(params)]
    for number in range(2):
        key = jax.random.key(number)
        loss, *made = step(*made, items, key)
        wanted, updates, state = usual(*expected, items, key)
        expected = [gradaccum_jax.apply_updates(expected[0], updates, state), state]
        require_same(loss, wanted)
    states = (
        made[1]._replace(accumulator=None),
        expected[1]._replace(accumulator=None),
    )
    jax.tree.map(require_same, (made[0], states[0]), (expected[0], states[1]))


def test_large_batch_and_an_open_window() -> None:
    """What an open window holds counts in the window that the call closes."""
    params, items = (
        chain(3, 8, jnp.float64),
        np.random.default_rng(1).normal(size=(12, 3)),
    )
    tx = gradaccum.wrap(optax.sgd(0.5), steps=None, skip_norm=1e3)
    step = gradaccum_jax.layered_value_and_update(
        enter, link, leave, tx, micro_batch_size=3
    )
    _, state = tx.update(
        jax.grad(in_the_usual_order)(params, items[8:]),
        tx.init(params),
        params,
        weight=4.0,
    )
    _, made, state = step(params, state, items[:8])
    gradient = jax.grad(in_the_usual_order)(params, items)
    jax.tree.map(
        lambda a, b, g: np.testing.assert_allclose(
            a, b - 0.5 * g, rtol=1e-12, atol=1e-13
        ),
        made,
        params,
        gradient,
    )
    assert gradaccum_jax.result(state).applied
    over = gradaccum.wrap(optax.sgd(0.5), steps=None, skip_norm=1e-9)
    _, same, state = gradaccum_jax.layered_value_and_update(
        enter, link, leave, over, steps=2
    )(params, over.init(params), items)
    jax.tree.map(np.testing.assert_array_equal, same, params)
    assert gradaccum_jax.result(state).skipped


def bytes_needed(call: Any, params: Tree, state: Tree, items: Any) -> int:
    """Beside the donated parameters and moments: the sums, and what XLA puts aside."""
    held = (
        jax.jit(call, donate_argnums=(0, 1))
        .lower(params, state, items)
        .compile()
        .memory_analysis()
    )
    kept = sum(
        leaf.nbytes
        for leaf in jax.tree.leaves((params, state._replace(accumulator=None)))
    )
    return int(
        held.argument_size_in_bytes
        + held.output_size_in_bytes
        - held.alias_size_in_bytes
        + held.temp_size_in_bytes
        - kept
    )


def test_memory_is_that_of_a_layer() -> None:
    """The usual window's sums grow with the layers; here the activations at the borders
    do, as far as they are kept.
    """
    width = 128
    tx = gradaccum.wrap(optax.adamw(1e-2), steps=None, on_overflow="ignore")

    def scanned(params: Tree, items: Any) -> Any:
        x = jax.lax.scan(
            jax.checkpoint(lambda x, own: (link(own, x, items), None)),
            enter(params[0], items),
            params[1],
        )[0]
        return leave(params[2], x, items)

    def needed(layers: int, steps: int) -> tuple[int, int]:
        def usual(params: Tree, state: Tree, items: Any) -> Any:
            loss, updates, state = gradaccum_jax.value_and_update(
                scanned, tx, steps=steps
            )(params, state, items)
            return loss, optax.apply_updates(params, updates), state

        params, items = chain(layers, width), jnp.ones((16, 3), jnp.float32)
        step = gradaccum_jax.layered_value_and_update(
            enter, link, leave, tx, steps=steps
        )
        calls = ((step, step.init(params)), (usual, tx.init(params)))
        own, other = (bytes_needed(call, params, state, items) for call, state in calls)
        return own, other

    found = {each: needed(*each) for each in ((4, 4), (16, 1), (16, 16))}
    for (layers, _), (own, usual) in found.items():
        border = 4 * 16 * width
        assert own < 7 * 4 * width**2 + 3 * layers * border, found
        assert usual > layers * 4 * width**2, found
    assert max(found[16, 1][0], found[16, 16][0]) < 0.5 * min(
        found[16, 1][1], found[16, 16][1]
    ), found


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


@pytest.mark.every_mode
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *((kind, jnp.float32) for kind in INSEPARABLE),
        ("a little of the whole array", jnp.bfloat16),
    ],
)
def test_optimizers_that_look_at_several_layers_are_refused(
    kind: str, dtype: Any
) -> None:
    params = chain(3, 8, dtype)
    tx = gradaccum.wrap(INSEPARABLE[kind](), steps=None, on_overflow="ignore")
    step = gradaccum_jax.layered_value_and_update(enter, link, leave, tx, steps=2)
    with refused(
        gradaccum.UsageError,
        "tx: expected an inner optimizer that updates each array and each layer by"
        " itself",
    ):
        jax.eval_shape(step, params, step.init(params), np.ones((4, 3), np.float32))


def test_traced_learning_rate_is_refused() -> None:
    def train(rate: Any, params: Tree, items: Any) -> Any:
        step = gradaccum_jax.layered_value_and_update(
            enter,
            link,
            leave,
            gradaccum.wrap(optax.sgd(rate), steps=None, on_overflow="ignore"),
            steps=2,
        )
        return step(params, step.init(params), items)

    with refused(
        gradaccum.UsageError,
        "tx: expected",
        "one that cannot be tried out on small arrays",
    ):
        jax.eval_shape(train, 0.1, chain(3, 8), np.ones((4, 3), np.float32))


def test_refusals() -> None:
    params, items = chain(3, 8), np.ones((4, 3), np.float32)

    def layered(tx: Any = None, layer: Any = link, **options: Any) -> Any:
        tx = gradaccum.wrap(optax.sgd(0.1), steps=None) if tx is None else tx
        return gradaccum_jax.layered_value_and_update(
            enter, layer, leave, tx, steps=2, **options
        )

    for tx, words in (
        (optax.sgd(0.1), "tx: expected a wrapped optimizer"),
        (gradaccum.wrap(optax.sgd(0.1), steps=2), "steps=None"),
        (
            gradaccum.wrap(optax.sgd(0.1), steps=None, on_overflow="drop_micro_batch"),
            "on_overflow=",
        ),
    ):
        with refused(gradaccum.GradAccumError, "tx: expected", words):
            layered(tx)
    with refused(gradaccum.ArgumentValueError, "borders: expected", "'host'"):
        layered(borders="host")
    for name in ("layer", "gather"):
        with refused(gradaccum.ArgumentTypeError, f"{name}: expected a function"):
            layered(**{name: 3})
    step = layered()
    with refused(gradaccum.ArgumentTypeError, "train: expected", "got neither"):
        step(params, step.init(params), items, train=True)
    for given, words in (
        (({"key": jax.random.key(0)}, *params[1:]), "or a random key"),
        (list(params), "params: expected a tuple"),
        (
            (params[0], {"w": jnp.ones(())}, params[2]),
            "with one leading axis in params[1]",
        ),
    ):
        with refused(gradaccum.GradAccumError, words):
            step.init(given)
    with refused(
        gradaccum.ArgumentValueError,
        "state.accumulator[0]",
        "what step.init(params) has, float32[3, 8]; got nothing",
    ):
        step(params, step.init(params)._replace(accumulator=None), items)
    with refused(
        gradaccum.ArgumentValueError,
        "state.accumulator[1]['w']",
        "float32[3, 8, 8]; got float32[4, 8, 8]",
    ):
        step(params, step.init(chain(4, 8)), items)
    with refused(
        gradaccum.ArgumentValueError,
        "layer(...): expected what it takes, float32[2, 8]; got float32[2, 16]",
    ):
        layered(layer=lambda own, x, items: jnp.concatenate([x, x], 1))(
            params, step.init(params), items
        )
