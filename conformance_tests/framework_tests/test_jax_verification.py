"""`verify` names the mistakes that only JAX has, and passes what is right in JAX alone:
keys, derivatives of one's own, trees. Nothing of the user's is changed.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gradaccum import verify

RNG = np.random.default_rng(0)
ITEMS = 12
WIDTH = 5
CLASSES = 4
X = jnp.asarray(RNG.normal(size=(ITEMS, WIDTH)), jnp.float32)
Y = jnp.asarray(RNG.normal(size=ITEMS), jnp.float32)
PARAMS = {
    "w": jnp.asarray(RNG.normal(size=(WIDTH, CLASSES)), jnp.float32),
    "v": jnp.asarray(RNG.normal(size=CLASSES), jnp.float32),
}
KEY = jax.random.key(3)
KEYS = jax.random.split(KEY, ITEMS)


def hidden(params: Any, x: Any) -> Any:
    return jnp.tanh(x @ params["w"])


def squares(params: Any, h: Any, y: Any) -> Any:
    return (h @ params["v"] - y) ** 2


def plain(params: Any, x: Any, y: Any) -> Any:
    return squares(params, hidden(params, x), y).mean()


def dropped(h: Any, key: Any) -> Any:
    return jnp.where(jax.random.bernoulli(key, 0.5, h.shape), h / 0.5, 0)


def with_key(params: Any, x: Any, y: Any, key: Any) -> Any:
    return squares(params, dropped(hidden(params, x), key), y).mean()


def with_key_of_its_own(params: Any, x: Any, y: Any) -> Any:
    return with_key(params, x, y, jax.random.key(0))


def with_keys_of_items(params: Any, x: Any, y: Any, keys: Any) -> Any:
    return squares(params, jax.vmap(dropped)(hidden(params, x), keys), y).mean()


def with_numpy_noise(params: Any, x: Any, y: Any) -> Any:
    noise = np.random.default_rng(0).standard_normal(x.shape).astype(np.float32)
    return plain(params, x + noise, y)


@jax.custom_vjp
def square(x: Any) -> Any:
    return x**2


@jax.custom_vjp
def square_that_ignores_the_cotangent(x: Any) -> Any:
    return x**2


square.defvjp(lambda x: (x**2, x), lambda x, cotangent: (2 * x * cotangent,))
square_that_ignores_the_cotangent.defvjp(
    lambda x: (x**2, x), lambda x, cotangent: (2 * x / ITEMS,)
)


def with_custom_backward(params: Any, x: Any, y: Any) -> Any:
    errors = hidden(params, x) @ params["v"] - y
    return square_that_ignores_the_cotangent(errors).mean()


MISTAKEN: dict[str, Any] = {
    "a key in the loss": (with_key_of_its_own, (X, Y), 0, "not_repeatable", "the loss"),
    "one key": (with_key, (X, Y, KEY), 0, "not_repeatable", "the loss"),
    "one old key": (
        with_key,
        (X, Y, jax.random.PRNGKey(0)),
        (0, 0, "key"),
        "not_repeatable",
        "the loss",
    ),
    "NumPy's numbers": (with_numpy_noise, (X, Y), 0, "not_repeatable", "the loss"),
    "a derivative of its own": (
        with_custom_backward,
        (X, Y),
        0,
        "custom_backward",
        "['v'], ['w']",
    ),
}
"""The loss, the batch, the axes; the cause and where it is."""


@pytest.mark.parametrize("name", MISTAKEN)
def test_mistake_is_named(name: str) -> None:
    loss_fn, batch, axes, kind, where = MISTAKEN[name]
    report = verify(PARAMS, loss_fn, batch, steps=4, axes=axes)
    assert not report.equivalent
    assert (report.causes[0].kind, report.causes[0].where) == (kind, where), str(report)


@pytest.mark.parametrize(
    ("loss_fn", "notes"),
    [
        (lambda p, x, y: plain(p, x, y) / 4, 1),
        (lambda p, x, y: (plain(p, x, y) / 4, x), 1),
        (lambda p, x, y: (plain(p, x, y) + plain(p, x, y)) / 4, 0),
        (lambda p, x, y: plain(p, x, y) / 2, 0),
        (lambda p, x, y: jnp.mean(jnp.square(x[:4, 0] * p["v"].sum())), 0),
    ],
    ids=["divided", "with aux", "mean of losses", "by another number", "mean of four"],
)
def test_loss_that_is_still_divided_by_the_steps_has_a_note(
    loss_fn: Any, notes: int
) -> None:
    has_aux = isinstance(loss_fn(PARAMS, X, Y), tuple)
    report = verify(PARAMS, loss_fn, (X, Y), steps=4, has_aux=has_aux)
    divided = [note for note in report.notes if "delete the division" in note]
    assert len(divided) == notes


def in_bfloat16(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), tree)


SOUND: dict[str, Any] = {
    "bfloat16": (plain, in_bfloat16(PARAMS), in_bfloat16((X, Y)), 0),
    "keys of items": (with_keys_of_items, PARAMS, (X, Y, KEYS), 0),
    "columns first": (
        lambda p, x, y, step: plain(p, x.T, y) * (1 + 0.1 * step),
        PARAMS,
        (X.T, Y, 3),
        (1, 0, None),
    ),
    "a derivative of its own": (
        lambda p, x, y: square(hidden(p, x) @ p["v"] - y).mean(),
        PARAMS,
        (X, Y),
        0,
    ),
    "one tree": (
        lambda params, both: plain(params, both["x"], both["y"]),
        PARAMS,
        {"x": X, "y": Y},
        0,
    ),
    "a list of a loader": (jax.jit(plain), PARAMS, [X, Y], 0),
}
"""The loss, the parameters, the batch, the axes."""


@pytest.mark.parametrize("name", SOUND)
def test_sound_loss_passes(name: str) -> None:
    loss_fn, params, batch, axes = SOUND[name]
    report = verify(params, loss_fn, batch, steps=4, axes=axes)
    assert report.equivalent, str(report)


@pytest.mark.parametrize("normalised", [True, False])
def test_flax_batch_norm_couples_items(normalised: bool) -> None:
    """A dropout beside it does not disturb; alone it cannot be compared."""
    linen = pytest.importorskip("flax.linen")
    layers = [linen.Dense(CLASSES), linen.Dropout(0.5, deterministic=False)]
    if normalised:
        layers.insert(1, linen.BatchNorm(use_running_average=False))
    net = linen.Sequential(layers)
    variables = net.init({"params": KEY, "dropout": KEY}, X)

    def loss_fn(params, x, y, key):
        output, _ = net.apply(
            {**variables, "params": params},
            x,
            rngs={"dropout": key},
            mutable=["batch_stats"],
        )
        return squares(PARAMS, output, y).mean()

    report = verify(variables["params"], loss_fn, (X, Y, KEY))
    kind = "coupled" if normalised else "not_repeatable"
    assert [cause.kind for cause in report.causes] == [kind], str(report)


def test_numpy_arrays_of_the_user_stay() -> None:
    arrays = jax.tree.map(np.array, (PARAMS, (X, Y)))
    before = jax.tree.map(np.copy, arrays)
    verify(arrays[0], plain, arrays[1])
    jax.tree.map(np.testing.assert_array_equal, before, arrays)
