"""Small losses in JAX, each with one published mistake planted; a case names the cause and a word of where it is."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .jax_losses import (
    CLASS,
    CLASSES,
    ITEMS,
    KEY,
    MASK,
    POSITIVES,
    SEQUENCES,
    TOKEN_LABELS,
    Case,
    X,
    Y,
    cross_entropy,
    dropped,
    hidden,
    plain,
    squares,
)


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


def two_counts(params: Any, x: Any, mask: Any) -> Any:
    """A mean over tokens, and one over sequences."""
    out = hidden(params, x) @ params["v"]
    return (out**2 * mask).sum() / mask.sum() + out[:, 0].mean()


OUTSIDE = np.random.default_rng(3)


def noise_of_a_generator(params: Any, x: Any, y: Any) -> Any:
    return plain(params, x + OUTSIDE.standard_normal(x.shape).astype(np.float32), y)


def generator_in_the_loss(params: Any, x: Any, y: Any) -> Any:
    return plain(params, x + np.random.default_rng(0).standard_normal(x.shape).astype(np.float32), y)


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
    "normalised": Case(normalised, (X, Y), kind="batch_statistics", where="batch_norm at jax_mistaken_losses.py"),
    "expert_capacity": Case(expert_capacity, (X, Y), kind="batch_statistics", where="expert_capacity"),
    "key_in_the_loss": Case(key_in_the_loss, (X, Y), kind="shared_randomness", where="dropped at jax_losses.py"),
    "shared_key": Case(key_of_the_batch, (X, Y, KEY), {"axes": (0, 0, None)}, kind="shared_randomness", where="dropped"),
    "numpys_draw": Case(numpys_draw, (X, Y), kind="shared_randomness", where="numpy.random"),
    "noise_of_a_generator": Case(noise_of_a_generator, (X, Y), kind="shared_randomness", where="numpy.random"),
    "generator_in_the_loss": Case(generator_in_the_loss, (X, Y), kind="shared_randomness", where="the loss"),
    "two_counts": Case(two_counts, (SEQUENCES, MASK), kind="several_counts", where="the number of items; batch[1] != 0"),
    "deaf": Case(with_deaf, (X, Y), kind="custom_backward", where="deaf"),
    "penalised": Case(penalised, (X, Y), {"reduction": "sum"}, kind="repeated_term", where="'w'"),
    "z_loss": Case(z_loss, (X, CLASS), kind="summed_term", where="'w'"),
    "summed": Case(plain, (X, Y), {"reduction": "sum"}, kind="wrong_reduction"),
    "sum_under_mean": Case(lambda p, x, y: squares(p, hidden(p, x), y).sum(), (X, Y), kind="wrong_reduction"),
}
