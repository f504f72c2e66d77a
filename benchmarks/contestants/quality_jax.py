"""The quality question's JAX runs: one jitted step each, compiled for each size of a
batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
import optax

import gradaccum
import gradaccum_jax
from benchmarks.contestants.digits import (
    LEARNING_RATE,
    MOMENTUM,
    STEPS,
    Batch,
    Parameters,
    Window,
    whole,
)
from benchmarks.contestants.runs import GRADACCUM, LARGE, Run


def runs() -> dict[str, Callable[[Parameters], Run]]:
    """By contestant; each is given the first parameters."""
    return {LARGE: LargeBatch, GRADACCUM: Gradaccum, "optax.MultiSteps": MultiSteps}


def loss(params: Any, x: Any, y: Any) -> Any:
    """Mean cross-entropy."""
    w1, b1, w2, b2 = params
    logits = jax.nn.relu(x @ w1 + b1) @ w2 + b2
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


class Transformed:
    """Parameters and the state of a transformation `tx`, which is given one batch at a
    time.
    """

    tx: Any = optax.sgd(LEARNING_RATE, MOMENTUM)

    def __init__(self, first: Parameters) -> None:
        self.params = [jax.numpy.asarray(value) for value in first]
        self.state = self.tx.init(self.params)

    def take(self, batch: Batch, **extra: Any) -> None:
        self.params, self.state = _steps(self.tx)(
            self.params, self.state, *batch, **extra
        )

    def parameters(self) -> Parameters:
        return [np.asarray(value) for value in self.params]


class LargeBatch(Transformed):
    """The truth: one gradient and one update for each window."""

    def epoch(self, windows: Iterable[Window]) -> None:
        for window in windows:
            self.take(whole(window))


class Gradaccum(Transformed):
    """Each micro-batch with its number of items as its weight, and a flush at the
    epoch's end.
    """

    tx = gradaccum.wrap(Transformed.tx, steps=STEPS)

    def epoch(self, windows: Iterable[Window]) -> None:
        for window in windows:
            for batch in window:
                self.take(batch, weight=len(batch[1]))
        updates, self.state = gradaccum_jax.flush(self.tx, self.state, self.params)
        self.params = optax.apply_updates(self.params, updates)


class MultiSteps(Transformed):
    """It knows no weights and no short window: what an epoch leaves over begins the
    next one's first window.
    """

    tx = optax.MultiSteps(Transformed.tx, STEPS)

    def epoch(self, windows: Iterable[Window]) -> None:
        for window in windows:
            for batch in window:
                self.take(batch)


_STEPS: dict[int, Any] = {}


def _steps(tx: Any) -> Any:
    """The jitted step of a transformation, made once."""

    def step(params: Any, state: Any, x: Any, y: Any, **extra: Any) -> tuple[Any, Any]:
        updates, state = tx.update(jax.grad(loss)(params, x, y), state, params, **extra)
        return optax.apply_updates(params, updates), state

    return _STEPS.setdefault(id(tx), jax.jit(step))
