"""Small losses in JAX for `verify`: each with one published mistake planted, or sound.

A case is ``(loss_fn, params, batch, options)``; a planted one has the kind of the cause and a word of where it is, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

RNG = np.random.default_rng(0)
ITEMS, TOKENS, WIDTH, CLASSES = 12, 6, 5, 4


def normal(*shape: int, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.asarray(RNG.normal(size=shape), dtype)


X, Y = normal(ITEMS, WIDTH), normal(ITEMS)
SEQUENCES = normal(ITEMS, TOKENS, WIDTH)
LENGTHS = np.asarray([1, 6, 2, 5, 3, 4, 6, 1, 1, 5, 6, 2])
MASK = jnp.asarray(np.arange(TOKENS) < LENGTHS[:, None])
TOKEN_LABELS = jnp.asarray(np.where(MASK, RNG.integers(0, CLASSES, (ITEMS, TOKENS)), -100))
CLASS = jnp.asarray([0, 0, 0, 1, 2, 2, 1, 1, 3, 0, 3, 3])
PARAMS = {"w": normal(WIDTH, CLASSES), "v": normal(CLASSES), "scale": jnp.asarray(0.5)}
POSITIVES = jnp.asarray([1, 0, 0, 2, 0, 3, 1, 1, 0, 0, 1, 3])
KEY = jax.random.key(3)


class Case(NamedTuple):
    loss_fn: Callable[..., Any]
    batch: tuple[Any, ...]
    options: Mapping[str, Any] = MappingProxyType({})
    params: Any = PARAMS
    kind: str = ""
    where: str = ""


def hidden(params: Any, x: Any) -> Any:
    return jnp.tanh(x @ params["w"])


def squares(params: Any, h: Any, y: Any) -> Any:
    return (h @ params["v"] - y) ** 2


def plain(params: Any, x: Any, y: Any) -> Any:
    return squares(params, hidden(params, x), y).mean()


def cross_entropy(params: Any, x: Any, labels: Any) -> Any:
    """One number per label."""
    return -jnp.take_along_axis(jax.nn.log_softmax(x @ params["w"]), labels[..., None], -1)[..., 0]


def dropped(h: Any, key: Any) -> Any:
    return jnp.where(jax.random.bernoulli(key, 0.5, h.shape), h / 0.5, 0)


# ---- planted


def token_mean(params: Any, x: Any, mask: Any) -> Any:
    return jnp.sum(hidden(params, x).sum(-1) ** 2 * mask) / mask.sum()


def ignore_index(params: Any, x: Any, labels: Any) -> Any:
    kept = labels != -100
    return jnp.sum(cross_entropy(params, x, jnp.where(kept, labels, 0)) * kept) / kept.sum()


def class_weighted(params: Any, x: Any, labels: Any) -> Any:
    weights = jnp.asarray([1.0, 3.0, 0.5, 2.0])[labels]
    return jnp.sum(weights * cross_entropy(params, x, labels)) / weights.sum()


def focal(params: Any, x: Any, labels: Any) -> Any:
    """A detector's: the sum over all anchors, divided by the number of positive ones."""
    logits = x @ params["w"][:, 0]
    each = jax.nn.sigmoid(logits) ** 2 * jnp.where(labels > 0, jax.nn.softplus(-logits), jax.nn.softplus(logits))
    return each.sum() / (labels > 0).sum()


def over_positives(params: Any, x: Any, positives: Any) -> Any:
    """A mean over positives, of which a micro-batch may have none: 0 / 0."""
    return jnp.sum(hidden(params, x).sum(-1) ** 2 * positives) / positives.sum()


def hardest(params: Any, x: Any, y: Any) -> Any:
    """The largest error of the batch alone."""
    return squares(params, hidden(params, x), y).max()


