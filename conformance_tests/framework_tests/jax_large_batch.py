"""The model that the tests of the large batch share, in float64, and the large batch's
own loss and gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

ITEMS = 10


def float64(wide: bool = True) -> Any:
    """The context in which JAX has float64 switched on, or off."""
    if hasattr(jax, "enable_x64"):
        return jax.enable_x64(wide)
    from jax.experimental import enable_x64

    return enable_x64(wide)


@pytest.fixture(autouse=True)
def in_float64() -> Iterator[None]:
    """For each test of a module that imports it."""
    with float64():
        yield


def numbers(*shape: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng([seed, *shape]).normal(size=shape)


def model() -> dict[str, Any]:
    return {
        "w": jnp.asarray(numbers(3, 4)),
        "b": jnp.asarray(numbers(4)),
        "v": jnp.asarray(numbers(4, seed=1)),
    }


def data(items: int = ITEMS) -> tuple[Any, Any]:
    return numbers(items, 3), numbers(items)


def errors(params: Any, x: Any, y: Any) -> Any:
    """Squared errors, one per item."""
    return (jnp.tanh(x @ params["w"] + params["b"]) @ params["v"] - y) ** 2


def mean_loss(params: Any, x: Any, y: Any) -> Any:
    return jnp.mean(errors(params, x, y))


def close(made: Any, wanted: Any, tolerance: float = 1e-13) -> None:
    """Both trees agree, relative to the largest number of each leaf."""
    assert jax.tree.structure(made) == jax.tree.structure(wanted)

    def check(a: Any, b: Any) -> None:
        a = np.asarray(a)
        b = np.asarray(b)
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        np.testing.assert_allclose(
            a, b, rtol=0, atol=tolerance * max(np.abs(b).max(initial=0), 1e-300)
        )

    jax.tree.map(check, made, wanted)


def assert_same_bits(found: Any, expected: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
