"""Loops as large JAX trainers write them, by hand and carried over, each against the
large batch.

Levanter folds a scan over the micro-batches of a reshaped batch. MaxText scans too,
weighs by tokens, and donates a TrainState. The shapes of these loops are written here
from scratch, on a tiny model; an epoch that an iterator hands out has a short last
batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

pytest.importorskip("optax", reason="optax is not installed")
import jax
import jax.numpy as jnp
import optax

import gradaccum
import gradaccum_jax

from .jax_epoch import assert_bitwise, assert_close, wide

STEPS, ITEMS, LENGTH = 4, 16, 6
RNG = np.random.default_rng(17)
TOKENS = RNG.integers(0, 20, size=(ITEMS, LENGTH))
MASK = np.arange(LENGTH) < RNG.integers(1, LENGTH + 1, size=(ITEMS, 1))
BATCH = {"tokens": TOKENS, "mask": MASK}


@pytest.fixture(autouse=True)
def _wide() -> Iterator[None]:
    with wide():
        yield


def created() -> Any:
    rng = np.random.default_rng(3)
    return {
        "embedding": jnp.asarray(rng.normal(size=(20, 5))),
        "head": jnp.asarray(rng.normal(size=5)),
    }


def losses(params: Any, batch: Any) -> Any:
    return jnp.square(
        jnp.tanh(params["embedding"][batch["tokens"]]) @ params["head"] - 1
    )


def sum_per_item(params: Any, batch: Any) -> Any:
    """Every sequence counts as one item."""
    return losses(params, batch).mean()


def token_mean(params: Any, batch: Any) -> Any:
    """The mean over the tokens that the mask lets through, and what MaxText reports
    beside it.
    """
    total, weights = (losses(params, batch) * batch["mask"]).sum(), batch["mask"].sum()
    return total / weights, {"total_loss": total, "total_weights": weights}


def cut(batch: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.reshape(STEPS, -1, *leaf.shape[1:]), batch)


def fold(params: Any, batch: Any) -> Any:
    """By hand, as in Levanter: sum losses and gradients over the micro-batches, and
    divide by their number.
    """

    def add(held: Any, part: Any) -> Any:
        return jax.tree.map(
            jnp.add, held, jax.value_and_grad(sum_per_item)(params, part)
        ), None

    zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
    return jax.tree.map(
        lambda leaf: leaf / STEPS, jax.lax.scan(add, zeros, cut(batch))[0]
    )


def weighted_fold(params: Any, batch: Any) -> Any:
    """By hand, as in MaxText: sum the gradients of the summed losses and the weights,
    and divide once.
    """

    def add(held: Any, part: Any) -> Any:
        (_, aux), grads = jax.value_and_grad(
            lambda p: (token_mean(p, part)[1]["total_loss"], token_mean(p, part)[1]),
            has_aux=True,
        )(params)
        return jax.tree.map(jnp.add, held, (aux, grads)), None

    zeros = (
        {"total_loss": jnp.zeros(()), "total_weights": jnp.zeros((), int)},
        jax.tree.map(jnp.zeros_like, params),
    )
    (aux, grads), _ = jax.lax.scan(add, zeros, cut(batch))
    return (aux["total_loss"] / aux["total_weights"], aux), jax.tree.map(
        lambda leaf: leaf / aux["total_weights"], grads
    )


def test_levanter_fold_carried_over() -> None:
    """One call in place of the scan, the reshape and the division."""
    params, carried = (
        created(),
        jax.jit(gradaccum_jax.value_and_grad(sum_per_item, steps=STEPS)),
    )
    wanted = jax.jit(jax.value_and_grad(sum_per_item))(params, BATCH)
    assert_close(jax.jit(fold)(params, BATCH), wanted)
    assert_close(carried(params, BATCH), wanted)


def test_levanter_fold_of_a_short_batch() -> None:
    """By hand it does not reshape; carried over, its micro-batches are of 4, 4, 4 and 2
    items.
    """
    params, short = created(), {name: leaf[:14] for name, leaf in BATCH.items()}
    with pytest.raises(ValueError, match="cannot reshape"):
        fold(params, short)
    carried = gradaccum_jax.value_and_grad(sum_per_item, steps=STEPS)(params, short)
    assert_close(carried, jax.jit(jax.value_and_grad(sum_per_item))(params, short))


def test_maxtext_fold_carried_over() -> None:
    params = created()
    kinds = {"total_loss": "sum", "total_weights": "sum"}
    tokens = lambda batch: batch["mask"].sum()  # noqa: E731
    carried = gradaccum_jax.value_and_grad(
        token_mean, has_aux=True, aux=kinds, steps=STEPS, weight=tokens
    )
    wanted = jax.jit(jax.value_and_grad(token_mean, has_aux=True))(params, BATCH)
    assert_close(jax.jit(weighted_fold)(params, BATCH), wanted)
    assert_close(carried(params, BATCH), wanted)
    unweighted = gradaccum_jax.value_and_grad(
        token_mean, has_aux=True, aux=kinds, steps=STEPS
    )(params, BATCH)
    # the mean of means is another loss
    assert abs(unweighted[0][0] - wanted[0][0]) > 1e-3


def large_batch_steps(inner: Any, batches: Any) -> Any:
    params, state = created(), inner.init(created())

    @jax.jit
    def step(params: Any, state: Any, batch: Any) -> Any:
        updates, state = inner.update(
            jax.grad(token_mean, has_aux=True)(params, batch)[0], state, params
        )
        return optax.apply_updates(params, updates), state

    for batch in batches:
        params, state = step(params, state, batch)
    return params


def rolled(number: int) -> Any:
    return {
        name: np.roll(leaf, number, axis=0)[: ITEMS - number]
        for name, leaf in BATCH.items()
    }


def test_donated_sharded_train_state() -> None:
    """As MaxText's step: jitted with shardings, the whole TrainState donated. One call
    makes the window; the last batch is short.
    """
    train_state = pytest.importorskip(
        "flax.training.train_state", reason="flax is not installed"
    )
    inner = optax.chain(
        optax.clip_by_global_norm(0.5), optax.adamw(optax.linear_schedule(0.1, 0.01, 3))
    )
    tx = gradaccum.wrap(inner, steps=None)
    kinds = {"total_loss": "sum", "total_weights": "sum"}
    window = gradaccum_jax.value_and_update(
        token_mean,
        tx,
        has_aux=True,
        aux=kinds,
        steps=STEPS,
        weight=lambda batch: batch["mask"].sum(),
    )
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    whole, split = (
        jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*names))
        for names in ((), ("data",))
    )

    @partial(
        jax.jit,
        donate_argnums=0,
        in_shardings=(whole, split),
        out_shardings=(whole, whole),
    )
    def train(state: Any, batch: Any) -> Any:
        (loss, aux), updates, opt_state = window(state.params, state.opt_state, batch)
        params = optax.apply_updates(state.params, updates)
        return state.replace(step=state.step + 1, params=params, opt_state=opt_state), {
            "loss": loss,
            **aux,
        }

    state = jax.device_put(
        train_state.TrainState.create(apply_fn=None, params=created(), tx=tx), whole
    )
    batches = [rolled(0), rolled(0), rolled(3)]
    for batch in batches:
        given, (state, metrics) = state, train(state, jax.device_put(batch, split))
        assert all(
            leaf.is_deleted()
            for leaf in jax.tree.leaves((given.params, given.opt_state.accumulator))
        )
        assert metrics["total_weights"] == batch["mask"].sum()
    assert_close(state.params, large_batch_steps(inner, batches))
    assert (state.step, state.opt_state.optimizer_step) == (3, 3)


def of_items(items: Any) -> Any:
    return {name: leaf[items] for name, leaf in BATCH.items()}


INNER = optax.adamw(0.05)
TX = gradaccum.wrap(INNER, steps=3)


@partial(jax.jit, static_argnames="last")
def micro_step(params: Any, state: Any, batch: Any, last: bool) -> Any:
    """Weighed by tokens; the epoch's last micro-batch closes its window, whatever it
    holds.
    """
    grads, aux = jax.grad(token_mean, has_aux=True)(params, batch)
    updates, state = TX.update(grads, state, params, weight=aux["total_weights"])
    params = optax.apply_updates(params, updates)
    if last:
        updates, state = gradaccum_jax.flush(TX, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def run(carry: Any, batches: Any) -> Any:
    for batch, last in batches:
        carry = micro_step(*carry, batch, last=last)
    return carry


def test_iterator_with_a_short_last_batch() -> None:
    """16 items in micro-batches of 3: windows of 9 and 7 items, the second one with a
    micro-batch of one item.
    """
    epochs = [np.random.default_rng(epoch).permutation(ITEMS) for epoch in range(2)]
    batches = [
        (of_items(order[i : i + 3]), i + 3 >= ITEMS)
        for order in epochs
        for i in range(0, ITEMS, 3)
    ]
    large = [of_items(part) for order in epochs for part in (order[:9], order[9:])]
    params, state = run((created(), TX.init(created())), batches)
    assert_close(params, large_batch_steps(INNER, large))
    assert (state.optimizer_step, state.micro_step) == (2 * len(epochs), 0)


def test_iterator_of_grain() -> None:
    """Its batches and its state: saved with the optimizer's in mid-window, the resumed
    run has the bits of the uninterrupted one.
    """
    grain = pytest.importorskip("grain", reason="grain is not installed")
    per_epoch = -(-ITEMS // 3)

    def iterator() -> Any:
        shuffled = (
            grain.MapDataset.source(range(ITEMS))
            .shuffle(seed=5)
            .map(of_items)
            .batch(3)
            .repeat(2)
        )
        return iter(shuffled.to_iter_dataset())

    def flagged(batches: Any, start: int = 0) -> Any:
        return (
            (batch, number % per_epoch == 0)
            for number, batch in enumerate(batches, start + 1)
        )

    start = created(), TX.init(created())
    whole = run(start, flagged(iterator()))
    parts = list(iterator())
    large = [
        jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts[i : i + 3])
        for i in range(0, 2 * per_epoch, 3)
    ]
    assert_close(whole[0], large_batch_steps(INNER, large))
    batches, carry = iterator(), start
    for number in range(1, 9):
        carry = micro_step(*carry, next(batches), last=number == per_epoch)
    assert carry[1].micro_step == 2
    saved, (params, state) = batches.get_state(), jax.tree.map(np.asarray, carry)
    resumed = iterator()
    resumed.set_state(saved)
    assert_bitwise(
        run(
            (params, gradaccum_jax.check_state(TX, state, params)), flagged(resumed, 8)
        ),
        whole,
    )
