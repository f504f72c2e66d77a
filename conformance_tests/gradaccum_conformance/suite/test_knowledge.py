"""A window's statistics: its loss, its norm, and its end by weight."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradaccum
from gradaccum_conformance import oracle
from gradaccum_conformance.bounds import gamma
from gradaccum_conformance.deep import deep_but
from gradaccum_conformance.harness import Harness, Session
from gradaccum_conformance.measuring import Errors
from gradaccum_conformance.scenarios import (
    REDUCTIONS,
    cut,
    feed,
    large_loss,
    poisoned,
    random_tree,
    standard_batch,
    start,
)
from gradaccum_conformance.specs import LINEAR, MLP, Batch

BATCH = standard_batch(MLP)
SIZES = (5, 5, 2)
ROUNDING = gamma(200, "float32")
"""The bound of a loss of some 12 items, and of a norm of some 100 elements."""


def true_loss(session: Session, batch: Batch, reduction: str) -> float:
    return oracle.loss_and_gradient(
        MLP, session.parameters(), batch, loss=large_loss(reduction)
    )[0]


@pytest.mark.parametrize("reduction", deep_but(("mean",), REDUCTIONS))
def test_loss_is_the_large_batch_s(
    backend: Harness, mode: str, errors: Errors, reduction: str
) -> None:
    """Of a full window, of a short one, of the one after it, with a loss scale; it
    stays until the next window closes.
    """
    session = start(
        backend, MLP, steps=3, reduction=reduction, loss_scale=8.0, mode=mode
    )
    assert math.isnan(session.result().loss)
    truth = true_loss(session, BATCH, reduction)
    feed(session, cut(BATCH, SIZES), reduction)
    errors.check("loss", abs(session.result().loss - truth) / truth, ROUNDING)
    before = session.result().loss
    session.gradients(
        {name: np.zeros(shape) for name, shape in MLP.parameter_shapes().items()},
        weight=0.0,
    )
    assert session.result().loss == before
    session.discard()
    short = BATCH.rows(0, 7)
    truth = true_loss(session, short, reduction)
    feed(session, cut(short, (5, 2)), reduction)
    session.flush()
    errors.check(
        "loss of a short window", abs(session.result().loss - truth) / truth, ROUNDING
    )
    truth = true_loss(session, BATCH, reduction)
    feed(session, cut(BATCH, SIZES), reduction)
    errors.check(
        "loss of the next window", abs(session.result().loss - truth) / truth, ROUNDING
    )


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_denominator_divides_the_loss_too(
    backend: Harness, mode: str, errors: Errors, reduction: str
) -> None:
    session = start(
        backend, MLP, steps=None, reduction=reduction, loss_scale=8.0, mode=mode
    )
    for number in (7.0, None):
        total = true_loss(session, BATCH, "sum")
        feed(session, cut(BATCH, SIZES), reduction)
        session.flush(denominator=number)
        truth = total / (number or (1 if reduction == "sum" else BATCH.items))
        errors.check("loss", abs(session.result().loss - truth) / truth, ROUNDING)


def test_loss_leaves_out_what_the_window_does(
    backend: Harness, mode: str, errors: Errors
) -> None:
    """A dropped micro-batch, one of weight 0, and a discarded window."""
    bad = Batch(BATCH.x[:4].copy(), BATCH.y[:4])
    bad.x[0, 0] = math.inf
    session = start(backend, MLP, on_overflow="drop_micro_batch", mode=mode)
    truth = true_loss(session, BATCH.rows(4, 12), "mean")
    feed(session, cut(BATCH.rows(0, 4), (4,)))
    session.discard()
    session.micro_batch(bad, weight=4)
    session.micro_batch(bad, weight=0.0)
    feed(session, cut(BATCH.rows(4, 12), (5, 3)))
    session.flush()
    assert session.result().applied
    errors.check("loss", abs(session.result().loss - truth) / truth, ROUNDING)


def test_loss_misses_no_micro_batch_of_weight_zero(
    backend: Harness, mode: str, errors: Errors
) -> None:
    """Though that one is the last and does not tell its own."""
    session = start(backend, MLP, steps=2, mode=mode)
    truth = true_loss(session, BATCH.rows(0, 5), "mean")
    session.micro_batch(BATCH.rows(0, 5), weight=5)
    session.gradients(
        {name: np.zeros(shape) for name, shape in MLP.parameter_shapes().items()},
        weight=0.0,
    )
    assert session.result().applied
    errors.check("loss", abs(session.result().loss - truth) / truth, ROUNDING)


def test_window_with_a_missing_loss_has_none(
    backend: Harness, mode: str, errors: Errors
) -> None:
    """It may be the first or the last; the next window knows its own, after an infinite
    one too.
    """
    session = start(backend, MLP, steps=2, on_overflow="ignore", mode=mode)
    zeros = {name: np.zeros(shape) for name, shape in MLP.parameter_shapes().items()}
    for told in ((True, False), (False, True)):
        for tells in told:
            session.micro_batch(BATCH) if tells else session.gradients(zeros)
        assert session.result().applied
        assert math.isnan(session.result().loss)
    truth = true_loss(session, BATCH, "mean")
    feed(session, cut(BATCH, (7, 5)))
    errors.check("loss", abs(session.result().loss - truth) / truth, ROUNDING)


def test_open_window_keeps_its_loss_when_saved(
    backend: Harness, tmp_path: Path
) -> None:
    whole, resumed = (start(backend, MLP, steps=3) for _ in range(2))
    pieces = cut(BATCH, SIZES)
    feed(whole, pieces[:2])
    whole.save(tmp_path)
    resumed.load(tmp_path)
    for session in (whole, resumed):
        feed(session, pieces[2:])
    assert resumed.result() == whole.result()
    assert not math.isnan(whole.result().loss)


def eight(step: Any) -> int:
    """Not a lambda: MindSpore reads the source of a function, and finds no lambda
    inside a call.
    """
    return 8


@pytest.mark.parametrize(
    "weight", [8, [(0, 8)], eight], ids=["number", "pairs", "function"]
)
def test_window_ends_by_weight(backend: Harness, mode: str, weight: Any) -> None:
    session = start(backend, steps=gradaccum.until_weight(weight), mode=mode)
    closed = []
    for items in (3, 4, 1, 4):
        session.gradients(random_tree(LINEAR, items), weight=items)
        closed.append(bool(session.result().closed))
    assert closed == [False, False, True, False]
    assert (session.state().optimizer_step, session.state().weight) == (1, 4.0)


def test_weight_of_a_window_follows_its_schedule(backend: Harness, mode: str) -> None:
    """The first window ends at 2, the second at 5."""
    session = start(backend, steps=gradaccum.until_weight([(0, 2), (1, 5)]), mode=mode)
    ends = []
    for seed in range(8):
        session.gradients(random_tree(LINEAR, seed), weight=1.0)
        ends.append(bool(session.result().closed))
    assert [index for index, end in enumerate(ends) if end] == [1, 6]


def test_dropped_weight_does_not_fill_a_window(backend: Harness, mode: str) -> None:
    session = start(
        backend,
        steps=gradaccum.until_weight(4),
        on_overflow="drop_micro_batch",
        mode=mode,
    )
    session.gradients(poisoned(random_tree(LINEAR, 0), math.nan), weight=4.0)
    session.gradients(random_tree(LINEAR, 1), weight=3.0)
    assert session.state().micro_step == 2
    session.gradients(random_tree(LINEAR, 2), weight=1.0)
    assert session.state().optimizer_step == 1


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_tiny_norms_are_right(
    backend: Harness, mode: str, errors: Errors, reduction: str
) -> None:
    """The squares of these gradients vanish in float32; they themselves do not."""
    scale = 2.0**-100
    session = start(backend, steps=2, reduction=reduction, mode=mode)
    trees = [random_tree(LINEAR, seed, scale) for seed in (0, 1)]
    for tree in trees:
        session.gradients(tree, weight=1.0)
    factor = 2 if reduction == "sum" else 1
    truth = factor * math.sqrt(
        sum(
            float((((trees[0][n] + trees[1][n]) / 2 / scale) ** 2).sum())
            for n in trees[0]
        )
    )
    errors.check(
        "norm", abs(session.result().grad_norm / scale - truth) / truth, ROUNDING
    )


def test_tiny_gradients_are_clipped(
    backend: Harness, mode: str, errors: Errors
) -> None:
    session = start(backend, steps=1, clip_norm=2.0**-104, mode=mode)
    tree = random_tree(LINEAR, 0, 2.0**-100)
    session.gradients(tree)
    norm = math.sqrt(
        sum(float(((array * 2.0**100) ** 2).sum()) for array in tree.values())
    )
    expected = {name: array / norm * 2.0**-4 for name, array in tree.items()}
    gradient = session.captured().gradient or {}
    for name, array in expected.items():
        errors.check(name, float(np.abs(gradient[name] / array - 1).max()), ROUNDING)


def test_mixed_magnitudes_have_a_right_norm(
    backend: Harness, mode: str, errors: Errors
) -> None:
    """One element is large enough for its square, and thousands that are not make up
    most of the norm.
    """
    session = start(backend, MLP, steps=1, mode=mode)
    tree = {
        name: np.full(shape, 2.0**-72) for name, shape in MLP.parameter_shapes().items()
    }
    session.gradients(tree)
    truth = 2.0**-72 * math.sqrt(sum(array.size for array in tree.values()))
    errors.check("norm", abs(session.result().grad_norm - truth) / truth, ROUNDING)
