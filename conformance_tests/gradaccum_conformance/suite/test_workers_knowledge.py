"""The statistics of a window of several workers: its loss is that of all."""

import numpy as np
import pytest

from gradaccum_conformance import oracle
from gradaccum_conformance.bounds import gamma
from gradaccum_conformance.measuring import Errors
from gradaccum_conformance.scenarios import (
    REDUCTIONS,
    global_norm,
    large_loss,
    micro_loss,
)
from gradaccum_conformance.specs import MLP, Arrays, Batch, make_batch, make_weights
from gradaccum_conformance.workers import Crew, Crews
from gradaccum_conformance.workers.shares import require_equal


def run_window(crew: Crew, reduction: str) -> tuple[Batch, float, Arrays]:
    """One micro-batch on each worker, and a second one on the last; returns the batch
    of all, its loss and its gradient.
    """
    first = [make_batch(MLP, 3 + rank, seed=10 + rank) for rank in range(crew.workers)]
    second: list[Batch | None] = [None] * crew.workers
    more = second[-1] = make_batch(MLP, 4, seed=9)
    for row in (first, second):
        crew.micro_batch(
            row, [batch and batch.items for batch in row], micro_loss(reduction)
        )
    crew.flush()
    batch = Batch(
        np.concatenate([each.x for each in (*first, more)]),
        np.concatenate([each.y for each in (*first, more)]),
    )
    loss, gradient = oracle.loss_and_gradient(
        MLP, make_weights(MLP), batch, loss=large_loss(reduction)
    )
    return batch, loss, gradient


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_loss_and_norm_are_those_of_all_workers(
    crews: Crews, errors: Errors, reduction: str
) -> None:
    """In the result, and in what a listener hears: once on every worker, which knows
    the number of its own micro-batches.
    """
    crew = crews(reduction=reduction)
    listening = crew.listen()
    batch, loss, gradient = run_window(crew, reduction)
    heard = [[result] for result in crew.ask("result")]
    require_equal(crew)
    crew.flush()
    if listening:
        for windows, listened in zip(heard, crew.heard(), strict=True):
            windows += listened
    for rank, windows in enumerate(heard):
        assert len(windows) == 1 + listening
        for window in windows:
            assert (window.applied, window.optimizer_step) == (True, 1)
            distance = abs(window.loss - loss) / loss
            errors.check("loss", distance, gamma(400, "float32"))
            distance = abs(window.grad_norm / global_norm(gradient) - 1)
            errors.check("norm", distance, gamma(2000, "float32"))
        if listening:
            assert windows[1].weight == batch.items
            assert windows[1].micro_batches == 1 + (rank == crew.workers - 1)
