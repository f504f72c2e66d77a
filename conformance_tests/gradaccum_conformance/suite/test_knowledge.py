"""A window's statistics: its loss, and its end by weight."""

import math
from pathlib import Path
from typing import Any

import pytest

import gradaccum
from gradaccum_conformance import oracle
from gradaccum_conformance.bounds import additions_in_gradient, gamma, worst
from gradaccum_conformance.deep import deep_but
from gradaccum_conformance.harness import Harness, Option, Session
from gradaccum_conformance.measuring import Errors
from gradaccum_conformance.scenarios import (
    REDUCTIONS,
    constant_tree,
    cut,
    feed,
    global_norm,
    large_loss,
    poisoned,
    random_tree,
    standard_batch,
    start,
)
from gradaccum_conformance.specs import LINEAR, MLP, Batch

BATCH = standard_batch(MLP)
PIECES = cut(BATCH, (5, 5, 2))
SHORT = BATCH.rows(0, 7)
ROUNDING = gamma(200, "float32")
"""The bound of a loss of some 12 items."""
GRADIENT = gamma(additions_in_gradient(MLP, 12, len(PIECES)), "float32")
ZEROS = constant_tree(MLP, 0.0)


def true_loss(session: Session, batch: Batch, reduction: str = "mean") -> float:
    """The loss of the large batch with the parameters as they are now."""
    return oracle.loss_and_gradient(
        MLP, session.parameters(), batch, loss=large_loss(reduction)
    )[0]


def check_loss(errors: Errors, session: Session, truth: float) -> None:
    errors.check("loss", abs(session.result().loss - truth) / truth, ROUNDING)


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
    feed(session, PIECES, reduction)
    check_loss(errors, session, truth)
    session.gradients(ZEROS, weight=0.0)
    check_loss(errors, session, truth)
    session.discard()
    truth = true_loss(session, SHORT, reduction)
    feed(session, cut(SHORT, (5, 2)), reduction)
    session.flush()
    check_loss(errors, session, truth)
    truth = true_loss(session, BATCH, reduction)
    feed(session, PIECES, reduction)
    check_loss(errors, session, truth)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_denominator_is_chosen_as_the_window_is_closed(
    backend: Harness, mode: str, errors: Errors, reduction: str
) -> None:
    """It divides the gradient and the loss; the next window has its own."""
    session = start(
        backend,
        MLP,
        steps=None,
        reduction=reduction,
        loss_scale=8.0,
        clip_norm=1e3,
        mode=mode,
    )
    for denominator in (7.0, None):
        divisor = denominator or 1.0
        loss, gradient = oracle.loss_and_gradient(
            MLP,
            session.parameters(),
            BATCH,
            loss="sum" if denominator else large_loss(reduction),
        )
        truth = {name: array / divisor for name, array in gradient.items()}
        feed(session, PIECES, reduction)
        session.flush(denominator=denominator)
        check_loss(errors, session, loss / divisor)
        errors.check("gradient", worst(session.captured().gradient, truth), GRADIENT)
        norm = session.result().grad_norm
        assert math.isclose(norm, global_norm(truth), rel_tol=1e-5)


def test_loss_leaves_out_what_the_window_does(
    backend: Harness, mode: str, errors: Errors
) -> None:
    """A dropped micro-batch, one of weight 0, one of weight 0 that has no loss, and a
    discarded window.
    """
    bad = Batch(BATCH.x[:4].copy(), BATCH.y[:4])
    bad.x[0, 0] = math.inf
    session = start(backend, MLP, on_overflow="drop_micro_batch", mode=mode)
    rest = BATCH.rows(4, 12)
    truth = true_loss(session, rest)
    feed(session, [BATCH.rows(0, 4)])
    session.discard()
    session.micro_batch(bad, weight=4)
    session.micro_batch(bad, weight=0.0)
    feed(session, cut(rest, (5, 3)))
    session.gradients(ZEROS, weight=0.0)
    session.flush()
    assert session.result().applied
    check_loss(errors, session, truth)


def test_window_with_a_missing_loss_has_none(
    backend: Harness, mode: str, errors: Errors
) -> None:
    """It may be the first or the last; the next window knows its own."""
    session = start(backend, MLP, steps=2, on_overflow="ignore", mode=mode)
    for has_loss in (True, False, False, True):
        if has_loss:
            session.micro_batch(BATCH)
        else:
            session.gradients(ZEROS)
        assert math.isnan(session.result().loss)
    assert session.state().optimizer_step == 2
    truth = true_loss(session, BATCH)
    feed(session, cut(BATCH, (7, 5)))
    check_loss(errors, session, truth)


def test_open_window_keeps_its_loss_when_saved(
    backend: Harness, tmp_path: Path
) -> None:
    whole, resumed = (start(backend, MLP, steps=3) for _ in range(2))
    feed(whole, PIECES[:2])
    whole.save(tmp_path)
    resumed.load(tmp_path)
    for session in (whole, resumed):
        feed(session, PIECES[2:])
    assert resumed.result() == whole.result()
    assert not math.isnan(whole.result().loss)


def growing(optimizer_step: Any) -> Any:
    """Not a lambda: MindSpore reads the source of a function, and finds no lambda
    inside a call.
    """
    return optimizer_step * 3 + 2


@pytest.mark.parametrize(
    ("weight", "ends"),
    [(3, [2, 5]), ([(0, 2), (1, 5)], [1, 6]), (growing, [1, 6])],
    ids=["number", "pairs", "function"],
)
def test_window_ends_by_weight(
    backend: Harness, mode: str, weight: Option, ends: list[int]
) -> None:
    """A dropped micro-batch does not fill it. Its weight may be exceeded."""
    session = start(
        backend,
        steps=gradaccum.until_weight(weight),
        on_overflow="drop_micro_batch",
        mode=mode,
    )
    tree = random_tree(LINEAR, 0)
    closed = []
    for _ in range(7):
        session.gradients(tree, weight=1.0)
        closed.append(session.result().closed)
    assert [step for step, is_closed in enumerate(closed) if is_closed] == ends
    session.discard()
    session.gradients(poisoned(tree, math.nan), weight=16.0)
    assert session.state().micro_step == 1
    session.gradients(tree, weight=16.0)
    assert session.state().optimizer_step == 3
    assert session.state().micro_step == 0
