"""Calls of the large batch that make no sense: each is refused by name, with what to
write instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradaccum
import gradaccum_jax

VALUE, TYPE = gradaccum.ArgumentValueError, gradaccum.ArgumentTypeError
X, ONE = np.ones((6, 2), np.float32), jnp.ones(())
TX = gradaccum.wrap(optax.sgd(1.0), steps=None)
INTEGERS = {"w": ONE, "n": jnp.arange(2)}
SIZES = gradaccum.AutoMicroBatchSize(memory_limit=10**9)


def loss(params: Any, *batch: Any, train: bool = False) -> Any:
    return jnp.mean(params * jax.tree.leaves(batch)[0])


def make(loss_fn: Any = loss, **options: Any) -> Any:
    return gradaccum_jax.value_and_grad(loss_fn, **{"steps": 2, **options})


def coupled(**options: Any) -> Any:
    return gradaccum_jax.coupled_value_and_grad(
        lambda p, x: p["w"] * x, lambda p, z: z.sum(), **{"steps": 2, **options}
    )


def window(tx: Any = TX, params: Any = ONE, **keywords: Any) -> Any:
    step = gradaccum_jax.value_and_update(loss, tx, steps=2)
    return step(params, TX.init(ONE), X, **keywords)


CASES: dict[str, tuple[Callable[[], Any], Any, str]] = {
    # options
    "automatic size under jit": (
        lambda: jax.jit(make(steps=None, micro_batch_size=SIZES))(ONE, X),
        Exception,
        ".*",
    ),
    "merging by an unknown name": (
        lambda: make(lambda p, x: (p, x), has_aux=True, merge_aux="mean")(ONE, X),
        TypeError,
        ".*not callable",
    ),
    # batches
    "list of flags": (
        lambda: make()(ONE, X, [True] * 6),
        VALUE,
        r"batch\[1\]\[0\]: expected an array with an axis 0.*a bool.*a list",
    ),
    "array for a key": (
        lambda: make(axes="key")(ONE, X),
        TYPE,
        r"batch\[0\]: expected one random key",
    ),
    # arguments
    "integers": (
        lambda: make(lambda p, x: p["w"] * x.sum())(INTEGERS, X),
        TypeError,
        "grad requires real- or complex-valued inputs",
    ),
    "integers of a coupled loss": (
        lambda: coupled()(INTEGERS, X),
        TypeError,
        "grad requires real- or complex-valued inputs",
    ),
    "argument that is not there": (
        lambda: make(argnums=2)(ONE, X),
        IndexError,
        "range object index out of range",
    ),
    # the optimizer and its state
    "bare optimizer": (
        lambda: window(optax.sgd(1.0)),
        TYPE,
        "tx: expected a wrapped optimizer",
    ),
    "state of other parameters": (
        lambda: window(params=jnp.ones(2)),
        gradaccum.GradientError,
        "grads",
    ),
    # keywords
    "misspelt keyword": (
        lambda: window(trian=True),
        TYPE,
        "trian: expected an argument of the loss function, or one that",
    ),
    "weight of tx.update": (
        lambda: window(weight=3.0),
        TYPE,
        r"weight: .*belong to tx\.update",
    ),
    "array by keyword": (
        lambda: make()(ONE, X, train=X),
        TYPE,
        "train: expected a constant, such as True.*by position",
    ),
}


@pytest.mark.every_mode
@pytest.mark.parametrize("name", CASES)
def test_misuse_is_refused(name: str) -> None:
    call, kind, words = CASES[name]
    with pytest.raises(kind, match=f"^{words}"):
        call()


def calls(params: Any) -> list[Callable[..., Any]]:
    """Every call that differentiates, of a model and a batch; `params` are those that
    an optimizer has.
    """
    step = gradaccum_jax.value_and_update(loss, TX, steps=2)
    return [
        make(allow_int=True),
        lambda p, x: step(p, TX.init(params), x),
        gradaccum_jax.coupled_value_and_grad(
            lambda p, x: x, lambda p, z: z.mean(), steps=2
        ),
    ]


def test_models_that_hold_functions() -> None:
    """An equinox model has its activation among its leaves."""
    model = {"w": ONE, "activation": jax.nn.relu}
    for call in calls(ONE):
        with pytest.raises(TypeError, match="custom_jvp"):
            call(model, X)


def test_modules_with_random_streams() -> None:
    """Each micro-batch would start from the same count: one dropout mask for all. What
    the error says to write has one for each.
    """
    nnx = pytest.importorskip("flax.nnx", reason="flax is not installed")
    model = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    for call in calls(ONE):
        with pytest.raises(
            TYPE,
            match=(
                r"argument 0.*: expected parameters alone; got a random"
                r" stream.*nnx\.split\(.*copy=True\)"
            ),
        ):
            call(model, X)
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def dropped(w: Any, x: Any, key: Any) -> Any:
        merged = nnx.merge(graph, params, rest, copy=True)
        nnx.reseed(merged, default=key)
        return w * x.mean(), merged(x)

    step = make(dropped, steps=3, has_aux=True, merge_aux="concatenate")
    made = step(ONE, np.ones((24, 4), np.float32), jax.random.key(0))[0][1]
    assert len(np.unique(np.asarray(made).reshape(3, -1), axis=0)) == 3


def test_sparse_batch_is_refused() -> None:
    """Its first axis holds the entries, not the items."""
    sparse = pytest.importorskip("jax.experimental.sparse")
    x = sparse.BCOO.fromdense(jnp.eye(4))
    take = gradaccum_jax.value_and_grad(lambda p, x: (x @ p).sum(), steps=2)
    with pytest.raises(
        gradaccum.ArgumentValueError, match=r"batch\[0\]: expected a dense array"
    ):
        take(jnp.ones(4), x)


def test_rows_of_unequal_micro_batches_are_not_stacked() -> None:
    def loss_fn(p: Any, x: Any) -> Any:
        return (x @ p).mean(), x @ p

    take = gradaccum_jax.value_and_grad(loss_fn, has_aux=True, steps=2)
    with pytest.raises(gradaccum.ArgumentValueError, match=r"aux: .* merge_aux="):
        take(jnp.ones(3), jnp.ones((5, 3)))
