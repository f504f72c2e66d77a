"""Several workers share a window: its gradient is that of one large batch over all of
them, and every worker makes the same update.

After each window every worker has the same result, state, parameters and optimizer
state, bit for bit.
"""

import math

import numpy as np
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
    cut,
    poisoned,
    random_tree,
    same,
    standard_batch,
)
from gradaccum_conformance.specs import MLP, make_weights
from gradaccum_conformance.workers import Crews
from gradaccum_conformance.workers.options import REDUCTIONS
from gradaccum_conformance.workers.shares import (
    Share,
    check_update,
    expected,
    feed,
    on_first,
    require_equal,
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
        feed(crew, shares)
        crew.flush()
        check_update(errors, crew, shares, calls=window + 1, reduction=reduction)


def test_worker_without_micro_batches(crews: Crews, errors: Errors) -> None:
    """In the first window every worker but the first has nothing, in the second every
    one but the last, in the third all of them.
    """
    crew = crews()
    shares = on_first(
        crew.workers, *(Share(random_tree(MLP, seed), 1.0 + seed) for seed in range(2))
    )
    feed(crew, shares)
    crew.flush()
    check_update(errors, crew, shares, calls=1)
    shares.reverse()
    feed(crew, shares)
    crew.flush()
    check_update(errors, crew, shares, calls=2)
    before, parameters = crew.states(), crew.parameters()
    result = require_equal(crew)
    assert result.applied
    crew.flush()
    assert repr(require_equal(crew)) == repr(result._replace(applied=False))
    assert crew.states() == before
    assert all(same(*pair) for pair in zip(crew.parameters(), parameters, strict=True))


def test_missing_gradients_count_as_zero(crews: Crews, errors: Errors) -> None:
    """The first parameter has none on the last worker, the last parameter has none in
    the window's last micro-batches.
    """
    crew = crews()
    front, *_, back = MLP.parameter_shapes()
    for window in range(2):
        trees = [
            [random_tree(MLP, 10 * window + 2 * rank + index) for index in range(2)]
            for rank in range(crew.workers)
        ]
        shares = [[Share(first), Share({**last, back: None})] for first, last in trees]
        shares[-1] = [Share({**share.tree, front: None}) for share in shares[-1]]
        feed(crew, shares)
        crew.flush()
        check_update(errors, crew, shares, calls=window + 1)


def test_weight_of_zero_adds_nothing(crews: Crews, errors: Errors) -> None:
    """Not even where the gradient is NaN; a window without weight makes no update, and
    is no overflow.
    """
    crew = crews()
    nothing = Share(poisoned(random_tree(MLP, 9), math.nan), 0.0)
    shares: list[list[Share]] = [
        [Share(random_tree(MLP, rank), 2.0), nothing] for rank in range(crew.workers)
    ]
    shares[-1] = [nothing]
    feed(crew, shares)
    crew.flush()
    check_update(errors, crew, shares, calls=1)
    before = crew.parameters()
    feed(crew, [[nothing]] * crew.workers)
    crew.flush()
    result = require_equal(crew)
    assert (result.applied, result.skipped, result.overflow) == (False, True, False)
    assert same(crew.parameters()[0], before[0])


def test_bad_weight_is_refused_or_an_overflow(crews: Crews, errors: Errors) -> None:
    """Every worker raises, and what it held is still there. Compiled code, which cannot
    raise, skips the window on every worker.
    """
    crew = crews()
    shares = unequal(crew.workers)
    feed(crew, shares)
    before = crew.states()
    refusals = [
        crew.refusals([random_tree(MLP, 9)] * crew.workers, [weight] * crew.workers)
        for weight in (-1.0, math.nan)
    ]
    if any(refusals):
        assert all(
            text.startswith("ArgumentValueError: weight: expected")
            for texts in refusals
            for text in texts or ("none",)
        ), refusals
        assert crew.states() == before
        crew.flush()
        check_update(errors, crew, shares, calls=1)
    else:
        crew.flush()
        result = require_equal(crew)
        assert (result.applied, result.skipped, result.overflow) == (False, True, True)


def test_model_matches_the_large_batch(crews: Crews, errors: Errors) -> None:
    """With the framework's own forward and backward passes on unequal micro-batches,
    against the float64 oracle.
    """
    crew = crews()
    batch = standard_batch(MLP, 5 * crew.workers)
    pieces = cut(batch, (1, 4) * crew.workers)
    for index in range(2):
        row = pieces[index::2]
        crew.micro_batch(row, [piece.items for piece in row])
    crew.flush()
    require_equal(crew)
    _, truth = oracle.loss_and_gradient(MLP, make_weights(MLP), batch)
    bound = gamma(additions_in_gradient(MLP, batch.items, len(pieces)), "float32")
    errors.check("gradient", worst(crew.captured()[0].gradient or {}, truth), bound)


def test_half_precision_gradients_are_summed_in_float32(
    crews: Crews, errors: Errors
) -> None:
    """And so reduced. The large ones of the first and the last worker cancel, and what
    is left is below bfloat16's resolution of them.
    """
    crew = crews(dtype="bfloat16")
    sizes = [[2.0**-9, 2.0**-9] for _ in range(crew.workers)]
    sizes[0][0], sizes[-1][0] = 1.0, -1.0
    ones = {name: np.ones(shape) for name, shape in MLP.parameter_shapes().items()}
    shares = [
        [Share({name: size * array for name, array in ones.items()}) for size in own]
        for own in sizes
    ]
    feed(crew, shares)
    crew.flush()
    require_equal(crew)
    errors.check(
        "gradient",
        worst(crew.captured()[0].gradient or {}, expected(shares, "mean")),
        unit_roundoff("bfloat16"),
    )
