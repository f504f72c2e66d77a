"""Several workers share a window: its gradient is that of one large batch over all of
them, and every worker applies the same update.

After each window every worker has the same result, state, parameters and optimizer
state, bit for bit.
"""

import math

import pytest

from gradaccum_conformance import oracle
from gradaccum_conformance.bounds import (
    additions_in_gradient,
    gamma,
    unit_roundoff,
    worst,
)
from gradaccum_conformance.measuring import Errors
from gradaccum_conformance.scenarios import (
    constant_tree,
    cut,
    outcome_of,
    poisoned,
    random_tree,
    same,
    same_result,
    standard_batch,
)
from gradaccum_conformance.specs import MLP, make_weights
from gradaccum_conformance.workers import Crews
from gradaccum_conformance.workers.options import REDUCTIONS
from gradaccum_conformance.workers.shares import (
    Share,
    check_update,
    close,
    feed,
    random_shares,
    require_equal,
    truth_and_bound,
    unequal,
)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_gradient_is_that_of_all_workers(
    crews: Crews, errors: Errors, reduction: str
) -> None:
    """They have different numbers of micro-batches and weights, in two windows one
    after the other.
    """
    crew = crews(**REDUCTIONS[reduction])
    for window in range(2):
        shares = unequal(crew.workers, window)
        close(crew, shares)
        check_update(errors, crew, shares, calls=window + 1, reduction=reduction)


def test_worker_without_micro_batches(crews: Crews, errors: Errors) -> None:
    """In the first window every worker but the first has nothing, in the second every
    one but the last, in the third all of them.
    """
    crew = crews()
    counts = [2, *[0] * (crew.workers - 1)]
    for calls in (1, 2):
        shares = random_shares(counts, calls)
        close(crew, shares)
        check_update(errors, crew, shares, calls=calls)
        counts.reverse()
    states = crew.ask("state")
    parameters = crew.ask("parameters")
    result = require_equal(crew)
    assert result.applied
    crew.flush()
    assert same_result(require_equal(crew), result._replace(applied=False))
    assert crew.ask("state") == states
    assert all(map(same, crew.ask("parameters"), parameters))


def test_missing_gradients_count_as_zero(crews: Crews, errors: Errors) -> None:
    """The first parameter has none on the last worker, the last parameter has none in
    the window's last micro-batches.
    """
    crew = crews()
    front, *_, back = MLP.parameter_shapes()
    for window in range(2):
        shares = []
        for first, last in random_shares([2] * crew.workers, window):
            shares.append([first, last._replace(tree={**last.tree, back: None})])
        shares[-1] = [
            share._replace(tree={**share.tree, front: None}) for share in shares[-1]
        ]
        close(crew, shares)
        check_update(errors, crew, shares, calls=window + 1)


def test_weight_of_zero_adds_nothing(crews: Crews, errors: Errors) -> None:
    """Not even where the gradient is NaN; a window without weight applies no update,
    and is no overflow.
    """
    crew = crews()
    nothing = Share(poisoned(random_tree(MLP, 9), math.nan), 0.0)
    shares = [[*own, nothing] for own in random_shares([1] * crew.workers)]
    shares[-1] = [nothing]
    close(crew, shares)
    check_update(errors, crew, shares, calls=1)
    before = crew.ask("parameters")[0]
    result = close(crew, [[nothing]] * crew.workers)
    assert outcome_of(result) == {"skipped"}
    assert same(crew.ask("parameters")[0], before)


def test_bad_weight_is_refused_or_an_overflow(crews: Crews, errors: Errors) -> None:
    """Every worker raises, and what it held is still there. Compiled code, which cannot
    raise, skips the window on every worker.
    """
    crew = crews()
    shares = unequal(crew.workers)
    feed(crew, shares)
    before = crew.ask("state")
    trees = [random_tree(MLP, 9)] * crew.workers
    refusals = [
        crew.refusals(trees, [weight] * crew.workers) for weight in (-1.0, math.nan)
    ]
    if any(refusals):
        words = "ArgumentValueError: weight: expected"
        for texts in refusals:
            assert texts
            assert all(text.startswith(words) for text in texts)
        assert crew.ask("state") == before
        crew.flush()
        check_update(errors, crew, shares, calls=1)
    else:
        crew.flush()
        assert outcome_of(require_equal(crew)) == {"skipped", "overflow"}


def test_model_matches_the_large_batch(crews: Crews, errors: Errors) -> None:
    """With the framework's own forward and backward passes on unequal micro-batches,
    against the float64 oracle.
    """
    crew = crews()
    batch = standard_batch(MLP, 5 * crew.workers)
    pieces = cut(batch, (1, 4) * crew.workers)
    for row in (pieces[::2], pieces[1::2]):
        crew.micro_batch(row, [piece.items for piece in row])
    crew.flush()
    require_equal(crew)
    _, truth = oracle.loss_and_gradient(MLP, make_weights(MLP), batch)
    bound = gamma(additions_in_gradient(MLP, batch.items, len(pieces)), "float32")
    errors.check("gradient", worst(crew.ask("captured")[0].gradient, truth), bound)


def test_half_precision_gradients_are_summed_in_float32(
    crews: Crews, errors: Errors
) -> None:
    """And so reduced. The large ones of the first and the last worker cancel, and what
    is left is below bfloat16's resolution of them.
    """
    crew = crews(dtype="bfloat16")
    small = Share(constant_tree(MLP, 2.0**-9))
    shares = [[small, small] for _ in range(crew.workers)]
    shares[0][0] = Share(constant_tree(MLP, 1.0))
    shares[-1][0] = Share(constant_tree(MLP, -1.0))
    close(crew, shares)
    truth, _ = truth_and_bound(shares)
    distance = worst(crew.ask("captured")[0].gradient, truth)
    errors.check("gradient", distance, unit_roundoff("bfloat16"))
