"""The rows of Keras: ``gradient_accumulation_steps`` of its optimizers, on the torch
backend.
"""

from __future__ import annotations

import os

os.environ["KERAS_BACKEND"] = "torch"

import keras
import numpy as np

from benchmarks.scoreboard.measuring import Gradients
from benchmarks.scoreboard.torch_models import (
    FULL,
    MICRO,
    SHORT_BATCH,
    SHORT_WINDOW,
    STEPS,
)


def trained(count: int, micro: bool) -> Gradients:
    keras.config.set_floatx("float64")
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.layers.Input((5,)),
            keras.layers.Dense(4, "tanh", name="first"),
            keras.layers.Dense(1, name="last"),
        ]
    )
    x = np.random.default_rng(1).standard_normal((FULL, 5))
    y = 2 * np.sin(x.sum(1, keepdims=True))
    model.compile(
        keras.optimizers.SGD(1.0, gradient_accumulation_steps=STEPS if micro else None),
        "mse",
    )
    before = [np.array(each) for each in model.get_weights()]
    model.fit(
        x[:count],
        y[:count],
        batch_size=MICRO if micro else count,
        epochs=1,
        shuffle=False,
        verbose=0,
    )
    names = ["/".join(each.path.split("/")[-2:]) for each in model.weights]
    return {
        name: a - np.array(b)
        for name, a, b in zip(names, before, model.get_weights(), strict=True)
    }


def short_batch(*, micro: bool, even: bool) -> Gradients:
    return trained(FULL if even else SHORT_BATCH, micro)


def short_window(*, micro: bool, even: bool) -> Gradients:
    return trained(FULL if even else SHORT_WINDOW, micro)
