"""Every optimizer of `optax` and `optax.contrib`: wrapped, it equals the bare one on
the large batch, and runs once per window.

Truth is the bare optimizer on the large batch, in float64. The micro-batches' gradients
are taken at the parameters as they move. Each optimizer runs in one compiled program:
both runs are scans, and the wrapped one writes down the parameters and the inner
optimizer's state after every micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

pytest.importorskip("optax", reason="optax is not installed")
import jax
import jax.numpy as jnp
import optax

import gradaccum
import gradaccum_jax

from .optax_optimizers import OF_THE_BATCH, REFUSED, factories, make, params

STEPS, WINDOWS, ITEMS = 3, 3, 2
TOLERANCE = 1e-12
QUICK = {"xla_cpu_use_fusion_emitters": False}
"""Halves the time that XLA:CPU compiles a small program for."""
FACTORIES = factories()
LOSS_ALONE = [name for name, names in OF_THE_BATCH.items() if names == ("value",)]
"""They read the loss and nothing else of the batch: a wrapped optimizer gives them the
window's.
"""
STREAMED = sorted(
    (FACTORIES.keys() - REFUSED.keys() - OF_THE_BATCH.keys()) | set(LOSS_ALONE)
)
PARTS = {
    name
    for name in STREAMED
    if name.removeprefix("scale_by_") in FACTORIES.keys() - {name}
}
"""Transformations that are the main part of an optimizer which the default run has:
these run with --deep.
"""
RNG = np.random.default_rng(5)
X, Y = (
    RNG.normal(size=(WINDOWS, STEPS, ITEMS, 3)),
    RNG.normal(size=(WINDOWS, STEPS, ITEMS, 2)),
)


@pytest.fixture(autouse=True)
def wide_and_quickly_compiled() -> Iterator[None]:
    """float64, and without most of XLA's passes, which would take ten times as long as
    the runs.
    """
    jax.config.update("jax_disable_most_optimizations", True)
    with (
        jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64
    )(True):
        yield
    jax.config.update("jax_disable_most_optimizations", False)


pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:inject_stateful_hyperparams is deprecated:DeprecationWarning"
    ),
    pytest.mark.filterwarnings(
        "ignore:`optimistic_adam` is deprecated:DeprecationWarning"
    ),
    pytest.mark.filterwarnings(
        'ignore:"seed" is deprecated and will be removed in optax'
        " 0.2.7:DeprecationWarning"
    ),
]


def loss(params: Any, x: Any, y: Any) -> Any:
    return jnp.mean(
        jnp.sum((jnp.tanh(x @ params["w"]) + params["b"] - y) ** 2, axis=-1)
    )


GRADIENT = jax.jit(jax.grad(loss))


def of_batch(names: tuple[str, ...], params: Any, x: Any, y: Any) -> dict[str, Any]:
    """The extra arguments `names` for the batch (x, y)."""

    def value_fn(params: Any) -> Any:
        return loss(params, x, y)

    made = {
        "value": value_fn(params),
        "grad": jax.grad(value_fn)(params),
        "value_fn": value_fn,
        "obj_fn": value_fn,
    }
    return {name: made[name] for name in names}


def bare_run(inner: Any, start: Any, names: tuple[str, ...] = ()) -> list[Any]:
    """The parameters and the optimizer's state after each large batch. Op by op: the
    programs of single ops serve all optimizers.
    """
    params, state, held = start, inner.init(start), []
    for x, y in zip(X.reshape(WINDOWS, -1, 3), Y.reshape(WINDOWS, -1, 2), strict=True):
        updates, state = inner.update(
            GRADIENT(params, x, y), state, params, **of_batch(names, params, x, y)
        )
        params = optax.apply_updates(params, updates)
        held.append((params, state))
    return held


def streamed_run(tx: Any, start: Any, names: tuple[str, ...] = ()) -> list[Any]:
    """The parameters and the wrapped optimizer's state before the first micro-batch and
    after each.
    """
    held, update = [(start, tx.init(start))], jax.jit(tx.update, compiler_options=QUICK)
    for x, y in zip(X.reshape(-1, ITEMS, 3), Y.reshape(-1, ITEMS, 2), strict=True):
        params, state = held[-1]
        updates, state = update(
            GRADIENT(params, x, y), state, params, **of_batch(names, params, x, y)
        )
        held.append((optax.apply_updates(params, updates), state))
    assert update._cache_size() == 1
    return held


def leaves_of(tree: Any) -> list[np.ndarray[Any, Any]]:
    leaves = map(jnp.asarray, jax.tree.leaves(tree))
    return [
        np.asarray(
            jax.random.key_data(leaf)
            if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
            else leaf
        )
        for leaf in leaves
    ]


def assert_bitwise(after: Any, before: Any) -> None:
    for a, b in zip(leaves_of(after), leaves_of(before), strict=True):
        assert a.tobytes() == b.tobytes()


def assert_close(ours: Any, theirs: Any) -> None:
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(leaves_of(ours), leaves_of(theirs), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.deep) if name in PARTS else name
        for name in STREAMED
    ],
)
def test_equals_the_bare_optimizer(name: str) -> None:
    inner, start, names = (
        make(name, FACTORIES[name]),
        params(),
        OF_THE_BATCH.get(name, ()),
    )
    ours, theirs = (
        streamed_run(gradaccum.wrap(inner, steps=STEPS), start, names),
        bare_run(inner, start, names),
    )
    for number, (before, after) in enumerate(pairwise(ours), start=1):
        window, within = divmod(number, STEPS)
        assert after[1].optimizer_step == window
        if within:
            assert_bitwise(
                (after[0], after[1].inner_state), (before[0], before[1].inner_state)
            )
        else:
            assert_close((after[0], after[1].inner_state), theirs[window - 1])


@pytest.mark.parametrize("name", sorted(OF_THE_BATCH))
def test_equals_the_bare_optimizer_at_a_flush(name: str) -> None:
    """Those that read the loss of the batch, or a function of it, get that of the whole
    window from the caller.
    """
    inner, start, names = make(name, FACTORIES[name]), params(), OF_THE_BATCH[name]
    tx = gradaccum.wrap(inner, steps=None)
    moved, state = start, tx.init(start)

    @partial(jax.jit, compiler_options=QUICK)
    def add(params: Any, state: Any, x: Any, y: Any) -> Any:
        extra = of_batch(names, params, x, y)
        return tx.update(GRADIENT(params, x, y), state, params, **extra)[1]

    for x, y, wanted in zip(X, Y, bare_run(inner, start, names), strict=True):
        for micro_batch in zip(x, y, strict=True):
            before, state = state, add(moved, state, *micro_batch)
            assert_bitwise(state.inner_state, before.inner_state)
        extra = of_batch(names, moved, x.reshape(-1, 3), y.reshape(-1, 2))
        updates, state = gradaccum_jax.flush(tx, state, moved, **extra)
        moved = optax.apply_updates(moved, updates)
        assert_close((moved, state.inner_state), wanted)


@pytest.mark.parametrize("name", sorted(OF_THE_BATCH.keys() - set(LOSS_ALONE)))
def test_what_belongs_to_one_micro_batch_is_refused(name: str) -> None:
    """In a streaming loop the optimizer would read it together with the whole window's
    gradient. Windows of one are large batches.
    """
    inner, start, names = make(name, FACTORIES[name]), params(), OF_THE_BATCH[name]
    extra = of_batch(names, start, X[0, 0], Y[0, 0])
    words = rf"^({'|'.join(names)}): .*gradaccum_jax\.flush"

    def update(steps: Any) -> Any:
        tx = gradaccum.wrap(inner, steps=steps)
        return tx.update(start, tx.init(start), start, **extra)

    for steps in (STEPS, [(0, 1), (4, 2)], lambda step: 1 + step):
        with pytest.raises(gradaccum.UsageError, match=words):
            update(steps)
    jax.eval_shape(lambda: update(1))


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_optimizer_that_fits_in_no_window_is_refused(name: str) -> None:
    """One that accumulates itself; the gradients of an item or of fast parameters alone
    are none of the parameters; JAX refuses a state that changes its structure.
    """
    tx, start, given = (
        gradaccum.wrap(make(name, FACTORIES[name]), STEPS),
        params(),
        params(),
    )
    if name == "lookahead":
        start = optax.LookaheadParams.init_synced(start)
    if name.startswith("d"):
        given = jax.tree.map(lambda p: jnp.stack([p, p]), given)
    kinds = {"monitor": ValueError, "apply_every": gradaccum.ArgumentTypeError}
    with pytest.raises(kinds.get(name, gradaccum.GradientError)):
        tx.update(given, tx.init(start), start)
