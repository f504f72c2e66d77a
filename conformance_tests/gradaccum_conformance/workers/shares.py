"""The micro-batches that each worker has in a window, and the gradient that they must
give together.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import NamedTuple

import numpy as np

from gradaccum import StepResult
from gradaccum_conformance.bounds import bound_of_sum, gamma, worst
from gradaccum_conformance.harness import Dtype, GradientTree
from gradaccum_conformance.measuring import Errors
from gradaccum_conformance.scenarios import global_norm, random_tree, same, same_result
from gradaccum_conformance.specs import MLP, Array, Arrays
from gradaccum_conformance.workers.crew import Crew


class Share(NamedTuple):
    """One micro-batch of one worker."""

    tree: GradientTree
    weight: float = 1.0


Shares = Sequence[Sequence[Share]]
"""The micro-batches of a window, by rank."""

COUNTS = (3, 1, 0, 2)
"""Micro-batches of each worker."""


def unequal(workers: int, seed: int = 0) -> Shares:
    """Different numbers of micro-batches of different weights."""
    draw = [
        [100 * seed + 10 * rank + index for index in range(COUNTS[rank])]
        for rank in range(workers)
    ]
    return [
        [Share(random_tree(MLP, number), 1.0 + number % 7) for number in own]
        for own in draw
    ]


def on_first(workers: int, *own: Share) -> list[list[Share]]:
    """Micro-batches of the first worker; the others have none."""
    return [list(own), *([] for _ in range(workers - 1))]


def feed(crew: Crew, shares: Shares) -> None:
    """Each worker's first micro-batch, then each one's second, and so on; a worker that
    has no more is idle.
    """
    for row in zip_longest(*shares):
        crew.gradients(
            [share and share.tree for share in row],
            [share and share.weight for share in row],
        )


def terms(shares: Shares, reduction: str) -> list[Arrays]:
    """The terms of the sum over all workers: w g for ``"mean"``, else g. A missing
    gradient is zero.
    """
    used = [share for worker in shares for share in worker if share.weight > 0]
    like = {
        name: array
        for share in used
        for name, array in share.tree.items()
        if array is not None
    }

    def term(share: Share, name: str) -> Array:
        array = share.tree[name]
        factor = share.weight if reduction == "mean" else 1.0
        return np.zeros_like(like[name]) if array is None else factor * array

    return [{name: term(share, name) for name in like} for share in used]


def expected(shares: Shares, reduction: str) -> Arrays:
    """The definition: sum(w g)/sum(w), sum(g), sum(g)/sum(w), over all workers, in
    float64.
    """
    divisor = (
        1.0
        if reduction == "sum"
        else sum(share.weight for worker in shares for share in worker)
    )
    added = terms(shares, reduction)
    return {
        name: np.sum([term[name] for term in added], axis=0) / divisor
        for name in added[0]
    }


def check_update(
    errors: Errors,
    crew: Crew,
    shares: Shares,
    *,
    calls: int,
    reduction: str = "mean",
    dtype: Dtype = "float32",
) -> None:
    """The window that ended made one update on every worker, by the gradient of all of
    them, which reports its norm.
    """
    truth, bound = (
        expected(shares, reduction),
        bound_of_sum(terms(shares, reduction), dtype),
    )
    captured, result = crew.captured()[0], require_equal(crew)
    assert captured.calls == calls
    errors.check(f"gradient, {reduction}", worst(captured.gradient or {}, truth), bound)
    size = global_norm(truth)
    elements = sum(array.size for array in truth.values())
    errors.check(
        f"norm, {reduction}",
        abs(result.grad_norm - size) / size,
        bound + gamma(2 * elements, dtype),
    )
    assert (
        result.applied,
        result.skipped,
        result.micro_step,
        result.optimizer_step,
    ) == (True, False, 0, calls)


def require_equal(crew: Crew) -> StepResult:
    """Between two windows every worker has the same of everything, bit for bit; returns
    the result.
    """
    results, states, calls = crew.results(), crew.states(), crew.captured()
    for rank in range(1, crew.workers):
        assert same_result(results[rank], results[0]), (
            f"the result of rank {rank} is another"
        )
        assert states[rank] == states[0], f"the state of rank {rank} is another"
        assert calls[rank].calls == calls[0].calls, (
            f"the optimizer of rank {rank} ran another number of times"
        )
    gradients = [own.gradient or {} for own in calls]
    for kind, arrays in (
        ("gradient", gradients),
        ("parameters", crew.parameters()),
        ("optimizer's state", crew.optimizer_states()),
    ):
        for rank in range(1, crew.workers):
            assert same(arrays[rank], arrays[0]), (
                f"the {kind} of rank {rank} differ from those of rank 0"
            )
    return results[0]
