"""Cross-entropy whose classes are shared out over workers: the loss of all classes, and
each worker's part of its gradient.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from gradaccum_conformance import oracle
from gradaccum_conformance.bounds import unit_roundoff
from gradaccum_conformance.harness import (
    Dtype,
    Option,
    ShardedLossCall,
    ShardedLossHarness,
)
from gradaccum_conformance.specs import Array
from gradaccum_conformance.workers import Crews
from gradaccum_conformance.workers.messages import Answer, Answered, Raised, Request

CLASSES, ITEMS = 7, 6
SIZES: dict[int, list[tuple[int, ...]]] = {
    2: [(4, 3), (1, 6), (0, 7)],
    4: [(2, 2, 2, 1), (3, 1, 3, 0), (0, 7, 0, 0)],
}
"""The workers' numbers of classes, by the number of workers; the first ones are even
but for the last worker's.
"""
LABELS = np.array([0, 2, -100, 4, 6, 3], np.int32)
LOGITS = (
    np.round(
        16 * np.random.default_rng(0).normal(0, 2.5, (ITEMS, CLASSES)).clip(-7.9, 7.9)
    )
    / 16
)
"""Sixteenths below 8, which every floating dtype holds."""
UPSTREAM = 2.0**10


def answers_of(
    crews: Crews,
    logits: Array = LOGITS,
    labels: Array | Sequence[Array] = LABELS,
    *,
    sizes: tuple[int, ...] = (),
    upstream: Any = 1.0,
    dtype: Dtype = "float32",
    **options: Option,
) -> list[Answer]:
    """What each worker's call gives, of its slice of all logits and of the labels,
    which may be given for each worker.
    """
    sizes = sizes or SIZES[crews.workers][0]
    edges = np.cumsum((0, *sizes))
    each = [labels] * crews.workers if isinstance(labels, np.ndarray) else labels
    calls = [
        ShardedLossCall(
            logits[..., a:b],
            own,
            np.asarray(upstream),
            sizes,
            dtype,
            crews.mode,
            options,
        )
        for a, b, own in zip(edges[:-1], edges[1:], each, strict=True)
    ]
    answers = crews.pool.exchange(
        [Request("sharded_cross_entropy", (call,)) for call in calls]
    )
    if len({type(answer) for answer in answers}) > 1:
        crews.pool.close()  # The others may wait for those that raised.
    return answers


def outcome_of(crews: Crews, *given: Any, **options: Any) -> tuple[Array, Array]:
    """The loss, which is the same on all workers, and the gradient by all logits."""
    answers = answers_of(crews, *given, **options)
    assert all(isinstance(answer, Answered) for answer in answers), answers
    losses, gradients = zip(
        *(answer.value for answer in answers if isinstance(answer, Answered)),
        strict=True,
    )
    for loss in losses:
        np.testing.assert_array_equal(loss, losses[0])
    return losses[0], np.concatenate(gradients, axis=-1)


def check(
    crews: Crews,
    logits: Array = LOGITS,
    labels: Array = LABELS,
    *,
    reduction: str = "mean",
    dtype: Dtype = "float32",
    **options: Any,
) -> None:
    """Against the definition in float64: upstream gradients are large and differ, as
    under a loss scale.

    A logit less the maximum is rounded once, and the exponential turns that into as
    many roundings as the difference is large; then the additions over classes and
    items, and eight operations for each item.
    """
    wide: Dtype = "float64" if dtype == "float64" else "float32"
    meant = {name: value for name, value in options.items() if name != "sizes"}
    losses, each = oracle.item_losses(logits, labels, **meant)
    kept = labels != options.get("ignore_index", -100)
    factors = (
        UPSTREAM * np.linspace(1, 2, labels.size).reshape(labels.shape)
        if reduction == "none"
        else np.asarray(UPSTREAM)
    )
    expected = {"none": losses, "sum": losses.sum(), "mean": losses.sum() / kept.sum()}[
        reduction
    ]
    loss, gradient = outcome_of(
        crews,
        logits,
        labels,
        upstream=factors,
        dtype=dtype,
        reduction=reduction,
        **options,
    )
    bound = 2 * (24 + CLASSES + labels.size + 8) * unit_roundoff(wide)
    assert (loss.dtype, loss.shape) == (np.dtype(wide), expected.shape)
    np.testing.assert_allclose(
        loss,
        expected,
        rtol=0,
        atol=bound * (losses.max(initial=0) + 24) * max(labels.size, 1),
    )
    wanted = (
        each * (factors / kept.sum() if reduction == "mean" else factors)[..., None]
    )
    assert gradient.dtype == np.dtype("float32" if dtype == "bfloat16" else dtype)
    allowed = bound * 2 * UPSTREAM + unit_roundoff(dtype) * np.abs(wanted)
    assert (np.abs(gradient - wanted) <= allowed).all(), (
        options,
        np.abs(gradient - wanted).max(),
    )


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_loss_is_that_of_all_classes(
    backend: ShardedLossHarness, crews: Crews, reduction: str
) -> None:
    for smoothing in (0.0, 0.1, 1.0):
        check(crews, reduction=reduction, label_smoothing=smoothing)


@pytest.mark.every_mode
def test_shards_of_other_sizes(backend: ShardedLossHarness, crews: Crews) -> None:
    """A worker may have no class."""
    for sizes in (
        SIZES[crews.workers][1:] if backend.uneven_shards else SIZES[crews.workers][:1]
    ):
        check(crews, sizes=sizes, reduction="sum", label_smoothing=0.1)


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16"])
def test_dtypes(backend: ShardedLossHarness, crews: Crews, dtype: Dtype) -> None:
    """Half precision is computed with in float32."""
    check(crews, dtype=dtype, label_smoothing=0.1)


def test_other_batches_and_labels(backend: ShardedLossHarness, crews: Crews) -> None:
    check(crews, LOGITS + 1e4)
    check(crews, LOGITS.reshape(2, 3, CLASSES), LABELS.reshape(2, 3), reduction="none")
    check(crews, labels=np.where(LABELS == -100, 2, LABELS), ignore_index=2)


def test_masked_logits_have_no_part(backend: ShardedLossHarness, crews: Crews) -> None:
    logits = np.zeros((3, CLASSES))
    logits[:, 3:] = -np.inf
    check(crews, logits, np.array([0, 1, 0], np.int32))


def test_nothing_but_ignored_labels(backend: ShardedLossHarness, crews: Crews) -> None:
    """The mean over no item is not known, and changes nothing."""
    loss, gradient = outcome_of(crews, labels=np.full(ITEMS, -100, np.int32))
    assert np.isnan(loss)
    assert not gradient.any()


def test_gradient_of_a_probability_of_almost_one(
    backend: ShardedLossHarness, crews: Crews
) -> None:
    """Half precision would round the probability first, and leave nothing of it."""
    logits = np.zeros((1, CLASSES))
    logits[0, 0] = 12.0
    _, gradient = outcome_of(crews, logits, np.zeros(1, np.int32), dtype="bfloat16")
    _, exact = oracle.item_losses(logits, np.zeros(1, np.int32))
    np.testing.assert_allclose(
        gradient, exact, rtol=2.0**-8, atol=(CLASSES + 1) * 2.0**-24
    )


@pytest.mark.parametrize(
    "wrong", ["above", "below", "on one worker", "ignored on one worker"]
)
def test_labels_that_are_no_class_or_differ(
    backend: ShardedLossHarness, crews: Crews, wrong: str
) -> None:
    """Every worker raises; compiled code, which cannot, has a loss that is no
    number.
    """
    labels = np.array([0, 1, 2, 3, 4, 5], np.int32)
    last = labels.copy()
    last[0] = {
        "above": CLASSES,
        "below": -1,
        "on one worker": CLASSES - 1,
        "ignored on one worker": -100,
    }[wrong]
    alike = wrong in ("above", "below")
    answers = answers_of(
        crews, labels=[last if alike else labels] * (crews.workers - 1) + [last]
    )
    for answer in answers:
        if isinstance(answer, Answered) and isinstance(answers[0], Answered):
            assert np.isnan(answer.value[0])
        else:
            assert is_refusal(answer, "labels"), answer
    check(crews)


def is_refusal(answer: Answer, argument: str) -> bool:
    return (
        isinstance(answer, Raised)
        and answer.kind.startswith("Argument")
        and answer.message.startswith(f"{argument}: expected")
    )


BAD: dict[str, list[Option]] = {
    "ignore_index": [None, 1.5],
    "label_smoothing": [-0.1, 1.5, "much", np.nan],
    "reduction": ["median", None],
}


@pytest.mark.parametrize("name", BAD)
def test_bad_argument(backend: ShardedLossHarness, crews: Crews, name: str) -> None:
    for value in BAD[name]:
        answers = answers_of(crews, **{name: value})
        assert all(is_refusal(answer, name) for answer in answers), answers


def test_labels_of_another_shape_or_dtype(
    backend: ShardedLossHarness, crews: Crews
) -> None:
    for labels in (LABELS[:1], LABELS.astype(np.float32)):
        answers = answers_of(crews, labels=labels)
        assert all(is_refusal(answer, "labels") for answer in answers), answers
    check(crews)
