"""Clipping and skipping by norm: once per window, on the window's true gradient."""

import math

import numpy as np
import pytest

from gradaccum_conformance.bounds import bound_of_sum, gamma, worst
from gradaccum_conformance.harness import Dtype, Harness, Session
from gradaccum_conformance.measuring import Errors
from gradaccum_conformance.scenarios import (
    feed_gradients,
    global_norm,
    outcome_of,
    random_tree,
    start,
    window_gradient,
)
from gradaccum_conformance.specs import LINEAR, MLP, Arrays

TREES = [random_tree(LINEAR, seed) for seed in range(3)]
GRADIENT = window_gradient(TREES)
NORM = global_norm(GRADIENT)
ELEMENTS = sum(array.size for array in GRADIENT.values())


def bound(dtype: Dtype = "float32") -> float:
    """The bound of the sum, plus that of a sum of squares over all elements."""
    return bound_of_sum(TREES, dtype) + gamma(2 * ELEMENTS, dtype)


def scaled(tree: Arrays, factor: float) -> Arrays:
    return {name: factor * array for name, array in tree.items()}


def check_norm(errors: Errors, session: Session, norm: float) -> None:
    errors.check("norm", abs(session.result().grad_norm - norm) / norm, bound())


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_gradient_is_clipped_to_limit(
    backend: Harness, mode: str, errors: Errors, reduction: str
) -> None:
    """The result reports the norm before clipping."""
    whole = window_gradient(TREES, reduction=reduction)
    norm = global_norm(whole)
    session = start(
        backend, steps=3, clip_norm=norm / 4, reduction=reduction, mode=mode
    )
    feed_gradients(session, TREES)
    clipped = session.captured().gradient
    errors.check("clipped gradient", worst(clipped, scaled(whole, 1 / 4)), bound())
    check_norm(errors, session, norm)


def test_float64_gradient_is_clipped_in_float64(
    backend: Harness, errors: Errors
) -> None:
    """Beside a limit for skipping, which the norm does not reach."""
    session = start(
        backend, steps=3, skip_norm=NORM * 2, clip_norm=NORM / 2, dtype="float64"
    )
    feed_gradients(session, TREES)
    clipped = session.captured().gradient
    halved = scaled(GRADIENT, 1 / 2)
    errors.check("clipped gradient", worst(clipped, halved), bound("float64"))


def test_only_the_window_is_clipped(backend: Harness, errors: Errors) -> None:
    """Two opposite gradients are each far above the limit, and their sum is small.
    Clipping either would change the sum.
    """
    session = start(backend, steps=2, clip_norm=1.0)
    large = random_tree(LINEAR, 0, 8.0)
    small = random_tree(LINEAR, 1, 2.0**-4)
    trees = [large, {name: small[name] - large[name] for name in large}]
    feed_gradients(session, trees)
    errors.check(
        "gradient",
        worst(session.captured().gradient, scaled(small, 1 / 2)),
        bound_of_sum(trees, "float32"),
    )


def test_norm_above_skip_norm_skips(backend: Harness, mode: str) -> None:
    """The skipped window is cleared, and is no overflow."""
    session = start(backend, steps=3, skip_norm=NORM / 2, mode=mode)
    feed_gradients(session, TREES)
    assert outcome_of(session.result()) == {"skipped"}
    assert session.captured().calls == 0
    assert session.state().optimizer_step == 0
    assert session.state().skipped_windows == 1
    assert all(not array.any() for array in session.accumulator().values())


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("scale", [2.0**66, 2.0**-100], ids=["large", "tiny"])
def test_squares_outside_float32(
    backend: Harness, mode: str, errors: Errors, scale: float, clips: bool
) -> None:
    """The squares of these gradients overflow or vanish in float32; they themselves do
    not.
    """
    limit = scale * NORM / 4
    session = start(backend, steps=3, clip_norm=limit if clips else None, mode=mode)
    feed_gradients(session, [scaled(tree, scale) for tree in TREES])
    assert outcome_of(session.result()) == {"applied"}
    check_norm(errors, session, scale * NORM)
    if clips:
        clipped = scaled(session.captured().gradient, 1 / scale)
        errors.check(
            "clipped gradient", worst(clipped, scaled(GRADIENT, 1 / 4)), bound()
        )


def test_mixed_magnitudes_have_a_right_norm(
    backend: Harness, mode: str, errors: Errors
) -> None:
    """The square of one element is a float32 number, and the elements whose squares are
    not make up most of the norm.
    """
    session = start(backend, MLP, steps=1, mode=mode)
    tree = {
        name: np.full(shape, 2.0**-76) for name, shape in MLP.parameter_shapes().items()
    }
    first = next(iter(tree.values()))
    first.flat[0] = 2.0**-74
    session.gradients(tree)
    squares = sum(float(((array * 2.0**76) ** 2).sum()) for array in tree.values())
    truth = 2.0**-76 * math.sqrt(squares)
    errors.check(
        "norm", abs(session.result().grad_norm - truth) / truth, gamma(200, "float32")
    )
