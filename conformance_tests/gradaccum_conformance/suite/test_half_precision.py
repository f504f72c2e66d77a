"""float16 and bfloat16 parameters: the sum is float32, and it keeps the terms that a
half-precision sum would lose.
"""

import math

import numpy as np
import pytest

import gradaccum
from gradaccum_conformance.bounds import unit_roundoff, worst
from gradaccum_conformance.harness import Dtype, Harness, Option
from gradaccum_conformance.measuring import Errors
from gradaccum_conformance.scenarios import mean_of, poisoned, random_tree, same, start
from gradaccum_conformance.specs import LINEAR, Arrays

by_half = pytest.mark.parametrize("dtype", ["float16", "bfloat16"])


def constant(value: float) -> Arrays:
    return {
        name: np.full(shape, value) for name, shape in LINEAR.parameter_shapes().items()
    }


def elements(tree: Arrays | None) -> set[float]:
    return {float(x) for array in (tree or {}).values() for x in array.flat}


@by_half
def test_sum_is_float32(backend: Harness, mode: str, dtype: Dtype) -> None:
    session = start(backend, steps=3, dtype=dtype, mode=mode)
    session.gradients(constant(0.5))
    assert {array.dtype.name for array in session.accumulator().values()} == {"float32"}
    assert elements(session.accumulator()) == {0.5}


@by_half
def test_512_small_gradients_add_up(backend: Harness, dtype: Dtype) -> None:
    """512 x 1/128 is 4. A bfloat16 sum would stop at 2, where 1/128 is half the
    distance to the next number.
    """
    session = start(backend, steps=512, reduction="sum", dtype=dtype)
    for _ in range(512):
        session.gradients(constant(1 / 128))
    assert elements(session.captured().gradient) == {4.0}


@by_half
def test_mean_is_rounded_once(
    backend: Harness, mode: str, errors: Errors, dtype: Dtype
) -> None:
    session = start(backend, steps=3, dtype=dtype, mode=mode)
    trees = [
        {
            name: np.round(array * 64) / 64
            for name, array in random_tree(LINEAR, seed).items()
        }
        for seed in range(3)
    ]
    for tree in trees:
        session.gradients(tree)
    errors.check(
        "gradient",
        worst(session.captured().gradient or {}, mean_of(trees)),
        2 * unit_roundoff(dtype),
    )


@by_half
def test_half_precision_sum_on_request(backend: Harness, dtype: Dtype) -> None:
    session = start(
        backend, steps=2, dtype=dtype, accumulate_dtype=dtype, reduction="sum"
    )
    for value in (1.0, 2.0**-12):
        session.gradients(constant(value))
    assert elements(session.captured().gradient) == {1.0}, (
        "a half-precision sum was asked for"
    )


def test_scaled_float16_gradients_overflow(backend: Harness, mode: str) -> None:
    """The scale backs off. Under a smaller scale the same gradients arrive whole."""
    rule = gradaccum.DynamicLossScale(init_scale=2.0**16)
    session = start(backend, steps=2, dtype="float16", loss_scale=rule, mode=mode)
    for _ in range(2):
        session.gradients(constant(4.0))
    assert session.result().overflow
    assert session.state().loss_scale == 2.0**15
    scaled_down = start(
        backend, steps=2, dtype="float16", loss_scale=2.0**12, mode=mode
    )
    for _ in range(2):
        scaled_down.gradients(constant(4.0))
    assert elements(scaled_down.captured().gradient) == {4.0}


def test_sum_is_unscaled_in_float32(backend: Harness) -> None:
    """The mean of (2^-24, 0, 0) times the scale is a float16 number. The mean itself is
    not: float16 would round it to 0.
    """
    session = start(
        backend, steps=3, dtype="float16", loss_scale=2.0**12, master_weights=True
    )
    for value in (2.0**-24, 0.0, 0.0):
        session.gradients(constant(value))
    assert elements(session.captured().gradient) == {
        float(np.float32(2.0**-12) / np.float32(3 * 2.0**12))
    }


@pytest.mark.parametrize(
    "options",
    [{}, {"clip_norm": 1.0}, {"master_weights": True}],
    ids=["model", "clipped", "masters"],
)
@pytest.mark.parametrize(
    ("terms", "reduction", "fits"),
    [
        ((-65504.0, -16.0), "sum", False),
        ((65504.0, 8.0), "sum", True),
        ((65504.0, 16.0), "sum", False),
        ((65504.0, 65504.0), "mean", True),
    ],
    ids=["-above", "below", "above", "mean"],
)
def test_sum_at_the_edge_of_float16(
    backend: Harness,
    mode: str,
    options: dict[str, Option],
    terms: tuple[float, float],
    reduction: str,
    fits: bool,
) -> None:
    """65520, halfway from the largest number to the next power of two, becomes inf;
    clipping comes later. float32 masters take the sum.
    """
    session = start(
        backend, steps=2, dtype="float16", reduction=reduction, mode=mode, **options
    )
    for value in terms:
        session.gradients(constant(value))
    applied = fits or "master_weights" in options
    assert (session.result().applied, session.result().overflow) == (
        applied,
        not applied,
    )


@by_half
@pytest.mark.parametrize("on_overflow", ["skip_window", "drop_micro_batch"])
def test_overflow_leaves_no_trace(
    backend: Harness, dtype: Dtype, on_overflow: str
) -> None:
    hurt, clean = (
        start(backend, steps=2, dtype=dtype, on_overflow=on_overflow) for _ in range(2)
    )
    for value in (math.inf, math.nan):
        hurt.gradients(poisoned(constant(1.0), value))
    assert hurt.captured().calls == 0
    for session in (hurt, clean):
        for seed in (0, 1):
            session.gradients(random_tree(LINEAR, seed))
    assert same(hurt.parameters(), clean.parameters())
