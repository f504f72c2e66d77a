"""The rows of Keras: ``gradient_accumulation_steps`` of its optimizers, on the torch
backend.
"""

from __future__ import annotations

import os
from typing import Any

os.environ["KERAS_BACKEND"] = "torch"

import keras
import numpy as np
import torch

import gradaccum
from benchmarks.scoreboard.measuring import Gradients
from benchmarks.scoreboard.torch_models import (
    FULL,
    MICRO,
    SHORT_BATCH,
    SHORT_WINDOW,
    STEPS,
)
from gradaccum import kit

X = np.random.default_rng(1).standard_normal((FULL, 5))
Y = 2 * np.sin(X.sum(1, keepdims=True))


def network() -> Any:
    keras.config.set_floatx("float64")
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.layers.Input((5,)),
            keras.layers.Dense(4, "tanh", name="first"),
            keras.layers.Dense(1, name="last"),
        ]
    )


def train(model: Any, optimizer: Any, count: int, size: int) -> None:
    model.compile(optimizer, "mse")
    model.fit(X[:count], Y[:count], batch_size=size, epochs=1, shuffle=False, verbose=0)


def trained(count: int, micro: bool) -> Gradients:
    model = network()
    optimizer = keras.optimizers.SGD(
        1.0, gradient_accumulation_steps=STEPS if micro else None
    )
    before = [np.array(each) for each in model.get_weights()]
    train(model, optimizer, count, MICRO if micro else count)
    names = ["/".join(each.path.split("/")[-2:]) for each in model.weights]
    return {
        name: a - np.array(b)
        for name, a, b in zip(names, before, model.get_weights(), strict=True)
    }


def short_batch(*, micro: bool, even: bool) -> Gradients:
    return trained(FULL if even else SHORT_BATCH, micro)


def short_window(*, micro: bool, even: bool) -> Gradients:
    return trained(FULL if even else SHORT_WINDOW, micro)


class Recorder(keras.optimizers.Optimizer):  # type: ignore[misc]
    """Keeps the gradients that Keras's accumulation hands over, and moves nothing."""

    def __init__(self, **options: Any) -> None:
        super().__init__(learning_rate=1.0, **options)
        self.gradients: list[torch.Tensor] = []

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        self.gradients.append(gradient.detach().double().reshape(-1))


def check(count: int) -> gradaccum.LoopReport:
    """Keras's optimizers are not torch's, so that the recorder stands in one's place."""
    model = network()
    recorder = Recorder(gradient_accumulation_steps=STEPS)
    train(model, recorder, count, MICRO)
    parameters = [variable.value for variable in model.trainable_variables]
    rows = []
    weights = []
    for start in range(0, count, MICRO):
        x = torch.tensor(X[start : min(start + MICRO, count)])
        y = torch.tensor(Y[start : min(start + MICRO, count)])
        loss = (model(x) - y).square().mean()
        gradients = torch.autograd.grad(loss, parameters)
        rows.append(torch.cat([gradient.reshape(-1) for gradient in gradients]))
        weights.append(float(len(x)))
    size = len(parameters)
    updates = [
        torch.cat(recorder.gradients[start : start + size])
        for start in range(0, len(recorder.gradients), size)
    ]
    return kit.loop_report(
        rows,
        updates,
        weights,
        torch.finfo(torch.float64).eps,
        reduction="mean",
        steps=STEPS,
    )


CHECKED = {
    "short_batch": lambda: check(SHORT_BATCH),
    "short_window": lambda: check(SHORT_WINDOW),
}
