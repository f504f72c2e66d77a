"""A whole window of a wrapped optimizer from one large batch: as if its micro-batches
had come one by one.
"""

import numpy as np
import pytest

from gradaccum import DynamicLossScale
from gradaccum_conformance import oracle
from gradaccum_conformance.bounds import unit_roundoff, worst
from gradaccum_conformance.deep import deep_but
from gradaccum_conformance.harness import Dtype, LargeBatchHarness, Option, Session
from gradaccum_conformance.scenarios import (
    REDUCTIONS,
    cut,
    feed,
    large_loss,
    micro_loss,
    same,
    same_result,
    standard_batch,
    start,
)
from gradaccum_conformance.specs import LINEAR, Batch, Optimizer, make_weights

SIZES = (5, 5, 2)
OPTIONS: dict[str, dict[str, Option]] = {
    "plain": {},
    "clipped": {"clip_norm": 0.05},
    "skipped": {"skip_norm": 1e-3},
    "scaled": {"loss_scale": DynamicLossScale(init_scale=1024.0, growth_interval=2)},
}


def pair(
    backend: LargeBatchHarness,
    *,
    dtype: Dtype = "float32",
    mode: str | None = None,
    **options: Option,
) -> tuple[Session, Session]:
    """Two sessions alike: one for the micro-batches one by one, one for the large
    batch.
    """
    one_by_one, whole = (
        start(backend, LINEAR, Optimizer("momentum"), dtype=dtype, mode=mode, **options)
        for _ in range(2)
    )
    return one_by_one, whole


def run(
    one_by_one: Session,
    whole: Session,
    backend: LargeBatchHarness,
    batch: Batch,
    reduction: str = "mean",
) -> float:
    feed(one_by_one, cut(batch, SIZES), reduction)
    one_by_one.flush()
    return backend.update(
        whole, batch, loss=micro_loss(reduction), options={"micro_batch_size": 5}
    )


@pytest.mark.parametrize("name", OPTIONS)
def test_options_hold_for_a_split_window(backend: LargeBatchHarness, name: str) -> None:
    one_by_one, whole = pair(backend, **OPTIONS[name])
    for seed in range(3):
        run(
            one_by_one,
            whole,
            backend,
            standard_batch(LINEAR)._replace(x=standard_batch(LINEAR).x * (seed + 1)),
        )
        assert whole.state() == one_by_one.state()
        ours, theirs = whole.result(), one_by_one.result()
        assert same_result(
            ours._replace(grad_norm=0, loss=0), theirs._replace(grad_norm=0, loss=0)
        )
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-5)
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-5)
    assert worst(whole.parameters(), one_by_one.parameters()) < 1e-6
    assert (whole.state().skipped_windows == 3) == (name == "skipped")


@pytest.mark.every_mode
@pytest.mark.parametrize("reduction", deep_but(("sum_per_item",), REDUCTIONS))
def test_every_mode(
    backend: LargeBatchHarness, large_batch_mode: str, reduction: str
) -> None:
    batch = standard_batch(LINEAR)
    one_by_one, whole = pair(backend, mode=large_batch_mode, reduction=reduction)
    loss = run(one_by_one, whole, backend, batch, reduction)
    truth, _ = oracle.loss_and_gradient(
        LINEAR, make_weights(LINEAR), batch, loss=large_loss(reduction)
    )
    assert loss == pytest.approx(truth, rel=1e-5)
    assert whole.result().applied
    assert worst(whole.parameters(), one_by_one.parameters()) < 1e-6


def test_last_batch_of_fewer_items_than_steps(
    backend: LargeBatchHarness, large_batch_mode: str
) -> None:
    """The window closes with the micro-batches that there are."""
    batch = standard_batch(LINEAR).rows(0, 3)
    one_by_one, whole = pair(backend, mode=large_batch_mode)
    feed(one_by_one, cut(batch, (1, 1, 1)))
    one_by_one.flush()
    backend.update(whole, batch, options={"steps": 4})
    assert (whole.state(), whole.result().applied) == (one_by_one.state(), True)
    assert worst(whole.parameters(), one_by_one.parameters()) < 1e-6


def test_half_precision_is_summed_in_float32(backend: LargeBatchHarness) -> None:
    """Micro-batches of one item: in half precision the later ones would be rounded
    away.
    """
    batch = standard_batch(LINEAR)
    for dtype in backend.half_dtypes:
        sessions = [start(backend, LINEAR, dtype=dtype) for _ in range(2)]
        feed(sessions[0], cut(batch, (1,) * 12))
        sessions[0].flush()
        backend.update(sessions[1], batch, options={"micro_batch_size": 1})
        one_by_one, whole = (session.captured().gradient or {} for session in sessions)
        assert worst(whole, one_by_one) <= 2 * unit_roundoff(dtype)


@pytest.mark.parametrize("policy", ["skip_window", "drop_micro_batch"])
def test_one_bad_item(backend: LargeBatchHarness, policy: str) -> None:
    """The policy is that of the window, and the scale backs off once."""
    batch = standard_batch(LINEAR)
    x = batch.x.copy()
    x[6] = np.inf
    one_by_one, whole = pair(
        backend, on_overflow=policy, loss_scale=DynamicLossScale(init_scale=8.0)
    )
    run(one_by_one, whole, backend, Batch(x, batch.y))
    assert whole.state() == one_by_one.state()
    assert whole.state().loss_scale == 4
    assert whole.result().overflow
    assert whole.result().applied == (policy == "drop_micro_batch")
    assert worst(whole.parameters(), one_by_one.parameters()) < 1e-6


def test_batch_without_weight_makes_no_update(backend: LargeBatchHarness) -> None:
    session = start(backend, LINEAR)
    before = session.parameters()
    assert (
        backend.update(
            session, standard_batch(LINEAR), options={"steps": 3, "weight": (0.0,) * 12}
        )
        == 0
    )
    result = session.result()
    assert (
        result.applied,
        result.skipped,
        result.overflow,
        session.captured().calls,
    ) == (False, True, False, 0)
    assert same(session.parameters(), before)


def test_nothing_is_left_for_the_next_window(backend: LargeBatchHarness) -> None:
    session = start(backend, LINEAR)
    for _ in range(2):
        backend.update(session, standard_batch(LINEAR), options={"steps": 3})
    other = start(backend, LINEAR)
    for _ in range(2):
        backend.update(other, standard_batch(LINEAR), options={"steps": 3})
    assert (
        session.captured().calls,
        session.state().micro_step,
        session.state().optimizer_step,
    ) == (2, 0, 2)
    assert not any(total.any() for total in session.accumulator().values())
    assert same(session.parameters(), other.parameters())
