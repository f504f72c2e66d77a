"""`gradaccum.verify` names the mistake that is planted in a loss, passes the sound
ones, and leaves the user's random states alone.
"""

import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

import gradaccum
from gradaccum_conformance.deep import deep_but
from gradaccum_conformance.harness import Dtype, Option, VerifyCall, VerifyingHarness
from gradaccum_conformance.specs import MLP, Array, make_batch, make_weights

ITEMS = 12
TOKENS = 6
LENGTHS = np.array([1, 6, 2, 5, 3, 4, 6, 1, 1, 5, 6, 2])
X = make_batch(MLP, ITEMS).x
Y = np.random.default_rng(1).normal(size=ITEMS)
MASK = 1.0 * (np.arange(TOKENS) < LENGTHS[:, None])
LABELS = np.where(MASK > 0, np.arange(TOKENS) % 4, -100)
POSITIVES = np.array([0.0, 0, 1, 1, 0, 1, 1, 1, 0, 0, 0, 0])
Loss = Callable[..., Any]


def verify(
    backend: VerifyingHarness,
    loss: Loss,
    *batch: Array,
    dtype: Dtype = "float32",
    **options: Option,
) -> gradaccum.VerificationReport:
    return backend.verify(
        MLP, make_weights(MLP), VerifyCall(loss, batch, {"steps": 4, **options}, dtype)
    )


def each(out) -> Any:
    """A number for each item."""
    return (out**2).sum(1)


def plain(out, weights, x, y) -> Any:
    return ((out[:, 0] - y) ** 2).mean()


def summed(out, weights, x, y) -> Any:
    return ((out[:, 0] - y) ** 2).sum()


def token_sum(out, weights, x, mask) -> Any:
    return (each(out).reshape(-1, 1) * mask).sum()


def token_mean(out, weights, x, mask) -> Any:
    return token_sum(out, weights, x, mask) / mask.sum()


def ignored_labels(out, weights, x, labels) -> Any:
    return token_mean(out, weights, x, (labels != -100) * 1.0)


def over_positives(out, weights, x, positives) -> Any:
    """A mean over positives, of which a micro-batch may have none: 0 / 0."""
    return (each(out) * positives).sum() / positives.sum()


def pairs(out, weights, x, y) -> Any:
    return ((out @ out.T) ** 2).mean()


def in_groups(out, weights, x, y) -> Any:
    """Four items belong together, and a micro-batch has three."""
    groups = out[:, 0].reshape(-1, 4)
    return ((groups - groups.mean(1).reshape(-1, 1)) ** 2).mean()


def weakly_coupled(out, weights, x, y) -> Any:
    return plain(out, weights, x, y) + 1e-3 * out.mean() ** 2


def standardised(out, weights, x, rewards) -> Any:
    """Advantages by the mean and the deviation of the micro-batch."""
    return (out[:, 0] * (rewards - rewards.mean()) / (rewards.std() + 1e-4)).mean()


def penalised(out, weights, x, y) -> Any:
    """A weight decay in a sum, which each micro-batch adds in full."""
    return summed(out, weights, x, y) + (weights["0.weight"] ** 2).sum()


def two_counts(out, weights, x, mask) -> Any:
    """A mean over tokens, and one over sequences."""
    return token_mean(out, weights, x, mask) + out[:, 0].mean()


def infinite(out, weights, x, y) -> Any:
    return plain(out, weights, x, y) * np.inf


def noisy(out, weights, x, y) -> Any:
    """Noise that NumPy draws for each item."""
    return sum(
        each(out)[i] * float(noise) for i, noise in enumerate(np.random.randn(len(out)))
    ) / len(out)


def seeded(out, weights, x, y) -> Any:
    np.random.seed(0)
    return noisy(out, weights, x, y)


