"""The rows of optax: `optax.MultiSteps` and `optax.microbatch`, on token means and on
sums of tokens.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gradaccum
import gradaccum_jax
from benchmarks.scoreboard.measuring import Gradients

jax.config.update("jax_enable_x64", True)  # type: ignore[no-untyped-call]
ITEMS, TOKENS, PART = 8, 6, 2
RANDOM = np.random.default_rng(1)
PARAMS = {"kernel": RANDOM.standard_normal((5, 3)), "bias": RANDOM.standard_normal(3)}
X, LABELS = (
    RANDOM.standard_normal((ITEMS, TOKENS, 5)),
    RANDOM.integers(0, 3, (ITEMS, TOKENS)),
)


def kept(even: bool) -> Any:
    """The tokens that count."""
    lengths = np.full(ITEMS, TOKENS) if even else 2 + np.arange(ITEMS) % 5
    return jnp.arange(TOKENS) < lengths[:, None]


def total(params: Any, x: Any, labels: Any, mask: Any) -> Any:
    logits = x @ params["kernel"] + params["bias"]
    return (
        optax.softmax_cross_entropy_with_integer_labels(logits, labels) * mask
    ).sum()


def mean(params: Any, x: Any, labels: Any, mask: Any) -> Any:
    return total(params, x, labels, mask) / mask.sum()


def multisteps(batches: list[Any], steps: int) -> Gradients:
    tx, params = (
        optax.MultiSteps(optax.sgd(1.0), steps),
        jax.tree.map(jnp.asarray, PARAMS),
    )
    state = tx.init(params)
    for batch in batches:
        updates, state = tx.update(jax.grad(mean)(params, *batch), state, params)
        params = optax.apply_updates(params, updates)
    return {name: np.asarray(PARAMS[name] - params[name]) for name in PARAMS}


def check(batches: list[Any]) -> gradaccum.LoopReport:
    recorder = gradaccum_jax.LoopRecorder()
    tx = optax.MultiSteps(recorder, ITEMS // PART)
    params = jax.tree.map(jnp.asarray, PARAMS)
    state = tx.init(params)
    for batch in batches:
        updates, state = tx.update(jax.grad(mean)(params, *batch), state, params)
        params = optax.apply_updates(params, updates)
    return recorder.report(
        state,
        mean,
        params,
        batches,
        weight=lambda x, labels, mask: float(mask.sum()),
        steps=ITEMS // PART,
    )


def parts(batch: tuple[Any, ...], micro: bool) -> list[Any]:
    size = PART if micro else ITEMS
    return [
        tuple(each[start : start + size] for each in batch)
        for start in range(0, len(batch[0]), size)
    ]


def multisteps_ragged(*, micro: bool, even: bool) -> Gradients:
    return multisteps(
        parts((X, LABELS, kept(even)), micro), ITEMS // PART if micro else 1
    )


def multisteps_short_window(*, micro: bool, even: bool) -> Gradients:
    count = ITEMS if even else ITEMS - PART
    return multisteps(
        parts((X[:count], LABELS[:count], kept(True)[:count]), micro),
        ITEMS // PART if micro else 1,
    )


def microbatch(function: Any, micro: bool, even: bool, kind: str) -> Any:
    if micro:
        function = optax.microbatch(
            function, (1, 2, 3), PART, optax.microbatching.AccumulationType[kind]
        )
    return function(
        jax.tree.map(jnp.asarray, PARAMS),
        jnp.asarray(X),
        jnp.asarray(LABELS),
        kept(even),
    )


def microbatch_mean(*, micro: bool, even: bool) -> Gradients:
    return {
        name: np.asarray(each)
        for name, each in microbatch(jax.grad(mean), micro, even, "MEAN").items()
    }


def microbatch_sum(*, micro: bool, even: bool) -> Gradients:
    """The gradient of the sum over tokens and their number, both summed; then one is
    divided by the other.
    """
    both = microbatch(
        lambda *each: (jax.grad(total)(*each), each[-1].sum()), micro, even, "SUM"
    )
    return {name: np.asarray(each / both[1]) for name, each in both[0].items()}


def check_short_window() -> gradaccum.LoopReport:
    count = ITEMS - PART
    return check(parts((X[:count], LABELS[:count], kept(True)[:count]), True))


CHECKED = {
    "multisteps_ragged": lambda: check(parts((X, LABELS, kept(False)), True)),
    "multisteps_short_window": check_short_window,
}