def info_nce(params: Any, x: Any, y: Any) -> Any:
    a, b = hidden(params, x), hidden(params, jnp.roll(x, 1, axis=1) * y[:, None])
    a, b = (z / jnp.linalg.norm(z, axis=1, keepdims=True) for z in (a, b))
    return -jnp.mean(jnp.diag(jax.nn.log_softmax(jnp.exp(params["scale"]) * a @ b.T)))


def variance(params: Any, x: Any) -> Any:
    """VICReg's variance term."""
    return jnp.mean(jax.nn.relu(1 - jnp.sqrt(hidden(params, x).var(axis=0) + 1e-4)))


def load_balance(params: Any, x: Any) -> Any:
    """A mixture of experts' auxiliary loss: share of items times mean probability."""
    gates = jax.nn.softmax(x @ params["w"])
    share = jax.nn.one_hot(gates.argmax(-1), CLASSES).mean(0)
    return CLASSES * jnp.sum(jax.lax.stop_gradient(share) * gates.mean(0))


def hardest_negative(params: Any, x: Any, labels: Any) -> Any:
    """Triplets with the nearest item of another class."""
    z = hidden(params, x)
    apart = jnp.sum((z[:, None] - z[None, :]) ** 2, -1)
    nearest = jnp.where(labels[:, None] == labels[None, :], 100.0, apart).min(1)
    return jnp.mean(jax.nn.relu(1.0 + apart.mean(1) - nearest))


def pairwise(params: Any, x: Any, y: Any) -> Any:
    """The surrogate of the area under the curve."""
    scores = hidden(params, x) @ params["v"]
    pairs = (y[:, None] > 0) & (y[None, :] <= 0)
    return jnp.sum(jax.nn.softplus(scores[None, :] - scores[:, None]) * pairs) / pairs.sum()


def advantages(params: Any, x: Any, reward: Any) -> Any:
    """Standardised over the batch."""
    advantage = (reward - reward.mean()) / (reward.std() + 1e-6)
    return -jnp.mean(advantage * jax.nn.log_softmax(x @ params["w"])[:, 0])


def batch_norm(h: Any) -> Any:
    return (h - h.mean(0)) / jnp.sqrt(h.var(0) + 1e-5)


def normalised(params: Any, x: Any, y: Any) -> Any:
    return squares(params, jnp.tanh(batch_norm(x @ params["w"])), y).mean()


def key_in_the_loss(params: Any, x: Any, y: Any) -> Any:
    return squares(params, dropped(hidden(params, x), jax.random.key(0)), y).mean()


def key_of_the_batch(params: Any, x: Any, y: Any, key: Any) -> Any:
    return squares(params, dropped(hidden(params, x), key), y).mean()


def numpys_draw(params: Any, x: Any, y: Any) -> Any:
    h = hidden(params, x)
    return squares(params, h * (np.random.random(h.shape) < 0.5), y).mean()


@jax.custom_vjp
def deaf(x: Any) -> Any:
    return x**2


deaf.defvjp(lambda x: (x**2, x), lambda x, cotangent: (2 * x / ITEMS,))


def with_deaf(params: Any, x: Any, y: Any) -> Any:
    return deaf(hidden(params, x) @ params["v"] - y).mean()


def penalised(params: Any, x: Any, y: Any) -> Any:
    return squares(params, hidden(params, x), y).sum() + jnp.sum(params["w"] ** 2)


def z_loss(params: Any, x: Any, labels: Any) -> Any:
    return cross_entropy(params, x, labels).mean() + 0.1 * jnp.sum(jax.nn.logsumexp(x @ params["w"], -1) ** 2)


def expert_capacity(params: Any, x: Any, y: Any) -> Any:
    """Only the first three items of each expert pass."""
    gates = jax.nn.softmax(x @ params["w"])
    chosen = jax.nn.one_hot(gates.argmax(-1), CLASSES)
    kept = chosen * (jnp.cumsum(chosen, axis=0) <= 3)
    return squares(params, gates * kept, y).mean()


