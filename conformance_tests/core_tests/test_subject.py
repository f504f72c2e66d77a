"""A loss function as `verify` calls it, the batch, and the random states of Python and
NumPy.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from gradaccum.kit import HostRandom
from gradaccum.verification.batch import Batch
from gradaccum.verification.subject import as_loss


class Model:
    def __call__(self, x: Any) -> tuple[str, Any]:
        return "out", x


MODEL = Model()


class Criterion:
    def forward(self, output: Any, target: Any) -> Any:
        return output, target

    __call__ = forward


class Trainer:
    model = MODEL

    def __init__(self) -> None:
        self.model = MODEL

    def loss(self, x: Any, y: Any) -> Any:
        return self.model(x), y


def usual(model: Any, x: Any, y: Any) -> Any:
    return model, x, y


def by_name(logits: Any, target: Any, smoothing: float = 0.0) -> Any:
    return logits, target


def with_default(model: Any, x: Any, y: Any = 5) -> Any:
    return model, x, y


def closing_over_its_model(x: Any, y: Any) -> Any:
    return MODEL(x), y


@pytest.mark.parametrize(
    ("loss_fn", "batch", "value"),
    [
        (usual, (1, 2), (MODEL, 1, 2)),
        (lambda *arguments: arguments, (1, 2), (MODEL, 1, 2)),
        (with_default, (1, 2), (MODEL, 1, 2)),
        (with_default, (1,), (MODEL, 1, 5)),
        (Criterion(), (1, 2), (("out", 1), 2)),
        (by_name, (1, 2), (("out", 1), 2)),
        (lambda x, y: (x, y), (1, 2), (("out", 1), 2)),
        (closing_over_its_model, (1, 2), (("out", 1), 2)),
        (Trainer().loss, (1, 2), (("out", 1), 2)),
        (usual, {"y": 2, "x": 1}, (MODEL, 1, 2)),
        (lambda model, **batch: batch, {"y": 2}, {"y": 2}),
        (lambda x, y: (x, y), {"y": 2, "x": 1}, (1, 2)),
        (lambda model, batch: batch, {"y": 2}, {"y": 2}),
    ],
)
def test_convention_of_a_loss(
    loss_fn: Callable[..., Any], batch: Any, value: Any
) -> None:
    loss, arguments = as_loss(loss_fn, batch, lambda value: value is MODEL)
    assert loss(MODEL, *arguments) == value


def test_loss_that_closes_over_its_model_through_a_function() -> None:
    loss, arguments = as_loss(
        lambda x: closing_over_its_model(x, 2), 1, lambda value: value is MODEL
    )
    assert loss(None, *arguments) == closing_over_its_model(1, 2)


def test_loss_is_left_alone_where_nothing_is_known_of_it() -> None:
    """Without a model that can be called, as in JAX, and without a signature."""

    def loss_fn(outputs, x=5):
        return outputs, x

    assert as_loss(loss_fn, (1,)) == (loss_fn, (1,))
    assert as_loss(max, (1, 2)) == (max, (1, 2))


def make_batch(*arguments: Any, axes: Any = 0, weight: Any = None) -> Batch:
    return Batch(
        arguments,
        axes,
        lambda value: isinstance(value, np.ndarray),
        lambda array, axis, items: array if axis is None else array.take(items, axis),
        weight,
    )


def test_part_of_a_batch() -> None:
    """Arrays are cut along their axes; a number and what has no axis are passed in
    full.
    """
    x = np.arange(12).reshape(2, 6)
    y = np.arange(6)
    table = np.ones(3)
    batch = make_batch({"x": x, "y": y}, table, 7, axes=({"x": 1, "y": 0}, None, 0))
    nest, whole, number = batch.part([5, 0])
    assert batch.items == 6
    assert batch.terms == 12
    assert nest["x"].tolist() == [[5, 0], [11, 6]]
    assert nest["y"].tolist() == [5, 0]
    assert whole is table
    assert number == 7
    assert [path for path, _ in batch.arrays([0])] == ["batch[0]['x']", "batch[0]['y']"]
    assert make_batch(y, np.asarray(3.0)).items == 6


@pytest.mark.parametrize(
    ("weight", "value"),
    [
        (None, 2.0),
        ([1, 2, 3], 4.0),
        (np.asarray([1, 2, 3]), 4.0),
        (lambda x: x.sum(), 20.0),
    ],
)
def test_weight_of_a_micro_batch(weight: Any, value: float) -> None:
    batch = make_batch(np.asarray([5, 10, 15]), weight=weight)
    assert batch.weight([0, 2]) == value


@pytest.mark.parametrize(
    "draw",
    [lambda: random.random(), lambda: np.random.random()],
    ids=["random", "numpy.random"],
)
def test_random_numbers_of_the_host(draw: Callable[[], float]) -> None:
    host = HostRandom()
    users = draw()
    host.restore()
    assert draw() == users

    def number(seed):
        host.restore(seed)
        return draw()

    assert number(0) == users
    assert number(3) == number(3)
    assert len({number(3), number(4), number(0)}) == 3
