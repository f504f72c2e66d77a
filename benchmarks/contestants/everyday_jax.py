"""The everyday question's JAX loops, in float64."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gradaccum
import gradaccum_jax
from benchmarks.contestants.runs import CLIP, EPOCHS, LARGE, RATE, STEPS, UPDATES
from benchmarks.questions.everyday import IGNORED, Arrays, Batch, Loop


def loops() -> dict[str, Loop]:
    """By name; the large batch is the first."""
    jax.config.update("jax_enable_x64", True)  # type: ignore[no-untyped-call]
    return {
        LARGE: large,
        "`optax.MultiSteps`": multi_steps,
        "gradaccum, a misspelt weight": misspelt,
        "gradaccum, no `epoch`, no weights": plain,
        "gradaccum, `epoch`, no weights": unweighted,
        "gradaccum, `epoch` and weights": careful,
    }


def adamw() -> Any:
    return optax.adamw(optax.cosine_decay_schedule(RATE, UPDATES))


def clipped() -> Any:
    return optax.chain(optax.clip_by_global_norm(CLIP), adamw())


def wrapped() -> Any:
    return gradaccum.wrap(adamw(), steps=STEPS, clip_norm=CLIP)


def loss(params: Any, x: Any, y: Any) -> Any:
    """Mean cross-entropy over the labels that count."""
    w1, b1, w2, b2 = params
    logits = jnp.tanh(x @ w1 + b1) @ w2 + b2
    counts = y != IGNORED
    each = optax.softmax_cross_entropy_with_integer_labels(
        logits, jnp.where(counts, y, 0)
    )
    return jnp.sum(jnp.where(counts, each, 0)) / counts.sum()


class Training:
    """Parameters and the state of a transformation."""

    def __init__(self, tx: Any, first: Arrays) -> None:
        self.params = [jnp.asarray(value) for value in first]
        self.state = tx.init(self.params)

        @jax.jit
        def step(
            params: Any, state: Any, x: Any, y: Any, **extra: Any
        ) -> tuple[Any, Any]:
            updates, state = tx.update(
                jax.grad(loss)(params, x, y), state, params, **extra
            )
            return optax.apply_updates(params, updates), state

        self._step = step

    def step(self, batch: Batch, **extra: Any) -> None:
        self.params, self.state = self._step(self.params, self.state, *batch, **extra)

    def end(self) -> Arrays:
        return [np.asarray(value) for value in self.params]


def items(batch: Batch) -> int:
    return int((batch[1] != IGNORED).sum())


def large(batches: list[Batch], first: Arrays) -> Arrays:
    training = Training(clipped(), first)
    for _, begin in itertools.product(range(EPOCHS), range(0, len(batches), STEPS)):
        window = batches[begin : begin + STEPS]
        training.step(
            (
                np.concatenate([x for x, _ in window]),
                np.concatenate([y for _, y in window]),
            )
        )
    return training.end()


def in_turn(tx: Any, batches: list[Batch], first: Arrays, **extra: Any) -> Arrays:
    training = Training(tx, first)
    for batch in batches * EPOCHS:
        training.step(batch, **extra)
    return training.end()


def multi_steps(batches: list[Batch], first: Arrays) -> Arrays:
    return in_turn(optax.MultiSteps(clipped(), STEPS), batches, first)


def misspelt(batches: list[Batch], first: Arrays) -> Arrays:
    return in_turn(wrapped(), batches, first, wieght=items(batches[0]))


def plain(batches: list[Batch], first: Arrays) -> Arrays:
    return in_turn(wrapped(), batches, first)


def unweighted(batches: list[Batch], first: Arrays) -> Arrays:
    return by_epoch(batches, first, lambda batch: None)


def careful(batches: list[Batch], first: Arrays) -> Arrays:
    return by_epoch(batches, first, items)


def by_epoch(batches: list[Batch], first: Arrays, weight: Any) -> Arrays:
    training = Training(wrapped(), first)
    for _ in range(EPOCHS):
        for batch, last in gradaccum_jax.epoch(batches):
            training.step(batch, weight=weight(batch), last=last)
    return training.end()