PLANTED = {
    "token_mean": Case(token_mean, (SEQUENCES, MASK), kind="unequal_counts", where="batch[1]"),
    "ignore_index": Case(ignore_index, (SEQUENCES, TOKEN_LABELS), kind="unequal_counts", where="batch[1] != -100"),
    "class_weighted": Case(class_weighted, (X, CLASS), kind="unequal_counts", where="weight by batch[1]"),
    "focal": Case(focal, (X, POSITIVES), kind="unequal_counts", where="batch[1] != 0"),
    "over_positives": Case(over_positives, (X, POSITIVES > 1), kind="unequal_counts", where="batch[1] != 0"),
    "hardest": Case(hardest, (X, Y), kind="coupled_loss"),
    "info_nce": Case(info_nce, (X, Y), kind="coupled_loss"),
    "variance": Case(variance, (X,), kind="coupled_loss"),
    "load_balance": Case(load_balance, (X,), kind="coupled_loss"),
    "hardest_negative": Case(hardest_negative, (X, CLASS), kind="coupled_loss"),
    "pairwise": Case(pairwise, (X, Y), kind="coupled_loss"),
    "advantages": Case(advantages, (X, Y), kind="coupled_loss"),
    "normalised": Case(normalised, (X, Y), kind="batch_statistics", where="batch_norm at jax_losses.py"),
    "expert_capacity": Case(expert_capacity, (X, Y), kind="batch_statistics", where="expert_capacity"),
    "key_in_the_loss": Case(key_in_the_loss, (X, Y), kind="shared_randomness", where="dropped at jax_losses.py"),
    "shared_key": Case(key_of_the_batch, (X, Y, KEY), {"axes": (0, 0, None)}, kind="shared_randomness", where="dropped"),
    "numpys_draw": Case(numpys_draw, (X, Y), kind="shared_randomness", where="numpy.random"),
    "deaf": Case(with_deaf, (X, Y), kind="custom_backward", where="deaf"),
    "penalised": Case(penalised, (X, Y), {"reduction": "sum"}, kind="repeated_term", where="'w'"),
    "z_loss": Case(z_loss, (X, CLASS), kind="summed_term", where="'w'"),
    "summed": Case(plain, (X, Y), {"reduction": "sum"}, kind="wrong_reduction"),
    "sum_under_mean": Case(lambda p, x, y: squares(p, hidden(p, x), y).sum(), (X, Y), kind="wrong_reduction"),
}

# ---- sound


def layer_norm(params: Any, x: Any, y: Any) -> Any:
    h = hidden(params, x)
    return squares(params, (h - h.mean(-1, keepdims=True)) / jnp.sqrt(h.var(-1, keepdims=True) + 1e-5), y).mean()


def attention(params: Any, x: Any, mask: Any) -> Any:
    """With padding masked out, and a mean per sequence."""
    q, k = x @ params["w"], jnp.sin(x) @ params["w"]
    weights = jax.nn.softmax(jnp.where(mask[:, None, :], q @ k.swapaxes(1, 2), -jnp.inf))
    each = ((weights @ k) @ params["v"]) ** 2
    return jnp.mean(jnp.sum(each * mask, 1) / mask.sum(1))


def tied(params: Any, tokens: Any) -> Any:
    """One matrix as the embedding and as the output; padding rows are looked up too."""
    h = jnp.tanh(params["w"].T[jnp.maximum(tokens, 0)])
    return jnp.mean(jax.nn.logsumexp(h @ params["w"], -1))


def recurrent(params: Any, x: Any, y: Any) -> Any:
    def step(h: Any, each: Any) -> Any:
        return jnp.tanh(each @ params["w"] + h * params["v"]), None

    h, _ = jax.lax.scan(step, jnp.zeros((x.shape[0], CLASSES)), x.swapaxes(0, 1))
    return squares(params, h, y).mean()


def keys_per_item(params: Any, x: Any, y: Any, keys: Any) -> Any:
    return squares(params, jax.vmap(dropped)(hidden(params, x), keys), y).mean()


