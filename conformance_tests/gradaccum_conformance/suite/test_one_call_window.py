"""A whole window of a wrapped optimizer from one large batch: as if its micro-batches
had come one by one.
"""

import numpy as np
import pytest

from gradaccum import DynamicLossScale
from gradaccum_conformance import oracle
from gradaccum_conformance.bounds import unit_roundoff, worst
from gradaccum_conformance.deep import deep_but
from gradaccum_conformance.harness import LargeBatchHarness, Option, Session
from gradaccum_conformance.scenarios import (
    REDUCTIONS,
    cut,
    feed,
    large_loss,
    micro_loss,
    outcome_of,
    require_skipped,
    same_decision,
    standard_batch,
    start,
)
from gradaccum_conformance.specs import LINEAR, Batch, Optimizer, make_weights

BATCH = standard_batch(LINEAR)
BAD_ITEM = Batch(BATCH.x.copy(), BATCH.y)
BAD_ITEM.x[6] = np.inf
DYNAMIC = DynamicLossScale(init_scale=8.0, growth_interval=2)
CASES = {
    "plain": ({}, BATCH, {"applied"}),
    "clipped": ({"clip_norm": 0.05}, BATCH, {"applied"}),
    "skipped": ({"skip_norm": 1e-3}, BATCH, {"skipped"}),
    "scaled": ({"loss_scale": DYNAMIC}, BATCH, {"applied"}),
    "overflow": ({"loss_scale": DYNAMIC}, BAD_ITEM, {"skipped", "overflow"}),
    "dropping": (
        {"loss_scale": DYNAMIC, "on_overflow": "drop_micro_batch"},
        BAD_ITEM,
        {"applied", "overflow"},
    ),
}
"""The options, the batch, and the window's outcome."""


def begin(backend: LargeBatchHarness, **options: Option) -> tuple[Session, Session]:
    """Two sessions alike: one for the micro-batches one by one, one for the large
    batch.
    """
    optimizer = Optimizer("momentum")
    return (
        start(backend, LINEAR, optimizer, **options),
        start(backend, LINEAR, optimizer, **options),
    )


def run(
    one_by_one: Session,
    whole: Session,
    backend: LargeBatchHarness,
    batch: Batch,
    reduction: str = "mean",
) -> float:
    feed(one_by_one, cut(batch, (5, 5, 2)), reduction)
    one_by_one.flush()
    return backend.update(
        whole, batch, loss=micro_loss(reduction), options={"micro_batch_size": 5}
    )


@pytest.mark.parametrize(("options", "batch", "outcome"), CASES.values(), ids=CASES)
def test_options_hold_for_a_split_window(
    backend: LargeBatchHarness,
    options: dict[str, Option],
    batch: Batch,
    outcome: set[str],
) -> None:
    one_by_one, whole = begin(backend, **options)
    for factor in (1, 2, 3):
        run(one_by_one, whole, backend, Batch(factor * batch.x, batch.y))
        assert outcome_of(whole.result()) == outcome
        assert whole.state() == one_by_one.state()
        assert same_decision(whole.result(), one_by_one.result(), 1e-5)
        loss = one_by_one.result().loss
        assert whole.result().loss == pytest.approx(loss, rel=1e-5, nan_ok=True)
    assert worst(whole.parameters(), one_by_one.parameters()) < 1e-6
    assert not any(array.any() for array in whole.accumulator().values())


@pytest.mark.every_mode
@pytest.mark.parametrize("reduction", deep_but(("sum_per_item",), REDUCTIONS))
def test_every_mode(
    backend: LargeBatchHarness, large_batch_mode: str, reduction: str
) -> None:
    one_by_one, whole = begin(backend, mode=large_batch_mode, reduction=reduction)
    loss = run(one_by_one, whole, backend, BATCH, reduction)
    truth, _ = oracle.loss_and_gradient(
        LINEAR, make_weights(LINEAR), BATCH, loss=large_loss(reduction)
    )
    assert loss == pytest.approx(truth, rel=1e-5)
    assert whole.result().applied
    assert worst(whole.parameters(), one_by_one.parameters()) < 1e-6


def test_last_batch_of_fewer_items_than_steps(
    backend: LargeBatchHarness, large_batch_mode: str
) -> None:
    """The window closes with the micro-batches that there are."""
    batch = BATCH.rows(0, 3)
    one_by_one, whole = begin(backend, mode=large_batch_mode)
    feed(one_by_one, cut(batch, (1, 1, 1)))
    one_by_one.flush()
    backend.update(whole, batch, options={"steps": 4})
    assert whole.state() == one_by_one.state()
    assert whole.result().applied
    assert worst(whole.parameters(), one_by_one.parameters()) < 1e-6


def test_half_precision_is_summed_in_float32(backend: LargeBatchHarness) -> None:
    """Micro-batches of one item: in half precision the later ones would be rounded
    away.
    """
    for dtype in backend.half_dtypes:
        one_by_one, whole = (start(backend, dtype=dtype) for _ in range(2))
        feed(one_by_one, cut(BATCH, (1,) * 12))
        one_by_one.flush()
        backend.update(whole, BATCH, options={"micro_batch_size": 1})
        distance = worst(whole.captured().gradient, one_by_one.captured().gradient)
        assert distance <= 2 * unit_roundoff(dtype)


def test_batch_without_weight_makes_no_update(backend: LargeBatchHarness) -> None:
    session = start(backend)
    before = session.parameters()
    options = {"steps": 3, "weight": (0.0,) * 12}
    assert backend.update(session, BATCH, options=options) == 0
    require_skipped(session, before)
