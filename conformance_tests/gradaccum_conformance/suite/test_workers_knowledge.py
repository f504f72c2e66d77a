"""The statistics of a window of several workers: its loss is that of all."""

from typing import Any

import numpy as np
import pytest

import gradaccum
from gradaccum_conformance import oracle
from gradaccum_conformance.bounds import gamma
from gradaccum_conformance.measuring import Errors
from gradaccum_conformance.scenarios import (
    REDUCTIONS,
    global_norm,
    large_loss,
    micro_loss,
)
from gradaccum_conformance.specs import MLP, Batch, make_batch, make_weights
from gradaccum_conformance.workers import Crews, WorkerError
from gradaccum_conformance.workers.shares import require_equal

ROUNDING = gamma(400, "float32")


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_loss_is_that_of_all_workers(
    crews: Crews, errors: Errors, reduction: str
) -> None:
    """The first worker has a micro-batch more than the others."""
    crew = crews(reduction=reduction)
    own = [make_batch(MLP, 3 + rank, seed=10 + rank) for rank in range(crew.workers)]
    crew.micro_batch(own, [batch.items for batch in own], micro_loss(reduction))
    more = make_batch(MLP, 4, seed=9)
    absent = [None] * (crew.workers - 1)
    crew.micro_batch([more, *absent], [4, *absent], micro_loss(reduction))
    crew.flush()
    everything = Batch(
        np.concatenate([b.x for b in (*own, more)]),
        np.concatenate([b.y for b in (*own, more)]),
    )
    truth = oracle.loss_and_gradient(
        MLP, make_weights(MLP), everything, loss=large_loss(reduction)
    )[0]
    errors.check("loss", abs(require_equal(crew).loss - truth) / truth, ROUNDING)


def test_listeners_hear_the_window_of_all(crews: Crews, errors: Errors) -> None:
    """Once on every worker. A worker knows the number of its own micro-batches; the
    last one has one more than the others.
    """
    crew = crews()
    listening = crew.listen()
    own = [make_batch(MLP, 3 + rank, seed=10 + rank) for rank in range(crew.workers)]
    crew.micro_batch(own, [batch.items for batch in own])
    assert not any(crew.heard())
    more = make_batch(MLP, 4, seed=9)
    crew.micro_batch(
        [None] * (crew.workers - 1) + [more], [None] * (crew.workers - 1) + [4]
    )
    crew.flush()
    results = crew.results()
    crew.flush()
    everything = Batch(
        np.concatenate([b.x for b in (*own, more)]),
        np.concatenate([b.y for b in (*own, more)]),
    )
    truth, gradient = oracle.loss_and_gradient(MLP, make_weights(MLP), everything)
    heard: list[list[Any]] = [*crew.heard()]
    if not listening:
        heard = [[result] for result in results if result.closed]
    for rank, windows in enumerate(heard):
        (window,) = windows
        assert (window.applied, window.optimizer_step) == (True, 1)
        errors.check("loss", abs(window.loss - truth) / truth, ROUNDING)
        errors.check(
            "norm",
            abs(window.grad_norm / global_norm(gradient) - 1),
            gamma(2000, "float32"),
        )
        if listening:
            assert (window.weight, window.micro_batches) == (
                everything.items,
                1 + (rank == crew.workers - 1),
            )


def test_window_by_weight_is_refused(crews: Crews) -> None:
    """Each worker sees its own weight only, so that the ends would differ."""
    with pytest.raises(WorkerError, match="until_weight") as caught:
        crews(steps=gradaccum.until_weight(8))
    assert len(caught.value.failures) == crews.workers
    assert all("flush()" in failure for failure in caught.value.failures.values()), (
        caught.value
    )