def split_inside(params: Any, x: Any, y: Any, key: Any) -> Any:
    first, second = jax.random.split(key)
    h = jax.vmap(dropped)(hidden(params, x), jax.random.split(first, len(x)))
    return squares(params, dropped(h, second), y).mean()


@jax.checkpoint
def rematerialised(params: Any, x: Any, y: Any, key: Any) -> Any:
    return key_of_the_batch(params, x, y, key)


def per_item_vmap(params: Any, x: Any, y: Any) -> Any:
    return jax.vmap(lambda one, target: squares(params, jax.nn.relu(one @ params["w"]), target))(x, y).mean()


def frozen(params: Any, x: Any, y: Any) -> Any:
    """One parameter never gets a gradient."""
    return plain({**params, "v": jax.lax.stop_gradient(params["v"])}, x, y)


def random_features(params: Any, x: Any, y: Any) -> Any:
    """One fixed projection for all items."""
    return squares(params, jnp.cos(x @ jax.random.normal(jax.random.key(5), (WIDTH, CLASSES))), y).mean()


def columns_first(params: Any, x: Any, y: Any, step: Any) -> Any:
    return plain(params, x.T, y) * (1 + 0.1 * step)


@jax.custom_vjp
def listening(x: Any) -> Any:
    return x**2


listening.defvjp(lambda x: (x**2, x), lambda x, cotangent: (2 * x * cotangent,))


def of(change: Callable[[jax.Array], jax.Array]) -> Any:
    return jax.tree.map(change, PARAMS)


HALF = of(lambda leaf: leaf.astype(jnp.bfloat16))
TOKEN_WEIGHT = {"weight": lambda x, labels: (labels != -100).sum()}

SOUND = {
    "plain": Case(plain, (X, Y)),
    "summed": Case(lambda p, x, y: squares(p, hidden(p, x), y).sum(), (X, Y), {"reduction": "sum"}),
    "token_weight": Case(ignore_index, (SEQUENCES, TOKEN_LABELS), TOKEN_WEIGHT),
    "item_mean": Case(
        lambda p, x, mask: jnp.sum(hidden(p, x).sum(-1) ** 2 * mask),
        (SEQUENCES, MASK),
        {"reduction": "item_mean", "weight": lambda x, mask: mask.sum()},
    ),
    "weight_per_item": Case(token_mean, (SEQUENCES, MASK), {"weight": LENGTHS}),
    "bfloat16": Case(plain, (X.astype(jnp.bfloat16), Y.astype(jnp.bfloat16)), params=HALF),
    "layer_norm": Case(layer_norm, (X, Y)),
    "attention": Case(attention, (SEQUENCES, MASK)),
    "tied": Case(tied, (TOKEN_LABELS,)),
    "recurrent": Case(recurrent, (SEQUENCES, Y)),
    "dropout": Case(key_of_the_batch, (X, Y, KEY)),
    "raw_key": Case(key_of_the_batch, (X, Y, jax.random.PRNGKey(0)), {"axes": (0, 0, "key")}),
    "keys_per_item": Case(keys_per_item, (X, Y, jax.random.split(KEY, ITEMS))),
    "split_inside": Case(split_inside, (X, Y, KEY)),
    "rematerialised": Case(rematerialised, (X, Y, KEY)),
    "per_item_vmap": Case(per_item_vmap, (X, Y)),
    "frozen": Case(frozen, (X, Y)),
    "random_features": Case(random_features, (X, Y)),
    "columns_first": Case(columns_first, (X.T, Y, 3), {"axes": (1, 0, None)}),
    "tiny": Case(lambda p, x, y: plain(p, x, y) * 1e-30, (X, Y)),
    "listening": Case(lambda p, x, y: listening(hidden(p, x) @ p["v"] - y).mean(), (X, Y)),
    "numpy_parameters": Case(plain, (np.asarray(X), np.asarray(Y)), params=of(np.asarray)),
}
