"""A loss function as `verify` calls it, what it refers to, and the random generators of
Python and NumPy.
"""

from __future__ import annotations

import functools
import random
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from gradaccum import ArgumentTypeError
from gradaccum.verification.subject import DEPTH, HostRandom, as_loss, reached


class Model:
    def __call__(self, x: Any) -> tuple[str, Any]:
        return "out", x


MODEL = Model()


class Criterion:
    def forward(self, output: Any, target: Any) -> Any:
        return output, target

    __call__ = forward


def own(model: Any, x: Any, y: Any) -> Any:
    return model, x, y


def by_name(logits: Any, target: Any, smoothing: float = 0.0) -> Any:
    return logits, target


def with_default(model: Any, x: Any, y: Any = 5) -> Any:
    return model, x, y


def closing_over_its_model(x: Any, y: Any) -> Any:
    return MODEL(x), y


def frameworks(x: Any, target: Any, factor: Any = None) -> Any:
    return x, target


frameworks.__module__ = "torch.nn.functional"


@pytest.mark.parametrize(
    ("loss_fn", "batch", "value"),
    [
        (own, (1, 2), (MODEL, 1, 2)),
        (own, ([1, 2],), (MODEL, 1, 2)),
        (own, ([1, 2], 3), (MODEL, [1, 2], 3)),
        (lambda model, pair: (model, pair), ([1, 2],), (MODEL, [1, 2])),
        (lambda *arguments: arguments, (1, 2), (MODEL, 1, 2)),
        (with_default, (1, 2), (MODEL, 1, 2)),
        (with_default, (1,), (MODEL, 1, 5)),
        (Criterion(), (1, 2), (("out", 1), 2)),
        (Criterion(), ([1, 2],), (("out", 1), 2)),
        (by_name, (1, 2), (("out", 1), 2)),
        (frameworks, (1, 2), (("out", 1), 2)),
        (functools.partial(frameworks, factor=2), (1, 2), (("out", 1), 2)),
        (lambda x, y: (x, y), (1, 2), (("out", 1), 2)),
        (closing_over_its_model, (1, 2), (("out", 1), 2)),
        (own, ({"y": 2, "x": 1},), (MODEL, 1, 2)),
        (lambda model, batch: batch, ({"y": 2},), {"y": 2}),
    ],
)
def test_convention_of_a_loss(
    loss_fn: Callable[..., Any], batch: tuple[Any, ...], value: Any
) -> None:
    loss, arguments = as_loss(loss_fn, MODEL, batch, lambda value: value is MODEL)
    assert loss(MODEL, *arguments) == value


@pytest.mark.parametrize(
    ("loss_fn", "callable_model", "words"),
    [
        (3, True, r"expected a function loss_fn\(model, \*batch\); got 3"),
        (lambda x: x, True, "3 arguments; got one that does not take 3 arguments"),
        (
            lambda a, b, c, d: a,
            True,
            "3 arguments; got one that does not take 3 arguments",
        ),
        (
            lambda x, y: x,
            False,
            (
                r"loss_fn\(params, \*batch\), 3 arguments; got a criterion, which takes"
                r" 2 arguments"
            ),
        ),
    ],
)
def test_loss_of_no_convention_is_refused(
    loss_fn: Any, callable_model: bool, words: str
) -> None:
    with pytest.raises(ArgumentTypeError, match=f"^loss_fn: .*{words}"):
        as_loss(
            loss_fn, MODEL, (1, 2), (lambda value: False) if callable_model else None
        )


def test_what_a_loss_reaches() -> None:
    closed, box = object(), types.SimpleNamespace(inner=object())

    def loss(x: Any, scale: Any = box) -> Any:
        return (lambda: MODEL)(), closed

    found = dict(reached(functools.partial(loss, 7, scale=[8])))
    assert {
        "func",
        "argument",
        "scale",
        "MODEL",
        "closed",
        "default",
        "inner",
    } <= found.keys()
    assert (
        found["MODEL"],
        found["closed"],
        found["default"],
        found["argument"],
        found["scale"],
    ) == (MODEL, closed, box, 7, [8])
    assert dict(reached({"key": box})).keys() == {"loss_fn", "key", "inner"}
    assert {name for name, _ in reached(Criterion().forward)} >= {"self", "func"}
    assert not {name for name, _ in reached(Criterion, types)} - {"loss_fn"}, (
        "a class and a module are not walked through"
    )
    chain: Any = {"end": 0}
    for depth in range(DEPTH):
        chain = {str(depth): chain}
    assert "end" not in dict(reached(chain))
    assert "end" in dict(reached(chain[str(DEPTH - 1)]))


OWN, NUMPYS, OLD = random.Random(1), np.random.default_rng(1), np.random.RandomState(1)
GENERATORS = {
    "random": lambda: random.random(),
    "numpy.random": lambda: np.random.random(),
    "own": lambda: OWN.random(),
    "numpy's": lambda: NUMPYS.random(),
    "numpy's old": lambda: OLD.random(),
}


@pytest.mark.parametrize("draw", GENERATORS.values(), ids=GENERATORS)
def test_random_numbers_of_the_host(draw: Callable[[], float]) -> None:
    host = HostRandom(draw, random.SystemRandom())
    users = draw()

    def numbers(seed: int, count: int = 1) -> tuple[list[float], list[bytes]]:
        host.begin(*[seed] * bool(seed))
        return [draw() for _ in range(count)], host.states()

    (first, one), (again, same), (two, more), (other, moved) = (
        numbers(0),
        numbers(0),
        numbers(0, 2),
        numbers(3),
    )
    assert (first, one) == (again, same)
    assert (
        two[0] == first[0] == users != other[0] == numbers(3)[0][0] != numbers(4)[0][0]
    )
    assert (host.per_item(one, same), len(host.per_item(more, one))) == ([], 1)
    assert len(host.seeded(one, moved)) == len(host.states()) - len(
        host.per_item(one, moved)
    )
    assert all(
        words.endswith("a number for each item") for words in host.per_item(more, one)
    )
    assert all(
        words.endswith("which the loss seeds") for words in host.seeded(one, same)
    )
