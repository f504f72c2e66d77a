"""The micro-batches that each worker has in a window, and the gradient that they must
give together.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import NamedTuple

from gradaccum import StepResult
from gradaccum_conformance.bounds import bound_of_sum, gamma, worst
from gradaccum_conformance.harness import GradientTree
from gradaccum_conformance.measuring import Errors
from gradaccum_conformance.scenarios import (
    global_norm,
    outcome_of,
    random_tree,
    same,
    same_result,
    terms_of_sum,
    window_gradient,
)
from gradaccum_conformance.specs import MLP, Arrays
from gradaccum_conformance.workers.crew import Crew


class Share(NamedTuple):
    """One micro-batch of one worker."""

    tree: GradientTree
    weight: float = 1.0


Shares = Sequence[Sequence[Share]]
"""The micro-batches of a window, by rank."""

COUNTS = (3, 1, 0, 2)
"""Micro-batches of each worker."""


def random_shares(counts: Sequence[int], seed: int = 0) -> Shares:
    """So many micro-batches by rank, with different weights."""
    return [
        [
            Share(random_tree(MLP, number), 1.0 + number % 7)
            for number in range(100 * seed + 10 * rank, 100 * seed + 10 * rank + count)
        ]
        for rank, count in enumerate(counts)
    ]


def unequal(workers: int, seed: int = 0) -> Shares:
    """Different numbers of micro-batches of different weights."""
    return random_shares(COUNTS[:workers], seed)


def feed(crew: Crew, shares: Shares) -> None:
    """Each worker's first micro-batch, then each one's second, and so on; a worker that
    has no more is idle.
    """
    for row in zip_longest(*shares):
        crew.gradients(
            [share and share.tree for share in row],
            [share and share.weight for share in row],
        )


def close(crew: Crew, shares: Shares) -> StepResult:
    """A whole window; returns the result, which is the same on every worker."""
    feed(crew, shares)
    crew.flush()
    return require_equal(crew)


def truth_and_bound(shares: Shares, reduction: str = "mean") -> tuple[Arrays, float]:
    """The gradient of all workers' micro-batches by its definition, and the bound of
    its error in float32.
    """
    trees = [share.tree for worker in shares for share in worker]
    weights = [share.weight for worker in shares for share in worker]
    terms = terms_of_sum(trees, weights, reduction)
    truth = window_gradient(trees, weights, reduction)
    return truth, bound_of_sum(terms, "float32")


def check_update(
    errors: Errors, crew: Crew, shares: Shares, *, calls: int, reduction: str = "mean"
) -> None:
    """The window that ended applied one update on every worker, by the gradient of all
    of them, which reports its norm.
    """
    truth, bound = truth_and_bound(shares, reduction)
    captured = crew.ask("captured")[0]
    assert captured.calls == calls
    errors.check(f"gradient, {reduction}", worst(captured.gradient, truth), bound)
    result = require_equal(crew)
    norm = global_norm(truth)
    elements = sum(array.size for array in truth.values())
    errors.check(
        f"norm, {reduction}",
        abs(result.grad_norm - norm) / norm,
        bound + gamma(2 * elements, "float32"),
    )
    assert outcome_of(result) - {"overflow"} == {"applied"}
    assert result.micro_step == 0
    assert result.optimizer_step == calls


def require_equal(crew: Crew) -> StepResult:
    """Between two windows every worker has the same of everything, bit for bit; returns
    the result.
    """
    results: list[StepResult] = crew.ask("result")
    states = crew.ask("state")
    captured = crew.ask("captured")
    arrays = {
        "gradient": [each.gradient for each in captured],
        "parameters": crew.ask("parameters"),
        "optimizer's state": crew.ask("optimizer_state"),
    }
    for rank in range(1, crew.workers):
        assert same_result(results[rank], results[0]), f"the result of rank {rank}"
        assert states[rank] == states[0], f"the state of rank {rank}"
        assert captured[rank].calls == captured[0].calls, f"the calls of rank {rank}"
        for kind, trees in arrays.items():
            assert same(trees[rank], trees[0]), f"the {kind} of rank {rank}"
    return results[0]