MISTAKES: dict[str, tuple[Loss, Array, dict[str, Option], str, str]] = {
    "token mean": (token_mean, MASK, {}, "weights", "batch[1]"),
    "ignored labels": (ignored_labels, LABELS, {}, "weights", "batch[1] != -100"),
    "over positives": (over_positives, POSITIVES, {}, "weights", "batch[1]"),
    "pairs": (pairs, Y, {}, "coupled", ""),
    "weakly coupled": (weakly_coupled, Y, {}, "coupled", ""),
    "standardised": (standardised, Y, {}, "coupled", ""),
    "penalised": (penalised, Y, {"reduction": "sum"}, "coupled", ""),
    "two counts": (two_counts, MASK, {}, "coupled", ""),
    "sum under mean": (summed, Y, {}, "weights", ""),
    "mean under sum": (plain, Y, {"reduction": "sum"}, "weights", ""),
    "infinite": (infinite, Y, {}, "not_finite", ""),
    "noisy": (noisy, Y, {}, "not_repeatable", ""),
    "seeded": (seeded, Y, {}, "not_repeatable", ""),
}
"""The loss, the batch's second array, the options, the cause's kind and a part of its
place.
"""
USUAL = ("token mean", "pairs", "seeded")
SOUND: dict[str, tuple[Loss, Array, dict[str, Option]]] = {
    "plain": (plain, Y, {}),
    "parts that differ": (plain, Y, {"steps": 5}),
    "summed": (summed, Y, {"reduction": "sum"}),
    "a function's weight": (
        ignored_labels,
        LABELS,
        {"weight": lambda x, labels: (labels != -100).sum()},
    ),
    "a weight for each item": (token_mean, MASK, {"weight": LENGTHS.tolist()}),
    "micro-batches without labels": (
        over_positives,
        POSITIVES,
        {"weight": lambda x, positives: positives.sum()},
    ),
    "item mean": (
        token_sum,
        MASK,
        {"reduction": "sum_per_item", "weight": lambda x, mask: mask.sum()},
    ),
    "with aux": (
        lambda out, weights, x, y: (plain(out, weights, x, y), x),
        Y,
        {"has_aux": True},
    ),
    "tiny": (lambda out, weights, x, y: plain(out, weights, x, y) * 1e-30, Y, {}),
}
BAD: dict[str, tuple[tuple[Array, ...], dict[str, Option], str]] = {
    "unequal arrays": ((X, Y[:-1]), {}, r"batch\[1\]: expected 12 items"),
    "too few items": ((X[:3], Y[:3]), {}, "items in the batch: expected an int >= 4"),
    "too few weights": ((X, Y), {"weight": [1.0, 2.0]}, "weight: expected 12"),
    "a negative weight": ((X, Y), {"weight": lambda x, y: -1.0}, "weight: expected"),
}


@pytest.mark.parametrize("name", deep_but(USUAL, MISTAKES))
def test_mistake_is_named(backend: VerifyingHarness, name: str) -> None:
    loss, second, options, kind, where = MISTAKES[name]
    report = verify(backend, loss, X, second, **options)
    assert not report.equivalent
    assert report.causes[0].kind == kind, str(report)
    assert where in report.causes[0].where, str(report)
    assert {cause.kind for cause in report.causes[1:]} <= {"not_repeatable"}, str(
        report
    )


@pytest.mark.parametrize(
    "name", deep_but(("plain", "a function's weight", "with aux"), SOUND)
)
def test_sound_loss_passes(backend: VerifyingHarness, name: str) -> None:
    loss, second, options = SOUND[name]
    report = verify(backend, loss, X, second, **options)
    assert report.equivalent, str(report)
    assert not report.causes
    assert len(report.errors) == len(make_weights(MLP))


@pytest.mark.parametrize("items", [3, 5])
def test_usual_number_of_micro_batches_fits_the_batch(
    backend: VerifyingHarness, items: int
) -> None:
    report = verify(backend, plain, X[:items], Y[:items], steps=None)
    assert report.equivalent, str(report)
    assert len(report.partitions[0]) == 3


def test_loss_of_groups_is_coupled(backend: VerifyingHarness) -> None:
    """With micro-batches of whole groups, of which each partition deals the items."""
    x = np.tile(X, (2, 1))[:16]
    y = np.tile(Y, 2)[:16]
    report = verify(backend, in_groups, x, y)
    assert [cause.kind for cause in report.causes] == ["coupled"], str(report)


def test_float64_passes(backend: VerifyingHarness) -> None:
    """Its rounding is the measure, not float32's."""
    report = verify(backend, plain, X, Y, dtype="float64")
    assert report.equivalent, str(report)
    assert max(report.units.values()) < 1e-13


@pytest.mark.parametrize("name", BAD)
def test_bad_input(backend: VerifyingHarness, name: str) -> None:
    batch, options, words = BAD[name]
    with pytest.raises(gradaccum.GradAccumError, match=f"^{words}"):
        verify(backend, plain, *batch, **options)


@pytest.mark.parametrize("raises", [False, True])
def test_random_states_stay(backend: VerifyingHarness, raises: bool) -> None:
    """Also if the loss raises in the middle."""

    def drawing(out, weights, x, y) -> Any:
        random.random()
        np.random.random()
        if raises and len(x) != ITEMS:
            raise ZeroDivisionError
        return plain(out, weights, x, y)

    random.seed(1)
    np.random.seed(1)
    with pytest.raises(ZeroDivisionError) if raises else nullcontext():
        verify(backend, drawing, X, Y)
    ours = random.random(), np.random.random()
    random.seed(1)
    np.random.seed(1)
    assert ours == (random.random(), np.random.random())
