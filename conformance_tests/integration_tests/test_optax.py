"""Optimizers of `optax` and `optax.contrib`: wrapped, each equals the bare one on the
large batch, and runs once per window.

Truth is the bare optimizer on the large batch, in float64. The micro-batches' gradients
are taken at the parameters as they move.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

pytest.importorskip("optax")
import jax
import jax.numpy as jnp
import optax
from optax import contrib

import gradaccum
import gradaccum_jax
from conformance_tests.framework_tests.jax_comparison import (
    assert_bitwise,
    assert_close,
    wide,
)

STEPS = 3
WINDOWS = 3
ITEMS = 2
QUICK = {"xla_cpu_use_fusion_emitters": False}
"""Halves the time that XLA:CPU compiles a small program for."""
RNG = np.random.default_rng(5)
X = RNG.normal(size=(WINDOWS, STEPS, ITEMS, 3))
Y = RNG.normal(size=(WINDOWS, STEPS, ITEMS, 2))
RATE = 0.05
OF_A_RATE = (
    *("adabelief", "adadelta", "adagrad", "adam", "adamax", "adamaxw", "adamw", "adan"),
    *("amsgrad", "fromage", "lamb", "lars", "lion", "nadam", "nadamw", "novograd"),
    *("optimistic_adam_v2", "optimistic_gradient_descent", "radam"),
    *("rmsprop", "rprop", "sgd", "sign_sgd", "signum", "sm3", "yogi"),
)
OF_A_RATE_IN_CONTRIB = (
    *("acprop", "ademamix", "adopt", "cocob", "dadapt_adamw", "dog", "dowg", "galore"),
    *("madgrad", "momo", "momo_adam", "muon", "prodigy", "simplified_ademamix"),
    *("sophia",),
)
OF_THE_LOSS = ("momo", "momo_adam", "polyak_sgd", "reduce_on_plateau")
"""They read the batch's loss: a wrapped optimizer gives them the window's."""
OF_THE_BATCH = {
    **dict.fromkeys(OF_THE_LOSS, ("value",)),
    "backtracking_linesearch": ("value", "grad", "value_fn"),
    "zoom_linesearch": ("value", "grad", "value_fn"),
    "sophia": ("obj_fn",),
}
"""The extra arguments that describe the batch of the gradient. The caller gives those
of the whole window to `flush`.
"""


def optimizers() -> dict[str, Any]:
    """All that a window can hold, some with settings that let tiny parameters take the
    path of large ones.
    """
    made = {name: getattr(optax, name)(learning_rate=RATE) for name in OF_A_RATE}
    for name in OF_A_RATE_IN_CONTRIB:
        made[name] = getattr(contrib, name)(learning_rate=RATE)
    adam = optax.adam(RATE)
    schedule = optax.linear_schedule(0.1, 0.01, 4)
    adversary = optax.chain(contrib.normalize(), optax.sgd(0.1))
    return made | {
        "adafactor": optax.adafactor(RATE, min_dim_size_to_factor=2),
        "lbfgs": optax.lbfgs(RATE, memory_size=2, linesearch=None),
        "polyak_sgd": optax.polyak_sgd(),
        "schedule_free_adamw": contrib.schedule_free_adamw(RATE, warmup_steps=2),
        "schedule_free_sgd": contrib.schedule_free_sgd(RATE, warmup_steps=2),
        "backtracking_linesearch": optax.scale_by_backtracking_linesearch(3),
        "zoom_linesearch": optax.scale_by_zoom_linesearch(3),
        "chain": optax.chain(
            optax.clip_by_global_norm(0.1),
            optax.scale_by_adam(),
            optax.add_decayed_weights(0.1),
            optax.scale_by_schedule(lambda count: -RATE / (1 + count)),
            optax.ema(0.9),
        ),
        "apply_if_finite": optax.apply_if_finite(adam, max_consecutive_errors=2),
        "conditionally": optax.conditionally_transform(adam, lambda n: n % 2 == 0),
        "flatten": optax.flatten(adam),
        "inject_hyperparams": optax.inject_hyperparams(optax.adam)(schedule),
        "masked": optax.masked(adam, {"w": True, "b": False}),
        "mechanize": contrib.mechanize(adam),
        "partition": optax.partition(
            {"x": adam, "y": optax.set_to_zero()}, {"w": "x", "b": "y"}
        ),
        "reduce_on_plateau": contrib.reduce_on_plateau(),
        "sam": contrib.sam(optax.sgd(RATE), adversary),
        "schedule_free": contrib.schedule_free(optax.sgd(RATE), learning_rate=RATE),
        "split_real_and_imaginary": contrib.split_real_and_imaginary(adam),
    }


NAMES = list(optimizers())


@pytest.fixture(autouse=True)
def _wide() -> Iterator[None]:
    """float64, and without most of XLA's passes, which would take ten times as long as
    the runs.
    """
    with wide():
        yield


def start_parameters() -> Any:
    return {
        "w": jnp.asarray([[0.5, -0.25], [1.0, 0.75], [-0.5, 0.25]], float),
        "b": jnp.asarray([0.1, -0.2], float),
    }


pytestmark = [
    pytest.mark.filterwarnings(
        'ignore:"seed" is deprecated and will be removed in optax'
        " 0.2.7:DeprecationWarning"
    )
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


def bare_run(inner: Any, start: Any, names: tuple[str, ...]) -> list[Any]:
    """The parameters and the optimizer's state after each large batch. Op by op: the
    programs of single ops serve all optimizers.
    """
    params = start
    state = inner.init(start)
    held = []
    for x, y in zip(X.reshape(WINDOWS, -1, 3), Y.reshape(WINDOWS, -1, 2), strict=True):
        updates, state = inner.update(
            GRADIENT(params, x, y), state, params, **of_batch(names, params, x, y)
        )
        params = optax.apply_updates(params, updates)
        held.append((params, state))
    return held


def streamed_run(tx: Any, start: Any, names: tuple[str, ...]) -> list[Any]:
    """The parameters and the wrapped optimizer's state before the first micro-batch and
    after each.
    """
    held = [(start, tx.init(start))]
    update = jax.jit(tx.update, compiler_options=QUICK)
    for x, y in zip(X.reshape(-1, ITEMS, 3), Y.reshape(-1, ITEMS, 2), strict=True):
        params, state = held[-1]
        updates, state = update(
            GRADIENT(params, x, y), state, params, **of_batch(names, params, x, y)
        )
        held.append((optax.apply_updates(params, updates), state))
    assert update._cache_size() == 1
    return held


STREAMED = [name for name in NAMES if OF_THE_BATCH.get(name, ("value",)) == ("value",)]


@pytest.mark.parametrize("name", STREAMED)
def test_equals_the_bare_optimizer(name: str) -> None:
    inner = optimizers()[name]
    start = start_parameters()
    names = OF_THE_BATCH.get(name, ())
    ours = streamed_run(gradaccum.wrap(inner, steps=STEPS), start, names)
    theirs = bare_run(inner, start, names)
    for number, (before, after) in enumerate(pairwise(ours), start=1):
        window, position = divmod(number, STEPS)
        assert after[1].optimizer_step == window
        inner_after = (after[0], after[1].inner_state)
        if position:
            assert_bitwise(inner_after, (before[0], before[1].inner_state))
        else:
            assert_close(inner_after, theirs[window - 1])


@pytest.mark.parametrize("name", OF_THE_BATCH)
def test_equals_the_bare_optimizer_at_a_flush(name: str) -> None:
    """Those that read the loss of the batch, or a function of it, get that of the whole
    window from the caller.
    """
    inner = optimizers()[name]
    start = start_parameters()
    names = OF_THE_BATCH[name]
    tx = gradaccum.wrap(inner, steps=None)
    moved = start
    state = tx.init(start)

    @partial(jax.jit, compiler_options=QUICK)
    def add(params, state, x, y):
        extra = of_batch(names, params, x, y)
        return tx.update(GRADIENT(params, x, y), state, params, **extra)[1]

    for x, y, wanted in zip(X, Y, bare_run(inner, start, names), strict=True):
        for micro_batch in zip(x, y, strict=True):
            before = state
            state = add(moved, state, *micro_batch)
            assert_bitwise(state.inner_state, before.inner_state)
        extra = of_batch(names, moved, x.reshape(-1, 3), y.reshape(-1, 2))
        updates, state = gradaccum_jax.flush(tx, state, moved, **extra)
        moved = optax.apply_updates(moved, updates)
        assert_close((moved, state.inner_state), wanted)
