"""float16 and bfloat16 parameters: the sum is float32, and it keeps the terms that a
half-precision sum would lose.
"""

import numpy as np
import pytest

import gradaccum
from gradaccum_conformance.bounds import unit_roundoff, worst
from gradaccum_conformance.harness import Dtype, Harness, Option
from gradaccum_conformance.measuring import Errors
from gradaccum_conformance.scenarios import (
    coarse,
    constant_tree,
    elements_of,
    feed_gradients,
    outcome_of,
    start,
    window_gradient,
)
from gradaccum_conformance.specs import LINEAR

by_half = pytest.mark.parametrize("dtype", ["float16", "bfloat16"])


@by_half
def test_sum_is_float32(backend: Harness, mode: str, dtype: Dtype) -> None:
    session = start(backend, steps=3, dtype=dtype, mode=mode)
    session.gradients(constant_tree(LINEAR, 0.5))
    assert {array.dtype.name for array in session.accumulator().values()} == {"float32"}
    assert elements_of(session.accumulator()) == {0.5}


@by_half
def test_512_small_gradients_add_up(backend: Harness, dtype: Dtype) -> None:
    """512 x 1/128 is 4. A bfloat16 sum would stop at 2, where 1/128 is half the
    distance to the next number.
    """
    session = start(backend, steps=512, reduction="sum", dtype=dtype)
    feed_gradients(session, [constant_tree(LINEAR, 1 / 128)] * 512)
    assert elements_of(session.captured().gradient) == {4.0}


@by_half
def test_mean_is_rounded_once(
    backend: Harness, mode: str, errors: Errors, dtype: Dtype
) -> None:
    session = start(backend, steps=3, dtype=dtype, mode=mode)
    trees = [coarse(LINEAR, seed, 1 / 4) for seed in range(3)]
    feed_gradients(session, trees)
    gradient = session.captured().gradient
    errors.check(
        "gradient", worst(gradient, window_gradient(trees)), 2 * unit_roundoff(dtype)
    )


@by_half
def test_half_precision_sum_on_request(backend: Harness, dtype: Dtype) -> None:
    """It loses the small term."""
    session = start(
        backend, steps=2, dtype=dtype, accumulate_dtype=dtype, reduction="sum"
    )
    feed_gradients(
        session, [constant_tree(LINEAR, 1.0), constant_tree(LINEAR, 2.0**-12)]
    )
    assert elements_of(session.captured().gradient) == {1.0}


def test_scaled_float16_gradients_overflow(backend: Harness, mode: str) -> None:
    """The scale backs off. Under a smaller scale the same gradients arrive whole."""
    rule = gradaccum.DynamicLossScale(init_scale=2.0**16)
    for scale in (rule, 2.0**12):
        session = start(backend, steps=2, dtype="float16", loss_scale=scale, mode=mode)
        feed_gradients(session, [constant_tree(LINEAR, 4.0)] * 2)
        if scale is rule:
            assert session.result().overflow
            assert session.state().loss_scale == 2.0**15
        else:
            assert elements_of(session.captured().gradient) == {4.0}


def test_sum_is_unscaled_in_float32(backend: Harness) -> None:
    """The mean of (2^-24, 0, 0) times the scale is a float16 number. The mean itself is
    not: float16 would round it to 0.
    """
    session = start(
        backend, steps=3, dtype="float16", loss_scale=2.0**12, master_weights=True
    )
    feed_gradients(
        session, [constant_tree(LINEAR, value) for value in (2.0**-24, 0.0, 0.0)]
    )
    mean = np.float32(2.0**-12) / np.float32(3 * 2.0**12)
    assert elements_of(session.captured().gradient) == {float(mean)}


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
        ((65504.0, 65504.0), "mean", True),
    ],
    ids=["above", "below", "mean"],
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
    feed_gradients(session, [constant_tree(LINEAR, value) for value in terms])
    fits = fits or "master_weights" in options
    expected = {"applied"} if fits else {"skipped", "overflow"}
    assert outcome_of(session.result()) == expected
